"""The reference builds against loops over single elements in exact rational arithmetic, and against the oracle.

Not caught here: a misreading of the contract that the oracle shares.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mxgate import oracle
from mxgate.kernels import numpy_reference as reference
from mxgate.oracle.bound import outside, round_to
from mxgate.oracle.formats import FORMATS, decode, format_of, scale_value

BF16 = np.dtype(ml_dtypes.bfloat16)


def exact(array: Any, scales: Any, axis: int, place: tuple[int, ...]) -> Fraction:
    """One element's value, from its code and the scale of its block."""
    block = tuple(i // 32 if a == axis else i for a, i in enumerate(place))
    element = decode(array.view(np.uint8)[place].reshape(1), format_of(array.dtype))[0]
    return Fraction(float(element)) * Fraction(float(scale_value(scales.view(np.uint8)[block].reshape(1))[0]))


def by_element(op: str, args: list[Any], where: tuple[int, ...]) -> Fraction:
    """One output element as a sum of exact products; `where` is (row, column), for wgrad (expert, row, column)."""
    a, sa, b, sb, offsets = args
    ends = [int(e) for e in offsets]
    if op == "wgrad":
        g, i, j = where
        tokens = range(ends[g - 1] if g else 0, ends[g])
        return sum((exact(a, sa, 1, (i, t)) * exact(b, sb, 1, (j, t)) for t in tokens), Fraction(0))
    row, j = where
    g = next(g for g, end in enumerate(ends) if row < end)
    if op == "forward":
        return sum((exact(a, sa, 1, (row, t)) * exact(b, sb, 2, (g, j, t)) for t in range(a.shape[1])), Fraction(0))
    return sum((exact(a, sa, 1, (row, t)) * exact(b, sb, 1, (g, t, j)) for t in range(a.shape[1])), Fraction(0))


@pytest.mark.parametrize("formats", [("e4m3fn", "e4m3fn"), ("e5m2", "e4m3fn"), ("e4m3fnuz", "e5m2fnuz")])
@pytest.mark.parametrize("op", ["forward", "dgrad", "wgrad"])
def test_every_element_is_its_sum_of_products(op: str, formats: tuple[str, str], make: Any) -> None:
    args = make(op, (32, 0, 64, 32), n=32, k=64, buffer=192, formats=formats)
    out = getattr(reference, op)(*args, out_dtype=np.float32)
    rng = np.random.default_rng(1)
    for _ in range(40):
        where = tuple(int(rng.integers(length)) for length in out.shape)
        held = op == "wgrad" or where[0] < 128
        assert Fraction(float(out[where])) == (by_element(op, args, where) if held else 0)


@pytest.mark.parametrize("op", ["forward", "dgrad", "wgrad"])
def test_rows_past_the_tokens_and_empty_experts_are_plus_zero(op: str, make: Any) -> None:
    out = getattr(reference, op)(*make(op, (0, 64, 0), buffer=128)).view(np.uint16)
    zero = np.concatenate([out[0], out[2]]) if op == "wgrad" else out[64:]
    assert zero.size and not zero.any()
    assert out.any()


def test_no_tokens_at_all(make: Any) -> None:
    for op in ("forward", "dgrad", "wgrad"):
        for buffer in (0, 64):
            assert not getattr(reference, op)(*make(op, (0, 0), buffer=buffer)).view(np.uint16).any()


@pytest.mark.parametrize("op", ["forward", "dgrad", "wgrad"])
def test_a_callers_buffer_with_a_padded_pitch(op: str, make: Any) -> None:
    args = make(op, (32, 64), buffer=128)
    plain = getattr(reference, op)(*args)
    wide = np.full((*plain.shape[:-1], plain.shape[-1] + 5), 0xFFFF, np.uint16).view(BF16)
    out = wide[..., :-5]
    assert getattr(reference, op)(*args, out=out) is out
    assert (out.view(np.uint16) == plain.view(np.uint16)).all()
    assert (wide[..., -5:].view(np.uint16) == 0xFFFF).all()
    with pytest.raises(ValueError, match="out is bfloat16"):
        getattr(reference, op)(*args, out=wide)
    with pytest.raises(ValueError, match="expected float16"):
        getattr(reference, op)(*args, out=out, out_dtype="float16")


def test_bias_is_added_before_the_one_rounding(make: Any) -> None:
    args = make("forward", (3, 0, 5), n=32, k=64, buffer=10)
    bias = (100.0 * np.arange(3)[:, None] + np.arange(32)).astype(np.float32)
    args[0].view(np.uint8)[:] = 0
    args[1].view(np.uint8)[:] = 127
    out = reference.forward(*args, bias=bias, out_dtype=np.float32)
    assert (out == np.concatenate([bias[[0] * 3 + [2] * 5], np.zeros((2, 32))])).all()


@pytest.mark.parametrize("ends", [(64, 32), (-32, 64), (32, 96), (16, 64)])
def test_bad_offsets_are_named(ends: tuple[int, int], make: Any) -> None:
    args = make("wgrad", (32, 32))
    args[4] = np.array(ends, np.int32)
    with pytest.raises(ValueError, match=r"^offsets\[\d\] is -?\d+[,;] .*expected"):
        reference.wgrad(*args)


def test_a_large_scale_meets_its_small_partner() -> None:
    """448 * 2^127 is no float32, and with a partner of 2^-127 it is 448 all the same."""
    x = np.full((1, 32), 0x7E, np.uint8).view(ml_dtypes.float8_e4m3fn)
    w = np.full((1, 1, 32), 0x38, np.uint8).view(ml_dtypes.float8_e4m3fn)
    high, low = (np.full(s, c, np.uint8).view(ml_dtypes.float8_e8m0fnu) for s, c in (((1, 1), 254), ((1, 1, 1), 0)))
    out = reference.forward(x, high, w, low, np.array([1], np.int32), out_dtype=np.float32)
    assert out[0, 0] == 448 * 32


def nearest_even(x: Fraction, dtype: Any) -> int:
    """The code of the value of `dtype` nearest to x, by comparing the closest few exactly."""
    codes = np.arange(65536, dtype=np.uint16)
    with np.errstate(invalid="ignore"):
        values = codes.view(dtype).astype(np.float64)
    kept = np.isfinite(values) & (np.signbit(values) == (x < 0))
    codes, values = codes[kept], values[kept]
    near = np.argsort(np.abs(values - float(x)))[:4]
    best = sorted((abs(Fraction(float(values[c])) - x), int(codes[c]) & 1, int(codes[c])) for c in near)
    return best[0][2]


@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float16)])
def test_one_rounding_to_nearest_even(dtype: Any) -> None:
    """Doubles next to a midpoint, where rounding by way of float32 goes wrong, at normal and subnormal sizes."""
    codes = np.array([0x0000, 0x0001, 0x0002, 0x007F, 0x0080, 0x03FF, 0x3C00, 0x3C01, 0x3F80, 0x4000], np.uint16)
    low, high = (c.view(dtype).astype(np.float64) for c in (codes, codes + np.uint16(1)))
    middle = (low + high) / 2
    x = np.concatenate([middle, np.nextafter(middle, np.inf), np.nextafter(middle, 0)])
    x = np.concatenate([x, -x])
    got = reference.narrow(x, dtype).view(np.uint16)
    assert [int(c) for c in got] == [nearest_even(Fraction(float(v)), dtype) for v in x]


