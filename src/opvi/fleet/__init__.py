"""Thousands of independent streams, one small model each, advanced by one compiled program."""

from opvi.fleet.fleet import Fleet as Fleet
from opvi.fleet.fleet import Learnt as Learnt
