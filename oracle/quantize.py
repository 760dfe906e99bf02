"""Arrays to MX blocks and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .formats import (
    E8M0,
    INPUT_DTYPES,
    SCALE_NAN,
    U8,
    check_rounding,
    decode_table,
    encode_bits,
    float32_bits,
    named,
    random_bits,
    scale_table,
)
from .scales import PROFILES, scale_bytes

BLOCK = 32
OUTPUT_DTYPES = (np.dtype(np.float64), *INPUT_DTYPES)
Axis = int | tuple[int, int]


@dataclass(frozen=True)
class MXArray:
    """Elements and their block scales.

    elements: the carrier dtype of `format`, C-contiguous, any shape S with at least one axis.
    scales: ml_dtypes.float8_e8m0fnu, C-contiguous, shape S with S[axis] / 32 in place of S[axis].
    axis: the blocked axis, >= 0; for 32x32 blocks a pair of them, ascending. block: 32 or (32, 32).
    ValueError or TypeError, in one line, for anything else.
    """

    elements: NDArray[Any]
    scales: NDArray[Any]
    axis: Axis
    format: str
    block: Axis = BLOCK

    def __post_init__(self) -> None:
        row = named(self.format)
        for role, array, dtype in (("elements", self.elements, row.dtype), ("scales", self.scales, E8M0.dtype)):
            if not isinstance(array, np.ndarray) or array.dtype != dtype:
                found = getattr(array, "dtype", type(array).__name__)
                raise TypeError(f"{role} of a {self.format} array have type {found}; expected {dtype}")
            if not array.flags.c_contiguous:
                raise ValueError(
                    f"{role} of shape {array.shape} are not C-contiguous (strides {array.strides}); "
                    "expected a contiguous copy, np.ascontiguousarray(...)"
                )
        axes = _block_axes(self.elements.ndim, self.axis, self.block)
        object.__setattr__(self, "axis", axes[0] if len(axes) == 1 else axes)
        expected = list(self.elements.shape)
        for axis in axes:
            _check_multiple(self.elements.shape, axis)
            expected[axis] //= BLOCK
        if self.scales.shape != tuple(expected):
            raise ValueError(
                f"scales have shape {self.scales.shape}; expected {tuple(expected)}, "
                f"for elements {self.elements.shape} in blocks of {self.block} along axis {self.axis}"
            )
        if row.bits < 8 and self.elements.size and int(self.codes().max()) >> row.bits:
            raise ValueError(
                f"an element code of {int(self.codes().max())} has more than {row.bits} bits ({self.format})"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        return self.elements.shape

    def codes(self) -> U8:
        """The elements as uint8 codes, shape S (a view)."""
        return self.elements.view(np.uint8)

    def scale_codes(self) -> U8:
        """The scales as uint8 codes (a view)."""
        return self.scales.view(np.uint8)


def _check_multiple(shape: tuple[int, ...], axis: int) -> None:
    if shape[axis] % BLOCK:
        raise ValueError(
            f"axis {axis} of shape {shape} has length {shape[axis]}; expected a multiple of {BLOCK} (or pad=True)"
        )


def _block_axes(ndim: int, axis: Any, block: Any) -> tuple[int, ...]:
    """The blocked axes, non-negative and ascending, of an array with `ndim` axes."""
    if block == BLOCK and isinstance(axis, (int, np.integer)) and not isinstance(axis, bool):
        axes: tuple[Any, ...] = (axis,)
    elif block == (BLOCK, BLOCK) and isinstance(axis, tuple) and len(axis) == 2:
        axes = axis
    else:
        raise ValueError(
            f"block={block!r} with axis={axis!r}; "
            "expected block=32 with one axis, or block=(32, 32) with a pair of axes"
        )
    for one in axes:
        if not -ndim <= one < ndim:
            raise ValueError(f"axis {one} is outside an array of {ndim} axes; expected {-ndim} .. {ndim - 1}")
    axes = tuple(sorted(int(one) % ndim for one in axes))
    if len(set(axes)) != len(axes):
        raise ValueError(f"axis={axis!r} names one axis twice; expected two different ones")
    return axes


def _blocked(array: NDArray[Any], axes: tuple[int, ...]) -> NDArray[Any]:
    """A view in which every blocked axis of n has become the two axes n / 32 and 32."""
    shape: list[int] = []
    for axis, length in enumerate(array.shape):
        shape += [length // BLOCK, BLOCK] if axis in axes else [length]
    return array.reshape(shape)


def quantize(
    x: NDArray[Any],
    *,
    axis: Axis,
    format: str = "e4m3fn",
    profile: str = "ocp",
    block: Axis = BLOCK,
    rounding: str = "even",
    seed: int | None = None,
    pad: bool = False,
) -> MXArray:
    """A float32, bfloat16 or float16 array of any shape and strides in MX blocks along `axis`."""
    row = named(format)
    if profile not in PROFILES:
        raise ValueError(f"unknown profile {profile!r}; expected one of {', '.join(PROFILES)}")
    rules = PROFILES[profile]
    check_rounding(rounding, seed)
    bits = float32_bits(np.ascontiguousarray(x))
    axes = _block_axes(x.ndim, axis, block)
    widths = [(0, -x.shape[a] % BLOCK if pad and a in axes else 0) for a in range(x.ndim)]
    for one in axes:
        if not pad:
            _check_multiple(x.shape, one)
    random = None
    if seed is not None:
        random = random_bits(int(seed), np.arange(x.size, dtype=np.uint64)).reshape(x.shape)
        random = _blocked(np.pad(random, widths), axes)
    bits = np.pad(bits, widths)
    blocks = _blocked(bits, axes)
    inner = tuple(a + i + 1 for i, a in enumerate(axes))
    maximum = (blocks & np.uint32(0x7FFFFFFF)).max(axis=inner, keepdims=True, initial=0)
    special = maximum >= 0x7F800000
    byte = np.where(special, SCALE_NAN, scale_bytes(np.where(special, 0, maximum), rules.rule, row))
    codes = encode_bits(blocks, byte, row, rounding, random)
    codes = np.where(special, row.nan_code or 0, codes).astype(np.uint8)
    return MXArray(
        codes.reshape(bits.shape).view(row.dtype),
        byte.astype(np.uint8).squeeze(axis=inner).view(E8M0.dtype),
        axes[0] if len(axes) == 1 else (axes[0], axes[1]),
        format,
        block,
    )


def dequantize(mx: MXArray, dtype: Any) -> NDArray[Any]:
    """The values of an MXArray, shape S: exact in float64; rounded once, nearest even, to float32, bfloat16 or float16.

    A scale of 0xFF makes its whole block NaN; what overflows `dtype` becomes infinity.
    """
    target = np.dtype(dtype)
    if target not in OUTPUT_DTYPES:
        raise TypeError(f"cannot dequantize to {target}; expected float64, float32, bfloat16 or float16")
    axes = (mx.axis,) if isinstance(mx.axis, int) else mx.axis
    inner = tuple(a + i + 1 for i, a in enumerate(axes))
    elements = decode_table(mx.format)[_blocked(mx.codes(), axes)]
    values = elements * np.expand_dims(scale_table()[mx.scale_codes()], inner)
    with np.errstate(over="ignore"):
        rounded: NDArray[Any] = values.reshape(mx.shape).astype(target)
    return rounded
