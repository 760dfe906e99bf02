"""The command line: mxgate run, report, list, faults, explain, minimize, time, inspect, bench-*, fixtures.

Exit codes, everywhere: 0 all accepted, 1 something rejected, 2 bad usage or input, 3 inconclusive. Bad input is one
line on standard error: what is wrong and what was expected. With --json standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import difflib
import fnmatch
import importlib.util
import json
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from mxgate.kernels.build import EMULATE, OPS, Build, BuildError, Unavailable, apart, called, outside, registry
from mxgate.kernels.gpu import is_emulated, is_gpu
from mxgate.kernels.installed import installed
from mxgate.kernels.triton.builds import INTERPRETED

# The runner's threads keep the cores busy; a BLAS that starts threads of its own only gets in their way.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

STATE = Path(".mxgate")
TIERS = ("smoke", "full", "production")
SECONDS: Mapping[str, float] = {"smoke": 60.0, "full": 300.0, "production": 600.0}  # the longest launch of a tier
_EXIT = "exit codes: 0 all accepted, 1 something rejected, 2 bad usage or input, 3 inconclusive"


class UsageError(Exception):
    """One line for standard error; exit 2."""


class _Parser(argparse.ArgumentParser):
    """argparse with one-line errors, and the nearest name for a mistyped choice."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see `{self.prog} --help`)")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            what = "command" if isinstance(action, argparse._SubParsersAction) else action.dest
            raise UsageError(unknown(what, str(value), list(action.choices)))


def unknown(what: str, name: str, known: Sequence[str], where: str = "") -> str:
    """One line: what is not known, and the nearest names, or all of them where they are few."""
    if near := difflib.get_close_matches(name, known, 3, 0.6):
        return f"no {what} named {name!r}; did you mean {' or '.join(near)}?"
    if len(known) > 12:
        near = difflib.get_close_matches(name, known, 3, 0.0)
        return f"no {what} named {name!r}; the nearest of {len(known)} are {', '.join(near)}{where}"
    return f"no {what} named {name!r}; expected {'one of ' if len(known) > 1 else ''}{', '.join(known)}{where}"


# ---------------------------------------------------------------------------------------------------------------------
# Which builds, which cases


DEVICES: Mapping[str, Callable[[Build], bool]] = {
    "cpu": lambda build: build.device == "cpu",
    "emu": lambda build: is_emulated(build.device),
    "cuda": lambda build: is_gpu(build.device),
    "interpreter": lambda build: build.device == "interpreter",
    "all": lambda build: True,
}


def anywhere(build: Build) -> bool:
    """Whether any machine can run a build: those that a plain run takes."""
    return build.device == "cpu" or is_emulated(build.device)


def choose_builds(names: Sequence[str], op: str | None, device: str | None = None) -> list[Build]:
    """The builds that --build, --op and --device (of DEVICES) mean; without, those that any machine can run.

    Raises UsageError.

    With --device emu an outside build is one that launches through FlyDSL.
    """
    known = {b.id: b for b in INTERPRETED} if device == "interpreter" else registry()
    if not names:
        wanted = DEVICES[device] if device else anywhere
        found = [b for b in known.values() if op in (None, b.op) and wanted(b)]
        if not found:
            raise UsageError(f"no build of {op} runs with --device {device or 'cpu or emu'}")
        return found
    named = list(dict.fromkeys(build for name in names for build in _builds_named(name, op, known)))
    if device == "emu":
        from mxgate.kernels.gfx950 import virtual

        named = [b if is_emulated(b.device) or b.id in registry() else virtual.emulated(b) for b in named]
    chosen: dict[str, Build] = {}
    for build in apart(named):
        if build.id in chosen:
            raise UsageError(f"two different builds are called {build.id}: give them to two runs")
        chosen[build.id] = build
    if device is not None and (other := [b.id for b in chosen.values() if not DEVICES[device](b)]):
        raise UsageError(f"{', '.join(other)} does not run with --device {device}")
    return list(chosen.values())


def _builds_named(name: str, op: str | None, known: Mapping[str, Build]) -> list[Build]:
    found = [b for b in known.values() if op in (None, b.op) and name in (b.id, b.name)]
    if found:
        return found
    if "fault_" in name:
        from mxgate.kernels.faults import FAULTS

        found = [f.build for f in FAULTS if op in (None, f.build.op) and name in (f.build.id, f.build.name)]
        return found or _no_fault(name, [f.build.id for f in FAULTS])
    if ":" in name or name.endswith(".py"):
        return [_outside(name, op)]
    elsewhere = sorted(b.op for b in known.values() if name in (b.id, b.name))
    if elsewhere:
        raise UsageError(f"build {name!r} computes {', '.join(elsewhere)}, not {op}")
    names = list(dict.fromkeys(n for b in known.values() if op in (None, b.op) for n in (b.name, b.id)))
    lost = "".join(f" ({note})" for note in installed()[1])
    raise UsageError(unknown("build", name, names, ", or path/to/file.py:callable") + lost)


def _no_fault(name: str, known: Sequence[str]) -> NoReturn:
    raise UsageError(unknown("fault", name, known, " (see `mxgate list faults`)"))


def _outside(target: str, op: str | None) -> Build:
    """A build from outside the project; its op is what mxgate.toml says, or the callable's name, without --op."""
    if ":" not in target:
        raise UsageError(f"{target!r} names a file and no callable; expected {target}:CALLABLE, such as {target}:wgrad")
    try:
        return outside(op, target)
    except BuildError as error:
        raise UsageError(str(error)) from None
    except (ImportError, ValueError) as error:
        raise UsageError(f"{target!r} names no build: {error}") from None


