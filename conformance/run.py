"""The runner: builds x cases -> launches in children -> evidence -> gates -> one line of JSON each, as they come.

Work is ordered by case, so that every build of an op shares the case's operands and its exact answer; threads drive the
children. A build on a case is the unit of work: an executor (EXECUTORS) judges the units, on this machine or on others,
and each result comes back to the one process that writes.

A result is one line of results.jsonl, written whole and synced before the next begins: a run that is killed at any
moment leaves at most one torn line, which the next run cuts off. A line counts again only under the same stamp (tier,
limits, gates, and a hash of the oracle's and the gates' own source), the same build fingerprint and on the same device.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import math
import os
import platform
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

import mxgate.oracle
from mxgate.conformance import case as case_module
from mxgate.conformance import data, gates, machine
from mxgate.conformance.case import Case
from mxgate.conformance.launch import Evidence, Launch, LaunchSpec, Operands
from mxgate.conformance.verdict import GATES, CaseResult, Finding, Outcome, Verdict, judge
from mxgate.conformance.worker import Child, ChildError, Limits, Stopped
from mxgate.fixtures import MANIFEST, store
from mxgate.kernels import build as build_module
from mxgate.kernels.build import Build, registry
from mxgate.kernels.gpu import is_gpu

HANGS = 2  # cases that may run into the time limit before the rest of a build's cases are given up
IDLE = 64  # children kept waiting: more than an op has builds, or what a build keeps between cases would not show
BULKY = 64 << 20  # operand bytes above which the operands of a case's poisons are not all kept


Item = TypeVar("Item")
Found = TypeVar("Found")


@dataclass(frozen=True)
class Settings:
    """How to run. shard: (i, n), 1 <= i <= n. gates: those that may reject; fewer than all is never an Accept.

    jobs: children at work at a time on a machine; None for one a core.
    """

    tier: str = "smoke"
    jobs: int | None = 1
    shard: tuple[int, int] = (1, 1)
    limits: Limits = field(default_factory=Limits)
    gates: tuple[str, ...] = GATES
    fresh: bool = False

    @property
    def stamp(self) -> str:
        """What a result depends on besides the build and the case."""
        only = "all" if self.gates == GATES else "+".join(self.gates)
        return f"{self.tier} {self.limits.seconds:g}s {self.limits.memory:g}GiB {only} {code_version()}"


# What a result depends on besides the build: all that judging imports, as the tests see to. Left out is what only names
# the machine, hands out work or makes records of builds; the emulator is in the fingerprints of the builds it runs.
_JUDGING: Mapping[str, str] = {
    str(mxgate.oracle.__file__): "bound exact formats freivalds gemm groups layouts quantize scales",
    __file__: "case data gates launch layout poison recorded run verdict where worker",
    str(build_module.__file__): "build declared gpu tensors",
    str(store.__file__): "store",
}


@functools.cache
def code_version() -> str:
    """A hash of everything besides a build that a result depends on: our own source, Python and the machine type."""
    total = hashlib.sha256(f"{platform.python_version()} {platform.machine()} {np.__version__}".encode())
    files = (Path(at).with_name(f"{name}.py") for at, names in _JUDGING.items() for name in names.split())
    for path in (*files, MANIFEST):
        total.update(path.name.encode() + path.read_bytes())
    return total.hexdigest()[:16]


# ---------------------------------------------------------------------------------------------------------------------
# results.jsonl

Key = tuple[str, str, str, str]  # build, fingerprint, case, stamp


def to_line(result: CaseResult, stamp: str) -> str:
    """A result as one line of JSON."""
    record = {
        "build": result.build,
        "fingerprint": result.fingerprint,
        "case": result.case,
        "stamp": stamp,
        "outcome": result.outcome.value,
        "gates": {gate: outcome.value for gate, outcome in result.gates.items()},
        "findings": [
            {
                "gate": f.gate,
                "what": f.what,
                "where": list(f.where),
                "count": int(f.count),
                "detail": f.detail,
                "inconclusive": f.inconclusive,
            }
            for f in result.findings
        ],
        "seconds": round(result.seconds, 4),
        "skipped": result.skipped,
        "device": result.device,
        "machine": result.machine,
    }
    return json.dumps(_plain(record), allow_nan=False)


_Types = Mapping[str, tuple[type, ...]]
# What a record holds, and each of its findings: of which types.
_RECORD: _Types = {
    **dict.fromkeys(("build", "fingerprint", "case", "stamp", "device", "machine"), (str,)),
    "gates": (dict,),
    "findings": (list,),
    "seconds": (int, float),
    "skipped": (str, type(None)),
}
_FINDING: _Types = {
    **dict.fromkeys(("gate", "what"), (str,)),
    "where": (list,),
    "count": (int,),
    "detail": (dict,),
    "inconclusive": (bool,),
}


class NoResultError(ValueError):
    """What a line is or has that no result has, as what follows "line 7": "has no 'device'".

    record: whether it is a whole record all the same, as of another version of mxgate.
    """

    def __init__(self, why: str, *, record: bool = True) -> None:
        super().__init__(why)
        self.record = record


def from_line(line: str | bytes) -> tuple[Key, CaseResult]:
    """The inverse of to_line. Raises NoResultError for anything that to_line does not write."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise NoResultError("is no JSON", record=False) from None
    _check(record, _RECORD)
    for f in record["findings"]:
        _check(f, _FINDING, " in a finding")
        if f["gate"] not in GATES:
            raise NoResultError(f"has a finding of a gate {f['gate']!r}")
        if not all(isinstance(text, str) for text in f["where"]):
            raise NoResultError("has a 'where' in a finding of another type")
    words = [outcome.value for outcome in Outcome]
    for gate, word in record["gates"].items():
        if gate not in GATES or word not in words:
            raise NoResultError(f"has {word!r} of a gate {gate!r}")
    if not record["gates"] and record["skipped"] is None:
        raise NoResultError("has no gate's outcome")
    if not 0 <= record["seconds"] < 1e9:
        raise NoResultError("has 'seconds' that are no time")
    build, fingerprint, case, stamp = (record[name] for name in ("build", "fingerprint", "case", "stamp"))
    outcomes = {gate: Outcome(word) for gate, word in record["gates"].items()}
    findings = tuple(
        Finding(f["gate"], f["what"], tuple(f["where"]), f["count"], f["detail"], f["inconclusive"])
        for f in record["findings"]
    )
    seconds, skipped, device, where = (record[name] for name in ("seconds", "skipped", "device", "machine"))
    result = CaseResult(build, fingerprint, case, outcomes, findings, float(seconds), skipped, device, where)
    return (build, fingerprint, case, stamp), result


