"""mxgate fixtures: the tensors in fixtures/, verified, made, listed or exported."""

from __future__ import annotations

import argparse

from mxgate.conformance.commands import common
from mxgate.conformance.commands.usage import UsageError


def options(sub: argparse.ArgumentParser) -> None:
    actions = ("verify", "generate", "list", "export", "capture")
    sub.add_argument(
        "action",
        choices=actions,
        metavar="ACTION",
        help="verify: make every tensor again and compare; generate: write them; list: what there is; "
        "export: write the golden ones as raw bytes and JSON; "
        "capture: train the small model again (needs torch), then generate",
    )
    sub.add_argument("folder", nargs="?", type=common.path, metavar="DIR", help="of export: where it goes")


def command(args: argparse.Namespace) -> int:
    from mxgate.conformance import golden
    from mxgate.conformance import report as text
    from mxgate.fixtures import CAPTURED
    from mxgate.fixtures.store import StoreError

    to = text.console()
    if args.folder is not None and args.action != "export":
        raise UsageError(f"`mxgate fixtures {args.action}` takes no folder; expected one of export alone")
    try:
        if args.action == "list":
            held = [(c, True) for c in golden.stored()] + [(c, False) for c in golden.hashed()]
            size = {c.id: golden.golden_path(c).stat().st_size for c, whole in held if whole}
            text.table(
                to,
                ["case", "bytes", "kept as"],
                [[c.id, str(size.get(c.id, "-")), "file" if whole else "hashes in the manifest"] for c, whole in held],
                ["bytes"],
            )
            return 0
        if args.action == "verify":
            with text.Watch("fixtures") as step:
                total = len(golden.stored()) + len(golden.hashed())
                done = iter(range(total + 1))
                wrong = golden.verify(lambda name: step(next(done), total, name))
            for line in wrong:
                text.say(to, line)
            text.say(to, f"{len(wrong)} differences" if wrong else f"{total} cases are made again bit for bit")
            return 1 if wrong else 0
        if args.action == "export":
            from mxgate.fixtures.export import export

            if args.folder is None:
                raise UsageError("where to? expected `mxgate fixtures export DIR`")
            common.writable(args.folder)
            export(map(golden.golden_path, golden.stored()), args.folder, lambda line: text.say(to, line))
            return 0
        if args.action == "capture":
            from mxgate.fixtures.capture_moe import capture

            capture(CAPTURED, lambda line: text.say(to, line))
        golden.generate(lambda line: text.say(to, line))
        return 0
    except StoreError as error:
        raise UsageError(str(error)) from None
    except ImportError as error:
        raise UsageError(f"`mxgate fixtures {args.action}` needs {error.name}, which is not installed") from None
