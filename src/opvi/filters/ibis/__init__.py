"""The posterior of all rows: iterated batch importance sampling over stored rows."""

from opvi.filters.ibis._ibis import IBIS as IBIS
from opvi.filters.ibis._ibis import IBISState as IBISState
from opvi.filters.ibis._ibis import ibis as ibis
from opvi.filters.ibis._reports import Diagnosis as Diagnosis
