"""Arguments of quantization: valid combinations, and the settings that a runner gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.engine.configuration import runner_config
from actors.engine.speculation import speculation
from actors.options import ArgumentError, Arguments
from actors.workers.placement import Placement


@pytest.mark.parametrize(
    ("keywords", "rule"),
    [
        (
            {"kv_cache_dtype": "fp8", "device": "npu"},
            "kv_cache_dtype fp8_e4m3: NPUs have no operators for it; use int8",
        ),
        ({"kv_cache_dtype": "bf16", "kv_cache_quant_method": "per_token_head"}, "per_token_head needs kv_cache_dtype"),
        ({"kv_cache_quant_method": "per_token_head"}, "per_token_head needs kv_cache_dtype int8"),
        ({"quantization_param_path": "scales.json"}, "quantization_param_path needs kv_cache_dtype"),
        (
            {
                "quantization_param_path": "scales.json",
                "kv_cache_dtype": "int8",
                "kv_cache_quant_method": "per_token_head",
            },
            "exclude each other",
        ),
        ({"kv_cache_dtype": "fp4_e2m1"}, "a 4-bit cache is not built"),
        ({"speculative_draft_model_quantization": "int8"}, "without speculative_algorithm has no effect"),
        (
            {"speculative_draft_model_quantization": "int8", "speculative_algorithm": "NGRAM"},
            "has no effect with speculative_algorithm NGRAM",
        ),
    ],
)
def test_what_does_not_go_together(keywords, rule) -> None:
    with pytest.raises(ArgumentError, match=rule):
        Arguments.from_keywords(**keywords)


def test_a_runner_gets_its_quantization() -> None:
    placement = Placement("cpu")
    plain = runner_config(Arguments(), Path("model"), 64, placement)
    assert (plain.kv_cache_dtype, plain.kv_cache_quant_method, plain.kv_cache_scales) == ("", "", "")
    assert not plain.fp32_head
    arguments = Arguments.from_keywords(
        kv_cache_dtype="fp8", kv_cache_quant_method="none", quantization_param_path="s.json", enable_fp32_lm_head=True
    )
    reported = runner_config(arguments, Path("model"), 64, placement)
    assert (reported.kv_cache_dtype, reported.kv_cache_quant_method, reported.kv_cache_scales) == (
        "fp8_e4m3",
        "none",
        "s.json",
    )
    assert reported.fp32_head


def test_a_drafter_gets_its_quantization(tmp_path, monkeypatch) -> None:
    arguments = Arguments.from_keywords(
        speculative_algorithm="EAGLE", speculative_draft_model_path=str(tmp_path), quantization="int8",
        speculative_draft_model_quantization="unquant",
    )  # fmt: skip
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "vocab_size": 9}')
    from actors.text.model_files import ModelFiles

    found = speculation(arguments, ModelFiles(tmp_path))
    assert found is not None
    assert found.quantization == "unquant"
