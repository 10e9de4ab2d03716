"""The Detokenizer actor: token ids become text, stop strings are found, deltas go to the journal."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable

import numpy as np

from actors.faults import FaultInjector
from actors.incremental_text import IncrementalText
from actors.journal import Journal, JournalEntry
from actors.protocol import (
    DetokenizerProtocol,
    Emission,
    Emit,
    Ended,
    Fence,
    SchedulerProtocol,
    TextStopped,
    TokenScores,
)
from actors.requests import Acceptance, FinishReason, RequestAborted, RequestFailed, RequestTimeout, TokenLogprob
from actors.runtime import Actor, ActorRef, MailboxFull, handles
from actors.text_codec import TextCodec, is_request_scoped

__all__ = ["Detokenizer"]

_log = logging.getLogger("troupe.detokenizer")

_FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length"}


class Detokenizer(Actor[DetokenizerProtocol]):
    """Text state by sequence, made from the journal when a sequence's first tokens come, so a restart needs no more;
    it goes with the journal's entry.

    ``codec`` is None with --skip-tokenizer-init: deltas then carry token ids and no text.
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
        self._scheduler = scheduler  # called when it is needed: the two know each other, and one must be made first
        self._texts: weakref.WeakKeyDictionary[JournalEntry, IncrementalText] = weakref.WeakKeyDictionary()

    @handles
    def emit(self, message: Emit) -> None:
        surplus: list[int] = []
        for emission in message.emissions:
            if self._faults is not None:
                self._faults.strike("detokenize")
            entry = self._journal.get(emission.sequence)
            # No entry: ended meanwhile (hung up, stopped by a string, failed), and nobody wants these tokens.
            if (entry is None or self._deliver(entry, emission)) and emission.ended is None:
                surplus.append(emission.sequence)
        if surplus:
            # When the lane is full their next tokens come this way again, and are refused again.
            with contextlib.suppress(MailboxFull):
                self._scheduler().offer(TextStopped(sequences=tuple(surplus)))

    @handles
    def fence(self, message: Fence) -> None:
        """Every earlier Emit was handled before this message: that is all it says."""

    def _text(self, entry: JournalEntry) -> IncrementalText | None:
        text = self._texts.get(entry)
        if text is None and self._codec is not None:
            params = entry.params
            text = IncrementalText(
                self._codec.pieces,
                stop=params.stop,
                include_stop=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
                shown=params.shown_special_tokens,
                at_start=False,
            )
            if entry.output:
                text.restore(entry.output, entry.emitted_chars)
            self._texts[entry] = text
        return text

    def _deliver(self, entry: JournalEntry, emission: Emission) -> bool:
        """Deliver one sequence's news; True when that ended it here."""
        try:
            return self._take(entry, emission)
        except BaseException as error:  # one request's text must not take the others down
            if not is_request_scoped(error):
                raise
            _log.exception("Request %s failed in the detokenizer", entry.stream.request_id)
            self._journal.fail(entry.sequence, RequestFailed(f"Its text cannot be decoded: {type(error).__name__}."))
            return True

    def _take(self, entry: JournalEntry, emission: Emission) -> bool:
        """True when a stop string ended the sequence."""
        known = len(entry.output)
        if emission.start > known:
            raise ValueError(f"tokens {known} to {emission.start - 1} are missing")
        if not entry.prompt_sent:  # what a later life finds cached may be this request's own output
            entry.cached_tokens = max(entry.cached_tokens, emission.cached_tokens)
        tokens = emission.tokens[known - emission.start :]
        if emission.drafted and tokens:
            entry.acceptance = (entry.acceptance or Acceptance()).and_step(emission.drafted, len(emission.tokens) - 1)
        ended = emission.ended
        scores = self._scores(tokens, emission.scores, skip=known - emission.start) if emission.scores else None
        prompt_scores = None if entry.prompt_sent else self._prompt_scores(entry, emission.prompt_scores)

        text, matched, used = self._push(entry, tokens, ended)
        if matched is not None:
            if used < len(tokens):  # a step may bring several; those behind the stop string were never said
                tokens, scores = tokens[:used], None if scores is None else scores[:used]
            self._journal.deliver(
                entry,
                tokens=tokens,
                text=text,
                logprobs=scores,
                prompt_logprobs=prompt_scores,
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
                finish_reason=finish,
                matched_stop=ended.matched if ended is not None else None,
            )
        if ended is not None and finish is None:
            self._journal.fail(entry.sequence, _error(ended))
        return False

    def _push(self, entry: JournalEntry, tokens: tuple[int, ...], ended: Ended | None) -> tuple[str, str | None, int]:
        """New text, the stop string that ended it, and how many of the tokens it took."""
        writer = self._text(entry)
        if writer is None:
            return "", None, len(tokens)
        # The token that ended the sequence is no part of its text, unless the caller asked for it.
        stop_token = ended.matched if ended is not None and not entry.params.include_stop_str_in_output else None
        visible = tokens[:-1] if stop_token is not None and tokens[-1:] == (stop_token,) else tokens
        if len(visible) > 1 and entry.params.stop:
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
        found = []
        for offset, token in enumerate(tokens):
            row = offset + skip
            span = slice(int(starts[row]), int(starts[row + 1]))
            top = tuple(self._logprob(int(i), float(v)) for i, v in zip(ids[span], tops[span], strict=True))
            found.append(self._logprob(token, float(values[row]), top))
        return tuple(found)

    def _prompt_scores(self, entry: JournalEntry, packed: TokenScores | None) -> tuple[TokenLogprob, ...] | None:
        prompt = entry.prompt_ids
        if entry.params.prompt_logprobs is None or (packed is None and len(prompt) > 1):
            return None
        # The first prompt token has no prediction; a prompt of one token has nothing else.
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


def _error(ended: Ended) -> Exception:
    if ended.reason == "timeout":
        return RequestTimeout(ended.message or "The request's time is over. Ask for fewer tokens or allow more time.")
    if ended.reason == "abort":
        return RequestAborted(ended.message or "The request was aborted.")
    return RequestFailed(ended.message or "The request failed inside the engine. Send it again.")
