"""The mutants of the weight gradient's machine code, and their judge: a few of each kind here, hundreds by the command.

Not caught here: a kind of fault that no maker makes, and what the emulator has no model of, such as wait states between
a vector and a scalar instruction.
"""

from __future__ import annotations

import numpy as np
import pytest

from mxgate.kernels.flydsl import compile as isa
from mxgate.kernels.flydsl import mutants as m

TEXTS = {kernel: isa.committed(kernel) for kernel in m.KERNELS}


@pytest.fixture(autouse=True)
def committed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(m, "machine_code", isa.committed)


def changed(kernel: str, kind: str, before: str, after: str, nth: int = 0) -> m.Mutant:
    """The mutant that makes the nth line `before` into `after`."""
    lines = [" ".join(line.split(";")[0].split()) for line in TEXTS[kernel].splitlines()]
    places = [i for i, line in enumerate(lines) if line == before]
    return m.Mutant(kind, kernel, places[nth] + 1, before, after, TEXTS[kernel])


# ---------------------------------------------------------------- making


@pytest.mark.parametrize("kernel", m.KERNELS)
def test_a_mutant_differs_in_its_lines_alone(kernel: str) -> None:
    text = TEXTS[kernel]
    made = m.mutants(text, count=140)
    assert len(set(made)) == 140 and all(o.kernel == kernel for o in made)
    assert {o.kind for o in made} >= set(m.KINDS) - {"op_sel", "barrier"}
    old = text.splitlines()
    for mutant in made:
        new = mutant.text.splitlines()
        span = range(mutant.line - 1, mutant.line - 1 + len(mutant.before.splitlines()))
        assert len(new) == len(old) and mutant.before != mutant.after
        assert all(new[i] == old[i] for i in range(len(old)) if i not in span)


def test_mutants_are_those_of_their_seed() -> None:
    text = TEXTS["shipping"]
    assert m.mutants(text, count=20) == m.mutants(text, count=20) != m.mutants(text, count=20, seed=1)
    assert {o.kind for o in m.mutants(text, ("wait", "barrier"), 400)} == {"wait", "barrier"}
    with pytest.raises(ValueError, match="no kind of mutant 'typo'; expected some of op_sel"):
        m.mutants(text, ("typo",))


# ---------------------------------------------------------------- judging


def test_a_true_prepare_kernel_is_not_killed() -> None:
    assert not m.judge(changed("prepare", "wait", "s_endpgm", "s_endpgm")).killed


@pytest.mark.parametrize("case", m.CASES[:2], ids=lambda case: case.name)
def test_the_true_kernel_is_clean(case: m.Case) -> None:
    kernel = m._true("shipping")
    assert m._try("shipping", kernel, case, 5, np.zeros(len(kernel.instructions), np.int64)) == (None, "")


def test_what_cannot_be_parsed_or_does_not_end_is_killed() -> None:
    loop = next(line for line in TEXTS["prepare"].splitlines() if "s_cbranch_vccnz" in line).strip()
    assert m.judge(changed("prepare", "mask", loop, "s_cbranch_never .LBB0_3")).how == "parse error"
    assert m.judge(changed("prepare", "mask", loop, loop.replace("s_cbranch_vccnz", "s_branch"))).how == "crash"


@pytest.mark.parametrize("kind", m.KINDS)
def test_one_mutant_of_each_kind_is_killed(kind: str) -> None:
    (mutant,) = m.mutants(TEXTS["shipping"], (kind,), 1, seed=3)
    assert m.judge(mutant).killed


# ---------------------------------------------------------------- reasons


def test_reasons_hold_for_what_they_say_and_for_no_more() -> None:
    second, first = (changed("shipping", "mask", "s_cmp_ge_u32 s1, s33", "s_cmp_gt_u32 s1, s33", nth) for nth in (1, 0))
    assert "second correction" in str(m.reason(second)) and "made by the second" in str(m.reason(first))
    always = changed("shipping", "mask", "s_cselect_b32 s13, s13, s0", "s_mov_b32 s13, s13")
    assert m.reason(always) is None
    flags = "s_mov_b32 s27, 0x27000"
    assert m.reason(changed("prepare", "immediate", flags, "s_mov_b32 s27, 0x27100")) is not None
    assert m.reason(changed("prepare", "immediate", flags, "s_mov_b32 s27, 0xa7000")) is None


def test_a_report_counts_by_kind_and_lists_survivors() -> None:
    dead, alive = (changed("prepare", "mask", "s_endpgm", "s_nop 0") for _ in range(2))
    report = m.Report((m.Outcome(dead, "crash", "runs off its end"), m.Outcome(alive, None, "executed 3 times")))
    assert report.made["mask"] == 2 and report.killed["mask"] == 1 and len(report.unexplained) == 1
    assert "mask             1 of    2 killed" in str(report) and "UNEXPLAINED" in str(report)
