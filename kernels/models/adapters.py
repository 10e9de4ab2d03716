"""LoRA adapters that are loaded and unloaded while a model runs.

Loaded adapters lie in the host's memory. Those of running requests lie on the device too, in one of a fixed number of
places that are made with the layers and filled between steps: captured graphs read places, never addresses of one
adapter (S-LoRA, Sheng et al., arXiv 2311.03285; Punica, Chen et al., arXiv 2310.18547).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kernels.contract.adapters import DORA, EXPERTS, LATENT, AdapterSettings, is_named, is_target, target_of
from kernels.contract.errors import ConfigError
from kernels.core.layer_context import BaseLayer, Delta, ExpertModules, LayerContext
from kernels.devices.base import Device
from kernels.devices.linear import LinearLayers
from kernels.devices.low_rank import ScaledDelta
from kernels.models.stages import layer_of
from kernels.weights.adapter_files import AdapterModule, ExpertPlace, read_files
from kernels.weights.tensors import Part, Role, Shard, Tensors, TensorSpec, by_inputs, by_outputs

__all__ = ["ResidentAdapters"]


@dataclass(frozen=True, eq=False)
class _Layer:
    """Linear layers of the same sizes, of which each fuses some ``modules`` that have ``sizes`` outputs: one, or those
    of a layer's experts. ``down``, ``up`` [layers, places, ...]: see ``LowRankDelta``. ``lookup``: it is a table of
    embeddings: see ``LookupDelta``. ``latent``: it makes keys and values of latent vectors: see ``AdaptedLatentHeads``.
    ``scales`` [places, outputs] of ``base``: see ``ScaledDelta``."""

    modules: tuple[tuple[str, ...], ...]
    shard: Shard
    down: Tensor
    up: Tensor
    sizes: tuple[int, ...]
    lookup: bool = False
    latent: bool = False
    base: BaseLayer | None = None
    scales: Tensor | None = None


@dataclass(eq=False)
class _Magnitudes:
    """The magnitudes of DoRA of a ``_Layer``: ``values`` float32 [outputs], NaN where there are none, beside ``down``
    [modules * rank, inputs] and ``up`` [rank, outputs]. ``found``: the scales that they give, once they are known."""

    down: Tensor
    up: Tensor
    values: Tensor
    found: Tensor | None = None

    def scales(self, base: BaseLayer, sizes: Sequence[int]) -> Tensor:
        """``values / ||W + B A|| - 1`` float32 [outputs], on the device. Raises ConfigError.

        ``||W + B A||^2 = ||W||^2 + 2 sum(B * (A W^T)^T) + sum(B * (B A A^T))``: the layer itself multiplies A with W,
        whose floats a quantized or packed one has no longer. All of it is summed over the ranks that divide inputs,
        which fill their places before the same step.
        """
        if self.found is not None:
            return self.found
        device, rank = base.squares.device, len(self.up)
        down, up, values = (each.to(device) for each in (self.down, self.up.T.float(), self.values))
        products = base.linear(down) if base.bias is None else base.linear(down) - base.bias
        squares = base.squares.clone()
        begin = 0
        for number, size in enumerate(sizes):
            rows, here = slice(number * rank, (number + 1) * rank), slice(begin, begin + size)
            begin += size
            low, high = down[rows].float(), up[here]
            squares[here] += (high * (2 * products[rows, here].float().T + high @ (low @ low.T))).sum(1)
        if base.sums is not None:
            squares = base.sums(squares)
        result = torch.where(values.isnan(), 0.0, values / squares.sqrt() - 1)
        if not result.isfinite().all():
            raise ConfigError("the adapter scales outputs whose weights are zero (DoRA); train it again")
        self.found = result
        return result


@dataclass(frozen=True, eq=False)
class _Matrices:
    """An adapter's matrices [layers, ...] for a ``_Layer`` in the host's memory. ``magnitudes``: None: it scales
    nothing."""

    down: Tensor
    up: Tensor
    magnitudes: _Magnitudes | None = None


_UNSCALED = "takes no DoRA magnitudes: embeddings, the output, experts and kv_b_proj do not"
_Host = list[_Matrices | None]
"""An adapter's matrices for each ``_Layer``; None where it changes nothing."""


