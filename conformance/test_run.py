"""The run from end to end, as a user types it, on few cases: verdicts, exit codes, files, resuming, shards.

The gates themselves are tested elsewhere; here a build's verdict only has to arrive. Not covered: a machine that loses
power between two lines (a kill is), and more than two runs writing into one folder at a time.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from mxgate.conformance import case as case_module
from mxgate.conformance import certificate, report
from mxgate.conformance.conftest import FEW, FEW_CASES, Say, sigint
from mxgate.conformance.settings import Settings
from mxgate.conformance.verdict import GATES, CaseResult, Outcome
from mxgate.conformance.version import code_version
from mxgate.kernels.build import registry

pytestmark = pytest.mark.usefixtures("few_are_all")


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_right_build_from_outside_is_accepted(say: Say, source: Path, tmp_path: Path) -> None:
    code, out, err = say("run", "--op", "wgrad", "--build", f"{source}:wgrad", *FEW)
    assert code == 0, out + err
    assert err == "" and "1 accepted (smoke tier): 3 results" in out
    assert all(len(line.rstrip()) <= 100 for line in out.splitlines())
    assert "\x1b" not in out
    held = certificate.read(tmp_path / ".mxgate/certificates/wgrad-mine.wgrad.json")
    assert held.cases == tuple(sorted(FEW_CASES)) and held.code == code_version()


def test_a_wrong_build_is_rejected_with_a_first_screen(say: Say, source: Path, tmp_path: Path) -> None:
    code, out, _ = say("run", "--build", f"{source}:wgrad", "--op", "wgrad", "--build", f"{source}:neighbour", *FEW)
    assert code == 1
    # Which build; which gate, which case; where; by how much; what to run next.
    screen = out[out.index("REJECT wgrad/mine.neighbour: ") :]
    gate = re.search(r"^  padding on (wgrad/64x96/\S+): .* \d+ of \d+ elements ", screen, re.MULTILINE)
    assert gate is not None, screen
    assert re.search(r"^    expert 2; all 64 n, all 96 k$", screen, re.MULTILINE), screen
    assert re.search(r"^    \d+ are NaN and should be numbers$", screen, re.MULTILINE), screen
    pair = r"^    expert 2, n 0, k 0: 0x7fc0 \(nan\), without it 0x\w{4} \(\S+\)$"
    assert re.search(pair, screen, re.MULTILINE), screen
    (command,) = re.findall(r"^  next: mxgate (explain .*)$", screen, re.MULTILINE)
    assert command.startswith("explain --op wgrad --build ") and command.endswith(f":neighbour --case {gate[1]}")
    code, told, _ = say(*shlex.split(command))
    assert code == 1 and f"wgrad/mine.neighbour on {gate[1]}\n" in told and "likely cause (" in told
    assert say("explain")[1].splitlines()[0] == f"wgrad/mine.neighbour on {gate[1]}", "explain looks at what was shown"
    assert not (tmp_path / ".mxgate/certificates/wgrad-mine.neighbour.json").exists()


@pytest.mark.parametrize(
    ("fault", "case", "gate", "where"),
    [
        ("forward/fault_crashes", "ramp1.5/signature", "contract", r"killed by SIGSEGV at faults\.py:\d+ "),
        (
            "forward/fault_tail_kept",
            "ramp1.5/signature",
            "contract",
            r"rows \d+\.\.\d+ \(past the last offset\); all 64 n",
        ),
        ("wgrad/fault_never_reset", "empties/signature", "reproducible", r"farthest \d+ ulp: .*, at first 0x"),
        ("forward/fault_wrong_tile", "ramp1.5/signature", "exact", r"rows 16\.\.31 \(experts 0\.\.1\); n 16\.\.31"),
        ("quantize/fault_rceil", "axis1/normal", "exact", r"\d+ of 192 scales, \d+ of 6144 elements"),
    ],
)
def test_a_first_screen_answers_what_is_asked_of_it(say: Say, fault: str, case: str, gate: str, where: str) -> None:
    """Which build, which gate, which case, where, by how much, what next; faults of five kinds."""
    name = f"{fault.partition('/')[0]}/64x96/{case}"
    code, out, _ = say("run", "--build", fault, "--case", name)
    assert code == 1 and f"\nREJECT {fault}: " in out
    first = re.search(rf"^  {gate} on {re.escape(name)}: (.*)$", out, re.MULTILINE)
    assert first is not None and re.search(where, out), out
    assert re.search(r"\d+ of \d+ elements|killed by", first[1]), out
    assert f"\n  next: mxgate explain --build {fault} --case {name}\n" in out
    assert max(map(len, out[out.index("next: ") :].splitlines()[1:])) <= 100


def test_json_is_one_document(say: Say, source: Path) -> None:
    code, out, err = say("run", "--op", "wgrad", "--build", f"{source}:neighbour", *FEW, "--json")
    document = json.loads(out)
    assert (code, err) == (1, "") and document["exit"] == 1 and document["cases"] == list(FEW_CASES)
    (verdict,) = document["verdicts"]
    assert verdict["verdict"] == "reject" and verdict["first_finding"]["where"]
    for what in ("builds", "cases", "formats"):
        assert json.loads(say("list", what, "--json")[1])[what]
    listed = {row["gate"]: row["mandatory for"] for row in json.loads(say("list", "gates", "--json")[1])["gates"]}
    assert (listed["lineage"], listed["graph"], listed["empty"]) == ("replacements", "builds for a GPU", "GEMMs")


@pytest.mark.parametrize("columns", [80, 100])
def test_the_table_fits_its_width(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    from io import StringIO

    from rich.console import Console

    from mxgate.conformance.run import summarise
    from mxgate.conformance.verdict import worst

    builds = [build for build in registry().values() if build.op == "wgrad"]
    two = case_module.cases("wgrad", "smoke")[:2]
    known = {}
    for build in builds:
        for case, outcome in zip(two, (Outcome.REJECT, Outcome.INCONCLUSIVE), strict=True):
            known[build.id, case.id] = CaseResult(build.id, "", case.id, dict.fromkeys(GATES, outcome), (), 0.1)
    made = summarise(builds, two, Settings(), known, ran=0, resumed=0, seconds=0.0)
    assert worst(made.verdicts[0].gates.values()) is Outcome.REJECT
    stream = StringIO()
    report.print_run(made, Console(file=stream, width=columns, force_terminal=columns == 80, color_system=None))
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines[: len(builds) + 1])) <= columns, "prose is wrapped on a terminal only"
    assert lines[0].split()[-1] == "verdict" and all(lines[i + 1].split()[-1] == "REJECT" for i in range(len(builds)))
    assert len(lines[0].split()) == len(GATES) + 2


def test_one_gate_alone_is_never_an_accept(say: Say, source: Path) -> None:
    code, out, _ = say("run", "--op", "wgrad", "--build", f"{source}:wgrad", *FEW, "--gate", "exact")
    assert code == 3 and "only exact was asked for" in out
    assert not Path(".mxgate/certificates").exists()


def test_some_cases_of_a_tier_are_never_an_accept(say: Say, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.chdir(source.parent)
    code, out, _ = say("run", "--op", "wgrad", "--build", f"{source}:wgrad", *FEW)
    missing = len(case_module.cases("wgrad", "smoke")) - 3
    assert code == 3 and f"passed, but {missing} cases of the smoke tier were not asked for" in out
    assert not (source.parent / ".mxgate/certificates").exists()


def test_a_certificate_outlives_a_run_that_asks_for_less(say: Say, accepted: Path, source: Path) -> None:
    assert say("run", "--op", "wgrad", "--build", f"{source}:wgrad", *FEW, "--gate", "exact")[0] == 3
    assert accepted.exists()


def test_too_few_cases_are_inconclusive(say: Say, source: Path) -> None:
    code, out, _ = say("run", "--op", "wgrad", "--build", f"{source}:wgrad", *FEW[:2])
    assert code == 3 and "nothing on these cases speaks to bounded, special" in out


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("crash", "killed by SIGSEGV"),
        ("hang", "no answer within 1 s"),
        ("eat", "exceeded 0.4 GiB"),
        ("past", "killed by SIG"),
        ("leave", "raised SystemExit"),
    ],
)
def test_a_build_that_breaks_is_rejected_and_the_others_go_on(say: Say, source: Path, name: str, cause: str) -> None:
    bad, good = f"{source}:{name}", f"{source}:wgrad"
    limits = ("--time-limit", "1" if name == "hang" else "30", "--memory-limit", "0.4")
    code, out, err = say("run", "--op", "wgrad", "--build", bad, "--build", good, *FEW, *limits)
    assert code == 1 and err == ""
    # After two hangs the rest of a build's cases are given up; with two at work a third may have begun by then.
    rejected = "[23]" if name == "hang" else "3"
    assert re.search(f"REJECT wgrad/mine.{name}: contract on {rejected} of 3 cases", out) and cause in out
    assert "1 accepted, 1 rejected" in out


def test_builds_that_fork_and_talk_are_judged_by_their_answers(say: Say, source: Path) -> None:
    code, out, err = say("run", "--op", "wgrad", "--build", f"{source}:fork", "--build", f"{source}:talk", *FEW)
    assert code == 0 and "2 accepted" in out and "xxx" not in out + err


def test_a_build_that_hangs_is_given_up_after_two_cases(say: Say, source: Path) -> None:
    names = ("ramp1.5/exact-sum", "ramp1.5/signature", "skew2/exact-sum", "ramp1.5/normal")
    words = ("run", "--op", "wgrad", "--build", f"{source}:hang", "--time-limit", "0.5", "--jobs", "1")
    began = time.monotonic()
    code, out, _ = say(*words, *(word for name in names for word in ("--case", f"wgrad/64x96/{name}")))
    assert code == 1 and "contract on 2 of 4 cases" in out and time.monotonic() - began < 8
    results = Path(".mxgate/results.jsonl")
    kept = _lines(results)
    assert len(kept) == 2 and all(line["outcome"] == "reject" for line in kept)


def test_what_goes_on_after_a_hang_says_what_an_unbroken_run_says(say: Say, source: Path) -> None:
    """Cases that were given up are not kept, so that one of them alone can still be run."""
    names = ("ramp1.5/exact-sum", "ramp1.5/signature", "skew2/exact-sum", "ramp1.5/normal")
    words = ["run", "--op", "wgrad", "--build", f"{source}:hang", "--time-limit", "0.5", "--jobs", "1"]
    chosen = [*words, *(word for name in names for word in ("--case", f"wgrad/64x96/{name}"))]
    _, first, _ = say(*chosen)
    results = Path(".mxgate/results.jsonl")
    kept = _lines(results)
    verdict, _, rest = first.partition("\n\n1 rejected (smoke tier): ")
    assert "contract on 2 of 4 cases" in verdict and rest.startswith("4 results in ")
    for again in (chosen, ["report", ".mxgate"]):
        _, said, _ = say(*again)
        assert said.partition("\n\n1 rejected")[0] == verdict and "0 results in 0.0 s, 4 kept from before" in said
        assert _lines(results) == kept, "nothing was run again"
    results.write_text("".join(results.read_text().splitlines(keepends=True)[:1]))  # stopped after the first hang
    _, said, _ = say(*chosen)
    assert said.partition("\n\n1 rejected")[0] == verdict and "3 results in " in said
    _, said, _ = say(*words, "--case", f"wgrad/64x96/{names[-1]}")
    assert "contract on 1 of 1 cases" in said


def test_hangs_count_whatever_gates_are_asked_for(say: Say, source: Path) -> None:
    """No finding of the gate `exact` speaks of time, and a run that goes on waits for no more hangs all the same."""
    names = ("ramp1.5/exact-sum", "ramp1.5/signature", "skew2/exact-sum")
    words = ["run", "--op", "wgrad", "--build", f"{source}:hang", "--time-limit", "0.5", "--jobs", "1"]
    chosen = [*words, "--gate", "exact", *(word for name in names for word in ("--case", f"wgrad/64x96/{name}"))]
    assert "3 results in " in say(*chosen)[1]
    kept = _lines(Path(".mxgate/results.jsonl"))
    assert [line["hung"] for line in kept] == [True, True]
    assert "0 results in 0.0 s, 3 kept from before" in say(*chosen)[1]


def test_registered_builds_and_lineage(say: Say) -> None:
    code, out, _ = say("run", "--build", "numpy_windowed", *FEW)
    assert code == 0 and "1 accepted" in out
    (line, *_) = _lines(Path(".mxgate/results.jsonl"))
    assert line["gates"]["lineage"] == "pass"


def test_output_types_are_asked_of_callables_that_take_them(say: Say, tmp_path: Path, source: Path) -> None:
    typed = source.read_text().replace("x_scales, offsets):", "x_scales, offsets, *, out_dtype=ml_dtypes.bfloat16):", 1)
    typed = typed.replace(".astype(ml_dtypes.bfloat16)", ".astype(out_dtype)").replace(
        "ml_dtypes.bfloat16)\n", "out_dtype)\n"
    )
    (tmp_path / "typed.py").write_text(typed)
    cases = [f"wgrad/64x96/ramp1.5/{name}" for name in ("exact-sum+float16", "normal+float32")]
    chosen = [word for case in (*FEW_CASES, *cases) for word in ("--case", case)]
    code, out, err = say("run", "--op", "wgrad", "--build", f"{source}:wgrad", "--build", "typed.py:wgrad", *chosen)
    assert code == 0, out + err
    for line in _lines(Path(".mxgate/results.jsonl")):
        asked = line["build"] == "wgrad/typed.wgrad" or line["case"] not in cases
        assert line["outcome"] == ("pass" if asked else "skip"), line
        assert line["skipped"] == (None if asked else "takes no out_dtype")


def test_a_second_run_repeats_nothing(say: Say, source: Path) -> None:
    words = ("run", "--op", "wgrad", "--build", f"{source}:wgrad", *FEW)
    say(*words)
    code, out, _ = say(*words)
    assert code == 0 and "0 results in" in out and "3 kept from before" in out
    assert len(_lines(Path(".mxgate/results.jsonl"))) == 3
    assert "3 results in" in say(*words, "--fresh")[1]
    assert "3 results in" in say(*words, "--time-limit", "50")[1], "another limit is another result"
    source.write_text(source.read_text() + "# changed\n")
    assert "3 results in" in say(*words)[1], "another source is another result"


def test_a_killed_run_goes_on_without_losing_or_repeating(tmp_path: Path, source: Path) -> None:
    words = [
        "run",
        "--op",
        "wgrad",
        "--build",
        f"{source}:slow",
        "--jobs",
        "1",
        "--json",
        "--case",
        "wgrad/64x96/[ers]*",
    ]
    command = [sys.executable, "-m", "mxgate.conformance", *words]
    results = tmp_path / ".mxgate/results.jsonl"
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (results.exists() and results.read_bytes().count(b"\n") >= 3):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = results.read_bytes()
    with results.open("ab") as file:
        file.write(b'{"build": "wgrad/mine.slow", "case": "wgr')  # what a kill in the middle of a write leaves
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    document = json.loads(done.stdout)
    assert done.returncode == 3, "some cases of a tier are no accept, resumed or not"
    assert "were not asked for" in document["verdicts"][0]["reason"]
    assert document["resumed"] == before.count(b"\n") >= 3
    begins = ("wgrad/64x96/e", "wgrad/64x96/r", "wgrad/64x96/s")
    total = sum(case.id.startswith(begins) for case in case_module.cases("wgrad", "smoke"))
    assert document["ran"] == total - document["resumed"]
    after = _lines(results)
    assert results.read_bytes().startswith(before) and len(after) == total
    assert len({(line["build"], line["case"]) for line in after}) == total


@pytest.mark.parametrize(
    ("sent", "kept"), [(signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_IGN)]
)
def test_an_interrupt_leaves_no_child_behind(tmp_path: Path, source: Path, sent: signal.Signals, kept: Any) -> None:
    """Nor does a polite kill, even of a command that ignores SIGINT as a shell's background jobs do."""
    words = ["run", "--op", "wgrad", "--build", f"{source}:hang", "--jobs", "2"]
    command = [sys.executable, "-m", "mxgate.conformance", *words]
    with sigint(kept):
        process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if not children.exists():
        process.kill()
        pytest.skip("needs the kernel's list of children")
    deadline = time.monotonic() + 60

    def workers() -> set[int]:
        tasks = Path(f"/proc/{process.pid}/task").glob("*/children")
        return {int(pid) for task in tasks for pid in task.read_text().split()}

    while time.monotonic() < deadline and len(workers()) < 2:
        time.sleep(0.05)
    time.sleep(0.5)
    seen = workers()
    process.send_signal(sent)
    assert process.wait(20) == 130
    assert process.stderr is not None and process.stderr.read() == (
        b"mxgate: interrupted; the same command goes on from here\n"
    )
    process.stderr.close()
    assert len(seen) == 2
    for pid in seen:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_an_older_versions_results_are_one_line_and_stay(say: Say, source: Path) -> None:
    """However many, and one more for damaged ones; the run judges again, and a report over the folder is right."""
    words = ("run", "--op", "wgrad", "--build", f"{source}:neighbour", *FEW)
    say(*words)
    results = Path(".mxgate/results.jsonl")
    older = b"".join(
        json.dumps({k: v for k, v in line.items() if k != "device"}).encode() + b"\n" for line in _lines(results)
    )
    results.write_bytes(older + b"torn\n" + b"torn\n")
    notes = [
        f".mxgate/results.jsonl: {what}; they are not counted, and stay in the file"
        for what in (
            "3 lines are of another version of mxgate (line 1 has no 'device')",
            "2 lines are damaged (line 4 is no JSON)",
        )
    ]
    code, out, err = say("explain", ".mxgate")
    assert (code, out) == (2, "") and err == (
        f"mxgate: nothing was rejected in .mxgate; {'; '.join(notes)}; give both --build and --case to look anyway\n"
    )
    code, out, _ = say(*words)
    assert code == 1 and "3 results in" in out and "kept from before" not in out
    assert [line for line in out.splitlines() if line.startswith("note: ")] == [f"note: {note}" for note in notes]
    assert results.read_bytes().startswith(older + b"torn\n") and results.read_bytes().count(b"\n") == 8
    assert "3 kept from before" in say(*words)[1]
    code, out, _ = say("report", ".mxgate", "--json")
    document = json.loads(out)
    assert code == 1 and document["warnings"] == notes and document["resumed"] == 3
    assert say("explain", ".mxgate")[2] == "".join(f"mxgate: note: {note}\n" for note in notes)


