"""Serves a run on a socket until a signal arrives."""

import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import uvicorn

from opvi.app.learn import RunDirectory, RunError
from opvi.app.serve._apart import Apart
from opvi.app.serve._app import application
from opvi.app.serve._followed import Followed
from opvi.app.serve._guard import Guard, Observe, Patient
from opvi.app.serve._options import Options
from opvi.app.serve._service import followed, written
from opvi.app.serve._writer import Writer

APART, TOGETHER, READONLY = "apart", "together", "readonly"  # who writes the run
DRAIN = 30  # seconds for requests that are being answered
SWITCH = 0.001  # seconds after which a thread lets others run: answers wait for learning no longer


class Address(NamedTuple):
    """Where the server listens, and who may send requests."""

    host: str
    port: int
    hosts: frozenset[str]  # names in the Host header
    token: str | None = None
    tls: dict[str, str] = {}  # noqa: RUF012 (never written to): uvicorn's own settings


class Ready(uvicorn.Server):
    """A server that reports when it is listening."""

    def __init__(self, config: uvicorn.Config, say: Callable[[str], None], url: str):
        super().__init__(config)
        self._say, self._url = say, url

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen."""
        await super().startup(sockets)
        if self.started:
            self._say(self._url)


def serve(run: RunDirectory, options: Options, address: Address, how: str, say: Callable[[str], None]) -> int:
    """Answer until SIGINT or SIGTERM; then finish open requests, learn the durable rows and save.

    Args:
        run: the folder of a run.
        options: how it is served.
        address: where to listen.
        how: APART learns in a process of its own, TOGETHER in this one; READONLY follows a run that another one writes.
        say: prints a line.
    """
    sys.setswitchinterval(SWITCH)
    sock = _bound(address)
    scheme = "https" if address.tls else "http"
    host, port = sock.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    with sock, _begun(run, options, how, say) as made:
        server = Ready(_config(made, options, address), say, f"Serving {run.path}: {scheme}://{shown}:{port}/")
        with _quiet_signals():
            server.run(sockets=[sock])
        if not server.started:
            raise RunError("the server could not start; see the messages above.")
    say("Everything that was acknowledged is learnt and saved." if how != READONLY else "Ended.")
    return 0


def _begun(
    run: RunDirectory, options: Options, how: str, say: Callable[[str], None]
) -> AbstractContextManager[Apart | Writer | Followed]:
    if how == APART:
        return Apart(run, options)
    return followed(run) if how == READONLY else written(run, options, say)


def _config(made: Apart | Writer | Followed, options: Options, address: Address) -> uvicorn.Config:
    observers: list[Observe] = []

    def observe(path: str, status: int, seconds: float) -> None:
        for one in observers:
            one(path, status, seconds)

    app = Guard(application(options, made, observers), address.hosts, address.token, observe)
    return uvicorn.Config(
        app,
        http=Patient,
        ws="none",
        log_level="error",
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=DRAIN,
        lifespan="on",
        **address.tls,  # type: ignore[arg-type]
    )


def _bound(address: Address) -> socket.socket:
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(found[0])
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(found[4])
    except OSError as error:
        raise RunError(
            f"{address.host} port {address.port} cannot be used: {error.strerror or error}. Choose another."
        ) from None
    return sock


@contextmanager
def _quiet_signals() -> Iterator[None]:
    """Ignore the signal that uvicorn raises again after it has ended; by then everything is saved."""
    names = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(name, lambda *_: None) for name in names]
    try:
        yield
    finally:
        for name, handler in zip(names, before, strict=True):
            signal.signal(name, handler)
