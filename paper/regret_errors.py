r"""Gradient errors: how fast their sum grows, what drawing without replacement saves, and Lemma 1."""

import math
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

import opvi
from opvi import regret
from opvi.flows.schedules import BatchRule
from opvi.types import Batch
from paper.regret import FEATURES, FIRST_SEED, SMOKE, Size, turned
from paper.results import Book, Check, Experiment, Record, Row, near, no_more_than, summary

RHOS = (0.25, 0.55, 0.75, 1.0)
POOL, SIZES = 500, (5, 50, 250, 450)
STATIC = "B = 20"


def growing(rho: float) -> str:
    """A power rule's row in the table."""
    return f"⌈t^{rho:g}⌉".replace("0.", ".")


@cache
def problem() -> tuple[opvi.types.Sampler, Any]:
    """Return descent for linear regression on endless rows, and a watch that knows the true cost."""
    target = opvi.linear_regression(FEATURES)
    cost = regret.quadratic(target, np.eye(target.dim), turned(0.0))
    step = 1 / (4 * regret.smoothness(cost, 1))
    return opvi.online_map(target, step=step), regret.watch(target, cost)


def fresh(rule: BatchRule, rounds: int, seed: int) -> Iterator[Batch]:
    """Return new rows for every round."""
    rng = np.random.default_rng(FIRST_SEED + seed)
    truth = turned(0.0).astype(np.float32)
    for t in range(1, rounds + 1):
        size = rule.size(t)
        X = rng.standard_normal((size, FEATURES), np.float32)
        y = X @ truth[:-1] + truth[-1] + rng.standard_normal(size, np.float32)
        yield opvi.batch((X, y), pad_to=rule.bucket(size))


