"""Vector ALU semantics: a row a mnemonic, grouped by what it works on, after the public CDNA3/CDNA4 ISA documents.

Letters: u i f (32 bits), U I F (64 bits), h (float16, low half), m (lane mask in SGPRs), s (scalar), V (VCC, implied),
D (the destination, read). Floats are IEEE: round to nearest even, denormals kept, NaN payloads not modelled.
Transcendentals (rcp, rsq, sqrt, exp, log, sin, cos) are correctly rounded here; silicon may be 1 ulp away [assumed].
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from mxgate.kernels.gfx950 import floats, integers
from mxgate.kernels.gfx950.integers import first_high, first_low, ones
from mxgate.kernels.gfx950.integers import wide as w
from mxgate.kernels.gfx950.integers import wide_signed as wi
from mxgate.kernels.gfx950.state import (
    LANES,
    Array,
    Get,
    Layout,
    Put,
    Row,
    Step,
    Waves,
    allowed,
    constant,
    scalar_put,
    scalar_source,
    store,
    unsigned,
    vector_put,
    vector_source,
)
from mxgate.kernels.gfx950.text import VCC, Instruction, Operand

Fn = Callable[..., Any]
u32, u64 = np.uint32, np.uint64
_VCC = Operand("s", VCC, 2, text="vcc")
CLAMP, OMOD = frozenset(("clamp",)), frozenset(("clamp", "mul", "div"))


def _lo24(x: Array) -> Array:
    return x & u32(0xFFFFFF)


def _s24(x: Array) -> Array:
    return (x << 8) >> 8


def _u16(x: Array) -> Array:
    return (x & u32(0xFFFF)).astype(np.uint16)


def _i16(x: Array) -> Array:
    return _u16(x).view(np.int16)


def _halves(fn: Fn, kind: Any) -> Fn:
    """A packed 16-bit operation on both halves, operands already selected (see `_packed16`)."""
    return lambda *a: fn(*[np.asarray(x).view(kind) for x in a])


# ------------------------------------------------------------------------------------- integers
def _perm(x: Array, y: Array, selector: Array) -> Array:
    """Bytes 0-3 come from y, 4-7 from x; 8-11 are sign bytes, 12 is 0x00, above it 0xFF."""
    selector = np.ascontiguousarray(selector)
    pool = np.ascontiguousarray(w(y) | (w(x) << u64(32)))
    octets = pool.view(np.uint8).reshape(*pool.shape, 8)
    chosen = np.minimum(selector.view(np.uint8).reshape(*selector.shape, 4), 13)
    picked = np.empty((*np.broadcast(pool, selector).shape, 4), np.uint8)
    if (selector == selector.flat[0]).all():  # as a scalar one mostly is
        for k, c in enumerate(chosen.reshape(-1, 4)[0].tolist()):
            picked[..., k] = octets[..., c] if c < 8 else _sign(octets[..., 2 * c - 15]) if c < 12 else 0xFF * (c > 12)
    else:
        table = np.empty((*picked.shape[:-1], 14), np.uint8)
        table[..., :8], table[..., 8:12], table[..., 12:] = octets, _sign(octets[..., 1::2]), (0, 255)
        np.copyto(picked, np.take_along_axis(table, chosen, -1))
    return picked.view(u32)[..., 0]


def _sign(octets: Array) -> Array:
    """0xFF where the high bit is set, 0x00 elsewhere."""
    return np.where(octets < 128, np.uint8(0), np.uint8(255))


def _median(fn_min: Fn, fn_max: Fn) -> Fn:
    return lambda x, y, z: fn_max(fn_min(x, y), fn_min(fn_max(x, y), z))


def _clamped(fn: Fn, low: int, high: int, kind: Any) -> Fn:
    """Integer clamp: the exact result, saturated."""
    return lambda *a: np.clip(fn(*[wi(x) for x in a]), low, high).astype(kind)


def _mbcnt(first: int) -> Fn:
    below = np.array([(1 << min(max(lane - first, 0), 32)) - 1 for lane in range(64)], u32)
    return lambda mask, x: ones(np.broadcast_to(mask, (*mask.shape[:-1], 64) if mask.ndim else (64,)) & below) + x


def _mad64(x: Array, y: Array, z: Array) -> tuple[Array, Array]:
    product = w(x) * w(y)
    r = product + z
    return r, r < product


def _mad64_signed(x: Array, y: Array, z: Array) -> tuple[Array, Array]:
    product = wi(x) * wi(y)
    r = product + z
    return r, ((product ^ ~z) & (product ^ r)) < 0


def _bitop3(table: int) -> Fn:
    terms = [t for t in range(8) if table >> t & 1]

    def fn(x: Array, y: Array, z: Array) -> Array:
        out = np.zeros((), u32)
        for t in terms:
            out = out | ((x if t & 4 else ~x) & (y if t & 2 else ~y) & (z if t & 1 else ~z))
        return out

    return fn


# ------------------------------------------------------------------------------------- floats
def fmax(x: Array, y: Array) -> Array:
    """IEEE maxNum with +0 above -0; a NaN gives way to a number."""
    r = np.fmax(x, y)
    zeros = (x == 0) & (y == 0)
    return (
        np.where(zeros, np.where(np.signbit(x) & np.signbit(y), -r.dtype.type(0), r.dtype.type(0)), r)
        if zeros.any()
        else r
    )


def fmin(x: Array, y: Array) -> Array:
    r = np.fmin(x, y)
    zeros = (x == 0) & (y == 0)
    return (
        np.where(zeros, np.where(np.signbit(x) | np.signbit(y), -r.dtype.type(0), r.dtype.type(0)), r)
        if zeros.any()
        else r
    )


def _propagate(fn: Fn) -> Fn:
    """IEEE-754-2019 maximum/minimum of three: any NaN wins."""

    def three(x: Array, y: Array, z: Array) -> Array:
        nan = np.isnan(x) | np.isnan(y) | np.isnan(z)
        return np.where(nan, np.float32(np.nan), fn(fn(x, y), z))

    return three


def _med3(x: Array, y: Array, z: Array) -> Array:
    nan = np.isnan(x) | np.isnan(y) | np.isnan(z)
    return np.where(nan, fmin(fmin(x, y), z), fmax(fmin(x, y), fmin(fmax(x, y), z)))


def _to_int(x: Array, low: int, high: int, kind: Any) -> Array:
    y = np.trunc(np.asarray(x).astype(np.float64))
    return np.clip(np.where(np.isnan(y), 0.0, y), low, high).astype(np.int64).astype(kind)


def _exponent(x: Array) -> Array:
    return ((np.asarray(x).view(u32) >> u32(23)) & u32(0xFF)).astype(np.int32)


def _denormal(x: Array) -> Array:
    return (x != 0) & (np.abs(x) < np.float32(2.0**-126))


def _div_scale(s0: Array, s1: Array, s2: Array) -> tuple[Array, Array]:
    """s1 denominator, s2 numerator; scales s0 (one of them) so that the quotient's steps neither over- nor
    underflow."""
    one = np.float32(1)
    quotient, inverse = s2.astype(np.float64) / s1, 1.0 / s1.astype(np.float64)
    q_tiny = (quotient != 0) & (np.abs(quotient) < 2.0**-126)
    i_tiny = (inverse != 0) & (np.abs(inverse) < 2.0**-126)
    up, down = np.ldexp(s0, 64), np.ldexp(s0, -64)
    is_den, is_num = s0.view(u32) == s1.view(u32), s0.view(u32) == s2.view(u32)
    nan = np.float32(np.nan) * one
    cases = [
        ((s1 == 0) | (s2 == 0), nan, False),
        (_exponent(s2) - _exponent(s1) >= 96, np.where(is_den, up, s0), True),
        (_denormal(s1), up, False),
        (i_tiny & q_tiny, np.where(is_den, up, s0), True),
        (i_tiny, down, False),
        (q_tiny, np.where(is_num, up, s0), True),
        (_exponent(s2) <= 23, up, False),
    ]
    conditions = [np.broadcast_to(c[0], np.broadcast(s0, s1, s2).shape) for c in cases]
    value = np.select(conditions, [np.broadcast_to(c[1], conditions[0].shape) for c in cases], s0)
    flag = np.select(conditions, [np.full(conditions[0].shape, c[2]) for c in cases], False)
    return value.astype(np.float32), flag


def _div_fmas(x: Array, y: Array, z: Array, vcc: Array) -> Array:
    r = floats.fma32(x, y, z)
    return np.where(vcc, np.ldexp(r, 32), r)


def _div_fixup(s0: Array, s1: Array, s2: Array) -> Array:
    negative = np.signbit(s1) ^ np.signbit(s2)
    sign = np.where(negative, np.float32(-1), np.float32(1))
    inf1, inf2 = np.isinf(s1), np.isinf(s2)
    conditions = [
        np.isnan(s2) | np.isnan(s1),
        ((s1 == 0) & (s2 == 0)) | (inf1 & inf2),
        (s1 == 0) | inf2,
        inf1 | (s2 == 0),
        _exponent(s2) - _exponent(s1) < -150,
        _exponent(s1) == 255,
    ]
    nan, inf, zero = np.float32(np.nan), sign * np.float32(np.inf), sign * np.float32(0)
    shape = np.broadcast(s0, s1, s2).shape
    values = [nan, nan, inf, zero, zero, inf]
    full = [np.broadcast_to(v, shape) for v in values]
    return np.select([np.broadcast_to(c, shape) for c in conditions], full, sign * np.abs(s0)).astype(np.float32)


def _class(x: Array, mask: Array) -> Array:
    neg, nan, inf, zero, den = np.signbit(x), np.isnan(x), np.isinf(x), x == 0, _denormal(x)
    normal = ~(nan | inf | zero | den)
    kinds = [
        nan,
        nan,
        inf & neg,
        normal & neg,
        den & neg,
        zero & neg,
        zero & ~neg,
        den & ~neg,
        normal & ~neg,
        inf & ~neg,
    ]
    quiet = (x.view(u32) >> u32(22)) & u32(1) == 1
    kinds[0], kinds[1] = nan & ~quiet, nan & quiet
    out = np.zeros(np.broadcast(x, mask).shape, bool)
    for bit, k in enumerate(kinds):
        out |= k & ((mask >> u32(bit)) & u32(1) == 1)
    return out


def _cvt_pk(name: str, saturate: bool) -> Fn:
    """Two float32 to two 8-bit codes. Out of range: NaN/inf as OFP8 without saturation [assumed], else the largest."""

    def code(x: Array) -> Array:
        c = floats.narrow(x.astype(np.float64), name)
        if not saturate:
            table = floats.FP8 if name == "fp8" else floats.BF8
            top = float(np.nanmax(np.where(np.isinf(table), np.nan, table)))
            step = 32.0 if name == "fp8" else 8192.0
            over = np.abs(x) >= top + step / 2
            special = np.where(np.signbit(x), u32(0x80), u32(0)) | u32(0x7F if name == "fp8" else 0x7C)
            c = np.where(over, special, c)
        return c

    return lambda x, y: code(x) | (code(y) << u32(8))


def _scale_of(x: Array) -> Array:
    """A scale operand's power of two: the exponent field of a float32 (0xFF: NaN)."""
    return floats.E8M0[_exponent(x)]


