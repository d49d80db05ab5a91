"""Rows of a NATS JetStream stream: `nats://HOST/SUBJECT`."""

import asyncio
import queue
import threading
from typing import TYPE_CHECKING, Any

from opvi.adapters._streams._messages import AT_ONCE, LOOK, SHORTEST, Gone, Message, MessageSource, Url
from opvi.adapters._tables import SourceChangedError, TableError
from opvi.running._cursor import Cursor

try:
    import nats
    import nats.errors
    import nats.js.errors
    from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
except ImportError as error:
    raise ImportError("NATS needs nats-py: `pip install 'opvi[nats]'`.") from error

if TYPE_CHECKING:
    from nats.js.client import JetStreamContext

AHEAD = 4  # fetches that may wait to be learnt; then no more is asked for
CONNECT = 3.0  # seconds for one attempt
TROUBLE = (nats.errors.Error, OSError, asyncio.TimeoutError, EOFError)


async def connected(url: Url) -> "nats.NATS":
    """Return a connection, after one attempt."""

    async def quiet(error: Exception) -> None:
        """Ignore the error here; the caller sees it when it matters."""

    creds = url.options.get("creds")
    more: dict[str, Any] = {"user_credentials": creds} if creds else {}
    attempt = nats.connect(
        f"nats://{url.split.netloc or '127.0.0.1'}",
        allow_reconnect=False,
        max_reconnect_attempts=1,
        reconnect_time_wait=SHORTEST,
        connect_timeout=CONNECT,
        error_cb=quiet,
        name="opvi",
        **more,
    )
    return await asyncio.wait_for(attempt, 2 * CONNECT)


class Nats(MessageSource):
    """Messages of a subject, starting after the cursor. The stream keeps them; nothing is acknowledged.

    Args:
        text: the address; `stream=NAME` picks the stream, `creds=FILE` names credentials.
        cursor: where to resume.
        fingerprint: identifies the stream that was learnt from.
    """

    def __init__(self, text: str, cursor: Cursor, fingerprint: str | None = None):
        url = Url.of(text, "stream", "creds")
        super().__init__(url, text, cursor)
        self._subject = url.split.path.strip("/")
        if not self._subject:
            raise TableError(f"{self.name} names no subject. Write nats://HOST/SUBJECT.")
        self._position = cursor.position
        self._stream = url.options.get("stream", "")
        self._known, self._gone = fingerprint, Gone(self.name, url.patience)
        self._queue: queue.Queue[list[Message] | BaseException | None] = queue.Queue(AHEAD)
        self._end = threading.Event()
        asyncio.run(self._look())
        self._thread = threading.Thread(target=self._run, name="opvi-nats", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the connection."""
        self._end.set()
        self._thread.join()

    def behind(self, place: tuple[int, int]) -> None:
        """Record a sequence number."""
        self._position = place[1]

    def cursor(self, row: int) -> Cursor:
        """Return the position after the last message that was learnt."""
        return Cursor(row, self._position, None)

    def fetch(self) -> list[Message] | None:
        """Return what has come."""
        try:
            found = self._queue.get(timeout=LOOK)
        except queue.Empty:
            return []
        if isinstance(found, BaseException):
            raise found
        return found

    # --- in the thread of its own -----------------------------------------------------------------

    async def _look(self) -> None:
        """Find the stream; report a wrong address at once."""
        try:
            client = await connected(self.url)
        except TROUBLE as error:
            raise TableError(f"{self.name} does not answer: {error or type(error).__name__}. Is it running?") from None
        try:
            context = client.jetstream()
            self._stream = self._stream or await context.find_stream_name_by_subject(self._subject)
            await self._recognise(context)
        except nats.js.errors.NotFoundError:
            raise TableError(
                f"{self.name}: no stream holds the subject {self._subject!r}. Make one: `nats stream add`."
            ) from None
        except TROUBLE as error:
            raise TableError(f"{self.name}: {error or type(error).__name__}. Is JetStream switched on (-js)?") from None
        finally:
            await client.close()

    async def _recognise(self, context: "JetStreamContext") -> None:
        """Refuse another stream of the same name, and one that has lost rows."""
        info = await context.stream_info(self._stream)
        self.fingerprint = f"{self._stream} of {info.created}"
        changed = self._known is not None and self._known != self.fingerprint
        if changed or info.state.last_seq < self._position:
            raise SourceChangedError(
                f"{self.name} is not the stream that was learnt from: that was {self._known}, up to message "
                f"{self._position:,}. Restore it, or begin a new run: `--run DIR`."
            )
        if self._position and info.state.first_seq > self._position + 1 and not self.notes:
            self.notes.append(
                f"{self.name} no longer holds the messages from {self._position + 1:,} to "
                f"{info.state.first_seq - 1:,}: those of the subject among them are not learnt."
            )

    def _run(self) -> None:
        try:
            asyncio.run(self._consume())
        except BaseException as error:
            self._put(error)

    def _put(self, item: list[Message] | BaseException | None) -> None:
        """Wait for room in the queue, unless the reader has gone."""
        while not self._end.is_set():
            try:
                return self._queue.put(item, timeout=LOOK)
            except queue.Full:
                continue

    async def _consume(self) -> None:
        """Follow the stream, through restarts of the broker."""
        following = self._position + 1
        while not self._end.is_set():
            try:
                client = await connected(self.url)
            except TROUBLE as error:
                await asyncio.sleep(self._gone.pause(str(error) or type(error).__name__))
                continue
            try:
                self._known = self._known or self.fingerprint
                await self._recognise(client.jetstream())
                async for messages in self._fetched(client, following):
                    await asyncio.to_thread(self._put, messages)
                    if messages is None or self._end.is_set():
                        return
                    following = messages[-1].place[1] + 1
            except TROUBLE as error:
                await asyncio.sleep(self._gone.pause(str(error) or type(error).__name__))
            finally:
                await client.close()

    async def _fetched(self, client: "nats.NATS", first: int) -> Any:
        """Yield messages from a sequence number on, as they arrive; None at the end, if there is one."""
        context = client.jetstream()
        config = ConsumerConfig(
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=first,
            ack_policy=AckPolicy.NONE,
            inactive_threshold=60.0,
        )
        consumer = await context.pull_subscribe(self._subject, stream=self._stream, config=config)
        self._gone.back()
        expected = 1
        while not self._end.is_set():
            try:
                found = await consumer.fetch(AT_ONCE, timeout=4 * LOOK)
            except TimeoutError:  # NATS' own is one, too
                if client.is_closed or not client.is_connected:
                    raise nats.errors.ConnectionClosedError from None
                info = await consumer.consumer_info()
                delivered = info.delivered.consumer_seq if info.delivered else 0
                if "until" in self.url.options and not info.num_pending and delivered < expected:
                    yield None
                continue
            messages = []
            for message in found:
                sequence = message.metadata.sequence
                if sequence.consumer != expected:  # one was lost on the way: ask again from there
                    break
                expected += 1
                messages.append(Message(str(sequence.stream), (0, sequence.stream), message.data))
            if messages:
                yield messages
            if len(messages) < len(found):
                return
