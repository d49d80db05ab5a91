"""All cells as one report: means over the seeds, regret, ranks, and where opvi loses."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from arena import scores
from arena.cells import sources
from arena.methods import METHODS, missing, plays

OURS = "opvi"
CEILING = "NUTS, refit"
JUDGED = ("error", "log score", "crps", "coverage gap", "recovery", "distance")
RELATIVE = ("error", "crps", "distance")  # gaps that are shares of the best; others are differences
SMALL = 0.02  # of a coverage gap: nobody is to blame for it

Cell = dict[str, Any]


def read(folder: Path) -> list[Cell]:
    """Return the cells of a folder."""
    return [_read(file) for file in sorted((folder / "cells").glob("*.json"))]


def _read(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SystemExit(f"{file} is damaged ({error}). Delete it to run the cell again.") from None


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def _mean(values: list[float]) -> dict[str, float]:
    """Return the mean over the seeds, and their standard deviation if there are several."""
    found = {"mean": _rounded(float(np.mean(values))), "seeds": len(values)}
    return found | ({"sd": _rounded(float(np.std(values, ddof=1)))} if len(values) > 1 else {})


def summarised(cells: list[Cell]) -> dict[str, Any]:
    """Return for each stream the measures and the curve of every method."""
    known, streams = sources(), {}
    for stream in (name for name in known if any(cell["stream"] == name for cell in cells)):
        methods: dict[str, Any] = {}
        for method in METHODS:
            played = [c for c in cells if (c["stream"], c["method"]) == (stream, method) and "measures" in c]
            if not played:
                continue
            names = [name for name in scores.MEASURES if name in played[0]["measures"]]
            values = {name: [c["measures"][name] for c in played if c["measures"][name] is not None] for name in names}
            which = "distance" if known[stream].kind == "posterior" else "log score"
            curve = np.array([[math.nan if v is None else v for v in c["curve"][which]] for c in played], float).mean(0)
            methods[method] = {name: _mean(found) for name, found in values.items() if found}
            methods[method]["curve"] = [_rounded(value) if math.isfinite(value) else None for value in curve.tolist()]
        if not methods:
            continue
        first = next(c for c in cells if c["stream"] == stream and "measures" in c)
        about = {"kind": known[stream].kind, "about": known[stream].about, "rows": first["rows"]}
        streams[stream] = {**about, "curve rows": first["curve"]["rows"], "methods": _with_regret(methods)}
    return streams


def _with_regret(methods: dict[str, Any]) -> dict[str, Any]:
    scored = {name: found["log score"]["mean"] for name, found in methods.items() if "log score" in found}
    if scored:
        for name, behind in scores.best_in_hindsight(scored).items():
            methods[name]["regret"] = {"mean": _rounded(behind), "seeds": methods[name]["log score"]["seeds"]}
    return methods


def ahead(name: str, ours: float, theirs: float) -> float:
    """Return by how much theirs is better than ours: a share of theirs, or a difference; negative if ours is."""
    gap = ours - theirs if scores.MEASURES[name][1] == scores.LESS else theirs - ours
    return gap / max(abs(theirs), 1e-12) if name in RELATIVE else gap


def duels(streams: dict[str, Any]) -> list[dict[str, Any]]:
    """Return ours beside the best other method, for each stream and judged measure; the largest losses first."""
    found = []
    for stream, played in streams.items():
        for name in JUDGED:
            reached = {m: v[name] for m, v in played["methods"].items() if name in v}
            others = {m: v["mean"] for m, v in reached.items() if m != OURS}
            if OURS not in reached or not others:
                continue
            best = (min if scores.MEASURES[name][1] == scores.LESS else max)(others, key=lambda m: others[m])
            ours, behind = reached[OURS]["mean"], ahead(name, reached[OURS]["mean"], others[best])
            # One seed has no spread: nothing is clear then.
            noise = math.hypot(reached[OURS].get("sd", math.inf), reached[best].get("sd", math.inf))
            lost = behind > 0 and not (name == "coverage gap" and ours <= SMALL)
            row = {"stream": stream, "measure": name, "opvi": ours, "best other": others[best], "which": best}
            found.append({**row, "behind": _rounded(behind), "lost": lost, "clear": abs(ours - others[best]) > noise})
    return sorted(found, key=lambda row: (not row["lost"], not row["clear"], -row["behind"]))


def overall(streams: dict[str, Any]) -> dict[str, Any]:
    """Return for each method its mean rank by log score, how often it was best, and its median costs."""
    tables = [played["methods"] for played in streams.values() if played["kind"] != "posterior"]
    out: dict[str, Any] = {}
    for method in METHODS:
        ranks, regrets = [], []
        for reached in tables:
            scored = {name: found["log score"]["mean"] for name, found in reached.items() if "log score" in found}
            if method in scored:
                ranks.append(1 + sum(value > scored[method] for value in scored.values()))
                regrets.append(max(scored.values()) - scored[method])
        found = [played["methods"][method] for played in streams.values() if method in played["methods"]]
        if not found:
            continue
        out[method] = {"streams": len(found)}
        if ranks:
            out[method] |= {"mean rank": _rounded(float(np.mean(ranks))), "best": ranks.count(1)}
            out[method]["median regret"] = _rounded(float(np.median(regrets)))
        for cost in scores.COSTS:
            values = [one[cost]["mean"] for one in found if cost in one]
            out[method] |= {cost: _rounded(float(np.median(values)))} if values else {}
    return out


def cell_names(seeds: list[int], streams: list[str], methods: list[str]) -> list[tuple[str, str, list[int]]]:
    """Return the cells to run: matching streams, methods and seeds whose libraries are installed."""
    known = sources()
    return [(s, m, seeds) for s in streams for m in methods if plays(m, s, known[s]) and not missing(m)]


def report(folder: Path, about: dict[str, Any]) -> dict[str, Any]:
    """Return everything that the page shows."""
    cells = read(folder)
    streams = summarised(cells)
    rows = duels(streams)
    seen = {c["method"] for c in cells}
    failed = [f"{c['stream']}, {c['method']}, seed {c['seed']}: {c['error']}" for c in cells if "error" in c]
    return {
        **about,
        "cells": len(cells),
        "processor minutes": _rounded(sum(c.get("seconds", 0.0) for c in cells) / 60),
        "processors": sorted({c["cpu"] for c in cells if c.get("cpu")}),
        "measures": {name: " — ".join(said) for name, said in scores.MEASURES.items()},
        "missing": {name: missing(name) for name in METHODS if missing(name) and name not in seen},
        "failed": failed,
        "overall": overall(streams),
        "duels": rows,
        "tables": [_table(rows)],
        "streams": streams,
    }


def shown(value: float | None) -> str:
    """Return a number with three digits."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def behind(row: dict[str, Any]) -> str:
    """Return a duel's gap with its unit."""
    unit = {"log score": "nats", "recovery": "nats", "coverage gap": "points"}.get(row["measure"])
    value = abs(row["behind"]) * (1 if unit == "nats" else 100)
    return f"{value:.3g} {unit or '%'}"


def _table(rows: list[dict[str, Any]], most: int = 12) -> dict[str, Any]:
    """Return the clear losses as the documentation prints them."""
    lost = [row for row in rows if row["lost"] and row["clear"]][:most]
    header = ["stream", "measure", "opvi", "best other", "which", "behind"]
    cells = [[r["stream"], r["measure"], shown(r["opvi"]), shown(r["best other"]), r["which"], behind(r)] for r in lost]
    return {"header": header, "rows": cells}
