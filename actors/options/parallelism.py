"""The arguments of a model that runs on several devices."""

from __future__ import annotations

from typing import Annotated, Literal

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

    pipeline_parallel_size: Annotated[
        int,
        ArgumentSpec(
            group="Devices and kernels",
            aliases=("pp-size", "pp"),
            minimum=1,
            maximum=64,
            metavar="N",
            help="Number of stages that the model's layers are divided into, one after the other. Each stage takes "
            "--tensor-parallel-size devices, so a replica has the product of both. Stages run without captured "
            "graphs, and without speculative decoding.",
        ),
    ] = 1

    expert_parallel_size: Annotated[
        int,
        ArgumentSpec(
            group="Devices and kernels",
            aliases=("ep-size", "ep"),
            minimum=1,
            maximum=64,
            metavar="N",
            help="Number of parts that the experts of each layer are divided into, over the devices of "
            "--tensor-parallel-size, which N must divide. Each device loads its own experts alone; where several "
            "share a part, the inner dimension of its experts is divided over them. N must divide the number of "
            "experts.",
        ),
    ] = 1

    enable_expert_parallel: Annotated[
        bool,
        ArgumentSpec(
            group="Devices and kernels",
            help="Divide experts over all devices of --tensor-parallel-size: the same as --expert-parallel-size with "
            "its number.",
        ),
    ] = False
    pp_max_micro_batch_size: Annotated[
        int | None,
        ArgumentSpec(
            group="Devices and kernels",
            default_text="an equal part of the running requests",
            minimum=1,
            maximum=65536,
            metavar="N",
            help="Most requests that decode in a step of a pipeline; one prompt may run beside them. Each stage runs a "
            "step with other requests meanwhile.",
        ),
    ] = None

    pp_async_batch_depth: Annotated[
        int,
        ArgumentSpec(
            group="Devices and kernels",
            minimum=0,
            maximum=16,
            metavar="N",
            help="Steps of a pipeline that are sent ahead, beside one for each stage, so that no stage waits for the "
            "scheduler.",
        ),
    ] = 0

    data_parallel_size: Annotated[
        int,
        ArgumentSpec(
            group="Devices and kernels",
            aliases=("dp-size", "dp"),
            minimum=1,
            maximum=256,
            metavar="N",
            help="Number of replicas of the model behind this server, each with its own scheduler, cache and workers. "
            "Without --enable-dp-attention each takes --tensor-parallel-size devices for each stage, or on the CPU a "
            "share of the cores, and if the workers of one die, its requests go on in the others.",
        ),
    ] = 1

    enable_dp_attention: Annotated[
        bool,
        ArgumentSpec(
            group="Devices and kernels",
            help="Data-parallel attention: the --tensor-parallel-size devices run one model, whose attention and cache "
            "are divided into --data-parallel-size parts with requests of their own, while all devices share the "
            "layers of experts. For models of experts with few key heads or latent attention.",
        ),
    ] = False

    load_balance_method: Annotated[
        Literal["cache_aware", "total_tokens", "total_requests", "round_robin"],
        ArgumentSpec(
            group="Devices and kernels",
            help="How the replica of a request is chosen: the one that has seen most of its prefix unless it has much "
            "more to do than the others (cache_aware), the one with the fewest tokens or requests, or in turn.",
        ),
    ] = "cache_aware"

    prefill_round_robin_balance: Annotated[
        bool,
        ArgumentSpec(
            group="Devices and kernels",
            help="Give prompts to the replicas in turn: the same as --load-balance-method round_robin.",
        ),
    ] = False

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

    @property
    def expert_parts(self) -> int:
        """Parts that the experts of a layer are divided into."""
        return self.tensor_parallel_size if self.enable_expert_parallel else self.expert_parallel_size

    @property
    def replica_size(self) -> int:
        """Workers of one replica; with data-parallel attention, of one part of its attention."""
        if self.enable_dp_attention:
            return self.tensor_parallel_size // self.data_parallel_size
        return self.pipeline_parallel_size * self.tensor_parallel_size

    @property
    def workers(self) -> int:
        """Workers of all replicas, each with a device."""
        return self.data_parallel_size * self.replica_size