class ResidentAdapters:
    """The adapters of one model on one rank, by their numbers: see ``kernels.contract.runner.Runner.load_adapter``.

    tensors: what the whole model declares. dtype: of activations. ep_size: see ``Shard``. layers: those of this stage
    of a pipeline; the other stages check and hold what an adapter has for theirs.
    """

    def __init__(
        self,
        settings: AdapterSettings,
        tensors: Tensors,
        device: Device,
        dtype: torch.dtype,
        ep_size: int = 1,
        *,
        layers: range | None = None,
    ) -> None:
        self._ep_size, self._stage = ep_size, layers
        if settings.max_rank < 1 or settings.max_batch < 1:
            raise ConfigError("--max-lora-rank and --max-loras-per-batch must be at least 1")
        self._settings, self._tensors, self._device, self._dtype = settings, tensors, device, dtype
        own = device.linear
        self._linear = LinearLayers(own.elementwise, own.fallbacks) if settings.plain else own
        self._rank = self._linear.room_for_rank(settings.max_rank, dtype)
        self._layers: list[_Layer] = []
        self._takers: set[str] = set()
        self._refused: dict[str, str] = {}  # why they take none
        self._scaled: set[str] = set()
        self._experts: dict[str, tuple[tuple[str, ...], ...]] = {}  # modules of a layer's experts, by that of all
        self._alternate: set[str] = set()  # those of all whose gates and ups alternate
        self._apart_specs: dict[str, TensorSpec] = {}  # of modules that are one tensor in the model
        self._tied: dict[str, TensorSpec] = {}  # the tables of outputs without a weight of their own
        self._aliases = {alias.rpartition(".")[0]: spec.module for spec in tensors.values() for alias in spec.aliases}
        self._loaded: dict[int, _Host] = {}
        self._resident: dict[int, int] = {}  # the adapter's place; the one to evict first is first
        self._users: dict[int, int] = {}  # slots that hold it
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """See ``kernels.core.layer_context.RowAdapters``."""
        return self._nbytes

    @property
    def resident(self) -> tuple[int, ...]:
        """The adapters that have a place on the device; the one to evict first is first."""
        return tuple(self._resident)

    @property
    def scales(self) -> bool:
        """See ``kernels.core.layer_context.RowAdapters``."""
        return DORA in self._settings.targets

    def takes(self, modules: tuple[str, ...]) -> bool:
        """See ``kernels.core.layer_context.RowAdapters``."""
        return any(is_target(module, self._settings.targets) for module in modules)

    def make(self, modules: tuple[str, ...], context: LayerContext, base: BaseLayer | None = None) -> Delta | None:
        """See ``kernels.core.layer_context.RowAdapters``."""
        if not self.takes(modules):
            return None
        return self._make((modules,), context, base)[0]

    def _make(
        self, modules: tuple[tuple[str, ...], ...], context: LayerContext, base: BaseLayer | None = None
    ) -> list[Delta]:
        """The additions to layers of the same sizes."""
        shard, rank, places = self._room(context)
        specs = [self._spec(module) for module in modules[0]]
        sizes = tuple(_length(spec, 0, shard) for spec in specs)
        inputs, count = _length(specs[0], 1, shard), len(modules)
        down = torch.zeros(count, places, len(specs) * rank, inputs, dtype=self._dtype, device=context.device)
        up = self._linear.make_up((count, places, rank, sum(sizes)), self._dtype, context.device)
        make = self._linear.make_delta
        made = [make(context, first, second, sizes) for first, second in zip(down, up, strict=True)]
        scales = None
        if base is not None:
            scales = torch.zeros(places, sum(sizes), dtype=torch.float32, device=context.device)
            made = [ScaledDelta(made[0], context, scales, base.bias)]
        self._add(_Layer(modules, shard, down, up, sizes, base=base, scales=scales))
        return made

    def make_experts(self, experts: ExpertModules, context: LayerContext) -> list[tuple[Delta, Delta]] | None:
        """See ``kernels.core.layer_context.RowAdapters``."""
        if EXPERTS not in self._settings.targets:
            return None
        modules = experts.modules
        if experts.sizes is not None:
            inner, hidden = experts.sizes
            rows, columns = by_outputs((inner, inner)), by_inputs(inner, inner)
            for *gates, down in modules:
                for gate in gates:
                    self._apart_specs[gate] = TensorSpec(f"{gate}.weight", (inner, hidden), Role.PROJECTION, rows)
                self._apart_specs[down] = TensorSpec(f"{down}.weight", (hidden, inner), Role.DOWN, columns)
        first = modules[0][0]
        aliases = [alias for alias, module in self._aliases.items() if module == first]
        stacked = {experts.stacked, *(name.rsplit(".", 2)[0] for name in (first, *aliases))}
        if experts.alternate:
            self._alternate |= stacked
        own = [modules[expert] for expert in experts.here]
        firsts = self._make(tuple(module[:-1] for module in own), context)
        lasts = self._make(tuple(module[-1:] for module in own), context)
        self._takers.update(module for expert in modules for module in expert)
        self._experts.update(dict.fromkeys(stacked, tuple(modules)))
        return list(zip(firsts, lasts, strict=True))

    def make_router(self, module: str, context: LayerContext) -> Delta | None:
        """See ``kernels.core.layer_context.RowAdapters``."""
        return self._make(((module,),), context)[0] if EXPERTS in self._settings.targets else None

    def make_lookup(self, module: str, context: LayerContext) -> Delta | None:
        """See ``kernels.core.layer_context.RowAdapters``."""
        if not is_named(module, self._settings.targets):
            return None
        shard, rank, places = self._room(context)
        spec = self._spec(module)
        vocab, hidden = _length(spec, 0, shard), spec.shape[1]
        down = torch.zeros(1, places, vocab, rank, dtype=self._dtype, device=context.device)
        up = torch.zeros(1, places, rank, hidden, dtype=self._dtype, device=context.device)
        self._add(_Layer(((module,),), shard, down, up, (hidden,), lookup=True))
        return self._linear.make_lookup_delta(context, down[0], up[0])

    def make_latent(self, module: str, context: LayerContext) -> tuple[Tensor, Tensor] | None:
        """See ``kernels.core.layer_context.RowAdapters``."""
        if not is_named(module, self._settings.targets):
            return None
        shard, rank, places = self._room(context)
        spec = self._spec(module)
        outputs, latent = _length(spec, 0, shard), spec.shape[1]
        down = torch.zeros(1, places, rank, latent, dtype=self._dtype, device=context.device)
        up = torch.zeros(1, outputs, places, rank, dtype=self._dtype, device=context.device).permute(0, 2, 3, 1)
        self._add(_Layer(((module,),), shard, down, up, (outputs,), latent=True))
        return down[0], up[0]

    def make_head(self, module: str, context: LayerContext) -> Delta | None:
        """See ``kernels.core.layer_context.RowAdapters``."""
        if not is_named(module, self._settings.targets):
            return None
        if f"{module}.weight" not in self._tensors:  # tied, but an adapter of the one does not change the other
            self._tied[module] = next(spec for spec in self._tensors.values() if spec.role is Role.EMBEDDING)
        context.in_head = True
        return self.make((module,), context)

    def _room(self, context: LayerContext) -> tuple[Shard, int, int]:
        """The rank's part of tensors, the rows of a matrix, and places with the one of no adapter."""
        return (
            Shard(context.rank, context.size, ep_size=self._ep_size),
            self._rank,
            self._settings.max_batch + 1,
        )

    def _add(self, layer: _Layer) -> None:
        self._layers.append(layer)
        self._takers.update(module for fused in layer.modules for module in fused)
        if layer.scales is not None:
            self._scaled.update(layer.modules[0])
        self._nbytes += layer.down.nbytes + layer.up.nbytes + (0 if layer.scales is None else layer.scales.nbytes)

    def refuse(self, modules: tuple[str, ...], reason: str) -> None:
        """See ``kernels.core.layer_context.RowAdapters``."""
        self._refused.update(dict.fromkeys(modules, reason))

    def load(self, index: int, path: str) -> None:
        """Read an adapter. Raises ConfigError that names all problems; then nothing has changed.

        Another thread may call it while steps run: they see the adapter when it is whole.
        """
        if index < 1 or self._users.get(index):
            raise ConfigError(f"adapter {index} cannot be loaded: numbers begin at 1, and requests must not use it")
        most = self._settings.max_loaded
        if most and index not in self._loaded and len(self._loaded) >= most:
            raise ConfigError(f"{len(self._loaded)} adapters are loaded, the limit of --max-loaded-loras; unload one")
        files = read_files(path, settings=self._settings)
        wrong: list[str] = []
        modules = self._apart(files.modules, wrong)
        wrong += [problem for module, each in modules.items() if (problem := self._problem(module, each))]
        if wrong:
            more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
            raise ConfigError(f"the adapter in {path} does not fit the model: {'; '.join(wrong[:8])}{more}")
        try:
            with safe_open(files.weights, framework="pt") as stored:
                host = [self._read(stored, layer, modules) for layer in self._layers]
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
            raise ConfigError(
                f"adapter {index} is not loaded: its files could not be read again when the workers restarted"
            )
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
            magnitudes = None if host is None else host.magnitudes
            if layer.scales is not None:
                assert layer.base is not None
                scales = 0.0 if magnitudes is None else magnitudes.scales(layer.base, layer.sizes)
                layer.scales[place] = scales
            if host is None:
                layer.down[:, place].zero_()
                layer.up[:, place].zero_()
                continue
            layer.down[:, place].copy_(host.down, non_blocking=True)
            layer.up[:, place].copy_(host.up, non_blocking=True)
        return place

    def _spec(self, module: str) -> TensorSpec:
        return self._tied.get(module) or self._apart_specs.get(module) or self._tensors[f"{module}.weight"]

    def _apart(self, modules: Mapping[str, AdapterModule], wrong: list[str]) -> dict[str, AdapterModule]:
        """The modules under the model's names, with those of stacked experts apart."""
        result: dict[str, AdapterModule] = {}
        for name, found in modules.items():
            stacked = name.replace(".base_layer", "")
            experts = self._experts.get(stacked) if found.experts > 1 else None
            if experts is None:
                known = self._aliases.get(name, name)
                if known in result:
                    wrong.append(f"{known} is there under two names")
                result[known] = found
                continue
            *gates, down = experts[0]
            first, second = (self._spec(module).matrix for module in (gates[0], down))
            both = (len(gates) * first[0], first[1])
            sizes = found.outputs, found.inputs
            if found.experts != len(experts) or not {sizes, sizes[::-1]} & {both, second}:
                wrong.append(
                    f"{name} has {found.experts} experts of {list(sizes)}, and the model {len(experts)} of "
                    f"{list(both)} and {list(second)}"
                )
                continue
            # Of gates and ups, or of downs. PEFT up to 0.18 took their inputs for outputs.
            is_down = sizes == second or (sizes != both and sizes[::-1] == second)
            turned = sizes != (second if is_down else both)
            for expert, own in enumerate(experts):
                for part, module in enumerate(own[-1:] if is_down else own[:-1]):
                    shape = self._spec(module).matrix
                    parts = 1 if is_down else len(gates)
                    alternate = stacked in self._alternate
                    place = ExpertPlace(expert, found.experts, part, parts, turned, alternate)
                    if module in result:
                        wrong.append(f"{module} is there under two names")
                    result[module] = replace(found, outputs=shape[0], inputs=shape[1], experts=1, place=place)
        return result

    def _problem(self, module: str, found: AdapterModule) -> str:
        if module in self._takers:
            spec = self._spec(module)
            if found.lookup != (spec.role is Role.EMBEDDING and module not in self._tied):
                return f"{module} is {'no' if found.lookup else 'a'} table of embeddings in the model"
            outputs, inputs = reversed(spec.matrix) if found.lookup else spec.matrix
            if (found.outputs, found.inputs) == (outputs, inputs):
                return "" if not found.magnitudes or module in self._scaled else f"{module} {_UNSCALED}"
            return f"{module} is [{found.outputs}, {found.inputs}] there and [{outputs}, {inputs}] in the model"
        plain = module.replace(".base_layer", "")
        if plain in self._refused:
            return f"{plain} takes no adapters: {self._refused[plain]}"
        if self._is_elsewhere(module):
            return ""
        known = self._tensors.get(f"{module}.weight")
        if known is None:
            return f"{module} is no linear layer of the model"
        named = known.role in (Role.EMBEDDING, Role.OUTPUT) or target_of(module) == LATENT
        return f"{module} takes no adapters{', unless --lora-target-modules names it' if named else ''}"

    def _is_elsewhere(self, module: str) -> bool:
        """Whether it is for another stage of the pipeline to say if it takes a module."""
        if self._stage is None:
            return False
        layer, layers = layer_of(module), 1 + max(layer_of(name) or 0 for name in self._tensors)
        if layer is not None:
            return layer < layers and layer not in self._stage
        spec = self._tensors.get(f"{module}.weight")
        is_first = spec is not None and spec.role is Role.EMBEDDING
        return self._stage.start > 0 if is_first else self._stage.stop < layers  # the last one has the output

    def _read(self, stored: safe_open, layer: _Layer, modules: Mapping[str, AdapterModule]) -> _Matrices | None:
        if not any(module in modules for fused in layer.modules for module in fused):
            return None
        shapes = [(len(layer.modules), *each.shape[2:]) for each in (layer.down, layer.up)]
        host = [torch.zeros(shape, dtype=self._dtype) for shape in shapes]
        last: dict[str, Tensor] = {}  # a matrix of all experts is read once

        def read(name: str) -> Tensor:
            if name not in last:
                if len(last) > 1:
                    last.clear()
                last[name] = stored.get_tensor(name).float()
            return last[name]

        for fused, down, up in zip(layer.modules, *host, strict=True):
            for number, module in enumerate(fused):
                if module in modules:
                    self._copy(read, modules[module], layer, (number, module), down, up)
        magnitudes = None
        if layer.base is not None:  # these are computed with the matrices as they are stored
            magnitudes = self._magnitudes(stored, layer, modules, host[0][0].clone(), host[1][0].clone())
        if not layer.lookup and not layer.latent:
            for down, up in zip(*host, strict=True):
                ordered = self._linear.order_adapter(down, up, layer.sizes)
                down.copy_(ordered[0])
                up.copy_(ordered[1])
        down, up = host
        pinned = layer.down.device.type == "cuda"
        return _Matrices(*((down.pin_memory(), up.pin_memory()) if pinned else (down, up)), magnitudes)

    def _magnitudes(
        self, stored: safe_open, layer: _Layer, modules: Mapping[str, AdapterModule], down: Tensor, up: Tensor
    ) -> _Magnitudes | None:
        values = torch.full((sum(layer.sizes),), torch.nan)
        for module, own in zip(layer.modules[0], values.split(layer.sizes), strict=True):
            if module in modules and (name := modules[module].magnitudes):
                given = stored.get_tensor(name).float().flatten()
                if not given.isfinite().all():
                    raise ConfigError(f"{name} of the adapter has values that are not finite")
                own.copy_(_part(given, self._spec(module).parts(layer.shard), 0))
        return None if values.isnan().all() else _Magnitudes(down, up, values)

    def _copy(
        self,
        read: Callable[[str], Tensor],
        found: AdapterModule,
        layer: _Layer,
        of: tuple[int, str],
        down: Tensor,
        up: Tensor,
    ) -> None:
        """Copy this rank's part of a module's matrices. ``of``: its number among those that are fused, and its name."""
        number, module = of
        parts, rank = self._spec(module).parts(layer.shard), self._rank
        first, second = read(found.down), read(found.up)
        if found.place is not None:
            first, second = found.place.take(first, second)
        second = second * found.scale
        for name, matrix in ((found.down, first), (found.up, second)):
            if not matrix.to(self._dtype).isfinite().all():  # a product with 0 would reach rows of others
                raise ConfigError(f"{name} of the adapter has values that are not finite in {self._dtype}")
        if layer.lookup:
            down[:, : found.rank] = _part(first.T, parts, 0)
            up[: found.rank] = second.T
            return
        begin = number * rank
        down[begin : begin + found.rank] = _part(first, parts, 1)
        up.split(layer.sizes, 1)[number][: found.rank] = _part(second, parts, 0).T


def _part(matrix: Tensor, parts: Sequence[Part], dimension: int) -> Tensor:
    """This rank's part of A or B, which are divided as the weight's inputs or outputs are."""
    held = [part.narrow(matrix) for part in parts if part.dimension == dimension]
    return torch.cat(held, dimension) if held else matrix


def _length(spec: TensorSpec, dimension: int, shard: Shard) -> int:
    """Inputs or outputs of a module on this rank."""
    held = [part.end - part.begin for part in spec.parts(shard) if part.dimension == dimension]
    return sum(held) if held else spec.shape[dimension]
