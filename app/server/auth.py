"""Authorization: API keys, compared in constant time, and the level that each route declares."""

from __future__ import annotations

import enum
import hashlib
import hmac
import ipaddress
from collections.abc import Iterable

from app.server.errors import ApiError

__all__ = ["AccessLevel", "Keyring", "may_access", "sees_all"]

_ADMIN = "admin"


class AccessLevel(enum.Enum):
    """The key that a route requires."""

    PUBLIC = "public"  # none: probes, and the files of the live page, which contain nothing about the server
    USER = "user"  # an API key or the admin key, where keys are set
    ADMIN = "admin"  # the admin key


class Keyring:
    """The keys of a server.

    * Without any key everything is open, but admin routes answer on a loopback address (or a Unix socket) only.
    * With an API key and no admin key, admin routes return 404.
    * With an admin key, admin routes require it; without an API key user routes stay open.
    """

    def __init__(self, user: Iterable[str] = (), admin: Iterable[str] = ()) -> None:
        self._user = tuple(key.encode() for key in user if key)
        self._admin = tuple(key.encode() for key in admin if key)
        # Tenants matter only where several keys share the engine. A name does not reveal the key.
        several = len(self._user + self._admin) > 1
        self._tenants = [f"key-{number}" if several else "" for number in range(1, len(self._user) + 1)]
        self._tenants += [_ADMIN if several else ""] * len(self._admin)
        # Stored things outlive the server and the order of its keys.
        digests = [_digest(key, b"troupe-owner") for key in self._user]
        digests += [_digest(key, b"troupe-admin") for key in self._admin if self._user]
        self._owners = dict(zip(self._tenants, digests, strict=False)) or {"": ""}

    def check(
        self, level: AccessLevel, headers: Iterable[tuple[bytes, bytes]], server: tuple[str, int | None] | None
    ) -> str:
        """The tenant of the key in the headers, or "" where there is only one.

        ``server`` is the address that the connection came in on (``scope["server"]``). Raises :class:`ApiError` (401 or
        404) unless there is a key for ``level``.
        """
        if level is AccessLevel.PUBLIC:
            return ""
        if level is AccessLevel.ADMIN:
            if not self._admin:
                if self._user or not _is_loopback(server):
                    raise ApiError(
                        404,
                        "There is no such path here: admin routes need --admin-api-key.",
                        code="not_found",
                    )
                return ""
            self._demand(headers, self._admin, admin=True)
        elif self._user:
            return self._tenants[self._demand(headers, self._user + self._admin)]
        return ""

    def owner(self, tenant: str) -> str:
        """A name for the owner of stored things: a digest of the key; empty where user routes need none."""
        return self._owners.get(tenant, "")

    def tenant_of(self, owner: str) -> str | None:
        """The tenant of an owner of stored things; None if its key is gone."""
        return next((tenant for tenant, known in self._owners.items() if known == owner), None)

    def is_admin(self, tenant: str) -> bool:
        return tenant == _ADMIN

    def guards(self, level: AccessLevel) -> bool:
        """Whether ``level`` is protected by a key.

        Public routes reveal nothing about the server, and the page needs a user key for everything it reads.
        """
        return bool(self._user or (level is AccessLevel.ADMIN and self._admin))

    def _demand(self, headers: Iterable[tuple[bytes, bytes]], keys: tuple[bytes, ...], *, admin: bool = False) -> int:
        """The index of the given key. Raises 401 without one."""
        given = _given_keys(headers)
        matched = -1
        for place, key in enumerate(keys):  # no early exit: the time must not depend on the key
            for candidate in given:
                matched = (matched, place)[hmac.compare_digest(candidate, key)]
        if matched < 0:
            wanted, option = ("admin key", " (of --admin-api-key)") if admin else ("API key", "")
            wrong = f"Incorrect {wanted}" if given else f"An {wanted} is required"
            raise ApiError(
                401,
                f"{wrong}{option}; send it as 'Authorization: Bearer KEY'.",
                kind="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return matched


def may_access(tenant: str, owner: str) -> bool:
    """Whether ``tenant`` may see and abort requests of ``owner``: its own requests, or all for the admin key."""
    return sees_all(tenant) or tenant == owner


def sees_all(tenant: str) -> bool:
    """Whether this is the tenant of the admin key, or the only one."""
    return tenant in ("", _ADMIN)


def _digest(key: bytes, person: bytes) -> str:
    return hashlib.blake2b(key, digest_size=16, person=person).hexdigest()


def _given_keys(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    given: list[bytes] = []
    for name, value in headers:
        lowered = name.lower()
        if lowered == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            if scheme.lower() == b"bearer" and key.strip():
                given.append(key.strip())
        elif lowered == b"x-api-key" and value.strip():
            given.append(value.strip())
    return given[:4]


def _is_loopback(server: tuple[str, int | None] | None) -> bool:
    if server is None or server[1] is None:
        return True  # a Unix socket
    try:
        return ipaddress.ip_address(server[0].partition("%")[0]).is_loopback
    except ValueError:
        return server[0] == "localhost"
