"""mxgate run: builds through the gates, a verdict for each."""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

from mxgate.conformance.commands import common
from mxgate.conformance.commands.choose import DEVICES, choose_builds, choose_cases, gates_named
from mxgate.conformance.commands.saved import check_html, finish
from mxgate.conformance.commands.usage import UsageError
from mxgate.kernels.build import OPS


def options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--op", choices=list(OPS), help="only this op; also what a --build from a file computes")
    sub.add_argument(
        "--build",
        action="append",
        default=[],
        metavar="NAME",
        help="a name from `mxgate list builds`, or path/to/file.py:callable (mxgate.toml beside it states its terms); "
        "may be repeated (default: all that --device says)",
    )
    sub.add_argument(
        "--device",
        choices=list(DEVICES),
        help="which builds: for the CPU, emulated (emu: gfx950 machine code, or a file of FlyDSL launches), for this "
        "machine's GPU (cuda), Triton's interpreted on the CPU (slow: give --case), or all but interpreted ones "
        "(default: cpu and emu; of the production tier cpu)",
    )
    sub.add_argument(
        "--case",
        action="append",
        default=[],
        metavar="ID",
        help="an id from `mxgate list cases`, or a pattern such as 'wgrad/*/signature'; may be repeated",
    )
    common.recorded(sub, "its calls instead of the tier's cases")
    sub.add_argument(
        "--gate",
        action="append",
        metavar="NAME",
        help="only this gate of `mxgate list gates`; may be repeated (never enough for an accept)",
    )
    sub.add_argument(
        "--tier",
        choices=common.TIERS,
        default="smoke",
        help="how much (default smoke; full: every tile edge, more repeats; production: smoke and the large shapes)",
    )
    sub.add_argument("--seed", type=common.salt, default=0, metavar="N", help="the same cases with other data")
    sub.add_argument(
        "--shard", type=common.shard, default=(1, 1), metavar="I/N", help="only the I-th of N parts of the work"
    )
    sub.add_argument(
        "--out",
        type=common.path,
        default=common.STATE,
        metavar="DIR",
        help="where results go, and where a stopped run goes on (default .mxgate)",
    )
    sub.add_argument("--fresh", action="store_true", help="judge everything again, whatever earlier results say")
    sub.add_argument(
        "--executor",
        choices=("local", "ray"),
        default="local",
        help="where to judge: this machine (default), or the nodes of the Ray cluster at $RAY_ADDRESS, else of the "
        "one that this machine is in; --jobs is then of each node",
    )
    common.jobs(sub)
    common.limits(sub, None)
    common.as_html(sub)
    common.as_json(sub)


def _settings(args: argparse.Namespace) -> Any:
    from mxgate.conformance.child import Limits
    from mxgate.conformance.settings import Settings

    return Settings(
        tier=args.tier,
        jobs=args.jobs,
        shard=args.shard,
        limits=Limits(args.time_limit or common.SECONDS[args.tier], args.memory_limit),
        gates=gates_named(args.gate),
        fresh=args.fresh,
    )


def command(args: argparse.Namespace) -> int:
    from mxgate.conformance import report as text
    from mxgate.conformance.case import asked
    from mxgate.conformance.cluster import ClusterError
    from mxgate.conformance.run import run
    from mxgate.conformance.runner import unloadable

    check_html(args.html)
    settings = _settings(args)
    # The production cases are hours of an emulator's time, so there it must be asked for.
    device = args.device or ("cpu" if args.tier == "production" and not args.build else None)
    builds = choose_builds(args.build, args.op, device)
    cases = choose_cases(args.case, builds, args.tier, args.seed, args.cases)
    if args.cases and not args.build:
        builds = [b for b in builds if any(c.op == b.op for c in cases)]
    if lost := [b.id for b in builds if not any(asked(c, b, args.tier) for c in cases)]:
        if args.build:
            raise UsageError(f"no chosen case is asked of {', '.join(lost)}")
        builds = [b for b in builds if b.id not in lost]
    # The nodes of a cluster see for themselves.
    if args.executor == "local" and (why := unloadable(builds, settings.limits)) is not None:
        raise UsageError(why)
    out = common.writable(args.out)
    with contextlib.suppress(OSError):  # only a convenience for `mxgate explain`
        common.STATE.mkdir(exist_ok=True)
        (common.STATE / "last-run").write_text(str(out.resolve()))
    with text.Watch("cases") as step:
        try:
            report = run(
                builds, cases, settings, out, lambda done, total, r: step(done, total, r.case), executor=args.executor
            )
        except ClusterError as error:
            raise UsageError(str(error)) from None
    return finish(report, out, args.json, args.device, args.html)
