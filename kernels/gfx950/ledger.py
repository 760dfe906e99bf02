"""What a kernel costs, counted from its instructions: registers, and for each loop what one turn of its body issues.

Counts are a wave's. A loop is a backward branch; the innermost loops matter, since an outer one contains their text.
What needs addresses is counted by two observers of a run: `Banks`, the conflicts of LDS accesses, and `Traffic`, the
cache lines that each XCD brings in and the work of each workgroup, which `finish` deals out to compute units.

Assumed, not measured. LDS: 64 banks of 4 bytes; lanes are served in their order, as many at a time as can ask for 256
bytes: all 64 for up to 4 bytes a lane, 32 for 8, 16 for 12 and 16; a bank gives one word a cycle, to any number of
lanes. The two addresses of ds_read2 are two accesses. Caches: workgroup i runs on XCD i mod 8; a line is 128 bytes and
comes into an XCD once, however often that XCD asks for it. Compute units: 256, a workgroup each at a time (what 128 KiB
of LDS or 512 registers leave room for), all equally fast, and the next workgroup goes to the first that is free.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mxgate.kernels.gfx950 import memory
from mxgate.kernels.gfx950.machine import RunResult
from mxgate.kernels.gfx950.mfma import FORMS
from mxgate.kernels.gfx950.state import Array, Waves
from mxgate.kernels.gfx950.text import Instruction, Kernel

BANKS = 64
SERVED = {12: 16, 16: 16, 8: 32}  # lanes that LDS serves together, by a lane's bytes; all 64 for fewer bytes
XCDS = 8
UNITS = 256
LINE = 128
NOWHERE = np.int64(np.iinfo(np.int64).max)


@dataclass(frozen=True)
class Counts:
    """One pass over some instructions by one wave. Bytes and lane addresses are of all 64 lanes."""

    instructions: int
    mfma: int
    vector_memory: int
    lane_addresses: int
    bytes_loaded: int
    bytes_stored: int
    lds_fills: int
    lds_reads: int
    lds_writes: int
    lds_bytes_read: int
    permutes: int
    lane_reads: int
    waits: int
    full_drains: int
    barriers: int
    branches: int


@dataclass(frozen=True)
class Loop:
    """Lines first..last of the text, its counts a turn, and how often waves went through it (None: not run)."""

    first: int
    last: int
    innermost: bool
    waterfall: bool
    counts: Counts
    turns: int | None


@dataclass(frozen=True)
class Ledger:
    """The static facts of a kernel, the whole text's counts, and its loops in order of the text."""

    kernel: str
    vgprs: int
    agprs: int
    sgprs: int
    vgpr_spills: int
    sgpr_spills: int
    scratch_bytes: int
    lds_bytes: int
    text: Counts
    loops: tuple[Loop, ...]


def _width(base: str) -> int:
    form = base.split("_store_")[-1].split("_load_")[-1].removeprefix("lds_")
    if form in memory.WIDTHS:
        return memory.WIDTHS[form]
    return memory.NARROW[form][0] if form in memory.NARROW else memory.STORE_NARROW.get(form, (4, 0))[0]


def count(instructions: Sequence[Instruction]) -> Counts:
    """Counts of one pass over these instructions."""
    vector = [
        i for i in instructions if i.base.startswith(("buffer_", "global_", "scratch_")) and i.base in memory.BINDERS
    ]
    loads = [i for i in vector if "_load_" in i.base]
    stores = [i for i in vector if "_store_" in i.base]
    reads = [i for i in instructions if i.base.startswith("ds_read")]
    waits = [i for i in instructions if i.base == "s_waitcnt"]
    return Counts(
        instructions=len(instructions),
        mfma=sum(i.base in FORMS for i in instructions),
        vector_memory=len(vector),
        lane_addresses=64 * len(vector),
        bytes_loaded=64 * sum(_width(i.base) for i in loads),
        bytes_stored=64 * sum(_width(i.base) for i in stores),
        lds_fills=sum("lds" in i.modifiers or "_lds_" in i.base for i in loads),
        lds_reads=len(reads),
        lds_writes=sum(i.base.startswith("ds_write") for i in instructions),
        lds_bytes_read=64 * sum((memory.ds_bytes(i.base) or 0) * (2 if "read2" in i.base else 1) for i in reads),
        permutes=sum(i.base in ("ds_bpermute_b32", "ds_permute_b32", "ds_swizzle_b32") for i in instructions),
        lane_reads=sum(i.base in ("v_readfirstlane_b32", "v_readlane_b32") for i in instructions),
        waits=len(waits),
        full_drains=sum(i.modifiers.get("vmcnt") == 0 for i in waits),
        barriers=sum(i.base == "s_barrier" for i in instructions),
        branches=sum(i.base.startswith(("s_branch", "s_cbranch")) for i in instructions),
    )


