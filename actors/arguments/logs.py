"""The arguments of the logs."""

from __future__ import annotations

from actors.arguments.argument import Argument

__all__ = ["LOG_ARGUMENTS"]

_LEVELS = ("debug", "info", "warning", "error", "critical")
_LEVEL_SYNONYMS = {"warn": "warning", "fatal": "critical", "trace": "debug"}
_FORMATS = ("text", "json")

LOG_ARGUMENTS: tuple[Argument, ...] = (
    Argument(
        name="log-level",
        kind="str",
        default="info",
        choices=_LEVELS,
        synonyms=_LEVEL_SYNONYMS,
        group="Logging",
        help="The least severe records to log.",
    ),
    Argument(
        name="log-level-http",
        aliases=("uvicorn-log-level",),
        kind="str",
        default=None,
        default_text="as --log-level",
        choices=_LEVELS,
        synonyms=_LEVEL_SYNONYMS,
        group="Logging",
        help="The same for the HTTP server; requests are listed from info on, health checks and metrics never.",
    ),
    Argument(
        name="log-format",
        kind="str",
        default="text",
        choices=_FORMATS,
        group="Logging",
        help="How records are written to standard error: as text, or as one JSON object a line.",
    ),
    Argument(
        name="access-log-exclude-prefixes",
        aliases=("uvicorn-access-log-exclude-prefixes", "disable-access-log-for-endpoints"),
        kind="names",
        default=(),
        group="Logging",
        metavar="PATH,...",
        help="Requests whose path begins so are not listed; health checks and metrics never are.",
    ),
    Argument(
        name="log-requests",
        aliases=("enable-log-requests",),
        opposites=("disable-log-requests",),
        kind="flag",
        default=False,
        group="Logging",
        help="Log each request's counts and times at its end, at level info; --log-requests-level says what else.",
    ),
    Argument(
        name="log-requests-level",
        kind="int",
        default=2,
        minimum=0,
        maximum=3,
        group="Logging",
        help="What --log-requests tells: 0 ids, counts and times; 1 and the sampling parameters; 2 and up to 2048 "
        "characters of input and output; 3 and all of them.",
    ),
    Argument(
        name="log-requests-format",
        kind="str",
        default=None,
        default_text="as --log-format",
        choices=_FORMATS,
        group="Logging",
        help="How --log-requests writes.",
    ),
)
