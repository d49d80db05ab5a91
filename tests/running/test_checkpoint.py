"""Saving and loading: the same bits back, damage found, nothing executed, nothing lost."""

import errno
import hashlib
import json
import os
import pickle
import re
import subprocess
import sys
import tracemalloc
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import opvi
from opvi.running import _checkpoint as checkpoint
from opvi.running import _saving as saving
from opvi.running._checkpoint import HEADER, CheckpointError

KEY = jax.random.key(0)


class Foreign(NamedTuple):
    value: Any
    parts: Any = ()


@pytest.fixture(scope="module")
def sampler():
    return opvi.svgd(opvi.gaussian_mixture(), step=optax.adam(0.01))


@pytest.fixture(scope="module")
def tree(sampler):
    return {
        "state": sampler.init(KEY, 10),
        "key": KEY,
        "many keys": jax.random.split(jax.random.key(1, impl="rbg"), 3),
        "odd": [float("nan"), -0.0, float("-inf"), 2**70, True, None, "ü", []],
        "numpy": np.arange(6, dtype=np.int8).reshape(2, 3)[:, ::2],
        "half": jnp.ones(3, jnp.bfloat16) / 3,
        "nothing": np.zeros((0, 4), np.float32),
        "scalar": np.array(0.1),
        "a/b~c": {"": np.arange(3, dtype=">i4")},
    }


@pytest.fixture
def saved(tree, tmp_path):
    return opvi.save(tmp_path / "state.opvi", tree)


def same(a, b):
    """Of one type, and equal to the bit."""
    if isinstance(a, jax.Array) and jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        return a.dtype == b.dtype and same(jax.random.key_data(a), jax.random.key_data(b))
    if type(a) is not type(b) or type(a) in (int, str):
        return type(a) is type(b) and a == b
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def all_same(a, b):
    return jax.tree.structure(a) == jax.tree.structure(b) and all(jax.tree.leaves(jax.tree.map(same, a, b)))


def plain(tree):
    """States as dictionaries, tuples as lists, arrays as NumPy's in the machine's byte order."""
    if isinstance(tree, dict):
        return {name: plain(value) for name, value in tree.items()}
    if hasattr(tree, "_fields"):
        return plain(tree._asdict())
    if isinstance(tree, list | tuple):
        return [plain(value) for value in tree]
    is_key = isinstance(tree, jax.Array) and jnp.issubdtype(tree.dtype, jax.dtypes.prng_key)
    if is_key or not hasattr(tree, "dtype"):
        return tree
    array = np.asarray(tree)
    return array.astype(array.dtype.newbyteorder("="))


def test_what_is_saved_comes_back_bit_for_bit(tree, saved):
    back = opvi.load(saved)
    assert all_same(back, plain(tree))
    assert back["odd"][4] is True
    assert all_same(opvi.load(saved, like={**tree, "a/b~c": None}), {**tree, "a/b~c": plain(tree["a/b~c"])})


def test_arrays_lie_by_path_and_no_class_is_named(saved):
    data = saved.read_bytes()
    size = HEADER.unpack_from(data)[3]
    told = json.loads(data[HEADER.size : HEADER.size + size])
    assert told["arrays"]["state/particles"] == {"dtype": "float32", "shape": [10, 2]}
    assert told["arrays"]["state/optimizer/0/mu"] == {"dtype": "float32", "shape": [10, 2]}
    assert told["arrays"]["many keys"] == {"dtype": "uint32", "shape": [3, 4], "key": "rbg"}
    assert told["arrays"]["a~1b~0c/"] == {"dtype": "int32", "shape": [3]}
    assert told["tree"]["odd"][3:] == [2**70, True, None, "ü", []]
    for name in (b"State", b"optax", b"Adam", b"ParVI", b"opvi."):
        assert name not in data[len(checkpoint.MAGIC) :]


def test_a_state_has_the_form_of_its_sampler(sampler, tmp_path):
    """Whatever the number of particles; nothing is drawn."""
    state = sampler.init(KEY, 7)
    path = opvi.save(tmp_path / "state", state)
    assert all_same(opvi.load(path, like=sampler), state)
    assert all_same(opvi.load(path, like=state), state)
    several = opvi.watched(opvi.classifier(3, 2, hidden=(4,), particles=8))  # networks and filters: sets of two sizes
    path = opvi.save(tmp_path / "several", several.init(KEY))
    assert all_same(opvi.load(path, like=several), several.init(KEY))
    both = opvi.save(tmp_path / "both", {"state": state, "note": "x", "more": (1, 2)})
    assert all_same(opvi.load(both, like={"state": sampler}), {"state": state, "note": "x", "more": [1, 2]})


