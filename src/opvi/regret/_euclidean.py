r"""Regret of points: a callback that keeps account of every round's cost, comparator and gradient error."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opvi.flows.schedules import vanishing
from opvi.regret._costs import Cost, prior_weights
from opvi.running._run import Chunk
from opvi.targets import Target, cast, check_batch
from opvi.types import Array, Batch, Data, Particles, Schedule, State, Tree

SPREAD_PARTICLES = 4  # of which every row's own gradient is taken; all have that of the batch


class Noise(NamedTuple):
    """How noisy a stream's gradients are, one entry per round."""

    rows: np.ndarray  # [T]: B_t
    spread: np.ndarray  # [T]: Λ, from the rows of all rounds so far; NaN until a batch had two rows
    error: np.ndarray  # [T]: Λ / √B_t, what to expect of the batch's gradient
    error_sum: np.ndarray  # [T]: their sum


class Regret(NamedTuple):
    """The account of a run, one entry per round; sums start at the first round watched."""

    cost: np.ndarray  # [T]: c_t(w_t) + η_t c_0(w_t) before the round's batch was seen, mean over particles
    best: np.ndarray  # [T]: the same at the comparator
    regret: np.ndarray  # [T]: R(T), the sum of their differences
    static_regret: np.ndarray  # [T]: against the best single point for rounds 1 … T
    comparator: np.ndarray  # [T, d]: w*_t
    path: np.ndarray  # [T]: V_T, how far the comparators have moved
    distance: np.ndarray  # [T]: from w_t to w*_t, the farthest particle's
    error: np.ndarray  # [T]: ‖e_t‖, root mean square over particles
    error_sum: np.ndarray  # [T]: E_T
    squared_error_sum: np.ndarray  # [T]: Σ ‖e_t‖²
    spread: np.ndarray  # [T]: Λ, from the rows of all rounds so far; NaN until a batch had two rows
    rows: np.ndarray  # [T]: B_t
    tolerance: np.ndarray  # [T]: the gradient's norm at w*_t, and at the static comparator if that is larger


class _Recorded(NamedTuple):
    particles: Array  # [n, d], before the batch was seen
    gradient: Array  # [n, d], of the batch's mean cost
    scatter: Array  # sum over rows of the squared distance to the mean gradient, mean over some particles
    rows: Array


class Following:
    """A callback that follows a run through its chunks, and starts over if they are not consecutive."""

    def __init__(self) -> None:
        self.last = 0  # the last round watched
        self.begin()

    def begin(self) -> None:
        """Reset the sums."""

    def rounds(self, chunk: Chunk, count: int) -> np.ndarray:
        """Return the chunk's rounds; start over if they do not continue where the last chunk ended."""
        t = np.arange(chunk.round - count + 1, chunk.round + 1)
        if t[0] != self.last + 1:
            self.begin()
        self.last = chunk.round
        return t


def of_target(target: Target, particles: Particles) -> Particles:
    """Return the particles; refuse them if they cannot be parameters of the target."""
    if particles.ndim != 2 or particles.shape[1] != target.dim:
        raise ValueError(
            f"the sampler's particles have shape {particles.shape}, but the target of this watch has {target.dim} "
            "parameters. Give the watch the sampler's own target."
        )
    return particles


