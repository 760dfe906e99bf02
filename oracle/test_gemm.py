"""The exact answer against the twin, exhaustive tables and itself.

Not caught: an error that the twin makes too (it shares no code), and one that needs an output too large for a laptop's
test run; the paths that only large products take (threads, Strassen, flushed sums) are forced on small ones instead.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from mxgate.oracle import FORMATS, Answer, MXArray, dgrad, exact, forward, quantize, twin, wgrad
from mxgate.oracle.bound import accumulator
from mxgate.oracle.formats import E8M0, decode_table

OPS = {"forward": forward, "dgrad": dgrad, "wgrad": wgrad}
F8 = ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")


def mx(codes: Any, scales: Any, axis: Any = 1, format: str = "e4m3fn") -> MXArray:
    codes, scales = np.ascontiguousarray(codes, np.uint8), np.ascontiguousarray(scales, np.uint8)
    block = (32, 32) if isinstance(axis, tuple) else 32
    return MXArray(codes.view(FORMATS[format].dtype), scales.view(E8M0.dtype), axis, format, block)


def ends(*offsets: int) -> np.ndarray:
    return np.array(offsets, np.int32)


def random_mx(
    rng: np.random.Generator, shape: tuple[int, ...], axis: Any, format: str, spread: int, special: bool = False
) -> MXArray:
    """Any finite code and any scale within 2^+-spread; `special`: a few NaN and infinity codes and 0xFF scales too."""
    axes = axis if isinstance(axis, tuple) else (axis,)
    blocks = tuple(n // 32 if i in axes else n for i, n in enumerate(shape))
    scales = rng.integers(max(0, 127 - spread), min(254, 127 + spread) + 1, blocks)
    finite = np.isfinite(decode_table(format))
    codes = rng.choice(np.flatnonzero(finite), shape)
    if special:
        odd = [*FORMATS[format].nan_codes[:1], *FORMATS[format].inf_codes * 3, 0, 0]
        codes = np.where(rng.random(shape) < 0.01, rng.choice(odd, shape), codes)
        scales = np.where(rng.random(blocks) < 0.02, 255, scales)
    return mx(codes, scales, axis, format)


def random_case(rng: np.random.Generator, spread: int, special: bool = False) -> tuple[str, MXArray, MXArray, Any]:
    """Some op with some formats, blocks and groups (empty ones, and a tail past the last offset, among them)."""
    op = str(rng.choice(list(OPS)))
    square = bool(rng.integers(16) == 0)
    few = 32 if square else int(rng.integers(1, 4))
    experts = int(rng.integers(1, 4))
    if op == "wgrad":
        groups = np.sort(rng.integers(0, 4, experts)) * 32
        shapes: list[tuple[int, ...]] = [(few, 96), (32 if square else 3, 96)]
    else:
        tokens = 32 if square else 4
        groups = np.sort(rng.integers(0, tokens + 1, experts))
        shapes = [(tokens, 64), (experts, few, 64) if op == "forward" else (experts, 64, few)]
    pair = []
    for shape, axis in zip(shapes, (1, {"forward": 2, "dgrad": 1, "wgrad": 1}[op]), strict=True):
        axes = (len(shape) - 2, len(shape) - 1) if square else axis
        pair.append(random_mx(rng, shape, axes, str(rng.choice(list(FORMATS))), spread, special))
    return op, pair[0], pair[1], groups.astype(np.int32)


def image(array: Any) -> bytes:
    """The bytes of a float64 array with every NaN the same: the sign of a zero counts, a NaN's does not."""
    x = np.asarray(array, np.float64)
    return str(x.shape).encode() + np.where(np.isnan(x), np.nan, x).tobytes()


def same(found: Answer, expected: tuple[Any, Any]) -> bool:
    return image(found.value) == image(expected[0]) and image(found.magnitude) == image(expected[1])


@pytest.mark.parametrize("part", range(4))
def test_a_thousand_small_cases_equal_the_twin(part: int) -> None:
    """Exponents spread over 2^+-120 and less, every op, format pair and block shape."""
    rng = np.random.default_rng(part)
    for i in range(250):
        op, a, b, offsets = random_case(rng, int(rng.choice([0, 3, 12, 40, 120, 120])))
        assert same(OPS[op](a, b, offsets), getattr(twin, op)(a, b, offsets)), (part, i, op, a, b, offsets)


