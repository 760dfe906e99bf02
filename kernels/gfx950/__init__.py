"""A CPU emulator of gfx950 (CDNA4) kernels: ISA text in, the kernel's own machine code run on NumPy arrays.

kernel = gfx950.parse(text)
result = gfx950.run(kernel, [x, y, out, 4096], grid=(16,), block=(256,))
result.findings            # hazards; arrays among the arguments hold what the kernel stored
"""

from __future__ import annotations

from mxgate.kernels.gfx950.assumptions import ASSUMPTIONS
from mxgate.kernels.gfx950.hazards import KINDS, Finding
from mxgate.kernels.gfx950.machine import RunError, RunResult, run
from mxgate.kernels.gfx950.mfma import MODELS
from mxgate.kernels.gfx950.text import Instruction, Kernel, TextError, parse

__all__ = [
    "ASSUMPTIONS",
    "KINDS",
    "MODELS",
    "Finding",
    "Instruction",
    "Kernel",
    "RunError",
    "RunResult",
    "TextError",
    "parse",
    "run",
]
