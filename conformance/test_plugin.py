"""The pytest plugin in a pytest of its own, as a user has it.

Not caught: what other plugins do to the items.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mxgate.conformance import gates
from mxgate.conformance.case import cases
from mxgate.conformance.runner import Runner
from mxgate.conformance.settings import Settings
from mxgate.conformance.test_outside import NUMPY
from mxgate.conformance.verdict import GATES, Outcome
from mxgate.kernels.build import find

TESTS = """
from pathlib import Path

import pytest

import mine
from mxgate.kernels.build import outside

CASES = ["wgrad/64x96/empties/signature", "wgrad/64x96/shift32/special", "wgrad/64x96/ramp1.5/normal"]


@pytest.fixture
def folder():
    return Path(__file__).parent


@pytest.mark.mxgate(op="wgrad", cases=CASES)
def test_callable():
    return mine.wgrad


class TestGroup:
    @pytest.mark.mxgate(op="wgrad", cases=CASES[0])
    def test_path(self, folder):
        return f"{folder / 'mine.py'}:wgrad"


@pytest.mark.mxgate(op="wgrad", cases=CASES[0], lineage=True)
def test_record():
    from dataclasses import replace

    return replace(outside("wgrad", str(Path(mine.__file__)) + ":wgrad"), replaces="wgrad/numpy_reference")


@pytest.mark.mxgate(op="wgrad", cases=CASES[0])
@pytest.mark.parametrize("how", ["late", "dies"])
def test_wrong(how):
    return f"mine.py:{how}"


@pytest.mark.mxgate(op="wgrad", cases="wgrad/64x96/ramp1.5/normal+float32")
def test_declined():
    return "mine.py:wgrad"


@pytest.mark.mxgate(op="wgrad", cases=CASES[0])
def test_skipped():
    pytest.skip("no GPU here")


def test_plain():
    assert mine.COUNT == 0
"""
MINE = (
    NUMPY
    + """

COUNT = 0


def late(dy_t, dy_scales, x_t, x_scales, offsets):
    return wgrad(dy_t, np.roll(dy_scales, 1, axis=1), x_t, x_scales, offsets)


def dies(*operands):
    raise SystemExit(3)
