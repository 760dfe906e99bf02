"""Shrink a failing case to the fewest experts, tokens, rows and columns that still fail (delta debugging).

The operands are cut, never changed: what is left are bytes of the failing case, so the fault is the same one. Each
candidate is a recorded case (recorded.py) and goes through the same launches and gates; it counts as failing when the
gate that rejected the whole case rejects it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxgate.conformance import data, recorded
from mxgate.conformance.case import Case
from mxgate.conformance.poison import STALE
from mxgate.conformance.runner import Runner
from mxgate.conformance.verdict import Outcome
from mxgate.kernels.build import OPS, Build
from mxgate.oracle.formats import BLOCK

Array = NDArray[Any]
Say = Callable[[int, str], None]

# The axes that are cut, those that take most away first.
AXES = ("experts", "tokens", "rows", "columns", "contraction", "tail")


@dataclass(frozen=True)
class Kept:
    """What of a case is left. experts: their indices. tokens: (expert, granule) pairs, a granule being 32 tokens of a
    wgrad and one of the other ops. rows: of A where they are no tokens (wgrad: n). columns: rows of B (n; dgrad and
    wgrad: k). contraction: blocks of 32 (not of wgrad, where tokens are the contraction). tail: granules past the last
    token."""

    experts: tuple[int, ...]
    tokens: tuple[tuple[int, int], ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    contraction: tuple[int, ...]
    tail: tuple[int, ...]

    @property
    def words(self) -> str:
        """Its size, for people."""
        sizes = [len(axis) for axis in (self.rows, self.columns) if axis]
        if self.contraction:
            sizes.append(BLOCK * len(self.contraction))
        tokens = (BLOCK if self.rows else 1) * len(self.tokens)
        counted = f"{len(self.experts)} expert{'s' * (len(self.experts) != 1)}, {tokens} tokens"
        return f"{counted}, {' x '.join(map(str, sizes))}{', a tail' if self.tail else ', no tail'}"


class NotFailingError(ValueError):
    """There is nothing to shrink: no grouped product, or it does not fail as recorded bytes."""


@dataclass(frozen=True)
class Minimal:
    """case: the smallest one found, of the file. gate: that rejects it. whole, kept: before and after. tried: runs."""

    case: Case
    gate: str
    whole: Kept
    kept: Kept
    tried: int


def whole(case: Case) -> Kept:
    """All of a case. NotFailingError for a quantize case, which has nothing to cut but rows."""
    if case.kind in ("bias", "bias-sum"):
        raise NotFailingError(f"{case.id} has a bias, which a recorded call does not carry; choose another case")
    if case.op == "quantize":
        raise NotFailingError(f"{case.id} has one operand and no groups; only grouped products are minimized")
    granule = BLOCK if case.op == "wgrad" else 1
    contraction = {"forward": case.k, "dgrad": case.n, "wgrad": 0}[case.op] // BLOCK
    return Kept(
        experts=tuple(range(case.experts)),
        tokens=tuple((g, i) for g, size in enumerate(case.sizes) for i in range(size // granule)),
        rows=tuple(range(case.n)) if case.op == "wgrad" else (),
        columns=tuple(range(case.n if case.op == "forward" else case.k)),
        contraction=tuple(range(contraction)),
        tail=tuple(range((case.buffer - case.tokens) // granule)),
    )


def cut(case: Case, arrays: Mapping[str, Array], kept: Kept) -> dict[str, Array]:
    """The operands of what is kept."""
    granule = BLOCK if case.op == "wgrad" else 1
    starts = np.cumsum((0, *case.sizes))
    order, sizes = [], []
    for g in kept.experts:
        mine = [starts[g] // granule + i for expert, i in kept.tokens if expert == g]
        order += mine
        sizes.append(len(mine) * granule)
    order += [case.tokens // granule + i for i in kept.tail]
    granules = np.asarray(order, np.int64)
    tokens = (granules[:, None] * granule + np.arange(granule)).reshape(-1)
    blocks = np.asarray(kept.contraction, np.int64)
    along = (blocks[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)
    experts, rows, columns = (np.asarray(x, np.int64) for x in (kept.experts, kept.rows, kept.columns))
    picks: tuple[tuple[Array, ...], ...] = {
        "forward": ((tokens, along), (tokens, blocks), (experts, columns, along), (experts, columns, blocks)),
        "dgrad": ((tokens, along), (tokens, blocks), (experts, along, columns), (experts, blocks, columns)),
        "wgrad": ((rows, tokens), (rows, granules), (columns, tokens), (columns, granules)),
    }[case.op]
    names = OPS[case.op].operands[:4]
    out = {n: np.ascontiguousarray(arrays[n][np.ix_(*pick)]) for n, pick in zip(names, picks, strict=True)}
    return out | {"offsets": np.cumsum(sizes, dtype=np.int32)}


def minimize(runner: Runner, build: Build, case: Case, path: Path, say: Say = lambda tried, what: None) -> Minimal:
    """Shrink `case`, which `build` fails, and write what is left to `path`. Raises NotFailingError.

    say(runs so far, what is left) is called whenever something could be taken away.
    """
    state = whole(case)
    if case.source and path.resolve() == Path(case.source).resolve():
        raise NotFailingError(f"{path} holds the case itself; give another file with --out")
    if not path.absolute().parent.is_dir():
        raise NotFailingError(f"{path} cannot be written: its folder does not exist")
    result, evidence = runner.examine(build, case)
    gates = tuple(gate for gate, outcome in result.gates.items() if outcome is Outcome.REJECT)
    if evidence is None or not gates:
        raise NotFailingError(f"{build.id} is not rejected on {case.id}; there is nothing to shrink")
    variants = data.variants(case)
    arrays = data.operands(case, STALE if STALE in variants else variants[0]).arrays
    tried = 0
    with tempfile.TemporaryDirectory(prefix="mxgate-") as folder:

        def rejecting(kept: Kept) -> str | None:
            """The gate that rejects what is kept, if it is one that rejected the whole."""
            nonlocal tried
            tried += 1
            runner.count_hangs({})
            file = Path(folder) / f"{tried}.safetensors"
            recorded.save(file, "minimal", case, cut(case, arrays, kept))
            found, _ = runner.examine(build, recorded.cases(file)[0])
            file.unlink()
            return next((gate for gate in gates if found.gates.get(gate) is Outcome.REJECT), None)

        gate = rejecting(state)
        if gate is None:
            raise NotFailingError(f"{build.id} passes the bytes of {case.id} given as a recorded call")
        full, before = state, None
        while before != state:
            before = state
            for axis in AXES:
                state = _shrink(state, axis, lambda kept: rejecting(kept) is not None, lambda k: say(tried, k.words))
        gate = rejecting(state) or gate
    recorded.save(path, "minimal", case, cut(case, arrays, state))
    return Minimal(recorded.cases(path)[0], gate, full, state, tried)


def _shrink(state: Kept, axis: str, fails: Callable[[Kept], bool], found: Callable[[Kept], None]) -> Kept:
    """Take away halves, then quarters and so on down to single pieces of an axis while it still fails."""
    least = 0 if axis in ("tokens", "tail") else 1
    pieces = 2
    while len(kept := getattr(state, axis)) > least:
        size = -(-len(kept) // pieces)
        for start in range(0, len(kept), size):
            rest = kept[:start] + kept[start + size :]
            smaller = _without(state, axis, rest)
            if len(rest) >= least and fails(smaller):
                state = smaller
                found(state)
                pieces = max(2, pieces - 1)
                break
        else:
            if size == 1:
                break
            pieces = min(len(kept), pieces * 2)
    return state


def _without(state: Kept, axis: str, rest: Sequence[Any]) -> Kept:
    if axis == "experts":
        return replace(state, experts=tuple(rest), tokens=tuple(t for t in state.tokens if t[0] in set(rest)))
    return replace(state, **{axis: tuple(rest)})
