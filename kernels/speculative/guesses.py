"""Which tokens a draft's logits stand for.

Rows that are sampled rank candidates by the draft's logits with the noise that the target will sample with: where the
draft's distribution is close to the target's the two then choose the same token (a common random number coupling; the
race of clocks is explained in ``kernels.noise``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.noise import clocks, keys_at
from kernels.platforms.operators import Candidates, Greedy
from kernels.sampling import Noise

__all__ = ["Guesses"]

_SAMPLED = 256  # candidates of a row that is sampled; a token that is less likely wins a race too rarely to matter


class Guesses:
    """``ids`` int64: the target's id of each token of the draft's vocabulary; None: it is the target's own. ``greedy``,
    ``few``: the platform's own operators."""

    def __init__(self, ids: Tensor | None, greedy: Greedy | None, few: Candidates | None = None) -> None:
        self._ids = ids
        self._greedy = greedy
        self._few = few

    def best(self, logits: Tensor, noise: Noise | None, roots: Tensor, ahead: int | Tensor) -> Tensor:
        """The best guess of each row of ``logits`` [rows * n, vocabulary], int64 [rows * n].

        ``roots`` int64 [rows]: positions of the last known tokens. ``ahead``: how far behind them the guessed tokens
        stand; of each of the n, or of all.
        """
        if noise is not None:
            return self.candidates(logits, noise, roots, ahead, 1)[0][:, 0]
        return self._target(logits.argmax(-1) if self._greedy is None else self._greedy(logits)[0])

    def candidates(
        self, logits: Tensor, noise: Noise | None, roots: Tensor, ahead: int | Tensor, most: int
    ) -> tuple[Tensor, Tensor]:
        """The ``most`` best guesses and their log-probabilities, [rows * n, most] each, the best first."""
        if noise is None and self._few is not None:
            chosen, scores = self._few(logits, most)
            return self._target(chosen), scores
        total = logits.float().logsumexp(-1, keepdim=True)
        vocab = logits.shape[1]
        if noise is None:
            values, chosen = logits.topk(min(most, vocab))
            return self._target(chosen), values.float() - total
        values, chosen = logits.topk(min(max(most, _SAMPLED), vocab))
        ids = self._target(chosen)
        positions = roots.unsqueeze(1) + ahead
        best, at = _raced(values.float(), total, ids, noise, positions).topk(min(most, vocab))
        return ids.gather(1, at), best

    def _target(self, chosen: Tensor) -> Tensor:
        return chosen if self._ids is None else self._ids[chosen]


def _raced(values: Tensor, total: Tensor, ids: Tensor, noise: Noise, positions: Tensor) -> Tensor:
    """How likely each candidate [nodes, candidates] is to be what the target samples, as a logarithm: of a row that is
    sampled, the share of its clock's lead among all candidates'.
    """
    each = len(values) // len(positions)
    keys = keys_at(noise.keys.repeat_interleave(each, 0), positions.expand(-1, each).reshape(-1))
    temperature = noise.temperature.repeat_interleave(each).unsqueeze(1)
    sampled = temperature > 0
    scaled = values / torch.where(sampled, temperature, 1.0)
    raced = scaled - clocks(keys.unsqueeze(1), ids.to(torch.int32)).log()
    return torch.where(sampled, raced.log_softmax(-1), values - total)
