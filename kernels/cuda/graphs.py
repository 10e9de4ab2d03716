"""Decodes and drafts in CUDA graphs: one for each number of rows in a list, replayed for up to so many rows.

A graph holds the addresses it was captured with, so what a step brings is copied into tensors that stay where they are.
Rows that a step does not have are filled up: they run the first token of nowhere, write to the dump page and see one
key. So are the tokens that a row has less than the others.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.batch import ForwardBatch
from kernels.cuda.ahead import of_each_kind
from kernels.cuda.attention import AttentionPlan, DecodeRows, DraftRows
from kernels.cuda.decode import split_count
from kernels.cuda.launch import looking_ahead
from kernels.cuda.staging import Staged, stage
from kernels.cuda.verify import HEADER
from kernels.platforms.prepared import PassEnd, PassFound, PassHead
from kernels.platforms.rows import AttentionRows
from kernels.speculative.tree import DraftTree, chain_bits

__all__ = ["DecodeGraphs", "Kind", "Put", "capture_each", "capture_guesses", "launches_last"]

_log = logging.getLogger("troupe.kernels.cuda")

_TRIES = 2
_HEADED_ROWS = 4
_BOUND = 0.7  # of a step's time, spent on launching

Put = Callable[[npt.NDArray[np.generic]], Tensor]
"""How an array gets to the device."""
Result = TypeVar("Result")
Size = TypeVar("Size", int, tuple[int, int])


class Kind(NamedTuple):
    """What is captured, in words, and what helps who cannot."""

    step: str  # with a place for its size
    silence: str
    room: str
    smaller: bool = False  # whether sizes below one for which memory is short are tried


_DECODES = Kind(
    "decode of %s rows",
    "--disable-cuda-graph silences this",
    "lower --mem-fraction-static or --cuda-graph-max-bs",
)


class DecodeGraphs:
    """Captures ``forward`` for batches of ``sizes`` rows of ``tokens`` tokens each, the largest first, in one memory
    pool.

    All tensors of a batch are views of the leading rows of the same buffers. ``columns``: pages a sequence may have.
    ``padded``: whether a step may use a graph of more rows than it has. ``agree``: whether all ranks of the model could
    do what this one could: a graph that one of them lacks is used by none. ``tree``, ``states``: as
    ``Platform.capture_decodes`` says, and ``head`` too. ``show``: as ``Platform.show``, if that is another way than
    ``put``.
    """

    def __init__(
        self,
        forward: Callable[[ForwardBatch], Tensor],
        windows: Sequence[int],
        sizes: Sequence[int],
        kv_heads: int,
        columns: int,
        page_size: int,
        device: torch.device,
        padded: bool,
        agree: Callable[[bool], bool],
        put: Put,
        tokens: int = 1,
        tree: bool = False,
        states: Tensor | None = None,
        show: Put | None = None,
        head: PassHead | None = None,
    ) -> None:
        rows, header = max(sizes), 1 if tokens == 1 and not tree else HEADER
        most = rows * tokens
        self._windows, self._kv_heads, self._page_size = windows, kv_heads, page_size
        self._device, self._padded, self._put, self._show = device, padded, put, show or put
        self._tokens, self._tree, self._header = tokens, tree, header
        self._token_ids = torch.zeros(most, dtype=torch.int32, device=device)
        self._positions = torch.zeros(most, dtype=torch.int64, device=device)
        self._dump = torch.arange(most, dtype=torch.int64, device=device) % page_size
        self._cache_index = self._dump.clone()
        self._states = None if states is None else states.new_zeros(most, states.shape[1])
        self._state = torch.zeros((rows, header + columns), dtype=torch.int32, device=device)
        self._nothing = torch.zeros((rows, header + 1), dtype=torch.int32, device=device)
        self._nothing[:, header - 1] = 1  # a token in the cache
        if header == HEADER:
            self._nothing[:, 0] = torch.arange(rows, device=device) * tokens
            self._nothing[:, 1] = tokens
        self._state[:, : header + 1] = self._nothing
        self._bits = torch.ones((rows, tokens), dtype=torch.int64, device=device)
        asked, depths = torch.zeros((rows, 4), dtype=torch.int64, device=device), torch.zeros_like(self._bits)
        asked[:, 2] = 1  # a root alone, of nobody
        nodes = DraftTree(self._token_ids.view_as(self._bits), torch.full_like(depths, -1), depths, self._bits)
        self._staged = Staged(self._token_ids, self._positions, self._cache_index, self._state, asked, nodes)
        self._graphs = capture_each(sorted(sizes, reverse=True), lambda size: forward(self._batch(size)), device, agree)
        self.sizes = sorted(self._graphs)
        self._forward, self._head = forward, head
        self._headed: dict[int, tuple[Callable[[], None], PassFound]] = {}
        # Of few rows: others hardly wait for what is launched behind a graph, and their logits take memory.
        few = [size for size in reversed(self.sizes) if size <= _HEADED_ROWS]
        if head is not None and few:
            self._headed = capture_each(few, self._run_headed, device, agree)
        for _, found in self._headed.values():
            if found.accepted is not None:  # what is captured behind runs before any pass has
                found.accepted.packed.zero_()

    @property
    def ends(self) -> dict[int, PassEnd]:
        """As ``Decodes.ends`` says."""
        if self._head is None or self._head.features is None:
            return {}
        return {
            size: PassEnd(
                self._staged.rows[:size],
                self._state[:size, HEADER:],
                found.accepted,
                self._head.features(found.result),
            )
            for size, (_, found) in self._headed.items()
            if found.accepted is not None
        }

    def run(self, batch: ForwardBatch, plan: AttentionPlan) -> Tensor | None:
        """What ``forward`` gives for the batch, whose rows all decode or are drafts; None when no graph fits.

        The result is overwritten by the next call.
        """
        assert plan.rows is not None
        rows = plan.rows
        count, most = len(rows.starts), int(rows.counts.max())
        size = next((size for size in self.sizes if size >= count), 0)
        if not size or (size > count and not self._padded) or most > self._tokens:
            return None
        if (rows.decodes if self._header == 1 else rows.decodes + rows.verifies) < count:
            return None
        if rows.tree is not None and not self._tree:
            return None
        whole = count * self._tokens
        places = None if len(batch.token_ids) == whole else self._places(rows)
        for held, new in (
            (self._token_ids, batch.token_ids),
            (self._positions, batch.positions),
            (self._cache_index, batch.cache_index),
            (self._states, batch.states),
        ):
            if held is None or new is None:
                continue
            if places is None:
                held[:whole].copy_(new)
            else:
                if held is self._cache_index:
                    held[:whole].copy_(self._dump[:whole])
                held.index_copy_(0, places, new.to(held.dtype))
        if self._header == 1:
            assert plan.decodes is not None
            given = plan.decodes.state
        else:
            given = self._draft_state(rows)
        self._state[:count, : given.shape[1]].copy_(given)
        if size > count:
            self._cache_index[whole : size * self._tokens].copy_(self._dump[whole : size * self._tokens])
            self._state[count:size, : self._header + 1].copy_(self._nothing[count:size])
        if self._tree:
            self._fill_bits(rows, size)
        replay, hidden = self._graphs[size]
        replay()
        return hidden[:whole] if places is None else hidden.index_select(0, places)

    def verify(
        self,
        starts: npt.NDArray[np.int64] | None,
        pages: npt.NDArray[np.int32],
        tree: DraftTree,
        slots: npt.NDArray[np.int64] | None = None,
    ) -> PassFound | None:
        """As ``Decodes.verify`` says: ``run`` of trees of as many nodes as a row may have."""
        count, tokens = len(pages), self._tokens
        size = next((size for size in self.sizes if size >= count), 0)
        if not size or (size > count and not self._padded) or tree.tokens.shape[1] != tokens:
            return None
        if self._header == 1 or not (self._tree or tree.linear):
            return None
        headed, before = self._headed.get(size), None
        if starts is None:
            if slots is None or headed is None or headed[1].accepted is None:
                return None
            before = headed[1].accepted.packed
        given = np.zeros((size, 1 + HEADER + pages.shape[1]), dtype=np.int32)
        if slots is not None:
            given[:count, 0] = slots
        state = given[:, 1:]
        state[:, 0], state[:, 1], state[:, 3] = np.arange(size) * tokens, tokens, 1
        state[:count, HEADER:] = pages
        if starts is not None:
            state[:count, 2], state[:count, 3] = starts, starts + tokens
        stage(self._show(given), tree, self._staged, self._page_size, before)
        whole, index = count * tokens, self._cache_index
        accepts = self._head is not None and self._head.accept is not None
        if headed is not None and (slots is not None or not accepts):
            replay, found = headed
            replay()
            if found.accepted is not None:
                return PassFound(found.result[:whole], index[:whole], None, found.accepted.of(count), size)
            assert found.head is not None
            logits, likeliest, broken = found.head
            head = logits[:whole], likeliest[:whole], broken[:whole]
            return PassFound(found.result[:whole], index[:whole], head)
        replay, hidden = self._graphs[size]
        replay()
        return PassFound(hidden[:whole], index[:whole])

    def _run_headed(self, size: int) -> PassFound:
        assert self._head is not None
        result = self._forward(self._batch(size))
        head, index = self._head.find(result), self._cache_index[: size * self._tokens]
        if self._head.accept is None:
            return PassFound(result, index, head)
        rows, whole = self._staged.rows[:size], self._staged.tree
        tree = DraftTree(whole.tokens[:size], whole.parents[:size], whole.depths[:size], whole.bits[:size])
        return PassFound(result, index, None, self._head.accept(tree, rows, index, head[1], head[2]), size)

    def _places(self, rows: AttentionRows) -> Tensor:
        """Where the batch's tokens stand among those of rows that all have as many."""
        offsets = np.cumsum(rows.counts) - rows.counts
        first = np.repeat(np.arange(len(rows.counts)) * self._tokens - offsets, rows.counts)
        return self._put(first + np.arange(len(first)))

    def _draft_state(self, rows: AttentionRows) -> Tensor:
        count = len(rows.starts)
        state = np.empty((count, HEADER + rows.pages.shape[1]), dtype=np.int32)
        state[:, 0] = np.arange(count) * self._tokens
        state[:, 1] = self._tokens
        state[:, 2] = rows.starts
        if rows.tree is not None and rows.roots is not None:
            state[rows.decodes :, 2] = rows.roots
        state[:, 3] = rows.starts + rows.counts
        state[:, HEADER:] = rows.pages
        return self._put(state)

    def _fill_bits(self, rows: AttentionRows, size: int) -> None:
        """Tokens that no row has see its root, which is there."""
        count = len(rows.starts)
        self._bits[:size].fill_(1)
        if rows.tree is not None:
            nodes = min(self._tokens, rows.tree.shape[1])
            self._bits[rows.decodes : count, :nodes].copy_(rows.tree[:, :nodes])
        else:
            self._bits[:count] = chain_bits(self._tokens, self._device)

    def _batch(self, size: int) -> ForwardBatch:
        context = (self._state.shape[1] - self._header) * self._page_size
        decodes = drafts = None
        if self._header == 1:
            decodes = DecodeRows(self._state[:size], split_count(size, self._kv_heads, context))
        else:
            bits = self._bits[:size] if self._tree else None
            drafts = DraftRows(self._state[:size], bits, self._tokens, context, early=True)
        tokens = size * self._tokens
        return ForwardBatch(
            token_ids=self._token_ids[:tokens],
            positions=self._positions[:tokens],
            cache_index=self._cache_index[:tokens],
            plans={window: AttentionPlan(decodes, None, window, drafts) for window in self._windows},
            states=None if self._states is None else self._states[:tokens],
        )


