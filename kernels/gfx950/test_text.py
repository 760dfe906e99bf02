"""Text to kernel: what is read, and that everything else is refused with its line.

Does not catch a mnemonic that LLVM prints and this machine understands differently.
"""

from __future__ import annotations

import pytest

from mxgate.kernels.gfx950 import parse
from mxgate.kernels.gfx950.text import LONGEST, TextError, instruction


def assembly(
    body: str,
    name: str = "k",
    *,
    lds: int = 0,
    vgprs: int = 64,
    agprs: int = 0,
    args: tuple[int, ...] = (),
    block: int = 64,
    hidden: tuple[str, ...] = (),
    scratch: int = 0,
    kernarg: int | None = None,
    extra: str = "",
) -> str:
    """A whole .s around a body, as LLVM lays it out. args: sizes in bytes; the kernarg pointer is s[0:1], ids s2, s3,
    s4."""
    offset, rows = 0, []
    for size in args:
        offset = (offset + size - 1) // size * size
        rows.append(f"      - .offset: {offset}\n        .size: {size}\n        .value_kind: by_value")
        offset += size
    for kind in hidden:
        size = 4 if "block_count" in kind else 2
        offset = (offset + size - 1) // size * size
        rows.append(f"      - .offset: {offset}\n        .size: {size}\n        .value_kind: {kind}")
        offset += size
    total = offset if kernarg is None else kernarg
    lines = "\n".join("\t" + x for x in body.strip().splitlines())
    listed = "    .args:\n" + "\n".join(rows) + "\n" if rows else ""
    return f"""\t.amdgcn_target "amdgcn-amd-amdhsa-unknown-gfx950"
\t.text
{name}:
{lines}
.Lfunc_end_{name}:
\t.size {name}, .Lfunc_end_{name}-{name}
\t.amdhsa_kernel {name}
\t\t.amdhsa_group_segment_fixed_size {lds}
\t\t.amdhsa_private_segment_fixed_size {scratch}
\t\t.amdhsa_kernarg_size {total}
\t\t.amdhsa_user_sgpr_kernarg_segment_ptr 1
\t\t.amdhsa_system_sgpr_workgroup_id_x 1
\t\t.amdhsa_system_sgpr_workgroup_id_y 1
\t\t.amdhsa_system_sgpr_workgroup_id_z 1
\t\t.amdhsa_next_free_vgpr {vgprs + agprs}
\t\t.amdhsa_next_free_sgpr 96
\t\t.amdhsa_accum_offset {vgprs}{extra}
\t.end_amdhsa_kernel
\t.amdgpu_metadata
---
amdhsa.kernels:
  - .agpr_count: {agprs}
{listed}    .name: {name}
    .reqd_workgroup_size:
      - {block}
      - 1
      - 1
    .sgpr_spill_count: 1
    .vgpr_spill_count: 2
amdhsa.version:
  - 1
  - 2
...
\t.end_amdgpu_metadata
"""


def test_a_kernel_is_read_whole() -> None:
    k = parse(assembly("v_mov_b32_e32 v0, 0\ns_endpgm", lds=1024, agprs=8, args=(8, 4, 8), block=256))
    assert (k.name, k.vgprs, k.agprs, k.lds_bytes, k.kernarg_bytes) == ("k", 64, 8, 1024, 24)
    assert k.workgroup_size == (256, 1, 1)
    assert [(a.offset, a.size) for a in k.arguments] == [(0, 8), (8, 4), (16, 8)]
    assert (k.sgpr_spills, k.vgpr_spills) == (1, 2)
    assert [i.base for i in k.instructions] == ["v_mov_b32", "s_endpgm"]
    assert k.instructions[0].line == 4


def test_two_kernels_of_one_text_keep_their_own_arguments() -> None:
    first = assembly("v_mov_b32_e32 v0, 1\ns_endpgm", "one", args=(8,))
    second = assembly("s_nop 0\ns_endpgm", "two", args=(4, 4, 4))
    head, tail = first.split("\t.amdgpu_metadata\n")[0], second.split("\t.amdgpu_metadata\n")[0]
    meta = (
        first.split("amdhsa.kernels:\n")[1].split("amdhsa.version")[0]
        + second.split("amdhsa.kernels:\n")[1].split("amdhsa.version")[0]
    )
    text = head + tail + "\t.amdgpu_metadata\n---\namdhsa.kernels:\n" + meta + "...\n\t.end_amdgpu_metadata\n"
    assert [a.size for a in parse(text, "one").arguments] == [8]
    assert [a.size for a in parse(text, "two").arguments] == [4, 4, 4]
    assert parse(text, "two").instructions[0].base == "s_nop"
    with pytest.raises(TextError, match="name one of: one, two"):
        parse(text)
    with pytest.raises(TextError, match="no kernel 'three'"):
        parse(text, "three")


