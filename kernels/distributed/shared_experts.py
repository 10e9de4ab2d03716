"""Layers of experts that ranks of data-parallel attention share.

Each rank of attention runs its own tokens. In a layer of experts the rows of all are gathered, each rank runs its part
of the experts, and the sums are scattered back (Zheng et al., SGLang's data-parallel attention,
https://lmsys.org/blog/2024-12-04-sglang-v0-4/). How many rows each rank has is known on the host: no rank asks another.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.contract.expert_settings import ExchangeSettings
from kernels.distributed.expert_exchange import ExpertExchange
from kernels.distributed.group import Group
from kernels.distributed.turns import PassValue

__all__ = ["SharedExperts"]


class SharedExperts:
    """The ranks ``whole`` as ``parts`` of equally many, each of which divides the attention of its own tokens.

    Rank r of ``whole`` is rank ``r % size`` of part ``r // size``. ``attention``: the ranks of this part. ``hidden``,
    ``dtype``, ``device``: of the rows. ``exchange``: rows travel to their experts by all-to-all; None: all ranks
    gather all rows. All ranks must create one at the same time. Raises GroupError."""

    def __init__(
        self,
        whole: Group,
        parts: int,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        exchange: ExchangeSettings | None = None,
    ) -> None:
        size = whole.size // parts
        self.whole, self.parts, self.part = whole, parts, whole.rank // size
        self.attention = whole.subgroup(range(self.part * size, (self.part + 1) * size))
        self.across = whole.subgroup(range(whole.rank % size, whole.size, size))
        self.layers: list[Callable[[Tensor], Tensor]] = []
        self._nothing = torch.empty((0, hidden), dtype=dtype, device=device)
        self._tokens: tuple[int, ...] = ()
        self.sizes: tuple[int, ...] = ()
        """Tokens of captured passes, ascending and the same on all ranks. A pass that fits one of them has as many rows
        of each part, also on ranks that run it eagerly: so each rank replays its graph or not."""
        self.size = 0
        """The one of ``sizes`` that the pass has; 0: none."""
        self.exchange = None if exchange is None else ExpertExchange(whole, parts, exchange)

    def enter(self, tokens: tuple[int, ...]) -> None:
        """The next pass has at most so many tokens in each part, the same on all ranks; (): as many as in this one.

        Raises ValueError for another number of parts.
        """
        if tokens and len(tokens) != self.parts:
            raise ValueError(f"a step says the tokens of {len(tokens)} parts of data-parallel attention: {self.parts}")
        most = max(tokens, default=0)
        self.size = next((size for size in self.sizes if size >= most), 0) if most else 0
        self._tokens = (self.size,) * self.parts if self.size else tokens

    def tokens(self, rows: int) -> tuple[int, ...]:
        """The most tokens of each part in this pass. ``rows``: the tokens of this part. Raises ValueError if these are
        more than the other ranks expect."""
        tokens = self._tokens or (rows,) * self.parts
        if rows > tokens[self.part]:
            raise ValueError(f"a pass of {rows} tokens is over the {tokens[self.part]} that the other ranks expect")
        return tokens

    def run(self, x: Tensor, experts: Callable[[Tensor], Tensor], ids: PassValue | None = None) -> Tensor:
        """``experts``: this rank's summand for any rows [rows, hidden]; ``x`` [rows, hidden]: this part's rows. -> the
        sum of all ranks for these. ``ids`` int64 [rows]: by which experts of ``x`` are chosen; while ``experts`` runs,
        those of its rows."""
        tokens = self.tokens(len(x))
        most = max(tokens)
        if not most:
            return x
        rows = self._gathered(x, tokens)
        if ids is None:
            out = experts(rows)
        else:
            own = ids.value if len(x) else None
            column = rows.new_empty((0, 1), dtype=torch.int64) if own is None else own.long().unsqueeze(1)
            with ids.holding(self._gathered(column, tokens).squeeze(1)):
                out = experts(rows)
        if sum(tokens) < self.parts * most:
            out = torch.cat([_padded(own, most) for own in out.split(tokens)])
        mine = self.across.reduce_scatter(out)[: len(x)]
        return self.attention.all_reduce(mine) if len(x) else mine

    def _gathered(self, x: Tensor, tokens: tuple[int, ...]) -> Tensor:
        """The rows of all parts, of which each has so many ``tokens``. ``x`` [rows, n]: this part's."""
        most = max(tokens)
        rows = self.across.all_gather_rows(_padded(x, most))
        if sum(tokens) == len(rows):
            return rows
        return torch.cat([rows[part * most : part * most + own] for part, own in enumerate(tokens)])

    def run_empty(self) -> None:
        """Take part in a pass without a token of this part's own."""
        if any(self._tokens):
            for layer in self.layers:
                layer(self._nothing)

    def close(self) -> None:
        """Leave the groups of some ranks, before the whole one."""
        for group in (self.across, self.attention):
            group.close()


def _padded(x: Tensor, rows: int) -> Tensor:
    """``x`` with rows of zeros behind it."""
    return x if len(x) == rows else torch.cat((x, x.new_zeros((rows - len(x), x.shape[1]))))
