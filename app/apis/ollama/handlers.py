"""``POST /api/chat``, ``/api/generate``, ``/api/embed`` and ``/api/embeddings``."""

from __future__ import annotations

import msgspec
from quart import Response

from app.apis.collecting import CollectedChoice
from app.apis.conversations import NO_TOOLS, AcceptedRequest, ConversationRequest, ToolChoice, submit
from app.apis.embeddings.handlers import check_dimensions, cut_all, embed_all, normalizes, require_embeddings
from app.apis.events import read_whole
from app.apis.ollama.answers import Lines, Times, chat_answer, generate_answer, loaded
from app.apis.ollama.parameters import NAMES, chat_of, model_of, params_of, turn_of
from app.apis.ollama.requests import (
    EmbedRequest,
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaGenerateRequest,
    OwnFields,
)
from app.apis.openai.infill import ending, fill_in
from app.server.errors import invalid
from app.server.exchange import Exchange
from app.server.service import Service, json_response
from app.server.sse import sse_response

__all__ = ["EmbedAnswer", "OllamaEmbeddingsAnswer", "chat", "embed", "embeddings", "generate"]


class EmbedAnswer(msgspec.Struct, kw_only=True):
    model: str
    embeddings: list[list[float]]
    prompt_eval_count: int


class OllamaEmbeddingsAnswer(msgspec.Struct):
    embedding: list[float]


async def chat(service: Service, exchange: Exchange, body: OllamaChatRequest) -> Response:
    """Answer a conversation, as a stream unless ``stream`` is false."""
    model = model_of(service, body.model, exchange)
    if not body.messages:
        return _only_load(body, model, chat=True)
    tools = {tool.function.name: tool.function.parameters or {} for tool in body.tools or ()}
    request = ConversationRequest(
        chat=chat_of(service, body),
        params=params_of(service, body),
        names=NAMES,
        tool_choice=ToolChoice("auto", tools) if tools else NO_TOOLS,
        priority=body.priority,
        label=body.rid,
    )
    return await _answer(service, exchange, body, model, await submit(service, exchange, request))


async def generate(service: Service, exchange: Exchange, body: OllamaGenerateRequest) -> Response:
    """Answer one turn, or continue a text, as a stream unless ``stream`` is false."""
    model = model_of(service, body.model, exchange)
    _refuse_what_is_missing(body)
    if not body.prompt and not body.suffix:
        return _only_load(body, model, chat=False)
    params, names = params_of(service, body), {**NAMES, "prompt": "prompt"}
    if not body.raw and not body.suffix:
        request = ConversationRequest(
            chat=turn_of(service, body), params=params, names=names, priority=body.priority, label=body.rid
        )
        return await _answer(service, exchange, body, model, await submit(service, exchange, request))
    if body.system:
        field = "raw" if body.raw else "suffix"
        raise invalid(f"system: has no place with {field}; put it into the prompt.", param="system")
    prompt = body.prompt or ""
    if body.suffix:
        filling = await fill_in(service, prompt, body.suffix)
        prompt, params = filling.text, ending(params, filling)
    stream = service.submit(exchange, prompt, params, priority=body.priority, label=body.rid, rename=names)
    await service.accepted([stream], names)
    return await _answer(service, exchange, body, model, AcceptedRequest(stream, lambda: None))


def _refuse_what_is_missing(body: OllamaGenerateRequest) -> None:
    for field, given, reason in (
        ("images", body.images, "this model reads text only; leave them out"),
        ("template", body.template, "start the server with --chat-template, or send raw with the whole text"),
        ("context", body.context, "nothing is kept between requests; send the conversation to /api/chat"),
    ):
        if given:
            raise invalid(f"{field}: {reason}.", param=field, code="unsupported_parameter")


def _only_load(body: OwnFields, model: str, *, chat: bool) -> Response:
    if body.keep_alive in (0, "0", "0s"):
        raise invalid("keep_alive: this server keeps its one model; stop the server instead.", param="keep_alive")
    return json_response(loaded(model, chat=chat))


async def _answer(
    service: Service, exchange: Exchange, body: OwnFields, model: str, submitted: AcceptedRequest
) -> Response:
    is_chat, times = isinstance(body, OllamaChatRequest), Times(exchange)
    if body.stream is not False:
        return sse_response(service, exchange, submitted.stream, Lines(submitted.reader(), model, times, chat=is_chat))
    collected = CollectedChoice()
    async for delta in submitted.stream:
        times.mark()
        collected.add(delta)
    answer = await read_whole(collected, submitted.reader())
    return json_response((chat_answer if is_chat else generate_answer)(answer, model, times, collected.logprobs))


async def embed(service: Service, exchange: Exchange, body: EmbedRequest) -> Response:
    """Embeddings of texts, from a model that was trained for them."""
    model = model_of(service, body.model, exchange)
    require_embeddings(service, model)
    check_dimensions(service, body.dimensions)
    inputs = [body.input] if isinstance(body.input, str) else body.input
    result = await embed_all(service, exchange, inputs, "input", truncate=-1 if body.truncate else None)
    tokens = sum(count for _, count in result)
    exchange.tokens = (tokens, 0)
    vectors = [vector.tolist() async for vector in cut_all(result, body.dimensions, normalizes(service))]
    return json_response(EmbedAnswer(model=model, embeddings=vectors, prompt_eval_count=tokens))


async def embeddings(service: Service, exchange: Exchange, body: OllamaEmbeddingsRequest) -> Response:
    """The embedding of one text, in the older form."""
    require_embeddings(service, model_of(service, body.model, exchange))
    [(vector, tokens)] = await embed_all(service, exchange, [body.prompt], "prompt")
    exchange.tokens = (tokens, 0)
    return json_response(OllamaEmbeddingsAnswer(vector.tolist()))
