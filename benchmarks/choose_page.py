"""Tables and figures of the pages on choosing, from docs/results/choose.json: `python -m benchmarks.choose_page`."""

from collections.abc import Iterable
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt

from benchmarks.pages import DOCS, benchmark, fill, mean, read
from paper import plots
from paper.results import markdown

Lines = dict[str, dict[str, Any]]
PAGES = {
    "choose.md": ("decide",),
    "samplers.md": ("linear", "kin8nm", "elec2"),
    "settings.md": ("batches", "particles", "forgetting"),
}

# Heading, key in the results, digits; the mean and, where the third digit matters to a choice, the spread.
COLUMNS = {
    "linear": [
        ("W2 / sd", "distance", 3),
        ("log density", "lpd", 4),
        ("90 % interval covers", "coverage", 3),
    ],
    "kin8nm": [
        ("RMSE", "rmse", 4),
        ("log density", "lpd", 3),
        ("90 % interval covers", "coverage", 3),
        ("log density, bare", "plain_lpd", 3),
        ("covers, bare", "plain_coverage", 3),
    ],
    "elec2": [("accuracy", "accuracy", 4), ("log loss", "log_loss", 4), ("ECE", "ece", 4)],
}
SPREAD = {"distance", "rmse", "accuracy", "log_loss"}
# One table for three trackers: the columns of each.
SIDE_BY_SIDE = {
    "regressor": [("RMSE", "rmse", 4), ("log density", "lpd", 3), ("covers", "coverage", 3)],
    "classifier": [("log loss", "log_loss", 4), ("ECE", "ece", 4)],
    "sl_opvi, no rows": [("W2 / sd", "distance", 3)],
}
SECOND_ORDER = ("gain_one", "ibis", "sl_opvi", "gauss_newton", "kfac", "linear_ekf")
WHOLE = ("regressor", "classifier")


def cell(found: dict[str, Any], key: str, digits: int) -> str:
    """Return a mean, with its spread over seeds where that matters."""
    if key not in found:
        return "–"
    value = found[key]
    spread = f" ± {value['sd']:.{digits}f}" if key in SPREAD else ""
    return f"{value['mean']:.{digits}f}{spread}"


def cost(found: dict[str, Any]) -> str:
    """Microseconds per row, to three digits."""
    value = found.get("microseconds per row")
    return "–" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def sampler_table(part: str, lines: Lines) -> str:
    columns = COLUMNS[part]
    header = ["sampler", "step", "particles", *(name for name, *_ in columns), "µs per row", "bytes of state"]
    rows = []
    for name, found in lines.items():
        cells = [cell(found, key, digits) for _, key, digits in columns]
        step = f"{found['step']:g}" if "step" in found else "–"
        rows.append(
            [
                name,
                step,
                str(found["particles"]),
                *cells,
                cost(found),
                f"{found['bytes']:,}" if "bytes" in found else "–",
            ]
        )
    return markdown(header, rows)


def side_by_side(what: str, lines: Lines) -> str:
    """Return a table with settings in rows and trackers in columns."""
    header, settings = [what], []
    for tracker, columns in SIDE_BY_SIDE.items():
        header += [f"{tracker.split(',')[0]}: {columns[0][0]}", *(name for name, *_ in columns[1:]), "µs per row"]
    for name in lines:
        value = name.rsplit(", ", 1)[1]
        if value not in settings:
            settings.append(value)
    rows = []
    for value in sorted(settings, key=int):
        cells = []
        for tracker, columns in SIDE_BY_SIDE.items():
            found = lines.get(f"{tracker}, {value}")
            if found is None:
                cells += ["–"] * (len(columns) + 1)
            else:
                cells += [*(cell(found, key, digits) for _, key, digits in columns), cost(found)]
        rows.append([value, *cells])
    return markdown(header, rows)


def half_lives(lines: Lines, tracker: str, where: str) -> dict[str, dict[str, Any]]:
    start = f"{tracker}, {where}, "
    return {name.removeprefix(start): found for name, found in lines.items() if name.startswith(start)}


