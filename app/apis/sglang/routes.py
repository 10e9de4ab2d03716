"""The routes of SGLang's native API."""

from __future__ import annotations

from app.apis.sglang.adapters import (
    SGLANG_ADAPTERS,
    AdaptersAnswer,
    LoadAdapterRequest,
    UnloadAdapterRequest,
    VllmLoadAdapterRequest,
    load_lora_adapter,
    unload_lora_adapter,
    vllm_load_lora_adapter,
    vllm_unload_lora_adapter,
)
from app.apis.sglang.expert_record import dump_expert_record, start_expert_record, stop_expert_record
from app.apis.sglang.handlers import (
    CloseSession,
    GenerateAnswer,
    OpenSession,
    close_session,
    generate,
    open_session,
)
from app.apis.sglang.requests import NATIVE_SPELLING, GenerateRequest, NativeSampling
from app.server.auth import AccessLevel
from app.server.dialect import OPENAI
from app.server.routes import Route

__all__ = ["ROUTES"]

_LOAD = "Load a LoRA adapter from a directory of the server"
_UNLOAD = "Unload a LoRA adapter when its requests have ended"

ROUTES: tuple[Route, ...] = (
    Route(
        path="/generate",
        methods=("POST", "PUT"),
        level=AccessLevel.USER,
        handler=generate,
        summary="Generate for one prompt or many, in SGLang's form",
        body=GenerateRequest,
        media=("application/json", "text/event-stream"),
        answer=GenerateAnswer,
        tag="native",
        id_prefix="gen-",
        operation="generate_content",
        spelling=NATIVE_SPELLING,
        nested=(("sampling_params", NativeSampling),),
        needs_engine=True,
    ),
    *(
        Route(
            path=f"/{name}_expert_distribution_record",
            methods=("POST",),
            level=AccessLevel.ADMIN,
            handler=handler,
            summary=summary,
            tag="operation",
        )
        for name, handler, summary in (
            ("start", start_expert_record, "Record which experts tokens take"),
            ("stop", stop_expert_record, "Record no more experts"),
            ("dump", dump_expert_record, "Write the record of experts to a file"),
        )
    ),
    *(
        Route(
            path=path,
            methods=("POST",),
            level=AccessLevel.ADMIN,
            handler=handler,
            summary=summary,
            body=body,
            answer=None if vllm else AdaptersAnswer,
            media=("text/plain",) if vllm else ("application/json",),
            dialect=OPENAI if vllm else SGLANG_ADAPTERS,
            tag="operation",
            needs_engine=True,
        )
        for path, vllm, handler, body, summary in (
            ("/load_lora_adapter", False, load_lora_adapter, LoadAdapterRequest, _LOAD),
            ("/v1/load_lora_adapter", True, vllm_load_lora_adapter, VllmLoadAdapterRequest, _LOAD),
            ("/unload_lora_adapter", False, unload_lora_adapter, UnloadAdapterRequest, _UNLOAD),
            ("/v1/unload_lora_adapter", True, vllm_unload_lora_adapter, UnloadAdapterRequest, _UNLOAD),
        )
    ),
    Route(
        path="/open_session",
        methods=("POST",),
        level=AccessLevel.USER,
        handler=open_session,
        summary="Open a session, whose requests continue each other",
        body=OpenSession,
        tag="native",
    ),
    Route(
        path="/close_session",
        methods=("POST",),
        level=AccessLevel.USER,
        handler=close_session,
        summary="Close a session",
        body=CloseSession,
        tag="native",
    ),
)
