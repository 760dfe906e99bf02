"""mxgate faults: every wrong build against the gate that must reject it, and mutants of machine code."""

from __future__ import annotations

import argparse
import fnmatch
import sys
from collections.abc import Sequence

from mxgate.conformance.commands import common
from mxgate.conformance.commands.usage import UsageError, unknown
from mxgate.kernels.build import Build, Unavailable, registry


def options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="NAME",
        help="only this fault of `mxgate list faults`, or a pattern; may be repeated (then no correct build is run)",
    )
    sub.add_argument(
        "--isa",
        type=common.COUNT,
        nargs="?",
        const=300,
        metavar="N",
        help="instead: N mutants (default 300) of the weight gradient's machine code; exit 1 if one lives on",
    )
    sub.add_argument(
        "--seeds",
        type=common.COUNT,
        default=3,
        metavar="N",
        help="different seeds for the correct builds, none of which may be rejected (default 3)",
    )
    common.jobs(sub)
    common.limits(sub)
    common.as_json(sub)


def command(args: argparse.Namespace) -> int:
    if args.isa is not None:
        return _machine_code_faults(args)
    from mxgate.conformance import report as text
    from mxgate.conformance.child import Limits
    from mxgate.conformance.matrix import kill_matrix
    from mxgate.conformance.settings import Settings
    from mxgate.kernels.faults import FAULTS
    from mxgate.kernels.variants import CORRECT

    settings = Settings(jobs=args.jobs, limits=Limits(args.time_limit, args.memory_limit))
    chosen = [f for f in FAULTS if _fault_matches(f.build, args.fault)]
    if not chosen:
        raise UsageError(unknown("fault", args.fault[0], [f.build.id for f in FAULTS], " (see `mxgate list faults`)"))
    # Emulated builds are slow, and their faults are mutations of machine code.
    correct = [] if args.fault else [*(b for b in registry().values() if b.device == "cpu"), *CORRECT]
    with text.Watch("faults") as step:
        matrix = kill_matrix(chosen, correct, args.seeds, settings, step)
    if args.json:
        common.print_json(text.matrix_document(matrix))
    else:
        text.print_matrix(matrix, text.console())
    if matrix.survivors or matrix.alarms:
        return 1
    return 3 if all(row.skipped is not None for row in matrix.rows) else 0


def _machine_code_faults(args: argparse.Namespace) -> int:
    """args.isa mutants of the weight gradient's machine code: how many of each kind are noticed, and who is not."""
    from mxgate.conformance import report as text
    from mxgate.kernels.flydsl import mutants

    if args.fault:
        raise UsageError("--fault chooses wrong builds and --isa makes wrong machine code; give one of them")
    try:
        with text.Watch("mutants") as step:
            done = 0

            def count(outcome: mutants.Outcome) -> None:
                nonlocal done
                done += not outcome.equivalent
                step(done, args.isa, outcome.mutant.kind)

            judged = mutants.run(args.isa, progress=count)
    except Unavailable as error:
        print(f"mxgate: {error}", file=sys.stderr)
        return 3
    if args.json:
        counts = {"made": judged.made, "killed": judged.killed, "equivalent": judged.equivalent}
        kinds = {kind: {what: of[kind] for what, of in counts.items()} for kind in judged.made}
        survivors = [{"mutant": str(o.mutant), "reason": o.reason} for o in judged.survivors]
        common.print_json({"command": "faults --isa", "kinds": kinds, "survivors": survivors})
    else:
        for line in str(judged).splitlines():
            text.say(text.console(), line)
    return int(bool(judged.unexplained))


def _fault_matches(build: Build, patterns: Sequence[str]) -> bool:
    names = (build.id, build.name, build.name.removeprefix("fault_"), build.id.replace("/fault_", "/"))
    return not patterns or any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in patterns)
