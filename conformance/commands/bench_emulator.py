"""mxgate bench-emulator: the emulator's time, hazards off and on."""

from __future__ import annotations

import argparse
import sys

from mxgate.conformance.commands import common
from mxgate.kernels.build import Unavailable


def options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--quick", action="store_true", help="a small size, on which no target is judged")
    common.as_json(sub)


def command(args: argparse.Namespace) -> int:
    from mxgate.conformance import report as text
    from mxgate.kernels.flydsl.bench import bench

    try:
        rows = list(bench(args.quick))
    except Unavailable as error:
        print(f"mxgate: {error}", file=sys.stderr)
        return 3
    if args.json:
        common.print_json({"command": "bench-emulator", "quick": args.quick, "rows": rows})
    else:
        text.print_emulator(rows, args.quick, text.console())
    return int(any(row["met"] is False for row in rows))
