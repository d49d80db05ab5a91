"""Rows from files and pipes, read in bounded memory, and as numbers by a schema settled on the first of them."""

try:
    import pyarrow as _pyarrow  # noqa: F401
except ImportError as error:
    raise ImportError("`opvi.tables` needs pyarrow: `pip install 'opvi[cli]'`.") from error

from opvi.tables.block import Block as Block
from opvi.tables.block import Rejected as Rejected
from opvi.tables.block import TableError as TableError
from opvi.tables.schema import Encoded as Encoded
from opvi.tables.schema import Schema as Schema
from opvi.tables.settle import FIRST_ROWS as FIRST_ROWS
from opvi.tables.settle import settle as settle
from opvi.tables.source import Source as Source
from opvi.tables.source import open_source as open_source
