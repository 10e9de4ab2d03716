"""``POST /v1/embeddings``."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta
from quart import Response

from actors.protocol.requests import SamplingParams
from app.apis.openai.requests import Label, Name, Salt, Text, TokenId, TokenIds
from app.server.errors import ApiError, invalid
from app.server.exchange import Exchange
from app.server.service import Service, json_response
from kernels.contract.tasks import Embed, Task, Vector

__all__ = [
    "EmbeddingsAnswer",
    "EmbeddingsRequest",
    "Truncation",
    "check_dimensions",
    "cut_all",
    "embed_all",
    "embeddings",
    "embeds",
    "encoded",
    "inputs_of",
    "normalizes",
    "require_embeddings",
    "task_all",
]

MAX_INPUTS = 2048
_AT_ONCE = 64  # inputs of one request in the engine: others are not refused for them


Truncation = Annotated[int, Meta(ge=-1, lt=2**31)]


class EmbeddingsRequest(msgspec.Struct, kw_only=True):
    """``POST /v1/embeddings``. ``input``: a text, token ids, or up to 2,048 of either. ``dimensions``: keep so many
    first numbers of each vector, scaled to length 1 again if the whole one was. ``prompt_name``: the model's prompt
    that stands before each text. ``truncate_prompt_tokens``: keep so many first tokens of an input; -1: as many
    as fit."""

    input: Text | Annotated[list[Text | TokenId | TokenIds], Meta(min_length=1, max_length=4_194_304)]
    model: Name | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    user: Name | None = None
    cache_salt: Salt | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    rid: Label | None = None
    prompt_name: Name | None = None
    truncate_prompt_tokens: Truncation | None = None


class EmbeddingObject(msgspec.Struct, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingsUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingsAnswer(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingsUsage


async def embeddings(service: Service, exchange: Exchange, body: EmbeddingsRequest) -> Response:
    """The vector of each input: the model's last hidden state at its last token, of length 1."""
    model = service.check_model(body.model, exchange)
    require_embeddings(service, model)
    check_dimensions(service, body.dimensions)
    options = {
        "priority": body.priority,
        "cache_salt": body.cache_salt,
        "label": body.rid,
        "truncate": body.truncate_prompt_tokens,
    }
    inputs = inputs_of(body.input, "input")
    result = await embed_all(service, exchange, inputs, "input", body.prompt_name, **options)
    total = sum(tokens for _, tokens in result)
    exchange.tokens = (total, 0)
    as_text = body.encoding_format == "base64"
    data: list[EmbeddingObject] = []
    async for vector in cut_all(result, body.dimensions, normalizes(service)):
        data.append(EmbeddingObject(index=len(data), embedding=encoded(vector, as_text)))
    return json_response(EmbeddingsAnswer(data=data, model=model, usage=EmbeddingsUsage(total, total)))


def embeds(service: Service) -> bool:
    """Whether the served model was trained for embeddings."""
    info = service.engine.model_info
    pooling = getattr(info, "pooling", None)
    return service.arguments.is_embedding if pooling is None else pooling.task == "embed"


def require_embeddings(service: Service, model: str) -> None:
    """Raise 400 unless the served model was trained for embeddings."""
    if not embeds(service):
        raise ApiError(
            400,
            f"model: {model!r} was not trained for embeddings; serve a model that was, with --is-embedding.",
            param="model",
            code="model_not_supported",
        )


def check_dimensions(service: Service, dimensions: int | None) -> None:
    """Raise 400 for more numbers than a vector has."""
    info = service.engine.model_info
    if dimensions is None or info is None:
        return
    size = info.hidden_size if info.pooling is None else info.pooling.vector_size(info.hidden_size)
    if 0 < size < dimensions:
        raise _too_many(size)


def _too_many(size: int) -> ApiError:
    return invalid(f"dimensions: this model's vectors have {size} numbers; ask for at most that.", param="dimensions")


def normalizes(service: Service) -> bool:
    """Whether the served model's vectors have length 1."""
    info = service.engine.model_info
    return info is None or info.pooling is None or info.pooling.normalize


async def embed_all(
    service: Service,
    exchange: Exchange,
    inputs: Sequence[str | list[int]],
    field: str,
    prompt_name: str | None = None,
    **options: Any,
) -> list[tuple[np.ndarray, int]]:
    """The vector of each input, and its tokens. ``field``: the inputs' name in this API. ``prompt_name``: see
    ``Embed``. ``options``: those of ``Service.submit``."""
    task = Embed(normalizes(service), prompt_name)
    return await task_all(service, exchange, [(prompt, task) for prompt in inputs], field, **options)


async def task_all(
    service: Service, exchange: Exchange, inputs: Sequence[tuple[str | list[int], Task]], field: str, **options: Any
) -> list[tuple[np.ndarray, int]]:
    """As ``embed_all``, by the task of each input."""
    names = {"prompt": field}
    places = asyncio.Semaphore(max(1, min(_AT_ONCE, service.room)))

    async def one(prompt: str | list[int], task: Task) -> tuple[np.ndarray, int]:
        async with places:
            stream = service.submit(exchange, prompt, SamplingParams(), rename=names, task=task, **options)
            await service.accepted([stream], names)
            vector, tokens = b"", 0
            async for delta in stream:
                tokens = delta.usage.prompt_tokens
                if isinstance(delta.result, Vector):
                    vector = delta.result.values
            return np.frombuffer(vector, np.float32), tokens

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(prompt, task)) for prompt, task in inputs]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def inputs_of(given: str | Sequence[str | int | list[int]], field: str) -> Sequence[str | list[int]]:
    """The prompts of a body's ``field``. Raises 400 for a mixture."""
    if isinstance(given, str):
        return [given]
    ids = [one for one in given if isinstance(one, int)]
    if len(ids) == len(given):
        return [ids]
    if ids:
        raise invalid(f"{field}: is a list of texts, or of token ids, or of lists of them; not a mixture.", param=field)
    if len(given) > MAX_INPUTS:
        raise invalid(f"{field}: has {len(given)} entries; at most {MAX_INPUTS} are read. Send fewer.", param=field)
    return [one for one in given if not isinstance(one, int)]


async def cut_all(
    found: list[tuple[np.ndarray, int]], dimensions: int | None, normalize: bool = True
) -> AsyncIterator[np.ndarray]:
    """The vectors of :func:`embed_all`, each of ``dimensions`` numbers, and with ``normalize`` of length 1 again.
    Others run between two of them."""
    for vector, _ in found:
        yield _cut(vector, dimensions, normalize)
        await asyncio.sleep(0)


def _cut(vector: np.ndarray, dimensions: int | None, normalize: bool) -> np.ndarray:
    """The first numbers of a vector. Raises 400 for more than there are."""
    if dimensions is None or dimensions == vector.size:
        return vector
    if dimensions > vector.size:
        raise _too_many(vector.size)
    first = vector[:dimensions]
    return (first / max(float(np.linalg.norm(first)), 1e-12)).astype(np.float32) if normalize else first


def encoded(vector: np.ndarray, as_text: bool) -> list[float] | str:
    """``as_text``: little-endian float32 in base64."""
    if as_text:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers
