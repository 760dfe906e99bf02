"""Loads, stores, LDS forms, cross-lane moves, atomics, launch state and control flow, each against NumPy indexing.

Does not catch what `ds_read_b64_tr_*` really does on silicon: its rule is an assumption and only kept from changing.
"""

from __future__ import annotations

import numpy as np
import pytest

from mxgate.kernels.gfx950 import RunError, parse, run
from mxgate.kernels.gfx950.memory import ATOMICS, BINDERS, transpose
from mxgate.kernels.gfx950.test_hazards import launch, only
from mxgate.kernels.gfx950.test_text import assembly

LANE = np.arange(64)


@pytest.mark.parametrize(("form", "n"), [("dword", 1), ("dwordx2", 2), ("dwordx3", 3), ("dwordx4", 4)])
@pytest.mark.parametrize("offset", [0, 4])
def test_wide_forms(form: str, n: int, offset: int) -> None:
    """Aligned and not; buffer, global with and without a scalar base."""
    r = f"v[4:{3 + n}]" if n > 1 else "v4"
    want = offset // 4 + LANE[:, None] * n + np.arange(n)
    begin = f"v_mul_u32_u24_e32 v2, {4 * n}, v0\nv_mov_b32_e32 v3, 0\n"
    forms = {
        "buffer": (
            f"buffer_load_{form} {r}, v2, s[4:7], 0 offen offset:{offset}",
            f"buffer_store_{form} {r}, v2, s[8:11], 0 offen",
        ),
        "saddr": (f"global_load_{form} {r}, v2, s[12:13] offset:{offset}", f"global_store_{form} v2, {r}, s[14:15]"),
        "flat": (f"global_load_{form} {r}, v[10:11], off offset:{offset}", f"global_store_{form} v[12:13], {r}, off"),
    }
    pointers = (
        "v_mov_b32_e32 v30, s12\nv_mov_b32_e32 v31, s13\nv_lshl_add_u64 v[10:11], v[2:3], 0, v[30:31]\n"
        "v_mov_b32_e32 v30, s14\nv_mov_b32_e32 v31, s15\nv_lshl_add_u64 v[12:13], v[2:3], 0, v[30:31]\n"
    )
    for name, (load, store) in forms.items():
        result, _, y = launch(begin + pointers + load + "\ns_waitcnt vmcnt(0)\n" + store)
        assert not result.findings, name
        assert (y[: 64 * n].reshape(64, n) == want).all(), name


@pytest.mark.parametrize(
    ("form", "fn"),
    [
        ("ubyte", lambda b, at, old: b[at]),
        ("sbyte", lambda b, at, old: b[at].view(np.int8).astype(np.int32).view(np.uint32)),
        ("ushort", lambda b, at, old: b[at] | b[at + 1].astype(np.uint32) << 8),
        (
            "sshort",
            lambda b, at, old: (
                (b[at] | b[at + 1].astype(np.uint16) << 8).view(np.int16).astype(np.int32).view(np.uint32)
            ),
        ),
        ("short_d16", lambda b, at, old: old & 0xFFFF0000 | b[at] | b[at + 1].astype(np.uint32) << 8),
        ("short_d16_hi", lambda b, at, old: old & 0xFFFF | (b[at] | b[at + 1].astype(np.uint32) << 8) << 16),
        ("ubyte_d16_hi", lambda b, at, old: old & 0xFFFF | b[at].astype(np.uint32) << 16),
        ("sbyte_d16", lambda b, at, old: old & 0xFFFF0000 | b[at].view(np.int8).astype(np.int16).view(np.uint16)),
    ],
)
def test_narrow_loads(form: str, fn: object) -> None:
    body = f"""
v_mul_u32_u24_e32 v2, 2, v0
v_mov_b32_e32 v4, 0x12345678
buffer_load_{form} v4, v2, s[4:7], 0 offen offset:2
s_waitcnt vmcnt(0)
buffer_store_dword v4, v1, s[8:11], 0 offen
"""
    text = assembly_with(body)
    x = np.random.default_rng(0).integers(0, 256, 4096, dtype=np.uint8)
    y = np.zeros(1024, np.uint32)
    assert not run(parse(text), [x, y], 1).findings
    with np.errstate(over="ignore"):
        want = fn(x, 2 + 2 * LANE, np.uint32(0x12345678))  # type: ignore[operator]
    assert (y[:64] == want).all()


