"""What runs in a child process: one build, and the operands of the case at hand.

It loads the build once, and serves launches until the channel to the runner (child.py) closes. The build's operands lie
in guarded memory. After each launch they are compared with what they were, and so are the result of the call before and
results of some calls ago.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from mxgate.conformance.channel import CLOSED, receive, send
from mxgate.conformance.complaint import Returned, Uncaptured, complaint
from mxgate.conformance.guard import Input, Out, Plane, fill_allocations, filled
from mxgate.conformance.launch import Array, bytes_of, digest, launches_flydsl
from mxgate.conformance.layout import laid_out, layout, quantized
from mxgate.conformance.torch_arrays import Arguments, GpuArrays, TorchArrays
from mxgate.kernels.build import HIP, Unavailable, build_from, hip
from mxgate.kernels.gpu import is_gpu
from mxgate.kernels.tensors import dtype_of

# FlyDSL looks at this before each launch, and raises when it is not its backend's. A launch would abort the process.
_NO_LAUNCH = {"FLYDSL_RUNTIME_KIND": "none"}
# The operands of this variant lie flush against the page in front of them, those of all others against the one behind.
AHEAD = "one"
# A result is compared again so many calls after its own: of N buffers that are returned by turns, the first such age of
# at least N finds an old result gone. And how many bytes of results are kept that long.
AGES, KEPT_BYTES = (1, 8, 64), 64 << 20


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


class Server:
    """One build and the operands of the case at hand."""

    def __init__(self) -> None:
        self.case = 0
        self.kept: list[tuple[Any, str, int]] = []  # what the last calls returned, its bytes then, and how many
        self.inputs: dict[str, dict[str, Input]] = {}
        self.headers: dict[str, dict[str, Any]] = {}
        self.torch: TorchArrays | None = None

    def load(self, header: dict[str, Any]) -> dict[str, Any]:
        self.build = build_from(header["build"])
        if self.build.arrays == "torch":
            self.torch = GpuArrays() if is_gpu(self.build.device) else TorchArrays()
        for name in ("empty", "empty_like"):
            setattr(np, name, filled(getattr(np, name)))
        self.device = _virtual_device() if launches_flydsl(self.build) else None
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
            plane = Plane(operand.nbytes, ahead=header["variant"] == AHEAD)
            plane.data[:] = bytes_of(operand)
            array = plane.data.view(operand.dtype).reshape(operand.shape)
            planes[name] = Input(plane, bytes_of(operand), array, tokens, kept)
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
        out = None
        if header["out"] != "none":
            shape, dtype = tuple(header["shape"]), dtype_of(header["dtype"])
            out = Out(shape, dtype, pitched=header["out"] == "pitched", fill=header["fill"])
        if out is not None:
            keywords["out"] = out.view if self.torch is None else self.torch.strided(out)
        keywords.update(
            (name, header[name]) for name in ("seed", "model") if header[name] is not None and name in self.keywords
        )
        fill_allocations(header["fill"])
        if header["captured"] is not None:
            if self.torch is None:
                raise Uncaptured("it takes NumPy arrays; expected arrays='torch', or capturable=False in its record")
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
        """Which earlier results have changed, in words: those of an age, and those that there is no more room for."""
        said, kept = [], self.kept
        while len(kept) > 1 and sum(size for *_, size in kept) > KEPT_BYTES:
            said += self.changed(len(kept))
            kept.pop(0)
        for age in reversed(AGES):  # what has changed is told once, and goes
            if told := self.changed(age):
                said += told
                del kept[-age]
        del kept[: max(len(kept) + 1 - AGES[-1], 0)]
        return said

    def changed(self, age: int) -> list[str]:
        """The result of so many calls before, in words, if there is one and its bytes have changed."""
        if age > len(self.kept) or digest(self.unwrap(self.kept[-age][0])) == self.kept[-age][1]:
            return []
        return ["the result of the call before" if age == 1 else f"the result of {age} calls before"]

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
            raise Returned(values, "a pair (elements, scales)")
        if self.torch is not None:
            return [self.torch.unwrap(value) for value in values]
        for value in values:
            if not isinstance(value, np.ndarray):
                raise Returned(value, "a NumPy array")
            if value.dtype.hasobject or dtype_of(value.dtype.name) != value.dtype:
                raise ValueError(f"returned an array of dtype {value.dtype}")
        return list(values)

    def plain(self, parts: list[Array], header: dict[str, Any]) -> list[Array]:
        """The parts with their scales row-major."""
        return quantized(self.build, parts, self.headers[header["variant"]]["values"].get("axis", 0))

    def clock(self, header: dict[str, Any]) -> tuple[dict[str, Any], list[Array]]:
        fill_allocations(None)
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


def _keywords(function: Callable[..., Any]) -> list[str]:
    known = ("out", "out_dtype", "bias", "format", "seed", "model")
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return []
    return [name for name in known if name in parameters]


def _serve(channel: socket.socket) -> None:
    server = Server()
    owner = os.getpid()

    def fill(into: memoryview) -> None:
        done = 0
        while done < len(into):
            got = channel.recv_into(into[done:])
            if got == 0:
                os._exit(0)  # the runner is gone or has no more launches
            done += got

    while True:
        header, blobs = receive(fill)
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
            spoilt = isinstance(error, Uncaptured) or (server.torch is not None and server.torch.lost())
            unavailable = isinstance(error, Unavailable)
            reply = {"error": complaint(error), "unavailable": unavailable, "spoilt": spoilt}
            parts = []
        if os.getpid() != owner:
            os._exit(0)  # the build forked and let its copy of this process return
        try:
            send(channel, reply, parts)
        except OSError:
            os._exit(CLOSED)


def main() -> None:
    import faulthandler

    faulthandler.enable()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a hanging build does not outlive a killed runner
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # should memory run out, this process goes first and not the runner
    channel = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(channel.fileno(), False)
    _serve(channel)
