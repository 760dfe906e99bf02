"""The kill matrix: wrong builds against our gates and against the rules in common use, correct builds against ours.

A fault must be rejected by the gate that it names, on some case of the smoke tier. Once that has happened its other
cases are launched only once each, enough for the common rules, which look at one output, and for the gates that do; a
gate that compares launches may therefore have rejected more than its column shows.

A rule has caught a fault when it rejects it on any case: a generous count, since signature, all-codes and special cases
are ours and not what such rules are usually run on. The second count takes random data alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mxgate.conformance.case import EXACT, Case, cases, salted
from mxgate.conformance.child import Limits
from mxgate.conformance.poison import COPIED
from mxgate.conformance.rules import RULES, verdicts
from mxgate.conformance.run import order
from mxgate.conformance.runner import Runner
from mxgate.conformance.settings import Settings
from mxgate.conformance.verdict import GATES, CaseResult, Outcome
from mxgate.kernels.build import Build
from mxgate.kernels.faults import Fault

# The families on which such rules are usually run.
RANDOM = ("normal", "heavy-tailed", "captured")
# The launches that a correct build gets under every seed but the first, which gets all of them: only the gates that
# hold one output against the oracle depend on the data.
SHORT = ("padding random", "padding copied", COPIED, "other memory", "repeat 1")
Watch = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Row:
    """One fault. gates: how many cases each gate rejected. caught, random: whether a rule rejected it on any case, on
    any random case; None where no case gave the rule something to look at. cases: examined. first: where the named gate
    rejected it first, and why. skipped: why it could not run at all."""

    fault: Fault
    gates: Mapping[str, int]
    caught: Mapping[str, bool | None]
    random: Mapping[str, bool | None]
    cases: int
    first: str | None
    skipped: str | None = None

    @property
    def killed(self) -> bool:
        return self.gates.get(self.fault.gate, 0) > 0


@dataclass(frozen=True)
class Matrix:
    """rows: one a fault. correct: builds that must be accepted, alarms: (build, case, gate, finding) that were rejected
    or inconclusive. checked: results of correct builds, over `seeds` different seeds."""

    rows: tuple[Row, ...]
    correct: tuple[Build, ...]
    alarms: tuple[tuple[str, str, str, str], ...]
    checked: int
    seeds: int

    @property
    def survivors(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if not row.killed and row.skipped is None)

    def missed(self, rule: str, *, random: bool = False) -> int:
        """How many of the faults that the rule could look at it let through."""
        return sum((row.random if random else row.caught)[rule] is False for row in self.rows)

    def seen(self, rule: str, *, random: bool = False) -> int:
        return sum((row.random if random else row.caught)[rule] is not None for row in self.rows)


def kill_matrix(
    faults: Sequence[Fault], correct: Sequence[Build], seeds: int, settings: Settings, watch: Watch
) -> Matrix:
    """Examine every fault on the smoke cases of its op, and every correct build under `seeds` different seeds."""
    limits = {
        fault.build.id: Limits(
            fault.seconds or settings.limits.seconds,
            fault.gibibytes or settings.limits.memory,
        )
        for fault in faults
    }
    rows: dict[str, Row] = {}
    with Runner(settings, keep=256, limits=limits) as runner:
        for number, (fault, row) in enumerate(runner.each(lambda fault: _row(runner, fault), faults), 1):
            rows[fault.build.id] = row
            watch(number, len(faults), fault.build.id)
    alarms: list[tuple[str, str, str, str]] = []
    checked = 0
    with Runner(settings) as runner:
        pairs = [
            (build, salted(case, salt))
            for salt in range(1, seeds + 1)
            for case in order(cases(None, "smoke"))
            for build in correct
            if build.op == case.op
        ]

        def examine(pair: tuple[Build, Case]) -> CaseResult:
            return runner.examine(*pair, () if pair[1].salt == 1 else SHORT)[0]

        examined = runner.each(examine, pairs)
        for number, ((build, case), result) in enumerate(examined, 1):
            checked += result.skipped is None
            for finding in result.findings:
                alarms.append((build.id, case.id, finding.gate, finding.what))
            watch(number, len(pairs), case.id)
    return Matrix(tuple(rows[fault.build.id] for fault in faults), tuple(correct), tuple(alarms), checked, seeds)


def _row(runner: Runner, fault: Fault) -> Row:
    gates = dict.fromkeys(GATES, 0)
    caught: dict[str, bool | None] = dict.fromkeys(RULES)
    random: dict[str, bool | None] = dict.fromkeys(RULES)
    first = skipped = None
    examined = 0
    for case in _likely_first(fault, cases(fault.build.op, "smoke")):
        result, evidence = runner.examine(fault.build, case, [""] if gates[fault.gate] else ())
        if result.skipped is not None:
            skipped = result.skipped
            continue
        examined += 1
        for gate, outcome in result.gates.items():
            gates[gate] += outcome is Outcome.REJECT
        if first is None and gates[fault.gate]:
            first = f"{case.id}: {next(f.what for f in result.findings if f.gate == fault.gate and not f.inconclusive)}"
        if evidence is None:
            continue
        for rule, accepts in verdicts(evidence).items():
            if accepts is not None:
                caught[rule] = bool(caught[rule]) or not accepts
                if case.family in RANDOM:
                    random[rule] = bool(random[rule]) or not accepts
    return Row(fault, gates, caught, random, examined, first, None if examined else skipped)


_SPEAKS: Mapping[str, Callable[[Case], bool]] = {
    "special": lambda case: case.family == "special",
    "empty": lambda case: 0 in case.sizes,
    "exact": lambda case: case.family in EXACT,
    "bounded": lambda case: case.family not in EXACT,
}


def _likely_first(fault: Fault, cases: Sequence[Case]) -> list[Case]:
    """Cases that speak to the named gate before those that cannot: the sooner it rejects, the fewer launches."""
    speaks = _SPEAKS.get(fault.gate)
    return list(cases) if speaks is None else sorted(cases, key=lambda case: not speaks(case))
