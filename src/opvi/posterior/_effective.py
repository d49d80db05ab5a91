"""How many independent draws some draws are worth."""

import numpy as np

SURE = 4.5  # standard errors of an autocorrelation that is none


def effective_numbers(values: np.ndarray, draws: np.ndarray | None = None) -> np.ndarray:
    r"""Return the number of independent draws that each column is worth, `[m]`.

    $$n_{\mathrm{eff}} = \frac{n^2 / \sum_j c_j^2}{1 + 2 \sum_k \rho_{kL}}$$

    with $c_j$ how often the j-th distinct draw is there, and $\rho$ the autocorrelations at multiples of a lag L, as
    far as sums of pairs of them are positive (Geyer, 1992). L is the first lag with a correlation beyond chance: the
    number of chains, where their draws alternate. It is never more than n: negative correlations gain nothing here.

    Args:
        values: `[n, m]`, in the order in which they were drawn.
        draws: `[n, d]`, the draws that the values were computed from; the values themselves if omitted.
    """
    values = np.asarray(values, float)
    n, m = values.shape
    _, counts = np.unique(np.asarray(values if draws is None else draws), axis=0, return_counts=True)
    distinct = n**2 / (counts.astype(float) ** 2).sum()
    length = np.ones(m)
    if n > 3:
        away = values - values.mean(0)
        spectrum = np.abs(np.fft.rfft(away, 2 * n, axis=0)) ** 2
        with np.errstate(all="ignore"):
            found = np.fft.irfft(spectrum, axis=0)[:n]
            correlation = found / found[0]
        beyond = correlation[1 : n // 2 + 1] > SURE / np.sqrt(n)
        for j in np.flatnonzero(beyond.any(0)):
            along = correlation[:: 1 + int(beyond[:, j].argmax()), j]
            pairs = along[: len(along) // 2 * 2].reshape(-1, 2).sum(1)
            last = int((pairs <= 0).argmax()) if (pairs <= 0).any() else len(pairs)
            length[j] = max(1.0, 2 * pairs[:last].sum() - 1)
    return np.where(np.isfinite(values).all(0), distinct / length, np.nan)
