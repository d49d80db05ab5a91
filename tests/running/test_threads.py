"""Threads and processes: nothing hangs, nothing is lost, and whoever does what cannot work is told."""

import os
import pickle
import threading
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

import opvi
from opvi import _factors as factors
from opvi.adapters.river import Regressor
from opvi.adapters.sklearn import OPVIClassifier
from opvi.predictive import Predictive
from opvi.running import Engine
from opvi.running._learners import sole_learner
from tests.test_samplers import CASES, KEY, N

PATIENCE = 60.0  # seconds, of what takes one
LAPACK = {"cholesky", "triangular_solve", "lu", "eigh", "eig", "svd", "geqrf", "geqp3", "householder_product", "schur"}


def batched(jaxpr):
    """Primitives of LAPACK that are called for more than one matrix, in a program and all its parts."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in LAPACK and any(v.aval.ndim > 2 for v in equation.invars):
            yield equation.primitive.name
        for part in jax.tree.leaves(equation.params, is_leaf=lambda p: isinstance(p, core.Jaxpr | core.ClosedJaxpr)):
            if isinstance(part, core.Jaxpr | core.ClosedJaxpr):
                yield from batched(part.jaxpr if isinstance(part, core.ClosedJaxpr) else part)


def trackers():
    regression = (np.zeros((40, 3), np.float32), np.zeros(40, np.float32))
    labels = (np.zeros((40, 3), np.float32), np.zeros(40, np.int32))
    yield "regressor", opvi.regressor(3, hidden=(4,), particles=4), regression
    yield "linear regressor", opvi.regressor(3, hidden=(), particles=4), regression
    yield "classifier", opvi.classifier(3, 3, hidden=(4,), particles=4), labels
    yield "linear classifier", opvi.classifier(3, 3, hidden=()), labels
    yield "tracker", opvi.tracker(opvi.linear_regression(3)), regression


@pytest.mark.parametrize(
    "name", [name for name in CASES if name.split(",")[0] in ("kfac", "gauss_newton", "ibis", "sl_opvi")]
)
@pytest.mark.parametrize("many", [False, True])
def test_no_step_calls_lapack_for_a_batch(name, many):
    """Such calls of two threads can wait for each other for ever. Traced only: nothing is compiled."""
    case = CASES[name]
    state = jax.eval_shape(lambda: case.algorithm.init(KEY, N))
    step = lambda state: case.algorithm.step(KEY, state, case.batch(rows=32, pad_to=32))  # noqa: E731
    if many:
        state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((3, *leaf.shape), leaf.dtype), state)
        step = jax.vmap(step)
    found = set(batched(jax.make_jaxpr(step)(state).jaxpr))
    assert not found - (
        {"triangular_solve", "cholesky", "geqrf", "householder_product"}
        if name in ("ibis", "sl_opvi") and many
        else set()
    )


@pytest.mark.parametrize(("name", "sampler", "rows"), list(trackers()), ids=[name for name, *_ in trackers()])
def test_no_tracker_calls_lapack_for_a_batch(name, sampler, rows):
    state = jax.eval_shape(lambda: sampler.init(KEY))
    step = jax.make_jaxpr(lambda state: sampler.step(KEY, state, opvi.batch(rows)))(state)
    asked = jax.make_jaxpr(lambda state: jax.tree.leaves(sampler.predict(state, rows[0])))(state)
    assert not {*batched(step.jaxpr), *batched(asked.jaxpr)}


def test_the_search_finds_a_batch():
    A = jnp.zeros((3, 2, 2))
    looped = lambda A: jax.lax.scan(lambda a, _: (jnp.linalg.cholesky(a), None), A, None, 2)[0]  # noqa: E731
    assert set(batched(jax.make_jaxpr(jax.jit(looped))(A).jaxpr)) == {"cholesky"}


def test_one_by_one_is_the_batch():
    rng = np.random.default_rng(0)
    A = rng.normal(size=(2, 3, 4, 6)).astype(np.float32)
    S, columns = A @ A.swapaxes(-1, -2) + np.eye(4, dtype=np.float32), A[..., :2]
    near = {"rtol": 1e-3, "atol": 1e-4}
    np.testing.assert_allclose(factors.cholesky(S), np.linalg.cholesky(S), **near)
    np.testing.assert_allclose(jax.vmap(factors.root_inverse)(S), np.linalg.inv(np.linalg.cholesky(S)), **near)
    np.testing.assert_allclose(factors.solve_positive(S, columns), np.linalg.solve(S, columns), **near)
    np.testing.assert_allclose(factors.solve(S[0, 0], columns[0, 0]), np.linalg.solve(S[0, 0], columns[0, 0]), **near)
    np.testing.assert_allclose(factors.inverse(S), np.linalg.inv(S), **near)
    np.testing.assert_allclose(factors.eigenvectors(S)[0], np.linalg.eigvalsh(S), **near)


# --- threads --------------------------------------------------------------------------------------


def together(*tasks):
    """Run functions in threads of their own; the test fails where one does not end, and raises what one raised."""
    errors = []

    def guarded(task):
        try:
            task()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(task,), daemon=True) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if errors:
        raise errors[0]


def test_factoring_in_four_threads_ends():
    A = jnp.broadcast_to(jnp.eye(32), (40, 32, 32))

    @jax.jit
    def program(A):
        def once(_, A):
            wide = jnp.tile(A, (1, 1, 4))
            return A * 0.99 + 1e-6 * (factors.cholesky(A + jnp.eye(32)[None]) @ wide)[:, :, :32]

        return jax.lax.fori_loop(0, 100, once, A)

    expected = np.asarray(program(A))
    results = []
    together(*[lambda: results.extend(np.asarray(program(A)) for _ in range(5))] * 4)
    assert len(results) == 20
    assert all(np.array_equal(result, expected) for result in results)


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2000, 2))
    return x, x @ [1.0, -1.0] + rng.normal(size=2000) / 10


def engine(key=0):
    return Engine(opvi.online_map(opvi.linear_regression(2), step=0.05), key, batch=20)


def test_models_of_their_own_learn_side_by_side(rows):
    alone = [engine(i) for i in range(4)]
    for one in alone:
        one.feed(rows)
    threaded = [engine(i) for i in range(4)]
    together(*(lambda one=one: one.feed(rows) for one in threaded))
    for one, other in zip(alone, threaded, strict=True):
        np.testing.assert_array_equal(one.state.particles, other.state.particles)


def test_readers_see_whole_states(rows):
    """The same row 1,500 times, which are asked in two parts: one answer, whatever is learnt meanwhile."""
    model, done, answers = engine(), threading.Event(), []
    x = np.ones((1500, 2), np.float32)

    def learn():
        for start in range(0, 2000, 20):
            model.feed((rows[0][start : start + 20], rows[1][start : start + 20]))
            time.sleep(0.001)
        done.set()

    def read():
        while not done.is_set():
            answers.append(model.ask(x, Predictive.mean))

    together(learn, read, read)
    assert len({float(answer[0]) for answer in answers}) > 1  # it learnt meanwhile
    assert all((answer == answer[0]).all() for answer in answers)


def test_a_second_learner_is_refused(rows):
    model, estimator, river = engine(), OPVIClassifier(hidden=(), n_particles=4), Regressor(hidden=(), n_particles=4)
    held, free = threading.Event(), threading.Event()

    def hold():
        with sole_learner(model), sole_learner(estimator), sole_learner(river):
            held.set()
            free.wait(PATIENCE)

    def others():
        held.wait(PATIENCE)
        try:
            for call in (
                lambda: model.feed(rows),
                lambda: estimator.fit(rows[0], rows[1] > 0),
                lambda: estimator.partial_fit(rows[0], rows[1] > 0),
                lambda: river.learn_one({"a": 1.0}, 2.0),
                lambda: river.flush(),
            ):
                with pytest.raises(RuntimeError, match="is learning in another thread, and one model learns in one"):
                    call()
            assert len(model.ask(rows[0][:3], Predictive.mean)) == 3
            assert pickle.loads(pickle.dumps(river)).learn_one({"a": 1.0}, 2.0) is None  # a copy is free
            assert "_learner" not in estimator.__getstate__()
            assert "_learner" not in model.__getstate__()
        finally:
            free.set()

    together(hold, others)
    model.feed(rows)
    with sole_learner(model):
        model.feed(rows)  # within itself


# --- processes --------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_is_told(rows):
    model = engine()
    model.feed((rows[0][:20], rows[1][:20]))
    bare, key = opvi.gauss_newton(opvi.mlp(rows[0].shape[1], (), opvi.gaussian(0.5))), jax.random.key(0)
    batch = next(iter(opvi.stream(rows, 20)))
    state = bare.step(key, bare.init(key), batch)[0]
    keyed = opvi.scale.Keyed(bare, key=0, example=(rows[0][:1], rows[1][:1]))
    records = keyed.start(["a"])
    network, inputs = bare.target, rows[0].shape[1]
    samplers = (
        *(make(network, step=0.1) for make in (opvi.opvi, opvi.online_map, opvi.langevin)),
        *(make(network) for make in (opvi.gauss_newton, opvi.kfac)),
        opvi.ibis(network),
        opvi.sl_opvi(network),
        *(opvi.classifier(inputs, 2), opvi.linear_ekf(inputs, 2), opvi.regressor(inputs)),
        *(opvi.calibrated(bare, network), opvi.watched(bare), opvi.bank([bare, bare])),
        opvi.scale.sharded(bare, opvi.scale.mesh()),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if not child:
        told = asked = 0
        for call in (
            lambda: model.feed(rows),
            lambda: model.ask(rows[0], Predictive.mean),
            lambda: Engine(model.sampler, 0),
            lambda: opvi.run(model.sampler, opvi.stream(rows), 0),
            lambda: model.sampler.step(key, model.state, batch),
            lambda: bare.step(key, state, batch),
            lambda: bare.draws(state, key, 3),
            lambda: model.sampler.predict(model.state, rows[0]),
            lambda: opvi.predict(bare.target, state.particles, rows[0]),
            lambda: keyed.start(["a"]),
            lambda: keyed.learn(records, np.zeros(20, int), (rows[0][:20], rows[1][:20])),
            lambda: keyed.predict(records, np.zeros(1, int), rows[0][:1]),
            *(lambda one=one: one.init(key) for one in samplers),
            *(lambda one=one: one.predict(None, rows[0]) for one in samplers),
        ):
            asked += 1
            try:
                call()
            except RuntimeError as error:
                told += "get_context('spawn')" in str(error)
        os._exit(told if told == asked else 0)
    until = time.monotonic() + PATIENCE
    while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < until:
        time.sleep(0.01)
    if not ended[0]:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert ended[0], "the child hangs"
    assert os.waitstatus_to_exitcode(ended[1]) == 12 + 2 * len(samplers)


def learnt(seed):
    """In another process."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(40, 2))
    model = engine(seed)
    model.feed((x, x @ [1.0, -1.0]))
    return np.asarray(model.state.particles)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["forkserver", "loky"])
def test_processes_started_otherwise_learn(kind):
    expected = learnt(3)
    if kind == "loky":
        from joblib import Parallel, delayed

        (found,) = Parallel(n_jobs=2, backend="loky")([delayed(learnt)(3)])
    else:
        from multiprocessing import get_context

        with get_context(kind).Pool(1) as pool:
            found = pool.apply_async(learnt, (3,)).get(PATIENCE)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
