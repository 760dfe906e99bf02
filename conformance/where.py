"""Where two outputs differ, and by how much, in words.

All of it looks at a slab of rows at a time: of an output with a thousand million elements all may be wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxgate.conformance.case import Case
from mxgate.conformance.launch import Array

I64 = NDArray[np.int64]
Bool = NDArray[np.bool_]

MOST = 20  # differences that are kept
SLAB = 1 << 22  # elements looked at together
TILE = 16
PARTS = ("element", "scale")  # what a quantizer returns
AXES = {"forward": ("row", "n"), "dgrad": ("row", "k"), "wgrad": ("n", "k"), "quantize": ("row", "column")}


def bits(array: Array) -> NDArray[Any]:
    """The array's bit patterns, as unsigned integers of its item size."""
    return np.ascontiguousarray(array).view(np.dtype(f"u{array.dtype.itemsize}"))


def unequal(got: Array, want: Array) -> Bool:
    """Where the bits differ; any two NaN, and any two zeros, are the same."""
    x, y = got.astype(np.float64), want.astype(np.float64)
    return np.asarray(~((bits(got) == bits(want)) | (np.isnan(x) & np.isnan(y)) | ((x == 0) & (y == 0))))


def steps(got: Array, want: Array) -> I64:
    """How many representable numbers lie between two arrays of one floating-point type."""
    width = 8 * got.dtype.itemsize
    ordered = []
    for array in (got, want):
        pattern = bits(array).astype(np.int64)
        ordered.append(np.where(pattern >> (width - 1), (1 << (width - 1)) - pattern, pattern))
    return np.asarray(np.abs(ordered[0] - ordered[1]))


def show(array: Array, index: tuple[int, ...]) -> str:
    """An element's bits and value: 0x3f80 (1)."""
    element = array[index]
    pattern = int(bits(array[index].reshape(1))[0])
    return f"0x{pattern:0{2 * array.dtype.itemsize}x} ({float(element):g})"


def place(case: Case, index: Sequence[int], part: int = 0) -> str:
    """Coordinates in words: "expert 2, n 5, k 17", "row 70 (expert 1), n 3", "scale [3, 1]"."""
    at = [int(i) for i in index]
    if case.op == "quantize":
        return f"{PARTS[part]} {at}"
    if case.op == "wgrad":
        return f"expert {at[0]}, n {at[1]}, k {at[2]}"
    expert = int(np.searchsorted(np.cumsum(case.sizes), at[0], side="right"))
    whose = f"expert {expert}" if expert < case.experts else "past the last offset"
    return f"row {at[0]} ({whose}), {AXES[case.op][1]} {at[1]}"


def groups(case: Case, array: NDArray[Any]) -> list[tuple[int, NDArray[Any]]]:
    """(expert, its part of an array shaped like the output, as a matrix) for experts that have one."""
    if case.op == "wgrad":
        return list(enumerate(array))
    ends = np.cumsum((0, *case.sizes)).tolist()
    return [(g, array[start:end]) for g, (start, end) in enumerate(pairwise(ends)) if start < end]


