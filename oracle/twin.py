"""The grouped GEMMs a second time, slowly, from the definition: Python integers and nothing of this package.

It decodes codes and scales by itself and only reads its operands' fields, so that an error in the fast path (formats,
exact, gemm) cannot hide in a shared line. A product is an integer times a power of two; a sum is one big integer;
dividing two integers is correctly rounded by the language. A few hundred thousand products a second: for small cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf, nan
from typing import Any

# Exponent bits, mantissa bits, bias; then how the top codes are used: "all-ones" is one NaN of each sign, "ieee" has
# infinities and NaNs in the top binade, "negative-zero" has its only NaN there, "none" is all finite.
_LAYOUTS = {
    "e4m3fn": (4, 3, 7, "all-ones"),
    "e5m2": (5, 2, 15, "ieee"),
    "e4m3fnuz": (4, 3, 8, "negative-zero"),
    "e5m2fnuz": (5, 2, 16, "negative-zero"),
    "e2m1": (2, 1, 1, "none"),
    "e2m3": (2, 3, 1, "none"),
    "e3m2": (3, 2, 3, "none"),
}

_POINT = 700  # sums are integers times 2^-700; no product has a smaller bit than 2^-288

Number = int | float  # an integer in multiples of 2^-350, or NaN or an infinity
Sums = tuple[list[Any], list[Any]]


def element(code: int, scale: int, format: str) -> Number:
    """A code under an E8M0 scale, in multiples of 2^-350."""
    exponent_bits, mantissa_bits, bias, top = _LAYOUTS[format]
    digits = f"{code:0{1 + exponent_bits + mantissa_bits}b}"
    negative = digits[0] == "1"
    exponent, mantissa = int(digits[1 : 1 + exponent_bits], 2), int(digits[1 + exponent_bits :], 2)
    if scale == 255:
        return nan
    if top == "all-ones" and "0" not in digits[1:]:
        return nan
    if top == "negative-zero" and negative and "1" not in digits[1:]:
        return nan
    if top == "ieee" and "0" not in digits[1 : 1 + exponent_bits]:
        return nan if mantissa else (-inf if negative else inf)
    if exponent == 0:
        exponent = 1
    else:
        mantissa += 2**mantissa_bits
    value = mantissa << (exponent - bias - mantissa_bits + scale - 127 + _POINT // 2)
    return -value if negative else value


def _sum(pairs: Iterable[tuple[Number, Number]]) -> tuple[float, float]:
    """(sum of the products, sum of their absolute values), each rounded once."""
    total, absolute = 0, 0
    special, special_absolute = 0.0, 0.0
    for x, y in pairs:
        if isinstance(x, int) and isinstance(y, int):
            total += x * y
            absolute += abs(x * y)
            continue
        # The sign is all that matters of a finite factor: it may be too large for a float.
        product = 1.0
        for factor in (x, y):
            product *= ((factor > 0) - (factor < 0)) if isinstance(factor, int) else factor
        special += product
        special_absolute += abs(product)
    if special != 0 or special_absolute != 0:
        return special, special_absolute
    return total / 2**_POINT, absolute / 2**_POINT


def _reader(mx: Any) -> Callable[..., Number]:
    """A function from an index to the element there."""
    codes, scales = mx.elements.view("uint8").tolist(), mx.scales.view("uint8").tolist()
    axes = mx.axis if isinstance(mx.axis, tuple) else (mx.axis,)

    def read(*index: int) -> Number:
        code, scale = codes, scales
        for axis, i in enumerate(index):
            code = code[i]
            scale = scale[i // 32 if axis in axes else i]
        return element(code, scale, mx.format)

    return read


def _spans(offsets: Any) -> list[tuple[int, int]]:
    ends = offsets.tolist()
    return [(ends[g - 1] if g else 0, ends[g]) for g in range(len(ends))]


def _split(table: Any, depth: int) -> Sums:
    """Nested lists of pairs as a pair of nested lists."""
    if depth == 0:
        value, magnitude = table
        return value, magnitude
    parts = [_split(row, depth - 1) for row in table]
    return [p[0] for p in parts], [p[1] for p in parts]


def forward(x: Any, w: Any, offsets: Any) -> Sums:
    """(value, magnitude) of Y[g] = X[g] W[g]^T as nested lists [M][N] of floats."""
    (tokens, depth), width = x.elements.shape, w.elements.shape[1]
    left, right = _reader(x), _reader(w)
    out = [[(0.0, 0.0)] * width for _ in range(tokens)]
    for g, (start, stop) in enumerate(_spans(offsets)):
        for m in range(start, stop):
            for n in range(width):
                out[m][n] = _sum((left(m, k), right(g, n, k)) for k in range(depth))
    return _split(out, 2)


def dgrad(dy: Any, w: Any, offsets: Any) -> Sums:
    """(value, magnitude) of dX[g] = dY[g] W[g] as nested lists [M][K] of floats."""
    (tokens, depth), width = dy.elements.shape, w.elements.shape[2]
    left, right = _reader(dy), _reader(w)
    out = [[(0.0, 0.0)] * width for _ in range(tokens)]
    for g, (start, stop) in enumerate(_spans(offsets)):
        for m in range(start, stop):
            for k in range(width):
                out[m][k] = _sum((left(m, n), right(g, n, k)) for n in range(depth))
    return _split(out, 2)


def wgrad(dy_t: Any, x_t: Any, offsets: Any) -> Sums:
    """(value, magnitude) of dW[g] = dY[g]^T X[g] as nested lists [E][N][K] of floats."""
    left, right = _reader(dy_t), _reader(x_t)
    rows, columns = range(dy_t.elements.shape[0]), range(x_t.elements.shape[0])
    return _split(
        [
            [[_sum((left(n, m), right(k, m)) for m in range(start, stop)) for k in columns] for n in rows]
            for start, stop in _spans(offsets)
        ],
        3,
    )
