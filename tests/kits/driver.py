"""Drives a runner step by step, as the scheduler would."""

from __future__ import annotations

import tests.kits.simulated_npu  # noqa: F401 - with torch_npu, simulated NPUs must be set up before torch

# isort: split
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import pytest

from kernels.contract.caches import PageGrants, PageRun
from kernels.contract.info import ModelInfo
from kernels.contract.step import Admission, RecordedExperts, SlotSampling, StepBatch, StepResult
from kernels.execution.runner import ModelRunner
from kernels.execution.warmup import WarmUp

__all__ = [
    "BAMBA",
    "COMMON",
    "CONVOLUTIONS",
    "DEEPSEEK",
    "DELTA",
    "DENSE",
    "EXPERTS",
    "FALCON",
    "FAMILIES",
    "GEMMA4",
    "GPT_OSS",
    "GRANITE_HYBRID",
    "GREEDY",
    "HUNYUAN_V4",
    "HYBRID",
    "INDEXED",
    "KIMI_LINEAR",
    "LATENT",
    "LFM2_EXPERTS",
    "LFM3",
    "LLAMA3_ROPE",
    "MISTRAL_LARGE4",
    "NEMOTRON",
    "QWEN4",
    "ROUTED",
    "SHARED",
    "SPARSE",
    "VOCAB",
    "YARN_ROPE",
    "Driver",
    "ints",
    "pack",
    "short_warm_up",
]

GREEDY = SlotSampling(temperature=0.0)

VOCAB = 211
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
"""The sizes of a small decoder for any family, by transformers' names."""


def pack(values: Iterable[int]) -> bytes:
    return np.array(list(values), dtype=np.int32).tobytes()


def ints(data: bytes) -> list[int]:
    return np.frombuffer(data, dtype=np.int32).tolist()


@contextmanager
def short_warm_up() -> Iterator[None]:
    """Models on a CPU run one step when they are loaded, not six: they compile nothing. Engines in tests run all."""
    shapes = WarmUp._shapes

    def few(self: WarmUp) -> Iterator[Any]:
        return islice(shapes(self), 1 if self._device.name == "cpu" else None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WarmUp, "_shapes", few)
        yield


