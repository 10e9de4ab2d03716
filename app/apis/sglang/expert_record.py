"""The recorder of expert distribution: ``/start_``, ``/stop_`` and ``/dump_expert_distribution_record``."""

from __future__ import annotations

import logging

from quart import Response

from actors.boards.expert_recorder import ExpertRecorder
from app.server.errors import ApiError
from app.server.exchange import Exchange
from app.server.service import Service, json_response

__all__ = ["dump_expert_record", "start_expert_record", "stop_expert_record"]

_log = logging.getLogger("troupe.server")


async def start_expert_record(service: Service, exchange: Exchange, body: None) -> Response:
    """Begin a record; an earlier one is dropped."""
    recorder = _recorder(service)
    service.require_ready()
    info = service.engine.model_info
    if info is not None and not info.experts[1]:
        raise ApiError(409, "This model has no layers of experts: nothing to record.", code="no_experts")
    recorder.start()
    return json_response({"success": True, "message": "Experts are recorded from the next step on."})


async def stop_expert_record(service: Service, exchange: Exchange, body: None) -> Response:
    """Record no more steps; the record remains until it is dumped or another one starts."""
    _recorder(service).stop()
    return json_response({"success": True, "message": "No more experts are recorded."})


async def dump_expert_record(service: Service, exchange: Exchange, body: None) -> Response:
    """Write the record to a JSON file and begin a new one. ``path`` is the file."""
    recorder = _recorder(service)
    if recorder.record is None:
        raise ApiError(409, "Nothing is recorded: POST /start_expert_distribution_record first.", code="not_recorded")
    try:
        path = await service.engine.dump_expert_distribution()
    except OSError as error:
        _log.warning("The record of experts was not written: %s", error)
        raise ApiError(500, "The record was not written; see the log.", code="not_written") from None
    return json_response({"success": True, "message": "The record is written.", "path": str(path)})


def _recorder(service: Service) -> ExpertRecorder:
    """Raises ApiError with 409 if the server cannot record."""
    recorder = service.engine.expert_recorder
    if recorder.mode is None:
        raise ApiError(
            409,
            "Experts are not recorded here: start the server with --expert-distribution-recorder-mode.",
            code="recorder_disabled",
        )
    return recorder
