"""`opvi learn`."""

import argparse
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from opvi.app.cli._common import (
    CommandError,
    Commands,
    above_zero,
    add_save_every,
    address,
    between,
    explained,
    positive,
    prepare,
)
from opvi.app.cli._signals import EXIT, handled
from opvi.app.cli._targets import learn_each, runs_in

if TYPE_CHECKING:  # loading them takes a second, which `opvi --help` must not
    from opvi.app.learn import Learner
    from opvi.app.learn._learner import Stop
    from opvi.app.learn._starting import Asked, Ready
    from opvi.app.report._server import Server

# Options that are settled when a run begins.
SHAPING = (
    *("task", "classes", "leave_out", "first_rows", "decimal", "thousands", "date_format", "na", "fold_case"),
    *("positive", "counts", "hidden", "particles", "half_life", "memory_rows", "neighbour_rows", "seed"),
)
DRIFTED = 3  # the exit status where the data changed
BROKEN = 4  # and where the model's last predictions were not finite


def add_learn(commands: Commands) -> None:
    """Add `opvi learn`: a model from a file or a pipe."""
    command = commands.add_parser(
        "learn",
        help="learn from a file or a pipe, row by row",
        description="Learn to predict a column in one pass: every row is predicted first, then learnt. The run is kept "
        "in a folder, from which it resumes after a stop, a crash or a kill, to the same bits.",
    )
    command.add_argument(
        "source",
        nargs="?",
        metavar="SOURCE",
        help="CSV, TSV, JSON lines or Parquet, plain, .gz or .zst; - reads a pipe; nats://, kafka://, sqlite://, postgresql://",
    )
    command.add_argument(
        "--target", action="append", metavar="COL", help="the column to predict; may be repeated, with one run for each"
    )
    command.add_argument("--task", choices=("auto", "regression", "classification"))
    command.add_argument("--run", type=Path, metavar="DIR", help="folder of the run (default: SOURCE's name + .run)")
    command.add_argument("--resume", action="store_true", help="resume the run, or begin it if there is none")
    command.add_argument("--replayed", action="store_true", help="a pipe that starts again from its first row")
    command.add_argument("--strict", action="store_true", help="stop at the first row that breaks the schema")
    command.add_argument("--classes", metavar="A,B,…", help="all labels, if some may come later than the first rows")
    command.add_argument("--leave-out", action="append", default=[], metavar="COL", help="a column not to learn from")
    command.add_argument(
        "--first-rows", type=positive, metavar="N", help="rows from which the types are chosen (default: 1000)"
    )
    command.add_argument(
        "--format", choices=("csv", "tsv", "jsonl", "parquet"), help="determined by the name if omitted"
    )
    _add_spelling(command)
    command.add_argument("--hidden", metavar="W,W,…", help="widths of the hidden layers; 'none' for a linear model")
    command.add_argument("--particles", type=positive, metavar="N", help="chosen from the number of columns")
    command.add_argument(
        "--half-life",
        type=above_zero,
        metavar="ROWS",
        help="rows after which a row counts half; determined from the data if omitted",
    )
    command.add_argument(
        "--memory-rows", type=between(0, 10**7), metavar="N", help="how many rows to keep and learn from again"
    )
    command.add_argument(
        "--neighbour-rows",
        type=between(0, 10**7),
        metavar="N",
        help="rows kept for nearest-neighbour predictions; 0 for none",
    )
    command.add_argument("--seed", type=between(0, 2**32 - 1), metavar="N", help="seed of random numbers (default: 0)")
    add_save_every(command)
    command.add_argument(
        "--watch",
        nargs="?",
        type=between(0, 65535),
        const=0,
        metavar="PORT",
        help="show the report live, on this computer only",
    )
    command.add_argument(
        "--predictions",
        metavar="OUT",
        help="write what is predicted for each row before it is learnt: a .csv or .jsonl file, or nats://HOST/SUBJECT",
    )
    command.add_argument(
        "--alarm-exit", action="store_true", help=f"end with status {DRIFTED} if a drift alarm sounded in this call"
    )
    command.add_argument(
        "--alarm-webhook", type=address, metavar="URL", help="send every drift alarm to this URL, as a POST with JSON"
    )
    command.set_defaults(handler=learn)


def _add_spelling(command: argparse.ArgumentParser) -> None:
    """Add the options on how values are written and what kind of number the target is."""
    command.add_argument("--decimal", choices=(".", ","), help="the decimal sign; determined from the data if omitted")
    command.add_argument(
        "--thousands", metavar="SIGN", help="the thousands separator: a comma, a point, a space, ' or '' for none"
    )
    command.add_argument("--date-format", metavar="FORM", help="dmy, mdy, ymd, or a pattern such as %%d.%%m.%%Y")
    command.add_argument("--na", metavar="WORD,…", help="more words for a missing value, such as -999,unknown")
    command.add_argument("--fold-case", action="store_true", help="strings that differ by case or spaces are the same")
    kind = command.add_mutually_exclusive_group()
    kind.add_argument("--positive", action="store_true", help="the target is always positive: its logarithm is learnt")
    kind.add_argument("--counts", action="store_true", help="the target counts something: 0, 1, 2, …")


