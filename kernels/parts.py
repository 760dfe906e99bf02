"""A grouped GEMM in replaceable parts, and a quantizer likewise: what unusual and wrong builds are made from.

Every entry of `Parts` and `QuantizeParts` is a small function with the right answer as its default. A correct build of
another design replaces one or two (variants.py), a wrong build replaces one by something wrong (faults.py), and neither
has to repeat the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from mxgate.kernels import numpy_reference as reference
from mxgate.kernels.build import BLOCK
from mxgate.oracle.formats import FORMATS, Format, decode, format_of, scale_value

Array = NDArray[Any]
U8 = NDArray[np.uint8]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
Span = tuple[int, int]
Kernel = Callable[..., Any]


# ---------------------------------------------------------------------------------------------------------------------
# GEMM


@dataclass(frozen=True)
class Call:
    """A call's operands: element and scale codes as uint8 in the op's own shapes, the groups, the element formats."""

    op: str
    a: U8
    a_scales: U8
    b: U8
    b_scales: U8
    spans: Sequence[Span]
    formats: tuple[str, str]
    tokens: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The output's."""
        if self.op == "wgrad":
            return len(self.spans), self.a.shape[0], self.b.shape[0]
        return self.a.shape[0], self.b.shape[1 if self.op == "forward" else 2]


@dataclass(frozen=True)
class Piece:
    """One expert's product in a form common to the three ops: rows of `a` [I,T] against rows of `b` [J,T], scales
    [.,T/32]; uint8 codes."""

    a: U8
    a_scales: U8
    b: U8
    b_scales: U8


