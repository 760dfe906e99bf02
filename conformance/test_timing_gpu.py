"""Timing on a GPU without one: the whole of a timing process, on a CPU behind torch.cuda's own names.

Faked are events, which read the host's clock, synchronisation and the device's name; all else is what runs on a GPU, on
a small shape. Not tried: that events measure a GPU's time, NVML, and kernels that hang; a context is poisoned by name
alone.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mxgate.conformance import certificate, data, machine, timing_gpu, timing_plot
from mxgate.conformance.__main__ import main, parser
from mxgate.conformance.case import cases, own_cases
from mxgate.conformance.commands import time as commands_time
from mxgate.conformance.commands.usage import UsageError
from mxgate.conformance.conftest import Say
from mxgate.conformance.run import summarise
from mxgate.conformance.settings import Settings
from mxgate.conformance.verdict import GATES, CaseResult, Outcome
from mxgate.kernels import gpu as gpu_module
from mxgate.kernels.build import BLOCK, OPS, Build, registry
from mxgate.kernels.gpu import Gpu

GEMMS = ("forward", "dgrad", "wgrad")
GIB = 1 << 30


@pytest.mark.parametrize("shape", list(timing_gpu.SHAPES))
@pytest.mark.parametrize("routing", list(timing_gpu.ROUTINGS))
def test_the_groups_are_whole_blocks_of_about_the_same_total(shape: str, routing: str) -> None:
    case = timing_gpu.case_of("wgrad", shape, routing)
    _, _, experts, mean = timing_gpu.SHAPES[shape]
    assert case.experts == experts and not any(size % BLOCK for size in case.sizes) and min(case.sizes) > 0
    assert abs(case.tokens - experts * mean) <= experts * 128


def test_the_shifted_ramp_is_aligned_to_a_block_and_to_nothing_larger() -> None:
    ramp, shifted = (timing_gpu.case_of("wgrad", "16b", name) for name in ("ramp", "shift32"))
    assert ramp.tokens == shifted.tokens and not any(size % 256 for size in ramp.sizes)
    ends = [sum(shifted.sizes[: i + 1]) for i in range(shifted.experts - 1)]
    assert all(end % 64 == BLOCK for end in ends)


@pytest.mark.parametrize("op", GEMMS)
@pytest.mark.parametrize("shape", list(timing_gpu.SHAPES))
@pytest.mark.parametrize("routing", list(timing_gpu.ROUTINGS))
def test_every_problem_fits_an_h200(op: str, shape: str, routing: str) -> None:
    """Operands twice, BF16's beside them, what two passes dequantize, the result kept for each of five builds and one
    more, three float32 parts of the one that splits its sums, and what the two ceilings are measured with: 139 GiB."""
    case = timing_gpu.case_of(op, shape, routing)
    operands = timing_gpu.traffic(replace(case, sizes=(*case.sizes[:-1], case.sizes[-1] + timing_gpu.SLACK)))
    elements = {"wgrad": case.experts * case.n * case.k, "forward": case.buffer * case.n, "dgrad": case.buffer * case.k}
    result = 2 * elements[op]
    total = 2 * operands + 4 * operands + 6 * result + 6 * result + 2 * timing_gpu.COPIED
    assert total < 139 * GIB


def test_a_process_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one does that sees no GPU."""
    monkeypatch.setenv(machine.VISIBLE, "")
    build = registry()["wgrad/numpy_reference"]
    case = timing_gpu.case_of("wgrad", "16b", "uniform")
    with pytest.raises(RuntimeError, match=r"^the timing process failed: "):
        timing_gpu.time_on_gpu([build], case, seconds=0.1, passes=1, flush=False, ablate=False, limit=120)


# ---------------------------------------------------------------------------------------------------------------------
# The process, in this one

