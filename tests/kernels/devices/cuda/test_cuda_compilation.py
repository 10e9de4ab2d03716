"""Every kernel compiles for the GPUs it is made for, fits their shared memory and keeps its numbers in registers; no
GPU is needed. The shapes are those of the models that are measured, and edges of what is allowed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton

from kernels.core.attention_rows import AttentionRows
from kernels.core.layer_context import LayerContext
from kernels.core.tree import DraftTree
from kernels.devices.cuda.attention.decode import PLAIN, DecodeScratch
from kernels.devices.cuda.attention.moving import move_accepted, move_caches
from kernels.devices.cuda.attention.plan import attention, plan_attention, plan_draft
from kernels.devices.cuda.attention.verify import HEADER
from kernels.devices.cuda.drafting.acceptance import accept, copy_accepted
from kernels.devices.cuda.drafting.candidates import candidates
from kernels.devices.cuda.drafting.tree_builder import CudaTreeBuilder
from kernels.devices.cuda.elementwise.activation import swiglu
from kernels.devices.cuda.elementwise.angles import angles
from kernels.devices.cuda.elementwise.norm_rope_cache import RopeCacheEpilogue, norm_rope_cache
from kernels.devices.cuda.elementwise.norms import Before, CudaNorm, norm_embeddings_and_states, norm_pair
from kernels.devices.cuda.elementwise.rows import add_rows, look_up
from kernels.devices.cuda.elementwise.sampling import greedy_tokens, mask_logits
from kernels.devices.cuda.graphs.arrivals import ArrivalRing
from kernels.devices.cuda.graphs.staging import Staged, stage
from kernels.devices.cuda.graphs.step_graphs import enter, leave
from kernels.devices.cuda.invariant_kernels import InvariantLinear
from kernels.devices.cuda.matmul import gemm_small, gemm_small_quantized, gemm_small_tma, gemv_quantized, low_rank_one
from kernels.devices.cuda.matmul.eight_bit import EightBitLinear
from kernels.devices.cuda.matmul.gemm_small_quantized import Form, Tiles
from kernels.devices.cuda.matmul.grouped import GroupedLinear, WideWeight
from kernels.devices.cuda.matmul.linear import CudaLinear
from kernels.devices.cuda.matmul.low_rank import CudaLowRankDelta, add_low_rank, make_up
from kernels.devices.cuda.matmul.number_conversions import BYTES, EIGHTHS, NIBBLES
from kernels.devices.cuda.matmul.qkv_projection import project
from kernels.devices.cuda.matmul.scaled_residual import Scaled
from kernels.devices.draft_kernels import AcceptedBuffers, AcceptedTokens, TreeShape
from kernels.devices.row_attention import CapAndSinks
from kernels.weights.quantization.weights import Fp8Weight, GroupedWeight, Int8Weight
from tests.kernels.devices.cuda.compiled import SHARED, compiling, empty, put

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="kernels are interpreted, not compiled")

LLAMA = (32, 8, 128)  # query heads, key heads, dimension
QWEN = (16, 8, 128)
SMALL = (14, 2, 64)
GPT_OSS = (64, 8, 64)
GEMMA_2 = (8, 4, 256)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def smalls(dtype):
    """What stands between the products."""
    for width in (1024, 4096):
        norm = CudaNorm(empty(width, dtype=dtype), 1e-5)
        norm(empty(5, width, dtype=dtype))
        norm.add(empty(5, width, dtype=dtype), empty(5, width, dtype=dtype))
        norm_pair(empty(5, width, dtype=dtype), norm, empty(5, width, dtype=dtype), norm)
        ids, turns = empty(5, dtype=torch.int64), empty(128, dtype=FP32)
        norm_embeddings_and_states(
            ids, empty(999, width, dtype=dtype), norm, empty(5, width, dtype=dtype), norm, ids, turns, 1.0
        )
    rows = look_up(empty(5, dtype=torch.int64), empty(128256, 4096, dtype=dtype))
    for more in (rows, None):
        add_rows(rows, more, empty(5, 8192, dtype=dtype)[:, 4096:])
    swiglu(empty(5, 2 * 3072, dtype=dtype))
    angles(empty(5, dtype=torch.int64), empty(128, dtype=FP32), 1.0, dtype)
    greedy_tokens(empty(5, 151936, dtype=dtype))
    mask_logits(empty(5, 151936, dtype=dtype), empty(3, 1 + 4748, dtype=torch.int32))
    state, table = empty(5, 3 + 129, dtype=torch.int32), empty(65, 8196, dtype=torch.int32)
    tokens, positions = empty(5, dtype=torch.int32), empty(5, dtype=torch.int64)
    ring, logits = ArrivalRing(5, tokens.device), empty(5, 151936, dtype=dtype)
    enter(state, table, 64, tokens, positions, positions, ring)
    for arrivals in (None, ring):
        leave(state, table, logits, logits, tokens, arrivals)
    for heads, kv_heads, dim in (LLAMA, SMALL):
        own = RopeCacheEpilogue(
            heads, *empty(2, 1, 1, dim, dtype=dtype), empty(99, 2, kv_heads, 64, dim, dtype=dtype), positions[:1]
        )
        for inputs in (1024, 4096):
            x, weight = empty(1, inputs, dtype=dtype), empty((heads + 2 * kv_heads) * dim, inputs, dtype=dtype)
            for before in (None, Before(None, x, 1e-5)):
                project(x, weight, None, own, before)
    for (heads, kv_heads, dim), normed in ((LLAMA, False), (QWEN, True), (SMALL, False)):
        weight = empty(heads + kv_heads, dim, dtype=dtype) if normed else None
        for tokens in (16, 100):
            norm_rope_cache(
                empty(tokens, heads + 2 * kv_heads, dim, dtype=dtype), heads, kv_heads, weight, 1e-6,
                empty(tokens, 1, dim, dtype=dtype), empty(tokens, 1, dim, dtype=dtype),
                empty(9, 2, kv_heads, 64, dim, dtype=dtype), empty(tokens, dtype=torch.int64),
            )  # fmt: skip
    caches = [empty(9, 2, 8, 64, 128, dtype=dtype) for _ in range(2)]
    for each in (2, 16):
        move_caches(caches, empty(3 * each, dtype=torch.int64), empty(3 * each, dtype=torch.int64), each, put)


def adapters(dtype):
    """Additions of an adapter of 8 places to fused layers, in decodes and prompts."""
    for rows, rank in ((1, 16), (33, 64), (2048, 16), (2048, 128), (33, 1024)):
        x, out = empty(rows, 4096, dtype=dtype), empty(rows, 6144, dtype=dtype)
        down, up = empty(9, 3 * rank, 4096, dtype=dtype), empty(9, rank, 6144, dtype=dtype)
        tiles = empty(48, 3, dtype=torch.int32)
        places = empty(rows, dtype=torch.int64)
        for adds in (True, False):
            add_low_rank(x, places, down, up, tiles, out, adds=adds)
        add_low_rank(x, places, down, up, tiles, out, invariant=True)


def adapted_products(dtype):
    """Products of 16 adapters' rows, of one token, of a few, and of prompts."""
    context = LayerContext(None, torch.device("meta"))
    for sizes, inputs, gated in (
        ((4096, 1024, 1024), 4096, False),
        ((14336, 14336), 4096, True),
        ((4096,), 14336, False),
    ):
        down, up = (
            empty(17, len(sizes) * 16, inputs, dtype=dtype),
            make_up((1, 17, 16, sum(sizes)), dtype, context.device)[0],
        )
        delta = CudaLowRankDelta(context, down, up, sizes)
        weight, norm = empty(sum(sizes), inputs, dtype=dtype), CudaNorm(empty(inputs, dtype=dtype), 1e-5)
        linear = CudaLinear(weight, None, gated=gated, delta=delta)
        for tokens in (1, 16, 64, 100, 2048):
            x = empty(tokens, inputs, dtype=dtype)
            context.enter(empty(tokens, dtype=torch.int64))
            linear(x)
            linear(x)  # as a layer that runs twice a pass
            context.enter(empty(tokens, dtype=torch.int64))
            if not gated:
                linear.into(x, empty(tokens, sum(sizes), dtype=dtype), norm)
            context.enter(empty(tokens, dtype=torch.int64))
            for fused in linear.fused_with_norm(x, Before(None, x, 1e-5)).values():
                fused()
            if len(sizes) == 3 and tokens == 1:
                context.enter(empty(tokens, dtype=torch.int64))
                cache = empty(99, 2, 8, 64, 128, dtype=dtype)
                heads = RopeCacheEpilogue(32, *empty(2, 1, 1, 128, dtype=dtype), cache, empty(1, dtype=torch.int64))
                low_rank_one.multiply(x, weight, None, False, delta.one(), before=Before(None, x, 1e-5), epilogue=heads)
            if linear.leaves(x):
                linear.left(Scaled.room(norm, x))


