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

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from .formats import BLOCK, SCALE_BIAS, SCALE_NAN, decode_table

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]
Mask = NDArray[np.bool_]

EXACT = 2.0**53  # float64 holds every integer up to here
DIGIT = 21  # bits of a digit; 2 * 21 + 11 = 53
DIGIT_LENGTH = 2048  # products that two such digits may be summed over: 2^11
TOP = 2.0**26.5  # row norm that a top digit may have: the square root of EXACT, and 2^21 sqrt(2048)
STRASSEN = 512  # least size of a product that is worth cutting up
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

    def values(self) -> F64:
        """The elements, float64 [rows, length], exact; NaN where the element or its scale (0xFF) is."""
        out = np.empty(self.codes.shape)
        self.load(np.zeros(self.rows, np.int64), out)
        return out

    def load(self, unit: I64, out: F64) -> F64:
        """Put the elements in multiples of 2^unit[row] into `out`; give back _squares of it."""
        pairs = _pair_table(self.format)
        codes = self.codes.view(np.uint16)
        exponents = self.scales.astype(np.int64) - SCALE_BIAS - unit[:, None]
        factors = np.where(self.scales == SCALE_NAN, np.nan, np.ldexp(1.0, exponents))[:, :, None]
        squares = np.empty((self.rows, 2))

        def some(rows: slice) -> None:
            piece = out[rows]
            np.take(pairs, codes[rows], out=piece.view(np.complex128), mode="clip")
            blocks = piece.reshape(len(piece), -1, BLOCK)
            np.multiply(blocks, factors[rows], out=blocks)
            squares[rows] = _squares(piece)

        _each(out, some)
        return squares