def _check(record: Any, fields: _Types, where: str = "") -> None:
    if not isinstance(record, dict):
        raise NoResultError("has a finding that is no record" if where else "is no record", record=bool(where))
    for name, types in fields.items():
        if name not in record:
            raise NoResultError(f"has no {name!r}{where}")
        if not isinstance(record[name], types):
            raise NoResultError(f"has a {name!r}{where} of another type")


def _plain(value: Any) -> Any:
    """JSON types only: NumPy scalars as Python's, NaN and infinity as words."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


class Journal:
    """results.jsonl of one directory, open for appending; several runs (shards) may share it.

    Opening cuts off a torn last line. earlier: the results in it, the last one of each key. strange: what to say of
    lines that are not results (read_results); such lines are left alone.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "results.jsonl"
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._lock = threading.Lock()
        with self._alone():
            text = self.path.read_bytes()
            if (whole := text.rfind(b"\n") + 1) < len(text):
                os.ftruncate(self._file, whole)
        self.earlier, self.strange = read_results(self.path)

    def append(self, result: CaseResult, stamp: str) -> None:
        line = to_line(result, stamp).encode() + b"\n"
        with self._lock, self._alone():
            view = memoryview(line)
            while view:
                view = view[os.write(self._file, view) :]
            os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)


def read_results(path: Path) -> tuple[dict[Key, CaseResult], list[str]]:
    """The results in a JSONL file by key, and what to say of lines that are none (a torn last one aside): one message
    for whole records, which another version of mxgate wrote, and one for lines that are damaged."""
    results: dict[Key, CaseResult] = {}
    others: dict[bool, list[str]] = {True: [], False: []}
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], 1):
        try:
            key, result = from_line(line)
        except NoResultError as error:
            others[error.record].append(f"line {number} {str(error)[:120]}")
        else:
            results[key] = result
    what = {True: "of another version of mxgate", False: "damaged"}
    return results, [_left_out(path, what[whole], found) for whole, found in others.items() if found]


