"""The int8 cache on a simulated NPU, whose operators check the vendor's constraints."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from kernels.contract.config import RunnerConfig
from kernels.contract.errors import UnsupportedError
from kernels.core.attention_rows import AttentionRows
from kernels.devices.npu.device import NpuDevice
from kernels.devices.npu.fused_attention import FusedPart
from kernels.devices.npu.int8_cache import DequantizedPart, Int8Layer, make_int8_layer
from kernels.devices.npu_simulator.constraints import ConstraintError
from kernels.devices.npu_simulator.fused_attention import Attention
from kernels.weights.quantization.cache import LayerScales
from tests.kits.verifying import made

NPU = torch.device("npu", 0)
PAGE = 128


def make(dtype="bfloat16", **options):
    platform = NpuDevice(RunnerConfig("", device="npu", page_size=PAGE, **options))
    platform.select_dtype(dtype, None)
    platform.cache.dtype = torch.int8
    return platform


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(5)


SHAPES = {
    "decodes": {"decodes": (3, 200, 130, 0)},
    "mixed": {"decodes": (3, 200), "drafts": ((31, 5), (120, 9)), "prefills": ((0, 12), (140, 30))},
}


@pytest.mark.parametrize("backend", ["ascend", "torch_native"])
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dim", [64, 128])
def test_attention_over_int8(dim, shape, trees, window, backend, generator):
    platform = make(attention_backend=backend)
    case = made(
        platform, generator, dtype=torch.bfloat16, heads=6, kv_heads=2, dim=dim, page_size=PAGE, window=window,
        trees=trees and shape == "mixed", fill=1e2, put=lambda tensor: tensor.to(NPU), **SHAPES[shape],
    )  # fmt: skip
    assert isinstance(case.cache, Int8Layer)
    assert case.cache.keys.shape[3] == dim  # not filled up to what floats are
    plan = platform.attention.plan(case.rows, window)
    first = plan.parts[0]
    assert isinstance(first, FusedPart if backend == "ascend" and window == 0 else DequantizedPart)
    queries = torch.cat((case.queries, case.queries[:, :4]), 1)[:, :6]  # of a projection that has keys and values, too
    found = platform.attention.attend(queries, case.cache, plan, 0.2).cpu().float()
    assert (found - case.expected).norm() <= 0.02 * case.expected.norm()


def test_static_scales(generator):
    """Each number's of each head, with offsets; decodes and prompts find the same."""
    platform = make()
    kv_heads, dim, length = 2, 64, 150
    keys_values = torch.randn(length, 2, kv_heads, dim, generator=generator) * (1 + torch.arange(dim) / 8) + 3
    low, high = keys_values.amin(0), keys_values.amax(0)
    scales = ((high - low) / 240).bfloat16().float()
    fixed = LayerScales(scales, -((high + low) / 2 / scales).round()).to(NPU)
    (cache,) = platform.cache.make(1, 4, PAGE, kv_heads, dim, torch.bfloat16, [fixed])
    assert cache.key_scales is None
    index = torch.arange(PAGE, PAGE + length).to(NPU)
    platform.cache.write(cache, index, keys_values.flatten(1, 2).to(torch.bfloat16).to(NPU))
    query = torch.randn(1, 4, dim, generator=generator).to(torch.bfloat16)
    table = np.array([[1, 2]], np.int32)
    found = []
    for rows in (
        AttentionRows(np.array([length - 1]), np.array([1]), table, 1),
        AttentionRows(np.array([length - 1]), np.array([1]), table, 0),
    ):
        found.append(
            platform.attention.attend(query.to(NPU), cache, platform.attention.plan(rows, 0), 0.02).cpu().float()
        )
    keys, values = keys_values.repeat_interleave(2, 2).unbind(1)
    weights = torch.einsum("hd,thd->ht", query[0].float(), keys).mul(0.02).softmax(-1)
    expected = torch.einsum("ht,thd->hd", weights, values).view(1, -1)
    for each in found:
        assert (each - expected).norm() <= 0.02 * expected.norm()