class _Noise(Following):
    """What `watch_noise` returns: the part that looks at batches alone."""

    def __init__(self, target: Target):
        self.target = target
        super().__init__()

    def record(self, before: State, after: State, batch: Batch) -> _Recorded:
        """Return the batch's gradients at the round's start and their scatter over rows; compiled into the loop."""
        target = self.target
        x = of_target(target, before.particles)
        batch = cast(batch, x.dtype)
        check_batch(target, x[0], batch)

        def row_cost(v: Array, row: Data) -> Array:
            return -target.log_likelihood(target.unravel(v), jax.tree.map(lambda a: a[None], row))[0]

        def batch_cost(v: Array) -> Array:
            return -(target.log_likelihood(target.unravel(v), batch.data) * batch.weight).sum()

        some = x[:: -(-len(x) // SPREAD_PARTICLES)]
        each = jax.vmap(jax.vmap(jax.grad(row_cost), (None, 0)), (0, None))(some, batch.data)  # [m, B, d]
        rows = jnp.maximum((batch.weight > 0).sum(dtype=jnp.int32), 1)
        total = jnp.einsum("b,mbd->md", batch.weight, each, precision="highest")
        mean = total / rows.astype(x.dtype)
        scatter = jnp.einsum("b,mbd->m", batch.weight, (each - mean[:, None]) ** 2, precision="highest").mean()
        if len(some) < len(x):
            total = jax.vmap(jax.grad(batch_cost))(x)
        return _Recorded(x, total / rows.astype(x.dtype), scatter, rows)

    def begin(self) -> None:
        self.scatter = self.freedom = self.expected = 0.0

    def noise(self, recorded: _Recorded) -> Noise:
        """Return the noise of these rounds, and add it to the sums."""
        rows = np.asarray(recorded.rows, float)
        scatter = self.scatter + np.cumsum(np.asarray(recorded.scatter, float))
        freedom = self.freedom + np.cumsum(rows - 1)
        spread = np.sqrt(np.divide(scatter, freedom, out=np.full_like(scatter, np.nan), where=freedom > 0))
        error = spread / np.sqrt(rows)
        total = self.expected + np.cumsum(np.nan_to_num(error))
        self.scatter, self.freedom, self.expected = scatter[-1], freedom[-1], total[-1]
        return Noise(rows, spread, error, total)

    def __call__(self, chunk: Chunk) -> Noise | Regret:
        self.rounds(chunk, len(chunk.record.rows))
        return self.noise(chunk.record)


class _Watch(_Noise):
    """What `watch` returns."""

    def __init__(self, target: Target, cost: Cost, prior_weight: Schedule):
        self.cost, self.prior_weight = cost, prior_weight
        super().__init__(target)

    def begin(self) -> None:
        super().begin()
        self.sums = np.zeros(5)  # regret, cost, path, ‖e‖, ‖e‖²
        self.done: tuple[Tree, float, int] = (0.0, 0.0, 0)  # the rounds' statistics and prior weights, summed; how many
        self.comparator: np.ndarray | None = None
        self.static = np.zeros(self.cost.dim)

    def __call__(self, chunk: Chunk) -> Regret:
        t = self.rounds(chunk, len(chunk.record.rows))
        recorded, cost = chunk.record, self.cost
        w = np.asarray(recorded.particles, float)
        noise = self.noise(recorded)
        eta = prior_weights(self.prior_weight, t)
        statistics = cost.statistics(t)
        value, gradient = cost.evaluate(statistics, eta, w)
        start = w[0].mean(0) if self.comparator is None else self.comparator
        comparator, left = cost.minimise(statistics, eta, start)
        best = cost.evaluate(statistics, eta, comparator[:, None])[0][:, 0]
        error = np.sqrt(((np.asarray(recorded.gradient, float) - gradient) ** 2).sum(2).mean(1))
        moved = np.linalg.norm(np.diff(comparator, axis=0, prepend=start[None]), axis=1)
        if self.comparator is None:
            moved[0] = 0.0
        static, static_left = self._static(statistics, eta)
        incurred = value.mean(1)
        each = np.stack([incurred - best, incurred, moved, error, error**2], 1)
        sums = self.sums + np.cumsum(each, 0)
        self.sums, self.comparator = sums[-1], comparator[-1]
        return Regret(
            cost=incurred,
            best=best,
            regret=sums[:, 0],
            static_regret=sums[:, 1] - static,
            comparator=comparator,
            path=sums[:, 2],
            distance=np.linalg.norm(w - comparator[:, None], axis=2).max(1),
            error=error,
            error_sum=sums[:, 3],
            squared_error_sum=sums[:, 4],
            spread=noise.spread,
            rows=noise.rows,
            tolerance=np.maximum(left, static_left),
        )

    def _static(self, statistics: Tree, eta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the least total cost that one point could have had in rounds 1 … T, for each T of the chunk."""
        before, prior, count = self.done
        before = before if count else jax.tree.map(lambda leaf: np.zeros_like(leaf[0]), statistics)
        total = jax.tree.map(lambda start, leaf: start + np.cumsum(leaf, 0), before, statistics)
        total_prior, counts = prior + np.cumsum(eta), count + np.arange(1, len(eta) + 1)
        self.done = jax.tree.map(lambda leaf: leaf[-1], total), total_prior[-1], int(counts[-1])
        mean = jax.tree.map(lambda leaf: leaf / counts.reshape(-1, *[1] * (leaf.ndim - 1)), total)
        points, left = self.cost.minimise(mean, total_prior / counts, self.static)
        self.static = points[-1]
        return counts * self.cost.evaluate(mean, total_prior / counts, points[:, None])[0][:, 0], left


def watch(target: Target, cost: Cost, *, prior_weight: Schedule = vanishing) -> _Watch:
    r"""Return a callback for `opvi.run` that measures dynamic regret against the true cost of every round.

    $$R(T) = \sum_{t \le T} f_t(w_t) - f_t(w^*_t), \qquad f_t = c_t + \eta_t c_0, \quad
      V_T = \sum_{t \le T} \|w^*_t - w^*_{t-1}\|, \quad e_t = \nabla \hat c_t(w_t) - \nabla c_t(w_t), \quad
      E_T = \sum_{t \le T} \|e_t\|$$

    with $w_t$ the decision before round t's batch is seen, as in the theorems. For several particles the mean of their
    costs counts. `opvi.run(sampler, stream, key, callbacks={"regret": watch})` keeps a `Regret` in
    `history.callbacks["regret"]["value"]`. No bit of the particles changes. One watch serves many runs: rounds that
    continue the last ones seen are added to its sums, others start over.

    Args:
        target: the sampler's.
        cost: the cost that batches were drawn from: `quadratic` or `pool`.
        prior_weight: $\eta_t$, the sampler's.
    """
    if not isinstance(cost, Cost):
        raise TypeError(
            f"`cost` is a {type(cost).__name__}, but must say what batches are drawn from: `opvi.regret.pool(target, "
            "data)` or `opvi.regret.quadratic(...)`."
        )
    if cost.dim != target.dim:
        raise ValueError(
            f"`cost` is of {cost.dim} parameters, but the target has {target.dim}. Make it for this target."
        )
    return _Watch(target, cost, prior_weight)


def watch_noise(target: Target) -> _Noise:
    r"""Return a callback for `opvi.run` that estimates $\Lambda$, the spread of per-row gradients, without a true cost.

    $$\Lambda^2 = \frac{\sum_t \sum_{i \in D_t} \|g_i - \bar g_t\|^2}{\sum_t (B_t - 1)}$$

    It keeps a `Noise` in `history.callbacks[name]["value"]`; `opvi.regret.design` takes its last `spread`.
    """
    return _Noise(target)


def diameter(account: Regret) -> float:
    """Return R as measured: the largest distance from a decision to this round's comparator, or to the one before."""
    moved = np.diff(account.path, prepend=0.0)
    return float((account.distance + moved).max())
