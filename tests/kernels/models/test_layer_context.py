"""Linear layers know their rows: requests of several adapters run in one batch, each with its own additions."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.contract.adapters import AdapterSettings
from kernels.contract.cpu_isa import CpuIsa
from kernels.contract.errors import ConfigError, UnsupportedError
from kernels.contract.speculation import SpeculativeSettings
from kernels.contract.step import SlotSampling
from kernels.core.layer_context import LayerContext
from kernels.devices import latent_attention
from kernels.devices.cpu.low_rank import CpuLowRankDelta
from kernels.devices.cpu.native_operators import NativeOperators
from kernels.devices.invariant.low_rank import InvariantDelta
from kernels.devices.low_rank import LowRankDelta
from kernels.models.adapters import ResidentAdapters
from tests.kits.adapters import (
    adapted_modules,
    assert_rows_use_their_adapters,
    end_modules,
    expert_modules,
    logprobs_of,
    merged,
    save_adapter,
    stacked_adapter,
)
from tests.kits.driver import VOCAB
from tests.kits.families import ONE_OF_EACH
from tests.kits.native import MISSING, compiled, needs_native, require_native
from tests.kits.tiny_model import make_tiny_model

__all__ = ["compiled"]

MORE = "granite-4-dense", "gemma4-moe", "lfm2-biased", "ernie4.5-moe-biased", "stablelm-parallel"
"""Beside one model of each architecture: those with other layers."""
SMALL = AdapterSettings(max_rank=4, max_batch=2)
SAMPLING = SlotSampling(temperature=0.0, logprobs=VOCAB)


@pytest.mark.parametrize("name", [*ONE_OF_EACH, *MORE])
def test_adapters_of_every_family_are_as_merged(name, reference, drive, prompts, tmp_path):
    """Of each linear layer, also those of experts, and of what makes keys and values of latent vectors."""
    path, (prompt,) = reference(name).path, prompts(30)
    driver = drive(path, adapters=AdapterSettings(max_rank=4, max_batch=2, targets=("all", "experts", "kv_b_proj")))
    specs = driver.runner._adapters
    modules = {module: specs._spec(module).matrix for module in sorted(specs._takers)}
    assert not set(adapted_modules(path, ("o_a_proj",))) - set(modules)
    file = save_adapter(tmp_path / "one", modules, 1, scale=0.05)
    driver.runner.load_adapter(1, str(file))
    found = _answer(driver, prompt, 1)[0]
    np.testing.assert_allclose(found, _answer(drive(merged(path, tmp_path / "merged", file)), prompt, 0)[0], atol=5e-4)
    assert np.abs(found - _answer(driver, prompt, 0)[0]).max() > 0.1


@pytest.mark.parametrize("name", ["llama-biased", "phi3-full", "gemma2"])
def test_rows_use_their_adapters_in_every_linear_layer(name, reference, drive, prompts, tmp_path):
    model = reference(name)
    assert_rows_use_their_adapters(model.path, tmp_path, drive, prompts, VOCAB, 5e-4)


@pytest.mark.parametrize("name", ["llama2", "qwen3", "gemma3", "cohere"])
def test_rows_use_their_adapters_in_embeddings_and_output(name, reference, drive, prompts, tmp_path):
    path = reference(name).path
    assert_rows_use_their_adapters(path, tmp_path, drive, prompts, VOCAB, 5e-4, steps=4, more=end_modules(path))


@pytest.mark.parametrize(
    ("name", "leave"),
    [
        ("deepseek-v3", (".experts.", "kv_b_proj")),
        ("deepseek-v4", (".experts.", "o_a_proj")),
        ("qwen3-moe", (".experts.",)),
    ],
)
def test_layers_around_experts_use_adapters(name, leave, reference, drive, prompts, tmp_path):
    assert_rows_use_their_adapters(reference(name).path, tmp_path, drive, prompts, VOCAB, 5e-4, steps=3, leave=leave)


LATENT = ["deepseek-v2", "kimi-k2", "glm5", "hunyuan-v4", "kimi-linear", "longcat-flash", "mistral-large4"]


@pytest.mark.parametrize("name", LATENT)
def test_rows_use_their_adapters_in_keys_and_values_of_latent_vectors(name, reference, drive, prompts, tmp_path):
    path = reference(name).path
    latent = {module: shape for module, shape in adapted_modules(path).items() if module.endswith("kv_b_proj")}
    assert_rows_use_their_adapters(
        path, tmp_path, drive, prompts, VOCAB, 5e-4, steps=4, leave=(".experts.",), more=latent
    )


def test_long_prompts_and_none_share_adapters_of_latent_vectors(reference, drive, prompts, tmp_path, monkeypatch):
    """Prompts for which keys and values are made if no row has an adapter."""
    path, texts = reference("deepseek-v3").path, prompts(60, 50, 40)
    monkeypatch.setattr(latent_attention, "_EXPANDED", 32)
    latent = {module: shape for module, shape in adapted_modules(path).items() if module.endswith("kv_b_proj")}
    files = [save_adapter(tmp_path / f"{index}", latent, index, scale=0.3) for index in (1, 2)]
    driver = drive(path, adapters=AdapterSettings(max_rank=4, max_batch=2, targets=("kv_b_proj",)))
    wanted = []
    for slot, text in enumerate(texts):
        if slot:
            driver.runner.load_adapter(slot, str(files[slot - 1]))
        model = path if slot == 0 else merged(path, tmp_path / f"merged-{slot}", files[slot - 1])
        wanted.append(_answer(drive(model), text, 0)[0])
    for slot, text in enumerate(texts):
        driver.admit(slot + 1, text, sampling=SAMPLING, adapter=slot)
    with monkeypatch.context() as patched:
        patched.setattr(latent_attention, "_attend_expanded", None)
        found = logprobs_of(driver.step([(slot + 1, len(text)) for slot, text in enumerate(texts)]), 3, VOCAB)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=5e-4)
    for slot in (1, 2, 3):
        driver.release(slot)
    np.testing.assert_array_equal(_answer(driver, texts[0], 0)[0], _answer(drive(path), texts[0], 0)[0])


@pytest.mark.parametrize("name", ["llama-biased", "qwen3", "phi3-full", "deepseek-v3", "glm"])
def test_rows_are_scaled_as_their_adapters_say(name, reference, drive, prompts, tmp_path):
    """DoRA beside LoRA: the rows of merged weights have the lengths of the magnitudes."""
    leave = (".experts.", "kv_b_proj")
    path = reference(name).path
    assert_rows_use_their_adapters(path, tmp_path, drive, prompts, VOCAB, 5e-4, steps=3, leave=leave, dora=True)


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-moe", "qwen2-moe", "mixtral", "nemotron-3"])
def test_rows_use_their_adapters_in_experts(name, reference, drive, prompts, tmp_path):
    path = reference(name).path
    experts = {module: shape for module, shape in adapted_modules(path).items() if ".experts." in module}
    leave = (".experts.", "kv_b_proj")
    assert_rows_use_their_adapters(path, tmp_path, drive, prompts, VOCAB, 5e-4, steps=3, leave=leave, more=experts)


@pytest.mark.parametrize("name", ["gpt-oss", "llama4"])
def test_rows_use_their_adapters_in_experts_of_one_tensor(name, reference, drive, prompts, tmp_path):
    path = reference(name).path
    assert_rows_use_their_adapters(path, tmp_path, drive, prompts, VOCAB, 5e-4, steps=3, more=expert_modules(path))


@pytest.mark.parametrize(
    ("name", "own", "other"),
    [
        ("kimi-linear", "layers.0.self_attn.f_a_proj", "layers.0.self_attn.forget_gate.f_a_proj"),
        ("kimi-linear", "layers.1.block_sparse_moe.shared_experts.up_proj", "layers.1.mlp.shared_experts.up_proj"),
        ("lfm3", "layers.2.self_attn.gate_proj", "layers.2.self_attn.g_proj"),
    ],
)
def test_layers_have_the_names_of_files_and_of_transformers(name, own, other, reference, drive, prompts, tmp_path):
    path, (prompt,) = reference(name).path, prompts(20)
    driver = drive(path, adapters=SMALL)
    modules = {f"model.{own}": driver.runner._adapters._spec(f"model.{own}").matrix}
    file = save_adapter(tmp_path / "one", modules, 1, scale=0.3)
    driver.runner.load_adapter(1, str(file))
    stored = load_file(file / "adapter_model.safetensors")
    renamed = {module.replace(own, other): tensor for module, tensor in stored.items()}
    save_file(renamed, file / "adapter_model.safetensors")
    driver.runner.load_adapter(2, str(file))
    first, second, plain = (_answer(driver, prompt, adapter)[0] for adapter in (1, 2, 0))
    np.testing.assert_array_equal(first, second)
    assert np.abs(first - plain).max() > 1e-3


@pytest.mark.parametrize(
    ("name", "layer", "stacked"),
    [
        ("granite-moe", "model.layers.1.block_sparse_moe.experts", "model.layers.1.block_sparse_moe.experts"),
        ("nemotron-h", "backbone.layers.4.mixer.experts", "model.layers.4.mixer.experts"),
    ],
)
def test_stacked_experts_have_the_names_of_transformers(name, layer, stacked, reference, drive, tmp_path):
    driver = drive(reference(name).path, adapters=AdapterSettings(max_rank=4, max_batch=2, targets=("experts",)))
    adapters = driver.runner._adapters
    (*gates, down) = adapters._experts[stacked][0]
    assert down.startswith(f"{layer}.0.")
    outputs, inputs = adapters._spec(gates[0]).matrix
    count = len(adapters._experts[stacked])
    file = save_adapter(tmp_path / "one", {f"{stacked}.base_layer": (len(gates) * outputs, inputs)}, 1, rank=count)
    (file / "adapter_config.json").write_text('{"r": 1}')
    driver.runner.load_adapter(1, str(file))


def test_routers_of_experts_have_adapters_under_any_of_their_names(reference, drive, prompts, tmp_path):
    path, (prompt,) = reference("mixtral").path, prompts(20)
    module, other = "model.layers.1.block_sparse_moe.gate", "model.layers.1.mlp.gate"  # as in transformers' files
    shape = drive(path, adapters=SMALL).runner._adapters._spec(module).matrix
    file = save_adapter(tmp_path / "one", {module: shape}, 1, scale=0.3)
    with pytest.raises(ConfigError, match=r"gate takes no adapters: --lora-target-modules does not include experts"):
        drive(path, adapters=SMALL).runner.load_adapter(1, str(file))
    driver = drive(path, adapters=AdapterSettings(max_rank=4, max_batch=2, targets=("experts", "gate")))
    driver.runner.load_adapter(1, str(file))
    wanted, stored = _answer(driver, prompt, 1)[0], load_file(file / "adapter_model.safetensors")
    assert np.abs(wanted - _answer(driver, prompt, 0)[0]).max() > 0.1
    renamed = {name.replace(module, other): tensor.clone() for name, tensor in stored.items()}
    save_file(renamed, file / "adapter_model.safetensors")
    driver.runner.load_adapter(2, str(file))
    np.testing.assert_array_equal(_answer(driver, prompt, 2)[0], wanted)
    save_file(stored | renamed, file / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=r"block_sparse_moe.gate is there under two names"):
        driver.runner.load_adapter(2, str(file))


def test_magnitudes_of_experts_and_of_the_output_are_refused(reference, drive, tmp_path):
    path = reference("qwen3-moe").path
    modules = {module: shape for module, shape in adapted_modules(path).items() if ".experts.0.up" in module}
    modules |= dict([list(end_modules(path).items())[1]])
    driver = drive(path, adapters=AdapterSettings(max_rank=4, max_batch=2, targets=("experts", "dora", "lm_head")))
    with pytest.raises(ConfigError, match=r"lm_head takes no DoRA magnitudes.*up_proj takes no DoRA magnitudes"):
        driver.runner.load_adapter(1, str(save_adapter(tmp_path / "one", modules, 1, use_dora=True)))


@pytest.mark.parametrize(
    ("name", "turned"), [("qwen3-moe", False), ("qwen3-moe", True), ("gpt-oss", False), ("gemma4-moe", False)]
)
def test_adapters_of_stacked_experts_are_those_of_each(name, turned, reference, drive, prompts, tmp_path):
    path, (prompt,) = reference(name).path, prompts(20)
    modules = {module: shape for module, shape in adapted_modules(path).items() if ".experts." in module}
    apart = save_adapter(tmp_path / "apart", modules or expert_modules(path), 1)
    file = stacked_adapter(apart, tmp_path / "stacked", turned=turned, alternate=name == "gpt-oss")
    driver = drive(path, adapters=AdapterSettings(max_rank=4, max_batch=2, targets=("experts",)))
    driver.runner.load_adapter(1, str(file))
    wanted = _answer(drive(merged(path, tmp_path / "merged", apart)), prompt, 0)[0]
    np.testing.assert_allclose(_answer(driver, prompt, 1)[0], wanted, atol=5e-4)


@needs_native
@pytest.mark.usefixtures("compiled")
def test_native_operators_run_beside_adapters(drive, prompts, tmp_path):
    """Also as programs of native operators, which read the places of a step's rows."""
    path = make_tiny_model(tmp_path / "model", hidden_size=64, head_dim=32, intermediate_size=128)
    options = {"dtype": "bfloat16"}
    driver = assert_rows_use_their_adapters(path, tmp_path, drive, prompts, drive(path).info.vocab_size, 2.0, **options)
    assert driver.info.graph_rows == drive(path, **options).info.graph_rows != ()


