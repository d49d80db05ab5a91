"""One results file from runs on several machines: `python -m benchmarks.merge numpyro FILE … --out docs/results`.

For `benchmarks.numpyro_models` and `benchmarks.diagnosis`, whose models and seeds can be measured side by side. All
runs must have been made by the same code; the command that is noted makes all of them in one go.
"""

import argparse
import json
from pathlib import Path

from benchmarks import diagnosis, numpyro_models


def numpyro(files: list[dict]) -> dict:
    """Return the results of all files, as `benchmarks.numpyro_models` writes them."""
    done: dict[str, dict] = {}
    references: dict[str, dict] = {}
    took: numpyro_models.Seconds = {}
    for file in files:
        references.update(file["references"])
        for name, by_size in file.get("seconds", {}).items():
            took.setdefault(name, {}).update(by_size)
        for name, by_batch in file["results"].items():
            for batch, trials in by_batch.items():
                done.setdefault(name, {}).setdefault(batch, {}).update(trials)
    about = {"command": numpyro_models.command(done), "sources": one_stamp(files)}
    found = {"results": done, "references": references, "seconds": took}
    return {**about, "tables": [numpyro_models.table(done)], **found}


def of_diagnosis(files: list[dict]) -> dict:
    """Return the results of all files, as `benchmarks.diagnosis` writes them."""
    cases: dict[str, dict] = {}
    for file in files:
        for name, trials in file["results"]["cases"].items():
            cases.setdefault(name, {}).update(trials)
    seeds = sorted({int(seed) for trials in cases.values() for seed in trials})
    limits = {"good at most": diagnosis.GOOD, "bad at least": diagnosis.BAD}
    return {
        "command": f"{diagnosis.COMMAND} {' '.join(map(str, seeds))}",
        "sources": one_stamp(files),
        "results": {**limits, **diagnosis.summary(cases), "cases": cases},
    }


def one_stamp(files: list[dict]) -> dict[str, str]:
    """Return the sources that all files were made by."""
    stamps = [file["sources"] for file in files]
    if any(stamp != stamps[0] for stamp in stamps):
        raise ValueError("the files were made by different sources, but must have been made by one commit.")
    return stamps[0]


def main() -> None:
    """Merge the files, and write what they hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["numpyro", "diagnosis"])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("bench-output"), help="folder for the merged file")
    options = parser.parse_args()
    files = [json.loads(file.read_text()) for file in options.files]
    made = numpyro(files) if options.what == "numpyro" else of_diagnosis(files)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{options.what}.json").write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
