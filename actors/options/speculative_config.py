"""``--speculative-config``: one JSON object for several arguments, with the keys of vLLM's and TokenSpeed's recipes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from actors.options.errors import ArgumentError
from actors.options.table import SPECULATIVE_ARGUMENTS

__all__ = ["split_config"]

_KEYS = {
    "method": "speculative-algorithm",
    "model": "speculative-draft-model-path",
    "revision": "speculative-draft-model-revision",
    "quantization": "speculative-draft-model-quantization",
    "attention_backend": "speculative-draft-attention-backend",
    "moe_backend": "speculative-moe-runner-backend",
    "prompt_lookup_min": "speculative-ngram-min-match-window-size",
    "prompt_lookup_max": "speculative-ngram-max-match-window-size",
}
_REFUSED = {
    "draft_tensor_parallel_size": "a draft runs on the devices of the model; leave it out",
    "max_model_len": "a draft reads as much as the model; leave it out, or give --max-model-len for both",
    "disable_padded_drafter_batch": "the engine chooses how drafts are batched; leave it out",
    "rejection_sample_method": "draft tokens are accepted as --speculative-accept-threshold-single says; leave it out",
    "draft_sample_method": "the engine chooses how draft tokens are chosen; leave it out",
}
_NAMES = {name for argument in SPECULATIVE_ARGUMENTS for name in (argument.name, *argument.aliases)}
_METHODS = next(a for a in SPECULATIVE_ARGUMENTS if a.name == "speculative-algorithm").synonyms


def split_config(config: Mapping[str, Any]) -> Iterator[tuple[str, str, object]]:
    """The key, the argument's name and its value, for each entry of the object.

    ``num_speculative_tokens`` counts draft tokens: steps of a draft model, or the verified tokens minus the known one.
    Raises ArgumentError for an unknown key.
    """
    for key, value in config.items():
        if value is None:
            continue
        if key == "num_speculative_tokens":
            yield key, *_draft_tokens(config, value)
        else:
            yield key, _name(key), value


def _draft_tokens(config: Mapping[str, Any], value: object) -> tuple[str, object]:
    method = str(config.get("method", config.get("algorithm", ""))).lower()
    if _METHODS.get(method) not in ("NGRAM", "DFLASH"):
        return "speculative-num-steps", value
    if not isinstance(value, int) or isinstance(value, bool):
        raise ArgumentError(f"num_speculative_tokens must be an integer, not {str(value)[:64]!r}")
    return "speculative-num-draft-tokens", value + 1


def _name(key: str) -> str:
    if key in _KEYS:
        return _KEYS[key]
    if key in _REFUSED:
        raise ArgumentError(f"{key}: {_REFUSED[key]}")
    dashed = key.replace("_", "-")
    for name in (dashed, f"speculative-{dashed}"):
        if name in _NAMES and name != "speculative-config":
            return name
    raise ArgumentError(
        f"there is no key {key[:64]!r}; known are method, model, num_speculative_tokens, revision, prompt_lookup_min, "
        "prompt_lookup_max and this group's arguments, such as eagle_topk (troupe serve --help)"
    )