# name -> row. D as a source is the old destination.
ROWS: dict[str, Row] = {
    # moves and bit operations
    "v_mov_b32": Row("u", "u", lambda x: x),
    "v_accvgpr_read_b32": Row("u", "u", lambda x: x),
    "v_accvgpr_write_b32": Row("u", "u", lambda x: x),
    "v_accvgpr_mov_b32": Row("u", "u", lambda x: x),
    "v_accvgpr_read": Row("u", "u", lambda x: x),  # the assembler's short names of the first two
    "v_accvgpr_write": Row("u", "u", lambda x: x),
    "v_mov_b64": Row("U", "U", lambda x: x),
    "v_not_b32": Row("u", "u", np.invert),
    "v_and_b32": Row("u", "uu", np.bitwise_and),
    "v_or_b32": Row("u", "uu", np.bitwise_or),
    "v_xor_b32": Row("u", "uu", np.bitwise_xor),
    "v_xnor_b32": Row("u", "uu", lambda x, y: ~(x ^ y)),
    "v_or3_b32": Row("u", "uuu", lambda x, y, z: x | y | z),
    "v_and_or_b32": Row("u", "uuu", lambda x, y, z: (x & y) | z),
    "v_bfi_b32": Row("u", "uuu", lambda x, y, z: (x & y) | (~x & z)),
    "v_bfrev_b32": Row("u", "u", integers.reverse),
    "v_bfm_b32": Row("u", "uu", integers.mask),
    "v_bfe_u32": Row("u", "uuu", lambda x, y, z: integers.field(x, y & u32(31), z & u32(31))),
    "v_bfe_i32": Row("i", "iuu", lambda x, y, z: integers.field_signed(x, y & u32(31), z & u32(31))),
    "v_bcnt_u32_b32": Row("u", "uu", lambda x, y: ones(np.atleast_1d(x)).reshape(np.shape(x)) + y),
    "v_ffbl_b32": Row("u", "u", first_low),
    "v_ffbh_u32": Row("u", "u", first_high),
    "v_perm_b32": Row("u", "uuu", _perm),
    "v_alignbit_b32": Row("u", "uuu", lambda x, y, z: (((w(x) << u64(32)) | w(y)) >> w(z & u32(31))).astype(u32)),
    "v_alignbyte_b32": Row(
        "u", "uuu", lambda x, y, z: (((w(x) << u64(32)) | w(y)) >> w((z & u32(3)) * u32(8))).astype(u32)
    ),
    "v_mbcnt_lo_u32_b32": Row("u", "uu", _mbcnt(0)),
    "v_mbcnt_hi_u32_b32": Row("u", "uu", _mbcnt(32)),
    "v_cndmask_b32": Row("u", "uum", lambda x, y, m: np.where(m, y, x)),
    "v_lshlrev_b32": Row("u", "uu", lambda x, y: y << (x & u32(31))),
    "v_lshrrev_b32": Row("u", "uu", lambda x, y: y >> (x & u32(31))),
    "v_ashrrev_i32": Row("i", "ii", lambda x, y: y >> (x & 31)),
    "v_lshlrev_b64": Row("U", "uU", lambda x, y: integers.shift_left_64(y, x)),
    "v_lshrrev_b64": Row("U", "uU", lambda x, y: integers.shift_right_64(y, x)),
    "v_ashrrev_i64": Row("I", "uI", lambda x, y: integers.shift_right_signed_64(y, x)),
    "v_lshl_or_b32": Row("u", "uuu", lambda x, y, z: (x << (y & u32(31))) | z),
    "v_lshl_add_u32": Row("u", "uuu", lambda x, y, z: (x << (y & u32(31))) + z),
    "v_add_lshl_u32": Row("u", "uuu", lambda x, y, z: (x + y) << (z & u32(31))),
    "v_xad_u32": Row("u", "uuu", lambda x, y, z: (x ^ y) + z),
    "v_lshl_add_u64": Row("U", "UuU", lambda x, y, z: (x << w(y & u32(7))) + z),
    "v_pack_b32_f16": Row("u", "uu", lambda x, y: (x & u32(0xFFFF)) | (y << u32(16)), frozenset(("op_sel",))),
    # integer arithmetic
    "v_add_u32": Row("u", "uu", np.add, CLAMP, _clamped(np.add, 0, 0xFFFFFFFF, u32)),
    "v_sub_u32": Row("u", "uu", np.subtract, CLAMP, _clamped(np.subtract, 0, 0xFFFFFFFF, u32)),
    "v_subrev_u32": Row("u", "uu", lambda x, y: y - x, CLAMP, _clamped(lambda x, y: y - x, 0, 0xFFFFFFFF, u32)),
    "v_add_i32": Row("i", "ii", np.add, CLAMP, _clamped(np.add, -(1 << 31), (1 << 31) - 1, np.int32)),
    "v_sub_i32": Row("i", "ii", np.subtract, CLAMP, _clamped(np.subtract, -(1 << 31), (1 << 31) - 1, np.int32)),
    "v_add3_u32": Row(
        "u", "uuu", lambda x, y, z: x + y + z, CLAMP, _clamped(lambda x, y, z: x + y + z, 0, 0xFFFFFFFF, u32)
    ),
    "v_add_co_u32": Row("um", "uu", integers.add),
    "v_addc_co_u32": Row("um", "uum", integers.add_carry),
    "v_sub_co_u32": Row("um", "uu", integers.subtract),
    "v_subrev_co_u32": Row("um", "uu", lambda x, y: integers.subtract(y, x)),
    "v_subb_co_u32": Row("um", "uum", integers.subtract_borrow),
    "v_subbrev_co_u32": Row("um", "uum", lambda x, y, c: integers.subtract_borrow(y, x, c)),
    "v_mul_lo_u32": Row("u", "uu", np.multiply),
    "v_mul_hi_u32": Row("u", "uu", integers.multiply_high),
    "v_mul_hi_i32": Row("i", "ii", integers.multiply_high_signed),
    "v_mul_u32_u24": Row("u", "uu", lambda x, y: _lo24(x) * _lo24(y)),
    "v_mul_hi_u32_u24": Row("u", "uu", lambda x, y: integers.multiply_high(_lo24(x), _lo24(y))),
    "v_mul_i32_i24": Row("i", "ii", lambda x, y: _s24(x) * _s24(y)),
    "v_mad_u32_u24": Row("u", "uuu", lambda x, y, z: _lo24(x) * _lo24(y) + z),
    "v_mad_i32_i24": Row("i", "iii", lambda x, y, z: _s24(x) * _s24(y) + z),
    "v_mad_u64_u32": Row("Um", "uuU", _mad64),
    "v_mad_i64_i32": Row("Im", "iiI", _mad64_signed),
    "v_min_u32": Row("u", "uu", np.minimum),
    "v_max_u32": Row("u", "uu", np.maximum),
    "v_min_i32": Row("i", "ii", np.minimum),
    "v_max_i32": Row("i", "ii", np.maximum),
    "v_min3_u32": Row("u", "uuu", lambda x, y, z: np.minimum(np.minimum(x, y), z)),
    "v_max3_u32": Row("u", "uuu", lambda x, y, z: np.maximum(np.maximum(x, y), z)),
    "v_min3_i32": Row("i", "iii", lambda x, y, z: np.minimum(np.minimum(x, y), z)),
    "v_max3_i32": Row("i", "iii", lambda x, y, z: np.maximum(np.maximum(x, y), z)),
    "v_med3_u32": Row("u", "uuu", _median(np.minimum, np.maximum)),
    "v_med3_i32": Row("i", "iii", _median(np.minimum, np.maximum)),
    "v_sad_u32": Row("u", "uuu", lambda x, y, z: np.abs(wi(x) - wi(y)).astype(u32) + z),
    # 16-bit integers (the high half of the result is zero)
    "v_add_u16": Row(
        "u",
        "uu",
        lambda x, y: (x + y) & u32(0xFFFF),
        CLAMP,
        lambda x, y: np.minimum((x & u32(0xFFFF)) + (y & u32(0xFFFF)), u32(0xFFFF)),
    ),
    "v_sub_u16": Row(
        "u",
        "uu",
        lambda x, y: (x - y) & u32(0xFFFF),
        CLAMP,
        lambda x, y: np.maximum(wi(x & u32(0xFFFF)) - wi(y & u32(0xFFFF)), 0).astype(u32),
    ),
    "v_subrev_u16": Row("u", "uu", lambda x, y: (y - x) & u32(0xFFFF)),
    "v_mul_lo_u16": Row("u", "uu", lambda x, y: (x * y) & u32(0xFFFF)),
    "v_lshlrev_b16": Row("u", "uu", lambda x, y: (y << (x & u32(15))) & u32(0xFFFF)),
    "v_lshrrev_b16": Row("u", "uu", lambda x, y: (y & u32(0xFFFF)) >> (x & u32(15))),
    "v_ashrrev_i16": Row(
        "u", "uu", lambda x, y: (_i16(y).astype(np.int32) >> (x & u32(15)).astype(np.int32)).astype(u32) & u32(0xFFFF)
    ),
    "v_min_u16": Row("u", "uu", lambda x, y: np.minimum(x & u32(0xFFFF), y & u32(0xFFFF))),
    "v_max_u16": Row("u", "uu", lambda x, y: np.maximum(x & u32(0xFFFF), y & u32(0xFFFF))),
    "v_min_i16": Row("u", "uu", lambda x, y: np.minimum(_i16(x), _i16(y)).view(np.uint16).astype(u32)),
    "v_max_i16": Row("u", "uu", lambda x, y: np.maximum(_i16(x), _i16(y)).view(np.uint16).astype(u32)),
    "v_mad_u16": Row("u", "uuu", lambda x, y, z: (x * y + z) & u32(0xFFFF)),
    # float32
    "v_add_f32": Row("f", "ff", np.add, OMOD),
    "v_sub_f32": Row("f", "ff", np.subtract, OMOD),
    "v_subrev_f32": Row("f", "ff", lambda x, y: y - x, OMOD),
    "v_mul_f32": Row("f", "ff", np.multiply, OMOD),
    "v_mul_legacy_f32": Row("f", "ff", lambda x, y: np.where((x == 0) | (y == 0), np.float32(0), x * y), OMOD),
    "v_max_f32": Row("f", "ff", fmax, OMOD),
    "v_min_f32": Row("f", "ff", fmin, OMOD),
    "v_max3_f32": Row("f", "fff", lambda x, y, z: fmax(fmax(x, y), z), OMOD),
    "v_min3_f32": Row("f", "fff", lambda x, y, z: fmin(fmin(x, y), z), OMOD),
    "v_med3_f32": Row("f", "fff", _med3, OMOD),
    "v_maximum3_f32": Row("f", "fff", _propagate(fmax), OMOD),
    "v_minimum3_f32": Row("f", "fff", _propagate(fmin), OMOD),
    "v_fma_f32": Row("f", "fff", floats.fma32, OMOD),
    "v_fmac_f32": Row("f", "ffD", floats.fma32, OMOD),
    "v_fmamk_f32": Row("f", "fff", floats.fma32),
    "v_fmaak_f32": Row("f", "fff", floats.fma32),
    "v_ldexp_f32": Row(
        "f", "fi", lambda x, n: np.ldexp(x.astype(np.float64), np.clip(n, -400, 400)).astype(np.float32), OMOD
    ),
    "v_div_scale_f32": Row("fm", "fff", _div_scale),
    "v_div_fmas_f32": Row("f", "fffV", _div_fmas),
    "v_div_fixup_f32": Row("f", "fff", _div_fixup),
    "v_rcp_f32": Row("f", "f", lambda x: (1.0 / x.astype(np.float64)).astype(np.float32), OMOD),
    "v_rcp_iflag_f32": Row("f", "f", lambda x: (1.0 / x.astype(np.float64)).astype(np.float32), OMOD),
    "v_rsq_f32": Row("f", "f", lambda x: (1.0 / np.sqrt(x.astype(np.float64))).astype(np.float32), OMOD),
    "v_sqrt_f32": Row("f", "f", np.sqrt, OMOD),
    "v_exp_f32": Row("f", "f", lambda x: np.exp2(x.astype(np.float64)).astype(np.float32), OMOD),
    "v_log_f32": Row("f", "f", lambda x: np.log2(x.astype(np.float64)).astype(np.float32), OMOD),
    "v_sin_f32": Row("f", "f", lambda x: np.sin(x.astype(np.float64) * 2 * np.pi).astype(np.float32), OMOD),
    "v_cos_f32": Row("f", "f", lambda x: np.cos(x.astype(np.float64) * 2 * np.pi).astype(np.float32), OMOD),
    "v_floor_f32": Row("f", "f", np.floor, OMOD),
    "v_ceil_f32": Row("f", "f", np.ceil, OMOD),
    "v_trunc_f32": Row("f", "f", np.trunc, OMOD),
    "v_rndne_f32": Row("f", "f", np.rint, OMOD),
    "v_fract_f32": Row("f", "f", lambda x: np.minimum(x - np.floor(x), np.float32(1 - 2.0**-24)), OMOD),
    "v_frexp_mant_f32": Row("f", "f", lambda x: np.where(np.isfinite(x), np.frexp(x)[0], x), OMOD),
    "v_frexp_exp_i32_f32": Row("i", "f", lambda x: np.where(np.isfinite(x), np.frexp(x)[1], 0).astype(np.int32)),
    # float64 (address and statistics code)
    "v_add_f64": Row("F", "FF", np.add),
    "v_mul_f64": Row("F", "FF", np.multiply),
    "v_fma_f64": Row("F", "FFF", floats.fma64),
    "v_max_f64": Row("F", "FF", fmax),
    "v_min_f64": Row("F", "FF", fmin),
    # float16
    "v_add_f16": Row("h", "hh", np.add),
    "v_sub_f16": Row("h", "hh", np.subtract),
    "v_mul_f16": Row("h", "hh", np.multiply),
    "v_max_f16": Row("h", "hh", fmax),
    "v_min_f16": Row("h", "hh", fmin),
    # conversions
    "v_cvt_f32_u32": Row("f", "u", lambda x: x.astype(np.float32), OMOD),
    "v_cvt_f32_i32": Row("f", "i", lambda x: x.astype(np.float32), OMOD),
    **{
        f"v_cvt_f32_ubyte{b}": Row("f", "u", lambda x, b=b: ((x >> u32(8 * b)) & u32(0xFF)).astype(np.float32))
        for b in range(4)
    },
    "v_cvt_u32_f32": Row("u", "f", lambda x: _to_int(x, 0, 0xFFFFFFFF, u32)),
    "v_cvt_i32_f32": Row("i", "f", lambda x: _to_int(x, -(1 << 31), (1 << 31) - 1, np.int32)),
    "v_cvt_f16_f32": Row("h", "f", lambda x: x.astype(np.float16), OMOD),
    "v_cvt_f32_f16": Row("f", "h", lambda x: x.astype(np.float32), OMOD),
    "v_cvt_f64_f32": Row("F", "f", lambda x: x.astype(np.float64)),
    "v_cvt_f32_f64": Row("f", "F", lambda x: x.astype(np.float32)),
    "v_cvt_f64_i32": Row("F", "i", lambda x: x.astype(np.float64)),
    "v_cvt_f64_u32": Row("F", "u", lambda x: x.astype(np.float64)),
    "v_cvt_i32_f64": Row("i", "F", lambda x: _to_int(x, -(1 << 31), (1 << 31) - 1, np.int32)),
    "v_cvt_u32_f64": Row("u", "F", lambda x: _to_int(x, 0, 0xFFFFFFFF, u32)),
    "v_cvt_pk_bf16_f32": Row("u", "ff", floats.bf16_pair),
    "v_cvt_pkrtz_f16_f32": Row("u", "ff", lambda x, y: _rtz16(x) | (_rtz16(y) << u32(16))),
    "v_cvt_pk_u16_u32": Row(
        "u", "uu", lambda x, y: np.minimum(x, u32(0xFFFF)) | (np.minimum(y, u32(0xFFFF)) << u32(16))
    ),
    # comparisons into a mask that are not of the regular family
    "v_cmp_class_f32": Row("m", "fu", _class),
}


