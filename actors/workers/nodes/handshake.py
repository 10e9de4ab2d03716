"""The handshake of a connection between nodes: both ends prove that they know the secret, and agree what it is for.

    hub    -> agent   magic, nonce
    agent  -> hub     nonce, length of the purpose, purpose, HMAC-SHA256 of "agent", both nonces, the purpose
    hub    -> agent   HMAC-SHA256 of "hub  ", both nonces, the purpose

Every part has a fixed or a bounded length, and the whole has a time limit.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from collections.abc import Mapping
from typing import Literal

import msgspec

from actors.options import ArgumentError

__all__ = ["SECRET_VARIABLE", "HandshakeError", "Purpose", "admit", "cluster_secret", "introduce", "resolve"]

SECRET_VARIABLE = "TROUPE_CLUSTER_SECRET"

HANDSHAKE_SECONDS = 10.0

_MAGIC = b"troupe nodes 1\n"
_NONCE_BYTES = 32
_MAC_BYTES = 32
_MIN_SECRET = 16
"""Characters."""


class HandshakeError(Exception):
    """The other end did not prove that it knows the secret."""


class Purpose(msgspec.Struct, frozen=True):
    """What a connection is for: the control of a node, or one of the two links of a launched worker."""

    kind: Literal["control", "mailbox", "thread"]
    node: int
    launch: int = 0


_decode = msgspec.json.Decoder(Purpose).decode


def cluster_secret(environ: Mapping[str, str]) -> bytes:
    """The secret that all nodes share. Raises ArgumentError."""
    secret = environ.get(SECRET_VARIABLE, "").strip()
    if len(secret) < _MIN_SECRET:
        raise ArgumentError(
            [
                f"nnodes: set {SECRET_VARIABLE} in the environment of every node to the same secret of at least "
                f"{_MIN_SECRET} characters, such as the output of: openssl rand -hex 32"
            ]
        )
    return secret.encode()


async def resolve(address: str) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """The family and the place of a host:port. Raises OSError."""
    host, _, port = address.rpartition(":")
    found = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    family, _, _, _, place = found[0]
    return family, (str(place[0]), int(place[1]))


async def admit(sock: socket.socket, secret: bytes) -> Purpose:
    """The hub's side. Raises HandshakeError, OSError or TimeoutError."""
    loop = asyncio.get_running_loop()
    nonce = secrets.token_bytes(_NONCE_BYTES)
    async with asyncio.timeout(HANDSHAKE_SECONDS):
        await loop.sock_sendall(sock, _MAGIC + nonce)
        other = await _read(sock, _NONCE_BYTES)
        purpose = await _read(sock, (await _read(sock, 1))[0])
        proof = await _read(sock, _MAC_BYTES)
        if not hmac.compare_digest(proof, _mac(secret, b"agent", nonce, other, purpose)):
            raise HandshakeError("it has another secret")
        await loop.sock_sendall(sock, _mac(secret, b"hub  ", nonce, other, purpose))
    try:
        return _decode(purpose)
    except msgspec.MsgspecError as error:
        raise HandshakeError(f"it runs another version of Troupe ({error})") from error


async def introduce(sock: socket.socket, secret: bytes, purpose: Purpose) -> None:
    """The agent's side. Raises HandshakeError, OSError or TimeoutError."""
    loop = asyncio.get_running_loop()
    nonce, encoded = secrets.token_bytes(_NONCE_BYTES), msgspec.json.encode(purpose)
    async with asyncio.timeout(HANDSHAKE_SECONDS):
        if await _read(sock, len(_MAGIC)) != _MAGIC:
            raise HandshakeError("no node 0 of this version of Troupe listens at that address")
        other = await _read(sock, _NONCE_BYTES)
        proof = _mac(secret, b"agent", other, nonce, encoded)
        await loop.sock_sendall(sock, nonce + bytes([len(encoded)]) + encoded + proof)
        try:
            proof = await _read(sock, _MAC_BYTES)
        except (HandshakeError, ConnectionError):
            proof = b""
        if not hmac.compare_digest(proof, _mac(secret, b"hub  ", other, nonce, encoded)):
            raise HandshakeError(f"node 0 has another secret: see {SECRET_VARIABLE}")


def _mac(secret: bytes, role: bytes, hub_nonce: bytes, agent_nonce: bytes, purpose: bytes) -> bytes:
    return hmac.digest(secret, role + hub_nonce + agent_nonce + purpose, "sha256")


async def _read(sock: socket.socket, size: int) -> bytes:
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < size:
        part = await loop.sock_recv(sock, size - len(data))
        if not part:
            raise HandshakeError("it closed the connection")
        data += part
    return data
