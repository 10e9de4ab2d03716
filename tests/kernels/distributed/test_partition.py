"""The parts of all ranks are the whole, and a rank reads no more than its own."""

from __future__ import annotations

import pytest
import torch

from kernels.devices.cpu.device import CpuDevice
from kernels.models.config_loader import read_config
from kernels.models.registry import tensors
from kernels.weights import safetensors_checkpoint
from kernels.weights.loading import CheckpointFiles, Placement, open_weights
from kernels.weights.tensors import Part, Shard


class Recording:
    """A safetensors file that tells which tensors were read whole."""

    def __init__(self, file, whole):
        self.file, self.whole = file, whole

    def keys(self):
        return self.file.keys()

    def get_slice(self, name):
        return self.file.get_slice(name)

    def get_tensor(self, name):
        self.whole.add(name)
        return self.file.get_tensor(name)


@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
@pytest.mark.parametrize(("name", "size"), [("parallel-llama", 2), ("parallel-qwen2", 2), ("parallel-qwen3", 4)])
def test_parts_make_up_the_whole(name, size, load_format, reference, monkeypatch):
    path = str(reference(name).path)
    specs = tensors(read_config(path))
    real, read = safetensors_checkpoint.safe_open, set()
    monkeypatch.setattr(
        safetensors_checkpoint, "safe_open", lambda *args, **options: Recording(real(*args, **options), read)
    )

    def weights(shard):
        placement = Placement(torch.float32, torch.device("cpu"), shard)
        loader = open_weights(CheckpointFiles(path, load_format, 3), specs, placement)
        return {tensor: loader.take([tensor]) for tensor in specs}

    whole = weights(Shard())
    read.clear()
    shards = [Shard(rank, size) for rank in range(size)]
    parts = [{name: part for name, spec in specs.items() for part in spec.parts(shard)} for shard in shards]
    held = [weights(shard) for shard in shards]
    assert not read & set(parts[0])
    for tensor, expected in whole.items():
        if tensor not in parts[0]:
            assert all(torch.equal(rank[tensor], expected) for rank in held)
            continue
        for rank, part in zip(held, parts, strict=True):
            assert torch.equal(rank[tensor], part[tensor].narrow(expected))
        covered = {index for part in parts for index in range(part[tensor].begin, part[tensor].end)}
        assert covered == set(range(expected.shape[parts[0][tensor].dimension]))
    everywhere = {tensor for tensor in specs if tensor.endswith(("norm.weight", "o_proj.bias", "down_proj.bias"))}
    assert set(parts[0]) == set(specs) - everywhere


def test_ranks_that_share_a_key_head_follow_one_another(reference):
    config = read_config(reference("parallel-qwen3").path)  # 4 heads, 2 key heads
    key = tensors(config)["model.layers.0.self_attn.k_proj.weight"]
    keys = [part for rank in range(4) for part in key.parts(Shard(rank, 4))]
    dim = config.head_dim
    assert keys == [Part(0, 0, dim), Part(0, 0, dim), Part(0, dim, 2 * dim), Part(0, dim, 2 * dim)]


def test_ranks_on_one_host_share_it(monkeypatch):
    monkeypatch.setattr("kernels.devices.cpu.device.usable_cores", lambda: 9)
    assert [CpuDevice(host_workers=workers).threads for workers in (1, 2, 16)] == [8, 4, 1]
    assert CpuDevice(3, 2, host_workers=2).threads == 3
    assert CpuDevice(1, host_workers=2).memory.usage().total == CpuDevice(1).memory.usage().total // 2
