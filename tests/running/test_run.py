"""Running: the same bits however it is cut, few compilations, callbacks, errors, comparisons."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import opvi
from opvi.running import _run as inference

KEY = jax.random.key(0)


def same(a, b):
    return jax.tree.all(jax.tree.map(np.array_equal, a, b))


@pytest.fixture(scope="module")
def sampler(mixture):
    return opvi.opvi(mixture, step=opvi.schedules.decaying(0.1, 0.55))


@pytest.fixture(scope="module")
def growing(mixture_rows):
    return opvi.stream(mixture_rows[:1000], opvi.schedules.power(0.55), rounds=60)


def test_loop_scan_and_any_chunk_length_give_the_same_bits(mixture, mixture_rows):
    """Of a sampler with random numbers; tests/default_flags.py has all of them."""
    algorithm = opvi.langevin(mixture, step=0.01)
    growing = opvi.stream(mixture_rows[:1000], opvi.schedules.power(0.7), rounds=30)  # 1 to 11 rows: two shapes
    state = algorithm.init(KEY, 10)
    infos = []
    for batch in growing:
        state, info = algorithm.step(KEY, state, batch)
        infos.append(info._replace(predicted=None) if hasattr(info, "predicted") else info)  # a run does not keep it
    by_hand = jax.tree.map(lambda *leaves: np.stack(leaves), *infos)
    for every in (None, 1, 7):
        ran, history = opvi.run(algorithm, growing, KEY, particles=10, every=every)
        assert same(ran, state)
        assert same(history.info, by_hand)


def test_five_hundred_growing_rounds_compile_a_few_times(mixture_rows):
    """Counted where Python runs only while tracing: in the target, and in JAX's own cache."""
    traces = []
    base = opvi.gaussian_mixture()

    def log_likelihood(theta, x):
        traces.append(x.shape)
        return base.log_likelihood(theta, x)

    target = opvi.target(base.log_prior, log_likelihood, base.init)
    algorithm = opvi.opvi(target, step=0.01)
    before = inference.advance._cache_size()
    stream = opvi.stream(mixture_rows, opvi.schedules.power(0.55))
    _, history = opvi.run(algorithm, stream, KEY, particles=5)
    compiled = inference.advance._cache_size() - before
    assert len(history.round) == 500
    assert compiled == 3 <= 7  # buckets of 8, 16 and 32 rows
    assert set(traces) == {(8,), (16,), (32,)}
    opvi.run(algorithm, stream, jax.random.key(1), particles=5)  # another seed compiles nothing
    assert inference.advance._cache_size() - before == compiled


def test_history_is_arrays_one_entry_a_round(sampler, growing):
    state, history = opvi.run(sampler, growing, KEY, particles=10)
    np.testing.assert_array_equal(history.round, np.arange(1, 61))
    assert all(leaf.shape == (60,) for leaf in jax.tree.leaves(history.info))
    assert history.info.rows[-1] == state.rows
    assert history.seconds > 0
    assert history.record is None


def test_record_keeps_what_it_is_asked_for(sampler, growing):
    state, history = opvi.run(
        sampler, growing, KEY, particles=10, record=lambda s, i, b: {"x": s.particles, "rows": b.weight.sum()}
    )
    assert history.record["x"].shape == (60, 10, 2)
    np.testing.assert_array_equal(history.record["x"][-1], state.particles)
    np.testing.assert_array_equal(np.cumsum(history.record["rows"]), history.info.rows)


def test_large_records_are_held_in_small_chunks(sampler, growing, monkeypatch):
    monkeypatch.setattr(inference, "CHUNK_BYTES", 2000)
    seen = []

    def count(chunk):
        seen.append(len(chunk.info.finite))

    _, history = opvi.run(
        sampler, growing, KEY, particles=10, record=lambda s, i, b: s.particles, callbacks={"count": count}
    )
    assert sum(seen) == 60
    assert max(seen) * 80 <= 2000  # 80 bytes of particles a round
    assert history.record.shape == (60, 10, 2)


