"""opvi: online Bayesian inference with particles."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from opvi import filters as filters
from opvi import flows as flows
from opvi import metrics as metrics
from opvi import predictive as predictive
from opvi import regret as regret
from opvi import running as running
from opvi import scale as scale
from opvi import targets as targets
from opvi import tracking as tracking
from opvi import types as types
from opvi.filters import gain_one as gain_one
from opvi.filters import gauss_newton as gauss_newton
from opvi.filters import kfac as kfac
from opvi.filters import linear_ekf as linear_ekf
from opvi.filters import sl_opvi as sl_opvi
from opvi.flows import blob as blob
from opvi.flows import gfsd as gfsd
from opvi.flows import gfsf as gfsf
from opvi.flows import langevin as langevin
from opvi.flows import online_map as online_map
from opvi.flows import opvi as opvi
from opvi.flows import parvi as parvi
from opvi.flows import schedules as schedules
from opvi.flows import svgd as svgd
from opvi.predictive import Bernoulli as Bernoulli
from opvi.predictive import Categorical as Categorical
from opvi.predictive import Normal as Normal
from opvi.predictive import Predictive as Predictive
from opvi.predictive import predict as predict
from opvi.running import batch as batch
from opvi.running import compare as compare
from opvi.running import load as load
from opvi.running import run as run
from opvi.running import save as save
from opvi.running import stream as stream
from opvi.scale import Fleet as Fleet
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
from opvi.tracking import bank as bank
from opvi.tracking import calibrated as calibrated
from opvi.tracking import classifier as classifier
from opvi.tracking import regressor as regressor
from opvi.tracking import remembering as remembering
from opvi.tracking import replay as replay
from opvi.tracking import tracker as tracker
from opvi.tracking import watched as watched
from opvi.types import Algorithm as Algorithm
from opvi.types import Batch as Batch
from opvi.types import DivergedError as DivergedError
from opvi.types import Tracker as Tracker

if TYPE_CHECKING:
    from opvi.adapters.arviz import to_arviz as to_arviz
    from opvi.adapters.numpyro import from_numpyro as from_numpyro
    from opvi.adapters.sklearn import OPVIClassifier as OPVIClassifier
    from opvi.adapters.sklearn import OPVIRegressor as OPVIRegressor

__version__ = version("opvi")

# What needs an optional library is imported when it is first asked for.
_LATER = {
    "OPVIClassifier": "opvi.adapters.sklearn",
    "OPVIRegressor": "opvi.adapters.sklearn",
    "from_numpyro": "opvi.adapters.numpyro",
    "to_arviz": "opvi.adapters.arviz",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'opvi' has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    # What a newcomer types; rooms that hold nothing else for them are found by their own names.
    hidden = {"Any", "TYPE_CHECKING", "import_module", "predictive", "running", "tracking", "types", "version"}
    shown = {name for name in (*globals(), *_LATER) if not name.startswith("_")}
    return sorted(shown - hidden | {"__version__"})
