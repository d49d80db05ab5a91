"""Regret: accounts by hand, comparators, bounds and where they are refused, distances to posteriors, design."""

import math

import jax
import numpy as np
import pytest

import opvi
from opvi import metrics, regret
from opvi.flows.schedules import vanishing

N, D, ROUNDS = 40, 3, 30


def alike(a, b):
    """Equal but for the order in which float64 sums were taken."""
    return jax.tree.all(jax.tree.map(lambda x, y: np.allclose(x, y, rtol=1e-9, atol=1e-12), a, b))


def same(a, b):
    return jax.tree.all(jax.tree.map(np.array_equal, a, b))


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(N, D - 1)).astype(np.float32)
    return X, (X @ [1.0, -0.5] + 0.2 + 0.5 * rng.normal(size=N)).astype(np.float32)


@pytest.fixture(scope="module")
def target():
    return opvi.linear_regression(D - 1)


@pytest.fixture(scope="module")
def batches(rows):
    """Eight of the pool's rows per round, without replacement."""
    rng = np.random.default_rng(1)
    chosen = [rng.choice(N, 8, replace=False) for _ in range(ROUNDS)]
    return [opvi.batch((rows[0][i], rows[1][i])) for i in chosen]


@pytest.fixture(scope="module")
def descent(target):
    return opvi.online_map(target, step=0.1, projection=opvi.flows.ball(3.0))


@pytest.fixture(scope="module")
def flow(target):
    return opvi.opvi(target, step=0.01)


@pytest.fixture(scope="module")
def closed(target, rows):
    return regret.watch(target, regret.pool(target, rows))


START = np.array([[0.0, 0.0, 0.0], [1.0, 1.0, -1.0]], np.float32)


def account(descent, batches, watch, **options):
    state, history = opvi.run(descent, batches, 0, particles=START, callbacks={"regret": watch}, **options)
    np.testing.assert_array_equal(history.callbacks["regret"]["round"], history.round)
    return state, history.callbacks["regret"]["value"]


# --- the account ------------------------------------------------------------------------------


def by_hand(rows, batches):
    """Everything again, in plain loops over rows."""
    X, y = (np.asarray(part, float) for part in rows)
    A = np.column_stack([X, np.ones(N)])
    eta = 6 / (np.pi**2 * np.arange(1, ROUNDS + 1) ** 2)

    def cost(w, A, y):
        return 0.5 * ((A @ w - y) ** 2).mean() + 0.5 * math.log(2 * math.pi)

    def minimiser(data, prior):
        return np.linalg.solve(data * A.T @ A / N + prior * np.eye(D), data * A.T @ y / N)

    w, out = START.astype(float), {name: [] for name in ("gap", "error", "comparator", "static", "cost")}
    total = 0.0
    for t, batch in enumerate(batches):
        Xb, yb = (np.asarray(part, float) for part in batch.data)
        Ab = np.column_stack([Xb, np.ones(len(Xb))])
        best = minimiser(1, eta[t])
        whole = [cost(v, A, y) + eta[t] * v @ v / 2 for v in (*w, best)]
        noisy = np.stack([Ab.T @ (Ab @ v - yb) / len(yb) for v in w])
        exact = np.stack([A.T @ (A @ v - y) / N for v in w])
        out["gap"].append(np.mean(whole[:2]) - whole[2])
        out["error"].append(np.sqrt(((noisy - exact) ** 2).sum(1).mean()))
        out["comparator"].append(best)
        total += np.mean(whole[:2])
        one = minimiser(t + 1, eta[: t + 1].sum())
        out["static"].append(total - (t + 1) * cost(one, A, y) - eta[: t + 1].sum() * one @ one / 2)
        w = w - 0.1 * (noisy + eta[t] * w)
        w = w * np.minimum(1, 3 / np.maximum(np.linalg.norm(w, axis=1), 1e-9))[:, None]
    return {name: np.asarray(values) for name, values in out.items()}


