"""LoRA adapters in PEFT's format, as files beside a checkpoint and merged into its weights."""

from __future__ import annotations

import json
import math
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from kernels.contract.adapters import AdapterSettings
from kernels.contract.step import SlotSampling
from kernels.weights.tensors import Role
from tests.kits.declared import declared

__all__ = ["adapted_modules", "assert_rows_use_their_adapters", "logprobs_of", "merged", "save_adapter"]

_ADAPTED = (Role.PROJECTION, Role.DOWN)


def adapted_modules(path: Path, leave: tuple[str, ...] = ()) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of a model's linear layers, without those whose names contain one of ``leave``."""
    return {
        spec.module: spec.matrix
        for spec in declared(path).values()
        if spec.role in _ADAPTED and not any(part in spec.module for part in leave)
    }


def save_adapter(directory: Path, modules: dict[str, tuple[int, int]], seed: int, rank: int = 3, **config: Any) -> Path:
    """An adapter for ``modules`` (outputs, inputs). ``config``: over adapter_config.json; ``rank_pattern`` holds."""
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none"} | config
    tensors = {}
    for module, (outputs, inputs) in modules.items():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{module} {seed}".encode()))
        own = _by_end(config.get("rank_pattern", {}), module, rank)
        name = f"base_model.model.{module}"
        tensors[f"{name}.lora_A.weight"] = torch.randn(own, inputs, generator=generator)
        tensors[f"{name}.lora_B.weight"] = torch.randn(outputs, own, generator=generator) * 0.1
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def _by_end(pattern: dict[str, Any], module: str, default: Any) -> Any:
    return next((value for end, value in pattern.items() if module.endswith(end)), default)


def merged(path: Path, target: Path, adapter: Path | None) -> Path:
    """The model with an adapter in its weights: W + alpha / r * B @ A, or alpha / sqrt(r) with rsLoRA."""
    shutil.copytree(path, target)
    tensors = load_file(path / "model.safetensors")
    if adapter is not None:
        config = json.loads((adapter / "adapter_config.json").read_text())
        stored = load_file(adapter / "adapter_model.safetensors")
        for name in [name for name in stored if name.endswith(".lora_A.weight")]:
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            low, high = stored[name], stored[name.replace("lora_A", "lora_B")]
            alpha = _by_end(config.get("alpha_pattern", {}), module, config["lora_alpha"])
            scale = alpha / (math.sqrt(len(low)) if config.get("use_rslora") else len(low))
            weight = tensors[f"{module}.weight"]
            tensors[f"{module}.weight"] = (weight.float() + scale * high @ low).to(weight.dtype)
    save_file(tensors, target / "model.safetensors")
    return target


def logprobs_of(result, rows, vocab):
    ids = np.frombuffer(result.top_ids, np.int32).reshape(rows, vocab)
    found = np.empty((rows, vocab), np.float32)
    np.put_along_axis(found, ids, np.frombuffer(result.top_logprobs, np.float32).reshape(rows, vocab), 1)
    return found


def assert_rows_use_their_adapters(path, tmp_path, drive, prompts, vocab, atol, steps=12, leave=(), **options):
    """Run requests of all adapters together, in chunks and as decodes, and compare each with its merged model alone.
    atol: of log-probabilities at every step, after the same tokens. Returns the driver of the combined requests.
    """
    sampling = SlotSampling(temperature=0.0, logprobs=vocab)
    modules = adapted_modules(path, leave)
    some = dict(list(modules.items())[1:])  # in the second, a layer of the first has no adapter
    ends = {"o_proj": 2, "down_proj": 1}
    extra = {"use_rslora": True, "rank_pattern": ends, "alpha_pattern": {"q_proj": 3.0}}
    files = {1: save_adapter(tmp_path / "first", modules, 1), 2: save_adapter(tmp_path / "other", some, 2, **extra)}
    driver = drive(path, adapters=AdapterSettings(max_rank=4, max_batch=2), **options)
    for index, file in files.items():
        driver.runner.load_adapter(index, str(file))
    requests = {slot: (adapter, prompts(9 + 8 * slot, seed=slot)[0]) for slot, adapter in enumerate((1, 0, 2), start=1)}
    together: dict[int, list] = {slot: [] for slot in requests}
    for slot, (adapter, prompt) in requests.items():
        driver.admit(slot, prompt, sampling=sampling, adapter=adapter)
    driver.step([(slot, 5) for slot in requests])
    for _ in range(steps):
        rows = [(slot, driver.pending(slot)) for slot in requests]
        found = logprobs_of(driver.step(rows), len(rows), vocab)
        order = sorted(rows, key=lambda row: row[1] != 1)
        for (slot, _), logprobs in zip(order, found, strict=True):
            together[slot].append(logprobs)
    base = merged(path, tmp_path / "merged-0", None)
    for slot, (adapter, prompt) in requests.items():
        target = tmp_path / f"merged-{adapter}"
        alone = drive(target if target.exists() else merged(path, target, files.get(adapter)), **options)
        plain = drive(base, **options)
        tokens = driver.tokens[slot]
        for number, logprobs in enumerate(together[slot]):
            known = len(prompt) + number
            if number not in (0, 1, steps - 1):
                continue
            off = []
            for one in (alone, plain):
                one.admit(1, tokens[:known], sampling=sampling)
                off.append(np.abs(logprobs - logprobs_of(one.step([(1, known)]), 1, vocab)[0]).max())
                one.release(1)
                one.step([])
            assert off[0] <= atol, (slot, number, off)
            assert adapter == 0 or off[1] > 4 * off[0], (slot, number, off)  # far from the model without it
    return driver
