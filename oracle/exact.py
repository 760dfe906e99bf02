"""C = A B^T of two MX operands, every element exact until one rounding to float64, by float64 matrix products.

An element of an MX operand is an integer times a power of two. Divide every row by the smallest power of two that
occurs in it (its unit) and both operands are matrices of integers. If the largest row norms satisfy

    max ||a_row|| * max ||b_row|| <= 2^53

then (Cauchy-Schwarz) no partial sum of |a||b|, in any order, with or without FMA, leaves the integers that float64
holds exactly: the product is exact, so it is the same bytes on any machine, BLAS and thread count. Quantized normal
data needs about 48 of the 53 bits for 24k tokens, so value and magnitude cost one matrix product each.

Wider operands are cut into digits of 21 bits, towards zero, the top digit taking what is left (the error-free
split of Ozaki, Ogita, Oishi and Rump, 2012, with one fixed grid). Products of digits meet the same certificate, and
those of equal weight add up in float64 while their bounds allow it, in int64 beyond. The resulting integer is rounded
once, to nearest even. It holds for every pair of scale bytes: only time grows with the spread.

Signs of zero: a zero result is +0, whatever the signs of the operands' zeros.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from .formats import SCALE_BIAS, SCALE_NAN, decode_table

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]
Mask = NDArray[np.bool_]

BLOCK = 32
EXACT = 2.0**53  # float64 holds every integer up to here
DIGIT = 21  # bits of a digit; 2 * 21 + 11 = 53
DIGIT_LENGTH = 2048  # products that two such digits may be summed over: 2^11
TOP = 2.0**26.5  # row norm that a top digit may have: the square root of EXACT, and 2^21 sqrt(2048)
LOOSE = 2.0**57  # norms guessed from scales alone come out about 4 bits too large
FLUSHES = 256  # int64 takes 2^10 sums of EXACT


@dataclass(frozen=True)
class Operand:
    """One side of a product: `codes` [rows, length] and `scales` [rows, length / 32], both uint8, of `format`.

    The last axis is the contraction and has stride 1.
    """

    codes: U8
    scales: U8
    format: str

    @property
    def rows(self) -> int:
        return int(self.codes.shape[0])

    @property
    def length(self) -> int:
        return int(self.codes.shape[1])

    def part(self, start: int, stop: int) -> Operand:
        """The contraction from `start` to `stop`, multiples of 32."""
        return Operand(self.codes[:, start:stop], self.scales[:, start // BLOCK : stop // BLOCK], self.format)

    def take(self, start: int, stop: int) -> Operand:
        """Rows `start` to `stop`."""
        return Operand(self.codes[start:stop], self.scales[start:stop], self.format)

    def values(self, unit: I64 | None = None) -> F64:
        """The elements in multiples of 2^unit[row] (of 1 without units), float64 [rows, length]; exact.

        NaN and 0xFF-scaled elements are NaN, infinities infinite.
        """
        pairs = _pair_table(self.format)
        out = np.empty(self.codes.shape)
        codes = self.codes.view(np.uint16)
        exponents = self.scales.astype(np.int64) - SCALE_BIAS
        if unit is not None:
            exponents -= unit[:, None]
        factors = np.where(self.scales == SCALE_NAN, np.nan, np.ldexp(1.0, exponents))[:, :, None]
        step = max(1, _CACHE // max(1, 8 * self.length))
        for r in range(0, self.rows, step):  # in pieces that stay in cache
            piece = out[r : r + step]
            np.take(pairs, codes[r : r + step], out=piece.view(np.complex128), mode="clip")
            blocks = piece.reshape(len(piece), -1, BLOCK)
            np.multiply(blocks, factors[r : r + step], out=blocks)
        return out


_CACHE = 1 << 19


@cache
def _pair_table(format: str) -> NDArray[np.complex128]:
    """Two decoded elements for every pair of codes: one look-up moves both. [65536], indexed by the codes as uint16."""
    codes = np.arange(1 << 16, dtype=np.uint16).view(np.uint8).reshape(-1, 2)
    return np.ascontiguousarray(decode_table(format)[codes]).view(np.complex128).reshape(-1)


@cache
def _low(format: str) -> int:
    """Exponent of the smallest positive value: every finite element is an integer times 2^low."""
    table = decode_table(format)
    return int(np.log2(table[np.isfinite(table) & (table > 0)].min()))


@cache
def _trailing(format: str) -> NDArray[np.int16]:
    """Exponent of the last set bit of every code's value; a large number for zeros and what is not finite."""
    table = decode_table(format)
    used = np.isfinite(table) & (table != 0)
    integers = np.ldexp(np.abs(np.where(used, table, 0.0)), -_low(format)).astype(np.int64)
    last = integers & -integers
    exponents = np.frexp(last.astype(np.float64))[1] - 1 + _low(format)
    return np.where(used, exponents, _NOTHING).astype(np.int16)


