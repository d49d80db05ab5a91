"""`opvi report`."""

import argparse
import shlex
from pathlib import Path

from opvi.app.cli._common import CommandError, Commands, explained, prepare
from opvi.app.cli._targets import runs_in


def add_report(commands: Commands) -> None:
    """Add `opvi report`: a page about a run."""
    command = commands.add_parser(
        "report",
        help="write an HTML page about a run",
        description="One file, for any browser, no network: learning curve, calibration, drift, effects, posterior.",
    )
    command.add_argument("run", type=Path, metavar="RUN", help="the folder of a run")
    command.add_argument("-o", "--out", type=Path, metavar="FILE", help="default: report.html in the run's folder")
    command.set_defaults(handler=report)


def report(options: argparse.Namespace) -> int:
    """Write the page of a run."""
    prepare()
    from opvi.app.learn import RunDirectory, contents
    from opvi.app.learn._predict import learnt
    from opvi.app.report import page
    from opvi.running._checkpoint import write_whole

    runs = runs_in(options.run)
    if runs and options.out:
        raise CommandError(f"{options.run} holds {len(runs)} runs, each with a page of its own. Leave out `--out`.")
    for folder in runs.values() or [options.run]:
        out = options.out or folder / "report.html"
        with explained(folder):
            known = learnt(RunDirectory(folder))
            command = shlex.join(["opvi", "learn", "--run", str(options.run), "--resume"])
            text = page(contents(known, folder.resolve().name, command))
            write_whole(out, [text.encode()])
            out.chmod(0o644)
        print(f"Written: {out}")
    return 0
