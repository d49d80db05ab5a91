"""The Gaussian process beside a regressor's networks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, DotProduct, RationalQuadratic

import opvi
from opvi.tracking import _process as processes
from opvi.tracking import _regressor_learning as learning
from opvi.tracking._neighbours import without_memory
from opvi.tracking._scaling import Scale

learn = jax.jit(processes.learn, static_argnums=3)
beside = jax.jit(processes.beside)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 3)).astype(np.float32) * [1, 10, 0.1] + [0, 5, 2]
Y = (np.sin(X[:, 0]) + 0.1 * X[:, 1] + 0.1 * RNG.normal(size=60)).astype(np.float32)
SCALE = Scale(jnp.asarray([0, 5, 2, 3.0]), jnp.asarray([1, 10, 0.1, 2.0]))
Z, T = (X - [0, 5, 2]) / [1, 10, 0.1], (Y - 3) / 2


@pytest.fixture
def as_they_are(monkeypatch):
    """Settings stay as they are."""
    for name in ("MANY_STEPS", "FEW_STEPS", "FEWEST_STEPS"):
        monkeypatch.setattr(processes, name, 0)
    jax.clear_caches()
    yield
    jax.clear_caches()


def taught(x=X, y=Y, weight=None, half_life=None, batch=20, process=None):
    process = processes.start(3, jnp.float32) if process is None else process
    weight = np.ones(len(y)) if weight is None else weight
    for at in range(0, len(y), batch):
        rows = tuple(jnp.asarray(a[at : at + batch], jnp.float32) for a in (x, y, weight))
        process = learn(process, SCALE, rows, half_life)
    return process


def exact(z, t, noise, asked, length=3**0.5):
    """Return scikit-learn's mean and variance of the function, standardised, for settings as they begin."""
    s, _, v = processes.USUAL
    kernel = ConstantKernel(s, "fixed") * RationalQuadratic(length, 2.0, "fixed", "fixed")
    kernel += ConstantKernel(v / 3, "fixed") * DotProduct(1e-5, "fixed") + ConstantKernel(processes.CONSTANT, "fixed")
    mean, sd = GaussianProcessRegressor(kernel, alpha=noise, optimizer=None).fit(z, t).predict(asked, return_std=True)
    return mean, sd**2


NOISE = processes.USUAL[1] + processes.SMALLEST_NOISE
ASKED = X[:7] + np.float32(0.05)


def test_it_predicts_what_scikit_learn_does_and_rows_weigh_as_counts(as_they_are):
    weight = RNG.integers(1, 4, 60).astype(float)
    copies = np.repeat(np.arange(60), weight.astype(int))
    mean, variance = exact(Z[copies], T[copies], NOISE, (ASKED - [0, 5, 2]) / [1, 10, 0.1])
    said = beside(taught(weight=weight), SCALE, jnp.asarray(ASKED, jnp.float32))
    np.testing.assert_allclose(said.mean, mean, atol=1e-4)
    np.testing.assert_allclose(said.variance, variance, rtol=2e-3)


def test_rows_fade_by_the_half_life_and_batches_make_no_difference(as_they_are):
    ages = np.arange(59, -1, -1)
    mean, _ = exact(Z, T, NOISE / 2.0 ** (-ages / 30), (ASKED - [0, 5, 2]) / [1, 10, 0.1])
    for batch in (20, 1):
        said = beside(taught(half_life=30.0, batch=batch), SCALE, jnp.asarray(ASKED, jnp.float32))
        np.testing.assert_allclose(said.mean, mean, atol=1e-4)


