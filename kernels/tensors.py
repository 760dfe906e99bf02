"""Torch tensors as NumPy arrays and back, bit for bit: NumPy knows the short types through ml_dtypes only.

torch is imported where it is needed, so that importing this costs nothing without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor


def dtype_of(name: str) -> np.dtype[Any]:
    """The NumPy type of a name that torch and NumPy share, ml_dtypes' included. TypeError for another."""
    return np.dtype(getattr(ml_dtypes, name, name))


def to_array(tensor: Tensor) -> NDArray[Any]:
    """The tensor's bits as a C-contiguous array; over the tensor's own memory where that is contiguous on the CPU."""
    import torch

    held = tensor.detach().cpu().contiguous()
    flat: NDArray[Any] = held.reshape(-1).view(torch.uint8).numpy()
    return flat.view(dtype_of(str(held.dtype).removeprefix("torch."))).reshape(tuple(held.shape))


def to_tensor(array: NDArray[Any]) -> Tensor:
    """A CPU tensor over the array's memory (over a copy's where it is not C-contiguous)."""
    import torch

    flat = torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    typed: Tensor = flat.view(getattr(torch, array.dtype.name)).reshape(array.shape)
    return typed