@needs_native
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("form", ["dora", "embed_tokens", "lm_head"])
def test_forms_without_programs_run_beside_native_operators(form, drive, prompts, tmp_path):
    """A program knows neither scales nor tables of adapters, nor the rows of logits, which are computed behind it."""
    path = make_tiny_model(tmp_path / "model", hidden_size=64, head_dim=32, intermediate_size=128)
    more = {module: shape for module, shape in end_modules(path).items() if module.endswith(form)}
    vocab, options = drive(path).info.vocab_size, {"dtype": "bfloat16", "more": more, "dora": form == "dora"}
    driver = assert_rows_use_their_adapters(path, tmp_path, drive, prompts, vocab, 2.0, **options)
    assert bool(driver.info.graph_rows) == (form == "lm_head")


def test_layers_are_made_as_ever_where_there_are_no_adapters(reference, drive):
    driver = drive(reference("qwen3").path)
    assert driver.runner._loaded.model.rows is None


def test_pages_belong_to_the_adapter_they_were_given_to_last():
    context = LayerContext(None, torch.device("cpu"))
    with torch.inference_mode():  # a model is loaded in it; a step that repeats the one before grants pages without
        context.open(8, 4)
    context.assign(torch.tensor([3, 5]).numpy(), 2)
    context.assign(torch.tensor([5]).numpy(), 1)
    context.enter(torch.tensor([0, 13, 14, 20, 31]))
    assert context.rows.tolist() == [0, 2, 2, 1, 0]
    context.select(torch.tensor([3, 1]))
    assert context.rows.tolist() == [1, 2]


