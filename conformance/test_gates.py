"""The gates against honest builds of different designs and against liars.

Each liar changes one thing in evidence that passes. What is not tested here: that real wrong kernels are caught (the
faults, through `mxgate faults`), and what only a child can see (guard pages, canaries, limits: test_guard, test_child).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mxgate.conformance import data, gates
from mxgate.conformance.case import case_by_id, cases, salted
from mxgate.conformance.conftest import collect
from mxgate.conformance.gates import SILENT, owned
from mxgate.conformance.launch import FILL_FINITE, Evidence, Launch, LaunchSpec, digest
from mxgate.conformance.poison import COPIED
from mxgate.conformance.verdict import GATES, MANDATORY, Finding, Outcome, judge, worst
from mxgate.kernels import numpy_reference as reference
from mxgate.kernels import numpy_windowed as windowed
from mxgate.kernels.build import GEMMS, Build, find, registry
from mxgate.oracle import MXArray
from mxgate.oracle.freivalds import freivalds

Liar = Callable[[np.ndarray], None]


@cache
def honest(id: str) -> Evidence:
    """The reference build's evidence on a case; never changed."""
    case = case_by_id(id)
    build = registry()[f"{case.op}/numpy_reference"]
    return collect(build, case, build.load())


def with_output(e: Evidence, change: Callable[[Launch], Launch], every: bool = True) -> Evidence:
    """The evidence with its launches (or only the first) changed."""
    launches = tuple(change(x) if every or i == 0 else x for i, x in enumerate(e.launches))
    return replace(e, launches=launches)


def lie(e: Evidence, liar: Liar, every: bool = True) -> Evidence:
    """The evidence of a build whose output the liar has changed in place, in the tokens' rows."""

    def change(x: Launch) -> Launch:
        output = tuple(a.copy() for a in x.output)
        liar(owned(e.case, output[0]))
        return replace(x, output=output, digest=digest(output))

    return with_output(e, change, every)


def rejecting(e: Evidence) -> set[str]:
    outcomes, findings = gates.run_gates(e)
    assert {f.gate for f in findings} == {g for g, o in outcomes.items() if o in (Outcome.REJECT, Outcome.INCONCLUSIVE)}
    assert all(len(f.where) <= 20 for f in findings)
    return {g for g, o in outcomes.items() if o is Outcome.REJECT}


CONTROL = "wgrad/64x96/ramp1.5/signature"
EMPTIES = "wgrad/64x96/empties/signature"
NORMAL = "wgrad/64x96/ramp1.5/normal"
ROWS = "forward/64x96/ramp1.5/exact-sum"


# ---------------------------------------------------------------------------------------------------------------------
# Honest builds


@pytest.mark.parametrize("op", [*GEMMS, "quantize"])
def test_an_honest_build_passes_every_mandatory_gate_and_fails_none(op: str) -> None:
    seen: dict[str, set[Outcome]] = {g: set() for g in GATES}
    for case in cases(op, "smoke"):
        outcomes, findings = gates.run_gates(honest(case.id))
        assert not findings, (case.id, findings)
        for gate, outcome in outcomes.items():
            seen[gate].add(outcome)
    assert all(Outcome.PASS in seen[gate] for gate in MANDATORY[op])


@pytest.mark.parametrize(("op", "out"), [*((op, "bfloat16") for op in GEMMS), ("wgrad", "float32")])
def test_a_build_that_takes_only_aligned_groups_can_be_accepted(op: str, out: str) -> None:
    """Cases that it declines are no reason to know too little about it; those of one that writes nothing but `out`."""
    build = replace(registry()[f"{op}/numpy_reference"], group_alignment=256, out_dtypes=(out,))
    taken = [c for c in cases(op, "smoke") if build.declines(c) is None and c.tokens]
    outcomes = [gates.run_gates(honest(c.id))[0] for c in taken]
    assert all(any(o[gate] is Outcome.PASS for o in outcomes) for gate in MANDATORY[op])


