"""The recommended samplers as River models."""

try:
    import river as _river  # noqa: F401
except ImportError as error:
    raise ImportError('`opvi.adapters.river` needs River: `pip install "opvi[river]"`.') from error

from opvi.adapters.river._classifier import Classifier as Classifier
from opvi.adapters.river._distribution import PredictiveDistribution as PredictiveDistribution
from opvi.adapters.river._regressor import Regressor as Regressor
