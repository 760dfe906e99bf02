"""What one launch of a build is, and all that a gate may look at.

These records travel between the child that runs a build, the runner that collects launches and the gates that judge
them. A launch is asked for by a LaunchSpec and answered by a Launch; Evidence is every launch of one build on one case.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxgate.conformance.case import Case
from mxgate.kernels.build import Build
from mxgate.kernels.gpu import is_emulated
from mxgate.oracle import Answer, MXArray

Array = NDArray[Any]

# Bytes that memory is filled with before a launch. 0xFF repeated is a NaN in every output type (bfloat16, float16,
# float32) and in the two OCP element formats; 0x3F repeated is an ordinary finite number near 0.75 or 1.8 in each.
FILL_NAN = 0xFF
FILL_FINITE = 0x3F


@dataclass(frozen=True)
class LaunchSpec:
    """One launch that a gate needs.

    label: unique within a plan, for people ("first", "repeat 17", "poison random", "process 2, repeat 3").
    variant: the poison the operands are made with (a key of mxgate.conformance.poison.POISONS), or "copied".
    process: 0 is the child that also runs the build's other cases; every other number is a fresh child of its own. The
        launches of one process run in the order of the plan.
    fill: the byte that an `out=` buffer, and every fresh allocation the build makes, holds before the launch: an
        element that nobody wrote shows as a difference between launches with different fills.
    out: "none" (the build allocates), "plain" (`out=` is a contiguous buffer of the result's shape) or "pitched"
        (`out=` has a padded row pitch, with canary bytes in the gaps and on both sides). A build whose callable has no
        keyword `out` is launched with "none" instead, and those launches still count.
    model: of a build whose machine code is emulated, the arithmetic that its matrix core is to have; None: the usual
        one, which is all that other builds are launched with.
    """

    label: str
    variant: str = "nan"
    process: int = 0
    fill: int = FILL_NAN
    out: str = "none"
    model: str | None = None


@dataclass(frozen=True)
class Operands:
    """What a build is called with, plus what a judge needs.

    arrays: the positional arguments by the names of Op.operands, each C-contiguous: elements in the carrier dtype of
        their format, scales float8_e8m0fnu, offsets int32 [E]; for quantize {"x": array, "axis": int}.
    a, b: the two GEMM operands over the same memory (None for quantize). offsets: int32 [E] (None for quantize).
    extra: keyword arguments of the case: {"bias": float32 [E,N]} of a forward bias case, {"format": name} of a quantize
        case in another format than e4m3fn, else empty. A build that does not take the keyword declines the case.
    """

    arrays: Mapping[str, Any]
    a: MXArray | None = None
    b: MXArray | None = None
    offsets: NDArray[np.int32] | None = None
    extra: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Launch:
    """What came back from one launch.

    spec: as asked for, but for `out`: "none" where the callable takes no such keyword.
    error: None, or why there is no output ("killed by SIGSEGV", "no answer within 60 s", "exceeded 8 GiB",
        "raised ValueError: ...").
    output: empty on error; else the arrays that the build returned (one; quantize: elements and scales) in ml_dtypes or
        NumPy dtypes. Neither shape nor dtype has been checked: that is the contract gate's business.
    digest: digest(output), "" on error.
    canaries: what was overwritten outside the output, in words, or None.
    inputs_changed: the operands of which a token's byte changed. A build may zero padding bytes in place.
    aliases: the operand whose memory the output shares, or None.
    unavailable: the error is that the build cannot answer here, and what to do about it; nothing was judged.
    """

    spec: LaunchSpec
    error: str | None
    output: tuple[Array, ...]
    digest: str
    canaries: str | None = None
    inputs_changed: tuple[str, ...] = ()
    aliases: str | None = None
    unavailable: bool = False

    @property
    def label(self) -> str:
        return self.spec.label

    @property
    def variant(self) -> str:
        return self.spec.variant


@dataclass(frozen=True)
class Evidence:
    """All that a gate may look at: one build on one case.

    plan: the launches that were asked for. launches: those that came back, in the plan's order; the first is the base
        launch. A plan of which some launch never came back is inconclusive, never a pass.
    operands: the base launch's. answer: the oracle's Answer (quantize: the MXArray that the build's profile gives);
        None where the problem is too large for one and the gates use the Freivalds check instead.
    replayed: of a case on which the graph gate speaks, the evidence of other operands in the same buffers: a launch
        replayed from a graph, then a plain one. None where nothing was captured.
    ancestor: the base launch of the accepted build that this one replaces, on the same operands; compared: whether
        there should be one.
    """

    build: Build
    case: Case
    operands: Operands
    answer: Answer | MXArray | None
    plan: tuple[LaunchSpec, ...]
    launches: tuple[Launch, ...]
    ancestor: Launch | None = None
    compared: bool = True
    replayed: Evidence | None = None


def bytes_of(array: Array) -> NDArray[np.uint8]:
    """The bytes of a C-contiguous array, flat and without a copy."""
    return array.reshape(-1).view(np.uint8)


def digest(arrays: Iterable[Array]) -> str:
    """SHA-256 over dtype, shape and bytes of each array in turn."""
    total = hashlib.sha256()
    for array in arrays:
        total.update(f"{array.dtype.name}{array.shape};".encode())
        total.update(bytes_of(np.ascontiguousarray(array)).data)
    return total.hexdigest()


def launches_flydsl(build: Build) -> bool:
    """Of the emulated builds those that need FlyDSL launch through it; ours may run from committed machine code."""
    return is_emulated(build.device) and "flydsl" in build.requires
