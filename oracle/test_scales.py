"""Scale rules against Python integers, and profiles against the peers whose names they carry.

The peers' bytes are in fixtures/peer_probes.json (39 probe blocks, float32 and bfloat16, two element formats);
torchao's release is installed and also run. Not caught here: a peer's behaviour between the probes and the
sweeps where only its bytes on file are known, and versions other than the ones named.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from mxgate.oracle import FORMATS, PROFILES, SCALE_RULES, Format, MXArray, Profile, dequantize, quantize
from mxgate.oracle.scales import block_bytes, profile_for

BF16 = np.dtype(ml_dtypes.bfloat16)
FINITE_BF16 = np.arange(0x7F80, dtype=np.uint16)  # every finite maximum: 32,640 of them
PROBES = json.loads((Path(__file__).parents[1] / "fixtures" / "peer_probes.json").read_text())
# The peers of the fixture, and the fields that hold the bytes of the implementation meant by the profile.
PEERS = {
    "torchao-floor": ("torchao floor", "scale", "elems"),
    "torchao-ceil": ("torchao ceil", "scale", "elems"),
    "torchao-even": ("torchao even", "scale", "elems"),
    "torchao-rceil": ("torchao rceil", "scale", "elems"),
    "te": ("TransformerEngine C++ test reference", "scale", "elems"),
    "alto": ("ALTO", "np_scale", "np_elems_torchcast"),
    "aiter": ("aiter per_1x32 torch, round up", "scale", "elems"),
    "triton-kernels-up": ("triton_kernels round up", "scale", "elems"),
    "triton-kernels-down": ("triton_kernels round down", "scale", "elems"),
    "microxcaling": ("microxcaling even", "scale", "elems"),
    "quark-even": ("quark even", "scale", "elems"),
}
TORCHAO_RELEASE = [name for name in PROFILES if name.startswith("torchao-0.18-")]


def byte_of(rule: str, steps: int, row: Format) -> int:
    """A rule's byte for a maximum of `steps` * 2^-149, from what the rule means rather than from float32 fields."""
    exponent = steps.bit_length() - 150
    if rule == "ceil" and steps & (steps - 1):
        exponent += 1  # not a power of two
    elif rule == "even":
        dropped = steps.bit_length() - (row.mantissa_bits + 1)
        if dropped > 0:  # rounded to the element's significant bits, the half up
            exponent = ((steps + (1 << (dropped - 1))) >> dropped).bit_length() + dropped - 150
    lowest = exponent - row.emax
    if rule in ("rceil", "r175"):  # the least scale under which it stays within, or below, the largest value
        # In units of 2^(emax - 5), of which every format's largest value is a whole number.
        largest = int(row.max_finite / 2.0 ** (row.emax - 5)) if rule == "rceil" else 56
        lowest -= 1
        while True:
            place = 149 + lowest + row.emax - 5
            value, limit = steps << max(-place, 0), largest << max(place, 0)
            if value < limit or (rule == "rceil" and value == limit):
                break
            lowest += 1
    return min(max(lowest + 127, 0), 254)


def steps_of(bits: int) -> int:
    return (bits & 0x7FFFFF | (0x800000 if bits >> 23 else 0)) << max((bits >> 23) - 1, 0)


def thresholds() -> np.ndarray[Any, Any]:
    """float32 maxima at, one ulp below and one ulp above every power of two and every rule's threshold.

    1.5, 1.75, 1.875 and 1.9375 times each power cover the formats' largest values and `even` for 1, 2 and 3
    mantissa bits; below 2^-126 the same multiples, as far as they exist.
    """
    points = set()
    for exponent in range(255):
        points |= {(exponent << 23) + m for m in (0, 0x400000, 0x600000, 0x700000, 0x780000)}
    for shift in range(23):
        points |= {(1 << shift) * m >> 4 for m in (16, 24, 28, 30, 31)}
    near = {p + d for p in points for d in (-1, 0, 1)}
    return np.array(sorted(p for p in near if 0 < p < 0x7F800000), np.uint32)


THRESHOLDS = thresholds()


@pytest.mark.parametrize("rule", list(SCALE_RULES))
@pytest.mark.parametrize("name", list(FORMATS))
def test_rules_on_every_bfloat16_maximum_and_float32_threshold(rule: str, name: str) -> None:
    """Off-by-one exponents from a rounded log2 or division have been shipped at least four times."""
    bits = np.concatenate([FINITE_BF16[1:].astype(np.uint32) << 16, THRESHOLDS])
    plain = Profile(rule, "", rule, tuple(FORMATS))
    got = block_bytes(bits, plain, FORMATS[name])
    want = np.array([byte_of(rule, steps_of(b), FORMATS[name]) for b in bits.tolist()])
    wrong = np.flatnonzero(got != want)
    assert wrong.size == 0, [(hex(bits[i]), int(got[i]), int(want[i])) for i in wrong[:20]]


