"""LoRA adapters in PEFT's format, as files beside a checkpoint and merged into its weights."""

from __future__ import annotations

import json
import math
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from kernels.contract.adapters import AdapterSettings, target_of
from kernels.contract.step import SlotSampling
from kernels.weights.tensors import Role
from tests.kits.declared import declared

__all__ = [
    "adapted_modules",
    "assert_rows_use_their_adapters",
    "end_modules",
    "expert_modules",
    "logprobs_of",
    "merged",
    "save_adapter",
    "stacked_adapter",
]

_STACKED = re.compile(r"\.experts\.(lora|base)")
_ADAPTED = (Role.PROJECTION, Role.DOWN)


def adapted_modules(path: Path, leave: tuple[str, ...] = ()) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of a model's linear layers, without those whose names contain one of ``leave``."""
    return {
        spec.module: spec.matrix
        for spec in declared(path).values()
        if spec.role in _ADAPTED and not any(part in spec.module for part in leave)
    }


def expert_modules(path: Path) -> dict[str, tuple[int, int]]:
    """``adapted_modules`` of experts whose parameters are one tensor."""
    config = json.loads((path / "config.json").read_text())
    stacked = {spec.name.rpartition(".")[0] for spec in declared(path).values() if ".experts." in spec.name}
    hidden, inner = config["hidden_size"], config.get("moe_intermediate_size") or config["intermediate_size"]
    return {
        f"{block}.{expert}.{part}_proj": (hidden, inner) if part == "down" else (inner, hidden)
        for block in sorted(stacked)
        for expert in range(config.get("num_local_experts") or config["num_experts"])
        for part in ("gate", "up", "down")
    }


def end_modules(path: Path) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of a model's table of embeddings, whose inputs are the vocabulary, and of its output."""
    found = {spec.role: spec for spec in declared(path).values() if spec.role in (Role.EMBEDDING, Role.OUTPUT)}
    vocab, hidden = found[Role.EMBEDDING].matrix
    head = found[Role.OUTPUT].module if Role.OUTPUT in found else "lm_head"
    return {found[Role.EMBEDDING].module: (hidden, vocab), head: (vocab, hidden)}


def save_adapter(
    directory: Path, modules: dict[str, tuple[int, int]], seed: int, rank: int = 3, scale: float = 0.1, **config: Any
) -> Path:
    """An adapter for ``modules`` (outputs, inputs). ``scale``: of the numbers of B. ``config``: over
    adapter_config.json; ``rank_pattern`` holds."""
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none"} | config
    tensors = {}
    for module, (outputs, inputs) in modules.items():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{module} {seed}".encode()))
        own = _by_end(config.get("rank_pattern", {}), module, rank)
        name = f"base_model.model.{module}"
        names = ("embedding_A", "embedding_B") if "embed" in module else ("A.weight", "B.weight")
        tensors[f"{name}.lora_{names[0]}"] = torch.randn(own, inputs, generator=generator)
        tensors[f"{name}.lora_{names[1]}"] = torch.randn(outputs, own, generator=generator) * scale
        if config.get("use_dora"):
            magnitudes = 1.0 + 2.0 * torch.rand(outputs, generator=generator)
            tensors[f"{name}.lora_magnitude_vector.weight"] = magnitudes
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def stacked_adapter(source: Path, target: Path, *, turned: bool = False, alternate: bool = False) -> Path:
    """An adapter of experts apart as one of stacked parameters (``target_parameters``): gates have the ups' A, which is
    put there. ``turned``: as PEFT wrote such parameters up to 0.18, with their inputs for outputs. ``alternate``: the
    outputs of gate and up do."""
    shutil.copytree(source, target)
    stored = load_file(source / "adapter_model.safetensors")
    config = json.loads((source / "adapter_config.json").read_text())
    config["target_parameters"] = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    (target / "adapter_config.json").write_text(json.dumps(config))
    layers = sorted({name.partition(".experts.")[0] for name in stored if ".experts." in name})
    for layer in layers:
        count = sum(name.startswith(f"{layer}.experts.") and "gate_proj.lora_A" in name for name in stored)
        names = [f"{layer}.experts.{expert}" for expert in range(count)]
        for name in names:
            stored[f"{name}.gate_proj.lora_A.weight"] = stored[f"{name}.up_proj.lora_A.weight"].clone()
        for parts, inner in ((("gate_proj", "up_proj"), ".base_layer"), (("down_proj",), "")):
            low = torch.stack([stored[f"{name}.{parts[0]}.lora_A.weight"] for name in names])
            high = torch.stack(
                [
                    torch.stack([stored[f"{name}.{part}.lora_B.weight"] for part in parts], int(alternate)).flatten(
                        0, 1
                    )
                    for name in names
                ]
            )
            if turned:
                low, high = high.transpose(1, 2), low.transpose(1, 2)
            wrapped = f"{layer}.experts{inner}"
            stored[f"{wrapped}.lora_A.weight"] = low.flatten(0, 1).contiguous()
            stored[f"{wrapped}.lora_B.weight"] = high.permute(1, 2, 0).flatten(1).contiguous()
    save_file(
        {name: each for name, each in stored.items() if not _STACKED.search(name)}, source / "adapter_model.safetensors"
    )
    stored = {name: tensor for name, tensor in stored.items() if not re.search(r"\.experts\.\d", name)}
    save_file(stored, target / "adapter_model.safetensors")
    return target


