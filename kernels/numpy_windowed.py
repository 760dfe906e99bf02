"""A plain model of the shipped ragged weight-gradient kernel: one block per expert and 256 x 256 output tile.

The group boundaries cut the contraction, so a block walks a window of whole 128-token steps that covers its group and
more. What is not the group's is removed by the scales: both operands' bytes become 0x00 (2^-127), and a product with
2^-254 in it is zero in float32. That takes finite data, so the padding is zeroed in place before anything runs.

It takes finite data in the neighbouring groups too: a NaN among their tokens meets a scale of 2^-127 and stays a NaN,
in the gradient of an expert that never saw it. The contract's own terms have a NaN go nowhere else, so these builds
state theirs (NAN_REACH), and every accept of them says so.

Every decision is a small pure function, and Model is the table of them: a kernel in another language can be compared
with it function by function, its ancestors are the same table with other entries, and so are wrong kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mxgate.kernels.build import BLOCK, Build
from mxgate.kernels.numpy_reference import matmul, output, real, spans

Array = NDArray[Any]
F32 = NDArray[np.float32]
Bool = NDArray[np.bool_]
Span = tuple[int, int]

TILE = 256  # rows and columns of an output tile
STEP = 128  # tokens one scaled matrix instruction contracts
BASE = 256  # alignment of the widest scale load: eight bytes, one for each 32 tokens
NAN_REACH = 512  # tokens a window may hold before its group, or after it: the base, two steps, four at least
UNRANKED = 1024  # from this many blocks on, imbalance averages out and ranking costs more than it gains


@dataclass(frozen=True)
class Window:
    """The tokens a block walks: `steps` K-steps of 128 from token `base` on."""

    base: int
    steps: int

    @property
    def tokens(self) -> int:
        return self.steps * STEP


def window(start: int, end: int) -> Window:
    """The window of the group [start, end): base rounded down to 256; steps even in number and at least 4.

    Never shortened, only extended: the loop is unrolled by two and its pipeline is four steps deep.
    """
    base = start // BASE * BASE
    steps = -(-(end - base) // STEP)
    return Window(base, max(steps + steps % 2, 4))


def inside(first: NDArray[np.int64], start: int, end: int) -> Bool:
    """Which 32-token sub-blocks, given by their first tokens, belong to the group [start, end).

    One unsigned comparison: a token before `start` wraps to a huge number. Boundaries are multiples of 32, so a
    sub-block lies wholly in a group or wholly outside it.
    """
    distance: NDArray[np.uint32] = (first - start).astype(np.uint32)
    keep: Bool = distance < np.uint32(end - start)
    return keep


def mask(scales: NDArray[np.uint8], keep: Bool) -> NDArray[np.uint8]:
    """Scale bytes [rows, sub-blocks] with 0x00 wherever a sub-block is not the group's."""
    return np.where(keep, scales, np.uint8(0))


def longest_first(groups: Sequence[Span], blocks: int) -> list[int]:
    """The experts in the order of dispatch: longest window first, the lower index on a tie; by index from 1,024 on."""
    experts = range(len(groups))
    return list(experts) if blocks >= UNRANKED else sorted(experts, key=lambda g: (-window(*groups[g]).steps, g))


def by_index(groups: Sequence[Span], blocks: int) -> list[int]:
    """The experts in the order of dispatch, unranked."""
    return list(range(len(groups)))


def supertile(index: int, rows: int, columns: int) -> tuple[int, int]:
    """The (row, column) of tile `index` in a grid of `rows` x `columns` tiles, walked in 2 x 2 squares.

    Bands of two tile rows, squares of two columns within a band; an odd last row or column leaves a narrower square.
    """
    band, index = divmod(index, 2 * columns)
    height = min(2, rows - 2 * band)
    square, index = divmod(index, 2 * height)
    width = min(2, columns - 2 * square)
    return 2 * band + index // width, 2 * square + index % width


def row_major(index: int, rows: int, columns: int) -> tuple[int, int]:
    """The (row, column) of tile `index`, row after row."""
    return index // columns, index % columns


