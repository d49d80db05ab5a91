"""Run every method on every stream, keep each cell, and write one page and one JSON file: `python -m arena`."""

import argparse
import json
import multiprocessing
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

# Before NumPy and JAX are loaded, here and in the processes started from here: a core each, nothing from other runs.
SETTINGS = {
    "JAX_PLATFORMS": "cpu",
    "OPVI_PROGRAMS": "off",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
}
QUICK = (
    " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"  # compiles in a third of the time
)
SMOKE = {  # streams, and methods that are soon compiled
    "ChickWeights": ["opvi", "linear, SGD", "nearest neighbours", "Bayesian linear", "LightGBM, refit"],
    "SEA": ["opvi, linear", "linear, SGD", "Mondrian forest", "LightGBM, refit"],
    "posterior: linear": ["Bayesian linear", "Kalman, full"],
}
SMOKE_ROWS = 120
ROOT = Path(__file__).resolve().parent.parent
MEASURED = ("cells", "forecasts", "scores", "streams", "posteriors", "scaling", "kalman", "players", "engines")


def at_least_1(text: str) -> int:
    """Return a number of seeds or processes."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def named(words: list[str], known: Iterable[str], what: str) -> list[str]:
    """Return the names that contain one of the words; all names if there are no words."""
    names = list(known)
    for word in words:
        if not any(word.lower() in name.lower() for name in names):
            raise SystemExit(f"no {what} has {word!r} in its name. There are: {', '.join(names)}.")
    return [name for name in names if not words or any(word.lower() in name.lower() for word in words)]


def arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(prog="python -m arena", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("arena-output"), help="folder of cells and results")
    parser.add_argument(
        "--streams", action="append", default=[], help="only streams whose name contains this; may be repeated"
    )
    parser.add_argument(
        "--methods", action="append", default=[], help="only methods whose name contains this; may be repeated"
    )
    parser.add_argument("--seeds", type=at_least_1, default=3, help="seeds of every cell (3)")
    parser.add_argument("--jobs", type=at_least_1, default=1, help="processes at once (1)")
    parser.add_argument("--smoke", action="store_true", help="three streams, few rows, one seed: under a minute")
    parser.add_argument("--fresh", action="store_true", help="run cells again that already exist")
    parser.add_argument("--page-only", action="store_true", help="run nothing; write the page from the existing cells")
    parser.add_argument("--publish", action="store_true", help="copy the results into docs/ when done")
    return parser.parse_args()


def wanted(options: argparse.Namespace) -> list[tuple[str, str, list[int]]]:
    """Return the requested cells, as streams, methods and seeds."""
    from arena.cells import sources
    from arena.methods import METHODS
    from arena.report import cell_names

    if options.smoke:
        return [cell for stream, methods in SMOKE.items() for cell in cell_names([0], [stream], methods)]
    streams, methods = named(options.streams, sources(), "stream"), named(options.methods, METHODS, "method")
    return cell_names(list(range(options.seeds)), streams, methods)


def missing_cells(options: argparse.Namespace, fresh: bool = False) -> list[tuple[str, str, list[int]]]:
    """Return the cells that do not exist yet; all of them if `fresh`."""
    from arena.cells import path

    todo = [
        (s, m, [n for n in seeds if fresh or not path(options.out, s, m, n).exists()])
        for s, m, seeds in wanted(options)
    ]
    return [one for one in todo if one[2]]


def play(options: argparse.Namespace) -> list[str]:
    """Run the missing cells, one process per stream and method; return the errors."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from arena.cells import run, sources

    short, wrong = sources(), []  # the shortest streams first, so that the page soon has some
    todo = sorted(missing_cells(options, options.fresh), key=lambda cell: short[cell[0]].rows)
    rows = SMOKE_ROWS if options.smoke else None
    columns = TextColumn("{task.description:50}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    context = multiprocessing.get_context("spawn")
    with (
        Progress(*columns, disable=None) as progress,
        ProcessPoolExecutor(options.jobs, context, max_tasks_per_child=None if options.smoke else 1) as pool,
    ):
        bar = progress.add_task("cells", total=sum(len(seeds) for _, _, seeds in todo))
        jobs = {pool.submit(run, str(options.out), s, m, n, rows): (s, m, n) for s, m, n in todo}
        for job in as_completed(jobs):
            stream, method, seeds = jobs[job]
            wrong += job.result()
            progress.update(bar, advance=len(seeds), description=f"{stream}: {method}")
            if not progress.console.is_terminal:
                print(f"{stream}: {method}, {len(seeds)} seeds", flush=True)
    return wrong


def write(options: argparse.Namespace) -> Path:
    """Write arena.json and arena.html from the existing cells; return the page's path."""
    from arena.cells import sources
    from arena.page import render
    from arena.report import report
    from benchmarks.machine import machine
    from benchmarks.stamp import stamp

    files = [f"arena/{name}.py" for name in MEASURED]
    command = "python -m arena" + " --smoke" * options.smoke
    about: dict[str, Any] = {
        "command": command,
        "machine": machine("python -m arena"),
        "sources": stamp(*files, "arena/methods", "src/opvi/tracking", "src/opvi/filters", root=ROOT),
        "seeds": 1 if options.smoke else options.seeds,
        "most_rows": SMOKE_ROWS if options.smoke else max(source.rows for source in sources().values()),
        "unfinished": sum(len(seeds) for _, _, seeds in missing_cells(options)),
    }
    found = report(options.out, about)
    (options.out / "arena.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    page = options.out / "arena.html"
    page.write_text(render(found), encoding="utf-8")
    return page


def publish(folder: Path) -> None:
    """Copy the results next to the others, and write their tables on the pages that show them."""
    from arena import measured
    from benchmarks.pages import DOCS, fill

    for name in ("arena.json", "arena.html"):
        (DOCS / "results" / name).write_text((folder / name).read_text(encoding="utf-8"), encoding="utf-8")
    found = measured.tables()
    fill(DOCS / "arena.md", "arena", {"losses": found["losses"]})
    fill(measured.PAGE, "measured", found)


def main() -> None:
    """Run the cells and write the results."""
    options = arguments()
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value + QUICK if options.smoke and name == "XLA_FLAGS" else value)
    options.out.mkdir(parents=True, exist_ok=True)
    wrong = [] if options.page_only else play(options)
    page = write(options)
    print(*wrong, sep="\n", end="\n" if wrong else "")
    print(f"Written: {page} and {page.with_suffix('.json')}.")
    if options.publish:
        publish(options.out)


if __name__ == "__main__":
    main()
