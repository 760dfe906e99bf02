"""results.jsonl: a result a line, written whole and synced before the next begins.

A run that is killed at any moment leaves at most one torn line, which the next run cuts off. Lines that are no results
of this version stay where they are, and are told of.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mxgate.conformance.verdict import GATES, CaseResult, Finding, Outcome

Key = tuple[str, str, str, str]  # build, fingerprint, case, stamp


def to_line(result: CaseResult, stamp: str) -> str:
    """A result as one line of JSON."""
    record = {
        "build": result.build,
        "fingerprint": result.fingerprint,
        "case": result.case,
        "stamp": stamp,
        "outcome": result.outcome.value,
        "gates": {gate: outcome.value for gate, outcome in result.gates.items()},
        "findings": [
            {
                "gate": f.gate,
                "what": f.what,
                "where": list(f.where),
                "count": int(f.count),
                "detail": f.detail,
                "inconclusive": f.inconclusive,
            }
            for f in result.findings
        ],
        "seconds": round(result.seconds, 4),
        "skipped": result.skipped,
        "device": result.device,
        "machine": result.machine,
        "hung": result.hung,
    }
    return json.dumps(_plain(record), allow_nan=False)


_Types = Mapping[str, tuple[type, ...]]
# What a record holds, and each of its findings: of which types.
_RECORD: _Types = {
    **dict.fromkeys(("build", "fingerprint", "case", "stamp", "device", "machine"), (str,)),
    "gates": (dict,),
    "findings": (list,),
    "seconds": (int, float),
    "skipped": (str, type(None)),
    "hung": (bool,),
}
_FINDING: _Types = {
    **dict.fromkeys(("gate", "what"), (str,)),
    "where": (list,),
    "count": (int,),
    "detail": (dict,),
    "inconclusive": (bool,),
}


class NoResultError(ValueError):
    """What a line is or has that no result has, as what follows "line 7": "has no 'device'".

    record: whether it is a whole record all the same, as of another version of mxgate.
    """

    def __init__(self, why: str, *, record: bool = True) -> None:
        super().__init__(why)
        self.record = record


def from_line(line: str | bytes) -> tuple[Key, CaseResult]:
    """The inverse of to_line. Raises NoResultError for anything that to_line does not write."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise NoResultError("is no JSON", record=False) from None
    _check(record, _RECORD)
    for f in record["findings"]:
        _check(f, _FINDING, " in a finding")
        if f["gate"] not in GATES:
            raise NoResultError(f"has a finding of a gate {f['gate']!r}")
        if not all(isinstance(text, str) for text in f["where"]):
            raise NoResultError("has a 'where' in a finding of another type")
    words = [outcome.value for outcome in Outcome]
    for gate, word in record["gates"].items():
        if gate not in GATES or word not in words:
            raise NoResultError(f"has {word!r} of a gate {gate!r}")
    if not record["gates"] and record["skipped"] is None:
        raise NoResultError("has no gate's outcome")
    if not 0 <= record["seconds"] < 1e9:
        raise NoResultError("has 'seconds' that are no time")
    build, fingerprint, case, stamp = (record[name] for name in ("build", "fingerprint", "case", "stamp"))
    outcomes = {gate: Outcome(word) for gate, word in record["gates"].items()}
    findings = tuple(
        Finding(f["gate"], f["what"], tuple(f["where"]), f["count"], f["detail"], f["inconclusive"])
        for f in record["findings"]
    )
    rest = (record[name] for name in ("skipped", "device", "machine", "hung"))
    result = CaseResult(build, fingerprint, case, outcomes, findings, float(record["seconds"]), *rest)
    return (build, fingerprint, case, stamp), result


def _check(record: Any, fields: _Types, where: str = "") -> None:
    if not isinstance(record, dict):
        raise NoResultError("has a finding that is no record" if where else "is no record", record=bool(where))
    for name, types in fields.items():
        if name not in record:
            raise NoResultError(f"has no {name!r}{where}")
        if not isinstance(record[name], types):
            raise NoResultError(f"has a {name!r}{where} of another type")


def _plain(value: Any) -> Any:
    """JSON types only: NumPy scalars as Python's, NaN and infinity as words."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


class Journal:
    """results.jsonl of one directory, open for appending; several runs (shards) may share it.

    Opening cuts off a torn last line. earlier: the results in it, the last one of each key. strange: what to say of
    lines that are not results (read_results); such lines are left alone.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "results.jsonl"
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._lock = threading.Lock()
        with self._alone():
            text = _bytes(self.path)
            if (whole := text.rfind(b"\n") + 1) < len(text):
                os.ftruncate(self._file, whole)
        self.earlier, self.strange = read_results(self.path)

    def append(self, stamp: str, *results: CaseResult) -> None:
        lines = b"".join(to_line(result, stamp).encode() + b"\n" for result in results)
        with self._lock, self._alone():
            view = memoryview(lines)
            while view:
                view = view[os.write(self._file, view) :]
            os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)


def _bytes(path: Path) -> bytes:
    """What is in a file. An OSError of reading, unlike one of opening, would not say which."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def read_results(path: Path) -> tuple[dict[Key, CaseResult], list[str]]:
    """The results in a JSONL file by key, and what to say of lines that are none (a torn last one aside): one message
    for whole records, which another version of mxgate wrote, and one for lines that are damaged."""
    results: dict[Key, CaseResult] = {}
    others: dict[bool, list[str]] = {True: [], False: []}
    lines = _bytes(path).split(b"\n")
    for number, line in enumerate(lines[:-1], 1):
        try:
            key, result = from_line(line)
        except NoResultError as error:
            others[error.record].append(f"line {number} {str(error)[:120]}")
        else:
            results[key] = result
    what = {True: "of another version of mxgate", False: "damaged"}
    return results, [_left_out(path, what[whole], found) for whole, found in others.items() if found]


def _left_out(path: Path, what: str, lines: Sequence[str]) -> str:
    count, first = len(lines), lines[0]
    if count == 1:
        return f"{path}: 1 line is {what} ({first}); it is not counted, and stays in the file"
    return f"{path}: {count} lines are {what} ({first}); they are not counted, and stay in the file"
