"""The configuration of a runner, as plain data: it crosses a process boundary, so nothing here imports torch."""

from __future__ import annotations

import msgspec

from kernels.contract.adapters import AdapterSettings
from kernels.contract.expert_settings import ExchangeSettings, ExpertSettings
from kernels.contract.grammar import GrammarSettings
from kernels.contract.speculation import SpeculativeSettings

__all__ = ["CONTEXT_PARALLEL_TOKENS", "TWO_BATCH_TOKENS", "RunnerConfig"]

CONTEXT_PARALLEL_TOKENS = 64
"""Least prompt tokens of a pass that ranks divide: with fewer the exchange costs more than it saves."""

TWO_BATCH_TOKENS = 512
"""Least tokens of a step that runs as two micro-batches: with fewer smaller products cost more than overlap saves."""


class RunnerConfig(msgspec.Struct, frozen=True):
    """All a runner needs to load a model and size its cache."""

    model_path: str
    device: str = "cpu"
    dtype: str = "auto"  # auto | float32 | bfloat16 | float16
    load_format: str = "auto"  # auto | safetensors | dummy
    config_overrides: str = "{}"  # JSON object merged over config.json
    quantization: str = ""  # int8 | fp8 | unquant, or the checkpoint's method; empty: follow the checkpoint
    context_length: int = 0  # 0: the model's own
    max_slots: int = 257  # slot 0 takes padded rows
    page_size: int = 16  # tokens
    max_total_tokens: int = 0  # tokens of cache; 0: from memory
    mem_fraction_static: float = 0.0  # share of the device's memory for weights and cache; 0: the device's default
    max_states: int = 0  # states and their snapshots, in models that keep some; 0: from memory
    state_memory_ratio: float = 0.0  # memory of these, by that of keys and values; 0: by the number of slots
    snapshot_tokens: int = 0  # between two snapshots of a state; 0: by the bytes of a state
    max_step_tokens: int = 2048  # largest sum(counts) of a step
    threads: int = 0  # CPU threads; 0: the device decides
    random_seed: int = 0
    op_timeout: float = 0.0  # seconds until a hanging kernel or collective is an error; 0: the driver's default
    tp_rank: int = 0  # of the tp_size processes that run the model together
    tp_size: int = 1
    ep_size: int = 1  # parts of the experts of a layer, each on tp_size / ep_size of these
    experts: ExpertSettings | None = None  # None: experts are divided in their order, once each
    exchange: ExchangeSettings | None = None  # None: each rank runs its experts for all rows, and results are added up
    dp_size: int = 1  # parts of these ranks whose attention runs other tokens; they share the layers of experts
    whole_dense: bool = False  # dense feed-forward layers beside those of experts are whole on each of these ranks
    context_parallel: bool = False  # attention is whole on each of these ranks, which divide the tokens of prompts
    pp_rank: int = 0  # of the pp_size stages, each with some of the layers and tp_size processes
    pp_size: int = 1
    host_workers: int = 1  # processes that share the cores and the memory of this host, this one included
    # Where several ranks meet: the path of a file to create, or host:port/epoch where rank 0 listens.
    rendezvous: str = ""
    join_timeout: float = 0.0  # seconds that a rank waits for the others to come, or in a collective; 0: the defaults
    device_index: int = 0  # of the devices that the worker's process sees
    npu_simulator: str = ""  # A2 | A3 | A5, then :devices and :memory, to simulate NPUs; empty: real ones
    attention_backend: str = ""  # ascend | torch_native; empty: the device's choice
    prefill_attention_backend: str = ""  # the same for prefills alone
    decode_attention_backend: str = ""  # and for decodes
    sampling_backend: str = ""  # pytorch | ascend; empty: the device's choice
    disable_graphs: bool = False  # run every decode without a captured graph
    graph_rows: tuple[int, ...] = ()  # rows of each captured decode; empty: the device's choice
    graph_max_rows: int = 0  # of the device's choice; 0: by the device's memory
    disable_graph_padding: bool = False  # use a graph only for exactly its number of rows
    graph_tokens: tuple[int, ...] = ()  # tokens of each captured step with prompts; empty: the device's choice
    graph_max_tokens: int = 0  # of these; 0: the device's choice
    all_prompt_graphs: bool = False  # capture all of them, even where launching does not dominate
    disable_prompt_graphs: bool = False  # run every step with prompts without a captured graph
    speculation: SpeculativeSettings | None = None  # None: off
    kv_cache_dtype: str = ""  # bfloat16 | int8 | fp8_e4m3 | fp8_e5m2; empty: as the checkpoint says, or the model's
    kv_cache_quant_method: str = ""  # none | per_token_head; empty: by scales where there are some
    kv_cache_scales: str = ""  # a JSON file of them
    fp32_head: bool = False  # logits in float32
    window_pages: bool = False  # give back pages outside of layers' windows, where that saves half of a long sequence
    grammar: GrammarSettings | None = None  # None: requests have no grammars
    model_impl: str = "auto"  # native | transformers; auto: the native family, else transformers' modeling code
    trust_remote_code: bool = False  # code of the checkpoint may run in this process
    is_embedding: bool = False  # a model that could generate text makes vectors instead
    invariant: bool = False  # a token's results do not depend on what else a step runs
    two_batch_threshold: float | None = None  # see AttentionRows.divided; None: no step runs as two batches
    adapters: AdapterSettings | None = None  # None: no adapters, layers are made without them

    @property
    def attention_size(self) -> int:
        """Ranks that attention is divided over."""
        return self.tp_size // self.dp_size

    @property
    def attention_rank(self) -> int:
        """Of these, this one."""
        return self.tp_rank % self.attention_size
