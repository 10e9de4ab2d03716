"""Arguments of ``vllm serve`` that have no counterpart here, or one of another name or kind."""

from __future__ import annotations

from actors.arguments.refusal import Refusal, family

__all__ = ["VLLM"]

_OUT = "leave it out"


def _always(group: str, reason: str, remedy: str, *names: str) -> tuple[Refusal, ...]:
    """Flags that ask for what is always so: true is accepted."""
    return tuple(
        Refusal(name=name, is_flag=True, accepts=(True,), group=group, reason=reason, remedy=remedy) for name in names
    )


VLLM: tuple[Refusal, ...] = (
    # -- the HTTP server
    *family(
        "HTTP server",
        "this server does not speak TLS",
        "let a proxy in front of it end TLS, and say --root-path if it serves below a path",
        flags=("enable-ssl-refresh",),
        values={
            "ssl-keyfile": None,
            "ssl-certfile": None,
            "ssl-ca-certs": None,
            "ssl-cert-reqs": 0,
            "ssl-ciphers": None,
            "ssl-*": None,
        },
    ),
    *family(
        "HTTP server",
        "code is not loaded into the server by name",
        "embed the engine, or put a proxy in front",
        values={
            "middleware": "[]",
            "logits-processors": None,
            "logits-processor-pattern": None,
            "io-processor-plugin": None,
            "tool-parser-plugin": "",
            "reasoning-parser-plugin": "",
            "worker-cls": "auto",
            "worker-extension-cls": "",
            "scheduler-cls": None,
        },
    ),
    *family("HTTP server", "Unix sockets are not listened on", "use --host 127.0.0.1", values={"uds": None}),
    *family(
        "HTTP server",
        "the bounds of a request's head are fixed",
        _OUT,
        values={"h11-max-incomplete-event-size": None, "h11-max-header-count": None},
    ),
    *family(
        "HTTP server",
        "the API's description is part of the server",
        "leave it out; --disable-page turns off the live page",
        flags=("disable-fastapi-docs", "enable-offline-docs"),
    ),
    *_always("HTTP server", "every answer has an x-request-id", "leave it out", "enable-request-id-headers"),
    *_always("HTTP server", "GET /v1/loads always tells the load", "leave it out", "enable-server-load-tracking"),
    *_always("HTTP server", "there is one server process", "leave it out", "disable-frontend-multiprocessing"),
    # -- the API
    *_always(
        "API",
        "tools of a request are offered and read without a flag",
        "leave it out, or say --tool-call-parser off to leave calls in the text",
        "enable-auto-tool-choice",
    ),
    *family(
        "API",
        "tools are shown to the model whatever tool_choice is",
        "send no tools instead",
        flags=("exclude-tools-when-tool-choice-none",),
    ),
    Refusal(
        name="response-role",
        accepts=(None, "assistant"),
        group="API",
        reason="answers have the role assistant",
        remedy="leave it out",
    ),
    Refusal(
        name="chat-template-content-format",
        accepts=("auto", "string"),
        group="API",
        reason="templates get a message's text, its parts put together",
        remedy="leave it out or give string",
    ),
    *family(
        "API",
        "this is asked for by each request",
        "leave it out and send chat_template_kwargs",
        values={"default-chat-template-kwargs": None},
    ),
    *family(
        "API",
        "this is asked for by each request",
        "leave it out and send return_tokens_as_token_ids",
        flags=("return-tokens-as-token-ids",),
    ),
    *family(
        "API",
        "this is asked for by each request",
        "leave it out and send stream_options.include_usage",
        flags=("enable-force-include-usage",),
    ),
    *family(
        "API",
        "what an answer tells of itself is fixed",
        "leave it out; --enable-cache-report adds the cached tokens, --weight-version changes system_fingerprint",
        flags=("enable-per-request-metrics", "enable-tokenizer-info-endpoint", "tokens-only"),
        values={"fingerprint-mode": None, "fingerprint-value": None},
    ),
    *family(
        "API",
        "a request may ask for the log-probabilities of 20 tokens, in one form",
        _OUT,
        values={"max-logprobs": 20, "logprobs-mode": None},
    ),
    *family(
        "API",
        "embeddings as prompts are not built yet",
        "send text or token ids",
        flags=("enable-prompt-embeds",),
    ),
    # -- grammars, reasoning
    *family(
        "Grammar",
        "answers bound to a grammar are not built yet",
        _OUT,
        flags=(
            "guided-decoding-disable-fallback",
            "guided-decoding-disable-any-whitespace",
            "guided-decoding-disable-additional-properties",
        ),
        values={"guided-decoding-backend": "auto", "structured-outputs-config": None},
    ),
    *family(
        "API",
        "reasoning parsers are not built yet",
        "leave it out; reasoning stays in the answer's text",
        flags=("enable-reasoning",),
        values={"reasoning-config": None},
    ),
    # -- the model
    *family(
        "Model and tokenizer",
        "models that generate text are served",
        "leave it out or give generate",
        values={"pooler-config override-pooler-config": None},
    ),
    *(
        Refusal(
            name=name,
            accepts=("auto", other),
            group="Model and tokenizer",
            reason="models that generate text are served, as they are",
            remedy=f"leave it out or give {other}",
        )
        for name, other in (("runner", "generate"), ("task", "generate"), ("convert", "none"))
    ),
    *family(
        "Model and tokenizer",
        "a model has one directory",
        "leave it out; --tokenizer-path may name another one for the tokenizer, as it is on disk",
        values={
            "hf-config-path": None,
            "tokenizer-revision": None,
            "config-format": "auto",
            "ignore-patterns": None,
        },
    ),
    *family(
        "Model and tokenizer",
        "a secret in a command line shows in the list of processes",
        "set the environment variable HF_TOKEN",
        values={"hf-token": None},
    ),
    *family(
        "Model and tokenizer",
        "no code from a model repository is ever run here",
        "leave it out; supported architectures need none",
        values={"code-revision": None},
    ),
    *family(
        "Model and tokenizer",
        "config.json has it",
        "lay it over with --json-model-override-args, such as '{\"rope_theta\": 1000000}'",
        values={
            "rope-scaling": None,
            "rope-theta": None,
            "override-attention-dtype": None,
            "override-neuron-config": None,
        },
    ),
    *family(
        "Model and tokenizer",
        "a model's sliding windows are always kept",
        _OUT,
        flags=("disable-sliding-window",),
    ),
    *family(
        "Weight loading",
        "how weights are read is not chosen",
        "leave it out; weights are mapped into memory and copied tensor by tensor",
        values={
            "safetensors-load-strategy": "lazy",
            "pt-load-map-location": "cpu",
            "max-parallel-loading-workers": None,
            "qlora-adapter-name-or-path": None,
            "weight-transfer-config": None,
        },
    ),
    *_always("Weight loading", "loading always reports its progress", "leave it out", "use-tqdm-on-load"),
    *family(
        "LoRA",
        "LoRA adapters are not built yet",
        "merge the adapter into the weights and serve the result",
        flags=("enable-lora-bias", "fully-sharded-loras", "enable-prompt-adapter"),
        values={
            "max-loras": None,
            "max-cpu-loras": None,
            "lora-dtype": "auto",
            "lora-extra-vocab-size": None,
            "default-mm-loras": None,
            "long-lora-scaling-factors": None,
            "max-prompt-adapters": None,
            "max-prompt-adapter-token": None,
        },
        lists=("lora-modules", "prompt-adapters"),
    ),
    *family(
        "Multimodal",
        "multimodal input is not built yet",
        "leave it out and send text",
        flags=(
            "enable-mm-embeds",
            "disable-mm-preprocessor-cache",
            "interleave-mm-strings",
            "skip-mm-profiling",
            "disable-chunked-mm-input",
            "enable-multimodal-encoder-data-parallel",
        ),
        values={
            "limit-mm-per-prompt": None,
            "media-io-kwargs": None,
            "mm-processor-kwargs": None,
            "mm-processor-cache-gb": None,
            "mm-encoder-tp-mode": None,
            "mm-encoder-attn-backend": None,
            "video-pruning-rate": None,
            "allowed-local-media-path": "",
        },
        lists=("allowed-media-domains",),
    ),
    *_always("Multimodal", "only text is read", "leave it out", "language-model-only"),
    # -- memory and scheduling
    *family(
        "Memory",
        "nothing is swapped to the host: a preempted sequence is computed again",
        "leave it out or give 0",
        values={"swap-space": 0, "kv-offloading-size": 0, "kv-offloading-backend": None},
    ),
    Refusal(
        name="preemption-mode",
        accepts=(None, "recompute"),
        group="Memory",
        reason="a preempted sequence is computed again",
        remedy="leave it out or give recompute",
    ),
    *family(
        "Memory",
        "the cache's size is given in tokens, or as a part of the memory",
        "use --max-total-tokens (blocks times --block-size) or --gpu-memory-utilization",
        values={"num-gpu-blocks-override": None, "kv-cache-memory-bytes": None},
    ),
    *family(
        "Memory",
        "the key-value cache has one layout, for all layers",
        _OUT,
        flags=("kv-sharing-fast-prefill", "kv-cache-metrics"),
        values={"prefix-caching-hash-algo": None},
    ),
    *_always("Memory", "all layers share one cache", "leave it out", "disable-hybrid-kv-cache-manager"),
    *_always("Memory", "there is one block manager", "leave it out", "use-v2-block-manager"),
    *family(
        "Quantization",
        "scales of the cache are found token by token, or given by a file",
        "leave it out; see --kv-cache-quant-method and --quantization-param-path",
        flags=("calculate-kv-scales",),
    ),
    *family(
        "Model and tokenizer",
        "state-space models are not built yet",
        _OUT,
        values={
            "mamba-cache-dtype": "auto",
            "mamba-ssm-cache-dtype": "auto",
            "mamba-block-size": None,
            "mamba-cache-mode": None,
        },
    ),
    *_always(
        "Scheduling",
        "prompts are cut into chunks by a size",
        "leave it out, or say --chunked-prefill-size -1 for whole prompts",
        "enable-chunked-prefill",
    ),
    Refusal(
        name="scheduling-policy",
        accepts=("fcfs",),
        group="Scheduling",
        reason="priorities have a flag of their own",
        remedy="use --enable-priority-scheduling; --schedule-policy chooses between fcfs and lpm",
    ),
    *family(
        "Scheduling",
        "the scheduler plans every step anew",
        "leave it out; --prefill-max-requests bounds the prompts of a step, --chunked-prefill-size its tokens",
        flags=("multi-step-stream-outputs", "scheduler-reserve-full-isl"),
        values={
            "num-scheduler-steps": 1,
            "scheduler-delay-factor": 0,
            "num-lookahead-slots": 0,
            "max-num-partial-prefills": None,
            "max-long-partial-prefills": None,
            "long-prefill-token-threshold": 0,
        },
    ),
    # -- devices
    *family(
        "Graphs",
        "compiling the model is not built yet",
        "leave it out; --cuda-graph-bs and --enforce-eager are about graphs",
        values={
            "compilation-config": None,
            "optimization-level": None,
            "performance-mode": None,
            "additional-config": None,
        },
    ),
    *family(
        "Graphs",
        "graphs are for numbers of sequences, whatever their lengths",
        "leave it out; see --cuda-graph-max-bs",
        flags=("cudagraph-metrics",),
        values={"max-seq-len-to-capture": None},
    ),
    *family(
        "Kernels",
        "kernels are chosen by the device",
        _OUT,
        flags=("enable-flashinfer-autotune",),
        values={"attention-config": None},
    ),
    *_always("Kernels", "there is no cascade attention", "leave it out", "disable-cascade-attn"),
    *_always("Devices", "NVML is not used", "leave it out", "disable-nvml"),
    Refusal(
        name="distributed-executor-backend",
        accepts=("mp",),
        group="Parallelism",
        reason="each device has a worker process on this machine",
        remedy="leave it out or give mp",
    ),
    *family(
        "Parallelism",
        "serving on several nodes is not built yet",
        _OUT,
        flags=("headless", "ray-workers-use-nsight", "engine-use-ray", "worker-use-ray"),
        values={"master-addr": None, "master-port": None},
    ),
    *family(
        "Parallelism",
        "data parallelism is not built yet",
        "leave it out; start several servers behind a load balancer",
        flags=("data-parallel-hybrid-lb", "data-parallel-external-lb"),
        values={
            "api-server-count": 1,
            "data-parallel-rank": None,
            "data-parallel-start-rank": None,
            "data-parallel-size-local": None,
            "data-parallel-address": None,
            "data-parallel-rpc-port": None,
            "data-parallel-backend": "mp",
            "data-parallel-*": None,
        },
    ),
    *family(
        "Parallelism",
        "contexts are not divided over devices",
        "leave it out or give 1; --tensor-parallel-size divides a model over several devices",
        flags=("enable-dbo",),
        values={
            "decode-context-parallel-size": 1,
            "prefill-context-parallel-size": 1,
            "dbo-decode-token-threshold": None,
            "dbo-prefill-token-threshold": None,
        },
    ),
    *family(
        "Parallelism",
        "expert parallelism is not built yet",
        _OUT,
        values={"eplb-config": None, "num-redundant-experts": 0, "expert-placement-strategy": "linear"},
    ),
    *family(
        "Disaggregation",
        "splitting prefill and decode between servers is not built yet",
        "leave it out: one server does both",
        values={"kv-transfer-config": None, "ec-transfer-config": None},
    ),
    # -- speculative decoding of older releases
    *family(
        "Speculative decoding",
        "speculation is asked for by its algorithm",
        'use --speculative-config \'{"method": "ngram", "num_speculative_tokens": 4}\', or the arguments of this group',
        values={
            "speculative-model": None,
            "num-speculative-tokens": None,
            "ngram-prompt-lookup-max": None,
            "ngram-prompt-lookup-min": None,
            "spec-decoding-acceptance-method": "rejection_sampler",
            "typical-acceptance-sampler-posterior-threshold": None,
        },
    ),
    *family(
        "Speculative decoding",
        "drafts follow the model they draft for",
        "leave it out; --speculative-adaptive drafts less where it does not pay",
        flags=("disable-logprobs-during-spec-decoding", "speculative-disable-mqa-scorer"),
        values={
            "speculative-draft-tensor-parallel-size": None,
            "speculative-max-model-len": None,
            "speculative-disable-by-batch-size": None,
        },
    ),
    # -- logs, metrics, traces
    *_always(
        "Logging",
        "the load is logged only where an interval is given",
        "leave it out, and use --decode-log-interval to log it",
        "disable-log-stats",
    ),
    *family(
        "Logging",
        "logs of requests have levels",
        "use --log-requests with --log-requests-level: 2 logs up to 2048 characters of input and output, 3 all of them",
        flags=("enable-log-outputs", "enable-log-deltas", "log-error-stack"),
        values={"max-log-len": None},
    ),
    *family(
        "Logging",
        "logs are set up by arguments",
        "use --log-level, --log-level-http, --log-format",
        flags=("aggregate-engine-logging", "enable-logging-iteration-details"),
        values={"log-config-file": None},
    ),
    *family(
        "Logging",
        "the access log is part of the HTTP server's log",
        "use --log-level-http warning",
        flags=("disable-uvicorn-access-log",),
    ),
    *family(
        "Metrics",
        "there are no hidden metrics",
        _OUT,
        flags=("enable-mfu-metrics",),
        values={"show-hidden-metrics-for-version": None},
    ),
    *family(
        "Tracing",
        "traces have levels",
        "use --enable-trace with --trace-level 3",
        values={"collect-detailed-traces": None},
    ),
    # -- the process
    *family(
        "Runtime",
        "this server does not sleep with its model loaded",
        _OUT,
        flags=("enable-sleep-mode",),
    ),
    *family(
        "Tokenizer batching",
        "tokenizers have no pool",
        "use --tokenizer-worker-num",
        values={"tokenizer-pool-size": 0, "tokenizer-pool-type": None, "tokenizer-pool-extra-config": None},
    ),
)
