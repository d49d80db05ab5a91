"""Samplers, each a pair of pure functions `init` and `step`."""

from opvi.algorithms.acceleration import Acceleration as Acceleration
from opvi.algorithms.acceleration import wag as wag
from opvi.algorithms.acceleration import wnes as wnes
from opvi.algorithms.common import StepInfo as StepInfo
from opvi.algorithms.gauss_newton import AdaptiveNoise as AdaptiveNoise
from opvi.algorithms.gauss_newton import GaussNewtonState as GaussNewtonState
from opvi.algorithms.gauss_newton import gauss_newton as gauss_newton
from opvi.algorithms.kfac import KFACState as KFACState
from opvi.algorithms.kfac import kfac as kfac
from opvi.algorithms.langevin import LangevinState as LangevinState
from opvi.algorithms.langevin import langevin as langevin
from opvi.algorithms.online_map import MAPState as MAPState
from opvi.algorithms.online_map import ball as ball
from opvi.algorithms.online_map import box as box
from opvi.algorithms.online_map import online_map as online_map
from opvi.algorithms.parvi import ParVIInfo as ParVIInfo
from opvi.algorithms.parvi import ParVIState as ParVIState
from opvi.algorithms.parvi import blob as blob
from opvi.algorithms.parvi import gfsd as gfsd
from opvi.algorithms.parvi import gfsf as gfsf
from opvi.algorithms.parvi import opvi as opvi
from opvi.algorithms.parvi import parvi as parvi
from opvi.algorithms.parvi import svgd as svgd
