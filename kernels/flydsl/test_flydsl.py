"""The FlyDSL weight gradient: its machine code counted, run on the emulator, and held to the source it came from.

Not caught here: whatever silicon does otherwise than the emulator's rules (the matrix core's rounding above all), and
how long any of it takes.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mxgate.kernels import gfx950, numpy_reference
from mxgate.kernels.flydsl import compile as isa
from mxgate.kernels.flydsl import wgrad
from mxgate.kernels.numpy_windowed import TILE, longest_first, supertile
from mxgate.oracle.groups import spans

ROUTINGS = {
    "32-shifted": ((288, 32, 0, 352), 96, 160, 704),
    "128 tokens a row of scales": ((96, 416), 32, 48, 640),
    "empty": ((0, 64, 0, 0), 16, 16, 64),
    "tiles": ((64, 32), 272, 300, 128),
}


def call(rung: str, operands: list[Any], seed: int = 0, model: str = "exact-rne") -> tuple[Any, tuple[Any, ...]]:
    """dW as uint16 codes, and the results of the kernels."""
    dy_t, _, x_t, _, offsets = operands
    plan = wgrad.launch_plan(rung, dy_t.shape[0], x_t.shape[0], dy_t.shape[1], len(offsets))
    dw = np.full((len(offsets), dy_t.shape[0], plan.row_pitch), 0x7FC0, np.uint16)
    buffers = {**dict(zip(wgrad.OPERANDS, operands, strict=True)), "dw": dw}
    buffers.update((name, np.full(size, 0xFF, np.uint8)) for name, size in plan.scratch.items())
    return dw[:, :, : x_t.shape[0]], wgrad.emulate(plan, buffers, seed=seed, model=model)


# ---------------------------------------------------------------- answers


@pytest.mark.parametrize("rung", wgrad.RUNGS)
@pytest.mark.parametrize("name", ROUTINGS)
def test_exact_sums_are_exact(make: Any, rung: str, name: str) -> None:
    sizes, n, k, buffer = ROUTINGS[name]
    operands = make("wgrad", sizes, n, k, buffer)
    want = numpy_reference.wgrad(*operands).view(np.uint16)
    got = getattr(wgrad, rung)(*operands).view(np.uint16)
    assert np.array_equal(got, want)


@pytest.mark.parametrize("model", ["exact-rne", "cdna3-like"])
def test_the_rungs_agree_where_sums_round_and_neighbours_are_nan(make: Any, model: str) -> None:
    operands = make("wgrad", (96, 0, 256, 288), 40, 72, 768, whole=False)
    dy_t, _, x_t, x_scales, _ = operands
    dy_t.view(np.uint8)[3, 95] = 0x7F  # the last token of the first group
    x_t.view(np.uint8)[5, 352] = 0x7F  # the first of the last
    x_scales.view(np.uint8)[7, 10] = 0xFF
    answers = [call(rung, [a.copy() for a in operands], seed, model)[0] for seed, rung in enumerate(wgrad.RUNGS)]
    assert np.array_equal(answers[0], answers[1]) and np.array_equal(answers[1], answers[2])
    nan = (answers[0] & 0x7FFF) > 0x7F80
    want = np.zeros(nan.shape, bool)
    want[0, 3], want[3, :, 5], want[2, :, 7] = True, True, True
    assert np.array_equal(nan, want)


def test_the_padding_is_zeroed_and_no_token_is_touched(make: Any) -> None:
    """Padding long enough for every loop that clears it to run unrolled and have a rest."""
    operands = make("wgrad", (64, 96), 6, 5, 18624)
    before = [a.copy() for a in operands]
    call("shipping", operands)
    for now, old, end in zip(operands[:4], before[:4], (160, 5, 160, 5), strict=True):
        assert np.array_equal(now.view(np.uint8)[:, :end], old.view(np.uint8)[:, :end])
        assert not now.view(np.uint8)[:, end:].any()


def test_many_experts_are_each_computed_once(make: Any) -> None:
    """More experts than lanes: the order is the given one, and the search for a slot's expert takes two rounds."""
    operands = make("wgrad", tuple(32 * (e in (0, 62, 63, 64, 66)) for e in range(67)), 16, 16)
    want = numpy_reference.wgrad(*operands).view(np.uint16)
    assert np.array_equal(call("shipping", operands)[0], want)


@pytest.mark.parametrize("sizes", [(64, 768, 0, 544), (544, 32, 544)])
def test_blocks_take_the_longest_expert_first_and_walk_supertiles(make: Any, sizes: tuple[int, ...]) -> None:
    """The first blocks of the grid alone write the tiles that the model of the schedule gives to them."""
    n, k = 300, 600
    rows, columns = 2, 3
    operands = make("wgrad", sizes, n, k)
    groups = spans(operands[4])
    order = [
        (expert, *supertile(index, rows, columns))
        for expert in longest_first(groups, len(sizes) * rows * columns)
        for index in range(rows * columns)
    ]
    for blocks in (1, 7):
        tiles = written(operands, blocks)[:, ::TILE, ::TILE]
        assert set(map(tuple, np.argwhere(tiles))) == set(order[:blocks])


