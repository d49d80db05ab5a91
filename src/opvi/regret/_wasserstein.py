r"""Regret of distributions: W2 and KL from the particles to the running posterior, and how far that moved."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opvi.metrics import wasserstein2
from opvi.regret._costs import Quadratic, quadratic_part
from opvi.regret._euclidean import Following, of_target
from opvi.running._run import Chunk
from opvi.targets import Target, cast
from opvi.types import Array, ArrayLike, Batch, State, Tree


class Tracking(NamedTuple):
    """How far the particles are from the running posterior after each round; sums start at the first round."""

    w2: np.ndarray  # [T]: W2(q_t, p_t)
    centre: np.ndarray  # [T]: the part of it between the means
    kl: np.ndarray  # [T]: KL(q_t ‖ p_t)
    w2_sum: np.ndarray  # [T]
    regret: np.ndarray  # [T]: Σ KL, the dynamic regret: the comparator p_t has none
    path: np.ndarray  # [T]: V_T = Σ W2(p_t, p_{t-1})
    sd: np.ndarray  # [T]: of p_t, √trace of its covariance


def gaussian_w2(
    mean: ArrayLike, covariance: ArrayLike, other_mean: ArrayLike, other_covariance: ArrayLike
) -> np.ndarray:
    r"""Return W2 between Gaussians (Bures), over any leading axes:

    $$W_2^2 = \|m - n\|^2 + \mathrm{tr}\big(C + D - 2 (D^{1/2} C D^{1/2})^{1/2}\big)$$
    """
    m, C, n, D = (np.asarray(a, float) for a in (mean, covariance, other_mean, other_covariance))
    return _bures(m, C, n, _root(D))


def _root(D: np.ndarray) -> np.ndarray:
    values, V = np.linalg.eigh(D)
    return (V * np.sqrt(np.maximum(values, 0))[..., None, :]) @ np.swapaxes(V, -1, -2)


def _bures(m: np.ndarray, C: np.ndarray, n: np.ndarray, root: np.ndarray) -> np.ndarray:
    """W2 with the second covariance given by its root."""
    cross = np.sqrt(np.maximum(np.linalg.eigvalsh(root @ C @ root), 0)).sum(-1)
    trace = np.trace(C, axis1=-2, axis2=-1) + (root**2).sum((-2, -1))
    return np.sqrt(np.maximum(((m - n) ** 2).sum(-1) + trace - 2 * cross, 0))


def gaussian_kl(
    mean: ArrayLike, covariance: ArrayLike, other_mean: ArrayLike, other_precision: ArrayLike
) -> np.ndarray:
    r"""Return $\mathrm{KL}(N(m, C) \,\|\, N(n, A^{-1}))$ over any leading axes; infinite where C has no inverse."""
    m, C, n, A = (np.asarray(a, float) for a in (mean, covariance, other_mean, other_precision))
    off = m - n
    inner = np.trace(A @ C, axis1=-2, axis2=-1) + np.einsum("...i,...ij,...j", off, A, off)
    sign, volume = np.linalg.slogdet(C)
    kl = 0.5 * (inner - m.shape[-1] - volume - np.linalg.slogdet(A)[1])
    return np.where(sign > 0, np.maximum(kl, 0), np.inf)


def sample_kl(x: ArrayLike, y: ArrayLike, neighbours: int = 5) -> float:
    r"""Return KL(q ‖ p) from draws x of q and y of p, by distances to the k-th neighbour (Wang et al., 2009).

    $$\frac dn \sum_i \log \frac{\nu_k(x_i)}{\rho_k(x_i)} + \log \frac{m}{n-1}$$

    Particles that repel one another are more even than independent draws, which biases it towards smaller values.
    """
    a, b = np.asarray(x, float), np.asarray(y, float)
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"samples have shapes {a.shape} and {b.shape}, but must be [n, d] and [m, d] with equal d.")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return math.nan
    if min(len(a) - 1, len(b)) < neighbours:
        raise ValueError(f"samples have {len(a)} and {len(b)} rows, but {neighbours} neighbours need more. Draw more.")
    from scipy.spatial import cKDTree  # not loaded with opvi: few need it

    inside = cKDTree(a).query(a, k=[neighbours + 1])[0][:, 0]  # the first neighbour is the point itself
    across = cKDTree(b).query(a, k=[neighbours])[0][:, 0]
    if not (inside > 0).all():
        return math.inf  # particles on one spot have no density
    return float(a.shape[1] * np.log(across / inside).mean() + math.log(len(b) / (len(a) - 1)))


class _Moments(NamedTuple):
    mean: Array  # [d], of the particles after the round
    covariance: Array  # [d, d]
    information: Array  # [d, d], of the batch
    pull: Array  # [d]: gradient of the batch's log likelihood at 0
    rows: Array


class _Watch(Following):
    """Sums over rounds, shared by both kinds."""

    def begin(self) -> None:
        self.sums = np.zeros(3)  # W2, KL, path
        self.before: Tree = None  # the posterior of the round before

    def account(
        self, w2: np.ndarray, centre: np.ndarray, kl: np.ndarray, moved: np.ndarray, sd: np.ndarray
    ) -> Tracking:
        """Return the account of these rounds, and add it to the sums."""
        sums = self.sums + np.cumsum(np.nan_to_num(np.stack([w2, kl, moved], 1), posinf=np.inf), 0)
        self.sums = sums[-1]
        return Tracking(w2, centre, kl, sums[:, 0], sums[:, 1], sums[:, 2], sd)


class _Conjugate(_Watch):
    """What `watch_conjugate` returns."""

    def __init__(self, target: Target, half_life: float | None):
        prior = quadratic_part(lambda v: -target.log_prior(target.unravel(v)), target.dim)
        if prior is None or not np.linalg.eigvalsh(prior.H)[0] > 0:
            raise ValueError(
                "the target's `log_prior` is not that of a Gaussian, so its posterior has no closed form. Give draws "
                "of it instead: `opvi.regret.watch_draws`."
            )
        self.target, self.half_life, self.prior = target, half_life, prior
        self.checked = False
        super().__init__()

    def begin(self) -> None:
        super().begin()
        d = self.target.dim
        self.information, self.pull = np.zeros((d, d)), np.zeros(d)

    def record(self, before: State, after: State, batch: Batch) -> _Moments:
        """Return the particles' moments, and what the batch says; compiled into the loop."""
        x = of_target(self.target, after.particles)
        batch = cast(batch, x.dtype)

        def of_batch(v: Array) -> Array:
            return (self.target.log_likelihood(self.target.unravel(v), batch.data) * batch.weight).sum()

        zero = jnp.zeros_like(x[0])
        mean = x.mean(0)
        off = x - mean[None]
        covariance = jnp.matmul(off.T, off, precision="highest") / len(x)
        return _Moments(mean, covariance, -jax.hessian(of_batch)(zero), jax.grad(of_batch)(zero), batch.weight.sum())

    def __call__(self, chunk: Chunk) -> Tracking:
        seen = jax.tree.map(lambda leaf: np.asarray(leaf, float), chunk.record)
        self.rounds(chunk, len(seen.rows))
        if not self.checked:
            self._check(chunk.batches[0])
        F, h = self._running(seen)
        A = F + self.prior.H
        C = np.linalg.inv(A)
        m = np.einsum("kij,kj->ki", C, h + self.prior.h)
        root = _root(C)
        w2, kl = _bures(seen.mean, seen.covariance, m, root), gaussian_kl(seen.mean, seen.covariance, m, A)
        before = (m[0], C[0]) if self.before is None else self.before
        earlier, its_covariance = (np.concatenate([a[None], b[:-1]]) for a, b in zip(before, (m, C), strict=True))
        moved = _bures(earlier, its_covariance, m, root)
        self.before = m[-1], C[-1]
        centre, sd = np.linalg.norm(seen.mean - m, axis=1), np.sqrt(np.trace(C, axis1=1, axis2=2))
        return self.account(w2, centre, kl, moved, sd)

    def _running(self, seen: _Moments) -> tuple[np.ndarray, np.ndarray]:
        """Return information and pull of all rows so far, after every round, forgetting applied."""
        F, h = [], []
        for information, pull, rows in zip(seen.information, seen.pull, seen.rows, strict=True):
            gamma = 1.0 if self.half_life is None else 2 ** (-rows / self.half_life)
            self.information = gamma * self.information + information
            self.pull = gamma * self.pull + pull
            F.append(self.information)
            h.append(self.pull)
        return np.stack(F), np.stack(h)

    def _check(self, batch: Batch) -> None:
        """Refuse a likelihood that is not quadratic, on the first batch."""
        with jax.enable_x64(True):
            batch = cast(batch, jnp.float64)
        part: Quadratic | None = quadratic_part(
            lambda v: (self.target.log_likelihood(self.target.unravel(v), batch.data) * batch.weight).sum(),
            self.target.dim,
        )
        if part is None:
            raise ValueError(
                "the target's `log_likelihood` is not quadratic in the parameters, so its posterior has no closed "
                "form. Give draws of it instead: `opvi.regret.watch_draws`."
            )
        self.checked = True


