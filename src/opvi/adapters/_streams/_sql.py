"""Rows of a table in a database, by a key that grows: `sqlite:///FILE?table=T&key=K`, `postgresql://…/DB?table=T&key=K`."""

import contextlib
import sqlite3
import time
from typing import Any
from urllib.parse import quote, unquote

from opvi.adapters._streams._messages import AT_ONCE, LOOK, Gone, Message, MessageSource, Url
from opvi.adapters._tables import TableError
from opvi.adapters._tables._messages import Number
from opvi.running._cursor import Cursor


class Sql(MessageSource):
    """Rows whose key is above the last one learnt, in order of the key; the table is polled.

    Args:
        text: the address.
        cursor: where to resume; its position is the key.
        fingerprint: not used.
    """

    def __init__(self, text: str, cursor: Cursor, fingerprint: str | None = None):
        url = Url.of(text, "table", "key", "sslmode")
        super().__init__(url, text, cursor)
        self._table, self._key = (url.options.get(name, "") for name in ("table", "key"))
        if not self._table or not self._key or "\0" in self._table + self._key:
            raise TableError(f"{self.name}: name the table and its growing key: ?table=TABLE&key=COLUMN.")
        self._above = self._learnt = cursor.position if cursor.row else -(2**63)
        self._gone = Gone(self.name, url.patience)
        self._until = "until" in url.options
        self._connection = self._connect()
        try:
            self._some()  # what is wrong with the table is said at once
        except BaseException:
            self._connection.close()
            raise

    def _connect(self) -> Any:
        raise NotImplementedError

    mark = "?"
    errors: tuple[type[Exception], ...] = ()
    mistakes: tuple[type[Exception], ...] = ()

    def close(self) -> None:
        """End the connection."""
        self._connection.close()

    def behind(self, place: tuple[int, int]) -> None:
        """Record a key."""
        self._learnt = place[1]

    def cursor(self, row: int) -> Cursor:
        """Return the position after the last row that was learnt."""
        return Cursor(row, self._learnt, None)

    def _some(self) -> tuple[list[str], list[tuple[Any, ...]]]:
        table = ".".join(_quoted(part) for part in self._table.split("."))
        query = (
            f"SELECT * FROM {table} WHERE {_quoted(self._key)} > {self.mark} ORDER BY {_quoted(self._key)} "
            f"LIMIT {AT_ONCE}"
        )
        found = self._connection.cursor()
        found.execute(query, (self._above,))
        names = [column[0] for column in found.description]
        return names, found.fetchall()

    def fetch(self) -> list[Message] | None:
        """Return the next rows."""
        try:
            names, rows = self._some()
        except self.mistakes as error:
            raise TableError(f"{self.name}: {str(error).strip()}.") from None
        except self.errors as error:
            pause = self._gone.pause(str(error).strip() or type(error).__name__)
            time.sleep(pause)
            with contextlib.suppress(*self.errors):
                self._connection.close()
                self._connection = self._connect()
            return []
        self._gone.back()
        at = next((place for place, name in enumerate(names) if name.lower() == self._key.lower()), None)
        if not rows:
            if self._until:
                return None
            time.sleep(LOOK)
            return []
        messages = []
        for row in rows:
            key = row[at] if at is not None else None
            if not isinstance(key, int):
                raise TableError(f"{self.name}: the key is {str(key)[:60]!r}, but whole numbers are needed.")
            values = {name: _plain(value) for name, value in zip(names, row, strict=True) if name != names[at or 0]}
            messages.append(Message(str(key), (0, key), values))
        self._above = messages[-1].place[1]
        return messages


class Sqlite(Sql):
    """A table of an SQLite file."""

    mark = "?"
    errors = (sqlite3.OperationalError,)
    mistakes = (sqlite3.ProgrammingError,)

    def _connect(self) -> Any:
        path = unquote(self.url.split.path)[1:] or self.url.split.netloc
        try:
            connection = sqlite3.connect(f"file:{quote(path)}?mode=ro", uri=True, timeout=LOOK, isolation_level=None)
        except sqlite3.Error as error:
            raise TableError(f"{self.name} cannot be opened: {error}. Give a file that exists.") from None
        return connection

    def _some(self) -> tuple[list[str], list[tuple[Any, ...]]]:
        try:
            return super()._some()
        except sqlite3.OperationalError as error:
            if "no such" in str(error):
                raise TableError(f"{self.name}: {error}.") from None
            raise


def postgresql(text: str, cursor: Cursor, fingerprint: str | None = None) -> Sql:
    """Return a table of a PostgreSQL database."""
    try:
        import psycopg
    except ImportError as error:
        raise ImportError("PostgreSQL needs psycopg: `pip install 'opvi[postgresql]'`.") from error

    class Postgresql(Sql):
        mark = "%s"
        errors = (psycopg.OperationalError, psycopg.InterfaceError)
        mistakes = (psycopg.ProgrammingError, psycopg.DataError)

        def _connect(self) -> Any:
            mode = self.url.options.get("sslmode")
            address = self.url.split._replace(query=f"sslmode={mode}" if mode else "").geturl()
            try:
                return psycopg.connect(address, autocommit=True, connect_timeout=5)
            except psycopg.OperationalError as error:
                if self._row == self._next == 0 or not hasattr(self, "_connection"):
                    raise TableError(f"{self.name} does not answer: {str(error).strip()}") from None
                raise

        def _some(self) -> tuple[list[str], list[tuple[Any, ...]]]:
            try:
                return super()._some()
            except psycopg.ProgrammingError as error:
                raise TableError(f"{self.name}: {str(error).strip().splitlines()[0]}.") from None

    return Postgresql(text, cursor, fingerprint)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _plain(value: Any) -> object:
    """Return a database value as it would appear in a JSON row."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int | float):
        return None if value != value else Number(repr(value))
    if isinstance(value, bytes):
        return [value.hex()[:60]]  # no value of a table: the row is rejected
    return str(value)  # decimals, dates, times