def test_the_account_equals_one_kept_by_hand(descent, batches, rows, closed):
    _, found = account(descent, batches, closed)
    expected = by_hand(rows, batches)
    loose = {"rtol": 2e-5, "atol": 2e-6}  # particles are float32
    np.testing.assert_allclose(found.comparator, expected["comparator"], atol=1e-6)
    np.testing.assert_allclose(found.regret, np.cumsum(expected["gap"]), **loose)
    np.testing.assert_allclose(found.static_regret, expected["static"], rtol=2e-5, atol=1e-5)
    np.testing.assert_allclose(found.error, expected["error"], **loose)
    np.testing.assert_allclose(found.error_sum, np.cumsum(expected["error"]), **loose)
    np.testing.assert_allclose(found.squared_error_sum, np.cumsum(expected["error"] ** 2), **loose)
    steps = np.linalg.norm(np.diff(expected["comparator"], axis=0), axis=1)
    np.testing.assert_allclose(found.path, np.concatenate([[0], np.cumsum(steps)]), atol=1e-6)
    assert (found.cost >= found.best).all()
    assert found.tolerance.max() < 1e-12
    np.testing.assert_array_equal(found.rows, 8)


def test_watching_changes_no_bit(descent, flow, batches, closed, target):
    plain, _ = opvi.run(descent, batches, 0, particles=START)
    watched, _ = account(descent, batches, closed)
    assert same(plain, watched)
    watches = {"posterior": regret.watch_conjugate(target), "noise": regret.watch_noise(target), "regret": closed}
    plain, _ = opvi.run(flow, batches, 0, particles=5)
    watched, history = opvi.run(flow, batches, 0, particles=5, callbacks=watches)
    assert same(plain, watched)
    assert all(len(leaf) == ROUNDS for leaf in jax.tree.leaves(history.callbacks))
    exact = np.asarray(history.callbacks["regret"]["value"].regret)
    assert (np.diff(exact) > 0).all()  # particles spread around the minimiser cost more than it does


def test_any_callback_may_record_every_round(descent, batches):
    """Beside others, which see what `run` itself records."""

    class Moves:
        def record(self, before, after, batch):
            return {"from": before.particles, "to": after.particles, "rows": batch.weight.sum()}

        def __call__(self, chunk):
            assert chunk.record["to"].shape == (len(chunk.batches), 2, D)
            return chunk.record

    def last(chunk):
        return chunk.record[-1]

    state, history = opvi.run(
        descent,
        batches,
        0,
        particles=START,
        record=lambda s, i, b: s.particles,
        callbacks={"moves": Moves(), "last": last},
        every=8,
    )
    moves = history.callbacks["moves"]
    np.testing.assert_array_equal(moves["round"], history.round)
    np.testing.assert_array_equal(moves["value"]["to"], history.record)
    np.testing.assert_array_equal(moves["value"]["from"][1:], history.record[:-1])
    np.testing.assert_array_equal(moves["value"]["from"][0], START)
    assert history.callbacks["last"]["round"].tolist() == [8, 16, 24, 30]
    np.testing.assert_array_equal(history.callbacks["last"]["value"][-1], state.particles)


def test_however_a_run_is_cut_the_account_is_one(descent, batches, closed):
    state, whole = account(descent, batches, closed)
    assert alike(account(descent, batches, closed, every=7)[1], whole)
    half, first = account(descent, batches[:13], closed)
    end, history = opvi.run(descent, batches[13:], 0, state=half, callbacks={"regret": closed})
    assert same(end, state)
    second = history.callbacks["regret"]["value"]
    assert alike(jax.tree.map(lambda a, b: np.concatenate([a, b]), first, second), whole)
    assert alike(account(descent, batches, closed)[1], whole)  # round 1 again: begun anew


