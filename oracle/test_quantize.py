"""Blocks: elements under their scale, layouts, padding, specials, and dequantization.

`expected` below is a float64 search among midpoints, which shares nothing with the integer code and is itself
held to Fractions in test_formats.py's manner by `test_the_reference_here_is_right`. Not caught here: a wrong
scale rule (test_scales.py), and a wrong rounding that no bfloat16 pattern or midpoint neighbour shows.
"""

from __future__ import annotations

import dataclasses
import importlib
import struct
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mxgate.oracle import FORMATS, PROFILES, SCALE_RULES, MXArray, dequantize, quantize
from mxgate.oracle.formats import decode_table, encode, float32_bits, scale_table

# The package's attribute of this name is the function.
module: Any = importlib.import_module("mxgate.oracle.quantize")
BF16 = np.dtype(ml_dtypes.bfloat16)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
FP8 = ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")
each_format = pytest.mark.parametrize("name", list(FORMATS))
Array = np.ndarray[Any, Any]


def expected(x: Array, byte: Array, name: str, away: bool = False) -> Array:
    """Codes of finite float64 values x under scale bytes: quotients, midpoints and their comparison are exact."""
    row = FORMATS[name]
    quotient = x / np.exp2(byte.astype(np.float64) - 127)
    values = decode_table(name)[: row.max_code + 1]
    middle = (values[1:] + values[:-1]) / 2
    code = np.searchsorted(middle, np.abs(quotient), side="right" if away else "left")
    tie = np.isin(np.abs(quotient), middle)
    if not away:
        code = np.where(tie & (code % 2 == 1), code + 1, code)
    signed = code | np.where(np.signbit(x), row.sign_bit, 0)
    return np.where((code == 0) & (not row.has_negative_zero), 0, signed).astype(np.uint8)


def bf16(bits: Any) -> Array:
    return np.asarray(bits, np.uint16).view(BF16)


