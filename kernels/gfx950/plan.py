"""Basic blocks as lists of closures, one list for each way a block can be entered.

What is outstanding (loads by instruction, in issue order) and how old the last MFMA results are is known without
data, so a block is planned once for each such state: where results are delivered (as late as the waits permit), which
registers are read too early, and which MFMAs run as one product. Running a block is then calling its closures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from mxgate.kernels.gfx950 import memory, mfma, salu, valu
from mxgate.kernels.gfx950.hazards import register_name
from mxgate.kernels.gfx950.mfma import Batch, Shelf, Source, Tile, wait_states
from mxgate.kernels.gfx950.state import SCALAR_BASE, Array, Layout, Step, Waves, allowed, unsigned
from mxgate.kernels.gfx950.text import EXEC, SCC, VCC, Instruction, Kernel

Op = Callable[[Waves], None]
BRANCHES: dict[str, Callable[[Waves], Array]] = {
    "s_cbranch_scc0": lambda st: ~st.scc,
    "s_cbranch_scc1": lambda st: st.scc,
    "s_cbranch_vccz": lambda st: (st.s[VCC] | st.s[VCC + 1]) == 0,
    "s_cbranch_vccnz": lambda st: (st.s[VCC] | st.s[VCC + 1]) != 0,
    "s_cbranch_execz": lambda st: (st.s[EXEC] | st.s[EXEC + 1]) == 0,
    "s_cbranch_execnz": lambda st: (st.s[EXEC] | st.s[EXEC + 1]) != 0,
}
CONTROL = frozenset(BRANCHES) | {"s_branch", "s_barrier", "s_endpgm"}
FULL = {"vmcnt": 63, "lgkmcnt": 15}  # a counter's largest value waits for nothing
LONGEST = 21  # wait states after which no MFMA result is early


def mnemonics() -> frozenset[str]:
    """Every base mnemonic with semantics here."""
    return frozenset((*salu.ROWS, *mfma.FORMS, *memory.BINDERS, "s_waitcnt")) | salu.NOTHING | valu.MNEMONICS | CONTROL


def bind(lay: Layout, inst: Instruction) -> Step:
    """An instruction's semantics; an error that names an unknown mnemonic or modifier and its line."""
    base = inst.base
    for o in inst.operands[:1] if base in valu.MNEMONICS else inst.operands:
        unsigned(inst, o)
    if base in CONTROL or base == "s_waitcnt":
        allowed(inst, ("vmcnt", "lgkmcnt"))
        reads = {"vcc": (VCC, VCC + 1), "exe": (EXEC, EXEC + 1), "scc": (SCC,)}.get(
            base.removeprefix("s_cbranch_")[:3], ()
        )
        return Step(inst, "control", tuple(SCALAR_BASE + r for r in reads), (), None)
    if base == "s_nop" and not all(o.kind == "const" and o.value in range(16) for o in inst.operands):
        raise inst.error("expected a number from 0 to 15")
    if base in salu.NOTHING or base == "v_nop":
        return Step(inst, "nothing", (), (), None)
    if base in salu.ROWS:
        return salu.bind(lay, inst)
    if base in memory.BINDERS:
        return memory.BINDERS[base](lay, inst)
    if base in mfma.FORMS:
        return mfma.bind(lay, inst)
    if base in valu.MNEMONICS:
        return valu.bind(lay, inst)
    raise inst.error("unknown mnemonic")


class Entry(NamedTuple):
    """What is outstanding: vector-memory and LDS/scalar loads (instruction indices, oldest first), MFMA results
    (index, age)."""

    vm: tuple[int, ...] = ()
    lg: tuple[int, ...] = ()
    matrix: tuple[tuple[int, int], ...] = ()
    tiles: tuple[Any, ...] = ()  # keys of matrix results that are not in their registers


@dataclass
class Plan:
    """A block up to its branch, label or end, in parts with a barrier between."""

    ops: list[list[Op]]
    checked: list[list[Op]]  # the same with uninitialised-register checks between
    exit: Entry
    control: Instruction | None
    following: int
    instructions: Array  # the block's instruction indices
    exposed: Array  # registers read before the block writes them
    written: Array
    changes_exec: bool
    executions: int = 0


