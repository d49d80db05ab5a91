"""Rows from files and pipes, read in bounded memory and turned into numbers by a schema."""

try:
    import pyarrow as _pyarrow  # noqa: F401
except ImportError as error:
    raise ImportError("`opvi.app.tables` needs pyarrow: `pip install 'opvi[cli]'`.") from error

from opvi.app.tables._block import Block as Block
from opvi.app.tables._block import Json as Json
from opvi.app.tables._block import Rejected as Rejected
from opvi.app.tables._block import TableError as TableError
from opvi.app.tables._block import cut as cut
from opvi.app.tables._first import Reading as Reading
from opvi.app.tables._infer import FIRST_ROWS as FIRST_ROWS
from opvi.app.tables._infer import infer_schema as infer_schema
from opvi.app.tables._schema import Encoded as Encoded
from opvi.app.tables._schema import Schema as Schema
from opvi.app.tables._source import Source as Source
from opvi.app.tables._source import open_source as open_source
