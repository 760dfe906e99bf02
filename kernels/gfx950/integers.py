"""Integer arithmetic that scalar and vector instructions share: carries, high halves, bit fields, bit counts.

Operands are uint32 arrays (uint64 or int32 where a function says so) that broadcast. Sums and products wrap.
"""

from __future__ import annotations

import numpy as np

from mxgate.kernels.gfx950.state import Array

u32, u64 = np.uint32, np.uint64


def wide(x: Array) -> Array:
    """As uint64."""
    return np.asarray(x).astype(np.uint64)


def wide_signed(x: Array) -> Array:
    """As int64: the value of an int32 or uint32."""
    return np.asarray(x).astype(np.int64)


def add(x: Array, y: Array) -> tuple[Array, Array]:
    """(sum, carry out)."""
    r = x + y
    return r, r < x


def subtract(x: Array, y: Array) -> tuple[Array, Array]:
    """(difference, borrow out)."""
    return x - y, x < y


def add_carry(x: Array, y: Array, c: Array) -> tuple[Array, Array]:
    """(sum with a carry in, carry out)."""
    r = wide(x) + wide(y) + wide(c)
    return r.astype(u32), r >> u64(32) != 0


def subtract_borrow(x: Array, y: Array, c: Array) -> tuple[Array, Array]:
    """(difference with a borrow in, borrow out)."""
    r = wide(x) - wide(y) - wide(c)
    return r.astype(u32), r >> u64(63) != 0


def multiply_high(x: Array, y: Array) -> Array:
    """Bits 32 .. 63 of the product."""
    return ((wide(x) * wide(y)) >> u64(32)).astype(u32)


def multiply_high_signed(x: Array, y: Array) -> Array:
    """Bits 32 .. 63 of the product of two int32, as int32."""
    return ((wide_signed(x) * wide_signed(y)) >> 32).astype(np.int32)


def shift_left_64(x: Array, by: Array) -> Array:
    """A uint64 shifted by the low six bits of a uint32."""
    return x << wide(by & u32(63))


def shift_right_64(x: Array, by: Array) -> Array:
    return x >> wide(by & u32(63))


def shift_right_signed_64(x: Array, by: Array) -> Array:
    """The same of an int64, its sign kept."""
    return x >> wide_signed(by & u32(63))


def mask(width: Array, offset: Array) -> Array:
    """`width` one bits from `offset` on, each below 32."""
    return ((u32(1) << (width & u32(31))) - u32(1)) << (offset & u32(31))


def field(x: Array, offset: Array, width: Array) -> Array:
    """`width` bits of a uint32 or uint64 from `offset` on, both of its type; a width past the type's takes all."""
    x = np.asarray(x)
    one, bits = x.dtype.type(1), 8 * x.dtype.itemsize
    low = np.where(width >= bits, ~x.dtype.type(0), (one << np.minimum(width, one * (bits - 1))) - one)
    return (x >> offset) & low


def field_signed(x: Array, offset: Array, width: Array) -> Array:
    """`width` bits (0 to 32) of an int32 from `offset` on, the highest as their sign, as int32."""
    width = wide_signed(width)
    found = (wide_signed(np.asarray(x).view(np.int32)) >> wide_signed(offset)) & ((np.int64(1) << width) - 1)
    sign = np.where(width > 0, np.int64(1) << np.maximum(width - 1, 0), 0)
    return ((found ^ sign) - sign).astype(np.int32)


def reverse(x: Array) -> Array:
    """The bits in reverse order."""
    b = np.asarray(x)
    for shift, low in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF)):
        b = ((b >> u32(shift)) & u32(low)) | ((b & u32(low)) << u32(shift))
    return (b >> u32(16)) | (b << u32(16))


def ones(x: Array) -> Array:
    """Number of one bits of a uint32 or uint64, as uint32 (np.bitwise_count needs NumPy 2)."""
    b = np.ascontiguousarray(x)
    octets = b.view(np.uint8).reshape(*b.shape, b.dtype.itemsize)
    return _COUNTS[octets].sum(-1, dtype=np.uint32)


_COUNTS = np.array([bin(i).count("1") for i in range(256)], np.uint8)


def first_low(x: Array) -> Array:
    """Index of the lowest one bit, 0xFFFFFFFF where there is none."""
    one = np.asarray(1, x.dtype)
    return np.where(x == 0, u32(0xFFFFFFFF), ones((x & (~x + one)) - one))


def first_high(x: Array) -> Array:
    """Leading zeros of a uint32, 0xFFFFFFFF where it is zero."""
    return np.where(x == 0, u32(0xFFFFFFFF), first_low(reverse(x)))
