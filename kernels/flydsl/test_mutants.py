"""The mutants of the weight gradient's machine code, and their judge: a few of each kind here, hundreds by the command.

Not caught here: a kind of fault that no maker makes, and what the emulator has no model of, such as wait states between
a vector and a scalar instruction.
"""

from __future__ import annotations

from dataclasses import replace

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


EQUIVALENT = (
    ("shipping", "s_cselect_b32 s13, s28, 0", "s_mov_b32 s13, s28", "ranks are not taken"),
    ("shipping", "s_cmp_lt_i32 s13, 1", "s_cmp_le_i32 s13, 1", "single expert's rank"),
    ("shipping", "s_nop 11", "s_nop 0", "late enough by itself"),
    ("shipping", "s_load_dwordx8 s[4:11], s[0:1], 0x0", "s_load_dwordx8 s[4:11], s[0:1], 1", "low two bits"),
    ("shipping", "s_cmp_le_u32 s21, s33", "s_cmp_lt_u32 s21, s33", "all of it masked"),
    ("shipping", "s_cselect_b32 s12, 1, 0", "s_mov_b32 s12, 1", "all of it masked"),
    ("shipping", "s_mul_hi_u32 s5, s4, s26", "s_mul_hi_u32 s5, s4, s4", "below 2 GiB"),
    ("prepare", "v_cmp_gt_i32_e32 vcc, s23, v8", "v_cmp_ge_i32_e32 vcc, s23, v8", "no experts"),
    ("prepare", "v_bfrev_b32_e32 v7, 1", "v_bfrev_b32_e32 v7, 0x101", "past every buffer"),
    ("prepare", "s_cmp_lt_u32 s24, s21", "s_cmp_le_u32 s24, s21", "by its buffer's bound"),
    ("prepare", "v_cndmask_b32_e32 v0, v6, v0, vcc", "v_mov_b32_e32 v0, v0", "by its buffer's bound"),
    ("prepare", "v_mov_b32_e32 v4, 0", "v_mov_b32_e32 v4, 16", "with no expert only"),
    ("prepare", "s_add_i32 s2, s2, s1", "s_add_i32 s28, s2, s1", "needs no refinement"),
    ("prepare", "v_lshrrev_b32_e32 v2, 4, v1", "v_lshrrev_b32_e32 v2, 0x104, v1", "low five bits"),
    ("prepare", "s_lshr_b32 s6, s22, 5", "s_lshr_b32 s6, s22, 0x105", "low five bits"),
)
NOT_SHOWN = (
    ("shipping", "s_cselect_b32 s24, 2, 1", "s_mov_b32 s24, 2"),
    ("shipping", "s_load_dwordx8 s[4:11], s[0:1], 0x0", "s_load_dwordx8 s[4:11], s[0:1], 4"),
    ("shipping", "s_mul_hi_u32 s5, s4, s26", "s_mul_hi_u32 s5, s26, s26"),
    ("shipping", "s_mul_hi_u32 s12, s17, s13", "s_mul_hi_u32 s12, s17, s17"),
    ("prepare", "v_bfrev_b32_e32 v7, 1", "v_bfrev_b32_e32 v7, 2"),
    ("prepare", "s_cmp_lt_u32 s33, s0", "s_cmp_le_u32 s33, s0"),
    ("prepare", "s_mov_b32 s5, 0", "s_mov_b32 s7, 0"),
    ("prepare", "s_add_i32 s2, s2, s1", "s_add_i32 s1, s2, s1"),
    ("prepare", "s_lshr_b32 s6, s22, 5", "s_lshr_b32 s6, s22, 6"),
)


@pytest.mark.parametrize(("kernel", "before", "after", "why"), EQUIVALENT)
def test_what_is_shown_to_be_equivalent(kernel: str, before: str, after: str, why: str) -> None:
    """The prepare kernel's last two stand in two places each, of which the second is meant and the first is not."""
    twice = before in ("v_cndmask_b32_e32 v0, v6, v0, vcc", "v_mov_b32_e32 v4, 0")
    found = m.reason(changed(kernel, "mask", before, after, int(twice)))
    assert found is not None and why in found
    assert not twice or m.reason(changed(kernel, "mask", before, after)) is None


@pytest.mark.parametrize(("kernel", "before", "after"), NOT_SHOWN)
def test_what_is_like_it_and_is_not(kernel: str, before: str, after: str) -> None:
    assert m.reason(changed(kernel, "mask", before, after)) is None


def test_a_block_for_no_experts_is_one_that_the_count_of_experts_leads_to() -> None:
    """The same block behind a compare of another argument is not."""
    mutant = changed("prepare", "immediate", "v_mov_b32_e32 v4, 0", "v_mov_b32_e32 v4, 16", 1)
    other = mutant.original.replace("s_cmp_lt_i32 s23, 1", "s_cmp_lt_i32 s22, 1")
    assert other != mutant.original
    assert m.reason(replace(mutant, original=other)) is None


@pytest.mark.parametrize(
    ("before", "after", "how"),
    [
        ("s_lshl_b32 s2, s1, 10", "s_lshl_b32 s2, s1, 11", "descriptor"),
        ("s_mov_b32 s19, 0x27000", "s_mov_b32 s19, 0x27010", "descriptor"),
        ("s_mul_hi_u32 s5, s17, s6", "s_mul_hi_u32 s5, s14, s6", "wrong address"),
        ("v_cmp_ne_u32_e32 vcc, 0, v9", "v_cmp_ne_u32_e32 vcc, 0x100, v9", "wrong bytes"),
        ("s_add_i32 s2, s2, s1", "s_add_i32 s2, s2, s28", "wrong bytes"),
    ],
)
def test_what_bytes_of_small_cases_alone_do_not_show(before: str, after: str, how: str) -> None:
    assert m.judge(changed("prepare", "immediate", before, after)).how == how


def test_a_report_counts_by_kind_and_lists_survivors() -> None:
    dead, alive = (changed("prepare", "mask", "s_endpgm", "s_nop 0") for _ in range(2))
    report = m.Report((m.Outcome(dead, "crash", "runs off its end"), m.Outcome(alive, None, "executed 3 times")))
    assert report.made["mask"] == 2 and report.killed["mask"] == 1 and len(report.unexplained) == 1
    assert "mask             1 of    2 killed" in str(report) and "UNEXPLAINED" in str(report)


def test_equivalent_ones_are_counted_beside_the_others() -> None:
    dead, alive = (changed("prepare", "mask", "s_endpgm", "s_nop 0") for _ in range(2))
    report = m.Report((m.Outcome(dead, "crash", ""), m.Outcome(alive, None, "", "equivalent: for once")))
    assert "mask             1 of    1 killed, 1 more equivalent" in str(report) and not report.unexplained
    assert "1 of    1 killed, 100.0 %" in str(report) and "1 that nobody can kill" in str(report)