def choose_cases(
    patterns: Sequence[str], builds: Sequence[Build], tier: str, salt: int, files: Sequence[Path] = ()
) -> list[Any]:
    """The tier's cases of the builds, or the calls recorded in files; of these those whose id matches one of the
    patterns. Raises UsageError."""
    from mxgate.conformance.case import cases, full_grid, salted

    tiers = ("smoke", "production") if tier == "production" else (tier,)
    all_ops = list(dict.fromkeys(b.op for b in builds))
    own = full_grid((b.id for b in builds), tier)
    listed = list({c.id: c for c in (*(c for t in tiers for op in all_ops for c in cases(op, t)), *own)}.values())
    if files:
        if salt:
            raise UsageError("recorded calls have no other data; leave out --seed")
        listed = [c for c in _recorded(files).values() if c.op in all_ops]
        if not listed:
            raise UsageError(f"{', '.join(map(str, files))} holds no call of {', '.join(all_ops)}")
    if patterns:
        chosen: dict[str, Any] = {}
        for pattern in patterns:
            matching = [c for c in listed if fnmatch.fnmatchcase(c.id, pattern)]
            if not matching:
                matching = [_case_named(pattern, all_ops, listed)]
            chosen.update((c.id, c) for c in matching)
        listed = list(chosen.values())
    return [salted(c, salt) for c in listed] if salt else listed


def _case_named(pattern: str, ops: Sequence[str], listed: Sequence[Any]) -> Any:
    from mxgate.conformance.case import case_by_id

    if not any(sign in pattern for sign in "*?["):
        with contextlib.suppress(ValueError):
            case = case_by_id(pattern)
            if case.op in ops:
                return case
            raise UsageError(f"case {pattern} is of {case.op}, but no chosen build computes that")
    raise UsageError(unknown("case", pattern, [c.id for c in listed], " (see `mxgate list cases`)"))


def _recorded(files: Iterable[Path]) -> dict[str, Any]:
    """The recorded calls of some files as cases, by id."""
    from mxgate.conformance import recorded

    return {case.id: case for path in files for case in recorded.cases(path)}


def _case(name: str, files: Iterable[str | Path] = ()) -> Any:
    from mxgate.conformance.case import case_by_id

    if (case := _recorded(map(Path, files)).get(name)) is not None:
        return case
    if name.split("/")[-1].startswith("recorded"):
        raise UsageError(f"the recorded call {name} is in none of the files given, or has changed since; give --cases")
    try:
        return case_by_id(name)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _shard(text: str) -> tuple[int, int]:
    i, slash, n = text.partition("/")
    if not (slash and i.isdecimal() and n.isdecimal() and 1 <= int(i) <= int(n)):
        raise argparse.ArgumentTypeError(f"{text!r} is no shard; expected i/n with 1 <= i <= n, such as 2/8")
    return int(i), int(n)


def _positive(kind: Callable[[str], Any], noun: str) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value < 1e9:
            raise argparse.ArgumentTypeError(f"{text!r} is not {noun} above 0")
        return value

    return parse


_COUNT, _NUMBER = _positive(int, "a whole number"), _positive(float, "a number")


def _salt(text: str) -> int:
    if not (text.isdecimal() and len(text) < 19):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def _gates(names: Sequence[str] | None) -> tuple[str, ...]:
    from mxgate.conformance.verdict import GATES

    for name in names or ():
        if name not in GATES:
            raise UsageError(unknown("gate", name, GATES))
    return tuple(gate for gate in GATES if not names or gate in names)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _print_json(document: Any) -> None:
    json.dump(document, sys.stdout, indent=1)
    sys.stdout.write("\n")


# ---------------------------------------------------------------------------------------------------------------------
# run, report


def _settings(args: argparse.Namespace) -> Any:
    from mxgate.conformance.run import Settings
    from mxgate.conformance.worker import Limits

    return Settings(
        tier=args.tier,
        jobs=args.jobs or _cores(),
        shard=args.shard,
        limits=Limits(args.time_limit or SECONDS[args.tier], args.memory_limit),
        gates=_gates(args.gate),
        fresh=args.fresh,
    )


def cmd_run(args: argparse.Namespace) -> int:
    from mxgate.conformance import report as text
    from mxgate.conformance.case import asked
    from mxgate.conformance.run import run

    _check_html(args.html)
    settings = _settings(args)
    # The production cases are hours of an emulator's time, so there it must be asked for.
    device = args.device or ("cpu" if args.tier == "production" and not args.build else None)
    builds = choose_builds(args.build, args.op, device)
    cases = choose_cases(args.case, builds, args.tier, args.seed, args.cases)
    if args.cases and not args.build:
        builds = [b for b in builds if any(c.op == b.op for c in cases)]
    if lost := [b.id for b in builds if not any(c.op == b.op and asked(c, b.id, args.tier) for c in cases)]:
        if args.build:
            raise UsageError(f"no chosen case is asked of {', '.join(lost)}")
        builds = [b for b in builds if b.id not in lost]
    _try_loading([b for b in builds if b.id not in registry() and not b.name.startswith("fault_")], settings.limits)
    out = _folder(args.out)
    with contextlib.suppress(OSError):  # only a convenience for `mxgate explain`
        STATE.mkdir(exist_ok=True)
        (STATE / "last-run").write_text(str(out.resolve()))
    with text.Watch("cases") as step:
        report = run(builds, cases, settings, out, lambda done, total, r: step(done, total, r.case))
    return _finish(report, out, args.json, args.device, args.html)


def _folder(out: Path) -> Path:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to {str(out)!r}: {error.strerror}") from None
    return out


