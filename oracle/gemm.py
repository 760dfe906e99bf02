"""Forward, dgrad and wgrad over groups of tokens: the exact answer, its interval, and the float32 oracle.

Shapes and scale axes are the numeric contract's section 4; `offsets` are int32 cumulative ends, one for an expert.
What lies past the last offset has no influence, whatever its bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import bound
from .exact import F64, Operand, Pool, product
from .formats import BLOCK
from .groups import Offsets, check_offsets, spans
from .quantize import MXArray

# Scratch memory follows the operands' size: operands + scratch + output stays below three operands + output.
WORK = (1 << 25, 1 << 31)


@dataclass(frozen=True)
class Problem:
    """One grouped product, checked: op, operands and offsets, and the shapes that follow from them."""

    op: str
    a: MXArray
    b: MXArray
    offsets: Offsets

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the output."""
        if self.op == "forward":
            return (self.a.shape[0], self.b.shape[1])
        if self.op == "dgrad":
            return (self.a.shape[0], self.b.shape[2])
        return (self.offsets.size, self.a.shape[0], self.b.shape[0])

    @property
    def terms(self) -> NDArray[np.int64]:
        """Products in an output element: [M, 1], or [E, 1, 1] for wgrad."""
        sizes = np.diff(self.offsets, prepend=0).astype(np.int64)
        if self.op == "wgrad":
            return sizes[:, None, None]
        rows = np.zeros((self.a.shape[0], 1), np.int64)
        rows[: self.offsets[-1]] = self.a.shape[1]
        return rows

    def group(self, expert: int) -> tuple[Any, Operand, Operand]:
        """(index of the group's part of the output, A, B): out[index] = A B^T."""
        start, stop = spans(self.offsets)[expert]
        if self.op == "wgrad":
            return expert, _operand(self.a).part(start, stop), _operand(self.b).part(start, stop)
        return slice(start, stop), _operand(self.a, rows=(start, stop)), _operand(self.b, expert, self.op == "dgrad")

    def groups(self) -> Iterator[tuple[Any, Operand, Operand]]:
        """All that are not empty, in order."""
        for expert, (start, stop) in enumerate(spans(self.offsets)):
            if stop > start:
                yield self.group(expert)