def test_narrowing_keeps_nan_and_overflows_to_infinity() -> None:
    x = np.array([np.nan, 1e300, -1e300, np.inf, -0.0, np.nextafter(3.3961775292304601e38, 0), 3.3961775292304601e38])
    got = reference.narrow(x, BF16).astype(np.float64)
    assert np.isnan(got[0])
    assert got[1:5].tolist() == [np.inf, -np.inf, np.inf, 0.0] and np.signbit(got[4])
    # Half an ulp above the largest bfloat16: just below it stays finite, the tie itself goes to infinity.
    assert np.isfinite(got[5]) and got[6] == np.inf


@pytest.mark.parametrize("format", list(FORMATS))
def test_quantize_agrees_with_the_oracle_on_every_bfloat16(format: str) -> None:
    """All 65,536 patterns, in order (neighbours share a block) and shuffled, along both axes, and float32 noise."""
    rng = np.random.default_rng(2)
    every = np.arange(65536, dtype=np.uint16)
    noise = rng.integers(0, 2**32, (256, 256), dtype=np.uint32).view(np.float32)
    for x in (every.view(BF16).reshape(-1, 64), rng.permutation(every).view(BF16).reshape(64, -1), noise):
        for axis in (0, 1, -1):
            elements, scales = reference.quantize(x, axis, format=format)
            expected = oracle.quantize(x, axis=axis, format=format)
            assert (elements.view(np.uint8) == expected.codes()).all()
            assert (scales.view(np.uint8) == expected.scale_codes()).all()


def test_quantize_refuses_a_broken_block() -> None:
    with pytest.raises(ValueError, match=r"axis 1 of shape \(4, 40\) has length 40; expected a multiple of 32"):
        reference.quantize(np.zeros((4, 40), np.float32), 1)


AXES = {"forward": (1, 2), "dgrad": (1, 1), "wgrad": (1, 1)}


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("op", ["forward", "dgrad", "wgrad"])
def test_the_oracle_agrees(op: str, dtype: str, whole: bool, make: Any) -> None:
    """The oracle's exact sums rounded once, bit for bit; on data with every finite code, inside float32's interval."""
    args = make(op, (64, 0, 96, 32), buffer=256, formats=("e5m2", "e4m3fn"), whole=whole)
    formats = [format_of(args[i].dtype).name for i in (0, 2)]
    a, b = (oracle.MXArray(args[2 * i], args[2 * i + 1], AXES[op][i], formats[i]) for i in (0, 1))
    answer = getattr(oracle, op)(a, b, args[4])
    out = getattr(reference, op)(*args, out_dtype=dtype)
    if whole:
        assert out.tobytes() == round_to(answer.value, dtype).tobytes()
    assert not outside(out, *answer.interval("fp32-any-order", dtype)).any()
