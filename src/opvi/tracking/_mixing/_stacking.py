r"""One online stacker: experts that predict, experts that correct, and those for rows far outside of what was seen.

Stage 0 weighs its experts for every row by least squares on the simplex, with a ridge of each one's stated variance,

$$w(x) = \arg\min_{w \in \Delta} w^\top \big(E + \rho \operatorname{diag}(v_k(x) / \hat\sigma^2)\big) w, \qquad
  E = \sum_i \lambda^{t - i} e_i e_i^\top,$$

where $e_i$ are the experts' errors of row i before they learnt it. Stage 1 corrects by
$\hat y = \bar f + \beta^\top u$, with $\beta \ge 0$ by least squares of the residuals. Far outside of what was seen, a
second pair of weights counts, which is learnt from such rows alone and begins at those of near rows; and how far the
experts for such rows may leave the others grows with what has proved right.
"""

import itertools
import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opvi._factors import diagonal
from opvi._forks import Unforked
from opvi.tracking._mixing import _numbers as numbers
from opvi.tracking._mixing._layer import Forecast, Lesson, Nested, Outcome, Report
from opvi.tracking._mixing._least_squares import nonnegative, simplex
from opvi.tracking._mixing._members import USUAL_ROWS
from opvi.tracking._mixing._numbers import NumbersState
from opvi.tracking._mixing._running import ONE_ROUND
from opvi.tracking._placed import placed
from opvi.tracking.experts._expert import Belief, Context, Rows, Units
from opvi.types import Array, Key, Scalar, Tree

MEMORY = 0.95  # of the experts' errors, for 20 rows
RIDGE = 5.0  # usual squared errors: how much an expert's own variance counts
LARGEST = 20.0  # times the usual error: what a row may say; with 5, rows far outside would not be heard
LARGEST_VARIANCE = 1e5  # in usual squared errors
FAR_MEMORY = 0.995  # of errors there, for 20 rows: such rows are few
FAR_RIDGE = 5.0  # usual squared errors, that pull those weights towards the others
LEAP = 2.0  # times as far from the other experts as has proved right, those for far rows may go
FIRST_LEAP = 10.0  # usual errors; and so much farther
CORRECTION_MEMORY = 0.99  # of the regression of the residuals, for 20 rows
EARLY_MEMORY = 0.25  # at first it reaches back over this share of the stream
CORRECTION_RIDGE = 10.0  # of that regression: squared terms, in usual squared errors
LARGEST_SHARE = 1.25  # of the weights of an expert's corrections together
SEVERAL = 2  # corrections of one expert; of more, those are taken that have clearly helped
MOST = 3  # of them, at most
LARGEST_SEVERAL = 2.0  # of their weights together
CLEAR = 4.0  # what one must have explained, in squared errors, and more the more there are to choose from
LARGEST_RESIDUAL = 7.5  # times the median residual: what one row may teach, about 5 standard deviations
SIZE_ROUNDS = 50.0  # batches of the usual size, over which that median is averaged


class StackingState(NamedTuple):
    """What is known of the experts, in units of the usual error."""

    products: Array  # [K, K]: discounted, of the errors of stage 0 but for experts for far rows
    far: Array  # [L, L]: of all of stage 0, in rows far outside
    squares: Array  # [T, T]: of the corrections
    moments: Array  # [T]: of corrections and residuals
    beta: Array  # [T]
    typical: Scalar  # running median of absolute residuals
    reach: Scalar  # how far from the others an expert for far rows has been right
    outside: Array  # [2]: discounted squared errors of stage 0 in far rows, and their weights
    rounds: Scalar  # of 20 rows


class StackState(NamedTuple):
    """The stack's own state, the head's and the experts'."""

    own: StackingState
    head: NumbersState
    experts: tuple[Tree, ...]


