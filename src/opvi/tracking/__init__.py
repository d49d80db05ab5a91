"""The recommended samplers: scaling, curvature, a bank of trackers and a calibrated predictive, put together."""

from opvi.tracking.calibrated import calibrated as calibrated
from opvi.tracking.classifier import classifier as classifier
from opvi.tracking.drift import watched as watched
from opvi.tracking.front import first_order as first_order
from opvi.tracking.front import tracker as tracker
from opvi.tracking.regressor import regressor as regressor
