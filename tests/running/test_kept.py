"""The next process finds compiled programs on disk, and neither traces nor compiles them."""

import gc
import itertools
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path

import jax
import pytest

import opvi
from opvi.running import _kept as kept
from opvi.running import _programs as programs
from opvi.running._engine import begun

TWICE = """
import pickle, jax, numpy as np, opvi
from opvi.running import Engine
names = []
hear = lambda name, seconds, **about: names.append(about["fun_name"]) if "backend_compile_duration" in name else None
jax.monitoring.register_event_duration_secs_listener(hear)
x = np.random.default_rng(0).normal(size=(20, 2))
engine = Engine(opvi.regressor(2, hidden=(), particles=3), 0)
engine.feed((x, x[:, 0]))
engine.state = engine.state._replace(round=jax.numpy.asarray(np.asarray(engine.state.round)))
engine.feed((x, x[:, 0]))
engine = pickle.loads(pickle.dumps(engine))
for _ in range(2):
    engine.feed((x, x[:, 0]))
print(names.count("jit(advanced)"))
"""

SCRIPT = """
import json, jax, jax.monitoring, numpy as np
heard = []
jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: heard.append(name))
import opvi
from opvi.running import Engine, _engine
one_round, traced = _engine.one_round, []
_engine.one_round = lambda *given: traced.append(1) or one_round(*given)
engine = Engine(opvi.regressor(2, hidden=(), particles=3), 0)
x = np.random.default_rng(0).normal(size=(40, 2))
engine.feed((x, x[:, 0]))
compiled = "/jax/core/compile/backend_compile_duration" in heard
print(json.dumps([compiled, float(engine.state.particles.sum()), bool(traced)]))
"""

LAPACK = """
import json, sys, jax, jax.numpy as jnp
from opvi.running import _kept, _programs
_kept.place = lambda function, *_: folder / "whole" / function.__name__
_kept.WORTH_KEEPING = -1.0
folder = _programs.keep_programs()
def doubled(x): return 2 * x
def factor(x): return jnp.linalg.cholesky(x)
told = [len(list(folder.glob("whole/*")))]
for function in doubled, factor:
    told.append(float(_kept.Program(function, 0, None, None)(9 * jnp.eye(2)).sum()))
    told.append("scipy.linalg" in sys.modules)
print(json.dumps(told))
"""


def begun_with(script=SCRIPT, **variables):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_COMPILATION")}
    command, env = [sys.executable, "-c", script], {**environment, **variables}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def run(script=SCRIPT, **variables):
    return told_by(begun_with(script, **variables))


def told_by(process):
    told, _ = process.communicate()
    assert process.returncode == 0
    return json.loads(told)


@pytest.mark.slow
def test_the_next_process_finds_them_even_after_damage(tmp_path):
    compiled, bits, traced = run(OPVI_PROGRAMS=str(tmp_path))
    assert compiled
    assert traced
    files = sorted((tmp_path / "whole").iterdir())
    assert files
    assert not list(tmp_path.glob("*-cache"))  # JAX's own cache does not keep them again
    assert run(OPVI_PROGRAMS=str(tmp_path)) == [False, bits, False]  # nothing is compiled, and nothing is traced
    damages = (lambda path: path.write_bytes(path.read_bytes()[:100]), lambda path: kept._write(path, b"no program"))
    for path, damage in zip(files, itertools.cycle(damages), strict=False):
        damage(path)
    assert run(OPVI_PROGRAMS=str(tmp_path)) == [True, bits, True]


@pytest.mark.slow
def test_two_processes_write_at_once(tmp_path):
    first, second = (begun_with(OPVI_PROGRAMS=str(tmp_path)) for _ in range(2))
    _, bits, _ = told_by(first)
    assert told_by(second)[1] == bits
    files = list(tmp_path.glob("whole/*"))
    assert len(files) == 2
    assert all(kept._read(path) for path in files)
    assert run(OPVI_PROGRAMS=str(tmp_path)) == [False, bits, False]


