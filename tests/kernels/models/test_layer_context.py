"""Linear layers know their rows: requests of several adapters run in one batch, each with its own additions."""

from __future__ import annotations

import pytest
import torch

from kernels.contract.errors import ConfigError
from kernels.core.layer_context import LayerContext
from tests.kits.adapters import LowRank, assert_rows_use_their_adapters
from tests.kits.driver import VOCAB
from tests.kits.native import compiled, needs_native
from tests.kits.tiny_model import make_tiny_model

__all__ = ["compiled"]


@pytest.mark.parametrize("name", ["llama-biased", "qwen3", "phi3-full", "olmo2", "mistral"])
def test_rows_use_their_adapters_in_every_linear_layer(name, reference, drive, prompts, tmp_path):
    model = reference(name)
    assert_rows_use_their_adapters(model.path, tmp_path, drive, prompts, VOCAB, 3e-4)


@needs_native
@pytest.mark.usefixtures("compiled")
def test_native_operators_run_beside_adapters(drive, prompts, tmp_path):
    """Steps are not made into programs, which hold no operators of torch; a model without adapters still is."""
    path = make_tiny_model(tmp_path / "model", hidden_size=64, head_dim=32, intermediate_size=128)
    options = {"dtype": "bfloat16"}
    driver = assert_rows_use_their_adapters(path, tmp_path, drive, prompts, drive(path).info.vocab_size, 2.0, **options)
    assert driver.info.graph_rows == ()
    assert drive(path, **options).info.graph_rows != ()


def test_layers_are_made_as_ever_where_there_are_no_adapters(reference, drive):
    driver = drive(reference("qwen3").path)
    assert driver.runner._loaded.model.rows is None


def test_layers_of_experts_refuse_adapters(reference, drive):
    path = reference("parallel-moe").path
    with pytest.raises(ConfigError, match=r"an adapter changes model\.layers\.0\.mlp\.experts\.0\.gate_proj"):
        drive(path, adapters=LowRank(path))


def test_pages_belong_to_the_adapter_they_were_given_to_last():
    context = LayerContext(LowRank.__new__(LowRank), torch.device("cpu"))
    context.open(8, 4)
    context.assign(torch.tensor([3, 5]).numpy(), 2)
    context.assign(torch.tensor([5]).numpy(), 1)
    context.enter(torch.tensor([0, 13, 14, 20, 31]))
    assert context.rows.tolist() == [0, 2, 2, 1, 0]
    context.select(torch.tensor([3, 1]))
    assert context.rows.tolist() == [1, 2]
