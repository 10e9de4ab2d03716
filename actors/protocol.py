"""Every message between the engine's actors: the map of the system.

    Engine -> Renderer                                       (a child process: chat templates)
    Engine -> Tokenizer -> Scheduler <-> CacheManager        (in the engine's event loop)
                              |  ^
                            Worker                           (a child process per device)
                              |
                         Detokenizer -> Journal -> Engine    (back in the loop)

A message names the protocol it belongs to and the type of its reply: ``Message[Protocol, Reply]``. Sequences are known
by a server-made integer; the client's own ids never travel behind the engine.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from actors.requests import Chat
from actors.runtime import Lane, Message
from kernels.step import ModelInfo, RunnerConfig, SlotSampling, StepBatch, StepResult

__all__ = [
    "Abort",
    "CacheProtocol",
    "CacheTurn",
    "CacheTurnDone",
    "CacheUsage",
    "Commit",
    "Decode",
    "DecodeTokens",
    "DetokenizerProtocol",
    "Emission",
    "Emit",
    "Encode",
    "Encoded",
    "Ended",
    "Fence",
    "Flush",
    "FlushCache",
    "Grant",
    "Grow",
    "Lease",
    "Load",
    "LoadProgress",
    "OpenSequence",
    "PeekPrefixes",
    "Render",
    "RendererConfig",
    "RendererProtocol",
    "ResetCache",
    "SchedulerLoad",
    "SchedulerProtocol",
    "SequenceSpec",
    "Step",
    "StepDone",
    "StepFailed",
    "Submit",
    "TextStopped",
    "TokenScores",
    "TokenizerProtocol",
    "WorkerConfig",
    "WorkerEventsProtocol",
    "WorkerLoaded",
    "WorkerProtocol",
    "WorkerReady",
]


# -- Renderer ---------------------------------------------------------------------------------------------------------


class RendererProtocol:
    """Makes text of conversations, by templates that nobody needs to trust."""


class Render(Message[RendererProtocol, str], frozen=True):
    """A conversation as the text that is encoded. Raises InvalidRequest when the template refuses it."""

    chat: Chat


class RendererConfig(msgspec.Struct, frozen=True):
    """What a renderer is started with. ``template``: the model's, for conversations that bring none of their own."""

    template: str
    variables: dict[str, str]  # special tokens by the names that templates know them by
    processor_seconds: float  # of one rendering, after which the process ends
    memory: int  # bytes of the process's own data
    faults: str = ""  # a test's plan of faults; see actors.faults


# -- Tokenizer --------------------------------------------------------------------------------------------------------


class TokenizerProtocol:
    """Encodes and decodes."""


class Encoded(msgspec.Struct, frozen=True):
    """Token ids of a prompt. ``seconds``: the encoding, without the wait for it."""

    token_ids: list[int]
    seconds: float = 0.0


class Encode(Message[TokenizerProtocol, Encoded], frozen=True):
    """A text becomes token ids."""

    prompt: str
    add_special_tokens: bool = True


class Decode(Message[TokenizerProtocol, str], frozen=True):
    token_ids: list[int]
    skip_special_tokens: bool = True


class DecodeTokens(Message[TokenizerProtocol, list[str]], frozen=True):
    """Each token's own text."""

    token_ids: list[int]


# -- Scheduler --------------------------------------------------------------------------------------------------------


class SchedulerProtocol:
    """Decides what runs next."""


class SequenceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of one request, as the scheduler needs it. ``output`` is what an earlier life already sent."""

    sequence: int
    prompt: bytes  # int32 token ids
    output: bytes = b""  # int32 token ids
    sampling: SlotSampling
    max_tokens: int  # output tokens in all, at least 1
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()  # end-of-sequence (unless ignored) and stop token ids
    priority: int = 0
    arrival: float = 0.0  # clock seconds, kept over preemption and restarts
    deadline: float | None = None  # clock seconds
    salt: bytes = b""  # keeps prefixes of different tenants apart
    tenant: str = ""  # whose it is: several get equal shares of the engine


class Submit(Message[SchedulerProtocol, None], frozen=True):
    """Take these sequences (the choices of one request) into the queue. A sequence already known is left alone."""

    sequences: tuple[SequenceSpec, ...]


class Abort(Message[SchedulerProtocol, None], frozen=True):
    """Drop sequences wherever they are. Unknown ones are ignored."""

    lane: ClassVar[Lane] = Lane.CONTROL
    sequences: tuple[int, ...]


class TextStopped(Message[SchedulerProtocol, None], frozen=True):
    """The detokenizer found a stop string (or cannot go on): these sequences need no more tokens."""

    lane: ClassVar[Lane] = Lane.CONTROL
    sequences: tuple[int, ...]


class WorkerReady(Message[SchedulerProtocol, None], frozen=True):
    """A worker has loaded its model: (again) an empty cache of ``info.num_pages`` pages and empty slots.

    ``epoch`` tells the worker's lives apart; a step and its answer carry it, so that nothing of an earlier life counts.
    """

    lane: ClassVar[Lane] = Lane.CONTROL
    info: ModelInfo
    epoch: int


class StepDone(Message[SchedulerProtocol, None], frozen=True):
    """A worker's reply to a step, piped into the scheduler's own mailbox."""

    result: StepResult
    epoch: int


class StepFailed(Message[SchedulerProtocol, None], frozen=True):
    """A step got no answer: the worker died, missed the deadline or refused."""

    number: int
    epoch: int
    reason: str
    worker_died: bool


class SchedulerLoad(msgspec.Struct, frozen=True):
    running: int
    waiting: int
    waiting_tokens: int
    steps: int
    steps_in_flight: int
    preemptions: int
    last_step_age: float  # seconds since the last step finished while there is work; 0 when idle


class Flush(Message[SchedulerProtocol, bool], frozen=True):
    """Empty the prefix cache; False (and nothing done) while sequences run or wait."""

    lane: ClassVar[Lane] = Lane.CONTROL


# -- CacheManager -----------------------------------------------------------------------------------------------------


class CacheProtocol:
    """Owns the pages of the key-value cache and the radix tree over them."""


class Lease(msgspec.Struct, frozen=True):
    """The longest cached prefix, locked for a sequence. ``available``: pages free or evictable after it."""

    pages: bytes  # int32
    cached: int  # tokens, a multiple of the page size, less than the sequence's length
    available: int


class OpenSequence(Message[CacheProtocol, Lease], frozen=True):
    sequence: int
    tokens: bytes  # int32, everything known of the sequence
    salt: bytes = b""
    use_cache: bool = True  # False: take no prefix (prompt log-probabilities need every position computed)


class Grow(msgspec.Struct, frozen=True, array_like=True):
    sequence: int
    pages: int


class Grant(msgspec.Struct, frozen=True, array_like=True):
    sequence: int
    pages: bytes  # int32


class Commit(msgspec.Struct, frozen=True, array_like=True):
    """``tokens`` follow the ones the cache knows; the first ``computed`` of all are certainly in the cache's pages."""

    sequence: int
    tokens: bytes  # int32
    computed: int


class CacheTurnDone(msgspec.Struct, frozen=True):
    grants: tuple[Grant, ...]
    available: int


class CacheTurn(Message[CacheProtocol, CacheTurnDone], frozen=True):
    """All that a step changes, in this order: commits, closes (pages freed or left to the tree), grows.

    The scheduler is the only client and knows ``available``: a grow it asks for is always granted.
    """

    commits: tuple[Commit, ...] = ()
    closes: tuple[int, ...] = ()
    grows: tuple[Grow, ...] = ()


class PeekPrefixes(Message[CacheProtocol, list[int]], frozen=True):
    """Cached tokens of each of these sequences, nothing locked: for the lpm policy."""

    tokens: tuple[bytes, ...]
    salts: tuple[bytes, ...]


