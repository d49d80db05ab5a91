"""The engine: the same bits as a run however rows are cut, few programs, answers of any size, copies that go on."""

import copy
import json
import pickle

import jax
import numpy as np
import pytest

import opvi
from opvi.running import Engine
from opvi.running import _engine as engine
from opvi.running._plain import from_plain, plainly
from opvi.running._rows import as_rows, with_room

KEY = jax.random.key(0)
ROWS = 20 * 20 + 7


def same(a, b):
    return jax.tree.structure(a) == jax.tree.structure(b) and jax.tree.all(jax.tree.map(np.array_equal, a, b))


def watch(monkeypatch, seen):
    """Tell `seen` the name, kind and arguments of each program that learns or answers, before it runs."""
    real = engine.program

    def watched(function, settings, quick):
        def call(*given):
            seen(function.__name__, quick, given)
            return real(function, settings, quick)(*given)

        call.let_go = real(function, settings, quick).let_go
        return real(function, settings, quick) if function is engine.begun else call

    monkeypatch.setattr(engine, "program", watched)


@pytest.fixture(scope="module")
def sampler():
    return opvi.langevin(opvi.linear_regression(3), step=1e-3)


@pytest.fixture(scope="module")
def rows():
    x = np.random.default_rng(0).normal(size=(2000, 3))
    return x, x.sum(1)


def first(rows, count, start=0):
    return tuple(a[start:count] for a in rows)


@pytest.fixture(scope="module")
def whole(sampler, rows):
    state, history = opvi.run(sampler, opvi.stream(first(rows, ROWS), 20), KEY)
    return state, history


@pytest.mark.parametrize("cuts", [(), (1, 2, 3), (19, 20, 21, 60), (390,), tuple(range(5, ROWS, 5))])
def test_rows_cut_in_any_way_give_the_bits_of_a_run(sampler, rows, whole, cuts):
    fed = Engine(sampler, KEY)
    ends, infos, learnt = (*cuts, ROWS), [], 0
    for start, stop in zip((0, *cuts), ends, strict=True):
        told = fed.feed(first(rows, stop, start), last=stop == ROWS)
        if told is not None:
            infos.append(told.info)
            learnt += int((told.weight > 0).sum())
            assert told.data[0].shape == (*told.weight.shape, 3)
            assert told.weight.shape[1] == 20
        waiting = 0 if fed.waiting is None else len(fed.waiting.weight)
        assert learnt + waiting == stop
    state, history = whole
    assert fed.waiting is None
    assert same(fed.state, state)
    info = jax.tree.map(lambda *leaves: np.concatenate(leaves), *infos)
    assert info.predicted.log_density.shape == (len(history.round), 20)
    assert same(info._replace(predicted=None), history.info)


def test_calls_are_padded_until_rows_alone_are_worth_a_program(sampler, rows, monkeypatch):
    monkeypatch.setattr(engine, "LONE_ROWS", 1)
    fed = Engine(sampler, KEY)
    assert fed.feed(first(rows, 1), last=True).weight.shape == (1, 20)
    fed = pickle.loads(pickle.dumps(fed))  # which counts on
    assert fed.feed(first(rows, 1), last=True).weight.shape == (1, 1)
    assert fed.feed(first(rows, 2), last=True).weight.shape == (1, 20)
    assert fed.feed(first(rows, 1)) is None  # waits
    told = fed.feed(first(rows, 1), last=True)
    np.testing.assert_array_equal(told.weight, [[1, 1] + [0] * 18])
    assert int(fed.state.rows) == 6
    by_hand = sampler.init(KEY)
    by_hand, _ = sampler.step(KEY, by_hand, opvi.batch(first(rows, 1), pad_to=20))
    by_hand, _ = sampler.step(KEY, by_hand, opvi.batch(first(rows, 1)))
    by_hand, _ = sampler.step(KEY, by_hand, opvi.batch(first(rows, 2), pad_to=20))
    twice = tuple(np.repeat(a, 2, 0) for a in first(rows, 1))
    by_hand, _ = sampler.step(KEY, by_hand, opvi.batch(twice, pad_to=20))
    assert same(fed.state, by_hand)


@pytest.mark.parametrize("quick", [-1, 2.5, "many", True, None])
def test_quick_rows_are_a_number(sampler, quick):
    with pytest.raises(ValueError, match="`quick` is .*, but must be a whole number of rows of at least 0"):
        Engine(sampler, KEY, quick=quick)