def float32_in_blocks(x: Any, xs: Any, w: Any, ws: Any, offsets: Any, *, out_dtype: Any = None) -> np.ndarray:
    """A forward that adds partial sums of 32 products backwards in float32, and leaves the tail as it was."""
    y = np.empty((x.shape[0], w.shape[1]), out_dtype or ml_dtypes.bfloat16)
    y.view(np.uint8)[...] = 0x3F
    start = 0
    for g, end in enumerate(offsets):
        a, b = reference.real(x[start:end], xs[start:end], 1), reference.real(w[g], ws[g], 1)
        total = np.zeros((a.shape[0], b.shape[0]), np.float32)
        with np.errstate(invalid="ignore", over="ignore"):
            for t in reversed(range(0, a.shape[1], 32)):
                total += (a[:, t : t + 32] @ b[:, t : t + 32].T).astype(np.float32)
        with np.errstate(over="ignore"):
            y[start:end] = total.astype(y.dtype)
        start = end
    return y


def test_a_build_of_another_design_passes_what_it_promises() -> None:
    build = Build("blocks", "forward", "nowhere:f", tail="undefined", out_dtypes=("bfloat16", "float16", "float32"))
    for case in cases("forward", "smoke"):
        if "bias" not in case.family:
            assert not rejecting(collect(build, case, float32_in_blocks)), case.id
    promised = replace(build, tail="zero")
    assert rejecting(collect(promised, case_by_id(ROWS), float32_in_blocks)) == {"contract", "padding"}


def test_any_nan_is_like_any_other_under_other_strides_or_lengths_and_only_there() -> None:
    """torch writes one NaN from its vectors and another from single elements; a repeat goes the same way again."""
    e = honest("forward/64x96/shift32/special")

    def renamed(labels: str, to: int) -> Evidence:
        def change(x: Launch) -> Launch:
            if labels not in x.label:
                return x
            output = (x.output[0].copy(),)
            output[0].view(np.uint16)[np.isnan(output[0].astype(np.float32))] = to
            return replace(x, output=output, digest=digest(output))

        return with_output(e, change)

    for labels in ("out=", "padding", COPIED):
        assert not rejecting(renamed(labels, 0xFFFF)), labels
        assert ("contract" if labels == "out=" else "padding") in rejecting(renamed(labels, 0x3F80))
    assert rejecting(renamed("repeat", 0xFFFF)) == {"reproducible"}
    assert "contract" in rejecting(renamed("other memory", 0xFFFF))


def test_where_every_product_is_zero_either_zero_will_do_and_elsewhere_not() -> None:
    e = honest("forward/64x96/uniform/all-codes")
    answer = gates._answer(e)
    nothing, something = (
        np.argwhere((owned(e.case, answer.value) == 0) & (owned(e.case, answer.magnitude) == 0)),
        np.argwhere(owned(honest(ROWS).case, gates._answer(honest(ROWS)).value) == 0),
    )

    def minus(at: np.ndarray) -> Liar:
        def liar(out: np.ndarray) -> None:
            out[tuple(at)] = -0.0

        return liar

    assert len(nothing) and len(something)
    assert not rejecting(lie(e, minus(nothing[0])))
    assert rejecting(lie(honest(ROWS), minus(something[0]))) == {"exact"}


# ---------------------------------------------------------------------------------------------------------------------
# Liars: one change, in every launch alike unless said otherwise


def one_ulp(out: np.ndarray) -> None:
    flat = out.reshape(-1).view(np.uint16)
    flat[int(np.flatnonzero(out.reshape(-1).astype(np.float32))[77])] += 1


def one_element(out: np.ndarray) -> None:
    out.reshape(-1)[-1] = 1e6


def one_nan(out: np.ndarray) -> None:
    out.reshape(-1)[5] = np.nan


def all_nan(out: np.ndarray) -> None:
    out[...] = np.nan


def all_zero(out: np.ndarray) -> None:
    out[...] = 0


def infinite(out: np.ndarray) -> None:
    out.reshape(-1)[0] = np.inf


def halved(out: np.ndarray) -> None:
    out[...] = (out.astype(np.float32) / 2).astype(out.dtype)


def one_tile(out: np.ndarray) -> None:
    matrix = out[0] if out.ndim == 3 else out
    matrix[16:32, 16:32] = matrix[:16, :16]


LIARS: tuple[Liar, ...] = (one_ulp, one_element, one_nan, all_nan, all_zero, infinite, halved, one_tile)


