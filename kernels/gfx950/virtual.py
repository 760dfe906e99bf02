"""A gfx950 for FlyDSL where there is none: an ordinary `@flyc.jit` call with CPU tensors runs on the emulator.

with gfx950.virtual_device(seed=1) as device:
    launch(x, y, n)            # unmodified
device.findings                # hazards of all launches so far; device.results has each launch's RunResult

The seam is the C runtime that FlyDSL's compiled host function calls. FlyDSL traces, lowers and compiles as always, but
for two things: the last stage of its pipeline keeps the machine code as text instead of linking it, and the engine
that runs the host function finds the runtime's functions here instead of in the library that needs HIP. So what a
launch is (which kernels, in what order, how often, on what grid, with which bytes as arguments) is still computed by
FlyDSL's own host code.

Device memory is the host's: a pointer argument, or a pointer inside one, that points into a tensor becomes an address
in an allocation of that tensor's own, with nobody's memory behind it. The bounds are those of the tensor where it was
passed as one, and of its storage where only its address was. Pointers that kernels find in memory are not followed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib.util
import os
import pkgutil
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from mxgate.kernels.build import Build
from mxgate.kernels.gfx950.assumptions import ASSUMPTIONS
from mxgate.kernels.gfx950.hazards import Finding
from mxgate.kernels.gfx950.machine import Packed, RunError, RunResult, run
from mxgate.kernels.gfx950.state import Array
from mxgate.kernels.gfx950.text import Kernel, parse

ARCH = "gfx950"
NEEDS = ("flydsl", "torch")
RUNTIME = "fly_jit_runtime"  # the library of FlyDSL that needs HIP
# With ARCH alone FlyDSL compiles for another GPU; the others would keep it from compiling or launching.
ENVIRONMENT: dict[str, str | None] = {
    "ARCH": ARCH,
    "FLYDSL_GPU_ARCH": ARCH,
    "COMPILE_ONLY": None,
    "FLYDSL_RUNTIME_KIND": None,
    "FLYDSL_COMPILE_LLVM_DIR": None,
}
NULL_PAGE = 1 << 16  # numbers below are no addresses

Span = tuple[int, int]  # host addresses: first byte, one past the last


class VirtualDevice:
    """What ran, and how launches are to run. options: those of gfx950.run. Launch i draws its order from seed + i."""

    def __init__(self, seed: int = 0, **options: Any) -> None:
        self.options = options
        self.passed: list[Span] = []  # the tensors of the call under way
        self.error: BaseException | None = None
        self.begin(seed)

    def begin(self, seed: int, model: str | None = None) -> None:
        """Forget what ran, and draw orders from another seed. model: another one from now on."""
        self.seed, self.results = seed, list[RunResult]()
        self.failed: BaseException | None = None
        if model is not None:
            self.options["model"] = model

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(finding for result in self.results for finding in result.findings)

    def check(self) -> None:
        """Raise what the first launch that could not be run raised, or HazardError for the first with findings."""
        if self.failed is not None:
            raise self.failed
        for result in self.results:
            result.check()

    def launch(self, kernel: Kernel, grid: Sequence[int], block: Sequence[int], lds: int, parameters: int) -> None:
        """parameters: address of an array of pointers, one to each argument's bytes. Raises RunError, TextError."""
        wanted = [a for a in kernel.arguments if not a.kind.startswith("hidden_")]
        places = (ctypes.c_void_p * len(wanted)).from_address(parameters) if wanted else ()
        contents = [ctypes.string_at(place, a.size) for place, a in zip(places, wanted, strict=True)]
        found: list[tuple[int, int, int, Span]] = []  # argument, offset in it, host address, whose it is
        storages: list[Span] | None = None
        for i, content in enumerate(contents):
            for at in range(0, len(content) - 7, 8):
                address = int.from_bytes(content[at : at + 8], "little")
                if address < NULL_PAGE:
                    continue
                if (span := _holding(address, self.passed)) is None:
                    storages = _storages() if storages is None else storages
                    span = _holding(address, storages)
                if span is not None:  # else a number, or a pointer that nobody may follow
                    found.append((i, at, address, span))
        buffers = [(start, _view((start, end))) for start, end in _merged(span for *_, span in found)]
        pointers: list[dict[int, tuple[Array, int]]] = [{} for _ in contents]
        for i, at, address, _ in found:
            start, array = max((b for b in buffers if b[0] <= address), key=lambda b: b[0])
            pointers[i][at] = array, address - start
        arguments = list(map(Packed, contents, pointers))
        options = {"seed": self.seed + len(self.results), "dynamic_lds": lds, **self.options}
        self.results.append(run(kernel, arguments, grid, block, **options))


