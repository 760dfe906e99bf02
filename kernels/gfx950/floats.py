"""Number formats of the matrix and conversion instructions, and float arithmetic that rounds once.

Decode tables are float64 (exact for every format). Narrowing is round to nearest even; out-of-range values saturate or
become NaN as each instruction says. Formats after the OCP MX and OFP8 specifications (gfx950 uses the OCP variants).
"""

from __future__ import annotations

import numpy as np

from mxgate.kernels.gfx950.state import Array


def _table(exponent: int, mantissa: int, bias: int, kind: str) -> Array:
    """Every code of a sign/exponent/mantissa format. kind: "fn" (NaN at all ones), "ieee" (inf and NaN), "finite"."""
    codes = np.arange(1 << (1 + exponent + mantissa))
    sign = np.where(codes >> (exponent + mantissa), -1.0, 1.0)
    e = (codes >> mantissa) & ((1 << exponent) - 1)
    m = codes & ((1 << mantissa) - 1)
    value = np.where(e == 0, np.ldexp(m, 1 - bias - mantissa), np.ldexp(m + (1 << mantissa), e - bias - mantissa))
    top = e == (1 << exponent) - 1
    if kind == "fn":
        value = np.where(top & (m == (1 << mantissa) - 1), np.nan, value)
    if kind == "ieee":
        value = np.where(top, np.where(m == 0, np.inf, np.nan), value)
    return sign * value


FP8, BF8 = _table(4, 3, 7, "fn"), _table(5, 2, 15, "ieee")
FP6, BF6 = _table(2, 3, 1, "finite"), _table(3, 2, 3, "finite")
FP4 = _table(2, 1, 1, "finite")
E8M0 = np.append(np.exp2(np.arange(255.0) - 127), np.nan)
# Two codes at a time: a pair of float64 moves as one complex128.
_pairs = np.arange(65536)
PAIRS8 = {
    name: np.ascontiguousarray(np.stack([t[_pairs & 255], t[_pairs >> 8]], 1)).view(np.complex128)[:, 0]
    for name, t in (("fp8", FP8), ("bf8", BF8))
}
PAIRS4 = np.ascontiguousarray(np.stack([FP4[_pairs[:256] & 15], FP4[_pairs[:256] >> 4]], 1)).view(np.complex128)[:, 0]


def two_sum(x: Array, y: Array) -> tuple[Array, Array]:
    """x + y as a rounded sum and its exact error (float64, no overflow)."""
    s = x + y
    z = s - x
    return s, (x - (s - z)) + (y - z)


def to_odd(s: Array, error: Array) -> Array:
    """A float64 sum whose last bit remembers that it was inexact, so that narrowing it rounds once.

    s is the nearest float64 of s + error. An even s with a nonzero error moves one step towards it.
    """
    bits = np.ascontiguousarray(s, np.float64).view(np.int64)
    special = (s == 0) | ~np.isfinite(s)
    if special.any():
        move = (error != 0) & (bits & 1 == 0) & ~special
        odd = np.where(move, bits + np.where((error > 0) == (s > 0), 1, -1), bits).view(np.float64)
        return np.where((s == 0) & (error != 0), np.sign(error) * 5e-324, odd)
    step = (np.sign(error) * np.sign(s)).astype(np.int64)
    return (bits + step * (1 - (bits & 1))).view(np.float64)


def sum_once(terms: Array) -> Array:
    """float32 of the exact sum of float64 terms over the last axis, rounded once to nearest even.

    Repeated error-free sweeps leave terms that do not overlap; the rest only matters for which side of a tie it is on.
    NaN and infinity follow IEEE addition.
    """
    with np.errstate(all="ignore"):
        plain = terms.sum(-1)
        x = [np.ascontiguousarray(terms[..., k]) for k in range(terms.shape[-1])]
        for _ in range(len(x)):
            for k in range(len(x) - 1):
                x[k + 1], x[k] = two_sum(x[k + 1], x[k])
        rest = x[0]
        for t in x[1:-1]:
            rest = np.where(t != 0, t, rest)  # the largest nonzero error decides its sign
        exact = to_odd(x[-1], rest).astype(np.float32)
        return np.where(np.isfinite(plain), exact, plain.astype(np.float32))


