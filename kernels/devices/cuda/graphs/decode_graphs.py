"""CUDA graphs of decodes and drafts: one for each batch size in a list, replayed for batches of up to that size.

Padding rows attend to one key.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.contract.caches import CacheSpec, State, Window
from kernels.core.attention_rows import AttentionRows
from kernels.core.batch import BoundedRows, ForwardBatch, StateSegments, VerifyingRows
from kernels.core.tree import DraftTree, chain_bits
from kernels.devices.capture import CaptureRequest
from kernels.devices.cuda.attention.decode import split_count
from kernels.devices.cuda.attention.plan import AttentionPlan, DecodeRows, DraftRows
from kernels.devices.cuda.attention.verify import HEADER
from kernels.devices.cuda.graphs.staging import Staged, stage
from kernels.devices.cuda.launch import is_precompiling
from kernels.devices.cuda.precompile import of_each_kind
from kernels.devices.graphs import GraphBuffers, Put, cause_of, first_error, without_collections
from kernels.devices.prepared import PassResult, VerifyOutputs
from kernels.devices.state_cache import pages_before

__all__ = ["DecodeGraphs", "Kind", "capture_draft", "capture_each", "launches_last"]

_log = logging.getLogger("troupe.kernels.cuda")

_TRIES = 2
_HEADED_ROWS = 4
_BOUND = 0.7  # launch time as a share of a step's time

Result = TypeVar("Result")
Size = TypeVar("Size", int, tuple[int, int])


class Kind(NamedTuple):
    """Texts for the log: the captured steps, and the remedy if the capture fails."""

    step: str  # a %-format of the step's size
    silence: str
    room: str
    smaller: bool = False  # whether smaller sizes are tried if memory is short


_DECODES = Kind(
    "decode of %s rows",
    "--disable-cuda-graph silences this",
    "lower --mem-fraction-static or --cuda-graph-max-bs",
)


class DecodeGraphs:
    """Captures ``request`` for each of ``sizes`` rows, the largest first, in one memory pool.

    ``kv_heads``: of the model's caches. ``padded``: whether a step may use a graph of a larger batch. ``put``,
    ``put_pinned``: as in ``DeviceMemory``.
    """

    def __init__(
        self,
        request: CaptureRequest,
        sizes: Sequence[int],
        kv_heads: int,
        page_size: int,
        device: torch.device,
        padded: bool,
        put: Put,
        put_pinned: Put | None = None,
    ) -> None:
        tokens, tree, columns = request.tokens, request.tree, request.columns
        forward, agree = request.forward, request.agree
        rows, header = max(sizes), 1 if tokens == 1 and not tree else HEADER
        self._windows, self._kv_heads, self._page_size = request.windows, kv_heads, page_size
        self._device, self._padded, self._put, self._put_pinned = device, padded, put, put_pinned or put
        self._tokens, self._tree, self._header = tokens, tree, header
        self._bounded = request.bounded  # of drafts states alone
        self._verifying: dict[tuple[int, CacheSpec], VerifyingRows] = {}  # what the last pass of a size recorded
        # Of windows the places of tokens, of states the pages after them; and the pages of states before them.
        self._index, self._sources = torch.zeros((2, len(self._bounded), rows), dtype=torch.int64, device=device)
        self._rows = torch.arange(rows, device=device)
        self._pages = torch.zeros((len(self._bounded), rows, columns), dtype=torch.int32, device=device)
        self._buffers = buffers = GraphBuffers(rows, tokens, page_size, device, request.states)
        self._state = torch.zeros((rows, header + columns), dtype=torch.int32, device=device)
        self._nothing = torch.zeros((rows, header + 1), dtype=torch.int32, device=device)
        self._nothing[:, header - 1] = 1  # a token in the cache
        if header == HEADER:
            self._nothing[:, 0] = torch.arange(rows, device=device) * tokens
            self._nothing[:, 1] = tokens
        self._state[:, : header + 1] = self._nothing
        self._bits = torch.ones((rows, tokens), dtype=torch.int64, device=device)
        verified_rows, depths = torch.zeros((rows, 4), dtype=torch.int64, device=device), torch.zeros_like(self._bits)
        verified_rows[:, 2] = 1  # only a root, without a request
        nodes = DraftTree(buffers.token_ids.view_as(self._bits), torch.full_like(depths, -1), depths, self._bits)
        self._staged = Staged(
            buffers.token_ids, buffers.positions, buffers.cache_index, self._state, verified_rows, nodes
        )
        self._graphs = capture_each(sorted(sizes, reverse=True), lambda size: forward(self._batch(size)), device, agree)
        self.sizes = sorted(self._graphs)
        self._forward, self._head = forward, request.head
        self._headed: dict[int, tuple[Callable[[], None], PassResult]] = {}
        # For few rows only: with more rows the launches after a graph cost little, and their logits take memory.
        few = [size for size in reversed(self.sizes) if size <= _HEADED_ROWS]
        if request.head is not None and few:
            self._headed = capture_each(few, self._run_headed, device, agree)
        for _, result in self._headed.values():
            if result.accepted is not None:  # what is captured behind runs before any pass has
                result.accepted.packed.zero_()

    @property
    def states(self) -> Tensor | None:
        """See ``CapturedPasses.states``."""
        return self._buffers.states

    @property
    def accept_outputs(self) -> dict[int, VerifyOutputs]:
        """As ``CapturedPasses.accept_outputs`` says."""
        if self._head is None or self._head.features is None:
            return {}
        return {
            size: VerifyOutputs(
                self._staged.rows[:size],
                self._state[:size, HEADER:],
                result.accepted,
                self._head.features(result.result),
            )
            for size, (_, result) in self._headed.items()
            if result.accepted is not None
        }

    def run(self, batch: ForwardBatch, plan: AttentionPlan, size: int = 0) -> Tensor | None:
        """The result of ``forward`` for a batch of decodes or drafts; None if no graph fits. ``size``: rows that
        the graph has at least.

        The next call overwrites the result.
        """
        assert plan.rows is not None
        rows = plan.rows
        count, max_count = len(rows.starts), int(rows.counts.max())
        size = next((each for each in self.sizes if each >= max(count, size)), 0)
        if not size or (size > count and not self._padded) or max_count > self._tokens:
            return None
        if (rows.decodes if self._header == 1 else rows.decodes + rows.verifies) < count:
            return None
        if rows.tree is not None and not self._tree:
            return None
        whole = count * self._tokens
        buffers = self._buffers
        places = buffers.places(rows, self._put)
        if places is not None:
            buffers.cache_index[:whole].copy_(buffers.null_slots[:whole])
        buffers.fill(batch, places, size * self._tokens)
        if self._header == 1:
            assert plan.decodes is not None
            given = plan.decodes.state
        else:
            given = self._draft_state(rows)
        self._state[:count, : given.shape[1]].copy_(given)
        for group, index, sources, pages in zip(self._bounded, self._index, self._sources, self._pages, strict=True):
            own = batch.bounded[group.group.spec]
            if self._header == HEADER:
                sources[:count].copy_(self._put(pages_before(own.starts, own.pages, own.page_tokens)))
                sources[count:size] = 0
                continue
            if own.segments:
                (decoded,) = own.segments
                for held, new in ((index, decoded.targets), (sources, decoded.sources)):
                    held[:count].copy_(new)
                    held[count:size] = 0  # padding begins, in the null page
                continue
            assert own.cache_index is not None
            index[:count].copy_(own.cache_index)
            index[count:size].copy_(buffers.null_slots[count:size])
            pages[:count, : own.pages.shape[1]].copy_(own.plan.decodes.pages)
            pages[count:size, :1] = 0  # of the only token that padding attends to
        if size > count:
            padding = slice(whole, size * self._tokens)
            buffers.cache_index[padding].copy_(buffers.null_slots[padding])
            self._state[count:size, : self._header + 1].copy_(self._nothing[count:size])
        if self._tree:
            self._fill_bits(rows, size)
        replay, hidden = self._graphs[size]
        replay()
        for spec, own in batch.bounded.items():
            if own.verifying is not None:
                own.verifying.use(self._verifying[size, spec], count)
        return hidden[:whole] if places is None else hidden.index_select(0, places)

    def verify(
        self,
        starts: npt.NDArray[np.int64] | None,
        pages: npt.NDArray[np.int32],
        tree: DraftTree,
        slots: npt.NDArray[np.int64] | None = None,
    ) -> PassResult | None:
        """As ``CapturedPasses.verify``: ``run`` for trees with the maximum number of nodes."""
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
        stage(self._put_pinned(given), tree, self._staged, self._page_size, before)
        whole, index = count * tokens, self._buffers.cache_index
        accepts = self._head is not None and self._head.accept is not None
        if headed is not None and (slots is not None or not accepts):
            replay, result = headed
            replay()
            if result.accepted is not None:
                return PassResult(result.result[:whole], index[:whole], None, result.accepted.first_rows(count), size)
            assert result.head is not None
            logits, argmax, nonfinite = result.head
            head = logits[:whole], argmax[:whole], nonfinite[:whole]
            return PassResult(result.result[:whole], index[:whole], head)
        replay, hidden = self._graphs[size]
        replay()
        return PassResult(hidden[:whole], index[:whole])

    def _run_headed(self, size: int) -> PassResult:
        assert self._head is not None
        result = self._forward(self._batch(size))
        head, index = self._head.find(result), self._buffers.cache_index[: size * self._tokens]
        if self._head.accept is None:
            return PassResult(result, index, head)
        rows, whole = self._staged.rows[:size], self._staged.tree
        tree = DraftTree(whole.tokens[:size], whole.parents[:size], whole.depths[:size], whole.bits[:size])
        return PassResult(result, index, None, self._head.accept(tree, rows, index, head[1], head[2]), size)

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
        """Padding tokens attend to the root of their row, which is valid."""
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
        plans = {window: AttentionPlan(decodes, None, window, drafts) for window in self._windows}
        batch = self._buffers.batch(size, plans)
        if not self._bounded:
            return batch
        bounded: dict[CacheSpec, BoundedRows] = {}
        for group, index, sources, pages in zip(self._bounded, self._index, self._sources, self._pages, strict=True):
            spec, tokens = group.group.spec, self._tokens
            if decodes is None:
                assert isinstance(spec, State), "drafts keep windows in pages of all tokens"
                places = torch.arange(size * tokens, device=self._device).view(size, tokens)
                rows = StateSegments(places, sources[:size], None, fresh=True, few=True)
                verifying = VerifyingRows(slice(0, size), slice(0, size * tokens), stride=tokens)
                self._verifying[size, spec] = verifying
                bounded[spec] = BoundedRows.captured(group.page_tokens, segments=(rows,), verifying=verifying)
                continue
            if not isinstance(spec, Window):
                rows = StateSegments(self._rows[:size, None], sources[:size], index[:size], fresh=True)
                bounded[spec] = BoundedRows.captured(group.page_tokens, segments=(rows,))
                continue
            plan = AttentionPlan(replace(decodes, own_pages=pages[:size]), None, spec.length)
            bounded[spec] = BoundedRows.captured(self._page_size, index[:size], plan)
        return replace(batch, bounded=bounded)


def capture_each(
    sizes: Sequence[Size],
    run: Callable[[Size], Result],
    device: torch.device,
    agree: Callable[[bool], bool],
    kind: Kind = _DECODES,
) -> dict[Size, tuple[Callable[[], None], Result]]:
    """Capture ``run`` for each size, in one memory pool. Returns for each the function that replays it, and its result,
    which replays overwrite.

    Sizes that cannot be captured are logged and run without a graph. If memory is too short for the largest, the next
    one may be tried (``kind``), which needs less and whose memory smaller ones share. ``agree``: as in
    ``DecodeGraphs``. While precompiling, some sizes are run and none is captured.
    """
    if is_precompiling():
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
            run(size)  # the first use compiles kernels and creates communicators: not during a capture
            torch.cuda.synchronize(device)
            _make_room(device)
            with torch.cuda.stream(stream), without_collections():
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    graphs[size] = graph.replay, run(size)
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            failure = error
        if not agree(failure is None):
            graphs.pop(size, None)
            short, *reason = _why(kind, failure)
            if not failed:
                cause, hint = reason
            failed.append(size)
            # The error references this frame and those of ``run``, with their tensors on the device.
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
    """Release cached memory of a run if less memory than that is free: a capture cannot use or release it. Otherwise
    keep it: allocating it again would take longer than the capture."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if torch.cuda.mem_get_info(device)[0] < kept:
        torch.cuda.empty_cache()


