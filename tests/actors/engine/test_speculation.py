"""The settings of speculation that the worker gets, from the arguments and the files of model and draft."""

import json
from pathlib import Path
from typing import Any

import pytest

from actors.engine.speculation import speculation
from actors.options import ArgumentError, Arguments
from actors.text.model_files import ModelFiles, ModelPathError
from kernels.contract.speculation import SpeculativeSettings

LLAMA = {"architectures": ["LlamaForCausalLM"], "vocab_size": 100}
QWEN = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 100}


def directory(at: Path, config: dict[str, Any]) -> Path:
    at.mkdir(exist_ok=True)
    (at / "config.json").write_text(json.dumps(config))
    return at


def settings(
    tmp_path: Path, target: dict[str, Any], draft: dict[str, Any] | None, **given: object
) -> SpeculativeSettings:
    if draft is not None:
        given["speculative_draft_model_path"] = str(directory(tmp_path / "draft", draft))
    files = ModelFiles(directory(tmp_path / "target", target))
    found = speculation(Arguments.from_keywords(**given), files)
    assert found is not None
    return found


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "qwen3_next"},
        {"model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1},
        {"model_type": "qwen3_5", "text_config": {"vocab_size": 100, "mtp_num_hidden_layers": 1}},
    ],
)
def test_qwens_own_head_is_the_draft(tmp_path: Path, config: dict[str, Any]) -> None:
    settings_of = settings(tmp_path, QWEN | config, None, speculative_algorithm="NEXTN")
    assert (settings_of.algorithm, settings_of.num_draft_tokens) == ("MTP", 4)
    without = config | {"model_type": "qwen3_5", "mtp_num_hidden_layers": 0}
    with pytest.raises(ArgumentError, match="no draft of its own"):
        settings(tmp_path, QWEN | without, None, speculative_algorithm="NEXTN")


def test_without_an_algorithm_there_is_nothing(tmp_path: Path) -> None:
    assert speculation(Arguments(), ModelFiles(directory(tmp_path, QWEN))) is None


@pytest.mark.parametrize(
    ("target", "algorithm", "given", "chosen"),
    [
        (LLAMA, "EAGLE", {}, (3, 1, 4)),
        (QWEN, "EAGLE", {}, (3, 1, 4)),
        (QWEN, "EAGLE3", {}, (3, 1, 4)),
        (LLAMA, "STANDALONE", {}, (3, 1, 4)),
        (QWEN, "STANDALONE", {"steps": 5}, (5, 1, 6)),
        (QWEN, "EAGLE", {"steps": 3, "topk": 4, "tokens": 16}, (3, 4, 16)),
    ],
)
def test_an_omitted_tree_is_a_chain_of_three(
    tmp_path: Path, target: dict[str, Any], algorithm: str, given: dict[str, int], chosen: tuple[int, int, int]
) -> None:
    names = {
        "steps": "speculative_num_steps",
        "topk": "speculative_eagle_topk",
        "tokens": "speculative_num_draft_tokens",
    }
    keywords = {names[name]: value for name, value in given.items()}
    found = settings(tmp_path, target, {"vocab_size": 100}, speculative_algorithm=algorithm, **keywords)
    assert found.algorithm == algorithm
    assert (found.num_steps, found.topk, found.num_draft_tokens) == chosen
    assert found.draft_model_path == str(tmp_path / "draft")


@pytest.mark.parametrize(("depth", "given", "tokens"), [(18, None, 12), (8, None, 8), (18, 20, 20)])
@pytest.mark.parametrize(
    "breadth",
    [
        {"speculative_ngram_max_bfs_breadth": 3, "speculative_ngram_min_bfs_breadth": 2},
        {"speculative_ngram_max_bfs_breadth": 3, "speculative_ngram_match_type": "PROB"},
    ],
    ids=["BFS", "PROB"],
)
def test_ngram_verifies_as_many_as_it_stores_but_twelve(
    tmp_path: Path, depth: int, given: int | None, tokens: int, breadth: dict[str, Any]
) -> None:
    found = settings(
        tmp_path,
        QWEN,
        None,
        speculative_algorithm="NGRAM",
        speculative_ngram_max_trie_depth=depth,
        speculative_num_draft_tokens=given,
        **breadth,
        speculative_ngram_min_match_window_size=4,
        speculative_ngram_max_match_window_size=5,
        speculative_ngram_capacity=5000,
    )
    assert found.num_draft_tokens == tokens
    ngram = found.ngram
    match = breadth.get("speculative_ngram_match_type", "BFS")
    least = breadth.get("speculative_ngram_min_bfs_breadth", 1)
    assert (ngram.min_breadth, ngram.max_breadth, ngram.match_type, ngram.max_depth) == (least, 3, match, depth)
    assert (ngram.min_window, ngram.max_window, ngram.capacity) == (4, 5, 5000)


def test_dflash_takes_the_block_of_its_draft(tmp_path: Path) -> None:
    for draft, given, block in (
        ({"block_size": 8}, None, 8),
        ({}, None, 16),
        ({"block_size": 8}, 4, 4),
    ):
        found = settings(tmp_path, QWEN, draft, speculative_algorithm="DFLASH", speculative_dflash_block_size=given)
        assert (found.num_draft_tokens, found.block_size, found.topk) == (block, block, 1)
    with pytest.raises(ArgumentError, match="at least the block size, 8"):
        settings(
            tmp_path,
            QWEN,
            {"block_size": 8},
            speculative_algorithm="DFLASH",
            speculative_dflash_draft_window_size=6,
        )
    with pytest.raises(ArgumentError, match="2 to 64"):
        settings(tmp_path, QWEN, {"block_size": 900}, speculative_algorithm="DFLASH")