class ResetCache(Message[CacheProtocol, None], frozen=True):
    """Forget everything: the device's cache is new. ``num_pages`` counts page 0, which is never given out."""

    num_pages: int
    page_size: int


class FlushCache(Message[CacheProtocol, bool], frozen=True):
    """Drop every unlocked prefix; True when the tree is empty afterwards."""


class CacheUsage(msgspec.Struct, frozen=True):
    """Pages: ``free + evictable + used == total``. Tokens: counted since the start."""

    page_size: int = 0
    total: int = 0
    free: int = 0
    evictable: int = 0
    used: int = 0
    sequences: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    evicted_pages: int = 0


# -- Worker -----------------------------------------------------------------------------------------------------------


class WorkerProtocol:
    """Runs the model on one device."""


class Load(Message[WorkerProtocol, None], frozen=True):
    """Load the model, together with the other ranks of its group. A worker that is not the one meant leaves it alone.

    ``incarnation``: of the worker. ``epoch``: of the group's life. ``rendezvous``: of the ranks, as in RunnerConfig.
    """

    timed: ClassVar[bool] = False  # it has a time of its own: WorkerConfig.load_timeout
    incarnation: int
    epoch: int
    rendezvous: str = ""


class Step(Message[WorkerProtocol, StepResult], frozen=True):
    """Run one step. A worker whose life is not ``epoch`` refuses: the slots the batch speaks of died with another
    life. Every rank of a group runs it; the answer of those behind rank 0 is empty."""

    batch: StepBatch
    epoch: int


class WorkerEventsProtocol:
    """What a worker tells without being asked."""


class LoadProgress(Message[WorkerEventsProtocol, None], frozen=True):
    stage: str  # import | weights | cache | warmup
    fraction: float  # of the whole load, 0 .. 1


class WorkerLoaded(Message[WorkerEventsProtocol, None], frozen=True):
    """The model is loaded and the cache made: the worker takes steps of this epoch."""

    info: ModelInfo
    epoch: int


class LoadRefused(Message[WorkerEventsProtocol, None], frozen=True):
    """The model cannot be loaded as the arguments ask; ``reason`` says what to change.

    ``permanent``: a new start meets the same refusal. Otherwise it may find more free memory.
    """

    reason: str
    permanent: bool
    epoch: int


class WorkerConfig(msgspec.Struct, frozen=True):
    """What a worker is started with. ``load_timeout``: seconds that loading the model may take."""

    runner: RunnerConfig
    load_timeout: float = 1800.0
    faults: str = ""  # a test's plan of faults; see actors.faults


# -- Detokenizer ------------------------------------------------------------------------------------------------------


class DetokenizerProtocol:
    """Turns token ids into text, finds stop strings, and hands deltas to the journal."""


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """Why a sequence ended: stop | length | abort | error | timeout."""

    reason: str
    matched: int | None = None  # the token id that ended it
    message: str = ""


class TokenScores(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of a run of tokens: packed as in StepResult."""

    logprobs: bytes  # float32 [tokens]
    top_counts: bytes  # int32 [tokens]
    top_ids: bytes  # int32
    top_logprobs: bytes  # float32


class Emission(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """News of one sequence. ``start`` is the index of the first token in the sequence's output: it makes redelivery
    safe."""

    sequence: int
    start: int
    tokens: tuple[int, ...] = ()
    scores: TokenScores | None = None
    prompt_scores: TokenScores | None = None  # prompt tokens 1 .., once complete
    cached_tokens: int = 0
    ended: Ended | None = None
    drafted: int = 0  # guesses that were verified for these tokens; all but one of the tokens were among them


class Emit(Message[DetokenizerProtocol, None], frozen=True):
    """One message a step, never one a token."""

    redeliver: ClassVar[bool] = True
    emissions: tuple[Emission, ...]


class Fence(Message[DetokenizerProtocol, None], frozen=True):
    """Answered when every earlier Emit has reached the journal: a restarted scheduler asks it before it reads there."""
