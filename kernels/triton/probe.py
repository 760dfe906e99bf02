"""What this device's dots really compute: `python -m mxgate.kernels.triton.probe`.

Two tables. In the first one tl.dot_scaled over several scale blocks at once is compared, bit by bit, with the same
dot block by block, their partial sums added in float32. The operands' scales are spread over 2^-s .. 2^s, because with
equal exponents no difference would show. In the second each way to form a product is measured against the exact answer:
the largest |error| / sum |a||b|, and which rows of mxgate.oracle.ACCUMULATORS all its elements meet.

What it does not show: other tile sizes, which may choose other instructions, and scales outside 2^-80 .. 2^80.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import ml_dtypes
import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from mxgate.kernels.triton import gemm
from mxgate.kernels.triton.codec import BLOCK, FORMAT_NAMES
from mxgate.kernels.triton.interpreter import mend
from mxgate.oracle import ACCUMULATORS, MXArray
from mxgate.oracle import forward as exact_forward
from mxgate.oracle.bound import outside
from mxgate.oracle.formats import FORMATS, decode_table

mend()

ROWS = 128
SPREADS = (0, 3, 6, 12, 24)
LENGTHS = (64, 128, 256, 4096)
ROUTES = ("dequant", "blocks", "scaled", "chained")


@triton.jit
def scaled_kernel(a_ptr, a_scales_ptr, b_ptr, b_scales_ptr, out_ptr, K: tl.constexpr, STEP: tl.constexpr):
    """out [128, 128] float32 of e4m3fn a, b [128, K], scales [128, K / 32]: dot_scaled over STEP elements at once."""
    rows = tl.arange(0, 128)
    total = tl.zeros((128, 128), tl.float32)
    for low in range(0, K, STEP):
        k = low + tl.arange(0, STEP)
        blocks = low // BLOCK + tl.arange(0, STEP // BLOCK)
        a = tl.load(a_ptr + rows[:, None] * K + k[None, :]).to(tl.float8e4nv, bitcast=True)
        b = tl.load(b_ptr + rows[:, None] * K + k[None, :]).to(tl.float8e4nv, bitcast=True)
        a_scales = tl.load(a_scales_ptr + rows[:, None] * (K // BLOCK) + blocks[None, :])
        b_scales = tl.load(b_scales_ptr + rows[:, None] * (K // BLOCK) + blocks[None, :])
        total += tl.dot_scaled(a, a_scales, "e4m3", tl.trans(b), b_scales, "e4m3")
    tl.store(out_ptr + rows[:, None] * 128 + rows[None, :], total)


@triton.jit
def chained_kernel(a_ptr, b_ptr, out_ptr, K: tl.constexpr, STEP: tl.constexpr):
    """The bare FP8 dot, float32 [128, 128], accumulated inside the instruction throughout: no scales at all."""
    rows = tl.arange(0, 128)
    total = tl.zeros((128, 128), tl.float32)
    for low in range(0, K, STEP):
        k = low + tl.arange(0, STEP)
        a = tl.load(a_ptr + rows[:, None] * K + k[None, :]).to(tl.float8e4nv, bitcast=True)
        b = tl.load(b_ptr + rows[:, None] * K + k[None, :]).to(tl.float8e4nv, bitcast=True)
        total = tl.dot(a, tl.trans(b), total, max_num_imprecise_acc=STEP)
    tl.store(out_ptr + rows[:, None] * 128 + rows[None, :], total)


@dataclass(frozen=True)
class Compared:
    """One dot_scaled over `length` elements against blocks of 32 added in float32. different: of 16,384 elements."""

    length: int
    spread: int
    different: int
    largest: float  # |difference| / sum |a||b|, as a power of two; -inf for none


@dataclass(frozen=True)
class Measured:
    """One way to form products. error: largest |error| / sum |a||b| as a power of two. meets: accumulator rows."""

    route: str
    length: int
    spread: int
    error: float
    meets: tuple[str, ...]


def operands(length: int, spread: int, scaled: bool = True) -> tuple[MXArray, MXArray]:
    """x [128, length] and w [1, 128, length]: codes of N(0, 1) values, scales 2^-spread .. 2^spread or all 1."""
    rng = np.random.default_rng(length * 1000 + spread)
    table = decode_table("e4m3fn")
    finite = np.flatnonzero(np.isfinite(table) & (np.signbit(table) == (np.arange(256) > 127)))
    order = finite[np.argsort(table[finite], kind="stable")].astype(np.uint8)
    found = []
    for shape in ((ROWS, length), (1, ROWS, length)):
        # Where no scale carries the exponents the elements do, as far as they reach.
        values = rng.standard_normal(shape) * (1.0 if scaled else np.exp2(rng.integers(-min(spread, 6), 7, shape)))
        codes = order[np.searchsorted(table[order], values).clip(0, order.size - 1)]
        exponents = rng.integers(-spread, spread + 1, (*shape[:-1], length // 32)) if scaled else 0
        scales = np.broadcast_to(127 + exponents, (*shape[:-1], length // 32)).astype(np.uint8)
        found.append(
            MXArray(
                codes.view(FORMATS["e4m3fn"].dtype),
                np.ascontiguousarray(scales).view(ml_dtypes.float8_e8m0fnu),
                len(shape) - 1,
                "e4m3fn",
            )
        )
    return found[0], found[1]


def tensors(mx: MXArray, device: str) -> tuple[Tensor, Tensor]:
    """The operand's bytes on the device, under torch's types."""
    codes = torch.from_numpy(mx.codes()).to(device).view(getattr(torch, f"float8_{FORMAT_NAMES[0]}"))
    return codes, torch.from_numpy(mx.scale_codes()).to(device).view(torch.float8_e8m0fnu)


def log2(x: float) -> float:
    return math.log2(x) if x > 0 else -math.inf


def compared(device: str) -> Iterator[Compared]:
    """The first table."""
    for length in LENGTHS[:3]:
        for spread in SPREADS:
            x, w = operands(length, spread)
            planes = [p.view(torch.uint8) for p in (*tensors(x, device), *tensors(w, device))]
            both = []
            for step in (length, 32):
                out = torch.empty(ROWS, ROWS, device=device)
                scaled_kernel[(1,)](*planes, out, K=length, STEP=step, num_warps=4)
                both.append(out.cpu().numpy().astype(np.float64))
            magnitude = exact_forward(x, w, np.array([ROWS], np.int32)).magnitude
            difference = np.abs(both[0] - both[1])
            largest = float((difference / magnitude).max())
            yield Compared(length, spread, int(np.count_nonzero(~(difference == 0))), log2(largest))


def measured(device: str) -> Iterator[Measured]:
    """The second table. `chained` is the bare FP8 dot: without scales, on elements that are spread themselves."""
    ends = np.array([ROWS], np.int32)
    place = gemm.device_for(torch.device(device))
    for route in ROUTES:
        if route in ("scaled", "chained") and not (place.native and 0 in place.dots):
            continue
        for length in LENGTHS:
            for spread in (0, 6):
                x, w = operands(length, spread, scaled=route != "chained")
                given = (*tensors(x, device), *tensors(w, device))
                if route == "chained":
                    out = torch.empty(ROWS, ROWS, device=device)
                    planes = [given[i].view(torch.uint8) for i in (0, 2)]
                    chained_kernel[(1,)](*planes, out, K=length, STEP=min(length, 128), num_warps=4)
                else:
                    offsets = torch.from_numpy(ends).to(device)
                    out = gemm.forward(*given, offsets, product=route, out_dtype=torch.float32)
                answer = exact_forward(x, w, ends)
                got: NDArray[np.float32] = out.cpu().numpy()
                error = np.abs(got.astype(np.float64) - answer.value) / answer.magnitude
                meets = tuple(
                    name for name in ACCUMULATORS if not outside(got, *answer.interval(name, np.float32)).any()
                )
                yield Measured(route, length, spread, log2(float(error.max())), meets)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m mxgate.kernels.triton.probe", description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    place = gemm.device_for(torch.device(device))
    where = torch.cuda.get_device_name() if device == "cuda" else "a CPU, interpreted"
    has_scaled = bool(place.native)
    first = list(compared(device)) if has_scaled else []
    second = list(measured(device))
    if args.json:
        document: dict[str, Any] = {
            "device": where,
            "architecture": place.name,
            "triton": triton.__version__,
            "torch": torch.__version__,
            "dot_scaled": [asdict(row) for row in first],
            "routes": [asdict(row) for row in second],
        }
        print(json.dumps(document, indent=1).replace("-Infinity", "null"))
        return
    print(f"{where} ({place.name}), Triton {triton.__version__}, torch {torch.__version__}\n")
    print("tl.dot_scaled over the whole length against blocks of 32 added in float32, 128 x 128 outputs")
    print(f"{'length':>8}{'scales':>10}{'different':>11}{'largest / sum |a||b|':>22}")
    for row in first:
        print(f"{row.length:>8}{f'2^+-{row.spread}':>10}{row.different:>11}{f'2^{row.largest:.1f}':>22}")
    if not has_scaled:
        print("  not run: the interpreter has no dot_scaled" if device == "cpu" else "  not run: no FP8 here")
    print(f"\n{'route':<10}{'length':>8}{'spread':>8}{'error':>10}  meets")
    for one in second:
        meets = ", ".join(one.meets) or "no row"
        print(f"{one.route:<10}{one.length:>8}{one.spread:>8}{f'2^{one.error:.1f}':>10}  {meets}")


if __name__ == "__main__":
    main()