@pytest.mark.parametrize(
    "delta", [LowRankDelta, InvariantDelta, partial(CpuLowRankDelta, NativeOperators(CpuIsa.TORCH, 1))]
)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 40])
def test_deltas_are_sums_over_each_rows_matrices(rows, delta):
    places, rank, inputs, outputs = 4, 2, 6, (5, 3)
    context = LayerContext(None, torch.device("cpu"))
    context.open(8, 1)
    context.assign(np.arange(1, 8), 0)
    context.assign(np.array([1, 4]), 1)
    context.assign(np.array([2]), 3)
    context.enter((torch.arange(rows) + 1) % 8)
    down, up = torch.zeros(places, 2 * rank, inputs), torch.zeros(places, rank, sum(outputs))
    made = delta(context, down, up, outputs)
    assert not torch.cat([down.flatten(), up.flatten()]).any()
    for matrices in (down, up):
        matrices[1:] = torch.randn(matrices[1:].shape)
    x, result = torch.randn(rows, inputs), torch.randn(rows, sum(outputs))
    wanted = result.clone()
    for row, place in enumerate(context.rows.tolist()):
        low = down[place] @ x[row]
        wanted[row] += torch.cat([low[:rank] @ up[place][:, :5], low[rank:] @ up[place][:, 5:]])
    torch.testing.assert_close(made(x, result), wanted)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_invariant_results_of_an_adapter_depend_on_no_other_row(dtype, reference, drive, prompts, tmp_path):
    path, (prompt, *others) = reference("qwen3").path, prompts(40, 25, 9)
    modules = adapted_modules(path) | end_modules(path)
    files = [str(save_adapter(tmp_path / f"{index}", modules, index)) for index in (1, 2)]
    room = AdapterSettings(max_rank=4, max_batch=2, targets=("all", "embed_tokens", "lm_head"))

    def answers(chunk, before=()):
        """Log-probabilities of decodes. ``before``: requests beside it, which take the first places."""
        driver = drive(path, adapters=room, invariant=True, dtype=dtype)
        for index, file in enumerate(files, start=1):
            driver.runner.load_adapter(index, file)
        for slot, text in enumerate(before, start=2):
            driver.admit(slot, text, adapter=slot % 2 * 2)
            driver.step([(slot, len(text))])
        driver.admit(1, prompt, sampling=SAMPLING, adapter=1)
        beside, found = [(slot, 1) for slot in range(2, 2 + len(before))], []
        while (left := driver.pending(1)) > chunk:
            driver.step([*beside, (1, chunk)])
        for _ in range(6):
            found.append(logprobs_of(driver.step([(1, left), *beside]), 1, VOCAB)[0])
            left = 1
        return np.array(found)

    assert np.array_equal(answers(40), answers(7, others))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_invariant_layers_use_adapters(dtype, reference, drive, prompts, tmp_path):
    if not MISSING:  # else layers are plain torch
        require_native()
    atol, options = (5e-4 if dtype == "float32" else 2.0), {"invariant": True, "dtype": dtype}
    assert_rows_use_their_adapters(reference("qwen3").path, tmp_path, drive, prompts, VOCAB, atol, steps=3, **options)


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


