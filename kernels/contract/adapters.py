"""LoRA adapters (Hu et al., arXiv 2106.09685), as plain data for both sides of the process boundary. No torch.

Adapters are directories in the format of Hugging Face's PEFT: ``adapter_config.json`` and
``adapter_model.safetensors``. The engine reads what they are with ``read_adapter_info`` and numbers them from 1; the
runner reads their weights with ``Runner.load_adapter``. ``Admission.adapter`` is such a number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, cast

import msgspec

__all__ = [
    "ADAPTER_FILES",
    "ALL_TARGETS",
    "DORA",
    "EXPERTS",
    "LATENT",
    "AdapterFile",
    "AdapterInfo",
    "AdapterSettings",
    "is_named",
    "is_target",
    "read_adapter_info",
    "target_of",
]

ADAPTER_FILES = "adapter_config.json", "adapter_model.safetensors"
"""The files that are downloaded from an adapter's repository."""

ALL_TARGETS = "all"
"""In ``AdapterSettings.targets``: every linear layer but the output, those of experts and ``LATENT``. Others
take room and time, and are named."""

EXPERTS = "experts"
"""In ``AdapterSettings.targets``: all linear layers of the experts that tokens choose."""

DORA = "dora"
"""In ``AdapterSettings.targets``: the magnitudes of DoRA, which scale what a layer gives (arXiv 2402.09353)."""

LATENT = "kv_b_proj"
"""In ``AdapterSettings.targets``: the product that makes keys and values of latent vectors."""

_READER = "kernels.weights.adapter_files"


def is_named(module: str, targets: Sequence[str]) -> bool:
    """Whether ``AdapterSettings.targets`` name a module of the model."""
    return target_of(module) in targets


def target_of(module: str) -> str:
    """What ``AdapterSettings.targets`` call a module."""
    return EXPERTS if ".experts." in f".{module}." else module.rpartition(".")[2]


def is_target(module: str, targets: Sequence[str]) -> bool:
    """Whether a linear layer is one of ``AdapterSettings.targets``."""
    return ALL_TARGETS in targets or is_named(module, targets)


class AdapterSettings(msgspec.Struct, frozen=True):
    """What a runner makes room for when the model is loaded.

    targets: last parts of module names (``q_proj``), ``all``, ``experts``, ``dora``; layers of others are made without
    adapters. plain: products of adapters are plain torch, not kernels of the device.
    """

    max_rank: int = 16
    max_batch: int = 8  # adapters that lie on the device and may be used by one step
    targets: tuple[str, ...] = (ALL_TARGETS,)
    max_loaded: int = 0  # adapters in the worker's memory, on the host; 0: any number
    plain: bool = False


class AdapterFile(msgspec.Struct, frozen=True):
    """An adapter to load: ``path`` of a PEFT directory, and the name that requests give."""

    name: str
    path: str


class AdapterInfo(msgspec.Struct, frozen=True):
    """What an adapter's directory says about it.

    name: of the directory, whose path is ``path``. rank: the largest of its modules. targets: last parts of the names
    of the modules it changes, sorted, and ``experts`` and ``dora``. base_model: the model that it was trained for, as
    its configuration names it; may be empty. parameters: numbers in its file. stored_bytes: of its tensors.
    """

    name: str
    rank: int
    targets: tuple[str, ...]
    base_model: str = ""
    parameters: int = 0
    stored_bytes: int = 0
    path: str = ""


def read_adapter_info(
    path: str, base: Mapping[str, Any] | None = None, settings: AdapterSettings | None = None
) -> AdapterInfo:
    """Read ``adapter_config.json`` and the header of ``adapter_model.safetensors``, no weights.

    base: config.json of the model, whose layers are then compared. settings: limits that the adapter must keep. Raises
    one ConfigError that names everything that is wrong; sizes are compared with the model's in ``load_adapter``.
    """
    return cast(AdapterInfo, import_module(_READER).read_info(path, base, settings))
