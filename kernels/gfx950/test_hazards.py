"""Each kind of finding: a smallest kernel that has it, and its repaired twin that is clean, under several launch
orders.

Does not catch hazards that silicon has and nobody wrote down; MFMA wait states are LLVM's.
"""

from __future__ import annotations

import numpy as np
import pytest

from mxgate.kernels.gfx950 import Finding, RunResult, parse, run
from mxgate.kernels.gfx950.sample.compile import texts
from mxgate.kernels.gfx950.state import Array
from mxgate.kernels.gfx950.test_mfma import TABLES
from mxgate.kernels.gfx950.test_text import assembly

SEEDS = (0, 1, 2)
# s[4:7]: a buffer over the first argument; s[8:11] over the second. v0 is the lane, v1 = 4 * lane.
OPEN = """
s_load_dwordx4 s[12:15], s[0:1], 0x0
s_waitcnt lgkmcnt(0)
s_mov_b32 s4, s12
s_and_b32 s5, s13, 0xffff
s_mov_b32 s6, {n}
s_mov_b32 s7, 0x27000
s_mov_b32 s8, s14
s_and_b32 s9, s15, 0xffff
s_mov_b32 s10, {n}
s_mov_b32 s11, 0x27000
v_and_b32_e32 v20, 0x3ff, v0
v_lshrrev_b32_e32 v21, 6, v20
v_readfirstlane_b32 s20, v21
v_and_b32_e32 v0, 63, v20
v_lshlrev_b32_e32 v1, 2, v0
"""


def launch(
    body: str,
    seed: int = 0,
    *,
    waves: int = 1,
    lds: int = 0,
    grid: int = 1,
    n: int = 4096,
    agprs: int = 0,
    hazards: bool = True,
) -> tuple[RunResult, Array, Array]:
    text = assembly(OPEN.format(n=n) + body + "\ns_endpgm", lds=lds, args=(8, 8), block=64 * waves, agprs=agprs)
    x, y = np.arange(1024, dtype=np.uint32), np.zeros(1024, np.uint32)
    return run(parse(text), [x, y], grid, seed=seed, hazards=hazards), x, y


def kinds(r: RunResult) -> set[str]:
    return {f.kind for f in r.findings}


def only(r: RunResult) -> Finding:
    assert len(r.findings) == 1, [str(f) for f in r.findings]
    return r.findings[0]


STORE = "buffer_store_dword v2, v1, s[8:11], 0 offen"


# ------------------------------------------------------------------------------------- registers
def test_register_read_before_its_wait() -> None:
    body = "buffer_load_dword v2, v1, s[4:7], 0 offen\n{}v_add_u32_e32 v2, 1, v2\n" + STORE
    r, x, y = launch(body.format(""))
    f = next(f for f in r.findings if f.kind == "register-before-wait")
    assert (f.instruction, f.wave, f.lane) == ("v_add_u32_e32 v2, 1, v2", 0, 0)
    assert "v2" in f.detail
    assert (y[:64] != x[:64] + 1).any(), "the value must not be there before its wait"
    r, x, y = launch(body.format("s_waitcnt vmcnt(0)\n"))
    assert not r.findings
    assert (y[:64] == x[:64] + 1).all()


def test_waits_retire_in_issue_order() -> None:
    loads = "".join(f"buffer_load_dword v{2 + k}, v1, s[4:7], 0 offen offset:{256 * k}\n" for k in range(3))
    for wait, early in ((2, 1), (1, 2), (0, 3)):
        for k in range(3):
            r, _, _ = launch(f"{loads}s_waitcnt vmcnt({wait})\nv_mov_b32_e32 v9, v{2 + k}\n")
            assert ("register-before-wait" in kinds(r)) == (k >= early)


def test_scalar_loads_arrive_in_any_order() -> None:
    body = "s_load_dword s30, s[0:1], 0x0\ns_load_dword s31, s[0:1], 0x4\ns_waitcnt lgkmcnt({})\ns_mov_b32 s32, s30"
    assert kinds(launch(body.format(1))[0]) == {"register-before-wait"}
    assert not launch(body.format(0))[0].findings


def test_store_counts_in_vmcnt() -> None:
    body = (
        "v_mov_b32_e32 v2, 7\nbuffer_load_dword v3, v1, s[4:7], 0 offen\n"
        + STORE
        + "\ns_waitcnt vmcnt(1)\nv_mov_b32_e32 v4, v3"
    )
    assert not launch(body)[0].findings


