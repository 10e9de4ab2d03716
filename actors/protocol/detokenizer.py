"""The detokenizer turns token ids into text, finds stop strings and writes to the journal."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from actors.runtime import Message

__all__ = [
    "DetokenizerProtocol",
    "Emit",
    "Ended",
    "FlushOutputs",
    "SequenceOutput",
    "TokenScores",
]


class DetokenizerProtocol:
    """Turns token ids into text, finds stop strings, and passes deltas to the journal."""


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """Why a sequence ended: stop | length | abort | error | invalid | timeout | late. ``invalid``: the request is at
    fault. ``late``: it has waited too long for its start."""

    reason: str
    matched: int | None = None  # the token id that ended it
    message: str = ""


class TokenScores(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of a run of tokens: packed as in StepResult."""

    logprobs: bytes  # float32 [tokens]
    top_counts: bytes  # int32 [tokens]
    top_ids: bytes  # int32
    top_logprobs: bytes  # float32


class SequenceOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """News of one sequence. ``start`` is the index of the first token in the sequence's output: it makes redelivery
    safe."""

    sequence: int
    start: int
    tokens: tuple[int, ...] = ()
    scores: TokenScores | None = None
    prompt_scores: TokenScores | None = None  # prompt tokens 1 .., once complete
    cached_tokens: int = 0
    ended: Ended | None = None
    drafted: int = 0  # draft tokens that were verified for these tokens; all but one of the tokens were among them
    states: bytes = b""  # float32 [tokens, hidden]: of the tokens before each of these, the prompt's with the first
    experts: bytes = b""  # int32 [tokens, layers, chosen]: that these tokens took
    vector: bytes = b""  # float32: of a task whose result is a vector, with the sequence's end


class Emit(Message[DetokenizerProtocol, None], frozen=True):
    """One message per step, never one per token."""

    redeliver: ClassVar[bool] = True
    outputs: tuple[SequenceOutput, ...]


class FlushOutputs(Message[DetokenizerProtocol, None], frozen=True):
    """A barrier: answered when every earlier Emit has reached the journal. A restarted scheduler sends it before it
    reads the journal."""
