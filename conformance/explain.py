"""From evidence and a finding to what probably went wrong.

The wrong output is held against a few hundred mistakes, each a small change to a plain model (hypotheses.py). Of those
that give every bit, launches whose padding held other bytes rule out some: a NaN that leaks in looks the same from
wherever it came, zeros in its place do not. One that is left alone is named as certain, several as ones that fit alike:
on few blocks the end of a group that comes too early and a last block that is lost are the same mistake. What none of
them gives is decoded row by row: the factors of a row's scales are solved for and looked up in the scale plane.

A cause is a help for whoever looks for the mistake. No verdict depends on one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mxgate.conformance.gates import decoded, owned, usable
from mxgate.conformance.hypotheses import BLOCK, NAMES, View, cut, factors, hypotheses, values, view_of
from mxgate.conformance.launch import Array, Evidence, Launch
from mxgate.conformance.verdict import Finding
from mxgate.conformance.where import AXES, TILE, Bool, among, bits, groups, place, steps, tile_map, unequal, worst_tile
from mxgate.oracle import ACCUMULATORS, PROFILES, SCALE_RULES, Answer, MXArray, quantize
from mxgate.oracle.bound import outside, round_to
from mxgate.oracle.formats import FORMATS, float32_bits

WORK = 1 << 27  # multiply-adds above which no hypothesis is tried


@dataclass(frozen=True)
class Cause:
    """sentence: what went wrong. confidence: "certain" (it gives every bit, and nothing else that is known does), "one
    of 3 that fit" (so do others, which nothing here tells apart from it), "likely" or "possible"."""

    sentence: str
    confidence: str


@dataclass(frozen=True)
class Explanation:
    """where: the first differences. facts: where they lie. tiles: a map of the worst expert, in characters. causes: the
    best first; none where nothing fits."""

    gate: str
    what: str
    where: tuple[str, ...]
    facts: tuple[str, ...]
    tiles: tuple[str, ...]
    causes: tuple[Cause, ...]

    def lines(self) -> tuple[str, ...]:
        """For people."""
        told = [f"likely cause ({c.confidence}): {c.sentence}" for c in self.causes]
        return (
            *self.where,
            *self.facts,
            *self.tiles,
            *(told or ["likely cause: none of the known mistakes gives these bits"]),
        )


def explain(e: Evidence, finding: Finding) -> tuple[str, ...]:
    """The lines of explanation(e, finding)."""
    return explanation(e, finding).lines()


def explanation(e: Evidence, finding: Finding) -> Explanation:
    """What can be said of a finding from its evidence."""
    label = finding.detail.get("launch")
    launch = next((x for x in e.launches if x.label == label), e.launches[0] if e.launches else None)
    facts: tuple[str, ...] = ()
    tiles: tuple[str, ...] = ()
    causes: tuple[Cause, ...] = ()
    if launch is not None and usable(e, launch) and finding.count:
        if isinstance(e.answer, MXArray):
            facts, causes = _quantizer(e, launch, e.answer)
        elif isinstance(e.answer, Answer):
            facts, tiles, causes = _gemm(e, launch, e.answer, finding)
    if not causes and (cause := guess(finding)) is not None:
        causes = (cause,)
    return Explanation(finding.gate, finding.what, finding.where, facts, tiles, causes)


def guess(finding: Finding) -> Cause | None:
    """What a finding's words alone suggest."""
    return next((Cause(cause, "possible") for word, cause in _WORDS if word in finding.what), None)


_WORDS = (
    ("SIGSEGV", "it reads or writes past the end of an operand or of its output; each ends at a guard page"),
    ("SIGBUS", "it reads or writes past the end of an operand or of its output; each ends at a guard page"),
    ("no answer within", "an endless loop, or a barrier or a lock that not everyone reaches"),
    ("exceeded", "scratch memory that grows with the case, or a size computed from something else than the shape"),
    ("past the last offset", "rows after the last group are not stored, or stored with the last group's"),
    ("out= is", "the caller's buffer is not written, or not with its strides"),
    ("memory held", "elements are not stored, or what memory held before is added to them"),
    ("returned", "the output's shape or type follows something else than the contract"),
    ("changed its inputs", "it writes to an operand's tokens; only bytes past the last token may be cleared in place"),
    ("are not +0", "an empty expert is given a sum or a stale accumulator, and no store of zeros"),
    ("HazardError", "a wait or a barrier is missing there, or comes too late"),
    ("raised", "it is called with what it does not take: an operand's type or shape, an expert without tokens"),
)


