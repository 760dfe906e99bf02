"""Rounding, accumulator rows and intervals: against a definition in fractions, simulated accumulators and measurements.

Not caught: hardware that adds in some way no row here describes, and a wrong output that happens to lie inside its
interval (a single dropped product of a long sum does, under an any-order float32 accumulator).
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from mxgate.oracle import ACCUMULATORS, Answer, MXArray, dequantize, quantize, wgrad
from mxgate.oracle.bound import BFLOAT16, interval, outside, round_to

F32, F16 = np.dtype(np.float32), np.dtype(np.float16)
SHORT = {"bfloat16": BFLOAT16, "float16": F16}
LAYOUT = {BFLOAT16: (8, 127), F16: (11, 15), F32: (24, 127)}  # significand bits, largest exponent


def nearest(x: float, dtype: np.dtype[Any]) -> float:
    """x rounded to nearest even from the definition."""
    bits, top = LAYOUT[dtype]
    exact = Fraction(x)
    if exact == 0:
        return 0.0
    exponent = np.frexp(abs(x))[1] - 1
    last = Fraction(2) ** int(max(exponent, 1 - top) - (bits - 1))
    rounded = round(exact / last) * last  # Python rounds a Fraction to nearest even
    return float(np.inf * np.sign(x)) if abs(rounded) >= Fraction(2) ** (top + 1) else float(rounded)


@pytest.mark.parametrize("name", SHORT)
def test_every_pattern_and_every_midpoint(name: str) -> None:
    """All 65,536 values stay what they are; half-way goes to even; a float64 ulp beside it goes to its own side."""
    dtype = SHORT[name]
    codes = np.arange(1 << 16, dtype=np.uint16)
    values = codes.view(dtype)
    with np.errstate(invalid="ignore"):
        exact = values.astype(np.float64)
    assert np.array_equal(round_to(exact, dtype)[~np.isnan(exact)].view(np.uint16), codes[~np.isnan(exact)])
    assert np.isnan(round_to(exact, dtype)[np.isnan(exact)].astype(np.float64)).all()
    low = exact[:-1]
    pairs = np.isfinite(low) & (np.signbit(low) == np.signbit(exact[1:])) & ~np.isnan(exact[1:])
    low, code = low[pairs], codes[:-1][pairs]
    top = LAYOUT[dtype][1]
    high = np.where(np.isinf(exact[1:][pairs]), np.copysign(2.0 ** (top + 1), low), exact[1:][pairs])
    middle = (low + high) / 2
    assert np.array_equal(round_to(middle, dtype).view(np.uint16), code + (code & 1))
    assert np.array_equal(round_to(np.nextafter(middle, 0), dtype).view(np.uint16), code)
    assert np.array_equal(round_to(np.nextafter(middle, np.copysign(np.inf, middle)), dtype).view(np.uint16), code + 1)


@pytest.mark.parametrize("dtype", LAYOUT, ids=str)
def test_rounding_equals_its_definition(dtype: np.dtype[Any]) -> None:
    """Near every boundary: powers of two, subnormals, overflow, and float32's own midpoints."""
    rng = np.random.default_rng(0)
    bits, top = LAYOUT[dtype]
    exponents = np.r_[rng.integers(-160, 135, 300), rng.integers(-top - bits - 2, 4 - top, 300), [top, top + 1] * 20]
    kept = rng.integers(1, 1 << 25, exponents.size)
    values = np.ldexp(kept.astype(np.float64), exponents - 24)
    for x in np.r_[values, -values, np.nextafter(values, np.inf), np.nextafter(values, -np.inf)]:
        assert float(round_to(np.array(x), dtype).astype(np.float64)) == nearest(float(x), dtype), x


def test_bfloat16_is_rounded_once() -> None:
    """A value that float32 would first round onto the midpoint: ml_dtypes' own cast gets this one wrong."""
    x = np.array([1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-8 - 2.0**-40])
    assert round_to(x, BFLOAT16).astype(np.float64).tolist() == [1 + 2.0**-7, 1.0]
    assert x.astype(ml_dtypes.bfloat16).astype(np.float64).tolist() != [1 + 2.0**-7, 1.0]


# The numeric contract's section 6: log2 of max |error| / sum |a||b| on an H200, by route:
# (normal K=128, normal K=4096, exponents spread 2^+-6 K=128, the same K=4096), and the rows that claim the route.
MEASURED = {
    "bf16, float32 accumulate": ((-25.4, -24.6, -20.9, -18.9), "wgmma-bf16"),
    "fp8, 32 products a step": ((-14.7, -17.8, -11.5, -13.9), "wgmma-fp8-13bit"),
    "fp8 chained over 128": ((-12.7, -15.9, -10.3, -13.1), "wgmma-fp8-13bit"),
    "vendor fp8, fast accumulate": ((-12.7, -11.6, -10.3, -9.9), "wgmma-fp8-13bit"),
    "vendor fp8, slow accumulate": ((-12.7, -15.9, -10.3, -13.1), "wgmma-fp8-13bit"),
    "fp8 through bf16": ((-25.4, -24.6, -21.2, -18.8), "wgmma-bf16"),
}


