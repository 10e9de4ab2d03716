"""The step: what a scheduler tells a model runner, and what the runner answers.

These structs cross a process boundary as msgpack, so rows travel as packed int32 bytes (numpy ``tobytes`` /
``frombuffer``, native little-endian), never as lists of Python integers. This module imports neither torch nor any
actor: both sides of the boundary use it.

The runner owns the device state of every running request, addressed by *slot* (``1 .. max_slots - 1``; slot 0 takes the
padding). For a slot it keeps the token ids known so far (prompt, then every sampled token), how many of them are
already
*computed* (their keys and values are in the cache), the page table and the sampling state. A row of a step therefore
only says "run ``count`` tokens of this slot from where it stands":

* a prefill chunk runs ``count`` prompt tokens; when the chunk reaches the last known token, one token is sampled;
* a decode runs 1 token, the one sampled before, and samples the next. The scheduler need not have seen it;
* a decode that may speculate also runs guesses of the runner's own after it, and produces 1 token and one more for each
  guess in a row that is what is sampled anyway. Known and computed then grow by as many as it produces;
* of a sequence that is at its end, as its admission said, what a step produces counts for nothing: it need not be run.

A slot that is given to another request gets a new *generation*. A row whose generation is not the slot's is a protocol
error and is answered in ``StepResult.failed``.
"""

from __future__ import annotations

import msgspec

from kernels.speculative.settings import SpeculativeSettings
from telemetry.worker_spans import TracedRow, WorkerSpan

__all__ = [
    "Admission",
    "ModelInfo",
    "RowError",
    "RunnerConfig",
    "SlotSampling",
    "StepBatch",
    "StepResult",
    "StepTiming",
]


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
    logprobs: int = -1  # -1: none; 0: the sampled token's; k: and the k most likely
    prompt_logprobs: int = -1  # the same for each prompt token
    drafts: int = -1  # most guesses that a step verifies of this request; -1: as many as the runner does, 0: none


class Admission(msgspec.Struct, frozen=True, array_like=True):
    """A request takes a slot. A resumed or preempted request brings its output tokens back as part of ``tokens``."""

    slot: int
    generation: int
    tokens: bytes  # int32 [prompt_length + output_length]: the prompt, then output tokens of an earlier life
    prompt_length: int  # how many of `tokens` are prompt; the rest count as output for penalties and min_tokens
    computed: int  # tokens whose keys and values already lie in `pages` (cached prefix)
    pages: bytes  # int32: the slot's first pages, in order
    sampling: SlotSampling
    salt: bytes = b""  # of the prefix cache: what was learnt of one salt's requests is of no use to another's
    target: int = 0  # tokens at which the sequence ends; 0: it is not told
    stop_ids: tuple[int, ...] = ()  # what ends it behind `sampling.min_tokens` output tokens


class StepBatch(msgspec.Struct, frozen=True, array_like=True):
    """One forward pass. Releases happen first, then admissions, then page grants, then the rows run."""

    number: int
    slots: bytes  # int32 [rows]
    generations: bytes  # int32 [rows]
    counts: bytes  # int32 [rows], tokens to run; decode rows stand before prefill rows
    page_slots: bytes = b""  # int32 [grants]: the slot that gets ...
    page_ids: bytes = b""  # int32 [grants]: ... this page appended to its table
    admitted: tuple[Admission, ...] = ()
    released: bytes = b""  # int32: slots whose state is dropped
    traces: tuple[TracedRow, ...] = ()  # rows of sampled traces, never a decode's; spans of them come back
    drafts: bytes = b""  # int32 [rows]: most guesses that a decode row verifies beside its token; empty: none at all
    levels: int = 0  # of the deepest draft that is worth its passes; 0: as the runner likes
    unseen: bool = False  # whether nothing of it is to be kept for a draft: nothing is guessed for a while


class StepTiming(msgspec.Struct, frozen=True, array_like=True):
    """Seconds. ``queued``: from its sending to its start; ``prepare``: building inputs; ``run``: model and
    sampling; ``draft``: of ``prepare``, observing and drafting; ``whole``: from its sending, or from the answer before
    it if that was later, to its answer (a runner by itself tells from start and from the end of the step before).
    ``seen``: of ``whole``, for showing a draft what the steps before had left; told of decodes without guesses, by a
    runner whose device is the host, and of steps that waited for what one with guesses left to do.

    ``graph_rows``: rows that ran in a captured graph.
    """

    queued: float = 0.0
    prepare: float = 0.0
    run: float = 0.0
    graph_rows: int = 0
    draft: float = 0.0
    whole: float = 0.0
    seen: float = 0.0