def _by_end(pattern: dict[str, Any], module: str, default: Any) -> Any:
    return next((value for end, value in pattern.items() if module.endswith(end)), default)


def merged(path: Path, target: Path, adapter: Path | None) -> Path:
    """The model with an adapter in its weights: W + alpha / r * B @ A, or alpha / sqrt(r) with rsLoRA; with DoRA its
    rows have the lengths of the magnitudes."""
    shutil.copytree(path, target)
    tensors = load_file(path / "model.safetensors")
    if adapter is not None:
        config = json.loads((adapter / "adapter_config.json").read_text())
        stored, specs = load_file(adapter / "adapter_model.safetensors"), declared(path)
        if any("embed" in name or "lm_head" in name for name in stored):
            _untie(target, tensors)
        for name in [name for name in stored if "_A" in name]:
            module, lookup = name.removeprefix("base_model.model.").partition(".lora_")[0], "embedding_A" in name
            low, high = stored[name], stored[name.replace("_A", "_B")]
            alpha = _by_end(config.get("alpha_pattern", {}), module, config["lora_alpha"])
            scale = alpha / (math.sqrt(len(low)) if config.get("use_rslora") else len(low))
            change = scale * high @ low
            aliases = specs[f"{module}.weight"].aliases if f"{module}.weight" in specs else ()
            stored_as = next((own for own in (f"{module}.weight", *aliases) if own in tensors), "")
            if not stored_as:
                weight = _of_stacked(target, tensors, module)
                weight += change.to(weight.dtype)
                continue
            weight = tensors[stored_as]
            result = weight.float() + (change.T if lookup else change)
            if config.get("use_dora"):
                magnitudes = stored[f"base_model.model.{module}.lora_magnitude_vector.weight"]
                result = result * (magnitudes / result.norm(dim=1)).unsqueeze(1)
            tensors[stored_as] = result.to(weight.dtype)
    save_file(tensors, target / "model.safetensors")
    return target


def _of_stacked(path: Path, tensors: dict[str, torch.Tensor], module: str) -> torch.Tensor:
    """A view [outputs, inputs] of one expert's part of parameters that hold all experts of a layer."""
    config, specs = json.loads((path / "config.json").read_text()), declared(path)
    spec = specs.get(f"{module}.weight")
    if spec is not None and spec.stacked is not None:
        place = spec.stacked
        return tensors[place.stored][place.expert].chunk(place.parts)[place.part]
    block, expert, name = module.rsplit(".", 2)
    if config["model_type"] == "dbrx":  # all rows follow one another, and the last one's inputs are rows
        count = config["ffn_config"]["moe_num_experts"]
        part = tensors[f"{block.removesuffix('_experts')}.{name}"].chunk(count)[int(expert)]
        return part.T if name == "w2" else part
    weight = tensors[f"{block}.{'down' if name == 'down_proj' else 'gate_up'}_proj"][int(expert)]
    weight = weight if config["model_type"].startswith("gemma4") else weight.T
    if name == "down_proj":
        return weight
    part = int(name == "up_proj")
    return weight[part::2] if config["model_type"] == "gpt_oss" else weight.chunk(2)[part]


def _untie(target: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Give a model an output of its own: an adapter changes the table of embeddings or the output, not both."""
    config = json.loads((target / "config.json").read_text())
    if "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        (target / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))


def logprobs_of(result, rows, vocab):
    ids = np.frombuffer(result.top_ids, np.int32).reshape(rows, vocab)
    found = np.empty((rows, vocab), np.float32)
    np.put_along_axis(found, ids, np.frombuffer(result.top_logprobs, np.float32).reshape(rows, vocab), 1)
    return found


def assert_rows_use_their_adapters(
    path, tmp_path, drive, prompts, vocab, atol, steps=12, leave=(), more=None, dora=False, **options
):
    """Run requests of all adapters together, in chunks and as decodes, and compare each with its merged model alone.
    atol: of log-probabilities at every step, after the same tokens. more: modules other than linear layers. dora: the
    first adapter has magnitudes. Returns the driver of the combined requests.
    """
    sampling = SlotSampling(temperature=0.0, logprobs=vocab)
    modules = adapted_modules(path, leave) | (more or {})
    targets = ("all", *(["dora"] if dora else []), *sorted({target_of(module) for module in more or {}}))
    some = dict(list(modules.items())[1:])  # in the second, a layer of the first has no adapter
    ends = {"o_proj": 2, "down_proj": 1}
    extra = {"use_rslora": True, "rank_pattern": ends, "alpha_pattern": {"q_proj": 3.0}}
    files = {
        1: save_adapter(tmp_path / "first", modules, 1, use_dora=dora),
        2: save_adapter(tmp_path / "other", some, 2, **extra),
    }
    driver = drive(path, adapters=AdapterSettings(max_rank=4, max_batch=2, targets=targets), **options)
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
