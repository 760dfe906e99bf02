"""The ledger's counts on texts counted by hand, and on the compiled sample.

Does not catch a rule of banks, caches or dispatch that silicon does not follow: those are assumed.
"""

from __future__ import annotations

import numpy as np
import pytest

from mxgate.kernels.gfx950 import parse, run
from mxgate.kernels.gfx950.ledger import (
    LINE,
    NOWHERE,
    XCDS,
    Banks,
    Traffic,
    bank_cycles,
    finish,
    ledger,
    without_matrix,
)
from mxgate.kernels.gfx950.machine import Observer
from mxgate.kernels.gfx950.sample.compile import texts
from mxgate.kernels.gfx950.state import Array
from mxgate.kernels.gfx950.test_hazards import OPEN, dense
from mxgate.kernels.gfx950.test_text import assembly

BODY = """
s_mov_b32 s20, 3
.Lloop:
buffer_load_dwordx4 v4, s[4:7], 0 offen lds
buffer_load_ubyte v9, v4, s[4:7], 0 offen
ds_read_b128 v[10:13], v5
ds_read2_b32 v[14:15], v5 offset1:1
ds_bpermute_b32 v16, v5, v9
s_waitcnt vmcnt(0) lgkmcnt(0)
s_barrier
v_mfma_f32_16x16x128_f8f6f4 a[0:3], v[20:27], v[30:37], a[0:3]
s_sub_u32 s20, s20, 1
s_cmp_lg_u32 s20, 0
s_cbranch_scc1 .Lloop
.Lfall:
v_readfirstlane_b32 s21, v5
v_cmp_eq_u32_e32 vcc, s21, v5
s_and_saveexec_b64 s[22:23], vcc
buffer_store_dwordx2 v[6:7], v4, s[4:7], s21 offen
s_xor_b64 exec, exec, s[22:23]
s_cbranch_execnz .Lfall
s_endpgm
"""


def test_counts_of_a_small_text() -> None:
    found = ledger(parse(assembly(BODY, agprs=4, lds=1024)))
    main, fall = found.loops
    assert (found.vgprs, found.agprs, found.lds_bytes, found.vgpr_spills) == (64, 4, 1024, 2)
    c = main.counts
    assert (c.instructions, c.mfma, c.vector_memory, c.lane_addresses, c.lds_fills) == (11, 1, 2, 128, 1)
    assert (c.bytes_loaded, c.lds_reads, c.lds_bytes_read, c.permutes) == (64 * 17, 2, 64 * 24, 1)
    assert (c.waits, c.full_drains, c.barriers, c.branches) == (1, 1, 1, 1)
    assert (main.innermost, main.waterfall, main.turns) == (True, False, None)
    assert fall.waterfall
    assert fall.counts.bytes_stored == 64 * 8
    assert found.text.instructions == 19


def test_the_samples_main_loop() -> None:
    """Unrolled by two: a step of a wave is 4 fills of 16 bytes, 4 scale bytes, 8 LDS reads of 16 bytes and 4 MFMAs."""
    r, _, _ = dense("dense_right_async", 0)
    found = ledger(parse(texts()["dense_right_async"]), r)
    loop = max(found.loops, key=lambda x: x.counts.mfma)
    c = loop.counts
    steps = c.mfma // 4
    assert steps in (1, 2)
    assert (c.lds_fills, c.lds_reads, c.permutes, c.barriers) == (4 * steps, 8 * steps, 0, steps)
    assert c.lds_bytes_read == 64 * 16 * 8 * steps
    assert loop.innermost
    assert loop.turns is not None
    assert loop.turns > 0
    executed = np.array([i.base.startswith("v_mfma") for i in r.kernel.instructions])
    assert int(r.executed[executed].sum()) == r.flops // (2 * 16 * 16 * 128)


# ------------------------------------------------------------------------------------- LDS banks
LANE = np.arange(64)
EVERY = np.ones((1, 64), bool)


@pytest.mark.parametrize(
    ("size", "stride", "ways", "groups"),
    [
        (4, 4, 1, 1), (4, 0, 1, 1), (4, 8, 2, 1), (4, 256, 64, 1), (1, 1, 1, 1), (2, 128, 32, 1),
        (8, 8, 1, 2), (8, 16, 2, 2), (8, 256, 32, 2), (16, 16, 1, 4), (16, 32, 2, 4), (16, 256, 16, 4), (12, 16, 1, 4),
    ],
)  # fmt: skip
def test_cycles_of_strided_accesses(size: int, stride: int, ways: int, groups: int) -> None:
    assert bank_cycles(LANE[None] * stride, EVERY, size).tolist() == [[ways] * groups]


def test_lanes_that_are_off_ask_for_nothing() -> None:
    some = (LANE < 20)[None]
    assert bank_cycles(LANE[None] * 256, some, 16).tolist() == [[16, 4, 0, 0]]
    assert bank_cycles(LANE[None] % 2 * 256, EVERY, 4).tolist() == [[2]], "two words of one bank, each for 32 lanes"


