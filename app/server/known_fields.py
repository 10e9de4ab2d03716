"""Known fields of other APIs, as data: refused with a remedy, or accepted without effect."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

__all__ = ["KNOWN", "LABELS", "NO_EFFECT", "Known", "is_empty"]


def _is_nothing(value: object) -> bool:
    """Null, false, and empty values; zero is a value."""
    return value is None or value is False or (isinstance(value, (str, list, dict)) and not value)


def is_empty(value: object) -> bool:
    """Whether a value means "omitted"; for a batch, whether all its values do."""
    return _is_nothing(value) or (isinstance(value, list) and all(map(_is_nothing, value)))


def _is_left_out(value: object) -> bool:
    """Empty values except the empty object, which is a request here, such as a schema of any JSON."""
    return _is_nothing(value) and value != {}


def _is_null(value: object) -> bool:
    """Omitted values except False, which is a request here."""
    return value is None


def _is_off(value: object) -> bool:
    return value is None or value is False


def _is_text_only(value: object) -> bool:
    return is_empty(value) or value == ["text"]


class Known(msgspec.Struct, frozen=True):
    """A field that is refused unless its value is neutral.

    ``use``: our field with the same meaning, by its name in the engine. ``reason``: the remedy, if there is none.
    ``neutral``: whether a value means "omitted".
    """

    reason: str = ""
    use: str = ""
    neutral: Callable[[object], bool] = is_empty


def _refused(reason: str, *neutral: object) -> Known:
    """``neutral``: values without effect, in addition to empty ones."""
    return Known(reason=reason, neutral=lambda value: is_empty(value) or value in neutral)


def _refused_unless(neutral: Callable[[object], bool], reason: str) -> Known:
    return Known(reason=reason, neutral=neutral)


def _use(*names: str, field: str) -> dict[str, Known]:
    return {name: Known(use=field, neutral=_is_off) for name in names}


def _each(reason: str, *names: str, neutral: tuple[object, ...] = ()) -> dict[str, Known]:
    return {name: _refused(reason, *neutral) for name in names}


_LATER = "is not available in this version; leave it out"
_FORM = "use response_format, e.g. {'type': 'json_schema', 'json_schema': {'schema': {...}}}"
_CODE = "code from requests is never run; leave it out"
_ROLE = "put it into the conversation, as a message"
_THINKING = "use chat_template_kwargs, e.g. {'enable_thinking': false}"
_CHATS = "limits the thoughts of a chat; use /v1/chat/completions"
_SAMPLER = "this sampler is not available; use temperature, top_p, top_k or min_p"
_BEAMS = "beam search is not available; leave it out"
_NATIVE_ONLY = "belongs to another API; its fields go into the body itself, under the names of GET /openapi.json"

KNOWN: dict[str, Known] = {
    # the same thing under another name
    **_use(
        "max_new_tokens",
        "max_output_tokens",
        "max_completion_tokens",
        "max_tokens_to_sample",
        "max_gen_len",
        "max_generated_tokens",
        "num_predict",
        "n_predict",
        "max_length",
        field="max_tokens",
    ),
    **_use("min_new_tokens", "min_length", field="min_tokens"),
    **_use("stop_sequences", "stop_words", "stop_strings", "stopping_strings", "stop_sequence", field="stop"),
    **_use("stop_ids", "stop_tokens", field="stop_token_ids"),
    **_use("repeat_penalty", "rep_pen", "penalty_repeat", field="repetition_penalty"),
    **_use("penalty_freq", field="frequency_penalty"),
    **_use("penalty_present", field="presence_penalty"),
    **_use("bad_words_list", "banned_strings", "banned_words", field="bad_words"),
    **_use("random_seed", "sampling_seed", "rng_seed", field="seed"),
    **_use("num_return_sequences", "num_completions", "candidate_count", field="n"),
    **_use("n_probs", "top_n_tokens", "top_logprobs", "top_logprobs_num", field="logprobs"),
    **_use("ban_eos_token", field="ignore_eos"),
    **_use("request_id", field="rid"),
    **_use("inputs", "input", "input_text", "query", field="prompt"),
    **_use("cache_key", field="cache_salt"),
    # constrained output
    **{name: _refused_unless(_is_left_out, _FORM) for name in ("format", "output_format", "output_config")},
    **_each(_FORM, "response_schema", "json_object", "grammar_string"),
    **_each("the grammar applies from the first token; leave it out", "grammar_lazy", "grammar_triggers"),
    "guided_decoding_backend": _refused("start the server with --grammar-backend", "auto"),
    # search
    "best_of": _refused("only 1 is available; use n for several choices", 1),
    "length_penalty": _refused(_BEAMS, 1),
    **_each(_BEAMS, "use_beam_search", "early_stopping"),
    **_each(_BEAMS, "beam_width", "num_beams", "num_beam_groups", neutral=(1,)),
    "diversity_penalty": _refused(_BEAMS, 0),
    # other samplers
    "do_sample": _refused_unless(lambda value: value in (None, True), "use temperature 0 for greedy answers"),
    **_each(_SAMPLER, "typical_p", "typical", "tfs", "tfs_z", neutral=(1,)),
    **_each(
        _SAMPLER,
        "mirostat",
        "mirostat_mode",
        "top_a",
        "epsilon_cutoff",
        "eta_cutoff",
        "xtc_probability",
        "dynatemp_range",
        "dry_multiplier",
        "smoothing_factor",
        "penalty_alpha",
        "no_repeat_ngram_size",
        neutral=(0,),
    ),
    "top_n_sigma": _refused(_SAMPLER, 0, -1),
    **_each(_SAMPLER, "samplers", "sampler_order", "sampler_priority", "sampler_seq"),
    "repeat_last_n": _refused("repetition_penalty sees the whole context; leave it out", -1),
    "penalty_last_n": _refused("repetition_penalty sees the whole context; leave it out", -1),
    "repetition_penalty_range": _refused("repetition_penalty sees the whole context; leave it out", 0, -1),
    "encoder_repetition_penalty": _refused(_SAMPLER, 1),
    "temperature_last": _refused(_SAMPLER),
    "penalize_nl": _refused("use logit_bias"),
    # adapters and code
    **_each(_CODE, "custom_logit_processor", "logits_processors", "logits_processor", "custom_params"),
    **_each("name the adapter as model", "lora", "lora_path", "lora_request", "adapter_id"),
    **_each(_LATER, "vllm_xargs", "watermark"),
    "chat_template": _refused("no chat template is applied here; use /v1/chat/completions"),
    # conversations in other forms
    **_each(_ROLE, "system", "system_prompt", "instructions", "developer", "documents", "context"),
    "functions": _refused("it is deprecated; use tools"),
    "function_call": _refused("it is deprecated; use tool_choice", "none", "auto"),
    "tool_config": _refused("use tool_choice"),
    **_each(
        "nothing is kept between requests; send the whole conversation",
        "previous_response_id",
        "conversation",
        "conversation_id",
    ),
    "max_tool_calls": _refused("use parallel_tool_calls false for one call at most"),
    "truncation": _refused("shorten the prompt, or start the server with --allow-auto-truncate", "disabled"),
    **_each(
        "shorten the prompt, or start the server with --allow-auto-truncate",
        "truncate",
        "truncate_prompt_tokens",
        "max_input_tokens",
        "truncation_length",
        "num_keep",
        "n_keep",
        "transforms",
        "context_management",
        neutral=(0, -1),
    ),
    "num_ctx": _refused("the context is the server's; start it with --context-length"),
    "options": _refused(_NATIVE_ONLY),
    "parameters": _refused(_NATIVE_ONLY),
    "generation_config": _refused(_NATIVE_ONLY),
    "raw": _refused("use /v1/completions, which applies no chat template"),
    "template": _refused("start the server with --chat-template"),
    "container": _refused("this server runs no code; leave it out"),
    "mcp_servers": _refused("this server calls no tools itself; leave it out"),
    "web_search_options": _refused_unless(_is_left_out, "this server does not search the web; leave it out"),
    "plugins": _refused("this server has no plugins; leave it out"),
    "moderation": _refused("this server moderates nothing; leave it out"),
    "access_programs": _refused("this server has no such programs; leave it out"),
    "background_options": _refused("responses in the background run as soon as they can; leave it out"),
    # other inputs and outputs
    "modalities": _refused_unless(_is_text_only, "only ['text'] is available"),
    "audio": _refused("only text can be produced; leave it out"),
    "prompt_embeds": _refused("send the prompt as text or token ids"),
    "input_embeds": _refused("send the prompt as text or input_ids"),
    "input_ids": _refused("send messages, or token ids to /v1/completions"),
    "image": _refused("images are not read in this version"),
    **dict.fromkeys(("width", "height", "steps"), _refused("only text can be produced; leave it out", 0)),
    "images": _refused("images are not read in this version"),
    "image_data": _refused("images are not read in this version"),
    "video_data": _refused("videos are not read in this version"),
    "audio_data": _refused("audio is not read in this version"),
    # stopping
    "stop_regex": _refused("this API has no field for it; use /v1/completions or /v1/chat/completions"),
    "t_max_predict_ms": _refused("use max_tokens", 0, -1),
    "max_time": _refused("use max_tokens"),
    "return_full_text": _refused("use /v1/completions with echo"),
    "n_indent": _refused("use stop", 0),
    # reasoning
    **_each(_THINKING, "reasoning", "thinking", "require_reasoning", "reasoning_format", neutral=("none", "auto")),
    **{name: _refused_unless(_is_null, _THINKING) for name in ("think", "enable_thinking", "reasoning_budget")},
    "include_reasoning": _refused_unless(lambda value: value in (None, True), _THINKING),
    **_each(_CHATS, "thinking_token_budget", "thinking_budget", "max_thinking_tokens"),
    **_each("use /generate, /v1/completions or /v1/chat/completions", "return_hidden_states"),
    **_each("use /generate", "return_routed_experts", "routed_experts_start_len", neutral=(0,)),
    # not supported
    **_each(
        _LATER,
        "mm_hashes",
        "mm_processor_kwargs",
        "media_io_kwargs",
        "repetition_detection",
        "return_sampling_mask",
        "return_entropy",
        "logprob_token_ids",
        "token_ids_logprob",
        "return_bytes",
        "return_prompt_text",
        "return_token_offsets",
        "details",
        "decoder_input_details",
        "post_sampling_probs",
        "session_id",
        "background",
        "kv_transfer_params",
        "kv_hints",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
    ),
}
"""By the client's name. Names that a body declares are not looked up."""


