"""The command line: the table of commands, and what happens to a process that runs one.

Exit codes, everywhere: 0 all accepted, 1 something rejected, 2 bad usage or input, 3 inconclusive. Bad input is one
line on standard error: what is wrong and what was expected. With --json standard output is one JSON document.

Each command is a file of conformance/commands/, which imports what it needs once it is run: `--help` costs little.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence

from mxgate.conformance.commands import (
    bench_emulator,
    bench_oracle,
    explain,
    faults,
    fixtures,
    inspect,
    list,
    minimize,
    process,
    report,
    run,
    time,
    train,
)
from mxgate.conformance.commands.usage import Parser, UsageError
from mxgate.kernels.build import BuildError

# The runner's threads keep the cores busy; a BLAS that starts threads of its own only gets in their way.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

_EXIT = "exit codes: 0 all accepted, 1 something rejected, 2 bad usage or input, 3 inconclusive"

Options = Callable[[argparse.ArgumentParser], None]
Command = Callable[[argparse.Namespace], int]

COMMANDS: tuple[tuple[str, str, Options, Command], ...] = (
    ("run", "run builds through the gates and print a verdict for each", run.options, run.command),
    ("report", "put the results of several runs (shards) together", report.options, report.command),
    ("faults", "hold every wrong build against the gate that must reject it", faults.options, faults.command),
    (
        "explain",
        "run a rejected build on its case again and say what probably went wrong",
        explain.options,
        explain.command,
    ),
    ("minimize", "shrink a rejected case to the least that is still rejected", minimize.options, minimize.command),
    (
        "time",
        "time builds that hold a certificate, interleaved: one thread, or a GPU",
        time.options,
        time.command,
    ),
    (
        "bench-oracle",
        "time the oracle beside torchao and beside float32 products",
        bench_oracle.options,
        bench_oracle.command,
    ),
    (
        "train",
        "train a toy mixture of experts in MXFP8 beside BF16 and compare the losses",
        train.options,
        train.command,
    ),
    ("inspect", "count what the machine code of an emulated build costs", inspect.options, inspect.command),
    (
        "bench-emulator",
        "time the emulator, hazards off and on, against its targets",
        bench_emulator.options,
        bench_emulator.command,
    ),
    (
        "fixtures",
        "verify, generate, list, export or capture the tensors in fixtures/",
        fixtures.options,
        fixtures.command,
    ),
    ("list", "list builds, cases, gates, faults, formats, profiles or accumulators", list.options, list.command),
)


def parser() -> Parser:
    """The command line of every command."""
    whole = Parser(
        prog="mxgate",
        description="Hold MXFP8 quantizers and grouped GEMMs against an exact oracle; time only what was accepted.",
        epilog=_EXIT,
    )
    commands = whole.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for name, what, options, command in COMMANDS:
        sub = commands.add_parser(name, help=what, description=what, epilog=_EXIT)
        sub.set_defaults(function=command)
        options(sub)
    return whole


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `mxgate` command; returns the exit code."""
    alone = threading.current_thread() is threading.main_thread()
    # A polite kill ends like Ctrl-C: with no child left behind. Not by raising SIGINT, which a shell's background jobs
    # ignore.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler) if alone else None
    resumes = False
    try:
        whole = parser()
        args = whole.parse_args(argv)
        if args.command is None:
            whole.print_help()
            return 2
        resumes = args.command == "run"
        if args.command != "bench-oracle":  # which does so itself, half way
            process.keep_memory()
        with process.emulating(getattr(args, "device", None)):
            code = int(args.function(args))
        sys.stdout.flush()
        return code
    except (UsageError, BuildError) as error:
        print(f"mxgate: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"mxgate: interrupted{'; the same command goes on from here' if resumes else ''}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone. Python would complain again while flushing at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except ValueError as error:
        from mxgate.fixtures.store import StoreError

        if not isinstance(error, StoreError):
            raise
        print(f"mxgate: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"mxgate: {f'{error.filename}: ' if error.filename else ''}{error.strerror or error}", file=sys.stderr)
        return 2
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
