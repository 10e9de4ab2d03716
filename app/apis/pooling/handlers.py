"""``/v1/rerank``, ``/v2/rerank``, ``/v1/score``, ``/classify``, ``/pooling`` and ``/encode``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from quart import Response

from app.apis.embeddings.handlers import check_dimensions, cut_all, encoded, inputs_of, task_all
from app.apis.pooling.answers import (
    ClassifyAnswer,
    ClassifyObject,
    CohereAnswer,
    CohereResult,
    DocumentText,
    EncodeAnswer,
    PoolingAnswer,
    PoolingObject,
    RankUsage,
    RerankAnswer,
    RerankResult,
    ScoreAnswer,
    ScoreObject,
)
from app.apis.pooling.requests import (
    ClassifyRequest,
    CohereRerankRequest,
    Document,
    EncodeRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from app.server.errors import ApiError, invalid
from app.server.exchange import Exchange
from app.server.service import Service, json_response
from kernels.contract.pooling import PoolingConfig
from kernels.contract.tasks import Classify, Embed, NextToken, Task

__all__ = ["classify", "cohere_rerank", "encode", "pooling", "rerank", "score"]

_Pair = tuple[str, str]

_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_JUDGE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {}\n<Query>: '
    "{}\n<Document>: {}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""The form that Qwen3-Reranker was trained with (Zhang et al., arXiv 2506.05176)."""


async def rerank(service: Service, exchange: Exchange, body: RerankRequest) -> Response:
    """The documents in the order of their relevance to the query."""
    model = service.check_model(body.model, exchange)
    texts = [one.text if isinstance(one, Document) else one for one in body.documents]
    result, tokens = await _ranked(service, exchange, body.query, texts, body.instruction, _options(body))
    results = [
        RerankResult(
            index=index,
            relevance_score=relevance,
            document=DocumentText(texts[index]) if body.return_documents else None,
        )
        for index, relevance in result[: body.top_n]
    ]
    usage = RankUsage(tokens, tokens)
    return json_response(RerankAnswer(id=exchange.request_id, model=model, usage=usage, results=results))


async def cohere_rerank(service: Service, exchange: Exchange, body: CohereRerankRequest) -> Response:
    """The same in Cohere's form, whose lowest priorities come first."""
    service.check_model(body.model, exchange)
    texts = [one.text if isinstance(one, Document) else one for one in body.documents]
    falls = service.arguments.schedule_low_priority_values_first
    options = {"priority": body.priority if falls or body.priority is None else -body.priority}
    result, _ = await _ranked(service, exchange, body.query, texts, None, options)
    results = [
        CohereResult(index, relevance, DocumentText(texts[index]) if body.return_documents else msgspec.UNSET)
        for index, relevance in result[: body.top_n]
    ]
    meta = {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}
    return json_response(CohereAnswer(id=exchange.request_id, results=results, meta=meta))


async def score(service: Service, exchange: Exchange, body: ScoreRequest) -> Response:
    """vLLM's scores of pairs of texts, or SGLang's of labels after texts."""
    model = service.check_model(body.model, exchange)
    if body.label_token_ids is not None:
        return await _label_scores(service, exchange, body, model, body.label_token_ids)
    if body.text_1 is None or body.text_2 is None:
        field = "text_1" if body.text_1 is None else "text_2"
        raise invalid(f"{field}: is missing. Send text_1 and text_2, or query, items and label_token_ids.", param=field)
    first, second = ([one] if isinstance(one, str) else one for one in (body.text_1, body.text_2))
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise invalid(f"text_2: has {len(second)} texts for {len(first)} of text_1; send as many.", param="text_2")
    scores, tokens = await _relevances(
        service, exchange, list(zip(first, second, strict=True)), "text_2", None, _options(body)
    )
    return json_response(
        ScoreAnswer(
            id=exchange.request_id,
            object="list",
            created=int(time.time()),
            model=model,
            data=[ScoreObject(index=index, score=one) for index, one in enumerate(scores)],
            usage=RankUsage(tokens, tokens),
        )
    )


