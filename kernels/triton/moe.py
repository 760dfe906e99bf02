"""The MoE forward GEMM as inference code asks for it: groups by their sizes, FNUZ elements (gfx942's), a bias.

The sizes stay on the device: their running sum gives the ends of the groups and the kernel finds each tile's expert
from those, so nothing waits for the host and a captured graph may be replayed with other sizes. Rows that nobody owns
are written as zeros: memory that torch.empty returned may hold a NaN, which survives a mask that multiplies by zero.
Weights are read through their strides, [E,N,K] or [E,K,N], and never copied.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxgate.kernels.triton import gemm
from mxgate.kernels.triton.gemm import Tile


def moe_gemm(
    x: Tensor,
    x_scales: Tensor,
    w: Tensor,
    w_scales: Tensor,
    group_sizes: Tensor,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
    weights: str = "nk",
    block: int = 32,
    product: str | None = None,
    split: int = 1,
    tile: Tile | None = None,
) -> Tensor:
    """y [M,N]: rows of expert g times W[g]^T plus bias[g]; rows past the last group are zeros.

    x [M,K], scales [M,K/32]; w [E,N,K], scales [E,N,K/32], or with weights="kn" [E,K,N], [E,K/32,N]; group_sizes:
    integers [E]; bias [E,N] of any strides. Elements: e4m3fnuz or e5m2fnuz. The tile is tiles.json's for the device.
    ValueError for another block than 32, other formats or shapes that do not fit.
    """
    if block != 32:
        raise ValueError(f"block is {block}; expected 32, the only block that MX scales have")
    for name, elements in (("x", x), ("w", w)):
        if elements.dtype not in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
            raise ValueError(f"{name} has type {elements.dtype}; expected float8_e4m3fnuz or float8_e5m2fnuz")
    if tuple(group_sizes.shape) != (w.shape[0],):
        raise ValueError(f"group_sizes have shape {tuple(group_sizes.shape)}; expected {(w.shape[0],)}, one an expert")
    offsets = torch.cumsum(group_sizes, 0).to(torch.int32)
    return gemm.forward(
        x,
        x_scales,
        w,
        w_scales,
        offsets,
        bias=bias,
        out=out,
        out_dtype=out_dtype,
        weights=weights,
        product=product,
        split=split,
        tile=tile,
    )


def forward(
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
    """moe_gemm with the contract's arguments, per-block products as on gfx942."""
    gemm.check_route(offsets, x.shape[0], 1, False)
    sizes = torch.diff(offsets, prepend=offsets.new_zeros(1))
    return moe_gemm(x, x_scales, w, w_scales, sizes, bias=bias, out=out, out_dtype=out_dtype, product="blocks")