def cut(call: Call, g: int) -> Piece:
    """Expert g's product."""
    start, end = call.spans[g]
    if call.op == "wgrad":
        t, s = slice(start, end), slice(start // BLOCK, end // BLOCK)
        return Piece(call.a[:, t], call.a_scales[:, s], call.b[:, t], call.b_scales[:, s])
    b, b_scales = call.b[g], call.b_scales[g]
    if call.op == "dgrad":
        b, b_scales = b.T, b_scales.T
    return Piece(call.a[start:end], call.a_scales[start:end], b, b_scales)


def values(codes: U8, scales: U8, format: str) -> F64:
    """Exact values [I,T]: each element times the scale of its block."""
    with np.errstate(invalid="ignore"):
        return decode(codes, format) * np.repeat(scale_value(scales), BLOCK, axis=1)


def dot(a: F64, b: F64) -> F64:
    """Sums of products [I,J] of a [I,T] and b [J,T]."""
    return reference.matmul(a, b.T)


def place(out: Array, call: Call, g: int) -> Array:
    """The part of the output that expert g's product goes to."""
    return out[g] if call.op == "wgrad" else out[slice(*call.spans[g])]


def zero_tail(out: Array, call: Call) -> None:
    """Exact zeros in the rows past the last token."""
    if call.op != "wgrad":
        out[call.tokens :] = 0


@dataclass(frozen=True)
class Parts:
    """spans: groups, from offsets and buffer length. bias: row g of [E,N]. done: what comes after the last store."""

    spans: Callable[[NDArray[np.int32], int], Sequence[Span]] = reference.spans
    cut: Callable[[Call, int], Piece] = cut
    values: Callable[[U8, U8, str], F64] = values
    dot: Callable[[F64, F64], Array] = dot
    bias: Callable[[Array, int], Array] = lambda bias, g: bias[g].astype(np.float64)
    narrow: Callable[[Any, DTypeLike], Array] = lambda sums, dtype: reference.narrow(sums.astype(np.float64), dtype)
    place: Callable[[Array, Call, int], Array] = place
    done: Callable[[Array, Call], None] = zero_tail


def kernel(op: str, parts: Parts) -> Kernel:
    """A build of `op` with the contract's signature (and `bias=` for every op: only forward is ever given one)."""

    def run(
        a: Array,
        a_scales: Array,
        b: Array,
        b_scales: Array,
        offsets: NDArray[np.int32],
        *,
        bias: Array | None = None,
        out: Array | None = None,
        out_dtype: DTypeLike | None = None,
    ) -> Array:
        spans = parts.spans(offsets, a.shape[1 if op == "wgrad" else 0])
        formats = (format_of(a.dtype).name, format_of(b.dtype).name)
        planes = [plane.view(np.uint8) for plane in (a, a_scales, b, b_scales)]
        call = Call(op, planes[0], planes[1], planes[2], planes[3], spans, formats, reference.total(offsets))
        out = reference.output(call.shape, out, out_dtype)
        for g in range(len(spans)):
            piece = parts.cut(call, g)
            sums = parts.dot(
                parts.values(piece.a, piece.a_scales, formats[0]), parts.values(piece.b, piece.b_scales, formats[1])
            )
            if bias is not None:
                sums = sums + parts.bias(bias, g)
            parts.place(out, call, g)[...] = parts.narrow(sums, out.dtype)
        parts.done(out, call)
        return out

    return run


# ---------------------------------------------------------------------------------------------------------------------
# Quantizer


def maximum(blocks: F64) -> F64:
    """The largest magnitude of each block, NaN where the block holds one: [..., blocks] of [..., blocks, 32]."""
    largest: F64 = np.abs(blocks).max(axis=-1, initial=0.0)
    return largest


def scale_byte(largest: F64, row: Format) -> I64:
    """The byte of finite maxima under the rule `floor`."""
    byte = np.clip(np.frexp(largest)[1] - 1 - row.emax + 127, 0, 254)
    whole: I64 = np.where(largest == 0, 0, byte).astype(np.int64)
    return whole


def scaled(blocks: F64, byte: I64) -> F64:
    """Elements divided by their block's scale, exactly."""
    return np.ldexp(blocks, 127 - byte[..., None])


def to_grid(x: F64, row: Format, whole: Callable[[F64], F64] = np.rint) -> F64:
    """Finite x to values of the format, saturating; `whole` rounds to an integer."""
    step = np.maximum(np.frexp(x)[1] - 1, 1 - row.bias) - row.mantissa_bits
    grid: F64 = np.ldexp(whole(np.ldexp(x, -step)), step)
    return np.clip(grid, -row.max_finite, row.max_finite)


@dataclass(frozen=True)
class QuantizeParts:
    """special: the byte of a block whose maximum is NaN or infinite; codes: the codes of rounded values [..., 32]."""

    maximum: Callable[[F64], F64] = maximum
    byte: Callable[[F64, Format], I64] = scale_byte
    scaled: Callable[[F64, I64], F64] = scaled
    round: Callable[[F64, Format], F64] = to_grid
    codes: Callable[[F64, Format], U8] = lambda x, row: x.astype(row.dtype).view(np.uint8)


def quantizer(parts: QuantizeParts) -> Kernel:
    """A quantize build under the profile `ocp` but for the replaced parts."""

    def run(x: Array, axis: int, *, format: str = "e4m3fn") -> tuple[Array, Array]:
        row = FORMATS[format]
        with np.errstate(all="ignore"):
            moved = np.moveaxis(x, axis, -1).astype(np.float64)
            blocks = moved.reshape(*moved.shape[:-1], -1, BLOCK)
            largest = parts.maximum(blocks)
            finite = np.isfinite(largest)
            byte = np.where(finite, parts.byte(np.where(finite, largest, 0.0), row), 255)
            rounded = parts.round(parts.scaled(np.where(finite[..., None], blocks, 0.0), byte), row)
            codes = parts.codes(rounded, row)
        codes[~finite] = row.nan_code or 0
        elements = np.moveaxis(codes.reshape(moved.shape), -1, axis)
        scales = np.moveaxis(byte.astype(np.uint8), -1, axis)
        return (
            np.ascontiguousarray(elements).view(row.dtype),
            np.ascontiguousarray(scales).view(ml_dtypes.float8_e8m0fnu),
        )

    return run