async def _label_scores(
    service: Service, exchange: Exchange, body: ScoreRequest, model: str, labels: list[int]
) -> Response:
    """The probabilities of tokens after the query and each item, in the order of ``item_first``."""
    if body.query is None or body.items is None:
        field = "query" if body.query is None else "items"
        raise invalid(f"{field}: is missing. Scores of label_token_ids need query and items.", param=field)
    _require_generation(service, "label_token_ids")
    if max(labels) >= service.engine.vocab_size:
        raise invalid(
            f"label_token_ids: this model's ids are 0 to {service.engine.vocab_size - 1}.", param="label_token_ids"
        )
    query = body.query
    delimiter = await _delimiter(service, item_first=body.item_first)
    prompts: list[str | list[int]] = []
    for item in inputs_of(body.items, "items"):
        first, second = (item, query) if body.item_first else (query, item)
        if isinstance(first, str) and isinstance(second, str):
            prompts.append(first + delimiter[0] + second)
        elif isinstance(first, list) and isinstance(second, list):
            prompts.append([*first, *delimiter[1], *second])
        else:
            raise invalid("items: are texts where query is one, and token ids where it is ids.", param="items")
    task = NextToken(tuple(labels))
    result = await task_all(service, exchange, [(one, task) for one in prompts], "items", **_options(body))
    tokens = sum(count for _, count in result)
    exchange.tokens = (tokens, 0)
    return json_response(
        ScoreAnswer(
            id=exchange.request_id,
            object="scoring",
            created=int(time.time()),
            model=model,
            scores=[_probabilities(logprobs, body.apply_softmax) for logprobs, _ in result],
            usage=RankUsage(tokens, tokens),
        )
    )


async def _delimiter(service: Service, *, item_first: bool) -> tuple[str, list[int]]:
    """What stands between a query and an item (``--multi-item-scoring-delimiter``), as text and as ids. Raises 400."""
    token = service.arguments.multi_item_scoring_delimiter
    if token is None:
        return "", []
    if item_first:
        raise invalid(
            "item_first: items stand after the query, since this server runs with --multi-item-scoring-delimiter. "
            "Leave it out.",
            param="item_first",
        )
    if token >= service.engine.vocab_size:
        raise invalid(
            f"label_token_ids: this server's --multi-item-scoring-delimiter, {token}, is no token of its model. Start "
            "it with another one.",
            param="label_token_ids",
        )
    return await service.engine.detokenize([token], skip_special_tokens=False), [token]


def _probabilities(logprobs: np.ndarray, among: bool) -> list[float]:
    """Over the whole vocabulary, or ``among`` these tokens alone."""
    result = np.exp((logprobs - logprobs.max() if among else logprobs).astype(np.float64))
    numbers: list[float] = (result / result.sum() if among else result).tolist()
    return numbers


async def classify(service: Service, exchange: Exchange, body: ClassifyRequest) -> Response:
    """The classes of each input by the model's head: vLLM's form of ``input``, SGLang's of ``text``."""
    model = service.check_model(body.model, exchange)
    if body.input is None:
        return await _native(
            service, exchange, (body.text, body.input_ids), "classify", body.activation, _options(body)
        )
    head = _require(service, "classify")
    result, tokens = await _vectors(service, exchange, body.input, Classify(body.activation), _options(body))
    data = [
        ClassifyObject(
            index=index, label=head.labels[int(vector.argmax())], probs=vector.tolist(), num_classes=vector.size
        )
        for index, (vector, _) in enumerate(result)
    ]
    usage = RankUsage(tokens, tokens)
    return json_response(
        ClassifyAnswer(id=exchange.request_id, created=int(time.time()), model=model, data=data, usage=usage)
    )