def test_shards_add_up_to_the_whole(say: Say, source: Path) -> None:
    names = ("empties/signature", "shift32/special", "ramp1.5/normal")
    cases = [word for name in names for word in ("--case", f"wgrad/64x96/{name}")]
    words = ("run", "--op", "wgrad", "--build", f"{source}:wgrad", "--build", f"{source}:neighbour", *cases)
    code, out, _ = say(*words, "--shard", "1/2", "--out", "one")
    assert code == 1 and "3 results" in out and "shard 1/2, 3 results still missing" in out
    assert not Path("one/certificates").exists()
    say(*words, "--shard", "2/2", "--out", "two")
    pairs = [{(line["build"], line["case"]) for line in _lines(Path(d) / "results.jsonl")} for d in ("one", "two")]
    assert not pairs[0] & pairs[1] and len(pairs[0] | pairs[1]) == 6
    code, out, _ = say("report", "one", "two")
    assert code == 1 and "1 accepted, 1 rejected" in out and Path(".mxgate/report/junit.xml").exists()
    code, out, _ = say("report", "one")
    assert code == 1 and "have no result yet" in out
    say("report", "one", "--out", "apart")
    assert Path("apart/junit.xml").exists() and Path("apart/run.json").exists()
    # The same folder does as well.
    say(*words, "--shard", "1/2", "--out", "both")
    code, out, _ = say(*words, "--shard", "2/2", "--out", "both")
    assert code == 1 and "1 accepted, 1 rejected" in out and "0 results still missing" in out


