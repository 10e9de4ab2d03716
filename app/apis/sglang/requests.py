"""Bodies of SGLang's native API."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from actors.protocol.requests import LIMITS, SamplingParams
from app.apis.grammars import NativeGrammarFields, grammar_of
from app.apis.openai.requests import (
    Alternatives,
    Choices,
    Count,
    DraftTokens,
    Label,
    Least,
    MinP,
    Patterns,
    Penalty,
    Repetition,
    Salt,
    Seed,
    Temperature,
    Text,
    TokenId,
    TokenIds,
    TopK,
    TopP,
    texts_of,
)
from app.apis.routing import Replica, replica_name
from app.apis.sessions import SessionParams
from app.server.errors import invalid

__all__ = ["NATIVE_SPELLING", "Batch", "GenerateRequest", "NativeSampling", "batch_of", "native_names"]

_NAMES = {
    "max_tokens": "sampling_params.max_new_tokens",
    "min_tokens": "sampling_params.min_new_tokens",
    "seed": "sampling_params.sampling_seed",
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "top_logprobs_num",
    "hidden_states": "return_hidden_states",
    "routed_experts": "return_routed_experts",
    **{
        name: f"sampling_params.{name}"
        for name in (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "repetition_penalty",
            "frequency_penalty",
            "presence_penalty",
            "logit_bias",
            "n",
            "stop",
            "stop_regex",
            "stop_token_ids",
            "speculative",
            "speculative_num_draft_tokens",
        )
    },
}

_NEW_TOKENS = 128
"""SGLang's default."""

_MANY = Meta(max_length=LIMITS.prompts)

AdapterName = Annotated[str, Meta(min_length=1, max_length=LIMITS.adapter_name_chars)]


class NativeSampling(NativeGrammarFields, kw_only=True):
    """SGLang's ``sampling_params``."""

    max_new_tokens: Count | None = None
    min_new_tokens: Least | None = None
    stop: Text | Annotated[list[Text], Meta(max_length=LIMITS.stop_strings)] | None = None
    stop_regex: Patterns | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=LIMITS.stop_token_ids)] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Repetition | None = None
    n: Choices | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    logit_bias: Annotated[dict[int, float], Meta(max_length=LIMITS.logit_bias)] | None = None
    sampling_seed: Seed | None = None
    speculative: bool | None = None
    speculative_num_draft_tokens: DraftTokens | None = None


class GenerateRequest(msgspec.Struct, kw_only=True):
    """``POST /generate``: one prompt, or a list of them. Other fields are one value for all, or a list as well."""

    text: Text | Annotated[list[Text], _MANY] | None = None
    input_ids: Annotated[list[TokenId | TokenIds], Meta(max_length=4_194_304)] | None = None
    sampling_params: NativeSampling | Annotated[list[NativeSampling], _MANY] | None = None
    rid: Label | Annotated[list[Label], _MANY] | None = None
    stream: bool | None = None
    return_logprob: bool | Annotated[list[bool], _MANY] | None = None
    logprob_start_len: int | Annotated[list[int], _MANY] | None = None
    top_logprobs_num: Alternatives | Annotated[list[Alternatives], _MANY] | None = None
    return_text_in_logprobs: bool | None = None
    return_prompt_token_ids: bool | None = None
    return_hidden_states: bool | Annotated[list[bool], _MANY] | None = None
    return_routed_experts: bool | None = None
    routed_experts_start_len: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Salt | None = None
    extra_key: Salt | None = None
    session_params: SessionParams | None = None
    lora_path: AdapterName | Annotated[list[AdapterName | None], _MANY] | None = None
    data_parallel_rank: Replica | None = None  # SGLang's name of the replica that runs it
    routed_dp_rank: Replica | None = None  # its newer name


NATIVE_SPELLING = tuple(
    {
        **{
            field.encode_name: f"sampling_params.{field.encode_name}"
            for field in msgspec.structs.fields(NativeSampling)
        },
        **_NAMES,
        "prompt": "text",
        "messages": "text",
    }.items()
)
"""The engine's name of a field, or the field's own name -> its place in the body."""


class Item(msgspec.Struct, kw_only=True):
    """One prompt of a batch. ``adapter``: name of its LoRA adapter. ``start``: the first prompt token with a
    log-probability; None for none."""

    prompt: str | list[int]
    params: SamplingParams
    label: str | None
    adapter: str | None = None
    logprobs: bool
    start: int | None


class Batch(msgspec.Struct, kw_only=True):
    """``single``: one prompt that was not in a list. ``choices``: of each prompt."""

    items: list[Item]
    single: bool
    choices: int


