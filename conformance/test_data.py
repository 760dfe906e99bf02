"""The cases and their bytes have the properties that the gates build on.

Not shown here: that the families are enough. What they let through is measured with wrong builds, in test_gates and by
`mxgate faults`.
"""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from mxgate.conformance import data
from mxgate.conformance.case import EXACT, ROUTINGS, Case, asked, case_by_id, cases, own_cases, salted
from mxgate.conformance.data import BUDGET, frame, signature
from mxgate.conformance.launch import digest
from mxgate.conformance.poison import COPIED, POISONS, STALE
from mxgate.kernels.build import GEMMS, OPS, registry
from mxgate.oracle import FORMATS, Answer
from mxgate.oracle.bound import round_to
from mxgate.oracle.formats import decode, scale_value

SMOKE = cases(None, "smoke")


def gemms(family: str | None = None, tier: str = "smoke") -> list[Case]:
    return [c for op in GEMMS for c in cases(op, tier) if family is None or c.family == family]


def ids(case: object) -> str:
    return case.id if isinstance(case, Case) else str(case)


# ---------------------------------------------------------------------------------------------------------------------
# Names


def test_ids_are_unique_and_come_back() -> None:
    for tier in ("smoke", "full", "production"):
        listed = cases(None, tier)
        assert len({c.id for c in listed}) == len(listed)
        assert all(case_by_id(c.id) == c for c in listed)
    other = case_by_id(SMOKE[0].id + "@7")
    assert other == salted(SMOKE[0], 7) and other.seed != SMOKE[0].seed


