"""POST /v1/completions: prompts in every form, echo, log-probabilities, streams of several prompts."""

from __future__ import annotations

import msgspec
import openai
import pytest

from actors.protocol.requests import Delta, TokenLogprob, Usage
from app.apis.openai.answers import characters, completion_logprobs
from tests.kits.fake_engine import FakeStream

ANSWER = "Paris is the capital of France."


async def post(application, **body):
    response = await application.test_client().post("/v1/completions", json=body)
    return response, await response.get_data()


def answer(data: bytes):
    return msgspec.json.decode(data)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("ab", ["ab"]), (["ab", "c"], ["ab", "c"]), ([97, 98], [[97, 98]]), ([[97], [98, 99]], [[97], [98, 99]])],
)
async def test_prompts_in_every_form(application, engine, prompt, prompts):
    response, data = await post(application, prompt=prompt, n=2)
    assert response.status_code == 200
    assert [request["prompt"] for request in engine.requests] == prompts
    choices = answer(data)["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(prompts) * 2))
    assert all(choice["text"] == ANSWER and choice["finish_reason"] == "stop" for choice in choices)
    lengths = sum(len(p) for p in prompts)
    assert answer(data)["usage"]["prompt_tokens"] == lengths
    assert answer(data)["usage"]["completion_tokens"] == 6 * 2 * len(prompts)
    assert engine.requests[0]["params"].default_max_tokens == 16


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_echo_scores_the_prompt_as_lm_eval_wants(application, max_tokens):
    _, data = await post(application, prompt=[[97, 98]], echo=True, logprobs=1, max_tokens=max_tokens, temperature=0)
    choice = answer(data)["choices"][0]
    tail = ["Paris"] if max_tokens else []
    assert choice["text"] == "ab" + "".join(tail)
    assert choice["logprobs"]["tokens"] == ["a", "b", *tail]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, *([-0.5] if max_tokens else [])]
    assert choice["logprobs"]["top_logprobs"][:2] == [None, {"b": -1.0}]
    assert choice["logprobs"]["text_offset"] == [0, 1, *([2] if max_tokens else [])]
    assert choice["finish_reason"] == "length"
    assert answer(data)["usage"]["completion_tokens"] == max_tokens


async def test_scores_of_a_prompt_stand_by_themselves_where_it_is_not_echoed(application):
    _, data = await post(application, prompt=[97, 98], logprobs=1, prompt_logprobs=1, max_tokens=1)
    choice = answer(data)["choices"][0]
    assert (choice["text"], choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]) == (
        "Paris",
        ["Paris"],
        [0],
    )
    scores = [None, {"98": {"logprob": -1.0, "rank": 1, "decoded_token": "b"}}]
    assert choice["prompt_logprobs"] == scores


