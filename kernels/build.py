"""What a kernel build is, and where the builds of this project are listed.

A build is one callable that computes one op, together with everything a verdict depends on: the formats it
takes, the group alignment it needs, the accumulator it claims, what it leaves in rows past the last offset.
Its fingerprint hashes all of that and its source files, so a certificate dies with the code that earned it.
"""

from __future__ import annotations

import ast
import ctypes
import hashlib
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Protocol

from mxgate.kernels.gpu import gpu, is_gpu, lacks


@dataclass(frozen=True)
class Op:
    """One of the four computations (the numeric contract's section 4).

    operands: the positional arguments in order. contraction: the axis that is summed over, and that scale blocks lie
    along, of A (the first of them) and of B (the third). padded: the operands that may be longer than the tokens they
    hold, with the axis that is padded. output: the result's name.
    """

    name: str
    operands: tuple[str, ...]
    contraction: tuple[int, ...]
    padded: Mapping[str, int]
    output: str


OPS: Mapping[str, Op] = MappingProxyType(
    {
        "forward": Op("forward", ("x", "x_scales", "w", "w_scales", "offsets"), (1, 2), {"x": 0, "x_scales": 0}, "y"),
        "dgrad": Op("dgrad", ("dy", "dy_scales", "w", "w_scales", "offsets"), (1, 1), {"dy": 0, "dy_scales": 0}, "dx"),
        "wgrad": Op(
            "wgrad",
            ("dy_t", "dy_scales", "x_t", "x_scales", "offsets"),
            (1, 1),
            {"dy_t": 1, "dy_scales": 1, "x_t": 1, "x_scales": 1},
            "dw",
        ),
        "quantize": Op("quantize", ("x", "axis"), (), {}, "elements"),
    }
)
GEMMS = tuple(op.name for op in OPS.values() if op.contraction)


BLOCK = 32  # elements under one scale: what every contraction, and every wgrad group, is a multiple of
HIP = "libamdhip64.so.7"  # the runtime of AMD's GPUs
EMULATE = "MXGATE_EMULATE"  # in the environment: 1 keeps emulated builds off a GPU that is there
TERMS = "mxgate.toml"  # beside an outside build: what it says of itself (mxgate.kernels.declared)


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
    capturable: whether a launch on a GPU can be captured in a graph and replayed with other operands in its buffers.
        One that cannot has to say so here, and its accept repeats it.
    device: what runs it: "cpu"; "cuda", the GPU that torch calls so ("sm100": NVIDIA's from compute capability 10.0
        on); "interpreter", Triton's on a CPU; or the name of a GPU whose machine code is run on an emulator.
    assumes: what a verdict takes for granted about that GPU, a sentence each; a certificate repeats it.
    scale_layout: where scales lie: "plain" (row-major), "blocked-128x4" (mxgate.oracle.layouts; of weights each
        expert's plane), "blocked-128x4-groups" (each group's plane as well), or file.py:function or
        package.module:function, called as function(scales, name, offsets) for what the build takes in their place.
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
    capturable: bool = True
    device: str = "cpu"
    assumes: tuple[str, ...] = ()
    scale_layout: str = "plain"
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
        if self.op == "quantize" and self.scale_layout not in ("plain", "blocked-128x4"):
            raise BuildError(
                f"build {self.name!r}: scale_layout is {self.scale_layout!r}; expected plain or blocked-128x4"
            )
        for label, number, least in (("group_alignment", self.group_alignment, 1), ("nan_reach", self.nan_reach, 0)):
            if not isinstance(number, int) or number < least:
                raise BuildError(f"build {self.name!r}: {label} is {number!r}; expected a whole number from {least} up")

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
            (not self.capturable, "a launch cannot be captured in a graph"),
            (self.scale_layout != "plain", f"scales laid out as {self.scale_layout}"),
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
        if (lacking := lacks(self.device)) is not None:
            return lacking
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
        try:
            return load_target(self.target)
        except BuildError as error:
            raise BuildError(f"build {self.id}: {error}") from None

    def fingerprint(self) -> str:
        """SHA-256 over the record, its source files, what it runs on (versions, the GPU) and the build it replaces.

        For a build from outside the project its source files include mxgate.toml and what it imports from beside
        itself, as far as import statements tell; the same goes for a function that lays out its scales. Raises
        BuildError when a source is not there.
        """
        on = f"{gpu()};" if is_gpu(self.device) else ""
        return hashlib.sha256(f"{on}{self.identity()}".encode()).hexdigest()

    def identity(self) -> str:
        """The fingerprint less the GPU: the same on all machines with the same files and packages."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode())
        places = [t.rpartition(":")[0] for t in (self.target, self.scale_layout) if ":" in t]
        files = {name: _source(name) for name in (*places, *self.sources)}
        for i, where in enumerate(places):
            files |= {f"{'layout:' * i}{name}": path for name, path in _neighbours(where).items()}
        for name, path in sorted(files.items()):
            content = path.read_bytes()
            digest.update(f"{name}\0{len(content)}\0".encode(errors="surrogateescape") + content)
        for package in ("numpy", "ml_dtypes", *self.requires):
            digest.update(f"{package}={version(package)};".encode())
        if self.replaces is not None and (ancestor := registry().get(self.replaces)) is not None:
            digest.update(ancestor.identity().encode())
        return digest.hexdigest()


def hip() -> bool:
    """Whether HIP is here. Without it a launch of FlyDSL's aborts the process."""
    try:
        ctypes.CDLL(HIP)
    except OSError:
        return False
    return True


