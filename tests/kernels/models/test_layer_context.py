"""Linear layers know their rows: requests of several adapters run in one batch, each with its own additions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.contract.adapters import AdapterSettings
from kernels.contract.errors import ConfigError, UnsupportedError
from kernels.contract.speculation import SpeculativeSettings
from kernels.contract.step import SlotSampling
from kernels.core.layer_context import LayerContext
from kernels.devices.cpu.low_rank import SegmentedDelta
from kernels.devices.low_rank import LowRankDelta
from kernels.models.adapters import ResidentAdapters
from tests.kits.adapters import adapted_modules, assert_rows_use_their_adapters, logprobs_of, merged, save_adapter
from tests.kits.driver import VOCAB
from tests.kits.native import compiled, needs_native
from tests.kits.tiny_model import make_tiny_model

__all__ = ["compiled"]

SMALL = AdapterSettings(max_rank=4, max_batch=2)
SAMPLING = SlotSampling(temperature=0.0, logprobs=VOCAB)


@pytest.mark.parametrize("name", ["llama-biased", "qwen3", "phi3-full", "olmo2", "mistral", "gemma3", "gemma2"])
def test_rows_use_their_adapters_in_every_linear_layer(name, reference, drive, prompts, tmp_path):
    model = reference(name)
    assert_rows_use_their_adapters(model.path, tmp_path, drive, prompts, VOCAB, 5e-4)


@pytest.mark.parametrize(
    ("name", "leave"),
    [("deepseek-v3", (".experts.", "kv_b_proj", "shared_experts.down")), ("qwen3-moe", (".experts.",))],
)
def test_layers_around_experts_use_adapters(name, leave, reference, drive, prompts, tmp_path):
    assert_rows_use_their_adapters(reference(name).path, tmp_path, drive, prompts, VOCAB, 5e-4, steps=3, leave=leave)


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


def test_pages_belong_to_the_adapter_they_were_given_to_last():
    context = LayerContext(None, torch.device("cpu"))
    context.open(8, 4)
    context.assign(torch.tensor([3, 5]).numpy(), 2)
    context.assign(torch.tensor([5]).numpy(), 1)
    context.enter(torch.tensor([0, 13, 14, 20, 31]))
    assert context.rows.tolist() == [0, 2, 2, 1, 0]
    context.select(torch.tensor([3, 1]))
    assert context.rows.tolist() == [1, 2]


@pytest.mark.parametrize("delta", [LowRankDelta, SegmentedDelta])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 40])
def test_deltas_are_sums_over_each_rows_matrices(rows, delta):
    places, rank, inputs, outputs = 4, 2, 6, (5, 3)
    context = LayerContext(None, torch.device("cpu"))
    context.open(8, 1)
    context.assign(np.arange(1, 8), 0)
    context.assign(np.array([1, 4]), 1)
    context.assign(np.array([2]), 3)
    context.enter((torch.arange(rows) + 1) % 8)
    down, up = torch.randn(places, 2 * rank, inputs), torch.randn(places, rank, sum(outputs))
    down[0] = up[0] = 0
    x, result = torch.randn(rows, inputs), torch.randn(rows, sum(outputs))
    wanted = result.clone()
    for row, place in enumerate(context.rows.tolist()):
        low = down[place] @ x[row]
        wanted[row] += torch.cat([low[:rank] @ up[place][:, :5], low[rank:] @ up[place][:, 5:]])
    torch.testing.assert_close(delta(context, down, up, outputs)(x, result), wanted)


def _answer(driver, prompt, adapter, shared=(), keep=False):
    """Log-probabilities after the prompt, and the pages with its keys and values."""
    driver.admit(1, prompt, sampling=SAMPLING, adapter=adapter, shared=shared)
    count = driver.pending(1)
    found = logprobs_of(driver.step([(1, count)]), 1, VOCAB)[0]
    pages = driver.release(1, keep_pages=keep)
    driver.step([])
    return found, pages


def test_places_are_filled_again_when_more_adapters_take_turns(reference, drive, prompts, tmp_path):
    path, (prompt,) = reference("qwen3").path, prompts(20)
    modules = adapted_modules(path)
    files = {index: save_adapter(tmp_path / f"{index}", modules, index) for index in range(1, 5)}
    driver = drive(path, adapters=SMALL)
    for index, file in files.items():
        driver.runner.load_adapter(index, str(file))
    wanted = {
        index: _answer(drive(merged(path, tmp_path / f"merged-{index}", file)), prompt, 0)[0]
        for index, file in files.items()
    }
    for index in (1, 2, 3, 1, 4, 2, 3):
        np.testing.assert_allclose(_answer(driver, prompt, index)[0], wanted[index], atol=5e-4)
    driver.runner.unload_adapter(1)
    driver.runner.load_adapter(1, str(files[4]))
    np.testing.assert_allclose(_answer(driver, prompt, 1)[0], wanted[4], atol=5e-4)


def test_requests_of_one_adapter_share_a_prefix(reference, drive, prompts, tmp_path):
    path, (prompt,) = reference("qwen3").path, prompts(40)
    file = save_adapter(tmp_path / "one", adapted_modules(path), 1)
    driver = drive(path, adapters=SMALL)
    driver.runner.load_adapter(1, str(file))
    wanted, pages = _answer(driver, prompt, 1, keep=True)
    found, _ = _answer(driver, prompt, 1, shared=pages[:2])
    np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_draft_tokens_are_verified_with_the_requests_adapter(reference, drive, prompts, tmp_path):
    """Draft models know no adapters: what they draft is verified by the model with the request's."""
    path, texts = reference("qwen3").path, prompts(20, 24)
    file = save_adapter(tmp_path / "one", adapted_modules(path), 1)
    settings = SpeculativeSettings("STANDALONE", num_steps=3, num_draft_tokens=4, draft_model_path=str(path))
    driver = drive(path, adapters=SMALL, speculation=settings)
    driver.runner.load_adapter(1, str(file))
    for slot, text in enumerate(texts, start=1):
        driver.admit(slot, text, adapter=2 - slot)
        driver.step([(slot, len(text))])
    for _ in range(20):
        assert not driver.step([(1, 1), (2, 1)], {1: 3, 2: 3}).failed
    for slot, model in ((1, merged(path, tmp_path / "merged", file)), (2, path)):
        alone = drive(model)
        alone.admit(1, texts[slot - 1])
        assert driver.tokens[slot] == alone.generate(1, len(driver.tokens[slot]))
    assert len(driver.tokens[2]) > len(texts[1]) + 41  # drafts are the model's own


