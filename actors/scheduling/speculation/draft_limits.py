"""How many draft tokens each decode of a step may verify."""

from __future__ import annotations

import msgspec
import numpy as np

from actors.scheduling.sequence import Sequence
from actors.scheduling.speculation.policy import AdaptiveConfig, AdaptivePolicy
from actors.scheduling.step_builder import InFlightStep, StepBuilder
from kernels.contract.info import ModelInfo
from kernels.contract.step import StepResult

__all__ = ["DraftLimits", "draft_limit"]


class DraftLimits:
    """Draft limits of one worker. The scheduler decides, so that all ranks of a model do the same.

    ``adaptive``: JSON settings of ``AdaptiveConfig``, whose policy follows acceptance and step times; None: as many
    draft tokens as the worker makes. ``decode_only``: no step verifies draft tokens beside prompts.
    """

    def __init__(self, info: ModelInfo, adaptive: str | None) -> None:
        self._depth: int = info.speculative_depth
        self._nodes = info.speculative_levels
        self._tokens: int = info.speculative_tokens
        self.decode_only: bool = info.speculative_decode_only
        self._chains = info.speculative_nodes == info.speculative_depth + 1
        self._prompts = 0  # the number of the last step with prompts
        self._policy: AdaptivePolicy | None = None
        if adaptive is not None and self._depth:
            self._policy = AdaptivePolicy(self._nodes, msgspec.json.decode(adaptive, type=AdaptiveConfig))

    @property
    def is_enabled(self) -> bool:
        return self._depth > 0

    @property
    def is_unobserved(self) -> bool:
        """Whether the draft model does not observe the planned step; then no row drafts."""
        return self._policy is not None and self._policy.is_asleep

    def skip(self, step: StepBuilder) -> bool:
        """Count the step if no decode drafts for certain, whatever its rows; returns False when ``assign`` must
        decide."""
        policy, rows = self._policy, step.decodes
        # A new sequence is the last row.
        if policy is None or rows[-1].acceptance is None or not policy.skip(len(rows)):
            return False
        if policy.is_timed:
            step.adapted = len(rows)
        return True

    def assign(self, step: StepBuilder, share: int, spare: int, page_size: int) -> None:
        """Set the draft limit of each decode of the step.

        The limit is bounded by what the request wants and can still use, by ``share`` tokens in all, by what pays at
        this batch size, and by ``spare`` pages that no other sequence needs soon. Draft tokens take positions after the
        last known token, so they need pages early. The token that each decode samples anyway counts as known.
        """
        rows = step.decodes
        if self._tokens:
            share = min(share, max(self._tokens // len(rows) - 1, 0))
        wanted = []
        for s in rows:
            left = s.target - s.known  # after the token that is sampled anyway
            wanted.append(max(min(s.draft_limit, share, left if self._chains else s.draft_limit * left), 0))
        if self._policy is not None:
            wanted = self._adapt(self._policy, step, wanted)
        if not any(wanted):
            return
        limits: list[int] = []
        max_extra: list[int] = []
        for sequence, limit in zip(rows, wanted, strict=True):
            if limit:
                root = sequence.scheduled - 1 + sequence.max_extra
                pages = -(-(root + limit + 1) // page_size) - sequence.pages
                if pages > spare:
                    limit = max(min(limit, sequence.capacity - root - 1), 0)
                elif pages > 0:
                    step.request(sequence, pages, page_size)
                    spare -= pages
            accepts = min(limit, self._depth)
            sequence.max_extra += accepts
            limits.append(limit)
            max_extra.append(accepts)
        if any(limits):
            step.draft_limits, step.max_extra = limits, max_extra
            step.budget -= sum(limits)

    def _adapt(self, policy: AdaptivePolicy, step: StepBuilder, wanted: list[int]) -> list[int]:
        drafting = [sequence for sequence, limit in zip(step.decodes, wanted, strict=True) if limit]
        if not drafting:
            policy.add_declined()
            return wanted
        for sequence in drafting:
            if sequence.acceptance is None:
                sequence.acceptance = policy.new_estimate()
        levels = policy.choose([sequence.acceptance for sequence in drafting if sequence.acceptance is not None])
        step.draft_levels, step.adapted = max(levels), len(drafting)
        chosen = iter(levels)
        return [min(limit, self._nodes[next(chosen)]) if limit else 0 for limit in wanted]

    def learn(self, flight: InFlightStep, result: StepResult) -> None:
        """Update the policy with the result of a step."""
        policy = self._policy
        if policy is None:
            return
        after_prompts = flight.number == self._prompts + 1
        if flight.decodes < len(flight.samples):
            self._prompts = flight.number
            policy.add_prompts()
        if not flight.adapted:
            return
        is_one_decode = flight.counts[-1] == 1 and len(flight.samples) == flight.decodes
        if not result.drafted:
            if not is_one_decode:
                policy.add_untimed(flight.adapted, 0, 0, 0)
            elif flight.max_extra:
                policy.add_empty(flight.adapted, result.timing.total)
            else:
                policy.add_plain(flight.adapted, result.timing.total, result.timing.observe, after_prompts)
            return
        drafted, accepted, depths = (
            np.frombuffer(part, dtype=np.int32).tolist() for part in (result.drafted, result.accepted, result.depths)
        )
        right = 0
        for sequence, depth, tokens in zip(flight.sequences, depths, accepted, strict=True):
            if not depth:
                continue
            right += max(tokens - 1, 0)
            if sequence.acceptance is not None and tokens:
                policy.add_accepted(sequence.acceptance, tokens - 1, depth)
        levels, nodes = max(depths), sum(drafted)
        if not is_one_decode:
            policy.add_untimed(flight.adapted, levels, nodes, right)
        elif nodes:
            policy.add_timed(flight.adapted, levels, nodes, result.timing.total, right)
        else:
            policy.add_empty(flight.adapted, result.timing.total)


def draft_limit(sequence: Sequence, info: ModelInfo) -> int:
    """Most draft tokens of this request that a step may verify."""
    limit: int = info.speculative_nodes - 1
    requested: int = sequence.spec.sampling.max_drafts
    return limit if requested < 0 else min(requested, limit)
