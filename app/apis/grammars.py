"""Fields of requests that ask for structured output, as one grammar.

OpenAI's ``response_format``; SGLang's ``json_schema``, ``regex``, ``ebnf`` and ``structural_tag``; vLLM's
``structured_outputs`` and ``guided_*``; llama.cpp's ``grammar`` and ``json_schema``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from actors.protocol.requests import LIMITS, Grammar
from app.server.decoding import check_depth, check_size
from app.server.errors import invalid

__all__ = ["GrammarFields", "NativeGrammarFields", "Schema", "StructuredOutputs", "grammar_of", "schema_text"]

Schema = dict[str, Any] | bool | str
"""A JSON schema as it is, or as text."""
Choices = Annotated[list[str], Meta(max_length=LIMITS.grammar_choices)]
JsonObject = dict[str, Any]


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's ``structured_outputs``: one of ``json``, ``regex``, ``choice``, ``grammar``, ``json_object`` and
    ``structural_tag``."""

    json: Schema | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | JsonObject | None = None
    whitespace: str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None


class NativeGrammarFields(msgspec.Struct, kw_only=True):
    """SGLang's fields, which llama.cpp shares in part."""

    json_schema: Schema | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | JsonObject | None = None


class GrammarFields(NativeGrammarFields, kw_only=True):
    """The fields of completions and chat completions."""

    response_format: JsonObject | None = None
    structured_outputs: StructuredOutputs | None = None
    grammar: str | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_whitespace_pattern: str | None = None


def grammar_of(body: NativeGrammarFields, at: str = "") -> tuple[Grammar | None, str]:
    """The grammar that a body asks for, and the name of the field that does. Raises 400.

    ``at``: prefix of the fields' names in errors.
    """
    found = [*_native(body, at)]
    if isinstance(body, GrammarFields):
        found += [*_openai(body.response_format), *_structured(body.structured_outputs), *_guided(body)]
    if len(found) > 1:
        names = " and ".join(name for _, name in found[:2])
        raise invalid(f"{found[1][1]}: {names} both constrain the answer; send one of them.", param=found[1][1])
    return found[0] if found else (None, "grammar")


Found = Iterator[tuple[Grammar, str]]


def _native(body: NativeGrammarFields, at: str) -> Found:
    if body.json_schema is not None and body.json_schema != "":
        yield Grammar("json_schema", schema_text(body.json_schema, f"{at}json_schema")), f"{at}json_schema"
    if body.regex:
        yield Grammar("regex", body.regex), f"{at}regex"
    if body.ebnf:
        yield Grammar("ebnf", body.ebnf), f"{at}ebnf"
    if body.structural_tag:
        yield Grammar("structural_tag", _tag(body.structural_tag, f"{at}structural_tag")), f"{at}structural_tag"


def _openai(form: JsonObject | None) -> Found:
    name = "response_format"
    kind = None if form is None else form.get("type")
    if not form or kind == "text":
        return
    if kind == "json_object":
        # llama.cpp takes a schema here.
        schema = form.get("schema")
        if schema:
            yield Grammar("json_schema", schema_text(schema, f"{name}.schema")), name
        else:
            yield Grammar("json_object"), name
    elif kind == "json_schema":
        inner = form.get("json_schema")
        where = f"{name}.json_schema"
        if not isinstance(inner, dict):
            if not isinstance(form.get("schema"), dict):
                raise invalid(f"{where}: must be an object with a name and a schema.", param=where)
            inner, where = form, name
        schema = inner.get("schema")
        if schema is None:
            raise invalid(f"{where}.schema: this field is required.", param=f"{where}.schema", code="missing_field")
        yield Grammar("json_schema", schema_text(schema, f"{where}.schema")), name
    elif kind == "structural_tag":
        yield Grammar("structural_tag", _tag(form, name)), name
    else:
        raise invalid(
            f"{name}.type: must be text, json_object, json_schema or structural_tag, not {str(kind)[:64]!r}.",
            param=f"{name}.type",
        )


def _structured(given: StructuredOutputs | None) -> Found:
    if given is None:
        return
    at = "structured_outputs"
    white = _whitespace(given.whitespace if given.whitespace_pattern is None else given.whitespace_pattern)
    if given.disable_any_whitespace:
        white = ""
    result = _plain(at + ".", given.json, given.regex, given.choice, given.grammar, given.json_object, white=white)
    yield from result
    if given.structural_tag:
        where = f"{at}.structural_tag"
        yield Grammar("structural_tag", _tag(given.structural_tag, where)), where


def _guided(body: GrammarFields) -> Found:
    white = _whitespace(body.guided_whitespace_pattern)
    given = (body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar, body.guided_json_object)
    yield from _plain("guided_", *given, white=white)
    if body.grammar:
        yield Grammar("ebnf", body.grammar), "grammar"


def _plain(
    at: str,
    json: Schema | None,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
    json_object: bool | None,
    *,
    white: str | None,
) -> Found:
    if json is not None and json != "":
        yield Grammar("json_schema", schema_text(json, f"{at}json"), white), f"{at}json"
    if regex:
        yield Grammar("regex", regex), f"{at}regex"
    if choice is not None:
        yield Grammar("choice", msgspec.json.encode(choice).decode()), f"{at}choice"
    if grammar:
        yield Grammar("ebnf", grammar), f"{at}grammar"
    if json_object:
        yield Grammar("json_object", "", white), f"{at}json_object"


def _whitespace(given: str | None) -> str | None:
    """An empty pattern means the server's, as in vLLM."""
    return given or None


def schema_text(given: object, param: str) -> str:
    """The text of a schema, which is an object or a boolean. Raises 400."""
    value = given
    if isinstance(given, str):
        if len(given) > LIMITS.grammar_bytes:
            check_size(given, param, LIMITS.grammar_bytes)
        try:
            value = msgspec.json.decode(given)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise invalid(f"{param}: is no JSON ({error}). Send a schema.", param=param) from None
    if not isinstance(value, (dict, bool)):
        raise invalid(f"{param}: a schema is an object, or true or false.", param=param)
    check_depth(value, param, LIMITS.grammar_depth)
    check_size(value, param, LIMITS.grammar_bytes)
    return msgspec.json.encode(value).decode()


def _tag(given: str | JsonObject, param: str) -> str:
    """The text of a structural tag, which the backend reads. Raises 400."""
    value: object = given
    if isinstance(given, str):
        try:
            value = msgspec.json.decode(given)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise invalid(f"{param}: is no JSON ({error}).", param=param) from None
    if not isinstance(value, dict) or not isinstance(value.get("structures"), list) or "triggers" not in value:
        raise invalid(f"{param}: must be an object with structures (begin, schema, end) and triggers.", param=param)
    check_depth(value, param, LIMITS.grammar_depth)
    check_size(value, param, LIMITS.grammar_bytes)
    return msgspec.json.encode({"structures": value["structures"], "triggers": value["triggers"]}).decode()
