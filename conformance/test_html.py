"""The HTML report. Not shown here: how it looks and what keys do. Looked at in Chromium 156, 390, 768 and 1280 pixels
wide, light, dark and printed, by keys alone and without JavaScript: no page was wider than its window, no text had less
contrast than 4.5, nothing was asked of a network.
"""

from __future__ import annotations

import html
import html.parser
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from mxgate.conformance import machine
from mxgate.conformance.__main__ import main
from mxgate.conformance.html import _NAN, _NUMBER, _outside_by, _pooled

CASES = ["--case", "wgrad/64x96/ramp1.5/signature", "--case", "wgrad/64x96/ramp1.5/normal"]


class Page(html.parser.HTMLParser):
    """Ids, link targets, everything that would be loaded, and whether tags are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if "id" in found:
            self.ids.append(found["id"] or "")
        if tag == "a":
            self.links.append(found["href"] or "")
        self.loaded += [
            v or "" for k, v in attrs if k in ("src", "xlink:href", "data") and not (v or "").startswith("#")
        ]
        if tag in ("section", "table", "figure", "div", "main", "details"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("section", "table", "figure", "div", "main", "details"):
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_report_is_one_file_that_says_what_the_terminal_says(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "report.html"
    builds = ["--build", "wgrad/fault_last_block_twice", "--build", "wgrad/numpy_windowed"]
    assert main(["run", *builds, *CASES, "--out", str(tmp_path / "out"), "--html", str(path)]) == 1
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert not page.open
    assert all(source.startswith("data:") for source in page.loaded)
    assert "@import" not in text and "<script" not in text and "<link" not in text
    for link in page.links:
        assert link.startswith("#") and link[1:] in page.ids
    assert "the last block of the contraction is counted twice" in page.text
    assert "wgrad/64x96/ramp1.5/signature" in page.text and "REJECT" in page.text
    assert len(page.ids) == len(set(page.ids)), "drawings beside one another have ids of their own"
    assert not re.search(r"https?://", re.sub(r'xmlns(:\w+)?="[^"]*"', "", text))
    assert text.count('role="img"') == 6  # all experts, each of the four, and the histogram
    first = capsys.readouterr().out
    assert "REJECT wgrad/fault_last_block_twice" in first
    place = f"on {machine.device()}: {machine.name()}"
    assert place in page.text and f"{place}\n" in first
    assert main(["report", str(tmp_path / "out"), "--html", str(tmp_path / "again.html")]) == 1
    assert Page((tmp_path / "again.html").read_text(encoding="utf-8")).links == page.links


def test_what_it_says_is_what_results_jsonl_says(tmp_path: Path, capsys: Any) -> None:
    """The first screen too: before the table stand build, gate, case, where, by how much, and what to run next."""
    out, path = tmp_path / "out", tmp_path / "r.html"
    builds = ["wgrad/numpy_reference", "wgrad/fault_last_block_twice", "wgrad/fault_minus_zero"]
    cases = [*CASES, "--case", "wgrad/64x96/empties/signature"]
    words = [word for build in builds for word in ("--build", build)]
    assert main(["run", *words, *cases, "--out", str(out), "--html", str(path)]) == 1
    text = path.read_text(encoding="utf-8")
    results = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    rejected = "wgrad/fault_last_block_twice"
    parts = re.split(r'<h[23] id="', text)
    of = {part.partition('"')[0]: html.unescape(re.sub("<[^>]*>", "", part)) for part in parts[1:]}
    for build, case in ((rejected, "wgrad/64x96/ramp1.5/signature"), (builds[2], "wgrad/64x96/empties/signature")):
        (result,) = (r for r in results if (r["build"], r["case"]) == (build, case))
        finding = result["findings"][0]
        (told,) = (told for anchor, told in of.items() if anchor.endswith(re.sub("[/_]", "-", build)))
        assert f"{finding['gate']} on {case}: {finding['what']}" in told
        assert all(line in told for line in (*finding["detail"]["extent"], *finding["where"]))
        assert f"mxgate explain --build {build} --case {case}" in told
        if build == rejected:
            lines = (build, finding["what"], *finding["detail"]["extent"], f"mxgate explain --build {build}")
            assert all(line in of["first"] for line in lines)
    for build in builds:
        row = re.split(r"</?tr>", text[text.index("<tbody>") : text.index("</tbody>")])
        (cells,) = (re.findall(r'<td class="([\w-]+)"', one) for one in row if f"{build}<" in one)
        gates = re.findall(r'href="#gate-(\w+)"', text)
        mine = [r["gates"] for r in results if r["build"] == build]
        for gate, cell in zip(gates, cells[1:], strict=True):
            said = {found.get(gate, "silent") for found in mine}
            assert cell == next(word for word in ("reject", "inconclusive", "pass", "silent") if word in said)
    assert "No pictures: of the 55296 elements that they would show each is inside its interval." in text
    capsys.readouterr()


MINE = r"""
import os

import numpy as np


def {a}(dy_t, dy_scales, x_t, x_scales, offsets):
    raise ValueError("\x1b[2J \udc80 " + "y" * 400)


