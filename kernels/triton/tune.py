"""Which tile settings are quick here: `python -m mxgate.kernels.triton.tune [--quick]`. Prints lines for tiles.json.

Every setting is timed against grouped_mm of bfloat16 operands in the same process, on random codes; next to them the
two-pass route with the limit that its own copy bandwidth sets, and the quantizer and the copy in bytes a second. These
are figures for choosing settings, taken one after another: `mxgate time` is what measures, and only what was accepted.
A setting that does not fit the device, or whose answer is not the default tile's, is named and left out.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from mxgate.kernels import torch_cuda
from mxgate.kernels.triton import gemm, mixed_input
from mxgate.kernels.triton.gemm import Tile
from mxgate.kernels.triton.quantize import dequantize, quantize


@dataclass(frozen=True)
class Shape:
    """n, k: the weight's sides. tokens: per expert, multiples of 32."""

    name: str
    n: int
    k: int
    tokens: tuple[int, ...]


SHAPES = (
    Shape("16b ramp 1.5", 1408, 2048, tuple(32 * round(765 * (0.5 + i / 7)) for i in range(8))),
    Shape("671b down", 7168, 2048, (2048,) * 32),
)
TILES = {
    "dequant": (
        Tile(64, 128, 64, 8, 4, 3, programs=3, registers=168),
        Tile(128, 128, 64, 8, 8, 3, programs=2, registers=128),
        *(
            Tile(rows, columns, length, 8, warps, stages)
            for (rows, columns), (length, warps, stages) in itertools.product(
                ((128, 128), (128, 256), (256, 128), (64, 256)), ((32, 8, 4), (64, 8, 3), (64, 4, 3), (128, 8, 2))
            )
        ),
    ),
    "mixed": (
        Tile(64, 256, 64, 8, 4, 3, programs=2, registers=255),
        *(
            Tile(rows, columns, length, 8, warps, stages)
            for (rows, columns), (length, warps, stages) in itertools.product(
                ((128, 128), (128, 256), (64, 256)), ((32, 8, 4), (64, 8, 3), (64, 4, 3), (64, 8, 2))
            )
        ),
    ),
    "blocks": tuple(
        Tile(rows, columns, 32, 8, warps, stages)
        for (rows, columns), (warps, stages) in itertools.product(
            ((128, 128), (128, 256), (256, 128)), ((4, 4), (8, 4), (8, 6))
        )
    ),
    "scaled": tuple(Tile(128, 128, length, 8, 8, stages) for length, stages in ((64, 3), (128, 2), (128, 3))),
}


def milliseconds(call: Callable[[], Any], quick: bool) -> float:
    """The median of back-to-back calls, each after the second-level cache was overwritten."""
    return float(triton.testing.do_bench(call, warmup=10, rep=40 if quick else 300, return_mode="median"))


def random_planes(*shape: int) -> tuple[Tensor, Tensor]:
    """Finite e4m3fn codes and scales 2^-3 .. 2^3, on the GPU."""
    codes = torch.randint(0, 255, shape, dtype=torch.uint8, device="cuda")
    codes = torch.where(codes & 0x7F == 0x7F, 0x38, codes)
    scales = torch.randint(124, 131, (*shape[:-1], shape[-1] // 32), dtype=torch.uint8, device="cuda")
    return codes.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu)


def bandwidth(quick: bool) -> float:
    """Bytes a second, read and written together, of copying 1 GiB."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / milliseconds(lambda: target.copy_(source), quick) * 1e3


def tune(shape: Shape, op: str, copy: float, quick: bool) -> None:
    m, experts = sum(shape.tokens), len(shape.tokens)
    if op == "wgrad":
        a, b = random_planes(shape.n, m), random_planes(shape.k, m)
    else:
        a, b = random_planes(m, shape.k), random_planes(experts, shape.n, shape.k)
    offsets = torch.tensor(list(itertools.accumulate(shape.tokens)), dtype=torch.int32, device=a[0].device)
    far = torch.zeros(1, dtype=torch.int32, device=a[0].device)
    wide = dequantize(*a, far), dequantize(*b, far)
    baseline = torch_cuda.bf16_wgrad if op == "wgrad" else torch_cuda.bf16_forward
    base = milliseconds(lambda: baseline(*wide, offsets), quick)
    flops = 2.0 * m * shape.n * shape.k
    print(f"\n{op} {shape.name}: bfloat16 grouped_mm {base:.3f} ms, {flops / base / 1e9:.0f} TFLOP/s")
    two_pass = milliseconds(lambda: getattr(torch_cuda, op)(*a, *b, offsets), quick)
    moved = 3.03125 * (a[0].numel() + b[0].numel())
    limit = base / (base + moved / copy * 1e3)
    print(f"  two passes {two_pass:.3f} ms, {base / two_pass:.3f}x; their limit {limit:.3f}x")
    functions: dict[str, Callable[..., Tensor]] = {
        name: mixed_input.wgrad if name == "mixed" else partial(getattr(gemm, op), product=name)
        for name in TILES
        if (name, op) != ("mixed", "forward")
    }
    for product, function in functions.items():
        want = function(*a, *b, offsets)
        timed: list[tuple[float, Tile]] = []
        for tile in TILES[product][:: 3 if quick else 1]:

            def call(tile: Tile = tile, function: Callable[..., Tensor] = function) -> Tensor:
                return function(*a, *b, offsets, tile=tile)

            try:
                got = call()
                # Another tile adds up in another order: a few units in the last place of bfloat16, no more.
                apart = ((got.float() - want.float()).abs().max() / want.float().abs().max()).item()
                if not apart < 2**-6:
                    print(f"  {product} {tile}: its answer is {apart:.2g} off")
                    continue
                timed.append((milliseconds(call, quick), tile))
            except (triton.runtime.errors.OutOfResources, triton.compiler.errors.CompilationError) as error:
                print(f"  {product} {tile}: {' '.join(str(error).split())[:100]}")
            sys.stdout.flush()
        for time, tile in sorted(timed, key=lambda pair: pair[0])[:3]:
            print(f"  {product} {time:.3f} ms, {base / time:.3f}x  {tile}")


def tune_quantizer(copy: float, quick: bool) -> None:
    x = torch.randn(1 << 15, 7168, device="cuda", dtype=torch.bfloat16)
    ways: tuple[dict[str, Any], ...] = ({}, {"rounding": "stochastic", "seed": 1})
    for axis, options in itertools.product((1, 0), ways):

        def call(axis: int = axis, options: dict[str, Any] = options) -> Any:
            return quantize(x, axis, **options)

        time = milliseconds(call, quick)
        rate = x.numel() * (3 + 1 / 32) / time * 1e3
        way = "stochastic" if options else "nearest even"
        print(f"quantize axis {axis}, {way}: {time:.3f} ms, {rate / 1e12:.2f} TB/s, {rate / copy:.2f} of the copy")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m mxgate.kernels.triton.tune", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a third of the settings, shorter, one shape")
    quick = parser.parse_args().quick
    if not torch.cuda.is_available():
        print("there is no GPU here to tune for", file=sys.stderr)
        return 2
    copy = bandwidth(quick)
    print(f"{torch.cuda.get_device_name()}, Triton {triton.__version__}, torch {torch.__version__}")
    print(f"copy {copy / 1e12:.2f} TB/s")
    tune_quantizer(copy, quick)
    for shape in SHAPES[:1] if quick else SHAPES:
        for op in ("wgrad", "forward"):
            tune(shape, op, copy, quick)
    return 0


if __name__ == "__main__":
    sys.exit(main())
