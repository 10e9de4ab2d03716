"""Small models of families that transformers lacks: their published configuration, seeded weights under the published
names, and what they compute, in plain torch after the published descriptions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kits.driver import COMMON, VOCAB

__all__ = ["PUBLISHED", "ling_layer", "ling_stream", "save_published", "step3p5_stream"]

Weights = Mapping[str, Tensor]
Config = Mapping[str, Any]

BAICHUAN = COMMON | {"architectures": ["BaichuanForCausalLM"], "num_key_value_heads": None, "rms_norm_eps": 1e-6}
LING = COMMON | {
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_shared_experts": 2,
    "moe_intermediate_size": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 600000,
    "norm_topk_prob": True,
}

CHATGLM = {
    "architectures": ["ChatGLMModel"],
    "padded_vocab_size": VOCAB,
    "hidden_size": 48,
    "ffn_hidden_size": 80,
    "num_layers": 3,
    "num_attention_heads": 4,
    "kv_channels": 16,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "seq_length": 256,
    "layernorm_epsilon": 1e-5,
    "rmsnorm": True,
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "original_rope": True,
    "rope_ratio": 50,
}

STEP = {
    "architectures": ["Step3p5ForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 4,
    "num_attention_groups": 2,
    "head_dim": 16,
    "attention_other_setting": {"num_attention_heads": 6, "num_attention_groups": 2, "head_dim": 16},
    "layer_types": ["full_attention", *2 * ["sliding_attention"], "full_attention", "sliding_attention"],
    "sliding_window": 21,
    "rope_theta": [500.0, 100.0, 100.0, 500.0, 100.0],
    "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5, 1.0],
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "moe_layers_enum": "1,2,3",
    "moe_num_experts": 6,
    "moe_top_k": 2,
    "moe_intermediate_size": 32,
    "share_expert_dim": 24,
    "moe_router_activation": "sigmoid",
    "moe_router_scaling_factor": 1.5,
    "norm_expert_weight": True,
    "swiglu_limits": [0.0, None, 2.0, 0.0, 0.0],
    "swiglu_limits_shared": [1.0, 3.0, None, 0.0, 0.0],
}

PUBLISHED: dict[str, dict[str, Any]] = {
    "baichuan": BAICHUAN | {"hidden_size": 64},  # so that its output can be quantized
    "baichuan-alibi": BAICHUAN | {"num_attention_heads": 6, "max_position_embeddings": None, "model_max_length": 256},
    "ling": LING
    | {
        "architectures": ["BailingMoeForCausalLM"],
        "use_qkv_bias": True,
        "use_bias": True,
        "norm_head": True,
        "first_k_dense_replace": 0,
    },
    "ling-v2": LING
    | {
        "architectures": ["BailingMoeV2ForCausalLM"],
        "first_k_dense_replace": 1,
        "score_function": "sigmoid",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
    },
    "chatglm": CHATGLM,
    "xverse": COMMON | {"architectures": ["XverseForCausalLM"], "rms_norm_eps": 1e-6},
    "xverse-moe": COMMON
    | {
        "architectures": ["XverseForCausalLM"],
        "intermediate_size": 32,
        "num_experts": 6,
        "moe_top_k": 2,
        "num_shared_experts": 2,
        "rms_norm_eps": 1e-6,
    },
    "grok": COMMON
    | {
        "architectures": ["Grok1ForCausalLM"],
        "head_dim": 16,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "residual_moe": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_type": "original",
        "attn_logit_softcapping": 3.0,
        "router_logit_softcapping": 2.0,
        "final_logit_softcapping": 20.0,
        "attn_temperature_len": 16,
        "embedding_multiplier_scale": 3.0,
        "output_multiplier_scale": 0.5,
    },
    "step3p5": STEP,
}


def save_published(name: str, directory: Path, vocab_size: int = 0) -> Callable[[Tensor], Tensor]:
    """Save the model ``name`` to ``directory``, with another ``vocab_size`` if it is given. -> what gives logits [n,
    vocab] of tokens int64 [n]."""
    from safetensors.torch import save_file

    from kernels.models.config_loader import parse_config
    from kernels.models.registry import tensors

    config = {key: value for key, value in PUBLISHED[name].items() if value is not None}
    if vocab_size:
        config["padded_vocab_size" if "padded_vocab_size" in config else "vocab_size"] = vocab_size
    generator = torch.Generator().manual_seed(sum(name.encode()))
    weights = {}
    sizes = parse_config(config)
    for tensor, spec in tensors(sizes).items():
        mean = 1.0 - sizes.norm_offset if len(spec.shape) == 1 else 0.0
        weights[tensor] = torch.randn(spec.shape, generator=generator) * 0.3 + mean
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    forward = _FORWARD[name.split("-")[0]]
    return lambda tokens: forward(config, weights, tokens)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def _rotated(x: Tensor, theta: float, dim: int) -> Tensor:
    """The first ``dim`` numbers of heads [tokens, heads, size], halves against one another."""
    angles = torch.arange(len(x)).unsqueeze(1) / theta ** (torch.arange(0, dim, 2) / dim)
    turn = torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    first, second = x[..., :dim].chunk(2, -1)
    result = torch.complex(first, second) * turn
    return torch.cat((result.real, result.imag, x[..., dim:]), -1)


def _attended(
    queries: Tensor, keys: Tensor, values: Tensor, rule: Callable[[Tensor], Tensor] = lambda scores: scores
) -> Tensor:
    """Heads [tokens, heads, dim] -> [tokens, heads * dim]. ``rule``: of scores [heads, tokens, tokens]."""
    groups = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    scores = rule(torch.einsum("qhd,khd->hqk", queries, keys) / math.sqrt(queries.shape[2]))
    later = torch.ones(scores.shape[1:]).triu(1).bool()
    shares = scores.masked_fill(later, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", shares, values).flatten(1)


def _mlp(weights: Weights, module: str, x: Tensor, act: Callable[[Tensor], Tensor] = F.silu) -> Tensor:
    gate, up, down = (weights[f"{module}.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return (act(x @ gate.T) * (x @ up.T)) @ down.T


def _baichuan(config: Config, weights: Weights, tokens: Tensor) -> Tensor:
    eps, heads = config["rms_norm_eps"], config["num_attention_heads"]
    x = weights["model.embed_tokens.weight"][tokens]
    slopes = {6: [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]}.get(heads, [])  # as the paper has them

    def biased(scores: Tensor) -> Tensor:
        return scores + torch.tensor(slopes).view(-1, 1, 1) * torch.arange(scores.shape[2])

    for index in range(config["num_hidden_layers"]):
        name = f"model.layers.{index}"
        normed = _norm(x, weights[f"{name}.input_layernorm.weight"], eps)
        queries, keys, values = (
            part.unflatten(1, (heads, -1))
            for part in (normed @ weights[f"{name}.self_attn.W_pack.weight"].T).chunk(3, 1)
        )
        if slopes:
            result = _attended(queries, keys, values, biased)
        else:
            dim = queries.shape[2]
            result = _attended(_rotated(queries, 10000.0, dim), _rotated(keys, 10000.0, dim), values)
        x = x + result @ weights[f"{name}.self_attn.o_proj.weight"].T
        x = x + _mlp(weights, f"{name}.mlp", _norm(x, weights[f"{name}.post_attention_layernorm.weight"], eps))
    head = weights["lm_head.weight"]
    return _norm(x, weights["model.norm.weight"], eps) @ (head / head.norm(dim=1, keepdim=True)).T


def _ling(config: Config, weights: Weights, tokens: Tensor) -> Tensor:
    head = weights["lm_head.weight"]
    if config.get("norm_head"):
        head = head / head.norm(dim=0, keepdim=True)
    return ling_stream(config, weights, tokens) @ head.T


def ling_stream(config: Config, weights: Weights, tokens: Tensor) -> Tensor:
    """Ling's last hidden states [tokens, hidden], after the last norm."""
    x = weights["model.word_embeddings.weight"][tokens]
    for index in range(config["num_hidden_layers"]):
        x = ling_layer(config, weights, x, index)
    return _norm(x, weights["model.norm.weight"], config["rms_norm_eps"])


