"""The streams and the samplers that `benchmarks.choose` measures."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import opvi
from opvi.types import Sampler
from paper import data

SEEDS, TUNING = (0, 1, 2), 3  # the streams that are reported, and the one on which steps are chosen
FEW, MANY = 100, 20  # particles of small models and of networks
STEPS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)  # candidates, of Adam
PLAIN_STEPS = (1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3)  # where momentum or noise is the sampler's own affair
HALF_LIFE = 600.0  # rows, on the stream that drifts: the classifier's own short memory; not tuned
TUNED_ON = 10_000  # first rows of elec2
SCALED_BY = 500  # first rows, which give a scale to samplers that need one


class Rows(NamedTuple):
    """The data of one seed: rows to learn in order, and rows to test on unless batches are scored as they arrive."""

    X: np.ndarray
    y: np.ndarray
    X_test: np.ndarray | None = None
    y_test: np.ndarray | None = None
    unit: Any = 1.0  # of y, in the data's own units
    known: Any = None  # not None where the exact posterior is known


class Choice(NamedTuple):
    """A row of a table: how its sampler is made from a step, and the candidate steps."""

    make: Callable[[float], Any]
    target: opvi.Target | None = None  # whose parameters the particles are
    steps: tuple[float, ...] = ()  # none: there is nothing to tune


@dataclass(frozen=True)
class Plain:
    """A sampler with this many particles, which alone predict."""

    inner: Sampler
    target: opvi.Target
    particles: int
    from_prior: bool = False  # of variance 1; a model's own start is narrower

    def init(self, key: Any) -> Any:
        drawn = jax.random.normal(key, (self.particles, self.target.dim)) if self.from_prior else self.particles
        return self.inner.init(key, drawn)

    def step(self, key: Any, state: Any, batch: opvi.Batch) -> Any:
        return self.inner.step(key, state, batch)

    def predict(self, state: Any, x: Any) -> opvi.Predictive:
        return opvi.predict(self.target, state.particles, x)


class Wrap(NamedTuple):
    """How samplers of a target predict."""

    target: opvi.Target
    calibrated: bool = False

    def __call__(self, sampler: Sampler, particles: int) -> Any:
        if self.calibrated:
            return opvi.calibrated(sampler, self.target, particles=particles)
        return Plain(sampler, self.target, particles)

    def settled(self, sampler: Sampler, particles: int) -> Choice:
        """A sampler without a step."""
        return Choice(lambda _: self(sampler, particles), self.target)


# --- streams ----------------------------------------------------------------------------------


def linear_rows(seed: int, size: int = 3000) -> Rows:
    """Eight correlated features, nine parameters, noise 1: the posterior of every round is known."""
    rng = np.random.default_rng(1000 + seed)
    root = np.linalg.cholesky(0.7 ** np.abs(np.subtract.outer(np.arange(8), np.arange(8))))
    w = rng.standard_normal(9)
    X = (rng.standard_normal((size + 2000, 8)) @ root.T).astype(np.float32)
    y = (X @ w[:8] + w[8] + rng.standard_normal(len(X))).astype(np.float32)
    return Rows(X[:size], y[:size], X[size:], y[size:], known=1)


def kin8nm_rows(seed: int, size: int | None = None) -> Rows:
    """Return training rows of the standard splits 5 to 8, a tenth held out; no test row of other results is used."""
    X, y, _, _ = data.uci_split("kin8nm", 5 + seed)
    order = np.random.default_rng(seed).permutation(len(y))
    held, rest = order[: len(y) // 10], order[len(y) // 10 :][:size]
    return _scaled(X[rest], y[rest], X[held], y[held])


def arm_rows(seed: int, size: int = 200) -> Rows:
    """A stand-in for kin8nm."""
    arm = data.robot_arm(2 * size, seed=seed)
    return _scaled(arm.X[:size], arm.y[:size], arm.X[size:], arm.y[size:])


def _scaled(X: np.ndarray, y: np.ndarray, X_test: np.ndarray, y_test: np.ndarray) -> Rows:
    """Scale by the first rows alone, as is possible with a stream."""
    table, other = np.column_stack([X, y]), np.column_stack([X_test, y_test])
    mean, sd = table[:SCALED_BY].mean(0), table[:SCALED_BY].std(0)
    table, other = ((t - mean) / sd for t in (table, other))
    table, other = table.astype(np.float32), other.astype(np.float32)
    return Rows(table[:, :-1], table[:, -1], other[:, :-1], other[:, -1], float(sd[-1]))


def elec2_rows(seed: int, size: int = TUNED_ON, shuffled: bool = False) -> Rows:
    """Rows 10,001 to 20,000 in order (seeds differ in the start alone), or those before them, to choose steps on.

    They are scaled by the rows before them and clipped, because features that hardly moved there do later.
    """
    X, y = data.elec2()
    mean, sd = X[:TUNED_ON].mean(0), X[:TUNED_ON].std(0)
    part = np.arange(size) + (0 if seed == TUNING else TUNED_ON)
    if shuffled:
        part = np.random.default_rng(seed).permutation(part)
    scaled = (X[part] - mean) / np.where(sd > 1e-6, sd, 1)
    return Rows(np.clip(scaled, -2.5, 2.5).astype(np.float32), y[part])


def switching_rows(seed: int, size: int = 1100, shuffled: bool = False) -> Rows:
    """A stand-in for elec2."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((size, 8)).astype(np.float32)
    turn = 1.0 if shuffled else np.sign(np.sin(np.arange(size) / 200))
    return Rows(X, (X[:, 0] + turn * X[:, 1] > 0).astype(np.int32))