class Driver:
    """Hands out slots, generations and pages (in a shuffled order), and keeps every slot's tokens."""

    def __init__(self, runner: ModelRunner, info: ModelInfo, seed: int = 0) -> None:
        self.runner, self.info = runner, info
        self.free = list(range(1, info.num_pages))
        random.Random(seed).shuffle(self.free)
        self.tokens: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.pages: dict[int, list[int]] = {}
        self.borrowed: dict[int, int] = {}
        self.generation: dict[int, int] = {}
        self.number = 0
        self.record_experts: RecordedExperts = ""
        self.pass_tokens: tuple[int, ...] = ()
        self.unanswered = 0
        self.free_bounded = [list(range(1, group.num_pages)) for group in info.bounded_groups]
        self.bounded: dict[int, list[list[int]]] = {}  # pages of each bounded group, by slot
        self._granted_bounded: list[list[tuple[int, int]]] = [[] for _ in self.free_bounded]
        self._admitted: list[Admission] = []
        self._released: list[int] = []
        self._granted: list[tuple[int, int]] = []

    def admit(
        self,
        slot: int,
        prompt: Sequence[int],
        output: Sequence[int] = (),
        sampling: SlotSampling = GREEDY,
        shared: Sequence[int] = (),
        adapter: int = 0,
    ) -> None:
        """``shared``: pages that already hold the first tokens; they are computed again if there are bounded groups."""
        shared = () if self.free_bounded else shared
        self.generation[slot] = self.generation.get(slot, 0) + 1
        self.tokens[slot] = [*prompt, *output]
        self.computed[slot] = len(shared) * self.info.page_size
        self.pages[slot] = list(shared)
        self.borrowed[slot] = len(shared)
        self.bounded[slot] = [[] for _ in self.free_bounded]
        self._admitted.append(
            Admission(
                slot=slot,
                generation=self.generation[slot],
                tokens=pack(self.tokens[slot]),
                prompt_length=len(prompt),
                computed=self.computed[slot],
                pages=pack(shared),
                sampling=sampling,
                adapter=adapter,
                bounded=tuple(PageRun(0) for _ in self.free_bounded),
            )
        )

    def release(self, slot: int, keep_pages: bool = False) -> list[int]:
        """Returns the slot's pages; they are free again unless they are kept."""
        pages = self.pages.pop(slot)
        if not keep_pages:
            self.free.extend(pages[self.borrowed[slot] :])
        for free, held in zip(self.free_bounded, self.bounded.pop(slot), strict=True):
            free.extend(held)
        del self.tokens[slot], self.computed[slot]
        self._released.append(slot)
        return pages

    def step(
        self, rows: Sequence[tuple[int, int]], drafts: Mapping[int, int] | None = None, unobserved: bool = False
    ) -> StepResult:
        """Run ``(slot, count)`` rows; decode rows are put first, and pages granted as they are needed.

        ``drafts``: how many draft tokens a slot may verify. ``unobserved``: the draft does not observe the step.
        """
        rows = sorted(rows, key=lambda row: row[1] != 1)
        most = drafts or {}
        for slot, count in rows:
            needed = -(-(self.computed[slot] + count + most.get(slot, 0)) // self.info.page_size)
            while len(self.pages[slot]) < needed:
                page = self.free.pop()
                self.pages[slot].append(page)
                self._granted.append((slot, page))
            self._grant_bounded(slot, self.computed[slot] + count + most.get(slot, 0))
        self.number += 1
        result = self.runner.run(
            StepBatch(
                number=self.number,
                slots=pack(slot for slot, _ in rows),
                generations=pack(self.generation[slot] for slot, _ in rows),
                counts=pack(count for _, count in rows),
                page_slots=pack(slot for slot, _ in self._granted),
                page_ids=pack(page for _, page in self._granted),
                admitted=tuple(self._admitted),
                released=pack(self._released),
                bounded=tuple(
                    PageGrants(pack(slot for slot, _ in grants), pack(page for _, page in grants))
                    for grants in self._granted_bounded
                ),
                draft_limits=pack(most.get(slot, 0) for slot, _ in rows) if most else b"",
                unobserved=unobserved,
                record_experts=self.record_experts,
                pass_tokens=self.pass_tokens,
                unanswered=self.unanswered,
            )
        )
        self._admitted, self._released, self._granted = [], [], []
        self._granted_bounded = [[] for _ in self.free_bounded]
        tokens = iter(ints(result.tokens))
        for (slot, count), accepted in zip(rows, ints(result.accepted), strict=True):
            self.computed[slot] += accepted if most.get(slot) else count
            self.tokens[slot].extend(next(tokens) for _ in range(accepted))
        assert next(tokens, None) is None
        return result

    def _grant_bounded(self, slot: int, tokens: int) -> None:
        """Grant the slot pages of every bounded group for so many tokens, and keep all that it had."""
        for index, group in enumerate(self.info.bounded_groups):
            held, free = self.bounded[slot][index], self.free_bounded[index]
            while len(held) * group.page_tokens < tokens:
                held.append(free.pop())
                self._granted_bounded[index].append((slot, held[-1]))

    def pending(self, slot: int) -> int:
        """Tokens of the slot that have not run."""
        return len(self.tokens[slot]) - self.computed[slot]

    def generate(self, slot: int, length: int) -> list[int]:
        """Run one slot alone until it has ``length`` tokens in all."""
        while len(self.tokens[slot]) < length:
            assert not self.step([(slot, self.pending(slot))]).failed
        return self.tokens[slot]

    def generate_together(self, prompts: Sequence[list[int]], length: int) -> list[list[int]]:
        """Run each prompt alone, then decode all until each has ``length`` tokens in all."""
        for slot, prompt in enumerate(prompts, start=1):
            self.admit(slot, prompt)
            assert not self.step([(slot, len(prompt))]).failed
        while rows := [(slot, 1) for slot, tokens in self.tokens.items() if len(tokens) < length]:
            assert not self.step(rows).failed
        return [self.tokens[slot] for slot in sorted(self.tokens)]


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}

