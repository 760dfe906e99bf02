"""Builds for a GPU on a machine without one: who runs where, what a child does around a launch, one build interpreted.

A child's part is tried here with its copies on the CPU; what only a real GPU does (streams, its own allocator, an
illegal address) is not.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from mxgate.conformance import data, gates, guard, torch_arrays
from mxgate.conformance.__main__ import main
from mxgate.conformance.case import case_by_id, cases, rerouted
from mxgate.conformance.child import Child, Limits
from mxgate.conformance.commands.choose import choose_builds
from mxgate.conformance.commands.usage import UsageError
from mxgate.conformance.complaint import Uncaptured
from mxgate.conformance.guard import MARGIN
from mxgate.conformance.launch import Evidence, Launch, LaunchSpec, digest
from mxgate.conformance.machine import device_of
from mxgate.conformance.runner import Runner
from mxgate.conformance.settings import Settings
from mxgate.conformance.verdict import Finding, Outcome, judge
from mxgate.kernels import gpu as gpu_module
from mxgate.kernels.build import Build, load_target, registry
from mxgate.kernels.gpu import Gpu, is_emulated, is_gpu
from mxgate.kernels.triton.builds import BUILDS, INTERPRETED

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make this machine one with another GPU, or with none."""

    def set_to(found: Gpu | None) -> None:
        monkeypatch.setattr(gpu_module, "gpu", lambda: found)

    return set_to


def test_each_device_has_its_builds() -> None:
    chosen = {device: choose_builds([], None, device) for device in ("cpu", "emu", "cuda", "interpreter")}
    for device, builds in chosen.items():
        kinds = {(is_gpu(b.device), is_emulated(b.device), b.device == "interpreter") for b in builds}
        assert len(kinds) == 1, device
    assert {b.device for b in chosen["cuda"]} == {"cuda", "sm100"}
    assert not {b.name for b in chosen["interpreter"]} & {"triton_scaled", "torch_scaled", "torch_two_pass"}
    assert set(choose_builds([], None)) == {*chosen["cpu"], *chosen["emu"]}
    assert choose_builds(["triton_dequant"], "wgrad")[0].device == "cuda"
    with pytest.raises(UsageError, match="does not run with --device cuda"):
        choose_builds(["numpy_reference"], "wgrad", "cuda")


def test_a_gpu_build_says_what_it_lacks(here: Any) -> None:
    scaled, any_gpu = registry()["wgrad/torch_scaled"], registry()["wgrad/triton_dequant"]
    for found, at_all, blackwell in (
        (None, "no driver here knows of one", "no driver here knows of one"),
        (Gpu("NVIDIA H200", "sm90"), None, "capability 10.0 or more, and this is an NVIDIA H200 (sm90)"),
        (Gpu("AMD GPU", "gfx950"), None, "this is an AMD GPU (gfx950)"),
        (Gpu("NVIDIA B200", "sm100"), None, None),
    ):
        here(found)
        for device, said in ((any_gpu.device, at_all), (scaled.device, blackwell)):
            lacking = gpu_module.lacks(device)
            assert (lacking is None) == (said is None)
            assert said is None or (lacking is not None and said in lacking)
    here(None)
    assert gpu_module.lacks("cpu") is None


def test_an_interpreted_accept_is_no_gpus() -> None:
    both = [b for b in (*BUILDS, *INTERPRETED) if b.id == "wgrad/triton_dequant"]
    assert len({b.fingerprint() for b in both}) == 2
    assert device_of(both[1]).startswith("Triton's interpreter on cpu")


def test_the_kernel_driver_numbers_architectures(tmp_path: Path) -> None:
    for node, version in ((0, 0), (1, 90402), (10, 90500)):
        folder = tmp_path / str(node)
        folder.mkdir()
        (folder / "properties").write_text(f"simd_count 4\ngfx_target_version {version}\n")
    found = gpu_module._amd(tmp_path)
    assert found is not None
    assert found.architecture == "gfx942"
    for known in ("1", "10"):
        (tmp_path / known / "properties").unlink()
    assert gpu_module._amd(tmp_path) is None


def test_wgrad_on_a_gpu_is_repeated_a_thousand_times() -> None:
    case = case_by_id("wgrad/64x96/ramp1.5/normal")
    on_gpu, interpreted = (next(b for b in of if b.id == "wgrad/triton_split") for of in (BUILDS, INTERPRETED))
    assert sum(spec.label.startswith("repeat") for spec in gates.plan(on_gpu, case, "full")) == 1000
    assert len(gates.plan(interpreted, case, "smoke")) < len(gates.plan(on_gpu, case, "smoke"))


