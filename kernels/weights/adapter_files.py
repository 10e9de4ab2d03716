"""LoRA adapters in the format of Hugging Face's PEFT: ``adapter_config.json`` beside ``adapter_model.safetensors``.

For a linear layer with the weight W [outputs, inputs], an adapter has A [rank, inputs] and B [outputs, rank]; the layer
becomes ``x @ (W + scale * B @ A).T``. ``scale`` is alpha / rank, or alpha / sqrt(rank) (Kalajdzievski, arXiv
2312.03732). No torch: the engine's process reads configurations and the headers of files.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from kernels.contract.adapters import ALL_TARGETS, AdapterInfo, AdapterSettings
from kernels.contract.errors import ConfigError
from kernels.weights.wrapped import plain_name

__all__ = ["AdapterFiles", "AdapterModule", "read_files", "read_info"]

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_BYTES = {"F16": 2, "BF16": 2, "F32": 4}
_MAX_CONFIG_BYTES = 1 << 20
_NAME = re.compile(r"base_model\.model\.([\w.]+)\.lora_([AB])(?:\.default)?\.weight")
_PATTERN = re.compile(r"\^?[\w.\\]+\$?")
_REFUSED = {  # keys of adapter_config.json whose values, unless empty, describe what is not built
    "use_dora": "DoRA is not built: merge the adapter into the weights",
    "modules_to_save": "whole modules beside the low-rank ones are not built",
    "fan_in_fan_out": "weights that are stored transposed are not built",
    "layer_replication": "repeated layers are not built",
    "trainable_token_indices": "trained tokens are not built",
    "target_parameters": "parameters outside of linear layers are not built",
    "alora_invocation_tokens": "adapters that begin inside of a prompt are not built",
    "lora_bias": "biases of adapters are not built",
}


@dataclass(frozen=True, slots=True)
class AdapterModule:
    """An adapter's matrices for one linear layer. ``down``, ``up``: names of A [rank, inputs], B [outputs, rank]."""

    down: str
    up: str
    rank: int
    inputs: int
    outputs: int
    scale: float


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
    pairs = _pairs(_read_header(directory / WEIGHTS), wrong)
    rank, alpha = _number(config, "r", 8, wrong), _number(config, "lora_alpha", 8, wrong)
    ranks, alphas = _pattern(config, "rank_pattern", wrong), _pattern(config, "alpha_pattern", wrong)
    modules: dict[str, AdapterModule] = {}
    for module, (down, up) in pairs.items():
        wanted = int(_match(ranks, module, rank))
        (rows, inputs), (outputs, columns) = down[1], up[1]
        if rows != columns or rows != wanted:
            wrong.append(f"{module}: A has {rows} rows and B {columns} columns, the rank in {CONFIG} is {wanted}")
        elif rows:
            root = math.sqrt(rows) if config.get("use_rslora") is True else rows
            scale = _match(alphas, module, alpha) / root
            if plain_name(module) in modules:
                wrong.append(f"{module} is there under two names")
            modules[plain_name(module)] = AdapterModule(down[0], up[0], rows, inputs, outputs, scale)
    if not pairs:
        wrong.append(f"{WEIGHTS} has no matrices of a linear layer")
    wrong += _beyond(modules, base, settings)
    if wrong:
        more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise ConfigError(f"the adapter in {path} cannot be used: {'; '.join(wrong[:8])}{more}")
    named = config.get("base_model_name_or_path")
    numbers = sum(each.rank * (each.inputs + each.outputs) for each in modules.values())
    sizes = sum(_BYTES[each[2]] * math.prod(each[1]) for pair in pairs.values() for each in pair)
    info = AdapterInfo(
        directory.name,
        max(each.rank for each in modules.values()),
        tuple(sorted({module.rpartition(".")[2] for module in modules})),
        named if isinstance(named, str) else "",
        numbers,
        sizes,
    )
    return AdapterFiles(info, directory / WEIGHTS, modules)


