"""Detokenizer: turns token ids into text, finds stop strings and writes deltas to the journal."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable

import numpy as np

from actors.boards.journal import Journal, JournalEntry
from actors.faults import FaultInjector
from actors.protocol import (
    DetokenizerProtocol,
    Emit,
    Ended,
    FlushOutputs,
    SchedulerProtocol,
    SequenceOutput,
    TextStopped,
    TokenScores,
)
from actors.protocol.requests import (
    Acceptance,
    FinishReason,
    InvalidRequest,
    RequestAborted,
    RequestFailed,
    RequestTimeout,
    TokenLogprob,
    WaitedTooLong,
)
from actors.runtime import Actor, ActorRef, MailboxFull, handles
from actors.text.incremental_text import IncrementalText
from actors.text.text_codec import TextCodec, is_request_scoped
from kernels.contract.tasks import Generate, Number, Score, Task, TaskResult, Vector, task_name

__all__ = ["Detokenizer"]

_log = logging.getLogger("troupe.detokenizer")

_FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length"}


class Detokenizer(Actor[DetokenizerProtocol]):
    """Text state by sequence. It is created from the journal when tokens of a sequence arrive, so a restart loses
    nothing, and it is dropped with the journal's entry.

    ``codec`` is None with --skip-tokenizer-init: then deltas contain token ids and no text.
    """

    def __init__(
        self,
        journal: Journal,
        codec: TextCodec | None,
        scheduler: Callable[[], ActorRef[SchedulerProtocol]],
        *,
        faults: FaultInjector | None = None,
    ) -> None:
        self._journal = journal
        self._faults = faults
        self._codec = codec
        self._scheduler = scheduler  # called on use: each refers to the other, and one must start first
        self._texts: weakref.WeakKeyDictionary[JournalEntry, IncrementalText] = weakref.WeakKeyDictionary()

    @handles
    def emit(self, message: Emit) -> None:
        surplus: list[int] = []
        for output in message.outputs:
            if self._faults is not None:
                self._faults.strike("detokenize")
            entry = self._journal.get(output.sequence)
            # Without an entry the sequence has ended (disconnect, stop string, failure): drop its tokens.
            if (entry is None or self._deliver(entry, output)) and output.ended is None:
                surplus.append(output.sequence)
        if surplus:
            # If the lane is full, their next tokens arrive here again and are dropped again.
            with contextlib.suppress(MailboxFull):
                self._scheduler().offer(TextStopped(sequences=tuple(surplus)))

    @handles
    def flush(self, message: FlushOutputs) -> None:
        """Reply when every earlier Emit has been handled."""

    def _text(self, entry: JournalEntry) -> IncrementalText | None:
        text = self._texts.get(entry)
        if text is None and self._codec is not None:
            params = entry.params
            text = IncrementalText(
                self._codec.pieces,
                stop=params.stop,
                patterns=params.stop_regex,
                include_stop=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
                shown=params.shown_special_tokens,
                at_start=False,
            )
            if entry.output:
                text.restore(entry.output, entry.emitted_chars)
            self._texts[entry] = text
        return text

    def _deliver(self, entry: JournalEntry, output: SequenceOutput) -> bool:
        """Deliver one output; returns True if a stop string ended the sequence."""
        try:
            return self._take(entry, output)
        except BaseException as error:  # one request's text must not affect others
            if not is_request_scoped(error):
                raise
            _log.exception("Request %s failed in the detokenizer", entry.stream.request_id)
            self._journal.fail(entry.sequence, RequestFailed(f"The output cannot be decoded: {type(error).__name__}."))
            return True

    def _take(self, entry: JournalEntry, output: SequenceOutput) -> bool:
        """Decode and deliver an output; returns True if a stop string ended the sequence."""
        if not isinstance(entry.spec.task, Generate):
            self._finish_task(entry, entry.spec.task, output)
            return False
        known = len(entry.output)
        if output.start > known:
            raise ValueError(f"tokens {known} to {output.start - 1} are missing")
        if not entry.prompt_sent:  # a later incarnation may find this request's own output cached
            entry.cached_tokens = max(entry.cached_tokens, output.cached_tokens)
        tokens = output.tokens[known - output.start :]
        if output.drafted and tokens:
            entry.acceptance = (entry.acceptance or Acceptance()).and_step(output.drafted, len(output.tokens) - 1)
        ended = output.ended
        scores = (
            self._scores(tokens, output.scores, skip=known - output.start)
            if output.scores and entry.params.logprobs is not None
            else None
        )
        states, experts = (output.states, output.experts) if tokens else (b"", b"")
        prompt_scores = None if entry.prompt_sent else self._prompt_scores(entry, output.prompt_scores)

        text, matched, used = self._push(entry, tokens, ended)
        if matched is not None:
            if used < len(tokens):  # a step may sample several tokens; drop those after the stop string
                tokens, scores = tokens[:used], None if scores is None else scores[:used]
            self._journal.deliver(
                entry,
                tokens=tokens,
                text=text,
                logprobs=scores,
                prompt_logprobs=prompt_scores,
                hidden_states=states,
                routed_experts=experts,
                finish_reason="stop",
                matched_stop=matched,
            )
            return True
        finish = _FINISH.get(ended.reason) if ended is not None else None
        if tokens or text or finish is not None or prompt_scores is not None:
            self._journal.deliver(
                entry,
                tokens=tokens,
                text=text,
                logprobs=scores,
                prompt_logprobs=prompt_scores,
                hidden_states=states,
                routed_experts=experts,
                finish_reason=finish,
                matched_stop=ended.matched if ended is not None else None,
            )
        if ended is not None and finish is None:
            self._journal.fail(entry.sequence, _error(ended))
        return False

    def _finish_task(self, entry: JournalEntry, task: Task, output: SequenceOutput) -> None:
        """Deliver the result of a task that generates no text. The token that its step sampled is dropped."""
        ended = output.ended
        if ended is None:
            return
        if ended.reason not in _FINISH:
            self._journal.fail(entry.sequence, _error(ended))
            return
        entry.cached_tokens = max(entry.cached_tokens, output.cached_tokens)
        self._journal.deliver(entry, tokens=(), text="", finish_reason="stop", result=_result(task, output))

    def _push(self, entry: JournalEntry, tokens: tuple[int, ...], ended: Ended | None) -> tuple[str, str | None, int]:
        """Returns new text, the stop string that ended it, and the number of tokens used."""
        writer = self._text(entry)
        if writer is None:
            return "", None, len(tokens)
        # The end token is not part of the text unless the caller requested it.
        stop_token = ended.matched if ended is not None and not entry.params.include_stop_str_in_output else None
        visible = tokens[:-1] if stop_token is not None and tokens[-1:] == (stop_token,) else tokens
        if len(visible) > 1 and (entry.params.stop or entry.params.stop_regex):
            text = ""
            for used, token in enumerate(visible, 1):
                more, matched = writer.push((token,))
                text += more
                if matched is not None:
                    return text, matched, used
        else:
            text, matched = writer.push(visible)
        if matched is None and ended is not None and ended.reason in _FINISH:
            text += writer.finish()
        return text, matched, len(tokens)

    def _scores(self, tokens: tuple[int, ...], packed: TokenScores, *, skip: int) -> tuple[TokenLogprob, ...]:
        values = np.frombuffer(packed.logprobs, dtype=np.float32)
        counts = np.frombuffer(packed.top_counts, dtype=np.int32)
        ids = np.frombuffer(packed.top_ids, dtype=np.int32)
        tops = np.frombuffer(packed.top_logprobs, dtype=np.float32)
        starts = np.concatenate(([0], np.cumsum(counts))) if len(counts) else np.zeros(len(values) + 1, dtype=np.int64)
        result = []
        for offset, token in enumerate(tokens):
            row = offset + skip
            span = slice(int(starts[row]), int(starts[row + 1]))
            top = tuple(self._logprob(int(i), float(v)) for i, v in zip(ids[span], tops[span], strict=True))
            result.append(self._logprob(token, float(values[row]), top))
        return tuple(result)

    def _prompt_scores(self, entry: JournalEntry, packed: TokenScores | None) -> tuple[TokenLogprob, ...] | None:
        prompt = entry.prompt_ids
        if entry.params.prompt_logprobs is None or (packed is None and len(prompt) > 1):
            return None
        # The first prompt token has no score; a prompt of one token has no other.
        rest = self._scores(tuple(prompt[1:]), packed, skip=0) if packed is not None else ()
        return (self._logprob(prompt[0], None), *rest)

    def _logprob(self, token: int, value: float | None, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        text = self._codec.token_text(token) if self._codec is not None else ""
        return TokenLogprob(
            token_id=token,
            token=text,
            bytes_=self._codec.token_bytes(token) if self._codec is not None else b"",
            logprob=value,
            top=top,
        )


def _result(task: Task, output: SequenceOutput) -> TaskResult:
    """The result of a task. Raises ValueError if the worker did not send it."""
    if isinstance(task, Score) and output.prompt_scores is not None:
        logprobs = np.frombuffer(output.prompt_scores.logprobs, dtype=np.float32)  # of tokens 1, 2, ...
        return Number(float(logprobs[task.start - 1 :].sum(dtype=np.float64)))
    if output.vector:
        return Vector(output.vector)
    raise ValueError(f"the worker sent no result for the task {task_name(task)}")


def _error(ended: Ended) -> Exception:
    if ended.reason == "timeout":
        return RequestTimeout(ended.message or "The request timed out. Request fewer tokens or allow more time.")
    if ended.reason == "late":
        return WaitedTooLong("The request has waited too long for its start. Send it again later.")
    if ended.reason == "abort":
        return RequestAborted(ended.message or "The request was aborted.")
    if ended.reason == "invalid":
        return InvalidRequest(ended.message, param="grammar", code="grammar_failed")
    return RequestFailed(ended.message or "The request failed inside the engine. Send it again.")
