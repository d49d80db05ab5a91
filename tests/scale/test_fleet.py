import os
import sqlite3
import subprocess
import sys
import threading
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import opvi
from opvi.predictive import Bernoulli, Categorical, Classes, NegativeBinomial, Normal, Poisson, Predictive, StudentT
from opvi.running import CheckpointError
from opvi.running import _checkpoint as checkpoint
from opvi.running._saving import LockedError
from opvi.scale.fleet import Keyed, _alone, _store
from opvi.scale.fleet import _programs as programs
from opvi.scale.fleet._store import Store

EARLY = pytest.mark.filterwarnings("ignore:.*as on their first day")
TARGET = opvi.linear_regression(2)
SAMPLERS = {  # noise drawn from each model's key; whole numbers among the data; a tracker that scales and calibrates
    "langevin": (opvi.langevin(TARGET, step=0.01), {"particles": 3}, False),
    "linear_ekf": (opvi.linear_ekf(2, 2), {}, True),
    "regressor": (opvi.regressor(2, hidden=(), particles=3), {}, False),
}
LANGEVIN = SAMPLERS["langevin"][0]
FILTER = SAMPLERS["linear_ekf"][0]
ODD = ["../../x", "", "1", 1, -7, "a/b\\c", "nul\0", "é🙂", "x" * 5000, 2**80]


