"""Recorded calls as cases, and shrinking. Not shown: that what is left is the least there is, only that no single piece
of it can go."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mxgate import oracle
from mxgate.conformance import data, recorded
from mxgate.conformance.__main__ import main
from mxgate.conformance.case import case_by_id
from mxgate.conformance.minimize import AXES, NotFailingError, cut, minimize, whole
from mxgate.conformance.runner import Runner
from mxgate.conformance.settings import Settings
from mxgate.fixtures import store
from mxgate.fixtures.store import StoreError
from mxgate.kernels.build import registry
from mxgate.kernels.faults import FAULTS

OPS = ("forward", "dgrad", "wgrad")


def signature(op: str) -> str:
    return f"{op}/{'96x64' if op == 'dgrad' else '64x96'}/ramp1.5/signature"


@pytest.mark.parametrize("op", OPS)
def test_a_case_cut_to_all_of_it_is_the_same_case(op: str, tmp_path: Path) -> None:
    case = case_by_id(signature(op))
    given = data.operands(case, "random")
    recorded.save(tmp_path / "s.safetensors", "all", case, cut(case, given.arrays, whole(case)))
    (again,) = recorded.cases(tmp_path / "s.safetensors")
    back = data.operands(again, "stale")
    for name, array in given.arrays.items():
        assert np.asarray(back.arrays[name]).tobytes() == np.asarray(array).tobytes(), name
    assert (again.sizes, again.buffer, again.formats, again.kind) == (case.sizes, case.buffer, case.formats, case.kind)


@pytest.mark.parametrize("op", OPS)
def test_high_precision_calls_are_quantized_along_the_contraction(op: str, tmp_path: Path) -> None:
    """A wgrad's groups of 40 and 24 tokens become 64 and 32, filled up with zeros."""
    rng = np.random.default_rng(0)
    x, dy, w = (rng.standard_normal(s).astype(ml_dtypes.bfloat16) for s in ((70, 64), (70, 32), (2, 32, 64)))
    ends = np.array([40, 64], np.int32)
    tensors = {"forward": {"x": x, "w": w}, "dgrad": {"dy": dy, "w": w}, "wgrad": {"dy_t": dy.T, "x_t": x.T}}[op]
    named = {f"c.{key}": value for key, value in (tensors | {"offsets": ends}).items()}
    store.save(tmp_path / "s.safetensors", named, {"calls": json.dumps({"c": {"op": op}})})
    (case,) = recorded.cases(tmp_path / "s.safetensors")
    given = data.operands(case, "stale")
    assert given.a is not None and given.b is not None and given.offsets is not None
    if op == "wgrad":
        order = np.r_[0:40, np.full(24, -1), 40:64, np.full(8, -1), 64:70, np.full(26, 69)]
        filled = [np.where(order < 0, np.float32(0), a[:, order].astype(np.float32)) for a in (dy.T, x.T)]
        a, b = (oracle.quantize(a.astype(ml_dtypes.bfloat16), axis=1) for a in filled)
        assert given.offsets.tolist() == [64, 96] and case.buffer == 128
    else:
        a = oracle.quantize({"forward": x, "dgrad": dy}[op], axis=1)
        b = oracle.quantize(w, axis={"forward": 2, "dgrad": 1}[op])
    for mine, wanted in ((given.a, a), (given.b, b)):
        assert mine.codes().tobytes() == wanted.codes().tobytes()
        assert mine.scale_codes().tobytes() == wanted.scale_codes().tobytes()


FAULTY = [
    "wgrad/fault_last_block_twice",
    "wgrad/fault_scale_next_to_its_data",
    "wgrad/fault_padding_not_zeroed",
    "forward/fault_neighbours_scale",
    "dgrad/fault_previous_experts_scales",
]


@pytest.mark.parametrize("name", FAULTY)
def test_what_is_left_still_fails_and_nothing_more_can_go(name: str, tmp_path: Path) -> None:
    fault = next(f for f in FAULTS if f.build.id == name)
    path = tmp_path / "least.safetensors"
    with Runner(Settings()) as runner:
        found = minimize(runner, fault.build, case_by_id(signature(fault.build.op)), path)
        (case,) = recorded.cases(path)
        result, _ = runner.examine(fault.build, case)
        assert result.gates[found.gate].value == "reject"
        right, _ = runner.examine(registry()[f"{fault.build.op}/numpy_reference"], case)
        assert right.outcome.value == "pass"
        arrays = data.operands(case, data.variants(case)[0] if case.buffer == case.tokens else "stale").arrays
        state = whole(case)
        for axis in AXES:
            if len(pieces := getattr(state, axis)) > 1:
                for i in range(len(pieces)):
                    less = replace(state, **{axis: pieces[:i] + pieces[i + 1 :]})
                    if axis == "experts":
                        less = replace(less, tokens=tuple(t for t in state.tokens if t[0] != pieces[i]))
                    recorded.save(tmp_path / "less.safetensors", "less", case, cut(case, arrays, less))
                    smaller, _ = runner.examine(fault.build, recorded.cases(tmp_path / "less.safetensors")[0])
                    assert smaller.gates[found.gate].value != "reject", (axis, i)
    assert case.tokens <= 64 or case.op == "wgrad"


