"""The build record and the registry.

Not caught here: what a build computes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from mxgate.kernels.build import Build, BuildError, find, outside, registry


@dataclass(frozen=True)
class Wanted:
    """A case as far as a build asks."""

    op: str = "wgrad"
    formats: tuple[str, str] = ("e4m3fn", "e4m3fn")
    out_dtype: str = "bfloat16"
    sizes: tuple[int, ...] = (32, 0, 64)


def test_every_registered_build_is_named_after_its_key_and_hashes() -> None:
    builds = registry()
    assert {b.op for b in builds.values()} == {"forward", "dgrad", "wgrad", "quantize"}
    prints = {build.fingerprint() for key, build in builds.items() if key == build.id}
    assert len(prints) == len(builds)
    assert all(b.replaces is None or b.replaces in builds for b in builds.values())


def test_the_fingerprint_covers_the_record_and_every_source(tmp_path: Path) -> None:
    kernel, helper = tmp_path / "mine.py", tmp_path / "helper.py"
    kernel.write_text("def wgrad(): ...\n")
    helper.write_text("A = 1\n")
    build = replace(outside("wgrad", f"{kernel}:wgrad"), sources=(str(helper), "mxgate.oracle.formats"))
    first = build.fingerprint()
    assert build.fingerprint() == first
    assert replace(build, accumulator="exact").fingerprint() != first
    helper.write_text("A = 2\n")
    second = build.fingerprint()
    kernel.write_text("def wgrad(): pass\n")
    assert len({first, second, build.fingerprint()}) == 3


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (Wanted(op="dgrad"), "computes wgrad, not dgrad"),
        (Wanted(formats=("e2m1", "e4m3fn")), "does not take e2m1"),
        (Wanted(out_dtype="float64"), "does not write float64"),
        (Wanted(sizes=(32, 8)), "needs group sizes in multiples of 32"),
        (Wanted(), None),
    ],
)
def test_a_build_says_why_it_declines(case: Wanted, reason: str | None) -> None:
    assert find("wgrad", "numpy_reference").declines(case) == reason


def test_what_is_not_installed_is_named() -> None:
    build = Build("x", "wgrad", "a:b", requires=("numpy", "no_such_module_here"))
    assert build.missing() == "no_such_module_here"
    assert build.declines(Wanted()) == "needs no_such_module_here, which is not installed"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "no build named 'nothing' for wgrad: known are .*numpy_windowed.*; or give path"),
        ("no/such/file.py:wgrad", "no file '.*no/such/file.py'; a build is"),
        ("no.such.module:wgrad", "no module named 'no.such.module'"),
        ("file.py:", "names no build"),
    ],
)
def test_a_build_that_is_not_there(name: str, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        find("wgrad", name)


def test_an_outside_file_is_loaded_by_path_and_may_import_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "my_neighbour.py").write_text("ANSWER = 42\n")
    (tmp_path / "my_kernel.py").write_text("from my_neighbour import ANSWER\n\ndef wgrad():\n    return ANSWER\n")
    build = find("wgrad", f"{tmp_path / 'my_kernel.py'}:wgrad")
    assert (build.id, build.group_alignment, build.load()()) == ("wgrad/my_kernel.wgrad", 32, 42)
    with pytest.raises(BuildError, match="has no callable named 'nothing'"):
        find("wgrad", f"{tmp_path / 'my_kernel.py'}:nothing").load()


@pytest.mark.parametrize(
    "field", [{"op": "gemm"}, {"arrays": "jax"}, {"tail": "ones"}, {"group_alignment": 0}, {"nan_reach": "far"}]
)
def test_a_record_with_an_unknown_word_is_refused(field: dict[str, Any]) -> None:
    with pytest.raises(BuildError, match=r"expected (one of|a whole number)"):
        Build(**{"name": "x", "op": "wgrad", "target": "a:b", **field})


def test_the_fingerprint_covers_what_an_outside_file_imports_from_beside_itself(tmp_path: Path) -> None:
    """Not caught: what is opened or imported by a name that is only known at run time."""
    (tmp_path / "my_package" / "inner").mkdir(parents=True)
    sources = {
        "mine.py": "raise SystemExit('this must not run')\ndef wgrad():\n    from my_package.inner import first\n",
        "my_package/__init__.py": "",
        "my_package/shared.py": "import far",
        "my_package/inner/__init__.py": "",
        "my_package/inner/first.py": "from .. import shared\nfrom .second import A",
        "my_package/inner/second.py": "A = 1",
        "far.py": "import mine",
    }
    for name, text in sources.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "unused.py").write_text("")
    build = outside("wgrad", f"{tmp_path / 'mine.py'}:wgrad")
    before = build.fingerprint()
    for name, text in sources.items():
        (tmp_path / name).write_text(text + "\n# changed")
        assert build.fingerprint() != before, name
        (tmp_path / name).write_text(text)
    (tmp_path / "unused.py").write_text("A = 2")
    assert build.fingerprint() == before
    (tmp_path / "far.py").write_text("not python (")
    assert build.fingerprint() != before


def test_bytes_that_move_from_one_file_to_the_next_change_the_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import one, two\n")
    build = outside("wgrad", f"{tmp_path / 'mine.py'}:wgrad")
    prints = set()
    for one, two in (("A = 1\n", "B = 1\n"), ("A = 1\nB = 1\n", ""), ("", "A = 1\nB = 1\n")):
        (tmp_path / "one.py").write_text(one)
        (tmp_path / "two.py").write_text(two)
        prints.add(build.fingerprint())
    assert len(prints) == 3


def test_the_fingerprint_covers_the_build_it_replaces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "old.py").write_text("A = 1\n")
    (tmp_path / "new.py").write_text("A = 1\n")
    old = Build("old", "wgrad", f"{tmp_path / 'old.py'}:wgrad")
    new = Build("new", "wgrad", f"{tmp_path / 'new.py'}:wgrad", replaces="wgrad/old")
    unknown = new.fingerprint()
    monkeypatch.setattr("mxgate.kernels.build.registry", lambda: {old.id: old})
    first = new.fingerprint()
    (tmp_path / "old.py").write_text("A = 2\n")
    assert len({unknown, first, new.fingerprint()}) == 3


def test_a_module_beside_the_user_is_found_and_hashed_without_running_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "my_own").mkdir()
    (tmp_path / "my_own" / "__init__.py").write_text("raise SystemExit('this must not run')\n")
    (tmp_path / "my_own" / "kernel.py").write_text("import beside\n")
    (tmp_path / "beside.py").write_text("")
    monkeypatch.chdir(tmp_path)
    build = find("wgrad", "my_own.kernel:wgrad")
    prints = {build.fingerprint()}
    for name in ("my_own/__init__.py", "my_own/kernel.py", "beside.py"):
        (tmp_path / name).write_text((tmp_path / name).read_text() + "# changed\n")
        prints.add(build.fingerprint())
    assert len(prints) == 4
    with pytest.raises(BuildError, match=r"no module named 'my_own\.nothing'"):
        find("wgrad", "my_own.nothing:wgrad")