def test_operands_without_a_low_digit() -> None:
    """Every element the largest of its format: too long a sum for one product, and nothing in the lowest digit."""
    a, b = mx([[0x7B] * 32], [[127]], format="e5m2"), mx([[0x7E] * 32], [[127]])
    answer = wgrad(a, b, ends(32))
    assert answer.value.tolist() == answer.magnitude.tolist() == [[[57344.0 * 448 * 32]]]


def test_nan_and_infinity_go_where_ieee_arithmetic_sends_them() -> None:
    """NaN elements, 0xFF scales, infinities against zeros and against each other, in operands and in the tail."""
    rng = np.random.default_rng(11)
    for i in range(150):
        op, a, b, offsets = random_case(rng, 3, special=True)
        assert same(OPS[op](a, b, offsets), getattr(twin, op)(a, b, offsets)), (i, op, a, b, offsets)


@pytest.mark.parametrize(("left", "right"), list(itertools.product(F8, F8)))
def test_all_products_of_two_codes(left: str, right: str) -> None:
    """256 x 256 products in one GEMM: a code in the first place of each row, zeros behind it."""
    codes = np.zeros((256, 32), np.uint8)
    codes[:, 0] = np.arange(256)
    scales = np.full((256, 1), 127)
    found = wgrad(mx(codes, scales, format=left), mx(codes, scales, format=right), ends(32)).value[0]
    one = 2**350
    parts = [[twin.element(code, 127, f) for code in range(256)] for f in (left, right)]
    values = [np.array([x / one if isinstance(x, int) else x for x in side]) for side in parts]
    with np.errstate(invalid="ignore"):
        assert image(found) == image(np.outer(*values) + 0.0)


@pytest.mark.parametrize("op", OPS)
def test_all_pairs_of_scales(op: str) -> None:
    """255 x 255 scale pairs in one GEMM of each op, a scale a row."""
    codes, scales = np.zeros((255, 32), np.uint8), np.arange(255)[:, None]
    codes[:, 0] = 0x38
    x = mx(codes, scales)
    w = mx(codes[None], scales[None], 2) if op == "forward" else mx(codes.T[None], scales.T[None], 1)
    answer = wgrad(x, x, ends(32)) if op == "wgrad" else OPS[op](x, w, ends(255))
    expected = np.ldexp(1.0, np.add.outer(np.arange(255), np.arange(255)) - 254)
    assert image(answer.value.reshape(255, 255)) == image(answer.magnitude.reshape(255, 255)) == image(expected)


def test_all_scales_in_one_row() -> None:
    """255 blocks of a row with 255 different scales against the same in other orders: sums of 500 bits and more."""
    rng = np.random.default_rng(5)
    orders = np.stack([np.arange(255), np.arange(255)[::-1], rng.permutation(255)])
    codes = rng.integers(0, 0x7F, (3, 255 * 32)) | rng.choice([0, 0x80], (3, 255 * 32))
    a, b = mx(codes, orders), mx(codes[::-1], orders[[1, 0, 2]])
    assert same(wgrad(a, b, ends(255 * 32)), twin.wgrad(a, b, ends(255 * 32)))


@pytest.mark.parametrize("sign", [1, -1])
def test_ties_go_to_even_and_the_last_bit_breaks_them(sign: int) -> None:
    """Sums that are half-way between two float64, and 2^-150 to either side of it."""
    cases = []
    for odd, half, rest in itertools.product((0, 1), (0, 1, -1), (0, 1, -1)):
        # 2^53 + 2 odd + half + rest 2^-150, a term a block.
        cases.append([(1, 53), (odd, 1), (half, 0), (rest, -150)])
    codes, scales = np.zeros((len(cases), 128), np.uint8), np.full((len(cases), 4), 127)
    for i, case in enumerate(cases):
        for j, (factor, power) in enumerate(case):
            codes[i, 32 * j] = 0 if factor == 0 else 0x38 if factor * sign > 0 else 0xB8
            scales[i, j] = 127 + power if power > -127 else 127 - 75
    ones, one_scales = np.full((1, 128), 0x38), np.array([[127, 127, 127, 127 - 75]])
    found = wgrad(mx(codes, scales), mx(ones, one_scales), ends(128)).value[0, :, 0]
    for x, case in zip(found, cases, strict=True):
        assert x == float(sign * sum((f * Fraction(2) ** p for f, p in case), Fraction(0))), case


