r"""Regret on the space of distributions: W2 and KL to the running posterior, summed over rounds.

A conjugate Gaussian model, $x \sim N(\theta, 2I)$ in two dimensions, in closed form over 1,600 rounds, still or
drifting; and the two-parameter mixture by exact draws from a grid over 500.
"""

import math
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import opvi
from opvi import regret
from opvi._steps import StepInfo, TargetSampler, compiled, mean_over, root_mean_square, row_densities, tick
from opvi.targets import cast
from opvi.types import Array, Batch, Key, Particles, Sampler, Start
from paper.results import Book, Check, Experiment, Record, Row, near, no_more_than, summary
from paper.tracking import CHECKPOINTS, SETTINGS, exact_after

VARIANCE = 2.0  # of a row
PRIOR = np.array([0.1, 1.0], np.float32)  # precisions
HALF_LIFE = 1000.0  # rows, where the truth drifts
FIRST_SEED = 41_000  # of the streams reported; steps and substeps were looked at on others
SMOKE = ("gain-1 flow, λ = ½: B = 20", "paper's OPVI: mixture, B = 20")


class Size(NamedTuple):
    """How large the experiment is; `--smoke` shrinks it."""

    rounds: int = 1600
    particles: int = 100
    first: int = 100  # of the rounds that slopes are measured over
    mixture: int = 500
    draws: int = 4  # exact draws for each particle


def location() -> opvi.Target:
    """Return the target: the mean of Gaussian rows."""
    return opvi.target(_log_prior, _log_likelihood, _from_prior)


def _log_prior(theta: Array) -> Array:
    return -0.5 * (jnp.asarray(PRIOR, theta.dtype) * theta**2).sum()


def _log_likelihood(theta: Array, x: Array) -> Array:
    return -((x - theta[None]) ** 2).sum(1) / (2 * VARIANCE)


def _from_prior(key: Key) -> Array:
    return jax.random.normal(key, (2,)) / np.sqrt(PRIOR)


class FlowState(NamedTuple):
    """What the next round needs, and nothing else."""

    particles: Particles
    information: Array  # [d, d]: of the prior and all rows seen
    round: Array
    rows: Array


@dataclass(frozen=True)
class HalfFlow(TargetSampler):
    """Settings of `half_flow`."""

    repulsion: float
    substeps: int

    def init(self, key: Key, particles: Start = None) -> FlowState:
        """Return the state before any row."""
        target, x = self.target, self.drawn(key, particles, at_least=3)
        prior = -jax.hessian(lambda v: target.log_prior(target.unravel(v)))(x.mean(0))
        zero = jnp.zeros((), jnp.int32)
        return FlowState(x, prior, zero, zero)

    def step(self, key: Key, state: FlowState, batch: Batch) -> tuple[FlowState, StepInfo]:
        """Learn from a batch."""
        return _step(self, key, state, batch)


def half_flow(target: opvi.Target, repulsion: float = 0.5, substeps: int = 4) -> HalfFlow:
    r"""The preconditioned flow of gain 1 with one number for the repulsion, on a Gaussian model.

    $$x_i \gets x_i + A^{-1} \big[\nabla \ell(x_i) + \lambda F A^{-1} \hat C^{-1} (x_i - \bar x)\big], \qquad
      A \gets A + F$$

    for parts $\ell$ of each batch's log likelihood, with curvature F. `opvi.gain_one` uses a matrix for $\lambda$,
    exact for steps of any size; but errors of its particles' covariance at the start remain. This one uses the
    particles' own covariance $\hat C$, and so forgets its start.
    """
    return HalfFlow(target, repulsion, substeps)


