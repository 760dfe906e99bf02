"""One offline HTML file of a run: the matrix, and for what was rejected where, by how much and probably why.

Nothing is loaded from anywhere: pictures are in the file as SVG. It needs jinja2 and matplotlib (the extra "report").
A rejected build's first finding is run once more for its pictures, as `mxgate explain` does.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import re
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from mxgate.conformance import gates as gate_module
from mxgate.conformance import report as text
from mxgate.conformance import timing_plot
from mxgate.conformance.case import EXACT
from mxgate.conformance.explain import Cause, explanation
from mxgate.conformance.gates import owned, usable
from mxgate.conformance.launch import Evidence
from mxgate.conformance.machine_code import Figures
from mxgate.conformance.run import Runner, RunReport
from mxgate.conformance.verdict import GATES, CaseResult, Finding, Outcome, Verdict
from mxgate.conformance.where import AXES, TILE, groups, steps, worst_tile
from mxgate.kernels.build import called
from mxgate.oracle import Answer, MXArray
from mxgate.oracle.bound import outside, round_to

TEMPLATE = Path(__file__).with_name("report.html.j2")
MAPS = 8  # experts that get a map, those with most wrong elements
CELLS = 96  # of a map along an axis; a cell shows the worst of what it covers
_MAP = mpl.colormaps["inferno"].with_extremes(bad="#3b7dd8")
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
    facts: tuple[str, ...]
    lines: tuple[str, ...]
    causes: tuple[Cause, ...]
    also: tuple[str, ...]
    commands: tuple[str, ...]
    pictures: tuple[Picture, ...]


def write(
    report: RunReport,
    path: Path,
    *,
    ledgers: Mapping[str, tuple[Figures, tuple[str, ...]]],
    timings: Path,
    watch: Callable[[int, int, str], None],
) -> None:
    """Write the report. ledgers: by build, what machine_code.figures and notes say. timings: where `mxgate time` keeps
    its records; the file need not be there."""
    failed = [v for v in report.verdicts if v.word in ("reject", "inconclusive")]
    sections = []
    with Runner(report.settings) as runner, mpl.rc_context(_STYLE):
        for number, verdict in enumerate(failed, 1):
            sections.append(_section(verdict, report, runner))
            watch(number, len(failed), verdict.build)
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
        ledgers=[(build, list(of), _ledger_rows(of), notes) for build, (of, notes) in ledgers.items()],
        timings=_timing_pictures(timings),
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
        return Section(verdict, anchor, "", None, (text.advice(verdict, report),), (), (), (), (), ())
    result, finding = first
    also = tuple(f"{gate} on {_some(found)}" for gate in GATES if (found := _rejecting(mine, gate)))
    facts: tuple[str, ...] = tuple(finding.detail.get("extent", ()))
    lines: tuple[str, ...] = finding.where
    causes: tuple[Cause, ...] = ()
    pictures: tuple[Picture, ...] = ()
    build = next(b for b in report.builds if b.id == verdict.build)
    case = next(c for c in report.cases if c.id == result.case)
    commands: tuple[str, ...] = ()
    if not finding.inconclusive:
        words = ("explain", "minimize") if build.op != "quantize" else ("explain",)
        commands = tuple(f"mxgate {word} {called(build)} --case {shlex.quote(case.id)}" for word in words)
        again, evidence = runner.examine(build, case)
        same = next((f for f in again.findings if f.gate == finding.gate), None)
        if evidence is not None and same is not None:
            told = explanation(evidence, same)
            facts, lines = tuple(fact.rstrip(":") for fact in told.facts) or facts, told.where
            causes, pictures = told.causes, _pictures(evidence, same)
    return Section(verdict, anchor, result.case, finding, facts, lines, causes, also, commands, pictures)


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
    return _inline(out.getvalue())


def _inline(drawing: str) -> str:
    """A drawing's markup for a page that holds others: nothing but the picture, and ids that are its own."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", drawing[drawing.index("<svg") :], flags=re.DOTALL)
    own = hashlib.sha256(svg.encode()).hexdigest()[:8]
    return re.sub(r'(\bid="|url\(#|xlink:href="#)', rf"\g<1>{own}-", svg)


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
    return np.where(outside(out, lo, hi), np.where(bad, -1, away), 0)