def ling_layer(config: Config, weights: Weights, x: Tensor, index: int) -> Tensor:
    """The residual stream ``x`` [tokens, hidden] after a layer of Ling."""
    eps, heads, kv_heads, dim = (
        config["rms_norm_eps"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
    )
    theta, turned = config["rope_theta"], int(dim * config.get("partial_rotary_factor", 1.0))
    name = f"model.layers.{index}"
    module = f"{name}.attention"
    normed = _norm(x, weights[f"{name}.input_layernorm.weight"], eps)
    projected = normed @ weights[f"{module}.query_key_value.weight"].T
    if config.get("use_qkv_bias"):
        projected = projected + weights[f"{module}.query_key_value.bias"]
    queries, keys, values = projected.unflatten(1, (-1, dim)).split((heads, kv_heads, kv_heads), 1)
    if config.get("use_qk_norm"):
        queries = _norm(queries, weights[f"{module}.query_layernorm.weight"], eps)
        keys = _norm(keys, weights[f"{module}.key_layernorm.weight"], eps)
    result = _attended(_rotated(queries, theta, turned), _rotated(keys, theta, turned), values)
    x = x + result @ weights[f"{module}.dense.weight"].T
    if config.get("use_bias"):
        x = x + weights[f"{module}.dense.bias"]
    normed = _norm(x, weights[f"{name}.post_attention_layernorm.weight"], eps)
    dense = index < config["first_k_dense_replace"]
    return x + (
        _mlp(weights, f"{name}.mlp", normed) if dense else _ling_experts(config, weights, f"{name}.mlp", normed)
    )


def _ling_experts(config: Config, weights: Weights, module: str, x: Tensor) -> Tensor:
    logits, chosen = x @ weights[f"{module}.gate.weight"].T, config["num_experts_per_tok"]
    if config.get("score_function") == "sigmoid":
        scores = logits.sigmoid()
        ranked = scores + weights[f"{module}.gate.expert_bias"]
        groups = ranked.unflatten(1, (config["n_group"], -1))
        best = groups.topk(2, -1).values.sum(-1).topk(config["topk_group"], -1).indices
        open_groups = torch.zeros(groups.shape[:2]).scatter(1, best, 1.0).bool()
        ranked = groups.masked_fill(~open_groups.unsqueeze(2), -torch.inf).flatten(1)
    else:
        scores = ranked = logits.softmax(-1)
    experts = ranked.topk(chosen, -1).indices
    shares = scores.gather(1, experts)
    shares = shares / shares.sum(-1, keepdim=True) * config.get("routed_scaling_factor", 1.0)
    rows = [
        sum(
            share * _mlp(weights, f"{module}.experts.{int(expert)}", row)
            for share, expert in zip(own, taken, strict=True)
        )
        for row, own, taken in zip(x, shares, experts, strict=True)
    ]
    return torch.stack(rows) + _mlp(weights, f"{module}.shared_experts", x)


def _grok(config: Config, weights: Weights, tokens: Tensor) -> Tensor:
    eps, dim, theta = config["rms_norm_eps"], config["head_dim"], config["rope_theta"]
    cap, length = config["attn_logit_softcapping"], config["attn_temperature_len"]

    def gelu(x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")

    def capped(scores: Tensor) -> Tensor:
        positions = torch.arange(scores.shape[1])
        growth = torch.where(positions > length, torch.log2(positions) / math.log2(length), 1.0)
        return cap * torch.tanh(scores / cap) * growth.unsqueeze(1)

    def experts(module: str, x: Tensor) -> Tensor:
        limit = config["router_logit_softcapping"]
        scores = (limit * torch.tanh(x @ weights[f"{module}.gate.weight"].T / limit)).softmax(-1)
        best = scores.topk(config["num_experts_per_tok"], -1)
        rows = []
        for row, own, taken in zip(x, *best, strict=True):
            parts = []
            for share, expert in zip(own, taken, strict=True):
                gate, up, down = (
                    weights[f"{module}.experts.{int(expert)}.{part}.weight"] for part in ("w1", "w3", "w2")
                )
                parts.append(share * ((gelu(row @ gate.T) * (row @ up.T)) @ down.T))
            rows.append(torch.stack(parts).sum(0))
        return torch.stack(rows)

    x = weights["model.embed_tokens.weight"][tokens] * config["embedding_multiplier_scale"]
    for index in range(config["num_hidden_layers"]):
        name = f"model.layers.{index}"
        normed = _norm(x, weights[f"{name}.pre_attn_norm.weight"], eps)
        queries, keys, values = (
            (normed @ weights[f"{name}.self_attn.{part}_proj.weight"].T).unflatten(1, (-1, dim)) for part in "qkv"
        )
        result = _attended(_rotated(queries, theta, dim), _rotated(keys, theta, dim), values, capped)
        x = x + _norm(
            result @ weights[f"{name}.self_attn.o_proj.weight"].T, weights[f"{name}.post_attn_norm.weight"], eps
        )
        normed = _norm(x, weights[f"{name}.pre_moe_norm.weight"], eps)
        both = _mlp(weights, f"{name}.mlp", normed, gelu) + experts(f"{name}.block_sparse_moe", normed)
        x = x + _norm(both / math.sqrt(2), weights[f"{name}.post_moe_norm.weight"], eps)
    final = config["final_logit_softcapping"]
    logits = (
        _norm(x, weights["model.norm.weight"], eps) * config["output_multiplier_scale"] @ weights["lm_head.weight"].T
    )
    return final * torch.tanh(logits / final)


def _chatglm(config: Config, weights: Weights, tokens: Tensor) -> Tensor:
    eps, dim = config["layernorm_epsilon"], config["kv_channels"]
    heads, kv_heads = config["num_attention_heads"], config["multi_query_group_num"]
    x = weights["transformer.embedding.word_embeddings.weight"][tokens]
    rates = 1.0 / (10000 * config["rope_ratio"]) ** (torch.arange(0, dim // 2, 2) / (dim // 2))
    angles = torch.arange(len(x)).unsqueeze(1) * rates
    turn = torch.polar(torch.ones_like(angles), angles).unsqueeze(1)

    def rotated(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x[..., : dim // 2].unflatten(-1, (-1, 2)).contiguous())
        return torch.cat((torch.view_as_real(pairs * turn).flatten(-2), x[..., dim // 2 :]), -1)

    for index in range(config["num_layers"]):
        name = f"transformer.encoder.layers.{index}"
        normed = _norm(x, weights[f"{name}.input_layernorm.weight"], eps)
        module = f"{name}.self_attention.query_key_value"
        projected = normed @ weights[f"{module}.weight"].T + weights[f"{module}.bias"]
        queries, keys, values = projected.unflatten(1, (-1, dim)).split((heads, kv_heads, kv_heads), 1)
        result = _attended(rotated(queries), rotated(keys), values)
        x = x + result @ weights[f"{name}.self_attention.dense.weight"].T
        normed = _norm(x, weights[f"{name}.post_attention_layernorm.weight"], eps)
        gate, up = (normed @ weights[f"{name}.mlp.dense_h_to_4h.weight"].T).chunk(2, -1)
        x = x + (F.silu(gate) * up) @ weights[f"{name}.mlp.dense_4h_to_h.weight"].T
    return (
        _norm(x, weights["transformer.encoder.final_layernorm.weight"], eps)
        @ weights["transformer.output_layer.weight"].T
    )


def _xverse(config: Config, weights: Weights, tokens: Tensor) -> Tensor:
    eps, dim = config["rms_norm_eps"], config["hidden_size"] // config["num_attention_heads"]

    def experts(module: str, x: Tensor) -> Tensor:
        best = (x @ weights[f"{module}.router.weight"].T).softmax(-1).topk(config["moe_top_k"], -1)
        rows = [
            torch.stack(
                [
                    share * _mlp(weights, f"{module}.experts.{int(one)}", row)
                    for share, one in zip(own, taken, strict=True)
                ]
            ).sum(0)
            for row, own, taken in zip(x, *best, strict=True)
        ]
        return torch.stack(rows) + _mlp(weights, f"{module}.shared_experts", x)

    x = weights["model.embed_tokens.weight"][tokens]
    for index in range(config["num_hidden_layers"]):
        name = f"model.layers.{index}"
        normed = _norm(x, weights[f"{name}.input_layernorm.weight"], eps)
        queries, keys, values = (
            (normed @ weights[f"{name}.self_attn.{part}_proj.weight"].T).unflatten(1, (-1, dim)) for part in "qkv"
        )
        result = _attended(_rotated(queries, 10000.0, dim), _rotated(keys, 10000.0, dim), values)
        x = x + result @ weights[f"{name}.self_attn.o_proj.weight"].T
        normed = _norm(x, weights[f"{name}.post_attention_layernorm.weight"], eps)
        sparse = "num_experts" in config
        x = x + (experts(f"{name}.mlp", normed) if sparse else _mlp(weights, f"{name}.mlp", normed))
    return _norm(x, weights["model.norm.weight"], eps) @ weights["lm_head.weight"].T


def step3p5_stream(config: Config, weights: Weights, x: Tensor, layers: range) -> Tensor:
    """The residual stream ``x`` [tokens, hidden] after some ``layers`` of Step 3.5."""
    eps, dim, window = config["rms_norm_eps"], config["head_dim"], config["sliding_window"]

    def normed(x: Tensor, module: str) -> Tensor:
        return _norm(x, weights[f"{module}.weight"] + 1, eps)

    def seen(scores: Tensor) -> Tensor:
        far = torch.ones(scores.shape[1:]).tril(-window).bool()
        return scores.masked_fill(far, -torch.inf)

    def mlp(module: str, x: Tensor, limit: float | None) -> Tensor:
        gate, up, down = (weights[f"{module}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        gates, ups = F.silu(x @ gate.T), x @ up.T
        if limit:
            gates, ups = gates.clamp(max=limit), ups.clamp(-limit, limit)
        return (gates * ups) @ down.T

    def experts(module: str, x: Tensor, limit: float | None) -> Tensor:
        scores = (x @ weights[f"{module}.gate.weight"].T).sigmoid()
        chosen = (scores + weights[f"{module}.router_bias"]).topk(config["moe_top_k"], -1).indices
        rows = []
        for row, own, taken in zip(x, scores, chosen, strict=True):
            parts = [own[one] * mlp(f"{module}.experts.{int(one)}", row, limit) for one in taken]
            rows.append(torch.stack(parts).sum(0) / own[taken].sum() * config["moe_router_scaling_factor"])
        return torch.stack(rows)

    for index in layers:
        name, local = f"model.layers.{index}", config["layer_types"][index] == "sliding_attention"
        module, inputs = f"{name}.self_attn", normed(x, f"{name}.input_layernorm")
        queries, keys, values = (
            (inputs @ weights[f"{module}.{part}_proj.weight"].T).unflatten(1, (-1, dim)) for part in "qkv"
        )
        turn = config["rope_theta"][index], int(dim * config["partial_rotary_factors"][index])
        queries, keys = (
            _rotated(normed(queries, f"{module}.q_norm"), *turn),
            _rotated(normed(keys, f"{module}.k_norm"), *turn),
        )
        result = _attended(queries, keys, values, seen if local else lambda scores: scores)
        gates = (inputs @ weights[f"{module}.g_proj.weight"].T).sigmoid().repeat_interleave(dim, 1)
        x = x + (result * gates) @ weights[f"{module}.o_proj.weight"].T
        inputs = normed(x, f"{name}.post_attention_layernorm")
        limit, shared_limit = config["swiglu_limits"][index], config["swiglu_limits_shared"][index]
        if str(index) in config["moe_layers_enum"].split(","):
            x = x + experts(f"{name}.moe", inputs, limit) + mlp(f"{name}.share_expert", inputs, shared_limit)
        else:
            x = x + mlp(f"{name}.mlp", inputs, shared_limit)
    return x


def _step3p5(config: Config, weights: Weights, tokens: Tensor) -> Tensor:
    x = step3p5_stream(
        config, weights, weights["model.embed_tokens.weight"][tokens], range(config["num_hidden_layers"])
    )
    return _norm(x, weights["model.norm.weight"] + 1, config["rms_norm_eps"]) @ weights["lm_head.weight"].T


_FORWARD: dict[str, Callable[[Config, Weights, Tensor], Tensor]] = {
    "baichuan": _baichuan,
    "chatglm": _chatglm,
    "grok": _grok,
    "ling": _ling,
    "step3p5": _step3p5,
    "xverse": _xverse,
}
