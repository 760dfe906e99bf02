"""The gates: each looks at the evidence of one build on one case and finds something, or nothing.

A gate is a pure function of Evidence. It gives a Finding (a rejection, or inconclusive where it could not run), None
where it is satisfied, or SILENT where the case is none of its business. Bits are compared as bits and numbers against
intervals, by the accepting condition negated: a NaN fails unless a NaN is what the case demands.

The sign of a zero: a sum of products that cancel is +0 when rounded to nearest, and so is a sum with one +0 in it,
whatever the order. Only where every product is a zero (magnitude 0) can a legitimate kernel that never adds an initial
+0 end in -0: there, and nowhere else, `exact` takes either sign. `empty`, and rows past the last offset that a build
promises to zero, are stores and not sums: all bits clear.

What no gate sees: a fault that needs other data, another shape or another machine than the cases have; a race that did
not show in the repeats; code that recognises the cases.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mxgate.conformance.case import EXACT, Case
from mxgate.conformance.data import is_large, variants
from mxgate.conformance.launch import FILL_FINITE, FILL_NAN, Array, Evidence, Launch, LaunchSpec
from mxgate.conformance.machine import cores
from mxgate.conformance.poison import COPIED
from mxgate.conformance.verdict import GATES, Finding, Outcome, worst
from mxgate.conformance.where import MOST, bits, extent, first_wrong, lines
from mxgate.kernels.build import Build
from mxgate.kernels.gpu import is_gpu
from mxgate.oracle import Answer, MXArray, dequantize
from mxgate.oracle.bound import outside, round_to
from mxgate.oracle.formats import E8M0, FORMATS, decode, scale_value
from mxgate.oracle.freivalds import freivalds

SILENT: Literal[Outcome.SILENT] = Outcome.SILENT
Result = Finding | Literal[Outcome.SILENT] | None
Bool = NDArray[np.bool_]

REPEATS = {"smoke": 3, "full": 6, "production": 3}
# In the full tier these cases of the control shape get 80 launches in the reused child and 5 in each of 5 fresh ones: a
# race that shows in 6 % of runs is missed by 105 launches once in 660.
MANY = (80, 5, 5)
# A GPU build whose programs could race for one output runs there a thousand times.
MANY_WGRAD_ON_GPU = (1000, 5, 5)
_MANY = (("ramp1.5", "normal"), ("shift32", "signature"), ("empties", "signature"), ("axis1", "normal"))
_CONTROL = ("64x96", "96x64")
# The longest sums in float32, where another order shows best: of each op the shape and the routing.
_LONGEST = (("16x1024", "ramp1.5"), ("1024x16", "ramp1.5"), ("32x48", "m64"))
# Of these cases of the control shape a launch is captured and replayed; the second for builds with long groups alone.
_CAPTURED = (
    ("ramp1.5", "exact-sum"),
    ("aligned256", "signature"),
    ("ramp1.5", "normal"),
    ("empties", "signature"),
    ("axis0", "normal"),
    ("axis1", "normal"),
)
# Routings, and a family, of cases for one narrow situation: the first launch shows it, and what more launches are for
# shows on other cases.
_BRIEF = ("crowd", "square", "long", "swapped", "edges16", "all-scales", "far-scales")
# Of a device, the models of its matrix core beside the usual one.
MODELS: Mapping[str, tuple[str, ...]] = MappingProxyType({"gfx950": ("cdna3-like",)})
# A case too large for an exact answer is judged on every core and in a GiB for each: one such case at a time.
_ONE_LARGE = threading.Lock()


# ---------------------------------------------------------------------------------------------------------------------
# The launches that the gates need


def plan(build: Build, case: Case, tier: str) -> tuple[LaunchSpec, ...]:
    """Every launch of `build` on `case`, the base launch first. tier: "smoke", "full" or "production".

    In every tier: each variant of the padding, other bytes in fresh memory, out= plain and pitched, repeats.
    On a case too large for an exact answer, and on some below the full tier, only what padding, contract and
    reproducible cannot do without. In the full tier a build with machine code is launched under every model of its
    matrix core, and is judged under each.
    """
    specs = _launches(build, case, tier)
    for model in MODELS.get(build.device, ()) if tier == "full" else ():
        chosen = [specs[0], *(s for s in specs if s.variant in (COPIED, "random") and s.process == 0)]
        chosen.append(LaunchSpec("repeat 1"))
        specs += tuple(replace(s, label=f"{model}, {s.label}", model=model) for s in chosen)
    return specs


def brief(case: Case, tier: str) -> bool:
    """Whether a case gets the fewest launches: one too large, or, below the full tier, of _BRIEF."""
    return is_large(case) or (tier != "full" and not {case.routing, case.family}.isdisjoint(_BRIEF))


def _launches(build: Build, case: Case, tier: str) -> tuple[LaunchSpec, ...]:
    """The launches under the usual model."""
    if brief(case, tier):
        copied = [name for name in variants(case) if name == COPIED]
        if copied and tier == "smoke":  # one launch less: what nobody wrote shows beside the copied operands' too
            return LaunchSpec("first"), LaunchSpec("repeat 1"), LaunchSpec(COPIED, variant=COPIED, fill=FILL_FINITE)
        return (
            LaunchSpec("first"),
            LaunchSpec("other memory", fill=FILL_FINITE),
            LaunchSpec("repeat 1"),
            *(LaunchSpec(COPIED, variant=name) for name in copied),
        )
    # Every launch of an emulated build is in another order anyway (a seed of its own), and each costs a while, as does
    # one that is interpreted, program after program.
    often = build.device == "cpu" or is_gpu(build.device)
    repeats, fresh, each = REPEATS[tier] if often else 1, 0, 0
    control = case.formats == ("e4m3fn", "e4m3fn") and case.shape in _CONTROL
    # On rounded data: where sums are exact no order of theirs shows. A process may choose another order for long ones.
    short = control and (case.routing == "axis1" or (case.routing, case.out_dtype) == ("ramp1.5", "bfloat16"))
    if case.family == "normal" and (short or (case.shape, case.routing) in _LONGEST):
        fresh, each = 1, 2
    if tier == "full" and control and case.out_dtype == "bfloat16" and (case.routing, case.family) in _MANY:
        repeats, fresh, each = MANY_WGRAD_ON_GPU if case.op == "wgrad" and is_gpu(build.device) else MANY
    poisons = [LaunchSpec(f"padding {name}", variant=name) for name in variants(case)[1:]]
    specs = [LaunchSpec("first"), *poisons, LaunchSpec("other memory", fill=FILL_FINITE)]
    if case.op != "quantize":
        specs += [
            LaunchSpec("out=", fill=FILL_FINITE, out="plain"),
            LaunchSpec("out= with a pitch", fill=FILL_NAN, out="pitched"),
        ]
    specs += [LaunchSpec(f"repeat {i + 1}") for i in range(repeats)]
    for process in range(1, fresh + 1):
        # The first call of a fresh process; then in another order than process 0.
        order = [LaunchSpec(f"process {process}, launch {i + 1}", process=process) for i in range(each)]
        last = [replace(s, label=f"process {process}, {s.label}", process=process) for s in reversed(poisons)]
        specs += order[:1] + last[:1] + order[1:]
    return tuple(specs)


def captures(build: Build) -> bool:
    """Whether the graph gate is mandatory for a build."""
    return is_gpu(build.device) and build.capturable


def may_speak(gate: str, case: Case, *, lineage: bool = False, captured: bool = False) -> bool:
    """Whether a gate can have anything to say about a case; where not it is SILENT, whatever the build does.

    lineage: of a build that replaces another. captured: of one whose launches are captured (captures)."""
    exactly = case.op == "quantize" or case.kind in EXACT
    said = {
        "padding": len(variants(case)) > 1,
        "exact": exactly,
        "bounded": not exactly,
        "empty": case.op != "quantize" and 0 in case.sizes,
        "special": case.kind == "special",
        "lineage": lineage,
        "graph": captured and case.shape in _CONTROL and (case.routing, case.family) in _CAPTURED,
    }
    return said.get(gate, True)


# ---------------------------------------------------------------------------------------------------------------------
# What an output should look like


def expected_outputs(case: Case, variant: str) -> tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]:
    """(shape, dtype) of each array a launch must return."""
    if case.op == "quantize":
        shape: tuple[int, ...] = (case.experts, case.n, case.k) if case.sizes else (case.n, case.k)
        axis = int(case.routing.removeprefix("axis"))
        scales = tuple(length // 32 if i == axis else length for i, length in enumerate(shape))
        return (shape, FORMATS[case.formats[0]].dtype), (scales, E8M0.dtype)
    rows = case.tokens if variant == COPIED else case.buffer
    shape = {"forward": (rows, case.n), "dgrad": (rows, case.k), "wgrad": (case.experts, case.n, case.k)}[case.op]
    return ((shape, np.dtype(getattr(ml_dtypes, case.out_dtype, case.out_dtype))),)


def mismatch(case: Case, launch: Launch) -> str | None:
    """What is wrong with the number, shape or dtype of the arrays, in words, or None."""
    expected = expected_outputs(case, launch.variant)
    if len(launch.output) != len(expected):
        return f"returned {len(launch.output)} arrays; expected {len(expected)}"
    for array, (shape, dtype) in zip(launch.output, expected, strict=True):
        if array.shape != shape or array.dtype != dtype:
            return f"returned {array.dtype} {list(array.shape)}; expected {dtype} {list(shape)}"
    return None


def usable(e: Evidence, launch: Launch) -> bool:
    """Whether the launch gave arrays of the right number, shapes and dtypes."""
    return launch.error is None and mismatch(e.case, launch) is None


def owned(case: Case, array: Array) -> Array:
    """The part of an output that belongs to tokens: of forward and dgrad the first rows, else all."""
    return array[: case.tokens] if case.op in ("forward", "dgrad") else array


def different(case: Case, one: Launch, other: Launch) -> tuple[Bool, ...]:
    """For each array, where the tokens' bits of two usable launches differ."""
    if one.digest == other.digest:
        return tuple(np.zeros(owned(case, a).shape, np.bool_) for a in one.output)
    pairs = zip(one.output, other.output, strict=True)
    return tuple(bits(owned(case, a)) != bits(owned(case, b)) for a, b in pairs)


