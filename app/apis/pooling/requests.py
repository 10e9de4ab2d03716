"""Bodies of ranking, scoring and classifying."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from app.apis.embeddings.handlers import Truncation
from app.apis.openai.requests import Label, Name, Salt, Text, TokenId, TokenIds

__all__ = [
    "MAX_INPUTS",
    "ClassifyRequest",
    "CohereRerankRequest",
    "Document",
    "EncodeRequest",
    "PoolingRequest",
    "RerankRequest",
    "ScoreRequest",
]

MAX_INPUTS = 2048

Priority = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
Count = Annotated[int, Meta(ge=1, lt=2**31)]
Inputs = Text | Annotated[list[Text | TokenId | TokenIds], Meta(min_length=1, max_length=4_194_304)]
Ids = Annotated[list[TokenId | TokenIds], Meta(max_length=4_194_304)]
Texts = Text | Annotated[list[Text], Meta(min_length=1, max_length=MAX_INPUTS)]


class Document(msgspec.Struct):
    """A document that is no plain text."""

    text: Text


Documents = Annotated[list[Text | Document], Meta(min_length=1, max_length=MAX_INPUTS)]


class _Options(msgspec.Struct, kw_only=True):
    """``truncate_prompt_tokens``: keep so many first tokens of an input, or of a pair; -1: as many as fit."""

    model: Name | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None
    rid: Label | None = None
    user: Name | None = None
    truncate_prompt_tokens: Truncation | None = None


class RerankRequest(_Options, kw_only=True):
    """``POST /v1/rerank`` of Jina and vLLM. ``top_n``: answer with so many of the best documents alone."""

    query: Text
    documents: Documents
    top_n: Count | None = None
    return_documents: bool = True
    instruction: Text | None = None


class CohereRerankRequest(msgspec.Struct, kw_only=True):
    """``POST /v2/rerank`` of Cohere. ``return_documents``: of its first version, and what litellm sends."""

    query: Text
    documents: Documents
    model: Name | None = None
    top_n: Count | None = None
    return_documents: bool = False
    priority: Annotated[int, Meta(ge=0, le=999)] | None = None


class ScoreRequest(_Options, kw_only=True):
    """``POST /v1/score``. vLLM: the pairs of ``text_1`` and ``text_2``; one text is paired with each of the other.
    SGLang: the probabilities of the tokens ``label_token_ids`` after ``query`` and each of ``items``."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    query: Text | TokenIds | None = None
    items: Inputs | None = None
    label_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=1024)] | None = None
    apply_softmax: bool = False
    item_first: bool = False


class ClassifyRequest(_Options, kw_only=True):
    """``POST /classify``. vLLM: ``input``. SGLang: ``text`` or ``input_ids``. ``activation`` false: the numbers of the
    head as they are, not probabilities."""

    input: Inputs | None = None
    text: Texts | None = None
    input_ids: Ids | None = None
    activation: bool = True


class PoolingRequest(_Options, kw_only=True):
    """``POST /pooling`` of vLLM: the vector of each input, whatever the model makes. ``prompt_name``: the model's
    prompt that stands before each text."""

    input: Inputs
    task: Literal["embed", "classify", "token_embed", "token_classify", "plugin"] | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Count | None = None
    activation: bool = True
    prompt_name: Name | None = None


class EncodeRequest(msgspec.Struct, kw_only=True):
    """``POST /encode`` of SGLang."""

    text: Texts | None = None
    input_ids: Ids | None = None
    rid: Label | None = None
