"""One layer of each kind stands for all of them."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from kernels.models.representative_layers import one_of_each_kind


class Linear:
    def __init__(self, outputs, dtype=torch.float32, bias=None):
        self.weight, self.bias = torch.zeros(outputs, 8, dtype=dtype), bias


class Layer:
    def __init__(self, device, window=0, linear=None):
        self.device, self.window, self.parts = device, window, [linear or Linear(4)]
        self.own = self  # what holds itself is looked at once


def make(*layers, captures=()):
    device = SimpleNamespace(name="cuda")
    return SimpleNamespace(captures=captures, device=device, layers=[Layer(device, **one) for one in layers])


def test_layers_like_one_before_are_left_out():
    unaligned = Linear(4)
    unaligned.weight = torch.zeros(33)[1:].view(4, 8)
    model = make(
        {},
        {},
        {"window": 64},
        {},
        {"linear": Linear(6)},
        {"linear": Linear(4, torch.float16)},
        {"window": 64},
        {"linear": Linear(4, bias=torch.zeros(4))},
        {"linear": unaligned},
    )
    some, caches = one_of_each_kind(model, list(range(9)))
    assert caches == [0, 1, 2, 4, 5, 7, 8]  # what follows a layer is given something else than the first
    assert some.layers == [model.layers[index] for index in caches]
    assert len(model.layers) == 9


def test_layers_that_are_functions_are_distinguished_by_what_they_hold():
    def gated(linear):
        return lambda x: -linear(x)

    linears = (gated(Linear(4)), gated(Linear(4)), gated(Linear(4)), gated(Linear(4, torch.float16)), lambda x: x)
    model = make(*({"linear": linear} for linear in linears))
    assert one_of_each_kind(model, list(range(5)))[1] == [0, 1, 3, 4]


def test_all_are_left_where_some_are_captured():
    model = make({}, {}, captures=(1,))
    some, caches = one_of_each_kind(model, [0, 1])
    assert some.layers == model.layers
    assert caches == [0, 1]
