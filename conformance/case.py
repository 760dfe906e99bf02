"""A case: one op on one shape, routing and data family, with a readable id from which its seed comes.

`wgrad/64x96/ramp1.5/signature` says the op, the shape, the routing and the family; variations of the control case
follow after a plus sign (`+e5m2xe4m3fn`, `+float16`), a salt after an at sign (`@7`: the same case with other data).

The tables below list the cases of each tier. They vary one parameter at a time from a control case.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxgate.fixtures import CAPTURED, store
from mxgate.kernels.build import OPS, Build, registry
from mxgate.kernels.gpu import is_gpu

# Families on which every legitimate kernel gives the same bits.
EXACT = ("exact-sum", "signature", "all-codes", "all-scales", "special", "bias", "bias-sum", "subnormal", "far-scales")


@dataclass(frozen=True)
class Case:
    """n, k: the two weight dimensions. sizes: tokens per expert (E of them). buffer: M, at least sum(sizes).

    shape, routing, family: the names in the id. formats: of operand A and B (a quantize case: both the format).
    out_dtype: "bfloat16", "float16" or "float32". What fills the buffer past the tokens is a poison's business.

    A quantize case has an input [n,k], or [E,n,k] with E zeros for sizes; its routing names the axis ("axis0"), its
    out_dtype is the input's type, and it has no buffer. source: the file of a recorded case (recorded.py).
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
    source: str = ""

    @property
    def id(self) -> str:
        name = f"{self.op}/{self.shape}/{self.routing}/{self.family}"
        if self.formats != ("e4m3fn", "e4m3fn"):
            name += f"+{self.formats[0]}x{self.formats[1]}"
        if self.out_dtype != "bfloat16":
            name += f"+{self.out_dtype}"
        return name + (f"@{self.salt}" if self.salt else "")

    @property
    def kind(self) -> str:
        """The family whose rules hold: of "recorded-special", what is left of a special case, "special"."""
        return self.family.removeprefix("recorded-")

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


@lru_cache(maxsize=2)
def captured(step: str) -> Mapping[str, NDArray[Any]]:
    """The tensors of a captured training step, "early" or "late". StoreError when the file is missing or damaged."""
    return store.load(CAPTURED / f"{step}.safetensors")


def _crowd(*tokens: int) -> tuple[int, ...]:
    """264 experts, of which six hold these tokens: runs of 70, 56 and 126 empty ones, and numbers on both sides of
    127|128 and 255|256. Schedules that look at 32 experts at a time, or number them in a byte, end there."""
    sizes = [0] * 264
    for expert, size in zip((70, 127, 128, 255, 256, 263), tokens, strict=True):
        sizes[expert] = size
    return tuple(sizes)