def _finish(report: Any, out: Path, as_json: bool, device: str | None = None, html: Path | None = None) -> int:
    """Write run.json, junit.xml, the certificates and an HTML report, and print the verdicts; of emulated builds alone
    also what they take for granted."""
    from mxgate.conformance import certificate
    from mxgate.conformance import report as text

    plan = {
        "stamp": report.settings.stamp,
        "tier": report.settings.tier,
        "gates": list(report.settings.gates),
        "limits": asdict(report.settings.limits),
        "builds": [asdict(b) for b in report.builds],
        "fingerprints": {result.build: result.fingerprint for result in report.results},
        "cases": [c.id for c in report.cases],
        "files": sorted({str(Path(c.source).resolve()) for c in report.cases if c.source}),
    }
    (out / "run.json").write_text(json.dumps(plan, indent=1) + "\n")
    (out / "junit.xml").write_bytes(text.junit(report))
    written = certificate.write_all(report, out / "certificates")
    if as_json:
        _print_json(text.document(report, {"out": str(out), "certificates": [str(path) for path in written]}))
    else:
        to = text.console()
        text.print_run(report, to, assumptions=device == "emu")
        to.print(f"wrote {out}/results.jsonl, junit.xml" + (f", {len(written)} certificates" if written else ""))
    if html is not None:
        _write_html(report, html, out)
    return int(report.exit_code)


def _check_html(path: Path | None) -> None:
    """UsageError, before any work, where no HTML report can be written."""
    if path is None:
        return
    if not path.absolute().parent.is_dir():
        raise UsageError(f"cannot write {str(path)!r}: its folder does not exist")
    for name in ("jinja2", "matplotlib"):
        if importlib.util.find_spec(name) is None:
            raise UsageError(f"--html needs {name}, which is not installed: pip install 'mxgate[report]'")


def _write_html(report: Any, path: Path, out: Path) -> None:
    from mxgate.conformance import html
    from mxgate.conformance import report as text
    from mxgate.kernels.flydsl import budget

    ledgers = {}
    for build in report.builds:
        with contextlib.suppress(Unavailable):
            if build.id in budget.KERNELS_OF:
                ledgers[build.id] = budget.inspect(build.id)
    with text.Watch("report") as step:
        html.write(report, path, ledgers=ledgers, timings=_last_timings(out), watch=step)


def _last_timings(out: Path) -> list[dict[str, Any]]:
    """The records of the last `mxgate time` into a folder: figures of other runs do not compare."""
    try:
        lines = (out / "timings.jsonl").read_text().splitlines()
    except OSError:
        return []
    records = []
    for line in lines:
        with contextlib.suppress(ValueError):  # a torn line
            records.append(dict(json.loads(line)))
    return [record for record in records if record.get("time") == records[-1].get("time")]


def _try_loading(builds: Sequence[Build], limits: Any) -> None:
    """Outside builds none of which can even be loaded are bad input. Among others such a build is rejected, for what it
    does is nobody else's trouble."""
    from mxgate.conformance.worker import Child, ChildError

    for number, build in enumerate(builds, 1):
        try:
            Child(build, limits).close()
            return
        except ChildError as error:
            if number == len(builds):
                raise UsageError(f"{build.target} cannot be loaded: {error}") from None


def cmd_report(args: argparse.Namespace) -> int:
    from mxgate.conformance.run import Settings, read_results, summarise

    _check_html(args.html)
    plans, known, warnings = [], {}, []
    for folder in args.folder:
        plans.append(_plan(folder))
        results, strange = read_results(folder / "results.jsonl")
        known.update(results)
        warnings.extend(strange)
    if any(plan["stamp"] != plans[0]["stamp"] for plan in plans):
        raise UsageError("these runs are not parts of one: their tiers, limits, gates or mxgate versions differ")
    builds = {b.id: b for plan in plans for b in plan["builds"]}
    if other := next((b.id for plan in plans for b in plan["builds"] if b != builds[b.id]), None):
        raise UsageError(f"two different builds are called {other} in these runs: report them one by one")
    held = _recorded(Path(file) for plan in plans for file in plan["files"])
    cases = {name: held.get(name) or _case(name) for plan in plans for name in plan["cases"]}
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
        resumed=len(wanted),
        seconds=0.0,
        warnings=tuple(warnings),
    )
    apart = STATE / "report" if len(args.folder) > 1 else args.folder[0]
    return _finish(report, _folder(args.out or apart), args.json, html=args.html)


def _plan(folder: Path) -> dict[str, Any]:
    """What run.json says, its builds as records. Raises UsageError."""
    from mxgate.conformance.verdict import GATES
    from mxgate.conformance.worker import Limits
    from mxgate.kernels.build import build_from

    try:
        plan = json.loads((folder / "run.json").read_bytes())
        plan["builds"] = [build_from(record) for record in plan["builds"]]
        plan["limits"] = Limits(**plan["limits"])
        plan.setdefault("fingerprints", {})
        plan.setdefault("files", [])
        sound = (
            all(isinstance(text, str) for text in (plan["stamp"], *plan["cases"], *plan["files"]))
            and all(isinstance(limit, int | float) and limit > 0 for limit in asdict(plan["limits"]).values())
            and plan["tier"] in TIERS
            and bool(plan["gates"])
            and isinstance(plan["fingerprints"], dict)
            and set(plan["gates"]) <= set(GATES)
            and not any(os.sep in build.name for build in plan["builds"])  # a name is part of a file name
        )
        if sound:
            return dict(plan)
    except OSError:
        raise UsageError(
            f"{folder} holds no run: expected run.json and results.jsonl, as `mxgate run` writes"
        ) from None
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise UsageError(f"{folder / 'run.json'} is not what `mxgate run` writes; run it again")


# ---------------------------------------------------------------------------------------------------------------------
# list


