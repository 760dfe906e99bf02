"""What of the GPU's timing needs no GPU: the problems, and how a process that fails is told."""

from __future__ import annotations

import pytest

from mxgate.conformance import timing_gpu
from mxgate.kernels.build import BLOCK, registry


@pytest.mark.parametrize("shape", list(timing_gpu.SHAPES))
@pytest.mark.parametrize("routing", list(timing_gpu.ROUTINGS))
def test_the_groups_are_whole_blocks_of_about_the_same_total(shape: str, routing: str) -> None:
    case = timing_gpu.case_of("wgrad", shape, routing)
    _, _, experts, mean = timing_gpu.SHAPES[shape]
    assert case.experts == experts and not any(size % BLOCK for size in case.sizes) and min(case.sizes) > 0
    assert abs(case.tokens - experts * mean) <= experts * 128


def test_the_shifted_ramp_is_aligned_to_a_block_and_to_nothing_larger() -> None:
    ramp, shifted = (timing_gpu.case_of("wgrad", "16b", name) for name in ("ramp", "shift32"))
    assert ramp.tokens == shifted.tokens and not any(size % 256 for size in ramp.sizes)
    ends = [sum(shifted.sizes[: i + 1]) for i in range(shifted.experts - 1)]
    assert all(end % 64 == BLOCK for end in ends)


def test_a_process_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    build = registry()["wgrad/numpy_reference"]
    case = timing_gpu.case_of("wgrad", "16b", "uniform")
    with pytest.raises(RuntimeError, match=r"^the timing process failed: "):
        timing_gpu.time_on_gpu([build], case, seconds=0.1, passes=1, flush=False, limit=120)
