"""Fields in every company: whatever a request puts together, it is answered or refused, and nobody dies of it.

Advisories of the kind: CVE-2026-44223 (penalties beside speculation), CVE-2026-114051 (min_tokens), CVE-2026-116180
(log-probabilities), CVE-2025-48944 and others, in which two harmless fields together ended an engine.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from tests.kits.target import Target

HUGE = 2**70
VOCABULARY = 384  # of the tiny model
Fields = dict[str, tuple[st.SearchStrategy[Any], st.SearchStrategy[Any]]]
"""A field -> values to be taken, values to be refused (some of them only beside others)."""

of = st.sampled_from
flags = st.booleans() | st.none()
tokens = of([0, 1, 2, 5, 200, VOCABULARY - 1]) | st.integers(0, VOCABULARY - 1)
strangers = of([-1, VOCABULARY, 2**31, HUGE])
texts = of(["x", "the", " ", "\n", "🎭", "<|im_end|>", "é" * 99, "\x00", "one two three " * 9])
no_number = of(["1", True, [], HUGE, -(2**31), 1e308, "NaN"])

SHARED: Fields = {
    "max_tokens": (of([1, 2, 3, 8, 8, 30]), of([0, -1, 511, 600, HUGE, 2.5])),
    "min_tokens": (of([0, 1, 4, None]), of([9, 40, -1, HUGE])),
    "n": (of([1, 2, 3, 5, None]), of([0, 129, -1, HUGE])),
    "seed": (of([0, 7, -1, 2**64 - 1, -(2**63), None]), of([2**64, HUGE, 1.5])),
    "temperature": (of([0, 0.7, 1, 2, 100, 1e-30, None]), no_number),
    "top_p": (of([1, 0.9, 1e-6, 1e-300, None]), of([0, 1.5]) | no_number),
    "top_k": (of([0, -1, 1, 5, VOCABULARY, 2**31 - 1, None]), of([-2, 2**31]) | no_number),
    "min_p": (of([0, 0.5, 1, None]), no_number),
    "frequency_penalty": (of([0, 1.5, 2, -2, None]), of([2.1]) | no_number),
    "presence_penalty": (of([0, 1.5, 2, -2, None]), of([-2.1]) | no_number),
    "repetition_penalty": (of([1, 1.3, 0.01, 100, None]), of([0, -1]) | no_number),
    "logit_bias": (
        st.none() | st.dictionaries(tokens.map(str), of([-100, 100, 5, 0]), max_size=6),
        st.dictionaries(strangers.map(str), of([1]), min_size=1, max_size=2) | of([{"1": 101}, {"a": 1}, []]),
    ),
    "stop": (st.none() | texts | st.lists(texts, max_size=5), of(["", [""], ["x" * 257], ["x"] * 17, [None], 5])),
    "stop_token_ids": (st.none() | st.lists(tokens, max_size=4), st.lists(strangers, min_size=1)),
    "bad_words": (st.none() | st.lists(texts, max_size=4), of([[""], ["x" * 257], ["x"] * 129, "x"])),
    "allowed_token_ids": (st.none() | st.lists(tokens, min_size=1, max_size=4), st.lists(strangers)),
    "ignore_eos": (flags, of([1, "yes"])),
    "skip_special_tokens": (flags, of([1])),
    "include_stop_str_in_output": (flags, of([1])),
    "prompt_logprobs": (of([None, 0, 1, 20]), of([21, -1, HUGE])),
    "return_token_ids": (flags, of([1])),
    "return_hidden_states": (flags, of([1])),
    "return_tokens_as_token_ids": (flags, of([1])),
    "priority": (of([0, 1, -5, None]), of([2**31, HUGE])),
    "cache_salt": (st.none() | of(["", "a", "b"]), of(["x" * 300])),
    "stream": (flags, of([1])),
    "stream_options": (
        st.none()
        | st.fixed_dictionaries({}, optional={"include_usage": st.booleans(), "continuous_usage_stats": st.booleans()}),
        of([5, {"include_usage": 5}]),
    ),
}
COMPLETION: Fields = SHARED | {
    "echo": (flags, of([1])),
    "logprobs": (of([None, 0, 1, 5, 20]), of([21, -1])),
    "suffix": (of([None, ""]), of(["x"])),
    "prompt": (
        texts
        | st.lists(tokens, min_size=1, max_size=40)
        | st.lists(texts, min_size=1, max_size=3)
        | st.lists(st.lists(tokens, min_size=1, max_size=10), min_size=1, max_size=3),
        of(["", [], [[]], [""], [5] * 511, [5] * 512, [1, "x"], [[1], "x", 5]]) | st.lists(strangers, min_size=1),
    ),
}
CHAT: Fields = SHARED | {
    "logprobs": (flags, of([1])),
    "top_logprobs": (of([None, 0]), of([3, 21, -1])),
    "max_completion_tokens": (of([None, 4]), of([0, HUGE])),
    "continue_final_message": (flags, of([1])),
    "add_generation_prompt": (flags, of([1])),
    "tool_choice": (of([None, "none"]), of(["auto", "required"])),
    "parallel_tool_calls": (flags, of([1])),
    "chat_template_kwargs": (of([None, {}, {"a": "x"}]), of([{"messages": []}, {"_b": 1}, {"a b": 1}])),
    "reasoning_effort": (of([None, "low", "none"]), of(["x" * 40, ""])),
    "messages": (
        st.lists(
            st.fixed_dictionaries(
                {"role": of(["user", "assistant", "system", "developer"]), "content": texts | st.lists(texts)},
                optional={"name": texts},
            )
            | st.fixed_dictionaries({"role": of(["tool"]), "tool_call_id": of(["a", "b"]), "content": texts}),
            min_size=1,
            max_size=4,
        ),
        of([[], [{}], [{"role": "x y", "content": "x"}], [{"role": "user"}], 5]),
    ),
}
NATIVE: Fields = {
    {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}.get(name, name): values
    for name, values in SHARED.items()
    if name in ("max_tokens", "min_tokens", "n", "seed", "temperature", "top_p", "top_k", "min_p", "logit_bias", "stop")
    or name.endswith("_penalty")
    or name in ("stop_token_ids", "ignore_eos", "skip_special_tokens")
}
GENERATE: Fields = {
    "text": (
        COMPLETION["prompt"][0].filter(lambda p: isinstance(p if isinstance(p, str) else p[0], str)),
        of(["", [], 5]),
    ),
    "return_logprob": (flags, of([1])),
    "logprob_start_len": (of([-1, 0, None]), of([3, 900, HUGE])),
    "top_logprobs_num": (of([0, 2, 20]), of([21, -1])),
    "return_text_in_logprobs": (flags, of([1])),
    "stream": (flags, of([1])),
    "rid": (of(["", "a", "b", None]), of(["x" * 300])),
}


@st.composite
def some(draw: st.DrawFn, fields: Fields, *needed: str) -> dict[str, Any]:
    """Some fields with values to be taken, now and then one with a value to be refused: the first such ends it all."""
    names = {*needed, *draw(st.lists(of(sorted(fields)), max_size=9, unique=True))}
    body = {name: draw(fields[name][0]) for name in sorted(names)}
    if draw(st.integers(0, 5)) == 0:
        name = draw(of(sorted(names)))
        body[name] = draw(fields[name][1])
    return body


requests = st.one_of(
    some(COMPLETION, "prompt", "max_tokens").map(lambda body: ("/v1/completions", body)),
    some(CHAT, "messages", "max_tokens").map(lambda body: ("/v1/chat/completions", body)),
    st.tuples(some(GENERATE, "text"), some(NATIVE, "max_new_tokens")).map(
        lambda parts: ("/generate", {**parts[0], "sampling_params": parts[1]})
    ),
)


def ends_well(target: Target, path: str, body: dict[str, Any]) -> None:
    answer = target.post(path, json.dumps(body).encode())
    context = f"{path} {body} -> {answer.status_code} {answer.text[:400]}"
    if answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream"):
        events = [line[6:] for line in answer.text.split("\n\n") if line.startswith("data: ")]
        assert events[-1] == "[DONE]", context
        for event in map(json.loads, events[:-1]):
            assert "error" not in event, context
    elif answer.status_code == 200:
        reported = answer.json()
        choices = reported if isinstance(reported, list) else reported.get("choices", [reported])
        assert all("NaN" not in json.dumps(choice) for choice in choices), context
        assert choices, context
    else:
        assert answer.status_code == 400, context
        error = answer.json()["error"]
        assert error["param"], context
        assert error["message"], context


@pytest.mark.long
def test_fields_in_every_combination(target: Target) -> None:
    with ThreadPoolExecutor(4) as pool:

        @hypothesis.settings(
            max_examples=400,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(together=st.lists(requests, min_size=1, max_size=4))
        def play(together: list[tuple[str, dict[str, Any]]]) -> None:
            # Together, so that they meet in one batch.
            for outcome in [pool.submit(ends_well, target, path, body) for path, body in together]:
                outcome.result()

        play()
    target.assert_unharmed()
