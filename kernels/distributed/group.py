"""The ranks that run one model together, and the collectives between them.

All ranks open one store: a file in a folder that only this user may enter, or, where an address was given, a port that
rank 0 listens on. Through the store the ranks find each other and agree on what each of them finds out for itself;
tensors travel by the device's own backend (hccl, nccl, gloo).
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from kernels.contract.config import RunnerConfig
from kernels.devices.base import Device
from kernels.distributed.turns import pass_turn, takes_turns

__all__ = ["Group", "GroupError", "ProcessGroup", "join_group"]

JOIN_SECONDS = 300.0
"""Until rank 0 must have opened the store: it imports torch first."""

LOAD_SECONDS = 1800.0
"""That one rank may load longer than another."""

COLLECTIVE_SECONDS = 1800.0
"""Until a collective that a peer does not join is an error, by default."""

_gather: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter: Callable[..., object] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class GroupError(RuntimeError):
    """A rank did not find the others, or lost them. The worker must be started anew with all its peers."""


class Group:
    """A model that runs on one device: nothing is shared, and there are no peers."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's ``x``, equal on all. May overwrite ``x``."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's ``x`` [rows, part], in the order of ranks -> [rows, size * part], the same bits on all."""
        return x

    def all_gather_rows(self, x: Tensor) -> Tensor:
        """Every rank's ``x`` [rows, n], one after the other -> [size * rows, n]. ``rows`` is equal on all ranks."""
        return x

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This rank's rows [rows, n] of the sum of every rank's ``x`` [size * rows, n]: what undoes
        :meth:`all_gather_rows`."""
        return x

    def begin_gather_rows(self, x: Tensor) -> Callable[[], Tensor]:
        """Start :meth:`all_gather_rows`. Call the result to wait for the rows; do not change ``x`` before that."""
        return lambda: x

    def begin_all_to_all(
        self, x: Tensor, outgoing: Sequence[int] | None = None, incoming: Sequence[int] | None = None
    ) -> Callable[[], Tensor]:
        """Start an all-to-all of the rows ``x`` [rows, n]. ``outgoing``: how many of them go to each rank, in the order
        of ranks; ``incoming``: how many come from each; None: the same number for all. Call the result to wait for the
        received rows; do not change ``x`` before that."""
        return lambda: x

    def exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> None:
        """Send ``outgoing`` to other ranks and fill ``incoming`` with what they send; both are contiguous and by rank.
        All ranks that send or receive anything must call it."""

    def communicator_name(self) -> str:
        """The name by which NPU operators find the group; empty on other devices."""
        return ""

    def minimum(self, value: int) -> int:
        """The least of every rank's ``value``, on the host. All ranks must ask, in the same order."""
        return value

    def agrees(self, value: int) -> bool:
        """Whether every rank's ``value`` is the same. All ranks must ask, in the same order."""
        return self.minimum(value) == -self.minimum(-value)

    def subgroup(self, ranks: Sequence[int]) -> Group:
        """A group of some of these ranks, this one among them, in ascending order; they are numbered from 0.

        Each of them must call it, in the same order as their other sub-groups; other ranks need not. Raises ValueError
        for other ranks, GroupError if the group cannot be made. Close it before the whole group.
        """
        _check_members(ranks, self.rank, self.size)
        return self

    def close(self) -> None:
        """Leave. The group is of no further use."""