def native_names(body: GenerateRequest) -> dict[str, str]:
    """The engine's parameter names -> the fields of this body."""
    some = body.sampling_params[0] if isinstance(body.sampling_params, list) else body.sampling_params
    field = grammar_of(some, "sampling_params.")[1] if some else "grammar"
    return {**_NAMES, "prompt": _prompt_field(body), "grammar": field} | replica_name(body)


def _prompt_field(body: GenerateRequest) -> str:
    return "text" if body.text is not None else "input_ids"


def batch_of(body: GenerateRequest) -> Batch:
    """The prompts of a body with the parameters of each. Raises 400."""
    prompts, single = _prompts(body)
    count = len(prompts)
    sampling = _spread(body.sampling_params, count, "sampling_params")
    labels = _spread(body.rid, count, "rid", single=single)
    wanted = _spread(body.return_logprob, count, "return_logprob")
    starts = _spread(body.logprob_start_len, count, "logprob_start_len")
    tops = _spread(body.top_logprobs_num, count, "top_logprobs_num")
    states = _spread(body.return_hidden_states, count, "return_hidden_states")
    items = [
        _item(prompt, sampling[i] or NativeSampling(), labels[i], bool(wanted[i]), starts[i], tops[i] or 0)
        for i, prompt in enumerate(prompts)
    ]
    for item, adapter in zip(items, _spread(body.lora_path, count, "lora_path"), strict=True):
        item.adapter = adapter
    for item, returned in zip(items, states, strict=True):
        item.params = msgspec.structs.replace(
            item.params, hidden_states=bool(returned), routed_experts=bool(body.return_routed_experts)
        )
    choices = {item.params.n for item in items}
    if len(choices) > 1:
        raise invalid("sampling_params.n: must be the same for every prompt of a batch.", param="sampling_params.n")
    return Batch(items=items, single=single, choices=choices.pop())


def _prompts(body: GenerateRequest) -> tuple[list[str | list[int]], bool]:
    if (body.text is None) == (body.input_ids is None):
        raise invalid("text: give either text or input_ids.", param="text")
    if isinstance(body.text, str):
        return [body.text], True
    given: list[Any] | None = body.text if body.text is not None else body.input_ids
    field = _prompt_field(body)
    if not given:
        raise invalid(f"{field}: must not be empty.", param=field)
    if isinstance(given[0], int):
        if not all(isinstance(token, int) for token in given):
            raise invalid("input_ids: either token ids or lists of them, not both.", param=field)
        return [given], True
    if len(given) > LIMITS.prompts:
        raise invalid(
            f"{field}: at most {LIMITS.prompts} prompts in a request; you gave {len(given)}. Split the request.",
            param=field,
        )
    if any(isinstance(prompt, int) for prompt in given):
        raise invalid("input_ids: either token ids or lists of them, not both.", param=field)
    return given, False


def _spread(value: Any, count: int, field: str, *, single: bool = True) -> list[Any]:
    """One value for all prompts, or a list with one for each."""
    if isinstance(value, list):
        if len(value) != count:
            raise invalid(f"{field}: {len(value)} values for {count} prompts; give one for each.", param=field)
        return value
    if field == "rid" and value is not None and not single:
        return [f"{value}_{number}" for number in range(count)]
    return [value] * count


def _item(
    prompt: str | list[int], sampling: NativeSampling, label: str | None, logprobs: bool, start: int | None, top: int
) -> Item:
    if start is not None and start < 0:
        start = None
    return Item(
        prompt=prompt,
        label=label or None,
        logprobs=logprobs,
        start=start if logprobs else None,
        params=SamplingParams(
            max_tokens=sampling.max_new_tokens,
            default_max_tokens=_NEW_TOKENS if sampling.max_new_tokens is None else None,
            min_tokens=sampling.min_new_tokens or 0,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            repetition_penalty=sampling.repetition_penalty,
            logit_bias=sampling.logit_bias,
            seed=sampling.sampling_seed,
            n=1 if sampling.n is None else sampling.n,
            stop=texts_of(sampling.stop),
            stop_regex=texts_of(sampling.stop_regex),
            stop_token_ids=tuple(sampling.stop_token_ids or ()),
            include_stop_str_in_output=bool(sampling.no_stop_trim),
            ignore_eos=bool(sampling.ignore_eos),
            skip_special_tokens=sampling.skip_special_tokens is not False,
            logprobs=top if logprobs else None,
            prompt_logprobs=top if logprobs and start is not None else None,
            speculative=sampling.speculative is not False,
            speculative_num_draft_tokens=sampling.speculative_num_draft_tokens,
            grammar=grammar_of(sampling, "sampling_params.")[0],
        ),
    )
