"""A build in a child process: what it may break there, and how its answers come back.

The runner never imports a build. It starts a Python of its own with this module in a session of its own and talks to it
over a socket, so whatever the build prints, forks, leaks, closes, raises or overwrites stays in that session, and
the session is killed as a whole. A child loads one build, once, and serves launches until the socket closes; a "fresh"
launch is one more child.

In the child every operand ends flush against a page that nobody may touch: reading or writing one byte past a plane is
a SIGSEGV (on macOS a SIGBUS), hence a rejection that names its signal. The operands of one variant begin flush against
such a page instead. The bytes on the other side hold a pattern that is compared after each launch, and so are the
operands, the result of the call before, and results of some calls ago. Memory that the build allocates for itself is
filled with the launch's byte: through glibc's M_PERTURB where there is glibc, and through numpy.empty and
numpy.empty_like everywhere.

Children run their BLAS on one thread: the runner keeps the cores busy with several of them, and "the same bytes again"
then means the same thing on every machine.

What this does not stop: a build that means harm. It isolates mistakes, it is not a sandbox.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import json
import mmap
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxgate.conformance.case import Case
from mxgate.conformance.launch import Array, Launch, LaunchSpec, Operands, digest
from mxgate.conformance.layout import LayoutError, laid_out, layout, quantized
from mxgate.conformance.machine import VISIBLE
from mxgate.kernels import build as build_module
from mxgate.kernels.build import HIP, OPS, Build, BuildError, Unavailable, build_from, hip
from mxgate.kernels.gpu import is_emulated, is_gpu
from mxgate.kernels.tensors import dtype_of, to_array, to_tensor

_EMULATOR = os.path.join(os.path.dirname(str(build_module.__file__)), "gfx950")
# FlyDSL looks at this before each launch, and raises when it is not its backend's. A launch would abort the process.
_NO_LAUNCH = {"FLYDSL_RUNTIME_KIND": "none"}
REPLACED = "replaced"  # the variant of the operands that a captured launch is replayed with
CANARY = 0xA5
MARGIN = 256  # canary bytes kept in front of every operand and output
GAP = 40  # elements between the rows of a pitched output
GIB = 1 << 30
# The operands of this variant lie flush against the page in front of them, those of all others against the one behind.
AHEAD = "one"
# Results that are compared again when as many others have been returned, and how many bytes of them are kept that long.
KEPT, KEPT_BYTES = 8, 64 << 20
# How often a child may have a case's operands and result in memory before it counts: as they came, in their planes, on
# the way to a device and back. It matters where those are GiB themselves.
COPIES = 4
_TAIL = 4000  # bytes of what a build printed that are kept
_STEP = 0.02  # seconds between two looks at a busy child's memory
_CLOSED = 117  # the exit status of a child whose channel was closed under it
_LENGTH = struct.Struct("<Q")
_CALLS = 10_000_000  # calls a second that no build reaches: a bound on how many times a child may report
# `-m` would put the working directory first on the path, and a file random.py in it would be every child's.
_START = "import sys; sys.path[:] = filter(None, sys.path); from mxgate.conformance.worker import main; main()"


@dataclass(frozen=True)
class Limits:
    """seconds: the longest that one launch may take. memory: GiB of resident memory of the child, besides
    its case's arrays (COPIES)."""

    seconds: float = 60.0
    memory: float = 8.0


Arguments = tuple[list[Any], dict[str, Any]]  # of a call, by place and by name


class ChildError(Exception):
    """Why a child gave no answer, as the words of Launch.error. The child is gone."""


class Stopped(Exception):
    """The run is being stopped; the launch that was under way counts for nothing."""


def _bytes(array: Array) -> NDArray[np.uint8]:
    """The bytes of a C-contiguous array, flat and without a copy."""
    return array.reshape(-1).view(np.uint8)


# ---------------------------------------------------------------------------------------------------------------------
# The runner's side


def _environment(build: Build, gpu: str | None) -> dict[str, str]:
    one = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
    # Without glibc's per-thread cache every malloc, however small, honours M_PERTURB.
    interpreted = {"TRITON_INTERPRET": str(int(build.device == "interpreter"))}
    return {
        **os.environ,
        **(interpreted if build.device == "interpreter" or is_gpu(build.device) else {}),
        **dict.fromkeys(one, "1"),
        **({VISIBLE: gpu} if gpu is not None else {}),
        "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0",
        "PYTHONUNBUFFERED": "1",
    }


