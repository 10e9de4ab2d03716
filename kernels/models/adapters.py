"""LoRA adapters that are loaded and unloaded while a model runs.

Loaded adapters lie in the host's memory. Those of running requests lie on the device too, in one of a fixed number of
places that are made with the layers and filled between steps: captured graphs read places, never addresses of one
adapter (S-LoRA, Sheng et al., arXiv 2311.03285; Punica, Chen et al., arXiv 2310.18547).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kernels.contract.adapters import ALL_TARGETS, AdapterSettings
from kernels.contract.errors import ConfigError
from kernels.core.layer_context import Delta, LayerContext
from kernels.devices.base import Device
from kernels.weights.adapter_files import AdapterModule, read_files
from kernels.weights.tensors import Part, Shard, Tensors, TensorSpec

__all__ = ["ResidentAdapters"]


@dataclass(frozen=True, eq=False)
class _Layer:
    """A linear layer of fused ``modules``, which have ``sizes`` outputs: see ``LowRankDelta``."""

    modules: tuple[str, ...]
    shard: Shard
    down: Tensor
    up: Tensor
    sizes: tuple[int, ...]


_Host = list[tuple[Tensor, Tensor] | None]
"""An adapter's matrices, of each layer ``down`` and ``up``; None where it changes nothing."""


