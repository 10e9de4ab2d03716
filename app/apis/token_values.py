"""Hidden states and experts of tokens in answers, in SGLang's forms."""

from __future__ import annotations

import base64

import msgspec
import numpy as np
import numpy.typing as npt

from app.apis.collecting import CollectedChoice

__all__ = ["all_states", "last_state", "packed_experts"]


def all_states(choice: CollectedChoice) -> msgspec.Raw:
    """A list as JSON: the states of all prompt tokens [prompt tokens, hidden], then one vector for each output token
    but the last, which no pass has read."""
    states = _states(choice)
    prompt = len(states) - max(0, choice.usage.completion_tokens - 1)
    parts = [states[:prompt].tolist(), *states[prompt:].tolist()] if len(states) else []
    return msgspec.Raw(msgspec.json.encode(parts))


def last_state(choice: CollectedChoice) -> list[float]:
    """The state from which the last output token was sampled; empty where this is the prompt's."""
    states = _states(choice)
    last: list[float] = states[-1].tolist() if choice.usage.completion_tokens > 1 else []
    return last


def _states(choice: CollectedChoice) -> npt.NDArray[np.float32]:
    """float32 [tokens, hidden]."""
    packed = b"".join(choice.hidden_states)
    return np.frombuffer(packed, dtype=np.float32).reshape(_tokens(choice) if packed else 0, -1 if packed else 0)


def packed_experts(choice: CollectedChoice, start: int) -> str:
    """The experts int32 [tokens, layers, chosen] in base64, of all tokens from ``start`` on but the last one."""
    packed = b"".join(choice.routed_experts)
    size = len(packed) // max(1, _tokens(choice))
    return base64.b64encode(memoryview(packed)[start * size :]).decode()


def _tokens(choice: CollectedChoice) -> int:
    """Tokens that a pass has read: all but the last one."""
    return choice.usage.prompt_tokens + choice.usage.completion_tokens - 1
