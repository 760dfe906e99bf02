"""The correct builds of unusual design really are correct: whole numbers give the reference's bits.

Not caught here: a rounding outside the bound of the accumulator that a build claims; the gates see to that.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mxgate.kernels import numpy_reference as reference
from mxgate.kernels.build import Build
from mxgate.kernels.variants import CORRECT

GEMMS = [b for b in CORRECT if b.op != "quantize"]
QUANTIZERS = [b for b in CORRECT if b.op == "quantize"]


@pytest.mark.parametrize("build", GEMMS, ids=lambda b: b.id)
def test_whole_numbers_give_the_reference_bit_for_bit(build: Build, make: Any) -> None:
    args = make(build.op, (32, 0, 96, 64), buffer=256, formats=("e5m2", "e4m3fn"))
    function = build.load()
    tokens = 256 if build.op == "wgrad" else 192
    with np.errstate():  # one of them leaves another error state behind
        for dtype in build.out_dtypes:
            expected = getattr(reference, build.op)(*args, out_dtype=dtype)
            assert function(*args, out_dtype=dtype)[:tokens].tobytes() == expected[:tokens].tobytes()


@pytest.mark.parametrize("build", QUANTIZERS, ids=lambda b: b.id)
def test_quantizers_give_the_reference_bit_for_bit(build: Build) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 2**32, (64, 96), dtype=np.uint32).view(np.float32)
    for axis in (0, 1):
        for format in build.formats:
            for got, expected in zip(
                build.load()(x, axis, format=format), reference.quantize(x, axis, format=format), strict=True
            ):
                assert got.dtype == expected.dtype and got.tobytes() == expected.tobytes()


def test_a_truncating_accumulator_loses_what_is_far_below_its_largest_addend() -> None:
    """1 + 31 * 2^-14 and a 13-bit fraction: each small product is cut off whole, so the sum is 1."""
    from mxgate.kernels.variants import truncating

    a = np.full((1, 32), 2.0**-14)
    a[0, 0] = 1
    assert truncating(32, 13)(a, np.ones((1, 32)))[0, 0] == 1
    assert truncating(32, 14)(a, np.ones((1, 32)))[0, 0] == 1 + 31 * 2.0**-14
