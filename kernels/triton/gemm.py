"""Forward, dgrad and wgrad of the grouped MXFP8 GEMM: one inner product, two ways to cut the output into tiles.

Every op is out[row, column] = sum over l of A[row, l] * B[column, l], both operands scaled in blocks of 32 along l. In
forward and dgrad the rows are tokens and B belongs to the row's expert; in wgrad the sum runs over an expert's
tokens. A tile is computed by `product`, in one of these ways:

  dequant   elements times their scales in bfloat16, then one dot. Exact operands, so only the sum is rounded.
  mixed     the same with B dequantized beforehand, so that its values go straight from memory into the dot; see
            mxgate.kernels.triton.mixed_input.
  blocks    a dot of bare FP8 elements for each block of 32, the scales applied to that partial sum. On Hopper an FP8
            dot keeps 13 fraction bits, which is what this one must claim there.
  scaled    tl.dot_scaled, the device's own block-scaled dot or Triton's emulation of it.

None of them survives every legal scale: 448 * 2^127 is no bfloat16, 2^-127 is lost in products, and Triton's
emulation takes the byte 0 for zero. So a tile looks at its own scales as it goes, and leaves a mark where one lies
outside 2^-80 .. 2^80. A second launch finds no mark and ends, or computes such tiles again block by block, applying
both scales of a partial sum together as two halves of one exponent. A tile sees only its own tokens: what lies in the
padding never decides a rounding.

Kernels are persistent: a program takes every n-th tile, tiles are numbered in groups of SUPER rows of tiles to share
operands in cache; a weight gradient's experts are taken longest first, so that the last tiles to be begun are short
ones. Where a group begins is found on the device from the offsets, so nothing waits for the host and a
captured graph may be replayed with other offsets. Rows past the last offset are one more group, whose sums are empty.

Offsets on the CPU are checked (ValueError, TypeError). Offsets on a GPU are not, unless check=True: reading them waits
for the device. There, wrong offsets give wrong numbers, but every address stays inside the operands.

Split-K: `split` parts of each sum go to float32 workspace and are added in a fixed order by a second kernel.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from math import gcd
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxgate.kernels.build import Unavailable
from mxgate.kernels.triton.codec import (
    BLOCK,
    E5M2,
    FORMAT_NAMES,
    NAN_SCALE,
    decode,
    is_far,
    narrow,
    near_scale,
    power,
)
from mxgate.kernels.triton.interpreter import mend
from mxgate.oracle import groups

mend()

DEQUANT = tl.constexpr(0)
BLOCKS = tl.constexpr(1)
SCALED = tl.constexpr(2)
MIXED = tl.constexpr(3)
PRODUCTS = ("dequant", "blocks", "scaled")
# What a launch may leave out, so that its time and energy say what that costs. The result is then wrong.
ABLATIONS: Mapping[str, int] = {"no matrix instructions": 1, "no operand reads": 2, "neither": 3}
LEAST_EXPERTS = 64  # that a kernel is compiled for
RANKED_EXPERTS = 64  # most that wgrad puts in order of their lengths: with many, a long last one matters less
LEAST_ROWS = 16  # of a tile: a matrix instruction takes no fewer


# ---------------------------------------------------------------------------------------------------------------------
# The product of one tile


@triton.jit
def load_codes(ptr, rows, mask, k, end, stride_r, stride_l):
    """uint8 codes [rows, k], 0 (the value +0) past a row's or the sum's end."""
    at = ptr + rows[:, None] * stride_r + k[None, :].to(tl.int64) * stride_l
    return tl.load(at, mask=mask[:, None] & (k[None, :] < end), other=0)


@triton.jit
def load_scales(ptr, rows, mask, blocks, end, stride_r, stride_l, SQUARE: tl.constexpr):
    """uint8 scale bytes [rows, blocks], 127 (the value 1) past a row's or the sum's end; SQUARE: 32 rows share one."""
    if SQUARE:
        rows = rows // BLOCK
    at = ptr + rows[:, None] * stride_r + blocks[None, :].to(tl.int64) * stride_l
    return tl.load(at, mask=mask[:, None] & (blocks[None, :] * BLOCK < end), other=127)


@triton.jit
def scaled_values(
    codes, scales, ROWS: tl.constexpr, BL: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr, DTYPE: tl.constexpr
):
    """Elements times their scales in DTYPE: codes [ROWS, BL], scales [ROWS, BL / 32]."""
    values = tl.reshape(decode(codes, FORMAT, NATIVE, DTYPE), (ROWS, BL // BLOCK, BLOCK))
    factors = near_scale(scales, DTYPE)
    return tl.reshape(values * factors[:, :, None], (ROWS, BL))


@triton.jit
def load_values(ptr, rows, mask, k, end, stride_r, stride_l, DTYPE: tl.constexpr):
    """bfloat16 values [rows, k] in DTYPE, float32 where the interpreter holds them as bits; +0 past an end."""
    at = ptr + rows[:, None] * stride_r + k[None, :].to(tl.int64) * stride_l
    values = tl.load(at, mask=mask[:, None] & (k[None, :] < end), other=0.0)
    if DTYPE == tl.float32:
        values = (values.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return values


@triton.jit
def fp8(codes, FORMAT: tl.constexpr):
    if FORMAT == 0:
        return codes.to(tl.float8e4nv, bitcast=True)
    elif FORMAT == 1:
        return codes.to(tl.float8e5, bitcast=True)
    elif FORMAT == 2:
        return codes.to(tl.float8e4b8, bitcast=True)
    else:
        return codes.to(tl.float8e5b16, bitcast=True)


@triton.jit
def special_blocks(codes, ROWS: tl.constexpr, BL: tl.constexpr):
    """int32 [ROWS, BL / 32]: 1 for blocks of e5m2 codes with an infinity or a NaN."""
    largest = tl.max(tl.reshape((codes & 0x7F).to(tl.int32), (ROWS, BL // BLOCK, BLOCK)), 2)
    return (largest >= 0x7C).to(tl.int32)


@triton.jit
def product(
    a,
    b,
    rows,
    row_mask,
    columns,
    column_mask,
    start,
    end,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BL: tl.constexpr,
    A_FORMAT: tl.constexpr,
    B_FORMAT: tl.constexpr,
    A_SQUARE: tl.constexpr,
    B_SQUARE: tl.constexpr,
    PRODUCT: tl.constexpr,
    NATIVE: tl.constexpr,
    FP8_DOT: tl.constexpr,
    DTYPE: tl.constexpr,
    ABLATE: tl.constexpr,
):
    """(sums, far): float32 [BM, BN] of rows and columns (int64) over l in start .. end, both multiples of 32.

    a, b: (codes, scales, and of either its strides of a row or column and of l); of `mixed` b's codes are bfloat16
    values, its scales one int32, not 0 where those are wrong. far: not 0 where the sums are good for nothing, because
    of a scale (or `scaled`: an element) they cannot have. ABLATE & 1 (of dequant and mixed): decoded operands are
    added up as they are, for want of a dot; & 2: the masks are false.
    """
    a_ptr, a_scales_ptr, a_r, a_l, as_r, as_l = a
    b_ptr, b_scales_ptr, b_c, b_l, bs_c, bs_l = b
    BLOCKS_L: tl.constexpr = BL // BLOCK
    acc = tl.zeros((BM, BN), tl.float32)
    far = tl.zeros((BM, BLOCKS_L), tl.int32)
    far_b = tl.zeros((BN, BLOCKS_L), tl.int32)
    if ABLATE & 1:
        kept_x = tl.zeros((BM, BL), DTYPE)
        kept_y = tl.zeros((BN, BL), DTYPE)
    # Scales are loaded a step ahead: their few bytes are no copies that the compiler would start early by itself.
    blocks = start // BLOCK + tl.arange(0, BLOCKS_L)
    a_next = load_scales(a_scales_ptr, rows, row_mask, blocks, end, as_r, as_l, A_SQUARE)
    if PRODUCT != MIXED:
        b_next = load_scales(b_scales_ptr, columns, column_mask, blocks, end, bs_c, bs_l, B_SQUARE)
    # Without a dot the compiler would not load ahead unless told.
    AHEAD: tl.constexpr = 3 if ABLATE & 1 else None
    for low in tl.range(start, end, BL, num_stages=AHEAD):
        k = low + tl.arange(0, BL)
        a_codes = load_codes(a_ptr, rows, row_mask, k, end, a_r, a_l)
        if PRODUCT == MIXED:
            y = load_values(b_ptr, columns, column_mask, k, end, b_c, b_l, DTYPE)
        else:
            b_codes = load_codes(b_ptr, columns, column_mask, k, end, b_c, b_l)
            b_scales = b_next
        a_scales = a_next
        blocks = low // BLOCK + BLOCKS_L + tl.arange(0, BLOCKS_L)
        a_next = load_scales(a_scales_ptr, rows, row_mask, blocks, end, as_r, as_l, A_SQUARE)
        if PRODUCT != MIXED:
            b_next = load_scales(b_scales_ptr, columns, column_mask, blocks, end, bs_c, bs_l, B_SQUARE)
        far |= is_far(a_scales)
        if PRODUCT != MIXED:
            far_b |= is_far(b_scales)
        if PRODUCT == DEQUANT or PRODUCT == MIXED:
            x = scaled_values(a_codes, a_scales, BM, BL, A_FORMAT, NATIVE, DTYPE)
            if PRODUCT == DEQUANT:
                y = scaled_values(b_codes, b_scales, BN, BL, B_FORMAT, NATIVE, DTYPE)
            if ABLATE & 1:
                kept_x += x
                kept_y += y
            else:
                acc = tl.dot(x, tl.trans(y), acc, input_precision="ieee")
        elif PRODUCT == SCALED:
            A_NAME: tl.constexpr = "e4m3" if A_FORMAT == 0 else "e5m2"
            B_NAME: tl.constexpr = "e4m3" if B_FORMAT == 0 else "e5m2"
            x8 = fp8(a_codes, A_FORMAT)
            y8 = tl.trans(fp8(b_codes, B_FORMAT))
            # Where Triton emulates this, it casts e5m2 straight to bfloat16, and an infinity becomes 65536.
            if A_FORMAT == E5M2:
                far |= special_blocks(a_codes, BM, BL)
            if B_FORMAT == E5M2:
                far_b |= special_blocks(b_codes, BN, BL)
            acc = tl.dot_scaled(x8, a_scales, A_NAME, y8, b_scales, B_NAME, acc)
        else:
            if FP8_DOT:
                part = tl.dot(fp8(a_codes, A_FORMAT), tl.trans(fp8(b_codes, B_FORMAT)))
            else:
                x = decode(a_codes, A_FORMAT, NATIVE, DTYPE)
                y = decode(b_codes, B_FORMAT, NATIVE, DTYPE)
                part = tl.dot(x, tl.trans(y), input_precision="ieee")
            factors = tl.reshape(near_scale(a_scales, tl.float32), (BM, 1))
            acc += part * factors * tl.reshape(near_scale(b_scales, tl.float32), (1, BN))
    found = tl.maximum(tl.max(tl.max(far, 1), 0), tl.max(tl.max(far_b, 1), 0))
    if PRODUCT == MIXED:
        found = tl.maximum(found, tl.load(b_scales_ptr))
    if ABLATE & 1:
        # Asked of every element, or the compiler would leave it out; never so.
        odd = tl.max(tl.max(kept_x.to(tl.float32), 1), 0) + tl.max(tl.max(kept_y.to(tl.float32), 1), 0)
        found = tl.maximum(found, (odd == -1.2345e-30).to(tl.int32))
    return acc, found


@triton.jit
def far_product(
    a,
    b,
    rows,
    row_mask,
    columns,
    column_mask,
    start,
    end,
    BM: tl.constexpr,
    BN: tl.constexpr,
    A_FORMAT: tl.constexpr,
    B_FORMAT: tl.constexpr,
    A_SQUARE: tl.constexpr,
    B_SQUARE: tl.constexpr,
    NATIVE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """As `product`, whatever the scales and the elements."""
    a_ptr, a_scales_ptr, a_r, a_l, as_r, as_l = a
    b_ptr, b_scales_ptr, b_c, b_l, bs_c, bs_l = b
    acc = tl.zeros((BM, BN), tl.float32)
    for low in range(start, end, BLOCK):
        k = low + tl.arange(0, BLOCK)
        block = low // BLOCK + tl.arange(0, 1)
        a_codes = load_codes(a_ptr, rows, row_mask, k, end, a_r, a_l)
        b_codes = load_codes(b_ptr, columns, column_mask, k, end, b_c, b_l)
        x = decode(a_codes, A_FORMAT, NATIVE, DTYPE)
        y = decode(b_codes, B_FORMAT, NATIVE, DTYPE)
        part = tl.dot(x, tl.trans(y), input_precision="ieee")
        a_scales = load_scales(a_scales_ptr, rows, row_mask, block, end, as_r, as_l, A_SQUARE).to(tl.int32)
        b_scales = load_scales(b_scales_ptr, columns, column_mask, block, end, bs_c, bs_l, B_SQUARE).to(tl.int32)
        b_scales = tl.trans(b_scales)
        exponent = a_scales + b_scales - 254
        half = exponent >> 1
        part = part * power(half) * power(exponent - half)
        lost = (a_scales == NAN_SCALE) | (b_scales == NAN_SCALE)
        acc += tl.where(lost, float("nan"), part)
    return acc


@triton.jit
def tile_sums(
    a,
    b,
    rows,
    row_mask,
    columns,
    column_mask,
    low,
    stop,
    far_ptr,
    job,
    n,
    REPAIR: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BL: tl.constexpr,
    A_FORMAT: tl.constexpr,
    B_FORMAT: tl.constexpr,
    A_SQUARE: tl.constexpr,
    B_SQUARE: tl.constexpr,
    PRODUCT: tl.constexpr,
    NATIVE: tl.constexpr,
    FP8_DOT: tl.constexpr,
    DTYPE: tl.constexpr,
    ABLATE: tl.constexpr,
):
    """float32 [BM, BN]: far_product with REPAIR, else product, and a mark where that failed. n: any size."""
    if REPAIR:
        acc = far_product(
            a,
            b,
            rows,
            row_mask,
            columns,
            column_mask,
            low,
            stop,
            BM,
            BN,
            A_FORMAT,
            B_FORMAT,
            A_SQUARE,
            B_SQUARE,
            NATIVE,
            DTYPE,
        )
    else:
        # With ABLATE & 2 nothing is read; the compiler does not know that n is not negative.
        acc, found = product(
            a,
            b,
            rows,
            row_mask & (n < 0) if ABLATE & 2 else row_mask,
            columns,
            column_mask & (n < 0) if ABLATE & 2 else column_mask,
            low,
            stop,
            BM,
            BN,
            BL,
            A_FORMAT,
            B_FORMAT,
            A_SQUARE,
            B_SQUARE,
            PRODUCT,
            NATIVE,
            FP8_DOT,
            DTYPE,
            ABLATE,
        )
        tl.store(far_ptr, 1, mask=found != 0)
        tl.store(far_ptr + 1 + job, 1, mask=found != 0)
    return acc


@triton.jit
def tile_of(tile, high, wide, SUPER: tl.constexpr):
    """(row, column) of a tile number in a grid of high x wide tiles, walked in bands of SUPER rows."""
    band = tile // (SUPER * wide)
    height = tl.minimum(high - band * SUPER, SUPER)
    within = tile % (SUPER * wide)
    return band * SUPER + within % height, within // height


# ---------------------------------------------------------------------------------------------------------------------
# Rows are tokens: forward, dgrad


# Left unspecialised: what only byte loads, loop bounds and masks of rows use. A kernel compiles for seconds.
@triton.jit(do_not_specialize=["far_step", "m", "experts", "as_r", "bs_e", "bias_e", "bias_n"])
def rows_kernel(
    a_ptr,
    a_scales_ptr,
    b_ptr,
    b_scales_ptr,
    bias_ptr,
    out_ptr,
    route_ptr,
    far_ptr,
    far_step,
    m,
    n,
    length,
    experts,
    a_r,
    a_l,
    as_r,
    as_l,
    b_e,
    b_c,
    b_l,
    bs_e,
    bs_c,
    bs_l,
    bias_e,
    bias_n,
    out_r,
    out_c,
    EXPERTS: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    REPAIR: tl.constexpr,
    OUT: tl.constexpr,
    SPLIT: tl.constexpr,
    SUPER: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BL: tl.constexpr,
    A_FORMAT: tl.constexpr,
    B_FORMAT: tl.constexpr,
    A_SQUARE: tl.constexpr,
    B_SQUARE: tl.constexpr,
    PRODUCT: tl.constexpr,
    NATIVE: tl.constexpr,
    FP8_DOT: tl.constexpr,
    DTYPE: tl.constexpr,
    ABLATE: tl.constexpr,
):
    """out [m, n] (with SPLIT > 1 float32 [SPLIT, m, n]) of a [m, length] and b [experts, n, length].

    route_ptr: int32 ends of the groups [experts], or with GROUP_ROWS > 0 the expert of every GROUP_ROWS rows, where
    -1 means nobody's. EXPERTS: a power of two above the number of experts. far_ptr: int32, zeros; a tile that failed
    (see product) sets the first and its own, the one after its job's number. REPAIR: compute those tiles, or with
    far_step 0 all of them if the first is set.
    """
    which = tl.arange(0, EXPERTS)
    if GROUP_ROWS == 0:
        ends = tl.load(route_ptr + which, mask=which < experts, other=0)
        starts = tl.load(route_ptr + which - 1, mask=(which > 0) & (which <= experts), other=0)
        # One more group: the rows past the last offset.
        ends = tl.where(which == experts, m, ends)
        starts = tl.minimum(tl.maximum(starts, 0), m)
        ends = tl.minimum(tl.maximum(ends, starts), m)
        count = tl.cdiv(ends - starts, BM)
        count = tl.where(which <= experts, count, 0)
        after = tl.cumsum(count, 0)
        high = tl.sum(count, 0)
    else:
        high = tl.cdiv(m, BM)
    if REPAIR:
        high = tl.where(tl.load(far_ptr) == 0, 0, high)
    wide = tl.cdiv(n, BN)
    for job in range(tl.program_id(0), high * wide * SPLIT, tl.num_programs(0)):
        part = job % SPLIT
        tile_row, tile_column = tile_of(job // SPLIT, high, wide, SUPER)
        if GROUP_ROWS == 0:
            expert = tl.sum((after <= tile_row).to(tl.int32), 0)
            here = which == expert
            tiles_before = tl.sum(tl.where(here, after - count, 0), 0)
            first = tl.sum(tl.where(here, starts, 0), 0) + (tile_row - tiles_before) * BM
            end = tl.sum(tl.where(here, ends, 0), 0)
        else:
            first = tile_row * BM
            end = tl.minimum(first + BM, m)
            expert = tl.load(route_ptr + first // GROUP_ROWS)
        nobody = (expert < 0) | (expert >= experts)
        expert = tl.where(nobody, 0, expert).to(tl.int64)
        # Each part takes whole blocks, the last one what is left.
        share = tl.cdiv(tl.cdiv(length, BLOCK), SPLIT) * BLOCK
        low = tl.minimum(part * share, length)
        # In whole blocks, so that the compiler sees it: it would load bytes one by one under a mask of any length.
        stop = tl.where(nobody, low, tl.minimum(low + share, length)) // BLOCK * BLOCK
        rows = first + tl.arange(0, BM)
        columns = tile_column * BN + tl.arange(0, BN)
        if REPAIR:
            wanted = tl.load(far_ptr + (1 + job) * far_step) != 0
            stop = tl.where(wanted, stop, low)
            end = tl.where(wanted, end, first)
        row_mask = rows < end
        column_mask = columns < n
        rows = rows.to(tl.int64)
        columns = columns.to(tl.int64)
        a = a_ptr, a_scales_ptr, a_r, a_l, as_r, as_l
        b = b_ptr + expert * b_e, b_scales_ptr + expert * bs_e, b_c, b_l, bs_c, bs_l
        acc = tile_sums(
            a,
            b,
            rows,
            row_mask,
            columns,
            column_mask,
            low,
            stop,
            far_ptr,
            job,
            n,
            REPAIR,
            BM,
            BN,
            BL,
            A_FORMAT,
            B_FORMAT,
            A_SQUARE,
            B_SQUARE,
            PRODUCT,
            NATIVE,
            FP8_DOT,
            DTYPE,
            ABLATE,
        )
        mask = row_mask[:, None] & column_mask[None, :]
        if HAS_BIAS:
            # With SPLIT the bias goes into the first part alone.
            bias_mask = column_mask & (part == 0) & (nobody == 0)
            bias = tl.load(bias_ptr + expert * bias_e + columns * bias_n, mask=bias_mask, other=0.0)
            acc += bias[None, :]
        if SPLIT == 1:
            tl.store(out_ptr + rows[:, None] * out_r + columns[None, :] * out_c, narrow(acc, OUT), mask=mask)
        else:
            tl.store(out_ptr + (part.to(tl.int64) * m + rows[:, None]) * n + columns[None, :], acc, mask=mask)


# ---------------------------------------------------------------------------------------------------------------------
# Sums run over tokens: wgrad


@triton.jit
def ranks(offsets_ptr, experts, RANKED: tl.constexpr):
    """int32 [RANKED], a power of two from `experts` on: each expert's place, most tokens first; ties as listed.

    A permutation whatever the offsets hold, with the experts in front: no place is taken twice.
    """
    which = tl.arange(0, RANKED)
    ends = tl.load(offsets_ptr + which, mask=which < experts, other=0)
    starts = tl.load(offsets_ptr + which - 1, mask=(which > 0) & (which < experts), other=0)
    size = tl.where(which < experts, tl.maximum(ends - starts, 0), -1)
    longer = size[None, :] > size[:, None]
    before = longer | ((size[None, :] == size[:, None]) & (which[None, :] < which[:, None]))
    return tl.sum(before.to(tl.int32), 1)


@triton.jit(do_not_specialize=["far_step", "m", "experts", "as_r", "bs_c"])
def wgrad_kernel(
    a_ptr,
    a_scales_ptr,
    b_ptr,
    b_scales_ptr,
    out_ptr,
    offsets_ptr,
    far_ptr,
    far_step,
    m,
    n,
    k,
    experts,
    a_r,
    a_l,
    as_r,
    as_l,
    b_c,
    b_l,
    bs_c,
    bs_l,
    out_e,
    out_r,
    out_c,
    RANKED: tl.constexpr,
    REPAIR: tl.constexpr,
    OUT: tl.constexpr,
    SPLIT: tl.constexpr,
    SUPER: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BL: tl.constexpr,
    A_FORMAT: tl.constexpr,
    B_FORMAT: tl.constexpr,
    A_SQUARE: tl.constexpr,
    B_SQUARE: tl.constexpr,
    PRODUCT: tl.constexpr,
    NATIVE: tl.constexpr,
    FP8_DOT: tl.constexpr,
    DTYPE: tl.constexpr,
    ABLATE: tl.constexpr,
):
    """out [experts, n, k] (with SPLIT > 1 float32 [SPLIT, experts, n, k]) of a [n, m] and b [k, m].

    RANKED: a power of two, no fewer than the experts, which are then taken longest first; 0: as listed. far_ptr,
    far_step, REPAIR: as in rows_kernel.
    """
    if RANKED > 0:
        place = ranks(offsets_ptr, experts, RANKED)
    high = tl.cdiv(n, BM)
    wide = tl.cdiv(k, BN)
    jobs = experts * high * wide * SPLIT
    if REPAIR:
        jobs = tl.where(tl.load(far_ptr) == 0, 0, jobs)
    for job in range(tl.program_id(0), jobs, tl.num_programs(0)):
        part = job % SPLIT
        tile = job // SPLIT
        expert = tile // (high * wide)
        if RANKED > 0:
            expert = tl.sum(tl.where(place == expert, tl.arange(0, RANKED), 0), 0)
        tile_row, tile_column = tile_of(tile % (high * wide), high, wide, SUPER)
        start = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)
        end = tl.load(offsets_ptr + expert)
        start = tl.minimum(tl.maximum(start, 0), m) // BLOCK * BLOCK
        end = tl.minimum(tl.maximum(end, start), m)
        share = tl.cdiv(tl.cdiv(end - start, BLOCK), SPLIT) * BLOCK
        # Whole blocks, and so that the compiler sees it: otherwise it loads bytes one by one.
        low = tl.minimum(start + part * share, end) // BLOCK * BLOCK
        stop = tl.minimum(low + share, end) // BLOCK * BLOCK
        rows = tile_row * BM + tl.arange(0, BM)
        columns = tile_column * BN + tl.arange(0, BN)
        row_mask = rows < n
        if REPAIR:
            wanted = tl.load(far_ptr + (1 + job) * far_step) != 0
            stop = tl.where(wanted, stop, low)
            row_mask = row_mask & wanted
        column_mask = columns < k
        rows = rows.to(tl.int64)
        columns = columns.to(tl.int64)
        a = a_ptr, a_scales_ptr, a_r, a_l, as_r, as_l
        b = b_ptr, b_scales_ptr, b_c, b_l, bs_c, bs_l
        acc = tile_sums(
            a,
            b,
            rows,
            row_mask,
            columns,
            column_mask,
            low,
            stop,
            far_ptr,
            job,
            n,
            REPAIR,
            BM,
            BN,
            BL,
            A_FORMAT,
            B_FORMAT,
            A_SQUARE,
            B_SQUARE,
            PRODUCT,
            NATIVE,
            FP8_DOT,
            DTYPE,
            ABLATE,
        )
        mask = row_mask[:, None] & column_mask[None, :]
        expert = expert.to(tl.int64)
        if SPLIT == 1:
            at = out_ptr + expert * out_e + rows[:, None] * out_r + columns[None, :] * out_c
            tl.store(at, narrow(acc, OUT), mask=mask)
        else:
            at = out_ptr + ((part.to(tl.int64) * experts + expert) * n + rows[:, None]) * k + columns[None, :]
            tl.store(at, acc, mask=mask)


@triton.jit
def add_kernel(parts_ptr, out_ptr, size, inner, middle, out_o, out_m, out_i, SPLIT, OUT: tl.constexpr, B: tl.constexpr):
    """out [outer, middle, inner] = the float32 parts [SPLIT, size], added first to last and rounded once."""
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    mask = at < size
    total = tl.load(parts_ptr + at, mask=mask, other=0.0)
    for part in range(1, SPLIT):
        total += tl.load(parts_ptr + part * size + at, mask=mask, other=0.0)
    place = at // (middle * inner) * out_o + at // inner % middle * out_m + at % inner * out_i
    tl.store(out_ptr + place, narrow(total, OUT), mask=mask)


# ---------------------------------------------------------------------------------------------------------------------
# Devices and launches

TORCH_FORMATS: Mapping[torch.dtype, int] = {getattr(torch, f"float8_{name}"): i for i, name in enumerate(FORMAT_NAMES)}
TL_TYPES: Mapping[torch.dtype, Any] = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}


@dataclass(frozen=True)
class Device:
    """What the kernels need to know of where they run.

    name: a key of tiles.json ("sm90", "gfx942", "interpreter"). processors: programs that run at once. native: FP8
    formats (by number) that it converts itself. dots: those it multiplies itself. interpreted: on a CPU, in float32.
    """

    name: str
    processors: int
    native: tuple[int, ...]
    dots: tuple[int, ...]
    interpreted: bool


@cache
def device_for(device: torch.device) -> Device:
    """The Device of a tensor's device. RuntimeError for a CPU without the interpreter."""
    if device.type == "cpu":
        if not isinstance(rows_kernel, triton.runtime.JITFunction):
            return Device("interpreter", 3, (), (), True)
        raise RuntimeError("these kernels run on a GPU, or on a CPU where TRITON_INTERPRET=1 is set before the import")
    found = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        name = found.gcnArchName.partition(":")[0]
        own = {"gfx942": (2, 3), "gfx950": (0, 1)}.get(name, ())
        return Device(name, found.multi_processor_count, own if name == "gfx950" else (), own, False)
    native = (0, 1) if (found.major, found.minor) >= (8, 9) else ()
    return Device(f"sm{found.major}{found.minor}", found.multi_processor_count, native, native, False)


