"""A weight gradient as FlyDSL is usually written, to be run as it stands: tensors in, one launch, nothing of ours.

The plainest kernel that is right: a lane for an output, elements decoded by a table of their format's 256 values,
products of 32 tokens summed and then scaled. `banded` makes the same in bands of rows: a fill with zeros, then a launch
for each band, the last one lower than the others.

mxgate run --op wgrad --build kernels/gfx950/sample/launched.py:wgrad --device emu

(No postponed annotations here: FlyDSL reads the annotations of its kernels as objects.)
"""

import flydsl.compiler as flyc
import flydsl.expr as fx
import ml_dtypes
import numpy as np
import torch
from flydsl._mlir.dialects import llvm
from flydsl.expr import as_ir_value, range_constexpr
from flydsl.expr.typing import T

BLOCK = 32  # tokens that share a scale
LANES = 64


def _code(byte):
    return fx.Int32(byte) & 0xFF  # FlyDSL takes torch's uint8 for a signed byte


def _scaled(value, codes):
    """A float32 times the scales of both operands, rounded once: one of them alone may leave float32's range."""
    first, second = map(_code, codes)
    result = fx.Float32(llvm.intr_ldexp(T.f32, as_ir_value(value), as_ir_value(first + second - 254)))
    broken = (first == 255) | (second == 255)
    return broken.select(fx.Float32(float("nan")), result)


@flyc.kernel
def gradient(
    dy: fx.Tensor, dy_scales: fx.Tensor, x: fx.Tensor, x_scales: fx.Tensor, offsets: fx.Tensor, values: fx.Tensor,
    dw: fx.Tensor, columns: fx.Int32, row0: fx.Int32,
):  # fmt: skip
    column = fx.Int32(fx.block_idx.x) * LANES + fx.Int32(fx.thread_idx.x)
    row, expert = fx.Int32(fx.block_idx.y) + row0, fx.Int32(fx.block_idx.z)
    before = (expert > 0).select(expert - 1, fx.Int32(0))
    start = (expert > 0).select(fx.Int32(offsets[before]), fx.Int32(0))
    end = fx.Int32(offsets[expert])
    if column < columns:
        total = fx.Float32(0.0)
        for index in range(start // BLOCK, end // BLOCK, fx.Int32(1)):
            block = fx.Int32(index)
            part = fx.Float32(0.0)
            for i in range_constexpr(BLOCK):
                token = block * BLOCK + i
                a, b = _code(dy[row, token]), _code(x[column, token])
                part = part + fx.Float32(values[0, a]) * fx.Float32(values[1, b])
            total = total + _scaled(part, (dy_scales[row, block], x_scales[column, block]))
        dw[expert, row, column] = total.to(fx.BFloat16)


@flyc.jit
def launch(
    dy: fx.Tensor, dy_scales: fx.Tensor, x: fx.Tensor, x_scales: fx.Tensor, offsets: fx.Tensor, values: fx.Tensor,
    dw: fx.Tensor, rows: fx.Int32, columns: fx.Int32, experts: fx.Int32, stream: fx.Stream = fx.Stream(None),  # noqa: B008
):  # fmt: skip
    grid = ((columns + LANES - 1) // LANES, rows, experts)
    gradient(dy, dy_scales, x, x_scales, offsets, values, dw, columns, fx.Int32(0)).launch(
        grid=grid, block=(LANES, 1, 1), stream=stream
    )


@flyc.kernel
def clear(dw: fx.Tensor, columns: fx.Int32):
    column = fx.Int32(fx.block_idx.x) * LANES + fx.Int32(fx.thread_idx.x)
    if column < columns:
        dw[fx.Int32(fx.block_idx.z), fx.Int32(fx.block_idx.y), column] = fx.BFloat16(0.0)


@flyc.jit
def launch_banded(
    dy: fx.Tensor, dy_scales: fx.Tensor, x: fx.Tensor, x_scales: fx.Tensor, offsets: fx.Tensor, values: fx.Tensor,
    dw: fx.Tensor, rows: fx.Int32, columns: fx.Int32, experts: fx.Int32, band: fx.Int32,
    stream: fx.Stream = fx.Stream(None),  # noqa: B008
):  # fmt: skip
    width = (columns + LANES - 1) // LANES
    clear(dw, columns).launch(grid=(width, rows, experts), block=(LANES, 1, 1), stream=stream)
    for first in range(fx.Int32(0), rows, band):
        row0 = fx.Int32(first)
        height = (rows - row0 < band).select(rows - row0, band)
        gradient(dy, dy_scales, x, x_scales, offsets, values, dw, columns, row0).launch(
            grid=(width, height, experts), block=(LANES, 1, 1), stream=stream
        )


def _tensors(dy_t, dy_scales, x_t, x_scales, offsets):
    codes = [torch.from_numpy(a.view(np.uint8)) for a in (dy_t, dy_scales, x_t, x_scales)]
    every = np.arange(256, dtype=np.uint8)
    values = np.stack([every.view(a.dtype).astype(np.float32) for a in (dy_t, x_t)])
    dw = torch.empty((len(offsets), dy_t.shape[0], x_t.shape[0]), dtype=torch.bfloat16)
    return (*codes, torch.from_numpy(offsets), torch.from_numpy(values), dw)


def _array(tensor):
    return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)


def wgrad(dy_t, dy_scales, x_t, x_scales, offsets):
    """dW [E,N,K] bf16 of FP8 dy_t [N,M] and x_t [K,M] with E8M0 scales [.,M/32] and int32 offsets [E]."""
    tensors = _tensors(dy_t, dy_scales, x_t, x_scales, offsets)
    experts, rows, columns = tensors[-1].shape
    launch(*tensors, rows, columns, experts)
    return _array(tensors[-1])


def banded(dy_t, dy_scales, x_t, x_scales, offsets, band=3):
    """As wgrad, in launches of `band` rows."""
    tensors = _tensors(dy_t, dy_scales, x_t, x_scales, offsets)
    experts, rows, columns = tensors[-1].shape
    launch_banded(*tensors, rows, columns, experts, band, torch.cuda.current_stream())
    torch.cuda.synchronize()
    return _array(tensors[-1])
