r"""The true cost of every round: what its batch was drawn from, and the point that minimises it."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opvi.flows.schedules import vanishing
from opvi.running._rows import row_count, without_bad_rows
from opvi.targets import Target
from opvi.types import Array, ArrayLike, Data, Schedule, Tree

PerRound = ArrayLike | Callable[[int], ArrayLike]  # a value, or a function of the round t = 1, 2, …


class Cost(NamedTuple):
    r"""The cost $f_t = c_t + \eta_t c_0$ of every round, with $c_t$ linear in coefficients that add up over rounds.

    Made by `quadratic` or `pool`. Everything is float64 on the host, and batched over k rounds.
    """

    statistics: Callable[[np.ndarray], Tree]  # rounds [k] -> leaves [k, ...]
    evaluate: Callable[[Tree, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
    # statistics, η [k], w [k, n, d] -> f [k, n] and the gradient of c alone, [k, n, d]
    minimise: Callable[[Tree, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
    # statistics, η [k], a start [d] -> w* [k, d] and the norm of the gradient of f there, [k]
    curvature: Callable[[Tree, np.ndarray, np.ndarray], np.ndarray]
    # statistics, η [k], w [k, d] -> the largest eigenvalue of the Hessian of f there, [k]
    dim: int
    closed_form: bool


class Quadratic(NamedTuple):
    """$\\tfrac12 w^\\top H w - h^\\top w + k$, for one function or batched over rounds."""

    H: np.ndarray
    h: np.ndarray
    k: np.ndarray


def quadratic_part(function: Callable[[Array], Array], d: int) -> Quadratic | None:
    """Return the coefficients of a function that is quadratic in d parameters; None for one that is not."""
    # Anything else betrays itself where its slope is not the one predicted from 0.
    away = np.random.default_rng(0).normal(size=d)

    @jax.jit
    def expand(zero: Array, away: Array) -> tuple[Array, ...]:
        slope = jax.grad(function)
        return function(zero), slope(zero), jax.hessian(function)(zero), slope(away)

    with jax.enable_x64(True):
        value, gradient, hessian, found = (np.asarray(part) for part in expand(jnp.zeros(d), jnp.asarray(away)))
    expected = gradient + hessian @ away
    scale = np.abs(expected).max() + np.abs(gradient).max() + 1e-12
    if not np.abs(found - expected).max() < 1e-5 * scale:  # constants of the target may be float32
        return None
    return Quadratic(hessian, -gradient, value)


def quadratic(target: Target, hessian: PerRound, centre: PerRound, floor: PerRound = 0.0) -> Cost:
    r"""Return the cost $c_t(w) = \tfrac12 (w - \theta_t)^\top H_t (w - \theta_t) + k_t$: closed-form comparators.

    A linear-Gaussian model whose rows have $E[xx^\top] = S$ and noise $\sigma^2$ has $H = S/\sigma^2$.

    Args:
        target: provides the prior, which must be Gaussian.
        hessian: $H_t$, a matrix or a function of the round t = 1, 2, …
        centre: $\theta_t$, a vector or a function of t.
        floor: $k_t$, a number or a function of t.
    """
    prior = quadratic_part(lambda v: -target.log_prior(target.unravel(v)), target.dim)
    if prior is None:
        raise ValueError(
            "the target's `log_prior` is not quadratic, so no comparator has a closed form. Give the rows themselves: "
            "`opvi.regret.pool(target, data)`."
        )
    d = target.dim
    named = (("hessian", hessian, (d, d)), ("centre", centre, (d,)), ("floor", floor, ()))
    parts = [_of_round(*part) for part in named]
    still = not any(callable(given) for given in (hessian, centre, floor))
    curvatures = np.linalg.eigvalsh(parts[0](1))
    if curvatures[0] < -1e-9 * abs(curvatures[-1]):
        raise ValueError(
            f"`hessian` has the eigenvalue {curvatures[0]:g} in round 1, but a cost with a minimiser has none below 0."
        )

    def statistics(rounds: np.ndarray) -> Quadratic:
        k = len(rounds)
        H, theta, floors = (np.stack([part(t) for t in (rounds[:1] if still else rounds)]) for part in parts)
        h = np.einsum("kij,kj->ki", H, theta)
        some = Quadratic(H, h, (theta * h).sum(1) / 2 + floors)
        return Quadratic(*(np.broadcast_to(leaf, (k, *leaf.shape[1:])) for leaf in some))

    return _of_quadratics(statistics, prior)


def _of_round(name: str, given: PerRound, shape: tuple[int, ...]) -> Callable[[int], np.ndarray]:
    """Return a value or a function of t as a function of t, checked."""

    def at(t: int) -> np.ndarray:
        value = np.asarray(given(int(t)) if callable(given) else given, float)
        if value.shape != shape or not np.isfinite(value).all():
            raise ValueError(
                f"`{name}` is of shape {value.shape} in round {t}{'' if value.shape == shape else f', not {shape}'}; "
                f"it must hold finite numbers in the shape {shape} of the target's parameters."
            )
        return value

    at(1)
    return at


def _of_quadratics(statistics: Callable[[np.ndarray], Quadratic], prior: Quadratic) -> Cost:
    def whole(s: Quadratic, eta: np.ndarray) -> Quadratic:
        return Quadratic(
            s.H + eta[:, None, None] * prior.H, s.h + eta[:, None] * prior.h[None], s.k + eta * float(prior.k)
        )

    def evaluate(s: Quadratic, eta: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        f = whole(s, eta)
        value = (w * (w @ f.H / 2 - f.h[:, None])).sum(2) + f.k[:, None]
        return value, w @ s.H - s.h[:, None]

    def minimise(s: Quadratic, eta: np.ndarray, start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        f = whole(s, eta)
        try:
            best = np.linalg.solve(f.H, f.h[..., None])
        except np.linalg.LinAlgError:
            raise ValueError(
                "the cost of a round has no single minimiser: its Hessian is singular, and the prior has no weight. "
                "Give more rows, or a prior weight above 0."
            ) from None
        return best[..., 0], np.linalg.norm((f.H @ best)[..., 0] - f.h, axis=1)

    def curvature(s: Quadratic, eta: np.ndarray, w: np.ndarray) -> np.ndarray:
        return np.linalg.eigvalsh(whole(s, eta).H)[:, -1]

    return Cost(statistics, evaluate, minimise, curvature, len(prior.h), closed_form=True)


def pool(
    target: Target, data: Data, weights: Callable[[int], ArrayLike] | None = None, *, tolerance: float = 1e-7
) -> Cost:
    r"""Return the cost $c_t(w) = -\sum_i a_i(t) \log p(r_i \mid w)$ of the rows that batches were drawn from.

    Where nothing moves and the model is linear-Gaussian, comparators have a closed form. Otherwise scipy's
    trust-region Newton method finds them, starting from the previous round's, and reports the gradient norm it reached.

    Args:
        target: provides each row's log likelihood, and the prior.
        data: the rows $r_i$, as a stream takes them.
        weights: $a(t)$ as a function of the round, N non-negative numbers that sum to 1, e.g. of a window that slides
            over the rows; None weights all rows equally in every round.
        tolerance: norm of the gradient of $f_t$ at which the solver stops.
    """
    if not tolerance > 0:
        raise ValueError(f"`tolerance` is {tolerance!r}, but must be greater than 0.")
    data, _ = without_bad_rows(jax.tree.map(np.asarray, data), "raise")
    rows = row_count(data)
    if rows == 0:
        raise ValueError("the pool has 0 rows, but needs at least 1 to draw batches from.")
    with jax.enable_x64(True):
        data = jax.tree.map(lambda a: jnp.asarray(a, float if a.dtype.kind == "f" else None), data)

    def of_rows(a: Array, w: Array) -> Array:
        return -(a * target.log_likelihood(target.unravel(w), data)).sum()

    def prior(w: Array) -> Array:
        return -target.log_prior(target.unravel(w))

    if weights is None:
        parts = [quadratic_part(f, target.dim) for f in (lambda w: of_rows(jnp.full(rows, 1 / rows), w), prior)]
        if parts[0] is not None and parts[1] is not None:
            alike = parts[0]
            return _of_quadratics(lambda t: Quadratic(*(np.stack([leaf] * len(t)) for leaf in alike)), parts[1])

    def whole(a: Array, eta: Array, w: Array) -> Array:
        return of_rows(a, w) + eta * prior(w)

    return _by_solver(lambda rounds: _weights(weights, rows, rounds), of_rows, whole, target.dim, tolerance)


def _weights(weights: Callable[[int], ArrayLike] | None, rows: int, rounds: np.ndarray) -> np.ndarray:
    if weights is None:
        return np.full(len(rounds), 1 / rows)  # one number for all rows alike, however many there are
    a = np.stack([np.asarray(weights(int(t)), float) for t in rounds])
    if a.shape[1:] != (rows,) or not (a >= 0).all() or not np.allclose(a.sum(1), 1, atol=1e-6):
        raise ValueError(
            f"`weights` gave shape {a.shape[1:]} and a sum of {float(a.sum(1)[0]):.6g} in round {rounds[0]}, but must "
            f"give {rows} numbers of at least 0 that sum to 1, one per row of the pool. Divide them by their sum."
        )
    return a


def _by_solver(
    statistics: Callable[[np.ndarray], np.ndarray],
    of_rows: Callable[[Array, Array], Array],
    whole: Callable[[Array, Array, Array], Array],
    dim: int,
    tolerance: float,
) -> Cost:
    """Solve round by round: a warm start is worth more than a batch of rounds."""
    from scipy.optimize import minimize  # not loaded with opvi: few need it

    at = jax.jit(
        lambda a, eta, w: (jax.vmap(lambda v: whole(a, eta, v))(w), jax.vmap(lambda v: jax.grad(of_rows, 1)(a, v))(w))
    )
    slope = jax.jit(jax.value_and_grad(whole, 2))
    bend = jax.jit(jax.hessian(whole, 2))

    def solve(a: Array, eta: Array, start: np.ndarray) -> tuple[np.ndarray, float]:
        def value_and_gradient(w: np.ndarray) -> tuple[float, np.ndarray]:
            value, gradient = slope(a, eta, w)
            return float(value), np.asarray(gradient)

        gradient = value_and_gradient(start)[1]
        if np.linalg.norm(gradient) <= tolerance:
            return start, float(np.linalg.norm(gradient))
        found = minimize(
            value_and_gradient,
            start,
            jac=True,
            hess=lambda w: np.asarray(bend(a, eta, w)),
            method="trust-exact",
            options={"gtol": tolerance},
        )
        return found.x, float(np.linalg.norm(found.jac))

    def evaluate(a: np.ndarray, eta: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        with jax.enable_x64(True):
            found = [at(*map(jnp.asarray, of_round)) for of_round in zip(a, eta, w, strict=True)]
        return np.stack([np.asarray(f) for f, _ in found]), np.stack([np.asarray(g) for _, g in found])

    def minimise(a: np.ndarray, eta: np.ndarray, start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        best, left = [], []
        with jax.enable_x64(True):
            w = start
            for weights, prior_weight in zip(a, eta, strict=True):
                w, norm = solve(jnp.asarray(weights), jnp.asarray(prior_weight), w)
                best.append(w)
                left.append(norm)
        return np.stack(best), np.asarray(left)

    def curvature(a: np.ndarray, eta: np.ndarray, w: np.ndarray) -> np.ndarray:
        with jax.enable_x64(True):
            return np.array([np.linalg.eigvalsh(bend(*of_round))[-1] for of_round in zip(a, eta, w, strict=True)])

    return Cost(statistics, evaluate, minimise, curvature, dim, closed_form=False)


def prior_weights(prior_weight: Schedule, rounds: np.ndarray) -> np.ndarray:
    """Return $\\eta_t$ of these rounds."""
    t = rounds.astype(float)
    value: ArrayLike = prior_weight(t) if callable(prior_weight) else prior_weight  # type: ignore[arg-type]
    return np.broadcast_to(np.asarray(value, float), t.shape)


def smoothness(
    cost: Cost, rounds: ArrayLike, points: ArrayLike | None = None, prior_weight: Schedule = vanishing
) -> float:
    r"""Return an estimate of L, the largest eigenvalue of the Hessian of $c_t + \eta_t c_0$ over rounds and points.

    Exact for quadratic costs. Otherwise it is a lower bound of L unless the points include the place of largest
    curvature; for logistic regression that is 0, the default.

    Args:
        cost: the cost of the rounds.
        rounds: the rounds considered, e.g. `history.round[::100]`. The prior has the most weight in round 1.
        points: `[m, d]`; the origin if omitted.
        prior_weight: $\eta_t$; the paper's $6/(\pi^2 t^2)$ if omitted.
    """
    t = np.atleast_1d(np.asarray(rounds, int))
    if not len(t) or t.min() < 1:
        raise ValueError(f"`rounds` is {rounds!r}, but rounds count from 1; give at least one.")
    statistics, eta = cost.statistics(t), prior_weights(prior_weight, t)
    at = np.zeros((1, cost.dim)) if points is None else np.atleast_2d(np.asarray(points, float))
    return max(float(cost.curvature(statistics, eta, np.broadcast_to(w, (len(t), cost.dim))).max()) for w in at)
