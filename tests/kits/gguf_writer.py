"""Writes a Hugging Face directory as a GGUF file, with the gguf package: its writer, its names, its quantizers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

__all__ = ["kind_of", "llama3_factors", "write_gguf"]

F32 = gguf.GGMLQuantizationType.F32


def kind_of(name: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[name]


def write_gguf(
    model: Path,
    file: Path,
    kind: str = "F32",
    *,
    pre: str = "qwen2",
    replaced: Mapping[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
    apart: bool = False,
    joined: bool = False,
    change: Callable[[Any], None] | None = None,
    tensors: Callable[[Any], None] | None = None,
    apart_kv: bool = True,
) -> Path:
    """``model`` as ``file``. Matrices have type ``kind`` if their rows allow it, otherwise float32.

    ``replaced``: tensors by their names in the file. ``apart``: experts are separate tensors, as in files of early
    2024. ``apart_kv``: keys and values of DeepSeek's latent vectors have tensors of their own, as since April 2025.
    ``joined``: queries, keys and values are one tensor, and so are gate and up projections, if their types are equal.
    ``change``: overrides metadata of the model's own files; ``tensors``: adds tensors. The tokenizer, if any, must be
    byte-level BPE.
    """
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    family = config["architectures"][0].removesuffix("ForCausalLM").lower()
    same = {"mistral": "llama", "mixtral": "llama", "deepseekv2": "deepseek2", "deepseekv3": "deepseek2"}
    same |= {"glm4moelite": "deepseek2", "hunyuandensev1": "hunyuan-dense"}
    arch = same.get(family, family)
    writer = gguf.GGUFWriter(file, arch)
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads") or config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    dim = config.get("head_dim") or config["hidden_size"] // heads
    if arch == "deepseek2":
        dim = config["qk_rope_head_dim"]
    else:
        writer.add_key_length(dim)
        writer.add_value_length(dim)
    writer.add_rope_dimension_count(dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if arch == "phi3":
        writer.add_sliding_window(config.get("sliding_window") or 0)
    experts = config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        if "moe_intermediate_size" in config:
            writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        if "shared_expert_intermediate_size" in config:
            writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if arch == "deepseek2":
        _deepseek(writer, config, apart_kv)
    _rope(writer, config, dim)
    if (model / "tokenizer.json").is_file():
        _tokenizer(writer, model, pre)
    names = gguf.get_tensor_name_map(
        getattr(gguf.MODEL_ARCH, arch.upper().replace("-", "_")), config["num_hidden_layers"]
    )
    held = load_file(model / "model.safetensors")
    if arch == "deepseek2":
        held = _of_deepseek(held, config, apart_kv)
    made: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] = {}
    for name, tensor in (held if apart else _stacked(held)).items():
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        values = tensor.float().numpy()
        if name.endswith(".shared_expert_gate.weight"):
            values = values[0]  # as the converter writes tensors with one row
        if arch == "llama" and ".q_proj." in name:
            values = _interleaved(values, heads)
        elif arch == "llama" and ".k_proj." in name:
            values = _interleaved(values, kv_heads)
        router = name.endswith(".gate.weight")  # which llama.cpp leaves in floats
        fits = values.ndim > 1 and not router and values.shape[-1] % gguf.GGML_QUANT_SIZES[kind_of(kind)][0] == 0
        chosen = kind_of(kind) if fits else F32
        own = names.get_name(name, try_suffixes=(".weight", ".bias")) or _of_expert(name)
        made[own] = (replaced or {}).get(own) or (gguf.quants.quantize(values, chosen), chosen)
    for own, (stored, chosen) in (_joined(made) if joined else made).items():
        writer.add_tensor(own, stored, raw_dtype=chosen)
    if tensors is not None:
        tensors(writer)
    if change is not None:
        change(_Over(writer))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _joined(tensors: dict[str, Any]) -> dict[str, Any]:
    """The order in which llama.cpp's converter and Phi-3 join them."""
    found = dict(tensors)
    for name in tensors:
        layer, _, rest = name.rpartition(".attn_q.")
        if layer:
            _join(found, [f"{layer}.attn_{part}.{rest}" for part in "qkv"], f"{layer}.attn_qkv.{rest}")
        layer, _, rest = name.rpartition(".ffn_gate.")
        if layer:
            _join(found, [f"{layer}.ffn_{part}.{rest}" for part in ("gate", "up")], f"{layer}.ffn_up.{rest}")
        layer, _, rest = name.rpartition(".ffn_gate_exps.")
        if layer:
            parts = [f"{layer}.ffn_{part}_exps.{rest}" for part in ("gate", "up")]
            _join(found, parts, f"{layer}.ffn_gate_up_exps.{rest}")
    return found