def other_number(case: Case, one: Launch, other: Launch) -> tuple[Bool, ...]:
    """As different, but any NaN is like any other: for launches that differ in strides or lengths.

    Which NaN a conversion writes is nobody's promise, and libraries go by the path they take: torch's vectors write
    0xFFFF for a NaN in bfloat16, its loop over single elements, for the ends of rows and for strides, 0x7FC0.
    """
    masks = different(case, one, other)
    for mask, a, b in zip(masks, one.output, other.output, strict=True):
        places = np.nonzero(mask)  # few of very many
        x, y = (owned(case, array)[places].astype(np.float64) for array in (a, b))
        mask[places] = ~(np.isnan(x) & np.isnan(y))
    return masks


def _count(wrong: Sequence[Bool]) -> int:
    return int(sum(np.count_nonzero(mask) for mask in wrong))


def _found(
    gate: str,
    e: Evidence,
    what: str,
    launch: Launch,
    wrong: Sequence[Bool],
    want: Sequence[Array] | None = None,
    got: Sequence[Array] | None = None,
    against: str = "expected",
) -> Finding | None:
    """A Finding about elements of a launch, or None when `wrong` has none. what: a sentence with {count} in it.
    against: what `want` is, in the place of "expected"."""
    count = _count(wrong)
    if count == 0:
        return None
    total = sum(mask.size for mask in wrong)
    part = next(part for part, mask in enumerate(wrong) if mask.any())
    output = got or [owned(e.case, a) for a in launch.output]
    return Finding(
        gate=gate,
        what=what.format(count=f"{count} of {total} elements"),
        where=lines(e.case, wrong, output, want, against),
        count=count,
        detail={
            "launch": launch.label,
            "total": total,
            "first": [part, *first_wrong(wrong[part], 1)[0]],
            "extent": list(extent(e.case, wrong, output, want, against)),
        },
    )


