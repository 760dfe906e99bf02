"""What each rung's machine code costs, as figures that may not rise.

Static figures are a wave's, of a kernel or of one turn of its main loop (the innermost one with most matrix
instructions); executed ones are of all waves on the routing below. A budget is a JSON file of the same figures; a
figure above it, or one that it does not hold, is over it. Bank conflicts and what the caches bring in are not counted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from mxgate.kernels import gfx950
from mxgate.kernels.flydsl import compile as isa
from mxgate.kernels.flydsl import wgrad
from mxgate.kernels.gfx950.ledger import Ledger, ledger

BUDGET = Path(__file__).with_name("budget.json")
# Builds of wgrad.BUILDS with machine code of their own, and their kernels.
KERNELS_OF: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "wgrad/flydsl_simplest": ("simplest",),
        "wgrad/flydsl_plain": ("plain", "plain_bytes"),
        "wgrad/flydsl": ("prepare", "shipping"),
    }
)
RUNG_OF = dict(zip(KERNELS_OF, wgrad.RUNGS, strict=True))
STEPS = {"simplest": 1, "plain": 2, "plain_bytes": 2, "shipping": 2}  # of 128 tokens in a turn of the main loop
SIZES, N, K = (1056, 32, 0, 224), 96, 160
BUFFERS = (1408, 1376)  # tokens: rows of scales that start at a multiple of four bytes, and that do not

Figures = Mapping[str, int]


def inspect(build: str) -> Mapping[str, Figures]:
    """The figures of each kernel of a build of KERNELS_OF. Raises StaleError where there is no machine code."""
    executed: dict[str, gfx950.RunResult] = {}
    for tokens in BUFFERS:
        plan, results = _run(RUNG_OF[build], tokens)
        for call, result in zip(plan.calls, results, strict=True):
            executed.setdefault(call.kernel, result)
    return {kernel: _figures(kernel, executed[kernel]) for kernel in KERNELS_OF[build]}


def _run(rung: str, tokens: int) -> tuple[wgrad.Plan, tuple[gfx950.RunResult, ...]]:
    plan = wgrad.launch_plan(rung, N, K, tokens, len(SIZES))
    blocks = tokens // wgrad.BLOCK
    buffers: dict[str, Any] = {
        "dy_t": np.zeros((N, tokens), np.uint8),
        "dy_scales": np.zeros((N, blocks), np.uint8),
        "x_t": np.zeros((K, tokens), np.uint8),
        "x_scales": np.zeros((K, blocks), np.uint8),
        "offsets": np.cumsum(SIZES, dtype=np.int32),
        "dw": np.zeros((len(SIZES), N, plan.row_pitch), ml_dtypes.bfloat16),
        **{name: np.zeros(size, np.uint8) for name, size in plan.scratch.items()},
    }
    return plan, wgrad.emulate(plan, buffers, hazards=False)


def _figures(kernel: str, result: gfx950.RunResult) -> Figures:
    found: Ledger = ledger(gfx950.parse(isa.machine_code(kernel)), result)
    figures = {
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
    main = max((x for x in found.loops if x.innermost and x.counts.mfma), key=lambda x: x.counts.mfma, default=None)
    if main is not None:
        c, steps = main.counts, STEPS[kernel]
        # The scales; in the simplest rung, which has no LDS, the elements too. No main loop stores anything.
        direct = c.vector_memory - c.lds_fills
        figures |= {
            "loop: 128-token steps": steps,
            "loop: instructions": c.instructions,
            "loop: matrix instructions": c.mfma,
            "loop: vector-memory instructions": c.vector_memory,
            "loop: lane addresses": c.lane_addresses,
            "loop: bytes loaded": c.bytes_loaded,
            "loop: loads to registers": direct,
            "loop: their lane addresses a step": direct * 64 // steps,
            "loop: LDS reads": c.lds_reads,
            "loop: LDS bytes read": c.lds_bytes_read,
            "loop: permutes": c.permutes,
            "loop: lane reads": c.lane_reads,
            "loop: waits": c.waits,
            "loop: full drains": c.full_drains,
            "loop: barriers": c.barriers,
            "loop: branches": c.branches,
            "executed: turns of the loop": main.turns or 0,
        }
    matrix = [i.base.startswith("v_mfma") for i in result.kernel.instructions]
    figures["executed: instructions"] = result.instructions
    figures["executed: matrix instructions"] = int(result.executed[matrix].sum())
    return figures


def read(path: Path) -> Mapping[str, Mapping[str, Figures]]:
    """Budgets by build and kernel. Raises ValueError for a file that is not one."""
    try:
        record = json.loads(path.read_bytes())
        if all(type(v) is int for kernels in record.values() for figures in kernels.values() for v in figures.values()):
            return record  # type: ignore[no-any-return]
    except (ValueError, AttributeError):
        pass
    raise ValueError(f"{path} is no budget; expected {{build: {{kernel: {{figure: whole number}}}}}}")


def over(figures: Mapping[str, Figures], budget: Mapping[str, Figures]) -> tuple[str, ...]:
    """Every figure above its budget or without one, as a line."""
    return tuple(
        f"{kernel}, {name}: {value}, " + ("not in the budget" if allowed is None else f"above the budget of {allowed}")
        for kernel, of in figures.items()
        for name, value in of.items()
        if (allowed := budget.get(kernel, {}).get(name)) is None or value > allowed
    )