def _rtz16(x: Array) -> Array:
    """float32 to float16 bits, toward zero."""
    h = np.asarray(x).astype(np.float16)
    over = np.abs(h.astype(np.float64)) > np.abs(np.asarray(x).astype(np.float64))
    bits = h.view(np.uint16)
    return np.where(over, bits - np.uint16(1), bits).astype(u32)


_ORDER: dict[str, Fn] = {
    "f": lambda x, y: np.zeros(np.broadcast(x, y).shape, bool),
    "lt": np.less,
    "eq": np.equal,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "t": lambda x, y: np.ones(np.broadcast(x, y).shape, bool),
}
_FLOAT_ORDER: dict[str, Fn] = {
    **{k: v for k, v in _ORDER.items() if k != "t"},
    "lg": lambda x, y: (x < y) | (x > y),
    "o": lambda x, y: ~(np.isnan(x) | np.isnan(y)),
    "u": lambda x, y: np.isnan(x) | np.isnan(y),
    "nge": lambda x, y: ~(x >= y),
    "nlg": lambda x, y: ~((x < y) | (x > y)),
    "ngt": lambda x, y: ~(x > y),
    "nle": lambda x, y: ~(x <= y),
    "neq": lambda x, y: ~(x == y),
    "nlt": lambda x, y: ~(x < y),
    "tru": _ORDER["t"],
}


