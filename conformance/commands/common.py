"""What several commands have: options, the types of their words, what they are by default, output as one document."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mxgate.conformance.commands.usage import UsageError

STATE = Path(".mxgate")
TIERS = ("smoke", "full", "production")
SECONDS: Mapping[str, float] = {"smoke": 60.0, "full": 300.0, "production": 600.0}  # the longest launch of a tier


def shard(text: str) -> tuple[int, int]:
    i, slash, n = text.partition("/")
    if not (slash and i.isdecimal() and n.isdecimal() and 1 <= int(i) <= int(n)):
        raise argparse.ArgumentTypeError(f"{text!r} is no shard; expected i/n with 1 <= i <= n, such as 2/8")
    return int(i), int(n)


def _positive(kind: Callable[[str], Any], noun: str) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value < 1e9:
            raise argparse.ArgumentTypeError(f"{text!r} is not {noun} above 0")
        return value

    return parse


COUNT, NUMBER = _positive(int, "a whole number"), _positive(float, "a number")


def salt(text: str) -> int:
    if not (text.isdecimal() and len(text) < 19):
        most = " and at most 18 digits" if text.isdecimal() else ""
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0{most}")
    return int(text)


def path(text: str) -> Path:
    """A Path; of nothing, such as a shell's variable that is not set, it would be the working directory."""
    if not text:
        raise argparse.ArgumentTypeError("'' names no file or folder")
    return Path(text)


def jobs(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--jobs", type=COUNT, metavar="N", help="child processes at work at a time (default: one a core)")


def limits(sub: argparse.ArgumentParser, seconds: float | None = 60.0) -> None:
    """--time-limit and --memory-limit of a launch; seconds=None: as SECONDS has it for the tier."""
    sub.add_argument(
        "--time-limit",
        type=NUMBER,
        default=seconds,
        metavar="S",
        help="seconds one launch may take "
        + ("(default 60; full 300, production 600)" if seconds is None else "(default 60)"),
    )
    sub.add_argument(
        "--memory-limit",
        type=NUMBER,
        default=8.0,
        metavar="GIB",
        help="GiB that one child process may hold, besides its case's arrays (default 8)",
    )


def as_json(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--json", action="store_true", help="one JSON document on standard output")


def as_html(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--html", type=path, metavar="FILE", help="also one offline file with pictures of what failed (extra: report)"
    )


def recorded(sub: argparse.ArgumentParser, what: str) -> None:
    sub.add_argument(
        "--cases",
        action="append",
        default=[],
        type=path,
        metavar="FILE",
        help=f"a file of recorded calls, as mxgate.capture and `mxgate minimize` write them: {what}; may be repeated",
    )


def print_json(document: Any) -> None:
    """One document on standard output, all that --json prints."""
    json.dump(document, sys.stdout, indent=1)
    sys.stdout.write("\n")


def writable(out: Path) -> Path:
    """The folder, made. Raises UsageError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = "it is a file; expected a folder" if out.is_file() else error.strerror
        raise UsageError(f"cannot write to {str(out)!r}: {why}") from None
    return out


def check_writable(file: Path) -> None:
    """UsageError, before the work whose outcome goes there, where no file can be written."""
    if not file.absolute().parent.is_dir():
        raise UsageError(f"cannot write {str(file)!r}: its folder does not exist")
    if file.is_dir():
        raise UsageError(f"cannot write {str(file)!r}: it is a folder; expected a file")
    if not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
        raise UsageError(f"cannot write {str(file)!r}: permission denied")
