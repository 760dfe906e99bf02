"""The Triton builds: listed without importing Triton or torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from mxgate.kernels.build import BLOCK, GEMMS, Build

_PACKAGE = __name__.rpartition(".")[0]
_FP8 = ("e4m3fn", "e5m2")
_ALL = (*_FP8, "e4m3fnuz", "e5m2fnuz")

# (name, formats, accumulator). On Hopper dequant and scaled both multiply bfloat16; blocks keeps 13 bits of a block.
_PRODUCTS = (
    ("dequant", _ALL, "wgmma-bf16"),
    ("blocks", _ALL, "wgmma-fp8-13bit"),
    ("scaled", _FP8, "wgmma-bf16"),
    ("split", _ALL, "wgmma-bf16"),  # dequant with its sums in three parts
)
_SOURCES = (
    f"{_PACKAGE}.codec",
    f"{_PACKAGE}.interpreter",
    f"{_PACKAGE}.gemm/tiles.json",
    "mxgate.oracle.groups",
)
_COMMON: Mapping[str, Any] = MappingProxyType(
    {
        "arrays": "torch",
        "device": "cuda",
        "requires": ("torch", "triton"),
        "sources": _SOURCES,
    }
)

BUILDS = (
    *(
        Build(
            f"triton_{product}",
            op,
            f"{_PACKAGE}.gemm:{op}_{product}",
            formats=formats,
            out_dtypes=("bfloat16", "float16", "float32"),
            group_alignment=BLOCK if op == "wgrad" else 1,
            accumulator=accumulator,
            **_COMMON,
        )
        for product, formats, accumulator in _PRODUCTS
        for op in GEMMS
    ),
    Build(
        "triton_mixed_input",
        "wgrad",
        f"{_PACKAGE}.mixed_input:wgrad",
        formats=_ALL,
        out_dtypes=("bfloat16", "float16", "float32"),
        group_alignment=BLOCK,
        accumulator="wgmma-bf16",
        **{**_COMMON, "sources": (*_SOURCES, f"{_PACKAGE}.gemm", f"{_PACKAGE}.quantize")},
    ),
    Build(
        "triton_moe",
        "forward",
        f"{_PACKAGE}.moe:forward",
        formats=("e4m3fnuz", "e5m2fnuz"),
        out_dtypes=("bfloat16", "float16", "float32"),
        accumulator="wgmma-fp8-13bit",
        **{**_COMMON, "sources": (*_SOURCES, f"{_PACKAGE}.gemm")},
    ),
    Build(
        "triton_quantize",
        "quantize",
        f"{_PACKAGE}.quantize:quantize",
        formats=_ALL,
        **{**_COMMON, "sources": (*_SOURCES, f"{_PACKAGE}.gemm")},
    ),
)

# The same code on a CPU, where Triton's interpreter runs it in float32; it has no block-scaled dot. Not torch_two_pass:
# its sums would be those of torch's CPU library, which flushes subnormal results to zero.
INTERPRETED = tuple(
    replace(build, device="interpreter", accumulator="fp32-any-order")
    for build in BUILDS
    if build.name != "triton_scaled"
)