def _waterfall(body: Sequence[Instruction]) -> bool:
    """A loop that the compiler puts around an instruction whose scalar operand it could not prove uniform."""
    names = [i.base for i in body]
    masked = any(n.endswith("_saveexec_b64") for n in names)
    return masked and "v_readfirstlane_b32" in names and names[-1] == "s_cbranch_execnz"


def ledger(kernel: Kernel, result: RunResult | None = None) -> Ledger:
    """The ledger of a kernel; with a run's result, also how often its loops were gone through."""
    spans = sorted(
        (kernel.labels[i.operands[0].text], i.index)
        for i in kernel.instructions
        if i.base.startswith(("s_branch", "s_cbranch")) and kernel.labels[i.operands[0].text] <= i.index
    )
    loops = []
    for first, last in spans:
        body = kernel.instructions[first : last + 1]
        inner = any((a, b) != (first, last) and first <= a and b <= last for a, b in spans)
        turns = None if result is None else int(result.executed[last])
        loops.append(Loop(body[0].line, body[-1].line, not inner, _waterfall(body), count(body), turns))
    return Ledger(
        kernel=kernel.name,
        vgprs=kernel.vgprs,
        agprs=kernel.agprs,
        sgprs=kernel.sgprs,
        vgpr_spills=kernel.vgpr_spills,
        sgpr_spills=kernel.sgpr_spills,
        scratch_bytes=kernel.scratch_bytes,
        lds_bytes=kernel.lds_bytes,
        text=count(kernel.instructions),
        loops=tuple(loops),
    )


def resources(found: Ledger) -> dict[str, int]:
    """What a wave of the kernel takes, and how long its text is, as named figures."""
    return {
        "registers": found.vgprs + found.agprs,
        "vector registers": found.vgprs,
        "accumulation registers": found.agprs,
        "scalar registers": found.sgprs,
        "spills": found.vgpr_spills + found.sgpr_spills,
        "scratch bytes": found.scratch_bytes,
        "LDS bytes": found.lds_bytes,
        "instructions": found.text.instructions,
        "waterfall loops": sum(loop.waterfall for loop in found.loops),
    }


def a_turn(loop: Loop) -> dict[str, int]:
    """What a wave issues in one turn of a loop, as named figures."""
    c = loop.counts
    return {
        "loop: instructions": c.instructions,
        "loop: matrix instructions": c.mfma,
        "loop: vector-memory instructions": c.vector_memory,
        "loop: lane addresses": c.lane_addresses,
        "loop: bytes loaded": c.bytes_loaded,
        "loop: loads to registers": c.vector_memory - c.lds_fills,
        "loop: LDS reads": c.lds_reads,
        "loop: LDS bytes read": c.lds_bytes_read,
        "loop: permutes": c.permutes,
        "loop: lane reads": c.lane_reads,
        "loop: waits": c.waits,
        "loop: full drains": c.full_drains,
        "loop: barriers": c.barriers,
        "loop: branches": c.branches,
        "executed: turns of the loop": loop.turns or 0,
    }


def launched(results: Sequence[RunResult]) -> dict[str, dict[str, int]]:
    """The figures of each kernel that was launched, by name: its resources, a turn of the innermost loop that issued
    most, and what all its launches executed together."""
    found: dict[str, dict[str, int]] = {}
    for name in dict.fromkeys(result.kernel.name for result in results):
        mine = [result for result in results if result.kernel.name == name]
        held = ledger(mine[0].kernel, mine[0])
        inner = [loop for loop in held.loops if loop.innermost]
        busiest = max(inner, key=lambda loop: (loop.turns or 0) * loop.counts.instructions, default=None)
        found[name] = {
            **resources(held),
            **(a_turn(busiest) if busiest is not None else {}),
            "executed: launches": len(mine),
            "executed: instructions": sum(result.instructions for result in mine),
        }
    return found


# ---------------------------------------------------------------- LDS banks


