"""Rules of sampling parameters: validation, defaults, and conversion to a slot's sampling. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard, get_args

import msgspec

from actors.protocol.requests import LIMITS, InvalidRequest, Limits, SamplingParams
from actors.text.stop_patterns import PatternError, StopPattern
from kernels.contract.grammar import Grammar, GrammarKind
from kernels.contract.step import SlotSampling

__all__ = ["resolve", "slot_sampling", "validate"]

_INT32_MAX = 2**31 - 1
_BIAS = 100.0
_REPETITION = (0.01, 100.0)  # beyond these a logit overflows or every other token is as good as banned

_NEUTRAL: dict[str, float | int] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}

_CHOICE_STEP = 0xD1342543DE82EF95  # odd, so that choices of one seed never meet; far from the seeds people pick


def validate(params: SamplingParams, *, vocab_size: int | None = None, limits: Limits = LIMITS) -> None:
    """Raise :class:`InvalidRequest` for the first field that is out of bounds: its name, its limit, the remedy.

    Types are checked too: an embedding program may build a :class:`SamplingParams` of anything. Without ``vocab_size``
    token ids are only checked to be 32-bit and not negative.
    """
    _check_lengths(params)
    _check_numbers(params, limits)
    _check_integer("n", params.n, 1, limits.n, "Send several requests for more choices.")
    if params.seed is not None:
        _check_integer(
            "seed", params.seed, -(2**63), 2**64 - 1, "Seeds are 64-bit integers; leave it out for a random one."
        )
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None:
            _check_integer(name, getattr(params, name), 0, limits.logprobs, "Leave it out for none.")
    if params.speculative_num_draft_tokens is not None:
        _check_integer(
            "speculative_num_draft_tokens",
            params.speculative_num_draft_tokens,
            1,
            limits.draft_tokens,
            "1 decodes token by token; leave it out for the server's number.",
        )
    for name in (
        "include_stop_str_in_output",
        "ignore_eos",
        "skip_special_tokens",
        "speculative",
        "hidden_states",
        "routed_experts",
    ):
        if not isinstance(getattr(params, name), bool):
            raise _invalid(name, f"{name} must be true or false.")
    if not isinstance(params.prediction, str):
        raise _invalid("prediction", "prediction must be a text.")
    _check_strings("stop", params.stop, limits.stop_strings, limits.stop_string_chars)
    _check_patterns(params.stop_regex, limits)
    shown = params.shown_special_tokens
    _check_strings("shown_special_tokens", shown, limits.shown_special_tokens, limits.stop_string_chars)
    _check_strings("bad_words", params.bad_words, limits.bad_words, limits.stop_string_chars)
    _check_ids("stop_token_ids", params.stop_token_ids, limits.stop_token_ids, vocab_size)
    if params.allowed_token_ids is not None:
        _check_ids("allowed_token_ids", params.allowed_token_ids, limits.allowed_token_ids, vocab_size)
        if not params.allowed_token_ids:
            raise _invalid("allowed_token_ids", "allowed_token_ids is empty: nothing could be sampled. Leave it out.")
    if params.grammar is not None:
        _check_grammar(params.grammar, limits)
    if params.thought is not None:
        _check_strings("thought", (params.thought.begin, params.thought.end), 2, limits.stop_string_chars)
    if params.thought_budget is not None:
        budget = params.thought_budget
        _check_integer("thought_budget", budget.tokens, 0, _INT32_MAX, "It counts tokens; leave it out for no limit.")
        _check_ids("thought_budget", (budget.end, max(0, budget.begin)), 2, vocab_size)
    if params.logit_bias is not None:
        _check_bias(params.logit_bias, limits, vocab_size)


def resolve(params: SamplingParams, defaults: Mapping[str, Any]) -> SamplingParams:
    """Fill what the caller left out: from the model's generation_config.json, else with the neutral value.

    ``defaults`` is that file's object. ``do_sample: false`` in it is temperature 0. A default that
    no request could carry is passed over.
    """
    filled: dict[str, Any] = {}
    for name, neutral in _NEUTRAL.items():
        if getattr(params, name) is not None:
            continue
        filled[name] = neutral
        if name == "temperature" and defaults.get("do_sample") is False:
            filled[name] = 0.0
        elif defaults.get(name) is not None and _usable(name, defaults[name]):
            filled[name] = defaults[name]
    return msgspec.structs.replace(params, **filled) if filled else params


def slot_sampling(
    params: SamplingParams,
    *,
    index: int,
    seed: int,
    stop_ids: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
    grammar_start: tuple[tuple[int, ...], int] = ((), -1),
    prediction: bytes = b"",
    limits: Limits = LIMITS,
) -> SlotSampling:
    """What a worker's slot needs of validated and resolved ``params``, for the choice number ``index``.

    seed: the request's, given or drawn. The first choice samples with the seed itself, exactly as a request with
    ``n=1`` does; choice ``i`` with ``seed + i * step`` modulo 2**64 for a fixed odd step, so the choices of a request
    differ and each can be repeated. stop_ids: end-of-sequence and stop tokens, held back by min_tokens. bad_words:
    their token sequences. grammar_start: SlotSampling's reasoning_end_ids and reasoning_start_id. prediction: its
    tokens, int32. Raises :class:`InvalidRequest` when the bad words have too many tokens.
    """
    total = sum(len(word) for word in bad_words)
    if total > limits.bad_words_tokens:
        raise _invalid(
            "bad_words",
            f"bad_words have {total} tokens in all their spellings; at most {limits.bad_words_tokens} are allowed. "
            "Send fewer or shorter ones.",
        )
    bias = params.logit_bias or {}
    return SlotSampling(
        temperature=_value(params.temperature, "temperature"),
        top_p=_value(params.top_p, "top_p"),
        top_k=max(0, params.top_k or 0),
        min_p=_value(params.min_p, "min_p"),
        repetition_penalty=_value(params.repetition_penalty, "repetition_penalty"),
        frequency_penalty=_value(params.frequency_penalty, "frequency_penalty"),
        presence_penalty=_value(params.presence_penalty, "presence_penalty"),
        seed=(seed + index * _CHOICE_STEP) % 2**64,
        min_tokens=params.min_tokens,
        stop_ids=tuple(stop_ids) if params.min_tokens > 0 else (),
        bias_ids=tuple(bias),
        bias_values=tuple(float(value) for value in bias.values()),
        allowed_ids=tuple(params.allowed_token_ids or ()),
        bad_words=tuple(tuple(word) for word in bad_words),
        thought_budget=params.thought_budget,
        logprobs=_logprobs(params),
        prompt_logprobs=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
        hidden_states=params.hidden_states,
        routed_experts=params.routed_experts,
        max_drafts=_max_drafts(params),
        grammar=params.grammar,
        reasoning_end_ids=grammar_start[0],
        reasoning_start_id=grammar_start[1],
        prediction=prediction,
    )


def _logprobs(params: SamplingParams) -> int:
    """A slot that returns hidden states needs log-probabilities: without them a step may keep no states."""
    if params.logprobs is None:
        return 0 if params.hidden_states else -1
    return params.logprobs


def _max_drafts(params: SamplingParams) -> int:
    if not params.speculative or params.hidden_states or params.routed_experts:
        return 0
    return -1 if params.speculative_num_draft_tokens is None else params.speculative_num_draft_tokens - 1


def _value(given: float | None, name: str) -> float:
    return float(_NEUTRAL[name] if given is None else given)


def _invalid(param: str, message: str) -> InvalidRequest:
    return InvalidRequest(message, param=param)


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> TypeGuard[float]:
    """Finite, also as a float64: an integer may be too large for one."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _given(value: object) -> str:
    """What the caller gave, where it is a number of a reasonable length."""
    return f"; you gave {value}" if _is_number(value) and abs(value) < 1e20 else ""


