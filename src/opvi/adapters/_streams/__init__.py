"""Rows from brokers and databases: NATS JetStream, Kafka, SQLite, PostgreSQL."""

from typing import TYPE_CHECKING

from opvi.adapters._streams._messages import MessageSource as MessageSource
from opvi.adapters._streams._messages import named as named
from opvi.adapters._tables import TableError
from opvi.running._cursor import Cursor

if TYPE_CHECKING:
    from opvi.adapters._streams._publishing import Publisher

SCHEMES = ("nats", "kafka", "sqlite", "postgresql")


def is_stream(path: str) -> bool:
    """Whether this is the address of a broker or a database, and not a file."""
    scheme, mark, _ = path.partition("://")
    return bool(mark) and scheme.isalpha()


def open_stream(url: str, cursor: Cursor | None = None, fingerprint: str | None = None) -> MessageSource:
    """Open the rows of a broker or a database.

    Args:
        url: `nats://HOST/SUBJECT`, `kafka://HOST:PORT/TOPIC`, `sqlite:///FILE?table=T&key=K` or
            `postgresql://HOST/DB?table=T&key=K`. `until=now` stops at what is there now, `columns=A,B` reads messages
            as lines of CSV, `patience=SECONDS` says how long the broker may be gone.
        cursor: where to resume; the beginning if omitted.
        fingerprint: identifies the source that was learnt from.
    """
    scheme = url.partition("://")[0]
    place = cursor or Cursor()
    try:
        if scheme == "nats":
            from opvi.adapters._streams._nats import Nats

            return Nats(url, place, fingerprint)
        if scheme == "kafka":
            from opvi.adapters._streams._kafka import Kafka

            return Kafka(url, place, fingerprint)
        if scheme == "sqlite":
            from opvi.adapters._streams._sql import Sqlite

            return Sqlite(url, place, fingerprint)
        if scheme == "postgresql":
            from opvi.adapters._streams._sql import postgresql

            return postgresql(url, place, fingerprint)
    except ImportError as error:
        raise TableError(str(error)) from None
    raise TableError(f"{named(url)}: {scheme}:// is not known. Known schemes: {', '.join(f'{s}://' for s in SCHEMES)}.")


def open_publisher(url: str, run: str) -> "Publisher":
    """Open a subject of NATS that takes messages; `run` is part of their ids."""
    if not url.startswith("nats://"):
        raise TableError(f"{named(url)}: predictions are published to nats://HOST/SUBJECT.")
    try:
        from opvi.adapters._streams._publishing import Publisher
    except ImportError as error:
        raise TableError(str(error)) from None
    return Publisher(url, run)
