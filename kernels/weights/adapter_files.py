"""LoRA adapters in the format of Hugging Face's PEFT: ``adapter_config.json`` beside ``adapter_model.safetensors``.

For a linear layer with the weight W [outputs, inputs], an adapter has A [rank, inputs] and B [outputs, rank]; the layer
becomes ``x @ (W + scale * B @ A).T``. ``scale`` is alpha / rank, or alpha / sqrt(rank) (Kalajdzievski, arXiv
2312.03732). No torch: the engine's process reads configurations and the headers of files.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from kernels.contract.adapters import ALL_TARGETS, DORA, EXPERTS, LATENT, AdapterInfo, AdapterSettings, target_of
from kernels.contract.errors import ConfigError
from kernels.weights.wrapped import plain_name

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AdapterFiles", "AdapterModule", "read_files", "read_info"]

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_BYTES = {"F16": 2, "BF16": 2, "F32": 4}
_MAX_CONFIG_BYTES = 1 << 20
_NAME = re.compile(r"base_model\.model\.([\w.]+)\.lora_(?:([AB])(?:\.default)?\.weight|embedding_([AB])(?:\.default)?)")
_MAGNITUDES = re.compile(r"base_model\.model\.([\w.]+)\.lora_magnitude_vector(?:\.default)?(?:\.weight)?")
_BASE = re.compile(r"base_model\.model\.([\w.]+)\.base_layer\.weight")
_STACKED = re.compile(r"\.experts(?:\.mlp)?(?:\.base_layer)*$")
_PATTERN = re.compile(r"\^?\w[\w.\\]*\$?")
_ANY_BEFORE = r".*\."
_PARAMETERS = "gate_up_proj", "up_proj", "down_proj"
_REFUSED = {  # keys of adapter_config.json whose values, unless empty, describe what is not supported
    "modules_to_save": "modules trained as a whole are not supported",
    "fan_in_fan_out": "transposed weights are not supported",
    "layer_replication": "repeated layers are not supported",
    "trainable_token_indices": "trainable tokens are not supported",
    "alora_invocation_tokens": "adapters that begin inside a prompt (aLoRA) are not supported",
    "lora_bias": "biases of adapters are not supported",
    "ensure_weight_tying": "one adapter for both embeddings and output is not supported; train without it",
}


@dataclass(frozen=True, slots=True)
class ExpertPlace:
    """Where an expert's matrices are in those of ``experts``. Its outputs are part ``part`` of ``parts``, which
    ``alternate`` or follow one another. ``turned``: A is of the outputs, and B of the inputs."""

    expert: int
    experts: int
    part: int
    parts: int
    turned: bool
    alternate: bool = False

    def take(self, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """A and B of the expert: PEFT lays A out by expert, then rank, and B by rank, then expert."""
        first = down.view(self.experts, -1, down.shape[1])[self.expert]
        second = up.view(up.shape[0], -1, self.experts)[:, :, self.expert]
        if self.turned:
            first, second = second.T, first.T
        return first, second[self.part :: self.parts] if self.alternate else second.chunk(self.parts)[self.part]


@dataclass(frozen=True, slots=True)
class AdapterModule:
    """An adapter's matrices for one linear layer. ``down``, ``up``: names of A [rank, inputs], B [outputs, rank].
    ``lookup``: for a table of embeddings, whose inputs are the vocabulary. ``experts``: matrices of so many experts are
    in one: A [experts * rank, inputs], B [outputs, rank * experts]. ``place``: of the one that it is for.
    ``magnitudes``: the name of DoRA's [outputs]; "": it has none.
    """

    down: str
    up: str
    rank: int
    inputs: int
    outputs: int
    scale: float
    lookup: bool = False
    experts: int = 1
    place: ExpertPlace | None = None
    magnitudes: str = ""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter's directory. ``modules``: by our names of linear layers; ``weights``: the file with their matrices."""

    info: AdapterInfo
    weights: Path
    modules: Mapping[str, AdapterModule]


def read_info(path: str, base: Mapping[str, Any] | None, settings: AdapterSettings | None) -> AdapterInfo:
    """See ``kernels.contract.adapters.read_adapter_info``."""
    return read_files(path, base, settings).info


