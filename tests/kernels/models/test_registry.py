"""Families are found by architecture: those built in, and those that other distributions add."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

from kernels.contract.caches import CacheGroup, Paged
from kernels.contract.errors import ConfigError
from kernels.models.config_loader import read_config
from kernels.models.registry import BUILT_IN, GROUP, caches, entries, families, find, tensors

FAMILY = '''
"""Llama under another name, with another name for the output."""
import dataclasses
from kernels.models import llama
from kernels.models.layers import pre_norm, vocabulary
from kernels.models.decoder import Decoder
from kernels.weights.tensors import norm

GGUF = "otter"

def config(raw):
    return dataclasses.replace(llama.config(raw), max_positions=77)

def tensors(config):
    yield from vocabulary.tensors(config, "otter.table", "otter.head")
    for index in range(config.layers):
        yield from pre_norm.tensors(config, f"otter.layers.{index}")
    yield norm("otter.norm", config.hidden_size)

caches = llama.caches

def build(config, builder):
    vocab = vocabulary.vocabulary(builder, config, "otter.table", "otter.head")
    layers = [pre_norm.layer(builder, config, f"otter.layers.{index}", 0) for index in range(config.layers)]
    return Decoder(builder, config, vocab, layers, builder.norm("otter.norm", config.norm_eps))
'''


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """A distribution outside of this package: a module, and its metadata beside it as pip leaves it."""
    (tmp_path / "otter_family.py").write_text(FAMILY)
    info = tmp_path / "otter-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: otter\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nOtterForCausalLM = otter_family\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("otter_family", None)


def test_another_distribution_adds_a_family(outside, reference, drive, prompts, tmp_path):
    """Its models are opened, loaded and run as those built in."""
    from safetensors.torch import load_file, save_file

    model, target = reference("llama2"), tmp_path / "model"
    target.mkdir()
    raw = json.loads((model.path / "config.json").read_text()) | {"architectures": ["OtterForCausalLM"]}
    (target / "config.json").write_text(json.dumps(raw))
    renamed = {"model.embed_tokens.weight": "otter.table.weight", "lm_head.weight": "otter.head.weight"}
    held = load_file(model.path / "model.safetensors")
    save_file(
        {renamed.get(name, name.replace("model.", "otter.")): tensor for name, tensor in held.items()},
        target / "model.safetensors",
    )
    assert read_config(target).max_positions == 77
    driver = drive(target)
    assert driver.info.architecture == "OtterForCausalLM"
    (prompt,) = prompts(20)
    driver.admit(1, prompt)
    assert driver.generate(1, 40) == model.greedy(prompt, 40)


def test_errors_name_all_families(outside):
    with pytest.raises(
        ConfigError, match=r"supported are Afmoe.*LlamaForCausalLM.*OtterForCausalLM.*Qwen3MoeForCausalLM"
    ):
        find(["T5ForConditionalGeneration"])


@pytest.mark.parametrize(
    ("value", "says"),
    [("not_there", "cannot be imported"), ("otter_family_broken", "has no config and no tensors")],
)
def test_a_broken_family_is_named(value, says, outside):
    (outside / "otter_family_broken.py").write_text("")
    (outside / "otter-1.0.dist-info" / "entry_points.txt").write_text(f"[{GROUP}]\nOtterForCausalLM = {value}\n")
    with pytest.raises(ConfigError, match=says):
        find(["OtterForCausalLM"])


def test_a_family_is_imported_when_a_model_of_it_is_opened():
    code = """
        import sys
        from kernels.models.registry import entries, find
        entries()
        assert not any(name in sys.modules for name in ("torch", "kernels.models.llama", "kernels.models.qwen3"))
        find(["LlamaForCausalLM"])
        assert "kernels.models.llama" in sys.modules and "kernels.models.qwen3_moe" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_every_family_says_what_it_supports():
    found = {family.architecture: family for family in families()}
    assert found.keys() == {entry.architecture for entry in entries().values() if not entry.encoder}
    assert found.keys() < {entry.architecture for entry in BUILT_IN} == entries().keys()
    assert found["MixtralForCausalLM"].experts
    assert found["MixtralForCausalLM"].windows
    assert not found["LlamaForCausalLM"].experts
    assert not found["LlamaForCausalLM"].windows
    assert found["Qwen2ForCausalLM"].windows
    assert found["Qwen3ForCausalLM"].gguf
    assert not found["MiMoForCausalLM"].gguf
    assert all(family.quantizable and family.tied for family in found.values())


@pytest.mark.parametrize("name", ["llama2", "mistral", "qwen2-window", "qwen3-moe"])
def test_caches_hold_keys_and_values_of_every_layer(name, reference):
    config = read_config(reference(name).path)
    paged = Paged(config.kv_heads, config.head_dim, config.head_dim)
    assert caches(config) == (CacheGroup(paged, tuple(range(config.layers))),)


def test_names_of_tensors_are_unique(reference):
    for name in ("llama2", "mixtral", "qwen2-moe", "phi3", "olmo2"):
        declared = tensors(read_config(reference(name).path))
        places = [spec.gguf.name for spec in declared.values() if spec.gguf is not None]
        assert len(places) == len(set(places))