def sum_trial(rule: BatchRule, size: Size, seed: int) -> Record:
    """The error sum of one stream, measured, and as predicted from the spread of its own rows' gradients."""
    descent, watch = problem()
    start = np.zeros((1, FEATURES + 1), np.float32)
    _, history = opvi.run(descent, fresh(rule, size.long, seed), seed, particles=start, callbacks={"regret": watch})
    account: regret.Regret = history.callbacks["regret"]["value"]
    plan = regret.design(rule, size.long, account.spread[-1])
    at = np.unique(np.geomspace(1, size.long, 60).astype(int))
    return {
        "T": at,
        "rows": int(plan.rows[-1]),
        "rows_at": plan.rows[at - 1],
        "error_sum": account.error_sum[at - 1],
        "predicted_sum": plan.error_sum[at - 1],
        "measured": account.error_sum[-1],
        "predicted": plan.error_sum[-1],
        "slope": regret.slope(account.error_sum, size.long // 16),
        "squares": _late(account.squared_error_sum) / _late(plan.squared_error_sum),
        "spread": account.spread[-1],
    }


def _late(sums: np.ndarray) -> float:
    """Return the part of a sum from the rounds over which slopes are measured: w has converged, and Λ is constant."""
    return float(sums[-1] - sums[len(sums) // 16 - 1])


def variance_trial(rows: int, size: Size, seed: int) -> Record:
    r"""$E\|e\|^2$ over many batches out of a pool, beside $\Lambda^2 (1/B - 1/N)$, at one w."""
    rng = np.random.default_rng(FIRST_SEED + seed)
    X = np.column_stack([rng.normal(size=(POOL, FEATURES)), np.ones(POOL)])
    y = rng.random(POOL) < 1 / (1 + np.exp(-X @ turned(0.0)))
    gradients = X * (1 / (1 + np.exp(-X @ turned(1.0))) - y)[:, None]  # of each row's logistic cost
    off = gradients - gradients.mean(0)
    spread = math.sqrt((off**2).sum() / (POOL - 1))
    total = 0.0
    for _ in range(size.draws):
        total += float((off[rng.choice(POOL, rows, replace=False, shuffle=False)].mean(0) ** 2).sum())
    predicted = float(regret.design(rows, 1, spread, total=POOL).error[0] ** 2)
    return {"rows": rows, "measured": total / size.draws, "predicted": predicted, "spread": spread}


def experiment(smoke: bool) -> Experiment:
    """Error sums of batch rules, and the variance of batches drawn without replacement."""
    size = SMOKE if smoke else Size()
    named = {STATIC: opvi.schedules.static(20)} | {growing(rho): opvi.schedules.power(rho) for rho in RHOS}
    rows = [Row(name, {}, partial(sum_trial, rule, size)) for name, rule in named.items()]
    rows += [Row(f"variance, {b} rows of {POOL}", {}, partial(variance_trial, b, size), 1) for b in SIZES]
    if smoke:
        rows = [rows[0], rows[2], rows[-1]]
    return Experiment(
        "regret-errors" + ("-smoke" if smoke else ""),
        f"Error sums over {size.long:,} rounds on endless rows, and the variance of batches drawn without replacement",
        {"first_seed": FIRST_SEED, "rounds": size.long, "draws": size.draws},
        rows,
        1 if smoke else 4,
        ["batches", "rows", "measured", "predicted", "slope of E_T", "1 - ρ/2"],
        _line,
        (lambda book: []) if smoke else _checks,
        _draw,
        _derived,
    )


def theory(name: str) -> float:
    """Return the slope that the rule of this row should have."""
    return {STATIC: 1.0, **{growing(rho): 1 - rho / 2 for rho in RHOS}}[name]


def _line(name: str, records: list[Record]) -> list[str]:
    found = [f"{records[0]['rows']:,}", *(f"{summary(records, key).mean:.5g}" for key in ("measured", "predicted"))]
    return found + ([summary(records, "slope").text(4), f"{theory(name):g}"] if "slope" in records[0] else ["", ""])


def _checks(book: Book) -> list[Check]:
    checks = []
    for name in book.content["rows"]:
        records = book.records(name)
        if "slope" in records[0]:
            tolerance = 0.02 if name == STATIC else 0.015
            checks.append(near(f"{name}: slope of E_T", summary(records, "slope"), theory(name), tolerance))
            late = f"{name}: Σ‖e‖² / predicted, rounds after 400"
            checks.append(near(late, summary(records, "squares"), 1.0, 0.03))
        else:
            off = abs(records[0]["measured"] / records[0]["predicted"] - 1)
            checks.append(no_more_than(f"{name}: off the formula by", off, 0.03))
    at = lemma(np.array([10.0]))
    excess = float(at["printed"][0])
    checks.append(Check("Huber cost at w = 10: w⁺ less Lemma 1's bound as printed", excess, "> 0", excess > 0))
    checks.append(no_more_than("Huber cost at w = 10: w⁺ less the corrected bound", at["corrected"][0], 0.0))
    return checks


def _derived(book: Book) -> dict[str, Any]:
    """How far slopes are from theory, and where Lemma 1 goes wrong."""
    sloped = {name: records for name in book.content["rows"] if "slope" in (records := book.records(name))[0]}
    gaps = [abs(summary(records, "slope").mean - theory(name)) for name, records in sloped.items()]
    squares = [abs(summary(records, "squares").mean - 1) for records in sloped.values()]
    over, ends = lemma(np.array([10.0])), 10.0 - 0.01
    return {
        "slope of E_T, largest distance from 1 - ρ/2": max(gaps),
        "Σ‖e‖² / predicted, rounds after 400, largest distance from 1": max(squares),
        "Huber cost at w = 10, the step ends at": ends,
        **{f"Huber cost at w = 10, {kind} bound": ends - float(excess[0]) for kind, excess in over.items()},
    }


def lemma(w: np.ndarray) -> dict[str, np.ndarray]:
    """By how much a step on a Huber cost ends beyond Lemma 1's bound: α = .01, L = 1, W = [-1, 10], R = 11."""
    step, diameter = 0.01, 11.0
    gap = np.where(w > 1, w - 0.5, w**2 / 2)
    after = w - step * np.minimum(w, 1)
    kinds = {"printed": True, "corrected": False}
    settings: dict[str, Any] = {"step": step, "smoothness": 1.0, "diameter": diameter}
    return {
        kind: after - regret.lemma_bound(w, gap, 0.0, printed=printed, **settings) for kind, printed in kinds.items()
    }


def _draw(book: Book, _: Path) -> Any:
    """Error sums against rounds and against rows; variance against its formula; Lemma 1."""
    import matplotlib.pyplot as plt

    from paper import plots

    with plots.style():
        figure, ((sums, prices), (ratios, steps)) = plt.subplots(2, 2, figsize=(9, 7))
        names = [name for name in book.content["rows"] if not name.startswith("variance")]
        for colour, name in zip(plots.COLOURS, names, strict=False):
            records = book.records(name)
            T, rows = records[0]["T"], records[0]["rows_at"]
            measured, predicted = (np.mean([r[key] for r in records], 0) for key in ("error_sum", "predicted_sum"))
            slope = f"{name}: slope {summary(records, 'slope').mean:.3f}"
            sums.loglog(T, measured, color=colour, label=slope)
            sums.loglog(T, predicted, color=colour, linestyle=":", linewidth=1)
            prices.loglog(rows, measured, color=colour, label=name)
        sums.set(xlabel="rounds T", ylabel="error sum $E_T$", title="measured; dotted: predicted")
        prices.set(xlabel="rows used", ylabel="error sum $E_T$", title="what it costs in rows")
        found = {name: book.records(name)[0] for name in book.content["rows"] if name.startswith("variance")}
        sizes = [record["rows"] for record in found.values()]
        ratios.semilogx(sizes, [r["measured"] / r["predicted"] for r in found.values()], "o", color=plots.COLOURS[0])
        ratios.axhspan(0.97, 1.03, color="0.9")
        ratios.axhline(1, color="0.5", linewidth=1)
        ratios.set(ylim=(0.9, 1.1), xlabel=f"batch B out of N = {POOL} rows", title="without replacement")
        ratios.set_ylabel(r"$E\|e\|^2$ / $\Lambda^2(1/B - 1/N)$")
        w = np.linspace(0.1, 10, 200)
        for colour, (kind, excess) in zip((plots.COLOURS[1], plots.COLOURS[2]), lemma(w).items(), strict=True):
            steps.plot(w, excess, color=colour, label=f"Lemma 1, {kind}")
        steps.axhline(0, color="0.5", linewidth=1)
        steps.set(xlabel="w", ylabel="end of the step less the bound", title="a Huber cost: above 0 the lemma fails")
        for ax in (sums, prices, steps):
            ax.legend(fontsize="small")
        figure.tight_layout()
    return figure
