"""A conversation as the lessons build it, and its rendering into the text that the model reads.

`render` writes exactly what the chat template in model/tokenizer_config.json writes (a test holds them together), and
marks the pieces that the model has to learn: what the assistant says, the end of its turn included.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

__all__ = [
    "END_OF_TEXT",
    "MARKERS",
    "SPECIAL_TOKENS",
    "TURN_END",
    "TURN_START",
    "Conversation",
    "Exchange",
    "Lesson",
    "Segment",
    "render",
]

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END, *MARKERS)


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question and its answer; `thought` is what a thinking answer reasons first, `short` the answer in one word."""

    question: str
    answer: str
    thought: str = ""
    short: str = ""


Lesson = Callable[[Random], list[Exchange]]
"""One visit to a subject: an exchange, or several that follow from one another."""


@dataclass(slots=True)
class Conversation:
    """Messages in OpenAI's form. With `thinking`, the last run of assistant messages reasons aloud first."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    thinking: bool = False


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of rendered text; `learn` says whether the loss counts it."""

    text: str
    learn: bool


def render(conversation: Conversation) -> list[Segment]:
    """The segments of a conversation. Their boundaries are special tokens, so each may be encoded by itself."""
    messages = list(conversation.messages)
    pieces: list[Segment] = []
    system = str(messages.pop(0)["content"]) if messages and messages[0]["role"] == "system" else ""
    if conversation.tools:
        listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in conversation.tools)
        head = f"{system}\n\n" if system else ""
        system = (
            f"{head}You have tools. Each line describes one:\n{listed}\n"
            "Use a tool by answering in this form, one block for each call:\n"
            '<tool_call>\n{"name": "tool", "arguments": {"key": "value"}}\n</tool_call>'
        )
    if system:
        pieces.append(Segment(f"{TURN_START}system\n{system}{TURN_END}\n", False))
    last_user = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
    for index, message in enumerate(messages):
        role, content = message["role"], message.get("content") or ""
        if role == "tool":
            text = f"{TURN_START}tool\n<tool_response>\n{content}\n</tool_response>{TURN_END}\n"
            pieces.append(Segment(text, False))
        elif role == "user":
            pieces.append(Segment(f"{TURN_START}user\n{content}{TURN_END}\n", False))
        else:
            calls = "\n".join(
                f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
                for call in message.get("tool_calls", ())
            )
            answer = f"{content}\n{calls}" if content and calls else content + calls
            thinks = conversation.thinking and index > last_user
            thought = f"<think>\n{message.get('reasoning_content', '') if thinks else ''}\n</think>\n\n"
            pieces.append(Segment(f"{TURN_START}assistant\n{'' if thinks else thought}", False))
            pieces.append(Segment(f"{thought if thinks else ''}{answer}{TURN_END}", True))
            pieces.append(Segment("\n", False))
    return pieces
