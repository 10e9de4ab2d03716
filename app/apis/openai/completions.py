"""``POST /v1/completions``: one prompt or many, as text or token ids, with echo and log-probabilities."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from quart import Response

from actors.protocol.requests import LIMITS, Delta
from app.apis.collecting import CollectedChoice, collect
from app.apis.openai.answers import (
    Choice,
    CompletionAnswer,
    completion_logprobs,
    prompt_logprobs,
    stop_reason,
    usage_answer,
)
from app.apis.openai.chunks import CompletionChunks, UsageReport
from app.apis.openai.infill import ending, fill_in
from app.apis.openai.parameters import completion_names, completion_params, label_of, salt_of
from app.apis.openai.requests import CompletionRequest
from app.apis.routing import replica_of
from app.apis.sessions import begin_session_request
from app.apis.token_values import last_state
from app.server.errors import invalid
from app.server.exchange import Exchange
from app.server.merged_streams import MergedStreams
from app.server.service import Service, json_response
from app.server.sse import sse_response

__all__ = ["Prompt", "completions", "prompts_of"]

Prompt = str | list[int]


async def completions(service: Service, exchange: Exchange, body: CompletionRequest) -> Response:
    """Complete texts, as a whole or as a stream. Choice ``j`` of prompt ``i`` has the index ``i * n + j``."""
    model = service.check_model(body.model, exchange)
    prompts = prompts_of(body.prompt)
    params, names = completion_params(body), completion_names(body)
    if body.suffix:
        filled = [await fill_in(service, prompt, body.suffix) for prompt in prompts]
        prompts, params = [one.text for one in filled], ending(params, filled[0])
    service.check_size(len(prompts), params.n, "prompt")
    session_request = None
    if body.session_params is not None:
        session_request = await begin_session_request(
            service, exchange, body.session_params, prompts, choices=params.n, rid=exchange.request_id, names=names
        )
        prompts = [session_request.prompt]
    streams = [
        service.submit(
            exchange,
            prompt,
            params,
            priority=body.priority,
            cache_salt=salt_of(body),
            label=label_of(body),
            rename=names,
            replica=replica_of(body),
        )
        for prompt in prompts
    ]
    await service.accepted(streams, names)
    echoes = [await _echo(service, prompt) if body.echo else "" for prompt in prompts]
    created = int(time.time())
    if body.stream:
        usage = UsageReport(
            exchange,
            body.stream_options,
            choices=params.n,
            cache_report=service.arguments.enable_cache_report,
            count_completions=body.max_tokens != 0,
        )
        writer = CompletionChunks(
            body,
            usage,
            identity=exchange.request_id,
            created=created,
            model=model,
            fingerprint=service.fingerprint,
            echoes=echoes,
            choices=params.n,
        )
        source: AsyncIterator[Delta] = streams[0] if len(streams) == 1 else MergedStreams(streams, params.n)
        return sse_response(
            service, exchange, source if session_request is None else session_request.follow(source), writer
        )
    sources = streams if session_request is None else [session_request.follow(streams[0])]
    collected = [await collect(source, params.n) for source in sources]
    return json_response(_answer(service, exchange, body, collected, echoes, created, model=model))


def prompts_of(given: object) -> list[Prompt]:
    """One prompt as text or ids, or a list of them, as a list. Raises 400."""
    if isinstance(given, str):
        return [given]
    assert isinstance(given, list)
    if not given:
        raise invalid("prompt: must not be empty.", param="prompt")
    if isinstance(given[0], int):
        if not all(isinstance(item, int) for item in given):
            raise invalid("prompt: token ids cannot be mixed with texts or lists.", param="prompt")
        return [given]
    if len(given) > LIMITS.prompts:
        raise invalid(
            f"prompt: at most {LIMITS.prompts} prompts in a request; you gave {len(given)}. Split the request.",
            param="prompt",
        )
    for number, item in enumerate(given):
        if isinstance(item, int):
            raise invalid("prompt: token ids cannot be mixed with texts or lists.", param=f"prompt[{number}]")
        if isinstance(item, list) and not item:
            raise invalid(f"prompt[{number}]: must not be empty.", param=f"prompt[{number}]")
    return given


async def _echo(service: Service, prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else await service.engine.detokenize(prompt, skip_special_tokens=False)


def _answer(
    service: Service,
    exchange: Exchange,
    body: CompletionRequest,
    collected: list[list[CollectedChoice]],
    echoes: list[str],
    created: int,
    *,
    model: str,
) -> CompletionAnswer:
    usage = usage_answer(
        [[choice.usage for choice in choices] for choices in collected],
        cache_report=service.arguments.enable_cache_report,
        count_completions=body.max_tokens != 0,
    )
    exchange.tokens = (usage.prompt_tokens, usage.completion_tokens)
    returned = [_best(choices, body.n or 1) for choices in collected]
    return CompletionAnswer(
        id=exchange.request_id,
        created=created,
        model=model,
        system_fingerprint=service.fingerprint,
        choices=[
            _choice(body, choice, echo, scored, number * len(choices) + index)
            for number, (choices, echo) in enumerate(zip(returned, echoes, strict=True))
            for scored in (_scored(body, collected[number][0]),)
            for index, choice in enumerate(choices)
        ],
        usage=usage,
        metadata={"weight_version": service.arguments.weight_version},
    )


def _best(choices: list[CollectedChoice], count: int) -> list[CollectedChoice]:
    """The choices whose tokens have the highest mean log-probability, best first; all of them in their order if no more
    were asked for than are returned."""
    if len(choices) <= count:
        return choices

    def mean(choice: CollectedChoice) -> float:
        return sum(entry.logprob or 0.0 for entry in choice.logprobs) / max(1, len(choice.logprobs))

    return sorted(choices, key=mean, reverse=True)[:count]


def _scored(body: CompletionRequest, first: CollectedChoice) -> Any:
    """The prompt's log-probabilities, encoded once for all choices."""
    if body.prompt_logprobs is None:
        return msgspec.UNSET
    return msgspec.Raw(msgspec.json.encode(prompt_logprobs(first.prompt_logprobs)))


def _choice(body: CompletionRequest, choice: CollectedChoice, echo: str, scored: Any, index: int) -> Choice:
    only_prompt = body.max_tokens == 0
    text = "" if only_prompt else "".join(choice.text)
    logprobs = None
    if body.logprobs is not None:
        entries = [] if only_prompt else choice.logprobs
        if body.echo:
            entries = [*(choice.prompt_logprobs or ()), *entries]
        logprobs = completion_logprobs(
            entries, top=body.logprobs, offset=0, as_ids=bool(body.return_tokens_as_token_ids)
        )
    return Choice(
        index=index,
        text=echo + text,
        finish_reason="length" if choice.finish_reason == "length" else "stop",
        logprobs=logprobs,
        stop_reason=stop_reason(choice.matched_stop, body.stop_token_ids),
        matched_stop=choice.matched_stop,
        prompt_logprobs=scored,
        token_ids=choice.token_ids if body.return_token_ids else msgspec.UNSET,
        hidden_states=last_state(choice) if body.return_hidden_states else msgspec.UNSET,
        prompt_token_ids=(
            list(choice.prompt_token_ids)
            if body.return_token_ids and choice.prompt_token_ids is not None
            else msgspec.UNSET
        ),
    )
