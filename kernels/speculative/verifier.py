"""Verifying guesses: they run among a batch's tokens, what follows each is sampled, and the right ones are kept."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.platforms.base import Platform
from kernels.rows import StepRows, ragged
from kernels.sampling import Sampled, Sampler
from kernels.slots import SlotTable
from kernels.speculative.samples import Samples, Verified
from kernels.speculative.settings import SpeculativeSettings
from kernels.speculative.tree import chain
from kernels.speculative.verify import Leniency, Walk, path_history, walk, walk_here

__all__ = ["Verifier"]

Longs = npt.NDArray[np.int64]


class Verifier:
    """Of one runner. ``depth``: the longest path of a tree."""

    def __init__(
        self, settings: SpeculativeSettings, platform: Platform, sampler: Sampler, slots: SlotTable, depth: int
    ) -> None:
        self._settings, self._platform, self._sampler, self._slots = settings, platform, sampler, slots
        self._depth = depth
        self._lenient = settings.accept_threshold_single < 1 or settings.accept_threshold_acc < 1
        self._here = platform.device.type == "cpu"
        self._accepted: Tensor | None = None  # the rows of ``Platform.accept`` in this step
        self._emitted = 0.0  # of settings.fixed_acceptance, what was rounded away so far

    def prepare(self, nodes: int, caches: Sequence[object]) -> None:
        """Have the kernels of the platform made that the first step with trees of so many nodes would wait for.
        ``caches``: in which what is accepted may have to be moved."""
        device, table = self._platform.device, self._slots.tokens
        tree = chain(torch.zeros((1, nodes), dtype=torch.int64, device=device))
        sampled, broken = (torch.zeros(nodes, dtype=dtype, device=device) for dtype in (torch.int64, torch.bool))
        rows = self._platform.show(np.array([[0, 0, 1, 0]], dtype=np.int64))  # a root alone, of nobody
        found = self._platform.accept(tree, rows, sampled, broken, min(self._depth, nodes - 1), 0, table)
        if found is not None:
            self._platform.move_accepted(caches, sampled, found.rows, found.outcome)

    def place(self, step: StepRows, token_ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Put the guesses among a batch's tokens, and their depths into its positions. -> both, int64 [tokens]."""
        assert step.drafts is not None
        tree, part = step.drafts.tree, step.guesses
        token_ids = token_ids.to(torch.int64)
        whole = self._nodes_run(step, tree.tokens)
        if part.start == 0 and part.stop == len(token_ids):
            token_ids = whole
        else:
            token_ids[part] = whole
        if not tree.linear:
            roots = self._platform.put(np.repeat(step.starts[step.verifying], step.counts[step.verifying]))
            positions = positions.clone()
            positions[part] = roots + self._nodes_run(step, tree.depths)
        return token_ids, positions

    def _nodes_run(self, step: StepRows, nodes: Tensor) -> Tensor:
        """Of a tensor [verified rows, nodes] those that are run, one after the other."""
        counts = step.counts[step.verifying]
        width = nodes.shape[1]
        if (counts == width).all():
            return nodes.reshape(-1)
        return nodes.reshape(-1).index_select(0, self._platform.put(_places(counts, width)))

    def sample(
        self, step: StepRows, samples: Samples, logits: Tensor, likeliest: Sampled | None = None
    ) -> tuple[Verified, Tensor]:
        """Sample after every node, and walk. ``logits`` [samples, vocab], and their ``likeliest`` tokens if these were
        found. The tokens are known to the slots' table.

        Also what follows each node passed, int64 [verified rows, levels].
        """
        assert step.drafts is not None
        state, tree, put = self._slots, step.drafts.tree, self._platform.put
        counts, part = step.counts[step.verifying], samples.guesses
        slots = samples.slots.tolist()
        depth, forced = min(self._depth, tree.tokens.shape[1] - 1), self._forced()
        greedy, sampled, self._accepted = self._platform.greedy, None, None
        if greedy is not None and step.verifies == len(step.rows) and self._sampler.plain(tuple(slots)):
            sampled = likeliest or Sampled(*greedy(logits))
            # Whatever the trees are: a platform may make a kernel for each depth.
            found = self._accept(step, sampled, self._depth, forced)
            if found is not None:
                return found
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
            sampled = self._sampler.sample(logits, rows, at, history, host_slots=slots, longest=longest)

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
        self._append(step, samples, sampled, passed)
        if self._here and step.verifies == len(step.rows) and sampled.logprobs is None:
            verified = Verified.here(step, sampled, passed)
        else:
            verified = Verified.of(step, samples, sampled, passed, self._platform.put)
        return verified, passed.tokens

    def _accept(self, step: StepRows, sampled: Sampled, depth: int, forced: int) -> tuple[Verified, Tensor] | None:
        """The same by the platform's own kernel, where every row verifies and is greedy; None where it has none."""
        assert step.drafts is not None
        numbers = np.stack((step.slots, step.starts, step.counts, step.offsets), 1)
        rows, table = self._platform.show(numbers), self._slots.tokens
        found = self._platform.accept(step.drafts.tree, rows, sampled.tokens, sampled.broken, depth, forced, table)
        if found is None:
            return None
        self._accepted = found.rows
        return Verified.by_platform(found), found.tokens

    def _histories(self, step: StepRows, samples: Samples, longest: int) -> tuple[Tensor, Tensor]:
        """A table with the tokens before each sample, those of its path among them, and the samples' rows in it."""
        assert step.drafts is not None
        state, put = self._slots, self._platform.put
        counts = step.counts[step.verifying]
        width = min(longest + 1, state.tokens.shape[1])
        table = state.tokens[put(samples.slots), :width].clone()
        verified = step.slots[step.verifying]
        roots = put(step.starts[step.verifying])
        nodes = path_history(step.drafts.tree, roots, state.tokens[put(verified), :width])
        flat = nodes.reshape(-1, width)
        table[samples.guesses] = flat.index_select(0, put(_places(counts, nodes.shape[1])))
        return table, torch.arange(len(table), device=table.device)

    def _forced(self) -> int:
        """Tokens to emit in this step, so that ``fixed_acceptance`` is met on average; 0: what is right."""
        wanted = self._settings.fixed_acceptance
        if not wanted:
            return 0
        self._emitted += wanted
        whole = int(self._emitted)
        self._emitted -= whole
        return max(1, whole)

    def _leniency(self, step: StepRows, logits: Tensor, slots: Sequence[int], lengths: Tensor) -> Leniency | None:
        """Probabilities at each request's temperature; what else edits logits does not count. Greedy rows are exact."""
        noise, settings = self._sampler.noise(slots), self._settings
        if noise is None:
            return None
        assert step.drafts is not None
        tree, put = step.drafts.tree, self._platform.put
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

    def _append(self, step: StepRows, samples: Samples, sampled: Sampled, found: Walk) -> None:
        """What was sampled becomes known; in rows that verified the host counts it when the step is settled."""
        state, put, part = self._slots, self._platform.put, samples.guesses
        if part.start > 0 or part.stop < len(samples.slots):
            index = np.concatenate((np.arange(part.start), np.arange(part.stop, len(samples.slots))))
            slots = samples.slots[index]
            tokens = sampled.tokens.index_select(0, put(index))
            state.append(slots, put(slots), put(samples.lengths[index]), tokens)
        state.write(step.slots[step.verifying], step.starts[step.verifying] + 1, found.tokens)

    def move(self, step: StepRows, cache_index: Tensor, outcome: Tensor, caches: Sequence[object]) -> None:
        """Bring the keys and values of accepted nodes to the positions that follow one another."""
        assert step.drafts is not None
        if step.drafts.tree.linear:
            return
        rows = self._accepted
        if rows is not None and self._platform.move_accepted(caches, cache_index, rows, outcome):
            return
        counts, path = outcome[:, :1].abs(), outcome[:, 2:]
        begins = self._platform.put(step.offsets[step.verifying]).unsqueeze(1)
        levels = torch.arange(path.shape[1], device=path.device)
        inside = levels < counts
        source = cache_index[(begins + torch.where(inside, path, 0)).reshape(-1)]
        target = cache_index[(begins + torch.where(inside, levels, 0)).reshape(-1)]
        self._platform.move_caches(caches, source, target, path.shape[1])


def _places(counts: Longs, width: int) -> Longs:
    """Of rows of ``width`` each, the first ``counts`` places, counted over all rows."""
    return ragged(np.arange(len(counts)) * width, counts)
