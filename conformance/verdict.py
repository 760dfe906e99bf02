"""What the gates conclude, and how conclusions add up.

Nothing here is a bool: a gate passes, rejects, could not conclude, or has nothing to say about a case. An Accept needs
every mandatory gate of the op to have passed somewhere and none to have rejected anywhere; whatever did not run leaves
the build Inconclusive. So a build cannot be accepted by omission.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any

GATES = ("contract", "reproducible", "padding", "exact", "bounded", "empty", "special", "lineage", "graph")

# The gates that must have passed at least once before a build of the op is accepted. Lineage joins them for a build
# that replaces another, graph for one on a GPU unless it declares that its launches cannot be captured. A quantizer has
# no groups, so nothing is padded, bounded or empty.
MANDATORY: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "forward": ("contract", "reproducible", "padding", "exact", "bounded", "empty", "special"),
        "dgrad": ("contract", "reproducible", "padding", "exact", "bounded", "empty", "special"),
        "wgrad": ("contract", "reproducible", "padding", "exact", "bounded", "empty", "special"),
        "quantize": ("contract", "reproducible", "exact", "special"),
    }
)


class Outcome(str, Enum):
    """What one gate says of one case (PASS, REJECT, INCONCLUSIVE, SILENT), or all gates of one build."""

    PASS = "pass"
    REJECT = "reject"
    INCONCLUSIVE = "inconclusive"
    SILENT = "silent"  # the gate has nothing to say about this case: the exact gate on rounded data
    SKIP = "skip"  # the build declines the case, with a reason


@dataclass(frozen=True)
class Finding:
    """Why a gate rejected or could not conclude.

    what: one sentence. where: coordinates and bits of the first differences, at most 20 lines. count: wrong elements
    (0 where the fault is not an element's). detail: machine-readable facts for `explain`, JSON types only.
    """

    gate: str
    what: str
    where: tuple[str, ...] = ()
    count: int = 0
    detail: Mapping[str, Any] = field(default_factory=dict)
    inconclusive: bool = False


@dataclass(frozen=True)
class CaseResult:
    """One build on one case: a line of the JSONL. skipped: the reason, when the build declined the case.

    device: what it ran on, as a certificate names it. machine: whose that is, with the number of its GPU if it has
    several. hung: whether a launch ran into the time limit, whatever gates were asked for.
    """

    build: str
    fingerprint: str
    case: str
    gates: Mapping[str, Outcome]
    findings: tuple[Finding, ...]
    seconds: float
    skipped: str | None = None
    device: str = ""
    machine: str = ""
    hung: bool = False

    @property
    def outcome(self) -> Outcome:
        if self.skipped is not None:
            return Outcome.SKIP
        return worst(self.gates.values())


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """REJECT over INCONCLUSIVE over PASS over SILENT; of nothing at all, INCONCLUSIVE."""
    seen = set(outcomes)
    for outcome in (Outcome.REJECT, Outcome.INCONCLUSIVE, Outcome.PASS, Outcome.SILENT):
        if outcome in seen:
            return outcome
    return Outcome.INCONCLUSIVE


@dataclass(frozen=True)
class Verdict:
    """A build's verdict. gates: the worst outcome of each gate over all cases. reason: one phrase for the table.

    terms: where the build was held to other terms than the contract's own (Build.terms). devices, machines: what its
    results are of and where they were had; an accept is of one device.
    """

    build: str
    word: str  # "accept" | "reject" | "inconclusive" | "skip"
    gates: Mapping[str, Outcome]
    reason: str
    terms: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    machines: tuple[str, ...] = ()


def judge(
    build: str,
    op: str,
    results: Iterable[CaseResult],
    *,
    replaces: bool = False,
    captured: bool = False,
    terms: tuple[str, ...] = (),
) -> Verdict:
    """Add up a build's results on every case of a tier (any number of them; none gives Inconclusive).

    replaces, captured: whether the gates lineage and graph are mandatory."""
    results = tuple(results)
    ran = [r for r in results if r.skipped is None]
    if results and not ran:
        return Verdict(build, "skip", {}, results[0].skipped or "")
    gates = {
        gate: worst((Outcome.SILENT, *(result.gates.get(gate, Outcome.SILENT) for result in ran))) for gate in GATES
    }
    needed = MANDATORY[op] + (("lineage",) if replaces else ()) + (("graph",) if captured else ())
    rejected = [g for g in GATES if gates[g] is Outcome.REJECT]
    if rejected:
        cases = sum(r.outcome is Outcome.REJECT for r in ran)
        return Verdict(build, "reject", gates, f"{', '.join(rejected)} on {cases} of {len(ran)} cases")
    unsure = [g for g in GATES if gates[g] is Outcome.INCONCLUSIVE or (g in needed and gates[g] is not Outcome.PASS)]
    if unsure:
        return Verdict(build, "inconclusive", gates, f"{', '.join(unsure)} did not run to a conclusion")
    return Verdict(build, "accept", gates, f"{len(ran)} cases, {len(needed)} gates", terms)
