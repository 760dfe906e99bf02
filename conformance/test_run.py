"""The command from end to end, on few cases: verdicts, exit codes, files, resuming, and what bad input gets.

The gates themselves are tested elsewhere; here a build's verdict only has to arrive. Not covered: a machine that loses
power between two lines (a kill is), and more than two runs writing into one folder at a time.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import mxgate.oracle
from mxgate.conformance import case as case_module
from mxgate.conformance import certificate, machine, report, run
from mxgate.conformance.__main__ import COMMANDS, main
from mxgate.conformance.__main__ import parser as main_parser
from mxgate.conformance.conftest import sigint
from mxgate.conformance.run import Journal, Settings, code_version, from_line, read_results, to_line
from mxgate.conformance.verdict import GATES, CaseResult, Finding, Outcome
from mxgate.fixtures import CAPTURED
from mxgate.kernels.build import Build, find, registry
from mxgate.kernels.faults import FAULTS

SOURCE = """
import os, sys, time
import numpy as np
import ml_dtypes

def real(values, scales, start, end):
    codes = scales.view(np.uint8)[:, start // 32:end // 32].astype(int)
    codes = np.repeat(codes, 32, axis=1)
    return np.where(codes == 255, np.nan, np.ldexp(values[:, start:end].astype(np.float64), codes - 127))

def wgrad(dy_t, dy_scales, x_t, x_scales, offsets):
    out = np.zeros((len(offsets), dy_t.shape[0], x_t.shape[0]), ml_dtypes.bfloat16)
    start = 0
    for g, end in enumerate(offsets):
        a, b = real(dy_t, dy_scales, start, end), real(x_t, x_scales, start, end)
        out[g] = (a @ b.T).astype(np.float32).astype(ml_dtypes.bfloat16)
        start = end
    return out

def neighbour(dy_t, dy_scales, x_t, x_scales, offsets):
    return wgrad(dy_t, np.roll(dy_scales, 1, axis=1), x_t, x_scales, offsets)

def crash(*operands):
    os.kill(os.getpid(), 11)

def hang(*operands):
    time.sleep(600)

def eat(*operands):
    kept = []
    while True:
        kept.append(np.ones(1 << 22))

def past(dy_t, dy_scales, x_t, x_scales, offsets):
    import ctypes
    ctypes.memset(offsets.ctypes.data, 0, offsets.nbytes + 64)

def leave(*operands):
    sys.exit(0)

def fork(*operands):
    os.fork()
    return wgrad(*operands)

def talk(*operands):
    print("x" * 100_000)
    return wgrad(*operands)

def slow(*operands):
    time.sleep(0.02)
    return wgrad(*operands)
"""
FEW_CASES = ("wgrad/64x96/empties/signature", "wgrad/64x96/shift32/special", "wgrad/64x96/ramp1.5/normal")
FEW = tuple(word for case in FEW_CASES for word in ("--case", case))  # together they speak to every mandatory gate
Say = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("builds") / "mine.py"
    path.write_text(textwrap.dedent(SOURCE))
    return path


@pytest.fixture(autouse=True)
def few_are_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever cases a test names are its whole tier: an accept stays within reach of a short test."""
    monkeypatch.setattr(run, "left_out", lambda build, tier, cases: 0)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---------------------------------------------------------------------------------------------------------------------
# Verdicts


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
    kept = _lines(Path(".mxgate/results.jsonl"))
    assert len(kept) == 2 and all(line["outcome"] == "reject" for line in kept)


def test_registered_builds_and_lineage(say: Say) -> None:
    code, out, _ = say("run", "--build", "numpy_windowed", *FEW)
    assert code == 0 and "1 accepted" in out
    (line, *_) = _lines(Path(".mxgate/results.jsonl"))
    assert line["gates"]["lineage"] == "pass"


def _imports(path: Path) -> Iterator[Path]:
    """The files of ours that a file of ours imports, wherever in it. Packages of modules are left out."""
    top = Path(mxgate.oracle.__file__).parents[1]
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.ImportFrom):
            base = path.parent if node.level else top
            parts = (node.module or "").split(".") if node.level else (node.module or "").split(".")[1:]
            for name in ("", *(alias.name for alias in node.names)):
                stem = base.joinpath(*(part for part in (*parts, name) if part))
                if (node.level or (node.module or "").startswith("mxgate")) and stem.with_suffix(".py").is_file():
                    yield stem.with_suffix(".py")


