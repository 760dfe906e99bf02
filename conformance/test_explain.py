"""Explanations of wrong builds name what is wrong with them.

The builds are those of kernels/faults.py that a call in this process can show. Not tested: that the cause is right for
mistakes nobody has thought of; `explain` says then that it knows none.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mxgate.conformance import explain, gates
from mxgate.conformance.case import case_by_id
from mxgate.conformance.conftest import Collect
from mxgate.conformance.launch import Evidence, digest
from mxgate.conformance.verdict import Finding
from mxgate.kernels.build import registry
from mxgate.kernels.faults import FAULTS

BY_ID = {f.build.id: f.build for f in FAULTS}

# (fault, case, what an explanation says, confidence): which scale, block, row, expert or token was used instead. Where
# scales far too large meet in a sum, float32 leaves some elements open and the confidence is "likely": "" takes both.
KNOWN = [
    ("forward/fault_neighbours_scale", "forward/64x96/ramp1.5/signature", "block 0 in block 1", "one of 2 that fit"),
    ("dgrad/fault_previous_rows_scale", "dgrad/96x64/ramp1.5/signature", "the scale 1 row before", "certain"),
    ("forward/fault_no_scales", "forward/64x96/ramp1.5/signature", "taken for 127", "certain"),
    ("wgrad/fault_no_x_scales", "wgrad/64x96/ramp1.5/signature", "x_t's scales are not applied", "certain"),
    ("wgrad/fault_scale_next_to_its_data", "wgrad/64x96/shift32/signature", "data that it holds", "certain"),
    ("forward/fault_blocks_of_64", "forward/64x96/ramp1.5/signature", "first of every 2 blocks", "one of 2 that fit"),
    ("wgrad/fault_transposed_scales", "wgrad/64x96/ramp1.5/signature", "read transposed", ""),
    ("forward/fault_pitched_scales", "forward/64x96/ramp1.5/signature", "row pitch of 8 blocks, not 3", ""),
    ("dgrad/fault_scales_along_k", "dgrad/96x64/ramp1.5/signature", "along K and not along N", ""),
    ("forward/fault_previous_expert", "forward/64x96/ramp1.5/signature", "weights of the expert 1 before", "certain"),
    ("dgrad/fault_previous_experts_scales", "dgrad/96x64/ramp1.5/signature", "scales of the expert 1 be", "certain"),
    ("forward/fault_experts_compacted", "forward/64x96/empties/signature", "without the empty ones", "certain"),
    ("wgrad/fault_starts_for_ends", "wgrad/64x96/ramp1.5/signature", "taken for starts", "certain"),
    ("forward/fault_e5m2_read_as_e4m3", "forward/64x96/ramp1.5/signature+e5m2xe4m3fn", "x's elements are read as e4m3",
     "certain"),
    ("forward/fault_ocp_read_as_fnuz", "forward/64x96/ramp1.5/signature", "read as e4m3fnuz", "one of 2 that fit"),
    ("forward/fault_k_tail_dropped", "forward/64x96/ramp1.5/signature", "the last block of the contraction is lost",
     "one of 3 that fit"),
    ("wgrad/fault_last_block_twice", "wgrad/64x96/ramp1.5/signature", "the last block of the contraction is counted",
     "certain"),
    ("forward/fault_tile_of_one_expert", "forward/64x96/ramp1.5/signature", "rounded up to 64 rows", "certain"),
    ("forward/fault_padding_scaled_by_one", "forward/64x96/ramp1.5/signature", "under a scale of 1.0", ""),
    ("wgrad/fault_one_block_more", "wgrad/64x96/ramp1.5/signature", "groups end 32 tokens later", "certain"),
    ("wgrad/fault_last_step_dropped", "wgrad/64x96/shift32/signature", "partial step of 128 is dropped",
     "one of 3 that fit"),
    ("wgrad/fault_odd_steps", "wgrad/64x96/shift32/signature", "odd number of steps", "certain"),
    ("wgrad/fault_mask_is_one", "wgrad/64x96/shift32/signature", "127, which is 1.0", ""),
    ("wgrad/fault_mask_dy_only", "wgrad/32x48/17blocks/all-scales", "only dy_t's scales are masked", ""),
    ("wgrad/fault_neighbours_nan", "wgrad/64x96/shift32/special", "a NaN among the neighbours' tokens",
     "one of 2 that fit"),
    ("wgrad/fault_padding_not_zeroed", "wgrad/64x96/shift32/signature", "padding is not zeroed", "certain"),
    ("forward/fault_zero_scale_is_zero", "forward/16x544/17blocks/all-scales", "of either operand is taken for zero",
     "certain"),
    ("forward/fault_truncated", "forward/64x96/ramp1.5/signature", "truncated to bfloat16", "certain"),
    ("wgrad/fault_packed_bf16_atomics", "wgrad/64x96/ramp1.5/signature", "rounded to bfloat16 every 32", "certain"),
    ("forward/fault_accumulator_13bit", "forward/64x96/ramp1.5/cancellation", "wgmma-fp8-13bit", "likely"),
    ("forward/fault_wrong_tile", "forward/64x96/ramp1.5/signature", "holds the one that belongs at", ""),
    ("forward/fault_bias_stride", "forward/64x96/empties/bias", "1/2 of their stride", "certain"),
    ("forward/fault_zeros", "forward/64x96/ramp1.5/normal", "all zeros", "certain"),
    ("quantize/fault_rceil", "quantize/64x96/axis1/normal", "profile torchao-rceil", "certain"),
    ("quantize/fault_r175", "quantize/64x96/axis1/normal", "rule r175", "certain"),
    ("quantize/fault_nan_lost", "quantize/64x192/axis1/special", "a NaN or an infinity is lost", "likely"),
]  # fmt: skip


def first_finding(e: Evidence) -> Finding:
    return next(f for f in gates.run_gates(e)[1] if not f.inconclusive)


@pytest.mark.parametrize(("fault", "case", "words", "confidence"), KNOWN, ids=[k[0] for k in KNOWN])
def test_what_is_wrong_is_named(evidence: Collect, fault: str, case: str, words: str, confidence: str) -> None:
    build = BY_ID[fault]
    e = evidence(build, case_by_id(case), build.load())
    told = explain.explanation(e, first_finding(e))
    assert any(words in c.sentence and confidence in c.confidence for c in told.causes), told.causes
    assert len(told.causes) == 1 or "certain" not in {c.confidence for c in told.causes}, told.causes
    assert told.lines()[-1].startswith("likely cause (")


def test_of_causes_that_give_the_same_bits_launches_with_other_padding_rule_out_some(evidence: Collect) -> None:
    """A NaN of the padding is the same NaN whether an element or the scale behind the last one brought it. Where the
    padding is zeros the latter are wrong and the build is not."""
    build = BY_ID["wgrad/fault_padding_not_zeroed"]
    e = evidence(build, case_by_id("wgrad/64x96/ramp1.5/signature"), build.load())
    base = e.launches[0]
    found = first_finding(e)
    told = explain.explanation(e, found)
    assert [c.confidence for c in told.causes] == ["certain"] and "padding is not zeroed" in told.causes[0].sentence
    alone = replace(e, launches=tuple(x for x in e.launches if x.variant == base.variant))
    several = explain.explanation(alone, replace(found, detail={**found.detail, "launch": base.label})).causes
    assert told.causes[0].sentence in {c.sentence for c in several}
    assert {c.confidence for c in several} == {f"one of {len(several)} that fit"} and 1 < len(several) <= 4


def test_a_cause_that_does_not_fit_every_launch_is_not_certain(evidence: Collect) -> None:
    """It gives the bits of the launch that failed first, and not those of one with other padding."""
    build = BY_ID["forward/fault_no_scales"]
    e = evidence(build, case_by_id("forward/64x96/ramp1.5/signature"), build.load())
    i = next(i for i, x in enumerate(e.launches) if x.variant != e.launches[0].variant)
    (out,) = e.launches[i].output
    other = np.where(out == out, -out, out).astype(out.dtype)
    changed = replace(e.launches[i], output=(other,), digest=digest((other,)))
    bad = replace(e, launches=(*e.launches[:i], changed, *e.launches[i + 1 :]))
    (cause,) = explain.explanation(bad, next(f for f in gates.run_gates(bad)[1] if f.gate == "exact")).causes
    assert "taken for 127" in cause.sentence and cause.confidence == "likely"


def test_twice_the_result_may_be_twice_the_scales(evidence: Collect) -> None:
    """What is stored wrongly is held beside what may be read wrongly."""
    e = honest("forward/64x96/ramp1.5/signature", evidence)
    build = e.build

    def wrong(x: np.ndarray, xs: np.ndarray, *rest: np.ndarray) -> np.ndarray:
        return np.asarray(build.load()(x, (xs.view(np.uint8) + 1).view(xs.dtype), *rest))

    bad = evidence(build, e.case, wrong)
    causes = explain.explanation(bad, first_finding(bad)).causes
    assert {c.confidence for c in causes} == {"one of 3 that fit"}
    assert {"the result is multiplied by 2", "x's scales are twice what they should be (the exponent's bias)"} < {
        c.sentence for c in causes
    }


def test_several_scales_that_were_read_elsewhere_are_one_cause(evidence: Collect) -> None:
    e = honest("forward/64x96/ramp1.5/signature", evidence)
    build = e.build

    def wrong(x: np.ndarray, xs: np.ndarray, *rest: np.ndarray) -> np.ndarray:
        xs = xs.copy()
        xs[70, 2], xs[71, 0] = xs[71, 2], xs[75, 1]
        return np.asarray(build.load()(x, xs, *rest))

    bad = evidence(build, e.case, wrong)
    (cause,) = explain.explanation(bad, first_finding(bad)).causes
    assert cause.confidence == "certain" and "row 70 block 2" in cause.sentence and "row 71 block 0" in cause.sentence


def test_profiles_that_give_the_same_bytes_are_one_cause(evidence: Collect) -> None:
    build = BY_ID["quantize/fault_rceil"]
    e = evidence(build, case_by_id("quantize/64x96/axis1/normal"), build.load())
    (cause,) = explain.explanation(e, first_finding(e)).causes
    assert cause.confidence == "certain"
    assert (
        cause.sentence.startswith("these are the bytes of profile torchao-rceil (and of ") and ", te" in cause.sentence
    )


def honest(id: str, evidence: Collect) -> Evidence:
    case = case_by_id(id)
    build = registry()[f"{case.op}/numpy_reference"]
    return evidence(build, case, build.load())


def test_one_scale_of_one_row_is_decoded(evidence: Collect) -> None:
    """A single scale byte among hundreds, wrong in one row: the row, the block, the byte used and whose it is."""
    e = honest("forward/64x96/ramp1.5/signature", evidence)
    build = e.build

    def wrong(x: np.ndarray, xs: np.ndarray, *rest: np.ndarray) -> np.ndarray:
        xs = xs.copy()
        xs[70, 2] = xs[71, 2]
        return np.asarray(build.load()(x, xs, *rest))

    bad = evidence(build, e.case, wrong)
    found = first_finding(bad)
    told = explain.explanation(bad, found)
    assert [c.sentence for c in told.causes] == ["x uses the scale 1 row after instead of its own: row 70 block 2"]
    assert told.causes[0].confidence == "certain"
    assert "wrong elements by expert: 2: 64; 3 of 4 experts are right" in told.facts
    assert any("expert 2: row 13, all 64 n" in fact for fact in told.facts)


def test_a_scale_of_a_weight_is_decoded(evidence: Collect) -> None:
    e = honest("forward/64x96/ramp1.5/signature", evidence)
    build = e.build

    def wrong(x: np.ndarray, xs: np.ndarray, w: np.ndarray, ws: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        ws = ws.copy()
        ws[3, 10, 1] = ws[3, 10, 2]
        return np.asarray(build.load()(x, xs, w, ws, offsets))

    bad = evidence(build, e.case, wrong)
    told = explain.explanation(bad, first_finding(bad))
    assert told.causes[0].sentence == "w uses the scale 1 block after instead of its own: expert 3 row 10 block 1"


def test_an_unknown_mistake_is_not_guessed_at(evidence: Collect) -> None:
    e = honest("wgrad/64x96/ramp1.5/signature", evidence)
    rng = np.random.default_rng(1)
    noise = rng.standard_normal(e.launches[0].output[0].shape).astype(e.launches[0].output[0].dtype)
    launches = tuple(replace(x, output=(noise,), digest=digest((noise,))) for x in e.launches)
    bad = replace(e, launches=launches)
    told = explain.explanation(bad, first_finding(bad))
    assert not told.causes and "none of the known mistakes" in told.lines()[-1]


def test_it_is_the_failing_launch_that_is_explained(evidence: Collect) -> None:
    """Only one variant of the padding is wrong: the model sees that variant's bytes."""
    e = honest("wgrad/64x96/ramp1.5/signature", evidence)
    i = next(i for i, x in enumerate(e.launches) if x.variant == "max")
    zero = np.zeros_like(e.launches[i].output[0])
    changed = replace(e.launches[i], output=(zero,), digest=digest((zero,)))
    bad = replace(e, launches=(*e.launches[:i], changed, *e.launches[i + 1 :]))
    found = first_finding(bad)
    assert found.gate == "padding"
    told = explain.explanation(bad, found)
    assert told.causes == (explain.Cause("the output is all zeros", "certain"),)
    assert told.facts[0] == "launch 'padding max':"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("killed by SIGSEGV", "guard page"),
        ("no answer within 60 s", "endless loop"),
        ("exceeded 8 GiB", "scratch memory"),
    ],
)
def test_a_launch_without_output_is_explained_in_words(evidence: Collect, error: str, words: str) -> None:
    e = honest("wgrad/64x96/ramp1.5/signature", evidence)
    bad = replace(e, launches=(replace(e.launches[0], error=error, output=()), *e.launches[1:]))
    assert words in explain.explain(bad, first_finding(bad))[-1]


def test_every_finding_has_lines(evidence: Collect) -> None:
    e = honest("wgrad/64x96/ramp1.5/normal", evidence)
    for gate in ("contract", "exact", "bounded", "reproducible"):
        assert explain.explain(e, Finding(gate, "something"))
