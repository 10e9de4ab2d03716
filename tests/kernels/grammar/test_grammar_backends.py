"""Both backends allow exactly the texts of a grammar."""

from __future__ import annotations

import json
import random
import re

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.contract.grammar import Grammar, GrammarError
from tests.kits.grammars import BACKENDS, EOS, VOCAB, allowed, compiler, sample, tokenizer
from tests.kits.schemas import LL_ONLY, SCHEMAS, UNSUPPORTED, X_ONLY

_FORMATS = jsonschema.FormatChecker(["date", "uuid", "ipv4", "email"])


def form(schema: object) -> Grammar:
    return Grammar("json_schema", json.dumps(schema))


def check(backend: str, schema: object, seed: int) -> None:
    text = sample(backend, form(schema), seed)
    if text.whole:
        jsonschema.Draft202012Validator(schema, format_checker=_FORMATS).validate(json.loads(text))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("part", range(4))
def test_random_texts_of_schemas_validate(backend: str, part: int) -> None:
    assert len(SCHEMAS) >= 200
    for number, schema in enumerate(SCHEMAS[part::4]):
        check(backend, schema, number)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("regex", "The quick brown fox[a-z]*"),
        Grammar("choice", '["positive", "negative", "neutral"]'),
        form({"type": "object", "properties": {"name": {"const": "a fox"}}, "required": ["name"]}),
    ],
    ids=["regex", "choice", "const"],
)
def test_exactly_the_tokens_of_the_mask_are_accepted(backend: str, grammar: Grammar) -> None:
    matcher, rng = compiler(backend).compile(grammar).result(30)(), random.Random(1)
    for _ in range(12):
        found = set(allowed(matcher)) - {0, EOS}
        for token in set(range(3, VOCAB, 7)) | found:
            assert matcher.accept(token) == (token in found), tokenizer().id_to_token(token)
            if token in found:
                matcher.rollback(1)
        if not found:
            break
        assert matcher.accept(rng.choice(sorted(found)))


def test_schemas_of_llguidance_alone_validate() -> None:
    for schema in LL_ONLY:
        for seed in range(3):
            check("llguidance", schema, seed)


def test_schemas_of_xgrammar_alone_validate() -> None:
    pytest.importorskip("xgrammar")
    for schema in X_ONLY:
        with pytest.raises(GrammarError, match="propertyNames"):
            compiler("llguidance").compile(form(schema)).result(30)
        for seed in range(3):
            check("xgrammar", schema, seed)


def test_what_llguidance_alone_follows_is_refused_elsewhere() -> None:
    pytest.importorskip("xgrammar")
    for schema in LL_ONLY:
        with pytest.raises(GrammarError, match="xgrammar does not support"):
            compiler("xgrammar").compile(form(schema)).result(30)


def test_every_keyword_that_is_followed_is_tested() -> None:
    tested = {keyword for schema in (*SCHEMAS, *LL_ONLY, *X_ONLY) for keyword in _keywords(schema)}
    assert not _FOLLOWED - tested


