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
            "--tensor-parallel-size devices, so a replica has the product of both.",
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
            aliases=("enable-ep-moe",),
            help="Divide experts over all devices of --tensor-parallel-size: the same as --expert-parallel-size with "
            "its number.",
        ),
    ] = False

    enable_two_batch_overlap: Annotated[
        bool,
        ArgumentSpec(
            group="Devices and kernels",
            aliases=("enable-dbo",),
            help="Run steps that have prompts and at least 512 tokens as two micro-batches: one computes during the "
            "all-reduce of the other. For tensor parallelism over slow links; these steps use no captured graph.",
        ),
    ] = False

    tbo_token_distribution_threshold: Annotated[
        float,
        ArgumentSpec(
            group="Devices and kernels",
            minimum=0.0,
            maximum=0.5,
            metavar="SHARE",
            help="Least share of a step's tokens in each micro-batch of --enable-two-batch-overlap. Below it, a prompt "
            "is cut in two. 0: no prompt is cut.",
        ),
    ] = 0.48

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
            help="Number of replicas of the model in this server, each with its own scheduler, cache and workers. "
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

    moe_a2a_backend: Annotated[
        Literal["none", "deepep", "deepep_high_throughput", "deepep_low_latency"],
        ArgumentSpec(
            group="Devices and kernels",
            aliases=("all2all-backend",),
            synonyms={"naive": "none", "allgather_reducescatter": "none"},
            unbuilt_choices={
                "ascend_fuseep": "torch_npu has no operator that dispatches tokens, runs their experts and combines; "
                "use deepep",
            }
            | dict.fromkeys(
                ("mooncake", "pplx", "flashinfer", "flashinfer_all2allv"),
                "tokens travel by torch.distributed or the NPU's own operators; use deepep",
            ),
            help="How tokens of --enable-dp-attention reach their experts. none: an all-gather gives every device all "
            "tokens, and a reduce-scatter adds up the results. deepep: experts are divided over all devices, as by "
            "--enable-expert-parallel, and an all-to-all sends each token to the devices that have its experts; the "
            "deepep package is not needed. deepep_high_throughput, deepep_low_latency: deepep with --deepep-mode "
            "normal, low_latency.",
        ),
    ] = "none"

    deepep_mode: Annotated[
        Literal["auto", "normal", "low_latency"],
        ArgumentSpec(
            group="Devices and kernels",
            help="How --moe-a2a-backend deepep sends tokens. normal: first the number of tokens, for which the host "
            "waits, then the tokens. low_latency: each device reserves room for the tokens of all, so that no host "
            "waits. auto: low_latency in steps of at most 128 tokens a device, normal in others.",
        ),
    ] = "auto"

    enable_single_batch_overlap: Annotated[
        bool,
        ArgumentSpec(
            group="Devices and kernels",
            help="With --moe-a2a-backend deepep, run the shared expert of a layer during the all-to-all. For models "
            "that have a shared expert.",
        ),
    ] = False

    enable_nsa_prefill_context_parallel: Annotated[
        bool,
        ArgumentSpec(
            group="Devices and kernels",
            help="Context parallel prefill of sparse attention (DeepSeek V3.2, GLM-5, Mistral Large 4): the "
            "--tensor-parallel-size devices divide prompts by tokens instead of heads. Each device holds all attention "
            "weights.",
        ),
    ] = False

    enable_dp_lm_head: Annotated[
        bool,
        ArgumentSpec(
            group="Devices and kernels",
            help="Accepted because it always holds: each part of data-parallel attention computes the logits of its "
            "tokens only. Needs --enable-dp-attention.",
        ),
    ] = False

    dp_sampling: Annotated[
        bool,
        ArgumentSpec(
            group="Devices and kernels",
            help="Accepted because it always holds: each part of data-parallel attention samples its tokens. Needs "
            "--enable-dp-attention.",
        ),
    ] = False

    attn_tp_size: Annotated[
        int | None,
        ArgumentSpec(
            group="Devices and kernels",
            default_text="from --tensor-parallel-size",
            minimum=1,
            maximum=64,
            metavar="N",
            help="Number of devices that attention is divided over. It must be --tensor-parallel-size, or that "
            "divided by --data-parallel-size with --enable-dp-attention, or 1 with "
            "--enable-nsa-prefill-context-parallel.",
        ),
    ] = None

    moe_dense_tp_size: Annotated[
        int | None,
        ArgumentSpec(
            group="Devices and kernels",
            aliases=("dense-tp-size",),
            default_text="from --tensor-parallel-size",
            minimum=1,
            maximum=64,
            metavar="N",
            help="Number of devices that the dense feed-forward layers of a model of experts are divided over. 1: each "
            "device has them whole, so no sum over devices follows them, and their inner dimension need not be "
            "divisible. Otherwise it must be --tensor-parallel-size, or that divided by --data-parallel-size with "
            "--enable-dp-attention.",
        ),
    ] = None

    moe_tp_size: Annotated[
        int | None,
        ArgumentSpec(
            group="Devices and kernels",
            default_text="--tensor-parallel-size / --expert-parallel-size",
            minimum=1,
            maximum=64,
            metavar="N",
            help="Number of devices that each expert is divided over. It must be --tensor-parallel-size divided by "
            "--expert-parallel-size.",
        ),
    ] = None

    world_size: Annotated[
        int | None,
        ArgumentSpec(
            group="Devices and kernels",
            default_text="from the other sizes",
            minimum=1,
            maximum=65536,
            metavar="N",
            help="Number of workers on all nodes. It must be the number that the other sizes give.",
        ),
    ] = None

    nprocs_per_node: Annotated[
        int | None,
        ArgumentSpec(
            group="Devices and kernels",
            default_text="--world-size / --nnodes",
            minimum=1,
            maximum=65536,
            metavar="N",
            help="Number of workers on each node. It must be the number of all workers divided by --nnodes.",
        ),
    ] = None

    load_balance_method: Annotated[
        Literal["cache_aware", "total_tokens", "total_requests", "round_robin"],
        ArgumentSpec(
            group="Devices and kernels",
            synonyms={"auto": "cache_aware", "shortest_queue": "total_requests", "minimum_tokens": "total_tokens"},
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
            help="Rendezvous address of the workers, on this machine. The port has no authentication: keep it private. "
            "Without this option no port is opened. With --nnodes: an address of node 0 that the other nodes connect "
            "to, the same on every node.",
        ),
    ] = None

    nnodes: Annotated[
        int,
        ArgumentSpec(
            group="Devices and kernels",
            minimum=1,
            maximum=64,
            metavar="N",
            help="Number of machines that run one model or its replicas, each with an equal share of all workers. "
            "Start the same command on each, with its own --node-rank. All need the same TROUPE_CLUSTER_SECRET in "
            "their environment, and the model at the same path.",
        ),
    ] = 1

    node_rank: Annotated[
        int,
        ArgumentSpec(
            group="Devices and kernels",
            minimum=0,
            maximum=63,
            metavar="N",
            help="Rank of this machine, from 0 to --nnodes - 1. Node 0 runs the HTTP server and the scheduler; the "
            "others only run workers, and exit when node 0 does.",
        ),
    ] = 0

    nccl_port: Annotated[
        int | None,
        ArgumentSpec(
            group="Devices and kernels",
            default_text="that of --dist-init-addr plus 1",
            minimum=1,
            maximum=65535,
            metavar="PORT",
            help="Port at which the workers of several nodes form their process group, on the host of "
            "--dist-init-addr; replica r of several takes this port plus r, on the host of its rank 0. With one node: "
            "a port of 127.0.0.1, instead of --dist-init-addr.",
        ),
    ] = None

    dist_timeout: Annotated[
        int | None,
        ArgumentSpec(
            group="Devices and kernels",
            default_text="300, and for a collective two thirds of --watchdog-timeout",
            minimum=1,
            maximum=86400,
            metavar="SECONDS",
            help="Seconds that a worker waits for the others to form the process group or to join a collective, and "
            "that a node tries to reach node 0.",
        ),
    ] = None

    cluster: Annotated[
        Literal["ray"] | None,
        ArgumentSpec(
            group="Devices and kernels",
            default_text="none",
            help="Let a Ray cluster, which this machine belongs to, start the other nodes of --nnodes, each on a "
            "machine of its own, and on another one if a machine is lost. Without it, start the same command on each. "
            'Needs pip install -e ".[cluster]".',
        ),
    ] = None

    @property
    def rendezvous(self) -> str | None:
        """host:port where the workers form their process group; None: a file in a private folder. Replica ``r`` of
        several takes the port plus ``r``, on the host of its rank 0."""
        if self.dist_init_addr is None:
            return None if self.nccl_port is None else f"127.0.0.1:{self.nccl_port}"
        if self.nnodes == 1:
            return self.dist_init_addr
        host, _, port = self.dist_init_addr.rpartition(":")
        return f"{host}:{self.nccl_port or int(port) + 1}"

    @property
    def node_workers(self) -> int:
        """Workers of each node."""
        return self.workers // self.nnodes

    def node_of(self, worker: int) -> int:
        """The node of the worker of this number."""
        return worker // self.node_workers

    @property
    def layout(self) -> str:
        """The sizes of each kind of parallelism; equal on all nodes."""
        kind = "--dp-size (attention)" if self.enable_dp_attention else "--dp-size"
        return (
            f"--tp-size {self.tensor_parallel_size}, --pp-size {self.pipeline_parallel_size}, "
            f"{kind} {self.data_parallel_size}"
        )

    @property
    def expert_parts(self) -> int:
        """Parts that the experts of a layer are divided into."""
        divided = self.enable_expert_parallel or self.moe_a2a_backend != "none"
        return self.tensor_parallel_size if divided else self.expert_parallel_size

    @property
    def has_whole_dense(self) -> bool:
        """Whether devices that divide attention have dense feed-forward layers whole."""
        parts = self.data_parallel_size if self.enable_dp_attention else 1
        return self.moe_dense_tp_size == 1 and self.tensor_parallel_size > parts

    @property
    def exchange_mode(self) -> Literal["auto", "normal", "low_latency"] | None:
        """How tokens travel to their experts; None: all devices get all."""
        if self.moe_a2a_backend == "none":
            return None
        if self.moe_a2a_backend == "deepep":
            return self.deepep_mode
        return "low_latency" if self.moe_a2a_backend == "deepep_low_latency" else "normal"

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