def _listing(what: str, op: str | None, tier: str) -> list[dict[str, Any]]:
    from mxgate import oracle
    from mxgate.conformance.case import cases, full_grid
    from mxgate.conformance.verdict import GATES, MANDATORY

    if what == "builds":
        return [
            {"build": b.id, "device": b.device, "formats": _formats(b.formats), "align": b.group_alignment,
             "accumulator": b.accumulator, "replaces": b.replaces or "", "needs": b.missing() or ""}
            for b in registry().values()
            if op in (None, b.op)
        ]  # fmt: skip
    if what == "cases":
        return [
            {"case": c.id, "n": c.n, "k": c.k, "tokens": c.tokens, "buffer": c.buffer, "experts": c.experts}
            for c in (*cases(op, tier), *full_grid([b.id for b in registry().values() if op in (None, b.op)], tier))
        ]
    if what == "gates":
        mandatory = {gate: [name for name in MANDATORY if gate in MANDATORY[name]] for gate in GATES}
        from mxgate.conformance import gates

        return [
            {"gate": gate, "mandatory for": _ops(mandatory[gate]), "demands": _first_line(gates.GATE_FUNCTIONS[gate])}
            for gate in GATES
        ]  # fmt: skip
    if what == "faults":
        from mxgate.kernels.faults import FAULTS

        return [
            {"fault": f.build.id, "gate": f.gate, "kind": f.kind, "what": f.what}
            for f in FAULTS
            if op in (None, f.build.op)
        ]
    if what == "formats":
        return [
            {"format": f.name, "emax": f.emax, "mantissa": f.mantissa_bits, "max": f.max_finite,
             "nan": " ".join(f"0x{code:02x}" for code in f.nan_codes), "tag": f.tag}
            for f in oracle.FORMATS.values()
        ]  # fmt: skip
    if what == "profiles":
        return [
            {"profile": p.name, "rule": p.rule, "formats": _formats(p.formats), "peer": p.peer}
            for p in oracle.PROFILES.values()
        ]
    return [
        {"accumulator": a.name, "bits": a.bits or "exact", "step": a.step, "verified": "yes" if a.verified else "no",
         "false alarms": f"{odds:.0e} an element" if (odds := a.failure_probability(1)) else "none",
         "source": a.source}
        for a in oracle.ACCUMULATORS.values()
    ]  # fmt: skip


def _ops(names: Sequence[str]) -> str:
    return "every op" if len(names) == len(OPS) else "GEMMs" if names else "replacements"


def _formats(names: Sequence[str]) -> str:
    fp8 = ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")
    return ",".join(["fp8", *(n for n in names if n not in fp8)] if set(names) >= set(fp8) else names)


def _first_line(function: Any) -> str:
    return (function.__doc__ or "").strip().partition("\n")[0]


LISTS = ("builds", "cases", "gates", "faults", "formats", "profiles", "accumulators")


def cmd_list(args: argparse.Namespace) -> int:
    from mxgate.conformance import report as text

    wanted = [args.listing] if args.listing else list(LISTS)
    found = {what: _listing(what, args.op, args.tier) for what in wanted}
    for note in installed()[1] if "builds" in wanted else ():
        print(f"mxgate: note: {note}", file=sys.stderr)
    if args.json:
        _print_json({"command": "list", **found})
        return 0
    to = text.console()
    if not args.listing:
        text.table(to, ["what", "how many"], [[what, str(len(rows))] for what, rows in found.items()], ["how many"])
        to.print("\nmxgate list WHAT shows them")
        return 0
    rows = found[args.listing]
    if rows:
        numbers = [name for name, value in rows[0].items() if isinstance(value, int | float)]
        text.table(to, list(rows[0]), [[str(value) for value in row.values()] for row in rows], numbers)
    return 0


# ---------------------------------------------------------------------------------------------------------------------
# faults


def cmd_faults(args: argparse.Namespace) -> int:
    if args.isa is not None:
        return _machine_code_faults(args)
    from mxgate.conformance import report as text
    from mxgate.conformance.matrix import kill_matrix
    from mxgate.conformance.run import Settings
    from mxgate.conformance.worker import Limits
    from mxgate.kernels.faults import FAULTS
    from mxgate.kernels.variants import CORRECT

    settings = Settings(jobs=args.jobs or _cores(), limits=Limits(args.time_limit, args.memory_limit))
    chosen = [f for f in FAULTS if _fault_matches(f.build, args.fault)]
    if not chosen:
        raise UsageError(unknown("fault", args.fault[0], [f.build.id for f in FAULTS], " (see `mxgate list faults`)"))
    # Emulated builds are slow, and their faults are mutations of machine code.
    correct = [] if args.fault else [*(b for b in registry().values() if b.device == "cpu"), *CORRECT]
    with text.Watch("faults") as step:
        matrix = kill_matrix(chosen, correct, args.seeds, settings, step)
    if args.json:
        _print_json(text.matrix_document(matrix))
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
        _print_json({"command": "faults --isa", "kinds": kinds, "survivors": survivors})
    else:
        for line in str(judged).splitlines():
            text.say(text.console(), line)
    return int(bool(judged.unexplained))


def _fault_matches(build: Build, patterns: Sequence[str]) -> bool:
    names = (build.id, build.name, build.name.removeprefix("fault_"), build.id.replace("/fault_", "/"))
    return not patterns or any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in patterns)


# ---------------------------------------------------------------------------------------------------------------------
# time


def cmd_time(args: argparse.Namespace) -> int:
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
            common = [c for c in certified[held[0][0]] if c.id in shared]
            if not common:
                raise UsageError("these certificates have no case in common; choose one with --case")
            case = max(common, key=lambda c: (c.n * c.k * max(c.tokens, 1), c.family == "normal", c.id))
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
        _print_json({"command": "time", "case": case.id, "device": certificate.device(), "timings": numbers})
    else:
        text.print_timings(timings, case, certificate.device(), text.console())
    return 1 if refused else 0


