"""Strictness for the whole suite: no silent change of rank or dtype anywhere in the library."""

import os

# Most of the suite's time went into optimising programs that run for milliseconds. Without it they compile in a third
# of the time. Set before JAX is loaded; whoever sets the flags for the whole session has them.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # its threads would wait for each other's small matrices

import jax
import numpy as np
import pytest

import opvi


def pytest_configure(config: pytest.Config) -> None:
    """Keep compiled programs in a folder, for the other processes and the next run: it takes a third of the time."""
    if not config.pluginmanager.hasplugin("cacheprovider"):
        return
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(config.cache.mkdir("jax")))  # of the processes tests start
    jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
    for option in ("jax_persistent_cache_min_compile_time_secs", "jax_persistent_cache_min_entry_size_bytes"):
        os.environ.setdefault(option.upper(), "0")
        jax.config.update(option, 0)


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