@pytest.mark.parametrize("cuts", [(), (20, 60, 300), (90,)])
def test_first_rows_are_learnt_by_programs_that_are_not_optimised(sampler, rows, whole, cuts, monkeypatch):
    used = []
    monkeypatch.setattr(engine, "MANY_ROWS", len(rows[0]))
    watch(monkeypatch, lambda name, quick, given: used.append((name, quick, int(given[-1]))))
    fed = Engine(sampler, KEY, quick=85)  # up to and with the fifth round of 20 rows
    for start, stop in zip((0, *cuts), (*cuts, ROWS), strict=True):
        fed.feed(first(rows, stop, start), last=stop == ROWS)
        fed = pickle.loads(pickle.dumps(fed))
        fed.ask(rows[0][:3], mean)
        assert used[-2:] == [("foreseen", True, 1), ("told", True, 1)]
    fed.ask(rows[0], mean)
    assert {quick for name, quick, _ in used[-2:]} == {False}  # so many rows are worth an optimised program
    learnt = [(quick, count) for name, quick, count in used if name == "advanced"]
    assert sum(count for quick, count in learnt if quick) == 5
    assert sum(count for quick, count in learnt if not quick) == 16
    assert learnt == sorted(learnt, key=lambda one: not one[0])
    assert same(fed.state, whole[0])


def test_weights_wait_with_their_rows(sampler, rows):
    weight = np.arange(1.0, 31)
    whole, parts = Engine(sampler, KEY), Engine(sampler, KEY)
    told = whole.feed(first(rows, 30), weight, last=True)
    np.testing.assert_array_equal(told.weight.ravel()[:30], weight)
    parts.feed(first(rows, 13), weight[:13])
    parts.feed(first(rows, 30, 13), weight[13:], last=True)
    assert same(parts.state, whole.state)
    for bad in (weight[:29], -weight, weight * np.nan):
        with pytest.raises(ValueError, match="`weight` must be 30 finite numbers"):
            parts.feed(first(rows, 30), bad)


def test_nothing_is_nothing(sampler, rows):
    fed = Engine(sampler, KEY)
    assert fed.feed(first(rows, 0), last=True) is None
    assert fed.waiting is None
    with pytest.raises(ValueError, match="0 rows"):
        fed.ask(rows[0][:0], mean)
    with pytest.raises(ValueError, match="`batch` is 0"):
        Engine(sampler, KEY, batch=0)
    with pytest.raises(TypeError, match="rows are numbers"):
        fed.feed((rows[0].astype(str), rows[1]))
    with pytest.raises(ValueError, match=r"\(3,\), \(\) and 34 more"):  # a list is no table of rows
        opvi.stream(list(zip(*first(rows, 20), strict=True)), 20)


def test_a_call_that_fails_changes_nothing(sampler, rows, monkeypatch):
    fed = Engine(sampler, KEY)
    fed.feed(first(rows, 27))
    before, calls = fed.state, []

    def stumble(*_):
        if calls:
            raise KeyboardInterrupt
        calls.append(1)

    watch(monkeypatch, stumble)
    monkeypatch.setattr(engine, "CHUNK_ROUNDS", 2)
    with pytest.raises(KeyboardInterrupt):
        fed.feed(first(rows, 80, 27))
    assert calls
    assert fed.state is before
    assert len(fed.waiting.weight) == 7
    with pytest.raises(ValueError, match="all must have the same number of rows"):
        fed.feed((rows[0][:3], rows[1][:2]))


def mean(predictive):
    return predictive.mean()


def quantiles(predictive, shift, levels):
    return {"q": predictive.quantile(levels).T + shift[:, None], "shift": shift}


@pytest.fixture(scope="module")
def regressor():
    return opvi.regressor(3, hidden=(), particles=2)


@pytest.fixture(scope="module")
def learnt(regressor, rows):
    fed = Engine(regressor, 0)
    fed.feed(first(rows, 100))
    return fed


@pytest.fixture(scope="module")
def answers(learnt, rows):
    """What `predict` says of all rows: means, and two quantiles."""

    @jax.jit
    def ask(state, x):
        predictive = learnt.sampler.predict(state, x)
        return predictive.mean(), predictive.quantile((0.1, 0.9)).T

    return ask(learnt.state, rows[0])


