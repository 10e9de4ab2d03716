"""Quantized checkpoints of the included model, in every layout that is read, by the writers of the tests."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from app.understudy import MODEL_DIR
from kernels.contract.environment import hide_broken_npu
from kernels.weights.gguf.blocks import KINDS

__all__ = ["CHECKPOINTS", "EXPERTS", "limit_of", "made_up_gguf", "write"]

_GROUP = 64
_CALIBRATION_SEED = 20_261_122


Write = Callable[[Path, Path], Path]
"""Writes a quantized checkpoint of the one in the first directory to the second, and returns its path."""


def _words(layout: str) -> Write:
    def make(source: Path, target: Path) -> Path:
        from tests.kits.quantized import fp8_blocks, fp8_rows, rewrite
        from tests.kits.quantized_words import awq, four_bit_bytes, four_bit_pairs, gptq, int8_rows, packed

        bits = int(layout[-1]) if layout[-1].isdigit() else 4
        common: dict[str, Any] = {"bits": bits, "group_size": _GROUP}
        tokens = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
        group = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": _GROUP}
        rows = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
        gptq_4 = {"quant_method": "gptq", "desc_act": False, "sym": False, **common}
        if layout == "fp8-blocks":
            change = fp8_blocks(128, 128)
            settings: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        elif layout.startswith("awq"):
            change = awq(bits, _GROUP)
            settings = {"quant_method": "awq", "zero_point": True, "version": "gemm", **common}
        elif layout.startswith("auto-round"):
            change = gptq(bits, _GROUP)
            settings = {"quant_method": "auto-round", "sym": False, "data_type": "int", **common}
        elif layout == "compressed-fp8":
            floats = {"type": "float"}
            change, settings = fp8_rows, _compressed("float-quantized", rows | floats, tokens | floats)
        elif layout == "gptq-act-order":
            change, settings = gptq(bits, _GROUP, True), gptq_4 | {"desc_act": True}
        elif layout.startswith("gptq"):
            change, settings = gptq(bits, _GROUP), gptq_4
        elif layout == "compressed-w8a8":
            change, settings = int8_rows(), _compressed("int-quantized", rows, tokens)
        elif layout == "compressed-w8a8-static":
            ranges = _ranges(source)

            def change(module: str, weight: Any) -> dict[str, Any]:
                step = max(map(abs, ranges[module])) / 127
                return int8_rows(step)(module, weight)

            static = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}
            settings = _compressed("int-quantized", rows, static)
        elif layout.startswith("compressed-w4a8-rows"):
            clip = 0.9 if layout.endswith("clip") else None
            change, settings = four_bit_pairs(clip), _compressed("int-quantized", rows | {"num_bits": 4}, tokens)
            settings["config_groups"]["group_0"]["activation_use_clip"] = clip is not None
        elif layout == "compressed-w4a8":
            change, settings = four_bit_bytes(_GROUP), _compressed("int-quantized", group | {"num_bits": 4}, tokens)
        else:
            change, settings = packed(bits, _GROUP), _compressed("pack-quantized", group, None)
        return rewrite(source, target, change, settings)

    return make


def _compressed(kind: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def _modelslim(kind: str, group: int = 0, others: str = "") -> Write:
    """``others``: the kind of the modules outside of the MLPs, where it differs."""

    def make(source: Path, target: Path) -> Path:
        from tests.kits.modelslim import write as write_modelslim

        def choose(module: str) -> str:
            return kind if ".mlp." in module or not others else others

        ranges = _ranges(source) if {kind, others} & {"W8A8", "W8A8_MIX"} else None
        return write_modelslim(source, target, choose, ranges, group)[0]

    return make


def _calibration() -> tuple[Any, list[int]]:
    """The included model, and tokens of calibration documents."""
    hide_broken_npu()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tests.understudy.corpus import documents

    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    text = "".join(segment.text for document in documents(_CALIBRATION_SEED, 20) for segment in document)
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()
    return model, tokenizer.encode(text)[:2048]


@functools.cache
def _ranges(source: Path) -> Any:
    """The range of each module's inputs. An expert has those of its layer."""
    from tests.kits.modelslim import calibrate

    found = calibrate(*_calibration())
    experts = json.loads((source / "config.json").read_text()).get("num_experts", 0)
    for module in [module for module in found if ".mlp." in module]:
        block, _, part = module.partition(".mlp.")
        found |= {f"{block}.mlp.experts.{expert}.{part}": found[module] for expert in range(experts)}
    return found


