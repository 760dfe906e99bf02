"""mxgate inspect: what the machine code of an emulated build costs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mxgate.conformance.commands import common
from mxgate.conformance.commands.choose import choose_builds
from mxgate.conformance.commands.usage import UsageError
from mxgate.kernels.build import Unavailable


def options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("build", metavar="BUILD", help="such as wgrad/flydsl")
    sub.add_argument("--budget", type=Path, metavar="FILE", help="exit 1 when a figure is above the one in this file")
    common.as_json(sub)


def command(args: argparse.Namespace) -> int:
    from mxgate.conformance import report as text
    from mxgate.kernels.flydsl import budget

    build = choose_builds([args.build], None)[0].id
    if build not in budget.KERNELS_OF:
        raise UsageError(f"{build} has no machine code of its own; expected one of {', '.join(budget.KERNELS_OF)}")
    try:
        allowed = budget.read(args.budget) if args.budget is not None else None
    except ValueError as error:
        raise UsageError(str(error)) from None
    try:
        figures = budget.inspect(build)
    except Unavailable as error:
        print(f"mxgate: {error}", file=sys.stderr)
        return 3
    above = () if allowed is None else budget.over(figures, allowed.get(build, {}))
    if args.json:
        common.print_json({"command": "inspect", "build": build, "kernels": figures, "over budget": list(above)})
        return int(bool(above))
    to = text.console()
    names = list(dict.fromkeys(name for of in figures.values() for name in of))
    rows = [[name, *(str(of.get(name, "-")) for of in figures.values())] for name in names]
    text.table(to, [build, *figures], rows, list(figures))
    for line in budget.notes():
        text.say(to, line)
    for line in above:
        text.say(to, f"OVER BUDGET {line}")
    return int(bool(above))