def _as16(fn: Fn, take: Fn) -> Fn:
    return lambda x, y: fn(take(x), take(y))


_INTEGER_ORDER: dict[str, Fn] = {**_ORDER, "ne": np.not_equal}
for _name, _fn in _INTEGER_ORDER.items():
    for _suffix, _letters in (("i32", "ii"), ("u32", "uu"), ("i64", "II"), ("u64", "UU")):
        ROWS[f"v_cmp_{_name}_{_suffix}"] = Row("m", _letters, _fn)
    ROWS[f"v_cmp_{_name}_u16"] = Row("m", "uu", _as16(_fn, _u16))
    ROWS[f"v_cmp_{_name}_i16"] = Row("m", "uu", _as16(_fn, _i16))
for _name, _fn in _FLOAT_ORDER.items():
    for _suffix, _letters in (("f32", "ff"), ("f64", "FF"), ("f16", "hh")):
        ROWS[f"v_cmp_{_name}_{_suffix}"] = Row("m", _letters, _fn)
for _name in [n for n in ROWS if n.startswith("v_cmp_")]:
    ROWS[_name.replace("v_cmp_", "v_cmpx_")] = Row("X", ROWS[_name].sources, ROWS[_name].fn)


# ------------------------------------------------------------------------------------- operand selection
SDWA = frozenset(("dst_sel", "dst_unused", "src0_sel", "src1_sel", "clamp"))
DPP = frozenset(
    (
        "quad_perm",
        "row_shl",
        "row_shr",
        "row_ror",
        "row_mirror",
        "row_half_mirror",
        "row_newbcast",
        "row_bcast",
        "wave_shl",
        "wave_shr",
        "wave_rol",
        "wave_ror",
        "row_mask",
        "bank_mask",
        "bound_ctrl",
    )
)


# A part of a register: a byte, or a half.
_PART = re.compile(r"^(?:(BYTE)_([0-3])|(WORD)_([01]))$")


def _part(m: re.Match[str]) -> tuple[int, int]:
    """(its bits, its lowest one)."""
    bits, number = (8, m[2]) if m[1] else (16, m[4])
    return bits, bits * int(number)


def _sdwa_source(inst: Instruction, get: Get, number: int, sext: bool) -> Get:
    sel = str(inst.modifiers.get(f"src{number}_sel", "DWORD"))
    m = _PART.match(sel)
    if m is None:
        if sel != "DWORD":
            raise inst.error(f"source selection {sel!r} is not understood")
        return get
    bits, at = _part(m)
    shift, mask = u32(at), u32((1 << bits) - 1)

    def pick(st: Waves) -> Array:
        x = (get(st).view(u32) >> shift) & mask
        if sext:
            x = ((x << u32(32 - bits)).view(np.int32) >> (32 - bits)).view(u32)
        return x

    return pick


