"""A build on a case, the unit of work: launches in children -> evidence -> gates -> a result.

Threads drive the children. The builds of an op that are judged on a case share its operands and its exact answer.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from mxgate.conformance import case as case_module
from mxgate.conformance import data, gates, machine
from mxgate.conformance.case import Case
from mxgate.conformance.child import NO_ANSWER, Child, ChildError, Limits
from mxgate.conformance.launch import Evidence, Launch, LaunchSpec, Operands
from mxgate.conformance.pool import Pool
from mxgate.conformance.settings import Settings
from mxgate.conformance.verdict import CaseResult, Finding, Outcome
from mxgate.kernels.build import Build, registry
from mxgate.kernels.gpu import is_gpu

HANGS = 2  # cases that may run into the time limit before the rest of a build's cases are given up
HUNG = f"the build hung on {HANGS} cases before this one"
BULKY = 64 << 20  # operand bytes above which the operands of a case's poisons are not all kept


Item = TypeVar("Item")
Found = TypeVar("Found")


class _Context:
    """What all builds share on a case: operands by poison, answers by profile, ancestors' launches. Made on demand."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.lock = threading.RLock()
        self._operands: dict[str, Operands] = {}
        self._answers: dict[str, Any] = {}
        self._other: _Context | None = None
        self.ancestors: dict[str, tuple[bool, Launch | None]] = {}

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


class _Declined(Exception):
    """The callable takes no keyword that the case needs."""


class Runner:
    """Children and case contexts, shared by the threads of one run. Use as a context manager: it leaves no child.

    keep: cases whose operands and answers stay in memory (default: those under way). limits: for single builds, by id.
    name: this machine's, in results.
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
        self._name = name or machine.name()
        self._stop = stop or threading.Event()
        self._pool = Pool(settings.limits, limits or {}, self._stop)
        self._lock = threading.Lock()
        self._contexts: OrderedDict[str, _Context] = OrderedDict()
        self._hangs: Counter[str] = Counter()
        self._fingerprints: dict[Build, str] = {}
        # One set of threads for the life of the runner: Linux kills a child when the thread that started it ends.
        self._threads = ThreadPoolExecutor(self.jobs)

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._stop.set()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._pool.close()

    def examine(self, build: Build, case: Case, labels: Sequence[str] = ()) -> tuple[CaseResult, Evidence | None]:
        """Run every launch that the gates need and judge them. The evidence is None where nothing was launched.

        labels: of the plan's launches after the base launch only these, if any are given ("" for none at all). Raises
        Stopped when the run is being stopped.
        """
        with self._pool.lease(build):
            return self._examine(build, case, labels)

    def _examine(self, build: Build, case: Case, labels: Sequence[str]) -> tuple[CaseResult, Evidence | None]:
        began = time.monotonic()
        fingerprint = self.fingerprint(build)

        def result(
            outcomes: Mapping[str, Outcome],
            findings: tuple[Finding, ...],
            skip: str | None = None,
            launches: Sequence[Launch] = (),
        ) -> CaseResult:
            seconds, device = time.monotonic() - began, machine.device_of(build)
            gpu = self._pool.gpu if is_gpu(build.device) else None
            where = self._name if gpu is None else f"{self._name} GPU {gpu}"
            return CaseResult(
                build.id, fingerprint, case.id, outcomes, findings, seconds, skip, device, where, _hung(launches)
            )

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
        self._hangs[build.id] += _hung(launches)
        compared, ancestor = self._ancestor(build, context, plan)
        evidence = Evidence(
            build,
            case,
            base,
            context.answer(build, plan[0].variant),
            plan,
            launches,
            ancestor,
            compared,
            None if labels else self._replayed(build, context, launches),
        )
        try:
            outcomes, findings = gates.run_gates(evidence)
        except Exception as error:  # a judge that fails costs its case and is no pass; the others go on
            what = f"a gate failed to judge this: {type(error).__name__}: {error}"
            unsure = (Finding("contract", what, inconclusive=True),)
            return result({"contract": Outcome.INCONCLUSIVE}, unsure, launches=launches), evidence
        only = self.settings.gates
        outcomes = {gate: outcome for gate, outcome in outcomes.items() if gate in only}
        return result(outcomes, tuple(f for f in findings if f.gate in only), launches=launches), evidence

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

    def count_hangs(self, before: Mapping[str, int]) -> None:
        """Take builds to have hung on as many cases as that, and on no other: of none, all may run again."""
        self._hangs = Counter(before)

    def _launch(self, build: Build, context: _Context, plan: Sequence[LaunchSpec]) -> tuple[Launch, ...]:
        """Every launch of the plan, up to the one in which the build took its process down."""
        done: dict[str, Launch] = {}
        for process in dict.fromkeys(spec.process for spec in plan):
            specs = [spec for spec in plan if spec.process == process]
            try:
                child = self._pool.borrow(build, fresh=process != 0)
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
                    last = done[spec.label] = child.launch(context.case, spec, operands)
                    if not child.alive:
                        break
            finally:
                self._pool.give_back(child, keep=process == 0)
            if not child.alive and last.error:
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
            child = self._pool.borrow(build)
        except ChildError:
            return None
        try:
            operands = other.operands(variant)
            found = child.replay(context.case, context.operands(variant), other.case, operands)
        finally:
            self._pool.give_back(child)
        plan = tuple(launch.spec for launch in found)
        return Evidence(build, other.case, operands, other.answer(build, variant), plan, found)

    def _ancestor(self, build: Build, context: _Context, plan: Sequence[LaunchSpec]) -> tuple[bool, Launch | None]:
        """Whether there is something to compare with, and the launch of what a build replaces, once a case.

        Nothing is to be compared on a case that the other does not take (by its record or for want of a keyword): an
        heir may take more. The launch is None where the other is not known or has no output that stands.
        """
        if build.replaces is None:
            return False, None
        with context.lock:
            if build.replaces not in context.ancestors:
                context.ancestors[build.replaces] = self._older(registry().get(build.replaces), context, plan)
            return context.ancestors[build.replaces]

    def _older(self, older: Build | None, context: _Context, plan: Sequence[LaunchSpec]) -> tuple[bool, Launch | None]:
        """What _ancestor keeps of the older build on a case."""
        if older is None:
            return True, None
        if not case_module.asked(context.case, older, self.settings.tier) or older.declines(context.case) is not None:
            return False, None
        spec = LaunchSpec("ancestor", variant=plan[0].variant)
        try:
            launches = self._launch(older, context, [spec])
        except _Declined:
            return False, None
        return True, launches[0] if self._stands(older, context, spec, launches) else None

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


def _hung(launches: Iterable[Launch]) -> bool:
    """Whether one of a case's launches ran into the time limit."""
    return any(launch.error is not None and launch.error.startswith(NO_ANSWER) for launch in launches)


