"""Operands for the tests of this folder."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mxgate.kernels.build import OPS
from mxgate.oracle.formats import FORMATS, decode_table

# Shapes (rows, columns, scale axis) of operand A and B by op, from n, k, experts and buffer length m.
SHAPES: dict[str, Any] = {
    "forward": lambda n, k, e, m: (((m, k), 1), ((e, n, k), 2)),
    "dgrad": lambda n, k, e, m: (((m, n), 1), ((e, n, k), 1)),
    "wgrad": lambda n, k, e, m: (((n, m), 1), ((k, m), 1)),
}


def operands(
    op: str,
    sizes: tuple[int, ...],
    n: int = 96,
    k: int = 160,
    buffer: int | None = None,
    formats: tuple[str, str] = ("e4m3fn", "e4m3fn"),
    whole: bool = True,
    seed: int = 0,
) -> list[Any]:
    """The positional arguments of `op`, contiguous, the padding holding NaN elements and NaN scales.

    whole: elements are integers in -8 .. 8 and scales 1/2, 1 or 2, so that every sum of products is exact in float32
    whatever its order. Else any finite code, under scales from 2^-6 to 2^6.
    """
    rng = np.random.default_rng(seed)
    tokens = sum(sizes)
    m = -(-tokens // 32) * 32 if buffer is None else buffer
    planes: list[np.ndarray[Any, Any]] = []
    for (shape, axis), name in zip(SHAPES[op](n, k, len(sizes), m), formats, strict=True):
        table = decode_table(name)
        allowed = np.isfinite(table)
        if whole:
            allowed &= (np.abs(table) <= 8) & (table == np.rint(table))
        spread = 1 if whole else 6
        blocks = tuple(length // 32 if i == axis else length for i, length in enumerate(shape))
        planes.append(rng.choice(np.flatnonzero(allowed).astype(np.uint8), shape).view(FORMATS[name].dtype))
        planes.append(rng.integers(127 - spread, 128 + spread, blocks).astype(np.uint8))
    padded = [planes[i] for i, name in enumerate(OPS[op].operands[:4]) if name in OPS[op].padded]
    for plane in padded:
        tail = plane.view(np.uint8)
        if op == "wgrad":
            tail[:, tokens if plane.dtype != np.uint8 else tokens // 32 :] = 0xFF
        else:
            tail[tokens:] = 0xFF
    planes = [p.view(ml_dtypes.float8_e8m0fnu) if p.dtype == np.uint8 else p for p in planes]
    return [*planes, np.cumsum(sizes).astype(np.int32)]


@pytest.fixture
def make() -> Any:
    return operands