class ProcessGroup(Group):
    """Ranks in a process each, by torch.distributed. ``backend``: of the tensors' device.

    A collective waits for its peers for ``timeout`` seconds at most, then it is an error: raises GroupError, or what
    the device says.
    """

    def __init__(self, backend: str, store: Store, rank: int, size: int, timeout: float) -> None:
        self.rank, self.size = rank, size
        self._backend, self._store, self._timeout = backend, store, timeout
        self._minimums = 0
        self._name = ""
        self._handle: dist.ProcessGroup | None = None  # None: all ranks
        self._subgroups: dict[tuple[int, ...], int] = {}
        try:
            dist.init_process_group(
                backend,
                store=PrefixStore("group", store),
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout),
            )
        except RuntimeError as error:
            raise self._error(f"the {backend} group could not be made", error) from error

    def all_reduce(self, x: Tensor) -> Tensor:
        try:
            work = dist.all_reduce(x, group=self._handle, async_op=takes_turns())
            if work is not None:
                pass_turn()
                work.wait()
        except RuntimeError as error:
            self._raise(error)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        rows, part = x.shape
        parts = self.all_gather_rows(x)
        return parts.view(self.size, rows, part).transpose(0, 1).reshape(rows, self.size * part)

    def all_gather_rows(self, x: Tensor) -> Tensor:
        parts = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        try:
            _gather(parts, x.contiguous(), group=self._handle)
        except RuntimeError as error:
            self._raise(error)
        return parts

    def reduce_scatter(self, x: Tensor) -> Tensor:
        part = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        try:
            _scatter(part, x.contiguous(), group=self._handle)
        except RuntimeError as error:
            self._raise(error)
        return part

    def begin_gather_rows(self, x: Tensor) -> Callable[[], Tensor]:
        parts = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        return self._begin(parts, lambda: _gather(parts, x, group=self._handle, async_op=True))

    def begin_all_to_all(
        self, x: Tensor, outgoing: Sequence[int] | None = None, incoming: Sequence[int] | None = None
    ) -> Callable[[], Tensor]:
        rows = len(x) if incoming is None else sum(incoming)
        parts = x.new_empty((rows, *x.shape[1:]))
        sizes = None if outgoing is None else list(outgoing), None if incoming is None else list(incoming)
        return self._begin(
            parts, lambda: dist.all_to_all_single(parts, x, sizes[1], sizes[0], self._handle, async_op=True)
        )

    def _begin(self, result: Tensor, start: Callable[[], Any]) -> Callable[[], Tensor]:
        try:
            work = start()
        except RuntimeError as error:
            self._raise(error)

        def wait() -> Tensor:
            try:
                work.wait()
            except RuntimeError as error:
                self._raise(error)
            return result

        return wait

    def exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> None:
        work = [dist.P2POp(dist.isend, x, self._world(rank), self._handle) for rank, x in outgoing.items()]
        work += [dist.P2POp(dist.irecv, x, self._world(rank), self._handle) for rank, x in incoming.items()]
        try:
            for each in dist.batch_isend_irecv(work) if work else ():
                each.wait()
        except RuntimeError as error:
            self._raise(error)

    def communicator_name(self) -> str:
        group: Any = self._handle or dist.group.WORLD
        return str(group._get_backend(torch.device("npu")).get_hccl_comm_name(self.rank))

    def _world(self, rank: int) -> int:
        return rank if self._handle is None else dist.get_global_rank(self._handle, rank)

    def minimum(self, value: int) -> int:
        self._minimums += 1
        name = f"{self._name}least {self._minimums}"
        try:
            self._store.set(f"{name}/{self.rank}", str(value))
            return min(int(self._store.get(f"{name}/{rank}")) for rank in range(self.size))
        except RuntimeError as error:
            raise self._error("the ranks could not agree", error) from error

    def subgroup(self, ranks: Sequence[int]) -> Group:
        _check_members(ranks, self.rank, self.size)
        members = tuple(ranks)
        if len(members) == 1:
            return Group()
        world = [self._world(rank) for rank in members]
        part = ProcessGroup.__new__(ProcessGroup)
        part.rank, part.size = members.index(self.rank), len(members)
        part._backend, part._store, part._timeout = self._backend, self._store, self._timeout
        part._minimums, part._subgroups = 0, {}
        self._subgroups[members] = self._subgroups.get(members, 0) + 1
        part._name = f"{self._name}{'-'.join(map(str, members))} {self._subgroups[members]} "
        try:
            part._handle = dist.new_group(
                world,
                timeout=timedelta(seconds=self._timeout),
                backend=self._backend,
                use_local_synchronization=True,
            )
        except RuntimeError as error:
            raise self._error(f"the {self._backend} group of ranks {members} could not be made", error) from error
        return part

    def close(self) -> None:
        if self._handle is not None:  # those of accelerators end with the whole group
            if self._backend == "gloo":
                dist.destroy_process_group(self._handle)
        # NCCL's destruction waits for the peers to come to it, and the ranks stop one after the other.
        elif self._backend == "nccl":
            dist.distributed_c10d._abort_process_group()
        else:
            dist.destroy_process_group()

    def _raise(self, error: RuntimeError) -> NoReturn:
        """An accelerator's error has a number that the device explains; gloo's names a socket."""
        if self._backend != "gloo":
            raise error
        raise self._error("a collective failed", error) from error

    def _error(self, what: str, error: RuntimeError) -> GroupError:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return GroupError(
            f"rank {self.rank} of {self.size}: {what} ({lines[0]}); see which of the other workers died or hung first"
        )


