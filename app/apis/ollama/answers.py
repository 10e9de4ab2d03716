"""Answers of Ollama's API: an object, or one a line."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from actors.protocol.requests import Delta, TokenLogprob
from app.apis.choice_reader import ChoiceReader
from app.apis.events import (
    Answer,
    CallArguments,
    CallBegun,
    CallEnded,
    ChoiceEnded,
    ChoiceEvents,
    Reasoning,
    Text,
    input_of,
)
from app.apis.openai.answers import chat_logprobs
from app.server.exchange import Exchange

__all__ = ["Lines", "OllamaChatAnswer", "OllamaGenerateAnswer", "Times", "chat_answer", "generate_answer", "loaded"]

Unset = msgspec.UnsetType
DoneReason = Literal["stop", "length", "load"]


class FunctionAnswer(msgspec.Struct):
    index: int
    name: str
    arguments: Any


class CallAnswer(msgspec.Struct):
    id: str
    function: FunctionAnswer


class OllamaMessageAnswer(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    thinking: str | Unset = msgspec.UNSET
    tool_calls: list[CallAnswer] | Unset = msgspec.UNSET


class Stats(msgspec.Struct, kw_only=True):
    """What both answers share. Durations are nanoseconds. The counts come with the end."""

    model: str
    created_at: str
    done: bool
    done_reason: DoneReason | Unset = msgspec.UNSET
    total_duration: int | Unset = msgspec.UNSET
    load_duration: int | Unset = msgspec.UNSET
    prompt_eval_count: int | Unset = msgspec.UNSET
    prompt_eval_duration: int | Unset = msgspec.UNSET
    eval_count: int | Unset = msgspec.UNSET
    eval_duration: int | Unset = msgspec.UNSET
    logprobs: list[dict[str, Any]] | Unset = msgspec.UNSET


class OllamaChatAnswer(Stats, kw_only=True):
    message: OllamaMessageAnswer


class OllamaGenerateAnswer(Stats, kw_only=True):
    response: str
    thinking: str | Unset = msgspec.UNSET


class Times:
    """When a request was received, and when its first tokens came."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._first: float | None = None

    def mark(self) -> None:
        if self._first is None:
            self._first = time.monotonic()

    def end(self, end: ChoiceEnded) -> dict[str, Any]:
        """The fields of a last answer."""
        now = time.monotonic()
        first, started = self._first or now, self._exchange.started
        usage = end.usage
        self._exchange.tokens = (usage.prompt_tokens, usage.completion_tokens)
        return {
            "done": True,
            "done_reason": "length" if end.reason == "length" else "stop",
            "total_duration": int((now - started) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": int((first - started) * 1e9),
            "eval_count": usage.completion_tokens,
            "eval_duration": int((now - first) * 1e9),
        }


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _scores(entries: tuple[TokenLogprob, ...] | list[TokenLogprob] | None) -> list[dict[str, Any]] | Unset:
    return msgspec.to_builtins(chat_logprobs(entries).content) if entries else msgspec.UNSET


def loaded(model: str, *, chat: bool) -> OllamaChatAnswer | OllamaGenerateAnswer:
    """The answer to a request without a prompt, which loads a model in Ollama."""
    common: dict[str, Any] = {"model": model, "created_at": _now(), "done": True, "done_reason": "load"}
    if chat:
        return OllamaChatAnswer(message=OllamaMessageAnswer(content=""), **common)
    return OllamaGenerateAnswer(response="", **common)


def _call(index: int, identity: str, name: str, arguments: str) -> CallAnswer:
    return CallAnswer(identity, FunctionAnswer(index, name, input_of(arguments)))


def chat_answer(answer: Answer, model: str, times: Times, scores: list[TokenLogprob]) -> OllamaChatAnswer:
    message = OllamaMessageAnswer(content=answer.text)
    if answer.reasoning:
        message.thinking = answer.reasoning
    if answer.calls:
        message.tool_calls = [_call(i, call.id, call.name, call.arguments) for i, call in enumerate(answer.calls)]
    return OllamaChatAnswer(
        model=model, created_at=_now(), message=message, logprobs=_scores(scores), **times.end(answer.end)
    )


def generate_answer(answer: Answer, model: str, times: Times, scores: list[TokenLogprob]) -> OllamaGenerateAnswer:
    return OllamaGenerateAnswer(
        model=model,
        created_at=_now(),
        response=answer.text,
        thinking=answer.reasoning or msgspec.UNSET,
        logprobs=_scores(scores),
        **times.end(answer.end),
    )


class Lines:
    """The lines of a stream: one for each piece, one for each whole call, and the last with the counts."""

    def __init__(self, reader: ChoiceReader | None, model: str, times: Times, *, chat: bool) -> None:
        self._choice = ChoiceEvents(reader)
        self._model = model
        self._times = times
        self._chat = chat
        self._call: CallBegun | None = None
        self._arguments: list[str] = []

    def chunk(self, delta: Delta) -> bytes:
        self._times.mark()
        lines: list[bytes] = []
        scores = _scores(delta.logprobs)
        for event in self._choice.read(delta):
            match event:
                case Text(text):
                    lines.append(self._line(text, logprobs=scores))
                    scores = msgspec.UNSET
                case Reasoning(text):
                    lines.append(self._line("", text, logprobs=scores))
                    scores = msgspec.UNSET
                case CallBegun():
                    self._call, self._arguments = event, []
                case CallArguments(_, text):
                    self._arguments.append(text)
                case CallEnded() if self._call is not None:
                    call = self._call
                    called = _call(call.index, call.id, call.name, "".join(self._arguments))
                    lines.append(self._line("", calls=[called], logprobs=scores))
                    scores = msgspec.UNSET
                case ChoiceEnded():
                    lines.append(self._line("", logprobs=scores, **self._times.end(event)))
                    scores = msgspec.UNSET
        if scores is not msgspec.UNSET:
            lines.append(self._line("", logprobs=scores))
        return b"".join(lines)

    def _line(self, text: str, thought: str = "", calls: list[CallAnswer] | None = None, **fields: Any) -> bytes:
        common: dict[str, Any] = {"model": self._model, "created_at": _now(), "done": False, **fields}
        answer: OllamaChatAnswer | OllamaGenerateAnswer
        if self._chat:
            message = OllamaMessageAnswer(
                content=text, thinking=thought or msgspec.UNSET, tool_calls=calls if calls else msgspec.UNSET
            )
            answer = OllamaChatAnswer(message=message, **common)
        else:
            answer = OllamaGenerateAnswer(response=text, thinking=thought or msgspec.UNSET, **common)
        return msgspec.json.encode(answer) + b"\n"

    def end(self) -> bytes:
        return b""

    def aborted(self) -> None:
        """There is no reason for an abort: the stream ends with an error."""
