"""Millions of independent streams, one small model each, advanced by one compiled program."""

from opvi.scale.fleet._fleet import Fleet as Fleet
from opvi.scale.fleet._fleet import Learnt as Learnt
from opvi.scale.fleet._keyed import Keyed as Keyed
from opvi.scale.fleet._keyed import Rounds as Rounds
from opvi.scale.fleet._pool import Population as Population
from opvi.scale.fleet._pool import pooled as pooled
