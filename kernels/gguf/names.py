"""What tensors of a GGUF file are called here, by their Hugging Face names."""

from __future__ import annotations

__all__ = ["foreign_name", "own_name"]

_WHOLE = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OWN_WHOLE = {foreign: own for own, foreign in _WHOLE.items()}
_OWN_LAYER = {foreign: own for own, foreign in _LAYER.items()}


def foreign_name(name: str) -> str:
    """``model.layers.3.mlp.up_proj.weight`` -> ``blk.3.ffn_up.weight``. Raises KeyError for a name of no model here."""
    module, _, kind = name.rpartition(".")
    if module in _WHOLE:
        return f"{_WHOLE[module]}.{kind}"
    layer, _, part = module.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_LAYER[part]}.{kind}"


def own_name(name: str) -> str | None:
    """The other way; None for a tensor that has no such name."""
    module, _, kind = name.rpartition(".")
    if module in _OWN_WHOLE:
        return f"{_OWN_WHOLE[module]}.{kind}"
    layer, _, part = module.removeprefix("blk.").partition(".")
    return f"model.layers.{layer}.{_OWN_LAYER[part]}.{kind}" if part in _OWN_LAYER and layer.isdecimal() else None
