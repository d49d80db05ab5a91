"""`python -m paper reproduce …`, `python -m paper measure …` and `python -m paper regret …`."""

import argparse
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from opvi.app.cli._common import CommandError, above_zero, need_rich, one_blas_thread, positive

COMMAND = ("python", "-m", "paper")
INTERRUPTED = 130  # what a shell reports for a command stopped by Ctrl-C
MODES = ("text", "authors", "best")
EXPERIMENTS = ("synthetic", "kin8nm", "mnist")
TABLES = ("mixture", "posteriordb", "regression", "classification")
FIGURES = tuple(f"understand-{part}" for part in ("posterior", "scaling", "repulsion", "regret", "modes"))
REGRETS = ("linear", "logistic", "errors", "posterior")


def add_reproduce(commands: Any) -> None:
    """`reproduce`: the paper's experiments."""
    command = commands.add_parser(
        "reproduce",
        help="run the paper's experiments",
        description="Run an experiment of the paper and put its printed numbers beside ours.",
    )
    command.add_argument("experiment", choices=(*EXPERIMENTS, "all"))
    command.add_argument(
        "--mode",
        choices=MODES,
        default="text",
        help="text (default): the paper's words, and our best; authors: what their code did; best: our best alone",
    )
    command.add_argument(
        "--seeds", "--splits", dest="repeats", type=positive, metavar="N", help="repeats of every row of the table"
    )
    command.add_argument(
        "--variance",
        type=above_zero,
        default=2.0,
        metavar="V",
        help="synthetic: σ_x², 2 in the authors' code, 4 in the text",
    )
    _add_output(command)
    command.set_defaults(handler=reproduce)


def add_measure(commands: Any) -> None:
    """`measure`: what the recommended trackers reach."""
    command = commands.add_parser(
        "measure",
        help="measure the recommended trackers",
        description="Measure what the recommended trackers reach: how near they keep to the exact posterior (mixture, "
        "posteriordb), and how well they predict real data in one pass (regression, classification). `understanding` "
        "makes the figures of the page on the ideas behind, each of which has a name of its own.",
    )
    command.add_argument("table", choices=(*TABLES, *FIGURES, "understanding", "all"))
    command.add_argument("--seeds", "--splits", dest="repeats", type=positive, metavar="N", help="repeats of every row")
    _add_output(command)
    command.set_defaults(handler=measure)


def add_regret(commands: Any) -> None:
    """`regret`: the paper's theory, measured."""
    command = commands.add_parser(
        "regret",
        help="measure dynamic regret and its bounds, or design batch sizes",
        description="Hold the paper's theory against runs: regret of online MAP and its bounds (linear, logistic), "
        "gradient errors (errors), distance to the running posterior (posterior). `design` predicts, for your own "
        "stream, what batch-size rules cost in rows and leave in gradient error.",
    )
    command.add_argument("part", nargs="?", default="all", choices=(*REGRETS, "design", "all"))
    command.add_argument("--seeds", dest="repeats", type=positive, metavar="N", help="repeats of every row")
    command.add_argument("--rounds", type=positive, default=1000, metavar="T", help="design: rounds (default: 1000)")
    command.add_argument(
        "--spread", type=above_zero, default=1.0, metavar="Λ", help="design: root of the variance of a row's gradient"
    )
    command.add_argument(
        "--rho", type=above_zero, nargs="+", default=[0.25, 0.55, 0.75, 1.0], metavar="ρ", help="design: batches ⌈t^ρ⌉"
    )
    command.add_argument("--batch", type=positive, default=20, metavar="B", help="design: the static batch beside them")
    command.add_argument(
        "--total", type=positive, metavar="N", help="design: rows that batches are drawn from; endless if not given"
    )
    _add_output(command)
    command.set_defaults(handler=regret)


