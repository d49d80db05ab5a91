"""Checks of a model: scores of rows left out, calibration, and comparisons of models."""

from opvi.checks._loo import ELPD as ELPD
from opvi.checks._loo import loo as loo
from opvi.checks._loo import waic as waic
from opvi.checks._models import ModelComparison as ModelComparison
from opvi.checks._models import compare_models as compare_models
from opvi.checks._predictions import calibration as calibration
