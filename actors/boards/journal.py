"""Journal: every live request with its parameters and the output sent so far.

It is plain data in the engine's process, outside every actor. This makes actors restartable: a new scheduler takes its
queue from here, a new detokenizer its text state. A token is recorded here before its stream shows it, so output that a
client has seen is never computed again, lost or changed.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Iterator

import msgspec
import numpy as np

from actors.boards.stream_buffer import StreamBuffer
from actors.boards.suspects import Suspects
from actors.protocol import SequenceSpec
from actors.protocol.requests import Acceptance, Delta, FinishReason, SamplingParams, TokenLogprob, Usage
from kernels.contract.tasks import TaskResult
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
    worker_deaths: int = 0  # worker deaths with this sequence in a step
    preemptions: int = 0
    decoding: Hop | None = None  # the current decode
    decoded_from: int = 0  # output tokens at its last admission to the device

    def begin_decode(self, now: float) -> None:
        """Record that the sequence has its first token since its admission to the device."""
        self.decoding = self.timeline.begin("decode", now, self.index)

    def end_decode(self, now: float, output: int) -> None:
        """Record that the sequence has left the device with ``output`` tokens in all; no effect without a decode."""
        if self.decoding is not None:
            tokens = output - self.decoded_from
            self.timeline.finish(
                self.decoding, now, tokens=tokens, steps=max(tokens - 1, 0), preemptions=self.preemptions
            )
            self.decoding = None

    def resume_spec(self) -> SequenceSpec:
        """The specification with the output sent so far as known tokens."""
        waiting = self.timeline.open_hop("queue", self.index)
        has_run = waiting is None or "resumed" in waiting.attributes
        spec = msgspec.structs.replace(self.spec, start_by=None) if has_run else self.spec
        if not self.output:
            return spec
        # Prompt scores were sent with the first token and are not computed again.
        sampling = msgspec.structs.replace(spec.sampling, prompt_logprobs=-1)
        output = np.asarray(self.output, dtype=np.int32).tobytes()
        return msgspec.structs.replace(spec, output=output, sampling=sampling)


class Journal:
    """Entries by sequence. An entry exists from admission to its end, which is reported exactly once.

    ``suspects``: sequences that may have killed the worker. ``quarantined``: those of them that must end with an error.
    ``arriving``: suspects that come from another replica and that the scheduler has not queued yet. ``paused``: whether
    generation is paused.
    """

    def __init__(self) -> None:
        self.suspects = Suspects()
        self.arriving = Suspects()
        self.quarantined: set[int] = set()
        self.paused = False
        self._entries: dict[int, JournalEntry] = {}
        self._tokens = 0

    def __len__(self) -> int:
        """Live sequences."""
        return len(self._entries)

    @property
    def tokens(self) -> int:
        """Prompt and output tokens of the live sequences."""
        return self._tokens

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._entries

    def get(self, sequence: int) -> JournalEntry | None:
        return self._entries.get(sequence)

    def open(self, entry: JournalEntry) -> None:
        self._entries[entry.sequence] = entry
        self._tokens += len(entry.prompt_ids) + len(entry.output)

    def _close(self, sequence: int) -> JournalEntry | None:
        entry = self._entries.pop(sequence, None)
        if entry is not None:
            self._tokens -= len(entry.prompt_ids) + len(entry.output)
        return entry

    def move(self, sequences: Iterable[int], to: Journal) -> None:
        """Hand live entries to the journal of another replica, with what is known of them as suspects."""
        for sequence in sequences:
            entry = self._close(sequence)
            if entry is not None:
                # A new object: a detokenizer that has decoded it before must not go on from there if it comes back.
                to.open(msgspec.structs.replace(entry))
        for suspects in (self.suspects, self.arriving):
            to.arriving.adopt(suspects.release(to._entries))

    def arrived(self, sequences: Container[int]) -> None:
        """The scheduler has received these sequences: suspects among them run apart from others."""
        self.arriving.retain(self._entries)  # some may have ended on their way
        self.suspects.adopt(self.arriving.release(sequences))

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
        hidden_states: bytes = b"",
        routed_experts: bytes = b"",
        finish_reason: FinishReason | None = None,
        matched_stop: str | int | None = None,
        result: TaskResult | None = None,
    ) -> None:
        """Record what a sequence produced, then push it to its stream. A finish reason closes the entry."""
        if entry.sequence not in self._entries:
            return
        entry.output.extend(tokens)
        self._tokens += len(tokens)
        entry.emitted_chars += len(text)
        if entry.timeline.content is not None:
            entry.timeline.content.add(entry.index, text)
        first = not entry.prompt_sent
        entry.prompt_sent = True
        if first:
            _mark_first_output(entry)
        if finish_reason is not None:
            self._close(entry.sequence)
            _end_stages(entry)
        entry.stream.push(
            Delta(
                request_id=entry.stream.request_id,
                index=entry.index,
                text=text,
                token_ids=tokens,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                hidden_states=hidden_states,
                routed_experts=routed_experts,
                prompt_token_ids=tuple(entry.prompt_ids) if first else None,
                finish_reason=finish_reason,
                matched_stop=matched_stop,
                usage=Usage(
                    prompt_tokens=len(entry.prompt_ids),
                    completion_tokens=len(entry.output),
                    cached_tokens=entry.cached_tokens,
                    acceptance=entry.acceptance,
                ),
                result=result,
            )
        )

    def fail(self, sequence: int, error: Exception) -> None:
        """Close the entry: its stream raises ``error`` after what it already holds."""
        entry = self._close(sequence)
        if entry is not None:
            _end_stages(entry)
            entry.stream.fail(error)

    def drop(self, sequence: int) -> None:
        """Close the entry of a stream without a reader."""
        entry = self._close(sequence)
        if entry is not None:
            _end_stages(entry)

    def worker_died(self, sequences: Iterable[int]) -> None:
        """Record that a worker died with these sequences in its steps."""
        for sequence in sequences:
            entry = self._entries.get(sequence)
            if entry is not None:
                entry.worker_deaths += 1


def _mark_first_output(entry: JournalEntry) -> None:
    """Mark the first output of a sequence."""
    now = time.monotonic()
    timeline = entry.timeline
    if entry.output:
        timeline.mark("first_token", now, entry.index)
    timeline.begin("detokenize", now, entry.index)
    timeline.cached_tokens = max(timeline.cached_tokens, entry.cached_tokens)


def _end_stages(entry: JournalEntry) -> None:
    """End the stages of a sequence that still run."""
    now = time.monotonic()
    timeline, index = entry.timeline, entry.index
    entry.end_decode(now, len(entry.output))
    detokenized = timeline.open_hop("detokenize", index)
    if detokenized is not None:
        timeline.finish(detokenized, now, tokens=len(entry.output), characters=entry.emitted_chars)
    timeline.finish_all(index, now)
    timeline.output_tokens += len(entry.output)
