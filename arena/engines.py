"""opvi's samplers as players: rows go through the engine behind all of opvi's interfaces."""

from typing import Any

import jax
import numpy as np

from arena.forecasts import Numbers
from arena.methods import Task
from arena.posteriors import Problem
from opvi.predictive import Normal, Predictive
from opvi.running import Engine


def _components(predictive: Predictive) -> Any:
    said = predictive.components
    return (said.mean.T, said.variance.T) if isinstance(said, Normal) else (said.mean.T, said.variance.T, said.dof.T)


class Table:
    """A sampler of numbers or classes."""

    def __init__(self, sampler: Any, task: Task, seed: int) -> None:
        self.engine, self.classes = Engine(sampler, seed, batch=task.batch), task.classes

    def predict(self, X: np.ndarray) -> Any:
        """Return the sampler's prediction."""
        if self.classes:
            return np.asarray(self.engine.ask(X, Predictive.probabilities), float)
        return Numbers(*(np.asarray(part, float) for part in self.engine.ask(X, _components)))

    def learn(self, X: np.ndarray, y: np.ndarray) -> None:
        """Learn a batch, which may be incomplete."""
        self.engine.feed((X, y.astype(np.int32) if self.classes else y), last=True)

    def state(self) -> Any:
        """Return the sampler's state on the host."""
        return jax.tree.map(np.asarray, self.engine.state)


class Model:
    """A sampler of a posterior."""

    def __init__(self, sampler: Any, problem: Problem, seed: int) -> None:
        self.engine, self.seed = Engine(sampler, seed, batch=problem.batch), seed

    def learn(self, rows: Any) -> None:
        """Learn a batch."""
        self.engine.feed(rows, last=True)

    def draws(self, n: int) -> np.ndarray:
        """Return draws of the parameters `[n, d]`."""
        return np.asarray(self.engine.sampler.draws(self.engine.state, jax.random.key(self.seed), n), float)

    def state(self) -> Any:
        """Return the sampler's state on the host."""
        return jax.tree.map(np.asarray, self.engine.state)
