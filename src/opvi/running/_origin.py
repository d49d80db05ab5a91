"""Offsets: columns far from 0 are shifted before conversion to float32, which has seven digits."""

import numpy as np

FAR = 1000.0  # deviations from 0: float32 then keeps four digits of a deviation
FIRST = 100  # rows that are looked at


def origin_of(values: np.ndarray) -> np.ndarray:
    """Return what to subtract from each column: its median, if that lies far from 0; otherwise 0.

    A constant offset does not change what a standardising model learns, so subtracting it costs nothing. The
    offset is the median of the first rows alone, so that a single outlier has no effect.

    Args:
        values: the first rows, `[rows, columns]`, NaN where nothing is known.
    """
    values = np.asarray(values, np.float64)[:FIRST]
    known = np.isfinite(values)
    out = np.zeros(values.shape[1])
    for column in np.flatnonzero(known.any(0)):
        here = values[known[:, column], column]
        median = np.median(here)
        spread = np.median(np.abs(here - median)) or here.std()
        if abs(median) > FAR * spread and (spread or abs(median) >= FAR):
            out[column] = median
    return out
