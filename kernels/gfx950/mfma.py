"""The matrix core: operand layouts, scales, arithmetic models, and the batching that makes them quick.

Layouts (16x16x128; 32x32x64 by the same rule). With G = 64 / rows lane groups, fp8/bf8 lane `rows * g + row` holds two runs
of 16 k, 16g.. and 16G + 16g..; fp6/bf6/fp4 lane holds k = 32g..32g+31. The scale byte in lane `rows * b + row` applies to
the true K block 32b..32b+31 of that row; op_sel + 2 * op_sel_hi picks the byte, independently for A and B. C/D register
r = 4q + s, lane `rows * g + col` is row 4Gq + 4g + s, column col. EXEC is ignored.

MFMAs of one basic block that do not depend on one another run as one matrix product a wave. That changes no bit: each
result is still rounded per instruction, from a sum that is exact or checked (see `_rne`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mxgate.kernels.gfx950 import floats
from mxgate.kernels.gfx950.state import Array, Get, Layout, Step, Waves, allowed, vector_source
from mxgate.kernels.gfx950.text import Instruction, Operand

MODELS = {
    "exact-rne": "products and their sum with C are exact, one round to nearest even to float32 per instruction",
    "cdna3-like": "16 products at a time are summed exactly and cut to float32 toward zero, then added to the accumulator and cut again",
}


class Element(NamedTuple):
    """An operand format: registers a lane holds for `k` elements, how to decode, and the bits a value spans (1 unit =
    its least subnormal 2**low, largest below 2**(low + span)); scaled forms may use it."""

    name: str
    bits: int
    span: int
    low: int


FORMATS = {
    0: Element("fp8", 8, 18, -9),
    1: Element("bf8", 8, 32, -16),
    2: Element("fp6", 6, 6, -3),
    3: Element("bf6", 6, 9, -4),
    4: Element("fp4", 4, 4, -1),
}
BF16, F16 = Element("bf16", 16, 400, -133), Element("f16", 16, 41, -24)
FP8, BF8 = FORMATS[0], FORMATS[1]


class Form(NamedTuple):
    """rows (= columns), contraction length, the two formats (None: cbsz and blgp say), whether scales follow, passes."""

    rows: int
    k: int
    a: Element | None
    b: Element | None
    scaled: bool
    passes: int  # of the widest format; f8f6f4 forms without an 8-bit operand take half


FORMS: dict[str, Form] = {
    "v_mfma_scale_f32_16x16x128_f8f6f4": Form(16, 128, None, None, True, 8),
    "v_mfma_scale_f32_32x32x64_f8f6f4": Form(32, 64, None, None, True, 16),
    "v_mfma_f32_16x16x128_f8f6f4": Form(16, 128, None, None, False, 8),
    "v_mfma_f32_32x32x64_f8f6f4": Form(32, 64, None, None, False, 16),
    **{
        f"v_mfma_f32_{r}x{r}x{k}_{suffix}": Form(r, k, e, e, False, 4 if r == 16 else 8)
        for r, k in ((16, 32), (32, 16), (16, 16), (32, 8))
        for suffix, e in (("f16", F16), ("bf16" if k * r == 512 else "bf16_1k", BF16))
    },
    **{
        f"v_mfma_f32_{r}x{r}x{k}_{x}_{y}": Form(
            r, k, {"fp8": FP8, "bf8": BF8}[x], {"fp8": FP8, "bf8": BF8}[y], False, 4 if r == 16 else 8
        )
        for r, k in ((16, 32), (32, 16))
        for x in ("fp8", "bf8")
        for y in ("fp8", "bf8")
    },
}


def wait_states(passes: int) -> tuple[int, int, int]:
    """Wait states after an MFMA before (a VALU or memory read or an A/B read, an overlapping but not equal C read, a VALU write).

    LLVM's gfx950 hazard recognizer: 4 passes 8, 6, 7; 8 passes 12, 10, 11; 16 passes 20, 18, 19.
    """
    return passes + 4, passes + 2, passes + 3


@dataclass(frozen=True)
class Source:
    """One A or B operand: its planes, format, and its scale's (getter, byte), plus what identifies it in a block."""

    planes: tuple[int, ...]
    element: Element
    scale: Get | None
    scale_ids: tuple[int, ...]
    byte: int
    key: tuple[object, ...]


