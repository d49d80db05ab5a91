"""Models in the manner of NumPyro's examples are taken as they are."""

import jax
import numpy as np
import pytest

import opvi
from benchmarks.numpyro_models import MODELS


@pytest.mark.slow  # twenty models, each compiled
@pytest.mark.parametrize("name", MODELS)
def test_models_are_taken_and_score_their_rows(name):
    model, rows = MODELS[name]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        target = opvi.from_numpyro(model, rows)
        particle = opvi.draw(target, 0, 1)[0]
        few = jax.tree.map(lambda a: a[:4], rows)
        said = jax.jit(target.log_likelihood)(target.unravel(particle), few)
    assert said.shape == (4,)
    assert not np.isnan(said).any()
