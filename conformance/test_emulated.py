"""Builds whose GPU machine code is emulated: how the gate takes what only they do.

That the shipped ones are accepted is what `mxgate run` shows; here one small case must be, and what goes wrong must
arrive as the right verdict. Not covered: a machine with the GPU.
"""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from mxgate.conformance import certificate, gates, machine, report
from mxgate.conformance import run as runner
from mxgate.conformance.__main__ import main
from mxgate.conformance.case import asked, case_by_id, own_cases
from mxgate.conformance.commands.choose import choose_builds, choose_cases
from mxgate.conformance.run import RunReport, summarise
from mxgate.conformance.runner import Runner
from mxgate.conformance.settings import Settings
from mxgate.conformance.verdict import GATES, CaseResult, Outcome
from mxgate.kernels import gfx950
from mxgate.kernels.build import HIP, find, hip, registry
from mxgate.kernels.flydsl import compile as isa
from mxgate.kernels.flydsl.budget import BUDGET
from mxgate.kernels.gfx950 import virtual
from mxgate.kernels.gpu import is_emulated


@pytest.fixture(autouse=True)
def few_are_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever cases a test names are its whole tier: an accept stays within reach of a short test."""
    monkeypatch.setattr(runner, "left_out", lambda build, tier, cases: 0)


EMULATED = [build for build in registry().values() if is_emulated(build.device)]
CASE = "wgrad/64x96/empties/signature"
SMALL = "wgrad/32x48/17blocks/all-scales"
SOURCE = """
from mxgate.kernels import numpy_reference
from mxgate.kernels.flydsl import compile as isa
from mxgate.kernels.flydsl import wgrad as rungs

isa.available = lambda: False
committed = isa.committed

def stale(*operands):
    isa.source_hash = lambda: "0" * 64
    return rungs.plain(*operands)

def modelless(*operands):
    return numpy_reference.wgrad(*operands)

def biased(*operands, model="exact-rne"):
    dw = numpy_reference.wgrad(*operands)
    dw.view("u2")[0, 3, 5] ^= model != "exact-rne"
    return dw

def racing(*operands):
    isa.committed = lambda kernel: committed(kernel).replace("s_barrier", "s_nop 0")
    return rungs.plain(*operands)
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rungs.py").write_text(SOURCE)
    return tmp_path / "rungs.py"


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, object]]:
    code = main(["run", *words, "--jobs", "1", "--json"])
    (verdict,) = json.loads(capsys.readouterr().out)["verdicts"]
    return code, verdict