@dataclass(frozen=True)
class Tile:
    """Tile settings of one kernel. rows, columns: of the output. length: of the sum, a step; a multiple of 32.

    super: rows of tiles walked together. programs: per processor. registers: the most of a thread, 0 for any number.
    """

    rows: int
    columns: int
    length: int
    super: int
    warps: int
    stages: int
    programs: int = 1
    registers: int = 0

    def __post_init__(self) -> None:
        if self.length % 32 or min(self.rows, self.columns, self.length, self.super, self.programs) < 1:
            raise ValueError(f"{self}: expected a length in multiples of 32 and nothing below 1")


@cache
def tiles(device: str) -> Mapping[str, Tile]:
    """The settings of tiles.json by "op kind/product", those of the device over the defaults."""
    text = json.loads((Path(__file__).parent / "tiles.json").read_text())
    return {key: Tile(**values) for key, values in {**text["default"], **text.get(device, {})}.items()}


def tile_for(device: Device, kind: str, product: str, tile: Tile | None, group_rows: int = 0) -> Tile:
    """kind: "rows" or "wgrad". The caller's tile, or the file's; a step of `blocks` is one block, always.

    With group_rows the file's tile is cut so that it lies within one group; the caller's has to. ValueError.
    """
    found = tile or tiles(device.name)[f"{kind}/{product}"]
    if tile is None and group_rows:
        found = replace(found, rows=max(LEAST_ROWS, gcd(found.rows, group_rows)))
    if group_rows % found.rows:
        raise ValueError(f"a tile of {found.rows} rows would cross row groups of {group_rows}; expected a divisor")
    if product == "blocks" and found.length != 32:
        raise ValueError(f"product 'blocks' multiplies 32 at a time; its tile has length {found.length}")
    return found