def _unsure(gate: str, what: str) -> Finding:
    return Finding(gate, what, inconclusive=True)


def _base(gate: str, e: Evidence) -> Launch | Finding:
    """The base launch, or why there is nothing to judge."""
    if not e.launches:
        return _unsure(gate, "nothing was launched")
    if not usable(e, e.launches[0]):
        return _unsure(gate, f"launch {e.launches[0].label!r} gave no output that could be judged")
    return e.launches[0]


def _answer(e: Evidence) -> Answer:
    assert isinstance(e.answer, Answer)
    return e.answer


# ---------------------------------------------------------------------------------------------------------------------
# The gates


def contract(e: Evidence) -> Result:
    """No crash, hang or exception; shape and dtype; nothing but the output written, and all of it."""
    if why := next((launch.error for launch in e.launches if launch.unavailable), None):
        return _unsure("contract", why)
    for launch in e.launches:
        said = (
            launch.error,
            None if launch.error else mismatch(e.case, launch),
            launch.canaries,
            launch.inputs_changed and f"changed its inputs: {', '.join(launch.inputs_changed)}",
            launch.aliases and f"returned the memory of its input {launch.aliases}",
        )
        if problem := next(filter(None, said), None):
            return Finding("contract", f"{problem} (launch {launch.label!r})", detail={"launch": launch.label})
    base = _base("contract", e)
    if isinstance(base, Finding):
        return base
    missing = [spec.label for spec in e.plan if spec.label not in {launch.label for launch in e.launches}]
    if missing or not e.plan:
        return _unsure("contract", f"{len(missing)} launches never came back, the first {missing[:1]}")
    return _unwritten(e, base)


