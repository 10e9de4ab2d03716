"""``POST /completion``, ``/infill`` and ``/apply-template``; ``GET /props`` and ``/slots``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
from quart import Response, request

from actors.protocol.requests import Chat, Delta, Grammar, SamplingParams
from app.apis.collecting import collect
from app.apis.grammars import schema_text
from app.apis.llamacpp.answers import AnswerFields, CompletionChunks
from app.apis.llamacpp.requests import InfillRequest, LlamaCompletionRequest, SamplingBody, TemplateRequest
from app.apis.openai.completions import Prompt, prompts_of
from app.apis.openai.infill import Filling, ending, fill_in
from app.apis.openai.parameters import messages, own_template, template_kwargs, tools
from app.server.errors import ApiError, invalid
from app.server.exchange import Exchange
from app.server.merged_streams import MergedStreams
from app.server.service import Service, json_response
from app.server.sse import sse_response
from app.server.version import troupe_version

__all__ = ["PropsAnswer", "TemplateAnswer", "apply_template", "completion", "infill", "props", "slots"]

_NAMES = {"max_tokens": "n_predict", "repetition_penalty": "repeat_penalty", "logprobs": "n_probs"}


class TemplateAnswer(msgspec.Struct):
    prompt: str


class PropsAnswer(msgspec.Struct, kw_only=True):
    """``model_path`` is the model's name: paths of the server are not shown."""

    default_generation_settings: dict[str, Any]
    total_slots: int
    model_alias: str
    model_path: str
    modalities: dict[str, bool]
    chat_template: str
    build_info: str
    is_sleeping: bool = False


async def completion(service: Service, exchange: Exchange, body: LlamaCompletionRequest) -> Response:
    """Continue texts, as a whole or as a stream."""
    return await _complete(service, exchange, body, prompts_of(body.prompt), isinstance(body.prompt, str))


async def infill(service: Service, exchange: Exchange, body: InfillRequest) -> Response:
    """Write what is between two texts."""
    if body.input_extra:
        raise invalid(
            "input_extra: the completion template knows no other files; put them into input_prefix.",
            param="input_extra",
        )
    try:
        filling = await fill_in(service, body.input_prefix, body.input_suffix)
    except ApiError as error:
        raise invalid(error.message.replace("suffix:", "input_suffix:", 1), param="input_suffix") from None
    return await _complete(service, exchange, body, [filling.text + (body.prompt or "")], True, filling)


async def _complete(
    service: Service,
    exchange: Exchange,
    body: SamplingBody,
    prompts: list[Prompt],
    single: bool,
    filling: Filling | None = None,
) -> Response:
    """``single``: the answer is none of a list. ``filling``: what the one prompt is from."""
    model = service.check_model(body.model, exchange)
    params, grammar_field = _params(service, body)
    if filling is not None:
        params = ending(params, filling)
    names = {**_NAMES, "grammar": grammar_field}
    service.check_size(len(prompts), 1, "prompt")
    streams = [
        service.submit(exchange, prompt, params, priority=body.priority, label=body.rid, rename=names)
        for prompt in prompts
    ]
    await service.accepted(streams, names)
    form = AnswerFields(exchange, model, params, tokens=bool(body.return_tokens))
    if body.stream:
        source: AsyncIterator[Delta] = streams[0] if len(streams) == 1 else MergedStreams(streams, 1)
        return sse_response(service, exchange, source, CompletionChunks(exchange, form, len(streams)))
    collected = []
    for stream in streams:
        collected += await collect(form.timed(stream), 1)
    answers = [form.end(index, choice, whole=True) for index, choice in enumerate(collected)]
    exchange.tokens = (
        sum(choice.usage.prompt_tokens for choice in collected),
        sum(choice.usage.completion_tokens for choice in collected),
    )
    return json_response(answers[0] if single or len(answers) == 1 else answers)


