"""What this machine is to a run: its name, its cores, what a build runs on here, and which of its GPUs a child sees."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import subprocess
from pathlib import Path

from mxgate.kernels.build import Build
from mxgate.kernels.gpu import gpu, gpus, is_gpu

VISIBLE = "CUDA_VISIBLE_DEVICES"


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def name() -> str:
    """What this machine is called, with nothing after the first dot."""
    return platform.node().partition(".")[0] or "unnamed"


@functools.cache
def device() -> str:
    """What everything here runs on: the processor's name and the machine type."""
    name = ""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "Model")):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        asked = ["sysctl", "-n", "machdep.cpu.brand_string"]
        with contextlib.suppress(OSError):
            name = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    return f"cpu: {name or platform.processor() or 'unnamed'}, {platform.machine()}"


def device_of(build: Build) -> str:
    """What a build runs on: this CPU, this machine's GPU, or an interpreter or an emulator on the CPU."""
    if is_gpu(build.device):
        return str(gpu() or "no GPU")
    if build.device == "interpreter":
        return f"Triton's interpreter on {device()}"
    return device() if build.device == "cpu" else f"{build.device} emulated on {device()}"


def may_use_gpu(build: Build) -> bool:
    """Whether a build runs on a GPU, or is of torch, which may move to one by itself."""
    return is_gpu(build.device) or build.arrays == "torch"


def shared_out() -> tuple[str, ...]:
    """What CUDA_VISIBLE_DEVICES says to a child that is to see one GPU, for each GPU of the first one's kind.

    () where there are not two of them, and children see what this process sees.
    """
    visible = os.environ.get(VISIBLE)
    names = visible.split(",") if visible else [str(number) for number in range(len(gpus()))]
    alike = tuple(name.strip() for name, one in zip(names, gpus(), strict=False) if one == gpu())
    return alike if len(alike) > 1 else ()
