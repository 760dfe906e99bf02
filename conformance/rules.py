"""The acceptance rules in common use, for comparison: what they let through is why this project has gates.

Each takes the output and the true result as float64 arrays of one shape and says whether the rule would accept, written
the way such tests are written: over the whole tensor at once. None of them is used by a gate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from mxgate.conformance.gates import decoded, owned, usable
from mxgate.conformance.launch import Evidence
from mxgate.oracle import MXArray
from mxgate.oracle.bound import round_to

F64 = NDArray[np.float64]


def sqnr(out: F64, true: F64) -> bool:
    """Signal to quantization noise of at least 27 dB."""
    noise = float(np.square(out - true).sum())
    return noise == 0 or 10 * np.log10(float(np.square(true).sum()) / noise) >= 27


def calc_diff(out: F64, true: F64) -> bool:
    """1 - 2 <x, y> / (<x, x> + <y, y>) below 1e-3."""
    both = float((out * out + true * true).sum())
    return both == 0 or 1 - 2 * float((out * true).sum()) / both < 1e-3


def allclose(out: F64, true: F64) -> bool:
    """|x - y| <= 1e-2 + 1e-2 |y|, with 5 % of the elements allowed to miss."""
    return float((np.abs(out - true) <= 1e-2 + 1e-2 * np.abs(true)).mean()) >= 0.95 if out.size else True


def cosine(out: F64, true: F64) -> bool:
    """Cosine similarity above 0.99."""
    norms = float(np.sqrt(np.square(out).sum() * np.square(true).sum()))
    return norms == 0 or float((out * true).sum()) / norms > 0.99


RULES: Mapping[str, Callable[[F64, F64], bool]] = MappingProxyType(
    {"SQNR >= 27 dB": sqnr, "calc_diff < 1e-3": calc_diff, "allclose 1e-2, 5 %": allclose, "cosine > 0.99": cosine}
)


def verdicts(e: Evidence) -> Mapping[str, bool | None]:
    """What each rule says of the base launch; None where the case has nothing for it to look at (no token, or a result
    that is not finite, which such tests do not use). An output that is missing or of another shape or dtype fails."""
    if e.answer is None:
        return dict.fromkeys(RULES)
    if not e.launches or not usable(e, e.launches[0]):
        return dict.fromkeys(RULES, False)
    output = e.launches[0].output
    if isinstance(e.answer, MXArray):
        out = decoded(e.case, output[0], output[1])
        true = decoded(e.case, e.answer.elements, e.answer.scales)
    else:
        # Against the true result in the output's own type, which is what such tests have.
        out = owned(e.case, output[0]).astype(np.float64)
        true = round_to(owned(e.case, e.answer.value), output[0].dtype).astype(np.float64)
    if not true.size or not np.isfinite(true).all():
        return dict.fromkeys(RULES)
    with np.errstate(all="ignore"):
        return {name: bool(rule(out, true)) for name, rule in RULES.items()}