def draft_tokens(dtype):
    """What stands between a draft's passes."""
    candidates(empty(5, 151936, dtype=dtype), 8)
    for topk, steps, nodes, vocab in ((4, 3, 16, 32000), (1, 3, 4, 32000), (8, 9, 64, 151936)):
        ids = empty(vocab, dtype=torch.int64) if topk == 4 else None
        shape, rows = TreeShape(steps, topk, nodes, 0, 64, (0,), ids), 2
        host = empty(rows, 2 + 129, dtype=torch.int64)
        outcome = empty(rows, 3 + steps, dtype=torch.int64)
        features = empty(rows * (steps + 1), 12288, dtype=dtype)
        given = AcceptedTokens(
            host[:, 0], host[:, 1], host[:, 2:], outcome, outcome[:, 2:].contiguous(), features,
            empty(9, 4096, dtype=dtype),
        )  # fmt: skip
        tree, numbers = (
            DraftTree(*(empty(rows, nodes, dtype=torch.int64) for _ in range(4))),
            outcome[:, :4].contiguous(),
        )
        sampled, table = empty(rows * nodes, dtype=torch.int64), empty(9, 8192, dtype=torch.int32)
        found = accept(tree, numbers, sampled, sampled.bool(), steps, 0, table)
        accept(tree, numbers, sampled, sampled.bool(), steps, 3, table)
        caches = [empty(9, 2, 8, 64, 128, dtype=dtype) for _ in range(2)]
        move_accepted(caches, sampled, numbers, found.outcome, lambda parts: empty(2, dtype=torch.int64))
        columns = empty(rows, HEADER + 129, dtype=torch.int32)
        for pages in (columns[:, HEADER:], host):
            buffers = AcceptedBuffers(host, outcome, given.tokens, features)
            copy_accepted(numbers, pages, found.outcome, found.tokens, features, buffers)
        staged = Staged(sampled.int(), sampled, sampled, columns, numbers, tree)
        stage(empty(rows, 1 + HEADER + 129, dtype=torch.int32), tree, staged, 64)
        growing = CudaTreeBuilder(shape, given)
        growing.observe()
        states = growing.start(empty(rows * (steps + 1), 4096, dtype=dtype))
        for _ in range(1, min(steps, 3)):  # the rest are like these
            states = growing.level(empty(len(states), vocab, dtype=dtype), states).states
        growing.tree(empty(len(states), vocab, dtype=dtype))