@dataclass(frozen=True)
class Stack(Unforked):
    """Settings of a stack."""

    experts: tuple[Any, ...]

    @property
    def predicting(self) -> list[int]:
        """The places of the experts of stage 0, those for far rows last."""
        first = [i for i, e in enumerate(self.experts) if e.stage == 0 and not e.far]
        return first + [i for i, e in enumerate(self.experts) if e.stage == 0 and e.far]

    @property
    def usual(self) -> int:
        """How many of them are not only for far rows."""
        return sum(e.stage == 0 and not e.far for e in self.experts)

    @property
    def correcting(self) -> list[int]:
        """The places of the experts of stage 1."""
        return [i for i, e in enumerate(self.experts) if e.stage == 1]

    def init(self, key: Key, columns: int, dtype: Any) -> StackState:
        """Return the state before any row."""
        states = tuple(e.init(jax.random.fold_in(key, i), columns, dtype) for i, e in enumerate(self.experts))
        wide, narrow = jnp.zeros((1, columns), dtype), jnp.zeros(1, dtype)
        rows = Rows(wide, wide, narrow, narrow, narrow, narrow)
        said = [jax.eval_shape(self.experts[i].predict, states[i], rows) for i in self.correcting]
        terms = sum(_members(belief) for belief in said)
        more = 2 * sum(belief.novelty is not None for belief in said)
        K, L = self.usual, len(self.predicting)
        zeros = partial(jnp.zeros, dtype=dtype)
        products, squares, each, one = zeros((K, K)), zeros((terms, terms)), zeros(terms), zeros(())
        own = StackingState(products, zeros((L, L)), squares, each, each, one, one, zeros(2), one)
        return StackState(own, numbers.start(columns + more, dtype), states)

    def predict(self, state: StackState, rows: Rows) -> Forecast:
        """Return what all experts say together."""
        own, error = state.own, state.head.error
        said: dict[int, Belief] = {i: self.experts[i].predict(state.experts[i], rows) for i in self.predicting}
        first = [said[i] for i in self.predicting]
        weights, near = _weights(own, first, self.usual, error, rows.far)
        mean = _bounded(own, jnp.stack([b.mean for b in first]), near, self.usual, error)
        base = (weights * mean).sum(0)
        variance = jnp.stack([b.variance for b in first])
        spread = (weights * (variance + (mean - base[None]) ** 2)).sum(0)
        known = (own.outside[0] + FAR_RIDGE * spread) / (
            own.outside[1] + FAR_RIDGE
        )  # by errors of such rows, not doubts
        spread = (1 - rows.far) * spread + rows.far * known
        said |= {i: self.experts[i].predict(state.experts[i], rows._replace(base=base)) for i in self.correcting}
        last = [said[i] for i in self.correcting]
        terms = jnp.concatenate([jnp.zeros((0, len(base)), base.dtype), *(b.mean.reshape(-1, len(base)) for b in last)])
        terms = terms.T * (1 - rows.far)[:, None]  # far outside no row is near
        local = [jnp.stack([jnp.log(b.variance / error), b.novelty], 1) for b in last if b.novelty is not None]
        features = jnp.clip(jnp.concatenate([*local, rows.z], 1), -4, 4)
        novelty = next((b.novelty for b in last if b.novelty is not None), jnp.zeros_like(base))
        one = numbers.describe(state.head, base + terms @ own.beta, spread, features)
        beliefs = tuple(said[i] for i in range(len(self.experts)))
        return Forecast(one, base, beliefs, mean, near, weights, terms, features, rows.far, novelty)

    def score(self, state: StackState, forecast: Forecast, y: Array) -> Outcome:
        """Return how a forecast did."""
        head, one = state.head, forecast.one
        scores = numbers.scored(head, one, y)
        squared = (y - one.mean) ** 2 / numbers.expected(head, one)
        density, level = numbers.log_density(head, scores), numbers.level(head, scores)
        return Outcome(scores, density, level, one.mean, squared, head.error, head.rounds)

    def distribution(self, state: StackState, forecast: Forecast) -> Tree:
        """Return the components of the predictive."""
        return numbers.predictive(state.head, forecast.one)

    def learn(
        self, key: Key, state: StackState, rows: Rows, forecast: Forecast, outcome: Outcome, lesson: Lesson
    ) -> tuple[StackState, Report]:
        """Learn how well every expert did, and let each learn the rows."""
        weight, error = lesson.scored * lesson.trust, state.head.error
        away = rows.y - forecast.base
        bound = jnp.maximum(LARGEST_RESIDUAL * state.own.typical, jnp.sqrt(error))
        residual = jnp.where(state.own.rounds > 0, jnp.clip(away, -bound, bound), away)
        own = _learn_weights(self, state.own, forecast, rows.y, residual, weight, error)
        head = numbers.learn(state.head, forecast.one, outcome.scores, forecast.features, rows.y, weight)
        slopes = [b.slope for b in forecast.beliefs if b.slope is not None]
        slope = sum(slopes) / len(slopes) if slopes else jnp.zeros_like(rows.z)
        count = jnp.maximum(rows.weight.sum(), 1e-30)
        shares = dict(zip(self.predicting, (forecast.weights * rows.weight[None]).sum(1) / count, strict=True))
        rows, none, new = rows._replace(base=forecast.base), jnp.zeros_like(error), []
        for i, (expert, inner) in enumerate(zip(self.experts, state.experts, strict=True)):
            told = forecast.beliefs[i], *lesson[:2], residual, slope, error, shares.get(i, none), lesson.renewed
            new.append(expert.learn(jax.random.fold_in(key, i), inner, rows, Context(*told)))
        nothing = jnp.zeros_like(error)
        report = Report(lesson.trust, nothing, nothing, jnp.ones_like(error), jnp.array(False))
        return StackState(own, head, tuple(new)), report

    def relearn(self, key: Key, state: StackState, rows: Rows) -> StackState:
        """Let experts learn from rows seen before, as far as they can."""
        pairs = zip(self.experts, state.experts, strict=True)
        return state._replace(experts=tuple(e.relearn(s, rows) if hasattr(e, "relearn") else s for e, s in pairs))

    def rescale(self, state: StackState, units: Units) -> StackState:
        """Return the same knowledge in new units."""
        by = units.output_ratio
        own = state.own._replace(typical=state.own.typical * by, reach=state.own.reach * by)
        own = own._replace(outside=own.outside * jnp.stack([by**2, jnp.ones_like(by)]))
        experts = tuple(e.rescale(s, units) for e, s in zip(self.experts, state.experts, strict=True))
        return StackState(own, numbers.rescale(state.head, units.output_ratio), experts)

    def forget(self, state: StackState, keep: Scalar) -> StackState:
        """Return experts that have forgotten; how they are weighed stays, unless nothing is kept."""
        experts = tuple(e.forget(s, keep) for e, s in zip(self.experts, state.experts, strict=True))
        head = state.head._replace(rounds=jnp.minimum(state.head.rounds, 1))
        return StackState(state.own, head, experts)

    def widen(self, state: StackState, fresh: StackState) -> StackState:
        """Return the state with more columns, and without the experts that are not for so many."""
        known = {_kind(inner): inner for inner in state.experts}
        pairs = zip(self.experts, fresh.experts, strict=True)
        experts = tuple(e.widen(known[_kind(new)], new) if _kind(new) in known else new for e, new in pairs)
        own = [_corner(new, old) for new, old in zip(fresh.own, state.own, strict=True)]
        same = {_kind(inner) for inner in fresh.experts} == set(known)
        return StackState(StackingState(*own), numbers.widen(state.head, fresh.head, same), experts)


