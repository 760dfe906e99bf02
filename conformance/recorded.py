"""Recorded grouped GEMM calls as cases: the files of mxgate.capture, and what `mxgate minimize` writes.

A call that was recorded in high precision is quantized here by the OCP profile, one in MXFP8 is taken byte for byte.
What was cut out of an exact family is still exact, and is held to that. Groups of a recorded wgrad that are no multiple
of 32 tokens are filled up with zeros, as a trainer in MXFP8 would.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxgate.conformance.case import EXACT, Case
from mxgate.fixtures import store
from mxgate.fixtures.store import StoreError, show
from mxgate.kernels.build import OPS
from mxgate.oracle.formats import BLOCK, E8M0, FORMATS
from mxgate.oracle.groups import check_offsets
from mxgate.oracle.quantize import quantize

Planes = tuple[NDArray[np.uint8], NDArray[np.uint8]]
_HIGH = ("bfloat16", "float16", "float32")
_NAME = re.compile(r"[\w.+-]{1,80}", re.ASCII)  # of a call: it is part of the case's id
# Elements of a result: twice a whole 671B layer's. Operands without tokens may have any width, and cost a file nothing.
MOST = 1 << 31
_FORMAT_OF = {row.dtype: name for name, row in FORMATS.items() if row.bits == 8}


def cases(path: Path) -> tuple[Case, ...]:
    """The calls of a file as cases, in its order. StoreError for a file that holds none, or a call that is not one."""
    _, calls = _read(path)
    return tuple(_case(path, name, *call) for name, call in calls.items())


def save(path: Path, name: str, of: Case, operands: Mapping[str, NDArray[Any]]) -> None:
    """Write one call in MXFP8, cut out of a case; operands by the names of the op's signature."""
    notes = {"calls": json.dumps({name: {"op": of.op, "out_dtype": of.out_dtype, "family": of.kind}})}
    store.save(path, {f"{name}.{key}": value for key, value in operands.items()}, notes)


def planes(case: Case) -> tuple[Planes, Planes]:
    """The planes of A and B of a recorded case, (element codes, scale codes) [rows, contraction], whole buffers."""
    given = _call(Path(case.source), case.shape, case.op)
    both = []
    for axis, name in zip(OPS[case.op].contraction, _operands(case.op)[::2], strict=True):
        x = given[name]
        scales = given.get(_scales_of(case.op, name))
        if scales is None:
            mx = quantize(_rows(x, axis), axis=1, format="e4m3fn")
            both.append((mx.codes(), mx.scale_codes()))
        else:
            both.append((_rows(x, axis).view(np.uint8), _rows(scales, axis).view(np.uint8)))
    return both[0], both[1]


def _rows(x: NDArray[Any], axis: int) -> NDArray[Any]:
    """A matrix whose rows run along the axis."""
    moved = np.ascontiguousarray(np.moveaxis(x, axis, -1))
    return moved.reshape(math.prod(moved.shape[:-1]), moved.shape[-1])


def _operands(op: str) -> tuple[str, ...]:
    return OPS[op].operands[:4]


def _scales_of(op: str, name: str) -> str:
    names = _operands(op)
    return names[names.index(name) + 1]


@lru_cache(maxsize=2)
def _read_as(path: Path, stamp: tuple[int, int]) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    return store.read(path)


def _read(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, tuple[str, str, str]]]:
    """(tensors, each call's op, output type and family). `stamp` makes a file that was written again be read again."""
    try:
        stat = path.stat()
    except OSError as error:
        raise StoreError(f"{path}: cannot read: {error.strerror or error}") from None
    tensors, notes = _read_as(path, (stat.st_mtime_ns, stat.st_size))
    try:
        listed = json.loads(notes["calls"]).items()
        calls = {
            name: (str(call["op"]), str(call.get("out_dtype", "bfloat16")), str(call.get("family", "recorded")))
            for name, call in listed
        }
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        raise StoreError(f"{path}: holds no recorded calls; expected a file of mxgate.capture") from None
    if not calls:
        raise StoreError(f"{path}: holds no recorded calls; expected at least one")
    return tensors, calls


