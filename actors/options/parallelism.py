"""The arguments of a model that runs on several devices."""

from __future__ import annotations

from typing import Annotated

from actors.options.declaration import ArgumentSpec
from actors.options.devices import DeviceArguments

__all__ = ["ParallelismArguments"]


class ParallelismArguments(DeviceArguments, frozen=True, kw_only=True):
    """The arguments of a model that runs on several devices."""

    tensor_parallel_size: Annotated[
        int,
        ArgumentSpec(
            group="Devices and kernels",
            aliases=("tp-size", "tp"),
            minimum=1,
            maximum=64,
            metavar="N",
            help="Number of devices that run the model together, each with a worker process: N NPUs or GPUs, or on "
            "the CPU N processes that share its cores. N must divide the model's attention heads, its inner "
            "dimension and its vocabulary.",
        ),
    ] = 1

    dist_init_addr: Annotated[
        str | None,
        ArgumentSpec(
            group="Devices and kernels",
            aliases=("nccl-init-addr",),
            default_text="a file in a private folder",
            metavar="HOST:PORT",
            help="Rendezvous address of the workers, on this machine. The port has no authentication, so let no "
            "one else reach it. Without this option no port is opened.",
        ),
    ] = None
