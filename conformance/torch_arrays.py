"""How torch sees and gives the arrays of a launch: on the CPU, and on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from mxgate.conformance.complaint import Returned, Uncaptured
from mxgate.conformance.guard import CANARY, MARGIN, Out, fill_byte
from mxgate.conformance.launch import Array, bytes_of
from mxgate.kernels.tensors import to_array, to_tensor

Arguments = tuple[list[Any], dict[str, Any]]  # of a call, by place and by name


class TorchArrays:
    """How torch sees and gives the arrays of a launch: the same memory under torch's own dtypes."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        torch.set_num_threads(1)

    def dtype(self, name: str) -> Any:
        return getattr(self._torch, name)

    def wrap(self, array: Array) -> Any:
        return to_tensor(array)

    def strided(self, out: Out) -> Any:
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
            raise Returned(value, "a torch tensor")
        return to_array(value)

    def lost(self) -> bool:
        """Whether what launches run on is past use: a GPU's illegal access ends its context for the whole process."""
        return False

    def within(self, value: Any, array: Array) -> bool:
        """Whether a tensor that came back lies in the memory of an operand."""
        return bool(np.may_share_memory(to_array(value), array))

    def replay(self, function: Callable[..., Any], captured: Arguments, replaced: Arguments) -> Any:
        """What a launch on `captured` returns from a graph, with `replaced` written over its operands. Uncaptured."""
        raise Uncaptured("its tensors are not on a GPU")


class GpuArrays(TorchArrays):
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
            if tensor.device.type == self._device and tensor.numel() and (byte := fill_byte()) is not None:
                # A fresh allocation is a storage of its own: all of it, whatever the strides.
                whole = self._empty(0, dtype=self._torch.uint8, device=self._device)
                whole.set_(tensor.untyped_storage()).fill_(byte)
            return tensor

        return wrapper

    def start(self) -> None:
        self._copies.clear()  # of a launch that raised
        self._graph = None

    def wrap(self, array: Array) -> Any:
        size = array.nbytes
        whole = self._torch.full((MARGIN + size + MARGIN,), CANARY, dtype=self._torch.uint8, device=self._device)
        whole[MARGIN : MARGIN + size].copy_(to_tensor(bytes_of(array)))
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
            raise Uncaptured(f"{type(error).__name__}: {' '.join(str(error).split())[:160]}") from None
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
            bytes_of(array)[:] = bytes_[MARGIN : MARGIN + array.nbytes]
        self._copies.clear()
        return said