EXPERTS = {"head_dim": 16, "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 32}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "llama3.1": ("Llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True, "head_dim": 16}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN_ROPE}),
    "mistral": ("Mistral", {"sliding_window": 21, "head_dim": 16}),
    "mistral-full": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 19, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "olmo2": ("Olmo2", {"num_attention_heads": 6, "num_key_value_heads": 2, "pad_token_id": 0}),
    "phi3": ("Phi3", {"sliding_window": 9, "num_attention_heads": 6, "pad_token_id": 0}),
    "phi3-full": ("Phi3", {"sliding_window": None, "tie_word_embeddings": True, "pad_token_id": 0}),
}

WINDOWED = {"num_hidden_layers": 4, "sliding_window": 21, "head_dim": 16}
LAYERED_ROPE = {"full_attention": YARN_ROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}
EQUAL_YARN = YARN_ROPE | {"mscale": 0.8, "mscale_all_dim": 0.8}
GROWING_YARN = EQUAL_YARN | {"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.3}
NTK_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0}
PARTIAL_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.334},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.334},
}
LAYER_TYPES = [*3 * ["sliding_attention"], "full_attention"]
PADDED = {"pad_token_id": 0}

DENSE: dict[str, tuple[str, dict[str, Any]]] = {  # decoders with norms, rotations or activations of their own
    "apertus": ("Apertus", PADDED | {"dtype": "float32"}),
    "arcee": ("Arcee", PADDED | {"num_key_value_heads": 4}),
    "cohere": ("Cohere", PADDED),
    "cohere-normed": ("Cohere", PADDED | {"use_qk_norm": True, "logit_scale": 0.25}),
    "cohere2": ("Cohere2", PADDED | WINDOWED),
    "exaone4": ("Exaone4", PADDED | WINDOWED | {"sliding_window_pattern": 2}),
    "exaone4-full": ("Exaone4", PADDED | {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "gemma2": (
        "Gemma2",
        PADDED
        | WINDOWED
        | {"query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0, "attn_implementation": "eager"},  # which caps
    ),
    "gemma3": (
        "Gemma3Text",
        PADDED | WINDOWED | {"rope_parameters": LAYERED_ROPE, "query_pre_attn_scalar": 24, "layer_types": LAYER_TYPES},
    ),
    "gemma": ("Gemma", PADDED | {"head_dim": 16}),
    "glm": ("Glm", PADDED | {"head_dim": 16, "attention_bias": True}),
    "glm4": ("Glm4", PADDED | {"head_dim": 12}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 3.0,
            "tie_word_embeddings": True,
        },
    ),
    "hunyuan": ("HunYuanDenseV1", PADDED | {"head_dim": 16, "rope_parameters": NTK_ROPE}),
    "ministral": ("Ministral", WINDOWED),
    "ministral3": ("Ministral3", PADDED | {"head_dim": 16, "rope_parameters": GROWING_YARN}),
    "olmo": ("Olmo", PADDED | {"clip_qkv": 2.0}),
    "olmo3": ("Olmo3", PADDED | WINDOWED | {"rope_parameters": LAYERED_ROPE, "num_key_value_heads": 4}),
    "phi4-mini": ("Phi3", PADDED | {"head_dim": 16, "partial_rotary_factor": 0.75, "sliding_window": None}),
    "seed-oss": ("SeedOss", PADDED | {"head_dim": 16}),
    "smollm3": ("SmolLM3", PADDED | {"num_hidden_layers": 4}),
    "solar": ("Llama", {"num_hidden_layers": 6, "num_attention_heads": 8, "rms_norm_eps": 1e-5}),
    "stablelm": ("StableLm", {"partial_rotary_factor": 0.5, "use_qkv_bias": True}),
    "stablelm-parallel": (
        "StableLm",
        {"partial_rotary_factor": 0.5, "qk_layernorm": True, "use_parallel_residual": True},
    ),
    "falcon": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 80}),
    "falcon-one-norm": ("Falcon", {"bias": True, "tie_word_embeddings": False}),
    "falcon-sequential": ("Falcon", {"bias": True, "multi_query": False, "parallel_attn": False}),
    "starcoder2": ("Starcoder2", {"sliding_window": 21}),
}

LATENT_YARN = YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 0.9}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.75,
    "num_nextn_predict_layers": 0,
}