def assembly_with(body: str, **more: object) -> str:
    from mxgate.kernels.gfx950.test_hazards import OPEN

    return assembly(OPEN.format(n=4096) + body + "\ns_endpgm", args=(8, 8), **more)  # type: ignore[arg-type]


def test_narrow_stores() -> None:
    body = """
v_mov_b32_e32 v2, 0x11223344
v_mul_u32_u24_e32 v3, 8, v0
buffer_store_byte v2, v3, s[8:11], 0 offen
buffer_store_byte_d16_hi v2, v3, s[8:11], 0 offen offset:1
buffer_store_short v2, v3, s[8:11], 0 offen offset:2
buffer_store_short_d16_hi v2, v3, s[8:11], 0 offen offset:4
"""
    r, _, y = launch(body)
    assert not r.findings
    assert (y[:128].reshape(64, 2) == [0x33442244, 0x1122]).all()


def test_indexed_buffer() -> None:
    body = """
s_or_b32 s5, s5, 0x00080000
s_mov_b32 s6, 10
buffer_load_dword v4, v0, s[4:7], 0 idxen offset:4
s_waitcnt vmcnt(0)
buffer_store_dword v4, v1, s[8:11], 0 offen
"""
    r, _, y = launch(body)
    assert not r.findings
    assert (y[:64] == np.where(LANE < 10, 2 * LANE + 1, 0)).all()


def test_scalar_offset_and_scalar_buffer_load() -> None:
    body = """
s_mov_b32 s21, 64
s_buffer_load_dwordx2 s[30:31], s[4:7], 0x10
buffer_load_dword v4, v1, s[4:7], s21 offen
s_waitcnt vmcnt(0) lgkmcnt(0)
v_add_u32_e32 v4, s31, v4
buffer_store_dword v4, v1, s[8:11], 0 offen
"""
    r, _, y = launch(body)
    assert not r.findings
    assert (y[:64] == 16 + LANE + 5).all()


# ------------------------------------------------------------------------------------- LDS forms
@pytest.mark.parametrize(("form", "n"), [("b32", 1), ("b64", 2), ("b96", 3), ("b128", 4)])
def test_lds_wide(form: str, n: int) -> None:
    r = f"v[4:{3 + n}]" if n > 1 else "v4"
    fill = "\n".join(f"v_add_u32_e32 v{4 + k}, {100 * k}, v0" for k in range(n))
    body = f"""
{fill}
v_mul_u32_u24_e32 v2, {4 * n}, v0
ds_write_{form} v2, {r} offset:16
ds_read_{form} v[10:{9 + n}], v2 offset:16
s_waitcnt lgkmcnt(0)
v_mov_b32_e32 v4, v{9 + n}
buffer_store_dword v4, v1, s[8:11], 0 offen
"""
    result, _, y = launch(body.replace("v[10:10]", "v10"), lds=2048)
    assert not result.findings
    assert (y[:64] == 100 * (n - 1) + LANE).all()


def test_lds_pairs_and_narrow() -> None:
    body = """
v_mov_b32_e32 v4, 0x80
v_mov_b32_e32 v5, 0x9081
ds_write2_b32 v1, v4, v5 offset0:0 offset1:64
ds_read_i8 v6, v1
ds_read_u8 v7, v1 offset:256
ds_read_i16 v8, v1 offset:256
ds_read_u16_d16_hi v9, v1 offset:256
s_waitcnt lgkmcnt(0)
v_lshlrev_b32_e32 v2, 4, v0
buffer_store_dwordx4 v[6:9], v2, s[8:11], 0 offen
"""
    r, _, y = launch("v_mov_b32_e32 v9, 7\n" + body, lds=2048)
    assert not r.findings
    assert (y[:256].reshape(64, 4) == [0xFFFFFF80, 0x81, 0xFFFF9081, 0x90810007]).all()


@pytest.mark.parametrize("form", ["b8", "b16", "b8_d16_hi", "b32", "b128"])
def test_lds_writes_of_no_lane(form: str) -> None:
    """EXEC is empty, or every lane lies outside."""
    data = "v[4:7]" if form == "b128" else "v4"
    for begin, kinds in (("s_mov_b64 exec, 0", []), ("v_add_u32_e32 v1, 0x800, v1", ["lds-out-of-bounds"])):
        fill = "\n".join(f"v_mov_b32_e32 v{k}, 0" for k in range(4, 8))
        r, _, _ = launch(f"{fill}\n{begin}\nds_write_{form} v1, {data}\ns_waitcnt lgkmcnt(0)", lds=2048)
        assert [f.kind for f in r.findings] == kinds


