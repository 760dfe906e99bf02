"""The executor `ray` on a real Ray cluster of two nodes on this machine, one of which is killed in the middle of a run.

Not covered: nodes on two machines (other files, other devices: `differs` alone is), a network that is cut and comes
back, and GPUs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace
from typing import Any

import pytest

from mxgate.conformance import cluster
from mxgate.conformance.case import case_by_id
from mxgate.conformance.cluster import ADDRESS, LOST, Place, Plan, differs, place
from mxgate.conformance.conftest import sigint
from mxgate.conformance.results import read_results
from mxgate.conformance.runner import Pair, given_up
from mxgate.conformance.settings import Settings
from mxgate.conformance.verdict import CaseResult, Outcome
from mxgate.kernels.build import Build, outside

WHEELS = sys.platform == "linux" or (sys.platform == "darwin" and platform.machine() == "arm64")
needs_ray = pytest.mark.skipif(not WHEELS, reason=f"ray has no wheel for {sys.platform} on {platform.machine()}")
Say = Callable[..., tuple[int, str, str]]
SOURCE = """
import os, time
from pathlib import Path
import numpy as np
from mxgate.kernels.numpy_reference import wgrad as right

HERE = Path(__file__).parent

def wrong(dy_t, dy_scales, x_t, x_scales, offsets):
    return right(dy_t, np.roll(dy_scales, 1, axis=1), x_t, x_scales, offsets)

def crash(*operands):
    os.kill(os.getpid(), 11)

def hang(*operands):
    (HERE / "hangs").write_text(str(os.getpid()))
    time.sleep(600)

def held(*operands):
    # On the node that is to be killed the first call never ends.
    if os.environ.get("RAY_RAYLET_PID") == (HERE / "doomed").read_text():
        (HERE / "caught").write_text(str(os.getpid()))
        time.sleep(600)
    return right(*operands)
"""
CASES = ("exact-sum", "signature", "normal", "signature@1", "normal@1", "exact-sum@1")
CHOSEN = tuple(word for case in CASES for word in ("--case", f"wgrad/64x96/ramp1.5/{case}"))
BUILDS = ("held", "wrong", "crash")


def _two_nodes() -> tuple[Any, Any]:
    """A cluster and its second node. Ray gives its processes half a minute, which a busy machine may not have."""
    from ray.cluster_utils import Cluster

    small: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 << 20}
    for left in (2, 1, 0):
        made: Any = Cluster()
        try:
            made.add_node(**small, node_name="first", include_dashboard=False)
            return made, made.add_node(**small, node_name="second")
        except Exception:
            made.shutdown()
            if not left:
                raise
    raise AssertionError


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[str, int]]:
    """A cluster of two nodes with a core each: its address, and the process that is the second one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "1")
        made, second = _two_nodes()
        try:
            yield made.address, second.all_processes["raylet"][0].process.pid
        finally:
            made.shutdown()


def _wait_for(path: Path, process: subprocess.Popen[str]) -> str:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (path.exists() and path.read_text()) and process.poll() is None:
        time.sleep(0.05)
    assert path.exists(), process.communicate()
    return path.read_text()


def _gone(child: int) -> None:
    """A child does not outlive its judge, whose end Ray takes a moment over."""
    with contextlib.suppress(ProcessLookupError):
        for _ in range(400):
            os.kill(child, 0)
            time.sleep(0.05)
        raise AssertionError("a child outlives its judge")


def _judged(folder: Path) -> dict[tuple[str, str], tuple[Any, ...]]:
    """What each line of a folder's results says but for when and where. No pair has two."""
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert len({(line["build"], line["case"]) for line in lines}) == len(lines)
    return {
        (line["build"], line["case"]): tuple(
            line[key] for key in ("fingerprint", "stamp", "outcome", "gates", "findings", "skipped", "device")
        )
        for line in lines
    }