@pytest.mark.parametrize("count", [1, 5, 333, 2000])
def test_questions_of_any_size_have_the_answers_of_predict(learnt, rows, answers, count):
    x = rows[0][:count]
    said = learnt.ask(x, mean)
    assert isinstance(said, np.ndarray)
    np.testing.assert_allclose(said, answers[0][:count], rtol=1e-5, atol=1e-5)
    shift = np.arange(count) * 10.0
    both = learnt.ask(x, quantiles, (0.1, 0.9), others=(shift,))
    np.testing.assert_array_equal(both["shift"], shift.astype(np.float32))
    np.testing.assert_allclose(both["q"] - both["shift"][:, None], answers[1][:count], rtol=1e-3, atol=1e-2)


@pytest.mark.usefixtures("retraced")
def test_few_programs_serve_calls_of_all_sizes(rows, monkeypatch):
    """Learning: one, and one for many rows alone. Asking: one for all questions, and a small one for each.

    Copies and equal samplers add none.
    """
    monkeypatch.setattr(engine, "LONE_ROWS", 2)
    made = opvi.langevin(opvi.linear_regression(3), step=2e-3, temperature=0.5)
    learning, asking = engine.program(engine.advanced, 3, False), engine.program(engine.foreseen, 1, False)
    each = engine.program(engine.told, 2, False)
    before = learning._cache_size(), asking._cache_size(), each._cache_size()
    for sampler in (made, opvi.langevin(opvi.linear_regression(3), step=2e-3, temperature=0.5)):
        fed = Engine(sampler, KEY)
        for count in (1, 2, 19, 20, 21, 45, 333, 400, 2000, 77, 1):
            fed.feed(first(rows, count), last=count % 2 == 1)
            fed.ask(rows[0][:count], mean)
        fed = pickle.loads(pickle.dumps(fed))
        fed.feed(first(rows, 1), last=True)
        fed.ask(rows[0][:3], mean)
        assert learning._cache_size() - before[0] == (1 if fed.lone < 2 else 2)
    assert (fed.lone, learning._cache_size() - before[0]) == (3, 2)
    assert (asking._cache_size() - before[1], each._cache_size() - before[2]) == (1, 1)
    fed.ask(rows[0][:3], opvi.Predictive.quantile, 0.5)
    assert (asking._cache_size() - before[1], each._cache_size() - before[2]) == (1, 2)


@pytest.mark.usefixtures("engines_own_programs")
def test_sixty_rows_one_by_one_and_a_question_of_5000_need_no_program_of_their_own(sampler, rows, monkeypatch):
    """The two that learn and the one that answers are enough, up to so many rows that others would save time."""
    used = set()
    watch(monkeypatch, lambda name, quick, given: used.add((name, quick, jax.tree.leaves(given[-2])[-1].shape)))
    fed = Engine(sampler, KEY, quick=60)
    for count in (20, 20, 20, *[1] * 60, 333):
        fed.feed(first(rows, count), last=True)
        fed.ask(rows[0][:count], mean, alone=True)
    fed.ask(np.tile(rows[0], (3, 1))[:5000], mean, alone=True)
    learning = [("advanced", quick, (engine.CHUNK_ROUNDS, 20)) for quick in (True, False)]
    assert used == {*learning, ("answer", True, (engine.ASK_ROUNDS, engine.ASK_ROWS, 3))}


def test_large_batches_are_learnt_in_small_chunks(sampler, rows, whole, monkeypatch):
    sizes = []
    watch(monkeypatch, lambda name, quick, given: sizes.append(len(given[-2].weight)))
    monkeypatch.setattr(engine, "CHUNK_BYTES", 3 * 20 * 5 * 4)
    fed = Engine(sampler, KEY)
    fed.feed(first(rows, ROWS), last=True)
    assert sizes == [3] * 7
    assert same(fed.state, whole[0])


@pytest.mark.parametrize("how", [copy.deepcopy, lambda fed: pickle.loads(pickle.dumps(fed))])
def test_copies_go_on_with_the_same_bits(sampler, rows, how):
    fed = Engine(sampler, jax.random.key(3, impl="rbg"))
    fed.feed(first(rows, 70))
    other = how(fed)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(fed.__getstate__()["state"]))
    assert other.state is not fed.state
    other.feed(first(rows, 77, 70), last=True)
    assert int(fed.state.rows) == 60
    assert int(other.state.rows) == 77
    fed.feed(first(rows, 77, 70), last=True)
    assert same(other.state, fed.state)
    assert same(other.ask(rows[0][:5], mean), fed.ask(rows[0][:5], mean))


