"""The executor `ray`: builds on cases are judged on the nodes of a Ray cluster, and each result comes back once.

Three kinds of process. The runner, which writes the results, starts a driver of its own for Ray: Ray prints, takes over
signals, and ends the process that cannot reach its head node, all of which is to be nobody else's trouble. The driver
starts a judge on every node, an actor that holds the Runner which the local executor has too, and hands out pairs of
build and case. Children are children of the judges: guard pages, limits and time-outs are those of a run without Ray,
and what a kernel does to its child is a result like any other.

A pair belongs to one call at a time. A call gives its result, or Ray says that it never will, for its node or its judge
is gone: then the pair goes back to the front of the queue. So no result is lost, and none comes twice.

A verdict is of one device, one mxgate and one set of sources: a node that has others ends the run before it has judged
anything. What a run takes of a node is as many cores as it has jobs there, and all its GPUs if a build may use one.

This module imports the rest of ours late: a judge's environment must be set before NumPy comes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mxgate.conformance.case import Case
    from mxgate.conformance.runner import Crew, Pair
    from mxgate.conformance.settings import Settings
    from mxgate.conformance.verdict import CaseResult
    from mxgate.kernels.build import Build

ADDRESS = "RAY_ADDRESS"  # in the environment: which cluster, as all of Ray's own commands take it
LOST = 3  # calls for a pair that may be lost before the pair is given up, and judges of a node before the node is
START = 60.0  # seconds within which Ray is imported
CONNECT = 20.0  # seconds within which a cluster answers then
READY = 120.0  # seconds within which some node has cores to spare and a judge at work
_JOIN = 2.0  # seconds between two looks for new nodes
_LEAVE = 10.0  # seconds that the driver has for leaving the cluster
_AGAIN = "the same command goes on from here"
_START = "import sys; sys.path[:] = filter(None, sys.path); from mxgate.conformance.cluster import main; main()"
_JUDGES_HAVE = {"OPENBLAS_NUM_THREADS": "1"}  # the threads of a judge keep its cores busy


class ClusterError(RuntimeError):
    """Why a cluster cannot judge, or not go on: one line."""


@dataclass(frozen=True)
class Plan:
    """What driver and judges are told. environment, folder: the runner's, as far as a build may depend on them."""

    settings: Settings
    builds: tuple[Build, ...]
    cases: tuple[Case, ...]
    environment: Mapping[str, str]
    folder: str


@dataclass(frozen=True)
class Place:
    """What a machine says of itself: before it judges, all of this must be the same everywhere.

    code: of mxgate, Python and NumPy. identities, fingerprints, devices: of each build by its id. lacking: a file that
    is not there. unloadable: why no build from outside can be loaded.
    """

    name: str
    code: str
    identities: Mapping[str, str]
    fingerprints: Mapping[str, str]
    devices: Mapping[str, str]
    lacking: str | None = None
    unloadable: str | None = None


def place(name: str, plan: Plan) -> Place:
    """This machine, for a plan."""
    from mxgate.conformance import recorded
    from mxgate.conformance.machine import device_of
    from mxgate.conformance.version import code_version
    from mxgate.fixtures.store import StoreError
    from mxgate.kernels.build import BuildError

    identities: dict[str, str] = {}
    fingerprints: dict[str, str] = {}
    lacking = None
    try:
        for build in plan.builds:
            identities[build.id], fingerprints[build.id] = build.identity(), build.fingerprint()
        for file in {case.source for case in plan.cases if case.source}:
            if not {c.id for c in plan.cases if c.source == file} <= {c.id for c in recorded.cases(Path(file))}:
                lacking = f"{file} holds other calls"
    except (BuildError, StoreError) as error:
        lacking = str(error)
    return Place(name, code_version(), identities, fingerprints, {b.id: device_of(b) for b in plan.builds}, lacking)


