"""A draft's directory: its config.json, what its tensors are called, and their weights.

Public drafts name the same things differently: some put ``model.`` before every name, biases and norms come and go. So
what a draft has is read from the files' headers, and what it must have is then checked as a model's is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor

from kernels.load_error import LoadError
from kernels.loading import WeightLoader, open_weights, read_tensor, stored_shapes
from kernels.models.config import ConfigError, ModelConfig, parse_config, read_json
from kernels.models.decoder import tensor_shapes
from kernels.parallel.partition import local_config, tensor_parts
from kernels.quantization.weights import Projection
from kernels.speculative.draft_scheme import draft_scheme
from kernels.speculative.drafter import DrafterContext

__all__ = ["DraftCheckpoint", "DraftWeights", "LayerWeights", "layer_shapes", "need_same_hidden_size"]

Shapes = Mapping[str, tuple[int, ...]]

_WHOLE = ("lm_head.weight",)  # small enough to be on every rank


class DraftCheckpoint:
    """What is in the directory ``path``. Raises ConfigError or LoadError.

    ``load_format`` dummy: weights are made up, and the directory need only have a config.json.
    """

    def __init__(self, path: str, load_format: str) -> None:
        self.path = path
        self.load_format = load_format
        self.raw = read_json(path)
        self._shapes: Shapes = {} if load_format == "dummy" else stored_shapes(path)

    @property
    def dummy(self) -> bool:
        """Whether there are no files of weights."""
        return self.load_format == "dummy"

    @cached_property
    def modules(self) -> frozenset[str]:
        """What tensors are stored of, without ``model.`` before it."""
        return frozenset(name.rpartition(".")[0].removeprefix("model.") for name in self._shapes)

    @property
    def tensors(self) -> Collection[str]:
        """All that is stored, by its names in the files."""
        return self._shapes.keys()

    def has(self, name: str) -> bool:
        """Whether the tensor is there, with or without ``model.`` before its name."""
        return self.stored(name) in self._shapes

    def stored(self, name: str) -> str:
        """The tensor's name in the files; of a weight that is stored quantized the name that it would have."""
        if name in self._shapes or name.rpartition(".")[0] in self._plain:
            return name
        longer = f"model.{name}"
        return longer if longer in self._shapes or name.rpartition(".")[0] in self.modules else name

    @cached_property
    def _plain(self) -> frozenset[str]:
        """Modules that have no ``model.`` before their names."""
        return frozenset(name.rpartition(".")[0] for name in self._shapes if not name.startswith("model."))

    def read(self, name: str) -> Tensor:
        """A tensor that is no weight, as it is stored. Raises LoadError when it is not there."""
        return read_tensor(self.path, self.stored(name))

    def config(self, architecture: str, layers: int, prefix: str, **more: Any) -> ModelConfig:
        """The sizes of ``layers`` layers, as config.json has them; biases and norms of heads as the layer ``prefix``
        has them, where there are weights to look at. ``more``: said over config.json.
        """
        config = parse_config({**self.raw, **more, "architectures": [architecture], "num_hidden_layers": layers}, True)
        if self.dummy:
            return config
        attention = f"{prefix}.self_attn"
        return dataclasses.replace(
            config,
            qkv_bias=self.has(f"{attention}.q_proj.bias"),
            output_bias=self.has(f"{attention}.o_proj.bias"),
            mlp_bias=self.has(f"{prefix}.mlp.gate_proj.bias"),
            qk_norm=self.has(f"{attention}.q_norm.weight"),
        )

    def setting(self, section: str, key: str, default: Any = None) -> Any:
        """A key of the object ``section`` of config.json, or else of config.json itself."""
        part = self.raw.get(section) or {}
        if not isinstance(part, dict):
            raise ConfigError(f"{self.path}: {section} must be an object, and is {part!r}")
        found = part.get(key)
        return self.raw.get(key, default) if found is None else found

    def layers(self, section: str, key: str, count: int) -> tuple[int, ...]:
        """A list of the target's layers, of which it has ``count``; empty when config.json has none. Raises
        ConfigError.
        """
        found = self.setting(section, key)
        if found is None:
            return ()
        if not isinstance(found, list) or not all(type(layer) is int and 0 <= layer < count for layer in found):
            raise ConfigError(
                f"{self.path}: {key} must be a list of the target's layers 0 to {count - 1}, and is {found!r}; is this "
                "the draft of another model?"
            )
        return tuple(found)


