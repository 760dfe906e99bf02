"""How fast the quantizer is, beside torchao's eager `to_mx` with the same rule and a plain memory copy.

Everything runs on one thread, in turns within one process, so a busy machine slows all columns alike; the
figure to read is the ratio. Both results are compared byte by byte first: a row that differs has no times.
torch and torchao are optional: without them the peer's columns are None and `peer` says why.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mxgate.oracle.quantize import MXArray, quantize

SHAPE = (4096, 7168)
DTYPES: dict[str, Any] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}

Peer = Callable[[], tuple[Any, Any]]


def bench_quantize(
    shape: tuple[int, int] = SHAPE,
    *,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    axes: Sequence[int] = (1, 0),
    rules: Sequence[str] = ("floor", "rceil"),
    repeats: int = 5,
) -> list[dict[str, Any]]:
    """One row for each rule, input type and axis of a matrix of normal values, e4m3fn.

    A row's `ours_s`, `peer_s` and `copy_s` are medians in seconds, `*_gb_s` the input's bytes over them, `ratio`
    peer over ours, `spread` (slowest - fastest) / median of our own runs, `same_bytes` whether every element and
    scale byte equals the peer's.
    """
    normal = np.random.default_rng(0).standard_normal(shape, np.float32)
    rows = []
    with _torchao() as (to_mx, peer_name):
        for rule in rules:
            for dtype in dtypes:
                x = normal.astype(DTYPES[dtype])
                for axis in axes:
                    peer = None if to_mx is None else to_mx(x, axis, rule)
                    rows.append(
                        {
                            "bench": "quantize",
                            "shape": list(shape),
                            "dtype": dtype,
                            "axis": axis,
                            "format": "e4m3fn",
                            "rule": rule,
                            "peer": peer_name,
                            "threads": 1,
                            **_row(x, axis, f"torchao-{rule}", peer, repeats),
                        }
                    )
    return rows


def _row(x: NDArray[Any], axis: int, profile: str, peer: Peer | None, repeats: int) -> dict[str, Any]:
    target = np.empty_like(x)
    runs: dict[str, Callable[[], Any]] = {
        "ours": lambda: quantize(x, axis=axis, profile=profile),
        "copy": lambda: np.copyto(target, x),
    }
    same = None
    if peer is not None:
        runs["peer"] = peer
        same = _same_bytes(runs["ours"](), *peer(), axis)
    times: dict[str, list[float]] = {name: [] for name in runs}
    if same is not False:
        for _ in range(repeats):
            for name, run in runs.items():
                start = perf_counter()
                run()
                times[name].append(perf_counter() - start)
    row: dict[str, Any] = {"same_bytes": same}
    for name in ("ours", "peer", "copy"):
        seconds = median(times[name]) if times.get(name) else None
        row[f"{name}_s"] = seconds
        row[f"{name}_gb_s"] = None if seconds is None else x.nbytes / seconds / 1e9
    row["ratio"] = row["peer_s"] / row["ours_s"] if row["peer_s"] and row["ours_s"] else None
    row["spread"] = (max(times["ours"]) - min(times["ours"])) / row["ours_s"] if times["ours"] else None
    return row


def _same_bytes(mx: MXArray, scales: Any, elements: Any, axis: int) -> bool:
    """Whether torchao's tensors, with the blocked axis last, hold the same bytes."""
    codes, byte = mx.codes(), mx.scale_codes()
    if axis == 0:
        codes, byte = codes.T, byte.T
    return bool(np.array_equal(elements, codes) and np.array_equal(scales, byte))


@contextlib.contextmanager
def _torchao() -> Any:
    """(a maker of peers, its name), on one thread while it lasts; (None, why not) where there is no torchao."""
    quiet = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # it reports every missing GPU library at import
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            import torch
            import torchao  # type: ignore[import-untyped]
            from torchao.prototype.mx_formats.config import ScaleCalculationMode  # type: ignore[import-untyped]
            from torchao.prototype.mx_formats.mx_tensor import to_mx  # type: ignore[import-untyped]
    except ImportError as error:
        yield None, f"not run: {error}"
        return
    finally:
        logging.disable(quiet)

    def make(x: NDArray[Any], axis: int, rule: str) -> Peer:
        tensor = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if x.itemsize == 2 else torch.from_numpy(x)
        mode = ScaleCalculationMode[rule.upper()]

        def run() -> tuple[Any, Any]:
            # It has no other axis than the last: along axis 0 its users transpose first.
            given = tensor if axis == 1 else tensor.t().contiguous()
            scales, elements = to_mx(given, torch.float8_e4m3fn, 32, mode)
            return scales.view(torch.uint8).numpy(), elements.view(torch.uint8).numpy()

        return run

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield make, f"torchao {torchao.__version__} eager"
    finally:
        torch.set_num_threads(threads)
