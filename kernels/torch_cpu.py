"""Torch builds of the three GEMMs on the CPU: two designs that share nothing but the operands.

`torch_dequant` dequantizes to float64 (exact: see numpy_reference) and multiplies once per expert. `torch_blocks` never
dequantizes: it multiplies bare elements 32 at a time, scales each float32 partial product by both block scales at once,
and adds those up in float32, as GEMMs do that keep the elements in FP8.

Importing this module does not import torch: a build that needs it is listed, and skipped, without it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from mxgate.kernels.build import BLOCK, GEMMS, Build
from mxgate.oracle import groups

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def _scale_exponents(scales: Tensor) -> Tensor:
    """Exponents of E8M0 scales, int32, same shape; a NaN scale (0xFF) gives 128."""
    import torch

    return scales.view(torch.uint8).to(torch.int32) - 127


def _dequantize(elements: Tensor, scales: Tensor, axis: int) -> Tensor:
    """Exact float64 values of a matrix in blocks of 32 along `axis`; a scale of 0xFF makes its block NaN."""
    import torch

    exponents = _scale_exponents(scales)
    # The bit pattern of a power of two is its biased exponent, all of which float64 has to spare.
    powers = ((exponents.to(torch.int64) + 1023) << 52).view(torch.float64)
    powers = powers.masked_fill(exponents == 128, torch.nan)
    return elements.to(torch.float32).to(torch.float64) * powers.repeat_interleave(BLOCK, dim=axis)


def _dequant_product(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor) -> Tensor:
    """a b^T of a [I,T], scales [I,T/32] and b [J,T], scales [J,T/32]: float64 [I,J]."""
    return _dequantize(a, a_scales, 1) @ _dequantize(b, b_scales, 1).T


def _blocks_product(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor) -> Tensor:
    """a b^T of a [I,T], scales [I,T/32] and b [J,T], scales [J,T/32]: float32 [I,J], summed block by block."""
    import torch

    acc = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float32)
    rows, columns = _scale_exponents(a_scales), _scale_exponents(b_scales)
    for t in range(a.shape[1] // BLOCK):
        block = slice(t * BLOCK, (t + 1) * BLOCK)
        partial = a[:, block].to(torch.float32) @ b[:, block].to(torch.float32).T
        exponent = rows[:, t, None] + columns[None, :, t]
        # 2^exponent may be no float32 (it lies in 2^-254 .. 2^254), but half of it always is.
        half = exponent.div(2, rounding_mode="floor")
        partial = partial * _power(half) * _power(exponent - half)
        lost = (rows[:, t, None] == 128) | (columns[None, :, t] == 128)
        acc += partial.masked_fill(lost, torch.nan)
    return acc


def _power(exponent: Tensor) -> Tensor:
    """2^exponent as float32 for exponents in -127 .. 127, by writing the bits (2^-127 is subnormal)."""
    import torch

    return torch.where(exponent < -126, 0x00400000, (exponent.clamp(-126, 127) + 127) << 23).view(torch.float32)


Product = Callable[..., "Tensor"]


def _result(shape: tuple[int, ...], out: Tensor | None, out_dtype: torch.dtype | str | None) -> Tensor:
    """The caller's buffer, or a fresh one of `out_dtype` (a torch dtype or its name; default bfloat16)."""
    import torch

    dtype: torch.dtype | None = getattr(torch, out_dtype) if isinstance(out_dtype, str) else out_dtype
    if out is None:
        return torch.empty(shape, dtype=dtype or torch.bfloat16)
    if tuple(out.shape) != shape or dtype not in (None, out.dtype):
        raise ValueError(f"out is {out.dtype} {tuple(out.shape)}; expected {dtype or out.dtype} {shape}")
    return out


def _spans(offsets: Tensor, length: int, align: int = 1) -> list[tuple[int, int]]:
    return groups.spans(groups.check_offsets(offsets.numpy(), length, align=align))


def _store(place: Tensor, sums: Tensor) -> None:
    """Round float32 or float64 sums ONCE to the type of `place`, nearest even, and put them there.

    A cast from float64 to bfloat16 or float16 passes through float32 and rounds twice; as in numpy_reference, rounding
    to odd on the way makes the second rounding the only one.
    """
    import torch

    if sums.dtype == torch.float64 and place.dtype != torch.float32:
        near = sums.to(torch.float32)
        back = near.to(torch.float64)
        bits = near.view(torch.int32) - (back.abs() > sums.abs()).to(torch.int32)
        sums = (bits | ((back != sums) & ~sums.isnan()).to(torch.int32)).view(torch.float32)
    place.copy_(sums)


def _forward(
    product: Product,
    x: Tensor,
    x_scales: Tensor,
    w: Tensor,
    w_scales: Tensor,
    offsets: Tensor,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
) -> Tensor:
    y = _result((x.shape[0], w.shape[1]), out, out_dtype)
    for g, (start, end) in enumerate(_spans(offsets, x.shape[0])):
        sums = product(x[start:end], x_scales[start:end], w[g], w_scales[g])
        _store(y[start:end], sums if bias is None else sums + bias[g].to(sums.dtype))
    y[int(offsets[-1]) :] = 0
    return y


def _dgrad(
    product: Product,
    dy: Tensor,
    dy_scales: Tensor,
    w: Tensor,
    w_scales: Tensor,
    offsets: Tensor,
    *,
    out: Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
) -> Tensor:
    dx = _result((dy.shape[0], w.shape[2]), out, out_dtype)
    for g, (start, end) in enumerate(_spans(offsets, dy.shape[0])):
        _store(dx[start:end], product(dy[start:end], dy_scales[start:end], w[g].T, w_scales[g].T))
    dx[int(offsets[-1]) :] = 0
    return dx


def _wgrad(
    product: Product,
    dy_t: Tensor,
    dy_scales: Tensor,
    x_t: Tensor,
    x_scales: Tensor,
    offsets: Tensor,
    *,
    out: Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
) -> Tensor:
    dw = _result((len(offsets), dy_t.shape[0], x_t.shape[0]), out, out_dtype)
    for g, (start, end) in enumerate(_spans(offsets, dy_t.shape[1], BLOCK)):
        t, b = slice(start, end), slice(start // BLOCK, end // BLOCK)
        _store(dw[g], product(dy_t[:, t], dy_scales[:, b], x_t[:, t], x_scales[:, b]))
    return dw


forward_dequant = partial(_forward, _dequant_product)
dgrad_dequant = partial(_dgrad, _dequant_product)
wgrad_dequant = partial(_wgrad, _dequant_product)
forward_blocks = partial(_forward, _blocks_product)
dgrad_blocks = partial(_dgrad, _blocks_product)
wgrad_blocks = partial(_wgrad, _blocks_product)

BUILDS = tuple(
    Build(
        f"torch_{design}",
        op,
        f"{__name__}:{op}_{design}",
        arrays="torch",
        out_dtypes=("bfloat16", "float16", "float32"),
        group_alignment=BLOCK if op == "wgrad" else 1,
        requires=("torch",),
        sources=("mxgate.oracle.groups",),
    )
    for design in ("dequant", "blocks")
    for op in GEMMS
)