def blocks_under(byte: int, name: str) -> Array:
    """bfloat16 blocks [n, 32] that `floor` gives `byte`, holding every pattern up to their maximum, of both signs."""
    top = min(max((byte + FORMATS[name].emax << 7) + 0x7F, 0x7F), 0x7F7F)
    if byte == 0:
        top = (FORMATS[name].emax << 7) + 0x7F
    patterns = np.arange(top + 1, dtype=np.uint16)
    patterns = np.concatenate([patterns, patterns | 0x8000])
    rows: Array = np.resize(patterns, -(-len(patterns) // 31) * 31).reshape(-1, 31)
    return bf16(np.insert(rows, 13, top, axis=1))


@pytest.mark.parametrize("byte", [0, 1, 5, 10, 12, 17, 19, 23, 64, 118, 119, 120, 127, 135, 200, 238, 239, 240, 246])
@each_format
def test_every_bfloat16_pattern_under_a_scale(name: str, byte: int) -> None:
    """Both inputs types and both nearest roundings, low bytes with subnormals and the highest ones included."""
    row = FORMATS[name]
    if byte > 254 - row.emax:
        byte = 254 - row.emax
    x = blocks_under(byte, name)
    for rounding in ("even", "away"):
        want = expected(x.astype(np.float64), np.full((1, 1), byte), name, rounding == "away")
        for given in (x, x.astype(np.float32)):
            mx = quantize(given, axis=1, format=name, rounding=rounding)
            assert (mx.scale_codes() == byte).all()
            wrong = np.argwhere(mx.codes() != want)
            assert wrong.size == 0, [
                (float(x[i, j]), hex(mx.codes()[i, j]), hex(want[i, j])) for i, j in wrong[:20].tolist()
            ]


@each_format
def test_float32_midpoints_and_neighbours_under_scales(name: str) -> None:
    """Values a rounding to bfloat16 first would get wrong: one float32 ulp beside every midpoint."""
    values = decode_table(name)[: FORMATS[name].max_code + 1]
    middle = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    near = np.concatenate([np.nextafter(middle, np.float32(0)), middle, np.nextafter(middle, np.float32(np.inf))])
    near = np.concatenate([near, -near])
    near = np.resize(near, -(-len(near) // 31) * 31).reshape(-1, 31)
    x = np.insert(near, 31, np.float32(2.0 ** FORMATS[name].emax), axis=1)
    for power in (-100, -20, 0, 1, 37, 110):
        scaled = x * np.float32(2.0**power)
        for rounding in ("even", "away"):
            mx = quantize(scaled, axis=1, format=name, rounding=rounding)
            byte = mx.scale_codes()
            assert (byte == 127 + power).all()
            assert np.array_equal(mx.codes(), expected(scaled.astype(np.float64), byte, name, rounding == "away"))


def test_the_reference_here_is_right() -> None:
    """Against Fractions: nearest of all values, a tie to the even code, on every midpoint and 100 odd values."""
    rng = np.random.default_rng(0)
    for name in FORMATS:
        values = decode_table(name)[: FORMATS[name].max_code + 1]
        x = np.concatenate(
            [rng.uniform(0, values[-1], 50), rng.uniform(0, values[2], 50), (values[1:] + values[:-1]) / 2]
        )
        even, away = (expected(x, np.full(len(x), 127), name, rounding) for rounding in (False, True))
        exact = [Fraction(v) for v in values.tolist()]
        for i, value in enumerate(x.tolist()):
            distance = [abs(v - Fraction(value)) for v in exact]
            closest = min(distance)
            best = [code for code, d in enumerate(distance) if d == closest]
            assert away[i] == max(best) and even[i] == min(best, key=lambda code: code % 2)


@pytest.mark.parametrize("profile", list(PROFILES))
def test_both_roads_give_the_same_bytes(profile: str) -> None:
    """Every finite maximum with every smaller magnitude somewhere, float32 and bfloat16; for ocp both roundings."""
    rng = np.random.default_rng(1)
    maxima = np.arange(0x8000, dtype=np.uint32)
    rest = (rng.random((len(maxima), 31)) ** 3 * maxima[:, None]).astype(np.uint32)
    keys = np.insert(rest, 20, maxima, axis=1) | rng.integers(0, 2, (len(maxima), 32), dtype=np.uint32) << 15
    low = rng.integers(0, 65536, keys.shape, dtype=np.uint32) * (rng.random(keys.shape) < 0.7)
    rules = PROFILES[profile]
    for format in rules.formats:
        row = FORMATS[format]
        for x, precision in ((bf16(keys), 8), ((keys << 16 | low).astype(np.uint32).view(np.float32), 24)):
            bits = float32_bits(x)
            for rounding in ("even", "away") if profile == "ocp" else ("even",):
                codes, byte = module._exact_blocks(bits, precision, row, rules, rounding, None)
                mx = quantize(x, axis=1, format=format, profile=profile, rounding=rounding)
                assert np.array_equal(mx.scale_codes()[:, 0], byte)
                assert np.array_equal(mx.codes(), codes)


@pytest.mark.parametrize("rule", list(SCALE_RULES))
def test_rules_of_ocps_policies_leave_the_quick_road_only_at_the_ends(rule: str) -> None:
    """A rule's own thresholds never send a block to the exact road: speed does not depend on the data's mantissas."""
    for name in FORMATS:
        row = FORMATS[name]
        tables = module._tables(row, dataclasses.replace(PROFILES["ocp"], rule=rule), "even", 24)
        key = np.arange(0x8000)
        ordinary = (key >> 7 > row.emax + row.bias + row.mantissa_bits + 1) & (key < 0x7F7F)
        assert not tables.doubtful[ordinary].any() and not tables.doubtful[0]


# ---- layouts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16])
@pytest.mark.parametrize("shape", [(64,), (96, 5), (5, 96), (3, 64, 7), (2, 3, 32, 33), (1, 2048, 40), (2, 1056, 1100)])
def test_blocks_along_any_axis_are_blocks_along_the_last(dtype: Any, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(2)
    x = (rng.normal(size=shape) * np.exp2(rng.integers(-9, 9, shape))).astype(dtype)
    for axis in [a for a, length in enumerate(shape) if length % 32 == 0]:
        last = quantize(np.moveaxis(x, axis, -1).copy(), axis=-1)
        for given in (axis, axis - x.ndim):
            mx = quantize(x, axis=given)
            assert (mx.axis, mx.block, mx.format) == (axis, 32, "e4m3fn")
            assert np.array_equal(np.moveaxis(mx.codes(), axis, -1), last.codes())
            assert np.array_equal(np.moveaxis(mx.scale_codes(), axis, -1), last.scale_codes())


@pytest.mark.parametrize("shape", [(32, 32), (64, 96), (3, 32, 64), (2, 2, 96, 32), (64, 2080)])
def test_square_blocks_are_flat_blocks_of_their_1024_values(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(3).normal(size=shape).astype(np.float32)
    x[..., :32, :32] = 0
    for profile in ("ocp", "torchao-rceil"):
        mx = quantize(x, axis=(-2, -1), block=(32, 32), profile=profile)
        assert mx.axis == (x.ndim - 2, x.ndim - 1)
        assert mx.scales.shape == (*shape[:-2], shape[-2] // 32, shape[-1] // 32)
        tiles = x.reshape(-1, shape[-2] // 32, 32, shape[-1] // 32, 32).swapaxes(2, 3).reshape(-1, 1024)
        bits = tiles.view(np.uint32)
        codes, byte = module._exact_blocks(bits, 24, FORMATS["e4m3fn"], PROFILES[profile], "even", None)
        assert np.array_equal(mx.scale_codes().ravel(), byte)
        back = codes.reshape(-1, shape[-2] // 32, shape[-1] // 32, 32, 32).swapaxes(2, 3).reshape(shape)
        assert np.array_equal(mx.codes(), back)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("rounding", ["even", "stochastic"])
def test_strides_do_not_matter(axis: int, rounding: str) -> None:
    """Transposed, sliced, reversed and stride-0 inputs have each been quantized wrongly by somebody."""
    base = np.random.default_rng(4).normal(size=(192, 320)).astype(np.float32)
    views = [
        base.T[:, :64],
        base[::2, ::5],
        base[::-1, ::-1][:64, :96],
        np.broadcast_to(base[:1], (64, 320)),
        base[5:69, 7:103],
    ]
    for dtype in (np.float32, BF16):
        for view in views:
            view = view.astype(dtype) if dtype is BF16 and view.strides[0] else view
            seed = 1 if rounding == "stochastic" else None
            got = quantize(view, axis=axis, rounding=rounding, seed=seed)
            want = quantize(view.copy(order="C"), axis=axis, rounding=rounding, seed=seed)
            assert got.codes().tobytes() == want.codes().tobytes() and got.codes().flags.c_contiguous
            assert got.scale_codes().tobytes() == want.scale_codes().tobytes()
    fortran = np.asfortranarray(base.astype(BF16))
    assert quantize(fortran, axis=axis).codes().tobytes() == quantize(base.astype(BF16), axis=axis).codes().tobytes()


def test_the_input_is_left_alone() -> None:
    x = np.random.default_rng(5).normal(size=(64, 64)).astype(np.float32)
    before = x.tobytes()
    for axis in (0, 1):
        quantize(x, axis=axis)
        quantize(x, axis=axis, rounding="stochastic", seed=1)
    assert x.tobytes() == before


@pytest.mark.parametrize("length", [1, 31, 33, 40, 95])
def test_padding_is_zeros_up_to_a_multiple_of_32(length: int) -> None:
    x = np.random.default_rng(6).normal(size=(length, 3, length)).astype(np.float32)
    full = -(-length // 32) * 32
    for axis in (0, 2):
        widths = [(0, full - length) if a == axis else (0, 0) for a in range(3)]
        got, want = quantize(x, axis=axis, pad=True), quantize(np.pad(x, widths), axis=axis)
        assert got.shape[axis] == full and got.codes().tobytes() == want.codes().tobytes()
        assert got.scale_codes().tobytes() == want.scale_codes().tobytes()
    square = quantize(x.swapaxes(0, 1), axis=(1, 2), block=(32, 32), pad=True)
    assert square.shape == (3, full, full) and not square.codes()[:, length:].any()


def test_arrays_without_elements() -> None:
    for shape, axis in (((0, 32), 1), ((32, 0), 0), ((0,), 0), ((4, 0, 32), 2)):
        mx = quantize(np.zeros(shape, np.float32), axis=axis)
        assert mx.shape == shape and dequantize(mx, np.float32).shape == shape
    assert quantize(np.zeros((0, 32), np.float32), axis=(0, 1), block=(32, 32)).scales.shape == (0, 1)


# ---- stochastic rounding --------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1])
def test_stochastic_bits_belong_to_the_element_whatever_the_chunks(axis: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same bytes for any chunk size, equal to encode's by flat index, and the same when padding moves elements."""
    x = np.random.default_rng(8).uniform(1, 2, size=(64, 96)).astype(np.float32)  # all under byte 119
    whole = quantize(x, axis=axis, rounding="stochastic", seed=5)
    direct = encode(x * np.float32(2.0**8), "e4m3fn", rounding="stochastic", seed=5)
    assert np.array_equal(whole.codes(), direct)
    for chunk in (1024, 2048, 4096, 7000):
        monkeypatch.setattr(module, "CHUNK", chunk)
        assert np.array_equal(quantize(x, axis=axis, rounding="stochastic", seed=5).codes(), direct)
    monkeypatch.undo()
    ragged = x[:50, :70]
    padded = quantize(ragged, axis=axis, rounding="stochastic", seed=5, pad=True)
    assert np.array_equal(
        padded.codes()[:50, :70], encode(ragged * np.float32(2.0**8), "e4m3fn", rounding="stochastic", seed=5)
    )
    square = quantize(x, axis=(0, 1), block=(32, 32), rounding="stochastic", seed=5)
    assert np.array_equal(square.codes(), direct)
    square = quantize(ragged, axis=(0, 1), block=(32, 32), rounding="stochastic", seed=5, pad=True)
    assert np.array_equal(square.codes()[:50, :70], padded.codes()[:50, :70])
    assert not np.array_equal(quantize(x, axis=axis, rounding="stochastic", seed=6).codes(), direct)


@pytest.mark.parametrize("name", FP8)
def test_stochastic_rounding_is_unbiased_under_a_scale(name: str) -> None:
    """Of n = 63,488 equal elements the mean is within 5 standard errors, 5 gap / (2 sqrt(n)) at most, of the value.

    Each block also holds the largest value its scale allows, so that the elements lie where the format puts them.
    """
    n = 2048 * 31
    for value in (0.3, 1.7, 0.002, 0.47 * FORMATS[name].max_finite):
        x = np.full((2048, 32), value * 2.0**-40, np.float32)
        x[:, 17] = FORMATS[name].max_finite * 2.0**-40
        mx = quantize(x, axis=1, format=name, rounding="stochastic", seed=9)
        assert (mx.scale_codes() == 127 - 40).all()
        got = np.delete(dequantize(mx, np.float64), 17, axis=1)
        assert len(np.unique(got)) == 2
        assert abs(got.mean() - float(x[0, 0])) <= 5 * np.ptp(got) / (2 * n**0.5)


# ---- special values and the ends of the range -----------------------------------------------------------


@pytest.mark.parametrize("profile", list(PROFILES))
def test_a_nan_at_each_of_the_32_places(profile: str) -> None:
    """A NaN lost in the maximum has been shipped: it must reach the values, wherever it stands, or be kept in place.

    For triton-kernels-up it does not (its NaN block has byte 0): its elements are the zeros its row says.
    """
    rules = PROFILES[profile]
    for format in set(rules.formats) & set(FP8):
        x = np.tile(np.linspace(-3, 4, 32, dtype=np.float32), (32, 1))
        x[np.arange(32), np.arange(32)] = np.nan
        for given in (x, x.astype(BF16)):
            for mx in (
                quantize(given, axis=1, format=format, profile=profile),
                quantize(given.T, axis=0, format=format, profile=profile),
            ):
                codes = mx.codes() if mx.axis == 1 else mx.codes().T
                element_is_nan = np.isin(codes, FORMATS[format].nan_codes)
                assert element_is_nan[np.arange(32), np.arange(32)].all()
                byte = mx.scale_codes().ravel()
                if rules.nan == "propagates" and rules.nan_byte == 255:
                    assert (byte == 255).all() and np.isnan(dequantize(mx, np.float32)).all()
                elif rules.nan == "propagates":
                    assert (byte == rules.nan_byte).all()
                else:
                    clean = np.where(np.isnan(x), 0, x)
                    want = quantize(clean, axis=1, format=format, profile=profile).scale_codes().ravel()
                    assert np.array_equal(byte, want) and element_is_nan.sum() == 32


@each_format
@pytest.mark.parametrize("special", [np.inf, -np.inf, np.nan, -np.nan])
def test_ocp_makes_the_whole_block_of_a_special_value_nan_and_no_other(name: str, special: float) -> None:
    x = np.ones((3, 64), np.float32)
    x[1, 40] = special
    mx = quantize(x, axis=1, format=name)
    nan = np.isnan(dequantize(mx, np.float64))
    assert nan[1, 32:].all() and nan.sum() == 32
    assert (mx.codes()[1, 32:] == (FORMATS[name].nan_code or 0)).all() and mx.scale_codes()[1, 1] == 255


@pytest.mark.parametrize("name", ["e4m3fn", "e5m2"])
def test_the_largest_finite_value_and_infinity_are_not_flushed(name: str) -> None:
    """A reciprocal of the largest scale underflows to 0 in float32: FLT_MAX and 1 side by side must both survive."""
    row = FORMATS[name]
    x = np.zeros((1, 32), np.float32)
    x[0, :3] = np.finfo(np.float32).max, 2.0**126, 2.0 ** (254 - row.emax - 127)
    mx = quantize(x, axis=1, format=name)
    assert mx.scale_codes()[0, 0] == 254 - row.emax
    assert mx.codes()[0, :3].tolist() == [
        row.max_code,
        int(encode(np.array([2.0 ** (row.emax - 1)], np.float32), name)[0]),
        int(encode(np.ones(1, np.float32), name)[0]),
    ]
    for profile in ("te", "quark-even"):
        x[0, 0] = np.inf
        assert quantize(x, axis=1, format=name, profile=profile).scale_codes()[0, 0] == 254


@pytest.mark.parametrize("name", list(FORMATS))
def test_block_maxima_from_2_to_the_minus_149_to_the_minus_100(name: str) -> None:
    """Inputs near 1e-36 came out as 448 or NaN when a scale underflowed: all is exact down to the last."""
    powers = np.arange(-149, -99)
    x = np.zeros((len(powers), 32), np.float32)
    x[:, 0], x[:, 7], x[:, 8] = np.exp2(powers.astype(np.float64)), -np.exp2(powers - 1.0), np.exp2(powers - 3.0)
    mx = quantize(x, axis=1, format=name)
    want = (powers - FORMATS[name].emax + 127).clip(0)
    assert np.array_equal(mx.scale_codes()[:, 0], want)
    assert np.array_equal(mx.codes(), expected(x.astype(np.float64), mx.scale_codes(), name))


def test_an_odd_scale_or_zero_block_at_each_of_four_neighbours() -> None:
    """Scale bytes are packed four to a word by kernels; a bit of one must not reach the next."""
    for place in range(4):
        for value in (0.0, 3.0, 2.0**-140, 2.0**100, np.nan):
            x = np.ones((2, 128), np.float32)
            x[0, 32 * place : 32 * place + 32] = value
            mx = quantize(x, axis=1)
            alone = quantize(x[0, 32 * place : 32 * place + 32], axis=0)
            want = np.full((2, 4), 119)
            want[0, place] = alone.scale_codes()[0]
            assert np.array_equal(mx.scale_codes(), want)
            assert np.array_equal(mx.codes()[0, 32 * place : 32 * place + 32], alone.codes())


def test_every_neighbouring_row_and_block_has_its_own_exponent() -> None:
    """A scale read from the next row, block or lane is another power of two here: no two neighbours share one."""
    row, block = np.indices((64, 8))
    power = (7 * row + 3 * block) % 61 - 30
    x = np.repeat(np.exp2(power.astype(np.float64)), 32, axis=1).astype(np.float32)
    for axis, given in ((1, x), (0, x.T)):
        mx = quantize(given, axis=axis)
        scales = mx.scale_codes() if axis == 1 else mx.scale_codes().T
        assert np.array_equal(scales, power + 119) and (mx.codes() == 0x78).all()
        assert np.array_equal(dequantize(mx, np.float32), given)


@pytest.mark.parametrize("profile", list(PROFILES))
def test_doubling_the_input_doubles_the_scales_and_nothing_else(profile: str) -> None:
    """Scales that are never applied were shipped: with twice the scales the values are twice as large."""
    x = np.random.default_rng(12).normal(size=(32, 64)).astype(np.float32)
    once, twice = (quantize(factor * x, axis=1, profile=profile) for factor in (np.float32(1), np.float32(2)))
    assert np.array_equal(twice.scale_codes(), once.scale_codes() + 1)
    assert np.array_equal(twice.codes(), once.codes())
    assert np.array_equal(dequantize(twice, np.float64), 2 * dequantize(once, np.float64))


@each_format
def test_zero_blocks_keep_their_signs(name: str) -> None:
    x = np.array([0.0, -0.0] * 16, np.float32)
    for profile in [p for p in PROFILES.values() if name in p.formats]:
        mx = quantize(x, axis=0, format=name, profile=profile.name)
        minus = FORMATS[name].sign_bit if FORMATS[name].has_negative_zero and not profile.zeros_are_positive else 0
        assert mx.codes().tolist() == [0, minus] * 16 and mx.scale_codes()[0] == profile.zero_byte


# ---- dequantize -----------------------------------------------------------------------------------------


def all_codes_under_all_scales(name: str) -> MXArray:
    """[256 scales, every code of the format], a whole number of blocks a row."""
    codes = np.resize(np.arange(1 << FORMATS[name].bits, dtype=np.uint8), max(32, 1 << FORMATS[name].bits))
    elements = np.tile(codes, (256, 1))
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], elements.shape[1] // 32, axis=1)
    return MXArray(elements.view(FORMATS[name].dtype), scales.view(E8M0), 1, name, 32)


@each_format
def test_every_code_times_every_scale_is_exact(name: str) -> None:
    mx = all_codes_under_all_scales(name)
    got = dequantize(mx, np.float64)
    assert np.isnan(got[255]).all() and got[0, 1] > 0
    for scale in range(255):
        for value, code in zip(got[scale].tolist(), mx.codes()[scale].tolist(), strict=True):
            element = decode_table(name)[code]
            if np.isfinite(element):
                assert Fraction(value) == Fraction(element) * Fraction(2) ** (scale - 127)
                assert np.signbit(value) == np.signbit(element)
            else:
                assert np.float64(value).tobytes() == np.float64(element).tobytes()


def narrowed(value: float, kind: str) -> float:
    """A float64 in float32 ("f") or float16 ("e") by Python's own conversion, overflow to infinity."""
    try:
        return float(struct.unpack(kind, struct.pack(kind, value))[0])
    except OverflowError:
        return float(np.copysign(np.inf, value))


@pytest.mark.parametrize("name", FP8)
def test_narrower_outputs_are_rounded_once(name: str) -> None:
    """float16 and float32 as Python packs them; bfloat16 by comparing with both neighbours, as Fractions."""
    mx = all_codes_under_all_scales(name)
    exact = dequantize(mx, np.float64)[:255]
    finite = np.isfinite(exact)
    for dtype, kind in ((np.float32, "f"), (np.float16, "e")):
        got = dequantize(mx, dtype)[:255].astype(np.float64)
        want = np.array([narrowed(v, kind) for v in exact[finite].tolist()])
        assert got[finite].tobytes() == want.tobytes()
        assert np.array_equal(got[~finite], exact[~finite], equal_nan=True)
    with np.errstate(all="ignore"):
        got = dequantize(mx, BF16)[:255].astype(np.float64)
    step = np.exp2(np.maximum(np.floor(np.log2(np.where(finite & (exact != 0), np.abs(exact), 1))), -126) - 7)
    nearest = np.rint(exact / step) * step  # at most 8 significant bits, or multiples of 2^-133: exact but for ties
    nearest = np.where(np.abs(nearest) >= 2.0**128, np.copysign(np.inf, exact), nearest)
    assert np.array_equal(got, np.where(finite, nearest, exact), equal_nan=True)


def test_products_over_all_pairs_of_scales() -> None:
    """255 x 255 scale pairs: the product of two dequantized ones is 2^(a + b - 254), exactly, and 255 makes NaN."""
    one = np.full((256, 32), 0x38, np.uint8).view(FORMATS["e4m3fn"].dtype)
    mx = MXArray(one, np.arange(256, dtype=np.uint8)[:, None].view(E8M0), 1, "e4m3fn", 32)
    value = dequantize(mx, np.float64)[:, 0]
    product = value[:, None] * value
    a = np.arange(255)
    assert np.array_equal(product[:255, :255], np.exp2(a[:, None] + a - 254.0))
    assert np.isnan(product[255]).all() and np.isnan(product[:, 255]).all()
    assert value[0] == scale_table()[0] == 2.0**-127


@pytest.mark.parametrize("axis", [0, 1, 2, (1, 2)])
def test_dequantize_undoes_exact_data_on_every_layout(axis: Any) -> None:
    """Values that e4m3fn holds under their scale come back bit for bit."""
    rng = np.random.default_rng(11)
    x = rng.integers(-8, 9, (32, 64, 96)).astype(np.float32) * np.float32(2.0**-3)
    block = (32, 32) if isinstance(axis, tuple) else 32
    for dtype in (np.float32, np.float64, BF16, np.float16):
        got = dequantize(quantize(x, axis=axis, block=block), dtype)
        assert got.dtype == dtype and got.flags.c_contiguous
        assert np.array_equal(got.astype(np.float32), x)


# ---- bad input ------------------------------------------------------------------------------------------

X = np.zeros((64, 40), np.float32)
GOOD = quantize(X, axis=0)
SCALAR: Any = np.float32(1)
SCALE: Any = {"scale": "e8m0"}


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: quantize(X, axis=1), "axis 1 of shape (64, 40) has length 40; expected a multiple of 32, or pad"),
        (lambda: quantize(X, axis=-1), "axis 1 of shape (64, 40) has length 40"),
        (lambda: quantize(X, axis=2), "axis 2 is outside an array of 2 axes; expected -2 .. 1"),
        (lambda: quantize(X[:, 0], axis=1), "axis 1 is outside an array of 1 axes"),
        (lambda: quantize(SCALAR, axis=0), "input is a float32; expected a float32, bfloat16 or float16 NumPy array"),
        (
            lambda: quantize(X.astype(np.float64), axis=0),
            "input has type float64; expected float32, bfloat16 or float16",
        ),
        (lambda: quantize(X.astype(np.int8), axis=0), "input has type int8"),
        (lambda: quantize(X, axis=0, format="fp8"), "unknown element format 'fp8'; expected one of e4m3fn, e5m2"),
        (lambda: quantize(X, axis=0, profile="torchao"), "unknown profile 'torchao'; expected one of ocp"),
        (lambda: quantize(X, axis=0, profile="te", format="e4m3fnuz"), "'te' was never measured for format 'e4m3fnuz'"),
        (lambda: quantize(X, axis=0, rounding="floor"), "unknown rounding 'floor'; expected one of even, away"),
        (lambda: quantize(X, axis=0, rounding="stochastic"), "rounding='stochastic' needs a seed"),
        (lambda: quantize(X, axis=0, seed=1), "rounding='even' takes no seed"),
        (lambda: quantize(X, axis=0, block=16), "block=16 with axis=0; expected block=32 with one axis"),
        (lambda: quantize(X, axis=(0, 1)), "block=32 with axis=(0, 1); expected block=32 with one axis"),
        (lambda: quantize(X, axis=0, block=(32, 32)), "block=(32, 32) with axis=0; expected"),
        (lambda: quantize(X[None], axis=(0, 1), block=(32, 32)), "expected the last two axes, (-2, -1)"),
        (lambda: quantize(X, axis=0, **SCALE), "unexpected keyword argument 'scale'"),
        (lambda: dequantize(GOOD, np.int8), "cannot dequantize to int8; expected float64, float32, bfloat16 or"),
        (lambda: MXArray(GOOD.codes(), GOOD.scales, 0, "e4m3fn", 32), "elements of a e4m3fn array have type uint8"),
        (lambda: MXArray(GOOD.elements, GOOD.scales, 0, "e5m2", 32), "have type float8_e4m3fn; expected float8_e5m2"),
        (
            lambda: MXArray(GOOD.elements, GOOD.scale_codes(), 0, "e4m3fn", 32),
            "scales of a e4m3fn array have type uint8",
        ),
        (
            lambda: MXArray(GOOD.elements, GOOD.scales[:1], 0, "e4m3fn", 32),
            "scales have shape (1, 40); expected (2, 40)",
        ),
        (lambda: MXArray(GOOD.elements, GOOD.scales, 1, "e4m3fn", 32), "axis 1 of shape (64, 40) has length 40"),
        (lambda: MXArray(GOOD.elements[:, ::2], GOOD.scales[:, ::2], 0, "e4m3fn", 32), "are not C-contiguous"),
        (lambda: MXArray(GOOD.elements.T, GOOD.scales.T, 1, "e4m3fn", 32), "are not C-contiguous"),
        (
            lambda: MXArray(np.full(32, 16, np.uint8).view(FORMATS["e2m1"].dtype), np.zeros(1, E8M0), 0, "e2m1", 32),
            "an element code of 16 has more than 4 bits (e2m1)",
        ),
    ],
)
def test_bad_input_gets_one_clear_line(call: Callable[[], Any], says: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    assert says in str(caught.value) and "\n" not in str(caught.value)
