"""Arrays to MX blocks and back.

`quantize` has two roads to the same bytes. The exact one takes float32 bits apart in int64, block by block,
for any profile and rounding. The quick one works on 16-bit keys and tables built by the exact one; a block
goes to the exact road whenever a key could leave anything open, so the quick road never decides a doubt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .formats import (
    BLOCK,
    E8M0,
    INPUT_DTYPES,
    SCALE_BIAS,
    U8,
    Format,
    check_input,
    check_rounding,
    decode_table,
    encode_bits,
    float32_bits,
    named,
    random_bits,
    scale_table,
)
from .scales import INFINITY_BITS, NAN_BITS, Profile, block_bytes, profile_for

OUTPUT_DTYPES = (np.dtype(np.float64), *INPUT_DTYPES)
Axis = int | tuple[int, int]


@dataclass(frozen=True)
class MXArray:
    """Elements and their block scales.

    elements: the carrier dtype of `format`, C-contiguous, any shape S with at least one axis.
    scales: ml_dtypes.float8_e8m0fnu, C-contiguous, shape S with S[axis] / 32 in place of S[axis].
    axis: the blocked axis, >= 0; for 32x32 blocks a pair of them, ascending. block: 32 or (32, 32).
    ValueError or TypeError, in one line, for anything else.
    """

    elements: NDArray[Any]
    scales: NDArray[Any]
    axis: Axis
    format: str
    block: Axis = BLOCK

    def __post_init__(self) -> None:
        row = named(self.format)
        for role, array, dtype in (("elements", self.elements, row.dtype), ("scales", self.scales, E8M0.dtype)):
            if not isinstance(array, np.ndarray) or array.dtype != dtype:
                found = getattr(array, "dtype", type(array).__name__)
                raise TypeError(f"{role} of a {self.format} array have type {found}; expected {dtype}")
            if not array.flags.c_contiguous:
                raise ValueError(
                    f"{role} of shape {array.shape} are not C-contiguous (strides {array.strides}); "
                    "expected a contiguous copy, np.ascontiguousarray(...)"
                )
        axes = block_axes(self.elements.ndim, self.axis, self.block)
        object.__setattr__(self, "axis", axes[0] if len(axes) == 1 else axes)
        expected = list(self.elements.shape)
        for axis in axes:
            _check_multiple(self.elements.shape, axis)
            expected[axis] //= BLOCK
        if self.scales.shape != tuple(expected):
            raise ValueError(
                f"scales have shape {self.scales.shape}; expected {tuple(expected)}, "
                f"for elements {self.elements.shape} in blocks of {self.block} along axis {self.axis}"
            )
        if row.bits < 8 and self.elements.size and int(self.codes().max()) >> row.bits:
            raise ValueError(
                f"an element code of {int(self.codes().max())} has more than {row.bits} bits ({self.format})"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        return self.elements.shape

    def codes(self) -> U8:
        """The elements as uint8 codes, shape S (a view)."""
        return self.elements.view(np.uint8)

    def scale_codes(self) -> U8:
        """The scales as uint8 codes (a view)."""
        return self.scales.view(np.uint8)


def _check_multiple(shape: tuple[int, ...], axis: int, otherwise: str = "") -> None:
    """ValueError unless 32 divides the axis. otherwise: what else would do, as its message ends."""
    if shape[axis] % BLOCK:
        raise ValueError(
            f"axis {axis} of shape {shape} has length {shape[axis]}; expected a multiple of {BLOCK}{otherwise}"
        )


def block_axes(ndim: int, axis: Any, block: Any) -> tuple[int, ...]:
    """The blocked axes, non-negative and ascending, of an array with `ndim` axes."""
    if block == BLOCK and isinstance(axis, (int, np.integer)) and not isinstance(axis, bool):
        axes: tuple[Any, ...] = (axis,)
    elif block == (BLOCK, BLOCK) and isinstance(axis, tuple) and len(axis) == 2:
        axes = axis
    else:
        raise ValueError(
            f"block={block!r} with axis={axis!r}; "
            "expected block=32 with one axis, or block=(32, 32) with a pair of axes"
        )
    for one in axes:
        if not -ndim <= one < ndim:
            raise ValueError(f"axis {one} is outside an array of {ndim} axes; expected {-ndim} .. {ndim - 1}")
    axes = tuple(sorted(int(one) % ndim for one in axes))
    if len(axes) == 2 and axes != (ndim - 2, ndim - 1):
        raise ValueError(f"axis={axis!r} with block=(32, 32); expected the last two axes, (-2, -1)")
    return axes


def _exact_blocks(
    bits: NDArray[np.uint32],
    precision: int,
    row: Format,
    profile: Profile,
    rounding: str,
    random: NDArray[np.uint64] | None,
) -> tuple[U8, U8]:
    """Element codes and scale bytes of blocks that lie along the last axis of float32 `bits`: the definition."""
    magnitude = bits & np.uint32(0x7FFFFFFF)
    is_nan = magnitude > INFINITY_BITS
    maximum = np.where(is_nan & (profile.nan != "propagates"), np.uint32(0), magnitude).max(-1, keepdims=True)
    if profile.nan == "ignored unless alone":
        maximum = np.where(is_nan.all(-1, keepdims=True), np.uint32(NAN_BITS), maximum)
    byte = block_bytes(maximum, profile, row, precision)

    multiplier = byte
    for value, used in profile.multipliers:
        if isinstance(used, int):
            multiplier = np.where(byte == value, used, multiplier)
    codes = encode_bits(bits, multiplier, row, rounding, random)
    if profile.floor_of_half_up and rounding != "stochastic":
        codes = _round_up_below_half(codes, bits, byte, precision, row)
    if profile.zeros_are_positive:
        codes = np.where(magnitude == 0, 0, codes)
    if profile.keeps_infinities and row.inf_codes:
        signed = np.where(bits >> np.uint32(31) == 1, max(row.inf_codes), min(row.inf_codes))
        codes = np.where(magnitude == INFINITY_BITS, signed, codes)

    nan = row.nan_code or 0
    for value, used in profile.multipliers:
        if used == "nan":
            codes = np.where(byte == value, nan, codes)
        elif used == "nan-signed":
            codes = np.where((byte == value) & ~is_nan, nan, codes)
        elif used == "zero":
            # Zero times infinity is the default NaN of x86, whose sign bit is set.
            zero = np.where((bits >> np.uint32(31) == 1) & row.has_negative_zero, row.sign_bit, 0)
            times_zero = np.where(magnitude == INFINITY_BITS, max(row.nan_codes, default=0), zero)
            codes = np.where((byte == value) & ~is_nan, times_zero, codes)
    return codes.astype(np.uint8), byte[..., 0].astype(np.uint8)


def _round_up_below_half(codes: U8, bits: NDArray[np.uint32], byte: Any, precision: int, row: Format) -> U8:
    """floor(|x| + 0.5) in the input's own precision: a significand of all ones just below one half becomes 1."""
    exponent = (bits >> np.uint32(23)).astype(np.int64) & 0xFF
    ones = ((1 << (precision - 1)) - 1) << (24 - precision)
    below_half = (exponent == byte - row.bias - row.mantissa_bits - 1) & (bits & np.uint32(0x7FFFFF) == ones)
    return np.where(below_half & (exponent > 0), codes | 1, codes).astype(np.uint8)


