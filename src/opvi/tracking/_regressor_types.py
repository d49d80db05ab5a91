r"""The regressor's settings, its state, and what it reports."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opvi._forks import Unforked
from opvi.filters._covariance import Blocks, Covariance, variances, within
from opvi.targets import MLP, Layer
from opvi.tracking import _memory as memories
from opvi.tracking import _neighbours as neighbours
from opvi.tracking import _seats as of_seats
from opvi.tracking._calibration import Calibration
from opvi.tracking._gates import Gates
from opvi.tracking._memory import Memory
from opvi.tracking._process import WIDEST, Process
from opvi.tracking._scaling import Moments, Scale
from opvi.tracking._seats import Seats, Seen
from opvi.types import Array, Particles, Predicted, Scalar


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
    probability: Scalar | None = None  # that the data have jumped


class RegressorState(NamedTuple):
    """What the next round needs, and nothing else."""

    particles: Particles  # [n, d]
    past: Covariance
    error: Array  # [n]: running squared error of each particle, y standardised
    calibration: Calibration
    moments: Moments  # of the columns of X, then y
    scale: Scale  # in use; it follows the moments, at first closely
    scaled_at: Scalar  # rows seen when it last did
    round: Array
    rows: Array
    gates: Gates | None = None  # of the columns
    memory: Memory | None = None  # rows beside the networks
    surprised: Array | float = 0.0  # [2]: shares of the last few rows that were far above and far below
    held: Array | float = 0.0  # [ROOM, F + 3]: the first rows, and their weights
    begin: Array | float = 0.0  # [n, d]: the particles before any row
    odd: Array | float = 0.0  # [F]: shares of the last few rows whose value is too far off to be one
    pace: Any = 0.0  # [6]: how fast to forget, and why: `_pace.Pace`; None with a given half-life
    trail: Any = 0.0  # [n, d]: a running mean of the particles, or None
    recent: Array | float = 0.0  # [6]: moments of the last few surprising rows: `_guard`
    odds: Scalar | float = 0.0  # of a jump, against none: `_jumps`
    process: Process | None = None  # of the last rows
    seats: Seats | None = None  # the columns that each hidden unit sees; None: all of them


@dataclass(frozen=True)
class Networks(Unforked):
    """The settings of `regressor`: networks that differ in `settings`, each with a covariance."""

    features: int
    hidden: tuple[int, ...]
    particles: int
    half_life: float | None
    warm_up: int
    budget: float
    settings: Settings
    # None: what `neighbours.kept` says; an older opvi had none.
    memory_rows: int | None = field(default=None, metadata={"off": 0})
    fading_above: int = field(default=0, metadata={"off": 12})  # columns; an older opvi's number
    levels: bool = field(default=True, metadata={"off": False})  # of values that repeat, where rows are remembered
    seats: int = field(default=0, metadata={"off": 0})  # columns that a hidden unit sees; 0: all of them
    process: bool = field(default=True, metadata={"off": False})  # whether a Gaussian process helps while rows are few

    @cached_property
    def network(self) -> MLP:
        """The layers of one particle."""
        return MLP((self.seats or self.features, *self.hidden, 1), bias_spread=0.5)

    @property
    def gated(self) -> bool:
        """Whether useless columns fade; a linear model's own shrinkage is exact."""
        return bool(self.hidden) and self.features > self.fading_above

    @property
    def renews(self) -> bool:
        """Whether most of the past is forgotten when the data have jumped; a given half-life overrides that."""
        return self.half_life is None

    @property
    def processed(self) -> bool:
        """Whether there is a Gaussian process beside the networks; linear models need none."""
        return self.process and bool(self.hidden) and self.features <= WIDEST

    @property
    def remembered(self) -> int:
        """How many rows are kept beside the networks."""
        return neighbours.kept(self.memory_rows, self.features, memories.FACTS, bool(self.hidden))

    @cached_property
    def blocks(self) -> Blocks:
        """How a particle's covariance is cut to fit the budget."""
        return whole_blocks(self)

    def seen(self, seats: Seats | None, z: Array) -> Array | Seen:
        """Return standardised inputs z `[B, F]` as the hidden units see them."""
        return of_seats.seen(seats, z, self.hidden[0]) if self.seats else z

    def each(self, name: str, like: Array) -> Array:
        """Return one of the settings as an array `[n]`."""
        return jnp.asarray(getattr(self.settings, name), like.dtype)


def whole_blocks(sampler: Networks) -> Blocks:
    """Return how the covariances of whole networks are cut; not where units differ in what they see."""
    if sampler.seats:
        return Blocks(np.arange(sampler.network.dim)[None], sampler.network.dim)
    return within(*sampler.network.units, sampler.budget / 4 / sampler.particles)


def prior_variance(sampler: Networks, like: Array) -> Array:
    """Return the prior variances `[n, K, D]`; 1 in the padding.

    They are 1/(inputs + 1), for hidden biases a multiple of that, and 1 for the last bias.
    """
    network, variances = sampler.network, sampler.network.prior_variances

    def one(bias: Scalar) -> Array:
        hidden = [Layer(jnp.full_like(bias, v.weights), bias * v.bias) for v in variances[:-1]]
        last = Layer(jnp.full_like(bias, variances[-1].weights), jnp.full_like(bias, variances[-1].bias))
        return network.join([*hidden, last])

    gathered = sampler.blocks.gather(jax.vmap(one)(sampler.each("bias", like)))
    return jnp.where(gathered > 0, gathered, 1)


def first_doubt(sampler: Networks, state: RegressorState) -> Array:
    """Return the variance of each column's weights in the first layer, as a share of the prior's `[F]`."""
    share = variances(state.past) / prior_variance(sampler, state.error)
    inputs, width = sampler.network.shapes[0]
    first = sampler.blocks.scatter(share)[:, : inputs * width].mean(0).reshape(inputs, width)
    return of_seats.by_column(state.seats, first)
