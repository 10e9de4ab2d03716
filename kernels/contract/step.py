"""The step: the messages between the scheduler and a model runner.

These structs cross a process boundary as msgpack, so rows travel as packed int32 bytes (numpy ``tobytes`` /
``frombuffer``, native little-endian), never as lists of Python integers. This module imports neither torch nor any
actor: both sides of the boundary use it.

The runner owns the device state of every running request, addressed by *slot* (``1 .. max_slots - 1``; slot 0 takes the
padding). For a slot it keeps the token ids known so far (prompt, then every sampled token), how many of them are
already *computed* (their keys and values are in the cache), the page table and the sampling state. A row of a step
therefore only says "run the next ``count`` tokens of this slot":

* a prefill chunk runs ``count`` prompt tokens; when the chunk reaches the last known token, one token is sampled;
* a decode runs 1 token, the one sampled before, and samples the next. The scheduler need not have seen it;
* a decode that may speculate also runs draft tokens of the runner after it, and produces 1 token and one more for each
  accepted draft token. Known and computed grow by as many;
* a sequence that has reached the end given in its admission need not be run: its tokens are ignored.

A slot that is given to another request gets a new *generation*. A row whose generation is not the slot's is a protocol
error and is answered in ``StepResult.failed``.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from kernels.contract.caches import PageGrants, PageRun
from kernels.contract.grammar import Grammar
from kernels.contract.tasks import Generate, Task
from telemetry.traces.worker_spans import TracedRow, WorkerSpan

__all__ = [
    "Admission",
    "ExpertCounts",
    "Rebalanced",
    "RecordedExperts",
    "RowError",
    "SlotSampling",
    "StepBatch",
    "StepResult",
    "StepTiming",
    "ThoughtBudget",
    "TokenValues",
]


RecordedExperts = Literal["", "counts", "tokens"]
"""What a step reports of its experts: nothing, the tokens that each took, or also the experts of each token."""


class ThoughtBudget(msgspec.Struct, frozen=True, array_like=True):
    """A thought of at most ``tokens`` output tokens: then the token ``end`` is sampled, unless the thought has ended.

    ``begin``: the token that begins a thought, in the output or among the prompt's last; -1: there always is a thought.
    """

    tokens: int
    begin: int
    end: int


class SlotSampling(msgspec.Struct, frozen=True, omit_defaults=True, array_like=True):
    """How one slot samples. Every value is validated before it comes here."""

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output tokens
    frequency_penalty: float = 0.0  # over output tokens
    presence_penalty: float = 0.0  # over output tokens
    seed: int = 0  # 64-bit; noise is a function of (seed, position, token id)
    min_tokens: int = 0  # stop_ids are masked while fewer output tokens exist
    stop_ids: tuple[int, ...] = ()  # end-of-sequence and stop token ids, for min_tokens only
    ban_ids: tuple[int, ...] = ()  # never sampled (ignore_eos does not ban: it only goes on)
    bias_ids: tuple[int, ...] = ()
    bias_values: tuple[float, ...] = ()
    allowed_ids: tuple[int, ...] = ()  # non-empty: nothing else is sampled
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences never completed
    thought_budget: ThoughtBudget | None = None
    logprobs: int = -1  # -1: none; 0: the sampled token's; k: and the k most likely
    prompt_logprobs: int = -1  # the same for each prompt token
    hidden_states: bool = False  # whether the final hidden states of the tokens that its rows run are returned
    routed_experts: bool = False  # whether the experts that these tokens took are returned
    max_drafts: int = -1  # draft tokens that a step verifies of this request; -1: as many as the runner does
    grammar: Grammar | None = None  # what the output must match
    reasoning_end_ids: tuple[
        int, ...
    ] = ()  # the grammar begins after these tokens (the end of reasoning); empty: at once
    reasoning_start_id: int = (
        -1
    )  # only an answer that starts with this token waits for `reasoning_end_ids`; -1: every answer
    prediction: bytes = b""  # int32: what the output is expected to repeat; NGRAM drafts from it


class Admission(msgspec.Struct, frozen=True, array_like=True):
    """A sequence takes a slot. A resumed or preempted one brings its output tokens back as part of ``tokens``."""

    slot: int
    generation: int
    tokens: bytes  # int32 [prompt_length + output_length]: the prompt, then output tokens from before a restart
    prompt_length: int  # how many of `tokens` are prompt; the rest count as output for penalties and min_tokens
    computed: int  # tokens whose keys and values already lie in `pages` (cached prefix)
    pages: bytes  # int32: the slot's first pages, in order
    sampling: SlotSampling
    salt: bytes = b""  # of the prefix cache: requests with other salts share neither pages nor n-grams
    target: int = 0  # tokens at which the sequence ends; 0: unknown
    stop_ids: tuple[int, ...] = ()  # tokens that end it after `sampling.min_tokens` output tokens
    bounded: tuple[PageRun, ...] = ()  # of each bounded cache group, the slot's first pages
    task: Task = Generate()  # Embed, Classify, NextToken: the row that ends the prompt carries a pooled vector
    adapter: int = 0  # of the model's adapters, the one that its linear layers use; 0: none


class StepBatch(msgspec.Struct, frozen=True, array_like=True):
    """One step: a pass of the model, or several with draft tokens. Releases happen first, then admissions, then page
    grants, then the rows run."""

    number: int
    slots: bytes  # int32 [rows]
    generations: bytes  # int32 [rows]
    counts: bytes  # int32 [rows], tokens to run; decode rows stand before prefill rows
    page_slots: bytes = b""  # int32 [grants]: the slot that gets ...
    page_ids: bytes = b""  # int32 [grants]: ... this page appended to its table
    admitted: tuple[Admission, ...] = ()
    released: bytes = b""  # int32: slots whose state is dropped
    traces: tuple[TracedRow, ...] = ()  # rows of sampled traces, never a decode's; spans of them come back
    # int32 [rows]: most draft tokens that a decode row verifies beside its token; empty: none at all
    draft_limits: bytes = b""
    draft_levels: int = 0  # most levels to draft; 0: the runner decides
    unobserved: bool = False  # the draft model does not run this step's tokens, so its cache will lack them
    bounded: tuple[PageGrants, ...] = ()  # of each bounded cache group, as page_slots and page_ids; empty: none
    record_experts: RecordedExperts = ""  # anything: the step runs eagerly
    # With data-parallel attention, the tokens that each part of the ranks runs in this pass, in their order.
    pass_tokens: tuple[int, ...] = ()
    # Number of preceding steps whose results the scheduler did not have yet. In a pipeline, no row needs a token that
    # one of them samples, and before this step all stages drop the rows that failed in steps before those.
    unanswered: int = 0


class StepTiming(msgspec.Struct, frozen=True, array_like=True):
    """Times of a step in seconds. ``queued``: from sending to start. ``prepare``: building inputs; ``draft``: the part
    of it for observing and drafting, which the last stage of a pipeline does within ``run``. ``run``: model and
    sampling. ``total``: from sending, or from the answer before if that was later, to the answer (in a runner alone:
    from the start, or the end of the step before). ``observe``: the part of ``total`` in which a draft observed earlier
    steps; set by a runner on the CPU for decodes without draft tokens, and for steps that waited for idle work.

    ``graph_rows``: rows that ran in a captured graph. ``stage``: in which this stage of a pipeline computed, without
    its waits for others; 0: there are no stages, or the device runs beside the host. ``divided``: whether the model ran
    it as two batches in turns.
    """

    queued: float = 0.0
    prepare: float = 0.0
    run: float = 0.0
    graph_rows: int = 0
    draft: float = 0.0
    total: float = 0.0
    observe: float = 0.0
    stage: float = 0.0
    divided: bool = False


class RowError(msgspec.Struct, frozen=True, array_like=True):
    """The failure of one row; other rows of the step are not affected. ``invalid``: the request is at fault."""

    slot: int
    generation: int
    message: str
    invalid: bool = False


class TokenValues(msgspec.Struct, frozen=True, array_like=True):
    """Numbers of all tokens that rows ran."""

    rows: bytes  # int32: indices of the rows
    counts: bytes  # int32 [rows]: the tokens that each ran
    values: bytes  # [sum(counts), ...], of 4 bytes each


class ExpertCounts(msgspec.Struct, frozen=True, array_like=True):
    """The experts that a step's tokens took."""

    counts: bytes  # int32 [layers, experts]: the tokens that each expert took; zeros in layers without experts
    routes: TokenValues | None = None  # int16 [tokens, layers, chosen] of all rows, if the step records "tokens"