_NOTHING = 10_000


def _loose(op: Operand) -> tuple[I64, float]:
    """(units, a limit on the largest row norm in those units) from the scales alone."""
    scales = op.scales.astype(np.int64)
    real = scales != SCALE_NAN
    least = np.where(real, scales, SCALE_NAN).min(axis=1, initial=SCALE_NAN)
    biggest = float(np.nanmax(np.where(np.isfinite(decode_table(op.format)), decode_table(op.format), 0.0)))
    blocks = np.where(real, np.ldexp(1.0, 2 * (scales - least[:, None])), 0.0).sum(axis=1)
    norm = float(np.sqrt(blocks.max(initial=0.0) * BLOCK)) * float(np.ldexp(biggest, -_low(op.format)))
    return least - SCALE_BIAS + _low(op.format), norm


def _sharp(op: Operand) -> I64:
    """Units from the elements too: zero blocks with tiny scales and unused low bits do not widen a row."""
    units = np.empty(op.rows, np.int64)
    table = _trailing(op.format)
    step = max(1, (1 << 22) // max(1, op.length))
    for r in range(0, op.rows, step):
        part = op.take(r, r + step)
        last = table[part.codes].reshape(part.rows, -1, BLOCK).min(axis=2, initial=_NOTHING).astype(np.int64)
        last = np.where((part.scales == SCALE_NAN) | (last == _NOTHING), _NOTHING, last + part.scales - SCALE_BIAS)
        units[r : r + step] = last.min(axis=1, initial=_NOTHING)
    return np.where(units == _NOTHING, 0, units)


def _norms(x: F64) -> F64:
    return np.asarray(np.sqrt(np.einsum("ij,ij->i", x, x)) * (1 + 1e-6))


@dataclass
class _Sum:
    """sum over k of 2^(DIGIT k) (hot[k] + cold[k]), one integer for every element of a tile.

    hot: float64, exact while the bounds of what went in add up to EXACT at most; cold: int64, for the rest.
    `tile` is the memory of hot[0] and of the rounded result.
    """

    tile: F64
    hot: dict[int, F64] = field(default_factory=dict)
    bound: dict[int, float] = field(default_factory=dict)
    cold: dict[int, I64] = field(default_factory=dict)
    flushes: int = 0

    def add(self, k: int, a: F64, b: F64, bound: float) -> None:
        """Add 2^(DIGIT k) a b^T, no partial sum of which exceeds `bound`, itself at most EXACT."""
        if not bound <= EXACT:
            raise AssertionError(f"a product of bound {bound} is not certified exact")
        if k not in self.hot:
            self.hot[k] = self.tile if k == 0 else np.empty_like(self.tile)
            np.matmul(a, b.T, out=self.hot[k])
            self.bound[k] = bound
            return
        if self.bound[k] + bound > EXACT:
            self._flush(k)
        self.hot[k] += np.matmul(a, b.T)
        self.bound[k] += bound

    def _flush(self, k: int) -> None:
        self.cold[k] = self.cold.get(k, 0) + self.hot[k].astype(np.int64)
        self.hot[k].fill(0.0)
        self.bound[k] = 0.0
        self.flushes += 1
        if self.flushes % FLUSHES == 0:
            top = max(self.cold)
            limbs = _carried([self.cold.get(i, np.zeros(self.tile.shape, np.int64)) for i in range(top + 1)], 3)
            self.cold = dict(enumerate(limbs))

    def round(self, rows: I64, columns: I64) -> None:
        """Leave the sum times 2^(rows[:, None] + columns) in `tile`, rounded once to float64."""
        if not self.hot:
            self.tile.fill(0.0)
            return
        if set(self.hot) == {0} and not self.cold:
            np.multiply(self.tile, np.ldexp(1.0, rows)[:, None], out=self.tile)
            np.multiply(self.tile, np.ldexp(1.0, columns), out=self.tile)
            self.tile += 0.0  # -0 becomes +0
            return
        top = max(*self.hot, *self.cold)
        step = max(1, (1 << 18) // max(1, self.tile.shape[1]))
        for r in range(0, len(self.tile), step):
            part = slice(r, r + step)
            limbs = [np.zeros(self.tile[part].shape, np.int64) for _ in range(top + 1)]
            for k, hot in self.hot.items():
                limbs[k] += hot[part].astype(np.int64)
            for k, cold in self.cold.items():
                limbs[k] += cold[part]
            self.tile[part] = _rounded(limbs, rows[part, None] + columns)


def _carried(limbs: list[I64], more: int) -> list[I64]:
    """The same integers with every limb but the last in [0, 2^DIGIT), `more` limbs longer."""
    out = []
    carry = np.zeros_like(limbs[0])
    for limb in [*limbs, *(np.zeros_like(carry) for _ in range(more))]:
        total = limb + carry
        carry = total >> DIGIT
        out.append(total & ((1 << DIGIT) - 1))
    out[-1] = total  # the last keeps its sign
    return out


def _rounded(limbs: list[I64], exponents: I64) -> F64:
    """float64 nearest (ties to even) to 2^exponents * sum_k 2^(DIGIT k) limbs[k]; every |limb| below 2^62."""
    negative = _carried(limbs, 3)[-1] < 0
    digits = np.stack(_carried([np.where(negative, -limb, limb) for limb in limbs], 3))
    # The highest digit in use and the three below it: at least 64 bits, or all there are.
    used = digits != 0
    top = np.where(used.any(axis=0), len(digits) - 1 - np.argmax(used[::-1], axis=0), 0)
    top = np.maximum(top, 3)[None]
    below = np.logical_or.accumulate(used, axis=0)
    lost = np.where(top > 3, np.take_along_axis(below, np.maximum(top - 4, 0), axis=0), False)[0]
    window = [np.take_along_axis(digits, top - i, axis=0)[0] for i in range(4)]
    high = (window[0] << DIGIT) | window[1]
    # A bit for all that was left off: far below the last place, it can only break a tie.
    low = (((window[2] << DIGIT) | window[3]) << 1) | lost
    total = np.ldexp(high.astype(np.float64), 2 * DIGIT + 1) + low.astype(np.float64)  # the one rounding
    total = np.ldexp(total, exponents + DIGIT * (top[0] - 3) - 1)
    return np.asarray(np.where(negative, -total, total))


@dataclass
class _Specials:
    """Where NaN and infinite products end up: what IEEE arithmetic makes of them, for one tile."""

    shape: tuple[int, int]
    nan_rows: Mask
    nan_columns: Mask
    signs: NDArray[np.uint8] | None = None  # bit 0: a +inf product, 1: a -inf product, 2: inf * 0

    def strip(self, a: F64, b: F64, rows: Mask, columns: Mask) -> None:
        """Note the special elements of `rows` of a and `columns` (rows of b), then make them zero."""
        self.nan_rows[rows] |= np.isnan(a[rows]).any(axis=1)
        self.nan_columns[columns] |= np.isnan(b[columns]).any(axis=1)
        if np.isinf(a[rows]).any() or np.isinf(b[columns]).any():
            if self.signs is None:
                self.signs = np.zeros(self.shape, np.uint8)
            self.signs[rows] |= _infinities(a[rows], b)
            self.signs[:, columns] |= _infinities(b[columns], a).T
        a[rows] = np.where(np.isfinite(a[rows]), a[rows], 0.0)
        b[columns] = np.where(np.isfinite(b[columns]), b[columns], 0.0)

    def apply(self, value: F64, magnitude: F64) -> None:
        if self.signs is not None:
            kinds = self.signs & 3
            invalid = self.signs >= 4
            for out, table in ((value, (0.0, np.inf, -np.inf, np.nan)), (magnitude, (0.0, np.inf, np.inf, np.inf))):
                np.copyto(out, np.array(table)[kinds], where=kinds > 0)
                out[invalid] = np.nan
        for out in (value, magnitude):
            out[self.nan_rows] = np.nan
            out[:, self.nan_columns] = np.nan


def _infinities(x: F64, y: F64) -> NDArray[np.uint8]:
    """The kinds of product that infinities of x meet in y, bits as in _Specials.signs, [rows of x, rows of y]."""
    x = np.where(np.isinf(x), np.sign(x), 0.0)
    sign = np.sign(np.where(np.isnan(y), 1.0, y))  # a NaN marks its whole column elsewhere
    zero = (sign == 0).astype(np.float64)
    count, signed, invalid = (p @ q.T for p, q in ((np.abs(x), np.abs(sign)), (x, sign), (np.abs(x), zero)))
    kinds = (count + signed > 0) | ((count - signed > 0) << 1) | ((invalid > 0) << 2)
    return np.asarray(kinds, np.uint8)


def _digits(x: F64) -> list[F64]:
    """x, integers, as digits of DIGIT bits from the lowest up, towards zero; the last one has the rest.

    The digits of |x| are the absolute values of x's. Consumes x.
    """
    norm = float(_norms(x).max(initial=0.0))
    more = 0 if norm <= TOP else int(np.ceil(np.log2(norm / TOP) / DIGIT))
    out = []
    for k in range(more, 0, -1):
        digit = np.trunc(np.ldexp(x, -DIGIT * k))
        x -= np.ldexp(digit, DIGIT * k)
        out.append(digit)
    return [x, *out[::-1]]


def _accumulate(sums: tuple[_Sum, _Sum], a: F64, b: F64) -> None:
    """Add a b^T to the first sum and |a||b|^T to the second. Consumes a and b, finite integers."""
    bound = float(_norms(a).max(initial=0.0)) * float(_norms(b).max(initial=0.0))
    if bound == 0:
        return
    if bound <= EXACT:
        pairs = [(0, a, b, bound)]
    elif a.shape[1] > DIGIT_LENGTH:
        for start in range(0, a.shape[1], DIGIT_LENGTH):
            part = slice(start, start + DIGIT_LENGTH)
            _accumulate(sums, a[:, part], b[:, part])
        return
    else:
        digits = [[(k, d, float(_norms(d).max())) for k, d in enumerate(_digits(x))] for x in (a, b)]
        pairs = [(i + j, x, y, p * q) for i, x, p in digits[0] for j, y, q in digits[1] if p * q > 0]
    for k, x, y, limit in pairs:
        sums[0].add(k, x, y, limit)
    for x in {id(x): x for pair in pairs for x in pair[1:3]}.values():
        np.abs(x, out=x)
    for k, x, y, limit in pairs:
        sums[1].add(k, x, y, limit)


def product(a: Operand, b: Operand, value: F64, magnitude: F64, work: int) -> None:
    """Write A B^T and |A||B|^T, each rounded once to float64, into `value` and `magnitude` [a.rows, b.rows].

    work: bytes of scratch memory to aim at. NaN and infinities follow IEEE arithmetic: a NaN element, or a scale of
    0xFF, makes NaN of its whole row (of a) or column (of b).
    """
    (units_a, norm_a), (units_b, norm_b) = _loose(a), _loose(b)
    if norm_a * norm_b > LOOSE:
        units_a, units_b = _sharp(a), _sharp(b)
    # Digits multiply the copies of a chunk, and their products the copies of a tile.
    digits = 1 + max(0, int(np.ceil(np.log2(max(norm_a, norm_b, 1.0) / TOP) / DIGIT))) if norm_a * norm_b > LOOSE else 1
    tile = a.rows if digits == 1 and a.rows * b.rows * 8 <= work // 4 else 0
    if not tile:
        tile = max(64, work // 2 // max(1, b.rows * 8 * (8 * digits - 6 if digits > 1 else 2)))
    chunk = work // 2 // (8 * (min(tile, a.rows) + b.rows + 1) * (digits + 1 if digits > 1 else 1))
    chunk = max(8 * BLOCK, chunk // BLOCK * BLOCK)
    for r in range(0, a.rows, tile):
        rows = slice(r, r + tile)
        side = a.take(r, r + tile)
        sums = (_Sum(value[rows]), _Sum(magnitude[rows]))
        special = _Specials((side.rows, b.rows), np.zeros(side.rows, np.bool_), np.zeros(b.rows, np.bool_))
        for start in range(0, a.length, chunk):
            x = side.part(start, start + chunk).values(units_a[rows])
            y = b.part(start, start + chunk).values(units_b)
            bad = [~np.isfinite(_norms(z)) for z in (x, y)]
            if bad[0].any() or bad[1].any():
                special.strip(x, y, *bad)
            _accumulate(sums, x, y)
        for one in sums:
            one.round(units_a[rows], units_b)
        special.apply(value[rows], magnitude[rows])
