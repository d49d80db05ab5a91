"""The routes."""

import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from opvi.adapters._tables import Json
from opvi.adapters._tables._messages import rows_of, unlike
from opvi.app.learn._predict import MANY_LEVELS, is_level
from opvi.app.report._page import LIVE_POLICY
from opvi.app.serve import _v2 as v2
from opvi.app.serve._apart import Apart
from opvi.app.serve._asking import LEVELS, Asked, Said, plain
from opvi.app.serve._followed import Followed
from opvi.app.serve._guard import body_of
from opvi.app.serve._intake import Sent
from opvi.app.serve._openapi import openapi
from opvi.app.serve._options import Options
from opvi.app.serve._service import Service
from opvi.app.serve._tickets import Held, new_ticket
from opvi.app.serve._worker import Answer, answer, refused
from opvi.app.serve._writer import Writer

KEY = re.compile(r"[\x20-\x7e]{1,200}")
MOST_LEVELS = MANY_LEVELS


Handler = Callable[[Service, Request], Awaitable[Answer]]
Keep = Callable[[list[Json | None]], str]  # is told the predictions of a request; returns its ticket


def application(
    options: Options, run: Writer | Followed | Apart, observe: list[Callable[[str, int, float], None]]
) -> ASGIApp:
    """Return the application; `observe` receives the function that counts requests once it runs."""
    service: Service

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        nonlocal service
        service = Service(options, run)
        await warm(service)
        observe.append(service.requests.observe)
        yield
        service.close()

    def handled(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def respond(request: Request) -> Response:
            return response(await handler(service, request))

        return respond

    def get(path: str, handler: Handler) -> Route:
        return Route(path, handled(handler), methods=["GET"])

    def post(path: str, handler: Handler) -> Route:
        return Route(path, handled(handler), methods=["POST"])

    model, version = "/v2/models/{name}", "/versions/{version}"
    routes = [
        post("/v1/learn", learn),
        post("/v1/predict", predict),
        *(post(f"{model}{more}/infer", infer) for more in ("", version)),
        *(get(f"{model}{more}/ready", model_ready) for more in ("", version)),
        *(get(f"{model}{more}", model_metadata) for more in ("", version)),
        get("/v2", server_metadata),
        get("/v2/", server_metadata),
        get("/v2/health/live", live),
        get("/v2/health/ready", ready),
        get("/metrics", metrics),
        get("/openapi.json", described),
        get("/", report),
    ]
    whole = Starlette(
        routes=routes,
        lifespan=lifespan,
        exception_handlers={HTTPException: _refused, Exception: _failed},
    )
    quick: dict[tuple[str, str], Handler] = {("POST", "/v1/learn"): learn, ("POST", "/v1/predict"): predict}

    async def routed(scope: Scope, receive: Receive, send: Send) -> None:
        """Bypass the router for the most frequent requests, where it would take as long as the work."""
        handler = quick.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if handler is None:
            return await whole(scope, receive, send)
        try:
            said = await handler(service, Request(scope, receive))
        except Exception as error:
            said = _failure(error)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(said.body)).encode())]
        headers += [(name.lower().encode(), value.encode()) for name, value in said.headers]
        await send({"type": "http.response.start", "status": said.status, "headers": headers})
        await send({"type": "http.response.body", "body": said.body})

    return routed


def response(said: Answer) -> Response:
    """Return an answer as Starlette sends it."""
    out = Response(said.body, said.status, media_type="application/json")
    for name, value in said.headers:
        out.headers[name] = value
    return out


