"""Writes a response: its items as they come, and the events of its stream with their sequence numbers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from actors.protocol.requests import Delta
from app.apis.choice_reader import ChoiceReader
from app.apis.events import CallArguments, CallBegun, CallEnded, ChoiceEnded, ChoiceEvents, Event, Reasoning, Text
from app.apis.responses.answers import ResponseAnswer, logprobs_of, usage_of
from app.apis.responses.items import PREFIXES, encode_thought
from app.server.errors import ApiError

__all__ = ["ResponseWriter", "WriterOptions", "first_events"]

_encode = msgspec.json.encode


class WriterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``custom``: names of the tools whose calls have a text as input. ``summary``: a thought is the summary of its
    item. ``encrypted``: it is returned in encoded form as well. ``new_id``: makes an id with a prefix."""

    custom: frozenset[str]
    logprobs: bool
    summary: bool
    encrypted: bool
    cache_report: bool
    new_id: Callable[[str], str]


class ResponseWriter:
    """Turns the deltas of one choice into a response and its events. ``response`` is as far as it has come."""

    def __init__(self, response: ResponseAnswer, reader: ChoiceReader | None, options: WriterOptions) -> None:
        self.response = response
        self.ended = False
        self._choice = ChoiceEvents(reader)
        self._options = options
        self._number = 0
        self._item: dict[str, Any] | None = None  # the item that has begun and not ended
        self._texts: list[str] = []  # of that item
        self._logprobs: list[dict[str, Any]] = []  # of that item
        self._scored: list[dict[str, Any]] = []  # of tokens that are no text of an event yet
        self._held = ""  # white space that is content only if more comes
        self._held_logprobs: list[dict[str, Any]] = []

    @property
    def tokens(self) -> tuple[int, int]:
        """Those of the prompt and of the answer so far."""
        usage = self._choice.usage
        return usage.prompt_tokens, usage.completion_tokens

    def begin(self) -> bytes:
        """The events before the first delta."""
        begun = _begin(self.response)
        self._number = len(begun)
        return b"".join(begun)

    def chunk(self, delta: Delta) -> bytes:
        """The events of a delta."""
        if self._options.logprobs and delta.logprobs:
            self._scored += logprobs_of(delta.logprobs)
        parts: list[bytes] = []
        other = False
        for event in self._choice.read(delta):
            if isinstance(event, Text):
                parts.append(self._text(event.text, self._scored_of(event.text)))
            else:
                other = True
                parts.append(self._other(event))
        if other:  # what is left belongs to thoughts and calls, not to text that the parser holds back
            self._scored = []
        return b"".join(parts)

    def _scored_of(self, text: str) -> list[dict[str, Any]]:
        """Take the log-probabilities of a text's tokens. The parser may have held it back, and tokens before and after
        it may be marks, or text that comes later."""
        scored, place = self._scored, 0
        if not text:
            return []
        start = "".join(token["token"] for token in scored).rfind(text)
        if start < 0:  # such as tokens that are parts of a character
            self._scored = []
            return scored
        taken: list[dict[str, Any]] = []
        for number, token in enumerate(scored):
            if place >= start + len(text):
                self._scored = scored[number:]
                return taken
            place += len(token["token"])
            if place > start:
                taken.append(token)
        self._scored = []
        return taken

    def failed(self, error: ApiError, *, cancelled: bool = False) -> bytes:
        """The last events after an error."""
        done = self._close("incomplete")
        response = self.response
        response.status = "cancelled" if cancelled else "failed"
        if not cancelled:
            code = "rate_limit_exceeded" if error.status == 429 else "server_error"
            response.error = {"code": code, "message": error.message}
        self._count()
        return done + self._event("response.incomplete" if cancelled else "response.failed", response=response)

    # -- pieces

    def _other(self, event: Event) -> bytes:
        match event:
            case Reasoning(text):
                return self._thought(text)
            case CallBegun(_, call_id, name):
                return self._begin_call(call_id, name)
            case CallArguments(_, text):
                return self._arguments(text)
            case CallEnded():
                return self._close("completed")
            case ChoiceEnded():
                return self._end(event)
        return b""

    def _text(self, text: str, scored: list[dict[str, Any]]) -> bytes:
        begun = b""
        if self._item is None or self._item["type"] != "message":
            self._held += text
            self._held_logprobs += scored
            if not self._held.strip():
                return b""
            text, scored = self._held, self._held_logprobs
            self._drop_held()
            begun = self._begin("message", role="assistant", content=[], status="in_progress")
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            begun += self._of_item("response.content_part.added", content_index=0, part=part)
        self._texts.append(text)
        self._logprobs += scored
        return begun + self._of_item("response.output_text.delta", content_index=0, delta=text, logprobs=scored)

    def _thought(self, text: str) -> bytes:
        begun, summary = b"", self._options.summary
        if self._item is None or self._item["type"] != "reasoning":
            self._drop_held()
            begun = self._begin("reasoning", summary=[], status="in_progress")
            begun += (
                self._of_item(
                    "response.reasoning_summary_part.added", summary_index=0, part={"type": "summary_text", "text": ""}
                )
                if summary
                else self._of_item(
                    "response.content_part.added", content_index=0, part={"type": "reasoning_text", "text": ""}
                )
            )
        self._texts.append(text)
        if summary:
            return begun + self._of_item("response.reasoning_summary_text.delta", summary_index=0, delta=text)
        return begun + self._of_item("response.reasoning_text.delta", content_index=0, delta=text)

    def _begin_call(self, call_id: str, name: str) -> bytes:
        self._drop_held()
        fields = {"call_id": call_id, "name": name, "status": "in_progress"}
        if name in self._options.custom:
            return self._begin("custom_tool_call", **fields, input="")
        return self._begin("function_call", **fields, arguments="")

    def _arguments(self, text: str) -> bytes:
        self._texts.append(text)
        if self._item is None or self._item["type"] == "custom_tool_call":
            return b""  # its input is known when the arguments are complete
        return self._of_item("response.function_call_arguments.delta", delta=text)

    def _drop_held(self) -> None:
        self._held, self._held_logprobs = "", []

    # -- items

    def _begin(self, kind: str, **fields: Any) -> bytes:
        closed = self._close("completed")
        self._item = {"id": self._options.new_id(PREFIXES[kind]), "type": kind, **fields}
        self.response.output.append(self._item)
        return closed + self._event("response.output_item.added", output_index=self._index, item=self._item)

    def _close(self, status: str) -> bytes:
        """End the item that has begun."""
        item = self._item
        if item is None:
            return b""
        text, self._texts = "".join(self._texts), []
        match item["type"]:
            case "message":
                scored, self._logprobs = self._logprobs, []
                part = {"type": "output_text", "text": text, "annotations": [], "logprobs": scored}
                item["content"] = [part]
                done = self._of_item("response.output_text.done", content_index=0, text=text, logprobs=scored)
                done += self._of_item("response.content_part.done", content_index=0, part=part)
            case "reasoning":
                done = self._close_thought(item, text)
            case "function_call":
                item["arguments"] = text
                done = self._of_item("response.function_call_arguments.done", arguments=text, name=item["name"])
            case _:
                item["input"] = text = _input(text)
                done = self._of_item("response.custom_tool_call_input.delta", delta=text)
                done += self._of_item("response.custom_tool_call_input.done", input=text)
        item["status"] = status
        done += self._event("response.output_item.done", output_index=self._index, item=item)
        self._item = None
        return done

    def _close_thought(self, item: dict[str, Any], text: str) -> bytes:
        if self._options.encrypted:
            item["encrypted_content"] = encode_thought(text)
        if self._options.summary:
            part = {"type": "summary_text", "text": text}
            item["summary"] = [part]
            done = self._of_item("response.reasoning_summary_text.done", summary_index=0, text=text)
            return done + self._of_item("response.reasoning_summary_part.done", summary_index=0, part=part)
        part = {"type": "reasoning_text", "text": text}
        item["content"] = [part]
        done = self._of_item("response.reasoning_text.done", content_index=0, text=text)
        return done + self._of_item("response.content_part.done", content_index=0, part=part)

    def _end(self, event: ChoiceEnded) -> bytes:
        response = self.response
        cut = event.reason == "length"
        done = b""
        if not response.output:  # an answer of white space alone, or of nothing
            self._item = {
                "id": self._options.new_id("msg_"),
                "type": "message",
                "role": "assistant",
                "content": [],
                "status": "in_progress",
            }
            response.output.append(self._item)
            done = self._event("response.output_item.added", output_index=0, item=self._item)
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            done += self._of_item("response.content_part.added", content_index=0, part=part)
            if self._held:
                self._texts.append(self._held)
                self._logprobs = self._held_logprobs
                done += self._of_item(
                    "response.output_text.delta", content_index=0, delta=self._held, logprobs=self._logprobs
                )
        done += self._close("incomplete" if cut else "completed")
        response.status = "incomplete" if cut else "completed"
        if cut:
            response.incomplete_details = {"reason": "max_output_tokens"}
            if response.output[-1]["type"] != "reasoning":
                response.output[-1]["status"] = "incomplete"
        self._count()
        return done + self._event(f"response.{response.status}", response=response)

    def _count(self) -> None:
        self.ended = True
        self.response.completed_at = int(time.time()) if self.response.status == "completed" else None
        self.response.usage = usage_of(
            self._choice.usage, self._choice.reasoning_tokens, cache_report=self._options.cache_report
        )

    # -- events

    @property
    def _index(self) -> int:
        return len(self.response.output) - 1

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        item = self._item
        return self._event(kind, item_id=item["id"] if item else "", output_index=self._index, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return _framed(kind, self._number - 1, **fields)


def first_events(response: ResponseAnswer) -> list[bytes]:
    """The first events of a response of the background, whatever has become of it since. They repeat the whole request,
    so they are not kept."""
    return _begin(
        msgspec.structs.replace(
            response, status="queued", output=[], usage=None, completed_at=None, error=None, incomplete_details=None
        )
    )


def _begin(response: ResponseAnswer) -> list[bytes]:
    """The events before the first delta."""
    kinds = ["created", "queued", "in_progress"] if response.status == "queued" else ["created", "in_progress"]
    begun: list[bytes] = []
    for number, kind in enumerate(kinds):
        if kind == "in_progress":
            response.status = "in_progress"
        begun.append(_framed(f"response.{kind}", number, response=response))
    return begun


def _framed(kind: str, number: int, **fields: Any) -> bytes:
    data = _encode({"type": kind, "sequence_number": number, **fields})
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def _input(arguments: str) -> str:
    """The text that a custom tool gets: the one argument of the call, or what the model wrote instead."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    return value["input"] if isinstance(value, dict) and isinstance(value.get("input"), str) else arguments
