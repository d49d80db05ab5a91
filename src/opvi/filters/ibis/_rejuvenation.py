r"""Rejuvenation: particles are resampled and moved by Hamiltonian trajectories that leave the posterior invariant.

A trajectory follows the gradient of a surrogate: the quadratic of all rows at the particles' mean, corrected by the
exact likelihoods of a sample of rows (a difference estimator). Whether it is accepted is decided by the likelihood of
all rows, and so the surrogate costs acceptance, not truth.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from opvi._factors import cholesky
from opvi.filters.ibis._sums import (
    Quadratic,
    Rows,
    Sample,
    all_rows,
    block_of,
    blocks_in,
    expand,
    row_likelihoods,
    sample_rows,
    sum_gradients,
    sum_values,
)
from opvi.targets import Target
from opvi.types import Array, Key, Particles, Scalar

SAMPLE = 512  # rows whose exact likelihoods correct the surrogate
WANTED = 0.8  # share of trajectories that are accepted
FIRST_STEP = 0.4  # of a trajectory, in standard deviations
SMALLEST_STEP, LARGEST_STEP = 1e-3, 0.8
QUARTER = math.pi / 2  # the length of a trajectory, after which a Gaussian's start is forgotten
SHORTEST, LONGEST = 0.6, 1.2  # times the step: trajectories of one length would return to where they began
EARLY, SATURATED = 2, 1.3  # moves, and the growth of a squared distance since then below which it is that of a mode
PATIENCE, LONG = 5, 4.0  # moves after which trajectories become so many times as long: bent densities need it
MOST_LEAPS = 64
FEWEST_MOVES = 2
FEWEST_ACCEPTED = 0.4  # share of the trajectories: with fewer, one more move
LARGEST_ERROR = 1.0  # nats, over particles: above, the surrogate of a sample gives way to all rows
MOSTLY = 0.9  # share of the particles at which the density must be finite
SHRINKAGE = 0.7  # times d / effective number: how much of a covariance comes from the curvature


class Limits(NamedTuple):
    """When chains have moved enough."""

    mean: float  # correlation with where they began, on average over parameters
    slowest: float  # the largest
    moves: int  # at most


USUAL = Limits(0.25, 0.5, 16)


class Past(NamedTuple):
    """Rows that are not stored any more, and how many of them each stored row stands for."""

    gone: Quadratic
    doubt: Array  # [d, d]: the covariance of the error of its gradient
    stands_for: Array  # [room]
    share: Scalar  # what all of this is multiplied by


class Density(NamedTuple):
    r"""A density between the last posterior and the next one.

    $$\log p(v) = a \log p_0(v) + (1 - a) \log N(v; m, s^2) + \sum_r w_r \ell_r(v) + q(v)$$
    """

    rows: Rows
    prior_share: Scalar  # a: 1 but for the first batch, which leads from a Gaussian to the prior and the rows at once
    start: "Gaussian"
    past: Past | None  # None: all rows are stored
    beyond: Quadratic | None = None  # q: rows not stored any more, less what the weights of stored ones account for


class Gaussian(NamedTuple):
    """Independent Gaussians."""

    mean: Array  # [d]
    sd: Array  # [d]

    def log_density(self, v: Array) -> Scalar:
        """Return the log density."""
        return (
            -(((v - self.mean) / self.sd) ** 2).sum() / 2 - jnp.log(self.sd).sum() - len(v) * math.log(2 * math.pi) / 2
        )

    def draws(self, key: Key, n: int) -> Particles:
        """Return n draws."""
        noise = jax.random.normal(key, (n, len(self.mean)), self.mean.dtype)
        return self.mean[None] + self.sd[None] * noise


class Frame(NamedTuple):
    """Coordinates in which the density is roughly round: v = centre + root u."""

    centre: Array  # [d]
    root: Array  # [d, d], lower

    def out(self, u: Array) -> Array:
        """Return parameters `[n, d]`."""
        return self.centre[None] + u @ self.root.T

    def into(self, x: Array) -> Array:
        """Return coordinates `[n, d]`."""
        return jax.scipy.linalg.solve_triangular(self.root, (x - self.centre[None]).T, lower=True).T


class Surrogate(NamedTuple):
    """What trajectories follow."""

    sample: Sample
    correction: Quadratic  # of all rows, less that of the sample


class Chains(NamedTuple):
    """Particles on their way."""

    x: Particles
    value: Array  # [n]: log density, beside the likelihood of the frame's centre
    of_surrogate: Array  # [n]: the same by the surrogate
    surrogate: Surrogate
    step: Scalar
    accepted: Scalar  # share, of the last move
    remembered: Scalar  # mean correlation with where the chains began, over parameters
    slowest: Scalar  # the largest
    moves: Array
    unseen: Array  # whether the values are still to be computed
    patient: Array  # False once trajectories of the usual length have not been enough
    turn: Array  # moves since they began to forget
    early: Array  # [d]: mean squared distance from where they began, after two of these


def weighted_moments(x: Particles, log_weights: Array) -> tuple[Array, Array, Scalar]:
    """Return the mean, the covariance and the effective number of weighted particles."""
    w = jax.nn.softmax(log_weights)
    mean = w @ x
    off = x - mean[None]
    return mean, (off * w[:, None]).T @ off, effective_number(log_weights)


def effective_number(log_weights: Array) -> Scalar:
    """Return the effective number of weighted particles (Kong)."""
    return 1 / (jax.nn.softmax(log_weights) ** 2).sum()


def resample_places(key: Key, log_weights: Array) -> Array:
    """Return which particles take the places, by systematic resampling."""
    n = len(log_weights)
    share = jnp.cumsum(jax.nn.softmax(log_weights))
    points = (jnp.arange(n, dtype=share.dtype) + jax.random.uniform(key, (), share.dtype)) / n
    return jnp.searchsorted(share / share[-1], points).clip(0, n - 1)


def log_prior(target: Target, density: Density, v: Array) -> Scalar:
    """Return all of a log density but the rows."""
    a = density.prior_share
    prior = target.log_prior(target.unravel(v))
    start = jnp.where(a < 1, (1 - a) * density.start.log_density(v), 0)
    total = a * prior + start
    return total if density.beyond is None else total + density.beyond(v)


def fit_frame(target: Target, density: Density, curvature: Array, mean: Array, cov: Array, effective: Scalar) -> Frame:
    """Return coordinates from the particles' covariance, shrunk to the inverse curvature where particles are few."""
    d = len(mean)
    tiny = jnp.finfo(mean.dtype).tiny ** 0.5
    of_prior = jax.hessian(lambda v: log_prior(target, density, v))(mean)
    sd = jnp.sqrt(jnp.diagonal(cov)) + tiny
    bend = -(curvature + of_prior) * sd[:, None] * sd[None]  # in the particles' standard deviations
    root = cholesky((bend + bend.T) / 2)
    inverse = jax.scipy.linalg.cho_solve((root, True), jnp.eye(d, dtype=mean.dtype))
    variance = jnp.diagonal(inverse)
    sound = jnp.isfinite(inverse).all() & (variance > 0.05).all() & (variance < 20).all()
    towards = jnp.where(sound, jnp.where(jnp.isfinite(inverse), inverse, 0), jnp.eye(d, dtype=mean.dtype))
    share = jnp.minimum(1, SHRINKAGE * d / effective) + 1e-5
    V = (1 - share) * (cov / sd[:, None] / sd[None]) + share * towards
    return Frame(mean, cholesky((V + V.T) / 2) * sd[:, None])