@pytest.mark.parametrize("count", [processes.TAUGHT + 40, processes.ROWS + 100])
def test_the_oldest_rows_are_replaced_and_rows_without_weight_are_not_kept(as_they_are, count):
    x = np.tile(X, (11, 1))[:count] + 0.01 * RNG.normal(size=(count, 3))
    y, weight = np.tile(Y, 11)[:count], np.ones(count)
    weight[200] = 0
    kept = np.delete(np.arange(count), 200)[-processes.ROWS :]
    z = (x - [0, 5, 2]) / [1, 10, 0.1]
    mean, _ = exact(z[kept], (y[kept] - 3) / 2, NOISE, (ASKED - [0, 5, 2]) / [1, 10, 0.1])
    process = taught(x, y, weight)
    process = process._replace(counts=process.counts.at[1].set(1))
    process = taught(x[:0], y[:0], process=jax.jit(processes._fitted, static_argnums=2)(process, SCALE, None))
    np.testing.assert_allclose(beside(process, SCALE, jnp.asarray(ASKED, jnp.float32)).mean, mean, atol=2e-3)


def test_counts_do_not_overflow():
    process = taught()
    late = process._replace(counts=process.counts + processes.MANY)  # a multiple of the places
    after, usual = (taught(X[:40], Y[:40], process=one) for one in (late, process))
    assert after.counts.tolist() == [100 + processes.MANY // 2, 60 + processes.MANY // 2]
    np.testing.assert_array_equal(after.rows, usual.rows)


def test_predictions_do_not_depend_on_the_units_asked_for():
    process = taught()
    other = Scale(jnp.asarray([9, 9, 9, -10.0]), jnp.asarray([3, 3, 3, 0.5]))
    one, two = (beside(process, scale, jnp.asarray(ASKED, jnp.float32)) for scale in (SCALE, other))
    np.testing.assert_allclose(one.mean * 2 + 3, two.mean * 0.5 - 10, rtol=1e-5)
    np.testing.assert_allclose(one.variance * 4, two.variance * 0.25, rtol=1e-5)


def test_settings_climb_the_marginal_likelihood():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(200, 3)).astype(np.float32)
    y = (np.sin(2 * x[:, 0]) + 0.05 * rng.normal(size=200)).astype(np.float32)
    flat = Scale(jnp.zeros(4), jnp.ones(4))
    process = processes.start(3, jnp.float32)
    for at in range(0, 200, 20):
        rows = jnp.asarray(x[at : at + 20]), jnp.asarray(y[at : at + 20]), jnp.ones(20)
        process = learn(process, flat, rows, None)
    lengths, noise = np.exp(process.settings[0, :3]), np.exp(process.settings[0, 4])
    assert lengths[0] < 1.5 < 3 < lengths[1:].min()  # the two that do not matter become long
    assert 0.03**2 < noise < 0.1**2  # 0.05² is true, 0.1 was the start

    def evidence(settings):
        (_, bent), line = processes._parts(settings, jnp.ones(3), jnp.asarray(x), jnp.asarray(x))
        k = np.asarray(bent + line, float)
        k += np.eye(200) * (np.exp(float(settings[4])) + processes.SMALLEST_NOISE)
        return -0.5 * (y @ np.linalg.solve(k, y) + np.linalg.slogdet(k)[1])

    begin = processes.start(3, jnp.float32).settings[0]
    assert evidence(process.settings[0]) > evidence(begin) + 100

    usual, long = (
        process._replace(settings=process.settings.at[0, 1:3].set(0.5 * np.log(3) + u)) for u in (1, processes.LONG)
    )
    np.testing.assert_allclose(processes.vanished(usual)[1:], 0, atol=1e-6)
    surely = processes.vanished(long)
    assert -0.95 > surely[0] / processes.share(process) > -1  # it helps, and its length is short
    assert 0.95 < surely[1:].min() / processes.share(process) <= surely.max() / processes.share(process) < 1
    still = long._replace(scale=flat._replace(sd=flat.sd.at[1].set(0)))
    np.testing.assert_array_equal(processes.vanished(still) > 0, [False, False, True])
    early = long._replace(counts=process.counts.at[1].set(processes.JUDGED - 1))
    assert not processes.vanished(early).any()
    straight = long._replace(alpha=process.alpha + 10 * process.points[:, 1])  # a slope that needs no length
    assert processes.vanished(straight)[1] == 0 < processes.vanished(straight)[2]
    noisy = long._replace(settings=long.settings.at[0, 4].set(3.0))  # in which no column can be seen to help
    assert not processes.vanished(noisy).any()
    assert processes.vanished(process, 3) is None