def test_numeric_labels() -> None:
    body = "1:\ns_nop 0\ns_cbranch_scc0 1f\ns_cbranch_scc1 1b\n1: s_nop 1\ns_branch 1b\ns_endpgm"
    k = parse(assembly(body))
    targets = [k.labels[i.operands[0].text] for i in k.instructions if "branch" in i.base]
    assert targets == [3, 0, 3]


def test_operands_and_modifiers() -> None:
    i = instruction("v_add_f32_e64 v1, -|v2|, abs(s3) mul:2 clamp")
    assert (i.base, i.encoding) == ("v_add_f32", "e64")
    assert (i.operands[1].neg, i.operands[1].abs, i.operands[1].index) == (True, True, 2)
    assert (i.operands[2].kind, i.operands[2].abs) == ("s", True)
    assert dict(i.modifiers) == {"mul": 2, "clamp": True}
    i = instruction("buffer_load_dwordx4 v[4:7], v0, s[8:11], 0 offen offset:16 sc0 lds")
    assert [o.count for o in i.operands] == [4, 1, 4, 1]
    assert dict(i.modifiers) == {"offen": True, "offset": 16, "sc0": True, "lds": True}
    i = instruction("v_mov_b32_dpp v0, v1 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0x3")
    assert i.modifiers["quad_perm"] == (1, 0, 3, 2)
    assert i.modifiers["bank_mask"] == 3
    assert instruction("v_mul_f32_e32 v0, -1.0, v1").operands[1].value == -1.0
    assert instruction("s_mov_b32 s0, 0xffffffff").operands[1].value == 0xFFFFFFFF


@pytest.mark.parametrize(
    ("pattern", "lane"),
    [
        ("SWAP,8", lambda i: i ^ 8),
        ("REVERSE,4", lambda i: i ^ 3),
        ("BROADCAST,8,3", lambda i: (i & ~7) + 3),
        ("QUAD_PERM,3,0,1,2", lambda i: (i & ~3) + (3, 0, 1, 2)[i & 3]),
        ('BITMASK_PERM,"01pip"', lambda i: (i & 32) | 8 | (i & 4) | ((i & 2) ^ 2) | (i & 1)),
    ],
)
def test_swizzle_names(pattern: str, lane: object) -> None:
    import numpy as np

    from mxgate.kernels.gfx950.memory import _swizzle

    offset = instruction(f"ds_swizzle_b32 v0, v1 offset:swizzle({pattern})").modifiers["offset"]
    x, index = np.arange(64)[None, :], np.full((1, 64), offset)
    got = _swizzle(index, x, np.ones((1, 64), bool))
    assert got[0].tolist() == [lane(i) for i in range(64)]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("s_waitcnt vmcnt(3) lgkmcnt(0)", {"vmcnt": 3, "lgkmcnt": 0}),
        ("s_waitcnt vmcnt(0) & expcnt(1)", {"vmcnt": 0}),
        ("s_waitcnt 0x0f70", {"vmcnt": 0}),
        ("s_waitcnt 0", {"vmcnt": 0, "lgkmcnt": 0}),
        ("s_waitcnt 0xc07f", {"lgkmcnt": 0}),
    ],
)
def test_waits(text: str, counts: dict[str, int]) -> None:
    assert dict(instruction(text).modifiers) == counts


