"""Group boundaries: offsets are the cumulative ends of the experts' groups; the first group starts at 0.

Every op takes them (the numeric contract's section 4), so they are checked here and nowhere else.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Offsets = NDArray[np.int32]


def check_offsets(offsets: Any, length: int, *, align: int = 1, experts: int | None = None) -> Offsets:
    """`offsets` itself, once it is known to be good: int32, one axis, at least one expert, 0 <= ... <= length.

    length: tokens the buffer holds. align: every boundary is a multiple of it (32 for wgrad, whose scale
    blocks run along the tokens). experts: how many ends there must be, where the weights say so.
    TypeError for anything but an int32 array; ValueError for a wrong shape or a wrong boundary.
    """
    if not isinstance(offsets, np.ndarray) or offsets.dtype != np.int32:
        found = getattr(offsets, "dtype", type(offsets).__name__)
        raise TypeError(f"offsets have type {found}; expected an int32 array of cumulative group ends")
    if offsets.ndim != 1 or offsets.size == 0:
        raise ValueError(f"offsets have shape {offsets.shape}; expected one axis with an end for every expert")
    if experts is not None and offsets.size != experts:
        raise ValueError(f"offsets hold {offsets.size} ends; expected {experts}, one for every expert")
    previous = 0
    for expert, end in enumerate(offsets.tolist()):
        if end < 0:
            raise ValueError(f"offsets[{expert}] is {end}; expected 0 or more")
        if end < previous:
            raise ValueError(f"offsets[{expert}] is {end}, below the end before it, {previous}; expected no decrease")
        if end > length:
            raise ValueError(f"offsets[{expert}] is {end}, past the buffer; expected at most {length}")
        if end % align:
            raise ValueError(f"offsets[{expert}] is {end}; expected a multiple of {align}, the scale block")
        previous = end
    return offsets


def spans(offsets: Offsets) -> list[tuple[int, int]]:
    """(start, end) of every group, empty ones included."""
    ends = [int(end) for end in offsets]
    return list(zip([0, *ends[:-1]], ends, strict=True))
