"""The Gaussian process beside a regressor's networks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, DotProduct, RationalQuadratic

import opvi
from opvi.tracking._recommended import without_rows
from opvi.tracking.experts import Context, Rows, Units
from opvi.tracking.experts import _process as processes
from opvi.tracking.experts._process import Process

RNG = np.random.default_rng(0)
Z = RNG.normal(size=(60, 3)).astype(np.float32)
T = ((np.sin(Z[:, 0]) + Z[:, 1] + 0.1 * RNG.normal(size=60)) / 2).astype(np.float32)
EXPERT, LEARN = Process(), jax.jit(lambda expert, *given: expert.learn(None, *given), static_argnums=0)
SAID = jax.jit(EXPERT.predict)


def rows_of(z, y=None, weight=None):
    z = jnp.asarray(z, jnp.float32)
    y = jnp.zeros(len(z)) if y is None else jnp.asarray(y, jnp.float32)
    weight = jnp.ones(len(z)) if weight is None else jnp.asarray(weight, jnp.float32)
    return Rows(z, z, y, weight, jnp.zeros(len(z)), jnp.zeros(len(z)))


@pytest.fixture
def as_they_are(monkeypatch):
    """Settings stay as they are."""
    for name in ("MANY_STEPS", "FEW_STEPS", "FEWEST_STEPS"):
        monkeypatch.setattr(processes, name, 0)
    jax.clear_caches()
    yield
    jax.clear_caches()


def taught(z=Z, y=T, weight=None, half_life=None, batch=20, process=None, trust=1.0):
    expert = Process(half_life)
    process = expert.init(None, z.shape[1], jnp.float32) if process is None else process
    weight = np.ones(len(y)) if weight is None else weight
    for at in range(0, len(y), batch):
        rows = rows_of(*(a[at : at + batch] for a in (z, y, weight)))
        one = jnp.ones(len(rows.y))
        context = Context(None, trust * one, one, one, rows.z, one.sum(), jnp.ones(()), jnp.array(False))
        process = LEARN(expert, process, rows, context)
    return process


def exact(z, t, noise, asked, length=3**0.5):
    """Return scikit-learn's mean and variance of the function, standardised, for settings as they begin."""
    s, _, v = processes.USUAL
    kernel = ConstantKernel(s, "fixed") * RationalQuadratic(length, 2.0, "fixed", "fixed")
    kernel += ConstantKernel(v / 3, "fixed") * DotProduct(1e-5, "fixed") + ConstantKernel(processes.CONSTANT, "fixed")
    mean, sd = GaussianProcessRegressor(kernel, alpha=noise, optimizer=None).fit(z, t).predict(asked, return_std=True)
    return mean, sd**2


NOISE = processes.USUAL[1] + processes.SMALLEST_NOISE
ASKED = Z[:7] + np.float32(0.05)


def test_it_predicts_what_scikit_learn_does_and_rows_weigh_as_counts(as_they_are):
    weight = RNG.integers(1, 4, 60).astype(float)
    copies = np.repeat(np.arange(60), weight.astype(int))
    mean, variance = exact(Z[copies], T[copies], NOISE, ASKED)
    said = SAID(taught(weight=weight), rows_of(ASKED))
    np.testing.assert_allclose(said.mean, mean, atol=1e-4)
    np.testing.assert_allclose(said.variance, variance, rtol=2e-3)


def test_rows_fade_by_the_half_life_and_batches_make_no_difference(as_they_are):
    ages = np.arange(59, -1, -1)
    mean, _ = exact(Z, T, NOISE / 2.0 ** (-ages / 30), ASKED)
    for batch in (20, 1):
        said = SAID(taught(half_life=30.0, batch=batch), rows_of(ASKED))
        np.testing.assert_allclose(said.mean, mean, atol=1e-4)


@pytest.mark.parametrize("count", [processes.TAUGHT + 40, processes.ROWS + 100])
def test_the_oldest_rows_are_replaced_and_rows_without_weight_are_not_kept(as_they_are, count):
    x = np.tile(Z, (11, 1))[:count] + 0.01 * RNG.normal(size=(count, 3))
    y, weight = np.tile(T, 11)[:count], np.ones(count)
    weight[200] = 0
    kept = np.delete(np.arange(count), 200)[-processes.ROWS :]
    z = x
    mean, _ = exact(z[kept], y[kept], NOISE, ASKED)
    process = taught(x, y, weight)
    process = process._replace(counts=process.counts.at[1].set(1))
    process = jax.jit(processes._fitted, static_argnums=1)(process, None)
    np.testing.assert_allclose(SAID(process, rows_of(ASKED)).mean, mean, atol=2e-3)