@pytest.mark.parametrize("bits", [30, 52, 56, 61])
@pytest.mark.parametrize("limbs", [1, 2, 3, 4, 7, 20])
def test_rounding_of_limbs(limbs: int, bits: int) -> None:
    """Random limbs with long runs of zeros and ones, so that many sums are a tie or next to one."""
    rng = np.random.default_rng(limbs)
    count = 1500
    parts = []
    for _ in range(limbs):
        wide = rng.integers(-(2**bits), 2**bits, count)
        runs = (np.int64(1) << rng.integers(0, bits, count)) * rng.choice([-1, 1], count) + rng.integers(-1, 2, count)
        parts.append(np.where(rng.random(count) < 0.3, wide, np.where(rng.random(count) < 0.6, runs, 0))[None])
    found = exact._rounded(parts)[0]
    for i, x in enumerate(found):
        assert x == float(sum(int(part[0, i]) << (exact.DIGIT * k) for k, part in enumerate(parts)))


def test_a_total_outgrows_float64_unharmed() -> None:
    """Nine odd integers of 51 or 52 bits into each of 300 totals: no bit may be lost when a third no longer fits."""
    rng = np.random.default_rng(1)
    terms = rng.integers(2**50, 2**52 - 2**48, (9, 300)) | 1
    total = exact._Total(np.empty((1, 300)), exact.Pool())
    one = exact._Integers.measured(np.ones((1, 1)))
    for term in terms:
        total.add(0, one, exact._Integers.measured(term[:, None].astype(np.float64)))
    total.round(np.zeros(1, np.int64), np.zeros(300, np.int64))
    assert total.tile[0].tolist() == [float(sum(int(x) for x in column)) for column in terms.T]


def test_long_rows_of_full_digits() -> None:
    """8,192 products a sum with every low digit near its largest: the length is cut where the certificate needs it."""
    codes, scales = np.full((3, 8192), 0x7E), np.full((3, 256), 127 + 3)
    codes[:, 32:64], scales[:, 1] = 0x01, 127  # the unit, and 2^20.8 units in most places
    codes[:, :32], scales[:, 0] = 0x38, 127 + 24  # a high digit
    codes[1, 64::2] |= 0x80
    a = mx(codes, scales)
    assert same(wgrad(a, a, ends(8192)), twin.wgrad(a, a, ends(8192)))


HASHES = """
import hashlib
import numpy as np
from mxgate.oracle import exact, quantize, wgrad
exact.STRASSEN, exact._THREADED = 64, 1 << 15
rng = np.random.default_rng(3)
for spread in (0, 12, 40):
    operands = []
    for rows in (130, 162):
        x = rng.standard_normal((rows, 16, 32), dtype=np.float32)
        x = np.ldexp(x, rng.integers(-spread, spread + 1, (rows, 16, 1))).reshape(rows, 512)
        operands.append(quantize(x, axis=1))
    answer = wgrad(*operands, np.array([192, 192, 512], np.int32))
    print(hashlib.sha256(answer.value.tobytes() + answer.magnitude.tobytes()).hexdigest())
"""


def test_same_bytes_on_any_number_of_threads() -> None:
    """Fresh processes with one and two BLAS threads (and as many of ours)."""
    outputs = set()
    for threads in ("1", "2"):
        env = os.environ | {"OPENBLAS_NUM_THREADS": threads, "OMP_NUM_THREADS": threads}
        done = subprocess.run([sys.executable, "-c", HASHES], env=env, capture_output=True, text=True, check=True)
        outputs.add(done.stdout)
    assert len(outputs) == 1
    assert len(outputs.pop().split()) == 3


