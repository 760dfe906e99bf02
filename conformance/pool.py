"""The children of a run: those at work, those that wait with their build loaded, and which GPU each of them sees."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping

from mxgate.conformance import machine
from mxgate.conformance.child import Child, Limits, Stopped
from mxgate.kernels.build import Build

IDLE = 64  # children kept waiting: more than an op has builds, or what a build keeps between cases would not show


class Pool:
    """Children for many threads.

    Where this machine has several GPUs of one kind, a thread that holds a lease has the one with the fewest at work,
    and the children that it borrows see no other. limits: of a child; own: those of single builds, by id. stop: once it
    is set, no child begins any more.
    """

    def __init__(self, limits: Limits, own: Mapping[str, Limits], stop: threading.Event) -> None:
        self._limits, self._own, self._stop = limits, own, stop
        self._lock = threading.Lock()
        self._idle: list[Child] = []
        self._all: set[Child] = set()
        self._at_work = dict.fromkeys(machine.shared_out(), 0)
        self._here = threading.local()  # gpu: the one that this thread has

    def borrow(self, build: Build, *, fresh: bool = False) -> Child:
        """A child with the build loaded: an idle one, or a new one. Raises ChildError, Stopped."""
        if self._stop.is_set():
            raise Stopped
        with self._lock:
            for child in self._idle if not fresh else ():
                if child.build == build and child.gpu == self.gpu and child.alive:
                    self._idle.remove(child)
                    return child
        child = Child(build, self._own.get(build.id, self._limits), self._stop, self.gpu)
        with self._lock:
            self._all.add(child)
        return child

    def give_back(self, child: Child, *, keep: bool = True) -> None:
        with self._lock:
            if keep and child.alive:
                self._idle.append(child)
            spare = [] if keep and child.alive else [child]
            while len(self._idle) > IDLE:
                spare.append(self._idle.pop(0))
            self._all.difference_update(spare)
        for one in spare:
            one.close()

    @contextlib.contextmanager
    def lease(self, build: Build) -> Iterator[None]:
        """The GPU with the fewest at work is this thread's meanwhile; of several one where a child waits already."""
        if not self._at_work or not machine.may_use_gpu(build):
            yield
            return
        with self._lock:
            warm = {child.gpu for child in self._idle if child.build == build}
            gpu = min(self._at_work, key=lambda name: (self._at_work[name], name not in warm))
            self._at_work[gpu] += 1
        self._here.gpu = gpu
        try:
            yield
        finally:
            self._here.gpu = None
            with self._lock:
                self._at_work[gpu] -= 1

    @property
    def gpu(self) -> str | None:
        """The one that this thread has; None without a lease, or where children see what this process sees."""
        return getattr(self._here, "gpu", None)

    def close(self) -> None:
        """End every child."""
        with self._lock:
            for child in self._all:
                child.close()
            self._all.clear()
            self._idle.clear()
