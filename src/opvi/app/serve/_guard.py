"""Who may send requests, and how large: host names, the token, bounded bodies, slow clients."""

import asyncio
import base64
import binascii
import hmac
import time
from collections.abc import Callable, Collection
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from opvi.app.serve._worker import Answer, refused

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
ANY = "*"
PATIENCE = 20.0  # seconds for a client to send its header, and again its body
HEAD = 1 << 16  # bytes of a header
COMING = 1 << 28  # bytes of all bodies that are not whole yet
CONNECTIONS = 2_000  # at once; more are closed unheard
WHOLE = "opvi.whole"  # in the scope of a request whose body is here
OPEN = ("/v2/health/live", "/v2/health/ready")  # without a token: load balancers have none
SAFE = [
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
]

_coming = {"bytes": 0}  # counted by the event loop alone
Observe = Callable[[str, int, float], None]  # is told the path, the status and the seconds


class Guard:
    """An ASGI application in front of another.

    Args:
        app: the application to guard.
        hosts: names by which this server may be addressed, in lower case; `*` allows any. A foreign site whose name
            was made to point here is refused.
        token: the token a client must present; None for no token.
        observe: called for every request.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str], token: str | None, observe: Observe):
        self._app, self._hosts, self._token, self._observe = app, frozenset(hosts), token, observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or let the application answer."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        began, status = time.perf_counter(), 500

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *SAFE]
            await send(message)

        try:
            why = self._refusal(scope)
            if why is None:
                await self._app(scope, receive, sent)
            else:
                await sent({"type": "http.response.start", "status": why.status, "headers": _headers(why)})
                await sent({"type": "http.response.body", "body": why.body})
        finally:
            self._observe(scope["path"], status, time.perf_counter() - began)

    def _refusal(self, scope: Scope) -> Answer | None:
        hosts, origin, shown = [], None, ""
        for name, value in scope["headers"]:
            if name == b"host":
                hosts.append(value.decode("latin-1").strip().lower())
            elif name == b"origin":
                origin = value.decode("latin-1")
            elif name == b"authorization":
                shown = value.decode("latin-1")
        if len(hosts) != 1 or (ANY not in self._hosts and without_port(hosts[0]) not in self._hosts):
            return refused(421, "this server does not go by the name in the Host header. Allow it: --allow-host NAME.")
        if origin is not None and urlsplit_safely(origin) != hosts[0]:
            return refused(403, "requests from pages of other sites are not answered.")
        if self._token is None or scope["path"] in OPEN or self._shown(shown):
            return None
        why = "a token is needed: `Authorization: Bearer TOKEN`, or the token as the password of any user."
        return refused(401, why, WWW_Authenticate='Basic realm="opvi", charset="UTF-8"')

    def _shown(self, value: str) -> bool:
        """Return whether the token was presented, by itself or as a password."""
        scheme, _, credentials = value.partition(" ")
        if scheme.lower() == "basic":
            try:
                credentials = base64.b64decode(credentials.strip()).decode().partition(":")[2]
            except (binascii.Error, UnicodeDecodeError, ValueError):
                return False
        elif scheme.lower() != "bearer":
            return False
        return hmac.compare_digest(credentials.strip().encode(), str(self._token).encode())


def _headers(why: Answer) -> list[tuple[bytes, bytes]]:
    more = [(name.lower().encode(), value.encode()) for name, value in why.headers]
    return [(b"content-type", b"application/json"), (b"content-length", str(len(why.body)).encode()), *more]


def without_port(host: str) -> str:
    """Return a Host header's name."""
    name, mark, port = host.rpartition(":")
    return name if mark and port.isdigit() else host


def urlsplit_safely(origin: str) -> str:
    """Return the host and port of an origin, or nothing."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


async def body_of(request: Request, most: int) -> bytes | Answer:
    """Return a request's body, or why it is refused: too long, too slow or compressed."""
    given = dict(request.scope["headers"])
    if given.get(b"content-encoding", b"identity") != b"identity":
        return refused(415, "compressed bodies are not read. Send it as it is.")
    length = given.get(b"content-length", b"")
    if length.isdigit() and int(length) > most:
        return _too_long(most)
    if WHOLE in request.scope:  # nothing is waited for
        return await _received(request.receive, most)
    try:
        async with asyncio.timeout(PATIENCE):
            return await _received(request.receive, most)
    except TimeoutError:
        return refused(408, f"the body did not come within {PATIENCE:g} seconds.", Connection="close")


async def _received(receive: Receive, most: int) -> bytes | Answer:
    parts, size, more = [], 0, True
    try:
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return refused(400, "the client has gone.")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            _coming["bytes"] += len(parts[-1])
            if size > most:
                return _too_long(most)
            if _coming["bytes"] > COMING:
                return refused(429, "too many requests come in at once. Try again later.", Retry_After="1")
            more = message.get("more_body", False)
        return b"".join(parts)
    finally:
        _coming["bytes"] -= size


def _too_long(most: int) -> Answer:
    return refused(413, f"the body has more than {most:,} bytes.", Connection="close")


class Patient(HttpToolsProtocol):
    """HTTP with limits: connections are counted, and a header must be complete, prompt and short."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start waiting for a header."""
        super().connection_made(transport)
        self._head, self._waiting = 0, self.loop.call_later(PATIENCE, transport.close)
        if len(self.connections) > CONNECTIONS:
            transport.close()

    def data_received(self, data: bytes) -> None:
        """Read, as long as the header is not too long."""
        self._head += len(data)
        super().data_received(data)
        if self._head > HEAD and not self._waiting.cancelled() and not self.transport.is_closing():
            self.transport.close()

    def on_message_begin(self) -> None:
        """Start waiting for the rest of the header."""
        super().on_message_begin()
        self._head = 0
        self._waiting.cancel()
        self._waiting = self.loop.call_later(PATIENCE, self.transport.close)

    def on_headers_complete(self) -> None:
        """Note that the header is complete."""
        self._waiting.cancel()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The body is here."""
        self.scope[WHOLE] = True  # type: ignore[literal-required]
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._waiting.cancel()
        super().connection_lost(exc)
