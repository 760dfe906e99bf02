"""Memory in which it shows what a build touched that it should not have, and what it left unwritten.

Every operand ends flush against a page that nobody may touch: reading or writing one byte past a plane is a SIGSEGV (on
macOS a SIGBUS), hence a rejection that names its signal. The bytes on the other side hold a pattern that is compared
after each launch. Memory that the build allocates for itself is filled with the launch's byte: through glibc's
M_PERTURB where there is glibc, and through numpy.empty and numpy.empty_like everywhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxgate.conformance.launch import Array, bytes_of

CANARY = 0xA5
MARGIN = 256  # canary bytes kept in front of every operand and output
GAP = 40  # elements between the rows of a pitched output

_libc = ctypes.CDLL(None, use_errno=True)
_fill_byte: int | None = None


class Plane:
    """`size` bytes that end on a page boundary with an untouchable page behind; ahead: that begin on one, with such a
    page in front.

    data: the bytes. changed(): how many bytes of the margin on the other side no longer hold the pattern, in words.
    """

    def __init__(self, size: int, ahead: bool = False) -> None:
        page = mmap.PAGESIZE
        body = -(-(size + MARGIN) // page) * page
        self._map = mmap.mmap(-1, body + 2 * page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        whole = np.frombuffer(self._map, np.uint8)
        first = page if ahead else page + body - size
        self._margin = whole[page + size : page + body] if ahead else whole[page:first]
        self._margin[:] = CANARY
        self._side = "behind" if ahead else "before"
        self.data = whole[first : first + size]
        for guard in (start, start + page + body):
            if _libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(page), 0):
                raise OSError(ctypes.get_errno(), "mprotect refused a guard page")

    def changed(self) -> str | None:
        count = int(np.count_nonzero(self._margin != CANARY))
        return f"{count} bytes {self._side}" if count else None


@dataclass
class Input:
    """An operand in its plane, with the bytes that it had when it came.

    tokens: (axis, end) of the part that holds tokens, or None. kept: which bytes are not padding, where the plane has
    another layout than that.
    """

    plane: Plane
    pristine: Array
    array: Array
    tokens: tuple[int, int] | None
    kept: NDArray[np.bool_] | None = None

    def repair(self) -> bool:
        """Put the bytes back; True when a token's byte had changed (padding may be zeroed in place)."""
        if _equal(self.plane.data, self.pristine):
            return False
        if self.kept is not None:
            changed = bool(((self.plane.data != self.pristine) & self.kept).any())
            self.plane.data[:] = self.pristine
            return changed
        was = self.pristine.view(self.array.dtype).reshape(self.array.shape)
        now = self.array
        if self.tokens is not None:
            axis, end = self.tokens
            was, now = (np.ascontiguousarray(a[:end] if axis == 0 else a[:, :end]) for a in (was, now))
        changed = not _equal(bytes_of(was), bytes_of(now))
        self.plane.data[:] = self.pristine
        return changed


def _equal(a: Array, b: Array, step: int = 1 << 24) -> bool:
    return all(np.array_equal(a[i : i + step], b[i : i + step]) for i in range(0, a.size, step))


class Out:
    """A caller's output buffer: flush against a guard page, and pitched with canary bytes between its rows."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], *, pitched: bool, fill: int) -> None:
        pitch = shape[-1] + (GAP if pitched else 0)
        rows = int(np.prod(shape[:-1]))
        self.plane = Plane(rows * pitch * dtype.itemsize)
        self.plane.data[:] = CANARY
        self.whole = self.plane.data.view(dtype)
        grid = self.whole.reshape(rows, pitch)
        self._gaps = grid[:, shape[-1] :].view(np.uint8)
        grid[:, : shape[-1]].view(np.uint8)[...] = fill
        self.view = grid.reshape(*shape[:-1], pitch)[..., : shape[-1]]

    def changed(self) -> str | None:
        wrong = np.flatnonzero((self._gaps != CANARY).any(axis=1))
        if wrong.size:
            return f"the gap after row {wrong[0]} of its output, {wrong.size} rows in all"
        return f"{said} its output" if (said := self.plane.changed()) else None


def fill_allocations(byte: int | None) -> None:
    """From now on memory that is allocated and not written holds this byte; None: whatever it held."""
    global _fill_byte
    _fill_byte = byte
    with contextlib.suppress(AttributeError):
        # M_PERTURB is -6; glibc fills with the complement of the value's low byte, and 0 switches it off.
        _libc.mallopt(-6, 0 if byte is None else 0x100 | (byte ^ 0xFF))


def filled(allocate: Callable[..., Array]) -> Callable[..., Array]:
    """numpy.empty or numpy.empty_like with numbers (and only numbers) filled with the launch's byte."""

    @functools.wraps(allocate)
    def wrapper(*args: Any, **kwargs: Any) -> Array:
        array = allocate(*args, **kwargs)
        plain = array.dtype.kind in "iufcV" and not array.dtype.hasobject and array.itemsize
        if plain and _fill_byte is not None:
            array[...] = np.frombuffer(bytes([_fill_byte]) * array.itemsize, array.dtype).reshape(())
        return array

    return wrapper


def fill_byte() -> int | None:
    """The byte that fill_allocations was last told."""
    return _fill_byte
