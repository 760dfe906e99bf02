"""What tests share: evidence without children (a build called in this process, for tests of the gates and of the
explanations), the command as a user types it, and builds from a file for it."""

from __future__ import annotations

import contextlib
import inspect
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mxgate.conformance import data, gates, run
from mxgate.conformance.__main__ import main
from mxgate.conformance.case import Case
from mxgate.conformance.child import Child, Limits
from mxgate.conformance.launch import Evidence, Launch, LaunchSpec, Operands, digest
from mxgate.kernels.build import Build, outside

Kernel = Callable[..., Any]
Collect = Callable[[Build, Case, Kernel], Evidence]
Say = Callable[..., tuple[int, str, str]]
SOURCE = """
import os, sys, time
import numpy as np
import ml_dtypes

def real(values, scales, start, end):
    codes = scales.view(np.uint8)[:, start // 32:end // 32].astype(int)
    codes = np.repeat(codes, 32, axis=1)
    return np.where(codes == 255, np.nan, np.ldexp(values[:, start:end].astype(np.float64), codes - 127))

def wgrad(dy_t, dy_scales, x_t, x_scales, offsets):
    out = np.zeros((len(offsets), dy_t.shape[0], x_t.shape[0]), ml_dtypes.bfloat16)
    start = 0
    for g, end in enumerate(offsets):
        a, b = real(dy_t, dy_scales, start, end), real(x_t, x_scales, start, end)
        out[g] = (a @ b.T).astype(np.float32).astype(ml_dtypes.bfloat16)
        start = end
    return out

def neighbour(dy_t, dy_scales, x_t, x_scales, offsets):
    return wgrad(dy_t, np.roll(dy_scales, 1, axis=1), x_t, x_scales, offsets)

def crash(*operands):
    os.kill(os.getpid(), 11)

def hang(*operands):
    time.sleep(600)

def eat(*operands):
    kept = []
    while True:
        kept.append(np.ones(1 << 22))

def past(dy_t, dy_scales, x_t, x_scales, offsets):
    import ctypes
    ctypes.memset(offsets.ctypes.data, 0, offsets.nbytes + 64)

def leave(*operands):
    sys.exit(0)

def fork(*operands):
    os.fork()
    return wgrad(*operands)

def talk(*operands):
    print("x" * 100_000)
    return wgrad(*operands)

def slow(*operands):
    time.sleep(0.02)
    return wgrad(*operands)
"""
FEW_CASES = ("wgrad/64x96/empties/signature", "wgrad/64x96/shift32/special", "wgrad/64x96/ramp1.5/normal")
UNIT = Case("forward", "unit", "uniform", "ones", n=2, k=32, sizes=(4, 3), buffer=9)
SPEC = LaunchSpec("first")
Start = Callable[..., Child]
FEW = tuple(word for case in FEW_CASES for word in ("--case", case))  # together they speak to every mandatory gate


def launch(build: Build, case: Case, spec: LaunchSpec, kernel: Kernel) -> Launch:
    """One launch. Unlike a child it has no guard pages, no canaries and no limits; `np.empty` gives filled memory."""
    given = data.operands(case, spec.variant)
    operands = [a.copy() if isinstance(a, np.ndarray) else a for a in given.arrays.values()]
    known = inspect.signature(kernel).parameters
    options: dict[str, Any] = dict(given.extra or {})
    if case.op != "quantize" and case.out_dtype != "bfloat16":
        options["out_dtype"] = np.dtype(getattr(ml_dtypes, case.out_dtype, case.out_dtype))
    real_empty = np.empty

    def filled(*args: Any, **kwargs: Any) -> Any:
        array = real_empty(*args, **kwargs)
        array.reshape(-1).view(np.uint8)[...] = spec.fill
        return array

    if spec.out != "none" and "out" in known:
        ((shape, dtype),) = gates.expected_outputs(case, spec.variant)
        gap = 40 if spec.out == "pitched" else 0
        options["out"] = filled((*shape[:-1], shape[-1] + gap), dtype)[..., : shape[-1]]
    with pytest.MonkeyPatch.context() as patch, np.errstate():
        patch.setattr(np, "empty", filled)
        try:
            result = kernel(*operands, **options)
        except Exception as error:
            return Launch(spec, f"raised {type(error).__name__}: {error}", (), "")
    output = tuple(np.array(x) for x in (result if isinstance(result, tuple) else (result,)))
    return Launch(spec, None, output, digest(output))


def collect(build: Build, case: Case, kernel: Kernel) -> Evidence:
    """The evidence of a smoke run of `kernel` under the record `build`."""
    plan = gates.plan(build, case, "smoke")
    given = data.operands(case)
    launches = tuple(launch(build, case, spec, kernel) for spec in plan)
    return Evidence(build, case, given, data.answer(case, given, build.profile), plan, launches)


@pytest.fixture
def evidence() -> Collect:
    return collect


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Say:
    """Run the command in an empty folder: (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)

    def run(*words: Any) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(word) for word in words])
        got = capsys.readouterr()
        return code, got.out, got.err

    return run


@contextlib.contextmanager
def sigint(kept: Any = signal.default_int_handler) -> Iterator[None]:
    """What is started meanwhile minds SIGINT as a terminal's command does; with SIG_IGN it ignores it as a shell's
    background jobs do, and the tests themselves if they are one: a child inherits that, but no handler."""
    before = signal.signal(signal.SIGINT, kept)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of builds: the SOURCE of the test's module, or this one's."""
    path = tmp_path_factory.mktemp("builds") / "mine.py"
    path.write_text(getattr(request.module, "SOURCE", SOURCE))
    return path


@pytest.fixture
def few_are_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever cases a test names are its whole tier: an accept stays within reach of a short test."""
    monkeypatch.setattr(run, "left_out", lambda build, tier, cases: 0)


@pytest.fixture
def accepted(few_are_all: None, say: Say, source: Path, tmp_path: Path) -> Path:
    """The certificate of a right build."""
    assert say("run", "--op", "wgrad", "--build", f"{source}:wgrad", *FEW)[0] == 0
    return tmp_path / ".mxgate/certificates/wgrad-mine.wgrad.json"


def unit_operands() -> Operands:
    """Of the case UNIT: all ones."""
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


@pytest.fixture
def start(source: Path) -> Iterator[Start]:
    """Start a child with a forward build of `source`."""
    children: list[Child] = []

    def begin(name: str, seconds: float = 20.0, memory: float = 4.0) -> Child:
        children.append(Child(outside("forward", f"{source}:{name}"), Limits(seconds, memory)))
        return children[-1]

    yield begin
    for child in children:
        child.close()
