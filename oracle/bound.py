"""How far a legitimate result may be from the exact one, and the single rounding to an output format.

A tolerance is a row of ACCUMULATORS. A row says what the hardware (or a plain float32 loop) does to the sum
of exact products, and from that follows c(n), the largest |accumulated - exact| / sum |a||b| it can reach.
The bound follows the partial sums' magnitude, never the result's: where a sum cancels, the result is small and
the error is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .formats import BLOCK, F64

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
OUT_DTYPES = (BFLOAT16, np.dtype(np.float16), np.dtype(np.float32))

# Rounding errors to nearest behave like independent ones of mean zero, so r of them reach LAMBDA sqrt(r) units
# with probability 2 exp(-LAMBDA^2 / 2) = 5e-19 (Azuma-Hoeffding on the sequence of partial sums; Higham and Mary,
# "A new approach to probabilistic rounding error analysis", 2019). Over the 2^29 outputs of the largest case
# that is below 1e-9. Long sums of one repeated product can break the model: their errors all point one way.
LAMBDA = 9.25

# Where float32 stops being a relative format. With gradual underflow a product, or a partial sum that a block
# scale is applied to, is off by at most 2^-150; additions are exact down there. Hardware that flushes to zero
# is not covered.
UNDERFLOW = 2.0**-149
# A float32 sum whose magnitude reaches this may overflow half-way in one order and not in another.
_OVERFLOW = 2.0**128


@dataclass(frozen=True)
class Accumulator:
    """One way to add up exact products.

    bits: significand bits of the accumulator, hidden bit included; 0 means exact. truncates: towards zero, with
    `fraction_bits` kept below the leading bit of the largest addend of a step when its addends are aligned;
    otherwise to nearest, once a step. step: products that go into one rounding. verified: seen on hardware.
    """

    name: str
    bits: int
    truncates: bool
    fraction_bits: int
    step: int
    source: str
    verified: bool

    def roundings(self, terms: NDArray[Any]) -> F64:
        """Roundings on the longest path of `terms` products (int array), float64 of the same shape."""
        n = np.asarray(terms, np.float64)
        if self.step == 1:  # the first product is exact: it has at most 8 significant bits
            return np.maximum(n - 1, 0)
        # A group starts at any scale block and a kernel's steps do not: a step may be cut at both ends.
        return np.where(n > 0, np.ceil((n + max(self.step - BLOCK, 0)) / self.step), 0)

    def coefficient(self, terms: NDArray[Any]) -> F64:
        """c(n) for an integer array of term counts, float64 of the same shape.

        To nearest: the smaller of (1 + u)^r - 1 and its probabilistic form of order sqrt(r). Truncating: errors of
        one sign add up, so r (step + 1) 2^-fraction_bits for the aligned addends plus r 2^(1 - bits) for the results,
        and 1 at most: what is cut off a product is no larger than the product.
        """
        if self.bits == 0:
            return np.zeros(np.shape(terms))
        r = self.roundings(terms)
        if self.truncates:
            return np.asarray(
                np.minimum(r * ((self.step + 1) * 2.0**-self.fraction_bits + 2.0 ** (1 - self.bits)), 1.0)
            )
        unit = 2.0**-self.bits
        return np.asarray(np.expm1(np.minimum(r * unit, LAMBDA * np.sqrt(r) * unit + r * (1.01 * unit**2))))

    def failure_probability(self, elements: int) -> float:
        """Chance that a legitimate result of so many elements leaves its interval (0 where c(n) is a hard limit)."""
        if self.bits == 0 or self.truncates:
            return 0.0
        return min(1.0, elements * 2 * exp(-(LAMBDA**2) / 2))


# fmt: off
_ROWS = (
    #           name             bits truncates fraction step source                                       verified
    Accumulator("exact",            0, False,  0,   1, "the definition: one rounding, to the output",           True),
    Accumulator("fp32-any-order",  24, False,  0,   1, "binary32 additions in any order and any grouping",      True),
    Accumulator("mfma-scale-128",  24, False,  0, 128, "assumed: one float32 rounding an MFMA of 128 products", False),
    Accumulator("wgmma-bf16",      24, True,  25,  16, "measured on an H200; 16 products an instruction",       True),
    Accumulator("wgmma-fp8-13bit", 24, True,  13,  32, "measured on an H200; 32 products an instruction",       True),
    Accumulator("mma-mx-25bit",    24, True,  25,  32, "public models of Blackwell's block-scaled MMA",         False),
)
# fmt: on

ACCUMULATORS: Mapping[str, Accumulator] = MappingProxyType({row.name: row for row in _ROWS})


def accumulator(name: str) -> Accumulator:
    """The row called `name`. ValueError lists the names there are."""
    if name not in ACCUMULATORS:
        raise ValueError(f"unknown accumulator {name!r}; expected one of {', '.join(ACCUMULATORS)}")
    return ACCUMULATORS[name]


def output_dtype(out_dtype: Any) -> np.dtype[Any]:
    """The dtype of an output format. TypeError for anything but bfloat16, float16 and float32."""
    dtype: np.dtype[Any] = np.dtype(out_dtype)
    if dtype not in OUT_DTYPES:
        raise TypeError(f"output type {dtype} is not one of bfloat16, float16, float32")
    return dtype


def round_to(value: F64, out_dtype: Any) -> NDArray[Any]:
    """float64 rounded once, to nearest even, into bfloat16, float16 or float32; same shape.

    Overflow becomes infinity, underflow is gradual, NaN becomes a quiet NaN.
    """
    dtype = output_dtype(out_dtype)
    value = np.asarray(value, np.float64)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if dtype != BFLOAT16:
            narrow: NDArray[Any] = value.astype(dtype)
            return narrow
        nearest = value.astype(np.float32)
        inexact = (nearest != value) & ~np.isnan(value)
        # To odd in float32 first (truncate, and set the last bit if anything was lost): a second rounding, 16 bits
        # shorter, then sees on which side of its midpoint the value lies. ml_dtypes rounds to nearest twice.
        bits = nearest.view(np.uint32)
        bits = bits - (inexact & (np.abs(nearest) > np.abs(value)))
        bits = (bits | inexact).astype(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        rounded = np.where(np.isnan(value), np.uint32(0x7FC0), rounded).astype(np.uint16)
    result: NDArray[Any] = rounded.view(BFLOAT16)
    return result


def interval(value: F64, magnitude: F64, terms: NDArray[Any], name: str, out_dtype: Any) -> tuple[F64, F64]:
    """(lo, hi), float64 arrays of `out_dtype` values: every result that accumulator `name` may legitimately give.

    value +- (half an ulp + c * magnitude) in its sharp form. The accumulated sum lies in value +- c * magnitude, and
    rounding to the output is monotone, so the output lies between the rounded ends: half an ulp is never added
    where no rounding can reach it. The ends are computed outward. A NaN value gives NaN ends, an infinite one itself.
    Where a float32 accumulator could overflow on the way (magnitude of 2^128 or more) the ends are infinite.
    With `exact` both ends are the value rounded once.
    """
    row = accumulator(name)
    if row.bits == 0:
        once = round_to(value, out_dtype).astype(np.float64)
        return once, once
    n = np.asarray(terms, np.float64)
    reach = row.coefficient(terms) * magnitude + n * UNDERFLOW * (magnitude > 0)
    # Each of the operations on the way to an end is off by half an ulp of float64 at most; c and value too.
    reach = np.nextafter(reach * (1 + 2.0**-48), np.inf)
    finite = np.isfinite(value)
    reach = np.where(finite & (magnitude >= _OVERFLOW), np.inf, np.where(finite, reach, 0.0))
    ends = (np.nextafter(value - reach, -np.inf), np.nextafter(value + reach, np.inf))
    low, high = (np.where(finite & (magnitude > 0), end, value) for end in ends)
    return round_to(low, out_dtype).astype(np.float64), round_to(high, out_dtype).astype(np.float64)


def outside(out: NDArray[Any], lo: F64, hi: F64) -> NDArray[np.bool_]:
    """Where `out` is not provably inside [lo, hi]; the same shape as all three.

    The accepting condition, negated. A number passes inside the ends, and never where they are NaN. A NaN passes where
    they are NaN, and where they are the whole line: a sum that may overflow half-way may do so both ways, and infinity
    less infinity is NaN. (A float16 has the whole line also where a sum cancels by more than its range, and a NaN that
    could not be is taken there.)
    """
    if not out.shape == lo.shape == hi.shape:
        raise ValueError(f"output has shape {out.shape}; expected {lo.shape}, as its interval")
    with np.errstate(invalid="ignore"):  # a signalling NaN is one of the things to find
        x = out.astype(np.float64)
    anything = (np.isnan(lo) & np.isnan(hi)) | ((lo == -np.inf) & (hi == np.inf))
    inside = ((x >= lo) & (x <= hi)) | (np.isnan(x) & anything)
    return np.asarray(~inside)
