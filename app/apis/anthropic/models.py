"""The served model in Anthropic's form, for clients that send ``anthropic-version``."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

import msgspec
from quart import request

from app.server.service import Service

__all__ = ["ModelInfo", "ModelPage", "model_info", "model_page"]


class ModelInfo(msgspec.Struct, kw_only=True):
    """``created_at``: the start of the server. Tokens of prompt and answer together fit into ``max_input_tokens``."""

    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int | None
    max_tokens: int | None


class ModelPage(msgspec.Struct, kw_only=True):
    data: list[ModelInfo]
    has_more: bool
    first_id: str | None
    last_id: str | None


def model_info(service: Service, name: str) -> ModelInfo:
    context = service.engine.context_length or None
    return ModelInfo(
        id=name,
        display_name=name,
        created_at=datetime.fromtimestamp(service.created, UTC).isoformat().replace("+00:00", "Z"),
        max_input_tokens=context,
        max_tokens=context,
    )


def model_page(service: Service) -> ModelPage:
    """Names of the model and of its adapters, from ``after_id`` or up to ``before_id``, at most ``limit`` of them."""
    names = service.all_names
    limit = request.args.get("limit", 20, type=int)
    if (after := request.args.get("after_id")) in names:
        names = names[names.index(after) + 1 :]
    if (before := request.args.get("before_id")) in names:
        names = names[: names.index(before)]
    shown = names[: max(1, limit)]
    return ModelPage(
        data=[model_info(service, name) for name in shown],
        has_more=len(shown) < len(names),
        first_id=shown[0] if shown else None,
        last_id=shown[-1] if shown else None,
    )
