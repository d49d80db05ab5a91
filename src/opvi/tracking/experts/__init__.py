"""Experts: ways to predict a stream, which a stack weighs by how they have done."""

from opvi.tracking.experts._expert import BaseExpert as BaseExpert
from opvi.tracking.experts._expert import Belief as Belief
from opvi.tracking.experts._expert import Context as Context
from opvi.tracking.experts._expert import Expert as Expert
from opvi.tracking.experts._expert import Rows as Rows
from opvi.tracking.experts._expert import Units as Units
from opvi.tracking.experts._sampled import sampled as sampled
from opvi.tracking.experts._usual import usual as usual