def observed(body: str, observer: Observer, *, grid: int = 1, lds: int = 0, threads: int = 64) -> Array:
    text = assembly(OPEN.format(n=65536) + body + "\ns_endpgm", lds=lds, args=(8, 8), block=threads)
    x, y = np.arange(16384, dtype=np.uint32), np.zeros(16384, np.uint32)
    assert not run(parse(text), [x, y], grid, observe=observer).findings
    return y


LOOP = """
s_mov_b32 s21, 3
v_mov_b32_e32 v4, 0
v_mov_b32_e32 v5, 0
v_mov_b32_e32 v6, 0
v_mov_b32_e32 v7, 0
v_lshlrev_b32_e32 v2, {shift}, v0
v_lshl_add_u32 v2, s20, 14, v2
.Lturn:
ds_write_b128 v2, v[4:7]
s_waitcnt lgkmcnt(0)
ds_read_b128 v[8:11], v2
s_waitcnt lgkmcnt(0)
ds_read2_b32 v[12:13], v2 offset1:1
s_waitcnt lgkmcnt(0)
s_sub_u32 s21, s21, 1
s_cmp_lg_u32 s21, 0
s_cbranch_scc1 .Lturn
"""


@pytest.mark.parametrize(("shift", "wide", "narrow"), [(4, 1, 4), (5, 2, 8), (8, 16, 64)])
def test_conflicts_by_instruction(shift: int, wide: int, narrow: int) -> None:
    """Two waves, three turns; b128 in four groups, read2 as two accesses of a word; stride 16, 32 and 256 bytes."""
    banks = Banks()
    observed(LOOP.format(shift=shift), banks, lds=32768, threads=128)
    write, read, pair = banks.of((0, 1000))
    assert [c.instruction.base for c in (write, read, pair)] == ["ds_write_b128", "ds_read_b128", "ds_read2_b32"]
    assert write.ways == read.ways == wide
    assert write.extra == read.extra == (wide - 1) * 4 * 2 * 3
    assert (pair.ways, pair.extra) == (narrow, (narrow - 1) * 2 * 2 * 3)
    assert banks.of((0, write.instruction.line)) == (write,)


# ------------------------------------------------------------------------------------- lines, XCDs, units
LOAD = "buffer_load_dword v3, v2, s[4:7], 0 offen\ns_waitcnt vmcnt(0)\n"


def test_what_all_workgroups_read_comes_into_every_xcd() -> None:
    """20 workgroups of a wave read the same 256 bytes twice."""
    traffic = Traffic(20)
    observed("v_lshlrev_b32_e32 v2, 2, v0\n" + LOAD * 2, traffic, grid=20)
    assert traffic.by_xcd == (2 * LINE,) * XCDS
    assert (traffic.distinct, traffic.requested) == (2 * LINE, 20 * 2 * 2)
    assert traffic.loads.tolist() == [2] * 20
    assert (traffic.home == NOWHERE).all()


def test_lines_of_ones_own_come_into_one_xcd() -> None:
    """Workgroup i reads line i, of which a dword in the last lane hangs over into the next, and stores at 256 i."""
    traffic = Traffic(20)
    body = """
v_lshlrev_b32_e32 v2, 2, v0
v_min_u32_e32 v2, 126, v2
s_lshl_b32 s22, s2, 7
v_add_u32_e32 v2, s22, v2
v_lshl_or_b32 v4, s2, 8, v1
{}buffer_store_dword v0, v4, s[8:11], 0 offen
"""
    y = observed(body.format(LOAD), traffic, grid=20)
    assert (y[: 64 * 20].reshape(20, 64) == LANE).all()
    assert traffic.requested == 40
    assert traffic.distinct == 21 * LINE
    lines = [{i + k for i in range(x, 20, XCDS) for k in (0, 1)} for x in range(XCDS)]
    assert traffic.by_xcd == tuple(len(found) * LINE for found in lines)
    assert np.diff(traffic.home).tolist() == [256] * 19


def test_addresses_do_not_wait_for_matrix_results() -> None:
    """The sample kernel without its matrix instructions: same lines, same reads, same turns."""
    text = texts()["dense_right_async"]
    m = n = 128
    codes, scales = np.zeros((m, 384), np.uint8), np.zeros((m, 12), np.uint8)
    found = []
    for kernel in (parse(text), without_matrix(parse(text))):
        traffic = Traffic(4)
        c = np.zeros((m, n), np.float32)
        r = run(kernel, [codes, codes.copy(), scales, scales.copy(), c, m, n, 384], (2, 2), observe=traffic)
        found.append((traffic, r))
    (a, with_matrix), (b, without) = found
    assert with_matrix.flops and not without.flops
    assert (with_matrix.executed == without.executed).all()
    assert (a.by_xcd, a.requested, a.distinct) == (b.by_xcd, b.requested, b.distinct)
    assert (a.lds_reads == b.lds_reads).all() and a.lds_reads.min() > 0 and (a.home == b.home).all()


@pytest.mark.parametrize(
    ("costs", "units", "end"),
    [((3, 1, 1, 1), 2, 3), ((1, 1, 1, 3), 2, 4), ((), 2, 0), ((5,), 256, 5), ((2,) * 257, 256, 4)],
)
def test_workgroups_go_to_the_first_unit_that_is_free(costs: tuple[int, ...], units: int, end: int) -> None:
    assert finish(costs, units) == end