class Child:
    """One child process with one build loaded.

    keywords: the optional keywords (`out`, `out_dtype`, `bias`, `format`, `seed`, `model`) that its callable takes.
    gpu: the only one that it sees, as CUDA_VISIBLE_DEVICES names it; None for what this process sees. Raises ChildError
    when the build cannot be loaded, Stopped when `stop` is set meanwhile. Close it when done; a dead child closes
    itself.
    """

    def __init__(
        self, build: Build, limits: Limits, stop: threading.Event | None = None, gpu: str | None = None
    ) -> None:
        self.build, self.limits, self.stop, self.gpu = build, limits, stop or threading.Event(), gpu
        self._closed = False
        self._case, self._number = "", 0
        self._known: set[str] = set()
        self._given = self._held = 0  # bytes of this case's operands; the most that any case's and its result take
        self._tail = b""
        ours, theirs = socket.socketpair()
        self._socket = ours
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(theirs.fileno(),),
            env=_environment(build, gpu),
            start_new_session=True,
        )
        theirs.close()
        assert self._process.stdout is not None
        self._printed = self._process.stdout.fileno()
        os.set_blocking(self._printed, False)
        ours.settimeout(max(limits.seconds, 30.0))  # for a child that stops reading; answers have their own deadline
        reply, _ = self._ask({"do": "load", "build": asdict(build)}, (), max(limits.seconds, 60.0))
        if "error" in reply:
            self.close()
            raise ChildError(str(reply["error"]))
        self.keywords: frozenset[str] = frozenset(reply["keywords"])

    @property
    def alive(self) -> bool:
        return not self._closed and self._process.poll() is None

    def launch(self, case: Case, spec: LaunchSpec, operands: Operands) -> Launch:
        """Call the build once. Never raises for anything that the build does; Stopped when the run is stopped."""
        if spec.model is not None and "model" not in self.keywords and not _launches_flydsl(self.build):
            return Launch(spec, f"takes no keyword model, as {spec.model} needs", (), "", unavailable=True)
        return self._launch(case, spec, operands)

    def replay(self, case: Case, given: Operands, other: Case, replaced: Operands) -> tuple[Launch, Launch]:
        """A launch of a GPU build on `given`, captured in a graph and replayed after `replaced` was written over its
        operands; and a plain call on `replaced`, both as launches of `other`.

        other: a case with the buffers of `case`. As `launch` otherwise. A child whose launch cannot be captured ends.
        """
        again, plain = LaunchSpec("replayed"), LaunchSpec("on other operands")
        try:
            self._upload(case, again.variant, given)
            self._upload(case, REPLACED, replaced, other)
        except ChildError as error:
            return Launch(again, str(error), (), ""), Launch(plain, str(error), (), "")
        first = self._launch(other, plain, replaced, {"variant": REPLACED})
        return self._launch(other, again, replaced, {"variant": REPLACED, "captured": again.variant}), first

    def _launch(
        self, case: Case, spec: LaunchSpec, operands: Operands, what: Mapping[str, Any] | None = None
    ) -> Launch:
        """what: of the request, where the operands are there already."""
        try:
            if what is None:
                self._upload(case, spec.variant, operands)
            shape, dtype = _result(case, operands)
            self._held = max(self._held, self._given + int(np.prod(shape)) * dtype_of(dtype).itemsize)
            asked = {
                "do": "call",
                "variant": spec.variant,
                "fill": spec.fill,
                "out": spec.out if "out" in self.keywords else "none",
                "out_dtype": self.asked_type(case),
                "shape": shape,
                "dtype": dtype,
                "seed": _seed(case, spec) if is_emulated(self.build.device) else None,
                "model": spec.model,
                "work": case.op == "quantize" or case.tokens > 0,
                "most": _most(shape),
                "captured": None,
                **(what or {}),
            }
            reply, blobs = self._ask(asked, (), self.limits.seconds, _most(shape))
        except ChildError as error:
            return Launch(spec, str(error), (), "")
        if "error" in reply:
            if reply["spoilt"]:
                self.close()
            return Launch(spec, str(reply["error"]), (), "", unavailable=reply["unavailable"])
        output = tuple(
            blob.view(dtype_of(part["dtype"])).reshape(part["shape"])
            for part, blob in zip(reply["parts"], blobs, strict=True)
        )
        return Launch(
            spec=replace(spec, out=str(asked["out"])),
            error=None,
            output=output,
            digest=digest(output),
            canaries=reply["canaries"],
            inputs_changed=tuple(reply["inputs_changed"]),
            aliases=reply["aliases"],
        )

    def asked_type(self, case: Case) -> str | None:
        """The output type to ask for: None for bfloat16, and for the only one of a callable that cannot be asked."""
        only = "out_dtype" not in self.keywords and self.build.out_dtypes == (case.out_dtype,)
        return None if only or case.op == "quantize" or case.out_dtype == "bfloat16" else case.out_dtype

    def clock(self, case: Case, variant: str, operands: Operands, seconds: float) -> tuple[list[float], str]:
        """Call the build over and over for that long: the time of each call in seconds, and the last output's digest.

        Raises ChildError."""
        self._upload(case, variant, operands)
        asked = {"do": "clock", "variant": variant, "seconds": seconds, "out_dtype": self.asked_type(case)}
        limit = self.limits.seconds + seconds
        reply, blobs = self._ask(asked, (), limit, int(limit * _CALLS) * 8)
        if "error" in reply:
            raise ChildError(str(reply["error"]))
        return blobs[0].view(np.float64).tolist(), str(reply["digest"])

    def figures(self) -> dict[str, dict[str, int]]:
        """Of the last launch of a build that launches through FlyDSL on the emulator: what each kernel's machine code
        costs (gfx950.ledger.launched). Raises ChildError."""
        reply, _ = self._ask({"do": "figures"}, (), self.limits.seconds)
        if "error" in reply:
            raise ChildError(str(reply["error"]))
        return dict(reply["kernels"])

    def printed(self) -> str:
        """The end of what the build has printed."""
        if not self._closed:
            self._drain()
        return self._tail.decode(errors="replace")

    def close(self) -> None:
        """Kill the whole session and wait for the child. Once is enough: the number may be another process's later."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._drain()
        self._socket.close()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _upload(self, case: Case, variant: str, operands: Operands, of: Case | None = None) -> None:
        """of: the case whose tokens the operands hold, if it is another one."""
        if case.id != self._case:
            self._case, self._known, self._given = case.id, set(), 0
            self._number += 1
        if variant in self._known:
            return
        named: dict[str, Any] = {**operands.arrays, **(operands.extra or {})}
        arrays = {name: value for name, value in named.items() if isinstance(value, np.ndarray)}
        header = {
            "do": "operands",
            "case": self._number,  # the build has no business knowing which case it is given
            "variant": variant,
            "values": {name: value for name, value in named.items() if name not in arrays},
            "keywords": list(operands.extra or {}),
            "order": list(operands.arrays),
            "arrays": [
                {"name": name, "dtype": a.dtype.name, "shape": a.shape, "tokens": _tokens(of or case, name, arrays)}
                for name, a in arrays.items()
            ],
        }
        self._given += sum(a.nbytes for a in arrays.values())
        self._held = max(self._held, self._given)
        reply, _ = self._ask(header, [_bytes(a) for a in arrays.values()], self.limits.seconds)
        if "error" in reply:
            raise ChildError(str(reply["error"]))
        self._known.add(variant)

    def _ask(
        self, header: Mapping[str, Any], blobs: Sequence[Array], seconds: float, most: int = 0
    ) -> tuple[dict[str, Any], list[Array]]:
        if self._closed:
            raise ChildError("had already ended")
        try:
            _send(self._socket, header, blobs)
            deadline = time.monotonic() + seconds
            return _receive(functools.partial(self._fill, deadline, seconds), most)
        except Stopped:
            self.close()
            raise
        except ChildError:
            self.close()
            raise
        except TimeoutError:
            self.close()
            raise ChildError("stopped reading its operands") from None
        except (OSError, EOFError):
            raise ChildError(self._obituary()) from None
        except (ValueError, KeyError, TypeError):
            self.close()
            raise ChildError("wrote over the channel to the runner: its answer cannot be read") from None

    def _fill(self, deadline: float, seconds: float, into: memoryview) -> None:
        """Read exactly len(into) bytes, watching the clock, the memory, the process and what it prints."""
        done, look = 0, time.monotonic() + _STEP
        while done < len(into):
            watched: list[Any] = [self._socket, self._printed]
            ready = select.select(watched, [], [], _STEP)[0]
            if self._printed in ready and not self._drain():
                # Its end of the pipe is closed: no use in asking again, so sleep on the socket alone.
                ready = select.select([self._socket], [], [], _STEP)[0]
            if self._socket in ready:
                got = self._socket.recv_into(into[done:])
                if got == 0:
                    raise EOFError
                done += got
            # Bytes that are ready are no excuse: a child may send them one by one for ever.
            if self._socket in ready and time.monotonic() < look:
                continue
            look = time.monotonic() + _STEP
            if self.stop.is_set():
                raise Stopped
            if self._socket not in ready and self._process.poll() is not None:
                raise EOFError
            if time.monotonic() > deadline:
                raise ChildError(f"no answer within {seconds:g} s")
            if resident(self._process.pid) > self.limits.memory * GIB + COPIES * self._held:
                raise ChildError(f"exceeded {self.limits.memory:g} GiB")

    def _drain(self) -> bool:
        """Keep the end of what was printed; False once nothing more can come."""
        try:
            while text := os.read(self._printed, 65536):
                self._tail = (self._tail + text)[-_TAIL:]
        except BlockingIOError:
            return True
        except (OSError, ValueError):
            pass
        return False

    def _obituary(self) -> str:
        """Why the child ended, in words."""
        try:
            status = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self.close()
            return "closed its channel to the runner"
        self.close()
        if status == _CLOSED:
            return "closed its channel to the runner"
        printed = self._tail.decode(errors="replace")
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


# Python's own files and what is installed beside it: a build's mistake is seldom there.
_LIBRARIES = tuple(
    {os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


def _site(frames: Sequence[tuple[str, Any]]) -> str:
    """The innermost line of the build's, as " at mine.py:12"; of a library where there is none. frames: (file, line),
    the innermost first. Neither our own lines nor importlib's: both stand around the build's."""
    ours = (__file__, str(build_module.__file__), _EMULATOR, "<frozen")
    around = [frame for frame in frames if not frame[0].startswith(ours)]
    own = [frame for frame in around if not frame[0].startswith(_LIBRARIES)] or around
    return f" at {os.path.basename(own[0][0])}:{own[0][1]}" if own else ""


def _last_words(printed: str) -> str:
    """The last line that the build printed itself, as ", saying 'out of registers'"."""
    said = printed.partition("Fatal Python error:")[0].split("\n")
    last = next((line.strip() for line in reversed(said) if line.strip()), "")
    return f", saying {last[:120]!r}" if last else ""


def _result(case: Case, operands: Operands) -> tuple[tuple[int, ...], str]:
    """The shape of what the op gives on these operands (quantize: of its elements), and its dtype."""
    arrays = operands.arrays
    if case.op == "forward":
        return (arrays["x"].shape[0], arrays["w"].shape[1]), case.out_dtype
    if case.op == "dgrad":
        return (arrays["dy"].shape[0], arrays["w"].shape[2]), case.out_dtype
    if case.op == "wgrad":
        return (len(arrays["offsets"]), arrays["dy_t"].shape[0], arrays["x_t"].shape[0]), case.out_dtype
    return arrays["x"].shape, "uint8"


def _seed(case: Case, spec: LaunchSpec) -> int:
    """What an emulated launch draws its order of workgroups and waves from: no two launches of a case have the same."""
    return zlib.crc32(f"{case.id} {spec.label}".encode())


def _most(shape: tuple[int, ...]) -> int:
    """Bytes above which something is no result of that shape, whatever its dtype; a wrong one may be larger."""
    return 32 * int(np.prod(shape)) + (1 << 20)


def _tokens(case: Case, name: str, arrays: Mapping[str, Array]) -> tuple[int, int] | None:
    """(axis, end) of the part of an operand that holds tokens, or None when all of it counts."""
    op = OPS[case.op]
    axis = op.padded.get(name)
    if axis is None or arrays[name].shape[axis] == 0:
        return None
    block = arrays[op.operands[0]].shape[axis] // arrays[name].shape[axis]
    return axis, min(arrays[name].shape[axis], -(-case.tokens // block))


def resident(pid: int) -> int:
    """Bytes of resident memory of a process; 0 when it is gone."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE
    except FileNotFoundError:
        if os.path.isdir("/proc/self"):
            return 0
    except (OSError, IndexError, ValueError):
        return 0
    answer = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return int(answer.stdout.strip() or 0) * 1024