@pytest.mark.parametrize(
    ("saved", "like", "says"),
    [
        ({"a": Foreign(1)}, {"a": Foreign(1), "b": 2}, "`b` is missing"),
        ({"a": {"value": 1}}, {"a": Foreign(1)}, "`a/parts` is missing"),
        ({"a": {"value": 1, "parts": [], "more": 2}}, {"a": Foreign(1)}, "`a/more` is not expected"),
        ({"a": Foreign({"x": 1, "y": 2})}, {"a": Foreign({"x": 1})}, "`a/value/y` is not expected"),
        ({"a": Foreign(1, (1, 2))}, {"a": Foreign(1, (1,))}, "`a/parts` is a list of 2 entries, but a list of 1"),
        ({"a": Foreign(jnp.ones(3))}, {"a": Foreign(jnp.ones(4))}, r"`a/value` is .*\(3,\), but .*\(4,\) is expected"),
        ({"a": Foreign(jnp.ones(3))}, {"a": Foreign(jnp.ones(3, int))}, "`a/value` is .* float32 .* int32 .* expected"),
        ({"a": np.ones(3)}, {"a": np.ones((3, 1))}, "`a` is an array"),
        ({"a": Foreign(KEY)}, {"a": Foreign(jnp.ones(2))}, "`a/value` is an array of dtype key"),
        ({"a": Foreign(np.ones(2))}, {"a": Foreign(KEY)}, "`a/value` is an array of dtype float64"),
        ({"a": Foreign(1)}, {"a": Foreign(jnp.ones(()))}, "`a/value` is 1, but an array"),
        ({"a": Foreign(None)}, {"a": Foreign(1)}, "`a/value` is nothing, but 1 is expected"),
        ({"a": Foreign(1)}, {"a": Foreign(None)}, "`a/value` is 1, but nothing is expected"),
        ({"a": Foreign("x")}, {"a": Foreign(1)}, "`a/value` is 'x', but 1"),
        ([1], {"a": 1}, r"what was saved is a list of 1 entries, but entries \['a'\]"),
    ],
)
def test_what_does_not_fit_is_named_by_its_path(tmp_path, saved, like, says):
    path = opvi.save(tmp_path / "state", saved)
    opvi.load(path)
    with pytest.raises(CheckpointError, match=says):
        opvi.load(path, like=like)


def test_a_state_is_loaded_without_compiling(monkeypatch):
    """`jnp.asarray` compiles a program for each shape: a sixth of a second before the first prediction of a run."""
    monkeypatch.setattr(jnp, "asarray", lambda *_: pytest.fail("compiles"))
    found = checkpoint.shaped({"a": np.arange(7.0, dtype=np.float32)}, {"a": jax.ShapeDtypeStruct((7,), np.float32)})
    assert isinstance(found["a"], jax.Array)
    np.testing.assert_array_equal(found["a"], np.arange(7))


def test_numpy_arrays_may_have_grown(tmp_path):
    path = opvi.save(tmp_path / "state", {"alarms": np.arange(3)})
    assert len(opvi.load(path, like={"alarms": np.arange(0)})["alarms"]) == 3


@pytest.fixture
def relaxed():
    with jax.numpy_dtype_promotion("standard"):  # optax's Adam mixes dtypes
        yield


@pytest.mark.usefixtures("relaxed")
def test_a_run_resumes_from_a_file_with_the_same_bits(sampler, tmp_path, mixture_rows):
    stream = opvi.stream(mixture_rows[:200], 20)
    whole, _ = opvi.run(sampler, stream, KEY, particles=10)
    half, _ = opvi.run(sampler, stream, KEY, particles=10, rounds=4)
    back = opvi.load(opvi.save(tmp_path / "half", {"state": half, "key": KEY}), like={"state": sampler})
    resumed, _ = opvi.run(sampler, stream.after(4), back["key"], state=back["state"])
    assert all_same(resumed, whole)


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
        state = Foreign(jnp.ones(2, jnp.float64) / 3)
        path = opvi.save(tmp_path / "long", state)
        assert opvi.load(path, like=state).value.dtype == jnp.float64
    assert opvi.load(path)["value"].dtype == np.float64
    with pytest.raises(CheckpointError, match="jax_enable_x64"):
        opvi.load(path, like=Foreign(jnp.ones(2)))


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


