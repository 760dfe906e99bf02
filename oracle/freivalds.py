"""Judge a large output without its exact answer: compare C r with A (B^T r) for random sign vectors r.

Freivalds (1977) needs O(n^2) work where the product needs O(n^3). What a random combination hides, and what not:

- Exact data (`exact=True`: every exact result is representable in the output type). Each row of C is summed whole, in
  certified integer arithmetic, against `vectors` sign vectors. A row with any wrong element gives a wrong sum with
  probability 1/2 or more for each vector, so it is missed with probability 2^-vectors at most.
- Rounded data. A sum may differ by the sum T of its elements' tolerances, half an ulp of the output plus
  c * magnitude from the accumulator's row, so sums run over COLUMNS columns only. A sum in which some element is wrong
  by more than 2 T leaves its tolerance with probability 1/2 or more for each vector, whatever its other elements hold;
  for certain if that element is its only wrong one. `resolution` says how large 2 T is for the data at hand.

A suspicious sum proves nothing yet: its elements are computed exactly and held against their intervals, so a legitimate
output is never rejected by chance, and a rejection names elements. Rows and columns with NaN or infinite operands, and
SAMPLED rows of every group, are computed exactly in any case.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import exact as exact_sums
from .bound import UNDERFLOW, interval, output_dtype, outside
from .bound import accumulator as accumulator_row
from .exact import EXACT, F64, Mask, Operand
from .formats import BLOCK, FORMATS, SCALE_NAN
from .gemm import problem
from .groups import Offsets, spans
from .quantize import MXArray

COLUMNS = 8  # in a sum of a rounded output
SAMPLED = 8  # rows of a group that are always computed exactly
VECTORS = {False: 4, True: 32}
SHOWN = 20
CHUNK = 1 << 28  # bytes of decoded operands at a time


@dataclass(frozen=True)
class FreivaldsResult:
    """ok: nothing wrong was found. detail: one line, or a line for each wrong element, SHOWN at most.

    first_bad: index of the first of them in the output. detection_probability: of a sum with an element wrong by more
    than `resolution` says (by anything, for exact data). resolution: median over all sums of 2 T, as a fraction of
    the root mean square of the output; 0 for exact data.
    """

    ok: bool
    detail: str
    first_bad: tuple[int, ...] | None
    detection_probability: float
    resolution: float


@dataclass(frozen=True)
class _Group:
    """One expert's product: out is its part of the output [a.rows, b.rows], `index` maps into the whole output."""

    expert: int
    a: Operand
    b: Operand
    out: NDArray[Any]
    first_row: int | None  # of the whole output, where experts share its rows
    accumulator: str

    def index(self, row: int, column: int) -> tuple[int, ...]:
        return (self.expert, row, column) if self.first_row is None else (self.first_row + row, column)


def freivalds(
    op: str,
    a: MXArray,
    b: MXArray,
    offsets: Offsets,
    out: NDArray[Any],
    *,
    accumulator: str,
    seed: int,
    vectors: int | None = None,
    exact: bool = False,
    threads: int = 1,
) -> FreivaldsResult:
    """Hold `out` against operands a and b of `op` ("forward", "dgrad" or "wgrad", as in gemm) by random sums.

    out: bfloat16, float16 or float32, of the op's output shape; rows past the last offset are not looked at, an empty
    group's wgrad must be +0. accumulator: its row. exact: every exact result is representable in out's type (then
    the accumulator's row must not matter; ValueError if 53 bits do not hold the sums). seed: of the signs; use another
    one than the data's. vectors: sign vectors for each sum, 4, or 32 for exact data, unless given.
    threads: groups judged at a time, each with scratch memory of its own (1.1 GiB for 8,096 tokens and 4096 x 7168
    outputs). No result depends on it: every group draws its own signs.
    """
    checked = problem(op, a, b, offsets)
    output_dtype(out.dtype)
    if out.shape != checked.shape:
        raise ValueError(f"output has shape {out.shape}; expected {checked.shape}")
    accumulator_row(accumulator)
    count = VECTORS[exact] if vectors is None else vectors
    if count < 1:
        raise ValueError(f"vectors is {count}; expected 1 or more")
    places = spans(checked.offsets)

    def judge(expert: int) -> tuple[list[tuple[tuple[int, ...], str]], float]:
        """(index, words) of wrong elements of one expert, and its resolution."""
        start, stop = places[expert]
        if stop == start:
            empty = out[expert].view(f"u{out.itemsize}") if op == "wgrad" else np.zeros((0, 0))
            stray = [(expert, int(row), int(column)) for row, column in np.argwhere(empty != 0)[:SHOWN]]
            return [(index, f"element {index} of an empty group is not +0") for index in stray], 0.0
        where, left, right = checked.group(expert)
        row_name = "exact" if exact else accumulator
        group = _Group(expert, left, right, out[where], None if op == "wgrad" else start, row_name)
        wrong, resolution = _judge(group, np.random.default_rng([seed, expert]), count, exact)
        named = [(group.index(row, column), words) for row, column, words in wrong]
        return [(index, f"expert {expert}, element {index}: {words}") for index, words in named], resolution

    bad: list[str] = []
    first: tuple[int, ...] | None = None
    resolutions: list[float] = []
    with ThreadPoolExecutor(threads) as pool:
        for wrong, resolution in pool.map(judge, range(len(places))):
            resolutions.append(resolution)
            for index, words in wrong[: SHOWN - len(bad)]:
                first = first or index
                bad.append(words)
            if len(bad) >= SHOWN:
                pool.shutdown(cancel_futures=True)
                break
    resolution = max(resolutions, default=0.0)
    probability = 1 - 2.0**-count
    detail = "\n".join(bad) or (
        f"no wrong sum; {count} vectors, detection probability {probability:.10g} for a wrong element"
        + ("" if exact else f" whose error is above {resolution:.3g} of the output's root mean square")
    )
    return FreivaldsResult(not bad, detail, first, probability, resolution)