# ---------------------------------------------------------------------------------------------------------------------
# Where the differences lie


def _facts(e: Evidence, got: Array, want: Array, wrong: Bool) -> tuple[str, ...]:
    """Counts by expert, the rows and columns concerned, the worst tile, the largest distance."""
    parts = groups(e.case, wrong)
    bad = [(g, part) for g, part in parts if part.any()]
    counts = ", ".join(f"{g}: {np.count_nonzero(part)}" for g, part in bad[:12]) + (" ..." if len(bad) > 12 else "")
    facts = [f"wrong elements by expert: {counts}; {len(parts) - len(bad)} of {len(parts)} experts are right"]
    axes = AXES[e.case.op]
    for g, part in bad[:3]:
        rows, columns = np.flatnonzero(part.any(axis=1)), np.flatnonzero(part.any(axis=0))
        of = f"expert {g}: {among(rows, part.shape[0], axes[0])}, {among(columns, part.shape[1], axes[1])}"
        facts.append(f"{of}{'; rows counted from the start of the group' if axes[0] == 'row' else ''}")
    g, (count, i0, j0) = _worst(bad)
    facts.append(f"worst {TILE}x{TILE} tile: expert {g}, {axes[0]} {i0}.., {axes[1]} {j0}..: {count} wrong")
    x, y = got.astype(np.float64), want.astype(np.float64)
    finite = wrong & np.isfinite(x) & np.isfinite(y)
    if finite.any():
        distance = np.where(finite, steps(got, want), 0)
        at = np.unravel_index(int(distance.argmax()), distance.shape)
        facts.append(f"farthest from the exact answer: {distance.max()} ulp, {place(e.case, [int(k) for k in at])}")
    if nan := int(np.count_nonzero(wrong & np.isnan(x))):
        facts.append(f"{nan} of the wrong elements are NaN")
    return tuple(facts)


def _worst(parts: Iterable[tuple[int, Bool]]) -> tuple[int, tuple[int, int, int]]:
    """(expert, its worst tile) of the tile that is wrong most."""
    return max(((g, worst_tile(part)) for g, part in parts), key=lambda found: found[1][0])


def _tiles(e: Evidence, wrong: Bool) -> tuple[str, ...]:
    """A map of the expert with the worst tile; nothing where it is a single tile."""
    parts = dict(groups(e.case, wrong))
    g, _ = _worst(parts.items())
    side, rows = tile_map(parts[g])
    if len(rows) * len(rows[0]) < 2:
        return ()
    down, across = AXES[e.case.op]
    head = (
        f"expert {g} in tiles of {side}x{side}, {down} down, {across} across (. right, 1-9 tenths wrong, # all wrong):"
    )
    return (head, *(f"  {row}" for row in rows))


# ---------------------------------------------------------------------------------------------------------------------
# Causes


Told = tuple[tuple[str, ...], tuple[str, ...], tuple[Cause, ...]]


def _gemm(e: Evidence, launch: Launch, answer: Answer, finding: Finding) -> Told:
    """(facts, tiles, causes) of a launch, held against the exact answer.

    Where two launches differ, or two builds, the one with wrong numbers is explained, if there is one.
    """
    if finding.gate not in ("exact", "bounded", "empty", "special"):
        suspects = [launch, *(x for x in e.launches if usable(e, x) and x.variant != launch.variant), e.launches[0]]
        wrong_ones = [x for x in suspects if outside_of(e, answer, owned(e.case, x.output[0]))]
        if not wrong_ones:
            other = e.ancestor if finding.gate == "lineage" and e.ancestor is not None else e.launches[0]
            if other is launch:
                other = next((x for x in e.launches if usable(e, x) and x.digest != launch.digest), launch)
            most = int(steps(owned(e.case, launch.output[0]), owned(e.case, other.output[0])).max(initial=0))
            what = f"both results are right, {most} ulp apart at most: sums are added, or rounded, in another order"
            return (), (), (Cause(what, "possible"),) if most else ()
        launch = wrong_ones[0]
    out = owned(e.case, launch.output[0])
    want = round_to(owned(e.case, answer.value), out.dtype)
    wrong = unequal(out, want)
    if not wrong.any():
        return (), (), ()
    causes = _causes(e, launch, answer, out, want, wrong)
    if not causes and finding.gate == "padding":
        causes = (Cause("bytes past the last token take part in tokens' sums (0 * NaN is NaN)", "likely"),)
    return (f"launch {launch.label!r}:", *_facts(e, out, want, wrong)), _tiles(e, wrong), causes


