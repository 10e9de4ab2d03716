"""Checkpoints that are whole load the same however they are cut; every other kind says what is wrong with it."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.contract.errors import CacheSizeError, ConfigError, LoadError, UnsupportedError
from tests.kernels.distributed.ranks import run_ranks


@pytest.fixture
def model(reference):
    return reference("qwen2-window")


@pytest.fixture
def copy(model, tmp_path):
    target = tmp_path / "model"
    shutil.copytree(model.path, target)
    return target


def edit(directory, change):
    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors")


def shard(directory):
    """Three files and an index."""
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = {}
    for number in range(3):
        file = f"model-{number + 1:05}-of-00003.safetensors"
        part = dict(list(weights.items())[number::3])
        save_file(part, directory / file)
        names |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return names


def test_shards_are_one_model(model, copy, drive, prompts):
    shard(copy)
    driver = drive(copy)
    (prompt,) = prompts(12)
    driver.admit(1, prompt)
    assert driver.generate(1, 20) == model.greedy(prompt, 20)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_weights_are_converted(stored, copy, drive):
    edit(copy, lambda weights: weights.update({name: tensor.to(stored) for name, tensor in weights.items()}))
    driver = drive(copy, dtype="float32")
    driver.admit(1, [1, 2, 3])
    assert driver.info.dtype == "float32"
    assert driver.generate(1, 6)


def test_every_missing_and_misshapen_tensor_is_named(copy, drive):
    def change(weights):
        del weights["model.norm.weight"]
        del weights["model.layers.1.self_attn.k_proj.bias"]
        weights["model.layers.2.mlp.up_proj.weight"] = torch.zeros(7, 48)

    edit(copy, change)
    with pytest.raises(LoadError) as caught:
        drive(copy)
    for part in (
        "model.norm.weight is missing",
        "model.layers.1.self_attn.k_proj.bias is missing",
        "model.layers.2.mlp.up_proj.weight has shape [7, 48], config.json asks for [80, 48]",
    ):
        assert part in str(caught.value)


def test_a_tensor_that_the_model_would_ignore_is_an_error(copy, drive):
    edit(copy, lambda weights: weights.update({"model.layers.0.self_attn.sinks": torch.zeros(4)}))
    with pytest.raises(LoadError, match=r"self_attn\.sinks is in the checkpoint and not in the model"):
        drive(copy)


def test_tensors_of_no_concern_are_left_alone(copy, drive):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4), "model.layers.9.eh_proj": torch.zeros(1)}
    edit(copy, lambda weights: weights.update(extra))
    drive(copy)


def test_weights_that_are_not_floats_are_refused(copy, drive):
    name = "model.layers.0.mlp.up_proj.weight"
    edit(copy, lambda weights: weights.update({name: weights[name].to(torch.int8)}))
    with pytest.raises(LoadError, match="stored as I8"):
        drive(copy)


@pytest.mark.parametrize(
    "name", ["model.layers.0.post_attention_layernorm.weight", "model.layers.1.self_attn.q_proj.bias"]
)
def test_a_number_that_is_not_finite_is_reported(name, copy, drive):
    """Small parts alone: whole weights are not looked at."""

    def broken(weights):
        weights[name][5] = float("nan")

    edit(copy, broken)
    with pytest.raises(LoadError, match=rf"{name} has numbers that are not finite .* in float32"):
        drive(copy)


def test_a_file_cut_short_is_named(copy, drive):
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(LoadError, match="download it again"):
        drive(copy)


def test_a_missing_shard_is_named(copy, drive):
    shard(copy)
    (copy / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(LoadError, match=r"model-00002-of-00003\.safetensors is missing"):
        drive(copy)


def test_an_index_that_promises_too_much_is_reported(copy, drive):
    shard(copy)
    save_file({}, copy / "model-00001-of-00003.safetensors")
    with pytest.raises(LoadError, match="is missing"):
        drive(copy)


def test_an_index_cannot_point_outside_its_directory(copy, drive, model):
    names = shard(copy)
    names["model.norm.weight"] = f"../../{model.path.name}/model.safetensors"
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(LoadError, match="outside its directory"):
        drive(copy)


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": []}'])
def test_a_broken_index_is_reported(text, copy, drive):
    shard(copy)
    (copy / "model.safetensors.index.json").write_text(text)
    with pytest.raises(LoadError, match="cannot be read"):
        drive(copy)


def test_pickled_weights_are_refused(copy, drive):
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(LoadError, match="convert them to safetensors"):
        drive(copy)


def test_a_directory_without_weights_is_reported(copy, drive):
    (copy / "model.safetensors").unlink()
    with pytest.raises(LoadError, match="--load-format dummy"):
        drive(copy)


def test_a_directory_that_is_not_there_is_reported(tmp_path, drive):
    with pytest.raises(ConfigError, match="does not exist"):
        drive(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"load_format": "pt"}, LoadError, "auto, safetensors, gguf or dummy"),
        ({"dtype": "float16"}, UnsupportedError, "bfloat16 or float32"),
        ({"device": "cuda:0"}, UnsupportedError, "--device cpu"),
        ({"context_length": 512}, ConfigError, "json-model-override-args"),
        ({"max_total_tokens": 1 << 40}, CacheSizeError, "--max-total-tokens"),
        ({"max_total_tokens": 0, "mem_fraction_static": 1e-9}, CacheSizeError, "--mem-fraction-static"),
        ({"config_overrides": "{"}, ConfigError, "not JSON"),
    ],
)
def test_what_cannot_be_loaded_names_the_remedy(options, error, says, model, drive):
    with pytest.raises(error, match=says):
        drive(model.path, **options)


def test_overrides_change_the_model(model, drive):
    driver = drive(model.path, config_overrides='{"max_position_embeddings": 512}', context_length=512)
    assert driver.info.context_length == 512


def test_a_small_cache_bounds_the_context(model, drive):
    driver = drive(model.path, max_total_tokens=100)
    assert driver.info.num_pages == 8
    assert driver.info.context_length == 112


def divided(path, ranks=4):
    """Turn a checkpoint of Grok 2 into the files of ``ranks`` ranks: each has its part of the experts."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    experts = {name: tensors.pop(name) for name in sorted(tensors) if ".experts." in name}
    save_file(tensors, path / "pytorch_model-00000-TP-common.safetensors")
    for rank in range(ranks):
        parts = {
            name: tensor.chunk(ranks, 1 if name.endswith("w2.weight") else 0)[rank].contiguous()
            for name, tensor in experts.items()
        }
        save_file(parts, path / f"pytorch_model-00001-TP-{rank:03}.safetensors")
    return path


