"""Scales in another layout than row-major: how a child gives them to a build, and how it takes them back.

Everything on the runner's side sees plain scales. In the child the plane that a build is given holds them as its record
says, and what a quantizer returns is turned back before anybody looks at it.

Where a layout puts the bytes of padding is found out by turning them over: a byte that changes with them is padding,
which a build may overwrite, and every other one, zeros that the layout itself fills up with included, is not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mxgate.kernels.build import BLOCK, OPS, Build, load_target
from mxgate.oracle.layouts import blocked_size, from_blocked, to_blocked, to_blocked_groups

Array = NDArray[Any]
Bytes = NDArray[np.uint8]
Lay = Callable[[Array, str, Array], Array]


class LayoutError(ValueError):
    """Scales that are not as the build's scale_layout says, in words."""


def layout(build: Build, wrap: Callable[[Array], Any], unwrap: Callable[[Any], Array]) -> Lay | None:
    """(scales, operand, offsets) -> what the build is given for them; None where that is the plain plane itself.

    wrap, unwrap: between NumPy and what the build's own function takes and returns.
    """
    if build.scale_layout == "plain" or build.op == "quantize":
        return None
    if build.scale_layout == "blocked-128x4":
        return lambda scales, name, offsets: to_blocked(contraction_last(build.op, name, scales))
    if build.scale_layout == "blocked-128x4-groups":
        return lambda scales, name, offsets: _groups(build.op, name, scales, offsets)
    function = load_target(build.scale_layout)
    return lambda scales, name, offsets: unwrap(function(wrap(scales), name, wrap(offsets)))


def contraction_last(op: str, name: str, scales: Array) -> Array:
    """The scales of an operand as rows of blocks along the contraction: only dgrad's weights have them elsewhere."""
    axis = OPS[op].contraction[OPS[op].operands.index(name) // 2]
    return np.ascontiguousarray(np.moveaxis(scales, axis, -1))


def _groups(op: str, name: str, scales: Array, offsets: Array) -> Array:
    if scales.ndim == 3:
        return to_blocked(contraction_last(op, name, scales))
    ends = np.minimum(offsets // BLOCK if op == "wgrad" else offsets, scales.shape[1 if op == "wgrad" else 0])
    return to_blocked_groups(scales, ends, 1 if op == "wgrad" else 0)


def laid_out(
    lay: Lay, scales: Array, name: str, offsets: Array, tokens: tuple[int, int] | None
) -> tuple[Array, NDArray[np.bool_] | None]:
    """(what the build is given, which of its bytes are not padding; None for all). tokens: (axis, end) of the plane."""
    given = np.ascontiguousarray(lay(scales.copy(), name, offsets.copy()))
    if tokens is None:
        return given, None
    axis, end = tokens
    other = scales.view(np.uint8).copy()
    behind = other[end:] if axis == 0 else other[:, end:]
    behind ^= 0xFF
    turned = np.ascontiguousarray(lay(other.view(scales.dtype), name, offsets.copy()))
    if turned.nbytes != given.nbytes:
        raise LayoutError(f"the layout of {name} has another size on other scales")
    return given, given.reshape(-1).view(np.uint8) == turned.reshape(-1).view(np.uint8)


def quantized(build: Build, parts: list[Array], axis: int) -> list[Array]:
    """What a quantize build returned, (elements, scales), with the scales row-major. Raises LayoutError."""
    if build.op != "quantize" or build.scale_layout == "plain":
        return parts
    elements, scales = parts
    if elements.ndim <= max(axis, 0) or elements.ndim < 2:
        raise LayoutError(f"returned elements of shape {elements.shape}; expected those of its input")
    shape: list[int] = list(elements.shape)
    shape.append(shape.pop(axis))
    *outer, rows, length = shape
    columns = length // BLOCK
    size = blocked_size(rows, columns)
    if scales.itemsize != 1 or scales.size != int(np.prod(outer)) * size:
        raise LayoutError(
            f"returned {scales.size} scales of {scales.dtype}; expected {int(np.prod(outer)) * size} bytes: "
            f"128x4 tiles of {rows} rows of {columns} blocks"
        )
    blocked = np.ascontiguousarray(scales).reshape(*outer, size)
    plain = from_blocked(blocked, rows, columns)
    if to_blocked(plain).tobytes() != blocked.tobytes():
        raise LayoutError("returned scales whose padding to 128x4 tiles is not zero")
    return [elements, np.ascontiguousarray(np.moveaxis(plain.view(ml_dtypes.float8_e8m0fnu), -1, axis))]