Wrong = list[tuple[int, int, str]]


def _judge(group: _Group, rng: np.random.Generator, vectors: int, exact: bool) -> tuple[Wrong, float]:
    """Wrong elements as (row, column, words), and the group's resolution."""
    a, b = group.a, group.b
    rows, columns = _special(a), _special(b)
    step = max(1, a.rows // SAMPLED)
    sample = np.arange(int(rng.integers(step)), a.rows, step)
    wrong = _check(group, np.union1d(np.flatnonzero(rows), sample), np.arange(b.rows))
    wrong += _check(group, np.arange(a.rows), np.flatnonzero(columns))
    width = b.rows if exact else COLUMNS
    blocks = -(-b.rows // width)
    signs = rng.choice([-1.0, 1.0], (blocks, vectors, width))
    suspicious, resolution = _sums(group, signs, rows, columns, exact)
    wrong += _examine(group, suspicious, width, len(wrong))
    return sorted(set(wrong)), resolution


def _special(op: Operand) -> Mask:
    """Rows that hold a NaN or an infinity, [rows]."""
    row = FORMATS[op.format]
    found = (op.scales == SCALE_NAN).any(axis=1)
    step = max(1, (1 << 22) // max(1, op.length))
    for r in range(0, op.rows, step):
        for code in (*row.nan_codes, *row.inf_codes):
            found[r : r + step] |= (op.codes[r : r + step] == code).any(axis=1)
    return np.asarray(found)


def _check(group: _Group, rows: NDArray[np.intp], columns: NDArray[np.intp]) -> Wrong:
    """The elements of rows x columns that are outside their exact interval."""
    if not (rows.size and columns.size):
        return []
    a, b = (
        op if which.size == op.rows else Operand(op.codes[which], op.scales[which], op.format)
        for op, which in ((group.a, rows), (group.b, columns))
    )
    value, magnitude = np.empty((rows.size, columns.size)), np.empty((rows.size, columns.size))
    exact_sums.product(a, b, value, magnitude, CHUNK, exact_sums.Pool())
    out = group.out[np.ix_(rows, columns)]
    lo, hi = interval(value, magnitude, np.full((1, 1), a.length), group.accumulator, out.dtype)
    return [
        (
            int(rows[i]),
            int(columns[j]),
            f"{float(out[i, j]):.9g}, expected {float(lo[i, j]):.9g} to {float(hi[i, j]):.9g} "
            f"(exact {float(value[i, j]):.17g})",
        )
        for i, j in np.argwhere(outside(out, lo, hi))[:SHOWN]
    ]


def _sums(group: _Group, signs: F64, rows: Mask, columns: Mask, exact: bool) -> tuple[Mask, float]:
    """(which sums [rows, blocks] are suspicious, the resolution). signs: [blocks, vectors, width].

    Special rows are never suspicious, special columns are left out: both have been computed exactly.
    """
    a, b = group.a, group.b
    blocks, vectors, width = signs.shape
    found, magnitude = np.zeros((a.rows, blocks * vectors)), np.zeros((a.rows, blocks))
    norms = [_Norms(a), _Norms(b)] if exact else []
    chunk = max(BLOCK, CHUNK // (8 * (a.rows + blocks * (vectors + 1) + width)) // BLOCK * BLOCK)
    zeros = np.zeros(max(a.rows, b.rows), np.int64)
    for start in range(0, a.length, chunk):
        part = b.part(start, start + chunk)
        y = np.empty((blocks, vectors, part.length))
        total = np.empty((blocks, part.length))
        step = max(1, (1 << 22) // (8 * width * part.length))
        for block in range(0, blocks, step):
            some = part.take(block * width, (block + step) * width)
            x = np.zeros((min(step, blocks - block) * width, part.length))
            some.load(zeros[: some.rows], x[: some.rows])
            x[: some.rows][columns[block * width : block * width + some.rows]] = 0.0
            stacked = x.reshape(-1, width, part.length)
            np.matmul(signs[block : block + step], stacked, out=y[block : block + step])
            np.abs(x, out=x)
            stacked.sum(axis=1, out=total[block : block + step])
        x = np.empty((a.rows, part.length))
        a.part(start, start + chunk).load(zeros[: a.rows], x)
        x[rows] = 0.0
        flat = y.reshape(blocks * vectors, part.length)
        found += x @ flat.T
        np.abs(x, out=x)
        magnitude += x @ total.T
        for norm, side in zip(norms, (x, flat), strict=False):
            norm.add(side)
    held = np.zeros((a.rows, blocks * width))
    with np.errstate(invalid="ignore"):
        held[:, : b.rows] = group.out
    held[:, : b.rows][:, columns] = 0.0
    held = held.reshape(a.rows, blocks, width)
    with np.errstate(invalid="ignore"):  # infinities and NaNs in the output make their sums suspicious
        compared = np.einsum("rbw,bvw->rbv", held, signs, optimize=False)
        error = np.abs(compared - found.reshape(a.rows, blocks, vectors)).max(axis=2)
    if exact:
        units, unit = norms[0].units, int(norms[1].units.min(initial=_FAR))
        if not norms[0].largest(units) * norms[1].largest(unit) <= EXACT:
            raise ValueError("exact=True with sums that 53 bits do not hold; expected exact-sum data")
        # In these units a legitimate output is a matrix of integers; what is not one is wrong by itself.
        scaled = np.ldexp(held[:, 0], -(units[:, None] + unit))
        good = (error[:, 0] == 0) & np.all((scaled == np.rint(scaled)) & (np.abs(scaled) * width <= EXACT), axis=1)
        return np.asarray(~(good | rows)[:, None]), 0.0
    row = accumulator_row(group.accumulator)
    c = row.coefficient(np.array(a.length)) + (a.length + width) * 2.0**-52  # the sums here are rounded too
    tolerance = c * magnitude + np.where(magnitude > 0, width * a.length * UNDERFLOW, 0.0)
    tolerance += _half_ulps(held, group.out.dtype).sum(axis=2)
    good = error <= tolerance
    rms = float(np.sqrt(np.mean(np.square(held[np.isfinite(held)])))) if np.isfinite(held).any() else 0.0
    kept = tolerance[~rows]
    middle = float(np.median(kept[np.isfinite(kept)])) if np.isfinite(kept).any() else 0.0
    return np.asarray(~(good | rows[:, None])), 2 * middle / rms if rms else 0.0


_FAR = 1 << 10  # above every exponent


class _Norms:
    """Norms of rows over the whole contraction, added up chunk by chunk, and the units of the operand's rows."""

    def __init__(self, op: Operand) -> None:
        self.units = exact_sums._sharp(op)
        self._squares: F64 | float = 0.0

    def add(self, x: F64) -> None:
        self._squares = self._squares + np.einsum("ij,ij->i", x, x)

    def largest(self, units: NDArray[np.int64] | int) -> float:
        """In multiples of 2^units, a little rounded up."""
        norms = np.ldexp(np.sqrt(self._squares), np.negative(units))
        return float(np.max(norms, initial=0.0)) * (1 + 1e-6)


def _half_ulps(x: F64, dtype: np.dtype[Any]) -> F64:
    """Half the distance from each value of `dtype` to the next larger one in magnitude."""
    bits, least = _LAYOUT[dtype.name]
    exponents = np.frexp(np.where(np.isfinite(x), x, 0.0))[1] - 1
    exponents = np.where(x == 0, least, np.maximum(exponents, least))
    return np.asarray(np.ldexp(0.5, exponents - (bits - 1)))


# Significand bits and smallest normal exponent.
_LAYOUT = {"bfloat16": (8, -126), "float16": (11, -14), "float32": (24, -126)}


def _examine(group: _Group, suspicious: Mask, width: int, already: int) -> Wrong:
    """The wrong elements of suspicious sums: of a few of them first, then, if those are all in order, of the rest."""
    places = np.argwhere(suspicious)
    wrong: Wrong = []
    for row, block in places[: 2 * SHOWN]:
        columns = np.arange(block * width, min((block + 1) * width, group.b.rows))
        wrong += _check(group, np.array([row]), columns)
        if already + len(wrong) >= SHOWN:
            return wrong
    if wrong or already or len(places) <= 2 * SHOWN:
        return wrong
    return _check(group, np.unique(places[:, 0]), np.arange(group.b.rows))
