"""What people read (tables and first screens on a terminal) and what machines read (JSON, JUnit XML).

Tables fit in 100 columns. Piped output is plain text: no colour, no box drawing, no control characters.
"""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, TextIO
from xml.etree import ElementTree

from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from mxgate.conformance.case import Case
from mxgate.conformance.explain import guess
from mxgate.conformance.matrix import Matrix, Row
from mxgate.conformance.run import RunReport
from mxgate.conformance.runner import given_up
from mxgate.conformance.timing import Timing
from mxgate.conformance.verdict import GATES, MANDATORY, CaseResult, Finding, Outcome, Verdict
from mxgate.kernels.build import called

WIDTH = 100
WHERE = 5  # coordinate lines of a first screen; all of them are in the JSONL
_STYLES = {"pass": "green", "accept": "bold green", "reject": "bold red", "inconclusive": "yellow", "skip": "dim"}
_CELLS = {"silent": "-", "reject": "REJECT", "inconclusive": "unsure", "skip": "skip"}
_NARROW = {"silent": "-", "pass": "ok", "reject": "NO", "inconclusive": "?", "skip": "skip"}
_HEADS = {"reproducible": "reprod."}
# Characters that XML 1.0 cannot hold, whatever a build put into its error message.
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def console(stream: TextIO | None = None) -> Console:
    """A console of at most 100 columns; plain when the stream is no terminal."""
    stream = stream or sys.stdout
    plain = Console(file=stream, highlight=False, markup=False, emoji=False)
    width = min(WIDTH, plain.width) if plain.is_terminal else WIDTH
    return Console(file=stream, highlight=False, markup=False, emoji=False, width=width, soft_wrap=False)


