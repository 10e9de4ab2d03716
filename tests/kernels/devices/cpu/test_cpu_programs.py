"""The CPU's native programs against the model's passes."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch

from app.understudy.drafts import DRAFTS, draft_path
from kernels.contract.speculation import SpeculativeSettings
from kernels.contract.step import SlotSampling
from kernels.devices.capture import CaptureRequest
from kernels.devices.cpu.capture import CpuCapture
from kernels.devices.cpu.device import CpuDevice
from kernels.devices.cpu.native import library
from kernels.devices.cpu.native_experts import NativeChoice
from kernels.devices.cpu.native_operators import NativeOperators
from kernels.devices.cpu.program import Program
from kernels.execution.executors.native_decode import NativeDecode
from tests.kits.declared import made_up_model
from tests.kits.native import compiled, needs_native
from tests.kits.speculation.captures import decoder
from tests.kits.speculation.paged import Paged

__all__ = ["compiled"]

pytestmark = [needs_native, pytest.mark.usefixtures("compiled")]

BF16 = torch.bfloat16
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
ALL = SlotSampling(temperature=0.0, logprobs=211)


SINKS = CONFIG | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "sliding_window": 16,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}


class BuildsOn:
    """A build that does not end."""

    def poll(self) -> None:
        return None


LATENT = CONFIG | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_key_value_heads": 6,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
}

SIGMOID_GROUPS = {
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}

GLM = (
    CONFIG
    | SIGMOID_GROUPS
    | {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "moe_intermediate_size": 64,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
        "head_dim": 64,
    }
)

LATENT_V3 = LATENT | SIGMOID_GROUPS | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}


@pytest.fixture
def model(tmp_path):
    return made_up_model(tmp_path, CONFIG, 0.3)


def scored(driver, prompts):
    """Log-probabilities of every token after each of a few mixed steps, and the rows that ran in a program."""
    for slot, prompt in enumerate(prompts, 1):
        driver.admit(slot, prompt, sampling=ALL)
    found, programs = [], []
    for rows in ([(1, 40)], [(1, 1), (2, 5)], [(1, 1), (2, 1)], [(2, 1)], [(1, 1), (2, 1)]):
        result = driver.step(rows)
        programs.append(result.timing.graph_rows)
        ids = np.frombuffer(result.top_ids, np.int32).reshape(-1, 211)
        logprobs = np.empty(ids.shape, np.float32)
        np.put_along_axis(logprobs, ids, np.frombuffer(result.top_logprobs, np.float32).reshape(-1, 211), 1)
        found.append(logprobs)
    return np.concatenate(found), programs


def test_a_program_chooses_experts_by_groups_as_torch_does(tmp_path, drive, prompts, monkeypatch):
    model, texts = made_up_model(tmp_path, GLM, 0.1), prompts(40, 5)
    driver = drive(model, dtype="bfloat16")
    found, programs = scored(driver, texts)
    assert programs == [1, 2, 2, 1, 2]
    monkeypatch.setattr(NativeChoice, "fits", lambda routing: False)
    chosen_by_torch = drive(model, dtype="bfloat16")
    one_by_one, programs = scored(chosen_by_torch, texts)
    assert programs == [0] * 5
    assert chosen_by_torch.tokens == driver.tokens
    np.testing.assert_allclose(found, one_by_one, atol=0.05)
    monkeypatch.setattr("kernels.devices.cpu.native_operators.open_library", lambda source: None)
    plain = drive(model, dtype="bfloat16")
    scored(plain, texts)
    assert plain.tokens == driver.tokens


@pytest.mark.parametrize("config", [CONFIG, SINKS], ids=["qwen3", "gpt-oss"])
def test_a_program_computes_what_the_model_does(config, tmp_path, drive, prompts, monkeypatch):
    model, texts = made_up_model(tmp_path, config, 0.3), prompts(40, 5)
    found, programs = scored(drive(model, dtype="bfloat16"), texts)
    assert programs == [1, 2, 2, 1, 2]  # prompts run in one, too
    monkeypatch.setattr(CpuCapture, "decodes", lambda *args, **options: None)
    one_by_one, programs = scored(drive(model, dtype="bfloat16"), texts)
    assert programs == [0] * 5
    np.testing.assert_array_equal(found, one_by_one)
    monkeypatch.setattr("kernels.devices.cpu.native_operators.open_library", lambda source: None)
    expected, _ = scored(drive(model, dtype="bfloat16"), texts)
    likely = expected > -8
    assert np.abs(found - expected)[likely].max() < 0.4


def test_a_program_chooses_behind_latent_vectors_as_torch_does(tmp_path, drive, prompts, monkeypatch):
    model, texts = made_up_model(tmp_path, LATENT_V3, 0.1), prompts(40, 5)
    driver, exact = drive(model, dtype="bfloat16"), drive(model)  # which is plain torch in float32
    found, programs = scored(driver, texts)
    assert programs == [1, 2, 2, 1, 2]
    scored(exact, texts)
    assert driver.tokens == exact.tokens
    monkeypatch.setattr(NativeChoice, "fits", lambda routing: False)
    chosen_by_torch, programs = scored(drive(model, dtype="bfloat16"), texts)
    assert programs == [0] * 5
    np.testing.assert_array_equal(found, chosen_by_torch)


@pytest.mark.parametrize(("config", "scale"), [(LATENT, 0.1), (LATENT_V3, 0.05)], ids=["deepseek-v2", "deepseek-v3"])
def test_a_program_attends_to_latent_vectors_as_torch_does(config, scale, tmp_path, drive, prompts, monkeypatch):
    model, texts = made_up_model(tmp_path, config, scale), prompts(40, 5)
    driver = drive(model, dtype="bfloat16")
    found, programs = scored(driver, texts)
    assert programs == [1, 2, 2, 1, 2]
    monkeypatch.setattr(CpuCapture, "decodes", lambda *args, **options: None)
    one_by_one, programs = scored(drive(model, dtype="bfloat16"), texts)
    assert programs == [0] * 5
    np.testing.assert_array_equal(found, one_by_one)
    monkeypatch.setattr("kernels.devices.cpu.native_operators.open_library", lambda source: None)
    plain = drive(model, dtype="bfloat16")
    expected, _ = scored(plain, texts)
    assert driver.tokens == plain.tokens
    np.testing.assert_allclose(found, expected, atol=0.1)


def test_weights_count_both_layouts_of_latent_heads(tmp_path, drive, prompts, monkeypatch):
    model = made_up_model(tmp_path, LATENT, 0.1)
    driver = drive(model, dtype="bfloat16")
    held = dict(driver.runner._device.attention._latent_heads)
    size = sum(heads.keys.nbytes + heads.values.nbytes for heads in held)
    assert len(held) == LATENT["num_hidden_layers"]
    assert size == sum(each._keys.memory.nbytes + each._values.memory.nbytes for each in held.values())
    scored(driver, prompts(40, 5))
    assert dict(driver.runner._device.attention._latent_heads) == held  # steps multiply with those
    for options in ({"page_size": 8}, {"kv_cache_dtype": "int8"}):
        other = drive(model, dtype="bfloat16", **options)
        scored(other, prompts(40, 5))
        assert other.info.weight_bytes == driver.info.weight_bytes - size
        assert not other.runner._device.attention._latent_heads
    monkeypatch.setattr(NativeOperators, "open", lambda native: setattr(native, "building", BuildsOn()))
    assert drive(model, dtype="bfloat16").info.weight_bytes == driver.info.weight_bytes


def test_prompts_of_more_than_256_tokens_run_outside_of_programs(model, drive, prompts):
    (text,) = prompts(256 + 257)
    driver = drive(model, dtype="bfloat16")
    driver.admit(1, text)
    assert [driver.step([(1, count)]).timing.graph_rows for count in (256, 257, 1)] == [1, 0, 1]


def test_long_prompts_over_latent_vectors_run_outside_of_programs(tmp_path, drive, prompts):
    model, texts = made_up_model(tmp_path, LATENT, 0.1), prompts(60, 5)
    driver, exact = drive(model, dtype="bfloat16"), drive(model)
    ran = []
    for one in (driver, exact):
        for slot, prompt in enumerate(texts, 1):
            one.admit(slot, prompt)
        first = one.step([(2, 5), (1, 60)])
        ran.append((first.timing.graph_rows, one.step([(1, 1), (2, 1)]).timing.graph_rows))
    assert ran == [(0, 2), (0, 0)]
    assert driver.tokens == exact.tokens


def test_programs_verify_drafts_over_latent_vectors(tmp_path, drive, prompts):
    model, (text,) = made_up_model(tmp_path, LATENT, 0.1), prompts(30)
    plain = drive(model, dtype="bfloat16")
    plain.admit(1, text)
    plain.step([(1, 30)])
    while len(plain.tokens[1]) < 60:
        plain.step([(1, 1)])
    driver = drive(model, dtype="bfloat16", speculation=SpeculativeSettings("NGRAM", num_draft_tokens=6))
    driver.admit(2, plain.tokens[1][30:])  # whose suffixes are drafts
    driver.step([(2, len(plain.tokens[1]) - 30)])
    driver.admit(1, text)
    driver.step([(1, 30)])
    steps = 0
    while len(driver.tokens[1]) < 60:
        driver.step([(1, 1)], drafts={1: 5})
        steps += 1
    assert driver.tokens[1][:60] == plain.tokens[1][:60]
    assert steps < 20


def test_a_model_with_one_copy_of_a_tied_weight_computes_the_same(model, drive, prompts, monkeypatch):
    texts = prompts(40, 5)
    expected, _ = scored(drive(model, dtype="bfloat16"), texts)
    monkeypatch.setattr("kernels.devices.cpu.dense_linear.SHARED_PACK_BYTES", 0)
    found, programs = scored(drive(model, dtype="bfloat16"), texts)
    assert programs == [1, 2, 2, 1, 2]
    np.testing.assert_array_equal(found, expected)


def generated(driver, prompts, steady):
    """Tokens of steps that are decodes of the most likely alone, but where a third request comes and one leaves."""
    one, two, three = prompts
    for slot, prompt in ((1, one), (2, two)):
        driver.admit(slot, prompt)
        driver.step([(slot, len(prompt))])
    found = [driver.step([(2, 1), (1, 1)]).tokens for _ in range(20)]
    driver.admit(3, three, sampling=SlotSampling(temperature=0.0, repetition_penalty=1.5))
    driver.step([(1, 1), (3, len(three))])
    found += [driver.step([(3, 1), (2, 1)]).tokens for _ in range(3)]
    driver.release(3)
    found += [driver.step([(1, 1), (2, 1)]).tokens for _ in range(3)]
    assert steady == [2] * 20 + [2] * 3
    return found


def test_steady_decodes_are_the_same_in_one_call(model, drive, prompts, monkeypatch):
    texts, counts, run = prompts(9, 5, 7), [], NativeDecode.advance
    monkeypatch.setattr(NativeDecode, "advance", lambda self: counts.append(len(self._slots)) or run(self))
    found = generated(drive(model, dtype="bfloat16"), texts, counts)
    monkeypatch.setattr(CpuCapture, "native_pass", lambda *args: None)
    assert generated(drive(model, dtype="bfloat16"), texts, counts) == found


def test_a_bad_grant_of_steady_decodes_fails_alone(model, drive, prompts):
    driver = drive(model, dtype="bfloat16")
    for slot, prompt in enumerate(prompts(9, 5), 1):
        driver.admit(slot, prompt)
        driver.step([(slot, len(prompt))])
    driver.step([(1, 1), (2, 1)])
    driver._granted.append((1, 0))
    held = driver.runner._loaded.slots.page_count[2]
    driver._granted.append((2, 7))
    result = driver.step([(1, 1), (2, 1)])
    assert [error.slot for error in result.failed] == [1]
    assert np.frombuffer(result.accepted, np.int32).tolist() == [0, 1]
    assert driver.runner._loaded.slots.page_count[2] == held + 1
    assert not driver.step([(2, 1)]).failed


def test_a_row_of_steady_decodes_that_is_not_finite_fails_alone(model, drive, prompts):
    driver = drive(model, dtype="bfloat16")
    for slot, prompt in enumerate(prompts(9, 5), 1):
        driver.admit(slot, prompt)
        driver.step([(slot, len(prompt))])
    driver.step([(1, 1), (2, 1)])
    before = driver.runner._loaded.slots.known[2]
    with torch.inference_mode():
        driver.runner._loaded.caches[0][driver.pages[1][0]] = float("nan")
    result = driver.step([(1, 1), (2, 1)])
    assert [(error.slot, "finite" in error.message) for error in result.failed] == [(1, True)]
    assert np.frombuffer(result.accepted, np.int32).tolist() == [0, 1]
    assert driver.runner._loaded.slots.known[2] == before + 1
    assert not driver.step([(2, 1)]).failed


@pytest.mark.parametrize("threads", [1, 3], ids=["alone", "team"])
def test_a_program_hands_out_layers_as_the_model_does(model, threads):
    platform = CpuDevice(threads)
    platform.select_dtype("bfloat16", None)
    paged = Paged(platform=platform, dtype=BF16)
    config, target = decoder(model, paged, (0, 2))
    caches = paged.caches(config)
    target.forward(paged.batch([(0, 0, 20), (1, 0, 9)], range(29)), caches)
    decodes = paged.batch([(0, 20, 1), (1, 9, 1)], [5, 6])
    expected = target.forward(decodes, caches)
    program = platform.capture.decodes(CaptureRequest(lambda batch: target.forward(batch, caches), [0], 4, 8, bool))
    assert program is not None
    found = program.run(decodes)
    assert found.shape == (2, 3 * config.hidden_size)
    assert torch.equal(found, expected)
    plain = Paged(dtype=torch.float32)
    _, target = decoder(model, plain, (0, 2))
    caches = plain.caches(config)
    target.forward(plain.batch([(0, 0, 20), (1, 0, 9)], range(29)), caches)
    expected = target.forward(plain.batch([(0, 20, 1), (1, 9, 1)], [5, 6]), caches)
    parts = [wide.unflatten(1, (3, -1)) for wide in (found.float(), expected)]
    assert torch.cosine_similarity(*parts, dim=-1).min() > 0.99
    assert torch.allclose(*(part.norm(dim=-1) for part in parts), rtol=0.03)


@pytest.mark.parametrize(("algorithm", "topk"), [("EAGLE", 1), ("EAGLE3", 3), ("MTP", 2), ("DFLASH", 1)])
def test_programs_draft_what_passes_do(algorithm, topk, drive, prompts, monkeypatch):
    """The included model, whose drafts' shapes all have native operators."""
    model, draft = DRAFTS.parent / "model", draft_path(algorithm)
    settings = SpeculativeSettings(algorithm, str(draft), num_steps=4, topk=topk, num_draft_tokens=6)

    def drafted():
        driver = drive(model, dtype="bfloat16", speculation=settings)
        drafter, found, recorded = driver.runner._loaded.speculator.drafter, [], []
        draft, run = drafter.draft, Program.run
        drafter.draft = lambda rows: found.append(draft(rows)) or found[-1]
        with monkeypatch.context() as patch:
            patch.setattr(Program, "run", lambda self, *args: recorded.append(self) or run(self, *args))
            for slot, prompt in enumerate(prompts(30, 9), 1):
                driver.admit(slot, prompt)
            driver.step([(1, 30), (2, 9)])
            for _ in range(4):
                driver.step([(1, 1), (2, 1)], {1: 5, 2: 5})
        return [drafts.tree.tokens.tolist() for drafts in found], len(set(map(id, recorded)))

    monkeypatch.setattr(CpuCapture, "native_pass", lambda *args: None)  # chains would run in calls of their own
    found, programs = drafted()
    assert programs >= (2 if algorithm == "DFLASH" else 3)  # the target's, and the draft's
    monkeypatch.setattr(CpuCapture, "decodes", lambda *args, **options: None)
    expected, programs = drafted()
    assert programs == 0
    assert found == expected
    assert len(found) == 4


