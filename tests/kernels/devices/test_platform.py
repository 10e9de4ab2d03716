"""Operators of the CPU platform against the formulas, and what it knows of its host."""

from __future__ import annotations

import math
import os

import numpy as np
import psutil
import pytest
import torch

from kernels.contract.config import RunnerConfig
from kernels.contract.environment import NO_AUTOLOAD, worker_environment
from kernels.contract.errors import CacheSizeError
from kernels.core.attention_rows import AttentionRows
from kernels.devices.cpu import host
from kernels.devices.cpu.dense_linear import PackedLinear, PlainLinear, can_pack
from kernels.devices.cpu.device import CpuDevice
from kernels.devices.memory import MemoryUsage
from kernels.devices.select import select_device
from kernels.models.config import ModelConfig, RopeConfig
from kernels.state.cache_size import cache_pages


@pytest.fixture
def platform():
    """Without native operators, of which test_cpu_native.py is."""
    return CpuDevice(threads=1)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(3)


def normed(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def test_norms(platform, generator):
    x, residual = torch.randn(2, 5, 8, generator=generator)
    weight, eps = torch.randn(8, generator=generator), 0.3
    torch.testing.assert_close(platform.elementwise.make_norm(weight, eps)(x), normed(x, weight, eps))
    expected = normed(x + residual, weight, eps), x + residual
    torch.testing.assert_close(platform.elementwise.make_norm(weight, eps).add(x, residual.clone()), expected)
    heads, weights = torch.randn(5, 3, 8, generator=generator), torch.randn(3, 8, generator=generator)
    torch.testing.assert_close(platform.elementwise.make_norm(weights, eps)(heads), normed(heads, weights, eps))


def test_norms_compute_in_float32(platform):
    x = torch.full((1, 4096), 300.0, dtype=torch.bfloat16)
    weight = torch.ones(4096, dtype=torch.bfloat16)
    assert torch.equal(platform.elementwise.make_norm(weight, 1e-6)(x), torch.ones_like(x))


def test_silu_and_mul(platform, generator):
    x = torch.randn(5, 16, generator=generator)
    expected = x[:, :8] * torch.sigmoid(x[:, :8]) * x[:, 8:]
    torch.testing.assert_close(platform.elementwise.silu_and_mul(x.clone()), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
def test_linear(dtype, biased, platform, generator):
    x = torch.randn(6, 32, generator=generator).to(dtype)
    weight = torch.randn(48, 32, generator=generator).to(dtype)
    bias = torch.randn(48, generator=generator).to(dtype) if biased else None
    linear = platform.linear.make_dense(weight, bias)
    assert isinstance(linear.call, PackedLinear if dtype == torch.bfloat16 and can_pack() else PlainLinear)
    torch.testing.assert_close(linear(x), torch.nn.functional.linear(x, weight, bias))


def reference_attention(queries, keys, values, last, window, scale):
    """One query at position ``last`` over [positions, kv_heads, dim], with the formulas in float64."""
    first = max(0, last + 1 - window) if window else 0
    group = queries.shape[0] // keys.shape[1]
    keys = keys[first : last + 1].repeat_interleave(group, 1).double()
    values = values[first : last + 1].repeat_interleave(group, 1).double()
    weights = torch.einsum("hd,thd->ht", queries.double(), keys).mul(scale).softmax(-1)
    return torch.einsum("ht,thd->hd", weights, values).float().flatten()


@pytest.mark.parametrize("window", [0, 7, 40])
def test_paged_attention(window, platform, generator):
    """Decodes of very different lengths (one group each, or several), prefills with and without a prefix, in one
    step, over shuffled pages; the pages' ends hold garbage."""
    page, kv_heads, heads, dim = 4, 2, 6, 8
    (cache,) = platform.cache.make(1, 400, page, kv_heads, dim, torch.float32)
    cache.uniform_(-1e4, 1e4, generator=generator)
    starts, counts = [1, 90, 3, 44, 41, 0, 17, 30], [1, 1, 1, 1, 1, 9, 5, 300]
    tables = np.zeros((len(starts), 100), dtype=np.int32)
    free = torch.randperm(399, generator=generator).tolist()
    stored, queries = [], []
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        length = start + count
        keys_values = torch.randn(length, 2 * kv_heads, dim, generator=generator)
        pages = [free.pop() + 1 for _ in range(-(-length // page))]
        tables[row, : len(pages)] = pages
        index = torch.tensor([pages[at // page] * page + at % page for at in range(length)])
        platform.cache.write(cache, index, keys_values)
        stored.append(keys_values)
        queries.append(torch.randn(count, heads, dim, generator=generator))
    rows = AttentionRows(np.array(starts), np.array(counts), tables, decodes=5)
    found = platform.attention.attend(torch.cat(queries), cache, platform.attention.plan(rows, window), dim**-0.5)
    expected = [
        reference_attention(query, kv[:, :kv_heads], kv[:, kv_heads:], start + at, window, dim**-0.5)
        for start, kv, row in zip(starts, stored, queries, strict=True)
        for at, query in enumerate(row)
    ]
    torch.testing.assert_close(found, torch.stack(expected), atol=1e-5, rtol=1e-4)


def test_a_row_attends_alike_alone_and_in_a_batch(platform, generator):
    (cache,) = platform.cache.make(1, 40, 4, 2, 8, torch.float32)
    cache.normal_(generator=generator)
    tables = np.arange(1, 37, dtype=np.int32).reshape(4, 9)[:, ::-1].copy()
    starts, queries = np.array([3, 30, 11, 34]), torch.randn(4, 4, 8, generator=generator)

    def attend(rows):
        plan = platform.attention.plan(AttentionRows(starts[rows], np.ones_like(rows), tables[rows], len(rows)), 0)
        return platform.attention.attend(queries[rows], cache, plan, 0.3)

    together = attend(np.arange(4))
    for row in range(4):
        torch.testing.assert_close(attend(np.array([row]))[0], together[row])


def test_cache_memory_is_taken_when_it_is_used(platform):
    process = psutil.Process()
    before = process.memory_info().rss
    caches = platform.cache.make(4, 4096, 16, 2, 64, torch.bfloat16)  # 128 MiB
    assert sum(cache.nbytes for cache in caches) == 128 << 20
    assert process.memory_info().rss - before < 8 << 20
    assert not caches[3][4095].any()


def test_cores_respect_affinity_and_quota(monkeypatch, tmp_path):
    monkeypatch.setattr(host, "_CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {900, 901, 902, 903})  # no such processors
    assert host.usable_cores() == 4
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    assert host.usable_cores() == 2
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert host.usable_cores() == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert host.usable_cores() == 4


def test_hyper_threads_count_once(monkeypatch, tmp_path):
    monkeypatch.setattr(host, "_CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(host, "_siblings", lambda cpu: f"{cpu % 2},{cpu % 2 + 2}")
    assert host.usable_cores() == 2


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (8, 7)])
def test_a_core_is_left_to_the_event_loop(cores, threads, monkeypatch):
    monkeypatch.setattr("kernels.devices.cpu.device.usable_cores", lambda: cores)
    assert CpuDevice().threads == threads
    assert CpuDevice(threads=5).threads == 5


def test_an_idle_worker_sleeps_while_it_waits():
    assert worker_environment({"HOME": "/"}) == NO_AUTOLOAD | {"OMP_WAIT_POLICY": "PASSIVE"}
    assert worker_environment({"GOMP_SPINCOUNT": "100"}) == NO_AUTOLOAD
    assert worker_environment({"OMP_WAIT_POLICY": "ACTIVE"}) == NO_AUTOLOAD


def test_memory_respects_the_cgroup(monkeypatch, tmp_path):
    monkeypatch.setattr(host, "_CGROUP", tmp_path)
    whole = host.host_memory()
    assert 0 < whole.free <= whole.total
    (tmp_path / "memory.max").write_text(f"{1 << 20}\n")
    (tmp_path / "memory.current").write_text(f"{3 << 18}\n")
    assert host.host_memory() == MemoryUsage(total=1 << 20, free=1 << 18)
    (tmp_path / "memory.max").write_text("max\n")
    assert host.host_memory().total == whole.total


MODEL = ModelConfig(
    "LlamaForCausalLM", 100, 64, 128, 2, 4, 4, 16, 1e-6, 4096, RopeConfig(1e4), False, False, False, False, False,
    (0, 0), "bfloat16",
)  # fmt: skip
PAGE_BYTES = 2 * 2 * 64 * 2 * 16


def pages(free, weights=0, total=1 << 40, default_tokens=0, **config):
    config = RunnerConfig("", **config)
    token = 2 * 2 * MODEL.layers * MODEL.kv_heads * MODEL.head_dim  # bytes of keys and values in bfloat16
    return cache_pages(
        config, token, 4096, weights, MemoryUsage(total, free), default_fraction=0.25, default_tokens=default_tokens
    )


def test_cache_size_as_configured():
    assert pages(1 << 30, max_total_tokens=1000) == 64  # 63 and page 0
    with pytest.raises(CacheSizeError, match="lower --max-total-tokens"):
        pages(PAGE_BYTES * 63, max_total_tokens=1000)


def test_cache_size_from_a_fraction_of_memory():
    total = PAGE_BYTES * 1000
    assert pages(total, weights=PAGE_BYTES * 100, total=total, mem_fraction_static=0.5) == 400
    assert pages(PAGE_BYTES * 50, total=total, mem_fraction_static=0.5) == 50  # what is free bounds it
    with pytest.raises(CacheSizeError, match="raise --mem-fraction-static"):
        pages(total, weights=total, total=total, mem_fraction_static=0.5)


def test_cache_size_by_default():
    assert pages(PAGE_BYTES * 400) == 100
    assert pages(1 << 40, max_slots=3) == 2 * 257 + 1  # all that the slots could use
    assert pages(1 << 40, default_tokens=16000) == 1001
    assert pages(1 << 40, default_tokens=16) == 258  # a full context and a step ahead
    with pytest.raises(CacheSizeError):
        pages(PAGE_BYTES)


def test_the_scale_of_attention_is_used(platform):
    (cache,) = platform.cache.make(1, 2, 4, 1, 2, torch.float32)
    platform.cache.write(cache, torch.tensor([4, 5]), torch.tensor([[[1.0, 0], [1, 0]], [[0, 0], [0, 0]]]))
    rows = AttentionRows(np.array([1]), np.array([1]), np.array([[1]], dtype=np.int32), 1)
    found = platform.attention.attend(torch.tensor([[[3.0, 0]]]), cache, platform.attention.plan(rows, 0), 2.0)
    assert math.isclose(float(found[0, 0]), 1 / (1 + math.exp(-6)), rel_tol=1e-5)


def test_the_cpu_computes_with_as_many_threads_as_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", calls.append)
    platform = select_device(RunnerConfig(model_path="", device="cpu", threads=3))
    platform.bind_thread()
    assert calls == [3]