def test_more_adapters_than_places_fail_one_request_alone(reference, drive, prompts, tmp_path):
    path, (prompt,) = reference("qwen3").path, prompts(9)
    driver = drive(path, adapters=SMALL)
    modules = adapted_modules(path)
    for index in (1, 2, 3):
        driver.runner.load_adapter(index, str(save_adapter(tmp_path / f"{index}", modules, index)))
        driver.admit(index, prompt, adapter=index)
    failed = driver.step([(1, 9), (2, 9), (3, 9)]).failed
    assert {error.slot for error in failed} == {3}
    assert "max-loras-per-batch" in failed[0].message
    driver.release(1)
    driver.admit(4, prompt, adapter=3)
    assert not driver.step([(4, 9)]).failed


def test_unknown_adapters_fail_the_request(reference, drive, prompts):
    path, (prompt,) = reference("qwen3").path, prompts(9)
    for options, reason in (({"adapters": SMALL}, "adapter 7 is not loaded"), ({}, "no adapters")):
        driver = drive(path, **options)
        driver.admit(1, prompt, adapter=7)
        assert reason in driver.step([(1, 9)]).failed[0].message


def test_adapters_in_use_are_not_unloaded(reference, drive, prompts, tmp_path):
    path, (prompt,) = reference("qwen3").path, prompts(9)
    driver = drive(path, adapters=SMALL)
    driver.runner.load_adapter(1, str(save_adapter(tmp_path / "one", adapted_modules(path), 1)))
    driver.admit(1, prompt, adapter=1)
    driver.step([(1, 9)])
    with pytest.raises(ConfigError, match="in use"):
        driver.runner.unload_adapter(1)
    driver.release(1)
    driver.step([])
    driver.runner.unload_adapter(1)
    with pytest.raises(ConfigError, match="adapter 1 is not loaded"):
        driver.runner.unload_adapter(1)


