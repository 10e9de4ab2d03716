"""The arguments of quantization. Names are SGLang's."""

from __future__ import annotations

from actors.arguments.argument import Argument

__all__ = ["QUANTIZATION_ARGUMENTS"]

_OTHER = "this method is not built; use bf16 weights with --quantization int8 or fp8"

QUANTIZATION_ARGUMENTS: tuple[Argument, ...] = (
    Argument(
        name="quantization",
        kind="str",
        default=None,
        default_text="what the checkpoint says",
        choices=(
            "int8",
            "fp8",
            "unquant",
            "awq",
            "gptq",
            "auto-round",
            "compressed-tensors",
            "modelslim",
            "gguf",
        ),
        synonyms={"w8a8_int8": "int8", "w8a8_fp8": "fp8", "none": "unquant"},
        unbuilt_choices={
            **dict.fromkeys(
                ("mxfp8", "mxfp4", "bitsandbytes", "marlin", "awq_marlin", "gptq_marlin", "moe_wna16", "modelopt",
                 "modelopt_fp8", "modelopt_fp4", "petit_nvfp4", "quark", "w4afp8", "qoq"),
                _OTHER,
            ),
        },
        group="Quantization",
        metavar="METHOD",
        help="Round the weights of a checkpoint in floats while they are loaded, a scale for each output, and the "
        "activations token by token: int8 (also w8a8_int8) or fp8 (e4m3). A checkpoint that is quantized already says "
        "so itself: for it, only its own method is accepted.",
    ),
)  # fmt: skip