def test_counts_do_not_overflow():
    process = taught()
    late = process._replace(counts=process.counts + processes.MANY)  # a multiple of the places
    after, usual = (taught(Z[:40], T[:40], process=one) for one in (late, process))
    assert after.counts.tolist() == [100 + processes.MANY // 2, 60 + processes.MANY // 2]
    np.testing.assert_array_equal(after.rows, usual.rows)


def test_in_new_units_it_says_the_same():
    """Also of rows that come after the units changed, and once it has been fitted again."""
    process = taught()
    shift, ratio, by, off = np.array([0.5, -1, 0]), np.array([2, 0.5, 1.0]), 0.5, 3.0
    given = [jnp.asarray(a, jnp.float32) for a in (shift, ratio, shift > 9, shift, by, off)]
    moved = EXPERT.rescale(process, Units(*given))
    before, after = SAID(process, rows_of(ASKED)), SAID(moved, rows_of((ASKED - shift) / ratio))
    np.testing.assert_allclose(after.mean, by * before.mean + off, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(after.variance, by**2 * before.variance, rtol=1e-3)
    np.testing.assert_allclose(after.noise, by**2 * before.noise, rtol=1e-5)
    z, y = RNG.normal(size=(20, 3)), RNG.normal(size=20)
    one, two = taught(z, y, process=process), taught((z - shift) / ratio, by * y + off, process=moved)
    np.testing.assert_allclose(two.rows[:80, 3], by * one.rows[:80, 3] + off, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(two.rows[:80, :3], (np.asarray(one.rows)[:80, :3] - shift) / ratio, rtol=1e-4, atol=1e-5)


def test_settings_climb_the_marginal_likelihood():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(200, 3)).astype(np.float32)
    y = (np.sin(2 * x[:, 0]) + 0.05 * rng.normal(size=200)).astype(np.float32)
    process = taught(x, y)
    lengths, noise = np.exp(process.settings[0, :3]), np.exp(process.settings[0, 4])
    assert lengths[0] < 1.5 < 3 < lengths[1:].min()  # the two that do not matter become long
    assert 0.03**2 < noise < 0.1**2  # 0.05² is true, 0.1 was the start

    def evidence(settings):
        (_, bent), line = processes._parts(settings, jnp.ones(3), jnp.asarray(x), jnp.asarray(x))
        k = np.asarray(bent + line, float)
        k += np.eye(200) * (np.exp(float(settings[4])) + processes.SMALLEST_NOISE)
        return -0.5 * (y @ np.linalg.solve(k, y) + np.linalg.slogdet(k)[1])

    begin = EXPERT.init(None, 3, jnp.float32).settings[0]
    assert evidence(process.settings[0]) > evidence(begin) + 100


def test_columns_that_have_not_moved_have_long_lengths():
    still = Z * np.array([1, 0, 1], np.float32)
    lengths = [taught(z[:20], T[:20]).settings[0, 1] - 0.5 * np.log(3) for z in (still, Z)]
    assert lengths[1] < lengths[0] == pytest.approx(processes.LONG)


def test_all_rows_teach_the_settings():
    many = tuple(np.resize(a, (processes.ROWS, *a.shape[1:])) for a in (Z, T))
    process = taught(*many, batch=128)._replace(counts=jnp.asarray([processes.ROWS, 0]))
    mixed = process.rows[processes.TAUGHT :, -2][::-1]  # targets of other rows: noise
    late = process._replace(rows=process.rows.at[processes.TAUGHT :, -2].set(mixed))
    one, two = (jax.jit(processes._fitted, static_argnums=1)(p, None).settings[0] for p in (process, late))
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


def test_more_columns_change_nothing_until_they_move():
    process = taught()
    wide = EXPERT.widen(process, EXPERT.init(None, 5, jnp.float32))
    assert jax.tree.map(jnp.shape, wide) == jax.tree.map(jnp.shape, EXPERT.init(None, 5, jnp.float32))
    asked = np.pad(ASKED, ((0, 0), (0, 2)))
    before, after = SAID(process, rows_of(ASKED)), SAID(wide, rows_of(asked))
    np.testing.assert_allclose(after.mean, before.mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(after.variance, before.variance, rtol=1e-3)
    new = np.concatenate([Z[:20], RNG.normal(size=(20, 2))], 1).astype(np.float32)
    learnt = taught(new, T[:20], process=wide)
    assert learnt.counts.tolist() == [80, 80]  # old rows, in which the new columns are missing, can be fitted
    np.testing.assert_allclose(SAID(learnt, rows_of(asked)).mean, before.mean, atol=0.3)


def test_outliers_move_towards_what_the_stack_says():
    """A target of trust w stays w of its distance from the base, here 0, and weighs w."""
    kept = np.asarray(taught(Z[:5], T[:5], trust=0.25).rows)[:5]
    np.testing.assert_allclose(kept[:, 3], T[:5] / 4, rtol=1e-6)
    np.testing.assert_allclose(kept[:, 4], 0.25)


def test_a_covariance_that_cannot_be_factored_leaves_no_process():
    broken = taught()._replace(settings=jnp.full((3, 6), jnp.nan), counts=jnp.asarray([60, 1]))
    after = taught(Z[:20], T[:20], process=broken)
    assert after.counts[1] == 0
    assert float(SAID(after, rows_of(ASKED)).variance.min()) == processes.UNFITTED
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after))
    assert taught(Z[:20], T[:20], process=after).counts[1] == 100  # and it begins again


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
    assert Process() in opvi.regressor(8).experts
    for made in (opvi.regressor(8, process=False), opvi.regressor(8, hidden=()), opvi.regressor(65)):
        assert Process() not in made.experts
    assert Process() not in without_rows(opvi.regressor(8)).experts
    with pytest.raises(ValueError, match="`process` is 'yes', but must be True or False"):
        opvi.regressor(8, process="yes")
