"""The routes of SGLang's native API."""

from __future__ import annotations

from app.apis.sglang.adapters import (
    AdaptersAnswer,
    LoadAdapterRequest,
    UnloadAdapterRequest,
    load_lora_adapter,
    unload_lora_adapter,
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
from app.server.routes import Route

__all__ = ["ROUTES"]

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
            path=f"{prefix}/{name}_lora_adapter",
            methods=("POST",),
            level=AccessLevel.ADMIN,
            handler=handler,
            summary=summary,
            body=body,
            answer=AdaptersAnswer,
            tag="operation",
            needs_engine=True,
        )
        for prefix in ("", "/v1")
        for name, handler, body, summary in (
            ("load", load_lora_adapter, LoadAdapterRequest, "Load a LoRA adapter from a directory of the server"),
            ("unload", unload_lora_adapter, UnloadAdapterRequest, "Unload a LoRA adapter when its requests have ended"),
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