@dataclass(frozen=True)
class Matrix:
    """A bound MFMA: what `Batch` needs. c: planes, or a constant."""

    form: Form
    a: Source
    b: Source
    d: tuple[int, ...]
    c: tuple[int, ...] | float
    passes: int


def bind(lay: Layout, inst: Instruction) -> Step:
    form = FORMS[inst.base]
    f8f6f4 = form.a is None
    allowed(inst, (("cbsz", "blgp") if f8f6f4 else ()) + (("op_sel", "op_sel_hi") if form.scaled else ()))
    want = 6 if form.scaled else 4
    if len(inst.operands) != want:
        raise inst.error(f"expected {want} operands, found {len(inst.operands)}")
    d, a, b, c = inst.operands[:4]
    codes = [int(str(inst.modifiers.get(n, 0))) for n in ("cbsz", "blgp")]
    if any(x not in FORMATS for x in codes):
        raise inst.error("cbsz and blgp are 0 fp8, 1 bf8, 2 fp6, 3 bf6 or 4 fp4")
    elements = [form.a or FORMATS[codes[0]], form.b or FORMATS[codes[1]]]
    n = 4 if form.rows == 16 else 16
    reads: list[int] = []

    def planes(o: Operand, count: int) -> tuple[int, ...]:
        if o.kind not in "va" or o.count < count:
            raise inst.error(f"operand {o.text} must be {count} vector registers")
        return tuple(lay.plane(inst, o, k) for k in range(count))

    def select(name: str) -> tuple[int, ...]:
        v = inst.modifiers.get(name, (0, 0, 0))
        if not isinstance(v, tuple) or len(v) < 2 or any(x not in (0, 1) for x in v):
            raise inst.error(f"{name} must be a list of 0 and 1")
        return v

    low, high = select("op_sel"), select("op_sel_hi")
    sources = []
    for side, (o, e) in enumerate(zip((a, b), elements, strict=True)):
        lane_elements = form.k * form.rows // 64
        p = planes(o, lane_elements * e.bits // 32)
        scale, scale_ids, byte = None, (), 0
        key: tuple[object, ...] = (p, e.name)
        if form.scaled:
            so = inst.operands[4 + side]
            byte = low[side] + 2 * high[side]
            scale, scale_ids = vector_source(lay, inst, so, "u"), lay.ids(inst, so, 1)
            key += (so.kind, so.index, so.value, byte)
        sources.append(Source(p, e, scale, scale_ids, byte, key))
        reads += [*p, *scale_ids]
    dp = planes(d, n)
    cp: tuple[int, ...] | float
    if c.kind == "const":
        cp = float(c.value)
        if isinstance(c.value, int) and c.value:
            cp = float(np.array(c.value & 0xFFFFFFFF, np.uint32).view(np.float32))
    else:
        cp = planes(c, n)
        reads += cp
    eight = any(e.bits == 8 for e in elements)
    passes = form.passes if not f8f6f4 or eight else form.passes // 2
    return Step(
        inst, "matrix", tuple(reads), dp, None, None, True, Matrix(form, sources[0], sources[1], dp, cp, passes)
    )


# ------------------------------------------------------------------------------------- decoding
def _sixes(octets: Array) -> Array:
    """[..., 24] bytes -> [..., 32] six-bit codes, lowest bits first."""
    b = octets.reshape(*octets.shape[:-1], 8, 3)
    x, y, z = b[..., 0], b[..., 1], b[..., 2]
    codes = np.stack([x & 63, (x >> 6) | ((y & 15) << 2), (y >> 4) | ((z & 3) << 4), z >> 2], -1)
    return codes.reshape(*octets.shape[:-1], 32)


def decode(
    raw: Sequence[Array], scales: Sequence[Array] | None, element: Element, form: Form
) -> tuple[Array, Array | None]:
    """Operands as float64 [waves, operands * rows, k] in true k order, and their scale bytes [waves, operands * rows, blocks].

    raw: an array uint32[registers, waves, 64] per operand; scales: uint32[waves, 64] of scale bytes per operand, or None.
    """
    x = np.stack(raw)
    n, registers, waves, _ = x.shape
    rows, groups = form.rows, 64 // form.rows
    if element.bits == 8 and registers == 8:
        x = x.reshape(n, 2, 4, waves, groups // 2, 2, rows).transpose(3, 0, 6, 1, 4, 5, 2)
    else:
        x = x.reshape(n, registers, waves, groups, rows).transpose(2, 0, 4, 3, 1)
    x = np.ascontiguousarray(x)
    if element.bits == 8:
        y = floats.PAIRS8[element.name].take(x.view(np.uint16)).view(np.float64)
    elif element.bits == 4:
        y = floats.PAIRS4.take(x.view(np.uint8)).view(np.float64)
    elif element.bits == 6:
        y = (floats.FP6 if element.name == "fp6" else floats.BF6).take(_sixes(x.view(np.uint8)))
    elif element.name == "bf16":
        y = (x.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    else:
        y = x.view(np.float16).astype(np.float64)
    y = y.reshape(waves, n * rows, form.k)
    if scales is None:
        return y, None
    s = np.stack(scales).reshape(n, waves, groups, rows).transpose(1, 0, 3, 2).reshape(waves, n * rows, groups)
    blocks = y.reshape(waves, n * rows, groups, 32)
    blocks *= floats.E8M0.take(s)[..., None]
    return y, s


# ------------------------------------------------------------------------------------- batches
class Batch:
    """Independent MFMAs of one basic block, run together. Built while a block is planned, then `close`d."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.members: list[tuple[Matrix, int, int]] = []  # with the capture slots of A and B
        self.results: set[int] = set()
        self.accumulators: set[int] = set()

    def conflicts(self, m: Matrix) -> bool:
        """Whether m must come after what is here: it reads a result, or writes what is still to be read or written."""
        reads = {*m.a.planes, *m.b.planes, *m.a.scale_ids, *m.b.scale_ids}
        if not isinstance(m.c, float):
            reads |= set(m.c)
        d = set(m.d)
        if any((m.a.key, m.b.key) == (o.a.key, o.b.key) for o, _, _ in self.members):
            return True  # one result a pair of operands is what a rectangle can hold
        return bool(reads & self.results or d & self.results or d & self.accumulators)

    def add(self, m: Matrix, slot_a: int, slot_b: int) -> None:
        self.members.append((m, slot_a, slot_b))
        self.results |= set(m.d)
        if not isinstance(m.c, float):
            self.accumulators |= set(m.c)

    def touches(self, registers: Sequence[int], writes: bool) -> bool:
        """Whether a step that reads (or writes) these registers must wait for the batch."""
        mine = self.results | self.accumulators if writes else self.results
        return not mine.isdisjoint(registers)

    def close(self) -> Callable[[Waves], None]:
        """The batch as one step: members grouped by form and format, then into rectangles of A x B operands."""
        kinds: dict[tuple[object, ...], list[tuple[Matrix, int, int]]] = {}
        for m, sa, sb in self.members:
            constant = m.c if isinstance(m.c, float) else None
            kinds.setdefault((m.form, m.a.element, m.b.element, constant), []).append((m, sa, sb))
        parts = [_Product(members, self.model) for members in kinds.values()]
        if len(parts) == 1:
            return parts[0].run

        def run(st: Waves) -> None:
            for p in parts:
                p.run(st)

        return run


class _Product:
    """Members of one form, format pair and kind of accumulator (registers, or one constant)."""

    def __init__(self, members: list[tuple[Matrix, int, int]], model: str) -> None:
        first = members[0][0]
        self.form, self.ea, self.eb = first.form, first.a.element, first.b.element
        self.model = model
        partners: dict[int, dict[int, Matrix]] = {}
        for m, sa, sb in members:
            partners.setdefault(sa, {})[sb] = m
        by_set: dict[tuple[int, ...], list[int]] = {}
        for sa, row in partners.items():
            by_set.setdefault(tuple(sorted(row, key=lambda s, r=row: r[s].d)), []).append(sa)
        groups: dict[frozenset[int], tuple[tuple[int, ...], list[int]]] = {}
        for order, rows in by_set.items():
            groups.setdefault(frozenset(order), (order, []))[1].extend(rows)
        self.slots_a: list[int] = []
        self.slots_b = sorted({sb for _, _, sb in members})
        self.rectangles: list[tuple[slice, Array | None, int, Array, Array | float]] = []
        for order, rows in groups.values():
            rows.sort(key=lambda s, o=order: partners[s][o[0]].d)
            at = len(self.slots_a)
            self.slots_a += rows
            d = np.array([[partners[s][o].d for o in order] for s in rows])
            cs = [[partners[s][o].c for o in order] for s in rows]
            columns = [self.slots_b.index(o) for o in order]
            index = None if columns == list(range(len(self.slots_b))) else np.array(columns)
            c: Array | float = first.c if isinstance(first.c, float) else np.array(cs)
            self.rectangles.append((slice(at, at + len(rows)), index, len(order), d, c))
        operand_bytes = (len(self.slots_a) + len(self.slots_b)) * self.form.rows * self.form.k * 8
        self.chunk = max(1, 393216 // operand_bytes)
        self.exact_bits = 53 - (self.form.k - 1).bit_length() - self.ea.span - self.eb.span

    def run(self, st: Waves) -> None:
        form = self.form
        groups = 64 // form.rows
        quads = 1 if form.rows == 16 else 4
        cap = st.captured
        for lo in range(0, st.n, self.chunk):
            hi = min(lo + self.chunk, st.n)
            w = hi - lo
            a, sa = self._side(cap, self.slots_a, self.ea, lo, hi)
            b, sb = self._side(cap, self.slots_b, self.eb, lo, hi)
            for rows, index, nb, d, c in self.rectangles:
                x = a[:, rows.start * form.rows : rows.stop * form.rows]
                y, ys = b, sb
                if index is not None:
                    pick = (index[:, None] * form.rows + np.arange(form.rows)).ravel()
                    y = b[:, pick]
                    ys = None if sb is None else sb[:, pick]
                xs = None if sa is None else sa[:, rows.start * form.rows : rows.stop * form.rows]
                na = rows.stop - rows.start
                shape = (na, nb, quads, 4, w, groups, form.rows)

                def turn(p: Array, na: int = na, nb: int = nb, w: int = w) -> Array:
                    """[w, na * rows, nb * rows] -> registers' order."""
                    return p.reshape(w, na, quads, groups, 4, nb, form.rows).transpose(1, 5, 2, 4, 0, 3, 6)

                acc: Array | float
                if isinstance(c, float):
                    acc = c
                else:
                    acc = st.registers[c.ravel(), lo:hi].view(np.float32).reshape(shape)
                with np.errstate(all="ignore"):
                    if self.model == "exact-rne":
                        out = self._rne(x, y, xs, ys, acc, turn)
                    else:
                        out = _groups_of_16(x, y, acc, turn)
                st.registers[d.ravel(), lo:hi] = out.reshape(d.size, w, 64).view(np.uint32)

    @staticmethod
    def _side_scales(cap: dict[int, Array], slots: list[int], lo: int, hi: int) -> list[Array] | None:
        found = [cap.get(-1 - s) for s in slots]
        return None if found[0] is None else [x[lo:hi] for x in found if x is not None]

    def _side(
        self, cap: dict[int, Array], slots: list[int], e: Element, lo: int, hi: int
    ) -> tuple[Array, Array | None]:
        return decode([cap[s][:, lo:hi] for s in slots], self._side_scales(cap, slots, lo, hi), e, self.form)

    def _rne(
        self, x: Array, y: Array, xs: Array | None, ys: Array | None, acc: Array | float, turn: Callable[[Array], Array]
    ) -> Array:
        """One rounding of the exact sum. float64 sums of these products are exact while scales spread little; then only a
        sum that lands on a float32 tie can go wrong, and is redone. Where they spread, an error bound says which sums are
        not certain, and those are redone."""
        product = np.matmul(x, y.swapaxes(1, 2))
        s = np.add(turn(product), acc, dtype=np.float64)
        if not self._narrow(xs, ys):
            bound = turn(np.matmul(np.abs(x), np.abs(y).swapaxes(1, 2))) * 2.0**-44 + np.abs(s) * 2.0**-51
            out = s.astype(np.float32)
            unsure = (
                ((s - bound).astype(np.float32) != (s + bound).astype(np.float32)) & np.isfinite(bound) & np.isfinite(s)
            )
        else:
            out = s.astype(np.float32)
            tie = (s.view(np.int64) & 0x1FFFFFFF) == 0x10000000
            if not tie.any():
                return out
            unsure = tie & np.isfinite(s)
        if unsure.any():
            self._redo(np.argwhere(unsure), x, y, acc, out)
        return out

    def _narrow(self, xs: Array | None, ys: Array | None) -> bool:
        if self.exact_bits < 0:
            return False
        if xs is None or ys is None:
            return self.ea.low + self.eb.low >= -149
        lowest = int(xs.min()) + int(ys.min()) - 254 + self.ea.low + self.eb.low
        if lowest < -149:
            return False
        if int(xs.max()) + int(ys.max()) - int(xs.min()) - int(ys.min()) <= self.exact_bits:
            return True
        spread = int((xs.max(-1) - xs.min(-1)).max()) + int((ys.max(-1) - ys.min(-1)).max())
        return spread <= self.exact_bits

    def _redo(self, where: Array, x: Array, y: Array, acc: Array | float, out: Array) -> None:
        """Exact sums, rounded once, for the listed elements (indices into the registers' order)."""
        i, j, quad, low, w, g, col = where.T
        groups, rows = 64 // self.form.rows, self.form.rows
        row = i * rows + quad * 4 * groups + 4 * g + low
        terms = x[w, row] * y[w, j * rows + col]
        c = np.full(len(where), acc) if isinstance(acc, float) else acc[tuple(where.T)].astype(np.float64)
        if 53 - 5 - self.ea.span - self.eb.span >= 0:  # each block of 32 sums exactly, so five terms are left
            blocks = terms.reshape(len(where), -1, 32).sum(-1)
            out[tuple(where.T)] = floats.sum_once(np.concatenate([blocks, c[:, None]], 1))
            return
        for n, at in enumerate(map(tuple, where)):
            values = [*terms[n].tolist(), float(c[n])]
            total = math.fsum(values)
            rest = math.fsum([*values, -total])
            out[at] = floats.to_odd(np.array(total), np.array(rest)).astype(np.float32)


def _cut(x: Array) -> Array:
    """Toward zero to float32 precision, in place."""
    bits = x.view(np.int64)
    np.bitwise_and(bits, ~np.int64(0x1FFFFFFF), out=bits)
    return x


def _groups_of_16(x: Array, y: Array, acc: Array | float, turn: Callable[[Array], Array]) -> Array:
    total: Array | None = None
    for k in range(0, x.shape[2], 16):
        part = turn(_cut(np.matmul(x[:, :, k : k + 16], y[:, :, k : k + 16].swapaxes(1, 2))))
        total = _cut(np.add(part, acc if total is None else total, dtype=np.float64))
    assert total is not None
    return total.astype(np.float32)
