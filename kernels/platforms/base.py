"""What a device can do: the one interface between models and hardware.

A model calls these operators and never asks which device it is on. Shapes are static for a given number of tokens and
rows, and no operator reads a tensor back to the host, so that a platform may capture a forward pass into a graph; what
varies from step to step (lengths, page tables) reaches the operators through an attention plan, built once a step from
host arrays and shared by every layer.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.batch import ForwardBatch
from kernels.platforms.heads import ProjectedHeads
from kernels.platforms.operators import Acceptance, Candidates, Cut, Draw, Greedy, Norm
from kernels.platforms.prepared import Decodes, HostPass, PassHead, StepForward, Steps
from kernels.platforms.projections import BehindNorm, Projections
from kernels.platforms.rows import AttentionRows
from kernels.quantization.cache import SCALE, LayerScales, narrow

if TYPE_CHECKING:
    from kernels.layers.rotary import RotaryEmbedding
    from kernels.parallel.layers import VocabularyEmbedding
    from kernels.speculative.growing import Accepted, Growing, GrowthShape
    from kernels.speculative.tree import DraftTree

__all__ = ["Fetched", "Memory", "Platform", "PlatformError"]


Fetched = Callable[[], list[Tensor]]
"""Waits for copies to the host and returns them."""


class PlatformError(ValueError):
    """The device cannot do what was asked of it."""


@dataclass(frozen=True)
class Memory:
    """Bytes. ``free`` is what this process may still take."""

    total: int
    free: int


class Platform(Projections):
    """One device of one kind. ``default_cache_tokens`` bounds a cache that nobody sized; 0: memory alone does.

    ``collectives``: the backend of torch.distributed for its tensors.

    ``overlaps``: whether work goes on after the call that issued it, so that a step is worth preparing while another
    runs. ``compiles``: whether kernels are made when they are first launched, and that takes long. ``signed_sines``:
    whether ``rotary`` wants the sines of the first half negated. ``cut``: the device's own kernel for top-k and top-p,
    where it has one. ``greedy``: its own for rows that want the likeliest token, ``candidates`` for those of a draft
    that want some of the likeliest.

    ``verified_tokens``: of the decodes of a step and their guesses together, so many that more are not worth what they
    take; 0: that is not known. ``verifies_apart``: whether guesses are worth verifying in steps of decodes alone.
    ``accepts``: whether it has an ``accept`` of its own. ``samples_apart``: whether each row is sampled by itself, so
    that the others cannot change the last bits of its scores.

    ``cpu_isa``: the instruction set that its operators may use, on a CPU; "" elsewhere.

    ``cache_dtype``: what caches are made in from now on; None: the model's. ``scale_dtype``: of a token's scale in one
    of 8 bits.
    """

    name: str
    collectives: str
    default_memory_fraction: float
    default_cache_tokens: int = 0
    overlaps: bool = False
    compiles: bool = False
    signed_sines: bool = True
    cut: Cut | None = None
    greedy: Greedy | None = None
    draw: Draw | None = None
    candidates: Candidates | None = None
    verified_tokens: int = 0
    verifies_apart: bool = False
    accepts: bool = False
    samples_apart: bool = False
    cpu_isa: str = ""
    cache_dtype: torch.dtype | None = None
    scale_dtype: torch.dtype = SCALE

    @abstractmethod
    def bind_thread(self) -> None:
        """Make the calling thread fit to run the model (current device, intra-op threads)."""

    def put(self, array: npt.NDArray[Any]) -> Tensor:
        """``array`` on the device, for work issued from now on. The tensor may share its memory: leave it unchanged."""
        return torch.from_numpy(array)

    def show(self, array: npt.NDArray[Any]) -> Tensor:
        """The same for kernels of our own that read each of a few numbers once: they may lie in the host's memory."""
        return self.put(array)

    def fetch(self, tensors: Sequence[Tensor], lasting: bool = False) -> Fetched:
        """Start to copy results to the host. What it returns may be called by other threads, and again. ``lasting``:
        nothing writes to them before that, so that what is issued from now on need not wait for the copies."""
        found = list(tensors)
        return lambda: found

    def after_copies(self) -> None:
        """What is issued from now on waits until all that ``fetch`` was asked for is copied: it may write to that."""
        return None

    @abstractmethod
    def memory(self) -> Memory:
        """The device's memory, as it stands now."""

    def step_memory(self, step: Callable[[], None]) -> int:
        """Bytes to leave free for steps, ``step`` being the largest. May answer 0 without running it."""
        return 0

    def compile_ahead(self, passes: Callable[[], None]) -> None:
        """Get ready what ``passes`` run, where that takes long: passes of the model, over pages that nobody reads, none
        of which chooses by what another computes. May run them, with kernels that compute nothing, or not."""
        return None

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
        prompts: int = 0,
        head: PassHead | None = None,
    ) -> Decodes | None:
        """Prepare ``forward`` for steps of up to ``max_rows`` rows of decodes, or of drafts of up to ``tokens`` each,
        where the device gains by it.

        ``tree``: whether drafts may be trees. ``states`` [any, width]: such as the batches have, when they have them.
        ``prompts``: tokens of a step that are worth preparing for where the device takes chunks of prompts as well.
        ``windows``: those of the batches' plans. ``columns``: pages a sequence may have. Page 0 is written to.
        ``head``: what ``Decodes.verify`` makes of the result as well, where it gains by it. ``agree``: whether all
        ranks that run the model together could do what this one could, or could not; to be asked after each one that
        is prepared, because a step that is prepared on some ranks only would hang.
        """
        return None

    def capture_steps(
        self,
        forward: StepForward,
        table: Tensor,
        windows: Sequence[int],
        max_rows: int,
        columns: int,
    ) -> Steps | None:
        """Prepare whole steps of decodes, from the tokens that the device knows to those that it finds, where it gains
        by it: instead of ``capture_decodes``, for a model that one rank runs. Steps with chunks of prompts too, where
        it gains by these.

        ``table`` int32 [slots, positions]: tokens by slot; row 0 is nobody's.
        """
        return None

    def capture_guesses(self, run: Callable[[], None]) -> Callable[[], None] | None:
        """Prepare a pass that reads and writes the same tensors each time, and reads nothing back to the host; None
        where the device gains nothing by it, or cannot."""
        return None

    def make_growing(self, shape: GrowthShape, given: Accepted) -> Growing | None:
        """The platform's own kernels for what stands between the passes of a draft; None where it has none for it."""
        return None

    def accept(
        self, tree: DraftTree, rows: Tensor, sampled: Tensor, broken: Tensor, depth: int, forced: int, table: Tensor
    ) -> Acceptance | None:
        """``speculative.verify.walk`` in one kernel, with what it leads to; None where the platform has none.

        ``rows`` int64 [rows, 4]: the slot, the root's position, the nodes that were run, and the first of these in
        ``sampled`` int64 and ``broken`` bool. What follows each node passed is written behind the root to the slot's
        row of ``table`` int32.
        """
        return None

    def bring_accepted(
        self,
        given: Tensor,
        pages: Tensor,
        outcome: Tensor,
        tokens: Tensor,
        features: Tensor,
        host: Tensor,
        kept_outcome: Tensor,
        kept_tokens: Tensor,
        kept_features: Tensor,
    ) -> bool:
        """In one kernel to where a pass that guesses ahead finds it, what rows accepted: ``outcome`` [rows, 2 + n],
        ``tokens`` [rows, n] and, of ``features``, those of the nodes passed. False where the platform has none.

        ``given`` int64 [size, 4], size >= rows, as the rows of ``accept``: the slot, the root's position, a number that
        does not count, and the row's first place in ``features``; ``pages`` int [size, n]. Roots, slots and pages go to
        ``host`` int64 [size, 2 + columns], 0 where there is no page. ``kept_outcome`` [.., 2 + levels] is 0 where
        nothing is given.
        """
        return False

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
    def make_norm(self, weight: Tensor, eps: float) -> Norm:
        """Root mean square norm over the last dimension (Zhang and Sennrich, arXiv 1910.07467), inside in float32.

        ``weight`` has the input's last dimension, or its last two: a weight for each head.
        """

    def norm_both(self, first: Tensor, first_norm: Norm, second: Tensor, second_norm: Norm) -> Tensor:
        """[tokens, a] and [tokens, b], each normed -> side by side [tokens, a + b]."""
        first, second = first_norm(first), second_norm(second)
        width = first.shape[1]
        both = self.empty_rows(len(first), width + second.shape[1], first.dtype)
        self.add_rows(first, None, both[:, :width])
        self.add_rows(second, None, both[:, width:])
        return both

    def enter_both(
        self,
        embed: VocabularyEmbedding,
        token_norm: Norm,
        states: Tensor,
        state_norm: Norm,
        rotary: RotaryEmbedding,
        batch: ForwardBatch,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What a pass over tokens and states begins with: ``norm_both`` of the tokens' embeddings and the ``states``
        [tokens, hidden], and ``rotary`` of their positions."""
        cos, sin = rotary(batch.positions)
        return self.norm_both(embed(batch.token_ids), token_norm, states, state_norm), cos, sin

    def add_bias(self, x: Tensor, bias: Tensor) -> Tensor:
        """``x`` [tokens, dim] + ``bias`` [dim]. Overwrites ``x``."""
        return x.add_(bias)

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

    def make_heads(
        self, projection: BehindNorm, heads: int, kv_heads: int, dim: int, norm: Norm | None
    ) -> ProjectedHeads:
        """A layer's ``projection`` with its heads placed; in one kernel where the platform has one for both."""
        return ProjectedHeads(self, projection, heads, kv_heads, dim, norm)

    @abstractmethod
    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
        """Write the rotated ``x`` [tokens, heads, dim] to ``out``; ``cos``, ``sin`` [tokens, 1, dim]."""

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

    def move_accepted(self, caches: Sequence[Any], index: Tensor, rows: Tensor, outcome: Tensor) -> bool:
        """``move_caches`` of what ``accept`` found of ``rows``, in one kernel; False where the platform has none.
        ``index`` int64 [tokens]: where the keys and values of the nodes were put."""
        return False

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