def _join(tensors: dict[str, Any], parts: list[str], name: str) -> None:
    both = [tensors[part] for part in parts]
    if len({kind for _, kind in both}) == 1:
        for part in parts:
            del tensors[part]
        axis = 1 if name.endswith("_exps.weight") else 0
        tensors[name] = (np.concatenate([stored for stored, _ in both], axis), both[0][1])


def _of_expert(name: str) -> str:
    """Names that the package no longer has."""
    layer, expert, part = re.fullmatch(r"model\.layers\.(\d+)\..*\.experts\.(\d+)\.(\w+)\.weight", name).groups()
    foreign = {"w1": "gate", "w2": "down", "w3": "up"}.get(part, part.removesuffix("_proj"))
    return f"blk.{layer}.ffn_{foreign}.{expert}.weight"


def _stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gate, up and down projections of a layer's experts as one tensor each, as in llama.cpp."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for name in tensors:
        block, _, rest = name.partition(".experts.0.")
        if rest:
            count = sum(other.startswith(f"{block}.experts.") and other.endswith(rest) for other in tensors)
            both = [tensors[f"{block}.experts.{expert}.{rest}"] for expert in range(count)]
            found[f"{block}.experts.{rest}"] = torch.stack(both)
    return found


class _Over:
    """A writer that accepts a key twice."""

    def __init__(self, writer: gguf.GGUFWriter) -> None:
        self._writer = writer

    def __getattr__(self, name: str) -> Any:
        def add(key: str, *values: Any) -> None:
            for held in self._writer.kv_data:
                held.pop(key, None)
            getattr(self._writer, name)(key, *values)

        return add


def _interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """The rows of each head as llama.cpp rotates them: halves become neighbours."""
    split = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(values.shape))


def _deepseek(writer: gguf.GGUFWriter, config: dict[str, Any], apart: bool) -> None:
    """The sizes of latent attention and of experts. ``apart``: as newer files say them."""
    rotated, rank = config["qk_rope_head_dim"], config["kv_lora_rank"]
    heads = config["qk_nope_head_dim"] + rotated, config["v_head_dim"]
    if apart:
        writer.add_key_length_mla(heads[0])
        writer.add_value_length_mla(heads[1])
    writer.add_key_length(rank + rotated if apart else heads[0])
    writer.add_value_length(rank if apart else heads[1])
    writer.add_kv_lora_rank(rank)
    if config.get("q_lora_rank"):
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(bool(config["norm_topk_prob"]))
    if config.get("n_group") and config.get("topk_method") != "greedy":
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])


def _of_deepseek(tensors: dict[str, torch.Tensor], config: dict[str, Any], apart: bool) -> dict[str, torch.Tensor]:
    """The tensors as llama.cpp's converter has them."""
    found = {name.replace("e_score_correction_bias", "e_score_correction.bias"): held for name, held in tensors.items()}
    for name in [name for name in found if name.endswith(".kv_b_proj.weight") and apart]:
        both = found.pop(name).view(config["num_attention_heads"], -1, config["kv_lora_rank"])
        keys, values = both.split((config["qk_nope_head_dim"], config["v_head_dim"]), 1)
        found[name.replace("kv_b_proj", "k_b_proj")] = keys.transpose(1, 2).contiguous()
        found[name.replace("kv_b_proj", "v_b_proj")] = values.contiguous()
    return found


def _rope(writer: gguf.GGUFWriter, config: dict[str, Any], dim: int) -> None:
    rope = config.get("rope_parameters") or {}
    base = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    writer.add_rope_freq_base(base * rope.get("alpha", 1.0) ** (dim / (dim - 2)))
    kind = rope.get("rope_type", "default")
    if kind == "yarn" and "mscale_all_dim" in rope:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
        return
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    elif kind == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(rope, dim))


def llama3_factors(rope: dict[str, Any], dim: int) -> np.ndarray:
    """What the frequencies of heads of ``dim`` numbers are divided by, float32 [dim / 2]."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama import LlamaConfig

    base = 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim)
    config = LlamaConfig(hidden_size=dim, num_attention_heads=1, head_dim=dim, rope_parameters=rope)
    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    return (base / stretched).float().numpy()


def _tokenizer(writer: gguf.GGUFWriter, model: Path, pre: str) -> None:
    stored = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    settings = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    tokens = [token for token, _ in sorted(stored["model"]["vocab"].items(), key=lambda item: item[1])]
    kinds = [int(gguf.TokenType.NORMAL)] * len(tokens)
    for added in stored["added_tokens"]:
        kinds[added["id"]] = int(gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in stored["model"]["merges"]])
    for name, add in {"eos_token": writer.add_eos_token_id, "pad_token": writer.add_pad_token_id}.items():
        if settings.get(name) in tokens:
            add(tokens.index(settings[name]))
    writer.add_add_bos_token(False)
    if settings.get("chat_template"):
        writer.add_chat_template(settings["chat_template"])