def make_surrogate(target: Target, key: Key, density: Density, mean: Array) -> tuple[Surrogate, Array]:
    """Return a surrogate, and the curvature of all rows."""
    sample = sample_rows(key, density.rows, SAMPLE)
    tasks = jnp.array([False, True])

    def task(alone: Array) -> Quadratic:
        part = sample._replace(alone=alone & sample.alone)
        return expand(target, density.rows, part, mean)

    whole, part = (jax.tree.map(lambda a, i=i: a[i], jax.lax.map(task, tasks)) for i in (0, 1))
    correction = jax.tree.map(lambda a, b: jnp.where(sample.alone, a - b, 0), whole, part)._replace(at=mean)
    sound = jnp.isfinite(correction.gradient).all() & jnp.isfinite(correction.hessian).all()
    correction = jax.tree.map(lambda a: jnp.where(sound, a, 0), correction)._replace(at=mean)
    curvature = whole.hessian
    return Surrogate(sample._replace(alone=sample.alone & sound), correction), curvature


def move_chains(target: Target, key: Key, density: Density, frame: Frame, began: Array, chains: Chains) -> Chains:
    """Move every chain along one trajectory; the first time, only see where chains are."""
    n, d = chains.x.shape
    kind = chains.x.dtype
    first = chains.unseen
    u = frame.into(chains.x)
    noise = jax.random.normal(jax.random.fold_in(key, chains.moves), (n, d + 2), kind)  # one program of random numbers
    p = noise[:, :d]
    chance_of_length, chance_to_stay = jax.scipy.stats.norm.cdf(noise[:, d:]).T
    length = chains.step * (SHORTEST + (LONGEST - SHORTEST) * chance_of_length[:, None])
    far = jnp.where(chains.patient, 1.0, LONG) * QUARTER
    leaps = jnp.where(first, 0, jnp.clip(jnp.round(far / chains.step), 2, MOST_LEAPS).astype(jnp.int32))
    surrogate = chains.surrogate
    alone = surrogate.sample.alone

    def prior(v: Array) -> Scalar:
        correction = jnp.where(alone, surrogate.correction(v), 0)
        return log_prior(target, density, v) + correction

    def leap(i: Array, place: tuple[Array, ...]) -> tuple[Array, ...]:
        u, p, _, gradient = place
        size = jnp.where(i == 0, 0, length)  # the first time, to see the gradient where chains are
        p = p + size / 2 * gradient
        u = u + size * p
        x = frame.out(u)
        of_rows, along_rows = sum_gradients(target, density.rows, surrogate.sample, x, frame.centre)
        of_prior, along_prior = jax.vmap(jax.value_and_grad(prior))(x)
        gradient = (along_rows + along_prior) @ frame.root
        return u, p + size / 2 * gradient, of_rows + of_prior, gradient

    nothing = jnp.zeros(n, kind), jnp.zeros_like(u)
    u_new, p_new, of_surrogate, _ = jax.lax.fori_loop(0, leaps + 1, leap, (u, p, *nothing))
    x_new = jnp.where(first, chains.x, frame.out(u_new))

    rows = density.rows._replace(filled=jnp.where(alone, density.rows.filled, 0))
    of_rows = sum_values(target, rows, x_new, frame.centre)
    of_prior = jax.vmap(lambda v: log_prior(target, density, v))(x_new)
    value = jnp.where(alone, of_rows + of_prior, of_surrogate)
    gain = value - chains.value + ((p**2).sum(1) - (p_new**2).sum(1)) / 2
    chance = jnp.where(jnp.isfinite(gain), jnp.exp(jnp.minimum(gain, 0)), 0)
    yes = first | (chance_to_stay < chance)
    x = jnp.where(yes[:, None], x_new, chains.x)
    accepted = jnp.where(first, chains.accepted, chance.mean())
    step = chains.step * jnp.where(first, 1, jnp.exp(0.7 * (accepted - WANTED)))
    # A surrogate that is wrong by more than a nat is worth nothing: the next trajectories follow all rows.
    error = jnp.std(jnp.where(jnp.isfinite(value), value - of_surrogate, 0))
    good = ~first | (error < LARGEST_ERROR) & (jnp.isfinite(value).mean() > MOSTLY)
    sample = surrogate.sample._replace(alone=alone & good)
    turn = chains.turn + jnp.where(first, 0, 1)
    distance = ((frame.into(x) - began) ** 2).mean(0)
    early = jnp.where(turn == EARLY, distance, chains.early)
    # What moves within modes does not forget in which of them it began, and comes no farther after five moves than
    # after two; what is only slow does.
    within = (turn >= PATIENCE) & (distance < SATURATED * early) & (distance > (2 * step) ** 2)
    correlation = jnp.where(within, 0, correlations(began, frame.into(x)))
    return Chains(
        x,
        jnp.where(yes, value, chains.value),
        jnp.where(yes, of_surrogate, chains.of_surrogate),
        surrogate._replace(sample=sample),
        jnp.clip(step, SMALLEST_STEP, LARGEST_STEP),
        accepted,
        correlation.mean(),
        correlation.max(),
        chains.moves + 1,
        alone & ~good,
        chains.patient,
        turn,
        early,
    )


