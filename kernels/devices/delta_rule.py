"""The gated delta rule in plain torch, for devices without a kernel for it.

A head's state S [k_dim, v_dim] answers a key with a value. Each token makes it forget, and corrects the answer to its
own key (Yang et al., arXiv 2412.06464, section 3; with a decay of each number of the key Kimi Team, arXiv 2510.26692):

    S = exp(decay) * S;  S = S + beta * outer(k, v - S^T k);  o = S^T q

Chunks of a prompt are computed in parallel: the corrections of a chunk's tokens depend on one another by a triangular
system (section 3.2 of the former).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.core.batch import StateSegments
from kernels.core.operators import Norm
from kernels.devices.state_cache import StateCache

__all__ = ["DeltaChunks", "DeltaInputs", "DeltaRule", "DeltaTokens", "delta_chunks", "delta_rule", "delta_step"]

_CHUNK = 64
"""Tokens that are computed in parallel."""
_CHANNEL_CHUNK = 16
"""The same where each number of a key decays by itself: scores are then sums of products of three."""
_NUMBERS = 1 << 25
"""Most factors of such products that are made at a time."""


@dataclass(frozen=True, eq=False)
class DeltaTokens:
    """``count`` tokens of each of ``n`` rows, all float32. ``q``, ``k`` [n, count, heads, k_dim]; ``v`` [n, count,
    heads, v_dim]; ``decay`` [n, count, heads, k_dim], or [..., 1] of a whole head: the logarithm, at most 0; ``beta``
    [n, count, heads]."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor

    def part(self, begin: int, end: int) -> DeltaTokens:
        """Tokens ``begin .. end - 1`` of each row."""
        given = (self.q, self.k, self.v, self.decay, self.beta)
        return DeltaTokens(*(x[:, begin:end] for x in given))


@dataclass(frozen=True, eq=False)
class DeltaInputs:
    """What a layer makes of a step's tokens: inputs of the convolution ``mixed`` [tokens, channels], queries, keys and
    values; ``gates`` [tokens, values] of the results; ``betas`` float32 [tokens, heads]; ``decays`` float32 [tokens,
    heads, 1 or k_dim]."""

    mixed: Tensor
    gates: Tensor
    betas: Tensor
    decays: Tensor


@dataclass(frozen=True, eq=False)
class DeltaChunks:
    """Chunks of ``size`` tokens, float32, with all of each that does not depend on the state before it: what its tokens
    ``changes`` [n, heads, chunks, size, v_dim] if that were zero, and the rows below [..., size, k_dim] by which they
    read it (``reads``), answer from it (``asks``) and write (``writes``); ``scores`` [..., size, size] of queries and
    changes. ``forgets`` [n, heads, chunks, 1 or k_dim]: the factors of a state over the chunk."""

    changes: Tensor
    reads: Tensor
    asks: Tensor
    scores: Tensor
    writes: Tensor
    forgets: Tensor


Scan = Callable[[DeltaChunks, Tensor], tuple[Tensor, Tensor]]