class ResidentAdapters:
    """The adapters of one model on one rank, by their numbers: see ``kernels.contract.runner.Runner.load_adapter``.

    tensors: what the whole model declares. dtype: of activations.
    """

    def __init__(self, settings: AdapterSettings, tensors: Tensors, device: Device, dtype: torch.dtype) -> None:
        if settings.max_rank < 1 or settings.max_batch < 1:
            raise ConfigError("--max-lora-rank and --max-loras-per-batch must be at least 1")
        self._settings, self._tensors, self._device, self._dtype = settings, tensors, device, dtype
        self._layers: list[_Layer] = []
        self._takers: set[str] = set()
        self._refused: set[str] = set()
        self._loaded: dict[int, _Host] = {}
        self._resident: dict[int, int] = {}  # the adapter's place; the one to evict first is first
        self._users: dict[int, int] = {}  # slots that hold it
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """See ``kernels.core.layer_context.RowAdapters``."""
        return self._nbytes

    def make(self, modules: tuple[str, ...], context: LayerContext) -> Delta | None:
        """See ``kernels.core.layer_context.RowAdapters``."""
        if not any(self._is_target(module) for module in modules):
            return None
        shard, rank, places = Shard(context.rank, context.size), self._settings.max_rank, self._settings.max_batch + 1
        specs = [self._spec(module) for module in modules]
        sizes = tuple(_length(spec, 0, shard) for spec in specs)
        inputs = _length(specs[0], 1, shard)
        down = torch.zeros(places, len(modules) * rank, inputs, dtype=self._dtype, device=context.device)
        up = torch.zeros(places, rank, sum(sizes), dtype=self._dtype, device=context.device)
        self._layers.append(_Layer(modules, shard, down, up, sizes))
        self._takers.update(modules)
        self._nbytes += down.nbytes + up.nbytes
        return self._device.linear.make_delta(context, down, up, sizes)

    def refuse(self, modules: tuple[str, ...]) -> None:
        """See ``kernels.core.layer_context.RowAdapters``."""
        self._refused.update(modules)

    def load(self, index: int, path: str) -> None:
        """Read an adapter. Raises ConfigError that names all problems; then nothing has changed."""
        if index < 1 or self._users.get(index):
            raise ConfigError(f"adapter {index} cannot be loaded: numbers begin at 1, and requests must not use it")
        most = self._settings.max_loaded
        if most and index not in self._loaded and len(self._loaded) >= most:
            raise ConfigError(f"{len(self._loaded)} adapters are loaded, and --max-loaded-loras is {most}: unload one")
        files = read_files(path, settings=self._settings)
        wrong = [problem for module, each in files.modules.items() if (problem := self._problem(module, each))]
        if wrong:
            more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
            raise ConfigError(f"the adapter in {path} does not fit the model: {'; '.join(wrong[:8])}{more}")
        try:
            with safe_open(files.weights, framework="pt") as stored:
                host = [self._read(stored, layer, files.modules) for layer in self._layers]
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{files.weights} cannot be read ({error}); download it again") from error
        except (RuntimeError, MemoryError) as error:  # torch's error where memory, or pinned memory, is short
            first = str(error).strip().partition("\n")[0]
            raise ConfigError(f"{files.weights} does not fit this host's memory ({first}); unload another") from error
        self._resident.pop(index, None)
        self._loaded[index] = host

    def unload(self, index: int) -> None:
        """Forget an adapter. Raises ConfigError where a slot uses it, or it is not loaded."""
        if index not in self._loaded:
            raise ConfigError(f"adapter {index} is not loaded")
        if self._users.get(index):
            raise ConfigError(f"adapter {index} is in use; unload it when its requests have ended")
        self._resident.pop(index, None)
        del self._loaded[index]

    @torch.inference_mode()
    def acquire(self, index: int) -> int:
        """See ``kernels.core.layer_context.RowAdapters``."""
        if index == 0:
            return 0
        if index not in self._loaded:
            raise ConfigError(f"adapter {index} is not loaded")
        place = self._resident.pop(index, 0) or self._fill(index)
        self._resident[index] = place
        self._users[index] = self._users.get(index, 0) + 1
        return place

    def release(self, index: int) -> None:
        """See ``kernels.core.layer_context.RowAdapters``."""
        if index:
            self._users[index] -= 1

    def _fill(self, index: int) -> int:
        """Copy an adapter to a free place, or to that of the one that was admitted longest ago and has no slot."""
        free = set(range(1, self._settings.max_batch + 1)) - set(self._resident.values())
        if free:
            place = min(free)
        else:
            unused = next((other for other in self._resident if not self._users.get(other)), None)
            if unused is None:
                raise ConfigError(f"requests use {len(self._resident)} other adapters; see --max-loras-per-batch")
            place = self._resident.pop(unused)
        for layer, host in zip(self._layers, self._loaded[index], strict=True):
            if host is None:
                layer.down[place].zero_()
                layer.up[place].zero_()
                continue
            for matrices, source in zip((layer.down, layer.up), host, strict=True):
                matrices[place].copy_(source, non_blocking=True)
        return place

    def _spec(self, module: str) -> TensorSpec:
        return self._tensors[f"{module}.weight"]

    def _is_target(self, module: str) -> bool:
        targets = self._settings.targets
        return ALL_TARGETS in targets or module.rpartition(".")[2] in targets

    def _problem(self, module: str, found: AdapterModule) -> str:
        if module in self._takers:
            outputs, inputs = self._spec(module).matrix
            if (found.outputs, found.inputs) == (outputs, inputs):
                return ""
            return f"{module} is [{found.outputs}, {found.inputs}] there and [{outputs}, {inputs}] in the model"
        if module in self._refused:
            return f"{module} takes no adapters: experts, and what makes keys of latent vectors, run without them"
        known = f"{module}.weight" in self._tensors
        return f"{module} {'takes no adapters' if known else 'is no linear layer of the model'}"

    def _read(
        self, stored: safe_open, layer: _Layer, modules: Mapping[str, AdapterModule]
    ) -> tuple[Tensor, Tensor] | None:
        if not any(module in modules for module in layer.modules):
            return None
        rank = self._settings.max_rank
        down, up = (torch.zeros(each.shape[1:], dtype=self._dtype) for each in (layer.down, layer.up))
        columns = up.split(layer.sizes, 1)
        for number, module in enumerate(layer.modules):
            if module not in modules:
                continue
            found, parts = modules[module], self._spec(module).parts(layer.shard)
            first, second = stored.get_tensor(found.down).float(), stored.get_tensor(found.up).float() * found.scale
            for name, matrix in ((found.down, first), (found.up, second)):
                if not matrix.to(self._dtype).isfinite().all():  # a product with 0 would reach rows of others
                    raise ConfigError(f"{name} of the adapter has values that are not finite in {self._dtype}")
            begin = number * rank
            down[begin : begin + found.rank] = _part(first, parts, 1)
            columns[number][: found.rank] = _part(second, parts, 0).T
        pinned = layer.down.device.type == "cuda"
        return (down.pin_memory(), up.pin_memory()) if pinned else (down, up)


def _part(matrix: Tensor, parts: Sequence[Part], dimension: int) -> Tensor:
    """This rank's part of A or B, which are divided as the weight's inputs or outputs are."""
    held = [part.narrow(matrix) for part in parts if part.dimension == dimension]
    return torch.cat(held, dimension) if held else matrix


def _length(spec: TensorSpec, dimension: int, shard: Shard) -> int:
    """Inputs or outputs of a module on this rank."""
    held = [part.end - part.begin for part in spec.parts(shard) if part.dimension == dimension]
    return sum(held) if held else spec.shape[dimension]
