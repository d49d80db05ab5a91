r"""How good predictions are, and how far samples are from a distribution.

Scores of predictions take what `opvi.predict` returns and the true y; distances of samples take
`[n, d]` matrices.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.stats import norm

from opvi.flows.kernels import centred, median, squared_distances
from opvi.predictive import Normal, Predictive, StudentT
from opvi.types import Array, Particles, Scalar, Scores


def _dot(a: Array, b: Array) -> Array:
    """Return a product in full precision, which accelerators use only on request."""
    return jnp.matmul(a, b, precision="highest")


# --- predictions ------------------------------------------------------------------------------


def rmse(predictive: Predictive, y: Array) -> Scalar:
    """Return the root mean squared error of the predictive mean. Smaller is better."""
    return jnp.sqrt(((predictive.mean() - predictive.aligned(y)) ** 2).mean())


def log_predictive_density(predictive: Predictive, y: Array) -> Scalar:
    """Return the mean log predictive density. Larger is better."""
    return predictive.log_density(y).mean()


def accuracy(predictive: Predictive, y: Array) -> Scalar:
    """Return the share of rows whose most probable class is the true one."""
    return (predictive.classes() == predictive.aligned(y)).mean()


def brier(predictive: Predictive, y: Array) -> Scalar:
    r"""Return $\mathrm{mean} \sum_c (p_c - [y = c])^2$: 0 is perfect, 2 is certain and wrong everywhere."""
    p, y = predictive.probabilities(), predictive.aligned(y)
    return ((p - jax.nn.one_hot(y, p.shape[1], dtype=p.dtype)) ** 2).sum(1).mean()


def expected_calibration_error(predictive: Predictive, y: Array, bins: int = 15) -> Scalar:
    """Return the mean gap between confidence and accuracy, over equally wide bins of confidence, weighted by rows."""
    p, y = predictive.probabilities(), predictive.aligned(y)
    confidence = p.max(1)
    right = (p.argmax(1) == y).astype(p.dtype)
    index = jnp.clip((confidence * bins).astype(jnp.int32), 0, bins - 1)
    gap = jnp.zeros(bins, p.dtype).at[index].add(confidence - right)
    return jnp.abs(gap).sum() / len(p)


def coverage(predictive: Predictive, y: Array, level: float = 0.9) -> Scalar:
    """Return the share of rows inside the central interval of that level; equal to the level if calibrated."""
    (low, high), y = predictive.interval(level), predictive.aligned(y)
    return ((low <= y) & (y <= high)).mean()


CRPS_LEVELS = 99  # quantiles that stand for a distribution without a closed form


def crps(predictive: Predictive, y: Array) -> Scalar:
    r"""Return the mean continuous ranked probability score; smaller is better. For a Gaussian mixture in closed form:

    $$\sum_i w_i A(y - \mu_i, \sigma_i^2) - \tfrac12 \sum_{ij} w_i w_j A(\mu_i - \mu_j, \sigma_i^2 + \sigma_j^2),
      \qquad A(m, s^2) = 2 s\, \phi(m/s) + m\, (2\Phi(m/s) - 1)$$

    and otherwise twice the mean pinball loss of 99 quantiles.
    """
    y = predictive.aligned(y)
    if isinstance(predictive.components, StudentT):
        levels = (np.arange(CRPS_LEVELS, dtype=predictive.components.mean.dtype) + 0.5) / CRPS_LEVELS
        above = y.astype(predictive.components.mean.dtype)[None] - predictive.quantile(levels)
        return 2 * jnp.maximum(levels[:, None] * above, (levels[:, None] - 1) * above).mean()
    if not isinstance(predictive.components, Normal):
        raise TypeError("CRPS needs a continuous y; for classes use `brier`.")
    mean, variance = predictive.components
    weights = jnp.broadcast_to(jnp.exp(predictive.log_mixture_weights()), mean.shape)

    return _crps_of_normals(weights, mean, variance, y.astype(mean.dtype))


@jax.jit  # JAX would compile the loop anew for every call
def _crps_of_normals(weights: Array, mean: Array, variance: Array, y: Array) -> Scalar:
    def absolute_moment(m: Array, s2: Array) -> Array:
        s = jnp.sqrt(s2)
        return 2 * s * norm.pdf(m / s) + m * (2 * norm.cdf(m / s) - 1)

    def row(given: tuple[Array, ...]) -> Array:  # one row at a time: n² memory, not n²·B
        w, mean, variance, y = given
        spread = absolute_moment(mean[:, None] - mean[None, :], variance[:, None] + variance[None, :])
        return _dot(w, absolute_moment(y - mean, variance)) - _dot(w, _dot(spread, w)) / 2

    return jax.lax.map(row, (weights.T, mean.T, variance.T, y)).mean()


# --- samples ----------------------------------------------------------------------------------


def ksd(particles: Particles, scores: Scores) -> Scalar:
    r"""Return the kernel Stein discrepancy to the distribution with these scores, by the IMQ kernel. Smaller is better.

    $$\mathrm{KSD}^2 = \tfrac{1}{n^2} \sum_{ij} k\, s_i \cdot s_j + 2 k' (x_i - x_j) \cdot (s_j - s_i)
      - 2 d k' - 4 r k''$$

    with $k(r) = (1 + r)^{-1/2}$. It depends on scale: whiten particles and scores first if their units differ.
    """
    x = centred(particles)
    d = x.shape[1]
    r = squared_distances(x, x)
    k = (1 + r) ** -0.5
    k1 = -0.5 * (1 + r) ** -1.5
    k2 = 0.75 * (1 + r) ** -2.5
    inner = _dot(scores, scores.T)
    cross = _dot(x, scores.T)  # x_i · s_j
    own = jnp.diagonal(cross)
    # (x_i - x_j)·(s_j - s_i) = x_i·s_j + x_j·s_i - x_i·s_i - x_j·s_j
    moved = cross + cross.T - own[:, None] - own[None, :]
    return jnp.sqrt(jnp.maximum((k * inner + 2 * k1 * moved - 2 * d * k1 - 4 * r * k2).mean(), 0))


def mmd(x: Particles, y: Particles, bandwidth: float | None = None) -> Scalar:
    r"""Return the maximum mean discrepancy of two samples, kernel $e^{-r/h}$; h by the median of y if omitted."""
    h = median()(y) * math.log(len(y)) if bandwidth is None else bandwidth
    origin = y.mean(0, keepdims=True)
    x, y = x - origin, y - origin

    def mean_kernel(a: Particles, b: Particles) -> Scalar:
        return jnp.exp(-squared_distances(a, b) / h).mean()

    return jnp.sqrt(jnp.maximum(mean_kernel(x, x) + mean_kernel(y, y) - 2 * mean_kernel(x, y), 0))


LARGEST_MATCHING = 8192  # rows of the assignment problem, whose cost grows with the cube


def wasserstein2(x: Particles | np.ndarray, y: Particles | np.ndarray) -> float:
    """Return the 2-Wasserstein distance between two samples, exactly, by optimal assignment.

    Samples of different sizes are repeated to a common size, which leaves the distance unchanged.
    """
    a, b = np.asarray(x, float), np.asarray(y, float)
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"samples have shapes {a.shape} and {b.shape}, but must be [n, d] and [m, d] with equal d.")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return math.nan
    common = math.lcm(len(a), len(b))
    if common > LARGEST_MATCHING:
        raise ValueError(
            f"samples of {len(a)} and {len(b)} rows need an assignment of {common}, more than {LARGEST_MATCHING}. "
            "Give samples whose sizes divide each other, or thin the larger."
        )
    a, b = np.repeat(a, common // len(a), 0), np.repeat(b, common // len(b), 0)
    if a.shape[1] == 1:  # on a line, sorting is optimal
        return float(np.sqrt(((np.sort(a[:, 0]) - np.sort(b[:, 0])) ** 2).mean()))
    a, b = a - b.mean(0), b - b.mean(0)
    from scipy.optimize import linear_sum_assignment  # loads for a quarter of a second, which few need

    cost = (a**2).sum(1)[:, None] + (b**2).sum(1)[None, :] - 2 * a @ b.T
    rows, columns = linear_sum_assignment(cost)
    return float(np.sqrt(((a[rows] - b[columns]) ** 2).sum(1).mean()))
