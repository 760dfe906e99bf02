"""The kinds of public bugs as somebody else's files: one wrong kernel of each, and right ones that do it another way.

RIGHT is a complete file that imports nothing of ours. Every wrong one is that file with a few lines changed, as the
bug itself would change them; it is rejected through `--build path:callable` on a few cases of the smoke tier. The right
ones go through the whole tier, for nothing less accepts.

Not caught: that each is rejected by the gate that `mxgate faults` names for its kind (test_faults does that with ours).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mxgate.conformance.__main__ import main
from mxgate.kernels.faults import KINDS

RIGHT = """
import ml_dtypes
import numpy as np

BF16 = ml_dtypes.bfloat16
FORMATS = {  # mantissa bits, bias, largest exponent, largest number, NaN code
    "e4m3fn": (3, 7, 8, 448.0, 0x7F), "e5m2": (2, 15, 15, 57344.0, 0x7E),
    "e4m3fnuz": (3, 8, 7, 240.0, 0x80), "e5m2fnuz": (2, 16, 15, 57344.0, 0x80),
}


def real(elements, scales, axis):
    factors = scales.astype(np.float64)
    return elements.astype(np.float64) * np.repeat(factors, 32, axis=axis)


def result(shape, out, out_dtype):
    return np.empty(shape, out_dtype or BF16) if out is None else out


def spans(offsets):
    start = 0
    for end in offsets.tolist():
        yield start, end
        start = end


def narrow(sums):
    with np.errstate(all="ignore"):
        return sums.astype(np.float32)


def product(a, b):
    with np.errstate(all="ignore"):
        return a @ b


def forward(x, x_scales, w, w_scales, offsets, *, bias=None, out=None, out_dtype=None):
    y = result((len(x), w.shape[1]), out, out_dtype)
    for g, (start, end) in enumerate(spans(offsets)):
        sums = product(real(x[start:end], x_scales[start:end], 1), real(w[g], w_scales[g], 1).T)
        if bias is not None:
            sums = sums + bias[g]
        y[start:end] = narrow(sums)
    y[int(offsets[-1]):] = 0
    return y