@pytest.mark.parametrize("rule", list(SCALE_RULES))
def test_rules_on_subnormal_maxima_as_a_smaller_format_would_show_them(rule: str) -> None:
    """Every real format clamps a subnormal maximum to byte 0; one with its values 2^60 times smaller does not."""
    for row in FORMATS.values():
        small = dataclasses.replace(row, emax=row.emax - 60, max_finite=row.max_finite * 2.0**-60)
        bits = THRESHOLDS[THRESHOLDS < 0x02000000]
        got = block_bytes(bits, Profile(rule, "", rule, tuple(FORMATS)), small)
        assert got.tolist() == [byte_of(rule, steps_of(b), small) for b in bits.tolist()]
        assert len(np.unique(got[bits < 0x800000])) > 20


def block_of(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Blocks [n, 32] of bit patterns whose largest magnitudes are `bits`, the rest below it in many sizes."""
    rng = np.random.default_rng(7)
    top = 8 * bits.dtype.itemsize - 1
    rest = (bits[:, None] * rng.random((len(bits), 31))).astype(bits.dtype)
    # Same exponents as the maximum, then a spread of smaller ones, zeros of both signs included.
    rest = np.where(rng.random(rest.shape) < 0.6, np.maximum(rest, bits[:, None] - rest // 64), rest)
    rest[:, 3:5] = 0
    signs = rng.integers(0, 2, (len(bits), 32)).astype(bits.dtype) << bits.dtype.type(top)
    return np.asarray(np.concatenate([rest[:, :13], bits[:, None], rest[:, 13:]], axis=1) | signs)


def as_array(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = bits.view(BF16 if bits.itemsize == 2 else np.float32)
    return array


SWEEPS = {
    "every finite bfloat16 maximum": as_array(block_of(FINITE_BF16)),
    "the same in float32": as_array(block_of(FINITE_BF16.astype(np.uint32) << 16)),
    "float32 thresholds": as_array(block_of(THRESHOLDS)),
}


def probe(name: str, dtype: str) -> np.ndarray[Any, Any]:
    """A probe block. In bfloat16 the peers' NaN was 0xFFFF."""
    bits = np.array([int(word, 16) for word in PROBES["inputs_fp32_bits"][name]], np.uint32)
    if dtype == "fp32":
        return bits.view(np.float32)
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(nan, 0xFFFF, bits >> 16).astype(np.uint16).view(BF16)


def agrees(mx: MXArray, entry: dict[str, Any], scale: str, elems: str) -> bool:
    """Same scale byte, same element bytes. Two peers give dequantized values: then those too, as float32 bits.

    Their element bytes are missing for NaN and were made by dividing the value by the scale, which means
    nothing where the value overflowed: there the value itself has to do.
    """
    same = bool(mx.scale_codes()[0] == entry[scale])
    known = np.full(32, True)
    if "deq" in entry:
        theirs = np.array([int(word, 16) for word in entry["deq"]], np.uint32).view(np.float32)
        with np.errstate(all="ignore"):
            ours = dequantize(mx, BF16 if "bfloat16" in entry["out_dtype"] else np.float32).astype(np.float32)
        nan = np.isnan(theirs)
        same &= bool(np.array_equal(np.isnan(ours), nan))
        same &= bool(np.array_equal(ours[~nan].view(np.uint32), theirs[~nan].view(np.uint32)))
        known = np.isfinite(theirs)
        if elems not in entry:
            return same and bool(nan.all())
    theirs_codes = np.frombuffer(bytes.fromhex(entry[elems]), np.uint8)
    return same and bool(np.array_equal(mx.codes()[known], theirs_codes[known]))


@pytest.mark.parametrize("profile", list(PEERS))
def test_profiles_are_bit_equal_to_their_peers_on_the_probes(profile: str) -> None:
    peer, scale, elems = PEERS[profile]
    assert sorted(PROBES["results"][peer]) == sorted(PROFILES[profile].formats)
    compared, wrong = 0, []
    for format, by_dtype in PROBES["results"][peer].items():
        for dtype, entries in by_dtype.items():
            for name, entry in entries.items():
                compared += 1
                mx = quantize(probe(name, dtype), axis=0, format=format, profile=profile)
                if not agrees(mx, entry, scale, elems):
                    wrong.append(
                        (format, dtype, name, int(mx.scale_codes()[0]), entry[scale], mx.codes().tobytes().hex())
                    )
    assert compared == 120 and not wrong, wrong[:20]


def test_every_peer_of_the_fixture_has_a_profile_and_the_rest_are_ours_or_run_here() -> None:
    assert {peer for peer, _, _ in PEERS.values()} == set(PROBES["results"])
    assert set(PROFILES) == {"ocp", *PEERS, *TORCHAO_RELEASE}


def test_a_peers_bug_is_in_its_own_row_and_ocp_has_none() -> None:
    """Of the probes every peer but torchao's floor differs from ocp somewhere, and each difference is by policy."""
    for profile in PROFILES.values():
        differs = set()
        for format in set(profile.formats) & {"e4m3fn", "e5m2"}:
            for name in PROBES["inputs_fp32_bits"]:
                ours = quantize(probe(name, "fp32"), axis=0, format=format)
                theirs = quantize(probe(name, "fp32"), axis=0, format=format, profile=profile)
                if (ours.codes().tobytes(), ours.scale_codes()) != (theirs.codes().tobytes(), theirs.scale_codes()):
                    differs.add(name)
        assert bool(differs) == (profile.name not in ("ocp", "torchao-floor")), (profile.name, differs)
        assert profile.note or profile.name in ("torchao-floor", "torchao-ceil")


# By profile: what its byte is on a finite maximum, from its rule's byte. Everything else is the rule.
BYTES: dict[str, Any] = {
    "torchao-even": lambda byte, bits: np.where(bits >= 0x7F780000, 255, byte),
    "quark-even": lambda byte, bits: np.where(bits >= 0x7F780000, 254, byte),
    "alto": lambda byte, bits: np.maximum(byte, 1),
    # Every non-zero bfloat16 maximum is at least 2^-133, so its quotient by 448 does not vanish.
    "aiter": lambda byte, bits: np.where(bits == 0, 0, np.maximum(byte, 1)),
    "triton-kernels-up": lambda byte, bits: np.where(bits == 0, 0, np.maximum(byte, 1)),
}


@pytest.mark.parametrize("profile", [name for name in PROFILES if name != "microxcaling"])
def test_profiles_follow_their_rule_on_every_finite_bfloat16_maximum(profile: str) -> None:
    rules = PROFILES[profile]
    for format in set(rules.formats) & {"e4m3fn", "e4m3fnuz"}:
        for sweep in list(SWEEPS)[:2]:
            mx = quantize(SWEEPS[sweep], axis=1, format=format, profile=profile)
            bits = FINITE_BF16.astype(np.int64) << 16
            want = np.array([0] + [byte_of(rules.rule, steps_of(b), FORMATS[format]) for b in bits[1:].tolist()])
            want = BYTES.get(profile, lambda byte, bits: byte)(want, bits)
            assert np.array_equal(mx.scale_codes()[:, 0], want), sweep


def test_microxcalings_rounded_log2_is_torchs() -> None:
    """The floor of torch's own log2, in float32 and bfloat16, on all bfloat16 maxima and near every power of two."""
    near = (np.arange(1, 255, dtype=np.int64)[:, None] << 23) + np.arange(-2500, 3)
    cases = [
        (24, torch.from_numpy(near.ravel().astype(np.int32)).view(torch.float32)),
        (8, torch.arange(1, 0x7F80, dtype=torch.int16).view(torch.bfloat16)),
    ]
    for precision, x in cases:
        for format in ("e4m3fn", "e5m2"):
            exponent = torch.log2(x).float().floor() - FORMATS[format].emax
            want = (exponent.clamp(min=-127) + 127).numpy().astype(np.int64)
            bits = x.float().view(torch.int32).numpy().astype(np.int64)
            assert np.array_equal(block_bytes(bits, PROFILES["microxcaling"], FORMATS[format], precision), want)
            assert (want != block_bytes(bits, PROFILES["ocp"], FORMATS[format])).any()  # the bug is real


def test_microxcaling_rounds_up_just_below_half_its_smallest_subnormal() -> None:
    """floor(|x| + 0.5) in torch, in either type, of the largest value below 0.5 and its lower neighbour."""
    for dtype, ones in ((torch.float32, 2**-25), (torch.bfloat16, 2**-9)):
        x = torch.zeros(32, dtype=dtype)
        x[:3] = torch.tensor([256.0 * 512, 0.5 - ones, 0.5 - 2 * ones], dtype=torch.float64).to(dtype)
        assert torch.floor(x[1:3] + 0.5).tolist() == [1.0, 0.0]
        array = x.numpy() if dtype == torch.float32 else x.view(torch.int16).numpy().view(BF16)
        for rounding in ("even", "away"):
            theirs = quantize(array, axis=0, profile="microxcaling", rounding=rounding)
            assert (theirs.codes()[:4].tolist(), theirs.scale_codes().tolist()) == ([0x78, 1, 0, 0], [136])
            assert quantize(array, axis=0, rounding=rounding).codes()[:4].tolist() == [0x78, 0, 0, 0]


def torchao_bytes(x: np.ndarray[Any, Any], rule: str, format: str) -> tuple[Any, Any]:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode  # type: ignore[import-untyped]
    from torchao.prototype.mx_formats.mx_tensor import to_mx  # type: ignore[import-untyped]

    tensor = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if x.dtype == BF16 else torch.from_numpy(x)
    dtype = {"e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[format]
    scales, elements = to_mx(tensor, dtype, 32, ScaleCalculationMode[rule.upper()])
    return scales.view(torch.uint8).reshape(-1, 1).numpy(), elements.view(torch.uint8).numpy()


@pytest.mark.parametrize("profile", TORCHAO_RELEASE)
@pytest.mark.parametrize("format", ["e4m3fn", "e5m2"])
def test_torchao_as_installed_is_bit_equal_to_its_profile(profile: str, format: str) -> None:
    """Elements and scales, on the probes, on every finite bfloat16 maximum, and next to every float32 threshold."""
    sweeps = dict(SWEEPS)
    for dtype in ("fp32", "bf16"):
        sweeps[f"probes {dtype}"] = np.stack([probe(name, dtype) for name in PROBES["inputs_fp32_bits"]])
    for sweep, x in sweeps.items():
        scales, elements = torchao_bytes(x, PROFILES[profile].rule, format)
        mx = quantize(x, axis=1, format=format, profile=profile)
        assert np.array_equal(mx.scale_codes(), scales), sweep
        assert np.array_equal(mx.codes(), elements), sweep


@pytest.mark.parametrize("rule", ["floor", "ceil", "even", "rceil"])
def test_torchao_as_installed_is_the_later_profile_too_where_the_two_versions_agree(rule: str) -> None:
    """Every finite bfloat16 maximum whose byte is neither 0 nor made 255 by a rounding: same scales, same elements."""
    for format in ("e4m3fn", "e5m2"):
        x = SWEEPS["every finite bfloat16 maximum"]
        scales, elements = torchao_bytes(x, rule, format)
        mx = quantize(x, axis=1, format=format, profile=f"torchao-{rule}")
        shared = (mx.scale_codes()[:, 0] > 0) & (mx.scale_codes()[:, 0] < 255)
        assert np.array_equal(mx.scale_codes()[shared], scales[shared])
        assert np.array_equal(mx.codes()[shared], elements[shared])
        left_out = FINITE_BF16[~shared].astype(np.int64) << 16
        rounds_to_2_128 = 0x7F780000 if format == "e4m3fn" else 0x7F700000
        assert ((left_out >> 23 <= FORMATS[format].emax) | (left_out >= rounds_to_2_128)).all()


def test_one_ulp_above_448_times_2_to_the_minus_127() -> None:
    """Exactly: byte 1. torchao and TransformerEngine lose the ulp in a subnormal quotient: byte 0."""
    for name, top in (("e4m3fn", 0x04600000), ("e5m2", 0x07E00000)):
        bits = np.array([top, top + 1, top + 2])
        exact = dataclasses.replace(PROFILES["ocp"], rule="rceil")
        assert block_bytes(bits, exact, FORMATS[name]).tolist() == [0, 1, 1]
        for profile in ("torchao-rceil", "te"):
            assert block_bytes(bits, PROFILES[profile], FORMATS[name]).tolist() == [0, 0, 1]


@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize("rule", ["floor", "rceil"])
def test_a_quotient_below_the_normal_numbers_is_float32s(rule: str, name: str) -> None:
    """Against a float32 division by NumPy, for a profile of one's own on any format: e2m3's largest is no integer."""
    row = FORMATS[name]
    profile = dataclasses.replace(PROFILES["te"], rule=rule, formats=(name,))
    mantissa = np.concatenate([np.arange(0, 1 << 23, 4099), (1 << 23) - 1 - np.arange(3), 0x600000 + np.arange(-2, 3)])
    bits = ((np.arange(row.emax + 3) << 23)[:, None] | mantissa).reshape(-1)[1:].astype(np.uint32)
    divisor = np.float32(2.0**row.emax if rule == "floor" else row.max_finite)
    quotient = (bits.view(np.float32) / divisor).view(np.uint32).astype(np.int64)
    exponent, rest = quotient >> 23, quotient & 0x7FFFFF
    up = np.where(exponent == 0, rest > 1 << 22, rest > 0)
    want = exponent if rule == "floor" else exponent + up
    assert (block_bytes(bits, profile, row) == want).all()


def test_unknown_and_unmeasured_profiles_are_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown profile 'mx'; expected one of ocp, torchao-floor"):
        profile_for("mx", FORMATS["e4m3fn"])
    with pytest.raises(ValueError, match=r"'te' was never measured for format 'e2m1'; expected one of e4m3fn, e5m2"):
        profile_for("te", FORMATS["e2m1"])
