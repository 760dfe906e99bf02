"""What the exact wgrad answer costs: its time beside float32 matrix products of the same size, and its peak memory.

Everything is measured in one process, interleaved, so that a busy machine slows both sides of a ratio.
"""

from __future__ import annotations

import tracemalloc
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxgate.oracle.gemm import wgrad
from mxgate.oracle.quantize import MXArray, quantize

# The data of a row, by how far its block scales are spread, with the most it may cost.
SPREADS = {"normal data": (0, 4.0), "scales spread over 2^+-12": (12, 30.0)}
MEMORY = 3.0


def _operand(rng: np.random.Generator, rows: int, length: int, spread: int) -> MXArray:
    elements, scales = [], []
    for start in range(0, rows, 64):  # in pieces: the float32 source is four times the operand
        some = min(64, rows - start)
        x = rng.standard_normal((some, length // 32, 32), dtype=np.float32)
        x *= np.exp2(rng.integers(-spread, spread + 1, (some, length // 32, 1))).astype(np.float32)
        part = quantize(x.reshape(some, length), axis=1)
        elements.append(part.elements)
        scales.append(part.scales)
    return MXArray(np.concatenate(elements), np.concatenate(scales), 1, "e4m3fn")


def bench_wgrad(
    *, n: int = 1408, k: int = 2048, experts: int = 8, tokens: int = 8192, repeats: int = 3, seed: int = 0
) -> list[dict[str, Any]]:
    """Rows of a ratio table: what, seconds, ratio and limit, for `experts` groups of `tokens` tokens each.

    Times are medians of `repeats`, ratios medians of the ratios to the float32 products run just before and after.
    The spread scales get one group only. Memory: NumPy's peak, the operands' included and the answer's not, over the
    operands; its `seconds` is None.
    """
    rng = np.random.default_rng(seed)
    x, y = (rng.standard_normal((rows, tokens), dtype=np.float32) for rows in (n, k))
    ends = np.arange(1, experts + 1, dtype=np.int32) * np.int32(tokens)
    work = {}
    for name, (spread, _) in SPREADS.items():
        sides = [_operand(rng, rows, experts * tokens, spread) for rows in (n, k)]
        work[name] = (sides[0], sides[1], ends[:1] if spread else ends)

    def matmul(times: int) -> float:
        start = perf_counter()
        out = np.empty((times, n, k), np.float32)  # both sides pay for the pages of their answer
        for result in out:
            np.matmul(x, y.T, out=result)
        return perf_counter() - start

    def exact(a: MXArray, b: MXArray, offsets: NDArray[np.int32]) -> float:
        start = perf_counter()
        wgrad(a, b, offsets)
        return perf_counter() - start

    matmul(1)
    seconds: dict[str, list[float]] = {name: [] for name in ("one float32 matmul", *work)}
    ratios: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(repeats):
        for name, (a, b, offsets) in work.items():
            groups = len(offsets)
            before, time, after = matmul(groups), exact(a, b, offsets), matmul(groups)
            seconds["one float32 matmul"] += [before / groups * experts, after / groups * experts]
            seconds[name].append(time / groups * experts)
            ratios[name].append(time / ((before + after) / 2))
    rows: list[dict[str, Any]] = [
        {"what": "one float32 matmul", "seconds": median(seconds["one float32 matmul"]), "ratio": 1.0, "limit": None}
    ]
    for name, (_, limit) in SPREADS.items():
        what = f"exact wgrad with magnitude, {name}"
        rows.append({"what": what, "seconds": median(seconds[name]), "ratio": median(ratios[name]), "limit": limit})
    for name, (a, b, offsets) in work.items():
        what = f"peak memory over the operands', {name}"
        rows.append({"what": what, "seconds": None, "ratio": memory_ratio(a, b, offsets), "limit": MEMORY})
    return rows


def memory_ratio(a: MXArray, b: MXArray, offsets: NDArray[np.int32]) -> float:
    """NumPy's peak in wgrad, operands included and the answer left out, over the operands. BLAS's own is not seen."""
    operands = sum(part.nbytes for mx in (a, b) for part in (mx.elements, mx.scales))
    tracemalloc.start()
    try:
        answer = wgrad(a, b, offsets)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return (operands + peak - answer.value.nbytes - answer.magnitude.nbytes) / operands