def _nine_forms(path, folder):
    """Adapters of every form, and several of some: their files, and those to merge."""
    modules, ends = adapted_modules(path), end_modules(path)
    experts = {module: shape for module, shape in modules.items() if ".experts." in module}
    linear = {module: shape for module, shape in modules.items() if module not in experts}
    parts = [linear, linear, experts, ends, linear | ends, linear | experts, modules | ends, linear, experts]
    files = [
        save_adapter(folder / f"{n}", part, n, rank=1 + n % 4, use_dora=n in (2, 8)) for n, part in enumerate(parts, 1)
    ]
    return [*files[:8], stacked_adapter(files[8], folder / "stacked")], files


def test_nine_adapters_of_all_forms_and_none_share_steps_and_places(reference, drive, prompts, tmp_path):
    path = reference("qwen3-moe").path
    files, apart = _nine_forms(path, tmp_path)
    targets = ("all", "embed_tokens", "lm_head", "experts", "dora")
    texts = dict(enumerate(prompts(*range(9, 19)), start=1))  # the tenth is of none
    wanted = {}
    for slot, text in texts.items():
        model = merged(path, tmp_path / f"merged-{slot}", apart[slot - 1]) if slot < 10 else path
        wanted[slot] = _answer(drive(model), text, 0)[0]
    options = {"max_slots": 11, "max_total_tokens": 4096}
    for places in (9, 2):
        driver = drive(path, adapters=AdapterSettings(max_rank=4, max_batch=places, targets=targets), **options)
        for index, file in enumerate(files, start=1):
            driver.runner.load_adapter(index, str(file))
        driver.admit(10, texts[10], sampling=SAMPLING)
        for first in range(1, 10, places):
            beside = [slot for slot in range(first, first + places) if slot < 10]
            for slot in beside:
                driver.admit(slot, texts[slot], sampling=SAMPLING, adapter=slot)
            some = [*beside, 10] if first == 1 else [10, *beside]  # the one without an adapter decodes from then on
            result = driver.step([(slot, driver.pending(slot)) for slot in some])
            assert not result.failed
            for slot, found in zip(some, logprobs_of(result, len(some), VOCAB), strict=True):
                if slot < 10 or first == 1:
                    np.testing.assert_allclose(found, wanted[slot], atol=5e-4, err_msg=f"{slot} of {places}")
            for slot in beside:
                driver.release(slot)