def normal(rng: np.random.Generator, rows: int, length: int, spread: int = 0) -> MXArray:
    x = rng.standard_normal((rows, length // 32, 32), dtype=np.float32)
    x = np.ldexp(x, rng.integers(-spread, spread + 1, (rows, length // 32, 1))).astype(np.float32)
    return quantize(x.reshape(rows, length), axis=1)


@pytest.mark.parametrize("spread", [0, 8, 12, 30, 100])
def test_the_roads_to_an_answer_agree(spread: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole or in tiles and chunks, by Strassen's products or plain ones, kept in float64 or flushed and carried."""
    rng = np.random.default_rng(spread)
    a, b = normal(rng, 64, 512, spread), normal(rng, 96, 512, spread)
    offsets = ends(480)
    reference = wgrad(a, b, offsets)
    expected = hashlib.sha256(reference.value.tobytes() + reference.magnitude.tobytes()).hexdigest()
    flushed = []
    real = exact._Total._flush

    def flush(self: exact._Total, k: int) -> None:
        flushed.append(k)
        real(self, k)

    monkeypatch.setattr(exact._Total, "_flush", flush)
    for plan, strassen, threaded, flushes, length, limit in (
        ((64, 480), 16, 1, 256, 2048, exact.EXACT),
        ((13, 32), 1 << 30, 1 << 30, 1, 2048, exact.EXACT),
        ((64, 96), 16, 1 << 30, 3, 64, exact.EXACT),
        ((7, 480), 1 << 30, 1 << 30, 256, 32, exact.EXACT),
        ((64, 32), 1 << 30, 1 << 30, 1, 2048, 0.0),  # no float64 may hold more than one product
    ):
        monkeypatch.setattr(exact, "_plan", lambda *_, plan=plan: plan)
        monkeypatch.setattr(exact, "STRASSEN", strassen)
        monkeypatch.setattr(exact, "_THREADED", threaded)
        monkeypatch.setattr(exact, "FLUSHES", flushes)
        monkeypatch.setattr(exact, "DIGIT_LENGTH", length)
        monkeypatch.setattr(exact._Total, "limit", limit)
        found = wgrad(a, b, offsets)
        assert hashlib.sha256(found.value.tobytes() + found.magnitude.tobytes()).hexdigest() == expected, plan
    assert len(flushed) > 20


@pytest.mark.parametrize("bits", [0.0, 1.2])
def test_strassen_is_used_up_to_its_limit_and_not_beyond(bits: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Odd integers as large as the certificate allows, and `bits` larger, with the signs that make P6 largest."""
    monkeypatch.setattr(exact, "STRASSEN", 32)
    rng = np.random.default_rng(0)
    size = 2.0 ** ((53 + bits) / 2) / np.sqrt(10.0 * 32)
    half = np.where(np.arange(64) < 32, -1, 1)
    sides = []
    for signs in (np.where((half[:, None] < 0) & (half < 0), -1, 1), np.where((half[:, None] > 0) & (half < 0), -1, 1)):
        sides.append((signs * np.floor(size * (1 - 1e-3 * rng.random((64, 64))) / 2) * 2 + signs).astype(np.float64))
    a, b = (exact._Integers.measured(side.copy()) for side in sides)
    assert (10 * a.half * b.half <= exact.EXACT) == (bits == 0) and a.norm * b.norm <= exact.EXACT
    out = np.empty((64, 64))
    exact._multiply(a, b, out, exact.Pool())
    integers = [[[int(x) for x in row] for row in side] for side in sides]
    assert out.tolist() == [[sum(x * y for x, y in zip(r, c, strict=True)) for c in integers[1]] for r in integers[0]]


def test_an_uncertified_product_is_refused() -> None:
    x = exact._Integers.measured(np.full((2, 32), 2.0**25))
    with pytest.raises(AssertionError, match="exact product"):
        exact._multiply(x, x, np.empty((2, 2)), exact.Pool())


@pytest.mark.parametrize("op", OPS)
def test_padding_has_no_influence(op: str) -> None:
    """Every byte past the last offset replaced by NaN codes and 0xFF scales: the same bytes come out."""
    rng = np.random.default_rng(9)
    a = random_mx(rng, (64, 64), 1, "e5m2", 9)
    b = random_mx(
        rng, {"forward": (2, 5, 64), "dgrad": (2, 64, 5), "wgrad": (7, 64)}[op], 2 if op == "forward" else 1, "e5m2", 9
    )
    offsets = ends(32, 32)
    clean = OPS[op](a, b, offsets)
    for array in (a, b) if op == "wgrad" else (a,):
        if op == "wgrad":
            array.codes()[:, 32:], array.scale_codes()[:, 1:] = 0x7F, 0xFF
        else:
            array.codes()[32:], array.scale_codes()[32:] = 0x7C, 0xFF
    dirty = OPS[op](a, b, offsets)
    assert image(clean.value) == image(dirty.value) and image(clean.magnitude) == image(dirty.magnitude)
    past = dirty.value[1] if op == "wgrad" else dirty.value[32:]
    assert past.tobytes() == bytes(past.nbytes)
    expected = [[[32]], [[0]]] if op == "wgrad" else [[64]] * 32 + [[0]] * 32
    assert dirty.terms.tolist() == expected


def test_no_tokens_at_all() -> None:
    a, b = mx(np.full((2, 32), 0x7F), np.full((2, 1), 255)), mx(np.full((3, 32), 0x7F), np.full((3, 1), 255))
    answer = wgrad(a, b, ends(0, 0))
    assert answer.value.tobytes() == answer.magnitude.tobytes() == bytes(2 * 2 * 3 * 8)


def test_a_zero_is_plus_zero() -> None:
    """Negative zeros, products of mixed zeros, and sums that cancel."""
    minus, plus = mx(np.full((1, 32), 0x80), [[127]]), mx(np.full((1, 32), 0x38), [[127]])
    half = mx(np.r_[np.full(16, 0x38), np.full(16, 0xB8)][None], [[127]])
    for a, b in itertools.product((minus, half), (plus, minus)):
        assert wgrad(a, b, ends(32)).value.tobytes() == bytes(8)


@pytest.mark.parametrize("op", OPS)
def test_fp32_is_within_its_own_row(op: str) -> None:
    rng = np.random.default_rng(2)
    if op == "wgrad":
        answer = wgrad(normal(rng, 40, 256), normal(rng, 24, 256), ends(96, 96, 224))
    else:
        w = quantize(rng.standard_normal((3, 64, 96), dtype=np.float32), axis=2 if op == "forward" else 1)
        answer = OPS[op](normal(rng, 50, 96 if op == "forward" else 64), w, ends(7, 7, 41))
    reach = accumulator("fp32-any-order").coefficient(answer.terms) * answer.magnitude
    assert answer.fp32().dtype == np.float32
    assert np.all(np.abs(answer.fp32().astype(np.float64) - answer.value) <= reach)
    assert np.count_nonzero(answer.value) > 0


ONE = mx(np.zeros((4, 64)), np.zeros((4, 2)))
W = mx(np.zeros((2, 3, 64)), np.zeros((2, 3, 2)), 2)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: wgrad(ONE, ONE, ends(64, 32)), "offsets[1] is 32, below"),
        (lambda: wgrad(ONE, ONE, ends(-32, 32)), "offsets[0] is -32; expected 0 or more"),
        (lambda: wgrad(ONE, ONE, ends(32, 96)), "past the buffer; expected at most 64"),
        (lambda: wgrad(ONE, ONE, ends(16, 64)), "offsets[0] is 16; expected a multiple of 32"),
        (lambda: wgrad(ONE, ONE, ends(32).astype(np.int64)), "offsets have type int64; expected an int32"),
        (lambda: wgrad(ONE, ONE, [32]), "offsets have type list"),  # type: ignore[arg-type]
        (lambda: wgrad(ONE, ONE, ends(32)[None]), "offsets have shape (1, 1)"),
        (lambda: wgrad(ONE, ONE, ends()), "offsets have shape (0,)"),
        (lambda: forward(ONE, W, ends(4)), "offsets hold 1 ends; expected 2"),
        (lambda: forward(ONE, W, ends(2, 5)), "offsets[1] is 5, past the buffer; expected at most 4"),
        (lambda: forward(ONE, ONE, ends(4)), "w has shape (4, 64); expected 3 axes"),
        (lambda: forward(W, W, ends(4)), "x has shape (2, 3, 64); expected 2 axes"),
        (lambda: dgrad(ONE, W, ends(2, 4)), "w has scale blocks along axis 2; expected axis 1, the contraction"),
        (lambda: wgrad(ONE, mx(np.zeros((4, 96)), np.zeros((4, 3))), ends(64)), "64 long in dy_t (4, 64) and 96 long"),
        (lambda: wgrad(np.zeros((4, 64)), ONE, ends(64)), "dy_t is a ndarray; expected an MXArray"),  # type: ignore[arg-type]
    ],
)
def test_bad_input_gets_one_clear_line(call: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    assert words in str(caught.value) and "\n" not in str(caught.value)