def _call(path: Path, name: str, op: str) -> dict[str, NDArray[Any]]:
    """The operands of a call, checked, the groups of a wgrad in whole blocks."""
    at = f"{path}: {name}"
    tensors, _ = _read(path)
    found = {key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.startswith(f"{name}.")}
    names = _operands(op)
    wanted = ({*names[::2], "offsets"}, {*names, "offsets"})
    if set(found) not in wanted:
        held = ", ".join(sorted(found)) or "nothing"
        raise StoreError(f"{at}: holds {show(held)}; expected {', '.join(names)} and offsets")
    ranks = (2, 3) if op != "wgrad" else (2, 2)
    for operand, rank in zip(names[::2], ranks, strict=True):
        x = found[operand]
        high = x.dtype.name in _HIGH
        if x.ndim != rank or not (high if set(found) == wanted[0] else x.dtype in _FORMAT_OF):
            kinds = ", ".join(_HIGH) if set(found) == wanted[0] else "FP8"
            raise StoreError(f"{at}: {operand} is {x.dtype} {x.shape}; expected {kinds} with {rank} axes")
    a, b = (found[n] for n in names[::2])
    axis_a, axis_b = OPS[op].contraction
    if a.shape[axis_a] != b.shape[axis_b]:
        lengths = f"{a.shape[axis_a]} long in {names[0]} and {b.shape[axis_b]} in {names[2]}"
        raise StoreError(f"{at}: the contraction is {lengths}; expected the same length")
    length = a.shape[1] if op == "wgrad" else a.shape[0]
    try:
        check_offsets(found["offsets"], length, experts=None if op == "wgrad" else b.shape[0])
    except (TypeError, ValueError) as error:
        raise StoreError(f"{at}: {error}") from None
    if op == "wgrad" and set(found) == wanted[0]:
        found = _whole_blocks(found)
    elif op != "wgrad" and a.shape[1] % BLOCK:
        raise StoreError(f"{at}: the contraction is {a.shape[1]} long; expected a multiple of {BLOCK}")
    if set(found) == wanted[1]:
        for operand, axis in zip(names[::2], OPS[op].contraction, strict=True):
            x, scales = found[operand], found[_scales_of(op, operand)]
            shape = tuple(size // BLOCK if i == axis else size for i, size in enumerate(x.shape))
            if scales.dtype != E8M0.dtype or scales.shape != shape or x.shape[axis] % BLOCK:
                name_of = _scales_of(op, operand)
                raise StoreError(f"{at}: {name_of} is {scales.dtype} {scales.shape}; expected {E8M0.dtype} {shape}")
        if op == "wgrad" and (found["offsets"] % BLOCK).any():
            raise StoreError(f"{at}: offsets {found['offsets'].tolist()[:8]}; expected multiples of {BLOCK}")
    return found


def _whole_blocks(found: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Every group, and the rest of the buffer, filled up to a multiple of 32 tokens: groups with zeros, the rest with
    its own last token."""
    ends = found["offsets"].astype(np.int64)
    starts = np.concatenate([[0], ends[:-1]])
    out: dict[str, NDArray[Any]] = {}
    for name in ("dy_t", "x_t"):
        x = found[name]
        parts = []
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            parts += [x[:, start:end], np.zeros((x.shape[0], -(end - start) % BLOCK), x.dtype)]
        rest = x[:, int(ends[-1]) :]
        parts.append(rest)
        if more := -rest.shape[1] % BLOCK:
            parts.append(np.repeat(rest[:, -1:], more, axis=1))
        out[name] = np.concatenate(parts, axis=1)
    sizes = -(-(ends - starts) // BLOCK) * BLOCK
    out["offsets"] = np.cumsum(sizes).astype(np.int32)
    return out


def _case(path: Path, name: str, op: str, out_dtype: str, family: str) -> Case:
    if not _NAME.fullmatch(name):
        raise StoreError(f"{path}: a call is named {show(name)}; expected up to 80 of letters, digits, ., +, - and _")
    families = ("recorded", *EXACT)
    for what, value, known in (
        ("op", op, tuple(name for name in OPS if OPS[name].contraction)),
        ("output type", out_dtype, _HIGH),
        ("family", family, families),
    ):
        if value not in known:
            raise StoreError(f"{path}: {name}: no {what} named {show(value)}; expected one of {', '.join(known)}")
    given = _call(path, name, op)
    a, b = (given[n] for n in _operands(op)[::2])
    sizes = tuple(np.diff(given["offsets"], prepend=0).tolist())
    n, k = (a.shape[0], b.shape[0]) if op == "wgrad" else (b.shape[1], b.shape[2])
    result = {"forward": (a.shape[0], n), "dgrad": (a.shape[0], k), "wgrad": (len(sizes), n, k)}[op]
    if math.prod(result) > MOST:
        raise StoreError(f"{path}: {name}: its result has shape {result}; expected at most {MOST} elements")
    formats = tuple(_FORMAT_OF.get(x.dtype, "e4m3fn") for x in (a, b))
    # The bytes are part of the name: results of another recording under the same name are not this one's.
    held = "".join(store.digest(given[key]) for key in sorted(given))
    content = hashlib.sha256(held.encode()).hexdigest()[:8]
    buffer = a.shape[1] if op == "wgrad" else a.shape[0]
    routing, both = f"{path.stem}-{content}", (formats[0], formats[1])
    family = family if family == "recorded" else f"recorded-{family}"
    return Case(op, name, routing, family, n, k, sizes, buffer, both, out_dtype, source=str(path))
