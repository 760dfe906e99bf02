"""The benchmark's rows: complete, and without times where results differ. Not caught: a wrong figure."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np
import pytest

bench: Any = importlib.import_module("mxgate.conformance.bench_quantize")


def test_rows_compare_bytes_with_torchao_before_any_time() -> None:
    rows = bench.bench_quantize((64, 96), repeats=2)
    assert [(r["rule"], r["dtype"], r["axis"]) for r in rows][:3] == [
        ("floor", "float32", 1),
        ("floor", "float32", 0),
        ("floor", "bfloat16", 1),
    ]
    for row in rows:
        assert row["same_bytes"] is True and row["peer"].startswith("torchao ")
        assert row["ratio"] == pytest.approx(row["peer_s"] / row["ours_s"]) and row["copy_gb_s"] > 0


def test_a_row_whose_bytes_differ_has_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "quantize", lambda x, **_: importlib.import_module("mxgate.oracle").quantize(-x, **_))
    (row,) = bench.bench_quantize((32, 32), dtypes=("float32",), axes=(1,), rules=("floor",), repeats=1)
    assert row["same_bytes"] is False and row["ours_s"] is None and row["peer_s"] is None and row["ratio"] is None


def test_without_torchao_the_row_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    (row,) = bench.bench_quantize((32, 32), dtypes=("bfloat16",), axes=(0,), rules=("floor",), repeats=1)
    assert row["peer"].startswith("not run: ") and row["ratio"] is None and row["ours_s"] > 0
    assert np.isfinite(row["ours_gb_s"]) and row["same_bytes"] is None