@needs_triton
def test_a_stray_write_beside_an_array_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    for owner, names in (
        (torch, ("empty", "empty_like", "empty_strided", "empty_permuted")),
        (torch.Tensor, ("new_empty", "new_empty_strided")),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name))  # put back afterwards
    side = torch_arrays.GpuArrays("cpu")
    array = np.arange(96, dtype=np.float32)
    given = side.wrap(array)
    given[3] = -1
    assert side.finish() == []
    assert array[3] == -1  # as a child finds out that a build wrote to its operands
    given = side.wrap(array)
    assert side.within(given[5:], array) and not side.within(given.clone(), array) and not side.within(given, array[1:])
    beyond = given.as_strided((97,), (1,))
    beyond[96] = 0
    assert side.finish() == ["4 bytes beside an array of 384 bytes on the GPU"]
    before = side.wrap(array)
    before.view(torch.uint8).as_strided((MARGIN,), (1,), storage_offset=0)[MARGIN - 1] = 1
    assert side.finish() == ["1 bytes beside an array of 384 bytes on the GPU"]
    monkeypatch.setattr(guard, "_fill_byte", 0x3F)
    assert (torch.empty(5).view(torch.uint8) == 0x3F).all()
    turned = torch.empty_strided((4, 5), (1, 4)), torch.empty_permuted((4, 5), (1, 0))
    for made in (torch.zeros(1).new_empty(5), *turned):
        assert (made.flatten().view(torch.uint8) == 0x3F).all()


@pytest.mark.parametrize(("device", "ended"), [("cuda", True), ("cpu", False)])
def test_a_child_without_its_gpu_serves_no_other_launch(tmp_path: Path, device: str, ended: bool) -> None:
    """On a GPU a failed assertion there, after which the process cannot use it; here, that there is none. A build that
    raises on a CPU keeps its child."""
    pytest.importorskip("torch")
    path, case = tmp_path / "mine.py", case_by_id("wgrad/64x96/ramp1.5/exact-sum")
    failing = f"torch._assert_async(torch.zeros(1, device={device!r}))"
    path.write_text(f"import torch\n\ndef fails(*operands):\n    {failing}\n    return operands[0]\n")
    build = Build("fails", "wgrad", f"{path}:fails", arrays="torch", group_alignment=32, device=device)
    child = Child(build, Limits())
    try:
        launch = child.launch(case, LaunchSpec("first"), data.operands(case))
        assert launch.error is not None and launch.error.startswith("raised "), launch.error
        assert child.alive != ended
    finally:
        child.close()


# Each kernel, and each way to multiply, in a child whose operands lie against unreadable pages: a child takes longer to
# import torch than to launch any of this. Odd sides, tiles in both directions, ends between tiles; moe takes FNUZ.
TIER = {
    "forward/triton_blocks": "forward/33x96/ramp1.5/signature",
    "forward/triton_moe": "forward/64x96/ramp1.5/exact-sum+e4m3fnuzxe4m3fnuz",
    "dgrad/triton_split": "dgrad/96x33/ramp1.5/signature",
    "wgrad/triton_dequant": "wgrad/33x50/ramp1.5/signature",
    "wgrad/triton_mixed_input": "wgrad/33x50/ramp1.5/signature",
    "quantize/triton_quantize": "quantize/64x192/axis1/special",
}


@needs_triton
def test_a_triton_build_of_each_kind_from_end_to_end_in_the_interpreter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every launch of the plan passes, in children; a few cases are no accept, hence the exit code.

    Every registered build, far scales, empty experts, many groups and infinities are for kernels/triton/test_triton.py,
    in its own process; rounded sums for a whole tier.
    """
    monkeypatch.chdir(tmp_path)
    words = ["run", "--device", "interpreter", "--jobs", "2", "--time-limit", "300", "--out", "out"]
    words += [word for build, case in TIER.items() for word in ("--build", build, "--case", case)]
    assert main(words) == 3
    assert "REJECT" not in capsys.readouterr().out
    lines = [json.loads(line) for line in Path("out/results.jsonl").read_text().splitlines()]
    for build, case in TIER.items():
        gates = next(line["gates"] for line in lines if (line["build"], line["case"]) == (build, case))
        passed = {gate for gate, outcome in gates.items() if outcome == "pass"}
        assert passed >= {"contract", "reproducible", "exact"}, build
        assert build.startswith("quantize") or "padding" in passed, build


# ---------------------------------------------------------------------------------------------------------------------
# A captured launch, replayed

# Weight gradients in torch operations alone: one that may be captured, and others.
CAPTURED = """
import torch