def _storages() -> list[Span]:
    """The memory of every CPU tensor there is: an address alone does not say whose it is."""
    import torch

    spans = []
    for tensor in gc.get_objects():
        if issubclass(type(tensor), torch.Tensor):
            with contextlib.suppress(RuntimeError, NotImplementedError):  # sparse ones and the like have none
                if tensor.device.type == "cpu":
                    storage = tensor.untyped_storage()
                    spans.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    return spans


def _holding(address: int, spans: Sequence[Span]) -> Span | None:
    """The span that an address is in: the longest that begins there, else the shortest around it."""
    around = [s for s in spans if s[0] <= address < s[1]]
    return min(around, key=lambda s: (address - s[0], s[0] - s[1] if address == s[0] else s[1] - s[0]), default=None)


def _merged(spans: Any) -> list[Span]:
    """Overlapping spans are one allocation; neighbours are not."""
    out: list[Span] = []
    for start, end in sorted(set(spans)):
        if out and start < out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((start, end))
    return out


def _view(span: Span) -> Array:
    return np.frombuffer(memoryview((ctypes.c_uint8 * (span[1] - span[0])).from_address(span[0])), np.uint8)


def _span(pointer: int, shape: Sequence[int], strides: Sequence[int], nbytes: int) -> Iterator[Span]:
    """What a tensor covers, from its first element to its last; nothing for an empty one. Strides count elements."""
    if all(shape):
        last = sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        yield pointer, pointer + (last + 1) * nbytes


