"""What a build did wrong in its child, in the words of Launch.error."""

from __future__ import annotations

import contextlib
import os
import signal
import sysconfig
import traceback
from collections.abc import Sequence
from typing import Any

from mxgate.conformance.channel import CLOSED
from mxgate.conformance.layout import LayoutError
from mxgate.kernels import build as build_module
from mxgate.kernels.build import BuildError, Unavailable

# Lines of these are not the build's: of ours, around a call and in the emulator, and importlib's.
_AROUND = (
    os.path.join(os.path.dirname(__file__), ""),
    str(build_module.__file__),
    os.path.join(os.path.dirname(str(build_module.__file__)), "gfx950"),
    "<frozen",
)
# Python's own files and what is installed beside it: a build's mistake is seldom there.
_LIBRARIES = tuple(
    {os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


class Uncaptured(Exception):
    """The launch cannot be captured in a graph; what the process can still do is anybody's guess."""

    def __init__(self, why: str) -> None:
        super().__init__(f"cannot be captured in a CUDA graph: {why}")


class Returned(Exception):
    """The callable returned something of another kind than its op gives."""

    def __init__(self, value: Any, expected: str) -> None:
        super().__init__(f"returned {_a(type(value).__name__)}, expected {expected}")


def _a(noun: str) -> str:
    return f"{'an' if noun[:1] in 'aeiouAEIOU' else 'a'} {noun}"


def complaint(error: BaseException) -> str:
    """The words of Launch.error for whatever the build raised, with the innermost line of its own. They go to
    terminals and into pages: what is no printable character is told by its number."""
    said = str(error)
    if not isinstance(error, Returned | Uncaptured | BuildError | LayoutError | Unavailable):
        at = _site([(frame.filename, frame.lineno) for frame in reversed(traceback.extract_tb(error.__traceback__))])
        text = " ".join(said.split())
        said = f"raised {type(error).__name__}{at}{f': {text[:300]}' if text else ''}"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in said)


def obituary(status: int, printed: str) -> str:
    """Why a child ended, from its exit status and what it printed."""
    if status == CLOSED:
        return "closed its channel to the runner"
    if status >= 0:
        return f"ended its process with status {status} instead of answering{_last_words(printed)}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-status).name}{_crash_site(printed)}{_last_words(printed)}"
    return f"killed by signal {-status}"


def _crash_site(printed: str) -> str:
    """Where the fault handler says that the build was, as " at mine.py:12"."""
    _, _, trace = printed.partition("most recent call first):")
    frames = []
    for line in trace.splitlines():
        if 'File "' in line and 'File "<' not in line:
            path, _, rest = line.partition('File "')[2].partition('", line ')
            frames.append((path, rest.split()[0]))
    return _site(frames)


def _site(frames: Sequence[tuple[str, Any]]) -> str:
    """The innermost line of the build's, as " at mine.py:12"; of a library where there is none. frames: (file, line),
    the innermost first."""
    around = [frame for frame in frames if not frame[0].startswith(_AROUND)]
    own = [frame for frame in around if not frame[0].startswith(_LIBRARIES)] or around
    return f" at {os.path.basename(own[0][0])}:{own[0][1]}" if own else ""


def _last_words(printed: str) -> str:
    """The last line that the build printed itself, as ", saying 'out of registers'"."""
    said = printed.partition("Fatal Python error:")[0].split("\n")
    last = next((line.strip() for line in reversed(said) if line.strip()), "")
    return f", saying {last[:120]!r}" if last else ""
