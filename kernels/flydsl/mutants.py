"""Wrong machine code: the weight gradient's own text with one instruction changed, and whether anybody notices.

A gate that accepts the shipping kernel shows little until it rejects its neighbours. Each mutant is the compiled text
of the shipping kernel, or of the one before it, with one fault of a kind that compilers and hand-written code have had;
it is killed when the emulator refuses its text, reports a hazard, or gives other bytes than the numeric contract's, or
when it reads or writes through a buffer descriptor that reaches past its buffer or is of another type. A mutant that
lives is listed, with a reason where one of REASONS holds, and as unexplained where none does. No reason names a
register: each reads off the text, or runs, what it rests on. Mutants that are shown to be equivalent cannot be killed;
they are listed and counted beside the others, in whose place more are drawn.

Cases are made for this: sums are exact, so that the answer does not depend on an order; every row and block has a scale
of its own; whole groups of NaN stand next to those that are judged; the padding is NaN.

Not made: waits that are longer than needed and s_nop between a scalar and a vector instruction, since the emulator has
no clock and models the wait states of matrix instructions alone.

    python -m mxgate.kernels.flydsl.mutants [COUNT [SEED]]
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mxgate.kernels import gfx950, numpy_reference
from mxgate.kernels.flydsl import wgrad
from mxgate.kernels.flydsl.compile import KERNELS as KERNEL_ARGUMENTS
from mxgate.kernels.flydsl.compile import machine_code
from mxgate.kernels.gfx950 import memory
from mxgate.kernels.gfx950.ledger import without_matrix
from mxgate.kernels.gfx950.plan import program
from mxgate.kernels.gfx950.state import Waves
from mxgate.kernels.numpy_windowed import longest_first, supertile
from mxgate.oracle.formats import decode_table
from mxgate.oracle.groups import spans

Array = NDArray[Any]

KINDS: Mapping[str, str] = MappingProxyType(
    {
        "op_sel": "one bit of a matrix instruction's choice of scale bytes is flipped",
        "wait": "a wait allows one more outstanding operation, or is dropped",
        "barrier": "a barrier is dropped, or moved before its wait or behind the next memory operation",
        "immediate": "a constant or an address offset is one more, one less, or has a bit flipped",
        "register": "an operand is another register that is used nearby",
        "mask": "a compare takes in its boundary, or a select always gives one side",
        "store offset": "a store goes a little further, or by another row's offset",
    }
)
KERNELS = ("shipping", "prepare")
SEEDS = (11, 12)  # further launch orders that a wait or a barrier must survive in the first two cases
LIMITS = {"shipping": 12_000, "prepare": 2_000}  # instructions of a wave; no case takes half as many


@dataclass(frozen=True)
class Mutant:
    """One changed place: the lines `before`, from `line` (counted from 1) of the original on, became `after`."""

    kind: str
    kernel: str
    line: int
    before: str
    after: str
    original: str = field(repr=False)

    @property
    def text(self) -> str:
        lines = self.original.splitlines()
        first = self.line - 1
        lines[first : first + len(self.before.splitlines())] = self.after.splitlines()
        return "\n".join(lines) + "\n"

    def __str__(self) -> str:
        was, now = (" / ".join(part.split("\n")) for part in (self.before, self.after))
        return f"{self.kernel}:{self.line} {self.kind}: {was} -> {now}"


# ---------------------------------------------------------------- making them

Edit = tuple[int, int, tuple[str, ...]]  # first line (from 0), how many lines, what they become

_REGISTER = re.compile(r"(?<![\w\[:.])([vas])(\d+|\[\d+:\d+\])(?![\w:])")
_NUMBER = re.compile(r"(?<=[ ,:])(-?(?:0x[0-9a-f]+|\d+))(?=$|[ ,])")
_COUNTER = re.compile(r"(vmcnt|lgkmcnt)\((\d+)\)")
_NEARBY = 40
_NEXT = {"gt": "ge", "lt": "le", "ge": "gt", "le": "lt", "eq": "ne", "ne": "eq", "lg": "eq"}
_MEMORY = ("ds_read", "buffer_load", "buffer_store")


@dataclass(frozen=True)
class _Text:
    """A kernel's lines without comments, and which of them are instructions."""

    lines: tuple[str, ...]
    places: tuple[int, ...]


@functools.lru_cache(maxsize=4)
def _read(text: str) -> tuple[str, _Text]:
    (name,) = (line.split()[1] for line in text.splitlines() if line.strip().startswith(".amdhsa_kernel"))
    lines = tuple(" ".join(line.split(";")[0].split()) for line in text.splitlines())
    places = tuple(i.line - 1 for i in gfx950.parse(text).instructions)
    return name.removeprefix("mxgate_wgrad_"), _Text(lines, places)


def _flip_op_sel(code: _Text, at: int) -> Iterator[Edit]:
    line = code.lines[at]
    if not line.startswith("v_mfma_scale"):
        return
    for name in ("op_sel", "op_sel_hi"):
        found = re.search(rf"\b{name}:\[(\d),(\d),(\d)\]", line)
        assert found is not None
        for operand in (0, 1):
            bits = list(found.groups())
            bits[operand] = str(1 - int(bits[operand]))
            yield at, 1, (line[: found.start()] + f"{name}:[{','.join(bits)}]" + line[found.end() :],)


def _weaken_wait(code: _Text, at: int) -> Iterator[Edit]:
    line = code.lines[at]
    if line.startswith("s_waitcnt"):
        yield at, 1, ("s_nop 0",)
        for found in _COUNTER.finditer(line):
            more = f"{found[1]}({int(found[2]) + 1})"
            yield at, 1, (line[: found.start()] + more + line[found.end() :],)
    elif line.startswith("s_nop") and int(line.split()[1]) > 4:
        yield at, 1, ("s_nop 0",)


def _misplace_barrier(code: _Text, at: int) -> Iterator[Edit]:
    if code.lines[at] != "s_barrier":
        return
    yield at, 1, ("s_nop 0",)
    before = max(p for p in code.places if p < at)
    if code.lines[before].startswith("s_waitcnt"):
        yield before, at + 1 - before, ("s_barrier", *code.lines[before:at])
    behind = next(p for p in code.places if p > at and code.lines[p].startswith(_MEMORY))
    yield at, behind + 1 - at, (*code.lines[at + 1 : behind + 1], "s_barrier")