def test_register_overwritten_while_its_load_is_out() -> None:
    r, _, _ = launch("buffer_load_dword v2, v1, s[4:7], 0 offen\nv_mov_b32_e32 v2, 0\ns_waitcnt vmcnt(0)")
    assert only(r).kind == "register-overwritten"


def test_the_upper_half_of_an_addend_reaches_the_upper_half_of_the_sum() -> None:
    mad = "v_mov_b32_e32 v30, 7\nv_mad_u64_u32 v[{0}:{1}], s[2:3], v0, v1, v[30:31]\nv_mov_b32_e32 v2, v{2}"
    assert not launch(mad.format(30, 31, 30))[0].findings
    assert not launch(mad.format(32, 33, 32))[0].findings
    for high in (31, 33):
        f = only(launch(mad.format(high - 1, high, high))[0])
        assert (f.kind, f.address, f.count) == ("register-uninitialised", high, 64)
    written = "v_mov_b32_e32 v31, 0\n" + mad.format(32, 33, 33)
    assert not launch(written)[0].findings
    f = only(launch("v_mad_u64_u32 v[32:33], s[2:3], v0, v1, v[30:31]")[0])
    assert f.address == 30, "the lower half is read"
    body = "v_mov_b32_e32 v30, 7\nv_mad_u64_u32 v[32:33], s[2:3], v31, v1, v[30:31]"
    assert only(launch(body)[0]).address == 31, "and so is a factor"


def test_uninitialised_registers() -> None:
    f = only(launch("v_add_u32_e32 v2, v30, v1")[0])
    assert (f.kind, f.count, f.address) == ("register-uninitialised", 64, 30)
    f = only(launch("s_add_u32 s30, s30, 1")[0])
    assert (f.kind, f.detail) == ("register-uninitialised", "s30 was never written there")
    one = "s_mov_b32 s30, 1.0\nv_mov_b32_e32 v4, v0\nv_mov_b32_e32 v5, v0\n"
    one += "v_pk_mul_f32 v[4:5], v[4:5], s[30:31] op_sel_hi:[1,{}]"
    assert not launch(one.format(0))[0].findings, "the half of a pair that op_sel leaves out is not read"
    assert only(launch(one.format(1))[0]).address == 31
    half = "s_mov_b64 exec, 0xffff\nv_mov_b32_e32 v5, 1\ns_mov_b64 exec, {}\nv_mov_b32_e32 v6, v5"
    f = only(launch(half.format("-1"))[0])
    assert (f.kind, f.lane, f.count) == ("register-uninitialised", 16, 48)
    assert not launch(half.format("0xff"))[0].findings


# ------------------------------------------------------------------------------------- MFMA wait states
MATRIX = "\n".join(f"v_mov_b32_e32 v{k}, 0" for k in range(2, 20)) + "\ns_nop 1\n"
FP8 = "v_mfma_scale_f32_16x16x128_f8f6f4 v[20:23], v[2:9], v[10:17], 0, v18, v19"
FP4 = "v_mfma_scale_f32_16x16x128_f8f6f4 v[20:23], v[2:5], v[10:13], 0, v18, v19 cbsz:4 blgp:4"
WIDE = "v_mfma_scale_f32_32x32x64_f8f6f4 v[20:35], v[2:9], v[10:17], 0, v18, v19"
FLOAT32 = "v_mfma_f32_16x16x4_f32 v[20:23], v2, v10, 0"


@pytest.mark.parametrize(("matrix", "need"), [(FP8, 12), (FP4, 8), (WIDE, 20), (FLOAT32, 10)])
def test_matrix_result_read_early(matrix: str, need: int) -> None:
    for states in (0, 1, need - 1, need, need + 3):
        nops = "".join(f"s_nop {min(states - k, 16) - 1}\n" for k in range(0, states, 16))
        r, _, _ = launch(f"{MATRIX}{matrix}\n{nops}v_mov_b32_e32 v40, v21")
        assert kinds(r) == ({"matrix-result-early"} if states < need else set()), states