# Tokens per expert: for wgrad (multiples of 32: a scale block belongs to one expert) and for the ops whose rows are
# tokens (any number).
ROUTINGS: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = MappingProxyType(
    {
        "uniform": ((128,) * 4, (64,) * 4),
        "ramp1.5": ((64, 96, 160, 192), (21, 36, 50, 65)),
        "skew2": ((256, 96, 64, 96), (86, 29, 31, 26)),
        # ramp1.5, inner experts exchanged: a plan kept by number of tokens, first, last or longest group is the same.
        "swapped": ((64, 160, 96, 192), (21, 50, 36, 65)),
        # Boundaries at 160, 288, 416 and 512: every inner one 32-aligned and none 128-aligned.
        "shift32": ((160, 128, 128, 96), (65, 43, 43, 11)),
        "empties": ((0, 0, 288, 0, 0, 32, 0, 0, 0), (0, 0, 133, 0, 0, 5, 0, 0, 0)),
        "one-takes-all": ((0, 0, 352, 0), (0, 0, 101, 0)),
        # As many experts as ramp1.5: what an earlier call left in memory of that shape would show.
        "all-empty": ((0,) * 4, (0,) * 4),
        # A rank that was sent nothing at all: operands without a row.
        "nothing": ((0,) * 4, (0,) * 4),
        "crowd": (_crowd(32, 64, 32, 96, 32, 64), _crowd(1, 33, 2, 31, 1, 7)),
        # As many tokens as a square weight has rows.
        "square": ((32, 32), (15, 17, 32)),
        # Long sums that end one block into a step of any length, or one before its end; the second begins with the last
        # byte of a scale word.
        "long": ((480, 1056), (57, 19)),
        # Offsets past 2^15 and 2^16.
        "far": ((512,) * 140, (511,) * 140),
        # For builds that take no other groups.
        "aligned256": ((256, 0, 512, 256), (256, 0, 512, 256)),
        "single": ((224,), (77,)),
        # 17 scale blocks, on which all-scales shows every byte.
        "17blocks": ((160, 0, 384), (16, 0, 17)),
        # Exactly on, one block (and one row) under and over each usual tile.
        "edges16": ((32, 64), (15, 16, 17, 48)),
        "edges64": ((32, 64, 96), (32, 63, 64, 65, 96)),
        "edges128": ((96, 128, 160), (96, 127, 128, 129, 160)),
        "edges256": ((224, 256, 288), (224, 255, 256, 257, 288)),
        "sizes1-128": ((32, 64, 96, 128), tuple(range(1, 129))),
        # Windows of every length in 128-token steps, odd and even.
        "steps": (tuple(range(32, 576, 32)), tuple(range(1, 35))),
        # More than 1,024 blocks of work: schedules change there.
        "many": (tuple(32 * (i % 3 == 1) for i in range(1100)), tuple(int(i % 3 == 1) for i in range(1100))),
        # One expert of m rows (wgrad: of m blocks).
        **{f"m{m}": ((32 * m,), (m,)) for m in (*range(1, 34), 48, 64, 96, 127, 128, 129, 192, 256, 384, 512, 1024)},
    }
)
# Tokens by which the buffer is longer, where it is not 96.
_SLACK = MappingProxyType({"uniform": 0, "nothing": 0, "square": 0, "one-takes-all": 320, "aligned256": 256})

# Expert layers of real models, N and K by name, and their routings: experts, and the mean in scale blocks, from half of
# which sizes ramp to 1.5 times it (one expert has the mean). 195,840 tokens together, or 8,192; 258,304, of which 8,072
# are the mean, or 8,096.
_LAYERS: Mapping[str, tuple[int, int, Mapping[str, tuple[int, float]]]] = MappingProxyType(
    {
        "16b": (1408, 2048, {"ramp1.5": (8, 765), "8192": (8, 32)}),
        "671b-up": (4096, 7168, {"ramp1.5": (32, 252.26), "single": (1, 253)}),
        "671b-down": (7168, 2048, {"single": (1, 253)}),
    }
)


def _sizes(shape: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in shape.split("x"))
    except ValueError:
        raise ValueError(f"shape {shape!r} is not NxK; expected such as 64x96") from None


def _case(
    op: str, shape: str, routing: str, family: str, formats: str = "e4m3fn e4m3fn", out_dtype: str = "bfloat16"
) -> Case:
    """One row of the tables below: `formats` are two names, or one for both."""
    a, b = (formats.split() * 2)[:2]
    if op == "quantize":
        *experts, n, k = captured("late")[shape].shape if family == "captured" else _sizes(shape)
        return Case(op, shape, routing, family, n, k, (0,) * sum(experts), 0, (a, b), out_dtype)
    if family == "captured":
        layer = captured(routing)
        _, n, k = layer[f"{shape}.w"].shape
        ends = layer[f"{shape}.offsets"].tolist()
        sizes, buffer = tuple(np.diff(ends, prepend=0).tolist()), layer[f"{shape}.x"].shape[0]
        return Case(op, shape, routing, family, n, k, sizes, buffer, (a, b), out_dtype)
    if shape in _LAYERS:
        n, k, routings = _LAYERS[shape]
        many, mean = routings[routing]
        sizes = tuple(32 * round(mean * (0.5 + (i / (many - 1) if many > 1 else 0.5))) for i in range(many))
    else:
        n, k = _sizes(shape)
        sizes = ROUTINGS[routing][0 if op == "wgrad" else 1]
    return Case(op, shape, routing, family, n, k, sizes, sum(sizes) + _SLACK.get(routing, 96), (a, b), out_dtype)