def version(package: str) -> str:
    """The installed version of a package, "none" where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _source(where: str) -> Path:
    """The source file of a module name, of "package.module/a file beside it" or of a path, without running it.

    Raises BuildError.
    """
    module, _, beside = where.partition("/")
    if where.endswith(".py") or os.path.isabs(where):
        path = Path(where)
    else:
        path = Path(str(_specs(module)[-1].origin))
        path = path.parent / beside if beside else path
    if not path.is_file():
        raise BuildError(f"no file {str(path)!r}; a build is path/to/file.py:callable or package.module:callable")
    return path


def _specs(module: str) -> tuple[importlib.machinery.ModuleSpec, ...]:
    """The specs of a module and its parents, outermost first. importlib.util.find_spec would run the parents."""
    found: list[importlib.machinery.ModuleSpec] = []
    parts = module.split(".")
    for name in (".".join(parts[: i + 1]) for i in range(len(parts))):
        path = found[-1].submodule_search_locations if found else None
        spec = None
        if path is not None or not found:
            spec = next((s for finder in sys.meta_path if (s := finder.find_spec(name, path)) is not None), None)
        if spec is None and not found:  # the working directory comes last: it must not hide what is installed
            spec = importlib.machinery.PathFinder.find_spec(name, [os.getcwd()])
        if spec is None:
            raise BuildError(f"no module named {module!r}")
        found.append(spec)
    if found[-1].origin is None:
        raise BuildError(f"no module named {module!r}")
    return tuple(found)


def _neighbours(where: str) -> dict[str, Path]:
    """The files that an outside build imports from beside itself, itself included, by their path from there.

    Beside a file are the files of its folder and below; beside a module those of its package, or of the working
    directory when it lies there. Nothing is run, so an import that is put together at run time is not seen.
    """
    if where.endswith(".py"):
        start = _source(where).resolve()
        root = within = start.parent
    elif _ours(where):
        return {}  # the project's own builds name their sources
    else:
        start, top = _source(where).resolve(), _specs(where)[0]
        within = Path(next(iter(top.submodule_search_locations or ()), start.parent)).resolve()
        root = within.parent if top.submodule_search_locations else within
        if root == Path.cwd():
            within = root
    # A parent package's __init__ runs before its module does.
    todo = [start, *(p for name in _prefixes(where) if not where.endswith(".py") for p in _module_files(root, name))]
    found: dict[str, Path] = {}
    while todo:
        path = todo.pop()
        name = os.path.relpath(path, root)
        if name not in found and path.is_relative_to(within):
            found[name] = path
            todo += _imported(path, root)
    if (terms := start.parent / TERMS).is_file():
        found[TERMS] = terms
    return found


def _ours(module: str) -> bool:
    return module.partition(".")[0] == __name__.partition(".")[0]


def _imported(path: Path, root: Path) -> Iterator[Path]:
    """The files under `root` (absolute imports) or the file's package (relative ones) that a source file imports."""
    if path.suffix != ".py":
        return
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return  # nobody can import it either
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                for name in _prefixes(alias.name):
                    yield from _module_files(root, name)
        elif isinstance(node, ast.ImportFrom):
            base = path.parents[node.level - 1] if 0 < node.level <= len(path.parents) else root
            for alias in node.names:
                for name in _prefixes(f"{node.module}.{alias.name}" if node.module else alias.name):
                    yield from _module_files(base, name)
            if node.level:
                yield from _module_files(base.parent, base.name)


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _module_files(folder: Path, name: str) -> Iterator[Path]:
    """The file of a module by its dotted name from a folder; several where Python would have to choose."""
    stem = folder.joinpath(*name.split("."))
    for suffix in importlib.machinery.all_suffixes():
        for path in (stem.with_name(stem.name + suffix), stem / f"__init__{suffix}"):
            if path.is_file():
                yield path


def _import(where: str) -> ModuleType:
    if not where.endswith(".py"):
        if not _ours(where) and os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # last, as in _specs
        try:
            return importlib.import_module(where)
        except ModuleNotFoundError as error:
            raise BuildError(f"cannot import {where!r}: {error}") from None
    path = _source(where).resolve()
    name = f"mxgate_outside_{path.stem}"
    if (there := sys.modules.get(name)) is not None and there.__file__ == str(path):
        return there
    sys.path.insert(0, str(path.parent))  # an outside file may import its neighbours
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def load_target(target: str) -> Callable[..., Any]:
    """Import "package.module:callable" or "path/to/file.py:callable". Raises BuildError when there is none."""
    where, _, attribute = target.rpartition(":")
    function = getattr(_import(where), attribute, None)
    if not callable(function):
        raise BuildError(f"{where} has no callable named {attribute!r}")
    return function  # type: ignore[no-any-return]


