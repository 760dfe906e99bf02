"""The registers of a group of waves that stand at one program counter, and the typed operands that read and write them.

Vector registers are planes uint32[W, 64] (wave, lane); AGPR i is plane `vgprs + i`. Scalars are rows uint32[W].
Every instruction works on the whole group at once; EXEC is a lane mask bool[W, 64] with a flag for the common full
case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mxgate.kernels.gfx950.text import EXEC, SCC, Instruction, Kernel, Operand, float_bits

Array = Any  # an ndarray: NumPy's stubs lose dtypes and shapes at the first view, so docstrings give them instead
Get = Callable[["Waves"], Array]
Put = Callable[["Waves", Array], None]

LANES = np.arange(64)
SCALARS = 129  # s0..s127 and SCC
SCALAR_BASE = 1024  # a scalar's number in the sets of registers that hazard checks use
U32, I32, F32 = (np.dtype(t) for t in ("uint32", "int32", "float32"))
U64, I64, F64 = (np.dtype(t) for t in ("uint64", "int64", "float64"))


class Sums(NamedTuple):
    """Results of matrix instructions that are not yet in their registers.

    values: float32[W, rows, columns]. unit: int64[W], log2 of a number that all of a wave's are whole multiples of.
    most: float64[W], no finite one of a wave's is larger in magnitude; NaN or infinity where that is not known.
    """

    values: Array
    unit: Array
    most: Array


class Waves:
    """W waves in lock-step. wg: workgroup slot in the batch; gid: its linear id; slot: the wave's number in it."""

    def __init__(self, machine: Any, registers: Array, scalars: Array, wg: Array, gid: Array, slot: Array) -> None:
        self.machine = machine
        self.scc = np.zeros(len(wg), bool)
        self.mask = np.ones((len(wg), 64), bool)
        self.full = True
        self.wg, self.gid, self.slot = wg, gid, slot
        self.vm: list[Any] = []
        self.lg: list[Any] = []
        self.tiles: dict[Any, Sums] = {}
        # Operands of products still to come, by their number of registers: words and scales as a Shelf lays them out.
        self.shelf: dict[int, tuple[Array, Array]] = {}
        self.initialised = np.zeros(SCALAR_BASE + SCALARS, bool)
        self.partial: dict[int, Array] = {}
        self.executed = 0
        self.pc = 0
        self.queues: Any = None
        self.stream = 0
        # The block under way, the part of it that comes next, and whether that looks at every register it reads.
        self.plan: Any = None
        self.part, self.careful = 0, False
        self._bind(registers, scalars)

    def _bind(self, registers: Array, scalars: Array) -> None:
        self.registers, self.scalars = registers, scalars
        self.n = registers.shape[1]
        self.r = list(registers)
        self.f = list(registers.view(np.float32))
        self.i = list(registers.view(np.int32))
        self.s = list(scalars)

    def exec_changed(self) -> None:
        words = np.empty((self.n, 2), np.uint32)
        words[:, 0], words[:, 1] = self.s[EXEC], self.s[EXEC + 1]
        self.full = bool((words == 0xFFFFFFFF).all())
        self.mask = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little").view(bool)

    def _copy_to(self, other: Waves, index: Array, registers: Array, scalars: Array) -> None:
        other.machine = self.machine
        other.scc = self.scc[index]
        other.wg, other.gid, other.slot = self.wg[index], self.gid[index], self.slot[index]
        other.vm = [_take(p, index) for p in self.vm]
        other.lg = [_take(p, index) for p in self.lg]
        other.initialised = self.initialised.copy()
        other.partial = {k: v[index] for k, v in self.partial.items()}
        other.executed, other.pc = self.executed, self.pc
        other.queues, other.stream = self.queues, self.stream
        other.plan, other.part, other.careful = self.plan, self.part, self.careful
        other._bind(registers, scalars)
        other.exec_changed()

    def split(self, away: Array) -> Waves:
        """Move the waves where `away` (bool[W]) holds into a new group. The rest stay in place: the tail fills the
        gaps."""
        gone = np.nonzero(away)[0]
        out = Waves.__new__(Waves)
        self._copy_to(out, gone, self.registers[:, gone], self.scalars[:, gone])
        keep = self.n - len(gone)
        order = np.arange(self.n)
        holes = gone[gone < keep]
        tail = np.nonzero(~away[keep:])[0] + keep
        order[holes] = tail
        order = order[:keep]
        self.registers[:, holes] = self.registers[:, tail]
        self.scalars[:, holes] = self.scalars[:, tail]
        out.tiles = {k: Sums(*(x[gone] for x in sums)) for k, sums in self.tiles.items()}
        for k, sums in self.tiles.items():
            for x in sums:
                x[holes] = x[tail]
            self.tiles[k] = Sums(*(x[:keep] for x in sums))
        # Between blocks nothing on the shelf is still wanted.
        held, self.shelf, out.shelf = self.shelf if self.plan is not None else {}, {}, {}
        for k, both in held.items():
            words, scales = both
            out.shelf[k], self.shelf[k] = ((words[index], scales[index]) for index in (gone, order))
        self._copy_to(self, order, self.registers[:, :keep], self.scalars[:, :keep])
        return out

    @staticmethod
    def merge(a: Waves, b: Waves) -> Waves:
        """One group of two that stand at the same instruction with the same outstanding operations."""
        out = Waves.__new__(Waves)
        out.machine = a.machine
        for name in ("scc", "wg", "gid", "slot"):
            setattr(out, name, np.concatenate([getattr(a, name), getattr(b, name)]))
        out.vm = [_join(p, q) for p, q in zip(a.vm, b.vm, strict=True)]
        out.lg = [_join(p, q) for p, q in zip(a.lg, b.lg, strict=True)]
        out.tiles = {
            k: Sums(*(np.concatenate(both) for both in zip(sums, b.tiles[k], strict=True)))
            for k, sums in a.tiles.items()
        }
        out.shelf = {}
        for k in a.shelf.keys() & b.shelf.keys() if a.plan is not None else ():
            places = min(a.shelf[k][0].shape[1], b.shelf[k][0].shape[1])  # either has room for the block's
            (w, s), (x, t) = a.shelf[k], b.shelf[k]
            out.shelf[k] = (
                np.concatenate([w[:, :places], x[:, :places]]),
                np.concatenate([s[:, :places], t[:, :places]]),
            )
        out.initialised = a.initialised & b.initialised
        out.partial = {}
        for k in set(a.partial) | set(b.partial):
            out.partial[k] = np.concatenate([a.known(k), b.known(k)])
        for number in np.nonzero(a.initialised ^ b.initialised)[0].tolist():
            out.partial[number] = np.concatenate([a.known(number), b.known(number)])
        out.executed = max(a.executed, b.executed)
        out.pc, out.queues, out.stream = a.pc, a.queues, a.stream
        out.plan, out.part, out.careful = a.plan, a.part, a.careful
        out._bind(np.concatenate([a.registers, b.registers], axis=1), np.concatenate([a.scalars, b.scalars], axis=1))
        out.exec_changed()
        return out

    def known(self, register: int) -> Array:
        """bool[W, 64]: the lanes in which a register has been written."""
        if self.initialised[register]:
            return np.ones((self.n, 64), bool)
        return self.partial.get(register, np.zeros((self.n, 64), bool))