def moving_rows(seed: int, size: int = 10_000, turn: float = 0.0) -> Rows:
    """Return a curve of four inputs that turns by this many degrees from the first row to the last; noise 0.1."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((size, 4)).astype(np.float32)
    angle = np.radians(turn) * np.arange(size) / size
    along = np.cos(angle) * X[:, 0] + np.sin(angle) * X[:, 1]
    y = np.sin(1.5 * along) + 0.3 * X[:, 2] * X[:, 3] + 0.1 * rng.standard_normal(size)
    return Rows(X, y.astype(np.float32))


# --- samplers ---------------------------------------------------------------------------------


def first_order_samplers(wrap: Wrap, particles: int, drifts: bool, example: Any) -> dict[str, Choice]:
    """Return all samplers with a step size. On a still stream the likelihood is scaled to all rows and steps shrink."""
    target, scale = wrap.target, opvi.schedules.batch_sum if drifts else opvi.schedules.seen

    def adam(step: Any) -> optax.GradientTransformation:
        power = 0.0 if drifts else 0.5
        return optax.adam(lambda count: step * (jnp.asarray(count, float) + 1) ** -power)

    def plain(step: Any) -> Callable[[Any], Any]:
        return lambda t: step * (1.0 if drifts else 1 / t)

    def stein(step: Any) -> Sampler:
        return opvi.svgd(target, step=adam(step), likelihood_scale=scale)

    def faster(acceleration: Any, step: Any) -> Sampler:
        return opvi.svgd(target, step=plain(step), likelihood_scale=scale, acceleration=acceleration)

    flows: dict[str, Callable[[Any], Sampler]] = {
        "opvi, as in the paper": lambda step: opvi.opvi(target, step=adam(step)),
        "svgd": stein,
        "svgd, WAG": partial(faster, opvi.flows.wag()),
        "svgd, WNes": partial(faster, opvi.flows.wnes()),
        "blob": lambda step: opvi.blob(target, step=adam(step), likelihood_scale=scale),
        "gfsd": lambda step: opvi.gfsd(target, step=adam(step), likelihood_scale=scale),
        "gfsf": lambda step: opvi.gfsf(target, step=adam(step), likelihood_scale=scale),
        "svgd, replay": lambda step: opvi.replay(stein(step), example, memory_rows=1000),
        "langevin": lambda step: opvi.langevin(target, step=plain(step), likelihood_scale=scale),
        "online_map": lambda step: opvi.online_map(target, step=adam(step)),
        "online_map, an ensemble": lambda step: opvi.online_map(target, step=adam(step)),
    }
    found = {}
    for name, make in flows.items():
        count = 1 if name == "online_map" else particles
        steps = PLAIN_STEPS if name in ("svgd, WAG", "svgd, WNes", "langevin") else STEPS
        found[name] = Choice(lambda step, make=make, count=count: wrap(make(step), count), target, steps)
    return found | {"first_order": wrap.settled(opvi.tracking.first_order(target), particles)}


def linear_samplers() -> dict[str, Choice]:
    """Return samplers for nine parameters; predictions are those of the particles, with the true noise."""
    target, example = opvi.linear_regression(8), (np.zeros((1, 8), np.float32), np.zeros(1, np.float32))
    wrap = Wrap(target)
    return {
        **first_order_samplers(wrap, FEW, False, example),
        "gain_one": Choice(lambda _: Plain(opvi.gain_one(target, substeps=1), target, FEW, True), target),
        "ibis": Choice(lambda _: opvi.ibis(target), target),
        "sl_opvi, no rows": wrap.settled(opvi.sl_opvi(target), FEW),
        "gauss_newton": wrap.settled(opvi.gauss_newton(target, forgetting=1.0), MANY),
        "kfac": wrap.settled(opvi.kfac(target), MANY),
        "regressor, linear": Choice(lambda _: opvi.regressor(8, hidden=())),
    }


def network_samplers() -> dict[str, Choice]:
    """Return samplers for a network 8-50-1; every sampler's predictions are calibrated online."""
    gamma = opvi.targets.Gamma(1.0, 0.1)
    target = opvi.mlp(8, (50,), opvi.gaussian(gamma), activation=jnp.tanh, prior_variance=gamma)
    fixed = opvi.mlp(8, (50,), activation=jnp.tanh, prior_variance=None, bias_spread=0.5)
    wrap, example = Wrap(target, calibrated=True), (np.zeros((1, 8), np.float32), np.zeros(1, np.float32))
    return {
        **first_order_samplers(wrap, MANY, False, example),
        "first_order, replay": wrap.settled(
            opvi.replay(opvi.tracking.first_order(target), example, memory_rows=1000), MANY
        ),
        "kfac": Choice(lambda _: opvi.calibrated(opvi.kfac(fixed), fixed, particles=MANY)),
        "gauss_newton, by tracker": Choice(lambda _: opvi.tracker(fixed)),
        "regressor": Choice(lambda _: opvi.regressor(8)),
    }


def market_samplers() -> dict[str, Choice]:
    """Return samplers for a drifting stream of classes: logistic regressions of nine parameters, then networks."""
    target, example = opvi.logistic_regression(8), (np.zeros((1, 8), np.float32), np.zeros(1, np.int32))
    net = opvi.mlp(8, (100,), opvi.categorical(), outputs=2, prior_variance=None, weight_spread=math.sqrt(2))
    wrap = Wrap(target)
    return {
        **first_order_samplers(wrap, FEW, True, example),
        "gain_one": wrap.settled(opvi.gain_one(target, half_life=HALF_LIFE), FEW),
        "sl_opvi, no rows": wrap.settled(opvi.sl_opvi(target, half_life=HALF_LIFE), FEW),
        "gauss_newton": wrap.settled(opvi.gauss_newton(target, half_life=HALF_LIFE), MANY),
        "linear_ekf": Choice(lambda _: opvi.linear_ekf(8, 2)),
        "kfac, a network": Wrap(net, calibrated=True).settled(opvi.kfac(net, half_life=HALF_LIFE), MANY),
        "classifier, linear": Choice(lambda _: opvi.classifier(8, 2, hidden=())),
        "classifier": Choice(lambda _: opvi.classifier(8, 2)),
    }