def test_from_1024_blocks_on_the_order_is_that_of_the_experts(make: Any) -> None:
    operands = make("wgrad", (32,) * 63 + (768,), 1024, 1024)
    assert np.argwhere(written(operands, 1)[:, ::TILE, ::TILE]).tolist() == [[0, 0, 0]]
    fewer = make("wgrad", (32,) * 62 + (768,), 1024, 1024)
    assert np.argwhere(written(fewer, 1)[:, ::TILE, ::TILE]).tolist() == [[62, 0, 0]]


def written(operands: list[Any], blocks: int) -> Any:
    """Which elements of dW the first blocks of the shipping rung's grid write."""
    dy_t, _, x_t, _, offsets = operands
    plan = wgrad.launch_plan("shipping", dy_t.shape[0], x_t.shape[0], dy_t.shape[1], len(offsets))
    plan = replace(plan, calls=(plan.calls[0], replace(plan.calls[1], blocks=blocks)))
    dw = np.full((len(offsets), dy_t.shape[0], plan.row_pitch), 0x7FC0, np.uint16)
    buffers = {**dict(zip(wgrad.OPERANDS, operands, strict=True)), "dw": dw}
    buffers.update((name, np.full(size, 0xFF, np.uint8)) for name, size in plan.scratch.items())
    wgrad.emulate(plan, buffers, hazards=False)
    return dw != 0x7FC0


# ---------------------------------------------------------------- plans


