"""The element formats and the E8M0 block scale: one row each, decoded and encoded by integer arithmetic.

OCP OFP8 v1.0 (e4m3fn, e5m2), OCP MX v1.0 (e2m1, e2m3, e3m2, e8m0) and the FNUZ pair that gfx942
computes in. ml_dtypes lends its dtypes as carriers and nothing more: its casts overflow e4m3fn to NaN
and turn an e8m0 of zero into NaN, so no number of this package ever goes through one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import ldexp
from types import MappingProxyType
from typing import Any

import ml_dtypes as ml
import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
F64 = NDArray[np.float64]

ROUNDINGS = ("even", "away", "stochastic")
BLOCK = 32  # elements under one scale


@dataclass(frozen=True)
class Format:
    """One row of the format table; a code is sign | exponent | mantissa in the low `bits` bits of a byte.

    `bias` is the exponent bias, `emax` the exponent of the largest finite value (what a block scale is
    measured against). `tag` is the dtype name in a safetensors file, None where that file type packs
    codes more tightly than the byte each that `dtype` uses.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    emax: int
    max_finite: float
    nan_codes: tuple[int, ...]
    inf_codes: tuple[int, ...]
    has_negative_zero: bool
    dtype: np.dtype[Any]
    tag: str | None

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def sign_bit(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def max_code(self) -> int:
        """The positive code of max_finite: the largest one that is neither NaN nor infinity."""
        special = set(self.nan_codes) | set(self.inf_codes)
        return max(code for code in range(self.sign_bit) if code not in special)

    @property
    def nan_code(self) -> int | None:
        """The code written for a positive NaN: all ones where the format allows it; None if it has no NaN."""
        return max((c for c in self.nan_codes if c <= self.sign_bit), default=None)


def _row(
    name: str,
    fields: tuple[int, int, int],
    top: tuple[int, float],
    nan_codes: tuple[int, ...],
    inf_codes: tuple[int, ...],
    negative_zero: bool,
    carrier: Any,
    tag: str | None,
) -> Format:
    e, m, bias = fields
    return Format(name, e, m, bias, *top, nan_codes, inf_codes, negative_zero, np.dtype(carrier), tag)


_NANS_E5M2 = (0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF)

# fmt: off
_ROWS = (
    #    name         e  m  bias  emax  max      NaN           inf           -0     carrier             tag
    _row("e4m3fn",   (4, 3, 7),  (8,  448.0),   (0x7F, 0xFF), (),           True,  ml.float8_e4m3fn,   "F8_E4M3"),
    _row("e5m2",     (5, 2, 15), (15, 57344.0), _NANS_E5M2,   (0x7C, 0xFC), True,  ml.float8_e5m2,     "F8_E5M2"),
    _row("e4m3fnuz", (4, 3, 8),  (7,  240.0),   (0x80,),      (),           False, ml.float8_e4m3fnuz, "F8_E4M3FNUZ"),
    _row("e5m2fnuz", (5, 2, 16), (15, 57344.0), (0x80,),      (),           False, ml.float8_e5m2fnuz, "F8_E5M2FNUZ"),
    _row("e2m1",     (2, 1, 1),  (2,  6.0),     (),           (),           True,  ml.float4_e2m1fn,   None),
    _row("e2m3",     (2, 3, 1),  (2,  7.5),     (),           (),           True,  ml.float6_e2m3fn,   None),
    _row("e3m2",     (3, 2, 3),  (4,  28.0),    (),           (),           True,  ml.float6_e3m2fn,   None),
)
# fmt: on

FORMATS: Mapping[str, Format] = MappingProxyType({row.name: row for row in _ROWS})

SCALE_BIAS = 127
SCALE_NAN = 0xFF
# A block scale is a bare exponent: no sign, no zero, no infinity.
E8M0 = _row("e8m0", (8, 0, SCALE_BIAS), (127, 2.0**127), (SCALE_NAN,), (), False, ml.float8_e8m0fnu, "F8_E8M0")


def named(name: str | Format) -> Format:
    """The row called `name` (a row is given back as it is). ValueError lists the names there are."""
    if isinstance(name, Format):
        return name
    if name not in FORMATS:
        raise ValueError(f"unknown element format {name!r}; expected one of {', '.join(FORMATS)}")
    return FORMATS[name]


def format_of(dtype: Any) -> Format:
    """The row whose carrier is `dtype`. TypeError names the carriers there are."""
    for row in _ROWS:
        if row.dtype == dtype:
            return row
    carriers = ", ".join(row.dtype.name for row in _ROWS)
    raise TypeError(f"dtype {dtype} carries no element format; expected one of {carriers}")


@cache
def decode_table(format: str | Format) -> F64:
    """256 float64 values, one a code; a byte above the format's bits is no code and decodes to NaN. Read-only."""
    row = named(format)
    table = np.full(256, np.nan)
    for code in range(1 << row.bits):
        if code in row.nan_codes:
            continue
        sign = -1.0 if code & row.sign_bit else 1.0
        if code in row.inf_codes:
            table[code] = sign * np.inf
            continue
        mantissa = code & ((1 << row.mantissa_bits) - 1)
        exponent = (code & (row.sign_bit - 1)) >> row.mantissa_bits
        significand = mantissa + (1 << row.mantissa_bits if exponent else 0)
        table[code] = sign * ldexp(significand, max(exponent, 1) - row.bias - row.mantissa_bits)
    table.setflags(write=False)
    return table


@cache
def scale_table() -> F64:
    """256 float64 values of E8M0: code c is 2^(c - 127), so 0x00 is 2^-127 and not zero; 0xFF is NaN. Read-only."""
    table = np.array([ldexp(1.0, code - SCALE_BIAS) for code in range(255)] + [np.nan])
    table.setflags(write=False)
    return table


def decode(codes: U8, format: str | Format) -> F64:
    """uint8 codes of `format` to their exact float64 values, same shape."""
    values: F64 = decode_table(format)[_bytes(codes)]
    return values


def scale_value(codes: U8) -> F64:
    """uint8 E8M0 codes to their exact float64 values, same shape."""
    values: F64 = scale_table()[_bytes(codes)]
    return values


def _bytes(codes: U8) -> U8:
    if not isinstance(codes, np.ndarray) or codes.dtype != np.uint8:
        found = getattr(codes, "dtype", type(codes).__name__)
        raise TypeError(f"codes have type {found}; expected a uint8 array (use .view(np.uint8) on a carrier)")
    return codes


INPUT_DTYPES = (np.dtype(np.float32), np.dtype(ml.bfloat16), np.dtype(np.float16))


def check_input(x: Any) -> None:
    """TypeError unless x is a float32, bfloat16 or float16 array.

    A float64 would have to be rounded first, and by whom is not ours to say.
    """
    if not isinstance(x, np.ndarray):
        raise TypeError(f"input is a {type(x).__name__}; expected a float32, bfloat16 or float16 NumPy array")
    if x.dtype not in INPUT_DTYPES:
        raise TypeError(f"input has type {x.dtype}; expected float32, bfloat16 or float16")


def float32_bits(x: NDArray[Any]) -> NDArray[np.uint32]:
    """The float32 bit patterns of a float32, bfloat16 or float16 array; every value of the three is exact."""
    check_input(x)
    if x.dtype == np.float32:
        bits: NDArray[np.uint32] = x.view(np.uint32)
    elif x.dtype == np.float16:
        bits = x.astype(np.float32).view(np.uint32)
    else:
        bits = x.view(np.uint16).astype(np.uint32) << np.uint32(16)
    return bits


def random_bits(seed: int, index: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """64 uniform bits for each element index: SplitMix64 used as a counter-based generator.

    The bits depend on (seed, index) alone, so neither chunking nor threads can change a result.
    """

    def mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(z ^ (z >> np.uint64(31)), np.uint64)

    # The seed is mixed on its own first: neighbouring seeds would otherwise give shifted copies of one stream.
    key = mix(np.array([(seed + 0x9E3779B97F4A7C15) % 2**64], np.uint64))
    return mix(key + (index + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))


def bit_length(n: NDArray[np.int64]) -> NDArray[np.int64]:
    """Bits in each integer of 0 .. 2^53 - 1 (0 for 0), read from the exponent field of its exact float64."""
    return np.where(n == 0, 0, (n.astype(np.float64).view(np.int64) >> 52) - 1022)


def encode_bits(
    bits: NDArray[np.uint32],
    scale_codes: NDArray[Any] | int,
    row: Format,
    rounding: str = "even",
    random: NDArray[np.uint64] | None = None,
    saturate: bool = True,
) -> U8:
    """Codes of float32 bit patterns divided by 2^(scale_codes - 127): the definition, in integers, slow and plain.

    `scale_codes` broadcasts against `bits`. `random` holds 64 bits an element for rounding="stochastic".
    A NaN keeps its sign where the format has NaNs of both signs; with no NaN in the format it becomes +0
    (MX leaves it undefined: there the block's scale has to carry the NaN).
    """
    sign = (bits >> np.uint32(31)).astype(np.int64)
    magnitude = (bits & np.uint32(0x7FFFFFFF)).astype(np.int64)
    exponent = magnitude >> 23
    significand = (magnitude & 0x7FFFFF) | np.where(exponent > 0, 1 << 23, 0)
    # Subnormals become 24-bit significands like all others: |x| / scale = significand * 2^power.
    shift = np.where(significand == 0, 0, 24 - bit_length(significand))
    significand = significand << shift
    power = np.maximum(exponent, 1) - shift - 150 - (np.asarray(scale_codes, np.int64) - SCALE_BIAS)

    lowest = 1 - row.bias
    binade = np.maximum(power + 23, lowest)
    dropped = binade - row.mantissa_bits - power  # at least 20: the bits below the last one kept
    down = np.minimum(dropped, 62)
    kept = significand >> down
    rest = significand & ((np.int64(1) << down) - 1)
    half = np.int64(1) << (down - 1)
    if rounding == "even":
        up = (rest > half) | ((rest == half) & (kept & 1 == 1))
    elif rounding == "away":
        up = rest >= half
    elif rounding == "stochastic" and random is not None:
        # Up with probability rest / 2^dropped, as 64-bit integers: exact until 64 bits are dropped,
        # below that off by less than 2^-64 of a step.
        threshold = np.where(
            dropped <= 64,
            rest.astype(np.uint64) << np.clip(64 - dropped, 0, 63).astype(np.uint64),
            significand.astype(np.uint64) >> np.clip(dropped - 64, 0, 63).astype(np.uint64),
        )
        up = random < threshold
    else:
        raise ValueError(f"unknown rounding {rounding!r}; expected one of {', '.join(ROUNDINGS)}")
    code = kept + up + ((binade - lowest) << row.mantissa_bits)
    code = np.where(significand == 0, 0, code)

    over = row.max_code
    if not saturate:
        if row.inf_codes:
            over = min(row.inf_codes)
        elif row.nan_code is not None:
            over = row.nan_code
    code = np.where((code > row.max_code) | (magnitude == 0x7F800000), over, code)
    signed = code | np.where(sign == 1, row.sign_bit, 0)
    if not row.has_negative_zero:
        signed = np.where(code == 0, 0, signed)
    nan = 0 if row.nan_code is None else np.where(sign == 1, max(row.nan_codes), row.nan_code)
    return np.asarray(np.where(magnitude > 0x7F800000, nan, signed), np.uint8)


def check_rounding(rounding: str, seed: int | None) -> None:
    """ValueError for an unknown rounding, a missing or a useless seed; TypeError for a seed that is no integer."""
    if rounding not in ROUNDINGS:
        raise ValueError(f"unknown rounding {rounding!r}; expected one of {', '.join(ROUNDINGS)}")
    if rounding == "stochastic" and seed is None:
        raise ValueError("rounding='stochastic' needs a seed; expected seed=<integer>")
    if rounding != "stochastic" and seed is not None:
        raise ValueError(f"rounding={rounding!r} takes no seed; expected seed=None or rounding='stochastic'")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, (int, np.integer))):
        raise TypeError(f"seed has type {type(seed).__name__}; expected an integer")


def encode(
    x: NDArray[Any],
    format: str | Format,
    *,
    rounding: str = "even",
    seed: int | None = None,
    saturate: bool = True,
) -> U8:
    """Codes of a float32, bfloat16 or float16 array in `format`, without a block scale; same shape.

    rounding: "even" (nearest, ties to even), "away" (nearest, ties away from zero) or "stochastic" (needs
    a seed; an element's place in the flattened array is its counter). saturate=False sends what overflows
    to infinity, or to NaN where the format has none, or to the largest value where it has neither.
    """
    check_rounding(rounding, seed)
    bits = float32_bits(x)
    random = None
    if rounding == "stochastic" and seed is not None:
        random = random_bits(int(seed), np.arange(x.size, dtype=np.uint64)).reshape(x.shape)
    return encode_bits(bits, SCALE_BIAS, named(format), rounding, random, saturate)
