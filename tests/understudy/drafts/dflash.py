"""A DFlash draft: a whole block of tokens in one pass, from the target's features (Chen et al., arXiv 2602.06036).

A block is the last known token and masks for those to come. Its layers see the context as keys and values of the
target's features (one projection for all layers), and the block in both directions.
"""

from typing import Any

import torch
from torch import Tensor, nn

from tests.understudy.drafts.blocks import Layer, RMSNorm, Sizes, rotation

__all__ = ["DFlash"]


class DFlash(nn.Module):
    """The draft with the names of the public checkpoints; embeddings and output are the target's."""

    prefix = ""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config, self.sizes = config, Sizes.of(config)
        self.block: int = config["block_size"]
        self.mask_token: int = config["dflash_config"]["mask_token_id"]
        self.captures: list[int] = config["dflash_config"]["target_layer_ids"]
        hidden = self.sizes.hidden
        self.fc = nn.Linear(len(self.captures) * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, self.sizes.eps)
        self.layers = nn.ModuleList(Layer(self.sizes, head_norms=True) for _ in range(config["num_hidden_layers"]))
        self.norm = RMSNorm(hidden, self.sizes.eps)

    def forward(
        self, sums: list[Tensor], known: Tensor, masked: Tensor, starts: Tensor, block: int | None = None
    ) -> Tensor:
        """Blocks that start at `starts`, int64 [batch, blocks], each with the features before its start as context.

        `sums`: the target's residual sums, one a layer; `known` [batch, blocks, hidden]: embeddings of the tokens at
        the starts; `masked` [hidden]: the mask's; `block`: tokens of a block, when not the draft's own. -> [batch,
        blocks, block, hidden], what the output layer reads: place j predicts the token at start + j, place 0 nothing.
        """
        batch, length = sums[0].shape[:2]
        blocks, block = starts.shape[1], block or self.block
        context = self.hidden_norm(self.fc(torch.cat([sums[layer] for layer in self.captures], dim=-1)))
        offsets = torch.arange(block, device=starts.device)
        x = torch.cat((known[:, :, None], masked.expand(batch, blocks, block - 1, -1).to(known.dtype)), dim=2)
        x = x.flatten(1, 2)
        places = torch.arange(length, device=starts.device)
        turn = rotation(self.sizes, places)
        cos, sin = rotation(self.sizes, (starts[..., None] + offsets).flatten(1))
        block_turn = cos[:, None], sin[:, None]
        owner = torch.arange(blocks, device=starts.device).repeat_interleave(block)
        before = places < starts.repeat_interleave(block, dim=1)[..., None]
        within = (owner[:, None] == owner).expand(batch, -1, -1)
        mask = torch.cat((before, within), dim=-1)[:, None]
        for layer in self.layers:
            assert isinstance(layer, Layer)
            h = layer.input_layernorm(x)
            q, (k, v) = layer.self_attn.queries(h, block_turn), layer.self_attn.keys(h, block_turn)
            ahead_k, ahead_v = layer.self_attn.keys(context, turn)
            x = layer.mix(x, q, torch.cat((ahead_k, k), dim=2), torch.cat((ahead_v, v), dim=2), mask)
        out: Tensor = self.norm(x)
        found: Tensor = out.unflatten(1, (blocks, block))
        return found