# ---- the quick road -------------------------------------------------------------------------------------
#
# A key is the upper half of a float32, its last bit set if anything was below it (rounding to odd), so that
# rounding its 7 mantissa bits once more, to 3 or fewer, gives what rounding the float32 would have given.
# bfloat16 bits are keys as they are. Dividing by the scale subtracts the scale's exponent from the key's; for
# a value below 1 that borrows from the sign bit, which the table of codes knows from the exponent it sees.

CHUNK = 1 << 15  # elements at a time: some arrays of 16-bit keys stay in the second-level cache
_ZERO_BLOCK_SHIFT = 100  # makes a zero, whose exponent field is 0, far too small for any format


@dataclass(frozen=True)
class _Tables:
    """What keys decide. By the largest magnitude's key in a block: `byte`, the `shift` to subtract from every
    key of the block, and `doubtful` where the exact road must take it. By a shifted key: `code`."""

    byte: U8
    shift: NDArray[np.uint16]
    doubtful: NDArray[np.bool_]
    code: U8


@cache
def _tables(row: Format, profile: Profile, rounding: str, precision: int) -> _Tables:
    key = np.arange(1 << 15, dtype=np.int64)
    # The float32 values with this key: an odd one stands for all between its even neighbours.
    odd = key & 1
    least, most = (key << 16) - odd * 0xFFFF, (key << 16) + odd * 0xFFFF
    byte = block_bytes(least, profile, row, precision)
    decided = (byte == block_bytes(most, profile, row, precision)) & (most < INFINITY_BITS)
    # Low bytes belong to blocks with subnormals, which lack the hidden bit; from 256 - emax on, a borrow
    # would look like a large element. The bytes that a profile treats in its own way are left to it.
    ordinary = (byte > row.bias + row.mantissa_bits + 1) & (byte <= 255 - row.emax) & ((key >> 7) - byte <= row.emax)
    ordinary &= ~np.isin(byte, [value for value, _ in profile.multipliers])
    doubtful = ~(decided & (ordinary | (key == 0))) | profile.floor_of_half_up | profile.zeros_are_positive

    shifted = np.arange(1 << 16, dtype=np.int64)
    exponent = (shifted >> 7) & 0xFF
    borrowed = exponent > row.emax
    exponent = (exponent - np.where(borrowed, 256, 0) + SCALE_BIAS).clip(1)  # 2^-126 is as good as zero here
    sign = (shifted >> 15) ^ borrowed
    bits = (sign << 31 | exponent << 23 | (shifted & 0x7F) << 16).astype(np.uint32)
    return _Tables(
        byte.astype(np.uint8),
        (np.where(key == 0, _ZERO_BLOCK_SHIFT, byte) << 7).astype(np.uint16),
        doubtful,
        encode_bits(bits, SCALE_BIAS, row, rounding),
    )


