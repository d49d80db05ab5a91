r"""What the experiments of "Understand" share: streams with one unknown number, and particles that follow them.

Rows are $x \sim N(\theta, 1)$ and the prior is $\theta \sim N(0, 1)$, worth one row: after N rows the posterior has
variance $1/(1 + N)$. Truths are drawn from the prior, so that a posterior's 90 % interval holds the truth in 90 % of
all streams.
"""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import ndtri  # scipy comes with jax

import opvi
from opvi.flows.schedules import BatchRule
from opvi.types import Array, Batch, FieldValue, Particles, Sampler, Scores
from paper.results import Book, Experiment, Record, Row, summary

FIRST_SEED = 51_000  # of the streams reported; sizes and steps were looked at on others
BATCH = 20


class Size(NamedTuple):
    """How large the experiments are; `--smoke` shrinks them."""

    rounds: int = 500
    streams: int = 100  # in one trial
    particles: int = 100
    regret: int = 2000  # rounds that regret is summed over
    modes: int = 100  # rounds of the mixture


SMOKE = Size(16, 4, 20, 32, 8)


def size_of(smoke: bool) -> Size:
    """Return the sizes used for results, or small ones."""
    return SMOKE if smoke else Size()


# --- one unknown number -----------------------------------------------------------------------


def mean_of_rows() -> opvi.Target:
    """Return the target: θ ~ N(0, 1), rows x ~ N(θ, 1)."""
    return opvi.target(_log_prior, _log_likelihood, jax.random.normal)


def _log_prior(theta: Array) -> Array:
    return -0.5 * theta**2


def _log_likelihood(theta: Array, x: Array) -> Array:
    return -0.5 * (x - theta) ** 2


def own_gaussian(particles: Particles, scores: Scores) -> FieldValue:
    r"""Drift $s_i$, repulsion $-\nabla \log q(x_i) = (x_i - \bar x)/v$ for the Gaussian q with the particles' moments.

    This is the flow that kernels smooth. Without a kernel, particles settle on the law itself, in closed form.
    """
    off = particles - particles.mean(0, keepdims=True)
    v = (off**2).mean(0, keepdims=True)
    return FieldValue(scores, off / v, jnp.zeros((), particles.dtype))


class Streams(NamedTuple):
    """Streams of equal length, batches padded to the longest."""

    truth: np.ndarray  # [s, T]
    rows: np.ndarray  # [s, T, B]
    weight: np.ndarray  # [T, B]: 1 for a row, 0 for padding

    @property
    def counts(self) -> np.ndarray:
        """Rows of each round."""
        return self.weight.sum(1, dtype=float)


def streams(seed: int, count: int, rounds: int, rule: BatchRule, drift: float = 0.0) -> Streams:
    """Return `count` streams, each with a truth from the prior; drift makes it oscillate every 500 rounds."""
    rng = np.random.default_rng(FIRST_SEED + seed)
    sizes = np.array([rule.size(t) for t in range(1, rounds + 1)])
    truth = rng.normal(size=(count, 1)) + drift * np.sin(2 * np.pi * np.arange(rounds) / 500)[None]
    rows = truth[..., None] + rng.normal(size=(count, rounds, sizes.max()))
    weight = np.arange(sizes.max())[None] < sizes[:, None]
    return Streams(truth, rows.astype(np.float32), weight.astype(np.float32))


def exact(data: Streams, half_life: float | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Mean [s, T] and standard deviation [T] of the running posterior after every round, in closed form."""
    sums = (data.rows.astype(float) * data.weight).sum(2)
    remembered, total, means, counts = 0.0, np.zeros(len(sums)), [], []
    for t, count in enumerate(data.counts):
        gamma = 1.0 if half_life is None else 2 ** (-count / half_life)
        remembered = gamma * remembered + count
        total = gamma * total + sums[:, t]
        means.append(total / (1 + remembered))
        counts.append(remembered)
    return np.stack(means, 1), (1 + np.array(counts)) ** -0.5


def start(count: int) -> np.ndarray:
    """Return evenly spread particles with exactly the prior's mean and variance, so that the start adds no error."""
    x = ndtri((np.arange(count) + 0.5) / count)
    return (x / x.std())[:, None].astype(np.float32)


@partial(jax.jit, static_argnums=0)
def _follow(sampler: Sampler, keys: Array, particles: Array, rows: Array, weight: Array) -> tuple[Array, Array]:
    def one(stream: tuple[Array, Array]) -> tuple[Array, Array]:
        key, rows = stream

        def body(state: Any, part: tuple[Array, Array]) -> tuple[Any, tuple[Array, Array]]:
            state, _ = sampler.step(key, state, Batch(*part))
            return state, (state.particles.mean(), state.particles.std())

        return jax.lax.scan(body, sampler.init(key, particles), (rows, weight))[1]

    # Not side by side: a tracker looks as often as its stream needs, and all would wait for the slowest.
    return jax.lax.map(one, (keys, rows))


def follow(sampler: Sampler, data: Streams, particles: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation [s, T] of the particles after every round, each stream with particles of its own."""
    keys = jax.random.split(jax.random.key(seed), len(data.rows))
    found = _follow(sampler, keys, jnp.asarray(particles), jnp.asarray(data.rows), jnp.asarray(data.weight))
    mean, sd = (np.asarray(part, float) for part in found)
    return mean, sd


def checkpoints(rounds: int) -> np.ndarray:
    """Return the rounds whose numbers are kept, evenly spaced on a logarithmic axis."""
    return np.unique(np.geomspace(1, rounds, 40).astype(int))


def root_mean_square(values: np.ndarray, axis: Any = None) -> Any:
    """Return the root mean square."""
    return np.sqrt((values**2).mean(axis))


# --- tables -----------------------------------------------------------------------------------


def experiment_of(
    part: str, smoke: bool, title: str, rows: list[Row], repeats: int, columns: dict[str, tuple[str, int]], checks: Any
) -> Experiment:
    """An experiment whose table has one column for each named number and its digits."""

    def line(name: str, records: list[Record]) -> list[str]:
        return [cell(records, key, digits) if key in records[0] else "" for key, digits in columns.values()]

    def cell(records: list[Record], key: str, digits: int) -> str:
        found = summary(records, key)
        spread = f" ± {found.sd:.{digits}f}" if round(found.sd, digits) else ""  # none where it is known exactly
        return f"{found.mean:,.{digits}f}{spread}"

    def draw(book: Book, _: Path) -> Any:
        from paper.understand_figures import DRAWINGS

        return DRAWINGS[part](book)

    settings = {"first_seed": FIRST_SEED, "batch": BATCH, **size_of(smoke)._asdict()}
    name = f"understand-{part}" + ("-smoke" if smoke else "")
    return Experiment(
        name,
        title,
        settings,
        rows,
        1 if smoke else repeats,
        ["setting", *columns],
        line,
        (lambda book: []) if smoke else checks,
        draw,
    )
