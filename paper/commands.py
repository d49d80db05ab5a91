"""`python -m paper reproduce …`, `python -m paper measure …` and `python -m paper regret …`."""

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from paper.data import DataError
from paper.results import Experiment, ResultsError
from paper.running import CommandError, need_libraries, one_blas_thread, run

COMMAND = ("python", "-m", "paper")
INTERRUPTED = 130  # what a shell reports for a command stopped by Ctrl-C
MODES = ("text", "authors", "best")
EXPERIMENTS = ("synthetic", "kin8nm", "mnist")
TABLES = ("mixture", "posteriordb", "regression", "classification")
FIGURES = tuple(f"understand-{part}" for part in ("posterior", "scaling", "repulsion", "regret", "modes"))
REGRETS = ("linear", "logistic", "errors", "posterior")

Commands = argparse._SubParsersAction  # the type of what `add_subparsers` returns has no public name


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status."""
    options = parser().parse_args(arguments)
    try:
        need_libraries()
        os.environ.setdefault("MPLBACKEND", "Agg")  # figures go to files
        options.handler(options)
    except (CommandError, DataError, ResultsError) as error:
        print(f"paper: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as stop:
        print(f"\n{stop}", file=sys.stderr)
        return INTERRUPTED
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands. Each command sets `handler`, a function of the options."""
    out = argparse.ArgumentParser(
        prog=" ".join(COMMAND),
        description="Run the paper's experiments and our measurements. Each writes a JSON file, a table and, mostly, a "
        "figure. Trials are kept as they finish: the same command resumes where it stopped.",
    )
    commands = out.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in (add_reproduce, add_measure, add_regret):
        add(commands)
    return out


# --- arguments ----------------------------------------------------------------------------------


def add_reproduce(commands: Commands) -> None:
    """Add `reproduce`: the paper's experiments."""
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
        "--variance",
        type=above_zero,
        default=2.0,
        metavar="V",
        help="synthetic: σ_x², 2 in the authors' code, 4 in the text",
    )
    _add_common(command, "--seeds", "--splits")
    command.set_defaults(handler=reproduce)


def add_measure(commands: Commands) -> None:
    """Add `measure`: what the recommended trackers reach."""
    command = commands.add_parser(
        "measure",
        help="measure the recommended trackers",
        description="Measure what the recommended trackers reach: how near they keep to the exact posterior (mixture, "
        "posteriordb), and how well they predict real data in one pass (regression, classification). `understanding` "
        "makes all figures of the page on the ideas behind opvi, understand-… one of them.",
    )
    command.add_argument("table", choices=(*TABLES, *FIGURES, "understanding", "all"))
    _add_common(command, "--seeds", "--splits")
    command.set_defaults(handler=measure)


def add_regret(commands: Commands) -> None:
    """Add `regret`: the paper's theory, measured."""
    command = commands.add_parser(
        "regret",
        help="measure dynamic regret and its bounds, or design batch sizes",
        description="Hold the paper's theory against runs: regret of online MAP and its bounds (linear, logistic), "
        "gradient errors (errors), distance to the running posterior (posterior). `design` predicts, for your own "
        "stream, what batch-size rules cost in rows and leave in gradient error.",
    )
    command.add_argument("part", nargs="?", default="all", choices=(*REGRETS, "design", "all"))
    command.add_argument("--rounds", type=positive, default=1000, metavar="T", help="design: rounds (default: 1000)")
    command.add_argument(
        "--spread", type=above_zero, default=1.0, metavar="Λ", help="design: root of the variance of a row's gradient"
    )
    command.add_argument(
        "--rho", type=above_zero, nargs="+", default=[0.25, 0.55, 0.75, 1.0], metavar="ρ", help="design: batches ⌈t^ρ⌉"
    )
    command.add_argument("--batch", type=positive, default=20, metavar="B", help="design: the static batch beside them")
    command.add_argument(
        "--total", type=positive, metavar="N", help="design: rows that batches are drawn from; endless if omitted"
    )
    _add_common(command, "--seeds")
    command.set_defaults(handler=regret)


def _add_common(command: argparse.ArgumentParser, *repeats: str) -> None:
    command.add_argument(*repeats, dest="repeats", type=positive, metavar="N", help="repeats of every row of the table")
    command.add_argument("--smoke", action="store_true", help="seconds instead of minutes, on small stand-in data")
    command.add_argument("--out", type=Path, default=Path("results"), metavar="DIR", help="folder (default: results)")
    command.add_argument("--fresh", action="store_true", help="start over instead of resuming from finished trials")


def positive(text: str) -> int:
    """Return a whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def above_zero(text: str) -> float:
    """Return a finite number greater than 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number greater than 0")
    return value


# --- handlers; experiments are imported here, so that `--help` is quick -----------------------------


def reproduce(options: argparse.Namespace) -> None:
    """Run the chosen experiments one after the other."""
    one_blas_thread()
    names = EXPERIMENTS if options.experiment == "all" else (options.experiment,)
    for name in names:
        experiment = build(name, options)
        words = ["reproduce", name, "--mode", options.mode]
        words += ["--splits" if name == "kin8nm" else "--seeds", str(options.repeats or experiment.repeats)]
        if name == "synthetic" and options.variance != 2:
            words += ["--variance", f"{options.variance:g}"]
        run(experiment, _spelt(words, options), options.repeats, options.out, options.fresh)


def build(name: str, options: argparse.Namespace) -> Experiment:
    """Return the paper's experiment of that name."""
    from paper import kin8nm, mnist, synthetic

    if name == "synthetic":
        return synthetic.experiment(options.mode, options.smoke, options.variance)
    return {"kin8nm": kin8nm, "mnist": mnist}[name].experiment(options.mode, options.smoke)


def measure(options: argparse.Namespace) -> None:
    """Fill the chosen tables one after the other."""
    one_blas_thread()
    from paper import classification, regression, tracking, understand, understand_modes

    builders = {
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
    _run_all("measure", several.get(options.table, (options.table,)), builders, options)


def regret(options: argparse.Namespace) -> None:
    """Measure the chosen parts one after the other, or design batch sizes."""
    if options.part == "design":
        return _design(options)
    one_blas_thread()
    from paper import regret as points
    from paper import regret_errors, regret_posterior

    builders = {
        "linear": lambda smoke: points.experiment("linear", smoke),
        "logistic": lambda smoke: points.experiment("logistic", smoke),
        "errors": regret_errors.experiment,
        "posterior": regret_posterior.experiment,
    }
    _run_all("regret", REGRETS if options.part == "all" else (options.part,), builders, options)


def _run_all(
    command: str,
    names: Iterable[str],
    builders: Mapping[str, Callable[[bool], Experiment]],
    options: argparse.Namespace,
) -> None:
    for name in names:
        experiment = builders[name](options.smoke)
        words = [command, name, "--seeds", str(options.repeats or experiment.repeats)]
        run(experiment, _spelt(words, options), options.repeats, options.out, options.fresh)


def _spelt(words: list[str], options: argparse.Namespace) -> str:
    """Return the command as written into the results file."""
    return shlex.join([*COMMAND, *words, *(["--smoke"] if options.smoke else [])])


def _design(options: argparse.Namespace) -> None:
    """Write a table and a figure of the rows that batch-size rules take and the errors they leave."""
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
    from paper import plots

    figure = plots.save(plots.draw_designs(designs), path.with_suffix(".png"))
    print(f"Written: {path}, {figure}")