"""
)


def run_pytest(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """pytest in a folder, with the plugin as an installation has it."""
    known = importlib.metadata.entry_points(group="pytest11", name="mxgate")
    plugin = [] if known else ["-p", "mxgate.conformance.plugin"]
    command = [sys.executable, "-m", "pytest", *plugin, "--strict-markers", "-q", "-p", "no:cacheprovider", *words]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])),
    }
    for name in [n for n in environment if n.startswith(("PYTEST_", "COV_"))]:
        del environment[name]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("suite")
    (path / "mine.py").write_text(MINE)
    (path / "test_kernels.py").write_text(TESTS)
    return path


def test_items_outcomes_and_junit(folder: Path) -> None:
    done = run_pytest(folder, "-n", "2", "--junitxml=junit.xml", "-rs")
    assert done.returncode == 1, done.stdout + done.stderr
    found: dict[str, str] = {}
    for case in ElementTree.parse(folder / "junit.xml").iter("testcase"):
        found[case.attrib["name"]] = next((child.tag for child in case), "passed")
    one, two, three = "wgrad/64x96/empties/signature", "wgrad/64x96/shift32/special", "wgrad/64x96/ramp1.5/normal"
    of = {
        one: ("contract", "reproducible", "padding", "exact", "empty"),
        two: ("contract", "reproducible", "padding", "exact", "special"),
        three: ("contract", "reproducible", "padding", "bounded"),
    }
    want = {f"test_callable[{case}-{gate}]": "passed" for case, gates in of.items() for gate in gates}
    want |= {f"test_path[{one}-{gate}]": "passed" for gate in of[one]}
    want |= {f"test_record[{one}-{gate}]": "passed" for gate in (*of[one], "lineage")}
    rejected = {"late": ("padding", "exact"), "dies": of[one]}
    for how, gates_of in rejected.items():
        want |= {f"test_wrong[{how}-{one}-{gate}]": "failure" if gate in gates_of else "passed" for gate in of[one]}
    want |= {f"test_declined[{three}+float32-{gate}]": "skipped" for gate in of[three]}
    want |= {f"test_skipped[{one}-{gate}]": "skipped" for gate in of[one]}
    want |= {"test_plain": "passed"}
    assert found == want
    assert "wgrad/mine.wgrad takes no out_dtype" in done.stdout and "no GPU here" in done.stdout


def test_a_failure_is_the_finding_and_nothing_of_ours(folder: Path) -> None:
    done = run_pytest(folder, "-k", "late and exact or dies and contract")
    assert "2 failed" in done.stdout.splitlines()[-1]
    assert "Traceback" not in done.stdout and "plugin.py" not in done.stdout and "Error" not in done.stdout
    assert re.search(
        r"^REJECT wgrad/mine\.late: exact on wgrad/64x96/empties/signature\n"
        r"\d+ of 55296 elements are not the exact sum rounded once\n"
        r"  experts \d.*\n"
        r"  farthest \d+ ulp: expert .*\n"
        r"(  expert 2, n \d+, k \d+: 0x\w+ \(\S+\), expected 0x\w+ \(\S+\)\n){8}"
        r"  \.\.\. 12 more lines from mxgate explain\n"
        r"also rejected by padding\n"
        r"next: mxgate explain --op wgrad --build mine\.py:late --case wgrad/64x96/empties/signature\n",
        done.stdout,
        re.MULTILINE,
    ), done.stdout
    assert re.search(r"^raised SystemExit at mine\.py:\d+.* \(launch 'first'\)$", done.stdout, re.MULTILINE), (
        done.stdout
    )


def test_the_advice_works(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from mxgate.conformance.__main__ import main

    monkeypatch.chdir(folder)
    assert main(["explain", "--build", "mine.py:late", "--case", "wgrad/64x96/empties/signature"]) == 1
    assert "likely cause" in capsys.readouterr().out


def test_a_case_is_launched_once_for_its_gates(folder: Path) -> None:
    """The build writes a line for each of its processes and calls."""
    (folder / "counting.py").write_text(
        MINE.replace("    dw = np.zeros", "    open('calls', 'a').write('x')\n    dw = np.zeros")
    )
    (folder / "test_count.py").write_text(
        "import pytest\n@pytest.mark.mxgate(op='wgrad', cases='wgrad/64x96/empties/signature')\n"
        "def test_it():\n    return 'counting.py:wgrad'\n"
    )
    calls = []
    for words in (("-k", "exact"), ()):
        done = run_pytest(folder, "test_count.py", *words)
        assert done.returncode == 0, done.stdout
        calls.append((folder / "calls").read_text())
        (folder / "calls").unlink()
    assert calls[0] == calls[1] != ""


@pytest.mark.parametrize(
    ("marker", "body", "message"),
    [
        ("op='wgrad', teir='smoke'", "", r"takes no teir; expected mxgate\(op, tier='smoke'"),
        ("'wgrad'", "", "takes no 'wgrad'; expected"),
        ("", "", "op is None; expected one of forward, dgrad, wgrad, quantize"),
        ("op='wgrad', tier='big'", "", "tier is 'big'; expected one of smoke, full, production"),
        ("op='wgrad', cases='wgrad/none'", "", "no case named 'wgrad/none'"),
        ("op='wgrad', cases='forward/64x96/ramp1.5/normal'", "", "is not of wgrad"),
        ("op='wgrad', cases=C", "pass", "the test returned nothing; expected a callable"),
        ("op='wgrad', cases=C", "return lambda *a: None", "a child cannot import .*lambda.*; expected a function at a"),
        ("op='wgrad', cases=C", "return 'no.py:wgrad'", "no file 'no.py'"),
        (
            "op='wgrad', cases=C, lineage=True",
            "return 'mine.py:wgrad'",
            "replaces nothing; the marker says lineage=True",
        ),
    ],
)
def test_what_cannot_be_meant_is_said(folder: Path, tmp_path: Path, marker: str, body: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "test_it.py").write_text(
        "import pytest\nC = 'wgrad/64x96/empties/signature'\n"
        f"@pytest.mark.mxgate({marker})\ndef test_it():\n    {body or 'return 1'}\n"
    )
    done = run_pytest(tmp_path, "test_it.py", "-k", "contract")
    assert done.returncode != 0 and "Traceback" not in done.stdout + done.stderr
    assert re.search(message, done.stdout + done.stderr), done.stdout + done.stderr


def test_no_gate_speaks_unexpectedly() -> None:
    """Which gates have items is known before anything runs: where none is, the gate must be silent on a right build."""
    with Runner(Settings()) as runner:
        for op in ("wgrad", "forward", "quantize"):
            build = find(op, "numpy_reference")
            for case in cases(op, "smoke"):
                result, _ = runner.examine(build, case)
                if result.skipped is None:
                    spoke = {gate for gate, outcome in result.gates.items() if outcome is not Outcome.SILENT}
                    assert spoke == {gate for gate in GATES if gates.may_speak(gate, case)}, case.id
