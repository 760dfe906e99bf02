"""mxgate explain: a rejected build on its case again, and what probably went wrong."""

from __future__ import annotations

import argparse
import shlex

from mxgate.conformance.commands import common, failed
from mxgate.conformance.commands.usage import UsageError
from mxgate.kernels.build import called


def options(sub: argparse.ArgumentParser) -> None:
    failed.options(sub)
    common.limits(sub, None)


def command(args: argparse.Namespace) -> int:
    build, case, tier, others = failed.failure(args)
    from mxgate.conformance import report as text
    from mxgate.conformance.explain import explain
    from mxgate.conformance.runner import Runner
    from mxgate.conformance.verdict import Outcome

    to = text.console()
    with Runner(failed.plain_settings(tier, args)) as runner:
        result, evidence = runner.examine(build, case)
        if evidence is None:
            raise UsageError(f"{build.id} does not run on {case.id}: {result.skipped or result.findings[0].what}")
        findings = [f for f in result.findings if not f.inconclusive]
        if not findings:
            unsure = ", ".join(g for g, o in result.gates.items() if o is Outcome.INCONCLUSIVE)
            text.say(
                to, f"{build.id} on {case.id}: " + (f"{unsure} could not conclude" if unsure else "passes every gate")
            )
            if not args.given:
                text.say(to, "it failed before, so the failure comes and goes, or the source has changed since")
            return 3 if unsure else 0
        text.say(to, f"{build.id} on {case.id}")
        for finding in findings:
            text.say(to, f"{finding.gate}: {finding.what}", 2)
        text.say(to)
        for line in explain(evidence, findings[0]):
            text.say(to, line)
        if build.op != "quantize":
            text.say(to, f"next: mxgate minimize {called(build)} --case {shlex.quote(case.id)}", whole=True)
    if others:
        text.say(to)
        text.say(to, f"{others} more rejected results in this run; choose with --build and --case")
    return 1