def _unwritten(e: Evidence, base: Launch) -> Finding | None:
    """Elements that depend on what memory held before, among those that do not change from run to run anyway."""
    same = [x for x in e.launches if x.variant == base.variant]
    stable = None
    for launch in same:
        if (launch.spec.fill, launch.spec.out) == (base.spec.fill, base.spec.out):
            equal = [~mask for mask in different(e.case, base, launch)]
            stable = equal if stable is None else [a & b for a, b in zip(stable, equal, strict=True)]
    assert stable is not None
    for launch in same:
        if (launch.spec.fill, launch.spec.out) != (base.spec.fill, base.spec.out):
            compare = different if launch.spec.out == base.spec.out else other_number
            wrong = [mask & calm for mask, calm in zip(compare(e.case, base, launch), stable, strict=True)]
            held, then = (f"0x{x.spec.fill:02x} in launch {x.label!r}" for x in (launch, base))
            if launch.spec.out == "none":
                what = f"{{count}} change with what memory held before: {held}, {then}"
            else:
                what = f"{{count}} change when out= is {launch.spec.out}: it held {held}"
            want = [owned(e.case, a) for a in base.output]
            if finding := _found("contract", e, what, launch, wrong, want, against=f"in launch {base.label!r}"):
                return finding
    return _tail(e, "contract")


def _tail(e: Evidence, gate: str) -> Finding | None:
    """Rows past the last offset (wgrad has none) against what the build promises of them."""
    for launch in e.launches if e.case.op in ("forward", "dgrad") else ():
        if e.build.tail == "undefined" or launch.variant == COPIED or not usable(e, launch):
            continue
        rows = launch.output[0][e.case.tokens :]
        if e.build.tail == "zero":
            want = np.zeros(rows.shape, rows.dtype)
        elif launch.spec.out != "none":
            want = np.full(rows.nbytes, launch.spec.fill, np.uint8).view(rows.dtype).reshape(rows.shape)
        else:
            continue  # a buffer of its own: nobody knows what was in it
        wrong = np.zeros(launch.output[0].shape, np.bool_)
        wrong[e.case.tokens :] = bits(rows) != bits(want)
        full = np.concatenate([owned(e.case, launch.output[0]), want])
        what = f"{{count}} past the last offset are not {e.build.tail} (launch {launch.label!r})"
        if finding := _found(gate, e, what, launch, [wrong], [full], list(launch.output)):
            return finding
    return None


def reproducible(e: Evidence) -> Result:
    """The same launch gives the same bytes: again, after others, in another process."""
    base = _base("reproducible", e)
    if isinstance(base, Finding):
        return base
    key = (base.variant, base.spec.fill, base.spec.out)
    same = [x for x in e.launches if (x.variant, x.spec.fill, x.spec.out) == key]
    asked = sum((spec.variant, spec.fill, spec.out) == key for spec in e.plan)
    bad = [x for x in same if usable(e, x) and _count(different(e.case, base, x))]
    if bad:
        want = [owned(e.case, a) for a in base.output]
        fresh = sum(x.spec.process != base.spec.process for x in bad)
        what = (
            f"{len(bad)} of {len(same)} equal launches ({fresh} in fresh processes) differ from the first; "
            f"in launch {bad[0].label!r} {{count}} do"
        )
        return _found("reproducible", e, what, bad[0], different(e.case, base, bad[0]), want, against="at first")
    if len(same) < 2 or len(same) < asked or not all(usable(e, x) for x in same):
        ran = sum(usable(e, x) for x in same)
        return _unsure("reproducible", f"{ran} of {max(asked, 2)} equal launches gave an output")
    return None


