"""Which product of a GPU is taken, by what they say and how long they take."""

from __future__ import annotations

import logging

import torch

from kernels.cuda.choosing import Choices, agreeing, choose
from kernels.cuda.launch import look_ahead


def test_the_first_is_left_for_what_is_clearly_quicker():
    assert choose(("plain", 16), {"cuBLAS": 10.0, "skinny": 9.8}) == "cuBLAS"
    assert choose(("plain", 16), {"cuBLAS": 10.0, "narrow": 9.5, "skinny": 9.0}) == "skinny"


def test_what_is_preferred_has_to_be_beaten_where_it_is_there():
    assert choose(("plain", 16), {"cuBLAS": 10.0, "bulk": 10.2}, "bulk") == "bulk"
    assert choose(("plain", 16), {"cuBLAS": 34.6, "bulk": 38.0}, "bulk") == "bulk"
    assert choose(("plain", 16), {"cuBLAS": 200.0, "bulk": 206.0}, "bulk") == "bulk"
    assert choose(("plain", 16), {"cuBLAS": 34.6, "bulk": 42.0}, "bulk") == "cuBLAS"
    assert choose(("plain", 16), {"cuBLAS": 200.0, "bulk": 213.0}, "bulk") == "cuBLAS"
    assert choose(("plain", 16), {"cuBLAS": 10.0, "skinny": 9.8}, "bulk") == "cuBLAS"


def test_a_product_that_differs_is_not_taken(caplog):
    torch.manual_seed(0)
    right = torch.randn(4, 64)
    products = {"cuBLAS": right, "rounded": right * (1 + 0.03 * torch.randn(4, 64)), "wrong": right.flip(0)}
    with caplog.at_level(logging.WARNING):
        assert agreeing(("plain", 16, 64), products) == ["cuBLAS", "rounded"]
    assert "Product plain x 16 x 64: wrong differs from cuBLAS and is not taken." in caplog.text
    caplog.clear()
    products["wrong"] = torch.full((4, 64), torch.nan)
    assert agreeing(("plain", 16, 64), products) == ["cuBLAS", "rounded"]
    assert "wrong" in caplog.text


def test_nothing_is_told_of_products_that_cannot_be_compared(caplog):
    assert agreeing(("plain",), {"cuBLAS": torch.full((2,), torch.inf), "skinny": torch.ones(2)}) == ["cuBLAS"]
    assert not caplog.records


def test_every_way_is_made_once_while_looking_ahead():
    choices, made = Choices(torch.device("cpu")), []

    def ways():
        return {name: lambda name=name: made.append(name) or torch.full((1,), torch.nan) for name in ("one", "other")}

    with look_ahead():
        assert choices.name(("plain", 16), ways) is None
        assert choices.name(("plain", 16), ways) is None
    assert made == ["one", "other"]  # and nothing is said of what they gave
