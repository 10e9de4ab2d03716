"""What became of guesses (speculative decoding), counted once a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from telemetry.exposition import Samples

__all__ = ["SpeculationMetrics"]


class SpeculationMetrics:
    """Counts from the start of the engine. ``algorithm``: a label; empty while the engine does not speculate.

    A draft is the guesses of one row in one step. Its acceptance length is 1 more than those of them that were right.
    """

    def __init__(self) -> None:
        self.algorithm = ""
        self.drafts = 0
        self.drafted = 0
        self.accepted = 0
        self.draft_seconds = 0.0
        self.positions: list[int] = []  # drafts of which at least n + 1 guesses were accepted

    def verified(self, drafted: Sequence[int], produced: Sequence[int], seconds: float) -> None:
        """A step's answer: of each row the guesses that were verified, and the tokens that came of it. ``seconds``:
        the worker's, for drafting.
        """
        self.draft_seconds += seconds
        for guesses, tokens in zip(drafted, produced, strict=True):
            if not guesses or not tokens:
                continue
            self.drafts += 1
            self.drafted += guesses
            self.accepted += tokens - 1
            self.positions += [0] * (tokens - 1 - len(self.positions))
            for position in range(tokens - 1):
                self.positions[position] += 1

    def readings(self) -> Mapping[str, Samples]:
        """By metric name; those without the engine's prefix are sums for other engines' names."""
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
