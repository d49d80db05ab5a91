"""A model for each key of a Spark stream: `opvi.scale.Keyed` inside `transformWithStateInPandas`."""

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from opvi.scale.fleet import Fleet, Keyed

try:
    import pandas as pd
    from pyspark import cloudpickle
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql import functions as F  # noqa: N812 - as all of Spark's documentation has it
    from pyspark.sql.streaming import StatefulProcessor
    from pyspark.sql.types import StructField, StructType
except ImportError as error:
    raise ImportError('`opvi.adapters.spark` needs PySpark 4: `pip install "opvi[spark]"`, and Java.') from error

PROVIDER = "spark.sql.streaming.stateStore.providerClass"
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
STATE = "ids string, records binary, touched binary"
VARIABLE, BUCKET = "models", "opvi_bucket"
Emit = Literal["predictions", "rounds"]
ROUNDS = "round long, rows long, log_predictive double, finite boolean"


def learn(
    rows: DataFrame,
    keyed: Keyed,
    *,
    id: str,
    inputs: Sequence[str],
    target: str,
    order: str,
    buckets: int = 256,
    forget_after: float | None = None,
    emit: Emit = "predictions",
) -> DataFrame:
    """Return a streaming DataFrame that learns a model for each id and reports what was predicted or learnt.

    Models live in Spark's state store (RocksDB), a bucket of keys in each state; Spark commits them together with the
    place in the stream. They have the bits of an `opvi.Fleet` that got the same rows in the same order. Workers need
    opvi and its sampler's libraries.

    Args:
        rows: the stream. Rows with a null or NaN end the query: filter them before.
        keyed: made with an `example` of a pair `(X, y)`: X of as many columns as `inputs`.
        id: the column that holds the id of each row's model: strings or whole numbers.
        inputs: numeric columns, in the order of X's columns.
        target: the column of y.
        order: a column by which the rows of a trigger are put in order, e.g. an offset; distinct within an id.
        buckets: states; a model's whole bucket is read and written when one of its models is touched. About the
            number of ids in thousands, and several times the number of partitions. It stays with a checkpoint.
        forget_after: seconds without a row after which a model is dropped, when its bucket is touched next.
        emit: "predictions": for each row the predictive made before the rows of its trigger were learnt, under `id` and
            `order`, as mean and sd or, of classes, as probabilities. "rounds": for each round learnt, under `id` and
            `round`, how well its batch had been predicted. Both are the same when Spark repeats a trigger, so a sink
            that overwrites by those two columns gets each of them once.
    """
    if emit not in ("predictions", "rounds"):
        raise ValueError(f'`emit` is {emit!r}, but must be "predictions" or "rounds".')
    fields = {field.name: field for field in rows.schema.fields}
    missing = [name for name in (id, *inputs, target, order) if name not in fields]
    if missing:
        raise ValueError(f"the stream has no column {missing[0]!r}; it has {list(fields)}.")
    if buckets < 1:
        raise ValueError(f"`buckets` is {buckets!r}, but must be a whole number of at least 1.")
    rows.sparkSession.conf.set(PROVIDER, ROCKSDB)  # the only store that keeps such state
    saying = ROUNDS
    if emit == "predictions":
        said = keyed.predict(keyed.start([0]), np.zeros(1, int), np.zeros((1, len(inputs)), np.float32))
        saying = "probabilities array<double>" if _classes(said) else "mean double, sd double"
    head = [StructField(id, fields[id].dataType), *([fields[order]] if emit == "predictions" else [])]
    said_fields: Any = StructType.fromDDL(saying)
    schema = StructType([*head, *said_fields.fields])
    learner = _Learner(cloudpickle.dumps(keyed), id, list(inputs), target, order, forget_after, emit)
    bucket = F.pmod(F.xxhash64(F.col(id)), F.lit(buckets)).cast("int")
    return (
        rows.select(id, *inputs, target, order, bucket.alias(BUCKET))
        .groupBy(BUCKET)
        .transformWithStateInPandas(learner, schema, "Append", "None" if forget_after is None else "ProcessingTime")
    )


def states(spark: SparkSession, checkpoint: str | Path) -> DataFrame:
    """Return the models of a query's checkpoint: `id` (as JSON: `"a"` or `7`) and `record` (bytes for `keyed.read`)."""
    read = spark.read.format("statestore").option("path", str(checkpoint)).option("stateVarName", VARIABLE)
    return read.load().select("value.*").mapInPandas(_separated, "id string, record binary")


def fleet(
    spark: SparkSession, checkpoint: str | Path, keyed: Keyed, path: str | Path | None = None, **settings: Any
) -> Fleet:
    """Return the models of a query's checkpoint as an `opvi.Fleet` on this machine.

    Args:
        spark: a session.
        checkpoint: the folder of the query's `checkpointLocation`.
        keyed: the `Keyed` that learnt.
        path: the fleet's file; None for one in memory.
        settings: `on_bad`, `hot` and `forget_after`, as for a new fleet.
    """
    made = Fleet.of(keyed, path=path, **settings)
    names, records = [], []
    for row in states(spark, checkpoint).toLocalIterator():
        names.append(json.loads(row["id"]))
        records.append(bytes(row["record"]))
        if len(names) == 1000:
            made.take(names, keyed.read(b"".join(records)))
            names, records = [], []
    made.take(names, keyed.read(b"".join(records)))
    return made


