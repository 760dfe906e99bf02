"""What a grouped GEMM gives when it makes one particular mistake.

A plain model of the three ops in four parts (which operands, which piece of them, what the bytes mean, how they are
summed and narrowed), and a few hundred hypotheses that each replace one part. `explain` looks for those that give the
bits that a build gave. Beside the tables, `factors` solves for the scales behind a row that no hypothesis fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mxgate.conformance.data import operands
from mxgate.conformance.launch import Array, Evidence, Launch
from mxgate.oracle.bound import round_to
from mxgate.oracle.formats import FORMATS, SCALE_BIAS, SCALE_NAN, U8, decode_table, scale_table
from mxgate.oracle.groups import spans

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
Bool = NDArray[np.bool_]
Span = tuple[int, int]

BLOCK, STEP, WINDOW = 32, 128, 256
NAMES = {"forward": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy_t", "x_t")}


# ---------------------------------------------------------------------------------------------------------------------
# The model


@dataclass(frozen=True)
class View:
    """The operands in one form. a [rows, length] and b [experts, rows, length] codes, sa and sb their scale bytes
    [.., length / 32]; wgrad has one entry in b. weights: the entry of b that each group uses."""

    op: str
    formats: tuple[str, str]
    a: U8
    sa: U8
    b: U8
    sb: U8
    spans: tuple[Span, ...]
    weights: tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """One group's product: rows of a [I,T] against rows of b [J,T], scale bytes [.,T/32]."""

    a: U8
    sa: U8
    b: U8
    sb: U8


Cut = Callable[[View, int], Piece]
Values = Callable[[U8, U8, str], F64]
Product = Callable[[F64, F64], F64]
Finish = Callable[[F64, "np.dtype[Any]"], Array]


def view_of(e: Evidence, launch: Launch) -> View:
    """The operands of a launch, padding as its variant has it."""
    given = e.operands if launch.variant == e.launches[0].variant else operands(e.case, launch.variant)
    assert given.a is not None and given.b is not None and given.offsets is not None
    b, sb = given.b.codes(), given.b.scale_codes()
    if e.case.op == "wgrad":
        b, sb = b[None], sb[None]
    elif e.case.op == "dgrad":
        b, sb = (np.ascontiguousarray(x.transpose(0, 2, 1)) for x in (b, sb))
    groups = tuple(spans(given.offsets))
    weights = (0,) * len(groups) if e.case.op == "wgrad" else tuple(range(len(groups)))
    return View(e.case.op, e.case.formats, given.a.codes(), given.a.scale_codes(), b, sb, groups, weights)