def _operand(
    mx: MXArray, expert: int | None = None, turned: bool = False, rows: tuple[int, int] | None = None
) -> Operand:
    """One matrix of an MXArray with the contraction last: an expert's (`turned`: contracted along its first axis), or
    `rows` (start, stop) of one that all experts share.

    A 32x32 block's scale is repeated for each of its 32 rows.
    """
    codes, scales = mx.codes(), mx.scale_codes()
    if expert is not None:
        codes, scales = codes[expert], scales[expert]
    if turned:
        codes, scales = np.ascontiguousarray(codes.T), np.ascontiguousarray(scales.T)
    square = isinstance(mx.block, tuple)
    if rows is not None:
        start, stop = rows
        codes = codes[start:stop]
        scales = scales[np.arange(start, stop) // BLOCK] if square else scales[start:stop]
    elif square:
        scales = np.repeat(scales, BLOCK, axis=0)
    return Operand(codes, scales, mx.format)


def _check(role: str, mx: Any, ndim: int, axis: int) -> None:
    """One operand: an MXArray of `ndim` axes with its blocks along `axis`, or 32x32 over the last two."""
    if not isinstance(mx, MXArray):
        raise TypeError(f"{role} is a {type(mx).__name__}; expected an MXArray")
    if len(mx.shape) != ndim:
        raise ValueError(f"{role} has shape {mx.shape}; expected {ndim} axes")
    if mx.axis not in (axis, (ndim - 2, ndim - 1)):
        raise ValueError(
            f"{role} has scale blocks along axis {mx.axis}; expected axis {axis}, the contraction, "
            f"or 32x32 blocks over axes {(ndim - 2, ndim - 1)}"
        )


def problem(op: str, a: MXArray, b: MXArray, offsets: Offsets) -> Problem:
    """Check a grouped product. op: "forward", "dgrad" or "wgrad". TypeError or ValueError, one line, for bad input."""
    if op not in _CHECKS:
        raise ValueError(f"unknown op {op!r}; expected one of {', '.join(_CHECKS)}")
    (name_a, ndim_a, axis_a), (name_b, ndim_b, axis_b) = _CHECKS[op]
    _check(name_a, a, ndim_a, axis_a)
    _check(name_b, b, ndim_b, axis_b)
    if a.shape[axis_a] != b.shape[axis_b]:
        raise ValueError(
            f"the contraction is {a.shape[axis_a]} long in {name_a} {a.shape} and {b.shape[axis_b]} long in "
            f"{name_b} {b.shape}; expected the same length"
        )
    if op == "wgrad":
        check_offsets(offsets, a.shape[1], align=BLOCK)
    else:
        check_offsets(offsets, a.shape[0], experts=b.shape[0])
    return Problem(op, a, b, offsets)


# Each operand's name, number of axes and contraction axis.
_CHECKS = {
    "forward": (("x", 2, 1), ("w", 3, 2)),
    "dgrad": (("dy", 2, 1), ("w", 3, 1)),
    "wgrad": (("dy_t", 2, 1), ("x_t", 2, 1)),
}


@dataclass(frozen=True, eq=False)
class Answer:
    """The exact result of a grouped product.

    value: float64, the exact sum rounded once, to nearest even; +0 for a zero, for an empty group and for rows past the
    last offset; NaN and infinities by IEEE rules. magnitude: float64, sum |a||b| rounded once; same shape.
    terms: int64, products in a sum, [M, 1] for forward and dgrad, [E, 1, 1] for wgrad.
    """

    value: F64
    magnitude: F64
    terms: NDArray[np.int64]
    _problem: Problem = field(repr=False)

    def interval(self, accumulator: str, out_dtype: Any) -> tuple[F64, F64]:
        """(lo, hi) of what `accumulator` may legitimately give in `out_dtype`; see bound.interval."""
        return bound.interval(self.value, self.magnitude, self.terms, accumulator, out_dtype)

    def fp32(self) -> NDArray[np.float32]:
        """The classic reference: one float32 matrix product of the dequantized operands for each expert."""
        out = np.zeros(self.value.shape, np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            for index, a, b in self._problem.groups():
                out[index] = a.values().astype(np.float32) @ b.values().astype(np.float32).T
        return out


def answer(checked: Problem) -> Answer:
    """The exact answer of a checked problem, one expert at a time."""
    value, magnitude = np.zeros(checked.shape), np.zeros(checked.shape)
    work = int(np.clip(1.8 * (checked.a.elements.size + checked.b.elements.size), *WORK))
    pool = Pool()
    for index, a, b in checked.groups():
        product(a, b, value[index], magnitude[index], work, pool)
    return Answer(value, magnitude, checked.terms, checked)


def forward(x: MXArray, w: MXArray, offsets: Offsets) -> Answer:
    """Y[g] = X[g] W[g]^T. x [M, K] and w [E, N, K], blocks along K; value [M, N]."""
    return answer(problem("forward", x, w, offsets))


def dgrad(dy: MXArray, w: MXArray, offsets: Offsets) -> Answer:
    """dX[g] = dY[g] W[g]. dy [M, N] and w [E, N, K], blocks along N; value [M, K]."""
    return answer(problem("dgrad", dy, w, offsets))


def wgrad(dy_t: MXArray, x_t: MXArray, offsets: Offsets) -> Answer:
    """dW[g] = dY[g]^T X[g]. dy_t [N, M] and x_t [K, M], blocks along the tokens; value [E, N, K].

    Boundaries are multiples of 32.
    """
    return answer(problem("wgrad", dy_t, x_t, offsets))
