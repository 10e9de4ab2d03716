"""The settings of speculation: arguments, completed from the files of model and draft."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from actors.options import ArgumentError, Arguments
from actors.options.speculative_rules import tree_size
from actors.text.model_files import ModelFiles, resolve_model_file, resolve_model_path
from kernels.contract.expert_settings import ExchangeSettings
from kernels.contract.speculation import AdaptiveSettings, NgramSettings, SpeculativeSettings, same_tokens

__all__ = ["speculation"]

_CHAIN = (3, 1, 4)
"""Steps, top-k and verified tokens where none are set: three draft tokens."""
_NGRAM_TOKENS = 12
_BLOCK = 16
_LARGEST_FILE = 16 << 20
_UNNAMED_HEADS = {"longcat_flash": 1, "mimo_v2_flash": 3, "qwen3_next": 1}
"""Multi-token heads in published checkpoints whose config.json does not name them, by its model_type."""


def speculation(arguments: Arguments, files: ModelFiles) -> SpeculativeSettings | None:
    """The settings of the worker's drafter; None without one. ``files``: those of the target model.

    Blocks: the draft may be downloaded. Raises ArgumentError with the broken rule, or ModelPathError.
    """
    a = arguments
    if a.speculative_algorithm is None:
        return None
    path, draft = _draft_files(a)
    algorithm = _algorithm(a.speculative_algorithm, draft, files)
    steps, topk, tokens = _tree(a, algorithm, files, draft or {})
    if algorithm == "STANDALONE" and draft is not None:
        size = draft.get("vocab_size")
        if type(size) is not int or not same_tokens(size, files.vocab_size):
            raise ArgumentError(
                f"speculative_draft_model_path: the draft has {size} tokens and the model {files.vocab_size}; a "
                "STANDALONE draft needs the model's own vocabulary, except for padding"
            )
    window = a.speculative_dflash_draft_window_size or 0
    if window and window < tokens:
        raise ArgumentError(
            f"speculative_dflash_draft_window_size {window} must be at least the block size, {tokens}; raise it"
        )
    return SpeculativeSettings(
        algorithm=algorithm,
        draft_model_path=path,
        num_steps=steps,
        topk=topk,
        num_draft_tokens=tokens,
        accept_threshold_single=a.speculative_accept_threshold_single,
        accept_threshold_acc=a.speculative_accept_threshold_acc,
        block_size=tokens if algorithm == "DFLASH" else 0,
        draft_window=window,
        token_map=_token_map(a),
        capture_layers=a.eagle3_layers_to_capture or (),
        multi_layer=a.enable_multi_layer_eagle,
        ngram=NgramSettings(
            min_breadth=a.speculative_ngram_min_bfs_breadth,
            max_breadth=a.speculative_ngram_max_bfs_breadth,
            match_type=a.speculative_ngram_match_type,
            max_depth=a.speculative_ngram_max_trie_depth,
            min_window=a.speculative_ngram_min_match_window_size,
            max_window=a.speculative_ngram_max_match_window_size,
            capacity=a.speculative_ngram_capacity,
        ),
        adaptive=AdaptiveSettings(a.speculative_adaptive, _adaptive_config(a)),
        load_format=a.speculative_draft_load_format or "",
        quantization=a.speculative_draft_model_quantization or "",
        attention_mode=a.speculative_attention_mode,
        draft_attention_backend=a.speculative_draft_attention_backend or "",
        disable_graphs=a.speculative_enforce_eager,
        exchange=None
        if a.speculative_moe_a2a_backend == "none" or a.exchange_mode is None
        else ExchangeSettings(mode=a.exchange_mode, overlap=a.enable_single_batch_overlap),
    )


def _draft_files(a: Arguments) -> tuple[str, Mapping[str, Any] | None]:
    """The draft's directory and config.json; empty and None without a separate draft."""
    if a.speculative_draft_model_path is None:
        return "", None
    result = resolve_model_path(
        a.speculative_draft_model_path,
        revision=a.speculative_draft_model_revision,
        download_dir=a.download_dir,
        argument="--speculative-draft-model-path",
    )
    return str(result), ModelFiles(result).config


