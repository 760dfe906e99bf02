"""What the machine code of emulated builds costs: of ours from committed text, of others from one launch in a child."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from mxgate.conformance import data
from mxgate.conformance.case import Case, cases
from mxgate.conformance.child import Child, ChildError, Limits
from mxgate.conformance.launch import LaunchSpec
from mxgate.kernels.build import Build, Unavailable, registry
from mxgate.kernels.flydsl import budget
from mxgate.kernels.gfx950 import ledger, virtual
from mxgate.kernels.gpu import is_emulated

Figures = Mapping[str, Mapping[str, int]]
KEPT = 64  # builds of which a file keeps figures, those that were counted last


def has(build: Build) -> bool:
    """Whether there is machine code to look at: of ours that are emulated, and of FlyDSL launches from outside."""
    return build.id in budget.KERNELS_OF or (is_emulated(build.device) and build.id not in registry())


def _case(build: Build) -> Case:
    """The first case of the smoke tier that the build takes. Raises Unavailable."""
    tier = cases(build.op, "smoke")
    if (case := next((case for case in tier if build.declines(case) is None), None)) is None:
        raise Unavailable(f"{build.id} {build.declines(tier[0])}")
    return case


def figures(build: Build, limits: Limits) -> Figures:
    """The figures of each kernel of a build, by name. Raises Unavailable where it cannot be had here."""
    if build.id in budget.KERNELS_OF:
        return budget.inspect(build.id)
    case = _case(build)
    try:
        child = Child(build, limits)
        try:
            launch = child.launch(case, LaunchSpec("first"), data.operands(case))
            if launch.error is not None:
                raise Unavailable(f"{build.id} on {case.id}: {launch.error}")
            return child.figures()
        finally:
            child.close()
    except ChildError as error:
        raise Unavailable(f"{build.id}: {error}") from None


def notes(build: Build) -> tuple[str, ...]:
    """What the figures are of, as lines of at most 100 columns for below a table of them."""
    if build.id in budget.KERNELS_OF:
        return budget.notes()
    return (
        "loop: one turn, by one wave, of the innermost loop that issues most",
        f"executed: by all waves, on {_case(build).id}",
    )


def ledgers(builds: Iterable[Build], limits: Limits, kept: Path) -> dict[str, tuple[Figures, tuple[str, ...]]]:
    """By build, for those that have machine code and can be emulated here: its figures and notes.

    Counting emulates a launch of full size, seconds for each build. kept: a file of figures that were counted before,
    which need not be there: those count again for as long as nothing that they come from has changed.
    """
    before = _kept(kept)
    known, found = dict(before), {}
    for build in filter(has, builds):
        key = _key(build)
        with contextlib.suppress(Unavailable):
            known[key] = known.pop(key) if key in known else figures(build, limits)
            found[build.id] = known[key], notes(build)
    if known != before:
        text = json.dumps(dict(list(known.items())[-KEPT:]), indent=1)
        with contextlib.suppress(OSError):  # it only spares time
            kept.parent.mkdir(exist_ok=True)
            written = kept.with_name(f"{kept.name}.{os.getpid()}")
            written.write_text(text + "\n")
            written.replace(kept)
    return found


def _key(build: Build) -> str:
    """What figures come from: the build, the emulator it runs on, and what counts."""
    total = hashlib.sha256(build.fingerprint().encode())
    for path in (__file__, budget.__file__, ledger.__file__, virtual.__file__):
        total.update(Path(path).read_bytes())
    return total.hexdigest()


def _kept(path: Path) -> Mapping[str, Figures]:
    """The figures in a file by key; none where it is not there or not as it was written."""
    try:
        return budget.read(path)
    except (OSError, ValueError):
        return {}
