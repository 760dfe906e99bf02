"""Memory: the guarded device arena, LDS, and the semantics of buffer, global, scratch, scalar-load and DS instructions.

Buffer rule (stride 0): dword i of an access is in range iff wrap32(voffset + imm) + soffset + 4 * (i + 1) <=
num_records; out-of-range loads give 0 (also into LDS), out-of-range stores are dropped. The imm of an LDS load also
moves its LDS address. Loads fetch at issue and deliver at their wait; LDS operations of a wave run in order, as late
as its waits permit.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from mxgate.kernels.gfx950 import floats
from mxgate.kernels.gfx950.state import (
    LANES,
    Array,
    Layout,
    Step,
    Waves,
    allowed,
    scalar_put,
    scalar_source,
    spread,
    vector_source,
)
from mxgate.kernels.gfx950.text import M0, Instruction, Operand

BASE = 0x7F0000000000
GUARD = 4096
POISON = np.uint32(0xFFFFFFFF)  # what a load outside every allocation answers: NaN in every format
WIDTHS = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}
NARROW = {
    "ubyte": (1, "u", None), "sbyte": (1, "s", None), "ushort": (2, "u", None), "sshort": (2, "s", None),
    "short_d16": (2, "u", 0), "short_d16_hi": (2, "u", 1), "ubyte_d16": (1, "u", 0), "ubyte_d16_hi": (1, "u", 1),
    "sbyte_d16": (1, "s", 0), "sbyte_d16_hi": (1, "s", 1),
}  # fmt: skip
STORE_NARROW = {"byte": (1, 0), "short": (2, 0), "byte_d16_hi": (1, 16), "short_d16_hi": (2, 16)}
CACHE = ("sc0", "sc1", "nt", "glc", "slc")
u32 = np.uint32


class Memory:
    """One arena. Each allocation starts 256-aligned, ends exactly, and has GUARD bytes of nobody's memory after it."""

    def __init__(self, sizes: list[int]) -> None:
        starts, top = [], 2 * GUARD
        for n in sizes:
            starts.append(top)
            top = (top + n + 255) // 256 * 256 + GUARD
        self.bytes = np.zeros((top + GUARD + 15) // 16 * 16, np.uint8)
        self.u32 = self.bytes.view(np.uint32)
        self.starts, self.ends = starts, [s + n for s, n in zip(starts, sizes, strict=True)]
        self._starts, self._ends = np.array([-1, *starts]), np.array([-1, *self.ends])

    def address(self, k: int) -> int:
        return BASE + self.starts[k]

    def outside(self, a: Array, ok: Array | None, size: int) -> Array | None:
        """bool[W, 64]: active lanes (ok; None: all) whose `size` bytes at arena offset a are not inside one allocation;
        None if none."""
        act = a if ok is None else a[ok]
        if not act.size:
            return None
        low, high = int(act.min()), int(act.max()) + size
        k = bisect.bisect_right(self.starts, low) - 1
        if k >= 0 and high <= self.ends[k]:
            return None
        place = np.searchsorted(self._starts, a, side="right") - 1
        bad: Array = ~((a >= self._starts[place]) & (a + size <= self._ends[place]))
        bad = bad if ok is None else bad & ok
        return bad if bad.any() else None


def union(a: Array) -> int:
    """All bits that are set in one of the addresses: below 0 where one is, never less than the largest, and aligned as
    all of them are. One look instead of three."""
    return int(np.bitwise_or.reduce(a, axis=None))


_WORDS = {4: (np.uint32, 2), 8: (np.uint64, 3), 16: (np.complex128, 4)}


def gather(octets: Array, a: Array, size: int) -> Array:
    """uint32[..., max(size // 4, 1)]: the `size` bytes at each offset a."""
    if size in _WORDS and not union(a) & (size - 1):
        dtype, shift = _WORDS[size]
        return octets.view(dtype).take(a >> shift).view(np.uint32).reshape(*a.shape, size // 4)
    raw = octets[a[..., None] + np.arange(size)]
    if size % 4:
        out = np.zeros((*a.shape, 4), np.uint8)
        out[..., :size] = raw
        raw = out
    return np.ascontiguousarray(raw).view(np.uint32)


def scatter(octets: Array, a: Array, words: Array, size: int) -> None:
    """Write the low `size` bytes of uint32[n, words] at offsets a[n]."""
    raw = np.ascontiguousarray(words).view(np.uint8).reshape(len(a), -1)
    octets[a[:, None] + np.arange(size)] = raw[:, :size]


# The immediate offsets that an encoding has room for.
_IMMEDIATES = {"buffer": (0, 4095), "global": (-4096, 4095), "scratch": (-4096, 4095), "ds": (0, 65535)}
_IMMEDIATES["s"] = (-(1 << 20), (1 << 20) - 1)


def _imm(inst: Instruction, name: str = "offset") -> int:
    low, high = (0, 255) if name != "offset" else _IMMEDIATES[inst.base.partition("_")[0]]
    value = int(str(inst.modifiers.get(name, 0)))
    if not low <= value <= high:
        raise inst.error(f"{name} must be from {low} to {high}")
    return value


def _planes(lay: Layout, inst: Instruction, o: Operand, n: int) -> list[int]:
    if o.kind not in "va" or o.count < n:
        raise inst.error(f"operand {o.text} must be {n} vector registers")
    return [lay.plane(inst, o, k) for k in range(n)]


def _deliver(planes: list[int]) -> Callable[[Waves, Any], None]:
    """Complete a load: payload (words [W, 64, n], active lanes or None)."""

    def complete(st: Waves, payload: Any) -> None:
        words, active = payload
        for k, p in enumerate(planes):
            if active is None:
                st.r[p][...] = words[..., k]
            else:
                np.copyto(st.r[p], words[..., k], where=active)

    return complete


def _deliver_narrow(plane: int, size: int, sign: str, half: int | None) -> Callable[[Waves, Any], None]:
    bits = 8 * size

    def complete(st: Waves, payload: Any) -> None:
        words, active = payload
        x = words[..., 0]
        if sign == "s":
            x = ((x << u32(32 - bits)).view(np.int32) >> (32 - bits)).view(u32)
        if half == 0:
            x = (st.r[plane] & u32(0xFFFF0000)) | (x & u32(0xFFFF))
        elif half == 1:
            x = (st.r[plane] & u32(0xFFFF)) | (x << u32(16))
        np.copyto(st.r[plane], x, where=True if active is None else active)

    return complete


# ------------------------------------------------------------------------------------- addresses
class Place:
    """Where an access goes: arena offsets int64[W, 64] and, for buffers, the byte offset and num_records that bound
    it."""

    __slots__ = ("address", "limit", "offset")

    def __init__(self, address: Array, offset: Array | None, limit: Array | None) -> None:
        self.address, self.offset, self.limit = address, offset, limit

    def inside(self, size: int) -> Array:
        """bool[W, 64]: the first `size` bytes of a lane are within num_records. Of buffers only."""
        assert self.offset is not None
        assert self.limit is not None
        return self.offset <= self.limit - size


def _buffer_place(
    lay: Layout, inst: Instruction, vaddr: Operand, rsrc: Operand, soffset: Operand
) -> tuple[Callable[[Waves], Place], tuple[int, ...]]:
    if rsrc.kind != "s" or rsrc.count != 4:
        raise inst.error(f"operand {rsrc.text} must be four scalar registers")
    s, imm = rsrc.index, u32(_imm(inst))
    offen, idxen = "offen" in inst.modifiers, "idxen" in inst.modifiers
    if (offen or idxen) != (vaddr.kind == "v") or vaddr.kind not in ("v", "off"):
        raise inst.error("offen or idxen and the address register do not go together")
    so = scalar_source(inst, soffset, "u")
    index = vector_source(lay, inst, vaddr, "u") if idxen else None
    last = Operand(vaddr.kind, vaddr.index + 1, 1, text=vaddr.text) if offen and idxen else vaddr
    voffset = vector_source(lay, inst, last, "u") if offen else None

    def place(st: Waves) -> Place:
        high = st.s[s + 1]
        base = st.s[s].astype(np.int64) | ((high & u32(0xFFFF)).astype(np.int64) << 32)
        stride = ((high >> u32(16)) & u32(0x3FFF)).astype(np.int64)
        offset = (voffset(st) + imm if voffset is not None else np.full((st.n, 1), imm)).astype(np.int64)
        if index is not None:
            if (high >> u32(31)).any():
                raise inst.error("a swizzled buffer is not understood")
            offset = offset + index(st).astype(np.int64) * stride[:, None]
        offset = offset + spread(so(st), (st.n,)).astype(np.int64)[:, None]
        records = st.s[s + 2].astype(np.int64)
        if index is not None:
            records = np.where(stride > 0, records * np.maximum(stride, 1), records)
        offset = spread(offset, (st.n, 64))
        return Place(offset + (base - BASE)[:, None], offset, records[:, None])

    reads = lay.ids(inst, vaddr) + lay.ids(inst, rsrc) + lay.ids(inst, soffset)
    return place, reads


def _flat_place(
    lay: Layout, inst: Instruction, vaddr: Operand, saddr: Operand
) -> tuple[Callable[[Waves], Place], tuple[int, ...]]:
    imm = _imm(inst)
    reads = lay.ids(inst, vaddr) + lay.ids(inst, saddr)
    if saddr.kind == "off":
        wide = vector_source(lay, inst, vaddr, "I")
        return lambda st: Place(spread(wide(st), (st.n, 64)) + (imm - BASE), None, None), reads
    base, low = scalar_source(inst, saddr, "I"), vector_source(lay, inst, vaddr, "u")
    return lambda st: Place(base(st)[:, None] + low(st).astype(np.int64) + (imm - BASE), None, None), reads


def _scratch_place(
    lay: Layout, inst: Instruction, vaddr: Operand, saddr: Operand
) -> tuple[Callable[[Waves], Place], tuple[int, ...]]:
    imm, size = _imm(inst), lay.kernel.scratch_bytes
    if vaddr.kind not in ("v", "off") or saddr.kind not in ("s", "off"):
        raise inst.error("expected a vector register or off, and a scalar one or off")
    v = vector_source(lay, inst, vaddr, "i") if vaddr.kind == "v" else None
    s = scalar_source(inst, saddr, "i") if saddr.kind == "s" else None

    def place(st: Waves) -> Place:
        m = st.machine
        offset = np.full((st.n, 64), imm, np.int64)
        offset = offset + (v(st) if v is not None else 0) + (s(st)[:, None] if s is not None else 0)
        lane = (st.gid * m.waves_each + st.slot)[:, None] * 64 + LANES
        return Place(m.scratch + lane * size + offset, offset, np.full((st.n, 1), size))

    return place, lay.ids(inst, vaddr) + lay.ids(inst, saddr)


def _both(ok: Array | None, also: Array) -> Array | None:
    """Lanes (None: all) that hold both ways; None where all do."""
    both: Array = also if ok is None else ok & also
    return None if both.all() else both


def _fetch(inst: Instruction, st: Waves, where: Place, size: int) -> Array:
    """uint32[W, 64, words]: what each active lane reads."""
    memory, a = st.machine.memory, where.address
    ok = None if st.full else st.mask
    if where.offset is not None:
        ok = _both(ok, where.inside(size))
    if st.machine.observe is not None:
        st.machine.observe("load", inst, st, a + BASE, np.ones(a.shape, bool) if ok is None else ok, size)
    bad = memory.outside(a, ok, size)
    if bad is not None:
        st.machine.report("load-out-of-bounds", inst, st, bad, a + BASE, "outside every allocation")
        ok = _both(ok, ~bad)
    if ok is None:
        return gather(memory.bytes, a, size)
    words = gather(memory.bytes, np.where(ok, a, 0), size)
    words[~ok] = 0
    if bad is not None:
        words[bad] = POISON
    if where.offset is not None and size > 4:  # the dwords of a lane that straddles the limit
        edge = ~ok & where.inside(4) & st.mask & (True if bad is None else ~bad)
        if edge.any():
            for k in range(size // 4):
                part = edge & where.inside(4 * (k + 1))
                wrong = memory.outside(a + 4 * k, part, 4)
                if wrong is not None:
                    st.machine.report(
                        "load-out-of-bounds", inst, st, wrong, a + 4 * k + BASE, "outside every allocation"
                    )
                    words[..., k][wrong] = POISON
                    part = part & ~wrong
                words[..., k][part] = gather(memory.bytes, a[part] + 4 * k, 4)[..., 0]
    return words


def _put(inst: Instruction, st: Waves, where: Place, size: int, words: list[Array]) -> None:
    """Store `size` bytes a lane from uint32 planes; dword by dword of the lanes that a limit cuts."""
    ok = None if st.full else st.mask
    if where.offset is not None:
        whole = _both(ok, where.inside(size))
        if whole is not None and size > 4:
            edge = ~whole & where.inside(4)
            edge = edge if ok is None else edge & ok
            if edge.any():
                for k, word in enumerate(words[:-1]):
                    _store_part(inst, st, where.address + 4 * k, edge & where.inside(4 * (k + 1)), 4, [word])
        ok = whole
    _store_part(inst, st, where.address, ok, size, words)


def _store_part(inst: Instruction, st: Waves, a: Array, ok: Array | None, size: int, words: list[Array]) -> None:
    m = st.machine
    if m.observe is not None:
        m.observe("store", inst, st, a + BASE, np.ones(a.shape, bool) if ok is None else ok, size)
    bad = m.memory.outside(a, ok, size)
    if bad is not None:
        m.report("store-out-of-bounds", inst, st, bad, a + BASE, "outside every allocation")
        ok = _both(ok, ~bad)
    to = a if ok is None else a[ok]
    if not to.size:
        return
    if size in (8, 16) and not union(to) & (size - 1):
        dtype, shift = _WORDS[size]
        data = np.stack([w if ok is None else w[ok] for w in words], -1)
        m.memory.bytes.view(dtype)[to >> shift] = data.view(dtype)[..., 0]
    else:
        for k, word in enumerate(words):
            x, n, at = word if ok is None else word[ok], min(size, 4), to + 4 * k
            if n == 4 and not union(at) & 3:
                m.memory.u32[at >> 2] = x
            elif n == 2 and not union(at) & 1:
                m.memory.bytes.view(np.uint16)[at >> 1] = x.astype(np.uint16)
            else:
                scatter(m.memory.bytes, at.ravel(), x.reshape(-1, 1), n)
    if m.stores is not None:
        m.stores.on_store(m.judge(inst), st, a, ok, size, BASE)


# ------------------------------------------------------------------------------------- loads and stores
_FORM = re.compile(r"^(buffer|global|scratch)_(load|store)_(?:lds_)?(\w+)$")
MODIFIERS = {
    "buffer": ("offen", "idxen", "offset", "lds", *CACHE),
    "global": ("offset", *CACHE),
    "scratch": ("offset", *CACHE),
}


def _vector_memory(lay: Layout, inst: Instruction) -> Step:
    m = _FORM.match(inst.base)
    assert m is not None
    unit, way, form = m.groups()
    allowed(inst, MODIFIERS[unit])
    to_lds = "lds" in inst.modifiers or "_lds_" in inst.base
    ops = list(inst.operands)
    expected = (4 if unit == "buffer" else 3) - to_lds
    if len(ops) != expected:
        raise inst.error(f"expected {expected} operands, found {len(ops)}")
    if to_lds and way == "store":
        raise inst.error("a store takes nothing from LDS")
    data: Operand | None = None
    if unit == "buffer":
        if not to_lds:
            data = ops.pop(0)
        place, reads = _buffer_place(lay, inst, *ops)
    else:
        if not to_lds:
            data = ops.pop(0 if way == "load" else 1)
        place, reads = (_flat_place if unit == "global" else _scratch_place)(lay, inst, *ops)
    if way == "store":
        assert data is not None
        if form in WIDTHS:
            size, shift = WIDTHS[form], 0
        elif form in STORE_NARROW:
            size, shift = STORE_NARROW[form]
        else:
            raise inst.error("unknown mnemonic")
        planes = _planes(lay, inst, data, max(size // 4, 1))

        def store(st: Waves) -> Any:
            _put(inst, st, place(st), size, [st.r[p] >> u32(shift) if shift else st.r[p] for p in planes])
            return ()

        return Step(inst, "vm", reads + tuple(planes), (), store, None)
    if form not in WIDTHS and form not in NARROW:
        raise inst.error("unknown mnemonic")
    size = WIDTHS.get(form) or NARROW[form][0]
    if to_lds:
        return _to_lds(lay, inst, place, reads, size, _imm(inst))
    assert data is not None

    def load(st: Waves) -> Any:
        return _fetch(inst, st, place(st), size), None if st.full else st.mask.copy()

    if form in WIDTHS:
        planes = _planes(lay, inst, data, size // 4)
        return Step(inst, "vm", reads, tuple(planes), load, _deliver(planes))
    _, sign, half = NARROW[form]
    planes = _planes(lay, inst, data, 1)
    return Step(inst, "vm", reads, tuple(planes), load, _deliver_narrow(planes[0], size, sign, half))


def _to_lds(
    lay: Layout, inst: Instruction, place: Callable[[Waves], Place], reads: tuple[int, ...], size: int, imm: int
) -> Step:
    """Lane l of a wave goes to LDS address M0 + imm + size * l (a lane of less than a dword takes a dword)."""
    words = max(size // 4, 1)
    pitch = LANES * 4 * words

    def issue(st: Waves) -> Any:
        data = _fetch(inst, st, place(st), size)
        address = (st.s[M0].astype(np.int64) + imm)[:, None] + pitch
        return st.machine.lds_access(inst, st, address, 4 * words, data)

    def complete(st: Waves, payload: Any) -> None:
        st.machine.lds_write(inst, st, payload, 4 * words, True)

    return Step(inst, "vm", (*reads, *lay.ids(inst, Operand("s", M0, 1))), (), issue, complete)


def _atomic_values(kind: str, old: Array, x: Array) -> Array:
    if kind == "add":
        return old + x
    if kind == "sub":
        return old - x
    if kind in ("umax", "umin", "smax", "smin"):
        t = np.uint32 if kind[0] == "u" else np.int32
        fn = np.maximum if kind.endswith("max") else np.minimum
        return fn(old.view(t), x.view(t)).view(np.uint32)
    if kind in ("and", "or", "xor"):
        return {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[kind](old, x)
    if kind == "swap":
        return x
    if kind == "add_f32":
        return (old.view(np.float32) + x.view(np.float32)).view(np.uint32)
    if kind == "pk_add_bf16":
        low = (old << u32(16)).view(np.float32) + (x << u32(16)).view(np.float32)
        high = (old & u32(0xFFFF0000)).view(np.float32) + (x & u32(0xFFFF0000)).view(np.float32)
        return floats.bf16_bits(low) | (floats.bf16_bits(high) << u32(16))
    halves = old.view(np.float16).reshape(-1, 2) + x.view(np.float16).reshape(-1, 2)
    return np.ascontiguousarray(halves).view(np.uint32)[:, 0]


ATOMICS = (
    "add",
    "sub",
    "umax",
    "umin",
    "smax",
    "smin",
    "and",
    "or",
    "xor",
    "swap",
    "add_f32",
    "pk_add_bf16",
    "pk_add_f16",
)


def _atomic(lay: Layout, inst: Instruction) -> Step:
    """A dword atomic; lanes that meet on one address go one after another in the run's shuffled order."""
    unit, kind = inst.base.split("_atomic_", 1)
    returns = "sc0" in inst.modifiers or "glc" in inst.modifiers
    allowed(inst, MODIFIERS[unit], 4 if unit == "buffer" or returns else 3)
    ops = list(inst.operands)
    result: Operand | None = None
    if unit == "buffer":
        data = ops.pop(0)
        result = data if returns else None
        place, reads = _buffer_place(lay, inst, *ops)
    else:
        result = ops.pop(0) if returns else None
        data = ops.pop(1)
        place, reads = _flat_place(lay, inst, *ops)
    (source,) = _planes(lay, inst, data, 1)
    target = _planes(lay, inst, result, 1) if result is not None else []

    def issue(st: Waves) -> Any:
        m, where = st.machine, place(st)
        ok = st.mask if where.offset is None else st.mask & where.inside(4)
        bad = m.memory.outside(where.address, ok, 4)
        if bad is not None:
            m.report("store-out-of-bounds", inst, st, bad, where.address + BASE, "outside every allocation")
            ok = ok & ~bad
        lanes = np.argwhere(ok)
        lanes = lanes[m.random.permutation(len(lanes))]
        old = np.zeros((st.n, 64, 1), np.uint32)
        while len(lanes):
            w, lane = lanes[:, 0], lanes[:, 1]
            at = where.address[w, lane] >> 2
            _, first = np.unique(at, return_index=True)
            before = m.memory.u32[at[first]]
            old[w[first], lane[first], 0] = before
            m.memory.u32[at[first]] = _atomic_values(kind, before, st.r[source][w[first], lane[first]])
            rest = np.ones(len(lanes), bool)
            rest[first] = False
            lanes = lanes[rest]
        return (old, None if st.full else st.mask.copy()) if target else ()

    return Step(inst, "vm", (*reads, source), tuple(target), issue, _deliver(target) if target else None)


_SCALAR_LOADS = {"": 1, "x2": 2, "x4": 4, "x8": 8, "x16": 16}


def _scalar_load(lay: Layout, inst: Instruction) -> Step:
    buffer = inst.base.startswith("s_buffer")
    allowed(inst, ("offset", "glc"))
    n = _SCALAR_LOADS.get(inst.base.rsplit("dword", 1)[1])
    if n is None or len(inst.operands) != 3:
        raise inst.error("unknown scalar load")
    d, base_operand, offset = inst.operands
    if d.kind != "s" or d.count != n:
        raise inst.error(f"operand {d.text} must be {n} scalar registers")
    if base_operand.kind != "s" or base_operand.count != (4 if buffer else 2):
        raise inst.error(f"operand {base_operand.text} must be {4 if buffer else 2} scalar registers")
    first = Operand("s", base_operand.index, 2, text=base_operand.text)
    base, at, imm = scalar_source(inst, first, "U"), scalar_source(inst, offset, "u"), _imm(inst)
    r = base_operand.index

    def issue(st: Waves) -> Any:
        m = st.machine
        address = base(st) & np.uint64(0xFFFFFFFFFFFF if buffer else 0xFFFFFFFFFFFFFFFF)
        offset = spread(at(st), (st.n,)).astype(np.int64) + imm
        a = (address.astype(np.int64) + offset - BASE) & ~3
        ok = np.ones(st.n, bool)
        if buffer:
            ok = offset + 4 * n <= st.s[r + 2].astype(np.int64)
        bad = m.memory.outside(a, ok, 4 * n)
        if bad is not None:
            m.report(
                "load-out-of-bounds",
                inst,
                st,
                bad[:, None] & (LANES == 0),
                (a + BASE)[:, None],
                "outside every allocation",
            )
        good = ok if bad is None else ok & ~bad
        words = m.memory.u32[(np.where(good, a, 0) >> 2)[:, None] + np.arange(n)]
        words[~good] = 0 if bad is None else POISON
        return (words,)

    def complete(st: Waves, payload: Any) -> None:
        for k in range(n):
            st.s[d.index + k][:] = payload[0][:, k]

    reads = lay.ids(inst, base_operand) + lay.ids(inst, offset)
    return Step(inst, "smem", reads, lay.ids(inst, d), issue, complete)


def _time(lay: Layout, inst: Instruction) -> Step:
    allowed(inst, (), 1)
    put = scalar_put(inst, inst.operands[0], "U")

    def issue(st: Waves) -> Any:
        return (np.full(st.n, st.machine.clock, np.uint64),)

    return Step(inst, "smem", (), lay.ids(inst, inst.operands[0]), issue, lambda st, p: put(st, p[0]))


# ------------------------------------------------------------------------------------- LDS
_DS = re.compile(r"^ds_(read|write)(2)?(st64)?_([bui]\d+)(_d16)?(_hi|_d16_hi)?$")
_DS_BYTES = {"b8": 1, "u8": 1, "i8": 1, "b16": 2, "u16": 2, "i16": 2, "b32": 4, "b64": 8, "b96": 12, "b128": 16}


def ds_bytes(base: str) -> int | None:
    """Bytes a lane and address of an LDS instruction touch, None where it touches no LDS memory."""
    m = _DS.match(base)
    if m is not None:
        return _DS_BYTES.get(m[4])
    return 8 if base.startswith("ds_read_b64_tr") else 4 if base.startswith(("ds_add", "ds_max", "ds_min")) else None


def _ds(lay: Layout, inst: Instruction) -> Step:
    m = _DS.match(inst.base)
    if m is None or m[4] not in _DS_BYTES:
        raise inst.error("unknown mnemonic")
    read, two, wide_step, form = m[1] == "read", m[2], m[3], m[4]
    high = bool(m[6]) and "hi" in (m[6] or "")
    d16 = bool(m[5]) or "d16" in (m[6] or "")
    size = _DS_BYTES[form]
    words = max(size // 4, 1)
    if two:
        allowed(inst, ("offset0", "offset1"))
        scale = size * (64 if wide_step else 1)
        offsets = [_imm(inst, "offset0") * scale, _imm(inst, "offset1") * scale]
    else:
        allowed(inst, ("offset",))
        offsets = [_imm(inst)]
    n = len(offsets)
    if len(inst.operands) != (2 if read else 1 + n):
        raise inst.error(f"expected {2 if read else 1 + n} operands")
    va = inst.operands[1 if read else 0]
    address = vector_source(lay, inst, va, "u")
    reads = lay.ids(inst, va, 1)
    if read:
        planes = _planes(lay, inst, inst.operands[0], words * n)
        narrow = (
            _deliver_narrow(planes[0], size, "s" if form[0] == "i" else "u", int(high) if d16 else None)
            if size < 4
            else None
        )
        parts = [_deliver(planes[k * words : (k + 1) * words]) for k in range(n)]

        def issue(st: Waves) -> Any:
            a = address(st).astype(np.int64)
            out: tuple[Any, ...] = ()
            for o in offsets:
                out += st.machine.lds_access(inst, st, a + o, size, None)
            return out

        def complete(st: Waves, payload: Any) -> None:
            each = len(payload) // n
            got = [st.machine.lds_read(inst, st, payload[k * each : (k + 1) * each], size) for k in range(n)]
            for k, (data, active) in enumerate(got):
                (narrow or parts[k])(st, (data, active))

        return Step(inst, "ds", reads, tuple(planes), issue, complete)
    sources = [_planes(lay, inst, o, words) for o in inst.operands[1:]]
    shift = u32(16 if high else 0)

    def issue_write(st: Waves) -> Any:
        a = address(st).astype(np.int64)
        out: tuple[Any, ...] = ()
        for o, planes in zip(offsets, sources, strict=True):
            data = np.stack([st.r[p] >> shift for p in planes], -1)
            out += st.machine.lds_access(inst, st, a + o, size, data)
        return out

    def complete_write(st: Waves, payload: Any) -> None:
        each = len(payload) // n
        for k in range(n):
            st.machine.lds_write(inst, st, payload[k * each : (k + 1) * each], size, False)

    every = tuple(p for planes in sources for p in planes)
    return Step(inst, "ds", reads + every, (), issue_write, complete_write)


def transpose(words: Array, bits: int) -> Array:
    """ds_read_b64_tr_b{4,8,16}: each 16 lanes hold a tile of rows of 16 elements; lane c receives column c.
    [assumed]"""
    w = words.shape[0]
    octets = np.ascontiguousarray(words).view(np.uint8).reshape(w, 4, 16, 8)
    if bits == 4:
        nibbles = np.stack([octets & 15, octets >> 4], -1).reshape(w, 4, 16, 16)
        turned = nibbles.swapaxes(2, 3)
        out = turned[..., 0::2] | (turned[..., 1::2] << 4)
        return np.ascontiguousarray(out).view(np.uint32).reshape(w, 64, 2)
    elements = octets.view(np.uint16) if bits == 16 else octets
    rows = 64 // bits
    turned = elements.reshape(w, 4, rows, 16).swapaxes(2, 3)
    return np.ascontiguousarray(turned).view(np.uint32).reshape(w, 64, 2)


def _ds_transpose(lay: Layout, inst: Instruction) -> Step:
    allowed(inst, ("offset",), 2)
    bits = int(inst.base.rsplit("b", 1)[1])
    va, imm = inst.operands[1], _imm(inst)
    address, planes = vector_source(lay, inst, va, "u"), _planes(lay, inst, inst.operands[0], 2)
    deliver = _deliver(planes)

    def issue(st: Waves) -> Any:
        return st.machine.lds_access(inst, st, address(st).astype(np.int64) + imm, 8, None)

    def complete(st: Waves, payload: Any) -> None:
        data, active = st.machine.lds_read(inst, st, payload, 8)
        deliver(st, (transpose(data, bits), active))

    return Step(inst, "ds", lay.ids(inst, va, 1), tuple(planes), issue, complete)


def _ds_lanes(pick: Callable[[Array, Array, Array], Array], swizzle: bool) -> Callable[[Layout, Instruction], Step]:
    """Cross-lane permutes: they use LDS's crossbar, no memory, and arrive like an LDS read."""

    def make(lay: Layout, inst: Instruction) -> Step:
        allowed(inst, ("offset",), 2 if swizzle else 3)
        d = inst.operands[0]
        planes, imm = _planes(lay, inst, d, 1), u32(_imm(inst))
        sources = [vector_source(lay, inst, o, "u") for o in inst.operands[1:]]
        deliver = _deliver(planes)

        def issue(st: Waves) -> Any:
            x = np.broadcast_to(sources[-1](st), (st.n, 64))
            index = np.broadcast_to(imm if swizzle else sources[0](st) + imm, (st.n, 64))
            return pick(index, x, st.mask)[..., None], None if st.full else st.mask.copy()

        reads = tuple(r for o in inst.operands[1:] for r in lay.ids(inst, o, 1))
        return Step(inst, "ds", reads, tuple(planes), issue, deliver)

    return make


def _bpermute(index: Array, x: Array, mask: Array) -> Array:
    source = ((index >> u32(2)) & u32(63)).astype(np.intp)
    return np.where(np.take_along_axis(mask, source, 1), np.take_along_axis(x, source, 1), u32(0))


def _permute(index: Array, x: Array, mask: Array) -> Array:
    target = ((index >> u32(2)) & u32(63)).astype(np.intp)
    out = np.zeros_like(x)
    for lane in range(64):  # ascending: the last lane to name a target wins
        w = np.nonzero(mask[:, lane])[0]
        out[w, target[w, lane]] = x[w, lane]
    return out


def _swizzle(index: Array, x: Array, mask: Array) -> Array:
    code = int(index.flat[0])
    if code & 0x8000:
        source = (LANES & ~3) + np.array([(code >> (2 * k)) & 3 for k in range(4)])[LANES & 3]
    else:
        low = LANES & 31
        source = (LANES & 32) + (((low & (code & 31)) | ((code >> 5) & 31)) ^ ((code >> 10) & 31))
    return np.where(mask[:, source], x[:, source], u32(0))


def _ds_atomic(lay: Layout, inst: Instruction) -> Step:
    """An LDS atomic without return value; it counts as a write of its word."""
    allowed(inst, ("offset",), 2)
    kind = {"ds_add_u32": "add", "ds_max_u32": "umax", "ds_min_u32": "umin", "ds_max_i32": "smax", "ds_min_i32": "smin"}
    kind |= {"ds_add_f32": "add_f32", "ds_or_b32": "or", "ds_and_b32": "and"}
    va, data = inst.operands
    address, (source,) = vector_source(lay, inst, va, "u"), _planes(lay, inst, data, 1)
    imm, what = _imm(inst), kind[inst.base]

    def issue(st: Waves) -> Any:
        return st.machine.lds_access(inst, st, address(st).astype(np.int64) + imm, 4, st.r[source][..., None].copy())

    def complete(st: Waves, payload: Any) -> None:
        st.machine.lds_atomic(inst, st, payload, lambda old, x: _atomic_values(what, old, x))

    return Step(inst, "ds", (*lay.ids(inst, va, 1), source), (), issue, complete)


Bind = Callable[[Layout, Instruction], Step]
_WIDE = (*WIDTHS, *NARROW)
BINDERS: dict[str, Bind] = {
    **{f"{u}_load_{f}": _vector_memory for u in ("buffer", "global", "scratch") for f in _WIDE},
    **{f"{u}_store_{f}": _vector_memory for u in ("buffer", "global", "scratch") for f in (*WIDTHS, *STORE_NARROW)},
    **{f"global_load_lds_{f}": _vector_memory for f in ("dword", "dwordx3", "dwordx4", "ubyte", "ushort")},
    **{f"{u}_atomic_{f}": _atomic for u in ("buffer", "global") for f in ATOMICS},
    **{f"s_load_dword{x}": _scalar_load for x in _SCALAR_LOADS},
    **{f"s_buffer_load_dword{x}": _scalar_load for x in _SCALAR_LOADS},
    **dict.fromkeys(("s_memtime", "s_memrealtime"), _time),
    **{f"ds_read_{f}": _ds for f in ("u8", "i8", "u16", "i16", "b32", "b64", "b96", "b128")},
    **{f"ds_read_{f}_d16{h}": _ds for f in ("u8", "i8", "u16") for h in ("", "_hi")},
    **{f"ds_write_{f}": _ds for f in ("b8", "b16", "b32", "b64", "b96", "b128", "b8_d16_hi", "b16_d16_hi")},
    **{f"ds_{w}2{s}_{f}": _ds for w in ("read", "write") for s in ("", "st64") for f in ("b32", "b64")},
    **{f"ds_read_b64_tr_b{b}": _ds_transpose for b in (4, 8, 16)},
    "ds_bpermute_b32": _ds_lanes(_bpermute, False),
    "ds_permute_b32": _ds_lanes(_permute, False),
    "ds_swizzle_b32": _ds_lanes(_swizzle, True),
    **{
        f"ds_{f}": _ds_atomic
        for f in ("add_u32", "max_u32", "min_u32", "max_i32", "min_i32", "add_f32", "or_b32", "and_b32")
    },
}
