r"""What the regressor is told, and what it reports."""

from typing import NamedTuple

from opvi.types import Array, Predicted, Scalar


class Settings(NamedTuple):
    """What sets one particle apart from another: a number for each particle."""

    kind: tuple[float, ...]  # of the activation: `layers.TANH`, `RELU` or `SINE`
    share: tuple[float, ...]  # the noise taken in learning, as a share of the particle's own squared error
    smallest: tuple[float, ...]  # and its floor
    bias: tuple[float, ...]  # prior variance of the hidden biases, relative to that of the weights
    forgetting: tuple[float, ...]  # the factor for every USUAL_ROWS rows


class RegressorInfo(NamedTuple):
    """What a round did, for readers; never fed back."""

    rows: Array
    log_predictive: Scalar  # mean log predictive density of the batch, before learning from it
    squared_error: Scalar  # mean squared error of the predictions, before learning
    drift: Scalar
    finite: Array
    predicted: Predicted | None = None  # for each row, before learning
