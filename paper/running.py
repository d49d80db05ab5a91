"""One experiment, from its trials to its table, its checks and its files."""

import importlib.util
import shlex
import sys
from pathlib import Path

from paper import results
from paper.results import Book, Experiment


class CommandError(Exception):
    """An error that the user can fix; its message says how."""


def one_blas_thread() -> None:
    """Use one BLAS thread: several, waiting for small matrices, take more time from XLA's own than they save."""
    import scipy.linalg  # noqa: F401  # whose BLAS JAX calls; it must be loaded to be told
    from threadpoolctl import threadpool_limits

    threadpool_limits(limits=1)


def need_libraries() -> None:
    """Check, before any work, that the libraries for bars, tables and figures are installed."""
    for library in ("rich", "threadpoolctl", "matplotlib"):
        if importlib.util.find_spec(library) is None:
            raise CommandError(
                f"{library} is needed but not installed: run `pip install '.[cli,plots]'` in the checkout."
            )


def run(experiment: Experiment, command: str, repeats: int | None, out: Path, fresh: bool) -> None:
    """Run every trial that is not in the file yet, then write the table, the checks and the figure.

    Args:
        experiment: what to run.
        command: written into the file, and printed to an interrupted user.
        repeats: seeds or splits of every row; the experiment's own number if None.
        out: the folder of the files.
        fresh: discard what the folder has.
    """
    repeats = repeats or experiment.repeats
    book = Book(out / f"{experiment.name}.json", results.header(experiment, command), fresh)
    try:
        _collect(experiment, repeats, book)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"Stopped. What was finished is in {book.path}; the same command resumes from there:\n"
            f"  {shlex.join([*shlex.split(command), '--out', str(out)])}"
        ) from None
    _report(experiment, repeats, book)


def _collect(experiment: Experiment, repeats: int, book: Book) -> None:
    """Run every trial, with a progress bar."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

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


def _report(experiment: Experiment, repeats: int, book: Book) -> None:
    """The table, the checks, and the files."""
    from rich.console import Console
    from rich.table import Table

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


def _figures(experiment: Experiment, book: Book) -> list[Path]:
    from paper import plots

    figure = experiment.draw(book, book.path.parent)
    if figure is None:
        return []
    paths = [book.path.with_suffix(ending) for ending in (".png", ".svg")]
    with plots.style():
        figure.savefig(paths[1], bbox_inches="tight", metadata={"Date": None})
        plots.save(figure, paths[0])
    return paths
