"""What a build writes where it should not, and what it leaves unwritten, shows.

Not covered: a read on the side of an operand that has no guard page.
"""

from __future__ import annotations

import ctypes
import re

import numpy as np
import pytest

from mxgate.conformance.conftest import SPEC, UNIT, Start, unit_operands
from mxgate.conformance.launch import LaunchSpec
from mxgate.conformance.worker import AHEAD

SOURCE = """
import ctypes
import numpy as np
import ml_dtypes

BF16 = ml_dtypes.bfloat16

def good(x, x_scales, w, w_scales, offsets):
    return np.full((x.shape[0], w.shape[1]), float(x.astype(np.float32).sum()), BF16)

def with_out(x, x_scales, w, w_scales, offsets, *, out=None):
    out[...] = good(x, x_scales, w, w_scales, offsets)

def unwritten(x, x_scales, w, w_scales, offsets):
    return np.empty((x.shape[0], w.shape[1]), BF16)

def raw_unwritten(x, x_scales, w, w_scales, offsets):
    return np.ndarray((4096, 2), BF16)[: x.shape[0]]

def writes_before(x, x_scales, w, w_scales, offsets):
    ctypes.memset(x.ctypes.data - 3, 0, 3)
    return good(x, x_scales, w, w_scales, offsets)

def reads_before(x, x_scales, w, w_scales, offsets):
    return np.full((x.shape[0], w.shape[1]), ctypes.string_at(offsets.ctypes.data - 4, 4)[0], BF16)

def writes_behind(x, x_scales, w, w_scales, offsets):
    ctypes.memset(x.ctypes.data + x.nbytes, 0, 3)
    return good(x, x_scales, w, w_scales, offsets)

def changes_token(x, x_scales, w, w_scales, offsets):
    x[0, 0] = 2
    return good(x, x_scales, w, w_scales, offsets)

def clears_padding(x, x_scales, w, w_scales, offsets):
    x[int(offsets[-1]):] = 0
    return good(x, x_scales, w, w_scales, offsets)

def beyond_out(x, x_scales, w, w_scales, offsets, *, out=None):
    ctypes.memset(out.ctypes.data, 0, out.shape[1] * 2 + 2)
    out[...] = 1
"""


def test_bytes_before_an_operand_are_watched(start: Start) -> None:
    launch = start("writes_before").launch(UNIT, SPEC, unit_operands())
    assert launch.error is None and launch.canaries == "wrote over 3 bytes before operand x"


def test_the_operands_of_one_variant_begin_at_a_page(start: Start) -> None:
    ahead = LaunchSpec("ahead", variant=AHEAD)
    child = start("reads_before")
    assert child.launch(UNIT, SPEC, unit_operands()).error is None
    assert re.search("killed by SIG(SEGV|BUS) at ", str(child.launch(UNIT, ahead, unit_operands()).error))
    assert start("writes_behind").launch(UNIT, ahead, unit_operands()).canaries == "wrote over 3 bytes behind operand x"
    here, there = (start("good").launch(UNIT, spec, unit_operands()).digest for spec in (SPEC, ahead))
    assert here == there != ""


def test_tokens_are_watched_padding_is_not(start: Start) -> None:
    child = start("changes_token")
    first, second = (child.launch(UNIT, SPEC, unit_operands()) for _ in range(2))
    assert first.inputs_changed == ("x",) == second.inputs_changed
    assert first.digest == second.digest, "the operand was put back"
    clean = start("clears_padding").launch(UNIT, SPEC, unit_operands())
    assert clean.inputs_changed == () and clean.error is None


@pytest.mark.parametrize("name", ["unwritten", "raw_unwritten"])
def test_memory_that_nobody_wrote_holds_the_fill(start: Start, name: str) -> None:
    """Small arrays come from NumPy's cache, larger ones from malloc; a small np.ndarray(...) is not covered."""
    child = start(name)
    for fill in (0xFF, 0x3F):
        launch = child.launch(UNIT, LaunchSpec("x", fill=fill), unit_operands())
        if name == "unwritten" or hasattr(ctypes.CDLL(None), "mallopt"):
            assert set(np.ascontiguousarray(launch.output[0]).view(np.uint8).ravel().tolist()) == {fill}


@pytest.mark.parametrize("out", ["none", "plain", "pitched"])
def test_out_is_given_filled_and_pitched(start: Start, out: str) -> None:
    child = start("with_out")
    assert child.keywords == {"out"}
    launch = child.launch(UNIT, LaunchSpec("x", out=out), unit_operands())
    if out == "none":
        assert launch.error is not None  # this callable has no other way of answering
    else:
        assert launch.error is None and launch.canaries is None
        assert launch.output[0].shape == (9, 2) and set(launch.output[0].ravel().tolist()) == {288.0}


def test_a_write_between_the_rows_of_out_is_seen(start: Start) -> None:
    launch = start("beyond_out").launch(UNIT, LaunchSpec("x", out="pitched"), unit_operands())
    assert launch.canaries == "wrote over the gap after row 0 of its output, 1 rows in all"