INDEXED = DEEPSEEK | {"index_n_heads": 8, "index_head_dim": 12, "index_topk": 16}
SHARED_INDEX = ["full", "shared", "full", "shared"]

MISTRAL_LARGE4 = {key: size for key, size in INDEXED.items() if key != "q_lora_rank"} | {
    "num_hidden_layers": 5,
    "no_rope_layers": [1, 0, 1, 0, 1],
    "kv_source_layers": [0, 1, 0, 1, 4],
    "indexer_types": ["full", "full", "full", "shared", "shared"],
    "index_n_heads": 16,  # with few of them all scores of a token are 0 more often, and ties differ with the length
    "rope_parameters": YARN_ROPE | {"attention_factor": 1.0},
    "final_logit_softcapping": 5.0,
}

HUNYUAN_V4 = (
    INDEXED
    | PADDED
    | {
        "num_hidden_layers": 4,
        "index_n_heads": 16,  # with few of them many scores are 0, and ties differ with the length
        "indexer_types": SHARED_INDEX,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "n_group": 1,
        "topk_group": 1,
        "hc_mult": 3,
        "learnable_sink_init": 0.7,
        "swiglu_limit": 0.05,
        "attn_implementation": "eager",  # which has sinks
    }
)

LONGCAT = DEEPSEEK | {
    "num_layers": 2,
    "ffn_hidden_size": 80,
    "expert_ffn_hidden_size": 32,
    "moe_topk": 3,
    "zero_expert_num": 3,
    "head_dim": 8,
    "routed_scaling_factor": 2.0,
}

DEEPSEEK_V4 = {
    "num_hidden_layers": 5,
    "head_dim": 16,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 20,
    "moe_intermediate_size": 32,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "num_hash_layers": 2,
    "layer_types": [
        "sliding_attention",
        *2 * ["compressed_sparse_attention", "heavily_compressed_attention"],
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 12},
    "sliding_window": 7,
    "o_groups": 2,
    "o_lora_rank": 12,
    "index_n_heads": 16,  # with few of them many scores are 0, and ties differ with the length
    "index_head_dim": 8,
    "index_topk": 6,
    "swiglu_limit": 0.5,
    "num_key_value_heads": 1,
    "attn_implementation": "eager",  # which has sinks
}

