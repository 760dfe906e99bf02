"""What the buffer holds past the last token: bytes that no result may depend on.

A dispatcher's buffer is longer than its tokens and nobody clears the rest. A kernel may read it, may even clear it in
place, but whatever it holds, the tokens' results must be the bytes that come from operands cut to the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from mxgate.oracle.formats import E8M0, SCALE_BIAS, SCALE_NAN, U8, Format, decode_table

# The operands cut to their tokens: not a poison but what every poison is compared with.
COPIED = "copied"
# What a real dispatcher left in a captured buffer.
STALE = "stale"


@dataclass(frozen=True)
class Poison:
    """What to write into every padding byte: elements(format, random bytes) and scales(random bytes) of one shape."""

    name: str
    elements: Callable[[Format, U8], U8]
    scales: Callable[[U8], U8]
    why: str


def _constant(code: int) -> Callable[[U8], U8]:
    return lambda random: np.full(random.shape, code, np.uint8)


def _nan(row: Format, random: U8) -> U8:
    """NaN codes, both signs where there are two; infinities too where the format has them."""
    bad = row.nan_codes + row.inf_codes
    return _choose(random, bad)


def _one(row: Format, random: U8) -> U8:
    return _choose(random, (int((decode_table(row) == 1.0).argmax()),))


def _max(row: Format, random: U8) -> U8:
    return _choose(random, (row.max_code, row.max_code | row.sign_bit))


def _choose(random: U8, codes: tuple[int, ...]) -> U8:
    return np.array(codes, np.uint8)[random % len(codes)]


_ROWS = (
    Poison("nan", _nan, _constant(SCALE_NAN), "what a training step really left there: 0 * NaN is NaN"),
    Poison("zero", lambda row, random: _constant(0)(random), _constant(0), "the mildest: shows who passes by luck"),
    Poison("one", _one, _constant(SCALE_BIAS), "ordinary numbers: no NaN to give a stray read away"),
    Poison("max", _max, _constant(E8M0.max_code), "overflows whatever it touches"),
    Poison("random", lambda row, random: random, lambda random: random, "any byte"),
)

POISONS: Mapping[str, Poison] = MappingProxyType({row.name: row for row in _ROWS})