def test_eagle_finds_multi_token_heads(tmp_path: Path) -> None:
    heads = {"num_nextn_predict_layers": 2}
    assert settings(tmp_path, QWEN | heads, None, speculative_algorithm="NEXTN").algorithm == "MTP"
    assert settings(tmp_path, QWEN | heads, None, speculative_algorithm="MTP").draft_model_path == ""
    assert settings(tmp_path, QWEN, heads, speculative_algorithm="EAGLE").algorithm == "MTP"
    multi = {"enable_multi_layer_eagle": True, "speculative_algorithm": "MTP"}
    found = settings(tmp_path, QWEN | heads, None, **multi)
    assert (found.multi_layer, found.num_steps, found.num_draft_tokens) == (True, 2, 3)
    assert settings(tmp_path, QWEN | heads, None, speculative_num_steps=1, **multi).num_steps == 1
    for family, count in (("mimo_v2_flash", 3), ("longcat_flash", 1), ("qwen3_next", 1)):
        unnamed = QWEN | {"model_type": family}
        assert settings(tmp_path, unnamed, None, speculative_algorithm="NEXTN").algorithm == "MTP"
        if count > 1:
            assert settings(tmp_path, unnamed, None, **multi).num_steps == count
    with pytest.raises(ArgumentError, match="2 heads"):
        settings(tmp_path, QWEN | heads, None, speculative_num_steps=3, **multi)
    with pytest.raises(ArgumentError, match="several multi-token heads"):
        settings(tmp_path, QWEN, {"num_nextn_predict_layers": 1}, **multi)


@pytest.mark.parametrize(
    ("algorithm", "draft", "rule"),
    [
        ("EAGLE", None, "num_nextn_predict_layers"),
        ("EAGLE3", None, "needs --speculative-draft-model-path"),
        ("DFLASH", None, "needs --speculative-draft-model-path"),
        ("STANDALONE", None, "or use NGRAM"),
        ("EAGLE", {"draft_vocab_size": 50}, "draft for EAGLE3, not for EAGLE"),
        ("EAGLE3", {"dflash_config": {}}, "draft for DFLASH, not for EAGLE3"),
        ("STANDALONE", {"vocab_size": 99}, "99 tokens and the model 100"),
    ],
)
def test_a_draft_that_does_not_fit_is_refused(
    tmp_path: Path, algorithm: str, draft: dict[str, Any] | None, rule: str
) -> None:
    with pytest.raises(ArgumentError, match=rule):
        settings(tmp_path, QWEN, draft, speculative_algorithm=algorithm)


def test_a_draft_that_is_not_there_names_its_argument(tmp_path: Path) -> None:
    with pytest.raises(ModelPathError, match="--speculative-draft-model-path /nowhere"):
        settings(tmp_path, QWEN, None, speculative_algorithm="EAGLE", speculative_draft_model_path="/nowhere")


def test_files_are_found_and_read(tmp_path: Path) -> None:
    tokens, adaptive = tmp_path / "map.json", tmp_path / "adaptive.json"
    tokens.write_text("[1, 2]")
    adaptive.write_text('{"ema_alpha": 0.5}')
    given = {"speculative_algorithm": "EAGLE", "speculative_token_map": str(tokens), "speculative_adaptive": True}
    found = settings(tmp_path, QWEN, QWEN, speculative_adaptive_config=str(adaptive), **given)
    assert found.token_map == str(tokens)
    assert found.adaptive.enabled
    assert json.loads(found.adaptive.config) == {"ema_alpha": 0.5}
    adaptive.write_text("[]")
    with pytest.raises(ArgumentError, match="is not a JSON object"):
        settings(tmp_path, QWEN, QWEN, speculative_adaptive_config=str(adaptive), **given)
    with pytest.raises(ModelPathError, match="--speculative-token-map /nowhere is not a local file"):
        settings(tmp_path, QWEN, QWEN, **(given | {"speculative_token_map": "/nowhere"}))


def test_a_token_map_of_the_hub_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    downloads: list[tuple[str, str, str | None]] = []

    def download(repository: str, name: str, *, cache_dir: str | None) -> str:
        downloads.append((repository, name, cache_dir))
        return str(tmp_path / "freq.pt")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    given = {"speculative_token_map": "owner/model/folder/freq.pt", "download_dir": "/models"}
    found = settings(tmp_path, QWEN, QWEN, speculative_algorithm="EAGLE", **given)
    assert found.token_map == str(tmp_path / "freq.pt")
    assert downloads == [("owner/model", "folder/freq.pt", "/models")]


def test_a_revision_of_a_draft_that_is_here_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelPathError, match="--speculative-draft-model-revision is for hub repositories"):
        settings(tmp_path, QWEN, QWEN, speculative_algorithm="EAGLE", speculative_draft_model_revision="main")


@pytest.mark.parametrize(
    ("keyword", "value", "field", "expected"),
    [
        ("speculative_accept_threshold_single", 0.5, "accept_threshold_single", 0.5),
        ("speculative_accept_threshold_acc", 0.25, "accept_threshold_acc", 0.25),
        ("eagle3_layers_to_capture", "1 2", "capture_layers", (1, 2)),
        ("speculative_draft_load_format", "dummy", "load_format", "dummy"),
        ("speculative_attention_mode", "decode", "attention_mode", "decode"),
        ("speculative_draft_attention_backend", "torch_native", "draft_attention_backend", "torch_native"),
        ("speculative_enforce_eager", True, "disable_graphs", True),
    ],
)
def test_the_rest_reaches_the_worker(tmp_path: Path, keyword: str, value: object, field: str, expected: object) -> None:
    found = settings(tmp_path, QWEN, QWEN, speculative_algorithm="EAGLE3", **{keyword: value})
    assert getattr(found, field) == expected
