"""Where the tests of this folder run: on the GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os

from mxgate.kernels.gpu import gpu

if gpu() is None:
    os.environ["TRITON_INTERPRET"] = "1"  # before the first import of a kernel

collect_ignore_glob = [] if all(importlib.util.find_spec(name) for name in ("torch", "triton")) else ["test_*.py"]
