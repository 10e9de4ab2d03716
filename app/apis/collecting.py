"""Deltas collected into whole answers."""

from __future__ import annotations

from collections.abc import AsyncIterable
from typing import Literal

from actors.protocol.requests import Delta, FinishReason, RequestAborted, TokenLogprob, Usage

__all__ = ["CollectedChoice", "collect"]


class CollectedChoice:
    """The deltas of one choice, collected."""

    __slots__ = (
        "finish_reason",
        "hidden_states",
        "logprobs",
        "matched_stop",
        "prompt_logprobs",
        "prompt_token_ids",
        "routed_experts",
        "text",
        "token_ids",
        "usage",
    )

    def __init__(self) -> None:
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.hidden_states: list[bytes] = []
        self.routed_experts: list[bytes] = []
        self.prompt_logprobs: tuple[TokenLogprob, ...] | None = None
        self.prompt_token_ids: tuple[int, ...] | None = None
        self.finish_reason: FinishReason | Literal["abort"] | None = None
        self.matched_stop: str | int | None = None
        self.usage = Usage()

    def add(self, delta: Delta) -> None:
        if delta.text:
            self.text.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            self.logprobs.extend(delta.logprobs)
        if delta.hidden_states:
            self.hidden_states.append(delta.hidden_states)
        if delta.routed_experts:
            self.routed_experts.append(delta.routed_experts)
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.prompt_token_ids is not None:
            self.prompt_token_ids = delta.prompt_token_ids
        self.usage = delta.usage
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.matched_stop = delta.matched_stop


async def collect(stream: AsyncIterable[Delta], choices: int, *, keep_aborted: bool = False) -> list[CollectedChoice]:
    """Collect every choice of a stream. An abort raises RequestAborted, or with ``keep_aborted`` returns what
    arrived."""
    collected = [CollectedChoice() for _ in range(choices)]
    try:
        async for delta in stream:
            collected[delta.index].add(delta)
    except RequestAborted:
        if not keep_aborted:
            raise
        for choice in collected:
            choice.finish_reason = choice.finish_reason or "abort"
    return collected
