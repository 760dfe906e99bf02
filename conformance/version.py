"""The version of what judges: a result counts again under the same one only, and a certificate names it."""

from __future__ import annotations

import functools
import hashlib
import platform
from collections.abc import Mapping
from pathlib import Path

import numpy as np

import mxgate.oracle
from mxgate.fixtures import MANIFEST, store
from mxgate.kernels import build as build_module

# What a result depends on besides the build: all that judging imports, as the tests see to. Left out is what only names
# the machine, hands out work or makes records of builds; the emulator is in the fingerprints of the builds it runs.
_JUDGING: Mapping[str, str] = {
    str(mxgate.oracle.__file__): "bound exact formats freivalds gemm groups layouts quantize scales",
    __file__: "case channel child complaint data gates guard launch layout poison pool recorded results run runner "
    "settings torch_arrays verdict version where worker",
    str(build_module.__file__): "build declared gpu tensors",
    str(store.__file__): "store",
}


@functools.cache
def code_version() -> str:
    """A hash of everything besides a build that a result depends on: our own source, Python and the machine type."""
    total = hashlib.sha256(f"{platform.python_version()} {platform.machine()} {np.__version__}".encode())
    files = (Path(at).with_name(f"{name}.py") for at, names in _JUDGING.items() for name in names.split())
    for path in (*files, MANIFEST):
        total.update(path.name.encode() + path.read_bytes())
    return total.hexdigest()[:16]