def _left_out(path: Path, what: str, lines: Sequence[str]) -> str:
    count, first = len(lines), lines[0]
    if count == 1:
        return f"{path}: 1 line is {what} ({first}); it is not counted, and stays in the file"
    return f"{path}: {count} lines are {what} ({first}); they are not counted, and stay in the file"


# ---------------------------------------------------------------------------------------------------------------------
# One build on one case


class _Context:
    """What all builds share on a case: operands by poison, answers by profile, ancestors' launches. Made on demand."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.lock = threading.RLock()
        self._operands: dict[str, Operands] = {}
        self._answers: dict[str, Any] = {}
        self._other: _Context | None = None
        self.ancestors: dict[str, Launch | None] = {}

    def operands(self, variant: str) -> Operands:
        with self.lock:
            if variant not in self._operands:
                made = data.operands(self.case, variant)
                size = sum(a.nbytes for a in made.arrays.values() if isinstance(a, np.ndarray))
                if size > BULKY:
                    self._operands = dict(list(self._operands.items())[:1])
                self._operands[variant] = made
            return self._operands[variant]

    @property
    def other(self) -> _Context:
        """What a captured launch is replayed with."""
        with self.lock:
            if self._other is None:
                self._other = _Context(case_module.rerouted(self.case))
            return self._other

    def answer(self, build: Build, variant: str) -> Any:
        with self.lock:
            profile = build.profile if build.op == "quantize" else ""
            if profile not in self._answers:
                self._answers[profile] = data.answer(self.case, self.operands(variant), profile=build.profile)
            return self._answers[profile]


class Runner:
    """Children and case contexts, shared by the threads of one run. Use as a context manager: it leaves no child.

    Where this machine has several GPUs of one kind, a build on a case has the one with the fewest at work, and its
    children see no other. keep: cases whose operands and answers stay in memory (default: those under way). limits: for
    single builds, by id. name: this machine's, in results.
    """

    def __init__(
        self,
        settings: Settings,
        stop: threading.Event | None = None,
        keep: int | None = None,
        limits: Mapping[str, Limits] | None = None,
        name: str | None = None,
    ) -> None:
        self.settings = settings
        self.jobs = settings.jobs or machine.cores()
        self._keep = self.jobs + 1 if keep is None else keep
        self._limits = limits or {}
        self._name = name or machine.name()
        self.stop = stop or threading.Event()
        self._lock = threading.Lock()
        self._idle: list[Child] = []
        self._all: set[Child] = set()
        self._contexts: OrderedDict[str, _Context] = OrderedDict()
        self._hangs: dict[str, int] = defaultdict(int)
        self._fingerprints: dict[Build, str] = {}
        self._at_work = dict.fromkeys(machine.shared_out(), 0)
        self._here = threading.local()  # gpu: the one that this thread's build and case have
        # One set of threads for the life of the runner: Linux kills a child when the thread that started it ends.
        self._threads = ThreadPoolExecutor(self.jobs)

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.stop.set()
        self._threads.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            for child in self._all:
                child.close()
            self._all.clear()
            self._idle.clear()

    def examine(self, build: Build, case: Case, labels: Sequence[str] = ()) -> tuple[CaseResult, Evidence | None]:
        """Run every launch that the gates need and judge them. The evidence is None where nothing was launched.

        labels: of the plan's launches after the base launch only these, if any are given ("" for none at all). Raises
        Stopped when the run is being stopped.
        """
        with self._lease(build):
            return self._examine(build, case, labels)

    def _examine(self, build: Build, case: Case, labels: Sequence[str]) -> tuple[CaseResult, Evidence | None]:
        began = time.monotonic()
        fingerprint = self.fingerprint(build)
        older = None if build.replaces is None else registry().get(build.replaces)
        compared = build.replaces is not None and (older is None or _asked(older, case, self.settings.tier))

        def result(
            outcomes: Mapping[str, Outcome], findings: tuple[Finding, ...], skip: str | None = None
        ) -> CaseResult:
            seconds, device = time.monotonic() - began, machine.device_of(build)
            where = self._name if self._gpu is None or not is_gpu(build.device) else f"{self._name} GPU {self._gpu}"
            return CaseResult(build.id, fingerprint, case.id, outcomes, findings, seconds, skip, device, where)

        if (reason := build.declines(case)) is not None:
            return result({}, (), reason), None
        if self._hangs[build.id] >= HANGS:
            return not_run(build, case, fingerprint, HUNG), None
        context = self._context(case)
        plan = gates.plan(build, case, self.settings.tier)
        if labels:
            plan = plan[:1] + tuple(spec for spec in plan[1:] if spec.label in labels)
        base = context.operands(plan[0].variant)
        try:
            launches = self._launch(build, context, plan)
        except _Declined as declined:
            return result({}, (), str(declined)), None
        self._hangs[build.id] += hung(launches)
        evidence = Evidence(
            build,
            case,
            base,
            context.answer(build, plan[0].variant),
            plan,
            launches,
            self._ancestor(build, context, plan) if compared else None,
            compared,
            None if labels else self._replayed(build, context, launches),
        )
        try:
            outcomes, findings = gates.run_gates(evidence)
        except Exception as error:  # a judge that fails costs its case and is no pass; the others go on
            what = f"a gate failed to judge this: {type(error).__name__}: {error}"
            return result({"contract": Outcome.INCONCLUSIVE}, (Finding("contract", what, inconclusive=True),)), evidence
        only = self.settings.gates
        outcomes = {gate: outcome for gate, outcome in outcomes.items() if gate in only}
        return result(outcomes, tuple(f for f in findings if f.gate in only)), evidence

    def each(self, work: Callable[[Item], Found], items: Iterable[Item]) -> Iterator[tuple[Item, Found]]:
        """work(item) on `jobs` threads, yielding each as it is done. An exception in one ends them all."""
        pending: dict[Future[Found], Item] = {}
        remaining = iter(items)
        while True:
            # A short queue: what a finished item holds is dropped before more of it piles up.
            while len(pending) < self.jobs and (item := next(remaining, None)) is not None:
                pending[self._threads.submit(work, item)] = item
            if not pending:
                return
            for future in wait(pending, timeout=0.5, return_when=FIRST_COMPLETED).done:
                yield pending.pop(future), future.result()

    def fingerprint(self, build: Build) -> str:
        """The build's fingerprint when it was first asked for."""
        if build not in self._fingerprints:
            self._fingerprints[build] = build.fingerprint()
        return self._fingerprints[build]

    def forget_hangs(self) -> None:
        """Let builds run again that hung on too many cases before."""
        self._hangs.clear()

    @contextlib.contextmanager
    def _lease(self, build: Build) -> Iterator[None]:
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
    def _gpu(self) -> str | None:
        return getattr(self._here, "gpu", None)

    def _launch(self, build: Build, context: _Context, plan: Sequence[LaunchSpec]) -> tuple[Launch, ...]:
        """Every launch of the plan, up to the one in which the build took its process down."""
        done: dict[str, Launch] = {}
        processes = list(dict.fromkeys(spec.process for spec in plan))
        for process in processes:
            specs = [spec for spec in plan if spec.process == process]
            try:
                child = self.borrow(build, fresh=process != 0)
            except ChildError as error:
                done[specs[0].label] = Launch(specs[0], f"cannot be loaded: {error}", (), "")
                break
            try:
                for spec in specs:
                    operands = context.operands(spec.variant)
                    typed = child.asked_type(context.case) is not None
                    for name in (*(operands.extra or {}), *(["out_dtype"] if typed else [])):
                        if name not in child.keywords:
                            raise _Declined(f"takes no {name}")
                    done[spec.label] = child.launch(context.case, spec, operands)
                    if not child.alive:
                        break
            finally:
                self.give_back(child, keep=process == 0)
            if not child.alive and done[specs[-1].label if specs[-1].label in done else list(done)[-1]].error:
                break
        return tuple(done[spec.label] for spec in plan if spec.label in done)

    def _replayed(self, build: Build, context: _Context, launches: Sequence[Launch]) -> Evidence | None:
        """The evidence for the graph gate, where it speaks and the plan's launches came back."""
        if not gates.may_speak("graph", context.case, captured=gates.captures(build)):
            return None
        if any(launch.error for launch in launches):
            return None
        other, variant = context.other, launches[0].variant
        try:
            child = self.borrow(build)
        except ChildError:
            return None
        try:
            operands = other.operands(variant)
            found = child.replay(context.case, context.operands(variant), other.case, operands)
        finally:
            self.give_back(child)
        plan = tuple(launch.spec for launch in found)
        return Evidence(build, other.case, operands, other.answer(build, variant), plan, found)

    def _ancestor(self, build: Build, context: _Context, plan: Sequence[LaunchSpec]) -> Launch | None:
        if build.replaces is None:
            return None
        with context.lock:
            if build.replaces not in context.ancestors:
                older = registry().get(build.replaces)
                known = older is not None and older.declines(context.case) is None
                spec = LaunchSpec("ancestor", variant=plan[0].variant)
                launches = self._launch(older, context, [spec]) if older is not None and known else ()
                if older is not None and launches and not self._stands(older, context, spec, launches):
                    launches = ()
                context.ancestors[build.replaces] = launches[0] if launches else None
            return context.ancestors[build.replaces]

    def _stands(self, build: Build, context: _Context, spec: LaunchSpec, launches: tuple[Launch, ...]) -> bool:
        """Whether no gate that can judge a single output rejects it: wrong bytes are nothing to hold an heir to."""
        answer = context.answer(build, spec.variant)
        evidence = Evidence(build, context.case, context.operands(spec.variant), answer, (spec,), launches)
        judged = (gates.exact(evidence), gates.bounded(evidence), gates.special(evidence))
        return not any(isinstance(found, Finding) for found in judged)

    def _context(self, case: Case) -> _Context:
        with self._lock:
            if case.id not in self._contexts:
                self._contexts[case.id] = _Context(case)
            self._contexts.move_to_end(case.id)
            if data.is_large(case):
                held = {name for name, context in self._contexts.items() if data.is_large(context.case)}
                for other in held - {case.id}:
                    del self._contexts[other]
            while len(self._contexts) > self._keep:
                self._contexts.popitem(last=False)
            return self._contexts[case.id]

    def borrow(self, build: Build, *, fresh: bool = False) -> Child:
        """A child with the build loaded: an idle one, or a new one. Raises ChildError, Stopped."""
        if self.stop.is_set():
            raise Stopped
        with self._lock:
            for child in self._idle if not fresh else ():
                if child.build == build and child.gpu == self._gpu and child.alive:
                    self._idle.remove(child)
                    return child
        child = Child(build, self._limits.get(build.id, self.settings.limits), self.stop, self._gpu)
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