def _tensors(value: Any) -> Iterator[Span]:
    """The tensors in an argument of a FlyDSL call, a struct's among them."""
    import torch
    from flydsl.compiler.jit_argument import DLTensorJitArg
    from flydsl.expr.struct import _runtime_fields, is_struct_type

    value = getattr(value, "torch_tensor", value)
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise RunError(f"a tensor is on {value.device}; the virtual device takes tensors on cpu")
        yield from _span(value.data_ptr(), value.shape, value.stride(), value.element_size())
    elif isinstance(value, DLTensorJitArg):
        yield from _span(value.dladaptor.data_ptr, value.shape, value.strides, -(-value.element_bits // 8))
    elif is_struct_type(type(value)):
        for _, field in _runtime_fields(value):
            yield from _tensors(field)


# ------------------------------------------------------------------------------------- the runtime's functions
# Handles are positions in these lists plus one. Compiled functions keep them, so they outlive a device.
_modules: list[str] = []
_functions: list[Kernel] = []
_current: VirtualDevice | None = None


@functools.cache
def _function(module: int, name: bytes) -> int:
    _functions.append(parse(_modules[module - 1], name.decode()))
    return len(_functions)


def _load_text(data: int, level: int, size: int) -> int:
    _modules.append(ctypes.string_at(data).decode())
    return len(_modules)


def _launch(function: int, *rest: int) -> None:
    (gx, gy, gz, bx, by, bz, lds, _, parameters, _, count) = rest
    kernel = _functions[function - 1]
    explicit = sum(not a.kind.startswith("hidden_") for a in kernel.arguments)
    if count != explicit:
        raise RunError(f"kernel {kernel.name}: launched with {count} arguments, its metadata has {explicit}")
    assert _current is not None
    _current.launch(kernel, (gx, gy, gz), (bx, by, bz), lds, parameters)


def _refused(*arguments: int) -> None:
    raise RunError("gfx950 has no clusters of workgroups")


def _token(*arguments: Any) -> int:
    """A stream or an event: launches run at once and in order, so there is nothing to wait for."""
    return 1


_P, _I, _Z = ctypes.c_void_p, ctypes.c_int32, ctypes.c_size_t
_LAUNCH = (*(ctypes.c_int64,) * 6, _I, _P, _P, _P, _Z)
# name: (result, arguments, function); of MLIR's GPU runtime wrappers those that launches need
_RUNTIME: dict[str, tuple[Any, tuple[Any, ...], Callable[..., Any]]] = {
    "mgpuModuleLoadJIT": (_P, (_P, _I, _Z), _load_text),
    "mgpuModuleGetFunction": (_P, (_P, ctypes.c_char_p), _function),
    "mgpuLaunchKernel": (None, (_P, *_LAUNCH), _launch),
    "mgpuLaunchClusterKernel": (None, (_P, *(ctypes.c_int64,) * 3, *_LAUNCH), _refused),
    "mgpuStreamCreate": (_P, (), _token),
    "mgpuStreamDestroy": (None, (_P,), _token),
    "mgpuStreamSynchronize": (None, (_P,), _token),
    "mgpuStreamWaitEvent": (None, (_P, _P), _token),
    "mgpuEventCreate": (_P, (), _token),
    "mgpuEventDestroy": (None, (_P,), _token),
    "mgpuEventSynchronize": (None, (_P,), _token),
    "mgpuEventRecord": (None, (_P, _P), _token),
    "mgpuSetDefaultDevice": (None, (_I,), _token),
}


def _guarded(function: Callable[..., Any], empty: int | None) -> Callable[..., Any]:
    """A callback from compiled code, through which no exception can pass: it is kept, and raised after the call.
    What comes after it in the same call does nothing."""

    def call(*arguments: Any) -> Any:
        assert _current is not None
        if _current.error is None:
            try:
                result = function(*arguments)
                return None if empty is None else result
            except BaseException as error:
                _current.error = error
        return empty

    return call


@functools.cache
def _symbols() -> dict[str, Any]:
    table = {}
    for name, (result, arguments, function) in _RUNTIME.items():
        call = ctypes.CFUNCTYPE(result, *arguments)(_guarded(function, None if result is None else 0))
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(call))  # compiled code may outlive this module
        table[name] = ctypes.cast(call, _P)
    # Called when an engine is torn down, perhaps after Python: something that does nothing, and is not Python.
    table["mgpuModuleUnload"] = ctypes.cast(ctypes.CDLL(None).getpid, _P)
    return table


# ------------------------------------------------------------------------------------- putting it in place


def _entered(call: Callable[[Any], Any], packed: Any) -> Any:
    """Run a compiled host function, and raise what went wrong in the runtime's functions."""
    if _current is None:
        raise RuntimeError("compiled for the virtual gfx950, which is not there any more")
    call(packed)
    error, _current.error = _current.error, None
    if error is not None:
        _current.failed = _current.failed or error  # whoever called may swallow it
        raise error


@contextlib.contextmanager
def virtual_device(seed: int = 0, **options: Any) -> Iterator[VirtualDevice]:
    """FlyDSL launches in this block run on the emulator. options: those of gfx950.run, such as hazards and model.

    Findings do not stop anything: look at device.findings, or call device.check(). A launch raises RunError or
    TextError where the emulator cannot run it. Raises RuntimeError inside another such block, and ModuleNotFoundError
    without FlyDSL and torch.
    """
    global _current
    if _current is not None:
        raise RuntimeError("there is a virtual gfx950 already; expected one at a time")
    if missing := [name for name in NEEDS if importlib.util.find_spec(name) is None]:
        raise ModuleNotFoundError(f"the virtual gfx950 needs {' and '.join(missing)}, not installed here")
    with contextlib.ExitStack() as stack:
        for name, value in ENVIRONMENT.items():
            stack.callback(_set_environment, name, os.environ.get(name))
            _set_environment(name, value)
        _patch(stack)
        _current = VirtualDevice(seed, **options)
        try:
            yield _current
        finally:
            _current = None


def _set_environment(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def install(seed: int = 0, **options: Any) -> VirtualDevice:
    """virtual_device for the rest of the process."""
    context = virtual_device(seed, **options)
    _kept.append(context)
    return context.__enter__()


_kept: list[Any] = []  # a generator that is collected runs its end


def emulated(build: Build) -> Build:
    """A build that launches through FlyDSL, as one that is judged on the virtual device."""
    modules = pkgutil.iter_modules([str(Path(__file__).parent)])
    ours = tuple(f"{__package__}.{m.name}" for m in modules if not m.name.startswith("test_") and not m.ispkg)
    return replace(
        build,
        device=ARCH,
        assumes=ASSUMPTIONS,
        requires=tuple(dict.fromkeys((*build.requires, *NEEDS))),
        sources=(*build.sources, *ours),
    )


def _patch(stack: contextlib.ExitStack) -> None:
    import torch
    from flydsl.compiler import jit_executor, jit_function
    from flydsl.compiler.backends.rocm import RocmBackend

    stages, dispatch = RocmBackend._pipeline_parts, jit_executor.CallState.__call__
    entry, constructor = jit_executor.CompiledArtifact._get_func_exe, jit_executor.ExecutionEngine

    def pipeline(self: Any, *, compile_hints: dict[str, Any]) -> tuple[list[str], str]:
        before, last = stages(self, compile_hints=compile_hints)
        text = last.replace("format=fatbin", "format=isa")
        if text == last:
            raise RuntimeError(f"FlyDSL's last stage is {last!r}; expected one with format=fatbin")
        return before, text  # part of the key of FlyDSL's caches, so nothing is mixed up there

    def engine(module: Any, opt_level: int = 2, shared_libs: Sequence[str] = ()) -> Any:
        called = set(re.findall(r"@(mgpu\w+)|(#fly\.explicit_module)", str(module)))
        if lacking := {name for names in called for name in names if name} - _RUNTIME.keys():  # it would abort
            raise RunError(f"the virtual gfx950 has no {', '.join(sorted(lacking))}, which the host function needs")
        made = constructor(module, opt_level=opt_level, shared_libs=[p for p in shared_libs if RUNTIME not in p])
        for name, place in _symbols().items():
            made.raw_register_runtime(name, place)
        return made

    def call(self: Any, arguments: tuple[Any, ...]) -> Any:
        if _current is None:
            return dispatch(self, arguments)
        before, _current.passed = _current.passed, [s for a in arguments for s in _tensors(a)]
        try:
            return dispatch(self, arguments)
        finally:
            _current.passed = before

    def placeholder(value: Any, *, allow_null_pointers: bool = False) -> bool:
        """flyc.compile launches at once what it would launch on a GPU: a CPU tensor is live memory here."""
        return bool(pending(value, allow_null_pointers=allow_null_pointers)) and not any(_tensors(value))

    pending = jit_function._is_compile_placeholder
    patches: list[tuple[Any, str, Any]] = [
        (RocmBackend, "_pipeline_parts", pipeline),
        (jit_executor, "ExecutionEngine", engine),
        (jit_executor.CallState, "__call__", call),
        (jit_executor.CompiledArtifact, "_get_func_exe", lambda self: functools.partial(_entered, entry(self))),
        (jit_function, "_is_compile_placeholder", placeholder),
    ]
    if not torch.cuda.is_available():  # the two words of torch that stand around a launch
        stream = SimpleNamespace(cuda_stream=0)
        patches.append((torch.cuda, "current_stream", lambda device=None: stream))
        patches.append((torch.cuda, "synchronize", lambda device=None: None))
    for owner, name, new in patches:
        stack.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, new)


def current() -> VirtualDevice | None:
    """The device that FlyDSL launches on now."""
    return _current
