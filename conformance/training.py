"""The toy mixture-of-experts model trained in MXFP8 beside BF16: do the builds train, and does the gate see it if not?

The model, the text and the order of the batches are those of the captured step (fixtures.capture_moe): the same seed
gives every recipe the same batches, so curves differ by the arithmetic alone. A recipe is held to the distance of its
curve from the BF16 one: the largest difference of the two mean losses over any window of WINDOW steps, of the first
HORIZON. Later on any two curves part, as training is chaotic: two BF16 runs that add in another order are 0.0006 apart
after 60 steps and 0.025 after 300, where MXFP8 is no farther from them than they are from each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mxgate.fixtures import capture_moe as moe
from mxgate.kernels.build import Build
from mxgate.kernels.grouped_mm import OPS, Recipe, grouped_mm

__all__ = ["HORIZON", "LIMIT", "OPS", "RECIPES", "WINDOW", "Curve", "compare", "distance", "losses", "plot", "recipes"]

WINDOW, HORIZON = 25, 60  # steps
# Nats a character. Correct recipes come to 0.0054 at most; a weight gradient without one operand's scales to 0.012.
LIMIT = 0.0065
Product = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Curve:
    """name: of the recipe. losses: of each step, in nats a character. distance: from BF16, NaN if not finite."""

    name: str
    losses: tuple[float, ...]
    distance: float

    @property
    def accepted(self) -> bool:
        return self.distance <= LIMIT  # a NaN is not

    @property
    def last(self) -> float:
        """The mean of the last window."""
        return sum(self.losses[-WINDOW:]) / len(self.losses[-WINDOW:])


def bf16(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    """torch's own grouped product of bfloat16 operands."""
    return F.grouped_mm(x, w.transpose(-2, -1), offs=offsets)


def mxfp8(how: Recipe) -> Product:
    return lambda x, w, offsets: grouped_mm(x, w, offsets, how)


# The recipes of the table, by name; BF16 is always run.
RECIPES: Mapping[str, Mapping[str, Any]] = {
    "e4m3": {},
    "e5m2 gradients": {"gradients": "e5m2"},
    "e5m2": {"activations": "e5m2", "weights": "e5m2", "gradients": "e5m2"},
    "e4m3, stochastic gradients": {"stochastic": True},
    **{f"e4m3, {name}": {"profile": name} for name in ("torchao-ceil", "torchao-even", "torchao-rceil", "te")},
}


class _MoE(moe.MoE):
    """The layer with its products left to `product`, and autograd to torch."""

    product: Product

    def forward(self, x: Tensor) -> Tensor:
        weight, expert = self.router(x).softmax(-1).topk(moe.CHOICES)
        routing = moe.route(expert.reshape(-1))
        ends = torch.from_numpy(routing.offsets)
        rows = x.repeat_interleave(moe.CHOICES, 0)
        slabs = rows.new_zeros(int(ends[-1]), moe.WIDTH).index_copy(0, routing.row, rows).bfloat16()
        hidden = type(self).product(slabs, self.up.bfloat16(), ends)
        y = type(self).product(F.silu(hidden.float()).bfloat16(), self.down.bfloat16(), ends)
        mixed: Tensor = (y[routing.row].float().view(-1, moe.CHOICES, moe.WIDTH) * weight.unsqueeze(-1)).sum(1)
        return mixed


def losses(product: Product, steps: int, watch: Callable[[int], None] = lambda step: None) -> tuple[float, ...]:
    """The loss of each step of a run from the seed of the captured model."""
    layer = type("Layer", (_MoE,), {"product": staticmethod(product)})

    def model(vocabulary: int) -> moe.Model:
        made = moe.Model(vocabulary)
        for block in made.blocks:
            block.moe.__class__ = layer  # the same parameters in the same order, drawn from the same seed
        return made

    found = []
    for step, loss, _ in moe.train(steps, make=model):
        found.append(loss)
        watch(step)
    return tuple(found)


def distance(a: Sequence[float], b: Sequence[float]) -> float:
    """The largest difference of the mean losses of a window within HORIZON; NaN where there is one in the losses."""
    a, b = a[:HORIZON], b[:HORIZON]
    width = min(WINDOW, len(a))
    differences = [abs(sum(a[i : i + width]) - sum(b[i : i + width])) / width for i in range(len(a) - width + 1)]
    return max(differences) if all(d == d for d in differences) else float("nan")


def compare(
    recipes: Mapping[str, Recipe], steps: int, watch: Callable[[int, int, str], None] = lambda done, total, at: None
) -> tuple[Curve, ...]:
    """BF16 first, then every recipe."""
    total = steps * (1 + len(recipes))
    base = losses(bf16, steps, partial(_tell, watch, 0, total, "bf16"))
    curves = [Curve("bf16", base, 0.0)]
    for number, (name, how) in enumerate(recipes.items(), 1):
        found = losses(mxfp8(how), steps, partial(_tell, watch, number * steps, total, name))
        curves.append(Curve(name, found, distance(found, base)))
    return tuple(curves)


def _tell(watch: Callable[[int, int, str], None], before: int, total: int, at: str, step: int) -> None:
    watch(before + step, total, at)


def plot(curves: Sequence[Curve], path: Path) -> None:
    """Loss curves, smoothed over a window, and below them their difference from BF16. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    smooth = {
        c.name: [sum(c.losses[i - WINDOW : i]) / WINDOW for i in range(WINDOW, len(c.losses) + 1)] for c in curves
    }
    for curve in curves:
        steps = range(WINDOW, len(curve.losses) + 1)
        above.plot(steps, smooth[curve.name], label=curve.name, linewidth=1)
        difference = [a - b for a, b in zip(smooth[curve.name], smooth[curves[0].name], strict=True)]
        below.plot(steps, difference, linewidth=1)
    above.set(ylabel=f"loss, mean of {WINDOW} steps (nats a character)")
    above.legend(fontsize=8)
    below.axhspan(-LIMIT, LIMIT, alpha=0.1)
    below.set(xlabel="step", ylabel="difference from bf16")
    figure.savefig(path)


def recipes(names: Sequence[str], builds: Mapping[str, Build]) -> dict[str, Recipe]:
    """Recipes of RECIPES by name, on a build for each op. BuildError where one does not take a recipe's formats."""
    gemms = (builds["forward"], builds["dgrad"], builds["wgrad"])
    return {name: Recipe(*gemms, **RECIPES[name]) for name in names}
