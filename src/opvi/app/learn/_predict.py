"""Predictions of a run for the rows of a table."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opvi.adapters._tables import Json, Rejected, Schema, Source, TableError
from opvi.app.learn import _scores as scoring
from opvi.app.learn._columns import ColumnSums
from opvi.app.learn._directory import RunDirectory, RunError
from opvi.app.learn._figures import Figures
from opvi.app.learn._model import BATCH, Settings, about_model, check_columns, describes, later, model, with_waiting
from opvi.app.learn._scales import count_moments, count_quantiles, positive_moments
from opvi.predictive import Predictive
from opvi.running import CheckpointError, Engine
from opvi.running._checkpoint import shaped
from opvi.types import Array, ArrayLike, Batch, Sampler, State, as_key

FEW_LEVELS, MANY_LEVELS = 3, 20  # quantiles that a program has room for
CLOSEST = 1e-6  # that a quantile's level may be to 0 or 1: nearer ones a float32 does not tell apart

NOT_FINITE = "its prediction is not a finite number"

Columns = dict[str, ArrayLike]  # by their names


class Learnt(NamedTuple):
    """A run as its last good checkpoint left it."""

    about: Json
    schema: Schema
    settings: Settings
    sampler: Sampler
    tree: Json
    damaged: list[str]  # newer checkpoints that were passed over

    @property
    def rows(self) -> int:
        """The number of rows that `state` has learnt."""
        return int(self.tree["state"].rows) + len(self.tree["waiting"]["y"])

    def state(self) -> State:
        """Return the state to predict with: also rows that wait for a full batch are learnt in it."""
        engine = Engine(self.sampler, self.settings.seed, batch=BATCH, state=self.tree["state"])
        x, y = self.tree["waiting"]["x"], self.tree["waiting"]["y"]
        engine.waiting = Batch((x, y), np.ones(len(y), np.float32)) if len(y) else None  # type: ignore[arg-type]
        return with_waiting(engine)


def learnt(run: RunDirectory) -> Learnt:
    """Read a run without changing anything in its folder."""
    about = run.about()
    schema, settings = about_model(run, about)
    kept = run.checkpoints
    tree = kept.newest()
    if tree is None and kept.damaged:
        raise RunError(
            f"{run.path} has no intact checkpoint; the newest: {kept.damaged[0]} Learn again from the first "
            "row: `opvi learn … --resume`."
        )
    if tree is None:
        raise RunError(f"{run.path} has no checkpoint yet. Let it learn first: `opvi learn … --resume`.")
    if not isinstance(tree, dict) or not {"state", "scores", "places", "kinds", "waiting"} <= set(tree):
        raise RunError(f"the checkpoints of {run.path} do not belong to a run.")
    begun, why = schema, ""
    try:
        schema, room = later(begun, tree)
        sampler = model(schema, settings, room)
    except (TypeError, ValueError) as error:
        raise RunError(f"{run.path / 'run.json'} describes a model that cannot be made: {error}") from None
    try:
        state = jax.eval_shape(sampler.init, as_key(0))
        like = {"state": state, "scores": scoring.start(schema.task, len(schema.classes))}
        more = {"figures": Figures.start(room), "columns": ColumnSums.start(schema)}  # an older opvi had none
        tree = shaped(tree, like | {name: value for name, value in more.items() if name in tree})
    except CheckpointError as error:
        why = f" ({str(error).rstrip('.')})"
    if why or not describes(tree.get("about"), begun, settings):
        raise RunError(
            f"{run.path / 'run.json'} describes other columns or another model than the checkpoints were saved with"
            f"{why}. Restore the old one."
        )
    return Learnt({**about, "saved": run.saved()}, schema, settings, sampler, tree, kept.damaged)


def predict(
    known: Learnt, source: Source, quantiles: Sequence[float] = (0.05, 0.5, 0.95)
) -> Iterator[tuple[Columns, list[Rejected]]]:
    """Yield columns of predictions, block by block, one row for every row of the source.

    Rows that break the schema have gaps for predictions and are returned alongside them.

    Args:
        known: a run.
        source: rows without a target, or with one that is ignored.
        quantiles: the levels to return for a regression.
    """
    if known.schema.task == "regression" and not all(map(is_level, quantiles)):
        raise TableError(
            f"the quantiles are {list(quantiles)}, but each must lie strictly between 0 and 1, by {CLOSEST:g} or more."
        )
    engine = Engine(known.sampler, known.settings.seed, state=known.state())
    levels = tuple(float(q) for q in quantiles)
    some = False
    for block in source.blocks():
        some = True
        check_columns(known.schema, block, source.name)
        encoded = known.schema.encode(block, with_target=False)
        at = encoded.row - block.first
        columns: Columns = {"row": np.arange(block.first, block.first + block.rows)}
        said = predicted(engine, known.schema, encoded.x, levels)
        odd = unsound(said)
        for name, values in said.items():
            wide = np.full(block.rows, None if values.dtype == object else np.nan, values.dtype)
            wide[at[~odd]] = values[~odd]
            columns[name] = wide
        more = [Rejected(int(row), NOT_FINITE, "") for row in encoded.row[odd]]
        yield columns, sorted([*encoded.rejected, *more])
    if not some:  # the names of the columns all the same
        nothing = np.zeros((0, len(known.schema.features)), np.float32)
        yield {"row": np.arange(0), **predicted(engine, known.schema, nothing, levels)}, []


def predicted(engine: Engine, schema: Schema, x: np.ndarray, levels: tuple[float, ...]) -> dict[str, np.ndarray]:
    """Return predictions for encoded rows, by column name."""
    asked = x if len(x) else np.zeros((1, x.shape[1]), x.dtype)  # without rows there is no question
    if schema.task == "regression":
        names = ["mean", "sd", *(f"q{q:g}" for q in levels)]
        what = _count_numbers if schema.counts else _positive_numbers if schema.positive else _numbers
        said = engine.ask(asked, what, others=_levels(levels, len(asked)))[: len(x)].T
        return {
            name: values.astype(np.float64) + schema.shift if schema.shift and name != "sd" else values
            for name, values in zip(names, said, strict=False)  # some levels only fill the room
        }
    probabilities = engine.ask(asked, Predictive.probabilities)[: len(x), : len(schema.classes)]
    probabilities = probabilities / probabilities.sum(1, keepdims=True)  # a model may have room for more classes
    named = np.array(schema.classes, object)[probabilities.argmax(1)]
    return {"prediction": named, **{f"p={label}": p for label, p in zip(schema.classes, probabilities.T, strict=True)}}


def unsound(columns: dict[str, np.ndarray]) -> np.ndarray:
    """Return which rows have a prediction that is not finite."""
    numbers = [values for values in columns.values() if values.dtype != object]
    out: np.ndarray = ~np.isfinite(np.stack(numbers)).all(0)
    return out


def is_level(q: float) -> bool:
    """Return whether a quantile's level is one that a float32 tells from 0 and 1."""
    return CLOSEST <= q <= 1 - CLOSEST