def cut(view: View, g: int) -> Piece:
    """The right piece of group g."""
    start, end = view.spans[g]
    b, sb = view.b[view.weights[g]], view.sb[view.weights[g]]
    if view.op != "wgrad":
        return Piece(view.a[start:end], view.sa[start:end], b, sb)
    t, s = slice(start, end), slice(start // BLOCK, end // BLOCK)
    return Piece(view.a[:, t], view.sa[:, s], b[:, t], sb[:, s])


def cut_at(view: View, g: int, start: int, end: int) -> Piece:
    """The piece of group g were it [start, end)."""
    return cut(replace(view, spans=(*view.spans[:g], (start, end), *view.spans[g + 1 :])), g)


def values(codes: U8, scales: U8, format: str, elements: F64 | None = None, bytes_: F64 | None = None) -> F64:
    """float64 values [rows, length] of codes and their scale bytes [rows, length / 32], by other tables if given."""
    elements = decode_table(format) if elements is None else elements
    bytes_ = scale_table() if bytes_ is None else bytes_
    with np.errstate(all="ignore"):
        return np.asarray(elements[codes] * np.repeat(bytes_[scales], BLOCK, axis=1), np.float64)


def product(a: F64, b: F64) -> F64:
    """a b^T."""
    with np.errstate(all="ignore"):
        return np.asarray(a @ b.T, np.float64)


def finish(sums: F64, dtype: np.dtype[Any]) -> Array:
    """From a float32 accumulator to the output: what is too small beside the rest of a sum is lost on the way."""
    return round_to(round_to(sums, np.float32).astype(np.float64), dtype)


@dataclass(frozen=True)
class Hypothesis:
    """One mistake: a sentence, and the part of the model that it replaces. values: of a, of b.

    stored: the whole output where it does not follow from the operands; its bits are compared as they are.
    """

    sentence: str
    view: Callable[[View], View] | None = None
    cut: Cut = cut
    values: tuple[Values, Values] = (values, values)
    product: Product = product
    finish: Finish = finish
    stored: Array | None = None

    def output(self, view: View, dtype: np.dtype[Any]) -> Array:
        """The tokens' part of what such a build gives."""
        if self.stored is not None:
            return self.stored
        tokens = max((end for _, end in view.spans), default=0)
        view = view if self.view is None else self.view(view)
        rows = view.b.shape[1]
        shape = (len(view.spans), view.a.shape[0], rows) if view.op == "wgrad" else (tokens, rows)
        sums = np.zeros(shape)
        for g, (start, end) in enumerate(view.spans):
            x = self.cut(view, g)
            length = min(x.a.shape[1], x.b.shape[1])
            a = self.values[0](x.a[:, :length], x.sa[:, : length // BLOCK], view.formats[0])
            b = self.values[1](x.b[:, :length], x.sb[:, : length // BLOCK], view.formats[1])
            if view.op == "wgrad":
                sums[g] = self.product(a, b)
            elif end > start:
                sums[start:end] = self.product(a, b)
        return self.finish(sums, dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Scales: not applied, misread, or read elsewhere

Change = Callable[[U8], U8]


def _in(side: int, *change: Change) -> Callable[[View], View]:
    """Change the scales of a (0), of b (1) or of both (2; then a change for each)."""

    def view(v: View) -> View:
        sa = change[0](v.sa) if side in (0, 2) else v.sa
        sb = change[-1](v.sb) if side in (1, 2) else v.sb
        return replace(v, sa=sa, sb=sb)

    return view


def _constant(plane: U8, byte: int) -> U8:
    return np.full_like(plane, byte)


def _plus(plane: U8, n: int) -> U8:
    return np.clip(plane.astype(np.int64) + n, 0, 255).astype(np.uint8)


def _resized(plane: U8, other: U8) -> U8:
    return np.asarray(np.resize(other, plane.shape), np.uint8)


def _found(plane: U8, where: Callable[[I64, I64, int, int], tuple[I64, I64]]) -> U8:
    """Each scale replaced by the one at where(row, block, rows, blocks); past the plane in memory there are zeros, past
    a row or a column the nearest scale is taken."""
    flat = plane.reshape(-1, plane.shape[-1])
    rows, blocks = flat.shape
    r, j = np.broadcast_arrays(*where(np.arange(rows)[:, None], np.arange(blocks)[None, :], rows, blocks))
    past = (r >= rows) & (j < blocks)
    taken = flat[np.clip(r, 0, rows - 1), np.clip(j, 0, blocks - 1)]
    return np.asarray(np.where(past, 0, taken).reshape(plane.shape), np.uint8)


def _near(r: I64, j: I64, rows: int, blocks: int, dr: int, dj: int) -> tuple[I64, I64]:
    return np.clip(r + dr, 0, rows - 1), j + dj


def _swapped(r: I64, j: I64, rows: int, blocks: int, lanes: int, words: int) -> tuple[I64, I64]:
    return np.minimum(r ^ lanes, rows - 1), j ^ words


def _shared(r: I64, j: I64, rows: int, blocks: int, tall: int, wide: int, last: int) -> tuple[I64, I64]:
    return np.minimum(r // tall * tall + (tall - 1) * last, rows - 1), j // wide * wide + (wide - 1) * last


def _packed(r: I64, j: I64, rows: int, blocks: int, size: int) -> tuple[I64, I64]:
    return r, j // size


def _first(r: I64, j: I64, rows: int, blocks: int, row: bool) -> tuple[I64, I64]:
    return (0 * r, j) if row else (r, 0 * j)


def _flat(r: I64, j: I64, rows: int, blocks: int, pitch: int, offset: int) -> tuple[I64, I64]:
    at = r * (pitch or blocks) + j + offset
    return np.asarray(at // blocks), np.asarray(at % blocks)


def _turned(r: I64, j: I64, rows: int, blocks: int) -> tuple[I64, I64]:
    at = j * rows + r
    return np.asarray(at // blocks), np.asarray(at % blocks)


def _unturned(r: I64, j: I64, rows: int, blocks: int) -> tuple[I64, I64]:
    at = r * blocks + j
    return np.asarray(at % rows), np.asarray(at // rows)


def _maps(blocks: int) -> Iterator[tuple[str, Change]]:
    """Where else a scale may be read: ("uses the scale " ..., change)."""

    def change(where: Callable[..., tuple[I64, I64]], **options: Any) -> Change:
        return partial(_found, where=partial(where, **options))

    for d in (1, 2, 3, 4):
        for sign, word in ((1, "after"), (-1, "before")):
            yield f"of the block {d} {word}", change(_near, dr=0, dj=sign * d)
    for d in (1, 2, 4, 8, 16, 32, 64, 128):
        for sign, word in ((1, "after"), (-1, "before")):
            yield f"of the row {d} {word}", change(_near, dr=sign * d, dj=0)
    for size in (2, 4, 8, 16):
        yield f"of the first of every {size} blocks", change(_shared, tall=1, wide=size, last=0)
        yield f"of the last of every {size} blocks", change(_shared, tall=1, wide=size, last=1)
        yield f"of block j / {size}", change(_packed, size=size)
    for size in (2, 4, 8, 16, 32, 64, 128):
        yield f"of the first of every {size} rows", change(_shared, tall=size, wide=1, last=0)
    for mask in (1, 2, 3):
        yield f"of block j ^ {mask} (bytes swapped within a word)", change(_swapped, lanes=0, words=mask)
        yield f"of row r ^ {mask} (lanes swapped)", change(_swapped, lanes=mask, words=0)
    yield "of the row's first block", change(_first, row=False)
    yield "of the plane's first row", change(_first, row=True)
    for d in (1, -1):
        yield f"one byte {'further on' if d > 0 else 'earlier'} in the plane", change(_flat, pitch=0, offset=d)
    for pitch in sorted({-(-blocks // size) * size for size in (2, 4, 8, 16)} - {blocks}):
        yield f"found with a row pitch of {pitch} blocks, not {blocks}", change(_flat, pitch=pitch, offset=0)
    yield "found at the transposed place (the plane taken for [blocks, rows])", change(_turned)
    yield "found with rows and blocks exchanged in the order of memory", change(_unturned)


def _one_block(view: View, side: int, block: int, d: int) -> View:
    """Only contraction block `block` takes the scales of block + d."""
    scales = [view.sa.copy(), view.sb.copy()]
    for s in (0, 1) if side == 2 else (side,):
        scales[s][..., block] = scales[s][..., block + d]
    return replace(view, sa=scales[0], sb=scales[1])


def _beside_its_data(codes: U8, scales: U8, format: str) -> F64:
    """The 16x16x128 instruction takes a lane's 32 elements as two runs of 16, 64 apart, and their scale elsewhere.

    Who takes the lane's own gives the elements 16 g.. of either half of 64 the scale of block g.
    """
    t = np.arange(codes.shape[1])
    block = np.minimum(t // STEP * 4 + t % 64 // 16, max(scales.shape[1] - 1, 0))
    with np.errstate(all="ignore"):
        return np.asarray(decode_table(format)[codes] * scale_table()[scales[:, block]], np.float64)


def _as(codes: U8, scales: U8, format: str, other: str) -> F64:
    return values(codes, scales, other)


def _rows_unscaled(view: View, g: int, size: int) -> Piece:
    """Rows of the group that do not fill a pack of `size` have scales of 1.0."""
    x = cut(view, g)
    sa = x.sa.copy()
    sa[sa.shape[0] // size * size :] = SCALE_BIAS
    return replace(x, sa=sa)


def _turned_piece(view: View, g: int, side: int) -> Piece:
    """The scales of the piece, in the order of memory, taken for [blocks, rows]."""
    x = cut(view, g)
    s = np.ascontiguousarray(x.sa if side == 0 else x.sb)
    s = np.asarray(s.reshape(s.shape[::-1]).T, np.uint8)
    return replace(x, sa=s) if side == 0 else replace(x, sb=s)


def _sides(view: View) -> tuple[tuple[int, str, str], ...]:
    a, b = NAMES[view.op]
    return (0, a, a + "'s"), (1, b, b + "'s"), (2, "either operand", "both operands'")


def scale_hypotheses(view: View) -> Iterator[Hypothesis]:
    """Of every kind: in a, in b, in both."""
    for side, who, whose in _sides(view):
        for byte, word in ((SCALE_BIAS, "1.0"), (0, "2^-127")):
            yield Hypothesis(
                f"{whose} scales are not applied: every byte is taken for {byte} ({word})",
                _in(side, partial(_constant, byte=byte)),
            )
        for words, change in _maps(view.sa.shape[-1]):
            yield Hypothesis(f"{who} uses the scale {words}", _in(side, change))
        for block in range(min(view.sa.shape[-1], 24)):
            for d in (-1, 1):
                if 0 <= block + d < view.sa.shape[-1]:
                    yield Hypothesis(
                        f"{who} uses the scale of block {block + d} in block {block}, and its own elsewhere",
                        partial(_one_block, side=side, block=block, d=d),
                    )
        yield from _meanings(view, side, who, whose)
        for n, word in ((1, "twice"), (-1, "half"), (127, "2^127 times"), (-127, "2^-127 times")):
            yield Hypothesis(
                f"{whose} scales are {word} what they should be (the exponent's bias)", _in(side, partial(_plus, n=n))
            )
        lanes = [_beside_its_data if side in (s, 2) else values for s in (0, 1)]
        yield Hypothesis(
            f"each lane applies {whose} scale that it holds to the data that it holds", values=(lanes[0], lanes[1])
        )
    for side, _, whose in _sides(view)[:2]:
        other = (view.sb, view.sa)[side]
        yield Hypothesis(f"{whose} scales are those of the other operand", _in(side, partial(_resized, other=other)))
        yield Hypothesis(f"{whose} scales of the group are read transposed", cut=partial(_turned_piece, side=side))
        if view.op == "dgrad" and side == 1:
            # The plane lies in memory as [blocks, rows]: taken for [rows, blocks] as it is.
            turned = np.ascontiguousarray(view.sb.transpose(0, 2, 1)).reshape(view.sb.shape)
            yield Hypothesis(
                f"{whose} scales are taken to run along K and not along N", _in(1, partial(_resized, other=turned))
            )
    for size in (2, 4, 8, 16, 32):
        yield Hypothesis(
            f"rows of a group that do not fill a pack of {size} are not scaled", cut=partial(_rows_unscaled, size=size)
        )


def _meanings(view: View, side: int, who: str, whose: str) -> Iterator[Hypothesis]:
    """Bytes and codes misread."""

    def both(wrong: Sequence[Values]) -> tuple[Values, Values]:
        return (wrong[0] if side != 1 else values, wrong[1] if side != 0 else values)

    for byte, meaning, word in (
        (0, 0.0, "zero"),
        (0, 2.0**-126, "2^-126"),
        (SCALE_NAN, np.inf, "infinity"),
        (SCALE_NAN, 2.0**128, "2^128"),
        (SCALE_NAN, 0.0, "zero"),
        (254, np.nan, "NaN"),
    ):
        table = scale_table().copy()
        table[byte] = meaning
        read = partial(values, bytes_=table)
        yield Hypothesis(f"scale byte 0x{byte:02x} of {who} is taken for {word}", values=both([read, read]))
    for name, row in FORMATS.items():
        if row.bits == 8 and all(f != name for s, f in enumerate(view.formats) if side in (s, 2)):
            read = partial(_as, other=name)
            yield Hypothesis(f"{whose} elements are read as {name}", values=both([read, read]))
    for words, change in (
        ("NaN codes are taken for zero", lambda row: dict.fromkeys(row.nan_codes, 0.0)),
        ("infinities are taken for the largest number", lambda row: dict.fromkeys(row.inf_codes, row.max_finite)),
        ("infinities are taken for NaN", lambda row: dict.fromkeys(row.inf_codes, np.nan)),
        ("only the first NaN code is one", lambda row: dict.fromkeys(row.nan_codes[1:], -480.0)),
        ("code 0x80 is taken for -0", lambda row: {0x80: -0.0}),
    ):
        tables = []
        for format in view.formats:
            table = decode_table(format).copy()
            for code, meaning in change(FORMATS[format]).items():
                table[code] = np.copysign(meaning, -1) if code & 0x80 and meaning > 0 else meaning
            tables.append(partial(values, elements=table))
        yield Hypothesis(f"{words} ({who})", values=both(tables))


# ---------------------------------------------------------------------------------------------------------------------
# Blocks of the contraction, in every group


def _kept(view: View, g: int, choose: Callable[[I64], I64]) -> Piece:
    x = cut(view, g)
    blocks = np.asarray(choose(np.arange(x.sa.shape[1])), np.int64)
    columns = (blocks[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)
    return Piece(x.a[:, columns], x.sa[:, blocks], x.b[:, columns], x.sb[:, blocks])


def _take(b: I64, first: int, last: int) -> I64:
    return b[first : max(b.size - last, 0)]


def _again(b: I64, first: int, last: int) -> I64:
    return np.concatenate([b, b[:first], b[max(b.size - last, 0) :]])


def _whole(b: I64, size: int) -> I64:
    return b[: b.size // size * size]


def _one(b: I64, i: int, times: int) -> I64:
    return np.concatenate([b[b != i], *[b[b == i]] * times])


def _middle(b: I64) -> I64:
    return np.asarray(b[b != b.size // 2])


def _every(b: I64, n: int) -> I64:
    return b[::n]


def _over_the_end(view: View, g: int, size: int, byte: int) -> Piece:
    """The contraction is rounded up: behind a row comes what lies behind it in memory, the next row."""
    x = cut(view, g)
    extra = -x.a.shape[1] % size

    def longer(codes: U8) -> U8:
        after = np.concatenate([codes[1:, :extra], np.zeros((1, min(extra, codes.shape[1])), np.uint8)])
        return np.concatenate([codes, np.resize(after, (codes.shape[0], extra)).astype(np.uint8)], axis=1)

    def scales(s: U8) -> U8:
        return np.concatenate([s, np.full((s.shape[0], extra // BLOCK), byte, np.uint8)], axis=1)

    return Piece(longer(x.a), scales(x.sa), longer(x.b), scales(x.sb)) if extra and x.a.size else x


def contraction_hypotheses(view: View) -> Iterator[Hypothesis]:
    """Blocks lost, or counted twice."""
    for n in range(1, min(view.sa.shape[1], 5)):  # all of them would be the whole result
        blocks = "block" if n == 1 else f"{n} blocks"
        for words, choose in (
            (f"the last {blocks} of the contraction are lost", partial(_take, first=0, last=n)),
            (f"the first {blocks} of the contraction are lost", partial(_take, first=n, last=0)),
            (f"the last {blocks} of the contraction are counted twice", partial(_again, first=0, last=n)),
            (f"the first {blocks} of the contraction are counted twice", partial(_again, first=n, last=0)),
        ):
            yield Hypothesis(words.replace("block of the contraction are", "block of the contraction is"),
                             cut=partial(_kept, choose=choose))  # fmt: skip
    for size in (2, 4, 8):
        words = f"a last step of fewer than {size} blocks ({size * BLOCK} elements) is lost"
        yield Hypothesis(words, cut=partial(_kept, choose=partial(_whole, size=size)))
    for i in range(min(view.sa.shape[1], 32)):
        for times, word in ((0, "lost"), (2, "counted twice")):
            yield Hypothesis(
                f"block {i} of the contraction is {word}", cut=partial(_kept, choose=partial(_one, i=i, times=times))
            )
    yield Hypothesis("the middle block of the contraction is lost", cut=partial(_kept, choose=_middle))
    for n in (2, 4):
        yield Hypothesis(f"only one block in {n} is added", cut=partial(_kept, choose=partial(_every, n=n)))
    for size in (64, STEP, WINDOW):
        for byte, word in ((SCALE_BIAS, "1.0"), (0, "0x00")):
            yield Hypothesis(
                f"the contraction is rounded up to {size}: the next row's elements come in under a scale of {word}",
                cut=partial(_over_the_end, size=size, byte=byte),
            )


# ---------------------------------------------------------------------------------------------------------------------
# Experts and boundaries where tokens are rows (forward, dgrad)


def _weights(view: View, index: tuple[int, ...], data: bool, scales: bool) -> View:
    return replace(view, b=view.b[list(index)] if data else view.b, sb=view.sb[list(index)] if scales else view.sb)


def _spanned(view: View, groups: tuple[Span, ...]) -> View:
    return replace(view, spans=groups)


def _between(ends: Sequence[int]) -> tuple[Span, ...]:
    return tuple(zip((0, *ends[:-1]), ends, strict=True))


def _starts(view: View) -> tuple[Span, ...]:
    ends = [end for _, end in view.spans]
    return tuple(zip(ends, [*ends[1:], *ends[-1:]], strict=True))


def _narrow(view: View, side: int, bits: int) -> View:
    """Element planes addressed through `bits` bits: signed, so negative above half of that."""

    def plane(codes: U8) -> U8:
        index = np.arange(codes.size) % (1 << bits)
        index = np.where(index >= 1 << (bits - 1), index - (1 << bits), index)
        return np.asarray(codes.reshape(-1)[index % codes.size].reshape(codes.shape), np.uint8)

    return replace(view, a=plane(view.a)) if side == 0 else replace(view, b=plane(view.b))


def row_hypotheses(view: View) -> Iterator[Hypothesis]:
    """Another expert's weights or scales; boundaries of rows elsewhere."""
    experts = len(view.spans)
    filled = [start < end for start, end in view.spans]
    maps: dict[tuple[int, ...], str] = {(0,) * experts: "the first expert"}
    maps.setdefault(tuple(sum(filled[:g]) for g in range(experts)), "experts counted without the empty ones")
    for d in (1, -1, 2, -2):
        word = f"the expert {abs(d)} {'after' if d > 0 else 'before'}"
        maps.setdefault(tuple(min(max(g + d, 0), experts - 1) for g in range(experts)), word)
        maps.setdefault(tuple((g + d) % experts for g in range(experts)), word + ", modulo their number")
    for index, words in maps.items():
        yield Hypothesis(
            f"each group uses the weights of {words}", partial(_weights, index=index, data=True, scales=True)
        )
        yield Hypothesis(
            f"each group uses its own weights with the scales of {words}",
            partial(_weights, index=index, data=False, scales=True),
        )
        yield Hypothesis(
            f"each group uses its own scales with the weights of {words}",
            partial(_weights, index=index, data=True, scales=False),
        )
    ends = [end for _, end in view.spans]
    total = ends[-1] if ends else 0
    for tile in (8, 16, 32, 64, STEP, WINDOW):
        up = [min(-(-end // tile) * tile, total) for end in ends]
        down = [end // tile * tile for end in ends[:-1]] + ends[-1:]
        for words, moved in (("up", up), ("down", down)):
            yield Hypothesis(
                f"group ends are rounded {words} to {tile} rows", partial(_spanned, groups=_between(moved))
            )
    for d in (1, -1, BLOCK, -BLOCK):
        moved = [min(max(end + d, 0), total) for end in ends[:-1]] + ends[-1:]
        yield Hypothesis(f"inner group ends are moved by {d:+d} rows", partial(_spanned, groups=_between(moved)))
    yield Hypothesis("offsets are taken for starts", partial(_spanned, groups=_starts(view)))
    for side, _, whose in _sides(view)[:2]:
        for width in (15, 16):
            if (view.a, view.b)[side].size > 1 << (width - 1):
                yield Hypothesis(
                    f"{whose} elements are addressed through {width} bits", partial(_narrow, side=side, bits=width)
                )


# ---------------------------------------------------------------------------------------------------------------------
# Boundaries and windows along the tokens (wgrad)


def _cleared(view: View) -> View:
    """Zeros past the last token, as a kernel leaves them that clears its padding first."""
    end = max((e for _, e in view.spans), default=0)
    planes = [p.copy() for p in (view.a, view.sa, view.b, view.sb)]
    for plane, first in zip(planes, (end, end // BLOCK) * 2, strict=True):
        plane[..., first:] = 0
    return replace(view, a=planes[0], sa=planes[1], b=planes[2], sb=planes[3])


def _moved(view: View, g: int, change: Callable[[int, int], Span]) -> Piece:
    start, end = view.spans[g]
    if start < end:
        start, end = change(start, end)
    return cut_at(view, g, max(start, 0), min(end, view.a.shape[1]))


def _shift(s: int, e: int, first: int, last: int) -> Span:
    return s + first, e + last


def _outwards(s: int, e: int, first: int, last: int) -> Span:
    return s // first * first, -(-e // last) * last


def _inwards(s: int, e: int, first: int, last: int) -> Span:
    return min(-(-s // first) * first, e), max(e // last * last, s)


def _whole_steps(s: int, e: int, size: int, base: int) -> Span:
    origin = s // base * base
    return s, max(s, origin + (e - origin) // size * size)


def _even_steps(s: int, e: int, base: int) -> Span:
    origin = s // base * base
    steps = -(-(e - origin) // STEP)
    return s, max(s, min(e, origin + steps // 2 * 2 * STEP))


def _windowed(view: View, g: int, masks: tuple[int | None, int | None], cleared: bool) -> Piece:
    """The window of a kernel that starts at a multiple of 256 and walks an even number of 128-token steps, at least
    four. Scales outside the group are replaced by masks (None: kept); cleared: what lies past the tokens is zero."""
    start, end = view.spans[g]
    if start == end:
        return cut(view, g)
    base = start // WINDOW * WINDOW
    steps = -(-(end - base) // STEP)
    stop = min(base + max(steps + steps % 2, 4) * STEP, view.a.shape[1])
    x = cut_at(view, g, base, stop)
    block = np.arange(base, stop, BLOCK)
    outside = (block < start) | (block >= end)
    planes = [x.a, x.b]
    scales = [x.sa, x.sb]
    past = max(e for _, e in view.spans)
    for side in (0, 1):
        if cleared:
            planes[side] = np.where(np.arange(base, stop) >= past, np.uint8(0), planes[side])
            scales[side] = np.where(block >= past, np.uint8(0), scales[side])
        if (mask := masks[side]) is not None:
            scales[side] = np.where(outside, np.uint8(mask), scales[side])
    return Piece(planes[0], scales[0], planes[1], scales[1])


def _empty_runs_on(view: View, g: int) -> Piece:
    start, end = view.spans[g]
    return cut_at(view, g, start, end if start < end else view.spans[-1][1])


def _relative_scales(view: View, g: int) -> Piece:
    x = cut(view, g)
    blocks = x.sa.shape[1]
    return replace(x, sa=view.sa[:, :blocks], sb=view.sb[0][:, :blocks])


def window_hypotheses(view: View) -> Iterator[Hypothesis]:
    """Tokens that are taken for a group's, or not."""

    def moved(words: str, change: Callable[..., Span], **options: int) -> Hypothesis:
        return Hypothesis(words, cut=partial(_moved, change=partial(change, **options)))

    a, b = NAMES["wgrad"]
    for masks, cleared, words in (
        ((0, 0), True, "outside the group scales are masked and data is not: a NaN among the neighbours' tokens stays"),
        ((0, 0), False, "the padding is not zeroed: a NaN in it survives the mask of the scales"),
        ((0, None), True, f"outside the group only {a}'s scales are masked"),
        ((None, 0), True, f"outside the group only {b}'s scales are masked"),
        ((SCALE_BIAS, SCALE_BIAS), True, "the mask outside the group is 127, which is 1.0, and not 0x00"),
        ((None, None), True, "nothing outside the group is masked"),
        ((SCALE_NAN, SCALE_NAN), True, "scales outside the group are read as 0xFF"),
        ((0, None), False, f"outside the group only {a}'s scales are masked, and the padding is not zeroed"),
        ((None, 0), False, f"outside the group only {b}'s scales are masked, and the padding is not zeroed"),
        ((None, None), False, "nothing outside the group is masked, and the padding is not zeroed"),
    ):
        yield Hypothesis(words, cut=partial(_windowed, masks=masks, cleared=cleared))
    far = 1 << 30
    for d in (1, -1, 2, -2, 3, -3, 4, -4):
        by, words = d * BLOCK, f"{abs(d) * BLOCK} tokens {'later' if d > 0 else 'earlier'}"
        yield moved(f"groups start {words}", _shift, first=by, last=0)
        yield moved(f"groups end {words}", _shift, first=0, last=by)
        yield moved(f"groups start and end {words}", _shift, first=by, last=by)
    yield moved("nothing after a group is masked", _shift, first=0, last=far)
    yield Hypothesis("an empty group runs on to the last token", cut=_empty_runs_on)
    for n in (64, STEP, WINDOW):
        yield moved(f"a start rounded down to {n} tokens lets in the tokens before", _outwards, first=n, last=1)
        yield moved(f"an end rounded up to {n} tokens lets in the tokens after", _outwards, first=1, last=n)
        yield moved(f"a start and an end rounded outwards to {n} tokens let in others'", _outwards, first=n, last=n)
        yield moved(f"the end is rounded down to {n} tokens", _inwards, first=1, last=n)
        yield moved(f"the start is rounded up to {n} tokens", _inwards, first=n, last=1)
        yield moved(f"a last step of fewer than {n} tokens is dropped", _whole_steps, size=n, base=1)
    yield moved("of a window from a multiple of 256 the last, partial step of 128 is dropped", _whole_steps,
                size=STEP, base=WINDOW)  # fmt: skip
    yield moved("of an odd number of steps of 128 the last is dropped", _even_steps, base=1)
    yield moved("of an odd number of steps of 128 from a multiple of 256 the last is dropped", _even_steps, base=WINDOW)
    yield Hypothesis("offsets are taken for starts", partial(_spanned, groups=_starts(view)))
    yield Hypothesis("scales are read from the plane's beginning, not from the group's", cut=_relative_scales)


# ---------------------------------------------------------------------------------------------------------------------
# Sums, rounding, and what is stored


def _bfloat16(sums: F64, dtype: np.dtype[Any], add: int) -> Array:
    """float32 bits plus `add`, cut to bfloat16; other types are rounded."""
    if dtype != ml_dtypes.bfloat16:
        return finish(sums, dtype)
    pattern = round_to(sums, np.float32).view(np.uint32)
    finite = np.isfinite(pattern.view(np.float32))
    kept = (pattern + np.where(finite, np.uint32(add), np.uint32(0))) >> np.uint32(16)
    return np.asarray(kept.astype(np.uint16)).view(ml_dtypes.bfloat16)


def _via(sums: F64, dtype: np.dtype[Any], through: np.dtype[Any]) -> Array:
    return finish(round_to(sums, through).astype(np.float64), dtype)


def _saturated(sums: F64, dtype: np.dtype[Any]) -> Array:
    # The pattern below infinity's.
    infinity = round_to(np.array([np.inf]), dtype).view(f"u{dtype.itemsize}")
    most = float((infinity - infinity.dtype.type(1)).view(dtype)[0])
    return finish(np.clip(sums, -most, most), dtype)


def _partial_sums(a: F64, b: F64, dtype: np.dtype[Any], step: int, running: bool) -> F64:
    total = np.zeros((a.shape[0], b.shape[0]))
    with np.errstate(all="ignore"):
        for t in range(0, a.shape[1], step):
            total = total + round_to(product(a[:, t : t + step], b[:, t : t + step]), dtype).astype(np.float64)
            total = round_to(total, dtype).astype(np.float64) if running else total
    return total


def _without_nan(a: F64, b: F64) -> F64:
    return product(np.where(np.isnan(a), 0, a), np.where(np.isnan(b), 0, b))


def _spread_nan(a: F64, b: F64) -> F64:
    sums = product(a, b)
    return sums * np.nan if np.isnan(sums).any() else sums


def rounding_hypotheses() -> Iterator[Hypothesis]:
    """The accumulator narrowed wrongly, or too early."""
    yield Hypothesis("the accumulator is truncated to bfloat16, not rounded", finish=partial(_bfloat16, add=0))
    yield Hypothesis("ties are rounded away from zero on the way to bfloat16", finish=partial(_bfloat16, add=0x8000))
    yield Hypothesis("what is too large for the output becomes its largest number, not infinity", finish=_saturated)
    narrow = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
    for dtype in narrow:
        yield Hypothesis(
            f"the result is rounded to {dtype} on the way to the output", finish=partial(_via, through=dtype)
        )
    for dtype in narrow:
        for step in (BLOCK, STEP):
            for running, what in ((False, "partial sums are"), (True, "the running sum is")):
                yield Hypothesis(
                    f"{what} rounded to {dtype} every {step} products",
                    product=partial(_partial_sums, dtype=dtype, step=step, running=running),
                )
    yield Hypothesis("a NaN counts as zero", product=_without_nan)
    yield Hypothesis("one NaN makes all of its expert's result NaN", product=_spread_nan)


def store_hypotheses(e: Evidence, launch: Launch, view: View, want: Array) -> Iterator[Hypothesis]:
    """`want` put elsewhere, or added to what was there, or not stored at all."""
    fill = np.full(want.nbytes, launch.spec.fill, np.uint8).view(want.dtype).reshape(want.shape)
    yield Hypothesis("the output is all zeros", stored=np.zeros_like(want))
    yield Hypothesis("nothing is stored: the output is what memory held before", stored=fill)
    exact = want.astype(np.float64)
    with np.errstate(all="ignore"):
        if np.isfinite(fill.astype(np.float64)).all():
            added = round_to(exact + fill.astype(np.float64), want.dtype)
            yield Hypothesis("the result is added to what the output held before", stored=added)
        for factor in (2.0, 0.5, -1.0):
            yield Hypothesis(f"the result is multiplied by {factor:g}", stored=round_to(exact * factor, want.dtype))
    if e.operands.extra and "bias" in e.operands.extra:
        yield from _bias_hypotheses(e.operands.extra["bias"], e.case.sizes, want)
    if view.op != "wgrad":
        return
    for d in (1, -1):
        word = "after" if d > 0 else "before"
        yield Hypothesis(f"the gradient of the expert {word} is stored", stored=np.roll(want, -d, 0))
    if want.shape[1] == want.shape[2]:
        yield Hypothesis("each gradient is transposed", stored=np.ascontiguousarray(want.transpose(0, 2, 1)))
    kept, unset = want.copy(), want.copy()
    last = np.zeros_like(want[0])
    for g, (start, end) in enumerate(view.spans):
        if start == end:
            unset[g], kept[g] = fill[g], last
        last = want[g] if start < end else last
    yield Hypothesis("an empty expert keeps the gradient of the one before it", stored=kept)
    yield Hypothesis("an empty expert's gradient is never stored", stored=unset)


def _bias_hypotheses(bias: Array, sizes: Sequence[int], want: Array) -> Iterator[Hypothesis]:
    """Of a case whose output is its bias [E,N]."""
    experts, n = bias.shape
    flat = np.concatenate([bias.reshape(-1), np.zeros(n, bias.dtype)])
    rows = {
        "every expert gets the first one's bias": [bias[0]] * experts,
        "each expert gets the bias of the one before": [bias[max(g - 1, 0)] for g in range(experts)],
        "each expert gets the bias of the one after": [bias[min(g + 1, experts - 1)] for g in range(experts)],
    }
    for divisor in (2, 4):
        words = f"bias rows are read with 1/{divisor} of their stride"
        rows[words] = [flat[g * (n // divisor) :][:n] for g in range(experts)]
    for words, chosen in rows.items():
        stored = round_to(np.repeat(np.stack(chosen).astype(np.float64), sizes, axis=0), want.dtype)
        yield Hypothesis(words, stored=stored)


def hypotheses(e: Evidence, launch: Launch, view: View, want: Array, nan: bool) -> Iterator[Hypothesis]:
    """Every one that applies. nan: whether all that is wrong is NaN; padding and masks are then the first suspects."""
    yield from store_hypotheses(e, launch, view, want)
    yield from rounding_hypotheses()
    if view.op == "wgrad":
        where = list(window_hypotheses(view))
        # Once with the padding as it is, once with what a kernel that clears it first would find there.
        where += [replace(h, view=_cleared) for h in where if h.view is None]
    else:
        where = list(row_hypotheses(view))
    others = [*contraction_hypotheses(view), *scale_hypotheses(view)]
    yield from (*where, *others) if nan else (*others, *where)


# ---------------------------------------------------------------------------------------------------------------------
# What no hypothesis gives: the scales behind a row


def factors(
    row: F64, others: F64, agrees: Callable[[F64], bool], seen: F64, hints: Callable[[int], Sequence[int]]
) -> F64 | None:
    """Powers of two (or 0), one a block, by which a row's true terms give what was seen; None if there are none.

    row [T], others [J,T], seen [J]; agrees(sums [J]) says whether sums round to the output; hints(block) are exponents
    to try before all others. Single blocks come first: that is what one wrong scale looks like. Then least squares,
    which finds several where the blocks' terms are of comparable size.
    """
    terms = (others * row).reshape(others.shape[0], -1, BLOCK).sum(axis=2)
    if not (np.isfinite(terms).all() and np.isfinite(seen).all() and seen.size):
        return None
    rest = terms.sum(axis=1, keepdims=True) - terms
    for j in range(terms.shape[1]):
        at = int(np.abs(terms[:, j]).argmax())
        if terms[at, j] == 0:
            continue
        ratio = (seen[at] - rest[at, j]) / terms[at, j]
        near = round(float(np.log2(ratio))) if ratio > 0 else 0
        # What a factor of 2^-10 or less leaves is hidden by rounding in all but a few elements, so all are tried.
        for power in (*hints(j), near, near - 1, near + 1, *range(-40, -8), None):
            f = 0.0 if power is None else float(np.ldexp(1.0, power))
            if f != 1 and agrees(rest[:, j] + terms[:, j] * f):
                single = np.ones(terms.shape[1])
                single[j] = f
                return single
    weight = 1 / np.maximum(np.abs(seen), np.abs(seen).max() * 2.0**-10 + 1e-300)
    solved = np.linalg.lstsq(terms * weight[:, None], seen * weight, rcond=None)[0]
    with np.errstate(all="ignore"):
        power = np.round(np.log2(np.abs(solved)))
        # A scale that is far too small leaves nothing of its block, which looks like a lost one.
        several = np.where((solved > 0) & (power > -9), np.ldexp(1.0, np.clip(power, -252, 252).astype(int)), 0.0)
    return several if agrees(terms @ several) and (several != 1).any() else None