def products(dtype):
    for outputs, inputs in ((6144, 4096), (4096, 14336), (128256, 4096), (1024, 3072)):
        CudaLinear(empty(outputs, inputs, dtype=dtype), None)(empty(1, inputs, dtype=dtype))
    CudaLinear(empty(28672, 4096, dtype=dtype), None, gated=True)(empty(1, 4096, dtype=dtype))
    CudaLinear(empty(6144, 1024, dtype=dtype), empty(6144, dtype=dtype), gated=True)(empty(1, 1024, dtype=dtype))
    for outputs, inputs, gated in ((28672, 4096, True), (6144, 4096, False), (6144, 1024, True), (4096, 1024, False)):
        x, linear = empty(1, inputs, dtype=dtype), CudaLinear(empty(outputs, inputs, dtype=dtype), None, gated=gated)
        linear.fused_with_norm(x, Before(None, x, 1e-5))["within"]()
    for outputs, inputs in ((4096, 4096), (4096, 14336), (1024, 3072)):
        x, linear = empty(1, inputs, dtype=dtype), CudaLinear(empty(outputs, inputs, dtype=dtype), None)
        linear.into(x, empty(1, outputs, dtype=dtype), None)


def few_tokens(dtype):
    for tokens in (16, 32, 64):
        for gated, outputs, inputs in ((False, 4096, 1024), (False, 151936, 1024), (True, 28672, 4096)):
            weight = empty(outputs, inputs, dtype=dtype)
            for cut in gemm_small.split_options(tokens, weight, gated).values():
                gemm_small.multiply(
                    empty(tokens, inputs, dtype=dtype), weight, None, gemm_small.counters(weight), gated, cut
                )
            if torch.cuda.get_device_capability()[0] == 9:
                described, x = gemm_small_tma.described(weight), empty(tokens, inputs, dtype=dtype)
                gemm_small_tma.multiply(x, described, empty(outputs, dtype=dtype), gemm_small.counters(weight), gated)
                eight, x = (empty(*given.shape, dtype=torch.float8_e4m3fn) for given in (weight, x))
                scales = (empty(count, dtype=torch.float32) for count in (tokens, outputs))
                both, described = gemm_small_tma.EightBitScales(*scales, dtype), gemm_small_tma.described(eight)
                gemm_small_tma.multiply(x, described, None, gemm_small.counters(eight), gated, scales=both)


