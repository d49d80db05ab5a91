"""Fixtures of the tests of programs on disk."""

import jax
import pytest

from opvi.running import _programs as programs


@pytest.fixture
def untouched(monkeypatch):
    """JAX and opvi without a folder, and JAX's settings put back afterwards."""
    names = (
        "jax_compilation_cache_dir",
        "jax_compilation_cache_max_size",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_enable_compilation_cache",
        "jax_log_compiles",
    )
    before = {name: jax.config.values[name] for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setattr(programs, "_asked", False)
    monkeypatch.setattr(programs, "_folder", None)
    monkeypatch.delenv("OPVI_PROGRAMS", raising=False)
    yield monkeypatch
    for name, value in before.items():
        jax.config.update(name, value)
