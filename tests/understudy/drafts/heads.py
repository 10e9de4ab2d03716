"""Heads that draft a token at a time from the target's features: EAGLE, EAGLE-3 and MTP.

At index i a head reads the feature of position i and the embedding of token i + 1, and predicts token i + 2; what it
computes at i stands in for the feature of position i + 1. In training a head is unrolled over several steps on its own
features, as it will run (the training-time test of EAGLE-3, here for all three).

EAGLE: Li et al., arXiv 2401.15077 and 2406.16858; EAGLE-3: arXiv 2503.01840; MTP: the DeepSeek-V3 report, arXiv
2412.19437, in the layout of MiMo's checkpoints.
"""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.understudy.drafts.blocks import Layer, RMSNorm, Sizes, rotation

__all__ = ["Eagle", "Eagle3", "Head", "Mtp", "project", "unroll"]


class Head(Protocol):
    """What `unroll` needs of a head."""

    sizes: Sizes

    @property
    def layer(self) -> Layer:
        """The head's only layer."""
        ...

    def first(self, sums: list[Tensor], normed: Tensor) -> Tensor:
        """The feature from the target's residual sums (one a layer) and its final hidden states."""
        ...

    def join(self, feature: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """(what the attention reads, what the layer adds to), each [batch, length, ...]."""
        ...

    def finish(self, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(what the output layer reads, the next step's feature)."""
        ...


class Eagle(nn.Module):
    """EAGLE's and EAGLE-2's head: `fc` of embedding and feature, a layer without a first norm, the target's output."""

    prefix = ""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config, self.sizes = config, Sizes.of(config)
        self.fc = nn.Linear(2 * self.sizes.hidden, self.sizes.hidden, bias=False)
        self.layers = nn.ModuleList([Layer(self.sizes, input_norm=False)])

    @property
    def layer(self) -> Layer:
        """The only layer."""
        layer = self.layers[0]
        assert isinstance(layer, Layer)
        return layer

    def first(self, sums: list[Tensor], normed: Tensor) -> Tensor:
        """The target's hidden states after its final norm."""
        return normed

    def join(self, feature: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """See Head."""
        x = self.fc(torch.cat((embedded, feature), dim=-1))
        return x, x

    def finish(self, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The residual sum is both: it imitates a normed hidden state."""
        return residual, residual


class _Midlayer(Layer):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes, inputs=2 * sizes.hidden)
        self.hidden_norm = RMSNorm(sizes.hidden, sizes.eps)


class Eagle3(nn.Module):
    """EAGLE-3's head: features of three layers, a wide first attention, an output over the most frequent tokens."""

    prefix = ""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config, self.sizes = config, Sizes.of(config)
        hidden, tokens = self.sizes.hidden, config["draft_vocab_size"]
        self.captures: list[int] = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        self.fc = nn.Linear(len(self.captures) * hidden, hidden, bias=False)
        self.midlayer = _Midlayer(self.sizes)
        self.norm = RMSNorm(hidden, self.sizes.eps)
        self.lm_head = nn.Linear(hidden, tokens, bias=False)
        self.register_buffer("d2t", torch.zeros(tokens, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config["vocab_size"], dtype=torch.bool))

    @property
    def layer(self) -> Layer:
        """The only layer."""
        return self.midlayer

    @property
    def vocabulary(self) -> Tensor:
        """The target's id of each draft token, int64 [draft vocabulary]."""
        offsets: Tensor = self.get_buffer("d2t")
        return offsets + torch.arange(len(offsets), device=offsets.device)

    def choose(self, tokens: Tensor) -> None:
        """Draft these target tokens: ascending ids, int64 [draft vocabulary]."""
        self.get_buffer("d2t").copy_(tokens - torch.arange(len(tokens), device=tokens.device))
        self.get_buffer("t2d")[tokens] = True

    def first(self, sums: list[Tensor], normed: Tensor) -> Tensor:
        """Residual sums after the captured layers, no norm, through `fc`."""
        out: Tensor = self.fc(torch.cat([sums[layer] for layer in self.captures], dim=-1))
        return out

    def join(self, feature: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """See Head."""
        parts = self.midlayer.input_layernorm(embedded), self.midlayer.hidden_norm(feature)
        return torch.cat(parts, dim=-1), feature

    def finish(self, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The output layer reads the normed sum, the next step the sum itself."""
        return self.norm(residual), residual


class _MtpLayer(Layer):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.token_layernorm = RMSNorm(sizes.hidden, sizes.eps)
        self.hidden_layernorm = RMSNorm(sizes.hidden, sizes.eps)
        self.input_proj = nn.Linear(2 * sizes.hidden, sizes.hidden, bias=False)
        self.final_layernorm = RMSNorm(sizes.hidden, sizes.eps)


class Mtp(nn.Module):
    """Multi-token prediction layers with MiMo's names. One is run by every step; of several each is a step's own."""

    prefix = "model."

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config, self.sizes = config, Sizes.of(config)
        self.mtp_layers = nn.ModuleList([_MtpLayer(self.sizes) for _ in range(config["num_nextn_predict_layers"])])

    @property
    def layers(self) -> list[_MtpLayer]:
        return [layer for layer in self.mtp_layers if isinstance(layer, _MtpLayer)]

    @property
    def layer(self) -> _MtpLayer:
        """The first layer."""
        return self.layers[0]

    def first(self, sums: list[Tensor], normed: Tensor) -> Tensor:
        """The target's hidden states after its final norm."""
        return normed

    def join(self, feature: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """See Head."""
        parts = self.layer.hidden_layernorm(feature), self.layer.token_layernorm(embedded)
        x = self.layer.input_proj(torch.cat(parts, dim=-1))
        return self.layer.input_layernorm(x), x

    def finish(self, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The normed sum is both, as the target's own normed hidden states are."""
        normed = self.layer.final_layernorm(residual)
        return normed, normed


def _sight(length: int, step: int, device: torch.device) -> Tensor:
    """What step `step` sees, bool [length, (step + 1) * length]: of step 0 the indices that had true features when
    the draft began, of each later step the one index on its own path."""
    query = torch.arange(length, device=device)[:, None]
    key = torch.arange(length, device=device)[None]
    return torch.cat([key <= query - step, *(key == query - step + back for back in range(1, step + 1))], dim=1)


def unroll(head: Head, sums: list[Tensor], normed: Tensor, following: Tensor, steps: int) -> Iterator[Tensor]:
    """For each step what the output layer reads at each index, [batch, length, hidden].

    `following`: embeddings of the next token, [batch, length, hidden]. At step s index i holds the prediction of token
    i + 2 by a draft that began at index i - s with the true feature; indices below s hold nothing of use.
    """
    length = following.shape[1]
    turn = rotation(head.sizes, torch.arange(length, device=following.device))
    if isinstance(head, Mtp) and len(head.layers) > 1:
        yield from _stacked(head, normed, following, turn, steps)
        return
    feature = head.first(sums, normed)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for step in range(steps):
        x, residual = head.join(feature, following)
        q, (k, v) = head.layer.self_attn.queries(x, turn), head.layer.self_attn.keys(x, turn)
        keys.append(k)
        values.append(v)
        sight = _sight(length, step, x.device)
        residual = head.layer.mix(residual, q, torch.cat(keys, dim=2), torch.cat(values, dim=2), sight)
        read, feature = head.finish(residual)
        yield read
        feature = torch.roll(feature, 1, dims=1)


def _stacked(head: Mtp, normed: Tensor, following: Tensor, turn: tuple[Tensor, Tensor], steps: int) -> Iterator[Tensor]:
    """The same of several layers, as many steps as there are: each reads at index i what the one before left there and
    the embedding of the token one further on (DeepSeek-V3, section 2.2)."""
    state = normed
    for step, layer in enumerate(head.layers[:steps]):
        tokens = layer.token_layernorm(torch.roll(following, -step, dims=1))
        x = layer.input_proj(torch.cat((layer.hidden_layernorm(state), tokens), dim=-1))
        inner = layer.input_layernorm(x)
        keys, values = layer.self_attn.keys(inner, turn)
        state = layer.final_layernorm(layer.mix(x, layer.self_attn.queries(inner, turn), keys, values, None))
        yield torch.roll(state, step, dims=1)


def project(head: Head, read: Tensor, output: Tensor) -> Tensor:
    """Logits over the head's own vocabulary, or over the target's with its `output` weight [vocabulary, hidden]."""
    return head.lm_head(read) if isinstance(head, Eagle3) else F.linear(read, output)
