"""What a kernel costs, counted from its instructions: registers, and for each loop what one turn of its body issues.

Counts are a wave's. A loop is a backward branch; the innermost loops matter, since an outer one contains their text.
LDS bank conflicts and cache traffic need addresses and are not counted here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mxgate.kernels.gfx950 import memory
from mxgate.kernels.gfx950.machine import RunResult
from mxgate.kernels.gfx950.mfma import FORMS
from mxgate.kernels.gfx950.text import Instruction, Kernel


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