def outside_of(e: Evidence, answer: Answer, out: Array, accumulator: str | None = None) -> int:
    """How many elements are outside the interval of an accumulator (the build's own if not given)."""
    lo, hi = (owned(e.case, x) for x in answer.interval(accumulator or e.build.accumulator, out.dtype))
    return int(np.count_nonzero(outside(out, lo, hi)))


def _causes(e: Evidence, launch: Launch, answer: Answer, out: Array, want: Array, wrong: Bool) -> tuple[Cause, ...]:
    """The hypotheses that give these bits; failing that, what parts of the output say; failing that, what is close."""
    if e.case.n * e.case.k * max(e.case.tokens, 1) > WORK:
        return ()
    nan = np.isnan(out.astype(np.float64))
    view = view_of(e, launch)
    scored: list[tuple[int, str]] = []
    stored: list[str] = []
    for hypothesis in hypotheses(e, launch, view, want, bool(nan[wrong].all())):
        if hypothesis.stored is not None and bool((bits(out) == bits(hypothesis.stored)).all()):
            stored.append(hypothesis.sentence)
        # Much that goes wrong gives nothing but NaN: what gives nothing else names no cause.
        if hypothesis.stored is None and not nan.all():
            guess = hypothesis.output(view, out.dtype)
            scored.append((int(np.count_nonzero(unequal(out, guess))), hypothesis.sentence))
    exact = [sentence for missed, sentence in scored if missed == 0]
    if stored and not (exact and out.astype(np.float64).any()):  # a fact, whatever else gives nothing but zeros
        return (Cause(stored[0], "certain"),)
    if nan.all() and np.isnan(want.astype(np.float64)).any():
        return (Cause("every element is NaN, and the operands hold a few: one NaN spreads over the result", "likely"),)
    if nan.all():
        held = f"every element is NaN: memory that held 0x{launch.spec.fill:02x} before is read or added to"
        return (Cause(held + ", or a NaN scale takes part in every sum", "possible"),)
    if exact:
        return _fitting(e, launch, view, [*stored[:1], *exact], want)
    found = (
        _stale(e, launch, out, wrong)
        or _other_expert(e, out, want, wrong)
        or _decode_rows(e, view, out, wrong)
        or _copied_tile(e, out, want, wrong)
    )
    if found:
        return found
    same = [x for x in e.launches if replace(x.spec, label="", process=0) == replace(launch.spec, label="", process=0)]
    if any(usable(e, x) and x.digest != launch.digest for x in same):
        return (Cause("launches of the same bytes differ: a race, or state kept from one to the next", "likely"),)
    far = np.abs(out.astype(np.float64) - want.astype(np.float64))
    if e.case.op == "wgrad" and bool((far <= 2.0**-30 * owned(e.case, answer.magnitude))[wrong].all()):
        what = "products near 2^-60 are added: a mask of 0x00 is 2^-127, and only one operand's scales are masked"
        return (Cause(what, "likely"),) if (want[wrong] == 0).any() else ()
    for name in ACCUMULATORS:
        if name != "exact" and outside_of(e, answer, out, name) == 0:
            return (Cause(f"rounding: all elements are inside the interval of accumulator {name}", "likely"),)
    missed, sentence = min(scored, default=(wrong.size, ""))
    count = int(np.count_nonzero(wrong))
    if missed * 20 <= count and missed * 50 <= wrong.size:
        return (Cause(f"{sentence} ({missed} of {count} wrong elements are then left)", "likely"),)
    return ()


def _fitting(e: Evidence, launch: Launch, view: View, exact: Sequence[str], want: Array) -> tuple[Cause, ...]:
    """Which of the hypotheses that give a launch's bits also give those of a launch with each other padding."""
    left, whole = list(dict.fromkeys(exact)), True
    for other in {x.variant: x for x in reversed(e.launches) if usable(e, x) and x.variant != launch.variant}.values():
        seen, out = view_of(e, other), owned(e.case, other.output[0])
        if seen.a.shape != view.a.shape:  # operands cut to their tokens: a mistake is worded by its planes
            continue
        again = (h for h in hypotheses(e, other, seen, want, True) if h.sentence in left)
        fits = {h.sentence for h in again if not unequal(out, h.output(seen, out.dtype)).any()}
        left, whole = [sentence for sentence in left if sentence in fits] or left, whole and bool(fits)
    if len(left) > 1:
        return tuple(Cause(sentence, f"one of {len(left)} that fit") for sentence in left[:4])
    return (Cause(left[0], "certain" if whole else "likely"),)