def test_columns_that_have_not_moved_have_long_lengths():
    still = SCALE._replace(sd=SCALE.sd.at[1].set(0))
    process = processes.start(3, jnp.float32)
    rows = tuple(jnp.asarray(a[:20], jnp.float32) for a in (X, Y, np.ones(60)))
    lengths = [learn(process, scale, rows, None).settings[0, 1] - 0.5 * np.log(3) for scale in (still, SCALE)]
    assert lengths[1] < lengths[0] == pytest.approx(processes.LONG)


def test_all_rows_teach_the_settings():
    many = tuple(np.resize(a, (processes.ROWS, *a.shape[1:])) for a in (X, Y))
    process = taught(*many, batch=128)._replace(counts=jnp.asarray([processes.ROWS, 0]))
    mixed = process.rows[processes.TAUGHT :, -2][::-1]  # targets of other rows: noise
    late = process._replace(rows=process.rows.at[processes.TAUGHT :, -2].set(mixed))
    none = jnp.zeros((128, 3)), jnp.zeros(128), jnp.zeros(128)
    one, two = (learn(p, SCALE, none, None).settings[0] for p in (process, late))
    assert np.abs(one - two).max() > 0.05


@pytest.mark.parametrize("columns", [processes.HELP, 25])
def test_a_length_is_usual_or_long_and_the_other_columns_say_how_likely_that_is(columns):
    """Of 25 columns, 15 are thought not to help, which counts for 10 columns, and 10 have shown it."""
    prior = processes._prior(columns, jnp.float32)
    off = np.where(np.arange(columns) % 5 < 2, processes.LONG + 1, RNG.normal(0, 0.1, columns))
    settings = prior[0] + jnp.asarray([*off, 0.3, -1.0, 2.0], jnp.float32)
    long = (6.0 + 10.0) / 35 if columns > processes.HELP else 0.0

    def density(u):
        usual, other = (jnp.exp(-((u - middle) ** 2) / 2) for middle in (0, processes.LONG))
        return -jnp.log((1 - long) * usual + long * other)

    wanted = jax.vmap(jax.grad(density))(jnp.asarray(off, jnp.float32))
    found = processes._pull(settings, prior)
    np.testing.assert_allclose(found[:columns], wanted, atol=0.02)
    np.testing.assert_allclose(found[columns:], np.array([0.3, -1, 2]) / processes.SPREAD**2, rtol=1e-5)


@pytest.mark.parametrize("columns", [3, processes.HELP + 2])
def test_slopes_are_those_of_the_covariance(columns):
    lengths = np.resize([0.3, -0.2, 0.5], columns) + np.linspace(0, processes.LONG, columns) * (columns > 3)
    settings = jnp.asarray([*lengths, 0.1, -2.0, 1.0], jnp.float32)
    z, weight = RNG.normal(size=(15, columns)), jnp.asarray(RNG.uniform(0.5, 2, 15), jnp.float32)
    z = jnp.asarray(z, jnp.float32)
    G = RNG.normal(size=(15, 15))
    G = jnp.asarray(G + G.T, jnp.float32)

    def whole(settings):
        (_, bent), line = processes._parts(settings, processes._lines(settings), z, z)
        return (G * (bent + line + jnp.diag(processes._noise(settings) / weight))).sum()

    inner, bent = processes._parts(settings, processes._lines(settings), z, z)[0]
    found = processes._slopes(settings, G, inner * bent, bent, z, weight)
    np.testing.assert_allclose(found, jax.grad(whole)(settings), rtol=1e-4, atol=1e-4)
    own = np.diagonal(bent + processes._parts(settings, processes._lines(settings), z, z)[1])
    np.testing.assert_allclose(processes._own(settings, processes._lines(settings), z), own, rtol=1e-5)
    # Of many columns, one that has vanished has no part that is straight either.
    far = jnp.zeros((1, columns)).at[0, 2].set(10.0)
    usual, long = (settings.at[2].set(0.5 * np.log(columns) + u) for u in (0, processes.LONG))
    slope, none = (
        processes._parts(one, processes._lines(one), far, far)[1][0, 0] - processes.CONSTANT for one in (usual, long)
    )
    assert float(none / slope) == pytest.approx(1 if columns <= processes.HELP else 0.018, abs=0.002)


