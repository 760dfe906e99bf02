"""How to run: what is asked of every build, and the stamp under which its results count."""

from __future__ import annotations

from dataclasses import dataclass, field

from mxgate.conformance.child import Limits
from mxgate.conformance.verdict import GATES
from mxgate.conformance.version import code_version


@dataclass(frozen=True)
class Settings:
    """How to run. tier: "smoke", "full" or "production". shard: (i, n), 1 <= i <= n, the part of the pairs that is run.

    jobs: children at work at a time on a machine; None for one a core. limits: of a child. gates: those that may
    reject; fewer than all is never an Accept. fresh: run again what has a result already.
    """

    tier: str = "smoke"
    jobs: int | None = 1
    shard: tuple[int, int] = (1, 1)
    limits: Limits = field(default_factory=Limits)
    gates: tuple[str, ...] = GATES
    fresh: bool = False

    @property
    def stamp(self) -> str:
        """What a result depends on besides the build and the case."""
        only = "all" if self.gates == GATES else "+".join(self.gates)
        return f"{self.tier} {self.limits.seconds:g}s {self.limits.memory:g}GiB {only} {code_version()}"
