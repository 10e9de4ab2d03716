"""What a request may ask of this server: checks before its prompt is encoded, and its measures afterwards."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from actors.options import Arguments
from actors.protocol.requests import LIMITS, Chat, InvalidRequest, SamplingParams
from actors.text.encoding import Encoding, characters
from actors.text.served_model import ServedModel

__all__ = ["Prompt", "RequestOptions", "RequestRules", "permit_tokens"]

Prompt = str | Sequence[int] | Chat

_MAX_TIMEOUT_SECONDS = 86400.0

_MAX_TOKENS = 2**31

_CHOICES_PER_CONTEXT = 16
"""One request's choices together may ask for this many contexts of tokens."""


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a request brings beside its prompt and its sampling.

    ``label``: the client's id of it. ``priority``: higher first, where priorities are on. ``timeout``: seconds for the
    whole request. ``cache_salt``: keeps its cached prefixes apart. ``tenant``: tenants get equal shares. ``truncate``:
    of an input that is embedded or classified, see ``ServedModel.truncation_limit``. ``replica``: the number of the one
    that runs it, None for the router's choice; where its workers die, others take over. ``adapter``: the name of a LoRA
    adapter.
    """

    label: str | None = None
    priority: int = 0
    timeout: float | None = None
    cache_salt: str | None = None
    tenant: str = ""
    truncate: int | None = None
    adapter: str | None = None
    replica: int | None = None


class RequestRules:
    """The limits of a server and its model for one request. Refusals are InvalidRequest."""

    def __init__(self, arguments: Arguments, model: ServedModel, encoding: Encoding) -> None:
        self._arguments = arguments
        self._model = model
        self._encoding = encoding

    def check(self, prompt: Prompt, params: SamplingParams, options: RequestOptions, *, cuts: bool) -> None:
        """Check what needs no tokenizer. ``cuts``: a prompt that is too long is cut. Raises InvalidRequest."""
        model = self._model
        if isinstance(prompt, (str, Chat)):
            if not cuts:
                self._encoding.check_characters(characters(prompt))
        else:
            if not len(prompt):
                raise InvalidRequest("prompt holds no token. Send at least one.", param="prompt")
            if len(prompt) > model.context_length and not (cuts or self._arguments.allow_auto_truncate):
                raise model.too_long(len(prompt), None)
            model.check_ids(prompt)
        if (params.stop or params.stop_regex) and model.codec is None:
            field = "stop" if params.stop else "stop_regex"
            raise InvalidRequest(f"{field} needs a tokenizer: use stop_token_ids.", param=field)
        if params.grammar is not None:
            self._check_grammar()
        if params.prediction:
            self._check_prediction(params.prediction)
        self._check_returned(params)
        if params.n > 1 and params.n * (params.max_tokens or 1) > _CHOICES_PER_CONTEXT * model.context_length:
            limit = _CHOICES_PER_CONTEXT * model.context_length
            raise InvalidRequest(
                f"n {params.n} times max_tokens {params.max_tokens} is more than {limit} tokens. Lower one of them.",
                param="n",
            )
        if options.label is not None and len(options.label) > LIMITS.request_id_chars:
            raise InvalidRequest(f"rid is longer than {LIMITS.request_id_chars} characters. Shorten it.", param="rid")
        if not -(2**31) <= options.priority < 2**31:
            raise InvalidRequest("priority must be a 32-bit integer.", param="priority")
        if options.priority and self._arguments.abort_on_priority_when_disabled:
            raise InvalidRequest(
                "priority is set, but the server runs without --enable-priority-scheduling. Leave it out.",
                param="priority",
            )
        if options.timeout is not None and not 0 < options.timeout <= _MAX_TIMEOUT_SECONDS:
            raise InvalidRequest(
                f"timeout must be more than 0 and at most {_MAX_TIMEOUT_SECONDS:g} seconds.", param="timeout"
            )

    def _check_returned(self, params: SamplingParams) -> None:
        options = {
            "hidden_states": self._arguments.enable_return_hidden_states,
            "routed_experts": self._arguments.enable_return_routed_experts,
        }
        for field, enabled in options.items():
            if getattr(params, field) and not enabled:
                raise InvalidRequest(
                    f"{field}: this server returns none. Leave it out, or start the server with "
                    f"--enable-return-{field.replace('_', '-')}.",
                    param=field,
                    code="unsupported_parameter",
                )
        info = self._model.info
        if params.routed_experts and info is not None and not info.experts[1]:
            raise InvalidRequest(
                "routed_experts: this model has no layers of experts. Leave it out.",
                param="routed_experts",
                code="unsupported_parameter",
            )

    def _check_grammar(self) -> None:
        if self._arguments.grammar_backend == "none":
            reason = "the server runs with --grammar-backend none"
        elif self._model.codec is None:
            reason = "the server runs without a tokenizer (--skip-tokenizer-init)"
        elif not self._model.eos_ids:
            reason = "this model has no end-of-text token"
        else:
            return
        raise InvalidRequest(
            f"grammar: {reason}, so answers cannot be constrained. Leave it out.",
            param="grammar",
            code="unsupported_parameter",
        )

    def _check_prediction(self, prediction: str) -> None:
        if self._arguments.speculative_algorithm != "NGRAM":
            raise InvalidRequest(
                "prediction: this server drafts no tokens from texts. Leave it out, or start the server with "
                "--speculative-algorithm NGRAM.",
                param="prediction",
                code="unsupported_parameter",
            )
        try:
            self._encoding.check_characters(len(prediction))
        except InvalidRequest as error:
            raise InvalidRequest(f"prediction: {error}", param="prediction", code=error.code) from None

    def measure(self, ids: list[int], params: SamplingParams) -> tuple[list[int], int]:
        """The prompt and the output tokens it may have. Raises InvalidRequest for what does not fit the context."""
        if not ids:
            raise InvalidRequest("The prompt is empty: it has no tokens. Send some text.", param="prompt")
        context, max_tokens = self._model.max_prompt_tokens + 1, params.max_tokens  # a task's token takes no place
        default = params.default_max_tokens or context
        if self._arguments.allow_auto_truncate:
            if len(ids) >= context:
                ids = ids[: context - min(max_tokens or 1, context - 1)]
            room = context - len(ids)
            max_tokens = min(max_tokens, room) if max_tokens is not None else None
        else:
            room = context - len(ids)
            if room < 1 or (max_tokens is not None and max_tokens > room):
                raise self._model.too_long(len(ids), max_tokens)
        if max_tokens is None:
            limit = min(_max_scored_tokens(len(ids), params), self._max_returned_tokens(len(ids), params))
            max_tokens = min(default, room, limit)
        _check_logprobs(len(ids), max_tokens, params)
        self._check_numbers(len(ids), max_tokens, params)
        return ids, max_tokens

    def _returned(self, params: SamplingParams) -> list[tuple[str, int, int]]:
        """What a request returns of each token: the field, how many numbers that is, and how many an answer may
        have."""
        info = self._model.info
        if info is None:
            return []
        layers, chosen = info.experts
        result = [("hidden_states", info.hidden_size, LIMITS.state_numbers)] if params.hidden_states else []
        return (
            [*result, ("routed_experts", layers * chosen, LIMITS.expert_numbers)] if params.routed_experts else result
        )

    def _max_returned_tokens(self, prompt_tokens: int, params: SamplingParams) -> int:
        """The most output tokens of a choice whose numbers may all be answered; at least one."""
        limits = [limit // (params.n * max(size, 1)) - prompt_tokens for _, size, limit in self._returned(params)]
        return max(min(limits, default=_MAX_TOKENS), 1)

    def _check_numbers(self, prompt_tokens: int, max_tokens: int, params: SamplingParams) -> None:
        """Raise InvalidRequest for more hidden states or experts than one answer may have."""
        for field, size, limit in self._returned(params):
            numbers = params.n * (prompt_tokens + max_tokens) * size
            if numbers > limit:
                raise InvalidRequest(
                    f"{field}: {prompt_tokens} prompt tokens and up to {max_tokens} output tokens, times {params.n} "
                    f"choices of {size} numbers a token, are {numbers} numbers; at most {limit} are answered. Ask for "
                    "fewer tokens or choices.",
                    param=field,
                    code=f"too_many_{field}",
                )


def _logprob_entries(prompt_tokens: int, max_tokens: int, params: SamplingParams) -> int:
    """The log-probabilities that a request may be answered with, all choices and alternatives together."""
    entries = 0
    if params.prompt_logprobs is not None:
        entries += prompt_tokens * (1 + params.prompt_logprobs)
    if params.logprobs is not None:
        entries += max_tokens * (1 + params.logprobs)
    return params.n * entries


def _max_scored_tokens(prompt_tokens: int, params: SamplingParams) -> int:
    """The most output tokens of a choice whose log-probabilities may all be answered; at least one."""
    if params.logprobs is None:
        return _MAX_TOKENS
    left = LIMITS.logprob_entries - _logprob_entries(prompt_tokens, 0, params)
    return max(left // (params.n * (1 + params.logprobs)), 1)


def _check_logprobs(prompt_tokens: int, max_tokens: int, params: SamplingParams) -> None:
    """Raise InvalidRequest for more log-probabilities than one answer may have."""
    entries = _logprob_entries(prompt_tokens, max_tokens, params)
    if entries > LIMITS.logprob_entries:
        of_prompt = _logprob_entries(prompt_tokens, 0, params)
        field = "prompt_logprobs" if 2 * of_prompt > entries else "logprobs"
        raise InvalidRequest(
            f"{field}: {prompt_tokens} prompt tokens and up to {max_tokens} output tokens, times {params.n} choices "
            f"and their alternatives, are {entries} log-probabilities; at most {LIMITS.logprob_entries} are answered. "
            "Ask for fewer alternatives, tokens or choices.",
            param=field,
            code="too_many_logprobs",
        )


def permit_tokens(prompt_tokens: int, max_tokens: int, params: SamplingParams) -> int:
    """What a permit counts: the prompt for each choice, and log-probabilities, as many of which count as a token as a
    token may have alternatives."""
    entries = min(_logprob_entries(prompt_tokens, max_tokens, params), LIMITS.logprob_entries)
    return params.n * prompt_tokens + -(-entries // LIMITS.logprobs)