def test_adapters_that_do_not_fit_are_refused_with_all_reasons(reference, drive, tmp_path):
    path = reference("parallel-moe").path
    driver = drive(path, adapters=SMALL)
    modules = {
        "model.layers.0.self_attn.q_proj": (3, 5),
        "model.layers.0.mlp.experts.0.gate_proj": (4, 4),
        "model.layers.0.mlp.other": (4, 4),
        "model.layers.0.mlp.gate": (4, 4),
    }
    with pytest.raises(ConfigError) as raised:
        driver.runner.load_adapter(1, str(save_adapter(tmp_path / "bad", modules, 1)))
    text = str(raised.value)
    assert "q_proj is [3, 5] there and [" in text
    assert "experts.0.gate_proj takes no adapters: experts" in text
    assert "mlp.other is no linear layer of the model" in text
    assert "mlp.gate takes no adapters" in text
    with pytest.raises(ConfigError, match="more than --max-lora-rank 4"):
        driver.runner.load_adapter(1, str(save_adapter(tmp_path / "wide", adapted_modules(path), 1, rank=5)))


def test_adapters_with_numbers_that_are_not_finite_are_refused(reference, drive, tmp_path):
    path = reference("qwen3").path
    file = save_adapter(tmp_path / "one", adapted_modules(path), 1)
    stored = load_file(file / "adapter_model.safetensors")
    name = next(name for name in stored if "lora_B" in name)
    stored[name][0, 0] = float("inf")
    save_file(stored, file / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=rf"{name} of the adapter has values that are not finite"):
        drive(path, adapters=SMALL).runner.load_adapter(1, str(file))


def test_adapters_with_numbers_too_large_for_the_models_dtype_are_refused(reference, drive, tmp_path):
    path = reference("qwen3").path
    file = save_adapter(tmp_path / "one", adapted_modules(path), 1)
    stored = load_file(file / "adapter_model.safetensors")
    name = next(name for name in stored if "lora_B" in name)
    stored[name][0, 0] = 1e38
    save_file(stored, file / "adapter_model.safetensors")
    driver = drive(path, adapters=SMALL)
    driver.runner.load_adapter(1, str(file))
    driver.runner._adapters._dtype = torch.float16
    with pytest.raises(ConfigError, match=r"not finite in torch\.float16"):
        driver.runner.load_adapter(2, str(file))


def test_an_adapter_that_memory_has_no_room_for_is_refused(reference, drive, tmp_path, monkeypatch):
    path = reference("qwen3").path
    file = save_adapter(tmp_path / "one", adapted_modules(path), 1)
    driver = drive(path, adapters=SMALL)

    def no_memory(*arguments):
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(ResidentAdapters, "_read", no_memory)
    with pytest.raises(ConfigError, match="does not fit this host's memory"):
        driver.runner.load_adapter(1, str(file))


def test_models_without_room_for_adapters_load_none(reference, drive):
    with pytest.raises(UnsupportedError, match="--enable-lora"):
        drive(reference("qwen3").path).runner.load_adapter(1, "somewhere")


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_deltas_are_added_to_quantized_layers(quantization, reference, drive, prompts, tmp_path):
    """The quantized base is that of the model without adapters, so its floats are compared, with a delta of theirs."""
    path, (prompt,) = reference("qwen3").path, prompts(20)
    modules = adapted_modules(path)
    file = save_adapter(tmp_path / "one", modules, 1)
    driver = drive(path, adapters=SMALL, quantization=quantization)
    driver.runner.load_adapter(1, str(file))
    plain, alone = drive(path), drive(merged(path, tmp_path / "merged", file))
    change = _answer(alone, prompt, 0)[0] - _answer(plain, prompt, 0)[0]
    found = _answer(driver, prompt, 1)[0] - _answer(driver, prompt, 0)[0]
    assert np.corrcoef(change, found)[0, 1] > 0.99


def test_only_targets_take_adapters(reference, drive, tmp_path):
    path = reference("qwen3").path
    modules = adapted_modules(path)
    driver = drive(path, adapters=AdapterSettings(max_rank=4, max_batch=2, targets=("q_proj", "down_proj")))
    with pytest.raises(ConfigError, match="it changes gate_proj, k_proj, o_proj, up_proj, v_proj, which --lora-target"):
        driver.runner.load_adapter(1, str(save_adapter(tmp_path / "all", modules, 1)))
    some = {module: shape for module, shape in modules.items() if module.endswith(("q_proj", "down_proj"))}
    driver.runner.load_adapter(1, str(save_adapter(tmp_path / "some", some, 1)))