def test_a_solver_finds_what_the_closed_form_gives(descent, batches, rows, target, closed):
    by_solver = regret.watch(target, regret.pool(target, rows, lambda t: np.full(N, 1 / N), tolerance=1e-9))
    assert closed.cost.closed_form
    assert not by_solver.cost.closed_form
    exact, found = account(descent, batches, closed)[1], account(descent, batches, by_solver)[1]
    assert found.tolerance.max() < 1e-8
    np.testing.assert_allclose(found.comparator, exact.comparator, atol=1e-7)
    np.testing.assert_allclose(found.regret, exact.regret, atol=1e-9)
    np.testing.assert_allclose(found.static_regret, exact.static_regret, atol=1e-9)


def test_a_pool_that_moves_has_comparators_that_move(descent, batches, rows, target):
    """Weights slide from the first half of the pool to the second: comparators are weighted least squares."""
    share = np.linspace(0, 1, ROUNDS)

    def weights(t):
        return np.repeat([(1 - share[t - 1]), share[t - 1]], N // 2) / (N // 2)

    _, found = account(descent, batches, regret.watch(target, regret.pool(target, rows, weights)))
    A, y = np.column_stack([rows[0], np.ones(N)]).astype(float), rows[1].astype(float)
    for t in (1, 10, ROUNDS):
        eta, a = 6 / (np.pi * t) ** 2, weights(t)
        best = np.linalg.solve(A.T @ (a[:, None] * A) + eta * np.eye(D), A.T @ (a * y))
        np.testing.assert_allclose(found.comparator[t - 1], best, atol=1e-6)
    assert found.path[-1] > 0.1


def test_a_quadratic_that_moves(target):
    def centre(t):
        return np.array([math.cos(t), math.sin(t), 0.0])

    cost = regret.quadratic(target, np.diag([1.0, 2.0, 3.0]), centre, floor=0.5)
    t = np.arange(1, 4)
    points, left = cost.minimise(cost.statistics(t), np.zeros(3), np.zeros(D))
    np.testing.assert_allclose(points, [centre(i) for i in t], atol=1e-12)
    assert left.max() < 1e-12
    value, gradient = cost.evaluate(cost.statistics(t), np.zeros(3), np.zeros((3, 1, D)))
    np.testing.assert_allclose(value[:, 0], [0.5 + 0.5 * math.cos(i) ** 2 + math.sin(i) ** 2 for i in t])
    np.testing.assert_allclose(gradient[:, 0], [-np.array([1, 2, 3]) * centre(i) for i in t])
    np.testing.assert_allclose(regret.smoothness(cost, [1, 2]), 3 + float(vanishing(np.float64(1))))


def test_all_rows_leave_no_error(descent, rows, closed):
    _, found = account(descent, [opvi.batch(rows)] * 3, closed)
    assert found.error.max() < 1e-5  # float32


def test_the_spread_of_rows_is_estimated_online(rows, target):
    """At a w that stays, Λ² of the batches averages to the pool's: each is unbiased."""
    A, y = np.column_stack([rows[0], np.ones(N)]).astype(float), rows[1].astype(float)
    gradients = A * (A @ START[1] - y)[:, None]
    spread = math.sqrt(((gradients - gradients.mean(0)) ** 2).sum() / (N - 1))
    rng = np.random.default_rng(3)
    many = [opvi.batch((rows[0][i], rows[1][i])) for i in (rng.choice(N, 8, replace=False) for _ in range(400))]
    still = opvi.online_map(target, step=1e-12)
    _, history = opvi.run(still, many, 0, particles=START[1:], callbacks={"noise": regret.watch_noise(target)})
    noise = history.callbacks["noise"]["value"]
    # A batch's Λ² has a relative sd of about √(2/7) times some heaviness of tails; the mean of 400 of them is then
    # within 10 %, over 3 sd.
    assert abs(noise.spread[-1] / spread - 1) < 0.1
    np.testing.assert_allclose(noise.error, noise.spread / math.sqrt(8))
    np.testing.assert_allclose(noise.error_sum, np.cumsum(noise.error))


@pytest.mark.parametrize("size", [2, 30])
def test_the_error_of_batches_without_replacement(size):
    """Λ²(1/B - 1/N) within 5 %: the squared errors of 20,000 batches leave a relative sd of about 1 %."""
    rng = np.random.default_rng(4)
    gradients = rng.normal(size=(N, D)) ** 3
    off = gradients - gradients.mean(0)
    spread = math.sqrt((off**2).sum() / (N - 1))
    order = rng.permuted(np.tile(np.arange(N), (20_000, 1)), axis=1)[:, :size]
    measured = (off[order].mean(1) ** 2).sum(1).mean()
    assert abs(regret.design(size, 1, spread, total=N).error[0] ** 2 / measured - 1) < 0.05


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda t, r: regret.watch(t, regret.pool(opvi.linear_regression(4), (np.zeros((5, 4)), r[1][:5]))), "Make it"),
        (lambda t, r: regret.quadratic(t, np.eye(2), np.zeros(3)), "`hessian` is of shape (2, 2)"),
        (lambda t, r: regret.quadratic(t, np.eye(3), lambda i: np.full(3, np.nan)), "finite"),
        (
            lambda t, r: regret.quadratic(opvi.linear_regression(2, prior_variance=opvi.targets.Gamma()), np.eye(4), 0),
            "pool",
        ),
        (lambda t, r: regret.pool(t, r, tolerance=0.0), "`tolerance` is 0.0"),
        (lambda t, r: regret.pool(t, (r[0], r[1][:3])), "same number of rows"),
        (lambda t, r: regret.pool(t, (r[0][:0], r[1][:0])), "0 rows"),
        (lambda t, r: regret.pool(t, (r[0] * np.nan, r[1])), "rows hold NaN"),
        (lambda t, r: regret.quadratic(t, -np.eye(3), np.zeros(3)), "none below 0"),
        (lambda t, r: regret.smoothness(regret.pool(t, r), 0), "rounds count from 1"),
        (lambda t, r: regret.pool(t, r, lambda i: np.ones(N)).statistics(np.array([1])), "sum to 1"),
        (lambda t, r: regret.pool(t, r, lambda i: np.ones(2) / 2).statistics(np.array([1])), "one per row"),
        (lambda t, r: regret.watch_conjugate(t, half_life=0), "`half_life` is 0"),
        (
            lambda t, r: regret.watch_conjugate(opvi.linear_regression(2, prior_variance=opvi.targets.Gamma())),
            "watch_draws",
        ),
    ],
)
def test_what_cannot_be_watched_is_refused(call, words, target, rows):
    with pytest.raises(ValueError, match=".*") as error:
        call(target, rows)
    assert words in str(error.value)


