"""Strictness for the whole suite: no silent change of rank or dtype anywhere in the library."""

import os
from importlib.metadata import version
from pathlib import Path

# Most of the suite's time went into optimising programs that run for milliseconds. Without it they compile in a third
# of the time. Set before JAX is loaded; whoever sets the flags for the whole session has them.
# The older emitters take a quarter of that time again; XLA ends a process at a flag that it does not know.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    + " --xla_cpu_use_fusion_emitters=false" * version("jax").startswith("0.10."),
)
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # its threads would wait for each other's small matrices

import jax
import numpy as np
import pytest

import opvi
from opvi.running._programs import _swept

# Programs that one process compiled serve the others, `make slow` after `make test`, and the next run. With a bound on
# its size JAX locks the folder; small programs are not worth the lock.
PROGRAMS = Path(__file__).parents[1] / ".stamps" / "programs"
_swept(PROGRAMS)
jax.config.update("jax_compilation_cache_dir", str(PROGRAMS))
jax.config.update("jax_compilation_cache_max_size", 1 << 30)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(scope="session")
def mixture_rows() -> np.ndarray:
    """Rows of the paper's mixture, enough for 500 rounds of ⌈t^0.55⌉."""
    return np.asarray(opvi.targets.sample_mixture(jax.random.key(1), 10_108))


@pytest.fixture(scope="session")
def mixture() -> opvi.Target:
    return opvi.gaussian_mixture()


@pytest.fixture(autouse=True, scope="module")
def _forget_programs():
    """Compiled programs of a module are freed after it: hundreds at once exhaust a process's memory maps."""
    _swept(PROGRAMS)  # a process that was killed by a test may have left one half-written
    yield
    jax.clear_caches()