# Found by damaging texts (mxgate.conformance.fuzz): each was accepted, or ended in another exception.
MISSHAPEN = {
    "v_readlane_b32 s0, v1": "expected 3 operands, found 2",
    "v_readfirstlane_b32 s0": "expected 2 operands, found 1",
    "v_writelane_b32 v0, s1, s2, s3": "expected 3 operands, found 4",
    "v_swap_b32 v0": "expected 2 operands",
    "v_permlane32_swap_b32 v0": "expected 2 operands",
    "v_cvt_pk_fp8_f32 v0, v1": "expected 3 operands",
    "v_cvt_f32_fp8 v0": "expected 2 operands",
    "v_cvt_scalef32_pk_f32_fp8 v[0:1], v2, v3, v4": "expected 3 operands",
    "v_cvt_scalef32_pk_fp8_f32 v0, v1, v2": "expected 4 operands",
    "v_pk_add_f32 v[0:1], v[2:3]": "expected 3 operands",
    "v_pk_mad_u16 v0, v1, v2": "expected 4 operands",
    "v_cmpx_lt_u32 vcc, v0, v1, v2": "expected 3 operands, found 4",
    "buffer_atomic_add v0, v1, s[4:7]": "expected 4 operands, found 3",
    "global_atomic_add v[0:1], v2": "expected 3 operands, found 2",
    "ds_add_u32 v0": "expected 2 operands",
    "ds_bpermute_b32 v0, v1": "expected 3 operands",
    "ds_read_b64_tr_b8 v[0:1]": "expected 2 operands",
    "s_memtime s[0:1], s2": "expected 1 operands",
    "s_nop 16": "a number from 0 to 15",
    "s_nop v3": "a number from 0 to 15",
    "v_readlane_b32 s0, v1, v[2:3], v4": "expected 3 operands",
    "v_swap_b32 v0, 5": "operand 5 must be a vector register",
    "v_cvt_f32_fp8 s0, v1": "operand s0 must be a vector register",
    "s_mov_b32 s128, 0": "unknown operand 's128'",
    "s_mov_b64 s[127:128], 0": "unknown operand",
    "s_mov_b64 s5, 0": "operand s5 must be a pair of registers",
    "s_load_dword s0, v[2:3], 0": "must be 2 scalar registers",
    "s_load_dword s0, s2, 0": "must be 2 scalar registers",
    "s_buffer_load_dword s0, s[2:3], 0": "must be 4 scalar registers",
    "buffer_load_dword v0, 7, s[4:7], 0": "do not go together",
    "buffer_store_dword v0, s[4:7], 0 lds": "takes nothing from LDS",
    "scratch_load_dword v0, 7, off": "expected a vector register or off",
    "buffer_load_dword v0, off, s[4:7], 0 offset:4096": "offset must be from 0 to 4095",
    "buffer_load_dword v0, off, s[4:7], 0 offset:-1": "offset must be from 0 to 4095",
    "global_load_dword v0, v[1:2], off offset:4096": "offset must be from -4096 to 4095",
    "ds_read2_b32 v[0:1], v2 offset0:256": "offset0 must be from 0 to 255",
    "ds_read_b32 v0, v1 offset:99999999999": "unknown modifier",
    "ds_swizzle_b32 v0, v1 offset:swizzle(QUAD_PERM,9,9,9,9)": "unknown modifier",
    "ds_swizzle_b32 v0, v1 offset:swizzle(SWAP,²)": "unknown modifier",
    "v_mov_b32_dpp v0, v1 quad_perm:[1,0]": "quad_perm must be a list of four lanes",
    "v_mov_b32_dpp v0, v1 quad_perm:[1,0,3,64]": "quad_perm must be a list of four lanes",
    "v_mov_b32_dpp v0, v1 row_shl:16": "DPP control row_shl:16 is not understood",
    "v_mov_b32_dpp v0, v1 row_newbcast:64": "DPP control row_newbcast:64 is not understood",
    "v_mov_b32_dpp v0, v1 row_shr:1 row_mask:-1": "row_mask and bank_mask are 0 to 15",
    "v_bitop3_b32 v0, v1, v2, v3 bitop3:-1": "bitop3 table of 0 to 255",
    "v_add_u32_sdwa v0, v1, v2 src0_sel:BYTE_4": "source selection 'BYTE_4' is not understood",
    "v_add_u32_sdwa v0, v1, v2 dst_sel:WORD_2": "destination selection 'WORD_2'",
    "v_add_f64_sdwa v[0:1], v[2:3], v[4:5]": "SDWA is not understood on 64 bits",
    "v_mul_f32_e32 v0, 3.5e38, v1": "constant 3.5e38 does not fit 32 bits",
    "v_mul_f32_e32 v0, 1.0e999, v1": "unknown operand",
    "v_mov_b32_e32 v0, 010": "unknown operand '010'",
    f"v_mov_b32_e32 v0, {'9' * 5000}": "unknown operand '999",
    f"v_mov_b32_e32 v{'9' * 5000}, 0": "operand v999",
    "v_mov_b32_e32 v[0:99999999], 0": "unknown operand",
    f"s_waitcnt vmcnt({'9' * 5000})": "counters cannot be read",
    "v_mov_b32_e32 v0, \x1b[2J": r"unknown operand '\\x1b\[2J'",
}


