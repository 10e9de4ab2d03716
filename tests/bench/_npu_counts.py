"""How many operators a decode launches in each layer on a simulated NPU, in graph mode.

An operator is what a graph keeps: views and events are not counted. A layer's are those from one call of attention to
the next.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kernels.contract.config import RunnerConfig
from tests.bench._npu_models import own_kernels

__all__ = ["GOALS", "KINDS", "OTHERS", "OWN_GOALS", "layer_operators"]

_DENSE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 512,
    "num_hidden_layers": 3,
    "intermediate_size": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_EXPERTS = _DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "Qwen3, bf16": (_DENSE, ""),
    "Qwen3, W8A8 dynamic": (_DENSE, "int8"),
    "Qwen3-MoE, bf16": (_EXPERTS, ""),
    "Qwen3-MoE, W8A8 dynamic": (_EXPERTS, "int8"),
}
"""The configuration of a small model, and how it is quantized."""
GOALS = {"Qwen3, bf16": 15, "Qwen3, W8A8 dynamic": 17, "Qwen3-MoE, bf16": 19, "Qwen3-MoE, W8A8 dynamic": 19}
"""By torch_npu alone."""
OWN_GOALS = {"Qwen3, bf16": 9, "Qwen3, W8A8 dynamic": 11, "Qwen3-MoE, bf16": 13, "Qwen3-MoE, W8A8 dynamic": 13}
"""With our own kernels in Triton-Ascend."""
OTHERS = {
    "Qwen3, bf16": (10, 10),
    "Qwen3, W8A8 dynamic": (14, 12),
    "Qwen3-MoE, bf16": (16, 15),
    "Qwen3-MoE, W8A8 dynamic": (18, 16),
}
"""SGLang 0.5.23's and vLLM-Ascend 0.23.0's, read from their code: both have kernels of their own in Triton-Ascend."""
_ATTENTION = "npu.npu_fused_infer_attention_score.out"


def layer_operators(kind: str, folder: Path, own: bool = False) -> list[str]:
    """The operators of a layer in the middle of a captured decode of eight rows, in order. The simulator is active.
    ``own``: whether our own kernels run, too."""
    from kernels.devices.npu_simulator.activate import active
    from kernels.execution.runner import ModelRunner

    config, quantization = KINDS[kind]
    (folder / "config.json").write_text(json.dumps(config))
    graphs = active().engine.graphs.graphs
    before = set(graphs)
    with own_kernels(own):
        runner = ModelRunner(
            RunnerConfig(
                model_path=str(folder),
                device="npu",
                page_size=128,
                graph_rows=(8,),
                load_format="dummy",
                quantization=quantization,
                max_total_tokens=2048,
                max_slots=9,
                max_step_tokens=256,
            )
        )
        runner.load()
    (captured,) = set(graphs) - before
    names = [task.operator.name for task in graphs[captured].tasks if hasattr(task, "operator")]
    first, second, *_ = (place for place, name in enumerate(names) if name == _ATTENTION)
    return [name.removesuffix(".default") for name in names[first:second]]
