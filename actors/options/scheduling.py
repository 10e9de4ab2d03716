"""The arguments of memory, scheduling, tokenizer batching and the run time."""

from __future__ import annotations

from typing import Annotated, Literal

from actors.options.declaration import ArgumentSpec
from actors.options.tracing import TracingArguments

__all__ = ["SchedulingArguments"]

_POLICY = "this policy is not built; use lpm or fcfs"


class SchedulingArguments(TracingArguments, frozen=True, kw_only=True):
    """The arguments of memory, scheduling, tokenizer batching and the run time."""

    mem_fraction_static: Annotated[
        float | None,
        ArgumentSpec(
            group="Memory and scheduling",
            aliases=("gpu-memory-utilization",),
            default_text="chosen by the device",
            minimum=0,
            above=True,
            maximum=1,
            metavar="FRACTION",
            help="The share of the device's memory for weights and cache together.",
        ),
    ] = None

    max_total_tokens: Annotated[
        int | None,
        ArgumentSpec(
            group="Memory and scheduling",
            default_text="the rest of --mem-fraction-static",
            minimum=16,
            maximum=1_073_741_824,
            metavar="TOKENS",
            help="Size of the key-value cache in tokens.",
        ),
    ] = None

    page_size: Annotated[
        int | None,
        ArgumentSpec(
            group="Memory and scheduling",
            aliases=("block-size",),
            default_text="16, 128 on an NPU, 64 on a GPU",
            minimum=1,
            maximum=1024,
            metavar="TOKENS",
            help="Tokens of a page of the cache; prefixes are shared in whole pages.",
        ),
    ] = None

    max_mamba_cache_size: Annotated[
        int | None,
        ArgumentSpec(
            group="Memory and scheduling",
            default_text="from memory",
            minimum=1,
            maximum=1_073_741_824,
            metavar="STATES",
            help="Most recurrent states in memory, including snapshots for shared prefixes (Mamba 2, delta nets).",
        ),
    ] = None

    mamba_full_memory_ratio: Annotated[
        float | None,
        ArgumentSpec(
            group="Memory and scheduling",
            default_text="by --max-running-requests, at most 2",
            minimum=0,
            above=True,
            maximum=1000,
            metavar="RATIO",
            help="Memory of recurrent states divided by memory of keys and values; --max-mamba-cache-size overrides "
            "it.",
        ),
    ] = None

    mamba_track_interval: Annotated[
        int | None,
        ArgumentSpec(
            group="Memory and scheduling",
            aliases=("mamba-block-size",),
            default_text="1 to 256 pages, by the size of a state",
            minimum=1,
            maximum=1_048_576,
            metavar="TOKENS",
            help="Tokens between two snapshots of a recurrent state; prefixes are shared up to a snapshot. A multiple "
            "of --page-size.",
        ),
    ] = None

    max_running_requests: Annotated[
        int,
        ArgumentSpec(
            group="Memory and scheduling",
            aliases=("max-num-seqs",),
            minimum=1,
            maximum=65536,
            metavar="N",
            help="The most sequences that run at the same time; the others wait.",
        ),
    ] = 256

    max_queued_requests: Annotated[
        int,
        ArgumentSpec(
            group="Memory and scheduling",
            minimum=0,
            maximum=1_048_576,
            metavar="N",
            help="The most sequences that wait, one for each choice of a request; the next request is refused with "
            "status 429.",
        ),
    ] = 2048

    max_queued_tokens: Annotated[
        int | None,
        ArgumentSpec(
            group="Memory and scheduling",
            default_text="unlimited",
            minimum=1,
            maximum=1_099_511_627_776,
            metavar="TOKENS",
            help="The most prompt tokens that wait; a request that would exceed it is refused with status 429. Each 20 "
            "requested log-probabilities count as a token.",
        ),
    ] = None

    prefill_max_requests: Annotated[
        int | None,
        ArgumentSpec(
            group="Memory and scheduling",
            default_text="unlimited",
            minimum=1,
            maximum=65536,
            metavar="N",
            help="The most prompts in one step.",
        ),
    ] = None

    chunked_prefill_size: Annotated[
        int | None,
        ArgumentSpec(
            group="Memory and scheduling",
            aliases=("max-num-batched-tokens",),
            default_text="512, up to 64 more where a prompt then ends, and 2048 on a GPU",
            minimum=1,
            maximum=1_048_576,
            also=(-1,),
            metavar="TOKENS",
            help="Tokens of one step: decodes first, the rest goes to chunks of prompts. Smaller values make streams "
            "steadier, larger ones increase the throughput of prompts. -1 prefills whole prompts, as far as "
            "--max-prefill-tokens.",
        ),
    ] = None

    max_prefill_tokens: Annotated[
        int,
        ArgumentSpec(
            group="Memory and scheduling",
            minimum=1,
            maximum=16_777_216,
            metavar="TOKENS",
            help="The most prompt tokens of one step, in all; a single longer prompt goes alone when it cannot be "
            "chunked.",
        ),
    ] = 16384

    schedule_policy: Annotated[
        Literal["lpm", "fcfs"],
        ArgumentSpec(
            group="Memory and scheduling",
            unbuilt_choices={"random": _POLICY, "dfs-weight": _POLICY, "lof": _POLICY, "priority": _POLICY},
            help="Order of the waiting requests: fcfs (first come, first served) or lpm (longest cached prefix first).",
        ),
    ] = "fcfs"

    enable_priority_scheduling: Annotated[
        bool,
        ArgumentSpec(
            group="Memory and scheduling",
            help="Requests with a higher priority go first and may preempt running ones; priorities rise slowly with "
            "waiting.",
        ),
    ] = False

    schedule_low_priority_values_first: Annotated[
        bool,
        ArgumentSpec(
            group="Memory and scheduling",
            help="Lower numbers are more urgent. Needs --enable-priority-scheduling.",
        ),
    ] = False

    priority_scheduling_preemption_threshold: Annotated[
        int,
        ArgumentSpec(
            group="Memory and scheduling",
            minimum=0,
            maximum=1_000_000,
            metavar="N",
            help="A waiting request preempts a running one when its priority is higher by more than this. Needs "
            "--enable-priority-scheduling.",
        ),
    ] = 10

    abort_on_priority_when_disabled: Annotated[
        bool,
        ArgumentSpec(
            group="Memory and scheduling",
            help="Refuse requests with a priority while priority scheduling is off, instead of ignoring the priority.",
        ),
    ] = False

    schedule_conservativeness: Annotated[
        float,
        ArgumentSpec(
            group="Memory and scheduling",
            minimum=0,
            maximum=100,
            metavar="FACTOR",
            help="Scales the share of the cache reserved for the growth of running sequences at admission; raise it if "
            "requests are preempted often.",
        ),
    ] = 1.0

    disable_radix_cache: Annotated[
        bool,
        ArgumentSpec(
            group="Memory and scheduling",
            opposites=("enable-prefix-caching",),
            help="Compute every prompt from its start: prefixes are neither kept nor shared.",
        ),
    ] = False

    radix_eviction_policy: Annotated[
        Literal["lru", "lfu"],
        ArgumentSpec(
            group="Memory and scheduling",
            help="The prefix that a full cache evicts first: the least recently used (lru), or the least frequently "
            "used, ties by recency (lfu).",
        ),
    ] = "lru"

    disable_overlap_schedule: Annotated[
        bool,
        ArgumentSpec(
            group="Memory and scheduling",
            aliases=("disable-async-output-proc",),
            opposites=("async-scheduling",),
            help="Plan a step only after the previous one has ended, not while it runs.",
        ),
    ] = False

    enable_dynamic_batch_tokenizer: Annotated[
        bool,
        ArgumentSpec(
            group="Tokenizer batching",
            help="Let prompts wait briefly for others, so that prompts that arrive together are encoded in one call "
            "to the tokenizer's thread.",
        ),
    ] = False

    dynamic_batch_tokenizer_batch_size: Annotated[
        int,
        ArgumentSpec(
            group="Tokenizer batching",
            minimum=1,
            maximum=4096,
            metavar="N",
            help="The most prompts in such a call. Needs --enable-dynamic-batch-tokenizer.",
        ),
    ] = 32

    dynamic_batch_tokenizer_batch_timeout: Annotated[
        float,
        ArgumentSpec(
            group="Tokenizer batching",
            minimum=0,
            maximum=10,
            metavar="SECONDS",
            help="How long the first prompt of such a call waits for others. Needs --enable-dynamic-batch-tokenizer.",
        ),
    ] = 0.002

    enable_tokenizer_batch_encode: Annotated[
        bool,
        ArgumentSpec(
            group="Tokenizer batching",
            opposites=("disable-tokenizer-batch-encode",),
            help="Encode waiting prompts of more than 1024 characters, such as those of one request, in one call to "
            "the tokenizer's thread instead of one after the other.",
        ),
    ] = True

    allow_auto_truncate: Annotated[
        bool,
        ArgumentSpec(
            group="Tokenizer batching",
            help="Truncate a prompt that is too long to the context length instead of refusing it.",
        ),
    ] = False

    cpu_threads: Annotated[
        int | None,
        ArgumentSpec(
            group="Runtime",
            default_text="one per physical core this process may use",
            minimum=1,
            maximum=1024,
            metavar="N",
            help="Threads that compute the model on the CPU.",
        ),
    ] = None

    random_seed: Annotated[
        int | None,
        ArgumentSpec(
            group="Runtime",
            aliases=("seed",),
            default_text="drawn at the start",
            minimum=0,
            maximum=2**63 - 1,
            metavar="SEED",
            help="Seed of requests without a seed, and of the noise of --load-format dummy.",
        ),
    ] = None