def table(to: Console, columns: Sequence[str], rows: Iterable[Sequence[str | Text]], right: Iterable[str] = ()) -> None:
    """Print a table; columns named in `right` are numbers. What does not fit is wrapped in the last column and
    in a first one of more than half the width; where even that is too wide, the columns between are cut, the widest
    first."""
    grid = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    cells = [list(row) for row in rows]
    widths = [max([len(name), *(len(row[i]) for row in cells)]) for i, name in enumerate(columns)]

    def over() -> int:
        return sum(widths) + len(widths) - 1 - to.width

    widths[-1] = max(min(widths[-1], 12), widths[-1] - max(over(), 0))
    widths[0] = max(min(widths[0], to.width // 2), widths[0] - max(over(), 0))
    between = range(1, len(columns) - 1)
    while over() > 0 and any(widths[i] > 1 for i in between):
        widths[max(between, key=widths.__getitem__)] -= 1
    for i, name in enumerate(columns):
        last = i == len(columns) - 1
        grid.add_column(
            Text(name, style="bold"),
            justify="right" if name in right else "left",
            no_wrap=not last and i > 0,
            width=widths[i],
            overflow="fold" if last or i == 0 else "ellipsis",
        )
    for row in cells:
        grid.add_row(*row)
    to.print(grid)


def say(to: Console, line: str | Text = "", indent: int = 0, *, whole: bool = False) -> None:
    """Print a line; a terminal wraps it with a hanging indent unless it is to be copied `whole`, a file never does."""
    text = line if isinstance(line, Text) else Text(line)
    if to.is_terminal and not whole:
        to.print(Padding(text, (0, 0, 0, indent)) if indent else text)
    else:
        to.print(Text(" " * indent) + text, soft_wrap=True)


def cell(word: str, narrow: bool = False) -> Text:
    """An outcome as a coloured word."""
    return Text((_NARROW if narrow else _CELLS).get(word, word), style=_STYLES.get(word, ""))


def print_run(report: RunReport, to: Console, *, assumptions: bool = False) -> None:
    """The table (build x gate) and, for everything that was not accepted, a first screen.

    assumptions: print what emulated builds take for granted about their GPU, not only how much of it there is."""
    gates = shown_gates(report.verdicts)
    # Where words of full length do not fit beside the longest name, all get short ones.
    longest = max((len(f"{verdict.build} {verdict.word}") for verdict in report.verdicts), default=0)
    narrow = to.width < longest + sum(max(len(_HEADS.get(gate, gate)), len("REJECT")) + 1 for gate in gates)
    rows = [
        [
            Text(verdict.build),
            *(cell(verdict.gates.get(gate, Outcome.SILENT).value, narrow) for gate in gates),
            Text(verdict.word.upper() if verdict.word == "reject" else verdict.word, style=_STYLES[verdict.word]),
        ]
        for verdict in report.verdicts
    ]
    heads = [gate[:4] if narrow else _HEADS.get(gate, gate) for gate in gates]
    table(to, ["build", *heads, "verdict"], rows)
    to.print()
    failed = [verdict for verdict in report.verdicts if verdict.word in ("reject", "inconclusive")]
    alike: dict[tuple[str, ...], list[Verdict]] = {}
    for verdict in failed:
        told = first_finding(_of(verdict, report)) is not None
        alike.setdefault((verdict.reason, verdict.build if told else ""), []).append(verdict)
    for verdicts in alike.values():
        _first_screen(verdicts, report, to)
    for verdict in report.verdicts:
        if verdict.word == "accept" and verdict.terms:
            say(to, f"terms {verdict.build}: {'; '.join(verdict.terms)}")
    _print_assumptions(report, to, assumptions)
    for reason, names in skipped(report).items():
        say(to, f"skip {', '.join(names)}: {reason}")
    say(to, summary(report))
    for line in places(report):
        say(to, line)
    for warning in report.warnings:
        say(to, f"note: {warning}")


def shown_gates(verdicts: Iterable[Verdict]) -> tuple[str, ...]:
    """The gates of a table: those that are always mandatory, and what else had anything to say."""
    spoke = {gate for v in verdicts for gate, outcome in v.gates.items() if outcome is not Outcome.SILENT}
    return tuple(gate for gate in GATES if gate in spoke or any(gate in needed for needed in MANDATORY.values()))


def skipped(report: RunReport) -> dict[str, list[str]]:
    """The builds that were not run, by the reason why."""
    names: dict[str, list[str]] = {}
    for verdict in report.verdicts:
        if verdict.word == "skip":
            names.setdefault(verdict.reason, []).append(verdict.build)
    return names


def places(report: RunReport) -> list[str]:
    """A line for each device that something ran on: "on NVIDIA H200 (sm90): node-7 GPU 0, node-7 GPU 1"."""
    machines = {device: set[str]() for verdict in report.verdicts for device in verdict.devices}
    for result in report.results:
        if result.device in machines and result.skipped is None and not given_up(result):
            machines[result.device].add(result.machine)
    lines = []
    for device, names in sorted(machines.items()):
        more = [f"{len(names) - WHERE} more"] if len(names) > WHERE else []
        lines.append(f"on {device}: {', '.join([*sorted(names)[:WHERE], *more])}")
    return lines


def _print_assumptions(report: RunReport, to: Console, whole: bool) -> None:
    """For accepted builds of a GPU that nobody had: on what the accept rests."""
    for assumed in dict.fromkeys(build.assumes for build in report.builds if build.assumes):
        of = [build for build in report.builds if build.assumes == assumed]
        accepted = {verdict.build for verdict in report.verdicts if verdict.word == "accept"}
        names = [build.id for build in of if build.id in accepted]
        if not names:
            continue
        rest = ":" if whole else "; they are in the certificates and under `mxgate run --device emu`"
        say(to, f"emulated {of[0].device} {', '.join(names)}: {len(assumed)} assumptions about silicon{rest}")
        for sentence in assumed if whole else ():
            say(to, f"- {sentence}", 2)


def summary(report: RunReport) -> str:
    """One line: how many of each verdict, and where the results came from."""
    words = [verdict.word for verdict in report.verdicts]
    names = {"accept": "accepted", "reject": "rejected", "inconclusive": "inconclusive", "skip": "skipped"}
    counts = ", ".join(f"{words.count(word)} {name}" for word, name in names.items() if words.count(word))
    tier = report.settings.tier
    line = f"{counts or 'no builds'} ({tier} tier): {report.ran} results in {report.seconds:.1f} s"
    if report.resumed:
        line += f", {report.resumed} kept from before"
    if report.settings.shard != (1, 1):
        line += f"; shard {report.settings.shard[0]}/{report.settings.shard[1]}, {report.missing} results still missing"
    return line


def first_finding(results: Iterable[CaseResult]) -> tuple[CaseResult, Finding] | None:
    """The finding of one build to show first: what decided the verdict, by gate, signature cases (they tell most)
    before others."""
    found = [
        (f.inconclusive, _rank(f), "/signature" not in result.case, i, result, f)
        for i, result in enumerate(results)
        for f in result.findings
    ]
    if not found:
        return None
    return min(found, key=lambda item: item[:4])[4:]


def _rank(finding: Finding) -> int:
    """The gates' order, except that results which differ from run to run come before all that differs because of it."""
    crash = finding.gate == "contract" and not finding.count
    return ("crash", "reproducible", *GATES).index("crash" if crash else finding.gate)


def _of(verdict: Verdict, report: RunReport) -> list[CaseResult]:
    return [result for result in report.results if result.build == verdict.build]


def _first_screen(alike: Sequence[Verdict], report: RunReport, to: Console) -> None:
    """What one build, or several for the same reason and without a finding, were not accepted for."""
    verdict = alike[0]
    names = ", ".join(v.build for v in alike)
    say(to, Text(f"{verdict.word.upper()} {names}: {verdict.reason}", style=_STYLES[verdict.word]))
    results = _of(verdict, report)
    first = first_finding(results)
    if first is None:
        say(to, advice(verdict, report), 2)
        to.print()
        return
    result, finding = first
    say(to, f"{finding.gate} on {result.case}: {finding.what}", 2)
    for line in (*finding.detail.get("extent", ()), *finding.where[:WHERE]):
        say(to, line, 4)
    if len(finding.where) > WHERE:
        say(to, f"... {len(finding.where) - WHERE} more lines in results.jsonl", 4)
    if not finding.count and (cause := guess(finding)) is not None:
        say(to, f"{cause.confidence} cause: {cause.sentence}", 4)
    for gate in GATES:
        others = [r for r in results if r.gates.get(gate) is Outcome.REJECT]
        if gate != finding.gate and others:
            say(to, f"also {gate} on {_cases(others)}", 2)
    if not finding.inconclusive:
        build = next(b for b in report.builds if b.id == verdict.build)
        say(to, f"next: mxgate explain {called(build)} --case {shlex.quote(result.case)}", 2, whole=True)
    to.print()


def advice(verdict: Verdict, report: RunReport) -> str:
    """What to do about a build that is inconclusive without a finding."""
    needed = MANDATORY[verdict.build.partition("/")[0]]
    missing = [gate for gate in needed if verdict.gates.get(gate) is Outcome.SILENT]
    if verdict.reason.endswith(("were not asked for", "needs every gate")):
        return "next: for a verdict, run again without --case and --gate"
    if verdict.reason.endswith("takes a whole tier"):
        return "next: for a verdict, run again without --cases"
    if len(verdict.devices) > 1:
        return "next: run it all on one machine, or on machines of one kind"
    if verdict.reason.endswith("have no result yet"):
        return (
            "next: the same command goes on from here; of shards run the others into the same --out, then mxgate report"
        )
    return f"nothing on these cases speaks to {', '.join(missing)}; run more cases" if missing else "run more cases"


def _cases(results: Sequence[CaseResult]) -> str:
    return results[0].case if len(results) == 1 else f"{len(results)} cases, {results[0].case} first"


_SHORT = {gate: gate[:3] for gate in GATES}
_RULES = {
    "SQNR >= 27 dB": "SQNR",
    "calc_diff < 1e-3": "diff",
    "allclose 1e-2, 5 %": "allclose",
    "cosine > 0.99": "cosine",
}
_CAUGHT = {True: "caught", False: "missed", None: "-"}


def print_matrix(matrix: Matrix, to: Console) -> None:
    """Faults x gates and rules, then what survived, what was wrongly rejected, and the counts."""
    rows = []
    for row in matrix.rows:
        marks: list[str | Text] = [
            "-" if not row.gates[gate] else "#" if gate == row.fault.gate else "x" for gate in GATES
        ]
        if not row.killed and row.skipped is None:
            marks[GATES.index(row.fault.gate)] = Text("!", style="bold red")
        caught = [Text(_CAUGHT[row.caught[rule]], style="red" if row.caught[rule] is False else "") for rule in _RULES]
        rows.append([_fault_name(row), *marks, *caught])
    table(to, ["fault", *_SHORT.values(), *_RULES.values()], rows)
    say(to, "# the gate it names rejects it, x another gate does as well, ! the named gate does not")
    say(to)
    for row in matrix.survivors:
        others = ", ".join(gate for gate in GATES if row.gates[gate]) or "no gate at all"
        say(
            to,
            Text(f"SURVIVED {row.fault.gate}: {row.fault.build.id} ({row.fault.what}) is rejected by {others}", "red"),
        )
    for build, case, gate, what in matrix.alarms[:20]:
        say(to, Text(f"FALSE ALARM {build} on {case}: {gate}: {what}", style=_STYLES["reject"]))
    skipped = [row for row in matrix.rows if row.skipped is not None]
    ran = len(matrix.rows) - len(skipped)
    say(to, f"{sum(row.killed for row in matrix.rows)} of {ran} faults rejected by the gate they name")
    for row in skipped:
        say(to, f"skip {row.fault.build.id}: {row.skipped}")
    say(to)
    counts = [
        [rule, *(f"{matrix.missed(rule, random=r)} of {matrix.seen(rule, random=r)}" for r in (False, True))]
        for rule in _RULES
    ]
    table(to, ["rule in common use", "faults let through: same cases", "random data alone"], counts)
    say(to)
    if matrix.correct:
        wrong = len({(build, case) for build, case, _, _ in matrix.alarms})
        say(
            to,
            f"{len(matrix.correct)} correct builds over {matrix.seeds} seeds: "
            f"{wrong or 'none'} of {matrix.checked} results rejected or inconclusive",
        )


def matrix_document(matrix: Matrix) -> dict[str, Any]:
    """The kill matrix as one JSON document."""
    return {
        "command": "faults",
        "faults": [
            {
                "fault": row.fault.build.id,
                "kind": row.fault.kind,
                "what": row.fault.what,
                "gate": row.fault.gate,
                "killed": row.killed,
                "skipped": row.skipped,
                "cases": row.cases,
                "first": row.first,
                "gates": dict(row.gates),
                "rules": {"all cases": dict(row.caught), "random data": dict(row.random)},
            }
            for row in matrix.rows
        ],
        "let_through": {
            rule: {
                "all cases": [matrix.missed(rule), matrix.seen(rule)],
                "random data": [matrix.missed(rule, random=True), matrix.seen(rule, random=True)],
            }
            for rule in _RULES
        },
        "survivors": [row.fault.build.id for row in matrix.survivors],
        "correct_builds": [build.id for build in matrix.correct],
        "seeds": matrix.seeds,
        "checked": matrix.checked,
        "false_alarms": [dict(zip(("build", "case", "gate", "what"), alarm, strict=True)) for alarm in matrix.alarms],
        "exit": 1 if matrix.survivors or matrix.alarms else 0,
    }


def _fault_name(row: Row) -> str:
    return row.fault.build.id.replace("/fault_", "/")


def print_bench(rows: Sequence[Mapping[str, Any]], quick: bool, to: Console) -> None:
    """The ratio table of bench-oracle. A ratio says how many times as fast (quantize) or as costly (wgrad)."""
    cells = []
    for row in rows:
        target = f">= {row['least']:g}" if row.get("least") else f"<= {row['most']:g}" if row.get("most") else ""
        met = {True: Text("met", style="green"), False: Text("MISSED", style="bold red"), None: Text("-")}[row["met"]]
        seconds = "-" if row["seconds"] is None else f"{row['seconds'] * 1e3:.1f}"
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
        cells.append([row["what"], seconds, ratio, target, met, row["beside"]])
    columns = ["what", "ms", "ratio", "target", "", "beside"]
    table(to, columns, cells, columns[1:3])
    if quick:
        say(to, "small sizes: no target is judged")


def print_emulator(rows: Sequence[Mapping[str, Any]], quick: bool, to: Console) -> None:
    """The table of bench-emulator: CPU seconds, millions of wave-instructions and billions of operations a second."""
    cells = [
        [
            row["what"],
            f"{row['seconds']:.3f}",
            f"{row['instructions'] / row['seconds'] / 1e6:.2f}",
            f"{row['flops'] / row['seconds'] / 1e9:.1f}",
            "" if row["most"] is None else f"<= {row['most']:g}",
            {True: Text("met", style="green"), False: Text("MISSED", style="bold red"), None: Text("-")}[row["met"]],
        ]
        for row in rows
    ]
    columns = ["what", "s", "M instr./s", "GFLOP/s", "target s", ""]
    table(to, columns, cells, columns[1:5])
    if quick:
        say(to, "a small size: no target is judged")


def print_gpu_timings(found: Mapping[str, Any], to: Console) -> None:
    """The document of timing_gpu.time_on_gpu as a table, BF16 first."""

    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    rows = [
        [
            t["build"] if t["ablation"] is None else f"  ablated: {t['ablation']}",
            f"{t['median'] * 1e3:.3f}",
            f"{t['low'] * 1e3:.3f} .. {t['high'] * 1e3:.3f}",
            f"{t['tflops']:.0f}" if t["ablation"] is None else "-",
            "-" if t["ratio"] is None else f"{t['ratio']:.3f}x",
            number(t["joules"], ".3f"),
            number(t["clock"], ".0f"),
            number(t["watts"], ".0f"),
        ]
        for t in found["timings"]
        if t["refused"] is None
    ]
    columns = ["build", "median ms", "10 % .. 90 %", "TFLOP/s", "of BF16", "J/call", "MHz", "W"]
    table(to, columns, rows, columns[1:])
    for t in found["timings"]:
        if t["refused"] is not None:
            part = "" if t["ablation"] is None else f", {t['ablation']}"
            say(to, Text(f"NO TIME {t['build']}{part}: {t['refused']}", style=_STYLES["reject"]))
    if any(t["ablation"] for t in found["timings"]):
        say(to, "ablated: without a part, for what that costs; such a result is wrong, and nobody judged it")
    of = f"{found['case']}, N={found['n']} K={found['k']}, {sum(found['sizes'])} tokens, skew {found['skew']:.2f}"
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    how = f"{found['passes']} passes of {found['seconds']:g} s" + (", caches flushed" if found["flush"] else "")
    say(to, f"{of}; {found['device']}; {versions}; {how}")
    say(to, f"copy {found['copy'] / 1e12:.2f} TB/s, dense bf16 {found['dense'] / 1e12:.0f} TFLOP/s; dequantizing first")
    say(to, f"cannot be faster than {found['two_pass_limit']:.3f}x (3 bytes an element, then BF16)")


def print_timings(timings: Sequence[Timing], case: Case, device: str, to: Console) -> None:
    """Median and spread of each build, beside the first one; a line for each that has no time."""
    timed = [t for t in timings if t.refused is None]
    rows = [
        [
            t.build,
            f"{t.median * 1e3:.3f}",
            f"{t.low * 1e3:.3f} .. {t.high * 1e3:.3f}",
            f"{t.best * 1e3:.3f}",
            str(t.calls),
            f"{2e-9 * case.n * case.k * case.tokens / t.median:.2f}" if case.tokens else "-",
            f"{timed[0].median / t.median:.2f}x",
        ]
        for t in timed
    ]
    if rows:
        say(to, f"{case.id} on {device}, one thread")
        columns = ["build", "median ms", "10 % .. 90 %", "best ms", "calls", "GFLOP/s", "speed"]
        table(to, columns, rows, columns[1:])
    for t in timings:
        if t.refused is not None:
            say(to, Text(f"no time for {t.build}: {t.refused}", style=_STYLES["reject"]))


def document(report: RunReport, extra: dict[str, Any]) -> dict[str, Any]:
    """The run as one JSON document: verdicts with their gates, the first finding of each, and the counts."""
    verdicts = []
    for build, verdict in zip(report.builds, report.verdicts, strict=True):
        first = first_finding(_of(verdict, report))
        verdicts.append(
            {
                "build": verdict.build,
                "op": build.op,
                "verdict": verdict.word,
                "reason": verdict.reason,
                "terms": list(verdict.terms),
                "device": build.device,
                "devices": list(verdict.devices),
                "machines": list(verdict.machines),
                "assumes": list(build.assumes),
                "gates": {gate: outcome.value for gate, outcome in verdict.gates.items()},
                "first_finding": None
                if first is None
                else {
                    "case": first[0].case,
                    "gate": first[1].gate,
                    "what": first[1].what,
                    "where": list(first[1].where),
                    "count": first[1].count,
                },
            }
        )
    return {
        "command": "run",
        "tier": report.settings.tier,
        "verdicts": verdicts,
        "cases": [case.id for case in report.cases],
        "ran": report.ran,
        "resumed": report.resumed,
        "missing": report.missing,
        "seconds": round(report.seconds, 3),
        "warnings": list(report.warnings),
        "exit": report.exit_code,
        **extra,
    }


def junit(report: RunReport) -> bytes:
    """JUnit XML: a suite a build, a testcase a case and gate; what did not conclude is an error, silence is skipped."""
    root = ElementTree.Element("testsuites", name="mxgate")
    totals = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for build in report.builds:
        suite = ElementTree.SubElement(root, "testsuite", name=build.id)
        counts = dict.fromkeys(totals, 0)
        seconds = 0.0
        for result in (r for r in report.results if r.build == build.id):
            seconds += result.seconds
            gates = GATES if result.skipped is not None else tuple(result.gates)
            for gate in gates:
                case = ElementTree.SubElement(
                    suite,
                    "testcase",
                    classname=build.id.replace("/", "."),
                    name=f"{result.case} {gate}",
                    time=f"{result.seconds / len(gates):.4f}",
                )
                counts["tests"] += 1
                _outcome(case, result, gate, counts)
        for name, value in counts.items():
            suite.set(name, str(value))
            totals[name] += value
        suite.set("time", f"{seconds:.3f}")
    for name, value in totals.items():
        root.set(name, str(value))
    ElementTree.indent(root)
    return bytes(ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)) + b"\n"


def _outcome(case: ElementTree.Element, result: CaseResult, gate: str, counts: dict[str, int]) -> None:
    outcome = result.gates.get(gate)
    if result.skipped is not None or outcome is Outcome.SILENT:
        counts["skipped"] += 1
        reason = result.skipped or "this gate has nothing to say about this case"
        ElementTree.SubElement(case, "skipped", message=_xml(reason))
    elif outcome is not Outcome.PASS:
        rejected = outcome is Outcome.REJECT
        counts["failures" if rejected else "errors"] += 1
        findings = [f for f in result.findings if f.gate == gate]
        message = "; ".join(f.what for f in findings) or "no finding"
        element = ElementTree.SubElement(case, "failure" if rejected else "error", message=_xml(message), type=gate)
        element.text = _xml("\n".join(line for f in findings for line in f.where))


def _xml(text: str) -> str:
    return _NOT_XML.sub("?", text)


class Watch:
    """Progress on standard error, if it is a terminal and the work takes more than two seconds. A context manager."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._began = time.monotonic()
        self._progress: Progress | None = None
        self._task: Any = None

    def __enter__(self) -> Callable[[int, int, str], None]:
        return self._step

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def _step(self, done: int, total: int, at: str) -> None:
        if self._progress is None:
            if not sys.stderr.isatty() or time.monotonic() - self._began < 2.0:
                return
            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[at]}"),
            )
            self._progress = Progress(*columns, console=console(sys.stderr), transient=True)
            self._task = self._progress.add_task(self._what, total=total, at="")
            self._progress.start()
        self._progress.update(self._task, completed=done, total=total or None, at=at[:40])
