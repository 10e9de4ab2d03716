"""The heads that classify or reward: a number for each class, from one hidden state of each input.

scores = score(h)                                         of decoders
rewards = score.2(relu(score.0(h)))                       Qwen2.5-Math-RM (Zhang et al., arXiv 2501.07301)
rewards = reward_head(h)                                  of families that name such a head
"""

from __future__ import annotations

from collections.abc import Iterator

from kernels.core.operators import Linear
from kernels.models.config import ModelConfig
from kernels.models.layers.builder import LayerBuilder
from kernels.weights.tensors import Role, TensorSpec, linear

__all__ = ["classifier", "tensors"]


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """The head of a decoder's architecture."""
    hidden, labels = config.hidden_size, _labels(config)
    if config.reward_head:
        yield from linear(config.reward_head, (labels, hidden), role=Role.ROUTER)
    elif config.architecture.endswith("ForRewardModel"):
        yield from linear("score.0", (hidden, hidden), bias=True, role=Role.ROUTER)
        yield from linear("score.2", (labels, hidden), bias=True, role=Role.ROUTER)
    else:
        yield from linear("score", (labels, hidden), role=Role.ROUTER)


def classifier(builder: LayerBuilder, config: ModelConfig) -> Linear:
    """``[rows, hidden] -> [rows, labels]``, the head of ``tensors``."""
    if config.reward_head:
        return builder.linear(config.reward_head)
    if config.architecture.endswith("ForRewardModel"):
        inner, outer = builder.ops.elementwise.activate(builder.linear("score.0"), "relu"), builder.linear("score.2")
        return lambda x: outer(inner(x))
    return builder.linear("score")


def _labels(config: ModelConfig) -> int:
    return len(config.pooling.labels) if config.pooling is not None else 1