def default_product(device: Device) -> str:
    """What is native (block-scaled dots of Blackwell and gfx950, gfx942's FP8 dots), else dequant.

    Dequant is the quickest of the three on an H200; the native ones are not measured.
    """
    native = {"sm100": "scaled", "sm103": "scaled", "gfx950": "scaled", "gfx942": "blocks"}
    return native.get(device.name, "dequant")


@dataclass(frozen=True)
class Operand:
    """uint8 codes of a format (by number) and uint8 scales: one for 32 codes along an axis, or for squares of 32."""

    codes: Tensor
    scales: Tensor
    format: int
    square: bool


def operand(elements: Tensor, scales: Tensor, contraction: int, other: int, name: str) -> Operand:
    """Check an operand's types and shapes. contraction, other: its axes. TypeError, ValueError."""
    if elements.dtype not in TORCH_FORMATS:
        raise TypeError(f"{name} has type {elements.dtype}; expected one of {', '.join(map(str, TORCH_FORMATS))}")
    if scales.dtype not in (torch.float8_e8m0fnu, torch.uint8):
        raise TypeError(f"{name}'s scales have type {scales.dtype}; expected float8_e8m0fnu")
    if elements.shape[contraction] % 32:
        raise ValueError(
            f"{name} has {elements.shape[contraction]} elements along axis {contraction}; expected a multiple of 32"
        )
    thin = list(elements.shape)
    thin[contraction] //= 32
    square = list(thin)
    square[other] = square[other] // 32 if square[other] % 32 == 0 else -1
    if tuple(scales.shape) not in (tuple(thin), tuple(square)):
        raise ValueError(
            f"{name}'s scales have shape {tuple(scales.shape)}; expected {tuple(thin)} for blocks of 32 along axis "
            f"{contraction} or one for every 32x32 of {tuple(elements.shape)}"
        )
    if scales.device != elements.device:
        raise ValueError(f"{name} is on {elements.device}, its scales on {scales.device}; expected one device")
    square_blocks = tuple(scales.shape) != tuple(thin)
    return Operand(elements.view(torch.uint8), scales.view(torch.uint8), TORCH_FORMATS[elements.dtype], square_blocks)


