"""What each rung's machine code costs, as figures that may not rise.

Static figures are a wave's, of a kernel or of one turn of its main loop (the innermost one with most matrix
instructions); executed ones are of all waves on the small routing below, and bank conflicts are counted there. Placed
ones are of the full-size routing, on the device that the ledger assumes: what its eight XCDs bring in, and when its
256 compute units are done, in bodies of the main loop, the peeled ones included. A budget is a JSON file of the same
figures; a figure above it, or one that it does not hold, is over it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from mxgate.kernels import gfx950
from mxgate.kernels.flydsl import compile as isa
from mxgate.kernels.flydsl import wgrad
from mxgate.kernels.gfx950.ledger import (
    BANKS,
    LINE,
    NOWHERE,
    UNITS,
    XCDS,
    Banks,
    Ledger,
    Loop,
    Traffic,
    a_turn,
    finish,
    ledger,
    resources,
    without_matrix,
)
from mxgate.kernels.gfx950.machine import BATCH, Observer

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
# Eight experts, the fullest with half as many tokens again as the emptiest, in an order that is no order.
PLACED, PLACED_N, PLACED_K = (992, 1216, 800, 1088, 928, 1152, 864, 1152), 1408, 2048

Figures = Mapping[str, int]


def inspect(build: str) -> Mapping[str, Figures]:
    """The figures of each kernel of a build of KERNELS_OF. Raises StaleError where there is no machine code."""
    rung = RUNG_OF[build]
    found: dict[str, dict[str, int]] = {}
    for tokens in BUFFERS:
        plan = wgrad.launch_plan(rung, N, K, tokens, len(SIZES))
        buffers = _buffers(plan, SIZES, N, K, tokens)
        for call in plan.calls:
            if call.kernel not in found:
                kernel, banks = gfx950.parse(isa.machine_code(call.kernel)), Banks()
                result = _launch(kernel, call, buffers, banks)
                found[call.kernel] = _figures(call.kernel, ledger(kernel, result), result, banks)
    for name, placed in _placed(rung).items():
        found[name] |= placed
    return {name: found[name] for name in KERNELS_OF[build]}


def notes() -> tuple[str, ...]:
    """What the figures are of and rest on, as lines of at most 100 columns for below a table of them."""
    return (
        "loop: one turn of the main loop by one wave",
        f"executed: by all waves, on groups of {', '.join(map(str, SIZES))} tokens, dW {N}x{K}",
        f"placed: {len(PLACED)} groups of {min(PLACED)} to {max(PLACED)} tokens, dW {PLACED_N}x{PLACED_K};"
        f" block i on XCD i mod {XCDS}, a line of {LINE} bytes",
        f"comes into an XCD once, {UNITS} units take a block each in launch order; units of time are loop bodies",
        f"assumed of LDS: {BANKS} banks of 4 bytes; 16 lanes of 16 bytes, 32 of 8 or 64 of 4 are served together",
    )


def _buffers(plan: wgrad.Plan, sizes: Sequence[int], n: int, k: int, tokens: int) -> dict[str, Any]:
    blocks = tokens // wgrad.BLOCK
    return {
        "dy_t": np.zeros((n, tokens), np.uint8),
        "dy_scales": np.zeros((n, blocks), np.uint8),
        "x_t": np.zeros((k, tokens), np.uint8),
        "x_scales": np.zeros((k, blocks), np.uint8),
        "offsets": np.cumsum(sizes, dtype=np.int32),
        "dw": np.zeros((len(sizes), n, plan.row_pitch), ml_dtypes.bfloat16),
        **{name: np.zeros(size, np.uint8) for name, size in plan.scratch.items()},
    }


def _launch(
    kernel: gfx950.Kernel, call: wgrad.Call, buffers: Mapping[str, Any], observe: Observer, batch: int = BATCH
) -> gfx950.RunResult:
    arguments = [buffers[a] if isinstance(a, str) else a for a in call.arguments]
    shape = (call.blocks, 1, 1), (call.threads, 1, 1)
    return gfx950.run(kernel, arguments, *shape, hazards=False, observe=observe, batch=batch)


def _main_loop(found: Ledger) -> Loop | None:
    return max((x for x in found.loops if x.innermost and x.counts.mfma), key=lambda x: x.counts.mfma, default=None)


def _placed(rung: str) -> Mapping[str, Figures]:
    """The figures of the full-size routing, of each kernel with a main loop that it launches."""
    tokens = sum(PLACED)
    plan = wgrad.launch_plan(rung, PLACED_N, PLACED_K, tokens, len(PLACED))
    buffers = _buffers(plan, PLACED, PLACED_N, PLACED_K, tokens)
    figures: dict[str, Figures] = {}
    for call in plan.calls:
        kernel = gfx950.parse(isa.machine_code(call.kernel))
        main = _main_loop(ledger(kernel))
        if main is None:  # a small kernel before the main one: nothing here depends on what it leaves
            continue
        traffic = Traffic(call.blocks)
        _launch(without_matrix(kernel), call, buffers, traffic, batch=1024)
        # A wave's LDS reads, or without LDS its loads, in units of one turn's: peeled bodies count like the loop's.
        c = main.counts
        reads, each = (traffic.lds_reads, c.lds_reads) if c.lds_reads else (traffic.loads, c.vector_memory)
        bodies = reads // (each * call.threads // 64)
        assert (traffic.home != NOWHERE).all()
        by_expert = bodies[np.argsort(traffic.home, kind="stable")]
        figures[call.kernel] = {
            "placed: workgroups": call.blocks,
            "placed: bytes asked for": traffic.requested * LINE,
            "placed: bytes into all XCDs": sum(traffic.by_xcd),
            "placed: bytes into one XCD, at most": max(traffic.by_xcd),
            "placed: bytes read by anybody": traffic.distinct,
            "placed: bodies": int(bodies.sum()),
            "placed: bodies of a workgroup, at most": int(bodies.max()),
            "placed: bodies of a unit, at the least": max(-(-int(bodies.sum()) // UNITS), int(bodies.max())),
            "placed: bodies until all are done": finish(bodies.tolist()),
            "placed: the same, experts in order": finish(by_expert.tolist()),
        }
    return figures


def _figures(kernel: str, found: Ledger, result: gfx950.RunResult, banks: Banks) -> dict[str, int]:
    figures = resources(found)
    main = _main_loop(found)
    if main is not None:
        turn, steps = a_turn(main), STEPS[kernel]
        conflicts = banks.of((main.first, main.last))
        # The loads to registers are the scales; in the simplest rung, which has no LDS, the elements too. No main loop
        # stores anything.
        figures |= {
            "loop: 128-token steps": steps,
            **turn,
            "loop: their lane addresses a step": turn["loop: loads to registers"] * 64 // steps,
            "loop: LDS bank conflicts": math.ceil(sum(x.extra for x in conflicts) / max(main.turns or 0, 1)),
            "loop: lanes that wait for a bank": max((x.ways for x in conflicts), default=0),
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
    except (ValueError, AttributeError, RecursionError):
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