def hangs(results: Iterable[CaseResult]) -> Counter[str]:
    """On how many cases each build hung."""
    return Counter(result.build for result in results if result.hung)


def not_run(build: Build, case: Case, fingerprint: str, why: str) -> CaseResult:
    """The result of a case that was given up: nothing is known of it, so it is not kept (given_up)."""
    finding = Finding("contract", f"not run: {why}", inconclusive=True)
    return CaseResult(build.id, fingerprint, case.id, {"contract": Outcome.INCONCLUSIVE}, (finding,), 0.0)


def given_up(result: CaseResult) -> bool:
    """Whether a result is one of not_run."""
    return any(f.inconclusive and f.what.startswith("not run: ") for f in result.findings)


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


Pair = tuple[Build, Case]


@dataclass(frozen=True)
class Crew:
    """Those who judge, ready to.

    fingerprints, devices: of each build by its id, where it will run. judge: a result for each pair, as they come; it
    is told on how many cases before each build hung.
    """

    fingerprints: Mapping[str, str]
    devices: Mapping[str, str]
    judge: Callable[[Sequence[Pair], Mapping[str, int]], Iterator[CaseResult]]


@contextlib.contextmanager
def on_this_machine(
    builds: Sequence[Build], cases: Sequence[Case], settings: Settings, stop: threading.Event | None
) -> Iterator[Crew]:
    """Threads and children on this machine."""
    with Runner(settings, stop) as runner:

        def judge(pairs: Sequence[Pair], before: Mapping[str, int]) -> Iterator[CaseResult]:
            runner.count_hangs(before)
            return (result for _, result in runner.each(lambda pair: runner.examine(*pair)[0], pairs))

        devices = {b.id: machine.device_of(b) for b in builds}
        yield Crew({b.id: runner.fingerprint(b) for b in builds}, devices, judge)