def differs(here: Place, first: Place, other: Place) -> str | None:
    """Why a node cannot judge along with the first one, for the runner's machine; None when it can."""
    if other.code != here.code:
        return f"{other.name} has another version of mxgate, Python or NumPy than this machine: install the same on all"
    if other.lacking is not None:
        return f"{other.name}: {other.lacking}; every node needs the same files in the same places as this machine"
    for name, identity in here.identities.items():
        if other.identities[name] != identity:
            return f"{name} has other sources or packages on {other.name} than here: install the same on all"
    for name, device in first.devices.items():
        if other.devices[name] != device:
            both = f"{first.name} has {device}, {other.name} has {other.devices[name]}"
            return f"{both}: a verdict is of one device, so judge on nodes of one kind"
    return None


# ---------------------------------------------------------------------------------------------------------------------
# The runner's side


@contextlib.contextmanager
def on_ray(
    builds: Sequence[Build], cases: Sequence[Case], settings: Settings, stop: threading.Event | None
) -> Iterator[Crew]:
    """The nodes of the cluster at RAY_ADDRESS, or of the one that this machine is in.

    Raises ClusterError when there is none, when its nodes are not alike, and when none is left; Stopped.
    """
    from mxgate.conformance.runner import Crew
    from mxgate.kernels.build import EMULATE

    if importlib.util.find_spec("ray") is None:
        raise ClusterError("--executor ray needs ray, which is not installed: pip install 'mxgate[cluster]'")
    address = os.environ.get(ADDRESS) or "auto"
    _answers(address)
    environment = {**_JUDGES_HAVE, **({EMULATE: os.environ[EMULATE]} if EMULATE in os.environ else {})}
    plan = Plan(settings, tuple(builds), tuple(cases), environment, os.getcwd())
    ours, theirs = Pipe()
    driver = subprocess.Popen(
        [sys.executable, "-c", _START, str(theirs.fileno()), address],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(theirs.fileno(),),
        start_new_session=True,
    )
    theirs.close()
    try:
        hear = _Ear(ours, stop or threading.Event())
        ours.send(plan)
        hear(START, f"Ray could not be imported within {START:g} s")
        hear(CONNECT, f"no Ray cluster answered at {address} within {CONNECT:g} s")
        free = f"{settings.jobs} free cores" if settings.jobs else "all its cores free (or --jobs of them)"
        first: Place = hear(READY, f"no node of the Ray cluster was ready within {READY:g} s: it must have {free}")

        def judge(pairs: Sequence[Pair], before: Mapping[str, int]) -> Iterator[CaseResult]:
            ours.send((list(pairs), dict(before)))
            while (result := hear()) is not None:
                yield result

        yield Crew(first.fingerprints, first.devices, judge)
    finally:
        ours.close()
        try:
            driver.wait(_LEAVE)
        except subprocess.TimeoutExpired:
            driver.kill()
            driver.wait()


def _answers(address: str) -> None:
    """ClusterError when nobody listens at an address: Ray itself takes most of a minute to say so."""
    if address == "auto":
        return
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdecimal():
        raise ClusterError(f"{ADDRESS} is {address!r}; expected HOST:PORT, as `ray start --head` prints it")
    try:
        socket.create_connection((host.strip("[]"), int(port)), 5.0).close()
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise ClusterError(f"no Ray cluster answers at {address} ({ADDRESS}): {why}") from None


@dataclass
class _Ear:
    """What the driver says next: called with how long that may take, and what is wrong if it takes longer."""

    channel: Connection
    stop: threading.Event

    def __call__(self, seconds: float = float("inf"), late: str = "") -> Any:
        from mxgate.conformance.child import Stopped

        deadline = time.monotonic() + seconds
        while not self.channel.poll(0.2):
            if self.stop.is_set():
                raise Stopped
            if time.monotonic() > deadline:
                raise ClusterError(late)
        try:
            said = self.channel.recv()
        except (EOFError, OSError):
            raise ClusterError(f"the connection to the Ray cluster is lost; {_AGAIN}") from None
        if isinstance(said, BaseException):
            raise said
        return said


# ---------------------------------------------------------------------------------------------------------------------
# On a node