@pytest.mark.parametrize("liar", LIARS)
@pytest.mark.parametrize("id", [CONTROL, ROWS, "dgrad/96x64/ramp1.5/signature", "wgrad/32x48/17blocks/all-scales"])
def test_exact_rejects_any_wrong_element(liar: Liar, id: str) -> None:
    assert "exact" in rejecting(lie(honest(id), liar))


@pytest.mark.parametrize("liar", LIARS)
@pytest.mark.parametrize("id", [NORMAL, "forward/64x96/ramp1.5/normal+float32", "dgrad/96x64/ramp1.5/heavy-tailed"])
def test_bounded_rejects_wrong_elements_of_rounded_data(liar: Liar, id: str) -> None:
    """One ulp of a bfloat16 is outside where the sum is not close to a midpoint; of a float32 it may be rounding, so
    there the smallest lie that has to be seen is larger."""
    if liar is one_ulp:
        if "float32" in id:
            return
        e = honest(id)
        caught = sum("bounded" in rejecting(lie(e, partial(nudge, index=i))) for i in range(0, 4000, 100))
        assert caught >= 36  # of 40
        return
    assert "bounded" in rejecting(lie(honest(id), liar))


def nudge(out: np.ndarray, index: int) -> None:
    out.reshape(-1).view(np.uint16)[index] += 1


@pytest.mark.parametrize("accumulator", ["fp32-any-order", "mfma-scale-128", "wgmma-fp8-13bit"])
def test_one_block_with_its_neighbours_scale_is_outside_every_accumulators_interval(accumulator: str) -> None:
    """On normal data, where 84 of 100 neighbouring scales are equal: a block whose scale does differ, in one row."""
    e = honest(NORMAL)
    a = e.operands.a
    assert a is not None and e.operands.b is not None and e.operands.offsets is not None
    scales = a.scale_codes()
    row, block = next((int(r), int(b)) for r, b in np.argwhere(np.diff(scales[:, :2].astype(int), axis=1) != 0))
    wrong = scales.copy()
    wrong[row, block] = scales[row, block + 1]
    changed = replace(a, scales=wrong.view(ml_dtypes.float8_e8m0fnu))
    b = e.operands.b
    y = reference.wgrad(changed.elements, changed.scales, b.elements, b.scales, e.operands.offsets)

    def change(x: Launch) -> Launch:
        return replace(x, output=(y,), digest=digest((y,)))

    bad = with_output(replace(e, build=replace(e.build, accumulator=accumulator)), change)
    found = gates.bounded(bad)
    assert isinstance(found, Finding) and found.count > 10
    assert all(f"expert 0, n {row}, " in line for line in found.where)


def test_the_first_difference_is_told_with_both_bit_patterns() -> None:
    found = gates.exact(lie(honest(CONTROL), one_element))
    assert isinstance(found, Finding)
    assert found.count == 1 and found.detail["first"] == [0, 3, 63, 95]
    assert found.where[0].startswith("expert 3, n 63, k 95: 0x4974 (999424), expected 0x")


@pytest.mark.parametrize("zero", [-0.0, 1e-30, np.nan, 1.0])
def test_empty_wants_every_bit_clear(zero: float) -> None:
    def liar(out: np.ndarray) -> None:
        out[3, 2, 1] = zero

    assert "empty" in rejecting(lie(honest(EMPTIES), liar))


@pytest.mark.parametrize("op", ["forward", "dgrad"])
def test_empty_looks_at_the_groups_beside_and_at_the_tail(op: str) -> None:
    shape = "64x96" if op == "forward" else "96x64"
    assert "empty" in rejecting(lie(honest(f"{op}/{shape}/empties/signature"), one_element))

    def change(x: Launch) -> Launch:
        output = (x.output[0].copy(),)
        output[0][-1, -1] = 1
        return replace(x, output=output, digest=digest(output))

    e = with_output(honest(f"{op}/{shape}/all-empty/exact-sum"), change)
    assert {"empty", "padding", "contract"} <= rejecting(e)