def padding(e: Evidence) -> Result:
    """No byte past the tokens matters: every poison gives the bytes of operands cut to their tokens."""
    names = variants(e.case)
    if len(names) == 1:
        return SILENT
    by_variant = {x.variant: x for x in reversed(e.launches) if usable(e, x)}
    # Too large a case has only these two; without tokens there is nothing to cut the operands to.
    names = tuple(name for name in names if name in {spec.variant for spec in e.plan})
    missing = [name for name in names if name not in by_variant]
    reference = by_variant.get(COPIED if COPIED in names else names[0])
    if reference is not None:
        against = "without it" if reference.variant == COPIED else f"with {reference.variant!r}"
        want = [owned(e.case, a) for a in reference.output]
        for name in names:
            if name not in by_variant:
                continue
            launch = by_variant[name]
            what = f"with {name!r} in the padding {{count}} are not what they are {against}"
            wrong = other_number(e.case, launch, reference)
            if finding := _found("padding", e, what, launch, wrong, want, against=against):
                return finding
    if missing or len(names) < 2:
        return _unsure("padding", f"no output with {', '.join(missing) or 'more than one variant of'} padding")
    return _tail(e, "padding")


def _spoilt(e: Evidence, out: Array) -> Bool:
    """Elements of `out` [E,N,K] that are not finite and may be so on the build's terms (Build.nan_reach): within that
    many tokens of the expert's own, a neighbour has a NaN or an infinity in the element's row of dY^T or of X^T."""
    allowed = np.zeros(out.shape, np.bool_)
    reach, given = e.build.nan_reach, e.operands
    if e.case.op != "wgrad" or reach == 0 or given.a is None or given.b is None:
        return allowed
    bad = [~np.isfinite(dequantize(operand, np.float64)) for operand in (given.a, given.b)]
    ends = np.cumsum(e.case.sizes)
    for g, (size, end) in enumerate(zip(e.case.sizes, ends, strict=True)):
        if size:
            near = np.zeros(given.a.shape[1], np.bool_)
            near[max(end - size - reach, 0) : min(end + reach, e.case.tokens)] = True
            near[end - size : end] = False
            rows, columns = (mask[:, near].any(axis=1) for mask in bad)
            allowed[g] = rows[:, None] | columns
    return allowed & ~np.isfinite(out.astype(np.float64))


def exact(e: Evidence) -> Result:
    """Bit for bit the one right answer, where the data leave no room for another; of a quantizer always."""
    if e.case.op != "quantize" and e.case.kind not in EXACT:
        return SILENT
    base = _base("exact", e)
    if isinstance(base, Finding):
        return base
    if isinstance(e.answer, MXArray):
        want: list[Array] = [e.answer.elements, e.answer.scales]
        wrong = [bits(a) != bits(b) for a, b in zip(base.output, want, strict=True)]
        what = f"{{count}} and scales are not those of profile {e.build.profile}"
        return _found("exact", e, what, base, wrong, want)
    if e.answer is None:
        return _freivalds("exact", e, base, "exact")
    value, magnitude = owned(e.case, e.answer.value), owned(e.case, e.answer.magnitude)
    out = owned(e.case, base.output[0])
    once = round_to(value, out.dtype)
    zero = (magnitude == 0) & (out.astype(np.float64) == 0)  # either sign: see the module's docstring
    right = np.where(np.isnan(value), np.isnan(out.astype(np.float64)), (bits(out) == bits(once)) | zero)
    right |= _spoilt(e, out)
    return _found("exact", e, "{count} are not the exact sum rounded once", base, [~right], [once])


def bounded(e: Evidence) -> Result:
    """Every element inside the interval that the build's accumulator may reach."""
    if e.case.op == "quantize" or e.case.kind in EXACT:
        return SILENT  # on exact data the exact gate says more
    base = _base("bounded", e)
    if isinstance(base, Finding):
        return base
    if e.answer is None:
        return _freivalds("bounded", e, base, e.build.accumulator)
    answer = _answer(e)
    lo, hi = (owned(e.case, end) for end in answer.interval(e.build.accumulator, base.output[0].dtype))
    out = owned(e.case, base.output[0])
    wrong = outside(out, lo, hi) & ~_spoilt(e, out)
    what = f"{{count}} are outside the interval of {e.build.accumulator}"
    want = round_to(owned(e.case, answer.value), out.dtype)
    return _found("bounded", e, what, base, [wrong], [want])


