"""GPUs shared out to children, with a made-up number of them: nothing here runs on one."""

from __future__ import annotations

import itertools
import os
import threading
from collections import Counter
from pathlib import Path

import pytest

from mxgate.conformance import machine
from mxgate.conformance.case import Case, case_by_id
from mxgate.conformance.runner import Runner
from mxgate.conformance.settings import Settings
from mxgate.kernels import gpu as gpu_module
from mxgate.kernels.build import Build
from mxgate.kernels.gpu import Gpu

H200, OTHER = Gpu("NVIDIA H200", "sm90"), Gpu("NVIDIA L4", "sm89")
SOURCE = """
import os, time
from pathlib import Path
from mxgate.kernels.numpy_reference import wgrad as right

def wgrad(*operands):
    began = time.monotonic()
    time.sleep(0.02)
    with Path(LOG, str(os.getpid())).open("a") as log:
        print(os.environ.get("CUDA_VISIBLE_DEVICES"), began, time.monotonic(), file=log)
    return right(*operands)
"""
CASES = [case_by_id(f"wgrad/64x96/{name}") for name in ("ramp1.5/exact-sum", "ramp1.5/signature", "skew2/exact-sum")]


def _build(folder: Path, name: str, device: str) -> Build:
    (folder / f"{name}.py").write_text(SOURCE.replace("LOG", repr(str(folder))))
    return Build(name, "wgrad", f"{folder / name}.py:wgrad", device=device, capturable=False)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with three GPUs, as far as the runner is told."""
    monkeypatch.setattr(machine, "shared_out", lambda: ("0", "1", "2"))
    for module in (gpu_module, machine):
        monkeypatch.setattr(module, "gpu", lambda: H200)


@pytest.mark.usefixtures("here")
def test_each_child_has_a_gpu_of_its_own(tmp_path: Path) -> None:
    """As many at work as there are GPUs, two builds: no two children that compute at one time see the same GPU, and all
    children of a build on a case see the one that its result names."""
    builds = [_build(tmp_path, name, "cuda") for name in ("one", "two")]
    pairs = [(build, case) for case in CASES for build in builds]
    with Runner(Settings(jobs=3), name="here") as runner:
        results = [r for _, r in runner.each(lambda pair: runner.examine(*pair)[0], pairs)]
    assert {result.machine for result in results} == {"here GPU 0", "here GPU 1", "here GPU 2"}
    assert {result.device for result in results} == {"NVIDIA H200 (sm90)"}
    assert all(result.outcome.value == "pass" for result in results), [r.findings for r in results]
    calls = [(log.name, *line.split()) for log in tmp_path.iterdir() if log.suffix == "" for line in log.open()]
    assert {gpu for _, gpu, _, _ in calls} == {"0", "1", "2"}
    for gpu in ("0", "1", "2"):
        on_it = sorted((float(began), float(ended), pid) for pid, its, began, ended in calls if its == gpu)
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(on_it)), gpu


@pytest.mark.usefixtures("here")
def test_what_runs_on_no_gpu_has_none(tmp_path: Path) -> None:
    with Runner(Settings(jobs=1), name="here") as runner:
        result, _ = runner.examine(_build(tmp_path, "plain", "cpu"), CASES[0])
    assert result.machine == "here" and result.device == machine.device()
    (log,) = (path for path in tmp_path.iterdir() if path.suffix == "")
    assert {line.split()[0] for line in log.open()} == {str(os.environ.get(machine.VISIBLE))}


@pytest.mark.usefixtures("here")
def test_more_at_work_than_gpus_are_spread_evenly() -> None:
    runner, together = Runner(Settings(jobs=8), name="here"), threading.Barrier(8, timeout=20)
    build = Build("any", "wgrad", "nowhere:wgrad", device="cuda")

    def hold(_: Case) -> str | None:
        with runner._pool.lease(build):
            together.wait()
            return runner._pool.gpu

    with runner:
        held = Counter(gpu for _, gpu in runner.each(hold, [CASES[0]] * 8))
        assert sorted(held.values()) == [2, 3, 3]
        assert runner._pool.gpu is None and set(runner._pool._at_work.values()) == {0}


@pytest.mark.parametrize(
    ("found", "visible", "shared"),
    [
        ((), None, ()),
        ((H200,), None, ()),
        ((H200, H200), None, ("0", "1")),
        ((H200, OTHER, H200), None, ("0", "2")),
        ((H200, OTHER), None, ()),
        ((H200, H200), "5, 7", ("5", "7")),
        ((H200,), "3", ()),
        ((), "", ()),
    ],
)
def test_gpus_of_one_kind_are_shared_out(
    monkeypatch: pytest.MonkeyPatch, found: tuple[Gpu, ...], visible: str | None, shared: tuple[str, ...]
) -> None:
    monkeypatch.setattr(machine, "gpus", lambda: found)
    monkeypatch.setattr(machine, "gpu", lambda: next(iter(found), None))
    monkeypatch.delenv(machine.VISIBLE, raising=False)
    if visible is not None:
        monkeypatch.setenv(machine.VISIBLE, visible)
    assert machine.shared_out() == shared