@dataclass
class Program:
    """A kernel bound for one arithmetic model, with its plans so far."""

    kernel: Kernel
    hazards: bool
    model: str
    steps: list[Step] = field(default_factory=list)
    plans: dict[tuple[int, Entry], Plan] = field(default_factory=dict)
    tiles: dict[Any, Tile] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lay = Layout(self.kernel)
        self.steps = [bind(lay, i) for i in self.kernel.instructions]

    def plan(self, start: int, entry: Entry) -> Plan:
        got = self.plans.get((start, entry))
        if got is None:
            got = self.plans[start, entry] = _Planner(self, start, entry).plan()
        return got


@lru_cache(maxsize=16)
def program(kernel: Kernel, hazards: bool, model: str) -> Program:
    return Program(kernel, hazards, model)


class _Planner:
    def __init__(self, p: Program, start: int, entry: Entry) -> None:
        self.p, self.start = p, start
        self.vm, self.lg = list(entry.vm), list(entry.lg)
        self.pending: dict[int, int] = {}
        for i in (*self.vm, *self.lg):
            self._hold(i, 1)
        self.matrix = [(i, -age) for i, age in entry.matrix]  # (instruction, time of issue)
        self.held = {key: p.tiles[key] for key in entry.tiles}
        self.time = 0
        self.ops: list[list[Op]] = [[]]
        self.checked: list[list[Op]] = [[]]
        self.batch: Batch | None = None
        self.slots: dict[tuple[object, ...], int] = {}
        self.shelves: dict[int, Shelf] = {}
        # Of each register, how many writes this block had seen when it was last written.
        self.versions: dict[int, int] = {}
        self.writes = 0

    def _hold(self, index: int, by: int) -> None:
        for r in self.p.steps[index].writes:
            self.pending[r] = self.pending.get(r, 0) + by

    def _written(self, step: Step) -> None:
        self.writes += 1
        self.versions.update(dict.fromkeys(step.writes, self.writes))

    def emit(self, op: Op) -> None:
        self.ops[-1].append(op)
        self.checked[-1].append(op)

    def plan(self) -> Plan:
        p, k = self.p, self.p.kernel
        labels = frozenset(k.labels.values())
        exposed: dict[int, None] = {}
        written: dict[int, None] = {}
        i, control = self.start, None
        while True:
            step = p.steps[i]
            inst = step.inst
            for r in step.reads:
                if r not in written:
                    exposed.setdefault(r)
            if p.hazards:
                self._early(step)
                self._stale_matrix(step)
                if step.reads:
                    self.checked[-1].append(_check(step, k))
            if inst.base == "s_barrier":
                self.ops.append([])
                self.checked.append([])
            elif inst.base in CONTROL:
                control = inst
                if inst.base == "s_endpgm":
                    while self.vm:
                        self._retire(self.vm, 0, "vm")
                    while self.lg:
                        self._retire(self.lg, 0, "lg")
            elif inst.base == "s_waitcnt":
                self._wait(inst)
            elif step.kind == "matrix":
                self._matrix(step)
            elif step.run is not None:
                self._flush_for(step.reads, step.writes if step.kind in ("scalar", "vector", "lane") else ())
                self._run(step)
            self._written(step)
            for r in step.writes:
                written.setdefault(r)
            if p.hazards and step.writes:
                self.checked[-1].append(_mark(step))
            self.time += int(inst.operands[0].value) + 1 if inst.base == "s_nop" and inst.operands else 1
            i += 1
            if control is not None or i in labels or i >= len(p.steps):
                break
        self._flush()
        matrix = tuple((m, self.time - t) for m, t in self.matrix if self.time - t <= LONGEST) if p.hazards else ()
        return Plan(
            self.ops,
            self.checked,
            Entry(tuple(self.vm), tuple(self.lg), matrix, tuple(sorted(self.held))),
            control,
            i,
            np.arange(self.start, i),
            np.array(list(exposed), np.intp),
            np.array(list(written), np.intp),
            SCALAR_BASE + EXEC in written or SCALAR_BASE + EXEC + 1 in written,
        )

    # ---- what must not be touched yet
    def _early(self, step: Step) -> None:
        k, inst = self.p.kernel, step.inst
        early = [r for r in step.reads if r in self.pending]
        if early:
            who = next(i for i in (*self.vm, *self.lg) if early[0] in self.p.steps[i].writes)
            text = f"{register_name(early[0], k)} is loaded at line {k.instructions[who].line} and not waited for"
            self.emit(_finding("register-before-wait", inst, early[0], text))
        queue = self.vm if step.kind == "vm" else self.lg if step.kind in ("ds", "smem") else []
        mine = {r for i in queue if self.p.steps[i].kind == step.kind for r in self.p.steps[i].writes}
        lost = [r for r in step.writes if r in self.pending and r not in mine]
        if lost:
            who = next(i for i in (*self.vm, *self.lg) if lost[0] in self.p.steps[i].writes)
            text = f"{register_name(lost[0], k)} is still to be loaded by line {k.instructions[who].line}"
            self.emit(_finding("register-overwritten", inst, lost[0], text))

    def _stale_matrix(self, step: Step) -> None:
        """MFMA results touched within their wait states. One instruction is one wait state, s_nop N is N + 1."""
        self.matrix = [(m, t) for m, t in self.matrix if self.time - t <= LONGEST]
        if not self.matrix or not (step.reads or step.writes):
            return
        mine = step.matrix
        for m, t in self.matrix:
            other = self.p.steps[m].matrix
            read, overlap, write = wait_states(other)
            result = set(other.d)
            passed = self.time - t - 1
            need = 0
            if mine is not None:
                c = mine.c if not isinstance(mine.c, float) else ()
                if not result.isdisjoint({*mine.a.planes, *mine.b.planes, *mine.a.scale_ids, *mine.b.scale_ids}):
                    need = read
                elif not result.isdisjoint(c) and tuple(c) != other.d:
                    need = overlap
            elif not result.isdisjoint(step.reads):
                need = read
            elif step.kind == "vector" and not result.isdisjoint(step.writes):
                need = write
            if need > passed:
                line = self.p.kernel.instructions[m].line
                first = sorted(result & {*step.reads, *step.writes})[0]
                name = register_name(first, self.p.kernel)
                text = f"{name} is the result of line {line}: {passed} of {need} wait states passed"
                self.emit(_finding("matrix-result-early", step.inst, first, text))

    # ---- asynchronous operations
    def _run(self, step: Step) -> None:
        run, i = step.run, step.inst.index
        assert run is not None
        if step.kind == "vm":
            self.vm.append(i)
            self.emit(lambda st: st.vm.append(run(st)))
        elif step.kind in ("ds", "smem"):
            self.lg.append(i)
            self.emit(lambda st: st.lg.append(run(st)))
        else:
            self.emit(run)
            return
        self._hold(i, 1)

    def _retire(self, queue: list[int], place: int, name: str) -> None:
        i = queue.pop(place)
        step = self.p.steps[i]
        for r in step.writes:
            self.pending[r] -= 1
            if not self.pending[r]:
                del self.pending[r]
        self._flush_for((), step.writes)
        self._written(step)
        complete = step.complete
        if name == "vm":
            self.emit((lambda st: complete(st, st.vm.pop(place))) if complete else lambda st: st.vm.pop(place))
        else:
            self.emit((lambda st: complete(st, st.lg.pop(place))) if complete else lambda st: st.lg.pop(place))

    def _wait(self, inst: Instruction) -> None:
        vm = inst.modifiers.get("vmcnt")
        lg = inst.modifiers.get("lgkmcnt")
        if isinstance(vm, int) and vm < FULL["vmcnt"]:
            while len(self.vm) > vm:
                self._retire(self.vm, 0, "vm")
        if isinstance(lg, int) and lg < FULL["lgkmcnt"]:
            # LDS operations return in order, scalar loads in any: n outstanding may be the last n LDS operations or
            # scalar ones.
            while True:
                ds = [place for place, i in enumerate(self.lg) if self.p.steps[i].kind == "ds"]
                if len(ds) <= lg:
                    break
                self._retire(self.lg, ds[0], "lg")
            while lg == 0 and self.lg:
                self._retire(self.lg, 0, "lg")

    # ---- matrix instructions
    def _matrix(self, step: Step) -> None:
        m = step.matrix
        if self.batch is not None and self.batch.conflicts(m):
            self._flush()
        self._release({*m.a.planes, *m.b.planes, *m.a.scale_ids, *m.b.scale_ids})
        slots = self._capture(m.a), self._capture(m.b)
        if self.batch is not None and self.batch.holds(*slots):
            self._flush()
        if self.batch is None:
            self.batch = Batch(self.p.model)
        self.batch.add(m, *slots)
        self.matrix.append((step.inst.index, self.time))

    def _capture(self, source: Source) -> int:
        """Keep an operand as it is now: its registers may be reused before the batch runs."""
        versions = tuple(self.versions.get(r, 0) for r in (*source.planes, *source.scale_ids))
        key = (source.key, versions)
        if key not in self.slots:
            n = len(source.planes)
            shelf = self.shelves.setdefault(n, Shelf(n))
            self.slots[key] = shelf.operands
            shelf.operands += 1
            self.emit(shelf.keep(self.slots[key], source))
        return self.slots[key]

    def _flush_for(self, reads: tuple[int, ...], writes: tuple[int, ...]) -> None:
        """Bring the registers up to date before something else reads or writes these."""
        if self.batch is not None and (self.batch.touches(reads, False) or self.batch.touches(writes, True)):
            self._flush()
        self._release({*reads, *writes})

    def _release(self, registers: set[int] | frozenset[int], but: Any = None) -> None:
        for key in [k for k, tile in self.held.items() if k != but and not tile.registers.isdisjoint(registers)]:
            self.emit(self.held.pop(key).release)

    def _flush(self) -> None:
        if self.batch is None:
            return
        products = self.batch.close(self.shelves)
        self.batch = None
        for product in products:
            for r in product.rectangles:
                self._release(r.result.registers, r.result.key)
                if not isinstance(r.accumulator, float):
                    in_place = r.accumulator.key == r.result.key
                    self._release(r.accumulator.registers, r.result.key if in_place else None)
            self.emit(product.run)
            for r in product.rectangles:
                self.held[r.result.key] = self.p.tiles.setdefault(r.result.key, r.result)


