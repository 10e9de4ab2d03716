"""LoRA adapters at run time: SGLang's ``/load_lora_adapter`` and ``/unload_lora_adapter``, vLLM's under ``/v1``."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta
from quart import Response

from actors.protocol.requests import LIMITS, InvalidRequest
from app.apis.sglang.requests import AdapterName
from app.server.dialect import Dialect
from app.server.errors import ApiError, ErrorBody
from app.server.exchange import Exchange
from app.server.service import Service, json_response
from app.understudy.adapters import included_adapter, is_included_model

__all__ = [
    "SGLANG_ADAPTERS",
    "AdaptersAnswer",
    "LoadAdapterRequest",
    "UnloadAdapterRequest",
    "VllmLoadAdapterRequest",
    "load_lora_adapter",
    "unload_lora_adapter",
    "vllm_load_lora_adapter",
    "vllm_unload_lora_adapter",
]


_TEXT = "text/plain; charset=utf-8"


class LoadAdapterRequest(msgspec.Struct, kw_only=True):
    """``lora_path``: a directory of the server in PEFT's format, never a URL, or the name of an included adapter if
    the included model is served. ``pinned``: never unload it to make room
    for another."""

    lora_name: AdapterName
    lora_path: Annotated[str, Meta(min_length=1, max_length=LIMITS.path_chars)]
    pinned: bool | None = None


class VllmLoadAdapterRequest(LoadAdapterRequest, kw_only=True):
    """``load_inplace``: replace the adapter of this name, whose running requests end with it. Without ``pinned`` the
    new one is pinned as the old one is."""

    load_inplace: bool | None = None


class UnloadAdapterRequest(msgspec.Struct, kw_only=True):
    lora_name: AdapterName


class AdaptersAnswer(msgspec.Struct, kw_only=True):
    """``loaded_adapters``: the directory of each."""

    success: bool = True
    error_message: str = ""
    loaded_adapters: dict[str, str]


class AdaptersError(msgspec.Struct, kw_only=True):
    """SGLang's members, and ``error`` as elsewhere."""

    success: bool = False
    error_message: str
    error: ErrorBody


class AdaptersDialect(Dialect):
    """Errors of SGLang's routes of adapters, whose clients read ``success`` and ``error_message``."""

    envelope = AdaptersError

    def body(self, error: ApiError, request_id: str) -> bytes:
        inner = ErrorBody(message=error.message, type=error.kind, param=error.param, code=error.code)
        return msgspec.json.encode(AdaptersError(error_message=error.message, error=inner))


SGLANG_ADAPTERS = AdaptersDialect()


async def load_lora_adapter(service: Service, exchange: Exchange, body: LoadAdapterRequest) -> Response:
    """Load an adapter in every worker, beside running requests. The answer comes when requests may use it."""
    await _load(service, body)
    return _answer(service)


async def unload_lora_adapter(service: Service, exchange: Exchange, body: UnloadAdapterRequest) -> Response:
    """Take no more requests of an adapter. The answer comes when those that run have ended."""
    _require(service)
    await service.engine.unload_adapter(body.lora_name)
    return _answer(service)


async def vllm_load_lora_adapter(service: Service, exchange: Exchange, body: VllmLoadAdapterRequest) -> Response:
    """``load_lora_adapter`` with vLLM's answer, a sentence."""
    await _load(service, body, replace=bool(body.load_inplace))
    return Response(f"Success: LoRA adapter '{body.lora_name}' added successfully.", content_type=_TEXT)


async def vllm_unload_lora_adapter(service: Service, exchange: Exchange, body: UnloadAdapterRequest) -> Response:
    """``unload_lora_adapter`` with vLLM's answer, a sentence, and 404 for an unknown name."""
    _require(service)
    try:
        await service.engine.unload_adapter(body.lora_name)
    except InvalidRequest as error:
        raise ApiError(404, str(error), param=error.param, code="model_not_found") from None
    return Response(f"Success: LoRA adapter '{body.lora_name}' removed successfully.", content_type=_TEXT)


async def _load(service: Service, body: LoadAdapterRequest, *, replace: bool = False) -> None:
    _require(service)
    path = body.lora_path
    if is_included_model(service.arguments.model_path):
        path = included_adapter(path) or path
    await service.engine.load_adapter(body.lora_name, path, pinned=body.pinned, replace=replace)


def _require(service: Service) -> None:
    service.require_ready()
    if not service.engine.adapters.enabled:
        raise ApiError(409, "This server has no adapters: start it with --enable-lora.", code="adapters_disabled")


def _answer(service: Service) -> Response:
    loaded = {adapter.name: adapter.path for adapter in service.engine.adapters}
    return json_response(AdaptersAnswer(loaded_adapters=loaded))
