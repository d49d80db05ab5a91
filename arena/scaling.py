"""Standardisation with the rows learnt so far, for methods that need it but do not do it themselves."""

import numpy as np

from arena.forecasts import Numbers


class Scaler:
    """Running means and standard deviations of columns."""

    def __init__(self, columns: int) -> None:
        self.count, self.mean, self.square = 0, np.zeros(columns), np.zeros(columns)

    def learn(self, X: np.ndarray) -> None:
        """Update with some rows."""
        n, mean = len(X), X.mean(0)
        away, total = mean - self.mean, self.count + n
        self.square += ((X - mean) ** 2).sum(0) + away**2 * self.count * n / total
        self.mean, self.count = self.mean + away * n / total, total

    @property
    def sd(self) -> np.ndarray:
        """The standard deviations; 1 for constant columns."""
        sd = np.sqrt(self.square / max(self.count, 1))
        return np.where(sd > 1e-12, sd, 1.0)

    def __call__(self, X: np.ndarray) -> np.ndarray:
        """Return the rows in standard units, clipped at 10 from the mean."""
        return np.clip((X - self.mean) / self.sd, -10, 10).astype(np.float32)


class Units:
    """Columns, and targets that are numbers, in standard units and back; labels as indicators."""

    def __init__(self, columns: int, classes: int) -> None:
        self.classes, self.inputs, self.outputs = classes, Scaler(columns), Scaler(1)

    def learn(self, X: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Update with some rows, and return them in standard units; y as `[rows, 1]` or `[rows, classes]`."""
        self.inputs.learn(X)
        if self.classes:
            return self.inputs(X), np.eye(self.classes, dtype=np.float32)[y]
        self.outputs.learn(y[:, None])
        return self.inputs(X), self.outputs(y[:, None])

    def back(self, mean: np.ndarray, variance: np.ndarray) -> Numbers:
        """Return distributions in y's own unit."""
        mean, variance = np.asarray(mean, float), np.asarray(variance, float)
        return Numbers(mean * self.outputs.sd + self.outputs.mean, variance * self.outputs.sd**2)
