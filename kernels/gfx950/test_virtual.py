"""FlyDSL's own launches with CPU tensors on the virtual device: answers, bounds, orders, errors, and its removal.

Not caught here: what HIP itself would refuse or do otherwise, and tensors on a real GPU.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mxgate.kernels import gfx950, numpy_reference
from mxgate.kernels.build import EMULATE, HIP, Unavailable
from mxgate.kernels.flydsl import compile as isa
from mxgate.kernels.flydsl import wgrad
from mxgate.kernels.gfx950 import virtual
from mxgate.kernels.gfx950.virtual import VirtualDevice

pytestmark = pytest.mark.skipif(not isa.available(), reason="flydsl and torch are not installed")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[VirtualDevice]:
    monkeypatch.setenv("FLYDSL_RUNTIME_ENABLE_CACHE", "0")
    with gfx950.virtual_device(seed=5) as found:
        yield found


def sample() -> Any:
    return importlib.import_module("mxgate.kernels.gfx950.sample.launched")


def small(make: Any) -> tuple[list[Any], Any]:
    """Operands and the exact gradient's codes [3, 8, 80]."""
    operands = make("wgrad", (96, 0, 64), 8, 80, 192)
    return operands, numpy_reference.wgrad(*operands).view(np.uint16)


def kinds(device: VirtualDevice) -> set[str]:
    return {finding.kind for finding in device.findings}


def test_an_ordinary_launch(device: VirtualDevice, make: Any) -> None:
    launched = sample()
    operands, want = small(make)
    assert np.array_equal(launched.wgrad(*operands).view(np.uint16), want)
    assert np.array_equal(launched.wgrad(*operands).view(np.uint16), want)
    device.check()
    assert [(r.seed, r.waves) for r in device.results] == [(5, 48), (6, 48)]  # 2 x 8 x 3 blocks of a wave


def test_host_code_decides_what_is_launched(device: VirtualDevice, make: Any) -> None:
    launched = sample()
    operands, want = small(make)
    for band, waves in ((3, [48, 18, 18, 12]), (8, [48, 48]), (5, [48, 30, 18])):
        device.begin(0)
        assert np.array_equal(launched.banded(*operands, band=band).view(np.uint16), want)
        assert [r.waves for r in device.results] == waves and not device.findings


@pytest.mark.parametrize("rung", wgrad.RUNGS)
def test_our_launchers_give_what_the_plan_gives(device: VirtualDevice, make: Any, rung: str) -> None:
    """By address alone, as launchers of raw pointers are called: whose memory it is has to be found."""
    operands = make("wgrad", (96, 0, 256, 288), 40, 72, 768, whole=False)
    outputs = []
    for way in (wgrad.launch, wgrad.emulate):
        plan = wgrad.launch_plan(rung, 40, 72, 768, 4)
        buffers = dict(zip(wgrad.OPERANDS, (a.copy() for a in operands), strict=True))
        buffers["dw"] = np.full((4, 40, plan.row_pitch), 0x7FC0, np.uint16)
        buffers.update((name, np.full(size, 0xFF, np.uint8)) for name, size in plan.scratch.items())
        way(plan, buffers)
        outputs.append(buffers)
    device.check()
    assert len(device.results) == len(plan.calls)
    for name in plan.scratch.keys() | set(wgrad.OPERANDS) | {"dw"}:
        assert outputs[0][name].tobytes() == outputs[1][name].tobytes(), name


def test_a_tensor_ends_where_it_ends(device: VirtualDevice, make: Any) -> None:
    """The memory behind it is another tensor's, and stays as it was."""
    launched = sample()
    operands, want = small(make)
    import torch

    *planes, dw = launched._tensors(*operands)
    whole = torch.full((2000,), 7.0, dtype=torch.bfloat16)
    short = whole[: 2 * 8 * 79].view(2, 8, 79)  # a row pitch of 79 where the launch says 80 columns
    launched.launch(*planes, short, 8, 80, 2)
    assert not torch.equal(short, torch.full_like(short, 7.0))
    assert kinds(device) == {"store-out-of-bounds", "workgroups-collide"}
    assert (whole[2 * 8 * 79 :] == 7).all()
    with pytest.raises(gfx950.HazardError, match=r"^gradient_0: 2 hazards, the first: "):
        device.check()
    device.begin(0)
    launched.launch(*planes, dw, 8, 80, 3)
    assert not device.findings and np.array_equal(launched._array(dw).view(np.uint16), want)


def test_an_address_of_nobodys_memory_is_a_finding(device: VirtualDevice, make: Any) -> None:
    import torch

    from mxgate.kernels.flydsl import device as ours

    dy_t, dy_scales, x_t, x_scales, offsets = (torch.from_numpy(a.view(np.uint8)) for a in small(make)[0])
    dw = torch.zeros(3, 8, 80, dtype=torch.bfloat16)
    gone = np.zeros(1 << 20, np.uint8)
    for address, expected in ((x_t.data_ptr(), set()), (gone.ctypes.data, {"load-out-of-bounds"})):
        device.begin(0)
        planes = dy_t.data_ptr(), dy_scales.data_ptr(), address, x_scales.data_ptr(), offsets.data_ptr()
        ours.launch_simplest(*planes, dw.data_ptr(), 640, 80, 8, 80, 192, 6, 0)
        assert kinds(device) == expected