class RowError(msgspec.Struct, frozen=True, array_like=True):
    """One row's own failure; the others of the step are not touched by it."""

    slot: int
    generation: int
    message: str


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """What a step produced, in the order of its rows."""

    number: int
    accepted: bytes  # int32 [rows]: how many tokens each row produced (0: a chunk that is not the last)
    tokens: bytes  # int32 [sum(accepted)]
    logprobs: bytes = b""  # float32 [sum(accepted)]; empty when no row asked
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
    drafted: bytes = b""  # int32 [rows]: guesses verified in each row; empty when none were
    depths: bytes = b""  # int32 [rows]: the longest path of them, and of a wrong guess behind it that was not verified


class RunnerConfig(msgspec.Struct, frozen=True):
    """All a runner needs to load a model and size its cache."""

    model_path: str
    device: str = "cpu"
    dtype: str = "auto"  # auto | float32 | bfloat16 | float16
    load_format: str = "auto"  # auto | safetensors | dummy
    config_overrides: str = "{}"  # JSON object merged over config.json
    quantization: str = ""  # int8 | fp8 | unquant, or the checkpoint's own; empty: as it says
    context_length: int = 0  # 0: the model's own
    max_slots: int = 257  # slot 0 is the dump of padded rows
    page_size: int = 16  # tokens
    max_total_tokens: int = 0  # tokens of cache; 0: from memory
    mem_fraction_static: float = 0.0  # share of the device's memory for weights and cache; 0: the platform's default
    max_step_tokens: int = 2048  # largest sum(counts) of a step
    threads: int = 0  # CPU threads; 0: the platform decides
    random_seed: int = 0
    op_timeout: float = 0.0  # seconds until a kernel or a collective that does not end is an error; 0: the driver's own
    tp_rank: int = 0  # of the tp_size processes that run the model together
    tp_size: int = 1
    rendezvous: str = ""  # of several ranks: the path of a file to make, or host:port where rank 0 listens
    device_index: int = 0  # of the devices that the worker's process sees
    npu_simulator: str = ""  # A2 | A3 | A5, then :devices and :memory, to simulate NPUs; empty: real ones
    attention_backend: str = ""  # ascend | torch_native; empty: the platform's choice
    prefill_attention_backend: str = ""  # the same for prefills alone
    decode_attention_backend: str = ""  # and for decodes
    sampling_backend: str = ""  # pytorch | ascend; empty: the platform's choice
    disable_graphs: bool = False  # run every decode without a captured graph
    graph_rows: tuple[int, ...] = ()  # rows of each captured decode; empty: the platform's choice
    graph_max_rows: int = 0  # of the platform's choice; 0: by the device's memory
    disable_graph_padding: bool = False  # use a graph only for exactly its number of rows
    graph_tokens: tuple[int, ...] = ()  # tokens of each captured step with prompts; empty: the platform's choice
    graph_max_tokens: int = 0  # of these; 0: the platform's choice
    all_prompt_graphs: bool = False  # capture them all, those also in which the device is what takes long
    disable_prompt_graphs: bool = False  # run every step with prompts without a captured graph
    speculation: SpeculativeSettings | None = None  # None: off
    kv_cache_dtype: str = ""  # bfloat16 | int8 | fp8_e4m3 | fp8_e5m2; empty: as the checkpoint says, or the model's
    kv_cache_quant_method: str = ""  # none | per_token_head; empty: by scales where there are some
    kv_cache_scales: str = ""  # a JSON file of them
    fp32_head: bool = False  # logits in float32
    invariant: bool = False  # a token's results do not depend on what else a step runs


class ModelInfo(msgspec.Struct, frozen=True):
    """What a loaded runner says of itself."""

    architecture: str
    dtype: str
    device: str
    vocab_size: int
    context_length: int  # tokens a sequence may have
    layers: int
    parameters: int
    weight_bytes: int
    num_pages: int  # usable page ids are 1 .. num_pages - 1; page 0 is the dump of padded rows
    page_size: int
    cache_bytes: int
    load_seconds: dict[str, float]  # by phase
    graph_rows: tuple[int, ...] = ()  # rows of each captured decode
    speculative_nodes: int = 1  # most tokens that a row runs to verify guesses, its own last token among them; 1: off
    speculative_depth: int = 0  # most guesses that a row accepts in a step
    speculative_levels: tuple[int, ...] = (0,)  # guesses that a row verifies of a draft of so many levels
    speculative_tokens: int = 0  # that the rows of a step are to verify together, at most; 0: as many as there are
    speculative_apart: bool = False  # a step that runs prompts is to verify no guesses
    draft_parameters: int = 0
    draft_weight_bytes: int = 0
    cache_dtype: str = ""
    cache_token_bytes: int = 0  # of one token's keys and values over all layers, their scales among them
