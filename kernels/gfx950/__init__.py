"""A CPU emulator of gfx950 (CDNA4) kernels: ISA text in, the kernel's own machine code run on NumPy arrays.

kernel = gfx950.parse(text)
result = gfx950.run(kernel, [x, y, out, 4096], grid=(16,), block=(256,))
result.findings            # hazards; arrays among the arguments hold what the kernel stored

with gfx950.virtual_device() as device:  # or under FlyDSL's own launches
    launch(x, y, 4096)
"""

from __future__ import annotations

from mxgate.kernels.gfx950.assumptions import ASSUMPTIONS
from mxgate.kernels.gfx950.hazards import KINDS, Finding, HazardError
from mxgate.kernels.gfx950.machine import Packed, RunError, RunResult, run
from mxgate.kernels.gfx950.mfma import MODELS
from mxgate.kernels.gfx950.text import Instruction, Kernel, TextError, parse
from mxgate.kernels.gfx950.virtual import VirtualDevice, virtual_device

__all__ = [
    "ASSUMPTIONS",
    "KINDS",
    "MODELS",
    "Finding",
    "HazardError",
    "Instruction",
    "Kernel",
    "Packed",
    "RunError",
    "RunResult",
    "TextError",
    "VirtualDevice",
    "parse",
    "run",
    "virtual_device",
]
