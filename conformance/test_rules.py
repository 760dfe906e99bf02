"""What the rules in common use let through, and that our restatement of them is the usual one.

They are here to be compared with; nothing is judged by them.
"""

from __future__ import annotations

import numpy as np
import pytest

from mxgate.conformance.case import cases
from mxgate.conformance.conftest import Collect
from mxgate.conformance.rules import RULES, verdicts
from mxgate.kernels.build import registry

RNG = np.random.default_rng(7)
A, B = RNG.standard_normal((1024, 512)), RNG.standard_normal((1024, 512))
TRUE = A @ B.T


def test_each_accepts_the_truth_and_rejects_noise_and_nan() -> None:
    for name, rule in RULES.items():
        assert rule(TRUE, TRUE), name
        assert not rule(RNG.standard_normal(TRUE.shape), TRUE), name
        with np.errstate(all="ignore"):
            assert not rule(np.full_like(TRUE, np.nan), TRUE), name


def test_one_wrong_tile_in_1024_x_1024_passes_all_four() -> None:
    out = TRUE.copy()
    out[16:32, 16:32] = out[:16, :16]
    assert {name: rule(out, TRUE) for name, rule in RULES.items()} == dict.fromkeys(RULES, True)


def test_one_block_with_its_neighbours_scale_passes() -> None:
    """One row's block of 32 scaled by 2."""
    wrong = A.copy()
    wrong[5, 64:96] *= 2
    assert all(rule(wrong @ B.T, TRUE) for rule in RULES.values())


def test_an_honest_build_passes_all_of_them_on_every_case(evidence: Collect) -> None:
    """Or they have nothing to look at. So what they let through is not for having been asked the wrong thing."""
    for op in ("forward", "quantize"):
        build = registry()[f"{op}/numpy_reference"]
        for case in cases(op, "smoke"):
            said = verdicts(evidence(build, case, build.load()))
            assert set(said) == set(RULES) and all(v in (True, None) for v in said.values()), (case.id, said)


@pytest.mark.parametrize(("share", "accepted"), [(0.04, True), (0.06, False)])
def test_allclose_tolerates_five_percent_of_anything(share: float, accepted: bool) -> None:
    out = TRUE.copy()
    out.reshape(-1)[: int(share * out.size)] = np.nan
    assert RULES["allclose 1e-2, 5 %"](out, TRUE) is accepted