# Rows are (shape, routing, family) and, where they differ from the control case's, formats and output type. A shape is
# outputs x contraction, which for dgrad is KxN; of wgrad both numbers are outputs.
_Row = tuple[str, ...]
_SMOKE: tuple[_Row, ...] = (
    ("64x96", "ramp1.5", "exact-sum"),  # the control case
    ("64x96", "ramp1.5", "signature"),
    ("64x96", "shift32", "signature"),
    ("64x96", "empties", "signature"),
    ("64x96", "skew2", "exact-sum"),
    ("64x96", "swapped", "signature"),
    ("64x96", "one-takes-all", "exact-sum"),
    ("64x96", "all-empty", "exact-sum"),
    ("64x96", "nothing", "exact-sum"),
    ("16x32", "crowd", "signature"),
    ("64x64", "square", "signature"),  # N = K = M: who tells layouts apart by their shapes cannot
    *(("64x96", "aligned256", family) for family in ("signature", "normal", "special")),
    ("288x320", "single", "exact-sum"),  # more than one 256 x 256 tile
    ("272x288", "edges16", "exact-sum"),  # and of more than one expert
    ("64x96", "uniform", "all-codes"),
    ("64x96", "ramp1.5", "normal"),
    ("64x96", "ramp1.5", "heavy-tailed"),
    ("64x96", "ramp1.5", "cancellation"),
    ("64x96", "shift32", "special"),
    ("64x96", "shift32", "special", "e5m2"),
    ("64x96", "shift32", "special", "e4m3fnuz"),
    ("64x96", "ramp1.5", "signature", "e5m2 e4m3fn"),
    ("64x96", "ramp1.5", "exact-sum", "e4m3fnuz"),
    ("64x96", "uniform", "all-codes", "e5m2"),
    # Every format on either side, and the pair of the signature case the other way round.
    *(("64x96", "uniform", "all-codes", pair) for pair in ("e4m3fnuz e5m2fnuz", "e5m2fnuz e4m3fnuz", "e4m3fn e5m2")),
    ("64x96", "ramp1.5", "exact-sum", "e4m3fn", "float16"),
    ("64x96", "ramp1.5", "signature", "e4m3fn", "float16"),  # overflows float16
    ("64x96", "ramp1.5", "normal", "e4m3fn", "float32"),
    ("64x96", "ramp1.5", "subnormal"),
    ("64x96", "ramp1.5", "subnormal", "e4m3fn", "float16"),
    ("64x96", "ramp1.5", "far-scales"),
    ("64x96", "ramp1.5", "far-scales", "e4m3fn", "float32"),
    # Together with those above every gate has a case for a build that writes one output type alone.
    ("64x96", "empties", "normal", "e4m3fn", "float16"),
    ("64x96", "shift32", "special", "e4m3fn", "float16"),
    ("64x96", "empties", "signature", "e4m3fn", "float32"),
    ("64x96", "shift32", "special", "e4m3fn", "float32"),
    # And for one that takes one format alone.
    *(("64x96", "empties", "normal", format) for format in ("e5m2", "e4m3fnuz", "e5m2fnuz")),
    ("64x96", "shift32", "special", "e5m2fnuz"),
)
# Long sums in float32 show a narrow accumulator, in bfloat16 partial sums that are stored as results are; odd sizes
# what is done in sixteens, in fours and in pairs.
_SMOKE_OF: Mapping[str, tuple[_Row, ...]] = MappingProxyType(
    {
        "forward": (
            *(("16x544", "17blocks", "all-scales", format) for format in ("e4m3fn", "e5m2")),
            ("64x96", "empties", "bias"),
            ("64x96", "empties", "bias", "e4m3fn", "float32"),
            ("64x96", "ramp1.5", "bias-sum"),
            ("64x96", "ramp1.5", "bias-sum", "e4m3fn", "float32"),
            ("33x96", "ramp1.5", "signature"),
            ("47x1248", "long", "signature"),
            ("16x1024", "ramp1.5", "normal", "e4m3fn", "float32"),
        ),
        "dgrad": (
            *(("16x544", "17blocks", "all-scales", format) for format in ("e4m3fn", "e5m2")),
            ("33x96", "ramp1.5", "signature"),
            ("47x1248", "long", "signature"),
            ("16x1024", "ramp1.5", "normal", "e4m3fn", "float32"),
        ),
        "wgrad": (
            *(("32x48", "17blocks", "all-scales", format) for format in ("e4m3fn", "e5m2")),
            ("33x50", "ramp1.5", "signature"),
            ("42x47", "long", "signature"),
            ("32x48", "m64", "normal", "e4m3fn", "float32"),
            # For one that writes float32 alone and takes groups of 128 alone.
            *(("64x96", "aligned256", family, "e4m3fn", "float32") for family in ("signature", "normal", "special")),
        ),
    }
)
_CAPTURED_SMOKE = (("moe0.down", "early", "captured"), ("moe1.up", "late", "captured"))
_CAPTURED_FULL = tuple(
    (f"moe{i}.{m}", step, "captured") for i in (0, 1) for m in ("up", "down") for step in ("early", "late")
)