def test_files_of_several_ranks_are_joined(reference, drive, prompts, tmp_path):
    """As Grok 2 is published, for eight ranks: here by one device, and by two."""
    model, (text,) = reference("parallel-grok"), prompts(30)
    path = divided(shutil.copytree(model.path, tmp_path / "divided"))
    expected = model.greedy(text, 44)
    driver = drive(path)
    driver.admit(1, text)
    driver.generate(1, 44)
    assert driver.tokens[1] == expected
    (first,), (second,) = run_ranks([{"model": str(path), "prompts": [text], "length": 44}])
    assert first["tokens"] == second["tokens"] == [expected]


def test_a_rank_without_its_file_and_parts_that_do_not_fit_are_named(reference, drive, tmp_path):
    path = divided(shutil.copytree(reference("parallel-grok").path, tmp_path / "divided"))
    last = path / "pytorch_model-00001-TP-003.safetensors"
    tensors = load_file(last)
    name = "model.layers.0.block_sparse_moe.experts.0.w2.weight"
    for cut, says in (
        ((slice(0, 48), slice(1, 8)), "has shape [48, 31]"),
        ((slice(1, 48),), "has parts of the shapes"),
    ):
        save_file(tensors | {name: tensors[name][cut].clone()}, last)
        with pytest.raises(LoadError, match=re.escape(f"{name} {says}")):
            drive(path)
    last.rename(path / "pytorch_model-00001-TP-004.safetensors")
    with pytest.raises(LoadError, match=r"lacks the part of .* in a file \*-TP-003\.safetensors; download"):
        drive(path)
