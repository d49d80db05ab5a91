"""The report as one static page: sortable tables and a chart for each stream, with no external files."""

from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from arena import scores
from arena.methods import METHODS
from arena.report import OURS, behind, shown

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 240, 70, 30, 10
COLUMNS = {
    "error": "error",
    "log score": "log score",
    "regret": "regret",
    "crps": "CRPS",
    "coverage gap": "coverage gap",
    "coverage gap, worst window": "worst window",
    "recovery": "recovery",
    "distance": "distance",
    "ms per row": "ms per row",
    "first answer": "first answer, s",
    "bytes": "bytes",
}


def chart(played: dict[str, Any]) -> dict[str, Any]:
    """Return the lines of a stream's chart in picture coordinates, ours last and so on top."""
    rows = played["curve rows"]
    curves = {m: found["curve"] for m, found in played["methods"].items() if any(v is not None for v in found["curve"])}
    values = np.array([v for curve in curves.values() for v in curve if v is not None])
    low, high = _limits(values, distances=played["kind"] == "posterior")

    def x(row: float) -> float:
        return LEFT + (WIDTH - LEFT - 8) * row / rows[-1]

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - (min(max(value, low), high) - low) / (high - low))

    best = _best_other(played)
    order = sorted(curves, key=lambda m: (m == OURS, m == best))
    lines = [
        {
            "method": method,
            "kind": "ours" if method == OURS else "best" if method == best else "other",
            "points": " ".join(
                f"{x(r):.1f},{y(v):.1f}" for r, v in zip(rows, curves[method], strict=True) if v is not None
            ),
            "dots": [(f"{x(r):.1f}", f"{y(v):.1f}") for r, v in zip(rows, curves[method], strict=True) if v is not None]
            if len(rows) < 6
            else [],
        }
        for method in order
    ]
    ticks = [(f"{y(v):.1f}", shown(float(f"{v:.2g}"))) for v in np.linspace(low, high, 4)]
    return {"lines": lines, "ticks": ticks, "best": best, "rows": [(f"{x(r):.1f}", r) for r in (0, rows[-1])]}


def _limits(values: np.ndarray, distances: bool) -> tuple[float, float]:
    """Return axis limits that ignore methods that are far off."""
    if distances:
        return 0.0, float(min(values.max(), 4 * np.median(values)) * 1.05) or 1.0
    high, middle = float(values.max()), float(np.median(values))
    low = max(float(values.min()), middle - 2 * (high - middle))
    margin = 0.05 * (high - low) or 0.1
    return low - margin, high + margin


def _best_other(played: dict[str, Any]) -> str | None:
    name = "distance" if played["kind"] == "posterior" else "log score"
    others = {m: found[name]["mean"] for m, found in played["methods"].items() if m != OURS and name in found}
    return (min if name == "distance" else max)(others, key=lambda m: others[m]) if others else None


def _stream(name: str, played: dict[str, Any]) -> dict[str, Any]:
    columns = [c for c in COLUMNS if any(c in found for found in played["methods"].values())]
    best = {}
    for c in columns:
        reached = [found[c]["mean"] for found in played["methods"].values() if c in found]
        best[c] = (min if scores.MEASURES[c][1] == scores.LESS else max)(reached)
    rows = [
        {
            "method": method,
            "cells": [
                {
                    "value": found[c]["mean"] if c in found else None,
                    "text": shown(found[c]["mean"]) if c in found else "–",
                    "sd": shown(found[c]["sd"])
                    if found.get(c, {}).get("sd", 0) > 1e-9 and c not in scores.COSTS
                    else "",
                    "best": c in found and found[c]["mean"] == best[c],
                }
                for c in columns
            ],
        }
        for method, found in played["methods"].items()
    ]
    main = "distance" if played["kind"] == "posterior" else "log score"
    sign = 1 if main == "distance" else -1
    rows.sort(key=lambda row: _key(row, columns.index(main), sign))
    return {
        "name": name,
        **played,
        "columns": [(COLUMNS[c], scores.MEASURES[c][0]) for c in columns],
        "table": rows,
        "chart": chart(played),
        "main": main,
    }


def _key(row: dict[str, Any], at: int, sign: int) -> float:
    value = row["cells"][at]["value"]
    return float("inf") if value is None else sign * value


def render(report: dict[str, Any]) -> str:
    """Return the page."""
    worst: dict[str, int] = {}
    for place, duel in enumerate(report["duels"]):
        if duel["measure"] in ("log score", "distance"):
            worst[duel["stream"]] = place
    streams = [_stream(name, played) for name, played in report["streams"].items()]
    streams.sort(key=lambda s: worst.get(s["name"], len(report["duels"])))  # the largest losses first
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template("page.html").render(
        report=report,
        streams=streams,
        lost=[row for row in report["duels"] if row["lost"]],
        won=[row for row in report["duels"] if not row["lost"]],
        methods=METHODS,
        measures=scores.MEASURES,
        shown=shown,
        behind=behind,
        ours=OURS,
        costs=scores.COSTS,
        size=(WIDTH, HEIGHT, LEFT, BOTTOM, TOP),
    )
