"""Several devices, several nodes, split prefill and decode."""

from __future__ import annotations

from actors.arguments.refusal import Refusal, family

__all__ = ["PARALLELISM"]

_ONE = "leave it out or give 1; --tensor-parallel-size divides a model over several devices"
_OUT = "leave it out"

PARALLELISM: tuple[Refusal, ...] = (
    *family(
        "Parallelism",
        "every part of the model is divided over the same devices",
        _ONE,
        values={
            "attn-tp-size": 1,
            "moe-dense-tp-size dense-tp-size": 1,
            "moe-tp-size": 1,
            "world-size": 1,
            "nprocs-per-node": 1,
        },
    ),
    *family(
        "Parallelism",
        "pipeline parallelism is not built yet",
        _ONE,
        values={"pipeline-parallel-size pp-size pp": 1, "pp-max-micro-batch-size": None, "pp-async-batch-depth": 0},
    ),
    *family(
        "Parallelism",
        "data parallelism is not built yet",
        "leave it out or give 1; start several servers behind a load balancer",
        flags=("prefill-round-robin-balance", "enable-dp-attention", "enable-dp-lm-head", "dp-sampling"),
        values={"data-parallel-size dp-size dp": 1, "load-balance-method": "round_robin"},
    ),
    *family(
        "Parallelism",
        "expert parallelism is not built yet",
        _ONE,
        flags=(
            "enable-expert-parallel",
            "enable-eplb",
            "enable-expert-distribution-metrics",
            "enable-single-batch-overlap",
            "enable-two-batch-overlap",
        ),
        values={
            "expert-parallel-size ep-size ep": 1,
            "moe-a2a-backend all2all-backend": "none",
            "deepep-mode": "auto",
            "deepep-config": None,
            "ep-num-redundant-experts": 0,
            "ep-dispatch-algorithm": None,
            "init-expert-location": "trivial",
            "eplb-algorithm": "auto",
            "eplb-rebalance-layers-per-chunk": None,
            "eplb-min-rebalancing-utilization-threshold": 1.0,
            "expert-distribution-recorder-mode": None,
            "expert-distribution-recorder-buffer-size": None,
            "elastic-ep-backend": "none",
            "mooncake-ib-device": None,
            "tbo-token-distribution-threshold": 0.48,
        },
    ),
    *family(
        "Parallelism",
        "experts are run one way on each device, shared ones beside them",
        _OUT,
        flags=("enable-flashinfer-allreduce-fusion", "disable-shared-experts-fusion"),
        values={"moe-runner-backend moe-backend": "auto", "flashinfer-mxfp4-moe-precision": "default"},
    ),
    *family(
        "Parallelism",
        "serving on several nodes is not built yet",
        _OUT,
        values={
            "nnodes": 1,
            "node-rank": 0,
        },
    ),
    *family("Parallelism", "workers meet at one address", "use --dist-init-addr", values={"nccl-port": None}),
    *family(
        "Parallelism",
        "a collective that hangs ends within two thirds of the watchdog's time",
        "use --watchdog-timeout",
        values={"dist-timeout": None},
    ),
    *family(
        "Parallelism",
        "collectives are the device's own (HCCL, NCCL, gloo), by torch.distributed",
        "leave it out; kernels of collectives are not chosen",
        flags=(
            "enable-nccl-nvls",
            "enable-symm-mem",
            "enable-torch-symm-mem",
            "enable-mscclpp",
            "enable-p2p-check",
            "enable-allreduce-fusion",
            "enable-attn-tp-input-scattered",
            "enable-nsa-prefill-context-parallel",
            "disable-flashinfer-cutlass-moe-fp4-allgather",
        ),
        values={"comm-fusion-max-num-tokens": None},
    ),
    Refusal(
        name="disable-custom-all-reduce",
        is_flag=True,
        accepts=(True, False),
        group="Parallelism",
        reason="there is no custom all-reduce",
        remedy="leave it out",
    ),
    *family(
        "Disaggregation",
        "splitting prefill and decode between servers is not built yet",
        "leave it out: one server does both",
        flags=("disaggregation-decode-enable-offload-kvcache", "disaggregation-decode-enable-fake-auto"),
        values={
            "disaggregation-mode": "null",
            "disaggregation-transfer-backend": "mooncake",
            "disaggregation-bootstrap-port": 8998,
            "disaggregation-decode-tp": None,
            "disaggregation-decode-dp": None,
            "disaggregation-ib-device": None,
            "disaggregation-decode-polling-interval": 1,
            "num-reserved-decode-tokens": 512,
            "disaggregation-*": None,
        },
    ),
    *family(
        "Disaggregation",
        "splitting encoder and language model between servers is not built yet",
        _OUT,
        flags=("encoder-only", "language-only"),
        values={"encoder-transfer-backend": "zmq_to_scheduler"},
        lists=("encoder-urls",),
    ),
    *family(
        "Disaggregation",
        "multiplexing prefill and decode on parts of a device is not built yet",
        _OUT,
        flags=("enable-pdmux",),
        values={"pdmux-config-path": None, "sm-group-num": 8},
    ),
)
