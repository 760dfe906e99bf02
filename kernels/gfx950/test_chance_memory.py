"""Memory and cross-lane instructions drawn by chance, beside models of one lane and one byte at a time.

Buffers of every width with limits that cut lanes, unaligned, indexed, with offsets near 2**31 and 2**32; global memory;
LDS; LDS fills; byte permutes, SDWA and DPP; all with some, one or no lane, and waves with bases of their own. And LDS
programs of several waves, right or with a wait or barrier taken out, which must be found exactly where two accesses
meet. Not covered: atomics, scratch, stores of two lanes to one byte, and what silicon does.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from mxgate.kernels.gfx950 import parse, run
from mxgate.kernels.gfx950.state import Array
from mxgate.kernels.gfx950.test_mfma import execute, fresh
from mxgate.kernels.gfx950.test_text import assembly

ALL, FULL = (1 << 64) - 1, 0xFFFFFFFF
BASE = 0x7F0000002000  # of the first buffer
WIDE = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}
Load = tuple[int, bool, int | None]  # bytes, whether signed, which half of the register is written (None: all)
LOADS: dict[str, Load] = {f: (n, False, None) for f, n in WIDE.items()} | {
    "ubyte": (1, False, None), "sbyte": (1, True, None), "ushort": (2, False, None), "sshort": (2, True, None),
    "short_d16": (2, False, 0), "short_d16_hi": (2, False, 1), "ubyte_d16": (1, False, 0),
    "ubyte_d16_hi": (1, False, 1), "sbyte_d16": (1, True, 0), "sbyte_d16_hi": (1, True, 1),
}  # fmt: skip
STORES = {f: (n, 0) for f, n in WIDE.items()}  # bytes, lowest bit
STORES |= {"byte": (1, 0), "short": (2, 0), "byte_d16_hi": (1, 16), "short_d16_hi": (2, 16)}
DS_WIDE = {"b32": 4, "b64": 8, "b96": 12, "b128": 16}
DS_READS: dict[str, Load] = {f: (n, False, None) for f, n in DS_WIDE.items()} | {
    "u8": (1, False, None), "i8": (1, True, None), "u16": (2, False, None), "i16": (2, True, None),
    "u8_d16": (1, False, 0), "u8_d16_hi": (1, False, 1), "i8_d16": (1, True, 0), "i8_d16_hi": (1, True, 1),
    "u16_d16": (2, False, 0), "u16_d16_hi": (2, False, 1),
}  # fmt: skip
DS_WRITES = {f: (n, 0) for f, n in DS_WIDE.items()}
DS_WRITES |= {"b8": (1, 0), "b16": (2, 0), "b8_d16_hi": (1, 16), "b16_d16_hi": (2, 16)}
LDS = 2048

# v1 offset, v2 byte offset beside an index, v3 LDS address, v[4:7] data, v[8:11] results. s[40:43] descriptor, s44
# soffset, s45 s46 EXEC, s47 M0. LDS begins as words 0, 1, 2 ... times 0x01010101.
KERNEL = """
s_load_dwordx8 s[8:15], s[0:1], 0x0
v_lshlrev_b32_e32 v33, 2, v0
s_lshl_b32 s26, s2, 5
s_waitcnt lgkmcnt(0)
s_add_u32 s28, s12, s26
s_addc_u32 s29, s13, 0
s_load_dwordx8 s[40:47], s[28:29], 0x0
s_mul_i32 s26, s2, 0xc00
v_add_u32_e32 v34, s26, v33
{load}
v_mul_u32_u24_e32 v40, 0x10101, v0
v_lshl_or_b32 v40, v0, 24, v40
{fill}
s_waitcnt vmcnt(0) lgkmcnt(0)
s_mov_b32 m0, s47
s_mov_b32 exec_lo, s45
s_mov_b32 exec_hi, s46
{core}
s_waitcnt vmcnt(0) lgkmcnt(0)
s_mov_b64 exec, -1
{store}
s_endpgm
"""


def kernel_of(core: str) -> str:
    load = [f"global_load_dword v{k}, v34, s[10:11] offset:{256 * k}" for k in range(1, 12)]
    fill = [f"ds_write_b32 v33, v40 offset:{at}\nv_add_u32_e32 v40, 0x40404040, v40" for at in range(0, LDS, 256)]
    store = [f"global_store_dword v34, v{8 + k}, s[14:15] offset:{256 * k}" for k in range(4)]
    for k in range(LDS // 256):
        store += [f"ds_read_b32 v41, v33 offset:{256 * k}", "s_waitcnt lgkmcnt(0)"]
        store.append(f"global_store_dword v34, v41, s[14:15] offset:{1024 + 256 * k}")
    parts = {"load": load, "fill": fill, "store": store}
    return assembly(KERNEL.format(core=core, **{k: "\n".join(v) for k, v in parts.items()}), args=(8, 8, 8, 8), lds=LDS)


def merged(old: int, value: int, size: int, signed: bool, half: int | None) -> int:
    """A register after a narrow load."""
    if signed and value >> (8 * size - 1):
        value |= FULL & (FULL << 8 * size)
    if half is None:
        return value
    return old & 0xFFFF0000 | value & 0xFFFF if half == 0 else old & 0xFFFF | (value & 0xFFFF) << 16


class Group:
    """One workgroup of one wave: its lanes' registers, scalars and LDS, and what became of them."""

    def __init__(self, rng: random.Random) -> None:
        self.v = [[rng.getrandbits(32) for _ in range(64)] for _ in range(12)]
        self.s = [0, 0, 0, 0x27000, 0, *rng.choice([(FULL, FULL), (FULL, FULL), (0, 0), (0, 1 << 5)]), 0]
        if rng.random() < 0.4:
            self.s[5:7] = rng.getrandbits(32), rng.getrandbits(32)
        lanes = np.arange(64, dtype=np.uint32) * np.uint32(0x01010101)
        self.lds = bytearray(b"".join((lanes + np.uint32(k * 0x40404040 & FULL)).tobytes() for k in range(LDS // 256)))

    def lanes(self) -> list[int]:
        return [lane for lane in range(64) if (self.s[5] | self.s[6] << 32) >> lane & 1]


class Case(NamedTuple):
    core: str
    groups: list[Group]
    memory: bytearray  # of the first buffer
    found: set[str]


def check(case: Case, act: Callable[[Case, Group, int], None], seed: int) -> None:
    """Run a case, with `act` as the model of one lane."""
    n = len(case.groups)
    v = np.array([g.v for g in case.groups], np.uint32)
    s = np.array([g.s for g in case.groups], np.uint32)
    before = np.frombuffer(bytes(case.memory), np.uint8)
    for group in case.groups:
        for lane in group.lanes():
            act(case, group, lane)
    kernel = parse(kernel_of(case.core))
    for hazards, batch in ((True, 1024), (False, 1024), (False, 2)):
        x, out = before.copy(), np.zeros((n, 12, 64), np.uint32)
        r = run(kernel, [x, v, s, out], n, seed=seed, hazards=hazards, batch=batch)
        assert {f.kind for f in r.findings} == (case.found if hazards else set()), case.core
        for g, group in enumerate(case.groups):
            wrong = np.argwhere(out[g, :4] != np.array(group.v[8:], np.uint32))
            assert not len(wrong), (case.core, g, wrong[0])
            assert out[g, 4:].tobytes() == bytes(group.lds), (case.core, g)
        assert x.tobytes() == bytes(case.memory), case.core


def load(case: Case, at: int, size: int) -> int:
    """Bytes of the first buffer; all ones, and a finding, outside."""
    if at >= 0 and at + size <= len(case.memory):
        return int.from_bytes(case.memory[at : at + size], "little")
    case.found.add("load-out-of-bounds")
    return (1 << 8 * max(size, 4)) - 1


def put(case: Case, at: int, value: int, size: int) -> None:
    if at >= 0 and at + size <= len(case.memory):
        case.memory[at : at + size] = (value & ((1 << 8 * size) - 1)).to_bytes(size, "little")
    else:
        case.found.add("store-out-of-bounds")


def data(group: Group, lane: int, size: int, shift: int, first: int = 4) -> int:
    return sum(group.v[first + k][lane] << 32 * k for k in range(max(size // 4, 1))) >> shift


def result(group: Group, lane: int, value: int, size: int, signed: bool, half: int | None, first: int = 8) -> None:
    if size < 4:
        group.v[first][lane] = merged(group.v[first][lane], value & FULL, size, signed, half)
    for k in range(size // 4):
        group.v[first + k][lane] = value >> 32 * k & FULL


def name(first: int, size: int) -> str:
    return f"v[{first}:{first + size // 4 - 1}]" if size > 4 else f"v{first}"


@pytest.mark.parametrize("block", range(6))
@pytest.mark.parametrize("way", ["load", "store", "lds"])
def test_buffers(way: str, block: int) -> None:
    for seed in range(6 * block, 6 * block + 6):
        buffers(way, seed)


def buffers(way: str, seed: int) -> None:
    rng = random.Random(seed)
    form = rng.choice(
        ["dword", "dwordx3", "dwordx4", "dwordx4"] if way == "lds" else list(STORES if way == "store" else LOADS)
    )
    size = LOADS[form][0] if form in LOADS else STORES[form][0]
    imm, nbytes = rng.choice([0, 0, 4, 3, rng.randrange(1500)]), rng.choice([512, 1000, 1024, 4096])
    indexed = rng.random() < 0.3
    both = indexed and rng.random() < 0.5
    groups = [Group(rng) for _ in range(1 if way == "store" else rng.choice([1, 2, 5]))]
    pitch = size + rng.choice([0, 0, 4, 1])
    far = 0 if indexed else rng.choice([0, 0, 0, 1 << 31, (1 << 32) - 4096])
    for group in groups:
        shift, stride = rng.choice([0, 0, 4, 1, 16]), size + rng.choice([0, 4, 16]) if indexed else 0
        base = BASE + shift - far
        whole = rng.choice([0x7FFFFFFF, FULL, nbytes - shift, nbytes - shift, rng.randrange(nbytes), 0, 3])
        records = rng.choice([rng.randrange(80), 70, 0, FULL]) if indexed else min(far + whole, FULL)
        group.s[:3] = base & FULL, base >> 32 | stride << 16, records
        group.s[4] = rng.choice([0, 0, 4, 64, 1])
        group.s[7] = rng.choice([0, 16, 512, 4, 1020, LDS - 256, FULL - 15]) if way == "lds" else 0
        places = rng.sample(range(64), 64) if rng.random() < 0.5 else list(range(64))
        group.v[1] = places if indexed else [(far + pitch * p) & FULL for p in places]
        group.v[2] = [0 if way == "store" else rng.choice([0, 0, 4, 1]) for _ in range(64)]
        if way != "store" and rng.random() < 0.3:
            edge = FULL - imm  # where voffset + imm wraps
            group.v[1] = [rng.choice([x, edge + rng.randrange(-40, 1), (1 << 31) - 4]) for x in group.v[1]]
    address = "v[1:2], s[40:43], s44 idxen offen" if both else "v1, s[40:43], s44 " + ("idxen" if indexed else "offen")
    begin = {"load": f"buffer_load_{form} {name(8, size)}, ", "store": f"buffer_store_{form} {name(4, size)}, "}
    core = begin.get(way, f"buffer_load_{form} ") + address + f" offset:{imm}" + " lds" * (way == "lds")

    def act(case: Case, group: Group, lane: int) -> None:
        stride = group.s[1] >> 16
        offset = imm if indexed and not both else (group.v[2 if both else 1][lane] + imm) & FULL
        offset += (group.v[1][lane] * stride if indexed else 0) + group.s[4]
        limit = group.s[2] * (stride or 1)
        at = (group.s[0] | (group.s[1] & 0xFFFF) << 32) + offset - BASE
        parts = [(k, min(size, 4)) for k in range(0, size, 4) if offset + k + min(size, 4) <= limit]
        if len(parts) == max(size // 4, 1):
            parts = [(0, size)]
        if way == "store":
            for k, n in parts:
                put(case, at + k, data(group, lane, size, STORES[form][1]) >> 8 * k, n)
            return
        value = sum(load(case, at + k, n) << 8 * k for k, n in parts)
        if way == "load":
            result(group, lane, value, *LOADS[form])
            return
        to = group.s[7] + imm + size * lane
        if to + size <= LDS:
            group.lds[to : to + size] = value.to_bytes(size, "little")
        else:
            case.found.add("lds-out-of-bounds")

    check(Case(core, groups, bytearray(rng.randbytes(nbytes)), set()), act, seed)


@pytest.mark.parametrize("block", range(4))
@pytest.mark.parametrize("way", ["load", "store"])
def test_global_memory(way: str, block: int) -> None:
    for seed in range(6 * block, 6 * block + 6):
        rng = random.Random(seed)
        form = rng.choice(list(LOADS if way == "load" else STORES))
        size = (LOADS | STORES)[form][0]
        imm, nbytes = rng.choice([0, 8, -4, -4096, 4095]), rng.choice([512, 1000, 4096])
        groups = [Group(rng) for _ in range(1 if way == "store" else rng.choice([1, 2, 5]))]
        pitch = size + rng.choice([0, 0, 4, 1])
        for group in groups:
            far = rng.choice([0, 1 << 31])
            base = BASE - imm + rng.choice([0, 0, 1, 16, 200, -4]) - far
            group.s[:2] = base & FULL, base >> 32
            group.v[1] = [far + pitch * p for p in rng.sample(range(64), 64)]
        verb = f"{name(8, size)}, v1" if way == "load" else f"v1, {name(4, size)}"

        def act(case: Case, group: Group, lane: int, form: str = form, imm: int = imm, size: int = size) -> None:
            at = (group.s[0] | group.s[1] << 32) + group.v[1][lane] + imm - BASE
            if way == "load":
                result(group, lane, load(case, at, size), *LOADS[form])
            else:
                put(case, at, data(group, lane, *STORES[form]), size)

        core = f"global_{way}_{form} {verb}, s[40:41] offset:{imm}"
        check(Case(core, groups, bytearray(rng.randbytes(nbytes)), set()), act, seed)


@pytest.mark.parametrize("block", range(4))
@pytest.mark.parametrize("way", ["read", "write"])
def test_lds(way: str, block: int) -> None:
    for seed in range(8 * block, 8 * block + 8):
        rng = random.Random(seed)
        two = rng.random() < 0.3
        form = rng.choice(["b32", "b64"] if two else list(DS_READS if way == "read" else DS_WRITES))
        size = (DS_READS | DS_WRITES)[form][0]
        step = rng.choice(["", "st64"]) if two else ""
        offsets = [rng.choice([0, 0, 16, 1, rng.randrange(200), 65535])]
        if two:
            offsets = [rng.choice([0, 1, 2, rng.randrange(256)]), rng.choice([64, 7, 0])]
        places = [x * size * (64 if step else 1) if two else x for x in offsets]
        if two and way == "write" and abs(places[0] - places[1]) < 80 * 16:
            places, offsets = places[:1] * 2, offsets[:1] * 2  # the second over the first, or far from it
        groups = [Group(rng) for _ in range(rng.choice([1, 2, 5]))]
        for group in groups:
            pitch = rng.choice([size, size, 16, size + 1])
            first, order = rng.choice([0, 0, 4, 1, 600]), rng.sample(range(64), 64) if rng.random() < 0.5 else range(64)
            group.v[3] = [first + pitch * p for p in order]
            if rng.random() < 0.2:
                group.v[3][rng.randrange(64)] = rng.choice([LDS - 2, FULL - 3, 1 << 31])

        def act(
            case: Case, group: Group, lane: int, form: str = form, size: int = size, places: list[int] = places
        ) -> None:
            for k, offset in enumerate(places):
                at, words = group.v[3][lane] + offset, max(size // 4, 1) * k
                if at + size > LDS:
                    case.found.add("lds-out-of-bounds")
                elif way == "read":
                    value = int.from_bytes(group.lds[at : at + size], "little")
                    result(group, lane, value, *DS_READS[form], 8 + words)
                else:
                    value = data(group, lane, *DS_WRITES[form], 4 + words) & ((1 << 8 * size) - 1)
                    group.lds[at : at + size] = value.to_bytes(size, "little")

        sizes = size * len(places)
        said = f"offset0:{offsets[0]} offset1:{offsets[-1]}" if two else f"offset:{offsets[0]}"
        registers = [name(4 + k * size // 4, size) for k in range(len(places))]
        verb = f"{name(8, sizes)}, v3" if way == "read" else ", ".join(["v3", *registers])
        core = f"ds_{way}{'2' * two}{step}_{form} {verb} {said}"
        check(Case(core, groups, bytearray(4), set()), act, seed)


# ------------------------------------------------------------------------------------- vector instructions
def signed(x: int, bits: int = 32) -> int:
    x &= (1 << bits) - 1
    return x - (x >> (bits - 1) << bits)


ALU: dict[str, Callable[[int, int], int]] = {
    "v_add_u32": lambda a, b: a + b,
    "v_subrev_u32": lambda a, b: b - a,
    "v_xor_b32": lambda a, b: a ^ b,
    "v_lshlrev_b32": lambda a, b: b << (a & 31),
    "v_ashrrev_i32": lambda a, b: signed(b) >> (a & 31),
    "v_min_i32": lambda a, b: min(signed(a), signed(b)),
    "v_max_u32": max,
    "v_mul_u32_u24": lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF),
    "v_mul_i32_i24": lambda a, b: signed(a, 24) * signed(b, 24),
}
PARTS = ("DWORD", "WORD_0", "WORD_1", "BYTE_0", "BYTE_1", "BYTE_2", "BYTE_3")
DPP: dict[str, Callable[[int, int], int | None]] = {  # the lane that lane reads, None where there is none
    "row_shl": lambda lane, n: lane + n if lane % 16 + n < 16 else None,
    "row_shr": lambda lane, n: lane - n if lane % 16 >= n else None,
    "row_ror": lambda lane, n: lane // 16 * 16 + (lane - n) % 16,
    "row_newbcast": lambda lane, n: lane // 16 * 16 + n,
    "row_mirror": lambda lane, n: lane // 16 * 16 + 15 - lane % 16,
    "row_half_mirror": lambda lane, n: lane // 8 * 8 + 7 - lane % 8,
    "wave_shl": lambda lane, n: lane + 1 if lane < 63 else None,
    "wave_ror": lambda lane, n: (lane - 1) % 64,
    "row_bcast": lambda lane, n: (lane // 16 * 16 - 1 if n == 15 else 31) if lane > n else None,
}


def part(name: str) -> tuple[int, int]:
    """(bits, lowest)."""
    bits = {"D": 32, "W": 16, "B": 8}[name[0]]
    return bits, bits * int(name[-1]) if bits < 32 else 0


def permuted(x: int, y: int, selector: int) -> int:
    both, out = x << 32 | y, 0
    for k in range(4):
        c = selector >> 8 * k & 255
        octet = both >> 8 * min(c, 8) & 255 if c < 8 else 255 * (both >> 16 * c - 113 & 1) if c < 12 else 255 * (c > 12)
        out |= octet << 8 * k
    return out


@pytest.mark.parametrize("kind", ["perm", "sdwa", "dpp"])
def test_vector_instructions(kind: str) -> None:
    for seed in range(150):
        vector(kind, seed)


def vector(kind: str, seed: int) -> None:
    rng, noise, n = random.Random(seed), np.random.default_rng(seed), 1 + seed % 3
    st = fresh(n)
    st.registers[:4], st.scalars[40:42] = (noise.integers(0, 1 << 32, s, np.uint32) for s in ((4, n, 64), (2, n)))
    lanes = [rng.choice([ALL, ALL if seed % 2 else rng.getrandbits(64), rng.getrandbits(64), 0]) for _ in range(n)]
    st.s[126][:], st.s[127][:] = [x & FULL for x in lanes], [x >> 32 for x in lanes]
    st.exec_changed()
    d, op = rng.randrange(3), rng.choice([*ALU, "v_mov_b32"])
    if kind == "perm":
        selectors = noise.integers(0, rng.choice([14, 256]), (n, 64, 4), np.uint8).view(np.uint32)[..., 0]
        same = rng.choice(["all", "wave", "none", "but one"])
        if same != "none":
            selectors[...] = selectors[:, :1] if same == "wave" else selectors[0, 0]
        if same == "but one":
            selectors[rng.randrange(n), rng.randrange(64)] ^= 1
        st.r[3][...], st.s[40][:] = selectors, selectors[:, 0]
    before, scalars = st.registers.copy(), st.scalars.copy()

    def v(register: int, wave: int, lane: int) -> int:
        return int(before[register, wave, lane])

    def alu(a: int, b: int) -> int:
        return (a if op == "v_mov_b32" else ALU[op](a, b)) & FULL

    second = "" if op == "v_mov_b32" else ", v2"
    model: Callable[[int, int], int | None]
    if kind == "perm":
        scalar, constant = rng.random() < 0.4, rng.random() < 0.3
        line = f"v_perm_b32 v{d}, {'7' if constant else 'v1'}, v2, {'s40' if scalar else 'v3'}"

        def model(wave: int, lane: int) -> int | None:
            selector = int(scalars[40, wave]) if scalar else v(3, wave, lane)
            return permuted(7 if constant else v(1, wave, lane), v(2, wave, lane), selector)

    elif kind == "sdwa":
        a, b, to = (rng.choice(PARTS) for _ in range(3))
        extend = rng.random() < 0.4 and a != "DWORD"
        rest = rng.choice(["UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE"])
        line = f"{op}_sdwa v{d}, {'sext(v1)' if extend else 'v1'}{second} dst_sel:{to} dst_unused:{rest} src0_sel:{a}"
        line += f" src1_sel:{b}" if second else ""

        def model(wave: int, lane: int) -> int | None:
            x, y = (v(k, wave, lane) >> part(s)[1] & ((1 << part(s)[0]) - 1) for k, s in ((1, a), (2, b)))
            value, (bits, low) = alu(signed(x, part(a)[0]) & FULL if extend else x, y), part(to)
            field = value & ((1 << bits) - 1)
            if rest == "UNUSED_PRESERVE":
                return field << low | v(d, wave, lane) & ~(((1 << bits) - 1) << low)
            return (signed(field, bits) if rest == "UNUSED_SEXT" else field) << low & FULL

    else:
        control = rng.choice(list(DPP))
        count = rng.choice([15, 31]) if control == "row_bcast" else 1 if "wave" in control else rng.randrange(1, 16)
        rows, banks, zero = rng.choice([15, rng.randrange(16)]), rng.choice([15, rng.randrange(16)]), rng.random() < 0.5
        said = control if "mirror" in control else f"{control}:{count}"
        line = f"{op}_dpp v{d}, v1{second} {said} row_mask:{rows} bank_mask:{banks}" + " bound_ctrl:1" * zero

        def model(wave: int, lane: int) -> int | None:
            source = DPP[control](lane, count)
            there = source is not None and lanes[wave] >> source & 1
            if not (rows >> lane // 16 & 1 and banks >> lane // 4 % 4 & 1 and (there or zero)):
                return None
            return alu(v(1, wave, source) if there and source is not None else 0, v(2, wave, lane))

    execute([line], st)
    for wave in range(n):
        for lane in range(64):
            value = model(wave, lane) if lanes[wave] >> lane & 1 else None
            want = v(d, wave, lane) if value is None else value
            assert int(st.r[d][wave, lane]) == want, (line, wave, lane, hex(int(st.r[d][wave, lane])), hex(want))


# ------------------------------------------------------------------------------------- LDS programs of several waves
RACES = {"lds-race", "lds-dma-in-flight", "lds-read-overtaken"}
Op = tuple[Any, ...]  # ("write" or "read" or "fill", region, bytes a lane), ("wait", vmcnt, lgkmcnt), ("barrier",)


def draw_programs(rng: random.Random, waves: int, regions: int) -> list[list[Op]]:
    """Right by construction: between two barriers a region has one wave that may change it, or readers only."""
    out: list[list[Op]] = [[("write", k, 16) for k in range(regions) if k % waves == w] for w in range(waves)]
    for _ in range(rng.randrange(2, 4)):
        owners = [rng.randrange(waves) if rng.random() < 0.5 else None for _ in range(regions)]
        for w, program in enumerate(out):
            program += [("wait", 0, 0), ("barrier",)]
            flying: set[tuple[str, int]] = set()
            for _ in range(rng.randrange(5)):
                k = rng.randrange(regions)
                if owners[k] not in (w, None):
                    continue
                kind = "read" if owners[k] is None else rng.choice(["write", "read", "fill"])
                if kind == "fill" and ("ds", k) in flying:
                    program.append(("wait", None, 0))
                    flying = {x for x in flying if x[0] != "ds"}
                if kind != "fill" and ("fill", k) in flying:
                    program.append(("wait", 0, None))
                    flying = {x for x in flying if x[0] != "fill"}
                flying.add(("fill" if kind == "fill" else "ds", k))
                program.append((kind, k, 16 if kind == "fill" else rng.choice([4, 8, 16])))
    return out


def spoil(rng: random.Random, programs: list[list[Op]]) -> None:
    """Take out a barrier, or weaken a wait."""
    if rng.random() < 0.3:
        n = rng.randrange(sum(o[0] == "barrier" for o in programs[0]))
        for p in programs:
            del p[[i for i, o in enumerate(p) if o[0] == "barrier"][n]]
        return
    program = rng.choice(programs)
    waits = [i for i, o in enumerate(program) if o[0] == "wait"]
    own = [i for i in waits if None in program[i]]  # within a wave, not before a barrier
    i = rng.choice(own if own and rng.random() < 0.7 else waits)
    program[i] = ("wait", *rng.choice([(None, program[i][2]), (program[i][1], None), (1, 1), (None, None)]))


def meet(programs: list[list[Op]]) -> bool:
    """Whether two accesses to one byte, one of them a write, are not ordered: pair by pair."""
    accesses = []
    for wave, program in enumerate(programs):
        queues: dict[bool, list[int]] = {True: [], False: []}  # of fills, and of LDS operations
        issued, done, barriers = dict[int, int](), dict[int, tuple[int, int]](), 0
        for i, o in enumerate(program):
            if o[0] == "barrier":
                barriers += 1
            elif o[0] == "wait":
                for queue, n in ((queues[True], o[1]), (queues[False], o[2])):
                    while n is not None and len(queue) > n:
                        done[queue.pop(0)] = i, barriers
            else:
                issued[i] = barriers
                queues[o[0] == "fill"].append(i)
        accesses += [(wave, i, program[i], b, *done.get(i, (10**6, 10**6))) for i, b in issued.items()]
    for n, (wave, _, x, begin, end, last) in enumerate(accesses):
        for other, i, y, start, _, final in accesses[n + 1 :]:
            if x[1] != y[1] or x[0] == y[0] == "read":
                continue
            if wave != other and last >= start and final >= begin:
                return True
            if wave == other and (x[0] == "fill") != (y[0] == "fill") and end > i:
                return True
    return False


LDS_OPEN = """
s_load_dwordx4 s[12:15], s[0:1], 0x0
v_lshrrev_b32_e32 v37, 6, v0
v_readfirstlane_b32 s20, v37
v_and_b32_e32 v36, 63, v0
v_lshlrev_b32_e32 v1, 2, v36
v_lshlrev_b32_e32 v2, 3, v36
v_lshlrev_b32_e32 v3, 4, v36
s_waitcnt lgkmcnt(0)
s_mov_b32 s4, s12
s_and_b32 s5, s13, 0xffff
s_mov_b32 s6, 0x10000
s_mov_b32 s7, 0x27000
s_mul_i32 s22, s2, {waves}
s_add_u32 s22, s22, s20
s_mul_i32 s22, s22, {nbytes}
"""
Places = dict[tuple[int, int], int]  # (wave, place in its program) -> where a fill's source is, or a read's result


def lds_places(programs: list[list[Op]]) -> Places:
    fills, out = 0, Places()
    for w, program in enumerate(programs):
        reads = 0
        for i, o in enumerate(program):
            if o[0] == "fill":
                out[w, i] = fills
                fills += 1
            elif o[0] == "read":
                out[w, i] = 4 * reads
                reads += 1
    return out


def lds_kernel(programs: list[list[Op]], places: Places, results: int) -> str:
    """Each wave goes a way of its own, and stores v40.. at the end."""
    lines = [f"s_cmp_eq_u32 s20, {w}\ns_cbranch_scc1 .L{w}" for w in range(1, len(programs))]
    for w, program in enumerate(programs):
        lines.append(f".L{w}:")
        for i, o in enumerate(program):
            if o[0] == "barrier":
                lines.append("s_barrier")
            elif o[0] == "wait":
                counts = [f"{c}({n})" for c, n in (("vmcnt", o[1]), ("lgkmcnt", o[2])) if n is not None]
                lines += ["s_waitcnt " + " ".join(counts)] * bool(counts)
            elif o[0] == "fill":
                lines += [f"s_mov_b32 m0, {1024 * o[1]}", f"s_mov_b32 s21, {1024 * places[w, i]}"]
                lines.append("buffer_load_dwordx4 v3, s[4:7], s21 offen lds")
            else:
                where = f"v{o[2].bit_length() - 2}"  # 4, 8 and 16 bytes a lane
                if o[0] == "read":
                    lines.append(f"ds_read_b{8 * o[2]} {name(40 + places[w, i], o[2])}, {where} offset:{1024 * o[1]}")
                    continue
                words = range(o[2] // 4)
                lines += [f"v_add_u32_e32 v{4 + k}, {w << 24 | i << 16 | k << 8:#x}, v36" for k in words]
                lines.append(f"ds_write_b{8 * o[2]} {where}, {name(4, o[2])} offset:{1024 * o[1]}")
        lines.append("s_branch .Lout")
    begin = LDS_OPEN.format(waves=len(programs), nbytes=256 * results)
    zeros = [f"v_mov_b32_e32 v{40 + k}, 0" for k in range(results)]
    store = "v_add_u32_e32 v39, s22, v1\nglobal_store_dword v39, v{}, s[14:15]\ns_add_u32 s22, s22, 256"
    end = [store.format(40 + k) for k in range(results)]
    return "\n".join([begin, *zeros, *lines, ".Lout:", "s_waitcnt vmcnt(0) lgkmcnt(0)", *end, "s_endpgm"])


def lds_results(programs: list[list[Op]], places: Places, x: Array, results: int) -> Array:
    """uint32[waves, results, 64] of programs that are right: between barriers any order of waves will do."""
    out, lds = np.zeros((len(programs), results, 64), np.uint32), np.zeros((4, 1024), np.uint8)
    rest = [list(enumerate(p)) for p in programs]
    while any(rest):
        for w, program in enumerate(rest):
            while program:
                i, o = program.pop(0)
                if o[0] == "barrier":
                    break
                if o[0] == "wait":
                    continue
                words = lds[o[1], : 64 * o[2]].view(np.uint32).reshape(64, o[2] // 4)
                if o[0] == "fill":
                    words[...] = x[places[w, i]]
                elif o[0] == "write":
                    words[...] = (w << 24 | i << 16) + np.arange(o[2] // 4) * 256 + np.arange(64)[:, None]
                else:
                    out[w, places[w, i] :][: o[2] // 4] = words.T
    return out


@pytest.mark.parametrize("seed", range(24))
def test_lds_programs(seed: int) -> None:
    """Every launch order finds what is wrong, and finds nothing and reads the right words where all is right."""
    rng = random.Random(seed)
    waves, regions, grid = rng.choice([2, 3, 4]), rng.choice([1, 2, 3]), 1030 if seed == 15 else rng.choice([1, 3, 20])
    programs = draw_programs(rng, waves, regions)
    assert not meet(programs)
    while seed % 2 and not meet(programs):  # most waits and barriers can go without harm
        programs = draw_programs(rng, waves, regions)
        spoil(rng, programs)
    wrong, places = meet(programs), lds_places(programs)
    results = 4 * max(sum(o[0] == "read" for o in p) for p in programs)
    text = lds_kernel(programs, places, results)
    kernel = parse(assembly(text, args=(8, 8), vgprs=128, lds=1024 * regions, block=64 * waves))
    x = np.random.default_rng(seed).integers(0, 1 << 32, (64, 64, 4), np.uint32)
    for batch in (1024, 2 if grid < 100 else 700):
        y = np.zeros((grid, waves, results, 64), np.uint32)
        found = {f.kind for f in run(kernel, [x, y], grid, seed=rng.randrange(99), batch=batch).findings}
        if wrong:
            assert found & RACES, programs
        else:
            assert not found, programs
            assert (y == lds_results(programs, places, x, results)).all(), programs
