"""mxgate minimize: a rejected case, cut down to the least that is still rejected."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from mxgate.conformance.commands import common, failed
from mxgate.conformance.commands.usage import UsageError
from mxgate.kernels.build import called


def options(sub: argparse.ArgumentParser) -> None:
    failed.options(sub)
    sub.add_argument(
        "--out",
        type=common.path,
        default=Path("minimal.safetensors"),
        metavar="FILE",
        help="where what is left goes (default minimal.safetensors)",
    )
    common.limits(sub, None)


def command(args: argparse.Namespace) -> int:
    common.check_writable(args.out)
    build, case, tier, _ = failed.failure(args)
    from mxgate.conformance import report as text
    from mxgate.conformance.minimize import NotFailingError, minimize
    from mxgate.conformance.runner import Runner

    to = text.console()
    with Runner(failed.plain_settings(tier, args)) as runner, text.Watch("runs") as step:
        try:
            found = minimize(runner, build, case, args.out, lambda tried, left: step(tried, 0, left))
        except NotFailingError as error:
            raise UsageError(str(error)) from None
    text.say(to, f"{build.id} on {case.id}: {found.gate} still rejects it after {found.tried} runs with")
    text.say(to, f"{found.kept.words} (of {found.whole.words})", 2)
    text.say(to, f"wrote {args.out}; replay it: mxgate run {called(build)} --cases {shlex.quote(str(args.out))}")
    return 1
