"""Wrong builds: the ways in which MXFP8 quantizers and grouped GEMMs have really gone wrong.

Each is a correct build with one small part replaced, and names the gate that must reject it. They are what the gates
are tested with: a fault that survives is a hole in a gate. Nothing here is registered as a build.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from mxgate.kernels import numpy_reference as reference
from mxgate.kernels import numpy_windowed as windowed
from mxgate.kernels import parts as p
from mxgate.kernels import variants
from mxgate.kernels.build import BLOCK, Build
from mxgate.kernels.parts import F64, I64, U8, Array, Call, Kernel, Parts, Piece, QuantizeParts, Span
from mxgate.oracle.formats import FORMATS, Format, decode_table, scale_table

# The kinds of trouble that a CPU can show, and how each has come about.
KINDS = {
    # scales and tiny blocks
    "scale byte": "0x00 taken for zero, or 0xFF for a number or an infinity",
    "reciprocal": "the reciprocal of a scale or a maximum leaves the range",
    "tiny block": "the scale of a block near 2^-127 is flushed",
    "NaN in the maximum": "a NaN is lost when the block's maximum is taken",
    "exponent off by one": "a logarithm, a division or another rule gives the exponent",
    "packed scales": "bits leak from one scale byte into its neighbour",
    # elements and formats
    "element rounding": "large codes, ties, subnormals or signs go wrong",
    "overflow": "NaN where saturation was promised",
    "format mix-up": "OCP for FNUZ, E5M2 for E4M3, or the wrong NaN code",
    "special values": "a NaN or an infinity of the operands is swallowed or spread",
    "scale select": "a scale of another block, row or lane",
    "scales unused": "scales are not applied",
    "scale product": "two scales are put together before either is used, and leave the range",
    # layout
    "layout guess": "a layout told from shapes that do not tell",
    "scale padding": "padding swizzled in, or written as 1.0",
    "scale stride": "one row pitch assumed, another given",
    "expert base": "the operands of another expert",
    "packing unit": "fewer rows than the packing unit",
    "scale bounds": "scales read past their plane",
    # uninitialised, empty, padded
    "unwritten": "output that nobody wrote",
    "empty group": "an empty group keeps what was there before",
    "no tokens": "every group is empty",
    "bound wraps": "an empty group's last index is negative and wraps",
    "padded NaN": "a NaN in a padded row reaches valid ones",
    # offsets, tails, dispatch
    "boundary": "group boundaries that are no tile boundaries",
    "partial tile": "an advertised tile partly loaded",
    "tile order": "the remainder of a swizzled tile order",
    "few workers": "a persistent loop with few workers drops tiles",
    "dispatch bucket": "one size bucket has its own mistake",
    # overflow, strides, bias
    "index overflow": "an index outgrows its type",
    "output strides": "the caller's strides are ignored",
    "bias": "the bias is lost or misread",
    # races, replays, caches
    "not reproducible": "a race, atomics, a missing wait",
    "replay": "an earlier call's offsets or workspace used again",
    "split-K": "partial sums rounded early",
    "accumulates": "the first call adds to what the output held",
    "cache key": "a cached result for other operands",
    # the window over a ragged contraction
    "mask": "the scales outside the group are not both masked",
    "window": "the window is shortened or misplaced",
    # what any judge has to survive
    "rounding": "the result is narrowed wrongly, or rounded more than once",
    "subtle": "very few elements are wrong, or wrong by very little",
    "contract": "type, shape or memory that was not agreed",
    "process": "the process does not survive, or does not end",
    "lineage": "a correct result with other bits than the build it replaces",
}


@dataclass(frozen=True)
class Fault:
    """A wrong build. gate: the one that must reject it. kind: a key of KINDS. what: one sentence.

    seconds, gibibytes: limits for its child where the usual ones would be a waste of time or memory.
    """

    build: Build
    gate: str
    kind: str
    what: str
    seconds: float | None = None
    gibibytes: float | None = None


def _fault(
    op: str,
    name: str,
    function: Kernel,
    gate: str,
    kind: str,
    what: str,
    seconds: float | None = None,
    gibibytes: float | None = None,
    **record: Any,
) -> Fault:
    """Make `function` a build's target under this module and put it on the record."""
    attribute = f"{op}_{name}"
    globals()[attribute] = function
    if op != "quantize":
        record = {"out_dtypes": ("bfloat16", "float16", "float32"), **record}
    if op == "wgrad":
        record["group_alignment"] = BLOCK
    modules = ("parts", "variants", "numpy_reference", "numpy_windowed")
    sources = tuple(f"mxgate.kernels.{module}" for module in modules)
    build = Build(f"fault_{name}", op, f"{__name__}:{attribute}", sources=sources, **record)
    return Fault(build, gate, kind, what, seconds, gibibytes)


# ---------------------------------------------------------------------------------------------------------------------
# Wrong parts of a GEMM


def piece(change: Callable[[Piece], Piece]) -> Callable[[Call, int], Piece]:
    """One expert's product, changed."""
    return lambda call, g: change(p.cut(call, g))


def whole(change: Callable[[Call], Call]) -> Callable[[Call, int], Piece]:
    """One expert's product of changed operands."""
    return lambda call, g: p.cut(change(call), g)


def patched(array: Array, index: Any, value: Any) -> Array:
    """A copy of `array` with value at index."""
    copy: Array = array.copy()
    copy[index] = value
    return copy


def scale_means(code: int, value: float) -> Callable[[U8, U8, str], F64]:
    """One scale byte misread."""
    table = patched(scale_table(), code, value)

    def values(codes: U8, scales: U8, format: str) -> F64:
        with np.errstate(all="ignore"):
            return np.asarray(decode_table(format)[codes] * np.repeat(table[scales], BLOCK, axis=1), np.float64)

    return values


def code_means(format: str, meaning: dict[int, float]) -> Callable[[U8, U8, str], F64]:
    """Some codes of one format misread."""
    table = patched(decode_table(format), list(meaning), list(meaning.values()))

    def values(codes: U8, scales: U8, name: str) -> F64:
        with np.errstate(all="ignore"):
            spread = np.repeat(scale_table()[scales], BLOCK, axis=1)
            return np.asarray((table if name == format else decode_table(name))[codes] * spread, np.float64)

    return values


def format_means(**other: str) -> Callable[[U8, U8, str], F64]:
    """One format read as another."""
    return lambda codes, scales, format: p.values(codes, scales, other.get(format, format))


def block_of(index: Callable[[I64], I64]) -> Callable[[U8, U8, str], F64]:
    """Element t of the contraction takes the scale of block index(t); past the last block, the last."""

    def values(codes: U8, scales: U8, format: str) -> F64:
        block = np.minimum(index(np.arange(codes.shape[1])), max(scales.shape[1] - 1, 0))
        with np.errstate(all="ignore"):
            return np.asarray(decode_table(format)[codes] * scale_table()[scales[:, block]], np.float64)

    return values


def next_to_its_data(t: I64) -> I64:
    """A lane of the 16x16x128 instruction holds 16 elements from 16 g on and 16 from 64 + 16 g on, while the scale that
    it holds is block g's: used for its own data, elements 16 g .. of either half get the scale of block g."""
    return t // 128 * 4 + t % 64 // 16


def previous_row(scales: U8) -> U8:
    """The last row's scales are those of the row before it."""
    return scales if len(scales) < 2 else patched(scales, -1, scales[-2])