def wgrad(dy_t, dy_scales, x_t, x_scales, offsets, *, out=None, out_dtype=None):
    dw = result((len(offsets), len(dy_t), len(x_t)), out, out_dtype)
    for g, (start, end) in enumerate(spans(offsets)):
        t, b = slice(start, end), slice(start // 32, end // 32)
        dy, x = real(dy_t[:, t], dy_scales[:, b], 1), real(x_t[:, t], x_scales[:, b], 1)
        sums = product(dy, x.T)
        dw[g] = narrow(sums)
    return dw


def quantize(x, axis, *, format="e4m3fn"):
    mantissa, bias, emax, largest, nan = FORMATS[format]
    dtype = getattr(ml_dtypes, "float8_" + format)
    with np.errstate(all="ignore"):
        moved = np.moveaxis(x, axis, -1).astype(np.float64)
        blocks = moved.reshape(*moved.shape[:-1], -1, 32)
        maximum = np.abs(blocks).max(axis=-1)
        finite = np.isfinite(maximum)
        maximum = np.where(finite, maximum, 0.0)
        exponent = np.frexp(maximum)[1] - 1
        byte = np.where(maximum == 0, 0, np.clip(exponent - emax + 127, 0, 254))
        value = np.ldexp(np.where(finite[..., None], blocks, 0.0), 127 - byte[..., None])
        step = np.maximum(np.frexp(value)[1] - 1, 1 - bias) - mantissa
        value = np.ldexp(np.rint(np.ldexp(value, -step)), step)
        value = np.clip(value, -largest, largest)
        elements = value.astype(np.float32).astype(dtype)
    elements.view(np.uint8)[~finite] = nan
    byte = np.where(finite, byte, 255).astype(np.uint8)
    elements = np.moveaxis(elements.reshape(moved.shape), -1, axis)
    scales = np.ascontiguousarray(np.moveaxis(byte, -1, axis)).view(ml_dtypes.float8_e8m0fnu)
    return np.ascontiguousarray(elements), scales
"""

FACTORS = "factors = scales.astype(np.float64)"
SUMS = "sums = product(dy, x.T)"
NARROW = "dw[g] = narrow(sums)"
FORWARD = "sums = product(real(x[start:end], x_scales[start:end], 1), real(w[g], w_scales[g], 1).T)"
TILE = "t, b = slice(start, end), slice(start // 32, end // 32)"
RETURN = "    return dw\n"

# Kind -> op, and what is changed: pairs of old and new text.
WRONG: dict[str, tuple[str, ...]] = {
    "scale byte": ("wgrad", FACTORS, f"{FACTORS} * (scales.view(np.uint8) != 0)"),
    "reciprocal": (
        "quantize",
        "value = np.ldexp(np.where(finite[..., None], blocks, 0.0), 127 - byte[..., None])",
        "scale = np.where(byte > 0, 2.0 ** (byte - 127), 0)\n"
        "        value = np.where(finite[..., None], blocks, 0.0) * (1 / scale)[..., None]",
    ),
    "tiny block": (
        "quantize",
        "exponent = np.frexp",
        "blocks = np.where(maximum[..., None] < 2.0**-118, 0.0, blocks)\n        exponent = np.frexp",
    ),
    "NaN in the maximum": ("quantize", "np.abs(blocks).max(axis=-1)", "np.fmax.reduce(np.abs(blocks), axis=-1)"),
    "exponent off by one": (
        "quantize",
        "exponent = np.frexp(maximum)[1] - 1",
        "exponent = np.floor(np.log2(np.where(maximum > 0, maximum, 1).astype(np.float32))).astype(int)",
    ),
    "packed scales": (
        "quantize",
        ".astype(np.uint8)\n    elements = ",
        ".astype(np.uint8)\n    byte[..., 1::2] |= byte[..., : byte.shape[-1] // 2 * 2 : 2] & 1\n    elements = ",
    ),
    "element rounding": ("quantize", "np.rint(np.ldexp(value, -step))", "np.floor(np.ldexp(value, -step) + 0.5)"),
    "overflow": ("quantize", "value = np.clip(value, -largest, largest)", ""),
    "format mix-up": (
        "wgrad",
        FACTORS,
        f"{FACTORS}\n    if 'e4m3' in elements.dtype.name:\n        elements = elements.view(ml_dtypes.float8_e4m3fn)",
    ),
    "special values": ("wgrad", "dw[g] = narrow(sums)", "dw[g] = narrow(np.nan_to_num(sums, nan=0.0))"),
    "scale select": ("wgrad", "x_scales[:, b], 1)", "np.roll(x_scales, 1, axis=1)[:, b], 1)"),
    "scales unused": ("wgrad", FACTORS, "factors = np.ones(scales.shape)"),
    "scale padding": ("forward", FACTORS, f"{FACTORS}\n    factors[:, factors.shape[1] // 4 * 4 :] = 1"),
    "scale stride": (
        "forward",
        FACTORS,
        "pitch = -(-scales.shape[1] // 4) * 4\n"
        "    at = np.arange(len(scales))[:, None] * pitch + np.arange(scales.shape[1])\n"
        "    factors = np.resize(scales.reshape(-1).astype(np.float64), max(at.max(initial=0) + 1, 1))[at]",
    ),
    "expert base": ("forward", "real(w[g], w_scales[g], 1)", "real(w[max(g - 1, 0)], w_scales[max(g - 1, 0)], 1)"),
    "packing unit": ("forward", FACTORS, f"{FACTORS}\n    factors[len(factors) // 4 * 4 :] = 1"),
    "scale bounds": (
        "wgrad",
        TILE,
        f"{TILE}\n        np.lib.stride_tricks.as_strided(x_scales.view(np.uint8), (x_scales.size + 1,), (1,)).max()",
    ),
    "unwritten": ("wgrad", NARROW, "dw[g, : len(dy_t) // 48 * 48] = narrow(sums)[: len(dy_t) // 48 * 48]"),
    "empty group": ("wgrad", NARROW, f"if end > start:\n            {NARROW}"),
    "no tokens": ("wgrad", "    for g, (start", "    if not offsets[-1]:\n        return dw\n    for g, (start"),
    "bound wraps": (
        "wgrad",
        TILE,
        f"{TILE}\n        if end == start:\n            t, b = slice(-32, None), slice(-1, None)",
    ),
    "padded NaN": (
        "wgrad",
        TILE,
        "t = b = slice(None)\n        inside = (np.arange(dy_t.shape[1]) >= start) & (np.arange(dy_t.shape[1]) < end)",
        "sums = product(dy, x.T)",
        "sums = product(dy * inside, x.T)",
    ),
    "boundary": ("wgrad", TILE, f"start = start // 128 * 128\n        {TILE}"),
    "partial tile": ("wgrad", NARROW, "sums[:, len(x_t) // 64 * 64 + 16 :] = 0\n        dw[g] = narrow(sums)"),
    "tile order": (
        "wgrad",
        NARROW,
        "rest = len(x_t) // 64 * 64\n"
        "        sums[:, rest:] = np.roll(sums[:, rest:], 16, axis=1)\n"
        "        dw[g] = narrow(sums)",
    ),
    "few workers": ("wgrad", NARROW, "sums[-16:, -32:] = 0\n        dw[g] = narrow(sums)"),
    "dispatch bucket": ("wgrad", NARROW, "sums *= 1 + (end - start == 96)\n        dw[g] = narrow(sums)"),
    "index overflow": (
        "wgrad",
        "    dw = result(",
        "    dy_t = dy_t.reshape(-1)[np.arange(dy_t.size).astype(np.int16)].reshape(dy_t.shape)\n    dw = result(",
    ),
    "output strides": (
        "wgrad",
        "    for g, (start",
        "    flat = np.empty(dw.shape, dw.dtype).strides\n"
        "    dw = np.lib.stride_tricks.as_strided(dw, dw.shape, flat)\n"
        "    for g, (start",
    ),
    "bias": ("forward", "sums = sums + bias[g]", "sums = sums + bias[0]"),
    "not reproducible": (
        "wgrad",
        SUMS,
        "order = np.random.default_rng().permutation(end - start)\n"
        "        sums = product(dy[:, order].astype(np.float32), x[:, order].astype(np.float32).T)",
    ),
    "replay": (
        "wgrad",
        "    dw = result(",
        "    offsets = KEPT.setdefault(len(offsets), offsets.copy())\n    dw = result(",
        "BF16 = ml",
        "KEPT = {}\nBF16 = ml",
    ),
    "split-K": (
        "wgrad",
        SUMS,
        "half = (end - start) // 64 * 32\n"
        "        cut = (slice(half), slice(half, None))\n"
        "        parts = [narrow(product(dy[:, c], x[:, c].T)).astype(BF16) for c in cut]\n"
        "        sums = parts[0].astype(np.float32) + parts[1].astype(np.float32)",
    ),
    "accumulates": ("wgrad", NARROW, "dw[g] += narrow(sums).astype(dw.dtype)"),
    "cache key": (
        "wgrad",
        RETURN,
        "    return KEPT.setdefault((dy_t.shape, x_t.shape, len(offsets)), dw) if out is None else dw\n",
        "BF16 = ml",
        "KEPT = {}\nBF16 = ml",
    ),
    "layout guess": ("wgrad", NARROW, f"sums = sums.T if len(dy) == len(x) else sums\n        {NARROW}"),
    "scale product": (
        "wgrad",
        SUMS,
        "sums = np.zeros((len(dy), len(x)), np.float32)\n"
        "        with np.errstate(all='ignore'):\n"
        "            for c in range(start, end, 32):\n"
        "                dy, x = (v[:, c : c + 32].astype(np.float32) for v in (dy_t, x_t))\n"
        "                s, r = (v[:, c // 32].astype(np.float32) for v in (dy_scales, x_scales))\n"
        "                sums += (dy @ x.T) * np.outer(s, r)",
    ),
    "mask": (
        "wgrad",
        TILE,
        "low, high = start // 128 * 128, -(-end // 128) * 128\n"
        "        t, b = slice(low, high), slice(low // 32, high // 32)",
        SUMS,
        "at = low + np.arange(dy.shape[1])\n        sums = product(np.where((at >= start) & (at < end), dy, 0), x.T)",
    ),
    "window": ("wgrad", TILE, f"end = start + (end - start) // 64 * 64\n        {TILE}"),
    "rounding": (
        "wgrad",
        NARROW,
        "sums = narrow(sums)\n"
        "        dw[g] = (sums.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32) if dw.itemsize == 2 else sums",
    ),
    "subtle": ("wgrad", RETURN, "    dw.view(f'u{dw.itemsize}')[-1, -1, -1] ^= 1\n    return dw\n"),
    "contract": ("wgrad", RETURN, "    return dw.astype(np.float32) if out is None else dw\n"),
    "process": ("wgrad", RETURN, "    import os\n    os.abort()\n"),
    "lineage": ("wgrad", SUMS, "sums = product(dy.astype(np.float32), x.astype(np.float32).T)"),
}

# The fewest cases that show all of them: two of one shape that differ in their offsets, and one for each kind of data.
CASES = {
    "wgrad": (
        *(f"64x96/{routing}/signature" for routing in ("ramp1.5", "shift32", "empties")),
        *(f"64x96/{routing}/exact-sum" for routing in ("skew2", "all-empty")),
        "64x96/ramp1.5/exact-sum+e4m3fnuzxe4m3fnuz",
        "64x96/shift32/special",
        "64x96/ramp1.5/normal+float32",
        "32x48/17blocks/all-scales",
        "64x96/ramp1.5/far-scales",
        "64x64/square/signature",
    ),
    "forward": ("64x96/ramp1.5/signature", "64x96/empties/bias"),
    "quantize": (
        "64x96/axis1/normal",
        "64x192/axis1/special",
        "64x96/axis1/tiny+float32",
        "64x96/axis1/midpoints+float32",
        "64x1024/axis1/edges+float32",
    ),
}

NARROW_SUMS = """sums = np.zeros((len(dy), len(x)))
        with np.errstate(all="ignore"):
            for c in range(0, end - start, 32):  # 13 bits below the largest addend are kept of each
                each = dy[:, None, c : c + 32] * x[None, :, c : c + 32]
                largest = np.maximum(np.abs(sums), np.abs(each).max(axis=2))
                unit = np.exp2(np.frexp(np.nan_to_num(largest, nan=1, posinf=1))[1] - 14.0)[..., None]
                kept = np.trunc(sums / unit[..., 0]) * unit[..., 0]
                sums = kept + (np.trunc(each / unit) * unit).sum(axis=2)"""
# Wrong in one narrow situation, which one case has. Name -> case, and what is changed.
KEPT_PLAN = (
    "    dw = result(",
    "    key = (dy_t.shape, x_t.shape, int(offsets[0]), int(np.diff(offsets).max(initial=0)))\n"
    "    offsets = KEPT.setdefault(key, offsets.copy())\n    dw = result(",
    "BF16 = ml",
    "KEPT = {}\nBF16 = ml",
)
NARROW_FAULTS: dict[str, tuple[str, ...]] = {
    # A plan kept by first and longest group: after a case with the same ones.
    "plan": ("wgrad/64x96/swapped/signature", *KEPT_PLAN),
    # Programs numbered by expert and tile at once, the expert then taken from the number alone.
    "tiles": (
        "wgrad/272x288/edges16/exact-sum",
        RETURN,
        "    experts, rows, columns = len(dw), -(-len(dy_t) // 128), -(-len(x_t) // 128)\n"
        "    right = dw.copy()\n"
        "    for p in range(experts * rows * columns):\n"
        "        g, i, j = p // (rows * columns), p // columns % rows, p % columns\n"
        "        tile = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)\n"
        "        dw[g][tile] = right[p % experts][tile]\n" + RETURN,
    ),
    "pair": (
        "wgrad/64x96/uniform/all-codes+e4m3fnxe5m2",
        "    dw = result(",
        "    if (dy_t.dtype.name, x_t.dtype.name) == ('float8_e4m3fn', 'float8_e5m2'):\n"
        "        x_t = x_t.view(ml_dtypes.float8_e4m3fn)\n    dw = result(",
    ),
    "subnormals": (
        "wgrad/64x96/uniform/all-codes+e5m2fnuzxe4m3fnuz",
        "    factors = scales",
        "    if elements.dtype.name == 'float8_e4m3fnuz':\n"
        "        codes = elements.view(np.uint8)\n"
        "        elements = np.where((codes & 0x78 == 0) & (codes != 0x80), 0, codes).astype(np.uint8)\n"
        "        elements = elements.view(ml_dtypes.float8_e4m3fnuz)\n    factors = scales",
    ),
    "smallest scale": (
        "wgrad/32x48/17blocks/all-scales+e5m2xe5m2",
        FACTORS,
        f"{FACTORS}\n    factors[(scales.view(np.uint8) == 0) & (elements.dtype.name == 'float8_e5m2')] = 0",
    ),
    "order of a process": (
        "wgrad/32x48/m64/normal+float32",
        SUMS,
        f"{SUMS}\n"
        "        if end - start > 512:\n"
        "            sums = np.zeros((len(dy), len(x)), np.float32)\n"
        "            for c in np.random.default_rng(os.getpid()).permutation((end - start) // 32) * 32:\n"
        "                sums += (dy[:, c : c + 32] @ x[:, c : c + 32].T).astype(np.float32)",
        "import ml_dtypes\n",
        "import os\n\nimport ml_dtypes\n",
    ),
    "axis": (
        "quantize/64x96/axis0/heavy-tailed+e5m2xe5m2",
        "    mantissa, bias, emax, largest, nan = FORMATS[format]\n",
        "    mantissa, bias, emax, largest, nan = FORMATS[format]\n    emax = emax if axis else 8\n",
    ),
}
# Right in another way, all of wgrad. Name -> (what mxgate.toml states of it, pairs of old and new text).
CORRECT: dict[str, tuple[str, tuple[str, ...]]] = {
    "loop_order": (
        "",
        (
            SUMS,
            "sums = np.zeros((len(dy), len(x)), np.float32)\n"
            "        with np.errstate(all='ignore'):\n"
            "            for c in reversed(range(0, end - start, 32)):\n"
            "                sums += (dy[:, c : c + 32] @ x[:, c : c + 32].T).astype(np.float32)",
        ),
    ),
    "split_k": (
        "",
        (
            SUMS,
            "third = (end - start) // 96 * 32\n"
            "        cut = (slice(third), slice(third, 2 * third), slice(2 * third, None))\n"
            "        parts = [narrow(product(dy[:, c], x[:, c].T)) for c in cut]\n"
            "        with np.errstate(all='ignore'):\n"
            "            sums = (parts[0] + parts[1]) + parts[2]",
        ),
    ),
    "tiles": (
        "",
        (
            SUMS,
            "sums = np.empty((len(dy), len(x)))\n"
            "        for i in range(0, len(dy), 48):\n"
            "            for j in range(0, len(x), 80):\n"
            "                sums[i : i + 48, j : j + 80] = product(dy[i : i + 48], x[j : j + 80].T)",
        ),
    ),
    "accumulator": (
        'accumulator = "mfma-scale-128"',
        (
            SUMS,
            "sums = np.zeros((len(dy), len(x)), np.float32)\n"
            "        with np.errstate(all='ignore'):\n"
            "            for c in range(0, end - start, 128):\n"
            "                sums = (sums + dy[:, c : c + 128] @ x[:, c : c + 128].T).astype(np.float32)",
        ),
    ),
    "half": (
        'out_dtypes = ["float16"]',
        (
            "out=None, out_dtype=None):\n    dw = result((len(offsets), len(dy_t)",
            "out=None):\n    out_dtype = np.float16\n    dw = result((len(offsets), len(dy_t)",
        ),
    ),
}


def changed(*pairs: str) -> str:
    text = RIGHT
    for old, new in zip(pairs[::2], pairs[1::2], strict=True):
        assert old in text, old
        text = text.replace(old, new)
    return text


def stem(kind: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in kind)


Say = Callable[..., dict[str, Any]]


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Say:
    """Run `mxgate run --json` in an empty folder: its document."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> dict[str, Any]:
        capsys.readouterr()
        code = main(["run", "--json", *words])
        got = capsys.readouterr()
        assert code in (0, 1, 3), got.err
        document: dict[str, Any] = json.loads(got.out)
        return document

    return run


def test_every_kind_has_a_file() -> None:
    assert set(WRONG) == set(KINDS)


@pytest.mark.parametrize("op", list(CASES))
def test_the_wrong_ones_are_rejected(say: Say, tmp_path: Path, op: str) -> None:
    kinds = {stem(kind): change[1:] for kind, change in WRONG.items() if change[0] == op}
    words = ["--op", op]
    for name, change in kinds.items():
        (tmp_path / f"{name}.py").write_text(changed(*change))
        words += ["--build", f"{name}.py:{op}"]
    (tmp_path / "right.py").write_text(RIGHT)
    if "lineage" in kinds:
        (tmp_path / "mxgate.toml").write_text('["lineage.py:wgrad"]\nreplaces = "wgrad/numpy_reference"\n')
    for case in CASES[op]:
        words += ["--case", f"{op}/{case}"]
    verdicts = {v["build"]: v for v in say(*words, "--build", f"right.py:{op}", "--memory-limit", "1")["verdicts"]}
    lived = [name for name, v in verdicts.items() if v["verdict"] != "reject"]
    assert lived == [f"{op}/right.{op}"], verdicts
    assert "reject" not in verdicts[lived[0]]["gates"].values()
    if op == "wgrad":
        rejected = [gate for gate, said in verdicts["wgrad/lineage.wgrad"]["gates"].items() if said == "reject"]
        assert rejected == ["lineage"]


@pytest.mark.parametrize("name", list(NARROW_FAULTS))
def test_what_is_wrong_in_a_narrow_situation_is_rejected_there(say: Say, tmp_path: Path, name: str) -> None:
    case, *change = NARROW_FAULTS[name]
    op = case.partition("/")[0]
    (tmp_path / "wrong.py").write_text(changed(*change))
    (tmp_path / "right.py").write_text(RIGHT)
    before = ("--case", "wgrad/64x96/ramp1.5/signature") if name == "plan" else ()
    words = (
        "--op",
        op,
        "--jobs",
        "1",
        *before,
        "--case",
        case,
        "--build",
        f"wrong.py:{op}",
        "--build",
        f"right.py:{op}",
    )
    said = {v["build"]: v for v in say(*words)["verdicts"]}
    assert (
        said[f"{op}/wrong.{op}"]["verdict"] == "reject" and "reject" not in said[f"{op}/right.{op}"]["gates"].values()
    )
    assert said[f"{op}/wrong.{op}"]["first_finding"]["case"] == case


def test_the_right_ones_are_accepted(say: Say, tmp_path: Path) -> None:
    words, terms = ["--op", "wgrad"], ""
    for name, (stated, change) in CORRECT.items():
        (tmp_path / f"{name}.py").write_text(changed(*change))
        terms += f'["{name}.py:wgrad"]\n{stated}\n'
        words += ["--build", f"{name}.py:wgrad"]
    (tmp_path / "mxgate.toml").write_text(terms)
    document = say(*words)
    assert {v["build"]: v["verdict"] for v in document["verdicts"]} == {
        f"wgrad/{name}.wgrad": "accept" for name in CORRECT
    }, [v["first_finding"] for v in document["verdicts"]]
    assert len(list((tmp_path / ".mxgate/certificates").iterdir())) == len(CORRECT)


def test_a_narrow_accumulator_passes_where_it_is_declared(say: Say, tmp_path: Path) -> None:
    """On the case with the longest sums, for it is slow."""
    (tmp_path / "narrow.py").write_text(changed(SUMS, NARROW_SUMS))
    words = ("--op", "wgrad", "--build", "narrow.py:wgrad", "--case", "wgrad/32x48/m64/normal+float32")
    (verdict,) = say(*words)["verdicts"]
    assert verdict["verdict"] == "reject" and verdict["first_finding"]["gate"] == "bounded"
    (tmp_path / "mxgate.toml").write_text('[wgrad]\naccumulator = "wgmma-fp8-13bit"\n')
    (verdict,) = say(*words)["verdicts"]
    assert verdict["gates"]["bounded"] == "pass" and "reject" not in verdict["gates"].values()