def test_stale_machine_code_is_not_judged(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, verdict = run(capsys, "--op", "wgrad", "--build", f"{source}:stale", "--case", CASE)
    assert code == 3 and verdict["verdict"] == "inconclusive"
    finding = verdict["first_finding"]
    assert isinstance(finding, dict) and finding["gate"] == "contract" and "run `make isa`" in finding["what"]
    assert Outcome.REJECT.value not in dict(verdict["gates"]).values()  # type: ignore[call-overload]


def test_a_hazard_is_a_rejection_that_says_where(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, verdict = run(capsys, "--op", "wgrad", "--build", f"{source}:racing", "--case", CASE)
    assert code == 1 and verdict["verdict"] == "reject"
    finding = verdict["first_finding"]
    assert isinstance(finding, dict) and finding["gate"] == "contract"
    assert all(word in finding["what"] for word in ("HazardError", "plain_bytes: ", " line ", "`", " wave ")), finding


OUTSIDE = """
import torch
from mxgate.kernels.gfx950.sample import dense, launched

wgrad = launched.wgrad

def racing(*operands):
    planes = [torch.zeros(64, 128, dtype=torch.uint8), torch.zeros(64, 128, dtype=torch.uint8)]
    scales = [torch.full((64, 4), 127, dtype=torch.uint8), torch.full((64, 4), 127, dtype=torch.uint8)]
    product = torch.zeros(64, 64)
    try:
        addresses = [t.data_ptr() for t in (*planes, *scales, product)]
        dense.build("no-wait")(*addresses, 64, 64, 128, 0)
    except RuntimeError:
        pass
    return launched.wgrad(*operands)
"""
needs_flydsl = pytest.mark.skipif(not isa.available(), reason="flydsl and torch are not installed")


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLYDSL_RUNTIME_CACHE_DIR", str(tmp_path / "kept"))
    (tmp_path / "mine.py").write_text(OUTSIDE)
    return tmp_path / "mine.py"


@needs_flydsl
def test_an_outside_launch_is_judged_on_the_emulator(outside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--op", "wgrad", "--device", "emu", "--case", "wgrad/32x48/17blocks/all-scales", "--build")
    code, verdict = run(capsys, *words, f"{outside}:wgrad")
    gates = dict(verdict["gates"])  # type: ignore[call-overload]
    assert code == 3 and "special did not run" in str(verdict["reason"]), verdict
    assert all(gates[gate] == "pass" for gate in ("contract", "reproducible", "padding")), gates
    assert Outcome.REJECT.value not in gates.values()
    assert verdict["device"] == "gfx950" and verdict["assumes"] == list(gfx950.ASSUMPTIONS)
    code, verdict = run(capsys, *words, f"{outside}:racing")
    finding = verdict["first_finding"]
    assert code == 1 and isinstance(finding, dict) and finding["gate"] == "contract"
    assert all(word in finding["what"] for word in ("HazardError: dense_no_wait", " line ", "`", " wave ")), finding


@needs_flydsl
def test_a_build_that_launches_nothing_is_not_judged_there(outside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As one does that falls back to a reference where it sees no GPU."""
    (outside.parent / "fallback.py").write_text("from mxgate.kernels.numpy_reference import wgrad\n")
    words = ("--op", "wgrad", "--device", "emu", "--case", CASE, "--build", "fallback.py:wgrad")
    code, verdict = run(capsys, *words)
    finding = verdict["first_finding"]
    assert code == 3 and verdict["verdict"] == "inconclusive" and isinstance(finding, dict)
    assert "launched nothing on the virtual gfx950" in finding["what"]


@needs_flydsl
@pytest.mark.skipif(hip(), reason="there is HIP here")
def test_a_launch_without_a_gpu_is_refused_in_time(outside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, verdict = run(capsys, "--op", "wgrad", "--build", f"{outside}:wgrad", "--case", CASE)
    assert code == 3 and verdict["verdict"] == "inconclusive" and verdict["assumes"] == []
    finding = verdict["first_finding"]
    assert isinstance(finding, dict) and finding["gate"] == "contract"
    assert f"there is no {HIP} here: give --device emu" in finding["what"]


def test_above_the_smoke_tier_every_model_judges(outside: Path) -> None:
    (build,) = choose_builds([f"{outside}:wgrad"], "wgrad", "emu")
    models = {tier: {spec.model for spec in gates.plan(build, case_by_id(CASE), tier)} for tier in ("smoke", "full")}
    assert models == {"smoke": {None}, "full": {None, "cdna3-like"}}


def test_without_flydsl_an_outside_launch_is_not_loaded(
    outside: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(virtual, "NEEDS", ("flydsl_is_not_there",))
    with pytest.raises(ModuleNotFoundError, match="the virtual gfx950 needs flydsl_is_not_there, not installed here"):
        virtual.install()
    build = virtual.emulated(find("wgrad", f"{outside}:wgrad"))
    assert build.declines(case_by_id(CASE)) == "needs flydsl_is_not_there, which is not installed"


def test_the_simplest_rung_passes_on_a_case(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--device", "emu", "--build", "flydsl_simplest", "--case", CASE)
    code, verdict = run(capsys, *words)
    assert code == 3 and "special did not run" in str(verdict["reason"])
    assert verdict["device"] == "gfx950" and verdict["assumes"] == list(gfx950.ASSUMPTIONS)


def test_devices_choose_builds(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--device", "cpu", "--build", "flydsl"]) == 2
    assert "wgrad/flydsl does not run with --device cpu" in capsys.readouterr().err
    assert main(["run", "--device", "emu", "--op", "forward"]) == 2
    assert "no build of forward runs with --device emu" in capsys.readouterr().err


def test_their_fingerprints_cover_the_machine_code() -> None:
    for build in EMULATED:
        assert {"mxgate.fixtures/isa/manifest.json", "mxgate.fixtures/isa/shipping.s.xz"} <= set(build.sources)
        assert "mxgate.kernels.gfx950.hazards" in build.sources


def test_they_are_launched_with_every_padding_and_once_more() -> None:
    case = case_by_id(CASE)
    on_cpu, emulated = (
        {spec.label for spec in gates.plan(registry()[name], case, "smoke")}
        for name in ("wgrad/numpy_windowed", "wgrad/flydsl")
    )
    assert on_cpu - emulated == {"repeat 2", "repeat 3"} and not emulated - on_cpu


def test_the_full_tier_launches_them_under_both_models() -> None:
    """That the shipped ones pass under both is what a run of the full tier shows."""
    build, case = registry()["wgrad/flydsl"], case_by_id(CASE)
    plan = gates.plan(build, case, "full")
    assert len({spec.label for spec in plan}) == len(plan)
    cdna3 = [spec for spec in plan if spec.model == "cdna3-like"]
    assert [s.variant for s in cdna3] == ["nan", "random", "copied", "nan"] and len(cdna3) < len(plan)
    assert all(spec.model is None for spec in gates.plan(registry()["wgrad/numpy_windowed"], case, "full"))
    assert all(spec.model is None for spec in gates.plan(build, case, "smoke"))


def test_a_fault_under_one_model_is_a_rejection(source: Path) -> None:
    """Right under the usual model, and one ulp off where the matrix core adds as CDNA3's does."""
    case = case_by_id("wgrad/64x96/ramp1.5/exact-sum")
    build = find("wgrad", f"{source}:biased")
    for device, word in (("cpu", Outcome.PASS), ("gfx950", Outcome.REJECT)):
        with Runner(Settings(tier="full")) as runner:
            result, _ = runner.examine(replace(build, device=device), case)
        assert result.gates["exact"] is word, result.findings
    assert any(f.gate == "exact" and f.what.startswith("under cdna3-like, ") for f in result.findings)
    assert result.gates["reproducible"] is result.gates["padding"] is Outcome.PASS


def test_a_build_that_takes_no_model_is_inconclusive_in_the_full_tier(source: Path) -> None:
    build = replace(find("wgrad", f"{source}:modelless"), device="gfx950")
    with Runner(Settings(tier="full")) as runner:
        result, _ = runner.examine(build, case_by_id(CASE))
    assert result.outcome is Outcome.INCONCLUSIVE
    assert any("takes no keyword model" in finding.what for finding in result.findings)


def test_the_full_grid_is_asked_of_the_shipping_rung() -> None:
    """Where no other build runs it in the smoke tier, lineage has nothing to say about it and nobody lacks a case."""
    (case,) = own_cases([registry()["wgrad/flydsl"]], "smoke")
    blocks = 8 * -(-case.n // 256) * -(-case.k // 256)
    assert (case.tokens, case.experts, blocks) == (8192, 8, 384) and case_by_id(case.id) == case
    assert [b.id for b in registry().values() if b.op == "wgrad" and asked(case, b, "smoke")] == ["wgrad/flydsl"]
    assert all(asked(case, b, "full") for b in EMULATED)
    assert not own_cases([registry()["wgrad/flydsl_plain"]], "smoke")
    assert len(gates.plan(registry()["wgrad/flydsl"], case, "smoke")) == 3
    assert {c.id for c in choose_cases([], EMULATED, "smoke", 0)} > {case.id}


def accepted() -> RunReport:
    builds = [registry()["wgrad/flydsl_simplest"], registry()["wgrad/numpy_reference"]]
    passes = dict.fromkeys((gate for gate in GATES if gate != "lineage"), Outcome.PASS)
    known = {
        (b.id, CASE): CaseResult(b.id, b.fingerprint(), CASE, passes, (), 0.1, device=machine.device_of(b))
        for b in builds
    }
    return summarise(builds, [case_by_id(CASE)], Settings(), known, ran=0, resumed=0, seconds=0.0)


@pytest.mark.parametrize("whole", [False, True])
def test_an_accept_says_what_it_assumes(whole: bool) -> None:
    stream = io.StringIO()
    report.print_run(accepted(), Console(file=stream, width=100), assumptions=whole)
    out = stream.getvalue()
    assert f"emulated gfx950 wgrad/flydsl_simplest: {len(gfx950.ASSUMPTIONS)} assumptions about silicon" in out
    assert all((sentence in out) is whole for sentence in gfx950.ASSUMPTIONS)


def test_a_certificate_holds_the_assumptions_and_buys_no_time(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = sorted(certificate.write_all(accepted(), source.parent))
    held = certificate.read(path)
    certificate.check(path, held)
    assert held.build.assumes == gfx950.ASSUMPTIONS and held.device.startswith("gfx950 emulated on cpu: ")
    assert main(["time", str(path), "--case", CASE]) == 2
    assert "would be emulated or interpreted, which says nothing" in capsys.readouterr().err


def test_inspect_holds_a_build_to_its_budget(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "flydsl_simplest", "--budget", str(BUDGET), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["over budget"] == [] and printed["kernels"]["simplest"]["loop: matrix instructions"] == 16
    tight = json.loads(BUDGET.read_text())
    tight["wgrad/flydsl_simplest"]["simplest"]["registers"] -= 1
    (source.parent / "tight.json").write_text(json.dumps(tight))
    assert main(["inspect", "flydsl_simplest", "--budget", str(source.parent / "tight.json")]) == 1
    assert "OVER BUDGET simplest, registers: " in capsys.readouterr().out
    for words, said in (
        (["numpy_reference"], "has no machine code"),
        (["flydsl", "--budget", "no"], "no: No such file"),
    ):
        assert main(["inspect", *words]) == 2
        assert said in capsys.readouterr().err


@needs_flydsl
def test_an_outside_launch_has_a_ledger_too(outside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--op", "wgrad", f"{outside}:wgrad", "--json"]) == 0
    ((kernel, figures),) = json.loads(capsys.readouterr().out)["kernels"].items()
    assert kernel.startswith("gradient") and figures["executed: launches"] == 1
    # Two waves of 64 lanes for 96 columns, in each of 64 rows; their loops turn once a block of every expert.
    blocks = sum(case_by_id("wgrad/64x96/ramp1.5/exact-sum").sizes) // 32
    assert figures["executed: turns of the loop"] == 2 * 64 * blocks
    assert figures["loop: loads to registers"] == 38 and figures["registers"] > 32
    page = outside.parent / "r.html"
    assert (
        main(
            [
                "run",
                "--op",
                "wgrad",
                "--build",
                f"{outside}:wgrad",
                "--device",
                "emu",
                "--case",
                SMALL,
                "--html",
                str(page),
            ]
        )
        == 3
    )
    assert "ledger of wgrad/mine.wgrad" in page.read_text() and "executed: launches" in page.read_text()


@needs_flydsl
def test_there_is_no_ledger_of_what_launches_nothing(outside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (outside.parent / "plain.py").write_text("from mxgate.kernels.numpy_reference import wgrad\n")
    assert main(["inspect", "--op", "wgrad", "plain.py:wgrad"]) == 3
    assert "launched nothing on the virtual gfx950" in capsys.readouterr().err


def test_bench_emulator_prints_rates(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mxgate.kernels.gfx950.bench.SECONDS", 0.0)
    assert main(["bench-emulator", "--quick", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    # The shipping rung multiplies whole windows, those past the last token by nought.
    assert all(row["seconds"] > 0 and row["flops"] >= 2 * 256**3 and row["met"] is None for row in rows)
    assert [row["what"] for row in rows] == [
        f"dense fp8 256^3{blocks}, hazards {word}" for blocks in (" in 64x64 blocks", "") for word in ("off", "on")
    ]


def test_faults_of_machine_code(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Four mutants show the way of the answer only; how many of all are killed is the command's to say."""
    code = main(["faults", "--isa", "4", "--json"])
    found = json.loads(capsys.readouterr().out)
    made, killed, same = (
        sum(kind[what] for kind in found["kinds"].values()) for what in ("made", "killed", "equivalent")
    )
    assert made - same == 4 and made - killed == len(found["survivors"])
    assert code == int(any(survivor["reason"] is None for survivor in found["survivors"]))
    assert main(["faults", "--isa", "4", "--fault", "x"]) == 2