def _keys(x: NDArray[Any], scratch: NDArray[np.uint32]) -> NDArray[np.uint16]:
    """The keys of a chunk, same shape; `scratch` is room for as many float32 patterns."""
    if x.dtype.itemsize == 2 and x.dtype != np.float16:
        return x.view(np.uint16)
    bits = float32_bits(x)
    room = scratch[: bits.size].reshape(bits.shape)
    np.bitwise_and(bits, np.uint32(0xFFFF), out=room)
    np.add(room, np.uint32(0xFFFF), out=room)
    np.bitwise_or(room, bits, out=room)
    np.right_shift(room, np.uint32(16), out=room)
    return room.astype(np.uint16)


def _fold(values: NDArray[Any]) -> NDArray[Any]:
    """Maxima of each 32 consecutive values along the last axis: five strided halvings, quicker than a reduction."""
    for _ in range(5):
        values = np.maximum(values[..., 0::2], values[..., 1::2])
    return values


@dataclass(frozen=True)
class _Layout:
    """An array seen as [groups, 32, inner], blocks down the middle axis; `square` blocks span 32 of inner as well.

    `rows` of the blocked axis per outer index and `pitch` from row to row are those of the array before padding.
    """

    groups: int
    inner: int
    square: bool
    per_outer: int  # groups for each index of the axes before the blocked one
    rows: int
    pitch: int

    @property
    def width(self) -> int:
        """Blocks in a group."""
        return self.inner // BLOCK if self.square else self.inner

    def chunks(self) -> Iterator[tuple[slice, slice]]:
        """Ranges of groups and of inner, about CHUNK elements each; inner is cut at multiples of 32."""
        wide = min(max(self.inner, 1), CHUNK // BLOCK)
        tall = max(1, CHUNK // (BLOCK * wide))
        for group in range(0, self.groups, tall):
            for start in range(0, self.inner, wide):
                yield slice(group, min(group + tall, self.groups)), slice(start, min(start + wide, self.inner))

    def scale_range(self, inner: slice) -> slice:
        return slice(inner.start // BLOCK, inner.stop // BLOCK) if self.square else inner

    def index(self, groups: slice, inner: slice) -> NDArray[np.uint64]:
        """Places of a chunk's elements in the flattened array as it was given, before padding."""
        group = np.arange(groups.start, groups.stop)[:, None, None]
        line = group % self.per_outer * BLOCK + np.arange(BLOCK)[:, None]
        place = (group // self.per_outer * self.rows + line) * self.pitch + np.arange(inner.start, inner.stop)
        return place.astype(np.uint64)


def _blocks(chunk: NDArray[Any], square: bool) -> NDArray[Any]:
    """[groups, 32, inner] to [groups, blocks, values of a block]: a view where it can be one."""
    groups, _, inner = chunk.shape
    blocks: NDArray[Any] = chunk.swapaxes(1, 2)
    if square:
        blocks = chunk.reshape(groups, BLOCK, inner // BLOCK, BLOCK).swapaxes(1, 2)
        blocks = blocks.reshape(groups, inner // BLOCK, BLOCK * BLOCK)
    return blocks


def _put_blocks(chunk: NDArray[Any], blocks: NDArray[Any], square: bool) -> None:
    """The inverse of _blocks, written into `chunk`."""
    groups, _, inner = chunk.shape
    if square:
        blocks = blocks.reshape(groups, inner // BLOCK, BLOCK, BLOCK).swapaxes(1, 2).reshape(chunk.shape)
        chunk[...] = blocks
    else:
        chunk[...] = blocks.swapaxes(1, 2)


def quantize(
    x: NDArray[Any],
    *,
    axis: Axis,
    format: str = "e4m3fn",
    profile: str | Profile = "ocp",
    block: Axis = BLOCK,
    rounding: str = "even",
    seed: int | None = None,
    pad: bool = False,
) -> MXArray:
    """A float32, bfloat16 or float16 array, any shape and strides, as MX blocks along `axis`.

    format: a name of FORMATS. profile: a name of PROFILES, or a Profile (scale rule and policies). block: 32, or
    (32, 32) with axis=(-2, -1). rounding: "even", "away", or "stochastic", where `seed` and an element's place in
    the flattened array decide its bits. pad=True fills the blocked axes up to a multiple of 32 with zeros.

    The result does not depend on strides, chunks or threads. TypeError for other input types; ValueError, in
    one line that says what was expected, for unknown names, a seed too few or too many, and a blocked axis
    that 32 does not divide.
    """
    row = named(format)
    policies = profile_for(profile, row)
    check_rounding(rounding, seed)
    check_input(x)
    axes = block_axes(x.ndim, axis, block)
    if not pad:
        for one in axes:
            _check_multiple(x.shape, one, ", or pad=True")
    given = x.shape
    x = _padded(x, axes)
    precision = 8 if x.dtype.itemsize == 2 and x.dtype != np.float16 else 24

    layout = _layout(given, x.shape, axes)
    codes = np.empty(x.shape, np.uint8)
    byte = np.empty(_scale_shape(x.shape, axes), np.uint8)
    elements = codes.reshape(layout.groups, BLOCK, layout.inner)
    scales = byte.reshape(layout.groups, layout.width)
    values = x.reshape(layout.groups, BLOCK, layout.inner)
    tables = None if rounding == "stochastic" else _tables(row, policies, rounding, precision)
    scratch = np.empty(CHUNK, np.uint32)

    for groups, inner in layout.chunks():
        chunk, out = values[groups, :, inner], elements[groups, :, inner]
        out_scales = scales[groups, layout.scale_range(inner)]
        if tables is None:
            assert seed is not None
            random = random_bits(int(seed), layout.index(groups, inner))
            blocks, out_scales[...] = _exact_blocks(
                _blocks(float32_bits(np.ascontiguousarray(chunk)), layout.square),
                precision,
                row,
                policies,
                rounding,
                _blocks(random, layout.square),
            )
            _put_blocks(out, blocks, layout.square)
            continue
        largest = _quick(chunk, tables, layout.square, scratch, out, out_scales)
        doubtful = tables.doubtful[largest]
        if doubtful.any():
            bits = _blocks(float32_bits(np.ascontiguousarray(chunk)), layout.square)[doubtful]
            blocks = _blocks(np.ascontiguousarray(out), layout.square).copy()
            blocks[doubtful], out_scales[doubtful] = _exact_blocks(bits, precision, row, policies, rounding, None)
            _put_blocks(out, blocks, layout.square)

    return MXArray(codes.view(row.dtype), byte.view(E8M0.dtype), axis, format, block)


def _quick(
    chunk: NDArray[Any],
    tables: _Tables,
    square: bool,
    scratch: NDArray[np.uint32],
    out: U8,
    out_scales: U8,
) -> NDArray[np.uint16]:
    """Codes and bytes of every block of a chunk as its keys have it; returns each block's largest key."""
    keys = _keys(chunk, scratch)
    magnitude = keys & np.uint16(0x7FFF)
    if chunk.shape[2] == 1:
        largest = _fold(magnitude.reshape(len(chunk), BLOCK))
    else:
        largest = magnitude.max(axis=1)
        if square:
            largest = _fold(largest)
    out_scales[...] = tables.byte[largest]
    shift = tables.shift[largest]
    if square:
        shift = np.repeat(shift, BLOCK, axis=1)
    shifted = np.subtract(keys, shift[:, None, :], out=magnitude)
    # mode="wrap" spares a check that no 16-bit key could fail.
    if out.flags.c_contiguous:
        np.take(tables.code, shifted, out=out, mode="wrap")
    else:
        out[...] = np.take(tables.code, shifted, mode="wrap")
    return largest


def _padded(x: NDArray[Any], axes: tuple[int, ...]) -> NDArray[Any]:
    """C-contiguous, the blocked axes filled up with zeros to multiples of 32."""
    shape = tuple(length + (-length % BLOCK if axis in axes else 0) for axis, length in enumerate(x.shape))
    if shape == x.shape:
        return np.ascontiguousarray(x)
    padded = np.zeros(shape, x.dtype)
    padded[tuple(slice(length) for length in x.shape)] = x
    return padded


def _scale_shape(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(length // BLOCK if axis in axes else length for axis, length in enumerate(shape))


def _layout(given: tuple[int, ...], padded: tuple[int, ...], axes: tuple[int, ...]) -> _Layout:
    first = axes[0]
    outer, per_outer = prod(padded[:first]), padded[first] // BLOCK
    return _Layout(
        outer * per_outer, prod(padded[first + 1 :]), len(axes) == 2, per_outer, given[first], prod(given[first + 1 :])
    )


def dequantize(mx: MXArray, dtype: Any) -> NDArray[Any]:
    """The values of an MXArray, shape S: exact in float64; rounded once, nearest even, to float32, bfloat16 or float16.

    A scale of 0xFF makes its whole block NaN; what overflows `dtype` becomes infinity.
    """
    target = np.dtype(dtype)
    if target not in OUTPUT_DTYPES:
        raise TypeError(f"cannot dequantize to {target}; expected float64, float32, bfloat16 or float16")
    axes = (mx.axis,) if isinstance(mx.axis, int) else mx.axis
    layout = _layout(mx.shape, mx.shape, axes)
    out = np.empty(mx.shape, target)
    values = out.reshape(layout.groups, BLOCK, layout.inner)
    codes = mx.codes().reshape(values.shape)
    scale_codes = mx.scale_codes().reshape(layout.groups, layout.width)
    table, scales = decode_table(mx.format), scale_table()
    for groups, inner in layout.chunks():
        scale = scales[scale_codes[groups, layout.scale_range(inner)]]
        if layout.square:
            scale = np.repeat(scale, BLOCK, axis=1)
        # At most 5 significant bits and at least 2^-144: a float32 holds every product that it can reach, so
        # a bfloat16 that ml_dtypes makes by way of float32 is still rounded once.
        with np.errstate(over="ignore"):
            values[groups, :, inner] = (table[codes[groups, :, inner]] * scale[:, None, :]).astype(target)
    return out
