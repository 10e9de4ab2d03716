"""vLLM's arguments of several nodes, as ``--nnodes``, ``--node-rank`` and ``--dist-init-addr``.

vLLM states the replicas of each node: ``--data-parallel-size 4 --data-parallel-size-local 2`` are two nodes, and
``--data-parallel-start-rank 2`` is the second.
"""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import IPv6Address

from actors.options.argument import parse_flag
from actors.options.errors import ArgumentError

__all__ = ["NODE_NAMES", "OTHER_BALANCERS", "READ_NAMES", "node_arguments"]

_LOCAL, _START = "data-parallel-size-local", "data-parallel-start-rank"
_ADDRESS, _PORT, _DEFAULT_PORT = "data-parallel-address", "data-parallel-rpc-port", 29550
_MASTER, _MASTER_PORT, _DEFAULT_MASTER_PORT = "master-addr", "master-port", 29501

NODE_NAMES = frozenset((_LOCAL, _START, _ADDRESS, _PORT, _MASTER, _MASTER_PORT, "headless"))
"""The names that ``node_arguments`` replaces."""

READ_NAMES = frozenset(("data-parallel-size", "node-rank", "dist-init-addr"))
"""The names that ``node_arguments`` reads besides."""

OTHER_BALANCERS = frozenset(("data-parallel-rank", "data-parallel-hybrid-lb", "data-parallel-external-lb"))
"""Names by which several servers share the requests: these are refused, so the others need no second refusal."""


def node_arguments(given: Mapping[str, object]) -> dict[str, tuple[str, object]]:
    """An argument and its value, by the name that states them.

    ``given``: values of ``NODE_NAMES`` and ``READ_NAMES`` by name. The address of replicas on one node is left out:
    they need none. Raises ArgumentError for nodes with different numbers of replicas, for an HTTP server on a node
    other than 0, and for a missing or wrong address.
    """
    found: dict[str, tuple[str, object]] = {}
    local, rank = _integer(given, _LOCAL), _integer(given, "node-rank") or 0
    if local is not None:
        nodes, rank = _replica_nodes(given, local, rank)
        if local > 1 or nodes > 1:  # one replica may also be divided over several nodes
            found[_LOCAL] = "nnodes", nodes
        if nodes > 1:
            if _START in given:
                found[_START] = "node-rank", rank
            if _ADDRESS in given:
                found[_ADDRESS] = "dist-init-addr", _joined(given, _ADDRESS, _PORT, _DEFAULT_PORT)
            elif _PORT in given or given.keys().isdisjoint((_MASTER, "dist-init-addr")):
                raise ArgumentError(f"--{_PORT if _PORT in given else _LOCAL} needs --{_ADDRESS}: an address of node 0")
    else:
        for name in (_START, _ADDRESS, _PORT):
            if name in given:
                raise ArgumentError(
                    f"--{name} needs --{_LOCAL}, the number of replicas on this node; or give --nnodes, --node-rank "
                    "and --dist-init-addr HOST:PORT"
                )
    if _headless(given) and not rank:
        raise ArgumentError("--headless: node 0 runs the HTTP server; leave it out, or give the rank of another node")
    if _MASTER in given:
        found[_MASTER] = "dist-init-addr", _joined(given, _MASTER, _MASTER_PORT, _DEFAULT_MASTER_PORT)
    elif _MASTER_PORT in given:
        raise ArgumentError(f"--{_MASTER_PORT} needs --{_MASTER}; or give --dist-init-addr HOST:PORT")
    return found


def _replica_nodes(given: Mapping[str, object], local: int, rank: int) -> tuple[int, int]:
    """The number of nodes with ``local`` replicas each, and the rank of this node, which is ``rank`` unless the first
    replica is given."""
    size, start = _integer(given, "data-parallel-size") or 1, _integer(given, _START)
    if local < 1 or size % local:
        raise ArgumentError(
            f"--{_LOCAL} {local} must divide --data-parallel-size {size}: every node runs an equal share of the "
            "replicas"
        )
    if start is None or (start == 0 and size == local):
        return size // local, rank
    if start % local or not 0 <= start < size:
        raise ArgumentError(
            f"--{_START} {start} must be a multiple of --{_LOCAL} {local} below --data-parallel-size {size}"
        )
    if start and not _headless(given):
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


def _headless(given: Mapping[str, object]) -> bool:
    value = given.get("headless")
    flag = parse_flag(value)
    if flag is None and value is not None:
        raise ArgumentError(f"--headless must be true or false, not {str(value)[:64]!r}")
    return bool(flag)


def _joined(given: Mapping[str, object], host_name: str, port_name: str, default: int) -> str:
    host, port = str(given[host_name]).strip("[]"), _integer(given, port_name)
    if port is not None and not 0 < port < 65536:
        raise ArgumentError(f"--{port_name} must be an integer from 1 to 65535, not {port}")
    if ":" in host:
        try:
            host = f"[{IPv6Address(host)}]"
        except ValueError:
            raise ArgumentError(
                f"--{host_name} must be a host without a port, such as 10.0.0.1, not {host[:64]!r}; the port is "
                f"--{port_name}"
            ) from None
    return f"{host}:{default if port is None else port}"