def _time_on_gpu(args: argparse.Namespace, held: Any, certified: Any) -> int:
    """The part of `time` for builds on a GPU. Raises CertificateError as cmd_time does."""
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
    out = _folder(args.out)
    with (out / "timings.jsonl").open("a") as lines:
        for timing in found["timings"]:
            lines.write(json.dumps({**{k: v for k, v in found.items() if k != "timings"}, **timing}) + "\n")
    if args.json:
        _print_json({"command": "time", **found})
    else:
        to = text.console()
        text.print_gpu_timings(found, to)
        text.say(to, f"wrote {out}/timings.jsonl")
    return int(any(timing["refused"] for timing in found["timings"]))


# ---------------------------------------------------------------------------------------------------------------------
# bench-oracle

# Quantizing must be at least this many times as fast as the peer with the same rule, on as many threads.
QUANTIZE_TARGET = 2.0


def cmd_bench_oracle(args: argparse.Namespace) -> int:
    from mxgate.conformance import report as text
    from mxgate.conformance.bench_gemm import bench_wgrad
    from mxgate.conformance.bench_quantize import bench_quantize

    rows: list[dict[str, Any]] = []
    # The quantizers under the allocator that everybody has, which is what the target means, and, for the record, under
    # one that keeps freed memory: torchao's temporaries are many, and on some machines fresh pages cost it most.
    for kept in (False, True):
        if kept:
            _keep_memory()
        for row in bench_quantize((1024, 1792), repeats=3) if args.quick else bench_quantize():
            what = f"quantize {'x'.join(map(str, row['shape']))} {row['dtype']}, axis {row['axis']}, {row['rule']}"
            beside = row["peer"] if row["same_bytes"] is not False else f"other bytes than {row['peer']}"
            least = None if kept else QUANTIZE_TARGET
            what += ", memory kept" if kept else ""
            rows.append({"what": what, "seconds": row["ours_s"], "beside": beside, "least": least, "detail": row})
    for row in bench_wgrad(n=352, k=512, tokens=2048, repeats=2) if args.quick else bench_wgrad():
        beside = "" if row["limit"] is None else "the operands" if row["seconds"] is None else "one float32 matmul"
        rows.append({**row, "beside": beside, "most": row["limit"], "detail": row})
    judged = [row for row in rows if row.get("least") or row.get("most")]
    for row in rows:
        row["ratio"] = row["detail"]["ratio"]
        row["met"] = None if args.quick or row not in judged else _met(row)
    if args.json:
        _print_json({"command": "bench-oracle", "quick": args.quick, "rows": rows})
    else:
        text.print_bench(rows, args.quick, text.console())
    if any(row["met"] is False for row in rows):
        return 1
    return 0 if args.quick or all(row["met"] for row in judged) else 3


def _met(row: Mapping[str, Any]) -> bool | None:
    """Whether the row's ratio is what it should be; None where there is none, False where the bytes differ."""
    if row["ratio"] is None:
        return False if row["detail"].get("same_bytes") is False else None
    return bool(row["ratio"] >= row.get("least", 0.0) and row["ratio"] <= (row.get("most") or float("inf")))


# ---------------------------------------------------------------------------------------------------------------------
# train


def cmd_train(args: argparse.Namespace) -> int:
    try:
        from mxgate.conformance import training
    except ImportError as error:
        raise UsageError(f"training needs {error.name}, which is not installed: pip install 'mxgate[torch]'") from None
    from mxgate.conformance import report as text

    names = args.recipe or list(training.RECIPES)
    for name in names:
        if name not in training.RECIPES:
            raise UsageError(unknown("recipe", name, list(training.RECIPES)))
    builds = {op: f"{op}/torch_dequant" for op in training.OPS}
    for build in choose_builds(args.build, None) if args.build else ():
        if build.op not in builds:
            raise UsageError(f"{build.id} computes {build.op}; expected builds of {', '.join(builds)}")
        builds[build.op] = build.id
    recipes = training.recipes(names, {op: choose_builds([name], op)[0] for op, name in builds.items()})
    with text.Watch("steps") as step:
        curves = training.compare(recipes, args.steps, step)
    out = _folder(args.out)
    records = [{"recipe": c.name, "losses": c.losses, "distance": c.distance, "accepted": c.accepted} for c in curves]
    (out / "losses.json").write_text(json.dumps({"builds": builds, "steps": args.steps, "curves": records}) + "\n")
    wrote = f"{out}/losses.json"
    with contextlib.suppress(ImportError):  # the plot is an extra
        training.plot(curves, out / "losses.svg")
        wrote += ", losses.svg"
    code = int(not all(c.accepted for c in curves))
    if args.json:
        _print_json({"command": "train", "builds": builds, "limit": training.LIMIT, "curves": records, "exit": code})
        return code
    to = text.console()
    rows = [
        [c.name, f"{c.last:.4f}", f"{c.distance:.4f}", "accept" if c.accepted else text.cell("reject")] for c in curves
    ]
    text.table(to, ["recipe", "last loss", "distance", "verdict"], rows, ["last loss", "distance"])
    text.say(to, f"{', '.join(builds.values())}; {args.steps} steps; losses in nats a character, means of")
    text.say(to, f"{training.WINDOW} steps; distance from bf16 in the first {training.HORIZON} steps at most")
    text.say(to, f"{training.LIMIT}; wrote {wrote}")
    return code


# ---------------------------------------------------------------------------------------------------------------------
# inspect, bench-emulator