@compiled
def _step(sampler: HalfFlow, key: Key, state: FlowState, batch: Batch) -> tuple[FlowState, StepInfo]:
    x, A = state.particles, state.information
    batch = cast(batch, x.dtype)
    clock = tick(state, batch)
    target = sampler.target
    rows = jax.vmap(lambda v: target.log_likelihood(target.unravel(v), batch.data))(x)
    # Parts grow geometrically: each adds the same share to the rows so far (the prior being worth a tenth of one).
    ends = clock.seen_rows - batch.weight.sum() + 0.1, clock.seen_rows + 0.1
    edges = jnp.geomspace(*ends, sampler.substeps + 1, dtype=x.dtype)
    shares = jnp.diff(edges) / batch.weight.sum()
    (x, A), _ = jax.lax.scan(lambda now, share: (_part(sampler, *now, share, batch), None), (x, A), shares)
    finite = jnp.isfinite((x**2).sum())
    log_predictive = mean_over(batch, row_densities(rows))
    info = StepInfo(clock.rows, log_predictive, root_mean_square(x - state.particles), finite)
    return FlowState(jnp.where(finite, x, state.particles), A, clock.round, clock.rows), info


def _part(sampler: HalfFlow, x: Particles, A: Array, share: Array, batch: Batch) -> tuple[Particles, Array]:
    """Learn a share of the batch's log likelihood."""
    target = sampler.target

    def likelihood(v: Array) -> Array:
        return share * (target.log_likelihood(target.unravel(v), batch.data) * batch.weight).sum()

    F = -jax.hessian(likelihood)(x.mean(0))
    off = x - x.mean(0, keepdims=True)
    away = jnp.linalg.solve(off.T @ off / len(x), off.T)
    g = jax.vmap(jax.grad(likelihood))(x)
    return x + jnp.linalg.solve(A + F, g.T + sampler.repulsion * F @ jnp.linalg.solve(A + F, away)).T, A + F


def methods() -> dict[str, tuple[Sampler, dict[str, Any]]]:
    """Return the samplers compared on the Gaussian model, and their descriptions in the results file."""
    target = location()
    field = opvi.flows.fields.svgd(opvi.flows.kernels.rbf(normalised=True), opvi.flows.kernels.median_awgf())
    return {
        "paper's OPVI": (
            opvi.opvi(target, step=opvi.schedules.decaying(2.0, 0.55), field=field),
            {"step": "2 t^-.55", "kernel": "normalised", "repulsion": 0.1, "start": "N(0, I)"},
        ),
        "paper's OPVI, small step": (
            opvi.opvi(target, step=opvi.schedules.decaying(0.02, 0.55)),
            {"step": ".02 t^-.55", "kernel": "plain", "repulsion": 0.1, "start": "N(0, I)"},
        ),
        "gain-1 flow, λ = ½": (half_flow(target), {"start": "prior", "substeps": 4}),
        "gain-1 flow, λ = ½, whole batches": (half_flow(target, substeps=1), {"start": "prior", "substeps": 1}),
        "gain_one": (opvi.gain_one(target, substeps=1), {"start": "prior"}),
        "gain_one, matched start": (opvi.gain_one(target, substeps=1), {"start": "prior, moments matched"}),
        "SL-OPVI": (opvi.sl_opvi(target), {"start": "prior"}),
    }


def drifting() -> dict[str, tuple[Sampler, dict[str, Any]]]:
    """Return the methods that forget, or never remember."""
    return {
        "paper's OPVI": methods()["paper's OPVI"],
        "gain_one": (opvi.gain_one(location(), substeps=1, half_life=HALF_LIFE), {"half_life": HALF_LIFE}),
    }


def start(name: str, count: int, seed: int) -> np.ndarray:
    """Return the starting particles, according to the method's settings."""
    z = np.random.default_rng(FIRST_SEED + seed).normal(size=(count, 2))
    if name.startswith("paper"):  # as its authors' code begins
        return z.astype(np.float32)
    if "matched" in name:
        z = z - z.mean(0)
        z = z @ np.linalg.inv(np.linalg.cholesky(z.T @ z / count)).T
    return (z / np.sqrt(PRIOR)).astype(np.float32)