_PAIRS = ("e4m3fn e5m2", "e5m2", "e4m3fnuz e5m2fnuz", "e5m2fnuz e4m3fnuz", "e4m3fnuz", "e5m2fnuz")
_FULL: tuple[_Row, ...] = (
    ("64x96", "single", "exact-sum"),
    *(
        ("64x96", routing, "signature")
        for routing in ROUTINGS
        if routing[0] != "m" and routing not in ("17blocks", "nothing", "crowd", "square", "far")
    ),
    *(("64x96", routing, "exact-sum") for routing in ("shift32", "empties", "edges128", "edges256", "steps")),
    ("16x32", "many", "signature"),
    ("16x32", "far", "signature"),
    *(
        (shape, "ramp1.5", "signature")
        for shape in ("64x32", "64x64", "64x128", "64x160", "64x224", "64x256", "64x1024")
    ),
    *((shape, "ramp1.5", "signature") for shape in ("16x96", "32x96", "48x96", "80x96", "112x96", "128x96", "144x96")),
    *((shape, "edges128", "exact-sum") for shape in ("128x128", "256x256", "272x256", "240x512", "512x288")),
    *((f"{256 * tiles}x32", "single", "exact-sum") for tiles in range(1, 21)),
    *((f"32x{256 * tiles}", "single", "exact-sum") for tiles in range(1, 21)),
    *((shape, "single", "exact-sum") for shape in ("768x1280", "1280x768", "1792x512", "544x1056")),
    *(("64x96", f"m{m}", "signature") for m in (*range(1, 34), 48, 64, 96, 127, 128, 129, 192, 256, 384, 512, 1024)),
    *(("64x96", "ramp1.5", "signature", formats) for formats in _PAIRS),
    *(("64x96", "shift32", "special", formats) for formats in _PAIRS),
    *(("64x96", "ramp1.5", "normal", formats) for formats in _PAIRS),
    *(("64x96", "edges256", family) for family in ("normal", "heavy-tailed", "cancellation")),
    *(("64x96", "empties", family) for family in ("normal", "special")),
    ("64x96", "ramp1.5", "signature", "e4m3fn", "float32"),
    ("64x96", "ramp1.5", "heavy-tailed", "e4m3fn", "float32"),
    ("64x96", "ramp1.5", "normal", "e4m3fn", "float16"),
)
_FULL_OF: Mapping[str, tuple[_Row, ...]] = MappingProxyType(
    {
        **{
            op: (
                *((f"{n}x32", "edges16", "signature") for n in (*range(1, 32), 67, 135, 143, 257)),
                *((f"16x{k}", "edges16", "signature") for k in (*range(288, 1056, 32), 4096)),
                *(("256x96", "uniform", "all-codes", formats) for formats in ("e4m3fn", *_PAIRS)),
                *(("16x544", "17blocks", "all-scales", formats) for formats in _PAIRS),
            )
            for op in ("forward", "dgrad")
        },
        "wgrad": (
            *((f"{n}x{33 - n}", "edges16", "signature") for n in range(1, 33)),
            *((f"{n}x{400 - n}", "edges16", "signature") for n in (67, 143, 257, 265, 333)),
            *(("64x256", "uniform", "all-codes", formats) for formats in ("e4m3fn", *_PAIRS)),
            *(("32x48", "17blocks", "all-scales", formats) for formats in _PAIRS),
        ),
    }
)
# No signature cases: with scales spread that far the exact elements that a Freivalds check needs take minutes.
_PRODUCTION: Mapping[str, tuple[_Row, ...]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("forward", "dgrad"),
            (("16b", "ramp1.5", "exact-sum"), ("671b-up", "single", "exact-sum"), ("671b-down", "single", "exact-sum")),
        ),
        "wgrad": (
            ("16b", "ramp1.5", "exact-sum"),
            ("16b", "ramp1.5", "normal"),
            ("671b-up", "single", "exact-sum"),
            ("671b-up", "single", "normal"),
            ("671b-down", "single", "exact-sum"),
        ),
        "quantize": (("4096x7168", "axis1", "normal"), ("4096x7168", "axis0", "normal")),
    }
)

