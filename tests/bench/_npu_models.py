"""Forms of the included model that together call every NPU operator of the engine."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from kernels.contract.config import RunnerConfig
from kernels.contract.environment import NPU_TRITON

__all__ = ["models", "own_kernels"]

EXPERTS = json.dumps(
    {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    }
)
"""Makes the included model one of experts, with weights that are made up."""
_LATENT = {
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "tie_word_embeddings": False,
}
LATENT = json.dumps(_LATENT | {"architectures": ["DeepseekV3ForCausalLM"]})
"""The same with latent attention."""
WIDE = json.dumps(
    _LATENT
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": 6144,
        "q_lora_rank": 1536,
        "num_hidden_layers": 1,
        "first_k_dense_replace": 1,
        "intermediate_size": 64,
    }
)
"""The same in sizes of which one operator makes queries and latent vectors."""
SPARSE = json.dumps(
    _LATENT
    | {
        "architectures": ["DeepseekV32ForCausalLM"],
        "index_n_heads": 4,
        "index_head_dim": 128,
        "index_topk": 32,
    }
)
"""The same with sparse attention."""
SINKS = json.dumps(
    {
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "layer_types": None,
        "tie_word_embeddings": False,
        "quantization_config": None,
    }
)
"""The same with sinks."""


@contextmanager
def own_kernels(used: bool) -> Iterator[None]:
    """Within, models that are loaded use our own kernels, or do not."""
    before = os.environ.get(NPU_TRITON)
    os.environ[NPU_TRITON] = str(int(used))
    try:
        yield
    finally:
        del os.environ[NPU_TRITON]
        if before is not None:
            os.environ[NPU_TRITON] = before


def models(scratch: Path) -> dict[str, RunnerConfig]:
    """Models by name. Checkpoints are written under ``scratch``."""
    from app.understudy import MODEL_DIR

    config = RunnerConfig(
        model_path=str(MODEL_DIR),
        device="npu",
        page_size=128,
        max_slots=5,
        max_step_tokens=256,
        max_total_tokens=1024,
    )
    changed = {
        "int8": {"quantization": "int8"},
        "words": {"model_path": str(_quantized(scratch / "words"))},
        "mxfp8": {"model_path": str(_mxfp8(scratch))},
        "experts": {"config_overrides": EXPERTS, "load_format": "dummy"},
        "experts in int8": {"config_overrides": EXPERTS, "load_format": "dummy", "quantization": "int8"},
        "latent": {"config_overrides": LATENT, "load_format": "dummy"},
        "wide": {"config_overrides": WIDE, "load_format": "dummy"},
        "sparse": {"config_overrides": SPARSE, "load_format": "dummy"},
        "sinks": {"config_overrides": SINKS, "load_format": "dummy"},
        "plain": {},
    }
    return {name: msgspec.structs.replace(config, **changes) for name, changes in changed.items()}


def _quantized(target: Path) -> Path:
    """The included model with attention in static W8A8 and the rest in W4A16."""
    from app.understudy import MODEL_DIR
    from tests.kits.quantized import rewrite
    from tests.kits.quantized_words import int8_rows, packed

    rows, group = int8_rows(0.0625), packed(4, 64)
    whole = {"type": "int", "symmetric": True}
    static = {
        "targets": ["re:.*self_attn.*"],
        "format": "int-quantized",
        "weights": whole | {"num_bits": 8, "strategy": "channel"},
        "input_activations": whole | {"num_bits": 8, "strategy": "tensor", "dynamic": False},
    }
    groups = {
        "targets": ["Linear"],
        "format": "pack-quantized",
        "weights": whole | {"num_bits": 4, "strategy": "group", "group_size": 64},
    }
    settings = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": {"group_0": static, "group_1": groups},
        "ignore": ["lm_head"],
    }
    return rewrite(
        MODEL_DIR, target, lambda module, weight: (rows if "attn" in module else group)(module, weight), settings
    )


def _mxfp8(target: Path) -> Path:
    """The included model in ModelSlim's MXFP8."""
    from app.understudy import MODEL_DIR
    from tests.kits.modelslim import write

    return write(MODEL_DIR, target, lambda module: "W8A8_MXFP8")[0]
