"""Encoding: renders conversations, and encodes and decodes by the tokenizers in turn."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import TypeVar

from actors.options import Arguments
from actors.protocol import Decode, DecodeTokens, Encode, TokenizerProtocol
from actors.protocol.requests import Chat, EngineFailed, InvalidRequest, RequestFailed
from actors.runtime import ActorDied, ActorRef, AskTimeout, Message
from actors.text.rendering import Rendering
from actors.text.served_model import ServedModel
from telemetry.timeline import RequestTimeline

__all__ = ["Encoding", "characters"]

R = TypeVar("R")

_TIMEOUT_SECONDS = 120.0  # seconds for a reply of a tokenizer


class Encoding:
    """The tokenizers and renderers of one engine."""

    def __init__(
        self,
        arguments: Arguments,
        model: ServedModel,
        *,
        tokenizers: Sequence[ActorRef[TokenizerProtocol]],
        rendering: Rendering,
    ) -> None:
        self._arguments = arguments
        self._model = model
        self._tokenizers = tokenizers
        self._rendering = rendering
        self._turns = itertools.count()

    async def tokenize(
        self, prompt: str | Chat, timeline: RequestTimeline, tenant: str, max_tokens: int | None = None
    ) -> list[int]:
        """Token ids of a request's prompt, at most ``max_tokens`` of a text. Raises as :meth:`ask`, and InvalidRequest
        for a prompt that cannot fit.

        For a conversation, the hop includes the rendering and counts the characters of the rendered text.
        """
        began = rendered = time.monotonic()
        hop = timeline.begin("tokenize", began, characters=characters(prompt))
        if isinstance(prompt, Chat):
            text = await self._text_of(prompt, tenant)
            rendered = time.monotonic()
            hop.attributes |= {"characters": len(text), "render": rendered - began}
            reply = await self.ask(Encode(prompt=text, add_special_tokens=False))
        else:
            reply = await self.ask(Encode(prompt=prompt, max_tokens=max_tokens))
        now = time.monotonic()
        timeline.finish(hop, now, tokens=len(reply.token_ids), wait=max(now - rendered - reply.seconds, 0.0))
        return reply.token_ids

    async def encode(self, prompt: str | Chat, *, add_special_tokens: bool = True, tenant: str = "") -> list[int]:
        """Token ids of a text, or of a conversation, whose template adds the special tokens itself."""
        if isinstance(prompt, Chat):
            prompt, add_special_tokens = await self._text_of(prompt, tenant), False
        return (await self.ask(Encode(prompt=prompt, add_special_tokens=add_special_tokens))).token_ids

    async def encode_pair(self, first: str, second: str, truncate: int | None = None) -> tuple[list[int], int]:
        """Token ids of a pair of texts, and where the second one begins: see ``TextCodec.encode_pair``. ``truncate``:
        see ``ServedModel.truncation_limit``."""
        max_tokens = self._model.truncation_limit(truncate)
        if max_tokens is None:
            self.check_characters(len(first) + len(second))
        encoded = await self.ask(Encode(prompt=first, pair=second, max_tokens=max_tokens))
        return encoded.token_ids, encoded.second

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        return await self.ask(Decode(token_ids=self._checked(token_ids), skip_special_tokens=skip_special_tokens))

    async def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Each token's own text; U+FFFD for a token that is part of a character."""
        return await self.ask(DecodeTokens(token_ids=self._checked(token_ids)))

    def _checked(self, token_ids: Sequence[int]) -> list[int]:
        ids = list(token_ids)
        if ids:
            self._model.check_ids(ids)
        return ids

    async def render(self, chat: Chat, tenant: str = "") -> str:
        """Render a conversation to text. Tenants take turns."""
        self._model.require_codec()
        return await self._rendering.render(chat, tenant)

    async def _text_of(self, chat: Chat, tenant: str) -> str:
        text = await self.render(chat, tenant)
        self.check_characters(len(text))
        return text

    def check_characters(self, count: int) -> None:
        """Raise InvalidRequest for a text that is too long to fit in any encoding."""
        model = self._model
        most = model.require_codec().max_chars(model.context_length)
        if count > most and not self._arguments.allow_auto_truncate:
            # LiteLLM and others recognize the error by "this model's maximum context length is".
            raise InvalidRequest(
                f"The prompt has {count} characters; this model's maximum context length is {model.context_length} "
                f"tokens, which are at most {most} characters. Shorten the prompt.",
                param="prompt",
                code="context_length_exceeded",
            )

    async def spellings(self, word: str) -> list[tuple[int, ...]]:
        """The token sequences of a bad word: at the start of a text, and after a space."""
        bare = await self.encode(word, add_special_tokens=False)
        spaced = await self.encode(" " + word.lstrip(" "), add_special_tokens=False)
        return list(dict.fromkeys(tuple(ids) for ids in (bare, spaced) if ids))

    async def ask(self, message: Message[TokenizerProtocol, R]) -> R:
        """Ask the next tokenizer in turn.

        Raises InvalidRequest without a tokenizer, RequestFailed if one dies of this message twice or hangs,
        EngineFailed if it has stopped.
        """
        self._model.require_codec()
        refs = self._tokenizers
        ref = refs[next(self._turns) % len(refs)]
        try:
            try:
                return await ref.ask(message, timeout=_TIMEOUT_SECONDS)
            except ActorDied:
                # Another text may have killed it: retry once with the next incarnation.
                return await ref.ask(message, timeout=_TIMEOUT_SECONDS)
        except ActorDied as error:
            if not ref.is_alive():
                raise EngineFailed("The engine was stopped.") from error
            raise RequestFailed("The tokenizer failed on this request.") from error
        except AskTimeout as error:
            raise RequestFailed(f"The tokenizer did not answer within {_TIMEOUT_SECONDS:g} s. Try again.") from error


def characters(prompt: str | Chat) -> int:
    """Characters of a text, or a lower bound for a conversation."""
    if isinstance(prompt, str):
        return len(prompt)
    texts = (message.get("content") for message in prompt.messages)
    return sum(len(text) for text in texts if isinstance(text, str))
