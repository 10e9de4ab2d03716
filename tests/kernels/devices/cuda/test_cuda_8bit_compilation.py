"""The kernels for an 8-bit cache compile for all GPUs that support its dtype, without register spills."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton

from kernels.core.attention_rows import AttentionRows
from kernels.devices.cuda.attention.cache_8bit import Cache8bit
from kernels.devices.cuda.attention.decode import DecodeScratch
from kernels.devices.cuda.attention.moving import move_caches
from kernels.devices.cuda.attention.plan import attention, plan_attention, plan_draft
from kernels.devices.cuda.elementwise.norm_rope_cache import norm_rope_cache
from kernels.weights.quantization.cache import CACHE_DTYPES, SCALE, LayerScales
from tests.kernels.devices.cuda.compiled import SHARED, compiling, empty, put

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="kernels are interpreted, not compiled")

LLAMA = (32, 8, 128, 64)  # query heads, key heads, dimension, tokens of a page
SMALL = (14, 2, 64, 16)


def run(name, fixed, heads, kv_heads, dim, page_size):
    """Everything that reads or writes such a cache."""
    shape, pages = (99, 2, kv_heads, page_size, dim), 9
    layer = LayerScales(empty(2, kv_heads, dim, dtype=torch.float32)) if fixed else None
    scales = None if fixed else empty(*shape[:-1], dtype=SCALE)
    cache = Cache8bit(empty(*shape, dtype=CACHE_DTYPES[name]), scales, layer)
    for tokens in (16, 100):
        norm_rope_cache(
            empty(tokens, heads + 2 * kv_heads, dim), heads, kv_heads, None, 1e-6, empty(tokens, 1, dim),
            empty(tokens, 1, dim), cache, empty(tokens, dtype=torch.int64),
        )  # fmt: skip
    places = empty(12, dtype=torch.int64)
    move_caches([cache, cache], places, places, 4, put)
    scratch, held = DecodeScratch(torch.device("meta")), pages * page_size
    for counts in ([1], [1] * 200, [120], [held]):
        table = np.ones((len(counts), pages), dtype=np.int32)
        starts = np.full(len(counts), held) - counts
        rows = AttentionRows(starts, np.array(counts), table, len(counts) if counts[0] == 1 else 0)
        plan = plan_attention(rows, 0, kv_heads, put)
        attention(empty(sum(counts), heads, dim), cache, plan, 0.1, scratch)
    for tokens, tree in ((4, False), (16, True)):
        bits = empty(2, tokens, dtype=torch.int64) if tree else None
        starts, table = empty(2, dtype=torch.int64), empty(2, pages, dtype=torch.int64)
        plan = plan_draft(starts, table, tokens, bits, starts, 0, page_size)
        attention(empty(2 * tokens, heads, dim), cache, plan, 0.1, scratch)


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize(("name", "fixed"), [("int8", False), ("fp8_e4m3", False), ("fp8_e5m2", True)])
@pytest.mark.parametrize("shape", [LLAMA, SMALL], ids=["llama", "small"])
def test_kernels_for_an_8bit_cache_compile(shape, name, fixed, capability, monkeypatch, tmp_path):
    if name != "int8" and capability < 89:
        pytest.skip("refused there: it has no such numbers")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # compiled anew, also what an earlier run compiled
    with compiling(monkeypatch, capability) as found:
        run(name, fixed, *shape)
    kernels = {kernel.kernel for kernel in found}
    assert {"decode_attention_kernel", "verify_attention_kernel", "prefill_attention_kernel"} <= kernels
    for kernel in found:
        assert kernel.shared <= SHARED[capability], kernel
        assert kernel.spilled <= 8, kernel  # a register or two, of the 128 that a program of these may have
