"""Draws from a posterior: named and summarised, and weighted so that a row is left out."""

from opvi.posterior._effective import effective_numbers as effective_numbers
from opvi.posterior._pareto import Smoothed as Smoothed
from opvi.posterior._pareto import pareto_k as pareto_k
from opvi.posterior._pareto import smooth_weights as smooth_weights
from opvi.posterior._posterior import Posterior as Posterior
from opvi.posterior._posterior import Summary as Summary
from opvi.posterior._transforms import Calibration as Calibration
from opvi.posterior._transforms import calibration_of as calibration_of
from opvi.posterior._transforms import concerns_of_predictions as concerns_of_predictions
from opvi.posterior._transforms import unevenness as unevenness
