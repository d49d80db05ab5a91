import pickle

import cloudpickle
import jax
import numpy as np
import pytest

import opvi
from benchmarks import fleet_kills
from opvi.scale import Keyed
from opvi.scale.fleet import _alone
from opvi.scale.fleet._alone import Alone, Fields, Parcel, closed, small
from opvi.scale.fleet._ids import as_bytes, from_bytes
from opvi.scale.fleet._programs import Form

LANGEVIN = opvi.langevin(opvi.linear_regression(2), step=0.01)


def rows_of(count: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((count, 2)).astype(np.float32)
    return X, X.sum(1) + rng.standard_normal(count).astype(np.float32)


def keyed_of(**settings) -> Keyed:
    return Keyed(LANGEVIN, 0, **{"example": rows_of(1), "batch_size": 4, "particles": 3, **settings})


KEYED = keyed_of()


def test_bits_depend_on_the_id_and_its_rows_alone():
    X, y = rows_of(60)
    code = np.random.default_rng(1).integers(0, 5, 60)
    together, first = KEYED.learn(KEYED.start(list("abcde")), code[:33], (X[:33], y[:33]))
    together, second = KEYED.learn(together, code[33:], (X[33:], y[33:]))
    rounds = np.concatenate([first.code, second.code])
    for place, name in enumerate("abcde"):
        mine = code == place
        alone = KEYED.start([name])
        for X1, y1 in zip(X[mine], y[mine], strict=True):  # row by row
            alone, _ = KEYED.learn(alone, [0], (X1[None], y1[None]))
        assert alone[0].tobytes() == together[place].tobytes()
        assert (rounds == place).sum() == mine.sum() // 4
    state, _ = opvi.run(
        LANGEVIN,
        opvi.stream((X[code == 2][:4], y[code == 2][:4]), 4),
        KEYED.key("c"),
        state=jax.tree.map(lambda leaf: leaf[0], KEYED.states(KEYED.start(["c"]))),
    )
    first, _ = KEYED.learn(KEYED.start(["c"]), np.zeros(4, int), (X[code == 2][:4], y[code == 2][:4]))
    np.testing.assert_array_equal(KEYED.states(first).particles[0], state.particles)


def test_functions_are_pure_and_records_go_through_bytes():
    records = KEYED.start(["a", 1])
    before = records.tobytes()
    learnt, rounds = KEYED.learn(records, [0, 1, 0, 0, 0], rows_of(5))
    assert records.tobytes() == before
    assert rounds.code.tolist() == [0]
    assert learnt["waiting"].tolist() == [0, 1]
    again = KEYED.read(learnt.tobytes())
    flushed, rounds = KEYED.flush(again)
    assert rounds.code.tolist() == [1]
    assert again.tobytes() == learnt.tobytes()
    assert KEYED.states(flushed).rows.tolist() == [4, 1]
    np.testing.assert_allclose(
        KEYED.predict(flushed, [1, 0], rows_of(2)[0]).mean(),
        [
            LANGEVIN.predict(jax.tree.map(lambda leaf, i=i: leaf[i], KEYED.states(flushed)), x[None]).mean()[0]
            for i, x in zip([1, 0], rows_of(2)[0], strict=True)
        ],
        rtol=1e-5,
    )
    copy = pickle.loads(cloudpickle.dumps(KEYED))
    assert copy.learn(copy.read(before), [0, 1, 0, 0, 0], rows_of(5))[0].tobytes() == learnt.tobytes()


def test_records_of_another_sampler_or_settings_are_refused():
    records = KEYED.start(["a"])
    others = [
        keyed_of(batch_size=5),
        keyed_of(particles=4),
        Keyed(LANGEVIN, 1, example=rows_of(1), batch_size=4, particles=3),
        Keyed(opvi.langevin(opvi.linear_regression(2), step=0.02), 0, example=rows_of(1), batch_size=4, particles=3),
    ]
    for other in others:
        with pytest.raises(ValueError, match="records of another sampler"):
            other.learn(records, [0], rows_of(1))
    with pytest.raises(ValueError, match="are not records of"):
        KEYED.read(b"x" * 7)
    with pytest.raises(ValueError, match="records of another sampler"):
        KEYED.read(b"x" * KEYED.dtype.itemsize)
    assert len({int(other.fingerprint) for other in [KEYED, *others]}) == 5
    assert keyed_of().fingerprint == KEYED.fingerprint


@pytest.mark.parametrize("code", [[1], [-1], [0.0], [0, 0], []])
def test_codes_are_checked(code):
    with pytest.raises(ValueError, match="one place among the 1 records"):
        KEYED.learn(KEYED.start(["a"]), code, rows_of(1))


def test_without_an_example_nothing_is_learnt():
    with pytest.raises(ValueError, match="without `example`"):
        Keyed(LANGEVIN, 0).learn(Keyed(LANGEVIN, 0).start(["a"]), [0], rows_of(1))


@pytest.mark.parametrize("names", [("", "a:b", "é🙂", "nul\0", "\udc80"), (0, -7, 2**80)])
def test_ids_come_back_from_bytes(names):
    assert tuple(from_bytes(as_bytes(name)) for name in names) == names


def test_leaves_of_any_kind_go_through_words():
    state = (np.array([True, False]), np.arange(3, dtype=np.int8), np.float32([[1, -2]]), np.zeros(0, np.float32))
    form = Form.of(jax.random.key(3), state)
    words = jax.jit(form.packed)(jax.random.key(3), state)
    key, back = jax.jit(form.unpacked)(words)
    assert (jax.random.key_data(key) == jax.random.key_data(jax.random.key(3))).all()
    keys, stacked = form.models(np.asarray(words)[None])
    assert keys.shape == (1, 2)
    for one, other, host in zip(state, back, stacked, strict=True):
        assert one.dtype == other.dtype == host.dtype
        np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(one, host[0])


def test_a_parcel_of_leaves_of_any_kind_comes_back():
    """Those smaller than a word, and of lengths that fill none, are in every place: first, between others, last."""
    leaves = (np.arange(5, dtype=np.uint8), np.float32([[1, -2]]), np.array([True, False, True]), np.float16([0.5, 3]))
    leaves = *leaves, np.int32(7), np.float32(-0.5), np.zeros(0, np.float32), np.array(True)
    parcel = Parcel.of(leaves)
    words = np.asarray(jax.jit(closed)(leaves))
    host = np.frombuffer(words, parcel.fields)
    for name, one, other in zip(parcel.fields.names, leaves, jax.jit(parcel.opened)(words), strict=True):
        assert one.dtype == other.dtype == host[name].dtype
        np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(one, host[name][0])


def test_a_single_row_that_is_not_as_it_should_be_takes_the_long_way():
    alone = KEYED.alone
    X, y = rows_of(1)
    assert isinstance(alone, Alone)
    assert alone.row((X.astype(float), y)) == alone.row((X, y)) == [X.tobytes(), y.tobytes()]
    most = np.full_like(X, 1e17)
    assert alone.row((most, y)) == [most.tobytes(), y.tobytes()]
    assert alone.row((np.full((1, 2), 10**17), y)) == [most.tobytes(), y.tobytes()]
    odd = [
        (X + np.nan, y),
        (X, y - np.inf),
        (X + 1.1e18, y),
        (X + 1e30, y),
        (X.astype(float) + 1e300, y),
        (X, y.astype(float) - 1e300),
        (X, y + np.longdouble(1e30)),
        (X, np.array([2 * 10**18])),
        (X[:, :1], y),
        (X, y[0]),
        (X.tolist(), y),
        (X * 1j, y),
    ]
    for row in [*odd, [X, y], (X,), (X, y, y), ((X, y), y), X, None]:
        assert alone.row(row) is None


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_small_numbers_are_recognised_by_a_byte(kind):
    kind = np.dtype(kind)
    words = np.random.default_rng(0).integers(0, 256, (2000, kind.itemsize), np.uint8)  # NaN and infinity among them
    numbers = np.concatenate([words.view(kind)[:, 0], np.array([0, -0.0, 1e4, -1e4, np.inf, -np.inf, np.nan], kind)])
    told = np.array([small(kind).all(number.tobytes()) for number in numbers])
    with np.errstate(invalid="ignore"):  # some of the NaN
        size = np.abs(numbers.astype(float))
    assert (size[told] <= 1e18).all()
    assert told[size <= (1e4 if kind.itemsize == 2 else 1e14)].all()
    assert not small(kind).all(np.array([1, 2, np.nan, 3], kind).tobytes())


def test_one_row_is_learnt_in_the_thread_that_calls_with_the_same_bits(monkeypatch):
    rows = KEYED.alone.row(rows_of(1))
    models = []
    for device in (_alone.inline_device(), None):  # None: as on a GPU
        monkeypatch.setattr(_alone, "inline_device", lambda device=device: device)
        keyed = keyed_of(batch_size=1)
        fields = Fields(keyed.start(["a"]))
        assert keyed.alone.learn(fields, 0, rows).finite.all()
        models.append(fields.model)
        assert keyed.alone._program.input_shardings[0][0].device_set == {device or jax.devices()[0]}
    assert np.array_equal(*models)


@pytest.mark.slow  # two processes that import JAX
def test_a_killed_fleet_counts_every_row_once():
    """`python -m benchmarks.fleet_kills` kills more often (docs/results/fleet-kills.json)."""
    result = fleet_kills.compare(kills=1, rows=5000, hot=20)
    assert result["disturbed"]["cursor"] == 5000
    assert result["same"], result
