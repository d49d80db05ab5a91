"""The recommended samplers: scaling, curvature, a bank of trackers and a calibrated predictive, put together."""

from opvi.flows import first_order as first_order
from opvi.tracking import experts as experts
from opvi.tracking._bank import bank as bank
from opvi.tracking._calibrated import calibrated as calibrated
from opvi.tracking._classifier import classifier as classifier
from opvi.tracking._drift import watched as watched
from opvi.tracking._recommended import regressor as regressor
from opvi.tracking._remembering import remembering as remembering
from opvi.tracking._remembering import replay as replay
from opvi.tracking._reservoir import kept_rows as kept_rows
from opvi.tracking._tracker import tracker as tracker
from opvi.tracking._wrapped import Wrapped as Wrapped
from opvi.tracking._wrapped import WrappedInfo as WrappedInfo