def _kind(inner: Tree) -> type:
    """Return what an expert's state is of, whatever is wrapped around it."""
    return _kind(inner.inner) if isinstance(inner, Nested) else type(inner)


def _corner(into: Array, what: Array) -> Array:
    """Return an array with the first of its values replaced by those of another; experts that remain come first."""
    if not into.ndim:
        return what
    some = tuple(slice(min(a, b)) for a, b in zip(into.shape, what.shape, strict=True))
    return placed(into, some, what[some])


def _members(belief: Belief) -> int:
    return belief.mean.shape[0] if belief.mean.ndim == 2 else 1


def _weights(own: StackingState, said: list[Belief], usual: int, error: Scalar, far: Array) -> tuple[Array, Array]:
    """Return the weights of stage 0, `[K, B]`, and those without the experts for far rows."""
    noises = [error if b.noise is None else b.noise for b in said]
    variance = jnp.stack([b.variance + noise for b, noise in zip(said, noises, strict=True)], 1)  # [B, K]
    ridge = RIDGE * (jnp.clip(variance / error, 0, LARGEST_VARIANCE) + 0.01)
    E = own.products[None] + ridge[:, :usual, None] * np.eye(usual, dtype=ridge.dtype)[None]
    near = simplex(E, jnp.zeros_like(ridge[:, :usual]))
    near = jnp.pad(near, ((0, 0), (0, len(said) - usual)))
    if len(said) == usual:
        return near.T, near.T
    pulled = own.far[None] + FAR_RIDGE * np.eye(len(said), dtype=ridge.dtype)[None]
    outside = simplex(jnp.broadcast_to(pulled, (len(near), *own.far.shape)), FAR_RIDGE * near)
    return ((1 - far)[:, None] * near + far[:, None] * outside).T, near.T


def _bounded(own: StackingState, mean: Array, near: Array, usual: int, error: Scalar) -> Array:
    """Return what experts say `[K, B]`; those for far rows leave the others no farther than evidence reaches."""
    centre, bound = (near * mean).sum(0)[None], LEAP * own.reach + FIRST_LEAP * jnp.sqrt(error)
    outside = centre + jnp.clip(mean[usual:] - centre, -bound, bound)
    return jnp.concatenate([mean[:usual], outside])


