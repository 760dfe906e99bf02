"""The random-sum judge: honest outputs pass for every seed tried, wrong ones are found and named.

Not caught by design: an error within 2 T of a sum of rounded data (the judge prints what that is), and rows past the
last offset, which other gates look at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mxgate.oracle import MXArray, dgrad, forward, freivalds, quantize, wgrad
from mxgate.oracle.bound import BFLOAT16, round_to
from mxgate.oracle.formats import FORMATS

OPS = {"forward": forward, "dgrad": dgrad, "wgrad": wgrad}
judge = freivalds.freivalds


def data(op: str, seed: int = 0, format: str = "e4m3fn", exact: bool = False) -> tuple[MXArray, MXArray, Any]:
    """Three groups, one empty, and a tail; normal data, or integers in -2..2."""
    rng = np.random.default_rng(seed)
    shapes, axes = {
        "forward": (((150, 96), (3, 52, 96)), (1, 2)),
        "dgrad": (((150, 96), (3, 96, 52)), (1, 1)),
        "wgrad": (((70, 1120), (52, 1120)), (1, 1)),
    }[op]
    sides = []
    for shape, axis in zip(shapes, axes, strict=True):
        x = rng.integers(-2, 3, shape) if exact else rng.standard_normal(shape)
        sides.append(quantize(x.astype(np.float32), axis=axis, format=format))
    return sides[0], sides[1], np.array([512, 512, 1056] if op == "wgrad" else [64, 64, 141], np.int32)


def honest(op: str, a: MXArray, b: MXArray, offsets: Any, dtype: Any = BFLOAT16) -> NDArray[Any]:
    """The float32 reference, rounded."""
    return round_to(OPS[op](a, b, offsets).fp32().astype(np.float64), dtype)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [BFLOAT16, np.float16, np.float32], ids=["bfloat16", "float16", "float32"])
def test_honest_outputs_pass(op: str, dtype: Any) -> None:
    for seed in range(4):
        a, b, offsets = data(op, seed, "e5m2" if seed == 3 else "e4m3fn")
        out = honest(op, a, b, offsets, dtype)
        result = judge(op, a, b, offsets, out, accumulator="fp32-any-order", seed=seed)
        assert result.ok and result.first_bad is None, result.detail
        assert result.detection_probability == 0.9375 and 0 < result.resolution < 0.5


def tile(out: NDArray[Any]) -> None:
    """A 16x16 tile of some other place."""
    out[..., 16:32, 16:32] = out[..., 32:48, 32:48]


def element(out: NDArray[Any]) -> None:
    out[..., 33, 51] += 12


def nan(out: NDArray[Any]) -> None:
    out[..., 33, 51] = np.nan


def infinity(out: NDArray[Any]) -> None:
    out[..., 33, 51] = -np.inf


def zeros(out: NDArray[Any]) -> None:
    out[..., 8:12, :] = 0


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("fault", [tile, element, nan, infinity, zeros], ids=lambda f: f.__name__)
def test_wrong_outputs_are_found_and_placed(op: str, fault: Any) -> None:
    a, b, offsets = data(op)
    for seed in range(5):
        out = honest(op, a, b, offsets)
        part = out[2] if op == "wgrad" else out[:64]
        before = part.copy()
        fault(part)
        result = judge(op, a, b, offsets, out, accumulator="fp32-any-order", seed=seed)
        assert not result.ok and result.first_bad is not None
        index = result.first_bad[1:] if op == "wgrad" else result.first_bad
        assert part[index].tobytes() != before[index].tobytes()
        assert op != "wgrad" or result.first_bad[0] == 2
        assert f"element {result.first_bad}: " in result.detail and len(result.detail.splitlines()) <= 20


def changed(mx: MXArray, place: tuple[Any, ...], code: int | None = None, scale: int | None = None) -> MXArray:
    elements, scales = mx.codes().copy(), mx.scale_codes().copy()
    if code is not None:
        elements[place] = code
    if scale is not None:
        scales[place] = scale
    return MXArray(elements.view(mx.elements.dtype), scales.view(mx.scales.dtype), mx.axis, mx.format, mx.block)


@pytest.mark.parametrize("side", [0, 1])
def test_one_wrong_scale_byte_is_found(side: int) -> None:
    """Doubled for one block of 32 tokens of one row: a sixteenth of each sum it is in."""
    a, b, offsets = data("wgrad")
    operands = [a, b]
    operands[side] = changed(operands[side], (33, 5), scale=int(operands[side].scale_codes()[33, 5]) + 1)
    out = honest("wgrad", operands[0], operands[1], offsets)
    for seed in range(10):
        result = judge("wgrad", a, b, offsets, out, accumulator="fp32-any-order", seed=seed)
        assert not result.ok and result.first_bad is not None
        assert result.first_bad[0] == 0 and result.first_bad[1 + side] == 33


def test_a_dropped_block_of_tokens_and_a_swapped_expert_are_found() -> None:
    a, b, offsets = data("wgrad")
    dropped = changed(a, (slice(None), slice(480, 512)), code=0)
    out = honest("wgrad", dropped, b, offsets)
    assert not judge("wgrad", a, b, offsets, out, accumulator="fp32-any-order", seed=0).ok
    out = honest("wgrad", a, b, offsets)
    out[[0, 2]] = out[[2, 0]]
    assert not judge("wgrad", a, b, offsets, out, accumulator="fp32-any-order", seed=0).ok


def test_an_empty_group_must_be_plus_zero() -> None:
    a, b, offsets = data("wgrad")
    out = honest("wgrad", a, b, offsets)
    out[1, 3, 4] = -0.0
    result = judge("wgrad", a, b, offsets, out, accumulator="fp32-any-order", seed=0)
    assert not result.ok and result.first_bad == (1, 3, 4) and "not +0" in result.detail


@pytest.mark.parametrize("op", OPS)
def test_exact_data_admits_no_error_at_all(op: str) -> None:
    """Sums of integers in float32: one last bit anywhere is found, for 20 seeds, and honest outputs pass for all."""
    a, b, offsets = data(op, exact=True)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        out = honest(op, a, b, offsets, np.float32)
        result = judge(op, a, b, offsets, out, accumulator="fp32-any-order", seed=seed, exact=True)
        assert result.ok and result.detection_probability == 1 - 2.0**-32 and result.resolution == 0, result.detail
        part = out[2] if op == "wgrad" else out[:64]
        place = (int(rng.integers(len(part))), int(rng.integers(52)))
        part[place] = np.nextafter(part[place], np.float32(9e9)) if seed % 2 else part[place] + 1
        result = judge(op, a, b, offsets, out, accumulator="fp32-any-order", seed=seed, exact=True)
        assert not result.ok and result.first_bad is not None and result.first_bad[-2:] == place


def test_exact_needs_exact_data() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, 2, 32)) * np.exp2(rng.integers(-40, 40, (8, 2, 1)))
    a = quantize(x.reshape(8, 64).astype(np.float32), axis=1)
    offsets = np.array([64], np.int32)
    with pytest.raises(ValueError, match="exact=True with sums that 53 bits do not hold"):
        judge("wgrad", a, a, offsets, honest("wgrad", a, a, offsets), accumulator="exact", seed=0, exact=True)


@pytest.mark.parametrize(("vectors", "low", "high"), [(1, 0.35, 0.65), (2, 0.62, 0.88), (8, 0.97, 1.0)])
def test_detection_probability_is_what_it_says(
    vectors: int, low: float, high: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worst case: two opposite errors in one sum, which cancel for half of the sign vectors."""
    monkeypatch.setattr(freivalds, "SAMPLED", 1)
    a, b, offsets = data("wgrad", exact=True)
    good = honest("wgrad", a, b, offsets, np.float32)
    found = 0
    for seed in range(150):
        out = good.copy()
        out[0, 40, 5] += 64
        out[0, 40, 47] -= 64
        options: dict[str, Any] = {"accumulator": "exact", "seed": seed, "vectors": vectors, "exact": True}
        found += not judge("wgrad", a, b, offsets, out, **options).ok
    assert low <= found / 150 <= high


