"""Block scales: the E8M0 byte of a block from the float32 bits of its largest magnitude, in integers only.

A rule gives the byte of a finite, non-zero maximum. A profile is a rule with policies for everything
else, under the name of the implementation that was measured to behave so: where that implementation has
a bug the profile has it too and its `note` says so. `ocp` has none of them and is the default.

log2 and division appear only as integer models of peers that use them: both round, and a rounded one is
off by an exponent next to a power of two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from math import isqrt
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .formats import FORMATS, SCALE_NAN, Format, bit_length

I64 = NDArray[np.int64]

INFINITY_BITS = 0x7F800000
NAN_BITS = 0x7FC00000

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
    """The 23 mantissa bits of the format's largest value as a float32: 0x600000 for 448 = 1.75 * 2^8."""
    return int(row.max_finite / 2.0**row.emax * 2**23) - 2**23


# floor is OCP MX v1.0 section 6.3. even rounds the maximum to the element's mantissa first; rceil takes the
# smallest scale that leaves nothing to saturate; r175 goes one up from 1.75 on, whatever the format (of e4m3fn from its
# largest value on, where rceil goes up beyond it).
SCALE_RULES: Mapping[str, Rule] = MappingProxyType(
    {"floor": _floor, "ceil": _ceil, "even": _even, "rceil": _rceil, "r175": _r175}
)


@dataclass(frozen=True)
class Profile:
    """A rule and its policies. Each is a fact about the peer, measured for the formats named.

    The peers were measured on float32 and bfloat16; a float16 input is treated as the equal float32.
    """

    name: str
    peer: str  # what was measured, and which version of it
    rule: str
    formats: tuple[str, ...]  # the element formats for which the profile is known to be true
    # A NaN in a block: "propagates" into the maximum, is "ignored" by it (a block of nothing else then
    # counts as zero), or is "ignored unless alone".
    nan: str = "propagates"
    # The byte of a NaN or infinite maximum; None: what the rule says of exponent 255, mantissa 0.
    nan_byte: int | None = SCALE_NAN
    infinity_byte: int | None = SCALE_NAN
    # `even` can round a maximum up to 2^128: does that count as an infinity?
    overflow_is_infinity: bool = False
    zero_byte: int = 0
    smallest_byte: int = 0  # of a block with a non-zero maximum
    # The maximum is divided in float32 by max_finite (rceil) or 2^emax (floor) before its exponent is read,
    # so a quotient below 2^-126 is rounded to a multiple of 2^-149, and may vanish.
    float32_quotient: bool = False
    # The exponent is the floor or ceiling of a rounded log2: "maximum", of the maximum, rounded to the
    # input's own precision; "quotient", of the float32 quotient, rounded to float32.
    log2_of: str | None = None
    # Bytes whose elements were not multiplied by 2^(127 - byte), and by what they were: the byte whose
    # multiplier was used, "zero", "nan" (every element becomes +NaN) or "nan-signed" (NaN elements keep
    # their sign, the others become +NaN).
    multipliers: tuple[tuple[int, int | str], ...] = ((SCALE_NAN, "nan"),)
    keeps_infinities: bool = False  # an infinite element stays infinite where its format can say so
    # Elements are rounded as floor(|x| + 0.5): the value just below half the smallest subnormal goes up.
    floor_of_half_up: bool = False
    zeros_are_positive: bool = False  # an element that is -0 becomes +0 (one that rounds to -0 stays)
    note: str = ""


_OCP_FP8 = ("e4m3fn", "e5m2")


def _torchao(rule: str, **policies: Any) -> Profile:
    return Profile(f"torchao-{rule}", "torchao 36027d82", rule, _OCP_FP8, **policies)


# The release before the one above: its reciprocals at both ends of the range are not 2^(127 - byte).
_RELEASE_MULTIPLIERS: tuple[tuple[int, int | str], ...] = ((0, 1), (SCALE_NAN, "zero"))
_RELEASE_NOTE = (
    "bugs: elements of byte 0 are divided by 2^-126 instead of 2^-127; a NaN block's byte is read back as an "
    "infinite scale, so its other elements become zero; infinity gets a finite scale"
)


def _torchao_release(rule: str, **policies: Any) -> Profile:
    return Profile(f"torchao-0.18-{rule}", "torchao 0.18.0", rule, _OCP_FP8, **policies)