def output(
    shape: tuple[int, ...], device: torch.device, out: Tensor | None, out_dtype: torch.dtype | str | None
) -> Tensor:
    """The caller's buffer (any strides), or a fresh one of `out_dtype` (a torch dtype, its name, or None: bfloat16)."""
    dtype: torch.dtype | None = getattr(torch, out_dtype) if isinstance(out_dtype, str) else out_dtype
    if out is None:
        out = torch.empty(shape, dtype=dtype or torch.bfloat16, device=device)
    if tuple(out.shape) != shape or dtype not in (None, out.dtype) or out.device != device:
        raise ValueError(f"out is {out.dtype} {tuple(out.shape)} on {out.device}; expected {dtype} {shape} on {device}")
    if out.dtype not in TL_TYPES:
        raise TypeError(f"out has type {out.dtype}; expected bfloat16, float16 or float32")
    return out


def check_route(offsets: Tensor, length: int, align: int, check: bool) -> None:
    """Look at offsets that lie on the CPU, or anywhere with check=True. ValueError, TypeError."""
    if offsets.dtype != torch.int32 or offsets.ndim != 1 or not offsets.is_contiguous():
        raise TypeError(f"offsets are {offsets.dtype} {tuple(offsets.shape)}; expected int32 with one axis, contiguous")
    if check or offsets.device.type == "cpu":
        groups.check_offsets(offsets.cpu().numpy(), length, align=align)