def called(build: Build) -> str:
    """The arguments of `mxgate run` (and explain, minimize) that mean a build, quoted for a shell."""
    if build.id in registry() or build.name.startswith("fault_"):
        return f"--build {build.id}"
    where, _, attribute = build.target.rpartition(":")
    near = os.path.relpath(where) if os.path.isabs(where) else where
    emulated = " --device emu" if "flydsl" in build.requires and build.device != "cpu" else ""
    return f"--op {build.op} --build {shlex.quote(f'{min(near, where, key=len)}:{attribute}')}{emulated}"


def build_from(record: Mapping[str, Any]) -> Build:
    """The build that dataclasses.asdict, and then JSON, made a record of. Raises TypeError, KeyError, BuildError."""
    fields = dict(record)
    for name in ("name", "op", "target", "accumulator", "profile", "device"):
        if not isinstance(fields[name], str):
            raise TypeError(f"{name} is no text")
    for name in ("formats", "out_dtypes", "requires", "sources", "assumes"):
        fields[name] = tuple(fields[name])
    fields["options"] = tuple((key, value) for key, value in fields["options"])
    return Build(**fields)


def outside(op: str | None, target: str) -> Build:
    """A build from outside the project: what mxgate.toml beside it states, else the contract's defaults.

    target as in Build. op: None for what mxgate.toml says, or else the callable's name. Raises BuildError.
    Whether it writes anything but bfloat16 shows once it is loaded: its callable has the keyword out_dtype or not.
    """
    from mxgate.kernels import declared

    where, colon, attribute = target.rpartition(":")
    if not colon or not where or not attribute.isidentifier():
        raise BuildError(
            f"{target!r} names no build: expected a registered name (see `mxgate list builds`), "
            "path/to/file.py:callable or package.module:callable"
        )
    source = _source(where)
    table, at = declared.table(source.resolve(), attribute)
    stated = declared.fields(table, at, source.resolve().parent)
    said = stated.setdefault("op", op or attribute)
    if op not in (None, said):
        raise BuildError(f"{at}: op is {said!r}; expected {op!r}, as was asked for")
    if said not in OPS:
        raise BuildError(f"which op does {target!r} compute? give --op {', '.join(OPS)}, or op in {TERMS}")
    older = stated.get("replaces")
    if older is not None and (older not in registry() or registry()[older].op != said):
        known = ", ".join(b.id for b in registry().values() if b.op == said)
        raise BuildError(f"{at}: replaces is {older!r}; expected one of {known}")
    resolved = str(source.resolve()) if where.endswith(".py") else where
    return declared.outside_terms(f"{source.stem}.{attribute}", f"{resolved}:{attribute}", stated, at)


def apart(builds: Iterable[Build]) -> list[Build]:
    """The same builds, those of one id named after as many of their folders (or packages) as tell them apart."""
    wanted = list(builds)
    for same in [[b for b in wanted if b.id == name] for name in dict.fromkeys(b.id for b in wanted)]:
        folders = [_folders(b.target) for b in same]
        for depth in range(1, max(map(len, folders)) + 1):
            names = [".".join([*f[-depth:], b.name]) for f, b in zip(folders, same, strict=True)]
            if len(same) > 1 and len(set(names)) == len(same):
                renamed = {b.target: replace(b, name=name) for b, name in zip(same, names, strict=True)}
                wanted = [renamed.get(b.target, b) if b.id == same[0].id else b for b in wanted]
                break
    return wanted


def _folders(target: str) -> list[str]:
    where = target.rpartition(":")[0]
    return list(Path(where).parent.parts[1:]) if where.endswith(".py") else where.split(".")[:-1]


# The modules that define builds; each has a tuple BUILDS.
_MODULES = (
    "mxgate.kernels.numpy_reference",
    "mxgate.kernels.numpy_windowed",
    "mxgate.kernels.torch_cpu",
    "mxgate.kernels.flydsl.wgrad",
    "mxgate.kernels.triton.builds",
    "mxgate.kernels.torch_cuda",
)


def registry() -> Mapping[str, Build]:
    """Every build of the project by id, in listing order, and then those of installed packages.

    Listing needs none of the builds' requirements."""
    from mxgate.kernels.installed import installed

    found: dict[str, Build] = {}
    for module in _MODULES:
        for build in importlib.import_module(module).BUILDS:
            if build.id in found:
                raise BuildError(f"two builds are named {build.id}")
            found[build.id] = build
    for build in installed()[0]:
        found.setdefault(build.id, build)
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
