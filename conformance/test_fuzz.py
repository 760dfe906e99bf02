"""The fuzz of the readers: a short one on every run of the tests, and that it sees what it is there to see.

Not caught in so few inputs: what takes a rare mutation. `python -m mxgate.conformance.fuzz` runs for ten minutes.
"""

from __future__ import annotations

import random
import resource
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mxgate.conformance import fuzz
from mxgate.fixtures import store
from mxgate.fixtures.store import StoreError

INPUTS = {"tensors": 1000, "machine code": 60}


def test_damaged_files_are_read_or_refused_in_one_line(tmp_path: Path) -> None:
    """A thousand files of tensors and some kernels, the same every time."""
    chosen = fuzz.targets(tmp_path)
    found = fuzz.fuzz(chosen, 0, tmp_path, lambda target, tallies: tallies[target.name].inputs < INPUTS[target.name])
    assert {name: tally.findings for name, tally in found.items()} == {name: {} for name in INPUTS}
    assert {name: tally.inputs for name, tally in found.items()} == INPUTS
    for name, least in (("tensors", 40), ("machine code", 15)):
        assert len(found[name].answers) >= least, (
            f"only {len(found[name].answers)} answers: the fuzz has lost its teeth"
        )
    assert any(answer.startswith("calls: [(") for answer in found["tensors"].answers)
    assert any(answer.startswith("run: ") for answer in found["machine code"].answers)
    assert not list(tmp_path.iterdir())


def test_what_is_not_damaged_is_read(tmp_path: Path) -> None:
    for target in fuzz.targets(tmp_path):
        for number, content in enumerate(dict.fromkeys(target.files)):
            path = tmp_path / f"{number}{target.suffix}"
            path.write_bytes(content)
            assert "no # in this kernel" not in target.read(path)


def test_the_same_seed_damages_alike() -> None:
    for mutations in (fuzz.TENSORS, fuzz.CODE):
        target = fuzz.Target("t", "", (b"\x02\0\0\0\0\0\0\0{} \n\tv_mov_b32 v0, v1\n", b""), mutations, lambda path: "")
        for number in range(300):
            tally = fuzz.Tally(inputs=number)
            assert fuzz.mutated(target, tally, 5) == fuzz.mutated(target, tally, 5)
    assert len({fuzz.mutated(target, tally, seed) for seed in range(20)}) > 5


def raises(path: Path) -> str:
    raise KeyError("shape")


def spins(path: Path) -> str:
    while True:
        pass


def allocates(path: Path) -> str:
    return str(np.ones(1 << 40, np.uint8).sum())  # beyond any limit, whatever the process has freed


def recurses(path: Path) -> str:
    return recurses(path)


def answers_in_two_lines(path: Path) -> str:
    return fuzz.refused(StoreError("a tensor is wrong\nin two lines"), path)


def answers_at_length(path: Path) -> str:
    return fuzz.refused(StoreError("x" * 600), path)


def says_nothing(path: Path) -> str:
    return fuzz.refused(StoreError(""), path)


def fails_in_c(path: Path) -> str:
    raise OverflowError


BAD: dict[Callable[[Path], str], str] = {
    raises: "KeyError at test_fuzz.py",
    spins: "SlowError",
    allocates: "MemoryError at test_fuzz.py",
    recurses: "RecursionError at test_fuzz.py",
    answers_in_two_lines: "WrongError at fuzz.py",
    answers_at_length: "WrongError at fuzz.py",
    says_nothing: "WrongError at fuzz.py",
    fails_in_c: "OverflowError at test_fuzz.py",
}


@pytest.mark.parametrize("read", BAD, ids=lambda read: read.__name__)
def test_what_a_reader_must_not_do_is_a_finding(
    read: Callable[[Path], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for each place, with the input kept; and the limits are gone afterwards."""
    if read is spins:  # a busy machine can take as long for the others
        monkeypatch.setattr(fuzz, "SECONDS", 0.2)
    before = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGPROF), signal.getsignal(signal.SIGALRM)
    heard: list[str] = []
    target = fuzz.Target("bad", ".bin", (b"something",), (fuzz.flip,), read)
    tally = fuzz.fuzz([target], 0, tmp_path, lambda _, tallies: tallies["bad"].inputs < 3, heard.append)["bad"]
    (place,) = tally.findings
    assert BAD[read] in place.replace("_ArrayMemoryError", "MemoryError") and len(heard) == 1
    (kept,) = tmp_path.iterdir()
    assert kept.name == "finding-bad-0.bin" and str(kept) in heard[0] and "\n" not in heard[0]
    assert kept.read_bytes() == fuzz.mutated(target, fuzz.Tally(), 0)
    after = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGPROF), signal.getsignal(signal.SIGALRM)
    assert before == after and signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def test_tensors_that_the_reference_parser_reads_otherwise_are_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "golden.safetensors"
    path.write_bytes(next(iter(fuzz.targets(tmp_path)[0].files)))
    assert fuzz.read_tensors(path).startswith("tensors; StoreError: holds no recorded calls")
    right = store.read
    monkeypatch.setattr(store, "read", lambda path: ({n: a + 1 for n, a in right(path)[0].items()}, {}))
    with pytest.raises(fuzz.WrongError, match="other tensors"):
        fuzz.read_tensors(path)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    some = {name: fuzz.Target(name, ".bin", (b"x",), (fuzz.flip,), read) for name, read in
            (("good", lambda path: "read"), ("bad", raises))}  # fmt: skip
    monkeypatch.setattr(fuzz, "targets", lambda folder: (some["bad"], some["good"]))
    assert fuzz.main(["--minutes", "0.002", "--seed", "3"]) == 1
    said = capsys.readouterr().out
    assert "bad: KeyError at test_fuzz.py" in said and "1 different answers, 1 findings" in said
    monkeypatch.setattr(fuzz, "targets", lambda folder: (some["good"],))
    for kept in tmp_path.iterdir():
        kept.unlink()
    assert fuzz.main(["--minutes", "0.002"]) == 0
    assert " read; 1 different answers, 0 findings" in capsys.readouterr().out


def test_mutations_of_random_bytes_never_fail() -> None:
    """A mutation meets what others left, however little that is."""
    rng = random.Random(1)
    for mutate in {*fuzz.TENSORS, *fuzz.CODE}:
        for _ in range(30):
            content = rng.randbytes(rng.choice((0, 1, 7, 8, 9, 60)))
            assert isinstance(mutate(content, rng), bytes)
