"""The request log: one record for each request at its end, read from its timeline."""

from __future__ import annotations

import logging

import msgspec

from telemetry.logs.lines import Event, clip
from telemetry.logs.request_times import request_times
from telemetry.timeline import Content, Hop, Mark, RequestTimeline, Value

__all__ = ["REQUEST_LOGGER", "RequestLog"]

REQUEST_LOGGER = "troupe.requests"

_PARTIAL = 2048
"""Characters of an input and an output at level 2: the beginning and the end."""

_LONGEST_NAME = 256

_OWN_WORDS = frozenset({"abort", "QueueFull", "RequestTimeout", "RequestFailed", "EngineFailed", "EngineDraining"})
"""Errors whose message contains no text of a client."""


class RequestLog:
    """Logs each request's end at INFO to the logger ``troupe.requests``, except health checks.

    ``level``, as SGLang's ``--log-requests-level``: 0 ids, counts and times; 1 also sampling parameters; 2 also up to
    2048 characters of input and output; 3 also all of them. Below level 2 no text of a client is logged, except its id,
    its sampling parameters and its model name. The message of an invalid request, which may quote the client, is not
    logged either.
    """

    def __init__(self, *, level: int, as_json: bool = False) -> None:
        self._level = level
        self._as_json = as_json
        self._log = logging.getLogger(REQUEST_LOGGER)

    def began(self, timeline: RequestTimeline) -> None:
        if self._level >= 2:
            timeline.content = Content()

    def hop_ended(self, timeline: RequestTimeline, hop: Hop) -> None:
        """Recorded at the end."""

    def marked(self, timeline: RequestTimeline, mark: Mark) -> None:
        """Recorded at the end."""

    def ended(self, timeline: RequestTimeline) -> None:
        content, timeline.content = timeline.content, None
        if timeline.probe or not self._log.isEnabledFor(logging.INFO):
            return
        fields = self._metadata(timeline)
        if self._level >= 1:
            fields |= {name.removeprefix("gen_ai.request."): value for name, value in timeline.request.items()}
        if content is not None:
            fields |= self._texts(content)
        event = Event("request ended", fields, as_json=self._as_json)
        self._log.info(event, extra={"request_id": timeline.request_id, "traceparent": timeline.traceparent})

    def _metadata(self, timeline: RequestTimeline) -> dict[str, object]:
        outcome, times = timeline.outcome, request_times(timeline)
        error = outcome.error_type if outcome is not None else ""
        fields: dict[str, object] = {
            "request_id": timeline.request_id,
            "label": _short(timeline.label),
            "operation": timeline.operation,
            "model": _short(timeline.model),
            "finish_reasons": outcome.finish_reasons if outcome is not None and outcome.finish_reasons else None,
            "error_type": error or None,
            "prompt_tokens": times["prompt_tokens"],
            "cached_tokens": times["cached_tokens"],
            "output_tokens": times["output_tokens"],
            "duration_s": _seconds(times["total"]),
            **{
                f"{name}_s": _seconds(times[name]) for name in ("first_token", "tokenize", "queue", "prefill", "decode")
            },
            "preemptions": times["preemptions"] or None,
            "worker_deaths": times["worker_deaths"] or None,
        }
        if outcome is not None and outcome.message and (error in _OWN_WORDS or self._level >= 2):
            fields["error_message"] = clip(outcome.message, 1024)
        return fields

    def _texts(self, content: Content) -> dict[str, object]:
        outputs = ["".join(parts) for _, parts in sorted(content.output.items())]
        parameters: dict[str, object] = {
            "input": None if content.input is None else _shown(content.input),
            "output": None if not outputs else outputs[0] if len(outputs) == 1 else outputs,
        }
        if self._level > 2:
            return parameters
        return {name: _clipped(value) for name, value in parameters.items()}


def _clipped(value: object) -> object:
    if isinstance(value, str):
        return clip(value, _PARTIAL)
    if isinstance(value, list):
        share = _PARTIAL // len(value)
        return [clip(part, share) for part in value]
    return value


def _shown(prompt: object) -> str:
    """A text as it is; token ids and conversations as JSON, without empty values."""
    if isinstance(prompt, str):
        return prompt
    plain = msgspec.to_builtins(prompt, enc_hook=str)
    if isinstance(plain, dict):
        plain = {name: value for name, value in plain.items() if value not in (None, {}, [])}
    return msgspec.json.encode(plain).decode()


def _short(text: str | None) -> Value | None:
    return None if text is None else clip(text, _LONGEST_NAME)


def _seconds(value: Value | None) -> float | None:
    return round(value, 6) if isinstance(value, float) else None
