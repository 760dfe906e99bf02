"""Every fault is one: on some input it does something that a right build does not.

Each is tried in this process on a few inputs, and its outputs, the caller's whole buffer, the operands afterwards and
its errors are compared with a right build's. Not caught here: whether the gate that a fault names rejects it, which
`mxgate faults` shows, and anything about the faults that would take this process with them (PROCESS).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mxgate.kernels import numpy_reference as reference
from mxgate.kernels import numpy_windowed as windowed
from mxgate.kernels.faults import FAULTS, KINDS, Fault
from mxgate.oracle.formats import FORMATS

# Not graph: a launch that cannot be captured takes a GPU (conformance/test_gpu.py).
GATES = ("contract", "reproducible", "padding", "exact", "bounded", "empty", "special", "lineage")
# They crash, end, hang or starve the process they run in, or read where only a guard page would show it.
PROCESS = {"crashes", "exits", "killed", "closes_files", "hangs", "eats_memory", "hangs_without_tokens"} | {
    "scales_past_the_plane",
    "writes_behind",
    "reads_before",
    "order_by_process",
}
TRIED = [f for f in FAULTS if f.build.name.removeprefix("fault_") not in PROCESS]
MARGIN = 64


def test_every_kind_has_a_fault_and_every_fault_a_kind_and_a_gate() -> None:
    assert {f.kind for f in FAULTS} == set(KINDS)
    assert {f.gate for f in FAULTS} == set(GATES)
    assert {f.build.op for f in FAULTS} == {"forward", "dgrad", "wgrad", "quantize"}
    assert max(Counter(f.build.id for f in FAULTS).values()) == 1
    names = {f.build.name.removeprefix("fault_") for f in FAULTS}
    assert names >= PROCESS
    assert len(FAULTS) >= 45


def special(op: str, args: list[Any], formats: tuple[str, str]) -> list[Any]:
    """NaN, infinity and NaN scales among the tokens of A, one row each, and a positive block for the NaN scale."""
    a, scales = args[0].view(np.uint8), args[1].view(np.uint8)
    row = FORMATS[formats[0]]
    bad = (*row.nan_codes[:1], *row.nan_codes[-1:], *row.inf_codes)
    a[: len(bad), 5] = bad
    scales[8, 0] = 0xFF
    for plane in (a[8], args[2].view(np.uint8)):
        plane[..., :32] &= 0x7F
        plane[..., :32][plane[..., :32] == 0] = 0x38
    return args


def gemm_inputs(op: str, make: Any) -> Iterator[list[Any]]:
    sizes = (0, 96, 0, 288, 32) if op == "wgrad" else (0, 37, 0, 64, 131, 1)
    small = (32, 0, 64) if op == "wgrad" else (20, 0, 3)
    shape = {"n": 96, "k": 160, "buffer": sum(sizes) // 32 * 32 + 96}
    yield make(op, sizes, **shape)
    for formats in (("e5m2", "e4m3fn"), ("e4m3fnuz", "e4m3fnuz"), ("e4m3fn", "e4m3fn")):
        yield make(op, sizes, **shape, formats=formats, seed=3)
        yield make(op, sizes, **shape, formats=formats, whole=False)
        yield special(op, make(op, sizes, **shape, formats=formats), formats)
    yield make(op, sizes[::-1], **shape)
    yield make(op, sizes, **{**shape, "buffer": shape["buffer"] + 64})
    for scales in ((0, 254), (254, 254), (0, 120), (40, 40)):
        extreme = make(op, small, n=32, k=32)
        extreme[1].view(np.uint8)[:], extreme[3].view(np.uint8)[:] = scales
        yield extreme
    yield make(op, sizes, n=576, k=192, buffer=sum(sizes) + 32)
    yield make(op, (0, 0, 0), n=32, k=32, buffer=32)
    yield make(op, (0, 0), n=32, k=32, buffer=0)
    n, k = {"forward": (47, 32), "dgrad": (32, 47), "wgrad": (42, 47)}[op]
    yield make(op, small, n=n, k=k)
    yield make(op, (1056,) if op == "wgrad" else small, n=1056, k=1056, whole=False)
    yield make(op, (*(0,) * 259, *small), n=32, k=64)


def state(op: str, function: Any, args: list[Any], **options: Any) -> tuple[Any, ...]:
    """All that a call leaves behind: shape, type and bytes of the result, the operands' token bytes, or the error."""
    args = [a.copy() for a in args]
    try:
        with np.errstate(all="ignore"):
            out = function(*args, **options)
    except (Exception, SystemExit) as error:
        return (type(error).__name__,)
    if out is None:
        return ("None",)
    nan = np.isnan(out.astype(np.float32))
    tokens = int(args[4][-1])
    held = [a[:, : tokens * a.shape[1] // max(1, args[0].shape[1])] if op == "wgrad" else a for a in args[:4]]
    # Every NaN is as good as another.
    return (out.shape, out.dtype, np.where(nan, 0, out).tobytes(), nan.tobytes(), *(a.tobytes() for a in held))


def with_buffer(op: str, function: Any, args: list[Any], like: Any) -> bytes:
    """The bytes around and in a caller's buffer with a padded pitch after the call."""
    rows, columns = int(np.prod(like.shape[:-1])), like.shape[-1]
    memory = np.full(rows * (columns + 8) + 2 * MARGIN, 0x3F3F, np.uint16)
    grid = memory[MARGIN:-MARGIN].view(ml_dtypes.bfloat16).reshape(*like.shape[:-1], columns + 8)
    with np.errstate(all="ignore"):
        function(*(a.copy() for a in args), out=grid[..., :columns])
    return memory.tobytes()


def shares(function: Any, args: list[Any]) -> bool:
    """Whether the results of two of three calls lie in the same memory."""
    try:
        with np.errstate(all="ignore"):
            results = [function(*(a.copy() for a in args)) for _ in range(3)]
    except (Exception, SystemExit):
        return False
    if not all(isinstance(result, np.ndarray) for result in results):
        return False
    return any(np.may_share_memory(results[i], results[j]) for i, j in ((0, 1), (1, 2), (0, 2)))


def differs(fault: Fault, make: Any) -> bool:
    op, function = fault.build.op, fault.build.load()
    # The shipped windows are a right build on their own terms; on the contract's own the reference is.
    shipped = fault.build.accumulator == "mfma-scale-128" and fault.build.nan_reach
    right = windowed.wgrad if shipped else getattr(reference, op)
    for args in gemm_inputs(op, make):
        for options in ({}, {"out_dtype": "float16"}, {"out_dtype": "float32"}):
            expected = state(op, right, args, **options)
            if any(state(op, function, args, **options) != expected for _ in range(6)):
                return True
        expected_out = right(*(a.copy() for a in args))
        if with_buffer(op, function, args, expected_out) != with_buffer(op, right, args, expected_out):
            return True
    if op == "forward":
        args = make(op, (3, 0, 5), n=32, k=64)
        bias = (1000.0 * np.arange(3)[:, None] + np.arange(32)).astype(np.float32)
        if state(op, function, args, bias=bias) != state(op, right, args, bias=bias):
            return True
    return shares(function, next(gemm_inputs(op, make)))


@pytest.mark.parametrize("fault", [f for f in TRIED if f.build.op != "quantize"], ids=lambda f: f.build.id)
def test_a_gemm_fault_differs_from_a_right_build(fault: Fault, make: Any) -> None:
    assert differs(fault, make)


def quantizer_inputs() -> Iterator[tuple[Any, int, str]]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 128)).astype(np.float32)
    yield x, 1, "e4m3fn"
    yield x, 0, "e4m3fnuz"
    yield x, 1, "e5m2"
    yield (x * np.exp2(rng.integers(-150, 127, (64, 1)))).astype(np.float32), 1, "e4m3fn"
    yield (np.clip(x, -1, 1) * np.float32(2.0**127)), 1, "e4m3fn"
    odd = x.copy()
    odd[0, 3], odd[1, 4], odd[2, 5], odd[3], odd[4] = np.nan, np.inf, -np.inf, 0.0, -0.0
    odd[5:9] = np.nextafter(np.exp2(np.arange(4, dtype=np.float32)), np.float32(0))[:, None]
    odd[9:] = (np.arange(128) / 16 + 1) * np.sign(odd[9:])
    yield odd, 1, "e4m3fn"
    yield odd, 1, "e5m2"
    yield x[:33], 1, "e4m3fn"


@pytest.mark.parametrize("fault", [f for f in TRIED if f.build.op == "quantize"], ids=lambda f: f.build.id)
def test_a_quantizer_fault_differs_from_a_right_build(fault: Fault) -> None:
    function = fault.build.load()

    def run(quantize: Any, x: Any, axis: int, format: str) -> tuple[Any, ...]:
        x = x.copy()
        parts = quantize(x, axis, format=format)
        return (*((a.shape, a.dtype, a.tobytes()) for a in parts), x.tobytes())

    assert any(run(function, *given) != run(reference.quantize, *given) for given in quantizer_inputs())
