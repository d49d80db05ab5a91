"""First-order samplers: particles that flow along a field, including the paper's OPVI."""

from opvi.flows import fields as fields
from opvi.flows import kernels as kernels
from opvi.flows import schedules as schedules
from opvi.flows._acceleration import Acceleration as Acceleration
from opvi.flows._acceleration import wag as wag
from opvi.flows._acceleration import wnes as wnes
from opvi.flows._langevin import Langevin as Langevin
from opvi.flows._langevin import LangevinState as LangevinState
from opvi.flows._langevin import langevin as langevin
from opvi.flows._online_map import MAPState as MAPState
from opvi.flows._online_map import OnlineMAP as OnlineMAP
from opvi.flows._online_map import ball as ball
from opvi.flows._online_map import box as box
from opvi.flows._online_map import online_map as online_map
from opvi.flows._optimizer import Optimizer as Optimizer
from opvi.flows._optimizer import optimizer as optimizer
from opvi.flows._parvi import ParVI as ParVI
from opvi.flows._parvi import ParVIInfo as ParVIInfo
from opvi.flows._parvi import ParVIState as ParVIState
from opvi.flows._parvi import blob as blob
from opvi.flows._parvi import first_order as first_order
from opvi.flows._parvi import gfsd as gfsd
from opvi.flows._parvi import gfsf as gfsf
from opvi.flows._parvi import opvi as opvi
from opvi.flows._parvi import parvi as parvi
from opvi.flows._parvi import svgd as svgd