def test_permutes() -> None:
    body = """
v_xor_b32_e32 v4, 68, v1
ds_bpermute_b32 v5, v4, v0
v_lshlrev_b32_e32 v6, 2, v0
v_sub_u32_e32 v6, 252, v6
ds_permute_b32 v7, v6, v0
ds_swizzle_b32 v8, v0 offset:0x041f
ds_swizzle_b32 v9, v0 offset:0x801b
s_waitcnt lgkmcnt(0)
v_mov_b32_e32 v6, v7
v_mov_b32_e32 v7, v8
v_mov_b32_e32 v8, v9
v_lshlrev_b32_e32 v2, 4, v0
buffer_store_dwordx4 v[5:8], v2, s[8:11], 0 offen
"""
    r, _, y = launch(body)
    got = y[:256].reshape(64, 4)
    assert not r.findings
    assert (got[:, 0] == LANE ^ 17).all()
    assert (got[:, 1] == 63 - LANE).all()
    assert (got[:, 2] == LANE ^ 1).all()
    assert (got[:, 3] == (LANE & ~3) + 3 - (LANE & 3)).all()


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_transposed_reads_keep_their_rule(bits: int) -> None:
    """Each 16 lanes hold rows of 16 elements one after another; lane c receives column c."""
    rng = np.random.default_rng(0)
    words = rng.integers(0, 1 << 32, (1, 64, 2), dtype=np.uint32)
    got = transpose(words, bits)
    for block in range(4):
        data = int.from_bytes(words[0, 16 * block : 16 * block + 16].tobytes(), "little")
        for c in range(16):
            want = 0
            for row in range(64 // bits):
                element = data >> (bits * (16 * row + c)) & ((1 << bits) - 1)
                want |= element << bits * row
            assert int.from_bytes(got[0, 16 * block + c].tobytes(), "little") == want


def test_a_lane_that_a_limit_cuts_changes_nothing_for_the_others() -> None:
    """Lane 0 ends past the allocation of 4,096 bytes and so stores nothing, whether or not num_records cuts lane 1."""
    ones = "\n".join(f"v_mov_b32_e32 v{k}, 1" for k in range(4, 8))
    body = (
        "v_lshlrev_b32_e32 v2, 4, v0\ns_mov_b64 exec, {}\nbuffer_store_dwordx4 v[4:7], v2, s[8:11], 0 offen offset:4088"
    )
    for lanes in (1, 3):
        r, _, y = launch(f"{ones}\n{body.format(lanes)}", n=4096 + 16)
        assert [f.kind for f in r.findings] == ["store-out-of-bounds"]
        assert not y.any()


# ------------------------------------------------------------------------------------- atomics and scratch
@pytest.mark.parametrize("kind", ["add", "umax", "or", "add_f32", "swap"])
def test_atomics(kind: str) -> None:
    one = "v_cvt_f32_u32_e32 v4, v0" if kind == "add_f32" else "v_mov_b32_e32 v4, v0"
    body = f"{one}\nv_and_b32_e32 v5, 4, v1\nbuffer_atomic_{kind} v4, v5, s[8:11], 0 offen\ns_waitcnt vmcnt(0)"
    r, _, y = launch(body, grid=2)
    assert not r.findings, "atomics of two workgroups may meet"
    even, odd = LANE[::2], LANE[1::2]
    if kind == "add":
        assert y[:2].tolist() == [2 * even.sum(), 2 * odd.sum()]
    elif kind == "umax" or kind == "or":
        assert y[:2].tolist() == [62, 63]
    elif kind == "add_f32":
        assert y[:2].view(np.float32).tolist() == [2 * even.sum(), 2 * odd.sum()]
    else:
        assert y[0] % 2 == 0
        assert y[1] % 2 == 1
    assert kind in ATOMICS


def test_atomic_returns_what_was_there() -> None:
    body = """
v_mov_b32_e32 v4, 5
global_atomic_add v5, v1, v4, s[14:15] sc0
s_waitcnt vmcnt(0)
v_add_u32_e32 v5, 7, v5
buffer_store_dword v5, v1, s[8:11], 0 offen offset:256
"""
    _, _, y = launch(body)
    assert (y[:64] == 5).all()
    assert (y[64:128] == 7).all()


def test_scratch_is_a_lanes_own() -> None:
    body = """
v_add_u32_e32 v4, s2, v0
scratch_store_dword off, v4, off offset:8
s_waitcnt vmcnt(0)
scratch_load_dword v5, off, off offset:8
s_waitcnt vmcnt(0)
s_lshl_b32 s21, s2, 8
buffer_store_dword v5, v1, s[8:11], s21 offen
"""
    x, y = np.zeros(1024, np.uint32), np.zeros(1024, np.uint32)
    r = run(parse(assembly_with(body, scratch=16)), [x, y], 2)
    assert not r.findings
    assert (y[:128] == np.concatenate([LANE, LANE + 1])).all()


# ------------------------------------------------------------------------------------- control and launch
def test_divergence_and_reconvergence() -> None:
    """Workgroups take 1 to 4 turns of a loop with a barrier, then one of two ways to the end."""
    body = """
s_add_u32 s21, s2, 1
v_mov_b32_e32 v4, 0
.Lloop:
v_add_u32_e32 v4, 10, v4
s_bitcmp1_b32 s21, 0
s_cbranch_scc1 .Lodd
v_add_u32_e32 v4, 1, v4
.Lodd:
s_barrier
s_sub_u32 s21, s21, 1
s_cmp_lg_u32 s21, 0
s_cbranch_scc1 .Lloop
v_cmp_gt_u32_e32 vcc, 32, v0
s_and_saveexec_b64 s[30:31], vcc
s_cbranch_execz .Lskip
v_add_u32_e32 v4, 1000, v4
.Lskip:
s_or_b64 exec, exec, s[30:31]
s_lshl_b32 s22, s2, 9
v_lshlrev_b32_e32 v5, 2, v20
buffer_store_dword v4, v5, s[8:11], s22 offen
"""
    for seed in range(3):
        for hazards in (True, False):
            text = assembly_with(body, block=128)
            x, y = np.zeros(1024, np.uint32), np.zeros(1024, np.uint32)
            r = run(parse(text), [x, y], 4, seed=seed, hazards=hazards)
            assert not r.findings
            for g in range(4):
                turns = g + 1
                want = 10 * turns + turns // 2 + np.where(LANE < 32, 1000, 0)
                assert (y[128 * g : 128 * g + 64] == want).all()
                assert (y[128 * g + 64 : 128 * g + 128] == want).all()
            loop = next(i.index for i in r.kernel.instructions if i.text == "v_add_u32_e32 v4, 10, v4")
            assert r.executed[loop] == 2 * (1 + 2 + 3 + 4)


def test_ids_hidden_arguments_and_numbers() -> None:
    body = """
s_load_dwordx2 s[12:13], s[0:1], 0x0
s_load_dwordx2 s[14:15], s[0:1], 0x8
s_load_dwordx4 s[16:19], s[0:1], 0x10
s_waitcnt lgkmcnt(0)
s_mul_i32 s5, s4, 6
s_mul_i32 s6, s3, 3
s_add_u32 s5, s5, s6
s_add_u32 s5, s5, s2
s_lshl_b32 s5, s5, 5
v_mov_b32_e32 v1, s5
v_mov_b32_e32 v2, s14
v_mov_b32_e32 v3, s15
v_mov_b32_e32 v4, s16
v_mov_b32_e32 v5, s17
v_mov_b32_e32 v6, s18
v_mov_b32_e32 v7, s19
v_mov_b32_e32 v8, v0
v_cmp_eq_u32_e32 vcc, 0x801, v0
s_and_saveexec_b64 s[30:31], vcc
global_store_dwordx4 v1, v[2:5], s[12:13]
global_store_dwordx3 v1, v[6:8], s[12:13] offset:16
s_endpgm
"""
    hidden = (
        "hidden_block_count_x",
        "hidden_block_count_y",
        "hidden_block_count_z",
        "hidden_group_size_x",
        "hidden_group_size_y",
    )
    text = assembly(body, args=(8, 4, 4), hidden=hidden).replace("- 64\n      - 1", "- 8\n      - 8")
    out = np.zeros((12, 8), np.uint32)
    r = run(parse(text), [out, -7, 1.5], (3, 2, 2), (8, 8))
    assert not r.findings
    want = [0xFFFFFFF9, int(np.float32(1.5).view(np.uint32)), 3, 2, 2, 8 | 8 << 16, 1 | 2 << 10, 0]
    assert (out == want).all()


def test_kernarg_preload() -> None:
    extra = "\n\t\t.amdhsa_user_sgpr_kernarg_preload_length 3\n\t\t.amdhsa_user_sgpr_kernarg_preload_offset 0"
    body = "v_mov_b32_e32 v2, s4\nv_lshlrev_b32_e32 v1, 2, v0\nglobal_store_dword v1, v2, s[2:3]\ns_endpgm"
    out = np.zeros(64, np.uint32)
    assert not run(parse(assembly(body, args=(8, 4), extra=extra)), [out, 77], 1).findings
    assert (out == 77).all()


def test_a_last_wave_that_is_not_full() -> None:
    body = """
s_load_dwordx2 s[12:13], s[0:1], 0x0
v_lshlrev_b32_e32 v1, 2, v0
s_waitcnt lgkmcnt(0)
global_store_dword v1, v0, s[12:13]
s_endpgm
"""
    out = np.full(128, 999, np.uint32)
    assert not run(parse(assembly(body, args=(8,), block=100)), [out], 1).findings
    assert (out == np.where(np.arange(128) < 100, np.arange(128), 999)).all()


def test_a_mapping_of_offsets_serves_text_without_metadata() -> None:
    text = assembly(
        """
s_load_dwordx2 s[12:13], s[0:1], 0x8
v_lshlrev_b32_e32 v1, 2, v0
s_waitcnt lgkmcnt(0)
global_store_dword v1, v0, s[12:13]
s_endpgm
""",
        kernarg=16,
    )
    out = np.zeros(64, np.uint32)
    run(parse(text), {8: out, 0: b"\0\0\0\0"}, 1, 64)
    assert (out == LANE).all()


def test_the_same_array_twice_is_one_allocation() -> None:
    body = """
buffer_load_dword v2, v1, s[4:7], 0 offen
s_waitcnt vmcnt(0)
v_add_u32_e32 v2, 1, v2
buffer_store_dword v2, v1, s[8:11], 0 offen
"""
    x = np.arange(1024, dtype=np.uint32)
    run(parse(assembly_with(body)), [x, x], 1)
    assert (x[:64] == LANE + 1).all()


@pytest.mark.parametrize("between", ["", "s_nop 0", "s_barrier"])
@pytest.mark.parametrize("hazards", [False, True])
def test_a_loop_that_loads_the_same_registers_twice(between: str, hazards: bool) -> None:
    """Both halves of the loop multiply v[4:5], each after a load of its own: the first one's was issued the round
    before. Products are run late, so each must keep the operand that it was given."""
    load = "buffer_load_dwordx2 v[4:5], v2, s[4:7], 0 offen\nv_add_u32_e32 v2, 512, v2"
    half = f"s_waitcnt vmcnt(0)\nv_mfma_f32_16x16x16_f16 v[32:35], v[4:5], v[6:7], v[32:35]\n{load}"
    ones = [f"v_mov_b32_e32 v{r}, 0x3c003c00" for r in (6, 7)]
    zeros = [f"v_mov_b32_e32 v{r}, 0" for r in range(32, 36)]
    begin = "\n".join(["v_lshlrev_b32_e32 v2, 3, v0", *ones, *zeros, load, "s_mov_b32 s30, 0"])
    end = "s_add_u32 s30, s30, 1\ns_cmp_lt_u32 s30, 2\ns_cbranch_scc1 .L1\ns_waitcnt vmcnt(0)\ns_nop 15"
    store = "buffer_store_dword v32, v1, s[8:11], 0 offen"
    text = assembly_with("\n".join([begin, ".L1:", half, between, half, end, store]))
    tiles = np.repeat(np.arange(1, 9, dtype=np.float16), 256)  # of which the loop takes four
    y = np.zeros(1024, np.uint32)
    assert not run(parse(text), [tiles, y], 1, hazards=hazards).findings
    assert (y[:64].view(np.float32) == 16 * (1 + 2 + 3 + 4)).all()


def test_a_kernel_that_never_ends() -> None:
    with pytest.raises(RunError, match=r"line 5: a wave has executed more than 1000 instructions"):
        run(parse(assembly("s_nop 0\n.Lagain: s_branch .Lagain\ns_endpgm")), [], 1, limit=1000)


@pytest.mark.parametrize(
    ("args", "options", "what"),
    [
        ([], {}, "expected 2 arguments, found 0"),
        ([np.zeros(4), np.zeros(4)], {}, "holds 4 bytes, an array needs 8"),
        ([np.zeros(4), 1 << 40], {}, "does not fit 4 bytes"),
        ([np.zeros(4), b"12345"], {}, "holds 4 bytes, found 5"),
        ([np.zeros(4), "x"], {}, "found str"),
        ([np.zeros((4, 4)).T, 1], {}, "C-contiguous"),
        ([np.zeros(4), 1], {"model": "guess"}, "unknown arithmetic model 'guess'"),
        ([np.zeros(4), 1], {"grid": 0}, "grid must be"),
        ([np.zeros(4), 1], {"block": 128}, "requires a block of"),
        ([np.zeros(4), 1], {"dynamic_lds": 200000}, "200000 bytes of LDS"),
    ],
)
def test_bad_launches(args: list[object], options: dict[str, object], what: str) -> None:
    kernel = parse(assembly("s_endpgm", args=(8, 4)))
    grid = options.pop("grid", 1)
    with pytest.raises(RunError, match=what):
        run(kernel, args, grid, **options)  # type: ignore[arg-type]


def test_a_result_names_its_finding_in_one_line() -> None:
    f = only(launch("v_mov_b32_e32 v2, v40")[0])
    assert str(f).startswith(
        "register-uninitialised: line 19 `v_mov_b32_e32 v2, v40` workgroup 0 wave 0 lane 0 at 0x28: v40"
    )


def test_every_memory_mnemonic_binds() -> None:
    """One spelling of each is bound, so that the table holds no row that cannot be used."""
    from mxgate.kernels.gfx950.plan import bind
    from mxgate.kernels.gfx950.state import Layout
    from mxgate.kernels.gfx950.test_semantics import KERNEL
    from mxgate.kernels.gfx950.text import instruction

    width = {"dword": 1, "dwordx2": 2, "dwordx3": 3, "dwordx4": 4, "dwordx8": 8, "dwordx16": 16}
    for name in BINDERS:
        unit = name.split("_")[0]
        n = width.get(name.rsplit("_", 1)[1], 1)
        v = f"v[8:{7 + n}]" if n > 1 else "v8"
        s = f"s[16:{15 + n}]" if n > 1 else "s16"
        if name.startswith("s_load"):
            text = f"{name} {s}, s[0:1], 0x0"
        elif name.startswith("s_buffer"):
            text = f"{name} {s}, s[4:7], 0x0"
        elif unit == "s":
            text = f"{name} s[16:17]"
        elif unit == "buffer":
            text = f"{name} {v}, v0, s[4:7], 0 offen"
        elif name.startswith("global_load_lds"):
            text = f"{name} v0, s[4:5]"
        elif unit in ("global", "scratch"):
            at = "v0, {v}, s[4:5]" if unit == "global" else "off, {v}, off"
            first, second = (v, at.split(", ")[0]) if "_load_" in name else (at.split(", ")[0], v)
            text = f"{name} {first}, {second}, {at.split(', ')[2]}"
        else:
            two, wide = "2" in name.split("_")[1], {"b64": 2, "b96": 3, "b128": 4}.get(name.split("_")[2], 1)
            if "tr_b" in name:
                text = f"{name} v[8:9], v0"
            elif "read" in name:
                total = wide * (2 if two else 1)
                text = f"{name} v[8:{7 + total}], v0" if total > 1 else f"{name} v8, v0"
            elif "write" in name:
                d = f"v[8:{7 + wide}]" if wide > 1 else "v8"
                text = f"{name} v0, {d}, {d}" if two else f"{name} v0, {d}"
            elif "permute" in name:
                text = f"{name} v8, v0, v1"
            elif "swizzle" in name:
                text = f"{name} v8, v0 offset:1"
            else:
                text = f"{name} v0, v8"
        bind(Layout(KERNEL), instruction(text))
