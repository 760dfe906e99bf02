"""Torch's own grouped GEMMs on a GPU.

`torch_two_pass` dequantizes both operands to bfloat16, one byte read and two written per element, and multiplies with
grouped_mm. A bfloat16 holds every element under a scale of 2^-80 .. 2^80 exactly, so only grouped_mm rounds, in the
tensor cores' float32 accumulator: on Hopper it claims the row `wgmma-bf16`. A flag in device memory says whether a
token or a weight had another scale; a kernel of mxgate.kernels.triton then does it all again, and otherwise returns at
once. Nothing waits for the host. More than 1,024 experts, which grouped_mm refuses, are that kernel's altogether.

`torch_scaled` is scaled_grouped_mm with blocks of 1x32, which takes a Blackwell GPU. On an H200 torch 2.11 does not
refuse it: it launches a kernel for another architecture, and every later call of the process fails ("unspecified launch
failure"). Written after torch's documentation and the layout that cuBLAS documents for scales; run on no hardware.

`bf16_*` are no builds but what every time is compared with: grouped_mm of operands that were bfloat16 all along.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mxgate.kernels.build import BLOCK, GEMMS, Build

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MOST_EXPERTS = 1024


def _grouped_mm(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    import torch

    function: Any = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    result: Tensor = function(a, b, offs=offsets)
    return result


# ---------------------------------------------------------------------------------------------------------------------
# Two passes


def forward(x: Tensor, x_scales: Tensor, w: Tensor, w_scales: Tensor, offsets: Tensor) -> Tensor:
    """Y[g] = X[g] W[g]^T: x [M,K], scales [M,K/32]; w [E,N,K], scales [E,N,K/32]; bfloat16 [M,N]."""
    from mxgate.kernels.triton import gemm

    a, b = gemm.operand(x, x_scales, 1, 0, "x"), gemm.operand(w, w_scales, 2, 1, "w")
    return _rows(x, x_scales, w, w_scales, offsets, a, b, (1, 2))


def dgrad(dy: Tensor, dy_scales: Tensor, w: Tensor, w_scales: Tensor, offsets: Tensor) -> Tensor:
    """dX[g] = dY[g] W[g]: dy [M,N], scales [M,N/32]; w [E,N,K] blocked along N, scales [E,N/32,K]; bfloat16 [M,K]."""
    from mxgate.kernels.triton import gemm

    a, b = gemm.operand(dy, dy_scales, 1, 0, "dy"), gemm.operand(w, w_scales, 1, 2, "w")
    return _rows(dy, dy_scales, w, w_scales, offsets, a, b, (2, 1))


def _rows(
    x: Tensor, x_scales: Tensor, w: Tensor, w_scales: Tensor, offsets: Tensor, a: Any, b: Any, axes: tuple[int, int]
) -> Tensor:
    import torch

    from mxgate.kernels.triton import gemm
    from mxgate.kernels.triton.quantize import dequantize, zero_rows

    gemm.check_route(offsets, x.shape[0], 1, False)
    if len(offsets) > MOST_EXPERTS or not x.numel():
        return gemm.rows_gemm(a, b, axes, offsets, product="dequant")
    far = torch.zeros(1, dtype=torch.int32, device=x.device)
    tokens = dequantize(x, x_scales, far, ends=offsets, limit=0)
    weights = dequantize(w, w_scales, far)
    y = _grouped_mm(tokens, weights.transpose(1, 2) if axes == (1, 2) else weights, offsets)
    zero_rows(y, offsets)
    return gemm.rows_gemm(a, b, axes, offsets, out=y, product="dequant", only_if=far)


def wgrad(dy_t: Tensor, dy_scales: Tensor, x_t: Tensor, x_scales: Tensor, offsets: Tensor) -> Tensor:
    """dW[g] = dY[g]^T X[g]: dy_t [N,M], scales [N,M/32]; x_t [K,M], scales [K,M/32]; bfloat16 [E,N,K]."""
    import torch

    from mxgate.kernels.triton import gemm
    from mxgate.kernels.triton.quantize import dequantize

    a, b = gemm.operand(dy_t, dy_scales, 1, 0, "dy_t"), gemm.operand(x_t, x_scales, 1, 0, "x_t")
    gemm.check_route(offsets, dy_t.shape[1], BLOCK, False)
    if len(offsets) > MOST_EXPERTS or not dy_t.numel():
        return gemm.columns_gemm(a, b, offsets, product="dequant")
    far = torch.zeros(1, dtype=torch.int32, device=dy_t.device)
    left = dequantize(dy_t, dy_scales, far, ends=offsets, limit=1)
    right = dequantize(x_t, x_scales, far, ends=offsets, limit=1)
    dw = _grouped_mm(left, right.T, offsets)
    return gemm.columns_gemm(a, b, offsets, out=dw, product="dequant", only_if=far)


# ---------------------------------------------------------------------------------------------------------------------
# The baseline


def bf16_forward(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    """Y[g] = X[g] W[g]^T of bfloat16 x [M,K] and w [E,N,K]; rows past the last offset hold anything."""
    return _grouped_mm(x, w.transpose(1, 2), offsets)


def bf16_dgrad(dy: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    """dX[g] = dY[g] W[g] of bfloat16 dy [M,N] and w [E,N,K]; rows past the last offset hold anything."""
    return _grouped_mm(dy, w, offsets)


def bf16_wgrad(dy_t: Tensor, x_t: Tensor, offsets: Tensor) -> Tensor:
    """dW[g] = dY[g]^T X[g] of bfloat16 dy_t [N,M] and x_t [K,M]; [E,N,K]."""
    return _grouped_mm(dy_t, x_t.T, offsets)


# ---------------------------------------------------------------------------------------------------------------------
# Blackwell's block-scaled GEMM


def blocked_places(rows: Tensor, columns: Tensor, width: Tensor | int) -> Tensor:
    """Where the scale of (row, column) goes in cuBLAS's layout of a plane `width` columns wide, a multiple of 4.

    The plane is cut into tiles of 128 x 4, row of tiles after row of tiles; in a tile the rows r, r + 32, r + 64 and
    r + 96 follow each other, four bytes each.
    """
    tile = rows // 128 * (width // 4) + columns // 4
    return tile * 512 + rows % 32 * 16 + rows % 128 // 32 * 4 + columns % 4


def _up(length: Any, multiple: int) -> Any:
    return (length + multiple - 1) // multiple * multiple


def blocked_by_rows(scales: Tensor, offsets: Tensor) -> Tensor:
    """uint8 scales [M, C] whose rows are tokens: every group starts a tile. [M + 127 E or more, C or more]."""
    import torch

    (m, c), experts = scales.shape, len(offsets)
    width, ends = _up(c, 4), offsets.to(torch.int64)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    padded = _up(ends - starts, 128)
    row = torch.arange(m, device=scales.device)
    expert = torch.searchsorted(ends, row, right=True).clamp(max=experts - 1)
    target = (torch.cumsum(padded, 0) - padded)[expert] + row - starts[expert]
    high = _up(m + 127 * experts, 128)
    flat = scales.new_zeros(high * width + 1)
    place = blocked_places(target[:, None], torch.arange(c, device=scales.device)[None, :], width)
    place = torch.where((row < ends[-1])[:, None], place, high * width)  # padding goes into the spare byte
    flat[place.reshape(-1)] = scales.reshape(-1)
    return flat[:-1].reshape(high, width)


def blocked_by_columns(scales: Tensor, offsets: Tensor) -> Tensor:
    """uint8 scales [R, M/32] whose columns are blocks of tokens: a plane for every group, one after another."""
    import torch

    (r, c), experts = scales.shape, len(offsets)
    high, ends = _up(r, 128), offsets.to(torch.int64) // BLOCK
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    widths = _up(ends - starts, 4)
    column = torch.arange(c, device=scales.device)
    expert = torch.searchsorted(ends, column, right=True).clamp(max=experts - 1)
    base = (torch.cumsum(widths, 0) - widths)[expert] * high
    row = torch.arange(r, device=scales.device)[:, None]
    total = _up(c + 3 * experts, 4) * high
    flat = scales.new_zeros(total + 1)
    place = base[None, :] + blocked_places(row, (column - starts[expert])[None, :], widths[expert][None, :])
    place = torch.where((column < ends[-1])[None, :], place, total)
    flat[place.reshape(-1)] = scales.reshape(-1)
    return flat[:-1].reshape(high, -1)


def blocked_weights(scales: Tensor) -> Tensor:
    """uint8 scales [E, R, C] of weights: a plane for each expert, [E, R to a multiple of 128 times C to one of 4]."""
    import torch

    experts, r, c = scales.shape
    high, width = _up(r, 128), _up(c, 4)
    flat = scales.new_zeros(experts, high * width)
    row, column = (torch.arange(length, device=scales.device) for length in (r, c))
    flat[:, blocked_places(row[:, None], column[None, :], width).reshape(-1)] = scales.reshape(experts, -1)
    return flat


def _scaled(a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, offsets: Tensor) -> Tensor:
    import torch

    functional: Any = torch.nn.functional
    recipe, swizzle = functional.ScalingType.BlockWise1x32, functional.SwizzleType.SWIZZLE_32_4_4
    e8m0: torch.dtype = torch.float8_e8m0fnu
    result: Tensor = functional.scaled_grouped_mm(
        a,
        b,
        a_scales.view(e8m0),
        recipe,
        b_scales.view(e8m0),
        recipe,
        swizzle_a=swizzle,
        swizzle_b=swizzle,
        offs=offsets,
        output_dtype=torch.bfloat16,
    )
    return result


def scaled_forward(x: Tensor, x_scales: Tensor, w: Tensor, w_scales: Tensor, offsets: Tensor) -> Tensor:
    """As `forward`, by scaled_grouped_mm."""
    import torch

    from mxgate.kernels.triton.quantize import zero_rows

    left = blocked_by_rows(x_scales.view(torch.uint8), offsets)
    y = _scaled(x, w.transpose(1, 2), left, blocked_weights(w_scales.view(torch.uint8)), offsets)
    zero_rows(y, offsets)
    return y


def scaled_dgrad(dy: Tensor, dy_scales: Tensor, w: Tensor, w_scales: Tensor, offsets: Tensor) -> Tensor:
    """As `dgrad`, by scaled_grouped_mm, which wants the contraction of the weights contiguous: a copy of them."""
    import torch

    from mxgate.kernels.triton.quantize import zero_rows

    turned = w.view(torch.uint8).transpose(1, 2).contiguous().view(w.dtype)
    right = blocked_weights(w_scales.view(torch.uint8).transpose(1, 2).contiguous())
    dx = _scaled(dy, turned.transpose(1, 2), blocked_by_rows(dy_scales.view(torch.uint8), offsets), right, offsets)
    zero_rows(dx, offsets)
    return dx


def scaled_wgrad(dy_t: Tensor, dy_scales: Tensor, x_t: Tensor, x_scales: Tensor, offsets: Tensor) -> Tensor:
    """As `wgrad`, by scaled_grouped_mm."""
    import torch

    left, right = (blocked_by_columns(s.view(torch.uint8), offsets) for s in (dy_scales, x_scales))
    return _scaled(dy_t, x_t.T, left, right, offsets)


_TRITON = tuple(
    f"mxgate.kernels.triton.{name}" for name in ("codec", "gemm", "gemm/tiles.json", "interpreter", "quantize")
)
BUILDS = (
    *(
        Build(
            "torch_two_pass",
            op,
            f"{__name__}:{op}",
            arrays="torch",
            group_alignment=BLOCK if op == "wgrad" else 1,
            accumulator="wgmma-bf16",
            device="cuda",
            requires=("torch", "triton"),
            sources=("mxgate.oracle.groups", *_TRITON),
        )
        for op in GEMMS
    ),
    *(
        Build(
            "torch_scaled",
            op,
            f"{__name__}:scaled_{op}",
            arrays="torch",
            formats=("e4m3fn",),
            group_alignment=BLOCK if op == "wgrad" else 1,
            accumulator="mma-mx-25bit",
            device="sm100",
            requires=("torch", "triton"),
            sources=("mxgate.oracle.groups", *_TRITON),
        )
        for op in GEMMS
    ),
)
