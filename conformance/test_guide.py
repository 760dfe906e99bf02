"""docs/bring-your-own.md: every example that a CPU can run is written out as it stands there, and accepted.

HIP's runs against a stand-in for the runtime in which a grid is two loops: its arithmetic and its indices are tested,
and nothing of a GPU is. Triton's runs in its interpreter, and FlyDSL's on the emulator, on a few cases, for those take
seconds a case. Not shown: how long a reader needs, and what the lines that install something do.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"
GUIDE = (DOCS / "bring-your-own.md").read_text()
FILES = re.findall(r"^<!-- (\S+) -->\n```\w*\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^((?:[A-Z_]+=\S+ )?mxgate run .*)$", GUIDE, re.MULTILINE)
STEP = GUIDE[GUIDE.index("## One bad step") :]

SHIM = """
#pragma once
#include <cstddef>
#include <cstdlib>
#include <cstring>
struct dim3 { unsigned x, y, z; dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {} };
static dim3 blockIdx, blockDim, threadIdx;
#define __device__
#define __global__
enum { hipSuccess, hipMemcpyHostToDevice, hipMemcpyDeviceToHost };
static int hipMalloc(void** p, size_t n) { *p = malloc(n ? n : 1); return *p == nullptr; }
static int hipMemcpy(void* to, const void* from, size_t n, int) { memcpy(to, from, n); return 0; }
static int hipFree(void* p) { free(p); return 0; }
#define hipLaunchKernelGGL(kernel, grid, block, lds, stream, ...)                      \\
    do {                                                                               \\
        dim3 g = grid; blockDim = block;                                               \\
        for (blockIdx.z = 0; blockIdx.z < g.z; blockIdx.z++)                           \\
            for (blockIdx.y = 0; blockIdx.y < g.y; blockIdx.y++)                       \\
                for (blockIdx.x = 0; blockIdx.x < g.x; blockIdx.x++)                   \\
                    for (threadIdx.x = 0; threadIdx.x < blockDim.x; threadIdx.x++)     \\
                        kernel(__VA_ARGS__);                                           \\
    } while (0)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All files of the guide in one folder; tables of mxgate.toml one after another."""
    path = tmp_path_factory.mktemp("guide")
    for name, text in FILES:
        with (path / name).open("a") as file:
            file.write(text)
    # What a reader of one section has: the library of another need not be there.
    (path / "libwgrad.so").touch()
    return path


def judged(folder: Path, name: str, *words: str, **environment: str) -> list[dict[str, Any]]:
    """Run the guide's own command for a file, with further words."""
    (command,) = [c for c in COMMANDS if name in c]
    settings, _, run = command.partition("mxgate ")
    environment |= dict(word.split("=", 1) for word in settings.split())
    done = subprocess.run(
        [sys.executable, "-m", "mxgate.conformance", *run.split(), "--json", *words],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode in (0, 1, 3), done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)["verdicts"]
    return found


def test_the_guide_has_an_example_of_each_kind() -> None:
    builds = {"numpy_forward.py", "torch_dgrad.py", "triton_wgrad.py", "flydsl_wgrad.py", "hip_wgrad.py"}
    assert builds | {"wgrad.hip", "test_kernels.py", "train.py", "late.py"} <= {name for name, _ in FILES}
    assert all(sum(name in command for command in COMMANDS) == 1 for name in builds)


def test_numpy(folder: Path) -> None:
    (verdict,) = judged(folder, "numpy_forward.py")
    assert verdict["verdict"] == "accept", verdict


def test_torch(folder: Path) -> None:
    pytest.importorskip("torch")
    (verdict,) = judged(folder, "torch_dgrad.py", CUDA_VISIBLE_DEVICES="")
    assert verdict["verdict"] == "accept", verdict