LABELS = frozenset(
    {
        "user",
        "metadata",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "parallel_tool_calls",  # without tools
        "stream_options",  # usage is always reported
        "model",  # without a choice
        "cache_prompt",
        "custom_labels",
        "log_metrics",
        "no_logs",
        "routing_key",
        "return_meta_info",
        "extra_headers",
    }
)
"""Fields that no answer depends on: they are accepted silently."""

_LOADING = (
    *("num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "use_mmap", "use_mlock", "low_vram", "f16_kv"),
    *("vocab_only", "logits_all", "embedding_only", "penalize_newline", "mirostat_tau", "mirostat_eta"),
)
"""Options of Ollama that say how a model is loaded, or that belong to a sampler that is off."""

NO_EFFECT: dict[str, tuple[object, ...]] = {
    "capacity_of_str_len": (),
    "store": (),
    "service_tier": ("auto", "default"),
    "verbosity": ("medium",),
    "separate_reasoning": (),
    "stream_reasoning": (True,),
    "stream_interval": (1,),
    "return_weight_versions": (),
    "spaces_between_special_tokens": (True,),
    "task": (),
    "models": (),
    "provider": (),
    "route": (),
    "usage": (),
    "include": (),
    "keep_alive": (),
    "extra_body": (),
    "extra_query": (),
    "id_slot": (-1,),
    **dict.fromkeys(
        (
            "num_batch",
            "num_gpu",
            "main_gpu",
            "num_thread",
            "numa",
            "use_mmap",
            "use_mlock",
            "low_vram",
            "f16_kv",
            "vocab_only",
            "logits_all",
            "embedding_only",
            "penalize_newline",
            "mirostat_tau",
            "mirostat_eta",
        ),
        (),
    ),
    "inference_geo": (),
    "diagnostics": (),
    "user_profile_id": (),
    "workspace_id": (),
    "speed": ("standard",),
    "timings_per_token": (),
    "return_progress": (),
}
"""Accepted fields without effect, and their neutral values. Other values are reported in the header
x-ignored-fields."""