def test_slots_of_shuffled_scales_do_not_overlap() -> None:
    """The device's bodies() and slot rule, against every routing of four small groups."""
    sizes = (0, 32, 224, 256, 288, 544)
    for which in range(len(sizes) ** 4):
        group = [sizes[which // len(sizes) ** i % len(sizes)] for i in range(4)]
        taken: list[int] = []
        start = 0
        for expert, size in enumerate(group):
            first, end = start // 256, start + size
            count = max(-(-end // 256) - first, 2)
            taken += range(first + 2 * expert, first + 2 * expert + count)
            start = end
        assert len(set(taken)) == len(taken)
        assert max(taken) < -(-start // 256) + 2 * len(group)


def test_a_plan_says_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="expected one of simplest, plain, shipping"):
        wgrad.launch_plan("fastest", 64, 64, 64, 1)
    with pytest.raises(ValueError, match="48 tokens; expected a multiple of 32"):
        wgrad.launch_plan("plain", 64, 64, 48, 1)
    with pytest.raises(ValueError, match="256 rows of 8388608 tokens are 2147483648 bytes"):
        wgrad.launch_plan("plain", 64, 64, 1 << 23, 1)


def test_operands_that_do_not_fit_are_refused(make: Any) -> None:
    operands = make("wgrad", (64,), 16, 16)
    with pytest.raises(ValueError, match="x_scales is float8_e8m0fnu"):
        wgrad.plain(operands[0], operands[1], operands[2], operands[3][:, :1], operands[4])


def test_the_scale_loads_follow_the_row_stride() -> None:
    assert [wgrad.launch_plan("plain", 64, 64, m, 1).calls[0].kernel for m in (256, 384, 320)] == [
        "plain",
        "plain",
        "plain_bytes",
    ]


# ---------------------------------------------------------------- machine code


def main_loop(text: str) -> list[str]:
    """The instructions of the loop with matrix instructions in it."""
    lines = [line.split(";")[0].strip() for line in text.splitlines()]
    lines = [line for line in lines if line and (line.endswith(":") or not line.startswith("."))]
    found = []
    for at, line in enumerate(lines):
        jump = re.match(r"s_cbranch_\w+ (\.\w+)", line)
        if jump and (label := f"{jump[1]}:") in lines[:at]:
            body = [i for i in lines[lines.index(label) + 1 : at + 1] if not i.endswith(":")]
            if any("v_mfma" in i for i in body):
                found.append(body)
    (body,) = found
    return body


def figure(text: str, name: str) -> int:
    (value,) = re.findall(rf"\.{name}:\s+(\d+)", text)
    return int(value)


def test_the_shipping_rung_keeps_its_ledger() -> None:
    text = isa.committed("shipping")
    assert figure(text, "vgpr_count") <= 512 and figure(text, "agpr_count") == 256
    assert figure(text, "vgpr_spill_count") == figure(text, "sgpr_spill_count") == 0
    assert figure(text, "private_segment_fixed_size") == 0
    body = main_loop(text)
    count = Counter(i.split()[0] for i in body)
    loads = [i for i in body if i.startswith("buffer_load") and " lds" not in i]
    assert len(body) <= 300
    assert count["v_mfma_scale_f32_16x16x128_f8f6f4"] == 128 and count["ds_read_b128"] == 64
    assert len(loads) == 2 and all(i.startswith("buffer_load_dwordx4") for i in loads)
    assert not any(i.startswith(("v_accvgpr", "v_cmp", "v_readfirstlane", "ds_bpermute", "scratch")) for i in body)
    assert sum("branch" in i for i in body) == 1  # the way back


@pytest.mark.parametrize("kernel", ["plain", "plain_bytes", "shipping"])
def test_no_loop_drains_the_memory_pipeline(kernel: str) -> None:
    body = main_loop(isa.committed(kernel))
    waits = [int(n) for i in body for n in re.findall(r"vmcnt\((\d+)\)", i)]
    assert len(waits) == 2 and min(waits) == 16  # the copies of one step stay out
    text = isa.committed(kernel)
    assert figure(text, "vgpr_spill_count") == figure(text, "private_segment_fixed_size") == 0


@pytest.mark.parametrize("kernel", isa.KERNELS)
def test_wait_states_round_matrix_instructions(kernel: str) -> None:
    """In text order, loops twice: 12 from a result to another reader, 2 from a vector instruction to a reader."""
    parsed = gfx950.parse(isa.committed(kernel))
    instructions = [i.text for i in parsed.instructions]
    runs = [instructions]
    if kernel not in ("simplest", "prepare"):
        runs.append(main_loop(isa.committed(kernel)) * 2)
    short = [shortage for run in runs for shortage in shortages(run)]
    assert not short


def registers(operand: str) -> set[str]:
    """The vector and accumulation registers an operand names."""
    found = set(re.findall(r"\b[va]\d+\b", operand))
    for kind, first, last in re.findall(r"\b([va])\[(\d+):(\d+)\]", operand):
        found.update(f"{kind}{i}" for i in range(int(first), int(last) + 1))
    return found


def shortages(instructions: list[str]) -> list[str]:
    results: dict[str, int] = {}
    written: dict[str, int] = {}
    short, now = [], 0
    for text in instructions:
        name, _, rest = text.partition(" ")
        operands = re.split(r",\s*(?![^\[]*\])", rest)
        if name.startswith("v_mfma"):
            read = set().union(*(registers(o) for o in operands[1:]))
            short += [f"{text}: {r}" for r in read if now - written.get(r, -9) <= 2]
            short += [f"{text}: {r}" for r in read - registers(operands[3]) if now - results.get(r, -99) <= 12]
            for r in registers(operands[0]):
                results[r] = now
                written.pop(r, None)
        else:
            short += [f"{text}: {r}" for o in operands for r in registers(o) if now - results.get(r, -99) <= 12]
            if name.startswith("v_"):
                for r in registers(operands[0]):
                    written[r] = now
                    results.pop(r, None)
        now += int(rest, 0) + 1 if name == "s_nop" else 1
    return short


def test_the_lint_sees_a_shortage() -> None:
    mfma = "v_mfma_scale_f32_16x16x128_f8f6f4 a[0:3], v[0:7], v[8:15], a[0:3], v16, v17 op_sel_hi:[0,0,0]"
    assert shortages([mfma, "s_nop 10", "v_accvgpr_read_b32 v20, a3"])
    assert not shortages([mfma, "s_nop 11", "v_accvgpr_read_b32 v20, a3"])
    assert shortages(["v_mov_b32_e32 v16, 0", "s_nop 0", mfma])
    assert not shortages(["v_mov_b32_e32 v16, 0", "s_nop 1", mfma])
    assert not shortages([mfma, mfma])


# ---------------------------------------------------------------- source and copies


def test_the_committed_texts_are_of_this_source(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(isa.manifest()["texts"]) == set(isa.KERNELS)
    for kernel in isa.KERNELS:
        assert isa.committed(kernel)
    monkeypatch.setattr(isa, "source_hash", lambda: "0" * 64)
    with pytest.raises(isa.StaleError, match="run `make isa`"):
        isa.committed("shipping")


@pytest.mark.skipif(not isa.available(), reason="FlyDSL has no wheel for this platform or is not installed")
def test_compiling_gives_the_committed_texts() -> None:
    for kernel in isa.KERNELS:
        assert isa.difference(kernel, isa.compiled(kernel)) == ""


@pytest.mark.skipif(not isa.available(), reason="FlyDSL has no wheel for this platform or is not installed")
def test_a_new_routing_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher called again with other pointers, sizes and grid finds what it compiled.

    The last stage is left out, as there may be no linker: what is counted is how often it is reached.
    """
    for name, value in (("ARCH", isa.ARCH), ("FLYDSL_GPU_ARCH", isa.ARCH), ("COMPILE_ONLY", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("FLYDSL_RUNTIME_ENABLE_CACHE", "0")
    from flydsl._mlir import ir
    from flydsl.compiler.jit_function import MlirCompiler

    from mxgate.kernels.flydsl import device

    compiled: list[str] = []

    def counting(source: str, *, func_name: str, config: Any) -> Any:
        compiled.append(func_name)
        return ir.Module.parse(source)

    monkeypatch.setattr(MlirCompiler, "compile", staticmethod(counting))
    for m, experts in ((8192, 8), (4096, 3), (195840, 8)):
        for name in isa.KERNELS:
            width = len(isa.KERNELS[name])
            getattr(device, f"launch_{name}")(*[m + i for i in range(width - 1)], experts, experts * 48, 0)
    assert sorted(compiled) == sorted(f"launch_{name}" for name in isa.KERNELS)
