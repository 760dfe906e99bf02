"""A certificate: the record of an Accept, without which nothing is timed.

It names everything the verdict depends on: the build and its fingerprint, the cases and gates, the device, the versions
and the hash of the oracle's and gates' own source. Its digest covers all of that: a certificate that was edited by
hand, truncated or merged is refused. The digest has no key, so it guards against accident and not against forgery;
whoever wants to forge a certificate can as well forge the build.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mxgate.conformance.case import Case
from mxgate.conformance.data import is_large
from mxgate.conformance.machine import device_of
from mxgate.conformance.run import RunReport
from mxgate.conformance.version import code_version
from mxgate.kernels.build import Build, BuildError, build_from, called, version

FORMAT = "mxgate certificate 2"


class CertificateError(ValueError):
    """Why a certificate does not count, in one line that begins with its path."""


@dataclass(frozen=True)
class Certificate:
    """build: the record that was accepted. cases: the ids on which it ran. gates: the outcome of each.

    device: what it ran on. machines: whose that was, with the number of the GPU where a machine has several.
    """

    build: Build
    fingerprint: str
    tier: str
    cases: tuple[str, ...]
    gates: Mapping[str, str]
    device: str
    machines: tuple[str, ...]
    code: str
    versions: Mapping[str, str]


def write_all(report: RunReport, folder: Path) -> list[Path]:
    """A certificate for every accepted build of a finished plan; a rejected build loses the one it had."""
    written = []
    for build, verdict in zip(report.builds, report.verdicts, strict=True):
        path = _place(folder, build)
        if verdict.word != "accept":
            if verdict.word == "reject":
                path.unlink(missing_ok=True)
            continue
        mine = [result for result in report.results if result.build == build.id and result.skipped is None]
        body = {
            "certificate": FORMAT,
            "build": asdict(build),
            "fingerprint": mine[0].fingerprint,
            "tier": report.settings.tier,
            "cases": sorted(result.case for result in mine),
            "gates": {gate: outcome.value for gate, outcome in verdict.gates.items()},
            "device": verdict.devices[0],
            "machines": list(verdict.machines),
            "code": code_version(),
            "versions": _versions(build),
        }
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**body, "digest": _digest(body)}, indent=1) + "\n"
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(text)
        partial.replace(path)
        written.append(path)
    return written


def _place(folder: Path, build: Build) -> Path:
    """Where a build's certificate lies: under its name, unless another build of that name has one there."""
    path = folder / f"{build.op}-{build.name}.json"
    apart = path.with_name(f"{path.stem}-{hashlib.sha256(build.target.encode()).hexdigest()[:8]}.json")
    if apart.exists():
        return apart
    try:
        return path if read(path).build.target == build.target else apart
    except CertificateError:
        return path


def read(path: Path) -> Certificate:
    """A certificate as it was written. Raises CertificateError; whether it still holds is for `check` to say."""
    try:
        record = json.loads(path.read_bytes())
    except OSError as error:
        raise CertificateError(f"{path}: {error.strerror}; `mxgate run` writes certificates") from None
    except (ValueError, RecursionError):
        raise CertificateError(f"{path}: is not JSON; expected a certificate that `mxgate run` wrote") from None
    if not isinstance(record, dict) or record.get("certificate") != FORMAT:
        raise CertificateError(f"{path}: is no certificate of this version ({FORMAT})")
    if record.pop("digest", None) != _digest(record):
        raise CertificateError(f"{path}: was changed after it was written (its digest does not fit its content)")
    try:
        return Certificate(
            build=build_from(record["build"]),
            fingerprint=record["fingerprint"],
            tier=record["tier"],
            cases=tuple(record["cases"]),
            gates=record["gates"],
            device=record["device"],
            machines=tuple(record["machines"]),
            code=record["code"],
            versions=record["versions"],
        )
    except (KeyError, TypeError, ValueError):
        raise CertificateError(f"{path}: is no certificate of this version ({FORMAT})") from None


def check(path: Path, certificate: Certificate) -> None:
    """Raises CertificateError when what was accepted is not what is here now."""
    build = certificate.build
    again = f"run `mxgate run {called(build)}` again"
    if certificate.device != (here := device_of(build)):
        raise CertificateError(
            f"{path}: {build.id} was accepted on another device ({certificate.device}; here: {here}); {again}"
        )
    try:
        now = build.fingerprint()
    except (BuildError, OSError) as error:
        raise CertificateError(f"{path}: the source of {build.id} is gone ({error})") from None
    if now != certificate.fingerprint:
        changed = [f"{k} {v} -> {w}" for k, v in certificate.versions.items() if (w := _versions(build).get(k)) != v]
        what = ", ".join(changed) or "its source or options"
        raise CertificateError(f"{path}: {build.id} has changed since it was accepted ({what}); {again}")
    if certificate.code != code_version():
        raise CertificateError(
            f"{path}: {build.id} was accepted by another version of the oracle or the gates; {again}"
        )


def covers(path: Path, certificate: Certificate, case: Case, certified: Sequence[Case]) -> None:
    """Raises CertificateError unless a certified case has the case's op, shape class, formats and output type.

    A class is a shape, and all that is too large for an exact answer together.
    """
    wanted = (case.op, _class(case), case.formats, case.out_dtype)
    if wanted in {(c.op, _class(c), c.formats, c.out_dtype) for c in certified}:
        return
    shapes = sorted({_class(c) for c in certified if (c.op, c.formats, c.out_dtype) == (case.op, *wanted[2:])})
    known = f"shapes {', '.join(shapes)}" if shapes else "no case with its op, formats and output type"
    build = certificate.build
    more = f"; run `mxgate run --tier production {called(build)}`" if is_large(case) else ""
    raise CertificateError(
        f"{path}: {build.id} was not accepted on the shape class of {case.id}; it covers {known}{more}"
    )


def _class(case: Case) -> str:
    return "of production size" if is_large(case) else case.shape


def _versions(build: Build) -> dict[str, str]:
    packages = ("numpy", "ml_dtypes", *build.requires)
    return {"python": platform.python_version(), **{package: version(package) for package in packages}}


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
