"""The context of linear layers: the adapter of each row, and this rank.

An adapter adds something of its own to the outputs of linear layers, for the rows that use it alone (LoRA, Hu et al.,
arXiv 2106.09685; many adapters in one batch: S-LoRA, Sheng et al., arXiv 2311.03285). Each page of the cache belongs to
one adapter, as keys and values depend on it. So a pass finds the adapter of each token from where its keys and values
go, which every pass knows on the device: graphs that are captured once serve any mix of adapters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["Delta", "LayerContext", "RowAdapters"]

Delta = Callable[[Tensor, Tensor], Tensor]
"""``x`` [rows, inputs] and outputs [rows, outputs] of a linear layer -> the outputs with what adapters add to them, the
same for rows of place 0. May overwrite the outputs.

It reads ``LayerContext.rows``, nothing on the host, and has static shapes: it may be part of a captured graph.
"""


class RowAdapters(Protocol):
    """The adapters that a model is loaded with."""

    @property
    def nbytes(self) -> int:
        """Bytes of the device's memory that their places take."""
        ...

    def make(self, modules: tuple[str, ...], context: LayerContext) -> Delta | None:
        """The addition to the layer of ``modules``, whose outputs follow one another; None: no adapter has one."""
        ...

    def refuse(self, modules: tuple[str, ...]) -> None:
        """The layers of ``modules`` take no adapters."""
        ...

    def acquire(self, index: int) -> int:
        """The place of adapter ``index`` on the device, for one slot more, after it was copied there if need be; 0: 0.

        Steps that run read their places first. Raises ConfigError where it is not loaded, or slots use all places.
        """
        ...

    def release(self, index: int) -> None:
        """A slot that had acquired adapter ``index`` is free again."""
        ...


class LayerContext:
    """Shared by the linear layers of one model.

    rank, size: this rank, of how many. A layer that is divided by its inputs has its part of ``x``, and the sum over
    the ranks is taken after the addition; one that is divided by its outputs adds its own part of them.
    """

    def __init__(self, adapters: RowAdapters, device: torch.device, rank: int = 0, size: int = 1) -> None:
        self.adapters, self.device, self.rank, self.size = adapters, device, rank, size
        self._of_page = torch.zeros(1, dtype=torch.int64, device=device)
        self._page_size = 1
        self._rows: Tensor | None = None
        self._segments: list[tuple[int, Tensor | None]] | None = None

    @property
    def rows(self) -> Tensor:
        """int64 [rows]: the place of the adapter of each row of the pass that runs; 0: none."""
        assert self._rows is not None, "read while a pass runs"
        return self._rows

    @property
    def segments(self) -> list[tuple[int, Tensor | None]]:
        """The places other than 0 that rows of the pass have, with the indices of these rows int64; None: all rows.

        For a device that shares the host's memory and runs the pass anew each time.
        """
        if self._segments is None:
            places = self.rows.unique().tolist()
            whole = len(places) == 1
            self._segments = [
                (place, None if whole else (self.rows == place).nonzero().flatten()) for place in places if place
            ]
        return self._segments

    def open(self, pages: int, page_size: int) -> None:
        """A cache of so many pages is used from now on. No page has an adapter."""
        self._of_page = torch.zeros(pages, dtype=torch.int64, device=self.device)
        self._page_size = page_size

    def assign(self, pages: npt.NDArray[Any], place: int) -> None:
        """``pages``: those that a sequence writes to, or shares with others of its adapter, which is at ``place``."""
        if len(pages):
            index = torch.from_numpy(pages.astype(np.int64)).to(self.device)
            self._of_page.index_copy_(0, index, torch.full_like(index, place))

    def enter(self, cache_index: Tensor) -> None:
        """A pass begins, whose tokens go to ``cache_index`` int64 [tokens] (page * page_size + offset)."""
        pages = torch.div(cache_index, self._page_size, rounding_mode="floor")
        self._rows, self._segments = self._of_page.index_select(0, pages), None

    def select(self, wanted: Tensor) -> None:
        """The pass goes on with these of its rows alone, int64 [rows]."""
        self._rows, self._segments = self.rows.index_select(0, wanted), None