_PROFILES = (
    Profile(
        "ocp",
        "OCP MX v1.0, this project's reading",
        "floor",
        tuple(FORMATS),
        note="exact everywhere; a NaN or an infinity makes its whole block NaN; an all-zero block has byte 0",
    ),
    _torchao("floor"),
    _torchao("ceil"),
    _torchao(
        "even",
        overflow_is_infinity=True,
        note="bug: a finite maximum that rounds up to 2^128 makes its block NaN",
    ),
    _torchao(
        "rceil",
        float32_quotient=True,
        note="bug: one ulp above max_finite * 2^-127 the division loses the ulp and the largest element saturates",
    ),
    _torchao_release("floor", infinity_byte=None, multipliers=_RELEASE_MULTIPLIERS, note=_RELEASE_NOTE),
    _torchao_release("ceil", infinity_byte=None, multipliers=_RELEASE_MULTIPLIERS, note=_RELEASE_NOTE),
    _torchao_release("even", infinity_byte=None, multipliers=_RELEASE_MULTIPLIERS, note=_RELEASE_NOTE),
    _torchao_release(
        "rceil",
        infinity_byte=254,
        float32_quotient=True,
        log2_of="quotient",
        multipliers=((0, 127), (SCALE_NAN, "nan")),
        note="bugs: elements of byte 0 are not scaled at all; the ceiling of a rounded log2 is one exponent low "
        "for maxima a few ulps above max_finite * 2^k",
    ),
    Profile(
        "te",
        "TransformerEngine d0067d0d, C++ test reference",
        "rceil",
        _OCP_FP8,
        nan="ignored",
        infinity_byte=254,
        float32_quotient=True,
        note="bug: one ulp above max_finite * 2^-127 the division loses the ulp and the largest element saturates",
    ),
    Profile(
        "alto",
        "ALTO 74e251d7, NumPy transcription with torch's casts",
        "even",
        _OCP_FP8,
        nan="ignored unless alone",
        nan_byte=None,
        infinity_byte=None,
        zero_byte=1,
        smallest_byte=1,
        keeps_infinities=True,
        note="bugs: neither NaN nor infinity is marked in the scale. Its Triton kernel run by Triton's interpreter "
        "gives other elements (that interpreter's casts carry wrongly and know no NaN); this row is not that",
    ),
    Profile(
        "aiter",
        "aiter e4048607, per_1x32 torch reference, round up",
        "rceil",
        ("e4m3fn", "e4m3fnuz"),
        smallest_byte=1,
        float32_quotient=True,
        multipliers=((SCALE_NAN, "nan-signed"),),
        note="a maximum whose float32 quotient vanishes counts as zero; other tiny ones get byte 1",
    ),
    Profile(
        "triton-kernels-up",
        "triton_kernels 018a674f, torch reference, round up",
        "rceil",
        _OCP_FP8,
        nan_byte=0,
        smallest_byte=1,
        float32_quotient=True,
        multipliers=((0, "zero"), (SCALE_NAN, "zero")),
        note="bugs: a NaN maximum wraps round to byte 0; elements of bytes 0 and 255 are multiplied by zero",
    ),
    Profile(
        "triton-kernels-down",
        "triton_kernels 018a674f, torch reference, round down",
        "floor",
        _OCP_FP8,
        float32_quotient=True,
        multipliers=((0, "zero"), (SCALE_NAN, "zero")),
        note="bugs: every block with byte 0 is flushed to zero; elements of byte 255 are multiplied by zero",
    ),
    Profile(
        "microxcaling",
        "microxcaling 7bc41952, round='even'",
        "floor",
        _OCP_FP8,
        log2_of="maximum",
        floor_of_half_up=True,
        zeros_are_positive=True,
        note="bugs: the floor of a rounded log2 is one exponent high just below a power of two (for bfloat16 from "
        "about 1.4 * 2^k on, k large); its own default rounding is rounding='away'",
    ),
    Profile(
        "quark-even",
        "amd-quark 0.13, even",
        "even",
        _OCP_FP8,
        infinity_byte=254,
        overflow_is_infinity=True,
        keeps_infinities=True,
        note="bug: a finite maximum that rounds up to 2^128 gets byte 254, and values of its block overflow",
    ),
)

PROFILES: Mapping[str, Profile] = MappingProxyType({profile.name: profile for profile in _PROFILES})


def profile_for(name: str | Profile, row: Format) -> Profile:
    """The profile called `name`, known to be true for `row`; ValueError names the choices."""
    profile = PROFILES.get(name) if isinstance(name, str) else name
    if profile is None:
        raise ValueError(f"unknown profile {name!r}; expected one of {', '.join(PROFILES)}")
    if row.name not in profile.formats:
        raise ValueError(
            f"profile {profile.name!r} was never measured for format {row.name!r}; "
            f"expected one of {', '.join(profile.formats)}, or another profile such as 'ocp'"
        )
    return profile


