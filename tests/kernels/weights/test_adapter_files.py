"""Adapters in PEFT's format: what their configuration and the header of their weights say, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kernels.contract.adapters import AdapterSettings, read_adapter_info
from kernels.contract.errors import ConfigError
from kernels.weights.adapter_files import read_files
from tests.kits.adapters import save_adapter

MODULES = {"model.layers.0.self_attn.q_proj": (8, 4), "model.layers.1.mlp.down_proj": (4, 6)}


def test_info_has_rank_targets_and_base(tmp_path):
    file = save_adapter(tmp_path / "pirate", MODULES, 1, rank=3, base_model_name_or_path="some/base")
    info = read_adapter_info(str(file), {"num_hidden_layers": 2}, AdapterSettings(max_rank=3))
    assert (info.name, info.rank, info.targets, info.base_model) == ("pirate", 3, ("down_proj", "q_proj"), "some/base")
    assert info.parameters == 3 * (8 + 4 + 4 + 6)
    assert info.stored_bytes == 4 * info.parameters


@pytest.mark.parametrize(
    ("config", "scales"),
    [
        ({"lora_alpha": 6}, (3.0, 6.0)),
        ({"lora_alpha": 8, "use_rslora": True, "rank_pattern": {"q_proj": 4}}, (4.0, 8.0)),
        ({"alpha_pattern": {r"^model\.layers\.1\.mlp\.down_proj": 5}, "lora_alpha": 2}, (1.0, 5.0)),
        ({"alpha_pattern": {"self_attn.q_proj$": 1}, "lora_alpha": 2}, (0.5, 2.0)),
        ({"alpha_pattern": {r".*\.q_proj": 3, r"^.*\.down_proj": 7}}, (1.5, 7.0)),
        ({"alpha_pattern": {"proj": 9}, "lora_alpha": 2}, (1.0, 2.0)),  # the end of no module's name
    ],
)
def test_scales_follow_alpha_rank_and_their_patterns(config, scales, tmp_path):
    ranks = {"q_proj": 2, "down_proj": 1} | config.get("rank_pattern", {})
    file = save_adapter(tmp_path / "one", MODULES, 1, rank=2, **config | {"rank_pattern": ranks})
    found = read_files(str(file)).modules
    assert tuple(found[module].scale for module in MODULES) == scales


@pytest.mark.parametrize(
    ("parameters", "patterns", "scales"),
    [  # PEFT names parameters in patterns, and not in files
        (["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], {r".*\.gate_up_proj": 4}, {".base_layer": 2, "": 4}),
        (["experts.down_proj"], {"experts.down_proj": 4, "gate_up_proj": 1}, {"": 2}),
        (None, {"experts.down_proj": 4}, {".base_layer": 4, "": 2}),
        (["experts.up_proj", "experts.down_proj"], {"up_proj": 4}, {".base_layer": 2, "": 4}),
        (["layers.0.mlp.experts.down_proj", "layers.1.mlp.experts.gate_up_proj"], {"down_proj": 4}, {"": 2}),
    ],
)
def test_patterns_name_the_parameters_of_stacked_experts(parameters, patterns, scales, tmp_path):
    experts, config = 3, {"r": 2, "lora_alpha": 8, "rank_pattern": patterns, "target_parameters": parameters}
    file, module = tmp_path / "one", "model.layers.0.mlp.experts"
    file.mkdir()
    (file / "adapter_config.json").write_text(json.dumps(config))
    rows = {wrapped: experts * 8 // scale for wrapped, scale in scales.items()}
    tensors = {f"base_model.model.{module}{wrapped}.lora_A.weight": np.ones((rows[wrapped], 5)) for wrapped in scales}
    tensors |= {f"base_model.model.{module}{wrapped}.lora_B.weight": np.ones((6, rows[wrapped])) for wrapped in scales}
    save_file({name: each.astype(np.float32) for name, each in tensors.items()}, file / "adapter_model.safetensors")
    found = read_files(str(file)).modules
    for wrapped, scale in scales.items():
        assert (found[f"{module}{wrapped}"].scale, found[f"{module}{wrapped}"].experts) == (scale, experts)


def test_a_pattern_with_a_dot_before_a_name_needs_a_parent(tmp_path):
    """PEFT looks for ``(.*\\.)?(PATTERN)$`` from the beginning of a module's name."""
    config = {"lora_alpha": 2, "alpha_pattern": {r".*\.lm_head": 8, r".*\.q_proj": 6, "q_proj": 4}}
    file = save_adapter(tmp_path / "one", MODULES | {"lm_head": (20, 4)}, 1, rank=2, **config)
    found = read_files(str(file)).modules
    assert [found[module].scale for module in (*MODULES, "lm_head")] == [3.0, 1.0, 1.0]


def test_names_inside_of_wrapping_models_are_those_of_text(tmp_path):
    file = save_adapter(tmp_path / "one", {"model.language_model.layers.0.mlp.up_proj": (4, 4)}, 1)
    assert list(read_files(str(file)).modules) == ["model.layers.0.mlp.up_proj"]


ENDS = {"model.embed_tokens": (4, 20), "lm_head": (20, 4)}


def test_embeddings_and_output_are_read_and_weights_of_the_base_are_not(tmp_path):
    file = save_adapter(tmp_path / "one", ENDS, 1, rank=2)
    stored = load_file(file / "adapter_model.safetensors")
    for module in ENDS:
        stored[f"base_model.model.{module}.base_layer.weight"] = np.zeros((20, 4), np.float32)
    save_file(stored, file / "adapter_model.safetensors")
    found = read_files(str(file))
    assert found.info.targets == ("embed_tokens", "lm_head")
    assert [(found.modules[module].lookup, found.modules[module].inputs) for module in ENDS] == [(True, 20), (False, 4)]
    stored["base_model.model.lm_head.base_layer.weight"] = np.zeros((21, 4), np.float32)
    save_file(stored, file / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=r"lm_head.base_layer.weight is not supported: no LoRA matrices of its shape"):
        read_files(str(file))