class Rebalanced(msgspec.Struct, frozen=True, array_like=True):
    """Experts were placed anew. ``utilization``: of the ranks before that, the mean of their tokens divided by the
    maximum, on average over layers. ``moved``: places that got another expert. ``seconds``: that one step waited for
    this at most."""

    utilization: float
    moved: int = 0
    seconds: float = 0.0


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """The results of a step, in the order of its rows."""

    number: int
    accepted: bytes  # int32 [rows]: how many tokens each row produced (0: a chunk that is not the last)
    tokens: bytes  # int32 [sum(accepted)]
    logprobs: bytes = b""  # float32 [sum(accepted)]; empty when no row wants them
    top_counts: bytes = b""  # int32 [sum(accepted)], entries each token has in the two arrays below; empty when none
    top_ids: bytes = b""  # int32
    top_logprobs: bytes = b""  # float32
    prompt_rows: bytes = b""  # int32: indices of rows that carry prompt logprobs
    prompt_counts: bytes = b""  # int32 per such row: scored tokens (predictions of known prompt tokens 1..prompt-1)
    prompt_logprobs: bytes = b""  # float32 [sum(prompt_counts)]
    prompt_top_counts: bytes = b""  # int32 [sum(prompt_counts)]
    prompt_top_ids: bytes = b""  # int32
    prompt_top_logprobs: bytes = b""  # float32
    failed: tuple[RowError, ...] = ()
    timing: StepTiming = StepTiming()
    spans: tuple[WorkerSpan, ...] = ()  # of the step's traces
    drafted: bytes = b""  # int32 [rows]: draft tokens verified in each row; empty when none were
    # int32 [rows]: the longest path of them, and of a wrong draft token behind it that was not verified
    depths: bytes = b""
    pooled_rows: bytes = b""  # int32: indices of rows that carry a pooled vector
    pooled_sizes: bytes = b""  # int32 per such row: numbers of its vector
    pooled: bytes = b""  # float32 [sum(pooled_sizes)]
    states: TokenValues | None = None  # float32 [tokens, hidden]: final hidden states that requests return
    experts: TokenValues | None = None  # int32 [tokens, layers, chosen]: experts that requests return
    record: ExpertCounts | None = None  # of a step that records experts
    rebalanced: Rebalanced | None = None  # by this step and those before it
    adapters: tuple[int, ...] | None = None  # numbers of those on the device; None: as before