def _take(payload: Any, index: Array) -> Any:
    return tuple(x[index] if isinstance(x, np.ndarray) else x for x in payload)


def _join(p: Any, q: Any) -> Any:
    out: list[Any] = []
    for x, y, a, b in zip(p, q, (p,) * len(p), (q,) * len(q), strict=True):
        if isinstance(x, np.ndarray) or isinstance(y, np.ndarray):
            # None stands for "every lane": it has a shape only beside the payload's first array.
            x = x if isinstance(x, np.ndarray) else np.ones((len(a[0]), 64), bool)
            y = y if isinstance(y, np.ndarray) else np.ones((len(b[0]), 64), bool)
            out.append(np.concatenate([x, y]))
        else:
            out.append(x)
    return tuple(out)


class Layout(NamedTuple):
    """What binding an instruction needs to know of its kernel."""

    kernel: Kernel

    def plane(self, inst: Instruction, o: Operand, word: int = 0) -> int:
        """The plane of a vector register; an error where the kernel's descriptor does not reserve it."""
        k = self.kernel
        if o.kind not in ("v", "a"):
            raise inst.error(f"operand {o.text} must be a vector register")
        limit = k.vgprs if o.kind == "v" else k.agprs
        if word >= o.count:
            raise inst.error(f"operand {o.text} holds {o.count} registers, expected at least {word + 1}")
        if o.index + o.count > limit:
            raise inst.error(f"operand {o.text} lies past the {limit} {o.kind} registers the kernel reserves")
        return o.index + word + (k.vgprs if o.kind == "a" else 0)

    def ids(self, inst: Instruction, o: Operand, words: int | None = None) -> tuple[int, ...]:
        """The numbers an operand's registers have in hazard checks."""
        n = o.count if words is None else words
        if o.kind in "va":
            return tuple(self.plane(inst, o, w) for w in range(n))
        if o.kind == "s":
            return tuple(SCALAR_BASE + o.index + w for w in range(n))
        return ()