@needs_ray
def test_a_node_is_killed_in_the_middle_of_a_run(say: Say, tmp_path: Path, nodes: tuple[str, int]) -> None:
    """Every result is there once and is what the local executor says; a crash is a result and a hang is; a second run
    repeats nothing; an interrupt leaves no child on a node. Ray prints nothing of its own."""
    address, doomed = nodes
    (tmp_path / "mine.py").write_text(SOURCE)
    (tmp_path / "doomed").write_text(str(doomed))
    words = ["run", "--op", "wgrad", *(word for name in BUILDS for word in ("--build", f"mine.py:{name}")), *CHOSEN]

    def on_ray(*words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "mxgate.conformance", *words, "--executor", "ray"]
        there = {**os.environ, ADDRESS: address}
        with sigint():
            return subprocess.Popen(command, cwd=tmp_path, env=there, stdout=PIPE, stderr=PIPE, text=True)

    process = on_ray(*words, "--out", "far")
    child = int(_wait_for(tmp_path / "caught", process))
    os.kill(doomed, signal.SIGKILL)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1 and err == "", out + err
    assert "REJECT wgrad/mine.crash: contract on 6 of 6 cases" in out and "killed by SIGSEGV at mine.py" in out
    assert "ray" not in out.lower()
    far = _judged(tmp_path / "far")
    assert len(far) == len(BUILDS) * len(CASES)
    at = Counter(json.loads(line)["machine"] for line in (tmp_path / "far/results.jsonl").read_text().splitlines())
    assert set(at) <= {"first", "second"} and at["first"] > 0
    held = [json.loads(line) for line in (tmp_path / "far/results.jsonl").read_text().splitlines() if "held" in line]
    assert {line["machine"] for line in held} == {"first"} and {line["outcome"] for line in held} == {"pass"}
    _gone(child)

    code, _, err = say(*words, "--out", "near")
    assert code == 1 and err == "" and _judged(tmp_path / "near") == far

    process = on_ray(*words, "--out", "far", "--json")
    again = json.loads(process.communicate(timeout=120)[0])
    assert (again["ran"], again["resumed"], again["exit"]) == (0, len(far), 1)

    process = on_ray("run", "--op", "wgrad", "--build", "mine.py:hang", *CHOSEN[:2], "--time-limit", "1", "--json")
    (verdict,) = json.loads(process.communicate(timeout=120)[0])["verdicts"]
    assert verdict["verdict"] == "reject" and "no answer within 1 s" in verdict["first_finding"]["what"]
    assert verdict["machines"] == ["first"]
    (tmp_path / "hangs").unlink()
    process = on_ray("run", "--op", "wgrad", "--build", "mine.py:hang", *CHOSEN)
    child = int(_wait_for(tmp_path / "hangs", process))
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", "mxgate: interrupted; the same command goes on from here\n")
    assert process.returncode == 130
    _gone(child)


# ---------------------------------------------------------------------------------------------------------------------
# What needs no cluster


def test_without_ray_the_extra_is_named(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *of: None if name == "ray" else found(name, *of))
    code, out, err = say("run", "--executor", "ray", "--build", "numpy_reference")
    assert (code, out) == (2, "")
    assert err == "mxgate: --executor ray needs ray, which is not installed: pip install 'mxgate[cluster]'\n"


