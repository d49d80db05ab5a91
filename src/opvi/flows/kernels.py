r"""Radial kernels $K(x, y) = k(\|x - y\|^2; h)$ and the rules that choose their bandwidth $h$."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax

from opvi.flows._ring import everywhere
from opvi.types import Array, Particles, Scalar, Tree

PRECISION = lax.Precision.HIGHEST  # the accelerators' default loses digits where drift and repulsion cancel


@dataclass(frozen=True)
class Kernel:
    """A radial kernel as functions of the squared distance $r$ and the bandwidth $h$."""

    value: Callable[[Array, Scalar, int], Array]  # k(r; h), in d dimensions
    slope: Callable[[Array, Scalar, int], Array]  # dk/dr
    height: Callable[[Scalar, int], Array] | None = None  # k(0; h) of a Gaussian, k = height · e^(-r/h); None: another


def rbf(normalised: bool = False) -> Kernel:
    r"""$k(r) = e^{-r/h}$, times $(\pi h)^{-d/2}$ if normalised to integrate to one."""
    if normalised:
        return Kernel(_density, _density_slope, _density_height)
    return Kernel(_gaussian, _gaussian_slope, _gaussian_height)


def imq() -> Kernel:
    r"""$k(r) = (1 + r/h)^{-1/2}$, the inverse multiquadric, whose tails control convergence."""
    return Kernel(_imq, _imq_slope)


def _gaussian(r: Array, h: Scalar, d: int) -> Array:
    return jnp.exp(-r / h)


def _gaussian_slope(r: Array, h: Scalar, d: int) -> Array:
    return -_gaussian(r, h, d) / h


def _gaussian_height(h: Scalar, d: int) -> Array:
    return jnp.ones_like(h)


def _density(r: Array, h: Scalar, d: int) -> Array:
    return _gaussian(r, h, d) * _density_height(h, d)


def _density_slope(r: Array, h: Scalar, d: int) -> Array:
    return -_density(r, h, d) / h


def _density_height(h: Scalar, d: int) -> Array:
    return (math.pi * h) ** (-d / 2)


def _imq(r: Array, h: Scalar, d: int) -> Array:
    return lax.rsqrt(1 + r / h)


def _imq_slope(r: Array, h: Scalar, d: int) -> Array:
    return -lax.rsqrt(1 + r / h) / (2 * (h + r))


FEW_DIMENSIONS = 4


def centred(x: Particles) -> Particles:
    """Return the particles minus their mean; exactly 0 where all are the same number."""
    return jnp.where((x == x[:1]).all(0, keepdims=True), 0, x - x.mean(0, keepdims=True))


def nearly_centred(x: Particles) -> Particles:
    """Return the particles minus their mean, rounded to a sixty-fourth of their spread.

    A mean with all its bits would round the particles of like size in the same direction, and where drift and repulsion
    of a million particles cancel, that error would be what remains. A multiple of a power of two is subtracted exactly.
    Particles that coincide are exactly 0: kernels would take rounding errors for their distances.
    """
    mean = x.mean(0, keepdims=True)
    spread = jnp.sqrt(((x - mean) ** 2).mean(0, keepdims=True))
    unit = lax.reduce_precision(spread, exponent_bits=jnp.finfo(x.dtype).nexp, mantissa_bits=0) / 64
    near = x - jnp.where(unit > 0, jnp.round(mean / jnp.where(unit > 0, unit, 1)) * unit, mean)
    return jnp.where((x == x[:1]).all(0, keepdims=True), 0, near)


def squared_distances(x: Particles, y: Particles, precision: lax.PrecisionLike = PRECISION) -> Array:
    r"""Return $\|x_i - y_j\|^2$ in $O(nm)$ memory, never $O(nmd)$.

    One matrix product; in few dimensions a sum of squared differences, which is as fast there and does
    not cancel. Centre the particles first: the expanded square loses digits far from the origin.
    """
    if x.shape[1] <= FEW_DIMENSIONS:
        differences = (x[:, None, k] - y[None, :, k] for k in range(x.shape[1]))
        return sum((delta**2 for delta in differences), start=jnp.zeros((), x.dtype))
    inner = jnp.matmul(x, y.T, precision=precision)
    if x is y:  # the squares stand on the diagonal, and a particle's distance to itself is exactly 0
        squares = jnp.diagonal(inner)
        return jnp.maximum(squares[:, None] + squares[None, :] - 2 * inner, 0)
    return jnp.maximum((x * x).sum(1)[:, None] + (y * y).sum(1)[None, :] - 2 * inner, 0)


# --- bandwidth --------------------------------------------------------------------------------

Bandwidth = Callable[[Particles], Scalar]

# Rules see at most this many particles, evenly spaced: n² stays bounded and no step sorts n² numbers.
LARGEST_SAMPLE = 2048


def fixed(h: float) -> Bandwidth:
    """Use the same h in every round."""
    if not h > 0:
        raise ValueError(f"`h` is {h!r}, but a bandwidth must be greater than 0.")
    return _Fixed(float(h))


@dataclass(frozen=True)
class _Fixed:
    h: float

    def __call__(self, x: Particles) -> Scalar:
        return jnp.asarray(self.h, x.dtype)


def middle_pair(values: Array, k: int) -> tuple[Scalar, Scalar]:
    """Return the k-th and the (k+1)-th smallest (from 1) of non-negative floats, exactly, without sorting.

    Non-negative floats are ordered like their bit patterns, so a bracket of patterns is narrowed until
    both are found. A pass over the values counts those up to a pivot and finds the nearest on either
    side; the next pivot is interpolated from the counts (the Illinois rule), and every eighth pass
    halves the bracket whatever the values are. About 8 passes: on a CPU about a hundred times faster
    than XLA's sort of a million numbers.
    """
    dtype = values.dtype
    integer = {16: jnp.int16, 32: jnp.int32, 64: jnp.int64}[jnp.finfo(dtype).bits]
    largest = jnp.asarray(jnp.iinfo(integer).max, integer)
    zero, none = jnp.zeros((), integer), jnp.zeros((), jnp.int32)
    pattern = lax.bitcast_convert_type(values, integer).reshape(-1)

    def join(a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
        return a[0] + b[0], jnp.maximum(a[1], b[1]), jnp.minimum(a[2], b[2])

    def narrow(search: Tree) -> Tree:
        passes, first, last, short, over, pivot, side = search
        pivot = jnp.clip(lax.bitcast_convert_type(pivot, integer), first, last - 1)
        pivot = jnp.where(passes % 8 == 7, first + (last - first) // 2, pivot)
        low = pattern <= pivot
        # One reduction of three: XLA's CPU compiler makes slow work of a plain sum of integers.
        parts = low.astype(jnp.int32), jnp.where(low, pattern, zero), jnp.where(low, largest, pattern)
        count, below, above = lax.reduce(parts, (none, zero, largest), join, (0,))
        excess = (count - k).astype(dtype)
        rises = count <= k
        # At count = k both are found: first and last change places, which ends the search.
        first, last = jnp.where(rises, above, first), jnp.where(count < k, last, below)
        over = jnp.where(rises, jnp.where(side < 0, over / 2, over), excess)
        short = jnp.where(rises, excess, jnp.where(side > 0, short / 2, short))
        low_value, high_value = (lax.bitcast_convert_type(end, dtype) for end in (first, last))
        pivot = low_value + (high_value - low_value) * (short / (short - over))
        return passes + 1, first, last, short, over, pivot, jnp.where(rises, -1, 1).astype(jnp.int32)

    last = lax.bitcast_convert_type(values.max(), integer)
    short, over = jnp.asarray(-k, dtype), jnp.asarray(values.size - k, dtype)
    start = (none, zero, last, short, over, values.mean(), none)
    _, first, last, *_ = lax.while_loop(lambda search: search[1] < search[2], narrow, start)
    lower, upper = jnp.minimum(first, last), jnp.maximum(first, last)
    return lax.bitcast_convert_type(lower, dtype), lax.bitcast_convert_type(upper, dtype)


def evenly_spaced(x: Particles, largest: int = LARGEST_SAMPLE) -> Particles:
    """Return all particles, or `largest` of them at even strides."""
    return everywhere(x if len(x) <= largest else x[:: -(-len(x) // largest)])


@dataclass(frozen=True)
class _Median:
    """The squared median distance over a logarithm, in one of the variants in use."""

    diagonal: bool = True  # whether a particle's distance to itself counts
    offset: int = 0  # the logarithm is that of n + offset
    of_squares: bool = False  # the median of the squared distances, instead of that of the distances, squared
    upper: bool = False  # the upper of two middle values: numpy's percentile method "higher"
    epsilon: bool = False  # added at the end

    def __call__(self, x: Particles) -> Scalar:
        n = len(x)
        sample = evenly_spaced(x)
        m = len(sample)
        around_mean = centred(sample)
        r = squared_distances(around_mean, around_mean)
        # Zeros on the diagonal sort first: leaving them out of the list shifts the ranks by m. The list holds
        # every pair twice, which leaves its median where the list of pairs has it.
        r = jnp.where(jnp.eye(m, dtype=bool), 0, r)
        count, skip = (m * m, 0) if self.diagonal else (m * (m - 1), m)
        low, high = middle_pair(r, skip + count // 2)
        low = high if self.upper or count % 2 else low
        middle = (low + high) / 2 if self.of_squares else ((jnp.sqrt(low) + jnp.sqrt(high)) / 2) ** 2
        # Particles that coincide have median 0; the smallest h keeps the kernel finite there.
        h = jnp.maximum(middle / math.log(n + self.offset), jnp.sqrt(jnp.finfo(x.dtype).tiny))
        return h + jnp.finfo(x.dtype).eps if self.epsilon else h


def median() -> Bandwidth:
    r"""$h = \mathrm{med}^2 / \log n$ over distinct pairs: the SVGD paper's text, and blackjax. The default.

    As in blackjax, the median is that of the distances, squared afterwards.
    """
    return _Median(diagonal=False)


def median_liu_wang() -> Bandwidth:
    r"""$h = \mathrm{med}(r) / \log(n+1)$ over all $n^2$ squared distances, zeros too: the SVGD authors' code."""
    return _Median(offset=1, of_squares=True)