ARRAY = '{"tree": null, "arrays": {"": %s}}'


@pytest.mark.parametrize(
    ("description", "says"),
    [
        (ARRAY % '{"dtype": "object", "shape": [1]}', "no numeric dtype 'object'"),
        (ARRAY % '{"dtype": "U9", "shape": [1]}', "no numeric dtype"),
        (ARRAY % '{"dtype": ["float32"], "shape": [1]}', "does not describe"),
        (ARRAY % '{"dtype": "float32", "shape": [-1]}', "shape"),
        (ARRAY % '{"dtype": "float32", "shape": [true]}', "shape"),
        (ARRAY % '{"dtype": "float32", "shape": [1.5]}', "shape"),
        (ARRAY % '{"dtype": "float32", "shape": 1}', "shape"),
        (ARRAY % '{"dtype": "float32", "shape": [1000000000000]}', "ends before"),
        (ARRAY % ('{"dtype": "float32", "shape": [' + ",".join(["9" * 4000] * 600) + "]}"), "has the shape"),
        (ARRAY % ('{"dtype": "float32", "shape": [' + "1," * 600 + "1]}"), "has the shape"),
        ('{"tree": [' + "[]," * 1_100_000 + '[]], "arrays": {}}', "values besides arrays, but at most"),
        (ARRAY % '{"dtype": "float32", "shape": [0, 99999999999999999999]}', "does not describe"),
        (ARRAY % ('{"dtype": "float32", "shape": [' + "0," * 99 + "0]}"), "does not describe"),
        (ARRAY % '{"dtype": "float32", "shape": [0], "class": "os:system"}', "not an array"),
        (ARRAY % '{"dtype": "uint32", "shape": [0], "key": "nonsense"}', "kind 'nonsense'"),
        (ARRAY % '{"dtype": "uint32", "shape": [0], "key": "rbg"}', "does not describe"),
        (ARRAY % '{"dtype": "float64", "shape": [0], "number": true}', "does not describe"),
        ('{"tree": 1, "arrays": {"": {"dtype": "int8", "shape": [0]}}}', "`` has no place"),
        ('{"tree": {"a": null}, "arrays": {"b": {"dtype": "int8", "shape": [0]}}}', "`b` has no place"),
        ('{"tree": {"a": 1, "a": 2}, "arrays": {}}', "twice"),
        ('{"tree": NaN, "arrays": {}}', "NaN is not a number"),
        ('{"tree": %s, "arrays": {}}' % ("9" * 10_000), "does not describe"),
        ('{"class": "os:system", "fields": {}}', "not a tree with arrays"),
        ('{"tree": 1, "arrays": []}', "not a tree with arrays"),
        ("null", "not a tree with arrays"),
        ("[" * 100_000, "does not describe"),
        ("\xff", "does not describe"),
    ],
)
def test_a_forged_file_with_a_right_checksum_gives_plain_data_or_nothing(tmp_path, description, says):
    with pytest.raises(CheckpointError, match=says):
        opvi.load(forged(tmp_path / "state.opvi", description.encode("latin-1")))


def test_forged_bytes_and_a_forged_length_are_refused(tmp_path):
    description = b'{"tree": null, "arrays": {"": {"dtype": "int8", "shape": [1]}}}'
    body = description + b"12"
    header = HEADER.pack(checkpoint.MAGIC, 2, checkpoint.hashlib.sha256(body).digest(), len(description))
    (tmp_path / "more.opvi").write_bytes(header + body)
    with pytest.raises(CheckpointError, match="1 bytes more than it describes"):
        opvi.load(tmp_path / "more.opvi")
    path = forged(tmp_path / "state.opvi", b"null")
    data = bytearray(path.read_bytes())
    data[HEADER.size - 8 : HEADER.size] = (1 << 60).to_bytes(8, "little")
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="does not describe"):
        opvi.load(path)