def choices(device: Device, product: str | None, ablate: int, *formats: int) -> dict[str, Any]:
    """The kernels' arguments that the device, the formats and the way to multiply decide. ValueError, Unavailable."""
    product = default_product(device) if product is None else product
    if ablate and product != "dequant":
        raise ValueError(f"ablate={ablate} with product {product!r}; expected 'dequant'")
    if product not in PRODUCTS:
        raise ValueError(f"unknown product {product!r}; expected one of {', '.join(PRODUCTS)}")
    if product == "scaled" and any(f > 1 for f in formats):
        raise ValueError(
            f"product 'scaled' takes e4m3fn and e5m2, not {' and '.join(FORMAT_NAMES[f] for f in formats)}"
        )
    if product == "scaled" and not device.native:
        raise Unavailable(f"Triton has no block-scaled dot on {device.name}; use product='dequant' or 'blocks'")
    return {
        "PRODUCT": PRODUCTS.index(product),
        "NATIVE": bool(device.native),
        "FP8_DOT": all(f in device.dots for f in formats),
        "DTYPE": tl.float32 if device.interpreted else tl.bfloat16,
        "ABLATE": ablate,
    }


def settings(tile: Tile) -> dict[str, Any]:
    return {
        "SUPER": tile.super,
        "BM": tile.rows,
        "BN": tile.columns,
        "BL": tile.length,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        **({"maxnreg": tile.registers} if tile.registers else {}),
    }


