"""The network: its passes against JAX's derivatives, its parameters as layers and as a vector, its hidden units."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import opvi
from opvi.targets import MLP, Layer, activation_and_slope, backward, forward, jacobian

ACTIVATIONS = {"relu": jax.nn.relu, "tanh": jnp.tanh, "sine": jnp.sin}
X = jnp.asarray(np.random.default_rng(0).normal(size=(6, 3)), jnp.float32)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("hidden", [(), (4,), (4, 5)])
def test_the_jacobian_is_that_of_jax(hidden, activation):
    net = MLP((3, *hidden, 1), ACTIVATIONS[activation], bias_spread=0.5)
    layers = net.init(jax.random.key(0))
    passed = forward(layers, X, activation_and_slope(net.activation))
    np.testing.assert_array_equal(passed.outputs, net.apply(layers, X))
    slopes = backward(layers, passed, jnp.ones_like(passed.outputs))
    expected = jax.jacrev(lambda w: net.apply(net.split(w), X)[:, 0])(net.join(layers))
    np.testing.assert_allclose(jacobian(passed, slopes), expected, rtol=1e-5, atol=1e-6)


def test_backward_takes_several_gradients_at_once():
    net = MLP((3, 4, 2), jnp.tanh)
    layers = net.init(jax.random.key(0))
    passed = forward(layers, X, activation_and_slope(net.activation))
    roots = jax.random.normal(jax.random.key(1), (5, 6, 2))
    at_once = jax.vmap(backward, (None, None, 0))(layers, passed, roots)
    assert [part.shape for part in at_once] == [(5, 6, 4), (5, 6, 2)]
    for root, slopes in zip(roots, zip(*at_once, strict=True), strict=True):
        expected = jax.vjp(lambda w: net.apply(net.split(w), X), net.join(layers))[1](root)[0]
        np.testing.assert_allclose(jacobian(passed, slopes).sum(0), expected, rtol=1e-4, atol=1e-6)


def test_a_vector_holds_the_layers_as_the_targets_ravel_does():
    target = opvi.mlp(3, (4, 5), opvi.categorical(), outputs=2)
    net = target.architecture.mlp
    params = target.init(jax.random.key(0))
    np.testing.assert_array_equal(net.join(params["weights"]), target.ravel(params))
    for made, given in zip(net.split(target.ravel(params)), params["weights"], strict=True):
        np.testing.assert_array_equal(made.weights, given.weights)
        np.testing.assert_array_equal(made.bias, given.bias)
    numbers = net.split(net.join([Layer(1.0, 2.0), Layer(3.0, 4.0), Layer(5.0, 6.0)]))
    assert (numbers[1].weights == 3).all()
    assert (numbers[1].bias == 4).all()
    assert target.dim == net.dim == 3 * 4 + 4 + 4 * 5 + 5 + 5 * 2 + 2


def test_starting_weights_and_priors_have_their_spreads():
    net = MLP((99, 400, 3), weight_spread=2.0, bias_spread=0.5, output_spread=1.0)
    first, last = net.init(jax.random.key(0))
    assert abs(float(first.weights.std()) / 0.2 - 1) < 0.02  # 39,600 draws
    assert abs(float(first.bias.std()) / 0.5 - 1) < 0.15  # 400 draws: four standard errors
    assert abs(float(last.weights.std()) * 401**0.5 - 1) < 0.09  # 1,200 draws
    assert (last.bias == 0).all()
    priors = [tuple(np.round(layer, 6)) for layer in net.prior_variances]
    assert priors == [(0.04, 0.04), (round(1 / 401, 6), 1.0)]
    assert MLP((2, 3, 1), prior_variance=7.0).prior_variances == (Layer(7.0, 7.0), Layer(7.0, 7.0))


@pytest.mark.parametrize(("sizes", "size"), [((2, 3, 2), 5), ((2, 3, 4, 1), 3), ((4, 2), 1)])
def test_the_places_of_a_unit_lie_side_by_side(sizes, size):
    net = MLP(sizes)
    places, unit = net.units
    assert unit == size
    assert sorted(places) == list(range(net.dim))
    if len(sizes) > 2:  # the second unit of the first layer
        second = np.zeros(net.dim)
        second[places[unit : 2 * unit]] = 1
        first, after, *_ = net.split(jnp.asarray(second))
        assert (first.weights[:, 1] == 1).all()
        assert first.bias[1] == 1
        assert float(second.sum() - after.weights.sum()) == sizes[0] + 1
        assert len(sizes) != 3 or (after.weights[1] == 1).all()


def test_weights_below_classes_are_believed_to_be_somewhat_larger_than_they_start():
    """With variance 1 for all, a wide network would be certain of its classes before any row; as small, never."""
    mlp = opvi.mlp(5, (50,), opvi.categorical(), outputs=3).architecture.mlp
    first, last = mlp.prior_variances
    np.testing.assert_allclose([first.weights, first.bias, last.weights, last.bias], [2 / 6, 2 / 6, 9 / 51, 1])
    np.testing.assert_allclose(mlp.start_variances, [1 / 6, 1 / 51])
    assert opvi.mlp(5, (50,)) == opvi.mlp(5, (50,), prior_variance=1.0)
    assert opvi.mlp(5, (), opvi.bernoulli()) == opvi.logistic_regression(5)
    with pytest.raises(ValueError, match='or "auto"'):
        opvi.mlp(5, prior_variance="wide")