def test_callbacks_see_every_chunk_and_change_no_bit(sampler, growing):
    plain, _ = opvi.run(sampler, growing, KEY, particles=10)

    def spread(chunk):
        assert chunk.round == int(chunk.state.round)
        assert len(chunk.batches) == len(chunk.info.finite)
        return {"sd": np.asarray(chunk.state.particles).std(0)}

    state, history = opvi.run(
        sampler, growing, KEY, particles=10, callbacks={"spread": spread, "silent": lambda c: None}, every=25
    )
    assert same(plain, state)
    assert set(history.callbacks) == {"spread"}
    rounds = history.callbacks["spread"]["round"]
    assert rounds.tolist() == [25, 50, 60]
    assert history.callbacks["spread"]["value"]["sd"].shape == (len(rounds), 2)


def test_every_means_every(sampler, mixture_rows):
    """Callbacks come at multiples of `every`, also where the batch's bucket changes in between."""
    stream = opvi.stream(mixture_rows, opvi.schedules.power(0.55), rounds=60)
    _, history = opvi.run(sampler, stream, KEY, particles=10, callbacks={"t": lambda c: np.int64(c.round)}, every=25)
    assert history.callbacks["t"]["round"].tolist() == [25, 50, 60]


def test_rounds_stop_a_run_without_reading_further(sampler):
    taken = []

    def rows():
        for i in range(100):
            taken.append(i)
            yield np.float32(i % 3)

    state, _ = opvi.run(sampler, opvi.stream(rows(), 4), KEY, particles=4, rounds=3)
    assert int(state.round) == 3
    assert len(taken) == 12


def test_integer_keys_are_seeds(sampler, growing):
    assert same(
        opvi.run(sampler, growing, 3, particles=4)[0], opvi.run(sampler, growing, jax.random.key(3), particles=4)[0]
    )
    with pytest.raises(TypeError, match="integer seed"):
        opvi.run(sampler, growing, "zero")


def test_a_divergence_is_refused_and_nothing_is_lost(mixture_rows):
    target = opvi.linear_regression(1)
    algorithm = opvi.svgd(target, step=1e6)
    data = (np.ones((40, 1), np.float32) * 1e10, mixture_rows[:40])
    with pytest.raises(opvi.DivergedError, match=r"the update of round \d+ was not finite.*Lower `step`") as caught:
        opvi.run(algorithm, opvi.stream(data, 4), KEY, particles=4)
    assert bool(jnp.isfinite(caught.value.state.particles).all())
    assert len(caught.value.history.round) == 10


def test_an_empty_stream_and_wrong_arguments(sampler, growing):
    with pytest.raises(ValueError, match="gave no batch"):
        opvi.run(sampler, [], KEY, particles=4)
    with pytest.raises(ValueError, match="gave no batch"):
        opvi.run(sampler, opvi.stream(iter([]), 4), KEY, particles=4)
    for name in ("rounds", "every"):
        with pytest.raises(ValueError, match=f"`{name}` is 0"):
            opvi.run(sampler, growing, KEY, **{name: 0})


@pytest.mark.slow
def test_labels_that_are_no_class_are_refused():
    """Their gradient would be finite, and wrong: nothing may be learnt from them."""
    x = np.random.default_rng(0).normal(size=(12, 2)).astype(np.float32)
    three, two = opvi.softmax_regression(2, 3), opvi.logistic_regression(2)
    for target, label in ((three, 3), (three, -1), (two, 2)):
        y = np.zeros(12, int)
        y[9] = label
        for algorithm in (opvi.svgd(target, step=0.01), opvi.gauss_newton(target)):
            with pytest.raises(opvi.DivergedError, match=f"round 3 .*A row has the label {label}, but") as caught:
                opvi.run(algorithm, opvi.stream((x, y), 4), KEY, particles=3)
            before, _ = opvi.run(algorithm, opvi.stream((x[:8], y[:8]), 4), KEY, particles=3)
            assert same(caught.value.state.particles, before.particles)


def test_rows_that_are_no_batches_are_refused(sampler, mixture_rows):
    with pytest.raises(TypeError, match=r"yields a float32, but a run takes batches.*opvi.stream"):
        opvi.run(sampler, mixture_rows, KEY, particles=4)