def cmd_inspect(args: argparse.Namespace) -> int:
    from mxgate.conformance import report as text
    from mxgate.kernels.flydsl import budget

    build = choose_builds([args.build], None)[0].id
    if build not in budget.KERNELS_OF:
        raise UsageError(f"{build} has no machine code of its own; expected one of {', '.join(budget.KERNELS_OF)}")
    try:
        allowed = budget.read(args.budget) if args.budget is not None else None
    except ValueError as error:
        raise UsageError(str(error)) from None
    try:
        figures = budget.inspect(build)
    except Unavailable as error:
        print(f"mxgate: {error}", file=sys.stderr)
        return 3
    above = () if allowed is None else budget.over(figures, allowed.get(build, {}))
    if args.json:
        _print_json({"command": "inspect", "build": build, "kernels": figures, "over budget": list(above)})
        return int(bool(above))
    to = text.console()
    names = list(dict.fromkeys(name for of in figures.values() for name in of))
    rows = [[name, *(str(of.get(name, "-")) for of in figures.values())] for name in names]
    text.table(to, [build, *figures], rows, list(figures))
    for line in budget.notes():
        text.say(to, line)
    for line in above:
        text.say(to, f"OVER BUDGET {line}")
    return int(bool(above))


def cmd_bench_emulator(args: argparse.Namespace) -> int:
    from mxgate.conformance import report as text
    from mxgate.kernels.flydsl.bench import bench

    try:
        rows = list(bench(args.quick))
    except Unavailable as error:
        print(f"mxgate: {error}", file=sys.stderr)
        return 3
    if args.json:
        _print_json({"command": "bench-emulator", "quick": args.quick, "rows": rows})
    else:
        text.print_emulator(rows, args.quick, text.console())
    return int(any(row["met"] is False for row in rows))


# ---------------------------------------------------------------------------------------------------------------------
# fixtures


def cmd_fixtures(args: argparse.Namespace) -> int:
    from mxgate.conformance import report as text
    from mxgate.fixtures import CAPTURED, generate
    from mxgate.fixtures.store import StoreError

    to = text.console()
    try:
        if args.action == "list":
            held = [(c, True) for c in generate.stored()] + [(c, False) for c in generate.hashed()]
            size = {c.id: generate.golden_path(c).stat().st_size for c, whole in held if whole}
            text.table(
                to,
                ["case", "bytes", "kept as"],
                [[c.id, str(size.get(c.id, "-")), "file" if whole else "hashes in the manifest"] for c, whole in held],
                ["bytes"],
            )
            return 0
        if args.action == "verify":
            with text.Watch("fixtures") as step:
                total = len(generate.stored()) + len(generate.hashed())
                done = iter(range(total + 1))
                wrong = generate.verify(lambda name: step(next(done), total, name))
            for line in wrong:
                text.say(to, line)
            text.say(to, f"{len(wrong)} differences" if wrong else f"{total} cases are made again bit for bit")
            return 1 if wrong else 0
        if args.action == "export":
            from mxgate.fixtures.export import export

            if args.folder is None:
                raise UsageError("where to? expected `mxgate fixtures export DIR`")
            export(args.folder, lambda line: text.say(to, line))
            return 0
        if args.action == "capture":
            from mxgate.fixtures.capture_moe import capture

            capture(CAPTURED, lambda line: text.say(to, line))
        generate.generate(lambda line: text.say(to, line))
        return 0
    except (StoreError, OSError) as error:
        raise UsageError(str(error)) from None
    except ImportError as error:
        raise UsageError(f"`mxgate fixtures {args.action}` needs {error.name}, which is not installed") from None


# ---------------------------------------------------------------------------------------------------------------------
# explain


def cmd_explain(args: argparse.Namespace) -> int:
    build, case, tier, others = _failure(args)
    from mxgate.conformance import report as text
    from mxgate.conformance.explain import explain
    from mxgate.conformance.run import Runner
    from mxgate.conformance.verdict import Outcome

    to = text.console()
    with Runner(_plain_settings(tier, args)) as runner:
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


def cmd_minimize(args: argparse.Namespace) -> int:
    build, case, tier, _ = _failure(args)
    from mxgate.conformance import report as text
    from mxgate.conformance.minimize import NotFailingError, minimize
    from mxgate.conformance.run import Runner

    to = text.console()
    with Runner(_plain_settings(tier, args)) as runner, text.Watch("runs") as step:
        try:
            found = minimize(runner, build, case, args.out, lambda tried, left: step(tried, 0, left))
        except NotFailingError as error:
            raise UsageError(str(error)) from None
    text.say(to, f"{build.id} on {case.id}: {found.gate} still rejects it after {found.tried} runs with")
    text.say(to, f"{found.kept.words} (of {found.whole.words})", 2)
    text.say(to, f"wrote {args.out}; replay it: mxgate run {called(build)} --cases {shlex.quote(str(args.out))}")
    return 1


def _plain_settings(tier: str, args: argparse.Namespace) -> Any:
    from mxgate.conformance.run import Settings
    from mxgate.conformance.worker import Limits

    return Settings(tier=tier, jobs=1, limits=Limits(args.time_limit or SECONDS[tier], args.memory_limit))


def _failure(args: argparse.Namespace) -> tuple[Build, Any, str, int]:
    """(build, case, tier, further failures): what to explain. Sets args.given when it comes from --build and --case."""
    from mxgate.conformance.run import read_results
    from mxgate.conformance.verdict import Outcome

    args.given = args.build is not None and args.case is not None
    folder = args.folder or _last_run()
    if args.given and (folder is None or not (folder / "run.json").exists()):
        return _named(args)
    if folder is None:
        raise UsageError("there is no earlier run here; give --build and --case, or the --out of a run")
    plan = _plan(folder)
    builds = {b.id: b for b in plan["builds"]}
    results, _ = read_results(folder / "results.jsonl")
    prints = plan["fingerprints"]  # another build of the name may have left results here before
    failed = [
        result
        for (build, fingerprint, case, stamp), result in results.items()
        if stamp == plan["stamp"] and prints.get(build) == fingerprint
        if result.outcome is Outcome.REJECT and build in builds and case in plan["cases"]
        if args.build is None or args.build in (build, builds[build].name, builds[build].target)
        if args.case is None or fnmatch.fnmatchcase(case, args.case)
    ]
    if not failed and args.given:
        return _named(args)
    if not failed:
        chosen = " that --build and --case choose" if args.build or args.case else ""
        raise UsageError(f"nothing{chosen} was rejected in {folder}; give both --build and --case to look anyway")
    # Signature cases tell most about what went wrong.
    failed.sort(key=lambda r: ("/signature" not in r.case, r.case))
    args.given = False
    return builds[failed[0].build], _case(failed[0].case, plan["files"]), plan["tier"], len(failed) - 1


