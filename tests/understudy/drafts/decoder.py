"""Qwen3 in plain torch, for the frozen target (its hidden states are what drafts read) and for the standalone draft."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.understudy.drafts.blocks import Layer, RMSNorm, Sizes, rotation

__all__ = ["Decoder", "generate", "load"]

_STRIDE = 64  # attention reads the cache up to a multiple of this, and finished rows leave the batch as often


class _Body(nn.Module):
    def __init__(self, config: dict[str, Any], sizes: Sizes) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], sizes.hidden)
        self.layers = nn.ModuleList(Layer(sizes, head_norms=True) for _ in range(config["num_hidden_layers"]))
        self.norm = RMSNorm(sizes.hidden, sizes.eps)


class Decoder(nn.Module):
    """Embeddings tied to the output. Computes in `dtype` where autocast does not say otherwise."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config, self.sizes = config, Sizes.of(config)
        self.dtype = torch.float32
        self.model = _Body(config, self.sizes)

    @property
    def embedding(self) -> Tensor:
        """[vocabulary, hidden]"""
        weight: Tensor = self.model.embed_tokens.weight
        return weight

    def embed(self, ids: Tensor) -> Tensor:
        """`ids` [...] -> [..., hidden] in the computing dtype."""
        return F.embedding(ids, self.embedding).to(self.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """`hidden` [..., hidden], normed -> [..., vocabulary]"""
        return F.linear(hidden, self.embedding)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        cache: list[tuple[Tensor, Tensor]] | None = None,
        at: int = 0,
    ) -> tuple[list[Tensor], Tensor]:
        """`ids` [batch, length] -> (the residual sums after each layer, the final normed hidden states).

        With a cache (for each layer keys and values [batch, groups, room, head]) the new keys go to `at` onwards, and
        the queries see what `mask` [batch, 1, length, keys] allows.
        """
        where = torch.arange(ids.shape[1], device=ids.device)[None] if positions is None else positions
        cos, sin = rotation(self.sizes, where)
        turn = cos[:, None], sin[:, None]
        x = self.embed(ids)
        sums = []
        for number, layer in enumerate(self.model.layers):
            assert isinstance(layer, Layer)
            h = layer.input_layernorm(x)
            q, (k, v) = layer.self_attn.queries(h, turn), layer.self_attn.keys(h, turn)
            if cache is not None and mask is not None:
                for room, new in zip(cache[number], (k, v), strict=True):
                    room[:, :, at : at + ids.shape[1]] = new
                k, v = (room[:, :, : mask.shape[-1]] for room in cache[number])
            x = layer.mix(x, q, k, v, mask)
            sums.append(x)
        return sums, self.model.norm(x)


def load(directory: Path, device: str) -> Decoder:
    """A checkpoint directory's model, frozen; in bfloat16 on a GPU, in float32 on the processor."""
    model = Decoder(json.loads((directory / "config.json").read_text(encoding="utf-8")))
    model.load_state_dict(load_file(str(directory / "model.safetensors")))
    model.dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model.to(device, model.dtype).requires_grad_(False).eval()
    return model


@torch.inference_mode()
def generate(
    model: Decoder, prompts: Sequence[Sequence[int]], temperatures: Sequence[float], limit: int, ends: Sequence[int]
) -> list[list[int]]:
    """What the model writes after each prompt, its end token included, at most `limit` tokens; 0.0 is greedy."""
    device, longest = model.embedding.device, max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    pads = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
    heat = torch.tensor(temperatures, device=device)[:, None]
    room = -(-(longest + limit) // _STRIDE) * _STRIDE
    shape = (len(prompts), model.sizes.groups, room, model.sizes.head)
    caches = [
        (torch.zeros(shape, dtype=model.dtype, device=device), torch.zeros(shape, dtype=model.dtype, device=device))
        for _ in model.model.layers
    ]
    places = torch.arange(room, device=device)
    rows = list(range(len(prompts)))
    answers: list[list[int]] = [[] for _ in prompts]
    written: list[Tensor] = []
    alive = torch.ones(len(prompts), dtype=torch.bool, device=device)
    at, feed = 0, ids
    for count in range(limit):
        last = at + feed.shape[1]
        seen = places[: -(-last // _STRIDE) * _STRIDE]
        queries = torch.arange(at, last, device=device)
        mask = (seen >= pads[:, None, None]) & (seen <= queries[:, None])
        mask = (mask | (seen == queries[:, None]))[:, None]  # padding sees itself, so that no softmax is empty
        positions = (queries - pads[:, None]).clamp(min=0)
        _, hidden = model(feed, positions, mask, caches, at)
        scores = model.logits(hidden[:, -1]).float()
        noise = -torch.empty_like(scores).exponential_().log()
        token = (scores + noise * heat).argmax(-1)  # the Gumbel way of sampling at a temperature
        written.append(torch.where(alive, token, -1))
        for end in ends:
            alive = alive & (token != end)
        at, feed = last, token[:, None]
        if len(written) == _STRIDE // 4 or count == limit - 1:
            for row, tokens in zip(rows, torch.stack(written, dim=1).tolist(), strict=True):
                answers[row] += [token for token in tokens if token >= 0]
            written = []
            left = alive.nonzero().flatten()
            if not len(left):
                break
            rows = [rows[index] for index in left.tolist()]
            caches = [(keys[left], values[left]) for keys, values in caches]
            pads, heat, alive, feed = pads[left], heat[left], alive[left], feed[left]
    return answers
