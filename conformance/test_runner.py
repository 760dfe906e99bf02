"""A runner on single pairs of build and case, where the command would need a registry of its own to come to them.

What a run makes of the results is tested in test_run.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mxgate.conformance import runner
from mxgate.conformance.case import case_by_id
from mxgate.conformance.runner import Runner
from mxgate.conformance.settings import Settings
from mxgate.conformance.verdict import Outcome
from mxgate.kernels import numpy_reference
from mxgate.kernels.build import outside

OLDER = """
from mxgate.kernels import numpy_reference

def forward(x, x_scales, w, w_scales, offsets):
    return numpy_reference.forward(x, x_scales, w, w_scales, offsets)
"""


def test_an_heir_may_take_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Biases, for which what it replaces has no keyword, and formats that are not in its record: there is nothing to
    compare there. An ancestor that is not known leaves lineage open."""
    (tmp_path / "older.py").write_text(OLDER)
    older = outside("forward", f"{tmp_path / 'older.py'}:forward")
    heir = replace(outside("forward", f"{numpy_reference.__file__}:forward"), replaces=older.id)
    narrow = replace(older, name="narrow", formats=("e5m2",))
    monkeypatch.setattr(runner, "registry", lambda: {older.id: older, narrow.id: narrow})
    biased, plain = (case_by_id(f"forward/64x96/empties/{family}") for family in ("bias", "signature"))
    want = {(older.id, biased): "SILENT", (older.id, plain): "PASS", (narrow.id, plain): "SILENT"}
    want["forward/nobody", plain] = "INCONCLUSIVE"
    with Runner(Settings()) as one:
        for (ancestor, case), outcome in want.items():
            for _ in range(2):  # what is known of an ancestor is kept
                found, _evidence = one.examine(replace(heir, replaces=ancestor), case)
                assert found.gates.get("lineage", Outcome.SILENT) is Outcome[outcome], (ancestor, case.id)
                assert found.gates["exact"] is Outcome.PASS
