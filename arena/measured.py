"""Write the tables of docs/measured.md from the committed results, losses first: `python -m arena.measured`."""

from typing import Any

from arena.report import shown
from benchmarks.pages import DOCS, benchmark, fill, in_table, read
from paper.results import markdown

PAGE = DOCS / "measured.md"
OURS = "opvi"


def losses(arena: dict[str, Any]) -> str:
    """Return the clear losses of the arena."""
    return markdown(arena["tables"][0]["header"], arena["tables"][0]["rows"])


def methods(arena: dict[str, Any]) -> str:
    """Return how each method does over all streams, and what it costs."""
    header = [
        "method",
        "streams",
        "mean rank",
        "best on",
        "median regret, nats",
        "ms per row",
        "first answer, s",
        "bytes",
    ]
    keys = ("streams", "mean rank", "best", "median regret", "ms per row", "first answer", "bytes")
    ranked = sorted(arena["overall"].items(), key=lambda one: one[1].get("mean rank", 99.0))
    return markdown(header, [[name, *(shown(found.get(key)) for key in keys)] for name, found in ranked])


def _duel(row: dict[str, Any], rows: int) -> list[str]:
    lost = row["lost"]
    ours, best = shown(row["opvi"]), shown(row["best other"])
    bold = [ours, f"**{best}**"] if lost else [f"**{ours}**", best]
    return [row["stream"], f"{rows:,}", *bold, row["which"], "" if row["clear"] else "no"]


def duels(arena: dict[str, Any], measure: str, name: str) -> str:
    """Return opvi beside the best other method of each stream, losses first."""
    rows = [row for row in arena["duels"] if row["measure"] == measure]
    header = ["stream", "rows", f"opvi, {name}", "best other", "which", "clear"]
    return markdown(header, [_duel(row, arena["streams"][row["stream"]]["rows"]) for row in rows])


def paper() -> str:
    """Return what the paper printed, what its update reaches, and what `opvi.tracker` reaches."""
    best = {"kin8nm-text": "best (tanh)", "mnist-text": "best (ReLU)", "synthetic-text": "best"}
    wanted = (
        ("kin8nm, RMSE, 20 splits", "kin8nm-text", "RMSE", True),
        ("kin8nm, log likelihood", "kin8nm-text", "LL", True),
        ("MNIST, accuracy, 5 seeds", "mnist-text", "accuracy", True),
        ("mixture, W2 to the posterior at the end, 10 seeds", "synthetic-text", "W2", False),
        ("seconds, kin8nm", "kin8nm-text", "seconds", False),
    )
    rows = []
    for name, file, column, printed in wanted:
        reached = [in_table(file, row, column) for row in ("OPVI t^.55", "SVGD B=20", best[file])]
        rows.append([name, in_table(file, "OPVI t^.55", f"{column}, printed") if printed else "", *reached])
    return markdown(["", "OPVI, printed", "OPVI t^.55, measured", "SVGD B=20, measured", "best here"], rows)


def posterior() -> str:
    """Return how far the trackers' particles are from exact posteriors."""
    column = "W2 / sd, mean over t ≥ 5"
    mixture = {
        "`sl_opvi`, two-parameter mixture, 500 rounds of 20 rows": "SL-OPVI, no rows: B = 20",
        "the same, drifting, with forgetting": "SL-OPVI, no rows: drift, γ = .98",
        "100 exact draws, for comparison": "exact draws, independent: B = 20",
    }
    rows = [[name, in_table("tracking-mixture", row, column), "tracking-mixture"] for name, row in mixture.items()]
    return markdown(["", "how far", "file"], [[*row[:2], f"`{row[2]}.json`"] for row in rows])


def speed() -> str:
    """Return timings beside those of alternatives."""

    def steps(size: str) -> tuple[float, str]:
        black = benchmark("bench", "a step of a run, blackjax's step", size)
        numpyro = benchmark("bench", "a step of a run, NumPyro's step", size)
        said = f"blackjax {black['value']:.0f} ×, NumPyro {numpyro['value']:.0f} × slower"
        return black["timings"]["opvi"]["median"], said

    def per_second(name: str, what: str, size: str = "") -> str:
        return f"{benchmark(name, what, size)['extra']['rows_a_second']:,.0f}"

    sizes = "n=100, d=50", "n=1000, d=50"
    small, large = map(steps, sizes)
    scans = [r for r in read("bench")["results"] if r["what"].startswith("scan of")]
    scanned = [next(r["value"] for r in scans if r["size"] == size) for size in sizes]
    gpu = benchmark("gpu", "a direction", "n=131,072, d=2")
    tiled = gpu["timings"]["tiled"]["median"]
    linear, networks, logistic, forest = (
        per_second("estimators", what)
        for what in (
            "River classifier, linear",
            "River classifier, default",
            "River's logistic regression",
            "River's adaptive random forest",
        )
    )
    models = per_second("fleet", "OPVI", "batch 20, lanes 1")
    loop = benchmark("fleet", "fleet beside a loop", "batch 20")["value"]
    devices = read("scaling")["devices"]["OPVI, 8,192 particles of 9 parameters"]
    one, four = (f"{devices[n]['ms']:.0f} ms" for n in "14")
    row = benchmark("trackers", "default regressor, one row")["value"]
    rows = [
        ("one SVGD step, 100 particles in 50 dimensions", f"{small[0]:.3f} ms", small[1], "bench"),
        ("the same, 1,000 particles", f"{large[0]:.2f} ms", large[1], "bench"),
        ("the same, blackjax's steps scanned as well", "", f"{scanned[0]:.0f} and {scanned[1]:.0f} × slower", "bench"),
        ("a direction of SVGD, 131,072 × 2, one H200", f"{gpu['value']:.2f} ms", f"XLA's tiles {tiled:.1f} ms", "gpu"),
        (
            "elec2 row by row, linear",
            f"{linear} rows per second",
            f"River's logistic regression {logistic}",
            "estimators",
        ),
        (
            "elec2 row by row, networks",
            f"{networks} rows per second",
            f"River's forest {forest} (first 5,000 rows)",
            "estimators",
        ),
        (
            "10,000 models in a fleet, OPVI, batches of 20",
            f"{models} rows per second",
            f"a loop over models {loop:.1f} × slower",
            "fleet",
        ),
        ("8,192 particles over four devices (CPU)", f"{four} per round", f"one device {one}", "scaling"),
        ("the default regressor, a row of 8 numbers", f"{row:.3f} ms", "", "trackers"),
    ]
    return markdown(["what", "measured", "beside", "file"], [[*cells, f"`{file}.json`"] for *cells, file in rows])


def tables() -> dict[str, str]:
    """Return every table of the page by its name there."""
    arena = read("arena")
    return {
        "losses": losses(arena),
        "methods": methods(arena),
        "streams": duels(arena, "log score", "log score"),
        "posteriors": duels(arena, "distance", "distance"),
        "paper": paper(),
        "posterior": posterior(),
        "speed": speed(),
    }


if __name__ == "__main__":
    fill(PAGE, "measured", tables())
    print(f"Written: the tables of {PAGE}")