SOURCE = """
import os
import sys

import torch

calls = 0

def real(codes, scales, axis):
    return codes.float() * scales.float().repeat_interleave(32, axis)

def forward(x, x_scales, w, w_scales, offsets):
    x, w = real(x, x_scales, 1), real(w, w_scales, 2)
    return rows(x, w.transpose(1, 2), offsets)

def dgrad(dy, dy_scales, w, w_scales, offsets):
    return rows(real(dy, dy_scales, 1), real(w, w_scales, 1), offsets)

def rows(x, w, offsets):
    out, start = torch.zeros(len(x), w.shape[2], dtype=torch.bfloat16), 0
    for expert, end in enumerate(offsets.tolist()):
        out[start:end] = (x[start:end] @ w[expert]).bfloat16()
        start = end
    return out

def wgrad(dy_t, dy_scales, x_t, x_scales, offsets):
    dy, x, start, out = real(dy_t, dy_scales, 1), real(x_t, x_scales, 1), 0, []
    for end in offsets.tolist():
        out.append((dy[:, start:end] @ x[:, start:end].T).bfloat16())
        start = end
    return torch.stack(out)

wgrad.ablations = {"no matrix instructions": lambda *operands: None, "broken": lambda *operands: 1 / 0}

def also(*operands):
    return wgrad(*operands)

def wrong(*operands):
    return wgrad(*operands) * 1.5

def turncoat(*operands):
    global calls
    calls += 1
    out = wgrad(*operands)
    if calls > 10:
        out[-1, 0, 0] *= 1.001
        out.view(torch.int16)[-1, 0, 0] ^= 1
    return out

def meddles(dy_t, *operands):
    dy_t.view(torch.uint8)[0, 0] ^= 1
    return wgrad(dy_t, *operands)

def late(dy_t, *operands):
    global calls
    calls += 1
    if calls > 10:
        dy_t.view(torch.uint8)[0, -1] = 0  # past the last token, so that the result stays what it was
    return wgrad(dy_t, *operands)

def raises(*operands):
    raise ValueError("no such tile")

def raises_late(*operands):
    return late_only(*operands)

def crashes_late(*operands):
    return late_only(*operands)

def poisons_late(*operands):
    return late_only(*operands)

def late_only(*operands):
    # The caller's misdeed, once timing has begun.
    global calls
    calls += 1
    if calls > 10:
        operands[0].view(torch.uint8)[0, 0] ^= 1
        name = sys._getframe(1).f_code.co_name
        if name == "crashes_late":
            os.kill(os.getpid(), 9)
        if name == "poisons_late":
            torch.cuda.synchronize = stays
        raise RuntimeError(name)
    return wgrad(*operands)

def stays():
    raise RuntimeError("an illegal memory access was encountered")
"""


class _Event:
    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: _Event) -> float:
        return 1e3 * (other.at - self.at)


