"""mxgate inspect: what the machine code of an emulated build costs."""

from __future__ import annotations

import argparse
import sys

from mxgate.conformance.commands import common
from mxgate.conformance.commands.choose import choose_builds
from mxgate.conformance.commands.usage import UsageError
from mxgate.kernels.build import OPS, Unavailable, registry


def options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "build", metavar="BUILD", help="such as wgrad/flydsl, or path/to/file.py:callable that launches through FlyDSL"
    )
    sub.add_argument("--op", choices=list(OPS), help="what a BUILD from a file computes")
    sub.add_argument(
        "--budget",
        type=common.path,
        metavar="FILE",
        help="JSON as in kernels/flydsl/budget.json: exit 1 where a figure is above its own",
    )
    common.as_json(sub)


def command(args: argparse.Namespace) -> int:
    from mxgate.conformance import machine_code
    from mxgate.conformance import report as text
    from mxgate.conformance.child import Limits
    from mxgate.kernels.flydsl import budget
    from mxgate.kernels.gfx950 import virtual

    (build,) = choose_builds([args.build], args.op)[:1]
    build = build if build.id in registry() or build.name.startswith("fault_") else virtual.emulated(build)
    if not machine_code.has(build):
        known = ", ".join(budget.KERNELS_OF)
        raise UsageError(f"{build.id} has no machine code of its own; expected one of {known}, or a file of yours")
    try:
        allowed = budget.read(args.budget) if args.budget is not None else None
    except ValueError as error:
        raise UsageError(str(error)) from None
    try:
        figures = machine_code.figures(build, Limits())
        notes = machine_code.notes(build)
    except Unavailable as error:
        print(f"mxgate: {error}", file=sys.stderr)
        return 3
    above = () if allowed is None else budget.over(figures, allowed.get(build.id, {}))
    if args.json:
        common.print_json({"command": "inspect", "build": build.id, "kernels": figures, "over budget": list(above)})
        return int(bool(above))
    to = text.console()
    names = list(dict.fromkeys(name for of in figures.values() for name in of))
    rows = [[name, *(str(of.get(name, "-")) for of in figures.values())] for name in names]
    text.table(to, [build.id, *figures], rows, list(figures))
    for line in notes:
        text.say(to, line)
    for line in above:
        text.say(to, f"OVER BUDGET {line}")
    return int(bool(above))
