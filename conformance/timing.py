"""Timing, for builds that hold a certificate and nothing else.

A number is only worth reading when the variants met the same conditions, so they are interleaved: in every round each
build runs once, for a fixed stretch of time, and the position within the round rotates. One build runs at a time, on
one thread, and the first round is thrown away. A call is timed by the child's own clock, around the callable alone.

Before the first round every output is held against the oracle, and after the last one, and after every stretch, it must
still be the same bytes. A build whose output changed has no time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mxgate.conformance import data
from mxgate.conformance.case import Case
from mxgate.conformance.child import Child, ChildError, Limits
from mxgate.conformance.gates import plan, run_gates
from mxgate.conformance.launch import Evidence
from mxgate.conformance.verdict import Outcome
from mxgate.kernels.build import Build

VARIANT = "nan"


@dataclass(frozen=True)
class Timing:
    """One build on one case, in seconds: median, the 10th and 90th percentile, the fastest, over `calls` calls.

    refused: why there is no time (all numbers are then 0)."""

    build: str
    case: str
    median: float = 0.0
    low: float = 0.0
    high: float = 0.0
    best: float = 0.0
    calls: int = 0
    refused: str | None = None


def time_builds(
    builds: Sequence[Build],
    case: Case,
    *,
    rounds: int,
    seconds: float,
    limits: Limits,
    watch: Callable[[int, int, str], None] = lambda done, total, at: None,
) -> tuple[Timing, ...]:
    """Time certified builds of one op on one case, interleaved; `seconds` a stretch, `rounds` counted rounds."""
    operands = data.operands(case, VARIANT)
    samples: dict[str, list[float]] = {build.id: [] for build in builds}
    refused: dict[str, str] = {}
    before: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        children: dict[str, Child] = {}
        for build in builds:
            try:
                children[build.id] = stack.enter_context(contextlib.closing(Child(build, limits)))
            except ChildError as error:
                refused[build.id] = f"cannot be loaded: {error}"
        for build in builds:
            if build.id not in children:
                continue
            specs = tuple(spec for spec in plan(build, case, "smoke") if spec.variant == VARIANT)[:1]
            launch = children[build.id].launch(case, replace(specs[0], out="none"), operands)
            before[build.id] = launch.digest
            answer = data.answer(case, operands, profile=build.profile)
            outcomes, findings = run_gates(Evidence(build, case, operands, answer, specs, (launch,)))
            if Outcome.REJECT in outcomes.values():
                wrong = next(f for f in findings if outcomes[f.gate] is Outcome.REJECT)
                refused[build.id] = f"wrong before timing: {wrong.gate}: {wrong.what}"
        total = (rounds + 1) * len(builds)
        for number in range(rounds + 1):
            turn = number % len(builds)
            for position, build in enumerate((*builds[turn:], *builds[:turn])):
                watch(number * len(builds) + position, total, build.id)
                if build.id in refused:
                    continue
                try:
                    times, digest = children[build.id].clock(case, VARIANT, operands, seconds)
                except ChildError as error:
                    refused[build.id] = str(error)
                    continue
                if digest != before[build.id]:
                    refused[build.id] = "its output changed while it was being timed"
                elif number:
                    samples[build.id].extend(times)
        for build in builds:
            if build.id not in refused:
                launch = children[build.id].launch(case, replace(plan(build, case, "smoke")[0], out="none"), operands)
                if launch.error is not None:
                    refused[build.id] = f"after timing: {launch.error}"
                elif launch.digest != before[build.id]:
                    refused[build.id] = "its output after timing is not what it was before"
    return tuple(
        Timing(build.id, case.id, refused=refused[build.id])
        if build.id in refused
        else _timing(build.id, case.id, samples[build.id])
        for build in builds
    )


def _timing(build: str, case: str, samples: Sequence[float]) -> Timing:
    low, median, high = (float(q) for q in np.percentile(samples, (10, 50, 90)))
    return Timing(build, case, median, low, high, min(samples), len(samples))