def test_special_wants_nan_where_it_belongs_and_nowhere_else() -> None:
    e = honest("wgrad/64x96/shift32/special+e5m2xe5m2")
    value = gates._answer(e).value

    def put(index: np.ndarray, x: float) -> Liar:
        def liar(out: np.ndarray) -> None:
            out[tuple(index)] = x

        return liar

    nan, inf, finite = (np.argwhere(f(value))[0] for f in (np.isnan, np.isposinf, np.isfinite))
    for place, x in ((nan, 0.0), (nan, np.inf), (finite, np.nan), (finite, np.inf), (inf, 1e30), (inf, -np.inf)):
        assert "special" in rejecting(lie(e, put(place, x)))
    assert "special" in rejecting(lie(e, all_nan))


def test_a_neighbours_nan_spoils_as_far_as_the_build_says_and_no_other_element() -> None:
    """The shipped windows let it through: accepted on those terms, rejected on the contract's own."""
    build = find("wgrad", "numpy_windowed")
    e = collect(replace(build, replaces=None), case_by_id("wgrad/64x96/shift32/special"), windowed.wgrad)
    assert not rejecting(e)
    assert "special" in rejecting(replace(e, build=replace(e.build, nan_reach=0)))
    finite = np.argwhere(np.isfinite(e.launches[0].output[0].astype(np.float64)))
    for place in finite[:: len(finite) // 7]:

        def liar(out: np.ndarray, place: np.ndarray = place) -> None:
            out[tuple(place)] = np.nan

        allowed = gates._spoilt(e, np.full_like(e.launches[0].output[0], np.nan))[tuple(place)]
        assert ("special" in rejecting(lie(e, liar))) == (not allowed)


def test_any_nan_is_a_nan() -> None:
    """The payload and the sign of a NaN are nobody's business."""
    e = honest("wgrad/64x96/shift32/special")

    def liar(out: np.ndarray) -> None:
        nan = np.isnan(out.astype(np.float32))
        out.view(np.uint16)[nan] = 0xFFC1

    assert not rejecting(lie(e, liar))


@pytest.mark.parametrize("liar", LIARS)
def test_reproducible_rejects_a_launch_that_differs(liar: Liar) -> None:
    e = honest(NORMAL)
    last = max(i for i, x in enumerate(e.launches) if x.label.startswith("repeat"))
    other = lie(e, liar).launches[last]
    bad = replace(e, launches=(*e.launches[:last], other, *e.launches[last + 1 :]))
    assert rejecting(bad) == {"reproducible"}
    fresh = replace(e, launches=(*e.launches[:last], replace(other, spec=replace(other.spec, process=1))))
    found = gates.reproducible(replace(fresh, plan=tuple(x.spec for x in fresh.launches)))
    assert isinstance(found, Finding) and "1 in fresh processes" in found.what


@pytest.mark.parametrize("variant", ["zero", "one", "max", "random", "copied"])
def test_padding_rejects_a_variant_that_differs(variant: str) -> None:
    e = honest(NORMAL)
    bad = replace(e, launches=tuple(lie(e, one_ulp).launches[i] if x.variant == variant else x
                                    for i, x in enumerate(e.launches)))  # fmt: skip
    assert rejecting(bad) == {"padding"}


def test_an_element_that_nobody_wrote_shows_whatever_memory_held() -> None:
    e = honest(NORMAL)

    def change(x: Launch) -> Launch:
        output = (x.output[0].copy(),)
        output[0].reshape(-1).view(np.uint8)[-2:] = x.spec.fill
        return replace(x, output=output, digest=digest(output))

    bad = with_output(e, change)
    assert "contract" in rejecting(bad)
    found = gates.contract(bad)
    assert isinstance(found, Finding) and found.count == 1
    assert "memory held before: 0x3f in launch 'other memory'" in found.what


def test_rows_past_the_tokens_are_held_to_the_promise() -> None:
    e = honest(ROWS)
    kept = replace(e, build=replace(e.build, tail="untouched"))
    assert rejecting(kept) == {"contract", "padding"}  # the reference zeroes a caller's buffer
    assert not rejecting(replace(e, build=replace(e.build, tail="undefined")))

    def change(x: Launch) -> Launch:
        if x.variant == "copied":
            return x
        output = (x.output[0].copy(),)
        output[0][e.case.tokens :].view(np.uint8)[...] = x.spec.fill
        return replace(x, output=output, digest=digest(output))

    assert not rejecting(with_output(kept, change))
    assert rejecting(with_output(e, change)) == {"contract", "padding"}


def _with_first(e: Evidence, **fields: Any) -> Evidence:
    return replace(e, launches=(replace(e.launches[0], **fields), *e.launches[1:]))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"error": "killed by SIGSEGV", "output": ()}, "killed by SIGSEGV"),
        ({"error": "no answer within 60 s", "output": ()}, "no answer within"),
        ({"canaries": "2 bytes before the output"}, "2 bytes before"),
        ({"inputs_changed": ("x_t",)}, "changed its inputs: x_t"),
        ({"aliases": "dy_t"}, "memory of its input dy_t"),
        ({"output": ()}, "returned 0 arrays; expected 1"),
    ],
)
def test_contract_tells_what_was_broken(fields: dict[str, Any], words: str) -> None:
    found = gates.contract(_with_first(honest(CONTROL), **fields))
    assert isinstance(found, Finding) and not found.inconclusive and words in found.what