def fma32(x: Array, y: Array, z: Array) -> Array:
    """float32 x * y + z rounded once: the product is exact in float64."""
    with np.errstate(all="ignore"):
        product = x.astype(np.float64) * y.astype(np.float64)
        s, error = two_sum(product, np.asarray(z).astype(np.float64))
        exact: Array = np.where(np.isfinite(s), to_odd(s, np.where(np.isfinite(s), error, 0)), s)
        return exact.astype(np.float32)


def fma64(x: Array, y: Array, z: Array) -> Array:
    """float64 fused multiply-add, one rounding, through Python integers (rare in these kernels, so slow is fine)."""
    from fractions import Fraction

    def one(a: float, b: float, c: float) -> float:
        if not (np.isfinite(a) and np.isfinite(b) and np.isfinite(c)):
            return a * b + c
        exact = Fraction(a) * Fraction(b) + Fraction(c)
        if exact == 0:
            return a * b + c
        try:
            return exact.numerator / exact.denominator
        except OverflowError:
            return float("inf") if exact > 0 else float("-inf")

    return np.vectorize(one, otypes=[np.float64])(x, y, z)


def _round_bf16(x: Array) -> Array:
    """uint32 whose high half is the bfloat16 nearest to each float32 (ties to even); the low half is not cleared."""
    u = np.asarray(x).view(np.uint32)
    r = u >> np.uint32(16)
    r &= np.uint32(1)
    r += u
    r += np.uint32(0x7FFF)
    nan = np.isnan(x)
    return np.where(nan, u | np.uint32(0x400000), r) if nan.any() else r


def bf16_bits(x: Array) -> Array:
    """uint32 holding the bfloat16 nearest to each float32 (ties to even); NaN stays NaN, quiet."""
    return _round_bf16(x) >> np.uint32(16)


def bf16_pair(x: Array, y: Array) -> Array:
    """Two float32 as two bfloat16 in a uint32, x low."""
    high = _round_bf16(y) & np.uint32(0xFFFF0000)
    return high | (_round_bf16(x) >> np.uint32(16))


_SPECS = {"fp8": (FP8, 8), "bf8": (BF8, 8), "fp6": (FP6, 6), "bf6": (BF6, 6), "fp4": (FP4, 4)}
NARROW = {}
for _name, (_t, _bits) in _SPECS.items():
    _half = 1 << (_bits - 1)
    _values = _t[:_half]
    _finite = _values[np.isfinite(_values)]
    # Midpoints between neighbours; a value equal to one goes to the even code.
    NARROW[_name] = (
        (_finite[1:] + _finite[:-1]) / 2,
        _finite,
        _half,
        int(np.nonzero(np.isnan(_values))[0][-1]) if np.isnan(_values).any() else None,
    )


def narrow(x: Array, name: str) -> Array:
    """uint32 codes of the format `name` nearest to float64 x, ties to even, saturating at the largest finite value.

    NaN gives the format's NaN code (sign kept); a format without NaN saturates [assumed].
    """
    middle, finite, half, nan = NARROW[name]
    a = np.abs(x)
    low = np.searchsorted(middle, a, side="left")  # first code whose upper midpoint is >= a
    tie = (low < len(middle)) & (a == middle[np.minimum(low, len(middle) - 1)]) & (low & 1 == 1)
    code = np.minimum(low + tie, len(finite) - 1)
    code = np.where(np.isnan(x), len(finite) - 1 if nan is None else nan, code)
    signed: Array = code + np.where(np.signbit(x), half, 0)
    return signed.astype(np.uint32)
