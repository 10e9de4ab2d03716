"""Checkpoints of ``quant_method: gptq`` (Frantar et al., arXiv 2210.17323), as AutoGPTQ and GPTQModel write them.

A projection is stored as ``qweight`` int32 [inputs * bits / 32, outputs], ``qzeros`` int32 [groups, outputs * bits /
32], ``scales`` [groups, outputs], and ``g_idx`` int32 [inputs], the group of each input; ``w = (q - z) * scale``. Files
store z - 1, except with ``checkpoint_format: gptq_v2``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kernels.contract.errors import ConfigError, LoadError
from kernels.weights.quantization.packed import (
    FLOATS,
    WholeBits,
    bits_of,
    group_of,
    grouped,
    groups_of,
    stored_words,
    unpack,
)
from kernels.weights.quantization.patterns import Patterns
from kernels.weights.quantization.scheme import Files, Scheme, StoredTensor
from kernels.weights.quantization.weights import GroupedWeight
from kernels.weights.tensors import Role, Tensors, TensorSpec

__all__ = ["Gptq"]


class Gptq(Scheme):
    """``settings``: quantization_config. Raises ConfigError."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        kept = str(settings.get("checkpoint_format", "gptq"))
        if kept not in ("gptq", "gptq_v2"):
            raise ConfigError(
                f"quantization_config: checkpoint_format {kept!r} is laid out for one kernel; use a checkpoint in gptq "
                "or gptq_v2"
            )
        self._less = 0 if kept == "gptq_v2" else 1
        self._bits, self._group = bits_of(settings, "bits"), group_of(settings, "group_size")
        self._shuffled = bool(settings.get("desc_act", False))
        self._output = bool(settings.get("lm_head", False))
        self._dynamic = _dynamic(settings.get("dynamic") or {}, settings)
        self._biases: set[str] = set()
        self.name = f"gptq {self._bits} bit, " + (
            "a scale an output" if self._group is None else f"groups of {self._group}"
        )

    def _of(self, weight: TensorSpec) -> tuple[WholeBits, int | None] | None:
        """Bits and group size of a weight; None: it is in floats."""
        if weight.role is Role.OUTPUT and not self._output:
            return None
        for matches, result in self._dynamic:
            if matches(weight.module):
                return result
        return self._bits, self._group

    def tensors(self, weight: TensorSpec) -> dict[str, StoredTensor] | None:
        result = self._of(weight)
        if result is None:
            return None
        module = weight.module
        (bits, group), (outputs, inputs) = result, weight.matrix
        groups = groups_of(module, group, inputs)
        return {
            f"{module}.qweight": stored_words(inputs * bits // 32, outputs),
            f"{module}.qzeros": stored_words(groups, outputs * bits // 32),
            f"{module}.scales": StoredTensor(FLOATS, ((groups, outputs),)),
            f"{module}.g_idx": StoredTensor(("I32",), ((inputs,),), optional=not self._shuffled),
        }

    def read(self, files: Files, weight: TensorSpec) -> GroupedWeight:
        module, shape = weight.module, weight.matrix
        result = self._of(weight)
        assert result is not None
        bits, group = result
        bias = f"{module}.bias"
        if bias in self._biases and bool(files.read(bias).any()):
            raise LoadError(f"{bias} is in the checkpoint and not in the model; check that both come from one model")
        values = unpack(files.read(f"{module}.qweight"), bits, 0).t()
        zeros = (unpack(files.read(f"{module}.qzeros"), bits, 1).t() + self._less) & ((1 << bits) - 1)
        order = None
        if files.has(f"{module}.g_idx"):
            order = order_of(f"{module}.g_idx", files.read(f"{module}.g_idx"), group or shape[1])
        if order is not None:
            values = values[:, order]
        return grouped(values, files.read(f"{module}.scales").t(), zeros, bits, order)

    def ignores(self, name: str, tensors: Tensors) -> bool:
        """Ignores biases that the model does not have: AutoGPTQ writes zeros for them."""
        weight = tensors.get(f"{name.removesuffix('.bias')}.weight")
        if not name.endswith(".bias") or weight is None or not weight.quantizable:
            return False
        self._biases.add(name)
        return True


def order_of(name: str, index: Tensor, group: int) -> Tensor | None:
    """The inputs int64, sorted by group; None: they already are. ``index`` [inputs]: the group of each input. Raises
    LoadError, which names the tensor ``name``."""
    index = index.long()
    if torch.equal(index, torch.arange(len(index)) // group):
        return None
    order = index.argsort(stable=True)
    if not torch.equal(index[order], torch.arange(len(index)) // group):
        raise LoadError(
            f"{name} does not put {group} inputs into each group, as group_size says: the checkpoint is broken, or "
            "quantization_config is of another one"
        )
    return order


def _dynamic(
    rules: object, settings: Mapping[str, Any]
) -> list[tuple[Callable[[str], bool], tuple[WholeBits, int | None] | None]]:
    """GPTQModel's rules by module: ``-:pattern`` stays in floats, ``pattern`` or ``+:pattern`` overrides the sizes.

    Raises ConfigError.
    """
    if not isinstance(rules, Mapping):
        raise ConfigError(f"quantization_config: dynamic must be an object of rules by pattern, and is {rules!r}")
    patterns = Patterns()
    result: list[tuple[Callable[[str], bool], tuple[WholeBits, int | None] | None]] = []
    for rule, sizes in rules.items():
        if not isinstance(sizes, Mapping):
            raise ConfigError(
                f"quantization_config: dynamic must give {rule!r} an object of sizes, and gives {sizes!r}"
            )
        matches = patterns.match(rule.removeprefix("-:").removeprefix("+:"), "dynamic")
        own = {**settings, **sizes}
        result.append((matches, None if rule.startswith("-:") else (bits_of(own, "bits"), group_of(own, "group_size"))))
    return result
