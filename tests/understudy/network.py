"""The training network: Qwen3's decoder as plain functions over a dictionary of tensors.

The names are those of the Hugging Face checkpoint, so saving is a cast. Tokens of many documents stand in one row;
attention sees its own document only, and positions start at zero in each. Follows the Qwen3 technical report
(arXiv 2505.09388): grouped-query attention with normalised queries and keys, SwiGLU, RMSNorm before each block, RoPE
(arXiv 2104.09864), the output tied to the embedding.
"""

from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["initial_weights", "loss", "rotation"]

Weights = dict[str, Any]


def initial_weights(config: dict[str, Any], seed: int, device: str) -> Weights:
    """Float32 weights: normal with the config's range, the blocks' outputs smaller by the square root of the depth."""
    generator = torch.Generator().manual_seed(seed)
    width, inner, depth = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    head = config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], width),
        "model.norm.weight": (width,),
    }
    for layer in range(depth):
        at = f"model.layers.{layer}."
        shapes |= {
            f"{at}input_layernorm.weight": (width,),
            f"{at}self_attn.q_proj.weight": (queries, width),
            f"{at}self_attn.k_proj.weight": (keys, width),
            f"{at}self_attn.v_proj.weight": (keys, width),
            f"{at}self_attn.o_proj.weight": (width, queries),
            f"{at}self_attn.q_norm.weight": (head,),
            f"{at}self_attn.k_norm.weight": (head,),
            f"{at}post_attention_layernorm.weight": (width,),
            f"{at}mlp.gate_proj.weight": (inner, width),
            f"{at}mlp.up_proj.weight": (inner, width),
            f"{at}mlp.down_proj.weight": (width, inner),
        }
    weights = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            weight = torch.ones(shape)
        else:
            scale = config["initializer_range"]
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                scale /= (2 * depth) ** 0.5
            weight = torch.randn(shape, generator=generator) * scale
        weights[name] = weight.to(device).requires_grad_()
    return weights


def rotation(config: dict[str, Any], device: str) -> tuple[Any, Any]:
    """Cosines and sines for every position: two tensors [positions, head_dim]."""
    head = config["head_dim"]
    frequencies = config["rope_theta"] ** -(torch.arange(0, head, 2, dtype=torch.float32) / head)
    angles = torch.outer(torch.arange(config["max_position_embeddings"], dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), dim=-1).to(device)
    return angles.cos(), angles.sin()


def _norm(x: Any, weight: Any, eps: float) -> Any:
    return F.rms_norm(x.float(), (x.shape[-1],), weight, eps).to(x.dtype)


def _rotate(x: Any, cos: Any, sin: Any) -> Any:
    left, right = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-right, left), dim=-1) * sin).to(x.dtype)


def _attention(q: Any, k: Any, v: Any, bounds: Any, longest: int) -> Any:
    """Causal attention within each document, [tokens, heads, head_dim]; `bounds`: where documents start, int32."""
    if q.is_cuda:
        return torch.ops.aten._flash_attention_forward(q, k, v, bounds, bounds, longest, longest, 0.0, True, False)[0]
    tokens = torch.arange(q.shape[0], device=q.device)
    owner = torch.searchsorted(bounds.long(), tokens, right=True)
    mask = (owner[:, None] == owner[None, :]) & (tokens[:, None] >= tokens[None, :])
    out = F.scaled_dot_product_attention(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), attn_mask=mask)
    return out.transpose(0, 1)


def loss(
    weights: Weights, config: dict[str, Any], tables: tuple[Any, Any], row: tuple[Any, Any, Any, Any], longest: int
) -> Any:
    """The mean cross-entropy over the learned tokens of a row.

    `row` is (ids, targets, positions, bounds): int64 [tokens], int64 [tokens] with -100 where nothing is learned,
    int64 [tokens], int32 [documents + 1]. `longest` bounds a document's length. Computes in bfloat16.
    """
    ids, targets, positions, bounds = row
    eps, heads, groups = config["rms_norm_eps"], config["num_attention_heads"], config["num_key_value_heads"]
    half = {name: weight.to(torch.bfloat16) for name, weight in weights.items() if weight.dim() == 2}
    cos, sin = (table[positions].unsqueeze(1) for table in tables)
    embedding = half["model.embed_tokens.weight"]
    x = F.embedding(ids, embedding)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        attn, mlp = f"{at}self_attn.", f"{at}mlp."
        h = _norm(x, weights[f"{at}input_layernorm.weight"], eps)
        q, k, v = (
            F.linear(h, half[f"{attn}{name}_proj.weight"]).view(len(ids), count, -1)
            for name, count in (("q", heads), ("k", groups), ("v", groups))
        )
        q = _rotate(_norm(q, weights[f"{attn}q_norm.weight"], eps), cos, sin)
        k = _rotate(_norm(k, weights[f"{attn}k_norm.weight"], eps), cos, sin)
        k, v = (y.repeat_interleave(heads // groups, dim=1) for y in (k, v))
        x = x + F.linear(_attention(q, k, v, bounds, longest).flatten(1), half[f"{attn}o_proj.weight"])
        h = _norm(x, weights[f"{at}post_attention_layernorm.weight"], eps)
        gate = F.silu(F.linear(h, half[f"{mlp}gate_proj.weight"])) * F.linear(h, half[f"{mlp}up_proj.weight"])
        x = x + F.linear(gate, half[f"{mlp}down_proj.weight"])
    logits = F.linear(_norm(x, weights["model.norm.weight"], eps), embedding)
    return F.cross_entropy(logits.float(), targets, ignore_index=-100)
