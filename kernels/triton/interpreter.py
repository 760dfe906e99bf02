"""Triton's interpreter, mended and made quicker. Written for Triton 3.6 and tried with nothing else.

Mended: its scalars are arrays of one element, and for a loop's bound it makes an index of one with int(), which NumPy
refuses since 2.4 for anything with an axis. Quicker by half: it searches the whole language for functions to replace
again at every call of one kernel function by another, and computes every integer sum once more in 64 bits for an
assertion that is switched off.
"""

from __future__ import annotations

import dataclasses
from typing import Any


def mend() -> None:
    """Mend the interpreter where kernels are interpreted (TRITON_INTERPRET=1). Once is enough."""
    import triton

    if not triton.knobs.runtime.interpret:
        return
    from triton.runtime import interpreter

    if getattr(interpreter, "mended_by_mxgate", False):
        return
    interpreter.mended_by_mxgate = True
    core = triton.language.core
    patch_tensor, patch_all = interpreter._patch_lang_tensor, interpreter._patch_lang

    def with_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if core.is_builtin(triton.language.dot) or core.is_builtin(core.dot):
            patch_all(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter._patch_lang_tensor = with_index
    interpreter.InterpretedFunction.__call__ = call
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