def test_triton(folder: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    passes(folder, "triton_wgrad.py", "32x48/17blocks/all-scales", "64x96/shift32/special", CUDA_VISIBLE_DEVICES="")


def passes(folder: Path, name: str, *cases: str, **environment: str) -> None:
    """On some cases of the tier an accept is not to be had, but nothing may be rejected."""
    words = [word for case in cases for word in ("--case", f"wgrad/{case}")]
    (verdict,) = judged(folder, name, *words, **environment)
    gates = verdict["gates"]
    assert verdict["verdict"] == "inconclusive" and not {"reject", "inconclusive"} & set(gates.values()), verdict
    passed = ("contract", "reproducible", "padding", "exact", "special")
    assert all(gates[gate] == "pass" for gate in passed), verdict


def test_flydsl(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("flydsl")
    cache = {"FLYDSL_RUNTIME_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    passes(folder, "flydsl_wgrad.py", "32x48/17blocks/all-scales", "64x96/shift32/special", **cache)


def test_hip(folder: Path, tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    for name in ("wgrad.hip", "hip_wgrad.py", "mxgate.toml"):
        (tmp_path / name).write_text((folder / name).read_text())
    tables = (tmp_path / "mxgate.toml").read_text()
    (tmp_path / "mxgate.toml").write_text(tables[tables.index('["hip_wgrad.py:wgrad"]') :])
    (tmp_path / "hip").mkdir()
    (tmp_path / "hip/hip_runtime.h").write_text(SHIM)
    words = ["-x", "c++", "-O2", "-shared", "-fPIC", "-I.", "-o", "libwgrad.so", "wgrad.hip"]
    subprocess.run([compiler, *words], cwd=tmp_path, check=True, timeout=120)
    families = ("ramp1.5/signature", "empties/signature", "shift32/special", "ramp1.5/normal", "uniform/all-codes")
    passes(tmp_path, "hip_wgrad.py", "32x48/17blocks/all-scales", *(f"64x96/{family}" for family in families))


def test_pytest(folder: Path) -> None:
    from mxgate.conformance.test_plugin import run_pytest

    done = run_pytest(folder, "test_kernels.py", "-k", "signature and exact or no_tokens")
    assert re.search(r"^\d+ passed, \d+ deselected", done.stdout.splitlines()[-1]), done.stdout
    said = re.search(r"^pytest .* -k \"(.*)\"$", GUIDE, re.MULTILINE)
    assert said is not None and said[1] == "signature and exact"


def test_one_bad_step(folder: Path, tmp_path: Path) -> None:
    """As it is typed there; the last command is of a build of ours."""
    pytest.importorskip("torch")
    for name in ("train.py", "late.py"):
        (tmp_path / name).write_text((folder / name).read_text())
    typed = re.findall(r"^((?:python|mxgate) .*)$", STEP, re.MULTILINE)
    codes = {"python train": 0, "mxgate run": 1, "mxgate explain": 1, "mxgate minimize": 1}
    assert [" ".join(line.split(".")[0].split()[:2]) for line in typed] == [*codes, "mxgate run", "mxgate run"]
    said = []
    for line, code in zip(typed, (*codes.values(), 1, 3), strict=True):
        words = line.replace("mxgate", "-m mxgate.conformance", 1).split()
        words = words[1:] if words[0] == "python" else words
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == code, (line, done.stdout, done.stderr)
        said.append(done.stdout)
    assert re.fullmatch(r"step 6: loss (inf|nan), 2 calls kept\n", said[0])
    assert "likely cause (certain): scales are read from the plane's beginning, not from the group's" in said[2]
    assert typed[4] in said[3], "minimize prints the command that comes next"
    assert "passed 1 recorded calls; an accept takes a whole tier" in said[5]


def test_the_keys_are_those_that_are_read() -> None:
    from mxgate.kernels.declared import KEYS

    assert set(re.findall(r"^\| `(\w+)` \|", GUIDE, re.MULTILINE)) == set(KEYS)


def test_the_workflow_runs_what_there_is() -> None:
    """Not caught: what GitHub thinks of it."""
    text = (DOCS / "pull-request.yml").read_text()
    assert "pull-request.yml" in GUIDE
    assert "on: pull_request" in text and "pytest -n auto --dist loadgroup --junitxml=" in text
    from mxgate.conformance.__main__ import parser

    (command,) = re.findall(r"run: mxgate (.*)$", text, re.MULTILINE)
    assert parser().parse_args(command.split()).command == "run"
