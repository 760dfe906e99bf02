"""The child process holds whatever a build does wrong, and says what it was.

Not covered: a build that attacks the runner on purpose, memory that a build's own child processes eat, and macOS, where
an access past an operand is a SIGBUS.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from mxgate.conformance.child import Child, ChildError, Limits, resident
from mxgate.conformance.conftest import SPEC, UNIT, Start, unit_operands
from mxgate.kernels.build import BuildError, outside

SOURCE = """
import ctypes, os, sys, time
import numpy as np
import ml_dtypes

BF16 = ml_dtypes.bfloat16

def good(x, x_scales, w, w_scales, offsets):
    return np.full((x.shape[0], w.shape[1]), float(x.astype(np.float32).sum()), BF16)

def raises(x, x_scales, w, w_scales, offsets):
    raise IndexError("tile 3 of 2")

def reads_past(x, x_scales, w, w_scales, offsets):
    return np.full((x.shape[0], w.shape[1]), ctypes.string_at(w_scales.ctypes.data, w_scales.nbytes + 1)[-1], BF16)

def writes_past(x, x_scales, w, w_scales, offsets):
    ctypes.memset(offsets.ctypes.data, 0, offsets.nbytes + 4)

def exits(x, x_scales, w, w_scales, offsets):
    sys.exit(0)

def exits_hard(x, x_scales, w, w_scales, offsets):
    os._exit(0)

def aborts(x, x_scales, w, w_scales, offsets):
    print("wave 3: out of registers", file=sys.stderr)
    os.abort()

def hangs(x, x_scales, w, w_scales, offsets):
    time.sleep(600)

def spins(x, x_scales, w, w_scales, offsets):
    while True:
        pass

def eats(x, x_scales, w, w_scales, offsets):
    kept = []
    while True:
        kept.append(np.ones(1 << 22))

def forks(x, x_scales, w, w_scales, offsets):
    os.fork()
    return good(x, x_scales, w, w_scales, offsets)

def forks_and_hangs(x, x_scales, w, w_scales, offsets):
    if os.fork() == 0:
        time.sleep(600)
    return good(x, x_scales, w, w_scales, offsets)

def closes(x, x_scales, w, w_scales, offsets):
    os.closerange(0, 100)
    return good(x, x_scales, w, w_scales, offsets)

def prints(x, x_scales, w, w_scales, offsets):
    print("a" * 300_000)
    print("tile done", flush=True)
    os.write(2, b"and more")
    return good(x, x_scales, w, w_scales, offsets)

def returns_list(x, x_scales, w, w_scales, offsets):
    return [[1.0]]

def returns_objects(x, x_scales, w, w_scales, offsets):
    return np.array([None])

def returns_too_much(x, x_scales, w, w_scales, offsets):
    return np.zeros(1 << 24, np.float32)

def trickles(x, x_scales, w, w_scales, offsets):
    import socket, struct
    channel = socket.socket(fileno=int(sys.argv[1]))
    text = b'{"sizes": [100000]}'
    channel.sendall(struct.pack("<Q", len(text)) + text)
    while True:
        channel.sendall(b"a")
        time.sleep(0.002)

def instant(x, x_scales, w, w_scales, offsets, *, answer=np.zeros((9, 2), BF16)):
    return answer
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("reads_past", "killed by SIG(SEGV|BUS) at "),
        ("writes_past", "killed by SIG(SEGV|BUS) at "),
        ("raises", r"raised IndexError at mine.py:\d+: tile 3 of 2"),
        ("exits", r"raised SystemExit at mine.py:\d+: 0"),
        ("aborts", r"killed by SIGABRT at mine.py:\d+, saying 'wave 3: out of registers'"),
        ("exits_hard", "ended its process with status 0 instead of answering"),
        ("closes", "closed its channel to the runner"),
        ("returns_list", "returned a list, expected a NumPy array"),
        ("returns_objects", "returned an array of dtype object"),
        ("returns_too_much", "returned 67108864 bytes, which no forward"),
    ],
)
def test_what_a_build_does_wrong_is_named(start: Start, name: str, said: str) -> None:
    launch = start(name).launch(UNIT, SPEC, unit_operands())
    assert launch.error is not None and launch.output == () and launch.digest == ""
    assert re.search(said, launch.error), launch.error


