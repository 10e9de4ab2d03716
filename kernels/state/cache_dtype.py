"""Chooses the dtype of cached keys and values, and reads their static scales.

- ``--quantization-param-path``: a JSON file ``{"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0":
  0.02, ...}}}}``: by tensor-parallel rank and layer, one scale for keys and values; ``x = q * scale``.
- The checkpoint: ``self_attn.k_scale`` and ``v_scale`` (also under ``attn``, or ``k_proj.k_scale``), per tensor, per
key head or per channel, as in compressed-tensors (``kv_cache_scheme``) and fp8 checkpoints; and ModelSlim's
``k_proj.kv_cache_scale`` with ``kv_cache_offset``, per channel, for int8 ("C8").
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.contract.config import RunnerConfig
from kernels.contract.errors import ConfigError, LoadError, UnsupportedError
from kernels.devices.base import Device
from kernels.models.config import ModelConfig
from kernels.weights.config_json import read_merged
from kernels.weights.gguf.header import is_gguf
from kernels.weights.loading import read_tensor, stored_shapes
from kernels.weights.quantization.cache import CACHE_DTYPES, LayerScales, narrow

__all__ = ["CacheChoice", "choose_cache"]

_log = logging.getLogger("troupe.kernels")

_NAMES = (
    ("self_attn.k_scale", "self_attn.v_scale"),
    ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
    ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
)
_WHOLE_NAMES = ("self_attn.k_proj.kv_cache_scale", "self_attn.v_proj.kv_cache_scale")
_FILE_DTYPES = {
    "float8_e4m3fn": "fp8_e4m3",
    "fp8_e4m3": "fp8_e4m3",
    "fp8": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
    "fp8_e5m2": "fp8_e5m2",
    "int8": "int8",
}


@dataclass(frozen=True)
class CacheChoice:
    """``dtype``: by --kv-cache-dtype; None: the model's. ``scales``: static scales of this rank by layer; None: dynamic
    scales of each token."""

    dtype: torch.dtype | None = None
    scales: tuple[LayerScales, ...] | None = None


def choose_cache(config: RunnerConfig, model: ModelConfig, dtype: torch.dtype, device: Device) -> CacheChoice:
    """Choose by the flags and the checkpoint. ``model``: the whole model; ``dtype``: its dtype of computation.

    Raises ConfigError, LoadError or UnsupportedError, saying what to do.
    """
    requested, method = config.kv_cache_dtype, config.kv_cache_quant_method
    stored, own = _CheckpointScales(config, model), config.kv_cache_scales
    name = requested or stored.dtype
    if not requested and name:
        try:
            device.cache.check_dtype(CACHE_DTYPES[name])
        except UnsupportedError as error:
            _log.warning("The checkpoint has scales for a cache in %s, which is not used: %s", name, error)
            return CacheChoice()
    whole = model.latent is not None or model.recurrence is not None  # scales of the checkpoint are not used
    if not name or CACHE_DTYPES[name] == dtype or (whole and not requested):
        return CacheChoice()
    kind = CACHE_DTYPES[name]
    device.cache.check_dtype(kind)
    if model.recurrence is not None and narrow(kind):
        return CacheChoice(kind)  # which is refused where the cache is made
    if model.latent is not None and narrow(kind):
        if own or method not in ("", "per_token_head"):
            raise ConfigError(
                f"latent vectors of {model.architecture} are kept in 8 bits with a scale of each token; leave "
                "--kv-cache-quant-method and --quantization-param-path out"
            )
        return CacheChoice(kind)
    if not narrow(kind) or method == "per_token_head":
        return CacheChoice(kind)
    scales = _read_file(own, name, model, config) if own else stored.scales(name)
    if scales is None and method == "none":
        if kind == torch.int8:
            raise ConfigError(
                "--kv-cache-quant-method none needs static scales for an int8 cache, and neither the checkpoint nor "
                "--quantization-param-path has any; leave it out, or use fp8_e4m3"
            )
        _log.warning("Keys and values are cached in %s with scale 1.0: there are no scales for them.", name)
        ones = torch.ones(2, model.kv_heads, model.head_dim)
        scales = [LayerScales(ones)] * model.layers
    if scales is None:
        return CacheChoice(kind)
    size = config.attention_size
    first, count = config.attention_rank * model.kv_heads // size, max(1, model.kv_heads // size)
    return CacheChoice(kind, tuple(layer.part(first, first + count).to(device.torch_device) for layer in scales))


class _CheckpointScales:
    """The scales of a checkpoint. ``dtype``: their dtype by the flag's names; empty: there are none."""

    def __init__(self, config: RunnerConfig, model: ModelConfig) -> None:
        self._path, self._model = config.model_path, model
        self.dtype = ""
        self._names: tuple[str, str] | None = None
        if config.load_format == "dummy" or is_gguf(config.model_path):
            return
        shapes = stored_shapes(config.model_path)
        self._shapes = shapes
        for pair in (*_NAMES, _WHOLE_NAMES):
            if any(f"model.layers.{layer}.{name}" in shapes for layer in range(model.layers) for name in pair):
                self._names = pair
                break
        if self._names is None:
            return
        settings = read_merged(config.model_path, config.config_overrides).get("quantization_config")
        self.dtype = "int8" if self._names == _WHOLE_NAMES else _scheme_dtype(settings)

    def scales(self, requested: str) -> list[LayerScales] | None:
        """The scales of each layer. Raises LoadError if one is missing or invalid."""
        if self._names is None:
            return None
        if requested != self.dtype:
            _log.warning("The checkpoint's scales of keys and values are for %s and not used.", self.dtype)
            return None
        return [self._layer(layer) for layer in range(self._model.layers)]

    def _layer(self, layer: int) -> LayerScales:
        assert self._names is not None
        names = [f"model.layers.{layer}.{name}" for name in self._names]
        scales = torch.stack([self._read(name) for name in names])
        if not bool((scales.isfinite() & (scales > 0)).all()):
            raise LoadError(f"{' or '.join(names)} has scales that are not above 0 and finite; was it calibrated?")
        if self._names != _WHOLE_NAMES:
            return LayerScales(scales)
        shifts = [name.removesuffix("scale") + "offset" for name in names]
        offsets = [self._read(name) if name in self._shapes else torch.zeros_like(scales[0]) for name in shifts]
        return LayerScales(scales, torch.stack(offsets) if any(map(torch.any, offsets)) else None)

    def _read(self, name: str) -> Tensor:
        """[kv_heads, dim]"""
        heads, dim = self._model.kv_heads, self._model.head_dim
        found = read_tensor(self._path, name).float().flatten()
        if len(found) not in (1, heads, heads * dim):
            raise LoadError(
                f"{name} has {len(found)} numbers; expected 1, {heads} (by key head) or {heads * dim} (by "
                "channel): is it another model's?"
            )
        return found.view(-1, 1 if len(found) <= heads else dim).expand(heads, dim).contiguous()


