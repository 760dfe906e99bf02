"""What the rungs' machine code costs stays within the committed budget.

Not caught here: costs that only addresses show, such as bank conflicts, and any that are a matter of time.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mxgate.kernels.flydsl import budget
from mxgate.kernels.flydsl import compile as isa
from mxgate.kernels.flydsl.wgrad import BUILDS


@pytest.fixture(autouse=True)
def committed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The committed texts, which elsewhere are compared with the compiled ones."""
    monkeypatch.setattr(isa, "machine_code", isa.committed)


@pytest.mark.parametrize("build", budget.KERNELS_OF)
def test_no_figure_has_risen(build: str) -> None:
    figures = budget.inspect(build)
    assert budget.over(figures, budget.read(budget.BUDGET)[build]) == ()
    assert set(figures) == set(budget.KERNELS_OF[build])
    assert all(of["spills"] == of["scratch bytes"] == of["waterfall loops"] == 0 for of in figures.values())


def test_the_shipping_loop() -> None:
    loop = budget.inspect("wgrad/flydsl")["shipping"]
    assert loop["registers"] <= 512 and loop["loop: instructions"] <= 300 and loop["executed: turns of the loop"] > 0
    assert (loop["loop: loads to registers"], loop["loop: permutes"], loop["loop: full drains"]) == (2, 0, 0)
    assert loop["loop: their lane addresses a step"] <= 128


def test_a_figure_that_rises_or_is_new_is_over() -> None:
    now = {"shipping": {"spills": 2, "registers": 400, "new": 0}}
    lines = budget.over(now, {"shipping": {"spills": 1, "registers": 416}})
    assert lines == ("shipping, spills: 2, above the budget of 1", "shipping, new: 0, not in the budget")


@pytest.mark.parametrize("text", ["", "[]", '{"wgrad/flydsl": {"shipping": {"spills": "0"}}}', '{"wgrad/flydsl": 3}'])
def test_what_is_no_budget_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "budget.json").write_text(text)
    with pytest.raises(ValueError, match="is no budget"):
        budget.read(tmp_path / "budget.json")


def test_every_build_with_machine_code_of_its_own_has_a_budget() -> None:
    assert set(json.loads(budget.BUDGET.read_text())) == set(budget.KERNELS_OF)
    assert {build.id for build in BUILDS} == set(budget.KERNELS_OF)