def worst_tile(wrong: Bool) -> tuple[int, int, int]:
    """(wrong elements, first row, first column) of the TILE x TILE tile of a matrix that has most of them."""
    padded = np.pad(wrong, [(0, -length % TILE) for length in wrong.shape])
    tiles = padded.reshape(padded.shape[0] // TILE, TILE, -1, TILE).sum(axis=(1, 3))
    i, j = np.unravel_index(int(tiles.argmax()), tiles.shape)
    return int(tiles[i, j]), int(i) * TILE, int(j) * TILE


def tile_map(wrong: Bool, most: tuple[int, int] = (24, 64)) -> tuple[int, tuple[str, ...]]:
    """(side, a line a row of tiles) of a matrix: "." for a tile that is right, "#" for one that is wrong all over, else
    how many tenths of it are wrong, 1 at least and 9 at most. side: TILE, or twice that and so on until it fits."""
    side = TILE
    while any(-(-length // side) > limit for length, limit in zip(wrong.shape, most, strict=True)):
        side *= 2
    lines_ = []
    for i in range(0, wrong.shape[0], side):
        shares = [wrong[i : i + side, j : j + side].mean() for j in range(0, wrong.shape[1], side)]
        marks = ("." if s == 0 else "#" if s == 1 else str(min(9, max(1, int(10 * s)))) for s in shares)
        lines_.append("".join(marks))
    return side, tuple(lines_)


def among(indices: I64, total: int, name: str) -> str:
    """ "all 64 rows", "row 5", "rows 3, 7, 11", "rows 16..31", "17 of 64 rows (0, 1, 5, 6 ...)"; of "n", "all 64 n"."""
    many = name if len(name) == 1 else f"{name}s"
    if indices.size == 1:
        return f"{name} {indices[0]}"
    if indices.size == total:
        return f"all {total} {many}"
    if int(indices[-1] - indices[0]) + 1 == indices.size:
        return f"{many} {indices[0]}..{indices[-1]}"
    first = ", ".join(str(i) for i in indices[:4])
    return f"{many} {first}" if indices.size <= 4 else f"{indices.size} of {total} {many} ({first} ...)"


def _slabs(wrong: Bool) -> Iterator[tuple[int, Bool]]:
    """(first row, rows) of the mask as a matrix, SLAB elements at a time, those in which anything is wrong."""
    if not wrong.size:
        return
    flat = wrong.reshape(-1, wrong.shape[-1])
    rows = max(1, SLAB // flat.shape[1])
    for start in range(0, len(flat), rows):
        if (slab := flat[start : start + rows]).any():
            yield start, slab


def first_wrong(wrong: Bool, most: int) -> list[tuple[int, ...]]:
    """The indices of the first `most` wrong elements, in order."""
    found: list[tuple[int, ...]] = []
    for start, slab in _slabs(wrong):
        flat = np.flatnonzero(slab)[: most - len(found)] + start * slab.shape[1]
        found += [tuple(map(int, index)) for index in zip(*np.unravel_index(flat, wrong.shape), strict=True)]
        if len(found) >= most:
            break
    return found


def lines(
    case: Case, wrong: Sequence[Bool], got: Sequence[Array], want: Sequence[Array] | None, against: str = "expected"
) -> tuple[str, ...]:
    """The first MOST wrong elements with both bit patterns; of a quantizer the scales first, for elements follow them.

    against: the word for what they are held against."""
    out: list[str] = []
    for part in reversed(range(len(wrong))):
        # Half of the lines at most are scales, if elements are wrong as well.
        most = MOST // 2 if part and wrong[0].any() else MOST - len(out)
        for at in first_wrong(wrong[part], most):
            text = f"{place(case, at, part)}: {show(got[part], at)}"
            out.append(text + (f", {against} {show(want[part], at)}" if want is not None else ""))
    return tuple(out)


def extent(
    case: Case, wrong: Sequence[Bool], got: Sequence[Array], want: Sequence[Array] | None, against: str = "expected"
) -> tuple[str, ...]:
    """How far the differences reach, and the largest of them, a line each."""
    if case.op == "quantize":
        shares = [f"{np.count_nonzero(mask)} of {mask.size} {name}s" for name, mask in zip(PARTS, wrong, strict=False)]
        return (", ".join(reversed(shares)),) if len(shares) > 1 else ()
    (mask,) = wrong
    reach = [_reach(case, mask)]
    several = np.count_nonzero(mask) > 1  # one alone is told with its coordinates anyway
    if several and want is not None and (far := _farthest(case, mask, got[0], want[0], against)):
        reach.append(far)
    return tuple(reach)


def _reach(case: Case, wrong: Bool) -> str:
    """ "experts 1, 2, 3 of 5; all 64 n, all 96 k", "rows 128..171 (expert 3), all 64 n"."""
    rows, columns = np.zeros(wrong.size // max(wrong.shape[-1], 1), np.bool_), np.zeros(wrong.shape[-1], np.bool_)
    for start, slab in _slabs(wrong):
        rows[start : start + len(slab)] = slab.any(axis=1)
        columns |= slab.any(axis=0)
    axes = AXES[case.op]
    across = among(np.flatnonzero(columns), columns.size, axes[1])
    if case.op == "wgrad":
        of = rows.reshape(wrong.shape[:2])
        inside = np.flatnonzero(of.any(axis=0))
        experts = among(np.flatnonzero(of.any(axis=1)), wrong.shape[0], "expert")
        return f"{experts}; {among(inside, wrong.shape[1], axes[0])}, {across}"
    at = np.flatnonzero(rows)
    whose = np.unique(np.searchsorted(np.cumsum(case.sizes), at, side="right"))
    named = among(whose[whose < case.experts], case.experts, "expert") if (whose < case.experts).any() else ""
    tail = "past the last offset" if (whose >= case.experts).any() else ""
    return f"{among(at, rows.size, axes[0])} ({' and '.join(filter(None, (named, tail)))}); {across}"


def _farthest(case: Case, wrong: Bool, got: Array, want: Array, against: str) -> str:
    """ "farthest 384 ulp: expert 4, n 0, k 0: 0x.. (..), expected 0x.. (..)", and how many NaN should be numbers."""
    flat = [array.reshape(-1, array.shape[-1]) for array in (got, want)]
    most, at, nan = -1, 0, 0
    for start, slab in _slabs(wrong):
        x, y = (array[start : start + len(slab)][slab] for array in flat)
        with np.errstate(invalid="ignore"):
            a, b = x.astype(np.float64), y.astype(np.float64)
        nan += int(np.count_nonzero(np.isnan(a) & ~np.isnan(b)))
        away = np.where(np.isfinite(a) & np.isfinite(b), steps(x, y), -1)
        if away.max(initial=-1) > most:
            most, at = int(away.max()), int(np.flatnonzero(slab)[int(away.argmax())]) + start * slab.shape[1]
    said = []
    if most >= 0:
        index = tuple(map(int, np.unravel_index(at, wrong.shape)))
        pair = f"{show(got, index)}, {against} {show(want, index)}"
        said.append(f"farthest {most} ulp: {place(case, index)}: {pair}")
    if nan:
        said.append(f"{nan} are NaN and should be numbers")
    return "; ".join(said)