def test_full_includes_smoke() -> None:
    assert set(cases(None, "smoke")) <= set(cases(None, "full"))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: case_by_id("wgrad/64x96/ramp/signature"), "such as wgrad/"),
        (lambda: case_by_id(SMOKE[0].id + "@x"), "not a number"),
        (lambda: cases("conv", "smoke"), "forward, dgrad, wgrad, quantize"),
        (lambda: cases(None, "huge"), "smoke, full, production"),
        (lambda: data.operands(SMOKE[0], "nun"), "expected one of nan"),
    ],
)
def test_a_wrong_name_says_what_was_expected(call: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()  # type: ignore[operator]


def test_every_case_fits_its_op() -> None:
    for case in cases(None, "full") + cases(None, "production"):
        if case.op == "quantize":
            continue
        assert case.tokens <= case.buffer
        if case.op == "wgrad":
            assert all(size % 32 == 0 for size in case.sizes) and case.buffer % 32 == 0
        else:
            assert (case.k if case.op == "forward" else case.n) % 32 == 0


def test_shift32_has_no_inner_boundary_that_is_a_tile_boundary() -> None:
    ends = np.cumsum(ROUTINGS["shift32"][0])[:-1]
    assert (ends % 32 == 0).all() and (ends % 128 != 0).all()


@pytest.mark.parametrize("op", GEMMS)
def test_shapes_that_one_mistake_needs_are_in_a_tier(op: str) -> None:
    smoke, full = ([c for c in cases(op, tier) if c.kind == "signature"] for tier in ("smoke", "full"))
    ends = {e for c in full for e in np.cumsum(c.sizes).tolist()}
    assert max(ends) > 1 << 16 and any(1 << 15 < e < 1 << 16 for e in ends)
    runs = [max(map(len, "".join("x" if s else "0" for s in c.sizes).split("x"))) for c in smoke]
    assert max(runs) > 64 and any(np.flatnonzero(c.sizes).max() > 256 for c in smoke)
    assert any(c.n == c.k == c.buffer for c in smoke)
    assert any(c.tokens == c.buffer == 0 for c in cases(op, "smoke"))
    columns = [c.n if op == "forward" else c.k for c in full]
    assert {c % 16 for c in columns} == set(range(16)) and {c % 16 for c in columns if c > 64} >= {0, 1, 3, 7, 15}
    lengths = (
        [size for c in full for size in c.sizes]
        if op == "wgrad"
        else [c.n + c.k - q for c, q in zip(full, columns, strict=True)]
    )
    assert {length // 32 % 16 for length in lengths if length > 512} == set(range(16))


def test_what_takes_the_emulator_seconds_is_asked_of_one_rung_and_of_every_other_build() -> None:
    for id in ("wgrad/16x32/crowd/signature", "wgrad/42x47/long/signature", "wgrad/64x64/square/signature"):
        case = case_by_id(id)
        for tier, rungs in (("smoke", 1), ("full", 3)):
            chosen = [b for b in registry().values() if b.op == "wgrad" and asked(case, b, tier)]
            assert sum(b.device == "gfx950" for b in chosen) == rungs
            assert {b for b in registry().values() if b.op == "wgrad" and b.device != "gfx950"} <= set(chosen)


@pytest.mark.parametrize("op", GEMMS)
def test_far_scales_leave_float32_where_operands_and_sums_do_not(op: str) -> None:
    case = next(c for c in cases(op, "smoke") if (c.family, c.out_dtype) == ("far-scales", "bfloat16"))
    a, b, answer = real(case)
    assert all((np.abs(x[x != 0]) > 2.0**-126).all() and np.abs(x).max() < 2.0**127 for x in (a, b))
    sums = np.abs(answer.value[: case.tokens] if op != "wgrad" else answer.value)
    assert sums.max() < 2.0**128 and sums[sums > 0].min() >= 2.0**-149
    (_, sa), (_, sb) = data._planes(case)
    together = sa.astype(int)[:, None] + sb.astype(int)[None] - 254
    assert (together > 127).any() and (together < -149).any()
    out = round_to(sums, "bfloat16").astype(np.float64)
    assert np.isinf(out).any() and ((out > 0) & (out < 2.0**-126)).any()


def test_production_is_the_published_shape() -> None:
    case = case_by_id("wgrad/16b/ramp1.5/exact-sum")
    assert (case.n, case.k, case.experts, case.tokens) == (1408, 2048, 8, 195_840)
    assert max(case.sizes) == pytest.approx(1.5 * 195_840 / 8, rel=0.001)
    assert case.n * case.k * case.tokens > data.LARGE


def test_production_has_the_671b_layer() -> None:
    """Whole of builds for a GPU, one expert of it (of at least the mean) of everybody's."""
    for op in GEMMS:
        whole = case_by_id(f"{op}/671b-up/ramp1.5/exact-sum")
        assert (whole.n, whole.k, whole.experts, whole.tokens) == (4096, 7168, 32, 258_304)
        assert max(whole.sizes) == pytest.approx(1.5 * 258_304 / 32, rel=0.002)
        assert (whole.n, whole.k) == (case_by_id(f"{op}/671b-up/single/exact-sum").n, 7168)
        on_gpu, on_cpu = registry()[f"{op}/torch_two_pass"], registry()[f"{op}/numpy_reference"]
        assert whole in own_cases([on_cpu, on_gpu], "production") and not own_cases([on_gpu], "full")
        assert asked(whole, on_gpu, "production") and not asked(whole, on_cpu, "production")
        assert not own_cases([on_cpu], "production")
    for shape in ("671b-up", "671b-down"):
        for case in (c for c in cases(None, "production") if c.shape == shape):
            assert case.experts == 1 and case.tokens >= 8072 and data.is_large(case)
    assert {c.op for c in cases(None, "production") if c.shape == "671b-up"} == set(GEMMS)


# ---------------------------------------------------------------------------------------------------------------------
# Bytes

# SHA-256, first 16 digits, of all operand bytes. They change only on purpose, and the golden files with them.
GOLDEN = {
    "forward/64x96/ramp1.5/exact-sum": "2bf34484ae280c1e",
    "dgrad/96x64/empties/signature": "11ea5de0e2bd280a",
    "wgrad/64x96/shift32/signature": "e7f12cf3b8ac0fa2",
    "wgrad/64x96/ramp1.5/normal": "8a9032278fad1a7d",
    "wgrad/64x96/ramp1.5/heavy-tailed": "5b9880bdc6bf2072",
    "dgrad/96x64/ramp1.5/cancellation": "03a72a1b5e476f2f",
    "forward/64x96/shift32/special+e5m2xe5m2": "518efdb311ec7afd",
    "forward/64x96/uniform/all-codes": "04cfed917e510fb3",
    "wgrad/32x48/17blocks/all-scales": "5ccd4f13c69c2dcc",
    "forward/64x96/empties/bias": "d94b407ffa5b9b1a",
    "wgrad/moe1.up/late/captured": "ed95344fec851a4f",
    "quantize/64x1024/axis1/edges+float32": "fb2b2b67ae279bfe",
    "quantize/64x1024/axis1/maxima": "d3130b87bf2d62e8",
}


def hashed(case: Case, variant: str = "nan") -> str:
    given = data.operands(case, variant)
    arrays = [np.asarray(a) for a in (*given.arrays.values(), *(given.extra or {}).values())]
    return hashlib.sha256(digest(arrays).encode()).hexdigest()[:16]


def test_the_same_id_is_the_same_bytes_everywhere() -> None:
    assert {id: hashed(case_by_id(id)) for id in GOLDEN} == GOLDEN


def test_a_salt_changes_the_data_and_nothing_else() -> None:
    case = case_by_id("wgrad/64x96/ramp1.5/signature")
    one, two = data.operands(case), data.operands(salted(case, 1))
    assert digest([one.arrays["dy_t"]]) != digest([two.arrays["dy_t"]])
    assert np.array_equal(one.arrays["offsets"], two.arrays["offsets"])


@pytest.mark.parametrize("op", GEMMS)
def test_a_variant_changes_padding_and_nothing_else(op: str) -> None:
    for id in (f"{op}/{'96x64' if op == 'dgrad' else '64x96'}/ramp1.5/signature", f"{op}/moe1.up/late/captured"):
        case = case_by_id(id)
        names = data.variants(case)
        assert names == (*POISONS, *((STALE,) if case.family == "captured" else ()), COPIED)
        seen = {}
        for name in names:
            given = data.operands(case, name)
            seen[name] = digest([np.asarray(a) for a in given.arrays.values()])
            for key, axis in OPS[op].padded.items():
                array, cut = given.arrays[key].view(np.uint8), data.operands(case, COPIED).arrays[key].view(np.uint8)
                tokens = np.take(array, range(cut.shape[axis]), axis=axis)
                assert np.array_equal(tokens, cut)
                if name == "nan":
                    rest = np.take(array, range(cut.shape[axis], array.shape[axis]), axis=axis)
                    scales = key.endswith("scales")
                    assert rest.size
                    assert np.isnan(scale_value(rest) if scales else decode(rest, case.formats[0])).all()
        assert len(set(seen.values())) == len(names)


def test_operands_are_shared_and_read_only_where_the_buffer_is_full() -> None:
    case = case_by_id("wgrad/64x96/uniform/all-codes")
    assert data.variants(case) == ("nan",)
    with pytest.raises(ValueError, match="read-only"):
        data.operands(case).arrays["dy_t"][0, 0] = 1


# ---------------------------------------------------------------------------------------------------------------------
# Exactness


def real(case: Case) -> tuple[np.ndarray, np.ndarray, Answer]:
    """Values of A [rows, length] and B [rows, length] in the frame's form, tokens only, and the answer."""
    sides = data._planes(case)
    values = []
    for (codes, scales), format in zip(sides, case.formats, strict=True):
        with np.errstate(invalid="ignore"):
            values.append(decode(codes, format) * np.repeat(scale_value(scales), 32, axis=1))
    answer = data.answer(case, data.operands(case))
    assert isinstance(answer, Answer)
    return values[0], values[1], answer


def pieces(case: Case, a: np.ndarray, b: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """(rows of A, rows of B) of each output block: one contraction each."""
    f = frame(case)
    if case.op == "wgrad":
        return [(a[:, s:e], b[:, s:e]) for s, e in f.segments]
    return [(a[f.expert[0] == g], b[f.expert[1] == g]) for g in range(case.experts)]


def unit(x: np.ndarray) -> np.ndarray:
    """The largest power of two that divides each number (of a zero: infinity)."""
    mantissa, exponent = np.frexp(x)
    whole = (np.abs(mantissa) * 2.0**53).astype(np.int64)
    lowest = (whole & -whole).astype(np.float64)
    return np.where(x == 0, np.inf, np.ldexp(lowest, exponent - 53))


@pytest.mark.parametrize(
    "case", [c for c in gemms() if c.family in EXACT and c.family not in ("bias", "bias-sum", "all-codes")], ids=ids
)
def test_no_order_of_addition_rounds_an_exact_sum(case: Case) -> None:
    """Each row's numbers are whole multiples of a unit, so products are of the two units' product, and sum |a||b| is at
    most 2^13 of those: then every partial sum, in any order, is a 13-bit integer times the unit.

    Units are taken block by block, as scales go, and the smallest counts.
    """
    a, b, _ = real(case)
    for x, y in pieces(case, a, b):
        x, y = np.where(np.isfinite(x), x, 0), np.where(np.isfinite(y), y, 0)
        if not x.size or not y.size:
            continue
        per_block = [unit(z).reshape(z.shape[0], -1, 32).min(axis=2) for z in (x, y)]
        smallest = (per_block[0][:, None, :] * per_block[1][None, :, :]).min(axis=2)
        magnitude = np.abs(x) @ np.abs(y).T
        assert (magnitude <= BUDGET * smallest).all()


@pytest.mark.parametrize("case", gemms("all-codes"), ids=ids)
def test_an_output_of_all_codes_is_one_product_that_bfloat16_holds(case: Case) -> None:
    a, b, answer = real(case)
    for x, y in pieces(case, a, b):
        assert ((x != 0).astype(int) @ (y != 0).astype(int).T <= 1).all()
    assert np.array_equal(round_to(answer.value, "bfloat16").astype(np.float64), answer.value)


@pytest.mark.parametrize("op", GEMMS)
@pytest.mark.parametrize("family", ["exact-sum", "signature", "all-scales", "all-codes", "far-scales"])
def test_three_very_different_accumulators_agree_to_the_bit(op: str, family: str) -> None:
    """float32 backwards, float32 in a random order, and 13 bits truncated: the exact sum rounded once."""
    case = next(c for c in cases(op, "smoke") if c.family == family)
    a, b, answer = real(case)
    rng = np.random.default_rng(1)
    rows = [answer.value[g] for g in range(case.experts)]
    if op != "wgrad":
        rows = np.split(answer.value[: case.tokens], np.cumsum(case.sizes)[:-1])
    for (x, y), value in zip(pieces(case, a, b), rows, strict=True):
        want = round_to(value, "bfloat16").view(np.uint16)
        for order in (np.arange(x.shape[1])[::-1], rng.permutation(x.shape[1])):
            total = np.zeros(value.shape, np.float32)
            for t in order:
                total += np.multiply.outer(x[:, t], y[:, t]).astype(np.float32)
            assert np.array_equal(round_to(total.astype(np.float64), "bfloat16").view(np.uint16), want)
        total64 = np.zeros(value.shape)
        for t in range(x.shape[1]):
            term = np.multiply.outer(x[:, t], y[:, t])
            quantum = np.ldexp(1.0, np.frexp(np.maximum(np.abs(total64), np.abs(term)))[1] - 14)
            total64 = np.trunc(total64 / quantum) * quantum + np.trunc(term / quantum) * quantum
        assert np.array_equal(round_to(total64, "bfloat16").view(np.uint16), want)


@pytest.mark.parametrize("family", ["exact-sum", "signature"])
@pytest.mark.parametrize("op", GEMMS)
def test_exact_cases_exercise_the_final_rounding(op: str, family: str) -> None:
    """A good part of the results is not representable, and some are ties: truncating, or rounding ties away, shows."""
    case = next(c for c in cases(op, "smoke") if (c.routing, c.family) == ("ramp1.5", family))
    answer = data.answer(case, data.operands(case))
    assert isinstance(answer, Answer)
    last = np.abs(np.frexp(answer.value[answer.value != 0])[0]) * 2.0**9  # whole numbers have 9 bits
    assert (last % 2 != 0).mean() > 0.1 and (last % 2 == 1).mean() > 0.05


# ---------------------------------------------------------------------------------------------------------------------
# Families


@pytest.mark.parametrize("case", gemms("signature", "full"), ids=ids)
def test_signature_scales_differ_from_their_neighbours(case: Case) -> None:
    """Each scale from the next block's, from the next row's, and an expert's weights from the next expert's (most)."""
    (_, sa), (_, sb) = data._planes(case)
    f = frame(case)
    for scales in (sa, sb):
        assert (np.diff(scales.astype(int), axis=1) != 0).all()
        assert (np.diff(scales.astype(int), axis=0) != 0).all()
    s = signature(f)
    assert (np.diff(s.d, axis=1) != 0).all()
    if case.op != "wgrad" and f.rows[1] > 32 * case.experts > 32:  # of a few rows most may be alike
        weights = sb.reshape(case.experts, -1, sb.shape[1]).astype(int)
        assert (np.diff(weights, axis=0) != 0).mean() > 0.75
    if sa.size and sb.size:
        assert sa.min() > 60 and sa.max() < 195 and sb.min() > 60 and sb.max() < 200


@pytest.mark.parametrize("op", GEMMS)
def test_every_scale_of_a_signature_case_matters(op: str) -> None:
    """Each scale has a product that is not zero: read with another exponent, some output changes by at least that."""
    case = next(c for c in cases(op, "smoke") if c.family == "signature")
    a, b, _ = real(case)
    for x, y in pieces(case, a, b):
        if x.size and y.size:
            terms = np.einsum("ijt,kjt->ikj", x.reshape(len(x), -1, 32), y.reshape(len(y), -1, 32))
            assert (terms != 0).any(axis=1).all() and (terms != 0).any(axis=0).all()


@pytest.mark.parametrize("case", gemms("all-codes"), ids=ids)
def test_all_codes_has_every_finite_code_on_either_side(case: Case) -> None:
    (a, _), (b, _) = data._planes(case)
    for codes, format in ((a, case.formats[0]), (b, case.formats[1])):
        row = FORMATS[format]
        assert set(np.unique(codes)) == set(range(256)) - set(row.nan_codes) - set(row.inf_codes)


@pytest.mark.parametrize("op", GEMMS)
def test_full_all_codes_has_every_product_of_codes(op: str) -> None:
    case = next(c for c in cases(op, "full") if c.family == "all-codes" and "256" in c.shape)
    (a, _), (b, _) = data._planes(case)
    f = frame(case)
    pairs = np.zeros((256, 256), bool)
    for g, (start, end) in enumerate(f.segments if op == "wgrad" else f.segments * case.experts):
        mine = a[:, start:end] if op == "wgrad" else a[f.expert[0] == g]
        theirs = b[:, start:end] if op == "wgrad" else b[f.expert[1] == g]
        for row in mine:
            for place in np.flatnonzero(row):
                pairs[row[place], theirs[:, place]] = True
    codes = data.finite_codes("e4m3fn")
    nonzero = codes[codes != 0]  # code 0 is every other element of A too
    assert pairs[np.ix_(nonzero, codes)].all()


@pytest.mark.parametrize("case", gemms("all-scales"), ids=ids)
def test_all_scales_has_every_byte_where_it_counts(case: Case) -> None:
    for codes, scales in data._planes(case):
        counts = codes.reshape(*scales.shape, 32).any(axis=2)
        assert set(np.unique(scales[counts])) == set(range(255))


@pytest.mark.parametrize("case", gemms("special", "full"), ids=ids)
def test_special_cases_have_nan_and_mostly_numbers(case: Case) -> None:
    answer = data.answer(case, data.operands(case))
    assert isinstance(answer, Answer)
    nan, inf = np.isnan(answer.value), np.isinf(answer.value)
    assert nan.any() and np.isfinite(answer.value).mean() > 0.7
    assert inf.any() == any(f == "e5m2" for f in case.formats)
    (_, sa), (_, sb) = data._planes(case)
    assert (sa == 255).any() and (sb == 255).any() and (sa == 254).any()


def test_cancellation_cancels() -> None:
    for case in gemms("cancellation"):
        answer = data.answer(case, data.operands(case))
        assert isinstance(answer, Answer)
        used = answer.magnitude > 0
        assert np.median(np.abs(answer.value[used]) / answer.magnitude[used]) < 0.06


def test_normal_numbers_are_normal() -> None:
    x = data._normal(1, "x", slice(0, 2000), 64)
    assert abs(float(x.mean())) < 0.02 and abs(float(x.std()) - 1) < 0.02
    assert 0.6 < float((np.abs(x) < 1).mean()) < 0.75 and np.abs(x).max() > 3
    assert np.array_equal(x[1000:], data._normal(1, "x", slice(1000, 2000), 64))


def test_heavy_tails_are_heavy() -> None:
    case = case_by_id("wgrad/64x96/ramp1.5/heavy-tailed")
    x = np.abs(real(case)[0])
    assert x.max() > 200 * np.median(x[x > 0])


def test_a_missing_capture_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    from mxgate.conformance import case as module
    from mxgate.fixtures.store import StoreError

    module.captured.cache_clear()
    monkeypatch.setattr(module, "CAPTURED", tmp_path)
    try:
        with pytest.raises(StoreError, match="late"):
            module.captured("late")
    finally:
        module.captured.cache_clear()


# ---------------------------------------------------------------------------------------------------------------------
# Quantizer inputs


def blocks(case: Case) -> np.ndarray:
    given = data.operands(case)
    x = np.moveaxis(given.arrays["x"], given.arrays["axis"], -1)
    return np.asarray(x.reshape(-1, 32))


def test_maxima_walk_through_every_bfloat16_number() -> None:
    """All 32,640 finite magnitudes and infinity are some block's maximum; of NaN there is one pattern."""
    x = blocks(case_by_id("quantize/1024x1024/axis1/maxima")).view(np.uint16)
    assert set(np.unique(x)) >= {*range(0x7F81), *range(0x8001, 0xFF80)}
    assert set(np.unique((x & 0x7FFF).max(axis=1))) == {*range(0x7F81), 0x7FC0}


def test_edges_hold_both_neighbours_of_every_power_of_two() -> None:
    case = case_by_id("quantize/256x864/axis0/edges+float32")
    maxima = set(np.abs(blocks(case)).max(axis=1).tolist())
    for power in np.ldexp(1.0, np.arange(-148, 128)).astype(np.float32):
        near = (power, np.nextafter(power, np.float32(np.inf)), np.nextafter(power, np.float32(0)))
        assert {float(v) for v in near} <= maxima


def test_special_inputs_have_a_nan_at_each_place() -> None:
    nan = np.isnan(blocks(case_by_id("quantize/64x192/axis1/special")).astype(np.float32))
    assert nan.any(axis=0).all() and nan.all(axis=1).any() and (~nan.any(axis=1)).any()


def test_midpoints_hold_every_tie() -> None:
    for format in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz"):
        case = next(c for c in cases("quantize", "smoke") if c.family == "midpoints" and c.formats[0] == format)
        x = blocks(case).astype(np.float64)
        row = FORMATS[format]
        scaled = np.abs(x / (x[:, :1] / row.max_finite))
        values = np.unique(np.abs(decode(data.finite_codes(format), format)))
        assert set((values[1:] + values[:-1]) / 2) <= set(scaled.reshape(-1))
