"""CPU settings: options for the compiler, a device that computes in the calling thread, a single BLAS thread."""

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import jax
import numpy as np

LEVEL = "xla_backend_optimization_level"
THREADS = "NPROC"  # the variable by which XLA's CPU clients learn how many threads to have
LOOPS = "simplify-while-loops,while-loop-invariant-code-motion"  # XLA's passes over loops, which carry many arrays

_making = threading.Lock()
_lock = threading.Lock()
_learning = 0  # calls that are learning now
_before: dict[Any, int] = {}  # how many threads each library had before the first of them


def compiler_options(quick: bool, long_loops: bool = False) -> dict[str, int | bool | str] | None:
    """Return the XLA options for programs that opvi compiles itself; None on other devices.

    Its older emitters of fused loops, which end with JAX 0.10, take half the time and less than half the memory, for
    programs that are as fast. So are those of LLVM's first level of optimisation, which takes a quarter less time than
    the third; a level in XLA_FLAGS is left as it is. Programs without optimisation, in one piece and with loops as they
    were written, compile three times faster still, and run at a quarter of the speed.
    """
    if jax.default_backend() != "cpu":
        return None
    options: dict[str, int | bool | str] = {}
    if jax.__version__.startswith("0.10."):
        options["xla_cpu_use_fusion_emitters"] = False
    if quick or LEVEL not in os.environ.get("XLA_FLAGS", ""):
        options[LEVEL] = 0 if quick else 1
    if quick and not long_loops:  # it takes longer to tidy them up than to run them
        options["xla_disable_hlo_passes"] = LOOPS
    if quick and jax.__version_info__ < (0, 11):  # later ones, not tried, refuse options they do not know
        options["xla_cpu_parallel_codegen_split_count"] = 1
    return options


def inline_device() -> jax.Device | None:
    """Return a CPU device whose programs run in the calling thread; None if the default device is not a CPU.

    JAX's own CPU devices hand a program to another thread and wait for it, which takes longer than a small program
    itself, unless `jax_cpu_enable_async_dispatch` was off before JAX's first array. Its parts are handed on to further
    threads, which look for more of them all the time: with two, a quarter of the processor time. This is a device of a
    second client (1 ms) with one such thread, which has next to nothing to do. Arrays on it do not mix with those of
    other devices unless they are moved.
    """
    with _making:  # by one thread: arrays of two such devices do not mix either
        return _made_device()


@cache
def _made_device() -> jax.Device | None:
    if jax.default_backend() != "cpu":
        return None
    try:
        from jaxlib import xla_client

        with _environment(THREADS, "1"):
            client: Any = xla_client.make_cpu_client(asynchronous=False, num_devices=1)
        return client.local_devices()[0]
    except (ImportError, AttributeError, TypeError):  # not a public function of jaxlib's: seen in 0.8 to 0.11
        return None


def inline(tree: Any) -> Any:
    """Return arrays on `inline_device()`: copies of those that are elsewhere. Where it is not used, the same.

    Models learn and answer there: their matrices are so small that threads wait for each other, and the processor's
    time is half of what it is on JAX's own device, the time by the clock no longer. Several models learn in parallel
    if each has a thread of its own. It is not used beside other devices, which states may be divided among.
    """
    if jax.device_count() > 1 or (device := inline_device()) is None:
        return tree
    return jax.tree.map(lambda leaf: _moved(leaf, device), tree)


def _moved(leaf: Any, device: jax.Device) -> jax.Array:
    if isinstance(leaf, jax.Array):
        if leaf.devices() == {device}:
            return leaf
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = _moved(jax.random.key_data(leaf), device)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    return jax.device_put(np.array(leaf), device)  # not a view, which would change with its owner


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Within this block a variable of the environment has this value, unless it has one already."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def give_back() -> None:
    """Return to the system the memory that the C library holds free: after compiling, or reading a program, 80 MB."""
    with suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Within this block SciPy's BLAS, which JAX calls, uses one thread: more would wait for small matrices.

    They wait actively: a classifier takes three times the processor time, on a busy machine twenty times. Blocks may
    overlap in several threads; the last one out restores the previous number.
    """
    global _learning
    with _lock:
        if not _learning:
            for library in _libraries():
                _before[library] = library.num_threads
                _set_threads(library, 1)
        _learning += 1
    try:
        yield
    finally:
        with _lock:
            _learning -= 1
            if not _learning:
                for library, threads in _before.items():
                    _set_threads(library, threads)
                _before.clear()


def _set_threads(library: Any, threads: int) -> None:
    """Set the number of a library's threads; it may be another of our threads that sets it next.

    threadpoolctl 3.8 ignores all threads but the one that set it first, until that one gives way or ends.
    """
    library.set_num_threads(threads)
    if give_way := getattr(library, "clear_controlling_thread", None):
        give_way()


@cache
def _libraries() -> tuple[Any, ...]:
    """Return SciPy's BLAS; all BLAS libraries if its own cannot be identified."""
    import scipy.linalg.cython_lapack  # noqa: F401  # it must be loaded to be found
    from threadpoolctl import ThreadpoolController

    found = ThreadpoolController().select(user_api="blas").lib_controllers
    return tuple([library for library in found if "scipy" in library.filepath] or found)
