"""Rows from files and pipes, read in bounded memory and turned into numbers by a schema."""

try:
    import pyarrow as _pyarrow  # noqa: F401
except ImportError as error:
    raise ImportError("tables need pyarrow: `pip install 'opvi[cli]'`.") from error

from opvi.adapters._tables._block import Block as Block
from opvi.adapters._tables._block import Json as Json
from opvi.adapters._tables._block import Rejected as Rejected
from opvi.adapters._tables._block import SourceChangedError as SourceChangedError
from opvi.adapters._tables._block import TableError as TableError
from opvi.adapters._tables._block import cut as cut
from opvi.adapters._tables._first import Reading as Reading
from opvi.adapters._tables._infer import FIRST_ROWS as FIRST_ROWS
from opvi.adapters._tables._infer import infer_schema as infer_schema
from opvi.adapters._tables._schema import COUNT_BEND as COUNT_BEND
from opvi.adapters._tables._schema import COUNT_SHIFT as COUNT_SHIFT
from opvi.adapters._tables._schema import Encoded as Encoded
from opvi.adapters._tables._schema import Schema as Schema
from opvi.adapters._tables._schema import hashed_place as hashed_place
from opvi.adapters._tables._source import RowSource as RowSource
from opvi.adapters._tables._source import Source as Source
from opvi.adapters._tables._source import open_source as open_source