def read_files(
    path: str, base: Mapping[str, Any] | None = None, settings: AdapterSettings | None = None
) -> AdapterFiles:
    """Read an adapter's configuration and the header of its weights. Raises ConfigError that names all problems."""
    directory = Path(path)
    config = _read_config(directory)
    wrong = _refused(config)
    stored = _read_header(directory / WEIGHTS)
    pairs = _pairs(stored, wrong)
    wrong += _frozen(stored, pairs)
    magnitudes = _magnitudes(stored, pairs, config.get("use_dora") is True, wrong)
    rank, alpha = _whole("r", _number(config, "r", 8, wrong), wrong), _number(config, "lora_alpha", 8, wrong)
    ranks, alphas = _pattern(config, "rank_pattern", wrong), _pattern(config, "alpha_pattern", wrong)
    ranks = {name: _whole(f"rank_pattern of {name}", value, wrong) for name, value in ranks.items()}
    modules: dict[str, AdapterModule] = {}
    known_as = _known_as(pairs, config)
    for module, (down, up) in pairs.items():
        wanted = int(_match(ranks, known_as[module], rank))
        (rows, inputs), (outputs, columns) = down[1], up[1]
        experts = 1
        if _STACKED.search(module) and rows == columns and rows % wanted == 0:  # those of all experts in one
            experts, rows, columns = rows // wanted, wanted, wanted
        if rows != columns or rows != wanted:
            wrong.append(f"{module}: A has {rows} rows and B {columns} columns, the rank in {CONFIG} is {wanted}")
        elif rows:
            root = math.sqrt(rows) if config.get("use_rslora") is True else rows
            scale = _match(alphas, known_as[module], alpha) / root
            if plain_name(module) in modules:
                wrong.append(f"{module} is stored under two names")
            lookup = "lora_embedding_" in down[0]
            modules[plain_name(module)] = AdapterModule(
                down[0], up[0], wanted, inputs, outputs, scale, lookup, experts, magnitudes=magnitudes.get(module, "")
            )
    if not pairs:
        wrong.append(f"{WEIGHTS} has no matrices of a linear layer")
    wrong += _beyond(modules, base, settings)
    if wrong:
        more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise ConfigError(f"the adapter in {path} cannot be used: {'; '.join(wrong[:8])}{more}")
    named = config.get("base_model_name_or_path")
    numbers = sum(each.experts * each.rank * (each.inputs + each.outputs) for each in modules.values())
    sizes = sum(_BYTES[each[2]] * math.prod(each[1]) for pair in pairs.values() for each in pair)
    info = AdapterInfo(
        directory.name,
        max(each.rank for each in modules.values()),
        _targets(modules),
        named if isinstance(named, str) else "",
        numbers,
        sizes,
        str(directory),
    )
    return AdapterFiles(info, directory / WEIGHTS, modules)


_Stored = tuple[str, tuple[int, ...], str]
"""A tensor in a file: name, shape and dtype."""


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory; give the directory of an adapter in PEFT's format")
    try:
        if not path.is_file():
            raise FileNotFoundError("no such file")
        with path.open("rb") as file:
            text = file.read(_MAX_CONFIG_BYTES + 1)
        if len(text) > _MAX_CONFIG_BYTES:
            raise ValueError(f"larger than {_MAX_CONFIG_BYTES} bytes")
        config = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); give an adapter in PEFT's format") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is not a JSON object; give an adapter in PEFT's format")
    return config


def _refused(config: Mapping[str, Any]) -> list[str]:
    """What a configuration asks for that is not supported."""
    wrong = [f"{key}: {reason}" for key, reason in _REFUSED.items() if config.get(key)]
    if config.get("peft_type", "LORA") != "LORA":
        wrong.append(f"peft_type {config['peft_type']!r} is not LORA")
    if config.get("bias", "none") != "none":
        wrong.append(f"bias {config['bias']!r}: biases of adapters are not supported")
    return wrong


