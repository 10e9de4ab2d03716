"""What a device can do: the one interface between models and hardware.

A model calls these operators and never asks which device it is on. Shapes are static for a given number of tokens and
rows, and no operator reads a tensor back to the host, so that a platform may capture a forward pass into a graph; what
varies from step to step (lengths, page tables) reaches the operators through an attention plan, built once a step from
host arrays and shared by every layer.
"""

from __future__ import annotations

import dataclasses
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.batch import ForwardBatch
from kernels.layers.experts import ExpertsInTurn, ExpertWeights
from kernels.quantization.cache import SCALE, LayerScales, narrow
from kernels.quantization.tokens import clip_tokens, settle_tokens
from kernels.quantization.weights import GroupedWeight, Projection, QuantizedWeight

__all__ = [
    "AttentionRows",
    "Cut",
    "Decodes",
    "Fetched",
    "Greedy",
    "Linear",
    "Lookup",
    "Memory",
    "Norm",
    "Platform",
    "PlatformError",
    "StepFound",
    "StepTokens",
    "Steps",
]

_log = logging.getLogger("troupe.kernels")

Linear = Callable[[Tensor], Tensor]
"""``[tokens, inputs] -> [tokens, outputs]``, with the weight in the layout that the platform likes."""

Lookup = Callable[[Tensor], Tensor]
"""ids int [tokens] -> their rows [tokens, hidden] of a table."""

Cut = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""``(logits, rows, row_max, temperature, top_k, top_p, largest_k)`` -> the values and ids that ``nucleus.cut`` finds.

Called for rows that all have a top-k of 1 to 1024, or have none (``largest_k`` 0).
"""


Greedy = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Logits [rows, vocab] -> the likeliest token ids int64 [rows], and ``Sampled.broken``; a token is 0 in such a row."""


Fetched = Callable[[], list[Tensor]]
"""Waits for copies to the host and returns them."""


