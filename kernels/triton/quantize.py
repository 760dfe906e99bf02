"""The MXFP8 quantizer and its inverse in Triton: the bytes of mxgate.oracle.quantize under the profile `ocp`.

A block's byte is the exponent of its largest magnitude less the format's largest exponent, read from float32 bits. The
elements are encoded by integers, as the oracle does it, wherever the device has no conversion of its own for the
format, and always when rounding is stochastic; else the device's conversion rounds x * 2^(127 - byte), a product that
is exact where it matters (what float32 loses below 2^-149 is far below half of any format's smallest step).

Stochastic rounding takes its bits from the seed and the element's place in the flattened array, by the oracle's
generator (SplitMix64 as a counter), so the two agree bit for bit. Of an element's 64 bits the first 32 decide alone,
unless it is smaller than 2^-8 of the format's smallest step: a tile without such elements adds noise and truncates, in
32 bits, another does as the oracle does, a piece at a time.

Both axes read every element once and write one byte and 1/32 of one: blocks along the last axis are rows of a tile,
blocks along another axis are its columns, so that neighbouring threads read neighbouring elements either way.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxgate.kernels.triton.codec import (
    BLOCK,
    E5M2,
    FORMAT_NAMES,
    NAN_SCALE,
    bias,
    decode,
    is_far,
    is_fnuz,
    mantissa_bits,
    near_scale,
)
from mxgate.kernels.triton.gemm import device_for
from mxgate.kernels.triton.interpreter import mend

mend()

FLOAT32 = tl.constexpr(0)
BFLOAT16 = tl.constexpr(1)
INPUTS = (torch.float32, torch.bfloat16, torch.float16)
INFINITY = tl.constexpr(0x7F800000)

# Ways to round: to nearest even; stochastic in 32 bits, which tiny elements are too small for; stochastic in 64.
EVEN = tl.constexpr(0)
NOISE = tl.constexpr(1)
DRAW = tl.constexpr(2)


@triton.constexpr_function
def emax(format):
    return (8, 15, 7, 15)[format]


@triton.constexpr_function
def max_code(format):
    return (0x7E, 0x7B, 0x7F, 0x7F)[format]


@triton.constexpr_function
def nan_code(format):
    return (0x7F, 0x7F, 0x80, 0x80)[format]


@triton.jit
def load_bits(ptr, at, mask, KIND: tl.constexpr):
    """float32 bits (int32) of float32, bfloat16 (both as integers of their size) or float16 elements."""
    if KIND == FLOAT32:
        return tl.load(ptr + at, mask=mask, other=0)
    elif KIND == BFLOAT16:
        return tl.load(ptr + at, mask=mask, other=0).to(tl.int32) << 16
    else:
        return tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def scale_byte(largest, FORMAT: tl.constexpr):
    """The scale's byte for the bits of a block's largest magnitude: a NaN's are the largest of all."""
    top: tl.constexpr = emax(FORMAT)
    byte = tl.maximum((largest >> 23) - top, 0)
    return tl.where(largest >= INFINITY, NAN_SCALE, byte)


@triton.jit
def mixed(z):
    """SplitMix64's finaliser, uint64 to uint64."""
    z = (z ^ (z >> 30)) * tl.full(z.shape, 0xBF58476D1CE4E5B9, tl.uint64)
    z = (z ^ (z >> 27)) * tl.full(z.shape, 0x94D049BB133111EB, tl.uint64)
    return z ^ (z >> 31)


@triton.jit
def states(rows, columns, key):
    """The generator's states, uint64, of the places rows[:, None] + columns[None, :] (int64) of the flattened array."""
    golden = tl.full((1,), 0x9E3779B97F4A7C15, tl.uint64)
    first = key.to(tl.int64).to(tl.uint64, bitcast=True) + golden
    return (rows.to(tl.uint64) * golden + first)[:, None] + (columns.to(tl.uint64) * golden)[None, :]


@triton.jit
def scaled(bits, byte):
    """float32 x * 2^(127 - byte) of float32 bits, under scale bytes of the same shape; x of a NaN block."""
    scale = tl.where(byte == NAN_SCALE, 0x3F800000, (254 - byte) << 23).to(tl.float32, bitcast=True)
    return bits.to(tl.float32, bitcast=True) * scale


