"""Every model family on a GPU against transformers, however the work is cut into steps, with graphs and without."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pytest
import torch

import kernels.devices.cuda.capture
from kernels.contract.config import RunnerConfig
from kernels.contract.errors import UnsupportedError
from kernels.contract.step import SlotSampling
from kernels.devices.capture import StepCaptureRequest
from kernels.devices.cuda.cache import CudaCaches
from kernels.devices.cuda.capture import CudaCapture
from kernels.devices.cuda.elementwise.elementwise import CudaElementwise
from kernels.devices.cuda.elementwise.norms import CudaNorm
from kernels.devices.cuda.errors import DeviceError, explain
from kernels.devices.cuda.features import FEATURES
from kernels.devices.cuda.linear import CudaLinearLayers
from kernels.devices.cuda.matmul.autotune import Choices
from kernels.devices.cuda.matmul.eight_bit import EightBitLinear
from kernels.devices.cuda.matmul.grouped import GroupedLinear, WideWeight
from kernels.devices.cuda.matmul.linear import CudaLinear
from kernels.devices.cuda.matmul.norm_then_linear import CudaNormThenLinear
from kernels.devices.elementwise import BiasedNorm
from kernels.devices.fallbacks import Fallbacks
from kernels.devices.linear import NormThenLinear
from kernels.devices.select import select_device
from kernels.devices.staged_memory import StagedMemory
from kernels.weights.quantization.weights import GroupedWeight, Int8Weight, quantize_int8
from tests.kernels.devices.cuda.interpreted import install
from tests.kits.device_features import features_of
from tests.kits.driver import FAMILIES
from tests.kits.executors import find_executor
from tests.kits.families import KEYS_AND_VALUES
from tests.kits.parity import half_precision, scored, traffic

OPTIONS = {"device": "cuda", "page_size": 16, "max_step_tokens": 256}


def layers(device):
    return CudaLinearLayers(CudaElementwise(torch.device(device)), Fallbacks(), Choices(device))


def test_it_does_what_is_said_of_gpus(monkeypatch):
    install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert features_of(select_device(RunnerConfig(model_path="", device="cuda"))) == FEATURES


on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def test_weights_with_inputs_quantized_first_have_no_kernel_of_their_own():
    """But behind that: the platform's own way to a gated one would leave it out."""
    linear = layers(torch.device("cpu"))
    words = torch.zeros(64, 128, dtype=torch.uint8)
    grouped = GroupedWeight(words, torch.ones(64, 8), None, 32, 4, activation="dynamic")
    clipped = Int8Weight(torch.zeros(64, 256, dtype=torch.int8), torch.ones(64), clip=torch.ones(1))
    for weight in (grouped, clipped):
        assert linear.own_quantized(weight, None, gated=True) is None


def test_norms_go_with_the_products_that_can_make_them(device):
    """And not with what is no norm of the platform's own, or no product of a weight."""
    made = layers(device)
    norm = CudaNorm(torch.ones(256, device=device), 1e-5)
    dense = torch.randn(64, 256, device=device)
    grouped = GroupedWeight(
        torch.zeros(64, 128, dtype=torch.uint8), torch.ones(64, 2), None, 128, 4, dtype=torch.float16
    )
    eight = dataclasses.replace(quantize_int8(dense), dtype=torch.float16)
    own = EightBitLinear(eight, None), GroupedLinear(grouped.to(device), None, WideWeight(device))
    for linear in (*own, CudaLinear(dense, None)):
        assert isinstance(made.make_norm_then_linear(norm, linear), CudaNormThenLinear)
        assert (
            type(made.make_norm_then_linear(BiasedNorm(made.elementwise, norm, norm.weight), linear)) is NormThenLinear
        )
    for which, other in (
        (norm, lambda x: x),
        (BiasedNorm(made.elementwise, norm, norm.weight), CudaLinear(dense, None)),
    ):
        assert type(made.make_norm_then_linear(which, other)) is NormThenLinear


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
    reported = []
    memory = StagedMemory(torch.device("cuda", 0), True, True, True)
    config = RunnerConfig("", **{"max_step_tokens": 600} | options)
    capture = CudaCapture(config, memory, CudaCaches(memory, ""), None)
    free = iter([35, 34])  # after each of two; what a graph's pool holds unused is no step's
    held = {"memory_reserved": lambda device: 50, "memory_allocated": lambda device: 40}
    fakes = {"empty_cache": lambda: None, "mem_get_info": lambda device: (next(free), 100), **held}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    memory._step_bytes = 35

    class Graphs:
        run = "run"

        def __init__(self, request, sizes, kv_heads, page_size, paying, fits, put):
            reported.append((sizes, paying, fits(), fits()))
            self.sizes = sizes

    monkeypatch.setattr(kernels.devices.cuda.capture, "PromptGraphs", Graphs)
    found = capture.prompt_steps(StepCaptureRequest(None, None, [0], 8, 4), 8)
    assert reported == ([] if sizes is None else [(sizes, paying, True, False)])
    assert found == (None if sizes is None else "run")


@on_a_gpu
@pytest.mark.parametrize("name", KEYS_AND_VALUES)
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
@pytest.mark.parametrize("name", KEYS_AND_VALUES)
def test_float32_greedy_tokens_match_in_mixed_traffic(name, graphs, reference, drive, prompts):
    model = reference(name)
    rows = (1, 4, 8) if graphs else ()
    driver = drive(model.path, disable_graphs=not graphs, graph_rows=rows, all_prompt_graphs=True, **OPTIONS)
    loaded = driver.runner._loaded
    captured = graphs and not loaded.model.reads_rows
    assert not loaded.device.experts.reads_back
    assert loaded.model.reads_rows == (name == "baichuan-alibi")
    assert driver.info.graph_rows == (rows if captured else ())
    whole = find_executor(driver.runner, "WholeStep")
    assert (whole is not None and whole._steps.prompts is not None) == captured
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
def test_what_the_device_cannot_do_is_reported_with_a_remedy(reference, drive):
    path = reference("qwen3").path
    for options, advice in (
        ({"page_size": 24}, "--page-size 64"),
        ({"device_index": 63}, "--base-gpu-id"),
        ({"attention_backend": "ascend"}, "leave them out"),
        ({"dtype": "int8"}, "use bfloat16"),
    ):
        with pytest.raises(UnsupportedError, match=advice):
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
    reported = explain(error, "GPU 3 (NVIDIA H200)")
    assert isinstance(reported, DeviceError)
    assert str(reported).startswith("GPU 3 (NVIDIA H200)")
    assert advice in str(reported)
    assert "\n" not in str(reported)


def test_other_errors_are_left_alone():
    assert explain(RuntimeError("shapes do not match"), "GPU 0") is None
    assert explain(UnsupportedError("CUDA says no"), "GPU 0") is None