def test_views_that_overlap_are_one_allocation() -> None:
    assert virtual._merged([(0, 8), (8, 16), (20, 30), (25, 40), (21, 22)]) == [(0, 8), (8, 16), (20, 40)]
    spans = [(100, 200), (100, 150), (90, 300), (300, 310)]
    holding = {address: virtual._holding(address, spans) for address in (95, 100, 101, 250, 300, 310)}
    assert holding == {95: (90, 300), 100: (100, 200), 101: (100, 150), 250: (90, 300), 300: (300, 310), 310: None}
    assert list(virtual._span(1000, (3, 4), (10, 1), 2)) == [(1000, 1048)]
    assert list(virtual._span(1000, (3, 0), (10, 1), 2)) == []


def test_options_and_compiled_functions(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import flydsl.compiler as flyc

    launched = sample()
    monkeypatch.setenv("FLYDSL_RUNTIME_ENABLE_CACHE", "0")
    operands, want = small(make)
    *planes, dw = launched._tensors(*operands)
    with gfx950.virtual_device(hazards=False, model="cdna3-like") as device:
        compiled = flyc.compile(launched.launch, *planes, dw, 8, 80, 3)
        assert len(device.results) == 1, "as on a GPU, compiling launches once"
        dw.zero_()
        compiled(*planes, dw, 8, 80, 3, None)
        assert [r.model for r in device.results] == ["cdna3-like"] * 2
    assert np.array_equal(launched._array(dw).view(np.uint16), want)
    with pytest.raises(RuntimeError, match="virtual gfx950, which is not there any more"):
        compiled(*planes, dw, 8, 80, 3, None)


def test_what_goes_wrong_in_a_launch_is_raised_by_the_call(device: VirtualDevice, make: Any) -> None:
    launched = sample()
    operands, want = small(make)
    *planes, dw = launched._tensors(*operands)
    with pytest.raises(gfx950.RunError, match="grid must be one to three positive numbers"):
        launched.launch(*planes, dw, 8, 80, 0)
    with pytest.raises(gfx950.RunError, match=r"more than 10 instructions"):
        device.options["limit"] = 10
        launched.launch_banded(*planes, dw, 8, 80, 3, 4)
    assert not device.results
    del device.options["limit"]
    launched.launch(*planes, dw, 8, 80, 3)  # and nothing of it stays
    assert np.array_equal(launched._array(dw).view(np.uint16), want)


def test_a_host_function_that_needs_more_is_refused(device: VirtualDevice) -> None:
    """The engine would abort the process for want of a symbol."""
    from flydsl._mlir import ir
    from flydsl.compiler import jit_executor

    for line in (
        "llvm.func @mgpuMemAlloc(i64, !llvm.ptr, i8) -> !llvm.ptr",
        "llvm.func @mgpuStreamCreate() -> !llvm.ptr",
    ):
        with ir.Context():
            module = ir.Module.parse(f"module {{ {line} }}")
            if "Stream" in line:
                jit_executor.ExecutionEngine(module, opt_level=0)
                continue
            with pytest.raises(gfx950.RunError, match="has no mgpuMemAlloc, which the host function needs"):
                jit_executor.ExecutionEngine(module, opt_level=0)


def test_it_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from flydsl.compiler import jit_executor
    from flydsl.compiler.backends.rocm import RocmBackend

    monkeypatch.setenv("ARCH", "gfx942")
    watched = [(jit_executor, "ExecutionEngine"), (RocmBackend, "_pipeline_parts"), (torch.cuda, "current_stream")]
    before = [getattr(owner, name) for owner, name in watched], dict(os.environ)
    with gfx950.virtual_device() as device:
        assert virtual.current() is device and os.environ["ARCH"] == "gfx950"
        with pytest.raises(RuntimeError, match="one at a time"), gfx950.virtual_device():
            pass
        assert virtual.current() is device
    assert virtual.current() is None
    assert ([getattr(owner, name) for owner, name in watched], dict(os.environ)) == before


def test_a_gpu_is_launched_on_only_where_there_is_one(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wgrad, "_gfx950", lambda: False)
    with pytest.raises(Unavailable, match=HIP):
        wgrad.launch(wgrad.launch_plan("simplest", 16, 16, 64, 1), {})
    assert not wgrad.on_gpu()
    monkeypatch.setattr(wgrad, "_gfx950", lambda: True)
    monkeypatch.delenv(EMULATE, raising=False)
    assert wgrad.on_gpu()
    with gfx950.virtual_device():
        assert not wgrad.on_gpu()
    monkeypatch.setenv(EMULATE, "1")
    assert not wgrad.on_gpu()
