"""The map of the system: which actors there are, what they send to each other, and what they share.

The way of a request::

    caller ──> Engine ──────> Renderer, Tokenizer
                 │  writes [Journal]
                 v
             Scheduler <───> CacheManager                 both write [HealthBoard] and Scheduler [RequestTimeline]
              │  ^   │
         Step │  │   └─ Emit ──> Detokenizer ──> [Journal] ──> [StreamBuffer] ──> caller
              v  │ StepDone
             Worker                                       one process a device; WorkerGroup starts and reloads them

Names in brackets are boards; all others take messages.

Messages. One module of this package for each actor holds every message that the actor takes::

    Engine ── Render ──> Renderer         a child process: chat templates run under limits
    Engine ── Encode, Decode, DecodeTokens ──> Tokenizer
    Engine ── Submit, Abort, Flush, Pause, Continue ──> Scheduler
    Engine ── CompileGrammar, LoadAdapter, UnloadAdapter ──> Worker
    Scheduler ── OpenSequence, CacheUpdate, PeekPrefixes, ResetCache, FlushCache ──> CacheManager
    Scheduler ── Step, CompileGrammar ──> Worker          a child process for each device
    Scheduler ── Emit, Fence ──> Detokenizer
    WorkerGroup ── Load ──> Worker
    Worker ── LoadProgress, WorkerLoaded, LoadRefused ──> WorkerGroup ── WorkerReady ──> Scheduler
    Detokenizer ── TextStopped ──> Scheduler

The reply of a step comes back to the scheduler's own mailbox, as StepDone or StepFailed; that of CompileGrammar as
GrammarCompiled.

A replica is one scheduler, one cache manager, one detokenizer and one group of workers. An engine may hold several
replicas; a router chooses one for each request. Tokenizers and renderers serve all replicas.

Boards. Some state is written by one side and read by the other without a message (``actors.boards``). All of it is kept
in the engine's process and outlives the actors::

    Journal          every live request: what it asked for and what was sent. Engine and Detokenizer write it;
                     Scheduler and Detokenizer read it after a restart. One a replica.
    Suspects         which sequences may have killed a worker. Scheduler writes. Part of the journal.
    StreamBuffer     a request's deltas between the journal and its reader. One a request.
    HealthBoard      loads, ages of steps, the loaded worker. Scheduler, CacheManager and WorkerGroup write; probes,
                     metrics and the watchdog read. One a replica.
    RequestTimeline  when each hop of a request began and ended (``telemetry.timeline``). Every actor writes; logs,
                     metrics and traces read it when the request closes.

Life of a request: Engine admits it (a permit), Tokenizer encodes it, the journal gets an entry for each choice,
Scheduler queues them and plans steps, Worker runs the steps, Detokenizer turns tokens into text and writes that to the
journal, which pushes deltas into the stream's buffer, from which the caller reads.

A request is a task (``kernels.contract.tasks``): generate, embed, score or classify. All take the same way. A task that
generates nothing ends with the step that ends its prompt, and its result is a vector or a number.

A message names the protocol it belongs to and the type of its reply: ``Message[Protocol, Reply]``. Sequences have
integer ids that the engine makes; the client's own ids never leave the engine.

``actors.protocol.requests`` holds the types that a caller of the engine sends and receives.

``.github/docs/architecture.md`` explains the words (slot, step, page, output, epoch, generation, ...).
"""

from actors.protocol.cache import (
    AllocatedPages,
    AllocatePages,
    CacheProtocol,
    CacheUpdate,
    CacheUpdated,
    CacheUsage,
    CommitTokens,
    FlushCache,
    GroupUsage,
    OpenSequence,
    PeekPrefixes,
    PrefixMatch,
    ResetCache,
)
from actors.protocol.detokenizer import (
    DetokenizerProtocol,
    Emit,
    Ended,
    FlushOutputs,
    SequenceOutput,
    TokenScores,
)
from actors.protocol.renderer import (
    Render,
    RendererConfig,
    RendererProtocol,
)
from actors.protocol.scheduler import (
    Abort,
    Continue,
    Flush,
    GrammarCompiled,
    HandOver,
    Pause,
    SchedulerLoad,
    SchedulerProtocol,
    SequenceSpec,
    StepDone,
    StepFailed,
    Submit,
    TextStopped,
    WorkerReady,
)
from actors.protocol.tokenizer import (
    Decode,
    DecodeTokens,
    Encode,
    Encoded,
    TokenizerProtocol,
)
from actors.protocol.worker import (
    CompileGrammar,
    Load,
    LoadAdapter,
    LoadProgress,
    LoadRefused,
    NumberedAdapter,
    Step,
    UnloadAdapter,
    WorkerConfig,
    WorkerEventsProtocol,
    WorkerLoaded,
    WorkerProtocol,
)

__all__ = [
    "Abort",
    "AllocatePages",
    "AllocatedPages",
    "CacheProtocol",
    "CacheUpdate",
    "CacheUpdated",
    "CacheUsage",
    "CommitTokens",
    "CompileGrammar",
    "Continue",
    "Decode",
    "DecodeTokens",
    "DetokenizerProtocol",
    "Emit",
    "Encode",
    "Encoded",
    "Ended",
    "Flush",
    "FlushCache",
    "FlushOutputs",
    "GrammarCompiled",
    "GroupUsage",
    "HandOver",
    "Load",
    "LoadAdapter",
    "LoadProgress",
    "LoadRefused",
    "NumberedAdapter",
    "OpenSequence",
    "Pause",
    "PeekPrefixes",
    "PrefixMatch",
    "Render",
    "RendererConfig",
    "RendererProtocol",
    "ResetCache",
    "SchedulerLoad",
    "SchedulerProtocol",
    "SequenceOutput",
    "SequenceSpec",
    "Step",
    "StepDone",
    "StepFailed",
    "Submit",
    "TextStopped",
    "TokenScores",
    "TokenizerProtocol",
    "UnloadAdapter",
    "WorkerConfig",
    "WorkerEventsProtocol",
    "WorkerLoaded",
    "WorkerProtocol",
    "WorkerReady",
]