def _check_integer(name: str, value: object, low: int, high: int, remedy: str) -> None:
    if not _is_integer(value) or not low <= value <= high:
        raise _invalid(name, f"{name} must be an integer from {low} to {high}{_given(value)}. {remedy}")


def _check_number(name: str, value: object, low: float, high: float, remedy: str, *, above: bool = False) -> None:
    if not _is_number(value) or not low <= value <= high or (above and value == low):
        bounds = f"more than {low:g} and at most {high:g}" if above else f"from {low:g} to {high:g}"
        raise _invalid(name, f"{name} must be a finite number {bounds}{_given(value)}. {remedy}")


def _check_lengths(params: SamplingParams) -> None:
    if params.max_tokens is not None:
        _check_integer("max_tokens", params.max_tokens, 1, _INT32_MAX, "Leave it out to use the context that is left.")
    if params.default_max_tokens is not None:
        _check_integer("default_max_tokens", params.default_max_tokens, 1, _INT32_MAX, "Leave it out for no default.")
    _check_integer("min_tokens", params.min_tokens, 0, _INT32_MAX, "Leave it out for none.")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise _invalid(
            "min_tokens",
            f"min_tokens ({params.min_tokens}) must be at most max_tokens ({params.max_tokens}). "
            "Lower min_tokens or raise max_tokens.",
        )
    if params.max_tokens is None and params.min_tokens > (params.default_max_tokens or _INT32_MAX):
        raise _invalid(
            "min_tokens",
            f"min_tokens ({params.min_tokens}) needs max_tokens beside it: without, at most "
            f"{params.default_max_tokens} tokens are generated. Lower min_tokens or send max_tokens.",
        )


def _check_numbers(params: SamplingParams, limits: Limits) -> None:
    for name in _NEUTRAL:
        value = getattr(params, name)
        if value is not None:
            _check_field(name, value, limits)


def _check_field(name: str, value: object, limits: Limits) -> None:
    """One of the fields that a generation_config may fill."""
    if name == "temperature":
        _check_number(name, value, 0.0, limits.temperature, "0 is greedy, 1 samples from the model's distribution.")
    elif name == "top_p":
        _check_number(name, value, 0.0, 1.0, "1 keeps every token; for greedy choice set temperature to 0.", above=True)
    elif name == "top_k":
        _check_integer(name, value, -1, _INT32_MAX, "0 or -1 keeps every token.")
    elif name == "min_p":
        _check_number(name, value, 0.0, 1.0, "0 keeps every token.")
    elif name == "repetition_penalty":
        _check_number(name, value, *_REPETITION, "1 is none.")
    else:
        _check_number(name, value, -limits.penalty, limits.penalty, "0 is none.")


