"""Families whose code stands in their checkpoints: Llama's decoder of transformers under the vendor's names."""

from __future__ import annotations

import json
import re

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from kernels.contract.config import RunnerConfig
from kernels.contract.errors import LoadError
from kernels.contract.runner import open_runner
from kernels.contract.step import Admission, SlotSampling, StepBatch
from kernels.contract.tasks import Classify
from tests.kernels.distributed.ranks import run_ranks
from tests.kits.driver import COMMON, pack
from tests.kits.gguf_checkpoints import greedy as greedy_of
from tests.kits.gguf_families import write_family

RENAMED = {
    "InternLM2ForCausalLM": [
        (r"^model\.embed_tokens", "model.tok_embeddings"),
        (r"^lm_head", "output"),
        (r"input_layernorm", "attention_norm"),
        (r"post_attention_layernorm", "ffn_norm"),
        (r"self_attn\.o_proj", "attention.wo"),
        (r"self_attn", "attention"),
        (r"mlp\.gate_proj", "feed_forward.w1"),
        (r"mlp\.up_proj", "feed_forward.w3"),
        (r"mlp\.down_proj", "feed_forward.w2"),
    ],
    "ExaoneForCausalLM": [
        (r"^model\.embed_tokens", "transformer.wte"),
        (r"^model\.norm", "transformer.ln_f"),
        (r"^model\.layers", "transformer.h"),
        (r"input_layernorm", "ln_1"),
        (r"post_attention_layernorm", "ln_2"),
        (r"self_attn\.o_proj", "attn.attention.out_proj"),
        (r"self_attn", "attn.attention"),
        (r"mlp\.gate_proj", "mlp.c_fc_0"),
        (r"mlp\.up_proj", "mlp.c_fc_1"),
        (r"mlp\.down_proj", "mlp.c_proj"),
    ],
}
KEYS = {"num_hidden_layers": "num_layers", "rms_norm_eps": "layer_norm_epsilon", "hidden_act": "activation_function"}


@pytest.fixture(scope="module", params=RENAMED)
def renamed(request, tmp_path_factory):
    """Llama's model, and a directory of the vendor's."""
    torch.manual_seed(6)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**COMMON | {"vocab_size": 212})).eval()
    for parameter in model.parameters():
        parameter.data.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.3)
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    weights = {}
    for name, weight in load_file(path / "model.safetensors").items():
        for pattern, new in RENAMED[request.param]:
            name = re.sub(pattern, new, name)
        weights[name] = weight
    raw = json.loads((path / "config.json").read_text())
    if request.param == "InternLM2ForCausalLM":
        for layer in range(3):
            join_groups(weights, f"model.layers.{layer}.attention", kv_heads=2)
    else:
        raw = {KEYS.get(key, key): value for key, value in raw.items()}
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(raw | {"architectures": [request.param], "model_type": "own"}))
    return model, path


def join_groups(weights, module, kv_heads):
    """Each key head's queries, its key and its value, one after the other."""
    parts = [weights.pop(f"{module}.{part}_proj.weight").chunk(kv_heads) for part in "qkv"]
    weights[f"{module}.wqkv.weight"] = torch.cat([part for group in zip(*parts, strict=True) for part in group])


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


def test_a_gguf_file_of_exaone_says_what_its_directory_says(renamed, drive, prompts, tmp_path):
    model, path = renamed
    if "ExaoneForCausalLM" not in (path / "config.json").read_text():
        pytest.skip("InternLM 2 is not read from GGUF")
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
