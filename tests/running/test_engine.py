"""The engine: the same bits as a run however rows are cut, few programs, answers of any size, copies that go on."""

import jax
import numpy as np
import pytest

import opvi
from opvi.running import Engine

KEY = jax.random.key(0)
ROWS = 20 * 20 + 7


def same(a, b):
    return jax.tree.structure(a) == jax.tree.structure(b) and jax.tree.all(jax.tree.map(np.array_equal, a, b))


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
