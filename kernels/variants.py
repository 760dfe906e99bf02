"""Correct builds of unusual design, to try the gates for false alarms. A sound gate accepts every one.

They differ from the reference in what a real kernel is free to choose: the order of additions, the tile, where the
contraction is split, how wide the accumulator is (as long as the record says so), what is left in rows past the tokens
(as long as the record says so), the memory order of the result, and manners: printing, or changing NumPy's error state.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from mxgate.kernels import parts as p
from mxgate.kernels.build import BLOCK, GEMMS, Build
from mxgate.kernels.parts import F64, Array, Call, Kernel, Parts, kernel

F32 = NDArray[np.float32]


def fp32_dot(a: F64, b: F64) -> Array:
    """One float32 matrix product of operands rounded to float32."""
    with np.errstate(all="ignore"):
        product: Array = a.astype(np.float32) @ b.astype(np.float32).T
    return product


def bf16_dot(a: F64, b: F64) -> Array:
    """Operands in bfloat16, as a kernel without FP8 units has them, products added in float32."""
    with np.errstate(all="ignore"):
        halves = [x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32) for x in (a, b)]
        product: Array = halves[0] @ halves[1].T
    return product


def chunked(size: int, backwards: bool = False) -> Callable[[F64, F64], Array]:
    """Partial products of `size` elements of the contraction, each rounded to float32 and added in float32."""

    def dot(a: F64, b: F64) -> Array:
        total = np.zeros((a.shape[0], b.shape[0]), np.float32)
        starts = range(0, a.shape[1], size)
        with np.errstate(all="ignore"):
            for start in reversed(starts) if backwards else starts:
                t = slice(start, start + size)
                total += p.dot(a[:, t], b[:, t]).astype(np.float32)
        return total

    return dot


def split(parts: int) -> Callable[[F64, F64], Array]:
    """The contraction cut into `parts` pieces, their float32 sums added in a fixed order."""

    def dot(a: F64, b: F64) -> Array:
        return chunked(max(1, -(-a.shape[1] // parts)))(a, b)

    return dot


def tiled(rows: int, columns: int) -> Callable[[F64, F64], Array]:
    """Output tiles of an odd size, column after column."""

    def dot(a: F64, b: F64) -> Array:
        out = np.empty((a.shape[0], b.shape[0]), np.float32)
        for j in range(0, out.shape[1], columns):
            for i in range(0, out.shape[0], rows):
                out[i : i + rows, j : j + columns] = fp32_dot(a[i : i + rows], b[j : j + columns])
        return out

    return dot


def truncating(step: int, fraction_bits: int) -> Callable[[F64, F64], Array]:
    """A tensor core that aligns `step` products and the accumulator to the largest of them, keeps `fraction_bits` below
    its leading bit, cuts off the rest, and cuts the sum to float32."""

    def rows_dot(a: F64, b: F64) -> Array:
        acc = np.zeros((a.shape[0], b.shape[0]))
        for start in range(0, a.shape[1], step):
            t = slice(start, start + step)
            products = a[:, None, t] * b[None, :, t]
            largest = np.maximum(np.abs(products).max(axis=2), np.abs(acc))  # NaN and infinity come through
            units = np.ldexp(1.0, fraction_bits + 1 - np.frexp(largest)[1])
            finite = np.isfinite(largest)
            plain = acc if finite.all() else products.sum(axis=2) + acc
            products *= units[..., None]
            kept = np.trunc(products, out=products).sum(axis=2) + np.trunc(acc * units)
            acc = np.where(finite, to_24_bits(kept / units), plain)
        return acc

    def dot(a: F64, b: F64) -> Array:
        rows = max(1, (1 << 16) // max(1, b.shape[0] * step))  # as many as the cache holds products of
        with np.errstate(all="ignore"):
            pieces = [rows_dot(a[i : i + rows], b) for i in range(0, a.shape[0], rows)]
        return np.concatenate([np.zeros((0, b.shape[0])), *pieces])

    return dot


def to_24_bits(x: F64) -> F64:
    """float64 cut to float32's 24 significant bits."""
    units = np.ldexp(1.0, 24 - np.frexp(x)[1])
    cut: F64 = np.trunc(x * units) / units
    return cut


