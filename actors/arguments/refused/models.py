"""Model features, quantization, adapters, parsers and grammars."""

from __future__ import annotations

from actors.arguments.refusal import Refusal, family

__all__ = ["MODELS"]

_OUT = "leave it out"

MODELS: tuple[Refusal, ...] = (
    *family(
        "Model and tokenizer",
        "no code from a model repository is ever run here",
        "leave it out; supported architectures need none",
        flags=("trust-remote-code",),
    ),
    *family(
        "Model and tokenizer",
        "embedding models are not built yet",
        "leave it out and serve a generative model",
        flags=("is-embedding",),
    ),
    *family(
        "Multimodal",
        "multimodal input is not built yet",
        "leave it out and send text",
        flags=(
            "enable-multimodal",
            "enable-broadcast-mm-inputs-process",
            "mm-enable-dp-encoder",
            "enable-prefix-mm-cache",
            "disable-fast-image-processor",
            "keep-mm-feature-on-device",
        ),
        values={
            "mm-attention-backend": None,
            "mm-max-concurrent-calls": 32,
            "mm-per-request-timeout": 10.0,
            "mm-process-config": None,
            "limit-mm-data-per-request": None,
        },
    ),
    *family(
        "Quantization",
        "this way to quantize is not built",
        "leave it out; --quantization int8 or fp8 rounds weights while they are loaded",
        flags=("quantize-and-serve",),
        values={
            "modelopt-quant": None,
            "modelopt-checkpoint-restore-path": None,
            "modelopt-checkpoint-save-path": None,
            "modelopt-export-path": None,
            "rl-quant-profile": None,
            "torchao-config": "",
            "fp8-gemm-backend": "auto",
        },
    ),
    *family(
        "LoRA",
        "LoRA adapters are not built yet",
        "merge the adapter into the weights and serve the result",
        flags=("enable-lora",),
        values={
            "max-lora-rank": None,
            "max-loras-per-batch": 8,
            "max-loaded-loras": None,
            "lora-eviction-policy": "lru",
            "lora-backend": "triton",
            "max-lora-chunk-size": 16,
        },
        lists=("lora-target-modules", "lora-paths"),
    ),
    *family(
        "API",
        "reasoning parsers are not built yet",
        "leave it out; reasoning stays in the answer's text",
        values={"reasoning-parser": None},
    ),
    *family("API", "built-in tools are not built yet", _OUT, values={"tool-server": None}),
    *family(
        "API",
        "scoring of several items in one prompt is not built yet",
        _OUT,
        values={"multi-item-scoring-delimiter": None},
    ),
    *family(
        "API",
        "code that a client sends is never run here",
        "leave it out and use the sampling parameters",
        flags=("enable-custom-logit-processor",),
    ),
    *family(
        "API",
        "returning inner states of the model is not built yet",
        _OUT,
        flags=("enable-return-hidden-states", "enable-return-routed-experts"),
    ),
    *family(
        "Grammar",
        "answers bound to a grammar are not built yet",
        _OUT,
        flags=("constrained-json-disable-any-whitespace", "disable-outlines-disk-cache"),
        values={"grammar-backend": "none", "constrained-json-whitespace-pattern": None},
    ),
    *family(
        "Speculative decoding",
        "experts are run one way on each device, those of a draft too",
        _OUT,
        values={
            "speculative-moe-runner-backend draft-moe-backend": "auto",
            "speculative-moe-a2a-backend": "none",
        },
    ),
    *family(
        "Model and tokenizer",
        "state-space models are not built yet",
        _OUT,
        values={
            "max-mamba-cache-size": None,
            "mamba-ssm-dtype": "float32",
            "mamba-full-memory-ratio": 0.2,
            "mamba-scheduler-strategy": "auto",
            "mamba-track-interval": 256,
        },
    ),
    *family(
        "Model and tokenizer",
        "sparse attention over chosen channels is not built",
        _OUT,
        flags=("enable-double-sparsity",),
        values={
            "ds-channel-config-path": None,
            "ds-heavy-channel-num": 32,
            "ds-heavy-token-num": 256,
            "ds-heavy-channel-type": "qk",
            "ds-sparse-decode-threshold": 4096,
        },
    ),
    Refusal(
        name="model-impl",
        accepts=("auto", "troupe"),
        group="Model and tokenizer",
        reason="models run on the engine's own code",
        remedy="leave it out or give auto",
    ),
    *family(
        "Weight loading",
        "the engine's loaders have no options",
        "leave it out or give {}",
        values={"model-loader-extra-config": "{}"},
    ),
    *family(
        "Weight loading",
        "weights are read by the engine's own readers of safetensors and GGUF",
        "leave it out and give the weights as safetensors or as a .gguf file",
        flags=(
            "checkpoint-engine-wait-weights-before-ready",
            "weight-loader-disable-mmap",
            "remote-instance-weight-loader-start-seed-via-transfer-engine",
            "delete-ckpt-after-loading",
        ),
        values={
            "remote-instance-weight-loader-seed-instance-ip": None,
            "remote-instance-weight-loader-seed-instance-service-port": None,
            "remote-instance-weight-loader-send-weights-group-ports": None,
            "remote-instance-weight-loader-backend": "nccl",
        },
        lists=("custom-weight-loader",),
    ),
    *family(
        "Weight loading",
        "encrypted checkpoints are not built",
        "decrypt the model directory first",
        values={"decrypted-config-file": None, "decrypted-draft-config-file": None},
    ),
)