async def pooling(service: Service, exchange: Exchange, body: PoolingRequest) -> Response:
    """The vector of each input: an embedding, or the numbers of the model's head."""
    model = service.check_model(body.model, exchange)
    if body.task not in (None, "embed", "classify"):
        raise invalid(
            f"task: {body.task!r} is not run: an input has one vector here; use embed or classify.",
            param="task",
            code="unsupported_parameter",
        )
    config = _require(service, body.task)
    if body.dimensions is not None:
        if config.task != "embed":
            raise invalid("dimensions: are for embeddings, and this model classifies.", param="dimensions")
        check_dimensions(service, body.dimensions)
    task = _task(config, body.activation, body.prompt_name)
    result, tokens = await _vectors(service, exchange, body.input, task, _options(body))
    as_text = body.encoding_format == "base64"
    data: list[PoolingObject] = []
    async for vector in cut_all(result, body.dimensions, config.normalize):
        data.append(PoolingObject(index=len(data), data=encoded(vector, as_text)))
    usage = RankUsage(tokens, tokens)
    return json_response(
        PoolingAnswer(id=exchange.request_id, created=int(time.time()), model=model, data=data, usage=usage)
    )


async def encode(service: Service, exchange: Exchange, body: EncodeRequest) -> Response:
    """The vector of each input in SGLang's form."""
    return await _native(service, exchange, (body.text, body.input_ids), None, False, {"label": body.rid})


async def _native(
    service: Service,
    exchange: Exchange,
    texts: tuple[str | list[str] | None, list[int | list[int]] | None],
    required: Literal["classify"] | None,
    activation: bool,
    options: dict[str, Any],
) -> Response:
    """The answer to ``texts``, of which one is given: text, or token ids."""
    text, input_ids = texts
    given: Any = text if text is not None else input_ids
    if given is None or (text is not None and input_ids is not None):
        raise invalid("text: send text or input_ids, one of them.", param="text")
    field = "text" if text is not None else "input_ids"
    if not given and field == "input_ids":
        raise invalid("input_ids: holds no token. Send at least one.", param=field)
    config = _require(service, required)
    task = _task(config, activation)
    prompts = [(prompt, task) for prompt in inputs_of(given, field)]
    result = await task_all(service, exchange, prompts, field, **options)
    exchange.tokens = (sum(tokens for _, tokens in result), 0)
    answers = [
        EncodeAnswer(
            embedding=vector.tolist(),
            meta_info={"id": exchange.request_id, "prompt_tokens": tokens, "finish_reason": {"type": "stop"}},
        )
        for vector, tokens in result
    ]
    several = isinstance(given, list) and not isinstance(given[0], int)
    return json_response(answers if several else answers[0])


async def _vectors(
    service: Service, exchange: Exchange, given: Any, task: Task, options: dict[str, Any]
) -> tuple[list[tuple[np.ndarray, int]], int]:
    prompts = [(prompt, task) for prompt in inputs_of(given, "input")]
    result = await task_all(service, exchange, prompts, "input", **options)
    tokens = sum(count for _, count in result)
    exchange.tokens = (tokens, 0)
    return result, tokens


# -- relevance of texts to one another


async def _ranked(
    service: Service, exchange: Exchange, query: str, texts: list[str], instruction: str | None, options: dict[str, Any]
) -> tuple[list[tuple[int, float]], int]:
    """Index and relevance of each text, the best first; of equal ones the first. And the tokens of all."""
    pairs = [(query, text) for text in texts]
    scores, tokens = await _relevances(service, exchange, pairs, "documents", instruction, options)
    return sorted(enumerate(scores), key=lambda one: -one[1]), tokens