@pytest.mark.parametrize("filled", [1, 64, 65, 256, 1000])
def test_roots_are_made_block_by_block_and_empty_blocks_are_left_out(filled):
    rows, K = min(filled, 256), np.eye(256)
    z = np.random.default_rng(0).normal(size=(rows, 3))
    K[:rows, :rows] = np.exp(-((z[:, None] - z[None]) ** 2).sum(2)) + 0.1 * np.eye(rows)
    W, inverse = jax.jit(processes._rooted)(jnp.asarray(K, jnp.float32), jnp.asarray(filled, jnp.int32))
    blocks = -(-rows // processes.BLOCK) * processes.BLOCK
    expected = np.linalg.inv(np.linalg.cholesky(K))[:blocks, :blocks]
    np.testing.assert_allclose(W[:blocks, :blocks], expected, atol=1e-4)
    np.testing.assert_allclose(inverse[:blocks, :blocks], expected.T @ expected, atol=1e-3)
    assert not np.asarray(W)[blocks:].any()
    assert not np.asarray(inverse)[blocks:].any()


def test_the_share_is_the_best_one_for_the_errors_seen():
    process = taught()
    size, y = jnp.asarray(0.01), jnp.zeros(20)
    rng = np.random.default_rng(2)
    own, its = rng.normal(0, 0.1, 20), rng.normal(0, 0.05, 20)
    said = beside(process, SCALE, jnp.asarray(ASKED, jnp.float32))._replace(mean=jnp.asarray(its, jnp.float32))
    new = processes.scored(process, said, jnp.asarray(own, jnp.float32), y, jnp.ones(20), size)
    a, b, c = (np.sum(one) / 0.01 for one in (own**2, own * its, its**2))
    ridge = processes.RIDGE
    np.testing.assert_allclose(processes.share(new), (a - b + ridge) / (a - 2 * b + c + 2 * ridge), rtol=1e-4)
    for _ in range(30):
        process = processes.scored(process, said, 0 * y, y, jnp.ones(20), size)  # networks without an error
    assert processes.share(process) < 0.1
    assert processes.share(processes.start(3, jnp.float32)) == 0  # nothing is fitted
    wild = processes.scored(new, said, 1e30 * y + 1e30, y, jnp.ones(20), size)  # one row cannot say more than 5² errors
    assert wild.errors[0] <= processes.MEMORY * new.errors[0] + 20 * processes.LARGEST**2 + 1e-3


def test_after_a_jump_it_follows_new_units_or_forgets():
    process, x = taught(), jnp.asarray(ASKED, jnp.float32)
    new = Scale(SCALE.mean.at[-1].set(50.0), SCALE.sd.at[-1].set(6.0))
    follows = processes.jumped(process, SCALE, new, jnp.array(True))
    before, after = beside(process, SCALE, x), beside(follows, new, x)
    np.testing.assert_allclose(after.mean, before.mean, rtol=1e-4, atol=1e-5)
    again = beside(taught(X[:20], (Y[:20] - 3) * 3 + 50, process=follows), new, x)  # rows in the new units fit the old
    np.testing.assert_allclose(again.mean, before.mean, atol=0.1)
    forgets = processes.jumped(process, SCALE, new, jnp.array(False))
    jax.tree.map(np.testing.assert_array_equal, forgets, processes.start(3, jnp.float32))


def test_more_columns_change_nothing_until_they_move():
    process, x = taught(), jnp.asarray(ASKED, jnp.float32)
    wide = processes.widened(process, processes.start(5, jnp.float32))
    assert jax.tree.map(jnp.shape, wide) == jax.tree.map(jnp.shape, processes.start(5, jnp.float32))
    scale = Scale(*(jnp.insert(one, 3, jnp.zeros(2)) for one in SCALE))
    before, after = beside(process, SCALE, x), beside(wide, scale, jnp.pad(x, ((0, 0), (0, 2)), constant_values=7))
    np.testing.assert_allclose(after.mean, before.mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(after.variance, before.variance, rtol=1e-3)
    moving = Scale(scale.mean.at[3:5].set(7.0), scale.sd.at[3:5].set(2.0))
    new = np.concatenate([X[:20], RNG.normal(7, 2, size=(20, 2))], 1).astype(np.float32)
    learnt = learn(wide, moving, (jnp.asarray(new), jnp.asarray(Y[:20]), jnp.ones(20)), None)
    assert learnt.counts.tolist() == [80, 80]  # old rows, in which the new columns are missing, can be fitted
    said = beside(learnt, moving, jnp.pad(x, ((0, 0), (0, 2)), constant_values=7))
    np.testing.assert_allclose(said.mean, before.mean, atol=0.3)


def test_a_covariance_that_cannot_be_factored_leaves_no_process():
    broken = taught()._replace(settings=jnp.full((3, 6), jnp.nan), counts=jnp.asarray([60, 1]))
    after = taught(X[:20], Y[:20], process=broken)
    assert after.counts[1] == 0
    assert processes.share(after) == 0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after))
    assert taught(X[:20], Y[:20], process=after).counts[1] == 100  # and it begins again