class _Learner(StatefulProcessor):
    """Learns the rows of a bucket; Spark calls it in its workers."""

    def __init__(
        self,
        keyed: bytes,
        id: str,
        inputs: list[str],
        target: str,
        order: str,
        forget_after: float | None,
        emit: Emit,
    ):
        self.pickled, self.forget_after, self.emit = keyed, forget_after, emit
        self.id, self.inputs, self.target, self.order = id, inputs, target, order

    def init(self, handle: Any) -> None:
        """Find the state and the programs."""
        self.keyed = _unpickled(self.pickled)
        self.models = handle.getValueState(VARIABLE, STATE)

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:  # noqa: N802
        """Learn the rows of one trigger."""
        keyed = self.keyed
        parts = list(rows)
        table = parts[0] if len(parts) == 1 else pd.concat(parts, ignore_index=True)
        order = np.argsort(table[self.order].to_numpy(), kind="stable")
        now = 0.0 if self.forget_after is None else timerValues.getCurrentProcessingTimeInMs() / 1000
        names, records, touched = self._kept(now)
        places = {name: place for place, name in enumerate(names)}
        given = table[self.id].to_numpy()[order].tolist()
        code = np.array([places.setdefault(name, len(places)) for name in given], np.int64)
        new = list(places)[len(names) :]
        records = np.concatenate([records, keyed.start(new)]) if new else records
        touched = np.concatenate([touched, np.zeros(len(new))])
        touched[np.unique(code)] = now
        X = np.stack([table[name].to_numpy() for name in self.inputs], 1)[order]  # pandas takes longer than learning
        y = table[self.target].to_numpy()[order]
        out = None
        if self.emit == "predictions":
            head = table[[self.id, self.order]].iloc[order].reset_index(drop=True)
            out = head.assign(**_said(keyed.predict(records, code, X)))
        records, rounds = keyed.learn(records, code, (X, y))
        self.models.update((json.dumps(list(places)), records.tobytes(), touched.tobytes()))
        if out is None:
            out = self._rounds(list(places), keyed, records, rounds)
        yield out

    def close(self) -> None:
        """Do nothing: no resource is held."""

    def _kept(self, now: float) -> tuple[list[Any], np.ndarray, np.ndarray]:
        """Return ids, records and times of the bucket's models, without expired ones."""
        found = self.models.get()
        if found is None:
            return [], self.keyed.read(b""), np.zeros(0)
        names, records, touched = json.loads(found[0]), self.keyed.read(bytes(found[1])), np.frombuffer(found[2])
        if self.forget_after is not None:
            still = touched >= now - self.forget_after
            names = [name for name, stays in zip(names, still, strict=True) if stays]
            records, touched = records[still], touched[still]
        return names, records, touched

    def _rounds(self, names: list[Any], keyed: Keyed, records: np.ndarray, rounds: Any) -> pd.DataFrame:
        """Return what was learnt in each round."""
        code = rounds.code
        last = np.asarray(keyed.states(records).round)[code]
        order = np.argsort(code, kind="stable")
        after = np.empty(len(code), np.int64)  # rounds of the same model that follow
        after[order] = np.searchsorted(code[order], code[order], "right") - 1 - np.arange(len(code))
        info = rounds.info
        return pd.DataFrame(
            {
                self.id: [names[place] for place in code.tolist()],
                "round": last.astype(np.int64) - after,
                "rows": np.zeros(0, np.int64) if info is None else np.asarray(info.rows, np.int64),
                "log_predictive": np.zeros(0) if info is None else np.asarray(info.log_predictive, float),
                "finite": np.zeros(0, bool) if info is None else np.asarray(info.finite),
            }
        )


@lru_cache(maxsize=4)
def _unpickled(data: bytes) -> Keyed:
    """Return the same object in every trigger, so that a worker process compiles once."""
    return cloudpickle.loads(data)


def _classes(said: Any) -> bool:
    return type(said.components).__name__ in ("Categorical", "Bernoulli")


def _said(said: Any) -> dict[str, Any]:
    if _classes(said):
        return {"probabilities": list(np.asarray(said.probabilities(), float))}
    return {"mean": np.asarray(said.mean(), float), "sd": np.asarray(said.sd(), float)}


def _separated(tables: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
    """Return each model of the buckets as a row."""
    for table in tables:
        for names, records in zip(table["ids"], table["records"], strict=True):
            ids = json.loads(names)
            size = len(records) // max(1, len(ids))
            parts = [bytes(records[i * size : (i + 1) * size]) for i in range(len(ids))]
            yield pd.DataFrame({"id": [json.dumps(name) for name in ids], "record": parts})