def test_a_description_takes_no_more_memory_than_it_may(tmp_path):
    """36 MB of JSON would be 1.8 GB of objects."""
    tracemalloc.start()
    path = forged(tmp_path / "state.opvi", b'{"tree": [' + b"[]," * 12_000_000 + b'[]], "arrays": {}}')
    tracemalloc.reset_peak()
    with pytest.raises(CheckpointError, match="about 24,000,00"):
        opvi.load(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 120e6
    with pytest.raises(ValueError, match="Make arrays of long lists"):
        opvi.save(tmp_path / "long.opvi", [0] * 1_100_000)


@pytest.mark.parametrize("begins", ["as one", "as nothing"])
def test_a_sparse_file_of_a_terabyte_is_refused_at_once(tmp_path, begins):
    path = tmp_path / "000000000000001.opvi"
    head = HEADER.pack(checkpoint.MAGIC, checkpoint.VERSION, bytes(32), 100)
    path.write_bytes(head if begins == "as one" else b"")
    os.truncate(path, 1 << 40)
    with pytest.raises(CheckpointError, match="more than the memory" if begins == "as one" else "not an opvi check"):
        opvi.load(path)
    kept = opvi.running.Checkpoints(tmp_path)
    assert kept.newest() is None
    assert len(kept.damaged) == 1


def test_other_formats_are_refused_with_the_remedy(tmp_path):
    with pytest.raises(CheckpointError, match="written by a newer one.*pip install --upgrade"):
        opvi.load(forged(tmp_path / "state.opvi", b"null", version=checkpoint.VERSION + 1))
    with pytest.raises(CheckpointError, match="format 1, which no released opvi wrote"):
        opvi.load(forged(tmp_path / "state.opvi", b"null", version=1))


def test_only_regular_files_are_opened(tmp_path):
    """A pipe would be waited for, and some devices act on being opened."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, "/dev/zero"):
        with pytest.raises(CheckpointError, match="not a regular file"):
            opvi.load(path)
    with pytest.raises(FileNotFoundError):
        opvi.load(tmp_path / "nowhere")


@pytest.mark.parametrize("bad", [{1: 2}, object(), {1, 2}, np.array(["text"]), np.array([1j]), b"bytes"])
def test_what_cannot_be_restored_is_not_saved(tmp_path, bad):
    with pytest.raises(TypeError, match=r"`here/1` is"):
        opvi.save(tmp_path / "state.opvi", {"here": [0, bad]})
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
    with pytest.raises(FileNotFoundError, match="nowhere is not a folder, so nothing was saved"):
        opvi.save(tmp_path / "nowhere" / "state.opvi", {})


# --- several of a run -----------------------------------------------------------------------------


def test_the_last_few_are_kept_and_the_newest_whole_one_is_found(tmp_path):
    with opvi.running.Checkpoints(tmp_path / "run", keep=2) as kept:
        assert kept.newest() is None
        (tmp_path / "run" / ".5.part").touch()  # of a process killed while it wrote
        for number in (1, 20, 300):
            kept.save(number, {"number": number})
        names = sorted(path.name for path in (tmp_path / "run").iterdir())
        assert names == ["000000000000020.opvi", "000000000000300.opvi", "lock", "owner"]
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


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO, errno.ENOSPC])
def test_a_checkpoint_that_cannot_be_read_now_is_not_set_aside(tmp_path, monkeypatch, code):
    with opvi.running.Checkpoints(tmp_path) as kept:
        for number in (1, 2):
            kept.save(number, {"number": number})
        real, failing = checkpoint.read, ["2.opvi"]

        def read(path):
            if any(path.name.endswith(name) for name in failing):
                raise OSError(code, os.strerror(code), str(path))
            return real(path)

        with monkeypatch.context() as patched:
            patched.setattr(saving, "read", read)
            assert kept.newest() == {"number": 1}
            assert os.strerror(code) in kept.damaged[0]
            failing.append("1.opvi")
            with pytest.raises(OSError, match=os.strerror(code)):
                kept.newest()
        assert kept.newest() == {"number": 2}


def test_a_checkpoint_that_does_not_fit_is_not_damaged(tmp_path):
    with opvi.running.Checkpoints(tmp_path) as kept:
        path = kept.save(1, {"state": Foreign(jnp.ones(2))})
        assert isinstance(kept.newest(like={"state": Foreign(jnp.ones(2))})["state"], Foreign)
        with pytest.raises(CheckpointError, match=r"000001\.opvi: `state/value` is"):
            kept.newest(like={"state": Foreign(jnp.ones(3))})
        assert path.exists()


def test_one_writer_at_a_time(tmp_path):
    with opvi.running.Checkpoints(tmp_path / "run"), pytest.raises(opvi.running.LockedError, match=str(os.getpid())):
        opvi.running.Checkpoints(tmp_path / "run").__enter__()
    with opvi.running.Checkpoints(tmp_path / "run"):  # free again
        pass


HOLD = """
import sys
import opvi
with opvi.running.Checkpoints(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_the_lock_dies_with_its_process(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        for _ in range(2):  # a refusal does not wipe out who owns it
            with pytest.raises(opvi.running.LockedError, match=f"by process {process.pid}"):
                opvi.running.Checkpoints(tmp_path / "run").__enter__()
        process.kill()
    with opvi.running.Checkpoints(tmp_path / "run"):
        assert (tmp_path / "run" / "owner").read_text() == str(os.getpid())


@pytest.mark.parametrize("name", ["lock", "owner"])
def test_a_lock_is_not_written_through_a_link(tmp_path, name):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "precious")
    with pytest.raises(opvi.running.LockedError, match=f"{name} is a link"):
        opvi.running.Checkpoints(tmp_path / "run").__enter__()
    assert (tmp_path / "precious").read_text() == "precious"


WITHOUT_FCNTL = """
import sys, warnings
sys.modules["fcntl"] = None  # as on Windows, or in a browser
import opvi
warnings.simplefilter("ignore")  # filelock's, about a weaker lock
with opvi.running.Checkpoints(sys.argv[1]) as kept:
    kept.save(1, {"x": 1})
    try:
        opvi.running.Checkpoints(sys.argv[1]).__enter__()
    except opvi.running.LockedError:
        print(kept.newest())
"""


def test_systems_without_fcntl(tmp_path):
    command = [sys.executable, "-c", WITHOUT_FCNTL, str(tmp_path / "run")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "{'x': 1}\n"


def test_a_link_to_elsewhere_is_passed_over(tmp_path):
    opvi.save(tmp_path / "000000000000001.opvi", {"mine": 1})
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "000000000000001.opvi").symlink_to(tmp_path / "000000000000001.opvi")
    kept = opvi.running.Checkpoints(tmp_path / "run")
    assert kept.newest() is None
    assert "is a link" in kept.damaged[0]


def test_a_thousand_forged_files_give_plain_data_or_an_error(tmp_path):
    """Descriptions with parts changed at random, under a right checksum: nothing is run, nothing else is raised."""
    rng = np.random.default_rng(0)
    whole = opvi.save(
        tmp_path / "whole.opvi", {"state": {"a": np.arange(6.0), "b": np.ones((2, 3), np.float32)}, "n": 3, "s": "x"}
    )
    data = whole.read_bytes()
    _, version, _, size = checkpoint.HEADER.unpack_from(data)
    description, arrays = data[checkpoint.HEADER.size :][:size].decode(), data[checkpoint.HEADER.size + size :]
    words = re.findall(r'"[^"]*"|-?\d+|null|[\[\]{}:,]', description)
    odd = [
        '"opvi.app.cli.__main__:X"',
        '"__class__"',
        "1e999",
        "-1",
        "NaN",
        "null",
        "[]",
        "{}",
        '"\\u001b[2J"',
        "99999999999",
    ]
    refused = []
    for _ in range(1200):
        changed = list(words)
        for place in rng.integers(len(words), size=rng.integers(1, 4)):
            changed[place] = odd[rng.integers(len(odd))] if rng.random() < 0.6 else words[rng.integers(len(words))]
        body = "".join(changed).encode() + arrays[: rng.integers(len(arrays) + 1) if rng.random() < 0.2 else None]
        header = checkpoint.HEADER.pack(
            checkpoint.MAGIC, version, hashlib.sha256(body).digest(), len("".join(changed).encode())
        )
        whole.write_bytes(header + body)
        try:
            checkpoint.read(whole)
        except checkpoint.CheckpointError as error:
            refused.append(str(error))
    assert len(refused) > 600
    assert all(words.isprintable() for words in refused)


def test_numbers_beyond_all_numbers_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="1e999 is not a number"):
        opvi.load(forged(tmp_path / "state.opvi", b'{"tree": 1e999, "arrays": {}}'))