def capture_each(
    sizes: Sequence[Size],
    run: Callable[[Size], Result],
    device: torch.device,
    agree: Callable[[bool], bool],
    kind: Kind = _DECODES,
) -> dict[Size, tuple[Callable[[], None], Result]]:
    """``run`` of each size as a graph, in one memory pool: what replays it, and what it returned, which is overwritten.

    What cannot be captured runs without a graph, and the log says so. Where the largest finds no memory the next one
    may be tried (``kind``): it needs less, and those below share its memory. ``agree``: as ``DecodeGraphs`` says.
    While looking ahead ``run`` of some is all, and nothing is replayed.
    """
    if looking_ahead():
        return {size: (lambda: None, run(size)) for size in of_each_kind(sizes)}
    if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
        _log.warning("CUDA_LAUNCH_BLOCKING=1 forbids graphs: decodes run without.")
        return {}
    torch.cuda.empty_cache()
    stream, pool = torch.cuda.Stream(device), None
    graphs: dict[Size, tuple[Callable[[], None], Result]] = {}
    failed: list[Size] = []
    cause, hint = "", ""
    for size in sizes:
        graph = torch.cuda.CUDAGraph()
        failure: RuntimeError | None = None
        try:
            run(size)  # kernels are compiled and communicators made at first use: not while capturing
            torch.cuda.synchronize(device)
            _make_room(device)
            with torch.cuda.stream(stream):
                graph.capture_begin(*(() if pool is None else (pool,)), capture_error_mode="thread_local")
                try:
                    graphs[size] = graph.replay, run(size)
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            failure = error
        if not agree(failure is None):
            graphs.pop(size, None)
            short, *told = _why(kind, failure)
            if not failed:
                cause, hint = told
            failed.append(size)
            # The error holds this frame and those of ``run``, with all that they had on the device.
            failure = None
            del graph
            gc.collect()
            torch.cuda.empty_cache()
            if graphs or not (short and kind.smaller):
                break
            continue
        pool = pool or graph.pool()
    if failed:
        left = f"graphs of {sorted(graphs)} are used" if graphs else "all of them run without a graph"
        others = f", nor {len(failed) - 1} smaller" if len(failed) > 1 else ""
        step = kind.step % (failed[0],)
        _log.warning("The %s could not be captured into a graph (%s)%s; %s. %s", step, cause, others, left, hint)
    return graphs