def _algorithm(
    named: Literal["EAGLE", "EAGLE3", "MTP", "DFLASH", "STANDALONE", "NGRAM"],
    draft: Mapping[str, Any] | None,
    files: ModelFiles,
) -> Literal["EAGLE", "EAGLE3", "MTP", "DFLASH", "STANDALONE", "NGRAM"]:
    """The algorithm by the draft's layout: EAGLE also selects multi-token heads."""
    if named == "NGRAM":
        return named
    if draft is None:
        if named in ("EAGLE", "MTP") and _heads(files.config):
            return "MTP"
        where = " (its config.json has no num_nextn_predict_layers)" if named in ("EAGLE", "MTP") else ""
        raise ArgumentError(
            f"--speculative-algorithm {named} needs --speculative-draft-model-path: the model has no draft of its "
            f"own{where}; or use NGRAM, which needs none"
        )
    layout = _layout(draft)
    if named == "EAGLE" and layout == "MTP":
        return "MTP"
    if named == "STANDALONE" and layout == "MTP":
        return named  # a complete model may have such heads too
    if layout is not None and layout != named:
        raise ArgumentError(
            f"--speculative-draft-model-path holds a draft for {layout}, not for {named}; use --speculative-algorithm "
            f"{layout} or give another draft"
        )
    return named


def _layout(draft: Mapping[str, Any]) -> Literal["EAGLE3", "MTP", "DFLASH"] | None:
    """The algorithm that a draft's config.json names; None when it names none."""
    names = " ".join(str(name) for name in draft.get("architectures") or ()).lower()
    if "dflash_config" in draft or "dflash" in names:
        return "DFLASH"
    if _heads(draft) or "mtp" in names or "nextn" in names:
        return "MTP"
    if "eagle3" in names or "draft_vocab_size" in draft:
        return "EAGLE3"
    return None


def _heads(config: Mapping[str, Any]) -> int:
    """Multi-token heads in a checkpoint."""
    text = config.get("text_config")
    inner = text if isinstance(text, dict) else config
    for name in ("num_nextn_predict_layers", "mtp_num_hidden_layers"):
        value = config.get(name, inner.get(name))
        if isinstance(value, int):
            return max(value, 0)
    return _UNNAMED_HEADS.get(str(config.get("model_type")), 0)


def _tree(a: Arguments, algorithm: str, files: ModelFiles, draft: Mapping[str, Any]) -> tuple[int, int, int]:
    """Steps, top-k and verified tokens, including the last known one."""
    tokens = a.speculative_num_draft_tokens
    if algorithm == "NGRAM":
        max_tokens = tokens or min(a.speculative_ngram_max_trie_depth, _NGRAM_TOKENS)
        return max_tokens - 1, 1, max_tokens
    if algorithm == "DFLASH":
        block = a.speculative_dflash_block_size or tokens or draft.get("block_size") or _BLOCK
        if not isinstance(block, int) or not 2 <= block <= 64:
            raise ArgumentError(f"the draft's block_size must be from 2 to 64, not {block!r}; see its config.json")
        return block - 1, 1, block
    steps, topk = a.speculative_num_steps, a.speculative_eagle_topk or 1
    if steps is not None:
        chosen = steps, topk, tokens or steps + 1
    else:
        chosen = _CHAIN
    if a.enable_multi_layer_eagle:
        chosen = _layers(a, algorithm, draft or files.config, chosen)
    assert chosen[2] <= tree_size(chosen[0], chosen[1])
    return chosen


def _layers(
    a: Arguments, algorithm: str, heads: Mapping[str, Any], chosen: tuple[int, int, int]
) -> tuple[int, int, int]:
    """The same with a head for each step: as many steps as heads, or fewer if requested."""
    count = _heads(heads)
    if algorithm != "MTP" or count < 2:
        raise ArgumentError(
            "enable_multi_layer_eagle needs a checkpoint of several multi-token heads (num_nextn_predict_layers); "
            "leave it out to use one head for every step"
        )
    if a.speculative_num_steps is None:
        return count, 1, count + 1
    if a.speculative_num_steps > count:
        raise ArgumentError(
            f"speculative_num_steps {a.speculative_num_steps} is more than the checkpoint's {count} heads, of which "
            "enable_multi_layer_eagle takes one per step; lower it or leave the flag out"
        )
    return chosen


def _token_map(a: Arguments) -> str:
    name = a.speculative_token_map
    if name is None:
        return ""
    return str(resolve_model_file(name, download_dir=a.download_dir, argument="--speculative-token-map"))


def _file(name: str, path: str | None) -> str:
    """The absolute path of an existing file; empty for None."""
    if path is None:
        return ""
    file = Path(path).expanduser()
    if not file.is_file():
        raise ArgumentError(f"{name}: {path} is not a file; give the path of a JSON file")
    return str(file.resolve())


def _adaptive_config(a: Arguments) -> str:
    path = _file("speculative_adaptive_config", a.speculative_adaptive_config)
    if not path:
        return "{}"
    data = Path(path).read_bytes()[:_LARGEST_FILE]
    try:
        return msgspec.json.encode(msgspec.json.decode(data, type=dict[str, Any])).decode()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ArgumentError(f"speculative_adaptive_config: {path} is not a JSON object: {error}") from None