_FOLLOWED = {
    *("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs", "definitions"),
    *("items", "prefixItems", "minItems", "maxItems", "properties", "required", "patternProperties"),
    *("additionalProperties", "propertyNames", "minProperties", "maxProperties", "pattern", "minLength", "maxLength"),
    *("format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}


def _keywords(schema: object) -> set[str]:
    if isinstance(schema, list):
        return {keyword for each in schema for keyword in _keywords(each)}
    if not isinstance(schema, dict):
        return set()
    return set(schema) | {keyword for each in schema.values() for keyword in _keywords(each)}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("keyword", "schema"), UNSUPPORTED)
def test_an_unsupported_keyword_is_named(backend: str, keyword: str, schema: object) -> None:
    with pytest.raises(GrammarError, match=keyword):
        compiler(backend).compile(form(schema)).result(30)


SIMPLE = st.sampled_from(
    [
        {"type": "boolean"},
        {"type": "null"},
        {"type": "integer"},
        {"enum": ["a", 1, None]},
        {"type": "string", "maxLength": 5},
    ]
)
NESTED = st.recursive(
    SIMPLE,
    lambda inner: st.one_of(
        st.builds(
            lambda item, max_tokens: {"type": "array", "items": item, "maxItems": max_tokens}, inner, st.integers(0, 3)
        ),
        st.builds(
            lambda properties, needed: {
                "type": "object",
                "properties": properties,
                "required": sorted(properties)[:needed],
                "additionalProperties": False,
            },
            st.dictionaries(st.sampled_from(["a", "b", "long name", "ü"]), inner, max_size=3),
            st.integers(0, 3),
        ),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=6,
)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=NESTED, seed=st.integers(0, 1000))
def test_random_texts_of_random_schemas_validate(backend: str, schema: object, seed: int) -> None:
    check(backend, schema, seed)


def pattern(rng: random.Random, depth: int = 3) -> str:
    """A random regular expression that Python and the backends read alike."""
    if depth == 0 or rng.random() < 0.3:
        return rng.choice(["a", "b", "[ab]", "[^a]", "x", "\\.", "[0-9]", "ab"])
    inner = pattern(rng, depth - 1)
    return rng.choice(
        [
            lambda: f"({inner})*",
            lambda: f"({inner})?",
            lambda: f"({inner}){{1,3}}",
            lambda: f"({inner}|{pattern(rng, depth - 1)})",
            lambda: inner + pattern(rng, depth - 1),
        ]
    )()


@pytest.mark.parametrize("backend", BACKENDS)
def test_random_texts_of_random_patterns_match(backend: str) -> None:
    rng = random.Random(5)
    for seed in range(40):
        found = pattern(rng)
        text = sample(backend, Grammar("regex", found), seed, max_tokens=40)
        if text.whole:
            assert re.fullmatch(found, text, re.DOTALL), (found, text)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_text_is_accepted_where_the_pattern_matches(backend: str) -> None:
    """The other direction: nothing that matches is refused, and it may end exactly where it matches."""
    rng = random.Random(7)
    letters = {sign: tokenizer().token_to_id(sign) for sign in "abx.0"}
    for _ in range(60):
        found, text = pattern(rng), "".join(rng.choices("abx.0", k=rng.randrange(6)))
        matcher = compiler(backend).compile(Grammar("regex", found)).result(30)()
        fits = True
        for sign in text:
            if letters[sign] not in allowed(matcher):
                fits = False
                break
            matcher.accept(letters[sign])
        ends = fits and EOS in allowed(matcher)
        assert ends == bool(re.fullmatch(found, text, re.DOTALL)), (found, text)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (Grammar("choice", '["red", "dark green", "a\\"b"]'), r'red|dark green|a"b'),
        (Grammar("choice", '["\U0001f600 é\\n"]'), "\U0001f600 é\n"),
        (Grammar("ebnf", 'root ::= "x" [0-9]{1,3} ("y" | "z")'), r"x[0-9]{1,3}[yz]"),
        (Grammar("ebnf", 'root ::= pair ("," pair)?\npair ::= [a-c] "=" [0-1]'), r"[a-c]=[01](,[a-c]=[01])?"),
    ],
)
def test_texts_of_choices_and_rules_match(backend: str, grammar: Grammar, pattern: str) -> None:
    for seed in range(5):
        text = sample(backend, grammar, seed, max_tokens=40)
        assert text.whole
        assert re.fullmatch(pattern, text)


def test_rules_in_larks_syntax_match() -> None:
    text = sample("llguidance", Grammar("ebnf", 'start: "a" NUMBER\nNUMBER: /[0-9]{2}/'), max_tokens=20)
    assert re.fullmatch("a[0-9]{2}", text)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_structural_tag_binds_the_text_behind_its_trigger(backend: str) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    tag = {"structures": [{"begin": "<f>", "schema": schema, "end": "</f>"}], "triggers": ["<f"]}
    matcher = compiler(backend).compile(Grammar("structural_tag", json.dumps(tag))).result(30)()
    assert EOS in allowed(matcher)
    for token in tokenizer().encode("Hello! <f", add_special_tokens=False).ids:
        assert token in allowed(matcher)
        assert matcher.accept(token)
    found = allowed(matcher)
    assert EOS not in found
    assert {tokenizer().id_to_token(token)[0] for token in found} == {">"}


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_white_space_json_has_none(backend: str) -> None:
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 3}
    for made, whitespace in ((compiler(backend, compact=True), None), (compiler(backend), "")):
        matcher = made.compile(Grammar("json_schema", json.dumps(schema), whitespace)).result(30)()
        for sign in ("[", "true"):
            assert not {" ", "Ġ", "Ċ"} & {tokenizer().id_to_token(token) for token in allowed(matcher)}
            for token in tokenizer().encode(sign, add_special_tokens=False).ids:
                matcher.accept(token)