def _each(x: F64, work: Callable[[slice], object]) -> None:
    """work(slice) for a few rows of x at a time, so that they stay in the cache, on several threads where it pays.

    NumPy lets go of the interpreter lock inside; every row is computed by itself, so threads change no result.
    """
    rows, length = x.shape
    step = max(1, _CACHE // max(1, 8 * length))
    slices = [slice(r, min(r + step, rows)) for r in range(0, rows, step)]
    if x.size < _THREADED or _threads() == 1:
        for one in slices:
            work(one)
        return
    with ThreadPoolExecutor(_threads()) as pool:
        for _ in pool.map(work, slices):
            pass


def _threads() -> int:
    """As many as BLAS would use: the element-wise passes must not become the slow part of a wide machine."""
    asked = os.environ.get("OPENBLAS_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS") or ""
    return int(asked) if asked.isdecimal() and int(asked) > 0 else os.cpu_count() or 1


_CACHE = 1 << 19  # bytes
_THREADED = 1 << 20  # elements; starting threads takes a tenth of a millisecond


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
    real = op.scales != SCALE_NAN
    least = op.scales.min(axis=1, initial=SCALE_NAN)
    table = decode_table(op.format)
    biggest = float(table[np.isfinite(table)].max())
    blocks = np.where(real, _FOUR[np.where(real, op.scales - least[:, None], 0)], 0.0).sum(axis=1)
    norm = float(np.sqrt(blocks.max(initial=0.0) * BLOCK)) * float(np.ldexp(biggest, -_low(op.format)))
    return least.astype(np.int64) - SCALE_BIAS + _low(op.format), norm


_FOUR = 4.0 ** np.arange(256)


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


class Pool:
    """Scratch arrays that are kept from one use to the next: fresh ones would cost a page fault every 4 KiB."""

    def __init__(self) -> None:
        self._flat: dict[str, F64] = {}

    def get(self, name: str, *shape: int) -> F64:
        """A float64 array of `shape` and unknown contents; the same memory for the same name."""
        size = int(np.prod(shape))
        if name not in self._flat or self._flat[name].size < size:
            self._flat[name] = np.empty(size)
        return self._flat[name][:size].reshape(shape)


@dataclass(frozen=True)
class _Integers:
    """Float64 integers [rows, length], with limits on the Euclidean norms of its rows and of their two halves."""

    x: F64
    norm: float
    half: float

    @staticmethod
    def measured(x: F64, squares: F64 | None = None) -> _Integers:
        """squares: _squares(x), where they are known."""
        if squares is None:
            squares = _squares(x)
        slack = 1 + 1e-6  # the squares are rounded
        norm = float(np.sqrt(squares.sum(axis=1).max(initial=0.0)))
        return _Integers(x, norm * slack, float(np.sqrt(squares.max(initial=0.0))) * slack)


def _squares(x: F64) -> F64:
    """Sums of squares of the halves of each row, [rows, 2]: by BLAS's dot product, three times as fast as einsum."""
    middle = x.shape[1] // 2
    halves = (x[:, :middle], x[:, middle:])
    return np.concatenate([np.matmul(h[:, None, :], h[:, :, None])[:, 0] for h in halves], axis=1)


def _multiply(a: _Integers, b: _Integers, out: F64, pool: Pool) -> None:
    """out = a b^T, exactly; AssertionError where the norms do not prove it.

    Large products with bits to spare go by one level of Strassen's algorithm in Winograd's form: seven products of
    half the size and fifteen additions. In units of a.half * b.half the results are at most 2; of what lies on the
    way the sum P1 + P6 is largest: P6 has factors of three blocks each, so 1 + 9.
    """
    if not a.norm * b.norm <= EXACT:
        raise AssertionError(f"row norms of {a.norm} and {b.norm} do not make an exact product")
    (m, length), n = a.x.shape, len(b.x)
    if min(m, n, length) < STRASSEN or m % 2 or n % 2 or length % 2 or not 10 * a.half * b.half <= EXACT:
        np.matmul(a.x, b.x.T, out=out)
        return
    i, j, h = m // 2, n // 2, length // 2
    a11, a12, a21, a22 = a.x[:i, :h], a.x[:i, h:], a.x[i:, :h], a.x[i:, h:]
    b11, b12, b21, b22 = b.x[:j, :h], b.x[j:, :h], b.x[:j, h:], b.x[j:, h:]  # blocks of b^T, each transposed
    c11, c12, c21, c22 = out[:i, :j], out[:i, j:], out[i:, :j], out[i:, j:]
    s, t, p = pool.get("s", i, h), pool.get("t", j, h), pool.get("p", i, j)
    _sum(a11, -1, a21, s)
    _sum(b22, -1, b12, t)
    np.matmul(s, t.T, out=c21)
    _sum(a21, 1, a22, s)
    _sum(b12, -1, b11, t)
    np.matmul(s, t.T, out=c22)
    _sum(s, -1, a11, s)
    _sum(b22, -1, t, t)
    np.matmul(s, t.T, out=c12)
    np.matmul(a11, b11.T, out=c11)
    _sum(c12, 1, c11, c12)
    _sum(c21, 1, c12, c21)
    _sum(c12, 1, c22, c12)
    _sum(c22, 1, c21, c22)
    _sum(a12, -1, s, s)
    np.matmul(s, b22.T, out=p)
    _sum(c12, 1, p, c12)
    _sum(t, -1, b21, t)
    np.matmul(a22, t.T, out=p)
    _sum(c21, -1, p, c21)
    np.matmul(a12, b21.T, out=p)
    _sum(c11, 1, p, c11)


def _sum(x: F64, sign: int, y: F64, out: F64) -> None:
    """out = x + sign * y, element by element."""
    operation = np.add if sign > 0 else np.subtract
    _each(out, lambda rows: operation(x[rows], y[rows], out=out[rows]))


@dataclass
class _Total:
    """sum over k of 2^(DIGIT k) (hot[k] + cold[k]), one integer for every element of a tile.

    hot: float64, exact while the bounds of what went in add up to EXACT at most; cold: int64, for the rest.
    `tile` is the memory of hot[0] and of the rounded result.
    """

    tile: F64
    pool: Pool
    hot: dict[int, F64] = field(default_factory=dict)
    bound: dict[int, float] = field(default_factory=dict)
    cold: dict[int, I64] = field(default_factory=dict)
    flushes: int = 0
    limit = EXACT

    def add(self, k: int, a: _Integers, b: _Integers) -> None:
        """Add 2^(DIGIT k) a b^T."""
        bound = a.norm * b.norm
        if k not in self.hot:
            self.hot[k] = self.tile if k == 0 else np.empty_like(self.tile)
            _multiply(a, b, self.hot[k], self.pool)
            self.bound[k] = bound
            return
        if self.bound[k] + bound > self.limit:
            self._flush(k)
        result = self.pool.get("result", *self.tile.shape)
        _multiply(a, b, result, self.pool)
        _sum(self.hot[k], 1, result, self.hot[k])
        self.bound[k] += bound

    def _flush(self, k: int) -> None:
        if k in self.cold:
            np.add(self.cold[k], self.hot[k], out=self.cold[k], casting="unsafe", dtype=np.int64)
        else:
            self.cold[k] = self.hot[k].astype(np.int64)
        self.hot[k].fill(0.0)
        self.bound[k] = 0.0
        self.flushes += 1
        if self.flushes % FLUSHES == 0:
            limbs = [self.cold.get(i, np.zeros(self.tile.shape, np.int64)) for i in range(max(self.cold) + 1)]
            self.cold = dict(enumerate(_carried(limbs, int(np.abs(limbs[-1]).max() > EXACT))))

    def round(self, rows: I64, columns: I64) -> None:
        """Leave the sum times 2^(rows[:, None] + columns) in `tile`, rounded once to float64."""
        if not self.hot:
            self.tile.fill(0.0)
            return
        step = max(1, (1 << 16) // max(1, self.tile.shape[1]))
        for r in range(0, len(self.tile), step):
            part = slice(r, r + step)
            tile = self.tile[part]
            if set(self.hot) == {0} and not self.cold:
                np.multiply(tile, np.ldexp(1.0, rows[part, None]), out=tile)
                np.multiply(tile, np.ldexp(1.0, columns), out=tile)
                np.add(tile, 0.0, out=tile)  # -0 becomes +0
                continue
            limbs = [np.zeros(tile.shape, np.int64) for _ in range(1 + max((*self.hot, *self.cold)))]
            for terms in (self.hot, self.cold):
                for k, term in terms.items():
                    limbs[k] += term[part].astype(np.int64)
            tile[:] = _rounded(limbs) * np.ldexp(1.0, rows[part, None]) * np.ldexp(1.0, columns)


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


def _rounded(limbs: list[I64]) -> F64:
    """float64 nearest (ties to even) to sum_k 2^(DIGIT k) limbs[k]; every |limb| below 2^62."""
    if len(limbs) <= 3:
        low = _carried([*limbs, *(np.zeros_like(limbs[0]) for _ in range(3 - len(limbs)))], 0)
        if max(int(low[2].max()), -int(low[2].min())) <= EXACT:  # both parts are exact in float64: one rounding
            return np.asarray(low[2] * 2.0 ** (2 * DIGIT) + ((low[1] << DIGIT) | low[0]).astype(np.float64))
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
    low_part = (((window[2] << DIGIT) | window[3]) << 1) | lost
    total = high * 2.0 ** (2 * DIGIT + 1) + low_part.astype(np.float64)  # the one rounding
    total = np.ldexp(total, DIGIT * (top[0] - 3) - 1)
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


def _digits(a: _Integers) -> list[_Integers]:
    """a as digits of DIGIT bits from the lowest up, towards zero; the last one has the rest. Consumes a.

    The digits of |a| are the absolute values of a's.
    """
    x = a.x
    more = 0 if a.norm <= TOP else int(np.ceil(np.log2(a.norm / TOP) / DIGIT))
    upper = [np.empty_like(x) for _ in range(more)]

    def some(rows: slice) -> None:
        for k in range(more, 0, -1):
            digit = x[rows] * 2.0 ** (-DIGIT * k)
            np.trunc(digit, out=upper[k - 1][rows])
            x[rows] -= np.multiply(upper[k - 1][rows], 2.0 ** (DIGIT * k), out=digit)

    _each(x, some)
    return [_Integers.measured(d) for d in (x, *upper)]


def _absolute(x: F64) -> None:
    _each(x, lambda rows: np.abs(x[rows], out=x[rows]))


def _accumulate(sums: tuple[_Total, _Total], a: _Integers, b: _Integers) -> None:
    """Add a b^T to the first sum and |a||b|^T to the second. Consumes a and b."""
    bound = a.norm * b.norm
    if bound > EXACT and a.x.shape[1] > DIGIT_LENGTH:
        for start in range(0, a.x.shape[1], DIGIT_LENGTH):
            parts = (side.x[:, start : start + DIGIT_LENGTH] for side in (a, b))
            _accumulate(sums, *(_Integers.measured(x) for x in parts))
        return
    left, right = ([a], [b]) if bound <= EXACT else (_digits(a), _digits(b))
    for absolute, total in zip((False, True), sums, strict=True):
        for side in (*left, *right) if absolute else ():
            _absolute(side.x)
        for i, x in enumerate(left):
            for j, y in enumerate(right):
                if x.norm * y.norm > 0:
                    total.add(i + j, x, y)


def product(a: Operand, b: Operand, value: F64, magnitude: F64, work: int, pool: Pool) -> None:
    """Write A B^T and |A||B|^T, each rounded once to float64, into `value` and `magnitude` [a.rows, b.rows].

    work: bytes of scratch memory to aim at; pool: where they are kept for the next product, which saves the page
    faults. NaN and infinities follow IEEE arithmetic: a NaN element, or a scale of
    0xFF, makes NaN of its whole row (of a) or column (of b).
    """
    (units_a, norm_a), (units_b, norm_b) = _loose(a), _loose(b)
    wide = norm_a * norm_b > LOOSE
    if wide:
        units_a, units_b = _sharp(a), _sharp(b)
    tile, chunk = _plan(a, b, 1 + int(np.log2(max(norm_a, norm_b))) // DIGIT if wide else 1, work)
    for r in range(0, a.rows, tile):
        rows = slice(r, r + tile)
        side = a.take(r, r + tile)
        sums = (_Total(value[rows], pool), _Total(magnitude[rows], pool))
        special = _Specials((side.rows, b.rows), np.zeros(side.rows, np.bool_), np.zeros(b.rows, np.bool_))
        for start in range(0, a.length, chunk):
            parts = []
            for name, op, unit in (("x", side, units_a[rows]), ("y", b, units_b)):
                part = op.part(start, start + chunk)
                x = pool.get(name, part.rows, part.length)
                parts.append((x, part.load(unit, x)))
            bad = [np.asarray(~np.isfinite(squares).all(axis=1)) for _, squares in parts]
            if bad[0].any() or bad[1].any():
                special.strip(parts[0][0], parts[1][0], bad[0], bad[1])
                for (x, squares), which in zip(parts, bad, strict=True):
                    squares[which] = _squares(x[which])
            _accumulate(sums, _Integers.measured(*parts[0]), _Integers.measured(*parts[1]))
        for one in sums:
            one.round(units_a[rows], units_b)
        special.apply(value[rows], magnitude[rows])


def _plan(a: Operand, b: Operand, digits: int, work: int) -> tuple[int, int]:
    """(rows of a tile, length of a chunk) for which the scratch arrays take about `work` bytes."""
    # Of a tile: a product and its Strassen part, or what two sums of 2 digits - 1 terms hold, hot and cold.
    width = 8 * b.rows * (2 if digits == 1 else 8 * digits - 4)
    tile = a.rows if width * a.rows <= work // 3 else min(a.rows, max(64, work // 2 // width))
    # Of a chunk: the elements and a quarter for Strassen's sums, or the elements, their digits and a product.
    depth = 8 * (tile + b.rows) * (1.25 if digits == 1 else digits + 1)
    chunk = int(max(8 * BLOCK, (work - width * tile) / depth // BLOCK * BLOCK))
    pieces = max(1, -(-a.length // chunk))  # of about the same length
    return tile, -(-a.length // (pieces * BLOCK)) * BLOCK or BLOCK