def launch(kernel: Any, jobs: int, device: Device, tile: Tile, *args: Any, **options: Any) -> None:
    programs = max(1, min(jobs, device.processors * tile.programs))
    kernel[(programs,)](*args, **options, **settings(tile))


FAR = object()  # among a launch's arguments, where the marks go


@dataclass(frozen=True)
class Twice:
    """Among a launch's arguments, one that is another in the second launch, for the tiles that failed."""

    first: Any
    again: Any


def launch_repaired(
    kernel: Any, jobs: int, device: Device, tile: Tile, only_if: Tensor | None, *args: Any, **options: Any
) -> None:
    """The kernel, then once more for the tiles that failed; with only_if just the latter, for all or for none."""
    marks = torch.zeros(1 + jobs, dtype=torch.int32, device=args[0].device) if only_if is None else only_if
    step = 1 if only_if is None else 0
    given = [part for arg in args for part in ((marks, step) if arg is FAR else (arg,))]
    if only_if is None:
        first = [arg.first if isinstance(arg, Twice) else arg for arg in given]
        launch(kernel, jobs, device, tile, *first, REPAIR=False, **options)
    # It multiplies decoded elements whatever the product, in one of its ways: one kernel for all products.
    options |= {"PRODUCT": 0, "FP8_DOT": False, "ABLATE": 0}
    given = [arg.again if isinstance(arg, Twice) else arg for arg in given]
    launch(kernel, jobs, device, replace(tile, length=32), *given, REPAIR=True, **options)


