import gzip
import hashlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paper import data

needs_files = pytest.mark.skipif(
    not Path(os.environ.get(data.FOLDER) or "nowhere").is_dir(), reason="OPVI_DATA names no folder with the real data"
)


def write(folder: Path, path: str, content: bytes) -> data._File:
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_bytes(content)
    return data._File(path, len(content), hashlib.sha256(content).hexdigest())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(data.FOLDER, str(tmp_path))
    return tmp_path


@needs_files
def test_kin8nm_is_the_papers() -> None:
    source = data.load("kin8nm")
    assert source.X.shape == (8192, 8)
    assert source.y.mean() == pytest.approx(0.714, abs=1e-3)
    assert source.y.std() == pytest.approx(0.264, abs=1e-3)


@needs_files
def test_mnist_is_mnist() -> None:
    source = data.load("mnist")
    assert source.X.shape == (60_000, 784)
    assert source.X_test.shape == (10_000, 784)
    assert source.X.dtype == np.float32
    assert 0 <= source.X.min() < source.X.max() < 1
    assert source.y[:5].tolist() == [5, 0, 4, 1, 9]
    assert np.bincount(source.y_test).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


def test_files_are_read_from_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    X, y = np.arange(16.0).reshape(2, 8), np.arange(2.0)
    np.savez(folder / "small.npz", X=X, y=y)
    file = write(folder, data.KIN8NM.path, (folder / "small.npz").read_bytes())
    monkeypatch.setattr(data, "KIN8NM", file)
    source = data.kin8nm()
    np.testing.assert_array_equal(source.X, X)
    assert source.source == data.FOLDER


def test_images_are_read_from_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (70, 784)).astype(np.uint8)
    labels = (np.arange(70) % 10).astype(np.uint8)
    parts = {"train": slice(0, 60), "test": slice(60, 70)}
    files = {}
    for part, rows in parts.items():
        images = gzip.compress(bytes(16) + pixels[rows].tobytes())
        files[f"{part} images"] = write(folder, f"mnist/{part}-images.gz", images)
        files[f"{part} labels"] = write(
            folder, f"mnist/{part}-labels.gz", gzip.compress(bytes(8) + labels[rows].tobytes())
        )
    monkeypatch.setattr(data, "MNIST", files)
    monkeypatch.setattr(data, "TRAINING_ROWS", 60)
    monkeypatch.setattr(data, "MNIST_PIXELS", hashlib.sha256(pixels.tobytes()).hexdigest())
    with pytest.raises(data.DataError, match="labels from OPVI_DATA .*wrong checksum"):
        data.mnist()
    monkeypatch.setattr(data, "MNIST_LABELS", hashlib.sha256(labels.tobytes()).hexdigest())
    source = data.mnist()
    np.testing.assert_array_equal(source.X_test * 256, pixels[60:])
    np.testing.assert_array_equal(source.y, labels[:60])


def test_a_missing_file_is_named(folder: Path) -> None:
    with pytest.raises(data.DataError, match=r"kin8nm/kin8nm.npz is not there.*unset OPVI_DATA"):
        data.kin8nm()


def test_a_truncated_file_is_called_so(folder: Path) -> None:
    write(folder, data.KIN8NM.path, b"the first bytes")
    with pytest.raises(data.DataError, match="truncated: it has 15 bytes, not 559,977"):
        data.kin8nm()


def test_a_wrong_checksum_is_refused(folder: Path) -> None:
    write(folder, data.KIN8NM.path, bytes(data.KIN8NM.bytes))
    with pytest.raises(data.DataError, match="wrong checksum"):
        data.kin8nm()


def test_a_folder_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(data.FOLDER, "/no/such/folder")
    with pytest.raises(data.DataError, match="'/no/such/folder', which is no folder"):
        data.mnist()


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(data.DataError, match="`cifar` is no data set known here.*kin8nm, mnist"):
        data.load("cifar")


def fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: Any) -> dict[str, Any]:
    """Replace OpenML by an answer, or by an error to raise; returns what it was asked."""
    asked: dict[str, Any] = {}

    def fetch_openml(**options: Any) -> Any:
        asked.update(options)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.delenv(data.FOLDER, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(data, "_sklearn", lambda: SimpleNamespace(fetch_openml=fetch_openml))
    return asked


@pytest.mark.parametrize("error", [OSError("no route to host"), ValueError("cut off")])
def test_offline_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception) -> None:
    asked = fetched(monkeypatch, tmp_path, error)
    with pytest.raises(data.DataError, match="Are you offline\\? Set OPVI_DATA .* --smoke"):
        data.kin8nm()
    assert asked["data_id"] == 189
    assert asked["data_home"] == tmp_path / "opvi"


def test_openml_rows_are_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    y = rng.standard_normal(8192)
    y = 0.7143 + 0.2636 * (y - y.mean()) / y.std()
    fetched(monkeypatch, tmp_path, SimpleNamespace(data=rng.random((8192, 8)), target=y))
    assert data.kin8nm().source == "OpenML 189"
    fetched(monkeypatch, tmp_path, SimpleNamespace(data=rng.random((8192, 8)), target=y + 1))
    with pytest.raises(data.DataError, match="OpenML's kin8nm has"):
        data.kin8nm()
    fetched(monkeypatch, tmp_path, SimpleNamespace(data=np.zeros((3, 784)), target=np.zeros(3)))
    with pytest.raises(data.DataError, match="images from OpenML 554 .*wrong checksum"):
        data.mnist()


def test_without_scikit_learn_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(data.importlib, "import_module", missing)
    with pytest.raises(data.DataError, match=r"pip install 'opvi\[sklearn\]'"):
        data.digits()


def test_the_arm_is_what_its_formula_says() -> None:
    source = data.robot_arm(200, seed=3, noise=0.0)
    heading = np.cumsum(source.X, 1)
    end = np.array([np.cos(heading).sum(1), np.sin(heading).sum(1)]) / 8
    np.testing.assert_allclose(source.y, np.hypot(end[0] - 0.1, end[1] - 0.1))
    noisy = data.robot_arm(200, seed=3)
    assert 0.03 < (noisy.y - source.y).std() < 0.07
    np.testing.assert_array_equal(noisy.X, data.robot_arm(200, seed=3).X)


def test_digits_stand_in_for_mnist() -> None:
    pytest.importorskip("sklearn")
    source = data.digits()
    assert source.X.shape == (1437, 64)
    assert len(source.y_test) == 360
    assert (source.X.min(), source.X.max()) == (0, 1)
    assert set(source.y_test) == set(range(10))
