"""How many operators a decode launches on a simulated NPU in graph mode: in each layer, and around the layers.

An operator is what a graph keeps or a stream gets: views and events are not counted. A layer's are those from one call
of attention to the next.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from kernels.contract.config import RunnerConfig
from kernels.contract.step import SlotSampling
from tests.bench._npu_models import own_kernels

if TYPE_CHECKING:
    from kernels.contract.info import ModelInfo
    from kernels.devices.npu_simulator.recording import Graph
    from kernels.execution.runner import ModelRunner

__all__ = [
    "AROUND",
    "GOALS",
    "KINDS",
    "OTHERS",
    "OTHERS_AROUND",
    "OWN_AROUND",
    "OWN_GOALS",
    "SAMPLINGS",
    "layer_operators",
    "operators_around",
]

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
_DEEPSEEK = _DENSE | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 6144,
    "num_key_value_heads": 4,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 0,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "Qwen3, bf16": (_DENSE, ""),
    "Qwen3, W8A8 dynamic": (_DENSE, "int8"),
    "Qwen3-MoE, bf16": (_EXPERTS, ""),
    "Qwen3-MoE, W8A8 dynamic": (_EXPERTS, "int8"),
    "DeepSeek V3, bf16": (_DEEPSEEK, ""),
    "DeepSeek V3, W8A8 dynamic": (_DEEPSEEK, "int8"),
}
"""The configuration of a small model, and how it is quantized."""
_LATENT_GOALS = {"DeepSeek V3, bf16": 19, "DeepSeek V3, W8A8 dynamic": 22}
GOALS = {"Qwen3, bf16": 15, "Qwen3, W8A8 dynamic": 17, "Qwen3-MoE, bf16": 19, "Qwen3-MoE, W8A8 dynamic": 19}
GOALS |= _LATENT_GOALS
"""By torch_npu alone."""
OWN_GOALS = {"Qwen3, bf16": 9, "Qwen3, W8A8 dynamic": 11, "Qwen3-MoE, bf16": 13, "Qwen3-MoE, W8A8 dynamic": 13}
OWN_GOALS |= _LATENT_GOALS
"""With our own kernels in Triton-Ascend."""
OTHERS = {
    "Qwen3, bf16": (10, 10),
    "Qwen3, W8A8 dynamic": (14, 12),
    "Qwen3-MoE, bf16": (16, 15),
    "Qwen3-MoE, W8A8 dynamic": (18, 16),
    "DeepSeek V3, bf16": (24, 24),
    "DeepSeek V3, W8A8 dynamic": (29, 27),
}
"""SGLang 0.5.23's and vLLM-Ascend 0.23.0's, read from their code: both have kernels of their own in Triton-Ascend."""
SAMPLINGS = {
    "greedy": SlotSampling(temperature=0.0),
    "temperature": SlotSampling(temperature=0.8, seed=1),
    "temperature, top-k and top-p": SlotSampling(temperature=0.8, top_k=20, top_p=0.9, seed=1),
}
"""How the rows of a step are sampled."""
AROUND = {"greedy": (2, 17), "temperature": (2, 116), "temperature, top-k and top-p": (2, 128)}
"""Operators of a step around the layers, of Qwen3 in bf16: launched one by one, and in graphs."""
OWN_AROUND = {"greedy": (2, 17), "temperature": (2, 25), "temperature, top-k and top-p": (2, 25)}
"""With our own kernels in Triton-Ascend."""
OTHERS_AROUND = {
    "greedy": (15, 20),
    "temperature": (18, 24),
    "temperature, top-k and top-p": (22, 25),
}
"""The others' launched one by one, estimated from their code; SGLang has 8 more in its graph, vLLM-Ascend 2."""
_ATTENTION = "npu.npu_fused_infer_attention_score.out"
_VIEWS = frozenset(("expand", "permute", "select", "slice", "squeeze", "transpose", "unsqueeze", "view"))
_ROWS = 8


def layer_operators(kind: str, folder: Path, own: bool = False) -> list[str]:
    """The operators of a layer in the middle of a captured decode of eight rows, in order. The simulator is active.
    ``own``: whether our own kernels run, too."""
    _, graphs = _loaded(kind, folder, own)
    names = _names(graphs[0])
    first, second, *_ = (place for place, name in enumerate(names) if name == _ATTENTION)
    return [name.removesuffix(".default") for name in names[first:second]]


def operators_around(folder: Path, own: bool = False) -> dict[str, tuple[list[str], int]]:
    """For each of ``SAMPLINGS``: what a step of eight decodes launches one by one, and how many operators are in the
    graphs that it replays, without the layers'. The simulator is active. ``own``: as ``layer_operators``."""
    from tests.kits.driver import Driver

    (runner, info), graphs = _loaded("Qwen3, bf16", folder, own)
    driver, result = Driver(runner, info), dict[str, tuple[list[str], int]]()
    slots = range(1, _ROWS + 1)
    for name, sampling in SAMPLINGS.items():
        for slot in slots:
            driver.admit(slot, range(20, 60), sampling=sampling)
            driver.step([(slot, 40)])
        driver.step([(slot, 1) for slot in slots])
        before = [graph.replays[-1:] for graph in graphs]
        launched = _launched(lambda: driver.step([(slot, 1) for slot in slots]))
        replayed = [graph for graph, last in zip(graphs, before, strict=True) if graph.replays[-1:] != last]
        operators = sum(len(_names(graph)) for graph in replayed)
        result[name] = launched, operators - _DENSE["num_hidden_layers"] * (OWN_GOALS if own else GOALS)["Qwen3, bf16"]
        for slot in slots:
            driver.release(slot)
    return result


def _loaded(kind: str, folder: Path, own: bool) -> tuple[tuple[ModelRunner, ModelInfo], list[Graph]]:
    """A loaded model of this kind, and the graphs that it captured."""
    from kernels.devices.npu_simulator.activate import active
    from kernels.execution.runner import ModelRunner

    config, quantization = KINDS[kind]
    (folder / "config.json").write_text(json.dumps(config))
    graphs = active().engine.graphs.graphs
    before = set(graphs)
    runner_config = RunnerConfig(
        model_path=str(folder),
        device="npu",
        page_size=128,
        graph_rows=(_ROWS,),
        load_format="dummy",
        quantization=quantization,
        max_total_tokens=2048,
        max_slots=_ROWS + 1,
        max_step_tokens=256,
    )
    with own_kernels(own):
        runner = ModelRunner(runner_config)
        info = runner.load()
    return (runner, info), [graph for number, graph in graphs.items() if number not in before]


def _names(graph: Graph) -> list[str]:
    """A graph's operators, in order."""
    names = [task.operator.name for task in graph.tasks if hasattr(task, "operator")]
    return [name for name in names if not _is_view(name)]


def _is_view(name: str) -> bool:
    return name.split(".")[1] in _VIEWS


def _launched(step: Callable[[], object]) -> list[str]:
    """The operators that ``step`` launches one by one. What updates a graph is not launched."""
    from kernels.devices.npu_simulator.activate import active
    from kernels.devices.npu_simulator.dispatch import Operator

    names, call, graphs = list[str](), Operator.__call__, active().engine.graphs

    def counted(operator: Operator, *args: Any, **kwargs: Any) -> Any:
        if not graphs._updates and not _is_view(operator.name):
            names.append(operator.name)
        return call(operator, *args, **kwargs)

    with patch.object(Operator, "__call__", counted):
        step()
    return names
