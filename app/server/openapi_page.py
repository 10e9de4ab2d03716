"""The description of the API as plain HTML, without external resources."""

from __future__ import annotations

import functools
import html
import re
from pathlib import Path
from string import Template
from typing import Any

from quart import Response

from app.server.exchange import Exchange
from app.server.openapi import describe_api
from app.server.routes import Route
from app.server.service import Service

__all__ = ["docs"]

_PAGES = Path(__file__).parent
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
}


async def docs(service: Service, exchange: Exchange, body: None) -> Response:
    """Every operation with the fields of its body."""
    return _page("docs.html", operations=_operations(service.table.routes), notes=_notes(service.table.routes))


def _page(name: str, **values: str) -> Response:
    text = _template(name).substitute(values)
    return Response(text, content_type="text/html; charset=utf-8", headers=_HEADERS)


@functools.cache
def _template(name: str) -> Template:
    return Template((_PAGES / name).read_text(encoding="utf-8"))


def _notes(routes: tuple[Route, ...]) -> str:
    return _paragraphs(describe_api(routes)["info"]["description"])


def _paragraphs(text: str) -> str:
    """HTML of paragraphs with code in backticks."""
    code = re.sub(r"`([^`\n]+)`", r"<code>\1</code>", html.escape(text))
    return "".join(f"<p>{paragraph}</p>" for paragraph in code.split("\n\n"))


@functools.cache
def _operations(routes: tuple[Route, ...]) -> str:
    schemas = describe_api(routes)["components"]["schemas"]
    parts = []
    for route in routes:
        methods = " | ".join(route.methods)
        parts.append(
            f"<details><summary><b>{html.escape(methods)}</b> <code>{html.escape(route.path)}</code> "
            f"{html.escape(route.summary)} <i>{route.level.value}</i></summary>"
        )
        if route.body is not None:
            schema = schemas[route.body.__name__]
            parts.append(f"{_paragraphs(schema.get('description', ''))}<table>")
            required = set(schema.get("required", ()))
            for name, field in schema.get("properties", {}).items():
                must = "required" if name in required else ""
                parts.append(
                    f"<tr><td><code>{html.escape(name)}</code></td><td>{html.escape(_kind(field))}</td>"
                    f"<td>{must}</td></tr>"
                )
            parts.append("</table>")
        parts.append("</details>")
    return "\n".join(parts)


def _kind(field: dict[str, Any]) -> str:
    """A schema in a few words."""
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_kind(option) for option in field["anyOf"] if option.get("type") != "null"))
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if "enum" in field:
        return f"one of {', '.join(map(str, field['enum']))}"
    if field.get("type") == "array":
        return f"list of {_kind(field.get('items', {}))}"
    return str(field.get("type", "any"))
