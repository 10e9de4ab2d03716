"""The journal: every live request, what it asked for and what was already sent of it.

It is plain data in the engine's process, outside every actor, and that makes the actors behind it restartable: a new
scheduler takes its queue from here, a new detokenizer its text state. A token is written here before its stream shows
it, so what a client has seen is never computed again, lost or changed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import msgspec
import numpy as np

from actors.protocol import SequenceSpec
from actors.requests import Acceptance, Delta, FinishReason, SamplingParams, TokenLogprob, Usage
from actors.scheduling.suspects import Suspects
from actors.streams import StreamBuffer
from telemetry.timeline import Hop, RequestTimeline

__all__ = ["Journal", "JournalEntry"]


class JournalEntry(msgspec.Struct, eq=False, weakref=True):
    """One sequence: a choice of a request."""

    sequence: int
    index: int
    spec: SequenceSpec
    params: SamplingParams
    stream: StreamBuffer
    timeline: RequestTimeline
    prompt_ids: list[int]
    output: list[int]
    emitted_chars: int = 0
    cached_tokens: int = 0
    acceptance: Acceptance | None = None
    prompt_sent: bool = False
    worker_deaths: int = 0  # with this sequence in a step
    preemptions: int = 0
    decoding: Hop | None = None  # the decode that goes on
    decoded_from: int = 0  # output tokens when the sequence came onto the device

    def begin_decode(self, now: float) -> None:
        """The sequence has its first token of this stay on the device."""
        self.decoding = self.timeline.begin("decode", now, self.index)

    def end_decode(self, now: float, output: int) -> None:
        """The sequence has left the device with ``output`` tokens in all; nothing is changed if it had before."""
        if self.decoding is not None:
            tokens = output - self.decoded_from
            self.timeline.finish(
                self.decoding, now, tokens=tokens, steps=max(tokens - 1, 0), preemptions=self.preemptions
            )
            self.decoding = None

    def resume_spec(self) -> SequenceSpec:
        """The specification with everything sent so far as output of an earlier life."""
        if not self.output:
            return self.spec
        # The prompt's scores went out with the first token; nobody wants them computed again.
        sampling = msgspec.structs.replace(self.spec.sampling, prompt_logprobs=-1)
        output = np.asarray(self.output, dtype=np.int32).tobytes()
        return msgspec.structs.replace(self.spec, output=output, sampling=sampling)


class Journal:
    """Entries by sequence. An entry exists from admission to its end, and its end is reported exactly once.

    ``suspects``: of the deaths of the worker; ``condemned``: those of them that are to end with an error.
    """

    def __init__(self) -> None:
        self.suspects = Suspects()
        self.condemned: set[int] = set()
        self._entries: dict[int, JournalEntry] = {}

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._entries

    def get(self, sequence: int) -> JournalEntry | None:
        return self._entries.get(sequence)

    def open(self, entry: JournalEntry) -> None:
        self._entries[entry.sequence] = entry

    def live(self) -> Iterator[JournalEntry]:
        """Live entries in the order of their acceptance."""
        return iter(list(self._entries.values()))

    def deliver(
        self,
        entry: JournalEntry,
        *,
        tokens: tuple[int, ...],
        text: str,
        logprobs: tuple[TokenLogprob, ...] | None = None,
        prompt_logprobs: tuple[TokenLogprob, ...] | None = None,
        finish_reason: FinishReason | None = None,
        matched_stop: str | int | None = None,
    ) -> None:
        """Write news of a sequence down, then show it to its stream. With a finish reason the entry is closed."""
        if entry.sequence not in self._entries:
            return
        entry.output.extend(tokens)
        entry.emitted_chars += len(text)
        if entry.timeline.content is not None:
            entry.timeline.content.add(entry.index, text)
        first = not entry.prompt_sent
        entry.prompt_sent = True
        if first:
            _came(entry)
        if finish_reason is not None:
            del self._entries[entry.sequence]
            _closed(entry)
        entry.stream.push(
            Delta(
                request_id=entry.stream.request_id,
                index=entry.index,
                text=text,
                token_ids=tokens,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                prompt_token_ids=tuple(entry.prompt_ids) if first else None,
                finish_reason=finish_reason,
                matched_stop=matched_stop,
                usage=Usage(
                    prompt_tokens=len(entry.prompt_ids),
                    completion_tokens=len(entry.output),
                    cached_tokens=entry.cached_tokens,
                    acceptance=entry.acceptance,
                ),
            )
        )

    def fail(self, sequence: int, error: Exception) -> None:
        """Close the entry: its stream raises ``error`` after what it already holds."""
        entry = self._entries.pop(sequence, None)
        if entry is not None:
            _closed(entry)
            entry.stream.fail(error)

    def drop(self, sequence: int) -> None:
        """Close the entry of a stream that nobody reads any more."""
        entry = self._entries.pop(sequence, None)
        if entry is not None:
            _closed(entry)

    def worker_died(self, sequences: Iterable[int]) -> None:
        """A worker died with these sequences in the steps that it had."""
        for sequence in sequences:
            entry = self._entries.get(sequence)
            if entry is not None:
                entry.worker_deaths += 1


def _came(entry: JournalEntry) -> None:
    """The first news of a sequence."""
    now = time.monotonic()
    timeline = entry.timeline
    if entry.output:
        timeline.mark("first_token", now, entry.index)
    timeline.begin("detokenize", now, entry.index)
    timeline.cached_tokens = max(timeline.cached_tokens, entry.cached_tokens)


def _closed(entry: JournalEntry) -> None:
    """The end of a sequence: what goes on of it ends."""
    now = time.monotonic()
    timeline, index = entry.timeline, entry.index
    entry.end_decode(now, len(entry.output))
    detokenized = timeline.open_hop("detokenize", index)
    if detokenized is not None:
        timeline.finish(detokenized, now, tokens=len(entry.output), characters=entry.emitted_chars)
    timeline.finish_all(index, now)
    timeline.output_tokens += len(entry.output)