_QUANTIZE_SMOKE: tuple[_Row, ...] = (
    ("64x96", "axis1", "normal"),  # the control case
    ("64x96", "axis0", "normal"),
    ("4x64x96", "axis1", "normal"),
    ("4x64x96", "axis2", "normal"),
    ("64x96", "axis1", "normal", "e4m3fn", "float32"),
    ("64x96", "axis1", "normal", "e4m3fn", "float16"),
    ("64x96", "axis1", "heavy-tailed"),
    ("64x160", "axis1", "normal"),  # an odd number of blocks
    # Odd numbers of rows, and of blocks; both axes of a square.
    ("33x224", "axis1", "normal"),
    ("96x37", "axis0", "heavy-tailed"),
    ("3x64x35", "axis1", "normal", "e4m3fn", "float32"),
    ("32x6x50", "axis0", "normal"),
    *(("96x96", axis, "normal") for axis in ("axis0", "axis1")),
    ("32x64x96", "axis0", "normal", "e4m3fn", "float32"),
    ("64x96", "axis0", "heavy-tailed", "e5m2"),
    ("64x192", "axis1", "special"),
    ("4x64x96", "axis2", "special", "e4m3fn", "float32"),
    ("64x96", "axis0", "special", "e4m3fn", "float32"),
    ("64x96", "axis1", "special", "e4m3fn", "float16"),
    *(("64x96", "axis1", "special", format) for format in ("e5m2", "e4m3fnuz", "e5m2fnuz")),
    ("64x96", "axis1", "tiny", "e4m3fn", "float32"),
    ("64x96", "axis1", "midpoints", "e4m3fn", "float32"),
    ("64x1024", "axis1", "edges", "e4m3fn", "float32"),
    ("64x1024", "axis1", "maxima"),
    ("64x96", "axis1", "midpoints", "e5m2", "float32"),
    ("64x96", "axis1", "midpoints", "e4m3fnuz", "float32"),
    ("64x96", "axis1", "midpoints", "e5m2fnuz", "float32"),
    ("moe1.up.dy", "axis1", "captured"),
    ("moe1.up.x", "axis0", "captured"),
)
_QUANTIZE_FULL: tuple[_Row, ...] = (
    *(("1024x1024", "axis1", "maxima", formats) for formats in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")),
    *(("256x864", "axis0", "edges", formats, "float32") for formats in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")),
    ("256x864", "axis1", "edges"),
    ("64x96", "axis1", "tiny"),
    ("64x96", "axis1", "tiny", "e4m3fn", "float16"),
    ("64x96", "axis0", "tiny", "e5m2", "float32"),
    ("32x32", "axis0", "normal"),
    ("4x64x96", "axis1", "special"),
)

TIERS = ("smoke", "full", "production")
# The full grid of a GPU kernel, seconds a launch on the emulator: a tier asks it of these builds alone.
FULL_GRID: _Row = ("16b", "8192", "exact-sum")
_RUNGS = ("wgrad/flydsl_simplest", "wgrad/flydsl_plain", "wgrad/flydsl")
_FULL_GRID_OF: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"smoke": _RUNGS[-1:], "full": _RUNGS, "production": _RUNGS[-1:]}
)
# Cases that cost an emulated build seconds: below the full tier they are asked of one rung, as the full grid is.
_ONE_RUNG = (
    ("16x32", "crowd"),
    ("42x47", "long"),
    ("64x64", "square"),
    ("64x96", "swapped"),
    ("272x288", "edges16"),
)
# A whole layer of the 671B model, ten minutes a launch on a CPU: the production tier asks it of builds for a GPU alone.
_WHOLE: Mapping[str, tuple[_Row, ...]] = MappingProxyType(
    {
        "forward": (("671b-up", "ramp1.5", "exact-sum"),),
        "dgrad": (("671b-up", "ramp1.5", "exact-sum"),),
        "wgrad": (("671b-up", "ramp1.5", "exact-sum"), ("671b-up", "ramp1.5", "normal")),
    }
)


