"""The arguments of the model, its numbers and its tokenizer."""

from __future__ import annotations

from actors.arguments.argument import Argument

__all__ = ["MODEL_ARGUMENTS"]

_FORMATS = "only safetensors and GGUF weights are read; convert the checkpoint to safetensors"

MODEL_ARGUMENTS: tuple[Argument, ...] = (
    Argument(
        name="model-path",
        aliases=("model",),
        kind="str",
        default=None,
        default_text="the model in the box",
        group="Model and tokenizer",
        metavar="MODEL",
        help="Directory of a Hugging Face model (config.json, safetensors, tokenizer.json), a .gguf file, or a "
        "repository id on the Hugging Face hub. May be given without the name, as the first argument.",
    ),
    Argument(
        name="tokenizer-path",
        aliases=("tokenizer",),
        kind="str",
        default=None,
        default_text="the model's own",
        group="Model and tokenizer",
        metavar="PATH",
        help="Directory, .gguf file or repository id of the tokenizer, when it is not the model's own.",
    ),
    Argument(
        name="tokenizer-mode",
        kind="str",
        default="auto",
        choices=("auto", "slow"),
        unbuilt_choices={
            "hf": "say auto, or slow for the files beside tokenizer.json",
            "mistral": "tokenizers of mistral-common are not read; use auto, with a tokenizer.json",
            "custom": "no code from a model repository is ever run here; use auto",
        },
        group="Model and tokenizer",
        help="auto reads tokenizer.json. slow leaves it unread: transformers makes the tokenizer of the model's other "
        "files, such as vocab.json and merges.txt or tokenizer.model, which takes seconds; for a model whose "
        "tokenizer.json is wrong. Without a tokenizer.json auto does the same.",
    ),
    Argument(
        name="tokenizer-worker-num",
        kind="int",
        default=1,
        minimum=1,
        maximum=64,
        group="Model and tokenizer",
        help="How many prompts may be encoded at the same time (threads); chat templates have as many processes, "
        "four at most.",
    ),
    Argument(
        name="skip-tokenizer-init",
        kind="flag",
        default=False,
        group="Model and tokenizer",
        help="Load no tokenizer: prompts must be token ids and answers hold token ids, no text.",
    ),
    Argument(
        name="load-format",
        kind="str",
        default="auto",
        choices=("auto", "safetensors", "gguf", "dummy"),
        unbuilt_choices={
            "pt": _FORMATS,
            "npcache": _FORMATS,
            "bitsandbytes": "this quantization is not built; serve weights in floats, or with --quantization int8",
            "sharded_state": _FORMATS,
        },
        group="Model and tokenizer",
        help="auto reads *.safetensors of a directory, or a .gguf file; safetensors and gguf insist on one of them; "
        "dummy fills the weights with seeded noise, for tests of speed.",
    ),
    Argument(
        name="context-length",
        aliases=("max-model-len",),
        kind="int",
        default=None,
        default_text="the model's own",
        minimum=2,
        maximum=16_777_216,
        group="Model and tokenizer",
        metavar="TOKENS",
        help="The longest sequence, prompt and answer together, in tokens.",
    ),
    Argument(
        name="revision",
        kind="str",
        default=None,
        default_text="the hub's main branch",
        group="Model and tokenizer",
        help="Branch, tag or commit of the model on the Hugging Face hub. Pin a commit in production.",
    ),
    Argument(
        name="download-dir",
        kind="str",
        default=None,
        default_text="the Hugging Face cache",
        group="Model and tokenizer",
        metavar="DIR",
        help="Where models from the hub are kept.",
    ),
    Argument(
        name="dtype",
        kind="str",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        synonyms={"float": "float32", "fp32": "float32", "bf16": "bfloat16", "half": "float16", "fp16": "float16"},
        group="Model and tokenizer",
        help="Type of weights and activations; auto follows the model's config.json where the device can.",
    ),
    Argument(
        name="json-model-override-args",
        aliases=("hf-overrides",),
        kind="json",
        default={},
        group="Model and tokenizer",
        metavar="JSON",
        help="JSON object laid over the model's config.json; nested objects are merged.",
    ),
    Argument(
        name="preferred-sampling-params",
        aliases=("override-generation-config",),
        kind="json",
        default={},
        group="Model and tokenizer",
        metavar="JSON",
        help="JSON object of sampling parameters for requests that leave them out: temperature, top_p, top_k, min_p, "
        "repetition_penalty, frequency_penalty, presence_penalty. They win over --sampling-defaults.",
    ),
)
