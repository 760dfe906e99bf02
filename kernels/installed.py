"""Builds that installed packages register under the entry point group `mxgate.builds`.

An entry point loads a Build, or a mapping with the keys of mxgate.toml and `op` and `target` (perhaps `name`; else the
entry point's own). It is loaded in a process of its own, for importing a package runs its code: whatever that prints,
changes or raises is nobody else's trouble, and one that fails is a note instead of a build.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mxgate.kernels.build import Build, BuildError, build_from

GROUP = "mxgate.builds"
SECONDS = 60.0  # that importing a package may take
_START = (
    "import sys; sys.path[:] = filter(None, sys.path); from mxgate.kernels.installed import main; main(*sys.argv[1:])"
)


@functools.cache
def installed() -> tuple[tuple[Build, ...], tuple[str, ...]]:
    """(builds, notes): every registered build, and a line for each entry point that gives none."""
    builds: list[Build] = []
    notes: list[str] = []
    seen: set[tuple[str, str]] = set()
    for point in importlib.metadata.entry_points(group=GROUP):
        if (point.name, point.value) in seen:  # a folder may stand on the path twice
            continue
        seen.add((point.name, point.value))
        at = f"entry point {point.name} = {point.value!r} of {GROUP}"
        try:
            builds.append(_load(point.name, point.value, at))
        except BuildError as error:
            notes.append(str(error))
    return tuple(builds), tuple(notes)


def _load(name: str, value: str, at: str) -> Build:
    from mxgate.kernels.declared import registered

    with tempfile.NamedTemporaryFile(prefix="mxgate-") as answer:  # a file never blocks its writer, as a pipe may
        try:
            done = subprocess.run(
                [sys.executable, "-c", _START, name, value, answer.name],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise BuildError(f"{at}: gave nothing within {SECONDS:g} s") from None
        text = answer.read()
    try:
        found: dict[str, Any] = json.loads(text)
    except ValueError:
        raise BuildError(f"{at}: its process ended with status {done.returncode} and gave nothing") from None
    if "error" in found:
        raise BuildError(f"{at}: {found['error']}")
    if "mapping" in found:
        return registered(name, found["mapping"], at)
    try:
        build = build_from(found["build"])
        if os.sep in build.name:  # a name is part of a file name
            raise BuildError(f"name is {build.name!r}; expected a word")
        return build
    except (BuildError, TypeError, KeyError, ValueError) as error:
        raise BuildError(f"{at}: {error}") from None


def main(name: str, value: str, answer: str) -> None:
    """In the child: load the entry point and write what it is as JSON to the file `answer`."""
    try:
        loaded = importlib.metadata.EntryPoint(name, value, GROUP).load()
        if isinstance(loaded, Build):
            found: dict[str, Any] = {"build": asdict(loaded)}
        elif isinstance(loaded, dict):
            found = {"mapping": loaded}
        else:
            found = {"error": f"is of type {type(loaded).__name__}; expected a Build or a dict"}
        text = json.dumps(found)
    except BaseException as error:  # SystemExit is the package's doing as well
        text = json.dumps({"error": f"raised {type(error).__name__}: {' '.join(str(error).split())[:300]}"})
    Path(answer).write_text(text)
