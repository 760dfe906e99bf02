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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2
import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, NullLocator
from numpy.typing import NDArray

from mxgate.conformance import gates as gate_module
from mxgate.conformance import report as text
from mxgate.conformance import timing_plot
from mxgate.conformance.case import EXACT
from mxgate.conformance.explain import Cause, explanation, guess
from mxgate.conformance.gates import owned, usable
from mxgate.conformance.launch import Evidence
from mxgate.conformance.machine_code import Figures
from mxgate.conformance.run import RunReport
from mxgate.conformance.runner import Runner
from mxgate.conformance.verdict import GATES, CaseResult, Finding, Outcome, Verdict
from mxgate.conformance.where import AXES, TILE, groups, steps, worst_tile
from mxgate.kernels.build import called
from mxgate.oracle import Answer, MXArray
from mxgate.oracle.bound import outside, round_to

TEMPLATE = Path(__file__).with_name("report.html.j2")
MAPS = 8  # experts that get a map, those with most wrong elements
CELLS = 96  # of a map along an axis; a cell shows the worst of what it covers
_MAP = mpl.colormaps["inferno"].with_extremes(bad="#3b7dd8")
_INK = "#010203"  # of text and axes; a marker: in the page it is the page's own colour, light or dark
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "mxgate",  # the same run gives the same bytes
    "font.family": "sans-serif",
    "font.size": 9,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _INK),
}
_NAN, _NUMBER = -1, -2  # as distances: NaN where a number belongs, and the reverse
# By whether a case is of quantize: what is counted, and how a wrong element is called.
_WORDS = (("ulp outside the interval", "outside"), ("codes away from the right one", "not the right code"))
Array = NDArray[Any]


@dataclass(frozen=True)
class Picture:
    """svg: inline markup. name: of what it is. says: what it shows, in words."""

    svg: str
    name: str
    says: str


@dataclass(frozen=True)
class Section:
    """What is told of one build that was not accepted.

    advice: what to do where there is no finding. extent: where the wrong elements are and how far off, by the result
    that was kept. facts, causes, pictures: of the launch that was made again; remark: what is to be said of it.
    """

    verdict: Verdict
    anchor: str
    advice: str = ""
    case: str = ""
    finding: Finding | None = None
    extent: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()
    causes: tuple[Cause, ...] = ()
    also: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    pictures: tuple[Picture, ...] = ()
    remark: str = ""


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
            sections.append(_section(number, verdict, report, runner))
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
        first=min(sections, key=lambda section: section.verdict.word != "reject", default=None),
        skipped=[(reason, names) for reason, names in text.skipped(report).items()],
        warnings=report.warnings,
        terms=[(v.build, v.terms) for v in report.verdicts if v.word == "accept" and v.terms],
        assumptions=list(dict.fromkeys(line for b in report.builds for line in b.assumes)),
        ledgers=[(build, list(of), _ledger_rows(of), notes) for build, (of, notes) in ledgers.items()],
        timings=_timing_pictures(timings),
    )
    # A lone surrogate, as in the name of a file that is not UTF-8, is shown by its number.
    path.write_text(page, encoding="utf-8", errors="backslashreplace")


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


def _section(number: int, verdict: Verdict, report: RunReport, runner: Runner) -> Section:
    # Names that differ in their punctuation alone need anchors that differ.
    anchor = f"build-{number}-" + "".join(c if c.isalnum() else "-" for c in verdict.build)
    mine = [r for r in report.results if r.build == verdict.build]
    first = text.first_finding(mine)
    if first is None:
        return Section(verdict, anchor, advice=text.advice(verdict, report))
    result, finding = first
    build = next(b for b in report.builds if b.id == verdict.build)
    case = next(c for c in report.cases if c.id == result.case)
    section = Section(
        verdict,
        anchor,
        case=result.case,
        finding=finding,
        extent=tuple(finding.detail.get("extent", ())),
        also=tuple(f"{gate} on {_some(found)}" for gate in GATES if (found := _rejecting(mine, gate))),
    )
    if finding.inconclusive:
        return section
    words = ("explain", "minimize") if build.op != "quantize" else ("explain",)
    commands = tuple(f"mxgate {word} {called(build)} --case {shlex.quote(case.id)}" for word in words)
    section = replace(section, commands=commands)
    if not finding.count:  # a crash or a hang has no picture, and need not happen again
        cause = guess(finding)
        return replace(section, causes=(cause,) if cause else ())
    again, evidence = runner.examine(build, case)
    same = next((f for f in again.findings if f.gate == finding.gate), None)
    if evidence is None or same is None:
        return replace(section, remark="Run once more for pictures, this case did not give the same finding.")
    told = explanation(evidence, same)
    pictures, remark = _pictures(evidence, same)
    facts = tuple(fact.rstrip(":") for fact in told.facts)
    return replace(section, facts=facts, causes=told.causes, pictures=pictures, remark=remark)