# ---------------------------------------------------------------------------------------------- constants
_LARGEST = float(np.finfo(np.float32).max)


def constant(inst: Instruction, o: Operand, kind: str) -> Array:
    """A constant operand as a zero-dimensional array of the type `kind` wants."""
    v = o.value
    if kind in ("U", "I", "m"):
        bits = int(v) & 0xFFFFFFFFFFFFFFFF if isinstance(v, int) else int(np.float64(v).view(np.uint64))
        out: Array = np.array(bits, np.uint64)
        return out.view(np.int64) if kind == "I" else out
    if kind == "F":
        return np.array(
            v if isinstance(v, float) else int(v) & 0xFFFFFFFFFFFFFFFF,
            np.float64 if isinstance(v, float) else np.uint64,
        ).view(np.float64)
    if kind == "h":
        if isinstance(v, float):
            return np.array(v, np.float16)
        return np.array(v & 0xFFFF, np.uint16).view(np.float16)
    fits = -(1 << 31) <= v < (1 << 32) if isinstance(v, int) else abs(v) <= _LARGEST
    if not fits:
        raise inst.error(f"constant {o.text} does not fit 32 bits")
    word = np.array(v & 0xFFFFFFFF if isinstance(v, int) else float_bits(v), np.uint32)
    return word.view({"i": np.int32, "f": np.float32}.get(kind, np.uint32))


def words_of(kind: str) -> int:
    return 2 if kind in "UIFmP" else 1


# ---------------------------------------------------------------------------------------------- vector side
def unsigned(inst: Instruction, o: Operand) -> None:
    """Refuse -x, |x| and sext(x) where they have no meaning: no assembler writes them there."""
    if o.neg or o.abs or o.sext:
        raise inst.error(f"operand {o.text} cannot be negated, made absolute or extended here")


