"""Answers follow their grammars, whatever else happens to them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
from collections.abc import AsyncIterator
from typing import Any

import jsonschema
import pytest
import pytest_asyncio

from actors.engine.engine import Engine
from actors.protocol.requests import Delta, Grammar, InvalidRequest, SamplingParams, Thought
from app.understudy import MODEL_DIR
from app.understudy.drafts import draft_arguments
from tests.kits.engines import small_engine

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 4, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FORM = Grammar("json_schema", json.dumps(SCHEMA))
LONG = Grammar("regex", "(ab|cd){60}")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[Engine]:
    async with small_engine(MODEL_DIR, chunked_prefill_size=16) as made:
        yield made


async def answer(engine: Engine, grammar: Grammar | None, prompt: Any = "Once upon a time", **params: Any) -> list[str]:
    """The text of each choice."""
    texts, last = {}, {}
    sampling = SamplingParams(**({"max_tokens": 200, "seed": 3, "temperature": 1.0} | params), grammar=grammar)
    async for delta in engine.generate(prompt, sampling):
        texts[delta.index] = texts.get(delta.index, "") + delta.text
        last[delta.index] = delta
    assert all(delta.finish_reason == "stop" for delta in last.values()), texts
    return [texts[index] for index in sorted(texts)]


def valid(text: str) -> None:
    jsonschema.validate(json.loads(text), SCHEMA)


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_every_choice_of_a_chunked_prompt_is_valid(engine: Engine) -> None:
    prompt = "one two three four five six seven eight nine ten " * 6
    texts = await answer(engine, FORM, prompt, n=3)
    assert len(set(texts)) == 3
    for text in texts:
        valid(text)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"top_p": 0.9, "top_k": 40},
        {"logprobs": 2},
        {"repetition_penalty": 1.3, "logit_bias": {5: 3.0}},
        {"ignore_eos": True},
        {"stop": ("never in it",)},
        {"speculative": False},
    ],
    ids=str,
)
async def test_answers_are_valid_with_other_parameters(engine: Engine, params: dict[str, Any]) -> None:
    for text in await answer(engine, FORM, **params):
        valid(text)


async def test_a_complete_text_ends_despite_min_tokens_and_ignore_eos(engine: Engine) -> None:
    grammar = Grammar("choice", '["red", "green"]')
    assert await answer(engine, grammar, min_tokens=100, ignore_eos=True) in (["red"], ["green"])


async def test_a_grammar_wins_over_allowed_tokens(engine: Engine) -> None:
    assert await answer(engine, Grammar("choice", '["xyz"]'), allowed_token_ids=(5,)) == ["xyz"]


async def test_log_probabilities_are_those_of_the_model(engine: Engine) -> None:
    """A forced token has the probability that it has without the grammar."""
    found: list[Delta] = []
    for grammar in (None, Grammar("choice", '["Qqq"]')):
        params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=20, grammar=grammar)
        found += [delta async for delta in engine.generate("Once upon a time", params) if delta.logprobs]
    free, forced = ((delta.logprobs or ())[0] for delta in found)
    assert free.top[0].token_id == forced.top[0].token_id
    assert forced.token_id != free.token_id
    assert forced.logprob is not None
    assert forced.logprob < free.logprob  # type: ignore[operator]


async def test_rows_without_a_grammar_are_not_constrained(engine: Engine) -> None:
    alone = await free(engine)
    bound, beside = await asyncio.gather(answer(engine, LONG), free(engine))
    assert re.fullmatch("(ab|cd){60}", bound[0])
    assert beside == alone


async def free(engine: Engine) -> str:
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    return "".join([delta.text async for delta in engine.generate("Once upon a time", params)])


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar("regex", "("), "unclosed group"),
        (Grammar("json_schema", '{"not": {}}'), "not"),
        (Grammar("ebnf", "root ::= nothing"), "nothing"),
        (Grammar("regex", "(" * 70 + ")" * 70), "64 deep"),
        (Grammar("regex", "x" * 70_000), "65536"),
        (Grammar("choice", "[]"), "choices"),
        (Grammar("sonnet", ""), "kinds"),  # type: ignore[arg-type]
    ],
)
async def test_a_wrong_grammar_is_refused_with_the_reason(engine: Engine, grammar: Grammar, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        await answer(engine, grammar)
    assert caught.value.param == "grammar"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # by the sampler, and by native operators
async def test_a_grammar_that_cannot_go_on_is_the_requests_error(engine: Engine, dtype: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        if dtype != "float32":
            engine = await stack.enter_async_context(small_engine(MODEL_DIR, dtype=dtype))
        await _cannot_go_on(engine)


async def _cannot_go_on(engine: Engine) -> None:
    large = {"type": "object", "properties": {f"k{number}": {"type": "string"} for number in range(700)}}
    schema = {"type": "object", "properties": {"one two": large}, "required": ["one two"]}
    stream = engine.generate("Hi", SamplingParams(grammar=Grammar("json_schema", json.dumps(schema))))
    assert (await anext(stream)).text.startswith("{")
    with pytest.raises(InvalidRequest, match="cannot go on") as caught:
        [delta async for delta in stream]
    assert (caught.value.param, caught.value.code) == ("grammar", "grammar_failed")


async def test_the_grammar_begins_behind_a_thought_of_the_prompt(engine: Engine) -> None:
    thought = Thought(begin="<think>", end="</think>")
    closed = "Hi <think>\n\n</think>\n\n"
    [text] = await answer(engine, Grammar("regex", "ab"), closed, thought=thought)
    assert text == "ab"
    params = SamplingParams(max_tokens=20, grammar=Grammar("regex", "ab"), thought=thought, seed=1)
    open_ = "".join([delta.text async for delta in engine.generate("Hi <think>\n", params)])
    assert not open_.startswith("ab")


async def test_a_killed_worker_leaves_the_answer_valid(engine: Engine) -> None:
    deltas: list[str] = []
    params = SamplingParams(max_tokens=250, grammar=LONG, temperature=1.0, seed=5)
    async for delta in engine.generate("Once upon a time", params):
        deltas.append(delta.text)
        if len(deltas) == 10:
            os.kill(int(engine.describe()["workers"][0]["pid"] or 0), signal.SIGKILL)
    assert len(deltas) > 10
    assert re.fullmatch("(ab|cd){60}", "".join(deltas))


async def test_without_a_backend_a_grammar_is_refused() -> None:
    async with small_engine(MODEL_DIR, grammar_backend="none") as engine:
        with pytest.raises(InvalidRequest, match="--grammar-backend none"):
            await answer(engine, FORM)


@pytest.mark.parametrize("algorithm", ["NGRAM", "EAGLE3"])
async def test_answers_of_a_speculating_engine_are_valid(algorithm: str) -> None:
    options: dict[str, Any] = {"speculative_algorithm": algorithm} | draft_arguments(algorithm)
    async with small_engine(MODEL_DIR, dtype="auto", **options) as engine:
        text, _, [other] = await asyncio.gather(answer(engine, FORM), free(engine), answer(engine, LONG))
        valid(text[0])
        assert re.fullmatch("(ab|cd){60}", other)
