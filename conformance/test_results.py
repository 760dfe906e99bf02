"""Lines of results.jsonl: they come back as they went, and what is no result is left out and named.

Not covered: two processes that open one file at a time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mxgate.conformance.results import Journal, from_line, read_results, to_line
from mxgate.conformance.verdict import CaseResult, Finding, Outcome


def _result(case: str = "wgrad/a", **changes: Any) -> CaseResult:
    finding = Finding("exact", "3 of 9 differ", ("expert 0: \x00 \u2028",), 3, {"x": float("nan")})
    fields = {"gates": {"exact": Outcome.REJECT}, "findings": (finding,), **changes}
    return CaseResult("wgrad/b", "f" * 64, case, seconds=0.5, **fields)


def test_lines_come_back_as_they_went() -> None:
    key, back = from_line(to_line(_result(), "stamp"))
    assert key == ("wgrad/b", "f" * 64, "wgrad/a", "stamp")
    assert back.findings[0].where == ("expert 0: \x00 \u2028",) and back.findings[0].detail == {"x": "nan"}
    assert "\n" not in to_line(_result(), "stamp")
    skipped = _result(gates={}, findings=(), skipped="takes no bias")
    assert from_line(to_line(skipped, "s"))[1] == skipped
    hung = _result(findings=(), hung=True)
    assert from_line(to_line(hung, "s"))[1] == hung


def _record(**changes: Any) -> bytes:
    """A line with other fields; a field that is changed to `...` is left out."""
    record = {**json.loads(to_line(_result(), "s")), **changes}
    return json.dumps({name: value for name, value in record.items() if value is not ...}).encode()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"", "damaged (line 2 is no JSON)"),
        (b'{"build": 1', "damaged (line 2 is no JSON)"),
        (b"null", "damaged (line 2 is no record)"),
        (b"[]", "damaged (line 2 is no record)"),
        (b"17", "damaged (line 2 is no record)"),
        (b"\xff\xfe", "damaged (line 2 is no JSON)"),
        (b"[" * 100_000, "damaged (line 2 is no JSON)"),
        (_record(device=...), "of another version of mxgate (line 2 has no 'device')"),
        (_record(build=["b"]), "of another version of mxgate (line 2 has a 'build' of another type)"),
        (_record(seconds=10**400), "of another version of mxgate (line 2 has 'seconds' that are no time)"),
        (_record(seconds=float("nan")), "of another version of mxgate (line 2 has 'seconds' that are no time)"),
        (_record(gates={"exact": "fine"}), "of another version of mxgate (line 2 has 'fine' of a gate 'exact')"),
        (_record(gates={"exact": ["pass"]}), "of another version of mxgate (line 2 has ['pass'] of a gate 'exact')"),
        (_record(gates={"x": "pass"}), "of another version of mxgate (line 2 has 'pass' of a gate 'x')"),
        (_record(gates={}), "of another version of mxgate (line 2 has no gate's outcome)"),
        (_record(findings=[[]]), "of another version of mxgate (line 2 has a finding that is no record)"),
        (_record(findings=[{"gate": "exact"}]), "of another version of mxgate (line 2 has no 'what' in a finding)"),
    ],
)
def test_hostile_lines_are_left_out_and_named(tmp_path: Path, line: bytes, said: str) -> None:
    good = to_line(_result(), "s").encode()
    (tmp_path / "results.jsonl").write_bytes(good + b"\n" + line + b"\n" + good.replace(b"wgrad/a", b"wgrad/c") + b"\n")
    results, strange = read_results(tmp_path / "results.jsonl")
    assert {key[2] for key in results} == {"wgrad/a", "wgrad/c"}
    where = tmp_path / "results.jsonl"
    assert strange == [f"{where}: 1 line is {said}; it is not counted, and stays in the file"]


def test_a_torn_line_is_cut_off_before_more_is_written(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    whole = to_line(_result(), "s").encode() + b"\n"
    for torn in range(0, len(whole), 37):
        path.write_bytes(whole + whole[:torn])
        journal = Journal(tmp_path)
        journal.append("s", _result("wgrad/new"))
        journal.close()
        results, strange = read_results(path)
        assert not strange and {key[2] for key in results} == {"wgrad/a", "wgrad/new"}
