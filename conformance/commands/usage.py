"""Bad usage or input: one line on standard error, what is wrong and what was expected; exit code 2."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import Any, NoReturn


class UsageError(Exception):
    """One line for standard error; exit 2."""


class Parser(argparse.ArgumentParser):
    """argparse with one-line errors, and the nearest name for a mistyped choice."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse has it, but here every word must be known: of a command its own parser says which is not."""
        found, extra = super().parse_known_args(args, namespace)
        if extra:
            word = extra[0].partition("=")[0]
            known = [name.lstrip("-") for name in self._option_string_actions if name.startswith("--")]
            near = difflib.get_close_matches(word.lstrip("-"), known, 1, 0.6)
            options = f"no option {word}" + (f"; did you mean --{near[0]}?" if near else "")
            self.error(options if word.startswith("-") else f"{word!r} is a word too many")
        return found, extra

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see `{self.prog} --help`)")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            what = "command" if isinstance(action, argparse._SubParsersAction) else action.dest
            raise UsageError(unknown(what, str(value), list(action.choices)))


def unknown(what: str, name: str, known: Sequence[str], where: str = "") -> str:
    """One line: what is not known, and the nearest names, or all of them where they are few."""
    quoted = [repr(one) if "," in one else one for one in known]
    if near := difflib.get_close_matches(name, known, 3, 0.6):
        return f"no {what} named {name!r}; did you mean {' or '.join(near)}?"
    if len(known) > 12:
        near = difflib.get_close_matches(name, known, 3, 0.0)
        return f"no {what} named {name!r}; the nearest of {len(known)} are {', '.join(near)}{where}"
    return f"no {what} named {name!r}; expected {'one of ' if len(known) > 1 else ''}{', '.join(quoted)}{where}"