def test_what_moves_and_what_is_cleared(generator):
    platform = make()
    (cache,) = platform.cache.make(1, 3, PAGE, 2, 32, torch.bfloat16)
    sizes = torch.logspace(-2, 2, 3 * PAGE).view(-1, 1, 1)
    numbers = (torch.randn(3 * PAGE, 4, 32, generator=generator) * sizes).to(torch.bfloat16)
    platform.cache.write(cache, torch.arange(3 * PAGE).to(NPU), numbers.to(NPU))
    whole = torch.arange(3).to(NPU)

    def read():
        held = cache.dequantized(whole, torch.float32, 32)
        return torch.stack((held.keys.cpu(), held.values.cpu())).view(2, 3 * PAGE, 2, 32)

    before = read()
    source, target = [300, 141, 142, 20, 0, 0], [140, 142, 141, 33, 0, 0]
    platform.cache.move(cache, torch.tensor(source).to(NPU), torch.tensor(target).to(NPU))
    expected = before.clone()
    for one, other in zip(source, target, strict=True):
        expected[:, other] = before[:, one]
    assert torch.equal(read(), expected)
    platform.cache.clear([cache], [2])
    expected[:, 2 * PAGE :] = 0
    assert torch.equal(read(), expected)


def test_what_an_npu_does_not_keep(caplog):
    platform = make()
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        with pytest.raises(UnsupportedError, match="use --kv-cache-dtype int8"):
            platform.cache.check_dtype(dtype)
    with caplog.at_level(logging.WARNING, "troupe.kernels.npu"):
        platform.cache.check_dtype(torch.int8)
    assert "for decodes only" in caplog.text
    assert platform.cache.token_bytes(8, 128, torch.bfloat16) == 2 * 8 * (128 + 4)
    assert platform.cache.token_bytes(8, 128, torch.bfloat16, fixed=True) == 2 * 8 * 128


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"query": (2, 2, 4 * 64)}, "one query a request"),
        ({"modes": (5, 0)}, "must be equal, 0 or 5"),
        ({"modes": (1, 1)}, "must be equal, 0 or 5"),
        ({"key_scale": None}, "need it"),
        ({"key_scale": torch.zeros(3, PAGE, 2)}, "must be one of"),
        ({"value_scale": torch.zeros(3, 2, PAGE, dtype=torch.bfloat16)}, "must be float32"),
        ({"sparse": 3, "mask": torch.zeros(2048, 2048, dtype=torch.int8)}, "take no mask"),
        ({"blocks": None}, "in pages only"),
    ],
)
def test_the_vendor_s_rules_for_int8(change, says):
    layer = make_int8_layer(3, PAGE, 2, 64, None, torch.device("cpu"))
    call = {
        "operator": "attention", "query": (2, 1, 4 * 64), "key": layer.keys.view(3, PAGE, 128),
        "value": layer.values.view(3, PAGE, 128), "mask": None, "lengths": None, "kv_lengths": [3, 4],
        "blocks": torch.zeros(2, 1, dtype=torch.int32), "sink": None, "heads": 4, "kv_heads": 2, "scale": 1.0,
        "before": 1 << 30, "after": 1 << 30, "layout": "BSH", "sparse": 0, "precise": 1, "block_size": PAGE,
        "lse": False, "key_scale": layer.key_scales, "value_scale": layer.value_scales, "modes": (5, 5),
    }  # fmt: skip
    whole = call | change
    whole["query"] = torch.zeros(whole["query"], dtype=torch.bfloat16)
    with pytest.raises(ConstraintError, match=says):
        Attention(**whole).check()
    call["query"] = torch.zeros(call["query"], dtype=torch.bfloat16)
    Attention(**call).check()


@pytest.mark.parametrize("name", ["qwen3", "mistral"])
def test_graphs_generate_what_steps_generate(name, reference, drive, prompts):
    """Decodes of a whole model, with windows and without; a model with windows has no graphs of them."""
    options = {
        "device": "npu", "page_size": PAGE, "max_total_tokens": 16 * PAGE, "dtype": "bfloat16",
        "kv_cache_dtype": "int8", "graph_rows": (2,),
    }  # fmt: skip
    outputs = []
    for graphs in (True, False):
        driver = drive(reference(name).path, disable_graphs=not graphs, **options)
        assert bool(driver.info.graph_rows) == (graphs and name == "qwen3")
        for slot, prompt in enumerate(prompts(140, 20), start=1):
            driver.admit(slot, prompt)
            driver.step([(slot, len(prompt))])
        for _ in range(12):
            assert not driver.step([(1, 1), (2, 1)]).failed
        outputs.append([driver.tokens[1], driver.tokens[2]])
        assert driver.info.cache_dtype == "int8"
    assert outputs[0] == outputs[1]
