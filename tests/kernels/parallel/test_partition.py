"""The parts of all ranks are the whole, and a rank reads no more than its own."""

from __future__ import annotations

import pytest
import torch

from kernels import safetensors_checkpoint
from kernels.loading import open_weights
from kernels.models.config import read_config
from kernels.models.decoder import tensor_shapes
from kernels.parallel.partition import Part, tensor_parts
from kernels.platforms.cpu import CpuPlatform


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
    config = read_config(path)
    shapes = tensor_shapes(config)
    real, read = safetensors_checkpoint.safe_open, set()
    monkeypatch.setattr(
        safetensors_checkpoint, "safe_open", lambda *args, **options: Recording(real(*args, **options), read)
    )

    def weights(parts):
        loader = open_weights(
            path, load_format, shapes, parts, torch.float32, torch.device("cpu"), 3, lambda fraction: None
        )
        return {tensor: loader.take([tensor]) for tensor in shapes}

    whole = weights({})
    read.clear()
    parts = [tensor_parts(shapes, config, rank, size) for rank in range(size)]
    held = [weights(part) for part in parts]
    assert not read & set(parts[0])
    for tensor, expected in whole.items():
        if tensor not in parts[0]:
            assert all(torch.equal(rank[tensor], expected) for rank in held)
            continue
        for rank, part in zip(held, parts, strict=True):
            assert torch.equal(rank[tensor], part[tensor].of(expected))
        covered = {index for part in parts for index in range(part[tensor].begin, part[tensor].end)}
        assert covered == set(range(expected.shape[parts[0][tensor].dimension]))
    everywhere = {tensor for tensor in shapes if tensor.endswith(("norm.weight", "o_proj.bias", "down_proj.bias"))}
    assert set(parts[0]) == set(shapes) - everywhere


def test_ranks_that_share_a_key_head_follow_one_another(reference):
    config = read_config(reference("parallel-qwen3").path)  # 4 heads, 2 key heads
    shapes = tensor_shapes(config)
    keys = [tensor_parts(shapes, config, rank, 4)["model.layers.0.self_attn.k_proj.weight"] for rank in range(4)]
    dim = config.head_dim
    assert keys == [Part(0, 0, dim), Part(0, 0, dim), Part(0, dim, 2 * dim), Part(0, dim, 2 * dim)]


def test_ranks_on_one_host_share_it(monkeypatch):
    monkeypatch.setattr("kernels.platforms.cpu.usable_cores", lambda: 9)
    assert [CpuPlatform(0, ranks).threads for ranks in (1, 2, 16)] == [8, 4, 1]
    assert CpuPlatform(3, 2).threads == 3
    assert CpuPlatform(1, 2).memory().total == CpuPlatform(1).memory().total // 2
