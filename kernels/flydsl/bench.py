"""How quick the emulator is on the cases it was built for.

Times are those of mxgate.kernels.gfx950.bench.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from mxgate.kernels import gfx950
from mxgate.kernels.flydsl import wgrad
from mxgate.kernels.gfx950.bench import best, measure

SIZES = tuple(32 * round(32 * (0.5 + i / 7)) for i in range(8))  # ragged, 8,192 tokens together


@dataclass(frozen=True)
class Problem:
    """A weight gradient by the shipping rung. most: seconds at most, by whether hazards are looked for; None: no
    target."""

    what: str
    n: int
    k: int
    sizes: tuple[int, ...]
    most: tuple[float | None, float | None]


PROBLEMS = (
    # One expert whose tokens are the contraction: 16 blocks of 256 x 256.
    Problem("dense fp8 1024^3", 1024, 1024, (1024,), (0.15, None)),
    Problem("wgrad 1408x2048, 8 experts", 1408, 2048, SIZES, (4.0, 8.0)),
)
QUICK = (Problem("dense fp8 256^3", 256, 256, (256,), (None, None)),)


def _time(p: Problem, hazards: bool) -> tuple[tuple[gfx950.RunResult, ...], float]:
    """What a problem's kernels gave and their best time together, in CPU seconds."""
    rng = np.random.default_rng(0)
    tokens = sum(p.sizes)
    plan = wgrad.launch_plan("shipping", p.n, p.k, tokens, len(p.sizes))
    buffers: dict[str, Any] = {
        "dy_t": rng.integers(0x20, 0x50, (p.n, tokens), dtype=np.uint8),
        "dy_scales": rng.integers(125, 130, (p.n, tokens // 32), dtype=np.uint8),
        "x_t": rng.integers(0x20, 0x50, (p.k, tokens), dtype=np.uint8),
        "x_scales": rng.integers(125, 130, (p.k, tokens // 32), dtype=np.uint8),
        "offsets": np.cumsum(p.sizes, dtype=np.int32),
        "dw": np.zeros((len(p.sizes), p.n, plan.row_pitch), ml_dtypes.bfloat16),
        **{name: np.zeros(size, np.uint8) for name, size in plan.scratch.items()},
    }
    return best(lambda: wgrad.emulate(plan, buffers, hazards=hazards))


def bench(quick: bool = False) -> Iterator[dict[str, Any]]:
    """A row a case: what, seconds, instructions (of waves) and flops; most: the target in seconds, None without."""
    side = 256 if quick else 1024
    for hazards in (False, True):
        result, seconds = measure(side, hazards=hazards)
        yield _row(f"dense fp8 {side}^3 in 64x64 blocks", hazards, seconds, (result,), None)
    for p in QUICK if quick else PROBLEMS:
        for hazards in (False, True):
            results, seconds = _time(p, hazards)
            yield _row(p.what, hazards, seconds, results, p.most[hazards])


def _row(
    what: str, hazards: bool, seconds: float, results: tuple[gfx950.RunResult, ...], most: float | None
) -> dict[str, Any]:
    instructions, flops = (sum(getattr(r, name) for r in results) for name in ("instructions", "flops"))
    return {
        "what": f"{what}, hazards {'on' if hazards else 'off'}",
        "seconds": seconds,
        "instructions": instructions,
        "flops": flops,
        "most": most,
        "met": None if most is None else seconds <= most,
    }
