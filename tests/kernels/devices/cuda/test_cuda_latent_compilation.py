"""The kernels of latent attention and of routing compile for the GPUs they are made for, and fit their shared memory;
no GPU is needed. The shapes are those of DeepSeek-V2-Lite and V3."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton

from kernels.core.attention_rows import AttentionRows
from kernels.devices.cuda.attention.decode import DecodeScratch
from kernels.devices.cuda.attention.latent import attend_latent
from kernels.devices.cuda.attention.latent_prompts import MadeRows, gather
from kernels.devices.cuda.attention.plan import plan_attention
from kernels.devices.cuda.elementwise.latent_heads import place_latent
from kernels.devices.cuda.moe.routing import route, sum_experts
from kernels.devices.experts import Routing
from tests.kernels.devices.cuda.compiled import SHARED, compiling, empty, put

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="kernels are interpreted, not compiled")

BF16 = torch.bfloat16


def attended(heads):
    pages = np.zeros((6, 2), dtype=np.int32)
    rows = AttentionRows(np.array([9, 90, 3, 30, 0, 7]), np.array([1, 1, 4, 3, 100, 9]), pages, 2, 2)
    queries, rotated = empty(118, heads, 512, dtype=BF16), empty(118, heads, 64, dtype=BF16)
    plan, cache = plan_attention(rows, 0, 1, put), empty(9, 64, 576, dtype=BF16)
    attend_latent(queries, rotated, cache, plan, 0.1, DecodeScratch(cache.device))
    table, starts = empty(6, 2, dtype=torch.int32), empty(6, dtype=torch.int32)
    gather(cache, MadeRows(empty(1, 4, dtype=torch.int32), table, empty(3, 3, dtype=torch.int32), starts), 512)
    index, angles = empty(118, dtype=torch.int64), empty(118, 1, 64, dtype=BF16)
    queries, vectors = empty(118, heads, 192, dtype=BF16), empty(118, 576, dtype=BF16)
    place_latent(queries, vectors, empty(512, dtype=BF16), 1e-6, angles, angles, cache, index)


def routed():
    correction = empty(256, dtype=torch.float32)
    many = Routing(8, True, "sigmoid", 8, 4, True, 2.5, correction)
    for experts, routing in ((64, Routing(6, False)), (128, Routing(8, True)), (256, many)):
        pairs = route(empty(5, experts, dtype=torch.float32), routing)
        sum_experts(empty(5 * routing.chosen, 2048, dtype=BF16), pairs.weights)


@pytest.mark.parametrize("capability", SHARED)
def test_latent_attention_and_routing_compile(capability, monkeypatch):
    with compiling(monkeypatch, capability) as kernels:
        attended(16)
        attended(128)
        routed()
    for each in kernels:
        assert each.shared <= SHARED[capability], each
        assert each.spilled <= 512, each