def _check_members(ranks: Sequence[int], rank: int, size: int) -> None:
    if rank not in ranks or list(ranks) != sorted(set(ranks)) or not all(0 <= each < size for each in ranks):
        raise ValueError(f"ranks {list(ranks)}: give ascending ranks of 0 to {size - 1}, {rank} among them")


def join_group(device: Device, config: RunnerConfig) -> Group:
    """The group that the config names; all its ranks must join. Raises GroupError."""
    rank, size = config.pp_rank * config.tp_size + config.tp_rank, config.pp_size * config.tp_size
    if size == 1:
        return Group()
    device.bind_thread()
    patience = config.join_timeout or JOIN_SECONDS
    store = _open_store(config.rendezvous, rank, size, patience)
    store.set_timeout(timedelta(seconds=LOAD_SECONDS))
    _meet(store, rank, size, patience)
    timeout = min(config.op_timeout or COLLECTIVE_SECONDS, config.join_timeout or COLLECTIVE_SECONDS)
    return ProcessGroup(device.communication.backend, store, rank, size, timeout)


def _meet(store: Store, rank: int, size: int, patience: float) -> None:
    """Return when all ranks are here: one may still import torch, and a group waits no longer than a collective."""
    store.set(f"here/{rank}", "")
    for other in range(size):
        try:
            store.wait([f"here/{other}"], timedelta(seconds=patience))
        except RuntimeError as error:
            raise GroupError(
                f"rank {rank} of {size}: rank {other} did not come within {patience:g} s; see what its worker does"
            ) from error


def _open_store(rendezvous: str, rank: int, size: int, seconds: float) -> Store:
    if not Path(rendezvous).is_absolute():
        address, _, epoch = rendezvous.partition("/")
        # A rank of an earlier epoch that is still on its way must not be taken for one of this.
        return PrefixStore(f"epoch {epoch}", _open_port(address, rank, size, seconds))
    if not Path(rendezvous).parent.is_dir():  # torch would wait for it
        raise GroupError(f"rank {rank} of {size} cannot open {rendezvous}: its folder was deleted; see TMPDIR")
    try:
        return FileStore(rendezvous, size)
    except (RuntimeError, OSError) as error:
        raise GroupError(f"rank {rank} of {size} cannot open {rendezvous} ({error}); see TMPDIR") from error


def _open_port(address: str, rank: int, size: int, seconds: float) -> Store:
    """Open the store on a port. Whatever reaches the port may read and write it: torch asks for no password."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")  # of an IPv6 address
    patience = timedelta(seconds=seconds)
    try:
        if rank:
            return TCPStore(host, int(port), size, False, patience, wait_for_workers=False)
        # A store that makes its own socket listens on every interface.
        listener = _listen(host, int(port))
        return TCPStore(
            host, int(port), size, True, patience, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    except (RuntimeError, OSError) as error:
        what = "cannot listen" if rank == 0 else f"found no rank 0 within {seconds:g} s"
        hint = "see what the worker of rank 0 died of" if rank else "see --dist-init-addr and --nccl-port"
        raise GroupError(f"rank {rank} of {size} {what} at {address} ({error}); {hint}") from error


def _listen(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener
