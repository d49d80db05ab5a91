"""Strictness for the whole suite: no silent change of rank or dtype anywhere in the library."""

import gc
import os
import threading
from importlib.metadata import version
from pathlib import Path

# Most of the suite's time went into optimising programs that run for milliseconds. Without it they compile in a third
# of the time. Set before JAX is loaded; whoever sets the flags for the whole session has them.
# The older emitters take a quarter of that time again, and so does one module instead of many, which are for idle
# cores; XLA ends a process at a flag that it does not know.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    + " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1 --xla_cpu_opt_preset=fast_compile"
    * version("jax").startswith("0.10."),
)
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # its threads would wait for each other's small matrices

import jax
import numpy as np
import pytest
from jax._src.interpreters import mlir

import opvi
from opvi.running import _engine, _programs, _run
from opvi.running._programs import _swept

# Programs that one process compiled serve the others, `make slow` after `make test`, and the next run. With a bound on
# its size JAX locks the folder; small programs are not worth the lock.
PROGRAMS = Path(__file__).parents[1] / ".stamps" / "programs"
os.environ.setdefault("OPVI_PROGRAMS", str(PROGRAMS))  # for processes that the tests start
PROGRAMS.mkdir(0o700, parents=True, exist_ok=True)
_swept(PROGRAMS)
_programs._asked = True  # in this process JAX keeps them: tests count what is traced
jax.config.update("jax_compilation_cache_dir", str(PROGRAMS))
jax.config.update("jax_compilation_cache_max_size", 1 << 30)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


class Contexts(threading.local):
    """A context of MLIR for a hundred programs: JAX makes a new one for each, a quarter of a small program's time."""

    made, context, programs = mlir.make_ir_context, None, 0

    def __call__(self) -> object:
        if self.programs % 100 == 0:  # what programs leave in it, their constants among it, is freed now and then
            self.context = type(self).made()
        self.programs += 1
        return self.context


mlir.make_ir_context = Contexts()

# The engine's first rows, its later rows and `run` have programs that differ only in how far XLA optimises them. Under
# the flags above all three are the same, so one serves; `engines_own_programs` is for tests of the difference.
program = _engine.program
_engine.program = lambda function, settings, quick, *in_place: program(function, settings, False, *in_place)
_run.advance = program(_engine.advanced, 3, False)
gc.disable()  # while tests are loaded, of which nothing can be collected


# The files that take longest, in about that order: a long one that comes last would leave a core idle.
LONG = (
    *(
        "docs/test_docs.py",
        "filters/ibis/test_ibis.py",
        "test_samplers.py",
        "adapters/test_river.py",
        "app/test_learning.py",
    ),
    *("adapters/test_sklearn.py", "tracking/test_regressor.py", "app/test_serve_process.py"),
    *("tracking/test_wrapped.py", "test_calibration.py", "filters/test_sl_opvi.py", "tracking/test_change.py"),
    *("scale/test_sharding.py", "tracking/test_classifier.py", "filters/test_survival.py", "filters/test_draws.py"),
    *(
        "tracking/test_process.py",
        "adapters/test_numpyro.py",
        "filters/test_diagnosis.py",
        "app/test_scales.py",
        "filters/test_evidence.py",
    ),
    *("tracking/test_calibration.py", "paper/test_regret_experiment.py", "arena/test_arena.py"),
    *("paper/test_mixture.py", "filters/test_modes.py", "paper/test_commands.py", "tracking/test_tracker.py"),
    *("test_laws.py", "benchmarks/test_numpyro_models.py", "adapters/test_origin.py", "app/test_streams.py"),
    *("scale/test_fleet.py", "running/test_run.py", "running/test_kept.py", "tracking/test_memories.py"),
    *("app/test_faults.py", "app/test_tables.py", "tracking/test_first_rows.py"),
    *("flows/test_pairwise.py", "running/test_threads.py", "adapters/test_arviz.py"),
    *("test_values.py", "predictive/test_counts.py", "paper/test_understand.py", "tracking/test_relevance.py"),
    *("running/test_engine.py", "regret/test_regret.py", "filters/test_kfac.py", "tracking/test_levels.py"),
    *("targets/test_targets.py", "filters/test_gauss_newton.py", "scale/test_keyed.py"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files are the first, and the last tests of a file those that forget all programs, which others need."""
    place = {path: len(LONG) + at for at, path in enumerate(dict.fromkeys(item.path for item in items))}
    place |= {Path(__file__).parent / name: at for at, name in enumerate(LONG)}
    items.sort(key=lambda item: (place[item.path], "retraced" in getattr(item, "fixturenames", ())))


def pytest_collection_finish() -> None:
    """What is loaded by now stays: the collector need not look at it again and again, nor after every 700 objects."""
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def pytest_unconfigure() -> None:
    """Libraries that count what is left when a process ends find it collected."""
    gc.unfreeze()
    mlir.make_ir_context.context = None


@pytest.fixture(scope="session")
def mixture_rows() -> np.ndarray:
    """Rows of the paper's mixture, enough for 500 rounds of ⌈t^0.55⌉."""
    return np.asarray(opvi.targets.sample_mixture(jax.random.key(1), 10_108))


@pytest.fixture(scope="session")
def mixture() -> opvi.Target:
    return opvi.gaussian_mixture()


@pytest.fixture(autouse=True, scope="module")
def _forget_programs():
    """Compiled programs are freed before they exhaust a process's memory maps, of which Linux allows 65,530."""
    _swept(PROGRAMS)  # a process that was killed by a test may have left one half-written
    yield
    maps = Path("/proc/self/maps")
    if not maps.exists() or maps.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()


@pytest.fixture
def retraced():
    """For a test that counts programs, or changes what is traced: it finds no program, and leaves none to others."""
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.fixture
def engines_own_programs(monkeypatch):
    """A program for the first rows and another for later ones, as users have them."""
    monkeypatch.setattr(_engine, "program", program)
