"""Which builds, cases and gates the words of a command line mean. All of these raise UsageError."""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from mxgate.conformance.commands.usage import UsageError, unknown
from mxgate.kernels.build import Build, BuildError, apart, outside, registry
from mxgate.kernels.gpu import is_emulated, is_gpu
from mxgate.kernels.installed import installed
from mxgate.kernels.triton.builds import INTERPRETED

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
        expected = " or ".join(name for name in DEVICES if all(DEVICES[name](b) for b in named))
        moves = "; a kernel from a file moves its operands to a GPU itself" if device == "cuda" else ""
        raise UsageError(f"{', '.join(other)} does not run with --device {device}; expected {expected}{moves}")
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
    from mxgate.conformance.case import cases, own_cases, salted

    tiers = ("smoke", "production") if tier == "production" else (tier,)
    all_ops = list(dict.fromkeys(b.op for b in builds))
    own = own_cases(builds, tier)
    listed = list({c.id: c for c in (*(c for t in tiers for op in all_ops for c in cases(op, t)), *own)}.values())
    if files:
        if salt:
            raise UsageError("recorded calls have no other data; leave out --seed")
        listed = [c for c in recorded_cases(files).values() if c.op in all_ops]
        if not listed:
            raise UsageError(f"{', '.join(map(str, files))} holds no call of {', '.join(all_ops)}")
    if patterns:
        chosen: dict[str, Any] = {}
        for pattern in patterns:
            matching = [c for c in listed if fnmatch.fnmatchcase(c.id, pattern)]
            if not matching:
                matching = [_case_matching(pattern, all_ops, listed)]
            chosen.update((c.id, c) for c in matching)
        listed = list(chosen.values())
    return [salted(c, salt) for c in listed] if salt else listed


def _case_matching(pattern: str, ops: Sequence[str], listed: Sequence[Any]) -> Any:
    from mxgate.conformance.case import case_by_id

    if not any(sign in pattern for sign in "*?["):
        with contextlib.suppress(ValueError):
            case = case_by_id(pattern)
            if case.op in ops:
                return case
            raise UsageError(f"case {pattern} is of {case.op}, but no chosen build computes that")
    raise UsageError(unknown("case", pattern, [c.id for c in listed], " (see `mxgate list cases`)"))


def recorded_cases(files: Iterable[Path]) -> dict[str, Any]:
    """The recorded calls of some files as cases, by id."""
    from mxgate.conformance import recorded

    return {case.id: case for path in files for case in recorded.cases(path)}


def case_named(name: str, files: Iterable[str | Path] = ()) -> Any:
    from mxgate.conformance.case import case_by_id

    if (case := recorded_cases(map(Path, files)).get(name)) is not None:
        return case
    if name.split("/")[-1].startswith("recorded"):
        raise UsageError(f"the recorded call {name} is in none of the files given, or has changed since; give --cases")
    try:
        return case_by_id(name)
    except ValueError as error:
        raise UsageError(str(error)) from None


def gates_named(names: Sequence[str] | None) -> tuple[str, ...]:
    from mxgate.conformance.verdict import GATES

    for name in names or ():
        if name not in GATES:
            raise UsageError(unknown("gate", name, GATES))
    return tuple(gate for gate in GATES if not names or gate in names)
