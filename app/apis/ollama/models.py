"""``GET /api/tags``, ``/api/ps``, ``/api/version`` and ``POST /api/show``: the one served model."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from quart import Response

from app.apis.ollama.parameters import model_of
from app.apis.ollama.requests import ShowRequest
from app.server.exchange import Exchange
from app.server.service import Service, json_response

__all__ = ["OllamaModels", "RunningList", "ShowAnswer", "VersionAnswer", "running", "show", "tags", "version"]

_VERSION = "0.12.11"
"""The version of Ollama whose API this is: clients compare it with what they need."""

_FOREVER = timedelta(days=36500)


class Details(msgspec.Struct, kw_only=True):
    parent_model: str = ""
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class Model(msgspec.Struct, kw_only=True):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details


class OllamaModels(msgspec.Struct):
    models: list[Model]


class Running(msgspec.Struct, kw_only=True):
    name: str
    model: str
    size: int
    digest: str
    details: Details
    expires_at: str
    size_vram: int
    context_length: int


class RunningList(msgspec.Struct):
    models: list[Running]


class ShowAnswer(msgspec.Struct, kw_only=True):
    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class VersionAnswer(msgspec.Struct):
    version: str


def _time(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")


def _tagged(name: str) -> str:
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


def _details(service: Service) -> Details:
    info = service.engine.model_info
    family = service.engine.architecture.removesuffix("ForCausalLM").lower()
    arguments = service.arguments
    return Details(
        format="gguf" if str(arguments.model_path or "").endswith(".gguf") else "safetensors",
        family=family,
        families=[family],
        parameter_size="" if info is None else _short(info.parameters),
        quantization_level=arguments.quantization or ("" if info is None else info.dtype),
    )


def _short(count: int) -> str:
    for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= unit:
            return f"{count / unit:.1f}{letter}"
    return str(count)


def _common(service: Service, name: str) -> dict[str, Any]:
    info = service.engine.model_info
    tagged = _tagged(name)
    return {
        "name": tagged,
        "model": tagged,
        "size": 0 if info is None else info.weight_bytes,
        "digest": hashlib.sha256(service.fingerprint.encode()).hexdigest(),
        "details": _details(service),
    }


async def tags(service: Service, exchange: Exchange, body: None) -> Response:
    """The served model, once for each of its names, and its adapters."""
    modified = _time(datetime.fromtimestamp(service.created, UTC))
    names = service.all_names
    return json_response(OllamaModels([Model(**_common(service, name), modified_at=modified) for name in names]))


async def running(service: Service, exchange: Exchange, body: None) -> Response:
    """The served model, which is loaded when the engine is ready."""
    info = service.engine.model_info
    if service.status.phase not in ("ready", "draining"):
        return json_response(RunningList([]))
    on_device = 0 if info is None or info.device.startswith("cpu") else info.weight_bytes + info.cache_bytes
    model = Running(
        **_common(service, service.model_name),
        expires_at=_time(datetime.now(UTC) + _FOREVER),
        size_vram=on_device,
        context_length=service.engine.context_length,
    )
    return json_response(RunningList([model]))


async def show(service: Service, exchange: Exchange, body: ShowRequest) -> Response:
    """What is known of the model. The template is Jinja, which the server renders."""
    model_of(service, body.model or body.name)
    engine, form = service.engine, service.output_format
    info, details = engine.model_info, _details(service)
    capabilities = ["completion"]
    if engine.chats and form.tools is not None:
        capabilities.append("tools")
    if service.arguments.completion_template is not None:
        capabilities.append("insert")
    if form.reasoning_format is not None:
        capabilities.append("thinking")
    facts: dict[str, Any] = {
        "general.architecture": details.family,
        "general.parameter_count": 0 if info is None else info.parameters,
        f"{details.family}.context_length": engine.context_length,
        f"{details.family}.vocab_size": engine.vocab_size,
    }
    if info is not None:
        facts[f"{details.family}.block_count"] = info.layers
    return json_response(
        ShowAnswer(
            modelfile=f"FROM {_tagged(service.model_name)}",
            parameters="\n".join(f"{name} {value}" for name, value in engine.generation_defaults.items()),
            template=engine.chat_template or "",
            details=details,
            model_info=facts,
            capabilities=capabilities,
            modified_at=_time(datetime.fromtimestamp(service.created, UTC)),
        )
    )


async def version(service: Service, exchange: Exchange, body: None) -> Response:
    """The version of Ollama's API."""
    return json_response(VersionAnswer(_VERSION))
