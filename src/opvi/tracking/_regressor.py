r"""The recommended regressor: Gauss–Newton particles on causally scaled data, stacked and calibrated online."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from opvi._steps import in_one_program, pieces
from opvi.filters._covariance import exactly
from opvi.predictive import Predictive, StudentT
from opvi.tracking import _calibration as calibration
from opvi.tracking import _layers as layers
from opvi.tracking import _regressor_learning as learning
from opvi.tracking import _scaling as scaling
from opvi.tracking import _seats as of_seats
from opvi.tracking._calibration import USUAL_ROWS
from opvi.tracking._levels import WIDEST as WIDEST_LEVELS
from opvi.tracking._neighbours import checked_rows
from opvi.tracking._regressor_types import Networks, RegressorInfo, RegressorState, Settings
from opvi.types import Array, ArrayLike, Batch, Key, Start

EARLY_ROWS = 400  # until then rows are learnt five at a time, and the scale follows small changes
PREDICT_ROWS = 256  # at once
BUDGET = 64e6  # bytes for all covariances
WIDEST = 1 << 20  # columns
# Up to so many columns: width of the hidden layer, particles, bytes. Measured: python -m benchmarks.width
SIZES = (
    (10, 50, 20, BUDGET),
    (16, 30, 15, 20e6),
    (24, 30, 10, 20e6),
    (64, 20, 10, 20e6),
    (400, 16, 10, 40e6),
    (WIDEST, 10, 5, 40e6),
)
# From 11 columns up to the first number, a few may get all the room: seats, width of the hidden layer, particles.
SEATED, SEATS, SEATED_WIDTH, SEATED_PARTICLES = 30, 10, 48, 13


@dataclass(frozen=True)
class Regressor(Networks):
    """Settings of `regressor`."""

    @in_one_program
    def init(self, key: Key, particles: Start = None) -> RegressorState:
        """Return the state before any row; given particles are vectors laid out as `self.network` does."""
        network, n = self.network, self.particles
        if particles is None or isinstance(particles, int):
            if particles not in (None, n):
                raise ValueError(
                    f"`particles` is {particles}, but this regressor was made for {n}: give the number to "
                    "`opvi.regressor(..., particles=...)`."
                )
            w = jax.vmap(lambda k: network.join(network.init(k)))(jax.random.split(key, n))
        else:
            w = jnp.asarray(particles)
            if w.shape != (n, network.dim):
                raise ValueError(f"`particles` has shape {w.shape}, but this regressor's are {(n, network.dim)}.")
        return learning.start(self, w)

    def step(self, key: Key, state: RegressorState, batch: Batch) -> tuple[RegressorState, RegressorInfo]:
        """Predict a batch `(X, y)`, and learn from it."""
        return learning.step(self, key, state, batch)

    def relearn(self, key: Key, state: RegressorState, batch: Batch) -> RegressorState:
        """Learn from rows seen before, which teach the parameters and nothing else."""
        return learning.relearn(self, key, state, batch)

    def predict(self, state: RegressorState, x: ArrayLike) -> Predictive:
        """Return the posterior predictive at X, in the units of y."""
        x = jnp.asarray(x, state.particles.dtype)
        if x.ndim != 2 or x.shape[1] != self.features:
            raise ValueError(f"`x` has rows of shape {x.shape[1:]}, but this regressor takes ({self.features},).")
        rows = len(x)
        room = 1 << max(rows - 1, 0).bit_length()  # ragged numbers of rows compile few times
        said = _components(self, state, jnp.pad(x, ((0, room - rows), (0, 0))))
        return Predictive(jax.tree.map(lambda leaf: leaf[:, :rows], said))

    @property
    def between(self) -> "Regressor | None":
        """What learns single rows until the next batch is full; None for linear models, which need none."""
        from opvi.tracking._regressor_between import RegressorBetween

        return RegressorBetween(**{f.name: getattr(self, f.name) for f in fields(self)}) if self.hidden else None

    @property
    def about(self) -> str:
        """One line: what was chosen, and why."""
        count, size = self.blocks.order.shape
        used = self.particles * self.blocks.numbers * 4 / 1e6
        form = "full covariances" if count == 1 else f"covariances in {count} blocks of {size}"
        drift = "memories of 1,400 to 7,000 rows, shorter while it drifts"
        if self.half_life is not None:
            drift = f"half-life {self.half_life:g} rows"
        return (
            f"regressor: {self.particles} Gauss–Newton particles {'-'.join(map(str, self.network.sizes))} with {form} "
            f"({self.network.dim} parameters: {used:.0f} of {self.budget / 1e6:.0f} MB); {drift}"
            + ("; columns that do not help fade" if self.gated else "")
            + (f", and once at most {self.seats} help, each unit sees those" if self.seats else "")
            + ("; with a Gaussian process while rows are few" if self.processed else "")
            + (f"; corrected by the nearest of {self.remembered:,} rows" if self.remembered else "")
        )

    def __str__(self) -> str:
        return self.about


def default_settings(particles: int = 20) -> Settings:
    """Return five groups, {tanh, ReLU} × {bold, careful} and bold sine, each with memories of 1,400 to 7,000 rows."""
    bold, careful = (0.3, 0.01, 1.0), (0.05, 0.001, 8.0)
    groups = [(kind, *rest) for kind in (layers.TANH, layers.RELU) for rest in (bold, careful)]
    groups.append((layers.SINE, *bold))
    rows = [(*group, forgetting) for forgetting in (0.99, 0.99, 0.995, 0.998) for group in groups]
    return Settings(*zip(*(rows[i % len(rows)] for i in range(particles)), strict=True))


def regressor(
    features: int,
    *,
    hidden: Sequence[int] | None = None,
    particles: int | None = None,
    half_life: float | None = None,
    warm_up: int = EARLY_ROWS,
    budget: float | None = None,
    settings: Settings | None = None,
    memory_rows: int | None = None,
    fading_above: int = 0,
    levels: bool = True,
    process: bool = True,
    seats: bool = True,
) -> Regressor:
    r"""Predict numbers from raw data in one pass, with nothing to scale or tune.

    Every particle is a network with a covariance C, and absorbs rows as an extended Kalman filter does:

    $$S = J C J^\top + R_i, \qquad w \gets w + C J^\top S^{-1} (y - f), \qquad
      C \gets (C - C J^\top S^{-1} J C) / \gamma_i$$

    with noise $R_i$ and forgetting $\gamma_i$ of its own. Inputs and outputs are standardised with the rows
    seen so far; weights and covariances follow when that scale moves. The predictive is a mixture of Student-t
    distributions around the weighted mean of the particles, its weights, noise, spread and tails learnt from
    predictions made before learning.

    Args:
        features: columns of X.
        hidden: width of each hidden layer; `()` for linear models. Chosen from the number of columns if omitted, as
            are `particles` and `budget`: 50 units and 20 networks up to 10 columns, fewer for wider tables, so that a
            core learns 1,000 rows per second at 20 columns and 300 at 200.
        particles: the number of networks; the groups of `default_settings` take turns.
        half_life: in rows; data older than that count half. With None the particles have memories of different
            lengths, the weights learn which to trust, and all become shorter while errors repeat the latest moves.
        warm_up: this many rows at the start are learnt five at a time, on a scale that follows every batch: slower, and
            worth it while the model is far off.
        budget: bytes for all covariances. If the full matrices do not fit, they are cut into blocks.
        settings: what sets the particles apart, instead of `default_settings`.
        memory_rows: rows kept beside the networks; the errors and targets of the 8 nearest correct the mean, as far as
            that has helped. If omitted, as many as fit in 16 MB, at most 65,536, and none for linear models or for more
            than 400 columns; 0 for none.
        fading_above: networks with more columns than this have a factor per column, which fades out useless ones; up
            to 10 columns, only those without which predictions are clearly better.
        levels: also learn what the errors were at rows with the same value of a column, such as an ID, where that has
            helped; in models that remember rows, of at most 64 columns.
        process: also fit a Gaussian process to the last 512 rows, which predicts better than networks while rows are
            few, at first or after a jump; its share is learnt. Only beside networks of at most 64 columns.
        seats: in tables of 11 to 30 columns, networks begin again with the rows remembered when columns have faded, a
            few times and early, and have more units once at most 10 columns help. Not if `hidden` or `budget` is given.
    """
    kept = checked_rows(memory_rows)
    if not isinstance(fading_above, int) or isinstance(fading_above, bool) or fading_above < 0:
        raise ValueError(f"`fading_above` is {fading_above!r}, but must be a whole number of columns of at least 0.")
    places = chosen_seats(features, hidden, budget, kept, fading_above) if seats else 0
    widths, particles, budget = chosen_sizes(features, hidden, particles, budget, places)
    _check(features, particles, half_life, warm_up, budget)
    for name, value in (("levels", levels), ("process", process), ("seats", seats)):
        if not isinstance(value, bool | np.bool_):
            raise ValueError(f"`{name}` is {value!r}, but must be True or False.")
    chosen = default_settings(particles) if settings is None else settings
    chosen = Settings(*(tuple(float(value) for value in values) for values in chosen))
    if any(len(values) != particles for values in chosen):
        raise ValueError(f"`settings` is for {len(chosen.kind)} particles, but there are {particles}.")
    if half_life is not None:
        chosen = chosen._replace(forgetting=(0.5 ** (USUAL_ROWS / half_life),) * particles)
    made = Regressor(features, widths, particles, half_life, warm_up, budget, chosen, kept, fading_above, seats=places)
    return replace(
        made, levels=bool(levels) and features <= WIDEST_LEVELS and made.remembered > 0, process=bool(process)
    )


def chosen_seats(
    features: int, hidden: Sequence[int] | None, budget: float | None, memory_rows: int | None, fading_above: int
) -> int:
    """Return how many columns a hidden unit sees when others have faded, 0 for all: what suits so many columns."""
    middling = isinstance(features, int) and max(SIZES[0][0], fading_above) < features <= SEATED
    remembers = memory_rows is None or memory_rows >= of_seats.LAST
    return SEATS if middling and remembers and hidden is None and budget is None else 0


def chosen_sizes(
    features: int, hidden: Sequence[int] | None, particles: int | None, budget: float | None, seats: int = 0
) -> tuple[tuple[int, ...], int, float]:
    """Return the given sizes, and for those omitted what a table with this many columns can afford."""
    columns = features if isinstance(features, int) else 1  # refused later
    _, width, count, room = next(size for size in SIZES if columns <= size[0] or size[0] == WIDEST)
    if seats:
        width, count, room = SEATED_WIDTH, SEATED_PARTICLES, BUDGET
    hidden = (width,) if hidden is None else layers.checked_widths(hidden)
    if particles is None:
        particles = count if hidden else SIZES[0][2]  # linear models are small
    one_unit = 4.0 * sum(hidden[:1]) * (columns + 3) ** 2 * particles if isinstance(particles, int) else 0.0
    if budget is None:  # at least a hidden unit with all its weights is seen as a whole
        budget = BUDGET if len(hidden) != 1 else max(room, one_unit)
    return hidden, particles, budget


def _check(features: int, particles: int, half_life: float | None, warm_up: int, budget: float) -> None:
    for name, value in (("features", features), ("particles", particles)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"`{name}` is {value!r}, but must be a whole number of at least 1.")
    if half_life is not None and not half_life > 0:
        raise ValueError(f"`half_life` is {half_life}, but must be a number of rows greater than 0, or None.")
    if not warm_up >= 0:
        raise ValueError(f"`warm_up` is {warm_up}, but must be a number of rows of at least 0.")
    if not budget > 0:
        raise ValueError(f"`budget` is {budget}, but must be a number of bytes greater than 0.")


@partial(jax.jit, static_argnums=0)
@exactly
def _components(sampler: Regressor, state: RegressorState, x: Array) -> StudentT:
    """Return the components of the predictive at x, in the units of y."""
    nothing = jnp.zeros(len(x), x.dtype)
    z, _ = learning.standardised(state, x, nothing)

    def some(rows: tuple[Array, Array]) -> StudentT:
        return calibration.predictive(state.calibration, learning.predicted(sampler, state, *rows))

    if len(x) <= PREDICT_ROWS:  # a loop of one turn is more to compile
        said = some((z, x))
    else:
        said = jax.lax.map(some, pieces((z, x), nothing, PREDICT_ROWS)[0])  # leaves [pieces, components, rows]
        said = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1).reshape(leaf.shape[1], -1)[:, : len(x)], said)
    unit, centre = scaling.divisor(state.scale)[-1], state.scale.mean[-1]
    return said._replace(mean=said.mean * unit + centre, variance=said.variance * unit**2, spread=said.spread * unit**2)