def _learn_weights(
    stack: Stack, own: StackingState, forecast: Forecast, y: Array, residual: Array, weight: Array, error: Scalar
) -> StackingState:
    """Return what is known of the experts after some rows."""
    rows, size = weight.sum(), jnp.sqrt(error)
    share = rows / USUAL_ROWS
    mean = forecast.mean
    e = jnp.clip((mean - y[None]) / size, -LARGEST, LARGEST)
    near, far = e[: stack.usual], forecast.far * weight
    products = MEMORY**share * own.products + (near * (weight - far)[None]) @ near.T
    outside = FAR_MEMORY**share * own.far + (e * far[None]) @ e.T
    one, reach = jnp.ones_like(y), LARGEST**2 * error
    keep = jnp.minimum(CORRECTION_MEMORY, 1 - 1 / (2 + EARLY_MEMORY * own.rounds)) ** share
    known = forecast.terms * (weight / error)[:, None]
    squares, moments = keep * own.squares + known.T @ forecast.terms, keep * own.moments + known.T @ residual
    new = own._replace(
        products=products,
        far=outside,
        squares=squares,
        moments=moments,
        beta=_corrections(stack, forecast, squares + CORRECTION_RIDGE * jnp.eye(len(moments), dtype=y.dtype), moments),
        typical=_typical(own, residual, weight, share),
        reach=_reach(stack, own, forecast, y, weight, error),
        rounds=own.rounds + share,
        outside=FAR_MEMORY**share * own.outside + jnp.stack([jnp.minimum((y - forecast.base) ** 2, reach), one]) @ far,
    )
    good = (rows > 0) & jnp.isfinite(sum(leaf.sum() for leaf in new))
    return StackingState(*(jnp.where(good, a, b) for a, b in zip(new, own, strict=True)))


def _corrections(stack: Stack, forecast: Forecast, A: Array, b: Array) -> Array:
    """Return the weights of the corrections; of an expert's many, only of the few that have clearly helped."""
    if not len(b):
        return b
    bounds = np.cumsum([0, *(_members(forecast.beliefs[i]) for i in stack.correcting)])
    slices = [np.arange(start, end) for start, end in itertools.pairwise(bounds)]
    gain = jnp.maximum(b, 0) ** 2 / diagonal(A)
    chosen, helps = [], []
    for here in slices:
        if len(here) <= SEVERAL:
            chosen.append(jnp.asarray(here))
            helps.append(jnp.ones(len(here), bool))
        else:
            most, which = jax.lax.top_k(gain[here[0] : here[-1] + 1], min(MOST, len(here)))
            chosen.append(which + here[0])
            helps.append(most > CLEAR + 2 * math.log(len(here)))
    place = jnp.concatenate(chosen)
    pick = (place[:, None] == np.arange(len(b))[None]).astype(b.dtype)  # products with it, unlike lookups, are cheap
    beta = nonnegative(pick @ A @ pick.T, jnp.where(jnp.concatenate(helps), pick @ b, -1e30))
    parts = jnp.split(beta, np.cumsum([len(one) for one in chosen])[:-1].tolist())
    bound = [LARGEST_SHARE if len(here) <= SEVERAL else LARGEST_SEVERAL for here in slices]
    bounded = [p * jnp.minimum(1, m / jnp.maximum(p.sum(), 1e-30)) for p, m in zip(parts, bound, strict=True)]
    return jnp.concatenate(bounded) @ pick


def _reach(stack: Stack, own: StackingState, forecast: Forecast, y: Array, weight: Array, size: Scalar) -> Scalar:
    """Return how far from the others experts for far rows have been right: twice as near to y as their distance."""
    said = jnp.stack([forecast.beliefs[i].mean for i in stack.predicting])[stack.usual :]
    apart, error = jnp.abs(said - (forecast.near * forecast.mean).sum(0)[None]), jnp.abs(said - y[None])
    told = (weight * forecast.far > 0)[None]
    most = LEAP * (LEAP * own.reach + FIRST_LEAP * jnp.sqrt(size))  # one row alone may be chance
    right = jnp.minimum(jnp.where(told & (error < apart / 2), apart, 0).max(initial=0), most)
    wrong = jnp.where(told & (error > apart), apart, 0).max(initial=0)
    return jnp.where(wrong > own.reach, own.reach / 2, jnp.maximum(own.reach, right))


def _typical(own: StackingState, residual: Array, weight: Array, share: Scalar) -> Scalar:
    """Return the running median of absolute residuals."""
    total, size = jnp.maximum(weight.sum(), 1e-30), jnp.abs(residual)
    above = (jnp.sign(size - own.typical) * weight).sum() / total
    usual = jnp.minimum(1, share / jnp.minimum(1 + own.rounds, SIZE_ROUNDS))
    gain = jnp.where(own.rounds < ONE_ROUND, share / (own.rounds + share + 1e-30), usual)
    return jnp.where(own.rounds > 0, own.typical * jnp.exp(gain * above), (size * weight).sum() / total)
