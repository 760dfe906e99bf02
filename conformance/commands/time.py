"""mxgate time: builds that hold a certificate, on the CPU or on a GPU."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mxgate.conformance.commands import common
from mxgate.conformance.commands.usage import UsageError
from mxgate.kernels.gpu import is_emulated, is_gpu


def options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "certificate",
        nargs="+",
        type=common.path,
        metavar="CERTIFICATE",
        help="what `mxgate run` wrote for an accepted build, such as .mxgate/certificates/wgrad-mine.wgrad.json",
    )
    sub.add_argument(
        "--case", metavar="ID", help="on a CPU: the case to time (default: the largest that all certificates cover)"
    )
    sub.add_argument("--rounds", type=common.COUNT, metavar="N", help="measured rounds (default 8; on a GPU 2)")
    sub.add_argument(
        "--seconds", type=common.NUMBER, metavar="S", help="how long a build runs in a round (default 0.3; on a GPU 3)"
    )
    sub.add_argument(
        "--shape",
        choices=("16b", "671b-up", "671b-down"),
        help="on a GPU: the layer's shape (default 16b)",
    )
    sub.add_argument(
        "--routing",
        choices=("uniform", "ramp", "shift32", "skew2"),
        help="on a GPU: how tokens are spread over experts (default ramp, to 1.5 times the mean)",
    )
    sub.add_argument("--quick", action="store_true", help="on a GPU: 0.3 s a build and round instead of 3 s")
    sub.add_argument("--flush", action="store_true", help="on a GPU: overwrite its caches before every call")
    sub.add_argument(
        "--ablate",
        action="store_true",
        help="on a GPU: also variants without matrix products or reads, for what those cost",
    )
    sub.add_argument(
        "--out", type=common.path, metavar="DIR", help="on a GPU: where timings.jsonl and plots go (default .mxgate)"
    )
    common.limits(sub)
    common.as_json(sub)


def command(args: argparse.Namespace) -> int:
    from mxgate.conformance import certificate, machine, timing
    from mxgate.conformance import report as text
    from mxgate.conformance.case import case_by_id
    from mxgate.conformance.child import Limits

    try:
        held = [(path, certificate.read(path)) for path in args.certificate]
        for path, one in held:
            certificate.check(path, one)
        if len(ops := {one.build.op for _, one in held}) > 1:
            raise UsageError(f"these builds compute different ops ({', '.join(sorted(ops))}); time one op at a time")
        certified = {path: [case_by_id(name) for name in one.cases] for path, one in held}
        on_gpu = {is_gpu(one.build.device) for _, one in held}
        if len(on_gpu) > 1:
            raise UsageError("some of these builds run on a GPU and some do not; time them in two runs")
        _elsewhere(args, on_gpu == {True})
        if on_gpu == {True}:
            return _time_on_gpu(args, held, certified)
        if args.case is not None:
            case = case_by_id(args.case)
        else:
            shared = set.intersection(*({c.id for c in cases} for cases in certified.values()))
            covered = [c for c in certified[held[0][0]] if c.id in shared]
            if not covered:
                raise UsageError("these certificates have no case in common; choose one with --case")
            case = max(covered, key=lambda c: (c.n * c.k * max(c.tokens, 1), c.family == "normal", c.id))
        for path, one in held:
            certificate.covers(path, one, case, certified[path])
    except certificate.CertificateError as error:
        raise UsageError(str(error)) from None
    except ValueError as error:
        raise UsageError(str(error)) from None
    builds = list({one.build.id: one.build for _, one in held}.values())
    if emulated := [b.id for b in builds if is_emulated(b.device) or b.device == "interpreter"]:
        names = ", ".join(emulated)
        raise UsageError(f"{names} would be emulated or interpreted, which says nothing about its time on a GPU")
    with text.Watch("timing") as step:
        timings = timing.time_builds(
            builds,
            case,
            rounds=args.rounds or 8,
            seconds=args.seconds or 0.3,
            limits=Limits(args.time_limit, args.memory_limit),
            watch=step,
        )
    refused = [t for t in timings if t.refused is not None]
    if args.json:
        numbers = [
            {k: v for k, v in asdict(t).items() if t.refused is None or k in ("build", "refused")} for t in timings
        ]
        common.print_json({"command": "time", "case": case.id, "device": machine.device(), "timings": numbers})
    else:
        text.print_timings(timings, case, machine.device(), text.console())
    return 1 if refused else 0


def _elsewhere(args: argparse.Namespace, on_gpu: bool) -> None:
    """UsageError for an option of `time` that means something on the other kind of device alone."""
    of_gpu = ("shape", "routing", "quick", "flush", "ablate", "out")
    given = [name for name in (("case",) if on_gpu else of_gpu) if getattr(args, name) not in (None, False)]
    if given and on_gpu:
        raise UsageError("--case chooses among a CPU's cases; on a GPU give --shape and --routing")
    if given:
        raise UsageError(f"--{given[0]} is for builds on a GPU; these run on the CPU")


def _time_on_gpu(args: argparse.Namespace, held: Any, certified: Any) -> int:
    """The part of `time` for builds on a GPU. Raises CertificateError, which `command` reports."""
    from mxgate.conformance import certificate
    from mxgate.conformance import report as text
    from mxgate.conformance.timing_gpu import case_of, time_on_gpu

    op = held[0][1].build.op
    if op == "quantize":
        raise UsageError("quantizers are not timed on a GPU; expected certificates of forward, dgrad or wgrad")
    case = case_of(op, args.shape or "16b", args.routing or "ramp")
    for path, one in held:
        certificate.covers(path, one, case, certified[path])
    builds = list({one.build.id: one.build for _, one in held}.values())
    out = common.writable(args.out or common.STATE)
    seconds, passes = args.seconds or (0.3 if args.quick else 3.0), args.rounds or 2
    # What is measured, compiling and judging before it, and room for a slow launch.
    limit = args.time_limit * (2 + len(builds)) + 5 * seconds * passes * (1 + len(builds))
    try:
        found = time_on_gpu(
            builds, case, seconds=seconds, passes=passes, flush=args.flush, ablate=args.ablate, limit=limit
        )
    except RuntimeError as error:
        print(f"mxgate: {error}", file=sys.stderr)
        return 1
    lines = out / "timings.jsonl"
    with lines.open("a") as file:
        for timing in found["timings"]:
            file.write(json.dumps({**{k: v for k, v in found.items() if k != "timings"}, **timing}) + "\n")
    wrote = f"{lines}{_plot_times(lines)}"
    if args.json:
        common.print_json({"command": "time", **found})
    else:
        to = text.console()
        text.print_gpu_timings(found, to)
        text.say(to, f"wrote {wrote}")
    return int(any(timing["refused"] for timing in found["timings"]))


def _plot_times(lines: Path) -> str:
    """Draw what timings.jsonl has of the device; what was written, in words."""
    if importlib.util.find_spec("matplotlib") is None:
        return "; for plots: pip install 'mxgate[report]'"
    from mxgate.conformance import timing_plot

    if not (known := timing_plot.latest(lines)):
        return ""
    timing_plot.roofline(known, lines.with_name("roofline.svg"))
    timing_plot.bars(known, lines.with_name("times.svg"))
    return ", roofline.svg, times.svg"
