"""What `mxgate time` measured on a GPU, drawn: a roofline, and bars with their spread. Needs matplotlib."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Line = Mapping[str, Any]
_MARKS = "osD^vP*X"
_BASE = "bf16"
_FIELDS = {
    *("time", "flush", "device", "case", "build", "refused", "ablation", "median", "low", "high", "tflops", "ratio"),
    *("copy", "dense", "intensity", "intensity_bf16", "two_pass_limit"),
}


def latest(path: Path) -> list[Line]:
    """What is drawn of timings.jsonl: of the device that was measured last, the last sustained run of each case.

    Times of several runs cannot be compared. Builds without a time and ablations are left out, and so are torn lines
    and those of another version, which has other fields. Nothing where there is no file."""
    lines: list[Line] = []
    for text in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError, TypeError):
            line = dict(json.loads(text))
            lines += [line] if line.keys() >= _FIELDS else []
    here = [line for line in lines if line["device"] == lines[-1]["device"] and not line["flush"]]
    last = {line["case"]: line["time"] for line in here}
    return [
        line
        for case, time in last.items()
        for line in here
        if (line["case"], line["time"], line["refused"], line["ablation"]) == (case, time, None, None)
    ]


def _title(lines: Sequence[Line], what: str) -> str:
    times = sorted(line["time"] for line in lines)
    when = " to ".join(dict.fromkeys((times[0], times[-1])))
    return f"{lines[0]['device']}: {what}; the last run of each case, {when} UTC"


def roofline(lines: Sequence[Line], path: Path) -> None:
    """Each build at the intensity that its case has with ideal reuse, under the ceilings that were measured with it.

    lines: as `latest` gives them. The ceilings are the highest of all lines: of one copy, and of a dense
    bfloat16 product."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    copy, dense = (max(line[name] for line in lines) for name in ("copy", "dense"))
    places = [line["intensity"] for line in lines] + [line["intensity_bf16"] for line in lines]
    x = np.geomspace(min(*places, dense / copy) / 2, max(*places, dense / copy) * 2, 200)
    axes.plot(x, np.minimum(x * copy, dense) / 1e12, color="black", linewidth=1)
    axes.annotate(f"dense bf16, {dense / 1e12:.0f} TFLOP/s", (x[-1], dense / 1e12), ha="right", va="bottom", fontsize=8)
    axes.annotate(f"copy, {copy / 1e12:.2f} TB/s", (x[8], x[8] * copy / 1e12), ha="left", va="top", fontsize=8)
    builds = sorted({line["build"].rpartition("/")[2] for line in lines}, key=lambda name: (name != _BASE, name))
    for number, build in enumerate(builds):
        mine = [line for line in lines if line["build"].rpartition("/")[2] == build]
        at = [line["intensity_bf16" if build == _BASE else "intensity"] for line in mine]
        color = "0.4" if build == _BASE else f"C{number}"
        axes.plot(at, [line["tflops"] for line in mine], _MARKS[number % len(_MARKS)], color=color, label=build)
    at_of = {line["case"]: line["intensity"] for line in lines}
    labels: list[list[str]] = []  # cases so near to each other that they share a place
    for case in sorted(at_of, key=lambda name: at_of[name]):
        if labels and at_of[case] < 1.07 * at_of[labels[-1][0]]:
            labels[-1].append(case)
        else:
            labels.append([case])
    low = min(line["tflops"] for line in lines)
    for names in labels:
        place = (at_of[names[-1]], 0.85 * low)
        axes.annotate("\n".join(names), place, rotation=90, ha="center", va="top", fontsize=7)
    axes.set(xscale="log", yscale="log", xlabel="FLOP a byte, each operand read once", ylabel="TFLOP/s")
    axes.set_title(_title(lines, "medians, sustained"), fontsize=10)
    axes.set_ylim(low / 4, dense / 1e12 * 1.5)
    axes.set_xlim(x[0], x[-1])
    axes.grid(alpha=0.3, which="both", linewidth=0.5)
    axes.legend(fontsize=8, loc="lower left")
    figure.savefig(path)


def bars(lines: Sequence[Line], path: Path) -> None:
    """A bar a build, case under case: BF16's median over the build's, with the 10th to the 90th percentile, and the
    limit of two passes."""
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(line["case"] for line in lines))
    rows = [(case, line) for case in cases for line in lines if line["case"] == case]
    rows = [(case, line) for case, line in rows if line["ratio"] is not None]
    figure = Figure(figsize=(9, 0.9 + 0.27 * (len(rows) + len(cases))), layout="constrained")
    axes = figure.subplots()
    widest = max(line["ratio"] for _, line in rows)
    y, at, names = 0.0, [], []
    for case in cases:
        mine = [line for of, line in rows if of == case]
        first = y
        for line in mine:
            base = line["ratio"] * line["median"]
            value, low, high = (base / line[name] for name in ("median", "high", "low"))
            color = "0.4" if line["build"] == _BASE else "C0"
            spread = [[value - low], [high - value]]
            axes.barh(y, value, 0.7, xerr=spread, color=color, error_kw={"capsize": 2, "elinewidth": 1})
            x, ink = (0.0, "white") if value > 0.08 * widest else (high, "black")
            axes.annotate(f" {value:.3f}", (x, y), va="center", fontsize=7, color=ink)
            at.append(y)
            names.append(line["build"].rpartition("/")[2])
            y += 1
        limit = mine[0]["two_pass_limit"]
        axes.plot([limit, limit], [first - 0.5, y - 0.5], color="C3", linewidth=1)
        axes.annotate(
            case, (1.0, first - 0.62), fontsize=8, va="bottom", ha="right", xycoords=("axes fraction", "data")
        )
        y += 0.9
    axes.set_yticks(at, names, fontsize=8)
    axes.set_ylim(y - 0.9, -1.4)
    axes.set_xlabel("times as fast as BF16 grouped_mm in the same run (line: two passes cannot be faster)", fontsize=9)
    axes.set_title(_title(lines, "medians, 10 % .. 90 %"), fontsize=10)
    figure.savefig(path)
