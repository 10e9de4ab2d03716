"""``GET /v1/models`` and ``GET /v1/models/{model}``."""

from __future__ import annotations

from typing import Literal

import msgspec
from quart import Response

from actors.requests.adapters import Adapter
from app.apis.anthropic.models import model_info, model_page
from app.server.exchange import Exchange
from app.server.service import Service, json_response

__all__ = ["ModelCard", "ModelList", "get_model", "list_models"]


class ModelCard(msgspec.Struct, kw_only=True):
    """One name of the model, or an adapter. ``root``: the first name, never a path of the server. ``parent``: the model
    of an adapter. ``max_model_len``: tokens of prompt and answer."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "troupe"
    root: str
    parent: str | None = None
    max_model_len: int | None = None


class ModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


def _card(service: Service, name: str, adapter: Adapter | None = None) -> ModelCard:
    return ModelCard(
        id=name,
        created=service.created if adapter is None else adapter.created,
        root=service.model_name if adapter is None else adapter.name,
        parent=None if adapter is None else service.model_name,
        max_model_len=service.engine.context_length or None,
    )


async def list_models(service: Service, exchange: Exchange, body: None) -> Response:
    """The served model, once for each of its names, and its adapters."""
    if exchange.dialect.name == "anthropic":
        return json_response(model_page(service))
    models = [_card(service, name) for name in service.model_names]
    adapters = [_card(service, each.name, each) for each in service.engine.adapters]
    return json_response(ModelList(data=[*models, *adapters]))


async def get_model(service: Service, exchange: Exchange, name: str) -> Response:
    """The served model, by one of its names, or an adapter."""
    name = service.check_model(name, exchange)
    if exchange.dialect.name == "anthropic":
        return json_response(model_info(service, name))
    adapter = None if exchange.adapter is None else service.engine.adapters.find(exchange.adapter)
    return json_response(_card(service, name, adapter))