def watch_conjugate(target: Target, *, half_life: float | None = None) -> _Conjugate:
    r"""Return a callback for `opvi.run` that measures particles against a linear-Gaussian model's running posterior.

    $$W_2(q_t, p_t), \qquad R(T) = \sum_{t \le T} \mathrm{KL}(q_t \,\|\, p_t), \qquad
      V_T = \sum_{t \le T} W_2(p_t, p_{t-1})$$

    with $p_t$ the posterior of all rows up to round t, in closed form, and $q_t$ the Gaussian with the mean and
    covariance of the particles after the round. It keeps a `Tracking` in `history.callbacks[name]["value"]`.

    Args:
        target: with Gaussian prior and noise, e.g. `opvi.linear_regression(3, noise=0.5)`.
        half_life: rows after which a row counts half in $p_t$; None never forgets.
    """
    if half_life is not None and not half_life > 0:
        raise ValueError(f"`half_life` is {half_life}, but must be a number of rows above 0, or None to never forget.")
    return _Conjugate(target, half_life)


class _Draws(_Watch):
    """What `watch_draws` returns."""

    def __init__(self, draws: Callable[[int], ArrayLike | None], neighbours: int):
        self.draws, self.neighbours = draws, neighbours
        super().__init__()

    def record(self, before: State, after: State, batch: Batch) -> Array:
        """Return the particles after the round; compiled into the loop."""
        return after.particles

    def __call__(self, chunk: Chunk) -> Tracking:
        particles = np.asarray(chunk.record, float)
        found = []
        for t, x in zip(self.rounds(chunk, len(particles)), particles, strict=True):
            y = self.draws(int(t))
            if y is None:
                found.append((math.nan,) * 5)
                continue
            y = np.asarray(y, float)
            moved = 0.0 if self.before is None else wasserstein2(y, self.before)
            self.before = y
            kl, sd = sample_kl(x, y, self.neighbours), math.sqrt(y.var(0).sum())
            found.append((wasserstein2(x, y), float(np.linalg.norm(x.mean(0) - y.mean(0))), kl, moved, sd))
        return self.account(*np.array(found).T)


def watch_draws(draws: Callable[[int], ArrayLike | None], *, neighbours: int = 5) -> _Draws:
    r"""Return a callback for `opvi.run` that measures particles against draws of the running posterior.

    W2 is that of the two samples, by optimal assignment; KL is `sample_kl`. Both are estimates: two sets of draws of
    the posterior itself are some distance apart. It keeps a `Tracking` in `history.callbacks[name]["value"]`, NaN in
    rounds that are not measured.

    Args:
        draws: returns `[m, d]` draws of $p_t$ for the round t, exact (from a grid) or a reference sampler's; None for a
            round not to be measured. The number of draws must be a multiple of the number of particles, or vice
            versa. Similar draws from round to round (one seed, strata) make $V_T$ less noisy.
        neighbours: k of `sample_kl`.
    """
    return _Draws(draws, neighbours)