HUNG = f"the build hung on {HANGS} cases before this one"


def hung(launches: Iterable[Launch]) -> bool:
    """Whether one of a case's launches ran into the time limit."""
    return any(launch.error is not None and launch.error.startswith("no answer within") for launch in launches)


def not_run(build: Build, case: Case, fingerprint: str, why: str) -> CaseResult:
    """The result of a case that was given up: nothing is known of it, so it is not kept (given_up)."""
    finding = Finding("contract", f"not run: {why}", inconclusive=True)
    return CaseResult(build.id, fingerprint, case.id, {"contract": Outcome.INCONCLUSIVE}, (finding,), 0.0)


def unloadable(builds: Iterable[Build], limits: Limits) -> str | None:
    """Why not one of the builds from outside can even be loaded: that is bad input. Among others such a build is
    rejected, for what it does is nobody else's trouble."""
    why = None
    for build in builds:
        if build.id in registry() or build.name.startswith("fault_"):
            continue
        try:
            Child(build, limits).close()
            return None
        except ChildError as error:
            why = f"{build.target} cannot be loaded: {error}"
    return why


def given_up(result: CaseResult) -> bool:
    """Whether a result is one of not_run."""
    return any(f.inconclusive and f.what.startswith("not run: ") for f in result.findings)


class _Declined(Exception):
    """The callable takes no keyword that the case needs."""