def test_learning_again(learnt, rows):
    """As a loop of `relearn` over padded batches."""
    fed = copy.deepcopy(learnt)
    fed.relearn(first(rows, 50), np.full(50, 2.0))
    state = learnt.state
    for start in (0, 20, 40):
        batch = opvi.batch(first(rows, min(start + 20, 50), start), np.full(min(20, 50 - start), 2.0), pad_to=20)
        state = learnt.sampler.relearn(learnt.key, state, batch)
    assert same(fed.state, state)
    assert not same(fed.state.particles, learnt.state.particles)
    with pytest.raises(TypeError, match="no `relearn`"):
        Engine(opvi.langevin(opvi.linear_regression(3), step=1e-3), KEY).relearn(first(rows, 50))


def test_no_program_reads_the_room_behind_its_rows(regressor, rows, monkeypatch):
    """It is not written, because that would take as long as a small program runs."""

    def spoilt(data, room, filled=0):
        used = max(filled, len(jax.tree.leaves(data)[0]))
        whole = jax.tree.map(np.array, with_room(data, room, filled))
        for a in jax.tree.leaves(whole):
            a[used:] = np.nan
        return whole

    def life():
        fed = Engine(regressor, 0)
        fed.feed(first(rows, 47), last=True)
        fed.relearn(first(rows, 47))
        said = [fed.ask(rows[0][:count], mean, alone=alone) for count in (1, 17, 1030) for alone in (True, False)]
        return fed.state, said

    clean = life()
    monkeypatch.setattr(engine, "with_room", spoilt)
    assert same(life(), clean)


def test_rows_in_room_for_more_start_where_xla_takes_them_as_they_are():
    held = []
    for size in range(1, 40):
        x, whole = np.full((3, size), float(size), np.float32), np.arange(3)
        held.append(with_room((x, whole), 64, 16))
        for a, given in zip(held[-1], (x, whole), strict=True):
            assert (a.shape, a.dtype) == ((64, *given.shape[1:]), given.dtype)
            assert a.__array_interface__["data"][0] % 64 == 0
            np.testing.assert_array_equal(a[:3], given)
            np.testing.assert_array_equal(a[3:16], np.repeat(given[:1], 13, 0))
    assert with_room(x, 3) is x


def test_an_engine_resumes_from_a_state(sampler, rows, whole):
    state, _ = opvi.run(sampler, opvi.stream(first(rows, 200), 20), KEY)
    fed = Engine(sampler, 0, state=state)  # an integer is a seed
    fed.feed(first(rows, ROWS, 200), last=True)
    assert same(fed.state, whole[0])


def test_whole_numbers_that_do_not_fit_are_refused():
    """2**40 and 2**40 + 1 would be the classes 0 and 1."""
    with pytest.raises(ValueError, match="from 1099511627776 to 1099511627777, which JAX would truncate to 32 bits"):
        as_rows(np.array([2**40, 2**40 + 1]), np.dtype("float32"))
    assert as_rows(np.array([0, 2**31 - 1]), np.dtype("float32")).dtype == np.int32


def test_a_sampler_that_keeps_rows_is_plain_data():
    """The layout of its rows, too: a saved engine needs no pickle within."""
    rows = (np.zeros((1, 3), np.float32), {"y": np.zeros(1, np.float32)})
    kept = opvi.remembering(opvi.regressor(3), 4, again=0, example=rows)
    plain = plainly(kept)
    assert json.loads(json.dumps(plain)) == plain
    assert from_plain(plain) == kept


def test_a_quick_program_is_let_go_after_its_last_round_and_memory_is_given_back(monkeypatch, sampler, rows):
    real, seen, given = engine.program, [], []

    class Watched:
        def __init__(self, *how):
            self.run, self.quick = real(*how), how[2]

        def __call__(self, *arguments):
            seen.append(("run", self.quick, int(arguments[-1])))
            return self.run(*arguments)

        def let_go(self, *_):
            seen.append(("let go", self.quick))

    monkeypatch.setattr(engine, "give_back", lambda: given.append(None))
    made = engine.Engine(sampler, KEY, quick=40)
    monkeypatch.setattr(engine, "program", Watched)
    made.feed(first(rows, 20))
    assert seen == [("run", True, 1)]
    made.feed(first(rows, 20 * (engine.LONG_ROUNDS - 1)))
    assert seen[1:] == [("run", True, 1), ("let go", True), ("run", False, engine.LONG_ROUNDS - 2)]
    made.feed(first(rows, 20))
    assert seen[4:] == [("run", False, 1)]
    assert not given
    made.feed(first(rows, 20 * engine.LONG_ROUNDS))
    assert len(given) == 1
