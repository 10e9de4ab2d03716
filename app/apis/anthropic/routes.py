"""The routes of Anthropic's API. ``/v1/models`` is shared with OpenAI's."""

from __future__ import annotations

from app.apis.anthropic.answers import MessageAnswer
from app.apis.anthropic.dialect import ANTHROPIC
from app.apis.anthropic.handlers import TokenCount, count_tokens, create_message
from app.apis.anthropic.requests import (
    AnthropicTool,
    CountRequest,
    MessagesRequest,
    OutputConfig,
    Thinking,
    ToolChoiceField,
)
from app.server.auth import AccessLevel
from app.server.routes import Route

__all__ = ["ROUTES"]

_NESTED = (
    ("tools", AnthropicTool),
    ("tool_choice", ToolChoiceField),
    ("thinking", Thinking),
    ("output_config", OutputConfig),
)
_SPELLING = (("prompt", "messages"), ("stop", "stop_sequences"))

ROUTES: tuple[Route, ...] = (
    Route(
        path="/v1/messages",
        methods=("POST",),
        level=AccessLevel.USER,
        handler=create_message,
        summary="Answer a conversation",
        body=MessagesRequest,
        media=("application/json", "text/event-stream"),
        answer=MessageAnswer,
        tag="anthropic",
        id_prefix="msg_",
        operation="chat",
        spelling=_SPELLING,
        needs_engine=True,
        nested=_NESTED,
        dialect=ANTHROPIC,
    ),
    Route(
        path="/v1/messages/count_tokens",
        methods=("POST",),
        level=AccessLevel.USER,
        handler=count_tokens,
        summary="The tokens of a conversation",
        body=CountRequest,
        answer=TokenCount,
        tag="anthropic",
        needs_engine=True,
        nested=_NESTED,
        dialect=ANTHROPIC,
    ),
)
