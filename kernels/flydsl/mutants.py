"""Wrong machine code: the weight gradient's own text with one instruction changed, and whether anybody notices.

A gate that accepts the shipping kernel shows little until it rejects its neighbours. Each mutant is the compiled text
of the shipping kernel, or of the one before it, with one fault of a kind that compilers and hand-written code have had;
it is killed when the emulator refuses its text, reports a hazard, or gives other bytes than the numeric contract's. A
mutant that lives is listed, with a reason where one of REASONS holds, and as unexplained where none does.

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
from mxgate.kernels.flydsl.compile import machine_code
from mxgate.kernels.gfx950 import memory
from mxgate.kernels.gfx950.plan import program
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
    """

    name: str
    sizes: tuple[int, ...]
    n: int
    k: int
    m: int
    nan: tuple[int, ...] = ()
    seed: int = 0
    line: int | None = None


# From cheap to dear, nearly. The second has a group of six bodies that starts and ends in the middle of one, its end
# past the middle, N and K over one tile; the third has bands enough to need the division's correction, and both kinds
# of narrow edge; the fourth more experts than lanes. EDGES end K in each of the eight fragments of a quadrant and put
# the 4 GiB line in each buffer. PADDING is over 16,384 tokens of it, enough for the loops that clear it to go round
# twice.
CASES = (
    Case("one tile", (96, 32, 352, 0, 64), 250, 236, 576, (1,)),
    Case("six bodies", (128, 32, 1280, 32, 0, 64), 272, 300, 1600, (1, 3), 1),
    Case("tiles", (64, 32), 1544, 700, 128, (1,), 2),
    Case("experts", tuple(32 * (e in (0, 62, 63, 64, 66)) for e in range(67)), 16, 20, 160, (), 3),
)
EDGES = (
    *(Case(f"edge {f}", (32, 0), 16 * f + 21, 268 + 16 * f, 64, (), 5 + f, f % 7) for f in range(8)),
    Case("one expert", (32,), 21, 40, 64, (), 13),
    Case("second", (800, 64), 24, 40, 896, (), 14),
    Case("nothing", (0,), 5, 6, 64, (), 15),
)
PADDING = Case("padding", (64, 96), 6, 5, 18624, (), 4)
RUNS: Mapping[str, tuple[Case, ...]] = MappingProxyType(
    {"shipping": (*CASES, *EDGES), "prepare": (*CASES[:2], PADDING, *EDGES, *CASES[2:])}
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
    Order((32,) * 64 + (768,), 16, 16, 1),
    Order((32,) * 63 + (768,), 1024, 1024, 1),
    Order((32,) * 62 + (768,), 1024, 1024, 1),
)
LANES = 64
FILL = 0x5A5A  # a finite bf16 that no case's answer holds