def test_a_cost_without_a_minimiser_is_refused(target):
    flat = regret.quadratic(target, np.diag([1.0, 1.0, 0.0]), np.zeros(D))
    with pytest.raises(ValueError, match="no single minimiser"):
        flat.minimise(flat.statistics(np.array([1])), np.zeros(1), np.zeros(D))
    with pytest.raises(TypeError, match="what batches are drawn from"):
        regret.watch(target, "the rows")


def test_a_watch_of_another_target_is_refused(descent, batches):
    other = opvi.linear_regression(7)
    for watch in (regret.watch_noise(other), regret.watch_conjugate(other)):
        with pytest.raises(ValueError, match="Give the watch the sampler's own target"):
            opvi.run(descent, batches, 0, particles=START, callbacks={"regret": watch})


# --- bounds -----------------------------------------------------------------------------------


def test_lemma_1_as_printed_is_false_and_corrected_holds():
    """Huber cost, no error, L = 1, α = .01, w = 10, R = 11: the step ends at 9.99."""
    settings = {"step": 0.01, "smoothness": 1.0, "diameter": 11.0}
    after = 10 - 0.01 * 1.0
    printed = regret.lemma_bound(10.0, 9.5, 0.0, printed=True, **settings)
    corrected = regret.lemma_bound(10.0, 9.5, 0.0, **settings)
    np.testing.assert_allclose([after, printed, corrected], [9.99, 9.98307, 9.99154], atol=5e-6)
    assert printed < after <= corrected


