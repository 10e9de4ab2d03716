"""Results of draft tokens (speculative decoding), counted once a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from telemetry.metrics.exposition import Samples

__all__ = ["SpeculationMetrics"]


class SpeculationMetrics:
    """Counts since the start of the engine. ``algorithm``: a label; empty without speculation.

    A draft is the draft tokens of one row in one step. Its acceptance length is 1 + its accepted tokens.
    """

    def __init__(self) -> None:
        self.algorithm = ""
        self.drafts = 0
        self.drafted = 0
        self.accepted = 0
        self.draft_seconds = 0.0
        self.positions: list[int] = []  # drafts with at least n + 1 accepted tokens

    def verified(self, drafted: Sequence[int], produced: Sequence[int], seconds: float) -> None:
        """Count a step's result: for each row the verified draft tokens and the resulting tokens. ``seconds``: of the
        worker for drafting."""
        self.draft_seconds += seconds
        for drafts, tokens in zip(drafted, produced, strict=True):
            if not drafts or not tokens:
                continue
            self.drafts += 1
            self.drafted += drafts
            self.accepted += tokens - 1
            self.positions += [0] * (tokens - 1 - len(self.positions))
            for position in range(tokens - 1):
                self.positions[position] += 1

    def readings(self) -> Mapping[str, Samples]:
        """By metric name. Names without the engine's prefix are sums for other engines' metrics."""
        if not self.algorithm:
            return {}
        by = (self.algorithm,)
        return {
            "troupe_speculative_drafts_total": {by: self.drafts},
            "troupe_speculative_draft_tokens_total": {by: self.drafted},
            "troupe_speculative_accepted_tokens_total": {by: self.accepted},
            "troupe_speculative_accepted_at_position_total": {
                (self.algorithm, str(position)): count for position, count in enumerate(self.positions)
            },
            "troupe_speculative_draft_seconds_total": {by: self.draft_seconds},
            "speculative_drafts": self.drafts,
            "speculative_draft_tokens": self.drafted,
            "speculative_accepted_tokens": self.accepted,
            "speculative_positions": {(str(position),): count for position, count in enumerate(self.positions)},
        }
