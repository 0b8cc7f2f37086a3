"""The inference APIs: one route each, described for OpenAPI, answered by a relay."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from litestar import post
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.spec import (
    OpenAPIMediaType,
    OpenAPIResponse,
    Operation,
    Parameter,
    RequestBody,
    Schema,
)
from litestar.openapi.spec.enums import OpenAPIType

from backends.protocol import PATHS, Kind
from gateway.http import errors, wire
from gateway.http.relay import Relay
from gateway.trunk import Trunk
from policies.reasons import Reason

_STRING, _INTEGER = Schema(type=OpenAPIType.STRING), Schema(type=OpenAPIType.INTEGER, minimum=1)
_BOOLEAN, _OBJECT = Schema(type=OpenAPIType.BOOLEAN), Schema(type=OpenAPIType.OBJECT)
_STOP = Schema(type=OpenAPIType.STRING, min_length=1)
_STOPS = Schema(one_of=[_STOP, Schema(type=OpenAPIType.ARRAY, items=_STOP, max_items=4)])
_ROLE = Schema(type=OpenAPIType.STRING, enum=["system", "developer", "user", "assistant"])
_STREAM_OPTIONS = Schema(type=OpenAPIType.OBJECT, properties={"include_usage": _BOOLEAN})
_TEXT_OR_MANY = Schema(one_of=[_STRING, Schema(type=OpenAPIType.ARRAY, items=_STRING)])
_MESSAGES = Schema(
    type=OpenAPIType.ARRAY,
    min_items=1,
    items=Schema(type=OpenAPIType.OBJECT, required=["role", "content"], properties={"role": _ROLE, "content": _STRING}),
)
_SAMPLING = {
    "max_tokens": _INTEGER,
    "temperature": Schema(type=OpenAPIType.NUMBER, minimum=0, maximum=2),
    "top_p": Schema(type=OpenAPIType.NUMBER, exclusive_minimum=0, maximum=1),
    "stop": _STOPS,
    "stream": _BOOLEAN,
}

_BODIES: dict[Kind, tuple[str, dict[str, Schema], list[str]]] = {
    Kind.CHAT: (
        "Chat completion",
        {**_SAMPLING, "messages": _MESSAGES, "stream_options": _STREAM_OPTIONS},
        ["messages"],
    ),
    Kind.COMPLETION: (
        "Text completion",
        {**_SAMPLING, "prompt": _TEXT_OR_MANY, "stream_options": _STREAM_OPTIONS},
        ["prompt"],
    ),
    Kind.RESPONSES: ("OpenAI Responses", {"input": _STRING, "stream": _BOOLEAN}, ["input"]),
    Kind.MESSAGES: ("Anthropic Messages", {"messages": _MESSAGES, "max_tokens": _INTEGER}, ["messages", "max_tokens"]),
    Kind.EMBEDDINGS: ("Embeddings", {"input": _TEXT_OR_MANY}, ["input"]),
    Kind.TOKENIZE: ("Tokens of a prompt, by the engine's tokenizer", {"prompt": _STRING, "messages": _MESSAGES}, []),
}
_HEADERS = {
    "x-request-id": _STRING,
    "x-slo-ttft-ms": _INTEGER,
    "x-slo-tpot-ms": _INTEGER,
    "x-deadline-ms": _INTEGER,
    "idempotency-key": Schema(type=OpenAPIType.STRING, min_length=1, max_length=wire.LONGEST_KEY),
}


def api_routes(trunk: Trunk, relays: Mapping[str, Relay]) -> list[HTTPRouteHandler]:
    """One handler per API. They take no arguments: the relay reads the request itself, which is the cheap way."""
    classes = Schema(type=OpenAPIType.STRING, enum=[*trunk.classes])
    headers = [
        Parameter(name=name, param_in="header", schema=schema)
        for name, schema in {**_HEADERS, "x-priority-class": classes}.items()
    ]
    return [_route(relay.kind, relay, headers) for relay in relays.values()]


def _route(kind: Kind, relay: Relay, headers: list[Parameter]) -> HTTPRouteHandler:
    async def handle() -> Relay:
        return relay

    handle.__name__ = f"post_{kind.value}"
    return post(PATHS[kind], status_code=200, operation_class=_operation(kind, headers), name=kind.value)(handle)


def _operation(kind: Kind, headers: list[Parameter]) -> type[Operation]:
    summary, properties, required = _BODIES[kind]
    schema = Schema(type=OpenAPIType.OBJECT, required=["model", *required], properties={"model": _STRING, **properties})
    responses = {str(status): _refusals(status) for status in sorted(set(errors.STATUS.values()) - {499})}
    answer = {"application/json": OpenAPIMediaType(schema=_OBJECT)}
    if "stream" in properties:
        answer["text/event-stream"] = OpenAPIMediaType(schema=_STRING)
    responses["200"] = OpenAPIResponse(description="The answer; server-sent events with `stream: true`", content=answer)

    @dataclass
    class ApiOperation(Operation):
        def __post_init__(self) -> None:
            self.summary = summary
            self.operation_id = f"post_{kind.value}"
            self.request_body = RequestBody(
                content={"application/json": OpenAPIMediaType(schema=schema)}, required=True
            )
            self.parameters = [*headers]
            self.responses = dict(responses)

    return ApiOperation


def _refusals(status: int) -> OpenAPIResponse:
    names = ", ".join(reason.value for reason in Reason if errors.STATUS[reason] == status)
    body: Any = OpenAPIMediaType(schema=_OBJECT)
    return OpenAPIResponse(description=names, content={"application/json": body})
