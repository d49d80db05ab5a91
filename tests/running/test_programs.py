"""Compiled programs are kept on disk for the next process, unless somebody says otherwise."""

import json
import os
import subprocess
import sys

import jax
import pytest

from opvi.running import _programs as programs

SCRIPT = """
import json, jax, jax.monitoring, numpy as np
heard = []
jax.monitoring.register_event_listener(lambda name, **_: heard.append(name))
import opvi
from opvi.running import Engine
engine = Engine(opvi.regressor(2, hidden=(4,), particles=3), 0)
x = np.random.default_rng(0).normal(size=(40, 2))
engine.feed((x, x[:, 0]))
print(json.dumps([sum("cache_hits" in name for name in heard), float(engine.state.particles.sum())]))
"""


def run(**variables):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_COMPILATION")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={**environment, **variables}, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.slow
def test_the_next_process_finds_them_even_after_damage(tmp_path):
    first, bits = run(OPVI_PROGRAMS=str(tmp_path))
    kept = sorted(tmp_path.glob("*-cache"))
    assert first == 0
    assert kept
    assert run(OPVI_PROGRAMS=str(tmp_path)) == [len(kept), bits]
    for path in kept:
        path.write_bytes(path.read_bytes()[:100])
    assert run(OPVI_PROGRAMS=str(tmp_path))[1] == bits
    assert run(OPVI_PROGRAMS="off", XDG_CACHE_HOME=str(tmp_path / "cache")) == [0, bits]
    assert not (tmp_path / "cache").exists()


@pytest.fixture
def untouched(monkeypatch):
    """JAX without a folder, and its settings put back afterwards."""
    names = (
        "jax_compilation_cache_dir",
        "jax_compilation_cache_max_size",
        "jax_persistent_cache_min_compile_time_secs",
    )
    before = {name: jax.config.values[name] for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setattr(programs, "_asked", False)
    yield monkeypatch
    for name, value in before.items():
        jax.config.update(name, value)


def test_the_folder_is_the_users_and_the_switches_are_heard(untouched, tmp_path):
    untouched.delenv("OPVI_PROGRAMS", raising=False)
    untouched.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = programs.keep_programs()
    assert folder.parent == tmp_path / "opvi" / "programs"
    assert jax.__version__ in folder.name
    assert jax.config.values["jax_compilation_cache_max_size"] == programs.LARGEST
    untouched.setattr(programs, "_asked", False)
    assert programs.keep_programs() is None  # JAX has a folder by now


def test_half_a_program_is_swept_away_and_a_file_in_the_way_is_no_error(untouched, tmp_path):
    (tmp_path / "a-cache").write_bytes(b"half")  # and no time beside it
    (tmp_path / "b-cache").write_bytes(b"whole")
    (tmp_path / "b-atime").write_bytes(bytes(8))
    untouched.setenv("OPVI_PROGRAMS", str(tmp_path))
    assert programs.keep_programs() == tmp_path
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b-atime", "b-cache"]
    jax.config.update("jax_compilation_cache_dir", None)
    untouched.setattr(programs, "_asked", False)
    untouched.setenv("OPVI_PROGRAMS", str(tmp_path / "b-cache" / "below"))
    assert programs.keep_programs() is None
