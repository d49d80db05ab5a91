"""Whether `memory_rows` helps: rows learnt again, on data with and without drift; no test data are used."""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

import opvi
from benchmarks.machine import machine
from paper import data

MEMORIES = (0, 500, 2000)
SPLITS = (5, 6, 7)  # of kin8nm: results elsewhere are on splits 0 to 4
ROWS, FIRST = 20_000, 5000  # of a stream, and those that are not scored
FOUND = "{:28s} memory_rows={:<5d} {}"


def kin8nm() -> Iterator[dict[str, Any]]:
    """A tenth of the training rows of each split is held out; one pass over the others."""
    for memory in MEMORIES:
        scores, start = [], time.perf_counter()
        for split in SPLITS:
            X, y, _, _ = data.uci_split("kin8nm", split)
            order = np.random.default_rng(split).permutation(len(y))
            held, rest = order[: len(y) // 10], order[len(y) // 10 :]
            model = opvi.OPVIRegressor(memory_rows=memory, shuffle=False, random_state=split).fit(X[rest], y[rest])
            error = y[held] - model.predict(X[held])
            low, high = model.predict_interval(X[held], 0.9)
            inside = (low <= y[held]) & (y[held] <= high)
            density = model.log_predictive_density(X[held], y[held])
            scores.append([np.sqrt((error**2).mean()), density.mean(), inside.mean()])
        rmse, lpd, covers = np.mean(scores, 0).tolist()
        seconds = time.perf_counter() - start
        yield {
            "data": "kin8nm, validation",
            "memory_rows": memory,
            "rmse": rmse,
            "lpd": lpd,
            "covers": covers,
            "s": seconds,
        }


def streams() -> Iterator[dict[str, Any]]:
    """Each batch predicted, then learnt: the log loss after the first rows."""
    X, y = data.elec2()
    sources = {"elec2": (X[:ROWS], y[:ROWS], 2)}
    X, y = data.covertype()
    sources["covertype, natural order"] = X[:ROWS], y[:ROWS], 7
    some = np.random.default_rng(1).permutation(len(y))[:ROWS]
    sources["covertype, shuffled"] = X[some], y[some], 7
    for name, (X, y, classes) in sources.items():
        for memory in MEMORIES:
            tracker: Any = opvi.classifier(X.shape[1], classes)
            if memory:
                tracker = opvi.remembering(tracker, memory, example=(X[:1].astype(np.float32), y[:1]))
            start = time.perf_counter()
            _, history = opvi.run(tracker, opvi.stream((X.astype(np.float32), y), 20), 1)
            loss = -float(history.info.log_predictive[FIRST // 20 :].mean())
            yield {"data": name, "memory_rows": memory, "log_loss": loss, "s": time.perf_counter() - start}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.remembering", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench-output"), help="folder for remembering.json")
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    threadpool_limits(limits=1)
    about, done = machine("python -m benchmarks.remembering"), []
    for source in (kin8nm, streams):
        for row in source():
            done.append(row)
            rest = {k: round(v, 4) for k, v in row.items() if k not in ("data", "memory_rows")}
            print(FOUND.format(row["data"], row["memory_rows"], rest), flush=True)
    (folder / "remembering.json").write_text(json.dumps({"machine": about, "results": done}, indent=1) + "\n")


if __name__ == "__main__":
    main()