def _usable(name: str, value: object) -> bool:
    try:
        _check_field(name, value, LIMITS)
    except InvalidRequest:
        return False
    return True


def _check_strings(name: str, strings: object, max_entries: int, max_length: int) -> Sequence[str]:
    if not isinstance(strings, (tuple, list)) or not all(isinstance(text, str) for text in strings):
        raise _invalid(name, f'{name} must be a list of strings, also when it is only one: ["..."].')
    if len(strings) > max_entries:
        raise _invalid(name, f"{name} has {len(strings)} entries; at most {max_entries} are allowed. Send fewer.")
    for text in strings:
        if not text:
            raise _invalid(name, f"{name} holds an empty string. Leave it out.")
        if len(text) > max_length:
            raise _invalid(
                name, f"{name} holds a string of {len(text)} characters; at most {max_length} are allowed. Shorten it."
            )
        try:
            text.encode()
        except UnicodeEncodeError:
            raise _invalid(name, f"{name} holds half a surrogate pair, which no text contains. Send UTF-8.") from None
    return strings


def _check_patterns(patterns: object, limits: Limits) -> None:
    name = "stop_regex"
    for text in _check_strings(name, patterns, limits.stop_patterns, limits.stop_string_chars):
        try:
            StopPattern(text)
        except PatternError as error:
            raise _invalid(name, f"{name}: {error}.") from None


def _check_ids(name: str, ids: object, max_entries: int, vocab_size: int | None) -> None:
    if not isinstance(ids, (tuple, list)) or not all(_is_integer(token) for token in ids):
        raise _invalid(name, f"{name} must be a list of integer token ids.")
    if len(ids) > max_entries:
        raise _invalid(name, f"{name} has {len(ids)} entries; at most {max_entries} are allowed. Send fewer.")
    for token in ids:
        _check_id(name, token, vocab_size)


def _check_id(name: str, token: int, vocab_size: int | None) -> None:
    last = _INT32_MAX if vocab_size is None else vocab_size - 1
    if not 0 <= token <= last:
        raise _invalid(name, f"{name} holds a token id out of range; this model's ids are 0 to {last}.")


def _check_bias(bias: object, limits: Limits, vocab_size: int | None) -> None:
    name = "logit_bias"
    if not isinstance(bias, dict) or not all(_is_integer(token) for token in bias):
        raise _invalid(name, f"{name} must map integer token ids to numbers.")
    if len(bias) > limits.logit_bias:
        raise _invalid(name, f"{name} has {len(bias)} entries; at most {limits.logit_bias} are allowed. Send fewer.")
    for token, value in bias.items():
        _check_id(name, token, vocab_size)
        if not _is_number(value) or not -_BIAS <= value <= _BIAS:
            raise _invalid(name, f"{name} of token {token} must be a finite number from {-_BIAS:g} to {_BIAS:g}.")


_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


def _check_grammar(grammar: Grammar, limits: Limits) -> None:
    """Size and depth, before any library reads it: these recurse."""
    name = "grammar"
    if not isinstance(grammar, Grammar) or grammar.kind not in get_args(GrammarKind):
        raise _invalid(name, f"{name} must be a Grammar of one of the kinds {', '.join(get_args(GrammarKind))}.")
    for text in (grammar.text, grammar.whitespace or ""):
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise _invalid(name, f"{name} holds half a surrogate pair, which no text contains. Send UTF-8.") from None
        if size > limits.grammar_bytes:
            raise _invalid(name, f"{name} has {size} bytes; at most {limits.grammar_bytes} are allowed. Shorten it.")
        # In JSON each string is a text of its own, which may be a regular expression.
        is_json = text is grammar.text and grammar.kind not in ("regex", "ebnf")
        parts = [_STRING.sub("", text), *_STRING.findall(text)] if is_json else [text]
        if max(map(_depth, parts)) > limits.grammar_depth:
            raise _invalid(
                name, f"{name} has brackets more than {limits.grammar_depth} deep. Divide it into rules, or flatten it."
            )
    if grammar.kind == "choice":
        _check_choices(grammar.text, limits)


def _check_choices(text: str, limits: Limits) -> None:
    name = "grammar"
    try:
        choices = msgspec.json.decode(text, type=list[str])
    except msgspec.DecodeError:
        raise _invalid(name, f"{name} of kind choice must be a JSON list of strings.") from None
    if not 0 < len(choices) <= limits.grammar_choices or "" in choices:
        raise _invalid(name, f"{name} must have 1 to {limits.grammar_choices} choices, none of them empty. Send fewer.")


def _depth(text: str) -> int:
    """How deep brackets of any kind may be nested in a text, at most, those that stand for themselves included."""
    depth = deepest = 0
    for sign in text:
        if sign in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif sign in ")]}":
            depth = max(0, depth - 1)
    return deepest
