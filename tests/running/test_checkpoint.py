"""Saving and loading: the same bits back, damage found, nothing executed, nothing lost."""

import errno
import os
import pickle
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import opvi
from opvi.running import _checkpoint as checkpoint
from opvi.running._checkpoint import HEADER, CheckpointError

KEY = jax.random.key(0)


class Foreign(NamedTuple):
    value: int


@pytest.fixture(scope="module")
def sampler():
    return opvi.svgd(opvi.gaussian_mixture(), step=optax.adam(0.01))


@pytest.fixture(scope="module")
def tree(sampler):
    state = sampler.init(KEY, 10)
    return {
        "state": state,
        "key": KEY,
        "many keys": jax.random.split(jax.random.key(1, impl="rbg"), 3),
        "odd": [float("nan"), -0.0, 2**70, True, None, "ü", ()],
        "numpy": np.arange(6, dtype=np.int8).reshape(2, 3)[:, ::2],
        "half": jnp.ones(3, jnp.bfloat16) / 3,
        "nothing": np.zeros((0, 4), np.float32),
        "scalar": np.array(0.1),
    }


@pytest.fixture
def saved(tree, tmp_path):
    return opvi.save(tmp_path / "state.opvi", tree)


def same(a, b):
    if isinstance(a, jax.Array) and jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        return a.dtype == b.dtype and same(jax.random.key_data(a), jax.random.key_data(b))
    if type(a) is not type(b) or type(a) in (int, str):
        return type(a) is type(b) and a == b
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def test_what_is_saved_comes_back_bit_for_bit(tree, saved):
    back = opvi.load(saved)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    assert all(jax.tree.leaves(jax.tree.map(same, tree, back)))
    assert type(back["state"]) is type(tree["state"])
    assert isinstance(back["state"].particles, jax.Array)
    assert isinstance(back["numpy"], np.ndarray)
    assert back["odd"][3] is True


@pytest.fixture
def relaxed():
    with jax.numpy_dtype_promotion("standard"):  # optax's Adam mixes dtypes
        yield


@pytest.mark.usefixtures("relaxed")
def test_a_run_goes_on_from_a_file_with_the_same_bits(sampler, tmp_path, mixture_rows):
    stream = opvi.stream(mixture_rows[:200], 20)
    whole, _ = opvi.run(sampler, stream, KEY, particles=10)
    half, _ = opvi.run(sampler, stream, KEY, particles=10, rounds=4)
    back = opvi.load(opvi.save(tmp_path / "half", {"state": half, "key": KEY}))
    resumed, _ = opvi.run(sampler, stream.after(4), back["key"], state=back["state"])
    assert all(jax.tree.leaves(jax.tree.map(same, whole, resumed)))


def test_every_flipped_or_missing_byte_is_found(saved):
    data = saved.read_bytes()
    rng = np.random.default_rng(0)
    for at in [*range(HEADER.size), *rng.integers(HEADER.size, len(data), 200)]:
        damaged = bytearray(data)
        damaged[at] ^= 1 << rng.integers(8)
        saved.write_bytes(damaged)
        with pytest.raises(CheckpointError):
            opvi.load(saved)
    for end in [0, 1, HEADER.size - 1, HEADER.size, *rng.integers(0, len(data), 50)]:
        saved.write_bytes(data[:end])
        with pytest.raises(CheckpointError):
            opvi.load(saved)
    saved.write_bytes(data + b"more")
    with pytest.raises(CheckpointError):
        opvi.load(saved)


def test_64_bits_are_not_cut_to_32_in_silence(tmp_path):
    with jax.enable_x64(True):
        path = opvi.save(tmp_path / "long", jnp.ones(2, jnp.float64) / 3)
        assert opvi.load(path).dtype == jnp.float64
    with pytest.raises(CheckpointError, match="jax_enable_x64"):
        opvi.load(path)


class Trap:
    def __reduce__(self):
        return os.mkdir, ("it-was-executed",)


