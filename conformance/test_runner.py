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


def test_an_ancestor_that_lacks_a_keyword_leaves_lineage_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The heir takes the case's bias and is judged; what it replaces has no keyword for it, and ends nothing."""
    (tmp_path / "older.py").write_text(OLDER)
    older = outside("forward", f"{tmp_path / 'older.py'}:forward")
    heir = replace(outside("forward", f"{numpy_reference.__file__}:forward"), replaces=older.id)
    monkeypatch.setattr(runner, "registry", lambda: {older.id: older})
    with Runner(Settings()) as one:
        bias, _ = one.examine(heir, case_by_id("forward/64x96/empties/bias"))
        plain, _ = one.examine(heir, case_by_id("forward/64x96/empties/signature"))
    assert bias.gates["lineage"] is Outcome.INCONCLUSIVE and bias.gates["exact"] is Outcome.PASS
    assert "gave no output that stands to compare with" in bias.findings[0].what
    assert plain.gates["lineage"] is Outcome.PASS
