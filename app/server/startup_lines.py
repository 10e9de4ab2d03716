"""First lines in the terminal: a warning if the server is open to others, the live page, and a first request."""

from __future__ import annotations

import ipaddress
import shlex
import socket

import msgspec

from actors.options import Arguments

__all__ = ["exposure", "first_steps", "url_of"]


def url_of(bound: socket.socket) -> str:
    """The URL for clients on this machine of a server that listens on ``bound``."""
    host, port = bound.getsockname()[:2]
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.is_unspecified:
        address = ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")
    return f"http://[{address}]:{port}" if address.version == 6 else f"http://{address}:{port}"


def exposure(arguments: Arguments, bound: socket.socket) -> str | None:
    """The warning for a server that others can reach and use without a key; None for any other server."""
    host, port = bound.getsockname()[:2]
    if arguments.api_keys or ipaddress.ip_address(host.partition("%")[0]).is_loopback:
        return None
    return (
        f"NO API KEY IS SET, and this server listens on {host}:{port}: everyone who can reach this machine can use "
        "the model and read what others do. Set --api-key, or listen on 127.0.0.1 (--host)."
    )


def first_steps(arguments: Arguments, url: str, *, chats: bool) -> list[str]:
    """Lines for a new user. ``chats``: whether the model has a chat template."""
    path, body = "chat/completions", msgspec.json.encode({"messages": [{"role": "user", "content": "Hello!"}]}).decode()
    if not chats:
        prompt: object = [1, 2, 3] if arguments.skip_tokenizer_init else "Once upon a time"
        path, body = "completions", msgspec.json.encode({"prompt": prompt}).decode()
    key = " -H 'Authorization: Bearer KEY'" if arguments.api_keys else ""
    curl = f"curl {url}/v1/{path} -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"
    page = [] if arguments.disable_page else [f"The live page: {url}/"]
    return [*page, f"A first request: {curl}"]