def _sdwa_put(lay: Layout, inst: Instruction, o: Operand) -> Put:
    sel, unused = str(inst.modifiers.get("dst_sel", "DWORD")), str(inst.modifiers.get("dst_unused", "UNUSED_PAD"))
    if sel == "DWORD":
        return vector_put(lay, inst, o, "u")
    m = _PART.match(sel)
    if m is None or unused not in ("UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE"):
        raise inst.error(f"destination selection {sel!r} {unused!r} is not understood")
    (bits, at), p = _part(m), lay.plane(inst, o)
    mask = (1 << bits) - 1

    def put(st: Waves, x: Array) -> None:
        field = (x & u32(mask)) << u32(at)
        if unused == "UNUSED_PRESERVE":
            field = field | (st.r[p] & u32(~(mask << at) & 0xFFFFFFFF))
        elif unused == "UNUSED_SEXT":
            above = 0xFFFFFFFF << (at + bits) & 0xFFFFFFFF
            field = np.where((x >> u32(bits - 1)) & u32(1) == 1, field | u32(above), field)
        store(st, p, field)

    return put


def dpp_lanes(inst: Instruction) -> tuple[Array, Array, Array]:
    """(source lane, source exists, lane may be written) of a DPP row, each [64]."""
    m, lane = inst.modifiers, LANES
    row, at = lane & ~15, lane & 15
    yes = np.ones(64, bool)
    source, valid = lane, yes
    kinds = [k for k in m if k in DPP and k not in ("row_mask", "bank_mask", "bound_ctrl")]
    if len(kinds) != 1:
        raise inst.error("expected one DPP control")
    kind, n = kinds[0], m[kinds[0]]
    count = int(str(n)) if kind.startswith("row_") and not isinstance(n, (bool, tuple)) else 1
    if not 0 <= count < (32 if kind == "row_bcast" else 16) or (kind != "row_newbcast" and count == 0):
        raise inst.error(f"DPP control {kind}:{n} is not understood")
    if kind == "quad_perm" and not (isinstance(n, tuple) and len(n) == 4 and set(n) <= {0, 1, 2, 3}):
        raise inst.error("quad_perm must be a list of four lanes")
    if kind == "quad_perm":
        source = (lane & ~3) + np.array(n)[lane & 3]
    elif kind == "row_shl":
        source, valid = row + np.minimum(at + int(str(n)), 15), at + int(str(n)) < 16
    elif kind == "row_shr":
        source, valid = row + np.maximum(at - int(str(n)), 0), at >= int(str(n))
    elif kind == "row_ror":
        source = row + ((at - int(str(n))) & 15)
    elif kind == "row_mirror":
        source = row + 15 - at
    elif kind == "row_half_mirror":
        source = (lane & ~7) + 7 - (lane & 7)
    elif kind == "row_newbcast":
        source = row + int(str(n))
    elif kind == "row_bcast" and n == 15:
        source, valid = np.maximum(row - 1, 0), row >= 16
    elif kind == "row_bcast" and n == 31:
        source, valid = np.full(64, 31), lane >= 32
    elif kind == "wave_shl" and n == 1:
        source, valid = np.minimum(lane + 1, 63), lane < 63
    elif kind == "wave_shr" and n == 1:
        source, valid = np.maximum(lane - 1, 0), lane > 0
    elif kind == "wave_rol" and n == 1:
        source = (lane + 1) & 63
    elif kind == "wave_ror" and n == 1:
        source = (lane - 1) & 63
    else:
        raise inst.error(f"DPP control {kind}:{n} is not understood")
    rows, banks = int(str(m.get("row_mask", 15))), int(str(m.get("bank_mask", 15)))
    if not (0 <= rows < 16 and 0 <= banks < 16):
        raise inst.error("row_mask and bank_mask are 0 to 15")
    writable = ((rows >> (lane >> 4)) & 1 == 1) & ((banks >> ((lane >> 2) & 3)) & 1 == 1)
    return source, valid, writable


def _omod(inst: Instruction) -> Fn | None:
    """Output modifiers of a float result: multiply first, then clamp to [0, 1] (NaN becomes 0 under dx10_clamp)."""
    factor = {("mul", 2): 2.0, ("mul", 4): 4.0, ("div", 2): 0.5}
    scale = next((factor[k, int(str(v))] for k, v in inst.modifiers.items() if (k, v) in factor), None)
    if ("mul" in inst.modifiers or "div" in inst.modifiers) and scale is None:
        raise inst.error("output modifier is not understood")
    clamp = "clamp" in inst.modifiers
    if scale is None and not clamp:
        return None

    def fn(x: Array) -> Array:
        y = x if scale is None else x * x.dtype.type(scale)
        return np.where(np.isnan(y), 0, np.clip(y, 0, 1)).astype(x.dtype) if clamp else y

    return fn


def bind(lay: Layout, inst: Instruction) -> Step:
    """A vector ALU instruction as a step."""
    special = SPECIAL.get(inst.base)
    if special is not None:
        return special(lay, inst)
    if inst.base == "v_bitop3_b32":
        if inst.modifiers.get("bitop3") not in range(256):
            raise inst.error("expected a bitop3 table of 0 to 255")
        row = Row("u", "uuu", _bitop3(int(str(inst.modifiers["bitop3"]))), frozenset(("bitop3",)))
    else:
        row = ROWS[inst.base]
    sdwa, dpp = inst.encoding == "sdwa", "dpp" in inst.encoding
    allowed(inst, row.modifiers | (SDWA if sdwa else frozenset()) | (DPP if dpp else frozenset()))
    destinations, sources = row.destinations, row.sources
    operands = list(inst.operands)
    if destinations == "X":  # v_cmpx writes EXEC as well as the mask it names
        return _cmpx(lay, inst, row)
    written = len(destinations)
    if inst.base.startswith("v_cmp") and len(operands) == len(sources):
        operands.insert(0, _VCC)
    if inst.base == "v_cndmask_b32" and len(operands) == 3:
        operands.append(_VCC)
    named = [k for k in sources if k not in "DV"]
    if len(operands) != written + len(named):
        raise inst.error(f"expected {written + len(named)} operands, found {len(operands)}")
    reads: list[int] = []
    writes: list[int] = []
    gets: list[Get] = []
    rest = iter(operands[written:])
    for number, kind in enumerate(sources):
        o = operands[0] if kind == "D" else _VCC if kind == "V" else next(rest)
        kind = {"D": destinations[0], "V": "m"}.get(kind, kind)
        half = 0
        if "op_sel" in row.modifiers:
            sel = inst.modifiers.get("op_sel", (0, 0, 0))
            half = sel[number] if isinstance(sel, tuple) and number < len(sel) else 0
        if sdwa and (kind in "UIF" or (kind == "h" and o.kind == "const")):
            raise inst.error("SDWA is not understood on 64 bits, nor on a float16 constant")
        if sdwa and kind in "uifh":
            if kind in "ui" and inst.base != "v_cndmask_b32" and (o.neg or o.abs):
                unsigned(inst, o)
            raw = Operand(o.kind, o.index, o.count, o.value, text=o.text)
            picked = _sdwa_source(inst, vector_source(lay, inst, raw, "u"), number, o.sext)
            gets.append(_retype(o, picked, kind))
        elif half and kind == "u":
            inner = vector_source(lay, inst, o, "u")
            gets.append(_high(inner))
        else:
            gets.append(vector_source(lay, inst, o, kind))
        reads += lay.ids(inst, o, 2 if kind in "UIFm" and o.kind in "vas" and o.count > 1 else 1)
    for o, kind in zip(operands, destinations, strict=False):
        writes += lay.ids(inst, o, 2 if kind in "UIFm" else 1)
    fn: Fn = row.fn
    if destinations[0] in "fhF":
        after = _omod(inst)
        if after is not None:
            inner_fn = fn
            fn = lambda *a: after(inner_fn(*a))  # noqa: E731
    elif "clamp" in inst.modifiers:
        if row.saturated is None:
            raise inst.error("clamp is not understood on this instruction")
        fn = row.saturated
    put = _sdwa_put(lay, inst, operands[0]) if sdwa and destinations != "m" else None
    if put is not None and destinations not in ("u", "i", "f", "h"):
        raise inst.error("SDWA is not understood on 64 bits")
    if put is not None and destinations == "h":
        half_put = put
        put = lambda st, x: half_put(st, np.asarray(x, np.float16).view(np.uint16).astype(u32))  # noqa: E731
    if put is not None and destinations[0] in "if":
        inner_put = put
        put = lambda st, x: inner_put(st, np.ascontiguousarray(np.broadcast_to(x, (st.n, 64))).view(u32))  # noqa: E731
    if put is not None and inst.modifiers.get("dst_unused") == "UNUSED_PRESERVE":
        reads += lay.ids(inst, operands[0], 1)
    if dpp:
        return _dpp(lay, inst, operands[0], destinations, gets, fn, reads, writes)
    if put is None and len(destinations) == 1:
        fast = _fast(lay, inst, operands[0], destinations, sources, gets, fn)
        if fast is not None:
            return Step(inst, "vector", tuple(reads), tuple(writes), fast)
    puts = [put] if put is not None else []
    puts += [vector_put(lay, inst, o, k) for o, k in list(zip(operands, destinations, strict=False))[len(puts) :]]
    if len(puts) == 1:
        only = puts[0]

        def run_one(st: Waves) -> None:
            only(st, fn(*[g(st) for g in gets]))

        return Step(inst, "vector", tuple(reads), tuple(writes), run_one)

    def run(st: Waves) -> None:
        for p, value in zip(puts, fn(*[g(st) for g in gets]), strict=True):
            p(st, value)

    return Step(inst, "vector", tuple(reads), tuple(writes), run)


