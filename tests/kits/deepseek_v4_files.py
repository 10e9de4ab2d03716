"""Writes DeepSeek V4's checkpoints as they are published: most weights in fp8 with a scale for each block, routed
experts in fp8 or MXFP4, and the other weights in bfloat16 or float32."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

__all__ = ["BLOCK", "SETTINGS", "fp4", "published_names", "write_published"]

BLOCK = 16
SETTINGS = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "scale_fmt": "ue8m0",
    "weight_block_size": [BLOCK, BLOCK],
}
_EXPERT = re.compile(r"(layers|mtp)\.\d+\.ffn\.experts\.\d+\.w[123]\.weight")
_FP8 = re.compile(
    r"(layers|mtp)\.\d+\.(attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)|ffn\.shared_experts\.w[123]|[eh]_proj)\.weight"
)
_WIDE = re.compile(r".*(hc_\w+|\.ape|\.attn_sink|\.gate\.bias)$")
_E2M1 = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))


def published_names(saved: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as transformers saves them, by the published names."""
    result = {}
    for name, tensor in saved.items():
        for old, new in (("model.", ""), (".attn.norm.", ".attn.kv_norm."), ("embed_tokens.", "embed.")):
            name = name.replace(old, new)
        result[name.replace("hc_head.hc_", "hc_head_")] = tensor
    return result


def write_published(
    source: Path,
    target: Path,
    experts: str = "fp4",
    config: dict[str, Any] | None = None,
    edit: Callable[[dict[str, Tensor]], None] = lambda tensors: None,
) -> tuple[Path, Path]:
    """The checkpoint ``source``, which transformers saved, in the published layout, and what it stands for in floats.
    ``experts``: fp4 or fp8. ``config``: more of config.json. ``edit`` may change the tensors."""
    saved = published_names(load_file(source / "model.safetensors"))
    stored: dict[str, Tensor] = {}
    floats: dict[str, Tensor] = {}
    for name, tensor in saved.items():
        if _EXPERT.fullmatch(name) or _FP8.fullmatch(name):
            make = fp4 if experts == "fp4" and _EXPERT.fullmatch(name) else _fp8
            stored[name], stored[name.replace(".weight", ".scale")], floats[name] = make(tensor.float())
        else:
            narrow = tensor.is_floating_point() and not _WIDE.fullmatch(name)
            stored[name] = floats[name] = tensor.bfloat16() if narrow else tensor
    edit(stored)
    paths = target / "published", target / "floats"
    given = json.loads((source / "config.json").read_text()) | (config or {})
    for path, tensors in zip(paths, (stored, floats), strict=True):
        shutil.copytree(source, path)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    (paths[0] / "config.json").write_text(json.dumps({"quantization_config": SETTINGS} | given))
    return paths


def _fp8(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``weight`` in e4m3, the scales e8m0 of its blocks, and what they stand for in float32."""
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    padded = weight.new_zeros(rows * BLOCK, columns * BLOCK)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    largest = padded.view(rows, BLOCK, columns, BLOCK).abs().amax((1, 3))
    scales = _powers(largest / 448)
    wide = scales.float().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: weight.shape[0], : weight.shape[1]]
    values = (weight / wide).to(torch.float8_e4m3fn)
    return values, scales, values.float() * wide


def fp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``weight`` as int8 of two e2m1 numbers each, the scales e8m0 of groups of 32, and what they stand for."""
    groups = weight.unflatten(1, (-1, 32))
    scales = _powers(groups.abs().amax(2) / 6)
    scaled = groups / scales.float().unsqueeze(2)
    codes = (scaled.abs().unsqueeze(-1) - _E2M1).abs().argmin(-1)
    floats = _E2M1[codes] * scaled.sign() * scales.float().unsqueeze(2)
    bits = (codes + 8 * (scaled < 0)).flatten(1).to(torch.uint8)
    return (bits[:, ::2] | bits[:, 1::2] << 4).view(torch.int8), scales, floats.flatten(1)


def _powers(least: Tensor) -> Tensor:
    """The powers of two, e8m0, that are as large."""
    return torch.exp2(torch.ceil(torch.log2(least.clamp(min=1e-9)))).to(torch.float8_e8m0fnu)
