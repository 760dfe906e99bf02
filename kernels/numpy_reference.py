"""The reference build of each op: what the numeric contract says, written once and plainly in NumPy.

Operands are dequantized to float64, which holds every element times every scale exactly (2^-143 to 2^143; float32 does
not: 448 * 2^127 would be infinite before its partner's small scale could bring it back). Each expert is one matrix
product, and the sum is rounded once to the output type. Padding is never read.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from mxgate.kernels.build import BLOCK, Build
from mxgate.oracle import groups
from mxgate.oracle.formats import FORMATS, decode, format_of, scale_value

Array = NDArray[Any]
F64 = NDArray[np.float64]

# Tokens dequantized at a time: 4096 columns of both operands stay in cache and the peak memory small.
CHUNK = 4096


def forward(
    x: Array,
    x_scales: Array,
    w: Array,
    w_scales: Array,
    offsets: NDArray[np.int32],
    *,
    bias: Array | None = None,
    out: Array | None = None,
    out_dtype: DTypeLike | None = None,
) -> Array:
    """Y[g] = X[g] W[g]^T + bias[g]: x [M,K], scales [M,K/32]; w [E,N,K], scales [E,N,K/32]; bias [E,N]; out [M,N]."""
    y = output((x.shape[0], w.shape[1]), out, out_dtype)
    for g, (start, end) in enumerate(spans(offsets, x.shape[0])):
        product = matmul(real(x[start:end], x_scales[start:end], 1), real(w[g], w_scales[g], 1).T)
        y[start:end] = narrow(product if bias is None else product + bias[g].astype(np.float64), y.dtype)
    y[total(offsets) :] = 0
    return y


def dgrad(
    dy: Array,
    dy_scales: Array,
    w: Array,
    w_scales: Array,
    offsets: NDArray[np.int32],
    *,
    out: Array | None = None,
    out_dtype: DTypeLike | None = None,
) -> Array:
    """dX[g] = dY[g] W[g]: dy [M,N], scales [M,N/32]; w [E,N,K] blocked along N, scales [E,N/32,K]; out [M,K]."""
    dx = output((dy.shape[0], w.shape[2]), out, out_dtype)
    for g, (start, end) in enumerate(spans(offsets, dy.shape[0])):
        product = matmul(real(dy[start:end], dy_scales[start:end], 1), real(w[g], w_scales[g], 0))
        dx[start:end] = narrow(product, dx.dtype)
    dx[total(offsets) :] = 0
    return dx


def wgrad(
    dy_t: Array,
    dy_scales: Array,
    x_t: Array,
    x_scales: Array,
    offsets: NDArray[np.int32],
    *,
    out: Array | None = None,
    out_dtype: DTypeLike | None = None,
) -> Array:
    """dW[g] = dY[g]^T X[g]: dy_t [N,M], scales [N,M/32]; x_t [K,M], scales [K,M/32]; group ends multiples of 32;
    out [E,N,K], an empty group's exactly +0."""
    dw = output((len(offsets), dy_t.shape[0], x_t.shape[0]), out, out_dtype)
    for g, (start, end) in enumerate(spans(offsets, dy_t.shape[1], BLOCK)):
        acc = np.zeros(dw.shape[1:])
        for low in range(start, end, CHUNK):
            t = slice(low, min(low + CHUNK, end))
            b = slice(t.start // BLOCK, t.stop // BLOCK)
            acc += matmul(real(dy_t[:, t], dy_scales[:, b], 1), real(x_t[:, t], x_scales[:, b], 1).T)
        dw[g] = narrow(acc, dw.dtype)
    return dw


def quantize(x: Array, axis: int, *, format: str = "e4m3fn") -> tuple[Array, Array]:
    """Blocks of 32 along `axis` under the profile `ocp`: (elements of x's shape, scales with x.shape[axis] / 32).

    x: float32, bfloat16 or float16. The shared exponent is that of the block's maximum less emax, elements are rounded
    to nearest even and saturate; a block with a NaN or an infinity is NaN throughout, by its scale alone (elements +0)
    where the format has no NaN. ValueError where 32 does not divide the axis. Floating-point arithmetic (frexp, ldexp,
    rint: all exact in float64), where the oracle uses integers.
    """
    row = FORMATS[format]
    if x.shape[axis] % BLOCK:
        raise ValueError(f"axis {axis} of shape {x.shape} has length {x.shape[axis]}; expected a multiple of {BLOCK}")
    with np.errstate(invalid="ignore"):  # a signalling NaN
        blocks = np.moveaxis(x, axis, -1).astype(np.float64)
    blocks = blocks.reshape(*blocks.shape[:-1], -1, BLOCK)
    maximum = np.abs(blocks).max(axis=-1, initial=0.0)  # NaN if there is one
    finite = np.isfinite(maximum)
    _, exponent = np.frexp(np.where(finite, maximum, 0.0))  # maximum = m * 2^exponent, m in [1/2, 1)
    byte = np.clip(exponent - 1 - row.emax + 127, 0, 254)
    byte = np.where(finite, np.where(maximum == 0.0, 0, byte), 255)

    value = np.ldexp(np.where(finite[..., None], blocks, np.nan), 127 - byte[..., None])
    _, exponent = np.frexp(value)
    step = np.maximum(exponent - 1, 1 - row.bias) - row.mantissa_bits  # log2 of the distance between neighbours
    value = np.clip(np.ldexp(np.rint(np.ldexp(value, -step)), step), -row.max_finite, row.max_finite)
    elements = value.astype(row.dtype)  # every value is one of the format's: the cast has nothing left to round
    elements.view(np.uint8)[~finite] = row.nan_code or 0  # one code, whatever the cast made of the sign

    elements = np.moveaxis(elements.reshape(np.moveaxis(x, axis, -1).shape), -1, axis)
    scales = np.moveaxis(byte.astype(np.uint8), -1, axis)
    return np.ascontiguousarray(elements), np.ascontiguousarray(scales).view(ml_dtypes.float8_e8m0fnu)


def spans(offsets: NDArray[np.int32], length: int, align: int = 1) -> list[tuple[int, int]]:
    """(start, end) of each group in a buffer of `length` tokens. ValueError or TypeError for bad offsets."""
    return groups.spans(groups.check_offsets(offsets, length, align=align))


def total(offsets: NDArray[np.int32]) -> int:
    """Tokens in all groups together: rows from here on are padding."""
    return int(offsets[-1])


def output(shape: tuple[int, ...], out: Array | None, out_dtype: DTypeLike | None) -> Array:
    """The caller's buffer (any strides), or a fresh one of `out_dtype` (default bfloat16). ValueError on a mismatch."""
    if out is None:
        return np.empty(shape, ml_dtypes.bfloat16 if out_dtype is None else np.dtype(out_dtype))
    if out.shape != shape or (out_dtype is not None and out.dtype != np.dtype(out_dtype)):
        raise ValueError(f"out is {out.dtype} {out.shape}; expected {np.dtype(out_dtype or out.dtype)} {shape}")
    return out


def real(elements: Array, scales: Array, axis: int) -> F64:
    """Exact values of a matrix in blocks of 32 along `axis`: float64, same shape. A scale of 0xFF gives NaN."""
    scale = scale_value(np.ascontiguousarray(scales).view(np.uint8))
    values = decode(np.ascontiguousarray(elements).view(np.uint8), format_of(elements.dtype))
    with np.errstate(invalid="ignore"):
        return values * np.repeat(scale, BLOCK, axis=axis)


def matmul(a: F64, b: F64) -> F64:
    """a @ b, quietly: NaN and infinity are legitimate operands."""
    with np.errstate(invalid="ignore", over="ignore"):
        product: F64 = a @ b
    return product


def narrow(x: F64, dtype: DTypeLike) -> Array:
    """float64 rounded ONCE to bfloat16, float16 or float32, nearest even; overflow gives infinity.

    A cast to bfloat16 goes by way of float32 and rounds twice. Rounding to odd on the way there (truncate, and set the
    last bit if anything was lost) leaves the second rounding as the only one, because float32 has more than two bits
    more than either target.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        y = x.astype(np.float32)
        if np.dtype(dtype) == np.float32:
            return y
        bits = y.view(np.uint32).copy()
        back = y.astype(np.float64)
        bits[np.abs(back) > np.abs(x)] -= np.uint32(1)
        bits[(back != x) & ~np.isnan(x)] |= np.uint32(1)
        rounded: Array = bits.view(np.float32).astype(np.dtype(dtype))
    return rounded


_ALL: dict[str, Any] = {"sources": ("mxgate.oracle.formats", "mxgate.oracle.groups")}
_GEMM: dict[str, Any] = {"out_dtypes": ("bfloat16", "float16", "float32"), **_ALL}
BUILDS = (
    Build("numpy_reference", "forward", f"{__name__}:forward", **_GEMM),
    Build("numpy_reference", "dgrad", f"{__name__}:dgrad", **_GEMM),
    Build("numpy_reference", "wgrad", f"{__name__}:wgrad", group_alignment=BLOCK, **_GEMM),
    Build("numpy_reference", "quantize", f"{__name__}:quantize", **_ALL),
)
