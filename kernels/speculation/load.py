"""Loading a draft: its algorithm, its device, its config.json, its tensors and their quantization.

Public drafts use different names for the same tensors: some put ``model.`` before every name, and biases and norms are
optional. The headers of a draft's files therefore say which tensors it has. Required ones are then checked as a model's
are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from kernels.contract.config import RunnerConfig
from kernels.contract.errors import ConfigError, LoadError, UnsupportedError
from kernels.contract.speculation import SpeculativeSettings
from kernels.devices.base import Device
from kernels.devices.select import select_device
from kernels.models.config import ModelConfig
from kernels.models.config_loader import parse_config, read_json
from kernels.models.layers import gqa, indexer, mla, moe, pre_norm
from kernels.models.layers.builder import LayerBuilder
from kernels.speculation.division import divide_draft
from kernels.speculation.drafter import Drafter, DrafterContext
from kernels.weights.gguf.header import is_gguf
from kernels.weights.loading import CheckpointFiles, Placement, WeightLoader, open_weights, read_tensor, stored_shapes
from kernels.weights.quantization.detect import detect_scheme
from kernels.weights.quantization.modelslim import description_file
from kernels.weights.quantization.online import ONLINE
from kernels.weights.quantization.scheme import Scheme
from kernels.weights.quantization.weights import Projection
from kernels.weights.tensors import Role, Tensors, TensorSpec, embedding, linear, norm, table_of

__all__ = [
    "DraftCheckpoint",
    "DraftWeights",
    "captured_layers",
    "draft_device",
    "draft_scheme",
    "feature_projection",
    "head",
    "layer_tensors",
    "make_drafter",
    "need_same_hidden_size",
    "plain",
    "table",
]


class DraftCheckpoint:
    """The files in the directory ``path``. Raises ConfigError or LoadError.

    ``load_format`` dummy: weights are noise, and the directory only needs a config.json.
    """

    def __init__(self, path: str, load_format: str) -> None:
        self.path = path
        self.load_format = load_format
        self.raw = read_json(path)
        self._shapes: Mapping[str, tuple[int, ...]] = {} if load_format == "dummy" else stored_shapes(path)

    @property
    def dummy(self) -> bool:
        """Whether the weights are dummies, without files."""
        return self.load_format == "dummy"

    @cached_property
    def modules(self) -> frozenset[str]:
        """Modules with stored tensors, without a leading ``model.``."""
        return frozenset(name.rpartition(".")[0].removeprefix("model.") for name in self._shapes)

    def has(self, name: str) -> bool:
        """Whether the tensor is there, with or without ``model.`` before its name."""
        return self.stored(name) in self._shapes

    def stored(self, name: str) -> str:
        """The tensor's name in the files; for a quantized weight, the name of the unquantized one."""
        if name in self._shapes or name.rpartition(".")[0] in self._plain:
            return name
        longer = f"model.{name}"
        return longer if longer in self._shapes or name.rpartition(".")[0] in self.modules else name

    @cached_property
    def _plain(self) -> frozenset[str]:
        """Modules that have no ``model.`` before their names."""
        return frozenset(name.rpartition(".")[0] for name in self._shapes if not name.startswith("model."))

    def read(self, name: str) -> Tensor:
        """A tensor other than a weight, as stored. Raises LoadError if it is missing."""
        return read_tensor(self.path, self.stored(name))

    def config(self, architecture: str, layers: int, prefix: str, **more: Any) -> ModelConfig:
        """The sizes of ``layers`` layers, as config.json has them; biases and norms of heads those of the layer
        ``prefix``, unless weights are dummies. ``more``: overrides of config.json.
        """
        config = parse_config({**self.raw, **more, "architectures": [architecture], "num_hidden_layers": layers}, True)
        if self.dummy:
            return config
        attention = f"{prefix}.self_attn"
        return dataclasses.replace(
            config,
            qkv_bias=self.has(f"{attention}.{'q_proj' if config.latent is None else 'kv_a_proj_with_mqa'}.bias"),
            output_bias=self.has(f"{attention}.o_proj.bias"),
            mlp_bias=self.has(f"{prefix}.mlp.gate_proj.bias"),
            qk_norm=self.has(f"{attention}.q_norm.weight"),
        )

    def setting(self, section: str, key: str, default: Any = None) -> Any:
        """A key of the object ``section`` of config.json, or else of config.json itself."""
        part = self.raw.get(section) or {}
        if not isinstance(part, dict):
            raise ConfigError(f"{self.path}: {section} must be an object, and is {part!r}")
        result = part.get(key)
        return self.raw.get(key, default) if result is None else result

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
    """This rank's part of a draft's weights, by the names of the draft's layout.

    ``tensors``: those of the whole draft. ``config``: its sizes.
    """

    def __init__(
        self, context: DrafterContext, checkpoint: DraftCheckpoint, tensors: Tensors, config: ModelConfig
    ) -> None:
        self._checkpoint = checkpoint
        self._has = tensors.keys()
        config = dataclasses.replace(config, vocab_size=context.full_config.vocab_size)
        division = divide_draft(context.config, context.group, context.experts, config, tensors.values())
        self.local = division.local
        stored = (dataclasses.replace(spec, name=checkpoint.stored(spec.name)) for spec in tensors.values())
        self._loader: WeightLoader = open_weights(
            CheckpointFiles(checkpoint.path, checkpoint.load_format, context.config.random_seed),
            table_of(stored),
            Placement(context.dtype, context.device.torch_device, division.shard),
            draft_scheme(checkpoint.path, context.config, context.settings),
        )
        self.builder = LayerBuilder(
            self, context.device, context.group, ep_size=division.ep_size, shared=division.shared
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


def layer_tensors(config: ModelConfig, prefix: str, inputs: int = 0) -> Tensors:
    """The tensors of a decoder's layer called ``prefix``. ``inputs``: of its attention; 0: the hidden size."""
    if config.experts is not None:
        return table_of(_sparse_tensors(config, prefix))
    result = table_of(pre_norm.tensors(config, prefix))
    for part in ("q", "k", "v"):
        name = f"{prefix}.self_attn.{part}_proj.weight"
        result[name] = dataclasses.replace(result[name], shape=(result[name].shape[0], inputs or config.hidden_size))
    return result


def _sparse_tensors(config: ModelConfig, prefix: str) -> Iterator[TensorSpec]:
    assert config.experts is not None
    attention = gqa.tensors if config.latent is None else mla.tensors
    yield from pre_norm.norm_tensors(config, prefix, "")
    yield from attention(config, f"{prefix}.self_attn", "")
    if (latent := config.latent) is not None and latent.index is not None:
        yield from indexer.tensors(latent.index, f"{prefix}.self_attn", config.hidden_size, latent.query_rank)
    yield from moe.tensors(config.experts, config.hidden_size, prefix, "", moe.DEEPSEEK)


def plain(name: str, *shape: int, bias: bool = False, role: Role = Role.PROJECTION) -> Tensors:
    """A norm's weight [size], or a linear layer's [outputs, inputs] of a ``role``, whole on every rank."""
    if len(shape) == 1:
        return {name: dataclasses.replace(norm("", shape[0]), name=name)}
    return table_of(linear(name.removesuffix(".weight"), (shape[0], shape[1]), bias=bias, role=role))


def feature_projection(outputs: int, inputs: int, bias: bool = False) -> Tensors:
    """``fc``, which reads the target's features, whole on every rank and in floats."""
    return plain("fc.weight", outputs, inputs, bias=bias, role=Role.ROUTER)


def table(vocab: int, hidden: int) -> Tensors:
    """A draft's own table of embeddings."""
    return table_of([embedding("embed_tokens", vocab, hidden)])


def head(vocab: int, hidden: int) -> Tensors:
    """A draft's own output, small enough to be whole on every rank."""
    name = "lm_head.weight"
    return {name: TensorSpec(name, (vocab, hidden), Role.OUTPUT)}


def need_same_hidden_size(checkpoint: DraftCheckpoint, config: ModelConfig, target: ModelConfig) -> None:
    """Raises LoadError for a draft that cannot share the target's embeddings and head."""
    if config.hidden_size != target.hidden_size:
        raise LoadError(
            f"the draft in {checkpoint.path} has hidden_size {config.hidden_size}, the target {target.hidden_size}: it "
            "was made for another model; give the draft of this one to --speculative-draft-model-path"
        )


def draft_scheme(path: str | Path, config: RunnerConfig, settings: SpeculativeSettings) -> Scheme | None:
    """Quantization scheme of the draft in ``path``; None: not quantized.

    ``config``: the target's. Raises ConfigError, saying what to do.
    """
    stored = is_gguf(path) or description_file(path) is not None or bool(read_json(path).get("quantization_config"))
    requested = settings.quantization
    if not requested and not stored and config.quantization in ONLINE:
        requested = config.quantization
    if stored and settings.algorithm == "DFLASH":
        raise ConfigError(
            f"the draft in {path} is quantized, and a DFLASH draft projects keys and values from weights in floats; "
            "use one in bf16, which --speculative-draft-model-quantization int8 or fp8 may round while it is loaded"
        )
    try:
        return detect_scheme(path, requested)
    except ConfigError as error:
        raise ConfigError(f"--speculative-draft-model-quantization, the draft in {path}: {error}") from error


def draft_device(config: RunnerConfig, settings: SpeculativeSettings, device: Device, stored: str | None) -> Device:
    """``device``: the target's. ``stored``: the target's dtype, as its checkpoint says. Raises UnsupportedError."""
    backend = settings.draft_attention_backend
    if config.device != "npu" and settings.attention_mode != "prefill":
        raise UnsupportedError(
            f"--speculative-attention-mode {settings.attention_mode} chooses between kernels of an NPU; leave it out "
            f"with --device {config.device}"
        )
    if not backend:
        return device
    if config.device != "npu":
        raise UnsupportedError(
            f"--speculative-draft-attention-backend {backend} names kernels of an NPU; leave it out with --device "
            f"{config.device}"
        )
    own = select_device(
        msgspec.structs.replace(
            config, attention_backend=backend, prefill_attention_backend="", decode_attention_backend=""
        )
    )
    own.select_dtype(config.dtype, stored)
    if device.cache.dtype is not None:
        own.cache.check_dtype(device.cache.dtype)
    own.cache.dtype = device.cache.dtype
    return own


_CLASSES = {
    "EAGLE": ("eagle", "EagleDrafter"),
    "EAGLE3": ("eagle", "Eagle3Drafter"),
    "MTP": ("mtp", "MtpDrafter"),
    "DFLASH": ("dflash", "DflashDrafter"),
    "STANDALONE": ("standalone", "StandaloneDrafter"),
    "NGRAM": ("ngram", "NgramDrafter"),
}


def captured_layers(settings: SpeculativeSettings, model: ModelConfig) -> tuple[int, ...]:
    """The target's layers that the draft reads, in the order of its features; empty: the last hidden state.

    Raises ConfigError or LoadError for a draft that does not fit the model.
    """
    layers: tuple[int, ...] = _class(settings).captured_layers(settings, model)
    streams = model.stream_size // model.hidden_size
    if layers and streams > 1 and settings.algorithm != "MTP":
        raise ConfigError(
            f"{model.architecture} has {streams} residual streams, and drafts that read hidden states between layers "
            "(EAGLE3, DFLASH) read one: use another --speculative-algorithm"
        )
    return layers


def make_drafter(context: DrafterContext) -> Drafter:
    """Load the draft. Raises the same errors as loading a model."""
    return _class(context.settings)(context)


def _class(settings: SpeculativeSettings) -> type[Drafter]:
    module, name = _CLASSES[settings.algorithm]
    result: type[Drafter] = getattr(import_module(f"kernels.speculation.drafters.{module}"), name)
    return result