def _scheme_dtype(settings: object) -> str:
    """The dtype in ``kv_cache_scheme`` of config.json; without it such scales are for e4m3."""
    scheme = settings.get("kv_cache_scheme") if isinstance(settings, dict) else None
    whole = isinstance(scheme, dict) and scheme.get("type") == "int"
    return "int8" if whole else "fp8_e4m3"


def _read_file(path: str, name: str, model: ModelConfig, config: RunnerConfig) -> Sequence[LayerScales]:
    """Read the scales of a file. ``name``: value of the flag. Raises ConfigError."""
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))["kv_cache"]
        dtype, ranks = str(result["dtype"]), result["scaling_factor"]
        by_rank = {
            int(rank): {int(layer): float(scale) for layer, scale in layers.items()} for rank, layers in ranks.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"--quantization-param-path {path} cannot be read ({error!r}); it must be a JSON object kv_cache with "
            'dtype and scaling_factor, such as {"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": '
            "0.02}}}}"
        ) from error
    if _FILE_DTYPES.get(dtype) != name:
        raise ConfigError(
            f"--quantization-param-path {path} has scales for {dtype}, but the cache has dtype {name}; use "
            f"--kv-cache-dtype {_FILE_DTYPES.get(dtype, 'fp8_e4m3')} or another file"
        )
    if sorted(by_rank) not in ([0], list(range(config.tp_size))):
        raise ConfigError(
            f"--quantization-param-path {path} has scales of ranks {sorted(by_rank)}, and the model runs on "
            f"{config.tp_size}; make a file of rank 0 alone, which fits any number of ranks"
        )
    mine: Mapping[int, float] = by_rank.get(config.tp_rank, by_rank[0])
    if sorted(mine) != list(range(model.layers)):
        raise ConfigError(
            f"--quantization-param-path {path} has scales of {len(mine)} layers, and the model has layers 0 to "
            f"{model.layers - 1}; is it the file of another model?"
        )
    wrong: list[Any] = [layer for layer, scale in mine.items() if not 0 < scale < float("inf")]
    if wrong:
        raise ConfigError(f"--quantization-param-path {path}: the scale of layer {wrong[0]} must be above 0 and finite")
    shape = (2, model.kv_heads, model.head_dim)
    return [LayerScales(torch.full(shape, mine[layer])) for layer in range(model.layers)]