@pytest.mark.parametrize("name", ["hangs", "spins"])
def test_a_hang_ends_at_the_time_limit(start: Start, name: str) -> None:
    began = time.monotonic()
    child = start(name, seconds=0.5)
    assert child.launch(UNIT, SPEC, unit_operands()).error == "no answer within 0.5 s"
    assert time.monotonic() - began < 10 and not child.alive
    assert child.launch(UNIT, SPEC, unit_operands()).error == "had already ended"


def test_bytes_one_by_one_are_no_way_around_the_time_limit(start: Start) -> None:
    began = time.monotonic()
    assert start("trickles", seconds=0.5).launch(UNIT, SPEC, unit_operands()).error == "no answer within 0.5 s"
    assert time.monotonic() - began < 10


def test_a_fast_build_has_all_its_times(start: Start) -> None:
    """More than fit into the header of an answer."""
    times, last = start("instant").clock(UNIT, "nan", unit_operands(), 0.5)
    assert len(times) > 60_000 and all(0 < t < 1 for t in times) and len(last) == 64


def test_files_in_the_working_directory_hide_no_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of the working directory is a build all the same."""
    for name in ("random", "socket", "numpy", "tempfile"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')\n")
    (tmp_path / "my_own").mkdir()
    (tmp_path / "my_own" / "kernel.py").write_text("import random\n" + SOURCE)
    monkeypatch.chdir(tmp_path)
    child = Child(outside("forward", "my_own.kernel:good"), Limits())
    try:
        assert child.launch(UNIT, SPEC, unit_operands()).error is None
    finally:
        child.close()


def test_a_memory_eater_ends_at_the_memory_limit(start: Start) -> None:
    assert start("eats", memory=0.3).launch(UNIT, SPEC, unit_operands()).error == "exceeded 0.3 GiB"


def test_forking_and_printing_harm_nobody(start: Start) -> None:
    for name in ("forks", "forks_and_hangs", "prints"):
        child = start(name)
        for _ in range(2):
            launch = child.launch(UNIT, SPEC, unit_operands())
            assert launch.error is None and launch.output[0].shape == (9, 2), (name, launch.error)
    child.close()
    assert child.printed().endswith("tile done\nand more")


def test_the_whole_session_ends_with_the_child(start: Start) -> None:
    child = start("forks_and_hangs")
    child.launch(UNIT, SPEC, unit_operands())
    child.close()
    with pytest.raises(ProcessLookupError):
        for _ in range(200):
            os.killpg(child._process.pid, 0)
            time.sleep(0.01)


def test_a_build_that_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import nothing_of_that_name\n")
    with pytest.raises(ChildError, match=r"raised ModuleNotFoundError at mine.py:1: No module named"):
        Child(outside("forward", f"{tmp_path / 'mine.py'}:f"), Limits())
    (tmp_path / "mine.py").write_text("def f(:\n")
    with pytest.raises(ChildError, match=r"raised SyntaxError: .*\(mine.py, line 1\)"):
        Child(outside("forward", f"{tmp_path / 'mine.py'}:f"), Limits())
    with pytest.raises(BuildError, match="no file"):
        outside("forward", f"{tmp_path / 'other.py'}:f")
    (tmp_path / "mine.py").write_text("g = 1\n")
    with pytest.raises(ChildError, match="has no callable named 'f'"):
        Child(outside("forward", f"{tmp_path / 'mine.py'}:f"), Limits())


def test_resident_memory_is_a_plausible_number() -> None:
    assert 1 << 20 < resident(os.getpid()) < 1 << 40