class Norm(Protocol):
    """A norm with its weight in the form that the platform likes."""

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of ``x``, in its dtype."""
        ...

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """``s = x + residual``; returns the norm of s, and s. May overwrite both inputs."""
        ...


class PlatformError(ValueError):
    """The device cannot do what was asked of it."""


@dataclass(frozen=True)
class Memory:
    """Bytes. ``free`` is what this process may still take."""

    total: int
    free: int


@dataclass(frozen=True)
class AttentionRows:
    """The rows of a step as attention sees them; host arrays. Row r's queries follow those of row r - 1.

    ``starts``, ``counts`` int64 [rows]: row r runs positions ``starts[r] .. starts[r] + counts[r] - 1`` of the cache.
    ``pages`` int32 [rows, pages]: page i of a row holds its positions ``i * page_size ..``.
    ``decodes``: the first so many rows run one token each.
    ``verifies``: so many rows after the decodes run 1 to 64 tokens each, of which most are guesses.
    ``tree`` int64 [verifies, most tokens], on the device: what each of their queries sees from position ``roots[row]``
    on: bit j is position ``roots[row] + j``; all before is seen (``DraftTree.bits``; up to 64 positions, the query's
    own among them). A window counts from the query's place in its path: ``roots[row]`` and one more for each bit but
    one. None: all are causal, as chains are.
    ``roots`` int64 [verifies]; None: the rows' starts.
    """

    starts: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    pages: npt.NDArray[np.int32]
    decodes: int
    verifies: int = 0
    tree: Tensor | None = None
    roots: npt.NDArray[np.int64] | None = None


@dataclass(frozen=True)
class Decodes:
    """Steps that were prepared beforehand. ``rows``: the numbers of rows they were prepared for.

    ``run``: [tokens, hidden] of a batch of decodes and drafts, of up to the tokens a row that it was prepared for; None
    when it fits nothing that was prepared. The result is overwritten by the next call. ``prompts``: the ends of prompts
    fit as well, up to so many tokens of each.
    """

    rows: tuple[int, ...]
    run: Callable[[ForwardBatch], Tensor | None]
    prompts: int = 0


@dataclass(frozen=True)
class StepTokens:
    """A step of decodes of one token a row, on the host; the tokens themselves the device knows."""

    slots: npt.NDArray[np.int64]  # [rows]
    lengths: npt.NDArray[np.int64]  # [rows], tokens that each row's sees, itself included
    grows: npt.NDArray[np.bool_]  # [rows], whether it is the last that is known of its row
    pages: npt.NDArray[np.int32]  # [rows, columns]


@dataclass(frozen=True)
class StepFound:
    """``hidden`` [rows, hidden] and ``logits`` [rows, vocab] of a step. ``likeliest`` int32 [rows]: the likeliest next
    token of each, or -1 where its logits are not to be used; rows that grow have it, or 0, in the table of tokens.
    """

    hidden: Tensor
    logits: Tensor
    likeliest: Tensor


@dataclass(frozen=True)
class Steps:
    """Whole steps of decodes that were prepared beforehand. ``rows``: the numbers of rows they were prepared for.

    ``run``: None when none that was prepared fits. What it gives is overwritten by the next call.
    """

    rows: tuple[int, ...]
    run: Callable[[StepTokens], StepFound | None]


@dataclass(frozen=True)
class DecodeTokens:
    """Decodes of one token a row, or with ``offsets`` of several, on the host."""

    ids: npt.NDArray[np.int32]  # [tokens]
    positions: npt.NDArray[np.int64]  # [tokens]
    index: npt.NDArray[np.int64]  # [tokens], places in the cache: page * page_size + offset
    pages: npt.NDArray[np.int32]  # [rows, columns]
    lengths: npt.NDArray[np.int64]  # [rows], tokens that the last of each sees, itself included
    offsets: npt.NDArray[np.int64] | None = None  # [rows + 1], where each row's tokens begin, and all of them end
    bits: npt.NDArray[np.int64] | None = None  # [rows, n], what each token sees, as AttentionRows.tree; None: chains


Likeliest = Callable[[DecodeTokens], tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]]
"""-> the likeliest next token of each row, and whether its logits are not to be used."""

HostPass = Callable[[DecodeTokens], None]
"""Runs a pass that was prepared: the tensors that it returned when it was hold its results then."""


class Platform(ABC):
    """One device of one kind. ``default_cache_tokens`` bounds a cache that nobody sized; 0: memory alone does.

    ``collectives``: the backend of torch.distributed for its tensors.

    ``overlaps``: whether work goes on after the call that issued it, so that a step is worth preparing while another
    runs. ``signed_sines``: whether ``rotary`` wants the sines of the first half negated. ``cut``: the device's own
    kernel for top-k and top-p, where it has one. ``greedy``: its own for rows that want the likeliest token.

    ``verified_tokens``: of the decodes of a step and their guesses together, so many that more are not worth what they
    take; 0: that is not known.

    ``widened_bytes``: what quantized weights that were dequantized take more than they did.

    ``cache_dtype``: what caches are made in from now on; None: the model's. ``scale_dtype``: of a token's scale in one
    of 8 bits.
    ``captures``: whether what was made so far may be captured; an operator that reads something back may not.
    """

    name: str
    collectives: str
    device: torch.device
    default_memory_fraction: float
    default_cache_tokens: int = 0
    overlaps: bool = False
    signed_sines: bool = True
    cut: Cut | None = None
    greedy: Greedy | None = None
    widened_bytes: int = 0
    verified_tokens: int = 0
    cache_dtype: torch.dtype | None = None
    scale_dtype: torch.dtype = SCALE
    captures: bool = True

    @abstractmethod
    def bind_thread(self) -> None:
        """Make the calling thread fit to run the model (current device, intra-op threads)."""

    def put(self, array: npt.NDArray[Any]) -> Tensor:
        """``array`` on the device, for work issued from now on. The tensor may share its memory: leave it unchanged."""
        return torch.from_numpy(array)

    def fetch(self, tensors: Sequence[Tensor]) -> Fetched:
        """Start to copy results to the host. What it returns may be called by another thread, once."""
        found = list(tensors)
        return lambda: found

    @abstractmethod
    def memory(self) -> Memory:
        """The device's memory, as it stands now."""

    def step_memory(self, step: Callable[[], None]) -> int:
        """Bytes to leave free for steps, ``step`` being the largest. May answer 0 without running it."""
        return 0

    def cache_head_dim(self, dim: int) -> int:
        """The dimension that heads of ``dim`` have in the cache. Raises PlatformError."""
        return dim

    def check_cache_dtype(self, dtype: torch.dtype) -> None:
        """Raises PlatformError when keys and values cannot be kept in ``dtype``."""
        return None

    def cache_bytes(self, kv_heads: int, head_dim: int, dtype: torch.dtype, fixed: bool = False) -> int:
        """Of one token's keys and values in a layer's cache. ``dtype``: the model's. ``fixed``: by scales that were
        found before. Raises PlatformError."""
        kept = self.cache_dtype or dtype
        scale = self.scale_dtype.itemsize if narrow(kept) and not fixed else 0
        return 2 * kv_heads * (self.cache_head_dim(head_dim) * kept.itemsize + scale)

    def capture_decodes(
        self,
        forward: Callable[[ForwardBatch], Tensor],
        windows: Sequence[int],
        max_rows: int,
        columns: int,
        agree: Callable[[bool], bool],
        tokens: int = 1,
        tree: bool = False,
        states: Tensor | None = None,
    ) -> Decodes | None:
        """Prepare ``forward`` for steps of up to ``max_rows`` rows of decodes, or of drafts of up to ``tokens`` each,
        where the device gains by it.

        ``tree``: whether drafts may be trees. ``states`` [any, width]: such as the batches have, when they have them.
        ``windows``: those of the batches' plans. ``columns``: pages a sequence may have. Page 0 is written to.
        ``agree``: whether all ranks that run the model together could do what this one could, or could not; to be asked
        after each one that is prepared, because a step that is prepared on some ranks only would hang.
        """
        return None

    def capture_steps(
        self,
        forward: Callable[[ForwardBatch], tuple[Tensor, Tensor]],
        table: Tensor,
        windows: Sequence[int],
        max_rows: int,
        columns: int,
    ) -> Steps | None:
        """Prepare whole steps of decodes, from the tokens that the device knows to those that it finds, where it gains
        by it: instead of ``capture_decodes``, for a model that one rank runs.

        ``forward``: to hidden states and logits. ``table`` int32 [slots, positions]: tokens by slot; row 0 is nobody's.
        """
        return None

    def capture_guesses(self, run: Callable[[], None]) -> Callable[[], None] | None:
        """Prepare a pass that reads and writes the same tensors each time, and reads nothing back to the host; None
        where the device gains nothing by it, or cannot."""
        return None

    def capture_likeliest(
        self, forward: Callable[[ForwardBatch], Tensor], windows: Sequence[int], max_rows: int
    ) -> Likeliest | None:
        """Make one call of a whole step of up to ``max_rows`` decodes, where the device is the host and gains by it.
        ``forward``: to the logits.
        """
        return None

    def capture_pass(
        self,
        forward: Callable[[ForwardBatch], Tensor],
        windows: Sequence[int],
        max_tokens: int,
        states: Tensor | None = None,
    ) -> HostPass | None:
        """Make one call of a pass over up to ``max_tokens`` tokens, where the device is the host and gains by it.

        ``forward`` is called once, and must hold on to the tensors that are to be read after each call. ``states``
        [max_tokens, width]: its batch's, which are written before a call.
        """
        return None

    def explain(self, error: BaseException) -> Exception | None:
        """What to raise in place of an error of the device, saying what to do; None for an error that is not its."""
        return None

    @abstractmethod
    def dtype(self, requested: str, stored: str | None) -> torch.dtype:
        """The dtype to compute in. ``requested`` is auto or a name. Raises PlatformError for what it cannot do."""

    @abstractmethod
    def empty_host_state(self, *shape: int) -> Tensor:
        """int32 zeros for state by slot; memory is taken only where it is written, where the platform can."""

    @abstractmethod
    def make_cache(
        self,
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        scales: Sequence[LayerScales] | None = None,
    ) -> list[Any]:
        """Keys and values of every layer, page-major and zeroed: one opaque cache a layer.

        ``dtype``: of the keys and values that come and of the queries; they are kept in ``cache_dtype``, one of 8 bits
        by ``scales`` of each layer, or else by one for each token and key head.
        """

    @abstractmethod
    def clear_pages(self, caches: list[Any], pages: list[int]) -> None:
        """Zero these pages in every layer, after a row left numbers in them that are not finite."""

    @abstractmethod
    def make_linear(self, weight: Tensor, bias: Tensor | None, shared: bool = False) -> Linear:
        """``weight`` [outputs, inputs]. The platform may keep a packed copy and drop it, unless it is ``shared``."""

    def make_tied(self, table: Tensor | QuantizedWeight) -> tuple[Lookup, Linear]:
        """Looks up rows of ``table`` [vocab, hidden], and the output layer of which it is the weight.

        The platform may keep one copy for both, in a layout of its own.
        """
        if isinstance(table, QuantizedWeight):
            return self.make_tied(self._dense(table))
        return self.make_lookup(table), self.make_linear(table, None, shared=True)

    def _dense(self, weight: QuantizedWeight) -> Tensor:
        self._tell("the table of embeddings is dequantized to %s while it is loaded", weight.dtype)
        dense = weight.dequantize(weight.dtype)
        self.widened_bytes += dense.nbytes - weight.nbytes
        return dense

    def make_projection(self, weight: Projection, bias: Tensor | None) -> Linear:
        """A linear layer of a weight of any kind, ``bias`` [outputs] in the model's dtype."""
        if isinstance(weight, Tensor):
            return self.make_linear(weight, bias)
        if isinstance(weight, QuantizedWeight):
            return self._make_of_rounded(weight, bias)
        rows = [piece.shape[0] for piece in weight]
        biases = [None] * len(rows) if bias is None else bias.split(rows)
        pieces = [self.make_projection(piece, part) for piece, part in zip(weight, biases, strict=True)]

        def side_by_side(x: Tensor) -> Tensor:
            out = self.empty_rows(len(x), sum(rows), x.dtype)
            begin = 0
            for size, piece in zip(rows, pieces, strict=True):
                self.add_rows(piece(x), None, out[:, begin : begin + size])
                begin += size
            return out

        return side_by_side

    def make_float_head(self, weight: Projection, shared: bool) -> Linear:
        """``[rows, inputs] -> float32 [rows, outputs]``, all in float32. ``shared``: others hold the weight too."""
        pieces = weight if isinstance(weight, tuple) else (weight,)
        wide = torch.cat(
            [part.float() if isinstance(part, Tensor) else part.dequantize(torch.float32) for part in pieces]
        )
        self.widened_bytes += wide.nbytes - (0 if shared else sum(part.nbytes for part in pieces))
        return lambda x: F.linear(x.float(), wide)

    def _make_of_rounded(self, weight: QuantizedWeight, bias: Tensor | None) -> Linear:
        """``make_quantized``, after what no device has a kernel for."""
        clip = weight.clip
        if clip is not None:
            linear = self._make_of_rounded(dataclasses.replace(weight, clip=None), bias)
            return self.chain(lambda x: clip_tokens(x, clip), linear)
        if isinstance(weight, GroupedWeight) and weight.activation is not None:
            self._tell(
                "weights of %d bits in groups are multiplied with inputs that are rounded to 8 bits and brought back "
                "to floats: no device has a kernel for both",
                weight.bits,
            )
            narrow_linear = self.make_quantized(dataclasses.replace(weight, activation=None), bias)
            return lambda x: narrow_linear(self.settle(x))
        return self.make_quantized(weight, bias)

    def settle(self, x: Tensor) -> Tensor:
        """``settle_tokens``."""
        return settle_tokens(x)

    def chain(self, first: Linear, then: Linear) -> Linear:
        """``then(first(x))``, where ``first`` is of torch's operators."""
        return lambda x: then(first(x))

    def make_gated_projection(self, weight: Projection, bias: Tensor | None) -> Linear:
        """``make_gated`` of a weight of any kind."""
        if isinstance(weight, Tensor):
            return self.make_gated(weight, bias)
        linear = self.make_projection(weight, bias)
        return lambda x: self.silu_and_mul(linear(x))

    def make_quantized(self, weight: QuantizedWeight, bias: Tensor | None) -> Linear:
        """A linear layer that rounds its input as the weight's ``activation`` says, where the device has kernels for
        it; else the weight is dequantized once, and the log says so."""
        return self.make_dequantized(weight, bias, "there is no kernel for it on this device")

    def make_dequantized(self, weight: QuantizedWeight, bias: Tensor | None, reason: str) -> Linear:
        """A linear layer of what the weight's values stand for; its input is not rounded."""
        kind = type(weight).__name__
        self._tell("%s is dequantized to %s while it is loaded: %s", kind, weight.dtype, reason)
        constant = weight.constant()
        if constant is not None:
            bias = constant.to(weight.dtype) if bias is None else (bias.float() + constant).to(weight.dtype)
        dense = weight.dequantize(weight.dtype)
        self.widened_bytes += dense.nbytes - weight.nbytes
        return self.make_linear(dense, bias)

    def make_experts(
        self, router: Tensor, bias: Tensor | None, experts: Sequence[ExpertWeights], chosen: int, normalized: bool
    ) -> Linear:
        """A layer of experts, of which each token takes ``chosen``: [tokens, hidden] -> [tokens, hidden].

        ``router`` [experts, hidden] and ``bias`` [experts] give a logit for each. ``normalized``: the weights of those
        that are chosen add up to one.
        """
        self.captures = False
        self._tell("experts are run one by one, as the host is told which are chosen: decodes are not captured")
        made = [
            (
                self.make_gated_projection(expert.gate_up, expert.gate_up_bias),
                self.make_projection(expert.down, expert.down_bias),
            )
            for expert in experts
        ]
        return ExpertsInTurn(self.make_linear(router, bias), made, chosen, normalized)

    def _tell(self, message: str, *values: object) -> None:
        """Log a fallback, once."""
        if (message, *values) not in self._told:
            self._told.add((message, *values))
            _log.warning(message, *values)

    @cached_property
    def _told(self) -> set[tuple[object, ...]]:
        """Fallbacks that were logged."""
        return set()

    @abstractmethod
    def make_norm(self, weight: Tensor, eps: float) -> Norm:
        """Root mean square norm over the last dimension (Zhang and Sennrich, arXiv 1910.07467), inside in float32.

        ``weight`` has the input's last dimension, or its last two: a weight for each head.
        """

    def add_bias(self, x: Tensor, bias: Tensor) -> Tensor:
        """``x`` [tokens, dim] + ``bias`` [dim]. Overwrites ``x``."""
        return x.add_(bias)

    def make_lookup(self, table: Tensor | QuantizedWeight) -> Lookup:
        """``embed`` of ``table``."""
        if isinstance(table, QuantizedWeight):
            table = self._dense(table)
        return partial(self.embed, table=table)

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        """The rows ``ids`` int [tokens] of ``table`` [vocab, hidden]."""
        return F.embedding(ids, table)

    def angles(self, positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """``scale`` times cos and sin of ``positions`` int64 [tokens] times ``frequencies`` float32 [dim], each
        [tokens, 1, dim]."""
        angles = positions.to(torch.float32).view(-1, 1, 1) * frequencies
        cos, sin = angles.cos(), angles.sin()
        if scale != 1.0:
            cos, sin = cos * scale, sin * scale
        return cos.to(dtype), sin.to(dtype)

    def renew(self) -> bool:
        """Called between steps while no request is running: whether operators were exchanged for better ones, so that
        decodes must be captured anew."""
        return False

    def make_gated(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """``silu(gate(x)) * up(x)``; ``weight`` [2 * outputs, inputs] is gate's, then up's."""
        linear = self.make_linear(weight, bias)
        return lambda x: self.silu_and_mul(linear(x))

    def place_heads(
        self, qkv: Tensor, heads: int, norm: Norm | None, cos: Tensor, sin: Tensor, cache: Any, index: Tensor
    ) -> Tensor:
        """Norm and rotate the queries and keys of ``qkv`` [tokens, heads + 2 * kv_heads, dim], in place, and put keys
        and values at ``index`` of the cache. -> the queries [tokens, heads, dim].

        ``norm``: of [tokens, heads + kv_heads, dim], or none. ``cos``, ``sin`` [tokens, 1, dim].
        """
        qk = qkv[:, : (heads + qkv.shape[1]) // 2]
        self.rotary(qk if norm is None else norm(qk), cos, sin, out=qk)
        self.write_cache(cache, index, qkv[:, heads:])
        return qkv[:, :heads]

    @abstractmethod
    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
        """Write the rotated ``x`` [tokens, heads, dim] to ``out``; ``cos``, ``sin`` [tokens, 1, dim]."""

    @abstractmethod
    def silu_and_mul(self, x: Tensor) -> Tensor:
        """``silu(gate) * up`` of ``x`` [tokens, 2 * n] = gate | up -> [tokens, n]. May overwrite ``x``."""

    def empty_rows(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """[rows, width] for ``add_rows`` to write to."""
        return torch.empty((rows, width), dtype=dtype, device=self.device)

    def add_rows(self, x: Tensor, y: Tensor | None, out: Tensor) -> None:
        """``out`` = ``x`` + ``y``, or a copy of ``x``, all [tokens, width]; ``out`` may be columns of a wider one."""
        if y is None:
            out.copy_(x)
        else:
            torch.add(x, y, out=out)

    @abstractmethod
    def write_cache(self, cache: Any, index: Tensor, keys_values: Tensor) -> None:
        """Put ``keys_values`` [tokens, 2 * kv_heads, dim] (keys first) at ``index`` (page * page_size + offset)."""

    @abstractmethod
    def move_cache(self, cache: Any, source: Tensor, target: Tensor) -> None:
        """Copy keys and values from ``source`` to ``target`` int64 [tokens] (page * page_size + offset), as if all
        were read before any is written. Targets differ, but for those that are their own source.
        """

    def move_caches(self, caches: Sequence[Any], source: Tensor, target: Tensor, each: int) -> None:
        """``move_cache`` of every layer. ``each``: tokens of a row, whose places no other row reads or writes."""
        for cache in caches:
            self.move_cache(cache, source, target)

    @abstractmethod
    def plan_attention(self, rows: AttentionRows, window: int) -> Any:
        """What ``attention`` needs to know of a step. ``window``: tokens a query sees, 0 for all."""

    def plan_guesses(
        self, starts: Tensor, pages: Tensor, tokens: int, bits: Tensor | None, roots: Tensor | None, window: int
    ) -> Any:
        """``plan_attention`` of rows of ``tokens`` tokens each that all verify, with all numbers on the device: it is
        part of what ``capture_guesses`` captures. ``starts``, ``roots`` int64 [rows], ``pages`` int64 [rows, columns].
        """
        rows = AttentionRows(
            starts=starts.cpu().numpy(),
            counts=np.full(len(starts), tokens, dtype=np.int64),
            pages=pages.cpu().numpy().astype(np.int32),
            decodes=0,
            verifies=len(starts),
            tree=bits,
            roots=None if roots is None else roots.cpu().numpy(),
        )
        return self.plan_attention(rows, window)

    @abstractmethod
    def attention(self, queries: Tensor, cache: Any, plan: Any, scale: float) -> Tensor:
        """Causal attention of ``queries`` [tokens, heads, dim] over the pages of their rows -> [tokens, heads * dim].

        The keys and values of the queries' own tokens are already in the cache.
        """
