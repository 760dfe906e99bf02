"""What a kernel build is, and where the builds of this project are listed.

A build is one callable that computes one op, together with everything a verdict depends on: the formats it
takes, the group alignment it needs, the accumulator it claims, what it leaves in rows past the last offset.
Its fingerprint hashes all of that and its source files, so a certificate dies with the code that earned it.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Protocol


@dataclass(frozen=True)
class Op:
    """One of the four computations (the numeric contract's section 4).

    operands: the positional arguments in order. padded: of those, the operands that may be longer than the tokens
    they hold, with the axis that is padded. output: the result's name.
    """

    name: str
    operands: tuple[str, ...]
    padded: Mapping[str, int]
    output: str


OPS: Mapping[str, Op] = MappingProxyType(
    {
        "forward": Op("forward", ("x", "x_scales", "w", "w_scales", "offsets"), {"x": 0, "x_scales": 0}, "y"),
        "dgrad": Op("dgrad", ("dy", "dy_scales", "w", "w_scales", "offsets"), {"dy": 0, "dy_scales": 0}, "dx"),
        "wgrad": Op(
            "wgrad",
            ("dy_t", "dy_scales", "x_t", "x_scales", "offsets"),
            {"dy_t": 1, "dy_scales": 1, "x_t": 1, "x_scales": 1},
            "dw",
        ),
        "quantize": Op("quantize", ("x", "axis"), {}, "elements"),
    }
)


BLOCK = 32  # tokens under one scale: what every wgrad group is a multiple of


class CaseLike(Protocol):
    """What a build needs to know of a case in order to decline it."""

    @property
    def op(self) -> str: ...
    @property
    def formats(self) -> tuple[str, str]: ...
    @property
    def out_dtype(self) -> str: ...
    @property
    def sizes(self) -> tuple[int, ...]: ...


class BuildError(ValueError):
    """A build that cannot be found or loaded; the message says which and what was expected."""


class Unavailable(RuntimeError):
    """A build cannot answer here, through no fault of its kernel; the message says what to do about it.

    A build raises it when called. It is then neither accepted nor rejected.
    """


@dataclass(frozen=True)
class Build:
    """One kernel build.

    target: "package.module:callable" or "path/to/file.py:callable".
    arrays: "numpy" (ml_dtypes carriers) or "torch": what the callable takes and returns.
    formats: element formats it accepts for either operand; out_dtypes: output types it can write.
    group_alignment: every group size must be a multiple of this many tokens.
    accumulator: the row of mxgate.oracle.ACCUMULATORS it claims.
    tail: what it does with rows past the last offset: "zero", "untouched" or "undefined" (wgrad has no such rows).
    nan_reach: tokens within which a NaN or infinity of a neighbouring group may spoil an expert's gradient; 0 for not
        at all. A wgrad kernel that masks its window by scales alone has the length of its window here.
    device: what runs it: "cpu", or the name of a GPU whose machine code is run on an emulator where there is no GPU.
    assumes: what a verdict takes for granted about that GPU, a sentence each; a certificate repeats it.
    requires: importable modules without which it is skipped. profile: what a quantize build follows.
    replaces: the id of the build whose bytes it must reproduce (the lineage gate).
    sources: further files in the fingerprint: module names, paths of .py files, or "package/file" for other files.
    options: compile options, in the fingerprint.
    """

    name: str
    op: str
    target: str
    arrays: str = "numpy"
    formats: tuple[str, ...] = ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")
    out_dtypes: tuple[str, ...] = ("bfloat16",)
    group_alignment: int = 1
    accumulator: str = "fp32-any-order"
    tail: str = "zero"
    nan_reach: int = 0
    device: str = "cpu"
    assumes: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    profile: str = "ocp"
    replaces: str | None = None
    sources: tuple[str, ...] = ()
    options: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for label, value, allowed in (
            ("op", self.op, tuple(OPS)),
            ("arrays", self.arrays, ("numpy", "torch")),
            ("tail", self.tail, ("zero", "untouched", "undefined")),
        ):
            if value not in allowed:
                raise BuildError(f"build {self.name!r}: {label} is {value!r}; expected one of {', '.join(allowed)}")

    @property
    def id(self) -> str:
        """The readable, unique name: "wgrad/numpy_windowed"."""
        return f"{self.op}/{self.name}"

    def terms(self) -> tuple[str, ...]:
        """Where this build asks for other terms than the contract's own, in words: an accept is on these terms."""
        asked = (
            (self.accumulator != "fp32-any-order", f"accumulator {self.accumulator}"),
            (self.tail != "zero", f"rows past the last offset are {self.tail}"),
            (self.nan_reach > 0, f"a NaN may spoil the gradient of experts within {self.nan_reach} tokens"),
            (self.group_alignment > (BLOCK if self.op == "wgrad" else 1), f"groups of {self.group_alignment} tokens"),
            (self.profile != "ocp", f"profile {self.profile}"),
        )
        return tuple(words for applies, words in asked if applies)

    def missing(self) -> str | None:
        """The first required module that is not installed, or None."""
        return next((m for m in self.requires if importlib.util.find_spec(m) is None), None)

    def declines(self, case: CaseLike) -> str | None:
        """Why this build does not take the case, in words, or None when it does."""
        if case.op != self.op:
            return f"computes {self.op}, not {case.op}"
        if (name := self.missing()) is not None:
            return f"needs {name}, which is not installed"
        for fmt in case.formats:
            if fmt not in self.formats:
                return f"does not take {fmt}"
        if self.op != "quantize" and case.out_dtype not in self.out_dtypes:
            return f"does not write {case.out_dtype}"
        if any(size % self.group_alignment for size in case.sizes):
            return f"needs group sizes in multiples of {self.group_alignment}"
        return None

    def load(self) -> Callable[..., Any]:
        """Import the callable. Raises BuildError when there is none."""
        where, _, attribute = self.target.rpartition(":")
        function = getattr(_import(where), attribute, None)
        if not callable(function):
            raise BuildError(f"build {self.id}: {where} has no callable named {attribute!r}")
        return function  # type: ignore[no-any-return]

    def fingerprint(self) -> str:
        """SHA-256 over the record, the bytes of its source files and the versions of what it runs on."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode())
        for path in (_source(self.target.rpartition(":")[0]), *map(_source, self.sources)):
            digest.update(path.read_bytes())
        for package in ("numpy", "ml_dtypes", *self.requires):
            digest.update(f"{package}={_version(package)};".encode())
        return digest.hexdigest()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _source(where: str) -> Path:
    """The source file of a module name or of a path, without running it."""
    if where.endswith(".py"):
        path = Path(where)
    else:
        module, _, inside = where.partition("/")
        try:
            spec = importlib.util.find_spec(module)
        except ModuleNotFoundError:  # a parent package is missing
            spec = None
        if spec is None or spec.origin is None:
            raise BuildError(f"no module named {module!r}")
        path = Path(spec.origin).parent / inside if inside else Path(spec.origin)
    if not path.is_file():
        raise BuildError(f"no file {str(path)!r}; a build is path/to/file.py:callable or package.module:callable")
    return path


def _import(where: str) -> ModuleType:
    if not where.endswith(".py"):
        try:
            return importlib.import_module(where)
        except ModuleNotFoundError as error:
            raise BuildError(f"cannot import {where!r}: {error}") from None
    path = _source(where).resolve()
    sys.path.insert(0, str(path.parent))  # an outside file may import its neighbours
    name = f"mxgate_outside_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def outside(op: str, target: str) -> Build:
    """A build from outside the project, with the contract's defaults. target as in Build. Raises BuildError."""
    where, colon, attribute = target.rpartition(":")
    if not colon or not where or not attribute.isidentifier():
        raise BuildError(
            f"{target!r} names no build: expected a registered name (see `mxgate list builds`), "
            "path/to/file.py:callable or package.module:callable"
        )
    source = _source(where)
    resolved = str(source.resolve()) if where.endswith(".py") else where
    return Build(
        name=f"{source.stem}.{attribute}",
        op=op,
        target=f"{resolved}:{attribute}",
        group_alignment=BLOCK if op == "wgrad" else 1,
    )


# The modules that define builds; each has a tuple BUILDS.
_MODULES = (
    "mxgate.kernels.numpy_reference",
    "mxgate.kernels.numpy_windowed",
    "mxgate.kernels.torch_cpu",
    "mxgate.kernels.flydsl.wgrad",
)


def registry() -> Mapping[str, Build]:
    """Every build of the project by id, in listing order. Listing needs none of the builds' requirements."""
    found: dict[str, Build] = {}
    for module in _MODULES:
        for build in importlib.import_module(module).BUILDS:
            if build.id in found:
                raise BuildError(f"two builds are named {build.id}")
            found[build.id] = build
    return MappingProxyType(found)


def find(op: str, name: str) -> Build:
    """The build a user means: a registered name, or an outside path:callable. Raises BuildError."""
    builds = registry()
    wanted = name if name in builds else f"{op}/{name}"
    if wanted in builds and builds[wanted].op == op:
        return builds[wanted]
    if ":" in name:
        return outside(op, name)
    known = ", ".join(b.name for b in builds.values() if b.op == op)
    raise BuildError(f"no build named {name!r} for {op}: known are {known}; or give path/to/file.py:callable")