@pytest.mark.parametrize("route", MEASURED)
def test_rows_hold_what_was_measured(route: str) -> None:
    """Inside the row that claims it; the float32 row holds the two bf16 routes and excludes every 13-bit one."""
    figures, row = MEASURED[route]
    terms = np.array([128, 4096, 128, 4096])
    errors = 2.0 ** np.array(figures)
    assert np.all(errors <= ACCUMULATORS[row].coefficient(terms))
    inside = errors <= ACCUMULATORS["fp32-any-order"].coefficient(terms)
    assert inside.all() if row == "wgmma-bf16" else not inside[[0, 2, 3]].any()


def test_stated_failure_probability() -> None:
    assert 0 < ACCUMULATORS["fp32-any-order"].failure_probability(2**29) < 1e-9
    assert ACCUMULATORS["exact"].failure_probability(2**29) == 0


def test_no_row_allows_less_for_more_terms() -> None:
    n = np.arange(1, 5000)
    for row in ACCUMULATORS.values():
        assert np.all(np.diff(row.coefficient(n)) >= 0), row.name
        assert row.name == "exact" or np.all(row.coefficient(n)[1:] > 0)


Terms = NDArray[np.float32]


def sequential(p: Terms) -> Terms:
    last: Terms = np.add.accumulate(p, axis=0, dtype=np.float32)[-1]
    return last


def pairwise(p: Terms) -> Terms:
    while len(p) > 1:
        p = p[0::2] + p[1::2]
    one: Terms = p[0]
    return one


def blocked(p: Terms, size: int = 32) -> Terms:
    blocks: Terms = p.reshape(-1, size, *p.shape[1:])
    return sequential(sequential(blocks.swapaxes(0, 1)))


def split_k(p: Terms) -> Terms:
    return pairwise(sequential(p.reshape(8, -1, *p.shape[1:]).swapaxes(0, 1)))


def shuffled(p: Terms) -> Terms:
    return sequential(p[np.random.default_rng(1).permutation(len(p))])


def ascending(p: Terms) -> Terms:
    """The order that a float32 loop likes least: all of one sign first."""
    return sequential(np.sort(p, axis=0))


def truncating(p: Terms, fraction: int = 13, step: int = 32) -> Terms:
    """Each step's addends and the accumulator cut off `fraction` bits below the largest one's leading bit."""
    total = np.zeros(p.shape[1:])
    for start in range(0, len(p), step):
        addends = np.concatenate([total[None], p[start : start + step].astype(np.float64)])
        unit = np.ldexp(1.0, np.frexp(np.abs(addends).max(axis=0))[1] - 1 - fraction)
        total = (np.trunc(addends / unit) * unit).sum(axis=0)
    return total.astype(np.float32)


ORDERS: dict[str, Callable[[Terms], Terms]] = {
    f.__name__: f for f in (sequential, pairwise, blocked, split_k, shuffled, ascending)
}


def operands(family: str, length: int) -> tuple[MXArray, MXArray]:
    rng = np.random.default_rng(len(family))
    sides = []
    for rows in (12, 10):
        x = rng.standard_normal((rows, length))
        if family == "heavy-tailed":
            x = x * np.exp(2 * rng.standard_normal((rows, length)))
        if family == "positive":
            x = np.abs(x)
        if family == "spread":
            x = x * np.exp2(rng.integers(-6, 7, (rows, length)))
        if family == "tiny":
            x = x * 2.0**-68
        sides.append(x)
    if family == "cancellation":  # the second half undoes the first but for a little
        half = length // 2
        sides[0][:, half:], sides[1][:, half:] = -sides[0][:, :half], sides[1][:, :half]
        sides[1][:, -3:] *= 1.125
    a, b = (quantize(x.astype(np.float32), axis=1) for x in sides)
    return a, b


FAMILIES = ("normal", "heavy-tailed", "positive", "spread", "cancellation", "tiny")


def solved(family: str, length: int) -> tuple[Answer, Terms]:
    """The answer, [1, 12, 10], and the float32 products it sums, [length, 12, 10]."""
    a, b = operands(family, length)
    with np.errstate(under="ignore"):
        x, y = (dequantize(side, np.float64).T for side in (a, b))
        products = (x[:, :, None] * y[:, None, :]).astype(np.float32)
    return wgrad(a, b, np.array([length], np.int32)), products


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [32, 2048])
def test_honest_sums_are_inside_and_one_wrong_element_is_not(family: str, length: int) -> None:
    """Every order of float32 additions, every output type; then one element off by little more than its interval."""
    answer, products = solved(family, length)
    for name, order in ORDERS.items():
        total = order(products)[None].astype(np.float64)
        for dtype in LAYOUT:
            lo, hi = answer.interval("fp32-any-order", dtype)
            out = round_to(total, dtype)
            assert not outside(out, lo, hi).any(), (name, dtype)
            wrong = out.copy()
            wrong[0, 7, 3] = np.nextafter(hi[0, 7, 3].astype(dtype), dtype.type(np.inf))
            assert np.argwhere(outside(wrong, lo, hi)).tolist() == [[0, 7, 3]]


