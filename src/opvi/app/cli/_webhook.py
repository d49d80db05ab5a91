"""Alarms sent to a URL: one POST with JSON for each, in the background, so learning never waits."""

import json
import queue
import sys
import threading
import urllib.error
import urllib.request
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from opvi.app.learn import Learner

SECONDS = 10.0  # to wait for an answer, and at the end for what is still to be sent
MOST_WAITING = 100  # alarms; more are dropped, and counted


class Webhook:
    """Use as `with Webhook(url, name) as hook:` and call `hook.show(learner)` every few batches."""

    def __init__(self, url: str, run: str, sent: int):
        self.url, self.run = url, run
        self.sent = sent  # alarms that were told of
        self.failed = 0
        self._waiting: queue.Queue[bytes | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._send, daemon=True, name="opvi-webhook")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def show(self, learner: "Learner") -> None:
        """Send the new alarms."""
        told = learner.summary()
        fresh, self.sent = told.alarm_count - self.sent, told.alarm_count
        for row in told.alarms[-fresh:] if fresh else []:
            about = {"run": self.run, "event": "drift", "row": row, "target": learner.schema.target}
            try:
                self._waiting.put_nowait(json.dumps(about).encode())
            except queue.Full:
                self.failed += 1

    def _send(self) -> None:
        while (body := self._waiting.get()) is not None:
            headers = {"Content-Type": "application/json", "User-Agent": "opvi"}
            try:
                asked = urllib.request.Request(self.url, body, headers, method="POST")
                urllib.request.urlopen(asked, timeout=SECONDS).close()
            except (OSError, ValueError, urllib.error.URLError) as error:
                self.failed += 1
                if self.failed == 1:
                    print(f"An alarm could not be sent to {self.url}: {error}. Learning continues.", file=sys.stderr)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._waiting.put(None, timeout=SECONDS)
            self._thread.join(SECONDS)
        except queue.Full:
            pass
        if self.failed:
            print(f"Alarms that could not be sent to {self.url}: {self.failed:,}.", file=sys.stderr)