def _named(args: argparse.Namespace) -> tuple[Build, Any, str, int]:
    case = _case(args.case, args.cases)
    return choose_builds([args.build], args.op or case.op, args.device)[0], case, "smoke", 0


def _last_run() -> Path | None:
    try:
        return Path((STATE / "last-run").read_text())
    except OSError:
        return STATE if (STATE / "run.json").exists() else None


# ---------------------------------------------------------------------------------------------------------------------
# The command line itself


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="mxgate",
        description="Hold MXFP8 quantizers and grouped GEMMs against an exact oracle; time only what was accepted.",
        epilog=_EXIT,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)

    def command(name: str, function: Callable[[argparse.Namespace], int], help: str) -> _Parser:
        sub: _Parser = commands.add_parser(name, help=help, description=help, epilog=_EXIT)
        sub.set_defaults(function=function)
        return sub

    def jobs(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--jobs", type=_COUNT, metavar="N", help="children at work at a time (default: one a core)")

    def limits(sub: argparse.ArgumentParser, seconds: float | None = 60.0) -> None:
        sub.add_argument(
            "--time-limit",
            type=_NUMBER,
            default=seconds,
            metavar="S",
            help="seconds one launch may take "
            + ("(default 60; full 300, production 600)" if seconds is None else "(default 60)"),
        )
        sub.add_argument(
            "--memory-limit", type=_NUMBER, default=8.0, metavar="GIB", help="resident memory of one child (default 8)"
        )

    def as_json(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--json", action="store_true", help="one JSON document on standard output")

    def as_html(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--html", type=Path, metavar="FILE", help="also one offline file with pictures of what failed")

    def recorded(sub: argparse.ArgumentParser) -> None:
        sub.add_argument(
            "--cases",
            action="append",
            default=[],
            type=Path,
            metavar="FILE",
            help="the calls recorded in this file (mxgate.capture, minimize) instead of the tier's cases",
        )

    sub = command("run", cmd_run, "run builds through the gates and print a verdict for each")
    sub.add_argument("--op", choices=list(OPS), help="only this op (and what an outside --build computes)")
    sub.add_argument(
        "--build",
        action="append",
        default=[],
        metavar="NAME",
        help="a name from `mxgate list builds`, or path/to/file.py:callable (mxgate.toml beside it states its terms); "
        "may be repeated (default: CPU builds)",
    )
    sub.add_argument(
        "--device",
        choices=list(DEVICES),
        help="builds for the CPU, emulated ones (among them a file of FlyDSL launches), for a GPU (cuda), Triton's "
        "interpreted on the CPU (slow: give cases), or all but these (default: those for the CPU and emulated ones, "
        "of the production tier the CPU's alone)",
    )
    sub.add_argument(
        "--case",
        action="append",
        default=[],
        metavar="ID",
        help="a case id or a pattern such as 'wgrad/*/signature'; may be repeated",
    )
    recorded(sub)
    sub.add_argument(
        "--gate", action="append", metavar="NAME", help="only this gate; may be repeated (never enough for an accept)"
    )
    sub.add_argument(
        "--tier",
        choices=TIERS,
        default="smoke",
        help="how many cases and repeats (default smoke; production: smoke and the large shapes)",
    )
    sub.add_argument("--seed", type=_salt, default=0, metavar="N", help="the same cases with other data")
    sub.add_argument("--shard", type=_shard, default=(1, 1), metavar="I/N", help="only the I-th of N parts of the work")
    sub.add_argument(
        "--out",
        type=Path,
        default=STATE,
        metavar="DIR",
        help="where results go, and where a stopped run resumes (default .mxgate)",
    )
    sub.add_argument("--fresh", action="store_true", help="judge everything again, whatever earlier results say")
    jobs(sub)
    limits(sub, None)
    as_html(sub)
    as_json(sub)

    sub = command("report", cmd_report, "put the results of several runs (shards) together")
    sub.add_argument("folder", nargs="+", type=Path, metavar="DIR", help="an --out of `mxgate run`")
    sub.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where junit.xml and certificates go (default: the folder itself; of several, .mxgate/report)",
    )
    as_html(sub)
    as_json(sub)

    sub = command("faults", cmd_faults, "hold every wrong build against the gate that must reject it")
    sub.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="NAME",
        help="only this fault, or a pattern; may be repeated (then no correct build is run)",
    )
    sub.add_argument(
        "--isa",
        type=_COUNT,
        nargs="?",
        const=300,
        metavar="N",
        help="instead: N mutants (default 300) of the weight gradient's machine code; exit 1 if one lives on",
    )
    sub.add_argument(
        "--seeds",
        type=_COUNT,
        default=3,
        metavar="N",
        help="different seeds for the correct builds, none of which may be rejected (default 3)",
    )
    jobs(sub)
    limits(sub)
    as_json(sub)

    sub = command("explain", cmd_explain, "run a rejected build on its case again and say what probably went wrong")
    sub.add_argument("folder", nargs="?", type=Path, metavar="DIR", help="an --out of `mxgate run` (default: the last)")
    sub.add_argument("--build", metavar="NAME", help="this build")
    sub.add_argument("--op", choices=list(OPS), help="what an outside --build computes")
    sub.add_argument("--device", choices=list(DEVICES), help="as in run: emu for a file of FlyDSL launches")
    sub.add_argument("--case", metavar="ID", help="this case, or a pattern")
    recorded(sub)
    limits(sub, None)

    sub = command("minimize", cmd_minimize, "shrink a rejected case to the least that is still rejected")
    sub.add_argument("folder", nargs="?", type=Path, metavar="DIR", help="an --out of `mxgate run` (default: the last)")
    sub.add_argument("--build", metavar="NAME", help="this build")
    sub.add_argument("--op", choices=list(OPS), help="what an outside --build computes")
    sub.add_argument("--device", choices=list(DEVICES), help="as in run: emu for a file of FlyDSL launches")
    sub.add_argument("--case", metavar="ID", help="this case, or a pattern")
    recorded(sub)
    sub.add_argument(
        "--out", type=Path, default=Path("minimal.safetensors"), metavar="FILE", help="default: minimal.safetensors"
    )
    limits(sub, None)

    sub = command("time", cmd_time, "time builds that hold a certificate, interleaved, on one thread")
    sub.add_argument("certificate", nargs="+", type=Path, metavar="CERTIFICATE", help="a file of .mxgate/certificates")
    sub.add_argument("--case", metavar="ID", help="the case to time (default: the largest that all certificates cover)")
    sub.add_argument("--rounds", type=_COUNT, default=8, metavar="N", help="rounds that count (default 8)")
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
    sub.add_argument("--out", type=Path, default=STATE, metavar="DIR", help="on a GPU: where timings.jsonl goes")
    sub.add_argument(
        "--seconds", type=_NUMBER, default=0.3, metavar="S", help="how long a build runs in a round (default 0.3)"
    )
    limits(sub)
    as_json(sub)

    sub = command("bench-oracle", cmd_bench_oracle, "time the oracle beside torchao and beside float32 products")
    sub.add_argument("--quick", action="store_true", help="small sizes, on which no target is judged")
    as_json(sub)

    sub = command("train", cmd_train, "train a toy mixture of experts in MXFP8 beside BF16 and compare the losses")
    sub.add_argument(
        "--steps", type=_COUNT, default=60, metavar="N", help="training steps (default 60, those that are judged)"
    )
    sub.add_argument(
        "--recipe", action="append", metavar="NAME", help="such as 'e4m3' or 'e5m2 gradients'; repeatable (default all)"
    )
    sub.add_argument(
        "--build", action="append", default=[], metavar="NAME", help="a build to train on, at most one an op"
    )
    sub.add_argument("--out", type=Path, default=STATE / "training", metavar="DIR", help="default .mxgate/training")
    as_json(sub)

    sub = command("inspect", cmd_inspect, "count what the machine code of an emulated build costs")
    sub.add_argument("build", metavar="BUILD", help="such as wgrad/flydsl")
    sub.add_argument("--budget", type=Path, metavar="FILE", help="exit 1 when a figure is above the one in this file")
    as_json(sub)

    sub = command("bench-emulator", cmd_bench_emulator, "time the emulator, hazards off and on, against its targets")
    sub.add_argument("--quick", action="store_true", help="a small size, on which no target is judged")
    as_json(sub)

    sub = command("fixtures", cmd_fixtures, "verify, generate, list, export or capture the tensors in fixtures/")
    actions = ("verify", "generate", "list", "export", "capture")
    sub.add_argument(
        "action",
        choices=actions,
        metavar="ACTION",
        help="verify: make every tensor again and compare; generate: write them; list: what there is; "
        "export: write the golden ones as raw bytes and JSON; "
        "capture: train the small model again (needs torch), then generate",
    )
    sub.add_argument("folder", nargs="?", type=Path, metavar="DIR", help="where an export goes")

    sub = command("list", cmd_list, "list builds, cases, gates, faults, formats, profiles or accumulators")
    sub.add_argument("listing", nargs="?", choices=list(LISTS), metavar="WHAT", help=", ".join(LISTS))
    sub.add_argument("--op", choices=list(OPS), help="only of this op")
    sub.add_argument("--tier", choices=TIERS, default="smoke", help="whose cases (default smoke)")
    as_json(sub)
    return parser


@contextlib.contextmanager
def _emulating(device: str | None) -> Iterator[None]:
    """With --device emu children emulate even where there is the GPU."""
    before = os.environ.get(EMULATE)
    if device == "emu":
        os.environ[EMULATE] = "1"
    try:
        yield
    finally:
        os.environ.pop(EMULATE, None)
        if before is not None:
            os.environ[EMULATE] = before


def _keep_memory() -> None:
    """Have glibc keep what is freed: a fresh page costs more than what is computed into it."""
    trim, mmap, most = -1, -3, (1 << 31) - 1
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap, most)
        libc.mallopt(trim, most)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `mxgate` command; returns the exit code."""
    alone = threading.current_thread() is threading.main_thread()
    # A polite kill ends like Ctrl-C: with no child left behind.
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT)) if alone else None
    resumes = False
    try:
        parser = _parser()
        args = parser.parse_args(argv)
        if args.command is None:
            parser.print_help()
            return 2
        resumes = args.command == "run"
        if args.command != "bench-oracle":  # which does so itself, half way
            _keep_memory()
        with _emulating(getattr(args, "device", None)):
            code = int(args.function(args))
        sys.stdout.flush()
        return code
    except (UsageError, BuildError) as error:
        print(f"mxgate: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"mxgate: interrupted{'; the same command goes on from here' if resumes else ''}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone. Python would complain again while flushing at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except ValueError as error:
        from mxgate.fixtures.store import StoreError

        if not isinstance(error, StoreError):
            raise
        print(f"mxgate: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"mxgate: {f'{error.filename}: ' if error.filename else ''}{error.strerror or error}", file=sys.stderr)
        return 2
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