@pytest.mark.parametrize(
    "wrong",
    [
        lambda a: a.astype(np.float32),
        lambda a: a[:-1],
        lambda a: a.transpose(0, 2, 1),
        lambda a: np.zeros((0,), a.dtype),
        lambda a: a.view(np.uint16),
    ],
)
def test_contract_rejects_another_shape_or_type_and_the_rest_do_not_conclude(wrong: Any) -> None:
    e = honest(CONTROL)
    outcomes, _ = gates.run_gates(_with_first(e, output=(wrong(e.launches[0].output[0]),)))
    assert outcomes["contract"] is Outcome.REJECT
    others = {o for g, o in outcomes.items() if g not in ("contract", "padding") and o is not Outcome.SILENT}
    assert others == {Outcome.INCONCLUSIVE}


def test_lineage_compares_with_the_ancestor_and_is_inconclusive_without() -> None:
    e = honest(NORMAL)
    heir = replace(e, build=replace(e.build, replaces="wgrad/older"))
    assert gates.lineage(e) is SILENT
    assert gates.lineage(replace(heir, ancestor=e.launches[0])) is None
    found = gates.lineage(replace(heir, ancestor=lie(e, one_ulp).launches[0]))
    assert isinstance(found, Finding) and found.count == 1 and not found.inconclusive
    for missing in (None, replace(e.launches[0], error="killed by SIGKILL", output=())):
        found = gates.lineage(replace(heir, ancestor=missing))
        assert isinstance(found, Finding) and found.inconclusive


# ---------------------------------------------------------------------------------------------------------------------
# Nothing passes for want of evidence


def test_nothing_is_passed_on_no_evidence() -> None:
    for id in (CONTROL, EMPTIES, ROWS, "wgrad/64x96/shift32/special", "quantize/64x192/axis1/special"):
        outcomes, _ = gates.run_gates(replace(honest(id), launches=()))
        assert Outcome.PASS not in outcomes.values(), id


@pytest.mark.parametrize("id", [CONTROL, ROWS, "quantize/64x96/axis1/normal"])
def test_a_launch_that_never_came_back_is_no_pass(id: str) -> None:
    e = honest(id)
    for i in range(1, len(e.launches)):
        outcomes, _ = gates.run_gates(replace(e, launches=(*e.launches[:i], *e.launches[i + 1 :])))
        assert Outcome.INCONCLUSIVE in outcomes.values(), e.launches[i].label
    outcomes, _ = gates.run_gates(replace(e, launches=e.launches[:1], plan=e.plan[:1]))
    assert outcomes["reproducible"] is Outcome.INCONCLUSIVE


def test_every_plan_has_what_the_gates_need() -> None:
    build = registry()["wgrad/numpy_reference"]
    for tier in ("smoke", "full", "production"):
        for op in (*GEMMS, "quantize"):
            for case in cases(op, tier):
                plan = gates.plan(replace(build, op=op), case, tier)
                assert plan[0] == LaunchSpec("first")
                assert len({s.label for s in plan}) == len(plan)
                assert {FILL_FINITE} <= {s.fill for s in plan}
                assert sum(replace(s, label="") == LaunchSpec("") for s in plan) >= 2
                wanted = {"nan", "copied"} if gates.brief(case, tier) else set(data.variants(case))
                assert {s.variant for s in plan} == wanted & set(data.variants(case))