# ---------------------------------------------------------------------------------------------------------------------
# The channel: a length, that much JSON, then the raw bytes that the JSON's "sizes" announces


def _send(channel: socket.socket, header: Mapping[str, Any], blobs: Sequence[Array]) -> None:
    text = json.dumps({**header, "sizes": [blob.nbytes for blob in blobs]}).encode()
    channel.sendall(_LENGTH.pack(len(text)) + text)
    for blob in blobs:
        channel.sendall(_bytes(blob).data)


def _receive(fill: Callable[[memoryview], None], most: int | None = None) -> tuple[dict[str, Any], list[Array]]:
    prefix = bytearray(_LENGTH.size)
    fill(memoryview(prefix))
    (length,) = _LENGTH.unpack(prefix)
    if length > 1 << 20:
        raise ValueError("a header is never that long")
    text = bytearray(length)
    fill(memoryview(text))
    header = json.loads(text)
    if most is not None and sum(header["sizes"]) > most:
        raise ValueError("more bytes than any answer has")
    blobs = []
    for size in header["sizes"]:
        blob = np.empty(size, np.uint8)
        fill(blob.data)
        blobs.append(blob)
    return header, blobs


# ---------------------------------------------------------------------------------------------------------------------
# The child's side

_libc = ctypes.CDLL(None, use_errno=True)
_fill_byte: int | None = None