@triton.jit
def has_tiny(bits, byte, FORMAT: tl.constexpr):
    """Whether a tile holds an element, other than 0, whose rounding 32 random bits may not decide."""
    magnitude = scaled(bits, byte).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    least: tl.constexpr = (128 - bias(FORMAT) - mantissa_bits(FORMAT) - 8) << 23  # 2^-8 of the smallest step
    # As unsigned numbers, where 0 less 1 is the largest of all.
    return tl.min(tl.min((magnitude - 1).to(tl.uint32, bitcast=True), 1), 0) < least - 1


@triton.jit
def add_noise(bits, byte, random, FORMAT: tl.constexpr):
    """As stochastic `encode` without signs and without saturation, for what is not tiny; random: 32 bits, uint32.

    Up where the random bits are below the dropped ones, as fractions of a step: where the complement of as many random
    bits as are dropped, added, carries into what is kept.
    """
    m: tl.constexpr = mantissa_bits(FORMAT)
    lowest: tl.constexpr = 128 - bias(FORMAT)
    magnitude = scaled(bits, byte).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    exponent = tl.maximum(tl.minimum(magnitude >> 23, lowest), 1)  # 1 and 31 below: of 0, of which nothing is kept
    down = tl.minimum((23 - m) + lowest - exponent, 31)  # 20 .. 31
    kept = magnitude - ((exponent - 1) << 23)  # a significand of 24 bits, above the lowest binade an exponent too
    noise = (random ^ 0xFFFFFFFF) >> (32 - down).to(tl.uint32)
    return ((kept.to(tl.uint32) + noise) >> down.to(tl.uint32)).to(tl.int32)


@triton.jit
def with_sign(code, bits, FORMAT: tl.constexpr):
    """Codes (int32) saturated, with the signs of float32 bits."""
    most: tl.constexpr = max_code(FORMAT)
    code = tl.minimum(code, most)
    signed = code | ((bits >> 24) & 0x80)
    if is_fnuz(FORMAT):
        signed = tl.where(code == 0, 0, signed)
    return signed