def test_matrix_chains_need_no_wait_but_operands_do() -> None:
    chain = FP8.replace(" 0, v18", " v[20:23], v18")
    assert not launch(f"{MATRIX}{FP8}\n{chain}")[0].findings
    shifted = FP8.replace("v[20:23]", "v[24:27]").replace(" 0, v18", " v[20:23], v18")
    assert not launch(f"{MATRIX}{FP8}\n{shifted}")[0].findings, "C exactly as written needs none"
    overlap = "v_mfma_scale_f32_16x16x128_f8f6f4 v[30:33], v[2:9], v[10:17], v[22:25], v18, v19"
    begin = MATRIX + "v_mov_b32_e32 v24, 0\nv_mov_b32_e32 v25, 0\n"
    assert kinds(launch(f"{begin}{FP8}\n{overlap}")[0]) == {"matrix-result-early"}
    operand = "v_mfma_scale_f32_16x16x128_f8f6f4 v[30:33], v[16:23], v[10:17], 0, v18, v19"
    assert kinds(launch(f"{MATRIX}{FP8}\n{operand}")[0]) == {"matrix-result-early"}
    assert not launch(f"{MATRIX}{FP8}\ns_nop 11\n{operand}")[0].findings


def test_matrix_wait_states_cross_a_branch() -> None:
    r, _, _ = launch(f"{MATRIX}{FP8}\ns_branch .Lnext\n.Lnext:\nv_mov_b32_e32 v40, v20")
    f = only(r)
    assert f.kind == "matrix-result-early"
    assert "1 of 12" in f.detail


# ------------------------------------------------------------------------------------- LDS between waves
# Wave 0 writes a word a lane, wave 1 reads it.
WRITE_READ = """
v_mov_b32_e32 v2, 5
s_cmp_lg_u32 s20, 0
s_cbranch_scc1 .Lmeet
ds_write_b32 v1, v2
{before}
.Lmeet:
{meet}
{after}
s_cmp_eq_u32 s20, 0
s_cbranch_scc1 .Lend
ds_read_b32 v3, v1
s_waitcnt lgkmcnt(0)
buffer_store_dword v3, v1, s[8:11], 0 offen
.Lend:
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_read_after_write(seed: int) -> None:
    wait, meet = "s_waitcnt lgkmcnt(0)", "s_barrier"
    r, _, y = launch(WRITE_READ.format(before=wait, meet=meet, after=""), seed, waves=2, lds=1024)
    assert not r.findings
    assert (y[:64] == 5).all()
    for before, between, after in (("", meet, ""), (wait, "", ""), ("", meet, wait)):
        r, _, _ = launch(WRITE_READ.format(before=before, meet=between, after=after), seed, waves=2, lds=1024)
        assert kinds(r) & {"lds-race", "lds-uninitialised"}, (before, between, after)


@pytest.mark.parametrize("seed", SEEDS)
def test_write_after_read(seed: int) -> None:
    body = """
v_mov_b32_e32 v2, 5
v_lshlrev_b32_e32 v9, 2, v20
ds_write_b32 v9, v2
s_waitcnt lgkmcnt(0)
s_barrier
s_cmp_lg_u32 s20, 0
s_cbranch_scc1 .Lother
ds_read_b32 v3, v1
{first}
.Lother:
{meet}
s_cmp_eq_u32 s20, 0
s_cbranch_scc1 .Lend
v_mov_b32_e32 v2, 6
ds_write_b32 v1, v2
.Lend:
s_waitcnt lgkmcnt(0)
"""
    assert not launch(body.format(first="s_waitcnt lgkmcnt(0)", meet="s_barrier"), seed, waves=2, lds=1024)[0].findings
    for first, meet in (("", "s_barrier"), ("s_waitcnt lgkmcnt(0)", "")):
        assert kinds(launch(body.format(first=first, meet=meet), seed, waves=2, lds=1024)[0]) == {"lds-race"}


@pytest.mark.parametrize("seed", SEEDS)
def test_two_writers_race_unless_they_agree(seed: int) -> None:
    body = "v_mov_b32_e32 v2, {}\nds_write_b32 v1, v2\ns_waitcnt lgkmcnt(0)"
    assert only(launch(body.format("v20"), seed, waves=2, lds=1024)[0]).kind == "lds-race"
    assert not launch(body.format("7"), seed, waves=2, lds=1024)[0].findings


# ------------------------------------------------------------------------------------- LDS and its own wave
def test_a_waves_lds_operations_run_in_order() -> None:
    body = """
v_mov_b32_e32 v2, 5
v_mov_b32_e32 v3, 6
ds_write_b32 v1, v2
ds_read_b32 v4, v1
ds_write_b32 v1, v3
s_waitcnt lgkmcnt(0)
buffer_store_dword v4, v1, s[8:11], 0 offen
"""
    r, _, y = launch(body, lds=1024)
    assert not r.findings
    assert (y[:64] == 5).all()


def test_two_reads_whose_result_covers_their_address() -> None:
    body = """
