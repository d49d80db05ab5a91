"""The recommended regressor as a River model."""

import math
from typing import Any

import numpy as np
from river import base

from opvi.adapters.river._distribution import PredictiveDistribution
from opvi.adapters.river._model import Frame, OnlineModel, Row, Series, rows_of, series_like
from opvi.predictive import Predictive, StudentT
from opvi.running._origin import origin_of
from opvi.tracking import regressor
from opvi.tracking._recommended import widened_regressor
from opvi.tracking.experts._usual import BUDGET, EARLY_ROWS
from opvi.types import LARGEST_VALUE, Array, Sampler, State, Tree


def _components(predictive: Predictive) -> tuple[Array, ...]:
    said = predictive.components
    assert isinstance(said, StudentT)
    return said.mean.T, said.variance.T, said.dof.T


class Regressor(OnlineModel, base.MiniBatchRegressor):
    """Online Bayesian regression: `opvi.regressor` as a River model.

    Features and targets may have any units; new features may appear at any time. None, NaN and a key that is missing
    now and then count as the feature's running mean; a key that is often left out counts as 0. Strings become
    indicators; dates become hour, weekday and, after a year of them, season. Learning waits until `buffer` rows are
    there; predictions never see the rows they predict.

    Parameters
    ----------
    hidden
        Width of each hidden layer; `()` for a linear model.
    n_particles
        The number of networks.
    half_life
        In rows; data older than that count half. None determines how fast to forget.
    warm_up
        The number of rows at the start that are learnt five at a time: slower, and better while little is known.
    neighbour_rows
        Rows kept beside the networks; the nearest take part in predictions. None keeps what fits in 16 MB, none for
        linear models; 0 for none.
    buffer
        Rows learnt from at once, from 1 to 32.
    max_features
        The most columns; further features share them by hashing.
    seed
        Seed of the starting networks.

    Examples
    --------
    >>> from river import datasets, evaluate, metrics
    >>> from opvi.adapters.river import Regressor
    >>> model = Regressor(hidden=(), seed=0)
    >>> print(evaluate.progressive_val_score(datasets.TrumpApproval(), model, metrics.MAE()))  # doctest: +SKIP

    """

    def __init__(
        self,
        hidden: tuple[int, ...] = (30,),
        n_particles: int = 6,
        half_life: float | None = None,
        warm_up: int = EARLY_ROWS,
        buffer: int = 20,
        max_features: int = 256,
        seed: int | None = None,
        neighbour_rows: int | None = None,
    ):
        self.neighbour_rows = neighbour_rows
        self.warm_up = warm_up
        self._target_origin = 0.0  # subtracted from y, where it lies far from 0
        self._start((1,), hidden, n_particles, half_life, buffer, max_features, seed)

    def _sampler(self, sizes: tuple[int, ...]) -> Sampler:
        return regressor(
            *sizes,
            hidden=self.hidden,
            particles=self.n_particles,
            half_life=self.half_life,
            warm_up=self.warm_up,
            memory_rows=self.neighbour_rows,
            budget=BUDGET,  # the same for any number of columns: they come one by one
        )

    def _widened(self, state: Tree, fresh: Tree) -> State:
        return widened_regressor(self._sampler(self._sizes), state, fresh)  # type: ignore[arg-type]

    def _targets(self, y: list[Any]) -> np.ndarray:
        values = np.array(y, np.float64)
        if self._engine is None:  # the first rows
            self._target_origin = float(origin_of(values[:, None])[0])
        return values - self._target_origin

    def learn_one(self, x: Row, y: float, w: float = 1.0) -> None:
        """Learn from a row, or keep it until there are `buffer` of them. It counts `w` times."""
        value = float(y)
        if not abs(value) <= LARGEST_VALUE:
            raise ValueError(
                f"`y` is {y}, but must be a finite number of at most {LARGEST_VALUE:g}. Leave the row out."
            )
        self._wait(x, value, w)

    def _guess(self) -> float | None:
        """Return the mean of the waiting targets, before anything is learnt; None if there are none."""
        return math.fsum(y for _, y, _ in self._waiting) / len(self._waiting) if self._waiting else None

    def predict_one(self, x: Row, with_dist: bool = False) -> Any:
        """Return the predictive mean, or the whole predictive distribution; None before the first row."""
        if self._engine is None:
            guess = self._guess()
            if guess is None:
                return None
            spread = np.var([y for _, y, _ in self._waiting]) if len(self._waiting) > 1 else 1.0
            return PredictiveDistribution([guess], [spread or 1.0], [4.0]) if with_dist else guess
        if not with_dist:
            return float(self._asked(Predictive.mean, [x])[0]) + self._target_origin
        mean, variance, dof = (leaf[0] for leaf in self._asked(_components, [x]))
        return PredictiveDistribution(
            mean.astype(float) + self._target_origin, variance, dof, self.n_rows_seen, self.seed
        )

    def predict_many(self, X: Frame) -> Series:
        """Return the predictive means of the rows of a data frame; NaN before the first row."""
        rows = rows_of(X)
        if self._engine is None or not rows:
            guess = self._guess()
            return series_like(X, np.full(len(rows), np.nan if guess is None else guess))
        return series_like(X, self._asked(Predictive.mean, rows).astype(float) + self._target_origin)
