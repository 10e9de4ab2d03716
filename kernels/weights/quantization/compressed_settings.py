"""``quantization_config`` of ``quant_method: compressed-tensors``, parsed by the package of that name.

The package checks the settings, resolves presets and defaults, and matches modules with targets. Two settings that it
does not know are removed before: ``activation_use_clip`` of a group, which Ascend's tools write, and the values of
``actorder`` (group, dynamic, true) that packages after 0.19 refuse and checkpoints still have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch

from kernels.contract.errors import ConfigError
from kernels.weights.quantization.patterns import Patterns

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs

__all__ = ["Group", "Settings", "import_package", "plain"]

_EXPERTS = "MoEGMM"
"""The target by which Ascend's tools mean all experts."""
_PATTERN = "re:"
_STORED_ORDERS = ("group", "dynamic")
_TOOL = "use a checkpoint that llm-compressor wrote"


@dataclass(frozen=True)
class Group:
    """Modules with the same quantization. ``format``: a name of compressed_tensors.config.CompressionFormat.
    ``ordered``: ``weight_g_idx`` assigns inputs to groups. ``clips``: ``activation_use_clip``."""

    name: str
    format: str
    weights: QuantizationArgs
    inputs: QuantizationArgs | None
    ordered: bool
    clips: bool

    @property
    def type(self) -> str:
        """int or float."""
        return plain(self.weights.type)

    @property
    def strategy(self) -> str:
        """Which part of a weight shares a scale."""
        return plain(self.weights.strategy)


def plain(value: object) -> str:
    """A member of one of the package's enumerations as it is written in config.json."""
    return str(getattr(value, "value", value))


def import_package() -> tuple[Any, Any, Any]:
    """QuantizationConfig, TransformConfig and the module ``match`` of the package. Raises ConfigError if it is not
    installed."""
    try:
        from compressed_tensors.quantization import QuantizationConfig
        from compressed_tensors.transform import TransformConfig
        from compressed_tensors.utils import match
    except ImportError as error:
        raise ConfigError(
            "this checkpoint is quantized by compressed-tensors, whose settings are read by the package of that "
            f"name ({error}); install it: pip install 'troupe-llm[compressed-tensors]'"
        ) from error
    return QuantizationConfig, TransformConfig, match


