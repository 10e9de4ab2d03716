"""Every model family on a GPU against transformers, however the work is cut into steps, with graphs and without."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pytest
import torch

import kernels.platforms.cuda
from kernels.cuda.behind import CudaBehindNorm
from kernels.cuda.choosing import Choices
from kernels.cuda.errors import DeviceError, explain
from kernels.cuda.grouped import GroupedLinear, WideWeight
from kernels.cuda.linear import CudaLinear
from kernels.cuda.norms import CudaNorm
from kernels.cuda.quantized import EightBitLinear
from kernels.layers.biased_norm import BiasedNorm
from kernels.platforms.base import PlatformError
from kernels.platforms.cuda import CudaPlatform
from kernels.platforms.projections import BehindNorm
from kernels.quantization.weights import GroupedWeight, Int8Weight, quantize_int8
from kernels.step import RunnerConfig, SlotSampling
from tests.kernels.conftest import FAMILIES, SPARSE
from tests.kernels.parity import half_precision, scored, traffic

OPTIONS = {"device": "cuda", "page_size": 16, "max_step_tokens": 256}

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def test_weights_whose_inputs_are_rounded_first_have_no_product_of_their_own():
    """But behind that: the platform's own way to a gated one would leave it out."""
    platform = CudaPlatform.__new__(CudaPlatform)
    words = torch.zeros(64, 128, dtype=torch.uint8)
    grouped = GroupedWeight(words, torch.ones(64, 8), None, 32, 4, activation="dynamic")
    clipped = Int8Weight(torch.zeros(64, 256, dtype=torch.int8), torch.ones(64), clip=torch.ones(1))
    for weight in (grouped, clipped):
        assert platform._quantized(weight, None, gated=True) is None


def test_norms_go_with_the_products_that_can_make_them(device):
    """And not with what is no norm of the platform's own, or no product of a weight."""
    platform = CudaPlatform.__new__(CudaPlatform)
    platform._choices = Choices(device)
    norm = CudaNorm(torch.ones(256, device=device), 1e-5)
    dense = torch.randn(64, 256, device=device)
    grouped = GroupedWeight(
        torch.zeros(64, 128, dtype=torch.uint8), torch.ones(64, 2), None, 128, 4, dtype=torch.float16
    )
    eight = dataclasses.replace(quantize_int8(dense), dtype=torch.float16)
    own = EightBitLinear(eight, None), GroupedLinear(grouped.to(device), None, WideWeight(device))
    for linear in (*own, CudaLinear(dense, None)):
        assert isinstance(platform.make_behind_norm(norm, linear), CudaBehindNorm)
        assert type(platform.make_behind_norm(BiasedNorm(platform, norm, norm.weight), linear)) is BehindNorm
    for which, other in ((norm, lambda x: x), (BiasedNorm(platform, norm, norm.weight), CudaLinear(dense, None))):
        assert type(platform.make_behind_norm(which, other)) is BehindNorm


@pytest.mark.parametrize(
    ("options", "sizes", "paying"),
    [
        ({}, [(128, 8), (256, 8), (512, 8), (600, 8)], True),
        ({"graph_tokens": (96, 512, 640)}, [(96, 8), (512, 8)], True),
        ({"graph_tokens": (96, 4096), "max_step_tokens": 4096}, [(96, 8), (4096, 8)], True),
        ({"graph_max_tokens": 192, "all_prompt_graphs": True}, [(128, 8), (192, 8)], False),
        ({"disable_prompt_graphs": True}, None, None),
        ({"disable_graph_padding": True}, None, None),
    ],
)
def test_which_steps_with_prompts_are_captured(options, sizes, paying, monkeypatch):
    platform, told = CudaPlatform.__new__(CudaPlatform), []
    platform._config = RunnerConfig("", **{"max_step_tokens": 600} | options)
    platform._kv_heads, platform.put, platform.device = 1, None, torch.device("cuda", 0)
    free = iter([35, 34])  # after each of two; what a graph's pool holds unused is no step's
    held = {"memory_reserved": lambda device: 50, "memory_allocated": lambda device: 40}
    fakes = {"empty_cache": lambda: None, "mem_get_info": lambda device: (next(free), 100), **held}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    platform._step_bytes = 35

    class Graphs:
        run = "run"

        def __init__(self, forward, table, windows, sizes, kv_heads, columns, page_size, paying, fits, put):
            told.append((sizes, paying, fits(), fits()))
            self.sizes = sizes

    monkeypatch.setattr(kernels.platforms.cuda, "PromptGraphs", Graphs)
    found = platform._capture_prompts(None, None, [0], 8, 4)
    assert told == ([] if sizes is None else [(sizes, paying, True, False)])
    assert found == (None if sizes is None else "run")