def _why(kind: Kind, error: RuntimeError | None) -> tuple[bool, str, str]:
    """Whether memory was short, the cause in words, and a remedy. ``error``: None if another capture failed."""
    if error is None:
        return True, "another rank could not, or steps need the memory", f"{kind.room}; {kind.silence}"
    short = isinstance(first_error(error), torch.OutOfMemoryError)
    return short, cause_of(error), kind.room if short else kind.silence


def launches_last(run: Callable[[], object], device: torch.device) -> bool:
    """Whether launching ``run`` takes the host about as long as the device needs to run it: then a graph pays.
    Measured, since it depends on the machine."""
    run()  # initialize everything that is created at first use
    shares = []
    for _ in range(_TRIES):
        torch.cuda.synchronize(device)
        begun = time.perf_counter()
        run()
        launched = time.perf_counter()
        torch.cuda.synchronize(device)
        shares.append((launched - begun) / (time.perf_counter() - begun))
    return max(shares) > _BOUND


def capture_draft(run: Callable[[], None], pool: Any, device: torch.device) -> tuple[Any, Callable[[], None] | None]:
    """Capture ``run`` as a graph in the memory ``pool`` (None: a new one). Returns the pool and a function that replays
    it, or None if it cannot be captured, which is logged. While precompiling, returns ``run`` itself.
    """
    if is_precompiling():
        run()
        return pool, run
    if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
        return pool, None
    graph = torch.cuda.CUDAGraph()
    try:
        run()  # the first use compiles kernels and creates communicators: not during a capture
        torch.cuda.synchronize(device)
        with without_collections(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            run()
    except RuntimeError as error:
        cause = str(first_error(error))  # not the error: it references this frame and that of ``run``
        _log.warning("Early drafting could not be captured into a graph (%s); it runs pass by pass.", cause)
        return pool, None
    return pool or graph.pool(), graph.replay
