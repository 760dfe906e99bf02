"""The failure that explain and minimize look at: of an earlier run, or of --build and --case."""

from __future__ import annotations

import argparse
import fnmatch
import sys
from pathlib import Path
from typing import Any

from mxgate.conformance.commands import common
from mxgate.conformance.commands.choose import DEVICES, case_named, choose_builds
from mxgate.conformance.commands.saved import last_run, read_plan
from mxgate.conformance.commands.usage import UsageError
from mxgate.kernels.build import OPS, Build


def options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "folder",
        nargs="?",
        type=common.path,
        metavar="DIR",
        help="where `mxgate run` left results (default: the last run)",
    )
    sub.add_argument(
        "--build", metavar="NAME", help="a failure of this build (with --case: whether or not a run has it)"
    )
    sub.add_argument("--op", choices=list(OPS), help="what a --build from a file computes")
    sub.add_argument("--device", choices=list(DEVICES), help="as in run: emu for a file of FlyDSL launches")
    sub.add_argument("--case", metavar="ID", help="a failure on this case, or on those of a pattern")
    common.recorded(sub, "where to look for a --case of that kind")


def plain_settings(tier: str, args: argparse.Namespace) -> Any:
    from mxgate.conformance.child import Limits
    from mxgate.conformance.settings import Settings

    return Settings(tier=tier, jobs=1, limits=Limits(args.time_limit or common.SECONDS[tier], args.memory_limit))


def failure(args: argparse.Namespace) -> tuple[Build, Any, str, int]:
    """(build, case, tier, further failures): what to explain. Sets args.given when it comes from --build and --case."""
    from mxgate.conformance.report import first_finding
    from mxgate.conformance.results import read_results
    from mxgate.conformance.verdict import Outcome

    args.given = args.build is not None and args.case is not None
    folder = args.folder or last_run()
    if args.given and (folder is None or not (folder / "run.json").exists()):
        return _named(args)
    if folder is None:
        raise UsageError("there is no earlier run here; give --build and --case, or the --out of a run")
    plan = read_plan(folder)
    builds = {b.id: b for b in plan["builds"]}
    results, strange = read_results(folder / "results.jsonl")
    prints = plan["fingerprints"]  # another build of the name may have left results here before
    failed = [
        result
        for (build, fingerprint, case, stamp), result in results.items()
        if stamp == plan["stamp"] and prints.get(build) == fingerprint
        if result.outcome is Outcome.REJECT and build in builds and case in plan["cases"]
        if args.build is None
        or args.build in (build, builds[build].name)
        or _target(args.build) == builds[build].target
        if args.case is None or fnmatch.fnmatchcase(case, args.case)
    ]
    if not failed and args.given:
        return _named(args)
    if not failed:
        chosen = " that --build and --case choose" if args.build or args.case else ""
        seen = "; ".join([f"nothing{chosen} was rejected in {folder}", *strange])
        raise UsageError(f"{seen}; give both --build and --case to look anyway")
    for line in strange:
        print(f"mxgate: note: {line}", file=sys.stderr)
    args.given = False
    # What the run's own first screen shows.
    failed.sort(key=lambda r: (list(builds).index(r.build), plan["cases"].index(r.case)))
    shown = first_finding(r for r in failed if r.build == failed[0].build)
    result = shown[0] if shown is not None else failed[0]
    return builds[result.build], case_named(result.case, plan["files"]), plan["tier"], len(failed) - 1


def _target(name: str) -> str:
    """The target of a build that is given as path/to/file.py:callable."""
    where, _, attribute = name.rpartition(":")
    return f"{Path(where).resolve()}:{attribute}" if where.endswith(".py") else name


def _named(args: argparse.Namespace) -> tuple[Build, Any, str, int]:
    case = case_named(args.case, args.cases)
    return choose_builds([args.build], args.op or case.op, args.device)[0], case, "smoke", 0