def correlations(then: Array, now: Array) -> Array:
    """Return the absolute correlations of coordinates, `[n, d]`, with what they were."""
    then, now = (u - u.mean(0, keepdims=True) for u in (then, now))
    scale = jnp.sqrt((then**2).sum(0) * (now**2).sum(0)) + jnp.finfo(now.dtype).tiny ** 0.5
    return jnp.abs((then * now).sum(0) / scale)


def begin_chains(x: Particles, surrogate: Surrogate, step: Scalar) -> Chains:
    """Return chains that have not moved yet."""
    one, none = jnp.ones((), x.dtype), jnp.zeros((), jnp.int32)
    value, yes = jnp.zeros(len(x), x.dtype), jnp.ones((), bool)
    return Chains(x, value, value, surrogate, step, one, one, one, none, yes, yes, none, jnp.zeros_like(x[0]))


def anchor(target: Target, density: Density, at: Array, cov: Array) -> Density:
    r"""Return the density with what is known of rows no longer stored expanded around another point.

    Their quadratic changes as those of the stored rows do that stand for them, whose likelihoods are known:
    $g' = g + H (a' - a) + \sum_r \kappa_r [\nabla \ell_r(a') - \nabla \ell_r(a) - \nabla^2 \ell_r(a) (a' - a)]$.
    """
    if density.past is None:
        return density
    past = density.past
    rows = density.rows._replace(weight=past.stands_for)
    before = expand(target, rows, all_rows(rows), past.gone.at)
    now = expand(target, rows, all_rows(rows), at)
    change = jax.tree.map(jnp.subtract, now, before.moved_to(at))
    gone = past.gone.moved_to(at).plus(change)
    doubt = add_doubts(past.doubt, doubt_of_anchoring(target, density, at), cov)
    beyond = jax.tree.map(jnp.subtract, gone, now)._replace(at=at).scaled(past.share)
    return density._replace(past=past._replace(gone=gone, doubt=doubt), beyond=beyond)


