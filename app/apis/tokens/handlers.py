"""``/tokenize``, ``/detokenize``, ``/tokenizer_info``: direct access to the model's tokenizer."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from quart import Response

from actors.protocol.requests import LIMITS, Chat, InvalidRequest
from actors.text.model_files import ModelFiles, resolve_model_path
from app.apis.openai.parameters import messages, own_template, template_kwargs, tools
from app.apis.openai.requests import ChatMessage, Name, OwnTemplate, Text, TokenId, Tool
from app.server.errors import ApiError, invalid
from app.server.exchange import Exchange
from app.server.service import Service, json_response, renamed

__all__ = [
    "DetokenizeAnswer",
    "DetokenizeRequest",
    "TokenizeAnswer",
    "TokenizeRequest",
    "detokenize",
    "tokenize",
    "tokenizer_info",
]

_STRINGS = 65536
"""Most tokens whose strings are returned at once, for models with a shorter context: a few megabytes."""

_TokenList = Annotated[list[TokenId], Meta(max_length=4_194_304)]


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """``prompt`` (a text or a list of texts), or ``messages`` to be rendered first.

    ``add_special_tokens`` defaults to true for texts and to false for messages, because the template adds them.

    llama.cpp's form is ``content`` with ``add_special`` (default false); ``with_pieces`` returns each token with its
    text.
    """

    model: Name | None = None
    prompt: Text | Annotated[list[Text], Meta(max_length=LIMITS.prompts)] | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=LIMITS.messages)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=LIMITS.tools)] | None = None
    chat_template: OwnTemplate | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(max_length=32)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    content: Text | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class Piece(msgspec.Struct):
    """A token with its text, as llama.cpp returns it."""

    id: int
    piece: str


class TokenizeAnswer(msgspec.Struct, kw_only=True):
    """For a list of prompts the fields are lists."""

    tokens: list[int | list[int] | Piece]
    count: int | list[int]
    max_model_len: int
    token_strs: list[str | list[str]] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """``tokens``: ids, or a list of lists of them."""

    model: Name | None = None
    tokens: Annotated[list[TokenId | _TokenList], Meta(max_length=4_194_304)]
    skip_special_tokens: bool | None = None


class DetokenizeAnswer(msgspec.Struct, kw_only=True):
    """The same text under all names that clients expect."""

    text: str | list[str]
    prompt: str | list[str]
    content: str | list[str]


async def tokenize(service: Service, exchange: Exchange, body: TokenizeRequest) -> Response:
    """Token ids of texts or of a conversation."""
    service.check_model(body.model, exchange)
    if body.content is not None:
        _take_content(body)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt: give either prompt or messages.", param="prompt")
    with service.text_request(exchange):
        return json_response(await _tokenized(service, exchange, body))


def _take_content(body: TokenizeRequest) -> None:
    """Make llama.cpp's form the other. Raises 400."""
    if body.prompt is not None or body.messages is not None:
        raise invalid("content: give it alone, or prompt or messages.", param="content")
    if body.parse_special is False:
        raise invalid("parse_special: special tokens are read in any text here; leave it out.", param="parse_special")
    body.prompt, body.add_special_tokens = body.content, bool(body.add_special)