def median_awgf() -> Bandwidth:
    r"""The same with the upper of two middle values: the code of OPVI's authors, after AWGF's."""
    return _Median(offset=1, of_squares=True, upper=True)


def median_numpyro() -> Bandwidth:
    r"""$h = \mathrm{med}^2 / \log n + \varepsilon$ over all $n^2$ distances, zeros too: NumPyro's `RBFKernel`."""
    return _Median(epsilon=True)


def heat_equation(candidates: int = 33, span: float = 32.0) -> Bandwidth:
    r"""The h under which deterministic particles follow the heat equation (Liu et al., 2019, the HE method).

    With $\tilde q$ the kernel density of the particles and $b = h/2$ its variance, minimise over $h$

    $$b^2 \sum_k \Big[ \Delta \tilde q(x_k)
      + \sum_j \nabla_{x_j} \tilde q(x_k) \cdot \nabla \log \tilde q(x_j) \Big]^2$$

    (for the unnormalised kernel, which makes it dimensionless), on a logarithmic grid around the
    median rule, refined by a parabola.

    Args:
        candidates: grid points.
        span: the grid runs from `median/span` to `median·span`.
    """

    return _HeatEquation(candidates, float(span))


@dataclass(frozen=True)
class _HeatEquation:
    candidates: int
    span: float

    def __call__(self, x: Particles) -> Scalar:
        sample = centred(evenly_spaced(x, 1024))
        r = squared_distances(sample, sample)
        d = x.shape[1]
        end = math.log(self.span)
        grid = jnp.linspace(-end, end, self.candidates, dtype=x.dtype)
        middle = median()(x)

        def objective(log_ratio: Array) -> Array:
            b = middle * jnp.exp(log_ratio) / 2
            k = jnp.exp(-r / (2 * b))
            mass = k.sum(1, keepdims=True)
            log_gradient = (jnp.matmul(k, sample, precision=PRECISION) / mass - sample) / b
            laplacian = (k * (r / b**2 - d / b)).sum(1)
            moved = (sample * jnp.matmul(k, log_gradient, precision=PRECISION)).sum(1)
            moved -= jnp.matmul(k, (sample * log_gradient).sum(1), precision=PRECISION)
            return jnp.log(b**2 * ((laplacian + moved / b) ** 2).sum())

        values = lax.map(objective, grid)
        best = jnp.clip(jnp.argmin(values), 1, self.candidates - 2)
        left, centre, right = values[best - 1], values[best], values[best + 1]
        curvature = left - 2 * centre + right
        shift = jnp.where(curvature > 0, (left - right) / (2 * jnp.where(curvature > 0, curvature, 1)), 0)
        return middle * jnp.exp(grid[best] + jnp.clip(shift, -1, 1) * (grid[1] - grid[0]))
