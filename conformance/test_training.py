"""The gate on loss curves. It does not see small faults: gradients scaled as a whole (an optimizer divides that out),
another rounding of ties, one row's scale in its neighbour's place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mxgate.conformance import training
from mxgate.conformance.__main__ import main
from mxgate.kernels.build import outside
from mxgate.kernels.faults import FAULTS
from mxgate.kernels.grouped_mm import Recipe, recipe

STEPS = training.HORIZON


@pytest.fixture(scope="module")
def base() -> tuple[float, ...]:
    return training.losses(training.bf16, STEPS)


def test_a_right_recipe_stays_near_bf16(base: tuple[float, ...]) -> None:
    found = training.losses(training.mxfp8(recipe(gradients="e5m2")), STEPS)
    assert found != base
    assert training.distance(found, base) <= training.LIMIT
    assert base[-1] < base[0] - 1  # it learns


WRONG = """
from mxgate.kernels import numpy_reference

def dgrad(dy, dy_scales, w, w_scales, offsets):  # the weights of the expert before
    order = [(g - 1) % len(w) for g in range(len(w))]
    return numpy_reference.dgrad(dy, dy_scales, w[order], w_scales[order], offsets)
"""


@pytest.mark.parametrize("op", ["wgrad", "dgrad"])
def test_a_wrong_gradient_does_not(op: str, base: tuple[float, ...], tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    wrong = {
        "wgrad": next(f.build for f in FAULTS if f.build.id == "wgrad/fault_no_x_scales"),
        "dgrad": outside("dgrad", f"{tmp_path / 'wrong.py'}:dgrad"),
    }[op]
    right = recipe()
    builds: dict[str, Any] = {op: getattr(right, op) for op in training.OPS} | {wrong.op: wrong}
    how = Recipe(builds["forward"], builds["dgrad"], builds["wgrad"])
    assert training.distance(training.losses(training.mxfp8(how), STEPS), base) > training.LIMIT


def test_the_distance_is_of_windows_and_nan_is_no_accept() -> None:
    flat, step = [1.0] * 50, [1.0] * 25 + [1.5] * 25
    assert training.distance(flat, flat) == 0
    assert training.distance(step, flat) == pytest.approx(0.5) == training.distance(step[:1], [0.5])
    assert training.distance([1.0] * 24 + [2.0] + [1.0] * 25, flat) == pytest.approx(1 / 25)
    late = [1.0] * training.HORIZON + [9.0] * 20
    assert training.distance(late, [1.0] * 80) == 0
    broken = training.Curve("x", (1.0,), training.distance([float("nan")] * 30, [1.0] * 30))
    assert not broken.accepted


def test_the_command_writes_the_curves(tmp_path: Path, capsys: Any) -> None:
    assert main(["train", "--steps", "3", "--recipe", "e4m3", "--out", str(tmp_path / "t")]) == 0
    said = capsys.readouterr().out
    assert "e4m3" in said and "bf16" in said
    curves = json.loads((tmp_path / "t" / "losses.json").read_text())["curves"]
    assert [len(c["losses"]) for c in curves] == [3, 3] and (tmp_path / "t" / "losses.svg").exists()
    assert main(["train", "--recipe", "e4m4"]) == 2
    assert "no recipe named 'e4m4'" in capsys.readouterr().err