def vector_source(lay: Layout, inst: Instruction, o: Operand, kind: str, half: int = 0) -> Get:
    """A vector instruction's source: an array that broadcasts to [W, 64].

    kind: u i f (32 bits), U I F (64 bits), h (float16 in half `half`), m (lane mask in an SGPR pair), s (scalar [W]).
    -x and |x| are for floats, and for what v_cndmask_b32 chooses among.
    """
    if o.sext or (kind not in "fFh" and (kind, inst.base) != ("u", "v_cndmask_b32")):
        unsigned(inst, o)
    if kind == "m":
        return mask_source(inst, o)
    if kind == "s":
        return scalar_source(inst, o, "u")
    if o.kind == "const":
        value = _signs(o, constant(inst, o, kind), kind)
        return lambda st: value
    if o.kind in "va":
        p = lay.plane(inst, o)
        if kind in "UIF":
            q, t = lay.plane(inst, o, 1), {"U": U64, "I": I64, "F": F64}[kind]

            def wide(st: Waves) -> Array:
                return (st.r[p].astype(np.uint64) | (st.r[q].astype(np.uint64) << np.uint64(32))).view(t)

            return _signed(o, wide, kind)
        if kind == "h":
            shift = np.uint32(16 * half)
            return _signed(o, lambda st: (st.r[p] >> shift).astype(np.uint16).view(np.float16), kind)
        if kind == "f":
            return _signed(o, lambda st: st.f[p], kind)
        if kind == "i":
            return lambda st: st.i[p]
        return _signed(o, lambda st: st.r[p], kind)
    if o.kind == "s":
        plain = Operand(o.kind, o.index, o.count, o.value, text=o.text)
        get = scalar_source(inst, plain, kind if kind != "h" else "u")
        if kind == "h":
            sh = np.uint32(16 * half)
            return _signed(o, lambda st: (get(st) >> sh).astype(np.uint16).view(np.float16)[:, None], kind)
        return _signed(o, lambda st: get(st)[:, None], kind)
    raise inst.error(f"operand {o.text} cannot be a source here")


def _signs(o: Operand, x: Array, kind: str) -> Array:
    if not (o.neg or o.abs):
        return x
    if kind == "u":
        y = x & np.uint32(0x7FFFFFFF) if o.abs else x
        return y ^ np.uint32(0x80000000) if o.neg else y
    y = np.abs(x) if o.abs else x
    return -y if o.neg else y


def _signed(o: Operand, get: Get, kind: str) -> Get:
    return get if not (o.neg or o.abs) else lambda st: _signs(o, get(st), kind)


def mask_source(inst: Instruction, o: Operand) -> Get:
    """A lane mask bool[W, 64] held in an SGPR pair."""
    if o.kind == "const":
        word = int(o.value) & 0xFFFFFFFFFFFFFFFF
        bits = np.array([[bool(word >> lane & 1) for lane in range(64)]])
        return lambda st: bits
    if o.kind != "s" or o.count != 2:
        raise inst.error(f"operand {o.text} cannot hold a lane mask")
    index = o.index

    def get(st: Waves) -> Array:
        if index == EXEC:
            return st.mask
        words = np.empty((st.n, 2), np.uint32)
        words[:, 0], words[:, 1] = st.s[index], st.s[index + 1]
        return np.unpackbits(words.view(np.uint8), axis=1, bitorder="little").view(bool)

    return get


def spread(x: Array, shape: tuple[int, ...]) -> Array:
    """x broadcast to a shape, which it often has: numpy takes five microseconds to see that."""
    return x if np.shape(x) == shape else np.broadcast_to(x, shape)


def vector_put(lay: Layout, inst: Instruction, o: Operand, kind: str) -> Put:
    """A vector instruction's destination; inactive lanes keep their value (mask bits of inactive lanes become 0)."""
    if kind == "m":
        if o.kind != "s" or o.count != 2:
            raise inst.error(f"operand {o.text} cannot hold a lane mask")
        index = o.index

        def put_mask(st: Waves, x: Array) -> None:
            bits = spread(x, (st.n, 64))
            if not st.full:
                bits = bits & st.mask
            words = np.packbits(bits, axis=1, bitorder="little").view(np.uint32)
            st.s[index][:], st.s[index + 1][:] = words[:, 0], words[:, 1]
            if index == EXEC:
                st.exec_changed()

        return put_mask
    if kind == "s":
        return scalar_put(inst, o, "u")
    if o.kind not in "va":
        raise inst.error(f"operand {o.text} cannot be written here")
    p = lay.plane(inst, o)
    if kind in "UIF":
        q = lay.plane(inst, o, 1)

        def put_wide(st: Waves, x: Array) -> None:
            w = spread(x, (st.n, 64)).view(np.uint64)
            store(st, p, w.astype(np.uint32))
            store(st, q, (w >> np.uint64(32)).astype(np.uint32))

        return put_wide
    if kind in "if":
        view = {"i": I32, "f": F32}[kind]

        def put_typed(st: Waves, x: Array) -> None:
            planes = st.i if view is I32 else st.f
            if st.full:
                planes[p][...] = x
            else:
                np.copyto(planes[p], x, where=st.mask, casting="unsafe")

        return put_typed
    if kind == "h":
        return lambda st, x: store(st, p, np.asarray(x, np.float16).view(np.uint16).astype(np.uint32))
    return lambda st, x: store(st, p, x)


