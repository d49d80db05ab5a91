"""The paper's OPVI with the settings of its experiments: columns and targets scaled by the rows so far."""

import math
from typing import Any

import numpy as np

import opvi
from arena.engines import Model, Table
from arena.methods import Task
from arena.posteriors import Problem
from arena.scaling import Units
from paper.kin8nm import STEP, normalised
from paper.synthetic import STEPS

PARTICLES, HIDDEN = 20, 50


class _Scaled(Table):
    def __init__(self, target: Any, task: Task, seed: int) -> None:
        super().__init__(_sampler(target, task), task, seed)
        self.units = Units(task.columns, task.classes)

    def predict(self, X: np.ndarray) -> Any:
        said = super().predict(self.units.inputs(X))
        return said if self.classes else self.units.back(said.mean, said.variance)

    def learn(self, X: np.ndarray, y: np.ndarray) -> None:
        x, target = self.units.learn(X, y)
        super().learn(x, y if self.classes else target[:, 0])


def _field() -> Any:
    return opvi.flows.fields.svgd(bandwidth=opvi.flows.kernels.median_awgf())


def _sampler(target: Any, task: Task) -> Any:
    scale = opvi.schedules.dataset(task.rows)
    return opvi.opvi(target, step=normalised(STEP), field=_field(), likelihood_scale=scale)


def regression(task: Task, seed: int) -> _Scaled:
    """Return networks with an inferred noise, as on kin8nm."""
    gamma = opvi.targets.Gamma(1.0, 0.1)
    return _Scaled(opvi.mlp(task.columns, (HIDDEN,), opvi.gaussian(gamma), prior_variance=gamma), task, seed)


def classes(task: Task, seed: int) -> _Scaled:
    """Return networks with a categorical head, as on MNIST."""
    network = opvi.mlp(task.columns, (HIDDEN,), opvi.categorical(), outputs=task.classes, prior_variance=1.0)
    return _Scaled(network, task, seed)


class posterior(Model):  # noqa: N801  # a factory
    """Return OPVI on the mixture, with growing batches as in the paper."""

    def __init__(self, problem: Problem, seed: int) -> None:
        sampler = opvi.opvi(problem.target, step=opvi.schedules.decaying(STEPS["text"]["OPVI"], 0.55), field=_field())
        super().__init__(sampler, problem, seed)
        self.round, self.kept = 1, np.zeros(0, np.float32)

    def learn(self, rows: np.ndarray) -> None:
        self.kept = np.concatenate([self.kept, rows])
        while len(self.kept) >= (size := math.ceil(self.round**0.55)):
            super().learn(self.kept[:size])
            self.kept, self.round = self.kept[size:], self.round + 1