# What judging imports and no result depends on, and why.
NOT_JUDGING = {
    "conformance/machine.py": "names the device, which every result has beside its stamp",
    "conformance/cluster.py": "hands the work out",
    "kernels/installed.py": "makes records of builds, which are in their fingerprints",
    "kernels/gfx950/ledger.py": "in the fingerprints of emulated builds",
    "kernels/gfx950/virtual.py": "in the fingerprints of emulated builds",
}


def test_the_version_is_of_all_that_judging_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not seen: what is imported by a name that is put together at run time, as builds are."""
    read: set[str] = set()
    top = Path(mxgate.oracle.__file__).resolve().parents[1]

    def note(path: Path) -> bytes:
        read.add(path.resolve().relative_to(top).as_posix())
        return path.open("rb").read()

    monkeypatch.setattr(Path, "read_bytes", note)
    assert run.code_version.__wrapped__() == code_version()
    monkeypatch.undo()
    todo, seen = [Path(run.__file__).resolve()], set[str]()
    while todo:
        path = todo.pop()
        name = path.resolve().relative_to(top).as_posix()
        if name not in seen | set(NOT_JUDGING):
            seen.add(name)
            todo += _imports(path)
    assert read - {"fixtures/MANIFEST.json"} == seen
    assert "kernels/tensors.py" in seen and "oracle/exact.py" in seen


# ---------------------------------------------------------------------------------------------------------------------
# Results that last


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


def _result(case: str = "wgrad/a", **changes: Any) -> CaseResult:
    finding = Finding("exact", "3 of 9 differ", ("expert 0: \x00 \u2028",), 3, {"x": float("nan")})
    fields = {"gates": {"exact": Outcome.REJECT}, "findings": (finding,), **changes}
    return CaseResult("wgrad/b", "f" * 64, case, seconds=0.5, **fields)


def test_lines_come_back_as_they_went() -> None:
    key, back = from_line(to_line(_result(), "stamp"))
    assert key == ("wgrad/b", "f" * 64, "wgrad/a", "stamp")
    assert back.findings[0].where == ("expert 0: \x00 \u2028",) and back.findings[0].detail == {"x": "nan"}
    assert "\n" not in to_line(_result(), "stamp")
    skipped = _result(gates={}, findings=(), skipped="takes no bias")
    assert from_line(to_line(skipped, "s"))[1] == skipped


def _record(**changes: Any) -> bytes:
    """A line with other fields; a field that is changed to `...` is left out."""
    record = {**json.loads(to_line(_result(), "s")), **changes}
    return json.dumps({name: value for name, value in record.items() if value is not ...}).encode()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"", "damaged (line 2 is no JSON)"),
        (b'{"build": 1', "damaged (line 2 is no JSON)"),
        (b"null", "damaged (line 2 is no record)"),
        (b"[]", "damaged (line 2 is no record)"),
        (b"17", "damaged (line 2 is no record)"),
        (b"\xff\xfe", "damaged (line 2 is no JSON)"),
        (b"[" * 100_000, "damaged (line 2 is no JSON)"),
        (_record(device=...), "of another version of mxgate (line 2 has no 'device')"),
        (_record(build=["b"]), "of another version of mxgate (line 2 has a 'build' of another type)"),
        (_record(seconds=10**400), "of another version of mxgate (line 2 has 'seconds' that are no time)"),
        (_record(seconds=float("nan")), "of another version of mxgate (line 2 has 'seconds' that are no time)"),
        (_record(gates={"exact": "fine"}), "of another version of mxgate (line 2 has 'fine' of a gate 'exact')"),
        (_record(gates={"exact": ["pass"]}), "of another version of mxgate (line 2 has ['pass'] of a gate 'exact')"),
        (_record(gates={"x": "pass"}), "of another version of mxgate (line 2 has 'pass' of a gate 'x')"),
        (_record(gates={}), "of another version of mxgate (line 2 has no gate's outcome)"),
        (_record(findings=[[]]), "of another version of mxgate (line 2 has a finding that is no record)"),
        (_record(findings=[{"gate": "exact"}]), "of another version of mxgate (line 2 has no 'what' in a finding)"),
    ],
)
def test_hostile_lines_are_left_out_and_named(tmp_path: Path, line: bytes, said: str) -> None:
    good = to_line(_result(), "s").encode()
    (tmp_path / "results.jsonl").write_bytes(good + b"\n" + line + b"\n" + good.replace(b"wgrad/a", b"wgrad/c") + b"\n")
    results, strange = read_results(tmp_path / "results.jsonl")
    assert {key[2] for key in results} == {"wgrad/a", "wgrad/c"}
    where = tmp_path / "results.jsonl"
    assert strange == [f"{where}: 1 line is {said}; it is not counted, and stays in the file"]


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


def test_a_torn_line_is_cut_off_before_more_is_written(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    whole = to_line(_result(), "s").encode() + b"\n"
    for torn in range(0, len(whole), 37):
        path.write_bytes(whole + whole[:torn])
        journal = Journal(tmp_path)
        journal.append(_result("wgrad/new"), "s")
        journal.close()
        results, strange = read_results(path)
        assert not strange and {key[2] for key in results} == {"wgrad/a", "wgrad/new"}


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


# ---------------------------------------------------------------------------------------------------------------------
# Bad input


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("runn", "no command named 'runn'; did you mean run?"),
        ("run --op wgard", "no op named 'wgard'; did you mean wgrad"),
        ("run --build numpy_referense", "no build named 'numpy_referense'; did you mean numpy_reference"),
        ("run --op forward --build numpy_windowed", "build 'numpy_windowed' computes wgrad, not forward"),
        ("run --gate exat", "no gate named 'exat'; did you mean exact?"),
        ("run --case wgrad/64x96/ramp1.5/signatur", "no case named 'wgrad/64x96/ramp1.5/signatur'; did you mean"),
        ("run --case nothing/*", "no case named 'nothing/*'; the nearest of"),
        ("run --tier smok", "no tier named 'smok'; did you mean smoke?"),
        ("run --build no/such.py:wgrad", "no file 'no/such.py'"),
        ("run --build no.such.module:wgrad", "no.such"),
        ("run --build mine.py", "names a file and no callable; expected mine.py:CALLABLE"),
        ("run --build mine.py:f", "no file 'mine.py'; a build is path/to/file.py:callable"),
        ("run --shard 3/2", "'3/2' is no shard; expected i/n"),
        ("run --shard x", "'x' is no shard"),
        ("run --jobs 0", "'0' is not a whole number above 0"),
        ("run --time-limit nan", "'nan' is not a number above 0"),
        ("run --memory-limit -1", "'-1' is not a number above 0"),
        ("run --seed -3", "'-3' is not a whole number of at least 0"),
        ("run --bogus", "unrecognized arguments: --bogus"),
        ("run --out /proc/none/such", "cannot write to '/proc/none/such'"),
        ("report nowhere", "nowhere holds no run"),
        ("list bulids", "no listing named 'bulids'; did you mean builds?"),
        ("time", "the following arguments are required: CERTIFICATE"),
        ("time nowhere.json", "nowhere.json: No such file or directory"),
        ("explain", "there is no earlier run here"),
        ("explain --build numpy_reference --case wgrad/nope", "no case named 'wgrad/nope'"),
        ("run --device cuda --build wgrad/numpy_reference", "does not run with --device cuda; expected cpu or all"),
        ("fixtures verify there", "`mxgate fixtures verify` takes no folder; expected one of export alone"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(say: Say, words: str, said: str) -> None:
    code, out, err = say(*words.split())
    assert code == 2 and out == "" and said in err
    assert err.startswith("mxgate: ") and err.count("\n") == 1 and "Traceback" not in err


@pytest.mark.parametrize("name", [name for name, *_ in COMMANDS])
def test_help_fits_and_says_what_the_exit_codes_mean(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not caught: a help text that is wrong."""
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    out = capsys.readouterr().out
    assert ended.value.code == 0 and max(map(len, out.splitlines())) <= 100
    assert "\nexit codes: " in out and "; 2 bad usage or input" in " ".join(out.split())
    parsed = main_parser()._subparsers._group_actions[0].choices[name]  # type: ignore[union-attr, index]
    for action in parsed._actions:
        assert action.help, f"{name} {action.dest}"
        said = f"(default {action.default:g}" if isinstance(action.default, int | float) and action.default > 1 else ""
        assert said in action.help, f"{name} {action.dest}: {action.help}"