def test_a_pickle_is_refused_unread(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for data in (pickle.dumps(Trap()), checkpoint.MAGIC + pickle.dumps(Trap())):
        (tmp_path / "state.opvi").write_bytes(data)
        with pytest.raises(CheckpointError):
            opvi.load(tmp_path / "state.opvi")
    assert not (tmp_path / "it-was-executed").exists()


def forged(path, description: bytes, version=checkpoint.VERSION):
    """A file with a right checksum and any description."""
    digest = checkpoint.hashlib.sha256(description).digest()
    path.write_bytes(HEADER.pack(checkpoint.MAGIC, version, digest, len(description)) + description)
    return path


@pytest.mark.parametrize(
    ("description", "says"),
    [
        (b'{"class": "os:system", "fields": {}}', "only those of opvi and optax"),
        (b'{"class": "opvi.data:urlopen", "fields": {}}', "no state of this opvi"),
        (b'{"class": "opvi.types:Batch", "fields": {"data": null}}', "written by another version"),
        (b'{"class": "optax.nowhere:State", "fields": {}}', "no state of this opvi"),
        (b'{"array": "object", "shape": [1], "jax": false}', "does not describe"),
        (b'{"array": "float32", "shape": [-1], "jax": false}', "does not describe"),
        (b'{"array": "float32", "shape": [1000000000000], "jax": false}', "ends before its last array"),
        (b'{"key": "nonsense", "data": null}', "does not describe"),
        (b'{"what": 1}', "does not describe"),
        (b"[" * 100_000, "does not describe"),
        (b"\xff", "does not describe"),
    ],
)
def test_a_forged_file_with_a_right_checksum_builds_no_more_than_states(tmp_path, description, says):
    with pytest.raises(CheckpointError, match=says):
        opvi.load(forged(tmp_path / "state.opvi", description))


def test_a_newer_format_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(CheckpointError, match="written by a newer one.*pip install --upgrade"):
        opvi.load(forged(tmp_path / "state.opvi", b"null", version=checkpoint.VERSION + 1))


@pytest.mark.parametrize("bad", [{1: 2}, Foreign(1), object(), np.array(["text"]), np.array([1j])])
def test_what_cannot_be_restored_is_not_saved(tmp_path, bad):
    with pytest.raises(TypeError, match=r"\.here is"):
        opvi.save(tmp_path / "state.opvi", {"here": bad})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_loses_nothing(saved, monkeypatch, call):
    before = saved.read_bytes()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space left"):
        opvi.save(saved, {"other": 1})
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]  # no leftovers


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere is no folder, so nothing was saved"):
        opvi.save(tmp_path / "nowhere" / "state.opvi", {})


# --- several of a run -----------------------------------------------------------------------------


def test_the_last_few_are_kept_and_the_newest_whole_one_is_found(tmp_path):
    with opvi.running.Checkpoints(tmp_path / "run", keep=2) as kept:
        assert kept.newest() is None
        (tmp_path / "run" / ".5.part").touch()  # of a process killed while it wrote
        for number in (1, 20, 300):
            kept.save(number, {"number": number})
        names = sorted(path.name for path in (tmp_path / "run").iterdir())
        assert names == ["000000000000020.opvi", "000000000000300.opvi", "lock"]
        assert kept.newest() == {"number": 300}
        (tmp_path / "run" / names[1]).write_bytes(b"opvi checkpoint\n")
    reader = opvi.running.Checkpoints(tmp_path / "run")
    assert reader.newest() == {"number": 20}
    assert len(reader.damaged) == 1
    assert (tmp_path / "run" / names[1]).exists()  # a reader changes nothing
    with opvi.running.Checkpoints(tmp_path / "run") as kept:
        assert kept.newest() == {"number": 20}
        assert not (tmp_path / "run" / names[1]).exists()  # a writer sets it aside
    with pytest.raises(ValueError, match="at least 1"):
        opvi.running.Checkpoints(tmp_path, keep=0)


def test_one_writer_at_a_time(tmp_path):
    from opvi.running._checkpoint import LockedError

    with opvi.running.Checkpoints(tmp_path / "run"), pytest.raises(LockedError, match=str(os.getpid())):
        opvi.running.Checkpoints(tmp_path / "run").__enter__()
    with opvi.running.Checkpoints(tmp_path / "run"):  # free again
        pass


def test_a_link_to_elsewhere_is_passed_over(tmp_path):
    opvi.save(tmp_path / "000000000000001.opvi", {"mine": 1})
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "000000000000001.opvi").symlink_to(tmp_path / "000000000000001.opvi")
    kept = opvi.running.Checkpoints(tmp_path / "run")
    assert kept.newest() is None
    assert "is a link" in kept.damaged[0]