class DeltaRule:
    """Steps of gated delta nets. A device overrides what it has kernels for."""

    def step(
        self, inputs: DeltaInputs, weight: Tensor, cache: StateCache, segment: StateSegments, out: Tensor, share: int
    ) -> bool:
        """Run a segment of one token a row: convolution by ``weight`` float32 [taps, channels] and silu, lengths of
        queries and keys, and the rule. ``cache``: the convolution's inputs and the delta rule's states. ``out``
        [tokens, heads, v_dim]. ``share``: value heads of a key head. -> False: nothing has run, as the device has no
        kernel for it.
        """
        return False

    def scan(self, chunks: DeltaChunks, state: Tensor) -> tuple[Tensor, Tensor]:
        """``chunks`` one after the other on from ``state`` float32 [n, heads, k_dim, v_dim] -> results [n, heads,
        chunks, size, v_dim], the state after."""
        return scan_chunks(chunks, state)

    def head_gates(self, b: Tensor, a: Tensor, factor: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
        """Betas ``sigmoid(b)`` float32 [tokens, heads] and decays ``factor * softplus(a + offset)`` float32 [tokens,
        heads, 1]. ``b``, ``a`` [tokens, heads]; ``factor``, ``offset`` float32 [heads]."""
        return torch.sigmoid(b.float()), (factor * F.softplus(a.float() + offset)).unsqueeze(-1)

    def gated_norm(self, norm: Norm, out: Tensor, gates: Tensor, sigmoid: bool) -> Tensor:
        """The ``norm`` of each head of ``out`` [tokens, heads, v_dim], times the silu of its ``gates`` [tokens, heads *
        v_dim], or their ``sigmoid``. -> [tokens, heads * v_dim]."""
        normed = norm(out.view(-1, out.shape[2])).view(len(out), -1)
        weights = torch.sigmoid(gates.float()) if sigmoid else F.silu(gates.float())
        return (normed.float() * weights).to(out.dtype)


def delta_rule(tokens: DeltaTokens, state: Tensor, scan: Scan | None = None) -> tuple[Tensor, Tensor]:
    """``tokens`` on from ``state`` float32 [n, heads, k_dim, v_dim] -> results [n, count, heads, v_dim], the state
    after. May overwrite the state. ``scan``: in place of ``scan_chunks``."""
    return delta_step(tokens, state) if tokens.q.shape[1] == 1 else delta_chunks(tokens, state, scan or scan_chunks)


def delta_step(tokens: DeltaTokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """``delta_rule`` of one token a row."""
    q, k, v = tokens.q[:, 0], tokens.k[:, 0], tokens.v[:, 0]
    state = state.mul_(tokens.decay[:, 0].exp().unsqueeze(-1))
    known = torch.matmul(k.unsqueeze(-2), state)
    change = (v.unsqueeze(-2) - known) * tokens.beta[:, 0, :, None, None]
    state = state.addcmul_(k.unsqueeze(-1), change)
    return torch.matmul(q.unsqueeze(-2), state).transpose(1, 2), state


def scan_chunks(chunks: DeltaChunks, state: Tensor) -> tuple[Tensor, Tensor]:
    """``DeltaRule.scan`` in plain torch."""
    results = []
    for chunk in range(chunks.reads.shape[2]):
        change = chunks.changes[:, :, chunk] - chunks.reads[:, :, chunk] @ state
        results.append(chunks.asks[:, :, chunk] @ state + chunks.scores[:, :, chunk] @ change)
        forgets, writes = chunks.forgets[:, :, chunk], chunks.writes[:, :, chunk]
        state = state * forgets.unsqueeze(-1) + writes.transpose(2, 3) @ change
    return torch.stack(results, 2), state


def delta_chunks(tokens: DeltaTokens, state: Tensor, scan: Scan = scan_chunks) -> tuple[Tensor, Tensor]:
    """``delta_rule`` in chunks."""
    rows, count, heads, dim = tokens.q.shape
    if tokens.decay.shape[-1] == 1:
        return _chunks(tokens, state, min(_CHUNK, count), scan)
    size = min(_CHANNEL_CHUNK, count)
    span = max(1, _NUMBERS // (rows * heads * dim * size * size)) * size
    results = []
    for begin in range(0, count, span):
        found, state = _chunks(tokens.part(begin, begin + span), state, size, scan)
        results.append(found)
    return torch.cat(results, 1), state


def _chunks(tokens: DeltaTokens, state: Tensor, size: int, scan: Scan) -> tuple[Tensor, Tensor]:
    """``delta_rule`` in chunks of ``size`` tokens."""
    count, by_channel = tokens.q.shape[1], tokens.decay.shape[-1] > 1

    def chunks(x: Tensor) -> Tensor:
        """[n, count, heads, dim] -> [n, heads, chunks, size, dim]; padding leaves the state as it is."""
        padded = F.pad(x, (0, 0, 0, 0, 0, -count % size)) if count % size else x
        result: Tensor = padded.transpose(1, 2).unflatten(2, (-1, size))
        return result

    q, k, v, decay, beta = map(chunks, (tokens.q, tokens.k, tokens.v, tokens.decay, tokens.beta.unsqueeze(-1)))
    total = decay.cumsum(3)  # from the chunk's beginning up to each token
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    lost = (total.unsqueeze(4) - total.unsqueeze(3)).masked_fill_(later[..., None], -torch.inf).exp_()
    if by_channel:
        overlap = torch.einsum("nhcid,nhcjd,nhcijd->nhcij", k, k, lost)
        scores = torch.einsum("nhcid,nhcjd,nhcijd->nhcij", q, k, lost)
    else:
        overlap = (k @ k.transpose(3, 4)) * lost.squeeze(-1)
        scores = (q @ k.transpose(3, 4)) * lost.squeeze(-1)
    kept = total.exp()
    given = torch.cat((v * beta, k * kept * beta), -1)
    solved = torch.linalg.solve_triangular(overlap * beta, given, upper=False, unitriangular=True)
    changes, reads = solved.split((v.shape[-1], k.shape[-1]), -1)
    writes = k * (total[..., -1:, :] - total).exp()
    results, state = scan(DeltaChunks(changes, reads, q * kept, scores, writes, kept[..., -1, :]), state)
    return results.flatten(2, 3)[:, :, :count].transpose(1, 2), state
