"""A posterior predictive in the style of `river.proba`."""

import math

import numpy as np
from river import proba
from scipy import stats

from opvi.types import ArrayLike


class PredictiveDistribution(proba.base.ContinuousDistribution):
    """A posterior predictive: a mixture of Student-t and normal distributions.

    Parameters
    ----------
    mean
        Mean of each component.
    variance
        Variance of each component.
    dof
        Degrees of freedom of each component; infinite for a normal distribution.
    n_samples
        Number of rows behind the prediction.
    seed
        Seed of `sample`.

    """

    def __init__(
        self, mean: ArrayLike, variance: ArrayLike, dof: ArrayLike, n_samples: int = 0, seed: int | None = None
    ):
        super().__init__(seed)
        self.mean, self.variance, self.dof = (np.asarray(a, float) for a in (mean, variance, dof))
        self._n_samples = n_samples
        tails = np.where(np.isinf(self.dof), 1, (np.minimum(self.dof, 1e9) - 2) / np.minimum(self.dof, 1e9))
        self._parts = stats.t(self.dof, self.mean, np.sqrt(self.variance * tails))

    @property
    def n_samples(self) -> int:
        """The number of rows behind the prediction."""
        return self._n_samples

    @property
    def mu(self) -> float:
        """The mean."""
        return float(self.mean.mean())

    @property
    def sigma(self) -> float:
        """The standard deviation: parameters and noise."""
        return math.sqrt(self.variance.mean() + self.mean.var())

    @property
    def mode(self) -> float:
        """The mean: all components have it, up to rounding, and each has one mode."""
        return self.mu

    def __call__(self, x: float) -> float:
        """The density."""
        return float(self._parts.pdf(x).mean())

    def log_pdf(self, x: float) -> float:
        """The log density, tails included."""
        return float(np.logaddexp.reduce(self._parts.logpdf(x)) - math.log(len(self.mean)))

    def cdf(self, x: float) -> float:
        """P(Y ≤ x)."""
        return float(self._parts.cdf(x).mean())

    def quantile(self, q: float) -> float:
        """Return the number below which y lies with probability q."""
        if not 0 < q < 1:
            raise ValueError(f"`q` is {q}, but a quantile's level must lie strictly between 0 and 1.")
        ends = self._parts.ppf(q)
        low, high = float(ends.min()), float(ends.max())  # the mixture's lies among its components'
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self.cdf(middle) < q else (low, middle)
        return (low + high) / 2

    def sample(self) -> float:
        """Draw y once."""
        return self.quantile(min(max(self._rng.random(), 1e-12), 1 - 1e-12))

    def update(self, x: float) -> None:
        """Refused: a prediction learns nothing; the model does."""
        raise NotImplementedError("a predictive distribution does not learn; call the model's `learn_one`.")

    revert = update  # refused as well

    def __repr__(self) -> str:
        return f"Predictive(μ={self.mu:.3f}, σ={self.sigma:.3f})"