def bank_cycles(address: Array, active: Array, size: int) -> Array:
    """int[W, groups]: cycles that LDS takes for each group of lanes of an access; 0 for a group without active lanes.

    address: bytes, int[W, 64]; active: bool[W, 64]; size: a lane's bytes.
    """
    lanes = SERVED.get(size, 64)
    words = (address[..., None] >> 2) + np.arange(max(size // 4, 1))
    words = np.where(active[..., None], words, -1).reshape(-1, lanes * words.shape[-1])
    words.sort(axis=1)
    asked = words >= 0
    asked[:, 1:] &= words[:, 1:] != words[:, :-1]
    rows = np.arange(len(words))[:, None] * BANKS
    load = np.bincount((rows + words % BANKS)[asked], minlength=len(words) * BANKS)
    return load.reshape(len(address), -1, BANKS).max(-1)


@dataclass(frozen=True)
class Conflicts:
    """LDS accesses of one instruction over a run. ways: lanes that at worst wait for one bank; 1 is free of conflicts.

    extra: cycles beyond one a group of lanes, of all waves together.
    """

    instruction: Instruction
    waves: int
    ways: int
    extra: int


class Banks:
    """An observer of a run: LDS bank conflicts by instruction."""

    def __init__(self) -> None:
        self._found: dict[int, Conflicts] = {}

    def __call__(self, space: str, inst: Instruction, st: Waves, address: Array, active: Array, size: int) -> None:
        if space != "lds":
            return
        cycles = bank_cycles(address, active, size)
        old = self._found.get(inst.index, Conflicts(inst, 0, 0, 0))
        extra = int(np.maximum(cycles - 1, 0).sum())
        self._found[inst.index] = Conflicts(inst, old.waves + st.n, max(old.ways, int(cycles.max())), old.extra + extra)

    def of(self, lines: tuple[int, int]) -> tuple[Conflicts, ...]:
        """Of the LDS instructions at lines first .. last of the text, in its order."""
        found = (self._found[i] for i in sorted(self._found))
        return tuple(c for c in found if lines[0] <= c.instruction.line <= lines[1])


# ---------------------------------------------------------------- lines and work


class Traffic:
    """An observer of a run: which XCD brings in which lines, and what each of `workgroups` reads and where it stores.

    loads, lds_reads: instructions issued by all waves of a workgroup, int64[workgroups]. home: the lowest address it
    stores to, NOWHERE for none.
    """

    def __init__(self, workgroups: int) -> None:
        self.loads, self.lds_reads = (np.zeros(workgroups, np.int64) for _ in range(2))
        self.home = np.full(workgroups, NOWHERE)
        self.requested = 0  # lines that wave instructions ask for, each instruction's counted once
        self._touched = np.zeros((XCDS, 0), bool)

    def __call__(self, space: str, inst: Instruction, st: Waves, address: Array, active: Array, size: int) -> None:
        if space == "lds":
            if inst.base.startswith("ds_read"):
                np.add.at(self.lds_reads, st.gid, 1)
        elif space == "load":
            np.add.at(self.loads, st.gid, 1)
            self._bring(st, address, active, size)
        else:
            np.minimum.at(self.home, st.gid, np.where(active, address, NOWHERE).min(1))

    def _bring(self, st: Waves, address: Array, active: Array, size: int) -> None:
        if not self._touched.shape[1]:
            self._touched = np.zeros((XCDS, st.machine.memory.bytes.size // LINE + 1), bool)
        first, last = (address - memory.BASE) // LINE, (address - memory.BASE + size - 1) // LINE
        if not np.array_equal(first, last):
            first, active = np.concatenate([first, last], 1), np.concatenate([active, active], 1)
        lines = np.sort(np.where(active, first, -1), axis=1)
        new = (lines >= 0) & (lines < self._touched.shape[1])
        new[:, 1:] &= lines[:, 1:] != lines[:, :-1]
        wave, at = np.nonzero(new)
        self._touched[st.gid[wave] % XCDS, lines[wave, at]] = True
        self.requested += len(wave)

    @property
    def by_xcd(self) -> tuple[int, ...]:
        """Bytes that each XCD brings in."""
        return tuple(int(n) * LINE for n in self._touched.sum(1))

    @property
    def distinct(self) -> int:
        """Bytes of all lines that anybody reads."""
        return int(self._touched.any(0).sum()) * LINE


def without_matrix(kernel: Kernel) -> Kernel:
    """The kernel with its matrix instructions made into s_nop: what it costs to find addresses and turns alone.

    For kernels whose addresses and branches depend on no matrix result; it is several times as quick.
    """
    return replace(kernel, instructions=tuple(_idle(i) if i.base in FORMS else i for i in kernel.instructions))


def _idle(inst: Instruction) -> Instruction:
    return replace(inst, text="s_nop 0", mnemonic="s_nop", base="s_nop", operands=(), modifiers={})


def finish(costs: Sequence[int], units: int = UNITS) -> int:
    """When the last of some workgroups is done that are handed out in this order, each to the first unit free."""
    free = [0] * units
    for cost in costs:
        heapq.heapreplace(free, free[0] + int(cost))
    return max(free)
