"""mxgate report: the results of several runs (shards) as one."""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import replace
from pathlib import Path

from mxgate.conformance.commands import common
from mxgate.conformance.commands.choose import case_named, recorded_cases
from mxgate.conformance.commands.saved import check_html, finish, read_plan
from mxgate.conformance.commands.usage import UsageError


def options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "folder", nargs="+", type=common.path, metavar="DIR", help="where `mxgate run` left results: its --out"
    )
    sub.add_argument(
        "--out",
        type=common.path,
        metavar="DIR",
        help="where junit.xml and certificates go (default: DIR; of several, .mxgate/report)",
    )
    common.as_html(sub)
    common.as_json(sub)


def command(args: argparse.Namespace) -> int:
    from mxgate.conformance.results import Journal, read_results
    from mxgate.conformance.run import summarise
    from mxgate.conformance.settings import Settings

    check_html(args.html)
    plans, known, warnings = [], {}, []
    for folder in args.folder:
        plans.append(read_plan(folder))
        results, strange = read_results(folder / "results.jsonl")
        known.update(results)
        warnings.extend(strange)
    if any(plan["stamp"] != plans[0]["stamp"] for plan in plans):
        raise UsageError("these runs are not parts of one: their tiers, limits, gates or mxgate versions differ")
    builds = {b.id: b for plan in plans for b in plan["builds"]}
    if other := next((b.id for plan in plans for b in plan["builds"] if b != builds[b.id]), None):
        raise UsageError(f"two different builds are called {other} in these runs: report them one by one")
    held = recorded_cases(Path(file) for plan in plans for file in plan["files"])
    cases = {name: held.get(name) or case_named(name) for plan in plans for name in plan["cases"]}
    stamp = plans[0]["stamp"]
    settings = Settings(tier=plans[0]["tier"], gates=tuple(plans[0]["gates"]), limits=plans[0]["limits"])
    if stamp != settings.stamp:
        raise UsageError(f"{args.folder[0]} was judged by another version of mxgate or of Python; run it again")
    prints = {name: build.fingerprint() for name, build in builds.items()}
    wanted = {
        (build, case): result
        for (build, fingerprint, case, under), result in known.items()
        if under == stamp and prints.get(build, fingerprint) == fingerprint
    }
    report = summarise(
        list(builds.values()),
        list(cases.values()),
        settings,
        wanted,
        ran=0,
        resumed=0,
        seconds=0.0,
        warnings=tuple(warnings),
    )
    report = replace(report, resumed=len(report.results))
    apart = common.STATE / "report" if len(args.folder) > 1 else args.folder[0]
    out = common.writable(args.out or apart)
    if out.resolve() not in {folder.resolve() for folder in args.folder}:
        # So that `mxgate explain` and `mxgate report` take that folder too; what it holds stays.
        with contextlib.closing(Journal(out)) as journal:
            new = (r for r in wanted.values() if journal.earlier.get((r.build, r.fingerprint, r.case, stamp)) != r)
            journal.append(stamp, *new)
    return finish(report, out, args.json, html=args.html)
