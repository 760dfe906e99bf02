"""The Triton builds: listed without importing Triton or torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from mxgate.kernels.build import BLOCK, Build

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
_COMMON: Mapping[str, Any] = MappingProxyType(
    {
        "arrays": "torch",
        "device": "cuda",
        "requires": ("torch", "triton"),
        "sources": (
            f"{_PACKAGE}.codec",
            f"{_PACKAGE}.interpreter",
            f"{_PACKAGE}.gemm/tiles.json",
            "mxgate.oracle.groups",
        ),
    }
)

BUILDS = tuple(
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
    for op in ("forward", "dgrad", "wgrad")
)

# The same kernels on a CPU, where Triton's interpreter runs them in float32; it has no block-scaled dot.
INTERPRETED = tuple(
    replace(build, device="interpreter", accumulator="fp32-any-order")
    for build in BUILDS
    if build.name != "triton_scaled"
)
