"""From the device code to gfx950 machine code, with no GPU, no ROCm and no linker, and to the committed copies of it.

FlyDSL's own pipeline is run up to its last stage, which would link a code object; there the machine code is asked for
as text instead. The text is the binary: assembled again it gives the bytes FlyDSL would have linked. A launch is what a
FlyDSL launcher does after compiling; here the compilation ends in an exception that carries the text, so the launch,
which aborts the process where there is no libamdhip64, is never reached.

    python -m mxgate.kernels.flydsl.compile [--check]

writes the texts of all kernels, compressed, and a manifest to fixtures/isa, or compares them with what is there.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import lzma
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mxgate.kernels.build import Unavailable

ARCH = "gfx950"
PACKAGE = "flydsl"
SOURCE = Path(__file__).with_name("device.py")
FIXTURES = Path(__file__).parents[2] / "fixtures" / "isa"
COMMAND = "make isa"

# The kernels, and the widths of their arguments: q is 64 bits, i is 32.
KERNELS: Mapping[str, str] = {
    "simplest": "qqqqqqq" + "iiii",
    "plain": "qqqqqqq" + "iiiii",
    "plain_bytes": "qqqqqqq" + "iiiii",
    "prepare": "qqqqqqq" + "iiiii",
    "shipping": "qqqqqqq" + "iiiiii",
}


class StaleError(Unavailable):
    """There is no committed machine code of the source beside it, and no compiler here to make it."""


def available() -> bool:
    """Whether the kernels can be compiled here."""
    return importlib.util.find_spec(PACKAGE) is not None and importlib.util.find_spec("torch") is not None


def source_hash() -> str:
    return hashlib.sha256(SOURCE.read_bytes()).hexdigest()


@functools.cache
def machine_code(kernel: str) -> str:
    """The text of a kernel of KERNELS: compiled where FlyDSL is installed, else the committed one.

    Raises StaleError when the committed one belongs to another source.
    """
    return compiled(kernel) if available() else committed(kernel)


# ---------------------------------------------------------------- compiling


class _Captured(Exception):
    def __init__(self, text: str) -> None:
        super().__init__("compiled")
        self.text = text


def _to_text(source: str, *, func_name: str, config: Any) -> Any:
    """What takes the place of FlyDSL's compiler: its pipeline without the linking stage, then the text, raised."""
    from flydsl._mlir import ir
    from flydsl._mlir.dialects import gpu
    from flydsl._mlir.passmanager import PassManager

    module = ir.Module.parse(source)
    last = "gpu-module-to-binary"
    stages = [stage for stage in config.fragments if not stage.lstrip().startswith(last)]
    for passes in (",".join(stages), f'{last}{{format=isa opts="" section= toolkit=}}'):
        PassManager.parse(f"builtin.module({passes})").run(module.operation)
    for operation in module.body.operations:
        if operation.operation.name == "gpu.binary":
            return _raise(gpu.ObjectAttr(operation.operation.attributes["objects"][0]).object.decode().rstrip("\0"))
    raise RuntimeError(f"{func_name}: the pipeline left no machine code")


def _raise(text: str) -> None:
    raise _Captured(text)


@contextlib.contextmanager
def _capturing() -> Iterator[None]:
    """FlyDSL set to gfx950 and its compiler replaced. Both variables: with ARCH alone it compiles for gfx942."""
    wanted = {"ARCH": ARCH, "FLYDSL_GPU_ARCH": ARCH, "COMPILE_ONLY": "1", "FLYDSL_RUNTIME_ENABLE_CACHE": "0"}
    wanted["FLYDSL_RUNTIME_KIND"] = "rocm"  # nothing is launched, so a guard against launches need not hold
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    from flydsl.compiler.jit_function import MlirCompiler

    original = MlirCompiler.__dict__["compile"]
    MlirCompiler.compile = staticmethod(_to_text)
    try:
        yield
    finally:
        MlirCompiler.compile = original
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def compiled(kernel: str) -> str:
    """A kernel's machine code as text, compiled now. The arguments' values are not in it: any will do."""
    with _capturing():
        from mxgate.kernels.flydsl import device

        launcher = getattr(device, f"launch_{kernel}")
        kept, launcher._mem_cache = launcher._mem_cache, {}  # of a launch before, which would not compile again
        try:
            launcher(*[1] * len(KERNELS[kernel]), 1, 0)
        except Exception as error:
            found: BaseException | None = error
            while found is not None and not isinstance(found, _Captured):
                found = found.__cause__ or found.__context__
            if found is None:
                raise
            return found.text
        finally:
            launcher._mem_cache = kept
    raise RuntimeError(f"{kernel}: FlyDSL did not compile it; expected no kept copy to be used")


