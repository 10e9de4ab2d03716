"""``GET /v1/models`` and ``GET /v1/models/{model}``."""

from __future__ import annotations

from typing import Literal

import msgspec
from quart import Response

from app.exchange import Exchange
from app.service import Service, json_response

__all__ = ["ModelCard", "ModelList", "get_model", "list_models"]


class ModelCard(msgspec.Struct, kw_only=True):
    """One model. ``root``: where it was read from; ``max_model_len``: tokens of prompt and answer together."""

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


def _card(service: Service) -> ModelCard:
    return ModelCard(
        id=service.model_name,
        created=service.created,
        root=service.arguments.model_path or service.model_name,
        max_model_len=service.engine.context_length or None,
    )


async def list_models(service: Service, exchange: Exchange, body: None) -> Response:
    """The served model."""
    return json_response(ModelList(data=[_card(service)]))


async def get_model(service: Service, exchange: Exchange, name: str) -> Response:
    """The served model, by its name."""
    service.check_model(name)
    return json_response(_card(service))