def forgetting_table(lines: Lines) -> str:
    """Return the table of half-lives: determined online, infinite, and the best fixed one."""
    rows = []
    for tracker, key, wheres in (
        ("regressor", "rmse", ("still", "slow drift", "fast drift")),
        ("classifier", "log_loss", ("shuffled", "in order")),
    ):
        for where in wheres:
            found = half_lives(lines, tracker, where)
            fixed = {name: one for name, one in found.items() if name not in ("None", "inf")}
            best = min(fixed, key=lambda name: fixed[name][key]["mean"])
            stream = f"{tracker}, {where}: {'RMSE' if key == 'rmse' else 'log loss'}"
            values = [cell(one, key, 4) for one in (found["None"], fixed[best], found["inf"])]
            rows.append([stream, values[0], f"{values[1]} ({int(best):,} rows)", values[2]])
    return markdown(["stream", "`None`: found online", "best fixed half-life", "`math.inf`: never"], rows)


# --- the decision table -----------------------------------------------------------------------


def decisions(parts: dict[str, Any]) -> str:
    """Return the table of what you have, what to use, what it costs and what it achieves."""
    linear, network, market = (parts[name]["lines"] for name in COLUMNS)
    row = 1e3 * benchmark("trackers", "default regressor, one row")["value"]
    one, at_once = (benchmark("estimators", f"River classifier, linear{name}") for name in ("", ", buffer=1"))
    learn = [read(f"learning-speed-{task}-linear")["result"] for task in ("classification", "regression")]
    small, filters = (benchmark("fleet", name, "batch 20, lanes 1") for name in ("SVGD", "linear_ekf, 2 classes"))
    gpu = benchmark("gpu", "a direction", "n=131,072, d=8")
    tracked = mean("tracking-mixture", "SL-OPVI, no rows: B = 20", "tracking_mean", 3)
    rival = mean("synthetic-text", "OPVI t^.55", "tracking_mean", 2)
    paper = [mean("kin8nm-text", name, "rmse", 4) for name in ("OPVI t^.55", "OPVI B=20", "SVGD B=20")]

    def kin8nm(name: str) -> str:
        return f"kin8nm: RMSE {cell(network[name], 'rmse', 4)}"

    rows = [
        (
            "a table and a number to predict",
            "[`opvi.regressor`](trackers.md), [`OPVIRegressor`](estimators.md)",
            f"{row:.0f} µs per row",
            f"kin8nm: RMSE {mean('regression', 'kin8nm', 'rmse', 4)}, a 90 % interval holds "
            f"{mean('regression', 'kin8nm', 'coverage_90', 3)} of the test rows",
        ),
        (
            "a table and classes to predict",
            "[`opvi.classifier`](trackers.md), [`OPVIClassifier`](estimators.md)",
            f"{cost(market['classifier'])} µs per row",
            f"elec2: accuracy {mean('classification', 'elec2', 'accuracy', 4)}, log loss "
            f"{mean('classification', 'elec2', 'log_loss', 4)}",
        ),
        (
            "a file or a pipe, and no Python",
            "[`opvi learn`](learn.md)",
            f"linear models: {learn[0]['learn, default, us a row']:.1f} (classes) and "
            f"{learn[1]['learn, default, us a row']:.1f} µs per row, reading included",
            "the same models",
        ),
        (
            "data that drift",
            "the same, which forget as fast as the data move; [`opvi.watched`](trackers.md) reports changes",
            "the same",
            "[Forgetting](settings.md#forgetting); [beside River's models](guides/drift.md)",
        ),
        (
            "one row at a time",
            "[`opvi.adapters.river`](estimators.md#river), `hidden=()`; `buffer=1` learns each row at once",
            f"{one['value']:.0f} µs per row; {at_once['value']:.0f} with `buffer=1`",
            f"elec2: accuracy {one['extra']['accuracy']:.3f}; {at_once['extra']['accuracy']:.3f} with `buffer=1`",
        ),
        (
            "a model with up to 1,000 parameters, whose posterior you want",
            "[`opvi.tracker(target)`](trackers.md#a-model-of-your-own), which picks `ibis`",
            "grows with parameters and particles: `print(tracker)` says how",
            "the posterior of all rows, in any order, or [it says that it is not](trackers.md#is-it-the-posterior)",
        ),
        (
            "the same, with several modes",
            "the same",
            "the same",
            f"each mode with its weight; the paper's update is {rival} sds from the two-mode mixture",
        ),
        (
            "the same, and no room for rows",
            "`opvi.sl_opvi`, up to about 50 parameters: a polynomial stands for the past",
            f"{cost(linear['sl_opvi, no rows'])} µs per row, nine parameters",
            f"the two-mode mixture: {tracked} sds from the posterior",
        ),
        (
            "a linear model with Gaussian noise",
            "`opvi.gain_one`, started from draws of the prior: simpler, and good enough",
            f"{cost(linear['gain_one'])} µs per row",
            f"{cell(linear['gain_one'], 'distance', 3)} sds from the posterior; 100 exact draws: "
            f"{cell(linear['exact draws'], 'distance', 3)}",
        ),
        (
            "a network of your own: flax, equinox, `opvi.mlp`",
            "[`opvi.tracker(opvi.network(…))`](trackers.md#a-model-of-your-own), which picks Gauss–Newton",
            f"{cost(network['gauss_newton, by tracker'])} µs per row, 501 parameters",
            kin8nm("gauss_newton, by tracker"),
        ),
        (
            "a likelihood of your own",
            "[`opvi.tracker(opvi.target(…))`](index.md#a-model-of-your-own): `ibis`, or `first_order` above 1,000 "
            "parameters",
            f"`first_order`: {cost(network['first_order'])} µs per row",
            f"`first_order`, {kin8nm('first_order')}",
        ),
        (
            "a NumPyro model",
            "[`opvi.from_numpyro`](guides/numpyro.md), then `opvi.tracker`",
            "as for a model of its size",
            "the guide puts it beside NUTS",
        ),
        (
            "thousands of small streams",
            "[`opvi.Fleet`](fleet.md)",
            f"{small['value']:.2f} µs per row with SVGD, {filters['value']:.2f} with `linear_ekf`",
            "each model the same as alone",
        ),
        (
            "very many particles, a GPU",
            "[nothing to change](scale.md)",
            f"{gpu['value']:.1f} ms per direction for 131,072 particles of 8 parameters",
            "about single precision",
        ),
        (
            "the paper's methods to compare",
            "[`opvi.compare`](index.md#compare-methods-under-one-budget), [`python -m paper reproduce`](reproduce.md)",
            f"{cost(network['svgd'])} µs per row, 501 parameters",
            f"kin8nm, RMSE: OPVI growing {paper[0]}, OPVI static {paper[1]}, SVGD {paper[2]}",
        ),
        (
            "no need of uncertainty, only of speed",
            "`opvi.online_map`",
            f"{cost(network['online_map'])} µs per row, 501 parameters",
            kin8nm("online_map"),
        ),
    ]
    return markdown(["you have", "use", "which costs", "and reaches"], rows).replace("---:", "---")


