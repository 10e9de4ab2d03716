"""Verification: decides which draft tokens are accepted.

The noise of sampling is a function of the seed, the position and the token id, so the target's sample after given
tokens is determined. A token is sampled after every node of a draft tree, as if all draft tokens before it were
accepted. The walk starts at the root and repeatedly moves to the child with the sampled token. The output is the same
as without a draft, for greedy and for sampled requests. Rejection sampling (Leviathan et al., arXiv 2211.17192) would
only keep the distribution.

``Samples``: the tokens of a step after which one is sampled. ``Verifier``: samples and walks. ``VerifyResult``: the
result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.contract.speculation import SpeculativeSettings
from kernels.core.arrays import Longs, ragged
from kernels.core.operators import Acceptance
from kernels.core.tree import DraftTree, chain, unpack_bits
from kernels.devices.base import Device
from kernels.devices.latent_cache import move_latent
from kernels.sampling.masks import RowMasks
from kernels.sampling.sampler import SampledTokens, Sampler
from kernels.state.slots import SlotTable
from kernels.state.step_rows import StepRows

__all__ = ["AcceptedPath", "Leniency", "Samples", "Verifier", "VerifyResult", "path_history", "walk", "walk_here"]


@dataclass(frozen=True)
class AcceptedPath:
    """The accepted path of each tree. ``path`` int64 [rows, depth + 1]: its nodes, the root first; after ``counts``
    entries the last one is repeated. ``counts`` int64 [rows]: the number of nodes, and of emitted tokens. ``tokens``
    int64 [rows, depth + 1]: the token after each node of the path.
    """

    path: Tensor
    counts: Tensor
    tokens: Tensor


@dataclass(frozen=True)
class Leniency:
    """Lossy acceptance of tokens other than the sampled ones, only if the settings enable it.

    ``weights`` float32 [rows, nodes]: the target's probability of each node's token after its parent. ``chances``
    float32 [rows, nodes]: uniform in 0 .. 1, of each node as a parent. ``single``: a child of at least this probability
    is accepted. ``total``: where the children together have the probability q, one is accepted with q / ``total``
    instead of q. Rows whose ``lenient`` bool [rows] is not set are exact.
    """

    weights: Tensor
    chances: Tensor
    single: float
    total: float
    lenient: Tensor


def walk(
    tree: DraftTree, nodes: Tensor, sampled: Tensor, depth: int, leniency: Leniency | None = None, forced: int = 0
) -> AcceptedPath:
    """Walk trees of which the first ``nodes`` int64 [rows] nodes of each row were run.

    ``sampled`` int64 [rows, nodes]: the token sampled after each node; undefined in nodes that did not run. ``depth``:
    most levels. Among children with the same token the first counts. ``forced``: the number of tokens to emit, right or
    wrong, as far as the tree reaches; for benchmarks. The host reads nothing.
    """
    rows, width = tree.tokens.shape
    places = torch.arange(width, device=sampled.device)
    run = places < nodes.unsqueeze(1)
    if forced:  # the path to the first node that is deep enough
        depth = min(depth, forced - 1)
        deepest = tree.depths.masked_fill(~run | (tree.depths > depth), -1).argmax(1)
        run = run & unpack_bits(tree.bits.gather(1, deepest.unsqueeze(1)).squeeze(1), width)
    exact = leniency is None and not forced
    if tree.linear and exact:
        right = (tree.tokens[:, 1:] == sampled[:, :-1]) & run[:, 1:]
        counts = ((~right).cumsum(1) == 0).sum(1) + 1  # an A5 has no cumulative product
        path = torch.minimum(places[: depth + 1], (counts - 1).unsqueeze(1))
        return AcceptedPath(path, counts, sampled.gather(1, path))
    at = torch.zeros((rows, 1), dtype=torch.int64, device=sampled.device)
    going = torch.ones((rows, 1), dtype=torch.bool, device=sampled.device)
    counts = torch.ones(rows, dtype=torch.int64, device=sampled.device)
    nodes_passed = [at]
    for _ in range(depth):
        children = (tree.parents == at) & run
        right = children if forced else children & (tree.tokens == sampled.gather(1, at))
        if leniency is not None:
            right = _lenient(leniency, children, right, at)
        # argmax of a bool returns the first one.
        going = going & right.any(1, keepdim=True)
        at = torch.where(going, right.to(torch.int8).argmax(1, keepdim=True), at)
        counts = counts + going.squeeze(1)
        nodes_passed.append(at)
    passed = torch.cat(nodes_passed, 1)
    tokens = sampled.gather(1, passed)
    if not exact:  # the path is the accepted one, sampled or not
        inner = torch.arange(depth, device=sampled.device) < (counts - 1).unsqueeze(1)
        tokens[:, :-1] = torch.where(inner, tree.tokens.gather(1, passed[:, 1:]), tokens[:, :-1])
    return AcceptedPath(passed, counts, tokens)


def walk_here(tree: DraftTree, nodes: npt.NDArray[np.int64], sampled: Tensor, depth: int) -> AcceptedPath:
    """``walk`` of chains on the CPU: for so few numbers numpy is several times as fast as torch."""
    after = sampled.numpy()
    right = tree.tokens.numpy()[:, 1:] == after[:, :-1]
    right &= np.arange(1, after.shape[1]) < nodes[:, None]
    counts = np.logical_and.accumulate(right, axis=1).sum(1) + 1
    path = np.minimum(np.arange(depth + 1), counts[:, None] - 1)
    tokens = np.take_along_axis(after, path, 1)
    return AcceptedPath(torch.from_numpy(path), torch.from_numpy(counts), torch.from_numpy(tokens))


def _lenient(leniency: Leniency, children: Tensor, right: Tensor, at: Tensor) -> Tensor:
    """``right``, or in rows without such a child the most probable child if its probability suffices."""
    weights = leniency.weights.masked_fill(~children, -1.0)
    best, place = weights.max(1, keepdim=True)
    q = weights.clamp(min=0).sum(1, keepdim=True).clamp(max=1.0)
    # Exact acceptance has taken q already; this share of the rest makes it min(1, q / total).
    extra = ((q / leniency.total).clamp(max=1.0) - q) / (1.0 - q).clamp(min=1e-9)
    accepted = (best >= leniency.single) | (leniency.chances.gather(1, at) < extra)
    accepted = accepted & (best >= 0) & leniency.lenient.unsqueeze(1) & ~right.any(1, keepdim=True)
    chosen = torch.zeros_like(right).scatter_(1, place, True)
    return right | (chosen & accepted)


def path_history(tree: DraftTree, roots: Tensor, known: Tensor) -> Tensor:
    """The tokens up to each node, as if its path were accepted: int32 [rows, nodes, positions].

    ``roots`` int64 [rows]: positions of the roots. ``known`` int32 [rows, positions]: all tokens up to the root, with
    room for a path after it.
    """
    rows, width = tree.tokens.shape
    positions = known.shape[1]
    history = known.unsqueeze(1).repeat(1, width, 1)
    history = torch.cat((history, torch.zeros_like(history[..., :1])), -1)  # a last column for masked tokens
    where = (roots.unsqueeze(1) + tree.depths).unsqueeze(1).expand(rows, width, width)
    where = torch.where(tree.mask(), where, positions).clamp(max=positions)
    tokens = tree.tokens.to(known.dtype).unsqueeze(1).expand(rows, width, width)
    return history.scatter_(2, where, tokens)[..., :positions]


@dataclass(frozen=True)
class Samples:
    """The samples of a step, row after row: one in a row without draft tokens, else one after each of its tokens.

    ``rows``, ``slots``, ``tokens`` (indices in the batch) and ``lengths`` (tokens before the sampled one) int64
    [samples]. ``verified``: the samples of rows that verify.
    """

    rows: Longs
    slots: Longs
    tokens: Longs
    lengths: Longs
    verified: slice

    @classmethod
    def from_step(cls, step: StepRows, known: Longs) -> Samples:
        """``known``: lengths by slot."""
        reached = step.starts + step.counts == known[step.slots]
        if step.verifies == len(step.rows):
            places = np.arange(int(step.offsets[-1] + step.counts[-1]))
            lengths = np.repeat(step.starts - step.offsets, step.counts) + places + 1
            rows = np.arange(len(step.rows))
            return cls(rows, np.repeat(step.slots, step.counts), places, lengths, slice(0, len(places)))
        reached[step.verifying] = True
        rows = np.flatnonzero(reached)
        counts = np.ones(len(rows), dtype=np.int64)
        first = int(np.count_nonzero(reached[: step.decodes]))
        verifying = slice(first, first + step.verifies)
        counts[verifying] = step.counts[rows[verifying]]
        ends = np.cumsum(counts)
        begins = ends - counts
        base = step.counts[rows] - 1
        base[verifying] = 0
        place = np.arange(int(ends[-1])) - np.repeat(begins, counts) + np.repeat(base, counts)
        tokens = np.repeat(step.offsets[rows], counts) + place
        lengths = np.repeat(step.starts[rows], counts) + place + 1
        last = first + int(counts[verifying].sum())
        return cls(rows, np.repeat(step.slots[rows], counts), tokens, lengths, slice(first, last))


@dataclass(frozen=True)
class VerifyResult:
    """The sampled tokens of a step with draft tokens, and which of them are accepted.

    ``sampled``: entries row after row: one, or in a row that verified one for each level that could be accepted.
    ``rows`` int64 [entries]: the step's rows; ``places`` int64 [entries]: the levels. ``outcome`` int64 [verified rows,
    2 + depth + 1], on the device: the number of accepted entries (negated if the row is not finite), the levels that
    could have been accepted, and the accepted nodes. ``accepted``: the device's ``Acceptance`` that holds all of it.
    """

    sampled: SampledTokens
    rows: Longs
    places: Longs
    outcome: Tensor
    accepted: Acceptance | None = None

    @classmethod
    def from_samples(
        cls,
        step: StepRows,
        samples: Samples,
        sampled: SampledTokens,
        path: AcceptedPath,
        put: Callable[[Longs], Tensor],
    ) -> VerifyResult:
        """The result of a step. ``path``: the accepted paths. ``put``: copies an array to the device."""
        assert step.drafts is not None
        part = samples.verified
        counts = step.counts[step.verifying]
        levels = path.path.shape[1]
        begins = put(part.start + np.cumsum(counts) - counts)
        passed = (begins.unsqueeze(1) + path.path).reshape(-1)
        total = len(samples.slots)
        device = passed.device
        entries = torch.cat(
            (torch.arange(part.start, device=device), passed, torch.arange(part.stop, total, device=device))
        )
        tokens = torch.cat((sampled.tokens[: part.start], path.tokens.reshape(-1), sampled.tokens[part.stop :]))
        nonfinite = sampled.nonfinite.index_select(0, entries)
        own = nonfinite[part.start : part.start + passed.numel()].view(-1, levels)
        counted = torch.arange(levels, device=device) < path.counts.unsqueeze(1)
        unsound = (own & counted).any(1)
        depths = step.drafts.tree.depths
        run = torch.arange(depths.shape[1], device=device) < put(counts).unsqueeze(1)
        reach = depths.masked_fill(~run, 0).amax(1)
        outcome = torch.cat(
            (
                torch.where(unsound, -path.counts, path.counts).unsqueeze(1),
                reach.unsqueeze(1),
                path.path,
            ),
            1,
        )

        host, places = _entries(step, samples, levels)
        tops = sampled.top_counts
        if tops is not None:  # a request has one number for all its tokens
            own_first = np.concatenate(
                (np.arange(part.start), part.start + np.cumsum(counts) - counts, np.arange(part.stop, total))
            )
            tops = tops.index_select(0, torch.from_numpy(own_first[host]))
        chosen = replace(
            sampled,
            tokens=tokens,
            nonfinite=nonfinite,
            logprobs=None if sampled.logprobs is None else sampled.logprobs.index_select(0, entries),
            top_ids=None if sampled.top_ids is None else sampled.top_ids.index_select(0, entries),
            top_logprobs=None if sampled.top_logprobs is None else sampled.top_logprobs.index_select(0, entries),
            top_counts=tops,
        )
        return cls(chosen, samples.rows[host], places, outcome)

    @classmethod
    def from_stage(cls, step: StepRows, samples: Samples, sampled: SampledTokens, outcome: Tensor) -> VerifyResult:
        """What the last stage of a pipeline sent: ``sampled`` and ``outcome`` as they are there."""
        host, places = _entries(step, samples, outcome.shape[1] - 2)
        return cls(sampled, samples.rows[host], places, outcome)

    @classmethod
    def on_host(cls, step: StepRows, sampled: SampledTokens, found: AcceptedPath) -> VerifyResult:
        """``from_samples`` for rows that all verified without scores, where the device is the host: numpy is faster
        there."""
        assert step.drafts is not None
        counts, path, accepted = step.counts, found.path.numpy(), found.counts.numpy()
        rows, levels = path.shape
        passed = (step.offsets[:, None] + path).reshape(-1)
        nonfinite = sampled.nonfinite.numpy()[passed]
        own = nonfinite.reshape(rows, levels) & (np.arange(levels) < accepted[:, None])
        depths = step.drafts.tree.depths.numpy()
        run = np.arange(depths.shape[1]) < counts[:, None]
        outcome = np.empty((rows, levels + 2), dtype=np.int64)
        outcome[:, 0] = np.where(own.any(1), -accepted, accepted)
        outcome[:, 1] = np.where(run, depths, 0).max(1)
        outcome[:, 2:] = path
        return cls.from_outcome(
            SampledTokens(found.tokens.reshape(-1), torch.from_numpy(nonfinite)), torch.from_numpy(outcome)
        )

    @classmethod
    def from_outcome(cls, chosen: SampledTokens, outcome: Tensor) -> VerifyResult:
        """For rows that all verified: ``chosen`` [rows * levels]."""
        levels = outcome.shape[1] - 2
        index = np.arange(len(outcome) * levels)
        return cls(chosen, index // levels, index % levels, outcome)

    @classmethod
    def from_device(cls, acceptance: Acceptance) -> VerifyResult:
        """For rows that all verified and were accepted by the device: entries are [rows, levels]."""
        return replace(
            cls.from_outcome(SampledTokens(acceptance.tokens, acceptance.nonfinite), acceptance.outcome),
            accepted=acceptance,
        )


class Verifier:
    """Verifies the draft tokens of one runner. ``depth``: the longest path of a tree."""

    def __init__(
        self, settings: SpeculativeSettings, device: Device, sampler: Sampler, slots: SlotTable, depth: int
    ) -> None:
        self._settings, self._device, self._sampler, self._slots = settings, device, sampler, slots
        self._depth = depth
        self._lenient = settings.accept_threshold_single < 1 or settings.accept_threshold_acc < 1
        self._here = device.torch_device.type == "cpu"
        self.latent = False
        """Whether the target's caches hold latent vectors."""
        self._accepted: Tensor | None = None  # the rows of ``Drafting.accept`` in this step
        self._emitted = 0.0  # rounding remainder of settings.fixed_acceptance

    def prepare(self, nodes: int, caches: Sequence[object]) -> None:
        """Compile the kernels of a step with trees of ``nodes`` nodes, for which its first run would wait.

        ``caches``: those in which accepted tokens may be moved.
        """
        drafting, table = self._device.drafting, self._slots.tokens
        if drafting is None:
            return
        device = self._device.torch_device
        tree = chain(torch.zeros((1, nodes), dtype=torch.int64, device=device))
        sampled, nonfinite = (torch.zeros(nodes, dtype=dtype, device=device) for dtype in (torch.int64, torch.bool))
        rows = self._device.memory.put_pinned(np.array([[0, 0, 1, 0]], dtype=np.int64))  # only a root, in slot 0
        result = drafting.accept(tree, rows, sampled, nonfinite, min(self._depth, nodes - 1), 0, table)
        if result is not None:
            drafting.move_accepted(caches, sampled, result.rows, result.outcome)

    def place(self, step: StepRows, token_ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Put the draft tokens among a batch's tokens, and their depths into its positions. -> both, int64 [tokens]."""
        assert step.drafts is not None
        tree, part = step.drafts.tree, step.verified_tokens
        token_ids = token_ids.to(torch.int64)
        whole = self._nodes_run(step, tree.tokens)
        if part.start == 0 and part.stop == len(token_ids):
            token_ids = whole
        else:
            token_ids[part] = whole
        if not tree.linear:
            roots = self._device.memory.put(np.repeat(step.starts[step.verifying], step.counts[step.verifying]))
            positions = positions.clone()
            positions[part] = roots + self._nodes_run(step, tree.depths)
        return token_ids, positions

    def _nodes_run(self, step: StepRows, nodes: Tensor) -> Tensor:
        """The nodes that run of a tensor [verified rows, nodes], one after the other."""
        counts = step.counts[step.verifying]
        width = nodes.shape[1]
        if (counts == width).all():
            return nodes.reshape(-1)
        return nodes.reshape(-1).index_select(0, self._device.memory.put(_places(counts, width)))

    def sample(
        self,
        step: StepRows,
        samples: Samples,
        logits: Tensor,
        argmax: SampledTokens | None = None,
        masks: RowMasks | None = None,
    ) -> tuple[VerifyResult, Tensor]:
        """Sample after every node, walk, and append the tokens to the slots' table. ``logits`` [samples, vocab];
        ``argmax``: their argmax tokens if they were already computed. ``masks``: see ``Sampler.sample``.

        Returns the result, and the token after each accepted node, int64 [verified rows, levels].
        """
        assert step.drafts is not None
        state, tree, put = self._slots, step.drafts.tree, self._device.memory.put
        counts, part = step.counts[step.verifying], samples.verified
        slots = samples.slots.tolist()
        depth, forced = min(self._depth, tree.tokens.shape[1] - 1), self._forced()
        greedy, sampled, self._accepted = self._device.sampling.greedy, None, None
        if greedy is not None and step.verifies == len(step.rows) and self._sampler.plain(tuple(slots)):
            sampled = argmax or SampledTokens(*greedy(logits))
            # Always the full depth: a device may compile a kernel for each depth.
            result = self._accept(step, sampled, self._depth, forced)
            if result is not None:
                return result
        at_slots, at = put(samples.slots), put(samples.lengths)
        longest = int(samples.lengths.max())
        if not tree.linear:
            roots = put(np.repeat(step.starts[step.verifying], counts))
            at[part] = roots + self._nodes_run(step, tree.depths) + 1
        history, rows = state.tokens, at_slots
        if self._sampler.needs_history(slots):
            history, rows = self._histories(step, samples, longest)
        leniency_logits = logits[part].float().clone() if self._lenient else None
        if sampled is None:
            sampled = self._sampler.sample(logits, rows, at, history, host_slots=slots, longest=longest, masks=masks)

        width = tree.tokens.shape[1]
        flat = sampled.tokens[part]
        if (counts == width).all():
            after = flat.view(-1, width)
        else:
            after = torch.zeros(len(counts) * width, dtype=flat.dtype, device=flat.device)
            after[put(_places(counts, width))] = flat
            after = after.view(-1, width)
        leniency = None if leniency_logits is None else self._leniency(step, leniency_logits, slots[part], at[part])
        if self._here and tree.linear and not self._settings.lossy:
            passed = walk_here(tree, counts, after, depth)
        else:
            passed = walk(tree, put(counts), after, depth, leniency, forced)
        self.append(step, samples, sampled.tokens, passed.tokens)
        if self._here and step.verifies == len(step.rows) and sampled.logprobs is None:
            verified = VerifyResult.on_host(step, sampled, passed)
        else:
            verified = VerifyResult.from_samples(step, samples, sampled, passed, self._device.memory.put)
        return verified, passed.tokens

    def _accept(
        self, step: StepRows, sampled: SampledTokens, depth: int, forced: int
    ) -> tuple[VerifyResult, Tensor] | None:
        """Verify with the device's kernel if every row verifies and is greedy; None without such a kernel."""
        assert step.drafts is not None
        drafting = self._device.drafting
        if drafting is None:
            return None
        numbers = np.stack((step.slots, step.starts, step.counts, step.offsets), 1)
        rows, table = self._device.memory.put_pinned(numbers), self._slots.tokens
        result = drafting.accept(step.drafts.tree, rows, sampled.tokens, sampled.nonfinite, depth, forced, table)
        if result is None:
            return None
        self._accepted = result.rows
        return VerifyResult.from_device(result), result.tokens

    def _histories(self, step: StepRows, samples: Samples, longest: int) -> tuple[Tensor, Tensor]:
        """A table with the tokens before each sample, including its path, and the samples' rows in the table."""
        assert step.drafts is not None
        state, put = self._slots, self._device.memory.put
        counts = step.counts[step.verifying]
        width = min(longest + 1, state.tokens.shape[1])
        table = state.tokens[put(samples.slots), :width].clone()
        verified = step.slots[step.verifying]
        roots = put(step.starts[step.verifying])
        nodes = path_history(step.drafts.tree, roots, state.tokens[put(verified), :width])
        flat = nodes.reshape(-1, width)
        table[samples.verified] = flat.index_select(0, put(_places(counts, nodes.shape[1])))
        return table, torch.arange(len(table), device=table.device)

    def _forced(self) -> int:
        """Tokens to emit in this step to meet ``fixed_acceptance`` on average; 0: the accepted ones."""
        wanted = self._settings.fixed_acceptance
        if not wanted:
            return 0
        self._emitted += wanted
        whole = int(self._emitted)
        self._emitted -= whole
        return max(1, whole)

    def _leniency(self, step: StepRows, logits: Tensor, slots: Sequence[int], lengths: Tensor) -> Leniency | None:
        """Lossy acceptance by probabilities at each request's temperature, without other edits. Greedy rows are
        exact."""
        noise, settings = self._sampler.noise(slots), self._settings
        if noise is None:
            return None
        assert step.drafts is not None
        tree, put = step.drafts.tree, self._device.memory.put
        counts = step.counts[step.verifying]
        width = tree.tokens.shape[1]
        places = put(_places(counts, width))
        warm = noise.temperature > 0
        chances = self._sampler.chances(noise.keys, lengths)
        logprobs = (logits / noise.temperature.clamp(min=1e-5).unsqueeze(1)).log_softmax(-1)

        def padded(values: Tensor) -> Tensor:
            whole = values.new_zeros(len(counts) * width, *values.shape[1:])
            return whole.index_copy(0, places, values).view(len(counts), width, *values.shape[1:])

        after = padded(logprobs).gather(1, tree.parents.clamp(min=0).unsqueeze(-1).expand(-1, -1, logprobs.shape[1]))
        weights = after.gather(2, tree.tokens.unsqueeze(-1)).squeeze(-1).exp().masked_fill(tree.parents < 0, 0.0)
        first = put(np.cumsum(counts) - counts)
        return Leniency(
            weights,
            padded(chances),
            settings.accept_threshold_single,
            settings.accept_threshold_acc,
            warm.index_select(0, first),
        )

    def append(self, step: StepRows, samples: Samples, sampled: Tensor, path: Tensor) -> None:
        """Append the sampled tokens to the table: ``sampled`` int64 [samples], and in rows that verified ``path`` int64
        [verified rows, levels], which the host counts in ``begin_step``."""
        state, put, part = self._slots, self._device.memory.put, samples.verified
        if part.start > 0 or part.stop < len(samples.slots):
            index = np.concatenate((np.arange(part.start), np.arange(part.stop, len(samples.slots))))
            slots = samples.slots[index]
            tokens = sampled.index_select(0, put(index))
            state.append(slots, put(slots), put(samples.lengths[index]), tokens)
        state.write(step.slots[step.verifying], step.starts[step.verifying] + 1, path)

    def append_sent(self, step: StepRows, samples: Samples, tokens: Tensor, levels: int) -> None:
        """``append`` in a stage of a pipeline that is not the last. ``tokens`` int64 [entries]: as in
        ``VerifyResult``."""
        part, count = samples.verified, step.verifies * levels
        sampled = torch.zeros(len(samples.slots), dtype=tokens.dtype, device=tokens.device)
        sampled[: part.start], sampled[part.stop :] = tokens[: part.start], tokens[part.start + count :]
        self.append(step, samples, sampled, tokens[part.start : part.start + count].view(step.verifies, levels))

    def move(self, step: StepRows, cache_index: Tensor, outcome: Tensor, caches: Sequence[Any]) -> None:
        """Move the keys and values of accepted nodes to consecutive positions."""
        assert step.drafts is not None
        if step.drafts.tree.linear:
            return
        rows, drafting = self._accepted, None if self.latent else self._device.drafting
        if rows is not None and drafting is not None and drafting.move_accepted(caches, cache_index, rows, outcome):
            return
        counts, path = outcome[:, :1].abs(), outcome[:, 2:]
        begins = self._device.memory.put(step.offsets[step.verifying]).unsqueeze(1)
        levels = torch.arange(path.shape[1], device=path.device)
        inside = levels < counts
        source = cache_index[(begins + torch.where(inside, path, 0)).reshape(-1)]
        target = cache_index[(begins + torch.where(inside, levels, 0)).reshape(-1)]
        if self.latent:
            move_latent(caches, source, target)
        else:
            self._device.cache.move_all(caches, source, target, path.shape[1])


def _entries(step: StepRows, samples: Samples, levels: int) -> tuple[Longs, Longs]:
    """Of each entry of ``VerifyResult.sampled`` the index in ``samples.rows``, and its level."""
    first = np.searchsorted(samples.rows, step.decodes)
    repeats = np.ones(len(samples.rows), dtype=np.int64)
    repeats[first : first + step.verifies] = levels
    ends = np.cumsum(repeats)
    host = np.repeat(np.arange(len(repeats)), repeats)
    return host, np.arange(int(ends[-1])) - np.repeat(ends - repeats, repeats)


def _places(counts: Longs, width: int) -> Longs:
    """Places of the first ``counts`` entries in rows of ``width`` each, counted over all rows."""
    return ragged(np.arange(len(counts)) * width, counts)
