"""The tuner: every way to form a product is tried, and its answer held to the default tile's.

Not tried: times, products and settings that Triton's interpreter has not, and those that do not fit a device."""

from __future__ import annotations

import pytest
import torch

from mxgate.kernels.gpu import gpu
from mxgate.kernels.triton import gemm, mixed_input, tune


@pytest.fixture(autouse=True)
def _operands_where_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    made = torch.randint
    if gpu() is None:
        monkeypatch.setattr(torch, "randint", lambda *args, device, **options: made(*args, **options))


@pytest.mark.parametrize(("op", "products"), [("wgrad", ["dequant", "mixed"]), ("forward", ["dequant"])])
def test_every_product_is_tried(
    op: str, products: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tile = gemm.Tile(64, 64, 32, 2, 1, 1)
    monkeypatch.setattr(tune, "TILES", dict.fromkeys(("dequant", "mixed"), (tile,)))
    monkeypatch.setattr(tune, "milliseconds", lambda call, quick: (call(), 1.0)[1])
    torch.manual_seed(0)
    tune.tune(tune.Shape("tiny", 32, 64, (32, 0, 32)), op, 1e12, True)
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines() if "1.000x  Tile(" in line] == products, out


def test_an_answer_that_is_off_has_no_time(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tile, right = gemm.Tile(64, 64, 32, 2, 1, 1), mixed_input.wgrad
    monkeypatch.setattr(tune, "TILES", {"mixed": (tile,)})
    monkeypatch.setattr(tune, "milliseconds", lambda call, quick: (call(), 1.0)[1])
    monkeypatch.setattr(mixed_input, "wgrad", lambda *of, tile=None: right(*of) * (1 if tile is None else 2))
    torch.manual_seed(0)
    tune.tune(tune.Shape("tiny", 32, 64, (32,)), "wgrad", 1e12, True)
    assert "its answer is 1 off" in (out := capsys.readouterr().out) and "1.000x  Tile(" not in out
