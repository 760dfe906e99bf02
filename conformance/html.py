"""One offline HTML file of a run: the matrix, and for what was rejected where, by how much and probably why.

Nothing is loaded from anywhere: pictures are in the file as SVG. It needs jinja2 and matplotlib (the extra "report").
A rejected build's first finding is run once more for its pictures, as `mxgate explain` does.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from mxgate.conformance import gates as gate_module
from mxgate.conformance import report as text
from mxgate.conformance.case import EXACT
from mxgate.conformance.explain import Cause, explanation
from mxgate.conformance.gates import owned, usable
from mxgate.conformance.launch import Evidence
from mxgate.conformance.run import Runner, RunReport
from mxgate.conformance.verdict import GATES, CaseResult, Finding, Outcome, Verdict
from mxgate.conformance.where import AXES, groups, steps
from mxgate.oracle import Answer, MXArray
from mxgate.oracle.bound import round_to

TEMPLATE = Path(__file__).with_name("report.html.j2")
MAPS = 8  # experts that get a map, those with most wrong elements
CELLS = 96  # of a map along an axis; a cell shows the worst of what it covers
_INK = "#7b8087"  # readable on light and on dark
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "mxgate",  # the same run gives the same bytes
    "font.family": "sans-serif",
    "font.size": 9,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _INK),
}
Array = NDArray[Any]


@dataclass(frozen=True)
class Picture:
    """svg: inline markup. says: what it shows, in words."""

    svg: str
    says: str


@dataclass(frozen=True)
class Section:
    """What is told of one build that was not accepted."""

    verdict: Verdict
    anchor: str
    case: str
    finding: Finding | None
    lines: tuple[str, ...]
    causes: tuple[Cause, ...]
    also: tuple[str, ...]
    commands: tuple[str, ...]
    pictures: tuple[Picture, ...]


def write(
    report: RunReport,
    path: Path,
    *,
    ledgers: Mapping[str, Mapping[str, Mapping[str, int]]],
    timings: Sequence[Mapping[str, Any]],
    watch: Callable[[int, int, str], None],
) -> None:
    """Write the report. ledgers: figures by build and kernel (inspect). timings: records of `mxgate time`."""
    failed = [v for v in report.verdicts if v.word in ("reject", "inconclusive")]
    sections = []
    with Runner(report.settings) as runner, mpl.rc_context(_STYLE):
        for number, verdict in enumerate(failed, 1):
            sections.append(_section(verdict, report, runner))
            watch(number, len(failed), verdict.build)
        timing = _timing_picture(timings) if timings else None
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    gates = text.shown_gates(report.verdicts)
    anchors = {section.verdict.build: section.anchor for section in sections}
    page = template.render(
        summary=text.summary(report),
        places=text.places(report),
        tier=report.settings.tier,
        gates=[(gate, _demand(gate)) for gate in gates],
        rows=[_row(verdict, gates, anchors) for verdict in report.verdicts],
        sections=sections,
        terms=[(v.build, v.terms) for v in report.verdicts if v.word == "accept" and v.terms],
        assumptions=list(dict.fromkeys(line for b in report.builds for line in b.assumes)),
        ledgers=[(build, list(of), _ledger_rows(of)) for build, of in ledgers.items()],
        timing=timing,
        timings=timings,
    )
    path.write_text(page, encoding="utf-8")


def _demand(gate: str) -> str:
    return (gate_module.GATE_FUNCTIONS[gate].__doc__ or "").strip().partition("\n\n")[0].replace("\n   ", "")


def _row(verdict: Verdict, gates: Sequence[str], anchors: Mapping[str, str]) -> dict[str, Any]:
    cells = [verdict.gates.get(gate, Outcome.SILENT).value for gate in gates]
    shown = {"pass": "pass", "reject": "REJECT", "inconclusive": "unsure", "silent": "-", "skip": "skip"}
    return {
        "build": verdict.build,
        "anchor": anchors.get(verdict.build),
        "cells": [(cell, shown[cell]) for cell in cells],
        "word": verdict.word,
        "reason": verdict.reason,
    }


def _section(verdict: Verdict, report: RunReport, runner: Runner) -> Section:
    anchor = "build-" + "".join(c if c.isalnum() else "-" for c in verdict.build)
    mine = [r for r in report.results if r.build == verdict.build]
    first = text.first_finding(mine)
    if first is None:
        return Section(verdict, anchor, "", None, (), (), (), (), ())
    result, finding = first
    also = tuple(f"{gate} on {_some(found)}" for gate in GATES if (found := _rejecting(mine, gate)))
    lines: tuple[str, ...] = finding.where
    causes: tuple[Cause, ...] = ()
    pictures: tuple[Picture, ...] = ()
    build = next(b for b in report.builds if b.id == verdict.build)
    case = next(c for c in report.cases if c.id == result.case)
    commands: tuple[str, ...] = ()
    if not finding.inconclusive:
        commands = tuple(f"mxgate {c} --build {build.id} --case '{case.id}'" for c in ("explain", "minimize"))
        again, evidence = runner.examine(build, case)
        same = next((f for f in again.findings if f.gate == finding.gate), None)
        if evidence is not None and same is not None:
            told = explanation(evidence, same)
            lines, causes, pictures = (*told.where, *told.facts), told.causes, _pictures(evidence, same)
    return Section(verdict, anchor, result.case, finding, lines, causes, also, commands, pictures)


def _rejecting(results: Sequence[CaseResult], gate: str) -> list[CaseResult]:
    return [r for r in results if r.gates.get(gate) is Outcome.REJECT]


def _some(results: Sequence[CaseResult]) -> str:
    more = f" and {len(results) - 3} more" if len(results) > 3 else ""
    return ", ".join(r.case for r in results[:3]) + more


# ---------------------------------------------------------------------------------------------------------------------
# Pictures


def _svg(figure: Figure) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    drawing = out.getvalue()
    return drawing[drawing.index("<svg") :]


def _pictures(e: Evidence, finding: Finding) -> tuple[Picture, ...]:
    """Maps of how far outside its interval each element is, and a histogram of all of them."""
    label = finding.detail.get("launch")
    launch = next((x for x in e.launches if x.label == label), e.launches[0] if e.launches else None)
    if launch is None or not usable(e, launch):
        return ()
    if isinstance(e.answer, Answer):
        out = owned(e.case, launch.output[0])
        lo, hi = (owned(e.case, x) for x in e.answer.interval(e.build.accumulator, out.dtype))
        if e.case.kind in EXACT:
            lo = hi = round_to(owned(e.case, e.answer.value), out.dtype).astype(np.float64)
        away = _outside_by(out, lo, hi)
    elif isinstance(e.answer, MXArray):
        away = np.abs(launch.output[0].view(np.uint8).astype(np.int64) - e.answer.codes())
    else:
        return ()
    return (*_maps(e, away), _histogram(away))


def _outside_by(out: Array, lo: Array, hi: Array) -> Array:
    """How many numbers of the output type lie between each element and its interval; NaN where a number belongs: -1."""
    with np.errstate(invalid="ignore"):
        nearest = np.clip(out.astype(np.float64), lo, hi)
    away = steps(out, round_to(nearest, out.dtype))
    bad = np.isnan(out.astype(np.float64)) != np.isnan(lo)
    return np.where(bad, -1, np.where(np.isnan(lo), 0, away))


def _maps(e: Evidence, away: Array) -> list[Picture]:
    if e.case.op == "quantize":
        parts = [("all", away.reshape(-1, away.shape[-1]))]
    else:
        parts = [(f"expert {g}", part) for g, part in groups(e.case, away)]
    down, across = AXES[e.case.op]
    parts.sort(key=lambda part: -np.count_nonzero(part[1]))
    pictures = []
    for name, part in parts[:MAPS]:
        wrong = np.count_nonzero(part)
        if not wrong or not part.size:
            continue
        rows, columns = part.shape
        value = np.where(part < 0, 40.0, np.log2(1.0 + np.maximum(part, 0)))
        figure = Figure(figsize=(3.1, 2.7), layout="constrained")
        axis = figure.add_subplot()
        image = axis.imshow(
            _pooled(value), cmap="inferno", vmin=0, vmax=max(1.0, float(value.max())), interpolation="nearest",
            extent=(0, columns, rows, 0), aspect="auto",
        )  # fmt: skip
        axis.set(xlabel=across, ylabel=down, title=name)
        figure.colorbar(image, label="log2(1 + ulp outside)")
        worst = np.unravel_index(int(value.argmax()), value.shape)
        nan = f", {np.count_nonzero(part < 0)} of them NaN" if (part < 0).any() else ""
        says = (
            f"{name}: {wrong} of {part.size} elements are outside{nan}; "
            f"the worst is at {down} {worst[0]}, {across} {worst[1]}"
        )
        pictures.append(Picture(_svg(figure), says))
    return pictures


def _pooled(value: Array) -> Array:
    """At most CELLS x CELLS cells, each the largest value of what it covers: one wrong element stays in sight."""
    for axis in (0, 1):
        starts = np.unique(np.arange(min(CELLS, value.shape[axis])) * value.shape[axis] // CELLS)
        if value.shape[axis] > CELLS:
            value = np.maximum.reduceat(value, starts, axis=axis)
    return value


def _histogram(away: Array) -> Picture:
    finite = away[away >= 0]
    edges = [0, 1, *(1 << i for i in range(1, 33))]
    counts = np.array([np.count_nonzero((finite >= a) & (finite < b)) for a, b in itertools.pairwise(edges)])
    last = int(np.flatnonzero(counts)[-1]) if counts.any() else 0
    names = ["inside", *(str(a) if b - a == 1 else f"{a}-{b - 1}" for a, b in itertools.pairwise(edges[1:]))]
    names, shown = names[: last + 1], counts[: last + 1]
    if nan := int(np.count_nonzero(away < 0)):
        names, shown = [*names, "NaN"], np.append(shown, nan)
    figure = Figure(figsize=(4.6, 0.9 + 0.2 * len(names)), layout="constrained")
    axis = figure.add_subplot()
    axis.barh(names, shown, color=["#3a8f5c", *["#c4483e"] * (len(names) - 1)][: len(names)])
    axis.invert_yaxis()
    axis.set_xscale("symlog", linthresh=1)
    axis.set(xlabel="elements", ylabel="ulp outside the interval")
    says = f"{int(counts[0])} of {away.size} elements are inside their interval" + (f", {nan} are NaN" if nan else "")
    return Picture(_svg(figure), says)


def _timing_picture(timings: Sequence[Mapping[str, Any]]) -> Picture:
    timed = [t for t in timings if t["refused"] is None]
    figure = Figure(figsize=(6, 0.9 + 0.32 * max(1, len(timed))), layout="constrained")
    axis = figure.add_subplot()
    medians = [t["median"] * 1e3 for t in timed]
    spread = [[(t["median"] - t["low"]) * 1e3 for t in timed], [(t["high"] - t["median"]) * 1e3 for t in timed]]
    axis.barh([t["build"] for t in timed], medians, xerr=spread, color="#3f6fb0", ecolor=_INK)
    axis.invert_yaxis()
    axis.set(xlabel="ms, median with the 10th and 90th percentile")
    return Picture(_svg(figure), "; ".join(f"{t['build']} {t['median'] * 1e3:.3f} ms" for t in timed))


def _ledger_rows(kernels: Mapping[str, Mapping[str, int]]) -> list[tuple[str, list[str]]]:
    names = dict.fromkeys(name for figures in kernels.values() for name in figures)
    return [(name, [f"{f[name]:,}" if name in f else "-" for f in kernels.values()]) for name in names]