ERRORS, PATH = np.array([0.5, 1.0, 0.25]), np.array([0.0, 0.1, 0.4])
SETTINGS = {"step": 0.1, "smoothness": 2.0, "diameter": 3.0}


def test_bounds_by_hand():
    xi = 2 * 0.1 - 4 * 2 * 0.01
    root = np.cumsum(np.sqrt(2 * 0.01 * ERRORS**2 + 2 * 0.1 * ERRORS * 3))
    printed = 9 / xi + 3 / xi * root + 3 * PATH / xi
    np.testing.assert_allclose(regret.printed_bound(ERRORS, PATH, **SETTINGS), printed)
    np.testing.assert_allclose(regret.corrected_bound(ERRORS, PATH, **SETTINGS), 2 * printed)
    T, E = np.array([1, 2, 3]), np.cumsum(ERRORS)
    closed = 2 * 3 / xi * (3 + math.sqrt(2) * 0.1 * E + np.sqrt(2 * 0.1 * 3 * T * E) + PATH)
    np.testing.assert_allclose(regret.order_bound(ERRORS, PATH, **SETTINGS), closed)
    tight = (9 + 6 * PATH + 0.01 * np.cumsum(ERRORS**2)) / (2 * 0.1 - 2 * 2 * 0.01)
    np.testing.assert_allclose(regret.tight_bound(ERRORS, PATH, **SETTINGS), tight)
    same_steps = {**SETTINGS, "step": np.full(3, 0.1)}
    np.testing.assert_allclose(regret.tight_bound(ERRORS, PATH, **same_steps), tight)
    assert (regret.order_bound(ERRORS, PATH, **SETTINGS) >= regret.corrected_bound(ERRORS, PATH, **SETTINGS)).all()


ALL = [regret.printed_bound, regret.corrected_bound, regret.order_bound, regret.tight_bound]


@pytest.mark.parametrize("bound", ALL)
def test_bounds_are_refused_where_their_assumptions_fail(bound):
    for change, words in (
        ({"step": 0.5}, "below 1/"),  # 1/L
        ({"step": 0.0}, "above 0"),
        ({"diameter": math.inf}, "bounded set"),
        ({"diameter": -1.0}, "bounded set"),
        ({"smoothness": math.inf}, "finite L"),
        ({"smoothness": math.nan}, "finite L"),
    ):
        with pytest.raises(ValueError, match=words):
            bound(ERRORS, PATH, **{**SETTINGS, **change})
    for errors, path in (([], []), ([-1.0], [0.0]), ([np.nan], [0.0]), ([1.0, 1.0], [1.0, 0.5]), ([1.0], [0.0, 1.0])):
        with pytest.raises(ValueError, match="`errors` has shape|`path` has shape"):
            bound(errors, path, **SETTINGS)


def test_half_of_one_over_l_is_the_theorems_limit_and_not_the_tight_ones():
    almost = {**SETTINGS, "step": 0.3}  # between 1/(2L) and 1/L
    assert np.isfinite(regret.tight_bound(ERRORS, PATH, **almost)).all()
    with pytest.raises(ValueError, match=r"below 1/\(2L\) = 0.25"):
        regret.corrected_bound(ERRORS, PATH, **almost)
    with pytest.raises(ValueError, match="never grow"):
        regret.tight_bound(ERRORS, PATH, **{**SETTINGS, "step": [0.1, 0.2, 0.1]})
    with pytest.raises(ValueError, match="one per round"):
        regret.tight_bound(ERRORS, PATH, **{**SETTINGS, "step": [0.1, 0.1]})
    with pytest.raises(ValueError, match="larger one"):
        regret.lemma_bound(4.0, 1.0, 0.0, **SETTINGS)


# --- distributions ----------------------------------------------------------------------------


