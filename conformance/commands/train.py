"""mxgate train: a toy mixture of experts in MXFP8 beside BF16."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from mxgate.conformance.commands import common
from mxgate.conformance.commands.choose import choose_builds
from mxgate.conformance.commands.usage import UsageError, unknown
from mxgate.kernels.build import GEMMS, Build
from mxgate.kernels.gpu import lacks

DEFAULT = "torch_dequant"
EXITS: Mapping[str, int] = {"accept": 0, "inconclusive": 3, "reject": 1}


def options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "certificate",
        nargs="*",
        type=common.path,
        metavar="CERTIFICATE",
        help="train on the builds that hold these (files of .mxgate/certificates), at most one an op",
    )
    sub.add_argument(
        "--build",
        action="append",
        default=[],
        metavar="NAME",
        help="train on a build without a certificate, at most one an op (an op that is left: torch_dequant)",
    )
    sub.add_argument(
        "--recipe", action="append", metavar="NAME", help="such as 'e4m3' or 'e5m2 gradients'; repeatable (default all)"
    )
    sub.add_argument(
        "--steps",
        type=common.COUNT,
        default=60,
        metavar="N",
        help="training steps (default 60; the first 40 are judged, and fewer are inconclusive)",
    )
    sub.add_argument(
        "--out",
        type=common.path,
        default=common.STATE / "training",
        metavar="DIR",
        help="where losses.json and a plot go (default .mxgate/training)",
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
    held = _certified(args.certificate)
    builds = _builds(held, args.build)
    recipes = training.recipes(names, builds)
    out = common.writable(args.out)
    try:
        with text.Watch("steps") as step:
            curves = training.compare(recipes, args.steps, step)
    except training.LaunchError as error:
        raise UsageError(f"{error}; `mxgate run` says more about a build that fails") from None
    records = [
        {"recipe": c.name, **c.numbers, "losses": c.losses, "distance": c.distance, "verdict": c.verdict}
        for c in curves
    ]
    ids = {op: build.id for op, build in builds.items()}
    certified = sorted(build.id for build in held)
    found = {"builds": ids, "certified": certified, "steps": args.steps, "limit": training.LIMIT, "curves": records}
    (out / "losses.json").write_text(json.dumps(found) + "\n")
    wrote = f"{out}/losses.json"
    try:
        training.plot(curves, out / "losses.svg")
        wrote += ", losses.svg"
    except ImportError:
        wrote += "; for a plot: pip install 'mxgate[report]'"
    code = next(EXITS[word] for word in ("reject", "inconclusive", "accept") if word in {c.verdict for c in curves[1:]})
    if args.json:
        common.print_json({"command": "train", **found, "exit": code})
        return code
    to = text.console()
    columns = ["recipe", "X", "W", "dY", "scale", "last loss", "distance", "verdict"]
    rows = []
    for c in curves:
        x, w, dy, rule, _ = c.numbers.values()
        judged = (
            ["-", "-"]
            if c.how is None
            else [f"{c.distance:.4f}", text.cell("reject") if c.verdict == "reject" else c.verdict]
        )
        rows.append([c.name, x, w, dy, rule, f"{c.last:.4f}", *judged])
    text.table(to, columns, rows, ["last loss", "distance"])
    bare = [build for build in ids.values() if build not in certified]
    lacking = "all" if len(bare) == len(ids) else ", ".join(bare) or "none"
    text.say(to, f"{', '.join(ids.values())}; without a certificate: {lacking}")
    text.say(to, f"{args.steps} steps; losses in nats a character, the last one a mean of {training.WINDOW} steps")
    first, limit = training.HORIZON, training.LIMIT
    text.say(to, f"distance: of the mean of the first {first} steps from bf16's, at most {limit} to be accepted")
    text.say(to, f"wrote {wrote}")
    return code


def _certified(paths: Sequence[Path]) -> list[Build]:
    """The builds of certificates that still hold."""
    from mxgate.conformance import certificate

    found = []
    try:
        for path in paths:
            one = certificate.read(path)
            certificate.check(path, one)
            found.append(one.build)
    except certificate.CertificateError as error:
        raise UsageError(str(error)) from None
    return found


def _builds(held: Sequence[Build], names: Sequence[str]) -> dict[str, Build]:
    """A build for each op, of those that hold certificates, of those named, or the default. UsageError."""
    builds: dict[str, Build] = {}
    # A bare name may be a quantizer's as well; training quantizes by itself.
    named = [b for name in names for b in choose_builds([name], None) if b.op in GEMMS or name == b.id]
    for build in (*held, *named):
        if build.op not in GEMMS:
            raise UsageError(f"{build.id} computes {build.op}; expected builds of {', '.join(GEMMS)}")
        if build.op in builds:
            raise UsageError(f"{builds[build.op].id} and {build.id} both compute {build.op}; give one")
        if (module := build.missing()) is not None:
            raise UsageError(f"{build.id} needs {module}, which is not installed")
        if (lacking := lacks(build.device)) is not None:
            raise UsageError(f"{build.id} {lacking}")
        builds[build.op] = build
    return {op: builds.get(op) or choose_builds([DEFAULT], op)[0] for op in GEMMS}
