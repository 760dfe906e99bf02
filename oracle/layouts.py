"""Where the scale of a block lies: the layouts that kernels read scales from, beside plain row-major.

Blackwell's block-scaled matrix instructions take scales in tiles of 128 rows by 4 blocks, 512 bytes each, one tile
after another along the contraction and then down the rows (cuBLAS documentation, "1D block scaling factors layout"). In
a tile the scale of row r and block c is byte

    16 * (r mod 32) + 4 * (r div 32) + c

so that four rows 32 apart sit side by side. A plane that is no multiple of 128 by 4 is filled up with zero bytes.
A grouped product lays out each group by itself, as if it were a plane alone, one group behind the other; that is how
PyTorch's grouped scaled matmul takes them. Groups are rows where an output row is a token, and blocks of the
contraction in a weight gradient.

All functions take any one-byte type and give it back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

ROWS, COLUMNS = 128, 4  # of a tile
TILE = ROWS * COLUMNS


def blocked_size(rows: int, columns: int) -> int:
    """Bytes of a plane of scales [rows, columns] in tiles."""
    return -(-rows // ROWS) * -(-columns // COLUMNS) * TILE


def to_blocked(scales: Array) -> Array:
    """Scales [..., rows, columns] in 128x4 tiles: [..., blocked_size(rows, columns)], contiguous, zeros for padding.

    The last axis counts blocks along the contraction. ValueError for a type that is not one byte wide, or one axis.
    """
    if scales.ndim < 2 or scales.itemsize != 1:
        raise ValueError(f"scales are {scales.dtype} {list(scales.shape)}; expected one byte each in two axes or more")
    *outer, rows, columns = scales.shape
    down, along = -(-rows // ROWS), -(-columns // COLUMNS)
    padded = np.zeros((*outer, down * ROWS, along * COLUMNS), np.uint8)
    padded[..., :rows, :columns] = scales.view(np.uint8)
    # Row 128 i + 32 j + k, column 4 l + m goes to tile (i, l), byte 16 k + 4 j + m.
    tiles = padded.reshape(*outer, down, 4, 32, along, COLUMNS)
    n = len(outer)
    order = (*range(n), n, n + 3, n + 2, n + 1, n + 4)
    flat = np.ascontiguousarray(tiles.transpose(order)).reshape(*outer, down * along * TILE)
    return flat.view(scales.dtype)


def from_blocked(blocked: Array, rows: int, columns: int) -> Array:
    """The inverse of to_blocked: [..., blocked_size(rows, columns)] to [..., rows, columns]. Padding is dropped unread.

    ValueError for another size.
    """
    size = blocked_size(rows, columns)
    if blocked.ndim < 1 or blocked.itemsize != 1 or blocked.shape[-1] != size:
        raise ValueError(
            f"blocked scales are {blocked.dtype} {list(blocked.shape)}; "
            f"expected {size} bytes in the last axis for {rows} rows of {columns} scales"
        )
    outer = blocked.shape[:-1]
    down, along = -(-rows // ROWS), -(-columns // COLUMNS)
    tiles = np.ascontiguousarray(blocked).view(np.uint8).reshape(*outer, down, along, 32, 4, COLUMNS)
    n = len(outer)
    padded = tiles.transpose(*range(n), n, n + 3, n + 2, n + 1, n + 4).reshape(*outer, down * ROWS, along * COLUMNS)
    return np.ascontiguousarray(padded[..., :rows, :columns]).view(blocked.dtype)


def to_blocked_groups(scales: Array, ends: Sequence[int] | NDArray[Any], axis: int) -> Array:
    """Scales [rows, columns] whose groups end at `ends` along `axis`, each group in tiles of its own: flat bytes.

    Group g takes blocked_size of its own rows and columns, an empty one nothing. What lies behind the last end is in no
    group and left out.
    """
    parts = [to_blocked(part) for part in _parts(scales, ends, axis)]
    return np.concatenate([np.zeros(0, scales.dtype), *parts])


def from_blocked_groups(
    blocked: Array, rows: int, columns: int, ends: Sequence[int] | NDArray[Any], axis: int
) -> Array:
    """The inverse of to_blocked_groups: [rows, columns], zeros behind the last end. ValueError for another size."""
    scales = np.zeros((rows, columns), blocked.dtype)
    sizes = [blocked_size(*part.shape) for part in _parts(scales, ends, axis)]
    if blocked.shape != (sum(sizes),):
        raise ValueError(f"blocked scales are {list(blocked.shape)}; expected [{sum(sizes)}] for these groups")
    start = 0
    for part, size in zip(_parts(scales, ends, axis), sizes, strict=True):
        part[...] = from_blocked(blocked[start : start + size], *part.shape)
        start += size
    return scales


def _parts(scales: Array, ends: Sequence[int] | NDArray[Any], axis: int) -> Iterable[Array]:
    """A view of each group's scales."""
    if scales.ndim != 2 or axis not in (0, 1):
        raise ValueError(f"scales are {list(scales.shape)} with groups along axis {axis}; expected two axes")
    start = 0
    for end in map(int, ends):
        if not start <= end <= scales.shape[axis]:
            raise ValueError(f"a group ends at {end}; expected {start} to {scales.shape[axis]} along axis {axis}")
        yield scales[start:end] if axis == 0 else scales[:, start:end]
        start = end