def _params(service: Service, body: SamplingBody) -> tuple[SamplingParams, str]:
    """The parameters, and the field of the grammar. Raises 400."""
    penalized = (body.repeat_penalty not in (None, 1)) or body.presence_penalty or body.frequency_penalty
    if penalized and body.repeat_last_n not in (None, -1, service.engine.context_length):
        raise invalid(
            "repeat_last_n: penalties see the whole context here, which is -1; leave it out.", param="repeat_last_n"
        )
    if body.n_predict == 0:
        raise invalid("n_predict: must be at least 1, or -1 up to the end of the context.", param="n_predict")
    if body.grammar and body.json_schema is not None:
        raise invalid("json_schema: grammar and json_schema both constrain the answer; send one.", param="json_schema")
    grammar, field = None, "grammar"
    if body.grammar:
        grammar = Grammar("ebnf", body.grammar)
    elif body.json_schema is not None:
        grammar, field = Grammar("json_schema", schema_text(body.json_schema, "json_schema")), "json_schema"
    stop = body.stop if body.stop is not None else []
    bias, never = _biases(body)
    return (
        SamplingParams(
            max_tokens=None if body.n_predict == -1 else body.n_predict,
            temperature=body.temperature,
            top_k=body.top_k,
            top_p=body.top_p,
            min_p=body.min_p,
            seed=None if body.seed == -1 else body.seed,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            repetition_penalty=body.repeat_penalty,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            ignore_eos=bool(body.ignore_eos),
            logit_bias=bias,
            bad_words=never,
            logprobs=body.n_probs or None,
            grammar=grammar,
        ),
        field,
    )


_NEVER = -100.0
"""The bias of a token that must not be sampled."""


def _biases(body: SamplingBody) -> tuple[dict[int, float] | None, tuple[str, ...]]:
    """Biases of tokens, and words that must not be written. Raises 400."""
    given = body.logit_bias
    if given is None or isinstance(given, dict):
        return given, ()
    bias: dict[int, float] = {}
    never: list[str] = []
    for index, (token, value) in enumerate(given):
        at = f"logit_bias[{index}]"
        if isinstance(token, str) and value is False:
            never.append(token)
        elif isinstance(token, bool) or not isinstance(token, int):
            raise invalid(f"{at}: a bias is given to a token id; a text can only have false, for never.", param=at)
        elif value is False:
            bias[token] = _NEVER
        elif isinstance(value, bool) or not isinstance(value, (int, float)):
            raise invalid(f"{at}: a bias is a number, or false for never.", param=at)
        else:
            bias[token] = float(value)
    return bias, tuple(never)


async def apply_template(service: Service, exchange: Exchange, body: TemplateRequest) -> Response:
    """The text that the chat template makes of a conversation."""
    service.check_model(body.model, exchange)
    chat = Chat(
        messages=messages(body.messages, service.output_format.tools),
        tools=tools(body.tools),
        template_kwargs=template_kwargs(body.chat_template_kwargs),
        add_generation_prompt=body.add_generation_prompt is not False,
        template=own_template(body.chat_template, service.arguments),
    )
    with service.text_request(exchange):
        return json_response(TemplateAnswer(await service.engine.render(chat)))


async def props(service: Service, exchange: Exchange, body: None) -> Response:
    """What front ends ask of a server."""
    engine, arguments = service.engine, service.arguments
    return json_response(
        PropsAnswer(
            default_generation_settings={"n_ctx": engine.context_length, "params": dict(engine.generation_defaults)},
            total_slots=arguments.max_running_requests,
            model_alias=service.model_name,
            model_path=service.model_name,
            modalities={"vision": False, "audio": False},
            chat_template=engine.chat_template or "",
            build_info=f"troupe {troupe_version()}",
        )
    )


async def slots(service: Service, exchange: Exchange, body: None) -> Response:
    """As many slots as sequences may run, of which some do. With ``fail_on_no_slot=1`` 503 if all do."""
    total, busy = service.arguments.max_running_requests, service.engine.describe()["requests"]["sequences"]
    if busy >= total and request.args.get("fail_on_no_slot") not in (None, "0"):
        raise ApiError(503, "All slots are busy; try again.", kind="unavailable_error", code="no_slot", retry_after=1)
    context = service.engine.context_length
    return json_response(
        [
            {"id": number, "n_ctx": context, "speculative": False, "is_processing": number < busy}
            for number in range(total)
        ]
    )