def _operands(sizes: tuple[int, ...], n: int, k: int, m: int, nan: tuple[int, ...], seed: int) -> tuple[Array, ...]:
    """dY^T, its scales, X^T, its scales, offsets. Elements -3 .. 3 under scales 1 to 32: sums stay below 2^24."""
    rng = np.random.default_rng(seed)
    table = decode_table("e4m3fn")
    small = np.flatnonzero((np.abs(table) <= 3) & (table == np.rint(table))).astype(np.uint8)
    offsets = np.cumsum(sizes).astype(np.int32)
    planes: list[Array] = []
    for rows in (n, k):
        data = rng.choice(small, (rows, m))
        scales = rng.integers(127, 133, (rows, m // 32)).astype(np.uint8)
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

    Elsewhere all buffers lie within 4 GiB, and the upper half of an address could be any buffer's.
    """
    before = memory.BASE
    if line is not None:
        which = line % len(arrays)
        start = memory.Memory([a.nbytes for a in arrays]).starts[which]
        memory.BASE = (before | 0xFFFFFFFF) + 1 - (start + arrays[which].nbytes // 2) // 256 * 256
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
    with _crossing(arrays, line), warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return gfx950.run(kernel, arguments, *shape, limit=limit, **options)


@functools.cache
def _setting(case: Case) -> _Setting:
    operands = _operands(case.sizes, case.n, case.k, case.m, case.nan, case.seed)
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
    """how: "parse error", "crash", "hazard", "wrong bytes" or "wrong order", with the case and a detail.

    A survivor has how None, and the reason that shows it to be equivalent, or why no case can tell, or None.
    """

    mutant: Mutant
    how: str | None
    detail: str
    reason: str | None = None

    @property
    def killed(self) -> bool:
        return self.how is not None


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
    place = next(i.index for i in kernel.instructions if i.line >= mutant.line)
    if not executed[place]:
        return Outcome(mutant, None, "no case executes it", reason(mutant))
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
    except (gfx950.RunError, IndexError, OverflowError, MemoryError, ValueError, KeyError) as error:
        return "crash", f"{order}: {type(error).__name__}: {error}"
    tiles = buffers["dw"][:, :: wgrad.TILE, :: wgrad.TILE] != FILL
    got = frozenset(tuple(int(i) for i in place) for place in np.argwhere(tiles))
    return ("wrong order", f"{order}: tiles {sorted(got)}") if got != want else (None, "")


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
def _one_correction() -> bool:
    """Whether the division by reciprocal is never two too small: dividends below 2^20, divisors to 512, which are the
    grids and tiles of an expert. The quotient steps up at a multiple, so that and what is just below are tried."""
    for divisor in range(1, 513):
        scaled = np.float32(1) / np.float32(divisor) * np.array(0x4F7FFFFE, np.uint32).view(np.float32)
        estimate = int(scaled)
        estimate += estimate * (-divisor * estimate % (1 << 32)) >> 32
        multiples = np.arange(0, 1 << 20, divisor, dtype=np.int64)
        for n in (multiples, multiples + divisor - 1):
            if int((n // divisor - (n * estimate >> 32)).max()) > 1:
                return False
    return True


def _second_correction(mutant: Mutant, _: re.Match[str]) -> bool:
    earlier, _later = _around(mutant, 3, 0)
    if mutant.before.startswith("s_cmp"):
        earlier = earlier[1:]
    else:
        if not earlier[2].startswith("s_cmp_ge_u32"):
            return False
        earlier = earlier[:2]
    step = re.fullmatch(r"s_add_i32 s\d+, s\d+, 1", earlier[1])
    return step is not None and earlier[0].startswith("s_cselect_b32") and _one_correction()


def _first_correction(mutant: Mutant, _: re.Match[str]) -> bool:
    later = _around(mutant, 0, 4)[1]
    names = [line.split()[0] for line in later]
    return names == ["s_cselect_b32", "s_cselect_b32", "s_add_i32", "s_cmp_ge_u32"] and _one_correction()


def _lane_zero(mutant: Mutant, found: re.Match[str]) -> bool:
    return _any(_around(mutant, 6, 0)[0], rf"v_add_u32_e32 {found[1]}, -4, v\d+") is not None


def _ranked(mutant: Mutant, _: re.Match[str]) -> bool:
    later = _around(mutant, 0, 80)[1]
    return mutant.kernel == "shipping" and _any(later, r"s_and_b64 s\[\d+:\d+\], vcc, s\[\d+:\d+\]") is not None


def _empty_as_well(mutant: Mutant, found: re.Match[str]) -> bool:
    earlier, later = _around(mutant, 2, 1)
    return earlier[0] == "s_mov_b64 s[14:15], 0" and later == [f"s_cmp_lg_u32 {found[1]}, 1"]


def _zero_either_way(mutant: Mutant, found: re.Match[str]) -> bool:
    earlier, later = _around(mutant, 16, 8)
    rest = _any(earlier, rf"s_sub_i32 (s\d+), {found[1]}, {found[2]}")
    return rest is not None and _any(later, rf"s_cselect_b32 s\d+, {rest[1]}, 0") is not None


def _clearing_loop(mutant: Mutant, _: re.Match[str]) -> bool:
    earlier, later = _around(mutant, 1, 2)
    stores = any(line.startswith("buffer_store") for line in (*earlier, *later))
    return mutant.kernel == "prepare" and stores and any(line.startswith("s_cbranch_scc") for line in later)


def _unread_bits(_mutant: Mutant, found: re.Match[str]) -> bool:
    return int(found[2], 0) ^ int(found[3], 0) < 1 << 19


def _no_experts(mutant: Mutant, _: re.Match[str]) -> bool:
    """Whether the block is entered by one branch alone, taken where a count of experts is below 1."""
    lines = [" ".join(line.split(";")[0].split()) for line in mutant.original.splitlines()]
    label = next((i for i in range(mutant.line - 1, -1, -1) if re.fullmatch(r"\.LBB\w+:", lines[i])), None)
    if label is None:
        return False
    _name, code = _read(mutant.original)
    earlier = [code.lines[p] for p in code.places if p < label]
    entries = [i for i, p in enumerate(code.places) if code.lines[p].endswith(" " + lines[label][:-1])]
    return (
        earlier[-1].startswith("s_branch ")
        and len(entries) == 1
        and code.lines[code.places[entries[0]]].startswith("s_cbranch_scc1 ")
        and "s_cmp_lt_i32 s23, 1" in [code.lines[p] for p in code.places[entries[0] - 2 : entries[0]]]
        and mutant.kernel == "prepare"
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
        "equivalent in bytes, only slower: an empty group goes through the loop too, all of it masked, "
        "and its zeros are stored twice",
        r"s_cselect_b32 (s\d+), 1, 0 -> s_mov_b32 \1, 1",
        _empty_as_well,
    ),
    Reason(
        "equivalent: at the boundary let in, the difference that is selected is the zero it would have been",
        r"s_cmp_gt_u32 (s\d+), (s\d+) -> s_cmp_ge_u32 \1, \2",
        _zero_either_way,
    ),
    Reason(
        "equivalent: bits of the descriptor that only typed accesses read (destination select and format)",
        r"s_mov_b32 (s\d+), (0x27\w+) -> s_mov_b32 \1, (0x\w+)",
        _unread_bits,
    ),
    Reason(
        "equivalent, only slower: one more turn of the clearing loop stores past its row, which is dropped",
        r"s_cmp_(?:lt_u32 (s\d+, s\d+) -> s_cmp_le_u32 \1|ge_u32 (s\d+, s\d+) -> s_cmp_gt_u32 \2)",
        _clearing_loop,
    ),
    Reason(
        "not equivalent: the upper half of an offset, zero in every case since no operand has 4 GiB",
        r"s_mul_hi_u32 (s\d+), s\d+, s\d+ -> s_mul_hi_u32 \1, s\d+, s\d+",
        lambda _mutant, _found: True,
    ),
)


def reason(mutant: Mutant) -> str | None:
    """The first of REASONS that holds for a survivor."""
    change = f"{mutant.before} -> {mutant.after}"
    for row in REASONS:
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

    def __str__(self) -> str:
        rows = [f"{kind:13s} {self.killed[kind]:4d} of {self.made[kind]:4d} killed" for kind in KINDS]
        total, dead = len(self.outcomes), sum(o.killed for o in self.outcomes)
        rows.append(f"{'all':13s} {dead:4d} of {total:4d} killed, {100 * dead / max(total, 1):.1f} %")
        rows += [f"survivor {o.mutant}\n    {o.detail}: {o.reason or 'UNEXPLAINED'}" for o in self.survivors]
        return "\n".join(rows)


def run(count: int = 300, seed: int = 0, progress: Callable[[Outcome], None] | None = None) -> Report:
    """Judge `count` mutants, three quarters of them of the shipping kernel, in no order: a part is a fair sample."""
    share = count // 4
    chosen = [
        *mutants(machine_code("shipping"), count=count - share, seed=seed),
        *mutants(machine_code("prepare"), count=share, seed=seed),
    ]
    outcomes = []
    for mutant in (chosen[i] for i in np.random.default_rng(seed).permutation(len(chosen))):
        outcomes.append(judge(mutant))
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