def test_junit_has_a_testcase_for_every_case_and_gate(say: Say, source: Path, tmp_path: Path) -> None:
    say("run", "--op", "wgrad", "--build", f"{source}:neighbour", "--build", f"{source}:leave", *FEW)
    root = ElementTree.parse(tmp_path / ".mxgate/junit.xml").getroot()
    suites = root.findall("testsuite")
    assert root.tag == "testsuites" and [s.get("name") for s in suites] == ["wgrad/mine.neighbour", "wgrad/mine.leave"]
    for suite in suites:
        tests = suite.findall("testcase")
        assert len(tests) == int(suite.get("tests", "")) == len(FEW_CASES) * len(GATES)
        assert all(t.get("classname") and t.get("name") and float(t.get("time", "")) >= 0 for t in tests)
        for tag, count in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
            assert len(suite.findall(f"testcase/{tag}")) == int(suite.get(count, "")), tag
        assert all(e.get("message") for e in suite.iterfind("testcase/*"))
        assert suite.find("testcase/failure") is not None


def test_a_pointer_that_cannot_be_written_is_no_error(say: Say, source: Path) -> None:
    Path(".mxgate").write_text("in the way")
    code, _, err = say("run", "--op", "wgrad", "--build", f"{source}:wgrad", *FEW, "--out", "elsewhere")
    assert code == 0 and err == "" and Path("elsewhere/run.json").exists()
