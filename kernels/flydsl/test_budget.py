"""What the rungs' machine code costs stays within the committed budget.

Not caught here: costs that are a matter of time, and what the ledger only assumes of banks, caches and dispatch.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from mxgate.kernels.flydsl import budget
from mxgate.kernels.flydsl import compile as isa
from mxgate.kernels.flydsl.wgrad import BUILDS


@pytest.fixture(autouse=True)
def committed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The committed texts, which elsewhere are compared with the compiled ones."""
    monkeypatch.setattr(isa, "machine_code", isa.committed)


@functools.cache
def figures_of(build: str) -> Mapping[str, budget.Figures]:
    """What inspect says of the committed texts."""
    return budget.inspect(build)


@pytest.mark.parametrize("build", budget.KERNELS_OF)
def test_no_figure_has_risen(build: str) -> None:
    figures = figures_of(build)
    assert budget.over(figures, budget.read(budget.BUDGET)[build]) == ()
    assert set(figures) == set(budget.KERNELS_OF[build])
    assert all(of["spills"] == of["scratch bytes"] == of["waterfall loops"] == 0 for of in figures.values())


def test_the_shipping_loop() -> None:
    loop = figures_of("wgrad/flydsl")["shipping"]
    assert loop["registers"] <= 512 and loop["loop: instructions"] <= 300 and loop["executed: turns of the loop"] > 0
    assert (loop["loop: loads to registers"], loop["loop: permutes"], loop["loop: full drains"]) == (2, 0, 0)
    assert loop["loop: their lane addresses a step"] <= 128
    assert (loop["loop: LDS bank conflicts"], loop["loop: lanes that wait for a bank"]) == (0, 1)


def test_the_shipping_loop_without_its_swizzle_has_conflicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen rows of 128 bytes start in two places of the 64 banks: eight lanes wait for each of 64 reads' banks."""
    swizzle = re.compile(r"v_xor_b32_e32 (v\d+), (v\d+), v\d+")
    text, changed = swizzle.subn(r"v_mov_b32_e32 \1, \2", isa.committed("shipping"))
    assert changed == 1
    monkeypatch.setattr(isa, "machine_code", lambda kernel: text if kernel == "shipping" else isa.committed(kernel))
    monkeypatch.setattr(budget, "_placed", lambda rung: {})
    loop = budget.inspect("wgrad/flydsl")["shipping"]
    assert (loop["loop: LDS bank conflicts"], loop["loop: lanes that wait for a bank"]) == (64 * 4 * 7, 8)
    lines = budget.over({"shipping": loop}, budget.read(budget.BUDGET)["wgrad/flydsl"])
    assert [line.split(": ")[1] for line in lines] == ["LDS bank conflicts", "lanes that wait for a bank"]


def test_where_the_shipping_kernels_blocks_go() -> None:
    """Eight experts on 384 blocks: longest first is done sooner than expert after expert, and no order could be done
    before the fair share. What an XCD brings in lies between an eighth of all bytes and all of them."""
    placed = figures_of("wgrad/flydsl")["shipping"]
    done, in_order = placed["placed: bodies until all are done"], placed["placed: the same, experts in order"]
    assert placed["placed: bodies of a unit, at the least"] <= done < in_order
    bodies = sum(
        max(-(-end // 256) - start // 256, 2)
        for start, end in zip(np.cumsum((0, *budget.PLACED[:-1])), np.cumsum(budget.PLACED), strict=True)
    )
    assert placed["placed: bodies"] == 48 * bodies
    everything = placed["placed: bytes read by anybody"]
    assert everything / 8 <= placed["placed: bytes into one XCD, at most"] <= everything
    assert everything <= placed["placed: bytes into all XCDs"] <= placed["placed: bytes asked for"]


def test_a_figure_that_rises_or_is_new_is_over() -> None:
    now = {"shipping": {"spills": 2, "registers": 400, "new": 0}}
    lines = budget.over(now, {"shipping": {"spills": 1, "registers": 416}})
    assert lines == ("shipping, spills: 2, above the budget of 1", "shipping, new: 0, not in the budget")


@pytest.mark.parametrize(
    "text", ["", "[]", "[" * 100_000, '{"wgrad/flydsl": {"shipping": {"spills": "0"}}}', '{"wgrad/flydsl": 3}']
)
def test_what_is_no_budget_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "budget.json").write_text(text)
    with pytest.raises(ValueError, match="is no budget"):
        budget.read(tmp_path / "budget.json")


def test_what_is_printed_below_a_table_fits() -> None:
    assert max(map(len, budget.notes())) <= 100


def test_every_build_with_machine_code_of_its_own_has_a_budget() -> None:
    assert set(json.loads(budget.BUDGET.read_text())) == set(budget.KERNELS_OF)
    assert {build.id for build in BUILDS} == set(budget.KERNELS_OF)
