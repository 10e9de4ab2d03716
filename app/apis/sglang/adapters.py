"""LoRA adapters at run time: SGLang's ``/load_lora_adapter`` and ``/unload_lora_adapter``, vLLM's under ``/v1``."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta
from quart import Response

from actors.protocol.requests import LIMITS
from app.apis.sglang.requests import AdapterName
from app.server.errors import ApiError
from app.server.exchange import Exchange
from app.server.service import Service, json_response
from app.understudy.adapters import included_adapter, is_included_model

__all__ = [
    "AdaptersAnswer",
    "LoadAdapterRequest",
    "UnloadAdapterRequest",
    "load_lora_adapter",
    "unload_lora_adapter",
]


class LoadAdapterRequest(msgspec.Struct, kw_only=True):
    """``lora_path``: a directory of the server in PEFT's format, never a URL, or the name of an included adapter if
    the included model is served. ``pinned``: never unload it to make room
    for another."""

    lora_name: AdapterName
    lora_path: Annotated[str, Meta(min_length=1, max_length=LIMITS.path_chars)]
    pinned: bool | None = None


class UnloadAdapterRequest(msgspec.Struct, kw_only=True):
    lora_name: AdapterName


class AdaptersAnswer(msgspec.Struct, kw_only=True):
    """``loaded_adapters``: the directory of each."""

    success: bool = True
    message: str
    loaded_adapters: dict[str, str]


async def load_lora_adapter(service: Service, exchange: Exchange, body: LoadAdapterRequest) -> Response:
    """Load an adapter in every worker, beside running requests. The answer comes when requests may use it."""
    _require(service)
    path = body.lora_path
    if is_included_model(service.arguments.model_path):
        path = included_adapter(path) or path
    await service.engine.load_adapter(body.lora_name, path, pinned=bool(body.pinned))
    return _answer(service, f"The adapter {body.lora_name!r} is loaded.")


async def unload_lora_adapter(service: Service, exchange: Exchange, body: UnloadAdapterRequest) -> Response:
    """Take no more requests of an adapter. The answer comes when those that run have ended."""
    _require(service)
    await service.engine.unload_adapter(body.lora_name)
    return _answer(service, f"The adapter {body.lora_name!r} is unloaded.")


def _require(service: Service) -> None:
    service.require_ready()
    if not service.engine.adapters.enabled:
        raise ApiError(409, "This server has no adapters: start it with --enable-lora.", code="adapters_disabled")


def _answer(service: Service, message: str) -> Response:
    loaded = {adapter.name: adapter.path for adapter in service.engine.adapters}
    return json_response(AdaptersAnswer(message=message, loaded_adapters=loaded))