LATENT: dict[str, tuple[str, dict[str, Any]]] = {  # decoders with latent attention
    "deepseek-v2": ("DeepseekV2", DEEPSEEK | {"topk_method": "group_limited_greedy", "rope_parameters": EQUAL_YARN}),
    "deepseek-v2-lite": ("DeepseekV2", DEEPSEEK | {"q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek-v3": ("DeepseekV3", DEEPSEEK | {"rope_parameters": LATENT_YARN, "attention_bias": True}),
    "kimi-k2": ("DeepseekV3", DEEPSEEK | {"n_group": 1, "topk_group": 1, "rope_interleave": False}),
    "glm4-moe-lite": ("Glm4MoeLite", DEEPSEEK | {"tie_word_embeddings": True}),
    "longcat-flash": ("LongcatFlash", LONGCAT),
    "mistral4": (
        "Mistral4",
        DEEPSEEK | {"norm_topk_prob": True, "rope_parameters": GROWING_YARN, "n_group": 1, "topk_group": 1},
    ),
    "deepseek-v3.2": ("DeepseekV32", INDEXED | {"rope_parameters": LATENT_YARN, "norm_topk_prob": True}),
    "glm5": (
        "GlmMoeDsa",
        INDEXED | {"n_group": 1, "topk_group": 1, "num_hidden_layers": 4, "indexer_types": SHARED_INDEX},
    ),
    "mistral-large4": ("MistralLarge4Text", MISTRAL_LARGE4),
    "deepseek-v4": ("DeepseekV4", DEEPSEEK_V4),
    "hunyuan-v4": ("HYV4", HUNYUAN_V4),
    "minicpm3": ("MiniCPM3", DEEPSEEK | {"scale_emb": 3, "scale_depth": 1.4, "dim_model_base": 32, "pad_token_id": 0}),
}

SHARED = EXPERTS | {"shared_expert_intermediate_size": 96}

DBRX = {
    "d_model": 48,
    "n_heads": 4,
    "n_layers": 3,
    "max_seq_len": 256,
    "attn_config": {"clip_qkv": 2.0, "kv_n_heads": 2, "rope_theta": 500000.0},
    "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 6, "moe_top_k": 2},
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}

GPT_OSS = {
    "num_hidden_layers": 4,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "sliding_window": 21,
    "rope_parameters": YARN_ROPE | {"truncate": False},
    "attn_implementation": "eager",  # which has sinks
}

GEMMA4 = PADDED | {
    "num_hidden_layers": 6,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 21,
    "layer_types": ["sliding_attention", "full_attention"] + 2 * ["sliding_attention"] + 2 * ["full_attention"],
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
}

LLAMA4 = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "intermediate_size": 32,
    "intermediate_size_mlp": 96,
    "num_local_experts": 6,
    "attention_chunk_size": 32,
    "no_rope_layer_interval": 3,
    "floor_scale": 8,
    "attn_scale": 0.4,
}

MINIMAX_M3 = {
    "num_hidden_layers": 3,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "rotary_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    "intermediate_size": 32,
    "dense_intermediate_size": 64,
    "shared_intermediate_size": 40,
    "swiglu_limit": 2.0,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "layer_types": ["full_attention", *2 * ["minimax_m3_sparse"]],
    "index_n_heads": 2,
    "index_head_dim": 12,
    "index_block_size": 4,
    "index_topk_blocks": 5,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}

ROUTED: dict[str, tuple[str, dict[str, Any]]] = {  # MoE models with routers, gates or attention of their own
    "afmoe": (
        "Afmoe",
        PADDED
        | WINDOWED
        | {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "route_scale": 1.5}
        | {"global_attn_every_n_layers": 2, "mup_enabled": True},
    ),
    "ernie4.5-moe": (
        "Ernie4_5_Moe",
        PADDED
        | {
            "moe_num_experts": 7,
            "moe_k": 3,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 2,
        },
    ),
    "cohere2-moe": (
        "Cohere2Moe",
        PADDED
        | WINDOWED
        | {"num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 32, "num_shared_experts": 2}
        | {"first_k_dense_replace": 1, "prefix_dense_intermediate_size": 64, "sliding_window_pattern": 3},
    ),
    "cohere2-moe-sigmoid": (
        "Cohere2Moe",
        PADDED
        | WINDOWED
        | {"num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 32, "num_shared_experts": 1}
        | {"expert_selection_fn": "sigmoid", "shared_expert_combination_strategy": "sum", "rms_norm_eps": 1e-5},
    ),
    "dbrx": ("Dbrx", DBRX),
    "ernie4.5-moe-biased": (
        "Ernie4_5_Moe",
        PADDED | {"moe_num_experts": 7, "moe_k": 3, "moe_intermediate_size": 32, "use_bias": True},
    ),
    "exaone-moe": (
        "ExaoneMoe",
        PADDED
        | WINDOWED
        | {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
        | {"n_group": 4, "topk_group": 2, "sliding_window_pattern": 2},
    ),
    "gemma4": ("Gemma4Text", GEMMA4),
    "gemma4-equal": (
        "Gemma4Text",
        GEMMA4
        | {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "use_double_wide_mlp": False}
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 9.0},
    ),
    "gemma4-moe": (
        "Gemma4Text",
        GEMMA4
        | {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "use_double_wide_mlp": False}
        | {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 32},
    ),
    "glm4-moe": ("Glm4Moe", DEEPSEEK | {"num_key_value_heads": 2, "head_dim": 16, "use_qk_norm": True}),
    "gpt-oss": ("GptOss", GPT_OSS),
    "granite-moe": (
        "GraniteMoe",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 3.0,
        },
    ),
    "hunyuan-moe": (
        "HunYuanMoEV1",
        PADDED | {"head_dim": 16, "num_experts": 6, "moe_topk": 2, "intermediate_size": 32},
    ),
    "llama4": (
        "Llama4Text",
        LLAMA4 | {"rope_parameters": LLAMA3_ROPE, "interleave_moe_layer_step": 2},
    ),
    "llama4-full": (
        "Llama4Text",
        LLAMA4 | {"attention_chunk_size": None, "use_qk_norm": False, "num_experts_per_tok": 2},
    ),
    "mimo-v2-flash": (
        "MiMoV2Flash",
        {"num_hidden_layers": 4, "head_dim": 24, "v_head_dim": 10, "num_key_value_heads": 1, "sliding_window": 21}
        | {"layer_types": ["full_attention", *2 * ["sliding_attention"], "full_attention"]}
        | {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1}
        | {"rope_parameters": PARTIAL_ROPE, "attn_implementation": "eager"},  # which has sinks
    ),
    "minimax-m2": (
        "MiniMaxM2",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 8, "intermediate_size": 32},
    ),
    "minimax-m3": ("MiniMaxM3VLText", MINIMAX_M3),
    "olmoe": ("Olmoe", PADDED | {"num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 32}),
    "olmoe-clipped": (
        "Olmoe",
        PADDED | {"num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 32, "clip_qkv": 0.9},
    ),
    "phimoe": (
        "Phimoe",
        {"num_local_experts": 6, "intermediate_size": 32, "router_jitter_noise": 0.2, "attention_bias": True}
        | {"lm_head_bias": True},
    ),
}

DELTA = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 4,
    "num_hidden_layers": 4,
}
"""Three layers of gated delta nets before one of attention."""

QWEN4 = (
    SHARED
    | DELTA
    | {"hc_count": 2, "hc_lowrank": 10, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}
    | {"indexer_n_heads": 8, "indexer_kv_heads": 1, "indexer_head_dim": 12}
    | {"indexer_budget": 16, "indexer_compress_ratio": 4}
    | {"ple_layer_ids": [1, 3], "ple_embed_dim": 24, "ple_conv_kernel_size": 3, "heads_per_ngram": 2}
    | {"ngram_vocab_size_base": 90, "make_ngram_vocab_size_divisible_by": 16, "split_ngram_parts": 5}
    | {"eos_token_id": 7}
)
"""The indexer chooses four blocks of tokens; layers 0 and 2 embed n-grams."""

CONVOLUTIONS = {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"], "pad_token_id": 0}
LFM2_EXPERTS = {
    "num_dense_layers": 1,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.5,
}
LFM3 = {
    "head_dim": 16,
    "num_hidden_layers": 5,
    "layer_types": ["conv", "conv", "full_attention", "conv", "sliding_attention"],
    "sliding_window": 21,
    "pad_token_id": 0,
}
_NEMOTRON_3 = ["moe", "linear_attention", "moe", "full_attention"]
GRANITE_HYBRID = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "shared_intermediate_size": 64,
    "num_experts_per_tok": 2,
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 3.0,
    "mamba_n_heads": 8,
    "mamba_d_state": 10,
}
BAMBA = {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 10}
FALCON = {
    "pad_token_id": 0,
    "mamba_n_heads": 8,
    "mamba_d_ssm": 48,
    "mamba_n_groups": 2,
    "mamba_d_state": 10,
    "lm_head_multiplier": 0.5,
    "embedding_multiplier": 3.0,
    "mlp_multipliers": [0.7, 0.6],
    "key_multiplier": 0.4,
    "attention_out_multiplier": 0.9,
    "attention_in_multiplier": 1.2,
    "ssm_multipliers": [0.6, 0.8, 1.3, 0.9, 1.1],
    "ssm_in_multiplier": 0.8,
    "ssm_out_multiplier": 0.5,
}
NEMOTRON = {
    "pad_token_id": 0,
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 6,
    "n_groups": 2,
    "ssm_state_size": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 40,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.75,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "moe"],
}

KIMI_LINEAR = {key: value for key, value in DEEPSEEK.items() if key != "n_routed_experts"} | {
    "num_local_experts": 8,
    "num_hidden_layers": 5,
    "q_lora_rank": None,
    "linear_head_dim": 12,
    "linear_num_heads": 2,
    "pad_token_id": 0,
}

LING3 = {key: value for key, value in DEEPSEEK.items() if key != "n_routed_experts"} | {
    "num_local_experts": 8,
    "num_hidden_layers": 4,
    "layer_group_size": 2,
    "head_dim": 12,
    "q_lora_rank": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}

MINIMAX = {
    "num_hidden_layers": 4,
    "layer_types": [*2 * ["linear_attention"], "full_attention", "linear_attention"],
    "head_dim": 16,
    "block_size": 32,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "linear_attn_alpha_factor": 1.4,
    "linear_attn_beta_factor": 0.8,
    "full_attn_alpha_factor": 1.2,
    "full_attn_beta_factor": 0.9,
    "mlp_alpha_factor": 1.6,
    "mlp_beta_factor": 0.7,
    "pad_token_id": 0,
}

HYBRID: dict[str, tuple[str, dict[str, Any]]] = {  # decoders of which some layers keep states
    "bamba": ("Bamba", BAMBA),
    "falcon-h1": ("FalconH1", FALCON),
    "falcon-h1-normed": (
        "FalconH1",
        FALCON
        | {"mamba_rms_norm": True, "projectors_bias": True, "mamba_proj_bias": True, "attention_bias": True}
        | {"time_step_limit": [0.4, 1.1]},
    ),
    "granite-4": ("GraniteMoeHybrid", GRANITE_HYBRID | {"num_local_experts": 5}),
    "granite-4-dense": (
        "GraniteMoeHybrid",
        GRANITE_HYBRID | {"num_local_experts": 0, "position_embedding_type": "rope"},
    ),
    "lfm2": ("Lfm2", CONVOLUTIONS),
    "lfm2-biased": ("Lfm2", CONVOLUTIONS | {"conv_bias": True, "block_auto_adjust_ff_dim": False}),
    "lfm2-moe": (
        "Lfm2Moe",
        CONVOLUTIONS | LFM2_EXPERTS,
    ),
    "lfm3": ("Lfm3", LFM3),
    "lfm3-plain": (
        "Lfm3",
        LFM3
        | {"use_attention_gate": False, "use_sandwich_norm": False, "attention_bias": True, "conv_bias": True}
        | {"num_hidden_layers": 3, "layer_types": ["conv", "sliding_attention", "full_attention"]},
    ),
    "nemotron-h": ("NemotronH", NEMOTRON),
    "nemotron-3": ("NemotronH", NEMOTRON | {"moe_latent_size": 20, "layers_block_type": _NEMOTRON_3}),
    "qwen3-next": ("Qwen3Next", SHARED | DELTA | {"num_hidden_layers": 5}),
    "qwen3.5": ("Qwen3_5Text", DELTA | {"tie_word_embeddings": True}),
    "qwen3.5-moe": ("Qwen3_5MoeText", SHARED | DELTA | {"layer_types": [*2 * ["linear_attention", "full_attention"]]}),
    "qwen4": ("Qwen4ExpText", QWEN4),
    "kimi-linear": ("KimiLinear", KIMI_LINEAR),
    "ling3": ("BailingHybrid", LING3),
    "ling3-softplus": (
        "BailingHybrid",
        LING3 | {"kda_safe_gate": False, "q_lora_rank": 20, "first_k_dense_replace": 2},
    ),
    "minimax-text": ("MiniMax", MINIMAX),
    "minimax-text-windows": ("MiniMax", MINIMAX | {"layer_types": None, "sliding_window": 21}),
    "olmo-hybrid": ("OlmoHybrid", {"num_hidden_layers": 4, "pad_token_id": 0, "rope_parameters": None}),
    "olmo-hybrid-rotated": (
        "OlmoHybrid",
        {"num_hidden_layers": 4, "pad_token_id": 0, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
        | {"linear_num_key_heads": 2, "linear_key_head_dim": 12, "linear_allow_neg_eigval": False},
    ),
}

SPARSE: dict[str, tuple[str, dict[str, Any]]] = {  # MoE models
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 21}),
    "qwen2-moe": ("Qwen2Moe", SHARED | {"decoder_sparse_step": 2}),
    "qwen3-moe": ("Qwen3Moe", EXPERTS),
    "qwen3-moe-one": ("Qwen3Moe", EXPERTS | {"num_experts": 1, "num_experts_per_tok": 1}),
    "qwen3-moe-some": ("Qwen3Moe", EXPERTS | {"mlp_only_layers": [0], "norm_topk_prob": True}),
    "qwen3-moe-step": ("Qwen3Moe", EXPERTS | {"decoder_sparse_step": 2, "tie_word_embeddings": True}),
}
