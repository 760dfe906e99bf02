"""The format table and the element codes, held against three things that share no code with them.

`TABLE` below is typed from the OCP and FNUZ definitions; `nearest` rounds exact numbers as Python integers; and
ml_dtypes and gfloat are two other people's implementations. Not caught here: whatever a block scale does to an
element (test_quantize.py), and stochastic rounding beyond its mean and its independence of neighbours.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import gfloat  # type: ignore[import-untyped]
import gfloat.formats  # type: ignore[import-untyped]
import ml_dtypes
import numpy as np
import pytest

from mxgate.oracle.formats import (
    E8M0,
    FORMATS,
    decode,
    decode_table,
    encode,
    format_of,
    named,
    random_bits,
    scale_value,
)

# name: (exponent bits, mantissa bits, bias, emax, largest value, smallest value, NaN codes, infinity codes, has -0)
TABLE = {
    "e4m3fn": (4, 3, 7, 8, 448, Fraction(1, 2**9), {0x7F, 0xFF}, set(), True),
    "e5m2": (5, 2, 15, 15, 57344, Fraction(1, 2**16), {0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF}, {0x7C, 0xFC}, True),
    "e4m3fnuz": (4, 3, 8, 7, 240, Fraction(1, 2**10), {0x80}, set(), False),
    "e5m2fnuz": (5, 2, 16, 15, 57344, Fraction(1, 2**17), {0x80}, set(), False),
    "e2m1": (2, 1, 1, 2, 6, Fraction(1, 2), set(), set(), True),
    "e2m3": (2, 3, 1, 2, Fraction(15, 2), Fraction(1, 8), set(), set(), True),
    "e3m2": (3, 2, 3, 4, 28, Fraction(1, 16), set(), set(), True),
}
GFLOAT = {
    "e4m3fn": gfloat.formats.format_info_ocp_e4m3,
    "e5m2": gfloat.formats.format_info_ocp_e5m2,
    "e2m1": gfloat.formats.format_info_ocp_e2m1,
    "e2m3": gfloat.formats.format_info_ocp_e2m3,
    "e3m2": gfloat.formats.format_info_ocp_e3m2,
}
ALL_16 = np.arange(65536, dtype=np.uint16)
BF16 = ALL_16.view(ml_dtypes.bfloat16)
# Of no type, as a caller without a type checker would pass them.
LIST: Any = [1.0]
FLOAT: Any = 1.5
ONES: Any = np.ones(2)
each_format = pytest.mark.parametrize("name", list(TABLE))


def magnitudes(name: str) -> list[Fraction]:
    """The non-negative finite values of a format, by code, from its definition."""
    e, m, bias, _, _, _, nan, inf, _ = TABLE[name]
    values = []
    for code in range(1 << (e + m)):
        if code in nan | inf:
            continue
        field, mantissa = divmod(code, 1 << m)
        significand = Fraction(mantissa, 1 << m) + (1 if field else 0)
        values.append(significand * Fraction(2) ** (max(field, 1) - bias))
    return values


STEP = 160  # 2^-160 divides every bfloat16, every float16, every value of every format


def steps(value: Fraction | float) -> int:
    """An exact number of 2^-160s."""
    numerator, denominator = value.as_integer_ratio()
    return (numerator << STEP) // denominator


def nearest(magnitude: int, values: list[int], away: bool) -> int:
    """The code of the nearest value, the largest for anything above; ties to the even code, or the larger one."""
    above = bisect.bisect_left(values, magnitude)
    if above == len(values):
        return above - 1
    if above == 0 or values[above] == magnitude:
        return above
    down, up = magnitude - values[above - 1], values[above] - magnitude
    if down == up:
        return above if away or above % 2 == 0 else above - 1
    return above - 1 if down < up else above


def expected(x: Any, name: str, away: bool = False) -> Any:
    """Codes of an array whose finite values are exact in float64, one exact number at a time."""
    e, m, _, _, _, _, nan, _, negative_zero = TABLE[name]
    table, sign_bit = [steps(value) for value in magnitudes(name)], 1 << (e + m)
    nans = {False: 0x7F if 0x7F in nan else max(nan, default=0), True: max(nan, default=0)}
    out = np.zeros(x.shape, np.uint8)
    with np.errstate(invalid="ignore"):
        wide = x.astype(np.float64)
    for i, value in enumerate(wide.tolist()):
        negative = bool(np.signbit(wide[i]))
        if np.isnan(value):
            out[i] = nans[negative]
            continue
        code = len(table) - 1 if np.isinf(value) else nearest(steps(abs(value)), table, away)
        out[i] = code | sign_bit if negative and (code or negative_zero) else code
    return out


def test_rows_are_the_published_ones() -> None:
    assert list(FORMATS) == list(TABLE)
    for name, (e, m, bias, emax, largest, smallest, nan, inf, negative_zero) in TABLE.items():
        row = FORMATS[name]
        assert (row.exponent_bits, row.mantissa_bits, row.bias, row.emax) == (e, m, bias, emax)
        assert row.max_finite == largest == decode_table(name)[row.max_code]
        assert decode_table(name)[1] == smallest
        assert (set(row.nan_codes), set(row.inf_codes), row.has_negative_zero) == (nan, inf, negative_zero)
        assert format_of(row.dtype) is row and named(name) is row and named(row) is row
    assert {row.tag for row in FORMATS.values()} == {"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", None}
    assert (E8M0.bias, E8M0.nan_codes, E8M0.tag) == (127, (255,), "F8_E8M0")


@each_format
def test_every_code_decodes_as_defined_and_as_others_decode_it(name: str) -> None:
    row = FORMATS[name]
    codes = np.arange(1 << row.bits, dtype=np.uint8)
    ours = decode(codes, name)
    for code in range(len(codes)):
        theirs = [float(codes[code].view(row.dtype))]
        if name in GFLOAT:
            theirs.append(gfloat.decode_float(GFLOAT[name], code).fval)
        for value in theirs:
            same = np.float64(value).tobytes() == ours[code].tobytes()
            assert same or (np.isnan(value) and np.isnan(ours[code]) and code in row.nan_codes), (code, value)
    for code, exact in enumerate(magnitudes(name)):
        assert Fraction(ours[code]) == exact


@pytest.mark.parametrize("name", ["e2m1", "e2m3", "e3m2"])
def test_bytes_above_a_small_format_are_not_numbers(name: str) -> None:
    assert np.isnan(decode(np.arange(1 << FORMATS[name].bits, 256, dtype=np.uint8), name)).all()


def test_scale_bytes_are_powers_of_two_and_the_first_is_not_zero() -> None:
    """0x00 read as zero and 0xFF as infinity were both shipped by somebody."""
    codes = np.arange(256, dtype=np.uint8)
    values = scale_value(codes)
    assert [Fraction(v) for v in values[:255]] == [Fraction(2) ** (c - 127) for c in range(255)]
    assert values[0] == 2.0**-127 != 0 and np.isnan(values[255])
    assert np.array_equal(values[:255], codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)[:255])
    assert np.array_equal(
        values[:255], [gfloat.decode_float(gfloat.formats.format_info_ocp_e8m0, c).fval for c in range(255)]
    )


@each_format
@pytest.mark.parametrize("rounding", ["even", "away"])
def test_every_bfloat16_pattern_rounds_as_exact_numbers_do(name: str, rounding: str) -> None:
    got = encode(BF16, name, rounding=rounding)
    want = expected(BF16, name, rounding == "away")
    wrong = np.flatnonzero(got != want)
    assert wrong.size == 0, [(hex(i), float(BF16[i]), hex(got[i]), hex(want[i])) for i in wrong[:20]]


@each_format
def test_every_bfloat16_pattern_agrees_with_ml_dtypes_where_that_has_no_quirk(name: str) -> None:
    """ml_dtypes overflows to infinity, NaN or the largest value as the format allows: encode's saturate=False.

    Its NaN codes differ for e5m2 (0x7E) and for formats without a NaN (a zero of the wrong sign), so a NaN is
    held to being a NaN.
    """
    row = FORMATS[name]
    with np.errstate(all="ignore"):
        theirs = BF16.astype(row.dtype).view(np.uint8)
        nan = np.isnan(BF16.astype(np.float32))
    ours = encode(BF16, name, saturate=False)
    assert np.array_equal(ours[~nan], theirs[~nan])
    if row.nan_codes:
        assert np.isin(ours[nan], row.nan_codes).all()


@pytest.mark.parametrize("name", list(GFLOAT))
def test_every_bfloat16_pattern_agrees_with_gfloat(name: str) -> None:
    with np.errstate(all="ignore"):
        x = BF16.astype(np.float64)
    x = x[~np.isnan(x)]
    for rounding, mode in (("even", gfloat.RoundMode.TiesToEven), ("away", gfloat.RoundMode.TiesToAway)):
        theirs = gfloat.round_ndarray(GFLOAT[name], x, rnd=mode, sat=True)
        ours = decode(encode(x.astype(np.float32), name, rounding=rounding), name)
        assert np.array_equal(ours.view(np.int64), theirs.view(np.int64))


@each_format
def test_every_float16_pattern_rounds_as_exact_numbers_do(name: str) -> None:
    x = ALL_16.view(np.float16)
    assert np.array_equal(encode(x, name), expected(x, name))


@each_format
def test_midpoints_and_their_float32_neighbours(name: str) -> None:
    """Large codes that all became the maximum, and ties gone wrong, have been shipped."""
    values = [float(v) for v in magnitudes(name)]
    middle = np.array([(a + b) / 2 for a, b in itertools.pairwise(values)], np.float32)
    codes = np.arange(len(middle))
    below, above = np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))
    assert np.array_equal(encode(below, name), codes)
    assert np.array_equal(encode(above, name), codes + 1)
    assert np.array_equal(encode(middle, name), codes + codes % 2)
    assert np.array_equal(encode(middle, name, rounding="away"), codes + 1)
    assert np.array_equal(encode(np.array(values, np.float32), name), np.arange(len(values)))


def test_one_and_nan_tell_ocp_from_fnuz() -> None:
    one = np.ones(1, np.float32)
    assert [int(encode(one, n)[0]) for n in FORMATS] == [0x38, 0x3C, 0x40, 0x40, 0x02, 0x08, 0x0C]
    assert decode(np.array([0x7F, 0x80, 0xFF], np.uint8), "e4m3fnuz").tolist()[0] == 240.0
    assert np.isnan(decode(np.array([0x80], np.uint8), "e4m3fnuz"))[0]
    assert np.signbit(decode(np.array([0x80], np.uint8), "e4m3fn"))[0]
    nans = np.array([np.nan, -np.nan], np.float32)
    assert [encode(nans, n).tolist() for n in FORMATS] == [[0x7F, 0xFF]] * 2 + [[0x80] * 2] * 2 + [[0, 0]] * 3


def test_overflow_saturates_or_says_so() -> None:
    x = np.array([1e30, -1e30, np.inf, -np.inf], np.float32)
    assert encode(x, "e4m3fn").tolist() == [0x7E, 0xFE] * 2
    assert encode(x, "e4m3fn", saturate=False).tolist() == [0x7F, 0xFF] * 2
    assert encode(x, "e5m2").tolist() == [0x7B, 0xFB] * 2
    assert encode(x, "e5m2", saturate=False).tolist() == [0x7C, 0xFC] * 2
    assert encode(x, "e4m3fnuz", saturate=False).tolist() == [0x80] * 4
    assert encode(x, "e2m1", saturate=False).tolist() == [0x7, 0xF] * 2


@each_format
def test_stochastic_rounding_is_unbiased(name: str) -> None:
    """The share rounded up of n = 40,000 draws is within 5 standard deviations, 5 sqrt(p (1 - p) / n), of p.

    A correct generator fails one such check in 1.7 million; the 20 points here are fixed, so it never does.
    Values sit in every kind of gap: below the smallest subnormal, between subnormals, and in the top binade.
    """
    n = 40_000
    values = [float(v) for v in magnitudes(name)]
    last = len(values) - 1
    for low, p in ((0, 0.5), (0, 0.01), (0, 2.0**-20), (1, 0.25), (last - 1, 0.7)):
        for sign in (1.0, -1.0):
            gap = values[low + 1] - values[low]
            x = np.full(n, sign * (values[low] + p * gap), np.float32)
            p_exact = float((Fraction(abs(float(x[0]))) - Fraction(values[low])) / Fraction(gap))
            codes = encode(x, name, rounding="stochastic", seed=low * 7 + int(sign))
            up = np.abs(decode(codes, name)) == values[low + 1]
            assert (up | (np.abs(decode(codes, name)) == values[low])).all()
            assert abs(up.mean() - p_exact) <= 5 * (p_exact * (1 - p_exact) / n) ** 0.5, (low, p, up.mean())


def test_stochastic_rounding_keeps_what_is_exact_and_vanishing() -> None:
    values = np.array([float(v) for v in magnitudes("e4m3fn")], np.float32)
    for seed in range(20):
        assert np.array_equal(encode(values, "e4m3fn", rounding="stochastic", seed=seed), np.arange(len(values)))
        tiny = np.full(1000, 2.0**-149, np.float32)
        assert not encode(tiny, "e4m3fn", rounding="stochastic", seed=seed).any()


def test_random_bits_depend_on_seed_and_index_alone() -> None:
    index = np.arange(4096, dtype=np.uint64)
    whole = random_bits(3, index)
    assert np.array_equal(whole[1000:1010], random_bits(3, index[1000:1010]))
    assert len(np.unique(np.concatenate([random_bits(s, index) for s in (-1, 0, 1, 2, 2**64 - 2)]))) == 5 * 4096
    bits = (whole[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    # 64 columns of 4,096 fair bits: each mean within 5 standard deviations of one half.
    assert (np.abs(bits.mean(axis=0) - 0.5) < 5 * 0.5 / 64).all()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: encode(np.ones(2), "e4m3fn"), "input has type float64; expected float32, bfloat16 or float16"),
        (lambda: encode(np.ones(2, np.int32), "e4m3fn"), "input has type int32"),
        (lambda: encode(LIST, "e4m3fn"), "input is a list; expected a float32, bfloat16 or float16 NumPy array"),
        (lambda: encode(np.ones(2, np.float32), "e4m3"), "unknown element format 'e4m3'; expected one of e4m3fn"),
        (lambda: encode(np.ones(2, np.float32), "e5m2", rounding="up"), "unknown rounding 'up'; expected one of even"),
        (lambda: encode(np.ones(2, np.float32), "e5m2", rounding="stochastic"), "needs a seed"),
        (lambda: encode(np.ones(2, np.float32), "e5m2", rounding="stochastic", seed=FLOAT), "seed has type float"),
        (lambda: decode(ONES, "e5m2"), "codes have type float64; expected a uint8 array"),
        (lambda: format_of(np.float32), "carries no element format; expected one of float8_e4m3fn"),
    ],
)
def test_bad_input_gets_one_clear_line(call: Callable[[], Any], says: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    assert says in str(caught.value) and "\n" not in str(caught.value)