def skinny_products(dtype):
    for tokens, tiles in ((5, Tiles(64, 64, 6, 4)), (16, Tiles(128, 64, 6, 4)), (64, Tiles(128, 64, 4, 8))):
        for gated in (False, True):
            form = Form(BYTES, empty(28672, 2048, dtype=torch.int16), empty(28672, dtype=torch.float32))
            arrived = gemm_small_quantized.counters(28672, torch.device("meta"))
            gemm_small_quantized.multiply(empty(tokens, 4096, dtype=dtype), form, None, arrived, gated, tiles)


def singles(dtype):
    def scales(*shape):
        return empty(*shape, dtype=torch.int32)

    for outputs, inputs, gated in ((28672, 4096, True), (4096, 14336, False), (1000, 1536, True)):
        x, words = empty(1, inputs, dtype=dtype), inputs // 256
        forms = [
            Form(NIBBLES, empty(outputs, inputs // 4, dtype=torch.int16), scales(words, 1, outputs), zeros, 2, brain)
            for brain, zeros in ((False, None), (True, scales(words, outputs)))
        ]
        for kind in (BYTES, EIGHTHS) if torch.cuda.get_device_capability()[0] > 8 else (BYTES,):
            forms.append(Form(kind, empty(outputs, inputs // 2, dtype=torch.int16), empty(outputs, dtype=FP32)))
        for form in forms:
            bias = empty(outputs, dtype=dtype)
            for way in gemv_quantized.ways(x, form, bias, gated, 64).values():
                way()
            if inputs == 4096:
                for fused in gemv_quantized.fused(x, form, bias, gated, 64, Before(x, x, 1e-5)).values():
                    fused()
    cache = empty(99, 2, 8, 64, 128, dtype=dtype)
    own = RopeCacheEpilogue(32, *empty(2, 1, 1, 128, dtype=dtype), cache, empty(1, dtype=torch.int64))
    form, x = (
        Form(NIBBLES, empty(6144, 1024, dtype=torch.int16), scales(16, 1, 6144), None, 2),
        empty(1, 4096, dtype=dtype),
    )
    for cut in gemv_quantized.tilings(form, False).values():
        gemv_quantized.multiply(x, form, None, False, 64, cut, Before(x, x, 1e-5), own)


def eight_bits(dtype):
    for inputs in (1024, 4096):
        for weight in (
            Int8Weight(empty(4096, inputs, dtype=torch.int8), empty(4096, dtype=FP32), dtype=dtype),
            Fp8Weight(empty(4096, inputs, dtype=torch.float8_e4m3fn), empty(4096, dtype=FP32), dtype=dtype),
        ):
            for gated in (False, True):
                linear = EightBitLinear(weight, None, gated=gated)
                for tokens in (1, 16):
                    linear(empty(tokens, inputs, dtype=dtype))
                if torch.cuda.get_device_capability(None)[0] >= 9 or isinstance(weight, Int8Weight):
                    linear(empty(70, inputs, dtype=dtype))  # older devices have no products of e4m3


def groups(dtype):
    """4 and 8 bits in groups of 128, and of as many as leave the fewest inputs to a scale, with zeros and without."""
    for bits, group, zeros in ((4, 128, False), (4, 128, True), (4, 32, True), (8, 64, True), (8, 4096, False)):
        shape = 4096, 4096 // group
        weight = GroupedWeight(
            empty(4096, 4096 * bits // 8, dtype=torch.uint8),
            empty(*shape, dtype=FP16),
            empty(*shape, dtype=torch.uint8) if zeros else None,
            group,
            bits,
            dtype=dtype,
        )
        linear = GroupedLinear(weight, None, WideWeight(torch.device("meta")))
        for tokens in (1, 16, 70):
            linear(empty(tokens, 4096, dtype=dtype))


def invariant(dtype):
    for outputs, inputs, gated in ((6144, 4096, False), (28672, 4096, True), (4096, 14336, False)):
        linear = InvariantLinear(empty(outputs, inputs, dtype=dtype), empty(outputs, dtype=dtype), gated)
        for tokens in (1, 64, 2048):
            linear(empty(tokens, inputs, dtype=dtype))
    attend(dtype, *LLAMA, 64, scratch=False)


def attend(dtype, heads, kv_heads, dim, page_size, windows=(0,), scratch=True, extra=PLAIN):
    """Decodes, drafts as chains and as trees, and prompts."""
    cache, pages = empty(99, 2, kv_heads, page_size, dim, dtype=dtype), 9
    scratch = DecodeScratch(torch.device("meta")) if scratch else None
    held = pages * page_size
    for window in windows:
        for counts in ([1], [1] * 200, [120], [held]):
            table = np.ones((len(counts), pages), dtype=np.int32)
            starts = np.full(len(counts), held) - counts
            rows = AttentionRows(starts, np.array(counts), table, len(counts) if counts[0] == 1 else 0)
            plan = plan_attention(rows, window, kv_heads, put)
            attention(empty(sum(counts), heads, dim, dtype=dtype), cache, plan, 0.1, scratch, extra)
        for tokens, tree in ((4, False), (16, True), (64, True)):
            bits = empty(2, tokens, dtype=torch.int64) if tree else None
            starts, table = empty(2, dtype=torch.int64), empty(2, pages, dtype=torch.int64)
            plan = plan_draft(starts, table, tokens, bits, starts, window, page_size)
            attention(empty(2 * tokens, heads, dim, dtype=dtype), cache, plan, 0.1, scratch, extra)


def capped(dtype):
    """gpt-oss and Gemma 2."""
    attend(dtype, *GPT_OSS, 64, (128,), extra=CapAndSinks(0.0, empty(GPT_OSS[0], dtype=FP32)))
    attend(dtype, *GEMMA_2, 64, (0,), extra=CapAndSinks(50.0))


def wide(dtype):
    """The heads of Gemma 4's full attention, Llama 4's chunks, and Grok 2's scores."""
    attend(dtype, 8, 1, 512, 64)
    attend(dtype, *LLAMA, 64, (-8192,))
    attend(dtype, *LLAMA, 64, extra=CapAndSinks(30.0, None, 1024))


SHORT = {
    "smalls": smalls,
    "adapters": adapters,
    "adapted products": adapted_products,
    "draft_tokens": draft_tokens,
    "products": products,
    "few tokens": few_tokens,
    "skinny": skinny_products,
    "invariant": invariant,
}
LONG = {
    "singles": singles,
    "llama": lambda dtype: attend(dtype, *LLAMA, 64),
    "eight bits": eight_bits,
    "groups": groups,
    "capped": capped,
    "wide": wide,
    "small": lambda dtype: attend(dtype, *SMALL, 16, (100,)),
}
SPILLED = {
    "invariant_attention_kernel": 64,
    "prefill_attention_kernel": 512,
    "verify_attention_kernel": 512,
    "gemv_quantized_kernel": 128,
    "low_rank_up_kernel": 64,
    "low_rank_many_up_kernel": 64,
}
"""Bytes that some kernels write for want of registers, on some devices or with some sizes of pages: known, and little
beside what they read."""


def test_products_of_any_batch_load_both_factors_ahead(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    tiles, stages = {1: (64, 16, 128), 64: (64, 64, 64), 2048: (128, 128, 64)}, 4
    with compiling(monkeypatch, 90) as found:
        for tokens in tiles:
            InvariantLinear(empty(4096, 4096), None)(empty(tokens, 4096))
    expected = [stages * (rows + columns) * block * BF16.itemsize for rows, columns, block in tiles.values()]
    assert [kernel.shared for kernel in found if kernel.kernel == "invariant_gemm_kernel"] == expected


@pytest.mark.parametrize(
    ("case", "capability"),
    [(name, capability) for name in SHORT for capability in SHARED]
    + [pytest.param(name, 90, marks=pytest.mark.long) for name in LONG]
    + [pytest.param("singles", 80, marks=pytest.mark.long)],
)
def test_kernels_compile_and_fit(case, capability, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # compiled anew, also what an earlier run compiled
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (capability // 10, capability % 10))
    with compiling(monkeypatch, capability) as found:
        (SHORT | LONG)[case](BF16)
    assert found
    for kernel in found:
        print(kernel)
        assert kernel.shared <= SHARED[capability], kernel
        assert kernel.spilled <= SPILLED.get(kernel.kernel, 0), kernel
