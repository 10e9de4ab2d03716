"""The live page: ``GET /`` and the scripts and styles that it loads from ``/page/``.

The files are the same for everyone and contain nothing about this server, so they need no key. The page asks the user
for the key and sends it with its API requests.
"""

from __future__ import annotations

import functools
import hashlib
import html
from pathlib import Path
from string import Template

from quart import Response, request

from app.server.errors import ApiError
from app.server.exchange import Exchange
from app.server.service import Service

__all__ = ["POLICY", "page", "page_file"]

_FOLDER = Path(__file__).parent / "page"
_TYPES = {
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # text can never become markup, whatever the scripts do
    )
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


async def page(service: Service, exchange: Exchange, body: None) -> Response:
    """The page. Its addresses are relative unless the server knows the path under which a proxy shows it."""
    root = service.arguments.fastapi_root_path
    text = _template().substitute(root=html.escape(f"{root}/") if root else "")
    return Response(text, content_type="text/html; charset=utf-8", headers=_HEADERS)


async def page_file(service: Service, exchange: Exchange, name: str) -> Response:
    """A script, a style or the icon."""
    path = _files().get(name)
    if path is None:
        raise ApiError(404, "There is no such file.", code="not_found")
    data, tag = _content(path)
    headers = {**_HEADERS, "ETag": tag}
    if request.headers.get("If-None-Match") == tag:
        return Response(b"", status=304, headers=headers)
    return Response(data, content_type=_TYPES[path.suffix], headers=headers)


@functools.cache
def _template() -> Template:
    return Template((_FOLDER / "index.html").read_text(encoding="utf-8"))


@functools.cache
def _files() -> dict[str, Path]:
    """The files by their names under /page/. Paths of clients are never looked up on disk."""
    return {path.relative_to(_FOLDER).as_posix(): path for path in sorted(_FOLDER.rglob("*")) if path.suffix in _TYPES}


@functools.cache
def _content(path: Path) -> tuple[bytes, str]:
    data = path.read_bytes()
    return data, f'"{hashlib.blake2s(data, digest_size=8).hexdigest()}"'