kept = {}

def real(codes, scales):
    return codes.float() * scales.float().repeat_interleave(32, 1)

def members(offsets, tokens):
    token = torch.arange(tokens, device=offsets.device)[None, :]
    starts = torch.cat([offsets.new_zeros(1), offsets[:-1]])
    return (token >= starts[:, None]) & (token < offsets[:, None])

def multiplied(dy, x, of):
    dy, x = (torch.where(of.any(0), t, 0.0) for t in (dy, x))
    return torch.matmul(torch.where(of[:, None, :], dy, 0.0), x.T).to(torch.bfloat16)

def right(dy_t, dy_scales, x_t, x_scales, offsets):
    return multiplied(real(dy_t, dy_scales), real(x_t, x_scales), members(offsets, dy_t.shape[1]))

def on_host(dy_t, dy_scales, x_t, x_scales, offsets):
    ends = [int(end) for end in offsets]
    there = torch.tensor(ends, dtype=torch.int32, device=offsets.device)
    return multiplied(real(dy_t, dy_scales), real(x_t, x_scales), members(there, dy_t.shape[1]))

def keeps_groups(dy_t, dy_scales, x_t, x_scales, offsets):
    if offsets.data_ptr() not in kept:
        kept[offsets.data_ptr()] = offsets, members(offsets, dy_t.shape[1])
    return multiplied(real(dy_t, dy_scales), real(x_t, x_scales), kept[offsets.data_ptr()][1])

def keeps_scales(dy_t, dy_scales, x_t, x_scales, offsets):
    if x_scales.data_ptr() not in kept:
        kept[x_scales.data_ptr()] = x_scales, x_scales.clone()
    x = real(x_t, kept[x_scales.data_ptr()][1])
    return multiplied(real(dy_t, dy_scales), x, members(offsets, dy_t.shape[1]))

def halves(dy_t, dy_scales, x_t, x_scales, offsets):
    return right(dy_t, dy_scales, x_t, x_scales, offsets) / 2
"""
# What the graph gate says of each; None where it is content.
SAID = MappingProxyType(
    {
        "right": None,
        "on_host": "cannot be captured in a CUDA graph",
        "keeps_groups": "are not those of a plain call",
        "keeps_scales": "are not those of a plain call",
        "halves": "are not the exact sum rounded once",
    }
)


@pytest.fixture
def captured(tmp_path: Path) -> Any:
    """A build of CAPTURED by name."""
    path = tmp_path / "captured.py"
    path.write_text(CAPTURED)
    return lambda name: Build(name, "wgrad", f"{path}:{name}", arrays="torch", group_alignment=32, device="cuda")


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda's graphs on a CPU: operations are written down, and refused where they hand a number to the host."""
    torch = pytest.importorskip("torch")
    from torch.utils._python_dispatch import TorchDispatchMode

    class Graph:
        def __init__(self) -> None:
            self.calls: list[Any] = []

        def replay(self) -> None:
            for function, args, options, before in self.calls:
                result = function(*args, **options)
                if isinstance(before, torch.Tensor) and result.data_ptr() != before.data_ptr():
                    before.copy_(result)

    @contextlib.contextmanager
    def graph(into: Graph) -> Iterator[None]:
        class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
            def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if function is torch.ops.aten._local_scalar_dense.default:
                    raise RuntimeError("operation not permitted when stream is capturing")
                result = function(*args, **(kwargs or {}))
                into.calls.append((function, args, kwargs or {}, result))
                return result

        with Recorder():  # type: ignore[no-untyped-call]
            yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    for owner, names in (
        (torch, ("empty", "empty_like", "empty_strided", "empty_permuted")),
        (torch.Tensor, ("new_empty", "new_empty_strided")),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name))  # put back afterwards


