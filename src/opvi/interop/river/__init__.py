"""The recommended samplers as River models."""

try:
    import river as _river  # noqa: F401
except ImportError as error:
    raise ImportError('`opvi.interop.river` needs River: `pip install "opvi[river]"`.') from error

from opvi.interop.river.classifier import Classifier as Classifier
from opvi.interop.river.distribution import PredictiveDistribution as PredictiveDistribution
from opvi.interop.river.regressor import Regressor as Regressor
