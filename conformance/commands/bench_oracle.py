"""mxgate bench-oracle: the quantizer beside torchao, exact products beside float32 ones."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from mxgate.conformance.commands import common
from mxgate.conformance.commands.process import keep_memory

# Quantizing must be at least this many times as fast as the peer with the same rule, on as many threads.
QUANTIZE_TARGET = 2.0


def options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--quick", action="store_true", help="small sizes, on which no target is judged")
    common.as_json(sub)


def command(args: argparse.Namespace) -> int:
    from mxgate.conformance import report as text
    from mxgate.conformance.bench_gemm import bench_wgrad
    from mxgate.conformance.bench_quantize import bench_quantize

    rows: list[dict[str, Any]] = []
    # The quantizers under the allocator that everybody has, which is what the target means, and, for the record, under
    # one that keeps freed memory: torchao's temporaries are many, and on some machines fresh pages cost it most.
    for kept in (False, True):
        if kept:
            keep_memory()
        for row in bench_quantize((1024, 1792), repeats=3) if args.quick else bench_quantize():
            what = f"quantize {'x'.join(map(str, row['shape']))} {row['dtype']}, axis {row['axis']}, {row['rule']}"
            beside = row["peer"] if row["same_bytes"] is not False else f"other bytes than {row['peer']}"
            least = None if kept else QUANTIZE_TARGET
            what += ", memory kept" if kept else ""
            rows.append({"what": what, "seconds": row["ours_s"], "beside": beside, "least": least, "detail": row})
    for row in bench_wgrad(n=352, k=512, tokens=2048, repeats=2) if args.quick else bench_wgrad():
        beside = "" if row["limit"] is None else "the operands" if row["seconds"] is None else "one float32 matmul"
        rows.append({**row, "beside": beside, "most": row["limit"], "detail": row})
    judged = [row for row in rows if row.get("least") or row.get("most")]
    for row in rows:
        row["ratio"] = row["detail"]["ratio"]
        row["met"] = None if args.quick or row not in judged else _met(row)
    if args.json:
        common.print_json({"command": "bench-oracle", "quick": args.quick, "rows": rows})
    else:
        text.print_bench(rows, args.quick, text.console())
    if any(row["met"] is False for row in rows):
        return 1
    return 0 if args.quick or all(row["met"] for row in judged) else 3


def _met(row: Mapping[str, Any]) -> bool | None:
    """Whether the row's ratio is what it should be; None where there is none, False where the bytes differ."""
    if row["ratio"] is None:
        return False if row["detail"].get("same_bytes") is False else None
    return bool(row["ratio"] >= row.get("least", 0.0) and row["ratio"] <= (row.get("most") or float("inf")))