def _stale(e: Evidence, launch: Launch, out: Array, wrong: Bool) -> tuple[Cause, ...]:
    """Elements that were not stored, or that belong to experts without tokens."""
    fill = np.full(out.dtype.itemsize, launch.spec.fill, np.uint8).view(out.dtype)
    if bool((bits(out)[wrong] == bits(fill)[0]).all()):
        return (Cause("the wrong elements are never stored: they hold what memory held before", "certain"),)
    empty = np.array([size == 0 for size in e.case.sizes])
    if e.case.op == "wgrad" and not wrong[~empty].any():
        return (Cause("only experts without tokens are wrong: they hold sums of another expert or launch", "likely"),)
    return ()


def _other_expert(e: Evidence, out: Array, want: Array, wrong: Bool) -> tuple[Cause, ...]:
    """Each wrong gradient is that of another expert."""
    if e.case.op != "wgrad":
        return ()
    found: list[str] = []
    for g in np.flatnonzero(wrong.any(axis=(1, 2))).tolist():
        source = [h for h in range(len(want)) if h != g and not unequal(out[g], want[h]).any()]
        if not source:
            return ()
        found.append(f"{source[0]} for {g}")
    return (Cause(f"gradients are stored in another expert's place: {', '.join(found[:8])}", "certain"),)


@dataclass(frozen=True)
class Read:
    """A scale byte that was used where another belonged. row: in its plane (of b: expert * rows + row)."""

    row: int
    block: int
    used: int | None  # None: the block is missing from the sum


# (rows, blocks) away, the nearest first.
_NEAR = sorted(
    ((dr, dj) for dr in range(-16, 17) for dj in range(-8, 9) if dr or dj), key=lambda d: (abs(d[0]) + abs(d[1]), d)
)


def _hints(plane: NDArray[np.uint8], row: int, first: int, block: int) -> list[int]:
    """How much larger the exponents of the scales around (row, first + block) are, the nearest first."""
    own = int(plane[row, first + block])
    near = (_at(plane, Read(row, first + block, None), *d) for d in _NEAR[:8])
    return [byte - own for byte in near if byte is not None]


def _decode_rows(e: Evidence, view: View, out: Array, wrong: Bool) -> tuple[Cause, ...]:
    """Solve each wrong row (else each wrong column) for the factors of its blocks, and look the scales up."""
    for side in (0, 1):
        reads: list[Read] = []
        solved = 0
        plane = (view.sa if side == 0 else view.sb).reshape(-1, view.sa.shape[-1])
        for (g, part), (_, got) in zip(groups(e.case, wrong), groups(e.case, out), strict=True):
            x = cut(view, g)
            both = (values(x.a, x.sa, view.formats[0]), values(x.b, x.sb, view.formats[1]))
            mine, theirs = both[side], both[1 - side]
            seen, bad = (got, part) if side == 0 else (got.T, part.T)
            for i in np.flatnonzero(bad.any(axis=1)).tolist()[: max(0, 24 - solved)]:
                line = seen[i]

                def agrees(sums: NDArray[np.float64], line: Array = line) -> bool:
                    return not unequal(line, round_to(sums, line.dtype)).any()

                start = view.spans[g][0]
                row = i if view.op == "wgrad" else i + (start if side == 0 else view.weights[g] * view.b.shape[1])
                first = start // BLOCK if view.op == "wgrad" else 0
                f = factors(mine[i], theirs, agrees, line.astype(np.float64), partial(_hints, plane, row, first))
                if f is None:
                    reads.clear()
                    break
                solved += 1
                used = (x.sa, x.sb)[side][i].astype(int) + np.log2(np.maximum(f, 1e-300)).round().astype(int)
                reads += [Read(row, first + j, int(used[j]) if f[j] else None) for j in range(f.size) if f[j] != 1]
            else:
                continue
            break
        if reads:
            return tuple(_told(view, side, reads))
    return ()


