"""opvi: online Bayesian inference with particles."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opvi._public import *  # noqa: F403
    from opvi.adapters.arviz import to_arviz as to_arviz
    from opvi.adapters.numpyro import from_numpyro as from_numpyro
    from opvi.adapters.sklearn import OPVIClassifier as OPVIClassifier
    from opvi.adapters.sklearn import OPVIRegressor as OPVIRegressor

__version__: str

# All names are looked up when they are first asked for, so that `opvi --help` does without JAX; these have a place of
# their own, because they need an optional library.
_LATER = {
    "OPVIClassifier": "opvi.adapters.sklearn",
    "OPVIRegressor": "opvi.adapters.sklearn",
    "from_numpyro": "opvi.adapters.numpyro",
    "to_arviz": "opvi.adapters.arviz",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("opvi")
    if not name.startswith("__"):
        place = import_module(_LATER.get(name, "opvi._public"))
        if hasattr(place, name):
            globals()[name] = getattr(place, name)
            return globals()[name]
    raise AttributeError(f"module 'opvi' has no attribute {name!r}")


def __dir__() -> list[str]:
    # What a newcomer types; rooms that hold nothing else for them are found by their own names.
    shown = {name for name in (*vars(import_module("opvi._public")), *_LATER) if not name.startswith("_")}
    return sorted(shown - {"posterior", "predictive", "running", "tracking", "types"} | {"__version__"})
