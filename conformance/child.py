"""A child process from the runner's side: starting one, its limits, and how it answers launches.

The runner never imports a build. It starts a Python of its own with worker.py in a session of its own and talks to it
over a socket, so whatever the build prints, forks, leaks, closes, raises or overwrites stays in that session, and
the session is killed as a whole. A child loads one build, once; a "fresh" launch is one more child.

Children run their BLAS on one thread: the runner keeps the cores busy with several of them, and "the same bytes again"
then means the same thing on every machine.

What this does not stop: a build that means harm. It isolates mistakes, it is not a sandbox.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from mxgate.conformance.case import Case
from mxgate.conformance.channel import CLOSED, receive, send
from mxgate.conformance.complaint import obituary
from mxgate.conformance.launch import Array, Launch, LaunchSpec, Operands, bytes_of, digest, launches_flydsl
from mxgate.conformance.machine import VISIBLE
from mxgate.kernels.build import OPS, Build
from mxgate.kernels.gpu import is_emulated, is_gpu
from mxgate.kernels.tensors import dtype_of

NO_ANSWER = "no answer within"  # how the error of a launch that ran into the time limit begins
REPLACED = "replaced"  # the variant of the operands that a captured launch is replayed with
GIB = 1 << 30
# How often a child may have a case's operands and result in memory before it counts: as they came, in their planes, on
# the way to a device and back. It matters where those are GiB themselves.
COPIES = 4
_TAIL = 4000  # bytes of what a build printed that are kept
_STEP = 0.02  # seconds between two looks at a busy child's memory
_CALLS = 10_000_000  # calls a second that no build reaches: a bound on how many times a child may report
# `-m` would put the working directory first on the path, and a file random.py in it would be every child's.
_START = "import sys; sys.path[:] = filter(None, sys.path); from mxgate.conformance.worker import main; main()"


@dataclass(frozen=True)
class Limits:
    """seconds: the longest that one launch may take. memory: GiB of resident memory of the child, besides
    its case's arrays (COPIES)."""

    seconds: float = 60.0
    memory: float = 8.0


class ChildError(Exception):
    """Why a child gave no answer, as the words of Launch.error. The child is gone."""


class Stopped(Exception):
    """The run is being stopped; the launch that was under way counts for nothing."""


def _environment(build: Build, gpu: str | None) -> dict[str, str]:
    one = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
    # Without glibc's per-thread cache every malloc, however small, honours M_PERTURB.
    interpreted = {"TRITON_INTERPRET": str(int(build.device == "interpreter"))}
    return {
        **os.environ,
        **(interpreted if build.device == "interpreter" or is_gpu(build.device) else {}),
        **dict.fromkeys(one, "1"),
        **({VISIBLE: gpu} if gpu is not None else {}),
        "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0",
        "PYTHONUNBUFFERED": "1",
    }


