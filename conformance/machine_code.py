"""What the machine code of emulated builds costs: of ours from committed text, of others from one launch in a child."""

from __future__ import annotations

from collections.abc import Mapping

from mxgate.conformance import data
from mxgate.conformance.case import Case, cases
from mxgate.conformance.launch import LaunchSpec
from mxgate.conformance.worker import Child, ChildError, Limits
from mxgate.kernels.build import Build, Unavailable, registry
from mxgate.kernels.flydsl import budget
from mxgate.kernels.gpu import is_emulated

Figures = Mapping[str, Mapping[str, int]]


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
