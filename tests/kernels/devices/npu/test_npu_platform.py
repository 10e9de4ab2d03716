"""Operators of the NPU platform against the formulas, its limits, its memory, and the words of its errors."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from kernels.contract.config import RunnerConfig
from kernels.contract.errors import CacheSizeError, UnsupportedError
from kernels.contract.step import SlotSampling
from kernels.core.attention_rows import AttentionRows
from kernels.devices.npu.device import NpuDevice
from kernels.devices.npu.errors import DeviceError, explain
from kernels.devices.npu.features import FEATURES
from kernels.devices.npu.fused_attention import check_cache, padded_dim
from kernels.devices.npu.soc import Soc, soc_of
from kernels.devices.select import select_device
from kernels.devices.staged_memory import step_memory
from kernels.sampling.nucleus import cut
from tests.kits.device_features import features_of

NPU = torch.device("npu:0")


def make(dtype=torch.bfloat16, **options):
    platform = NpuDevice(RunnerConfig(model_path="", device="npu", page_size=128, **options))
    platform.select_dtype(str(dtype).removeprefix("torch."), None)
    platform.bind_thread()
    return platform


@pytest.fixture
def platform():
    return make()


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(3)


def test_it_does_what_is_said_of_npus(platform):
    assert features_of(platform) == FEATURES


def normed(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def test_norms(platform, generator):
    x, residual = torch.randn(2, 5, 32, generator=generator)
    weight, eps = torch.randn(32, generator=generator), 0.3
    norm = platform.elementwise.make_norm(weight.to(NPU), eps)
    torch.testing.assert_close(norm(x.to(NPU)).cpu(), normed(x, weight, eps))
    found, total = norm.add(x.to(NPU), residual.to(NPU))
    torch.testing.assert_close(found.cpu(), normed(x + residual, weight, eps))
    torch.testing.assert_close(total.cpu(), x + residual)
    heads, weights = torch.randn(5, 3, 32, generator=generator), torch.randn(3, 32, generator=generator)
    torch.testing.assert_close(
        platform.elementwise.make_norm(weights.to(NPU), eps)(heads.to(NPU)).cpu(), normed(heads, weights, eps)
    )


def test_rotary_takes_a_strided_view(platform, generator):
    x = torch.randn(6, 5, 64, generator=generator)
    angles = torch.rand(6, 1, 32, generator=generator).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    held = x.to(NPU)
    platform.attention.rotate(held[:, :3], cos.to(NPU), sin.to(NPU), out=held[:, :3])
    swapped = torch.cat((-x[:, :3, 32:], x[:, :3, :32]), -1)
    torch.testing.assert_close(held[:, :3].cpu(), x[:, :3] * cos + swapped * sin)
    assert torch.equal(held[:, 3:].cpu(), x[:, 3:])


def test_silu_and_mul(platform, generator):
    x = torch.randn(5, 16, generator=generator)
    expected = x[:, :8] * torch.sigmoid(x[:, :8]) * x[:, 8:]
    torch.testing.assert_close(platform.elementwise.silu_and_mul(x.to(NPU)).cpu(), expected)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_linear(biased, shared, platform, generator):
    x, weight = torch.randn(6, 32, generator=generator).bfloat16(), torch.randn(48, 32, generator=generator).bfloat16()
    bias = torch.randn(48, generator=generator).bfloat16() if biased else None
    linear = platform.linear.make_dense(weight.to(NPU), None if bias is None else bias.to(NPU), shared)
    torch.testing.assert_close(linear(x.to(NPU)).cpu(), torch.nn.functional.linear(x, weight, bias))


def reference_attention(queries, keys, values, last, window, scale):
    """One query at position ``last`` over [positions, kv_heads, dim], with the formulas in float64."""
    first = max(0, last + 1 - window) if window else 0
    group = queries.shape[0] // keys.shape[1]
    keys = keys[first : last + 1].repeat_interleave(group, 1).double()
    values = values[first : last + 1].repeat_interleave(group, 1).double()
    weights = torch.einsum("hd,thd->ht", queries.double(), keys).mul(scale).softmax(-1)
    return torch.einsum("ht,thd->hd", weights, values).flatten()


@pytest.mark.parametrize("backend", ["ascend", "torch_native", "split", "native-decodes", "native-prefills"])
@pytest.mark.parametrize("dim", [64, 128, 160])
@pytest.mark.parametrize("window", [0, 7, 150])
def test_paged_attention(window, dim, backend, generator):
    """Decodes and prefills with and without a prefix, in one step, over shuffled pages whose ends hold garbage."""
    options = {"attention_backend": backend} if backend in ("ascend", "torch_native") else {}
    if backend == "native-decodes":
        options = {"decode_attention_backend": "torch_native"}
    elif backend == "native-prefills":
        options = {"prefill_attention_backend": "torch_native"}
    platform = make(**options)
    platform.attention.soc = Soc("A5", "Ascend950") if backend == "split" else Soc("A2", "Ascend910B3")
    page, kv_heads, heads = 128, 2, 6
    (cache,) = platform.cache.make(1, 24, page, kv_heads, dim, torch.bfloat16)
    for part in (cache.keys, cache.values):
        part.copy_((torch.rand(part.shape, generator=generator) * 2e4 - 1e4).bfloat16())
    starts, counts = [1, 290, 127, 128, 0, 17, 30], [1, 1, 1, 1, 9, 5, 300]
    tables = np.zeros((len(starts), 5), dtype=np.int32)
    free = torch.randperm(23, generator=generator).tolist()
    stored, queries = [], []
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        length = start + count
        keys_values = torch.randn(length, 2 * kv_heads, dim, generator=generator).bfloat16()
        pages = [free.pop() + 1 for _ in range(-(-length // page))]
        tables[row, : len(pages)] = pages
        index = torch.tensor([pages[at // page] * page + at % page for at in range(length)])
        platform.cache.write(cache, index.to(NPU), keys_values.to(NPU))
        stored.append(keys_values)
        queries.append(torch.randn(count, heads, dim, generator=generator).bfloat16())
    rows = AttentionRows(np.array(starts), np.array(counts), tables, decodes=4)
    plan = platform.attention.plan(rows, window)
    assert len(plan.parts) == (2 if backend in ("split", "native-decodes", "native-prefills") else 1)
    found = platform.attention.attend(torch.cat(queries).to(NPU), cache, plan, dim**-0.5).cpu()
    expected = [
        reference_attention(query, kv[:, :kv_heads], kv[:, kv_heads:], start + at, window, dim**-0.5)
        for start, kv, row in zip(starts, stored, queries, strict=True)
        for at, query in enumerate(row)
    ]
    torch.testing.assert_close(found.double(), torch.stack(expected), atol=0.02, rtol=0.02)


def test_float16_goes_through_bfloat16(generator):
    platform = make(torch.float16)
    (cache,) = platform.cache.make(1, 2, 128, 1, 128, torch.float16)
    assert cache.keys.dtype == torch.bfloat16
    keys_values = torch.randn(3, 2, 128, generator=generator).half()
    platform.cache.write(cache, torch.tensor([128, 129, 130]).to(NPU), keys_values.to(NPU))
    queries = torch.randn(3, 4, 128, generator=generator).half()
    plan = platform.attention.plan(AttentionRows(np.array([0]), np.array([3]), np.array([[1]], np.int32), 0), 0)
    found = platform.attention.attend(queries.to(NPU), cache, plan, 0.1)
    assert found.dtype == torch.float16
    expected = [
        reference_attention(q, keys_values[:, :1], keys_values[:, 1:], at, 0, 0.1) for at, q in enumerate(queries)
    ]
    torch.testing.assert_close(found.cpu().double(), torch.stack(expected), atol=0.02, rtol=0.02)


def test_a_cache_in_float32_is_written_without_the_kernel(generator, simulator):
    """Which has no float32."""
    platform = make(torch.float32)
    (cache,) = platform.cache.make(1, 3, 128, 2, 80, torch.float32)
    keys_values = torch.randn(3, 4, 80, generator=generator)
    before = simulator.engine.calls.get("npu.npu_scatter_pa_kv_cache.default", 0)
    platform.cache.write(cache, torch.tensor([300, 129, 130]).to(NPU), keys_values.to(NPU))
    assert simulator.engine.calls.get("npu.npu_scatter_pa_kv_cache.default", 0) == before
    for held, new in ((cache.keys, keys_values[:, :2]), (cache.values, keys_values[:, 2:])):
        assert held.cpu().view(-1, 2, 80)[[300, 129, 130]].equal(new)
        assert int(held.count_nonzero()) == new.numel()


def test_pages_are_cleared(platform):
    caches = platform.cache.make(2, 4, 128, 1, 128, torch.bfloat16)
    for cache in caches:
        cache.keys.fill_(math.nan)
        cache.values.fill_(math.nan)
    platform.cache.clear(caches, [1, 3])
    for cache in caches:
        assert cache.keys.isnan().any(-1).any(-1).any(-1).tolist() == [True, False, True, False]
        assert cache.values.isnan().any(-1).any(-1).any(-1).tolist() == [True, False, True, False]


@pytest.mark.parametrize(
    ("call", "advice"),
    [
        (lambda: check_cache(8, 16, 2, 128), "--page-size 128"),
        (lambda: check_cache(1 << 20, 128, 8, 128), "--max-total-tokens"),
        (lambda: check_cache(8, 128, 1024, 128), "torch_native"),
        (lambda: padded_dim(512), "torch_native"),
        (lambda: make(torch.float32, attention_backend="ascend"), "torch_native"),
        (lambda: make(torch.float64), "use bfloat16"),
        (lambda: make(device_index=7), "--base-gpu-id"),
        (lambda: soc_of(203, "Ascend310P3"), "--device cpu"),
        (lambda: select_device(RunnerConfig(model_path="", device="tpu")), "--device cpu, npu or cuda"),
    ],
)
def test_what_cannot_be_done_is_reported_with_a_remedy(call, advice):
    with pytest.raises(UnsupportedError, match=advice):
        call()


@pytest.mark.parametrize(("version", "generation"), [(220, "A2"), (225, "A2"), (250, "A3"), (255, "A3"), (260, "A5")])
def test_generations(version, generation):
    assert soc_of(version, "x").generation == generation


@pytest.mark.parametrize(("k", "p"), [(5, 1.0), (0, 0.7), (40, 0.6)])
def test_the_kernel_for_top_k_and_top_p_keeps_the_same_tokens(k, p, platform, generator):
    logits = torch.randn(4, 300, generator=generator) * 3
    rows = torch.tensor([3, 0, 2])
    row_max, temperature = logits[rows].amax(-1), torch.tensor([0.5, 1.0, 2.0])
    top_k, top_p = torch.full((3,), k), torch.full((3,), p, dtype=torch.float64)
    filters = (row_max, temperature, top_k, top_p)
    expected, _ = (
        cut(logits, rows, torch.empty(3, 10), *filters, 0 if k == 0 else k)
        if k == 0
        else cut(logits.to(NPU), rows.to(NPU), torch.empty(3, 10), *(part.to(NPU) for part in filters), k)
    )
    if platform.sampling.top_k_top_p is None:
        pytest.skip("this generation has no such kernel")
    floor, ids = platform.sampling.top_k_top_p(logits.to(NPU), rows.to(NPU), *(part.to(NPU) for part in filters), k)
    torch.testing.assert_close(floor.cpu(), expected.cpu())
    assert ids.tolist() == [300] * 3


def test_sampled_tokens_do_not_depend_on_the_sampling_backend(reference, drive, prompts):
    options = {"device": "npu", "page_size": 128, "max_total_tokens": 2048, "max_step_tokens": 64}
    (text,) = prompts(20)
    found = []
    for backend in ("pytorch", ""):
        driver = drive(reference("qwen3").path, sampling_backend=backend, **options)
        for slot, (k, p) in enumerate([(8, 1.0), (0, 0.8), (20, 0.9)], start=1):
            driver.admit(slot, text, sampling=SlotSampling(temperature=0.9, top_k=k, top_p=p, seed=5))
            driver.generate(slot, 30)
        driver.step([(1, 1), (2, 1), (3, 1)])  # k beside none: the general way
        found.append(driver.tokens)
    assert found[0] == found[1]


def test_step_memory_is_the_peak(platform):
    held = torch.empty(8 << 20, dtype=torch.uint8, device=NPU)

    def step():
        first = torch.empty(64 << 20, dtype=torch.uint8, device=NPU)
        del first
        torch.empty(32 << 20, dtype=torch.uint8, device=NPU)

    taken = step_memory(NPU, step)
    assert 64 << 20 <= taken < 300 << 20
    sizes = iter((512 << 20, 64 << 20))  # what the first tries no other step does

    def trying():
        torch.empty(next(sizes), dtype=torch.uint8, device=NPU)

    assert 64 << 20 <= step_memory(NPU, trying, tries=True) < 300 << 20
    del held


def test_the_cache_takes_what_is_left(reference, drive):
    path = reference("qwen3").path
    options = {"device": "npu", "dtype": "bfloat16", "page_size": 128, "max_total_tokens": 0, "max_step_tokens": 256}
    before = NpuDevice(RunnerConfig(model_path="", device="npu")).memory.usage()
    info = drive(path, max_slots=100_000, mem_fraction_static=0.5, **options).info
    assert 0.4 * before.total < info.cache_bytes <= 0.5 * before.total
    with pytest.raises(CacheSizeError, match="--max-total-tokens"):
        drive(path, **(options | {"max_total_tokens": 1 << 28}))


@pytest.mark.parametrize(
    ("text", "cause", "advice"),
    [
        ("NPU out of memory. Tried to allocate 2.00 GiB", "out of memory", "--mem-fraction-static"),
        (
            "[PTA] call aclrtSynchronizeStream failed, error code is 507015\nEZ9999: Inner Error, vector core trap",
            "507015 (EZ9999: Inner Error, vector core trap)",
            "ASCEND_LAUNCH_BLOCKING=1",
        ),
        (
            "npuSynchronizeDevice:NPUStream.cpp:748 NPU function error: x, error code is 507015\n[ERROR] ERR00100\n"
            "[Error]: The aicore execution is abnormal.\n  Rectify the fault based on the log.\nMPU address invalid",
            "507015 (The aicore execution is abnormal. MPU address invalid)",
            "ASCEND_LAUNCH_BLOCKING=1",
        ),
        ("EI0002: Notify wait timed out. error code is 507048", "507048", "collective"),
        ("call aclnnFusedInferAttention failed, error code is 561002", "561002", "torch_native"),
        ("aclrtSetDevice failed, error code is 107001", "107001", "npu-smi info"),
        ("something failed, error code is 500999", "500999", "~/ascend/log"),
    ],
)
def test_an_error_of_the_device_has_its_cause_and_a_remedy(text, cause, advice):
    reported = explain(RuntimeError(text), "npu:0 (Ascend910B3)")
    assert isinstance(reported, DeviceError)
    assert cause in str(reported)
    assert advice in str(reported)
    assert "npu:0 (Ascend910B3)" in str(reported)


def test_errors_that_are_not_the_devices_stay_as_they_are():
    assert explain(ValueError("a step of 5 tokens is over max_step_tokens, 4"), "npu:0") is None
    assert explain(UnsupportedError("no"), "npu:0") is None


def test_no_generation_uses_float64():
    """Every way of sampling and scoring on A5, where the simulator computes nothing in it."""
    code = """