def test_explain_takes_a_build_as_run_does(say: Say, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    say("run", "--op", "wgrad", "--build", f"{source}:neighbour", *FEW)
    near = os.path.relpath(source)
    code, out, err = say("explain", ".mxgate", "--build", f"{near}:neighbour")
    assert code == 1 and out.startswith("wgrad/mine.neighbour on ") and err == ""


def test_a_table_that_is_too_wide_loses_no_column(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    """Least of all the last one, where it is what a newcomer looks for: what is not installed."""
    monkeypatch.setattr(Build, "missing", lambda build: "flydsl" if build.device == "gfx950" else None)
    lines = say("list", "builds")[1].splitlines()
    assert lines[0].split() == ["build", "device", "formats", "align", "accumulator", "replaces", "needs"]
    assert max(map(len, lines)) <= 100 and "…" not in "".join(lines)
    assert [line.split()[-1] for line in lines if line.startswith("wgrad/flydsl")] == ["flydsl"] * 3
    from io import StringIO

    stream = StringIO()
    rows = [["a" * 30, "b" * 40, "c" * 60, "and words that are wrapped here"]]
    report.table(report.console(stream), ["first", "second", "third", "last"], rows)
    wide = stream.getvalue().splitlines()
    assert max(map(len, wide)) <= 100 and wide[1].startswith("a" * 30 + " ") and "last" in wide[0]
    assert "".join("".join(line[88:].split()) for line in wide[1:]) == "andwordsthatarewrappedhere"


def test_an_outside_build_that_cannot_be_loaded_is_bad_input(say: Say, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise RuntimeError('no device')\n")
    code, _, err = say("run", "--build", "broken.py:wgrad")
    assert code == 2 and "broken.py:wgrad cannot be loaded: raised RuntimeError at broken.py:1: no device" in err


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "null", '{"stamp": 1}', '{"builds": [{}]}', "[" * 100_000])
def test_a_strange_plan_is_bad_input(say: Say, tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    for command in ("report", "explain"):
        code, _, err = say(command, tmp_path)
        assert code == 2 and "is not what `mxgate run` writes" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"tier": "bogus"},
        {"tier": ["smoke"]},
        {"gates": ["exact", "unheard-of"]},
        {"gates": []},
        {"gates": "exact"},
        {"limits": {"seconds": "x", "memory": 8}},
        {"limits": {"seconds": -1, "memory": 8}},
        {"stamp": None},
        {"build": {"name": 3}},
        {"build": {"name": "../../elsewhere"}},
        {"build": {"nan_reach": "far"}},
        {"build": {"group_alignment": 0}},
    ],
)
def test_a_plan_with_strange_values_is_bad_input(say: Say, tmp_path: Path, changes: dict[str, Any]) -> None:
    (tmp_path / "results.jsonl").write_text("")
    plan = json.loads(_plan_of("numpy_windowed"))
    plan["builds"][0].update(changes.pop("build", {}))
    (tmp_path / "run.json").write_text(json.dumps({**plan, **changes}))
    for command in ("report", "explain"):
        code, _, err = say(command, tmp_path)
        assert code == 2 and "is not what `mxgate run` writes" in err and err.count("\n") == 1, err


