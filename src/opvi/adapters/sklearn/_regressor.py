"""The recommended regressor as a scikit-learn estimator."""

from collections.abc import Sequence
from typing import Self

import jax
import numpy as np
from sklearn.base import RegressorMixin
from sklearn.utils import assert_all_finite
from sklearn.utils.validation import check_consistent_length, column_or_1d

from opvi.adapters.sklearn._base import QUICK_ROWS, OnlineEstimator, whole
from opvi.predictive import Predictive, Uncertainty
from opvi.running._learners import one_learner
from opvi.tracking import regressor
from opvi.tracking.experts._usual import EARLY_ROWS
from opvi.types import Array, ArrayLike, Sampler, Seed


def _summary(predictive: Predictive) -> tuple[Array, Array, Array]:
    return predictive.mean(), *predictive.uncertainty()


def _quantiles(predictive: Predictive, levels: tuple[float, ...]) -> Array:
    return predictive.quantile(levels).T


def _draws(predictive: Predictive, row: Array, count: int, seed: int) -> Array:
    key = jax.random.fold_in(jax.random.key(seed), row[0])  # the rows asked about at once have draws of their own
    return predictive.sample(key, count).T


class OPVIRegressor(RegressorMixin, OnlineEstimator):
    """Online Bayesian regression: `opvi.regressor` as a scikit-learn estimator.

    It learns from each row once, in batches of 20, whatever the size of a call; X and y may have any units. Predictions
    are distributions, calibrated by predicting each batch before learning from it.

    Args:
        hidden: width of each hidden layer; `()` for a linear model. Chosen from the number of columns if None.
        n_particles: the number of networks; chosen from the number of columns if None.
        half_life: in rows; data older than that count half. None determines how fast to forget.
        memory_rows: keep a uniform sample of this many rows, and learn from some of them again with every batch.
        neighbour_rows: rows kept beside the networks; the nearest take part in predictions. As many as fit in 16 MB
            if None, none for linear models; 0 for none.
        warm_up: this many rows at the start are learnt five at a time: slower, and better while little is known.
        n_epochs: passes of `fit`. Passes after the first teach the parameters, not the calibration.
        shuffle: whether `fit` visits the rows in random order; use False for rows sorted by time.
        random_state: a seed, or anything scikit-learn accepts as one.
        encode: whether a data frame with strings, categories, dates or gaps becomes numbers as in `opvi learn`; arrays
            and frames of numbers stay as they are.
    """

    def __init__(
        self,
        hidden: Sequence[int] | None = None,
        n_particles: int | None = None,
        half_life: float | None = None,
        memory_rows: int = 0,
        neighbour_rows: int | None = None,
        warm_up: int = EARLY_ROWS,
        n_epochs: int = 1,
        shuffle: bool = True,
        random_state: Seed = None,
        encode: bool = True,
    ):
        self.hidden = hidden
        self.n_particles = n_particles
        self.half_life = half_life
        self.memory_rows = memory_rows
        self.neighbour_rows = neighbour_rows
        self.warm_up = warm_up
        self.n_epochs = n_epochs
        self.shuffle = shuffle
        self.random_state = random_state
        self.encode = encode

    def _made(self, *sizes: int) -> Sampler:
        return regressor(*sizes, **self._settings(), warm_up=whole("warm_up", self.warm_up, 0))

    @one_learner
    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike = None) -> Self:
        """Forget everything, and learn from these rows in `n_epochs` passes."""
        X, y = self._checked_pair(X, y, reset=True, numeric=True, shuffled=self.shuffle)
        self._begin(X.shape[1])
        return self._learn(X, y, sample_weight, passes=self.n_epochs, fitting=True)

    @one_learner
    def partial_fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike = None) -> Self:
        """Learn from these rows, in order, on top of what was learnt before."""
        first = not hasattr(self, "_engine")
        X, y = self._checked_pair(X, y, reset=first, numeric=True)
        if first:
            self._begin(X.shape[1], quick=QUICK_ROWS)
        return self._learn(X, y, sample_weight)

    def predict(self, X: ArrayLike, return_std: bool = False) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        """The predictive mean of each row; with `return_std` its standard deviation too: parameters and noise."""
        if not return_std:
            return self._located(self._predicted(Predictive.mean, X))
        mean, epistemic, aleatoric = self._predicted(_summary, X)
        return self._located(mean), np.sqrt(epistemic + aleatoric)

    def decompose(self, X: ArrayLike) -> Uncertainty:
        """Split the predictive variance into what more data would remove and the rest."""
        return Uncertainty(*self._predicted(_summary, X)[1:])

    def predict_quantiles(self, X: ArrayLike, quantiles: Sequence[float] = (0.05, 0.5, 0.95)) -> np.ndarray:
        """Quantiles of each row's predictive, `[rows, quantiles]`."""
        levels = tuple(float(q) for q in np.atleast_1d(np.asarray(quantiles, float)))
        if not levels or not all(0 < q < 1 for q in levels):
            raise ValueError(f"`quantiles` is {quantiles!r}, but levels must lie strictly between 0 and 1.")
        return self._located(self._predicted(_quantiles, X, levels))

    def predict_interval(self, X: ArrayLike, coverage: float = 0.9) -> tuple[np.ndarray, np.ndarray]:
        """Return the ends of each row's central interval, which contains y with probability `coverage`."""
        if not 0 < coverage < 1:
            raise ValueError(f"`coverage` is {coverage}, but must lie strictly between 0 and 1.")
        low, high = self.predict_quantiles(X, ((1 - coverage) / 2, (1 + coverage) / 2)).T
        return low, high

    def log_predictive_density(self, X: ArrayLike, y: ArrayLike) -> np.ndarray:
        """The log predictive density of each row's y, tails included."""
        X = self._checked(X)
        y = column_or_1d(y, dtype=np.float64) - self._target_origin
        check_consistent_length(X, y)
        assert_all_finite(y, input_name="y")
        return self._asked(Predictive.log_density, X, others=(y,))

    def sample_y(self, X: ArrayLike, n_samples: int = 1, random_state: int = 0) -> np.ndarray:
        """Draws of y at each row, `[rows, n_samples]`."""
        X = self._checked(X)
        count = whole("n_samples", n_samples, 1)
        return self._located(self._asked(_draws, X, count, int(random_state), others=(np.arange(X.shape[0]),)))