def _add_output(command: Any) -> None:
    command.add_argument("--smoke", action="store_true", help="seconds instead of minutes, on small stand-in data")
    command.add_argument("--out", type=Path, default=Path("results"), metavar="DIR", help="folder (default: results)")
    command.add_argument("--fresh", action="store_true", help="start over instead of going on with finished results")


def reproduce(options: argparse.Namespace) -> int:
    """Run the chosen experiments one after the other."""
    need_rich()
    one_blas_thread()
    names = EXPERIMENTS if options.experiment == "all" else (options.experiment,)
    for name in names:
        experiment = _build(name, options)
        _run(experiment, _command(name, options, options.repeats or experiment.repeats), options)
    return 0


def measure(options: argparse.Namespace) -> int:
    """Fill the chosen tables one after the other."""
    need_rich()
    one_blas_thread()
    from paper import classification, regression, tracking, understand, understand_modes

    build = {
        "mixture": tracking.mixture,
        "posteriordb": tracking.posteriors,
        "regression": regression.experiment,
        "classification": classification.experiment,
        "understand-posterior": understand.running_posterior,
        "understand-scaling": understand.scaling,
        "understand-repulsion": understand.repulsion,
        "understand-regret": understand.regret,
        "understand-modes": understand_modes.modes,
    }
    several = {"all": (*TABLES, *FIGURES), "understanding": FIGURES}
    return _run_all("measure", several.get(options.table, (options.table,)), build, options)


def regret(options: argparse.Namespace) -> int:
    """Measure the chosen parts one after the other, or design batch sizes."""
    need_rich()
    if options.part == "design":
        return _design(options)
    one_blas_thread()
    from paper import regret as points
    from paper import regret_errors, regret_posterior

    build = {
        "linear": lambda smoke: points.experiment("linear", smoke),
        "logistic": lambda smoke: points.experiment("logistic", smoke),
        "errors": regret_errors.experiment,
        "posterior": regret_posterior.experiment,
    }
    return _run_all("regret", REGRETS if options.part == "all" else (options.part,), build, options)


def _run_all(command: str, names: Iterable[str], build: dict[str, Any], options: argparse.Namespace) -> int:
    """The named experiments of a command, one after the other."""
    for name in names:
        experiment = build[name](options.smoke)
        repeats = options.repeats or experiment.repeats
        words = [*COMMAND, command, name, "--seeds", str(repeats)]
        _run(experiment, shlex.join(words + (["--smoke"] if options.smoke else [])), options)
    return 0


def _design(options: argparse.Namespace) -> int:
    """A table and a figure of what batch-size rules cost and leave."""
    import opvi

    rules = {f"B = {options.batch}": opvi.schedules.static(options.batch)}
    rules |= {f"⌈t^{rho:g}⌉": opvi.schedules.power(rho) for rho in options.rho}
    if options.total:
        rules |= {f"saturating, ρ = {rho:g}": opvi.schedules.saturating(rho, options.total) for rho in options.rho}
    try:
        designs = {
            name: opvi.regret.design(rule, options.rounds, options.spread, total=options.total)
            for name, rule in rules.items()
        }
    except ValueError as error:
        raise CommandError(str(error)) from None
    table = opvi.regret.design_table(designs)
    print(table)
    path = options.out / "regret-design.md"
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        path.write_text(table + "\n")
    except OSError as error:
        raise CommandError(f"`--out` is {str(options.out)!r}, where nothing can be written: {error}.") from None
    _agg()
    from paper import plots

    figure = plots.save(plots.draw_designs(designs), path.with_suffix(".png"))
    print(f"Written: {path}, {figure}")
    return 0


def _build(name: str, options: argparse.Namespace) -> Any:
    """The experiment of that name; imported here, so that `opvi --help` is quick."""
    if name == "synthetic":
        from paper import synthetic

        return synthetic.experiment(options.mode, options.smoke, options.variance)
    if name == "kin8nm":
        from paper import kin8nm

        return kin8nm.experiment(options.mode, options.smoke)
    from paper import mnist

    return mnist.experiment(options.mode, options.smoke)


