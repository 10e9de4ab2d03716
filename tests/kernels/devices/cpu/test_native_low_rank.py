"""What adapters add to linear layers, by the CPU's native operators."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from kernels.contract.adapters import AdapterSettings
from kernels.contract.step import SlotSampling
from kernels.core.layer_context import LayerContext
from kernels.devices.cpu.capture import CpuCapture
from kernels.devices.cpu.low_rank import CpuLowRankDelta
from kernels.devices.cpu.native_operators import NativeOperators
from kernels.devices.cpu.paged_attention import NativeLatentHeads
from kernels.devices.low_rank import LowRankDelta
from kernels.execution.executors.native_decode import NativeDecode
from kernels.execution.executors.native_prefill import NativePrefill
from tests.kits.adapters import adapted_modules, logprobs_of, save_adapter
from tests.kits.declared import made_up_model
from tests.kits.native import compiled, needs_native, platform

__all__ = ["compiled", "platform"]

pytestmark = [needs_native, pytest.mark.usefixtures("compiled")]

BF16 = torch.bfloat16
VOCAB = 211
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
LATENT = CONFIG | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 2,
}
ALL = SlotSampling(temperature=0.0, logprobs=VOCAB)
NINE = AdapterSettings(max_rank=8, max_batch=9)


def layer(platform, places, inputs, rank, sizes, rows, seed=0):
    """Plain matrices and those of the device in its order, and a context whose rows are of the places in turn."""
    generator = torch.Generator().manual_seed(seed)
    down = torch.randn(places, len(sizes) * rank, inputs, generator=generator).mul_(0.1).to(BF16)
    up = torch.randn(places, rank, sum(sizes), generator=generator).mul_(0.1).to(BF16)
    down[0] = up[0] = 0
    context = LayerContext(None, torch.device("cpu"))
    context.open(64, 1)
    context.assign(np.arange(64), 0)
    for page in range(64):
        context.assign(np.array([page]), page * 7 % places)
    context.enter(torch.arange(rows) % 64)
    ordered = [platform.linear.order_adapter(*pair, sizes) for pair in zip(down, up, strict=True)]
    stored = [torch.stack(parts) for parts in zip(*ordered, strict=True)]
    return context, (down, up), stored


@pytest.mark.parametrize(("inputs", "rank", "sizes"), [(64, 16, (32, 16, 16)), (96, 32, (48,)), (256, 16, (896, 896))])
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 33, 150])
def test_low_rank_sums_are_those_of_each_rows_place(platform, inputs, rank, sizes, rows):
    context, (down, up), stored = layer(platform, 10, inputs, rank, sizes, rows)
    x, out = torch.randn(rows, inputs).to(BF16), torch.randn(rows, sum(sizes)).to(BF16)
    wanted = LowRankDelta(context, down.float(), up.float(), sizes)(x.float(), out.float())
    found = platform.linear.make_delta(context, *stored, sizes)(x, out.clone())
    torch.testing.assert_close(found.float(), wanted, atol=0.05, rtol=0.02)
    none = context.rows == 0
    assert torch.equal(found[none], out[none])


def test_low_rank_sums_of_a_row_do_not_depend_on_others(platform):
    sizes = (64, 32)
    context, _, stored = layer(platform, 5, 160, 16, sizes, 61)
    x, out = torch.randn(61, 160).to(BF16), torch.randn(61, 96).to(BF16)
    delta = platform.linear.make_delta(context, *stored, sizes)
    together = delta(x, out.clone())
    for row in range(61):
        context.enter(torch.tensor([row]))
        assert torch.equal(delta(x[row : row + 1], out[row : row + 1].clone())[0], together[row])


def test_without_native_operators_ordered_matrices_give_the_same(platform):
    sizes = (32, 16)
    context, (down, up), stored = layer(platform, 4, 64, 16, sizes, 20)
    x, out = torch.randn(20, 64).to(BF16), torch.randn(20, 48).to(BF16)
    plain = CpuLowRankDelta(NativeOperators(platform.native.isa, 1), context, *stored, sizes)(x, out.clone())
    wanted = LowRankDelta(context, down.float(), up.float(), sizes)(x.float(), out.float())
    torch.testing.assert_close(plain.float(), wanted, atol=0.05, rtol=0.02)


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    return made_up_model(path, CONFIG, 0.1)


@pytest.fixture
def nine(model, tmp_path):
    modules = adapted_modules(model)
    return {
        number: save_adapter(tmp_path / f"{number}", modules, number, rank=1 + number % 8) for number in range(1, 10)
    }


def adapted(drive, model, files, settings=NINE, **options):
    driver = drive(model, **{"dtype": "bfloat16", "adapters": settings} | options)
    for number, file in files.items():
        driver.runner.load_adapter(number, str(file))
    return driver


def answers(driver, requests, steps, sampling=ALL):
    """Log-probabilities [step][slot] of ``steps`` steps of ``requests``, adapters and prompts by slot."""
    found = []
    for slot, (adapter, prompt) in requests.items():
        driver.admit(slot, prompt, sampling=sampling, adapter=adapter)
    for _ in range(steps):
        rows = [(slot, driver.pending(slot)) for slot in requests]
        result = logprobs_of(driver.step(rows), len(rows), VOCAB)
        order = sorted(rows, key=lambda row: row[1] != 1)
        found.append({slot: result[row] for row, (slot, _) in enumerate(order)})
    return found


def test_a_batch_of_nine_adapters_gives_each_row_what_it_has_alone(model, nine, drive, prompts):
    texts = prompts(*range(5, 25, 2))
    requests = {slot: (slot - 1, text) for slot, text in enumerate(texts, start=1)}
    assert len(requests) == 10
    together = answers(adapted(drive, model, nine), requests, 4)
    one = adapted(drive, model, nine)
    for slot, request in requests.items():
        for number, alone in enumerate(answers(one, {slot: request}, 4)):
            np.testing.assert_array_equal(together[number][slot], alone[slot])
        one.release(slot)
    assert np.abs(together[0][2] - together[0][1]).max() > 0.1


@pytest.mark.parametrize("quantization", ["", "int8", "fp8"])
def test_programs_with_adapters_compute_what_the_operators_do(model, nine, drive, prompts, monkeypatch, quantization):
    requests = dict(enumerate(zip((3, 0, 9), prompts(40, 5, 11), strict=True), start=1))
    driver = adapted(drive, model, nine, quantization=quantization)
    assert driver.info.graph_rows
    found = answers(driver, requests, 3)
    monkeypatch.setattr(CpuCapture, "record", lambda *args, **options: None)
    driver = adapted(drive, model, nine, quantization=quantization)
    assert not driver.info.graph_rows
    for step, wanted in zip(found, answers(driver, requests, 3), strict=True):
        for slot in requests:
            np.testing.assert_allclose(step[slot], wanted[slot], rtol=0, atol=0.2 if quantization else 0)


def test_keys_of_latent_vectors_have_adapters_beside_native_operators(tmp_path, drive, prompts, monkeypatch):
    """In bf16 as in float32, where all is plain torch. Identity matrices are not packed."""
    model = made_up_model(tmp_path, LATENT, 0.1)
    modules = {module: shape for module, shape in adapted_modules(model).items() if module.endswith("kv_b_proj")}
    files = {index: save_adapter(tmp_path / f"{index}", modules, index, scale=0.3) for index in (1, 2)}
    settings = AdapterSettings(max_rank=4, max_batch=2, targets=("kv_b_proj",))
    requests = dict(enumerate(zip((2, 0, 1), prompts(60, 5, 11), strict=True), start=1))
    driver = adapted(drive, model, files, settings)
    with monkeypatch.context() as patched:
        patched.setattr(NativeLatentHeads, "__init__", None)
        found = answers(driver, requests, 3)
    wanted = answers(adapted(drive, model, files, settings, dtype="float32"), requests, 3)
    for one, other in zip(found, wanted, strict=True):
        for slot in requests:
            np.testing.assert_allclose(one[slot], other[slot], atol=0.15)
    (plain,) = answers(drive(model), {1: (0, requests[1][1])}, 1)
    assert np.abs(plain[1] - wanted[0][1]).max() > 0.3


def test_steps_of_adapters_run_in_one_native_call(model, nine, drive, prompts, monkeypatch):
    calls: list[str] = []
    for kind in (NativeDecode, NativePrefill):
        run = kind.run

        def counted(self, *args, run=run, kind=kind, **options):
            result = run(self, *args, **options)
            calls.append(f"{kind.__name__} {result is not None}")
            return result

        monkeypatch.setattr(kind, "run", counted)
    greedy = SlotSampling(temperature=0.0)
    tokens = {}
    for together in (True, False):
        calls.clear()
        driver = adapted(drive, model, nine)
        requests = dict(enumerate(zip((3, 0, 9), prompts(12, 5, 7), strict=True), start=1))
        for group in ([*requests],) if together else [[slot] for slot in requests]:
            for slot in group:
                driver.admit(slot, requests[slot][1], sampling=greedy, adapter=requests[slot][0])
            for _ in range(6):
                driver.step([(slot, driver.pending(slot)) for slot in group])
            tokens[together, *group] = [driver.tokens[slot] for slot in group]
            for slot in group:
                driver.release(slot)
        assert set(calls) == {"NativeDecode True", "NativePrefill True"}
    assert tokens[True, 1, 2, 3] == [tokens[False, slot][0] for slot in (1, 2, 3)]


def test_what_adapters_add_to_logits_in_float32_is_not_written_as_bf16(platform):
    sizes = (48,)
    context, (down, up), stored = layer(platform, 4, 64, 16, sizes, 20)
    x, out = torch.randn(20, 64).to(BF16), torch.randn(20, 48)
    found = platform.linear.make_delta(context, *stored, sizes)(x, out.clone())
    wanted = LowRankDelta(context, down.float(), up.float(), sizes)(x.float(), out)
    torch.testing.assert_close(found, wanted, atol=0.05, rtol=0.02)


def test_plain_adapters_are_computed_in_torch_on_any_device(model, nine, drive, prompts, monkeypatch):
    requests = dict(enumerate(zip((3, 0, 9), prompts(12, 5, 7), strict=True), start=1))
    wanted = answers(adapted(drive, model, nine), requests, 3)
    monkeypatch.setattr(CpuLowRankDelta, "__call__", None)
    driver = adapted(drive, model, nine, settings=msgspec.structs.replace(NINE, plain=True))
    for step, found in zip(wanted, answers(driver, requests, 3), strict=True):
        for slot in requests:
            np.testing.assert_allclose(found[slot], step[slot], rtol=0, atol=0.3)
