"""`opvi report`."""

import argparse
import shlex
from pathlib import Path

from opvi.app.cli._common import Commands, explained, prepare


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

    out = options.out or options.run / "report.html"
    with explained(options.run):
        known = learnt(RunDirectory(options.run))
        command = shlex.join(["opvi", "learn", "--run", str(options.run), "--resume"])
        text = page(contents(known, options.run.resolve().name, command))
        write_whole(out, [text.encode()])
        out.chmod(0o644)
    print(f"Written: {out}")
    return 0
