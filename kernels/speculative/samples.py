"""What is sampled in a step with guesses, and what of it counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.platforms.operators import Acceptance
from kernels.rows import StepRows
from kernels.sampling import Sampled
from kernels.speculative.verify import Walk

__all__ = ["Samples", "Verified"]

Longs = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Samples:
    """What a step samples: ``rows`` of it, one after the other, each at one token of the batch or, in a row that
    verifies, at all of its tokens. ``slots``, ``tokens`` (places in the batch) and ``lengths`` (tokens known before the
    one sampled, were each guess the next of the one before) int64 [samples]. ``guesses``: those of the verified rows.
    """

    rows: Longs
    slots: Longs
    tokens: Longs
    lengths: Longs
    guesses: slice

    @classmethod
    def of(cls, step: StepRows, known: Longs) -> Samples:
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
class Verified:
    """What a step with guesses sampled, and what of it counts.

    ``sampled``: entries of every row that samples, one after the other: one, or in a row that verified one for each
    level that could be accepted. ``rows`` int64 [entries]: the step's rows; ``places`` int64 [entries]: the level.
    ``outcome`` int64 [verified rows, 2 + depth + 1], on the device: entries that count (minus that where the row is not
    finite), levels that could have been accepted, and the nodes passed. ``accepted``: where all that is part of one.
    """

    sampled: Sampled
    rows: Longs
    places: Longs
    outcome: Tensor
    accepted: Acceptance | None = None

    @classmethod
    def of(
        cls,
        step: StepRows,
        samples: Samples,
        sampled: Sampled,
        found: Walk,
        put: Callable[[Longs], Tensor],
    ) -> Verified:
        """``found``: how far each row's guesses are right. ``put``: an array to the device."""
        assert step.drafts is not None
        part = samples.guesses
        counts = step.counts[step.verifying]
        levels = found.path.shape[1]
        begins = put(part.start + np.cumsum(counts) - counts)
        passed = (begins.unsqueeze(1) + found.path).reshape(-1)
        total = len(samples.slots)
        device = passed.device
        entries = torch.cat(
            (torch.arange(part.start, device=device), passed, torch.arange(part.stop, total, device=device))
        )
        tokens = torch.cat((sampled.tokens[: part.start], found.tokens.reshape(-1), sampled.tokens[part.stop :]))
        broken = sampled.broken.index_select(0, entries)
        own = broken[part.start : part.start + passed.numel()].view(-1, levels)
        counted = torch.arange(levels, device=device) < found.counts.unsqueeze(1)
        unsound = (own & counted).any(1)
        depths = step.drafts.tree.depths
        run = torch.arange(depths.shape[1], device=device) < put(counts).unsqueeze(1)
        reach = depths.masked_fill(~run, 0).amax(1)
        outcome = torch.cat(
            (
                torch.where(unsound, -found.counts, found.counts).unsqueeze(1),
                reach.unsqueeze(1),
                found.path,
            ),
            1,
        )

        first = np.searchsorted(samples.rows, step.decodes)
        repeats = np.ones(len(samples.rows), dtype=np.int64)
        repeats[first : first + step.verifies] = levels
        ends = np.cumsum(repeats)
        host = np.repeat(np.arange(len(repeats)), repeats)
        places = np.arange(int(ends[-1])) - np.repeat(ends - repeats, repeats)
        tops = sampled.top_counts
        if tops is not None:  # a request asks for the same number everywhere
            own_first = np.concatenate(
                (np.arange(part.start), part.start + np.cumsum(counts) - counts, np.arange(part.stop, total))
            )
            tops = tops.index_select(0, torch.from_numpy(own_first[host]))
        chosen = replace(
            sampled,
            tokens=tokens,
            broken=broken,
            logprobs=None if sampled.logprobs is None else sampled.logprobs.index_select(0, entries),
            top_ids=None if sampled.top_ids is None else sampled.top_ids.index_select(0, entries),
            top_logprobs=None if sampled.top_logprobs is None else sampled.top_logprobs.index_select(0, entries),
            top_counts=tops,
        )
        return cls(chosen, samples.rows[host], places, outcome)

    @classmethod
    def here(cls, step: StepRows, sampled: Sampled, found: Walk) -> Verified:
        """The same where the device is the host, which finds it sooner, and every row verified and none is scored."""
        assert step.drafts is not None
        counts, path, accepted = step.counts, found.path.numpy(), found.counts.numpy()
        rows, levels = path.shape
        passed = (step.offsets[:, None] + path).reshape(-1)
        broken = sampled.broken.numpy()[passed]
        own = broken.reshape(rows, levels) & (np.arange(levels) < accepted[:, None])
        depths = step.drafts.tree.depths.numpy()
        run = np.arange(depths.shape[1]) < counts[:, None]
        outcome = np.empty((rows, levels + 2), dtype=np.int64)
        outcome[:, 0] = np.where(own.any(1), -accepted, accepted)
        outcome[:, 1] = np.where(run, depths, 0).max(1)
        outcome[:, 2:] = path
        return cls.whole(Sampled(found.tokens.reshape(-1), torch.from_numpy(broken)), torch.from_numpy(outcome))

    @classmethod
    def whole(cls, chosen: Sampled, outcome: Tensor) -> Verified:
        """Where every row verified: ``chosen`` [rows * levels]."""
        levels = outcome.shape[1] - 2
        index = np.arange(len(outcome) * levels)
        return cls(chosen, index // levels, index % levels, outcome)

    @classmethod
    def by_platform(cls, found: Acceptance) -> Verified:
        """Where every row verified, and the platform accepted: entries are [rows, levels]."""
        return replace(cls.whole(Sampled(found.tokens, found.broken), found.outcome), accepted=found)
