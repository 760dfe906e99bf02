"""`mxgate faults` counts right: what a gate kills, what survives, and what is no fault at all.

That every fault is killed is for `mxgate faults` itself to show; here a few stand for all.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mxgate.conformance import gates as gate_module
from mxgate.conformance import report
from mxgate.conformance.__main__ import main
from mxgate.conformance.case import cases
from mxgate.conformance.child import Limits
from mxgate.conformance.data import variants
from mxgate.conformance.matrix import RANDOM, SHORT, kill_matrix
from mxgate.conformance.rules import RULES
from mxgate.conformance.settings import Settings
from mxgate.conformance.verdict import GATES
from mxgate.kernels import faults
from mxgate.kernels.build import registry

BY_ID = {fault.build.id: fault for fault in faults.FAULTS}
SUBTLE = BY_ID["wgrad/fault_one_ulp"]
SETTINGS = Settings(jobs=2, limits=Limits(30.0, 4.0))


def test_under_every_seed_the_launches_left_let_each_gate_speak() -> None:
    for op in ("forward", "dgrad", "wgrad", "quantize"):
        for case in cases(op, "smoke"):
            first, *rest = gate_module.plan(registry()[f"{op}/numpy_reference"], case, "smoke")
            left = [first, *(spec for spec in rest if spec.label in SHORT)]
            assert len({s.variant for s in left}) > 1 or len(variants(case)) == 1
            assert len(left) > 2 and len({s.fill for s in left}) > 1


def test_a_subtle_fault_dies_and_the_common_rules_miss_it() -> None:
    matrix = kill_matrix([SUBTLE], [], 1, SETTINGS, lambda done, total, at: None)
    (row,) = matrix.rows
    assert row.killed and matrix.survivors == () and row.first is not None and row.cases > 20
    assert row.gates["exact"] >= 1 and set(row.gates) == set(GATES)
    assert set(row.caught) == set(RULES)
    assert all(matrix.missed(rule, random=True) == 1 == matrix.seen(rule, random=True) for rule in RULES)


def test_a_fault_that_another_gate_rejects_has_survived() -> None:
    misnamed = replace(SUBTLE, gate="reproducible")
    matrix = kill_matrix([misnamed], [], 1, SETTINGS, lambda done, total, at: None)
    assert matrix.survivors == matrix.rows and matrix.rows[0].gates["exact"] >= 1
    assert report.matrix_document(matrix)["exit"] == 1


def test_a_rejected_correct_build_is_an_alarm_and_a_right_one_is_none() -> None:
    right = registry()["quantize/numpy_reference"]
    wrong = BY_ID["quantize/fault_log2"].build
    matrix = kill_matrix([], [right, wrong], 2, SETTINGS, lambda done, total, at: None)
    assert {build for build, *_ in matrix.alarms} == {wrong.id}
    assert all(case.endswith(("@1", "@2")) for _, case, _, _ in matrix.alarms)
    assert matrix.checked > 60


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["faults", "--fault", "quantize/log2", "--fault", "dgrad/transposed_result"]) == 0
    out = capsys.readouterr().out
    assert "2 of 2 faults rejected by the gate they name" in out and "random data alone" in out
    assert all(len(line.rstrip()) <= 100 for line in out.splitlines())
    misnamed = replace(BY_ID["quantize/fault_log2"], gate="special")
    monkeypatch.setattr(faults, "FAULTS", (misnamed,))
    assert main(["faults", "--fault", "log2", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["survivors"] == ["quantize/fault_log2"] and document["faults"][0]["gates"]["exact"] > 0
    assert main(["faults", "--fault", "log3"]) == 2
    assert "no fault named 'log3'" in capsys.readouterr().err


def test_random_families_exist() -> None:
    from mxgate.conformance.case import cases

    assert set(RANDOM) <= {case.family for case in cases(None, "smoke")}