@triton.jit
def encode(bits, byte, at, key, FORMAT: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Codes (int32) of float32 bits divided by 2^(byte - 127), saturating; at: places in the flattened array."""
    m: tl.constexpr = mantissa_bits(FORMAT)
    b: tl.constexpr = bias(FORMAT)
    lowest: tl.constexpr = 1 - b
    magnitude = bits & 0x7FFFFFFF
    exponent = magnitude >> 23
    significand = (magnitude & 0x7FFFFF) | tl.where(exponent > 0, 0x800000, 0)
    # A float32 that holds the significand tells its length.
    length = (significand.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126
    shift = tl.where(significand == 0, 0, 24 - length)
    significand = significand << shift
    exponent = tl.maximum(exponent, 1) - shift - 23 - byte  # |x| / scale is significand * 2^exponent
    binade = tl.maximum(exponent + 23, lowest)
    dropped = binade - m - exponent  # bits of the significand below the last one kept: at least 20
    if STOCHASTIC:
        whole = significand.to(tl.uint64)
        wide = dropped.to(tl.int64)
        down = tl.minimum(wide, 62).to(tl.uint64)
        one = tl.full(whole.shape, 1, tl.uint64)
        rest = whole & ((one << down) - one)
        up_by = tl.minimum(tl.maximum(64 - wide, 0), 63).to(tl.uint64)
        down_by = tl.minimum(tl.maximum(wide - 64, 0), 63).to(tl.uint64)
        threshold = tl.where(dropped <= 64, rest << up_by, whole >> down_by)
        kept = (whole >> down).to(tl.int32)
        golden = tl.full(whole.shape, 0x9E3779B97F4A7C15, tl.uint64)
        up = mixed(key.to(tl.int64).to(tl.uint64, bitcast=True) + (at.to(tl.uint64) + one) * golden) < threshold
    else:
        down = tl.minimum(dropped, 26)  # from here on nothing is kept and what is dropped is below one half
        kept = significand >> down
        rest = significand & ((1 << down) - 1)
        half = 1 << (down - 1)
        up = (rest > half) | ((rest == half) & ((kept & 1) == 1))
    code = kept + up.to(tl.int32) + ((binade - lowest) << m)
    return with_sign(tl.where(significand == 0, 0, code), bits, FORMAT)


@triton.jit
def codes_of(bits, byte, rows, columns, key, FORMAT: tl.constexpr, NATIVE: tl.constexpr, WAY: tl.constexpr):
    """uint8 codes of float32 bits under scale bytes of the same shape; rows, columns: their places, see states."""
    # The elements of a NaN block are overwritten; any ordinary byte will do for them.
    usable = tl.where(byte == NAN_SCALE, 127, byte)
    if WAY == NOISE:
        random = (mixed(states(rows, columns, key)) >> 32).to(tl.uint32)
        code = with_sign(add_noise(bits, byte, random, FORMAT), bits, FORMAT).to(tl.uint8)
    elif WAY == DRAW:
        code = encode(bits, usable, rows[:, None] + columns[None, :], key, FORMAT, True).to(tl.uint8)
    elif NATIVE:
        x = scaled(bits, byte)
        if FORMAT == E5M2:
            code = tl.minimum(tl.maximum(x, -57344.0), 57344.0).to(tl.float8e5).to(tl.uint8, bitcast=True)
        else:
            code = tl.minimum(tl.maximum(x, -448.0), 448.0).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        code = encode(bits, usable, usable, key, FORMAT, False).to(tl.uint8)
    nan: tl.constexpr = nan_code(FORMAT)
    return tl.where(byte == NAN_SCALE, nan, code).to(tl.uint8)


@triton.jit
def last_axis_tile(
    x_ptr,
    codes_ptr,
    scales_ptr,
    first,
    blocks,
    key,
    KIND: tl.constexpr,
    FORMAT: tl.constexpr,
    NATIVE: tl.constexpr,
    WAY: tl.constexpr,
    B: tl.constexpr,
):
    """B blocks from `first` on; by NOISE only scales, and True, for a tile that needs DRAW."""
    which = first + tl.arange(0, B)
    at = which[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (which < blocks)[:, None] & (at >= 0)
    bits = load_bits(x_ptr, at, mask, KIND)
    byte = scale_byte(tl.max(bits & 0x7FFFFFFF, 1), FORMAT)
    wide = byte[:, None] + tl.zeros((B, BLOCK), tl.int32)
    left = has_tiny(bits, wide, FORMAT) if WAY == NOISE else False
    if not left:
        codes = codes_of(bits, wide, which * BLOCK, tl.arange(0, BLOCK), key, FORMAT, NATIVE, WAY)
        tl.store(codes_ptr + at, codes, mask=mask)
    tl.store(scales_ptr + which, byte.to(tl.uint8), mask=which < blocks)
    return left


@triton.jit(do_not_specialize=["key"])
def last_axis_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    blocks,
    key,
    KIND: tl.constexpr,
    FORMAT: tl.constexpr,
    NATIVE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    B: tl.constexpr,
):
    """Blocks of 32 consecutive elements, B of them a program."""
    WAY: tl.constexpr = NOISE if STOCHASTIC else EVEN
    PIECE: tl.constexpr = B // 8
    first = tl.program_id(0).to(tl.int64) * B
    left = last_axis_tile(x_ptr, codes_ptr, scales_ptr, first, blocks, key, KIND, FORMAT, NATIVE, WAY, B)
    if left:
        for low in range(0, B, PIECE):
            last_axis_tile(x_ptr, codes_ptr, scales_ptr, first + low, blocks, key, KIND, FORMAT, NATIVE, DRAW, PIECE)


@triton.jit
def other_axis_tile(
    x_ptr,
    codes_ptr,
    scales_ptr,
    group,
    first,
    inner,
    key,
    KIND: tl.constexpr,
    FORMAT: tl.constexpr,
    NATIVE: tl.constexpr,
    WAY: tl.constexpr,
    SQUARE: tl.constexpr,
    C: tl.constexpr,
):
    """C columns from `first` on of 32 rows; else as last_axis_tile."""
    columns = first + tl.arange(0, C)
    rows = (group * BLOCK + tl.arange(0, BLOCK)) * inner
    at = rows[:, None] + columns[None, :]
    mask = (columns < inner)[None, :] & (tl.arange(0, BLOCK) >= 0)[:, None]
    bits = load_bits(x_ptr, at, mask, KIND)
    largest = tl.max(bits & 0x7FFFFFFF, 0)
    if SQUARE:
        largest = tl.max(tl.reshape(largest, (C // BLOCK, BLOCK)), 1)
        byte = scale_byte(largest, FORMAT)
        squares = first // BLOCK + tl.arange(0, C // BLOCK)
        tl.store(scales_ptr + group * (inner // BLOCK) + squares, byte.to(tl.uint8), mask=squares * BLOCK < inner)
        byte = tl.reshape(byte[:, None] + tl.zeros((C // BLOCK, BLOCK), tl.int32), (C,))
    else:
        byte = scale_byte(largest, FORMAT)
        tl.store(scales_ptr + group * inner + columns, byte.to(tl.uint8), mask=columns < inner)
    wide = byte[None, :] + tl.zeros((BLOCK, C), tl.int32)
    left = has_tiny(bits, wide, FORMAT) if WAY == NOISE else False
    if not left:
        codes = codes_of(bits, wide, rows, columns, key, FORMAT, NATIVE, WAY)
        tl.store(codes_ptr + at, codes, mask=mask)
    return left


@triton.jit(do_not_specialize=["key"])
def other_axis_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    inner,
    key,
    KIND: tl.constexpr,
    FORMAT: tl.constexpr,
    NATIVE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    SQUARE: tl.constexpr,
    C: tl.constexpr,
):
    """Blocks of 32 elements that lie `inner` apart, C of them a program; with SQUARE 32 neighbours share a scale."""
    WAY: tl.constexpr = NOISE if STOCHASTIC else EVEN
    across = tl.cdiv(inner, C)
    group = (tl.program_id(0) // across).to(tl.int64)
    first = tl.program_id(0) % across * C
    left = other_axis_tile(x_ptr, codes_ptr, scales_ptr, group, first, inner, key, KIND, FORMAT, NATIVE, WAY, SQUARE, C)
    if left:
        for low in range(0, C, BLOCK):
            other_axis_tile(
                x_ptr, codes_ptr, scales_ptr, group, first + low, inner, key, KIND, FORMAT, NATIVE, DRAW, SQUARE, BLOCK
            )


def key_of(seed: int) -> int:
    """The generator's key as a signed 64-bit number: the seed is mixed on its own first."""
    mask = 2**64 - 1
    z = (seed + 0x9E3779B97F4A7C15) & mask
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    z ^= z >> 31
    return z - 2**64 if z >> 63 else z


def quantize(
    x: Tensor,
    axis: int | tuple[int, int],
    *,
    format: str = "e4m3fn",
    rounding: str = "even",
    seed: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(elements of x's shape, float8_e8m0fnu scales) in blocks of 32 along `axis`; axis=(-2, -1): 32x32 blocks.

    x: float32, bfloat16 or float16 (other strides than C's cost a copy). format: a name of FORMAT_NAMES. rounding:
    "even", or "stochastic" with a seed. ValueError, TypeError.
    """
    if x.dtype not in INPUTS:
        raise TypeError(f"x has type {x.dtype}; expected float32, bfloat16 or float16")
    if format not in FORMAT_NAMES:
        raise ValueError(f"unknown format {format!r}; expected one of {', '.join(FORMAT_NAMES)}")
    if rounding not in ("even", "stochastic") or (rounding == "stochastic") != (seed is not None):
        raise ValueError(f"rounding={rounding!r} with seed={seed!r}; expected 'even', or 'stochastic' with a seed")
    square = isinstance(axis, tuple)
    axes = sorted(a % x.ndim for a in axis) if isinstance(axis, tuple) else [axis % x.ndim]
    if square and axes != [x.ndim - 2, x.ndim - 1]:
        raise ValueError(f"axis={axis!r}; expected one axis, or the last two for 32x32 blocks")
    for a in axes:
        if x.shape[a] % 32:
            raise ValueError(f"axis {a} of shape {tuple(x.shape)} has length {x.shape[a]}; expected a multiple of 32")
    x = x.contiguous()
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    thin = [length // 32 if a in axes else length for a, length in enumerate(x.shape)]
    scales = torch.empty(thin, dtype=torch.uint8, device=x.device)
    inner = prod(x.shape[axes[0] + 1 :])
    if x.numel():
        _quantize(x, codes, scales, inner, square, FORMAT_NAMES.index(format), seed)
    dtype = getattr(torch, f"float8_{format}")
    return codes.view(dtype), scales.view(torch.float8_e8m0fnu)


def _quantize(
    x: Tensor, codes: Tensor, scales: Tensor, inner: int, square: bool, format: int, seed: int | None
) -> None:
    device = device_for(x.device)
    source: Any = x.view(torch.int32) if x.dtype == torch.float32 else x
    source = x.view(torch.int16) if x.dtype == torch.bfloat16 else source
    options = {
        "KIND": INPUTS.index(x.dtype),
        "FORMAT": format,
        "NATIVE": format in device.native,
        "STOCHASTIC": seed is not None,
    }
    key = 0 if seed is None else key_of(seed)
    groups = x.numel() // 32
    # A program costs the interpreter far more than its elements do.
    size = 1024 if device.interpreted else 128
    if inner == 1:
        last_axis_kernel[(triton.cdiv(groups, size),)](
            source, codes, scales, groups, key, B=size, num_warps=4, **options
        )
    else:
        columns = max(min(size, triton.next_power_of_2(inner)), 32)
        # One warp to a tile: a block's largest magnitude is then found without waiting for another.
        warps = 4 if seed is not None else 1
        grid = (groups // inner * triton.cdiv(inner, columns),)
        other_axis_kernel[grid](source, codes, scales, inner, key, SQUARE=square, C=columns, num_warps=warps, **options)


# ---------------------------------------------------------------------------------------------------------------------
# The inverse, into bfloat16: the first pass of the two-pass GEMMs


@triton.jit
def dequantize_kernel(
    codes_ptr,
    scales_ptr,
    out_ptr,
    far_ptr,
    ends_ptr,
    high,
    wide,
    codes_o,
    codes_r,
    codes_c,
    scales_o,
    scales_r,
    scales_c,
    out_o,
    out_r,
    last,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FORMAT: tl.constexpr,
    NATIVE: tl.constexpr,
    DTYPE: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """out [outer, high, wide] = elements times scales; one scale for BLOCK_R x BLOCK_C elements.

    A tile has four axes, blocks and places within a block of both of its sides: so a scale is loaded once and spread.
    LIMIT: 1 for rows, 2 for columns from the last of `last` ends on to be left alone, 0 for none. far_ptr: int32,
    becomes 1 when a scale that was used has no exact bfloat16 products.
    """
    R: tl.constexpr = ROWS // BLOCK_R
    C: tl.constexpr = COLUMNS // BLOCK_C
    # Columns of tiles follow each other, then rows of tiles, then matrices.
    across = tl.cdiv(wide, COLUMNS)
    down = tl.cdiv(high, ROWS)
    tile = tl.program_id(0)
    column = tile % across
    row = tile // across % down
    block = (tile // across // down).to(tl.int64)
    if LIMIT == 1:
        high = tl.minimum(tl.maximum(tl.load(ends_ptr + last), 0), high)
    if LIMIT == 2:
        # In whole blocks, so that the compiler sees it: it would load bytes one by one under a mask of any length.
        wide = tl.minimum(tl.maximum(tl.load(ends_ptr + last), 0), wide) // BLOCK_C * BLOCK_C
    if (row * ROWS < high) & (column * COLUMNS < wide):
        row_blocks = row * R + tl.arange(0, R)
        column_blocks = column * C + tl.arange(0, C)
        rows = (row_blocks * BLOCK_R)[:, None, None, None] + tl.arange(0, BLOCK_R)[None, :, None, None]
        columns = (column_blocks * BLOCK_C)[None, None, :, None] + tl.arange(0, BLOCK_C)[None, None, None, :]
        mask = (rows < high) & (columns < wide)
        long = rows.to(tl.int64)
        at = codes_ptr + block * codes_o + long * codes_r + columns.to(tl.int64) * codes_c
        codes = tl.load(at, mask=mask, other=0)
        used = (row_blocks * BLOCK_R < high)[:, None] & (column_blocks * BLOCK_C < wide)[None, :]
        at = scales_ptr + block * scales_o + row_blocks.to(tl.int64)[:, None] * scales_r
        scales = tl.load(at + column_blocks.to(tl.int64)[None, :] * scales_c, mask=used, other=127)
        out = decode(codes, FORMAT, NATIVE, DTYPE) * near_scale(scales, DTYPE)[:, None, :, None]
        if DTYPE == tl.float32:
            # Exact: 4 bits or 3.
            out = (out.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        tl.store(out_ptr + block * out_o + long * out_r + columns, out, mask=mask)
        # All who find one write the same.
        tl.store(far_ptr + tl.zeros((R, C), tl.int32), tl.full((R, C), 1, tl.int32), mask=is_far(scales) != 0)


@triton.jit
def zero_rows_kernel(out_ptr, ends_ptr, last, m, n, out_r, out_c, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Zeros in the rows of out [m, n] from the last end on."""
    first = tl.minimum(tl.maximum(tl.load(ends_ptr + last), 0), m)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    for low in range(first + tl.program_id(0) * ROWS, m, tl.num_programs(0) * ROWS):
        rows = (low + tl.arange(0, ROWS)).to(tl.int64)
        mask = (rows < m)[:, None] & (columns < n)[None, :]
        at = out_ptr + rows[:, None] * out_r + columns[None, :].to(tl.int64) * out_c
        tl.store(at, tl.zeros((ROWS, COLUMNS), tl.int16), mask=mask)


def dequantize(
    elements: Tensor,
    scales: Tensor,
    far: Tensor,
    *,
    ends: Tensor | None = None,
    limit: int | None = None,
) -> Tensor:
    """bfloat16 values of elements [R,C] or [E,R,C] with one scale for 32 along an axis, or for 32x32.

    Exact for scales 2^-80 .. 2^80 and NaN; another scale that was used sets far[0] (int32) to 1, and values are wrong.
    ends: what lies from ends[-1] on along axis `limit` (0 or 1 of a matrix) is not read, nor written. Rows are padded
    to multiples of 16 bytes, as grouped_mm wants them. ValueError for shapes that are no blocks of 32.
    """
    codes, plane = elements.view(torch.uint8), scales.view(torch.uint8)
    if codes.ndim == 2:
        codes, plane = codes[None], plane[None]
    outer, high, wide = codes.shape
    sides = tuple(32 if have != want else 1 for have, want in zip(plane.shape[1:], (high, wide), strict=True))
    if plane.shape != (outer, high // sides[0], wide // sides[1]) or (sides == (1, 1) and high * wide):
        raise ValueError(f"scales {tuple(scales.shape)} are not one for 32 of elements {tuple(elements.shape)}")
    device = device_for(codes.device)
    whole = torch.empty((outer, high, -(-wide // 8) * 8), dtype=torch.bfloat16, device=codes.device)
    # The quickest of twenty on an H200, by shape of block.
    size, widest, warps = (4096, 2048, 4) if sides[0] == 1 else (8192, 256, 8)
    columns = min(widest, max(32, triton.next_power_of_2(wide)))
    rows = max(size // columns, sides[0])
    if codes.numel():
        dequantize_kernel[(triton.cdiv(high, rows) * triton.cdiv(wide, columns) * outer,)](
            codes,
            plane,
            whole,
            far,
            far if ends is None else ends,
            high,
            wide,
            *codes.stride(),
            *plane.stride(),
            whole.stride(0),
            whole.stride(1),
            0 if ends is None else len(ends) - 1,
            BLOCK_R=sides[0],
            BLOCK_C=sides[1],
            ROWS=rows,
            COLUMNS=columns,
            FORMAT=FORMAT_NAMES.index(str(elements.dtype).removeprefix("torch.float8_")),
            NATIVE=bool(device.native),
            DTYPE=tl.float32 if device.interpreted else tl.bfloat16,
            LIMIT=0 if ends is None or limit is None else limit + 1,
            num_warps=warps,
        )
    values = whole[:, :, :wide]
    return values[0] if elements.ndim == 2 else values


def zero_rows(out: Tensor, offsets: Tensor) -> None:
    """Zeros in the rows of a bfloat16 or float16 matrix from the last offset on, without a look at it here."""
    m, n = out.shape
    if m and n:
        zero_rows_kernel[(min(triton.cdiv(m, 32), 256), triton.cdiv(n, 128))](
            out.view(torch.int16), offsets, len(offsets) - 1, m, n, *out.stride(), ROWS=32, COLUMNS=128
        )
