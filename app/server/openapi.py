"""The description of the HTTP API, from the route table and the structs of bodies."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from typing import Any

import msgspec
from quart import Response

from app.server.auth import AccessLevel
from app.server.exchange import Exchange
from app.server.routes import Route
from app.server.service import Service, json_response
from app.server.version import troupe_version

__all__ = ["describe_api", "openapi"]

_NOTES = """\
A wrong value, a misspelt name, or another API's name of a field is status 400; the message says what to use. Other
unknown fields are ignored, counted (troupe_unknown_fields_total) and listed in the header x-ignored-fields.
Whole floats count as integers. An error has the form of its API, OpenAI's where there is none: {"error": {"message",
"type", "param", "code"}}; a stream that fails ends with such an event and [DONE].

The chat template describes tools to the model. Calls that the model writes in the format of --tool-call-parser (by
default that of its chat template) are returned as tool_calls, or in the form of the API that was asked; with
--tool-call-parser off they stay text. Reasoning is recognized in the same way (--reasoning-parser).

Keys: probes and the files of the live page need none. User operations, this description among them, need the API key
if the server has one. Admin operations need the admin key; with an API key and no admin key they return 404; without
any key they answer on loopback addresses only."""


_IGNORED = {
    "x-ignored-fields": {
        "description": "The fields of the body that have no effect, if any.",
        "required": False,
        "schema": {"type": "string"},
    }
}


_FORM = {
    "type": "object",
    "properties": {
        "purpose": {"type": "string"},
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
    },
    "required": ["purpose", "file"],
}


async def openapi(service: Service, exchange: Exchange, body: None) -> Response:
    """OpenAPI 3.1."""
    arguments = service.arguments
    keys = ((AccessLevel.USER, arguments.api_key), (AccessLevel.ADMIN, arguments.admin_api_key))
    locked = frozenset(level for level, key in keys if key)
    return json_response(_encoded(service.table.routes, locked, arguments.fastapi_root_path or "/"))


@functools.cache
def _encoded(routes: tuple[Route, ...], locked: frozenset[AccessLevel], url: str) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode({**describe_api(routes, locked), "servers": [{"url": url}]}))


@functools.cache
def describe_api(routes: tuple[Route, ...], locked: frozenset[AccessLevel] = frozenset()) -> dict[str, Any]:
    """The document without its servers. ``locked``: the levels that require a key on this server."""
    structs = _structs(routes)
    schemas, components = msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")
    for schema in components.values():
        if "description" in schema:
            schema["description"] = _markdown(schema["description"])
    references = dict(zip(structs, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        for method in route.methods:
            paths.setdefault(route.path, {})[method.lower()] = _operation(route, method, references, locked)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Troupe", "version": troupe_version(), "description": _NOTES},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "user": {"type": "http", "scheme": "bearer", "description": "--api-key"},
                "admin": {"type": "http", "scheme": "bearer", "description": "--admin-api-key"},
            },
        },
    }


def _markdown(docstring: str) -> str:
    return inspect.cleandoc(docstring).replace("``", "`")


def _structs(routes: Iterable[Route]) -> list[type[msgspec.Struct]]:
    result: dict[type[msgspec.Struct], None] = {}
    for route in routes:
        for struct in (route.body, route.answer, route.dialect.envelope):
            if struct is not None:
                result[struct] = None
    return list(result)


def _operation(
    route: Route, method: str, references: dict[type[msgspec.Struct], Any], locked: frozenset[AccessLevel]
) -> dict[str, Any]:
    errors = {"application/json": {"schema": references[route.dialect.envelope]}}
    answer = references[route.answer] if route.answer is not None else {}
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": f"{method.lower()}{route.path.replace('/', '_').replace('{', '').replace('}', '')}",
        "tags": [route.tag],
        "security": [{route.level.value: []}] if route.level in locked else [],
        "responses": {
            "200": {
                "description": "The answer.",
                **({"headers": _IGNORED} if route.body is not None else {}),
                "content": {kind: {"schema": answer} if kind == "application/json" else {} for kind in route.media},
            },
            "default": {"description": "An error.", "content": errors},
        },
    }
    parameters: list[dict[str, Any]] = [
        {
            "name": name,
            "in": "query",
            "description": meaning,
            "schema": {"type": "integer", "minimum": minimum, "maximum": maximum},
        }
        for name, meaning, minimum, maximum in route.query
    ]
    parameters += [
        {"name": name, "in": "query", "description": meaning, "schema": {"type": "string"}}
        for name, meaning in route.words
    ]
    parameters += [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in route.variables
    ]
    if parameters:
        operation["parameters"] = parameters
    if route.body is not None:
        operation["requestBody"] = {
            "required": not route.optional_body,
            "content": {"application/json": {"schema": references[route.body]}},
        }
    if route.upload:
        operation["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}
    return operation
