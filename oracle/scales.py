"""Block scales: the E8M0 byte of a block from the float32 bits of its largest magnitude, in integers only.

A rule gives the byte of a finite, non-zero maximum; a profile adds what happens to everything else.
log2 and division never appear: both round, and a rounded one is off by an exponent next to a power of two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .formats import FORMATS, Format, bit_length

I64 = NDArray[np.int64]

# (biased exponent, 23 mantissa bits, element format) of a normalised maximum -> byte before clamping
Rule = Callable[[I64, I64, Format], I64]


def _floor(exponent: I64, mantissa: I64, row: Format) -> I64:
    return exponent - row.emax


def _ceil(exponent: I64, mantissa: I64, row: Format) -> I64:
    return exponent - row.emax + (mantissa > 0)


def _even(exponent: I64, mantissa: I64, row: Format) -> I64:
    return exponent - row.emax + ((mantissa + (1 << (22 - row.mantissa_bits))) >> 23)


def _rceil(exponent: I64, mantissa: I64, row: Format) -> I64:
    return exponent - row.emax + (mantissa > _top_mantissa(row))


def _r175(exponent: I64, mantissa: I64, row: Format) -> I64:
    return exponent - row.emax + (mantissa >= 0x600000)


def _top_mantissa(row: Format) -> int:
    """The 23 float32 mantissa bits of the format's largest value: 0x600000 for 448 = 1.75 * 2^8."""
    return int((row.max_finite / 2.0**row.emax - 1.0) * 2**23)


SCALE_RULES: Mapping[str, Rule] = MappingProxyType(
    {"floor": _floor, "ceil": _ceil, "even": _even, "rceil": _rceil, "r175": _r175}
)


def scale_bytes(maximum_bits: NDArray[Any], rule: str, row: Format) -> I64:
    """The byte (0 .. 254) of finite float32 maxima given as bit patterns; a zero maximum gives 0."""
    bits = maximum_bits.astype(np.int64)
    exponent = bits >> 23
    mantissa = bits & 0x7FFFFF
    # A subnormal is moved up until its leading one is the hidden bit, and its exponent down as far.
    shift = np.where((exponent == 0) & (mantissa > 0), 24 - bit_length(mantissa), 0)
    exponent = np.where(shift > 0, 1 - shift, exponent)
    mantissa = (mantissa << shift) & 0x7FFFFF
    byte = np.clip(SCALE_RULES[rule](exponent, mantissa, row), 0, 254)
    return np.where(bits == 0, 0, byte)


@dataclass(frozen=True)
class Profile:
    """A rule with its policies. `formats` are the element formats that the profile is known to be true for."""

    name: str
    rule: str
    formats: tuple[str, ...]


PROFILES: Mapping[str, Profile] = MappingProxyType({"ocp": Profile("ocp", "floor", tuple(FORMATS))})
