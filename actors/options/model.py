"""The arguments of the model, its dtypes and its tokenizer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from actors.options.declaration import ArgumentSpec

__all__ = ["ModelArguments"]

_FORMATS = "only safetensors and GGUF weights are supported; convert the checkpoint to safetensors"


class ModelArguments(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of the model, its dtypes and its tokenizer."""

    model_path: Annotated[
        str | None,
        ArgumentSpec(
            group="Model and tokenizer",
            aliases=("model",),
            default_text="the included model",
            metavar="MODEL",
            help="Directory of a Hugging Face model (config.json, safetensors, tokenizer.json), a .gguf file, or a "
            "repository id on the Hugging Face hub. May also be the first argument, without its name.",
        ),
    ] = None

    tokenizer_path: Annotated[
        str | None,
        ArgumentSpec(
            group="Model and tokenizer",
            aliases=("tokenizer",),
            default_text="the model's own",
            metavar="PATH",
            help="Directory, .gguf file or repository id of the tokenizer, if it differs from the model's.",
        ),
    ] = None

    tokenizer_mode: Annotated[
        Literal["auto", "slow"],
        ArgumentSpec(
            group="Model and tokenizer",
            unbuilt_choices={
                "hf": "use auto, or slow for the files beside tokenizer.json",
                "mistral": "tokenizers of mistral-common are not supported; use auto with a tokenizer.json",
                "custom": "use auto, with --trust-remote-code for a tokenizer with code of its own",
                "*": "the tokenizer is that of the model's files; use auto, or slow to ignore tokenizer.json",
            },
            help="auto reads tokenizer.json. slow ignores it, for models whose tokenizer.json is wrong: transformers "
            "builds the tokenizer from other files, such as vocab.json and merges.txt or tokenizer.model, which "
            "takes seconds. auto does the same without a tokenizer.json.",
        ),
    ] = "auto"

    tokenizer_worker_num: Annotated[
        int,
        ArgumentSpec(
            group="Model and tokenizer",
            minimum=1,
            maximum=64,
            help="Number of tokenizer threads, which encode prompts in parallel. As many processes render chat "
            "templates, at most four.",
        ),
    ] = 1

    skip_tokenizer_init: Annotated[
        bool,
        ArgumentSpec(
            group="Model and tokenizer",
            help="Load no tokenizer: prompts must be token ids, and answers contain token ids instead of text.",
        ),
    ] = False

    model_impl: Annotated[
        Literal["auto", "native", "transformers"],
        ArgumentSpec(
            group="Model and tokenizer",
            synonyms={"sglang": "native", "troupe": "native", "vllm": "native"},
            unbuilt_choices={
                "mindspore": "models of MindSpore are not supported; use auto",
                "terratorch": "models of TerraTorch are not supported; use auto",
            },
            help="Whose code runs the model. native: a family of this engine. transformers: the modeling code of "
            "transformers, over the paged cache and with the engine's attention, sampler and scheduler; no step is "
            "captured, so it is slower. auto: native if there is a family for the architecture, else transformers. "
            "The worker logs which.",
        ),
    ] = "auto"

    trust_remote_code: Annotated[
        bool,
        ArgumentSpec(
            group="Model and tokenizer",
            help="Let Python files of the model's directory (auto_map of config.json) run in worker processes, and in "
            "the one that converts a tokenizer. They can do all that this user can: read them first, and pin "
            "--revision.",
        ),
    ] = False

    load_format: Annotated[
        Literal["auto", "safetensors", "gguf", "dummy"],
        ArgumentSpec(
            group="Model and tokenizer",
            unbuilt_choices={
                "pt": _FORMATS,
                "npcache": _FORMATS,
                "bitsandbytes": "leave it out: checkpoints of bitsandbytes are recognized",
                "*": "only the engine's own readers of safetensors and GGUF are built; use auto",
            },
            help="auto reads *.safetensors of a directory, or a .gguf file; safetensors and gguf require that "
            "format; dummy fills the weights with seeded noise, for benchmarks.",
        ),
    ] = "auto"

    context_length: Annotated[
        int | None,
        ArgumentSpec(
            group="Model and tokenizer",
            aliases=("max-model-len",),
            default_text="the model's own",
            minimum=2,
            maximum=16_777_216,
            metavar="TOKENS",
            help="The longest sequence, prompt and output together, in tokens.",
        ),
    ] = None

    revision: Annotated[
        str | None,
        ArgumentSpec(
            group="Model and tokenizer",
            default_text="the hub's main branch",
            help="Branch, tag or commit of the model on the Hugging Face hub. Pin a commit in production.",
        ),
    ] = None

    download_dir: Annotated[
        str | None,
        ArgumentSpec(
            group="Model and tokenizer",
            default_text="the Hugging Face cache",
            metavar="DIR",
            help="Directory for models from the hub.",
        ),
    ] = None

    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        ArgumentSpec(
            group="Model and tokenizer",
            synonyms={"float": "float32", "fp32": "float32", "bf16": "bfloat16", "half": "float16", "fp16": "float16"},
            help="Type of weights and activations; auto uses that of the model's config.json if the device supports "
            "it.",
        ),
    ] = "auto"

    json_model_override_args: Annotated[
        dict[str, Any],
        ArgumentSpec(
            group="Model and tokenizer",
            aliases=("hf-overrides",),
            metavar="JSON",
            help="JSON object that overrides the model's config.json; nested objects are merged.",
        ),
    ] = {}

    disable_hybrid_swa_memory: Annotated[
        bool,
        ArgumentSpec(
            group="Model and tokenizer",
            aliases=("disable-hybrid-kv-cache-manager",),
            help="Keep all tokens in layers that see a sliding window. Else they keep the window alone, where that "
            "halves the cache of a sequence of the full context length at least, and decode steps are captured on "
            "NVIDIA GPUs alone.",
        ),
    ] = False

    preferred_sampling_params: Annotated[
        dict[str, Any],
        ArgumentSpec(
            group="Model and tokenizer",
            aliases=("override-generation-config",),
            metavar="JSON",
            help="JSON object of sampling parameters for requests that leave them out: temperature, top_p, top_k, "
            "min_p, repetition_penalty, frequency_penalty, presence_penalty. They override --sampling-defaults.",
        ),
    ] = {}
