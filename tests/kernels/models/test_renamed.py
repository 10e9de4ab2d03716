"""Families whose code stands in their checkpoints: Llama's decoder of transformers under the vendor's names."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.contract.config import RunnerConfig
from kernels.contract.errors import LoadError
from kernels.contract.runner import open_runner
from kernels.contract.step import Admission, SlotSampling, StepBatch
from kernels.contract.tasks import Classify
from tests.kernels.distributed.ranks import run_ranks
from tests.kits.driver import pack
from tests.kits.gguf_checkpoints import greedy as greedy_of
from tests.kits.gguf_families import write_family
from tests.kits.renamed import save_renamed


@pytest.fixture(scope="module", params=["InternLM2ForCausalLM", "ExaoneForCausalLM"])
def renamed(request, tmp_path_factory):
    """Llama's model, and a directory of the vendor's."""
    path = tmp_path_factory.mktemp(request.param)
    return save_renamed(request.param, path, vocab_size=212), path


def greedy(model, prompt, length):
    tokens = list(prompt)
    while len(tokens) < length:
        with torch.inference_mode():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens


def test_a_tensor_that_the_family_lacks_is_refused(renamed, drive, tmp_path):
    _, path = renamed
    weights = load_file(path / "model.safetensors")
    layer = next(name for name in weights if ".0.attention_norm." in name or ".0.ln_1." in name).rsplit(".", 2)[0]
    save_file(weights | {f"{layer}.more.bias": torch.zeros(2)}, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    with pytest.raises(LoadError, match=r"\.0\.more\.bias is in the checkpoint and not in the model"):
        drive(tmp_path)


def test_tokens_are_those_of_llama(renamed, drive, prompts):
    model, path = renamed
    driver = drive(path)
    (prompt,) = prompts(30)
    driver.admit(1, prompt)
    driver.step([(1, 11)])
    assert driver.generate(1, 60) == greedy(model, prompt, 60)


def test_a_gguf_file_says_what_its_directory_says(renamed, drive, prompts, tmp_path):
    model, path = renamed
    (prompt,) = prompts(30)
    file = write_family(path, tmp_path / "model.gguf")
    assert greedy_of(drive, file, prompt, 60) == greedy(model, prompt, 60)


def test_tokens_of_two_ranks_are_those_of_llama(renamed, prompts):
    model, path = renamed
    (prompt,) = prompts(12)
    first, second = run_ranks([{"model": str(path), "prompts": [prompt], "length": 24}])
    assert first[0]["tokens"] == second[0]["tokens"] == [greedy(model, prompt, 24)]


def test_the_reward_model_of_internlm_2_has_a_head_of_its_own(renamed, tmp_path):
    """``v_head`` without a bias, in place of an output to the vocabulary."""
    model, path = renamed
    if "InternLM2" not in str(path):
        pytest.skip("only InternLM 2 has one")
    weights = load_file(path / "model.safetensors")
    del weights["output.weight"]
    head = weights["v_head.weight"] = torch.randn(1, 48, generator=torch.Generator().manual_seed(2))
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    raw = json.loads((path / "config.json").read_text()) | {"architectures": ["InternLM2ForRewardModel"]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    runner = open_runner(RunnerConfig(str(tmp_path), dtype="float32", max_total_tokens=256, max_slots=2, threads=1))
    assert runner.load().tasks == ("classify",)
    prompt = list(range(5, 17))
    sampling = SlotSampling(temperature=0.0, logprobs=0)
    admitted = Admission(1, 1, pack(prompt), len(prompt), 0, pack([1]), sampling, task=Classify())
    result = runner.run(StepBatch(1, pack([1]), pack([1]), pack([len(prompt)]), admitted=(admitted,)))
    runner.close()
    with torch.inference_mode():
        expected = head @ model.model(torch.tensor([prompt])).last_hidden_state[0, -1]
    torch.testing.assert_close(torch.frombuffer(bytearray(result.pooled), dtype=torch.float32), expected)