def test_a_narrow_situation_is_launched_three_times_and_in_the_full_tier_as_often_as_any_other() -> None:
    build = registry()["wgrad/numpy_reference"]
    for op in GEMMS:
        plans = {c: gates.plan(replace(build, op=op), c, "smoke") for c in cases(op, "smoke")}
        routings, families = ("crowd", "square", "long", "swapped", "edges16"), ("far-scales", "all-scales")
        narrow = {c for c in plans if c.routing in routings or c.family in families}
        assert {c for c, plan in plans.items() if len(plan) == 3} == narrow and len(narrow) == 9
        assert all(len(gates.plan(replace(build, op=op), c, "full")) > 5 for c in narrow)


def test_the_full_tier_repeats_a_hundred_times_in_reused_and_fresh_processes() -> None:
    for op in (*GEMMS, "quantize"):
        build = registry()[f"{op}/numpy_reference"]
        plans = [gates.plan(build, c, "full") for c in cases(op, "full")]
        long = [p for p in plans if sum(replace(s, label="", process=0) == LaunchSpec("") for s in p) >= 100]
        assert long and all({s.process for s in p} == set(range(6)) for p in long)


# ---------------------------------------------------------------------------------------------------------------------
# Quantizers


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("id", [c.id for c in cases("quantize", "smoke")])
def test_exact_rejects_one_wrong_byte_of_a_quantizer(id: str, part: int) -> None:
    e = honest(id)

    def change(x: Launch) -> Launch:
        output = tuple(a.copy() for a in x.output)
        output[part].reshape(-1).view(np.uint8)[-1] ^= 1
        return replace(x, output=output, digest=digest(output))

    assert "exact" in rejecting(with_output(e, change))


def test_special_rejects_a_quantizer_that_loses_a_nan() -> None:
    e = honest("quantize/64x192/axis1/special")
    assert isinstance(e.answer, MXArray)
    block = np.argwhere(e.answer.scale_codes() == 255)[0]

    def change(x: Launch) -> Launch:
        elements, scales = (a.copy() for a in x.output)
        scales.view(np.uint8)[tuple(block)] = 127
        elements.view(np.uint8)[block[0], block[1] * 32 : block[1] * 32 + 32] = 0x38
        return replace(x, output=(elements, scales), digest=digest((elements, scales)))

    found = gates.special(with_output(e, change))
    assert isinstance(found, Finding) and found.count == 32


# ---------------------------------------------------------------------------------------------------------------------
# Too large for an exact answer: a small case judged as if it were


@pytest.fixture
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(data, "LARGE", 1 << 10)
    data._planes.cache_clear()
    yield
    data._planes.cache_clear()


@pytest.mark.usefixtures("small_is_large")
@pytest.mark.parametrize("family", ["exact-sum", "signature", "normal"])
def test_large_cases_are_judged_by_random_sums(family: str) -> None:
    case = salted(case_by_id(f"wgrad/64x96/ramp1.5/{family}"), 3)
    build = registry()["wgrad/numpy_reference"]
    e = collect(build, case, build.load())
    assert e.answer is None and [s.variant for s in e.plan] == ["nan", "nan", "copied"]
    assert [s.variant for s in gates.plan(build, case, "production")] == ["nan", "nan", "nan", "copied"]
    outcomes, findings = gates.run_gates(e)
    assert not findings
    gate = "bounded" if family == "normal" else "exact"
    assert outcomes[gate] is Outcome.PASS
    for liar in (one_element, one_nan, all_nan, all_zero, halved, one_tile):
        assert gate in rejecting(lie(e, liar)), liar
    if family == "exact-sum":
        assert gate in rejecting(lie(e, one_ulp))
        value = freivalds("wgrad", e.operands.a, e.operands.b, e.operands.offsets, e.launches[0].output[0],  # type: ignore[arg-type]
                          accumulator="exact", seed=1, exact=True)  # fmt: skip
        assert value.ok