def wgrad(dy_t, dy_scales, x_t, x_scales, offsets):
    os.abort()
"""


def test_long_names_and_names_that_differ_in_punctuation(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a build that crashes is not run again for pictures that it cannot have."""
    long = "a" + "_very_long_name" * 9
    for name in ("mine.py", "mine_wgrad.py"):
        (tmp_path / name).write_text(MINE.replace("{a}", long))
    monkeypatch.setattr("mxgate.conformance.html.explanation", None)  # what is run again is explained
    builds = [tmp_path / f"mine.py:{long}", tmp_path / "mine.py:wgrad", tmp_path / "mine_wgrad.py:wgrad"]
    words = [word for build in builds for word in ("--build", str(build))]
    out = ["--out", str(tmp_path / "out"), "--html", str(tmp_path / "r.html")]
    assert main(["run", "--op", "wgrad", *words, *CASES[:2], *out]) == 1
    page, said = Page((tmp_path / "r.html").read_text(encoding="utf-8")), capsys.readouterr().out
    assert len(page.ids) == len(set(page.ids)) and {link[1:] for link in page.links} <= set(page.ids)
    assert "\\x1b[2J \\udc80 y" in page.text and "\\x1b[2J" in said and "\x1b" not in page.text + said
    assert "killed by SIGABRT" in page.text
    first = said.splitlines()
    assert first[0].split()[-1] == "verdict" and first[1].startswith("wgrad/mine.a_very") and "REJECT" in first[1]
    assert max(map(len, first[:6])) <= 100


def test_it_says_why_a_build_was_skipped(tmp_path: Path, capsys: Any) -> None:
    """As the terminal does: a table has no room for a reason."""
    (tmp_path / "mine.py").write_text(MINE.replace("{a}", "other"))
    (tmp_path / "mxgate.toml").write_text('[wgrad]\nrequires = ["no_such_package"]\n')
    out = ["--out", str(tmp_path / "out"), "--html", str(tmp_path / "r.html")]
    builds = ["--build", f"{tmp_path}/mine.py:wgrad", "--build", "wgrad/numpy_reference"]
    main(["run", *builds, *CASES[:2], *out])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("skip wgrad/mine.wgrad: "))
    assert line.removeprefix("skip ") in Page((tmp_path / "r.html").read_text(encoding="utf-8")).text


def test_times_that_are_at_hand_are_drawn(tmp_path: Path) -> None:
    """Of the device that was measured last. What is drawn is timing_plot's own."""
    out = ["--out", str(tmp_path / "out"), "--html", str(tmp_path / "r.html")]
    record = {"case": "wgrad/16b/ramp", "build": "wgrad/triton",
              "median": 1e-3, "low": 9e-4, "high": 2e-3, "ratio": 1.25,
              "tflops": 500.0, "intensity": 400.0, "intensity_bf16": 700.0, "copy": 4e12, "dense": 7e14,
              "two_pass_limit": 0.7, "refused": None, "ablation": None, "device": "NVIDIA H200",
              "flush": False, "time": "2026-01-02 03:04:05"}  # fmt: skip
    base = {**record, "build": "bf16", "ratio": 1.0}
    other = {**record, "device": "NVIDIA B200"}
    (tmp_path / "out").mkdir()
    lines = [json.dumps(line) for line in (other, base, record)]
    (tmp_path / "out/timings.jsonl").write_text("\n".join(lines) + '\n{"torn')
    assert main(["run", "--build", "wgrad/numpy_reference", *CASES, *out]) == 3
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert text.count('role="img"') == 2 and not Page(text).open
    each = "wgrad/16b/ramp bf16 1; wgrad/16b/ramp wgrad/triton 1.25"
    assert f"times as fast as BF16 on NVIDIA H200, the last run of each case: {each}" in text
    assert "B200" not in text


def test_markup_in_a_builds_own_words_stays_text(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "def wgrad(dy_t, dy_scales, x_t, x_scales, offsets):\n    raise ValueError('<script>alert(1)</script>')\n"
    )
    out = ["--out", str(tmp_path / "out"), "--html", str(tmp_path / "r.html")]
    assert main(["run", "--build", f"{mine}:wgrad", *CASES, *out]) == 1
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "<script>" not in text and "&lt;script&gt;" in text


def test_one_wrong_element_stays_in_sight() -> None:
    value = np.zeros((1000, 2000))
    value[777, 1234] = 5.0
    pooled = _pooled(value)
    assert pooled.shape == (96, 96) and np.count_nonzero(pooled) == 1 and pooled.max() == 5


def test_distances_from_an_interval() -> None:
    out = np.array([1.0, 2.0, 2.0000002, np.nan, np.nan, 1.0], np.float32)
    lo, hi = np.array([1.0, 1.0, 1.0, 1.0, np.nan, np.nan]), np.array([1.0, 2.0, 2.0, 1.0, np.nan, np.nan])
    assert _outside_by(out, lo, hi).tolist() == [0, 0, 1, _NAN, 0, _NUMBER]
