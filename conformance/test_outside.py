"""Builds from outside that say what they are, and what they do to others: nothing.

Not covered: a build that means harm (it isolates mistakes), and callables on a GPU.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mxgate.conformance import certificate, run
from mxgate.conformance.case import case_by_id
from mxgate.conformance.child import Child, Limits
from mxgate.conformance.data import operands
from mxgate.conformance.launch import LaunchSpec
from mxgate.conformance.layout import contraction_last
from mxgate.kernels import installed as installed_module
from mxgate.kernels.build import Build, BuildError, apart, outside, registry
from mxgate.oracle import from_blocked

NUMPY = """
import ml_dtypes
import numpy as np


def real(values, scales):
    return values.astype(np.float64) * np.repeat(scales.astype(np.float64), 32, axis=1)


def wgrad(dy_t, dy_scales, x_t, x_scales, offsets):
    dw = np.zeros((len(offsets), len(dy_t), len(x_t)), ml_dtypes.bfloat16)
    start = 0
    for g, end in enumerate(offsets):
        t, b = slice(start, end), slice(start // 32, end // 32)
        with np.errstate(all="ignore"):
            dw[g] = (real(dy_t[:, t], dy_scales[:, b]) @ real(x_t[:, t], x_scales[:, b]).T).astype(np.float32)
        start = end
    return dw
"""
TORCH = """
import torch


def real(values, scales):
    return values.to(torch.float32).double() * scales.to(torch.float32).double().repeat_interleave(32, dim=1)


def wgrad(dy_t, dy_scales, x_t, x_scales, offsets, *, out_dtype=torch.bfloat16):
    dw = torch.zeros(len(offsets), len(dy_t), len(x_t), dtype=out_dtype)
    start = 0
    for g, end in enumerate(offsets.tolist()):
        t, b = slice(start, end), slice(start // 32, end // 32)
        dw[g] = (real(dy_t[:, t], dy_scales[:, b]) @ real(x_t[:, t], x_scales[:, b]).T).float()
        start = end
    return dw
"""
CASES = ("wgrad/64x96/empties/signature", "wgrad/64x96/shift32/special", "wgrad/64x96/ramp1.5/normal")
FEW = tuple(word for case in CASES for word in ("--case", case))
Say = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def few_are_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever cases a test names are its whole tier."""
    monkeypatch.setattr(run, "left_out", lambda op, tier, cases: 0)


def verdicts(say: Say, *words: Any) -> dict[str, dict[str, Any]]:
    _, out, err = say("run", "--json", *words)
    assert out, err
    return {v["build"]: v for v in json.loads(out)["verdicts"]}


# ---------------------------------------------------------------------------------------------------------------------
# mxgate.toml


def test_a_table_states_the_record(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(NUMPY + "\ndef shuffle(scales, name, offsets):\n    return scales\n")
    (tmp_path / "kernel.hip").write_text("// code\n")
    (tmp_path / "mxgate.toml").write_text(
        """
        [wgrad]
        arrays = "torch"
        formats = ["e4m3fn", "e5m2"]
        out_dtypes = ["bfloat16"]
        group_alignment = 128
        accumulator = "mfma-scale-128"
        nan_reach = 128
        scale_layout = "mine.py:shuffle"
        requires = ["torch", "numpy"]
        replaces = "wgrad/numpy_reference"
        sources = ["kernel.hip"]
        options = { BLOCK_M = 128, flags = "-O3", fast = false }
        ["other.py:wgrad"]
        tail = "undefined"
        """
    )
    (tmp_path / "other.py").write_text(NUMPY)
    build = outside(None, f"{tmp_path / 'mine.py'}:wgrad")
    assert build == Build(
        "mine.wgrad",
        "wgrad",
        f"{tmp_path / 'mine.py'}:wgrad",
        arrays="torch",
        formats=("e4m3fn", "e5m2"),
        group_alignment=128,
        accumulator="mfma-scale-128",
        nan_reach=128,
        scale_layout=f"{tmp_path / 'mine.py'}:shuffle",
        requires=("torch", "numpy"),
        replaces="wgrad/numpy_reference",
        sources=(str(tmp_path / "kernel.hip"),),
        options=(("BLOCK_M", "128"), ("fast", "false"), ("flags", "-O3")),
    )
    other = outside(None, f"{tmp_path / 'other.py'}:wgrad")
    assert (other.tail, other.arrays, other.out_dtypes) == ("undefined", "numpy", ("bfloat16", "float16", "float32"))


def test_a_profile_and_an_op_of_another_name(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def cast(x, axis): ...\n")
    (tmp_path / "mxgate.toml").write_text('[cast]\nop = "quantize"\nprofile = "te"\n')
    build = outside(None, f"{tmp_path / 'mine.py'}:cast")
    assert (build.id, build.profile) == ("quantize/mine.cast", "te")
    with pytest.raises(BuildError, match=r"mxgate.toml: \[cast\]: op is 'quantize'; expected 'wgrad', as was asked"):
        outside("wgrad", f"{tmp_path / 'mine.py'}:cast")


def test_an_op_that_nobody_says_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def cast(x, axis): ...\n")
    with pytest.raises(
        BuildError, match=r"which op does '.*mine.py:cast' compute\? give --op forward, .* or op in mxg"
    ):
        outside(None, f"{tmp_path / 'mine.py'}:cast")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[wgrad]\narays = 'torch'", r"\[wgrad\]: there is no key 'arays'; did you mean arrays\?"),
        ("[wgrad]\nzzz = 1", r"\[wgrad\]: there is no key 'zzz'; expected one of op, arrays, formats, .*replaces"),
        ("[wgrad]\narrays = 'jax'", r"\[wgrad\]: arrays is 'jax'; expected one of numpy, torch"),
        ("[wgrad]\nformats = ['e4m3']", r"formats is \['e4m3'\]; expected a list of some of e4m3fn, e5m2"),
        ("[wgrad]\nformats = 'e4m3fn'", "formats is 'e4m3fn'; expected a list"),
        ("[wgrad]\ngroup_alignment = 0", "group_alignment is 0; expected a whole number from 1 up"),
        ("[wgrad]\ngroup_alignment = true", "group_alignment is True; expected a whole number from 1 up"),
        ("[wgrad]\naccumulator = 'fp64'", "accumulator is 'fp64'; expected one of exact, fp32-any-order"),
        ("[wgrad]\ntail = 'ones'", "tail is 'ones'; expected one of zero, untouched, undefined"),
        ("[wgrad]\nnan_reach = -1", "nan_reach is -1; expected a whole number from 0 up"),
        ("[wgrad]\nscale_layout = 'swizzled'", "expected one of plain, blocked-128x4, blocked-128x4-groups, or file"),
        ("[wgrad]\nprofile = 'nv'", "profile is 'nv'; expected one of ocp"),
        ("[wgrad]\noptions = [1]", r"options is \[1\]; expected a table of texts and numbers"),
        ("[wgrad]\nrequires = 'torch'", "requires is 'torch'; expected a list of module names"),
        ("[wgrad]\nsources = ['no.cu']", "sources name '.*no.cu', which is no file"),
        ("[wgrad]\nreplaces = 'wgrad/none'", "replaces is 'wgrad/none'; expected one of .*wgrad/numpy_reference"),
        ("[wgrad]\nreplaces = 'dgrad/numpy_reference'", "replaces is 'dgrad/numpy_reference'; expected one of wgrad/"),
        ("[wgard]\n", r"\[wgard\] names no callable of a file beside it; expected such as \[wgrad\]"),
        ("['no.py:wgrad']\n", r"\[no.py:wgrad\] names no callable of a file beside it"),
        ("arrays = 'torch'", r"arrays stands outside of a table; expected it under \[wgrad\]"),
        ("[wgrad\n", "is not TOML: "),
    ],
)
def test_what_nobody_knows_is_one_line(say: Say, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(NUMPY)
    (tmp_path / "mxgate.toml").write_text(text)
    code, out, err = say("run", "--op", "wgrad", "--build", "mine.py:wgrad", *FEW)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"mxgate: {tmp_path / 'mxgate.toml'}: ")
    assert re.search(message, err), err


def test_the_file_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(NUMPY)
    (tmp_path / "lay.py").write_text("import deep\n")
    (tmp_path / "deep.py").write_text("")
    build = outside("wgrad", f"{tmp_path / 'mine.py'}:wgrad")
    prints = [build.fingerprint()]
    for text in ("", "[wgrad]\n", "[wgrad]\n# a comment\n"):
        (tmp_path / "mxgate.toml").write_text(text)
        prints.append(build.fingerprint())
    (tmp_path / "mxgate.toml").write_text('[wgrad]\nscale_layout = "lay.py:f"\n')
    build = outside("wgrad", f"{tmp_path / 'mine.py'}:wgrad")
    prints.append(build.fingerprint())
    (tmp_path / "deep.py").write_text("A = 1\n")
    prints.append(build.fingerprint())
    assert len(set(prints)) == len(prints)


def test_terms_are_in_the_verdict_and_the_certificate(say: Say, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(NUMPY)
    (tmp_path / "mxgate.toml").write_text('[wgrad]\ngroup_alignment = 64\naccumulator = "wgmma-fp8-13bit"\n')
    cases = ["wgrad/64x96/aligned256/" + family for family in ("signature", "special", "normal")]
    words = [word for case in cases for word in ("--case", case)]
    (verdict,) = verdicts(say, "--op", "wgrad", "--build", "mine.py:wgrad", *words).values()
    assert verdict["verdict"] == "accept"
    assert verdict["terms"] == ["accumulator wgmma-fp8-13bit", "groups of 64 tokens"]
    path = tmp_path / ".mxgate/certificates/wgrad-mine.wgrad.json"
    held = certificate.read(path)
    assert held.build.group_alignment == 64
    certificate.check(path, held)
    (tmp_path / "mxgate.toml").write_text("[wgrad]\ngroup_alignment = 64\n")
    with pytest.raises(certificate.CertificateError, match="has changed since it was accepted"):
        certificate.check(path, held)


# ---------------------------------------------------------------------------------------------------------------------
# torch, and scale layouts


def test_a_torch_build_that_is_missing_torch_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TORCH)
    (tmp_path / "mxgate.toml").write_text('[wgrad]\narrays = "torch"\n')
    assert outside("wgrad", f"{tmp_path / 'mine.py'}:wgrad").requires == ("torch",)


UNBLOCK = """

def unblock(blocked, rows, columns):
    \"\"\"Byte by byte, as the published rule says.\"\"\"
    r, c = np.arange(rows)[:, None], np.arange(columns)
    tile = r // 128 * -(-columns // 4) + c // 4
    return blocked.reshape(-1)[512 * tile + 16 * (r % 32) + r % 128 // 32 * 4 + c % 4]


def blocked(dy_t, dy_scales, x_t, x_scales, offsets):
    dy, x = (unblock(s, len(v), v.shape[1] // 32) for s, v in ((dy_scales, dy_t), (x_scales, x_t)))
    return wgrad(dy_t, dy, x_t, x, offsets)


def grouped(dy_t, dy_scales, x_t, x_scales, offsets):
    planes = []
    for scales, values in ((dy_scales, dy_t), (x_scales, x_t)):
        plane, start, at = np.zeros((len(values), values.shape[1] // 32), scales.dtype), 0, 0
        for end in offsets // 32:
            size = -(-len(values) // 128) * -(-(end - start) // 4) * 512
            plane[:, start:end] = unblock(scales[at : at + size], len(values), end - start)
            start, at = end, at + size
        assert scales.shape == (at,)
        planes.append(plane)
    return wgrad(dy_t, planes[0], x_t, planes[1], offsets)


def shuffle(scales, name, offsets):
    assert name in ("dy_scales", "x_scales") and offsets.dtype == np.int32
    return np.ascontiguousarray(scales.T) if name == "x_scales" else scales


def shuffled(dy_t, dy_scales, x_t, x_scales, offsets):
    return wgrad(dy_t, dy_scales, x_t, x_scales.T, offsets)


def zeroing(dy_t, dy_scales, x_t, x_scales, offsets):
    x_scales[offsets[-1] // 32 :] = np.zeros((), np.uint8).view(x_scales.dtype)
    return shuffled(dy_t, dy_scales, x_t, x_scales, offsets)


def spoiling(dy_t, dy_scales, x_t, x_scales, offsets):
    answer = shuffled(dy_t, dy_scales, x_t, x_scales, offsets)
    x_scales[0] = np.zeros((), np.uint8).view(x_scales.dtype)
    return answer
"""
LAYOUTS = {
    "blocked": "blocked-128x4",
    "grouped": "blocked-128x4-groups",
    "shuffled": "mine.py:shuffle",
    "zeroing": "mine.py:shuffle",
    "spoiling": "mine.py:shuffle",
}


def test_scales_in_the_layout_that_a_build_takes(say: Say, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(NUMPY + UNBLOCK)
    text = "".join(f'[{name}]\nop = "wgrad"\nscale_layout = "{layout}"\n' for name, layout in LAYOUTS.items())
    (tmp_path / "mxgate.toml").write_text(text)
    words = [word for name in LAYOUTS for word in ("--build", f"mine.py:{name}")]
    found = verdicts(say, *words, *FEW)
    assert {name: found[f"wgrad/mine.{name}"]["verdict"] for name in LAYOUTS} == {
        **dict.fromkeys(LAYOUTS, "accept"),
        "spoiling": "reject",
    }, [v["first_finding"] for v in found.values()]
    assert "changed its inputs: x_scales" in found["wgrad/mine.spoiling"]["first_finding"]["what"]
    (tmp_path / "mxgate.toml").write_text(text.replace("128x4-groups", "128x4"))
    assert verdicts(say, "--build", "mine.py:grouped", *FEW)["wgrad/mine.grouped"]["verdict"] == "reject"


@pytest.mark.parametrize("op", ["forward", "dgrad"])
def test_weights_are_laid_out_an_expert_at_a_time(tmp_path: Path, op: str) -> None:
    """The child hands its scales back as the answer: what it was given, byte for byte."""
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n"
        "def show(a, a_scales, w, w_scales, offsets):\n"
        "    return np.concatenate([a_scales.reshape(-1), w_scales.reshape(-1)]).view(np.uint8)\n"
    )
    build = Build("show", op, f"{tmp_path / 'mine.py'}:show", scale_layout="blocked-128x4")
    case = next(c for c in map(case_by_id, [f"{op}/{'64x96' if op == 'forward' else '96x64'}/ramp1.5/signature"]))
    given = operands(case)
    child = Child(build, Limits(60, 2))
    try:
        launch = child.launch(case, LaunchSpec("first"), given)
    finally:
        child.close()
    assert launch.error is None
    _, a_scales, _, w_scales, _ = given.arrays.values()
    rows = contraction_last(op, "w_scales", w_scales)
    assert rows.shape == (4, 64, 3)
    cut = launch.output[0].size - 4 * 512
    assert from_blocked(launch.output[0][:cut], *a_scales.shape).tobytes() == a_scales.tobytes()
    assert from_blocked(launch.output[0][cut:].reshape(4, 512), *rows.shape[1:]).tobytes() == rows.tobytes()


QUANTIZE = """
import ml_dtypes
import numpy as np


def cast(x, axis, fill=0, *, format="e4m3fn"):
    from mxgate.kernels.numpy_reference import quantize

    elements, scales = quantize(x, axis, format=format)
    planes = np.moveaxis(scales, axis, -1).view(np.uint8)
    planes = planes.reshape(-1, *planes.shape[-2:])
    rows, columns = planes.shape[1:]
    r, c = np.arange(rows)[:, None], np.arange(columns)
    at = 512 * (r // 128 * -(-columns // 4) + c // 4) + 16 * (r % 32) + r % 128 // 32 * 4 + c % 4
    blocked = np.full((len(planes), -(-rows // 128) * -(-columns // 4) * 512), fill, np.uint8)
    blocked[:, at] = planes
    return elements, blocked.view(ml_dtypes.float8_e8m0fnu)


def ones(x, axis, *, format="e4m3fn"):
    return cast(x, axis, 127, format=format)


def short(x, axis, *, format="e4m3fn"):
    elements, scales = cast(x, axis, format=format)
    return elements, scales[:, 1:]
"""


def test_a_quantizer_that_writes_tiles(say: Say, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(QUANTIZE)
    names = ("cast", "ones", "short")
    (tmp_path / "mxgate.toml").write_text(
        "".join(f'[{n}]\nop = "quantize"\nscale_layout = "blocked-128x4"\n' for n in names)
    )
    cases = ("64x96/axis1/normal", "64x160/axis1/normal", "4x64x96/axis1/normal", "64x96/axis0/special+float32")
    words = [w for n in names for w in ("--build", f"mine.py:{n}")] + [
        w for c in cases for w in ("--case", f"quantize/{c}")
    ]
    found = verdicts(say, *words)
    assert [found[f"quantize/mine.{n}"]["verdict"] for n in names] == ["accept", "reject", "reject"], found
    said = [found[f"quantize/mine.{n}"]["first_finding"]["what"] for n in names[1:]]
    assert "padding to 128x4 tiles is not zero" in said[0] and "expected 512 bytes: 128x4 tiles of 64 rows" in said[1]
    with pytest.raises(BuildError, match="expected plain or blocked-128x4"):
        Build("x", "quantize", "a:b", scale_layout="a:b")


# ---------------------------------------------------------------------------------------------------------------------
# Two of one name


@pytest.fixture
def two(tmp_path: Path) -> tuple[str, str]:
    """A right and a wrong build of one name, in two folders."""
    for name, text in (("a", NUMPY), ("b", NUMPY.replace("dy_scales[:, b]", "np.roll(dy_scales, 1, 1)[:, b]"))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(text)
    return "a/mine.py:wgrad", "b/mine.py:wgrad"


def test_two_of_one_name_in_one_run(say: Say, tmp_path: Path, two: tuple[str, str]) -> None:
    words = ("--op", "wgrad", "--build", two[0], "--build", two[1], *FEW)
    found = {name: v["verdict"] for name, v in verdicts(say, *words).items()}
    assert found == {"wgrad/a.mine.wgrad": "accept", "wgrad/b.mine.wgrad": "reject"}
    assert [p.name for p in (tmp_path / ".mxgate/certificates").iterdir()] == ["wgrad-a.mine.wgrad.json"]


def test_two_of_one_name_in_two_runs_with_one_out(say: Say, tmp_path: Path, two: tuple[str, str]) -> None:
    folder = tmp_path / ".mxgate/certificates"
    assert say("run", "--op", "wgrad", "--build", two[0], *FEW)[0] == 0
    first = (folder / "wgrad-mine.wgrad.json").read_bytes()
    assert say("run", "--op", "wgrad", "--build", two[1], *FEW)[0] == 1
    assert (folder / "wgrad-mine.wgrad.json").read_bytes() == first, "one build's reject is not another's"
    (tmp_path / "b/mine.py").write_text(NUMPY + "# b\n")
    assert say("run", "--op", "wgrad", "--build", two[1], *FEW)[0] == 0
    assert (folder / "wgrad-mine.wgrad.json").read_bytes() == first
    held = {certificate.read(path).build.target for path in folder.iterdir()}
    assert held == {f"{tmp_path / name}/mine.py:wgrad" for name in "ab"}
    code, out, _ = say("run", "--op", "wgrad", "--build", two[0], *FEW)
    assert code == 0 and "0 results in" in out and "3 kept from before" in out
    (tmp_path / "b/mine.py").write_text(NUMPY.replace("start = end", "pass"))
    assert say("run", "--op", "wgrad", "--build", two[1], *FEW)[0] == 1
    assert [path.name for path in folder.iterdir()] == ["wgrad-mine.wgrad.json"]
    say("run", "--op", "wgrad", "--build", two[0], *FEW)
    code, _, err = say("explain", "--build", "wgrad/mine.wgrad")
    assert code == 2 and "was rejected" in err, "the other's rejections are not this one's"


def test_names_grow_until_they_differ() -> None:
    targets = ("/x/one/k/mine.py:wgrad", "/y/one/k/mine.py:wgrad", "/x/two/k/mine.py:wgrad")
    named = apart([Build("mine.wgrad", "wgrad", t) for t in targets] + [Build("else", "wgrad", "/x/k/else.py:wgrad")])
    assert [b.name for b in named] == ["x.one.k.mine.wgrad", "y.one.k.mine.wgrad", "x.two.k.mine.wgrad", "else"]
    assert [b.name for b in apart([Build("k.f", "wgrad", t) for t in ("p.a.k:f", "p.b.k:f")])] == ["a.k.f", "b.k.f"]


# ---------------------------------------------------------------------------------------------------------------------
# Installed packages


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package with entry points, on the path of this process and of every child."""
    folder = tmp_path / "site"
    (folder / "their_kernels-1.0.dist-info").mkdir(parents=True)
    (folder / "their_kernels-1.0.dist-info" / "METADATA").write_text("Name: their_kernels\nVersion: 1.0\n")
    (folder / "their_kernels").mkdir()
    (folder / "their_kernels/__init__.py").write_text("print('imported')\n")
    (folder / "their_kernels/gemm.py").write_text(
        NUMPY
        + "MAPPING = {'op': 'wgrad', 'target': 'their_kernels.gemm:wgrad', 'accumulator': 'wgmma-bf16'}\n"
        + "MISTAKEN = {**MAPPING, 'acumulator': 'exact'}\nNUMBER = 3\n"
    )
    (folder / "their_kernels/record.py").write_text(
        "from mxgate.kernels.build import Build\n"
        "BUILD = Build('theirs', 'wgrad', 'their_kernels.gemm:wgrad', group_alignment=32)\n"
    )
    (folder / "their_kernels/broken.py").write_text("import os\nos.environ['HOME'] = '/'\nraise SystemExit(3)\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder) + os.pathsep + os.environ.get("PYTHONPATH", ""))
    installed_module.installed.cache_clear()
    yield folder
    installed_module.installed.cache_clear()


def register(folder: Path, **points: str) -> None:
    text = "[mxgate.builds]\n" + "".join(f"{name} = their_kernels.{value}\n" for name, value in points.items())
    (folder / "their_kernels-1.0.dist-info/entry_points.txt").write_text(text)


def test_an_installed_package_registers_its_builds(say: Say, package: Path) -> None:
    register(package, mapped="gemm:MAPPING", record="record:BUILD")
    assert registry()["wgrad/mapped"].accumulator == "wgmma-bf16" and registry()["wgrad/theirs"].group_alignment == 32
    code, out, err = say("list", "builds", "--op", "wgrad")
    assert code == 0 and "wgrad/mapped" in out and "wgrad/theirs" in out and "imported" not in out + err
    found = verdicts(say, "--build", "mapped", "--build", "wgrad/theirs", *FEW)
    assert [v["verdict"] for v in found.values()] == ["accept", "accept"], found
    before = registry()["wgrad/mapped"].fingerprint()
    (package / "their_kernels/__init__.py").write_text("")
    assert registry()["wgrad/mapped"].fingerprint() != before
    assert "their_kernels" not in sys.modules, "the runner imports no build"


def test_an_entry_point_that_fails_is_a_note(say: Say, package: Path) -> None:
    register(
        package,
        fine="record:BUILD",
        broken="broken:BUILD",
        gone="nothing:BUILD",
        mistaken="gemm:MISTAKEN",
        number="gemm:NUMBER",
    )
    home = os.environ.get("HOME")
    code, out, err = say("list", "builds")
    assert code == 0 and "wgrad/theirs" in out
    notes = sorted(line.partition("entry point ")[2] for line in err.splitlines())
    assert [note.partition(" of mxgate.builds: ")[2] for note in notes] == [
        "raised SystemExit: 3",
        "raised ModuleNotFoundError: No module named 'their_kernels.nothing'",
        "there is no key 'acumulator'; did you mean accumulator?",
        "is of type int; expected a Build or a dict",
    ]
    assert os.environ.get("HOME") == home
    code, _, err = say("run", "--build", "broken")
    assert code == 2 and err.count("\n") == 1 and "raised SystemExit: 3" in err


# ---------------------------------------------------------------------------------------------------------------------
# What an outside build may do without harm to others. Each is judged beside a right one, in one run.

NASTY = {
    "imports slowly": ("import time\ntime.sleep(1.5)\n", "return right(*operands)", "accept"),
    "prints": ("print('x' * 300_000, flush=True)\n", "print('y' * 300_000); return right(*operands)", "accept"),
    "sets numpy's error state": (
        "np.seterr(all='raise')\n",
        "np.seterr(all='raise'); return right(*operands)",
        "accept",
    ),
    "changes the environment": (
        "import os\nos.environ.clear()\n",
        "os.environ['OPENBLAS_NUM_THREADS'] = 'x'; os.chdir('/'); return right(*operands)",
        "accept",
    ),
    "forks": ("import os\n", "os.fork(); return right(*operands)", "accept"),
    "leaks memory": ("kept = []\n", "kept.append(np.ones(1 << 24)); return right(*operands)", "reject"),
    "exits when called": ("", "raise SystemExit(0)", "reject"),
    "exits when imported": ("raise SystemExit(0)\n", "", "reject"),
    "returns a view of its input": ("", "return operands[0][None, :, :96]", "reject"),
    "changes a result it gave before": (
        "last = []\n",
        "last and last[-1].fill(0); last.append(right(*operands)); return last[-1]",
        "reject",
    ),
    "replaces numpy functions": (
        "",
        "np.array_equal = np.ascontiguousarray = np.frombuffer = None; return right(*operands)",
        "any",
    ),
}
SAYS = {
    "leaks memory": "exceeded 0.6 GiB",
    "exits when called": "raised SystemExit",
    "exits when imported": "cannot be loaded: raised SystemExit",
    "returns a view of its input": "",
    "changes a result it gave before": "wrote over the result of the call before",
}


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The verdicts of all of them and of a right one, "mine", judged in one run."""
    folder = tmp_path_factory.mktemp("nasty")
    (folder / "mine.py").write_text(NUMPY)
    command = [sys.executable, "-m", "mxgate.conformance", "run", "--json", "--op", "wgrad", "--memory-limit", "0.6"]
    for number, (first, call, _) in enumerate(NASTY.values()):
        text = NUMPY.replace("def wgrad", "def right")
        (folder / f"nasty{number}.py").write_text(f"{text}\n{first}\ndef wgrad(*operands):\n    {call or 'pass'}\n")
        command += ["--build", f"nasty{number}.py:wgrad"]
    done = subprocess.run([*command, "--build", "mine.py:wgrad", *FEW], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == "", done.stderr
    found = {v["build"]: v for v in json.loads(done.stdout)["verdicts"]}
    names = {what: f"wgrad/nasty{number}.wgrad" for number, what in enumerate(NASTY)}
    return {what: found[name] for what, name in (*names.items(), ("mine", "wgrad/mine.wgrad"))}


@pytest.mark.parametrize("what", list(NASTY))
def test_nobody_else_is_harmed(beside: dict[str, dict[str, Any]], what: str) -> None:
    assert "reject" not in beside["mine"]["gates"].values() and beside["mine"]["gates"]["bounded"] == "pass"
    assert NASTY[what][2] in ("any", beside[what]["verdict"]) or (
        # Three cases of a tier are no accept; in this process nobody says that they are the whole of it.
        NASTY[what][2] == "accept" and "were not asked for" in beside[what]["reason"]
    ), beside[what]
    if what in SAYS:
        assert SAYS[what] in beside[what]["first_finding"]["what"]


def test_torch_builds_take_cpu_tensors_and_harm_nobody(say: Say, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    right = TORCH.replace("def wgrad", "def right") + "\ndef wgrad(*operands):\n    "
    (tmp_path / "sets.py").write_text(f"{right}torch.set_default_dtype(torch.float64)\n    return right(*operands)\n")
    (tmp_path / "views.py").write_text(f"{right}return operands[0][None, :, :96].view(torch.uint8)\n")
    (tmp_path / "mine.py").write_text(TORCH)
    (tmp_path / "mxgate.toml").write_text('[wgrad]\narrays = "torch"\n')
    words = [word for name in ("sets", "views", "mine") for word in ("--build", f"{name}.py:wgrad")]
    found = verdicts(say, "--op", "wgrad", *words, *FEW, "--case", f"{CASES[2]}+float32")
    assert [v["verdict"] for v in found.values()] == ["accept", "reject", "accept"], found


def test_builds_none_of_which_can_be_loaded_are_bad_input(say: Say, tmp_path: Path) -> None:
    (tmp_path / "nasty.py").write_text("raise SystemExit('no device')\n")
    code, out, err = say("run", "--op", "wgrad", "--build", "nasty.py:wgrad", "--build", "nasty.py:other", *FEW)
    assert (code, out, err.count("\n")) == (2, "", 1) and "raised SystemExit at nasty.py:1: no device" in err


def test_a_build_that_writes_one_type_alone_is_not_asked_for_it(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(NUMPY.replace("ml_dtypes.bfloat16", "np.float32"))
    build = replace(outside("wgrad", f"{tmp_path / 'mine.py'}:wgrad"), out_dtypes=("float32",))
    child = Child(build, Limits(60, 2))
    try:
        case = case_by_id(f"{CASES[2]}+float32")
        launch = child.launch(case, LaunchSpec("first"), operands(case))
    finally:
        child.close()
    assert launch.error is None and launch.output[0].dtype == np.float32 != ml_dtypes.bfloat16
