"""mxgate train: a toy mixture of experts in MXFP8 beside BF16."""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path

from mxgate.conformance.commands import common
from mxgate.conformance.commands.choose import choose_builds
from mxgate.conformance.commands.usage import UsageError, unknown


def options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--steps",
        type=common.COUNT,
        default=60,
        metavar="N",
        help="training steps (default 60; the first 60 are judged)",
    )
    sub.add_argument(
        "--recipe", action="append", metavar="NAME", help="such as 'e4m3' or 'e5m2 gradients'; repeatable (default all)"
    )
    sub.add_argument(
        "--build",
        action="append",
        default=[],
        metavar="NAME",
        help="a name from `mxgate list builds`: what to train on, at most one an op (default torch_dequant)",
    )
    sub.add_argument(
        "--out",
        type=Path,
        default=common.STATE / "training",
        metavar="DIR",
        help="where the losses go (default .mxgate/training)",
    )
    common.as_json(sub)


def command(args: argparse.Namespace) -> int:
    try:
        from mxgate.conformance import training
    except ImportError as error:
        raise UsageError(f"training needs {error.name}, which is not installed: pip install 'mxgate[torch]'") from None
    from mxgate.conformance import report as text

    names = args.recipe or list(training.RECIPES)
    for name in names:
        if name not in training.RECIPES:
            raise UsageError(unknown("recipe", name, list(training.RECIPES)))
    builds = {op: f"{op}/torch_dequant" for op in training.OPS}
    for name in args.build:
        named = choose_builds([name], None)
        if not (trained := [b for b in named if b.op in builds]):
            raise UsageError(f"{named[0].id} computes {named[0].op}; expected builds of {', '.join(builds)}")
        builds |= {b.op: b.id for b in trained}
    recipes = training.recipes(names, {op: choose_builds([name], op)[0] for op, name in builds.items()})
    with text.Watch("steps") as step:
        curves = training.compare(recipes, args.steps, step)
    out = common.writable(args.out)
    records = [{"recipe": c.name, "losses": c.losses, "distance": c.distance, "accepted": c.accepted} for c in curves]
    (out / "losses.json").write_text(json.dumps({"builds": builds, "steps": args.steps, "curves": records}) + "\n")
    wrote = f"{out}/losses.json"
    with contextlib.suppress(ImportError):  # the plot is an extra
        training.plot(curves, out / "losses.svg")
        wrote += ", losses.svg"
    code = int(not all(c.accepted for c in curves))
    if args.json:
        common.print_json(
            {"command": "train", "builds": builds, "limit": training.LIMIT, "curves": records, "exit": code}
        )
        return code
    to = text.console()
    rows = [
        [c.name, f"{c.last:.4f}", f"{c.distance:.4f}", "accept" if c.accepted else text.cell("reject")] for c in curves
    ]
    text.table(to, ["recipe", "last loss", "distance", "verdict"], rows, ["last loss", "distance"])
    text.say(to, f"{', '.join(builds.values())}; {args.steps} steps; losses in nats a character, means of")
    text.say(to, f"{training.WINDOW} steps; distance from bf16 in the first {training.HORIZON} steps at most")
    text.say(to, f"{training.LIMIT}; wrote {wrote}")
    return code