def tables(parts: dict[str, Any]) -> dict[str, str]:
    lines = {name: part["lines"] for name, part in parts.items()}
    found = {"decide": decisions(parts)} | {name: sampler_table(name, lines[name]) for name in COLUMNS}
    found["batches"] = side_by_side("rows per batch", lines["batches"])
    found["particles"] = side_by_side("particles", lines["particles"])
    found["forgetting"] = forgetting_table(lines["forgetting"])
    return found


# --- figures ----------------------------------------------------------------------------------


# Those named in the figure; the others lie among them.
NAMED = {
    "linear": [
        "online_map",
        "svgd, WAG",
        "svgd",
        "svgd, replay",
        "kfac",
        "gain_one",
        "sl_opvi, no rows",
        "gauss_newton",
    ],
    "kin8nm": ["langevin", "online_map", "svgd, WNes", "gfsf", "first_order", "first_order, replay", "kfac"],
    "elec2": ["online_map", "svgd, WAG", "gain_one", "sl_opvi, no rows", "linear_ekf", "classifier, linear"],
}
NAMED["kin8nm"] += ["online_map, an ensemble", "gauss_newton, by tracker", "regressor"]
NAMED["elec2"] += ["gauss_newton", "kfac, a network", "classifier"]


def group(name: str) -> int:
    """Return 0 for samplers with a step, 1 for those that remember the past, 2 for complete trackers."""
    return 2 if name.startswith(WHOLE) else 1 if name.startswith(SECOND_ORDER) else 0


