"""What the command does to its own process: variables that its children inherit, and its allocator."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

from mxgate.kernels.build import EMULATE


@contextlib.contextmanager
def emulating(device: str | None) -> Iterator[None]:
    """With --device emu children emulate even where there is the GPU."""
    before = os.environ.get(EMULATE)
    if device == "emu":
        os.environ[EMULATE] = "1"
    try:
        yield
    finally:
        os.environ.pop(EMULATE, None)
        if before is not None:
            os.environ[EMULATE] = before


def keep_memory() -> None:
    """Have glibc keep what is freed: a fresh page costs more than what is computed into it."""
    trim, mmap, most = -1, -3, (1 << 31) - 1
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap, most)
        libc.mallopt(trim, most)
