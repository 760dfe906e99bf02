"""Which GPUs this machine has, asked of the driver: without importing torch, and without opening a context on one."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_KFD = Path("/sys/class/kfd/kfd/topology/nodes")


@dataclass(frozen=True)
class Gpu:
    """name: the product's. architecture: "sm90" (compute capability 9.0), or "gfx942"."""

    name: str
    architecture: str

    def __str__(self) -> str:
        return f"{self.name} ({self.architecture})"


def gpu() -> Gpu | None:
    """The GPU that torch would call cuda:0, or None."""
    return next(iter(gpus()), None)


@cache
def gpus() -> tuple[Gpu, ...]:
    """The GPUs in the order of torch's numbers; of AMD's, the first alone."""
    first = _amd()
    return _nvidia() or ((first,) if first else ())


def _nvidia() -> tuple[Gpu, ...]:
    """Those that CUDA_VISIBLE_DEVICES of this process leaves; () where there is no driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count = ctypes.c_int()
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return ()
    found = (_asked(cuda, number) for number in range(count.value))
    return tuple(gpu for gpu in found if gpu is not None)


def _asked(cuda: ctypes.CDLL, number: int) -> Gpu | None:
    device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    major, minor = ctypes.c_int(), ctypes.c_int()
    ok = cuda.cuDeviceGet(ctypes.byref(device), number) == 0
    ok = ok and cuda.cuDeviceGetName(name, len(name), device) == 0
    # Attributes 75 and 76: the compute capability's two parts.
    ok = ok and cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, device) == 0
    ok = ok and cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, device) == 0
    return Gpu(name.value.decode(), f"sm{major.value}{minor.value}") if ok else None


def _amd(nodes: Path = _KFD) -> Gpu | None:
    """The kernel driver numbers gfx942 as 90402: two decimal digits each for minor and stepping."""
    for node in sorted(nodes.glob("*"), key=lambda path: int(path.name) if path.name.isdecimal() else 0):
        try:
            fields = dict(line.split(maxsplit=1) for line in (node / "properties").read_text().splitlines())
            version = int(fields.get("gfx_target_version", "0"))
        except (OSError, ValueError):
            continue
        if version:
            return Gpu("AMD GPU", f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}")
    return None


def is_gpu(device: str) -> bool:
    """Whether a build for `device` (Build.device) runs on a GPU: "cuda" (any), or "sm100" (NVIDIA, from 10.0 on)."""
    return device == "cuda" or device.startswith("sm")


def is_emulated(device: str) -> bool:
    """Whether a build for `device` is machine code that an emulator runs."""
    return device not in ("cpu", "interpreter") and not is_gpu(device)


def lacks(device: str) -> str | None:
    """What a build for `device` needs that this machine has not, in words, or None."""
    if not is_gpu(device):
        return None
    found = gpu()
    if found is None:
        return "needs a GPU, and no driver here knows of one"
    if device == "cuda":
        return None
    least = int(device.removeprefix("sm"))
    if found.architecture.startswith("sm") and int(found.architecture.removeprefix("sm")) >= least:
        return None
    return f"needs an NVIDIA GPU of compute capability {least // 10}.{least % 10} or more, and this is an {found}"