v_mov_b32_e32 v2, 5
ds_write_b32 v1, v2
ds_write_b32 v1, v2 offset:256
v_mov_b32_e32 v4, v1
ds_read2st64_b32 v[4:5], v4 offset1:1
s_waitcnt lgkmcnt(0)
v_add_u32_e32 v4, v4, v5
buffer_store_dword v4, v1, s[8:11], 0 offen
"""
    r, _, y = launch(body, lds=1024)
    assert not r.findings
    assert (y[:64] == 10).all()


FILL = """
s_mov_b32 m0, {m0}
v_lshlrev_b32_e32 v6, 4, v0
buffer_load_dwordx4 v6, s[4:7], 0 offen lds
"""


def test_dma_in_flight_is_not_there() -> None:
    read = "ds_read_b128 v[8:11], v6\ns_waitcnt lgkmcnt(0)\nbuffer_store_dwordx4 v[8:11], v6, s[8:11], 0 offen"
    read += "\ns_waitcnt vmcnt(0)"
    r, x, y = launch(FILL.format(m0=0) + "s_waitcnt vmcnt(0)\n" + read, lds=2048)
    assert not r.findings
    assert (y[:256] == x[:256]).all()
    r, x, y = launch(FILL.format(m0=0) + read, lds=2048)
    assert kinds(r) == {"lds-dma-in-flight", "lds-uninitialised"} or "lds-read-overtaken" in kinds(r)
    assert (y[:256] != x[:256]).any()


def test_dma_overwritten_in_flight() -> None:
    body = FILL.format(m0=0) + "v_mov_b32_e32 v2, 1\nds_write_b32 v1, v2\ns_waitcnt lgkmcnt(0)\ns_waitcnt vmcnt(0)"
    assert kinds(launch(body, lds=2048)[0]) == {"lds-dma-in-flight"}


def test_dma_under_a_read_nobody_waited_for() -> None:
    first = FILL.format(m0=0) + "s_waitcnt vmcnt(0)\nds_read_b128 v[8:11], v6\n"
    again = "v_add_u32_e32 v7, 0x400, v6\nbuffer_load_dwordx4 v7, s[4:7], 0 offen lds\n"
    late = first + again + "s_waitcnt vmcnt(0)\ns_waitcnt lgkmcnt(0)"
    assert "lds-dma-in-flight" in kinds(launch(late, lds=2048)[0]) or "lds-read-overtaken" in kinds(
        launch(late, lds=2048)[0]
    )
    good = first + "s_waitcnt lgkmcnt(0)\n" + again + "s_waitcnt vmcnt(0)"
    assert not launch(good, lds=2048)[0].findings


@pytest.mark.parametrize("seed", SEEDS)
def test_two_fills_of_the_same_bytes_are_no_race(seed: int) -> None:
    assert not launch(FILL.format(m0=0) + "s_waitcnt vmcnt(0)", seed, waves=2, lds=2048)[0].findings
    different = "v_mov_b32_e32 v7, s20\n" + FILL.format(m0=0).replace("4, v0", "4, v20") + "s_waitcnt vmcnt(0)"
    assert kinds(launch(different, seed, waves=2, lds=2048)[0]) == {"lds-dma-in-flight"}


def test_uninitialised_and_outside_lds() -> None:
    f = only(launch("ds_read_b32 v3, v1 offset:512\ns_waitcnt lgkmcnt(0)", lds=1024)[0])
    assert (f.kind, f.address, f.lane) == ("lds-uninitialised", 512, 0)
    r, _, _ = launch("v_mov_b32_e32 v2, 1\nds_write_b32 v1, v2 offset:800\ns_waitcnt lgkmcnt(0)", lds=1024)
    f = only(r)
    assert (f.kind, f.lane, f.address, f.count) == ("lds-out-of-bounds", 56, 1024, 8)


# ------------------------------------------------------------------------------------- device memory
def test_the_buffer_rule_drops_and_zeroes_without_a_finding() -> None:
    body = """
