"""vLLM's arguments of several nodes, as ``--nnodes``, ``--node-rank`` and ``--dist-init-addr``.

vLLM states the replicas of each node: ``--data-parallel-size 4 --data-parallel-size-local 2`` are two nodes, and
``--data-parallel-start-rank 2`` is the second.
"""

from __future__ import annotations

from collections.abc import Mapping

from actors.options.argument import parse_flag
from actors.options.errors import ArgumentError

__all__ = ["NODE_NAMES", "OTHER_BALANCERS", "node_arguments"]

_LOCAL, _START = "data-parallel-size-local", "data-parallel-start-rank"
_ADDRESS, _PORT, _DEFAULT_PORT = "data-parallel-address", "data-parallel-rpc-port", 29550
_MASTER, _MASTER_PORT, _DEFAULT_MASTER_PORT = "master-addr", "master-port", 29501

NODE_NAMES = frozenset((_LOCAL, _START, _ADDRESS, _PORT, _MASTER, _MASTER_PORT, "headless"))
"""The names that ``node_arguments`` replaces."""

OTHER_BALANCERS = frozenset(("data-parallel-rank", "data-parallel-hybrid-lb", "data-parallel-external-lb"))
"""Names by which several servers share the requests: these are refused, so the others need no second refusal."""


def node_arguments(given: Mapping[str, object]) -> dict[str, tuple[str, object]]:
    """An argument and its value, by the name that states them.

    ``given``: values of ``NODE_NAMES``, ``data-parallel-size`` and ``node-rank`` by name. The address of replicas on
    one node is left out: they need none. Raises ArgumentError for nodes with different numbers of replicas, for an HTTP
    server on a node other than 0, and for a missing address.
    """
    found: dict[str, tuple[str, object]] = {}
    local, rank = _integer(given, _LOCAL), _integer(given, "node-rank") or 0
    if local is not None:
        nodes, rank = _replica_nodes(given, local)
        if nodes > 1:
            found[_LOCAL] = "nnodes", nodes
            found[_START] = "node-rank", rank
            if _ADDRESS not in given:
                raise ArgumentError(f"--{_LOCAL} needs --{_ADDRESS}: an address of node 0")
            found[_ADDRESS] = "dist-init-addr", _joined(given[_ADDRESS], _integer(given, _PORT) or _DEFAULT_PORT)
    else:
        for name in (_START, _ADDRESS, _PORT):
            if name in given:
                raise ArgumentError(
                    f"--{name} needs --{_LOCAL}, the number of replicas on this node; or give --nnodes, --node-rank "
                    "and --dist-init-addr HOST:PORT"
                )
    if parse_flag(given.get("headless")) and not rank:
        raise ArgumentError("--headless: node 0 runs the HTTP server; leave it out, or give the rank of another node")
    if _MASTER in given:
        port = _integer(given, _MASTER_PORT) or _DEFAULT_MASTER_PORT
        found[_MASTER] = "dist-init-addr", _joined(given[_MASTER], port)
    elif _MASTER_PORT in given:
        raise ArgumentError(f"--{_MASTER_PORT} needs --{_MASTER}; or give --dist-init-addr HOST:PORT")
    return found


def _replica_nodes(given: Mapping[str, object], local: int) -> tuple[int, int]:
    """The number of nodes with ``local`` replicas each, and the rank of this node."""
    size, start = _integer(given, "data-parallel-size") or 1, _integer(given, _START) or 0
    if local < 1 or size % local:
        raise ArgumentError(
            f"--{_LOCAL} {local} must divide --data-parallel-size {size}: every node runs an equal share of the "
            "replicas"
        )
    if start % local or not 0 <= start < size:
        raise ArgumentError(
            f"--{_START} {start} must be a multiple of --{_LOCAL} {local} below --data-parallel-size {size}"
        )
    if start and not parse_flag(given.get("headless")):
        raise ArgumentError(f"--{_START} {start} needs --headless: only node 0 runs an HTTP server")
    return size // local, start // local


def _integer(given: Mapping[str, object], name: str) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    try:
        return int(str(value))
    except ValueError:
        raise ArgumentError(f"--{name} must be an integer, not {str(value)[:64]!r}") from None


def _joined(host: object, port: int) -> str:
    text = str(host).strip("[]")
    return f"[{text}]:{port}" if ":" in text else f"{text}:{port}"
