"""Splits fused tensors of a GGUF file: ``attn_qkv`` into queries, keys and values, an ``ffn_up`` of twice the rows into
gate and up projections, and ``ffn_gate_up_exps`` into those of experts.

Blocks lie along the inputs, so a split between rows changes no number. Sizes follow from other tensors of the layer:
the inputs of ``attn_output`` are the query heads, the inputs of ``ffn_down`` are as wide as the gate; or from what the
model declares. A tensor that
does not fit stays whole; the check of names and shapes refuses it later.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from kernels.weights.gguf.header import TensorInfo

__all__ = ["JOINED", "cut"]

JOINED: Mapping[str, tuple[str, ...]] = {
    "attn_qkv": ("attn_q", "attn_k", "attn_v"),
    "ffn_up": ("ffn_gate", "ffn_up"),
    "ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps"),
}
"""Names of fused tensors, and the tensors in each, in order."""


def cut(
    tensors: Mapping[str, TensorInfo], declared: Mapping[str, tuple[int, ...]] = MappingProxyType({})
) -> dict[str, TensorInfo]:
    """The tensors of a file, with fused ones replaced by their parts.

    ``declared``: shapes by name. A fused tensor that the model declares itself stays whole.
    """
    result: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        whole = declared.get(name) == info.shape
        result |= ({} if whole else _parts(name, info, tensors, declared)) or {name: info}
    return result


def _parts(
    name: str, info: TensorInfo, tensors: Mapping[str, TensorInfo], declared: Mapping[str, tuple[int, ...]]
) -> dict[str, TensorInfo]:
    """The parts of a fused tensor. Empty: it is not fused, or does not fit."""
    path, _, kind = name.rpartition(".")
    layer, _, joined = path.rpartition(".")
    names = [f"{layer}.{part}" for part in JOINED.get(joined, ())]
    if not names or any(other != name and other in tensors for other in (f"{part}.{kind}" for part in names)):
        return {}
    weight = tensors.get(f"{path}.weight")
    sizes = None if weight is None else _sizes(joined, layer, weight, tensors)
    rows = [declared.get(f"{part}.weight", (0,))[0] for part in names]
    if weight is not None and joined == "attn_qkv" and weight.shape[:1] == (sum(rows),):
        sizes = tuple(rows)  # values may have another size than keys
    if sizes is None:
        return {}
    if kind in ("scale", "input_scale"):  # one factor for all parts, or for each expert
        return {f"{part}.{kind}": info for part in names}
    axis = len(info.shape) - (1 if kind == "bias" else 2)
    if axis < 0 or info.shape[axis] != sum(sizes):
        return {}
    parts, first = {}, 0
    for part, size in zip(names, sizes, strict=True):
        shape = (*info.shape[:axis], size, *info.shape[axis + 1 :])
        parts[f"{part}.{kind}"] = dataclasses.replace(info, shape=shape, first=first, step=sum(sizes))
        first += size
    return parts


def _sizes(joined: str, layer: str, weight: TensorInfo, tensors: Mapping[str, TensorInfo]) -> tuple[int, ...] | None:
    """The rows of each part."""
    rows = weight.shape[-2] if len(weight.shape) > 1 else 0
    if joined == "ffn_gate_up_exps":
        return (rows // 2, rows // 2) if len(weight.shape) == 3 and rows and rows % 2 == 0 else None
    beside = tensors.get(f"{layer}.{'attn_output' if joined == 'attn_qkv' else 'ffn_down'}.weight")
    if beside is None or len(beside.shape) != 2 or len(weight.shape) != 2:
        return None
    inner = beside.shape[1]
    if joined == "ffn_up":
        return (inner, inner) if rows == 2 * inner else None
    keys, odd = divmod(rows - inner, 2)
    return (inner, keys, keys) if keys > 0 and not odd else None
