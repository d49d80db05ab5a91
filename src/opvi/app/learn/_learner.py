"""The loop behind `opvi learn`: read, predict, learn, save; and all of it again after a kill, to the same bits."""

import itertools
import os
import re
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from opvi.app.learn import _scores as scoring
from opvi.app.learn._directory import RunDirectory, RunError
from opvi.app.learn._models import Settings, check_columns, described, model
from opvi.app.learn._sample import Sample, keep
from opvi.app.learn._sample import start as no_sample
from opvi.app.tables import Block, Encoded, Rejected, Schema, Source
from opvi.running._checkpoint import CheckpointError, shaped
from opvi.running._engine import CHUNK_BYTES, advance
from opvi.running._saving import SAVE_EVERY, Checkpoints, Pace
from opvi.types import Batch, Tracker

BATCH = 20  # rows learnt at once
ROUNDS = 256  # batches between two looks at the clock
MOST_KINDS = 50  # of reasons counted apart
VALUE = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|-?\d[\d.,e+-]*")
OTHER = "other reasons"


class Stopped(KeyboardInterrupt):
    """A signal asked the run to end."""


class Stop:
    """A signal handler: the run ends at the next good moment, and at once while it waits for rows."""

    def __init__(self) -> None:
        self.asked: str | None = None
        self.reading = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Take a signal."""
        if self.asked:  # a second time: do not even save
            raise KeyboardInterrupt
        self.asked = signal.Signals(number).name
        if self.reading:
            raise Stopped(self.asked)

    def check(self) -> None:
        """Raise if a signal has come."""
        if self.asked:
            raise Stopped(self.asked)


class Place(NamedTuple):
    """How far a source was read."""

    name: str
    fingerprint: str | None
    format: str | None
    row: int  # the next to read


class Learner:
    """A run in memory.

    Args:
        run: its folder.
        kept: the folder's checkpoints, locked.
        schema: what the columns mean.
        settings: of the model.
        strict: stop at the first row that breaks the schema.
        save_every: seconds between checkpoints, at least.
        spread: the model over several devices; as it is if not given.
    """

    def __init__(
        self,
        run: RunDirectory,
        kept: Checkpoints,
        schema: Schema,
        settings: Settings,
        *,
        strict: bool = False,
        save_every: float = SAVE_EVERY,
        spread: Callable[[Tracker], Tracker] = lambda tracker: tracker,
    ):
        self.run, self.kept, self.schema, self.settings = run, kept, schema, settings
        self.strict, self.pace = strict, Pace(save_every)
        self.tracker = spread(model(schema, settings))
        self._key = jax.random.key(settings.seed)
        self._score = scoring.score(self.tracker, schema.task)
        features = len(schema.features)
        self._room = max(1, min(ROUNDS, CHUNK_BYTES // (4 * BATCH * features)))
        self._target = np.float32 if schema.task == "regression" else np.int32
        self.state = self.tracker.init(self._key)
        self.scores = scoring.start(schema.task, len(schema.classes))
        self.sample: Sample = no_sample(features)
        self.waiting = np.zeros((0, features), np.float32), np.zeros(0, self._target)
        self.places: list[Place] = []
        self.kinds: dict[str, int] = {}
        self.rejected = self.filled = self.saves = 0
        self.finished = False
        self._lines, self._size = -1, 0  # the file of rejected rows, open while learning, and its length

    # --- checkpoints --------------------------------------------------------------------------

    def save(self) -> None:
        """A checkpoint of all that the run is; the figures beside it."""
        try:
            os.fsync(self._lines)
            with self.pace.saving():
                self.kept.save(self.saves + 1, {**self.tree(), "saves": self.saves + 1})
            self.saves += 1
            self.run.write_metrics(self.metrics())
        except OSError as error:
            raise RunError(
                f"{self.run.path} could not be written to: {error.strerror or error}. "
                f"{'Its last checkpoint is as it was' if self.saves else 'It holds no checkpoint yet'}. Make room or "
                "mend the permissions, then go on with --resume."
            ) from error

    def tree(self) -> dict[str, Any]:
        """All that the run is."""
        return {
            "state": self.state,
            "rows": self.rows,
            "scores": self.scores,
            "sample": self.sample,
            "waiting": {"x": self.waiting[0], "y": self.waiting[1]},
            "places": [place._asdict() for place in self.places],
            "rejected": {"size": self._size, "count": self.rejected},
            "kinds": dict(self.kinds),
            "filled": self.filled,
            "finished": self.finished,
            "saves": self.saves,
            "about": described(self.schema, self.settings),
        }

    def restore(self, tree: Any) -> Self:
        """Go on from a checkpoint."""
        try:
            if tree["about"] != described(self.schema, self.settings):
                raise RunError(
                    f"{self.run.path / 'run.json'} describes other columns or another model than the checkpoints were "
                    "saved with. Bring the old one back."
                )
            try:
                tree = shaped(tree, {"state": self.state, "scores": self.scores, "sample": self.sample})
            except CheckpointError as error:
                raise RunError(
                    f"the checkpoints of {self.run.path} hold a model of another shape than its run.json describes: "
                    f"{error} One of the two comes from another run."
                ) from None
            self.state, self.scores, self.sample = tree["state"], tree["scores"], tree["sample"]
            self.waiting = tree["waiting"]["x"], tree["waiting"]["y"]
            self.places = [Place(**place) for place in tree["places"]]
            self.kinds, self.filled = tree["kinds"], tree["filled"]
            self.rejected, self._size = tree["rejected"]["count"], tree["rejected"]["size"]
            self.finished, self.saves = tree["finished"], tree["saves"]
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"a checkpoint of {self.run.path} lacks {error}: another version wrote it.") from None
        return self

    # --- learning -----------------------------------------------------------------------------

    def learn(
        self,
        source: Source,
        first: list[Block],
        stop: Stop,
        show: Callable[["Learner", float | None], None] = lambda learner, share: None,
    ) -> None:
        """All rows of a source, then a last checkpoint.

        Args:
            source: opened where the last place ends.
            first: blocks that were read already.
            stop: asked between batches.
            show: called with this and the share of the source read, after every few batches.
        """
        self.finished = False
        self._lines, self._size = self.run.open_rejected(self._size)
        try:
            for block in itertools.chain(first, blocks_of(source, stop)):
                check_columns(self.schema, block, source.name)
                encoded = self.schema.encode(block)
                self.take(encoded, block)
                self._work(stop, show, block.share, last=False)
            self._work(stop, show, 1.0, last=True)
            self.finished = True
            self.save()
        except (Exception, Stopped):  # not a second Ctrl-C, which may come at any moment
            self.save()
            raise
        finally:
            os.close(self._lines)
        show(self, 1.0)

    def _work(
        self, stop: Stop, show: Callable[["Learner", float | None], None], share: float | None, *, last: bool
    ) -> None:
        """The rows that wait; at the end of the source, to the last of them."""
        while self.step(last):
            show(self, share)
            stop.check()
            if self.pace.due():
                self.save()

    def take(self, encoded: Encoded, block: Block) -> None:
        """Rows into the waiting line, the bad ones into the file of rejected rows; or an error, and nothing changed."""
        place = self.places[-1]
        if encoded.rejected:
            self._reject(encoded.rejected, place.name)
        self.filled += encoded.filled
        if encoded.y is not None and len(encoded.y):
            x, y = self.waiting
            self.waiting = np.concatenate([x, encoded.x]), np.concatenate([y, encoded.y.astype(self._target)])
        self.places[-1] = place._replace(row=block.first + block.rows)

    def _reject(self, bad: list[Rejected], name: str) -> None:
        if self.strict:
            raise RunError(
                f"row {bad[0].row:,} of {name} was rejected: {bad[0].reason}. It was not learnt, and --strict stops "
                "here. Mend the row, or leave out --strict to set such rows aside; then go on with --resume."
            )
        data = self.run.as_lines(bad, name)
        size = self._size + len(data)
        try:
            while data:
                data = data[os.write(self._lines, data) :]
        except OSError as error:
            os.ftruncate(self._lines, self._size)
            os.lseek(self._lines, self._size, os.SEEK_SET)
            raise RunError(
                f"rejected rows could not be written to {self.run.path}: {error.strerror}. Make room, then go on with "
                "--resume."
            ) from error
        self._size = size
        self.rejected += len(bad)
        for one in bad:
            count_kind(self.kinds, _kind(one.reason))

    def step(self, last: bool) -> bool:
        """Some batches, predicted and then learnt; False if too few rows wait. At the end the last is a short one."""
        x, y = self.waiting
        count = min(self._room, len(y) // BATCH)
        if not count and not (last and len(y)):
            return False
        rows = min(max(count, 1) * BATCH, len(y))
        data, weight = self._stacked(x[:rows], y[:rows])
        self.learn_batches(data, weight, max(count, 1))
        self.waiting = x[rows:], y[rows:]
        return True

    def learn_batches(self, data: tuple[np.ndarray, np.ndarray], weight: Any, rounds: int) -> None:
        """The first `rounds` of stacked batches, predicted and then learnt; rows of weight 0 do not count."""
        state, (info, _, (scored,)) = advance(
            self.tracker, None, (self._score,), self._key, self.state, Batch(data, weight), jnp.int32(rounds)
        )
        info, scored = jax.tree.map(lambda leaf: leaf[:rounds], self.on_host((info, scored)))
        scores = scoring.add(self.scores, self.schema.task, scored, info, data[1][:rounds], weight[:rounds])
        sample = keep(self.sample, data[0][:rounds][weight[:rounds] > 0], self.settings.seed)
        self.state, self.scores, self.sample = state, scores, sample

    def on_host(self, tree: Any) -> Any:
        """Arrays to read."""
        return jax.tree.map(np.asarray, tree)

    def _stacked(self, x: np.ndarray, y: np.ndarray) -> tuple[tuple[np.ndarray, np.ndarray], Any]:
        """Rows and weights as `[room, BATCH, …]`. A short batch is padded; rounds past the last are never read."""
        room = self._room * BATCH

        def stack(a: np.ndarray) -> np.ndarray:
            out = np.zeros((room, *a.shape[1:]), a.dtype)
            out[: len(a)] = a
            out[len(a) : -(-len(a) // BATCH) * BATCH] = a[0]
            return out.reshape(self._room, BATCH, *a.shape[1:])

        weight = np.zeros(room, np.float32)
        weight[: len(y)] = 1
        return (stack(x), stack(y)), weight.reshape(self._room, BATCH)

    # --- what people read ---------------------------------------------------------------------

    @property
    def rows(self) -> int:
        """Learnt so far."""
        return int(self.state.rows)

    def summary(self) -> scoring.Summary:
        """The figures of the moment."""
        return scoring.summary(self.scores, self.schema.task)

    def metrics(self) -> dict[str, Any]:
        """The same as plain values for a file."""
        told = self.summary()
        name = "rmse" if self.schema.task == "regression" else "error_rate"

        def plain(value: float) -> float | None:
            return float(value) if np.isfinite(value) else None

        figures = {
            "rows": self.rows,
            "rejected": self.rejected,
            "filled": self.filled,
            "finished": self.finished,
            "log_loss": plain(told.total.loss),
            name: plain(told.total.error),
            f"recent_{name}": plain(told.recent.error),
            f"baseline_{name}": plain(told.baseline),
            "drift_alarms": told.alarm_count,
            "refused_batches": told.refused,
        }
        if self.schema.task == "regression":
            return {**figures, "covered_by_90_percent_interval": plain(told.total.covered)}
        return {**figures, "calibration_error": plain(told.calibration_error)}


def _kind(reason: str) -> str:
    """The reason without the value, so that like ones are counted together; the column's name stays."""
    column, mark, rest = reason.partition("': ")
    return column + mark + VALUE.sub("…", rest) if mark else VALUE.sub("…", reason)


def count_kind(kinds: dict[str, int], kind: str, count: int = 1) -> None:
    """Some more of a kind; one too many of them is counted among the others."""
    kind = kind if kind in kinds or len(kinds) < MOST_KINDS else OTHER
    kinds[kind] = kinds.get(kind, 0) + count


def blocks_of(source: Source, stop: Stop) -> Iterator[Block]:
    """Blocks; while the next one is awaited, a signal ends the wait."""
    blocks = source.blocks()
    while True:
        stop.reading = True
        stop.check()
        try:
            block = next(blocks, None)
        finally:
            stop.reading = False
        if block is None:
            return
        yield block
