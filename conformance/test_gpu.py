"""Builds for a GPU on a machine without one: who runs where, what a child does around a launch, one build interpreted.

A child's part is tried here with its copies on the CPU; what only a real GPU does (streams, its own allocator, an
illegal address) is not.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mxgate.conformance import gates, worker
from mxgate.conformance.__main__ import main
from mxgate.conformance.case import case_by_id
from mxgate.conformance.certificate import device_of
from mxgate.conformance.commands.choose import choose_builds
from mxgate.conformance.commands.usage import UsageError
from mxgate.conformance.worker import MARGIN
from mxgate.kernels import gpu as gpu_module
from mxgate.kernels.build import registry
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
    side = worker._Gpu("cpu")
    array = np.arange(96, dtype=np.float32)
    given = side.wrap(array)
    given[3] = -1
    assert side.finish() == []
    assert array[3] == -1  # as a child finds out that a build wrote to its operands
    given = side.wrap(array)
    beyond = given.as_strided((97,), (1,))
    beyond[96] = 0
    assert side.finish() == ["4 bytes beside an array of 384 bytes on the GPU"]
    before = side.wrap(array)
    before.view(torch.uint8).as_strided((MARGIN,), (1,), storage_offset=0)[MARGIN - 1] = 1
    assert side.finish() == ["1 bytes beside an array of 384 bytes on the GPU"]
    monkeypatch.setattr(worker, "_fill_byte", 0x3F)
    assert (torch.empty(5).view(torch.uint8) == 0x3F).all()
    turned = torch.empty_strided((4, 5), (1, 4)), torch.empty_permuted((4, 5), (1, 0))
    for made in (torch.zeros(1).new_empty(5), *turned):
        assert (made.flatten().view(torch.uint8) == 0x3F).all()


@needs_triton
@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("wgrad/triton_split", "wgrad/64x96/single/exact-sum"),
        ("quantize/triton_quantize", "quantize/64x192/axis1/special"),
    ],
)
def test_one_case_from_end_to_end_in_the_interpreter(
    name: str, case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every launch of the plan passes; a single case is no accept, hence the exit code."""
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--device", "interpreter", "--build", name, "--case", case, "--out", "out"]) == 3
    assert "REJECT" not in capsys.readouterr().out
    text = Path("out/results.jsonl").read_text()
    for gate in ("contract", "reproducible", "exact"):
        assert f'"{gate}": "pass"' in text
