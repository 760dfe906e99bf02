"""Launches of the FlyDSL weight gradient: which kernels, on what grid, with which arguments, as plain data.

A plan names buffers and gives numbers; it knows neither where it will run nor the offsets, which only the device
reads: a new routing is a new content of the offsets buffer and changes no kernel. Whoever runs a plan supplies the
buffers: the emulator of gfx950 with NumPy arrays, or, where there is a gfx950 with its HIP runtime, FlyDSL's launchers.
"""

from __future__ import annotations

import functools
import os
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mxgate.kernels import flydsl, gfx950
from mxgate.kernels.build import EMULATE, HIP, Build, Unavailable, hip
from mxgate.kernels.flydsl import compile as isa
from mxgate.kernels.gfx950 import virtual
from mxgate.oracle.groups import check_offsets

Array = NDArray[Any]

BLOCK = 32  # tokens that share a scale
TILE = 256  # rows and columns of a block's output, and tokens of a loop body
SMALL = 64  # rows and columns of a block's output in the simplest rung
SLOT = 1024  # bytes of shuffled scales: 128 rows, one body
OPERANDS = ("dy_t", "dy_scales", "x_t", "x_scales", "offsets")
NOTHING: Mapping[str, int] = MappingProxyType({})
RUNGS = ("simplest", "plain", "shipping")


@dataclass(frozen=True)
class Call:
    """One kernel launch: blocks of `threads` along x; arguments in order, a buffer's name or a number."""

    kernel: str
    blocks: int
    threads: int
    arguments: tuple[str | int, ...]


@dataclass(frozen=True)
class Plan:
    """The launches of one weight gradient, in order, and the bytes of the buffers between them.

    dW is a bf16 buffer "dw" of [E, N, row_pitch] elements.
    """

    calls: tuple[Call, ...]
    scratch: Mapping[str, int]
    row_pitch: int