@pytest.mark.parametrize("op", OPS)
def test_special_operands(op: str) -> None:
    """NaN elements, 0xFF scales and infinities in both operands: the honest output passes, a lost NaN does not."""
    a, b, offsets = data(op, format="e5m2")
    last = {"forward": (1, 7, 3), "dgrad": (2, 3, 7), "wgrad": (7, 600)}[op]
    a = changed(a, (3, 5), code=FORMATS["e5m2"].nan_codes[0])
    a = changed(changed(a, (60, 9), code=0x7C), (9, 2), scale=255)
    b = changed(b, last, code=0xFC)
    out = honest(op, a, b, offsets)
    assert np.isnan(out.astype(np.float32)).any() and np.isinf(out.astype(np.float32)).any()
    assert judge(op, a, b, offsets, out, accumulator="fp32-any-order", seed=1).ok
    place = (0, 3, 11) if op == "wgrad" else (3, 11)
    out[place] = 1
    result = judge(op, a, b, offsets, out, accumulator="fp32-any-order", seed=1)
    assert not result.ok and result.first_bad == place


def test_overflow_to_infinity_is_no_error() -> None:
    """Sums beyond float16 are infinite by right; the exact check of suspicious sums says so."""
    a, b, offsets = data("wgrad")
    a = MXArray(a.elements, (a.scale_codes() + 11).astype(np.uint8).view(a.scales.dtype), 1, a.format)
    out = honest("wgrad", a, b, offsets, np.float16)
    assert np.isinf(out).any() and np.isfinite(out).any()
    assert judge("wgrad", a, b, offsets, out, accumulator="fp32-any-order", seed=0).ok


@pytest.mark.parametrize("exact", [False, True])
def test_threads_change_no_result(exact: bool) -> None:
    a, b, offsets = data("forward", exact=exact)
    out = honest("forward", a, b, offsets, np.float32)
    out[70, 4] += 500
    out[[3, 100], 9] = np.nan
    options: dict[str, Any] = {"accumulator": "fp32-any-order", "seed": 3, "exact": exact}
    one, three = (judge("forward", a, b, offsets, out, threads=n, **options) for n in (1, 3))
    assert one == three and one.first_bad == (3, 9) and len(one.detail.splitlines()) == 3


def test_seeds_decide_and_bad_input_is_told() -> None:
    a, b, offsets = data("wgrad")
    out = honest("wgrad", a, b, offsets)
    good: dict[str, Any] = {"accumulator": "fp32-any-order", "seed": 5}
    assert judge("wgrad", a, b, offsets, out, **good) == judge("wgrad", a, b, offsets, out, **good)
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: judge("wgrad", a, b, offsets, out[:2], **good), "output has shape (2, 70, 52); expected (3, 70, 52)"),
        (lambda: judge("wgrad", a, b, offsets, out.astype(np.float64), **good), "output type float64 is not one of"),
        (lambda: judge("wgrad", a, b, offsets, out, accumulator="x", seed=0), "unknown accumulator 'x'"),
        (lambda: judge("wgrad", a, b, offsets, out, vectors=0, **good), "vectors is 0; expected 1 or more"),
        (lambda: judge("bgrad", a, b, offsets, out, **good), "unknown op 'bgrad'"),
    ]
    for call, words in calls:
        with pytest.raises((TypeError, ValueError)) as caught:
            call()
        assert words in str(caught.value)