def add_parts(parts: Tensor, out: Tensor) -> None:
    """out = parts[0] + parts[1] + ..., in this order, rounded once; out has two axes or three and any strides."""
    size = out.numel()
    view = out if out.ndim == 3 else out[None]
    strides = view.stride()
    grid = (triton.cdiv(size, 1024),)
    add_kernel[grid](
        parts, view, size, view.shape[2], view.shape[1], *strides, len(parts), OUT=TL_TYPES[out.dtype], B=1024
    )


def rows_gemm(
    a: Operand,
    b: Operand,
    axes: tuple[int, int],
    route: Tensor,
    *,
    group_rows: int = 0,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
    product: str | None = None,
    split: int = 1,
    tile: Tile | None = None,
    only_if: Tensor | None = None,
    ablate: int = 0,
) -> Tensor:
    """out [M, columns]: a [M, L], b with its columns and its contraction on `axes` and its experts on axis 0.

    only_if: int32 [1] on the device; where it holds 0, `out` stays as it is.
    """
    m, length = a.codes.shape
    column, contraction = axes
    experts, n = b.codes.shape[0], b.codes.shape[column]
    if b.codes.shape[contraction] != length:
        raise ValueError(f"the sum is over {length} of one operand and {b.codes.shape[contraction]} of the other")
    if bias is not None and tuple(bias.shape) != (experts, n):
        raise ValueError(f"bias has shape {tuple(bias.shape)}; expected {(experts, n)}")
    if split < 1:
        raise ValueError(f"split is {split}; expected 1 or more")
    device = device_for(a.codes.device)
    chosen = choices(device, product, ablate, a.format, b.format)
    tile = tile_for(device, "rows", PRODUCTS[chosen["PRODUCT"]], tile, group_rows)
    result = output((m, n), a.codes.device, out, out_dtype)
    if m == 0 or n == 0:
        return result
    parts = torch.empty((split, m, n), dtype=torch.float32, device=result.device) if split > 1 else result
    bias = None if bias is None else bias.to(torch.float32)  # keeps the strides of one that is float32 already
    launch_repaired(
        rows_kernel,
        (triton.cdiv(m, tile.rows) + experts + 1) * triton.cdiv(n, tile.columns) * split,
        device,
        tile,
        only_if,
        a.codes,
        a.scales,
        b.codes,
        b.scales,
        result if bias is None else bias,
        parts,
        route,
        FAR,
        m,
        n,
        length,
        experts,
        *a.codes.stride(),
        *a.scales.stride(),
        *(b.codes.stride(axis) for axis in (0, column, contraction)),
        *(b.scales.stride(axis) for axis in (0, column, contraction)),
        *((0, 0) if bias is None else bias.stride()),
        *result.stride(),
        EXPERTS=max(LEAST_EXPERTS, triton.next_power_of_2(experts + 1)),
        GROUP_ROWS=group_rows,
        HAS_BIAS=bias is not None,
        OUT=TL_TYPES[result.dtype],
        SPLIT=split,
        A_FORMAT=a.format,
        B_FORMAT=b.format,
        A_SQUARE=a.square,
        B_SQUARE=b.square,
        **chosen,
    )
    if split > 1:
        add_parts(parts, result)
    return result


