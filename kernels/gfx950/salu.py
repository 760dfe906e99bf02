"""Scalar ALU semantics: a row a mnemonic, after the public "AMD Instinct CDNA3/CDNA4 ISA" documents.

Letters: u i (32 bits), U I (64 bits), c (SCC as bool), x (EXEC, implied). A row with destination "uc" answers (value,
scc).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mxgate.kernels.gfx950 import integers as n
from mxgate.kernels.gfx950.state import (
    Array,
    Get,
    Layout,
    Put,
    Row,
    Step,
    Waves,
    allowed,
    scalar_put,
    scalar_source,
)
from mxgate.kernels.gfx950.text import EXEC, SCC, Instruction, Operand

Fn = Callable[..., Any]
_u32, _u64 = np.uint32, np.uint64


def _nz(fn: Fn) -> Fn:
    def both(*a: Array) -> tuple[Array, Array]:
        r = fn(*a)
        return r, r != 0

    return both


def _overflow_add(x: Array, y: Array) -> tuple[Array, Array]:
    r = x + y
    return r, ((~(x ^ y) & (x ^ r)) >> _u32(31)) != 0


def _overflow_sub(x: Array, y: Array) -> tuple[Array, Array]:
    r = x - y
    return r, (((x ^ y) & (x ^ r)) >> _u32(31)) != 0


def _shift_add(by: int) -> Fn:
    def fn(x: Array, y: Array) -> tuple[Array, Array]:
        r = (n.wide(x) << _u64(by)) + n.wide(y)
        return r.astype(np.uint32), r >> _u64(32) != 0

    return fn


def _width(y: Array) -> Array:
    """The width that s_bfe takes from its second operand."""
    return (y >> _u32(16)) & _u32(127)


def _save(fn: Fn) -> Fn:
    """sdst = EXEC; EXEC = fn(source, EXEC); SCC = EXEC != 0."""

    def both(x: Array, e: Array) -> tuple[Array, Array, Array]:
        r = fn(x, e)
        return e, r, r != 0

    return both


def _two(name: str, fn: Fn) -> dict[str, Row]:
    return {f"s_{name}_b32": Row("uc", "uu", _nz(fn)), f"s_{name}_b64": Row("Uc", "UU", _nz(fn))}


def _compare(name: str, fn: Fn) -> dict[str, Row]:
    out = {f"s_cmp_{name}_{t}32": Row("c", t * 2, fn) for t in "iu"}
    out |= {f"s_cmpk_{name}_{t}32": Row("c", t + k, fn) for t, k in (("i", "k"), ("u", "K"))}
    if name in ("eq", "lg"):
        out[f"s_cmp_{name}_u64"] = Row("c", "UU", fn)
    return out


ROWS: dict[str, Row] = {
    "s_mov_b32": Row("u", "u", lambda x: x),
    "s_mov_b64": Row("U", "U", lambda x: x),
    "s_cmov_b32": Row("u", "uuc", lambda x, old, c: np.where(c, x, old)),
    "s_movk_i32": Row("i", "k", lambda k: k),
    "s_cmovk_i32": Row("u", "kuc", lambda k, old, c: np.where(c, k.view(np.uint32), old)),
    "s_addk_i32": Row("uc", "uk", lambda x, k: _overflow_add(x, k.view(np.uint32))),
    "s_mulk_i32": Row("u", "uk", lambda x, k: x * k.view(np.uint32)),
    "s_not_b32": Row("uc", "u", _nz(np.invert)),
    "s_not_b64": Row("Uc", "U", _nz(np.invert)),
    "s_brev_b32": Row("u", "u", n.reverse),
    "s_abs_i32": Row("ic", "i", _nz(np.abs)),
    "s_sext_i32_i8": Row("i", "u", lambda x: x.astype(np.uint8).view(np.int8).astype(np.int32)),
    "s_sext_i32_i16": Row("i", "u", lambda x: x.astype(np.uint16).view(np.int16).astype(np.int32)),
    "s_bcnt1_i32_b32": Row("uc", "u", _nz(n.ones)),
    "s_bcnt1_i32_b64": Row("uc", "U", _nz(n.ones)),
    "s_bcnt0_i32_b32": Row("uc", "u", _nz(lambda x: n.ones(~x))),
    "s_bcnt0_i32_b64": Row("uc", "U", _nz(lambda x: n.ones(~x))),
    "s_ff1_i32_b32": Row("u", "u", n.first_low),
    "s_ff1_i32_b64": Row("u", "U", n.first_low),
    "s_flbit_i32_b32": Row("u", "u", n.first_high),
    "s_bitset0_b32": Row("u", "uu", lambda x, old: old & ~(_u32(1) << (x & _u32(31)))),
    "s_bitset1_b32": Row("u", "uu", lambda x, old: old | (_u32(1) << (x & _u32(31)))),
    "s_add_u32": Row("uc", "uu", n.add),
    "s_sub_u32": Row("uc", "uu", n.subtract),
    "s_add_i32": Row("uc", "uu", _overflow_add),
    "s_sub_i32": Row("uc", "uu", _overflow_sub),
    "s_addc_u32": Row("uc", "uuc", n.add_carry),
    "s_subb_u32": Row("uc", "uuc", n.subtract_borrow),
    "s_absdiff_i32": Row("uc", "ii", _nz(lambda x, y: np.abs(x.astype(np.int64) - y).astype(np.uint32))),
    "s_mul_i32": Row("u", "uu", np.multiply),
    "s_mul_hi_u32": Row("u", "uu", n.multiply_high),
    "s_mul_hi_i32": Row("i", "ii", n.multiply_high_signed),
    "s_min_i32": Row("ic", "ii", lambda x, y: (np.minimum(x, y), x < y)),
    "s_max_i32": Row("ic", "ii", lambda x, y: (np.maximum(x, y), x >= y)),
    "s_min_u32": Row("uc", "uu", lambda x, y: (np.minimum(x, y), x < y)),
    "s_max_u32": Row("uc", "uu", lambda x, y: (np.maximum(x, y), x >= y)),
    "s_lshl_b32": Row("uc", "uu", _nz(lambda x, y: x << (y & _u32(31)))),
    "s_lshr_b32": Row("uc", "uu", _nz(lambda x, y: x >> (y & _u32(31)))),
    "s_ashr_i32": Row("ic", "ii", _nz(lambda x, y: x >> (y & 31))),
    "s_lshl_b64": Row("Uc", "Uu", _nz(n.shift_left_64)),
    "s_lshr_b64": Row("Uc", "Uu", _nz(n.shift_right_64)),
    "s_ashr_i64": Row("Ic", "Iu", _nz(n.shift_right_signed_64)),
    "s_bfe_u32": Row("uc", "uu", _nz(lambda x, y: n.field(x, y & _u32(31), _width(y)))),
    "s_bfe_i32": Row("ic", "iu", _nz(lambda x, y: n.field_signed(x, y & _u32(31), np.minimum(_width(y), _u32(32))))),
    "s_bfe_u64": Row("Uc", "Uu", _nz(lambda x, y: n.field(x, n.wide(y & _u32(63)), n.wide(_width(y))))),
    "s_bfm_b32": Row("u", "uu", n.mask),
    "s_bfm_b64": Row("U", "uu", lambda x, y: n.shift_left_64(n.shift_left_64(_u64(1), x) - _u64(1), y)),
    "s_cselect_b32": Row("u", "uuc", lambda x, y, c: np.where(c, x, y)),
    "s_cselect_b64": Row("U", "UUc", lambda x, y, c: np.where(c, x, y)),
    "s_pack_ll_b32_b16": Row("u", "uu", lambda x, y: (x & _u32(0xFFFF)) | (y << _u32(16))),
    "s_pack_lh_b32_b16": Row("u", "uu", lambda x, y: (x & _u32(0xFFFF)) | (y & _u32(0xFFFF0000))),
    "s_pack_hh_b32_b16": Row("u", "uu", lambda x, y: (x >> _u32(16)) | (y & _u32(0xFFFF0000))),
    "s_bitcmp0_b32": Row("c", "uu", lambda x, y: (x >> (y & _u32(31))) & _u32(1) == 0),
    "s_bitcmp1_b32": Row("c", "uu", lambda x, y: (x >> (y & _u32(31))) & _u32(1) == 1),
    **{f"s_lshl{n}_add_u32": Row("uc", "uu", _shift_add(n)) for n in (1, 2, 3, 4)},
    **_two("and", np.bitwise_and),
    **_two("or", np.bitwise_or),
    **_two("xor", np.bitwise_xor),
    **_two("andn2", lambda x, y: x & ~y),
    **_two("orn2", lambda x, y: x | ~y),
    **_two("nand", lambda x, y: ~(x & y)),
    **_two("nor", lambda x, y: ~(x | y)),
    **_two("xnor", lambda x, y: ~(x ^ y)),
    "s_and_saveexec_b64": Row("Uxc", "Ux", _save(lambda x, e: x & e)),
    "s_or_saveexec_b64": Row("Uxc", "Ux", _save(lambda x, e: x | e)),
    "s_xor_saveexec_b64": Row("Uxc", "Ux", _save(lambda x, e: x ^ e)),
    "s_andn2_saveexec_b64": Row("Uxc", "Ux", _save(lambda x, e: x & ~e)),
    "s_orn2_saveexec_b64": Row("Uxc", "Ux", _save(lambda x, e: x | ~e)),
    "s_andn1_saveexec_b64": Row("Uxc", "Ux", _save(lambda x, e: ~x & e)),
}
for _name, _fn in (
    ("eq", np.equal),
    ("lg", np.not_equal),
    ("gt", np.greater),
    ("ge", np.greater_equal),
    ("lt", np.less),
    ("le", np.less_equal),
):
    ROWS |= _compare(_name, _fn)

# Read their destination too, which the text names once.
_ACCUMULATES = {
    "s_addk_i32": 0,
    "s_mulk_i32": 0,
    "s_bitset0_b32": 1,
    "s_bitset1_b32": 1,
    "s_cmov_b32": 1,
    "s_cmovk_i32": 1,
}
NOTHING = frozenset(
    (
        "s_nop",
        "s_setprio",
        "s_sleep",
        "s_icache_inv",
        "s_dcache_wb",
        "s_dcache_inv",
        "s_inst_prefetch",
        "s_setkill",
        "s_ttracedata",
        "s_incperflevel",
        "s_decperflevel",
        "buffer_wbl2",
        "buffer_inv",
        "buffer_wbinvl1",
    )
)
_EXEC = Operand("s", EXEC, 2, text="exec")
_SCC = Operand("s", SCC, 1, text="scc")


def _k16(inst: Instruction, o: Operand, signed: bool) -> Array:
    if o.kind != "const" or not isinstance(o.value, int) or not -0x8000 <= o.value <= 0xFFFF:
        raise inst.error(f"operand {o.text} is not a 16-bit constant")
    v = o.value & 0xFFFF
    return np.array([v - 0x10000 if signed and v >= 0x8000 else v], np.int32 if signed else np.uint32)


def _fixed(value: Array) -> Get:
    return lambda st: value


def bind(lay: Layout, inst: Instruction) -> Step:
    """A scalar instruction as a step."""
    row = ROWS[inst.base]
    allowed(inst, ())
    operands = list(inst.operands)
    where = _ACCUMULATES.get(inst.base)
    if where is not None and operands:
        operands.insert(1 + where, operands[0])
    written = [o for o in row.destinations if o not in "xc"]
    named = [o for o in row.sources if o not in "xc"]
    if len(operands) != len(written) + len(named):
        raise inst.error(f"expected {len(written) + len(named) - (where is not None)} operands")
    reads: list[int] = []
    writes: list[int] = []
    puts: list[Put] = []
    gets: list[Get] = []
    rest = iter(operands)
    for kind in row.destinations:
        o = _EXEC if kind == "x" else _SCC if kind == "c" else next(rest)
        puts.append(scalar_put(inst, o, "U" if kind == "x" else kind))
        writes += lay.ids(inst, o, 2 if kind in "UIx" else 1)
    for kind in row.sources:
        o = _EXEC if kind == "x" else _SCC if kind == "c" else next(rest)
        if kind in "kK":
            gets.append(_fixed(_k16(inst, o, kind == "k")))
            continue
        gets.append(scalar_source(inst, o, "U" if kind == "x" else kind))
        reads += lay.ids(inst, o)
    fn = row.fn
    if len(puts) == 1:
        put = puts[0]

        def run_one(st: Waves) -> None:
            put(st, fn(*[g(st) for g in gets]))

        return Step(inst, "scalar", tuple(reads), tuple(writes), run_one)

    def run(st: Waves) -> None:
        for p, value in zip(puts, fn(*[g(st) for g in gets]), strict=True):
            p(st, value)

    return Step(inst, "scalar", tuple(reads), tuple(writes), run)
