"""The benchmark runs and reports what it should, and memory keeps its limit. Speed itself is not tested: a shared
machine decides it; `bench-oracle` prints it."""

from __future__ import annotations

import numpy as np
import pytest

from mxgate.conformance.bench_gemm import MEMORY, bench_wgrad, memory_ratio
from mxgate.oracle import quantize


def test_rows_of_the_table() -> None:
    rows = bench_wgrad(n=64, k=96, experts=2, tokens=256, repeats=2)
    assert [row["limit"] for row in rows] == [None, 4.0, 30.0, MEMORY, MEMORY]
    assert all(row["ratio"] > 0 for row in rows)
    assert [row["seconds"] is None for row in rows] == [False, False, False, True, True]


@pytest.mark.parametrize("spread", [0, 12])
def test_memory_stays_below_three_times_the_operands_and_the_output(spread: int) -> None:
    """Peak of NumPy's allocations, the operands' own included. BLAS's own buffers are not seen."""
    rng = np.random.default_rng(0)
    sides = []
    for _ in range(2):
        x = rng.standard_normal((256, 2048, 32), dtype=np.float32)
        x *= np.exp2(rng.integers(-spread, spread + 1, (256, 2048, 1))).astype(np.float32)
        sides.append(quantize(x.reshape(256, 65536), axis=1))
    assert memory_ratio(sides[0], sides[1], np.array([1 << 15, 1 << 16], np.int32)) <= MEMORY
