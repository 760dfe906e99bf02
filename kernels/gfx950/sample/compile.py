"""FlyDSL launch functions to gfx950 ISA text with no GPU and no ROCm, and the committed texts of `dense`.

python -m mxgate.kernels.gfx950.sample.compile     # rewrites dense.s.xz; needs the flydsl and torch packages
"""

from __future__ import annotations

import lzma
import os
from contextlib import ExitStack, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TEXTS = HERE / "dense.s.xz"
# FlyDSL reads its target from either name; with one alone part of it answers gfx942.
TARGET = {"ARCH": "gfx950", "FLYDSL_GPU_ARCH": "gfx950", "COMPILE_ONLY": "1", "FLYDSL_RUNTIME_ENABLE_CACHE": "0"}


class _Stop(Exception):
    """Carries the text out of FlyDSL's compiler before it looks for a linker or a device."""


def isa(launch: Any, *args: Any) -> str:
    """The ISA text of the kernel a `@flyc.jit` function launches; args as for a real launch, addresses may be any
    number."""
    os.environ.update(TARGET)
    from flydsl._mlir import ir
    from flydsl._mlir.passmanager import PassManager
    from flydsl.compiler import jit_function
    from flydsl.compiler.llvm_options import llvm_options

    def stop(cls: Any, asm: str, *, func_name: str, config: Any) -> None:
        module = ir.Module.parse(asm)
        passes = ",".join(x for x in config.fragments if "gpu-module-to-binary" not in x)
        with ExitStack() as stack:
            stack.enter_context(llvm_options(config.llvm_opts) if config.llvm_opts else nullcontext())
            PassManager.parse(f"builtin.module({passes})").run(module.operation)
            PassManager.parse("builtin.module(gpu-module-to-binary{format=isa})").run(module.operation)
        raise _Stop(jit_function._extract_isa_text(module.operation.get_asm()))

    kept = jit_function.MlirCompiler.__dict__["compile"]
    jit_function.MlirCompiler.compile = classmethod(stop)
    try:
        launch(*args)
    except BaseException as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, _Stop):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        return str(cause.args[0])
    finally:
        jit_function.MlirCompiler.compile = kept
    raise RuntimeError("the launch function compiled nothing")


def texts() -> dict[str, str]:
    """The committed ISA texts by name: dense_{sync}_{async|sync}."""
    whole = lzma.decompress(TEXTS.read_bytes()).decode()
    parts = whole.split("\f")
    return {part.split("\n", 1)[0]: part.split("\n", 1)[1] for part in parts[1:]}


def main() -> None:
    from mxgate.kernels.gfx950.sample.dense import SYNC, build

    out = [f"flydsl {version('flydsl')}\n"]
    for sync in SYNC:
        for asynchronous in (True, False):
            text = isa(build(sync, asynchronous), *[1 << 20] * 5, 128, 128, 256, 0)
            name = f"dense_{sync}_{'async' if asynchronous else 'sync'}"
            out.append(f"\f{name}\n{text}")
            print(f"{name}: {text.count(chr(10))} lines")
    TEXTS.write_bytes(lzma.compress("".join(out).encode(), preset=9 | lzma.PRESET_EXTREME))


if __name__ == "__main__":
    main()
