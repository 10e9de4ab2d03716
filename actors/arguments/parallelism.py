"""The arguments of a model that runs on several devices."""

from __future__ import annotations

from actors.arguments.argument import Argument

__all__ = ["PARALLELISM_ARGUMENTS"]

PARALLELISM_ARGUMENTS: tuple[Argument, ...] = (
    Argument(
        name="tensor-parallel-size",
        aliases=("tp-size", "tp"),
        kind="int",
        default=1,
        minimum=1,
        maximum=64,
        group="Devices and kernels",
        metavar="N",
        help="Devices that run the model together, a worker process each: N NPUs or GPUs, or on the CPU N processes "
        "that share its cores. N must divide the model's attention heads, its inner dimension and its vocabulary.",
    ),
    Argument(
        name="dist-init-addr",
        aliases=("nccl-init-addr",),
        kind="str",
        default=None,
        default_text="a file in a private folder",
        group="Devices and kernels",
        metavar="HOST:PORT",
        help="Address where the workers of one model find each other, one of this machine. Anyone who reaches the port "
        "may disturb them: torch asks for no password. Without it no port is opened for this.",
    ),
)