def _change_immediate(code: _Text, at: int) -> Iterator[Edit]:
    line = code.lines[at]
    if line.startswith(("s_waitcnt", "s_nop", "v_mfma", "s_endpgm", "s_branch", "s_cbranch")):
        return
    for found in _NUMBER.finditer(line):
        value = int(found[1], 0)
        wide = range(4, 12, 3) if found.start() and line[found.start() - 1] == ":" else range(0, 9, 4)
        for new in (value + 1, value - 1, *(value ^ 1 << bit for bit in wide)):
            if 0 <= new < 1 << 32 or value < 0:
                written = hex(new) if new > 64 else str(new)
                yield at, 1, (line[: found.start()] + written + line[found.end() :],)


@functools.lru_cache(maxsize=8192)
def _named(line: str) -> tuple[tuple[str, tuple[str, int]], ...]:
    """The registers in a line, each with its class and width."""
    found = []
    for match in _REGISTER.finditer(line):
        first, _, last = match[2].strip("[]").partition(":")
        found.append((match[0], (match[1], int(last or first) - int(first) + 1)))
    return tuple(found)


def _nearby(code: _Text, at: int) -> dict[tuple[str, int], list[str]]:
    found: dict[tuple[str, int], dict[str, None]] = {}
    for line in code.lines[max(0, at - _NEARBY) : at + _NEARBY]:
        for name, form in _named(line):
            found.setdefault(form, {})[name] = None
    return {form: list(names) for form, names in found.items()}


