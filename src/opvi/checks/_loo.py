r"""Leave-one-out scores from stored rows: PSIS-LOO and WAIC, at any moment of a stream."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from opvi.checks._rows import stored
from opvi.posterior import smooth_weights
from opvi.types import Sampler, Seed, State

Score = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]  # of rows' log likelihoods and weights
LARGEST_K = 0.7  # of a tail: above, the row's score is not reliable
LARGEST_VARIANCE = 0.4  # of a row's log likelihood over draws: above, WAIC is not reliable


@dataclass(frozen=True)
class ELPD:
    """The expected log predictive density of new rows, estimated from rows that were learnt."""

    method: str
    elpd: float  # the sum over rows stored, in nats; larger is better
    se: float  # its standard error
    p: float  # effective number of parameters
    pointwise: np.ndarray  # [rows]: of each stored row
    doubt: np.ndarray  # [rows]: Pareto k of each row's weights; for WAIC the variance of its log likelihood
    rows: int  # stored
    seen: int

    @property
    def unreliable(self) -> int:
        """The number of rows whose score is not reliable."""
        limit = LARGEST_K if self.method == "PSIS-LOO" else LARGEST_VARIANCE
        return int((~(self.doubt <= limit)).sum())

    def __str__(self) -> str:
        of = f"{self.rows:,} rows" if self.rows == self.seen else f"the {self.rows:,} rows stored of {self.seen:,}"
        said = f"{self.method}: elpd {self.elpd:.1f} ± {self.se:.1f} nats over {of}, p {self.p:.1f}"
        if self.unreliable and self.method == "PSIS-LOO":
            said += (
                f"\nPareto k is above {LARGEST_K} for {self.unreliable} rows (largest {np.nanmax(self.doubt):.2f}): "
                "they decide the posterior, and their scores are too high. Look at them, or score rows before "
                "they are learnt: `opvi.compare_models`."
            )
        elif self.unreliable:
            said += f"\nThe log likelihoods of {self.unreliable} rows vary too much for WAIC: use `opvi.loo`."
        return said


def loo(sampler: Sampler, state: State, key: Seed = 0, n: int = 1000) -> ELPD:
    r"""Return the leave-one-out score of the rows that a sampler stores (PSIS-LOO; Vehtari, Gelman, Gabry, 2017).

    $$\mathrm{elpd} = \sum_i w_i \log \frac{\sum_s r_{is}\, p(y_i \mid \theta_s)}{\sum_s r_{is}}, \qquad
      r_{is} \propto p(y_i \mid \theta_s)^{-w_i}$$

    with the largest ratios r smoothed. Rows that are not stored any more stay learnt, and are not scored.

    Args:
        sampler: one that stores rows, such as `opvi.tracker(target)`.
        state: where it stands.
        key: a JAX key or an integer seed for the draws.
        n: draws from the posterior, which every row is scored with.
    """

    def score(rows: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ratios = smooth_weights(-rows * weight)
        return np.logaddexp.reduce(ratios.log_weights + rows, axis=0), ratios.k

    return _scored("PSIS-LOO", score, sampler, state, key, n)


def waic(sampler: Sampler, state: State, key: Seed = 0, n: int = 1000) -> ELPD:
    r"""Return the widely applicable information criterion of the rows that a sampler stores (Watanabe, 2010).

    $$\mathrm{elpd} = \sum_i w_i \big( \log \tfrac{1}{n} \textstyle\sum_s p(y_i \mid \theta_s) -
      \operatorname{Var}_s \log p(y_i \mid \theta_s) \big)$$

    It is here for comparison with other software; `loo` is as quick, and says where it cannot be trusted.

    Args:
        sampler: one that stores rows, such as `opvi.tracker(target)`.
        state: where it stands.
        key: a JAX key or an integer seed for the draws.
        n: draws from the posterior.
    """

    def score(rows: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.logaddexp.reduce(rows, axis=0) - np.log(len(rows)) - rows.var(0), rows.var(0)

    return _scored("WAIC", score, sampler, state, key, n)


def _scored(method: str, score: Score, sampler: Sampler, state: State, key: Seed, n: int) -> ELPD:
    """Return the scores of all stored rows together."""
    known = stored(sampler, state, key, n)
    each, doubts, learnt = [], [], []
    for block in known.blocks():
        row, doubt = score(block.log_likelihood, block.weight)
        each.append(row)
        doubts.append(doubt)
        learnt.append(np.logaddexp.reduce(block.log_likelihood, axis=0) - np.log(len(block.log_likelihood)))
    pointwise = known.weight * np.concatenate(each)
    rows = len(pointwise)
    total, se = float(pointwise.sum()), float(np.sqrt(rows * pointwise.var()))
    p = float((known.weight * np.concatenate(learnt)).sum()) - total
    return ELPD(method, total, se, p, pointwise, np.concatenate(doubts), rows, int(state.rows))