def test_bures_and_kl_against_known_values():
    from scipy.linalg import sqrtm

    rng = np.random.default_rng(0)
    m, n = rng.normal(size=(2, 3))
    C, D_ = (a @ a.T + np.eye(3) for a in rng.normal(size=(2, 3, 3)))
    root = sqrtm(D_)
    expected = math.sqrt(((m - n) ** 2).sum() + np.trace(C + D_ - 2 * np.real(sqrtm(root @ C @ root))))
    np.testing.assert_allclose(regret.gaussian_w2(m, C, n, D_), expected)
    np.testing.assert_allclose(regret.gaussian_w2([1.0], [[4.0]], [0.0], [[1.0]]), math.sqrt(2))
    np.testing.assert_allclose(regret.gaussian_w2([m, m], [C, C], [m, n], [C, D_]), [0, expected], atol=1e-6)
    off = m - n
    A = np.linalg.inv(D_)
    kl = 0.5 * (np.trace(A @ C) - 3 + off @ A @ off + math.log(np.linalg.det(D_) / np.linalg.det(C)))
    np.testing.assert_allclose(regret.gaussian_kl(m, C, n, A), kl)
    assert regret.gaussian_kl(m, np.zeros((3, 3)), n, A) == np.inf


def test_kl_of_samples_comes_near_the_closed_form():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2000, 2)), rng.normal(size=(4000, 2)) * 1.5 + [0.5, 0]
    exact = float(regret.gaussian_kl(np.zeros(2), np.eye(2), [0.5, 0], np.eye(2) / 1.5**2))
    # With 5 neighbours a point's logarithm has variance 2·trigamma(5) ≈ .44, so the mean of 2,000 an sd of .015, and
    # neighbours are shared, which doubles it at most; .1 leaves room for the bias as well.
    assert abs(regret.sample_kl(x, y) - exact) < 0.1
    assert regret.sample_kl(np.zeros((10, 2)), y) == math.inf
    assert math.isnan(regret.sample_kl(x * np.nan, y))
    with pytest.raises(ValueError, match="neighbours need more"):
        regret.sample_kl(x[:5], y)
    with pytest.raises(ValueError, match="equal d"):
        regret.sample_kl(x, y[:, :1])


