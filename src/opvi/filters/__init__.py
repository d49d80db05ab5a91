"""Second-order samplers: particles that remember the past as curvature."""

from opvi.filters._covariance import Covariance as Covariance
from opvi.filters._gain_one import GainOne as GainOne
from opvi.filters._gain_one import GainOneState as GainOneState
from opvi.filters._gain_one import gain_one as gain_one
from opvi.filters._gauss_newton import AdaptiveNoise as AdaptiveNoise
from opvi.filters._gauss_newton import GaussNewton as GaussNewton
from opvi.filters._gauss_newton import GaussNewtonState as GaussNewtonState
from opvi.filters._gauss_newton import gauss_newton as gauss_newton
from opvi.filters._kalman import Absorbed as Absorbed
from opvi.filters._kalman import Gain as Gain
from opvi.filters._kalman import absorb as absorb
from opvi.filters._kalman import gain as gain
from opvi.filters._kalman import move_by_residuals as move_by_residuals
from opvi.filters._kalman import move_by_score as move_by_score
from opvi.filters._kalman import times as times
from opvi.filters._kfac import KFAC as KFAC
from opvi.filters._kfac import KFACState as KFACState
from opvi.filters._kfac import kfac as kfac
from opvi.filters._linear_ekf import LinearEKF as LinearEKF
from opvi.filters._linear_ekf import LinearState as LinearState
from opvi.filters._linear_ekf import linear_ekf as linear_ekf
from opvi.filters._merging import merge as merge
from opvi.filters._sl_opvi import SLOPVI as SLOPVI
from opvi.filters._sl_opvi import LinearisedState as LinearisedState
from opvi.filters._sl_opvi import sl_opvi as sl_opvi
from opvi.filters._whitening import Pace as Pace