async def _tokenized(service: Service, exchange: Exchange, body: TokenizeRequest) -> TokenizeAnswer:
    engine = service.engine
    if body.messages is not None:
        go_on = bool(body.continue_final_message)
        chat = Chat(
            messages=messages(body.messages),
            tools=tools(body.tools),
            template_kwargs=template_kwargs(body.chat_template_kwargs),
            add_generation_prompt=not go_on if body.add_generation_prompt is None else body.add_generation_prompt,
            continue_final_message=go_on,
            template=own_template(body.chat_template, service.arguments),
        )
        encoded = [
            await engine.tokenize(chat, add_special_tokens=bool(body.add_special_tokens), tenant=exchange.tenant)
        ]
    else:
        assert body.prompt is not None
        texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        encoded = [
            await engine.tokenize(text, add_special_tokens=body.add_special_tokens is not False) for text in texts
        ]
    many = isinstance(body.prompt, list)
    counts = [len(ids) for ids in encoded]
    tokens: list[int | list[int] | Piece] = [*encoded] if many else [*encoded[0]]
    strings: list[str | list[str]] | None = None
    if body.return_token_strs or body.with_pieces:
        if sum(counts) > max(engine.context_length, _STRINGS):
            raise invalid(
                f"return_token_strs: {sum(counts)} tokens; the strings of at most "
                f"{max(engine.context_length, _STRINGS)} are returned. Send less, or leave it out.",
                param="return_token_strs",
            )
        named = [await engine.token_strings(ids) for ids in encoded]
        strings = [*named] if many else [*named[0]]
        if body.with_pieces and not many:
            tokens = [Piece(token, piece) for token, piece in zip(encoded[0], named[0], strict=True)]
    return TokenizeAnswer(
        tokens=tokens,
        count=counts if many else counts[0],
        max_model_len=engine.context_length,
        token_strs=strings,
    )


async def detokenize(service: Service, exchange: Exchange, body: DetokenizeRequest) -> Response:
    """The text of token ids."""
    service.check_model(body.model, exchange)
    skip = body.skip_special_tokens is not False
    many = bool(body.tokens) and isinstance(body.tokens[0], list)
    if many and len(body.tokens) > LIMITS.prompts:
        raise invalid(
            f"tokens: at most {LIMITS.prompts} lists; you gave {len(body.tokens)}. Split the request.", param="tokens"
        )
    max_length = max(service.engine.context_length, _STRINGS)
    lists: list[list[int]] = []
    for number, item in enumerate(body.tokens if many else [body.tokens]):
        at = f"tokens[{number}]" if many else "tokens"
        ids = [token for token in item if isinstance(token, int)] if isinstance(item, list) else []
        if not isinstance(item, list) or len(ids) < len(item):
            raise invalid("tokens: either ids or lists of ids, not both.", param=at)
        if len(item) > max_length:
            raise invalid(
                f"{at}: has {len(item)} tokens; at most {max_length} are decoded at once. Split the request.", param=at
            )
        lists.append(ids)
    with service.text_request(exchange):
        try:
            texts = [await service.engine.detokenize(ids, skip_special_tokens=skip) for ids in lists]
        except InvalidRequest as error:
            raise renamed(error, {"prompt": "tokens"}) from None
    text = texts if many else texts[0]
    return json_response(DetokenizeAnswer(text=text, prompt=text, content=text))


async def tokenizer_info(service: Service, exchange: Exchange, body: None) -> Response:
    """The tokenizer's configuration and the chat template, for clients that render and count themselves."""
    if service.arguments.skip_tokenizer_init:
        raise ApiError(404, "This server runs without a tokenizer (--skip-tokenizer-init).", code="not_found")
    service.require_ready()
    return json_response(await asyncio.to_thread(_read_info, service))


def _read_info(service: Service) -> dict[str, Any]:
    arguments = service.arguments
    assert arguments.model_path is not None
    model = resolve_model_path(arguments.model_path, revision=arguments.revision, download_dir=arguments.download_dir)
    path = None
    if arguments.tokenizer_path is not None:
        path = resolve_model_path(arguments.tokenizer_path, download_dir=arguments.download_dir, weights=False)
    files = ModelFiles(model, overrides=arguments.json_model_override_args, tokenizer_path=path)
    info = {key: _plain(value) for key, value in files.tokenizer_config.items() if key != "auto_map"}
    return {**info, "chat_template": files.chat_template(arguments.chat_template)}


def _plain(value: object) -> object:
    """A token that is stored with its flags, as text."""
    return value["content"] if isinstance(value, dict) and isinstance(value.get("content"), str) else value