@functools.cache
def _importance() -> Any:
    """The mean square of each input of each module."""
    import torch
    from torch import nn

    model, tokens = _calibration()
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):

            def see(_: Any, inputs: Any, name: str = name) -> None:
                found[name] = inputs[0].flatten(0, -2).square().mean(0).numpy()

            module.register_forward_pre_hook(see)
    with torch.inference_mode():
        model(torch.tensor([tokens]))
    return found


def _gguf(kind: str) -> Write:
    def make(source: Path, target: Path) -> Path:
        from tests.kits.gguf_writer import write_gguf
        from tests.kits.llama_server import write_as

        if source != MODEL_DIR:
            return write_gguf(source, target.parent / f"{source.name}.{kind}.gguf", kind)
        return write_as(kind, target.parent)

    return make


def _ggml(kind: str) -> Write:
    def make(source: Path, target: Path) -> Path:
        from tests.bench._ggml import need_library, write_by_ggml

        need_library()  # before the importance is computed, which takes minutes
        return write_by_ggml(kind, target.parent / f"box.{kind}.gguf", _importance())

    return make


def made_up_gguf(config: Mapping[str, Any], mix: str, file: Path) -> Path:
    """A file of a Qwen3 or a Qwen3-MoE of ``config``'s sizes, any codes and small scales in it, with the types that
    llama-quantize gives its matrices for ``mix``."""
    import gguf
    import numpy as np

    most, more = _MIXES[mix]
    generator = np.random.default_rng(1)
    experts = config.get("num_experts", 0)
    writer = gguf.GGUFWriter(file, "qwen3moe" if experts else "qwen3")
    layers, hidden, inner, dim = (
        config[name] for name in ("num_hidden_layers", "hidden_size", "intermediate_size", "head_dim")
    )
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        inner = config["moe_intermediate_size"]
        writer.add_expert_feed_forward_length(inner)
    writer.add_rope_freq_base(config["rope_theta"])

    def matrix(name: str, rows: int, columns: int, kind: str, each: int = 0) -> None:
        """``each``: the number of matrices in the tensor; 0 for a plain matrix."""
        number = gguf.GGMLQuantizationType[kind]
        block, size = gguf.GGML_QUANT_SIZES[number]
        data = generator.integers(0, 256, (max(each, 1) * rows, columns // block, size), np.uint8)
        halves = next((found.halves for found in KINDS.values() if found.name == kind), (0,))
        for at in halves:
            data[:, :, at : at + 2] = np.frombuffer(np.float16(2e-4).tobytes(), np.uint8)
        writer.add_tensor(f"{name}.weight", data.reshape(*([each] if each else []), rows, -1), raw_dtype=number)

    def norm(name: str, size: int) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))

    matrix("token_embd", config["vocab_size"], hidden, "Q6_K" if "K" in mix else most)
    norm("output_norm", hidden)
    for layer in range(layers):
        prefix = f"blk.{layer}"
        high = more if layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2 else most
        for name, size in {"attn_norm": hidden, "ffn_norm": hidden, "attn_q_norm": dim, "attn_k_norm": dim}.items():
            norm(f"{prefix}.{name}", size)
        matrix(f"{prefix}.attn_q", heads * dim, hidden, most)
        matrix(f"{prefix}.attn_k", kv_heads * dim, hidden, most)
        matrix(f"{prefix}.attn_v", kv_heads * dim, hidden, high)
        matrix(f"{prefix}.attn_output", hidden, heads * dim, most)
        end = "_exps" if experts else ""
        matrix(f"{prefix}.ffn_gate{end}", inner, hidden, most, experts)
        matrix(f"{prefix}.ffn_up{end}", inner, hidden, most, experts)
        matrix(f"{prefix}.ffn_down{end}", hidden, inner, high, experts)
        if experts:
            router = generator.standard_normal((experts, hidden), np.float32) * 0.02
            writer.add_tensor(f"{prefix}.ffn_gate_inp.weight", router)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


_MIXES = {
    "Q8_0": ("Q8_0", "Q8_0"),
    "Q4_0": ("Q4_0", "Q4_0"),
    "Q3_K_M": ("Q3_K", "Q5_K"),
    "Q4_K_M": ("Q4_K", "Q6_K"),
    "Q5_K_M": ("Q5_K", "Q6_K"),
    "Q6_K": ("Q6_K", "Q6_K"),
    "IQ4_XS": ("IQ4_XS", "Q5_K"),
}
"""The type of most matrices, and that of values and down projections in some layers."""


_SMALL = ("IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S")