def _finding(kind: str, inst: Instruction, register: int, text: str) -> Op:
    def report(st: Waves) -> None:
        bad = st.mask if st.mask.any() else np.arange(64) == 0
        st.machine.report(kind, inst, st, bad, register if register < SCALAR_BASE else register - SCALAR_BASE, text)

    return report


def _upper(step: Step) -> tuple[int, int] | None:
    """The upper words of a 64-bit multiply-add's addend and result, where both are vector registers.

    Compilers use the instruction for 32-bit sums and leave the upper half of the addend to chance. It reaches nothing
    but the upper half of the result: reading it is no fault, using that half would be.
    """
    if step.inst.base not in ("v_mad_u64_u32", "v_mad_i64_i32"):
        return None
    result, addend = step.inst.operands[0], step.inst.operands[-1]
    if (addend.kind, result.kind) != ("v", "v") or step.reads.count(addend.index + 1) > 1:
        return None  # a factor as well
    return addend.index + 1, result.index + 1


def _check(step: Step, kernel: Kernel) -> Op:
    upper = _upper(step)
    reads = np.array(sorted(set(step.reads) - ({upper[0]} if upper else set())), np.intp)

    def check(st: Waves) -> None:
        if st.initialised[reads].all():
            return
        for r in reads[~st.initialised[reads]]:
            bad = ~st.known(int(r))
            if not step.every_lane:
                bad &= st.mask
            if bad.any():
                text = f"{register_name(int(r), kernel)} was never written there"
                st.machine.report("register-uninitialised", step.inst, st, bad, int(r) % SCALAR_BASE, text)

    return check


def _mark(step: Step) -> Op:
    upper = _upper(step)
    writes = np.array(sorted(set(step.writes) - ({upper[1]} if upper else set())), np.intp)

    def mark(st: Waves) -> None:
        if upper is not None:
            addend, result = upper
            known: Array = np.where(st.mask, st.known(addend), st.known(result))
            st.initialised[result] = bool(known.all())
            st.partial[result] = known
        # v_writelane writes one lane of a register that only v_readlane reads, so it counts as whole.
        whole = st.full or step.every_lane or step.kind == "lane"
        for r in writes:
            if whole or r >= SCALAR_BASE:
                st.initialised[r] = True
            elif not st.initialised[r]:
                st.partial[int(r)] = st.known(int(r)) | st.mask
                if st.partial[int(r)].all():
                    st.initialised[r] = True
        return

    return mark