def scatter(ax: Any, lines: Lines, key: str, named: Iterable[str]) -> None:
    """Plot error against cost."""
    lines = {name: found for name, found in lines.items() if key in found and "bytes" in found}
    for index, label in enumerate(("first order", "remembers the past", "everything set up")):
        chosen = [found for name, found in lines.items() if group(name) == index]
        x, y = [f["microseconds per row"] for f in chosen], [f[key]["mean"] for f in chosen]
        ax.scatter(x, y, s=26, marker="os^"[index], color=plots.COLOURS[index], label=label, zorder=3)
    ax.set_xscale("log")
    low, high = ax.get_xlim()
    for name in named:
        up = -9 if name == "gain_one" else 3  # below, out of the way of a line
        x, y = lines[name]["microseconds per row"], lines[name][key]["mean"]
        right = x > low ** (1 / 3) * high ** (2 / 3)  # a name near the edge goes to the left of its mark
        side = {"xytext": (-5, up), "ha": "right"} if right else {"xytext": (5, up), "ha": "left"}
        ax.annotate(name, (x, y), textcoords="offset points", fontsize=7, **side)
    ax.set_xlabel("µs per row")


def draw_samplers(parts: dict[str, Any]) -> Any:
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    shown = (
        ("linear", "distance", "Nine parameters", "W2 to the posterior, in its sds"),
        ("kin8nm", "rmse", "kin8nm, a network", "RMSE"),
        ("elec2", "log_loss", "elec2, which drifts", "log loss before learning"),
    )
    for ax, (part, key, title, label) in zip(axes, shown, strict=True):
        scatter(ax, parts[part]["lines"], key, NAMED[part])
        ax.set(title=title, ylabel=label)
    exact = parts["linear"]["lines"]["exact draws"]["distance"]["mean"]
    axes[0].axhline(exact, color=plots.INK, linestyle=":", linewidth=1, label="100 exact draws")
    axes[0].set_yscale("log")
    axes[0].legend(fontsize=8, loc="lower left")
    return figure


def draw_forgetting(parts: dict[str, Any]) -> Any:
    lines = parts["forgetting"]["lines"]
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    panels = (
        ("regressor", "rmse", ("still", "slow drift", "fast drift"), "A curve of four inputs", "RMSE before learning"),
        ("classifier", "log_loss", ("shuffled", "in order"), "elec2, linear models", "log loss before learning"),
    )
    for ax, (tracker, key, wheres, title, label) in zip(axes, panels, strict=True):
        for where, colour, mark in zip(wheres, plots.COLOURS, "os^", strict=False):
            found = half_lives(lines, tracker, where)
            fixed = [int(name) for name in found if name not in ("None", "inf")]
            never = 2 * max(fixed)
            values = [found[str(h)][key]["mean"] for h in fixed]
            ax.plot(fixed, values, f"{mark}-", color=colour, label=where)
            ax.plot([never], [found["inf"][key]["mean"]], mark, color=colour, fillstyle="none")
            ax.axhline(found["None"][key]["mean"], color=colour, linestyle="--", linewidth=1)
        ax.set_xscale("log")
        ax.set_xticks([*fixed, never], [*(f"{h:,}" for h in fixed), "never"], fontsize=8)
        ax.minorticks_off()
        ax.set(title=title, xlabel="half-life, rows", ylabel=label)
        ax.legend(fontsize=8)
    return figure


def main() -> None:
    results, parts = DOCS / "results", read("choose")["parts"]
    found = tables(parts)
    for page, names in PAGES.items():
        fill(DOCS / page, "choose", {name: found[name] for name in names})
    with plots.style():
        print(plots.save(draw_samplers(parts), results / "choose.png"))
        print(plots.save(draw_forgetting(parts), results / "choose-forgetting.png"))


if __name__ == "__main__":
    main()
