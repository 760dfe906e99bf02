"""How quick the emulator is: `python -m mxgate.kernels.gfx950.bench` runs the sample kernel, hazards off and on.

Times are CPU seconds of this process, of which a busy machine takes fewer than of wall time, and the best of several
runs: a neighbour on the same caches can double one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from mxgate.kernels.gfx950 import RunResult, parse, run
from mxgate.kernels.gfx950.sample.compile import texts

RUNS, SECONDS = 3, 2.0
T = TypeVar("T")


def best(call: Callable[[], T]) -> tuple[T, float]:
    """What a call answers and its best time in CPU seconds: of RUNS, or of as many as SECONDS hold. A first one, which
    compiles and plans, is not counted."""
    call()
    times: list[float] = []
    while len(times) < RUNS or sum(times) < SECONDS:
        start = time.process_time()
        answer = call()
        times.append(time.process_time() - start)
    return answer, min(times)


def measure(n: int = 512, *, hazards: bool) -> tuple[RunResult, float]:
    """An n x n x n product by the sample kernel (n a multiple of 128) and its best time in seconds."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(0x20, 0x50, (n, n), dtype=np.uint8) for _ in range(2))
    sa, sb = (rng.integers(125, 130, (n, n // 32), dtype=np.uint8) for _ in range(2))
    c, kernel = np.zeros((n, n), np.float32), parse(texts()["dense_right_async"])
    return best(lambda: run(kernel, [a, b, sa, sb, c, n, n, n], (n // 64, n // 64), hazards=hazards))


def main() -> None:
    for n in (512, 1024):
        for hazards in (False, True):
            result, seconds = measure(n, hazards=hazards)
            print(
                f"dense fp8 {n}^3, hazards {'on ' if hazards else 'off'}: {seconds:6.3f} s, "
                f"{result.instructions / seconds / 1e6:5.2f} M wave-instructions/s, "
                f"{result.flops / seconds / 1e9:5.1f} GFLOP/s"
            )


if __name__ == "__main__":
    main()
