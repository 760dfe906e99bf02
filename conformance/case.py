"""A case: one op on one shape, routing and data family, with a readable id from which its seed comes.

`wgrad/tiny/ramp1.5/signature` says the op, the shape, the routing and the family; variations of the control case follow
after a plus sign (`+e5m2xe4m3fn`, `+float16`), a salt after an at sign (`@7`: the same case with other data).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """n, k: the two weight dimensions. sizes: tokens per expert (E of them). buffer: M, at least sum(sizes).

    shape, routing, family: the names in the id. formats: of operand A and B (a quantize case: both the format).
    out_dtype: "bfloat16", "float16" or "float32". What fills the buffer past the tokens is a poison's business.
    """

    op: str
    shape: str
    routing: str
    family: str
    n: int
    k: int
    sizes: tuple[int, ...]
    buffer: int
    formats: tuple[str, str] = ("e4m3fn", "e4m3fn")
    out_dtype: str = "bfloat16"
    salt: int = 0

    @property
    def id(self) -> str:
        name = f"{self.op}/{self.shape}/{self.routing}/{self.family}"
        if self.formats != ("e4m3fn", "e4m3fn"):
            name += f"+{self.formats[0]}x{self.formats[1]}"
        if self.out_dtype != "bfloat16":
            name += f"+{self.out_dtype}"
        return name + (f"@{self.salt}" if self.salt else "")

    @property
    def seed(self) -> int:
        """64 bits of the id's SHA-256: the same id is the same data everywhere."""
        return int.from_bytes(hashlib.sha256(self.id.encode()).digest()[:8], "little")

    @property
    def experts(self) -> int:
        return len(self.sizes)

    @property
    def tokens(self) -> int:
        return sum(self.sizes)