def _levels(levels: tuple[float, ...], rows: int) -> tuple[np.ndarray, ...]:
    """Return the levels of each row, `[rows, room]`: data of a program, so that other levels need no other program."""
    if not levels:
        return ()
    room = FEW_LEVELS if len(levels) <= FEW_LEVELS else -(-len(levels) // MANY_LEVELS) * MANY_LEVELS
    wide = np.full(room, 0.5, np.float32)
    wide[: len(levels)] = levels
    return (np.broadcast_to(wide, (rows, room)),)


def _numbers(predictive: Predictive, levels: Array | None = None) -> Array:
    """Mean, standard deviation and quantiles, `[rows, …]`."""
    quantiles = () if levels is None else predictive.quantile(levels.T)
    return jnp.stack([predictive.mean(), predictive.sd(), *quantiles], 1)


def _positive_numbers(predictive: Predictive, levels: Array | None = None) -> Array:
    """Return the same for a target whose logarithm was learnt."""
    quantiles = () if levels is None else jnp.exp(predictive.quantile(levels.T))
    return jnp.stack([*positive_moments(predictive), *quantiles], 1)


def _count_numbers(predictive: Predictive, levels: Array | None = None) -> Array:
    """Return the same for a count, whose quantiles are whole numbers."""
    quantiles = () if levels is None else count_quantiles(predictive, levels.T)
    return jnp.stack([*count_moments(predictive), *quantiles], 1)