def _rejecting(results: Sequence[CaseResult], gate: str) -> list[CaseResult]:
    return [r for r in results if r.gates.get(gate) is Outcome.REJECT]


def _some(results: Sequence[CaseResult]) -> str:
    more = f" and {len(results) - 3} more" if len(results) > 3 else ""
    return ", ".join(r.case for r in results[:3]) + more


# ---------------------------------------------------------------------------------------------------------------------
# Pictures


def _drawing(width: float, height: float, left: float, right: float, top: float = 0.27) -> tuple[Figure, Axes]:
    """An empty drawing with margins; all in inches. A layout engine would find margins by drawing everything twice."""
    figure, bottom = Figure(figsize=(width, height)), 0.48
    inside = (left / width, bottom / height, 1 - (left + right) / width, 1 - (bottom + top) / height)
    return figure, figure.add_axes(inside)


def _svg(figure: Figure) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _inline(out.getvalue())


def _inline(drawing: str) -> str:
    """A drawing's markup for a page that holds others: nothing but the picture, and ids that are its own."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", drawing[drawing.index("<svg") :], flags=re.DOTALL)
    svg = svg.replace(_INK, "currentColor")
    own = hashlib.sha256(svg.encode()).hexdigest()[:8]
    return re.sub(r'(\bid="|url\(#|xlink:href="#)', rf"\g<1>{own}-", svg)


def _pictures(e: Evidence, finding: Finding) -> tuple[tuple[Picture, ...], str]:
    """Maps of how far outside its interval each element is, and a histogram of all of them; or why there are none."""
    label = finding.detail.get("launch")
    launch = next((x for x in e.launches if x.label == label), e.launches[0] if e.launches else None)
    if launch is None or not usable(e, launch):
        return (), ""
    if isinstance(e.answer, Answer):
        out = owned(e.case, launch.output[0])
        lo, hi = (owned(e.case, x) for x in e.answer.interval(e.build.accumulator, out.dtype))
        if e.case.kind in EXACT:
            lo = hi = round_to(owned(e.case, e.answer.value), out.dtype).astype(np.float64)
        away, within = _outside_by(out, lo, hi), "inside its interval"
    elif isinstance(e.answer, MXArray):
        away = np.abs(launch.output[0].view(np.uint8).astype(np.int64) - e.answer.codes())
        within = "the right code"
    else:
        return (), ""
    if not away.any():
        # Beside what this gate rejects, green bars alone would say that all is well.
        return (), f"No pictures: of the {away.size} elements that they would show each is {within}."
    return (*_maps(e, away), _histogram(e, away)), ""


def _outside_by(out: Array, lo: Array, hi: Array) -> Array:
    """How many numbers of the output type lie between each element and its interval; _NAN or _NUMBER where just one of
    the two is NaN."""
    with np.errstate(invalid="ignore"):
        nearest = np.clip(out.astype(np.float64), lo, hi)
    away = steps(out, round_to(nearest, out.dtype))
    got, want = np.isnan(out.astype(np.float64)), np.isnan(lo)
    away = np.select([got & ~want, want & ~got], [_NAN, _NUMBER], away)
    return np.where(outside(out, lo, hi), away, 0)


def _without_distance(away: Array) -> str:
    """How many elements are wrong for which there is no distance, to follow other counts."""
    kinds = ((_NAN, "NaN"), (_NUMBER, "a number where NaN belongs"))
    return "".join(f", {n} {word}" for kind, word in kinds if (n := np.count_nonzero(away == kind)))


def _maps(e: Evidence, away: Array) -> list[Picture]:
    if e.case.op == "quantize":
        parts = [("all", away.reshape(-1, away.shape[-1]))]
    else:
        parts = [(f"expert {g}", part) for g, part in groups(e.case, away)]
    down, across = AXES[e.case.op]
    unit, outside_ = _WORDS[e.case.op == "quantize"]
    pictures = [_by_expert(parts)] if len(parts) > 1 else []
    parts.sort(key=lambda part: -np.count_nonzero(part[1]))
    for name, part in parts[:MAPS]:
        wrong = np.count_nonzero(part)
        if not wrong or not part.size:
            continue
        rows, columns = part.shape
        value = _pooled(np.where(part < 0, np.inf, np.log2(1.0 + np.maximum(part, 0))))
        finite = value[np.isfinite(value)]
        figure, axis = _drawing(3.1, 2.7, left=0.66, right=0.87)
        image = axis.imshow(
            np.ma.masked_invalid(value), cmap=_MAP, vmin=0, vmax=max(1.0, float(finite.max(initial=0))),
            interpolation="nearest", extent=(0, columns, rows, 0), aspect="auto",
        )  # fmt: skip
        axis.set(xlabel=across, ylabel=down, title=name)
        scale = figure.add_axes((2.35 / 3.1, axis.get_position().y0, 0.12 / 3.1, axis.get_position().height))
        figure.colorbar(image, cax=scale, label=f"log2(1 + {unit})")
        count, i, j = worst_tile(part != 0)
        height, width = min(TILE, rows - i), min(TILE, columns - j)
        for color, line in (("black", 2.6), ("#5dff7a", 1.2)):  # cased: it is seen on dark and on bright cells
            axis.add_patch(Rectangle((j, i), width, height, fill=False, edgecolor=color, linewidth=line))
        nan = f"{_without_distance(part)} (blue)" if (part < 0).any() else ""
        tile = f"{count} in the worst {TILE} x {TILE} tile, at {down} {i}, {across} {j} (outlined)"
        says = f"{name}: {wrong} of {part.size} elements are {outside_}{nan}; {tile}"
        pictures.append(Picture(_svg(figure), f"map of {name}", says))
    return pictures


def _by_expert(parts: Sequence[tuple[str, Array]]) -> Picture:
    """How much of each expert is outside, those included that are right."""
    shares = [100 * np.count_nonzero(part) / max(part.size, 1) for _, part in parts]
    figure, axis = _drawing(3.1, 2.7, left=0.55, right=0.1)
    axis.bar([name.removeprefix("expert ") for name, _ in parts], shares, color="#c4483e")
    axis.set(xlabel="expert", ylabel="% of its elements outside", ylim=(0, 100))
    if len(parts) > 12:
        axis.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    wrong = sum(share > 0 for share in shares)
    says = f"{wrong} of {len(parts)} experts have elements outside their interval"
    return Picture(_svg(figure), "share of each expert that is wrong", says)


def _pooled(value: Array) -> Array:
    """At most CELLS x CELLS cells, each the largest value of what it covers: one wrong element stays in sight."""
    for axis in (0, 1):
        starts = np.unique(np.arange(min(CELLS, value.shape[axis])) * value.shape[axis] // CELLS)
        if value.shape[axis] > CELLS:
            value = np.maximum.reduceat(value, starts, axis=axis)
    return value


def _histogram(e: Evidence, away: Array) -> Picture:
    finite = away[away >= 0]
    edges = [0, 1, *(1 << i for i in range(1, 33))]
    counts = np.array([np.count_nonzero((finite >= a) & (finite < b)) for a, b in itertools.pairwise(edges)])
    last = int(np.flatnonzero(counts)[-1]) if counts.any() else 0
    zero = "right" if e.case.op == "quantize" else "inside"
    names = [zero, *(str(a) if b - a == 1 else f"{a}-{b - 1}" for a, b in itertools.pairwise(edges[1:]))]
    names, shown = names[: last + 1], counts[: last + 1]
    for kind, name in ((_NAN, "NaN"), (_NUMBER, "no NaN")):
        if n := np.count_nonzero(away == kind):
            names, shown = [*names, name], np.append(shown, n)
    unit, _ = _WORDS[e.case.op == "quantize"]
    longest = max(map(len, names))
    figure, axis = _drawing(4.6, 1.0 + 0.2 * len(names), left=0.2 + 0.085 * longest, right=0.1, top=0.25)
    axis.barh(names, shown, color=["#3a8f5c", *["#c4483e"] * (len(names) - 1)][: len(names)])
    axis.invert_yaxis()
    axis.set_xscale("symlog", linthresh=1)
    axis.xaxis.set(minor_locator=NullLocator(), major_formatter="{x:g}")  # hundreds of small ticks take a while
    axis.set(xlabel="elements")
    axis.set_title(unit, loc="left", fontsize=9)
    within = "have the right code" if e.case.op == "quantize" else "are inside their interval"
    says = f"{int(counts[0])} of {away.size} elements {within}{_without_distance(away)}"
    return Picture(_svg(figure), "histogram of distances", says)


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
            pictures.append(Picture(_inline(svg), what, f"{of}: {'; '.join(each)}"))
    return pictures


def _ledger_rows(kernels: Mapping[str, Mapping[str, int]]) -> list[tuple[str, list[str]]]:
    names = dict.fromkeys(name for figures in kernels.values() for name in figures)
    return [(name, [f"{f[name]:,}" if name in f else "-" for f in kernels.values()]) for name in names]
