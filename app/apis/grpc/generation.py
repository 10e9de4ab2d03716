"""Requests of the gRPC service as those of ``/generate``, and deltas as its responses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from google.protobuf.unknown_fields import UnknownFieldSet

from actors.protocol.requests import Delta, RequestAborted, TokenLogprob
from actors.requests.streams import RequestStream
from app.apis.collecting import CollectedChoice, collect
from app.apis.grpc.messages import message
from app.apis.sglang.requests import GenerateRequest, Item, batch_of, native_names
from app.server.errors import ApiError, invalid
from app.server.exchange import Exchange
from app.server.service import Service
from app.server.validation_errors import describe_validation_error

__all__ = ["check_fields", "generate_item", "prompt_of", "responses"]

_Response, _Top = message("GenerateResponse"), message("TopLogProbs")
_Outputs, _Inputs, _Input = message("OutputLogProbs"), message("InputLogProbs"), message("InputTokenLogProb")

_TEXT_ONLY = "is not read: the models here read text alone; leave it out"
_REFUSED = {
    "mm_inputs": _TEXT_ONLY,
    "input_embeds": "is not read; send tokenized.input_ids",
    "token_ids_logprob": "is not supported; use top_logprobs_num",
    "return_hidden_states": "has no place in a response; use /generate over HTTP",
    "disaggregated_params": "is not supported: one server does both prefill and decode; leave it out",
    "custom_logit_processor": "is code, which is not run; leave it out",
    "data_parallel_rank": "is not supported here; use /generate over HTTP",
    "custom_params": "is for custom_logit_processor, which is not run; leave it out",
    "texts": "is not read; send the pair as tokenized.input_ids and token_type_ids",
}
_SAMPLING = {"max_new_tokens": "max_new_tokens", "ebnf_grammar": "ebnf"}
_LEFT_OUT = frozenset({"spaces_between_special_tokens", "stream_interval", "custom_params"})
"""Fields of the sampling that concern texts, which are not returned, or are refused before."""


def check_fields(request: Any, place: str = "") -> None:
    """Raise 400 for a field that is set and not supported, by its name, and for one that is not declared."""
    for field, value in request.ListFields():
        if field.name in _REFUSED and not (field.name == "data_parallel_rank" and value == -1):
            raise invalid(f"{place}{field.name}: {_REFUSED[field.name]}.", param=f"{place}{field.name}")
    numbers = sorted({field.field_number for field in UnknownFieldSet(request)})
    if numbers:
        raise invalid(f"{place or 'the request: '}the fields with the numbers {numbers[:8]} are not known here.")


def prompt_of(request: Any) -> str | list[int]:
    """The token ids of a request, or its text where it has no ids. Raises 400 without either."""
    ids: list[int] = list(request.tokenized.input_ids)
    if not ids and not request.tokenized.original_text:
        raise invalid("tokenized: holds no token; send input_ids.", param="tokenized")
    return ids or str(request.tokenized.original_text)


def generate_item(request: Any) -> tuple[Item, dict[str, str]]:
    """The one prompt of a GenerateRequest, checked as a body of ``/generate``, and its names in errors. Raises 400."""
    check_fields(request)
    given = request.sampling_params
    check_fields(given, "sampling_params.")
    if given.HasField("stream_interval") and given.stream_interval > 1:
        raise invalid(
            "sampling_params.stream_interval: is the server's, --stream-interval; leave it out.",
            param="sampling_params.stream_interval",
        )
    prompt = prompt_of(request)
    sampling = {
        _SAMPLING.get(field.name, field.name): _plain(field, value)
        for field, value in given.ListFields()
        if field.name not in _LEFT_OUT
    }
    body = {
        "text" if isinstance(prompt, str) else "input_ids": prompt,
        "sampling_params": {"skip_special_tokens": False, **sampling},
        "rid": request.request_id or None,
        "lora_path": request.lora_id or None,
        "return_logprob": request.return_logprob,
        "logprob_start_len": request.logprob_start_len,
        "top_logprobs_num": request.top_logprobs_num,
    }
    try:
        checked = msgspec.convert(body, GenerateRequest, str_keys=True)
    except msgspec.ValidationError as error:
        mistake = describe_validation_error(str(error), GenerateRequest, body)
        raise invalid(mistake.message, param=mistake.path or None, code=mistake.code) from None
    [item] = batch_of(checked).items
    if not given.HasField("max_new_tokens"):  # as many as the context holds
        item.params = msgspec.structs.replace(item.params, default_max_tokens=None)
    return item, {**native_names(checked), "prompt": "tokenized"}


def _plain(field: Any, value: Any) -> Any:
    if field.name == "logit_bias":
        return dict(value)
    return list(value) if not isinstance(value, str) and hasattr(value, "__len__") else value


async def responses(
    exchange: Exchange, stream: RequestStream, item: Item, label: str, *, chunks: bool
) -> AsyncIterator[Any]:
    """The responses to a request: with ``chunks`` as tokens come, and for each choice a last one with all of it. What
    the client aborts ends with the tokens so far."""
    choices = item.params.n
    if not chunks:
        collected = await collect(stream, choices, keep_aborted=True)
        _raise_interruption(exchange)
        for index, choice in enumerate(collected):
            yield _complete(label, index, choice, item)
        _note(exchange, collected)
        return
    collected = [CollectedChoice() for _ in range(choices)]
    try:
        async for delta in stream:
            choice = collected[delta.index]
            choice.add(delta)
            if delta.token_ids or delta.prompt_logprobs is not None:
                yield _chunk(label, delta, item)
            if delta.finish_reason is not None:
                yield _complete(label, delta.index, choice, item)
    except RequestAborted:
        _raise_interruption(exchange)
        for index, choice in enumerate(collected):
            if choice.finish_reason is None:
                choice.finish_reason = "abort"
                yield _complete(label, index, choice, item)
    _note(exchange, collected)


def _raise_interruption(exchange: Exchange) -> None:
    if exchange.interruption is not None:
        raise exchange.interruption


def _note(exchange: Exchange, collected: Sequence[CollectedChoice]) -> None:
    exchange.tokens = (collected[0].usage.prompt_tokens, sum(one.usage.completion_tokens for one in collected))


def _chunk(label: str, delta: Delta, item: Item) -> Any:
    response = _Response(request_id=label)
    chunk, usage = response.chunk, delta.usage
    chunk.token_ids.extend(delta.token_ids)
    chunk.prompt_tokens, chunk.completion_tokens = usage.prompt_tokens, usage.completion_tokens
    chunk.cached_tokens, chunk.index = usage.cached_tokens, delta.index
    if item.logprobs:
        if delta.logprobs:
            chunk.output_logprobs.CopyFrom(_outputs(delta.logprobs))
        if delta.prompt_logprobs is not None and item.start is not None:
            chunk.input_logprobs.CopyFrom(_inputs(delta.prompt_logprobs, item.start))
    return response


def _complete(label: str, index: int, choice: CollectedChoice, item: Item) -> Any:
    response = _Response(request_id=label)
    complete, usage, matched = response.complete, choice.usage, choice.matched_stop
    complete.output_ids.extend(choice.token_ids)
    complete.finish_reason = choice.finish_reason or "abort"
    complete.prompt_tokens, complete.completion_tokens = usage.prompt_tokens, usage.completion_tokens
    complete.cached_tokens, complete.index = usage.cached_tokens, index
    if isinstance(matched, int):
        complete.matched_token_id = matched
    elif matched is not None:
        complete.matched_stop_str = matched
    if item.logprobs:
        complete.output_logprobs.CopyFrom(_outputs(choice.logprobs))
        if choice.prompt_logprobs is not None and item.start is not None:
            complete.input_logprobs.CopyFrom(_inputs(choice.prompt_logprobs, item.start))
    return response


def _outputs(scored: Sequence[TokenLogprob]) -> Any:
    return _Outputs(
        token_logprobs=[entry.logprob or 0.0 for entry in scored],
        token_ids=[entry.token_id for entry in scored],
        top_logprobs=_tops(scored),
    )


def _inputs(scored: Sequence[TokenLogprob], start: int) -> Any:
    """Of the prompt's tokens from ``start`` on; the first of all has no log-probability."""
    kept = [entry if place else msgspec.structs.replace(entry, logprob=None) for place, entry in enumerate(scored)]
    return _Inputs(
        token_logprobs=[_Input(value=entry.logprob) for entry in kept[start:]],
        token_ids=[entry.token_id for entry in kept[start:]],
        top_logprobs=_tops(kept[start:]),
    )


def _tops(scored: Sequence[TokenLogprob]) -> list[Any]:
    if not any(entry.top for entry in scored):
        return []
    return [
        _Top(values=[other.logprob for other in entry.top], token_ids=[other.token_id for other in entry.top])
        for entry in scored
    ]


def check_start(item: Item, prompt_tokens: int) -> None:
    """Raise 400 for scores that start after the prompt."""
    if item.start is not None and item.start >= prompt_tokens:
        raise ApiError(
            400,
            f"logprob_start_len: {item.start} is not within the prompt of {prompt_tokens} tokens. Lower it; -1 is for "
            "no scores of the prompt.",
            param="logprob_start_len",
        )


def submitted(service: Service, exchange: Exchange, item: Item, names: dict[str, str], timeout: float | None) -> Any:
    """The engine's stream of a request."""
    adapter = item.adapter and service.adapter_of(item.adapter, "lora_id")
    return service.submit(
        exchange, item.prompt, item.params, label=item.label, rename=names, timeout=timeout, adapter=adapter
    )