def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU by the names of a GPU, small shapes, and small products for its ceilings."""
    import torch

    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "a CPU")
    monkeypatch.setattr(data, "LARGE", 0)
    small = dict.fromkeys(timing_gpu.SHAPES, (64, 96, 4, 96))
    routings = {name: lambda experts, mean: (64, 96, 32, 192) for name in timing_gpu.ROUTINGS}
    for name, value in (("DEVICE", "cpu"), ("SHAPES", small), ("ROUTINGS", routings), ("COPIED", 1 << 20)):
        monkeypatch.setattr(timing_gpu, name, value)
    monkeypatch.setattr(timing_gpu, "SIDE", 64)
    monkeypatch.setattr(timing_gpu, "LOOK", 0.01)
    monkeypatch.setattr(timing_gpu, "FLUSHED", 1 << 16)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    fake(monkeypatch)
    monkeypatch.setattr(timing_gpu, "time_on_gpu", _here)
    monkeypatch.setitem(sys.modules, "pynvml", None)  # the figures of a GPU that is there are none of the fake's
    yield
    torch.set_num_threads(threads)


def _here(builds: Any, case: Any, *, limit: float, **how: Any) -> dict[str, Any]:
    """time_on_gpu without its process."""
    named = {"op": case.op, "shape": case.shape, "routing": case.routing}
    request = {"builds": [asdict(b) for b in builds], "case": named, **how, "refused": {}}
    return dict(json.loads(json.dumps(timing_gpu.measure(json.loads(json.dumps(request))))))


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Build]:
    """A build of SOURCE for "a GPU"."""
    path = tmp_path / "timed.py"
    path.write_text(SOURCE)
    for module in (gpu_module, machine):
        monkeypatch.setattr(module, "gpu", lambda: Gpu("NVIDIA H200", "sm90"))

    def made(name: str, op: str = "wgrad") -> Build:
        return Build(name, op, f"{path}:{name}", arrays="torch", group_alignment=BLOCK, device="cuda")

    return made


@pytest.fixture
def certify(build: Callable[..., Build], tmp_path: Path) -> Callable[..., Path]:
    """The path of a certificate of the production tier for a build, as a run that accepted it writes it."""

    def written(name: str, op: str = "wgrad", tier: str = "production") -> Path:
        one = build(name, op)
        chosen = tuple(dict.fromkeys((*cases(op, "smoke"), *cases(op, tier), *own_cases([one], tier))))
        passed, on = dict.fromkeys(GATES, Outcome.PASS), machine.device_of(one)
        known = {(one.id, c.id): CaseResult(one.id, one.fingerprint(), c.id, passed, (), 0.1, None, on) for c in chosen}
        report = summarise([one], chosen, Settings(tier=tier), known, ran=1, resumed=0, seconds=0.1)
        (path,) = certificate.write_all(report, tmp_path / "certificates")
        return path

    return written


def _time(say: Say, *words: Any) -> tuple[int, dict[str, Mapping[str, Any]]]:
    code, out, err = say("time", *words, "--json", "--seconds", "0.01")
    assert err == "", err
    document = json.loads(out)
    return code, {t["build"] + (f", {t['ablation']}" if t["ablation"] else ""): t for t in document["timings"]}


@pytest.mark.parametrize("op", GEMMS)
def test_a_certified_build_is_timed_beside_bf16(cuda: None, certify: Any, say: Say, op: str) -> None:
    code, timed = _time(say, certify(op, op), "--rounds", "3")
    assert code == 0 and list(timed) == ["bf16", f"{op}/{op}"]
    for one in timed.values():
        assert 0 < one["low"] <= one["median"] <= one["high"] and one["calls"] >= 3 * timing_gpu.CHUNKS
        assert one["tflops"] == pytest.approx(2e-12 * 64 * 96 * 384 / one["median"])
        assert one["ratio"] == pytest.approx(timed["bf16"]["median"] / one["median"])
        assert one["joules"] is one["clock"] is one["watts"] is None


def test_the_table_the_lines_and_the_plots(cuda: None, certify: Any, say: Say, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = certify("wgrad")
    for shape in ("16b", "671b-up"):
        words = ("--shape", shape, "--routing", "skew2", "--quick", "--seconds", "0.01", "--ablate", "--out", "there")
        code, out, err = say("time", path, *words)
    assert code == 1 and err == ""  # a variant is broken
    assert "wgrad/671b-up/skew2, N=64 K=96, 384 tokens, skew 2.00; a CPU" in out and "2 passes of 0.01 s" in out
    assert "  ablated: no matrix instructions" in out
    assert "NO TIME wgrad/wgrad, broken: raised ZeroDivisionError" in out
    assert "cannot be faster than" in out and "wrote there/timings.jsonl, roofline.svg, times.svg" in out
    lines = [json.loads(line) for line in Path("there/timings.jsonl").read_text().splitlines()]
    assert len(lines) == 8 and {line["case"] for line in lines} == {"wgrad/16b/skew2", "wgrad/671b-up/skew2"}
    ablated = [line for line in lines if line["ablation"] and line["refused"] is None]
    assert all(line["ratio"] is None and line["tflops"] == 0 and line["median"] > 0 for line in ablated)
    for name in ("roofline", "times"):
        drawn = Path(f"there/{name}.svg").read_text()
        assert "<svg" in drawn and drawn.count("</svg>") == 1


def test_a_plot_is_of_whole_lines_of_this_version(cuda: None, certify: Any, say: Say) -> None:
    pytest.importorskip("matplotlib")
    path, lines = certify("wgrad"), Path("there/timings.jsonl")
    say("time", path, "--seconds", "0.01", "--out", "there")
    whole = lines.read_text()
    older = json.dumps({"build": "bf16", "case": "wgrad/16b/ramp", "device": "a CPU", "median": 1e-3, "refused": None})
    flushed = whole.replace('"flush": false', '"flush": true').replace('"median": ', '"median": 9')
    lines.write_text(f"{whole}{older}\n5\n{flushed}{whole[:40]}")
    known = timing_plot.latest(lines)
    assert [line["build"] for line in known] == ["bf16", "wgrad/wgrad"] and all(line["median"] < 9 for line in known)
    assert timing_plot.latest(Path("nowhere.jsonl")) == []


def test_a_plot_is_of_the_last_run_of_each_case(cuda: None, certify: Any, say: Say) -> None:
    """A build that only an earlier run of the case had has no bar beside BF16 of a later one, nor has one that was
    refused meanwhile; another case's run stays, and another device's goes."""
    matplotlib = pytest.importorskip("matplotlib")
    (wgrad, other), lines = (certify("wgrad"), certify("also")), Path("there/timings.jsonl")

    def timed(time: str, *words: Any, refused: bool = False, device: str = "a CPU") -> str:
        lines.unlink(missing_ok=True)
        say("time", *words, "--seconds", "0.01", "--out", "there")
        found = [{**json.loads(line), "time": time, "device": device} for line in lines.read_text().splitlines()]
        for line in found[1:] if refused else ():
            line["refused"] = "wrong before timing"
        return "".join(json.dumps(line) + "\n" for line in found)

    first = timed("2026-01-02 03:04:05", wgrad, other)
    second = timed("2026-01-02 03:04:06", wgrad, "--shape", "671b-up")
    third = timed("2026-01-03 00:00:00", wgrad)
    assert first.count("\n") == 3
    lines.write_text(first + second + third)
    known = timing_plot.latest(lines)
    assert [(line["case"], line["build"], line["time"][8:10]) for line in known] == [
        ("wgrad/16b/ramp", "bf16", "03"),
        ("wgrad/16b/ramp", "wgrad/wgrad", "03"),
        ("wgrad/671b-up/ramp", "bf16", "02"),
        ("wgrad/671b-up/ramp", "wgrad/wgrad", "02"),
    ]
    for draw in (timing_plot.roofline, timing_plot.bars):
        with matplotlib.rc_context({"svg.fonttype": "none"}):
            draw(known, Path("drawn.svg"))
        said = "the last run of each case, 2026-01-02 03:04:06 to 2026-01-03 00:00:00 UTC"
        assert said in Path("drawn.svg").read_text()
    lines.write_text(first + timed("2026-01-04 00:00:00", wgrad, refused=True))
    assert [line["build"] for line in timing_plot.latest(lines)] == ["bf16"]
    lines.write_text(first + timed("2026-01-05 00:00:00", other, device="another CPU"))
    assert [line["build"] for line in timing_plot.latest(lines)] == ["bf16", "wgrad/also"]


def test_flushed_calls_are_timed_one_by_one(cuda: None, certify: Any, say: Say) -> None:
    code, timed = _time(say, certify("wgrad"), "--flush", "--rounds", "1")
    assert code == 0 and timed["wgrad/wgrad"]["median"] > 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("turncoat", "its output after timing is not what it was before"),
        ("wrong", "wrong before timing: "),
        ("meddles", "it changed its operands"),
        ("late", "it changed its operands while it was timed"),
        ("raises", "raised ValueError: no such tile"),
        ("raises_late", "raised RuntimeError: raises_late"),
    ],
)
def test_no_number_for_a_build_that_is_wrong(cuda: None, certify: Any, say: Say, name: str, said: str) -> None:
    """Beside one that is right, which has its number all the same."""
    code, timed = _time(say, certify(name), certify("wgrad"), "--rounds", "1")
    assert code == 1 and said in timed[f"wgrad/{name}"]["refused"] and timed[f"wgrad/{name}"]["median"] == 0
    assert timed["wgrad/wgrad"]["refused"] is None and timed["wgrad/wgrad"]["median"] > 0
    assert timed["bf16"]["refused"] is None


def test_a_build_that_ends_the_process_costs_itself_its_time(
    certify: Any, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In processes as a GPU has them: one ends late, in the next another build leaves the GPU past use."""
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    faked = "import sys, pytest; from mxgate.conformance import timing_gpu, test_timing_gpu; "
    faked += "test_timing_gpu.fake(pytest.MonkeyPatch()); timing_gpu.main(sys.argv[1])"
    monkeypatch.setattr(timing_gpu, "_START", faked)
    monkeypatch.setattr(data, "LARGE", 0)
    code, timed = _time(say, *map(certify, ("crashes_late", "wgrad", "poisons_late")), "--rounds", "2")
    assert code == 1 and timed["wgrad/wgrad"]["refused"] is None and timed["wgrad/wgrad"]["median"] > 0
    crashed, poisoned = (timed[f"wgrad/{name}_late"] for name in ("crashes", "poisons"))
    assert crashed["refused"] == "ended the timing process: killed by signal 9" and crashed["median"] == 0
    assert poisoned["refused"] == "ended the timing process: raised RuntimeError: poisons_late"


