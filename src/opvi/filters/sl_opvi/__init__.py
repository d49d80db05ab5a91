"""Several modes in bounded memory: the posterior of a few parameters, with a polynomial in the place of the past."""

from opvi.filters.sl_opvi._reports import Diagnosis as Diagnosis
from opvi.filters.sl_opvi._sl_opvi import SLOPVI as SLOPVI
from opvi.filters.sl_opvi._sl_opvi import SLOPVIState as SLOPVIState
from opvi.filters.sl_opvi._sl_opvi import sl_opvi as sl_opvi
from opvi.filters.sl_opvi._stein_flow import Pace as Pace
