"""The ledger's counts on a text counted by hand, and on the compiled sample.

Does not catch costs that only addresses show, such as LDS bank conflicts.
"""

from __future__ import annotations

import numpy as np

from mxgate.kernels.gfx950 import parse
from mxgate.kernels.gfx950.ledger import ledger
from mxgate.kernels.gfx950.sample.compile import texts
from mxgate.kernels.gfx950.test_hazards import dense
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
