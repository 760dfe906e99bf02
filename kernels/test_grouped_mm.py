"""Training on builds: autograd is given what the builds compute. Convergence is conformance/test_training.py's."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mxgate import oracle
from mxgate.kernels.build import BuildError, registry
from mxgate.kernels.grouped_mm import LaunchError, Recipe, grouped_mm, mx_weight, recipe
from mxgate.kernels.tensors import to_array

ENDS = torch.tensor([32, 32, 96], dtype=torch.int32)


def operands() -> tuple[Any, Any, Any]:
    """x [112, 64], the last 16 rows past the tokens and not finite; w [3, 32, 64]; dy [112, 32]."""
    generator = torch.Generator().manual_seed(0)
    x, w, dy = (torch.randn(s, generator=generator).bfloat16() for s in ((112, 64), (3, 32, 64), (112, 32)))
    x[96:] = torch.nan
    return x, w, dy


def expected(how: dict[str, Any], x: Any, w: Any, dy: Any) -> list[np.ndarray[Any, Any]]:
    """y, dx, dw by the oracle: operands quantized along each contraction, the exact sum rounded once."""
    formats = [how.get(name, "e4m3fn") for name in ("activations", "weights", "gradients")]
    profile = how.get("profile", "ocp")

    def q(t: Any, axis: int, which: int) -> oracle.MXArray:
        return oracle.quantize(np.ascontiguousarray(to_array(t)), axis=axis, format=formats[which], profile=profile)

    pad = [F.pad(t, (0, 0, 0, 16)).t() for t in (dy, x)]
    ends = ENDS.numpy()
    answers = (
        oracle.forward(q(x, 1, 0), q(w, 2, 1), ends),
        oracle.dgrad(q(dy, 1, 2), q(w, 1, 1), ends),
        oracle.wgrad(q(pad[0], 1, 2), q(pad[1], 1, 0), ends),
    )
    return [oracle.bound.round_to(a.value, to_array(x).dtype) for a in answers]


@pytest.mark.parametrize(
    "how", [{}, {"gradients": "e5m2"}, {"activations": "e5m2", "weights": "e5m2"}, {"profile": "torchao-rceil"}]
)
@pytest.mark.parametrize("design", ["torch_dequant", "numpy_reference"])
def test_all_three_products_are_those_of_the_oracle(how: dict[str, Any], design: str) -> None:
    """The builds accumulate wide enough here that the exact sum rounded once is what they give, bit for bit."""
    x, w, dy = operands()
    x.requires_grad_()
    w.requires_grad_()
    y = grouped_mm(x, w, ENDS, recipe(*(f"{op}/{design}" for op in ("forward", "dgrad", "wgrad")), **how))
    y.backward(dy)  # type: ignore[no-untyped-call]
    for got, want in zip((y, x.grad, w.grad), expected(how, x, w, dy), strict=True):
        assert to_array(got).tobytes() == want.tobytes()
    assert not y[96:].any() and not w.grad[1].any()


def test_a_weight_sends_grouped_mm_to_its_recipe() -> None:
    """Also as an nn.Parameter and after an optimizer's step; the plain call is left alone."""
    x, w, dy = operands()
    how = recipe()
    p = torch.nn.Parameter(mx_weight(w.clone(), how))
    optimizer = torch.optim.SGD([p], lr=0.5)
    y = F.grouped_mm(x, p.transpose(-2, -1), offs=ENDS)
    assert torch.equal(y, grouped_mm(x, w, ENDS, how))
    y.backward(dy)  # type: ignore[no-untyped-call]
    optimizer.step()
    plain = w.clone().requires_grad_()
    grouped_mm(x, plain, ENDS, how).backward(dy)  # type: ignore[no-untyped-call]
    moved = (w - 0.5 * plain.grad).detach()
    assert torch.equal(p.detach().as_subclass(torch.Tensor), moved)
    again = F.grouped_mm(x, p.transpose(-2, -1), offs=ENDS)
    assert torch.equal(again, grouped_mm(x, moved, ENDS, how))
    assert not torch.equal(F.grouped_mm(x[:96], w.transpose(-2, -1), offs=ENDS), y[:96])


def test_a_weight_is_copied_moved_and_loaded_with_its_module() -> None:
    x, w, dy = operands()
    model = torch.nn.Module()
    model.p = torch.nn.Parameter(mx_weight(w, recipe()))
    loaded = torch.nn.Module()
    loaded.p = torch.nn.Parameter(mx_weight(torch.zeros_like(w), recipe()))
    loaded.load_state_dict(model.state_dict())
    copied = copy.deepcopy(model)
    want = F.grouped_mm(x, model.p.mT, offs=ENDS)
    for other in (copied, copied.float(), loaded):
        assert isinstance(other.p, torch.nn.Parameter) and other.p.data_ptr() != model.p.data_ptr()
        got = F.grouped_mm(x, other.p.mT, offs=ENDS)
        assert torch.equal(got, want)
        got.backward(dy)  # type: ignore[no-untyped-call]
        assert other.p.grad is not None and model.p.grad is None
    pair = copy.deepcopy([model.p, model.p])
    assert pair[0] is pair[1]
    with pytest.raises(RuntimeError, match="that autograd did not compute"):
        copy.deepcopy(model.p * 2)