def test_requests_of_one_adapter_share_a_prefix(reference, drive, prompts, tmp_path):
    path, (prompt,) = reference("qwen3").path, prompts(40)
    file = save_adapter(tmp_path / "one", adapted_modules(path), 1)
    driver = drive(path, adapters=SMALL)
    driver.runner.load_adapter(1, str(file))
    wanted, pages = _answer(driver, prompt, 1, keep=True)
    found, _ = _answer(driver, prompt, 1, shared=pages[:2])
    np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_scores_of_prompts_and_drafts_use_the_outputs_adapter(reference, drive, prompts, tmp_path):
    """Logits are computed of chosen rows behind a pass, in other numbers than its own."""
    path, texts = reference("qwen3").path, prompts(20, 24)
    file = save_adapter(tmp_path / "one", end_modules(path), 1)
    room = AdapterSettings(max_rank=4, max_batch=2, targets=("embed_tokens", "lm_head"))
    settings = SpeculativeSettings("NGRAM", num_steps=3, num_draft_tokens=4)
    driver = drive(path, adapters=room, speculation=settings)
    driver.runner.load_adapter(1, str(file))
    for slot, text in enumerate(texts, start=1):
        driver.admit(slot, text, adapter=2 - slot, sampling=SlotSampling(temperature=0.0, prompt_logprobs=0))
    scored = np.frombuffer(driver.step([(1, 20), (2, 24)]).prompt_logprobs, np.float32)
    for _ in range(20):
        assert not driver.step([(1, 1), (2, 1)], {1: 3, 2: 3}).failed
    for slot, model in ((1, merged(path, tmp_path / "merged", file)), (2, path)):
        alone = drive(model)
        alone.admit(1, texts[slot - 1], sampling=SlotSampling(temperature=0.0, prompt_logprobs=0))
        wanted = np.frombuffer(alone.step([(1, len(texts[slot - 1]))]).prompt_logprobs, np.float32)
        np.testing.assert_allclose(scored[:19] if slot == 1 else scored[19:], wanted, atol=5e-4)
        alone.generate(1, len(driver.tokens[slot]))
        assert driver.tokens[slot] == alone.tokens[1]


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
        "model.layers.0.mlp.other": (4, 4),
        "model.layers.0.mlp.gate": (4, 4),
    }
    with pytest.raises(ConfigError) as raised:
        driver.runner.load_adapter(1, str(save_adapter(tmp_path / "bad", modules, 1)))
    text = str(raised.value)
    assert "q_proj is [3, 5] there and [" in text
    assert "mlp.other is no linear layer of the model" in text
    assert "mlp.gate takes no adapters" in text
    with pytest.raises(ConfigError, match="larger than --max-lora-rank 4"):
        driver.runner.load_adapter(1, str(save_adapter(tmp_path / "wide", adapted_modules(path), 1, rank=5)))


