"""Chunks of OpenAI's streams, from templates encoded once a request: only variable parts are encoded for each chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from actors.protocol.requests import Delta, Usage
from app.apis.choice_reader import ChoiceReader
from app.apis.events import CallArguments, CallBegun, ChoiceEnded, ChoiceEvents, Event, Reasoning, Text
from app.apis.openai.answers import (
    UsageAnswer,
    characters,
    chat_logprobs,
    completion_logprobs,
    stop_reason,
    usage_answer,
)
from app.apis.openai.requests import ChatRequest, CompletionRequest, StreamOptions
from app.server.exchange import Exchange

__all__ = ["ChatChunks", "CompletionChunks", "UsageReport"]

_encode = msgspec.json.encode


class UsageReport:
    """The usage of a stream so far, and where the body requested it: nowhere, at the end, or in every chunk.

    ``choices``: choices of each prompt.
    """

    def __init__(
        self,
        exchange: Exchange,
        options: StreamOptions | None,
        *,
        choices: int,
        cache_report: bool,
        count_completions: bool = True,
    ) -> None:
        self.at_end = bool(options and options.include_usage)
        self._everywhere = bool(self.at_end and options and options.continuous_usage_stats)
        self._exchange = exchange
        self._choices = choices
        self._cache_report = cache_report
        self._count_completions = count_completions
        self._usages: dict[int, Usage] = {}
        self.reasoning_tokens: dict[int, int] = {}  # by choice

    def note(self, delta: Delta) -> bytes:
        """Add a delta's counts. Returns the part of its chunk after the choices."""
        self._usages[delta.index] = delta.usage
        if self._everywhere:
            return b'],"usage":' + _encode(self.total()) + b"}\n\n"
        return b'],"usage":null}\n\n' if self.at_end else b"]}\n\n"

    def total(self) -> UsageAnswer:
        prompts: dict[int, list[Usage]] = {}
        for index, usage in self._usages.items():
            prompts.setdefault(index // self._choices, []).append(usage)
        return usage_answer(
            prompts.values(),
            cache_report=self._cache_report,
            count_completions=self._count_completions,
            reasoning_tokens=sum(self.reasoning_tokens.values()),
        )

    def last_chunk(self, head: bytes) -> bytes:
        total = self.total()
        self._exchange.tokens = (total.prompt_tokens, total.completion_tokens)
        return head + b'],"usage":' + _encode(total) + b"}\n\n" if self.at_end else b""


def _head(identity: str, kind: bytes, created: int, model: str, fingerprint: str) -> bytes:
    return b"".join(
        (
            b'data: {"id":',
            _encode(identity),
            b',"object":"',
            kind,
            b'","created":',
            str(created).encode(),
            b',"model":',
            _encode(model),
            b',"system_fingerprint":',
            _encode(fingerprint),
            b',"choices":[',
        )
    )


_GOES_ON = b',"finish_reason":null}'


def _finish(delta: Delta, stop_token_ids: Sequence[int] | None, reason: str | None = None) -> bytes:
    """The end of a choice in a chunk. ``stop_token_ids``: the request's. ``reason``: replaces the delta's finish
    reason."""
    if delta.finish_reason is None:
        return _GOES_ON
    finish = b',"finish_reason":"' + (reason or delta.finish_reason).encode() + b'"'
    matched = delta.matched_stop
    stopped = _encode(stop_reason(matched, stop_token_ids))
    return finish + b',"stop_reason":' + stopped + b',"matched_stop":' + _encode(matched) + b"}"


def _token_ids(delta: Delta, wanted: bool) -> bytes:
    return b',"token_ids":' + _encode(delta.token_ids) if wanted else b""


class ChatChunks:
    """``chat.completion.chunk`` events. Each choice begins with a chunk that has its role. Thought, content and calls
    are in chunks of their own.

    ``reader``: creates the reader of a choice.
    """

    def __init__(
        self,
        body: ChatRequest,
        usage: UsageReport,
        *,
        identity: str,
        created: int,
        model: str,
        fingerprint: str,
        reader: Callable[[], ChoiceReader | None],
    ) -> None:
        self._head = _head(identity, b"chat.completion.chunk", created, model, fingerprint)
        self._usage = usage
        self._logprobs = bool(body.logprobs)
        self._as_ids = bool(body.return_tokens_as_token_ids)
        self._ids = bool(body.return_token_ids)
        self._stop_ids = body.stop_token_ids
        self._shows_thoughts = body.include_reasoning is not False
        self._reader = reader
        self._choices: dict[int, ChoiceEvents] = {}
        self._plain = not (self._logprobs or self._ids)

    def chunk(self, delta: Delta) -> bytes:
        choice = self._choices.get(delta.index)
        begins = choice is None
        if choice is None:
            choice = self._choices[delta.index] = ChoiceEvents(self._reader())
        events = choice.read(delta)
        self._usage.reasoning_tokens[delta.index] = choice.reasoning_tokens
        tail = self._usage.note(delta)
        if self._plain and not begins and len(events) == 1 and isinstance(event := events[0], Text):
            return b'%b{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}%b' % (
                self._head,
                delta.index,
                _encode(event.text),
                tail,
            )
        pieces = [self._part(delta, b'"role":"assistant","content":""', tail)] if begins else []
        text, finish = b"", _GOES_ON
        for event in events:
            if isinstance(event, ChoiceEnded):
                finish = _finish(delta, self._stop_ids, event.reason)
                continue
            if text:
                pieces.append(self._part(delta, text, tail))
                text = b""
            if isinstance(event, Text):
                text = b'"content":' + _encode(event.text)
            elif fields := self._fields(event):
                pieces.append(self._part(delta, fields, tail))
        if text or finish is not _GOES_ON or not self._plain or not pieces:
            logprobs = b"null"
            if self._logprobs and delta.logprobs:
                logprobs = _encode(chat_logprobs(delta.logprobs, as_ids=self._as_ids))
            end = b',"logprobs":' + logprobs + _token_ids(delta, self._ids) + finish
            pieces.append(self._part(delta, text, tail, end))
        return b"".join(pieces)

    def _fields(self, event: Event) -> bytes:
        """A thought or a piece of a call, as fields of a delta."""
        match event:
            case Reasoning() if self._shows_thoughts:
                thought = _encode(event.text)
                return b'"reasoning_content":%b,"reasoning":%b' % (thought, thought)
            case CallBegun():
                return (
                    b'"tool_calls":[{"index":%d,"id":%b,"type":"function","function":{"name":%b,"arguments":""}}]'
                    % (event.index, _encode(event.id), _encode(event.name))
                )
            case CallArguments():
                return b'"tool_calls":[{"index":%d,"function":{"arguments":%b}}]' % (event.index, _encode(event.text))
        return b""

    def _part(
        self, delta: Delta, fields: bytes, tail: bytes, end: bytes = b',"logprobs":null,"finish_reason":null}'
    ) -> bytes:
        return b'%b{"index":%d,"delta":{%b}%b%b' % (self._head, delta.index, fields, end, tail)

    def end(self) -> bytes:
        return self._usage.last_chunk(self._head)

    def aborted(self) -> None:
        """OpenAI has no finish reason for an abort: the stream ends with an error."""


class CompletionChunks:
    """``text_completion`` events. ``echoes``: per prompt, the text before the first delta; empty for none."""

    def __init__(
        self,
        body: CompletionRequest,
        usage: UsageReport,
        *,
        identity: str,
        created: int,
        model: str,
        fingerprint: str,
        echoes: Sequence[str],
        choices: int,
    ) -> None:
        self._head = _head(identity, b"text_completion", created, model, fingerprint)
        self._usage = usage
        self._top = body.logprobs
        self._echo = bool(body.echo)
        self._only_prompt = body.max_tokens == 0
        self._as_ids = bool(body.return_tokens_as_token_ids)
        self._ids = bool(body.return_token_ids)
        self._stop_ids = body.stop_token_ids
        self._echoes = echoes
        self._choices = choices
        self._plain = self._top is None and not (self._echo or self._only_prompt or self._ids)
        self._offsets: dict[int, int] = {}

    def chunk(self, delta: Delta) -> bytes:
        tail = self._usage.note(delta)
        if self._plain and delta.finish_reason is None:
            return b'%b{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}%b' % (
                self._head,
                delta.index,
                _encode(delta.text),
                tail,
            )
        text = "" if self._only_prompt else delta.text
        first = delta.index not in self._offsets
        offset = self._offsets.setdefault(delta.index, 0)
        if first and self._echo:
            text = self._echoes[delta.index // self._choices] + text
        logprobs = b"null"
        if self._top is not None:
            entries = () if self._only_prompt else delta.logprobs or ()
            if first and self._echo:
                entries = (*(delta.prompt_logprobs or ()), *entries)
            scored = completion_logprobs(entries, top=self._top, offset=offset, as_ids=self._as_ids)
            self._offsets[delta.index] = offset + sum(characters(entry) for entry in entries)
            logprobs = _encode(scored)
        return b"".join(
            (
                self._head,
                b'{"index":',
                str(delta.index).encode(),
                b',"text":',
                _encode(text),
                b',"logprobs":',
                logprobs,
                _token_ids(delta, self._ids),
                _finish(delta, self._stop_ids),
                tail,
            )
        )

    def end(self) -> bytes:
        return self._usage.last_chunk(self._head)

    def aborted(self) -> None:
        """OpenAI has no finish reason for an abort: the stream ends with an error."""
