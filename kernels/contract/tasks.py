"""The task of a request, and the kind of its result.

Generate   tokens, sampled one after the other
Embed      a vector: the final hidden state of the prompt's last token
Score      a number: the sum of log-probabilities of the prompt's last tokens
Classify   a vector: a probability for each class of the model's classification head
NextToken  a vector: the log-probabilities of some tokens as the next one
"""

from __future__ import annotations

from typing import TypeAlias, get_args

import msgspec

__all__ = [
    "TASK_NAMES",
    "Classify",
    "Embed",
    "Generate",
    "NextToken",
    "Number",
    "Score",
    "Task",
    "TaskResult",
    "Vector",
    "task_name",
]


class Generate(msgspec.Struct, frozen=True, array_like=True, tag="generate"):
    """Sample tokens until the sequence ends."""


class Embed(msgspec.Struct, frozen=True, array_like=True, tag="embed"):
    """The hidden state after the final norm, at the prompt's last token, or as the model's pooling says.
    ``normalize``: divide it by its L2 norm. ``prompt``: the name of the model's prompt that stands before a text; None:
    its default one, if it has one.

    The request's sampling must request log-probabilities, since steps without them may keep no hidden states.
    """

    normalize: bool = True
    prompt: str | None = None


class Score(msgspec.Struct, frozen=True, array_like=True, tag="score"):
    """The sum of the natural log-probabilities of prompt tokens ``start ..``, each after all tokens before it.

    ``start`` is at least 1: nothing precedes the first token.
    """

    start: int = 1

    def __post_init__(self) -> None:
        if self.start < 1:
            raise ValueError(f"start must be at least 1, not {self.start}: nothing precedes the first token")


class Classify(msgspec.Struct, frozen=True, array_like=True, tag="classify"):
    """The probability of each class of the model's classification head, or with ``activate`` false its plain numbers.

    ``second``: where the second text of a pair begins among the tokens; 0: there is one text.
    """

    activate: bool = True
    second: int = 0


class NextToken(msgspec.Struct, frozen=True, array_like=True, tag="next_token"):
    """The natural log-probability of each of the tokens ``ids`` as the one after the prompt, over the whole
    vocabulary."""

    ids: tuple[int, ...]


Task: TypeAlias = Generate | Embed | Score | Classify | NextToken


class Vector(msgspec.Struct, frozen=True, array_like=True, tag="vector"):
    """``values``: float32 [size], packed."""

    values: bytes


class Number(msgspec.Struct, frozen=True, array_like=True, tag="number"):
    value: float


TaskResult: TypeAlias = Vector | Number


def task_name(task: Task) -> str:
    """One of TASK_NAMES."""
    return str(type(task).__struct_config__.tag)


TASK_NAMES = tuple(str(kind.__struct_config__.tag) for kind in get_args(Task))
"""What ``ModelInfo.tasks`` may hold."""
