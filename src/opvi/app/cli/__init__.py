"""The command line."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from opvi.app.cli import _learning as learning
from opvi.app.cli._common import CommandError

INTERRUPTED = 130  # what a shell reports for a command stopped by Ctrl-C
SUBCOMMANDS: list[Callable[[Any], None]] = [
    learning.add_learn,
    learning.add_predict,
    learning.add_report,
]


def parser() -> argparse.ArgumentParser:
    """All subcommands. Each sets `handler`, a function of the options that returns the exit status."""
    out = argparse.ArgumentParser(prog="opvi", description="Online Bayesian inference with particles.")
    out.add_argument("--version", action="store_true", help="print the version and end")
    commands = out.add_subparsers(title="commands", metavar="COMMAND")
    for add in SUBCOMMANDS:
        add(commands)
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    options = parser().parse_args(arguments)
    if options.version:
        import opvi

        print(f"opvi {opvi.__version__}")
        return 0
    if not hasattr(options, "handler"):
        parser().print_help()
        return 2
    try:
        return options.handler(options)
    except CommandError as error:
        print(f"opvi: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as stop:
        print(f"\n{stop}", file=sys.stderr)
        return INTERRUPTED
