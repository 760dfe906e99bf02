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

# Its name, what it does, what exit codes other than 2 mean there, its options and itself.
COMMANDS: tuple[tuple[str, str, str, Options, Command], ...] = (
    (
        "run",
        "run builds through the gates and print a verdict for each",
        "0 all accepted, 1 something rejected, 3 inconclusive",
        run.options,
        run.command,
    ),
    (
        "report",
        "put the results of several runs (shards) together",
        "0 all accepted, 1 something rejected, 3 inconclusive",
        report.options,
        report.command,
    ),
    (
        "faults",
        "hold every wrong build against the gate that must reject it",
        "0 each is rejected and no correct build, 1 one lives on or a correct build is rejected, 3 none can run here",
        faults.options,
        faults.command,
    ),
    (
        "explain",
        "run a rejected build on its case again and say what probably went wrong",
        "0 it passes every gate now, 1 rejected, 3 inconclusive",
        explain.options,
        explain.command,
    ),
    (
        "minimize",
        "shrink a rejected case to the least that is still rejected",
        "1 rejected, and what is left is written",
        minimize.options,
        minimize.command,
    ),
    (
        "time",
        "time builds that hold a certificate, interleaved: one thread, or a GPU",
        "0 every build has a time, 1 one has none",
        time.options,
        time.command,
    ),
    (
        "bench-oracle",
        "time the oracle beside torchao and beside float32 products",
        "0 every target is met, 1 one is missed, 3 one has nothing to be held to here",
        bench_oracle.options,
        bench_oracle.command,
    ),
    (
        "train",
        "train a toy mixture of experts in MXFP8 beside BF16 and compare the losses",
        "0 every curve is as near to BF16's as it has to be, 1 one is not",
        train.options,
        train.command,
    ),
    (
        "inspect",
        "count what the machine code of an emulated build costs",
        "0 counted, 1 a figure is above the budget, 3 it cannot be emulated here",
        inspect.options,
        inspect.command,
    ),
    (
        "bench-emulator",
        "time the emulator, without and with its search for hazards such as a missing wait",
        "0 every target is met, 1 one is missed, 3 the emulated kernel is not here",
        bench_emulator.options,
        bench_emulator.command,
    ),
    (
        "fixtures",
        "verify, generate, list, export or capture the tensors in fixtures/",
        "0 done, 1 verify found a difference",
        fixtures.options,
        fixtures.command,
    ),
    (
        "list",
        "list builds, cases, gates, faults, formats, profiles or accumulators",
        "0 listed",
        list.options,
        list.command,
    ),
)


def parser() -> Parser:
    """The command line of every command."""
    whole = Parser(
        prog="mxgate",
        description="Hold MXFP8 quantizers and grouped GEMMs against an exact oracle; time only what was accepted.",
        epilog=_EXIT,
    )
    commands = whole.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for name, what, codes, options, command in COMMANDS:
        sub = commands.add_parser(
            name, help=what, description=what, epilog=f"exit codes: {codes}; 2 bad usage or input"
        )
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
