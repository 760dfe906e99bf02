"""Offsets: what is let through and what each wrong kind is told. Their use in the ops is tested in test_gemm."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mxgate.oracle.groups import check_offsets, spans


@pytest.mark.parametrize(
    ("offsets", "expected"),
    [([0], [(0, 0)]), ([64], [(0, 64)]), ([0, 32, 32, 64], [(0, 0), (0, 32), (32, 32), (32, 64)])],
)
def test_spans_of_good_offsets(offsets: list[int], expected: list[tuple[int, int]]) -> None:
    array = np.array(offsets, np.int32)
    assert check_offsets(array, 64, align=32, experts=len(offsets)) is array
    assert spans(array) == expected


@pytest.mark.parametrize(
    ("offsets", "options", "words"),
    [
        (np.array([3, 2], np.int32), {}, "offsets[1] is 2, below the end before it, 3"),
        (np.array([-1], np.int32), {}, "offsets[0] is -1; expected 0 or more"),
        (np.array([0, 65], np.int32), {}, "offsets[1] is 65, past the buffer; expected at most 64"),
        (np.array([32, 33], np.int32), {"align": 32}, "offsets[1] is 33; expected a multiple of 32"),
        (np.array([32], np.int32), {"experts": 2}, "offsets hold 1 ends; expected 2"),
        (np.array([32], np.int64), {}, "offsets have type int64"),
        (np.array([32.0], np.float32), {}, "offsets have type float32"),
        ([32], {}, "offsets have type list"),
        (np.array(32, np.int32), {}, "offsets have shape ()"),
        (np.zeros((1, 2), np.int32), {}, "offsets have shape (1, 2)"),
        (np.zeros(0, np.int32), {}, "offsets have shape (0,)"),
    ],
)
def test_bad_offsets_are_told_what_is_wrong(offsets: Any, options: dict[str, int], words: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        check_offsets(offsets, 64, **options)
    assert words in str(caught.value) and "\n" not in str(caught.value)