def test_a_wrong_block_scale_leaves_the_interval_at_its_elements() -> None:
    """One block of one row read with twice its scale, 2,048 products a sum, bf16 output: at least half of the row."""
    a, b = operands("normal", 2048)
    answer = wgrad(a, b, np.array([2048], np.int32))
    scales = a.scale_codes().copy()
    scales[5, 17] += 1
    wrong = MXArray(a.elements, scales.view(a.scales.dtype), 1, a.format)
    out = round_to(wgrad(wrong, b, np.array([2048], np.int32)).value, BFLOAT16)
    rows = np.argwhere(outside(out, *answer.interval("fp32-any-order", BFLOAT16)))[:, 1]
    assert set(rows) == {5} and len(rows) >= 5


@pytest.mark.parametrize("family", FAMILIES[:-1])
def test_thirteen_bits_are_inside_their_row_and_outside_the_float32_row(family: str) -> None:
    """Among subnormals the two cannot be told apart, so "tiny" is left out."""
    answer, products = solved(family, 128)
    out = truncating(products)[None]
    assert not outside(out, *answer.interval("wgmma-fp8-13bit", F32)).any()
    assert np.count_nonzero(outside(out, *answer.interval("fp32-any-order", F32))) > out.size // 4
    wide = truncating(products, 25, 16)[None]
    assert not outside(wide, *answer.interval("wgmma-bf16", F32)).any()


def test_the_exact_row_has_one_value() -> None:
    answer, _ = solved("normal", 64)
    for dtype in LAYOUT:
        lo, hi = answer.interval("exact", dtype)
        assert lo.tobytes() == hi.tobytes() == round_to(answer.value, dtype).astype(np.float64).tobytes()


def test_ends_are_outward() -> None:
    """value +- c * magnitude in fractions lies within the ends before they are rounded to the output."""
    rng = np.random.default_rng(4)
    value = rng.standard_normal(500) * np.exp2(rng.integers(-30, 30, 500))
    magnitude = np.abs(value) * np.exp2(rng.random(500) * 10)
    terms = rng.integers(1, 10_000, 500)
    c = ACCUMULATORS["fp32-any-order"].coefficient(terms)
    lo, hi = interval(value, magnitude, terms, "fp32-any-order", F32)
    for v, m, k, low, high in zip(value, magnitude, c, lo, hi, strict=True):
        reach = Fraction(float(k)) * Fraction(float(m))
        assert low <= nearest(float(Fraction(float(v)) - reach), F32)
        assert high >= nearest(float(Fraction(float(v)) + reach), F32)


def test_special_values() -> None:
    """NaN only where NaN must be, infinities themselves, zero sums exactly zero; where a sum may overflow on the way,
    anything."""
    value = np.array([np.nan, np.inf, -np.inf, 0.0, 1.0, 1e39, 1.0])
    magnitude = np.array([np.nan, np.inf, np.inf, 0.0, 1.0, 1e39, 1e39])
    lo, hi = interval(value, magnitude, np.full(7, 64), "fp32-any-order", F32)
    assert np.isnan(lo[0]) and np.isnan(hi[0])
    assert lo[1:4].tolist() == hi[1:4].tolist() == [np.inf, -np.inf, 0.0]
    assert lo[6] == -np.inf and hi[6] == hi[5] == np.inf
    nan, inf = np.float32(np.nan), np.float32(np.inf)
    for out, verdict in (
        ([nan, inf, -inf, 0, 1, inf, 3], [False] * 7),
        ([1, nan, inf, nan, nan, nan, nan], [True] * 5 + [False] * 2),
    ):
        assert outside(np.array(out, np.float32), lo, hi).tolist() == verdict


def test_a_float32_sum_may_overflow_both_ways() -> None:
    """Two halves of a sum, each of which leaves float32's range: infinity less infinity, where the exact sum is 0."""
    halves = np.array([[2e38, 2e38], [-2e38, -2e38]], np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        out = halves.sum(axis=1, dtype=np.float32).sum(keepdims=True)
    assert np.isnan(out).all()
    value, magnitude = np.zeros(1), np.full(1, np.abs(halves.astype(np.float64)).sum())
    assert not outside(out, *interval(value, magnitude, np.full(1, 4), "fp32-any-order", F32)).any()
    assert outside(out, *interval(value, magnitude, np.full(1, 4), "exact", F32)).all()
    assert outside(out, *interval(value, magnitude / 4, np.full(1, 4), "fp32-any-order", F32)).all()


def test_bad_names_and_shapes() -> None:
    x = np.ones(2)
    for call, words in (
        (lambda: interval(x, x, x, "fp32", F32), "unknown accumulator 'fp32'; expected one of exact"),
        (lambda: round_to(x, np.float64), "output type float64 is not one of"),
        (lambda: outside(x, np.ones(3), np.ones(3)), "output has shape (2,); expected (3,)"),
    ):
        with pytest.raises((TypeError, ValueError)) as caught:
            call()
        assert words in str(caught.value)
