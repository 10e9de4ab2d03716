"""Layers of experts in two products: as experts one by one, and compiled for GPUs that are not there."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import triton

from kernels.cuda.experts import CudaExperts
from kernels.layers.experts import ExpertsInTurn, ExpertWeights
from kernels.quantization.weights import Fp8Weight, Int8Weight, quantize_fp8, quantize_int8
from tests.kernels.cuda.compiled import SHARED, compiling, empty

BF16 = torch.bfloat16
PLAIN, WIDEN = "plain", {"int8": quantize_int8, "fp8": quantize_fp8}


def layers(kind, dtype, device, count=5, hidden=80, inner=48):
    """A router, and experts as a layer takes them and as functions."""
    generator = torch.Generator().manual_seed(count)

    def random(*shape):
        return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

    def linear(weight):
        dense = weight if isinstance(weight, torch.Tensor) else weight.dequantize(torch.float32)
        return lambda x: x.float() @ dense.float().t()

    def gated(weight):
        both = linear(weight)
        return lambda x: torch.nn.functional.silu(both(x)[:, :inner]) * both(x)[:, inner:]

    given, functions = [], []
    for _ in range(count):
        pair = [random(2 * inner, hidden), random(hidden, inner)]
        if kind != PLAIN:
            pair = [WIDEN[kind](weight) for weight in pair]
        functions.append((gated(pair[0]), linear(pair[1])))
        given.append(ExpertWeights(pair[0].to(device), None, pair[1].to(device), None))
    return random(count, hidden), given, functions


@pytest.mark.parametrize("kind", [PLAIN, "int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter has no products of bfloat16
@pytest.mark.parametrize("tokens", [1, 7, 120])
def test_two_products_are_those_of_experts_one_by_one(kind, dtype, tokens, device):
    router, given, functions = layers(kind, dtype, device)
    x = torch.randn(tokens, 80, generator=torch.Generator().manual_seed(tokens)).to(dtype)
    assert CudaExperts.fits(given, (9, 0))
    onto = router.to(device)
    found = CudaExperts(lambda x: x @ onto.t(), given, 2, True)(x.to(device)).cpu()
    expected = ExpertsInTurn(lambda x: x @ router.t(), functions, 2, True)(x)
    limit = 1e-4 if dtype == torch.float32 else 2e-2
    assert (found - expected).float().norm() <= limit * expected.float().norm()


def test_what_the_kernel_does_not_take():
    _, given, _ = layers("int8", BF16, "cpu")
    first = given[0]
    assert CudaExperts.fits(given, (8, 0))
    assert not CudaExperts.fits(layers("fp8", BF16, "cpu")[1], (8, 0))
    assert not CudaExperts.fits([*given, *layers(PLAIN, BF16, "cpu")[1]], (9, 0))
    for change in ({"down_bias": torch.zeros(80)}, {"down": dataclasses.replace(first.down, clip=torch.ones(1))}):
        assert not CudaExperts.fits([dataclasses.replace(first, **change), *given[1:]], (9, 0))
    blocks = Fp8Weight(torch.zeros(80, 48).to(torch.float8_e4m3fn), torch.ones(2, 1), (64, 64))
    assert not CudaExperts.fits([ExpertWeights(blocks, None, blocks, None)], (9, 0))


@pytest.mark.long
@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="kernels are interpreted, not compiled")
@pytest.mark.parametrize("capability", [80, 90])
def test_it_compiles(capability, monkeypatch, tmp_path):
    """For 128 experts of which a token takes 8, as Qwen3-30B-A3B has them."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # compiled anew, also what an earlier run compiled
    with compiling(monkeypatch, capability) as found:
        for wide in (BF16, torch.int8, *([torch.float8_e4m3fn] if capability >= 90 else [])):
            weights = []
            for shape in ((1536, 2048), (2048, 768)):
                if wide == BF16:
                    weights.append(empty(*shape))
                else:
                    kind = Int8Weight if wide == torch.int8 else Fp8Weight
                    weights.append(kind(empty(*shape, dtype=wide), empty(shape[0], dtype=torch.float32)))
            onto, expert = empty(2048, 128), ExpertWeights(weights[0], None, weights[1], None)
            layer = CudaExperts(lambda x, onto=onto: x @ onto, [expert] * 128, 8, True)
            for tokens in (1, 300):
                layer(empty(tokens, 2048))
    products = [kernel for kernel in found if kernel.kernel == "_multiply"]
    assert products
    assert all(kernel.shared <= SHARED[capability] and kernel.spilled == 0 for kernel in products)
