"""Serves the page live, to browsers on this computer only."""

import errno
import re
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any

LOOPBACK = "127.0.0.1"
# Only names of this computer: a foreign site whose name was made to point here must not read the page.
OWN_NAMES = re.compile(r"(127\.0\.0\.1|localhost)(:\d{1,5})?", re.ASCII | re.IGNORECASE)
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
PATIENCE = 10.0  # seconds for a browser to ask and to read
MOST_CONNECTIONS = 32  # at once; more are closed unheard
REST = 4  # times as long as a page took to make, the next one is not made: learning needs the time


class Server(ThreadingTCPServer):
    """A running server: `url` to open, `close()` to end it."""

    daemon_threads = True
    allow_reuse_address = True  # a port that was just given up can be used again at once
    request_queue_size = 128  # connections that wait to be accepted: one that is dropped tries again only after seconds

    def __init__(self, port: int, handler: type[BaseHTTPRequestHandler]):
        super().__init__((LOOPBACK, port), handler)
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self.making, self.closed = threading.Lock(), False
        self.port: int = self.server_address[1]
        self.url = f"http://{LOOPBACK}:{self.port}/"
        self._thread = threading.Thread(target=self.serve_forever, args=(0.1,), name="opvi-report", daemon=True)
        self._thread.start()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, up to a few at a time: the learner needs file handles too."""
        if self._free.acquire(blocking=False):
            try:
                super().process_request(request, client_address)
            except BaseException:  # e.g. no more threads
                self._free.release()
                self.shutdown_request(request)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, then free the slot."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def close(self) -> None:
        """Stop answering and free the port; a second call does nothing."""
        if self._thread.is_alive():
            self.shutdown()
            with self.making:  # a page in the making uses JAX, which must not be torn down meanwhile
                self.closed = True
            self._thread.join()
        self.server_close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def handle_error(self, *_: object) -> None:
        """Ignore browsers that hang up."""


def serve(make_page: Callable[[], str], port: int = 0) -> Server:
    """Serve the page at `http://127.0.0.1:PORT/`, from a thread of its own, until `close()`.

    Only this page is served, and only to this computer; if making it fails, the error is shown instead.

    Args:
        make_page: makes the page; called in the server's threads, one call at a time, so it must not change what the
            learner uses.
        port: the port; 0 takes any free one.
    """
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
        raise ValueError(f"`port` is {port!r}, but must be a whole number from 0 (any that is free) to 65535.")
    try:
        return Server(port, _handler(make_page))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            why = "another program listens there"
        elif error.errno == errno.EACCES:
            why = "this user may not listen there"
        else:
            why = f"listening there failed ({error.strerror})"
        message = f"`port` is {port}, but {why}. Give another one, or 0 for any that is free."
        raise OSError(error.errno, message) from None


def _handler(make_page: Callable[[], str]) -> type[BaseHTTPRequestHandler]:
    last = b"", 0.0, 0.0  # the page, when it was made, and how long that took

    class Handler(BaseHTTPRequestHandler):
        timeout = PATIENCE
        server: Server

        def do_GET(self) -> None:
            nonlocal last
            hosts = self.headers.get_all("Host", [])
            if len(hosts) != 1 or not OWN_NAMES.fullmatch(hosts[0].strip()):
                return self.answer(421, "This server answers to http://127.0.0.1 and http://localhost only.")
            if self.path != "/":
                return self.answer(404, "There is nothing here but the page at /.")
            try:
                asked = time.monotonic()
                with self.server.making:
                    if self.server.closed:
                        return self.answer(503, "The run has ended.")
                    made, when, cost = last
                    if when < asked and time.monotonic() > when + REST * cost:
                        began = time.monotonic()
                        made = make_page().encode()
                        when = time.monotonic()
                        last = made, when, when - began
            except Exception as error:  # whatever it is, the learner continues
                words = f"The page could not be made; learning continues.\n\n{type(error).__name__}: {error}"
                return self.answer(500, words)
            self.answer(200, made, "text/html; charset=utf-8")

        def do_HEAD(self) -> None:
            self.do_GET()

        def answer(self, code: int, body: str | bytes, kind: str = "text/plain; charset=utf-8") -> None:
            """Send an answer; plain text unless it is the page."""
            sent = body if isinstance(body, bytes) else body.encode(errors="replace")
            self.send_response(code)
            for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(sent))}.items():
                self.send_header(name, value)
            if code == 405:
                self.send_header("Allow", "GET, HEAD")
            self.send_header("Connection", "close")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(sent)

        def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
            """Answer what the library itself refuses: an unsupported method, or a line that is not HTTP."""
            self.close_connection = True
            code = 405 if code == 501 else code
            self.answer(
                code, "Only GET and HEAD are answered." if code == 405 else "This is not a request for the page."
            )

        def version_string(self) -> str:
            return "opvi"

        def log_message(self, *_: object) -> None:
            """Log nothing: the learner's table is on the screen."""

    return Handler