def repitched(plane: U8) -> U8:
    """Rows read with a pitch rounded up to 8 scales, out of a plane that has none."""
    rows, columns = plane.shape
    index = np.arange(rows)[:, None] * (-(-columns // 8) * 8) + np.arange(columns)
    read: U8 = np.concatenate([plane.reshape(-1), np.zeros(index.size * 8, np.uint8)])[index]
    return read


def from_expert(index: Callable[[int, Call], int], scales_only: bool = False) -> Callable[[Call, int], Piece]:
    """Expert g takes the weights of expert index(g, call), or only their scales."""

    def cut(call: Call, g: int) -> Piece:
        other = index(g, call)
        changed = replace(call, b_scales=patched(call.b_scales, g, call.b_scales[other]))
        return p.cut(changed if scales_only else replace(changed, b=patched(call.b, g, call.b[other])), g)

    return cut


def told_by_shape(x: Piece) -> Piece:
    """Weights are [N,K] or [K,N], whichever the shape says: of a square it says nothing."""
    if x.b.shape[0] != x.b.shape[1]:
        return x
    return replace(x, b=np.ascontiguousarray(x.b.T))


def filled_before(g: int, call: Call) -> int:
    """How many of the groups before g hold tokens: g itself only where none is empty."""
    return sum(start < end for start, end in call.spans[:g])


def last_rows_unscaled(x: Piece) -> Piece:
    """Rows are packed by four; what is left over is taken as it is."""
    rows = len(x.a_scales) // 4 * 4
    return replace(x, a_scales=patched(x.a_scales, slice(rows, None), 127))


def contraction(x: Piece, length: int) -> Piece:
    """The first `length` elements of the contraction."""
    blocks = length // BLOCK
    return Piece(x.a[:, :length], x.a_scales[:, :blocks], x.b[:, :length], x.b_scales[:, :blocks])


def over_the_end(x: Piece) -> Piece:
    """The contraction rounded up to 128: what lies behind a row is the next one, under a scale of 1.0."""
    extra = -x.a.shape[1] % 128
    if extra == 0:
        return x

    def longer(codes: U8) -> U8:
        following = np.concatenate([codes[1:, :extra], np.zeros((1, min(extra, codes.shape[1])), np.uint8)])
        return np.concatenate([codes, np.resize(following, (len(codes), extra))], axis=1)

    def padded(scales: U8) -> U8:
        return np.concatenate([scales, np.full((len(scales), extra // BLOCK), 127, np.uint8)], axis=1)

    return Piece(longer(x.a), padded(x.a_scales), longer(x.b), padded(x.b_scales))


def narrow_index(plane: U8) -> U8:
    """A plane addressed through int16: from 32,768 on the index is negative."""
    index = np.arange(plane.size).astype(np.int16)
    return plane.reshape(-1)[index].reshape(plane.shape)


def spans_of(change: Callable[[list[Span], int], Iterable[Span]]) -> Callable[[NDArray[np.int32], int], Sequence[Span]]:
    """Groups derived wrongly from right offsets."""
    return lambda offsets, length: list(change(reference.spans(offsets, length), length))


def tile_spans(spans: list[Span], length: int) -> Iterable[Span]:
    """A tile of 64 rows belongs, whole, to the expert of its first row."""
    up = [min(-(-end // 64) * 64, spans[-1][1]) for _, end in spans]
    return zip([0, *up[:-1]], up, strict=True)


def wrapped_spans(spans: list[Span], length: int) -> Iterable[Span]:
    """The last index of an empty group, end - 1, is below its start and wraps: the group goes on to the last token."""
    return ((start, end if start < end else spans[-1][1]) for start, end in spans)


def starts_for_ends(spans: list[Span], length: int) -> Iterable[Span]:
    """The ends taken for starts: group g runs from its own end to the next one's."""
    return zip([e for _, e in spans], [e for _, e in spans[1:]] + [spans[-1][1]], strict=True)


def warp_search(spans: list[Span], length: int) -> Iterable[Span]:
    """The next expert with tokens is looked for among the 32 that a warp sees, or else taken to be the last of them."""
    found, at = [(0, 0)] * len(spans), -1
    for g, (start, end) in enumerate(spans):
        if start < end:
            at = min(g, at + 32)
            found[at] = (start, end)
    return found


def scales_together(combine: Callable[[I64], I64]) -> dict[str, Any]:
    """Parts of a GEMM that adds up bare elements by blocks and applies combine(the sum of two scales' exponents)."""
    held: list[Any] = []

    def cut(call: Call, g: int) -> Piece:
        held[:] = [p.cut(call, g), call.formats]
        piece: Piece = held[0]
        return piece

    def dot(a: F64, b: F64) -> Array:
        x, formats = held
        total = np.zeros((a.shape[0], b.shape[0]))
        with np.errstate(all="ignore"):
            for block in range(x.a_scales.shape[1]):
                t = slice(block * BLOCK, block * BLOCK + BLOCK)
                left, right = x.a_scales[:, block].astype(np.int64)[:, None], x.b_scales[:, block].astype(np.int64)
                scale = np.ldexp(1.0, combine(left + right - 2 * 127))
                part = p.dot(decode_table(formats[0])[x.a[:, t]], decode_table(formats[1])[x.b[:, t]])
                total += part * np.where((left == 255) | (right == 255), np.nan, scale)
        return total

    return {"cut": cut, "dot": dot}


def split_where_long(a: F64, b: F64) -> Array:
    """A contraction of 1,024 or more is split in four, and the parts are stored as results are: in bfloat16."""
    if a.shape[1] < 1024:
        return p.dot(a, b)
    return split_into(ml_dtypes.bfloat16, running=False, step=-(-a.shape[1] // 4))(a, b)


def last_block_twice(a: F64, b: F64) -> Array:
    return p.dot(a, b) + p.dot(a[:, -BLOCK:], b[:, -BLOCK:])


def block_dropped(a: F64, b: F64) -> Array:
    """A long contraction loses the block in its middle."""
    middle = a.shape[1] // BLOCK // 2 * BLOCK
    lost = slice(middle, middle + BLOCK) if a.shape[1] >= 96 else slice(0, 0)
    return p.dot(a, b) - np.nan_to_num(p.dot(a[:, lost], b[:, lost]))


def split_into(dtype: DTypeLike, running: bool, step: int = BLOCK) -> Callable[[F64, F64], Array]:
    """Partial sums of `step` products rounded to `dtype`; running: their running total is too."""

    def dot(a: F64, b: F64) -> Array:
        total = np.zeros((a.shape[0], b.shape[0]), np.float32)
        with np.errstate(all="ignore"):
            for t in range(0, a.shape[1], step):
                total += p.dot(a[:, t : t + step], b[:, t : t + step]).astype(dtype).astype(np.float32)
                total = total.astype(dtype).astype(np.float32) if running else total
        return total

    return dot


def in_order(rng: np.random.Generator, a: F64, b: F64) -> Array:
    """Partial sums of 32 products added in float32, in an order that `rng` draws."""
    total = np.zeros((a.shape[0], b.shape[0]), np.float32)
    with np.errstate(all="ignore"):
        for block in rng.permutation(a.shape[1] // BLOCK):
            t = slice(block * BLOCK, block * BLOCK + BLOCK)
            total += p.dot(a[:, t], b[:, t]).astype(np.float32)
    return total


def as_they_arrive(a: F64, b: F64) -> Array:
    return in_order(np.random.default_rng(), a, b)


def by_process(a: F64, b: F64) -> Array:
    """Partial sums added in an order that each process has for itself, as one that hangs on addresses would be."""
    return in_order(np.random.default_rng(os.getpid()), a, b)


def while_tuning() -> Callable[[F64, F64], Array]:
    """The first eight products of a process are tuning runs, which split the contraction otherwise."""
    calls = [0]

    def dot(a: F64, b: F64) -> Array:
        calls[0] += 1
        return (variants.chunked(BLOCK, backwards=True) if calls[0] <= 8 else variants.fp32_dot)(a, b)

    return dot


def never_reset() -> Callable[[F64, F64], Array]:
    """An accumulator that is cleared by the first product: an empty group finds the one before it."""
    kept: dict[tuple[int, int], Array] = {}

    def dot(a: F64, b: F64) -> Array:
        shape = (a.shape[0], b.shape[0])
        if a.shape[1]:
            kept[shape] = p.dot(a, b)
        return kept.get(shape, np.zeros(shape))

    return dot


def minus_zero(a: F64, b: F64) -> Array:
    return p.dot(a, b) if a.shape[1] else np.full((a.shape[0], b.shape[0]), -0.0)


def without_nan(a: F64, b: F64) -> Array:
    return p.dot(np.nan_to_num(a, nan=0.0, posinf=np.inf, neginf=-np.inf), np.nan_to_num(b, nan=0.0))


def spreading_nan(a: F64, b: F64) -> Array:
    """A maximum over the tile is taken along: one NaN and all of it is NaN."""
    sums = p.dot(a, b)
    return sums + 0 * sums.max() if sums.size and np.isnan(sums).any() else sums


def cut_bits(add: int) -> Callable[[Any, DTypeLike], Array]:
    """float32 narrowed to bfloat16 by dropping 16 bits, after adding `add` to them."""

    def narrow(sums: Any, dtype: DTypeLike) -> Array:
        if np.dtype(dtype) != ml_dtypes.bfloat16:
            return reference.narrow(sums, dtype)
        bits = reference.narrow(sums, np.float32).view(np.uint32)
        finite = np.isfinite(bits.view(np.float32))
        kept: NDArray[np.uint32] = (bits + np.where(finite, add, 0).astype(np.uint32)) >> np.uint32(16)
        narrowed: Array = kept.astype(np.uint16).view(ml_dtypes.bfloat16)
        return narrowed

    return narrow


def stochastic(sums: Any, dtype: DTypeLike) -> Array:
    """Narrowed up or down at random."""
    return cut_bits(0)(sums, dtype) if np.random.default_rng().random() < 0.5 else reference.narrow(sums, dtype)


def saturating(sums: Any, dtype: DTypeLike) -> Array:
    """What overflows the output type becomes its largest value."""
    largest = float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]
    x = sums.astype(np.float64)
    return reference.narrow(np.where(np.isfinite(x), np.clip(x, -largest, largest), x), dtype)


def saturating_bfloat16(sums: Any, dtype: DTypeLike) -> Array:
    return saturating(sums, dtype) if np.dtype(dtype) == ml_dtypes.bfloat16 else reference.narrow(sums, dtype)


def flushing_float32(sums: Any, dtype: DTypeLike) -> Array:
    """A subnormal float32 is stored as a zero."""
    x = sums.astype(np.float64)
    tiny = (np.abs(x) < 2.0**-126) & (np.dtype(dtype) == np.float32)
    return reference.narrow(np.where(tiny, np.copysign(0.0, x), x), dtype)


def through(dtype: DTypeLike) -> Callable[[Any, DTypeLike], Array]:
    """Narrowed to another type first."""

    def narrow(sums: Any, target: DTypeLike) -> Array:
        return reference.narrow(reference.narrow(sums, dtype).astype(np.float64), target)

    return narrow


def afterwards(change: Callable[[Array], None]) -> Callable[[Array, Call], None]:
    """The last expert's result is changed after it is stored (of forward and dgrad: all rows together)."""

    def done(out: Array, call: Call) -> None:
        p.zero_tail(out, call)
        held = out[-1] if call.op == "wgrad" else out[: call.tokens]
        if held.size:
            change(held)

    return done


def wrong_tile(held: Array) -> None:
    """The 16 x 16 tile at (16, 16) is a copy of the one above it."""
    held[16:32, 16:32] = held[0:16, 16:32][: len(held[16:32])]


def one_ulp(held: Array) -> None:
    """The element in the middle is one unit in the last place off."""
    middle = (held.shape[0] // 2, held.shape[1] // 2)
    held.view(np.dtype(f"u{held.dtype.itemsize}"))[middle] ^= 1


def third_of_three(out: Array, call: Call) -> None:
    """Columns are stored by fours, the rest as a pair and a single one: after a pair the single one is stored twice."""
    p.zero_tail(out, call)
    if out.shape[-1] % 4 == 3:
        out[..., -1] = out[..., -2]


def every_twentieth_nan(held: Array) -> None:
    held[:, ::20] = np.nan


def all_zero(held: Array) -> None:
    held[...] = 0


def tile_of_padding(out: Array, call: Call) -> None:
    """Padded rows are masked by a factor of zero inside their tile of 64 rows, and zero times NaN is NaN."""
    p.zero_tail(out, call)
    start, end = call.tokens // 64 * 64, min(-(-call.tokens // 64) * 64, len(call.a))
    masked = 0 * p.values(call.a[call.tokens : end], call.a_scales[call.tokens : end], call.formats[0])
    out[start : call.tokens] += masked.sum().astype(out.dtype)


def where_scheduled(out: Array, call: Call, g: int) -> Array:
    """The result goes where a schedule of longest groups first put the expert, not where the expert is."""
    schedule = sorted(range(len(call.spans)), key=lambda e: call.spans[e][0] - call.spans[e][1])
    place: Array = out[schedule.index(g)]
    return place


# ---------------------------------------------------------------------------------------------------------------------
# Wrong behaviour around a right GEMM


def right(op: str) -> Kernel:
    return p.kernel(op, Parts())


def visiting(op: str, tiles: Callable[[int, int], Iterable[tuple[int, int]]]) -> Kernel:
    """A right result of which only some tiles of 32 x 32 are stored."""

    def run(*operands: Array, out: Array | None = None, out_dtype: DTypeLike | None = None, **bias: Any) -> Array:
        result = right(op)(*operands, out_dtype=out.dtype if out is not None else out_dtype, **bias)
        out = reference.output(result.shape, out, result.dtype)
        rows, columns = (-(-length // 32) for length in out.shape[-2:])
        for i, j in tiles(rows, columns):
            tile = (..., slice(32 * i, 32 * i + 32), slice(32 * j, 32 * j + 32))
            out[tile] = result[tile]
        return out

    return run


def few_workers(rows: int, columns: int) -> Iterable[tuple[int, int]]:
    """Four workers, each with a quarter of the tiles: the remainder is nobody's."""
    return (windowed.row_major(t, rows, columns) for t in range((rows * columns) // 4 * 4))


def even_grid(rows: int, columns: int) -> Iterable[tuple[int, int]]:
    """The 2 x 2 walk of a grid with even sides, over as many tiles as there are: with odd sides it leaves the grid."""
    return (windowed.supertile(t, rows + rows % 2, columns + columns % 2) for t in range(rows * columns))


def before(op: str, action: Callable[..., None]) -> Kernel:
    """`action` on the operands, then a right result."""

    def run(*operands: Array, out: Array | None = None, out_dtype: DTypeLike | None = None, **bias: Any) -> Array:
        action(*operands)
        result: Array = right(op)(*operands, out=out, out_dtype=out_dtype, **bias)
        return result

    return run


def after(op: str, action: Callable[[Array, Array | None], Array]) -> Kernel:
    """A right result in memory of its own, and whatever `action(result, out)` makes of it."""

    def run(*operands: Array, out: Array | None = None, out_dtype: DTypeLike | None = None, **bias: Any) -> Array:
        dtype = out.dtype if out is not None else out_dtype
        return action(right(op)(*operands, out_dtype=dtype, **bias), out)

    return run


def stored(result: Array, out: Array | None) -> Array:
    if out is None:
        return result
    out[...] = result
    return out


def contiguous(result: Array, out: Array | None) -> Array:
    """The caller's strides are taken to be those of a contiguous array."""
    if out is None:
        return result
    np.lib.stride_tricks.as_strided(out, result.shape, result.strides)[...] = result
    return out


def behind(result: Array, out: Array | None) -> Array:
    """The last store is four bytes too wide."""
    out = stored(result, out)
    last = sum((length - 1) * stride for length, stride in zip(out.shape, out.strides, strict=True)) + out.itemsize
    ctypes.memset(out.ctypes.data + last, 0, 4)
    return out


def ahead(result: Array, out: Array | None) -> Array:
    """The first store begins two bytes early."""
    if out is not None:
        ctypes.memset(out.ctypes.data - 2, 0, 2)
    return stored(result, out)


def spoil_operand(x: Array, *rest: Array) -> None:
    if x.size:
        x.view(np.uint8).reshape(-1)[0] ^= 1


def read_past(x: Array, x_scales: Array, *rest: Array) -> None:
    """One load of scales too many."""
    ctypes.string_at(x_scales.ctypes.data + x_scales.nbytes, 4)


def read_before(x: Array, x_scales: Array, w: Array, w_scales: Array, offsets: Array) -> None:
    """Expert e starts where e - 1 ends: of the first it is read, too, and not used."""
    ctypes.string_at(offsets.ctypes.data - 4, 4)


def crash(*operands: Array) -> None:
    ctypes.string_at(0)


def exit_quietly(*operands: Array) -> None:
    os._exit(0)


def exit_politely(*operands: Array) -> None:
    raise SystemExit(0)


def kill_itself(*operands: Array) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def close_everything(*operands: Array) -> None:
    os.closerange(0, 256)


def hang(*operands: Array) -> None:
    while True:
        time.sleep(0.01)


def hang_without_tokens(*operands: Array) -> None:
    """A loop that waits for the first tile."""
    if operands[4][-1] == 0:
        hang()


def divide_by_tokens(*operands: Array) -> None:
    """A grid size from the tokens there are."""
    4096 // int(operands[4][-1])


def divide_by_rows(*operands: Array) -> None:
    """The same from the rows of the buffer."""
    4096 // len(operands[0])


def eat(*operands: Array) -> None:
    hoard = []
    while True:
        hoard.append(np.ones(1 << 22))
        time.sleep(0.001)


def every_seventeenth(op: str) -> Kernel:
    """A race that is lost once in seventeen launches (6 %), and then spoils four elements."""
    calls = [0]

    def action(result: Array, out: Array | None) -> Array:
        calls[0] += 1
        if calls[0] % 17 == 0 and result.size:
            result.reshape(-1)[:: max(1, result.size // 4)] *= 2
            result.reshape(-1)[0] += 1
        return stored(result, out)

    return after(op, action)


def one_buffer(op: str) -> Kernel:
    """Every result of a shape is returned in the same memory."""
    kept: dict[Any, Array] = {}

    def action(result: Array, out: Array | None) -> Array:
        if out is not None:
            return stored(result, out)
        buffer = kept.setdefault((result.shape, result.dtype), np.zeros_like(result))
        buffer[...] = result
        return buffer

    return after(op, action)


def two_buffers(op: str) -> Kernel:
    """Results of a shape are returned in two pieces of memory by turns."""
    turns: list[Kernel] = [one_buffer(op), one_buffer(op)]

    def run(*operands: Array, out: Array | None = None, out_dtype: DTypeLike | None = None, **bias: Any) -> Array:
        turns.reverse()
        result: Array = turns[0](*operands, out=out, out_dtype=out_dtype, **bias)
        return result

    return run


def nothing_to_do(op: str) -> Kernel:
    """Without tokens nothing is launched, and the result is what the last call of that shape left."""
    kept: dict[Any, Array] = {}

    def run(*operands: Array, out: Array | None = None, out_dtype: DTypeLike | None = None, **bias: Any) -> Array:
        result: Array = right(op)(*operands, out=out, out_dtype=out_dtype, **bias)
        key = (result.shape, result.dtype)
        if operands[4][-1] == 0 and out is None:
            result = kept.get(key, result)
        kept[key] = result.copy()
        return result

    return run


def adds_at_first(op: str) -> Kernel:
    """Tuning runs on the caller's output: the first call of a process ends up with the sum."""
    calls = [0]

    def run(*operands: Array, out: Array | None = None, out_dtype: DTypeLike | None = None, **bias: Any) -> Array:
        result = right(op)(*operands, out_dtype=out.dtype if out is not None else out_dtype, **bias)
        out = reference.output(result.shape, out, result.dtype)
        calls[0] += 1
        with np.errstate(all="ignore"):
            out[...] = result + out if calls[0] == 1 else result
        return out

    return run


def first_size(op: str) -> Kernel:
    """A kernel compiled for the rows of the first call with its N and K: later calls with more leave some out."""
    compiled: dict[Any, int] = {}

    def run(*operands: Array, out: Array | None = None, out_dtype: DTypeLike | None = None, **bias: Any) -> Array:
        result = right(op)(*operands, out_dtype=out.dtype if out is not None else out_dtype, **bias)
        out = reference.output(result.shape, out, result.dtype)
        rows = compiled.setdefault((operands[2].shape, operands[0].dtype, operands[2].dtype), len(result))
        out[:rows] = result[:rows]
        return out

    return run


def returns_early(op: str) -> Kernel:
    """The work goes on in the background, and nobody waits for it."""

    def run(*operands: Array, out: Array | None = None, out_dtype: DTypeLike | None = None, **bias: Any) -> Array:
        result = right(op)(*operands, out_dtype=out.dtype if out is not None else out_dtype, **bias)
        buffer = reference.output(result.shape, out, result.dtype)

        def finish() -> None:
            time.sleep(0.2)
            buffer[...] = result

        threading.Thread(target=finish, daemon=True).start()
        return buffer

    return run


def remembering(op: str, key: Callable[..., Any], *kept: int) -> Kernel:
    """The operands `kept` of the first call with a key serve all later calls with it."""
    seen: dict[Any, list[Array]] = {}

    def run(*operands: Array, out: Array | None = None, out_dtype: DTypeLike | None = None, **bias: Any) -> Array:
        old = seen.setdefault(key(*operands), [operands[i].copy() for i in kept])
        given = list(operands)
        for i, array in zip(kept, old, strict=True):
            given[i] = array
        result: Array = right(op)(*given, out=out, out_dtype=out_dtype, **bias)
        return result

    return run


def shapes(*operands: Array) -> Any:
    return tuple((a.shape, a.dtype) for a in operands)


def ignores(op: str, *names: str) -> Kernel:
    """A build that takes these keywords and does nothing with them."""

    def run(*operands: Array, out: Array | None = None, out_dtype: DTypeLike | None = None, **bias: Any) -> Array:
        given = {"out": out, "out_dtype": out_dtype, **bias}
        result: Array = right(op)(*operands, **{name: value for name, value in given.items() if name not in names})
        return result

    return run


# ---------------------------------------------------------------------------------------------------------------------
# Wrong parts of the windowed weight gradient


def model(**parts: Any) -> Kernel:
    """The shipped kernel with these parts; it masks scales and not data."""
    changed = replace(windowed.SHIPPED, **parts)

    def run(
        dy_t: Array,
        dy_scales: Array,
        x_t: Array,
        x_scales: Array,
        offsets: NDArray[np.int32],
        *,
        out: Array | None = None,
        out_dtype: DTypeLike | None = None,
    ) -> Array:
        return windowed.run(changed, dy_t, dy_scales, x_t, x_scales, offsets, out, out_dtype)

    return run


def no_mask(scales: U8, keep: NDArray[np.bool_]) -> U8:
    return scales


def mask_with_one(scales: U8, keep: NDArray[np.bool_]) -> U8:
    return np.where(keep, scales, np.uint8(127))


def mask_but_bounds(scales: U8, keep: NDArray[np.bool_]) -> U8:
    """What the bounds are trusted to give is not masked again."""
    return np.where(keep | (scales == 0xFF), scales, np.uint8(0))


def load_unbounded(plane: Array, rows: Span, columns: Span) -> Array:
    """What lies outside the plane reads as 0xFF."""
    loaded = windowed.load(plane, rows, columns)
    loaded[max(0, plane.shape[0] - rows[0]) :] = 0xFF
    loaded[:, max(0, plane.shape[1] - columns[0]) :] = 0xFF
    return loaded


def load_aligned(plane: Array, rows: Span, columns: Span) -> Array:
    """A four-byte load drops the low bits of its address."""
    low = columns[0] // 4 * 4
    return windowed.load(plane, rows, (low, low + columns[1] - columns[0]))


def from_start(start: int, end: int) -> windowed.Window:
    """The window begins at the group's first token."""
    return replace(windowed.window(0, end - start), base=start)


def full_steps_only(start: int, end: int) -> windowed.Window:
    base = windowed.window(start, end).base
    return windowed.Window(base, (end - base) // windowed.STEP)


def pairs_only(start: int, end: int) -> windowed.Window:
    """A loop unrolled by two over an odd number of steps leaves the last one out."""
    base = windowed.window(start, end).base
    return windowed.Window(base, -(-(end - base) // windowed.STEP) // 2 * 2)


def no_upper_bound(first: I64, start: int, end: int) -> NDArray[np.bool_]:
    return np.asarray(first >= start)


def one_block_more(first: I64, start: int, end: int) -> NDArray[np.bool_]:
    return windowed.inside(first, start, end + BLOCK)


def one_block_less(first: I64, start: int, end: int) -> NDArray[np.bool_]:
    return windowed.inside(first, start, max(start, end - BLOCK))


def no_clearing(elements: Array, scales: Array, tokens: int) -> None:
    """The padding keeps what the dispatcher left there."""


def clear_from_last_tile(elements: Array, scales: Array, tokens: int) -> None:
    """Zeroes whole blocks of 128, and with them the last tokens."""
    windowed.clear_padding(elements, scales, tokens // 128 * 128)


def chopped(acc: Any, dtype: DTypeLike) -> Array:
    return cut_bits(0)(acc.astype(np.float64), dtype)


def halves(acc: Any, a: F64, b: F64) -> Any:
    """A step summed as two instructions of 64: correct, with one more rounding."""
    for t in (slice(0, 64), slice(64, 128)):
        acc = windowed.step_sum(acc, a[:, t], b[:, t])
    return acc


# ---------------------------------------------------------------------------------------------------------------------
# Wrong parts of a quantizer


def from_log2(largest: F64, row: Format) -> I64:
    """The exponent from a float32 logarithm, which rounds up to the next power of two."""
    exponent = np.floor(np.log2(largest.astype(np.float32)))
    return np.where(largest == 0, 0, np.clip(exponent - row.emax + 127, 0, 254)).astype(np.int64)


def from_division(largest: F64, row: Format) -> I64:
    """The exponent of maximum / largest value, rounded up: the ceiling in place of the floor."""
    ratio = largest.astype(np.float32) / np.float32(row.max_finite)
    exponent = np.ceil(np.log2(ratio))
    return np.where(largest == 0, 0, np.clip(exponent + 127, 0, 254)).astype(np.int64)


def by_rule(step_up: Callable[[I64, Format], Any]) -> Callable[[F64, Format], I64]:
    """Another rule: the byte goes up by step_up(the maximum's 23 mantissa bits, row)."""

    def byte(largest: F64, row: Format) -> I64:
        mantissa = (np.frexp(largest)[0] * 2**24).astype(np.int64) & 0x7FFFFF
        raised = np.clip(p.scale_byte(largest, row) + step_up(mantissa, row), 0, 254)
        return np.where(largest == 0, 0, raised).astype(np.int64)

    return byte


def flushed(largest: F64, row: Format) -> I64:
    """A scale of 2^-127 or below is no normal float32, and so becomes the one above."""
    byte = p.scale_byte(largest, row)
    return np.where(byte == 0, 1, byte)


def leaking(largest: F64, row: Format) -> I64:
    """Four bytes packed into a word by shifts: the mantissa's highest bits end up in the byte below."""
    byte = p.scale_byte(largest, row)
    mantissa = (np.frexp(largest)[0] * 2**24).astype(np.int64) & 0x7FFFFF
    leak = np.where(np.arange(byte.shape[-1]) % 4 == 0, 0, mantissa >> 15)
    leaked: I64 = np.minimum(byte | np.concatenate([leak[..., 1:], 0 * leak[..., :1]], axis=-1), 254)
    return leaked


def zero_is_one(largest: F64, row: Format) -> I64:
    return np.where(largest == 0, 127, p.scale_byte(largest, row))


def emax_of_e4m3(largest: F64, row: Format) -> I64:
    return p.scale_byte(largest, FORMATS["e4m3fn"])


def ignoring_nan(blocks: F64) -> F64:
    largest = np.fmax.reduce(np.abs(blocks), axis=-1)
    return np.asarray(np.where(np.isnan(largest), 0.0, largest), np.float64)


def signed(blocks: F64) -> F64:
    """The largest value, not the largest magnitude."""
    largest = p.maximum(np.maximum(blocks, 0))
    return np.asarray(np.where(np.isfinite(p.maximum(blocks)), largest, p.maximum(blocks)), np.float64)


def finite_infinity(blocks: F64) -> F64:
    """An infinity counts as the largest finite value."""
    return p.maximum(np.where(np.isinf(blocks), np.copysign(2.0**127, blocks), blocks))


def two_blocks(blocks: F64) -> F64:
    """Maxima over pairs of blocks."""
    largest = p.maximum(blocks)
    paired = largest[..., : largest.shape[-1] // 2 * 2].reshape(*largest.shape[:-1], -1, 2)
    pairs = np.repeat(paired.max(axis=-1), 2, axis=-1)
    return np.concatenate([pairs, largest[..., pairs.shape[-1] :]], axis=-1)


def flushed_reciprocal(blocks: F64, byte: I64) -> F64:
    """1 / maximum below 2^-126 is flushed to zero, and the elements with it."""
    return p.scaled(blocks, byte) * (p.maximum(blocks) <= 2.0**126)[..., None]


def float32_reciprocal(blocks: F64, byte: I64) -> F64:
    """Multiplied by a float32 reciprocal; of a flushed scale it is infinite."""
    inverse = np.where(byte == 0, np.inf, np.ldexp(1.0, 127 - byte))
    return np.nan_to_num(blocks * inverse[..., None], nan=0.0, posinf=1e30, neginf=-1e30)


def bfloat16_first(blocks: F64, byte: I64) -> F64:
    return p.scaled(reference.narrow(blocks, ml_dtypes.bfloat16).astype(np.float64), byte)


def ties_away(x: F64, row: Format) -> F64:
    return p.to_grid(x, row, lambda v: np.copysign(np.floor(np.abs(v) + 0.5), v))


def ties_up(x: F64, row: Format) -> F64:
    return p.to_grid(x, row, lambda v: np.floor(v + 0.5))


def toward_zero(x: F64, row: Format) -> F64:
    return p.to_grid(x, row, np.trunc)


def at_random(x: F64, row: Format) -> F64:
    return p.to_grid(x, row, lambda v: np.floor(v + np.random.default_rng().random(v.shape)))


def large_saturates(x: F64, row: Format) -> F64:
    """Everything in the top binade becomes the maximum."""
    return np.asarray(
        np.where(np.abs(x) > 2.0**row.emax, np.copysign(row.max_finite, x), p.to_grid(x, row)), np.float64
    )


def no_saturation(x: F64, row: Format) -> F64:
    """What rounds to more than the maximum is NaN."""
    return np.asarray(
        np.where(np.abs(x) >= row.max_finite * (1 + 2.0**-row.mantissa_bits / 4), np.nan, p.to_grid(x, row))
    )


def no_subnormals(x: F64, row: Format) -> F64:
    rounded = p.to_grid(x, row)
    return np.asarray(np.where(np.abs(rounded) < 2.0 ** (1 - row.bias), np.copysign(0.0, rounded), rounded), np.float64)


def no_minus_zero(x: F64, row: Format) -> F64:
    return p.to_grid(x, row) + 0.0


def as_ocp(x: F64, row: Format) -> U8:
    """Codes of the OCP format of the same width for an FNUZ one: half the value, and -0 is a NaN."""
    return x.astype(FORMATS[row.name.removesuffix("uz")].dtype if row.name == "e4m3fnuz" else row.dtype).view(np.uint8)


def last_axis(x: Array, axis: int, *, format: str = "e4m3fn") -> Any:
    return reference.quantize(x, -1, format=format)


def spoils_input(x: Array, axis: int, *, format: str = "e4m3fn") -> Any:
    """Quantizes magnitudes, taken in place."""
    result = reference.quantize(x, axis, format=format)
    np.abs(x, out=x)
    return result


def bare_bytes(x: Array, axis: int, *, format: str = "e4m3fn") -> Any:
    elements, scales = reference.quantize(x, axis, format=format)
    return elements.view(np.uint8), scales


def sixteen_rows(x: Array, axis: int, *, format: str = "e4m3fn") -> Any:
    """Rows are quantized by sixteens; what is left over stays zero."""
    elements, scales = reference.quantize(x, axis, format=format)
    rows = np.moveaxis(elements.view(np.uint8), axis, -1)
    kept = rows.reshape(-1, rows.shape[-1]).copy()
    kept[len(kept) // 16 * 16 :] = 0
    codes = np.ascontiguousarray(np.moveaxis(kept.reshape(rows.shape), -1, axis))
    return codes.view(elements.dtype), scales


def keeps_infinity(x: Array, axis: int, *, format: str = "e4m3fn") -> Any:
    """E5M2 has infinities, and a block with one keeps it, under the largest scale."""
    elements, scales = reference.quantize(x, axis, format=format)
    with np.errstate(all="ignore"):
        rows = np.moveaxis(x.astype(np.float32), axis, -1)
        blocks = rows.reshape(*rows.shape[:-1], -1, BLOCK)
        infinite = np.isinf(np.abs(blocks).max(axis=-1))
    if format != "e5m2" or not infinite.any():
        return elements, scales
    row = FORMATS[format]
    codes = np.where(np.isinf(blocks), row.inf_codes[0] | (row.sign_bit * (blocks < 0)), 0).astype(np.uint8)
    spread = np.moveaxis(np.repeat(infinite, BLOCK, axis=-1), -1, axis)
    changed = np.where(spread, np.moveaxis(codes.reshape(rows.shape), -1, axis), elements.view(np.uint8))
    largest = np.where(np.moveaxis(infinite, -1, axis), np.uint8(254), scales.view(np.uint8))
    return np.ascontiguousarray(changed).view(elements.dtype), np.ascontiguousarray(largest).view(scales.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# The faults


def _gemm(op: str, name: str, gate: str, kind: str, what: str, **parts: Any) -> Fault:
    return _fault(op, name, p.kernel(op, Parts(**parts)), gate, kind, what)


def _window(name: str, gate: str, kind: str, what: str, **parts: Any) -> Fault:
    # Only `neighbours_nan`, which is the shipped kernel itself, keeps the strict terms that it cannot meet.
    reach = 0 if gate == "special" else windowed.NAN_REACH
    function = model(**parts)
    return _fault("wgrad", name, function, gate, kind, what, accumulator="mfma-scale-128", nan_reach=reach)


def _quant(name: str, gate: str, kind: str, what: str, **parts: Any) -> Fault:
    return _fault("quantize", name, p.quantizer(QuantizeParts(**parts)), gate, kind, what)


_GEMM_FAULTS = (
    # scale bytes
    _gemm("forward", "zero_scale_is_zero", "exact", "scale byte", "Scale 0x00 is zero.", values=scale_means(0, 0.0)),
    _gemm("wgrad", "zero_scale_is_zero", "exact", "scale byte", "Scale 0x00 is zero.", values=scale_means(0, 0.0)),
    _gemm("dgrad", "nan_scale_is_infinite", "special", "scale byte", "Scale 0xFF is infinity.",
          values=scale_means(255, np.inf)),
    _gemm("forward", "nan_scale_is_a_number", "special", "scale byte", "Scale 0xFF is 2^128.",
          values=scale_means(255, 2.0**128)),
    _gemm("forward", "no_scales", "exact", "scales unused", "No scale is applied.",
          cut=piece(lambda x: replace(x, a_scales=0 * x.a_scales + 127, b_scales=0 * x.b_scales + 127))),
    _gemm("wgrad", "no_x_scales", "exact", "scales unused", "One operand's scales are not applied.",
          cut=piece(lambda x: replace(x, b_scales=0 * x.b_scales + 127))),
    # scale selection and layout
    _gemm("forward", "neighbours_scale", "exact", "scale select", "One K block uses the scale of the block before it.",
          values=block_of(lambda t: np.where(t // BLOCK == 1, 0, t // BLOCK))),
    _gemm("dgrad", "previous_rows_scale", "exact", "scale select", "One row uses the scales of the row before it.",
          cut=piece(lambda x: replace(x, a_scales=previous_row(x.a_scales)))),
    _gemm("wgrad", "scale_next_to_its_data", "exact", "scale select",
          "Each lane applies the scale it holds to the data it holds.", values=block_of(next_to_its_data)),
    _gemm("forward", "scale_next_to_its_data", "exact", "scale select",
          "Each lane applies the scale it holds to the data it holds.", values=block_of(next_to_its_data)),
    _gemm("forward", "blocks_of_64", "exact", "scale select", "Two blocks share a scale.",
          values=block_of(lambda t: t // 64 * 2)),
    _gemm("wgrad", "transposed_scales", "exact", "scale stride", "A scale plane is read transposed.",
          cut=piece(lambda x: replace(x, a_scales=x.a_scales.reshape(x.a_scales.shape[::-1]).T))),
    _gemm("forward", "pitched_scales", "exact", "scale stride", "Scale rows are read with a pitch rounded up to 8.",
          cut=whole(lambda c: replace(c, a_scales=repitched(c.a_scales)))),
    _gemm("dgrad", "scales_along_k", "exact", "scale stride", "The weights' scales are taken to run along K.",
          cut=lambda c, g: replace(p.cut(c, g), b_scales=c.b_scales[g].reshape(p.cut(c, g).b_scales.shape))),
    _gemm("forward", "padding_scaled_by_one", "exact", "scale padding",
          "K is rounded up to 128: the next row's elements come in under a scale of 1.0.", cut=piece(over_the_end)),
    _gemm("forward", "packed_rows", "exact", "packing unit", "Rows that do not fill a pack of four go unscaled.",
          cut=piece(last_rows_unscaled)),
    _fault("forward", "scales_past_the_plane", before("forward", read_past), "contract", "scale bounds",
           "One scale load too many."),
    _fault("wgrad", "scales_past_the_plane", before("wgrad", read_past), "contract", "scale bounds",
           "One scale load too many."),
    _gemm("forward", "previous_expert", "exact", "expert base", "Expert g uses the weights of expert g - 1.",
          cut=from_expert(lambda g, c: max(g - 1, 0))),
    _gemm("dgrad", "previous_experts_scales", "exact", "expert base",
          "Expert g uses its own weights with the scales of expert g - 1.",
          cut=from_expert(lambda g, c: max(g - 1, 0), scales_only=True)),
    _gemm("forward", "experts_compacted", "exact", "expert base", "Experts are counted without the empty ones.",
          cut=from_expert(filled_before)),
    _gemm("wgrad", "stored_where_scheduled", "exact", "expert base",
          "A gradient is stored at its expert's place in the schedule.", place=where_scheduled),
    _gemm("wgrad", "starts_for_ends", "exact", "boundary", "The cumulative ends are taken for starts.",
          spans=spans_of(starts_for_ends)),
    # formats and special values
    _gemm("forward", "e5m2_read_as_e4m3", "exact", "format mix-up", "E5M2 is read as E4M3.",
          values=format_means(e5m2="e4m3fn")),
    _gemm("wgrad", "e5m2_read_as_e4m3", "exact", "format mix-up", "E5M2 gradients are read as E4M3.",
          values=format_means(e5m2="e4m3fn")),
    _gemm("forward", "ocp_read_as_fnuz", "exact", "format mix-up", "OCP codes are read as FNUZ: half the value.",
          values=format_means(e4m3fn="e4m3fnuz", e5m2="e5m2fnuz")),
    _gemm("forward", "fnuz_read_as_ocp", "exact", "format mix-up", "FNUZ codes are read as OCP: twice the value.",
          values=format_means(e4m3fnuz="e4m3fn", e5m2fnuz="e5m2")),
    _gemm("forward", "one_nan_code", "special", "format mix-up", "Of the two NaN codes of E4M3 only 0x7F is one.",
          values=code_means("e4m3fn", {0xFF: -480.0})),
    _gemm("forward", "fnuz_nan_is_zero", "special", "format mix-up", "0x80, the NaN of FNUZ, is read as -0.",
          values=code_means("e4m3fnuz", {0x80: -0.0})),
    _gemm("forward", "nan_dropped", "special", "special values", "NaN elements count as zero.", dot=without_nan),
    _gemm("dgrad", "nan_spread", "special", "special values", "One NaN makes its expert's whole result NaN.",
          dot=spreading_nan),
    _gemm("forward", "infinity_is_finite", "special", "special values", "Infinity counts as the largest finite value.",
          values=code_means("e5m2", {0x7C: 57344.0, 0xFC: -57344.0})),
    # tails and boundaries
    _gemm("forward", "k_tail_dropped", "exact", "partial tile", "What is left of K after whole steps of 64 is dropped.",
          cut=piece(lambda x: contraction(x, x.a.shape[1] // 64 * 64))),
    _gemm("wgrad", "last_block_twice", "exact", "partial tile", "A group's last 32 tokens are counted twice.",
          dot=last_block_twice),
    _gemm("wgrad", "block_dropped", "exact", "partial tile", "A long group loses 32 tokens in its middle.",
          dot=block_dropped),
    _gemm("forward", "tile_of_one_expert", "exact", "boundary",
          "A tile of 64 rows belongs, whole, to the expert of its first row.", spans=spans_of(tile_spans)),
    _gemm("dgrad", "tile_of_one_expert", "exact", "boundary",
          "A tile of 64 rows belongs, whole, to the expert of its first row.", spans=spans_of(tile_spans)),
    _gemm("forward", "one_bucket", "exact", "dispatch bucket", "Groups of 33 to 64 rows lose the last block of K.",
          cut=piece(lambda x: contraction(x, x.a.shape[1] - BLOCK) if 32 < len(x.a) <= 64 else x)),
    _gemm("forward", "e5m2_subnormals", "exact", "element rounding", "Subnormal E5M2 elements are zero.",
          values=code_means("e5m2", dict.fromkeys((1, 2, 3, 129, 130, 131), 0.0))),
    _gemm("wgrad", "e4m3fnuz_subnormals", "exact", "element rounding", "Subnormal E4M3FNUZ elements are zero.",
          values=code_means("e4m3fnuz", dict.fromkeys((*range(1, 8), *range(129, 136)), 0.0))),
    _gemm("wgrad", "empty_wraps", "empty", "bound wraps", "An empty group's last index wraps, to the last token.",
          spans=spans_of(wrapped_spans)),
    _gemm("wgrad", "never_reset", "empty", "empty group", "An empty group's accumulator holds the one before it.",
          dot=never_reset()),
    _gemm("wgrad", "minus_zero", "empty", "empty group", "An empty group's gradient is -0.", dot=minus_zero),
    _gemm("forward", "padded_nan", "padding", "padded NaN", "Padded rows are multiplied by zero inside their tile.",
          done=tile_of_padding),
    _fault("forward", "tail_kept", p.kernel("forward", Parts(done=variants.leave_tail)), "contract", "unwritten",
           "Rows past the tokens keep what memory held."),
    _fault("dgrad", "tail_kept", p.kernel("dgrad", Parts(done=variants.leave_tail)), "contract", "unwritten",
           "Rows past the tokens keep what memory held."),
    _gemm("forward", "tail_computed", "padding", "unwritten", "The last expert's rows go on to the end of the buffer.",
          spans=spans_of(lambda s, length: [*s[:-1], (s[-1][0], length)]), done=variants.leave_tail),
    _fault("forward", "few_workers", visiting("forward", few_workers), "contract", "few workers",
           "Four workers share the tiles evenly and leave the remainder."),
    _fault("wgrad", "few_workers", visiting("wgrad", few_workers), "contract", "few workers",
           "Four workers share the tiles evenly and leave the remainder."),
    _fault("wgrad", "odd_grids", visiting("wgrad", even_grid), "contract", "tile order",
           "The 2 x 2 walk is right for grids with even sides only."),
    _gemm("forward", "int16_index", "exact", "index overflow", "The weights are addressed through 16 bits.",
          cut=whole(lambda c: replace(c, b=narrow_index(c.b)))),
    _gemm("forward", "expert_in_a_byte", "exact", "index overflow", "An expert's number is kept in eight bits.",
          cut=from_expert(lambda g, call: g & 255)),
    _gemm("forward", "warp_search", "exact", "boundary", "The next expert is looked for among the next 32 alone.",
          spans=spans_of(warp_search)),
    _gemm("forward", "single_row", "exact", "dispatch bucket", "Groups of one row lose the last block of K.",
          cut=piece(lambda x: contraction(x, x.a.shape[1] - BLOCK) if len(x.a) == 1 else x)),
    _gemm("forward", "square_weights", "exact", "layout guess", "Square weights are taken for transposed ones.",
          cut=piece(told_by_shape)),
    _gemm("wgrad", "third_of_three", "exact", "packing unit", "Of three columns left over the last is lost.",
          done=third_of_three),
    _gemm("forward", "third_of_three", "exact", "packing unit", "Of three columns left over the last is lost.",
          done=third_of_three),
    # bias
    _gemm("forward", "bias_lost", "exact", "bias", "The bias is not added.", bias=lambda bias, g: np.zeros(1)),
    _gemm("forward", "bias_of_expert_0", "exact", "bias", "Every expert gets the first one's bias.",
          bias=lambda bias, g: bias[0]),
    _gemm("forward", "bias_stride", "exact", "bias", "Bias rows are read with half their stride.",
          bias=lambda bias, g: bias.reshape(-1)[g * (bias.shape[1] // 2) :][: bias.shape[1]]),
    _gemm("forward", "bias_in_bfloat16", "exact", "bias", "The bias is rounded to bfloat16 before it is added.",
          bias=lambda bias, g: reference.narrow(bias[g], ml_dtypes.bfloat16).astype(np.float64)),
    # sums and rounding
    _gemm("forward", "split_k_rounded", "exact", "split-K", "Partial sums are rounded to bfloat16.",
          dot=split_into(ml_dtypes.bfloat16, running=False)),
    _gemm("wgrad", "packed_bf16_atomics", "exact", "split-K", "Partial sums are added up in bfloat16.",
          dot=split_into(ml_dtypes.bfloat16, running=True)),
    _gemm("dgrad", "float16_accumulator", "exact", "split-K", "Partial sums are added up in float16.",
          dot=split_into(np.float16, running=True)),
    _fault("dgrad", "split_where_long", p.kernel("dgrad", Parts(dot=split_where_long)), "exact", "split-K",
           "Partial sums of long contractions are stored in the output's type.", out_dtypes=("bfloat16",)),
    _fault("wgrad", "split_where_long", p.kernel("wgrad", Parts(dot=split_where_long)), "exact", "split-K",
           "Partial sums of long contractions are stored in the output's type.", out_dtypes=("bfloat16",)),
    _gemm("forward", "accumulator_13bit", "bounded", "rounding",
          "An accumulator with a 13-bit fraction passes for float32.", dot=variants.truncating(32, 13)),
    _gemm("wgrad", "accumulator_13bit", "bounded", "rounding",
          "An accumulator with a 13-bit fraction passes for float32.", dot=variants.truncating(32, 13)),
    _gemm("wgrad", "atomics", "reproducible", "not reproducible", "Partial sums are added in the order they arrive.",
          dot=as_they_arrive),
    _gemm("wgrad", "order_by_process", "reproducible", "not reproducible",
          "Every process adds up in an order of its own.", dot=by_process),
    _gemm("wgrad", "while_tuning", "reproducible", "not reproducible",
          "The first calls of a process are tuning runs with another split.", dot=while_tuning()),
    _gemm("dgrad", "stochastic", "reproducible", "not reproducible", "The result is narrowed up or down at random.",
          narrow=stochastic),
    _gemm("forward", "truncated", "exact", "rounding", "float32 is written, and truncated to bfloat16.",
          narrow=cut_bits(0)),
    _gemm("dgrad", "ties_away", "exact", "rounding", "Ties are rounded away from zero.", narrow=cut_bits(0x8000)),
    _gemm("forward", "through_float16", "exact", "rounding", "The result is narrowed by way of float16.",
          narrow=through(np.float16)),
    _gemm("forward", "through_bfloat16", "exact", "rounding", "The result is narrowed by way of bfloat16.",
          narrow=through(ml_dtypes.bfloat16)),
    _gemm("forward", "saturating", "exact", "overflow", "A result past the largest saturates.", narrow=saturating),
    _gemm("wgrad", "saturating_bfloat16", "exact", "overflow", "A result past the largest bfloat16 saturates.",
          narrow=saturating_bfloat16),
    _gemm("dgrad", "flushing_float32", "exact", "rounding", "A subnormal float32 is stored as zero.",
          narrow=flushing_float32),
    _gemm("forward", "scale_sum_clamped", "exact", "scale product", "The two exponents' sum is clamped to a byte.",
          **scales_together(lambda exponent: np.minimum(exponent, 127))),
    _gemm("wgrad", "scale_sum_wraps", "exact", "scale product", "The two exponents' sum outgrows its byte.",
          **scales_together(lambda exponent: np.where(exponent < 0, exponent, (exponent + 127) % 256 - 127))),
    _gemm("forward", "wrong_tile", "exact", "subtle", "One 16 x 16 tile is a copy of another.",
          done=afterwards(wrong_tile)),
    _gemm("wgrad", "one_ulp", "exact", "subtle", "One element is off by one unit in the last place.",
          done=afterwards(one_ulp)),
    _gemm("dgrad", "some_nan", "exact", "subtle", "One element in twenty is NaN.",
          done=afterwards(every_twentieth_nan)),
    _gemm("forward", "zeros", "bounded", "subtle", "The result is zero.", done=afterwards(all_zero)),
    # state
    _fault("forward", "race", every_seventeenth("forward"), "reproducible", "not reproducible",
           "One launch in seventeen loses a race."),
    _fault("dgrad", "adds_at_first", adds_at_first("dgrad"), "reproducible", "accumulates",
           "The first call of a process adds to what the output held."),
    _fault("forward", "cached_weights", remembering("forward", shapes, 2, 3), "exact", "cache key",
           "The weights of an earlier call of the same shapes are used again."),
    _fault("forward", "first_size", first_size("forward"), "contract", "cache key",
           "The first call's number of rows is compiled in."),
    _fault("forward", "returns_early", returns_early("forward"), "contract", "not reproducible",
           "It returns before the result is there."),
    _fault("dgrad", "cached_call", remembering("dgrad", shapes, 0, 1, 2, 3, 4), "exact", "cache key",
           "An earlier call of the same shapes is answered again."),
    _fault("wgrad", "replayed_offsets", remembering("wgrad", shapes, 4), "exact", "replay",
           "The offsets of an earlier call of the same shapes are used again."),
    _fault("wgrad", "nothing_to_do", nothing_to_do("wgrad"), "empty", "no tokens",
           "Without tokens an earlier call's result is returned."),
    # contract
    _fault("forward", "ignores_strides", after("forward", contiguous), "contract", "output strides",
           "The caller's output is written as if it were contiguous."),
    _fault("wgrad", "ignores_strides", after("wgrad", contiguous), "contract", "output strides",
           "The caller's output is written as if it were contiguous."),
    _fault("forward", "ignores_out", ignores("forward", "out"), "contract", "unwritten",
           "The caller's output is not written at all."),
    _fault("forward", "ignores_out_dtype", ignores("forward", "out_dtype"), "contract", "contract",
           "Another output type than bfloat16 is asked for in vain."),
    _fault("wgrad", "float32_result", after("wgrad", lambda r, out: r.astype(np.float32)), "contract", "contract",
           "The result is float32 and not bfloat16."),
    _fault("dgrad", "transposed_result", after("dgrad", lambda r, out: r.T), "contract", "contract",
           "The result is transposed."),
    _fault("wgrad", "one_buffer", one_buffer("wgrad"), "contract", "replay",
           "A result is returned in the memory of the one before it."),
    _fault("forward", "two_buffers", two_buffers("forward"), "contract", "replay",
           "Results are returned in two pieces of memory by turns."),
    _fault("forward", "reads_before", before("forward", read_before), "contract", "scale bounds",
           "Four bytes before the offsets are read."),
    _fault("forward", "writes_ahead", after("forward", ahead), "contract", "contract",
           "Two bytes before the output are overwritten."),
    _fault("forward", "writes_behind", after("forward", behind), "contract", "contract",
           "Four bytes behind the output are overwritten."),
    _fault("forward", "changes_input", before("forward", spoil_operand), "contract", "contract",
           "A bit of an operand is flipped."),
    _fault("forward", "returns_none", after("forward", lambda r, out: None), "contract", "contract",  # type: ignore[arg-type,return-value]
           "Nothing is returned."),
    # process
    _fault("forward", "crashes", before("forward", crash), "contract", "process", "It reads address 0."),
    _fault("forward", "exits", before("forward", exit_quietly), "contract", "process",
           "It ends its process with status 0."),
    _fault("forward", "raises_exit", before("forward", exit_politely), "contract", "process", "It raises SystemExit."),
    _fault("forward", "killed", before("forward", kill_itself), "contract", "process", "It is killed."),
    _fault("forward", "closes_files", before("forward", close_everything), "contract", "process",
           "It closes every file descriptor."),
    _fault("forward", "hangs", before("forward", hang), "contract", "process", "It never returns.", seconds=2.0),
    _fault("forward", "eats_memory", before("forward", eat), "contract", "process", "It allocates without end.",
           seconds=20.0, gibibytes=1.0),
    _fault("wgrad", "hangs_without_tokens", before("wgrad", hang_without_tokens), "contract", "no tokens",
           "With every group empty it never returns.", seconds=2.0),
    _fault("forward", "divides_by_tokens", before("forward", divide_by_tokens), "contract", "no tokens",
           "With every group empty it divides by zero."),
    _fault("dgrad", "divides_by_rows", before("dgrad", divide_by_rows), "contract", "no tokens",
           "With no row at all it divides by zero."),
)  # fmt: skip

_WINDOW_FAULTS = (
    _window("mask_dy_only", "exact", "mask", "Only dY's scales are masked.", mask_b=no_mask),
    _window("mask_x_only", "exact", "mask", "Only X's scales are masked.", mask_a=no_mask),
    _window("mask_is_one", "exact", "mask", "The masking scale is 127, which is 1.0.",
            mask_a=mask_with_one, mask_b=mask_with_one),
    _window("no_upper_bound", "exact", "mask", "Tokens after the group are not masked.", inside=no_upper_bound),
    _window("one_block_more", "exact", "mask", "The next group's first 32 tokens are not masked.",
            inside=one_block_more),
    _window("one_block_less", "exact", "mask", "The group's last 32 tokens are masked.", inside=one_block_less),
    _window("neighbours_nan", "special", "special values",
            "A NaN among the neighbour's tokens survives a mask of scales alone, unannounced."),
    _window("padding_not_zeroed", "padding", "padded NaN", "The padding is not zeroed first.", clear=no_clearing),
    _window("padding_zeroed_too_early", "contract", "partial tile",
            "Zeroing begins at a multiple of 128 and takes tokens along.", clear=clear_from_last_tile),
    _window("unbounded_scales", "exact", "scale bounds", "Scales read out of range are 0xFF.",
            load_scales=load_unbounded, mask_a=mask_but_bounds, mask_b=mask_but_bounds),
    _window("start_not_rounded", "exact", "window", "The window starts at the group: wide scale loads are misaligned.",
            window=from_start, load_scales=load_aligned),
    _window("last_step_dropped", "exact", "window", "The last, partial step is dropped.", window=full_steps_only),
    _window("odd_steps", "exact", "window", "Of an odd number of steps the last one is not run.", window=pairs_only),
    _window("empty_not_stored", "contract", "empty group", "An empty expert's output is left as allocated.",
            zero_empty=False),
    _window("truncated", "exact", "rounding", "The float32 accumulator is truncated to bfloat16.", finish=chopped),
    _fault("wgrad", "two_roundings_a_step",
           model(step=halves), "lineage", "lineage", "Right, but not the bits of the build it replaces.",
           replaces="wgrad/numpy_windowed_plain", nan_reach=windowed.NAN_REACH),
)  # fmt: skip

_QUANTIZE_FAULTS = (
    _quant("log2", "exact", "exponent off by one", "The exponent comes from a float32 logarithm.", byte=from_log2),
    _quant("division", "exact", "exponent off by one", "The exponent comes from a division.", byte=from_division),
    _quant("ceil", "exact", "exponent off by one", "The rule is ceil and not floor.",
           byte=by_rule(lambda m, row: m > 0)),
    _quant("even", "exact", "exponent off by one", "The rule is even and not floor.",
           byte=by_rule(lambda m, row: (m + (1 << (22 - row.mantissa_bits))) >> 23)),
    _quant("rceil", "exact", "exponent off by one", "The rule is rceil and not floor.",
           byte=by_rule(lambda m, row: m > 0x600000)),
    _quant("r175", "exact", "exponent off by one", "The rule is r175 and not floor.",
           byte=by_rule(lambda m, row: m >= 0x600000)),
    _quant("emax", "exact", "format mix-up", "Every format has the largest exponent of E4M3.", byte=emax_of_e4m3),
    _quant("nan_lost", "special", "NaN in the maximum", "A NaN is ignored in the maximum.", maximum=ignoring_nan),
    _quant("infinity_is_finite", "special", "NaN in the maximum", "An infinity counts as a finite maximum.",
           maximum=finite_infinity),
    _quant("signed_maximum", "exact", "element rounding", "The maximum is taken without magnitudes.", maximum=signed),
    _quant("two_blocks", "exact", "scale select", "Two blocks share a scale.", maximum=two_blocks),
    _quant("maximum_reciprocal", "exact", "reciprocal", "1 / maximum is flushed to zero.", scaled=flushed_reciprocal),
    _quant("scale_reciprocal", "exact", "tiny block", "The reciprocal of a flushed scale is infinite.",
           scaled=float32_reciprocal),
    _quant("tiny_flushed", "exact", "tiny block", "The smallest scale is promoted.", byte=flushed),
    _quant("zero_block", "exact", "scale byte", "A block of zeros gets a scale of 1.0.", byte=zero_is_one),
    _quant("packed", "exact", "packed scales", "Mantissa bits leak into the next of four packed bytes.", byte=leaking),
    _quant("ties_away", "exact", "element rounding", "Ties are rounded away from zero.", round=ties_away),
    _quant("ties_up", "exact", "element rounding", "Ties are rounded up.", round=ties_up),
    _quant("truncates", "exact", "element rounding", "Elements are truncated.", round=toward_zero),
    _quant("stochastic", "reproducible", "not reproducible", "Elements are rounded at random.", round=at_random),
    _quant("large_saturates", "exact", "element rounding", "The top binade becomes the maximum.",
           round=large_saturates),
    _quant("overflow_nan", "exact", "overflow", "What rounds past the maximum is NaN.", round=no_saturation),
    _quant("no_subnormals", "exact", "element rounding", "Subnormal elements are zero.", round=no_subnormals),
    _quant("no_minus_zero", "exact", "element rounding", "-0 becomes +0.", round=no_minus_zero),
    _quant("bfloat16_first", "exact", "rounding", "float32 input is rounded to bfloat16 first.", scaled=bfloat16_first),
    _quant("ocp_codes", "exact", "format mix-up", "FNUZ elements are written as OCP codes.", codes=as_ocp),
    _fault("quantize", "sixteen_rows", sixteen_rows, "exact", "packing unit", "Rows beyond a multiple of 16 are lost."),
    _fault("quantize", "keeps_infinity", keeps_infinity, "special", "special values", "E5M2 infinities are kept."),
    _fault("quantize", "last_axis", last_axis, "contract", "contract", "The axis is ignored."),
    _fault("quantize", "changes_input", spoils_input, "contract", "contract", "The input is changed."),
    _fault("quantize", "bare_bytes", bare_bytes, "contract", "contract", "Elements come back as uint8."),
)  # fmt: skip

FAULTS: tuple[Fault, ...] = (*_GEMM_FAULTS, *_WINDOW_FAULTS, *_QUANTIZE_FAULTS)
