"""Tune and run every rival, store each result when it is done, and print the tables: `python -m benchmarks.rivals`."""

import argparse
import importlib.util
import json
import math
import multiprocessing
import os
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

from benchmarks.rivals import plan, tables
from benchmarks.rivals.plan import Rival
from paper.results import Book, Experiment, Row, header, markdown

COMMITTED = Path(__file__).parents[2] / "docs" / "results"
SETTINGS = {
    "rows": "those of `python -m paper measure regression` and `python -m paper measure classification`",
    "scaling": "regression: with all training rows; classes: with the inputs so far",
    "tuned": "regression: on validation rows of other splits; streams: with hindsight, on the stream itself",
    "on top": "opvi's predictive head, or its temperature",
    "validation splits": {"usual": plan.USUAL_VALIDATION, **plan.VALIDATION},
    "validation rows": "the last tenth of the training rows",
    "training rows while tuning": plan.TUNING_ROWS,
    "settings tried": {
        "EKF": len(plan.FILTER_GRID),
        "linear EKF": len(plan.LINEAR_GRID),
        "Adam ensemble, regression": len(plan.ENSEMBLE_GRID),
        "Adam ensemble, classes": len(plan.STEPS),
    },
    "nets": plan.NETS,
    "nets while tuning": plan.NETS_TUNED,
}


def book_of(path: Path, smoke: bool, fresh: bool) -> Book:
    """Return the store of results, in the form of every experiment's."""
    settings = {**SETTINGS, "smoke": smoke}
    about: Any = Experiment("rivals" + "-smoke" * smoke, "", settings, [], 0, [], None, None, None)
    return Book(path, header(about, "python -m benchmarks.rivals" + " --smoke" * smoke), fresh)


def rows_of(rival: Rival, book: Book) -> tuple[Row, Row | None]:
    """Return a rival's row of validation scores and, once the best setting is known, of its trials."""

    def nothing(_: int) -> Any:
        raise NotImplementedError("the work is done by other processes")

    tuning = Row(rival.tuning, {"scored by": plan.SCORED_BY[rival.task]}, nothing)
    if not rival.grid:
        return tuning, Row(rival.name, {"as shipped": True}, nothing)
    if not all(book.has(tuning, i) for i in range(len(rival.grid))):
        return tuning, None
    scores = [(-math.inf if r["score"] is None else r["score"]) for r in book.records(rival.tuning)]
    return tuning, Row(rival.name, rival.grid[max(range(len(scores)), key=scores.__getitem__)], nothing)


def collect(rivals: list[Rival], book: Book, jobs: int, smoke: bool) -> None:
    """Run all settings, then trials with the best one; existing results are kept."""
    pending: dict[Future[Any], tuple[Rival, Row, int]] = {}
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:

        def submit(rival: Rival) -> None:
            tuning, row = rows_of(rival, book)
            if row is None:
                for i in range(len(rival.grid)):
                    if not book.has(tuning, i):
                        pending[pool.submit(plan.tune, rival, i, smoke)] = rival, tuning, i
                return
            for i in range(rival.repeats):
                if not book.has(row, i):
                    pending[pool.submit(plan.trial, rival, row.settings, i, smoke)] = rival, row, i

        for rival in rivals:
            submit(rival)
        while pending:
            for future in wait(pending, return_when=FIRST_COMPLETED).done:
                rival, row, i = pending.pop(future)
                if future.exception():
                    pool.shutdown(cancel_futures=True)  # the others would be waited for otherwise
                book.add(row, i, future.result())
                print(f"{row.name}, {i}", flush=True)
                if row.name == rival.tuning and rows_of(rival, book)[1] is not None:
                    submit(rival)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rivals", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench-output"), help="folder of rivals.json (bench-output)")
    parser.add_argument("--only", action="append", default=[], help="rivals whose 'data: method' contains this; repeat")
    parser.add_argument("--jobs", type=int, default=1, help="processes (1)")
    parser.add_argument("--smoke", action="store_true", help="small data that need no files, two settings a rival")
    parser.add_argument("--fresh", action="store_true", help="do not go on from what the folder has")
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # as our own tables were made
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("NPROC", "2")  # threads of a process
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"
    path = options.out / f"rivals{'-smoke' * options.smoke}.json"
    book = book_of(path, options.smoke, options.fresh)
    chosen = [r for r in plan.rivals(options.smoke) if not options.only or any(o in r.name for o in options.only)]
    collect(chosen, book, options.jobs, options.smoke)
    ours = {name: _ours(name, options.out) for name in ("regression", "classification")}
    found = tables.tables(book, plan.rivals(options.smoke), ours)
    book.content["tables"] = [{"header": head, "rows": rows} for head, rows in found]  # as pages print them
    book.write()
    text = "\n".join(markdown(head, rows) for head, rows in found)
    path.with_suffix(".md").write_text(text)
    print(text)
    if not options.smoke and importlib.util.find_spec("matplotlib"):
        print("Written:", tables.draw(book, plan.rivals(), ours, path.with_suffix(".png")))


def _ours(name: str, folder: Path) -> dict[str, Any]:
    """Our own trials, row by row, from the same folder; else the committed ones."""
    path = folder / f"{name}.json"
    return json.loads((path if path.exists() else COMMITTED / path.name).read_text())["rows"]


if __name__ == "__main__":
    main()
