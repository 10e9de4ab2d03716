"""Common parts of draft models: choosing draft tokens by logits, and places in a draft's cache.

Sampled rows rank candidates by the draft's logits with the noise that the target will sample with. Where the draft's
distribution is close to the target's, both then choose the same token (a common random number coupling; the
Gumbel-max trick is explained in ``kernels.core.noise``).

Draft tokens lie in the draft's cache after the known tokens, where the next observation overwrites them. They may need
more places than the sequence's pages have, so each slot has some spare pages after those of the target's cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.contract.config import RunnerConfig
from kernels.core.arrays import Ints, Longs
from kernels.core.noise import exponential_noise, keys_at
from kernels.core.operators import Candidates, Greedy
from kernels.devices.base import Device
from kernels.sampling.sampler import Noise

__all__ = ["DraftPlaces", "DraftSampler"]

_SAMPLED = 256  # candidates of a sampled row; less likely tokens win too rarely to matter


class DraftSampler:
    """Chooses draft tokens. ``ids`` int64: the target's id of each token of the draft's vocabulary; None: both are the
    same. ``greedy``, ``few``: the device's operators."""

    def __init__(self, ids: Tensor | None, greedy: Greedy | None, few: Candidates | None = None) -> None:
        self._ids = ids
        self._greedy = greedy
        self._few = few

    def best(self, logits: Tensor, noise: Noise | None, roots: Tensor, ahead: int | Tensor) -> Tensor:
        """The best draft token of each row of ``logits`` [rows * n, vocabulary], int64 [rows * n].

        ``roots`` int64 [rows]: positions of the last known tokens. ``ahead``: distance of the draft tokens from them;
        one for each of the n, or one for all.
        """
        if noise is not None:
            return self.candidates(logits, noise, roots, ahead, 1)[0][:, 0]
        return self._target(logits.argmax(-1) if self._greedy is None else self._greedy(logits)[0])

    def candidates(
        self, logits: Tensor, noise: Noise | None, roots: Tensor, ahead: int | Tensor, count: int
    ) -> tuple[Tensor, Tensor]:
        """The ``count`` best draft tokens and their log-probabilities, [rows * n, most] each, the best first."""
        if noise is None and self._few is not None:
            chosen, scores = self._few(logits, count)
            return self._target(chosen), scores
        total = logits.float().logsumexp(-1, keepdim=True)
        vocab = logits.shape[1]
        if noise is None:
            values, chosen = logits.topk(min(count, vocab))
            return self._target(chosen), values.float() - total
        values, chosen = logits.topk(min(max(count, _SAMPLED), vocab))
        ids = self._target(chosen)
        positions = roots.unsqueeze(1) + ahead
        best, at = _add_gumbel_noise(values.float(), total, ids, noise, positions).topk(min(count, vocab))
        return ids.gather(1, at), best

    def _target(self, chosen: Tensor) -> Tensor:
        return chosen if self._ids is None else self._ids[chosen]


def _add_gumbel_noise(values: Tensor, total: Tensor, ids: Tensor, noise: Noise, positions: Tensor) -> Tensor:
    """The log of each candidate's [nodes, candidates] chance to be the target's sample. In sampled rows it is estimated
    from the candidates' noise.
    """
    each = len(values) // len(positions)
    keys = keys_at(noise.keys.repeat_interleave(each, 0), positions.expand(-1, each).reshape(-1))
    temperature = noise.temperature.repeat_interleave(each).unsqueeze(1)
    sampled = temperature > 0
    scaled = values / torch.where(sampled, temperature, 1.0)
    noisy = scaled - exponential_noise(keys.unsqueeze(1), ids.to(torch.int32)).log()
    return torch.where(sampled, noisy.log_softmax(-1), values - total)


class DraftPlaces:
    """The places of up to ``places`` draft tokens of a row, from ``first`` positions after its root on."""

    def __init__(self, device: Device, config: RunnerConfig, places: int, first: int = 0) -> None:
        self._device, self._page_size, self._slots, self._first = device, config.page_size, config.max_slots, first
        # The fewest places from the root on in a row's own pages. A pipeline drafts before the next step grants any.
        given = 2 if config.pp_size == 1 else 0
        self._spare = max(0, -(-(first + places - given) // config.page_size))
        self._begin = 0

    def cache_pages(self, pages: int) -> int:
        """Pages of a draft's cache if the target's has ``pages``."""
        self._begin = pages
        return pages + self._spare * self._slots

    @property
    def spare_tokens(self) -> int:
        """Places of a cache beyond those of the target's pages."""
        return self._spare * self._slots * self._page_size

    @property
    def own(self) -> tuple[int, int]:
        """(first spare page, which is of slot 0; spare pages of each slot)."""
        return self._begin, self._spare

    def table(self, slots: Longs, roots: Longs, given: Ints, capacity: Longs, places: int) -> Ints:
        """int32 [rows, columns]: the pages of ``places`` draft tokens and of all before them.

        ``given`` int32 [rows, columns]: the target's page table, with ``capacity`` valid positions.
        """
        last = int(roots.max()) + self._first + places - 1
        columns = max(0, last) // self._page_size + 1
        if last < int(capacity.min()) and columns <= given.shape[1]:
            return given[:, :columns]
        pages = np.zeros((len(slots), columns), dtype=np.int32)
        own = given[:, :columns]
        pages[:, : own.shape[1]] = own
        beyond = np.arange(columns) - (capacity // self._page_size)[:, None]
        if not self._spare:
            return np.where(beyond >= 0, 0, pages).astype(np.int32)  # columns that longer rows have
        spare = self._begin + self._spare * slots[:, None] + np.minimum(beyond, self._spare - 1)
        return np.where(beyond >= 0, spare, pages).astype(np.int32)

    def put(self, positions: Longs, places: Longs, table: Ints) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Copy ``positions`` int64 [passes, rows * n] and the cache indices of ``places`` [passes, rows * n] to the
        device; returns a tensor a pass of each."""
        rows = np.repeat(np.arange(len(table)), places.shape[1] // len(table))
        pages, offsets = np.divmod(places, self._page_size)
        both = np.stack((positions, table[rows, pages] * np.int64(self._page_size) + offsets))
        result = self._device.memory.put(both.reshape(-1, places.shape[1])).unbind(0)
        return result[: len(places)], result[len(places) :]
