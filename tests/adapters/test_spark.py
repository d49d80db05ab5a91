"""Inside Spark: with a session where that is the point (marked `spark`), by calling what Spark would call elsewhere."""

import os
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

import opvi
from opvi.scale import Keyed

pytest.importorskip("pyspark", minversion="4.0", reason="PySpark 4 is not installed")
from opvi.adapters import spark as adapter

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning",  # PySpark 4 and pandas 3
    "ignore::ResourceWarning",
    "ignore:os.fork:RuntimeWarning",  # to start Java
)
COLUMNS = ["x0", "x1"]


def rows_of(count: int, models: int, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((count, 2)).astype(np.float32)
    y = X.sum(1) + rng.standard_normal(count).astype(np.float32)
    ids = [f"m{i}" for i in rng.integers(0, models, count)]
    return pd.DataFrame({"id": ids, "x0": X[:, 0], "x1": X[:, 1], "y": y, "t": np.arange(count)})


def keyed_of(sampler=None, example=None) -> Keyed:
    example = (np.zeros((1, 2), np.float32), np.zeros(1, np.float32)) if example is None else example
    sampler = sampler or opvi.langevin(opvi.linear_regression(2), step=0.01)
    return Keyed(sampler, 0, example=example, batch_size=4, particles=3)


KEYED = keyed_of()


def calm(table: pd.DataFrame) -> opvi.Fleet:
    made = opvi.Fleet.of(KEYED)
    made.learn(table["id"].tolist(), (table[COLUMNS].to_numpy(), table["y"].to_numpy()))
    return made


class Bucket:
    """A state of one bucket, as Spark hands it out, and a clock."""

    def __init__(self, keyed=KEYED, emit="predictions", forget_after=None):
        pickled = adapter.cloudpickle.dumps(keyed)
        self.learner = adapter._Learner(pickled, "id", COLUMNS, "y", "t", forget_after, emit)
        self.value, self.now = None, 0
        self.learner.init(SimpleNamespace(getValueState=lambda name, schema: self))

    def get(self):
        return self.value

    def update(self, value):
        self.value = value

    def trigger(self, *tables: pd.DataFrame) -> pd.DataFrame:
        clock = SimpleNamespace(getCurrentProcessingTimeInMs=lambda: self.now)
        return pd.concat(list(self.learner.handleInputRows((0,), iter(tables), clock)))

    def models(self) -> dict[str, bytes]:
        flat = pd.concat(adapter._separated(iter([pd.DataFrame([self.value], columns=["ids", "records", "touched"])])))
        return dict(zip(flat["id"], flat["record"], strict=True))


def test_rows_are_put_in_order_and_models_are_those_of_a_fleet():
    table, bucket = rows_of(60, 5), Bucket()
    mixed = table[:40].sample(frac=1, random_state=0)
    said = [bucket.trigger(mixed[:7], mixed[7:]), bucket.trigger(table[40:])]
    made = calm(table)
    assert bucket.models() == {f'"{name}"': made._record(name).tobytes() for name in made.ids}
    assert pd.concat(said)["t"].tolist() == list(range(60))
    begun = calm(table[:40]).predict(table["id"][40:].tolist(), table[COLUMNS][40:].to_numpy())
    np.testing.assert_allclose(said[1]["mean"], begun.mean(), rtol=1e-6)
    np.testing.assert_allclose(said[1]["sd"], begun.sd(), rtol=1e-6)


def test_rounds_are_numbered():
    table, bucket = rows_of(40, 3), Bucket(emit="rounds")
    told = pd.concat([bucket.trigger(table[:25]), bucket.trigger(table[25:])])
    counts = table["id"].value_counts()
    for name, mine in told.groupby("id"):
        assert mine["round"].tolist() == list(range(1, counts[name] // 4 + 1))
        assert mine["rows"].tolist() == [4 * k for k in mine["round"]]
    assert told["finite"].all()
    assert len(Bucket(emit="rounds").trigger(table[:1])) == 0


def test_models_without_rows_are_forgotten():
    table, bucket = rows_of(20, 2), Bucket(forget_after=60)
    first, other = table[table["id"] == "m0"], table[table["id"] == "m1"]
    bucket.trigger(table)
    bucket.now = 50_000
    bucket.trigger(first)
    bucket.now = 70_000
    bucket.trigger(first[:1])
    assert list(bucket.models()) == ['"m0"']
    bucket.trigger(other[:1])
    assert KEYED.read(bucket.models()['"m1"'])["waiting"].tolist() == [1]


def test_classes_are_told_by_probabilities():
    keyed = keyed_of(opvi.linear_ekf(2, 3), (np.zeros((1, 2), np.float32), np.zeros(1, np.int32)))
    table = rows_of(8, 2).assign(y=np.arange(8) % 3)
    said = np.stack(Bucket(keyed).trigger(table)["probabilities"])
    np.testing.assert_allclose(said.sum(1), 1, rtol=1e-5)
    assert said.shape == (8, 3)


@pytest.fixture(scope="module")
def session():
    if shutil.which("java") is None:
        pytest.skip("Spark needs Java (on Debian: `apt-get install default-jre-headless`), and there is none")
    os.environ["PYSPARK_PYTHON"] = sys.executable
    build = adapter.SparkSession.builder.master("local[1]")
    for name, value in {
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.driver.host": "127.0.0.1",
        "spark.sql.session.timeZone": "UTC",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }.items():
        build = build.config(name, value)
    made = build.getOrCreate()
    yield made
    made.stop()


@pytest.mark.spark
def test_a_query_learns_and_resumes_with_the_bits_of_a_fleet(session, tmp_path):
    table, source = rows_of(90, 12), tmp_path / "in"
    source.mkdir()
    schema = "id string, x0 float, x1 float, y float, t long"

    def run():
        rows = session.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(source))
        out = adapter.learn(rows, KEYED, id="id", inputs=COLUMNS, target="y", order="t", buckets=3)
        query = out.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "kept"))
        query.trigger(availableNow=True).start(str(tmp_path / "out")).awaitTermination()

    for number, part in enumerate((table[:30], table[30:60], table[60:])):
        part.to_parquet(source / f"{number}.parquet")
        os.utime(source / f"{number}.parquet", (number, number))  # Spark reads files in the order of their times
        if number:
            run()  # once with two triggers, once more from the checkpoint
    found = adapter.fleet(session, tmp_path / "kept", KEYED, path=tmp_path / "fleet")
    made = calm(table)
    assert sorted(found.ids) == sorted(made.ids)
    assert all(found._record(name).tobytes() == made._record(name).tobytes() for name in made.ids)
    assert sorted(pd.read_parquet(tmp_path / "out")["t"]) == list(range(90))
    found.close()
    with pytest.raises(ValueError, match="no column 'z'"):
        adapter.learn(session.createDataFrame(table), KEYED, id="z", inputs=COLUMNS, target="y", order="t")