def test_a_recording_is_not_written_over_and_a_missing_folder_is_said_first(tmp_path: Path) -> None:
    fault = next(f for f in FAULTS if f.build.id == "wgrad/fault_last_block_twice")
    case = case_by_id(signature("wgrad"))
    path = tmp_path / "s.safetensors"
    recorded.save(path, "all", case, cut(case, data.operands(case).arrays, whole(case)))
    (again,) = recorded.cases(path)
    with Runner(Settings()) as runner:
        with pytest.raises(NotFailingError, match="holds the case itself"):
            minimize(runner, fault.build, again, path)
        with pytest.raises(NotFailingError, match="its folder does not exist"):
            minimize(runner, fault.build, again, tmp_path / "none" / "s.safetensors")
        with pytest.raises(NotFailingError, match="has a bias"):
            minimize(runner, fault.build, case_by_id("forward/64x96/empties/bias"), tmp_path / "x.safetensors")


def test_nothing_to_shrink(tmp_path: Path) -> None:
    with Runner(Settings()) as runner:
        for build, case, words in (
            ("wgrad/numpy_reference", signature("wgrad"), "nothing to shrink"),
            ("quantize/numpy_reference", "quantize/64x96/axis1/normal", "only grouped products"),
        ):
            with pytest.raises(NotFailingError, match=words):
                minimize(runner, registry()[build], case_by_id(case), tmp_path / "s.safetensors")
    assert not (tmp_path / "s.safetensors").exists()


def test_from_a_failing_run_to_its_least_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """As a user types it: run, minimize the failure, replay it; and the replay of a right build."""
    monkeypatch.chdir(tmp_path)
    fault = "wgrad/fault_last_block_twice"
    assert main(["run", "--build", fault, "--case", signature("wgrad")]) == 1
    assert main(["minimize"]) == 1
    assert f"replay it: mxgate run --build {fault} --cases minimal.safetensors" in capsys.readouterr().out
    assert main(["run", "--build", fault, "--cases", "minimal.safetensors"]) == 1
    assert main(["explain"]) == 1
    capsys.readouterr()
    assert main(["run", "--build", "wgrad/numpy_reference", "--cases", "minimal.safetensors"]) == 3
    assert "passed 1 recorded calls; an accept takes a whole tier" in capsys.readouterr().out


def test_a_result_of_no_tokens_may_not_be_without_measure(tmp_path: Path) -> None:
    """Its operands have no byte, so the file is no limit."""
    path = tmp_path / "s.safetensors"
    for width, fits in ((1 << 15, True), (1 << 16, False), (1 << 40, False)):
        wide, offsets = np.zeros((width, 0), np.float32), np.array([0], np.int32)
        store.save(path, {"c.dy_t": wide, "c.x_t": wide, "c.offsets": offsets}, {"calls": '{"c": {"op": "wgrad"}}'})
        if fits:
            assert recorded.cases(path)[0].n == width
            continue
        with pytest.raises(
            StoreError, match=f"its result has shape .1, {width}, {width}.; expected at most 2147483648"
        ):
            recorded.cases(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"calls": None}, "holds no recorded calls; expected a file of mxgate.capture"),
        ({"calls": "{}"}, "holds no recorded calls; expected at least one"),
        ({"calls": '{"c": {"op": "conv"}}'}, "no op named 'conv'; expected one of forward, dgrad, wgrad"),
        ({"calls": '{"c": {"op": "dgrad"}}'}, "expected dy, dy_scales, w, w_scales and offsets"),
        ({"calls": json.dumps({"c": {"op": "x" * 5000}})}, "no op named 'xxx"),
        ({"calls": '{"c": {"op": "forward", "family": "a\\u001b\\nb"}}'}, r"no family named 'a\x1b\nb'"),
        ({"calls": '{"../c": {"op": "forward"}}'}, "a call is named '../c'; expected up to 80 of letters"),
        ({f"c.{'y' * 5000}": np.zeros(1)}, "holds 'offsets, w, x, yyy"),
        (
            {"c.x": np.zeros((0, 64), np.float32), "c.w": np.zeros((2, 0, 64), np.float32)},
            "offsets[0] is 32, past the buffer",
        ),
        ({"c.x": np.zeros((64, 64), np.int32)}, "x is int32 (64, 64); expected bfloat16, float16, float32 with 2 axes"),
        ({"c.x": np.zeros((64, 96), np.float32)}, "the contraction is 96 long in x and 64 in w"),
        ({"c.offsets": np.array([40, 32], np.int32)}, "offsets"),
        ({"c.offsets": np.array([32], np.int32)}, "offsets"),
    ],
)
def test_files_that_hold_something_else(change: dict[str, Any], words: str, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "s.safetensors"
    whole_file: dict[str, Any] = {
        "c.x": np.zeros((64, 64), np.float32),
        "c.w": np.zeros((2, 32, 64), np.float32),
        "c.offsets": np.array([32, 64], np.int32),
        "calls": '{"c": {"op": "forward"}}',
    } | change
    notes = {"calls": calls} if (calls := whole_file.pop("calls")) else {}
    store.save(path, whole_file, notes)
    with pytest.raises(StoreError) as caught:
        recorded.cases(path)
    assert words in str(caught.value) and str(path) in str(caught.value)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 400 + len(str(path))
    assert main(["run", "--op", "forward", "--cases", str(path), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
