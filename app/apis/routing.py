"""The fields that name the replica of a request."""

from __future__ import annotations

from typing import Annotated, Protocol

from msgspec import Meta

__all__ = ["Replica", "Routed", "replica_name", "replica_of"]

Replica = Annotated[int, Meta(ge=0, lt=2**31)]


class Routed(Protocol):
    """A body with SGLang's name of the replica that runs a request, and its newer one."""

    data_parallel_rank: Replica | None
    routed_dp_rank: Replica | None


def replica_of(body: Routed) -> int | None:
    """The replica that the client names, None if it names none. The newer name wins."""
    return body.data_parallel_rank if body.routed_dp_rank is None else body.routed_dp_rank


def replica_name(body: Routed) -> dict[str, str]:
    """The engine's name of the field that names the replica -> the one that the client sent."""
    return {} if body.routed_dp_rank is None else {"data_parallel_rank": "routed_dp_rank"}