def empty(e: Evidence) -> Result:
    """An expert without tokens: its gradient is exactly +0 in every launch; elsewhere it must not harm its neighbours.

    forward and dgrad give an empty group no row. What goes wrong there shows in the groups on either side, and, when
    all are empty, in rows that nobody should have written.
    """
    groups = [g for g, size in enumerate(e.case.sizes) if size == 0]
    if e.case.op == "quantize" or not groups:
        return SILENT
    base = _base("empty", e)
    if isinstance(base, Finding):
        return base
    if e.case.op == "wgrad":
        for launch in {x.digest: x for x in reversed(e.launches) if usable(e, x)}.values():
            wrong = np.zeros(launch.output[0].shape, np.bool_)
            wrong[groups] = bits(launch.output[0][groups]) != 0
            zeros = np.zeros(launch.output[0].shape, launch.output[0].dtype)
            what = f"{{count}}, of experts without tokens, are not +0 (launch {launch.label!r})"
            if finding := _found("empty", e, what, launch, [wrong], [zeros]):
                return finding
        return None
    if e.answer is None:
        return SILENT  # no case is both large and has empty groups
    near = np.zeros(owned(e.case, base.output[0]).shape, np.bool_)
    ends = np.cumsum(e.case.sizes)
    filled = [g for g, size in enumerate(e.case.sizes) if size]
    for g in groups:
        before = max((f for f in filled if f < g), default=None)
        after = min((f for f in filled if f > g), default=None)
        for f in (before, after):
            if f is not None:
                near[ends[f] - e.case.sizes[f] : ends[f]] = True
    answer = _answer(e)
    lo, hi = (owned(e.case, end) for end in answer.interval(e.build.accumulator, base.output[0].dtype))
    out = owned(e.case, base.output[0])
    want = round_to(owned(e.case, answer.value), out.dtype)
    what = "{count}, in groups next to an empty one, are outside their interval"
    return _found("empty", e, what, base, [near & outside(out, lo, hi)], [want]) or _tail(e, "empty")


def special(e: Evidence) -> Result:
    """NaN exactly where it must be, infinities with their sign, and neither anywhere else."""
    if e.case.kind != "special":
        return SILENT
    base = _base("special", e)
    if isinstance(base, Finding):
        return base
    if isinstance(e.answer, MXArray):
        got, true = (decoded(e.case, *arrays) for arrays in (base.output, (e.answer.elements, e.answer.scales)))
        wrong = np.isnan(got) != np.isnan(true)
        what = "{count} are NaN and should not be, or should be and are not"
        return _found("special", e, what, base, [wrong], [e.answer.elements])
    if e.answer is None:
        return SILENT  # no case is both large and special
    value = owned(e.case, e.answer.value)
    out = owned(e.case, base.output[0])
    want = round_to(value, out.dtype)
    x, true = out.astype(np.float64), want.astype(np.float64)
    right = np.where(np.isnan(true), np.isnan(x), np.where(np.isinf(true), x == true, np.isfinite(x)))
    right |= _spoilt(e, out)
    return _found("special", e, "{count} are NaN or infinite in the wrong place", base, [~right], [want])


def lineage(e: Evidence) -> Result:
    """The bytes of the accepted build that this one replaces."""
    if e.build.replaces is None or not e.compared:
        return SILENT
    base = _base("lineage", e)
    if isinstance(base, Finding):
        return base
    if e.ancestor is None or not usable(e, e.ancestor):
        return _unsure("lineage", f"{e.build.replaces} gave no output that stands to compare with")
    want = [owned(e.case, a) for a in e.ancestor.output]
    what = f"{{count}} are not those of {e.build.replaces}"
    return _found("lineage", e, what, base, different(e.case, base, e.ancestor), want, against="there")


