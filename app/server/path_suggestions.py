"""The answer for an unknown path: the right path, or what to use instead."""

from __future__ import annotations

import re
from difflib import SequenceMatcher, get_close_matches

from app.server.routes import RouteTable

__all__ = ["suggest_path"]

_LONGEST_SHOWN = 128
_MAX_SEGMENTS = 8

_CHAT = "POST /v1/chat/completions"

_BEGINNINGS = {
    "/v1": "/v1/models",
    "/v1/engines": "/v1/models",
    "/engines": "/v1/models",
    "/v1/chat": "/v1/chat/completions",
    "/chat": "/v1/chat/completions",
    "/api": "/api/chat",
}
"""Paths that are the beginning of others, or older names of them."""

_BARE = frozenset({"/completion", "/completions", "/generate"})
"""Paths of one API whose names end the paths of others: they are meant only without another prefix than /v1."""

_NEARLY_ALIKE, _ALIKE = 0.9, 0.75

_NOT_BUILT: tuple[tuple[str, str, str], ...] = (
    # Pattern of paths, the API they belong to, and the path to use.
    (r"/(embed|embedding)", "This form of embeddings", "POST /v1/embeddings"),
    (r"/(v1/)?(audio|images|videos)(/.*)?", "Processing audio, images or video", _CHAT),
    (r"/(v1/)?realtime(/.*)?", "The realtime API", "POST /v1/responses with stream true"),
    (r"/(v1/)?uploads(/.*)?", "Uploading in parts", "POST /v1/files"),
    (r"/(v1/)?(assistants|threads|vector_stores|containers|evals)(/.*)?", "This API of OpenAI", _CHAT),
    (r"/(v1/)?(fine_tuning|fine-tunes|moderations)(/.*)?", "This API of OpenAI", ""),
    (r"/(v1/)?lora_adapters?(/.*)?", "This path", "POST /load_lora_adapter"),
    (r"/(anthropic/)?(v1/)?messages/(?!count_tokens$).*|/v1/complete", "This API of Anthropic", "POST /v1/messages"),
    (r"/v1(beta|alpha|beta1)?/models/.*:\w+", "Google's API", _CHAT),
    (r"/api/(pull|push|create|copy|delete|blobs)(/.*)?", "Ollama's management of models", "troupe serve MODEL"),
    (r"/slots/.*|/lora-adapters", "This path of llama.cpp's API", "GET /slots"),
    (r"/generate_stream", "TGI's API", "POST /generate with stream true"),
    (r"/info", "TGI's API", "GET /model_info"),
    (r"/(start|stop)_profile", "Profiling", ""),
    (
        r"/(update_weights|get_weights|init_weights|release_memory|resume_memory|destroy_weights)\w*",
        "Changing weights",
        "",
    ),
    (r"/(pause|is_paused)", "This path", "POST /pause_generation"),
    (r"/resume", "This path", "POST /continue_generation"),
    (r"/(sleep|wake_up|is_sleeping)", "Sleeping", "POST /pause_generation"),
    (r"/(parse_function_call|separate_reasoning)", "Reading texts for tool calls or thoughts", _CHAT),
    (r"/invocations", "This API", _CHAT),
    (r"/load", "This path", "GET /v1/loads"),
)
_PATTERNS = tuple((re.compile(pattern), what, use) for pattern, what, use in _NOT_BUILT)


def suggest_path(table: RouteTable, method: str, path: str) -> str:
    """A sentence that says what to use instead of ``path``. The path is looked up in the table only."""
    shown = ascii(path[:_LONGEST_SHOWN])
    plain = _plain(path)
    for api in (plain, plain[max(0, plain.rfind("/v1/")) :]):
        for pattern, what, use in _PATTERNS:
            if pattern.fullmatch(api):
                instead = f"use {use}" if use else "GET /openapi.json lists what there is"
                return f"{what} is not built here, so there is nothing at {shown}; {instead}."
    if right := _right_path(table, method, plain):
        verb = method if table.find(method, right) is not None else table.at(right)[0].methods[0]
        return f"There is nothing at {shown}; use {verb} {right}.{_base_url(path, right)}"
    if near := _nearest(table, plain, _ALIKE):
        return f"There is nothing at {shown}; did you mean {table.at(near)[0].methods[0]} {near}?"
    return f"There is nothing at {shown}; GET /openapi.json lists what there is."


def _base_url(path: str, right: str) -> str:
    """The advice on the base URL of a client that asked for ``path`` instead of ``right``; "" if it is not at fault."""
    result = path.split("/").count("v1")
    if right.startswith(("/v1/messages", "/api/")):
        return " This client's base URL has no /v1." if result > right.count("/v1/") else ""
    if result == 1 or not right.startswith("/v1/"):
        return ""
    return " The base URL of OpenAI clients ends in /v1, once."


def _nearest(table: RouteTable, plain: str, cutoff: float) -> str | None:
    """The most similar fixed path, with or without a /v1 before it."""
    fixed = [route.path for route in table.routes if not route.variables and len(route.path) > 1]
    result = [(plain, near) for near in get_close_matches(plain[:_LONGEST_SHOWN], fixed, n=1, cutoff=cutoff)]
    if not plain.startswith("/v1/"):
        spelled = f"/v1{plain[:_LONGEST_SHOWN]}"
        result += [(spelled, near) for near in get_close_matches(spelled, fixed, n=1, cutoff=cutoff)]
    return max(result, key=lambda pair: SequenceMatcher(None, *pair).ratio())[1] if result else None


def _plain(path: str) -> str:
    """The path with single slashes, no trailing slash, and one /v1."""
    segments = [segment for segment in path.split("/") if segment]
    first = next((place for place, segment in enumerate(segments) if segment != "v1"), len(segments))
    return "/" + "/".join(segments[max(0, first - 1) :] if first else segments)


def _right_path(table: RouteTable, method: str, plain: str) -> str | None:
    """The intended path of the table: without a prefix, or with a missing /v1 added."""
    if plain in _BEGINNINGS:
        return _BEGINNINGS[plain]
    segments = plain.split("/")[1:]
    if len(segments) > _MAX_SEGMENTS:
        return None
    candidates = [plain]
    for first in range(len(segments)):
        rest = "/" + "/".join(segments[first:])
        candidates += ["/v1" + rest, rest] if not rest.startswith("/v1/") else [rest]
        if rest in _BARE and segments[:first] not in ([], ["v1"]):
            candidates.remove(rest)
    # Ollama's and Anthropic's own paths are not ours with a prefix: /api/generate takes other bodies.
    if segments[0] == "api" and segments[1:2] != ["v1"]:
        return None
    known = [candidate for candidate in candidates if candidate != "/" and _is_known(table, candidate)]
    if known and known[0] in _BARE and (near := _nearest(table, plain, _NEARLY_ALIKE)) is not None:
        return near
    return next((c for c in known if table.find(method, c) is not None), known[0] if known else None)


def _is_known(table: RouteTable, path: str) -> bool:
    return any(not route.variables or path.startswith("/v1/models/") for route in table.at(path))
