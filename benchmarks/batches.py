"""The same rows one by one and in batches of 20: `python -m benchmarks.batches`.

One pass of the default regressor over the training rows of UCI tables, in their order, and its errors on the test rows,
as in `python -m paper measure regression`. Small tables have more splits, as their test sets are as small as 31 rows:
of the first three alone, which this file had before, yacht's RMSE is 10.5 % larger and its log density 0.070 lower.
"difference" is that of a split's two errors, one by one less batches of 20, with the standard error of its mean.
Settings were chosen on synthetic streams.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import opvi
from benchmarks.machine import machine
from benchmarks.robust import summary
from opvi import metrics
from paper.data import uci_split

TABLES = {"yacht": 20, "bostonHousing": 20, "concrete": 10, "kin8nm": 3}  # and the number of splits
SIZES = (1, 20)
USUAL = 20


def errors(name: str, split: int, size: int) -> dict[str, float]:
    """Return the errors of one pass in batches of a size."""
    X, y, X_test, y_test = uci_split(name, split)
    made = opvi.regressor(X.shape[1])
    state, _ = opvi.run(made, opvi.stream((X, y), size), split)
    said, test = made.predict(state, X_test), jnp.asarray(y_test, state.particles.dtype)
    return {
        "rmse": float(metrics.rmse(said, test)),
        "log density": float(said.log_density(test).mean()),
        "covered by 90 %": float(metrics.coverage(said, test, 0.9)),
    }


def differences(found: dict[int, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Return the mean of the splits' differences between single rows and batches, and its standard error."""
    out = {}
    for name in found[USUAL][0]:
        each = np.array([a[name] - b[name] for a, b in zip(found[SIZES[0]], found[USUAL], strict=True)])
        out[name] = {"mean": float(each.mean()), "standard error": float(each.std(ddof=1) / len(each) ** 0.5)}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument(
        "--only", action="append", choices=list(TABLES), help="measure this table anew, and keep the others"
    )
    args = parser.parse_args()
    file = args.out / "batches.json"
    results: dict[str, dict[str, Any]] = {}
    if args.only:  # the others stay as they are
        results = json.loads(file.read_text())["data"]
    for name in args.only or TABLES:
        found = {size: [errors(name, split, size) for split in range(TABLES[name])] for size in SIZES}
        results[name] = {str(size): summary(some) for size, some in found.items()}
        usual = results[name][str(USUAL)]
        for size, row in results[name].items():
            rmse, density = row["rmse"]["mean"], row["log density"]["mean"]
            more = rmse / usual["rmse"]["mean"] - 1, density - usual["log density"]["mean"]
            print(f"{name:14} {size:>4} rmse {rmse:.4f} ({more[0]:+.1%}) log density {density:.3f} ({more[1]:+.3f})")
        results[name] |= {"splits": TABLES[name], "difference": differences(found)}
    command = "python -m benchmarks.batches"
    args.out.mkdir(parents=True, exist_ok=True)
    told = {"command": command, "machine": machine(command), "data": results}
    file.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
