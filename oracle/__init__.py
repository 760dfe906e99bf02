"""The numerical oracle: MX formats, quantizers, and exact answers for grouped GEMMs (NumPy and ml_dtypes only)."""

from .bound import ACCUMULATORS, Accumulator
from .formats import FORMATS, Format
from .gemm import Answer, dgrad, forward, wgrad
from .layouts import from_blocked, from_blocked_groups, to_blocked, to_blocked_groups
from .quantize import MXArray, dequantize, quantize
from .scales import PROFILES, SCALE_RULES, Profile

__all__ = [
    "ACCUMULATORS",
    "FORMATS",
    "PROFILES",
    "SCALE_RULES",
    "Accumulator",
    "Answer",
    "Format",
    "MXArray",
    "Profile",
    "dequantize",
    "dgrad",
    "forward",
    "from_blocked",
    "from_blocked_groups",
    "quantize",
    "to_blocked",
    "to_blocked_groups",
    "wgrad",
]
