"""Element codes, block scales and output types inside Triton kernels, by integer arithmetic.

Triton's interpreter converts FP8 wrongly: its casts take NaN codes for numbers, lose small subnormals, and round
without a carry into the exponent. It stores bfloat16 as 16-bit integers on which arithmetic is nonsense. So nothing
here leaves the interpreter a cast from or to FP8, or a sum in bfloat16; a GPU's own conversions are used only where
NATIVE says that the device has them.

A format is a number inside a kernel, an index of FORMAT_NAMES.
"""

from __future__ import annotations

import triton
import triton.language as tl

FORMAT_NAMES = ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")

E5M2 = tl.constexpr(1)
BLOCK = tl.constexpr(32)

# Scale bytes of 2^-80 .. 2^80. Within them no element, no sum of 32 products and no such sum under one of its two
# scales leaves bfloat16's or float32's range, whatever the formats; outside them the scales are applied together.
LEAST_SCALE = tl.constexpr(47)
MOST_SCALE = tl.constexpr(207)
NAN_SCALE = tl.constexpr(255)


@triton.constexpr_function
def mantissa_bits(format):
    return (3, 2, 3, 2)[format]


@triton.constexpr_function
def bias(format):
    return (7, 15, 8, 16)[format]


@triton.constexpr_function
def is_fnuz(format):
    return format >= 2


@triton.jit
def decode(codes, FORMAT: tl.constexpr, NATIVE: tl.constexpr, DTYPE: tl.constexpr):
    """uint8 codes to their values in DTYPE, float32 or bfloat16: exact, both hold every value of every format."""
    # By way of float16, which holds both formats: Triton's cast from e5m2 straight to bfloat16 makes 65536 of an
    # infinity, and the one from e4m3fn takes elements one by one.
    if NATIVE and FORMAT == 0:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(DTYPE)
    elif NATIVE and FORMAT == E5M2:
        return codes.to(tl.float8e5, bitcast=True).to(tl.float16).to(DTYPE)
    else:
        m: tl.constexpr = mantissa_bits(FORMAT)
        b: tl.constexpr = bias(FORMAT)
        code = codes.to(tl.int32)
        magnitude = code & 0x7F
        exponent = magnitude >> m
        mantissa = magnitude & ((1 << m) - 1)
        # A subnormal is a small integer times the format's smallest step: no subnormal float32 on the way.
        step: tl.constexpr = (127 + 1 - b - m) << 23
        unit = tl.full(codes.shape, step, tl.int32).to(tl.float32, bitcast=True)
        small = mantissa.to(tl.float32) * unit
        normal = ((exponent + (127 - b)) << 23) | (mantissa << (23 - m))
        bits = tl.where(exponent == 0, small.to(tl.int32, bitcast=True), normal)
        bits = bits | ((code & 0x80) << 24)
        if is_fnuz(FORMAT):
            bits = tl.where(code == 0x80, 0x7FC00000, bits)
        elif FORMAT == E5M2:
            # Infinity is exponent 31 with mantissa 0, every other mantissa a NaN.
            bits = tl.where(exponent == 31, 0x7F800000 | (mantissa << 21) | ((code & 0x80) << 24), bits)
        else:
            bits = tl.where(magnitude == 0x7F, 0x7FC00000, bits)
        return bits.to(tl.float32, bitcast=True).to(DTYPE)


@triton.jit
def power(exponents):
    """2^exponents in float32 for int32 exponents in -127 .. 127 (2^-127 is subnormal)."""
    bits = tl.where(exponents < -126, 0x00400000, (exponents + 127) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def near_scale(scales, DTYPE: tl.constexpr):
    """Scale bytes LEAST_SCALE .. MOST_SCALE to powers of two in DTYPE (float32 or bfloat16), NAN_SCALE to NaN."""
    if DTYPE == tl.bfloat16:
        bits = tl.where(scales == NAN_SCALE, 0x7FC0, scales.to(tl.int32) << 7)
        return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        bits = tl.where(scales == NAN_SCALE, 0x7FC00000, scales.to(tl.int32) << 23)
        return bits.to(tl.float32, bitcast=True)


@triton.jit
def is_far(scales):
    """int32 1 where a scale byte is a number outside LEAST_SCALE .. MOST_SCALE."""
    far = (scales < LEAST_SCALE) | ((scales > MOST_SCALE) & (scales != NAN_SCALE))
    return far.to(tl.int32)


@triton.jit
def narrow(sums, DTYPE: tl.constexpr):
    """float32 rounded once to float32, float16 or bfloat16, to nearest even; overflow becomes infinity."""
    if DTYPE == tl.bfloat16:
        bits = sums.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return sums.to(DTYPE)
