"""A run as one self-contained HTML page; `_server` shows it live on this computer."""

from typing import TYPE_CHECKING, Any

from opvi.app.report._contents import Coefficient as Coefficient
from opvi.app.report._contents import ColumnTold as ColumnTold
from opvi.app.report._contents import Contents as Contents
from opvi.app.report._contents import Effect as Effect
from opvi.app.report._contents import Histogram as Histogram
from opvi.app.report._contents import Projection as Projection
from opvi.app.report._contents import Stretch as Stretch
from opvi.app.report._effects import effects as effects
from opvi.app.report._particles import projection as projection

if TYPE_CHECKING:
    from opvi.app.report._page import page as page


def __getattr__(name: str) -> Any:
    """Load `page` at its first use: only reports need their templates."""
    if name == "page":
        from opvi.app.report._page import page

        return page
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
