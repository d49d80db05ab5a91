"""What the filters share: scaling, noise, and draws from a normal posterior."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from arena import kalman
from arena.methods import Task
from arena.posteriors import NOISE, PRIOR, Problem
from arena.scaling import Units


class Linearised:
    """A filter of a network: it learns rows in standard units, and predicts outputs with variances."""

    def __init__(
        self,
        learn: Callable[..., Any],
        say: Callable[..., Any],
        start: Callable[..., Any],
        hidden: int,
        task: Task,
        seed: int,
    ) -> None:
        self.classes, self._learn, self._say = task.classes, learn, say
        self.f, self.h = kalman.network(task.columns, hidden, task.classes)
        prior = kalman.layout(task.columns, hidden, max(task.classes, 1))
        w = np.random.default_rng(seed).normal(size=len(prior)) * np.sqrt(prior)
        w[-max(task.classes, 1) :] = 0
        self.values, self.units = start(w, prior), Units(task.columns, task.classes)

    def predict(self, X: np.ndarray) -> Any:
        """Return probabilities, or normal distributions in y's own unit."""
        outputs, variance = self._say(self.f, self.values, self.units.inputs(X))
        if self.classes:
            return np.asarray(_probabilities(outputs, variance), float)
        return self.units.back(outputs, variance + self.values.noise)

    def learn(self, X: np.ndarray, y: np.ndarray) -> None:
        """Learn rows one after the other."""
        self.values = self._learn(self.h, bool(self.classes), kalman.MEMORY, self.values, *self.units.learn(X, y))

    def state(self) -> Any:
        """Return what is kept between rows."""
        return jax.tree.map(np.asarray, self.values), self.units


_probabilities = jax.jit(jax.vmap(kalman.probabilities))


class Weights:
    """A filter of a linear or logistic model's weights, whose noise is known."""

    def __init__(
        self,
        learn: Callable[..., Any],
        start: Callable[..., Any],
        spread: Callable[..., Any],
        problem: Problem,
        seed: int,
    ) -> None:
        d = problem.target.dim
        self.values = start(np.zeros(d), np.full(d, PRIOR))._replace(noise=jnp.float32(NOISE))
        self._learn, self.spread, self.labels = learn, spread, problem.link == "logistic"
        self.h, self.rng = kalman.LINKS[problem.link], np.random.default_rng(seed)

    def learn(self, rows: Any) -> None:
        """Learn rows one after the other, without forgetting."""
        self.values = self._learn(self.h, self.labels, 1.0, self.values, rows[0], rows[1][:, None])

    def draws(self, n: int) -> np.ndarray:
        """Return draws of the weights."""
        covariance = self.spread(self.values)
        return self.rng.multivariate_normal(np.asarray(self.values[0], float), (covariance + covariance.T) / 2, n)

    def state(self) -> Any:
        """Return what is kept between rows."""
        return jax.tree.map(np.asarray, self.values)