def test_stochastic_gradients_repeat_with_the_seed_and_differ_between_calls() -> None:
    x, w, dy = operands()
    grads = []
    for seed in (1, 1, 2):
        p = w.clone().requires_grad_()
        grouped_mm(x, p, ENDS, recipe(stochastic=True, seed=seed)).backward(dy)  # type: ignore[no-untyped-call]
        grads.append(p.grad.float())
    assert torch.equal(grads[0], grads[1]) and not torch.equal(grads[0], grads[2])
    how, p = recipe(stochastic=True), w.clone().requires_grad_()
    for _ in range(2):
        grouped_mm(x, p, ENDS, how).backward(dy)  # type: ignore[no-untyped-call]
    first = w.clone().requires_grad_()
    grouped_mm(x, first, ENDS, replace(how, _calls=iter(range(10)))).backward(dy)  # type: ignore[no-untyped-call]
    assert not torch.equal(p.grad, 2 * first.grad)


def test_what_is_refused() -> None:
    x, w, _ = operands()
    p = mx_weight(w, recipe())
    odd, falling, long = (torch.tensor([32, end, 96], dtype=torch.int32) for end in (40, 0, 128))
    for call, words in (
        (lambda: F.grouped_mm(x, p.transpose(-2, -1), offs=ENDS, bias=torch.zeros(3, 32)), "takes no bias"),
        (lambda: F.grouped_mm(x, p.transpose(-2, -1)), "without offsets"),
        (lambda: F.grouped_mm(x, p.transpose(-2, -1), offs=ENDS, out_dtype=torch.float32), "writes bfloat16"),
        (lambda: grouped_mm(x, w.clone().requires_grad_(), odd, recipe()), "need multiples of 32 tokens"),
        (lambda: grouped_mm(x, w, falling, recipe()), "expected no decrease"),
        (lambda: grouped_mm(x, w, long, recipe()), "past the buffer"),
        (lambda: grouped_mm(x[:, :48], w, ENDS, recipe()), "expected x"),
        (lambda: mx_weight(w[0], recipe()), "expected"),
    ):
        with pytest.raises(ValueError, match=words):
            call()  # type: ignore[no-untyped-call]
    with pytest.raises(TypeError, match="expected an int32 array"):
        grouped_mm(x, w, ENDS.long(), recipe())
    for how, words in (
        ({"gradients": "e3m4"}, "does not take 'e3m4'"),
        ({"profile": "none"}, "unknown profile 'none'"),
        ({"profile": "aiter", "gradients": "e5m2"}, "never measured for format 'e5m2'"),
        ({"wgrad": "dgrad/torch_dequant"}, "expected a build of wgrad"),
        ({"wgrad": "wgrad/nobody"}, "no build named 'wgrad/nobody'"),
    ):
        with pytest.raises(BuildError, match=words):
            recipe(**how)
    right = recipe()
    only = replace(right.wgrad, out_dtypes=("float32",))
    with pytest.raises(BuildError, match="writes float32; training needs bfloat16"):
        Recipe(right.forward, right.dgrad, only)
    for loaded, said in (
        (lambda *given: given[4], "returned torch.int32"),
        (lambda *given: given[4][9], "raised IndexError"),
    ):
        with pytest.raises(LaunchError, match=f"forward/torch_dequant {said}"):
            grouped_mm(x, w, ENDS, replace(right, _loaded={"forward": loaded}))


def test_a_gpu_builds_operands_go_there_and_its_result_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU is this CPU, under a count of what is sent to it."""
    sent = []

    def cuda(tensor: torch.Tensor) -> torch.Tensor:
        sent.append(tensor)
        return tensor

    monkeypatch.setattr(torch.Tensor, "cuda", cuda)
    x, w, dy = operands()
    here = [registry()[f"{op}/torch_dequant"] for op in ("forward", "dgrad", "wgrad")]
    found = []
    for builds in (here, [replace(build, device="cuda") for build in here]):
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        y = grouped_mm(x, w, ENDS, Recipe(builds[0], builds[1], builds[2]))
        torch.autograd.backward(y, dy)
        found.append([y, x.grad, w.grad])
    assert len(sent) == 3 * 5
    for one, other in zip(*found, strict=True):
        assert one.device == other.device and torch.equal(one.view(torch.int16), other.view(torch.int16))