def add_doubts(before: Array, new: Array, cov: Array) -> Array:
    r"""Return a bound on the covariance of a sum of two errors, however they depend on one another.

    $\operatorname{Cov}(e + f) \preceq (1 + \alpha) R + (1 + 1/\alpha) S$, where the rows sampled are mostly the same
    as before, so that errors do not average out.
    """
    tiny = jnp.finfo(cov.dtype).tiny ** 0.5
    ratio = jnp.sqrt(((new * cov).sum() + tiny) / ((before * cov).sum() + tiny))
    return (1 + ratio) * before + (1 + 1 / ratio) * new


def doubt_of_anchoring(target: Target, density: Density, at: Array) -> Array:
    """Return the covariance, over samples of rows, of the change that `anchor` makes to a gradient: `[d, d]`."""
    past = density.past
    assert past is not None
    rows, everything, before = density.rows, all_rows(density.rows), past.gone.at
    own = jnp.where(past.stands_for > 0, rows.weight / past.share, 0)  # rows with those that they stand for

    def add(k: Array, total: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        data, weight = block_of(rows._replace(weight=past.stands_for * own), everything, k)

        def gradients(v: Array) -> Array:
            return jax.jacfwd(lambda v: row_likelihoods(target, v, data))(v)

        here, along = jax.jvp(gradients, (before,), (at - before,))
        change = gradients(at) - here - along
        change = jnp.where(jnp.isfinite(change), change, 0)
        return total[0] + (change * weight[:, None]).T @ change, total[1] + weight @ change, total[2] + weight.sum()

    nothing = jnp.zeros_like(past.doubt), jnp.zeros_like(at), jnp.zeros((), at.dtype)
    second, first, mass = jax.lax.fori_loop(0, blocks_in(rows, everything), add, nothing)
    return second - first[:, None] * first[None] / jnp.maximum(mass, 1e-30)


class Prepared(NamedTuple):
    """Resampled particles, and what their moves need."""

    chains: Chains
    frame: Frame
    density: Density  # anchored at the particles' mean


def resample_chains(
    target: Target, key: Key, x: Particles, log_weights: Array, density: Density, step: Scalar
) -> Prepared:
    """Return chains that begin at resampled particles."""
    at, picked = jax.random.split(key)
    mean, cov, effective = weighted_moments(x, log_weights)
    density = anchor(target, density, mean, cov)
    surrogate, curvature = make_surrogate(target, picked, density, mean)
    frame = fit_frame(target, density, curvature, mean, cov, effective)
    return Prepared(begin_chains(x[resample_places(at, log_weights)], surrogate, step), frame, density)


def rejuvenate(target: Target, key: Key, x: Particles, log_weights: Array, density: Density, step: Scalar) -> Prepared:
    """Resample particles, and move them until they have forgotten where they began."""
    chains, frame, density = resample_chains(target, key, x, log_weights, density, step)
    moving = jax.random.fold_in(key, 0)
    return Prepared(move_until_forgotten(target, moving, density, frame, chains, USUAL), frame, density)


def move_until_forgotten(
    target: Target, key: Key, density: Density, frame: Frame, chains: Chains, limits: Limits
) -> Chains:
    """Move chains until their correlation with where they began is small."""
    began, start = frame.into(chains.x), chains.moves
    chains = chains._replace(turn=jnp.zeros_like(chains.turn))

    def unsettled(at: Chains) -> Array:
        enough = (at.moves - start > FEWEST_MOVES) & (at.accepted > FEWEST_ACCEPTED)
        enough &= (at.remembered < limits.mean) & (at.slowest < limits.slowest)
        return (at.moves - start <= limits.moves) & ~enough

    def move(at: Chains) -> Chains:
        at = at._replace(patient=at.patient & (at.turn <= PATIENCE))
        return move_chains(target, key, density, frame, began, at)

    return jax.lax.while_loop(unsettled, move, chains)
