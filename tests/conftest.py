"""Strictness for the whole suite: no silent change of rank or dtype anywhere in the library."""

import atexit
import os
import shutil
import tempfile

# Most of the suite's time went into optimising programs that run for milliseconds. Without it they compile in a third
# of the time. Set before JAX is loaded; whoever sets the flags for the whole session has them.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # its threads would wait for each other's small matrices

import jax
import numpy as np
import pytest

import opvi


def pytest_configure(config: pytest.Config) -> None:
    """Keep this process's compiled programs in a folder of its own: what one file of tests compiled serves the next.

    Of its own, because JAX does not write such files in one move: another process would read half of one.
    """
    folder = tempfile.mkdtemp(prefix="opvi-programs-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


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
    yield
    jax.clear_caches()