def _told(view: View, side: int, reads: list[Read]) -> Iterator[Cause]:
    """The reads in words: one rule for all where there is one, else the first few."""
    name = NAMES[view.op][side]
    plane = (view.sa if side == 0 else view.sb).reshape(-1, view.sa.shape[-1])
    places = ", ".join(_where(view, side, r) for r in reads[:3]) + (f" ... ({len(reads)})" if len(reads) > 3 else "")
    if all(r.used is None for r in reads):
        # A scale far too small leaves nothing of its block either.
        small = {d: [(_at(plane, r, *d) or 255) < int(plane[r.row, r.block]) - 20 for r in reads] for d in _NEAR[:4]}
        tiny = [d for d in _NEAR[:4] if all(small[d])]
        too_small = f", or have a scale far too small, such as that {_away(*tiny[0])}" if tiny else ""
        yield Cause(f"products are missing from the sum{too_small}: {name} {places}", "certain")
        return
    known = [r for r in reads if r.used is not None]
    if len({r.used for r in known}) == 1 and len({int(plane[r.row, r.block]) for r in known}) > 1:
        yield Cause(f"{name} uses the scale byte {known[0].used} instead of its own: {places}", "certain")
        return
    for dr, dj in _NEAR:
        if (len(known) > 1 or len(reads) == 1) and all(_at(plane, r, dr, dj) == r.used for r in known):
            yield Cause(f"{name} uses the scale {_away(dr, dj)} instead of its own: {places}", "certain")
            return
    factors_ = {(r.used or 0) - int(plane[r.row, r.block]) for r in known}
    if len(factors_) == 1 and len(reads) > 3:
        by = factors_.pop()
        yield Cause(f"products are 2^{by} times what they should be: {name} {places}", "certain")
        return
    said = []
    for read in reads[:3]:
        if read.used is None:
            said.append(f"{_where(view, side, read)} is missing from the sum")
            continue
        right = int(plane[read.row, read.block])
        near = next((d for d in _NEAR if _at(plane, read, *d) == read.used), None) if len(reads) <= 3 else None
        source = f", which is the one {_away(*near)}" if near else ""
        twice = " (or its products are counted twice)" if read.used == right + 1 else ""
        said.append(f"{_where(view, side, read)} uses the scale byte {read.used} instead of {right}{source}{twice}")
    more = f" ... ({len(reads)})" if len(reads) > 3 else ""
    yield Cause(f"{name}: {'; '.join(said)}{more}", "certain")


def _at(plane: NDArray[np.uint8], read: Read, dr: int, dj: int) -> int | None:
    r, j = read.row + dr, read.block + dj
    return int(plane[r, j]) if 0 <= r < plane.shape[0] and 0 <= j < plane.shape[1] else None


def _away(dr: int, dj: int) -> str:
    """ "1 row after", "2 blocks before", "1 row after and 1 block before"."""
    parts = [
        f"{abs(d)} {what}{'s' * (abs(d) > 1)} {'after' if d > 0 else 'before'}"
        for d, what in ((dr, "row"), (dj, "block"))
        if d
    ]
    return " and ".join(parts)


def _where(view: View, side: int, read: Read) -> str:
    if side == 1 and view.op != "wgrad":
        expert, row = divmod(read.row, view.b.shape[1])
        return f"expert {expert} row {row} block {read.block}"
    return f"row {read.row} block {read.block}"


