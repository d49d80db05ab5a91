"""The same program on one and on many devices, and on one and on two processes, of which one may die."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import opvi
from opvi.scale import _sharding as sharding
from tests.scale import sharding_processes

HERE = Path(__file__).parent
FLAGS = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count="  # the suite's, which compile quickly
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
@pytest.mark.parametrize("mesh", ["2 × 1", "8 × 1", "1 × 8"])
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


NETWORKS = "model.inner.inner.inner.inner.experts.0."  # in a regressor's state


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("kfac", {"particles", "factors.0.outputs", "factors.1.inputs", "factors.1.inverse", "factors.1.outputs"}),
        ("regressor", {NETWORKS + leaf for leaf in ("particles", "past.matrices", "error", "members.products")}),
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


@pytest.mark.usefixtures("retraced")
def test_equal_sharded_samplers_share_their_program():
    before = sharding._on_mesh._cache_size()
    target, batch = opvi.gaussian_mixture(), opvi.batch(np.zeros((4,), np.float32))
    for _ in range(2):
        sampler = opvi.scale.sharded(opvi.langevin(target, step=0.1), opvi.scale.mesh(1))
        sampler.step(jax.random.key(0), sampler.init(jax.random.key(0), 6), batch)
    assert sharding._on_mesh._cache_size() == before + 1


def test_a_mesh_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"mesh of 3 × 1 devices was requested, but there are 1.*device_count=3"):
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


def two(folder):
    """Run both processes of a pair until they end; return what each reports."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    pair = [start("sharding_processes.py", folder, address, str(i), devices=2) for i in range(2)]
    try:
        said = [process.communicate(timeout=120) for process in pair]
    finally:
        for process in pair:
            process.kill()
    assert [process.returncode for process in pair] == [0, 0], said
    return [json.loads((folder / f"{i}.json").read_text()) for i in range(2)]


@pytest.mark.slow
def test_two_processes_learn_as_one_and_resume(tmp_path):
    alone, history = sharding_processes.whole(None)
    sharding_processes.whole(tmp_path, sharding_processes.ROWS[:40])  # one process begins, two continue
    for report in two(tmp_path):
        assert report["rows"] == [60, 80, 95]
        assert report["local"] == [[2, 4], [2, 4]]  # of 8 particles over 4 devices
        np.testing.assert_allclose(report["particles"], alone.particles, atol=ROUNDING)
        np.testing.assert_allclose(report["log_predictive"], history.info.log_predictive[2:], atol=ROUNDING)
