"""Thoughts between ``<think>`` and ``</think>``, as DeepSeek-R1 and Qwen3 write them."""

from __future__ import annotations

__all__ = ["BEGIN", "END", "ends_in_thought"]

BEGIN, END = "<think>", "</think>"


def ends_in_thought(prompt: str) -> bool:
    """Whether the prompt leaves the model inside of a thought, as some templates do. ``prompt``: its end is enough."""
    return prompt.rstrip().endswith(BEGIN)
