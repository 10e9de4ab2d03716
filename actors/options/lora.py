"""The arguments of LoRA adapters."""

from __future__ import annotations

import json
from typing import Annotated, Literal

import msgspec

from actors.options.declaration import ArgumentSpec
from actors.options.errors import ArgumentError
from actors.options.expert_placement import ExpertPlacementArguments

__all__ = ["AdapterPath", "LoraArguments", "adapter_path", "is_adapter_name"]


class AdapterPath(msgspec.Struct, frozen=True):
    """An entry of --lora-paths."""

    name: str
    path: str
    pinned: bool = False


_KEYS = {"lora_name": "name", "name": "name", "lora_path": "path", "path": "path", "pinned": "pinned"}


def is_adapter_name(name: str) -> bool:
    """Whether requests, metrics and logs can carry a name."""
    return bool(name.strip()) and name.isprintable()


def adapter_path(word: str) -> AdapterPath:
    """``name=path``, a path that is also the name, or a JSON object with lora_name, lora_path and pinned, or with name
    and path. Raises ArgumentError."""
    if not word.startswith("{"):
        name, mark, path = word.partition("=")
        result = AdapterPath(name, path if mark else name)
    else:
        try:
            given = json.loads(word)
        except (ValueError, RecursionError):
            raise ArgumentError(f"{word[:80]!r} is no JSON object") from None
        if "base_model_name" in given:
            raise ArgumentError("base_model_name of an adapter is always the served model; leave it out")
        if unknown := sorted(set(given) - set(_KEYS)):
            raise ArgumentError(f"an adapter has no {unknown[0][:64]!r}; known are lora_name, lora_path and pinned")
        try:
            result = msgspec.convert({_KEYS[key]: value for key, value in given.items()}, AdapterPath)
        except msgspec.ValidationError as error:
            raise ArgumentError(f"{word[:80]!r} is no adapter ({error})") from None
    if not (result.name and result.path):
        raise ArgumentError(f"{word[:80]!r} needs a name and a path, as in pirate=adapters/pirate")
    if not is_adapter_name(result.name):
        raise ArgumentError(f"{result.name[:80]!r} is no name; take one of printable characters")
    if "://" in result.path:
        raise ArgumentError(f"{result.path[:80]!r} is a URL; give owner/name of the hub, or a directory")
    return result


class LoraArguments(ExpertPlacementArguments, frozen=True, kw_only=True):
    """The arguments of LoRA adapters."""

    enable_lora: Annotated[
        bool,
        ArgumentSpec(
            group="LoRA",
            help="Reserve memory for LoRA adapters that are loaded at run time; --lora-paths implies it.",
        ),
    ] = False

    lora_paths: Annotated[
        tuple[str, ...] | None,
        ArgumentSpec(
            group="LoRA",
            aliases=("lora-modules",),
            default_text="none",
            metavar="NAME=PATH",
            help="Adapters to load at the start, directories in PEFT's format or repositories of the Hugging Face hub "
            "(owner/name, or owner/name@revision): name=path, a path that is also the name, or a JSON object like "
            '{"lora_name": "pirate", "lora_path": "adapters/pirate", "pinned": true}. A pinned adapter is never '
            "unloaded to make room for another. The included model has json, pirate and poet.",
        ),
    ] = None

    max_lora_rank: Annotated[
        int | None,
        ArgumentSpec(
            group="LoRA",
            default_text="the largest of --lora-paths, else 16",
            minimum=1,
            maximum=1024,
            metavar="RANK",
            help="Largest rank of an adapter. Every adapter slot reserves memory for it in every layer.",
        ),
    ] = None

    lora_target_modules: Annotated[
        tuple[str, ...] | None,
        ArgumentSpec(
            group="LoRA",
            default_text="those of --lora-paths, else all",
            metavar="NAMES",
            help="Layers that adapters may change, by the last part of their names (q_proj), or all linear layers. all "
            "does not include embed_tokens, lm_head, experts, kv_b_proj (of latent attention) and dora (the magnitudes "
            "of DoRA): name them beside it. Other layers cost nothing.",
        ),
    ] = None

    max_loras_per_batch: Annotated[
        int,
        ArgumentSpec(
            group="LoRA",
            aliases=("max-loras",),
            minimum=1,
            maximum=256,
            metavar="N",
            help="Number of different adapters in a batch, which is the number of adapter slots on the device. "
            "Requests of others wait; the longest-waiting adapter gets the next free slot.",
        ),
    ] = 8

    max_loaded_loras: Annotated[
        int | None,
        ArgumentSpec(
            group="LoRA",
            aliases=("max-cpu-loras",),
            default_text="any number",
            minimum=1,
            maximum=10**6,
            metavar="N",
            help="Number of adapters that requests may name. Loading one more unloads another, by "
            "--lora-eviction-policy: it takes no new requests, and leaves host memory when those that run have ended.",
        ),
    ] = None

    lora_backend: Annotated[
        Literal["auto", "torch", "torch_native", "native", "triton", "csgmv", "ascend"],
        ArgumentSpec(
            group="LoRA",
            help="Implementation of the matrix products of adapters. auto: that of the device, which is native on "
            "cpu, triton or csgmv (the same kernels) on cuda, and ascend (plain torch) on npu. torch, torch_native: "
            "plain torch on every device, which is slower.",
        ),
    ] = "auto"

    lora_eviction_policy: Annotated[
        Literal["lru", "fifo"],
        ArgumentSpec(
            group="LoRA",
            help="Which adapter --max-loaded-loras unloads for a new one: the least recently used (lru), or the first "
            "loaded (fifo). Slots on the device are always reused in least recently used order.",
        ),
    ] = "lru"
