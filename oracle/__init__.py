"""The numerical oracle: MX formats, quantizers, and exact answers for grouped GEMMs (NumPy and ml_dtypes only)."""

from .formats import FORMATS, Format
from .quantize import MXArray, dequantize, quantize
from .scales import PROFILES, SCALE_RULES, Profile

__all__ = ["FORMATS", "PROFILES", "SCALE_RULES", "Format", "MXArray", "Profile", "dequantize", "quantize"]
