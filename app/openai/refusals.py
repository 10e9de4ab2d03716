"""Fields that other engines know, that would change the answer and that are not built here: refused, not swallowed."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from app.errors import invalid

__all__ = ["REFUSED", "refuse"]


def _nothing(value: object) -> bool:
    """Null, false, and what is empty; a zero is something."""
    return value is None or value is False or (isinstance(value, (str, list, dict)) and not value)


def _empty(value: object) -> bool:
    """Whether a value means "as if left out"; for a batch, whether every one of its values does."""
    return _nothing(value) or (isinstance(value, list) and all(map(_nothing, value)))


def _left_out(value: object) -> bool:
    """What :func:`_nothing` is, but for the empty object: here it asks for something, as a schema of any JSON."""
    return _nothing(value) and value != {}


def _none_or(*neutral: object) -> Callable[[object], bool]:
    return lambda value: _empty(value) or value in neutral


def _text_format(value: object) -> bool:
    return _empty(value) or (isinstance(value, dict) and value.get("type") == "text")


def _text_only(value: object) -> bool:
    return _empty(value) or value == ["text"]


_LATER = "is not available in this version; leave it out"
_GRAMMAR = "asks for constrained output, which is not available in this version; leave it out"

_TABLE: dict[str, tuple[Callable[[object], bool], str]] = {
    # constrained output
    "response_format": (_text_format, "only {'type': 'text'} is available in this version"),
    "structured_outputs": (_left_out, _GRAMMAR),
    "structural_tag": (_empty, _GRAMMAR),
    "json_schema": (_left_out, _GRAMMAR),
    "regex": (_empty, _GRAMMAR),
    "ebnf": (_empty, _GRAMMAR),
    "guided_json": (_left_out, _GRAMMAR),
    "guided_regex": (_empty, _GRAMMAR),
    "guided_choice": (_empty, _GRAMMAR),
    "guided_grammar": (_empty, _GRAMMAR),
    # search
    "best_of": (_none_or(1), "only 1 is available; use n for several choices"),
    "use_beam_search": (_empty, _LATER),
    "beam_width": (_none_or(1), _LATER),
    "length_penalty": (_none_or(1, 1.0), "belongs to beam search, which is not available; leave it out"),
    # adapters and code
    "lora_path": (_empty, "adapters are not available in this version; leave it out"),
    "custom_logit_processor": (_empty, "code from requests is never run; leave it out"),
    "logits_processors": (_empty, "code from requests is never run; leave it out"),
    "custom_params": (_empty, "belongs to custom logit processors, which are never run; leave it out"),
    "vllm_xargs": (_empty, _LATER),
    "watermark": (_empty, _LATER),
    "chat_template": (_empty, "templates from requests are never run; start the server with --chat-template"),
    # other inputs
    "documents": (_empty, "put documents into the messages"),
    "functions": (_empty, "is deprecated; use tools"),
    "function_call": (_none_or("none", "auto"), "is deprecated; use tool_choice"),
    "modalities": (_text_only, "only ['text'] is available"),
    "audio": (_empty, "only text can be produced; leave it out"),
    "prediction": (_empty, _LATER),
    "web_search_options": (_left_out, "this server does not search the web; leave it out"),
    "prompt_embeds": (_empty, "send the prompt as text or token ids"),
    "input_embeds": (_empty, "send the prompt as text or input_ids"),
    "input_ids": (_empty, "send messages, or token ids to /v1/completions"),
    "image_data": (_empty, "images are not read in this version"),
    "video_data": (_empty, "videos are not read in this version"),
    "audio_data": (_empty, "audio is not read in this version"),
    "mm_hashes": (_empty, _LATER),
    "mm_processor_kwargs": (_empty, _LATER),
    "media_io_kwargs": (_empty, _LATER),
    # stopping and shaping
    "stop_regex": (_empty, "regular expressions of requests are not run; use stop"),
    "truncate_prompt_tokens": (_empty, "shorten the prompt, or start the server with --allow-auto-truncate"),
    "repetition_detection": (_empty, _LATER),
    "thinking_token_budget": (_empty, _LATER),
    "max_thinking_tokens": (_none_or(0), _LATER),
    "reasoning": (_empty, "use chat_template_kwargs, e.g. {'enable_thinking': false}"),
    "thinking": (_empty, "use chat_template_kwargs, e.g. {'enable_thinking': false}"),
    "require_reasoning": (_empty, _LATER),
    # other outputs
    "return_hidden_states": (_empty, _LATER),
    "return_routed_experts": (_empty, _LATER),
    "return_sampling_mask": (_empty, _LATER),
    "return_entropy": (_empty, _LATER),
    "logprob_token_ids": (_empty, _LATER),
    "token_ids_logprob": (_empty, _LATER),
    "return_bytes": (_empty, _LATER),
    "return_prompt_text": (_empty, _LATER),
    "return_token_offsets": (_empty, _LATER),
    # where it runs
    "session_id": (_empty, _LATER),
    "session_params": (_empty, _LATER),
    "background": (_empty, _LATER),
    "kv_transfer_params": (_empty, _LATER),
    "kv_hints": (_empty, _LATER),
    "bootstrap_host": (_empty, _LATER),
    "bootstrap_port": (_empty, _LATER),
    "bootstrap_room": (_empty, _LATER),
}

REFUSED = frozenset(_TABLE)


def refuse(name: str, raw: msgspec.Raw, prefix: str = "") -> None:
    """Raise 400 for the refused field ``name`` unless its value means "as if left out"."""
    neutral, reason = _TABLE[name]
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        value = raw  # the body's decoder skipped over it; whatever it is, it is not empty
    if neutral(value):
        return
    param = f"{prefix}{name}"
    raise invalid(f"{param}: {reason}.", param=param, code="unsupported_parameter")
