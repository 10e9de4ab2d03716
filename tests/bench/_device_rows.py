"""The models that a GPU is measured with, and the rows of its table, beside vLLM's numbers and the goals."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["CONTEXT", "HEADER", "OFFLINE", "PAGE_SIZE", "SHAPES", "STEP_ROWS", "STEP_TOKENS", "Row", "write_model"]

PAGE_SIZE = 64
STEP_TOKENS = 16384
CONTEXT = 8192
OFFLINE = (64, 256, 512)
STEP_ROWS = (64, 256)
SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "30b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "qwen3.5-9b": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
    },
    "v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "vocab_size": 102400,
        "max_position_embeddings": 163840,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 40.0,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
        },
    },
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"],
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "attention_bias": True,
        "vocab_size": 201088,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "swiglu_limit": 7.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    },
}
MODEL_TYPES = {
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "GptOssForCausalLM": "gpt_oss",
    "LlamaForCausalLM": "llama",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
}

# vLLM 0.24.0 (the better of its medians), the goal, and the unit.
PEER: dict[tuple[str, str], tuple[float, float, str]] = {
    ("8b", "decode 128"): (4.86, 3.7, "ms"),
    ("8b", "decode 4096"): (4.99, 0.0, "ms"),
    ("0.6b", "decode 128"): (1.77, 0.9, "ms"),
    ("0.6b", "decode 4096"): (1.80, 0.0, "ms"),
    ("8b", "offline 64"): (6650, 7000, "tokens/s"),
    ("8b", "offline 256"): (9950, 10500, "tokens/s"),
    ("8b", "offline 512"): (10400, 11000, "tokens/s"),
    ("0.6b", "offline 64"): (19000, 25000, "tokens/s"),
    ("0.6b", "offline 256"): (28000, 36000, "tokens/s"),
    ("0.6b", "offline 512"): (31600, 40000, "tokens/s"),
    ("8b", "engine 64"): (6650, 7000, "tokens/s"),
    ("8b", "engine 256"): (9950, 10500, "tokens/s"),
    ("8b", "engine 512"): (10400, 11000, "tokens/s"),
    ("0.6b", "engine 64"): (19000, 25000, "tokens/s"),
    ("0.6b", "engine 256"): (28000, 36000, "tokens/s"),
    ("0.6b", "engine 512"): (31600, 40000, "tokens/s"),
    ("8b", "prefill"): (41300, 41300, "tokens/s"),
    ("0.6b", "prefill"): (334000, 0.0, "tokens/s"),
    ("8b", "online 1"): (202, 0.0, "tokens/s"),
    ("8b", "online 64"): (5190, 5190, "tokens/s"),
    ("8b", "online 64 TTFT p50"): (430, 430, "ms"),
    ("8b", "online 256"): (7000, 7000, "tokens/s"),
    ("8b", "online 256 TTFT p50"): (570, 570, "ms"),
    ("0.6b", "online 1"): (513, 0.0, "tokens/s"),
    ("0.6b", "online 64"): (14400, 16000, "tokens/s"),
    ("0.6b", "online 64 TTFT p50"): (81, 0.0, "ms"),
    ("0.6b", "online 256"): (21900, 21000, "tokens/s"),
    ("0.6b", "online 256 TTFT p50"): (117, 0.0, "ms"),
    ("8b", "start"): (72.0, 20.0, "s"),
    ("0.6b", "start"): (69.0, 0.0, "s"),
    ("30b", "decode 128"): (4.25, 3.0, "ms"),
    ("30b", "decode 4096"): (4.40, 3.2, "ms"),
    ("30b", "offline 64"): (3125, 3500, "tokens/s"),
    ("30b", "offline 256"): (8150, 8600, "tokens/s"),
    ("30b", "offline 512"): (11330, 11900, "tokens/s"),
    ("30b", "prefill"): (61840, 65000, "tokens/s"),
    ("30b", "online 1"): (224, 300, "tokens/s"),
    ("30b", "online 64"): (2797, 3000, "tokens/s"),
    ("30b", "online 256"): (6426, 6700, "tokens/s"),
    ("v2-lite", "decode 128"): (3.51, 2.5, "ms"),
    ("v2-lite", "decode 4096"): (3.63, 0.0, "ms"),
    ("v2-lite", "offline 64"): (9880, 10900, "tokens/s"),
    ("v2-lite", "offline 256"): (18580, 20000, "tokens/s"),
    ("v2-lite", "prefill"): (87150, 92000, "tokens/s"),
    ("8b fp8", "offline 64"): (8960, 9200, "tokens/s"),
    ("8b fp8", "offline 256"): (13120, 0.0, "tokens/s"),
    ("8b", "start again"): (0.0, 0.0, "s"),
    ("0.6b", "start again"): (0.0, 0.0, "s"),
}


HEADER = """
| model | point | measured | vLLM 0.24.0 | times vLLM | goal | met |
| --- | --- | --- | --- | --- | --- | --- |"""


@dataclass(frozen=True)
class Row:
    """A point of a model. ``values`` are those of each repeat, in milliseconds, seconds or tokens a second.
    ``routing``: how tokens are routed to experts, "": by their router."""

    model: str
    point: str
    values: tuple[float, ...]
    routing: str = ""

    @property
    def unit(self) -> str:
        known = PEER.get((self.model, self.point))
        takes = self.point.startswith(("decode", "step")) or self.point.endswith("p50")
        return known[2] if known else "ms" if takes else "tokens/s"

    @property
    def name(self) -> str:
        return " ".join(part for part in (self.model, self.point, self.routing) if part)

    def speed(self, other: Row) -> float:
        """The speed of this over another's, of the same point."""
        ours, others = statistics.median(self.values), statistics.median(other.values)
        return others / ours if self.unit in ("ms", "s") else ours / others

    def line(self) -> str:
        peer, goal, _ = PEER.get((self.model, self.point), (0.0, 0.0, ""))
        unit = self.unit
        median = statistics.median(self.values)
        digits = 2 if unit in ("ms", "s") else 0
        faster = (peer / median if unit in ("ms", "s") else median / peer) if peer else 0.0
        met = "" if not goal else "yes" if (median <= goal if unit in ("ms", "s") else median >= goal) else "no"
        shown = ", ".join(f"{value:.{digits}f}" for value in self.values)
        ratio = f"{faster:.2f}" if peer else ""
        point = f"{self.point} {self.routing}".strip()
        return f"| {self.model} | {point} | {shown} {unit} | {peer or ''} | {ratio} | {goal or ''} | {met} |"


def write_model(name: str, directory: Path) -> Path:
    """A directory with the shape's config.json and nothing else."""
    config = SHAPES[name]
    path = directory / name
    path.mkdir(exist_ok=True)
    kind = MODEL_TYPES[config["architectures"][0]]
    (path / "config.json").write_text(json.dumps(config | {"model_type": kind, "dtype": "bfloat16"}))
    return path