def leave_tail(out: Array, call: Call) -> None:
    """Rows past the tokens keep what was in them."""


def spoil_tail(out: Array, call: Call) -> None:
    """Rows past the tokens get anything at all."""
    out[call.tokens :] = np.nan


def fortran_order(run: Kernel) -> Kernel:
    """The same numbers with the first axis contiguous. There is no `out`: the result is this build's own."""

    def wrapped(*operands: Array, bias: Array | None = None, out_dtype: DTypeLike | None = None) -> Array:
        return np.asfortranarray(run(*operands, bias=bias, out_dtype=out_dtype))

    return wrapped


def noisy(run: Kernel) -> Kernel:
    """Prints two hundred thousand characters, and leaves NumPy raising on every floating-point event."""

    def wrapped(*operands: Array, **options: Any) -> Array:
        for stream in (sys.stdout, sys.stderr):
            print("autotuning " * 10_000, file=stream)
        result: Array = run(*operands, **options)
        np.seterr(all="raise")
        return result

    return wrapped


def pieces(run: Kernel) -> Kernel:
    """Quantizes one index of the first other axis at a time, in Fortran order."""

    def wrapped(x: Array, axis: int, *, format: str = "e4m3fn") -> tuple[Array, Array]:
        other = 0 if axis % x.ndim else 1
        slabs = [run(x.take([i], axis=other), axis, format=format) for i in range(x.shape[other])]
        elements, scales = (np.concatenate(s, axis=other) for s in zip(*slabs, strict=True))
        return np.asfortranarray(elements), np.asfortranarray(scales)

    return wrapped


def _build(op: str, name: str, function: Kernel, **record: Any) -> Build:
    """Register `function` under the module as a build's target."""
    attribute = f"{op}_{name}"
    globals()[attribute] = function
    if op != "quantize":
        record = {"out_dtypes": ("bfloat16", "float16", "float32"), **record}
    if op == "wgrad":
        record["group_alignment"] = BLOCK
    return Build(
        name,
        op,
        f"{__name__}:{attribute}",
        sources=("mxgate.kernels.parts", "mxgate.kernels.numpy_reference"),
        **record,
    )


# (name, parts, record) of designs that every GEMM comes in.
_DESIGNS: tuple[tuple[str, Parts, dict[str, Any]], ...] = (
    ("fp32", Parts(dot=fp32_dot), {}),
    ("bf16_operands", Parts(dot=bf16_dot), {}),
    ("blocks_forwards", Parts(dot=chunked(BLOCK)), {}),
    ("blocks_backwards", Parts(dot=chunked(BLOCK, backwards=True)), {}),
    ("steps_of_128", Parts(dot=chunked(128)), {}),
    ("split_in_4", Parts(dot=split(4)), {}),
    ("tiles_of_24x40", Parts(dot=tiled(24, 40)), {}),
    ("accumulator_13bit", Parts(dot=truncating(32, 13)), {"accumulator": "wgmma-fp8-13bit"}),
    ("accumulator_25bit", Parts(dot=truncating(16, 25)), {"accumulator": "wgmma-bf16"}),
)

CORRECT: tuple[Build, ...] = (
    *(_build(op, name, kernel(op, parts), **record) for op in GEMMS for name, parts, record in _DESIGNS),
    *(_build(op, "fortran_order", fortran_order(kernel(op, Parts()))) for op in GEMMS),
    *(_build(op, "noisy", noisy(kernel(op, Parts()))) for op in GEMMS),
    *(_build(op, "tail_untouched", kernel(op, Parts(done=leave_tail)), tail="untouched") for op in GEMMS[:2]),
    *(_build(op, "tail_undefined", kernel(op, Parts(done=spoil_tail)), tail="undefined") for op in GEMMS[:2]),
    _build("quantize", "parts", p.quantizer(p.QuantizeParts())),
    _build("quantize", "pieces", pieces(p.quantizer(p.QuantizeParts()))),
)