def _high(get: Get) -> Get:
    return lambda st: get(st) >> u32(16)


def _retype(o: Operand, get: Get, kind: str) -> Get:
    t = {"u": u32, "i": np.int32, "f": np.float32, "h": np.float16}[kind]

    def typed(st: Waves) -> Array:
        x = (get(st).astype(np.uint16) if kind == "h" else get(st)).view(t)
        x = np.abs(x) if o.abs else x
        return -x if o.neg else x

    return typed


def _fast(
    lay: Layout, inst: Instruction, d: Operand, dst: str, src: str, gets: list[Get], fn: Fn
) -> Callable[[Waves], None] | None:
    """The common case: one 32-bit result of one ufunc, written where it belongs without a temporary."""
    if not isinstance(fn, np.ufunc) or dst not in "uif" or len(src) != 2 or src != dst * 2:
        return None
    if d.kind not in "va":
        return None
    p, (x, y) = lay.plane(inst, d), gets
    planes: Callable[[Waves], list[Array]] = {"u": lambda st: st.r, "i": lambda st: st.i, "f": lambda st: st.f}[dst]

    def run(st: Waves) -> None:
        out = planes(st)[p]
        if st.full:
            fn(x(st), y(st), out=out)
        else:
            np.copyto(out, fn(x(st), y(st)), where=st.mask)

    return run


def _dpp(
    lay: Layout, inst: Instruction, d: Operand, dst: str, gets: list[Get], fn: Fn, reads: list[int], writes: list[int]
) -> Step:
    """Source 0 comes from another lane. A missing or inactive source reads 0 with bound_ctrl, else the lane is not
    written."""
    if len(dst) != 1 or dst not in "uif":
        raise inst.error("DPP is not understood on this instruction")
    source, valid, writable = dpp_lanes(inst)
    zero = "bound_ctrl" in inst.modifiers
    p = lay.plane(inst, d)

    def run(st: Waves) -> None:
        first = np.broadcast_to(gets[0](st), (st.n, 64))[:, source]
        exists = valid & st.mask[:, source]
        if zero:
            first = np.where(exists, first, first.dtype.type(0))
        value = np.broadcast_to(fn(first, *[g(st) for g in gets[1:]]), (st.n, 64))
        where = writable & st.mask if zero else writable & exists & st.mask
        np.copyto(st.r[p], np.ascontiguousarray(value).view(u32), where=where)

    whole = zero and bool(writable.all())
    return Step(inst, "vector", tuple(reads) + (() if whole else tuple(writes)), tuple(writes), run)


def _cmpx(lay: Layout, inst: Instruction, row: Row) -> Step:
    operands = list(inst.operands)
    if len(operands) == len(row.sources):
        operands.insert(0, _VCC)
    if len(operands) != 1 + len(row.sources):
        raise inst.error(f"expected {1 + len(row.sources)} operands, found {len(operands)}")
    gets = [vector_source(lay, inst, o, k) for o, k in zip(operands[1:], row.sources, strict=True)]
    put = vector_put(lay, inst, operands[0], "m")
    execute = vector_put(lay, inst, Operand("s", 126, 2, text="exec"), "m")
    reads = [
        r for o, k in zip(operands[1:], row.sources, strict=True) for r in lay.ids(inst, o, 2 if k in "UIF" else 1)
    ]

    def run(st: Waves) -> None:
        bits = np.broadcast_to(row.fn(*[g(st) for g in gets]), (st.n, 64)).copy()
        put(st, bits)
        execute(st, bits)

    return Step(
        inst, "vector", tuple(reads), lay.ids(inst, operands[0], 2) + lay.ids(inst, Operand("s", 126, 2), 2), run
    )


# ------------------------------------------------------------------------------------- instructions of their own shape
def _readfirstlane(lay: Layout, inst: Instruction) -> Step:
    allowed(inst, (), 2)
    get, put = vector_source(lay, inst, inst.operands[1], "u"), scalar_put(inst, inst.operands[0], "u")

    def run(st: Waves) -> None:
        x = np.broadcast_to(get(st), (st.n, 64))
        # With no active lane the hardware reads lane 0.
        put(st, x[:, 0] if st.full else x[np.arange(st.n), st.mask.argmax(1)])

    return Step(inst, "vector", lay.ids(inst, inst.operands[1], 1), lay.ids(inst, inst.operands[0], 1), run)


def _readlane(lay: Layout, inst: Instruction) -> Step:
    allowed(inst, (), 3)
    d, s, lane = inst.operands
    get, at, put = vector_source(lay, inst, s, "u"), scalar_source(inst, lane, "u"), scalar_put(inst, d, "u")

    def run(st: Waves) -> None:
        x = np.broadcast_to(get(st), (st.n, 64))
        put(st, x[np.arange(st.n), np.broadcast_to(at(st) & u32(63), (st.n,)).astype(np.intp)])

    return Step(inst, "vector", lay.ids(inst, s, 1) + lay.ids(inst, lane, 1), lay.ids(inst, d, 1), run)


def _writelane(lay: Layout, inst: Instruction) -> Step:
    allowed(inst, (), 3)
    d, s, lane = inst.operands
    get, at, p = scalar_source(inst, s, "u"), scalar_source(inst, lane, "u"), lay.plane(inst, d)

    def run(st: Waves) -> None:
        st.r[p][np.arange(st.n), np.broadcast_to(at(st) & u32(63), (st.n,)).astype(np.intp)] = get(st)

    return Step(inst, "lane", lay.ids(inst, s, 1) + lay.ids(inst, lane, 1), lay.ids(inst, d, 1), run)