def _command(name: str, options: argparse.Namespace, repeats: int) -> str:
    words = [*COMMAND, "reproduce", name, "--mode", options.mode]
    words += ["--splits" if name == "kin8nm" else "--seeds", str(repeats)]
    if name == "synthetic" and options.variance != 2:
        words += ["--variance", f"{options.variance:g}"]
    return shlex.join(words + (["--smoke"] if options.smoke else []))


def _run(experiment: Any, command: str, options: argparse.Namespace) -> None:
    from paper import results

    repeats = options.repeats or experiment.repeats
    path = options.out / f"{experiment.name}.json"
    book = results.Book(path, results.header(experiment, command), options.fresh)
    try:
        _collect(experiment, repeats, book)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"Stopped. What was finished is in {path}; the same command goes on from there:\n"
            f"  {shlex.join([*command.split(), '--out', str(options.out)])}"
        ) from None
    _report(experiment, repeats, book)


def _collect(experiment: Any, repeats: int, book: Any) -> None:
    """Every trial, under a bar that shows the time left."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from paper import results

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("runs,"),
        TimeElapsedColumn(),
        TextColumn("gone,"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    total = sum(results.count(row, repeats) for row in experiment.rows)
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(experiment.name, total=total)
        bar.refresh()

        def advance(row: str, kept: bool) -> None:
            bar.update(task, advance=1, description=f"{experiment.name}: {row}")

        results.collect(experiment, repeats, book, advance)


def _report(experiment: Any, repeats: int, book: Any) -> None:
    """The table, the checks, and the files."""
    from rich.console import Console
    from rich.table import Table

    from paper import results

    # A table cut to a narrow log file would lose its numbers.
    console = Console(width=None if sys.stdout.isatty() else 160)
    cells = results.lines(experiment, book, repeats)
    table = Table(title=f"{experiment.title} (mean ± sd)")
    for index, column in enumerate(experiment.header):
        table.add_column(column, justify="right" if index else "left")
    for row in cells:
        table.add_row(*row)
    console.print(table)
    checks = experiment.checks(book)
    for check in checks:
        mark = "[green]holds[/]" if check.holds else "[red]fails[/]"
        console.print(f"{mark}  {check.what} = {check.value:.4f}, should be {check.should}", highlight=False)
    book.content["checks"] = [results.as_json(check._asdict()) for check in checks]
    book.content["table"] = {"header": experiment.header, "rows": cells}  # as pages print it
    if experiment.derived:
        book.content["derived"] = results.as_json(experiment.derived(book))
    book.write()
    paths = [book.path, *_figures(experiment, book)]
    text = book.path.with_suffix(".md")
    text.write_text(results.markdown(experiment.header, cells))
    console.print("Written: " + ", ".join(str(path) for path in [*paths, text]), highlight=False, soft_wrap=True)


def _agg() -> None:
    """Figures without a screen."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise CommandError("the figure needs matplotlib, which is not installed: pip install 'opvi[plots]'.") from None
    mpl.use("Agg")


def _figures(experiment: Any, book: Any) -> list[Path]:
    _agg()
    from paper import plots

    figure = experiment.draw(book, book.path.parent)
    if figure is None:
        return []
    paths = [book.path.with_suffix(ending) for ending in (".png", ".svg")]
    with plots.style():
        figure.savefig(paths[1], bbox_inches="tight", metadata={"Date": None})
        plots.save(figure, paths[0])
    return paths


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    from paper.data import DataError
    from paper.results import ResultsError

    parser = argparse.ArgumentParser(
        prog=" ".join(COMMAND), description="The paper's experiments, and our measurements."
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in (add_reproduce, add_measure, add_regret):
        add(commands)
    options = parser.parse_args(arguments)
    try:
        return options.handler(options)
    except (CommandError, DataError, ResultsError) as error:
        print(f"paper: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as stop:
        print(f"\n{stop}", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
