"""The OpenAPI description of the routes, with the run's columns."""

from opvi.adapters._tables import Json, Schema

KINDS = {"number": "number", "boolean": "boolean", "date": "string"}


def openapi(name: str, schema: Schema) -> Json:
    """Return the description of the server of a run."""
    import opvi

    columns = {column.name: {"type": [KINDS.get(column.kind, "string"), "null"]} for column in schema.columns}
    label = {"type": "number"} if schema.task == "regression" else {"type": ["string", "number", "boolean"]}
    row = {"type": "object", "properties": columns}
    labelled = {"type": "object", "properties": {**columns, schema.target: label}, "required": [schema.target]}
    ticket = _parameter("ticket", "query", "Names the question, so that its label may come later.")
    key = _parameter("Idempotency-Key", "header", "A request that is sent again under its key is learnt once.")
    quantiles = _parameter("quantiles", "query", "Of a regression: numbers between 0 and 1, with commas.")
    paths = {
        "/v1/predict": _post("Predict rows", row, [ticket, quantiles]),
        "/v1/learn": _post("Learn rows; answered when they are on the disk", labelled, [ticket, key]),
        f"/v2/models/{name}/infer": _post("Predict tensors (KServe v2)", {"type": "object"}, []),
        f"/v2/models/{name}": _get("Inputs and outputs of the model (KServe v2)"),
        f"/v2/models/{name}/ready": _get("Whether the model answers"),
        "/v2": _get("What the server is"),
        "/v2/health/live": _get("Whether the server lives"),
        "/v2/health/ready": _get("Whether it predicts and learns"),
        "/metrics": _get("Figures for Prometheus"),
        "/": _get("The report, live"),
    }
    return {"openapi": "3.1.0", "info": {"title": f"opvi: {name}", "version": opvi.__version__}, "paths": paths}


def _parameter(name: str, place: str, words: str) -> Json:
    return {"name": name, "in": place, "description": words, "schema": {"type": "string"}}


def _get(words: str) -> Json:
    return {"get": {"summary": words, "responses": {"200": {"description": "The answer"}}}}


def _post(words: str, row: Json, parameters: list[Json]) -> Json:
    either = {"oneOf": [row, {"type": "array", "items": row}]} if "properties" in row else row
    answers = {
        "200": "The answer",
        "400": "Not a request; `error` says why",
        "413": "Too long",
        "422": "No row fits the table, or a key was used for other rows",
        "429": "Too many rows wait; try again later",
    }
    return {
        "post": {
            "summary": words,
            "parameters": parameters,
            "requestBody": {"required": True, "content": {"application/json": {"schema": either}}},
            "responses": {status: {"description": description} for status, description in answers.items()},
        }
    }