def _swap(rows: int) -> Callable[[Layout, Instruction], Step]:
    """v_permlane{16,32}_swap: the odd `rows`-lane rows of the first trade places with the even ones of the second."""

    def make(lay: Layout, inst: Instruction) -> Step:
        allowed(inst, ("bound_ctrl", "fi"), 2)
        p, q = lay.plane(inst, inst.operands[0]), lay.plane(inst, inst.operands[1])
        odd = (LANES // rows) % 2 == 1
        even = ~odd

        def run(st: Waves) -> None:
            x, y = st.r[p].copy(), st.r[q].copy()
            a, b = x.copy(), y.copy()
            a[:, odd], b[:, even] = y[:, even], x[:, odd]
            store(st, p, a)
            store(st, q, b)

        both = lay.ids(inst, inst.operands[0], 1) + lay.ids(inst, inst.operands[1], 1)
        return Step(inst, "vector", both, both, run)

    return make


def _v_swap(lay: Layout, inst: Instruction) -> Step:
    allowed(inst, (), 2)
    p, q = lay.plane(inst, inst.operands[0]), lay.plane(inst, inst.operands[1])

    def run(st: Waves) -> None:
        x, y = st.r[p].copy(), st.r[q].copy()
        store(st, p, y)
        store(st, q, x)

    both = lay.ids(inst, inst.operands[0], 1) + lay.ids(inst, inst.operands[1], 1)
    return Step(inst, "vector", both, both, run)


def _select(inst: Instruction, name: str, default: int, n: int) -> tuple[int, ...]:
    v = inst.modifiers.get(name, ())
    if not isinstance(v, tuple) or any(x not in (0, 1) for x in v):
        raise inst.error(f"{name} must be a list of 0 and 1")
    return (v + (default,) * n)[:n]


PACKED = frozenset(("op_sel", "op_sel_hi", "neg_lo", "neg_hi", "clamp"))
PACKED32: dict[str, Fn] = {
    "v_pk_add_f32": np.add,
    "v_pk_mul_f32": np.multiply,
    "v_pk_fma_f32": floats.fma32,
    "v_pk_mov_b32": lambda x, y: (x, y),
}


def _packed32(lay: Layout, inst: Instruction) -> Step:
    """Two float32 results; op_sel and op_sel_hi pick the register of each source pair for the low and high result."""
    allowed(inst, PACKED - {"clamp"}, 4 if "_fma_" in inst.base else 3)
    d, *src = inst.operands
    n, fn = len(src), PACKED32[inst.base]
    move = inst.base == "v_pk_mov_b32"
    low, high = _select(inst, "op_sel", 0, n), _select(inst, "op_sel_hi", 1, n)
    neg_low, neg_high = _select(inst, "neg_lo", 0, n), _select(inst, "neg_hi", 0, n)

    def part(o: Operand, word: int, neg: int) -> Get:
        unsigned(inst, o)
        if o.kind == "const":
            value = constant(inst, o, "f")
            return lambda st: -value if neg else value
        if o.count < 2 and o.kind != "s":
            raise inst.error(f"operand {o.text} must be a pair of registers")
        one = Operand(o.kind, o.index + min(word, o.count - 1), 1, text=o.text)
        get = vector_source(lay, inst, one, "f")
        return (lambda st: -get(st)) if neg else get

    lows = [part(o, s, g) for o, s, g in zip(src, low, neg_low, strict=True)]
    highs = [part(o, s, g) for o, s, g in zip(src, high, neg_high, strict=True)]
    p, q = lay.plane(inst, d), lay.plane(inst, d, 1)

    def run(st: Waves) -> None:
        if move:  # the low result is a word of the first source, the high one of the second
            a, b = np.array(lows[0](st)), np.array(lows[1](st))
        else:
            a, b = fn(*[g(st) for g in lows]), fn(*[g(st) for g in highs])
        for plane, x in ((p, a), (q, b)):
            if st.full:
                st.f[plane][...] = x
            else:
                np.copyto(st.f[plane], x, where=st.mask)

    reads = []  # only the words that are selected: the other half of a scalar pair may hold nothing
    for k, o in enumerate(src):
        words = {(low[0], low[1])[k]} if move else {low[k], high[k]}
        reads += [r for w, r in enumerate(lay.ids(inst, o)) if w in words or o.count == 1]
    return Step(inst, "vector", tuple(reads), lay.ids(inst, d, 2), run)


def _f16(fn: Fn) -> Fn:
    return lambda *a: fn(*[x.view(np.float16) for x in a]).astype(np.float16).view(np.uint16)


def _fma16(x: Array, y: Array, z: Array) -> Array:
    # Products of float16 are exact in float64 and so is their sum with a float16 up to 2^-48: one rounding in effect.
    return (x.astype(np.float64) * y.astype(np.float64) + z.astype(np.float64)).astype(np.float16)


def _signed16(fn: Fn) -> Fn:
    return lambda *a: fn(*[x.view(np.int16) for x in a]).view(np.uint16)


PACKED16: dict[str, Fn] = {
    "v_pk_add_f16": _f16(np.add),
    "v_pk_mul_f16": _f16(np.multiply),
    "v_pk_fma_f16": _f16(_fma16),
    "v_pk_max_f16": _f16(fmax),
    "v_pk_min_f16": _f16(fmin),
    "v_pk_add_u16": np.add,
    "v_pk_sub_u16": np.subtract,
    "v_pk_add_i16": np.add,
    "v_pk_sub_i16": np.subtract,
    "v_pk_mul_lo_u16": np.multiply,
    "v_pk_mad_u16": lambda x, y, z: x * y + z,
    "v_pk_max_u16": np.maximum,
    "v_pk_min_u16": np.minimum,
    "v_pk_max_i16": _signed16(np.maximum),
    "v_pk_min_i16": _signed16(np.minimum),
    "v_pk_lshlrev_b16": lambda x, y: y << (x & np.uint16(15)),
    "v_pk_lshrrev_b16": lambda x, y: y >> (x & np.uint16(15)),
    "v_pk_ashrrev_i16": lambda x, y: (y.view(np.int16) >> (x & np.uint16(15)).view(np.int16)).view(np.uint16),
}


def _packed16(lay: Layout, inst: Instruction) -> Step:
    """Two 16-bit results of one register; op_sel and op_sel_hi pick the half of each source."""
    allowed(inst, PACKED - {"clamp"}, 4 if "_fma_" in inst.base or "_mad_" in inst.base else 3)
    d, *src = inst.operands
    n, fn = len(src), PACKED16[inst.base]
    low, high = _select(inst, "op_sel", 0, n), _select(inst, "op_sel_hi", 1, n)
    neg_low, neg_high = _select(inst, "neg_lo", 0, n), _select(inst, "neg_hi", 0, n)
    gets = [vector_source(lay, inst, o, "u") for o in src]
    inline = [o.kind == "const" for o in src]

    def half(x: Array, sel: int, neg: int, const: bool) -> Array:
        y = (x >> u32(16 if sel and not const else 0)).astype(np.uint16)
        return y ^ np.uint16(0x8000) if neg else y

    def run(st: Waves) -> None:
        xs = [g(st) for g in gets]
        a = fn(*[half(x, s, g, c) for x, s, g, c in zip(xs, low, neg_low, inline, strict=True)])
        b = fn(*[half(x, s, g, c) for x, s, g, c in zip(xs, high, neg_high, inline, strict=True)])
        store(st, p, a.astype(u32) | (b.astype(u32) << u32(16)))

    p = lay.plane(inst, d)
    for o in src:
        if o.kind == "const" and isinstance(o.value, float):
            raise inst.error("a float constant is not understood on packed 16-bit operands")
    return Step(inst, "vector", tuple(r for o in src for r in lay.ids(inst, o, 1)), lay.ids(inst, d, 1), run)


def _cvt_pk8(lay: Layout, inst: Instruction) -> Step:
    """v_cvt_pk_{fp8,bf8}_f32: two codes into the low half, or the high one with op_sel[2]; the other half is kept."""
    allowed(inst, ("op_sel", "clamp"), 3)
    d, a, b = inst.operands
    high = _select(inst, "op_sel", 0, 3)[2]
    pack = _cvt_pk("fp8" if "fp8" in inst.base else "bf8", "clamp" in inst.modifiers)
    x, y, p = vector_source(lay, inst, a, "f"), vector_source(lay, inst, b, "f"), lay.plane(inst, d)

    def run(st: Waves) -> None:
        code = pack(np.asarray(x(st)), np.asarray(y(st)))
        kept = st.r[p] & u32(0x0000FFFF if high else 0xFFFF0000)
        store(st, p, kept | (code << u32(16 if high else 0)))

    return Step(inst, "vector", lay.ids(inst, a, 1) + lay.ids(inst, b, 1), lay.ids(inst, d, 1), run)


def _cvt_from8(lay: Layout, inst: Instruction) -> Step:
    """v_cvt_f32_{fp8,bf8} of one byte (SDWA src0_sel or op_sel), v_cvt_pk_f32_* of two (op_sel[0]: the high half)."""
    allowed(inst, ("op_sel", "src0_sel", "dst_sel", "dst_unused"), 2)
    table = (floats.FP8 if "fp8" in inst.base else floats.BF8).astype(np.float32)
    d, a = inst.operands
    packed = "_pk_" in inst.base
    sel = _select(inst, "op_sel", 0, 2)
    at = (2 * sel[0] if packed else sel[0] + 2 * sel[1]) if "op_sel" in inst.modifiers else 0
    if (name := inst.modifiers.get("src0_sel", "DWORD")) != "DWORD":
        chosen = _PART.match(str(name))
        if chosen is None:
            raise inst.error(f"source selection {name!r} is not understood")
        at = _part(chosen)[1] // 8
    x = vector_source(lay, inst, a, "u")
    planes = [lay.plane(inst, d, k) for k in range(2 if packed else 1)]

    def run(st: Waves) -> None:
        word = x(st)
        for k, p in enumerate(planes):
            value = table[(word >> u32(8 * (at + k))) & u32(0xFF)]
            store(st, p, value.view(u32))

    return Step(inst, "vector", lay.ids(inst, a, 1), lay.ids(inst, d, len(planes)), run)


_SCALED = re.compile(r"^v_cvt_scalef32_pk_(fp8|bf8|fp4)_(f32|f16|bf16)$")
_UNSCALED = re.compile(r"^v_cvt_scalef32_pk_(f32|f16|bf16)_(fp8|bf8|fp4)$")


def _pair(kind: str) -> Callable[[list[Array]], tuple[Array, Array]]:
    if kind == "f32":
        return lambda a: (a[0].view(np.float32).astype(np.float64), a[1].view(np.float32).astype(np.float64))
    if kind == "bf16":
        return lambda a: (
            (a[0] << u32(16)).view(np.float32).astype(np.float64),
            (a[0] & u32(0xFFFF0000)).view(np.float32).astype(np.float64),
        )
    return lambda a: (
        a[0].astype(np.uint16).view(np.float16).astype(np.float64),
        (a[0] >> u32(16)).astype(np.uint16).view(np.float16).astype(np.float64),
    )


def _cvt_scaled(lay: Layout, inst: Instruction) -> Step:
    """Two values divided by the scale's power of two, narrowed with saturation, into the part op_sel names; the rest
    is kept."""
    allowed(inst, ("op_sel",), 4 if inst.base.endswith("_f32") else 3)
    m = _SCALED.match(inst.base)
    assert m is not None
    to, source = m[1], m[2]
    d, *src = inst.operands
    values, scale_operand = src[:-1], src[-1]
    n = len(src) + 1
    sel = _select(inst, "op_sel", 0, max(n, 4))
    # fp4: op_sel[3:2] is the destination byte; fp8: the last op_sel bit is the destination half.
    at = 8 * (sel[2] + 2 * sel[3]) if to == "fp4" else 16 * (sel[3] if source == "f32" else sel[2])
    width = 8 if to == "fp4" else 16
    keep = u32(~(((1 << width) - 1) << at) & 0xFFFFFFFF)
    gets = [vector_source(lay, inst, o, "u") for o in values]
    scale, pair, p = vector_source(lay, inst, scale_operand, "f"), _pair(source), lay.plane(inst, d)
    shift = u32(4 if to == "fp4" else 8)

    def run(st: Waves) -> None:
        s = _scale_of(scale(st))
        low, high = pair([np.asarray(g(st)) for g in gets])
        code = floats.narrow(low / s, to) | (floats.narrow(high / s, to) << shift)
        store(st, p, (st.r[p] & keep) | (code << u32(at)))

    return Step(inst, "vector", tuple(r for o in src for r in lay.ids(inst, o, 1)), lay.ids(inst, d, 1), run)


def _cvt_unscaled(lay: Layout, inst: Instruction) -> Step:
    """Two codes times the scale's power of two, as two float32, or one register of two float16 or bfloat16."""
    allowed(inst, ("op_sel",), 3)
    m = _UNSCALED.match(inst.base)
    assert m is not None
    to, source = m[1], m[2]
    d, a, scale_operand = inst.operands
    sel = _select(inst, "op_sel", 0, 3)
    table = {"fp8": floats.FP8, "bf8": floats.BF8, "fp4": floats.FP4}[source]
    bits = 4 if source == "fp4" else 8
    at = 8 * (sel[0] + 2 * sel[1]) if source == "fp4" else 16 * sel[0]
    x, scale = vector_source(lay, inst, a, "u"), vector_source(lay, inst, scale_operand, "f")
    planes = [lay.plane(inst, d, k) for k in range(2 if to == "f32" else 1)]

    def run(st: Waves) -> None:
        s, word = _scale_of(scale(st)), x(st)
        low, high = (
            (table[(word >> u32(at + k * bits)) & u32((1 << bits) - 1)] * s).astype(np.float32) for k in (0, 1)
        )
        if to == "f32":
            out = [low.view(u32), high.view(u32)]
        elif to == "bf16":
            out = [floats.bf16_bits(low) | (floats.bf16_bits(high) << u32(16))]
        else:
            both = [v.astype(np.float16).view(np.uint16).astype(u32) for v in (low, high)]
            out = [both[0] | (both[1] << u32(16))]
        for p, value in zip(planes, out, strict=True):
            store(st, p, np.broadcast_to(value, (st.n, 64)))

    reads = lay.ids(inst, a, 1) + lay.ids(inst, scale_operand, 1)
    return Step(inst, "vector", reads, lay.ids(inst, d, len(planes)), run)


SPECIAL: dict[str, Callable[[Layout, Instruction], Step]] = {
    "v_readfirstlane_b32": _readfirstlane,
    "v_readlane_b32": _readlane,
    "v_writelane_b32": _writelane,
    "v_permlane16_swap_b32": _swap(16),
    "v_permlane32_swap_b32": _swap(32),
    "v_swap_b32": _v_swap,
    "v_cvt_pk_fp8_f32": _cvt_pk8,
    "v_cvt_pk_bf8_f32": _cvt_pk8,
    **{f"v_cvt_{p}f32_{k}": _cvt_from8 for p in ("", "pk_") for k in ("fp8", "bf8")},
    **dict.fromkeys(PACKED32, _packed32),
    **dict.fromkeys(PACKED16, _packed16),
    **{f"v_cvt_scalef32_pk_{t}_{s}": _cvt_scaled for t in ("fp8", "bf8", "fp4") for s in ("f32", "f16", "bf16")},
    **{f"v_cvt_scalef32_pk_{t}_{s}": _cvt_unscaled for s in ("fp8", "bf8", "fp4") for t in ("f32", "f16", "bf16")},
}
MNEMONICS = frozenset(ROWS) | frozenset(SPECIAL) | {"v_bitop3_b32", "v_nop"}