@pytest.mark.parametrize(("max_tokens", "counted"), [(0, 0), (1, 1)])
async def test_a_stream_counts_the_tokens_that_it_shows(application, max_tokens, counted):
    body = {"prompt": [97, 98], "echo": True, "max_tokens": max_tokens}
    _, data = await post(application, **body, stream=True, stream_options={"include_usage": True})
    chunks = [answer(block.removeprefix("data: ").encode()) for block in data.decode().split("\n\n")[:-2]]
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    assert text == "ab" + "Paris" * counted
    usage = chunks[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (2, counted, 2 + counted)


async def test_ids_of_tokens_are_returned_on_request(application):
    for requested in (True, False):
        body = {"prompt": "ab", "max_tokens": 2, "return_token_ids": requested}
        _, data = await post(application, **body)
        choice = answer(data)["choices"][0]
        assert (choice.get("token_ids"), choice.get("prompt_token_ids")) == (
            ([1000, 1001], [97, 98]) if requested else (None, None)
        )
        _, data = await post(application, **body, stream=True)
        chunks = [answer(block.removeprefix("data: ").encode()) for block in data.decode().split("\n\n")[:-2]]
        reported = [chunk["choices"][0].get("token_ids") for chunk in chunks]
        assert reported == ([[1000], [1001]] if requested else [None, None])


@pytest.mark.parametrize("echo", [False, True])
async def test_a_streams_scores_go_on_where_the_last_ended(application, echo):
    _, data = await post(application, prompt=[97, 98], echo=echo, logprobs=1, max_tokens=3, stream=True)
    blocks = data.decode().split("\n\n")[:-2]
    scores = [answer(block.removeprefix("data: ").encode())["choices"][0]["logprobs"] for block in blocks]
    tokens, begin = [token for part in scores for token in part["tokens"]], 2 if echo else 0
    assert tokens == [*("ab" if echo else ""), "Paris", " is", " the"]
    assert [offset for part in scores for offset in part["text_offset"]] == [*range(begin), begin, begin + 5, begin + 8]
    assert scores[-1]["token_logprobs"] == [-0.5]
    assert scores[-1]["top_logprobs"] == [{" the": -0.5}]


async def test_a_stream_of_several_choices_counts_each_prompt_once(application):
    options = {"include_usage": True, "continuous_usage_stats": True}
    _, data = await post(application, prompt=["ab", "c"], n=2, max_tokens=2, stream=True, stream_options=options)
    usages = [answer(block.removeprefix("data: ").encode())["usage"] for block in data.decode().split("\n\n")[:-2]]
    assert (usages[-1]["prompt_tokens"], usages[-1]["completion_tokens"]) == (3, 8)
    assert usages[0]["completion_tokens"] == 1
    assert usages[-2] == usages[-1]


async def test_several_prompts_stream_as_one(application):
    response, data = await post(
        application, prompt=["ab", "c"], stream=True, echo=True, stream_options={"include_usage": True}
    )
    assert response.status_code == 200
    texts = {0: "", 1: ""}
    blocks = data.decode().strip().split("\n\n")
    assert blocks[-1] == "data: [DONE]"
    usage = answer(blocks[-2].removeprefix("data: ").encode())
    for block in blocks[:-2]:
        choice = answer(block.removeprefix("data: ").encode())["choices"][0]
        texts[choice["index"]] += choice["text"]
    assert texts == {0: "ab" + ANSWER, 1: "c" + ANSWER}
    assert usage["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 12,
        "total_tokens": 15,
        "prompt_tokens_details": None,
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_client_accepts_it(application, serve, stream):
    # The client's type of a streamed completion has no null finish_reason, which OpenAI's own service sends.
    strict = not stream
    url = await serve(application)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", _strict_response_validation=strict) as client:
        got = await client.completions.create(model="fake", prompt="ab", logprobs=1, stream=stream)
        text = "".join([chunk.choices[0].text async for chunk in got]) if stream else got.choices[0].text
    assert text == ANSWER


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": ["a"] * 2049}, "prompt"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
async def test_bad_fields_are_named(application, engine, change, param):
    response, data = await post(application, **{"prompt": "x", **change})
    assert response.status_code == 400
    assert answer(data)["error"]["param"] == param
    assert not engine.open


def test_offsets_count_characters_that_several_tokens_spell_once():
    pieces = ["Z", "ü".encode()[:1], "ü".encode()[1:], "日".encode()[:2], "日".encode()[2:], "!"]
    raw = [piece if isinstance(piece, bytes) else piece.encode() for piece in pieces]
    entries = [TokenLogprob(number, part.decode(errors="replace"), part, -1.0) for number, part in enumerate(raw)]
    reported = completion_logprobs(entries, top=0, offset=10)
    assert reported.text_offset == [10, 11, 12, 12, 13, 13]
    assert sum(characters(entry) for entry in entries) == len("Zü日!")


async def test_a_missing_prompt_is_named(application):
    response, data = await post(application)
    assert response.status_code == 400
    assert answer(data)["error"]["param"] == "prompt"


async def test_prompt_logprobs_by_token_id(application):
    _, data = await post(application, prompt="ab", prompt_logprobs=1)
    assert answer(data)["choices"][0]["prompt_logprobs"] == [
        None,
        {"98": {"logprob": -1.0, "rank": 1, "decoded_token": "b"}},
    ]


async def test_suffix_goes_through_the_operators_template(make_application, tmp_path):
    file = tmp_path / "infill.jinja"
    file.write_text("<pre>{{ prompt }}<suf>{{ suffix }}<mid>")
    application = make_application(completion_template=str(file))
    response, _ = await post(application, prompt="a", suffix="b")
    assert response.status_code == 200
    assert application.engine.requests[0]["prompt"] == "<pre>a<suf>b<mid>"


async def test_cached_tokens_are_reported_when_requested(make_application):
    _, data = await post(make_application(enable_cache_report=True), prompt="abcd")
    assert answer(data)["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


async def test_best_of_returns_the_choices_with_the_highest_mean(application, engine, monkeypatch):
    """Choice 1 is the likeliest, then choice 2; all of them are counted."""
    means = {0: -3.0, 1: -0.5, 2: -1.0}

    async def run(stream):
        for index, mean in means.items():
            entries = tuple(TokenLogprob(7, "x", b"x", mean + spread) for spread in (-0.25, 0.25))
            usage = Usage(prompt_tokens=1, completion_tokens=2)
            yield Delta(
                request_id="r",
                index=index,
                text=f"choice {index}",
                token_ids=(7, 7),
                logprobs=entries,
                finish_reason="stop",
                usage=usage,
            )

    monkeypatch.setattr(FakeStream, "_run", run)
    returned = answer((await post(application, prompt="a", best_of=3, n=2))[1])
    assert engine.requests[0]["params"].n == 3
    assert [(c["index"], c["text"], c["logprobs"]) for c in returned["choices"]] == [
        (0, "choice 1", None),
        (1, "choice 2", None),
    ]
    assert returned["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), "<|fim_prefix|>{a}<|fim_suffix|>b<|fim_middle|>"),
        (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), "<fim_prefix>{a}<fim_suffix>b<fim_middle>"),
        (("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), "<｜fim▁begin｜>{a}<｜fim▁hole｜>b<｜fim▁end｜>"),
        (("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"), "<[fim-suffix]>b<[fim-prefix]>{a}<[fim-middle]>"),
        (("[PREFIX]", "[SUFFIX]"), "[SUFFIX]b[PREFIX]{a}"),
        (("<fim_prefix>", "<fim_suffix>"), None),
    ],
)
async def test_a_suffix_takes_the_form_whose_marks_the_model_has(application, engine, monkeypatch, marks, expected):
    async def is_special(mark):
        return mark in marks

    monkeypatch.setattr(application.service, "is_special", is_special)
    response, _ = await post(application, prompt="{a}", suffix="b")
    assert response.status_code == (400 if expected is None else 200)
    assert [request["prompt"] for request in engine.requests] == ([] if expected is None else [expected])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "suffix": "b", "stop_token_ids": [7]}),
        ("/api/generate", {"model": "fake", "prompt": "a", "suffix": "b"}),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
    ],
)
async def test_what_is_filled_in_ends_at_a_mark(application, engine, monkeypatch, path, body):
    marks = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>"]

    async def is_special(mark):
        return mark in marks

    async def mark_token(mark):
        return 100 + marks.index(mark)

    monkeypatch.setattr(application.service, "is_special", is_special)
    monkeypatch.setattr(application.service, "mark_token", mark_token)
    response = await application.test_client().post(path, json=body)
    assert response.status_code == 200
    own = tuple(body.get("stop_token_ids", ()))
    assert engine.requests[0]["params"].stop_token_ids == (*own, 100, 101, 102, 103)
