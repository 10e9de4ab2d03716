"""How a model is divided over the ranks of a group (Shoeybi et al., Megatron-LM, arXiv 1909.08053, section 3).

Attention by heads, feed-forward layers and experts by their inner dimension, embedding and output by the vocabulary:
each block is a matrix split by its outputs, then one split by its inputs, and one sum over the ranks. When there are
fewer key heads than ranks, ranks that share one hold a copy of it each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from kernels.models.config import ConfigError, ExpertsConfig, ModelConfig

__all__ = ["Part", "local_config", "tensor_parts"]


@dataclass(frozen=True)
class Part:
    """Indices ``begin .. end`` of one dimension of a tensor."""

    dimension: int
    begin: int
    end: int

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The part's shape."""
        return (*whole[: self.dimension], self.end - self.begin, *whole[self.dimension + 1 :])

    def of(self, whole: Tensor) -> Tensor:
        """A view of the part."""
        return whole.narrow(self.dimension, self.begin, self.end - self.begin)

    @property
    def index(self) -> tuple[slice, ...]:
        """For what is read by slices."""
        return (*(slice(None),) * self.dimension, slice(self.begin, self.end))


def local_config(config: ModelConfig, size: int) -> ModelConfig:
    """The sizes that one of ``size`` ranks runs; the vocabulary stays whole. Raises ConfigError, naming the numbers."""
    parts = {
        "num_attention_heads": config.heads,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
    }
    if config.experts is not None:
        parts["moe_intermediate_size"] = config.experts.inner
        parts["shared_expert_intermediate_size"] = config.experts.shared
    for name, number in parts.items():
        if number % size:
            raise ConfigError(
                f"{name} {number} of {config.architecture} cannot be divided by --tensor-parallel-size {size}; "
                f"{_remedy(config)}"
            )
    if config.kv_heads % size and size % config.kv_heads:
        raise ConfigError(
            f"num_key_value_heads {config.kv_heads} of {config.architecture} and --tensor-parallel-size {size} do not "
            f"divide one another; {_remedy(config)}"
        )
    return dataclasses.replace(
        config,
        heads=config.heads // size,
        kv_heads=max(1, config.kv_heads // size),
        intermediate_size=config.intermediate_size // size,
        experts=None if config.experts is None else _local_experts(config.experts, size),
    )


def _local_experts(experts: ExpertsConfig, size: int) -> ExpertsConfig:
    return dataclasses.replace(experts, inner=experts.inner // size, shared=experts.shared // size)


def _remedy(config: ModelConfig) -> str:
    fits = [size for size in range(1, config.heads + 1) if _fits(config, size)]
    return f"this model takes {', '.join(map(str, fits))}"


def _fits(config: ModelConfig, size: int) -> bool:
    experts = () if config.experts is None else (config.experts.inner, config.experts.shared)
    numbers = (config.heads, config.intermediate_size, *experts, config.vocab_size)
    return not any(number % size for number in numbers) and not (config.kv_heads % size and size % config.kv_heads)


def tensor_parts(shapes: Mapping[str, tuple[int, ...]], config: ModelConfig, rank: int, size: int) -> dict[str, Part]:
    """What rank ``rank`` holds of each tensor of the checkpoint; one that is not named it holds whole.

    ``shapes``: of the whole tensors. ``config``: of the whole model.
    """
    if size == 1:
        return {}
    head = rank * config.kv_heads // size  # ranks that share a key head follow one another
    kv_heads = max(1, config.kv_heads // size)
    kv_rows = (head * config.head_dim, (head + kv_heads) * config.head_dim)

    def even(number: int) -> tuple[int, int]:
        return rank * number // size, (rank + 1) * number // size

    found: dict[str, Part] = {}
    for name, shape in shapes.items():
        module = _module(name.split("."))
        if module in ("k_proj", "v_proj"):
            found[name] = Part(0, *kv_rows)
        elif module in ("q_proj", "gate_proj", "up_proj", "w1", "w3", "embed_tokens", "lm_head"):
            found[name] = Part(0, *even(shape[0]))
        elif module in ("o_proj", "down_proj", "w2") and name.endswith(".weight"):
            found[name] = Part(1, *even(shape[1]))
    return found


def _module(path: Iterable[str]) -> str:
    *_, module, _ = path
    return module
