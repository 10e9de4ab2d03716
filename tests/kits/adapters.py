"""LoRA adapters for every linear layer: as deltas by row, and merged into the weights of a checkpoint."""

from __future__ import annotations

import shutil
import zlib
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels.contract.step import SlotSampling
from kernels.core.layer_context import Delta, LayerContext
from kernels.weights.tensors import Role, Shard
from tests.kits.declared import declared

__all__ = ["COUNT", "LowRank", "assert_rows_use_their_adapters", "merged"]

COUNT, RANK = 2, 3
_ADAPTED = (Role.PROJECTION, Role.DOWN)


def _factors(module: str, adapter: int, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """[outputs, RANK] and [RANK, inputs], whose product is added to the weight; zeros for adapter 0."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{module} {adapter}".encode()))
    first, second = (torch.randn(size, generator=generator) for size in ((shape[0], RANK), (RANK, shape[1])))
    scale = 0.0 if adapter == 0 else 0.15
    return first * scale, second


class LowRank:
    """``COUNT`` adapters for the model in ``path``. ``made``: the modules that were requested."""

    def __init__(self, path: Path) -> None:
        self.specs, self.made = declared(path), set()

    def make(self, modules: tuple[str, ...], context: LayerContext) -> Delta | None:
        self.made.update(modules)
        parts = [self._delta(module, context) for module in modules]
        return lambda x: torch.cat([part(x) for part in parts], 1)

    def _delta(self, module: str, context: LayerContext) -> Delta:
        spec = self.specs[f"{module}.weight"]
        pairs = [_factors(module, adapter, spec.matrix) for adapter in range(COUNT + 1)]
        outputs, inputs = (torch.stack(part) for part in zip(*pairs, strict=True))
        held = spec.parts(Shard(context.rank, context.size))
        if held and held[0].dimension == 0:
            outputs = torch.cat([outputs[:, part.begin : part.end] for part in held], 1)
        elif held:
            inputs = torch.cat([inputs[:, :, part.begin : part.end] for part in held], 2)
        outputs, inputs = outputs.to(context.device), inputs.to(context.device)

        def delta(x: Tensor) -> Tensor:
            low = torch.bmm(inputs.index_select(0, context.rows).to(x.dtype), x.unsqueeze(2))
            return torch.bmm(outputs.index_select(0, context.rows).to(x.dtype), low).squeeze(2)

        return delta


def merged(path: Path, target: Path, adapter: int) -> Path:
    """The model with one adapter's deltas in its weights."""
    shutil.copytree(path, target)
    tensors = load_file(path / "model.safetensors")
    for name, spec in declared(path).items():
        if spec.role in _ADAPTED:
            outputs, inputs = _factors(spec.module, adapter, spec.matrix)
            tensors[name] = (tensors[name].float() + outputs @ inputs).to(tensors[name].dtype)
    save_file(tensors, target / "model.safetensors")
    return target


def _logprobs(result, rows, vocab):
    ids = np.frombuffer(result.top_ids, np.int32).reshape(rows, vocab)
    found = np.empty((rows, vocab), np.float32)
    np.put_along_axis(found, ids, np.frombuffer(result.top_logprobs, np.float32).reshape(rows, vocab), 1)
    return found


def assert_rows_use_their_adapters(path, tmp_path, drive, prompts, vocab, atol, steps=12, **options):
    """Run requests of all adapters together, in chunks and as decodes, and compare each with its merged model alone.
    atol: of log-probabilities at every step, after the same tokens. Returns the driver of the combined requests.
    """
    sampling = SlotSampling(temperature=0.0, logprobs=vocab)
    adapters = LowRank(path)
    driver = drive(path, adapters=adapters, **options)
    assert adapters.made == {spec.module for spec in declared(path).values() if spec.role in _ADAPTED}
    requests = {slot: (adapter, prompts(9 + 8 * slot, seed=slot)[0]) for slot, adapter in enumerate((1, 0, 2), start=1)}
    together: dict[int, list] = {slot: [] for slot in requests}
    for slot, (adapter, prompt) in requests.items():
        driver.admit(slot, prompt, sampling=sampling, adapter=adapter)
    driver.step([(slot, 5) for slot in requests])
    for _ in range(steps):
        rows = [(slot, driver.pending(slot)) for slot in requests]
        found = _logprobs(driver.step(rows), len(rows), vocab)
        order = sorted(rows, key=lambda row: row[1] != 1)
        for (slot, _), logprobs in zip(order, found, strict=True):
            together[slot].append(logprobs)
    base = merged(path, tmp_path / "merged-0", 0)
    for slot, (adapter, prompt) in requests.items():
        target = tmp_path / f"merged-{adapter}"
        alone = drive(target if target.exists() else merged(path, target, adapter), **options)
        plain = drive(base, **options)
        tokens = driver.tokens[slot]
        for number, logprobs in enumerate(together[slot]):
            known = len(prompt) + number
            if number not in (0, 1, steps - 1):
                continue
            off = []
            for one in (alone, plain):
                one.admit(1, tokens[:known], sampling=sampling)
                off.append(np.abs(logprobs - _logprobs(one.step([(1, known)]), 1, vocab)[0]).max())
                one.release(1)
                one.step([])
            assert off[0] <= atol, (slot, number, off)
            assert adapter == 0 or off[1] > 4 * off[0], (slot, number, off)  # far from the model without it
    return driver
