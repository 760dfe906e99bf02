"""The matrix core: operand layouts, scales, arithmetic models, and the batching that makes them quick.

Layouts (16x16x128; 32x32x64 by the same rule). With G = 64 / rows lane groups, fp8/bf8 lane `rows * g + row` holds
two runs of 16 k, 16g.. and 16G + 16g..; fp6/bf6/fp4 lane holds k = 32g..32g+31. The scale byte in lane `rows * b +
row` applies to the true K block 32b..32b+31 of that row; op_sel + 2 * op_sel_hi picks the byte, independently for A
and B. C/D register r = 4q + s, lane `rows * g + col` is row 4Gq + 4g + s, column col. EXEC is ignored.

MFMAs of one basic block that do not depend on one another run as one matrix product a wave. That changes no bit: each
result is still rounded per instruction, from a sum that is exact or checked (see `_rne`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mxgate.kernels.gfx950 import floats
from mxgate.kernels.gfx950.state import Array, Get, Layout, Step, Sums, Waves, allowed, constant, vector_source
from mxgate.kernels.gfx950.text import Instruction, Operand

MODELS = {
    "exact-rne": "products and their sum with C are exact, rounded once an instruction, to nearest even float32",
    "cdna3-like": "sums of 16 products are exact and cut to float32 toward zero, then added to C and cut again",
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
F32 = Element("f32", 32, 400, -149)
FP8, BF8 = FORMATS[0], FORMATS[1]


LEAST = -149  # log2 of the unit of which every float32 is a whole multiple
TINY = 2.0**-140
Index = Any  # of waves: a slice, or an array of numbers
FEW = 16  # waves
ROOM = 1 << 22  # bytes of decoded operands kept while the waves that share them are multiplied
CHUNK = 1 << 17  # bytes of products, or of operands to decode, at a time: they stay in the second-level cache


class Form(NamedTuple):
    """rows (= columns), contraction length, the two formats (None: cbsz and blgp say), whether scales follow,
    passes."""

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
    "v_mfma_f32_16x16x4_f32": Form(16, 4, F32, F32, False, 8),
    "v_mfma_f32_32x32x2_f32": Form(32, 2, F32, F32, False, 16),
    **{
        f"v_mfma_f32_{r}x{r}x{k}_{x}_{y}": Form(
            r, k, {"fp8": FP8, "bf8": BF8}[x], {"fp8": FP8, "bf8": BF8}[y], False, 4 if r == 16 else 8
        )
        for r, k in ((16, 32), (32, 16))
        for x in ("fp8", "bf8")
        for y in ("fp8", "bf8")
    },
}


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


def wait_states(m: Matrix) -> tuple[int, int, int]:
    """Wait states after an MFMA before (a VALU or memory read or an A/B read, an overlapping but not equal C read, a
    VALU write).

    LLVM's gfx950 hazard recognizer: 4 passes 8, 6, 7; 8 passes 12, 10, 11; 16 passes 20, 18, 19. Float32 forms, which
    another unit runs: 8 passes 10, 8, 10; 16 passes 18, 16, 18.
    """
    return (m.passes + 2, m.passes, m.passes + 2) if m.a.element is F32 else (m.passes + 4, m.passes + 2, m.passes + 3)


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
        scale: Get | None = None
        scale_ids: tuple[int, ...] = ()
        byte = 0
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
        cp = float(constant(inst, c, "f"))
    else:
        cp = planes(c, n)
        reads += cp
    eight = any(e.bits == 8 for e in elements)
    passes = form.passes if not f8f6f4 or eight else form.passes // 2
    return Step(
        inst, "matrix", tuple(reads), dp, None, None, True, Matrix(form, sources[0], sources[1], dp, cp, passes)
    )


# ------------------------------------------------------------------------------------- operands as they were
class Shelf:
    """Where a block keeps operands of one number of registers until its products run: registers may be reused before.

    A group of waves holds words, uint32[waves, places, registers, 64], and scales, uint8[waves, places, 64]. Operands
    are numbered while the block is planned, and its products then put those of a side next to one another.
    """

    def __init__(self, registers: int) -> None:
        self.registers, self.operands = registers, 0
        self.places: dict[int, int] = {}

    def place(self, operands: list[int]) -> slice | list[int]:
        """Give operands their places, if they have none."""
        return _range([self.places.setdefault(k, len(self.places)) for k in operands])

    def held(self, st: Waves) -> tuple[Array, Array]:
        """The words and scales of a group of waves."""
        held = st.shelf.get(self.registers)
        if held is None or held[0].shape[1] < self.operands:
            places = (st.n, self.operands)
            held = np.empty((*places, self.registers, 64), np.uint32), np.empty((*places, 64), np.uint8)
            st.shelf[self.registers] = held
        return held

    def keep(self, operand: int, source: Source) -> Callable[[Waves], None]:
        planes, shift = _range(list(source.planes)), np.uint32(8 * source.byte)

        def capture(st: Waves) -> None:
            words, scales = self.held(st)
            place = self.places[operand]
            words[:, place] = st.registers[planes].swapaxes(0, 1)
            if source.scale is not None:
                scales[:, place] = source.scale(st) >> shift

        return capture


def _sixes(octets: Array) -> Array:
    """[..., 24] bytes -> [..., 32] six-bit codes, lowest bits first."""
    b = octets.reshape(*octets.shape[:-1], -1, 3)
    x, y, z = b[..., 0], b[..., 1], b[..., 2]
    return np.stack([x & 63, (x >> 6) | ((y & 15) << 2), (y >> 4) | ((z & 3) << 4), z >> 2], -1)


_rooms: dict[str, Array] = {}


def _room(use: str, shape: tuple[int, ...], dtype: type = float) -> Array:
    """Memory for a passing array, one of each use: used again, it stays in the cache and costs no page faults."""
    size = math.prod(shape)
    room = _rooms.get(use)
    if room is None or room.size < size:
        room = _rooms[use] = np.empty(size, dtype)
    return room[:size].reshape(shape)


def decode(words: Array, element: Element, form: Form, out: Array) -> None:
    """Operands into float64 [waves, operands, rows, k] in true k order; words as a Shelf holds them."""
    waves, n, registers, _ = words.shape
    rows, groups = form.rows, 64 // form.rows
    # Eight registers of 8-bit elements are two runs of 16 k, all else is one run.
    runs = 2 if element.bits == 8 and registers == 8 else 1
    q = registers // runs
    lanes = words.reshape(waves, n, runs, q, groups, rows).transpose(0, 1, 5, 2, 4, 3)
    octets = np.ascontiguousarray(lanes).view(np.uint8)
    if element.bits == 8:
        table = floats.FP8 if element.name == "fp8" else floats.BF8
        index = _room("indices", octets.shape, np.intp)
        np.copyto(index, octets)
        table.take(index, out=out.reshape(octets.shape), mode="clip")
        return
    if element.bits == 4:
        y = floats.PAIRS4.take(octets).view(np.float64)
    elif element.bits == 6:
        codes = _sixes(octets)
        y = (floats.FP6 if element.name == "fp6" else floats.BF6).take(codes)
    elif element.name == "bf16":
        y = (octets.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    elif element.name == "f32":
        y = octets.view(np.float32)
    else:
        y = octets.view(np.float16)
    np.copyto(out, y.reshape(out.shape))


def apply_scales(y: Array, scales: Array, form: Form) -> None:
    """Multiply [waves, operands, rows, k] by 2**(byte - 127) of each row's 32-blocks, in place.

    scales: uint8[waves, operands, 64] as a Shelf holds them.
    """
    waves, n, _ = scales.shape
    s = floats.E8M0.take(scales.reshape(waves, n, 64 // form.rows, form.rows).swapaxes(2, 3)).reshape(-1, 1)
    blocks = y.reshape(-1, 32)
    np.multiply(blocks, s, out=blocks)


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
        return bool(reads & self.results or d & self.results or d & self.accumulators)

    def holds(self, slot_a: int, slot_b: int) -> bool:
        """Whether this pair of operands is here already: one result a pair is what a rectangle can hold."""
        return any((slot_a, slot_b) == (a, b) for _, a, b in self.members)

    def add(self, m: Matrix, slot_a: int, slot_b: int) -> None:
        self.members.append((m, slot_a, slot_b))
        self.results |= set(m.d)
        if not isinstance(m.c, float):
            self.accumulators |= set(m.c)

    def touches(self, registers: Iterable[int], writes: bool) -> bool:
        """Whether a step that reads (or writes) these registers must wait for the batch."""
        mine = self.results | self.accumulators if writes else self.results
        return not mine.isdisjoint(registers)

    def close(self, shelves: Mapping[int, Shelf]) -> list[Product]:
        """The batch as products: members grouped by form, format and accumulator, then into rectangles of A x B
        operands."""
        kinds: dict[tuple[object, ...], list[tuple[Matrix, int, int]]] = {}
        for m, sa, sb in self.members:
            constant = m.c if isinstance(m.c, float) else None
            kinds.setdefault((m.form, m.a.element, m.b.element, constant), []).append((m, sa, sb))
        return [Product(members, self.model, shelves) for members in kinds.values()]


class Tile:
    """Result registers of a rectangle of MFMAs: planes [A operands, B operands, registers].

    While only products touch them, their values live in `st.tiles` as float32[waves, rows, columns], and the
    registers are written when something else asks (the planner knows when).
    """

    def __init__(self, form: Form, planes: Array) -> None:
        self.form, self.planes, self.flat = form, planes, planes.ravel()
        self.registers = frozenset(int(p) for p in self.flat)
        self.key = (form.rows, *planes.shape, planes.tobytes())
        self.shape = (planes.shape[0] * form.rows, planes.shape[1] * form.rows)

    def _order(self, waves: int) -> tuple[int, ...]:
        na, nb, n = self.planes.shape
        return na, nb, n // 4, 4, waves, 64 // self.form.rows, self.form.rows

    def load(self, st: Waves, out: Array, waves: Index) -> None:
        na, nb, quads, four, w, groups, rows = self._order(len(out))
        planes = st.registers[self.flat if isinstance(waves, slice) else self.flat[:, None], waves]
        values = planes.view(np.float32).reshape(na, nb, quads, four, w, groups, rows)
        out.reshape(w, na, quads, groups, four, nb, rows)[...] = values.transpose(4, 0, 2, 5, 3, 1, 6)

    def release(self, st: Waves) -> None:
        """Write the registers."""
        tile = st.tiles.pop(self.key).values
        for lo in range(0, st.n, 16):
            part = tile[lo : lo + 16]
            na, nb, quads, four, w, groups, rows = self._order(len(part))
            values = part.reshape(w, na, quads, groups, four, nb, rows).transpose(1, 5, 2, 4, 0, 3, 6)
            st.registers[self.flat, lo : lo + w] = values.reshape(-1, w, 64).view(np.uint32)


@dataclass(frozen=True)
class Rectangle:
    """A run of A operands times some or all of the B operands, into one tile."""

    a: slice
    b: slice | list[int]
    result: Tile
    accumulator: Tile | float


class Grain(NamedTuple):
    """A rectangle's products, wave by wave.

    most, float64[waves]: no finite sum of them is larger in magnitude. unit, int64[waves]: log2 of a number that
    divides them, below LEAST where float64 does not hold every sum of them exactly or one is a float32 denormal that
    needs more care. dust, bool[waves, K blocks] or None: blocks in which every scale is 2**-127, as of masked tokens.
    Their products are too small to change anything but the rounding of a tie or the sign of a zero, and `unit` leaves
    them out.
    """

    most: Array
    unit: Array
    dust: Array | None

    def of(self, waves: Index) -> tuple[int | None, Index | None]:
        """Of some waves: their unit, None where sums are not exact; the columns that are dust, None if there are
        none."""
        unit = _least(self.unit, waves)
        if unit < LEAST:
            return None, None
        if self.dust is None:
            return unit, None
        dust = self.dust[waves]
        if len(dust) > 1 and (dust != dust[0]).any():
            return None, None
        return unit, _place(np.flatnonzero(np.repeat(dust[0], 32))) if dust[0].any() else None


def _least(x: Array, waves: Index) -> Any:
    """The least of some waves' values."""
    return x[waves.start].item() if _is_one(waves) else x[waves].min().item()


