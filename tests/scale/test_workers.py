import jax
import numpy as np
import pytest

import opvi
from opvi._cpu import inline_device
from opvi.scale import Keyed
from opvi.scale.fleet import _workers
from opvi.scale.fleet._workers import FEW, MANY, MORE, Workers, few_for, room_in_turns

SIZES = (2, 16, 17, 64, 65, 128, 129, 200, 1100)  # of calls
LANGEVIN = opvi.langevin(opvi.linear_regression(2), step=0.01)


def rows_of(count: int):
    rng = np.random.default_rng(0)
    X = rng.standard_normal((count, 2)).astype(np.float32)
    return X, X.sum(1) + rng.standard_normal(count).astype(np.float32)


def keyed_of(threads: int, **settings) -> Keyed:
    """Return a `Keyed` that computes as a machine with this many cores would."""
    keyed = Keyed(LANGEVIN, 0, example=rows_of(1), batch_size=1, particles=3, **settings)
    keyed._workers.threads = threads
    return keyed


def rooms(keyed: Keyed, name: str) -> list[tuple[int, ...]]:
    """Return how many models and items the programs of this name take."""
    return [(models[0], at[0]) for kind, models, at, *_ in keyed._workers._compiled if kind == name]


@pytest.mark.parametrize("threads", [1, 2])
def test_calls_of_any_size_share_two_programs_and_give_the_same_bits(threads):
    keyed, codes = keyed_of(threads), np.arange(SIZES[-1])
    X, y = rows_of(len(codes))
    records = keyed.start(codes)
    whole, _ = keyed.learn(records, codes, (X, y))
    means = np.asarray(keyed.predict(whole, codes, X).mean())
    assert rooms(keyed, "many") == rooms(keyed, "answer") == [(MANY, MANY)]
    for size in SIZES:
        some = codes[:size]
        assert keyed.start(some).tobytes() == records[some].tobytes()
        learnt, rounds = keyed.learn(records[some], some, (X[some], y[some]))
        assert learnt.tobytes() == whole[some].tobytes()
        assert rounds.code.tolist() == some.tolist()
        np.testing.assert_array_equal(keyed.predict(learnt, some, X[some]).mean(), means[:size])
    for name in ("many", "answer"):
        assert rooms(keyed, name) == [(MANY, MANY), (MORE, MORE)]


@pytest.mark.parametrize("lanes", [1, 4])
def test_seventeen_rows_or_batches_are_not_padded_to_a_thousand(lanes):
    keyed = keyed_of(1, lanes=lanes)
    X, y = rows_of(17)
    records = keyed.start([0, 1])
    one, _ = keyed.learn(records, np.zeros(17, int), (X, y))  # batches of one model
    both, _ = keyed.learn(records, np.arange(17) % 2, (X, y))
    keyed.predict(both, np.arange(17) % 2, X)
    assert rooms(keyed, "many") == [(MORE, MORE // lanes)]
    assert rooms(keyed, "answer") == [(MORE, MORE)]
    assert keyed.states(one).rows.tolist() == [17, 0]
    assert keyed.states(both).rows.tolist() == [9, 8]


def test_few_rows_are_computed_in_the_calling_thread():
    keyed = keyed_of(2)
    for count in (2, 1100):
        records, codes, (X, y) = keyed.start(np.arange(count)), np.arange(count), rows_of(count)
        keyed.predict(records, codes, X)
        keyed.learn(records, codes, (X, y))
    for kind in ("answer", "many"):
        programs = [program for (name, *_), program in keyed._workers._compiled.items() if name == kind]
        devices = [jax.tree.leaves(program.input_shardings)[0].device_set for program in programs]
        assert devices == [{inline_device()}, set(jax.devices())]


def test_one_thread_learns_what_it_learns_as_quickly_as_two(monkeypatch):
    jobs = []
    monkeypatch.setattr(Workers, "_in_threads", lambda _, run, given: jobs.append(len(given)) or map(run, given))
    keyed = keyed_of(2)
    for count in (2, MORE, MORE + 1):
        keyed.learn(keyed.start(np.arange(count)), np.arange(count), rows_of(count))
    assert jobs == [1, 1, 2]


def test_a_thread_s_share_decides_which_program_learns():
    for threads, models, room in ((2, 128, MORE), (2, 1, MANY), (1, 128, MANY), (4, 258, MANY)):
        keyed = keyed_of(threads)
        keyed.learn(
            keyed.start(np.arange(models)), np.resize(np.arange(models), max(128, models)), rows_of(max(128, models))
        )
        assert rooms(keyed, "many") == [(room, room)]


def test_there_is_room_for_as_few_batches_as_models(monkeypatch):
    monkeypatch.setattr(_workers, "LEARNT_BYTES", 2000)  # much less of it for a batch than for a model
    keyed = keyed_of(1)
    for count in (2, 50, 65):
        keyed.learn(keyed.start(np.arange(count)), np.arange(count), rows_of(count))
    few, many = rooms(keyed, "many")
    assert FEW < few[0] == few[1] < 50
    assert many == (MANY, MANY)


def test_large_models_go_a_few_at_a_time():
    assert few_for(1 << 12, 1 << 17) == 32
    assert few_for(1 << 20, 1 << 17) == FEW
    assert few_for(0, 1 << 17) == MORE
    assert [room_in_turns(items, 1 << 14) for items in (1, 17, 64, 65)] == [FEW, FEW, FEW, MANY]  # up to four calls
    assert [room_in_turns(items, 1 << 10) for items in (1, 128, 129)] == [MORE, MORE, MANY]
    assert [room_in_turns(items, 1 << 22) for items in (1, 65)] == [4, 4]  # no more memory than that
