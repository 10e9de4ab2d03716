"""Requests to the application by its test client, and the events of its streams."""

from __future__ import annotations

import msgspec

__all__ = [
    "BODY",
    "MESSAGES",
    "events",
    "post",
]

MESSAGES = [{"role": "user", "content": "Capital of France?"}]

BODY = {"model": "fake", "messages": MESSAGES}


def events(data: bytes) -> list:
    """Decoded events; [DONE] as a string; comments left out."""
    out = []
    for block in data.decode().split("\n\n"):
        if block.startswith("data: "):
            text = block.removeprefix("data: ")
            out.append(text if text == "[DONE]" else msgspec.json.decode(text))
    return out


async def post(application, body, path="/v1/chat/completions", **keywords):
    response = await application.test_client().post(path, json=body, **keywords)
    return response, await response.get_data()