def _rows(op: str, tier: str) -> tuple[_Row, ...]:
    if tier == "production":
        return _PRODUCTION[op]
    if op == "quantize":
        return _QUANTIZE_SMOKE + (_QUANTIZE_FULL if tier == "full" else ())
    smoke = _SMOKE + _SMOKE_OF[op] + _CAPTURED_SMOKE
    return smoke if tier == "smoke" else smoke + _FULL + _FULL_OF[op] + _CAPTURED_FULL


@lru_cache(maxsize=16)
def cases(op: str | None = None, tier: str = "smoke") -> tuple[Case, ...]:
    """The cases of one op, or of all, in a tier; "full" includes "smoke". ValueError for an unknown op or tier."""
    if tier not in TIERS:
        raise ValueError(f"no tier named {tier!r}; expected one of {', '.join(TIERS)}")
    if op is None:
        return tuple(case for name in OPS for case in cases(name, tier))
    if op not in OPS:
        raise ValueError(f"no op named {op!r}; expected one of {', '.join(OPS)}")
    found: dict[str, Case] = {}
    for shape, *rest in _rows(op, tier):
        if op == "dgrad" and shape[0].isdigit() and shape not in _LAYERS:
            shape = "x".join(reversed(shape.split("x")))
        case = _case(op, shape, *rest)
        found.setdefault(case.id, case)
    return tuple(found.values())


def own_cases(builds: Iterable[Build], tier: str) -> tuple[Case, ...]:
    """The cases that a tier has for some builds alone, those of `builds`: the full grid, and a whole 671B layer."""
    chosen = list(builds)
    rows = [("wgrad", FULL_GRID)] if any(b.id in _FULL_GRID_OF[tier] for b in chosen) else []
    if tier == "production":
        rows += [(b.op, row) for b in chosen if is_gpu(b.device) for row in _WHOLE.get(b.op, ())]
    return tuple(_case(op, *row) for op, row in dict.fromkeys(rows))


def asked(case: Case, build: Build, tier: str) -> bool:
    """Whether a tier asks a case of a build. One from outside is asked what its user chose for its op."""
    if case.op != build.op:
        return False
    named = (case.shape, case.routing)
    grid, whole = named == FULL_GRID[:2], any(named == row[:2] for row in _WHOLE.get(case.op, ()))
    grid |= build.id in _RUNGS and named in _ONE_RUNG
    if not (grid or whole) or build.id not in registry():
        return True
    return build.id in _FULL_GRID_OF[tier] if grid else is_gpu(build.device)


def salted(case: Case, salt: int) -> Case:
    """The same case with other data: salt 0 is the listed one."""
    return replace(case, salt=salt)


def rerouted(case: Case) -> Case:
    """Another problem for the same buffers: other tokens and, but for quantize, other groups with fewer of them."""
    sizes = [*case.sizes[1:], *case.sizes[:1]]
    if any(sizes):
        sizes[sizes.index(max(sizes))] -= gcd(*sizes)
    return replace(case, sizes=tuple(sizes), salt=case.salt + 1)


def case_by_id(id: str) -> Case:
    """The case of any tier with that id; `@7` at its end salts it. ValueError says what comes closest."""
    name, at, salt = id.partition("@")
    if at and not (salt.isdigit() and salt.isascii()):
        raise ValueError(f"case {id!r}: the salt {salt!r} is not a number; expected such as {name}@7")
    whole = [_case(op, *row) for op, rows in _WHOLE.items() for row in rows]
    listed = (*(case for tier in TIERS for case in cases(None, tier)), _case("wgrad", *FULL_GRID), *whole)
    known = {case.id: case for case in listed}
    if name not in known:
        near = difflib.get_close_matches(name, known, 1, 0.0)
        raise ValueError(f"no case named {name!r}; expected one that `mxgate list cases` prints, such as {near[0]}")
    return salted(known[name], int(salt or 0))