class Judge:
    """The actor: a Runner, for as many calls at a time as it has jobs."""

    def __init__(self, name: str, jobs: int, environment: Mapping[str, str], plan: bytes) -> None:
        os.environ.update(environment)
        from mxgate.conformance.runner import Runner

        self._plan: Plan = pickle.loads(plan)
        self._name = name
        with contextlib.suppress(OSError):  # what is missed there, `place` says
            os.chdir(self._plan.folder)
        self._runner = Runner(replace(self._plan.settings, jobs=jobs), name=name)
        threading.Thread(target=_go_with, args=(os.getppid(),), daemon=True).start()

    def place(self) -> Place:
        from mxgate.conformance.runner import unloadable

        why = unloadable(self._plan.builds, self._plan.settings.limits)
        return replace(place(self._name, self._plan), unloadable=why)

    def examine(self, build: Build, case: Case) -> CaseResult:
        """The result. The driver counts hangs, for all nodes together."""
        self._runner.count_hangs({})
        # On the runner's own threads, which last as long as its children are to.
        ((_, result),) = self._runner.each(lambda pair: self._runner.examine(*pair)[0], [(build, case)])
        return result


def _go_with(raylet: int) -> None:
    """End this process, and so its children, soon after the one that started it: Ray lets calls run on."""
    while os.getppid() == raylet:
        time.sleep(1.0)
    os._exit(1)


# ---------------------------------------------------------------------------------------------------------------------
# The driver


@dataclass(eq=False)
class _Node:
    """A judge at work. slots: calls it takes at a time. case: the last one that it was given."""

    id: str
    name: str
    judge: Any
    slots: int
    place: Place | None = None
    busy: int = 0
    case: str = ""


@dataclass
class _Driver:
    """The judges, what is to be judged, and the calls under way: (judge, pair), the pair None for the judge's place."""

    ray: Any
    channel: Connection
    plan: Plan
    here: Place
    nodes: list[_Node] = field(default_factory=list)
    first: Place | None = None
    pairs: deque[Pair] | None = None  # None: the runner has not said yet
    calls: dict[Any, tuple[_Node, Pair | None]] = field(default_factory=dict)
    lost: Counter[tuple[str, str] | str] = field(default_factory=Counter)
    hangs: Counter[str] = field(default_factory=Counter)


def main() -> None:
    """In the driver's process: speak with the runner through the pipe whose number is the first argument."""
    channel, address = Connection(int(sys.argv[1])), sys.argv[2]
    try:
        plan: Plan = channel.recv()
        import ray

        channel.send("imported")
        # Ray would put this folder on the path of every judge, and a file random.py in it would be theirs.
        os.chdir("/")
        try:
            ray.init(address, log_to_driver=False, configure_logging=False)
        except Exception as error:
            raise ClusterError(f"no Ray cluster at {address}: {' '.join(str(error).split())[:200]}") from None
        os.chdir(plan.folder)
        channel.send("connected")
        driver = _Driver(ray, channel, plan, place("this machine", plan))
        try:
            _drive(driver)
        finally:
            for node in driver.nodes:
                ray.kill(node.judge)
            ray.shutdown()
    except EOFError:
        pass  # the runner is gone or has had enough
    except Exception as error:
        from mxgate.fixtures.store import StoreError
        from mxgate.kernels.build import BuildError

        known = isinstance(error, ClusterError | BuildError | StoreError)
        with contextlib.suppress(OSError):
            channel.send(error if known else RuntimeError(traceback.format_exc()))


def _drive(driver: _Driver) -> None:
    """Until every pair has its result. Raises EOFError when the runner has gone, ClusterError."""
    looked = -_JOIN
    while True:
        if driver.channel.poll():
            pairs, before = driver.channel.recv()
            driver.pairs, driver.hangs = deque(pairs), Counter(before)
        if time.monotonic() - looked > _JOIN:
            _join(driver)
            looked = time.monotonic()
        _hand_out(driver)
        if driver.pairs is not None and not driver.pairs and all(pair is None for _, pair in driver.calls.values()):
            driver.channel.send(None)
            return
        if not driver.calls:
            time.sleep(0.1)
            continue
        for call in driver.ray.wait(list(driver.calls), timeout=0.2)[0]:
            _take(driver, call)


