"""Figures of machine code that were counted before are kept for the next report.

Not caught here: a figure that depends on anything besides the build's fingerprint and the modules that count.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mxgate.conformance import machine_code
from mxgate.conformance.child import Limits
from mxgate.kernels.build import Build, Unavailable, registry
from mxgate.kernels.flydsl import budget

BUILDS = [registry()[name] for name in ("wgrad/numpy_reference", "wgrad/flydsl_simplest", "wgrad/flydsl")]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The builds whose figures were counted, in order; counting takes seconds, so here each figure is how many were."""
    done: list[str] = []

    def figures(build: Build, limits: Limits) -> machine_code.Figures:
        done.append(build.id)
        return {"shipping": {"registers": len(done)}}

    monkeypatch.setattr(machine_code, "figures", figures)
    return done


def test_figures_are_counted_once(tmp_path: Path, counted: list[str]) -> None:
    kept = tmp_path / ".mxgate/figures.json"
    first = machine_code.ledgers(BUILDS, Limits(), kept)
    assert list(first) == counted == ["wgrad/flydsl_simplest", "wgrad/flydsl"]
    assert machine_code.ledgers(BUILDS, Limits(), kept) == first and len(counted) == 2
    assert [path.name for path in kept.parent.iterdir()] == ["figures.json"]


def test_what_they_come_from_changes(tmp_path: Path, counted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "figures.json"
    machine_code.ledgers(BUILDS, Limits(), kept)
    monkeypatch.setattr(Build, "fingerprint", lambda build: f"another {build.id}")
    found = machine_code.ledgers(BUILDS, Limits(), kept)
    assert len(counted) == 4 and found["wgrad/flydsl"][0] == {"shipping": {"registers": 4}}
    other = tmp_path / "counts.py"
    other.write_text("# counts otherwise\n")
    monkeypatch.setattr(budget, "__file__", str(other))
    machine_code.ledgers(BUILDS, Limits(), kept)
    assert len(counted) == 6


@pytest.mark.parametrize("text", ["", '{"torn', "[" * 100_000, '{"a": {"shipping": {"registers": "many"}}}'])
def test_a_damaged_file_counts_for_nothing(text: str, tmp_path: Path, counted: list[str]) -> None:
    kept = tmp_path / "figures.json"
    kept.write_text(text)
    found = machine_code.ledgers(BUILDS, Limits(), kept)
    assert len(counted) == 2 and machine_code.ledgers(BUILDS, Limits(), kept) == found and len(counted) == 2


def test_a_folder_that_cannot_be_written_only_costs_time(tmp_path: Path, counted: list[str]) -> None:
    (tmp_path / "file").write_text("")
    assert len(machine_code.ledgers(BUILDS, Limits(), tmp_path / "file/figures.json")) == 2


def test_the_file_stays_small(tmp_path: Path, counted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were asked for last stay."""
    kept = tmp_path / "figures.json"
    monkeypatch.setattr(machine_code, "KEPT", 2)
    for version in range(4):
        monkeypatch.setattr(Build, "fingerprint", lambda build, version=version: f"{version} of {build.id}")
        machine_code.ledgers(BUILDS, Limits(), kept)
    assert len(json.loads(kept.read_text())) == 2
    machine_code.ledgers(BUILDS, Limits(), kept)
    assert len(counted) == 8


def test_what_cannot_be_had_here_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def figures(build: Build, limits: Limits) -> machine_code.Figures:
        raise Unavailable("no machine code")

    monkeypatch.setattr(machine_code, "figures", figures)
    assert machine_code.ledgers(BUILDS, Limits(), tmp_path / "figures.json") == {}
    assert not list(tmp_path.iterdir())
