"""Scale layouts against the published rule, written out a byte at a time, and against torchao.

Not caught: a rule that both NVIDIA's page and torchao have changed since; what a kernel does with the padding.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from mxgate.oracle.layouts import (
    blocked_size,
    from_blocked,
    from_blocked_groups,
    to_blocked,
    to_blocked_groups,
)

SHAPES = [(1, 1), (128, 4), (128, 8), (256, 4), (33, 3), (129, 5), (300, 17), (0, 4), (5, 0)]
GROUPS = [(0, 128, 128, 300), (5, 133), (256,), (0, 0, 0), (31, 32, 33, 160, 161)]


def plane(rows: int, columns: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(1, 255, (rows, columns), np.uint8)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_every_byte_lies_where_the_rule_puts_it(rows: int, columns: int) -> None:
    scales, along = plane(rows, columns), -(-columns // 4)
    want = np.zeros(blocked_size(rows, columns), np.uint8)
    for r in range(rows):
        for c in range(columns):
            tile = r // 128 * along + c // 4
            want[512 * tile + 16 * (r % 32) + 4 * (r % 128 // 32) + c % 4] = scales[r, c]
    assert to_blocked(scales).tobytes() == want.tobytes()
    assert from_blocked(want, rows, columns).tobytes() == scales.tobytes()


def test_types_and_outer_axes_are_kept() -> None:
    scales = np.stack([plane(40, 6, seed) for seed in range(6)]).reshape(2, 3, 40, 6).view(ml_dtypes.float8_e8m0fnu)
    blocked = to_blocked(scales)
    assert blocked.shape == (2, 3, 1024) and blocked.dtype == ml_dtypes.float8_e8m0fnu
    for i, j in np.ndindex(2, 3):
        assert blocked[i, j].tobytes() == to_blocked(scales[i, j]).tobytes()
    back = from_blocked(blocked, 40, 6)
    assert (back.shape, back.dtype, back.tobytes()) == (scales.shape, scales.dtype, scales.tobytes())
    assert to_blocked(scales[0, 0].T).tobytes() == to_blocked(np.ascontiguousarray(scales[0, 0].T)).tobytes()


@pytest.mark.parametrize("ends", GROUPS, ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_a_group_is_laid_out_as_if_it_were_alone(ends: tuple[int, ...], axis: int) -> None:
    long = ends[-1] + 7
    scales = plane(long, 9) if axis == 0 else plane(9, long)
    blocked, start, at = to_blocked_groups(scales, ends, axis), 0, 0
    for end in ends:
        alone = scales[start:end] if axis == 0 else scales[:, start:end]
        size = blocked_size(*alone.shape)
        assert blocked[at : at + size].tobytes() == to_blocked(alone).tobytes()
        start, at = end, at + size
    assert blocked.shape == (at,)
    rows, columns = scales.shape
    back = from_blocked_groups(blocked, rows, columns, ends, axis)
    (back if axis == 0 else back.T)[ends[-1] :] = (scales if axis == 0 else scales.T)[ends[-1] :]
    assert back.tobytes() == scales.tobytes()


def test_torchao_has_the_same_bytes() -> None:
    torch = pytest.importorskip("torch")
    utils = pytest.importorskip("torchao.prototype.mx_formats.utils")
    for rows, columns in SHAPES[:-2]:
        scales = plane(rows, columns)
        theirs = utils.to_blocked(torch.from_numpy(scales))
        assert theirs.numpy().tobytes() == to_blocked(scales).tobytes()
        assert utils.from_blocked(theirs, rows, columns).contiguous().numpy().tobytes() == scales.tobytes()


def test_torchao_has_the_same_bytes_for_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao's reference wants four columns or a multiple of them where groups are rows, and pads its buffer
    at the end, for the longest that it could become."""
    torch = pytest.importorskip("torch")
    # Some releases of torchao fail to import beside some of FlyDSL; none of what is compared here needs it.
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "flydsl" else find(name, *a))
    quant: Any = pytest.importorskip("torchao.prototype.moe_training.kernels.mxfp8.quant")
    for ends in GROUPS:
        offsets = torch.tensor(ends, dtype=torch.int32)
        scales = plane(ends[-1], 8)
        theirs = quant.torch_to_blocked_2d_M_groups(torch.from_numpy(scales), offsets)[0].numpy().reshape(-1)
        ours = to_blocked_groups(scales, ends, 0)
        assert theirs[: ours.size].tobytes() == ours.tobytes() and not theirs[ours.size :].any()
        scales = plane(140, ends[-1])
        theirs = quant.torch_to_blocked_2d_K_groups(torch.from_numpy(scales), offsets)[0].numpy().reshape(-1)
        ours = to_blocked_groups(scales, ends, 1)
        assert theirs[: ours.size].tobytes() == ours.tobytes() and not theirs[ours.size :].any()
    weights = np.stack([plane(130, 6, seed) for seed in range(3)])
    theirs = quant.torch_to_blocked_per_group_3d(torch.from_numpy(weights)).numpy()
    assert theirs.tobytes() == to_blocked(weights).tobytes()


def test_what_is_no_plane_of_scales_is_refused() -> None:
    with pytest.raises(ValueError, match=r"float32 \[2, 2\]; expected one byte each"):
        to_blocked(np.zeros((2, 2), np.float32))
    with pytest.raises(ValueError, match=r"uint8 \[511\]; expected 512 bytes in the last axis for 3 rows of 2"):
        from_blocked(np.zeros(511, np.uint8), 3, 2)
    with pytest.raises(ValueError, match="a group ends at 3; expected 4 to 8 along axis 0"):
        to_blocked_groups(np.zeros((8, 4), np.uint8), (4, 3), 0)
    with pytest.raises(ValueError, match=r"expected \[512\] for these groups"):
        from_blocked_groups(np.zeros(8, np.uint8), 8, 4, (8,), 0)