CHECKPOINTS: dict[str, Write] = {
    "fp8-blocks": _words("fp8-blocks"),
    "awq-4": _words("awq-4"),
    "awq-8": _words("awq-8"),
    "gptq-4": _words("gptq-4"),
    "gptq-8": _words("gptq-8"),
    "gptq-act-order": _words("gptq-act-order"),
    "compressed-w4a16-4": _words("compressed-w4a16-4"),
    "compressed-w8a16-8": _words("compressed-w8a16-8"),
    "compressed-w8a8": _words("compressed-w8a8"),
    "compressed-w8a8-static": _words("compressed-w8a8-static"),
    "compressed-w4a8-rows": _words("compressed-w4a8-rows"),
    "compressed-w4a8-rows-clip": _words("compressed-w4a8-rows-clip"),
    "compressed-w4a8": _words("compressed-w4a8"),
    "compressed-fp8": _words("compressed-fp8"),
    "auto-round-4": _words("auto-round-4"),
    "auto-round-8": _words("auto-round-8"),
    "modelslim-w8a8": _modelslim("W8A8_DYNAMIC"),
    "modelslim-w8a8-static": _modelslim("W8A8"),
    "modelslim-w8a8-mix": _modelslim("W8A8_MIX"),
    "modelslim-mxfp8": _modelslim("W8A8_MXFP8"),
    "modelslim-w8a16": _modelslim("W8A16", _GROUP),
    "modelslim-w4a16": _modelslim("W4A16", _GROUP),
    "modelslim-w4a4": _modelslim("W4A4_DYNAMIC"),
    "modelslim-mixed": _modelslim("W4A8_DYNAMIC", _GROUP, "W8A8"),
    "modelslim-w4a8": _modelslim("W4A8_DYNAMIC", _GROUP),
    "gguf-q8": _gguf("Q8_0"),
    "gguf-q5_1": _gguf("Q5_1"),
    "gguf-q5_0": _gguf("Q5_0"),
    "gguf-q4_1": _gguf("Q4_1"),
    "gguf-q4": _gguf("Q4_0"),
    "gguf-q6_k": _gguf("Q6_K"),
    "gguf-q5_k_m": _gguf("Q5_K_M"),
    "gguf-q4_k_m": _gguf("Q4_K_M"),
    "gguf-iq4_xs": _gguf("IQ4_XS"),
    "gguf-q3_k_m": _gguf("Q3_K_M"),
    "gguf-q2_k": _gguf("Q2_K"),
    "gguf-mxfp4": _gguf("MXFP4"),
    **{f"gguf-{kind.lower()}": _ggml(kind) for kind in ("IQ4_NL", *_SMALL)},
}
"""Groups of 64 where there are groups. Of GGUF the mixtures need llama-quantize on the PATH, I-quants libggml-base."""

EXPERTS = [name for name in CHECKPOINTS if not name.startswith("gguf") or name in ("gguf-q8", "gguf-q4", "gguf-q5_0")]
"""Those that a model of experts can be written in."""

_BITS = {
    **dict.fromkeys(("awq-4", "gptq-4", "gptq-act-order", "compressed-w4a16-4", "gguf-q4", "gguf-q4_k_m"), 4),
    **dict.fromkeys(("compressed-w4a8", "modelslim-w4a8", "modelslim-w4a16", "modelslim-mixed", "auto-round-4"), 4),
    **dict.fromkeys(("modelslim-w4a4", "gguf-q4_1", "gguf-iq4_xs", "gguf-iq4_nl", "gguf-mxfp4"), 4),
    **dict.fromkeys(("compressed-w4a8-rows", "compressed-w4a8-rows-clip"), 4),
    **{f"gguf-{kind.lower()}": int(kind[2]) for kind in _SMALL},
    **dict.fromkeys(("gguf-q5_1", "gguf-q5_0", "gguf-q5_k_m"), 5),
    "gguf-q3_k_m": 3,
    "gguf-q2_k": 2,
}
"""Bits of most weights, where they are fewer than 6."""


def limit_of(name: str) -> float | None:
    """The percentage by which perplexity may be worse; None below 4 bits, where there is no limit."""
    bits = _BITS.get(name, 8)
    return None if bits < 4 else 5.0 if bits < 6 else 1.0


def write(name: str, target: Path, source: Path = MODEL_DIR) -> Path:
    """Write the checkpoint ``name`` of ``CHECKPOINTS`` from ``source`` to ``target``, and return its path.

    Raises MissingTool where the tool that writes it is not installed.
    """
    return CHECKPOINTS[name](source, target)
