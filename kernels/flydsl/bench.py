"""How quick the emulator is on the cases it was built for.

Times are CPU seconds of this process, the best of the runs: a busy machine shows less in them than in wall time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from mxgate.kernels import gfx950
from mxgate.kernels.flydsl import wgrad
from mxgate.kernels.gfx950.bench import measure

N, K, TOKENS = 1408, 2048, 8192
SIZES = tuple(32 * round(32 * (0.5 + i / 7)) for i in range(8))  # ragged, 8,192 tokens together
# Seconds at most, by whether hazards are looked for; None: no target.
DENSE: Mapping[bool, float | None] = {False: 0.15, True: None}
FULL: Mapping[bool, float | None] = {False: 4.0, True: 8.0}


def _full(hazards: bool) -> tuple[tuple[gfx950.RunResult, ...], float]:
    """The shipping rung on SIZES, 384 blocks of four waves."""
    rng = np.random.default_rng(0)
    plan = wgrad.launch_plan("shipping", N, K, TOKENS, len(SIZES))
    buffers: dict[str, Any] = {
        "dy_t": rng.integers(0x20, 0x50, (N, TOKENS), dtype=np.uint8),
        "dy_scales": rng.integers(125, 130, (N, TOKENS // 32), dtype=np.uint8),
        "x_t": rng.integers(0x20, 0x50, (K, TOKENS), dtype=np.uint8),
        "x_scales": rng.integers(125, 130, (K, TOKENS // 32), dtype=np.uint8),
        "offsets": np.cumsum(SIZES, dtype=np.int32),
        "dw": np.zeros((len(SIZES), N, plan.row_pitch), ml_dtypes.bfloat16),
        **{name: np.zeros(size, np.uint8) for name, size in plan.scratch.items()},
    }
    best = float("inf")
    for _ in range(2):  # the first compiles the kernels as well
        start = time.process_time()
        results = wgrad.emulate(plan, buffers, hazards=hazards)
        best = min(best, time.process_time() - start)
    return results, best


def bench(quick: bool = False) -> Iterator[dict[str, Any]]:
    """A row a case: what, seconds, instructions (of waves) and flops; most: the target in seconds, None without."""
    assert sum(SIZES) == TOKENS
    for hazards in (False, True):
        side = 256 if quick else 1024
        result, seconds = measure(side, hazards=hazards, repeats=2)
        what = f"dense fp8 {side}^3, hazards {'on' if hazards else 'off'}"
        yield _row(what, seconds, (result,), None if quick else DENSE[hazards])
    for hazards in () if quick else (False, True):
        results, seconds = _full(hazards)
        yield _row(f"wgrad {N}x{K}, 8 experts, hazards {'on' if hazards else 'off'}", seconds, results, FULL[hazards])


def _row(what: str, seconds: float, results: tuple[gfx950.RunResult, ...], most: float | None) -> dict[str, Any]:
    instructions, flops = (sum(getattr(r, name) for r in results) for name in ("instructions", "flops"))
    return {
        "what": what,
        "seconds": seconds,
        "instructions": instructions,
        "flops": flops,
        "most": most,
        "met": None if most is None else seconds <= most,
    }
