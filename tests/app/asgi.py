"""An ASGI application asked in this process, without a socket."""

import asyncio
import json
import threading
from urllib.parse import unquote, urlsplit


class Said:
    def __init__(self, status, headers, body):
        self.status_code, self.content = status, body
        self.headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in headers}

    @property
    def text(self):
        return self.content.decode(errors="replace")

    def json(self):
        return json.loads(self.content)


class Client:
    """`with Client(app) as client: client.request("GET", "/")`; the application runs on a loop in a thread."""

    def __init__(self, app):
        self.app, self.loop = app, asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.started, self.ended = (self.loop.create_future() for _ in range(2))

    def __enter__(self):
        self.thread.start()
        self.life = asyncio.run_coroutine_threadsafe(self._life(), self.loop)
        asyncio.run_coroutine_threadsafe(self._until(self.started), self.loop).result(120)
        return self

    def __exit__(self, *error):
        self.loop.call_soon_threadsafe(self.ended.set_result, None)
        self.life.result(120)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    @staticmethod
    async def _until(future):
        await future

    async def _life(self):
        begun = False

        async def receive():
            nonlocal begun
            if not begun:
                begun = True
                return {"type": "lifespan.startup"}
            await self.ended
            return {"type": "lifespan.shutdown"}

        async def send(message):
            if message["type"] == "lifespan.startup.complete":
                self.started.set_result(None)
            elif message["type"].endswith("failed"):
                self.started.set_exception(RuntimeError(message.get("message")))

        await self.app({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, receive, send)

    def request(self, method, path, content=b"", headers=None):
        """`content` may be a list: parts that come one after the other; None in it never comes."""
        parts = content if isinstance(content, list) else [content]
        given = {"host": "127.0.0.1", **{name.lower(): value for name, value in (headers or {}).items()}}
        if not isinstance(content, list):
            given.setdefault("content-length", str(len(content)))
        future = asyncio.run_coroutine_threadsafe(self._ask(method, path, parts, given), self.loop)
        return future.result(120)

    async def _ask(self, method, path, parts, headers):
        split = urlsplit(path)
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote(split.path),
            "raw_path": split.path.encode(),
            "query_string": split.query.encode(),
            "root_path": "",
            "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        sent, left = [], list(parts)

        async def receive():
            if not left or left[0] is None:
                await asyncio.Event().wait()
            return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

        async def send(message):
            sent.append(message)

        await self.app(scope, receive, send)
        body = b"".join(message.get("body", b"") for message in sent[1:])
        return Said(sent[0]["status"], sent[0]["headers"], body)
