"""The same program on one and on many devices, and on one and on two processes, of which one may die."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import opvi
from opvi.scale import _sharding as sharding
from opvi.scale import distributed
from tests.scale import sharding_processes

HERE = Path(__file__).parent
# Programs run once: most of the time goes to compiling them, which the last level of optimisation triples.
FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
FLAGS += " --xla_force_host_platform_device_count="
ROUNDING = 5e-5  # a few steps in float32, added up in another order


def start(script, *arguments, devices, **variables):
    environment = {**os.environ, "XLA_FLAGS": f"{FLAGS}{devices}", "NPROC": str(2 * devices), **variables}
    environment["JAX_PLATFORMS"] = "cpu"
    command = [sys.executable, str(HERE / script), *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


# --- devices ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_devices():
    """What eight devices make of every check."""
    output, errors = start("sharding_devices.py", devices=8).communicate(timeout=300)
    assert output, errors
    return json.loads(output)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["1 × 1", "2 × 1", "4 × 1", "8 × 1", "1 × 8"])
def test_any_mesh_gives_the_same_step(on_devices, mesh):
    assert on_devices["meshes"][mesh] < ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("field", ["svgd", "blob", "gfsd", "gfsf"])
def test_the_ring_gives_the_same_field(on_devices, field):
    assert on_devices["fields"][field] < ROUNDING


@pytest.mark.slow
def test_a_run_stays_on_its_mesh_also_after_loading(on_devices):
    run = on_devices["run"]
    assert run["error"] < ROUNDING
    assert run["error after loading"] < ROUNDING
    assert run["cut"] == run["cut after loading"] == ["particles"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("gauss_newton", {"particles", "past.matrices", "error"}),
        ("kfac", {"particles", "factors.0.outputs", "factors.1.inputs", "factors.1.inverse", "factors.1.outputs"}),
        ("regressor", {"particles", "past.matrices", "error", "calibration.weights", "calibration.products"}),
        ("classifier", {f"networks.{k}.{leaf}" for k in range(4) for leaf in ("particles", "factors.1.inverse")}),
    ],
)
def test_covariances_are_cut_with_their_particles(on_devices, name, cut):
    found = on_devices["trackers"][name]
    assert found.get("error", 0) < ROUNDING  # of the classifier, which is made of `kfac`, only the layout is looked at
    assert cut <= set(found["cut"])


@pytest.mark.slow
def test_predictions_come_from_a_state_on_many_devices(on_devices):
    assert on_devices["trackers"]["prediction"]["error"] < ROUNDING


@pytest.mark.slow
def test_no_device_sees_all_particles_or_all_pairs(on_devices):
    """Of 8,192 particles on 8 devices: parts of 1,024 go around; the bandwidth's sample of 2,048 is seen by all."""
    seen = on_devices["exchanged"]
    assert seen["passed on"] == ["1024,3"]
    assert seen["gathered"] == [f"{opvi.flows.kernels.LARGEST_SAMPLE},3"]
    assert seen["largest"] <= opvi.flows.kernels.LARGEST_SAMPLE**2


def test_a_sharded_sampler_is_one_like_any_other():
    """On one device, which takes no time to compile."""

    target = opvi.gaussian_mixture()

    def made(step):
        return opvi.scale.sharded(opvi.langevin(target, step=step), opvi.scale.mesh(1))

    sampler = made(0.1)
    assert sampler == made(0.1)
    assert hash(sampler) == hash(made(0.1))
    assert sampler != made(0.2)
    assert not hasattr(sampler, "relearn")
    batch, key = opvi.batch(np.arange(4, dtype=np.float32)), jax.random.key(0)
    learning = Relearning(target, 0.1, 1.0, 1.0, lambda rows, seen: 2 * rows, about="twice")
    spread = opvi.scale.sharded(learning, opvi.scale.mesh(1))
    assert (spread.about, str(spread)) == ("twice", "twice")
    state = spread.init(key, 6)
    again = spread.relearn(key, state, batch)
    np.testing.assert_array_equal(again.particles, state.particles + 4)


class Relearning(type(opvi.langevin(opvi.gaussian_mixture(), step=0.1))):
    def relearn(self, key, state, batch):
        return state._replace(particles=state.particles + batch.weight.sum())


def test_equal_sharded_samplers_share_their_program():
    before = sharding._on_mesh._cache_size()
    target, batch = opvi.gaussian_mixture(), opvi.batch(np.zeros((4,), np.float32))
    for _ in range(2):
        sampler = opvi.scale.sharded(opvi.langevin(target, step=0.1), opvi.scale.mesh(1))
        sampler.step(jax.random.key(0), sampler.init(jax.random.key(0), 6), batch)
    assert sharding._on_mesh._cache_size() == before + 1


def test_a_mesh_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"mesh of 3 × 1 devices was asked for, but there are 1.*device_count=3"):
        opvi.scale.mesh(3)
    with pytest.raises(ValueError, match=r"`particles` and `data` are 0 and 1, but must be whole"):
        opvi.scale.mesh(0)
    other = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    with pytest.raises(ValueError, match=r"`mesh` has \('x',\).*opvi.scale.mesh\(\)"):
        opvi.scale.sharded(opvi.opvi(opvi.gaussian_mixture(), step=0.1), other)
    with pytest.raises(ValueError, match="`mesh` has int"):
        opvi.scale.place((), 4)