def test_rows_that_networks_learn_again_do_not_join_it_twice():
    made = opvi.regressor(3)
    state = learning.start(made, jnp.zeros((made.particles, made.network.dim)))._replace(scale=SCALE)
    rows = jnp.asarray(X[:5], jnp.float32), jnp.asarray(Y[:5]), jnp.ones(5)
    for before, count in ((None, 5), (jnp.array(-1.0), 5), (jnp.array(2.0), 0)):
        assert learning._with_rows(made, state, rows, before).process.counts[0] == count


def errors(process, seed, rows=400, turn=None):
    rng = np.random.default_rng(seed)
    x = rng.uniform(size=(rows, 8)).astype(np.float32)
    u = x if turn is None else np.where(np.arange(rows)[:, None] < turn, x, x[:, ::-1])
    y = 10 * np.sin(np.pi * u[:, 0] * u[:, 1]) + 20 * (u[:, 2] - 0.5) ** 2 + 10 * u[:, 3] + 5 * u[:, 4]
    y = (y + rng.normal(size=rows)).astype(np.float32)
    made = opvi.regressor(8, hidden=(10,), particles=4, process=process)
    _, history = opvi.run(made, opvi.stream((x, y), 20), seed)
    return np.asarray(history.info.squared_error)


ROUNDS = slice(25, 40), slice(45, 50), slice(45, 50)  # before a jump, and rows 100 to 200 after it


def test_few_rows_are_enough():
    plain, better = (np.sqrt(errors(process, 3)[5:].mean()) for process in (False, True))
    assert better < 0.7 * plain
    assert better < 1.5  # the noise is 1


def test_a_new_function_is_soon_learnt():
    plain, better = (errors(process, 4, 1200, 800) for process in (False, True))
    before, after, alone = (np.sqrt(e[rows].mean()) for e, rows in zip((better, better, plain), ROUNDS, strict=True))
    assert after < 0.65 * alone
    assert after < 1.5 * before


def test_networks_of_few_columns_have_one_and_fleets_have_none():
    assert "Gaussian process" in opvi.regressor(8).about
    for made in (opvi.regressor(8, process=False), opvi.regressor(8, hidden=()), opvi.regressor(65)):
        assert "Gaussian process" not in made.about
        assert jax.eval_shape(made.init, jax.random.key(0)).process is None
    assert not without_memory(opvi.regressor(8)).processed
    assert without_memory(opvi.regressor(8, memory_rows=100)) == opvi.regressor(8, memory_rows=100, process=False)
    named = {field.name: field.metadata for field in dataclasses.fields(opvi.regressor(8))}
    assert named["process"]["off"] is False  # older files hold no such setting
    with pytest.raises(ValueError, match="`process` is 'yes', but must be True or False"):
        opvi.regressor(8, process="yes")