@pytest.mark.parametrize("backend", BACKENDS)
def test_special_tokens_are_never_part_of_a_text(backend: str) -> None:
    matcher = compiler(backend).compile(Grammar("regex", "(.|\n)*")).result(30)()
    assert set(range(3)) & set(allowed(matcher)) == {0, EOS}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("regex", "("),
        Grammar("ebnf", "root ::= ("),
        Grammar("json_schema", '{"type": "nope"}'),
        Grammar("structural_tag", "{}"),
    ],
)
def test_a_wrong_grammar_is_an_error_in_one_line(backend: str, grammar: Grammar) -> None:
    with pytest.raises(GrammarError) as caught:
        compiler(backend).compile(grammar).result(30)
    assert str(caught.value).isprintable()
    assert 0 < len(str(caught.value)) <= 400


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("schema", ['{"$ref": "#"}', '{"allOf": [{"$ref": "#"}]}', "false"])
def test_a_schema_that_no_text_matches_is_an_error(backend: str, schema: str) -> None:
    with pytest.raises(GrammarError, match=r"no text matches|cannot accept|[Uu]nsatisfiable|[Cc]ircular|false"):
        compiler(backend).compile(Grammar("json_schema", schema)).result(30)


def test_more_alternatives_than_the_library_follows_are_an_error() -> None:
    choices = " | ".join(f'"a{number}"' for number in range(2500))
    schema = {"type": "object", "properties": {f"k{number}": {"type": "string"} for number in range(700)}}
    for grammar in (Grammar("ebnf", f"root ::= {choices}"), form(schema)):
        with pytest.raises(GrammarError, match="too many alternatives"):
            compiler("llguidance").compile(grammar).result(30)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("target", ["http://example.com/a.json", "other.json#/a"])
def test_a_reference_to_another_document_is_an_error(backend: str, target: str) -> None:
    with pytest.raises(GrammarError, match=r"\$ref|Resource"):
        compiler(backend).compile(form({"$ref": target})).result(30)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_schema_may_be_true(backend: str) -> None:
    json.loads(sample(backend, Grammar("json_schema", "true"), max_tokens=40) or "1")


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_can_be_taken_back(backend: str) -> None:
    matcher = compiler(backend).compile(Grammar("regex", "ab|cd")).result(30)()
    first = allowed(matcher)
    matcher.accept(tokenizer().token_to_id("a"))
    assert allowed(matcher) == [tokenizer().token_to_id("b")]
    matcher.rollback(1)
    assert allowed(matcher) == first


def test_a_compiled_grammar_is_kept() -> None:
    grammar = Grammar("regex", "kept")
    assert compiler("llguidance").compile(grammar) is compiler("llguidance").compile(Grammar("regex", "kept"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_certain_token_is_alone_in_its_mask(backend: str) -> None:
    names = ["first name", "postal_code", "Straße"]
    schema = {"type": "object", "properties": {name: {"enum": ["red", "green"]} for name in names}, "required": names}
    schema["additionalProperties"] = False
    for compact in (False, True):
        grammar = Grammar("json_schema", json.dumps(schema))
        matcher, seen, rng = compiler(backend, compact=compact).compile(grammar).result(30)(), 0, random.Random(7)
        for _ in range(300):
            found, certain = allowed(matcher), matcher.certain()
            if EOS in found:
                break
            assert found == certain[:1] or not certain
            seen += bool(certain)
            if seen == 5:  # a state behind which others were
                assert matcher.accept(found[0])
                matcher.rollback(1)
                assert matcher.certain()[:1] == certain[:1]
            assert not certain or not matcher.accept((found[0] + 1) % VOCAB)
            assert matcher.accept(rng.choice(found))
        assert EOS in found
        assert (seen > 15) == (backend == "llguidance")