def _maps(e: Evidence, away: Array) -> list[Picture]:
    if e.case.op == "quantize":
        parts = [("all", away.reshape(-1, away.shape[-1]))]
    else:
        parts = [(f"expert {g}", part) for g, part in groups(e.case, away)]
    down, across = AXES[e.case.op]
    pictures = [_by_expert(parts)] if len(parts) > 1 else []
    parts.sort(key=lambda part: -np.count_nonzero(part[1]))
    for name, part in parts[:MAPS]:
        wrong = np.count_nonzero(part)
        if not wrong or not part.size:
            continue
        rows, columns = part.shape
        value = _pooled(np.where(part < 0, np.inf, np.log2(1.0 + np.maximum(part, 0))))
        finite = value[np.isfinite(value)]
        figure = Figure(figsize=(3.1, 2.7), layout="constrained")
        axis = figure.add_subplot()
        image = axis.imshow(
            np.ma.masked_invalid(value), cmap=_MAP, vmin=0, vmax=max(1.0, float(finite.max(initial=0))),
            interpolation="nearest", extent=(0, columns, rows, 0), aspect="auto",
        )  # fmt: skip
        axis.set(xlabel=across, ylabel=down, title=name)
        figure.colorbar(image, label="log2(1 + ulp outside)")
        count, i, j = worst_tile(part != 0)
        height, width = min(TILE, rows - i), min(TILE, columns - j)
        axis.add_patch(Rectangle((j, i), width, height, fill=False, edgecolor="#5dff7a", linewidth=1.2))
        nan = f", {np.count_nonzero(part < 0)} of them NaN (blue)" if (part < 0).any() else ""
        tile = f"{count} in the worst {TILE} x {TILE} tile, at {down} {i}, {across} {j} (outlined)"
        pictures.append(Picture(_svg(figure), f"{name}: {wrong} of {part.size} elements are outside{nan}; {tile}"))
    return pictures


def _by_expert(parts: Sequence[tuple[str, Array]]) -> Picture:
    """How much of each expert is outside, those included that are right."""
    shares = [100 * np.count_nonzero(part) / max(part.size, 1) for _, part in parts]
    figure = Figure(figsize=(3.1, 2.7), layout="constrained")
    axis = figure.add_subplot()
    axis.bar([name.removeprefix("expert ") for name, _ in parts], shares, color="#c4483e")
    axis.set(xlabel="expert", ylabel="% of its elements outside", ylim=(0, 100))
    if len(parts) > 12:
        axis.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    wrong = sum(share > 0 for share in shares)
    return Picture(_svg(figure), f"{wrong} of {len(parts)} experts have elements outside their interval")


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
    figure = Figure(figsize=(4.6, 1.0 + 0.2 * len(names)), layout="constrained")
    axis = figure.add_subplot()
    axis.barh(names, shown, color=["#3a8f5c", *["#c4483e"] * (len(names) - 1)][: len(names)])
    axis.invert_yaxis()
    axis.set_xscale("symlog", linthresh=1)
    axis.set(xlabel="elements")
    axis.set_title("ulp outside the interval", loc="left", fontsize=9)
    says = f"{int(counts[0])} of {away.size} elements are inside their interval" + (f", {nan} are NaN" if nan else "")
    return Picture(_svg(figure), says)


def _timing_pictures(path: Path) -> list[Picture]:
    """What `mxgate time` draws; nothing without a time."""
    known = timing_plot.latest(path)
    pictures = []
    for draw, what in ((timing_plot.bars, "times as fast as BF16"), (timing_plot.roofline, "TFLOP/s by intensity")):
        if known:
            with tempfile.TemporaryDirectory() as folder, mpl.rc_context({"svg.fonttype": "none"}):
                drawn = Path(folder) / "drawn.svg"
                draw(known, drawn)
                svg = drawn.read_text(encoding="utf-8")
            name = "ratio" if draw is timing_plot.bars else "tflops"
            each = [f"{t['case']} {t['build']} {t[name]:.3g}" for t in known if t[name] is not None]
            of = f"{what} on {known[0]['device']}, the last run of each case"
            pictures.append(Picture(_inline(svg), f"{of}: {'; '.join(each)}"))
    return pictures


def _ledger_rows(kernels: Mapping[str, Mapping[str, int]]) -> list[tuple[str, list[str]]]:
    names = dict.fromkeys(name for figures in kernels.values() for name in figures)
    return [(name, [f"{f[name]:,}" if name in f else "-" for f in kernels.values()]) for name in names]
