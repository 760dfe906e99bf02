"""What an outside build says of itself: a table of mxgate.toml, or the mapping that a package registers.

`mxgate.toml` lies in the folder of the file that holds the callable and has one table for each callable, named after
it, or after file and callable where two files have one of the same name:

    [wgrad]
    arrays = "torch"
    group_alignment = 128

    ["other.py:wgrad"]
    scale_layout = "blocked-128x4"

Every key is a field of the build record (KEYS), and every value is checked: a word that nobody knows is one line with
the file, the key and what was expected, never a default.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from mxgate.kernels.build import OPS, TERMS, Build, BuildError
from mxgate.oracle import ACCUMULATORS, FORMATS, PROFILES


def _one_of(known: Iterable[str]) -> tuple[str, Callable[[Any], bool]]:
    names = tuple(known)
    return f"one of {', '.join(names)}", lambda value: isinstance(value, str) and value in names


def _some_of(known: Iterable[str]) -> tuple[str, Callable[[Any], bool]]:
    names = tuple(known)
    return (
        f"a list of some of {', '.join(names)}",
        lambda value: isinstance(value, list | tuple) and bool(value) and all(v in names for v in value),
    )


def _whole(least: int) -> tuple[str, Callable[[Any], bool]]:
    return (
        f"a whole number from {least} up",
        lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least,
    )


def _texts(what: str) -> tuple[str, Callable[[Any], bool]]:
    return (
        f"a list of {what}",
        lambda value: isinstance(value, list | tuple) and all(isinstance(v, str) and v for v in value),
    )


def _is_options(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(v, str | bool | int | float) for v in value.values())


LAYOUTS = ("plain", "blocked-128x4", "blocked-128x4-groups")

# Key -> what it may hold, in words, and whether a value is that.
KEYS: Mapping[str, tuple[str, Callable[[Any], bool]]] = MappingProxyType(
    {
        "op": _one_of(OPS),
        "arrays": _one_of(("numpy", "torch")),
        "formats": _some_of(FORMATS),
        "out_dtypes": _some_of(("bfloat16", "float16", "float32")),
        "group_alignment": _whole(1),
        "accumulator": _one_of(ACCUMULATORS),
        "tail": _one_of(("zero", "untouched", "undefined")),
        "nan_reach": _whole(0),
        "scale_layout": (
            f"one of {', '.join(LAYOUTS)}, or file.py:function or package.module:function",
            lambda value: isinstance(value, str) and (value in LAYOUTS or _is_target(value)),
        ),
        "profile": _one_of(PROFILES),
        "options": ("a table of texts and numbers", _is_options),
        "requires": _texts("module names"),
        "sources": _texts("files"),
        "replaces": (
            "the id of a build of the same op, such as wgrad/numpy_reference",
            lambda value: isinstance(value, str) and value.partition("/")[0] in OPS,
        ),
    }
)


def _is_target(text: str) -> bool:
    where, _, attribute = text.rpartition(":")
    return bool(where) and attribute.isidentifier()


def fields(given: Mapping[str, Any], at: str, folder: Path | None) -> dict[str, Any]:
    """The build fields that a table states. `at`: how an error begins.

    folder: from where files in it are taken; None where they are named as in Build. Raises BuildError.
    """
    found: dict[str, Any] = {}
    for key, value in given.items():
        if key not in KEYS:
            near = difflib.get_close_matches(str(key), KEYS, 1)
            expected = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(KEYS)}"
            raise BuildError(f"{at}: there is no key {key!r}; {expected}")
        expected, holds = KEYS[key]
        if not holds(value):
            raise BuildError(f"{at}: {key} is {value!r}; expected {expected}")
        found[key] = tuple(value) if isinstance(value, list) else value
    if "options" in found:
        found["options"] = tuple(
            (str(k), v if isinstance(v, str) else json.dumps(v)) for k, v in sorted(found["options"].items())
        )
    if folder is None:
        return found
    if "sources" in found:
        found["sources"] = tuple(str((folder / name).resolve()) for name in found["sources"])
        if missing := next((name for name in found["sources"] if not Path(name).is_file()), None):
            raise BuildError(f"{at}: sources name {missing!r}, which is no file")
    where, colon, attribute = found.get("scale_layout", "").rpartition(":")
    if colon and where.endswith(".py"):
        found["scale_layout"] = f"{(folder / where).resolve()}:{attribute}"
    return found


def table(source: Path, attribute: str) -> tuple[dict[str, Any], str]:
    """What mxgate.toml beside `source` states of its callable `attribute`, unchecked, and how an error begins.

    Empty where there is no such file or no such table. Raises BuildError for a file that cannot be read, or that has a
    table which names nothing there.
    """
    path = source.parent / TERMS
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}, str(path)
    except (OSError, UnicodeDecodeError) as error:
        raise BuildError(f"{path}: cannot be read: {error}; expected TOML") from None
    try:
        tables = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise BuildError(f"{path}: is not TOML: {error}") from None
    for name, value in tables.items():
        if not isinstance(value, dict):
            raise BuildError(f"{path}: {name} stands outside of a table; expected it under [{attribute}]")
        if not _known(path.parent, name):
            raise BuildError(f"{path}: [{name}] names no callable of a file beside it; expected such as [{attribute}]")
    for name in (f"{source.name}:{attribute}", attribute):
        if name in tables:
            return tables[name], f"{path}: [{name}]"
    return {}, str(path)


def _known(folder: Path, name: str) -> bool:
    """Whether a table's name stands anywhere in the file, or in a Python file, that it may mean."""
    file, colon, attribute = name.rpartition(":")
    files = [folder / file] if colon else folder.glob("*.py")
    word = re.compile(rf"\b{re.escape(attribute)}\b")
    return any(path.is_file() and word.search(path.read_text(errors="replace")) for path in files)


def registered(name: str, given: Mapping[str, Any], at: str) -> Build:
    """The build that a package's entry point describes: KEYS, and `target` and perhaps `name`. Raises BuildError."""
    rest = dict(given)
    target, name = rest.pop("target", None), rest.pop("name", name)
    if not isinstance(target, str) or not _is_target(target):
        raise BuildError(f"{at}: target is {target!r}; expected package.module:callable")
    if not isinstance(name, str) or not name or os.sep in name:
        raise BuildError(f"{at}: name is {name!r}; expected a word")
    stated = fields(rest, at, None)
    if "op" not in stated:
        raise BuildError(f"{at}: there is no op; expected {KEYS['op'][0]}")
    return outside_terms(name, target, stated, at)


def outside_terms(name: str, target: str, stated: Mapping[str, Any], at: str) -> Build:
    """A build with the contract's defaults for outside builds and what it states itself. Raises BuildError."""
    op = stated["op"]
    usual: dict[str, Any] = {
        "out_dtypes": ("bfloat16", "float16", "float32"),
        "group_alignment": 32 if op == "wgrad" else 1,
    }
    needed = ("torch",) if stated.get("arrays") == "torch" else ()
    requires = tuple(dict.fromkeys((*needed, *stated.get("requires", ()))))
    try:
        return Build(name=name, target=target, **{**usual, **stated, "requires": requires})
    except BuildError as error:
        raise BuildError(f"{at}: {str(error).partition(': ')[2] or error}") from None