async def _refused(request: Request, error: Exception) -> Response:
    """Answer what Starlette itself refuses: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    made = response(refused(error.status_code, f"{error.detail}: see /openapi.json."))
    made.headers.update(error.headers or {})
    return made


async def _failed(request: Request, error: Exception) -> Response:
    return response(_failure(error))


def _failure(error: Exception) -> Answer:
    return refused(500, f"the server failed: {type(error).__name__}")


async def warm(service: Service) -> None:
    """Predict and learn once, so that the first client does not wait for compilation."""
    await service.ready()
    if service.published().schema.task == "regression":  # the program of many quantiles, which no client waits for
        reply = service.loop.create_future()
        many = tuple(place / (MOST_LEVELS + 1) for place in range(1, MOST_LEVELS + 1))
        service.asking.put(Asked(0, lambda _: [{}], many, lambda said: answer({}), reply))
    await service.behind.figures()


# --- version 1: rows ------------------------------------------------------------------------------


async def predict(service: Service, request: Request) -> Answer:
    """Return predictions for rows."""
    body = await body_of(request, service.options.most_bytes)
    if isinstance(body, Answer):
        return body
    query = request.query_params if request.scope["query_string"] else {}
    ticket = query.get("ticket")
    if ticket is not None and ticket and not KEY.fullmatch(ticket):
        return refused(400, "the ticket is not a short text of plain characters.")
    try:
        levels = _levels(query["quantiles"]) if "quantiles" in query else LEVELS
    except ValueError:
        return refused(
            400, f"`quantiles` must be at most {MOST_LEVELS} numbers strictly between 0 and 1, such as 0.05,0.95."
        )

    def keep(values: list[Json | None]) -> str:
        name = ticket or new_ticket()
        said = json.dumps(values, separators=(",", ":")).encode()
        service.behind.keep(name, Held(body, len(values), said))
        return name

    write = partial(_predictions, keep=None if ticket is None else keep)
    return await service.ask(len(body), lambda _: rows_of(body), levels, write)


def _levels(text: str) -> tuple[float, ...]:
    levels = tuple(float(word) for word in text.split(",")) if text else ()
    if len(levels) > MOST_LEVELS or not all(map(is_level, levels)):
        raise ValueError
    return levels


def _predictions(said: Said, keep: Keep | None) -> Answer:
    values = plain(said)
    content: Json = {"target": said.schema.target, "predictions": values}
    content |= unlike(said.schema, said.rows)
    if not said.learnt:
        content["learnt"] = 0  # nothing was learnt yet: these are the model's first guesses
    if said.rejected:
        content["rejected"] = [{"row": bad.row, "reason": bad.reason} for bad in said.rejected]
    if keep is not None:
        content["ticket"] = keep(values)
    return answer(content, 200 if len(said.rejected) < len(said.rows) else 422)


async def learn(service: Service, request: Request) -> Answer:
    """Take rows to learn; answer once they are on disk."""
    if service.behind.readonly:
        return refused(403, "this server is read-only. Send rows to the one that writes the run.")
    body = await body_of(request, service.options.most_bytes)
    if isinstance(body, Answer):
        return body
    key = request.headers.get("idempotency-key", "")
    ticket = request.query_params.get("ticket", "") if request.scope["query_string"] else ""
    if (key and not KEY.fullmatch(key)) or (ticket and not KEY.fullmatch(ticket)):
        return refused(400, "the key or the ticket is not a text of 1 to 200 plain characters.")
    reply = service.loop.create_future()
    key = f"key {key}" if key else f"ticket {ticket}" if ticket else ""
    return service.behind.take(Sent(body, key, ticket, reply)) or await reply


# --- version 2: tensors ---------------------------------------------------------------------------


def _unknown(service: Service, request: Request) -> Answer | None:
    name, version = request.path_params["name"], request.path_params.get("version", v2.VERSION)
    if (name, version) == (service.options.name, v2.VERSION):
        return None
    return refused(404, f"there is no such model: this is {service.options.name!r}, version {v2.VERSION}.")


async def infer(service: Service, request: Request) -> Answer:
    """Return predictions as tensors, for rows given as tensors."""
    body = await body_of(request, service.options.most_bytes)
    if isinstance(body, Answer):
        return body
    asked = v2.Inference(service.options.name, body, request.headers.get(v2.HEADER))
    return _unknown(service, request) or await service.ask(len(body), asked.read, LEVELS, asked.write)


async def model_metadata(service: Service, request: Request) -> Answer:
    """Return the inputs and outputs of the model."""
    unknown = _unknown(service, request)
    return unknown or answer(v2.metadata(service.options.name, service.published().schema))


async def model_ready(service: Service, request: Request) -> Answer:
    """Return whether the model answers."""
    if unknown := _unknown(service, request):
        return unknown
    sound = await service.ready()
    return answer({"name": service.options.name, "ready": sound}, 200 if sound else 503)


async def server_metadata(service: Service, request: Request) -> Answer:
    """Return the server's name and version."""
    import opvi

    return answer({"name": "opvi", "version": opvi.__version__, "extensions": ["binary_tensor_data"]})


async def live(service: Service, request: Request) -> Answer:
    """Answer: the server is live if it can."""
    return answer({"live": True})


async def ready(service: Service, request: Request) -> Answer:
    """Return whether the server predicts and learns."""
    sound = await service.ready()
    return answer({"ready": sound}, 200 if sound else 503)


# --- for people and monitors ----------------------------------------------------------------------


async def metrics(service: Service, request: Request) -> Answer:
    """Return the current figures for Prometheus."""
    return Answer(200, await service.metrics(), (("content-type", "text/plain; version=0.0.4; charset=utf-8"),))


async def described(service: Service, request: Request) -> Answer:
    """Return the OpenAPI description of the routes."""
    return answer(openapi(service.options.name, service.published().schema))


async def report(service: Service, request: Request) -> Answer:
    """Return the report, which refreshes itself."""
    headers = (("content-type", "text/html; charset=utf-8"), ("content-security-policy", LIVE_POLICY))
    return Answer(200, await service.page.get(), headers)