buffer_load_dwordx4 v[4:7], v1, s[4:7], 0 offen
s_waitcnt vmcnt(0)
v_mov_b32_e32 v2, 9
buffer_store_dword v7, v1, s[8:11], 0 offen
buffer_store_dword v2, v1, s[8:11], 0 offen offset:256
"""
    r, _, y = launch(body, n=260)
    assert not r.findings
    want = np.arange(64) + 3
    want[62:] = 0  # dword 3 of lanes 62 and 63 ends past 260 bytes
    assert (y[:64] == want).all()
    assert y[64] == 9
    assert (y[65:] == 0).all()
    wrap = "v_mov_b32_e32 v3, -4\nv_mov_b32_e32 v2, 3\nbuffer_store_dword v2, v3, s[8:11], 0 offen offset:4"
    r, _, y = launch(wrap, n=260)
    assert y[0] == 3, "voffset + imm wraps at 32 bits"


def test_memory_that_a_wide_open_descriptor_permits() -> None:
    far = "v_mov_b32_e32 v2, 9\nv_add_u32_e32 v3, 0x1000, v1\n"
    f = only(launch(far + "buffer_store_dword v2, v3, s[8:11], 0 offen", n=0x7FFFFFF0)[0])
    assert (f.kind, f.count) == ("store-out-of-bounds", 64)
    f = only(launch(far + "buffer_load_dword v4, v3, s[4:7], 0 offen\ns_waitcnt vmcnt(0)", n=0x7FFFFFF0)[0])
    assert f.kind == "load-out-of-bounds"


@pytest.mark.parametrize("seed", SEEDS)
def test_two_workgroups_store_to_one_address(seed: int) -> None:
    f = only(launch("v_mov_b32_e32 v2, 1\n" + STORE, seed, grid=2)[0])
    assert f.kind == "workgroups-collide"
    assert f.count == 64
    apart = "s_lshl_b32 s21, s2, 8\nv_mov_b32_e32 v2, 1\nbuffer_store_dword v2, v1, s[8:11], s21 offen"
    assert not launch(apart, seed, grid=2)[0].findings


def test_hazards_off_finds_nothing_and_computes_the_same() -> None:
    body = "buffer_load_dword v2, v1, s[4:7], 0 offen\ns_waitcnt vmcnt(0)\nv_add_u32_e32 v2, v2, v30\n" + STORE
    assert not launch(body, hazards=False)[0].findings


# ------------------------------------------------------------------------------------- a compiled kernel
def dense(
    name: str, seed: int, *, hazards: bool = True, model: str = "exact-rne", k: int = 384
) -> tuple[RunResult, Array, Array]:
    """The sample kernel on small exact data: every partial sum is an exact float32, so one product says what is
    right."""
    rng = np.random.default_rng(7)
    m = n = 128
    codes = np.array([0x00, 0x38, 0x40, 0xB8, 0xC0], np.uint8)  # 0, 1, 2, -1, -2
    a, b = codes[rng.integers(0, 5, (m, k))], codes[rng.integers(0, 5, (n, k))]
    sa, sb = (rng.integers(126, 129, (rows, k // 32)).astype(np.uint8) for rows in (m, n))
    c = np.full((m, n), np.nan, np.float32)
    r = run(
        parse(texts()[name]), [a, b, sa, sb, c, m, n, k], (n // 64, m // 64), seed=seed, hazards=hazards, model=model
    )
    table = np.vectorize(TABLES["fp8"].__getitem__, otypes=[float])
    x = table(a) * np.exp2(np.repeat(sa.astype(float) - 127, 32, 1))
    y = table(b) * np.exp2(np.repeat(sb.astype(float) - 127, 32, 1))
    return r, c, x @ y.T


FAULTS = [name for name in texts() if "right" not in name]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("form", ["async", "sync"])
def test_the_right_kernel_is_clean_and_exact(form: str, seed: int) -> None:
    r, c, want = dense(f"dense_right_{form}", seed)
    assert not r.findings, [str(f) for f in r.findings]
    assert (c == want).all()
    assert r.flops == 2 * 128 * 128 * 384


def test_models_and_lock_step_agree_on_exact_data() -> None:
    for model in ("exact-rne", "cdna3-like"):
        _, c, want = dense("dense_right_async", 0, hazards=False, model=model)
        assert (c == want).all()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", FAULTS)
def test_every_seeded_synchronisation_fault_is_found(name: str, seed: int) -> None:
    r, _, _ = dense(name, seed)
    assert kinds(r) & {"lds-race", "lds-dma-in-flight", "lds-read-overtaken"}, name


def test_all_faults_are_there() -> None:
    assert len(FAULTS) == 10