@pytest.mark.parametrize("half_life", [None, 50.0])
def test_the_running_posterior_of_a_linear_model(target, flow, batches, half_life):
    watch = regret.watch_conjugate(target, half_life=half_life)
    _, history = opvi.run(
        flow, batches, 0, particles=5, record=lambda s, i, b: s.particles, callbacks={"posterior": watch}, every=11
    )
    found = history.callbacks["posterior"]["value"]
    F, h, before, path = np.zeros((D, D)), np.zeros(D), None, 0.0
    for t, batch in enumerate(batches):
        A = np.column_stack([batch.data[0], np.ones(8)]).astype(float)
        gamma = 1.0 if half_life is None else 2 ** (-8 / half_life)
        F, h = gamma * F + A.T @ A, gamma * h + A.T @ batch.data[1].astype(float)
        C = np.linalg.inv(F + np.eye(D))
        x = np.asarray(history.record[t], float)
        own = x.mean(0), np.cov(x.T, bias=True)
        np.testing.assert_allclose(found.w2[t], regret.gaussian_w2(*own, C @ h, C), rtol=1e-4)
        np.testing.assert_allclose(found.kl[t], regret.gaussian_kl(*own, C @ h, F + np.eye(D)), rtol=1e-3)
        np.testing.assert_allclose(found.centre[t], np.linalg.norm(own[0] - C @ h), rtol=1e-4)
        path += 0 if before is None else float(regret.gaussian_w2(C @ h, C, *before))
        np.testing.assert_allclose(found.path[t], path, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(found.sd[t], math.sqrt(np.trace(C)), rtol=1e-4)
        before = C @ h, C
    np.testing.assert_allclose(found.w2_sum, np.cumsum(found.w2))
    np.testing.assert_allclose(found.regret, np.cumsum(found.kl))


def test_a_posterior_without_a_closed_form_is_refused(rows):
    logistic = opvi.logistic_regression(D - 1)
    stream = opvi.stream((rows[0], (rows[1] > 0).astype(np.int32)), 8)
    with pytest.raises(ValueError, match="`log_likelihood` is not quadratic"):
        opvi.run(
            opvi.online_map(logistic, step=0.1),
            stream,
            0,
            particles=3,
            callbacks={"posterior": regret.watch_conjugate(logistic)},
        )


def test_draws_of_the_posterior(descent, batches):
    """Three rounds measured, the others not a number; sums skip them."""
    rng = np.random.default_rng(0)
    given = {3: rng.normal(size=(40, D)), 4: rng.normal(size=(40, D)) + 1, 20: rng.normal(size=(40, D))}
    start = rng.normal(size=(20, D)).astype(np.float32)
    _, history = opvi.run(
        descent,
        batches,
        0,
        particles=start,
        record=lambda s, i, b: s.particles,
        callbacks={"posterior": regret.watch_draws(given.get)},
    )
    found = history.callbacks["posterior"]["value"]
    assert np.flatnonzero(np.isfinite(found.w2)).tolist() == [2, 3, 19]
    for t, y in given.items():
        np.testing.assert_allclose(found.w2[t - 1], metrics.wasserstein2(history.record[t - 1], y), rtol=1e-6)
        np.testing.assert_allclose(found.kl[t - 1], regret.sample_kl(history.record[t - 1], y), rtol=1e-6)
    between = [metrics.wasserstein2(given[a], given[b]) for a, b in ((3, 4), (4, 20))]
    np.testing.assert_allclose(found.path[[2, 3, 18, 19, 29]], np.cumsum([0, *between])[[0, 1, 1, 2, 2]])
    np.testing.assert_allclose(found.w2_sum[-1], np.nansum(found.w2))


# --- design -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rho", [0.25, 0.55, 0.75, 1.0])
def test_the_error_sum_grows_as_predicted(rho):
    plan = regret.design(opvi.schedules.power(rho), 6400, 2.0)
    assert abs(regret.slope(plan.error_sum, 400) - (1 - rho / 2)) < 0.015
    np.testing.assert_allclose(plan.error[:3], [2 / math.sqrt(math.ceil(t**rho)) for t in (1, 2, 3)])
    assert plan.rows[-1] == sum(math.ceil(t**rho) for t in range(1, 6401))
    # Never above the paper's bound, since a batch is rounded up.
    T = np.arange(1, 6401)
    assert (plan.error_sum <= 2 * 2 / (2 - rho) * T ** (1 - rho / 2)).all()


def test_designs():
    static = regret.design(20, 6400, 1.5)
    assert abs(regret.slope(static.error_sum, 400) - 1) < 1e-9
    pool = regret.design(opvi.schedules.saturating(0.5, 100), 50, 1.0, total=100, path=np.arange(50.0))
    sizes = np.array([opvi.schedules.saturating(0.5, 100).size(t) for t in range(1, 51)])
    np.testing.assert_allclose(pool.error, np.sqrt(1 / sizes - 1 / 100))
    assert (pool.error <= np.arange(1, 51) ** -0.25 + 1e-12).all()
    assert pool.proved_order[-1] == max(math.sqrt(50 * pool.error_sum[-1]), 49)
    assert pool.unbiased_order[-1] == max(pool.squared_error_sum[-1], 49)
    table = regret.design_table({"B = 20": static, "short": regret.design(3, 2, 1.0)})
    assert "| B = 20 | 128,000 |" in table
    assert table.count("\n") == 3
    for wrong, words in (
        (lambda: regret.design(20, 0, 1.0), "`rounds` is 0"),
        (lambda: regret.design(20, 5, math.nan), "`spread` is nan"),
        (lambda: regret.design(20, 5, 1.0, total=10), "slower rule"),
        (lambda: regret.slope(np.ones(10), 6), "needs"),
        (lambda: regret.slope(np.ones(10), 0), "needs"),
    ):
        with pytest.raises(ValueError, match=words):
            wrong()


def test_the_diameter_measured(descent, batches, closed):
    _, found = account(descent, batches, closed)
    assert found.distance.max() <= regret.diameter(found) <= found.distance.max() + found.path[-1]
