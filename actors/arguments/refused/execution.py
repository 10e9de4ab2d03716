"""Kernels, graphs, cache tiers, memory tricks, and how the process runs."""

from __future__ import annotations

from actors.arguments.refusal import Refusal, family

__all__ = ["EXECUTION"]

_OUT = "leave it out"
_GRAPH = "Graphs"
_GRAPHS = "tools around graphs are not built yet"

EXECUTION: tuple[Refusal, ...] = (
    *family(
        "HTTP server",
        "a gRPC server is not built yet",
        "leave it out and use the HTTP API",
        flags=("grpc-mode",),
    ),
    *family(
        "Kernels",
        "kernels are chosen by the device",
        "leave it out; on an NPU --attention-backend chooses between two",
        flags=(
            "triton-attention-reduce-in-fp32",
            "flashinfer-mla-disable-ragged",
            "disable-flashinfer-autotune",
            "enable-fused-qk-norm-rope",
            "disable-chunked-prefix-cache",
            "enable-mla-l1-5-cache",
        ),
        values={
            "nsa-prefill-backend": "flashmla_sparse",
            "nsa-decode-backend": "fa3",
            "triton-attention-num-kv-splits": 8,
            "triton-attention-split-tile-size": None,
            "mla-chunk-multiplier": None,
        },
    ),
    *family(
        _GRAPH,
        _GRAPHS,
        "leave it out: steps run in whole graphs where the device has them",
        flags=(
            "enable-profile-cuda-graph",
            "enable-cudagraph-gc",
        ),
        values={"piecewise-cuda-graph-compiler": "eager"},
    ),
    *family(
        _GRAPH,
        "compiling the model is not built yet",
        _OUT,
        flags=("enable-torch-compile", "enable-torch-compile-debug-mode"),
        values={"torch-compile-max-bs": 32},
    ),
    *family(
        "Cache tiers",
        "a prefix cache beyond the device's memory is not built yet",
        "leave it out",
        flags=("enable-hierarchical-cache", "enable-lmcache"),
        values={
            "hicache-ratio": 2.0,
            "hicache-size": 0,
            "hicache-write-policy": "write_through",
            "hicache-io-backend": "kernel",
            "hicache-mem-layout": "layer_first",
            "hicache-storage-backend": None,
            "hicache-storage-prefetch-policy": "best_effort",
            "hicache-storage-backend-extra-config": None,
            "kvstore-*": None,
        },
    ),
    *family(
        "Cache tiers",
        "a cache of its own for sliding windows is not built yet",
        "leave it out",
        flags=("disable-hybrid-swa-memory",),
        values={"hybrid-kvcache-ratio": None, "swa-full-tokens-ratio": 0.8},
    ),
    *family(
        "Memory",
        "moving weights out of the device's memory is not built yet",
        "leave it out and choose a model that fits",
        flags=("enable-memory-saver", "enable-weights-cpu-backup", "enable-draft-weights-cpu-backup"),
        values={
            "cpu-offload-gb": 0,
            "offload-group-size": -1,
            "offload-num-in-group": 1,
            "offload-prefetch-step": 1,
            "offload-mode": "cpu",
            "kt-weight-path": None,
            "kt-method": "AMXINT4",
            "kt-cpuinfer": None,
            "kt-threadpool-count": 2,
            "kt-num-gpu-experts": None,
            "kt-max-deferred-experts-per-token": None,
        },
    ),
    Refusal(
        name="enable-mixed-chunk",
        is_flag=True,
        accepts=(True,),
        group="Scheduling",
        reason="steps that keep decodes and prompts apart are not built",
        remedy="leave it out or give true: decodes and chunks of prompts always share a step",
    ),
    *family(
        "Scheduling",
        "chunks that change their size are not built yet",
        "leave it out and set --chunked-prefill-size",
        flags=("enable-dynamic-chunking",),
    ),
    *family(
        "Scheduling",
        "the scheduler looks at new requests before every step",
        "leave it out or give 1",
        values={"num-continuous-decode-steps": 1, "scheduler-recv-interval": 1},
    ),
    Refusal(
        name="sleep-on-idle",
        is_flag=True,
        accepts=(True,),
        group="Runtime",
        reason="an idle engine always sleeps until a message comes",
        remedy="leave it out or give true",
    ),
    *family(
        "Runtime",
        "the library installs no signal handlers",
        "leave it out; embed the engine and handle signals in your program",
        values={"custom-sigquit-handler": None},
    ),
    *family("Runtime", "binding to NUMA nodes is not built yet", "use numactl", lists=("numa-node",)),
    *family(
        "Runtime",
        "results that equal those of a trainer are not built yet",
        "leave it out; --enable-deterministic-inference makes answers the same in every batch",
        values={"rl-on-policy-target": None},
    ),
)
