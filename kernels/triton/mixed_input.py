"""The weight gradient as a mixed-input GEMM: X^T dequantized once to bfloat16, dY^T decoded inside the kernel.

What costs most in a kernel that decodes both operands is the decoding, which every tile of the output does again. So
the operand that the tensor cores read from shared memory is dequantized beforehand, one byte read and two written an
element, and is then copied there as it is; the other, decoded in registers on its way into the same instruction, stays
in FP8. Both are exact, as in `triton_dequant`, so it claims the same: `wgmma-bf16` on Hopper.

A scale outside 2^-80 .. 2^80 is found on either side: dY^T's by the tile that meets it, X^T's by the dequantizer, for
all tiles. The second launch then computes them again from X^T's own codes, as for every product of gemm.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from mxgate.kernels.build import BLOCK
from mxgate.kernels.triton import gemm
from mxgate.kernels.triton.gemm import Tile
from mxgate.kernels.triton.quantize import dequantize


def wgrad(
    dy_t: Tensor,
    dy_scales: Tensor,
    x_t: Tensor,
    x_scales: Tensor,
    offsets: Tensor,
    *,
    out: Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
    tile: Tile | None = None,
    ablate: int = 0,
) -> Tensor:
    """As gemm.wgrad with product="dequant"; 2 bytes of workspace for an element of x_t. ValueError, TypeError."""
    gemm.check_route(offsets, dy_t.shape[1], BLOCK, False)
    a, b = gemm.operand(dy_t, dy_scales, 1, 0, "dy_t"), gemm.operand(x_t, x_scales, 1, 0, "x_t")
    far = torch.zeros(1, dtype=torch.int32, device=x_t.device)
    values = dequantize(x_t, x_scales, far, ends=offsets, limit=1)
    options: dict[str, Any] = {"out": out, "out_dtype": out_dtype, "tile": tile, "ablate": ablate}
    return gemm.columns_gemm(a, b, offsets, product="dequant", values=(values, far), **options)


vars(wgrad)["ablations"] = {name: partial(wgrad, ablate=number) for name, number in gemm.ABLATIONS.items()}