def _copied_tile(e: Evidence, out: Array, want: Array, wrong: Bool) -> tuple[Cause, ...]:
    """A 16 x 16 tile of the answer stored in the place of another."""
    for (g, part), (_, got), (_, true) in zip(
        groups(e.case, wrong), groups(e.case, out), groups(e.case, want), strict=True
    ):
        if not part.any():
            continue
        i, j = (int(np.flatnonzero(part.any(axis=1 - axis))[0]) // TILE * TILE for axis in (0, 1))
        tile = got[i : i + TILE, j : j + TILE]
        for other_i in range(0, true.shape[0] - tile.shape[0] + 1, TILE):
            for other_j in range(0, true.shape[1] - tile.shape[1] + 1, TILE):
                source = true[other_i : other_i + tile.shape[0], other_j : other_j + tile.shape[1]]
                if (other_i, other_j) != (i, j) and not unequal(tile, source).any():
                    what = f"expert {g}: the tile at {i}, {j} holds the one that belongs at {other_i}, {other_j}"
                    inside = part[i : i + TILE, j : j + TILE].sum() == wrong.sum()
                    return (Cause(what, "certain" if inside else "likely"),)
        return ()
    return ()


# ---------------------------------------------------------------------------------------------------------------------
# Quantizers


def _quantizer(e: Evidence, launch: Launch, answer: MXArray) -> tuple[tuple[str, ...], tuple[Cause, ...]]:
    """(facts, causes): by how much scales and elements are off, and which profile or rule gives the bytes."""
    elements, scales = (bits(array) for array in launch.output)
    wrong_scales = scales != answer.scale_codes()
    wrong_elements = elements != answer.codes()
    facts = [f"{np.count_nonzero(wrong_scales)} of {scales.size} scales are wrong"]
    if wrong_scales.any():
        off = scales.astype(int)[wrong_scales] - answer.scale_codes().astype(int)[wrong_scales]
        by, counts = np.unique(off, return_counts=True)
        most = np.argsort(-counts, kind="stable")[:4]
        facts.append("scale bytes are off by " + ", ".join(f"{by[i]:+d} ({counts[i]} times)" for i in most))
    x, axis = e.operands.arrays["x"], int(e.operands.arrays["axis"])
    alone = int(np.count_nonzero(wrong_elements & ~np.repeat(wrong_scales, BLOCK, axis=axis)))
    facts.append(f"{alone} elements are wrong in blocks whose scale is right")
    causes: list[Cause] = []
    for rounding, words in (("even", ""), ("away", ", ties away from zero")):
        same = []
        for name, profile in PROFILES.items():
            if e.case.formats[0] in profile.formats:
                mx = quantize(x, axis=axis, format=e.case.formats[0], profile=name, rounding=rounding)
                if np.array_equal(mx.codes(), elements) and np.array_equal(mx.scale_codes(), scales):
                    same.append(name)
        if same:
            others = f" (and of {', '.join(same[1:])})" if len(same) > 1 else ""
            return tuple(facts), (Cause(f"these are the bytes of profile {same[0]}{others}{words}", "certain"),)
    with np.errstate(all="ignore"):
        mx = quantize(x.astype(ml_dtypes.bfloat16), axis=axis, format=e.case.formats[0], profile=e.build.profile)
    if np.array_equal(mx.codes(), elements) and np.array_equal(mx.scale_codes(), scales):
        return tuple(facts), (Cause("the input is rounded to bfloat16 first", "certain"),)
    if not wrong_scales.any() and (elements[wrong_elements] == 0).all():
        lost = "-0 becomes +0" if (answer.codes()[wrong_elements] == 0x80).all() else "small elements become zero"
        return tuple(facts), (Cause(lost, "certain"),)
    nan = np.isnan(decoded(e.case, answer.elements, answer.scales))
    got = np.isnan(decoded(e.case, *launch.output))
    if rule := _rule(e, scales, wrong_scales):
        causes.append(Cause(f"finite blocks have the scale bytes of rule {rule}", "certain"))
    elif (nan & ~got).any():
        causes.append(Cause("a NaN or an infinity is lost: a maximum that ignores NaN hides it", "likely"))
    elif (got & ~nan).any():
        causes.append(Cause("elements that should saturate, or blocks with tiny scales, become NaN", "likely"))
    elif not wrong_scales.any():
        causes.append(Cause("scales are right, the rounding or the encoding of elements is not", "likely"))
    elif not alone:
        causes.append(Cause("elements fit their scales, the exponent of some scales is wrong", "likely"))
    return tuple(facts), tuple(causes)


def _rule(e: Evidence, scales: NDArray[Any], wrong: Bool) -> str | None:
    """The one other rule that gives all scales of blocks with a normal, finite maximum, if any of them are wrong."""
    axis = int(e.operands.arrays["axis"])
    pattern = np.moveaxis(float32_bits(e.operands.arrays["x"]) & np.uint32(0x7FFFFFFF), axis, -1)
    maximum = pattern.reshape(*pattern.shape[:-1], -1, BLOCK).max(axis=-1).astype(np.int64)
    exponent, mantissa = maximum >> 23, maximum & 0x7FFFFF
    normal = (exponent > 0) & (exponent < 255)
    used = np.moveaxis(scales, axis, -1).astype(np.int64)
    if not (np.moveaxis(wrong, axis, -1) & normal).any():
        return None
    row = FORMATS[e.case.formats[0]]
    fitting = [
        name
        for name, rule in SCALE_RULES.items()
        if (np.clip(rule(exponent, mantissa, row), 0, 254) == used)[normal].all()
    ]
    return fitting[0] if fitting else None