def test_magnitudes_of_dora_are_read_and_needed(tmp_path):
    file = save_adapter(tmp_path / "one", MODULES, 1, use_dora=True)
    found = read_files(str(file), None, AdapterSettings(max_rank=3, targets=("all", "dora")))
    assert found.info.targets == ("dora", "down_proj", "q_proj")
    assert all(each.magnitudes.endswith("lora_magnitude_vector.weight") for each in found.modules.values())
    with pytest.raises(ConfigError, match="it changes dora, which --lora-target-modules does not include"):
        read_files(str(file), None, AdapterSettings(max_rank=3))
    stored = load_file(file / "adapter_model.safetensors")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector.weight"
    save_file(stored | {name: np.ones(7, np.float32)}, file / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match="must have 8 values, one for each output"):
        read_files(str(file))
    del stored[name]
    save_file(stored, file / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match="q_proj has no magnitudes, but use_dora is true"):
        read_files(str(file))


def test_all_targets_are_without_embeddings_and_output(tmp_path):
    file = save_adapter(tmp_path / "one", MODULES | ENDS, 1, rank=2)
    with pytest.raises(ConfigError, match="changes embed_tokens, lm_head, which --lora-target-modules"):
        read_files(str(file), None, AdapterSettings(max_rank=2))
    targets = ("all", "embed_tokens", "lm_head")
    assert len(read_files(str(file), None, AdapterSettings(max_rank=2, targets=targets)).modules) == 4


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"bias": "all"}, "bias 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"ensure_weight_tying": True}, "ensure_weight_tying"),
        ({"fan_in_fan_out": True}, "transposed weights"),
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"lora_alpha": "much"}, "lora_alpha is 'much', not a number"),
        ({"r": 0.5}, "r is 0.5, not a whole number"),
        ({"rank_pattern": {"v_proj": 1.5}}, "rank_pattern of v_proj is 1.5, not a whole number"),
        ({"alpha_pattern": {"(a+)+": 1}}, "is a regular expression"),
        ({"alpha_pattern": {".q_proj": 1}}, "'.q_proj' is a regular expression"),
        ({"rank_pattern": {"q_proj": 2}, "r": 1}, "the rank in adapter_config.json is 1"),
    ],
)
def test_what_is_not_built_is_refused_by_name(config, reason, tmp_path):
    with pytest.raises(ConfigError, match=f"cannot be used: .*{reason.replace('(', '.')}"):
        read_adapter_info(str(save_adapter(tmp_path / "one", MODULES, 1, **config)))


def test_one_error_names_all_that_is_wrong(tmp_path):
    file = save_adapter(tmp_path / "one", MODULES, 1, lora_bias=True)
    stored = load_file(file / "adapter_model.safetensors")
    del stored["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"]
    stored["base_model.model.lm_head.weight"] = np.ones((2, 2), np.float32)
    stored["base_model.model.model.layers.9.mlp.up_proj.lora_A.weight"] = np.ones((3, 4), np.float32)
    stored["base_model.model.model.layers.9.mlp.up_proj.lora_B.weight"] = np.ones((4, 3), np.float32)
    stored["base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"] = np.ones((3, 4), np.int32)
    save_file(stored, file / "adapter_model.safetensors")
    with pytest.raises(ConfigError) as raised:
        read_adapter_info(str(file), {"num_hidden_layers": 2}, AdapterSettings(max_rank=2, targets=("q_proj",)))
    for reason in (
        "biases of adapters are not supported",
        "q_proj has only one of A and B",
        "lm_head.weight is not supported: it is not a LoRA matrix",
        "is stored as I32",
        "it changes layer 9, but the model has 2 layers",
        "its rank 3 is larger than --max-lora-rank 2; start with 3",
        "it changes down_proj, up_proj, which --lora-target-modules does not include",
    ):
        assert reason in str(raised.value)


def test_a_module_under_two_names_is_refused(tmp_path):
    file = save_adapter(tmp_path / "one", MODULES, 1)
    stored = load_file(file / "adapter_model.safetensors")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    for other in (name.replace("A.weight", "A.default.weight"), name.replace("q_proj", "q_proj.base_layer")):
        save_file(stored | {other: stored[name]}, file / "adapter_model.safetensors")
        with pytest.raises(ConfigError, match="stored under two names"):
            read_adapter_info(str(file))
    inner = {key.replace("model.layers", "model.language_model.layers"): value for key, value in stored.items()}
    save_file(stored | inner, file / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match="stored under two names"):
        read_adapter_info(str(file))


def test_files_that_are_missing_pickled_or_torn_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="is not a directory"):
        read_adapter_info(str(tmp_path / "none"))
    file = save_adapter(tmp_path / "one", MODULES, 1)
    weights = file / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(ConfigError, match="not a complete safetensors file"):
        read_adapter_info(str(file))
    weights.rename(file / "adapter_model.bin")
    with pytest.raises(ConfigError, match="pickled and not loaded"):
        read_adapter_info(str(file))
    (file / "adapter_config.json").write_text(json.dumps([1]))
    with pytest.raises(ConfigError, match="is not a JSON object"):
        read_adapter_info(str(file))


def test_the_reader_needs_no_torch(tmp_path):
    file = save_adapter(tmp_path / "one", MODULES, 1)
    code = (
        "import sys; from kernels.contract.adapters import read_adapter_info as read;"
        f"read({str(file)!r}); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
