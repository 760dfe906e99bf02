"""The gate on loss curves. It does not see small faults: gradients scaled as a whole (an optimizer divides that out),
another rounding of ties, one row's scale in its neighbour's place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mxgate.conformance import run, training
from mxgate.kernels.build import GEMMS, outside, registry
from mxgate.kernels.faults import FAULTS
from mxgate.kernels.gpu import gpu
from mxgate.kernels.grouped_mm import Recipe, recipe
from mxgate.oracle.scales import SCALE_RULES

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
    builds: dict[str, Any] = {op: getattr(right, op) for op in GEMMS} | {wrong.op: wrong}
    how = Recipe(builds["forward"], builds["dgrad"], builds["wgrad"])
    assert training.distance(training.losses(training.mxfp8(how), STEPS), base) > training.LIMIT


def test_the_distance_is_of_the_judged_steps_and_nan_is_no_accept() -> None:
    judged = training.HORIZON
    flat, step = [1.0] * judged, [1.0] * (judged // 2) + [1.5] * (judged // 2)
    assert training.distance(flat, flat) == 0
    assert training.distance(step, flat) == pytest.approx(0.25) == training.distance(step[-1:], [1.25])
    assert training.distance([*flat, *[9.0] * 20], [*flat, *[1.0] * 20]) == 0
    nan, limit = float("nan"), training.LIMIT
    for losses, distance, verdict in (
        (flat, limit, "accept"),
        (flat, limit + 1e-9, "reject"),
        (flat[1:], 0.0, "inconclusive"),
        ([nan], nan, "reject"),
        ([*flat, nan], 0.0, "reject"),
        ([*flat, float("inf")], 0.0, "reject"),
        (flat, nan, "reject"),
    ):
        assert training.Curve("x", tuple(losses), distance).verdict == verdict


def test_every_format_and_every_scale_rule_has_a_row() -> None:
    builds = {op: registry()[f"{op}/torch_dequant"] for op in GEMMS}
    curves = [
        training.Curve(name, (), 0.0, how) for name, how in training.recipes(list(training.RECIPES), builds).items()
    ]
    seen = [tuple(c.numbers.values()) for c in curves]
    assert len(set(seen)) == len(seen)
    assert {rule for x, w, dy, rule, _ in seen if (x, w, dy) == ("e4m3fn",) * 3} == set(SCALE_RULES)
    assert ("e4m3fn", "e4m3fn", "e5m2", "floor", "even") in seen and any(row[-1] == "stochastic" for row in seen)


def test_the_command_writes_the_curves(say: Any) -> None:
    """Of so few steps that nothing is judged."""
    code, out, _ = say(
        "train", "--steps", 3, "--recipe", "e4m3", "--recipe", "e4m3, r175", "--build", "numpy_reference"
    )
    assert code == 3
    assert [line.split()[:1] for line in out.splitlines()[:2]] == [["recipe"], ["bf16"]]
    assert "wgrad/numpy_reference; without a certificate: all" in " ".join(out.split())
    found = json.loads(Path(".mxgate/training/losses.json").read_text())
    assert [len(c["losses"]) for c in found["curves"]] == [3, 3, 3]
    assert [c["rule"] for c in found["curves"]] == ["-", "floor", "r175"]
    assert found["builds"]["wgrad"] == "wgrad/numpy_reference" and not found["certified"]
    assert Path(".mxgate/training/losses.svg").exists()


FAILING = """
def raises(*operands):
    raise RuntimeError("out of shared memory")

def transposed(dy_t, dy_scales, x_t, x_scales, offsets):
    import ml_dtypes, numpy
    return numpy.zeros((len(offsets), len(x_t), len(dy_t)), ml_dtypes.bfloat16)
"""


def test_what_cannot_be_trained_on_is_one_line(say: Any) -> None:
    Path("failing.py").write_text(FAILING)
    Path("mxgate.toml").write_text('[raises]\nop = "wgrad"\n[transposed]\nop = "wgrad"\n')
    Path("empty.json").write_text("{}")
    for words, said in (
        (("--recipe", "e4m4"), "no recipe named 'e4m4'"),
        (("--build", "quantize/numpy_reference"), "expected builds of forward, dgrad, wgrad"),
        (("--build", "wgrad/numpy_reference", "--build", "wgrad/torch_dequant"), "both compute wgrad"),
        (("--build", "wgrad/flydsl", "--recipe", "e5m2"), "wgrad/flydsl does not take 'e5m2'"),
        (("empty.json",), "empty.json: is no certificate"),
        (("--build", "failing.py:raises"), "out of shared memory"),
        (("--build", "failing.py:transposed"), "expected torch.bfloat16 (8, "),
        *([] if gpu() else [(("--build", "wgrad/triton_dequant"), "wgrad/triton_dequant needs a GPU")]),
    ):
        code, out, err = say("train", "--steps", 1, *words)
        assert (code, out, err.count("\n")) == (2, "", 1) and said in err, (words, err)


def test_a_build_with_a_certificate_is_trained_on_while_that_holds(say: Any, monkeypatch: Any) -> None:
    """A few cases are made the whole tier here."""
    monkeypatch.setattr(run, "left_out", lambda build, tier, cases: 0)
    mine = Path("mine.py")
    mine.write_text("from mxgate.kernels.numpy_reference import wgrad\n")
    few = [
        word for case in ("empties/signature", "ramp1.5/normal", "shift32/special") for word in ("--case", f"*{case}")
    ]
    code, out, err = say("run", "--build", "mine.py:wgrad", *few)
    assert code == 0, out + err
    held = ".mxgate/certificates/wgrad-mine.wgrad.json"
    code, out, _ = say("train", held, "--build", "dgrad/numpy_reference", "--recipe", "e4m3", "--steps", 1, "--json")
    found = json.loads(out)
    assert (code, found["certified"]) == (3, ["wgrad/mine.wgrad"])
    assert list(found["builds"].values()) == ["forward/torch_dequant", "dgrad/numpy_reference", "wgrad/mine.wgrad"]
    mine.write_text(mine.read_text() + "# changed\n")
    code, _, err = say("train", held)
    assert code == 2 and "has changed since it was accepted" in err