_Stored = tuple[str, tuple[int, int], str]
"""A matrix in a file: name, shape and dtype."""


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
    """What a configuration asks for that is not built."""
    wrong = [f"{key}: {reason}" for key, reason in _REFUSED.items() if config.get(key)]
    if config.get("peft_type", "LORA") != "LORA":
        wrong.append(f"peft_type {config['peft_type']!r} is not LORA")
    if config.get("bias", "none") != "none":
        wrong.append(f"bias {config['bias']!r}: biases of adapters are not built")
    return wrong


def _read_header(path: Path) -> dict[str, _Stored]:
    """The tensors of a file by name; shapes of others than matrices are (0, 0)."""
    if not path.is_file():
        pickled = " (adapter_model.bin is pickled and not loaded, because that can run code)"
        bare = path.with_suffix(".bin").is_file()
        raise ConfigError(f"{path} does not exist{pickled if bare else ''}; give an adapter in PEFT's format")
    try:
        with safe_open(path, framework="numpy") as file:
            names = list(file.keys())
            slices = {name: file.get_slice(name) for name in names}
            shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
            return {
                name: (name, shapes[name] if len(shapes[name]) == 2 else (0, 0), part.get_dtype())
                for name, part in slices.items()
            }
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is not a whole safetensors file ({error}); download it again") from error


def _pairs(stored: Mapping[str, _Stored], wrong: list[str]) -> dict[str, tuple[_Stored, _Stored]]:
    """A and B by module. Adds to ``wrong`` what is alone or something else."""
    found: dict[str, dict[str, _Stored]] = {}
    for name, tensor in stored.items():
        match = _NAME.fullmatch(name)
        if match is None:
            wrong.append(f"{name} is no matrix of a linear layer, which is all that is built")
        elif not all(tensor[1]):
            wrong.append(f"{name} is not a matrix")
        elif tensor[2] not in _BYTES:
            wrong.append(f"{name} is stored as {tensor[2]}, not as one of {', '.join(_BYTES)}")
        else:
            pair = found.setdefault(match[1].replace(".base_layer", ""), {})
            if match[2] in pair:
                wrong.append(f"{name} is there under two names")
            pair[match[2]] = tensor
    wrong += [f"{module} has only one of A and B" for module, pair in found.items() if len(pair) != 2]
    return {module: (pair["A"], pair["B"]) for module, pair in found.items() if len(pair) == 2}


def _number(config: Mapping[str, Any], key: str, default: float, wrong: list[str]) -> float:
    value = config.get(key, default)
    return value if _is_number(value, key, wrong) else default


def _is_number(value: object, key: str, wrong: list[str]) -> bool:
    good = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e6
    if not good:
        wrong.append(f"{key} is {value!r}, not a number above 0")
    return good


def _pattern(config: Mapping[str, Any], key: str, wrong: list[str]) -> dict[str, float]:
    """Numbers by the ends of module names. Regular expressions of PEFT are taken where they name one end alone."""
    given = config.get(key) or {}
    if not isinstance(given, dict):
        wrong.append(f"{key} is not an object")
        return {}
    result = {}
    for name, value in given.items():
        if not _PATTERN.fullmatch(name) or "\\" in name.replace("\\.", ""):
            wrong.append(f"{key}: {name!r} is a regular expression; write the names of modules out")
        elif _is_number(value, f"{key} of {name}", wrong):
            result[name.removesuffix("$").replace("\\.", ".")] = value
    return result


def _match(pattern: Mapping[str, float], module: str, default: float) -> float:
    for name, value in pattern.items():
        whole = name.startswith("^")
        if module == name.removeprefix("^") or (not whole and module.endswith(f".{name}")):
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
            wrong.append(f"it changes layer {max(numbers)}, and the model has {layers} layers")
    if settings is not None:
        rank = max((each.rank for each in modules.values()), default=0)
        if rank > settings.max_rank:
            wrong.append(f"its rank is {rank}, more than --max-lora-rank {settings.max_rank}")
        targets = sorted({module.rpartition(".")[2] for module in modules} - set(settings.targets))
        if targets and ALL_TARGETS not in settings.targets:
            wrong.append(f"it changes {', '.join(targets)}, which --lora-target-modules does not name")
    return wrong
