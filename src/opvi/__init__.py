"""opvi: online Bayesian inference with particles."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from opvi import distributed as distributed
from opvi import fields as fields
from opvi import kernels as kernels
from opvi import metrics as metrics
from opvi import regret as regret
from opvi import schedules as schedules
from opvi import targets as targets
from opvi.algorithms import AdaptiveNoise as AdaptiveNoise
from opvi.algorithms import Pace as Pace
from opvi.algorithms import ball as ball
from opvi.algorithms import blob as blob
from opvi.algorithms import box as box
from opvi.algorithms import gain_one as gain_one
from opvi.algorithms import gauss_newton as gauss_newton
from opvi.algorithms import gfsd as gfsd
from opvi.algorithms import gfsf as gfsf
from opvi.algorithms import kfac as kfac
from opvi.algorithms import langevin as langevin
from opvi.algorithms import linear_ekf as linear_ekf
from opvi.algorithms import online_map as online_map
from opvi.algorithms import opvi as opvi
from opvi.algorithms import parvi as parvi
from opvi.algorithms import replay as replay
from opvi.algorithms import sl_opvi as sl_opvi
from opvi.algorithms import svgd as svgd
from opvi.algorithms import wag as wag
from opvi.algorithms import wnes as wnes
from opvi.checkpoint import CheckpointError as CheckpointError
from opvi.checkpoint import Checkpoints as Checkpoints
from opvi.checkpoint import load as load
from opvi.checkpoint import save as save
from opvi.distributions import Bernoulli as Bernoulli
from opvi.distributions import Categorical as Categorical
from opvi.distributions import Normal as Normal
from opvi.distributions import StudentT as StudentT
from opvi.fleet import Fleet as Fleet
from opvi.inference import Chunk as Chunk
from opvi.inference import Compared as Compared
from opvi.inference import History as History
from opvi.inference import compare as compare
from opvi.inference import run as run
from opvi.predictive import Predictive as Predictive
from opvi.predictive import predict as predict
from opvi.schedules import decaying as decaying
from opvi.schedules import power as power
from opvi.schedules import saturating as saturating
from opvi.schedules import static as static
from opvi.sharding import mesh as mesh
from opvi.sharding import place as place
from opvi.sharding import sharded as sharded
from opvi.stream import Stream as Stream
from opvi.stream import batch as batch
from opvi.stream import stream as stream
from opvi.targets import Gamma as Gamma
from opvi.targets import Target as Target
from opvi.targets import bernoulli as bernoulli
from opvi.targets import categorical as categorical
from opvi.targets import draw as draw
from opvi.targets import gaussian as gaussian
from opvi.targets import gaussian_mixture as gaussian_mixture
from opvi.targets import linear_regression as linear_regression
from opvi.targets import logistic_regression as logistic_regression
from opvi.targets import mlp as mlp
from opvi.targets import network as network
from opvi.targets import softmax_regression as softmax_regression
from opvi.targets import target as target
from opvi.tracking import calibrated as calibrated
from opvi.tracking import classifier as classifier
from opvi.tracking import first_order as first_order
from opvi.tracking import regressor as regressor
from opvi.tracking import tracker as tracker
from opvi.tracking import watched as watched
from opvi.tracking.bank import bank as bank
from opvi.types import Algorithm as Algorithm
from opvi.types import Batch as Batch
from opvi.types import DivergedError as DivergedError
from opvi.types import FieldValue as FieldValue
from opvi.types import Tracker as Tracker

if TYPE_CHECKING:
    from opvi.estimators import OPVIClassifier as OPVIClassifier
    from opvi.estimators import OPVIRegressor as OPVIRegressor
    from opvi.interop.arviz import to_arviz as to_arviz
    from opvi.interop.numpyro import from_numpyro as from_numpyro

__version__ = version("opvi")

# What needs an optional library is imported when it is first asked for.
_LATER = {
    "OPVIClassifier": "opvi.estimators",
    "OPVIRegressor": "opvi.estimators",
    "from_numpyro": "opvi.interop.numpyro",
    "to_arviz": "opvi.interop.arviz",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'opvi' has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LATER])
