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
        ({"alpha_pattern": {"proj": 9}, "lora_alpha": 2}, (1.0, 2.0)),  # the end of no module's name
    ],
)
def test_scales_follow_alpha_rank_and_their_patterns(config, scales, tmp_path):
    ranks = {"q_proj": 2, "down_proj": 1} | config.get("rank_pattern", {})
    file = save_adapter(tmp_path / "one", MODULES, 1, rank=2, **config | {"rank_pattern": ranks})
    found = read_files(str(file)).modules
    assert tuple(found[module].scale for module in MODULES) == scales


def test_names_inside_of_wrapping_models_are_those_of_text(tmp_path):
    file = save_adapter(tmp_path / "one", {"model.language_model.layers.0.mlp.up_proj": (4, 4)}, 1)
    assert list(read_files(str(file)).modules) == ["model.layers.0.mlp.up_proj"]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"use_dora": True}, "DoRA is not built"),
        ({"bias": "all"}, "bias 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"fan_in_fan_out": True}, "stored transposed"),
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"lora_alpha": "much"}, "lora_alpha is 'much', not a number"),
        ({"alpha_pattern": {"(a+)+": 1}}, "is a regular expression"),
        ({"rank_pattern": {"q_proj": 2}, "r": 1}, "the rank in adapter_config.json is 1"),
    ],
)
def test_what_is_not_built_is_refused_by_name(config, reason, tmp_path):
    with pytest.raises(ConfigError, match=f"cannot be used: .*{reason.replace('(', '.')}"):
        read_adapter_info(str(save_adapter(tmp_path / "one", MODULES, 1, **config)))


def test_one_error_names_all_that_is_wrong(tmp_path):
    file = save_adapter(tmp_path / "one", MODULES, 1, use_dora=True)
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
        "DoRA is not built",
        "q_proj has only one of A and B",
        "lm_head.weight is no matrix of a linear layer",
        "is stored as I32",
        "it changes layer 9, and the model has 2 layers",
        "its rank is 3, more than --max-lora-rank 2",
        "it changes down_proj, up_proj, which --lora-target-modules does not name",
    ):
        assert reason in str(raised.value)


def test_a_module_under_two_names_is_refused(tmp_path):
    file = save_adapter(tmp_path / "one", MODULES, 1)
    stored = load_file(file / "adapter_model.safetensors")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    for other in (name.replace("A.weight", "A.default.weight"), name.replace("q_proj", "q_proj.base_layer")):
        save_file(stored | {other: stored[name]}, file / "adapter_model.safetensors")
        with pytest.raises(ConfigError, match="under two names"):
            read_adapter_info(str(file))
    inner = {key.replace("model.layers", "model.language_model.layers"): value for key, value in stored.items()}
    save_file(stored | inner, file / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match="under two names"):
        read_adapter_info(str(file))


def test_files_that_are_missing_pickled_or_torn_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="is not a directory"):
        read_adapter_info(str(tmp_path / "none"))
    file = save_adapter(tmp_path / "one", MODULES, 1)
    weights = file / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(ConfigError, match="not a whole safetensors file"):
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
