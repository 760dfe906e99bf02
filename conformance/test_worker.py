"""The child process holds whatever a build does wrong, and says what it was.

Not covered: a build that attacks the runner on purpose, memory that a build's own child processes eat, and macOS, where
an access past an operand is a SIGBUS.
"""

from __future__ import annotations

import ctypes
import os
import re
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from mxgate.conformance.case import Case
from mxgate.conformance.launch import LaunchSpec, Operands
from mxgate.conformance.worker import AHEAD, KEPT, Child, ChildError, Limits, resident
from mxgate.kernels.build import Build, BuildError, outside

SOURCE = """
import ctypes, os, sys, time
import numpy as np
import ml_dtypes

BF16 = ml_dtypes.bfloat16
calls = 0

def good(x, x_scales, w, w_scales, offsets):
    return np.full((x.shape[0], w.shape[1]), float(x.astype(np.float32).sum()), BF16)

def with_out(x, x_scales, w, w_scales, offsets, *, out=None):
    out[...] = good(x, x_scales, w, w_scales, offsets)

def sums(x, x_scales, w, w_scales, offsets, *, bias):
    return bias.astype(BF16)

def counts(x, x_scales, w, w_scales, offsets):
    global calls
    calls += 1
    return np.full((x.shape[0], w.shape[1]), calls, BF16)

def unwritten(x, x_scales, w, w_scales, offsets):
    return np.empty((x.shape[0], w.shape[1]), BF16)

def raw_unwritten(x, x_scales, w, w_scales, offsets):
    return np.ndarray((4096, 2), BF16)[: x.shape[0]]

def reads_past(x, x_scales, w, w_scales, offsets):
    return np.full((x.shape[0], w.shape[1]), ctypes.string_at(w_scales.ctypes.data, w_scales.nbytes + 1)[-1], BF16)

def writes_past(x, x_scales, w, w_scales, offsets):
    ctypes.memset(offsets.ctypes.data, 0, offsets.nbytes + 4)

def writes_before(x, x_scales, w, w_scales, offsets):
    ctypes.memset(x.ctypes.data - 3, 0, 3)
    return good(x, x_scales, w, w_scales, offsets)

def reads_before(x, x_scales, w, w_scales, offsets):
    return np.full((x.shape[0], w.shape[1]), ctypes.string_at(offsets.ctypes.data - 4, 4)[0], BF16)

def writes_behind(x, x_scales, w, w_scales, offsets):
    ctypes.memset(x.ctypes.data + x.nbytes, 0, 3)
    return good(x, x_scales, w, w_scales, offsets)

three = []
def three_buffers(x, x_scales, w, w_scales, offsets):
    three.append(three.pop(0) if len(three) == 3 else np.empty((x.shape[0], w.shape[1]), BF16))
    three[-1][...] = counts(x, x_scales, w, w_scales, offsets)
    return three[-1]

def changes_token(x, x_scales, w, w_scales, offsets):
    x[0, 0] = 2
    return good(x, x_scales, w, w_scales, offsets)

def clears_padding(x, x_scales, w, w_scales, offsets):
    x[int(offsets[-1]):] = 0
    return good(x, x_scales, w, w_scales, offsets)

def returns_input(x, x_scales, w, w_scales, offsets):
    return x[:, :2]

def beyond_out(x, x_scales, w, w_scales, offsets, *, out=None):
    ctypes.memset(out.ctypes.data, 0, out.shape[1] * 2 + 2)
    out[...] = 1

def raises(x, x_scales, w, w_scales, offsets):
    raise IndexError("tile 3 of 2")

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

def same_buffer(x, x_scales, w, w_scales, offsets):
    if "buffer" not in globals():
        globals()["buffer"] = np.zeros((x.shape[0], w.shape[1]), BF16)
    buffer[...] += 1
    return buffer
"""

CASE = Case("forward", "unit", "uniform", "ones", n=2, k=32, sizes=(4, 3), buffer=9)
SPEC = LaunchSpec("first")
Start = Callable[..., Child]


