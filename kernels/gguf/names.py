"""What tensors of a GGUF file are called here, by their Hugging Face names.

A file keeps a projection of all experts of a layer in one tensor [experts, outputs, inputs], one written before April
2024 in a tensor for each expert.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from kernels.models.config import MOST_EXPERTS

__all__ = ["Names", "expert_of", "experts_apart"]

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
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
_EXPERTS = {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}
_MIXTRAL = {"w1": "ffn_gate", "w3": "ffn_up", "w2": "ffn_down"}
_ROUTER = "ffn_gate_inp"
_ROUTERS = {"mlp.gate": _ROUTER, "block_sparse_moe.gate": _ROUTER}
_EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)")
_APART = re.compile(r"(ffn_(?:gate|up|down))\.(0|[1-9]\d{0,3})")
_OWN_WHOLE = {foreign: own for own, foreign in _WHOLE.items()}
_OWN_LAYER = {foreign: own for own, foreign in _LAYER.items()}


def experts_apart(names: Collection[str]) -> bool:
    """Whether a file of these tensors has one for each expert."""
    return any(_APART.fullmatch(_part(name)) for name in names)


def expert_of(name: str) -> int | None:
    """Which of its layer's experts a weight is of; None: of none."""
    found = _EXPERT.fullmatch(name.removeprefix("model.layers.").partition(".")[2].rpartition(".")[0])
    return None if found is None else int(found[1])


def _part(foreign: str) -> str:
    """``blk.3.ffn_gate.5.weight`` -> ``ffn_gate.5``"""
    return foreign.removeprefix("blk.").partition(".")[2].rpartition(".")[0]


class Names:
    """Of one file. ``apart``: each expert has tensors of its own. ``mixtral``: the model is one."""

    def __init__(self, apart: bool, mixtral: bool = False) -> None:
        self.apart = apart
        self._block = "block_sparse_moe" if mixtral else "mlp"
        self._experts = {foreign: own for own, foreign in (_MIXTRAL if mixtral else _EXPERTS).items()}

    def foreign(self, name: str) -> str:
        """``model.layers.3.mlp.up_proj.weight`` -> ``blk.3.ffn_up.weight``. Raises KeyError for a name of no model
        here."""
        module, _, kind = name.rpartition(".")
        if module in _WHOLE:
            return f"{_WHOLE[module]}.{kind}"
        layer, _, part = module.removeprefix("model.layers.").partition(".")
        found = _EXPERT.fullmatch(part)
        if found is not None:
            return f"blk.{layer}.{(_EXPERTS | _MIXTRAL)[found[2]]}{f'.{found[1]}' if self.apart else '_exps'}.{kind}"
        return f"blk.{layer}.{(_LAYER | _ROUTERS)[part]}.{kind}"

    def stacked(self, name: str) -> bool:
        """Whether a weight shares its tensor with those of the other experts."""
        return not self.apart and expert_of(name) is not None

    def own(self, name: str, experts: int) -> list[str]:
        """The other way, of a tensor of so many ``experts`` all of theirs; none for a tensor that has no such name, or
        of more experts than are read."""
        module, _, kind = name.rpartition(".")
        if kind not in ("weight", "bias"):
            return []
        if module in _OWN_WHOLE:
            return [f"{_OWN_WHOLE[module]}.{kind}"]
        layer, _, part = module.removeprefix("blk.").partition(".")
        if not layer.isdecimal():
            return []
        if part in _OWN_LAYER:
            return [f"model.layers.{layer}.{_OWN_LAYER[part]}.{kind}"]
        block = f"model.layers.{layer}.{self._block}"
        if part == _ROUTER:
            return [f"{block}.gate.{kind}"]
        alone = _APART.fullmatch(part)
        if alone is not None:
            return [f"{block}.experts.{int(alone[2])}.{self._experts[alone[1]]}.{kind}"] if self.apart else []
        own = self._experts.get(part.removesuffix("_exps"))
        if own is None or not part.endswith("_exps") or experts > MOST_EXPERTS or self.apart:
            return []
        return [f"{block}.experts.{expert}.{own}.{kind}" for expert in range(experts)]
