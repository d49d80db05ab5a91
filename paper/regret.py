r"""The paper's theory compared with runs: regret of online MAP, its bounds, and the gradient errors behind them.

Linear and logistic regression, still and drifting, with static, growing and saturating batches drawn without
replacement; then error sums over 6,400 rounds, the variance of batches, and Lemma 1.
"""

import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import opvi
from opvi import regret
from opvi.flows.schedules import BatchRule
from opvi.types import Batch
from paper.results import Book, Check, Experiment, Record, Row, no_more_than, summary

FEATURES = 4
RADIUS = 3.0  # of the ball that decisions are projected onto: R = 6
STEP, DECAY = 0.4, 0.55  # α = .4/L, below the 1/(2L) that Theorem 1 needs; or α_t = .4/L · t^-.55
BOUNDS = {
    "tight": regret.tight_bound,
    "corrected": regret.corrected_bound,
    "order": regret.order_bound,
    "printed": regret.printed_bound,
}
VALID, DRAWN = ("tight", "corrected", "order"), ("tight", "corrected")
FIRST_SEED = 30_000  # of the batches drawn; the rows they are drawn from are the same for all


class Problem(NamedTuple):
    """The data that batches are drawn from in every round."""

    target: opvi.Target
    cost: regret.Cost
    rows: Callable[[int], tuple[np.ndarray, np.ndarray]]  # round -> the rows to draw from, always as many
    total: int
    smoothness: float

    def batches(self, rule: BatchRule, rounds: int, seed: int) -> Iterator[Batch]:
        """Each round's batch, drawn without replacement."""
        rng = np.random.default_rng(FIRST_SEED + seed)
        for t in range(1, rounds + 1):
            size = rule.size(t)
            X, y = self.rows(t)
            some = rng.choice(self.total, size, replace=False, shuffle=False)
            yield opvi.batch((X[some], y[some]), pad_to=min(rule.bucket(size), max(self.total, size)))


def turned(angle: float) -> np.ndarray:
    """The true slopes and intercept, turned in the plane of the first two."""
    return np.array([1.5 * math.cos(angle), 1.5 * math.sin(angle), 0.5, 0.0, 0.3])


@cache
def linear(drifts: bool, total: int, rounds: int) -> Problem:
    """Return fixed rows, with a truth that turns by $.2\\,t^{-1/2}$ per round: comparators in closed form."""
    rng = np.random.default_rng(1)
    X = (rng.normal(size=(total, FEATURES)) * np.linspace(0.7, 1.0, FEATURES)).astype(np.float32)
    noise = rng.normal(size=total)
    design = np.column_stack([X.astype(float), np.ones(total)])
    H = design.T @ design / total
    fitted = np.linalg.solve(H, design.T @ noise / total)  # what the noise adds to every round's minimiser
    floor = ((noise - design @ fitted) ** 2).mean() / 2 + 0.5 * math.log(2 * math.pi)

    @cache
    def truth(t: int) -> np.ndarray:
        return turned(0.4 * math.sqrt(t) if drifts else 0.0)

    def rows(t: int) -> tuple[np.ndarray, np.ndarray]:
        return X, _responses(t if drifts else 1)

    @cache
    def _responses(t: int) -> np.ndarray:
        return (design @ truth(t) + noise).astype(np.float32)

    target = opvi.linear_regression(FEATURES)
    cost = regret.quadratic(target, H, (lambda t: truth(t) + fitted) if drifts else truth(1) + fitted, floor)
    return Problem(target, cost, rows, total, regret.smoothness(cost, 1))


@cache
def logistic(drifts: bool, total: int, rounds: int) -> Problem:
    r"""A window of `total` rows; drifting, it slides over a pool along which the truth turns, as far as $\sqrt t$."""
    rng = np.random.default_rng(2)
    length = 5 * total if drifts else total
    X = rng.normal(size=(length, FEATURES)).astype(np.float32)
    angles = 3 * np.arange(length) / length * drifts
    logits = np.array([x @ turned(a)[:-1] + turned(a)[-1] for x, a in zip(X.astype(float), angles, strict=True)])
    y = (rng.random(length) < 1 / (1 + np.exp(-logits))).astype(np.int32)

    def first(t: int) -> int:
        return min(int(0.1 * total * (math.sqrt(t) - 1)), length - total) if drifts else 0

    def rows(t: int) -> tuple[np.ndarray, np.ndarray]:
        return X[first(t) : first(t) + total], y[first(t) : first(t) + total]

    def weights(t: int) -> np.ndarray:
        inside = np.zeros(length)
        inside[first(t) : first(t) + total] = 1 / total
        return inside

    target = opvi.logistic_regression(FEATURES)
    cost = regret.pool(target, (X, y), weights if drifts else None)
    # The logistic function is steepest at 0: the largest curvature there, over all rounds, is L itself.
    return Problem(target, cost, rows, total, regret.smoothness(cost, np.arange(1, rounds + 1) if drifts else 1))