def graph(e: Evidence) -> Result:
    """A launch that is captured in a graph and replayed on other operands gives the bytes of a plain call on those.

    Other tokens and other offsets, or for quantize another array, are written over the operands that were captured;
    the bytes are also held to what is right. A launch that waits for the host, or that holds on to what it read from
    the offsets there, cannot do that."""
    if not may_speak("graph", e.case, captured=captures(e.build)):
        return SILENT
    if e.replayed is None:
        return _unsure("graph", "no launch was captured")
    other, (again, plain) = e.replayed, e.replayed.launches
    if again.unavailable or plain.unavailable:
        return _unsure("graph", str(again.error or plain.error))
    for launch in (plain, again):
        if problem := launch.error or mismatch(other.case, launch) or launch.canaries:
            return Finding("graph", f"launch {launch.label!r}: {problem}", detail={"launch": launch.label})
    want = [owned(other.case, a) for a in plain.output]
    what = "replayed with other offsets and tokens, {count} are not those of a plain call"
    if finding := _found("graph", other, what, again, different(other.case, again, plain), want) or _tail(
        other, "graph"
    ):
        return finding
    judged = (exact(other), bounded(other))
    return next((replace(found, gate="graph") for found in judged if isinstance(found, Finding)), None)


def decoded(case: Case, elements: Array, scales: Array) -> NDArray[np.float64]:
    """float64 values of a quantized array, its axis from the case."""
    axis = int(case.routing.removeprefix("axis"))
    spread = np.repeat(scale_value(scales.view(np.uint8)), 32, axis=axis)
    with np.errstate(invalid="ignore"):
        return decode(elements.view(np.uint8), case.formats[0]) * spread


def _freivalds(gate: str, e: Evidence, base: Launch, accumulator: str) -> Finding | None:
    """What a case too large for an exact answer has instead: random sums over the rows of the output, and suspicious
    elements computed exactly. On exact-sum data a row with a wrong element is missed once in 2^32 cases."""
    given = e.operands
    assert given.a is not None and given.b is not None and given.offsets is not None
    with _ONE_LARGE:
        result = freivalds(
            e.case.op,
            given.a,
            given.b,
            given.offsets,
            base.output[0],
            accumulator=accumulator,
            seed=e.case.seed ^ (1 << 63),  # not the data's
            exact=e.case.family == "exact-sum",
            threads=cores(),
        )
    if result.ok:
        return None
    lines = tuple(result.detail.splitlines())
    what = f"random sums find at least {len(lines)} elements that {accumulator} does not give"
    detail = {"launch": base.label, "first": [0, *(result.first_bad or ())]}
    return Finding(gate, what, lines[:MOST], len(lines), detail)


GATE_FUNCTIONS: Mapping[str, Callable[[Evidence], Result]] = MappingProxyType(
    {
        "contract": contract,
        "reproducible": reproducible,
        "padding": padding,
        "exact": exact,
        "bounded": bounded,
        "empty": empty,
        "special": special,
        "lineage": lineage,
        "graph": graph,
    }
)
assert tuple(GATE_FUNCTIONS) == GATES


def run_gates(e: Evidence) -> tuple[Mapping[str, Outcome], tuple[Finding, ...]]:
    """Every gate on the evidence: the outcome of each, and what was found. Launches under different models are judged
    apart, each by every gate, and the worst counts."""
    seen: dict[str, list[Outcome]] = {name: [] for name in GATE_FUNCTIONS}
    findings: list[Finding] = []
    for model in dict.fromkeys((None, *(spec.model for spec in e.plan))):
        part = e if len({spec.model for spec in e.plan}) < 2 else _under(e, model)
        for name, gate in GATE_FUNCTIONS.items():
            result = gate(part)
            if isinstance(result, Finding):
                findings.append(replace(result, what=f"under {model}, {result.what}") if model else result)
                seen[name].append(Outcome.INCONCLUSIVE if result.inconclusive else Outcome.REJECT)
            else:
                seen[name].append(Outcome.SILENT if result is SILENT else Outcome.PASS)
    return {name: worst(outcomes) for name, outcomes in seen.items()}, tuple(findings)


def _under(e: Evidence, model: str | None) -> Evidence:
    """The launches under one model. What a build replaces was launched under the usual one alone."""
    return replace(
        e,
        plan=tuple(spec for spec in e.plan if spec.model == model),
        launches=tuple(launch for launch in e.launches if launch.spec.model == model),
        compared=e.compared and model is None,
    )
