"""What opvi asks of a CPU: its compiler, a device that computes at once, and the threads of BLAS."""

import os
import threading
import time
from functools import cache

import jax
import numpy as np
import pytest

import opvi
from opvi import _cpu
from opvi._cpu import compiler_options, inline_device, one_blas_thread


@pytest.fixture
def libraries(monkeypatch):
    """Two libraries that remember how many threads they were told to use."""

    class Library:
        def __init__(self, threads):
            self.num_threads = threads

        def set_num_threads(self, threads):
            self.num_threads = threads

    made = Library(8), Library(2)
    monkeypatch.setattr(_cpu, "_libraries", lambda: made)
    return made


def threads_of(libraries):
    return [library.num_threads for library in libraries]


def test_blas_has_one_thread_while_somebody_learns(libraries):
    inside, leave = threading.Event(), threading.Event()

    def other():
        with one_blas_thread():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with one_blas_thread():
        assert threads_of(libraries) == [1, 1]
        thread.start()
        assert inside.wait(10)
    assert threads_of(libraries) == [1, 1]  # the other one still learns
    leave.set()
    thread.join()
    assert threads_of(libraries) == [8, 2]
    with pytest.raises(ZeroDivisionError), one_blas_thread():
        _ = 1 / 0
    assert threads_of(libraries) == [8, 2]


def test_the_blas_of_scipy_is_found():
    assert _cpu._libraries()
    before = threads_of(_cpu._libraries())
    with one_blas_thread():
        assert threads_of(_cpu._libraries()) == [1] * len(before)
    assert threads_of(_cpu._libraries()) == before


def test_the_blas_of_scipy_obeys_every_thread():
    """threadpoolctl 3.8 obeys the first thread that sets a number, unless it is told that others may."""
    found, before = [], threads_of(_cpu._libraries())

    def learn():
        with one_blas_thread():
            found.append(threads_of(_cpu._libraries()))

    learn()
    for _ in range(2):
        thread = threading.Thread(target=learn)
        thread.start()
        thread.join()
        assert threads_of(_cpu._libraries()) == before
    assert found == [[1] * len(before)] * 3


def test_the_device_in_the_calling_thread_is_one_for_all_threads(monkeypatch):
    from jaxlib import xla_client

    made, make, found = [], xla_client.make_cpu_client, []

    def slow(**options):
        made.append(options)
        time.sleep(0.1)  # another thread asks meanwhile
        return make(**options)

    monkeypatch.setattr(xla_client, "make_cpu_client", slow)
    monkeypatch.setattr(_cpu, "_made_device", cache(_cpu._made_device.__wrapped__))
    threads = [threading.Thread(target=lambda: found.append(inline_device())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert len(set(found)) == 1
    assert len(found) == 4


def test_engines_and_runs_learn_with_one_blas_thread(libraries, monkeypatch):
    seen = []

    class Spy(type(libraries[0])):
        def set_num_threads(self, threads):
            super().set_num_threads(threads)
            seen.append(threads)

    monkeypatch.setattr(_cpu, "_libraries", lambda: (Spy(4),))
    rows = np.ones((3, 2)), np.ones(3)
    sampler = opvi.langevin(opvi.linear_regression(2), step=1e-3)
    opvi.running.Engine(sampler, 0).feed(rows, last=True)
    opvi.run(sampler, opvi.stream(rows, 3), 0)
    assert seen == [1, 4, 1, 4]


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("long_loops", [False, True])
def test_xla_knows_what_it_is_asked_for(monkeypatch, quick, long_loops):
    monkeypatch.delenv("XLA_FLAGS")
    double = jax.jit(lambda x: 2 * x, compiler_options=compiler_options(quick, long_loops))
    assert double(3.0) == 6.0


def test_a_level_of_optimisation_in_the_flags_is_left_as_it_is(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    assert [compiler_options(quick)[_cpu.LEVEL] for quick in (False, True)] == [1, 0]
    monkeypatch.setenv("XLA_FLAGS", f"--{_cpu.LEVEL}=3")
    assert _cpu.LEVEL not in compiler_options(False)
    assert compiler_options(True)[_cpu.LEVEL] == 0


@pytest.mark.skipif(not jax.__version__.startswith("0.10."), reason="an option of JAX 0.10")
def test_only_quick_programs_whose_loops_are_short_keep_them_as_they_are():
    kept = [
        "xla_disable_hlo_passes" in compiler_options(*given)
        for given in ((True, False), (True, True), (False, False), (False, True))
    ]
    assert kept == [True, False, False, False]


def test_memory_is_given_back_where_the_c_library_can(monkeypatch):
    class Library:
        def __init__(self, name):
            self.malloc_trim = asked.append

    asked: list[int] = []
    monkeypatch.setattr(_cpu.ctypes, "CDLL", Library)
    _cpu.give_back()
    assert asked == [0]
    monkeypatch.setattr(_cpu.ctypes, "CDLL", lambda name: object())  # not glibc
    _cpu.give_back()


def test_the_inline_device_has_computed_when_the_call_returns(monkeypatch):
    device = inline_device()
    assert device is inline_device()
    long = jax.jit(lambda x: jax.lax.fori_loop(0, 300, lambda _, x: jax.numpy.tanh(x @ x), x))
    x = np.ones((100, 100), np.float32)
    given = jax.device_put(x, device).block_until_ready()
    long(given).block_until_ready()  # compiles
    assert long(given).is_ready()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert _cpu._made_device.__wrapped__() is None
    monkeypatch.undo()
    monkeypatch.setattr("jaxlib.xla_client.make_cpu_client", None)  # a jaxlib without such a function
    assert _cpu._made_device.__wrapped__() is None


@pytest.mark.parametrize("given", [None, "3"])
def test_the_inline_device_has_one_thread_unless_the_environment_says_otherwise(monkeypatch, given):
    seen = []

    def make(**options):
        seen.append(os.environ.get(_cpu.THREADS))
        raise TypeError

    monkeypatch.setattr("jaxlib.xla_client.make_cpu_client", make)
    monkeypatch.delenv(_cpu.THREADS, raising=False)
    if given:
        monkeypatch.setenv(_cpu.THREADS, given)
    assert _cpu._made_device.__wrapped__() is None
    assert seen == [given or "1"]
    assert os.environ.get(_cpu.THREADS) == given