def test_float64_data_and_particles(mixture, growing):
    with jax.enable_x64(True):
        particles = jax.random.normal(KEY, (5, 2), jnp.float64)
        state, history = opvi.run(opvi.svgd(mixture, step=0.01), growing, KEY, particles=particles, rounds=3)
        assert state.particles.dtype == jnp.float64
        assert history.info.log_predictive.dtype == np.float64


def test_progress_is_one_line_in_a_log(sampler, growing, capsys):
    opvi.run(sampler, growing, KEY, particles=4, progress=True)
    out = capsys.readouterr()
    assert out.out == ""
    assert out.err.count("\n") == 1
    assert "round 60/60" in out.err
    assert "rows/s" in out.err
    opvi.run(sampler, growing, KEY, particles=4)
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_compare_gives_every_method_the_same_budget(mixture, mixture_rows):
    step = opvi.schedules.decaying(0.05, 0.55)
    methods = {
        "growing": (opvi.opvi(mixture, step=step), opvi.schedules.power(0.55)),
        "static": (opvi.svgd(mixture, step=step), 20),
        "noise": (opvi.langevin(mixture, step=0.01), opvi.schedules.saturating(0.8, 500)),
    }
    results = opvi.compare(methods, mixture_rows, KEY, rounds=50, rows=1000, particles=8)
    for compared in results.values():
        assert len(compared.history.round) == 50
        assert compared.rows == int(compared.state.rows) == 1000
        assert compared.history.info.rows[-1] == 1000
    with pytest.raises(ValueError, match="budget is 99999 rows"):
        opvi.compare(methods, mixture_rows, KEY, rounds=50, rows=99_999)


def test_prequential_density_is_that_of_the_particles_before_the_update(mixture, mixture_rows):
    algorithm = opvi.svgd(mixture, step=0.01)
    state = algorithm.init(KEY, 7)
    rows = mixture_rows[:5]
    _, info = algorithm.step(KEY, state, opvi.batch(rows, pad_to=8))
    each = jax.vmap(lambda p: mixture.log_likelihood(p, jnp.asarray(rows)))(state.particles)
    expected = np.log(np.exp(np.asarray(each, float)).mean(0)).mean()
    assert float(info.log_predictive) == pytest.approx(expected, rel=1e-5)


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["arrays", "iterator"])
def test_a_run_with_checkpoints_goes_on_where_it_was(source, mixture, mixture_rows, tmp_path):
    sampler = opvi.langevin(mixture, step=0.01)

    def stream():
        rows = mixture_rows[:400]
        return opvi.stream(rows if source == "arrays" else iter(rows), 10)

    def run(folder, **more):
        return opvi.run(sampler, stream(), 3, particles=4, every=5, checkpoint=folder, save_every=0, **more)

    class TroubleError(Exception):
        pass

    def stumble(chunk):
        if chunk.round == 15:
            raise TroubleError

    whole, history = opvi.run(sampler, stream(), 3, particles=4)
    with pytest.raises(TroubleError):
        run(tmp_path / "run", callbacks={"stumble": stumble})
    state, rest = run(tmp_path / "run", rounds=30)
    np.testing.assert_array_equal(rest.round, np.arange(16, 31))
    newest = max((tmp_path / "run").glob("*.opvi"))
    newest.write_bytes(newest.read_bytes()[:-1])
    with pytest.warns(RuntimeWarning, match="damaged"):
        state, rest = run(tmp_path / "run")
    np.testing.assert_array_equal(state.particles, whole.particles)
    np.testing.assert_array_equal(rest.info.drift, history.info.drift[rest.round[0] - 1 :])
    again, nothing = run(tmp_path / "run")
    np.testing.assert_array_equal(again.particles, whole.particles)
    assert len(nothing.round) == 0
    with pytest.raises(ValueError, match="another key"):
        opvi.run(sampler, stream(), 4, checkpoint=tmp_path / "run")
    with pytest.raises(ValueError, match="save_every"):
        opvi.run(sampler, stream(), 3, checkpoint=tmp_path / "run", save_every=-1)


