"""The arguments of the logs."""

from __future__ import annotations

from typing import Annotated, Literal

from actors.options.declaration import ArgumentSpec
from actors.options.metrics import MetricArguments

__all__ = ["LogArguments"]

_LEVELS = ("debug", "info", "warning", "error", "critical")
_LEVEL_SYNONYMS = {"warn": "warning", "fatal": "critical", "trace": "debug"}
_FORMATS = ("text", "json")


class LogArguments(MetricArguments, frozen=True, kw_only=True):
    """The arguments of the logs."""

    log_level: Annotated[
        Literal["debug", "info", "warning", "error", "critical"],
        ArgumentSpec(
            group="Logging",
            server_only=True,
            synonyms=_LEVEL_SYNONYMS,
            help="The lowest severity to log.",
        ),
    ] = "info"

    log_level_http: Annotated[
        Literal["debug", "info", "warning", "error", "critical"] | None,
        ArgumentSpec(
            group="Logging",
            server_only=True,
            aliases=("uvicorn-log-level",),
            default_text="as --log-level",
            synonyms=_LEVEL_SYNONYMS,
            help="The same for the HTTP server, whose access log has level info; health checks and metrics are never "
            "logged.",
        ),
    ] = None

    log_format: Annotated[
        Literal["text", "json"],
        ArgumentSpec(
            group="Logging",
            help="Format of records on standard error: text, or one JSON object a line.",
        ),
    ] = "text"

    access_log_exclude_prefixes: Annotated[
        tuple[str, ...],
        ArgumentSpec(
            group="Logging",
            server_only=True,
            aliases=("uvicorn-access-log-exclude-prefixes", "disable-access-log-for-endpoints"),
            kind="names",
            metavar="PATH,...",
            help="Exclude requests with these path prefixes from the access log; health checks and metrics are never "
            "logged.",
        ),
    ] = ()

    log_requests: Annotated[
        bool,
        ArgumentSpec(
            group="Logging",
            aliases=("enable-log-requests",),
            opposites=("disable-log-requests",),
            help="Log each request's counts and times at its end, at level info; --log-requests-level adds details.",
        ),
    ] = False

    log_requests_level: Annotated[
        int,
        ArgumentSpec(
            group="Logging",
            minimum=0,
            maximum=3,
            help="Details of --log-requests: 0 ids, counts and times; 1 also sampling parameters; 2 also up to 2048 "
            "characters of input and output; 3 all of input and output.",
        ),
    ] = 2

    log_requests_format: Annotated[
        Literal["text", "json"] | None,
        ArgumentSpec(
            group="Logging",
            default_text="as --log-format",
            help="Format of --log-requests.",
        ),
    ] = None
