"""What tests share: evidence without children (a build called in this process, for tests of the gates and of the
explanations), and the command as a user types it."""

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

from mxgate.conformance import data, gates
from mxgate.conformance.__main__ import main
from mxgate.conformance.case import Case
from mxgate.conformance.launch import Evidence, Launch, LaunchSpec, digest
from mxgate.kernels.build import Build

Kernel = Callable[..., Any]
Collect = Callable[[Build, Case, Kernel], Evidence]
Say = Callable[..., tuple[int, str, str]]


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
