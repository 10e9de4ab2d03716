"""Which web pages may call the server: names in the ``Host`` header, and origins (CORS).

A browser sends requests on behalf of any page. A page whose host name resolves to 127.0.0.1 (DNS rebinding) has the
same origin as the server; only the ``Host`` header differs. A page of another origin cannot read answers without CORS,
but can send simple requests. Neither page has an API key, so a key protects a path as well.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable

from actors.options import Arguments
from app.server.errors import ApiError

__all__ = ["BrowserPolicy", "Headers"]

Headers = Iterable[tuple[bytes, bytes]]

_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[^\[\]:]*)(?::\d{0,5})?")
_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,256}")
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_PREFLIGHT_SECONDS = 600
_CORS_METHODS = "GET, HEAD, POST, PUT, OPTIONS"
_LONGEST_SHOWN = 128


class BrowserPolicy:
    """The checks that the arguments configure."""

    def __init__(self, arguments: Arguments) -> None:
        a = arguments
        self._explicit = bool(a.allowed_hosts)
        names = {name.lower().rstrip(".") for name in (*a.allowed_hosts, a.host, socket.gethostname())}
        self._any_host = "*" in names
        self._hosts = frozenset(names | {"localhost"})
        self._suffixes = tuple(name[1:] for name in names if name.startswith("*."))
        self._origins = frozenset(origin.rstrip("/").lower() for origin in a.allowed_origins)
        self._any_origin = "*" in self._origins
        self._methods = _CORS_METHODS if "*" in a.allowed_methods else ", ".join(a.allowed_methods).upper()
        self._headers = None if "*" in a.allowed_headers else ", ".join(a.allowed_headers)
        self._credentials = a.allow_credentials

    def check_host(self, headers: Headers, *, keyed: bool) -> ApiError | None:
        """The refusal of a ``Host`` header that names another server. ``keyed``: an API key protects the path.

        HTTP/2's ``:authority`` is in the headers as ``host``. A request without the header is not from a browser.
        """
        if self._any_host or (keyed and not self._explicit):
            return None
        for host in _values(headers, b"host"):
            if host and not self._is_ours(host):
                shown = ascii(host[:_LONGEST_SHOWN])
                return ApiError(
                    403,
                    f"The Host header names {shown}, which is not a name of this server. Use its IP address or "
                    f"localhost, or start it with --allowed-hosts {_host_name(host) or 'NAME'}.",
                    kind="permission_error",
                    code="host_not_allowed",
                )
        return None

    def check_page(self, method: str, headers: Headers, *, keyed: bool, admin: bool) -> ApiError | None:
        """The refusal of a request from a page of another origin, where no key protects the path.

        Pages may call admin routes only from origins given by name.
        """
        if not admin and (keyed or method in _SAFE_METHODS):
            return None
        headers = list(headers)
        if not _is_foreign(headers):
            return None
        origin = self.origin(headers)
        if origin is not None and (origin.lower() in self._origins or not admin):
            return None
        shown = next(iter(_values(headers, b"origin")), "another site")[:_LONGEST_SHOWN]
        what = "Admin routes do not answer pages" if admin else "The server does not answer pages"
        return ApiError(
            403,
            f"{what} of {shown!a}. Start the server with --allowed-origins and this origin to allow it.",
            kind="permission_error",
            code="cross_site",
        )

    def origin(self, headers: Headers) -> str | None:
        """The allowed origin of the request, as sent; None without one."""
        for origin in _values(headers, b"origin"):
            if self._any_origin or origin.lower() in self._origins:
                return origin
        return None

    def preflight(self, headers: Headers) -> ApiError | None:
        """The answer to a CORS preflight; None for other requests. It needs no key."""
        headers = list(headers)
        if not any(_values(headers, b"access-control-request-method")) or not any(_values(headers, b"origin")):
            return None
        if self.origin(headers) is None:
            shown = ascii(next(iter(_values(headers, b"origin")))[:_LONGEST_SHOWN])
            return ApiError(
                403,
                f"Pages of {shown} may not call this server; start it with --allowed-origins and this origin.",
                kind="permission_error",
                code="origin_not_allowed",
            )
        answer = {
            "Access-Control-Allow-Methods": self._methods,
            "Access-Control-Max-Age": str(_PREFLIGHT_SECONDS),
            "Vary": "Access-Control-Request-Headers",
        }
        wanted = ",".join(_values(headers, b"access-control-request-headers"))
        allowed = [name for name in map(str.strip, wanted.split(",")) if _NAME.fullmatch(name)]
        if shown := ", ".join(allowed) if self._headers is None else self._headers:
            answer["Access-Control-Allow-Headers"] = shown
        return ApiError(204, "", headers=answer)

    def grants(self, origin: str, names: Iterable[bytes]) -> list[tuple[bytes, bytes]]:
        """The headers that allow a page of ``origin`` to read an answer and its headers ``names``."""
        exposed = b", ".join(sorted({name.lower() for name in names}))
        if self._any_origin and not self._credentials:
            granted = [(b"access-control-allow-origin", b"*")]
        else:
            granted = [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"Origin")]
        if self._credentials:
            granted.append((b"access-control-allow-credentials", b"true"))
        return [*granted, (b"access-control-expose-headers", exposed)]

    def _is_ours(self, host: str) -> bool:
        name = _host_name(host)
        if name is None:
            return False
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return name in self._hosts or name.endswith((".localhost", *self._suffixes))
        return True


def _host_name(host: str) -> str | None:
    """The name in a ``Host`` header without the port, in lower case; None if it is not valid."""
    result = _HOST.fullmatch(host)
    name = result["name"].lower().rstrip(".") if result is not None else ""
    return name if name.startswith("[") or _NAME.fullmatch(name) else None


def _values(headers: Headers, wanted: bytes) -> list[str]:
    return [value.decode("latin-1").strip() for name, value in headers if name.lower() == wanted]


def _is_foreign(headers: Headers) -> bool:
    """Whether the request comes from a page of another origin, according to the browser.

    A page cannot forge ``Sec-Fetch-Site``, which is also right behind a proxy that changes the ``Host`` header.
    Browsers omit it for plain HTTP to other machines; there the origin is compared with the host.
    """
    sites = _values(headers, b"sec-fetch-site")
    if sites:
        return any(site not in ("same-origin", "none") for site in sites)
    hosts = [host.lower() for host in _values(headers, b"host")]
    return any(origin.lower().partition("://")[2] not in hosts for origin in _values(headers, b"origin"))
