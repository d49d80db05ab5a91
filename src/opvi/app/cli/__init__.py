"""The command line."""

import argparse
import sys
from collections.abc import Sequence

from opvi.app.cli._common import CommandError
from opvi.app.cli._learn import add_learn
from opvi.app.cli._predict import add_predict
from opvi.app.cli._report import add_report
from opvi.app.cli._serve import add_serve

INTERRUPTED = 130  # what a shell reports for a command stopped by Ctrl-C


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands. Each sets `handler`, a function from the options to the exit status."""
    out = argparse.ArgumentParser(prog="opvi", description="Online Bayesian inference with particles.")
    out.add_argument("--version", action="store_true", help="print the version and exit")
    commands = out.add_subparsers(title="commands", metavar="COMMAND")
    for add in (add_learn, add_predict, add_report, add_serve):
        add(commands)
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status."""
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
