"""The state-space duality of Mamba 2 in plain torch, for devices without a kernel for it (Dao & Gu, arXiv 2405.21060).

A head's state S [dim, state] forgets with each token, takes up the token, and answers (section 3.1, with a step of each
token, Gu & Dao, arXiv 2312.00752):

    S = exp(step * rate) * S + step * outer(x, b);  y = S c + skip * x

Heads of a group share ``b`` and ``c``. Chunks of a prompt are computed in parallel (section 6): scores of its own
tokens within a chunk, and the states between chunks by one more product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.core.batch import StateSegments
from kernels.devices.state_cache import StateCache

__all__ = ["SpaceInputs", "SpaceTokens", "StateSpace", "space_chunks", "space_scan", "space_step"]

_CHUNK = 64
"""Tokens whose scores are computed at once."""


@dataclass(frozen=True, eq=False)
class SpaceTokens:
    """``count`` tokens of each of ``n`` rows, all float32. ``x`` [n, count, heads, dim]; ``b``, ``c`` [n, count,
    groups, state]; ``steps`` [n, count, heads], at least 0. Of all tokens: ``rates`` [heads], below 0; ``skips``
    [heads]."""

    x: Tensor
    b: Tensor
    c: Tensor
    steps: Tensor
    rates: Tensor
    skips: Tensor


@dataclass(frozen=True, eq=False)
class SpaceInputs:
    """What a layer makes of a step's tokens: inputs of the convolution ``mixed`` [tokens, channels], x of all heads, b
    and c of all groups; ``steps`` float32 [tokens, heads]. Of all tokens: ``rates``, ``skips`` as in
    ``SpaceTokens``."""

    mixed: Tensor
    steps: Tensor
    rates: Tensor
    skips: Tensor


class StateSpace:
    """Steps of Mamba 2. A device overrides what it has kernels for."""

    def step(
        self,
        inputs: SpaceInputs,
        weight: Tensor,
        bias: Tensor | None,
        cache: StateCache,
        segment: StateSegments,
        out: Tensor,
    ) -> bool:
        """Run a segment of one token a row: convolution by ``weight`` float32 [taps, channels] and ``bias`` [channels],
        silu, and the state space. ``cache``: the convolution's inputs and the heads' states. ``out`` [tokens, heads *
        dim]. -> False: nothing has run, as the device has no kernel for it.
        """
        return False


def space_scan(tokens: SpaceTokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """``tokens`` on from ``state`` float32 [n, heads, dim, state] -> results [n, count, heads, dim], the state after.
    May overwrite the state."""
    return space_step(tokens, state) if tokens.x.shape[1] == 1 else space_chunks(tokens, state)


def space_step(tokens: SpaceTokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """``space_scan`` of one token a row."""
    x, steps, groups = tokens.x[:, 0], tokens.steps[:, 0], tokens.b.shape[2]
    grouped = state.mul_((steps * tokens.rates).exp()[..., None, None]).unflatten(1, (groups, -1))
    taken = (x * steps.unsqueeze(-1)).unflatten(1, (groups, -1)).unsqueeze(-1)
    grouped.addcmul_(taken, tokens.b[:, 0, :, None, None])
    found = torch.matmul(grouped, tokens.c[:, 0, :, None, :, None]).squeeze(-1).flatten(1, 2)
    return (found + x * tokens.skips.unsqueeze(-1)).unsqueeze(1), state


def space_chunks(tokens: SpaceTokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """``space_scan`` in chunks."""
    count, groups = tokens.x.shape[1], tokens.b.shape[2]
    size = min(_CHUNK, count)

    def chunks(part: Tensor) -> Tensor:
        """[n, count, several, dim] -> [n, chunks, several, size, dim]; padding has no step, so it leaves the state."""
        padded = F.pad(part, (0, 0, 0, 0, 0, -count % size)) if count % size else part
        return padded.view(len(part), -1, size, *part.shape[2:]).transpose(2, 3)

    b, c = chunks(tokens.b), chunks(tokens.c)
    taken = chunks(tokens.x * tokens.steps.unsqueeze(-1)).unflatten(2, (groups, -1))
    total = chunks((tokens.steps * tokens.rates).unsqueeze(-1)).cumsum(3).unflatten(2, (groups, -1)).squeeze(-1)
    # The n chunks' tokens among themselves: scores [n, chunks, groups, heads of a group, size, size].
    scores = (c @ b.transpose(3, 4)).unsqueeze(3) * _decays(total)
    found = scores @ taken
    # What each chunk adds to the state, [n, chunks, groups, heads of a group, dim, state], and the states before each.
    left = (total[..., -1:] - total).exp().unsqueeze(-1)
    added = (taken * left).transpose(4, 5) @ b.unsqueeze(3)
    states = torch.cat((state.unflatten(1, (groups, -1)).unsqueeze(1), added), 1)
    ends = F.pad(total[..., -1], (0, 0, 0, 0, 1, 0)).cumsum(1).permute(0, 2, 3, 1)
    states = torch.einsum("nghzc,ncghps->nzghps", _decays(ends), states)
    found = found + (c.unsqueeze(3) @ states[:, :-1].transpose(4, 5)) * total.exp().unsqueeze(-1)
    found = found.flatten(2, 3).transpose(2, 3).flatten(1, 2)[:, :count]
    return found + tokens.x * tokens.skips.unsqueeze(-1), states[:, -1].flatten(1, 2)


def _decays(total: Tensor) -> Tensor:
    """The decay from each place to each later one: ``total`` [..., size], logarithms up to each, -> [..., size (to),
    size (from)], 0 where the second is the later one."""
    size = total.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=total.device).triu(1)
    return (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later, -torch.inf).exp_()