def columns_gemm(
    a: Operand,
    b: Operand,
    offsets: Tensor,
    *,
    out: Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
    product: str | None = None,
    split: int = 1,
    tile: Tile | None = None,
    only_if: Tensor | None = None,
    ablate: int = 0,
    values: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """out [E, N, K]: a [N, M] and b [K, M], summed over each expert's part of M. only_if: as in rows_gemm.

    values: product `mixed`, of b dequantized to bfloat16 [K, M], and an int32 [1], not 0 where those are wrong.
    """
    (n, m), k, experts = a.codes.shape, b.codes.shape[0], len(offsets)
    if b.codes.shape[1] != m:
        raise ValueError(f"one operand holds {m} tokens and the other {b.codes.shape[1]}")
    if split < 1:
        raise ValueError(f"split is {split}; expected 1 or more")
    device = device_for(a.codes.device)
    chosen = choices(device, product, ablate, a.format, b.format)
    if values is not None:
        chosen["PRODUCT"] = MIXED.value
    tile = tile_for(device, "wgrad", (*PRODUCTS, "mixed")[chosen["PRODUCT"]], tile)
    result = output((experts, n, k), a.codes.device, out, out_dtype)
    if result.numel() == 0:
        return result
    parts = torch.empty((split, experts, n, k), dtype=torch.float32, device=result.device) if split > 1 else result
    right: list[Any] = [b.codes, b.scales, *b.codes.stride(), *b.scales.stride()]
    if values is not None:
        right = [Twice(*pair) for pair in zip([*values, *values[0].stride(), 0, 0], right, strict=True)]
    launch_repaired(
        wgrad_kernel,
        experts * triton.cdiv(n, tile.rows) * triton.cdiv(k, tile.columns) * split,
        device,
        tile,
        only_if,
        a.codes,
        a.scales,
        *right[:2],
        parts,
        offsets,
        FAR,
        m,
        n,
        k,
        experts,
        *a.codes.stride(),
        *a.scales.stride(),
        *right[2:],
        *result.stride(),
        RANKED=RANKED_EXPERTS if experts <= RANKED_EXPERTS else 0,
        OUT=TL_TYPES[result.dtype],
        SPLIT=split,
        A_FORMAT=a.format,
        B_FORMAT=b.format,
        A_SQUARE=a.square,
        B_SQUARE=b.square,
        **chosen,
    )
    if split > 1:
        add_parts(parts, result)
    return result


# ---------------------------------------------------------------------------------------------------------------------
# The three ops


def forward(
    x: Tensor,
    x_scales: Tensor,
    w: Tensor,
    w_scales: Tensor,
    offsets: Tensor,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
    product: str | None = None,
    split: int = 1,
    weights: str = "nk",
    group_rows: int = 0,
    check: bool = False,
    tile: Tile | None = None,
    ablate: int = 0,
) -> Tensor:
    """Y[g] = X[g] W[g]^T + bias[g]: x [M,K], scales [M,K/32]; w [E,N,K], scales [E,N,K/32]; bias [E,N]; y [M,N].

    weights: "nk", or "kn" for w [E,K,N], scales [E,K/32,N]. Either operand may be in 32x32 blocks. Any strides.
    offsets: int32 cumulative ends [E]; with group_rows > 0 the expert of every group_rows rows [M / group_rows], -1 for
    rows that are nobody's, which become exact zeros. product: a name of PRODUCTS (default: the device's). split: parts
    of the sum, added in float32 and in order. check: look at offsets on a GPU too. ablate: of ABLATIONS, to measure
    what a part costs; the result is then wrong. ValueError, TypeError.
    """
    column, contraction = _weight_axes(weights, "nk", "kn")
    route = _route(offsets, x, group_rows, check)
    return rows_gemm(
        operand(x, x_scales, 1, 0, "x"),
        operand(w, w_scales, contraction, column, "w"),
        (column, contraction),
        route,
        group_rows=group_rows,
        bias=bias,
        out=out,
        out_dtype=out_dtype,
        product=product,
        split=split,
        tile=tile,
        ablate=ablate,
    )


def dgrad(
    dy: Tensor,
    dy_scales: Tensor,
    w: Tensor,
    w_scales: Tensor,
    offsets: Tensor,
    *,
    out: Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
    product: str | None = None,
    split: int = 1,
    weights: str = "nk",
    group_rows: int = 0,
    check: bool = False,
    tile: Tile | None = None,
    ablate: int = 0,
) -> Tensor:
    """dX[g] = dY[g] W[g]: dy [M,N], scales [M,N/32]; w [E,N,K] blocked along N, scales [E,N/32,K]; dx [M,K].

    weights: "nk", or "kn" for w [E,K,N], scales [E,K,N/32]. The other options are forward's.
    """
    contraction, column = _weight_axes(weights, "nk", "kn")
    route = _route(offsets, dy, group_rows, check)
    return rows_gemm(
        operand(dy, dy_scales, 1, 0, "dy"),
        operand(w, w_scales, contraction, column, "w"),
        (column, contraction),
        route,
        group_rows=group_rows,
        out=out,
        out_dtype=out_dtype,
        product=product,
        split=split,
        tile=tile,
        ablate=ablate,
    )


def wgrad(
    dy_t: Tensor,
    dy_scales: Tensor,
    x_t: Tensor,
    x_scales: Tensor,
    offsets: Tensor,
    *,
    out: Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
    product: str | None = None,
    split: int = 1,
    check: bool = False,
    tile: Tile | None = None,
    ablate: int = 0,
) -> Tensor:
    """dW[g] = dY[g]^T X[g]: dy_t [N,M], scales [N,M/32]; x_t [K,M], scales [K,M/32]; dw [E,N,K], +0 for no tokens.

    offsets: int32 [E], each a multiple of 32. The options are forward's.
    """
    check_route(offsets, dy_t.shape[1], 32, check)
    return columns_gemm(
        operand(dy_t, dy_scales, 1, 0, "dy_t"),
        operand(x_t, x_scales, 1, 0, "x_t"),
        offsets,
        out=out,
        out_dtype=out_dtype,
        product=product,
        split=split,
        tile=tile,
        ablate=ablate,
    )


def _weight_axes(weights: str, *layouts: str) -> tuple[int, int]:
    """The axes of N and K in the weights."""
    if weights not in layouts:
        raise ValueError(f"weights={weights!r}; expected one of {', '.join(layouts)}")
    return weights.index("n") + 1, weights.index("k") + 1


def _route(offsets: Tensor, tokens: Tensor, group_rows: int, check: bool) -> Tensor:
    """offsets, or the experts of row groups, once their type and their length are known to be good."""
    m = tokens.shape[0]
    if group_rows == 0:
        check_route(offsets, m, 1, check)
    elif offsets.dtype != torch.int32 or tuple(offsets.shape) != (-(-m // group_rows),):
        raise ValueError(
            f"experts of row groups are {offsets.dtype} {tuple(offsets.shape)}; "
            f"expected int32 {(-(-m // group_rows),)}, one for every {group_rows} of {m} rows"
        )
    return offsets


# What mxgate.kernels.triton.builds registers, by "op_product" and "op_split".
forward_dequant = partial(forward, product="dequant")
forward_blocks = partial(forward, product="blocks")
forward_scaled = partial(forward, product="scaled")
forward_split = partial(forward, product="dequant", split=3)
dgrad_dequant = partial(dgrad, product="dequant")
dgrad_blocks = partial(dgrad, product="blocks")
dgrad_scaled = partial(dgrad, product="scaled")
dgrad_split = partial(dgrad, product="dequant", split=3)
wgrad_dequant = partial(wgrad, product="dequant")
wgrad_blocks = partial(wgrad, product="blocks")
wgrad_scaled = partial(wgrad, product="scaled")
wgrad_split = partial(wgrad, product="dequant", split=3)

# What mxgate.conformance.timing_gpu times beside them when it is asked for ablations.
for _dequant in (forward_dequant, dgrad_dequant, wgrad_dequant):
    vars(_dequant)["ablations"] = {name: partial(_dequant, ablate=number) for name, number in ABLATIONS.items()}
