"""Rows from files and pipes, read in bounded memory, and as numbers by a schema settled on the first of them."""

try:
    import pyarrow as _pyarrow  # noqa: F401
except ImportError as error:
    raise ImportError("`opvi.app.tables` needs pyarrow: `pip install 'opvi[cli]'`.") from error

from opvi.app.tables._block import Block as Block
from opvi.app.tables._block import Rejected as Rejected
from opvi.app.tables._block import TableError as TableError
from opvi.app.tables._schema import Encoded as Encoded
from opvi.app.tables._schema import Schema as Schema
from opvi.app.tables._settle import FIRST_ROWS as FIRST_ROWS
from opvi.app.tables._settle import settle as settle
from opvi.app.tables._source import Source as Source
from opvi.app.tables._source import open_source as open_source
