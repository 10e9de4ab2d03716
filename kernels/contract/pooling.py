"""What a model that generates no text makes of its hidden states."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["DenseConfig", "Mode", "PoolingConfig"]

Mode = Literal["cls", "mean", "last", "end", "largest"]


class DenseConfig(msgspec.Struct, frozen=True):
    """A linear layer behind the pooling, from ``inputs`` to ``outputs`` numbers. path: the directory of its weights,
    within the model's."""

    path: str
    inputs: int
    outputs: int
    bias: bool = True
    activation: Literal["none", "tanh", "relu", "gelu", "sigmoid", "silu"] = "none"


class PoolingConfig(msgspec.Struct, frozen=True):
    """The result of a model that generates no text.

    task: embed (a vector) or classify (a number for each class, by the model's head).
    mode: which hidden states the result is made from: the first token's, the mean of all, the last token's, that of the
    first ``end_token`` (the first token's without one), or that of the token with the largest id.
    normalize: whether vectors have length 1.
    encoder: whether an input runs whole and nothing is cached, as where tokens attend to those after them.
    labels: of the classes. activation: what turns the head's numbers into probabilities.
    max_tokens: tokens of an input; 0: as many as the model has positions.
    prompts: texts that stand before an input, by name. default_prompt: the name of the one that stands before inputs
    whose request names none; empty: none does. lowercase: whether inputs are made lower-case.
    dense: linear layers that vectors pass before they are normalized. projected: numbers of a vector behind the
    encoder's own projection, which comes before these; 0: there is none.
    """

    task: Literal["embed", "classify"]
    mode: Mode
    normalize: bool = True
    encoder: bool = False
    labels: tuple[str, ...] = ()
    activation: Literal["softmax", "sigmoid", "none"] = "none"
    max_tokens: int = 0
    prompts: dict[str, str] = {}
    default_prompt: str = ""
    lowercase: bool = False
    dense: tuple[DenseConfig, ...] = ()
    end_token: int = 0
    projected: int = 0

    def vector_size(self, hidden_size: int) -> int:
        """Numbers of an embedding, of a model whose hidden states have ``hidden_size`` numbers."""
        return self.dense[-1].outputs if self.dense else self.projected or hidden_size