def launch_plan(rung: str, n: int, k: int, m: int, experts: int) -> Plan:
    """The plan of one of RUNGS for dY^T [N,M], X^T [K,M] and E experts.

    Raises ValueError for sizes whose addresses would not fit: offsets are 32 bits wide and their upper half is kept for
    what is out of range.
    """
    if rung not in RUNGS:
        raise ValueError(f"no rung {rung!r}; expected one of {', '.join(RUNGS)}")
    if m % BLOCK:
        raise ValueError(f"the operands hold {m} tokens; expected a multiple of {BLOCK}, the scale block")
    slots = -(-m // TILE) + 2 * experts
    for what, size in (
        (f"{TILE} rows of {m} tokens", TILE * m),
        ("the shuffled scales of an operand", -(-max(n, k) // TILE) * 2 * slots * SLOT),
        (f"{TILE} rows of {k} outputs", TILE * k * 2),
    ):
        if size >= 1 << 31:
            raise ValueError(f"{what} are {size} bytes; expected less than 2 GiB")
    row_pitch = -(-k // 4) * 4  # a lane stores four elements
    out: tuple[str | int, ...] = ("offsets", "dw", n * row_pitch, row_pitch)
    direct = ("dy_t", "dy_scales", "x_t", "x_scales", *out, n, k, m)
    if rung == "simplest":
        blocks = experts * -(-n // SMALL) * -(-k // SMALL)
        return Plan((Call("simplest", blocks, 64, direct),), NOTHING, row_pitch)
    rows, columns = -(-n // TILE), -(-k // TILE)
    blocks = experts * rows * columns
    if rung == "plain":
        # The layout bit: two words at a time only where a row of scales starts at a multiple of four bytes.
        kernel = "plain_bytes" if m % (4 * BLOCK) else "plain"
        return Plan((Call(kernel, blocks, 256, (*direct, experts)),), NOTHING, row_pitch)
    scratch = {"dy_shuffled": 2 * rows * slots * SLOT, "x_shuffled": 2 * columns * slots * SLOT}
    shuffles = slots * -(-(rows + columns) // 2)
    prepare = Call(
        "prepare", -(-(n + k) // 4) + shuffles, 256, (*OPERANDS, "dy_shuffled", "x_shuffled", n, k, m, experts, slots)
    )
    main = Call("shipping", blocks, 256, ("dy_t", "dy_shuffled", "x_t", "x_shuffled", *out, n, k, m, experts, slots))
    return Plan((prepare, main), MappingProxyType(scratch), row_pitch)


# ---------------------------------------------------------------- running a plan


def on_gpu() -> bool:
    """Whether a plan runs on a gfx950 here: there is one, with HIP, and nobody asked for the emulator."""
    return os.environ.get(EMULATE) != "1" and virtual.current() is None and _gfx950()


@functools.cache
def _gfx950() -> bool:
    if not hip():
        return False
    import torch

    return bool(torch.cuda.is_available()) and isa.ARCH in torch.cuda.get_device_properties(0).gcnArchName


@functools.cache
def _parsed(kernel: str) -> gfx950.Kernel:
    return gfx950.parse(isa.machine_code(kernel))


def emulate(plan: Plan, buffers: Mapping[str, Array], **options: Any) -> tuple[gfx950.RunResult, ...]:
    """Run a plan on the emulator; `buffers` are read and written in place. options: those of the emulator's run.

    Raises HazardError when a kernel reads too early, races, or touches memory that is not its own.
    """
    results = []
    for call in plan.calls:
        arguments = [buffers[a] if isinstance(a, str) else a for a in call.arguments]
        blocks, threads = (call.blocks, 1, 1), (call.threads, 1, 1)
        result = gfx950.run(_parsed(call.kernel), arguments, blocks, threads, **options)
        result.check()
        results.append(result)
    return tuple(results)


def launch(plan: Plan, buffers: Mapping[str, Array]) -> None:
    """Run a plan through FlyDSL's launchers: under gfx950.virtual_device on the emulator, else on the GPU.

    On a GPU nobody has run it yet: there was no gfx950. Raises Unavailable where there is neither.
    """
    place = "cpu" if virtual.current() else "cuda"
    if place == "cuda" and not _gfx950():
        raise Unavailable(f"launches on a {isa.ARCH}, which needs {HIP}: run under gfx950.virtual_device()")
    import torch

    from mxgate.kernels.flydsl import device

    there = {name: torch.from_numpy(a.reshape(-1).view(np.uint8)).to(place) for name, a in buffers.items()}
    stream = torch.cuda.current_stream().cuda_stream
    for call in plan.calls:
        values = [there[a].data_ptr() if isinstance(a, str) else a for a in call.arguments]
        getattr(device, f"launch_{call.kernel}")(*values, call.blocks, stream)
    for name, array in buffers.items():
        array.reshape(-1).view(np.uint8)[...] = there[name].cpu().numpy()


# ---------------------------------------------------------------- builds


def _wgrad(rung: str, operands: tuple[Array, ...], out: Array | None, **options: Any) -> Array:
    """dW [E,N,K] bf16 of dy_t [N,M] and x_t [K,M], e4m3fn with scales [.,M/32]. options: the emulator's.

    ValueError or TypeError for operands that do not fit each other. The shipping rung zeroes the padding in place.
    What the device's memory holds before is what numpy.empty gives, so that a gate can choose it.
    """
    dy_t, dy_scales, x_t, x_scales, offsets = operands
    (n, m), k = dy_t.shape, x_t.shape[0]
    for name, array, dtype, shape in (
        ("dy_t", dy_t, ml_dtypes.float8_e4m3fn, (n, m)),
        ("dy_scales", dy_scales, ml_dtypes.float8_e8m0fnu, (n, m // BLOCK)),
        ("x_t", x_t, ml_dtypes.float8_e4m3fn, (k, m)),
        ("x_scales", x_scales, ml_dtypes.float8_e8m0fnu, (k, m // BLOCK)),
    ):
        if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
            raise ValueError(f"{name} is {array.dtype} {array.shape}; expected contiguous {np.dtype(dtype)} {shape}")
    check_offsets(offsets, m, align=BLOCK)
    plan = launch_plan(rung, n, k, m, len(offsets))
    dw = np.empty((len(offsets), n, plan.row_pitch), ml_dtypes.bfloat16)
    buffers = {**dict(zip(OPERANDS, operands, strict=True)), "dw": dw}
    buffers.update((name, np.empty(size, np.uint8)) for name, size in plan.scratch.items())
    if on_gpu():
        launch(plan, buffers)
    else:
        emulate(plan, buffers, **options)
    if out is None:
        return np.ascontiguousarray(dw[:, :, :k])
    out[...] = dw[:, :, :k]
    return out


def _rung(rung: str, what: str, **options: Any) -> Callable[..., Array]:
    def wgrad(
        dy_t: Array,
        dy_scales: Array,
        x_t: Array,
        x_scales: Array,
        offsets: Array,
        *,
        out: Array | None = None,
        seed: int = 0,
    ) -> Array:
        return _wgrad(rung, (dy_t, dy_scales, x_t, x_scales, offsets), out, seed=seed, **options)

    wgrad.__doc__ = f"{what} Operands as in _wgrad; seed: the emulator's."
    return wgrad


simplest = _rung("simplest", "A wave for 64 x 64 outputs, loading straight into registers.")
plain = _rung("plain", "The pipelined body on scales as they come.")
shipping = _rung("shipping", "The pipelined body on shuffled scales.")
shipping_cdna3 = _rung("shipping", "The shipping rung on a matrix core that adds as CDNA3's does.", model="cdna3-like")


_NOT_RUN = ("bench", "budget", "ledger", "mutants", "sample", "virtual")  # modules that no build's answer depends on
_SHARED: dict[str, Any] = {
    "op": "wgrad",
    "formats": ("e4m3fn",),
    "group_alignment": BLOCK,
    "accumulator": "mfma-scale-128",
    "device": isa.ARCH,
    "assumes": gfx950.ASSUMPTIONS,
    "options": tuple(isa.options().items()),
    "sources": (
        *(
            f"{package.__name__}.{module.name}"
            for package in (flydsl, gfx950)
            for module in pkgutil.iter_modules(package.__path__)
            if not module.name.startswith("test_") and module.name not in _NOT_RUN
        ),
        *(f"mxgate.fixtures/isa/{path.name}" for path in sorted(isa.FIXTURES.glob("*"))),
    ),
}
BUILDS = (
    Build("flydsl_simplest", target=f"{__name__}:simplest", **_SHARED),
    Build("flydsl_plain", target=f"{__name__}:plain", replaces="wgrad/flydsl_simplest", **_SHARED),
    Build("flydsl", target=f"{__name__}:shipping", replaces="wgrad/flydsl_plain", **_SHARED),
    Build("flydsl_cdna3", target=f"{__name__}:shipping_cdna3", **_SHARED),
)