class Child:
    """One child process with one build loaded.

    keywords: the optional keywords (`out`, `out_dtype`, `bias`, `format`, `seed`, `model`) that its callable takes.
    gpu: the only one that it sees, as CUDA_VISIBLE_DEVICES names it; None for what this process sees. Raises ChildError
    when the build cannot be loaded, Stopped when `stop` is set meanwhile. Close it when done; a dead child closes
    itself.
    """

    def __init__(
        self, build: Build, limits: Limits, stop: threading.Event | None = None, gpu: str | None = None
    ) -> None:
        self.build, self.limits, self.stop, self.gpu = build, limits, stop or threading.Event(), gpu
        self._closed = False
        self._case, self._number = "", 0
        self._known: set[str] = set()
        self._given = self._held = 0  # bytes of this case's operands; the most that any case's and its result take
        self._tail = b""
        ours, theirs = socket.socketpair()
        self._socket = ours
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(theirs.fileno(),),
            env=_environment(build, gpu),
            start_new_session=True,
        )
        theirs.close()
        assert self._process.stdout is not None
        self._printed = self._process.stdout.fileno()
        os.set_blocking(self._printed, False)
        ours.settimeout(max(limits.seconds, 30.0))  # for a child that stops reading; answers have their own deadline
        reply, _ = self._ask({"do": "load", "build": asdict(build)}, (), max(limits.seconds, 60.0))
        if "error" in reply:
            self.close()
            raise ChildError(str(reply["error"]))
        self.keywords: frozenset[str] = frozenset(reply["keywords"])

    @property
    def alive(self) -> bool:
        return not self._closed and self._process.poll() is None

    def launch(self, case: Case, spec: LaunchSpec, operands: Operands) -> Launch:
        """Call the build once. Never raises for anything that the build does; Stopped when the run is stopped."""
        if spec.model is not None and "model" not in self.keywords and not launches_flydsl(self.build):
            return Launch(spec, f"takes no keyword model, as {spec.model} needs", (), "", unavailable=True)
        return self._launch(case, spec, operands)

    def replay(self, case: Case, given: Operands, other: Case, replaced: Operands) -> tuple[Launch, Launch]:
        """A launch of a GPU build on `given`, captured in a graph and replayed after `replaced` was written over its
        operands; and a plain call on `replaced`, both as launches of `other`.

        other: a case with the buffers of `case`. As `launch` otherwise. A child whose launch cannot be captured ends.
        """
        again, plain = LaunchSpec("replayed"), LaunchSpec("on other operands")
        try:
            self._upload(case, again.variant, given)
            self._upload(case, REPLACED, replaced, other)
        except ChildError as error:
            return Launch(again, str(error), (), ""), Launch(plain, str(error), (), "")
        first = self._launch(other, plain, replaced, {"variant": REPLACED})
        return self._launch(other, again, replaced, {"variant": REPLACED, "captured": again.variant}), first

    def _launch(
        self, case: Case, spec: LaunchSpec, operands: Operands, what: Mapping[str, Any] | None = None
    ) -> Launch:
        """what: of the request, where the operands are there already."""
        try:
            if what is None:
                self._upload(case, spec.variant, operands)
            shape, dtype = _result(case, operands)
            self._held = max(self._held, self._given + int(np.prod(shape)) * dtype_of(dtype).itemsize)
            asked = {
                "do": "call",
                "variant": spec.variant,
                "fill": spec.fill,
                "out": spec.out if "out" in self.keywords else "none",
                "out_dtype": self.asked_type(case),
                "shape": shape,
                "dtype": dtype,
                "seed": _seed(case, spec) if is_emulated(self.build.device) else None,
                "model": spec.model,
                "work": case.op == "quantize" or case.tokens > 0,
                "most": _most(shape),
                "captured": None,
                **(what or {}),
            }
            reply, blobs = self._ask(asked, (), self.limits.seconds, _most(shape))
        except ChildError as error:
            return Launch(spec, str(error), (), "")
        if "error" in reply:
            if reply["spoilt"]:
                self.close()
            return Launch(spec, str(reply["error"]), (), "", unavailable=reply["unavailable"])
        output = tuple(
            blob.view(dtype_of(part["dtype"])).reshape(part["shape"])
            for part, blob in zip(reply["parts"], blobs, strict=True)
        )
        return Launch(
            spec=replace(spec, out=str(asked["out"])),
            error=None,
            output=output,
            digest=digest(output),
            canaries=reply["canaries"],
            inputs_changed=tuple(reply["inputs_changed"]),
            aliases=reply["aliases"],
        )

    def asked_type(self, case: Case) -> str | None:
        """The output type to ask for: None for bfloat16, and for the only one of a callable that cannot be asked."""
        only = "out_dtype" not in self.keywords and self.build.out_dtypes == (case.out_dtype,)
        return None if only or case.op == "quantize" or case.out_dtype == "bfloat16" else case.out_dtype

    def clock(self, case: Case, variant: str, operands: Operands, seconds: float) -> tuple[list[float], str]:
        """Call the build over and over for that long: the time of each call in seconds, and the last output's digest.

        Raises ChildError."""
        self._upload(case, variant, operands)
        asked = {"do": "clock", "variant": variant, "seconds": seconds, "out_dtype": self.asked_type(case)}
        limit = self.limits.seconds + seconds
        reply, blobs = self._ask(asked, (), limit, int(limit * _CALLS) * 8)
        if "error" in reply:
            raise ChildError(str(reply["error"]))
        return blobs[0].view(np.float64).tolist(), str(reply["digest"])

    def figures(self) -> dict[str, dict[str, int]]:
        """Of the last launch of a build that launches through FlyDSL on the emulator: what each kernel's machine code
        costs (gfx950.ledger.launched). Raises ChildError."""
        reply, _ = self._ask({"do": "figures"}, (), self.limits.seconds)
        if "error" in reply:
            raise ChildError(str(reply["error"]))
        return dict(reply["kernels"])

    def printed(self) -> str:
        """The end of what the build has printed."""
        if not self._closed:
            self._drain()
        return self._tail.decode(errors="replace")

    def close(self) -> None:
        """Kill the whole session and wait for the child. Once is enough: the number may be another process's later."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._drain()
        self._socket.close()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _upload(self, case: Case, variant: str, operands: Operands, of: Case | None = None) -> None:
        """of: the case whose tokens the operands hold, if it is another one."""
        if case.id != self._case:
            self._case, self._known, self._given = case.id, set(), 0
            self._number += 1
        if variant in self._known:
            return
        named: dict[str, Any] = {**operands.arrays, **(operands.extra or {})}
        arrays = {name: value for name, value in named.items() if isinstance(value, np.ndarray)}
        header = {
            "do": "operands",
            "case": self._number,  # the build has no business knowing which case it is given
            "variant": variant,
            "values": {name: value for name, value in named.items() if name not in arrays},
            "keywords": list(operands.extra or {}),
            "order": list(operands.arrays),
            "arrays": [
                {"name": name, "dtype": a.dtype.name, "shape": a.shape, "tokens": _tokens(of or case, name, arrays)}
                for name, a in arrays.items()
            ],
        }
        self._given += sum(a.nbytes for a in arrays.values())
        self._held = max(self._held, self._given)
        reply, _ = self._ask(header, [bytes_of(a) for a in arrays.values()], self.limits.seconds)
        if "error" in reply:
            raise ChildError(str(reply["error"]))
        self._known.add(variant)

    def _ask(
        self, header: Mapping[str, Any], blobs: Sequence[Array], seconds: float, most: int = 0
    ) -> tuple[dict[str, Any], list[Array]]:
        if self._closed:
            raise ChildError("had already ended")
        try:
            send(self._socket, header, blobs)
            deadline = time.monotonic() + seconds
            return receive(functools.partial(self._fill, deadline, seconds), most)
        except (Stopped, ChildError):
            self.close()
            raise
        except TimeoutError:
            self.close()
            raise ChildError("stopped reading its operands") from None
        except (OSError, EOFError):
            raise ChildError(self._obituary()) from None
        except (ValueError, KeyError, TypeError):
            self.close()
            raise ChildError("wrote over the channel to the runner: its answer cannot be read") from None

    def _fill(self, deadline: float, seconds: float, into: memoryview) -> None:
        """Read exactly len(into) bytes, watching the clock, the memory, the process and what it prints."""
        done, look = 0, time.monotonic() + _STEP
        while done < len(into):
            watched: list[Any] = [self._socket, self._printed]
            ready = select.select(watched, [], [], _STEP)[0]
            if self._printed in ready and not self._drain():
                # Its end of the pipe is closed: no use in asking again, so sleep on the socket alone.
                ready = select.select([self._socket], [], [], _STEP)[0]
            if self._socket in ready:
                got = self._socket.recv_into(into[done:])
                if got == 0:
                    raise EOFError
                done += got
            # Bytes that are ready are no excuse: a child may send them one by one for ever.
            if self._socket in ready and time.monotonic() < look:
                continue
            look = time.monotonic() + _STEP
            if self.stop.is_set():
                raise Stopped
            if self._socket not in ready and self._process.poll() is not None:
                raise EOFError
            if time.monotonic() > deadline:
                raise ChildError(f"{NO_ANSWER} {seconds:g} s")
            if resident(self._process.pid) > self.limits.memory * GIB + COPIES * self._held:
                raise ChildError(f"exceeded {self.limits.memory:g} GiB")

    def _drain(self) -> bool:
        """Keep the end of what was printed; False once nothing more can come."""
        try:
            while text := os.read(self._printed, 65536):
                self._tail = (self._tail + text)[-_TAIL:]
        except BlockingIOError:
            return True
        except (OSError, ValueError):
            pass
        return False

    def _obituary(self) -> str:
        """Why the child ended, in words."""
        try:
            status = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            status = CLOSED
        self.close()
        return obituary(status, self.printed())


def _result(case: Case, operands: Operands) -> tuple[tuple[int, ...], str]:
    """The shape of what the op gives on these operands (quantize: of its elements), and its dtype."""
    arrays = operands.arrays
    if case.op == "forward":
        return (arrays["x"].shape[0], arrays["w"].shape[1]), case.out_dtype
    if case.op == "dgrad":
        return (arrays["dy"].shape[0], arrays["w"].shape[2]), case.out_dtype
    if case.op == "wgrad":
        return (len(arrays["offsets"]), arrays["dy_t"].shape[0], arrays["x_t"].shape[0]), case.out_dtype
    return arrays["x"].shape, "uint8"


def _seed(case: Case, spec: LaunchSpec) -> int:
    """What an emulated launch draws its order of workgroups and waves from: no two launches of a case have the same."""
    return zlib.crc32(f"{case.id} {spec.label}".encode())


def _most(shape: tuple[int, ...]) -> int:
    """Bytes above which something is no result of that shape, whatever its dtype; a wrong one may be larger."""
    return 32 * int(np.prod(shape)) + (1 << 20)


def _tokens(case: Case, name: str, arrays: Mapping[str, Array]) -> tuple[int, int] | None:
    """(axis, end) of the part of an operand that holds tokens, or None when all of it counts."""
    op = OPS[case.op]
    axis = op.padded.get(name)
    if axis is None or arrays[name].shape[axis] == 0:
        return None
    block = arrays[op.operands[0]].shape[axis] // arrays[name].shape[axis]
    return axis, min(arrays[name].shape[axis], -(-case.tokens // block))


def resident(pid: int) -> int:
    """Bytes of resident memory of a process; 0 when it is gone."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE
    except FileNotFoundError:
        if os.path.isdir("/proc/self"):
            return 0
    except (OSError, IndexError, ValueError):
        return 0
    answer = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return int(answer.stdout.strip() or 0) * 1024
