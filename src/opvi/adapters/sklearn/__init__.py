"""scikit-learn estimators on the recommended samplers."""

try:
    import sklearn as _sklearn  # noqa: F401
except ImportError as error:
    raise ImportError(
        '`opvi.OPVIRegressor` and `opvi.OPVIClassifier` need scikit-learn: `pip install "opvi[sklearn]"`.'
    ) from error

from opvi.adapters.sklearn._classifier import OPVIClassifier as OPVIClassifier
from opvi.adapters.sklearn._regressor import OPVIRegressor as OPVIRegressor