def block_bytes(maximum_bits: NDArray[Any], profile: Profile, row: Format, precision: int = 24) -> I64:
    """The bytes (0 .. 255) that `profile` gives to blocks with these maxima, as int64 of the same shape.

    maximum_bits: float32 bit patterns of the largest magnitudes; a NaN stands for a maximum that is NaN.
    precision: significant bits of the input type (8 for bfloat16), which a rounded log2 depends on.
    """
    bits = np.asarray(maximum_bits, np.int64)
    exponent = bits >> 23
    mantissa = bits & 0x7FFFFF
    # A subnormal is moved up until its leading one is the hidden bit, and its exponent down as far.
    shift = np.where((exponent == 0) & (mantissa > 0), 24 - bit_length(mantissa), 0)
    normal_exponent = np.where(shift > 0, 1 - shift, exponent)
    normal_mantissa = (mantissa << shift) & 0x7FFFFF

    byte = SCALE_RULES[profile.rule](normal_exponent, normal_mantissa, row)
    if profile.log2_of == "maximum":
        byte = byte + (normal_mantissa >= _log2_carries(precision)[normal_exponent.clip(0, 255)])
    vanishes = bits == 0
    if profile.float32_quotient:
        steps = _subnormal_quotient(bits, profile.rule, row)
        below = exponent <= row.emax
        byte = np.where(below, steps >= 2**23 if profile.rule == "floor" else steps > 2**22, byte)
        if profile.log2_of == "quotient":
            byte = _ceil_of_log2(exponent, mantissa, steps, byte, row)
        vanishes = below & (steps == 0)
    byte = np.where(vanishes, profile.zero_byte, byte.clip(profile.smallest_byte, 254))

    infinite = bits == INFINITY_BITS
    if profile.overflow_is_infinity:
        infinite = infinite | ((bits < INFINITY_BITS) & (byte > 254 - row.emax))
    by_rule = int(SCALE_RULES[profile.rule](np.array(255), np.array(0), row))
    for special, value in ((infinite, profile.infinity_byte), (bits > INFINITY_BITS, profile.nan_byte)):
        byte = np.where(special, by_rule if value is None else value, byte)
    return byte


def _subnormal_quotient(bits: I64, rule: str, row: Format) -> I64:
    """fl32(maximum / divisor) in steps of 2^-149, nearest even; meant for exponent fields up to emax."""
    divisor = int(2 * (2**row.emax if rule == "floor" else row.max_finite))  # twice it, for e2m3's largest is 7.5
    exponent = (bits >> 23).clip(0, row.emax + 1)
    significand = (bits & 0x7FFFFF) | np.where(exponent > 0, 1 << 23, 0)
    steps, rest = np.divmod(significand << 1 + (exponent - 1).clip(0), divisor)
    up: I64 = (2 * rest > divisor) | ((2 * rest == divisor) & (steps & 1 == 1))
    return np.asarray(steps + up, np.int64)


def _ceil_of_log2(exponent: I64, mantissa: I64, steps: I64, byte: I64, row: Format) -> I64:
    """rceil's byte where ceil(log2(quotient)) is taken of a float32 log2: an excess it rounds away is not seen."""
    top = _top_mantissa(row)
    excess = np.where(
        exponent <= row.emax,
        2 * steps - 2**23,
        # The mantissa of fl32(maximum / max_finite); no tie can occur for max_finite = 1.75 * 2^n.
        ((mantissa + 2**23 << 24) // (top + 2**23) + 1 >> 1) - 2**23,
    )
    unseen = (excess > 0) & (excess <= _log2_losses()[(exponent - row.emax).clip(0, 255)])
    return np.asarray(byte - (unseen & ((mantissa > top) | (exponent <= row.emax)) & (byte > 0)), np.int64)


def _root_of_two(n: int, bits: int = 256) -> int:
    """2^(2^-n) in units of 2^-bits: n square roots, each exact to the last unit."""
    value = 2 << bits
    for _ in range(n):
        value = isqrt(value << bits)
    return value


@cache
def _log2_carries(precision: int) -> I64:
    """By biased exponent: the least 23-bit mantissa whose log2, rounded to `precision` bits, is the next integer.

    Between the integers k and k + 1 the last representable value below k + 1 is u away, and log2 rounds up
    to k + 1 from k + 1 - u / 2 on: for significands of at least 2 / 2^(u / 2).
    """
    table = np.full(256, 2**23, np.int64)
    for biased in range(1, 255):
        k = biased - 127
        if k == -1:
            continue  # values approach 0 and never round to it
        octave = -1 if k == 0 else (k if k > 0 else -k - 1).bit_length() - 1
        root = _root_of_two(precision - octave)
        table[biased] = -(-(2 << (23 + 256)) // root) - 2**23
    return table


@cache
def _log2_losses() -> I64:
    """By byte: the largest 23-bit mantissa whose float32 log2 is rounded down to the integer below it."""
    table = np.zeros(256, np.int64)
    for byte in range(255):
        k = byte - 127
        if k == 0:
            continue
        octave = -1 if k == -1 else (k if k > 0 else -k - 1).bit_length() - 1
        table[byte] = ((_root_of_two(24 - octave) - (1 << 256)) << 23) >> 256
    return table