def _read_header(path: Path) -> dict[str, _Stored]:
    """The tensors of a file by name."""
    if not path.is_file():
        pickled = " (adapter_model.bin is pickled and not loaded, because that can run code)"
        bare = path.with_suffix(".bin").is_file()
        raise ConfigError(f"{path} does not exist{pickled if bare else ''}; give an adapter in PEFT's format")
    try:
        with safe_open(path, framework="numpy") as file:
            names = list(file.keys())
            slices = {name: file.get_slice(name) for name in names}
            shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
            return {name: (name, shapes[name], part.get_dtype()) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is not a complete safetensors file ({error}); download it again") from error


def _pairs(stored: Mapping[str, _Stored], wrong: list[str]) -> dict[str, tuple[_Stored, _Stored]]:
    """A and B by module. Adds to ``wrong`` what is alone or something else."""
    found: dict[tuple[str, bool], dict[str, _Stored]] = {}
    for name, tensor in stored.items():
        match = _NAME.fullmatch(name)
        if match is None and (_BASE.fullmatch(name) or _MAGNITUDES.fullmatch(name)):
            continue
        if match is None:
            wrong.append(f"{name} is not supported: it is not a LoRA matrix of a layer")
        elif len(tensor[1]) != 2 or not all(tensor[1]):
            wrong.append(f"{name} is not a matrix")
        elif tensor[2] not in _BYTES:
            wrong.append(f"{name} is stored as {tensor[2]}, not as one of {', '.join(_BYTES)}")
        else:
            pair = found.setdefault((_module(match[1]), match[3] is not None), {})
            letter = match[2] or match[3]
            if letter in pair:
                wrong.append(f"{name} is stored under two names")
            pair[letter] = tensor
    wrong += [f"{module} has only one of A and B" for (module, _), pair in found.items() if len(pair) != 2]
    wrong += [f"{module} is stored under two names" for module, lookup in found if lookup and (module, False) in found]
    return {module: (pair["A"], pair["B"]) for (module, _), pair in found.items() if len(pair) == 2}


def _module(name: str) -> str:
    """The name of a module in the model. Where several parameters of one module are changed, as of stacked experts,
    PEFT wraps it once for each, and they differ by these wrappers alone."""
    return name if _STACKED.search(name) else name.replace(".base_layer", "")


def _frozen(stored: Mapping[str, _Stored], pairs: Mapping[str, tuple[_Stored, _Stored]]) -> Iterator[str]:
    """What is wrong with the model's own weights, which PEFT writes beside the matrices of embeddings and outputs. They
    are not read."""
    for name, tensor in stored.items():
        if match := _BASE.fullmatch(name):
            pair = pairs.get(match[1])
            shape = () if pair is None else (pair[1][1][0], pair[0][1][1])
            if tensor[1] not in (shape, shape[::-1]):
                yield f"{name} is not supported: no LoRA matrices of its shape are beside it"


def _magnitudes(
    stored: Mapping[str, _Stored], pairs: Mapping[str, tuple[_Stored, _Stored]], expected: bool, wrong: list[str]
) -> dict[str, str]:
    """The names of DoRA's magnitudes by module, one for each output."""
    result: dict[str, str] = {}
    for name, tensor in stored.items():
        if (match := _MAGNITUDES.fullmatch(name)) is None:
            continue
        module = _module(match[1])
        result[module] = name
        outputs = pairs[module][1][1][0] if module in pairs else 0
        if not expected:
            wrong.append(f"{name} belongs to DoRA, but use_dora in {CONFIG} is not true")
        elif not outputs or math.prod(tensor[1]) != outputs or tensor[2] not in _BYTES:
            wrong.append(f"{name} must have {outputs} values, one for each output of its matrices")
        elif "lora_embedding_" in pairs[module][0][0]:
            wrong.append(f"{name}: DoRA of embeddings is not supported")
    wrong += [
        f"{module} has no magnitudes, but use_dora is true" for module in pairs if expected and module not in result
    ]
    return result


def _targets(modules: Mapping[str, AdapterModule]) -> tuple[str, ...]:
    dora = {DORA} if any(each.magnitudes for each in modules.values()) else set()
    return tuple(sorted({target_of(module) for module in modules} | dora))


def _number(config: Mapping[str, Any], key: str, default: float, wrong: list[str]) -> float:
    value = config.get(key, default)
    return value if _is_number(value, key, wrong) else default


def _whole(key: str, rank: float, wrong: list[str]) -> int:
    if rank != int(rank):
        wrong.append(f"{key} is {rank!r}, not a whole number")
    return max(1, int(rank))


def _is_number(value: object, key: str, wrong: list[str]) -> bool:
    good = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e6
    if not good:
        wrong.append(f"{key} is {value!r}, not a number above 0")
    return good


def _known_as(modules: Iterable[str], config: Mapping[str, Any]) -> dict[str, str]:
    """The names that patterns have for modules: of stacked experts, those of their parameters, which files leave out.
    PEFT wraps a module once for each of its parameters, in their order, so that the first one is innermost."""
    result, wrapped = {module: module for module in modules}, dict[str, list[str]]()
    for module in filter(_STACKED.search, result):
        wrapped.setdefault(module.replace(".base_layer", ""), []).append(module)
    given = config.get("target_parameters")
    targets = tuple(f".{each}" for each in (given if isinstance(given, list) else ("gate_up_proj", "down_proj")))
    for plain, found in wrapped.items():
        parameters = [name for name in _PARAMETERS if f".{plain}.{name}".endswith(targets)]
        if len(found) == len(parameters):
            innermost_first = sorted(found, key=len, reverse=True)
            result |= {module: f"{plain}.{name}" for module, name in zip(innermost_first, parameters, strict=True)}
    return result


def _pattern(config: Mapping[str, Any], key: str, wrong: list[str]) -> dict[str, float]:
    """Numbers by the ends of module names. Regular expressions of PEFT are taken where they name one end alone."""
    given = config.get(key) or {}
    if not isinstance(given, dict):
        wrong.append(f"{key} is not an object")
        return {}
    result = {}
    for key_of_peft, value in given.items():
        name = key_of_peft.removeprefix("^") if key_of_peft.startswith(f"^{_ANY_BEFORE}") else key_of_peft
        inner, name = name.startswith(_ANY_BEFORE), name.removeprefix(_ANY_BEFORE)
        if not _PATTERN.fullmatch(name) or "\\" in name.replace("\\.", ""):
            wrong.append(f"{key}: {name!r} is a regular expression; write the names of modules out")
        elif _is_number(value, f"{key} of {name}", wrong):
            end = name.removesuffix("$").replace("\\.", ".")
            result[f".{end}" if inner else end] = value
    return result


def _match(pattern: Mapping[str, float], module: str, default: float) -> float:
    """The number of the first name of ``_pattern`` that is the module's, or its end: ^: the whole name; a leading dot:
    only an end."""
    for name, value in pattern.items():
        ends = name if name.startswith(".") else f".{name}"
        if module == name.removeprefix("^") or module.endswith(ends):
            return value
    return default


def _beyond(
    modules: Mapping[str, AdapterModule], base: Mapping[str, Any] | None, settings: AdapterSettings | None
) -> list[str]:
    """What is beyond the limits of ``settings``, or no layer of the model ``base``."""
    wrong = []
    layers = None if base is None else base.get("num_hidden_layers")
    if isinstance(layers, int):
        numbers = {int(found[1]) for module in modules if (found := re.search(r"\.layers\.(\d{1,6})\.", module))}
        if numbers and max(numbers) >= layers:
            wrong.append(f"it changes layer {max(numbers)}, but the model has {layers} layers")
    if settings is not None:
        rank = max((each.rank for each in modules.values()), default=0)
        if rank > settings.max_rank:
            wrong.append(f"its rank {rank} is larger than --max-lora-rank {settings.max_rank}; start with {rank}")
        targets = sorted(set(_targets(modules)) - set(settings.targets))
        if ALL_TARGETS in settings.targets:  # of linear layers in the middle
            apart = {target_of(module) for module, each in modules.items() if each.lookup}
            targets = [target for target in targets if target in {*apart, "lm_head", EXPERTS, LATENT, DORA}]
        if targets:
            wrong.append(f"it changes {', '.join(targets)}, which --lora-target-modules does not include")
    return wrong
