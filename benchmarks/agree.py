"""Do results that were made again agree with the committed ones? `python -m benchmarks.agree MADE_AGAIN --out FILE`.

Every experiment writes its trials by row and seed. For each number of a repeated trial, the distance to the mean of
the committed trials of that row is computed, in standard deviations expected for one more draw.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np

COMMAND = "python -m paper … --seeds 1 --out DIR; python -m benchmarks.agree DIR"
UNREAD = {"seconds", "rows"}  # times, and what cannot differ
FAR = 4.0  # standard deviations: of hundreds of numbers with few trials each, some lie beyond 3
SMALL = 0.02  # relative: what is nearer counts as equal, whatever the spread


def numbers(record: dict, prefix: str = "") -> dict[str, float]:
    """The plain numbers of a trial by their names; curves are left out."""
    out: dict[str, float] = {}
    for name, value in record.items():
        if name in UNREAD:
            continue
        if isinstance(value, dict):
            out |= numbers(value, f"{prefix}{name}.")
        elif isinstance(value, float | int) and not isinstance(value, bool):
            out[prefix + name] = float(value)
    return out


def compare(old: dict, new: dict) -> list[dict]:
    """Return one entry per repeated number: the committed mean and sd, the new value, and how far apart they are."""
    entries = []
    for row, made in new["rows"].items():
        trials = old["rows"].get(row, {}).get("trials")
        if not trials:
            entries.append({"row": row, "what": "not among the committed rows", "distance": math.inf})
            continue
        for seed, record in made["trials"].items():
            for name, value in numbers(record).items():
                held = np.array([n[name] for n in map(numbers, trials.values()) if name in n])
                if not len(held):
                    continue
                mean, sd = held.mean(), held.std(ddof=1) if len(held) > 1 else 0.0
                apart = abs(value - mean)
                scale = sd * math.sqrt(1 + 1 / len(held))
                near = apart <= SMALL * max(abs(mean), 1e-3)
                distance = 0.0 if near else apart / scale if scale else math.inf
                found = {"row": row, "seed": int(seed), "what": name, "mean": mean, "sd": sd, "again": value}
                entries.append({**found, "distance": distance})
    return entries


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agree", description=__doc__.splitlines()[0])
    parser.add_argument("made_again", type=Path, help="folder with results of a few seeds")
    parser.add_argument("--committed", type=Path, default=Path("docs/results"))
    parser.add_argument("--out", type=Path, help="a JSON file for the summary")
    options = parser.parse_args()
    summary = {}
    for path in sorted(options.made_again.glob("*.json")):
        old = options.committed / path.name
        if not old.exists() or "rows" not in (new := json.loads(path.read_text())):
            continue
        entries = compare(json.loads(old.read_text()), new)
        far = sorted((e for e in entries if e["distance"] > FAR), key=lambda e: -e["distance"])
        summary[path.stem] = {"numbers": len(entries), "agree": len(entries) - len(far), "far": far[:10]}
        print(f"{path.stem}: {len(entries) - len(far)} of {len(entries)} numbers agree")
        for entry in far[:6]:
            print("  ", {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in entry.items()})
    if options.out:
        options.out.write_text(json.dumps({"command": COMMAND, "files": summary}, indent=1) + "\n")


if __name__ == "__main__":
    main()