# ---------------------------------------------------------------- the committed copies


def options() -> dict[str, str]:
    """What the text depends on besides the source. Without a compiler: that it is the committed one."""
    return {"arch": ARCH, PACKAGE: importlib.metadata.version(PACKAGE) if available() else "committed text"}


def manifest() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FIXTURES / "manifest.json").read_text())
    return found


def stale() -> str | None:
    """Why the committed machine code says nothing about the present source, in a sentence, or None when it does."""
    try:
        record = manifest()
        if record["source"] != source_hash():
            found = f"holds machine code of another {SOURCE.name}; expected that of SHA-256 {source_hash()[:12]}"
        elif lacking := [k for k in KERNELS if k not in record["texts"] or not _path(k).is_file()]:
            found = f"lacks the machine code of {', '.join(lacking)}"
        else:
            return None
    except (OSError, ValueError, KeyError) as error:
        found = f"has no manifest that can be read ({type(error).__name__})"
    return f"fixtures/isa {found}: run `{COMMAND}` where {PACKAGE} is installed"


def committed(kernel: str) -> str:
    """A kernel's committed machine code. Raises StaleError when it is not the present source's, or damaged."""
    if (why := stale()) is not None:
        raise StaleError(why)
    try:
        text = _text(kernel)
        whole = hashlib.sha256(text.encode()).hexdigest() == manifest()["texts"][kernel]
    except (lzma.LZMAError, EOFError, UnicodeDecodeError):
        whole = False
    if not whole:
        raise StaleError(f"{_path(kernel).name} is not the text its manifest names: run `{COMMAND}`")
    return text


def _path(kernel: str) -> Path:
    return FIXTURES / f"{kernel}.s.xz"


def _text(kernel: str) -> str:
    return lzma.decompress(_path(kernel).read_bytes()).decode()


def write(texts: Mapping[str, str]) -> None:
    FIXTURES.mkdir(parents=True, exist_ok=True)
    for kernel, text in texts.items():
        _path(kernel).write_bytes(lzma.compress(text.encode(), preset=9))
    record = {
        "source": source_hash(),
        "options": options(),
        "texts": {kernel: hashlib.sha256(text.encode()).hexdigest() for kernel, text in texts.items()},
    }
    (FIXTURES / "manifest.json").write_text(json.dumps(record, indent=2) + "\n")


def difference(kernel: str, fresh: str) -> str:
    """How a fresh text differs from the committed one, as a unified diff; empty when it does not."""
    old = _text(kernel)
    lines = difflib.unified_diff(old.splitlines(), fresh.splitlines(), "committed", "compiled", lineterm="", n=1)
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m mxgate.kernels.flydsl.compile",
        description=f"Write the machine code of the kernels, which {PACKAGE} compiles, to {FIXTURES.name}/.",
    )
    parser.add_argument("--check", action="store_true", help="compare with the committed texts and write nothing")
    check = parser.parse_args(argv).check
    if not available():
        print(f"needs {PACKAGE} and torch, which have wheels for x86-64 Linux only", file=sys.stderr)
        return 2
    texts = {kernel: compiled(kernel) for kernel in KERNELS}
    if not check:
        write(texts)
        print(f"wrote {len(texts)} texts of {SOURCE.name} {source_hash()[:12]} to {FIXTURES}")
        return 0
    differ = {kernel: text for kernel, fresh in texts.items() if (text := difference(kernel, fresh))}
    for kernel, text in differ.items():
        print(f"{kernel}\n{text}")
    if (why := stale()) is not None:
        print(why)
    return int(bool(differ) or why is not None)


if __name__ == "__main__":
    sys.exit(main())