def _most(x: Array, waves: Index) -> Any:
    """The greatest of some waves' values."""
    return x[waves.start].item() if _is_one(waves) else x[waves].max().item()


def _is_one(waves: Index) -> bool:
    return isinstance(waves, slice) and waves.stop - waves.start == 1


class Side:
    """One side's operands of a group of waves, of which those that hold the same bytes are decoded once.

    Waves of a workgroup share operands, and so do workgroups of one row or column of tiles. numbers[waves]: which of
    the different operands each has; firsts: a wave that has each.
    """

    def __init__(self, name: str, words: Array, scales: Array | None, element: Element, form: Form) -> None:
        self.name = name
        self.words, self.scales, self.element, self.form = words, scales, element, form
        self.nbytes = words.shape[1] * form.rows * form.k * 8
        if len(words) <= FEW:  # what they may share is not worth looking for
            self.firsts = self.numbers = np.arange(len(words))
            return
        rows = [x.reshape(len(x), -1).view(np.uint64) for x in (words, scales) if x is not None]
        # One register of each operand tells most of them apart.
        marks = np.ascontiguousarray(words[:, :, 0]).reshape(len(words), -1).view(np.uint64).sum(1)
        if scales is not None:
            marks += rows[1].sum(1) * np.uint64(0x9E3779B97F4A7C15)
        _, first, guess = np.unique(marks, return_index=True, return_inverse=True)
        first = first[guess]
        for i, j in enumerate(first.tolist()):  # marks may be equal by chance
            if i != j and any(x[i].tobytes() != x[j].tobytes() for x in rows):
                first[i] = i
        self.firsts, self.numbers = np.unique(first, return_inverse=True)

    def decode(self, numbers: Array) -> Decoded:
        """Some of the different operands. They last until this side is decoded again."""
        waves = _place(self.firsts[numbers])
        words, scales = self.words[waves], None if self.scales is None else self.scales[waves]
        out = _room(self.name, (*words.shape[:2], self.form.rows, self.form.k))
        step = max(1, CHUNK // self.nbytes)
        for lo in range(0, len(out), step):
            part = out[lo : lo + step]
            decode(words[lo : lo + step], self.element, self.form, part)
            if scales is not None:
                apply_scales(part, scales[lo : lo + step], self.form)
        live = words.any(2)
        if scales is not None:
            live |= scales == 0xFF  # which makes NaN of zeros
        live = live.reshape(*words.shape[:2], -1, self.form.rows).any(2)
        return Decoded(out, None if live.all() else live)


class Decoded(NamedTuple):
    """Different operands of one side.

    values: float64[different, operands, rows, k], scaled. live, bool[different, operands, rows]: rows that hold more
    than zeros, as rows past a buffer's end do not; None where all do.
    """

    values: Array
    live: Array | None

    def against(self, other: Decoded) -> Decoded:
        """The same, with every row live where zeros meet a NaN or an infinity of the other side."""
        return self if self.live is None or np.isfinite(other.values.sum()) else self._replace(live=None)

    def take(self, which: Index, operands: slice | list[int]) -> tuple[Array, slice]:
        """Of some waves and operands: float64[waves, rows, k], and the run of rows that the live ones lie in."""
        x = self.values[which][:, operands]
        x = x.reshape(len(x), -1, x.shape[-1])
        if self.live is None:
            return x, slice(0, x.shape[1])
        live = np.flatnonzero(self.live[which][:, operands].any(0))
        return x, slice(int(live[0]), int(live[-1]) + 1) if len(live) else slice(0, 0)


def _place(numbers: Array) -> Index:
    """Numbers as a slice where they follow one another, or one number again and again: taking them copies nothing."""
    first, last, n = int(numbers[0]), int(numbers[-1]), len(numbers)
    if last == first and (n == 1 or bool((numbers == first).all())):
        return slice(first, first + 1)
    if last - first == n - 1 and bool((np.diff(numbers) == 1).all()):
        return slice(first, last + 1)
    return numbers


def _blocks(a: Side, b: Side) -> Iterator[tuple[Array, Decoded, Array, Decoded, Array]]:
    """(waves, A operands, which of them, B operands, which) of all waves, as many at a time as ROOM holds operands of.

    Waves with the same operands come together.
    """
    # Waves whose A operands meet the same B operands elsewhere lie near one another.
    least = np.full(len(a.firsts), len(b.firsts))
    np.minimum.at(least, a.numbers, b.numbers)
    order = np.lexsort((b.numbers, a.numbers, least[a.numbers]))
    if len(a.firsts) * a.nbytes + len(b.firsts) * b.nbytes <= ROOM:
        yield _block(a, b, order)
        return
    start, seen_a, seen_b = 0, set[int](), set[int]()
    for i, (p, q) in enumerate(zip(a.numbers[order].tolist(), b.numbers[order].tolist(), strict=True)):
        size = (len(seen_a) + (p not in seen_a)) * a.nbytes + (len(seen_b) + (q not in seen_b)) * b.nbytes
        if size > ROOM and i > start:
            yield _block(a, b, order[start:i])
            start, seen_a, seen_b = i, set(), set()
        seen_a.add(p)
        seen_b.add(q)
    yield _block(a, b, order[start:])


def _block(a: Side, b: Side, waves: Array) -> tuple[Array, Decoded, Array, Decoded, Array]:
    (seen_a, numbers_a), (seen_b, numbers_b) = (np.unique(x.numbers[waves], return_inverse=True) for x in (a, b))
    return waves, a.decode(seen_a), numbers_a, b.decode(seen_b), numbers_b


def _parts(numbers: Array, most: int) -> Iterator[slice]:
    """Runs of at most `most`; one that several share is not mixed with others."""
    start, n = 0, len(numbers)
    shared = np.diff(numbers, prepend=-1, append=-1) == 0  # between i - 1 and i
    for i in range(1, n + 1):
        if i == n or i - start == most or (not shared[i] and (shared[i - 1] or shared[i + 1])):
            yield slice(start, i)
            start = i


class Product:
    """Members of one form, format pair and kind of accumulator (registers, or one constant)."""

    def __init__(self, members: list[tuple[Matrix, int, int]], model: str, shelves: Mapping[int, Shelf]) -> None:
        first = members[0][0]
        self.form, self.ea, self.eb = first.form, first.a.element, first.b.element
        self.model = model
        partners: dict[int, dict[int, Matrix]] = {}
        for m, sa, sb in members:
            partners.setdefault(sa, {})[sb] = m
        self.shelf_a, self.shelf_b = (shelves[len(s.planes)] for s in (first.a, first.b))
        groups: dict[frozenset[int], list[int]] = {}
        for sa, row in partners.items():
            groups.setdefault(frozenset(row), []).append(sa)
        slots_a: list[int] = []
        slots_b = sorted({sb for _, _, sb in members}, key=lambda s: min(r[s].d for r in partners.values() if s in r))
        self.rectangles: list[Rectangle] = []
        for chosen, rows in groups.items():
            order = [b for b in slots_b if b in chosen]
            rows.sort(key=lambda s, o=order[0]: partners[s][o].d)  # type: ignore[misc]
            at = len(slots_a)
            slots_a += rows
            result = Tile(self.form, np.array([[partners[s][o].d for o in order] for s in rows]))
            c: Tile | float = 0.0
            if isinstance(first.c, float):
                c = first.c
            else:
                c = Tile(self.form, np.array([[partners[s][o].c for o in order] for s in rows]))
            part = _range([slots_b.index(o) for o in order])
            self.rectangles.append(Rectangle(slice(at, at + len(rows)), part, result, c))
        self.places_a, self.places_b = self.shelf_a.place(slots_a), self.shelf_b.place(slots_b)
        self.chunk = max(1, CHUNK // (len(slots_a) * len(slots_b) * self.form.rows**2 * 8))
        self.exact_bits = 53 - (self.form.k - 1).bit_length() - self.ea.span - self.eb.span

    def run(self, st: Waves) -> None:
        """Every wave's product, a few waves at a time. Tiles not yet in `st.tiles` are loaded from their registers."""
        n, form = st.n, self.form
        (words_a, scales_a), (words_b, scales_b) = (
            (words[:, places], scales[:, places] if form.scaled else None)
            for (words, scales), places in (
                (self.shelf_a.held(st), self.places_a),
                (self.shelf_b.held(st), self.places_b),
            )
        )
        jobs = []
        for r in self.rectangles:
            held = st.tiles.get(r.result.key)
            in_place = held is not None and (isinstance(r.accumulator, float) or r.accumulator.key == r.result.key)
            sums = held or Sums(np.empty((n, *r.result.shape), np.float32), np.full(n, LEAST), np.full(n, math.inf))
            jobs.append((r, in_place, sums, self._grain(n, r, scales_a, scales_b)))
        sides = Side("A", words_a, scales_a, self.ea, form), Side("B", words_b, scales_b, self.eb, form)
        with np.errstate(all="ignore"):
            for waves, a, numbers_a, b, numbers_b in _blocks(*sides):
                a, b = a.against(b), b.against(a)
                for part in _parts(numbers_a, self.chunk):
                    w = _place(waves[part])
                    which_a, which_b = _place(numbers_a[part]), _place(numbers_b[part])
                    for r, in_place, sums, grain in jobs:
                        x, rows = a.take(which_a, r.a)
                        y, columns = b.take(which_b, r.b)
                        out = sums.values[w]
                        acc: Array | float = out
                        most = _most(sums.most, w) if in_place else math.inf  # of C
                        if isinstance(r.accumulator, float):
                            acc, most = r.accumulator, abs(r.accumulator)
                        elif not in_place:
                            acc = np.empty_like(out)
                            r.accumulator.load(st, acc, w)
                        unit, dust = grain.of(w)
                        if unit is not None:
                            unit = min(unit, _least(sums.unit, w) if acc is out else _unit(acc, unit))
                        inner = out[:, rows, columns]
                        if inner.size < out.size:
                            np.add(acc, np.float32(0), out=out)  # zeros times anything finite sum to +0
                            x, y, acc = x[:, rows], y[:, columns], acc if isinstance(acc, float) else inner
                        if inner.size:
                            reached = self._multiply(x, y, acc, inner, unit, dust, most + _most(grain.most, w))
                            most = reached if inner.size == out.size else max(most, reached)
                        sums.unit[w] = LEAST if unit is None else unit
                        sums.most[w] = most
                        if not isinstance(w, slice):
                            sums.values[w] = out
        for r, _, sums, _ in jobs:
            st.tiles[r.result.key] = sums

    def _multiply(
        self, x: Array, y: Array, acc: Array | float, out: Array, unit: int | None, dust: Index | None, most: float
    ) -> float:
        """One instruction's sums, by the model. The arguments and the answer are _rne's."""
        if self.model == "exact-rne":
            return self._rne(x, y, acc, out, unit, dust, most)
        _groups_of_16(x, y, acc, out, self.ea.span + self.eb.span + 4 <= 53)
        return math.inf

    def _grain(self, n: int, r: Rectangle, sa: Array | None, sb: Array | None) -> Grain:
        """What is known of a rectangle's products from their scales (uint8[waves, operands, 64])."""
        low = self.ea.low + self.eb.low
        high = low + self.ea.span + self.eb.span + (self.form.k - 1).bit_length()  # 2**high is above k products
        if self.exact_bits < 0 or sa is None or sb is None:
            return Grain(np.full(n, 2.0**high), np.full(n, low if self.exact_bits >= 0 else LEAST - 1), None)
        shape = (n, -1, 64 // self.form.rows, self.form.rows)
        a, b = sa[:, r.a].reshape(shape), sb[:, r.b].reshape(shape)
        low_a, low_b = a.min(2), b.min(2)
        dust = None
        if not low_a.all() and not low_b.all():
            dust = ~(a.any((1, 3)) | b.any((1, 3)))
            low_a, low_b = (np.where(dust[:, None, :, None], np.uint8(255), s).min(2) for s in (a, b))
        # Where all is dust the lowest is above the highest.
        high_a, high_b = np.maximum(a.max(2), low_a), np.maximum(b.max(2), low_b)
        spread = (high_a - low_a).max((1, 2)).astype(int) + (high_b - low_b).max((1, 2))
        unit = low_a.min((1, 2)).astype(int) + low_b.min((1, 2)) - 254 + low
        most = np.ldexp(1.0, high_a.max((1, 2)).astype(int) + high_b.max((1, 2)) - 254 + high)
        return Grain(most, np.where(spread <= self.exact_bits, unit, LEAST - 1), dust)

    def _rne(
        self, x: Array, y: Array, acc: Array | float, out: Array, unit: int | None, dust: Index | None, most: float
    ) -> float:
        """One rounding of the exact sum. Answers what `Sums.most` may hold of the results.

        unit: None, or float64 sums of the products are exact, dust (the columns of it) aside, and 2**unit divides them
        and C. Then sums with C below 2**53 units are exact too and the cast rounds once; of larger ones only a sum that
        lands on a float32 tie can go wrong, and is redone. Elsewhere an error bound says which sums are not certain;
        those are redone. most: no finite sum is larger; looked for where it leaves doubt.
        """
        s = _room("sums", out.shape)
        np.matmul(x, y.swapaxes(1, 2), out=s)
        np.add(s, acc, out=s)
        limit = 0.0 if unit is None else 2.0 ** (unit + (53 if dust is None else 52))
        if unit is None:
            most = math.inf
        elif not most < limit:
            most = max(float(s.max()), -float(s.min()))
        small = most < limit
        most *= 1 + 2.0**-20  # rounded, they may be a little larger
        if small and dust is None:
            np.copyto(out, s, casting="unsafe")
            return most
        bits, unsure = _room("bits", out.shape, np.int64), _room("unsure", out.shape, bool)
        if unit is not None:
            np.bitwise_and(s.view(np.int64), 0x1FFFFFFF, out=bits)
            np.equal(bits, 0x10000000, out=unsure)
            if dust is not None:
                # Its true sum, but for the power of two, says which way a tie falls, or zero's sign.
                rest = np.matmul(x[:, :, dust] * 2.0**254, y[:, :, dust].swapaxes(1, 2))
                tiny, zero = np.abs(s, out=bits.view(np.float64)) < TINY, s == 0
                if small and np.array_equal(tiny, zero):
                    # Half a unit moves no tie past the next float64, and float64 has room for it.
                    half = np.multiply(unsure, np.sign(rest) * 2.0 ** (unit - 1), out=bits.view(np.float64))
                    np.add(s, half, out=s)
                    if zero.any():
                        np.copysign(5e-324, rest, out=s, where=zero & (rest != 0))
                    np.copyto(out, s, casting="unsafe")
                    return most
                unsure |= tiny
        else:
            # A sum of k products in any order errs by at most k 2**-53 times the sum of magnitudes, itself at most
            # |x| |y|.
            factor = self.form.k * 1.01 * 2.0**-53
            unsure = _uncertain(s, _norm(x)[:, :, None] * (_norm(y) * factor)[:, None, :])
            if np.count_nonzero(unsure) > 64:
                unsure = _uncertain(s, np.matmul(np.abs(x), np.abs(y).swapaxes(1, 2)) * factor)
        flat = np.flatnonzero(unsure)
        if len(flat) and dust is not None:
            rest = np.broadcast_to(rest, s.shape).reshape(-1)[flat]
            sums = s.reshape(-1)[flat]
            plain = small & ((np.abs(sums) >= TINY) | (sums == 0) | (rest == 0))
            s.reshape(-1)[flat] = np.where(plain, floats.to_odd(sums, rest), sums)
            flat = flat[~plain]
        if len(flat):
            flat = flat[np.isfinite(s.reshape(-1)[flat])]
            c = np.full(len(flat), acc) if isinstance(acc, float) else acc.reshape(-1)[flat].astype(np.float64)
            w, row, column = np.unravel_index(flat, s.shape)
            terms = x[w if len(x) > 1 else 0, row] * y[w if len(y) > 1 else 0, column]
            if unit is not None and dust is None:  # most ties are exact sums, which the cast rounds rightly
                wrong = floats.two_sum(terms.sum(1), c)[1] != 0
                flat, terms, c = flat[wrong], terms[wrong], c[wrong]
        np.copyto(out, s, casting="unsafe")
        if len(flat):
            out[np.unravel_index(flat, out.shape)] = self._redo(terms, c)
        return most

    def _redo(self, terms: Array, c: Array) -> Array:
        """float32[n]: exact sums of terms [n, k] and c [n], rounded once."""
        if 53 - 5 - self.ea.span - self.eb.span >= 0:  # each block of 32 sums exactly, so few terms are left
            blocks = terms.reshape(len(c), -1, min(32, self.form.k)).sum(-1)
            return floats.sum_once(np.concatenate([blocks, c[:, None]], 1))
        out = np.empty(len(c), np.float32)
        for n, row in enumerate(terms):
            total, rest = _fsum([*row.tolist(), float(c[n])])
            out[n] = floats.to_odd(np.array([total]), np.array([rest])).astype(np.float32)[0]
        return out


def _fsum(terms: list[float]) -> tuple[float, float]:
    """The float64 nearest to the exact sum, and what is left of that."""
    total = math.fsum(terms)
    return total, math.fsum([*terms, -total])


def _range(slots: list[int]) -> slice | list[int]:
    """Slots that follow one another as a slice, so that taking them copies nothing."""
    if slots == list(range(slots[0], slots[0] + len(slots))):
        return slice(slots[0], slots[0] + len(slots))
    return slots


def _norm(x: Array) -> Array:
    """Euclidean length of each row [waves, rows, k], a little rounded up."""
    return np.sqrt(np.einsum("wrk,wrk->wr", x, x)) * (1 + 2.0**-40)


def _unit(c: Array | float, guess: int) -> int:
    """log2 of a unit of which every C is a whole multiple: a large one where all are zero, `guess`, or LEAST."""
    if not np.any(c):
        return 1024
    scaled = np.multiply(c, 2.0**-guess, dtype=np.float64)
    return guess if bool((np.rint(scaled) == scaled).all()) else LEAST


def _uncertain(s: Array, bound: Array) -> Array:
    """Whether the float32 nearest to the true value, or the sign of its zero, is in doubt, given a float64 sum and a
    bound on its error."""
    bound = bound + np.abs(s) * 2.0**-51
    return (s - bound).astype(np.float32).view(np.int32) != (s + bound).astype(np.float32).view(np.int32)


def _cut(x: Array) -> Array:
    """Toward zero to float32 precision, in place."""
    bits = x.view(np.int64)
    np.bitwise_and(bits, ~np.int64(0x1FFFFFFF), out=bits)
    return x


def _cut_sum(x: Array, y: Array | float) -> Array:
    """x + y, exact, toward zero to float32 precision."""
    s, error = floats.two_sum(x, np.asarray(y, np.float64))
    # A sum rounded away from zero is one step too large, which matters where the step crosses a float32.
    s.view(np.int64)[...] -= error * s < 0
    return _cut(s)


def _groups_of_16(x: Array, y: Array, acc: Array | float, out: Array, exact: bool) -> None:
    """exact: float64 holds any sum of 16 products."""
    total: Array | float = acc
    for k in range(0, x.shape[2], 16):
        p, q = x[:, :, k : k + 16], y[:, :, k : k + 16]
        part = np.matmul(p, q.swapaxes(1, 2))
        if not exact:
            _toward_zero(part, p, q)
        total = _cut_sum(_cut(part), total)
    np.copyto(out, total, casting="unsafe")


def _toward_zero(s: Array, x: Array, y: Array) -> None:
    """Redo sums of products, in place, of which float64 leaves in doubt what they are when cut to float32."""
    most = np.matmul(np.abs(x), np.abs(y).swapaxes(1, 2))
    bound = most * (x.shape[2] * 1.01 * 2.0**-53)
    unsure = _cut(s - bound) != _cut(s + bound)
    unsure &= ~(most <= _lowest(x)[:, :, None] * _lowest(y)[:, None, :] * 2.0**53) & np.isfinite(s)
    for w, row, column in np.argwhere(unsure).tolist():
        terms = (x[w if len(x) > 1 else 0, row] * y[w if len(y) > 1 else 0, column]).tolist()
        total, rest = _fsum(terms)
        s[w, row, column] = math.nextafter(total, 0) if rest * total < 0 else total


def _lowest(x: Array) -> Array:
    """float64[waves, rows]: a power of two that divides all of a row [waves, rows, k]; infinity of zeros."""
    fraction, exponent = np.frexp(x)
    whole = np.where(np.isfinite(x), np.ldexp(fraction, 53), 0).astype(np.int64)
    low = np.ldexp((whole & -whole).astype(float), exponent - 53)
    least: Array = np.where(whole == 0, math.inf, low).min(2)
    return least
