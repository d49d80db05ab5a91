"""Rows of a Kafka topic: `kafka://HOST:PORT/TOPIC`."""

import json
import time
from typing import Any

from opvi.adapters._streams._messages import AT_ONCE, LOOK, Gone, Message, MessageSource, Url
from opvi.adapters._tables import SourceChangedError, TableError
from opvi.running._cursor import Cursor

try:
    from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
except ImportError as error:
    raise ImportError("Kafka needs confluent-kafka: `pip install 'opvi[kafka]'`.") from error

CONNECT = 5.0  # seconds to find the topic
ENDED = KafkaError._PARTITION_EOF


class Kafka(MessageSource):
    """Messages of all partitions of a topic, each read from its checkpointed offset; no offsets are committed.

    Within a partition rows keep their order; partitions are joined as they come.

    Args:
        text: the address; other options are librdkafka's own, with `_` for `.`.
        cursor: where to resume; its digest holds the offsets.
        fingerprint: not used.
    """

    def __init__(self, text: str, cursor: Cursor, fingerprint: str | None = None):
        own = ("security_protocol", "sasl_mechanism", "sasl_username", "sasl_password", "ssl_ca_location")
        url = Url.of(text, *own)
        super().__init__(url, text, cursor)
        self._topic = url.split.path.strip("/")
        if not self._topic or not url.split.netloc:
            raise TableError(f"{self.name} names no topic. Write kafka://HOST:PORT/TOPIC.")
        self._gone = Gone(self.name, url.patience)
        self._trouble = ""
        try:
            offsets = {int(number): int(offset) for number, offset in json.loads(cursor.digest or "{}").items()}
        except (ValueError, AttributeError):
            raise SourceChangedError(f"{self.name}: the checkpoint holds no offsets of a topic.") from None
        options = {name.replace("_", "."): value for name, value in url.options.items() if name in own}
        self._consumer = Consumer(
            {
                "bootstrap.servers": url.split.netloc.rpartition("@")[2],
                "group.id": "opvi",  # it must have a name, and is never used
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
                "enable.partition.eof": True,
                "queued.max.messages.kbytes": 65536,
                "error_cb": self._told,
                "logger": _Quiet(),
                **options,
            }
        )
        try:
            self._offsets = self._begin(offsets)
        except BaseException:
            self._consumer.close()
            raise
        self._asleep = 0.0

    def _begin(self, offsets: dict[int, int]) -> dict[int, int]:
        """Find the partitions, and where each begins or resumes."""
        try:
            topic = self._consumer.list_topics(self._topic, timeout=CONNECT).topics[self._topic]
            if topic.error is not None:
                raise TableError(f"{self.name}: {topic.error.str()}. Create the topic, or fix the address.")
            for number in topic.partitions:
                low, high = self._consumer.get_watermark_offsets(TopicPartition(self._topic, number), timeout=CONNECT)
                if not low <= offsets.setdefault(number, low) <= high:
                    raise SourceChangedError(
                        f"{self.name}: partition {number} holds the offsets {low:,} to {high:,}, but the next one to "
                        f"learn is {offsets[number]:,}. Restore the messages, or begin a new run: `--run DIR`."
                    )
        except KafkaException as error:
            raise TableError(f"{self.name} does not answer: {error.args[0].str()}. Is it running?") from None
        self._consumer.assign([TopicPartition(self._topic, number, offset) for number, offset in offsets.items()])
        self._left = set(offsets)  # partitions that have not come to their end
        return offsets

    def close(self) -> None:
        """End the connection."""
        self._consumer.close()

    def behind(self, place: tuple[int, int]) -> None:
        """Record the offset reached in a partition."""
        self._offsets[place[0]] = place[1] + 1

    def cursor(self, row: int) -> Cursor:
        """Return the position after the last messages that were learnt."""
        return Cursor(row, sum(self._offsets.values()), json.dumps(self._offsets))

    def _told(self, error: KafkaError) -> None:
        """Handle librdkafka's events; it reconnects to brokers by itself."""
        if error.code() == KafkaError._ALL_BROKERS_DOWN:
            self._trouble = error.str()

    def fetch(self) -> list[Message] | None:
        """Return the messages that have arrived."""
        messages = []
        for found in self._consumer.consume(AT_ONCE, LOOK):
            self._trouble = ""
            error = found.error()
            if error is None:
                place = int(found.partition() or 0), int(found.offset() or 0)
                messages.append(Message(f"{place[0]}:{place[1]}", place, found.value() or b""))
            elif error.code() == ENDED:
                self._left.discard(found.partition())
            elif error.fatal() or error.code() == KafkaError._AUTO_OFFSET_RESET:
                raise SourceChangedError(f"{self.name}: {error.str()}. Messages that were not learnt are gone.")
        if self._trouble and time.monotonic() > self._asleep:
            self._asleep = time.monotonic() + self._gone.pause(self._trouble)
        elif not self._trouble:
            self._gone.back()
        return None if not messages and not self._left and "until" in self.url.options else messages


class _Quiet:
    """A silent log: errors that matter are reported elsewhere."""

    def log(self, *words: Any) -> None:
        """Say nothing."""