@pytest.mark.parametrize("family", ["exact-sum", "normal"])
@pytest.mark.parametrize("name", list(SAID))
def test_what_the_graph_gate_says(recording: None, captured: Any, name: str, family: str) -> None:
    """On a CPU: the judge, and the worker's part of a replay. Not: what CUDA itself refuses to capture."""
    build, case = captured(name), case_by_id(f"wgrad/64x96/ramp1.5/{family}")
    other, side, function = rerouted(case), torch_arrays.GpuArrays("cpu"), load_target(build.target)
    given = [[a.copy() for a in data.operands(c).arrays.values()] for c in (case, other)]
    first, second = ([side.wrap(a) for a in arrays] for arrays in given)
    launches = []
    for label in ("replayed", "on other operands"):
        spec = LaunchSpec(label)
        try:
            returned = side.replay(function, (first, {}), (second, {})) if label == "replayed" else function(*second)
            output = (side.unwrap(returned),)
            launches.append(Launch(spec, None, output, digest(output)))
        except Uncaptured as error:
            launches.append(Launch(spec, str(error), (), ""))
    operands = data.operands(other)
    plan = tuple(launch.spec for launch in launches)
    replayed = Evidence(build, other, operands, data.answer(other, operands), plan, tuple(launches))
    base = data.operands(case)
    evidence = Evidence(build, case, base, data.answer(case, base), (), (), replayed=replayed)
    found = gates.graph(evidence)
    said = SAID[name] if (name, family) != ("halves", "normal") else "are outside the interval"
    assert (found is None) == (said is None), found
    assert said is None or (isinstance(found, Finding) and said in found.what and not found.inconclusive)
    assert side.finish() == []
    nothing = gates.graph(replace(evidence, replayed=None))
    assert isinstance(nothing, Finding) and nothing.inconclusive


@pytest.mark.skipif(gpu_module.gpu() is None, reason="needs a GPU")
@pytest.mark.parametrize("name", list(SAID))
def test_what_the_graph_gate_says_on_a_gpu(captured: Any, name: str) -> None:
    """The same builds in a child, captured by CUDA itself; the child serves its next case all the same."""
    build, case = captured(name), case_by_id("wgrad/64x96/ramp1.5/exact-sum")
    with Runner(Settings()) as runner:
        for _ in range(2):
            result, _ = runner.examine(build, case)
            assert result.gates["graph"] is (Outcome.REJECT if SAID[name] else Outcome.PASS), result.findings
            assert SAID[name] is None or any(str(SAID[name]) in f.what for f in result.findings if f.gate == "graph")


def test_a_gpu_build_of_numpy_arrays_is_told_what_a_graph_takes() -> None:
    build = replace(registry()["wgrad/numpy_reference"], device="cuda")
    case = case_by_id("wgrad/64x96/ramp1.5/exact-sum")
    other = rerouted(case)
    with contextlib.closing(Child(build, Limits())) as child:
        again, plain = child.replay(case, data.operands(case), other, data.operands(other))
    assert plain.error is None and again.error == (
        "cannot be captured in a CUDA graph: it takes NumPy arrays; "
        "expected arrays='torch', or capturable=False in its record"
    )


def test_a_gpu_build_is_accepted_after_its_launch_was_replayed_or_says_why_not() -> None:
    build = registry()["wgrad/triton_dequant"]
    declared = replace(build, capturable=False)
    assert (gates.captures(build), gates.captures(declared)) == (True, False)
    assert declared.terms()[-1] == "a launch cannot be captured in a graph"
    case = case_by_id("wgrad/64x96/ramp1.5/exact-sum")
    base = data.operands(case)
    for one in (declared, next(b for b in INTERPRETED if b.id == build.id)):
        assert gates.graph(Evidence(one, case, base, None, (), ())) is gates.SILENT
    assert judge(build.id, "wgrad", (), captured=True).word == "inconclusive"


@pytest.mark.parametrize("op", ["forward", "dgrad", "wgrad", "quantize"])
def test_every_gpu_build_has_a_case_to_be_captured_on(op: str) -> None:
    for build in choose_builds([], op, "cuda"):
        taken = [c for c in cases(op, "smoke") if not set(c.formats) - set(build.formats)]
        spoken = [c for c in taken if gates.may_speak("graph", c, captured=True)]
        assert spoken, build.id
        for case in spoken:
            other = rerouted(case)
            shapes = [{n: getattr(a, "shape", a) for n, a in data.operands(c).arrays.items()} for c in (case, other)]
            assert shapes[0] == shapes[1] and (op == "quantize" or other.tokens < case.tokens)
            assert op == "quantize" or other.sizes != case.sizes