@pytest.mark.slow
def test_beside_jaxs_own_folder_the_next_process_finds_them(tmp_path):
    folder = {"OPVI_PROGRAMS": "", "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "jax")}
    compiled, bits, _ = run(**folder)
    assert compiled
    moved = (tmp_path / "jax").rename(tmp_path / "moved")
    assert [path.name for path in moved.iterdir()] == ["opvi"]
    folder["JAX_COMPILATION_CACHE_DIR"] = str(moved)  # programs do not depend on where they lie
    assert run(**folder, JAX_PLATFORMS="cpu") == [False, bits, False]


def test_scipy_is_loaded_for_programs_that_call_it(tmp_path):
    """To import it takes longer than to read a program; a program that calls it and cannot find it does not run."""
    assert run(LAPACK, OPVI_PROGRAMS=str(tmp_path))[0] == 0
    assert run(LAPACK, OPVI_PROGRAMS=str(tmp_path)) == [2, 36, False, 6, True]


@pytest.mark.slow
def test_a_state_from_elsewhere_needs_no_program_of_its_own(tmp_path):
    """Arrays that were made by hand, or read, are not bound to a device; those that a kept program returns are."""
    assert run(TWICE, OPVI_PROGRAMS=str(tmp_path)) == 1


def test_a_program_is_found_by_everything_that_it_depends_on(untouched, tmp_path):
    sampler, key = opvi.regressor(2, hidden=(4,), particles=3), jax.random.key(0)
    assert kept.place(begun, (sampler,), (key,)) is None  # no programs are kept
    untouched.setenv("OPVI_PROGRAMS", str(tmp_path))
    programs.keep_programs()
    place = kept.place(begun, (sampler,), (key,))
    assert kept.place(begun, (opvi.regressor(2, hidden=(4,), particles=3),), (key,)) == place
    others = [
        kept.place(opvi.running._engine.answer, (sampler,), (key,)),
        kept.place(begun, (opvi.regressor(2, hidden=(4,), particles=4),), (key,)),
        kept.place(begun, (sampler,), (jax.random.split(key),)),
        kept.place(begun, (sampler,), ((key,),)),
    ]
    with jax.default_matmul_precision("highest"):
        others.append(kept.place(begun, (sampler,), (key,)))
    jax.config.update("jax_compilation_cache_dir", "elsewhere")
    jax.config.update("jax_log_compiles", True)
    assert kept.place(begun, (sampler,), (key,)) == place  # neither changes a program
    untouched.setattr(kept, "_sources", lambda: "another version")
    others.append(kept.place(begun, (sampler,), (key,)))
    others.append(kept.place(begun, (sampler,), (key,), ({"xla_backend_optimization_level": 0}, None)))
    untouched.setattr(kept, "machine", lambda: "another processor")
    others.append(kept.place(begun, (sampler,), (key,)))
    assert len({place, *others}) == 9
    assert kept.place(begun, (lambda: 0,), (key,)) is None  # a function of the user
    untouched.setattr(jax, "device_count", lambda: 2)
    assert kept.place(begun, (sampler,), (key,)) is None


def found_by_jax(scale, x):
    """Return x, and tell JAX's listeners what they hear if a program is in JAX's own cache."""
    jax.monitoring.record_event(kept.HIT)
    return x * scale


def not_found_by_jax(scale, x):
    """Return x."""
    return x * scale


@pytest.mark.parametrize(("function", "written"), [(found_by_jax, 0), (not_found_by_jax, 1)])
def test_what_jax_has_read_from_its_own_cache_is_not_written_again(untouched, tmp_path, function, written):
    """XLA would write it without its code, and the next process could not run it."""
    untouched.setenv("OPVI_PROGRAMS", str(tmp_path))
    untouched.setattr(kept, "WORTH_KEEPING", -1.0)
    untouched.setattr(kept, "place", lambda *_: tmp_path / "whole" / "program")
    programs.keep_programs()
    for _ in range(2):  # the second one reads it
        assert float(kept.Program(function, 1, None, None)(2.0, jax.numpy.ones(()))) == 2
    assert len(list(tmp_path.glob("whole/*"))) == written


def doubled(scale, x):
    """Return x times 2."""
    return scale * x


def test_a_program_that_is_on_disk_is_let_go_once(untouched, tmp_path):
    """Its memory is free until it is asked for again, and then it stays."""
    untouched.setenv("OPVI_PROGRAMS", str(tmp_path))
    untouched.setattr(kept, "WORTH_KEEPING", -1.0)
    untouched.setattr(kept, "place", lambda function, settings, *_: tmp_path / "whole" / str(settings[0]))
    programs.keep_programs()
    program, x = kept.Program(doubled, 1, None, None), jax.numpy.ones(3)
    program.let_go(2.0, x)  # nobody has asked for it
    for held in (0, 1):
        assert program(2.0, x).tolist() == [2, 2, 2]
        found = weakref.ref(next(iter(program._found.values())))
        assert found() is not None
        program.let_go(2.0, jax.numpy.zeros(3))
        assert program._cache_size() == held
        gc.collect()
        assert (found() is not None) == bool(held)
    program(3.0, x)
    (tmp_path / "whole" / "3.0").unlink()
    program.let_go(3.0, x)  # it would have to be compiled again
    assert program._cache_size() == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_no_error(untouched, tmp_path):
    def full(dir, prefix):
        (dir / prefix).touch()
        return os.open("/dev/full", os.O_WRONLY), str(dir / prefix)

    untouched.setenv("OPVI_PROGRAMS", str(tmp_path))
    untouched.setattr(kept, "WORTH_KEEPING", -1.0)
    untouched.setattr(kept, "place", lambda *_: tmp_path / "whole" / "program")
    untouched.setattr(kept.tempfile, "mkstemp", full)
    programs.keep_programs()
    assert float(kept.Program(doubled, 1, None, None)(2.0, jax.numpy.ones(()))) == 2
    assert not list(tmp_path.glob("whole/*"))


def test_methods_of_our_own_classes_have_names(untouched, tmp_path):
    untouched.setenv("OPVI_PROGRAMS", str(tmp_path))
    programs.keep_programs()
    ask = opvi.running._engine.answer
    names = {kept.place(ask, (what,), ()) for what in (opvi.Predictive.mean, opvi.Predictive.probabilities)}
    assert len(names) == 2
    assert None not in names


def test_programs_on_disk_are_bounded_and_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "MOST", 2)
    for i, name in enumerate("abc"):
        kept._write(tmp_path / "whole" / name, name.encode())
        os.utime(tmp_path / "whole" / name, (i, i))
    kept._write(tmp_path / "whole" / "d", b"d")
    assert sorted(path.name for path in (tmp_path / "whole").iterdir()) == ["c", "d"]
    assert kept._read(tmp_path / "whole" / "d") == b"d"
    (tmp_path / "whole" / "d").write_bytes(bytes(32) + b"d")
    assert kept._read(tmp_path / "whole" / "d") is None
    assert kept._read(tmp_path / "whole" / "a") is None
    monkeypatch.setattr(kept, "LARGEST", 100)  # bytes: three files of 33 fit, and one of 65 and one of 33
    monkeypatch.setattr(kept, "MOST", 9)
    kept._write(tmp_path / "whole" / "e", bytes(33))
    assert len(list((tmp_path / "whole").iterdir())) == 2


def test_nothing_is_collected_while_a_program_is_traced():
    """Tracing makes a million objects that stay: to look for garbage among them takes a twentieth of a first answer."""

    def function(fails):
        seen.append(gc.isenabled())
        if fails:
            raise KeyError

    seen: list[bool] = []
    made = kept.Program(function, 1, None, None)
    assert gc.isenabled()
    made(0)
    with pytest.raises(KeyError):
        made(1)
    assert seen == [False, False]
    assert gc.isenabled()
    gc.disable()
    try:
        made(False)
        assert not gc.isenabled()
    finally:
        gc.enable()
