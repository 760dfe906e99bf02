"""How quick the emulator is: `python -m mxgate.kernels.gfx950.bench` runs the sample kernel, hazards off and on.

Times are CPU seconds of this process (a busy machine shows less in them than in wall time), best of three.
"""

from __future__ import annotations

import time

import numpy as np

from mxgate.kernels.gfx950 import RunResult, parse, run
from mxgate.kernels.gfx950.sample.compile import texts


def measure(n: int = 512, *, hazards: bool, repeats: int = 3) -> tuple[RunResult, float]:
    """An n x n x n product by the sample kernel (n a multiple of 128) and its best time in seconds."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(0x20, 0x50, (n, n), dtype=np.uint8) for _ in range(2))
    sa, sb = (rng.integers(125, 130, (n, n // 32), dtype=np.uint8) for _ in range(2))
    c, kernel, best = np.zeros((n, n), np.float32), parse(texts()["dense_right_async"]), float("inf")
    for _ in range(repeats):
        start = time.process_time()
        result = run(kernel, [a, b, sa, sb, c, n, n, n], (n // 64, n // 64), hazards=hazards)
        best = min(best, time.process_time() - start)
    return result, best


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
