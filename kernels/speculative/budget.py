"""What guessing may lose in all, whatever steps cost and however few guesses are right.

An account in seconds. Every step pays in a small share of what a plain one takes; steps with guesses pay in what they
gained on as many plain ones, or take out what they lost. While it is overdrawn nothing is guessed, for whatever
reason, unless a ``zero_step_probe_interval`` says when. So what is lost never exceeds that share of the time, a loan,
what the last step overdrew, and what the first few steps with guesses took; stalls of the machine aside.
"""

from __future__ import annotations

__all__ = ["FIRST", "LOAN", "MOST", "SAVED", "SHARE", "Budget"]

SHARE = 0.02
"""Of the time, that guesses may cost more than they bring."""
LOAN, SAVED = 8.0, 64.0
"""Plain steps that may be lost before that, and that are remembered of what guesses have gained."""
MOST = 16.0
"""Plain steps that one step can have lost: the rest of a stall is the machine's."""
FIRST, COLD = 3, 1.0
"""Steps with guesses that can have lost no more than so many plain ones: what runs for the first time is slow."""


class Budget:
    """Of one model, at all batch sizes."""

    def __init__(self) -> None:
        self._balance = 0.0  # seconds
        self._cold = FIRST  # steps with guesses that are slow

    def spent(self, plain: float) -> bool:
        """Whether nothing may be guessed before a step that takes ``plain`` seconds without guesses."""
        return self._balance + LOAN * plain < 0

    def wait(self, plain: float) -> float:
        """Steps of ``plain`` seconds without guesses until it is not ``spent``."""
        return max(0.0, -(self._balance + LOAN * plain) / (SHARE * plain)) if plain else 0.0

    def passed(self, plain: float, steps: int = 1) -> None:
        """Steps went by that take ``plain`` seconds without guesses, with or without them."""
        self._change(SHARE * plain * steps, plain)

    def guessed(self, plain: float, tokens: float, seconds: float) -> None:
        """A step with guesses, or one that had to see to what they left, took ``seconds`` for ``tokens`` a row, each
        counted as so many steps of ``plain`` seconds as it would have taken."""
        most = COLD if self._cold else MOST
        self._cold = max(self._cold - 1, 0)
        self._change(max(tokens * plain - seconds, -most * plain), plain)

    def _change(self, seconds: float, plain: float) -> None:
        # What was saved at a batch size whose steps take longer is kept while others run.
        self._balance += min(seconds, max(SAVED * plain - self._balance, 0.0))