def _join(driver: _Driver) -> None:
    """A judge on every node that has none and may have one."""
    from mxgate.conformance.machine import may_use_gpu
    from mxgate.kernels.gpu import is_gpu

    ray, plan = driver.ray, driver.plan
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
    having = [node for node in nodes if node["Resources"].get("GPU", 0) >= 1]
    if having and any(is_gpu(build.device) for build in plan.builds):
        nodes = having
    nodes = [node for node in nodes if driver.lost[node["NodeID"]] < LOST]
    if not nodes and not driver.calls:
        raise ClusterError(f"the Ray cluster has no node left with a core to spare; {_AGAIN}")
    for node in nodes:
        if node["NodeID"] in {other.id for other in driver.nodes}:
            continue
        cores = int(node["Resources"]["CPU"])
        jobs = min(plan.settings.jobs or cores, cores)
        given = node["NodeName"]
        name = given if given != node["NodeManagerAddress"] else node["NodeManagerHostname"].partition(".")[0]
        options = {
            "num_cpus": jobs,
            "num_gpus": int(node["Resources"].get("GPU", 0)) if any(map(may_use_gpu, plan.builds)) else 0,
            "max_concurrency": jobs + 1,
            "scheduling_strategy": ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
                node["NodeID"], soft=False
            ),
        }
        judge = ray.remote(Judge).options(**options).remote(name, jobs, dict(plan.environment), pickle.dumps(plan))
        joined = _Node(node["NodeID"], name, judge, jobs)
        driver.nodes.append(joined)
        driver.calls[judge.place.remote()] = joined, None


def _hand_out(driver: _Driver) -> None:
    """Keep every judge busy: with the case that it has at hand while there is more of it, then one that nobody has."""
    from mxgate.conformance.runner import HANGS, HUNG, not_run

    pairs = driver.pairs
    while pairs:
        free = [node for node in driver.nodes if node.place is not None and node.busy < node.slots]
        if not free:
            return
        node = min(free, key=lambda node: node.busy / node.slots)
        others = {other.case for other in driver.nodes}
        of_case = (i for i, (_, case) in enumerate(pairs) if case.id == node.case)
        of_nobody = (i for i, (_, case) in enumerate(pairs) if case.id not in others)
        index = next(of_case, next(of_nobody, 0))
        build, case = pairs[index]
        del pairs[index]
        assert node.place is not None
        if driver.hangs[build.id] >= HANGS:
            driver.channel.send(not_run(build, case, node.place.fingerprints[build.id], HUNG))
            continue
        node.busy, node.case = node.busy + 1, case.id
        driver.calls[node.judge.examine.remote(build, case)] = node, (build, case)


def _take(driver: _Driver, call: Any) -> None:
    """What a call came to: a place, a result, or the loss of its judge."""
    from mxgate.conformance.runner import not_run

    ray = driver.ray
    node, pair = driver.calls.pop(call)
    node.busy -= pair is not None
    try:
        answer = ray.get(call)
    except ray.exceptions.RayTaskError as error:  # ours: what the judge raised
        raise (error.cause or error) from None
    except ray.exceptions.RayError as error:
        if pair is None and "creation task" in str(error):
            raise ClusterError(f"{node.name} cannot judge: {str(error).strip().splitlines()[-1]}") from None
        if node in driver.nodes:
            driver.nodes.remove(node)
            driver.lost[node.id] += 1
            ray.kill(node.judge)  # Ray may have lost sight of it alone
        if pair is None:
            return
        build, case = pair
        driver.lost[build.id, case.id] += 1
        if driver.lost[build.id, case.id] < LOST:
            assert driver.pairs is not None
            driver.pairs.appendleft(pair)
        else:
            assert driver.first is not None
            why = f"{LOST} nodes were lost while they judged it"
            driver.channel.send(not_run(build, case, driver.first.fingerprints[build.id], why))
        return
    if pair is None:
        _admit(driver, node, answer)
        return
    result: CaseResult = answer
    driver.hangs[result.build] += result.hung
    driver.channel.send(result)


def _admit(driver: _Driver, node: _Node, place: Place) -> None:
    """Give a node work. Raises ClusterError when it is not as the first one, or not as the runner's machine."""
    if (problem := differs(driver.here, driver.first or place, place)) is not None:
        raise ClusterError(problem)
    if place.unloadable is not None:
        raise ClusterError(place.unloadable)
    node.place = place
    if driver.first is None:
        driver.first = place
        driver.channel.send(place)