RULES = {"B = 20": opvi.schedules.static(20), "⌈t^.55⌉": opvi.schedules.power(0.55)}


@cache
def conjugate_watch(drifts: bool) -> Any:
    """Return a watch shared by seeds and rules, so that it compiles once."""
    return regret.watch_conjugate(location(), half_life=HALF_LIFE if drifts else None)


def trial(name: str, rule: str, drifts: bool, size: Size, seed: int) -> Record:
    """One stream, followed and measured in closed form after every round."""
    sizes = [RULES[rule].size(t) for t in range(1, size.rounds + 1)]
    rng = np.random.default_rng(FIRST_SEED + 100 + seed)
    truth = np.array([0.0, 1.0])
    rows = rng.normal(size=(sum(sizes), 2)) * math.sqrt(VARIANCE) + truth
    if drifts:
        rows[:, 0] += np.repeat(2 * np.sin(np.arange(size.rounds) / 200), sizes)
    stream = opvi.stream(rows.astype(np.float32), RULES[rule])
    sampler = (drifting() if drifts else methods())[name][0]
    _, history = opvi.run(
        sampler,
        stream,
        seed,
        particles=start(name, size.particles, seed),
        callbacks={"posterior": conjugate_watch(drifts)},
    )
    return _record(history.callbacks["posterior"]["value"], size.rounds, size.first)


def _record(found: regret.Tracking, rounds: int, first: int) -> Record:
    at = np.unique(np.geomspace(1, rounds, 50).astype(int))
    record: Record = {"T": at, "w2_slope": regret.slope(found.w2_sum, first), "last": found.w2[-1] / found.sd[-1]}
    record["kl_slope"] = regret.slope(found.regret, first)
    for key in ("w2_sum", "regret", "path"):
        record[key] = getattr(found, key)[at - 1]
        record[f"{key}_end"] = getattr(found, key)[-1]
    return record


def mixture_trial(name: str, size: Size, seed: int) -> Record:
    """The mixture, measured at some rounds against exact draws of its posterior, both modes."""
    setting, rounds = SETTINGS["B = 20"], size.mixture
    sampler = _mixture_samplers()[name]

    def draws(t: int) -> np.ndarray | None:
        if t not in CHECKPOINTS:
            return None
        return exact_after(setting, seed, t, rounds).draw(size.draws * size.particles, 0, stratified=True)

    watch = regret.watch_draws(draws)
    stream = opvi.stream(setting.rows(seed, rounds), 20)
    _, history = opvi.run(sampler, stream, seed, particles=size.particles, callbacks={"posterior": watch})
    found: regret.Tracking = history.callbacks["posterior"]["value"]
    measured = np.isfinite(found.w2)
    return {
        "T": history.round[measured],
        "w2": found.w2[measured],
        "kl": found.kl[measured],
        "path": found.path[measured],
        "last": found.w2[measured][-1] / found.sd[measured][-1],
        "w2_mean": np.nanmean(found.w2),
        "kl_mean": np.nanmean(found.kl),
        "path_end": found.path[-1],
    }


def _mixture_samplers() -> dict[str, Sampler]:
    target = opvi.gaussian_mixture()
    field = opvi.flows.fields.svgd(opvi.flows.kernels.rbf(normalised=True), opvi.flows.kernels.median_awgf())
    paper = opvi.opvi(target, step=opvi.schedules.decaying(2.0, 0.55), field=field)
    return {"paper's OPVI": paper, "SL-OPVI": opvi.sl_opvi(target)}


