"""Many builds on many cases: each result kept as it comes, and a verdict for each build.

Work is ordered by case, so that every build of an op shares the case's operands and its exact answer. An executor
(EXECUTORS) judges the pairs of build and case, on this machine or on others, and each result comes back to the one
process that writes. One of before counts again under the same stamp, the same build fingerprint and on the same device.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mxgate.conformance import case as case_module
from mxgate.conformance import cluster, gates, runner
from mxgate.conformance.case import Case
from mxgate.conformance.results import Journal
from mxgate.conformance.runner import Crew, given_up
from mxgate.conformance.settings import Settings
from mxgate.conformance.verdict import GATES, CaseResult, Outcome, Verdict, judge
from mxgate.kernels.build import Build


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


Executor = Callable[
    [Sequence[Build], Sequence[Case], Settings, threading.Event | None], contextlib.AbstractContextManager[Crew]
]
EXECUTORS: Mapping[str, Executor] = {"local": runner.on_this_machine, "ray": cluster.on_ray}
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
    pairs = [(b, c) for c in order(cases) for b in builds if case_module.asked(c, b, settings.tier)]
    mine = [pair for pair in pairs if _in_shard(pair, builds, cases, settings.shard)]
    earlier = journal.earlier if journal is not None and not settings.fresh else {}
    known: dict[tuple[str, str], CaseResult] = {}
    try:
        with EXECUTORS[executor](builds, cases, settings, stop) as crew:
            for b, c in pairs:
                old = earlier.get((b.id, crew.fingerprints[b.id], c.id, stamp))
                if old is not None and old.device == crew.devices[b.id]:
                    known[b.id, c.id] = old
            before = runner.hangs(known.values())
            todo = [(b, c) for b, c in mine if (b.id, c.id) not in known and not _given_up(b, c, before)]
            for number, result in enumerate(crew.judge(todo, before), 1):
                known[result.build, result.case] = result
                if journal is not None and not given_up(result):
                    journal.append(stamp, result)
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


def _given_up(build: Build, case: Case, hangs: Mapping[str, int]) -> bool:
    """Whether a build that hung on so many cases would not be run on another one."""
    return hangs[build.id] >= runner.HANGS and build.declines(case) is None


def summarise(
    builds: Sequence[Build],
    cases: Sequence[Case],
    settings: Settings,
    known: Mapping[tuple[str, str], CaseResult],
    **counts: Any,
) -> RunReport:
    """Add up the results by (build, case) of a plan. A build of which a pair is missing is at best inconclusive.

    Cases that were given up are not kept: where a build hung on enough others, those that are missing are they.
    """
    pairs = [(b, c) for b in builds for c in cases if case_module.asked(c, b, settings.tier)]
    found: dict[str, list[CaseResult]] = {b.id: [] for b in builds}
    lacking: dict[str, int] = dict.fromkeys(found, 0)
    hangs = runner.hangs(known[b.id, c.id] for b, c in pairs if (b.id, c.id) in known)
    prints = {result.build: result.fingerprint for result in known.values()}
    for b, c in pairs:
        if (b.id, c.id) in known:
            found[b.id].append(known[b.id, c.id])
        elif _given_up(b, c, hangs):
            found[b.id].append(runner.not_run(b, c, prints[b.id], runner.HUNG))
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


def order(cases: Iterable[Case]) -> list[Case]:
    """Largest first within the op, so that no long case is left for the end; the op's builds stay warm."""
    return sorted(cases, key=lambda c: (c.op, -c.n * c.k * max(c.tokens, 1)))
