"""Certificates and time: who is timed, and that a build whose output changes has no time.

Not covered: whether a number is a good one; builds for a GPU, which test_timing_gpu.py has.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mxgate.conformance import certificate, machine
from mxgate.conformance.conftest import FEW, Say

pytestmark = pytest.mark.usefixtures("few_are_all")


def test_time_takes_a_certificate(say: Say, accepted: Path) -> None:
    quick = ("--rounds", "2", "--seconds", "0.02")
    code, out, err = say("time", accepted, *quick)
    assert code == 0 and "wgrad/mine.wgrad" in out and "median ms" in out and err == ""
    code, out, _ = say("time", accepted, *quick, "--json", "--case", "wgrad/64x96/empties/signature@5")
    (timing,) = json.loads(out)["timings"]
    assert (
        code == 0 and 0 < timing["best"] <= timing["low"] <= timing["median"] <= timing["high"] and timing["calls"] >= 2
    )


def test_time_refuses(say: Say, accepted: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(said: str, *words: str) -> None:
        code, out, err = say("time", accepted, *words)
        assert code == 2 and out == "" and said in err and err.count("\n") == 1, err

    text = accepted.read_text()
    other = "wgrad/288x320/single/exact-sum"
    refused(f"was not accepted on the shape class of {other}; it covers shapes 64x96", "--case", other)
    refused("no case named", "--case", "wgrad/nope")
    with monkeypatch.context() as patch:
        patch.setattr(machine, "device", lambda: "cpu: another, x86_64")
        refused("was accepted on another device")
    with monkeypatch.context() as patch:
        patch.setattr(certificate, "code_version", lambda: "0")
        refused("was accepted by another version of the oracle or the gates")
    accepted.write_text(text.replace('"tier": "smoke"', '"tier": "full"'))
    refused("was changed after it was written")
    for broken in ("", "[" * 100_000):
        accepted.write_text(broken)
        refused("is not JSON")
    for broken in ("{}", "3", "null"):
        accepted.write_text(broken)
        refused("is no certificate of this version")
    accepted.write_text('{"certificate": "mxgate certificate 2"}')
    refused("was changed after it was written")
    accepted.write_text(text)
    before = source.read_text()
    source.write_text(before + "\n")
    refused("has changed since it was accepted (its source or options)")
    where = min(os.path.relpath(source), str(source), key=len)
    refused(f"run `mxgate run --op wgrad --build {where}:wgrad` again")
    source.unlink()
    refused("the source of wgrad/mine.wgrad is gone")
    source.write_text(before)
    assert say("time", accepted, "--rounds", "1", "--seconds", "0.01")[0] == 0


def test_no_number_for_an_output_that_changes(say: Say, tmp_path: Path, source: Path) -> None:
    """Accepted while a file is absent, wrong once it is there: the source is the same, the output is not."""
    trap = tmp_path / "trap"
    (tmp_path / "turncoat.py").write_text(
        f"import os, sys\nsys.path.insert(0, {str(source.parent)!r})\nimport mine\ncalls = 0\n"
        "def wgrad(*operands):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    out = mine.wgrad(*operands)\n"
        f"    if os.path.exists({str(trap)!r}) and calls > 5:\n"
        "        out.view('u2')[-1, 0, 0] ^= 1\n"
        "    return out\n"
    )
    assert say("run", "--build", "turncoat.py:wgrad", *FEW)[0] == 0
    trap.touch()
    code, out, _ = say("time", ".mxgate/certificates/wgrad-turncoat.wgrad.json", "--rounds", "1", "--seconds", "0.05")
    assert code == 1 and "no time for wgrad/turncoat.wgrad: its output changed while it was being timed" in out
    assert "median" not in out
