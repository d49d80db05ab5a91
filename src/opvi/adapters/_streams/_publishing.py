"""Predictions published to NATS JetStream, each with an id by which the broker recognises duplicates."""

import asyncio
import json
import threading
from collections.abc import Coroutine
from typing import Any

from opvi.adapters._streams._messages import Gone, Url, named
from opvi.adapters._streams._nats import TROUBLE, connected, nats
from opvi.adapters._tables import Json, TableError

AT_ONCE = 200  # messages on their way


class Publisher:
    """A subject for predictions; `write` returns once the broker has them.

    A message has the id `RUN NUMBER`: one published again after a kill has the same id, and the stream keeps one
    of each within its duplicate window.

    Args:
        text: `nats://HOST/SUBJECT`.
        run: the name of the run, which stays the same when it resumes.
    """

    def __init__(self, text: str, run: str):
        self._url = Url.of(text, "stream", "creds")
        self.name, self.run, self.position = named(text), run, 0
        self._subject = self._url.split.path.strip("/")
        if not self._subject:
            raise TableError(f"{self.name} names no subject. Write nats://HOST/SUBJECT.")
        self._gone = Gone(self.name, self._url.patience)
        self._client: nats.NATS | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="opvi-publisher", daemon=True)
        self._thread.start()
        try:
            self._wait(self._look())
        except BaseException:
            self.close()
            raise

    def _wait(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for work in the thread; a signal ends the wait."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            future.result()
        except BaseException:
            future.cancel()
            raise

    async def _look(self) -> None:
        try:
            self._client = await connected(self._url)
            await self._client.jetstream().find_stream_name_by_subject(self._subject)
        except nats.js.errors.NotFoundError:
            raise TableError(
                f"{self.name}: no stream takes the subject {self._subject!r}, so predictions would be lost. Make one: "
                "`nats stream add`."
            ) from None
        except TROUBLE as error:
            raise TableError(f"{self.name} does not answer: {error or type(error).__name__}. Is it running?") from None

    def write(self, told: list[Json]) -> None:
        """Publish predictions in order."""
        for start in range(0, len(told), AT_ONCE):
            self._wait(self._publish(told[start : start + AT_ONCE]))

    async def _publish(self, told: list[Json]) -> None:
        while True:
            try:
                if self._client is None or not self._client.is_connected:
                    self._client = await connected(self._url)
                context = self._client.jetstream()
                sent = []
                for number, row in enumerate(told, self.position):
                    headers = {"Nats-Msg-Id": f"{self.run} {number}"}
                    sent.append(context.publish(self._subject, json.dumps(row).encode(), headers=headers))
                await asyncio.gather(*sent)
                self._gone.back()
                self.position += len(told)
                return
            except TROUBLE as error:
                if self._client is not None:
                    await self._client.close()
                    self._client = None
                await asyncio.sleep(self._gone.pause(str(error) or type(error).__name__))

    def back(self, position: int) -> None:
        """Count from an earlier position again: what was published after it is published again under the same ids."""
        self.position = position

    def end(self) -> None:
        """Do nothing: every message is there."""

    def settle(self) -> None:
        """Do nothing: the broker already has what `write` took."""

    def close(self) -> None:
        """End the connection."""
        if self._client is not None:
            self._wait(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