def _plan_of(build: str) -> str:
    settings = Settings()
    record = asdict(find("wgrad", build))
    limits = asdict(settings.limits)
    plan = {"tier": "smoke", "gates": GATES, "limits": limits, "builds": [record], "cases": [FEW[1]]}
    return json.dumps({**plan, "stamp": settings.stamp})


def test_results_of_another_version_are_not_reported(say: Say, tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text("")
    (tmp_path / "run.json").write_text(_plan_of("numpy_windowed"))
    assert say("report", tmp_path)[0] == 3
    (tmp_path / "run.json").write_text(_plan_of("numpy_windowed").replace(code_version(), "0123456789abcdef"))
    code, out, err = say("report", tmp_path)
    assert code == 2 and out == "" and "judged by another version of mxgate or of Python; run it again" in err


def test_a_damaged_captured_step_is_one_line(
    say: Say, accepted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in ("early", "late"):
        whole = (CAPTURED / f"{step}.safetensors").read_bytes()
        (tmp_path / f"{step}.safetensors").write_bytes(whole[: len(whole) // 2])
    monkeypatch.setattr(case_module, "CAPTURED", tmp_path)
    case_module.captured.cache_clear()
    case_module.cases.cache_clear()
    try:
        id = "wgrad/moe0.down/early/captured"
        for words in ("run", f"run --case {id}", "list cases", f"explain --build numpy_windowed --case {id}", "faults",
                      f"time {accepted} --case {id}"):  # fmt: skip
            code, out, err = say(*words.split())
            assert code == 2 and out == "" and err.count("\n") == 1, (words, err)
            assert err.startswith(f"mxgate: {tmp_path}/early.safetensors: "), err
    finally:
        case_module.captured.cache_clear()
        case_module.cases.cache_clear()


def test_a_pointer_that_cannot_be_written_is_no_error(say: Say, source: Path) -> None:
    Path(".mxgate").write_text("in the way")
    code, _, err = say("run", "--op", "wgrad", "--build", f"{source}:wgrad", *FEW, "--out", "elsewhere")
    assert code == 0 and err == "" and Path("elsewhere/run.json").exists()


def test_faults_that_cannot_run_are_inconclusive(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Build, "missing", lambda self: "a_package")
    code, out, _ = say("faults", "--fault", FAULTS[0].build.id)
    assert code == 3 and "a_package" in out


def test_a_closed_pipe_is_no_traceback(tmp_path: Path) -> None:
    command = f"{sys.executable} -m mxgate.conformance list cases --tier full | head -1"
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stderr == "" and done.stdout.startswith("case")


# ---------------------------------------------------------------------------------------------------------------------
# Certificates and time


@pytest.fixture
def accepted(say: Say, source: Path, tmp_path: Path) -> Path:
    assert say("run", "--op", "wgrad", "--build", f"{source}:wgrad", *FEW)[0] == 0
    return tmp_path / ".mxgate/certificates/wgrad-mine.wgrad.json"


def test_time_takes_a_certificate(say: Say, accepted: Path) -> None:
    quick = ("--rounds", "2", "--seconds", "0.02")
    code, out, err = say("time", accepted, *quick)
    assert code == 0 and "wgrad/mine.wgrad" in out and "median ms" in out and err == ""
    code, out, _ = say("time", accepted, *quick, "--json", "--case", "wgrad/64x96/empties/signature@5")
    (timing,) = json.loads(out)["timings"]
    assert (
        code == 0 and 0 < timing["best"] <= timing["low"] <= timing["median"] <= timing["high"] and timing["calls"] >= 2
    )


def test_time_refuses(say: Say, accepted: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(said: str, *words: str) -> None:
        code, out, err = say("time", accepted, *words)
        assert code == 2 and out == "" and said in err and err.count("\n") == 1, err

    text = accepted.read_text()
    other = "wgrad/288x320/single/exact-sum"
    refused(f"was not accepted on the shape class of {other}; it covers shapes 64x96", "--case", other)
    refused("no case named", "--case", "wgrad/nope")
    with monkeypatch.context() as patch:
        patch.setattr(machine, "device", lambda: "cpu: another, x86_64")
        refused("was accepted on another device")
    with monkeypatch.context() as patch:
        patch.setattr(certificate, "code_version", lambda: "0")
        refused("was accepted by another version of the oracle or the gates")
    accepted.write_text(text.replace('"tier": "smoke"', '"tier": "full"'))
    refused("was changed after it was written")
    for broken in ("", "[" * 100_000):
        accepted.write_text(broken)
        refused("is not JSON")
    for broken in ("{}", "3", "null"):
        accepted.write_text(broken)
        refused("is no certificate of this version")
    accepted.write_text('{"certificate": "mxgate certificate 2"}')
    refused("was changed after it was written")
    accepted.write_text(text)
    before = source.read_text()
    source.write_text(before + "\n")
    refused("has changed since it was accepted (its source or options)")
    where = min(os.path.relpath(source), str(source), key=len)
    refused(f"run `mxgate run --op wgrad --build {where}:wgrad` again")
    source.unlink()
    refused("the source of wgrad/mine.wgrad is gone")
    source.write_text(before)
    assert say("time", accepted, "--rounds", "1", "--seconds", "0.01")[0] == 0


def test_no_number_for_an_output_that_changes(say: Say, tmp_path: Path, source: Path) -> None:
    """Accepted while a file is absent, wrong once it is there: the source is the same, the output is not."""
    trap = tmp_path / "trap"
    (tmp_path / "turncoat.py").write_text(
        f"import os, sys\nsys.path.insert(0, {str(source.parent)!r})\nimport mine\ncalls = 0\n"
        "def wgrad(*operands):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    out = mine.wgrad(*operands)\n"
        f"    if os.path.exists({str(trap)!r}) and calls > 5:\n"
        "        out.view('u2')[-1, 0, 0] ^= 1\n"
        "    return out\n"
    )
    assert say("run", "--build", "turncoat.py:wgrad", *FEW)[0] == 0
    trap.touch()
    code, out, _ = say("time", ".mxgate/certificates/wgrad-turncoat.wgrad.json", "--rounds", "1", "--seconds", "0.05")
    assert code == 1 and "no time for wgrad/turncoat.wgrad: its output changed while it was being timed" in out
    assert "median" not in out


# ---------------------------------------------------------------------------------------------------------------------
# explain, fixtures, bench-oracle


def test_explain_takes_the_last_runs_failure(say: Say, source: Path) -> None:
    build = f"{source}:neighbour"
    say("run", "--op", "wgrad", "--build", build, *FEW)
    code, out, err = say("explain")
    assert code == 1 and err == ""
    assert out.startswith("wgrad/mine.neighbour on wgrad/64x96/empties/signature\n")
    assert "exact: " in out and "cause (" in out and "2 more rejected results in this run" in out
    code, out, _ = say("explain", "--build", f"{source}:wgrad", "--case", FEW[1])
    assert code == 0 and out == f"wgrad/mine.wgrad on {FEW[1]}: passes every gate\n"
    assert "nothing that --build and --case choose was rejected" in say("explain", "--build", "numpy_reference")[2]


def test_explain_when_the_failure_does_not_come_back(say: Say, tmp_path: Path, source: Path) -> None:
    (tmp_path / "once.py").write_text(source.read_text())
    say("run", "--op", "wgrad", "--build", "once.py:neighbour", *FEW[:2])
    text = source.read_text().replace("np.roll(dy_scales, 1, axis=1)", "dy_scales")
    (tmp_path / "once.py").write_text(text)
    code, out, _ = say("explain")
    assert code == 0 and "passes every gate" in out and "it failed before" in out


def test_fixtures(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    from mxgate.conformance import golden
    from mxgate.fixtures.store import StoreError

    code, out, _ = say("fixtures", "list")
    assert code == 0 and "wgrad/" in out and "hashes in the manifest" in out
    monkeypatch.setattr(golden, "verify", lambda say: [say("a"), "golden/a: value[3] differs"][1:])
    assert say("fixtures", "verify")[:2] == (1, "golden/a: value[3] differs\n1 differences\n")
    monkeypatch.setattr(golden, "verify", lambda say: [])
    assert say("fixtures", "verify")[0] == 0

    def broken(say: object) -> list[str]:
        raise StoreError("MANIFEST.json: no such file")

    monkeypatch.setattr(golden, "verify", broken)
    assert say("fixtures", "verify") == (2, "", "mxgate: MANIFEST.json: no such file\n")
    assert "did you mean verify?" in say("fixtures", "verfy")[2]


def test_fixtures_export(say: Say, tmp_path: Path) -> None:
    from mxgate.conformance import golden

    code, out, err = say("fixtures", "export", tmp_path / "raw")
    index = json.loads((tmp_path / "raw/index.json").read_text())
    assert (code, err) == (0, "") and f"{len(index)} cases in" in out
    assert list(index) == [case.id for case in golden.stored()]
    code, _, err = say("fixtures", "export")
    assert code == 2 and "expected `mxgate fixtures export DIR`" in err
    (tmp_path / "file").write_text("")
    code, _, err = say("fixtures", "export", tmp_path / "file")
    assert code == 2 and err.count("\n") == 1


@pytest.mark.parametrize(
    ("ratio", "same", "cost", "code", "word"),
    [
        (2.5, True, 3.9, 0, "met"),
        (1.9, True, 3.9, 1, "MISSED"),
        (2.5, True, 4.1, 1, "MISSED"),
        (float("nan"), True, 3.0, 1, "MISSED"),
        (None, False, 3.0, 1, "other bytes than peer"),
        (None, None, 3.0, 3, "-"),
    ],
)
def test_bench_oracle_holds_ratios_to_targets(
    say: Say, monkeypatch: pytest.MonkeyPatch, ratio: float | None, same: bool | None, cost: float, code: int, word: str
) -> None:
    from mxgate.conformance import bench_gemm, bench_quantize

    quantize = {"shape": [4, 8], "dtype": "float32", "axis": 1, "rule": "floor", "peer": "peer", "ours_s": 0.001}
    monkeypatch.setattr(bench_quantize, "bench_quantize", lambda: [{**quantize, "ratio": ratio, "same_bytes": same}])
    rows = [{"what": "exact", "seconds": 0.1, "ratio": cost, "limit": 4.0}]
    monkeypatch.setattr(bench_gemm, "bench_wgrad", lambda: rows)
    got, out, _ = say("bench-oracle")
    assert got == code and word in out
    if ratio == ratio:
        assert len(json.loads(say("bench-oracle", "--json")[1])["rows"]) == 3
