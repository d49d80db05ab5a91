"""A run as one self-contained HTML page, and the same page live on this computer."""

from opvi.report.contents import Coefficient as Coefficient
from opvi.report.contents import Contents as Contents
from opvi.report.contents import Effect as Effect
from opvi.report.contents import Histogram as Histogram
from opvi.report.contents import Projection as Projection
from opvi.report.contents import Stretch as Stretch
from opvi.report.effects import effects as effects
from opvi.report.page import page as page
from opvi.report.particles import projection as projection
from opvi.report.server import serve as serve