def test_adapters_of_layers_that_take_none_are_refused_with_the_reason(reference, drive, tmp_path):
    mlp = "transformer.blocks.0.ffn.experts.mlp"
    dbrx = {f"{mlp}.base_layer": (192, 48), mlp: (192, 48)}
    unnamed, named = ("all", "experts"), ("all", "experts", "kv_b_proj")
    for name, modules, targets, reason in (
        ("dbrx", dbrx, unnamed, "experts.mlp takes no adapters: its tensors hold all experts; adapters change them"),
        ("deepseek-v3", None, unnamed, "it changes kv_b_proj, which --lora-target-modules does not include"),
        ("deepseek-v3", None, named, "kv_b_proj takes no adapters: .* leave --enable-deterministic-inference out"),
    ):
        path = reference(name).path
        file = save_adapter(tmp_path / f"{name}-{len(targets)}", modules or adapted_modules(path), 1)
        settings = AdapterSettings(max_rank=4, max_batch=2, targets=targets)
        driver = drive(path, adapters=settings, invariant=targets == named)
        with pytest.raises(ConfigError, match=reason):
            driver.runner.load_adapter(1, str(file))


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


def test_passes_are_counted_where_they_run():
    context = LayerContext(None, torch.device("cpu"))
    context.open(2, 4)
    current = context.count_passes()
    context.enter(torch.tensor([5, 0]))
    assert (current.tolist(), context.passes) == ([1], 1)
    context.enter_slots([0])
    assert (current.tolist(), context.passes) == ([2], 2)
    assert context.count_passes() is current
