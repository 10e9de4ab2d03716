"""What tensors of a GGUF file are called here, by their Hugging Face names.

A file keeps a projection of all experts of a layer in one tensor [experts, outputs, inputs].
"""

from __future__ import annotations

import re

__all__ = ["MOST_EXPERTS", "expert_of", "foreign_name", "own_names"]

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
MOST_EXPERTS = 4096
"""Of a layer: each is known by a name of its own."""
_EXPERTS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
_MIXTRAL = {"w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps"}
_ROUTERS = {"mlp.gate": "ffn_gate_inp", "block_sparse_moe.gate": "ffn_gate_inp"}
_EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)")
_OWN_WHOLE = {foreign: own for own, foreign in _WHOLE.items()}
_OWN_LAYER = {foreign: own for own, foreign in _LAYER.items()}


def foreign_name(name: str) -> str:
    """``model.layers.3.mlp.up_proj.weight`` -> ``blk.3.ffn_up.weight``. Raises KeyError for a name of no model here."""
    module, _, kind = name.rpartition(".")
    if module in _WHOLE:
        return f"{_WHOLE[module]}.{kind}"
    layer, _, part = module.removeprefix("model.layers.").partition(".")
    found = _EXPERT.fullmatch(part)
    if found is not None:
        return f"blk.{layer}.{(_EXPERTS | _MIXTRAL)[found[2]]}.{kind}"
    return f"blk.{layer}.{(_LAYER | _ROUTERS)[part]}.{kind}"


def expert_of(name: str) -> int | None:
    """Which of the experts in its tensor a weight is; None: it has the tensor for itself."""
    found = _EXPERT.fullmatch(name.removeprefix("model.layers.").partition(".")[2].rpartition(".")[0])
    return None if found is None else int(found[1])


def own_names(name: str, experts: int, mixtral: bool) -> list[str]:
    """The other way, of a tensor of so many ``experts`` all of theirs; none for a tensor that has no such name, or
    of more experts than are read."""
    module, _, kind = name.rpartition(".")
    if module in _OWN_WHOLE:
        return [f"{_OWN_WHOLE[module]}.{kind}"]
    layer, _, part = module.removeprefix("blk.").partition(".")
    if not layer.isdecimal():
        return []
    if part in _OWN_LAYER:
        return [f"model.layers.{layer}.{_OWN_LAYER[part]}.{kind}"]
    block = f"model.layers.{layer}.{'block_sparse_moe' if mixtral else 'mlp'}"
    if part in _ROUTERS.values():
        return [f"{block}.gate.{kind}"]
    own = {foreign: own for own, foreign in (_MIXTRAL if mixtral else _EXPERTS).items()}.get(part)
    if own is None or experts > MOST_EXPERTS:
        return []
    return [f"{block}.experts.{expert}.{own}.{kind}" for expert in range(experts)]