# ---------------------------------------------------------------------------------------------------------------------
# Many builds on many cases


@dataclass(frozen=True)
class RunReport:
    """What a run, or several shards of one, found.

    results: in the plan's order, those of other shards in the same folder included. missing: pairs of the plan that
    have no result yet. ran, resumed: how many results are new and how many were there before. warnings: lines of
    results.jsonl that are not results, in words.
    """

    builds: tuple[Build, ...]
    cases: tuple[Case, ...]
    settings: Settings
    results: tuple[CaseResult, ...]
    verdicts: tuple[Verdict, ...]
    missing: int
    ran: int
    resumed: int
    seconds: float
    warnings: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 all accepted, 1 something rejected, 3 something inconclusive; a shard is only asked about its own share.

        Builds that were skipped count for nothing, but a run in which nothing was judged is inconclusive."""
        seen = {verdict.word for verdict in self.verdicts} - {"skip"}
        if "reject" in seen:
            return 1
        if self.settings.shard != (1, 1) and self.missing:
            unsure = any(result.outcome is Outcome.INCONCLUSIVE for result in self.results)
            return 3 if unsure else 0
        return 0 if seen == {"accept"} else 3


Pair = tuple[Build, Case]


@dataclass(frozen=True)
class Crew:
    """Those who judge, ready to.

    fingerprints, devices: of each build by its id, where it will run. judge: a result for each pair, as they come.
    """

    fingerprints: Mapping[str, str]
    devices: Mapping[str, str]
    judge: Callable[[Sequence[Pair]], Iterator[CaseResult]]


Executor = Callable[
    [Sequence[Build], Sequence[Case], Settings, threading.Event | None], contextlib.AbstractContextManager[Crew]
]


@contextlib.contextmanager
def _local(
    builds: Sequence[Build], cases: Sequence[Case], settings: Settings, stop: threading.Event | None
) -> Iterator[Crew]:
    """Threads and children on this machine."""
    with Runner(settings, stop) as runner:

        def judge(pairs: Sequence[Pair]) -> Iterator[CaseResult]:
            return (result for _, result in runner.each(lambda pair: runner.examine(*pair)[0], pairs))

        devices = {b.id: machine.device_of(b) for b in builds}
        yield Crew({b.id: runner.fingerprint(b) for b in builds}, devices, judge)


def _ray(
    builds: Sequence[Build], cases: Sequence[Case], settings: Settings, stop: threading.Event | None
) -> contextlib.AbstractContextManager[Crew]:
    """The nodes of a Ray cluster."""
    from mxgate.conformance import cluster  # imports this module

    return cluster.on_ray(builds, cases, settings, stop)


EXECUTORS: Mapping[str, Executor] = {"local": _local, "ray": _ray}
Watch = Callable[[int, int, CaseResult], None]


def run(
    builds: Sequence[Build],
    cases: Sequence[Case],
    settings: Settings,
    out: Path | None,
    watch: Watch = lambda done, total, result: None,
    stop: threading.Event | None = None,
    executor: str = "local",
) -> RunReport:
    """Examine every build on every case of its op; append each result to out/results.jsonl as it comes.

    out None keeps nothing. executor: one of EXECUTORS. Raises KeyboardInterrupt when interrupted, with every child
    gone and every finished result on disk, and whatever the executor raises when it cannot begin or go on.
    """
    began = time.monotonic()
    journal = Journal(out) if out is not None else None
    stamp = settings.stamp
    pairs = [(b, c) for c in order(cases) for b in builds if _asked(b, c, settings.tier)]
    mine = [pair for pair in pairs if _in_shard(pair, builds, cases, settings.shard)]
    earlier = journal.earlier if journal is not None and not settings.fresh else {}
    known: dict[tuple[str, str], CaseResult] = {}
    try:
        with EXECUTORS[executor](builds, cases, settings, stop) as crew:
            for b, c in pairs:
                old = earlier.get((b.id, crew.fingerprints[b.id], c.id, stamp))
                if old is not None and old.device == crew.devices[b.id]:
                    known[b.id, c.id] = old
            todo = [(b, c) for b, c in mine if (b.id, c.id) not in known]
            for number, result in enumerate(crew.judge(todo), 1):
                known[result.build, result.case] = result
                if journal is not None and not given_up(result):
                    journal.append(result, stamp)
                watch(number, len(todo), result)
    finally:
        if journal is not None:
            journal.close()
    return summarise(
        builds,
        cases,
        settings,
        known,
        ran=len(todo),
        resumed=len(mine) - len(todo),
        seconds=time.monotonic() - began,
        warnings=tuple(journal.strange) if journal is not None else (),
    )


def _in_shard(pair: tuple[Build, Case], builds: Sequence[Build], cases: Sequence[Case], shard: tuple[int, int]) -> bool:
    """A Latin square: each shard gets its part of every build's cases and of every case's builds."""
    return (builds.index(pair[0]) + cases.index(pair[1])) % shard[1] == shard[0] - 1


def summarise(
    builds: Sequence[Build],
    cases: Sequence[Case],
    settings: Settings,
    known: Mapping[tuple[str, str], CaseResult],
    **counts: Any,
) -> RunReport:
    """Add up the results by (build, case) of a plan. A build of which a pair is missing is at best inconclusive."""
    pairs = [(b, c) for b in builds for c in cases if _asked(b, c, settings.tier)]
    found: dict[str, list[CaseResult]] = {b.id: [] for b in builds}
    lacking: dict[str, int] = dict.fromkeys(found, 0)
    for b, c in pairs:
        if (b.id, c.id) in known:
            found[b.id].append(known[b.id, c.id])
        else:
            lacking[b.id] += 1
    verdicts = []
    for b in builds:
        ran = [result for result in found[b.id] if result.skipped is None and not given_up(result)]
        devices, machines = (tuple(sorted({getattr(r, of) for r in ran})) for of in ("device", "machine"))
        verdict = judge(
            b.id, b.op, found[b.id], replaces=b.replaces is not None, captured=gates.captures(b), terms=b.terms()
        )
        if lacking[b.id] and verdict.word != "reject":
            verdict = replace(verdict, word="inconclusive", reason=f"{lacking[b.id]} cases have no result yet")
        elif verdict.word in ("accept", "inconclusive") and settings.gates != GATES:
            only = f"only {', '.join(settings.gates)} was asked for; an accept needs every gate"
            verdict = replace(verdict, word="inconclusive", reason=only)
        elif verdict.word in ("accept", "inconclusive") and _passed_recorded(cases, verdict):
            calls = sum(c.op == b.op for c in cases)
            verdict = replace(verdict, word="inconclusive", reason=f"passed {calls} recorded calls; {_WHOLE_TIER}")
        elif verdict.word == "accept" and (missing := left_out(b, settings.tier, cases)):
            some = f"passed, but {missing} cases of the {settings.tier} tier were not asked for"
            verdict = replace(verdict, word="inconclusive", reason=some)
        elif verdict.word == "accept" and len(devices) > 1:
            both = f"passed in part on each of {len(devices)} devices ({'; '.join(devices)}); an accept is of one"
            verdict = replace(verdict, word="inconclusive", reason=both)
        verdicts.append(replace(verdict, devices=devices, machines=machines))
    results = tuple(result for b in builds for result in found[b.id])
    return RunReport(
        tuple(builds), tuple(cases), settings, results, tuple(verdicts), missing=sum(lacking.values()), **counts
    )


_WHOLE_TIER = "an accept takes a whole tier"


def _passed_recorded(cases: Sequence[Case], verdict: Verdict) -> bool:
    """Whether all that was asked for are recorded calls, and every gate that speaks of those has passed."""
    return all(c.source for c in cases) and not set(verdict.gates.values()) - {Outcome.PASS, Outcome.SILENT}


def left_out(build: Build, tier: str, cases: Sequence[Case]) -> int:
    """How many of the tier's cases of a build are not among `cases`, whatever their salt."""
    have = {replace(c, salt=0) for c in cases}
    return sum(c not in have for c in (*case_module.cases(build.op, tier), *case_module.own_cases([build], tier)))


def _asked(build: Build, case: Case, tier: str) -> bool:
    return build.op == case.op and case_module.asked(case, build, tier)


def order(cases: Iterable[Case]) -> list[Case]:
    """Largest first within the op, so that no long case is left for the end; the op's builds stay warm."""
    return sorted(cases, key=lambda c: (c.op, -c.n * c.k * max(c.tokens, 1)))