def rows_of(count: int, labels: bool = False, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((count, 2)).astype(np.float32)
    y = X.sum(1) + rng.standard_normal(count).astype(np.float32)
    return X, (y > 0).astype(np.int64) if labels else y


def ragged(count: int, models: int, seed: int = 0) -> list[int]:
    """Ids of rows, some much more frequent than others."""
    return (np.random.default_rng(seed).pareto(1.0, count) * 2).astype(int).clip(0, models - 1).tolist()


def fleet_of(**settings) -> opvi.Fleet:
    return opvi.Fleet(LANGEVIN, 0, **{"batch_size": 4, "particles": 3, **settings})


def same_bits(a, b) -> bool:
    return all(np.array_equal(p, q) for p, q in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def alone(fleet, name, data):
    """The state of the same stream without a fleet."""
    stream = opvi.stream(data, fleet.batch_size)
    return opvi.run(fleet.sampler, stream, fleet.key(name), state=fleet.start(name))[0]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_calls_of_one_row_do_what_a_call_of_all_does(batch_size, tmp_path):
    X, y = rows_of(40)
    ids = ragged(40, 3)
    fleet, bulk = fleet_of(batch_size=batch_size, path=tmp_path / "a"), fleet_of(batch_size=batch_size)
    told = bulk.learn(ids, (X, y))
    rounds = []
    for row, name in enumerate(ids):
        given = X[row : row + 1].astype(float) if row % 3 else X[row : row + 1], y[row : row + 1]
        done = fleet.learn([name] if row % 2 else np.array([name]), given)
        rounds += [(one, np.asarray(done.info.log_predictive)) for one in done.ids]
        if row == 20:
            fleet.save()
    for name in set(ids):
        expected = np.asarray(told.info.log_predictive)[np.array(told.ids) == name]
        assert np.array_equal(np.concatenate([value for one, value in rounds if one == name]), expected)
        assert fleet._record(name).tobytes() == bulk._record(name).tobytes()
    before = fleet._record(0).tobytes()
    for bad in (X[:1] * np.nan, X[:1] + 2e18, X[:1, :1], X[:2]):
        with pytest.raises(ValueError, match="row"):
            fleet.learn([0], (bad, y[:1]))
    for odd in ("0", [True], [0.0], {0: 1}, np.zeros((1, 1), int)):
        with pytest.raises(TypeError):
            fleet.learn(odd, (X[:1], y[:1]))
    assert fleet._record(0).tobytes() == before
    fleet.save()
    fleet.close()
    with opvi.Fleet.load(tmp_path / "a", LANGEVIN) as again:
        assert all(again._record(name).tobytes() == bulk._record(name).tobytes() for name in set(ids))


@pytest.mark.parametrize("most", [None, 2])
def test_single_rows_that_wait_are_seen_by_all_that_looks(most, tmp_path, monkeypatch):
    """They lie beside their records until somebody looks, or until they are too many."""
    X, y = rows_of(60)
    monkeypatch.setattr(_alone, "FRESH_BYTES", _alone.FRESH_BYTES if most is None else most * 4 * (3 * 4 + 2 * 64))
    fleet, bulk = fleet_of(path=tmp_path / "a", hot=8), fleet_of()
    for of in (fleet, bulk):
        of.learn(list(range(5)), (X[:5], y[:5]))
    bulk._keyed.alone = None  # rows go the long way
    looks = {
        9: lambda of: of.waiting(2),
        14: lambda of: of.ids,
        18: lambda of: of.save(tmp_path / "copy"),
        22: lambda of: of.learn([1, 3, 3], (X[:3], y[:3])).ids,
        27: lambda of: len(of.flush().ids),
        33: lambda of: of.forget(4),
        37: lambda of: of.learn(list(range(30, 42)), (X[:12], y[:12])).ids,  # more than are in memory
        41: lambda of: of.predict([0], X[:1]).mean().item(),
    }
    for row in range(5, 60):
        name = row % 4 if row % 3 else 4
        one = fleet.learn([name], (X[row : row + 1], y[row : row + 1])), looks.get(row, len)(fleet)
        other = bulk.learn([name], (X[row : row + 1], y[row : row + 1])), looks.get(row, len)(bulk)
        assert (one[0].ids, one[1]) == (other[0].ids, other[1])
        assert len(fleet._store.fields.fresh) <= (most or 5)
    fleet.save()
    for of in (fleet, bulk):
        of.learn([0], (X[:1], y[:1]))
    assert fleet._store.fields.fresh  # the row did not fill a batch
    fleet.save()
    fleet.close()
    with opvi.Fleet.load(tmp_path / "a", LANGEVIN) as again:
        assert again.ids == bulk.ids
        assert all(again._record(name).tobytes() == bulk._record(name).tobytes() for name in bulk.ids)


def test_what_is_put_or_forgotten_leaves_no_single_row_behind():
    X, y = rows_of(1)
    fleet = fleet_of()
    fleet.learn([0, 1, 2], (X.repeat(3, 0), y.repeat(3)))
    store, new = fleet._store, fleet._keyed.start([0, 2])
    for name in (0, 1, 2):
        fleet.learn([name], (X, y))
    assert len(store.fields.fresh) == 3
    store.put([0], new[:1])
    for name in (1, 2):
        fleet.learn([name], (X, y))
    with store.through() as put:
        put([2], new[1:])
    assert store.get([0, 2])[0].tobytes() == new.tobytes()
    assert not store._used[[owner is None for owner in store._owner]].any()
    for _ in range(2):  # the first fills a batch
        fleet.learn([1], (X, y))
    store.forget(1)
    fleet.learn([9], (X, y))
    assert fleet.waiting(9) == 1
    assert not store._used[[owner is None for owner in store._owner]].any()


@pytest.mark.parametrize("name", ["langevin", "linear_ekf", pytest.param("regressor", marks=pytest.mark.slow)])
def test_a_model_has_the_bits_of_its_stream_run_alone(name):
    sampler, settings, labels = SAMPLERS[name]
    X, y = rows_of(300, labels)
    ids = ragged(300, 30)
    fleet = opvi.Fleet(sampler, 0, batch_size=4, **settings)
    calls = [slice(0, 300)] if name != "langevin" else [slice(0, 1), slice(1, 8), slice(8, 200), slice(200, 300)]
    for part in calls:
        fleet.learn(ids[part], (X[part], y[part]))
    if len(calls) > 1:  # the trackers' programs take long to compile: only full batches
        fleet.flush()
    assert set(fleet.ids) == set(ids)
    assert fleet.diverged == fleet.skipped == 0
    counts = {name: ids.count(name) for name in set(ids)}
    assert max(counts.values()) > 40
    assert min(counts.values()) < 4
    for model in sorted(counts, key=counts.get)[:: len(counts) // 3]:
        state = fleet.state(model)
        assert int(state.rows) == counts[model] - fleet.waiting(model)
        mine = np.flatnonzero(np.array(ids) == model)[: int(state.rows)]
        assert same_bits(state, alone(fleet, model, (X[mine], y[mine])) if len(mine) else fleet.start(model))


def test_lanes_differ_from_a_run_alone_by_rounding_and_not_with_the_company():
    X, y = rows_of(120)
    ids = ragged(120, 20)
    fleet = fleet_of(lanes=8)
    fleet.learn(ids, (X, y))
    for model in (0, ids[-1]):
        mine = np.array(ids) == model
        single = fleet_of(lanes=8)
        single.learn([model] * mine.sum(), (X[mine], y[mine]))
        assert same_bits(fleet.state(model), single.state(model))
        full = np.flatnonzero(mine)[: mine.sum() // 4 * 4]
        particles = alone(fleet, model, (X[full], y[full])).particles if len(full) else fleet.start(model).particles
        # float32, at most 30 rounds of numbers of about 1: some units in the last place of each
        np.testing.assert_allclose(fleet.state(model).particles, particles, rtol=1e-5, atol=1e-5)


def test_samplers_that_factorise_matrices_go_one_at_a_time():
    fleet = opvi.Fleet(FILTER, 0, batch_size=4, lanes=8)
    with pytest.raises(ValueError, match="`lanes` is 8, but this sampler factorises matrices"):
        fleet.learn([0], rows_of(1, labels=True))
    assert len(fleet) == 0
    for fleet, data, threads in ((opvi.Fleet(FILTER, 0), rows_of(1, labels=True), 1), (fleet_of(), rows_of(1), None)):
        fleet.learn([0], data)
        assert fleet._keyed._workers.threads == (threads or len(os.sched_getaffinity(0)))


def test_start_and_key_depend_on_the_id_alone():
    fleet, other = fleet_of(), fleet_of()
    other.learn(ODD, rows_of(len(ODD)))
    assert other.ids == ODD
    starts = [fleet.start(name) for name in ODD]
    assert all(same_bits(start, other.state(name)) for start, name in zip(starts, ODD, strict=True))
    keys = {tuple(np.asarray(jax.random.key_data(fleet.key(name))).tolist()) for name in ODD}
    assert len(keys) == len(ODD)
    assert same_bits(fleet.start(np.int64(1)), fleet.start(1))
    assert same_bits(fleet.start(np.str_("é🙂")), fleet.start("é🙂"))
    drawn = LANGEVIN.init(fleet.key("a"), 3)  # not compiled: other rounding
    np.testing.assert_allclose(fleet.start("a").particles, drawn.particles, rtol=1e-5)
    given = np.ones((3, 3), np.float32)
    assert np.array_equal(fleet_of(particles=given).start("b").particles, given)


def test_rows_wait_until_their_batch_is_full():
    fleet, (X, y) = fleet_of(), rows_of(11)
    learnt = fleet.learn(["a", "b"] * 5 + ["a"], (X, y))
    assert learnt.ids == ["a", "b"]
    assert learnt.info.rows.tolist() == [4, 4]
    assert (fleet.waiting("a"), fleet.waiting("b")) == (2, 1)
    learnt = fleet.learn(["a"] * 11, (X, y))
    assert learnt.ids == ["a"] * 3
    assert learnt.info.rows.tolist() == [8, 12, 16]
    assert (fleet.waiting("a"), fleet.waiting("b")) == (1, 1)
    assert fleet.flush().info.rows.tolist() == [17, 5]
    assert (fleet.waiting("a"), fleet.waiting("b")) == (0, 0)
    assert fleet.flush().ids == []


@dataclass(frozen=True)
class Counting:
    """A sampler that counts how often its methods are traced."""

    sampler: object
    traced: list = field(default_factory=list, compare=False)

    def init(self, *arguments):
        self.traced.append("init")
        return self.sampler.init(*arguments)

    def step(self, *arguments):
        self.traced.append("step")
        return self.sampler.step(*arguments)

    def predict(self, *arguments):
        self.traced.append("predict")
        return self.sampler.predict(*arguments)


@EARLY
def test_few_programs_serve_calls_of_any_length_and_fleets_of_equal_samplers():
    def fleet():
        return opvi.Fleet(Counting(opvi.langevin(TARGET, step=0.01)), 0, batch_size=4, particles=3)

    first, second = fleet(), fleet()
    for ids in ([0] * 4, [0] * 8, np.arange(100).repeat(4)):  # one batch, few, many
        first.learn(ids, rows_of(len(ids)))
        first.predict(ids, rows_of(len(ids))[0])
    before = len(first.sampler.traced)
    assert set(first.sampler.traced) == {"init", "step", "predict"}
    for made in (first, second):
        for count in (1, 3, 17, 61, 260):
            made.learn(ragged(count, 50), rows_of(count))
            made.predict(ragged(count, 50), rows_of(count)[0])
    assert len(first.sampler.traced) == before
    assert second.sampler.traced == []


@pytest.mark.parametrize("name", [None, "fleet"])
def test_cold_models_come_back_with_every_bit_and_every_row(tmp_path, name):
    small, large = fleet_of(hot=3, path=name and tmp_path / name), fleet_of()
    for seed in range(4):
        ids, data = ragged(60, 12, seed), rows_of(60, seed=seed)
        small.learn(ids, data)
        large.learn(ids, data)
    assert small._store.in_memory <= 3
    assert "on disk" in repr(small)
    assert small.ids == large.ids
    for name in large.ids:
        assert small.waiting(name) == large.waiting(name)
        assert same_bits(small.state(name), large.state(name))
    assert small._store.in_memory <= 3
    small.flush()
    large.flush()
    assert all(same_bits(small.state(name), large.state(name)) for name in large.ids)


def test_the_least_recently_used_model_goes_first():
    fleet = fleet_of(hot=2)
    for name in ("a", "b", "a", "c"):
        fleet.learn([name], rows_of(1))
    assert set(fleet._store._places) == {"a", "c"}


def test_a_full_disk_loses_nothing(monkeypatch):
    fleet = fleet_of(hot=2)
    fleet.learn(["a", "b", "a"], rows_of(3))
    before = {name: (fleet.state(name), fleet.waiting(name)) for name in "ab"}

    def full(*_):
        raise OSError("no space left on device")

    for ids in (["c"], ["a", "b", "c", "d"]):  # one that needs room, more than memory holds
        with monkeypatch.context() as patch:
            patch.setattr(Store, "_write", full)
            with pytest.raises(OSError, match="no space"):
                fleet.learn(ids, rows_of(len(ids)))
        assert fleet.ids == ["a", "b"]
        assert len(fleet) == 2
        for name, (state, waiting) in before.items():
            assert same_bits(fleet.state(name), state)
            assert fleet.waiting(name) == waiting
    fleet.learn(["c"], rows_of(1))
    assert len(fleet) == 3


def test_a_failure_on_the_way_leaves_nothing_learnt(monkeypatch):
    """Also where the models do not fit into memory and some have been written already."""
    for hot in (2, 100):
        fleet, (X, y) = fleet_of(hot=hot), rows_of(40)
        fleet.learn(["a"] * 5, rows_of(5))
        before, calls = fleet.state("a"), []

        def fail(self, *given, calls=calls, learn=Keyed.learn_rows):
            calls.append(given)
            if len(calls) == 3 or len(given[0]) > 2:
                raise KeyboardInterrupt
            return learn(self, *given)

        with monkeypatch.context() as patch:
            patch.setattr(Keyed, "learn_rows", fail)
            with pytest.raises(KeyboardInterrupt):
                fleet.learn(["a", *"bcdefgh"] * 5, (X, y))
        assert fleet.ids == ["a"]
        assert len(fleet) == 1
        assert (fleet.waiting("a"), fleet.diverged) == (1, 0)
        assert same_bits(fleet.state("a"), before)
        fleet.learn(["a", *"bcdefgh"] * 5, (X, y))
        assert fleet.ids == list("abcdefgh")


def test_saved_and_loaded_is_the_same_fleet(tmp_path):
    fleet = fleet_of(hot=4)
    assert len(opvi.Fleet.load(fleet.save(tmp_path / "none"), LANGEVIN)) == 0
    ids = [ODD[i] for i in ragged(70, len(ODD))] + ODD
    fleet.learn(ids, rows_of(80))
    path = fleet.save(tmp_path / "saved")
    assert fleet.save(path) == path  # once more, over the first
    assert {each.name for each in tmp_path.iterdir()} <= {"none", "none-wal", "saved"}
    loaded = opvi.Fleet.load(path, LANGEVIN, hot=2)
    assert loaded.ids == fleet.ids
    for one in (fleet, loaded):
        one.learn(ids, rows_of(80, seed=1))
    fresh = ["new"] * 4
    assert fleet.learn(fresh, rows_of(4)).ids == loaded.learn(fresh, rows_of(4)).ids == ["new"]
    for name in fleet.ids:
        assert fleet.waiting(name) == loaded.waiting(name)
        assert same_bits(fleet.state(name), loaded.state(name))
    with pytest.raises(ValueError, match="no file"):
        fleet.save()
    with pytest.raises(FileNotFoundError, match="mkdir"):
        fleet.save(tmp_path / "not" / "there")


def test_what_was_not_saved_is_not_there(tmp_path):
    """Models and cursor are as at the last save, whatever came later, and whether or not it went to the file."""
    path, (X, y) = tmp_path / "fleet", rows_of(40)
    with fleet_of(path=path, hot=2) as fleet:
        assert fleet.cursor is None
        fleet.learn(["a", "b", "c"] * 5, (X[:15], y[:15]))
        fleet.save(cursor={"row": 15, "file": "x.csv"})
        states = {name: fleet.state(name) for name in "abc"}
        fleet.learn(["a", "b", "c", "d"] * 5, (X[15:35], y[15:35]))
        assert len(fleet) == 4
    with pytest.raises(RuntimeError, match="closed"):
        fleet.learn(["z"], (X[:1], y[:1]))
    with fleet_of(path=path) as again:
        assert again.cursor == {"row": 15, "file": "x.csv"}
        assert again.ids == ["a", "b", "c"]
        assert all(same_bits(again.state(name), state) for name, state in states.items())
        assert again.waiting("a") == 1
        again.save()
        assert again.cursor["row"] == 15  # as it was


@EARLY
def test_a_save_writes_what_was_touched(tmp_path, monkeypatch):
    fleet, written = fleet_of(path=tmp_path / "fleet"), []
    write = Store._write
    monkeypatch.setattr(Store, "_write", lambda self, ids, *rest: (written.append(list(ids)), write(self, ids, *rest)))
    fleet.learn(list("abcdef"), rows_of(6))
    fleet.save()
    fleet.predict(["a", "b"], rows_of(2)[0])
    fleet.save()
    fleet.learn(["c"], rows_of(1))
    fleet.save()
    assert written == [list("abcdef"), ["c"]]


def test_a_second_writer_is_refused(tmp_path):
    path = tmp_path / "fleet"
    first = fleet_of(path=path)
    first.learn(["a"], rows_of(1))
    first.save()
    with pytest.raises(LockedError, match="in use by another fleet"):
        fleet_of(path=path)
    program = f"import sqlite3; sqlite3.connect({str(path)!r}, timeout=0).execute('SELECT count(*) FROM models')"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "locked" in other.stderr
    first.close()
    assert fleet_of(path=path).ids == ["a"]


def test_two_threads_lose_no_row():
    fleet, (X, y) = fleet_of(batch_size=1, hot=3), rows_of(400)
    ids = np.arange(400) % 5

    def learn(mine):
        for row in mine:
            fleet.learn(ids[row : row + 1], (X[row : row + 1], y[row : row + 1]))
            fleet.predict([int(ids[row])], X[row : row + 1])

    threads = [threading.Thread(target=learn, args=(range(begin, 400, 4),)) for begin in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [int(fleet.state(name).rows) for name in range(5)] == [80] * 5


def test_models_without_rows_are_forgotten(tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(_store, "steady_time", lambda: now[0])
    for hot in (2, 100):
        fleet = fleet_of(path=tmp_path / f"fleet{hot}", forget_after=60, hot=hot)
        fleet.learn(["a"] * 5 + ["b", "c"], rows_of(7))
        now[0] += 50
        fleet.learn(["b"], rows_of(1))
        assert fleet.ids == ["a", "b", "c"]
        now[0] += 20  # 70 after the last row of a and c, 20 after b's
        assert fleet.ids == ["b"]
        assert "a" not in fleet
        fleet.learn(["a"], rows_of(1))
        assert same_bits(fleet.state("a"), fleet.start("a"))  # begun anew
        assert (fleet.waiting("a"), fleet.waiting("b")) == (1, 2)
        fleet.save()
        assert len(fleet) == 2
        fleet.close()
        assert len(fleet_of(path=tmp_path / f"fleet{hot}")) == 2
    with pytest.raises(ValueError, match="`forget_after` is 0"):
        fleet_of(forget_after=0)


def test_a_clock_that_is_set_makes_no_model_expire_or_live_forever(tmp_path, monkeypatch):
    with fleet_of(path=tmp_path / "fleet", forget_after=60) as fleet:
        fleet.learn(["a"], rows_of(1))
        monkeypatch.setattr(_store.time, "time", lambda: 1e12)
        fleet.learn(["b"], rows_of(1))
        fleet.save()
        assert fleet.ids == ["a", "b"]
    monkeypatch.setattr(_store, "STARTED", _store.STARTED - 1e6)  # a later process, on a machine whose clock is late
    with fleet_of(path=tmp_path / "fleet", forget_after=60) as fleet:
        assert fleet.ids == ["a", "b"]
        monkeypatch.setattr(_store, "STARTED", _store.STARTED + 61)
        assert fleet.ids == []


def test_loading_refuses_what_is_not_the_fleet(tmp_path):
    path = tmp_path / "fleet"
    with pytest.raises(FileNotFoundError, match="is not a saved fleet"):
        opvi.Fleet.load(path, LANGEVIN)
    with fleet_of(path=path) as fleet:
        fleet.learn(["a", "b"], rows_of(2))
        fleet.save()
    for settings in ({"batch_size": 5}, {"particles": 4}):
        with pytest.raises(ValueError, match=f"another sampler: `{next(iter(settings))}` was"):
            fleet_of(path=path, **settings)
    with pytest.raises(ValueError, match="another sampler: `sampler` was langevin, and is linearekf"):
        opvi.Fleet.load(path, FILTER)
    with pytest.raises(ValueError, match="another sampler: `key"):
        opvi.Fleet(LANGEVIN, 1, path=path, batch_size=4, particles=3)

    def tampered(query):
        database = sqlite3.connect(path)
        database.execute(query)
        database.commit()
        database.close()

    tampered("PRAGMA user_version = 4")
    with pytest.raises(CheckpointError, match="newer"):
        fleet_of(path=path)
    tampered("PRAGMA user_version = 3")
    tampered("UPDATE models SET record = CAST(x'7f' || substr(record, 2) AS BLOB) WHERE number = 0")
    with fleet_of(path=path) as fleet:
        assert fleet.waiting("b") == 1
        with pytest.raises(CheckpointError, match="the model of 'a' is damaged"):
            fleet.learn(["a", "b"], rows_of(2))
        assert fleet.waiting("b") == 1
    other = tmp_path / "other"
    other.write_text("not a database" * 100)
    with pytest.raises(CheckpointError, match="is not a saved fleet"):
        fleet_of(path=other)
    (tmp_path / "fleet.opvi").write_bytes(b"")
    with pytest.raises(CheckpointError, match="a folder of a format that this opvi does not read"):
        opvi.Fleet.load(tmp_path, LANGEVIN)
    with pytest.raises(FileNotFoundError, match="mkdir"):
        fleet_of(path=tmp_path / "no" / "fleet")


@pytest.fixture
def stranger(tmp_path):
    """A saved fleet of 50 models, and how somebody else changes its file."""
    path = tmp_path / "fleet"
    with fleet_of(path=path) as fleet:
        fleet.learn(list(range(50)) * 5, rows_of(250))
        fleet.save(cursor=250)

    def tampered(*queries):
        database = sqlite3.connect(path)
        database.execute("PRAGMA writable_schema = ON")
        for query in queries:
            database.execute(query)
        database.commit()
        database.close()

    return path, tampered


@pytest.mark.parametrize(
    "query",
    [
        "CREATE TRIGGER t AFTER UPDATE ON models BEGIN DELETE FROM models WHERE number != NEW.number; END",
        "CREATE TRIGGER t AFTER INSERT ON about BEGIN DELETE FROM models; END",
        "CREATE VIEW v AS SELECT 1",
        "CREATE TABLE more (a)",
        "CREATE INDEX mine ON models (record)",
        "CREATE INDEX age ON models (touched + 1)",
        "ALTER TABLE models ADD COLUMN g AS (number + 1)",
        "UPDATE sqlite_master SET sql = replace(sql, 'NOT NULL', '') WHERE name = 'models'",
        "UPDATE sqlite_master SET sql = replace(sql, 'BLOB NOT NULL)', 'BLOB CHECK (1))') WHERE name = 'models'",
    ],
)
def test_another_schema_is_refused_before_anything_is_asked(stranger, query):
    path, tampered = stranger
    tampered(query)
    for open_it in (lambda: opvi.Fleet.load(path, LANGEVIN), lambda: fleet_of(path=path, forget_after=1e9)):
        with pytest.raises(CheckpointError, match=r"its tables differ|is damaged"):
            open_it()


def test_a_view_that_never_ends_is_not_asked(stranger):
    path, tampered = stranger
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS one, i AS value FROM n"
    tampered("DROP TABLE about", f"CREATE VIEW about AS {endless}")
    with pytest.raises(CheckpointError, match="its tables differ"):
        opvi.Fleet.load(path, LANGEVIN)


def test_a_question_that_never_ends_is_ended(stranger, monkeypatch):
    path, _ = stranger
    monkeypatch.setattr(_store, "STEPS", (10**5, 1))
    with fleet_of(path=path) as fleet:
        endless = "SELECT * FROM (WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT sum(i) FROM n)"
        with pytest.raises(OSError, match="interrupted"):
            fleet._store._run(endless)
        fleet.learn([1], rows_of(1))  # what was learnt is still there, and learning goes on
        assert len(fleet.ids) == 50


@pytest.mark.parametrize(
    ("query", "words"),
    [
        (
            "UPDATE models SET record = (SELECT record FROM models WHERE number = 1) WHERE number = 0",
            "the model of 0 is damaged",
        ),
        ("UPDATE models SET record = zeroblob(10) WHERE number = 0", "the model of 0 is damaged"),
        ("UPDATE models SET record = 'text' WHERE number = 0", "the model of 0 is damaged"),
        ("UPDATE models SET touched = 'soon' WHERE number = 0", "the model of 0 is damaged"),
        ("UPDATE models SET id = 7 WHERE number = 0", "a model has no id"),
        ("UPDATE models SET id = x'00' WHERE number = 0", "a model has no id"),
        ("UPDATE about SET value = 'text'", "does not say what its models are"),
        ("UPDATE about SET value = x'00'", "is not an opvi checkpoint"),
        ("DELETE FROM about", "does not say what its models are"),
    ],
)
def test_values_that_no_fleet_writes_are_damage(stranger, query, words):
    path, tampered = stranger
    tampered(query)
    with pytest.raises(CheckpointError, match=words), opvi.Fleet.load(path, LANGEVIN) as fleet:
        _ = fleet.ids, fleet.state(0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", 10**12),
        ("batch_size", "4"),
        ("particles", "3"),
        ("key", 1),
        ("pool", 1),
        ("settings", []),
        ("extra", 1),
        ("rows", 1),
        ("cursor", "…"),
    ],
)
def test_what_is_saved_beside_the_models_is_checked(stranger, name, value):
    path, tampered = stranger
    store = Store(path, None)
    about = {**store.about, name: value}
    store.close()
    blob = b"".join(checkpoint.packed(about)).hex()
    tampered(f"UPDATE about SET value = x'{blob}'")
    if name == "cursor":
        return opvi.Fleet.load(path, LANGEVIN).close()
    with pytest.raises((CheckpointError, ValueError)):
        opvi.Fleet.load(path, LANGEVIN)
    return None


def test_rows_that_wait_are_spoken_of(tmp_path):
    fleet, (X, y) = fleet_of(), rows_of(8)
    with pytest.warns(UserWarning, match="has learnt nothing yet"):
        fleet.predict(["a"], X[:1])
    fleet.learn(["a"] * 3 + ["b"] * 4, (X[:7], y[:7]))
    with pytest.warns(UserWarning, match="1 of these models have rows, but too few for a batch of 4"):
        fleet.predict(["a", "b", "new"], X[:3])
    fleet.predict(["b", "new"], X[:2])
    fleet.flush()
    fleet.predict(["a"], X[:1])


def nested_rows(params, rows):
    (x, group), named = rows
    return -((named["y"] - x @ params - group) ** 2)


def zero(params):
    return jnp.zeros(())


def two_normals(key):
    return jax.random.normal(key, (2,))


def test_rows_in_any_nesting_are_learnt_and_loaded(tmp_path):
    sampler = opvi.langevin(opvi.target(zero, nested_rows, two_normals), step=0.01)
    fleet, (X, y) = opvi.Fleet(sampler, 0, batch_size=4, particles=3), rows_of(7)
    rows = ((X, np.ones(7, np.float32)), {"y": y})
    fleet.learn(["a"] * 7, rows)
    loaded = opvi.Fleet.load(fleet.save(tmp_path / "fleet"), sampler)
    for one in (fleet, loaded):
        one.learn(["a"] * 7, [list(rows[0]), rows[1]])
        one.flush()
    assert int(loaded.state("a").rows) == 14
    assert same_bits(fleet.state("a"), loaded.state("a"))


def test_lists_of_numbers_are_arrays():
    X, y = rows_of(12)
    expected = fleet_of()
    expected.learn(["a"] * 12, (X, y))
    for rows in (
        (X.tolist(), y.tolist()),
        [X.tolist(), y.tolist()],
        ([tuple(row) for row in X], list(y)),
        [X, list(y)],
    ):
        fleet = fleet_of()
        fleet.learn(["a"] * 12, rows)
        assert same_bits(fleet.state("a"), expected.state("a"))
        fleet.learn(["a"], (X[:1].tolist(), [1.5]))
        assert fleet.waiting("a") == 1
        assert np.array_equal(
            fleet.predict(["a"] * 2, X[:2].tolist()).mean(), expected.predict(["a"] * 2, X[:2]).mean()
        )


X3, Y3 = rows_of(3)
BAD = np.array([0.0, np.nan, 1.0], np.float32)


@pytest.mark.parametrize(
    ("ids", "data", "error", "words"),
    [
        (["a", "b", "c"], (X3, BAD), ValueError, "1 of 3 rows"),
        (["a", "b", "c"], (np.full((3, 2), np.inf), Y3), ValueError, "3 of 3 rows"),
        (["a", "b"], (X3, Y3), ValueError, "2 entries and the data 3 rows"),
        (["a", "b", "c"], (X3, Y3[:2]), ValueError, "same number of rows"),
        (["a", "b", "c"], (X3[:, :1], Y3), ValueError, "rows changed"),
        (["a", "b", "c"], X3, ValueError, "rows changed"),
        (["a", "b", "c"], (X3.astype(complex), Y3), ValueError, "rows changed"),
        (["a", "b", "c"], (X3.astype(str), Y3), ValueError, "rows changed"),
        (["a", "b", "c"], ([[1, 2], [3], [4, 5]], Y3), ValueError, "the rows do not have one shape"),
        (["a", "b", "c"], (X3.tolist(), [1, "2", 3]), ValueError, "the rows hold '2', a str"),
        (["a", "b", "c"], (X3, None), ValueError, "the rows hold None"),
        ({"a", "b", "c"}, (X3, Y3), TypeError, "one id per row"),
        (["a", "b", "c"], {"X": X3, "y": Y3}, ValueError, "now is {'X': 'float32 \\(2,\\)'"),
        ("abc", (X3, Y3), TypeError, "one id per row"),
        (5, (X3, Y3), TypeError, "one id per row"),
        (np.array([["a"], ["b"], ["c"]]), (X3, Y3), TypeError, "one id per row"),
        ([["a"], "b", "c"], (X3, Y3), TypeError, "is a list"),
        ([True, "b", "c"], (X3, Y3), TypeError, "True is a bool"),
        ([1.5, "b", "c"], (X3, Y3), TypeError, "1.5 is a float"),
        ([None, "b", "c"], (X3, Y3), TypeError, "None"),
    ],
)
def test_bad_calls_change_nothing(ids, data, error, words):
    fleet = fleet_of()
    fleet.learn(["a"] * 3, (X3, Y3))
    before = fleet.state("a")
    with pytest.raises(error, match=words):
        fleet.learn(ids, data)
    assert fleet.ids == ["a"]
    assert fleet.waiting("a") == 3
    assert same_bits(fleet.state("a"), before)


def test_the_first_rows_must_suit_the_sampler():
    fleet = fleet_of()
    with pytest.raises(ValueError, match="log_likelihood"):
        fleet.learn(["a"], (np.zeros((1, 5), np.float32), np.zeros(1, np.float32)))
    with pytest.raises(ValueError, match="1 of 1 rows"):
        fleet.learn(["a"], (np.full((1, 2), np.nan), np.zeros(1)))
    assert len(fleet) == 0
    assert fleet.learn([], (np.zeros((0, 2)), np.zeros(0))).ids == []
    fleet.learn(["a"], rows_of(1))
    assert fleet.learn([], rows_of(0)).ids == []
    assert fleet.ids == ["a"]


def test_bad_rows_are_left_out_and_counted():
    fleet, clean = fleet_of(on_bad="skip"), fleet_of()
    X, y = rows_of(9)
    y[4] = np.nan
    fleet.learn(["a"] * 9, (X, y))
    clean.learn(["a"] * 8, (np.delete(X, 4, 0), np.delete(y, 4)))
    assert fleet.skipped == 1
    assert same_bits(fleet.state("a"), clean.state("a"))
    fleet.learn(["a", "b"], (np.zeros((2, 7)), np.zeros(2)))
    assert fleet.skipped == 3
    assert fleet.ids == ["a"]


def test_a_model_whose_update_is_not_finite_stays_and_the_others_go_on():
    fleet, (X, y) = fleet_of(), rows_of(8)
    ids = ["a", "b"] * 4
    fleet.learn(ids, (X, y))
    before = fleet.state("a").particles
    X[::2] = 1e17  # of "a": allowed, but its fourth power is beyond float32
    y[::2] = -1e18
    learnt = fleet.learn(ids, (X, y))
    assert dict(zip(learnt.ids, learnt.info.finite.tolist(), strict=True)) == {"a": False, "b": True}
    assert fleet.diverged == 1
    assert np.array_equal(fleet.state("a").particles, before)
    assert int(fleet.state("b").rows) == 8


def test_a_forgotten_model_begins_anew(tmp_path):
    fleet = fleet_of(hot=1)
    fleet.learn(["a"] * 5 + ["b"] * 5, rows_of(10))
    for name in ("a", "b"):  # one on disk, one in memory
        assert name in fleet
        fleet.forget(name)
        assert name not in fleet
        with pytest.raises(KeyError, match="no model for"):
            fleet.state(name)
    fleet.learn(["a", "b"], rows_of(2))
    assert same_bits(fleet.state("a"), fleet.start("a"))
    assert fleet.waiting("a") == 1
    for call in (fleet.waiting, fleet.forget):
        with pytest.raises(KeyError, match="no model for 'c'"):
            call("c")
    assert ["a"] not in fleet  # what cannot be an id is not there


def test_each_row_is_predicted_by_its_own_model():
    fleet, (X, y) = fleet_of(hot=2), rows_of(120)
    fleet.learn(np.arange(120) % 4, (X, y))
    ids = [3, 0, 3, "new", 1]
    said = fleet.predict(ids, X[:5])
    assert len(fleet) == 4  # a question makes no model
    for row, name in enumerate(ids):
        state = fleet.state(name) if name in fleet else fleet.start(name)
        own = LANGEVIN.predict(state, X[row : row + 1])
        np.testing.assert_allclose(said.mean()[row], own.mean()[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(said.sd()[row], own.sd()[0], rtol=1e-5)
    with pytest.raises(ValueError, match="1 of 2 rows"):
        fleet.predict([0, 1], np.array([[0, 1], [0, np.nan]]))
    with pytest.raises(ValueError, match="one id per row"):
        fleet.predict([0], X[:2])


@EARLY
def test_a_plain_sampler_predicts_with_its_particles():
    fleet = fleet_of()
    own = opvi.predict(TARGET, fleet.start("a").particles, X3)
    np.testing.assert_allclose(fleet.predict(["a"] * 3, X3).mean(), own.mean(), rtol=1e-5)


def test_weights_and_temperatures_go_with_their_rows():
    logits = np.array([[[[0.0, 1.0]], [[2.0, 0.0]]], [[[1.0, 0.0]], [[0.0, 3.0]]]], np.float32)  # [rows, n, 1, classes]
    weights = np.log(np.array([[[0.2], [0.8]], [[0.7], [0.3]]], np.float32))
    heat = np.array([0.5, 3.0], np.float32)
    said = programs.by_row(Predictive(Categorical(logits), weights, heat))
    each = [Predictive(*map(jnp.asarray, one)) for one in zip(logits, weights, heat, strict=True)]
    expected = [p._replace(components=Categorical(p.components)).probabilities() for p in each]
    np.testing.assert_allclose(said.probabilities(), np.concatenate(expected), rtol=1e-5)


def rows_in_turn(*shape):
    """Return numbers of one sign, `[rows, particles, 1, ...]`."""
    return np.random.default_rng(0).gamma(2.0, size=(3, 4, 1, *shape)).astype(np.float32)


HEADS = {
    Normal: (rows_in_turn(), rows_in_turn()),
    StudentT: (rows_in_turn(), 1 + rows_in_turn(), 2.5 + np.float32(rows_in_turn() > 1), rows_in_turn() / 9),
    Poisson: (rows_in_turn(),),
    NegativeBinomial: (rows_in_turn(), rows_in_turn()),
    Bernoulli: (rows_in_turn(),),
    Categorical: (rows_in_turn(2),),
}


@pytest.mark.parametrize("head", HEADS)
def test_arrays_of_numpy_give_the_bits_of_jaxs_in_every_method(head):
    weights = np.full((3, 4, 1), np.log(0.25), np.float32)
    said = programs.by_row(Predictive(head(*HEADS[head]), weights))
    assert {type(leaf) for leaf in jax.tree.leaves(said)} == {np.ndarray}
    plain, keys = jax.tree.map(jnp.asarray, said), jax.random.split(jax.random.key(0), 3)
    ask = [lambda p: p.log_density(np.ones(3, np.float32)), lambda p: jax.vmap(lambda key: p.sample(key, 2))(keys)]
    if isinstance(said.components, Classes):
        ask += [Predictive.probabilities, Predictive.classes, Predictive.uncertainty]
    else:
        ask += [Predictive.mean, Predictive.sd, Predictive.uncertainty, lambda p: p.cdf(np.ones(3, np.float32))]
    for question in ask:
        assert same_bits(question(said), question(plain))


TWICE = """
import jax, numpy as np, opvi
compiled = []
hear = lambda name, _, **of: compiled.append(of["fun_name"]) if name.endswith("backend_compile_duration") else None
jax.monitoring.register_event_duration_secs_listener(hear)
fleet = opvi.Fleet(opvi.gauss_newton(opvi.linear_regression(2)), 0, batch_size=1, particles=3)
X = np.random.default_rng(0).normal(size=(2, 2))
for rows in (1, 2):
    fleet.learn([0, 1][:rows], (X[:rows], X[:rows, 0]))
    said = fleet.predict([0], X[:1])
names = {f"jit({name})" for name in ("advance", "advance_one_closed", "answer")}
print(sorted(names & {*compiled}), fleet.state(0).particles.tolist(), said.components.mean.tolist())
"""


@pytest.mark.slow
def test_the_next_process_finds_a_fleet_s_programs(tmp_path):
    command, env = [sys.executable, "-c", TWICE], {**os.environ, "OPVI_PROGRAMS": str(tmp_path)}
    first, second = (subprocess.run(command, env=env, capture_output=True, text=True, check=True) for _ in range(2))
    assert first.stdout.startswith("['jit(advance)', 'jit(advance_one_closed)', 'jit(answer)']")
    assert second.stdout == "[]" + first.stdout[first.stdout.index("]") + 1 :]


@EARLY
def test_a_call_of_a_new_size_compiles_nothing():
    fleet = opvi.Fleet(opvi.regressor(2, hidden=(), particles=2), 0, batch_size=1)
    X, _ = rows_of(20)
    fleet.predict([0] * 2, X[:2])
    heard = []

    def hear(name, *_, **__):
        heard.append(name)

    jax.monitoring.register_event_duration_secs_listener(hear)
    for rows in (13, 14, 19):
        fleet.predict([0] * rows, X[:rows])
    jax.monitoring.unregister_event_duration_listener(hear)
    assert not [name for name in heard if "compile" in name]


def test_long_numbers_stay_long_in_every_thread():
    with jax.enable_x64(True):
        fleet = fleet_of(particles=np.zeros((3, 3)))
        X, y = rows_of(160)
        X, y = X.astype(float), y.astype(float)
        fleet.learn(np.arange(40).repeat(4), (X, y))
        assert fleet.state(7).particles.dtype == np.float64
        assert same_bits(fleet.state(7), alone(fleet, 7, (X[28:32], y[28:32])))


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"batch_size": 0}, ValueError, "`batch_size` is 0"),
        ({"batch_size": 2.5}, ValueError, "`batch_size` is 2.5"),
        ({"hot": 0}, ValueError, "`hot` is 0"),
        ({"lanes": True}, ValueError, "`lanes` is True"),
        ({"on_bad": "ignore"}, ValueError, "`on_bad` is 'ignore'"),
        ({"particles": 0}, ValueError, "`particles` is 0"),
        ({"particles": np.full((3, 3), np.nan)}, ValueError, "NaN"),
        ({"particles": np.zeros((3, 7))}, ValueError, "3 parameters"),
    ],
)
def test_bad_settings_are_named(settings, error, words):
    with pytest.raises(error, match=words):
        fleet_of(**settings)


def test_particles_may_be_worked_out_from_the_state():
    classifier = opvi.classifier(2, 2, hidden=())
    assert opvi.Fleet(classifier, 0)._keyed._float == np.float32


def test_bad_samplers_are_named():
    with pytest.raises(TypeError, match="a sampler is needed"):
        opvi.Fleet(TARGET, 0)

    class Looking(Counting):
        def init(self, key, *particles):
            return self.sampler.init(key, *particles) if jax.random.uniform(key) > 0 else None

    with pytest.raises(TypeError, match="`init` depends on values"):
        opvi.Fleet(Looking(LANGEVIN), 0)
    with pytest.raises(TypeError, match="`key` is 'a'"):
        opvi.Fleet(LANGEVIN, "a")
