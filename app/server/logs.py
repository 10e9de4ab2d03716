"""The log handler of a server, from its arguments.

Only a program that owns its process uses this. The engine and the application only create records; the embedding
program decides where they go.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import TextIO

from actors.options import Arguments
from actors.runtime import current_actor, current_traceparent
from app.server.exchange import current_request_id
from telemetry.logs.lines import JsonLines, LogContext, TextLines
from telemetry.logs.output import OTHER_LOGGERS, LogOutput, install
from telemetry.logs.request_log import REQUEST_LOGGER

__all__ = ["log_output", "set_up_logging"]


def set_up_logging(arguments: Arguments, *, others: Sequence[str] = OTHER_LOGGERS) -> LogOutput:
    """Send the records of ``troupe`` and of the loggers ``others`` to standard error.

    Close the returned output, or leave it to the end of the process.
    """
    output = log_output(arguments, sys.stderr)
    install(output, level=arguments.log_level, http_level=arguments.log_level_http, others=others)
    return output


def log_output(arguments: Arguments, stream: TextIO) -> LogOutput:
    """The handler for these arguments."""
    lines = _formatter(arguments.log_format)
    requests = _formatter(arguments.log_requests_format or arguments.log_format)
    return LogOutput(
        stream,
        lines,
        formatters={REQUEST_LOGGER: requests},
        context=_context,
        secrets=[*arguments.api_keys, *([arguments.admin_api_key] if arguments.admin_api_key else [])],
    )


def _formatter(name: str) -> logging.Formatter:
    return JsonLines() if name == "json" else TextLines()


def _context() -> LogContext:
    return LogContext(
        traceparent=current_traceparent.get(), request_id=current_request_id.get(), actor=current_actor.get()
    )