PROBLEMS = {"linear": linear, "logistic": logistic}


class Length(NamedTuple):
    """Rounds of a stream, and rows that its batches are drawn from."""

    rounds: int
    total: int


class Size(NamedTuple):
    """How large the experiments are; `--smoke` shrinks them."""

    linear: Length = Length(3200, 100)
    logistic: Length = Length(1600, 200)
    first: int = 200  # of the rounds that slopes are measured over
    long: int = 6400
    draws: int = 20_000


SMOKE = Size(Length(40, 100), Length(20, 60), 5, 64, 400)


def rules(total: int) -> dict[str, BatchRule]:
    """The paper's three kinds of batches."""
    return {
        "B = 20": opvi.schedules.static(20),
        "⌈t^.55⌉": opvi.schedules.power(0.55),
        "saturating": opvi.schedules.saturating(0.55, total),
    }


@cache
def watched(model: str, drifts: bool, length: Length, decays: bool) -> tuple[Problem, opvi.types.Sampler, Any, float]:
    """A problem, its descent, its watch and its first step; shared by seeds and rules, so that they compile once."""
    problem = PROBLEMS[model](drifts, length.total, length.rounds)
    step = STEP / problem.smoothness
    descent = opvi.online_map(
        problem.target,
        step=opvi.schedules.decaying(step, DECAY) if decays else step,
        projection=opvi.flows.ball(RADIUS),
    )
    return problem, descent, regret.watch(problem.target, problem.cost), step


def checkpoints(rounds: int) -> np.ndarray:
    """Return the rounds whose sums are kept: four per doubling."""
    return np.unique(np.round(rounds / 2 ** (np.arange(4 * math.log2(rounds) + 1) / 4)).astype(int))


def trial(model: str, drifts: bool, rule: BatchRule, decays: bool, size: Size, seed: int) -> Record:
    """Run descent on one stream and watch it, with the bounds at every T."""
    length: Length = getattr(size, model)
    rounds = length.rounds
    problem, descent, watch, step = watched(model, drifts, length, decays)
    start = np.zeros((1, problem.target.dim), np.float32)
    _, history = opvi.run(
        descent, problem.batches(rule, rounds, seed), seed, particles=start, callbacks={"regret": watch}
    )
    account: regret.Regret = history.callbacks["regret"]["value"]
    at = checkpoints(rounds)
    record: Record = {"T": at, "tolerance": account.tolerance.max(), "spread": account.spread[-1]}
    record["rows"] = account.rows.sum()
    record["inside"] = float(np.linalg.norm(account.comparator, axis=1).max())
    for name in ("regret", "path", "error_sum"):
        record[name] = getattr(account, name)[at - 1]
    for name in ("regret", "static_regret", "path", "error_sum", "squared_error_sum"):
        record[f"{name}_end"] = getattr(account, name)[-1]
    record["regret_slope"] = regret.slope(account.regret, size.first)
    record["error_slope"] = regret.slope(account.error_sum, size.first)
    steps = step * np.arange(1, rounds + 1) ** -DECAY if decays else step
    for name in VALID[:1] if decays else BOUNDS:
        bound = BOUNDS[name](
            account.error, account.path, step=steps, smoothness=problem.smoothness, diameter=2 * RADIUS
        )
        if name in DRAWN:
            record[f"{name}_bound"] = bound[at - 1]
        record[f"{name}_share"] = (account.regret / bound).max()
    return record