def _make_room(device: torch.device) -> None:
    """Give back what the allocator keeps of a run, where there is not as much beside it: a capture takes none of that,
    and cannot give it back. Else it is kept: to ask for it again takes longer than to capture."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if torch.cuda.mem_get_info(device)[0] < kept:
        torch.cuda.empty_cache()


def _why(kind: Kind, error: RuntimeError | None) -> tuple[bool, str, str]:
    """Whether memory was short, the cause in words, and what helps. ``error``: None where it is not this capture that
    failed."""
    if error is None:
        return True, "another rank could not, or steps need the memory", f"{kind.room}; {kind.silence}"
    first = _first(error)
    cause = str(first).strip().splitlines()[0] if str(first).strip() else type(first).__name__
    short = isinstance(first, torch.OutOfMemoryError)
    return short, cause, kind.room if short else kind.silence


def _first(error: BaseException) -> BaseException:
    """The cause: ending a capture that failed fails again."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def launches_last(run: Callable[[], object], device: torch.device) -> bool:
    """Whether the host takes about as long to launch ``run`` as the device to do it: then a graph of it pays. Measured,
    as it is another matter on every machine."""
    run()  # what is made at first use
    shares = []
    for _ in range(_TRIES):
        torch.cuda.synchronize(device)
        begun = time.perf_counter()
        run()
        launched = time.perf_counter()
        torch.cuda.synchronize(device)
        shares.append((launched - begun) / (time.perf_counter() - begun))
    return max(shares) > _BOUND


def capture_guesses(run: Callable[[], None], pool: Any, device: torch.device) -> tuple[Any, Callable[[], None] | None]:
    """``run`` as a graph in the memory ``pool`` (None: a new one). -> the pool, and what replays it; None where it
    cannot be captured, and the log says so. While looking ahead ``run`` itself.
    """
    if looking_ahead():
        run()
        return pool, run
    if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
        return pool, None
    graph = torch.cuda.CUDAGraph()
    try:
        run()  # kernels are compiled and communicators made at first use: not while capturing
        torch.cuda.synchronize(device)
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            run()
    except RuntimeError as error:
        cause = str(_first(error))  # not itself: it holds this frame, and that of ``run``
        _log.warning("Guesses ahead could not be captured into a graph (%s); they are made step by step.", cause)
        return pool, None
    return pool or graph.pool(), graph.replay