class DraftWeights:
    """A draft's weights, by the names that the draft's layout has, this rank's part of each.

    ``shapes``: of the whole tensors. ``config``: of the whole draft.
    """

    def __init__(
        self, context: DrafterContext, checkpoint: DraftCheckpoint, shapes: Shapes, config: ModelConfig
    ) -> None:
        self._checkpoint = checkpoint
        self._has = shapes.keys()
        size = context.group.size
        self.local = local_config(dataclasses.replace(config, vocab_size=context.whole.vocab_size), size)
        stored = {checkpoint.stored(name): shape for name, shape in shapes.items()}
        parts = tensor_parts(stored, config, context.group.rank, size)
        self._loader: WeightLoader = open_weights(
            checkpoint.path,
            checkpoint.load_format,
            stored,
            {name: part for name, part in parts.items() if name not in _WHOLE},
            context.dtype,
            context.platform.device,
            context.config.random_seed,
            lambda fraction: None,
            draft_scheme(checkpoint.path, context.config, context.settings, checkpoint.tensors),
        )

    @property
    def parameters(self) -> int:
        return self._loader.parameters

    @property
    def weight_bytes(self) -> int:
        return self._loader.weight_bytes

    def take(self, names: Sequence[str]) -> Tensor:
        """As ``TensorSource.take``."""
        return self._loader.take([self._checkpoint.stored(name) for name in names])

    def biases(self, modules: Sequence[str]) -> Tensor | None:
        """As ``TensorSource.biases``."""
        return self._loader.biases([self._module(name) for name in modules])

    def projection(self, modules: Sequence[str]) -> Projection:
        """As ``TensorSource.projection``."""
        return self._loader.projection([self._module(name) for name in modules])

    def _module(self, name: str) -> str:
        return self._checkpoint.stored(f"{name}.weight").removesuffix(".weight")

    def optional(self, name: str) -> Tensor | None:
        """The tensor, if it is one of ``shapes``."""
        return self.take([name]) if name in self._has else None

    def layer(self, prefix: str) -> LayerWeights:
        """The layer ``prefix`` as the first layer of a decoder."""
        return LayerWeights(self, prefix)


class LayerWeights:
    """One layer's weights, by the names that a decoder's first layer has."""

    def __init__(self, weights: DraftWeights, prefix: str) -> None:
        self._weights = weights
        self._prefix = prefix

    def take(self, names: Sequence[str]) -> Tensor:
        """As ``TensorSource.take``."""
        return self._weights.take([name.replace("model.layers.0", self._prefix, 1) for name in names])

    def biases(self, modules: Sequence[str]) -> Tensor | None:
        """As ``TensorSource.biases``."""
        return self._weights.biases([name.replace("model.layers.0", self._prefix, 1) for name in modules])

    def projection(self, modules: Sequence[str]) -> Projection:
        """As ``TensorSource.projection``."""
        return self._weights.projection([name.replace("model.layers.0", self._prefix, 1) for name in modules])


def layer_shapes(config: ModelConfig, prefix: str, inputs: int = 0) -> dict[str, tuple[int, ...]]:
    """The tensors of a decoder's layer called ``prefix``. ``inputs``: of its attention; 0: the hidden size."""
    first = "model.layers.0."
    shapes = {
        f"{prefix}.{name.removeprefix(first)}": shape
        for name, shape in tensor_shapes(dataclasses.replace(config, layers=1)).items()
        if name.startswith(first)
    }
    for part in ("q", "k", "v"):
        name = f"{prefix}.self_attn.{part}_proj.weight"
        shapes[name] = (shapes[name][0], inputs or config.hidden_size)
    return shapes


def need_same_hidden_size(checkpoint: DraftCheckpoint, config: ModelConfig, target: ModelConfig) -> None:
    """Raises LoadError for a draft that cannot share the target's embeddings and head."""
    if config.hidden_size != target.hidden_size:
        raise LoadError(
            f"the draft in {checkpoint.path} has hidden_size {config.hidden_size}, the target {target.hidden_size}: it "
            "was made for another model; give the draft of this one to --speculative-draft-model-path"
        )
