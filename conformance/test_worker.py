"""What a build is called with in its child, and what of its answer comes back.

Not covered: builds on a GPU, which test_gpu.py has.
"""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from mxgate.conformance.case import Case
from mxgate.conformance.child import Child, Limits
from mxgate.conformance.conftest import SPEC, UNIT, Start, unit_operands
from mxgate.conformance.launch import LaunchSpec, Operands, digest
from mxgate.conformance.worker import AGES, KEPT_BYTES, Server
from mxgate.kernels.build import Build

SOURCE = """
import numpy as np
import ml_dtypes

BF16 = ml_dtypes.bfloat16
calls = 0

def good(x, x_scales, w, w_scales, offsets):
    return np.full((x.shape[0], w.shape[1]), float(x.astype(np.float32).sum()), BF16)

def counts(x, x_scales, w, w_scales, offsets):
    global calls
    calls += 1
    return np.full((x.shape[0], w.shape[1]), calls, BF16)

def same_buffer(x, x_scales, w, w_scales, offsets):
    if "buffer" not in globals():
        globals()["buffer"] = np.zeros((x.shape[0], w.shape[1]), BF16)
    buffer[...] += 1
    return buffer

def sums(x, x_scales, w, w_scales, offsets, *, bias):
    return bias.astype(BF16)

held = []
def by_turns(buffers, x, x_scales, w, w_scales, offsets):
    held.append(held.pop(0) if len(held) == buffers else np.empty((x.shape[0], w.shape[1]), BF16))
    held[-1][...] = counts(x, x_scales, w, w_scales, offsets)
    return held[-1]

def three_buffers(*operands):
    return by_turns(3, *operands)

def forty_buffers(*operands):
    return by_turns(40, *operands)

def returns_input(x, x_scales, w, w_scales, offsets):
    return x[:, :2]
"""


def test_an_outside_callable_answers_and_keeps_its_process(start: Start) -> None:
    child = start("counts")
    first, second = (child.launch(UNIT, SPEC, unit_operands()) for _ in range(2))
    assert first.error is None and first.output[0].dtype == ml_dtypes.bfloat16
    assert first.output[0].shape == (9, 2)
    assert (first.output[0][0, 0], second.output[0][0, 0]) == (1, 2)
    assert first.digest != second.digest
    assert start("counts").launch(UNIT, SPEC, unit_operands()).digest == first.digest


def test_answers_are_copies_of_what_the_build_returned(start: Start) -> None:
    child = start("same_buffer")
    first, second = (child.launch(UNIT, SPEC, unit_operands()) for _ in range(2))
    assert (first.output[0][0, 0], second.output[0][0, 0]) == (1, 2)


@pytest.mark.parametrize(("name", "age"), [("three_buffers", 8), ("forty_buffers", 64)])
def test_a_result_that_a_later_call_overwrites_is_seen_a_while_later(start: Start, name: str, age: int) -> None:
    """Not caught: more buffers than the last of AGES, and more than 8 in a process that makes fewer than 64 calls."""
    assert age in AGES
    child = start(name)
    said = [child.launch(UNIT, SPEC, unit_operands()).canaries for _ in range(age + 2)]
    assert said == [None] * age + [f"wrote over the result of {age} calls before"] * 2


def test_results_that_nobody_overwrites_are_kept_and_dropped_in_silence(start: Start) -> None:
    child = start("counts")
    assert {child.launch(UNIT, SPEC, unit_operands()).canaries for _ in range(AGES[-1] + 8)} == {None}


def test_results_that_there_is_no_room_for_are_looked_at_before_they_go() -> None:
    """Of an age that is none of AGES; the last one stays, however large it is."""
    server = Server()
    server.build = Build("f", "forward", "mine.py:f")
    results = [np.full(KEPT_BYTES // 3, i, np.uint8) for i in range(4)]
    server.kept = [(result, digest([result]), result.nbytes) for result in results]
    results[0][5] = 99
    assert server.overwritten() == ["the result of 4 calls before"] and len(server.kept) == 3
    server.kept = [(results[1], digest([results[1]]), KEPT_BYTES + 1)]
    assert server.overwritten() == [] and len(server.kept) == 1


def test_an_output_in_an_operands_memory_is_named(start: Start) -> None:
    assert start("returns_input").launch(UNIT, SPEC, unit_operands()).aliases == "x"
    assert start("good").launch(UNIT, SPEC, unit_operands()).aliases is None


def test_extra_operands_come_as_keywords(start: Start) -> None:
    child = start("sums")
    assert child.keywords == {"bias"}
    plain = unit_operands()
    given = Operands(plain.arrays, extra={"bias": np.full((2, 2), 3, np.float32)})
    assert start("sums").launch(UNIT, SPEC, plain).error is not None
    assert child.launch(UNIT, SPEC, given).output[0].tolist() == [[3, 3], [3, 3]]


def test_torch_sees_the_same_memory(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def f(x, x_scales, w, w_scales, offsets, *, out=None, out_dtype=torch.bfloat16):\n"
        "    assert x.dtype == torch.float8_e4m3fn and x_scales.dtype == torch.float8_e8m0fnu\n"
        "    y = torch.full((x.shape[0], w.shape[1]), 2.0, dtype=out_dtype)\n"
        "    x[0, 0] = 2\n"
        "    return y if out is None else out.copy_(y)\n"
        "def g(x, x_scales, w, w_scales, offsets):\n"
        "    return torch.empty(9, 2, dtype=torch.bfloat16)\n"
    )
    record = Build("f", "forward", f"{tmp_path / 'mine.py'}:f", arrays="torch", out_dtypes=("float16",))
    case = Case("forward", "unit", "uniform", "ones", n=2, k=32, sizes=(4, 3), buffer=9, out_dtype="float16")
    child = Child(record, Limits())
    try:
        for out in ("none", "pitched"):
            launch = child.launch(case, LaunchSpec("x", out=out), unit_operands())
            assert launch.error is None and launch.inputs_changed == ("x",) and launch.canaries is None
            assert launch.output[0].dtype == np.float16 and launch.output[0].tolist() == [[2, 2]] * 9
    finally:
        child.close()
