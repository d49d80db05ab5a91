"""opvi's recommended samplers with default settings."""

from typing import Any

import opvi
from arena.engines import Model, Table
from arena.methods import Task
from arena.posteriors import Problem


def regression(task: Task, seed: int, **options: Any) -> Table:
    """Return the regressor."""
    return Table(opvi.regressor(task.columns, **options), task, seed)


def classes(task: Task, seed: int, **options: Any) -> Table:
    """Return the classifier."""
    return Table(opvi.classifier(task.columns, task.classes, **options), task, seed)


def posterior(problem: Problem, seed: int) -> Model:
    """Return the tracker of a model."""
    return Model(opvi.tracker(problem.target), problem, seed)