async def _relevances(
    service: Service,
    exchange: Exchange,
    pairs: list[_Pair],
    field: str,
    instruction: str | None,
    options: dict[str, Any],
) -> tuple[list[float], int]:
    """The relevance of the second text of each pair to the first: by a head of one class, by the cosine of embeddings,
    or by the chance of yes against no of Qwen3-Reranker. And the tokens of all. ``field``: of the second texts in this
    API."""
    config = _pooling(service)
    if instruction is not None and config is not None:
        raise invalid("instruction: is for Qwen3-Reranker; leave it out.", param="instruction")
    if config is None and not _judges(service):
        raise _unsuitable(service, "rank", "a reranker, a model with --is-embedding or Qwen3-Reranker")
    if config is not None and config.task == "classify":
        if len(config.labels) != 1:
            raise _unsuitable(service, "rank", f"one whose head has one class; this one has {len(config.labels)}")
        joined = await _joined(service, exchange, pairs, options.get("truncate"))
        result = await task_all(service, exchange, joined, field, **options)
        scores = [float(vector[0]) for vector, _ in result]
    elif config is not None:
        names = _side(config, "query"), _side(config, "document", "passage", "corpus")
        sides = list(dict.fromkeys(side for pair in pairs for side in zip(pair, names, strict=True)))
        inputs: list[tuple[str | list[int], Task]] = [(text, Embed(prompt=name)) for text, name in sides]
        result = await task_all(service, exchange, inputs, field, **options)
        of = {side: vector for side, (vector, _) in zip(sides, result, strict=True)}
        scores = [float(of[first, names[0]] @ of[second, names[1]]) for first, second in pairs]
    else:
        ids = [await service.engine.tokenize(word, add_special_tokens=False) for word in ("yes", "no")]
        if any(len(one) != 1 for one in ids):
            raise _unsuitable(service, "rank", "Qwen3-Reranker, whose tokenizer has a token for yes and one for no")
        task = NextToken((ids[0][0], ids[1][0]))
        prompts = [(_JUDGE.format(instruction or _INSTRUCTION, *pair), task) for pair in pairs]
        result = await task_all(service, exchange, prompts, field, **options)
        scores = [_probabilities(logprobs, True)[0] for logprobs, _ in result]
    tokens = sum(count for _, count in result)
    exchange.tokens = (tokens, 0)
    return scores, tokens


def _side(config: PoolingConfig, *names: str) -> str | None:
    """The first of these prompts that the model has, as sentence-transformers chooses for queries and documents."""
    return next((name for name in names if name in config.prompts), None)


async def _joined(
    service: Service, exchange: Exchange, pairs: Sequence[_Pair], truncate: int | None
) -> list[tuple[list[int], Classify]]:
    """The pairs as the tokenizer joins them."""
    result = []
    with service.text_request(exchange):
        for first, second in pairs:
            ids, begin = await service.engine.tokenize_pair(first, second, truncate)
            result.append((ids, Classify(second=begin)))
            await asyncio.sleep(0)
    return result


def _judges(service: Service) -> bool:
    """Whether the model is Qwen3-Reranker, whose config.json is that of any Qwen3: by its name."""
    names = (*service.model_names, service.arguments.model_path or "")
    flag = service.arguments.json_model_override_args.get("is_original_qwen3_reranker")
    return bool(flag) or any("qwen3-reranker" in name.lower() for name in names)


# -- what the model can do


def _pooling(service: Service) -> PoolingConfig | None:
    info = service.engine.model_info
    return None if info is None else info.pooling


def _require(service: Service, task: str | None) -> PoolingConfig:
    """Raise 400 unless the model makes vectors, by ``task`` if it is given."""
    config = _pooling(service)
    if config is None or task not in (None, config.task):
        can = "a model with a head that classifies" if task == "classify" else "one with --is-embedding"
        both = "a model with a head that classifies, or one with --is-embedding"
        raise _unsuitable(service, task or "make vectors", can if task else both)
    return config


def _require_generation(service: Service, field: str) -> None:
    if _pooling(service) is not None:
        raise ApiError(
            400,
            f"{field}: are scored by a model that generates text, and this one does not; serve another.",
            param=field,
            code="model_not_supported",
        )


def _unsuitable(service: Service, task: str, suitable: str) -> ApiError:
    return ApiError(
        400,
        f"model: {service.model_name!r} cannot {task}; serve {suitable}.",
        param="model",
        code="model_not_supported",
    )


def _task(config: PoolingConfig, activation: bool, prompt_name: str | None = None) -> Task:
    if config.task == "embed":
        return Embed(config.normalize, prompt_name)
    if prompt_name is not None:
        raise invalid("prompt_name: is for embeddings, and this model classifies.", param="prompt_name")
    return Classify(activation)


def _options(body: Any) -> dict[str, Any]:
    return {
        "priority": body.priority,
        "cache_salt": body.cache_salt,
        "label": body.rid,
        "truncate": body.truncate_prompt_tokens,
    }