def test_particles_that_do_not_divide_are_refused():
    four = jax.sharding.AbstractMesh((4,), ("particles",))
    state = opvi.langevin(opvi.gaussian_mixture(), step=0.1).init(jax.random.key(0), 6)
    with pytest.raises(ValueError, match=r"has 6 particles, which do not divide into the 4 parts.*multiple of 4"):
        sharding.check_counts(state, four)


# --- processes ----------------------------------------------------------------------------------


def two(folder, mode):
    """Both processes of a pair, until they end: their statuses and what they said."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    shared = {"devices": 2, "OPVI_COORDINATOR": address, "OPVI_PROCESSES": "2"}
    pair = [start("sharding_processes.py", folder, mode, OPVI_PROCESS=str(i), **shared) for i in range(2)]
    try:
        said = [process.communicate(timeout=120) for process in pair]
    finally:
        for process in pair:
            process.kill()
    return [process.returncode for process in pair], [output + errors for output, errors in said]


@pytest.fixture(scope="module")
def cut_off(tmp_path_factory):
    """The folder of a run whose process 1 was killed, and how process 0 ended."""
    folder = tmp_path_factory.mktemp("processes") / "run"
    statuses, said = two(folder, "killed")
    return folder, statuses, said


@pytest.fixture(scope="module")
def alone():
    """The same stream on one process and one device, never cut off."""
    state, history = sharding_processes.whole()
    return np.asarray(state.particles), history


@pytest.mark.slow
def test_a_killed_process_ends_the_other(cut_off):
    folder, statuses, said = cut_off
    assert statuses == [1, -signal.SIGKILL]
    assert "process 0 of 2 ends, because another one is gone" in said[0]
    assert "resumes from its last checkpoint" in said[0]
    assert sorted(path.name for path in folder.iterdir()) == ["round-0000000001", "round-0000000002"]


@pytest.mark.slow
def test_a_run_goes_on_with_one_process(cut_off, alone, tmp_path):
    shutil.copytree(cut_off[0], tmp_path / "run")
    state, history = sharding_processes.whole(tmp_path / "run")
    assert history.info.rows.tolist() == [60, 80, 95]
    np.testing.assert_allclose(state.particles, alone[0], atol=ROUNDING)


@pytest.mark.slow
def test_a_run_goes_on_with_two_processes(cut_off, alone, tmp_path):
    folder = shutil.copytree(cut_off[0], tmp_path / "run")
    statuses, said = two(folder, "resumed")
    assert statuses == [0, 0], said
    reports = [json.loads(Path(f"{folder}-{i}.json").read_text()) for i in range(2)]
    for report in reports:
        assert report["first"] == sharding_processes.CUT
        assert report["rows"] == [60, 80, 95]
        assert report["local"] == [[2, 4], [2, 4]]  # of 8 particles
        assert report["saved"] == ["round-0000000004", "round-0000000005"]
        assert report["uneven"] == [20, 31, 41]
        np.testing.assert_allclose(report["particles"], alone[0], atol=ROUNDING)
        np.testing.assert_allclose(report["log_predictive"], alone[1].info.log_predictive[2:], atol=ROUNDING)
        refused = report["refused"]
        assert "`batch_size` is 21, but 2 processes have equal parts" in refused["batch"]
        assert "`particles` is ((8, 4), 'float32') there and ((16, 4), 'float32') here" in refused["particles"]
        assert "processes [1] got no rows at all" in refused["rows"]


@pytest.mark.slow
def test_damaged_states_are_refused(cut_off, tmp_path):
    folder = shutil.copytree(cut_off[0], tmp_path / "run")
    for path in (folder / "round-0000000002").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(opvi.running.CheckpointError, match=r"round-0000000002 is (not a saved state, or is )?damaged"):
        distributed.resume(folder, sharding_processes.sampler()[1])


def test_a_folder_without_states_starts_anew(tmp_path):
    state = sharding_processes.sampler()[1]
    assert distributed.resume(tmp_path / "nothing", state) is state


def test_processes_must_be_known():
    with pytest.raises(ValueError, match=r"`process` is 2 of 2"), distributed.connected("127.0.0.1:1", 2, 2):
        pass
    with pytest.raises(ValueError, match=r"`coordinator` is 'here'"), distributed.connected("here", 2, 1):
        pass
    with socket.socket() as nobody:  # holds the port without listening
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        with pytest.raises(distributed.LostProcessError, match=f"nobody answers at {address}"):  # noqa: SIM117
            with distributed.connected(address, 2, 1, patience=0):
                pass
    with distributed.connected(processes=1):
        assert jax.process_count() == 1


def test_a_variable_must_be_a_number(monkeypatch):
    monkeypatch.setenv("OPVI_PROCESSES", "two")
    with pytest.raises(ValueError, match="OPVI_PROCESSES is 'two'"), distributed.connected():
        pass


def test_a_share_is_counted_in_rows():
    assert list(distributed.share(iter("abcdef"), 2, after=3)) == ["d", "e", "f"]
    x, y = distributed.share((np.arange(6), np.arange(6) * 2), 2, after=4)
    assert x.tolist() == [4, 5]
    assert y.tolist() == [8, 10]
    with pytest.raises(ValueError, match="`after` is -1"):
        distributed.share(iter("abc"), 2, after=-1)
    with pytest.raises(ValueError, match="`ahead` is 0"):
        distributed.stream((np.zeros(4),), 2, ahead=0)
    with pytest.raises(ValueError, match="`keep` is 0"):
        distributed.save("nowhere", None, keep=0)