def next_row(out: np.ndarray) -> None:
    """One element of another row: a plausible number in the wrong place."""
    matrix = out[-1] if out.ndim == 3 else out
    column = int(np.argmax(np.abs(np.diff(matrix[17:19].astype(np.float32), axis=0))))
    matrix[17, column] = matrix[18, column]


@pytest.mark.usefixtures("small_is_large")
@pytest.mark.parametrize("family", ["exact-sum", "normal"])
@pytest.mark.parametrize("op", GEMMS)
def test_the_faults_of_a_671b_layer_are_rejected(op: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What judges a whole expert layer, on several threads, judges a small one here: one wrong element, one wrong
    16 x 16 tile, one scale byte. Not caught: an error that the accumulator or the rounding of eight neighbours could
    make as well (see mxgate.oracle.freivalds)."""
    monkeypatch.setattr(gates, "cores", lambda: 3)
    shape = "96x64" if op == "dgrad" else "64x96"
    case = salted(case_by_id(f"{op}/{shape}/ramp1.5/{family}"), 1)
    build = registry()[f"{op}/numpy_reference"]
    right = build.load()

    def doubled(*operands: np.ndarray) -> Any:
        """One scale byte of the first operand, of the second group's first rows or blocks, one too large."""
        scales = operands[1].view(np.uint8)
        scales[(5, 2) if op == "wgrad" else (30, 1)] += 1
        return right(*operands)

    e = collect(build, case, right)
    assert e.answer is None and not gates.run_gates(e)[1]
    gate = "exact" if family == "exact-sum" else "bounded"
    for wrong in (lie(e, next_row), lie(e, one_tile), collect(build, case, doubled)):
        assert wrong.launches[0].digest != e.launches[0].digest
        assert rejecting(wrong) == {gate}


# ---------------------------------------------------------------------------------------------------------------------
# Adding up


def _result(gates_: dict[str, Outcome], case: str = "c") -> Any:
    from mxgate.conformance.verdict import CaseResult

    return CaseResult("wgrad/b", "f", case, gates_, (), 0.0)


def test_a_verdict_is_an_accept_only_with_every_mandatory_gate() -> None:
    passed = dict.fromkeys(GATES, Outcome.PASS)
    assert judge("wgrad/b", "wgrad", [_result(passed)]).word == "accept"
    for gate in MANDATORY["wgrad"]:
        for outcome, word in ((Outcome.SILENT, "inconclusive"), (Outcome.INCONCLUSIVE, "inconclusive"),
                              (Outcome.REJECT, "reject")):  # fmt: skip
            assert judge("wgrad/b", "wgrad", [_result({**passed, gate: outcome})]).word == word
        without = {g: o for g, o in passed.items() if g != gate}
        assert judge("wgrad/b", "wgrad", [_result(without)]).word == "inconclusive"
    assert judge("wgrad/b", "wgrad", []).word == "inconclusive"
    silent = {**passed, "lineage": Outcome.SILENT}
    assert judge("wgrad/b", "wgrad", [_result(silent)]).word == "accept"
    assert judge("wgrad/b", "wgrad", [_result(silent)], replaces=True).word == "inconclusive"
    one_bad = [_result(passed, str(i)) for i in range(9)] + [_result({**passed, "exact": Outcome.REJECT}, "x")]
    assert judge("wgrad/b", "wgrad", one_bad).word == "reject"


def test_the_worst_of_nothing_is_inconclusive() -> None:
    assert worst([]) is Outcome.INCONCLUSIVE
    assert worst([Outcome.PASS, Outcome.SILENT]) is Outcome.PASS
    assert worst([Outcome.PASS, Outcome.INCONCLUSIVE, Outcome.REJECT]) is Outcome.REJECT


def test_what_a_gate_demands_is_told_in_plain_words() -> None:
    """The first sentences of its docstring are shown by `mxgate list gates` and in reports: no name of our code."""
    for gate, function in gates.GATE_FUNCTIONS.items():
        told = (function.__doc__ or "").partition("\n\n")[0]
        assert told and not re.search(r"\b[A-Z]{2,}\b|_|`", told), f"{gate}: {told}"
