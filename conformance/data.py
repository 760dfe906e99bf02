"""Cases and their bytes: shapes, routings, data families, and the exact answer of each.

Everything is a function of the case's seed through a counter-based generator and integer arithmetic, so a case has the
same bytes on every machine and with every NumPy.

Two families are exact for every legitimate kernel: each sum of products is a whole number of units in which sum |a||b|
is at most 2^13, so no order of addition, no split, and no accumulator of 13 bits or more, truncating or not, rounds
anything (13 bits is what an H100's FP8 tensor core keeps; the numeric contract's section 6). What is left is the single
rounding to the output type, which has one right answer.

exact-sum     integers of -8..8, block scales 2^-1, 1 and 2.
signature     every scale has an exponent of its own among its neighbours. A row's scale is 2^(u[row] + 16 t[block]), a
              column's 2^(v[expert, column] - 16 t[block] + d[expert, block]): the two spreads of t cancel in a product
              and leave the sums exact, yet whoever reads either scale anywhere else is wrong by 2^(at least 1), and
              whoever reads both from the same wrong place is wrong by the difference in d.
all-codes     one product an output, and every finite element code on either side, scales spread over 2^+-103.
all-scales    every scale byte 0..254 on either side, with a partner that brings the product back near 1.
special       exact-sum with NaN, infinity, and the scale bytes 0xFF and 0xFE put among the tokens.
bias          a zero operand, so that an output is its bias, 100 * expert + column.
bias-sum      exact-sum and a bias in half units, added before the one rounding.
subnormal     exact-sum so far down that outputs are subnormal numbers of the output type.
far-scales    exact-sum between the format's smallest numbers, or its largest, under scales that bring them back: the
              product of two scales is no float32, above or below, where operands and sums are; and sums between the
              largest bfloat16 and the largest float32.
normal, heavy-tailed, cancellation, captured, recorded: rounded on the way, held to the interval.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mxgate import oracle
from mxgate.conformance.case import Case, captured
from mxgate.conformance.launch import Operands
from mxgate.conformance.poison import COPIED, POISONS, STALE
from mxgate.conformance.recorded import planes as recorded
from mxgate.kernels.build import OPS
from mxgate.oracle import Answer
from mxgate.oracle.formats import BLOCK, E8M0, FORMATS, SCALE_BIAS, SCALE_NAN, U8, decode_table, random_bits
from mxgate.oracle.quantize import MXArray, quantize

I64 = NDArray[np.int64]
F32 = NDArray[np.float32]
Planes = tuple[U8, U8]  # element codes [rows, length] and scale codes [rows, length / 32]

# The largest sum |a||b| of an exact family, in units of its smallest product; of exact-sum cases that are too large for
# an exact answer the one up to which bfloat16 holds every integer, as the Freivalds check is sharpest then.
BUDGET, LARGE_BUDGET = 1 << 13, 1 << 8
# Multiply-adds above which there is no Answer and the Freivalds check judges.
LARGE = 1 << 34


# ---------------------------------------------------------------------------------------------------------------------
# Randomness


def _key(seed: int, stream: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{stream}".encode()).digest()[:8], "little")


def _words(seed: int, stream: str, start: int, count: int) -> NDArray[np.uint64]:
    return random_bits(_key(seed, stream), np.arange(start, start + count, dtype=np.uint64))


def _bytes(seed: int, stream: str, rows: slice, length: int) -> U8:
    """Random bytes of rows [start, stop) of a plane of `length` (a multiple of 8) columns, however it is cut up."""
    words = _words(seed, stream, rows.start * length // 8, (rows.stop - rows.start) * length // 8)
    plane: U8 = words.astype("<u8", copy=False).view(np.uint8).reshape(rows.stop - rows.start, length)
    return plane


def _small(seed: int, stream: str, count: int) -> I64:
    """`count` random integers of 0 .. 2^31 - 1."""
    small: I64 = (_words(seed, stream, 0, count) >> np.uint64(33)).astype(np.int64)
    return small


@lru_cache(maxsize=1)
def _normal_table() -> F32:
    """65,536 nearly normal float32 numbers: each twelve 16-bit uniforms added up, in integers."""
    parts = _words(0, "normal", 0, 3 << 16).astype("<u8", copy=False).view("<u2").reshape(1 << 16, 12)
    total = parts.sum(axis=1, dtype=np.int64) - 12 * 32768 + 6
    return np.asarray(total.astype(np.float32) * np.float32(2.0**-16))


def _normal(seed: int, stream: str, rows: slice, length: int) -> F32:
    """Normal float32 numbers (mean 0, variance 1) of rows [start, stop) of a plane of `length` columns."""
    random = _bytes(seed, stream, slice(2 * rows.start, 2 * rows.stop), length).view("<u2")
    return np.asarray(_normal_table()[random.reshape(rows.stop - rows.start, length)])


def _cycle(seed: int, stream: str, count: int, modulus: int, step: int, low: int = 1) -> I64:
    """`count` integers of 0 .. modulus - 1 in runs that visit each value once, step apart.

    Neighbours always differ, by at least `low` if step and modulus - step do. Each run starts at random, or rows a
    multiple of the modulus apart would be all alike.
    """
    runs = -(-count // modulus)
    jumps = (_small(seed, stream, runs) % (modulus - 2 * low + 1) + low - step) % modulus
    index = np.arange(count)
    return np.asarray((index * step + np.cumsum(jumps)[index // modulus]) % modulus, np.int64)


# ---------------------------------------------------------------------------------------------------------------------
# A case as rows against rows


@dataclass(frozen=True)
class Frame:
    """The three GEMMs in one form: every output is row a of A against row b of B over one segment of the contraction.

    rows: of A and B. length: of the contraction, tokens only. segments: spans of the contraction that are summed by
    themselves (wgrad: the groups; else the whole). expert: of each row of A and B (wgrad: 0, the segment says it).
    budget: of sum |a||b| in units. lowest: what the subnormal family adds to the exponents of its products.
    """

    seed: int
    formats: tuple[str, str]
    rows: tuple[int, int]
    length: int
    segments: tuple[tuple[int, int], ...]
    expert: tuple[I64, I64]
    budget: int = BUDGET
    lowest: int = 0

    @property
    def blocks(self) -> int:
        return self.length // BLOCK

    @property
    def longest(self) -> int:
        return max((end - start for start, end in self.segments), default=0)


# Products in quarters of 2^this: with few terms below the smallest normal number, and none below the smallest number.
_LOWEST = MappingProxyType({"bfloat16": -131, "float32": -146, "float16": -22})


def frame(case: Case) -> Frame:
    """The frame of a GEMM case. Its planes hold tokens only; padding comes later."""
    ends = np.cumsum(case.sizes).tolist()
    if case.op == "wgrad":
        rows, length = (case.n, case.k), case.tokens
        segments = tuple(zip([0, *ends[:-1]], ends, strict=True))
        expert = (np.zeros(case.n, np.int64), np.zeros(case.k, np.int64))
    else:
        length, unit = (case.k, case.n) if case.op == "forward" else (case.n, case.k)
        rows, segments = (case.tokens, case.experts * unit), ((0, length),)
        expert = (np.repeat(np.arange(case.experts), case.sizes), np.repeat(np.arange(case.experts), unit))
    budget = LARGE_BUDGET if is_large(case) and case.family == "exact-sum" else BUDGET
    return Frame(case.seed, case.formats, rows, length, segments, expert, budget, _LOWEST[case.out_dtype])


def is_large(case: Case) -> bool:
    """Whether a GEMM case has no exact answer."""
    return case.op != "quantize" and case.n * case.k * case.tokens > LARGE


def _chunks(f: Frame, side: int) -> Iterator[slice]:
    """Row ranges of about four million elements: scratch memory stays small however large the case."""
    step = max(1, (1 << 22) // max(f.length, 1))
    for start in range(0, f.rows[side], step):
        yield slice(start, min(start + step, f.rows[side]))


def _empty(f: Frame, side: int) -> Planes:
    return np.zeros((f.rows[side], f.length), np.uint8), np.zeros((f.rows[side], f.blocks), np.uint8)


def codes_of(values: Any, format: str) -> U8:
    """The codes of values that the format holds exactly. ValueError otherwise."""
    table = decode_table(format)
    wanted = np.asarray(values, np.float64)
    codes = np.zeros(wanted.shape, np.uint8)
    for value in np.unique(wanted):
        found = np.flatnonzero(table == value)
        if not found.size:
            raise ValueError(f"{format} has no code for {value}")
        codes[wanted == value] = found[0]
    return codes


def finite_codes(format: str) -> U8:
    """Every code that is a finite number, ascending."""
    row = FORMATS[format]
    return np.array([c for c in range(1 << row.bits) if c not in row.nan_codes and c not in row.inf_codes], np.uint8)


# ---------------------------------------------------------------------------------------------------------------------
# Families: (frame, side) -> the planes of A (side 0) or B (side 1)


def _mean_square(f: Frame, weight: float) -> float:
    """Of an element, in units: what keeps the expected sum of squares times `weight` below the budget."""
    return 0.75 * f.budget / (max(f.longest, 1) * weight)


def _integers(f: Frame, side: int, weight: float) -> tuple[U8, U8]:
    """Two tables, random bytes to codes [2,256] and a code to its square [256], for integers of -m..m with m <= 8.

    m, and for long sums the share of zeros, keep the expected sum of squares times `weight` below the budget. The first
    row of codes has as many negative numbers as positive ones, of the second's one in eight is negative.
    """
    mean = _mean_square(f, weight)
    m = max((m for m in range(1, 9) if (m + 1) * (2 * m + 1) / 6 <= mean), default=1)
    filled = min(256, max(1, int(256 * mean))) if m == 1 else 256
    values = np.array([v for a in range(1, m + 1) for v in (a, -a)])
    chosen = np.zeros((2, 256))
    chosen[:, :filled] = values[np.arange(filled) % values.size]
    chosen[1, np.arange(256) // 2 % 4 != 3] = np.abs(chosen[1, np.arange(256) // 2 % 4 != 3])
    decoded = np.nan_to_num(decode_table(f.formats[side]), nan=0.0, posinf=0.0, neginf=0.0)
    return codes_of(chosen, f.formats[side]), np.minimum(decoded * decoded, 255).astype(np.uint8)


def _draw_integers(f: Frame, side: int, rows: slice, values: U8, weight: float) -> U8:
    """Codes of random integers for some rows. Every other row, at random, is mostly positive: where two of those meet
    the sum is as long as its bound allows, too long for the output, and is rounded.

    Where one element in 256 is still too many, whole blocks are left out.
    """
    leaning = _small(f.seed, f"leaning/{side}", f.rows[side])[rows] % 2 == 1
    random = _bytes(f.seed, f"elements/{side}", rows, f.length)
    codes: U8 = np.where(leaning[:, None], values[1][random], values[0][random])
    if (thin := int(1 / 256 / _mean_square(f, weight))) > 1:
        count = codes.shape[0] * f.blocks
        kept = _words(f.seed, f"kept/{side}", rows.start * f.blocks, count) % np.uint64(thin) == 0
        codes[~np.repeat(kept.reshape(-1, f.blocks), BLOCK, axis=1)] = 0
    return codes


def _within_budget(f: Frame, codes: U8, squares: U8, weights: I64) -> None:
    """Zero a row's last elements in a segment where its sum of squares times weights [rows, blocks] passes the budget.

    With it in both operands sum |a||b| is within it too (Cauchy-Schwarz): exact by construction, not by chance.
    """
    square = squares[codes]
    sums = square.reshape(*weights.shape, BLOCK).sum(axis=2, dtype=np.int64) * weights
    for start, end in f.segments:
        for row in np.flatnonzero(sums[:, start // BLOCK : end // BLOCK].sum(axis=1) > f.budget):
            each = square[row, start:end] * np.repeat(weights[row, start // BLOCK : end // BLOCK], BLOCK)
            codes[row, start:end][np.cumsum(each) > f.budget] = 0


def _exact_sum(f: Frame, side: int) -> Planes:
    codes, scales = _empty(f, side)
    # In half units a block's squares weigh 1, 4 or 16: 7 on average, more if the few blocks of a short sum are large.
    weight = 7 + 9 * BLOCK / max(f.longest, BLOCK)
    values, squares = _integers(f, side, weight)
    exponents = _small(f.seed, f"scales/{side}", scales.size).reshape(scales.shape) % 3
    scales[...] = SCALE_BIAS - 1 + exponents
    for rows in _chunks(f, side):
        codes[rows] = _draw_integers(f, side, rows, values, weight)
        _within_budget(f, codes[rows], squares, 4 ** exponents[rows])
    return codes, scales


@dataclass(frozen=True)
class Signature:
    """The exponents of the signature family (module docstring): u [rows of A], v [rows of B], t [blocks] and
    d [experts, blocks]."""

    u: I64
    v: I64
    t: I64
    d: I64


def signature(f: Frame) -> Signature:
    """u and v in 0..12, t in 0..6, d in 0..3: u + 16 t and v + d - 16 t tell their parts apart."""
    experts = int(f.expert[1].max(initial=0)) + 1
    u = _cycle(f.seed, "u", f.rows[0], 13, 1)
    # By 4 at least: what d adds differs by 3 at most where one expert's rows end and the next one's begin.
    v = _cycle(f.seed, "v", f.rows[1], 13, 5, low=4)
    t = _cycle(f.seed, "t", f.blocks, 7, 3)
    steps = _small(f.seed, "d", experts * f.blocks).reshape(experts, f.blocks) % 3 + 1
    return Signature(u, v, t, np.cumsum(steps, axis=1) % 4)


def _signature(f: Frame, side: int) -> Planes:
    codes, scales = _empty(f, side)
    s = signature(f)
    if side == 0:
        exponents = s.u[:, None] + 16 * s.t - 54
    else:
        exponents = s.v[:, None] - 16 * s.t + s.d[f.expert[1]] + 48
    scales[...] = SCALE_BIAS + exponents
    weight = 3.75 + 4.25 * BLOCK / max(f.longest, BLOCK)
    values, squares = _integers(f, side, weight)
    for rows in _chunks(f, side):
        codes[rows] = _draw_integers(f, side, rows, values, weight)
        _within_budget(f, codes[rows], squares, 2 ** s.d[f.expert[side][rows]])
    return codes, scales


def _all_codes(f: Frame, side: int) -> Planes:
    codes, scales = _empty(f, side)
    valid = finite_codes(f.formats[side])
    if f.blocks > 1:
        spread = np.round(np.linspace(-100, 100, f.blocks)).astype(np.int64)
    else:
        spread = np.zeros(f.blocks, np.int64)
    spread = spread[np.argsort(_small(f.seed, "spread", f.blocks), kind="stable")]
    jitter = _small(f.seed, f"scales/{side}", scales.size).reshape(scales.shape) % 7 - 3
    scales[...] = SCALE_BIAS + (spread if side == 0 else -spread) + jitter
    if side == 1:
        turn = _small(f.seed, "turn", f.length) % valid.size
        for rows in _chunks(f, side):
            codes[rows] = valid[(np.arange(rows.start, rows.stop)[:, None] + turn) % valid.size]
        return codes, scales
    for i, (start, end) in enumerate(f.segments):
        if start == end:
            continue
        row = np.arange(f.rows[0])
        place = start + _small(f.seed, f"place/{i}", f.rows[0]) % (end - start)
        codes[row, place] = valid[(i * f.rows[0] + row) % valid.size]
    return codes, scales


def _all_scales(f: Frame, side: int) -> Planes:
    if f.blocks > 18:
        raise ValueError(f"all-scales has {f.blocks} blocks; expected at most 18, or its sums are not exact")
    codes, scales = _empty(f, side)
    # 17 steps of 15 with rows 7 to either side: 255 bytes, each once.
    base = 7 + 15 * (5 * np.arange(f.blocks) % 17)
    row = _cycle(f.seed, f"rows/{side}", f.rows[side], 15, 4) - 7
    scales[...] = (base if side == 0 else E8M0.max_code - base) + row[:, None]
    table = decode_table(f.formats[side])
    unit = np.flatnonzero((np.abs(table) >= 1) & (np.abs(table) < 2)).astype(np.uint8)
    for rows in _chunks(f, side):
        codes[rows] = unit[_bytes(f.seed, f"elements/{side}", rows, f.length) % unit.size]
    if side == 0:
        # Two of 32 are kept: with all of them the sums would outgrow the budget.
        first = _small(f.seed, "keep/0", scales.size).reshape(scales.shape) % BLOCK
        second = (first + 1 + _small(f.seed, "keep/1", scales.size).reshape(scales.shape) % (BLOCK - 1)) % BLOCK
        at = np.arange(BLOCK)
        keep = (at == first[..., None]) | (at == second[..., None])
        codes[~keep.reshape(codes.shape)] = 0
    return codes, scales


def _special(f: Frame, side: int) -> Planes:
    """exact-sum, with up to nine rows that are special in one place each; at most half of the rows, to show a leak."""
    codes, scales = _exact_sum(f, side)
    if not codes.size:
        return codes, scales
    row = FORMATS[f.formats[side]]
    # Next to a group's boundary is where a stray read reaches: a row there if rows are tokens, else a column.
    rows = np.argsort(_small(f.seed, f"rows/{side}", f.rows[side]), kind="stable")
    boundary = np.flatnonzero(np.diff(f.expert[side], prepend=-1) | np.diff(f.expert[side], append=-1))
    rows = np.concatenate([rows[np.isin(rows, boundary)], rows[~np.isin(rows, boundary)]])[: max(1, rows.size // 2)]
    edges = [p for start, end in f.segments if start < end for p in (start, end - 1)]
    columns = [edges[int(i) % len(edges)] for i in _small(f.seed, f"columns/{side}", 9)]
    places = iter(zip(rows.tolist(), columns, strict=False))
    # The first block is positive on both sides: its products add up to infinity, and not to NaN, for whoever takes a
    # NaN scale for an infinite one.
    first = edges[0] // BLOCK * BLOCK
    codes[:, first : first + BLOCK] &= row.sign_bit - 1
    if (place := next(places, None)) is not None:
        scales[place[0], first // BLOCK] = SCALE_NAN
    # One NaN code (the first and the last), each infinity.
    for code, place in zip(dict.fromkeys((row.nan_codes[0], row.nan_codes[-1], *row.inf_codes)), places, strict=False):
        codes[place] = code
    # 0 times a NaN scale is a NaN, and 0 times 2^127 is 0.
    for byte, (r, column) in zip((SCALE_NAN, E8M0.max_code), places, strict=False):
        scales[r, column // BLOCK] = byte
        codes[r, column // BLOCK * BLOCK : column // BLOCK * BLOCK + BLOCK] = 0
    return codes, scales


def _subnormal(f: Frame, side: int) -> Planes:
    codes, scales = _exact_sum(f, side)
    scales += np.uint8((f.lowest + side) // 2 % 256)
    return codes, scales


def _far_scales(f: Frame, side: int) -> Planes:
    """Of five rows two hold the format's smallest numbers under scales of 2^64 and more, two its largest under 2^-75
    and less. Where two of the fifth kind meet the sum is 511 * 2^119: a float32, but more than bfloat16 holds."""
    codes, scales = _exact_sum(f, side)
    rows = [FORMATS[name] for name in f.formats]
    smallest = [1 - row.bias - row.mantissa_bits for row in rows]  # log2; 1 .. 8 times it all are numbers of the format
    largest = [int(np.log2(row.max_finite)) - 3 for row in rows]
    kind = _small(f.seed, f"kinds/{side}", f.rows[side]) % 5 // 2
    values = np.nan_to_num(decode_table(rows[side]), nan=0.0, posinf=0.0, neginf=0.0)
    values[(np.abs(values) > 8) | (values % 1 != 0)] = 0  # exact-sum has whole numbers to 8
    small, large = (codes_of(np.ldexp(values, by[side]), f.formats[side]) for by in (smallest, largest))
    codes = np.where((kind == 1)[:, None], large[codes], small[codes])
    scales += np.array([65, -76, 0])[kind].astype(np.uint8)[:, None]
    nine = codes_of(np.ldexp(((8,) * 8 + (7,), (8,) * 7 + (7, 1))[side], smallest[side]), f.formats[side])
    codes[kind == 2] = 0
    for start, end in f.segments:
        codes[kind == 2, start : min(start + 9, end)] = nine[: end - start]
    scales[kind == 2] = SCALE_BIAS + (119 - sum(smallest) + side) // 2
    return codes, scales


def _bias(f: Frame, side: int) -> Planes:
    codes, scales = _exact_sum(f, side)
    if side == 0:
        codes[...] = 0
    return codes, scales


def _quantized(draw: Callable[[Frame, int, slice], F32]) -> Callable[[Frame, int], Planes]:
    def family(f: Frame, side: int) -> Planes:
        codes, scales = _empty(f, side)
        for rows in _chunks(f, side):
            mx = quantize(draw(f, side, rows), axis=1, format=f.formats[side])
            codes[rows], scales[rows] = mx.codes(), mx.scale_codes()
        return codes, scales

    return family


def _draw_normal(f: Frame, side: int, rows: slice) -> F32:
    return _normal(f.seed, f"elements/{side}", rows, f.length)


def _draw_heavy(f: Frame, side: int, rows: slice) -> F32:
    """Normal times 2^j, j = 0, 1, 2 .. 12 with probability 1/2, 1/4 ..: outliers as in a gradient. Rows differ by
    2^+-4 too, as tokens do."""
    x = _normal(f.seed, f"elements/{side}", rows, f.length)
    bits = _words(f.seed, f"tail/{side}", rows.start * f.length, x.size).reshape(x.shape) | np.uint64(1 << 12)
    lowest = bits & (~bits + np.uint64(1))
    size = _small(f.seed, f"size/{side}", f.rows[side])[rows] % 9 - 4
    return np.asarray(x * lowest.astype(np.float32) * np.ldexp(1.0, size)[:, None].astype(np.float32), np.float32)


def _draw_cancelling(f: Frame, side: int, rows: slice) -> F32:
    """Pairs that cancel: equal neighbours in A, opposite ones in B, but for one pair in eight."""
    x = _normal(f.seed, f"elements/{side}", rows, f.length)
    fresh = _bytes(f.seed, f"fresh/{side}", rows, f.length)[:, ::2] % 8 == 0
    x[:, 1::2] = np.where(fresh, x[:, 1::2], x[:, ::2] * np.float32(1 if side == 0 else -1))
    return x


# "captured" is not here, nor what was recorded: their planes come from files.
FAMILIES: Mapping[str, Callable[[Frame, int], Planes]] = MappingProxyType(
    {
        "exact-sum": _exact_sum,
        "signature": _signature,
        "normal": _quantized(_draw_normal),
        "heavy-tailed": _quantized(_draw_heavy),
        "cancellation": _quantized(_draw_cancelling),
        "special": _special,
        "all-codes": _all_codes,
        "all-scales": _all_scales,
        "bias": _bias,
        "bias-sum": _exact_sum,
        "subnormal": _subnormal,
        "far-scales": _far_scales,
    }
)


# ---------------------------------------------------------------------------------------------------------------------
# Quantizer inputs: (case, blocks) -> float32 [blocks, 32]


def _float(bits: Any) -> F32:
    return np.asarray(bits, np.uint32).view(np.float32)


def _tile(values: F32, blocks: int) -> F32:
    """The values over and over, row after row, to [blocks, 32]."""
    return np.resize(values, (blocks, BLOCK)).astype(np.float32)


def _q_normal(case: Case, blocks: int) -> F32:
    return _normal(case.seed, "x", slice(0, blocks), BLOCK)


def _q_heavy(case: Case, blocks: int) -> F32:
    f = Frame(case.seed, case.formats, (blocks, 0), BLOCK, (), (np.zeros(0, np.int64),) * 2)
    return _draw_heavy(f, 0, slice(0, blocks))


def _q_maxima(case: Case, blocks: int) -> F32:
    """Blocks whose maxima walk through the bfloat16 patterns, each with 31 smaller relatives.

    A block's maximum has exponent e and mantissa m; its other elements have mantissa m and exponents e - 1 .. e - 15 of
    both signs, so that every pattern is rounded at every distance from a maximum. 32,768 blocks hold every pattern.
    """
    pattern = (np.arange(blocks) * (1 if blocks >= 1 << 15 else 7919)) % (1 << 15)
    exponent, mantissa = pattern >> 7, pattern & 127
    below = np.concatenate([np.arange(16), np.arange(16)])
    negative = np.repeat([0, 1], 16)
    at = exponent[:, None] - below
    # A block of NaN or infinity has it once, so that what happens to the others shows.
    at = np.where((exponent == 255)[:, None] & (np.arange(BLOCK) > 0), 120 + below, np.maximum(at, 0))
    bits = (negative << 31) | (at << 23) | (mantissa[:, None] << 16)
    turn = _small(case.seed, "turn", blocks) % BLOCK
    return _float(np.take_along_axis(bits, (np.arange(BLOCK) + turn[:, None]) % BLOCK, axis=1))


def _q_edges(case: Case, blocks: int) -> F32:
    """Maxima next to every power of two and to every scale rule's threshold: the value and its float32 neighbours.

    In bfloat16 the neighbours collapse; the thresholds themselves (448, 464, 480, 496 and their like) do not.
    """
    powers = np.ldexp(1.0, np.arange(-149, 128)).astype(np.float32)
    factors = np.array([1, 1.75, 1.8125, 1.875, 1.9375, 1.25, 1.5, 1.625], np.float32)
    with np.errstate(over="ignore", under="ignore"):
        middle = (powers[:, None] * factors).reshape(-1)
    middle = np.unique(middle[np.isfinite(middle) & (middle > 0)])
    up, down = np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(0))
    edges = np.stack([middle, up, down], axis=1).reshape(-1)
    edges = edges[np.isfinite(edges)]
    chosen = edges[(np.arange(blocks) * (1 if blocks >= edges.size else 887)) % edges.size]
    x = _normal(case.seed, "x", slice(0, blocks), BLOCK)
    with np.errstate(under="ignore"):
        # In this order: the product of a tiny maximum and 2^-3 is already rounded, and rounded it stays.
        x[...] = np.clip(x * np.float32(0.125), -1, 1) * chosen[:, None]
    place = _small(case.seed, "place", blocks) % BLOCK
    x[np.arange(blocks), place] = np.where(_small(case.seed, "sign", blocks) % 2, chosen, -chosen)
    return x


def _q_midpoints(case: Case, blocks: int) -> F32:
    """Every finite element value, every midpoint between neighbours, and the float32 numbers next to those."""
    row = FORMATS[case.formats[0]]
    values = np.unique(np.abs(decode_table(row)[finite_codes(row.name)]))
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2, [values[1] / 2, row.max_finite * 1.0625]])
    points = points.astype(np.float32)
    near = np.concatenate([points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(0))])
    near = np.concatenate([near, -near])
    # The first element is the format's largest, so that under every rule the scale is 1 or 2 and the rest is a tie.
    x = _tile(near, blocks)
    x[:, 0] = row.max_finite
    x[...] *= np.ldexp(1.0, _small(case.seed, "exponent", blocks) % 33 - 16).astype(np.float32)[:, None]
    return x


def _q_special(case: Case, blocks: int) -> F32:
    """NaN, infinity and -0 at each of the 32 places in turn, whole blocks of them, and ordinary blocks between."""
    x = _normal(case.seed, "x", slice(0, blocks), BLOCK)
    kinds = (np.nan, np.inf, -np.inf, -np.nan)
    for b in range(blocks):
        # Every other block; the places advance by one, the kinds with every 32 of them.
        turn = b // 2
        if b % 2 == 0:
            x[b, turn % BLOCK] = kinds[turn // BLOCK % len(kinds)]
    whole = (0.0, -0.0, np.nan, np.inf, -np.inf, np.finfo(np.float32).max, 2.0**-149, -(2.0**-127), 1.0)
    for i, value in enumerate(whole[: max(0, blocks - BLOCK)]):
        x[-1 - 2 * i] = value
    return x


def _q_tiny(case: Case, blocks: int) -> F32:
    """Maxima of 2^-149 to 2^-90, where a scale or its reciprocal leaves the range, and zero blocks between them. Of
    float16 its own smallest numbers, 2^-24 to 2^-11."""
    x = _normal(case.seed, "x", slice(0, blocks), BLOCK)
    stride, count, lowest = (5, 14, -24) if case.out_dtype == "float16" else (7, 60, -149)
    exponent = np.arange(blocks) * stride % count + lowest
    with np.errstate(under="ignore"):
        x = np.asarray(x * np.ldexp(1.0, exponent)[:, None], np.float32)
    x[np.arange(blocks) % 4 == _small(case.seed, "zero", blocks) % 4] = 0
    return x


QUANTIZE_FAMILIES: Mapping[str, Callable[[Case, int], F32]] = MappingProxyType(
    {
        "normal": _q_normal,
        "heavy-tailed": _q_heavy,
        "maxima": _q_maxima,
        "edges": _q_edges,
        "midpoints": _q_midpoints,
        "special": _q_special,
        "tiny": _q_tiny,
    }
)


def _quantize_input(case: Case) -> NDArray[Any]:
    """x of [n,k] or [E,n,k] in the case's input type, blocks laid along its axis."""
    if case.family == "captured":
        return captured("late")[case.shape]
    shape = (case.experts, case.n, case.k) if case.sizes else (case.n, case.k)
    axis = int(case.routing.removeprefix("axis"))
    rest = [length for i, length in enumerate(shape) if i != axis]
    blocks = QUANTIZE_FAMILIES[case.family](case, int(np.prod(shape)) // BLOCK)
    x = np.moveaxis(blocks.reshape(*rest, shape[axis]), -1, axis)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        return np.ascontiguousarray(x).astype(np.dtype(getattr(ml_dtypes, case.out_dtype, case.out_dtype)))


# ---------------------------------------------------------------------------------------------------------------------
# Operands


def _captured(case: Case) -> tuple[Planes, Planes]:
    """The planes of a captured layer over its whole buffer: what the dispatcher left in the tail is in them."""
    tensors = {name: captured(case.routing)[f"{case.shape}.{name}"] for name in ("x", "dy", "w")}
    a, b = {
        "forward": (tensors["x"], tensors["w"]),
        "dgrad": (tensors["dy"], tensors["w"].transpose(0, 2, 1)),
        "wgrad": (tensors["dy"].T, tensors["x"].T),
    }[case.op]
    planes = []
    for x, format in zip((a, b), case.formats, strict=True):
        mx = quantize(np.ascontiguousarray(x.reshape(-1, x.shape[-1])), axis=1, format=format)
        planes.append((mx.codes(), mx.scale_codes()))
    return planes[0], planes[1]


@lru_cache(maxsize=2)
def _planes(case: Case) -> tuple[Planes, Planes]:
    """The planes of A and B, tokens only (of what comes from a file all there is); never written to again."""
    if case.family == "captured":
        return _captured(case)
    if case.source:
        return recorded(case)
    f = frame(case)
    both = FAMILIES[case.family](f, 0), FAMILIES[case.family](f, 1)
    for plane in (*both[0], *both[1]):
        plane.setflags(write=False)  # operands of a full buffer are views of these
    return both


def variants(case: Case) -> tuple[str, ...]:
    """The names that operands() takes for the case, "nan" first: the poisons, what a dispatcher really left behind,
    and "copied". A case whose buffer is full has one name only, and one without tokens cannot be cut to them."""
    if case.op == "quantize" or case.buffer == case.tokens:
        return ("nan",)
    real = case.family == "captured" or case.source
    return (*POISONS, *((STALE,) if real else ()), *((COPIED,) if case.tokens else ()))


def _pad(case: Case, planes: Planes, format: str, axis: int, name: str, variant: str) -> Planes:
    """The planes in a buffer of case.buffer tokens along `axis`, the rest as the variant has it."""
    if variant == STALE:
        return planes
    filled = []
    for plane, granule, is_scale in ((planes[0], 1, False), (planes[1], BLOCK if axis else 1, True)):
        kept = plane[: case.tokens] if axis == 0 else plane[:, : case.tokens // granule]
        if variant == COPIED or case.buffer == case.tokens:
            filled.append(kept)
            continue
        shape = list(plane.shape)
        shape[axis] = (case.buffer - case.tokens) // granule
        words = _words(case.seed, f"padding/{variant}/{name}/{is_scale}", 0, -(-shape[0] * shape[1] // 8))
        random = words.astype("<u8", copy=False).view(np.uint8)[: shape[0] * shape[1]].reshape(shape)
        poison = POISONS[variant]
        bad = poison.scales(random) if is_scale else poison.elements(FORMATS[format], random)
        filled.append(np.concatenate([kept, bad], axis=axis))
    return filled[0], filled[1]


def _mx(planes: Planes, axis: int, format: str) -> MXArray:
    codes, scales = (np.ascontiguousarray(p) for p in planes)
    return MXArray(codes.view(FORMATS[format].dtype), scales.view(E8M0.dtype), axis, format)


# (expert, column) -> bias. That of bias-sum is as large as the sums, in halves, and differs between neighbours.
_BIASES: Mapping[str, Callable[[I64, I64], NDArray[Any]]] = MappingProxyType(
    {
        "bias": lambda expert, column: 100.0 * expert + column,
        "bias-sum": lambda expert, column: ((37 * expert + 11 * column) % 127 - 63) / 2,
    }
)


def operands(case: Case, variant: str = "nan") -> Operands:
    """What a build is called with. The variant decides the bytes past the tokens and nothing else.

    variant: one of variants(case). ValueError for another name, StoreError where a captured case has lost its file.
    """
    if variant not in variants(case):
        raise ValueError(f"{case.id} has no variant {variant!r}; expected one of {', '.join(variants(case))}")
    if case.op == "quantize":
        format = case.formats[0]
        extra = {} if format == "e4m3fn" else {"format": format}
        return Operands({"x": _quantize_input(case), "axis": int(case.routing.removeprefix("axis"))}, extra=extra)
    a_planes, b_planes = _planes(case)
    token_axis = 1 if case.op == "wgrad" else 0
    a = _mx(_pad(case, a_planes, case.formats[0], token_axis, "a", variant), 1, case.formats[0])
    if case.op == "wgrad":
        b = _mx(_pad(case, b_planes, case.formats[1], token_axis, "b", variant), 1, case.formats[1])
    else:
        unit = case.n if case.op == "forward" else case.k
        weights = [p.reshape(case.experts, unit, -1) for p in b_planes]
        if case.op == "dgrad":
            weights = [p.transpose(0, 2, 1) for p in weights]
        b = _mx((weights[0], weights[1]), OPS[case.op].contraction[1], case.formats[1])
    offsets = np.cumsum(case.sizes, dtype=np.int32)
    values = (a.elements, a.scales, b.elements, b.scales, offsets)
    bias = {}
    if case.family in _BIASES:
        of = _BIASES[case.family](np.arange(case.experts)[:, None], np.arange(case.n))
        bias["bias"] = np.asarray(of, np.float32)
    return Operands(dict(zip(OPS[case.op].operands, values, strict=True)), a, b, offsets, bias)


def answer(case: Case, given: Operands, profile: str = "ocp") -> Answer | MXArray | None:
    """The oracle's answer to operands(case, any variant); of a quantize case what `profile` makes of x.

    None where the case is too large for an exact answer (LARGE) and the Freivalds check is used instead.
    """
    if case.op == "quantize":
        axis = given.arrays["axis"]
        return quantize(given.arrays["x"], axis=axis, format=case.formats[0], profile=profile)
    if is_large(case):
        return None
    assert given.a is not None and given.b is not None and given.offsets is not None
    exact = {"forward": oracle.forward, "dgrad": oracle.dgrad, "wgrad": oracle.wgrad}[case.op]
    result = exact(given.a, given.b, given.offsets)
    if given.extra and "bias" in given.extra:
        added = np.zeros(result.value.shape)  # whole numbers of quarters: the additions are exact
        added[: case.tokens] = np.repeat(given.extra["bias"].astype(np.float64), case.sizes, axis=0)
        result = replace(result, value=result.value + added, magnitude=result.magnitude + np.abs(added))
    return result
