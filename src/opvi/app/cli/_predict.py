"""`opvi predict`."""

import argparse
import os
import stat
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

from opvi.app.cli._common import CommandError, Commands, explained, prepare
from opvi.app.cli._targets import runs_in, side_by_side


def add_predict(commands: Commands) -> None:
    """Add `opvi predict`: predictions of a run."""
    command = commands.add_parser(
        "predict",
        help="predict with a trained run",
        description="One line for every row of SOURCE: mean, sd and quantiles, or the label and all probabilities. A "
        "row that breaks the schema has gaps.",
    )
    command.add_argument("run", type=Path, metavar="RUN", help="the folder of a run")
    command.add_argument("source", metavar="SOURCE", help="as for learn; the target's column is not needed")
    command.add_argument(
        "-o", "--out", default="-", metavar="OUT", help="CSV, JSON lines or Parquet (default: standard output)"
    )
    command.add_argument("--out-format", choices=("csv", "jsonl", "parquet"), help="determined by the name if omitted")
    command.add_argument("--format", choices=("csv", "tsv", "jsonl", "parquet"), help="of SOURCE")
    command.add_argument(
        "--quantiles",
        default="0.05,0.5,0.95",
        metavar="Q,Q,…",
        help="quantile levels of a regression (default: 0.05,0.5,0.95)",
    )
    command.set_defaults(handler=predict)


def predict(options: argparse.Namespace) -> int:
    """Write predictions for every row of a source."""
    prepare(learns=False)
    from opvi.adapters._tables import open_source
    from opvi.adapters._tables._writing import Writer, format_of
    from opvi.app.learn import RunDirectory
    from opvi.app.learn import predict as predictions
    from opvi.app.learn._predict import learnt

    try:
        quantiles = [float(q) for q in options.quantiles.split(",") if q.strip()]
    except ValueError:
        raise CommandError(f"`--quantiles` is {options.quantiles!r}, but numbers are needed: 0.05,0.5,0.95.") from None
    with explained(options.run):
        _refuse_own_source(options.source, options.out)
        runs = runs_in(options.run)
        if runs and options.source == "-":
            raise CommandError("a pipe is read once, but every target reads the rows. Save it to a file.")
        each = {target: learnt(RunDirectory(folder)) for target, folder in (runs or {"": options.run}).items()}
        for message in (message for known in each.values() for message in known.damaged):
            print(f"{message} Passed over.", file=sys.stderr)
        for target, known in each.items():
            if not known.rows:
                what = f" of {target}" if target else ""
                print(f"Nothing was learnt yet: the predictions{what} are the model's first guesses.", file=sys.stderr)
        rows = bad = 0
        with ExitStack() as stack:
            sources = [stack.enter_context(open_source(options.source, options.format)) for _ in each]
            pairs = zip(each.items(), sources, strict=True)
            parts = {target: predictions(known, source, quantiles) for (target, known), source in pairs}
            out = stack.enter_context(Writer(options.out, options.out_format or format_of(options.out)))
            for columns, rejected in side_by_side(parts) if runs else parts[""]:
                out.write(columns)
                rows += len(columns["row"])
                bad += len(rejected)
                for one in rejected[: max(0, 3 - (bad - len(rejected)))]:
                    print(f"row {one.row:,} has no prediction: {one.reason}", file=sys.stderr)
    told = f", {bad:,} of them without a prediction" if bad else ""
    print(f"{rows:,} rows{told}" + (f": {options.out}" if options.out != "-" else ""), file=sys.stderr)
    return 0


def _refuse_own_source(source: str, out: str) -> None:
    """Refuse to write over the file that is read, under whatever name."""
    with suppress(OSError, ValueError):  # one of them is not there, or has no number
        read = os.fstat(sys.stdin.fileno()) if source == "-" else Path(source).stat()
        written = os.fstat(sys.stdout.fileno()) if out == "-" else Path(out).stat()
        if stat.S_ISREG(read.st_mode) and os.path.samestat(read, written):
            raise CommandError(f"the predictions would be written over {source}: {out} is the source itself.")