def clear_padding(elements: Array, scales: Array, tokens: int) -> None:
    """Zero the columns past the last group in place, data and scales: there 0x7F is a NaN and 0 * NaN is NaN."""
    elements.view(np.uint8)[:, tokens:] = 0
    scales.view(np.uint8)[:, tokens // BLOCK :] = 0


def load(plane: Array, rows: Span, columns: Span) -> Array:
    """A [rows, columns] piece of a plane whose bounds are hard: the bytes of what lies outside read as 0."""
    piece = np.zeros((rows[1] - rows[0], columns[1] - columns[0]), np.uint8)
    held = plane.view(np.uint8)[rows[0] : rows[1], columns[0] : columns[1]]
    piece[: held.shape[0], : held.shape[1]] = held
    return piece


def step_sum(acc: F32, a: NDArray[np.float64], b: NDArray[np.float64]) -> F32:
    """acc + a b^T over one K-step, in float64 and then once to float32 (a [rows,128], b [columns,128]).

    A product below float32's range is zero there, so an accumulator of zero keeps its sign: adding +0 last does that.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        total: F32 = (acc + matmul(a, b.T)).astype(np.float32) + np.float32(0)
    return total


def narrow_in_register(acc: F32, dtype: DTypeLike) -> Array:
    """The accumulator rounded to the output type, nearest even."""
    with np.errstate(over="ignore"):
        return acc.astype(np.dtype(dtype))


@dataclass(frozen=True)
class Model:
    """The decisions of a windowed kernel. finish: what is stored of an accumulator; zero_empty: whether an expert
    without tokens gets an explicit store of zeros."""

    window: Callable[[int, int], Window] = window
    inside: Callable[[NDArray[np.int64], int, int], Bool] = inside
    mask_a: Callable[[NDArray[np.uint8], Bool], NDArray[np.uint8]] = mask
    mask_b: Callable[[NDArray[np.uint8], Bool], NDArray[np.uint8]] = mask
    order: Callable[[Sequence[Span], int], list[int]] = longest_first
    tile: Callable[[int, int, int], tuple[int, int]] = supertile
    clear: Callable[[Array, Array, int], None] = clear_padding
    load_data: Callable[[Array, Span, Span], Array] = load
    load_scales: Callable[[Array, Span, Span], Array] = load
    step: Callable[[F32, NDArray[np.float64], NDArray[np.float64]], F32] = step_sum
    finish: Callable[[F32, DTypeLike], Array] = narrow_in_register
    zero_empty: bool = True


SHIPPED = Model()
PLAIN = replace(SHIPPED, order=by_index, tile=row_major)


def run(
    model: Model,
    dy_t: Array,
    dy_scales: Array,
    x_t: Array,
    x_scales: Array,
    offsets: NDArray[np.int32],
    out: Array | None = None,
    out_dtype: DTypeLike | None = None,
) -> Array:
    """dW [E,N,K] of dy_t [N,M] and x_t [K,M] (scales [.,M/32]) by `model`. The operands' padding is zeroed in place."""
    groups = spans(offsets, dy_t.shape[1], BLOCK)
    n, k = dy_t.shape[0], x_t.shape[0]
    dw = output((len(groups), n, k), out, out_dtype)
    for elements, scales in ((dy_t, dy_scales), (x_t, x_scales)):
        model.clear(elements, scales, groups[-1][1])
    rows, columns = -(-n // TILE), -(-k // TILE)
    for g in model.order(groups, len(groups) * rows * columns):
        for index in range(rows * columns):
            i, j = model.tile(index, rows, columns)
            a_rows, b_rows = (i * TILE, min(i * TILE + TILE, n)), (j * TILE, min(j * TILE + TILE, k))
            place = dw[g, slice(*a_rows), slice(*b_rows)]
            if groups[g][0] == groups[g][1]:
                if model.zero_empty:
                    place[...] = 0
                continue
            acc = _block(model, (dy_t, dy_scales, a_rows), (x_t, x_scales, b_rows), groups[g])
            place[...] = model.finish(acc, dw.dtype)
    return dw


def _block(model: Model, a: tuple[Array, Array, Span], b: tuple[Array, Array, Span], group: Span) -> F32:
    """The accumulator of one tile: rows a[2] of dY^T against rows b[2] of X^T over the window of `group`."""
    span = model.window(*group)
    keep = model.inside(np.arange(span.base, span.base + span.tokens, BLOCK), *group)
    acc = np.zeros((a[2][1] - a[2][0], b[2][1] - b[2][0]), np.float32)
    for step in range(span.steps):
        low = span.base + step * STEP
        mine = keep[step * STEP // BLOCK : (step + 1) * STEP // BLOCK]
        pieces = []
        for (elements, scales, rows), masked in ((a, model.mask_a), (b, model.mask_b)):
            data = model.load_data(elements, rows, (low, low + STEP)).view(elements.dtype)
            byte = masked(model.load_scales(scales, rows, (low // BLOCK, (low + STEP) // BLOCK)), mine)
            pieces.append(real(data, byte, 1))
        acc = model.step(acc, *pieces)
    return acc


def wgrad(
    dy_t: Array,
    dy_scales: Array,
    x_t: Array,
    x_scales: Array,
    offsets: NDArray[np.int32],
    *,
    out: Array | None = None,
    out_dtype: DTypeLike | None = None,
) -> Array:
    """dW [E,N,K]: longest group first, tiles in 2 x 2 squares, narrowed in the register. Operands as in run."""
    return run(SHIPPED, dy_t, dy_scales, x_t, x_scales, offsets, out, out_dtype)


def wgrad_plain(
    dy_t: Array,
    dy_scales: Array,
    x_t: Array,
    x_scales: Array,
    offsets: NDArray[np.int32],
    *,
    out: Array | None = None,
    out_dtype: DTypeLike | None = None,
) -> Array:
    """What wgrad replaces, byte for byte: blocks by index, tiles row after row, a float32 plane narrowed afterwards."""
    plane = run(PLAIN, dy_t, dy_scales, x_t, x_scales, offsets, None, np.float32)
    dw = output(plane.shape, out, out_dtype)
    dw[...] = narrow_in_register(plane, dw.dtype)
    return dw


_WGRAD: dict[str, Any] = {
    "op": "wgrad",
    "group_alignment": BLOCK,
    "accumulator": "mfma-scale-128",
    "nan_reach": NAN_REACH,
    "out_dtypes": ("bfloat16", "float16", "float32"),
    "sources": ("mxgate.kernels.numpy_reference", "mxgate.oracle.formats", "mxgate.oracle.groups"),
}
BUILDS = (
    Build("numpy_windowed_plain", target=f"{__name__}:wgrad_plain", **_WGRAD),
    Build("numpy_windowed", target=f"{__name__}:wgrad", replaces="wgrad/numpy_windowed_plain", **_WGRAD),
)
