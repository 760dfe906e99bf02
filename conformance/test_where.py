"""Differences in words, held against NumPy's own search. Not shown: that the words are good ones."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mxgate.conformance import where
from mxgate.conformance.case import case_by_id
from mxgate.conformance.where import extent, first_wrong, lines

WGRAD = case_by_id("wgrad/64x96/ramp1.5/signature")
FORWARD = case_by_id("forward/64x96/ramp1.5/signature")


@pytest.mark.parametrize("slab", [1, 7, 96, 1000, 1 << 22])
@pytest.mark.parametrize("shape", [(4, 33, 50), (70, 9), (5, 0), (3, 1)])
def test_a_slab_at_a_time_finds_the_same(slab: int, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(where, "SLAB", slab)
    wrong = np.random.default_rng(slab).random(shape) < 0.02
    every = [tuple(map(int, index)) for index in np.argwhere(wrong)]
    for most in (1, 20, wrong.size):
        assert first_wrong(wrong, most) == every[:most]


@pytest.mark.parametrize("slab", [50, 1 << 22])
def test_how_far_a_gradient_is_wrong(slab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(where, "SLAB", slab)
    want = np.ones((WGRAD.experts, 64, 96), ml_dtypes.bfloat16)
    got = want.copy()
    got[1, 16:32, 5] = 2.0  # a power of two away: 128 ulp
    got[3, 20, 7] = 4.0
    wrong = got != want
    assert extent(WGRAD, [wrong], [got], [want]) == (
        "experts 1, 3; n 16..31, k 5, 7",
        "farthest 256 ulp: expert 3, n 20, k 7: 0x4080 (4), expected 0x3f80 (1)",
    )
    got[2, 0, 0] = np.nan
    said = extent(WGRAD, [got.view(np.uint16) != want.view(np.uint16)], [got], [want], "there")
    assert said[1].endswith("there 0x3f80 (1); 1 are NaN and should be numbers")
    assert extent(WGRAD, [wrong], [got], None) == ("experts 1, 3; n 16..31, k 5, 7",)


def test_rows_are_named_with_their_expert() -> None:
    ends = np.cumsum(FORWARD.sizes)
    wrong = np.zeros((FORWARD.buffer, 64), np.bool_)
    wrong[ends[0] - 1 : ends[0] + 1] = True
    zeros = np.zeros(wrong.shape, np.float32)
    first = f"rows {ends[0] - 1}..{ends[0]} (experts 0..1); all 64 n"
    assert extent(FORWARD, [wrong], [zeros], [zeros + 1])[0] == first
    wrong[:] = False
    wrong[FORWARD.tokens :, 3] = True
    after = f"rows {FORWARD.tokens}..{FORWARD.buffer - 1} (past the last offset); n 3"
    assert extent(FORWARD, [wrong], [zeros], None) == (after,)


def test_a_quantizers_scales_come_before_its_elements() -> None:
    case = case_by_id("quantize/64x96/axis1/normal")
    planes: list[Any] = [np.zeros((64, 96), ml_dtypes.float8_e4m3fn), np.ones((64, 3), ml_dtypes.float8_e8m0fnu)]
    wrong = [np.ones((64, 96), np.bool_), np.zeros((64, 3), np.bool_)]
    wrong[1][5, 2] = True
    told = lines(case, wrong, planes, planes)
    assert len(told) == where.MOST and told[0] == "scale [5, 2]: 0x7f (1), expected 0x7f (1)"
    assert told[1].startswith("element [0, 0]: ")
    assert extent(case, wrong, planes, planes) == ("1 of 192 scales, 6144 of 6144 elements",)


def test_a_map_of_tiles() -> None:
    wrong = np.zeros((40, 70), np.bool_)
    wrong[16:32, 16:32] = True
    wrong[35, 64:67] = True  # 3 of 8 x 6
    wrong[0, 0] = True  # far less than a tenth
    assert where.tile_map(wrong) == (16, ("1....", ".#...", "....1"))
    assert where.tile_map(wrong, (2, 3)) == (32, ("2..", "..1"))
    assert where.worst_tile(wrong) == (256, 16, 16)