def test_a_run_is_resumed_by_its_own_sampler_only(mixture, mixture_rows, tmp_path):
    stream = opvi.stream(mixture_rows[:40], 10)

    def run(sampler, **more):
        return opvi.run(sampler, stream, 3, checkpoint=tmp_path / "run", **{"particles": 4, **more})

    run(opvi.langevin(mixture, step=opvi.schedules.decaying(0.01, 0.5)), rounds=2)
    decaying = opvi.schedules.decaying
    for other, says in (
        (opvi.langevin(mixture, step=decaying(0.02, 0.5)), r"`step_size\.\w+` was 0\.01, and is 0\.02"),
        (opvi.langevin(mixture, step=0.01), r"`step_size` was decaying, and is 0\.01"),
        (opvi.langevin(mixture, step=decaying(0.01, 0.5), temperature=0), r"`temperature` was 1\.0, and is 0\."),
        (opvi.langevin(opvi.gaussian_mixture(9.0), step=decaying(0.01, 0.5)), r"`target\.\S+` was 2\.0, and is 9"),
        (opvi.svgd(mixture, step=decaying(0.01, 0.5)), "`sampler` was langevin, and is parvi"),
    ):
        with pytest.raises(ValueError, match=f"run holds a run of another sampler: {says}"):
            run(other)
    with pytest.raises(opvi.running.CheckpointError, match=r"`state/particles` is .*\(4, 2\), but .*\(5, 2\)"):
        run(opvi.langevin(mixture, step=decaying(0.01, 0.5)), particles=5)
    state, _ = run(opvi.langevin(mixture, step=decaying(0.01, 0.5)))  # equal settings
    assert int(state.round) == 4


def test_settings_are_plain_data():
    def made():
        network = opvi.mlp(2, (3,), opvi.gaussian(0.5))
        return opvi.watched(opvi.svgd(network, step=optax.adam(0.1))), opvi.regressor(3, half_life=500.0)

    told = [opvi.running.settings(sampler) for sampler in made()]
    assert told == [opvi.running.settings(sampler) for sampler in made()]
    assert json.loads(json.dumps(told)) == told
    assert [one["is"] for one in told] == ["watched", "regressor"]
    assert told[1]["half_life"] == 500.0
    for word in ("opvi.", "<", "_", "optax", "GradientTransformation"):
        assert f'"{word}' not in json.dumps(told)


@pytest.mark.parametrize("source", ["arrays", "iterator"])
def test_another_stream_is_refused(source, mixture, mixture_rows, tmp_path):
    """By everything that was learnt, not by its beginning; what comes later may differ."""
    sampler = opvi.online_map(mixture, step=0.01)

    def run(rows, **more):
        stream = opvi.stream(rows if source == "arrays" else iter(rows), 4)
        return opvi.run(sampler, stream, 3, particles=4, checkpoint=tmp_path / "run", **more)[0]

    rows = mixture_rows[:80].copy()
    run(rows, rounds=10)
    changed = rows.copy()
    changed[39] += 1
    for other, words in ((changed, "its first ones are others now"), (rows[:20], "it has only 5")):
        with pytest.raises(ValueError, match=f"learnt 10 batches of its stream, but {words}. Give the same stream"):
            run(other)
    later = rows.copy()
    later[40:] += 1
    state = run(later)
    assert int(state.round) == 20
    begin = opvi.stream(later, 4)
    alone, _ = opvi.run(sampler, begin, 3, particles=4)
    np.testing.assert_array_equal(state.particles, alone.particles)


def test_a_run_that_began_with_a_state_counts_its_own_batches(mixture, mixture_rows, tmp_path):
    sampler, rows = opvi.online_map(mixture, step=0.01), mixture_rows[:80]
    state, _ = opvi.run(sampler, opvi.stream(rows[:40], 4), 3, particles=4)
    for stream in (opvi.stream(rows[40:], 4), opvi.stream(rows, 4).after(10)):
        folder = tmp_path / str(stream.done)
        for rounds in (3, 8):
            some, _ = opvi.run(sampler, stream, 3, state=state, checkpoint=folder, rounds=rounds)
            assert int(some.round) == 10 + rounds
        whole, _ = opvi.run(sampler, stream, 3, state=state, checkpoint=folder)
        assert int(whole.round) == 20
        np.testing.assert_array_equal(whole.particles, opvi.run(sampler, stream, 3, state=state)[0].particles)