def experiment(model: str, smoke: bool) -> Experiment:
    """Regret of online MAP on one model."""
    size = SMOKE if smoke else Size()
    length: Length = getattr(size, model)
    rows = [
        Row(f"{where}, {name}", {}, partial(trial, model, where == "drifting", rule, False, size))
        for where in ("still", "drifting")
        for name, rule in rules(length.total).items()
    ]
    settings = {"step": f"{STEP:g}/L · t^-{DECAY:g}"}
    rows.insert(
        3,
        Row("still, B = 20, α ∝ t^-.55", settings, partial(trial, model, False, opvi.schedules.static(20), True, size)),
    )
    if smoke:
        rows = [rows[0], rows[3], rows[5]]  # every kind of batch, step and drift once
    return Experiment(
        f"regret-{model}" + ("-smoke" if smoke else ""),
        f"Regret of online MAP, {model} regression, {length.rounds:,} rounds, batches out of {length.total} rows",
        {"first_seed": FIRST_SEED, **length._asdict(), "step": f"{STEP:g}/L", "radius": RADIUS},
        rows,
        1 if smoke else 8,
        ["stream", "rows", "R(T)", "slope", "tight bound", "worst R/bound", "static regret", "E_T", "slope", "V_T"],
        _line,
        (lambda book: []) if smoke else partial(_checks, model),
        partial(_draw, model),
    )


def _line(name: str, records: list[Record]) -> list[str]:
    bound = float(np.mean([record["tight_bound"][-1] for record in records]))
    worst = max(record[f"{kind}_share"] for record in records for kind in VALID if f"{kind}_share" in record)
    return [
        f"{int(records[0]['rows']):,}",
        summary(records, "regret_end").text(2),
        summary(records, "regret_slope").text(3),
        f"{bound:.1f}",
        f"{worst:.2f}",
        summary(records, "static_regret_end").text(2),
        f"{summary(records, 'error_sum_end').mean:.1f}",
        f"{summary(records, 'error_slope').mean:.3f}",
        f"{summary(records, 'path_end').mean:.2f}",
    ]


def _checks(model: str, book: Book) -> list[Check]:
    checks = []
    for row in book.content["rows"]:
        records = book.records(row)
        for kind in VALID:
            if f"{kind}_share" in records[0]:
                worst = max(record[f"{kind}_share"] for record in records)
                checks.append(no_more_than(f"{row}: regret / {kind} bound, worst T and run", worst, 1.0))
        checks.append(no_more_than(f"{row}: comparators inside the ball", records[0]["inside"], RADIUS))
        if model == "linear" and "α ∝" in row:
            checks.append(no_more_than(f"{row}: slope of R(T)", summary(records, "regret_slope").mean, 0.1))
    return checks


def _draw(model: str, book: Book, _: Path) -> Any:
    """R(T), E_T and V_T, one row of panels for a still posterior and one for a drifting one; bounds above R(T)."""
    import matplotlib.pyplot as plt

    from paper import plots

    with plots.style():
        figure, axes = plt.subplots(2, 3, figsize=(10.5, 6.2), sharex=True)
        kinds = (*rules(1), "B = 20, α ∝ t^-.55")
        colours = dict(zip(kinds, plots.COLOURS, strict=False))
        for (regrets, errors, paths), where in zip(axes, ("still", "drifting"), strict=True):
            names = [row for row in book.content["rows"] if row.startswith(where)]
            for row in names:
                records, kind = book.records(row), row.partition(", ")[2]
                T = records[0]["T"]
                keys = ("regret", "error_sum", "path", "tight_bound")
                mean = {key: np.mean([record[key] for record in records], 0) for key in keys}
                width = 3.0 if kind == "⌈t^.55⌉" else 1.5  # so that two lines on one another are seen to be two
                look: Any = {"color": colours[kind], "linewidth": width}
                regrets.loglog(T, mean["regret"], **look, label=kind)
                regrets.loglog(T, mean["tight_bound"], **{**look, "linewidth": width / 1.5}, linestyle="--")
                errors.loglog(T, mean["error_sum"], **look)
            corrected = np.mean([record["corrected_bound"] for record in book.records(names[0])], 0)
            regrets.loglog(T, corrected, color="0.6", linestyle=":", label="corrected Theorem 1, B = 20")
            paths.loglog(T[1:], mean["path"][1:], color=plots.INK)
            paths.set(title=f"{where}: path length $V_T$", ylim=(0.1, 100))
            regrets.set(title=f"{where}: regret $R(T)$", ylabel=f"{model} regression")
            errors.set(title=f"{where}: error sum $E_T$")
        for ax in axes[1]:
            ax.set_xlabel("rounds T")
        axes[0, 0].plot([], [], color="0.3", linestyle="--", linewidth=1, label="tight bound, of its colour")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="upper center", ncols=3, bbox_to_anchor=(0.5, 0.0), fontsize="small")
        figure.tight_layout()
    return figure
