"""The windowed model: its small functions against brute force, its output against the reference.

Not caught here: anything the shipped kernel does that the model does not (registers, LDS, waits).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mxgate.kernels import numpy_reference as reference
from mxgate.kernels import numpy_windowed as windowed
from mxgate.kernels.build import BLOCK
from mxgate.kernels.numpy_windowed import STEP

BOUNDARIES = range(0, 1056, 32)
ROUTINGS = ((256,), (32, 64), (0, 96, 0, 288, 0), (224, 32, 256), (1024, 0, 32), (0, 0))


def test_a_window_covers_its_group_in_an_even_number_of_steps() -> None:
    for start in BOUNDARIES:
        for end in range(start, 1056, 32):
            w = windowed.window(start, end)
            assert w.base % 256 == 0 and w.base <= start < w.base + 256
            assert w.base + w.tokens >= end
            assert w.steps % 2 == 0 and w.steps >= 4
            assert w.steps == 4 or w.base + w.tokens - end < 2 * STEP  # nothing beyond what evenness asks for


def test_the_mask_keeps_exactly_the_groups_tokens() -> None:
    for start in BOUNDARIES:
        for end in range(start, 1056, 32):
            w = windowed.window(start, end)
            keep = windowed.inside(np.arange(w.base, w.base + w.tokens, BLOCK), start, end)
            tokens = np.repeat(keep, BLOCK).nonzero()[0] + w.base
            assert tokens.tolist() == list(range(start, end))


def test_every_order_of_tiles_visits_each_tile_once() -> None:
    for rows in range(1, 12):
        for columns in range(1, 12):
            grid = [(i, j) for i in range(rows) for j in range(columns)]
            assert [windowed.row_major(t, rows, columns) for t in range(len(grid))] == grid
            walk = [windowed.supertile(t, rows, columns) for t in range(len(grid))]
            assert sorted(walk) == grid
            whole = [t for t in range(0, len(grid) - 3, 4) if rows % 2 == 0 and columns % 2 == 0]
            for t in whole:  # four blocks in a row share two stripes of each operand
                assert len({i for i, _ in walk[t : t + 4]}) == len({j for _, j in walk[t : t + 4]}) == 2


def test_the_longest_window_goes_first_only_below_the_threshold() -> None:
    groups = [(0, 64), (64, 2048), (2048, 2048), (2048, 3072), (3072, 5056)]
    assert windowed.longest_first(groups, 1023) == [1, 4, 3, 0, 2]
    assert windowed.longest_first(groups, 1024) == windowed.by_index(groups, 4) == [0, 1, 2, 3, 4]


def test_what_lies_outside_a_plane_reads_as_zero() -> None:
    plane = np.arange(1, 13, dtype=np.uint8).reshape(3, 4)
    assert windowed.load(plane, (2, 4), (2, 6)).tolist() == [[11, 12, 0, 0], [0, 0, 0, 0]]
    assert windowed.load(plane, (0, 1), (4, 6)).tolist() == [[0, 0]]


@pytest.mark.parametrize("formats", [("e4m3fn", "e4m3fn"), ("e5m2", "e4m3fn"), ("e4m3fnuz", "e5m2fnuz")])
@pytest.mark.parametrize("sizes", ROUTINGS)
def test_whole_numbers_give_the_reference_bit_for_bit(
    sizes: tuple[int, ...], formats: tuple[str, str], make: Any
) -> None:
    """Several tiles with remainders in both directions, padding full of NaN, longer buffers."""
    for buffer in (sum(sizes), sum(sizes) + 96):
        for seed, dtype in ((0, "bfloat16"), (1, "float32")):
            args = make("wgrad", sizes, n=544, k=288, buffer=buffer, formats=formats, seed=seed)
            expected = reference.wgrad(*args, out_dtype=dtype)
            for build in (windowed.wgrad_plain, windowed.wgrad):
                got = build(*(a.copy() for a in args), out_dtype=dtype)
                assert got.tobytes() == expected.tobytes()


def test_the_order_of_blocks_changes_no_bit(make: Any) -> None:
    args = make("wgrad", (96, 0, 544, 32), n=544, k=288, buffer=768, whole=False)
    expected = windowed.wgrad_plain(*(a.copy() for a in args)).tobytes()
    assert windowed.wgrad(*(a.copy() for a in args)).tobytes() == expected


def test_only_the_padding_is_zeroed_in_place(make: Any) -> None:
    args = make("wgrad", (32, 64), buffer=160)
    before = [a.copy().view(np.uint8) for a in args[:4]]
    windowed.wgrad(*args)
    for old, new, held in zip(before, args[:4], (96, 3, 96, 3), strict=True):
        assert (old[:, :held] == new.view(np.uint8)[:, :held]).all()
        assert not new.view(np.uint8)[:, held:].any()


def test_masking_one_operand_is_not_enough(make: Any) -> None:
    """A large scale brings a product masked on one side back into range; masked on both it is gone."""
    args = make("wgrad", (32, 32), n=32, k=32)
    args[3].view(np.uint8)[:, 1] = 254
    expected = reference.wgrad(*args).tobytes()
    assert windowed.wgrad(*args).tobytes() == expected
    one = replace(windowed.SHIPPED, mask_b=lambda scales, keep: scales)
    assert windowed.run(one, *args).tobytes() != expected


def test_a_neighbours_nan_is_within_reach(make: Any) -> None:
    """A mask of scales alone lets it through, as far as the window of the group goes and no further."""
    args = make("wgrad", (32, 32, 512, 32), n=32, k=32)
    args[0].view(np.uint8)[5, 40] = 0x7F
    out = windowed.wgrad(*args).astype(np.float32)
    assert np.isnan(out[:3, 5]).all() and np.isnan(out).sum() == 3 * 32


def test_no_window_is_longer_than_its_reach() -> None:
    for start in range(0, 768, 32):
        for size in range(32, 1600, 32):
            span = windowed.window(start, start + size)
            assert start - span.base < windowed.NAN_REACH
            assert span.base + span.tokens - (start + size) < windowed.NAN_REACH
