"""mxgate time: builds that hold a certificate, on the CPU or on a GPU."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mxgate.conformance.commands import common
from mxgate.conformance.commands.usage import UsageError
from mxgate.kernels.gpu import is_emulated, is_gpu


def options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("certificate", nargs="+", type=Path, metavar="CERTIFICATE", help="a file of .mxgate/certificates")
    sub.add_argument("--case", metavar="ID", help="the case to time (default: the largest that all certificates cover)")
    sub.add_argument("--rounds", type=common.COUNT, default=8, metavar="N", help="rounds that count (default 8)")
    sub.add_argument(
        "--shape",
        choices=("16b", "671b-up", "671b-down"),
        default="16b",
        help="on a GPU: the layer's shape (default 16b)",
    )
    sub.add_argument(
        "--routing",
        choices=("uniform", "ramp", "shift32", "skew2"),
        default="ramp",
        help="on a GPU: how tokens are spread over experts (default ramp, to 1.5 times the mean)",
    )
    sub.add_argument("--quick", action="store_true", help="on a GPU: 0.3 s a variant and pass instead of 3 s")
    sub.add_argument("--flush", action="store_true", help="on a GPU: overwrite its caches before every call")
    sub.add_argument("--out", type=Path, default=common.STATE, metavar="DIR", help="on a GPU: where timings.jsonl goes")
    sub.add_argument(
        "--seconds", type=common.NUMBER, default=0.3, metavar="S", help="how long a build runs in a round (default 0.3)"
    )
    common.limits(sub)
    common.as_json(sub)


def command(args: argparse.Namespace) -> int:
    from mxgate.conformance import certificate, timing
    from mxgate.conformance import report as text
    from mxgate.conformance.case import case_by_id
    from mxgate.conformance.worker import Limits

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
            rounds=args.rounds,
            seconds=args.seconds,
            limits=Limits(args.time_limit, args.memory_limit),
            watch=step,
        )
    refused = [t for t in timings if t.refused is not None]
    if args.json:
        numbers = [
            {k: v for k, v in asdict(t).items() if t.refused is None or k in ("build", "refused")} for t in timings
        ]
        common.print_json({"command": "time", "case": case.id, "device": certificate.device(), "timings": numbers})
    else:
        text.print_timings(timings, case, certificate.device(), text.console())
    return 1 if refused else 0


def _time_on_gpu(args: argparse.Namespace, held: Any, certified: Any) -> int:
    """The part of `time` for builds on a GPU. Raises CertificateError as command does."""
    from mxgate.conformance import certificate
    from mxgate.conformance import report as text
    from mxgate.conformance.timing_gpu import case_of, time_on_gpu

    case = case_of(held[0][1].build.op, args.shape, args.routing)
    for path, one in held:
        certificate.covers(path, one, case, certified[path])
    builds = list({one.build.id: one.build for _, one in held}.values())
    seconds, passes = (0.3, 2) if args.quick else (3.0, 2)
    try:
        found = time_on_gpu(
            builds, case, seconds=seconds, passes=passes, flush=args.flush, limit=args.time_limit * (2 + len(builds))
        )
    except RuntimeError as error:
        print(f"mxgate: {error}", file=sys.stderr)
        return 1
    out = common.writable(args.out)
    with (out / "timings.jsonl").open("a") as lines:
        for timing in found["timings"]:
            lines.write(json.dumps({**{k: v for k, v in found.items() if k != "timings"}, **timing}) + "\n")
    if args.json:
        common.print_json({"command": "time", **found})
    else:
        to = text.console()
        text.print_gpu_timings(found, to)
        text.say(to, f"wrote {out}/timings.jsonl")
    return int(any(timing["refused"] for timing in found["timings"]))