class _Plane:
    """`size` bytes that end on a page boundary with an untouchable page behind; ahead: that begin on one, with such a
    page in front.

    data: the bytes. changed(): how many bytes of the margin on the other side no longer hold the pattern, in words.
    """

    def __init__(self, size: int, ahead: bool = False) -> None:
        page = mmap.PAGESIZE
        body = -(-(size + MARGIN) // page) * page
        self._map = mmap.mmap(-1, body + 2 * page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        whole = np.frombuffer(self._map, np.uint8)
        first = page if ahead else page + body - size
        self._margin = whole[page + size : page + body] if ahead else whole[page:first]
        self._margin[:] = CANARY
        self._side = "behind" if ahead else "before"
        self.data = whole[first : first + size]
        for guard in (start, start + page + body):
            if _libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(page), 0):
                raise OSError(ctypes.get_errno(), "mprotect refused a guard page")

    def changed(self) -> str | None:
        count = int(np.count_nonzero(self._margin != CANARY))
        return f"{count} bytes {self._side}" if count else None


@dataclass
class _Input:
    """An operand in its plane, with the bytes that it had when it came.

    tokens: (axis, end) of the part that holds tokens, or None. kept: which bytes are not padding, where the plane has
    another layout than that.
    """

    plane: _Plane
    pristine: Array
    array: Array
    tokens: tuple[int, int] | None
    kept: NDArray[np.bool_] | None = None

    def repair(self) -> bool:
        """Put the bytes back; True when a token's byte had changed (padding may be zeroed in place)."""
        if _equal(self.plane.data, self.pristine):
            return False
        if self.kept is not None:
            changed = bool(((self.plane.data != self.pristine) & self.kept).any())
            self.plane.data[:] = self.pristine
            return changed
        was = self.pristine.view(self.array.dtype).reshape(self.array.shape)
        now = self.array
        if self.tokens is not None:
            axis, end = self.tokens
            was, now = (np.ascontiguousarray(a[:end] if axis == 0 else a[:, :end]) for a in (was, now))
        changed = not _equal(_bytes(was), _bytes(now))
        self.plane.data[:] = self.pristine
        return changed


def _equal(a: Array, b: Array, step: int = 1 << 24) -> bool:
    return all(np.array_equal(a[i : i + step], b[i : i + step]) for i in range(0, a.size, step))


def _fill_allocations(byte: int | None) -> None:
    """From now on memory that is allocated and not written holds this byte; None: whatever it held."""
    global _fill_byte
    _fill_byte = byte
    with contextlib.suppress(AttributeError):
        # M_PERTURB is -6; glibc fills with the complement of the value's low byte, and 0 switches it off.
        _libc.mallopt(-6, 0 if byte is None else 0x100 | (byte ^ 0xFF))


def _filled(allocate: Callable[..., Array]) -> Callable[..., Array]:
    """numpy.empty or numpy.empty_like with numbers (and only numbers) filled with the launch's byte."""

    @functools.wraps(allocate)
    def wrapper(*args: Any, **kwargs: Any) -> Array:
        array = allocate(*args, **kwargs)
        plain = array.dtype.kind in "iufcV" and not array.dtype.hasobject and array.itemsize
        if plain and _fill_byte is not None:
            array[...] = np.frombuffer(bytes([_fill_byte]) * array.itemsize, array.dtype).reshape(())
        return array

    return wrapper


class _Torch:
    """How torch sees and gives the arrays of a launch: the same memory under torch's own dtypes."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        torch.set_num_threads(1)

    def dtype(self, name: str) -> Any:
        return getattr(self._torch, name)

    def wrap(self, array: Array) -> Any:
        return to_tensor(array)

    def strided(self, out: _Out) -> Any:
        return self.wrap(out.whole).as_strided(out.view.shape, [s // out.view.itemsize for s in out.view.strides])

    def start(self) -> None:
        """A launch's operands come next."""

    def wait(self) -> None:
        """Until the launch is done."""

    def finish(self) -> list[str]:
        """Wait for the launch and bring back what it wrote: what it overwrote beside its arrays, in words."""
        return []

    def unwrap(self, value: Any) -> Array:
        if not isinstance(value, self._torch.Tensor):
            raise _Returned(value, "a torch tensor")
        return to_array(value)

    def lost(self) -> bool:
        """Whether what launches run on is past use: a GPU's illegal access ends its context for the whole process."""
        return False

    def within(self, value: Any, array: Array) -> bool:
        """Whether a tensor that came back lies in the memory of an operand."""
        return bool(np.may_share_memory(to_array(value), array))

    def replay(self, function: Callable[..., Any], captured: Arguments, replaced: Arguments) -> Any:
        """What a launch on `captured` returns from a graph, with `replaced` written over its operands. _Uncaptured."""
        raise _Uncaptured("its tensors are not on a GPU")


class _Gpu(_Torch):
    """The same on a GPU. It has no guard pages: each array is copied between two margins that are compared after the
    launch, so a stray write shows and a stray read does not. What torch allocates is filled as NumPy's memory is."""

    def __init__(self, device: str = "cuda") -> None:
        super().__init__()
        torch = self._torch
        self._device = device
        self._empty = torch.empty
        self._graph: Any = None
        self._copies: list[tuple[Array, Any]] = []
        for owner, names in (
            (torch, ("empty", "empty_like", "empty_strided", "empty_permuted")),
            (torch.Tensor, ("new_empty", "new_empty_strided")),
        ):
            for name in names:
                setattr(owner, name, self._filled(getattr(owner, name)))

    def _filled(self, allocate: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(allocate)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            tensor = allocate(*args, **kwargs)
            if tensor.device.type == self._device and tensor.numel() and _fill_byte is not None:
                # A fresh allocation is a storage of its own: all of it, whatever the strides.
                whole = self._empty(0, dtype=self._torch.uint8, device=self._device)
                whole.set_(tensor.untyped_storage()).fill_(_fill_byte)
            return tensor

        return wrapper

    def start(self) -> None:
        self._copies.clear()  # of a launch that raised
        self._graph = None

    def wrap(self, array: Array) -> Any:
        size = array.nbytes
        whole = self._torch.full((MARGIN + size + MARGIN,), CANARY, dtype=self._torch.uint8, device=self._device)
        whole[MARGIN : MARGIN + size].copy_(to_tensor(_bytes(array)))
        self._copies.append((array, whole))
        flat = whole[MARGIN : MARGIN + size]
        return flat.view(self.dtype(array.dtype.name)).reshape(array.shape)

    def within(self, value: Any, array: Array) -> bool:
        storage = value.untyped_storage().data_ptr()
        return any(a is array and whole.untyped_storage().data_ptr() == storage for a, whole in self._copies)

    def replay(self, function: Callable[..., Any], captured: Arguments, replaced: Arguments) -> Any:
        cuda = self._torch.cuda
        function(*captured[0], **captured[1])  # whatever a first call sets up: compilers, handles
        self.wait()
        graph = cuda.CUDAGraph()
        try:
            with cuda.graph(graph):
                returned = function(*captured[0], **captured[1])
        except Exception as error:
            raise _Uncaptured(f"{type(error).__name__}: {' '.join(str(error).split())[:160]}") from None
        into, given = ([*places[0], *places[1].values()] for places in (captured, replaced))
        for place, value in zip(into, given, strict=True):
            if isinstance(place, self._torch.Tensor):
                place.view(self._torch.uint8).copy_(value.view(self._torch.uint8))
        graph.replay()
        self.wait()
        self._graph = graph  # whose memory the result lies in
        return returned

    def wait(self) -> None:
        if self._device == "cuda":
            self._torch.cuda.synchronize()

    def lost(self) -> bool:
        try:
            self.wait()
        except Exception:
            return True
        return False

    def finish(self) -> list[str]:
        self.wait()
        said = []
        for array, whole in self._copies:
            bytes_ = whole.cpu().numpy()
            margins = np.concatenate([bytes_[:MARGIN], bytes_[MARGIN + array.nbytes :]])
            if wrong := int(np.count_nonzero(margins != CANARY)):
                said.append(f"{wrong} bytes beside an array of {array.nbytes} bytes on the GPU")
            _bytes(array)[:] = bytes_[MARGIN : MARGIN + array.nbytes]
        self._copies.clear()
        return said


class _Uncaptured(Exception):
    """The launch cannot be captured in a graph; what the process can still do is anybody's guess."""

    def __init__(self, why: str) -> None:
        super().__init__(f"cannot be captured in a CUDA graph: {why}")


class _Returned(Exception):
    """The callable returned something of another kind than its op gives."""

    def __init__(self, value: Any, expected: str) -> None:
        super().__init__(f"returned {_a(type(value).__name__)}, expected {expected}")


def _a(noun: str) -> str:
    return f"{'an' if noun[:1] in 'aeiouAEIOU' else 'a'} {noun}"


def _launches_flydsl(build: Build) -> bool:
    """Of the emulated builds those that need FlyDSL launch through it; ours may run from committed machine code."""
    return is_emulated(build.device) and "flydsl" in build.requires


def _virtual_device() -> Any:
    from mxgate.kernels.gfx950 import virtual  # not for every child: it takes a while

    return virtual.install()


@contextlib.contextmanager
def _understood() -> Iterator[None]:
    """What a build meets for want of a GPU, or of an instruction in the emulator, says nothing about the build."""
    try:
        yield
    except ValueError as error:
        emulator = sys.modules.get("mxgate.kernels.gfx950")
        if emulator is None or not isinstance(error, emulator.TextError):
            raise
        raise Unavailable(f"launches machine code that the emulator does not understand: {error}") from None
    except RuntimeError as error:
        if not all(name in str(error) and os.environ.get(name) == value for name, value in _NO_LAUNCH.items()):
            raise
        why = f"launches a FlyDSL kernel, and there is no {HIP} here"
        raise Unavailable(f"{why}: give --device emu to run it on the emulator") from None


class _Server:
    """One build and the operands of the case at hand."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.case = 0
        self.kept: list[tuple[Any, str, int]] = []  # what the last calls returned, its bytes then, and how many
        self.inputs: dict[str, dict[str, _Input]] = {}
        self.headers: dict[str, dict[str, Any]] = {}
        self.torch: _Torch | None = None

    def load(self, header: dict[str, Any]) -> dict[str, Any]:
        self.build = build_from(header["build"])
        self.torch = (_Gpu if is_gpu(self.build.device) else _Torch)() if self.build.arrays == "torch" else None
        for name in ("empty", "empty_like"):
            setattr(np, name, _filled(getattr(np, name)))
        self.device = _virtual_device() if _launches_flydsl(self.build) else None
        if self.device is None and not hip():
            os.environ.update(_NO_LAUNCH)
        with _understood():
            self.function = self.build.load()
        torch = self.torch
        self.layout = layout(self.build, *((torch.wrap, torch.unwrap) if torch else (np.asarray, np.asarray)))
        self.keywords = _keywords(self.function)
        return {"keywords": self.keywords}

    def operands(self, header: dict[str, Any], blobs: list[Array]) -> dict[str, Any]:
        if header["case"] != self.case:
            self.case = header["case"]
            self.inputs.clear()
            self.headers.clear()
        planes = {}
        given = [b.view(dtype_of(s["dtype"])).reshape(s["shape"]) for s, b in zip(header["arrays"], blobs, strict=True)]
        offsets = next((a for s, a in zip(header["arrays"], given, strict=True) if s["name"] == "offsets"), None)
        for spec, operand in zip(header["arrays"], given, strict=True):
            name, tokens, kept = spec["name"], spec["tokens"] and tuple(spec["tokens"]), None
            if self.layout is not None and offsets is not None and name.endswith("_scales"):
                operand, kept = laid_out(self.layout, operand, name, offsets, tokens)
                tokens = None
            plane = _Plane(operand.nbytes, ahead=header["variant"] == AHEAD)
            plane.data[:] = _bytes(operand)
            array = plane.data.view(operand.dtype).reshape(operand.shape)
            planes[name] = _Input(plane, _bytes(operand), array, tokens, kept)
        self.inputs[header["variant"]] = planes
        self.headers[header["variant"]] = header
        return {}

    def arguments(self, header: dict[str, Any]) -> Arguments:
        planes, sent = self.inputs[header["variant"]], self.headers[header["variant"]]
        wrap = self.torch.wrap if self.torch else (lambda array: array)
        values = {**sent["values"], **{name: wrap(planes[name].array) for name in planes}}
        keywords = {name: values[name] for name in sent["keywords"]}
        if header["out_dtype"] is not None:
            name = header["out_dtype"]
            keywords["out_dtype"] = self.torch.dtype(name) if self.torch else dtype_of(name)
        return [values[name] for name in sent["order"]], keywords

    def call(self, header: dict[str, Any]) -> tuple[dict[str, Any], list[Array]]:
        planes = self.inputs[header["variant"]]
        if self.torch is not None:
            self.torch.start()
        positional, keywords = self.arguments(header)
        out = _Out(header) if header["out"] != "none" else None
        if out is not None:
            keywords["out"] = out.view if self.torch is None else self.torch.strided(out)
        keywords.update(
            (name, header[name]) for name in ("seed", "model") if header[name] is not None and name in self.keywords
        )
        _fill_allocations(header["fill"])
        if header["captured"] is not None:
            if self.torch is None:
                raise _Uncaptured("it takes NumPy arrays; expected arrays='torch', or capturable=False in its record")
            captured = self.arguments({**header, "variant": header["captured"]})
            returned = self.torch.replay(self.function, captured, (positional, keywords))
        else:
            returned = self._launch(header, positional, keywords)
        if self.torch is not None:
            self.torch.wait()
        parts = [] if out is not None else self.unwrap(returned)
        total = sum(part.nbytes for part in parts)
        if total > header["most"]:
            raise ValueError(f"returned {total} bytes, which no {self.build.op} of this case holds")
        aliases = None
        if out is None:
            within: Callable[[Any, Array], bool] = self.torch.within if self.torch else np.may_share_memory
            values = returned if self.build.op == "quantize" else (returned,)
            aliases = next((n for n in planes if any(within(v, planes[n].array) for v in values)), None)
        margins = self.overwritten()
        margins += self.torch.finish() if self.torch is not None else []
        if out is not None:
            parts = [np.ascontiguousarray(out.view)]
        if out is None and header["captured"] is None:
            self.kept.append((returned, digest(parts), total))
        parts = self.plain([np.array(part, order="C") for part in parts], header)
        for operand in self.inputs[header["captured"]].values() if header["captured"] else ():
            operand.repair()
        changed = [name for name, operand in planes.items() if operand.repair()]
        margins += [f"{said} operand {n}" for n, i in planes.items() if (said := i.plane.changed())]
        if out is not None and (beyond := out.changed()):
            margins.append(beyond)
        return {
            "parts": [{"dtype": p.dtype.name, "shape": p.shape} for p in parts],
            "canaries": f"wrote over {', '.join(margins)}" if margins else None,
            "inputs_changed": changed,
            "aliases": aliases,
        }, parts

    def overwritten(self) -> list[str]:
        """Which earlier results have changed, in words: the last one, and those that have been kept long enough."""
        said, kept = [], self.kept
        if kept and digest(self.unwrap(kept[-1][0])) != kept[-1][1]:
            said.append("the result of the call before")
            kept.pop()
        while len(kept) >= KEPT or (len(kept) > 1 and sum(size for *_, size in kept) > KEPT_BYTES):
            returned, then, _ = kept.pop(0)
            if digest(self.unwrap(returned)) != then:
                said.append(f"the result of {len(kept) + 1} calls before")
        return said

    def _launch(self, header: Mapping[str, Any], positional: list[Any], keywords: dict[str, Any]) -> Any:
        if self.device is not None:
            self.device.begin(header["seed"] or 0, header["model"] or "exact-rne")
        with _understood():
            returned = self.function(*positional, **keywords)
            if self.device is not None:
                self.device.check()  # not in the launch itself, which the build may have wrapped in a `try`
        if self.device is not None and not self.device.results and header["work"]:
            raise Unavailable("launched nothing on the virtual gfx950, so nothing of it was judged there")
        return returned

    def figures(self) -> dict[str, Any]:
        from mxgate.kernels.gfx950.ledger import launched

        return {"kernels": launched(self.device.results if self.device is not None else ())}

    def unwrap(self, returned: Any) -> list[Array]:
        values = returned if self.build.op == "quantize" else (returned,)
        if not isinstance(values, tuple | list) or len(values) != (2 if self.build.op == "quantize" else 1):
            raise _Returned(values, "a pair (elements, scales)")
        if self.torch is not None:
            return [self.torch.unwrap(value) for value in values]
        for value in values:
            if not isinstance(value, np.ndarray):
                raise _Returned(value, "a NumPy array")
            if value.dtype.hasobject or dtype_of(value.dtype.name) != value.dtype:
                raise ValueError(f"returned an array of dtype {value.dtype}")
        return list(values)

    def plain(self, parts: list[Array], header: dict[str, Any]) -> list[Array]:
        """The parts with their scales row-major."""
        return quantized(self.build, parts, self.headers[header["variant"]]["values"].get("axis", 0))

    def clock(self, header: dict[str, Any]) -> tuple[dict[str, Any], list[Array]]:
        _fill_allocations(None)
        positional, keywords = self.arguments(header)
        times: list[float] = []
        end = time.perf_counter() + header["seconds"]
        while True:
            before = time.perf_counter()
            returned = self.function(*positional, **keywords)
            if self.torch:
                self.torch.wait()
            after = time.perf_counter()
            times.append(after - before)
            if after > end:
                break
        last = digest(self.plain([np.array(part, order="C") for part in self.unwrap(returned)], header))
        for operand in self.inputs[header["variant"]].values():
            operand.repair()
        return {"digest": last}, [np.array(times, np.float64)]


class _Out:
    """A caller's output buffer: flush against a guard page, and pitched with canary bytes between its rows."""

    def __init__(self, header: dict[str, Any]) -> None:
        dtype, shape = dtype_of(header["dtype"]), tuple(header["shape"])
        pitch = shape[-1] + (GAP if header["out"] == "pitched" else 0)
        rows = int(np.prod(shape[:-1]))
        self.plane = _Plane(rows * pitch * dtype.itemsize)
        self.plane.data[:] = CANARY
        self.whole = self.plane.data.view(dtype)
        grid = self.whole.reshape(rows, pitch)
        self._gaps = grid[:, shape[-1] :].view(np.uint8)
        grid[:, : shape[-1]].view(np.uint8)[...] = header["fill"]
        self.view = grid.reshape(*shape[:-1], pitch)[..., : shape[-1]]

    def changed(self) -> str | None:
        wrong = np.flatnonzero((self._gaps != CANARY).any(axis=1))
        if wrong.size:
            return f"the gap after row {wrong[0]} of its output, {wrong.size} rows in all"
        return f"{said} its output" if (said := self.plane.changed()) else None


def _keywords(function: Callable[..., Any]) -> list[str]:
    known = ("out", "out_dtype", "bias", "format", "seed", "model")
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return []
    return [name for name in known if name in parameters]


def _complaint(error: BaseException) -> str:
    """The words of Launch.error for whatever the build raised, with the innermost line of its own. They go to
    terminals and into pages: what is no printable character is told by its number."""
    said = str(error)
    if not isinstance(error, _Returned | _Uncaptured | BuildError | LayoutError | Unavailable):
        at = _site([(frame.filename, frame.lineno) for frame in reversed(traceback.extract_tb(error.__traceback__))])
        text = " ".join(said.split())
        said = f"raised {type(error).__name__}{at}{f': {text[:300]}' if text else ''}"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in said)


def _serve(channel: socket.socket) -> None:
    server = _Server(channel)
    owner = os.getpid()

    def fill(into: memoryview) -> None:
        done = 0
        while done < len(into):
            got = channel.recv_into(into[done:])
            if got == 0:
                os._exit(0)  # the runner is gone or has no more launches
            done += got

    while True:
        header, blobs = _receive(fill)
        parts: list[Array] = []
        try:
            if header["do"] == "load":
                reply = server.load(header)
            elif header["do"] == "operands":
                reply = server.operands(header, blobs)
            elif header["do"] == "figures":
                reply = server.figures()
            elif header["do"] == "clock":
                reply, parts = server.clock(header)
            else:
                reply, parts = server.call(header)
        except BaseException as error:  # SystemExit and KeyboardInterrupt are the build's doing as well
            spoilt = isinstance(error, _Uncaptured) or (server.torch is not None and server.torch.lost())
            unavailable = isinstance(error, Unavailable)
            reply = {"error": _complaint(error), "unavailable": unavailable, "spoilt": spoilt}
            parts = []
        if os.getpid() != owner:
            os._exit(0)  # the build forked and let its copy of this process return
        try:
            _send(channel, reply, parts)
        except OSError:
            os._exit(_CLOSED)


def main() -> None:
    import faulthandler

    faulthandler.enable()
    if sys.platform == "linux":
        _libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a hanging build does not outlive a killed runner
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # should memory run out, this process goes first and not the runner
    channel = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(channel.fileno(), False)
    _serve(channel)
