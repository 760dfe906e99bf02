"""Compile every kernel for GPUs that are not here: `python -m mxgate.kernels.triton.compile [TARGET ...]`.

Triton carries its compilers, so a kernel's types and shapes are checked for a device down to its machine code (ptxas,
or LLVM for AMD). What it shows is that the kernels compile with tiles.json's settings: not that they are right there,
nor that their shared memory fits.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mxgate.kernels.triton import gemm, probe, quantize

TARGETS: Mapping[str, Any] = {
    "sm90": GPUTarget("cuda", 90, 32),
    "sm100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
# Formats (by number) that each multiplies itself, and converts itself: see gemm.device_for.
DOTS: Mapping[str, tuple[int, ...]] = {"sm90": (0, 1), "sm100": (0, 1), "gfx942": (2, 3), "gfx950": (0, 1)}
NATIVE: Mapping[str, tuple[int, ...]] = {**DOTS, "gfx942": ()}
_POINTERS = {
    "bias_ptr": "*fp32",
    "parts_ptr": "*fp32",
    **dict.fromkeys(("route_ptr", "offsets_ptr", "ends_ptr", "far_ptr"), "*i32"),
}


@dataclass(frozen=True)
class Job:
    """One kernel with its constants. types: of the arguments that are not what their names say."""

    name: str
    kernel: Any
    constants: Mapping[str, Any]
    types: Mapping[str, str]
    options: Mapping[str, int]


def jobs(target: str) -> Iterator[Job]:
    """Every way that a launch on the target specialises a kernel, but for strides."""
    for product in gemm.PRODUCTS:
        for formats in ((0, 0), (1, 0), (2, 2)):
            if product == "scaled" and (2 in formats or not NATIVE[target]):
                continue
            plain = (product, formats) == ("dequant", (0, 0))
            for split, repair in ((1, False), (3, False), (1, True)) if plain else ((1, False),):
                yield from _gemms(target, product, formats, split, repair)
    for formats in ((0, 0), (1, 0), (2, 2)):
        yield from _gemms(target, "mixed", formats, 1, False)
    yield from _gemms(target, "mixed", (0, 0), 1, True)
    for ablate, product in itertools.product(gemm.ABLATIONS.values(), ("dequant", "mixed")):
        yield from _gemms(target, product, (0, 0), 1, False, ablate)
    out = {"out_ptr": "*bf16"}
    yield Job("add", gemm.add_kernel, {"OUT": tl.bfloat16, "B": 1024}, out, {})
    for kind, pointer in enumerate(("*i32", "*i16", "*fp16")):
        for format in (0, 1, 2):
            for stochastic in (False, True):
                shared = {"KIND": kind, "FORMAT": format, "STOCHASTIC": stochastic, "NATIVE": format in NATIVE[target]}
                types = {"x_ptr": pointer, "key": "i64"}
                name = f"quantize {pointer[1:]} {format} {'stochastic' if stochastic else 'even'}"
                yield Job(name, quantize.last_axis_kernel, {**shared, "B": 128}, types, {"num_warps": 4})
                for square in (False, True):
                    constants = {**shared, "SQUARE": square, "C": 128}
                    yield Job(f"{name} columns", quantize.other_axis_kernel, constants, types, {"num_warps": 4})
    for format, (block_r, block_c), limit in ((0, (1, 32), 2), (1, (1, 32), 1), (2, (32, 1), 0), (0, (32, 32), 0)):
        constants = {
            "BLOCK_R": block_r,
            "BLOCK_C": block_c,
            "ROWS": 32,
            "COLUMNS": 256,
            "FORMAT": format,
            "LIMIT": limit,
            "NATIVE": bool(NATIVE[target]),
            "DTYPE": tl.bfloat16,
        }
        name = f"dequantize {format} {block_r}x{block_c}"
        yield Job(name, quantize.dequantize_kernel, constants, out, {"num_warps": 8})
    zeros = {"ROWS": 32, "COLUMNS": 128}
    yield Job("zero rows", quantize.zero_rows_kernel, zeros, {"out_ptr": "*i16"}, {})
    if 0 in DOTS[target]:
        for step in (32, 256):
            constants = {"K": 256, "STEP": step}
            yield Job(f"probe scaled {step}", probe.scaled_kernel, constants, {"out_ptr": "*fp32"}, {"num_warps": 4})
        constants = {"K": 256, "STEP": 128}
        yield Job("probe chained", probe.chained_kernel, constants, {"out_ptr": "*fp32"}, {"num_warps": 4})


def _gemms(
    target: str, product: str, formats: tuple[int, int], split: int, repair: bool, ablate: int = 0
) -> Iterator[Job]:
    for kind, kernel in (("rows", gemm.rows_kernel), ("wgrad", gemm.wgrad_kernel)):
        if (kind, product) == ("rows", "mixed"):
            continue
        tile = gemm.tiles(target)[f"{kind}/{product}"]
        settings = gemm.settings(replace(tile, length=32) if repair else tile)
        keys: tuple[str, ...] = ("num_warps", "num_stages", "maxnreg")
        options: dict[str, int] = {key: settings.pop(key) for key in keys if key in settings}
        constants = {
            **settings,
            "A_FORMAT": formats[0],
            "B_FORMAT": formats[1],
            "A_SQUARE": False,
            "B_SQUARE": False,
            "OUT": tl.bfloat16,
            "SPLIT": split,
            "REPAIR": repair,
            "PRODUCT": 0 if repair else (*gemm.PRODUCTS, "mixed").index(product),
            "NATIVE": bool(NATIVE[target]),
            "FP8_DOT": all(f in DOTS[target] for f in formats),
            "DTYPE": tl.bfloat16,
            "ABLATE": ablate,
        }
        if kind == "rows":
            constants |= {"EXPERTS": 16, "GROUP_ROWS": 0, "HAS_BIAS": True}
        else:
            constants |= {"RANKED": gemm.RANKED_EXPERTS}
        types = {"out_ptr": "*bf16" if split == 1 else "*fp32"}
        if product == "mixed" and not repair:
            types |= {"b_ptr": "*bf16", "b_scales_ptr": "*i32"}
        name = f"{kind} {product} {formats[0]}x{formats[1]}"
        name += f" split {split}" * (split > 1) + " repair" * repair + f" ablate {ablate}" * bool(ablate)
        yield Job(name, kernel, constants, types, options)


def compile_job(job: Job, target: str) -> Any:
    """The compiled kernel, with strides of 1 and sizes in multiples of 16, as usual. Raises what Triton raises."""
    names = job.kernel.arg_names
    unit = {"a_l", "as_l", "b_l", "bs_l", "out_c", "codes_c"} & set(names)
    constants = {**job.constants, **dict.fromkeys(unit, 1)}
    signature, attributes = {}, {}
    for place, name in enumerate(names):
        plain = _POINTERS.get(name, "*u8") if name.endswith("_ptr") else "i32"
        signature[name] = "constexpr" if name in constants else job.types.get(name, plain)
        if name not in constants and name not in ("key", "experts", "SPLIT", "last", "far_step", "m", "as_r"):
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(job.kernel, signature, {(names.index(k),): v for k, v in constants.items()}, attributes)
    return triton.compile(source, target=TARGETS[target], options=dict(job.options))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m mxgate.kernels.triton.compile",
        description="Does every kernel compile, on a machine without a GPU?",
    )
    parser.add_argument("target", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)} (default: all)")
    targets = parser.parse_args(argv).target
    if triton.knobs.runtime.interpret:
        print("TRITON_INTERPRET is set: there is nothing to compile", file=sys.stderr)
        return 2
    if unknown := [t for t in targets if t not in TARGETS]:
        print(f"unknown target {unknown[0]!r}; expected one of {', '.join(TARGETS)}", file=sys.stderr)
        return 2
    failed = 0
    for target in targets or list(TARGETS):
        for job in jobs(target):
            began = time.monotonic()
            try:
                done = compile_job(job, target)
                said = f"{time.monotonic() - began:5.1f} s, {done.metadata.shared} bytes shared"
            except Exception as error:
                failed += 1
                said = f"FAILED {type(error).__name__}: {' '.join(str(error).split())[-300:]}"
            print(f"{target:<8}{job.name:<40}{said}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
