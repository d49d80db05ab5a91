r"""The exact posterior of the two-parameter mixture on a grid, and distances to it.

The grid lies in the midpoint $m = \theta_1 + \theta_2/2$ and the gap $\delta = \theta_2$, where the
posterior's two mirrored modes are $\pm\delta$. Folding maps $\delta$ to $|\delta|$: it measures how well
one mode is tracked, whichever particles sit in which.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opvi.metrics import wasserstein2

MIDPOINTS, GAPS = 121, 160  # grid points: all midpoints, gaps on the positive side


class GridPosterior(NamedTuple):
    """A posterior's mass on a grid of midpoints and gaps."""

    midpoints: np.ndarray  # [a]
    gaps: np.ndarray  # [b], symmetric about 0
    mass: np.ndarray  # [a, b], sums to 1

    def moments(self, folded: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Mean and covariance of $(\\theta_1, \\theta_2)$."""
        grid = np.stack(np.meshgrid(self.midpoints, self.gaps, indexing="ij"), -1)
        points = to_theta(grid, folded)
        mean = (self.mass[..., None] * points).sum((0, 1))
        centred = points - mean
        return mean, np.einsum("ij,ijk,ijl->kl", self.mass, centred, centred)

    def draw(self, n: int, seed: int, stratified: bool = False) -> np.ndarray:
        """n draws of $(\\theta_1, \\theta_2)$, spread evenly inside their grid cells."""
        rng = np.random.default_rng(seed)
        levels = (np.arange(n) + rng.random(n)) / n if stratified else rng.random(n)
        cumulative = np.cumsum(self.mass.T.ravel())  # gap by gap: strata then follow the modes
        cell = np.searchsorted(cumulative, levels * cumulative[-1]).clip(max=self.mass.size - 1)
        inside = rng.random((2, n)) - 0.5
        gap = self.gaps[cell // len(self.midpoints)] + inside[0] * (self.gaps[1] - self.gaps[0])
        midpoint = self.midpoints[cell % len(self.midpoints)] + inside[1] * (self.midpoints[1] - self.midpoints[0])
        return to_theta(np.stack([midpoint, gap], -1))


def to_theta(points: np.ndarray, folded: bool = False) -> np.ndarray:
    """Points $(m, \\delta)$ as $(\\theta_1, \\theta_2)$; if folded, those of $(m, |\\delta|)$."""
    midpoint, gap = points[..., 0], np.abs(points[..., 1]) if folded else points[..., 1]
    return np.stack([midpoint - gap / 2, gap], -1)


def to_midpoint_gap(theta: Any) -> np.ndarray:
    """Particles $(\\theta_1, \\theta_2)$ as $(m, \\delta)$."""
    theta = np.asarray(theta, float)
    return np.stack([theta[..., 0] + theta[..., 1] / 2, theta[..., 1]], -1)


def exact_posterior(
    rows: Any, variance: float = 2.0, prior_variance: tuple[float, float] = (10.0, 1.0), weight: Any = None
) -> GridPosterior:
    """Return the posterior after these rows, in float64, on a grid fitted to its mass.

    Args:
        rows: the data, `[N]`.
        variance, prior_variance: as in `opvi.gaussian_mixture`.
        weight: how much each row counts, e.g. after forgetting; 1 if omitted.
    """
    x = np.asarray(rows, float)
    w = np.ones(len(x)) if weight is None else np.asarray(weight, float)
    spread = variance + 0.3  # of a row around the midpoint, near enough to place the grid
    precision = 1 / (prior_variance[0] + prior_variance[1] / 4) + w.sum() / spread
    centre, sd = (w * x).sum() / spread / precision, precision**-0.5
    with jax.enable_x64(True):
        coarse = np.linspace(0, 5.5 * prior_variance[1] ** 0.5, 221)
        values = _log_posterior(np.array([centre]), coarse, x, w, variance, prior_variance)[0]
        alive = np.flatnonzero(values > values.max() - 22)
        low, high = coarse[max(alive[0] - 1, 0)], coarse[min(alive[-1] + 1, len(coarse) - 1)]
        edges = np.linspace(low, high, GAPS + 1)
        half = (edges[1:] + edges[:-1]) / 2
        midpoints = np.linspace(centre - 7 * sd, centre + 7 * sd, MIDPOINTS)
        gaps = np.concatenate([-half[::-1], half])
        log_mass = _log_posterior(midpoints, gaps, x, w, variance, prior_variance)
    mass = np.exp(log_mass - log_mass.max())
    return GridPosterior(midpoints, gaps, mass / mass.sum())


def _log_posterior(midpoints: Any, gaps: Any, x: Any, w: Any, variance: float, prior: tuple[float, float]) -> Any:
    padding = (1 << max(len(x) - 1, 15).bit_length()) - len(x)  # few shapes, few compilations
    x, w = np.pad(x, (0, padding)), np.pad(w, (0, padding))
    return np.asarray(_grid(jnp.asarray(midpoints), jnp.asarray(gaps), jnp.asarray(x), jnp.asarray(w), variance, prior))


@jax.jit
def _grid(midpoints: Any, gaps: Any, x: Any, w: Any, variance: Any, prior: Any) -> Any:
    def one(midpoint: Any) -> Any:
        # The target's formula, with what depends on x and gap alone kept in one fused loop over rows.
        tilt = jnp.abs((x - midpoint)[None, :] * gaps[:, None] / (2 * variance))
        rows = tilt + jnp.log1p(jnp.exp(-2 * tilt)) - ((x - midpoint) ** 2 / (2 * variance))[None, :]
        likelihood = (rows * w[None, :]).sum(1) - w.sum() * gaps**2 / (8 * variance)
        return likelihood - (midpoint - gaps / 2) ** 2 / (2 * prior[0]) - gaps**2 / (2 * prior[1])

    return jax.lax.map(one, midpoints)


def by_weight(state: Any, n: int) -> Any:
    """Return n of a sampler's particles, in proportion to their weights, by systematic resampling."""
    x = state.particles
    log_weights = getattr(state, "log_weights", None)
    if log_weights is None:
        return x
    share = jnp.cumsum(jax.nn.softmax(log_weights))
    places = (jnp.arange(n, dtype=x.dtype) + 0.5) / n
    return x[jnp.searchsorted(share / share[-1], places).clip(0, len(x) - 1)]


def tracking_error(
    particles: Any, posterior: GridPosterior, *, folded: bool = True, draws: int = 8, seed: int = 0
) -> float:
    """Return W2 from the particles to exact draws, in units of the posterior's standard deviation.

    Args:
        particles: `[n, 2]` in $(\\theta_1, \\theta_2)$.
        posterior: the posterior they should follow.
        folded: fold the two mirrored modes onto one.
        draws: the number of exact (stratified) draws per particle.
    """
    exact = posterior.draw(draws * len(particles), seed, stratified=True)
    x, y = (to_theta(to_midpoint_gap(sample), folded) for sample in (particles, exact))
    return wasserstein2(x, y) / float(np.sqrt(np.trace(posterior.moments(folded)[1])))
