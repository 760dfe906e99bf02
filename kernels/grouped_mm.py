"""Train on any triple of builds: an autograd function, and a weight that sends grouped_mm to it.

Every operand is quantized along the axis that its GEMM contracts, so X and dY are quantized along both axes and W along
both of its own: the gradient of a quantized product is not the transpose of what the forward pass used.

torch is imported here; nothing of the CPU gate imports this module.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mxgate import oracle
from mxgate.kernels.build import BLOCK, GEMMS, Build, BuildError, registry
from mxgate.kernels.gpu import is_gpu
from mxgate.kernels.tensors import to_array, to_tensor
from mxgate.oracle.formats import FORMATS
from mxgate.oracle.groups import check_offsets
from mxgate.oracle.scales import Profile, profile_for

_ELEMENTS = {name: getattr(torch, f"float8_{name}") for name in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")}


class LaunchError(RuntimeError):
    """A build raised, or returned something else than its op's result, in the middle of a training step."""


@dataclass(frozen=True)
class Recipe:
    """How to train: the builds of the three GEMMs and what they are given.

    activations, weights, gradients: element formats. profile: of oracle.PROFILES by name, or one of your own.
    stochastic: round gradients so, with `seed` and the number of the call. BuildError for builds of other ops, and for
    formats that a build or the profile does not have.
    """

    forward: Build
    dgrad: Build
    wgrad: Build
    activations: str = "e4m3fn"
    weights: str = "e4m3fn"
    gradients: str = "e4m3fn"
    profile: str | Profile = "ocp"
    stochastic: bool = False
    seed: int = 0
    _calls: Iterator[int] = field(default_factory=itertools.count, compare=False, repr=False)
    _loaded: dict[str, Callable[..., Any]] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        x, w, dy = self.activations, self.weights, self.gradients
        for op, formats in zip(GEMMS, ((x, w), (dy, w), (dy, x)), strict=True):
            build: Build = getattr(self, op)
            if build.op != op:
                raise BuildError(f"{build.id} computes {build.op}; expected a build of {op}")
            if "bfloat16" not in build.out_dtypes:
                raise BuildError(f"{build.id} writes {', '.join(build.out_dtypes)}; training needs bfloat16")
            if build.scale_layout != "plain":
                raise BuildError(f"{build.id} takes its scales as {build.scale_layout}; only plain ones are made here")
            for format in formats:
                if format not in _ELEMENTS or format not in build.formats:
                    raise BuildError(f"{build.id} does not take {format!r}; expected one of {', '.join(build.formats)}")
        try:
            for format in (x, w, dy):
                profile_for(self.profile, FORMATS[format])
        except ValueError as error:
            raise BuildError(str(error)) from None

    def run(self, op: str, operands: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
        """The build's answer, bfloat16 of this shape. LaunchError."""
        build: Build = getattr(self, op)
        if op not in self._loaded:
            self._loaded[op] = build.load()
        function, on_gpu = self._loaded[op], is_gpu(build.device)
        try:
            if build.arrays == "torch":
                out = function(*(t.cuda() if on_gpu else t for t in operands))
            else:
                out = to_tensor(function(*(to_array(t) for t in operands)))
        except Exception as error:
            raise LaunchError(f"{build.id} raised {type(error).__name__}: {error}") from error
        if not isinstance(out, Tensor) or out.shape != shape or out.dtype != torch.bfloat16:
            got = f"{out.dtype} {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
            raise LaunchError(f"{build.id} returned {got}; expected torch.bfloat16 {shape}")
        return out.to(operands[0].device)

    def quantize(self, x: Tensor, axis: int, format: str, *, gradient: bool = False) -> tuple[Tensor, Tensor]:
        """(elements, scales) of x in blocks of 32 along `axis`."""
        stochastic = gradient and self.stochastic
        mx = oracle.quantize(
            to_array(x), axis=axis, format=format, profile=self.profile,
            rounding="stochastic" if stochastic else "even",
            seed=self.seed + next(self._calls) if stochastic else None,
        )  # fmt: skip
        return to_tensor(mx.elements).to(x.device), to_tensor(mx.scales).to(x.device)


def recipe(
    forward: str = "forward/torch_dequant", dgrad: str = "dgrad/torch_dequant", wgrad: str = "wgrad/torch_dequant",
    **how: Any,
) -> Recipe:  # fmt: skip
    """A Recipe by build ids. BuildError for an unknown one."""
    found = []
    for name in (forward, dgrad, wgrad):
        if name not in registry():
            raise BuildError(f"no build named {name!r}; expected one that `mxgate list builds` prints")
        found.append(registry()[name])
    return Recipe(found[0], found[1], found[2], **how)


def grouped_mm(x: Tensor, w: Tensor, offsets: Tensor, how: Recipe) -> Tensor:
    """y[g] = x[g] w[g]^T, bfloat16 [M, N], differentiable. x [M, K], w [E, N, K], offsets int32 [E], cumulative ends.

    N and K must be multiples of 32, and so must every group where w needs a gradient. ValueError, TypeError;
    LaunchError where a build fails.
    """
    if x.dim() != 2 or w.dim() != 3 or x.shape[1] != w.shape[2] or offsets.shape != w.shape[:1]:
        shapes = f"x {tuple(x.shape)}, w {tuple(w.shape)}, offsets {tuple(offsets.shape)}"
        raise ValueError(f"{shapes}; expected x [M, K], w [E, N, K] and offsets [E]")
    if w.shape[1] % BLOCK or w.shape[2] % BLOCK:
        raise ValueError(f"w is {tuple(w.shape)}; expected N and K in multiples of {BLOCK}")
    used = (how.forward, *((how.dgrad,) if x.requires_grad else ()), *((how.wgrad,) if w.requires_grad else ()))
    align = max(BLOCK if w.requires_grad else 1, *(build.group_alignment for build in used))
    check_offsets(offsets.detach().cpu().numpy(), len(x))
    if bool((offsets % align).any()):
        raise ValueError(
            f"groups end at {offsets.tolist()[:8]}; these builds, and a weight gradient in MXFP8, need multiples of "
            f"{align} tokens: have the dispatcher round each expert's slab up and fill it with zeros"
        )
    out: Tensor = _GroupedMM.apply(x, w, offsets, how)  # type: ignore[no-untyped-call]
    return out


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, offsets: Tensor, how: Recipe) -> Tensor:
        ctx.save_for_backward(x, w, offsets)
        ctx.how = how
        operands = (*how.quantize(x, 1, how.activations), *how.quantize(w, 2, how.weights))
        return how.run("forward", (*operands, offsets), (x.shape[0], w.shape[1]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, w, offsets = ctx.saved_tensors
        how: Recipe = ctx.how
        dy, dx, dw = grads[0], None, None
        if ctx.needs_input_grad[0]:
            operands = (*how.quantize(dy, 1, how.gradients, gradient=True), *how.quantize(w, 1, how.weights))
            dx = how.run("dgrad", (*operands, offsets), tuple(x.shape)).to(x.dtype)
        if ctx.needs_input_grad[1]:
            dy_t, x_t = (torch.nn.functional.pad(t, (0, 0, 0, -len(t) % BLOCK)).t() for t in (dy, x))
            left = how.quantize(dy_t, 1, how.gradients, gradient=True)
            right = how.quantize(x_t, 1, how.activations)
            dw = how.run("wgrad", (*left, *right, offsets), tuple(w.shape)).to(w.dtype)
        return dx, dw, None, None


class MXWeight(Tensor):
    """A weight [E, N, K] whose `F.grouped_mm(x, weight.transpose(-2, -1), offs=...)` runs on a recipe.

    Everything else treats it as the tensor it is. Make one with `mx_weight`.
    """

    how: Recipe

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.nn.functional.grouped_mm, torch._grouped_mm):
            return _dispatched(*args, **kwargs)
        out = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        source = next((a for a in args if isinstance(a, MXWeight) and hasattr(a, "how")), None)
        if isinstance(out, MXWeight) and source is not None:
            out.how = source.how
        return out

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """As an nn.Module is copied: the recipe is shared. torch's own way asks for the same class of new_empty."""
        if id(self) not in memo:
            if not self.is_leaf:
                raise RuntimeError("only weights that autograd did not compute can be copied with copy.deepcopy")
            copied = mx_weight(self.detach().as_subclass(Tensor).clone(), self.how)
            is_parameter = isinstance(self, torch.nn.Parameter)
            made = torch.nn.Parameter(copied, self.requires_grad) if is_parameter else copied
            memo[id(self)] = made.requires_grad_(self.requires_grad)
        out: Tensor = memo[id(self)]
        return out


def mx_weight(w: Tensor, how: Recipe) -> MXWeight:
    """The same weight, [E, N, K], sent to `how` by grouped_mm; put it in an nn.Parameter to train it."""
    if w.dim() != 3:
        raise ValueError(f"a weight of shape {tuple(w.shape)}; expected [E, N, K]")
    out = w.as_subclass(MXWeight)
    out.how = how
    return out


def _dispatched(
    a: Tensor, b: Tensor, *, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    if not isinstance(b, MXWeight) or isinstance(a, MXWeight):
        raise ValueError("grouped_mm in MXFP8 takes plain activations on the left and an MX weight on the right")
    if a.dim() != 2 or b.dim() != 3 or offs is None:
        shapes = f"{tuple(a.shape)} x {tuple(b.shape)}{'' if offs is not None else ' without offsets'}"
        raise ValueError(f"grouped_mm in MXFP8 got {shapes}; expected 2-D activations, 3-D weights and offs")
    if bias is not None:
        raise ValueError("grouped_mm in MXFP8 takes no bias; add it to the result")
    if out_dtype not in (None, torch.bfloat16):
        raise ValueError(f"grouped_mm in MXFP8 writes bfloat16, not {out_dtype}")
    return grouped_mm(a, b.as_subclass(Tensor).transpose(-2, -1), offs, b.how)
