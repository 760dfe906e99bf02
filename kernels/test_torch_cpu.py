"""The torch builds against the NumPy reference, and what the record says without torch.

Not caught here: rounding within the accumulator's bound, which is the gates' business.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mxgate.kernels import numpy_reference as reference
from mxgate.kernels import torch_cpu

torch = pytest.importorskip("torch")

DESIGNS = ("dequant", "blocks")
OPS = ("forward", "dgrad", "wgrad")


def tensor(array: np.ndarray[Any, Any]) -> Any:
    """The same bytes as a torch tensor; ml_dtypes and torch give their types the same names."""
    if array.dtype.itemsize > 1:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(np.uint8)).view(getattr(torch, array.dtype.name))


def run(op: str, design: str, args: list[Any], **options: Any) -> bytes:
    out = getattr(torch_cpu, f"{op}_{design}")(*map(tensor, args), **options)
    return bytes(out.contiguous().view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("formats", [("e4m3fn", "e5m2"), ("e5m2fnuz", "e4m3fnuz")])
@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("op", OPS)
def test_whole_numbers_give_the_reference_bit_for_bit(
    op: str, design: str, formats: tuple[str, str], dtype: str, make: Any
) -> None:
    args = make(op, (32, 0, 96, 64), buffer=256, formats=formats)
    expected = getattr(reference, op)(*args, out_dtype=dtype).tobytes()
    assert run(op, design, args, out_dtype=getattr(torch, dtype)) == expected
    assert run(op, design, args, out_dtype=dtype) == expected


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("op", OPS)
def test_every_pair_of_scales(op: str, design: str, make: Any) -> None:
    """One block, elements +-1: all 256 x 256 pairs of scale bytes, 0x00 and NaN among them."""
    shape = {"forward": ((256, 32), (1, 256, 32)), "dgrad": ((256, 32), (1, 32, 256)), "wgrad": ((256, 32), (256, 32))}
    scale_shape = {"forward": ((256, 1), (1, 256, 1)), "dgrad": ((256, 1), (1, 1, 256)), "wgrad": ((256, 1), (256, 1))}
    args: list[Any] = []
    for elements, scales in zip(shape[op], scale_shape[op], strict=True):
        args.append(np.full(elements, 0x38, np.uint8).view(ml_dtypes.float8_e4m3fn))
        args.append(np.arange(256, dtype=np.uint8).reshape(scales).view(ml_dtypes.float8_e8m0fnu))
    args.append(np.array([32 if op == "wgrad" else 256], np.int32))
    expected = np.frombuffer(getattr(reference, op)(*args, out_dtype="float32").tobytes(), np.float32)
    got = np.frombuffer(run(op, design, args, out_dtype="float32"), np.float32)
    assert ((got.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(got) & np.isnan(expected))).all()
    assert np.isnan(expected).sum() == 2 * 256 - 1


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("op", OPS)
def test_a_callers_buffer_with_a_padded_pitch(op: str, design: str, make: Any) -> None:
    args = make(op, (32, 64), buffer=128)
    plain = getattr(reference, op)(*args)
    wide = torch.full((*plain.shape[:-1], plain.shape[-1] + 3), -1.0, dtype=torch.bfloat16)
    out = getattr(torch_cpu, f"{op}_{design}")(*map(tensor, args), out=wide[..., :-3])
    assert out.contiguous().view(torch.uint8).numpy().tobytes() == plain.tobytes()
    assert (wide[..., -3:] == -1).all()


@pytest.mark.parametrize("design", DESIGNS)
def test_bias_is_added_before_the_one_rounding(design: str, make: Any) -> None:
    args = make("forward", (3, 0, 5), n=32, k=64, buffer=10)
    bias = (np.arange(96, dtype=np.float32) / 8).reshape(3, 32)
    expected = reference.forward(*args, bias=bias).tobytes()
    assert run("forward", design, args, bias=torch.from_numpy(bias)) == expected


def test_float64_sums_are_rounded_once() -> None:
    x = np.array([1 + 2**-8 + 2**-40, 1 + 2**-8, 1 - 2**-9 - 2**-50, 65519.999999, 1e300, np.nan, -np.inf, -0.0])
    for name in ("bfloat16", "float16"):
        place = torch.empty(8, dtype=getattr(torch, name))
        torch_cpu._store(place, torch.from_numpy(x))
        got = place.view(torch.int16).numpy().view(np.uint16)
        expected = reference.narrow(x, name).view(np.uint16)
        nan = np.isnan(x)
        assert (got[~nan] == expected[~nan]).all() and np.isnan(place.float().numpy()[nan]).all()


def test_listing_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from mxgate.kernels.build import registry\n"
        "print(sum(b.arrays == 'torch' and b.device == 'cpu' for b in registry().values()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "6"