@on_a_gpu
@pytest.mark.parametrize("name", [*FAMILIES, *SPARSE])
@pytest.mark.parametrize("chunks", [[181], [7, 140, 1, 1, 12, 20]], ids=["whole", "chunked"])
def test_float32_logits_match_at_every_position(name, chunks, reference, drive, prompts):
    model = reference(name)
    (prompt,) = prompts(181)
    driver = drive(model.path, **OPTIONS)
    assert driver.info.device.startswith("cuda")
    np.testing.assert_allclose(scored(driver, prompt, chunks), model.logprobs(prompt).numpy(), atol=3e-4, rtol=1e-4)


@on_a_gpu
@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_logits_are_as_close_as_those_of_transformers(name, reference, drive, prompts):
    model = reference(name)
    (prompt,) = prompts(181)
    found = torch.from_numpy(scored(drive(model.path, **OPTIONS | {"dtype": "bfloat16"}), prompt, [7, 140, 1, 33]))
    expected = model.logprobs(prompt)
    with torch.inference_mode():
        theirs = half_precision(model)(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    assert (found - expected).abs().mean() < 1.3 * (theirs - expected).abs().mean() + 1e-3


@on_a_gpu
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("name", [*FAMILIES, *SPARSE])
def test_float32_greedy_tokens_match_in_mixed_traffic(name, graphs, reference, drive, prompts):
    model = reference(name)
    rows = (1, 4, 8) if graphs else ()
    driver = drive(model.path, disable_graphs=not graphs, graph_rows=rows, all_prompt_graphs=True, **OPTIONS)
    assert driver.info.graph_rows == rows
    steps = driver.runner._captured.steps
    assert (steps is not None and steps.prompts is not None) == graphs
    texts, found = traffic(driver, prompts)
    for slot, text in enumerate(texts, start=1):
        assert found[slot] == model.greedy(text, len(text) + 12)


@on_a_gpu
def test_sampled_tokens_are_those_of_the_cpu(reference, drive, prompts):
    model = reference("qwen3")
    sampling = SlotSampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=7, repetition_penalty=1.1)
    found = []
    for options in (OPTIONS, {"device": "cpu"}):
        driver = drive(model.path, **options)
        for slot, prompt in enumerate(prompts(5, 40, 90), start=1):
            driver.admit(slot, prompt, sampling=sampling)
        found.append([driver.generate(slot, len(driver.tokens[slot]) + 16) for slot in (1, 2, 3)])
    assert found[0] == found[1]


@on_a_gpu
def test_a_failed_capture_ends_in_eager_mode(reference, drive, prompts, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("troupe"), "propagate", True)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    driver = drive(reference("qwen3").path, **OPTIONS)
    assert driver.info.graph_rows == ()
    assert "decodes run without" in caplog.text
    traffic(driver, prompts)


@on_a_gpu
def test_what_the_device_cannot_do_is_said_with_a_way_out(reference, drive):
    path = reference("qwen3").path
    for options, advice in (
        ({"page_size": 24}, "--page-size 64"),
        ({"device_index": 63}, "--base-gpu-id"),
        ({"attention_backend": "ascend"}, "leave them out"),
        ({"dtype": "int8"}, "use bfloat16"),
    ):
        with pytest.raises(PlatformError, match=advice):
            drive(path, **OPTIONS | options)


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "--mem-fraction-static"),
        (RuntimeError("CUDA error: an illegal memory access was encountered\nmore"), "CUDA_LAUNCH_BLOCKING=1"),
        (RuntimeError("NCCL error: remote process exited"), "which of the other workers died first"),
        (RuntimeError("CUDA error: operation not permitted when stream is capturing"), "--disable-cuda-graph"),
        (RuntimeError("CUDA error: something new"), "to see which"),
    ],
)
def test_errors_of_the_device_are_explained(error, advice):
    told = explain(error, "GPU 3 (NVIDIA H200)")
    assert isinstance(told, DeviceError)
    assert str(told).startswith("GPU 3 (NVIDIA H200)")
    assert advice in str(told)
    assert "\n" not in str(told)


def test_other_errors_are_left_alone():
    assert explain(RuntimeError("shapes do not match"), "GPU 0") is None
    assert explain(PlatformError("CUDA says no"), "GPU 0") is None
