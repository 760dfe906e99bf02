"""The version is of everything that judges.

Not seen: what is imported by a name that is put together at run time, as builds are.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import mxgate.oracle
from mxgate.conformance import run, worker
from mxgate.conformance.version import code_version

TOP = Path(mxgate.oracle.__file__).resolve().parents[1]


def _imports(path: Path) -> Iterator[Path]:
    """The files of ours that a file of ours imports, wherever in it. Packages of modules are left out."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.ImportFrom):
            base = path.parent if node.level else TOP
            parts = (node.module or "").split(".") if node.level else (node.module or "").split(".")[1:]
            for name in ("", *(alias.name for alias in node.names)):
                stem = base.joinpath(*(part for part in (*parts, name) if part))
                if (node.level or (node.module or "").startswith("mxgate")) and stem.with_suffix(".py").is_file():
                    yield stem.with_suffix(".py")


# What judging imports and no result depends on, and why.
NOT_JUDGING = {
    "conformance/machine.py": "names the device, which every result has beside its stamp",
    "conformance/cluster.py": "hands the work out",
    "kernels/installed.py": "makes records of builds, which are in their fingerprints",
    "kernels/gfx950/ledger.py": "in the fingerprints of emulated builds",
    "kernels/gfx950/virtual.py": "in the fingerprints of emulated builds",
}


def _name(path: Path) -> str:
    return path.resolve().relative_to(TOP).as_posix()


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that the version is of."""
    names: list[str] = []

    def note(path: Path) -> bytes:
        names.append(_name(path))
        return path.open("rb").read()

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", note)
        assert code_version.__wrapped__() == code_version()
    return names


def test_the_version_is_of_all_that_judging_imports(hashed: list[str]) -> None:
    # Children are started by the name of their module.
    todo, seen = [Path(run.__file__).resolve(), Path(worker.__file__).resolve()], set[str]()
    while todo:
        path = todo.pop()
        if _name(path) not in seen | set(NOT_JUDGING):
            seen.add(_name(path))
            todo += _imports(path)
    assert {*hashed} - {"fixtures/MANIFEST.json"} == seen
    assert "kernels/tensors.py" in seen and "oracle/exact.py" in seen


def test_a_change_in_any_of_them_is_another_version(hashed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {code_version()}
    for name in hashed:
        with monkeypatch.context() as patch:
            patch.setattr(
                Path, "read_bytes", lambda path, name=name: path.open("rb").read() + b"#" * (_name(path) == name)
            )
            versions.add(code_version.__wrapped__())
    assert len(versions) == 1 + len(hashed) and len(hashed) == len({*hashed})
