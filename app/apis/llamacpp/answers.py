"""Answers of ``/completion`` and ``/infill``, whole and as events."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any, Literal

import msgspec

from actors.protocol.requests import Delta, SamplingParams, TokenLogprob
from app.apis.collecting import CollectedChoice
from app.apis.openai.answers import chat_logprobs
from app.server.exchange import Exchange

__all__ = ["AnswerFields", "CompletionChunks", "LlamaCompletionAnswer"]

StopType = Literal["none", "eos", "limit", "word"]


class LlamaCompletionAnswer(msgspec.Struct, kw_only=True):
    """``stop`` is true at the end. ``tokens_cached``: those of the prompt that were not computed again."""

    index: int
    content: str
    tokens: list[int]
    id_slot: int = -1
    stop: bool
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    generation_settings: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    truncated: bool | msgspec.UnsetType = msgspec.UNSET
    has_new_line: bool | msgspec.UnsetType = msgspec.UNSET
    stop_type: StopType | msgspec.UnsetType = msgspec.UNSET
    stopping_word: str | msgspec.UnsetType = msgspec.UNSET
    tokens_cached: int | msgspec.UnsetType = msgspec.UNSET
    timings: dict[str, float] | msgspec.UnsetType = msgspec.UNSET
    completion_probabilities: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET


class AnswerFields:
    """What all answers of one request share."""

    def __init__(self, exchange: Exchange, model: str, params: SamplingParams, *, tokens: bool) -> None:
        self._exchange = exchange
        self._model = model
        self._tokens = tokens
        self._first: float | None = None
        self._settings = {
            "n_predict": -1 if params.max_tokens is None else params.max_tokens,
            "seed": params.seed,
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "stop": list(params.stop),
            "ignore_eos": params.ignore_eos,
        }

    def mark(self) -> None:
        """Note the time of the first tokens."""
        if self._first is None:
            self._first = time.monotonic()

    async def timed(self, stream: AsyncIterator[Delta]) -> AsyncIterator[Delta]:
        """The same deltas; the first notes its time."""
        async for delta in stream:
            self.mark()
            yield delta

    def piece(self, delta: Delta) -> LlamaCompletionAnswer:
        return LlamaCompletionAnswer(
            index=delta.index,
            content=delta.text,
            tokens=list(delta.token_ids),
            stop=False,
            model=self._model,
            tokens_predicted=delta.usage.completion_tokens,
            tokens_evaluated=delta.usage.prompt_tokens,
            completion_probabilities=_probabilities(delta.logprobs),
        )

    def end(self, index: int, choice: CollectedChoice, *, whole: bool) -> LlamaCompletionAnswer:
        """The last answer of a choice; ``whole``: with its text, which no event has brought."""
        usage = choice.usage
        word = choice.matched_stop if isinstance(choice.matched_stop, str) else ""
        stop: StopType = "limit" if choice.finish_reason == "length" else "word" if word else "eos"
        return LlamaCompletionAnswer(
            index=index,
            content="".join(choice.text) if whole else "",
            tokens=choice.token_ids if whole and self._tokens else [],
            stop=True,
            model=self._model,
            tokens_predicted=usage.completion_tokens,
            tokens_evaluated=usage.prompt_tokens,
            generation_settings=self._settings,
            truncated=False,
            has_new_line=any("\n" in text for text in choice.text),
            stop_type=stop,
            stopping_word=word,
            tokens_cached=usage.cached_tokens,
            timings=self._timings(usage.prompt_tokens - usage.cached_tokens, usage.completion_tokens),
            completion_probabilities=_probabilities(choice.logprobs) if whole else msgspec.UNSET,
        )

    def _timings(self, prompt: int, predicted: int) -> dict[str, float]:
        now = time.monotonic()
        first = self._first or now
        spent = {"prompt": (prompt, first - self._exchange.started), "predicted": (predicted, now - first)}
        timings: dict[str, float] = {}
        for name, (count, seconds) in spent.items():
            timings[f"{name}_n"] = count
            timings[f"{name}_ms"] = seconds * 1000
            timings[f"{name}_per_token_ms"] = seconds * 1000 / max(count, 1)
            timings[f"{name}_per_second"] = count / seconds if seconds else 0.0
        return timings


def _probabilities(
    entries: list[TokenLogprob] | tuple[TokenLogprob, ...] | None,
) -> list[dict[str, Any]] | msgspec.UnsetType:
    if not entries:
        return msgspec.UNSET
    scored = msgspec.to_builtins(chat_logprobs(entries).content)
    for entry, result in zip(entries, scored, strict=True):
        result["id"] = entry.token_id
        for other, top in zip(entry.top, result["top_logprobs"], strict=True):
            top["id"] = other.token_id
    return list(scored)


class CompletionChunks:
    """An event for each piece, and the last of each choice with what is known at its end."""

    def __init__(self, exchange: Exchange, form: AnswerFields, choices: int) -> None:
        self._exchange = exchange
        self._form = form
        self._choices = [CollectedChoice() for _ in range(choices)]

    def chunk(self, delta: Delta) -> bytes:
        self._form.mark()
        choice = self._choices[delta.index]
        choice.add(delta)
        choice.text[:] = ["\n"] if any("\n" in text for text in choice.text) else []  # all that the end needs
        events = [self._form.piece(delta)] if delta.text or delta.token_ids else []
        if delta.finish_reason is not None:
            events.append(self._form.end(delta.index, choice, whole=False))
        return b"".join(b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events)

    def end(self) -> bytes:
        usages = [choice.usage for choice in self._choices]
        self._exchange.tokens = (
            sum(usage.prompt_tokens for usage in usages),
            sum(usage.completion_tokens for usage in usages),
        )
        return b""

    def aborted(self) -> None:
        """There is no stop type for an abort: the stream ends with an error."""
