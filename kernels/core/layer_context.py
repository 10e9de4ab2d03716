"""The context of linear layers: the adapter of each row, and this rank.

An adapter adds something of its own to the outputs of linear layers, for the rows that use it alone (LoRA, Hu et al.,
arXiv 2106.09685; many adapters in one batch: S-LoRA, Sheng et al., arXiv 2311.03285). Each page of the cache belongs to
one adapter, as keys and values depend on it. So a pass finds the adapter of each token from where its keys and values
go, which every pass knows on the device: graphs that are captured once serve any mix of adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["BaseLayer", "Delta", "ExpertModules", "LayerContext", "RowAdapters"]

Delta = Callable[[Tensor, Tensor], Tensor]
"""``x`` [rows, inputs] and outputs [rows, outputs] of a linear layer -> the outputs with what adapters add to them, the
same for rows of place 0. May overwrite the outputs.

It reads ``LayerContext.rows``, nothing on the host, and has static shapes: it may be part of a captured graph.
"""


@dataclass(frozen=True, eq=False)
class BaseLayer:
    """A linear layer that adapters add to: ``[rows, inputs] -> [rows, outputs]``, with its ``bias`` [outputs].

    ``squares`` float32 [outputs]: of the weight, summed over this rank's inputs. ``sums``: of a tensor over the ranks
    that divide the inputs, which may overwrite it; None: the inputs are whole.
    """

    linear: Callable[[Tensor], Tensor]
    bias: Tensor | None
    squares: Tensor
    sums: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True, eq=False)
class ExpertModules:
    """The experts of a layer, by their names in adapters.

    modules: (gate, up, down) of each, or (up, down). here: those of this rank. stacked: the module whose parameters are
    those of all experts, in this checkpoint or in others. sizes: the inner and the hidden one, where the model declares
    such parameters alone. alternate: outputs of gate and up alternate in them. router: what chooses them; "": it takes
    no adapters.
    """

    stacked: str
    modules: Sequence[tuple[str, ...]]
    here: range
    sizes: tuple[int, int] | None = None
    alternate: bool = False
    router: str = ""


class RowAdapters(Protocol):
    """The adapters that a model is loaded with."""

    @property
    def nbytes(self) -> int:
        """Bytes of the device's memory that their places take."""
        ...

    def takes(self, modules: tuple[str, ...]) -> bool:
        """Whether an adapter may add to the layer of ``modules``."""
        ...

    @property
    def scales(self) -> bool:
        """Whether adapters may also scale what linear layers give (DoRA, Liu et al., arXiv 2402.09353)."""
        ...

    def make(self, modules: tuple[str, ...], context: LayerContext, base: BaseLayer | None = None) -> Delta | None:
        """The addition to the layer of ``modules``, whose outputs follow one another; None: no adapter has one.
        ``base``: the layer; None: adapters do not scale what it gives."""
        ...

    def make_lookup(self, module: str, context: LayerContext) -> Delta | None:
        """The addition to rows of the table of embeddings ``module``, whose ``x`` are token ids int [rows]."""
        ...

    def make_head(self, module: str, context: LayerContext) -> Delta | None:
        """``make`` of the output, which may share its weight with the table of embeddings."""
        ...

    def make_latent(self, module: str, context: LayerContext) -> tuple[Tensor, Tensor] | None:
        """The places of ``module``, which makes keys and values of latent vectors: see ``AdaptedLatentHeads``; None: no
        adapter has one."""
        ...

    def make_experts(self, experts: ExpertModules, context: LayerContext) -> list[tuple[Delta, Delta]] | None:
        """The additions to (gate and up, down) of the experts of this rank; None: no adapter has one."""
        ...

    def make_router(self, module: str, context: LayerContext) -> Delta | None:
        """The addition to what chooses or weights experts; None: no adapter has one."""
        ...

    def refuse(self, modules: tuple[str, ...], reason: str) -> None:
        """The layers of ``modules`` take no adapters, for a ``reason`` that begins a sentence."""
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

    places: of the adapters of slots. in_head: whether adapters add to logits, which are computed of chosen rows behind
    a pass: see ``enter_slots``. rank, size: this rank, of how many. A layer that is divided by its inputs has its part
    of ``x``, and the sum over the ranks is taken after the addition; one that is divided by its outputs adds its own
    part of them.

    used: whether a slot has an adapter. idle: whether the pass that runs, or is captured, is for rows without one.
    passes: how many were begun here, a captured one counted once.
    """

    def __init__(self, adapters: RowAdapters, device: torch.device, rank: int = 0, size: int = 1) -> None:
        self.adapters, self.device, self.rank, self.size = adapters, device, rank, size
        self._of_page = torch.zeros(1, dtype=torch.int64, device=device)
        self._page_size = 1
        self.used = self.idle = False
        self._rows: Tensor | None = None
        self._segments: list[tuple[int, Tensor | None]] | None = None
        self._whole: tuple[Tensor | None, list[tuple[int, Tensor | None]] | None] | None = None  # of a divided pass
        self.in_head = False
        self.places: dict[int, int] = {}
        self.passes = 0
        self._current: Tensor | None = None

    def count_passes(self) -> Tensor:
        """int64 [1]: the number of the pass that runs, from 1 on, counted on the device also where it was captured.

        It is counted from the first call on.
        """
        if self._current is None:
            self._current = torch.zeros(1, dtype=torch.int64, device=self.device)
        return self._current

    @torch.inference_mode()
    def _begin(self) -> None:
        self.passes += 1
        if self._current is not None:
            self._current.add_(1)

    @property
    def rows(self) -> Tensor:
        """int64 [rows]: the place of the adapter of each row of the pass that runs; 0: none."""
        assert self._rows is not None, "read while a pass runs"
        return self._rows

    @property
    def pages(self) -> tuple[Tensor, int]:
        """int64 [pages]: the place of each page's adapter, and tokens of a page. From ``open`` on it is one tensor."""
        return self._of_page, self._page_size

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

    @torch.inference_mode()
    def assign(self, pages: npt.NDArray[Any], place: int) -> None:
        """``pages``: those that a sequence writes to, or shares with others of its adapter, which is at ``place``."""
        if len(pages):
            index = torch.from_numpy(pages.astype(np.int64)).to(self.device)
            self._of_page.index_copy_(0, index, torch.full_like(index, place))

    def enter(self, cache_index: Tensor) -> None:
        """A pass begins, whose tokens go to ``cache_index`` int64 [tokens] (page * page_size + offset)."""
        self._begin()  # first: kernels read it while the previous kernel runs
        pages = torch.div(cache_index, self._page_size, rounding_mode="floor")
        self._rows, self._segments, self._whole = self._of_page.index_select(0, pages), None, None

    def divide(self, own: Tensor) -> None:
        """Until ``select`` this rank runs these rows of the pass alone, int64 [rows], but within ``undivided``."""
        whole = self._rows, self._segments
        self.select(own)
        self._whole = whole

    @contextmanager
    def undivided(self) -> Iterator[None]:
        """All rows of the pass within the block."""
        if self._whole is None:
            yield
            return
        own, (self._rows, self._segments), self._whole = (self._rows, self._segments), self._whole, None
        try:
            yield
        finally:
            self._whole = self._rows, self._segments
            self._rows, self._segments = own

    def select(self, wanted: Tensor) -> None:
        """The pass goes on with these of its rows alone, int64 [rows]. Call it before the rows are copied: kernels for
        adapters read ``rows`` while the previous kernel runs, and that must not be the one that writes them."""
        if self._whole is not None:
            (self._rows, self._segments), self._whole = self._whole, None
        self._rows, self._segments = self.rows.index_select(0, wanted), None

    @contextmanager
    def selected(self, wanted: Tensor) -> Iterator[None]:
        """``select`` within the block."""
        before = self._rows, self._segments
        self.select(wanted)
        try:
            yield
        finally:
            self._rows, self._segments = before

    def enter_slots(self, slots: Iterable[int]) -> None:
        """Logits of rows of these slots are computed next."""
        self._begin()
        places = [self.places.get(slot, 0) for slot in slots]
        self._rows, self._segments = torch.tensor(places, dtype=torch.int64).to(self.device, non_blocking=True), None
