"""The arguments of quantization. Names are SGLang's."""

from __future__ import annotations

import msgspec

from actors.arguments.argument import Argument

__all__ = ["QUANTIZATION_ARGUMENTS"]

_OTHER = "this method is not built; use bf16 weights with --quantization int8 or fp8"
_KERNEL = "kernels are not chosen by name; leave the flag out: a checkpoint of AWQ or GPTQ says itself what it is"
_NARROW = (
    "weights are not rounded to it while they are loaded; leave the flag out for ModelSlim's checkpoints in it and "
    "compressed-tensors', or use bf16 weights with --quantization int8 or fp8"
)

_METHODS = ("int8", "fp8", "unquant", "awq", "gptq", "auto-round", "compressed-tensors", "modelslim", "gguf")
_SYNONYMS = {"w8a8_int8": "int8", "w8a8_fp8": "fp8", "none": "unquant"}
_UNBUILT = dict.fromkeys(
    ("bitsandbytes", "marlin", "modelopt", "modelopt_fp8", "modelopt_fp4", "petit_nvfp4", "quark",
     "w4afp8", "qoq"),
    _OTHER,
) | dict.fromkeys(("awq_marlin", "gptq_marlin", "moe_wna16"), _KERNEL) | dict.fromkeys(
    ("mxfp8", "mxfp4", "nvfp4"), _NARROW
)  # fmt: skip
_FOUR_BITS = "a cache of 4 bits is not built; use int8 or fp8_e4m3"

_QUANTIZATION = Argument(
    name="quantization",
    aliases=("q",),
    kind="str",
    default=None,
    default_text="what the checkpoint says",
    choices=_METHODS,
    synonyms=_SYNONYMS,
    unbuilt_choices=_UNBUILT,
    group="Quantization",
    metavar="METHOD",
    help="Round the weights of a checkpoint in floats while they are loaded, a scale for each output, and the "
    "activations token by token: int8 (also w8a8_int8) or fp8 (e4m3). A checkpoint that is quantized already says "
    "so itself: for it, only its own method is accepted.",
)

QUANTIZATION_ARGUMENTS: tuple[Argument, ...] = (
    _QUANTIZATION,
    Argument(
        name="kv-cache-dtype",
        kind="str",
        default="auto",
        choices=("auto", "bfloat16", "int8", "fp8_e4m3", "fp8_e5m2"),
        synonyms={"bf16": "bfloat16", "fp8": "fp8_e4m3", "fp8_e4m3fn": "fp8_e4m3"},
        unbuilt_choices=dict.fromkeys(("fp4_e2m1", "int4", "mxfp8", "nvfp4"), _FOUR_BITS),
        group="Quantization",
        help="What keys and values are kept in. With 8 bits nearly twice as many tokens fit into the cache. auto: what "
        "a checkpoint has scales for, else the model's own type.",
    ),
    Argument(
        name="kv-cache-quant-method",
        kind="str",
        default="auto",
        choices=("auto", "none", "per_token_head"),
        group="Quantization",
        metavar="METHOD",
        help="How a cache of 8 bits is scaled. per_token_head: a scale for each token and key head, found as it is "
        "written and kept beside it. none: a layer's scales that were found before (the checkpoint's or those of "
        "--quantization-param-path), 1.0 where fp8 has none. auto: none where there are scales, else per_token_head.",
    ),
    Argument(
        name="quantization-param-path",
        kind="str",
        default=None,
        default_text="the checkpoint's own scales",
        group="Quantization",
        metavar="FILE",
        help="A JSON file of scales of keys and values by layer, for --kv-cache-dtype int8, fp8_e4m3 or fp8_e5m2: "
        '{"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 0.02, ...}}}}, by rank and layer.',
    ),
    Argument(
        name="enable-fp32-lm-head",
        kind="flag",
        default=False,
        group="Quantization",
        help="Compute logits in float32: the output layer's weights and what they are multiplied with. Takes 4 bytes "
        "for each weight of it more, where it shares them with the embeddings.",
    ),
    msgspec.structs.replace(
        _QUANTIZATION,
        name="speculative-draft-model-quantization",
        aliases=(),
        default_text="what the draft's checkpoint says; one in floats follows --quantization int8 or fp8",
        group="Speculative decoding",
        help="As --quantization, of a draft model. unquant keeps its weights as floats when the model's are rounded.",
    ),
)