def test_a_shape_without_native_operators_is_not_recorded(model, drive, prompts):
    driver = drive(model, dtype="bfloat16", page_size=8)
    driver.admit(1, *prompts(12))
    driver.generate(1, 14)
    assert driver.step([(1, 1)]).timing.graph_rows == 0


def test_operators_are_taken_over_between_requests(model, drive, prompts, monkeypatch, tmp_path, compiled):
    """A server that finds nothing compiled starts at once, and goes over when it is."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("kernels.devices.cpu.native_operators.start_build", lambda source: build)
    build = _Build()
    driver = drive(model, dtype="bfloat16")
    (one, two) = prompts(6, 7)
    driver.admit(1, one, sampling=ALL)
    driver.step([(1, 6)])
    library._folder(library.operators()).mkdir(parents=True)
    shutil.copy(compiled, library._folder(library.operators()))
    build.done = True
    driver.admit(2, two, sampling=ALL)
    driver.step([(1, 1), (2, 7)])
    assert driver.step([(1, 1)]).timing.graph_rows == 0  # a request is there that knows the other operators
    driver.release(1)
    driver.release(2)
    driver.admit(3, two, sampling=ALL)
    driver.step([(3, 7)])
    result = driver.step([(3, 1)])
    assert result.timing.graph_rows == 1
    fresh = drive(model, dtype="bfloat16")
    fresh.admit(3, two, sampling=ALL)
    fresh.step([(3, 7)])
    assert fresh.step([(3, 1)]).top_logprobs == result.top_logprobs  # packed weights came over unharmed


class _Build:
    done = False

    def poll(self):
        return 0 if self.done else None