def experiment(smoke: bool) -> Experiment:
    """Every method on the Gaussian model, still and drifting, and two on the mixture."""
    size = Size(64, 20, 4, 12, 2) if smoke else Size()
    rows = [
        Row(f"{name}: {rule}", settings, partial(trial, name, rule, False, size))
        for rule in RULES
        for name, (_, settings) in methods().items()
        if rule == "B = 20" or name.startswith(("paper", "gain-1"))
    ]
    rows += [
        Row(f"{name}: drifting, B = 20", settings, partial(trial, name, "B = 20", True, size))
        for name, (_, settings) in drifting().items()
    ]
    rows += [Row(f"{name}: mixture, B = 20", {}, partial(mixture_trial, name, size)) for name in _mixture_samplers()]
    if smoke:
        rows = [row for row in rows if row.name in SMOKE]
    return Experiment(
        "regret-posterior" + ("-smoke" if smoke else ""),
        f"Distance to the running posterior, summed over {size.rounds:,} rounds, {size.particles} particles",
        {"first_seed": FIRST_SEED, **size._asdict(), "half_life": HALF_LIFE},
        rows,
        1 if smoke else 5,
        ["method: stream", "ΣW2", "slope", "ΣKL = R(T)", "slope", "V_T", "last W2 / sd", "mean W2", "mean KL"],
        _line,
        (lambda book: []) if smoke else _checks,
        _draw,
    )


def _line(name: str, records: list[Record]) -> list[str]:
    keys = ("w2_sum_end", "w2_slope", "regret_end", "kl_slope", "path_end", "last", "w2_mean", "kl_mean")
    cells = [f"{summary(records, key).mean:.3g}" if key in records[0] else "" for key in keys]
    if "w2_slope" in records[0]:
        cells[1] = summary(records, "w2_slope").text(3)
    return cells


def _checks(book: Book) -> list[Check]:
    paper = book.records("paper's OPVI: B = 20")
    checks = [near("paper's OPVI: B = 20: slope of ΣW2", summary(paper, "w2_slope"), 0.94, 0.05)]
    flows = ("gain-1 flow, λ = ½", "gain-1 flow, λ = ½, whole batches")
    for name in (f"{flow}: {rule}" for flow in flows for rule in RULES):
        records = book.records(name)
        checks.append(no_more_than(f"{name}: slope of ΣW2", summary(records, "w2_slope").mean, 0.05))
        checks.append(no_more_than(f"{name}: ΣW2", summary(records, "w2_sum_end").mean, 1.5))
    exact = book.records("gain_one, matched start: B = 20")
    checks.append(no_more_than("gain_one, matched start: ΣW2", summary(exact, "w2_sum_end").mean, 1.5))
    return checks


def _draw(book: Book, _: Path) -> Any:
    """ΣW2, ΣKL and the path length; then the mixture."""
    import matplotlib.pyplot as plt

    from paper import plots

    colours = dict(zip(methods(), (*plots.COLOURS, plots.INK), strict=True))
    with plots.style():
        figure, axes = plt.subplots(2, 2, figsize=(9.5, 7.2))
        mixture = axes[1, 1]
        panels = dict(zip((*RULES, "drifting, B = 20", "mixture, B = 20"), axes.flat, strict=True))
        for row in book.content["rows"]:
            name, _, stream = row.partition(": ")
            records, ax = book.records(row), panels[stream]
            T = records[0]["T"]
            mean = {key: np.mean([r[key] for r in records], 0) for key in ("w2_sum", "w2", "path") if key in records[0]}
            ax.loglog(T, mean["w2" if ax is mixture else "w2_sum"], color=colours[name], label=name)
            if name == "paper's OPVI":
                ax.loglog(T[1:], mean["path"][1:], color="0.5", linestyle="--", label="path length $V_T$")
        for stream, ax in panels.items():
            ax.set(title=f"Gaussian model, {stream}", xlabel="rounds T", ylabel=r"$\sum_{t \leq T} W_2(q_t, p_t)$")
        mixture.set(title="mixture, B = 20, exact draws", ylabel="$W_2(q_T, p_T)$")
        shown = {label: line for ax in axes.flat for line, label in zip(*ax.get_legend_handles_labels(), strict=True)}
        figure.legend(shown.values(), shown, loc="upper center", ncols=4, bbox_to_anchor=(0.5, 0.0), fontsize="small")
        figure.tight_layout()
    return figure
