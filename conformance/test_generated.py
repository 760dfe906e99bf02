"""Generated problems through the whole runner, children and all: correct builds are accepted on every one, and wrong
ones are rejected by the gate they name wherever the problem gives them the chance.

Routings (empty experts, one expert, none with tokens, boundaries on and beside 32, buffers longer than their tokens),
shapes, formats, output types and families are drawn; the cases of the tiers vary one at a time. The draws are the same
on every run. Not caught: what takes more than a few hundred tokens or outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mxgate.conformance.case import Case
from mxgate.conformance.runner import Runner
from mxgate.conformance.settings import Settings
from mxgate.conformance.verdict import Outcome
from mxgate.kernels.build import Build, registry
from mxgate.kernels.faults import FAULTS

FORMATS = ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")
OUT = ("bfloat16", "float16", "float32")
FAMILIES = ("exact-sum", "signature", "special", "subnormal", "normal", "heavy-tailed", "cancellation")
# Rows or columns that are not contracted, and tokens of an expert where they are not: on and beside what is usual.
ODD = (1, 2, 7, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65)


def drawn(examples: int) -> settings:
    return settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )


def case(
    op: str, sizes: tuple[int, ...], slack: int, free: int, blocks: int, family: str, formats: Any, out_dtype: str
) -> Case:
    """A case whose id says all that was drawn. free: the dimension that is not contracted; blocks: of the other one
    (of wgrad's second output, in halves)."""
    n, k = {"forward": (free, 32 * blocks), "dgrad": (32 * blocks, free), "wgrad": (free, 16 * blocks)}[op]
    routing = f"drawn-{'-'.join(map(str, sizes))}+{slack}"
    return Case(op, f"{n}x{k}", routing, family, n, k, sizes, sum(sizes) + slack, formats, out_dtype)


def problems(
    op: str,
    size: st.SearchStrategy[int] | None = None,
    *,
    slack: st.SearchStrategy[int] | None = None,
    blocks: st.SearchStrategy[int] | None = None,
    free: st.SearchStrategy[int] | None = None,
    family: tuple[str, ...] = FAMILIES,
    groups: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda sizes: sizes,
) -> st.SearchStrategy[Case]:
    """Cases of an op. size: of a group, the others by default of every kind; groups: what becomes of the sizes."""
    unit = 32 if op == "wgrad" else 1
    if size is None:
        some = st.integers(1, 5).map(lambda b: 32 * b) if op == "wgrad" else st.sampled_from(ODD)
        size = st.one_of(st.just(0), some)
    return st.builds(
        case,
        st.just(op),
        st.lists(size, min_size=1, max_size=5).map(lambda sizes: groups(tuple(sizes))),
        st.sampled_from((0, 1, 3)).map(lambda s: s * unit) if slack is None else slack,
        st.sampled_from(ODD) if free is None else free,
        st.integers(1, 5) if blocks is None else blocks,
        st.sampled_from(family),
        st.tuples(st.sampled_from(FORMATS), st.sampled_from(FORMATS)),
        st.sampled_from(OUT),
    )


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    """One for all examples: a child for each build, which stays."""
    with Runner(Settings()) as runner:
        yield runner


def builds(op: str) -> list[Build]:
    """The correct builds of an op that this machine can run natively."""
    return [b for b in registry().values() if b.op == op and b.device == "cpu" and b.missing() is None]


def hold_correct_builds(runner: Runner, case: Case) -> None:
    for build in builds(case.op):
        result, evidence = runner.examine(build, case)
        assert result.skipped is None and evidence is not None, (build.id, case.id, result.skipped)
        assert result.outcome is Outcome.PASS and not result.findings, (build.id, case.id, result.findings)
        judged = {"exact", "bounded"} & {gate for gate, outcome in result.gates.items() if outcome is Outcome.PASS}
        assert judged, (build.id, case.id)


PLAIN = ("e4m3fn", "e4m3fn")


@drawn(30)
@given(problem=problems("forward"))
@example(problem=case("forward", (0, 0, 0), 3, 33, 2, "exact-sum", PLAIN, "bfloat16"))
@example(problem=case("forward", (32, 0, 1, 63, 64), 0, 17, 3, "signature", ("e5m2", "e4m3fn"), "float32"))
def test_correct_forward_builds_pass_on_any_problem(runner: Runner, problem: Case) -> None:
    hold_correct_builds(runner, problem)


@drawn(30)
@given(problem=problems("dgrad"))
@example(problem=case("dgrad", (1,), 0, 1, 1, "normal", PLAIN, "float16"))
@example(problem=case("dgrad", (0, 65, 0), 1, 65, 1, "special", ("e5m2fnuz", "e5m2"), "bfloat16"))
def test_correct_dgrad_builds_pass_on_any_problem(runner: Runner, problem: Case) -> None:
    hold_correct_builds(runner, problem)


@drawn(30)
@given(problem=problems("wgrad"))
@example(problem=case("wgrad", (0,), 32, 7, 1, "normal", PLAIN, "bfloat16"))
@example(problem=case("wgrad", (32, 160, 96, 0, 32), 0, 33, 3, "signature", ("e4m3fnuz", "e5m2fnuz"), "float16"))
def test_correct_wgrad_builds_pass_on_any_problem(runner: Runner, problem: Case) -> None:
    hold_correct_builds(runner, problem)


# ---------------------------------------------------------------------------------------------------------------------
# Wrong builds, each on problems that give it its chance

SIGNATURE = ("signature",)
ROWS, WIDE = st.sampled_from(ODD[3:]), st.sampled_from(ODD[4:])
TOKENS = st.integers(1, 4).map(lambda b: 32 * b)
MAYBE = st.one_of(st.just(0), TOKENS)


def an_empty_one_last(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """A group with tokens, then one without."""
    return (*sizes, 32, 0)


CHANCES: dict[str, st.SearchStrategy[Case]] = {
    # Another expert than the first has tokens.
    "forward/fault_previous_expert": problems("forward", ROWS, free=WIDE, family=SIGNATURE, groups=lambda s: (*s, 16)),
    # A second block to the contraction.
    "forward/fault_neighbours_scale": problems("forward", ROWS, free=WIDE, family=SIGNATURE, blocks=st.integers(2, 5)),
    # A buffer longer than its tokens.
    "forward/fault_tail_kept": problems("forward", slack=st.integers(1, 40)),
    "dgrad/fault_tail_kept": problems("dgrad", slack=st.integers(1, 40)),
    # Two rows to a group.
    "dgrad/fault_previous_rows_scale": problems("dgrad", ROWS, free=WIDE, family=SIGNATURE, blocks=st.integers(2, 5)),
    # A NaN among the elements, which is always in the second special row at the latest.
    "forward/fault_nan_dropped": problems("forward", ROWS, free=WIDE, family=("special",)),
    # A group of any size.
    "wgrad/fault_last_block_twice": problems("wgrad", TOKENS, free=WIDE, family=SIGNATURE),
    "wgrad/fault_starts_for_ends": problems("wgrad", TOKENS, free=WIDE, family=SIGNATURE),
    "wgrad/fault_one_ulp": problems("wgrad", TOKENS, free=WIDE, family=("exact-sum", "signature")),
    # An empty group; one after a full one.
    "wgrad/fault_minus_zero": problems("wgrad", MAYBE, groups=lambda sizes: (*sizes, 0)),
    "wgrad/fault_never_reset": problems("wgrad", MAYBE, free=WIDE, family=SIGNATURE, groups=an_empty_one_last),
}


@pytest.mark.parametrize("name", CHANCES)
def test_a_wrong_build_is_rejected_wherever_it_has_the_chance(runner: Runner, name: str) -> None:
    fault = next(f for f in FAULTS if f.build.id == name)

    @drawn(8)
    @given(problem=CHANCES[name])
    def rejected(problem: Case) -> None:
        result, _ = runner.examine(fault.build, problem)
        assert result.gates[fault.gate] is Outcome.REJECT, (problem.id, result.gates)

    rejected()