def store(st: Waves, plane: int, x: Array) -> None:
    """Write a plane in the active lanes."""
    if st.full:
        st.r[plane][...] = x
    else:
        np.copyto(st.r[plane], x, where=st.mask)


# ---------------------------------------------------------------------------------------------- scalar side
def scalar_source(inst: Instruction, o: Operand, kind: str) -> Get:
    """A scalar source uint32/int32/float32/uint64/int64[W] (a constant: zero-dimensional). kind c: SCC as bool."""
    unsigned(inst, o)
    if kind == "c":
        return lambda st: st.scc
    if o.kind == "const":
        value = np.broadcast_to(constant(inst, o, kind), (1,))
        return lambda st: value
    if o.kind != "s":
        raise inst.error(f"operand {o.text} cannot be a scalar source")
    index = o.index
    if index == SCC:
        return lambda st: st.scc.astype(np.uint32)
    if kind in "UIF":
        if o.count != 2:
            raise inst.error(f"operand {o.text} must be a pair of registers")
        t = {"U": U64, "I": I64, "F": F64}[kind]
        return lambda st: (st.s[index].astype(np.uint64) | (st.s[index + 1].astype(np.uint64) << np.uint64(32))).view(t)
    if kind == "u":
        return lambda st: st.s[index]
    t = {"i": I32, "f": F32}[kind]
    return lambda st: st.s[index].view(t)


def scalar_put(inst: Instruction, o: Operand, kind: str) -> Put:
    if kind == "c":

        def put_scc(st: Waves, x: Array) -> None:
            st.scc = spread(x, (st.n,)).copy()

        return put_scc
    if o.kind != "s" or o.index >= SCC:
        raise inst.error(f"operand {o.text} cannot be written by a scalar instruction")
    if kind in "UIF" and o.count != 2:
        raise inst.error(f"operand {o.text} must be a pair of registers")
    index = o.index
    executes = index in (EXEC, EXEC + 1)

    def put(st: Waves, x: Array) -> None:
        if kind in "UIF":
            w = np.asarray(x).view(np.uint64)
            st.s[index][:] = w.astype(np.uint32)
            st.s[index + 1][:] = (w >> np.uint64(32)).astype(np.uint32)
        else:
            st.s[index][:] = np.asarray(x).view(np.uint32)
        if executes:
            st.exec_changed()

    return put


class Row(NamedTuple):
    """The semantics of one mnemonic: `destinations` and `sources` are a letter per operand, `fn` maps arrays to arrays.

    With several destinations fn answers a tuple. `implied` are the source or destination operands the text leaves out.
    `modifiers` are those the row understands beyond its encoding's own.
    """

    destinations: str
    sources: str
    fn: Callable[..., Any]
    modifiers: frozenset[str] = frozenset()
    saturated: Callable[..., Any] | None = None


class Step(NamedTuple):
    """A bound instruction. reads/writes are register numbers; `run` works on a group of waves.

    For an asynchronous one `run` is the issue and answers a payload, and `complete` delivers it at the wait.
    """

    inst: Instruction
    kind: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    run: Callable[[Waves], Any] | None
    complete: Callable[[Waves, Any], None] | None = None
    every_lane: bool = False
    matrix: Any = None


def allowed(inst: Instruction, names: Sequence[str] | frozenset[str], operands: int | None = None) -> None:
    """Refuse a modifier the row does not understand, and another number of operands where there is one."""
    for name in inst.modifiers:
        if name not in names:
            raise inst.error(f"modifier {name!r} is not understood on this instruction")
    if operands is not None and len(inst.operands) != operands:
        raise inst.error(f"expected {operands} operands, found {len(inst.operands)}")