def _swap_register(code: _Text, at: int) -> Iterator[Edit]:
    line = code.lines[at]
    pool = _nearby(code, at)
    for found, (_, form) in zip(_REGISTER.finditer(line), _named(line), strict=True):
        others = pool[form]
        here = others.index(found[0])
        for step in (1, len(others) // 2):
            other = others[(here + step) % len(others)]
            if other != found[0]:
                yield at, 1, (line[: found.start()] + other + line[found.end() :],)


def _drop_mask(code: _Text, at: int) -> Iterator[Edit]:
    line = code.lines[at]
    name, _, rest = line.partition(" ")
    operands = [o.strip() for o in rest.split(",")]
    if (compare := re.match(r"((?:v_cmp|s_cmpk?)_)(gt|lt|ge|le|eq|ne|lg)(_.*)", name)) is not None:
        if compare[2] == "lg" or (compare[2] == "eq" and name.startswith("s_")):
            yield at, 1, (f"{compare[1]}{'eq' if compare[2] == 'lg' else 'lg'}{compare[3]} {rest}",)
        else:
            yield at, 1, (f"{compare[1]}{_NEXT[compare[2]]}{compare[3]} {rest}",)
    elif name.startswith("v_cndmask_b32"):
        for side in operands[1:3]:
            yield at, 1, (f"v_mov_b32_e32 {operands[0]}, {side}",)
    elif name.startswith("s_cselect"):
        move = name.replace("s_cselect", "s_mov")
        for side in operands[1:3]:
            yield at, 1, (f"{move} {operands[0]}, {side}",)


def _move_store(code: _Text, at: int) -> Iterator[Edit]:
    line = code.lines[at]
    if not line.startswith("buffer_store"):
        return
    assert "offset:" not in line
    for extra in (2, 4, 8, 32):
        yield at, 1, (f"{line} offset:{extra}",)
    *front, last = line.split(", ")
    soffset, _, rest = last.partition(" ")
    seen = sorted({code.lines[p].split(", ")[3].split()[0] for p in code.places if _is_store(code.lines[p])})
    for other in seen:
        if other != soffset:
            yield at, 1, (", ".join((*front, f"{other} {rest}")),)


def _is_store(line: str) -> bool:
    return line.startswith("buffer_store")


MAKERS: Mapping[str, Callable[[_Text, int], Iterator[Edit]]] = MappingProxyType(
    dict(
        zip(
            KINDS,
            (
                _flip_op_sel,
                _weaken_wait,
                _misplace_barrier,
                _change_immediate,
                _swap_register,
                _drop_mask,
                _move_store,
            ),
            strict=True,
        )
    )
)


def mutants(text: str, kinds: Sequence[str] = tuple(KINDS), count: int = 300, seed: int = 0) -> tuple[Mutant, ...]:
    """`count` different mutants of a kernel's text, as many of each kind as there are places for, in text order.

    A kind with fewer mutants than its share leaves the rest to the others. Raises ValueError for an unknown kind.
    """
    for kind in kinds:
        if kind not in MAKERS:
            raise ValueError(f"no kind of mutant {kind!r}; expected some of {', '.join(MAKERS)}")
    kernel, code = _read(text)
    rng = np.random.default_rng(seed)
    pools: dict[str, list[Mutant]] = {}
    for kind in kinds:
        edits = list(dict.fromkeys(edit for at in code.places for edit in MAKERS[kind](code, at)))
        pools[kind] = []
        for i in rng.permutation(len(edits))[-count:]:
            first, lines, after = edits[i]
            before = "\n".join(code.lines[first : first + lines])
            pools[kind].append(Mutant(kind, kernel, first + 1, before, "\n".join(after), text))
    chosen: list[Mutant] = []
    while len(chosen) < count and any(pools.values()):
        for kind in kinds:
            if pools[kind] and len(chosen) < count:
                chosen.append(pools[kind].pop())
    return tuple(sorted(chosen, key=lambda m: (m.line, m.kind, m.after)))


# ---------------------------------------------------------------- cases


@dataclass(frozen=True)
class Case:
    """A routing. nan: the experts all of whose operands are NaN; seed: of the data and of the launch order.

    line: the buffer, counted along the kernel's arguments, in whose middle the addresses cross a multiple of 4 GiB.
    smaller: binary orders taken off every scale. Sums that are bf16 denormals show what an accumulator began with.
    """

    name: str
    sizes: tuple[int, ...]
    n: int
    k: int
    m: int
    nan: tuple[int, ...] = ()
    seed: int = 0
    line: int | None = None
    smaller: int = 0


# From cheap to dear, nearly. The first has a group that ends in the first step of its last body, with NaN behind it.
# The second has a group of six bodies that starts and ends in the middle of one, its end past the middle, N and K over
# one tile; the third has bands enough to need the division's correction, and both kinds of narrow edge; the fourth more
# experts than lanes, one of them NaN, in a later round of lanes and in another's window. EDGES end K in each of the
# eight fragments of a quadrant and put the 4 GiB line in each buffer. MANY is more experts than a bit flip of a lane
# can miss. PADDING is over 16,384 tokens of it, enough for the loops that clear it to go round twice.
CASES = (
    Case("one tile", (96, 32, 352, 0, 64, 32), 250, 236, 640, (1, 5)),
    Case("six bodies", (128, 32, 1280, 32, 0, 64), 272, 300, 1600, (1, 3), 1, smaller=67),
    Case("tiles", (64, 32), 1544, 700, 128, (1,), 2),
    Case("experts", tuple(32 * (e in (0, 62, 63, 64, 66)) for e in range(67)), 16, 20, 160, (64,), 3),
)
MANY = Case("many", tuple(32 * (e in (0, 255, 256, 257, 260)) for e in range(261)), 6, 5, 160, (0,), 16)
EDGES = (
    *(Case(f"edge {f}", (32, 0), 16 * f + 21, 268 + 16 * f, 64, (), 5 + f, f % 7) for f in range(8)),
    Case("one expert", (32,), 21, 40, 64, (), 13),
    Case("second", (800, 64), 24, 40, 896, (), 14),
    Case("nothing", (0,), 5, 6, 64, (), 15),
)
PADDING = Case("padding", (64, 96), 6, 5, 18624, (), 4)
RUNS: Mapping[str, tuple[Case, ...]] = MappingProxyType(
    {"shipping": (*CASES, *EDGES), "prepare": (*CASES[:2], PADDING, *EDGES, *CASES[2:], MANY)}
)


@dataclass(frozen=True)
class Order:
    """A grid of which only the first blocks are launched: they write the tiles that the schedule gives to them."""

    sizes: tuple[int, ...]
    n: int
    k: int
    blocks: int


# Longest first over two bands and three columns; a tie; and the three bounds from which experts keep their order.
ORDERS = (
    Order((64, 768, 0, 544), 300, 600, 7),
    Order((544, 32, 544), 300, 600, 1),
    Order((32,) * 63 + (768,), 16, 16, 1),
    Order((32, 768) + (32,) * 63, 16, 16, 1),
    Order((32,) * 63 + (768,), 1024, 1024, 1),
    Order((32,) * 62 + (768,), 1024, 1024, 1),
)
LANES = 64
FILL = 0x5A5A  # a finite bf16 that no case's answer holds


def _operands(
    sizes: tuple[int, ...], n: int, k: int, m: int, nan: tuple[int, ...], seed: int, smaller: int = 0
) -> tuple[Array, ...]:
    """dY^T, its scales, X^T, its scales, offsets. Elements -3 .. 3 under scales 1 to 32: sums stay below 2^24."""
    rng = np.random.default_rng(seed)
    table = decode_table("e4m3fn")
    small = np.flatnonzero((np.abs(table) <= 3) & (table == np.rint(table))).astype(np.uint8)
    offsets = np.cumsum(sizes).astype(np.int32)
    planes: list[Array] = []
    for rows in (n, k):
        data = rng.choice(small, (rows, m))
        scales = (rng.integers(127, 133, (rows, m // 32)) - smaller).astype(np.uint8)
        for start, end in [(offsets[-1], m)] + [spans(offsets)[g] for g in nan]:
            data[:, start:end], scales[:, start // 32 : end // 32] = 0x7F, 0xFF
        planes += [data.view(ml_dtypes.float8_e4m3fn), scales.view(ml_dtypes.float8_e8m0fnu)]
    return (*planes, offsets)


@dataclass(frozen=True)
class _Setting:
    """A case made: operands as given, what they must be afterwards, the answer's bytes, and the scratch buffers as the
    true kernel fills them."""

    plan: wgrad.Plan
    operands: tuple[Array, ...]
    cleared: tuple[Array, ...]
    want: Array
    scratch: Mapping[str, Array]


@functools.cache
def _true(kernel: str) -> gfx950.Kernel:
    return gfx950.parse(machine_code(kernel))


@contextlib.contextmanager
def _crossing(arrays: Sequence[Array], line: int | None) -> Iterator[None]:
    """The emulator's addresses moved so that a multiple of 4 GiB falls into the middle of one of these arrays.

    Elsewhere all buffers lie within 4 GiB, and the upper half of an address could be any buffer's. Every bit of the
    upper half is one in the cases of even or in those of odd lines.
    """
    before = memory.BASE
    if line is not None:
        which = line % len(arrays)
        start = memory.Memory([a.nbytes for a in arrays]).starts[which]
        memory.BASE = ((0x2AAA, 0x5555)[line % 2] << 32) - (start + arrays[which].nbytes // 2) // 256 * 256
    try:
        yield
    finally:
        memory.BASE = before


def _call(
    kernel: gfx950.Kernel, call: wgrad.Call, buffers: Mapping[str, Array], line: int | None = None, **options: Any
) -> gfx950.RunResult:
    arguments = [buffers[a] if isinstance(a, str) else a for a in call.arguments]
    shape, limit = ((call.blocks, 1, 1), (call.threads, 1, 1)), LIMITS[call.kernel]
    arrays = [a for a in arguments if isinstance(a, np.ndarray)]
    options.setdefault("observe", _descriptor)
    with _crossing(arrays, line), warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return gfx950.run(kernel, arguments, *shape, limit=limit, **options)


RAW = 0x27000  # the last word of the descriptor of a raw buffer


class _BadDescriptor(Exception):
    pass


def _descriptor(space: str, inst: gfx950.Instruction, st: Waves, *_: Any) -> None:
    """An observer that holds every descriptor used to what the device code asks for: a raw buffer, bounded exactly.

    Raises _BadDescriptor for one of another type, or one that reaches past the end of the buffer it starts in.
    """
    if space == "lds" or not inst.base.startswith("buffer_"):
        return
    first = next(o.index for o in inst.operands if o.kind == "s" and o.count == 4)
    low, high, records, flags = (st.s[first + i].astype(np.int64) for i in range(4))
    mem, start = st.machine.memory, (low | high << 32) - memory.BASE
    place = np.searchsorted(mem.starts, start, side="right") - 1
    fits = (place >= 0) & (start + records <= np.array(mem.ends)[place])
    if not (fits | (records == 0)).all() or not (flags == RAW).all():
        raise _BadDescriptor(f"line {inst.line} `{inst.text}`: a descriptor past its buffer, or of another type")


@functools.cache
def _setting(case: Case) -> _Setting:
    operands = _operands(case.sizes, case.n, case.k, case.m, case.nan, case.seed, case.smaller)
    with np.errstate(invalid="ignore"):
        want = numpy_reference.wgrad(*operands).view(np.uint16)
    plan = wgrad.launch_plan("shipping", case.n, case.k, case.m, len(case.sizes))
    cleared = tuple(a.copy() for a in operands)
    tokens = int(operands[4][-1])
    for plane, end in zip(cleared[:4], (tokens, tokens // 32) * 2, strict=True):
        plane.view(np.uint8)[:, end:] = 0
    buffers = _buffers(plan, operands)
    _call(_true("prepare"), plan.calls[0], buffers, case.line, hazards=False)
    return _Setting(plan, operands, cleared, want, {name: buffers[name] for name in plan.scratch})


def _buffers(plan: wgrad.Plan, operands: Sequence[Array], scratch: Mapping[str, Array] | None = None) -> dict[str, Any]:
    """All buffers of a plan: what a kernel may write is a copy; dW holds FILL, and scratch 0xFF, a scale of NaN."""
    buffers: dict[str, Any] = dict(zip(wgrad.OPERANDS, (a.copy() for a in operands), strict=True))
    for name, size in plan.scratch.items():
        buffers[name] = np.full(size, 0xFF, np.uint8) if scratch is None else scratch[name].copy()
    rows, experts = operands[0].shape[0], len(operands[4])
    buffers["dw"] = np.full((experts, rows, plan.row_pitch), FILL, np.uint16)
    return buffers


def _wrong(got: Array, want: Array) -> str | None:
    """The first element whose bf16 code is not the answer's; any NaN is a NaN."""
    nan = (want & 0x7FFF) > 0x7F80
    right = np.where(nan, (got & 0x7FFF) > 0x7F80, got == want)
    if right.all():
        return None
    place = tuple(int(i) for i in np.argwhere(~right)[0])
    return f"dw{list(place)} is {int(got[place]):#06x}, not {int(want[place]):#06x}; {int((~right).sum())} wrong"


# ---------------------------------------------------------------- judging


@dataclass(frozen=True)
class Outcome:
    """how: "parse error", "crash", "hazard", "descriptor", "wrong bytes", "wrong order" or "wrong address".

    A survivor has how None, and the reason that shows it to be equivalent, or why no case can tell, or None.
    """

    mutant: Mutant
    how: str | None
    detail: str
    reason: str | None = None

    @property
    def killed(self) -> bool:
        return self.how is not None

    @property
    def equivalent(self) -> bool:
        """Whether it lived because it does what the original does."""
        return not self.killed and self.reason is not None and self.reason.startswith("equivalent")


def judge(mutant: Mutant) -> Outcome:
    """Run a mutant on the cases of its kernel, cheap ones first, until something is wrong."""
    try:
        kernel = gfx950.parse(mutant.text)
    except gfx950.TextError as error:
        return Outcome(mutant, "parse error", str(error))
    executed = np.zeros(len(kernel.instructions), np.int64)
    for case in RUNS[mutant.kernel]:
        timed = mutant.kind in ("wait", "barrier") and case in CASES[:2]
        for seed in (case.seed, *SEEDS) if timed else (case.seed,):
            how, detail = _try(mutant.kernel, kernel, case, seed, executed)
            if how is not None:
                return Outcome(mutant, how, f"{case.name}: {detail}")
    if mutant.kernel == "shipping":
        for order in ORDERS:
            how, detail = _try_order(kernel, order)
            if how is not None:
                return Outcome(mutant, how, detail)
    else:
        how, detail = _try_wide(kernel)
        if how is not None:
            return Outcome(mutant, how, detail)
    how, detail = _try_far(mutant.kernel, kernel)
    if how is not None:
        return Outcome(mutant, how, detail)
    place = next(i.index for i in kernel.instructions if i.line >= mutant.line)
    if not executed[place]:
        return Outcome(mutant, None, "no case executes it", reason(mutant, REASONS[:1]))
    return Outcome(mutant, None, f"executed {int(executed[place])} times", reason(mutant))


def _try(name: str, kernel: gfx950.Kernel, case: Case, seed: int, executed: Array) -> tuple[str | None, str]:
    made = _setting(case)
    first, second = made.plan.calls
    if name == "shipping":
        buffers = _buffers(made.plan, made.cleared, made.scratch)
        how, detail = _launch(kernel, second, buffers, case.line, seed, executed)
    else:
        buffers = _buffers(made.plan, made.operands)
        how, detail = _launch(kernel, first, buffers, case.line, seed, executed)
        if how is None:
            if all(np.array_equal(buffers[n], made.scratch[n]) for n in made.plan.scratch):
                buffers["dw"][:, :, : case.k] = made.want  # what the true kernel makes of the true scales
            else:
                how, detail = _launch(_true("shipping"), second, buffers, case.line, seed, None)
    if how is not None:
        return how, detail
    for what, plane in zip(wgrad.OPERANDS, made.cleared, strict=True):
        if not np.array_equal(buffers[what].view(np.uint8), plane.view(np.uint8)):
            return "wrong bytes", f"{what} has changed, or its padding is not zero"
    wrong = _wrong(buffers["dw"][:, :, : case.k], made.want)
    return ("wrong bytes", wrong) if wrong is not None else (None, "")


def _launch(
    kernel: gfx950.Kernel,
    call: wgrad.Call,
    buffers: Mapping[str, Array],
    line: int | None,
    seed: int,
    executed: Array | None,
) -> tuple[str | None, str]:
    try:
        result = _call(kernel, call, buffers, line, seed=seed)
    except gfx950.TextError as error:
        return "parse error", str(error)
    except gfx950.RunError as error:
        return "crash", str(error)
    except _BadDescriptor as error:
        return "descriptor", str(error)
    except (IndexError, OverflowError, MemoryError, ValueError, KeyError) as error:
        return "crash", f"{type(error).__name__}: {error}"
    if executed is not None:
        executed += result.executed
    return ("hazard", str(result.findings[0])) if result.findings else (None, "")


@functools.cache
def _order_setting(order: Order) -> tuple[wgrad.Plan, dict[str, Any], frozenset[tuple[int, ...]]]:
    m = sum(order.sizes)
    operands = _operands(order.sizes, order.n, order.k, m, (), 0)
    plan = wgrad.launch_plan("shipping", order.n, order.k, m, len(order.sizes))
    buffers = _buffers(plan, operands)
    _call(_true("prepare"), plan.calls[0], buffers, hazards=False)
    rows, columns = (-(-side // wgrad.TILE) for side in (order.n, order.k))
    tiles = rows * columns
    experts: Sequence[int] = range(len(order.sizes))
    if len(order.sizes) <= LANES:
        experts = longest_first(spans(operands[4]), len(order.sizes) * tiles)
    places = [(experts[b // tiles], *supertile(b % tiles, rows, columns)) for b in range(order.blocks)]
    return plan, buffers, frozenset(places)


def _try_order(kernel: gfx950.Kernel, order: Order) -> tuple[str | None, str]:
    plan, buffers, want = _order_setting(order)
    buffers = {**buffers, "dw": np.full_like(buffers["dw"], FILL)}
    call = replace(plan.calls[1], blocks=order.blocks)
    try:
        _call(kernel, call, buffers, hazards=False)
    except (gfx950.RunError, _BadDescriptor, IndexError, OverflowError, MemoryError, ValueError, KeyError) as error:
        return "crash", f"{order}: {type(error).__name__}: {error}"
    tiles = buffers["dw"][:, :: wgrad.TILE, :: wgrad.TILE] != FILL
    got = frozenset(tuple(int(i) for i in place) for place in np.argwhere(tiles))
    return ("wrong order", f"{order}: tiles {sorted(got)}") if got != want else (None, "")


# Sizes with which products of rows and pitches pass 4 GiB: planes and outputs of the fifth tile of rows and of the
# second expert, rows of the planes and of the scales to be cleared. No buffer is there: only where accesses would go is
# looked at.
FAR = {"shipping": (1280, 1280, 1 << 22), "prepare": (16400, 16, (1 << 23) - 32)}  # N, K, M
FAR_PITCH, FAR_EXPERT = 1 << 21, 3 << 30


def _far(name: str, kernel: gfx950.Kernel) -> frozenset[tuple[int, ...]]:
    """(block, whether it stores, multiple of 4 GiB above the buffers) of all accesses that their descriptors allow."""
    found: set[tuple[int, ...]] = set()

    def observe(space: str, inst: gfx950.Instruction, st: Waves, address: Array, active: Array, size: int) -> None:
        if space != "lds":
            above = (address - memory.BASE) >> 32
            blocks = np.broadcast_to(st.gid[:, None], above.shape)[active]
            pairs = np.unique(np.stack([blocks, above[active]], -1), axis=0)
            found.update((int(b), int(space == "store"), int(a)) for b, a in pairs)

    n, k, m = FAR[name]
    nothing = [np.zeros(256, np.uint8) for _ in range(6)]
    # Without much padding prepare has little to clear.
    sizes = (32, 32, 32) if name == "shipping" else (m - 96, 32, 32)
    offsets, slots = np.cumsum(sizes, dtype=np.int32), m // wgrad.TILE + 2 * len(sizes)
    if name == "shipping":
        rest: tuple[Any, ...] = (nothing[4], FAR_EXPERT, FAR_PITCH)
        blocks = 3 * -(-n // wgrad.TILE) * -(-k // wgrad.TILE)
    else:
        rest = (nothing[4], nothing[5])
        blocks = (n + k) // 4 + 40
    rest = (*nothing[:4], offsets, *rest, n, k, m, len(sizes), slots)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        shape = (blocks, 1, 1), (256, 1, 1)
        gfx950.run(kernel, rest, *shape, hazards=False, limit=LIMITS[name], observe=observe, batch=2048)
    return frozenset(found)


@functools.cache
def _true_far(name: str) -> frozenset[tuple[int, ...]]:
    return _far(name, without_matrix(_true(name)))


def _try_far(name: str, kernel: gfx950.Kernel) -> tuple[str | None, str]:
    try:
        got = _far(name, without_matrix(kernel))
    except (gfx950.RunError, IndexError, OverflowError, MemoryError, ValueError, KeyError) as error:
        return "crash", f"far: {type(error).__name__}: {error}"
    wrong = sorted(got ^ _true_far(name))
    return ("wrong address", f"far: {len(wrong)} such as {wrong[0]}") if wrong else (None, "")


# Rows of which half a tile more or less shows in the division of prepare's block numbers by their half tiles.
WIDE = ((32, 32), 1 << 15, 1 << 15, 64)  # sizes, N, K, M


@functools.cache
def _wide_setting() -> tuple[wgrad.Plan, tuple[Array, ...], Mapping[str, Array]]:
    sizes, n, k, m = WIDE
    plan, operands = wgrad.launch_plan("shipping", n, k, m, len(sizes)), _operands(sizes, n, k, m, (), 0)
    return plan, operands, _shuffled(_true("prepare"), plan, operands)


def _shuffled(kernel: gfx950.Kernel, plan: wgrad.Plan, operands: tuple[Array, ...]) -> Mapping[str, Array]:
    """The scratch buffers as a prepare kernel fills them; dW is none of its."""
    buffers = dict(zip(wgrad.OPERANDS, (a.copy() for a in operands), strict=True))
    scratch = {name: np.full(size, 0xFF, np.uint8) for name, size in plan.scratch.items()}
    _call(kernel, plan.calls[0], {**buffers, **scratch}, hazards=False, batch=2048)
    return scratch


def _try_wide(kernel: gfx950.Kernel) -> tuple[str | None, str]:
    plan, operands, want = _wide_setting()
    try:
        got = _shuffled(kernel, plan, operands)
    except (gfx950.RunError, _BadDescriptor, IndexError, OverflowError, MemoryError, ValueError, KeyError) as error:
        return "crash", f"wide: {type(error).__name__}: {error}"
    wrong = sum(int(np.count_nonzero(got[name] != want[name])) for name in want)
    return ("wrong bytes", f"wide: {wrong} shuffled scales") if wrong else (None, "")


# ---------------------------------------------------------------- survivors


@dataclass(frozen=True)
class Reason:
    """Why a survivor is no hole. change: what "before -> after" must match in full; holds: what the lines around it and
    the numbers must say besides."""

    why: str
    change: str
    holds: Callable[[Mutant, re.Match[str]], bool]


def _around(mutant: Mutant, before: int, after: int) -> tuple[list[str], list[str]]:
    """The instructions of the original just before and just after the changed one."""
    _, code = _read(mutant.original)
    at = mutant.line - 1
    behind = at + len(mutant.before.splitlines())
    earlier = [code.lines[p] for p in code.places if p < at]
    later = [code.lines[p] for p in code.places if p >= behind]
    return earlier[len(earlier) - before :], later[:after]


def _any(lines: Sequence[str], pattern: str) -> re.Match[str] | None:
    return next((found for line in lines if (found := re.fullmatch(pattern, line))), None)


@functools.cache
def _corrections(refined: bool) -> int:
    """How many too small the division by reciprocal ever is: dividends below 2^20, divisors to 512, which are the
    grids and tiles of an expert. The quotient steps up at a multiple, so that and what is just below are tried."""
    most = 0
    for divisor in range(1, 513):
        scaled = np.float32(1) / np.float32(divisor) * np.array(0x4F7FFFFE, np.uint32).view(np.float32)
        estimate = int(scaled)
        if refined:
            estimate += estimate * (-divisor * estimate % (1 << 32)) >> 32
        multiples = np.arange(0, 1 << 20, divisor, dtype=np.int64)
        for n in (multiples, multiples + divisor - 1):
            short = n // divisor - (n * estimate >> 32)
            assert int(short.min()) >= 0
            most = max(most, int(short.max()))
    return most


def _second_correction(mutant: Mutant, _: re.Match[str]) -> bool:
    earlier, _later = _around(mutant, 3, 0)
    if mutant.before.startswith("s_cmp"):
        earlier = earlier[1:]
    else:
        if not earlier[2].startswith("s_cmp_ge_u32"):
            return False
        earlier = earlier[:2]
    step = re.fullmatch(r"s_add_i32 s\d+, s\d+, 1", earlier[1])
    return step is not None and earlier[0].startswith("s_cselect_b32") and _corrections(True) <= 1


def _first_correction(mutant: Mutant, _: re.Match[str]) -> bool:
    later = _around(mutant, 0, 4)[1]
    names = [line.split()[0] for line in later]
    return names == ["s_cselect_b32", "s_cselect_b32", "s_add_i32", "s_cmp_ge_u32"] and _corrections(True) <= 1


def _unrefined(mutant: Mutant, found: re.Match[str]) -> bool:
    """Whether it is the reciprocal's refinement that goes elsewhere: to a register which is read only behind a branch
    that is not taken on this way, its flag having been cleared."""
    earlier, later = _around(mutant, 2, 1000)
    step = re.fullmatch(rf"s_mul_hi_u32 {found[2]}, {found[1]}, {found[2]}", earlier[1])
    used = re.fullmatch(rf"s_mul_hi_u32 s\d+, s\d+, {found[1]}", later[0])
    read = next((i for i, line in enumerate(later) if re.search(rf", {found[3]}\b", line)), len(later))
    cleared = [flag[1] for line in later[:read] if (flag := re.fullmatch(r"s_mov_b64 (\S+), 0", line))]
    guard = next(
        (i for i, line in enumerate(later[:read]) if any(line == f"s_and_b64 vcc, exec, {f}" for f in cleared)), None
    )
    return (
        step is not None
        and used is not None
        and guard is not None
        and later[guard + 1].startswith("s_cbranch_vccz ")
        and _corrections(False) <= 2
    )


def _lane_zero(mutant: Mutant, found: re.Match[str]) -> bool:
    return _any(_around(mutant, 6, 0)[0], rf"v_add_u32_e32 {found[1]}, -4, v\d+") is not None


def _ranked(mutant: Mutant, _: re.Match[str]) -> bool:
    later = _around(mutant, 0, 80)[1]
    return mutant.kernel == "shipping" and _any(later, r"s_and_b64 s\[\d+:\d+\], vcc, s\[\d+:\d+\]") is not None


def _zero_either_way(mutant: Mutant, found: re.Match[str]) -> bool:
    earlier, later = _around(mutant, 16, 8)
    rest = _any(earlier, rf"s_sub_i32 (s\d+), {found[1]}, {found[2]}")
    return rest is not None and _any(later, rf"s_cselect_b32 s\d+, {rest[1]}, 0") is not None


def _clearing_loop(mutant: Mutant, _: re.Match[str]) -> bool:
    earlier, later = _around(mutant, 1, 2)
    stores = any(line.startswith("buffer_store") for line in (*earlier, *later))
    return mutant.kernel == "prepare" and stores and any(line.startswith("s_cbranch_scc") for line in later)


def _loaded(mutant: Mutant, at: int, register: str) -> int | None:
    """The kernarg offset of what a scalar register holds before line `at`, where it was loaded from there, or None."""
    _, code = _read(mutant.original)
    number = int(register[1:])
    for line in (code.lines[p] for p in reversed(code.places) if p < at):
        found = re.match(r"[sv]_\w+ (?:v\S+ )?s(?:(\d+)|\[(\d+):(\d+)\])(?:, |$)", line)
        if found is None or line.startswith(("s_cmp", "s_bitcmp")):
            continue
        first, last = int(found[1] or found[2]), int(found[1] or found[3])
        if first <= number <= last:
            load = re.fullmatch(r"s_load_dword(?:x\d+)? [^,]+, s\[0:1\], (0x\w+|\d+)", line)
            return None if load is None else int(load[1], 0) + 4 * (number - first)
    return None


def _argument(mutant: Mutant, from_last: int) -> int:
    """The kernarg offset of an argument: experts is the last but one, slots the last."""
    widths = [8 if kind == "q" else 4 for kind in KERNEL_ARGUMENTS[mutant.kernel]]
    return sum(widths[: len(widths) - from_last])


def _no_experts(mutant: Mutant, _: re.Match[str]) -> bool:
    """Whether the block is entered by one branch alone, taken where the count of experts is below 1."""
    lines = [" ".join(line.split(";")[0].split()) for line in mutant.original.splitlines()]
    label = next((i for i in range(mutant.line - 1, -1, -1) if re.fullmatch(r"\.LBB\w+:", lines[i])), None)
    if label is None:
        return False
    _name, code = _read(mutant.original)
    earlier = [code.lines[p] for p in code.places if p < label]
    entries = [i for i, p in enumerate(code.places) if code.lines[p].endswith(" " + lines[label][:-1])]
    if not earlier[-1].startswith("s_branch ") or len(entries) != 1:
        return False
    branch = code.places[entries[0]]
    compare = _any([code.lines[p] for p in code.places[entries[0] - 2 : entries[0]]], r"s_cmp_lt_i32 (s\d+), 1")
    return (
        code.lines[branch].startswith("s_cbranch_scc1 ")
        and compare is not None
        and _loaded(mutant, branch, compare[1]) == _argument(mutant, 2)
    )


def _empty_as_well(mutant: Mutant, found: re.Match[str]) -> bool:
    """Whether it is the choice between clearing and computing, made from a flag or from first token and end."""
    if mutant.before.startswith("s_cselect"):
        earlier, later = _around(mutant, 2, 1)
        flag = re.fullmatch(r"s_mov_b64 (s\[\d+:\d+\]), 0", earlier[0])
        return (
            flag is not None
            and re.fullmatch(rf"s_and_b64 \S+ {re.escape(flag[1])}, exec", earlier[1]) is not None
            and later == [f"s_cmp_lg_u32 {found[1]}, 1"]
        )
    earlier, later = _around(mutant, 4, 1)
    read = [_any(earlier, rf"v_readfirstlane_b32 {register}, v\d+") for register in found[2].split(", ")]
    return all(read) and later[0].startswith("s_cbranch_scc0 ")


def _ranks_unasked(mutant: Mutant, found: re.Match[str]) -> bool:
    """Whether the condition that would have set a count of turns to zero is the one that drops what the turns find."""
    earlier, later = _around(mutant, 1, 130)
    asked = re.fullmatch(r"s_and_b64 \S+ (s\[\d+:\d+\]), exec", earlier[0])
    if asked is None or _loaded(mutant, mutant.line - 1, found[2]) != _argument(mutant, 2):
        return False
    again = [i for i, line in enumerate(later) if re.fullmatch(rf"s_and_b64 \S+ {re.escape(asked[1])}, exec", line)]
    written = any(re.match(rf"[sv]_\w+ {re.escape(asked[1])}, ", line) for line in later)
    return len(again) == 1 and not written and later[again[0] + 1].startswith("s_cselect_b32")


def _one_rank(mutant: Mutant, _: re.Match[str]) -> bool:
    """Whether the turns left out would start from the rank that the other way gives: 0, with nobody above it."""
    later = _around(mutant, 0, 40)[1]
    count = _any(later, r"v_addc_co_u32_e64 (v\d+), .*")
    branch = _any(later[:2], r"s_cbranch_scc1 \S+")
    if count is None or branch is None or _any(later, r"v_readlane_b32 .*") is None:
        return False
    return sum(line == f"v_mov_b32_e32 {count[1]}, 0" for line in later) == 2


def _waited_anyway(mutant: Mutant, _: re.Match[str]) -> bool:
    """Whether the wait is one after matrix instructions, whose readers the emulator times each time they are run."""
    earlier = _around(mutant, 4, 0)[0]
    return any(line.startswith("v_mfma") for line in earlier)


def _seeks_once_more(mutant: Mutant, found: re.Match[str]) -> bool:
    """Whether every result of the loop is taken under a mask that holds for lanes of experts alone."""
    if _loaded(mutant, mutant.line - 1, found[1]) != _argument(mutant, 2):
        return False
    earlier, later = _around(mutant, 9, 18)
    mask = _any(earlier, rf"v_cmp_gt_u32_e64 (s\[\d+:\d+\]), {found[1]}, v\d+")
    ends = next((i for i, line in enumerate(later) if line.startswith("s_cbranch_vccnz")), None)
    if mask is None or ends is None:
        return False
    taken = [line for line in later[:ends] if line.startswith("v_cndmask_b32")]
    both = rf"s_and_b64 {re.escape(mask[1])}, {re.escape(mask[1])}, s\[\d+:\d+\]"
    return bool(taken) and all(line.endswith(mask[1]) for line in taken) and _any(later[:ends], both) is not None


def _still_out_of_range(mutant: Mutant, found: re.Match[str]) -> bool:
    """Whether the constant is an offset that lies past 2 GiB as well, and no plan has a larger buffer."""
    offset = int(f"{int(found[2], 0):032b}"[::-1], 2)
    _, code = _read(mutant.original)
    uses = []
    for line in (code.lines[p] for p in code.places if p > mutant.line - 1):
        name, _, rest = line.partition(" ")
        operands = rest.split(", ")
        if found[1] in operands[1:]:
            uses.append(name.startswith("v_cndmask_b32") and operands.index(found[1], 1) == 1)
        if operands[0] == found[1]:
            break
    return 1 << 31 <= offset < (1 << 32) - 4096 and bool(uses) and all(uses)


def _bounded_anyway(mutant: Mutant, _: re.Match[str]) -> bool:
    """Whether a store behind lies past num_records where the compare does not hold: half >= halves, the address is
    (half * slots + slot) KiB and the buffer halves * slots KiB."""
    earlier, later = _around(mutant, 12, 4)
    around = [*earlier, mutant.before, *later]
    bound = _any(around, r"s_mul_i32 s\d+, (s\d+), (s\d+)")
    compare = _any(around, r"s_cmp_lt_u32 (s\d+), (s\d+)")
    if bound is None or compare is None or bound[2] != compare[2]:
        return False
    return (
        _loaded(mutant, mutant.line - 12, bound[1]) == _argument(mutant, 1)
        and _any(around, r"s_lshl_b32 s\d+, s\d+, 10") is not None
        and _any(around, rf"s_mul_i32 s\d+, {compare[1]}, {bound[1]}") is not None
        and _any(around, r"v_lshl_or_b32 v\d+, s\d+, 10, v\d+") is not None
    )


def _small_product(mutant: Mutant, found: re.Match[str]) -> bool:
    """Whether the product is one of a half tile's number and the KiB of all slots, which a plan keeps below 2 GiB, and
    what takes its place the square of that number."""
    earlier = _around(mutant, 10, 0)[0]
    half, pitch, *new = found.groups()[1:]
    slots = _any(earlier, rf"s_lshl_b32 {pitch}, (s\d+), 10")
    small = _any(earlier, rf"s_or_b32 {half}, .*") or _any(earlier, rf"s_lshl_b32 {half}, s\d+, 1")
    return (
        slots is not None
        and small is not None
        and new == [half, half]
        and _loaded(mutant, mutant.line - 1, slots[1]) == _argument(mutant, 1)
    )


REASONS: tuple[Reason, ...] = (
    Reason("equivalent: reached with no expert only, and a launch has one at least", r"(?s).*", _no_experts),
    Reason(
        "equivalent: the second correction of the division is never due (all grids below 2^20 blocks tried)",
        r"(?:s_cmp_ge_u32 (s\d+, s\d+) -> s_cmp_gt_u32 \1"
        r"|s_cselect_b32 (s\d+), s\d+, (s\d+) -> s_(?:mov_b32 \2, \3|cselect_b32 \2, s\d+, \3))",
        _second_correction,
    ),
    Reason(
        "equivalent: a first correction of the division left out at a multiple is made by the second",
        r"s_cmp_ge_u32 (s\d+, s\d+) -> s_cmp_gt_u32 \1",
        _first_correction,
    ),
    Reason(
        "equivalent: the reciprocal needs no refinement (as above), and the other register is not read on this way",
        r"s_add_i32 (s\d+), \1, (s\d+) -> s_add_i32 (s\d+), \1, \2",
        _unrefined,
    ),
    Reason(
        "equivalent: a shift takes the low five bits of its count",
        r"((?:s_lsh[lr]|s_ashr)_[bi]32 \S+, \S+,|(?:v_lsh[lr]|v_ashr)rev_[bi]32_e\d+ \S+,) (\w+)(.*) -> \1 (\w+)\3",
        lambda _, found: int(found[2], 0) % 32 == int(found[4], 0) % 32,
    ),
    Reason(
        "equivalent: lane 0 then loads at offset -4, which is out of range as well and gives the same zero",
        r"v_cndmask_b32_e\w+ (v\d+), v\d+, \1, \S+ -> v_mov_b32_e32 \1, \1",
        _lane_zero,
    ),
    Reason(
        "equivalent: experts' ranks are all different, so that a slot's own lane lies below the lane let in, "
        "and the lowest is taken",
        r"v_cmp_gt_u32_e32 vcc, (s\d+, v\d+) -> v_cmp_ge_u32_e32 vcc, \1",
        _ranked,
    ),
    Reason(
        "equivalent in bytes, only slower: an empty group goes through the loop too, all of it masked",
        r"(?:s_cselect_b32 (s\d+), 1, 0 -> s_mov_b32 \1, 1|s_cmp_le_u32 (s\d+, s\d+) -> s_cmp_lt_u32 \2)",
        _empty_as_well,
    ),
    Reason(
        "equivalent, only slower: experts are ranked where nobody asks for it, and the ranks are not taken",
        r"s_cselect_b32 (s\d+), (s\d+), 0 -> s_mov_b32 \1, \2",
        _ranks_unasked,
    ),
    Reason(
        "equivalent: a single expert's rank is 0, counted or not",
        r"s_cmp_lt_i32 (s\d+), 1 -> s_cmp_le_i32 \1, 1",
        _one_rank,
    ),
    Reason(
        "equivalent: whatever reads a matrix result behind it comes late enough by itself",
        r"s_nop \d+ -> s_nop 0",
        _waited_anyway,
    ),
    Reason(
        "equivalent, only slower: one more turn looks at lanes that are no experts, and takes nothing from them",
        r"v_cmp_gt_i32_e32 vcc, (s\d+), v\d+ -> v_cmp_ge_i32_e32 vcc, .*",
        _seeks_once_more,
    ),
    Reason(
        "equivalent: another offset past every buffer",
        r"v_bfrev_b32_e32 (v\d+), 1 -> v_bfrev_b32_e32 \1, (\w+)",
        _still_out_of_range,
    ),
    Reason(
        "equivalent: the store is dropped by its buffer's bound where the compare would have moved it out of range",
        r"(?:s_cmp_lt_u32 (s\d+, s\d+) -> s_cmp_le_u32 \1"
        r"|v_cndmask_b32_e32 (v\d+), v\d+, \2, vcc -> v_mov_b32_e32 \2, \2)",
        _bounded_anyway,
    ),
    Reason(
        "equivalent: a scalar load drops the low two bits of its address",
        r"(s_load_\w+ \S+ s\[0:1\]), (\w+) -> \1, (\w+)",
        lambda _, found: int(found[2], 0) >> 2 == int(found[3], 0) >> 2,
    ),
    Reason(
        "equivalent: at the boundary let in, the difference that is selected is the zero it would have been",
        r"s_cmp_gt_u32 (s\d+), (s\d+) -> s_cmp_ge_u32 \1, \2",
        _zero_either_way,
    ),
    Reason(
        "equivalent, only slower: one more turn of the clearing loop stores past its row, which is dropped",
        r"s_cmp_(?:lt_u32 (s\d+, s\d+) -> s_cmp_le_u32 \1|ge_u32 (s\d+, s\d+) -> s_cmp_gt_u32 \2)",
        _clearing_loop,
    ),
    Reason(
        "equivalent: both are zero, since a plan keeps the shuffled scales below 2 GiB",
        r"s_mul_hi_u32 (s\d+), (s\d+), (s\d+) -> s_mul_hi_u32 \1, (s\d+), (s\d+)",
        _small_product,
    ),
)


def reason(mutant: Mutant, among: Sequence[Reason] = REASONS) -> str | None:
    """The first of REASONS that holds for a survivor. What is not executed has the first alone to call on."""
    change = f"{mutant.before} -> {mutant.after}"
    for row in among:
        found = re.fullmatch(row.change, change)
        if found is not None and row.holds(mutant, found):
            return row.why
    return None


@dataclass(frozen=True)
class Report:
    """All outcomes, in the order they were judged."""

    outcomes: tuple[Outcome, ...]

    @property
    def made(self) -> Counter[str]:
        return Counter(o.mutant.kind for o in self.outcomes)

    @property
    def killed(self) -> Counter[str]:
        return Counter(o.mutant.kind for o in self.outcomes if o.killed)

    @property
    def survivors(self) -> tuple[Outcome, ...]:
        return tuple(o for o in self.outcomes if not o.killed)

    @property
    def unexplained(self) -> tuple[Outcome, ...]:
        return tuple(o for o in self.survivors if o.reason is None)

    @property
    def equivalent(self) -> Counter[str]:
        return Counter(o.mutant.kind for o in self.outcomes if o.equivalent)

    def __str__(self) -> str:
        same, rows = self.equivalent, []
        for kind in KINDS:
            rows.append(f"{kind:13s} {self.killed[kind]:4d} of {self.made[kind] - same[kind]:4d} killed")
            rows[-1] += f", {same[kind]} more equivalent" if same[kind] else ""
        dead, all_same = self.killed.total(), same.total()
        total = len(self.outcomes) - all_same
        rows.append(f"{'all':13s} {dead:4d} of {total:4d} killed, {100 * dead / max(total, 1):.1f} %")
        rows.append(f"{'':13s} and {all_same} that nobody can kill, each shown to be equivalent")
        rows += [f"survivor {o.mutant}\n    {o.detail}: {o.reason or 'UNEXPLAINED'}" for o in self.survivors]
        return "\n".join(rows)


def run(count: int = 300, seed: int = 0, progress: Callable[[Outcome], None] | None = None) -> Report:
    """Judge mutants until `count` are not equivalent, three quarters of them of the shipping kernel.

    Those of a kernel are judged in no order, so that a part is a fair sample.
    """
    spare = count // 4 + 4
    pools = []
    for kernel, wanted in (("shipping", count - count // 4), ("prepare", count // 4)):
        drawn = mutants(machine_code(kernel), count=wanted + spare, seed=seed)
        pools.append((wanted, [drawn[i] for i in np.random.default_rng(seed).permutation(len(drawn))]))
    outcomes = []
    for wanted, pool in pools:
        counted = 0
        for mutant in pool:
            if counted == wanted:
                break
            outcomes.append(judge(mutant))
            counted += not outcomes[-1].equivalent
            if mutant.kernel == "shipping":
                program.cache_clear()  # what a mutant was bound and planned as is some hundred megabytes
            if progress is not None:
                progress(outcomes[-1])
    return Report(tuple(outcomes))


def main(argv: Sequence[str]) -> int:
    count, seed = (int(a) for a in (*argv, *("300", "0")[len(argv) :]))

    def show(outcome: Outcome) -> None:
        print(f"{outcome.how or 'SURVIVED'}: {outcome.mutant}: {outcome.detail}", file=sys.stderr, flush=True)

    report = run(count, seed, show)
    print(report)
    return int(bool(report.unexplained))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