import sys
from kernels.devices.npu_simulator.activate import activate
activate("A5")
import torch
from app.understudy import MODEL_DIR
from kernels.execution.runner import ModelRunner
from kernels.contract.step import SlotSampling
from kernels.contract.config import RunnerConfig
from tests.kits.driver import Driver
try:
    torch.ones(2, dtype=torch.float64).to("npu") + 1
except RuntimeError as error:
    print(error, file=sys.stderr)
assert torch.ones(2, device="npu").double().dtype == torch.float32
options = dict(page_size=128, max_slots=6, max_step_tokens=256, max_total_tokens=1024, dtype="float32", threads=1)
said = []
for device in ("cpu", "npu"):
    runner = ModelRunner(RunnerConfig(model_path=str(MODEL_DIR), device=device, **options))
    driver = Driver(runner, runner.load())
    for slot, sampling in enumerate((
        SlotSampling(temperature=0.0, logprobs=3, prompt_logprobs=2),
        SlotSampling(temperature=0.8, top_k=20, top_p=0.9, seed=1, logprobs=1),
        SlotSampling(temperature=0.8, top_p=0.7, seed=2, repetition_penalty=1.2, frequency_penalty=0.5),
        SlotSampling(temperature=0.8, min_p=0.1, seed=3, ban_ids=(5,), bias_ids=(9,), bias_values=(2.0,)),
    ), start=1):
        driver.admit(slot, range(20 + slot, 60), sampling=sampling)
        driver.step([(slot, 40 - slot)])
    for _ in range(6):
        assert not driver.step([(slot, 1) for slot in range(1, 5)]).failed
    said.append(driver.tokens)
assert said[0] == said[1]
"""
    environment = os.environ | {"TROUPE_NPU_SIMULATOR": "A5", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "aten.add.Tensor: dtype: float64" in done.stderr