@needs_ray
@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:0", ":6379"])
def test_a_bad_address_is_one_line(say: Say, monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv(ADDRESS, address)
    began = time.monotonic()
    code, out, err = say("run", "--executor", "ray", "--op", "wgrad", "--build", "numpy_reference")
    assert (code, out) == (2, "") and err.count("\n") == 1 and address in err and ADDRESS in err
    assert time.monotonic() - began < 10


@needs_ray
def test_an_address_of_something_else_is_one_line(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        monkeypatch.setenv(ADDRESS, address)
        monkeypatch.setattr(cluster, "CONNECT", 0.5)
        monkeypatch.setattr(cluster, "_LEAVE", 0.5)
        code, out, err = say("run", "--executor", "ray", "--op", "wgrad", "--build", "numpy_reference")
    assert (code, out, err) == (2, "", f"mxgate: no Ray cluster answered at {address} within 0.5 s\n")


def _plan(*builds: Build) -> Plan:
    return Plan(Settings(), builds, tuple(case_by_id(f"wgrad/64x96/ramp1.5/{name}") for name in CASES), {}, ".")


def test_nodes_that_differ_are_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    plan = _plan(outside("wgrad", f"{file}:wrong"))
    here = place("here", plan)
    one, two = replace(here, name="one"), replace(here, name="two")
    assert differs(here, one, two) is None
    file.write_text(SOURCE + "#")
    changed = differs(here, one, place("two", plan))
    assert changed == "wgrad/mine.wrong has other sources or packages on two than here: install the same on all"
    file.unlink()
    gone = differs(here, one, place("two", plan))
    assert gone is not None and gone.startswith(f"two: no file '{file}'") and "every node needs the same files" in gone
    other = differs(here, one, replace(two, code="0"))
    assert other is not None and other.startswith("two has another version of mxgate, Python or NumPy")
    gpu = differs(here, one, replace(two, devices={"wgrad/mine.wrong": "NVIDIA L4 (sm89)"}))
    assert gpu == (
        f"one has {here.devices['wgrad/mine.wrong']}, two has NVIDIA L4 (sm89): "
        "a verdict is of one device, so judge on nodes of one kind"
    )


def test_an_accept_is_of_one_device(say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of two machines, put together; and a run that resumes on another machine takes nothing over."""
    from mxgate.conformance import machine, run

    monkeypatch.setattr(run, "left_out", lambda build, tier, cases: 0)
    names = ("empties/signature", "shift32/special", "ramp1.5/normal")
    words = ["run", "--build", "wgrad/numpy_reference"]
    words += [word for name in names for word in ("--case", f"wgrad/64x96/{name}")]
    shards = [["--shard", f"{i}/2", "--out", f"shard{i}"] for i in (1, 2)]
    assert say(*words, *shards[0])[0] == 0
    monkeypatch.setattr(machine, "device", lambda: "cpu: another, x86_64")
    monkeypatch.setattr(machine, "name", lambda: "elsewhere")
    assert say(*words, *shards[1])[0] == 0
    code, out, _ = say("report", "shard1", "shard2", "--out", "whole")
    assert code == 3 and "passed in part on each of 2 devices (" in out and "cpu: another, x86_64" in out
    assert not list(Path("whole").glob("certificates/*"))
    together = Path("whole/results.jsonl").read_text()
    assert len(together.splitlines()) == 3 and say("report", "whole")[1].startswith(out.split("wrote")[0])
    assert say("report", "shard1", "shard2", "--out", "whole")[0] == 3
    assert Path("whole/results.jsonl").read_text() == together
    code, out, _ = say(*words, "--out", "shard1")
    assert code == 0 and "3 results in" in out
    assert "on cpu: another, x86_64: elsewhere\n" in out
    held = json.loads(Path("shard1/certificates/wgrad-numpy_reference.json").read_text())
    assert (held["device"], held["machines"]) == ("cpu: another, x86_64", ["elsewhere"])
    results, _ = read_results(Path("shard1/results.jsonl"))
    assert {result.machine for result in results.values()} == {"elsewhere"}


class _Lost(Exception):
    pass


class _Failed(_Lost):
    cause = ValueError("what the judge raised")


def _driver(answers: dict[str, Any]) -> tuple[Any, list[CaseResult]]:
    """The driver's part with a Ray that gives these answers, or raises them, for its calls by name."""
    sent: list[CaseResult] = []

    def get(call: str) -> Any:
        if isinstance(answers[call], BaseException):
            raise answers[call]
        return answers[call]

    exceptions = SimpleNamespace(RayError=_Lost, RayTaskError=_Failed)
    ray = SimpleNamespace(get=get, kill=lambda judge: None, exceptions=exceptions)
    plan = _plan(outside("wgrad", "mxgate.kernels.numpy_reference:wgrad"))
    here = place("here", plan)
    driver = cluster._Driver(ray, SimpleNamespace(send=sent.append), plan, here, first=here, pairs=deque())  # type: ignore[arg-type]
    return driver, sent


def test_a_pair_that_is_lost_goes_back_until_it_is_given_up() -> None:
    driver, sent = _driver({str(i): _Lost() for i in range(LOST)})
    pair: Pair = (driver.plan.builds[0], driver.plan.cases[0])
    other: Pair = (driver.plan.builds[0], driver.plan.cases[1])
    driver.pairs.append(other)
    for i in range(LOST):
        node = cluster._Node(f"node {i}", "a node", None, 1, driver.here, 1)
        driver.nodes.append(node)
        driver.calls[str(i)] = node, pair
        cluster._take(driver, str(i))
        assert driver.nodes == []
        assert list(driver.pairs) == ([pair, other] if i < LOST - 1 else [other])
        driver.pairs = deque([other])
    (result,) = sent
    assert given_up(result) and result.outcome is Outcome.INCONCLUSIVE
    assert f"{LOST} nodes were lost while they judged it" in result.findings[0].what


def test_what_a_judge_raises_ends_the_run() -> None:
    driver, sent = _driver({"call": _Failed()})
    node = cluster._Node("node", "a node", None, 1, driver.here, 1)
    driver.calls["call"] = node, (driver.plan.builds[0], driver.plan.cases[0])
    with pytest.raises(ValueError, match="what the judge raised"):
        cluster._take(driver, "call")
    assert sent == [] and isinstance(driver.here, Place)


def test_a_build_that_hung_is_given_up_on_every_node() -> None:
    driver, sent = _driver({})
    build, cases = driver.plan.builds[0], driver.plan.cases
    driver.nodes.append(cluster._Node("node", "a node", None, 1, driver.here))
    driver.hangs[build.id] = 2
    driver.pairs.extend((build, case) for case in cases)
    cluster._hand_out(driver)
    assert [result.case for result in sent] == [case.id for case in cases]
    assert all("not run: the build hung on 2 cases" in result.findings[0].what for result in sent)


def test_a_driver_is_told_of_hangs_before_it() -> None:
    driver, _ = _driver({})
    build, cases = driver.plan.builds[0], driver.plan.cases
    heard = iter([([(build, case) for case in cases], {build.id: 1})])
    driver.channel = SimpleNamespace(poll=lambda: True, recv=lambda: next(heard))
    with pytest.raises(StopIteration), pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "_join", lambda driver: None)
        patch.setattr(cluster, "_hand_out", lambda driver: None)
        cluster._drive(driver)
    assert driver.hangs == {build.id: 1} and driver.pairs is not None and len(driver.pairs) == len(cases)