class Settings:
    """The quantization of each module. Raises ConfigError, naming the field, also if the package is not installed."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        config, transforms, self._match = import_package()
        rest, ordered, clips = _taken_off(settings)
        result = _validated(config, rest, "")
        _check_transforms(transforms, settings.get("transform_config"))
        sparsity = settings.get("sparsity_config") or {}
        if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
            raise ConfigError(
                "quantization_config: sparse weights are not read; use a checkpoint without sparsity_config"
            )
        if not result.config_groups and result.kv_cache_scheme is None:
            raise ConfigError(f"quantization_config: config_groups is empty; {_TOOL}")
        self.groups: list[Group] = []
        self._targets: dict[str, Group] = {}
        patterns = Patterns()
        compared: dict[str, Callable[[str], bool]] = {}
        for name, scheme in result.config_groups.items():
            where = f"quantization_config: config_groups.{name}"
            if scheme.weights is None:
                raise ConfigError(f"{where}.weights is missing: inputs alone are not rounded; {_TOOL}")
            if scheme.output_activations is not None:
                raise ConfigError(f"{where}.output_activations: outputs are not rounded; use a checkpoint without it")
            form = plain(scheme.format or result.format)
            group = Group(name, form, scheme.weights, scheme.input_activations, name in ordered, name in clips)
            self.groups.append(group)
            self._targets |= dict.fromkeys(scheme.targets, group)
            compared |= _compared(patterns, scheme.targets, f"config_groups.{name}.targets")
        ignored = result.ignore or []
        # Some checkpoints list thousands of full names: these are looked up, and only patterns are compared.
        self._ignored = frozenset(ignored)
        self._ignore = [target for target in ignored if _is_wide(target)]
        self._ignore_patterns = _compared(patterns, ignored, "ignore")
        self._wide = [target for target in self._targets if _is_wide(target)]
        self._patterns = dict(sorted(compared.items()))
        self._linear = torch.nn.Linear(1, 1, device="meta")

    def group_of(self, module: str) -> Group | None:
        """The group of a module; None: it is not quantized. Full names win over patterns, both over ``Linear``."""
        if module in self._ignored or self._match.is_match(module, self._linear, self._ignore):
            return None
        if any(_holds(target, module) for target in self._ignore):
            return None
        if any(matches(module) for matches in self._ignore_patterns.values()):
            return None
        if module in self._targets:
            return self._targets[module]
        result = self._match.match_targets(module, self._linear, self._wide)
        named = [target for target in result if self._match.match_name(module, target)]
        matched = [target for target, matches in self._patterns.items() if matches(module)]
        held = [target for target in self._wide if _holds(target, module)]
        return next((self._targets[target] for target in (*named, *matched, *held, *result)), None)


def _is_wide(target: str) -> bool:
    """Whether a target that is not a pattern may match several modules: the name of a class has no dots."""
    return not target.startswith(_PATTERN) and ("." not in target or target.endswith(".experts"))


def _compared(patterns: Patterns, targets: Iterable[str], field: str) -> dict[str, Callable[[str], bool]]:
    """A test for each target that is a pattern: whether it matches a module. Raises ConfigError."""
    result = [target for target in targets if target.startswith(_PATTERN)]
    return {target: patterns.match(target.removeprefix(_PATTERN), field) for target in result}


def _holds(target: str, module: str) -> bool:
    """Whether a target that names all experts of a layer includes ``module``."""
    if target == _EXPERTS:
        return ".experts." in module
    return target.endswith(".experts") and module.startswith(f"{target}.")


def _taken_off(settings: Mapping[str, Any]) -> tuple[dict[str, Any], set[str], set[str]]:
    """The settings that the package reads, the groups whose inputs have an order, and the groups that clip inputs."""
    rest = dict(settings)
    ordered: set[str] = set()
    clips: set[str] = set()
    _check_size("kv_cache_scheme", rest.get("kv_cache_scheme"))
    groups = rest.get("config_groups")
    if not isinstance(groups, dict):
        return rest, ordered, clips
    groups = {name: dict(group) if isinstance(group, dict) else group for name, group in groups.items()}
    rest["config_groups"] = groups
    for name, group in groups.items():
        if not isinstance(group, dict):
            continue
        for part in ("weights", "input_activations", "output_activations"):
            _check_size(f"config_groups.{name}.{part}", group.get(part))
        clip = group.pop("activation_use_clip", False)
        if not isinstance(clip, bool):
            raise ConfigError(
                f"quantization_config: config_groups.{name}.activation_use_clip must be true or false, and is {clip!r}"
            )
        if clip:
            clips.add(name)
        weights = group.get("weights")
        if isinstance(weights, dict):
            order = weights.get("actorder")
            if order is True or (isinstance(order, str) and order.lower() in _STORED_ORDERS):
                ordered.add(name)
                group["weights"] = {field: value for field, value in weights.items() if field != "actorder"}
    return rest, ordered, clips


def _check_size(where: str, numbers: object) -> None:
    """Check the type of a group_size, which the package compares without a check. Raises ConfigError."""
    size = numbers.get("group_size") if isinstance(numbers, dict) else None
    if not isinstance(size, int | float | None):
        raise ConfigError(f"quantization_config: {where}.group_size must be a whole number, and is {size!r}; {_TOOL}")


def _validated(model: Any, settings: object, where: str) -> Any:
    """``settings`` as an object of the package. Raises ConfigError."""
    from pydantic import ValidationError

    try:
        return model.model_validate(settings)
    except ValidationError as error:
        problem = "; ".join(
            dict.fromkeys(_message(result, where) for result in error.errors() if "list[str]" not in result["loc"])
        )
        raise ConfigError(f"quantization_config: {problem or error}; {_TOOL}") from error
    except (AttributeError, KeyError, NotImplementedError, TypeError, ValueError) as error:  # of its own validators
        what = where.removesuffix(".") or "it"
        problem = f"compressed-tensors {version('compressed-tensors')} refuses {what}: {error}"
        raise ConfigError(f"quantization_config: {problem}; {_TOOL}, or another version of the package") from error


def _message(error: Mapping[str, Any], where: str) -> str:
    """One error of the package as a sentence with the field's path. A group may also be the name of a preset; which of
    the two the package tried is part of its path."""
    path = ".".join(str(part) for part in error["loc"] if "QuantizationScheme" not in str(part))
    return f"{(where + path).removesuffix('.')}: {error['msg'].removeprefix('Value error, ').splitlines()[0]}"


def _check_transforms(model: Any, config: object) -> None:
    """Refuse transforms of inputs, outputs and caches, which would have to be computed. Transforms that are already
    merged into weights need nothing. Raises ConfigError."""
    if not config:
        return
    for name, scheme in _validated(model, config, "transform_config.").config_groups.items():
        for applied in scheme.apply:
            if applied.is_online():
                raise ConfigError(
                    f"quantization_config: transform_config has {name}, which rotates by {applied.location} while the "
                    "model runs: this is not read; use a checkpoint whose rotations are in its weights alone"
                )
