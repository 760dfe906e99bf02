"""The commands: what bad input gets, help texts, and those that have no other test of their own.

Not covered: prose that is wrong.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from mxgate.conformance import case as case_module
from mxgate.conformance import report
from mxgate.conformance.__main__ import COMMANDS, main
from mxgate.conformance.__main__ import parser as main_parser
from mxgate.conformance.conftest import FEW, Say
from mxgate.conformance.settings import Settings
from mxgate.conformance.verdict import GATES
from mxgate.conformance.version import code_version
from mxgate.fixtures import CAPTURED
from mxgate.kernels.build import Build, find
from mxgate.kernels.faults import FAULTS

pytestmark = pytest.mark.usefixtures("few_are_all")


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
        ("run --bogus", "no option --bogus (see `mxgate run --help`)"),
        ("run --tear full", "no option --tear; did you mean --tier? (see `mxgate run --help`)"),
        ("--bogus", "no option --bogus (see `mxgate --help`)"),
        ("list builds cases", "'cases' is a word too many (see `mxgate list --help`)"),
        ("run --seed 1234567890123456789", "at least 0 and at most 18 digits"),
        ("run --html .", "cannot write '.': it is a folder; expected a file"),
        ("run --html no/such.html", "cannot write 'no/such.html': its folder does not exist"),
        ("run --out /proc/self/status", "cannot write to '/proc/self/status': it is a file; expected a folder"),
        ("report /proc/self/status", "/proc/self/status is a file; expected a folder with run.json and results.jsonl"),
        ("fixtures export /proc/self/status", "it is a file; expected a folder"),
        ("minimize --out .", "cannot write '.': it is a folder; expected a file"),
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


def test_faults_that_cannot_run_are_inconclusive(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Build, "missing", lambda self: "a_package")
    code, out, _ = say("faults", "--fault", FAULTS[0].build.id)
    assert code == 3 and "a_package" in out


def test_a_closed_pipe_is_no_traceback(tmp_path: Path) -> None:
    command = f"{sys.executable} -m mxgate.conformance list cases --tier full | head -1"
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stderr == "" and done.stdout.startswith("case")


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


def test_names_with_commas_are_told_apart() -> None:
    from mxgate.conformance.commands.usage import unknown

    assert unknown("recipe", "x", ["e4m3", "e4m3, ceil"]).endswith("expected one of e4m3, 'e4m3, ceil'")


def test_an_empty_path_is_not_the_working_directory(say: Say) -> None:
    """As of a shell's variable that is not set."""
    for words in (["run", "--out", ""], ["run", "--html", ""], ["report", ""], ["time", ""]):
        code, _, err = say(*words)
        assert code == 2 and "'' names no file or folder" in err and err.count("\n") == 1


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file that opens and cannot be read")
def test_a_file_that_cannot_be_read_is_named(say: Say) -> None:
    folder = Path("out")
    assert say("run", "--build", "wgrad/numpy_reference", *FEW[:2], "--out", folder)[0] == 3
    for name in ("results.jsonl", "run.json"):
        kept = (folder / name).read_bytes()
        (folder / name).unlink()
        (folder / name).symlink_to("/proc/self/mem")
        code, _, err = say("report", folder)
        assert code == 2 and f"out/{name}" in err and err.endswith("Input/output error\n") and err.count("\n") == 1
        (folder / name).unlink()
        (folder / name).write_bytes(kept)
