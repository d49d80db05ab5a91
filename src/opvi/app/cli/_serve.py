"""`opvi serve`."""

import argparse
import ipaddress
import socket
import sys
from importlib.util import find_spec
from pathlib import Path

from opvi.app.cli._common import CommandError, Commands, add_save_every, between, explained, positive, prepare

SHORTEST = 16  # characters of a token
TLS = ("ssl_certfile", "ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs")  # as uvicorn calls them


def add_serve(commands: Commands) -> None:
    """Add `opvi serve`: a run behind HTTP."""
    command = commands.add_parser(
        "serve",
        help="answer and learn over HTTP",
        description="Serve a run: POST /v1/predict and /v1/learn take rows as JSON, /v2 is the KServe protocol, "
        "/metrics is for Prometheus, and / is the report, live. Rows are on the disk before they are acknowledged.",
    )
    command.add_argument("run", type=Path, metavar="RUN", help="the folder of a run")
    command.add_argument("--name", help="name of the model in /v2 (default: the folder's name without .run)")
    command.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this computer only)")
    command.add_argument("--port", type=between(0, 65535), default=8000, help="the port; 0 picks a free one")
    command.add_argument("--token-file", type=Path, metavar="FILE", help="clients must present the token in this file")
    command.add_argument(
        "--allow-host", action="append", default=[], metavar="NAME", help="a host name of this server; * allows any"
    )
    who = command.add_mutually_exclusive_group()
    who.add_argument("--readonly", action="store_true", help="follow a run that another process writes")
    who.add_argument(
        "--one-process",
        action="store_true",
        help="learn in the server's process: half the memory, but learning delays answers",
    )
    command.add_argument(
        "--backlog",
        type=positive,
        default=100_000,
        metavar="ROWS",
        help="how many rows may wait to be learnt; more get 429",
    )
    command.add_argument(
        "--max-body", type=positive, default=8, metavar="MIB", help="largest size of a request in MiB (default: 8)"
    )
    add_save_every(command)
    for name in TLS:
        command.add_argument(f"--{name.replace('_', '-')}", metavar="FILE" if "word" not in name else "WORD")
    command.set_defaults(handler=serve)


def serve(options: argparse.Namespace) -> int:
    """Serve until a signal arrives."""
    prepare()
    absent = [name for name in ("starlette", "uvicorn", "httptools", "prometheus_client") if find_spec(name) is None]
    if absent:
        raise CommandError(f"`opvi serve` needs {absent[0]}, which is not installed: pip install 'opvi[serve]'.")
    from opvi.app.learn import RunDirectory
    from opvi.app.serve import Address, Options
    from opvi.app.serve import serve as run_server
    from opvi.app.serve._server import APART, READONLY, TOGETHER

    token = _token(options.token_file) if options.token_file else None
    if token is None and not _is_loopback(options.host):
        raise CommandError(
            f"`--host {options.host}` can be reached from other computers, so clients must present a token: write one "
            "to a file that only you can read, and name it with --token-file FILE."
        )
    tls = {name: value for name in TLS if (value := getattr(options, name)) is not None}
    if tls and not {"ssl_certfile", "ssl_keyfile"} <= set(tls):
        raise CommandError("TLS needs both --ssl-certfile and --ssl-keyfile.")
    address = Address(options.host, options.port, _hosts(options.host, options.allow_host), token, tls)
    name = options.name or options.run.resolve().name.removesuffix(".run")
    served = Options(name, options.backlog, options.max_body << 20, options.save_every)
    how = READONLY if options.readonly else TOGETHER if options.one_process else APART
    with explained(options.run):
        return run_server(RunDirectory(options.run), served, address, how, _say)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _token(path: Path) -> str:
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"`--token-file {path}` cannot be read: {error}.") from None
    if len(token) < SHORTEST or not token.isascii() or any(letter.isspace() for letter in token):
        raise CommandError(
            f"the token in {path} must be one word of at least {SHORTEST} plain characters. Make one: "
            "python -c 'import secrets; print(secrets.token_urlsafe(32))'."
        )
    return token


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _hosts(host: str, allowed: list[str]) -> frozenset[str]:
    """Return the host names by which the server may be addressed."""
    names = ["127.0.0.1", "localhost", "[::1]", f"[{host}]" if ":" in host else host]
    names += [] if _is_loopback(host) else [socket.gethostname(), socket.getfqdn()]
    return frozenset(name.lower() for name in [*names, *allowed])
