import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import opvi
from opvi.running._stream import row_count


def rows_of(batches):
    """The real rows of all batches, in order."""
    return np.concatenate([np.asarray(b.data)[b.weight > 0] for b in batches])


def sizes_of(batches):
    return [int((b.weight > 0).sum()) for b in batches]


@given(rows=st.integers(1, 200), size=st.integers(1, 50), passes=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_arrays_come_out_once_a_pass_in_order(rows, size, passes):
    data = np.arange(rows, dtype=float)
    batches = list(opvi.stream(data, size, passes=passes))
    np.testing.assert_array_equal(rows_of(batches), np.tile(data, passes))
    assert sizes_of(batches)[:-1] == [size] * (len(batches) - 1)
    assert {len(b.weight) for b in batches} == {size}  # a static batch has one shape, the last included


@given(lengths=st.lists(st.integers(0, 30), min_size=1, max_size=12), rho=st.floats(0.1, 1.0))
@settings(max_examples=60, deadline=None)
def test_blocks_are_cut_anew_to_the_schedule(lengths, rho):
    total = sum(lengths)
    data = np.arange(total, dtype=float)
    blocks = np.split(data, np.cumsum(lengths)[:-1])
    batches = list(opvi.stream(iter(blocks), opvi.schedules.power(rho), blocks=True))
    assert sum(sizes_of(batches)) == total
    if total:
        np.testing.assert_array_equal(rows_of(batches), data)
        assert sizes_of(batches)[:-1] == [math.ceil(t**rho) for t in range(1, len(batches))]


def test_generators_of_single_rows_of_unknown_length():
    def rows():
        for i in range(7):
            yield {"x": np.full(3, i), "y": i}

    stream = opvi.stream(rows(), 3)
    assert stream.rounds is None
    batches = list(stream)
    assert sizes_of([b._replace(data=b.data["y"]) for b in batches]) == [3, 3, 1]
    assert batches[0].data["x"].shape == (3, 3)


def test_blocks_may_be_taken_as_they_come():
    batches = list(opvi.stream(iter([np.zeros(3), np.ones(5)]), None, blocks=True))
    assert sizes_of(batches) == [3, 5]


def test_growing_batches_are_padded_to_few_shapes_with_rows_that_exist():
    batches = list(opvi.stream(np.arange(1.0, 10_109.0), opvi.schedules.power(0.55)))
    assert len(batches) == 500
    assert {len(b.weight) for b in batches} == {8, 16, 32}
    assert all(np.asarray(b.data).min() >= 1 for b in batches)  # no invented zeros
    assert sum(float(b.weight.sum()) for b in batches) == 10_108


@pytest.mark.parametrize("done", [0, 1, 7, 29])
def test_arrays_resume_at_any_round(done):
    stream = opvi.stream((np.arange(100.0), np.arange(100)), opvi.schedules.power(0.5), rounds=30, passes=None)
    rest = list(stream.after(done))
    whole = list(stream)[done:]
    assert len(rest) == 30 - done
    assert all(jax.tree.all(jax.tree.map(np.array_equal, a, b)) for a, b in zip(rest, whole, strict=True))


def test_an_iterator_goes_on_where_it_stopped():
    stream = opvi.stream(iter(np.arange(10.0)), 3)
    iterator = iter(stream)
    next(iterator)
    assert rows_of(list(stream)).tolist() == [3, 4, 5, 6, 7, 8, 9]


def poisoned():
    data = np.arange(20.0)
    data[[3, 4, 11, 12]] = [np.nan, np.inf, -np.inf, 1e30]
    return data


def test_bad_rows_are_refused_with_a_remedy():
    with pytest.raises(ValueError, match=r'4 of 20 rows hold NaN, infinity .*\(the first is row 3\).*on_bad="skip"'):
        opvi.stream(poisoned(), 5)
    with pytest.raises(ValueError, match="1 of 1 rows hold NaN"):
        list(opvi.stream(iter(poisoned()), 5))


@pytest.mark.parametrize("make", [lambda: poisoned(), lambda: iter(poisoned())])
def test_bad_rows_are_left_out_and_counted(make):
    stream = opvi.stream(make(), 5, on_bad="skip")
    batches = list(stream)
    assert stream.skipped == 4
    assert np.isfinite(rows_of(batches)).all()
    assert sizes_of(batches) == [5, 5, 5, 1]


def test_a_stream_that_changes_shape():
    rows = [np.zeros(3), np.zeros(3), np.zeros(2), np.zeros(3)]
    with pytest.raises(ValueError, match="the stream changed shape"):
        list(opvi.stream(iter(rows), 2))
    stream = opvi.stream(iter(rows), 2, on_bad="skip")
    assert sum(len(b.weight[b.weight > 0]) for b in stream) == 3
    assert stream.skipped == 1


@pytest.mark.parametrize("size", [0, -2, 1.5])
def test_a_rule_that_returns_no_size_is_named(size):
    with pytest.raises(ValueError, match=rf"returned {size} for round 1, but every round takes a whole number"):
        list(opvi.stream(np.zeros(5), lambda t: size))


def test_wrong_streams_are_refused():
    with pytest.raises(ValueError, match="the stream is empty"):
        opvi.stream(np.zeros((0, 3)), 5)
    with pytest.raises(ValueError, match="same number of rows"):
        opvi.stream((np.zeros(3), np.zeros(4)), 2)
    with pytest.raises(ValueError, match="leading axis"):
        opvi.stream(3.0, 2)
    with pytest.raises(TypeError, match="carries numbers"):
        opvi.stream(np.array(["a", "b"]), 2)
    with pytest.raises(ValueError, match="never ends"):
        opvi.stream(np.zeros(5), 2, passes=None)
    with pytest.raises(ValueError, match="blocks=True"):
        opvi.stream(iter([np.zeros(3)]), None)
    with pytest.raises(ValueError, match="on_bad"):
        opvi.stream(np.zeros(3), 2, on_bad="ignore")
    with pytest.raises(ValueError, match="`rounds` is 0"):
        opvi.stream(np.zeros(3), 2, rounds=0)


def test_batch_checks_its_rows():
    with pytest.raises(ValueError, match="0 rows"):
        opvi.batch(np.zeros(0))
    with pytest.raises(ValueError, match="`weight` must be 3 finite numbers"):
        opvi.batch(np.zeros(3), [1.0, -1.0, 1.0])
    with pytest.raises(ValueError, match="`pad_to` is 2"):
        opvi.batch(np.zeros(3), pad_to=2)
    assert row_count(opvi.batch((np.zeros((3, 2)), np.zeros(3)), pad_to=8).data) == 8