def test_time_on_a_gpu_refuses(
    cuda: None, certify: Any, say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = certify("wgrad")

    def refused(said: str, *words: Any) -> None:
        code, out, err = say("time", *(words or (path,)))
        assert code == 2 and out == "" and said in err and err.count("\n") == 1, err

    refused("nowhere.json: No such file or directory; `mxgate run` writes certificates", "nowhere.json")
    with monkeypatch.context() as patch:
        patch.setattr(data, "LARGE", 1 << 34)
        patch.setattr(timing_gpu, "SHAPES", {"16b": (1408, 2048, 4, 24480)})
        refused("was not accepted on the shape class of wgrad/16b/ramp/random", certify("wgrad", tier="smoke"))
    path = certify("wgrad")
    with monkeypatch.context() as patch:
        patch.setattr(machine, "gpu", lambda: Gpu("NVIDIA B200", "sm100"))
        refused("was accepted on another device (NVIDIA H200 (sm90); here: NVIDIA B200 (sm100))")
    refused("--case chooses among a CPU's cases; on a GPU give --shape and --routing", path, "--case", "wgrad/x")
    refused("no shape named '17b'", path, "--shape", "17b")
    refused("these builds compute different ops (dgrad, wgrad)", path, certify("dgrad", "dgrad"))
    text = path.read_text()
    path.write_text(text.replace('"tier": "production"', '"tier": "full"'))
    refused("was changed after it was written")
    path.write_text(text)
    source = tmp_path / "timed.py"
    source.write_text(source.read_text() + "\n")
    refused("has changed since it was accepted (its source or options)")


def test_options_of_the_other_kind_of_device_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:

    for words, on_gpu, said in (
        ("--shape 16b", False, "--shape is for builds on a GPU; these run on the CPU"),
        ("--quick", False, "--quick is for builds on a GPU"),
        ("--ablate", False, "--ablate is for builds on a GPU"),
        ("--out there", False, "--out is for builds on a GPU"),
        ("--case wgrad/64x96/single/exact-sum", True, "on a GPU give --shape and --routing"),
    ):
        args = parser().parse_args(["time", "a.json", *words.split()])
        commands_time._elsewhere(args, not on_gpu)
        with pytest.raises(UsageError, match=said):
            commands_time._elsewhere(args, on_gpu)
    assert main(["time"]) == 2 and "CERTIFICATE" in capsys.readouterr().err


def test_traffic_is_each_operand_once_and_the_result_once() -> None:
    for op in GEMMS:
        case = timing_gpu.case_of(op, "16b", "uniform")
        small = replace(case, n=64, k=96, sizes=(64, 32), buffer=96)
        shapes = {"forward": ((96, 96), (2, 64, 96)), "dgrad": ((96, 64), (2, 64, 96)), "wgrad": ((64, 96), (96, 96))}
        result = {"forward": 96 * 64, "dgrad": 96 * 96, "wgrad": 2 * 64 * 96}[op]
        read = sum(int(np.prod(shape)) for shape in shapes[op])
        assert timing_gpu.traffic(small) == read + read / 32 + 2 * result
        assert timing_gpu.traffic(small, wide=True) == 2 * read + 2 * result
    assert set(GEMMS) == set(OPS) - {"quantize"}