@pytest.mark.parametrize("line", MISSHAPEN, ids=lambda line: line[:50])
def test_a_misshapen_instruction_is_an_error_in_one_line(line: str) -> None:
    from mxgate.kernels.gfx950 import run

    with pytest.raises(TextError, match=MISSHAPEN[line]) as e:
        run(parse(assembly(f"{line}\ns_endpgm", agprs=8)), [], 1)
    message = str(e.value)
    assert message.startswith("line 4: ") and message.isprintable() and len(message) <= LONGEST


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("v_frobnicate_b32 v0, v1\ns_endpgm", "v_frobnicate_b32: unknown mnemonic"),
        ("v_add_u32_e32 v0, v1, v2 shiny\ns_endpgm", "unknown modifier 'shiny'"),
        ("v_add_u32_e32 v0, v1, v2 offen\ns_endpgm", "modifier 'offen' is not understood"),
        ("v_add_u32_e32 v0, v1\ns_endpgm", "expected 3 operands"),
        ("v_add_u32_e32 v0, v1, q7\ns_endpgm", "v_add_u32_e32"),
        ("v_add_u32_e32 v0, v1, v64\ns_endpgm", "past the 64 v registers"),
        ("v_add_u32_e32 v0, v1, v[3:2]\ns_endpgm", r"unknown operand 'v\[3:2\]'"),
        ("v_mov_b32_dpp v0, v1 row_share:3\ns_endpgm", "unknown modifier 'row_share:3'"),
        ("s_waitcnt vmcnt(x)\ns_endpgm", "counters cannot be read"),
        ("s_cbranch_scc0 .Lnowhere\ns_endpgm", "no label '.Lnowhere'"),
        ("buffer_load_dwordx5 v0, v1, s[0:3], 0 offen\ns_endpgm", "unknown mnemonic"),
        ("ds_read_b128 v[0:1], v2\ns_endpgm", "must be 4 vector registers"),
        ("!!! what\ns_endpgm", "not an instruction"),
        ("s_nop 0", "runs off its end"),
    ],
)
def test_what_is_not_understood_is_an_error_with_its_line(body: str, what: str) -> None:
    from mxgate.kernels.gfx950 import run

    with pytest.raises(TextError, match=what) as e:
        run(parse(assembly(body)), [], 1)
    assert "line 4" in str(e.value)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda t: t.replace(".amdhsa_kernel", ".amdhsa_colonel"), "no .amdhsa_kernel"),
        (lambda t: t.replace("gfx950", "gfx942"), "expected gfx950"),
        (lambda t: t.replace("fixed_size 0", "fixed_size 163841", 1), "_fixed_size is 163841, expected 0 to 163840"),
        (lambda t: t.replace("next_free_vgpr 64", "next_free_vgpr 600"), "line 15: .amdhsa_next_free_vgpr is 600, exp"),
        (lambda t: t.replace("k:\n", "other:\n", 1), "no instructions under the label"),
        (lambda t: t.replace("next_free_vgpr 64", "next_free_vgpr many"), "must be a number"),
        (lambda t: t.replace("next_free_vgpr 64", "next_free_vgpr -64"), "next_free_vgpr is -64, expected 0 to 512"),
        (lambda t: t.replace("accum_offset 64", f"accum_offset {'9' * 5000}"), "accum_offset must be a number"),
        (lambda t: t.replace("private_segment_fixed_size 0", "private_segment_fixed_size 999999"), "0 to 131072"),
        (lambda t: t.replace("kernarg_size 8", "kernarg_size 99999"), "kernarg_size is 99999, expected 0 to 65536"),
        (lambda t: t.replace(".offset: 0", ".offset: -4"), "argument 0 is 8 bytes from -4 on, expected some of the 8"),
        (lambda t: t.replace(".size: 8", ".size: 0"), "argument 0 is 0 bytes from 0 on"),
        (lambda t: t.replace(".size: 8", ".size: 9"), "argument 0 is 9 bytes from 0 on"),
        (lambda t: t.replace("      - 64", "      - - 1"), ".reqd_workgroup_size is"),
        (lambda t: t.replace("      - 64", "      - -64"), ".reqd_workgroup_size is .-64, 1, 1., expected three"),
        (
            lambda t: t.replace("amdhsa.version", "\n".join(f"{' ' * i}a:" for i in range(2000)) + "\namdhsa.version"),
            "nested deeper than 32 levels",
        ),
        (lambda t: t.replace("\t.end_amdgpu_metadata\n", ""), "never closed"),
    ],
)
def test_malformed_files(change: object, what: str) -> None:
    with pytest.raises(TextError, match=what):
        parse(change(assembly("s_endpgm", args=(8,))))  # type: ignore[operator]
