"""The arguments of quantization. Names are SGLang's."""

from __future__ import annotations

from typing import Annotated, Literal

from actors.options.declaration import ArgumentSpec
from actors.options.lora import LoraArguments

__all__ = ["QuantizationArguments"]

_OTHER = "this method is not built; use bf16 weights with --quantization int8 or fp8"
_KERNEL = "kernels are not chosen by name; leave it out: AWQ and GPTQ checkpoints are recognized"
_NARROW = (
    "weights are not quantized to it while loading; leave it out for checkpoints of ModelSlim or compressed-tensors, "
    "or use bf16 weights with --quantization int8 or fp8"
)

_Method = Literal[
    "int8",
    "fp8",
    "unquant",
    "awq",
    "bitsandbytes",
    "gptq",
    "auto-round",
    "compressed-tensors",
    "modelopt",
    "modelslim",
    "quark",
    "gguf",
]
_SYNONYMS = {"w8a8_int8": "int8", "w8a8_fp8": "fp8", "none": "unquant", "ascend": "modelslim"} | dict.fromkeys(
    ("modelopt_fp4", "modelopt_fp8"), "modelopt"
)
_UNBUILT = dict.fromkeys(
    ("marlin", "petit_nvfp4",
     "w4afp8", "qoq"),
    _OTHER,
) | dict.fromkeys(("awq_marlin", "gptq_marlin", "moe_wna16"), _KERNEL) | dict.fromkeys(
    ("mxfp8", "mxfp4", "nvfp4"), _NARROW
)  # fmt: skip
_FOUR_BITS = "a 4-bit cache is not built; use int8 or fp8_e4m3"


class QuantizationArguments(LoraArguments, frozen=True, kw_only=True):
    """The arguments of quantization. Names are SGLang's."""

    quantization: Annotated[
        _Method | None,
        ArgumentSpec(
            group="Quantization",
            aliases=("q",),
            default_text="as in the checkpoint",
            synonyms=_SYNONYMS,
            unbuilt_choices=_UNBUILT,
            metavar="METHOD",
            help="Quantize floating-point weights while loading, with a scale for each output channel, and "
            "activations for each token: int8 (also w8a8_int8) or fp8 (e4m3). For a quantized checkpoint only its "
            "own method is accepted.",
        ),
    ] = None

    kv_cache_dtype: Annotated[
        Literal["auto", "bfloat16", "int8", "fp8_e4m3", "fp8_e5m2"],
        ArgumentSpec(
            group="Quantization",
            synonyms={"bf16": "bfloat16", "fp8": "fp8_e4m3", "fp8_e4m3fn": "fp8_e4m3"},
            unbuilt_choices=dict.fromkeys(("fp4_e2m1", "int4", "mxfp8", "nvfp4"), _FOUR_BITS),
            help="Type of cached keys and values. With 8 bits nearly twice as many tokens fit into the cache. auto: "
            "the type of the checkpoint's scales, else the model's own type.",
        ),
    ] = "auto"

    kv_cache_quant_method: Annotated[
        Literal["auto", "none", "per_token_head"],
        ArgumentSpec(
            group="Quantization",
            metavar="METHOD",
            help="Scales of an 8-bit cache. per_token_head: a dynamic scale for each token and key head, stored "
            "beside it. none: static scales by layer (of the checkpoint or of --quantization-param-path), 1.0 for "
            "fp8 without scales. auto: none where there are scales, else per_token_head.",
        ),
    ] = "auto"

    quantization_param_path: Annotated[
        str | None,
        ArgumentSpec(
            group="Quantization",
            default_text="the checkpoint's own scales",
            metavar="FILE",
            help="A JSON file with scales of keys and values by layer, for --kv-cache-dtype int8, fp8_e4m3 or "
            "fp8_e5m2: "
            '{"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 0.02, ...}}}}, by rank and '
            "layer.",
        ),
    ] = None

    enable_fp32_lm_head: Annotated[
        bool,
        ArgumentSpec(
            group="Quantization",
            help="Compute logits in float32: the weights and inputs of the output layer. Takes 4 more bytes for each "
            "of its weights if they are shared with the embeddings.",
        ),
    ] = False

    speculative_draft_model_quantization: Annotated[
        _Method | None,
        ArgumentSpec(
            group="Speculative decoding",
            synonyms=_SYNONYMS,
            unbuilt_choices=_UNBUILT,
            metavar="METHOD",
            default_text="as in the draft's checkpoint; a floating-point draft follows --quantization int8 or fp8",
            help="As --quantization, for a draft model. unquant keeps its weights as floats when the model's are "
            "rounded.",
        ),
    ] = None
