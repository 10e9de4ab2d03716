"""Small DFlash drafts."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from tests.kits.speculation.drafting import CONFIG, HIDDEN, layer

__all__ = [
    "DFLASH",
    "MASK",
    "SHAPES",
    "block",
]

MASK = 95

DFLASH = CONFIG | {
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 2,
    "block_size": 8,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 3]},
    "layer_types": ["full_attention"] * 2,
}

SHAPES = {
    "fc.weight": (HIDDEN, 2 * HIDDEN),
    "hidden_norm.weight": (HIDDEN,),
    "norm.weight": (HIDDEN,),
    **layer("layers.0", head_norms=True),
    **layer("layers.1", head_norms=True),
}


def block(made, plain, table, row, size, window=0):
    """Logits of the block's places except the root's."""
    seen = made.seen[row]
    features = made.features[row, :seen]
    context = plain.norm(linear(features, plain.weights["fc.weight"]), "hidden_norm.weight")
    x = table[torch.tensor([int(made.tokens[row, seen]), *[MASK] * (size - 1)])]
    positions = seen + torch.arange(size)
    first = max(0, seen + size - window) if window else 0
    mask = (torch.arange(seen + size) >= first).expand(size, -1)
    for name in ("layers.0", "layers.1"):
        normed = plain.norm(x, f"{name}.input_layernorm.weight")
        x = plain.layer(name, normed, x, positions, mask, (context, torch.arange(seen)))
    return linear(plain.norm(x, "norm.weight"), table)[1:]
