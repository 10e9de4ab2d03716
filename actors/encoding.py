"""Between text and token ids: conversations are rendered, and tokenizers encode and decode, one after the other."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import TypeVar

from actors.arguments import Arguments
from actors.company import Company
from actors.protocol import Decode, DecodeTokens, Encode, TokenizerProtocol
from actors.requests import Chat, EngineFailed, InvalidRequest, RequestFailed
from actors.runtime import ActorDied, AskTimeout, Message
from actors.served_model import ServedModel
from telemetry.timeline import RequestTimeline

__all__ = ["Encoding", "characters"]

R = TypeVar("R")

_TIMEOUT = 120.0  # seconds for an answer of a tokenizer


class Encoding:
    """The tokenizers and the renderer of one engine, as requests need them."""

    def __init__(self, arguments: Arguments, model: ServedModel, company: Company) -> None:
        self._arguments = arguments
        self._model = model
        self._company = company
        self._turns = itertools.count()

    async def tokenize(self, prompt: str | Chat, timeline: RequestTimeline, tenant: str) -> list[int]:
        """Token ids of a request's prompt; what :meth:`ask` raises, and InvalidRequest for what cannot fit.

        The hop of a conversation has the time of its rendering too, and its characters are the rendered text's.
        """
        began = rendered = time.monotonic()
        hop = timeline.begin("tokenize", began, characters=characters(prompt))
        if isinstance(prompt, Chat):
            text = await self._text_of(prompt, tenant)
            rendered = time.monotonic()
            hop.attributes |= {"characters": len(text), "render": rendered - began}
            reply = await self.ask(Encode(prompt=text, add_special_tokens=False))
        else:
            reply = await self.ask(Encode(prompt=prompt))
        now = time.monotonic()
        timeline.finish(hop, now, tokens=len(reply.token_ids), wait=max(now - rendered - reply.seconds, 0.0))
        return reply.token_ids

    async def encode(self, prompt: str | Chat, *, add_special_tokens: bool = True, tenant: str = "") -> list[int]:
        """Token ids of a text, or of a conversation (whose template brings its own special tokens)."""
        if isinstance(prompt, Chat):
            prompt, add_special_tokens = await self._text_of(prompt, tenant), False
        return (await self.ask(Encode(prompt=prompt, add_special_tokens=add_special_tokens))).token_ids

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
        """A conversation as text. Tenants take turns at the renderers."""
        self._model.require_codec()
        return await self._company.rendering.render(chat, tenant)

    async def _text_of(self, chat: Chat, tenant: str) -> str:
        text = await self.render(chat, tenant)
        self.check_characters(len(text))
        return text

    def check_characters(self, count: int) -> None:
        """Raise InvalidRequest for a text so long that nobody needs to encode it to know that it does not fit."""
        model = self._model
        most = model.require_codec().most_chars(model.context_length)
        if count > most and not self._arguments.allow_auto_truncate:
            raise InvalidRequest(
                f"The prompt has {count} characters; no more than {most} can fit this model's context of "
                f"{model.context_length} tokens. Shorten it.",
                param="prompt",
                code="context_length_exceeded",
            )

    async def spellings(self, word: str) -> list[tuple[int, ...]]:
        """A bad word's token sequences: at the start of a text, and after a space."""
        bare = await self.encode(word, add_special_tokens=False)
        spaced = await self.encode(" " + word.lstrip(" "), add_special_tokens=False)
        return list(dict.fromkeys(tuple(ids) for ids in (bare, spaced) if ids))

    async def ask(self, message: Message[TokenizerProtocol, R]) -> R:
        """Ask the next tokenizer in turn.

        Raises InvalidRequest without one, RequestFailed when it dies of this twice or hangs, EngineFailed when it has
        stopped.
        """
        self._model.require_codec()
        refs = self._company.tokenizers
        ref = refs[next(self._turns) % len(refs)]
        try:
            try:
                return await ref.ask(message, timeout=_TIMEOUT)
            except ActorDied:
                # It may have died of another's text: the next life gets this one once more.
                return await ref.ask(message, timeout=_TIMEOUT)
        except ActorDied as error:
            if not ref.is_alive():
                raise EngineFailed("The engine was stopped.") from error
            raise RequestFailed("The tokenizer failed on this request.") from error
        except AskTimeout as error:
            raise RequestFailed(f"The tokenizer did not answer within {_TIMEOUT:g} s. Try again.") from error


def characters(prompt: str | Chat) -> int:
    """Characters of a text, or at least so many of a conversation's."""
    if isinstance(prompt, str):
        return len(prompt)
    texts = (message.get("content") for message in prompt.messages)
    return sum(len(text) for text in texts if isinstance(text, str))