def learn(options: argparse.Namespace) -> int:
    """Learn until the source ends or a signal arrives."""
    prepare()
    from opvi.app.learn import RunDirectory, Stopped
    from opvi.app.learn._learner import Stop
    from opvi.app.learn._starting import alone

    if options.source is None and not options.resume:
        raise CommandError("SOURCE is missing: name the file to learn from. `-` reads a pipe.")
    if options.run is None and (options.source in (None, "-") or "://" in options.source):
        raise CommandError("`--run DIR` is missing: the run of a pipe or a broker has no default name.")
    folder = options.run or Path(_called(options.source) + ".run")
    targets = options.target or []
    if len(targets) > 1 or (options.resume and not targets and runs_in(folder)):
        return learn_each(options, folder, targets or list(runs_in(folder)), learn)
    if runs_in(folder):
        raise CommandError(f"{folder} holds runs of several targets. Choose another folder: `--run DIR`.")
    options.target = targets[0] if targets else None
    run = RunDirectory(folder)
    again = ["opvi", "learn", *([options.source] if options.source else []), "--run", str(folder), "--resume"]
    again += ["--target", options.target] if options.target else []
    again += ["--predictions", options.predictions] if options.predictions else []
    stop = Stop()
    with explained(folder):
        try:
            with handled(stop, again) as deadline, alone(run, asked_of(options), stop) as made:
                deadline.lossless = not made.source.once
                before = made.learner.summary().alarm_count
                _learn(made, stop, folder, options)
        except Stopped as why:
            saved = run.checkpoints.newest()
            rows = int(saved["rows"]) if saved else 0
            print(f"Stopped by {why}. {rows:,} rows are learnt and saved. To resume:", file=sys.stderr)
            print(f"  {shlex.join(again)}", file=sys.stderr)
            return EXIT.get(str(why), 1)
        _end(made.learner, folder)
        if made.learner.summary().broken:
            print(
                "opvi: the last rows were predicted as something that is not a finite number, so the model is of no "
                "use as it is. Look for extreme values in the table; then learn again in another run: `--run DIR`.",
                file=sys.stderr,
            )
            return BROKEN
        if options.alarm_exit and made.learner.summary().alarm_count > before:
            return DRIFTED
    return 0


def _called(source: str) -> str:
    """Return the name of a source without its format suffixes: `data.2024.csv.gz` becomes `data.2024`."""
    name = Path(source).name
    for endings in ((".gz", ".zst"), (".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".parquet", ".pq", ".txt")):
        for ending in endings:
            name = name[: -len(ending)] if name.lower().endswith(ending) and len(name) > len(ending) else name
    return name.lstrip(".") or "data"


def _learn(made: "Ready", stop: "Stop", folder: Path, options: argparse.Namespace) -> None:
    from opvi.app.cli._screen import Screen
    from opvi.app.cli._webhook import Webhook
    from opvi.app.learn._telling import telling

    with ExitStack() as stack:
        if options.watch is not None:
            server = stack.enter_context(_served(made.learner, folder, options.watch))
            made.messages.append(f"The report, live: {server.url}")
        hook = None
        if options.alarm_webhook:
            known = made.learner.summary().alarm_count
            hook = stack.enter_context(Webhook(options.alarm_webhook, folder.name, known))
        if options.predictions:
            stack.enter_context(telling(made.learner, options.predictions))
        screen = stack.enter_context(Screen(made.learner, made.messages))

        def show(learner: "Learner", share: float | None) -> None:
            screen.show(learner, share)
            if hook is not None:
                hook.show(learner)

        made.learner.learn(made.source, made.first, stop, show)


def _served(learner: "Learner", folder: Path, port: int) -> "Server":
    """Serve the current report, rendered on request."""
    from opvi.app.learn import contents
    from opvi.app.learn._predict import Learnt
    from opvi.app.report import page
    from opvi.app.report._server import serve

    about = learner.run.about()

    def made() -> str:
        known = Learnt(about, learner.schema, learner.settings, learner.engine.sampler, learner.tree(), [])
        return page(contents(known, folder.name, ""), live=True)

    try:
        return serve(made, port)
    except OSError as error:
        raise CommandError(f"`--watch {port}`: {error}") from None


def asked_of(options: argparse.Namespace) -> "Asked":
    """Return what the options ask for."""
    from opvi.adapters._tables import Reading
    from opvi.app.learn import Settings
    from opvi.app.learn._starting import Asked

    found = {name: value for name, value in vars(options).items() if value is not None}
    if "hidden" in found:
        found["hidden"] = _widths(options.hidden)
    given = {name: found[name] for name in SHAPING if found.get(name) not in (None, [], False, "auto")}
    settings, asked = ({name: found[name] for name in kind._fields if name in found} for kind in (Settings, Asked))
    classes = [label.strip() for label in options.classes.split(",")] if options.classes else None
    na = tuple(options.na.split(",")) if options.na else ()
    reading = Reading(options.decimal, options.thousands, options.date_format, na, options.fold_case)
    asked |= {
        "source": options.source,
        "settings": Settings(**settings),
        "classes": classes,
        "reading": reading,
        "given": given,
    }
    return Asked(**asked)


def _widths(text: str) -> tuple[int, ...]:
    try:
        return () if text == "none" else tuple(positive(width) for width in text.split(","))
    except (ValueError, argparse.ArgumentTypeError):
        raise CommandError(f"`--hidden` is {text!r}, but widths are needed, such as 50 or 100,50; or 'none'.") from None


def _end(learner: "Learner", folder: Path) -> None:
    """Print the result and what to do next."""
    from opvi.app.cli._screen import Terminal, table

    console = Terminal(width=None if sys.stdout.isatty() else 120)
    console.print(table(learner, None))
    if learner.rejected:
        console.print(f"Rejected rows, each with its reason: {folder / 'rejected.jsonl'}", markup=False)
    name = shlex.quote(str(folder))
    console.print(f"Predict:  opvi predict {name} NEW_ROWS.csv -o predictions.csv", highlight=False, soft_wrap=True)
    console.print(f"Look:     opvi report {name}", highlight=False, soft_wrap=True)
