"""The "hccl" backend of torch.distributed, simulated by gloo on the same memory.

Results are those of gloo. A collective has finished when its call returns, so nothing overlaps; in a captured graph it
runs again at each replay. If a peer does not join within the group's timeout, the call fails as on the device, with
error 507048 and EI0002, and the device keeps that error (a dead peer is detected at once here, but after the timeout on
the device). Not simulated: coalesced collectives other than all-reduce, sends and receives, the
memory of buffers, topology.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work

from kernels.devices.npu_simulator.communicators import COMMUNICATORS
from kernels.devices.npu_simulator.dispatch import Engine, Operator, flat
from kernels.devices.npu_simulator.memory import is_npu

__all__ = ["GlooForHccl", "take_over_hccl"]

TIMEOUT = 507048
SAME = ("broadcast", "allreduce", "allreduce_coalesced", "reduce", "allgather", "gather", "scatter", "alltoall")
COLLECTIVES = {name: name for name in (*SAME, "reduce_scatter", "barrier")} | {
    "all_gather_single": "_allgather_base",
    "_allgather_base": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "_reduce_scatter_base": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
    "alltoall_base": "alltoall_base",
}
"""Methods of a process group, by PyTorch's old and new names, and gloo's names."""


def take_over_hccl(engine: Engine) -> None:
    """Make init_process_group("hccl") create such a group."""

    def create(options: Any, backend_options: Any) -> GlooForHccl:
        return GlooForHccl(engine, options.store, options.group_rank, options.group_size, options.timeout)

    dist.Backend.register_backend("hccl", create, extended_api=True, devices=["npu"])


class Finished(Work):
    """A collective that has ended."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._future: Any = torch.futures.Future()
        self._future.set_result(result)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        return self._future


class Pending(Work):
    """A send or receive in flight; it holds references to its tensors."""

    def __init__(self, work: Any, finish: Callable[[Any], None], tensors: Any) -> None:
        super().__init__()
        self._work, self._finish, self._tensors = work, finish, tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._finish(self._work)
        return True

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


class Together(Work):
    """Sends and receives that were posted as one."""

    def __init__(self, parts: list[Pending]) -> None:
        super().__init__()
        self._parts = parts

    def wait(self, timeout: timedelta | None = None) -> bool:
        return all(part.wait() for part in self._parts)

    def is_completed(self) -> bool:
        return all(part.is_completed() for part in self._parts)


class GlooForHccl(dist.ProcessGroup):
    """A process group for NPU tensors."""

    def __init__(self, engine: Engine, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the form without a store
        self._engine = engine
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.generation: str = engine.cann.spec.generation
        self._operators = {name: self._operator(name) for name in COLLECTIVES}
        self._posted: list[Pending] | None = None  # since sends and receives are posted as one

    def getBackendName(self) -> str:  # noqa: N802 - the base class's name
        return "hccl"

    def shutdown(self) -> None:
        """End gloo's threads; destroy_process_group() calls it. The group cannot be used afterwards.

        A gloo thread that frees the last reference to a tensor acquires the GIL; while the interpreter exits, this
        aborts the process.
        """
        self._gloo = None
        for name in [name for name, group in COMMUNICATORS.items() if group is self]:
            del COMMUNICATORS[name]

    def get_hccl_comm_name(self, rank: int) -> str:
        """Name of the communicator, by which operators find it."""
        if rank != self.rank():
            raise ValueError(f"rank {rank} is not this one, {self.rank()}")
        name = f"{self.rank()} of {self.size()} at {id(self):x}"
        COMMUNICATORS[name] = self
        return name

    def gather_host(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's CPU tensor."""
        parts = [torch.empty_like(tensor) for _ in range(self.size())]
        self._finish(self._gloo.allgather([parts], [tensor.contiguous()]))
        return parts

    def _operator(self, name: str) -> Operator:
        def compute(*args: Any) -> None:
            self._finish(getattr(self._gloo, COLLECTIVES[name])(*args))

        schema = SimpleNamespace(name=f"hccl::{name.strip('_')}")
        return Operator(self._engine, Named(schema), compute, lambda *args: None)

    def _finish(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            device = torch.npu.current_device()
            message = f"EI0002: Notify wait timeout: a peer did not take part in the collective ({error})"
            self._engine.cann.fail(device, TIMEOUT, message)
            raise RuntimeError(f"NPU function error: hccl, error code is {TIMEOUT}\n{message}") from error

    def _run(self, name: str, *args: Any) -> Finished:
        given = [value for value in flat(args) if isinstance(value, Tensor)]
        if not all(is_npu(value) for value in given):
            raise RuntimeError(f"hccl {name.strip('_')}: all tensors must be on an NPU")
        self._operators[name](*args)
        return Finished(args[0] if args else None)

    def _post(self, name: str, tensors: list[Tensor], *args: Any) -> Pending:
        aliases = [self._engine.aliases.of(tensor) for tensor in tensors]
        pending = Pending(getattr(self._gloo, name)(aliases, *args), self._finish, tensors)
        if self._posted is not None:
            self._posted.append(pending)
        return pending

    def send(self, tensors: list[Tensor], destination: int, tag: int) -> Pending:
        return self._post("send", tensors, destination, tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Pending:
        return self._post("recv", tensors, source, tag)

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def _start_coalescing(self, device: torch.device) -> None:
        self._posted = []

    def _end_coalescing(self, device: torch.device) -> Together:
        posted, self._posted = self._posted, None
        return Together(posted or [])

    def batch_isend_irecv(self, kinds: list[str], tensors: list[Tensor], ranks: list[int]) -> Together:
        """What torch_npu calls for a batch on devices, or of a CANN, that have no coalescing."""
        posts = {"isend": self.send, "irecv": self.recv}
        each = zip(kinds, tensors, ranks, strict=True)
        return Together([posts[kind]([tensor], rank, 0) for kind, tensor, rank in each])

    def barrier(self, opts: Any = None) -> Finished:
        return self._run("barrier", dist.BarrierOptions())  # the given options may name an NPU


class Named:
    """The part of an overload that an Operator needs, for a collective."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema

    def __str__(self) -> str:
        return str(self._schema.name)


def method(name: str) -> Callable[..., Finished]:
    def run(self: GlooForHccl, *args: Any, **options: Any) -> Finished:
        return self._run(name, *args, *options.values())

    run.__name__ = name
    return run


for collective in COLLECTIVES:
    if collective != "barrier":
        setattr(GlooForHccl, collective, method(collective))
