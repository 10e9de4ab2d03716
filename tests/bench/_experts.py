"""The included model as a mixture of experts with the same output: trained weights for quantized experts.

Each MLP is cut into two halves of its inner numbers, and there are four copies of both. A router of random numbers has
the same row for the two halves of a copy, so that the two experts of a token are always both halves of one copy, with
weights of a half each; outputs are doubled, which is exact.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from app.understudy import MODEL_DIR

__all__ = ["write_experts"]

COPIES, HALVES = 4, 2
SEED = 20_261_122


def write_experts(target: Path) -> Path:
    """Write a Qwen3-MoE checkpoint."""
    target.mkdir(parents=True)
    for path in MODEL_DIR.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            shutil.copy(path, target / path.name)
    config = json.loads((MODEL_DIR / "config.json").read_text())
    inner = config["intermediate_size"] // HALVES
    config |= {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": COPIES * HALVES,
        "num_experts_per_tok": HALVES,
        "moe_intermediate_size": inner,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    (target / "config.json").write_text(json.dumps(config))
    generator, tensors = torch.Generator().manual_seed(SEED), dict[str, Tensor]()
    for name, tensor in load_file(MODEL_DIR / "model.safetensors").items():
        block, _, part = name.partition(".mlp.")
        if not part:
            tensors[name] = tensor
            continue
        for expert in range(COPIES * HALVES):
            half = slice(expert % HALVES * inner, (expert % HALVES + 1) * inner)
            own = tensor[:, half] * HALVES if part.startswith("down") else tensor[half]
            tensors[f"{block}.mlp.experts.{expert}.{part}"] = own.clone()
        router = torch.randn(COPIES, config["hidden_size"], generator=generator).repeat_interleave(HALVES, 0)
        tensors[f"{block}.mlp.gate.weight"] = router.to(tensor.dtype)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    return target