def _operands() -> Operands:
    e8m0, e4m3 = ml_dtypes.float8_e8m0fnu, ml_dtypes.float8_e4m3fn
    one = np.array(127, np.uint8).view(e8m0)
    return Operands(
        {
            "x": np.ones((9, 32), e4m3),
            "x_scales": np.full((9, 1), one, e8m0),
            "w": np.ones((2, 2, 32), e4m3),
            "w_scales": np.full((2, 2, 1), one, e8m0),
            "offsets": np.array([4, 7], np.int32),
        }
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("builds") / "mine.py"
    path.write_text(textwrap.dedent(SOURCE))
    return path


@pytest.fixture
def start(source: Path) -> Iterator[Start]:
    children: list[Child] = []

    def begin(name: str, seconds: float = 20.0, memory: float = 4.0) -> Child:
        children.append(Child(outside("forward", f"{source}:{name}"), Limits(seconds, memory)))
        return children[-1]

    yield begin
    for child in children:
        child.close()


def test_an_outside_callable_answers_and_keeps_its_process(start: Start) -> None:
    child = start("counts")
    first, second = (child.launch(CASE, SPEC, _operands()) for _ in range(2))
    assert first.error is None and first.output[0].dtype == ml_dtypes.bfloat16
    assert first.output[0].shape == (9, 2)
    assert (first.output[0][0, 0], second.output[0][0, 0]) == (1, 2)
    assert first.digest != second.digest
    assert start("counts").launch(CASE, SPEC, _operands()).digest == first.digest


def test_answers_are_copies_of_what_the_build_returned(start: Start) -> None:
    child = start("same_buffer")
    first, second = (child.launch(CASE, SPEC, _operands()) for _ in range(2))
    assert (first.output[0][0, 0], second.output[0][0, 0]) == (1, 2)


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
    launch = start(name).launch(CASE, SPEC, _operands())
    assert launch.error is not None and launch.output == () and launch.digest == ""
    assert re.search(said, launch.error), launch.error


@pytest.mark.parametrize("name", ["hangs", "spins"])
def test_a_hang_ends_at_the_time_limit(start: Start, name: str) -> None:
    began = time.monotonic()
    child = start(name, seconds=0.5)
    assert child.launch(CASE, SPEC, _operands()).error == "no answer within 0.5 s"
    assert time.monotonic() - began < 10 and not child.alive
    assert child.launch(CASE, SPEC, _operands()).error == "had already ended"


def test_bytes_one_by_one_are_no_way_around_the_time_limit(start: Start) -> None:
    began = time.monotonic()
    assert start("trickles", seconds=0.5).launch(CASE, SPEC, _operands()).error == "no answer within 0.5 s"
    assert time.monotonic() - began < 10


def test_a_fast_build_has_all_its_times(start: Start) -> None:
    """More than fit into the header of an answer."""
    times, last = start("instant").clock(CASE, "nan", _operands(), 0.5)
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
        assert child.launch(CASE, SPEC, _operands()).error is None
    finally:
        child.close()


def test_a_memory_eater_ends_at_the_memory_limit(start: Start) -> None:
    assert start("eats", memory=0.3).launch(CASE, SPEC, _operands()).error == "exceeded 0.3 GiB"


def test_forking_and_printing_harm_nobody(start: Start) -> None:
    for name in ("forks", "forks_and_hangs", "prints"):
        child = start(name)
        for _ in range(2):
            launch = child.launch(CASE, SPEC, _operands())
            assert launch.error is None and launch.output[0].shape == (9, 2), (name, launch.error)
    child.close()
    assert child.printed().endswith("tile done\nand more")


def test_the_whole_session_ends_with_the_child(start: Start) -> None:
    child = start("forks_and_hangs")
    child.launch(CASE, SPEC, _operands())
    child.close()
    with pytest.raises(ProcessLookupError):
        for _ in range(200):
            os.killpg(child._process.pid, 0)
            time.sleep(0.01)


def test_bytes_before_an_operand_are_watched(start: Start) -> None:
    launch = start("writes_before").launch(CASE, SPEC, _operands())
    assert launch.error is None and launch.canaries == "wrote over 3 bytes before operand x"


def test_the_operands_of_one_variant_begin_at_a_page(start: Start) -> None:
    ahead = LaunchSpec("ahead", variant=AHEAD)
    child = start("reads_before")
    assert child.launch(CASE, SPEC, _operands()).error is None
    assert re.search("killed by SIG(SEGV|BUS) at ", str(child.launch(CASE, ahead, _operands()).error))
    assert start("writes_behind").launch(CASE, ahead, _operands()).canaries == "wrote over 3 bytes behind operand x"
    assert start("good").launch(CASE, ahead, _operands()).digest == start("good").launch(CASE, SPEC, _operands()).digest


def test_a_result_that_a_later_call_overwrites_is_seen_a_while_later(start: Start) -> None:
    child = start("three_buffers")
    said = [child.launch(CASE, SPEC, _operands()).canaries for _ in range(KEPT + 2)]
    assert said == [None] * KEPT + [f"wrote over the result of {KEPT} calls before"] * 2
    assert start("counts").launch(CASE, SPEC, _operands()).canaries is None


def test_tokens_are_watched_padding_is_not(start: Start) -> None:
    child = start("changes_token")
    first, second = (child.launch(CASE, SPEC, _operands()) for _ in range(2))
    assert first.inputs_changed == ("x",) == second.inputs_changed
    assert first.digest == second.digest, "the operand was put back"
    clean = start("clears_padding").launch(CASE, SPEC, _operands())
    assert clean.inputs_changed == () and clean.error is None


def test_an_output_in_an_operands_memory_is_named(start: Start) -> None:
    assert start("returns_input").launch(CASE, SPEC, _operands()).aliases == "x"
    assert start("good").launch(CASE, SPEC, _operands()).aliases is None


@pytest.mark.parametrize("name", ["unwritten", "raw_unwritten"])
def test_memory_that_nobody_wrote_holds_the_fill(start: Start, name: str) -> None:
    """Small arrays come from NumPy's cache, larger ones from malloc; a small np.ndarray(...) is not covered."""
    child = start(name)
    for fill in (0xFF, 0x3F):
        launch = child.launch(CASE, LaunchSpec("x", fill=fill), _operands())
        if name == "unwritten" or hasattr(ctypes.CDLL(None), "mallopt"):
            assert set(np.ascontiguousarray(launch.output[0]).view(np.uint8).ravel().tolist()) == {fill}


@pytest.mark.parametrize("out", ["none", "plain", "pitched"])
def test_out_is_given_filled_and_pitched(start: Start, out: str) -> None:
    child = start("with_out")
    assert child.keywords == {"out"}
    launch = child.launch(CASE, LaunchSpec("x", out=out), _operands())
    if out == "none":
        assert launch.error is not None  # this callable has no other way of answering
    else:
        assert launch.error is None and launch.canaries is None
        assert launch.output[0].shape == (9, 2) and set(launch.output[0].ravel().tolist()) == {288.0}


def test_a_write_between_the_rows_of_out_is_seen(start: Start) -> None:
    launch = start("beyond_out").launch(CASE, LaunchSpec("x", out="pitched"), _operands())
    assert launch.canaries == "wrote over the gap after row 0 of its output, 1 rows in all"


def test_extra_operands_come_as_keywords(start: Start) -> None:
    child = start("sums")
    assert child.keywords == {"bias"}
    plain = _operands()
    given = Operands(plain.arrays, extra={"bias": np.full((2, 2), 3, np.float32)})
    assert start("sums").launch(CASE, SPEC, plain).error is not None
    assert child.launch(CASE, SPEC, given).output[0].tolist() == [[3, 3], [3, 3]]


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
            launch = child.launch(case, LaunchSpec("x", out=out), _operands())
            assert launch.error is None and launch.inputs_changed == ("x",) and launch.canaries is None
            assert launch.output[0].dtype == np.float16 and launch.output[0].tolist() == [[2, 2]] * 9
    finally:
        child.close()


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
