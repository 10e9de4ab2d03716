"""Sampling parameters: what is refused, what defaults fill, what a slot gets."""

from __future__ import annotations

import math

import msgspec
import pytest

from actors.protocol.requests import InvalidRequest, Limits, SamplingParams
from actors.requests.sampling_rules import resolve, slot_sampling, validate
from kernels.contract.grammar import Grammar
from kernels.contract.step import SlotSampling

VOCAB = 1000

GOOD = [
    {},
    {"max_tokens": 1, "min_tokens": 1},
    {"temperature": 0}, {"temperature": 100.0}, {"temperature": 1e-9},
    {"top_p": 1}, {"top_p": 1e-6}, {"top_k": -1}, {"top_k": 0}, {"top_k": 10**6},
    {"min_p": 0}, {"min_p": 1.0},
    {"repetition_penalty": 0.5}, {"frequency_penalty": -2}, {"presence_penalty": 2.0},
    {"seed": -(2**63)}, {"seed": 2**64 - 1}, {"seed": 0},
    {"n": 128},
    {"stop": ("x" * 256,) * 16}, {"stop": ["\n"]}, {"stop": ("\U0001f600",)},
    {"stop_token_ids": (0, VOCAB - 1)},
    {"logprobs": 0, "prompt_logprobs": 20},
    {"logit_bias": {0: -100, VOCAB - 1: 100.0}}, {"logit_bias": {}},
    {"allowed_token_ids": (5,)},
    {"bad_words": ("a", "b c")},
]  # fmt: skip

BAD = [
    {"max_tokens": 0}, {"max_tokens": -1}, {"max_tokens": 2**31}, {"max_tokens": 1.5}, {"max_tokens": True},
    {"min_tokens": -1}, {"min_tokens": None}, {"min_tokens": 5, "max_tokens": 4},
    {"min_tokens": 5, "default_max_tokens": 4},
    {"temperature": -0.1}, {"temperature": math.nan}, {"temperature": math.inf}, {"temperature": 101},
    {"temperature": "1"}, {"temperature": True}, {"temperature": 10**400},
    {"top_p": 0}, {"top_p": 1.01}, {"top_p": math.nan}, {"top_p": -math.inf}, {"top_p": "0.9"},
    {"top_k": -2}, {"top_k": 1.0}, {"top_k": 2**31}, {"top_k": False},
    {"min_p": -0.1}, {"min_p": 1.1}, {"min_p": math.nan},
    {"repetition_penalty": 0}, {"repetition_penalty": -1.0}, {"repetition_penalty": 1e-30},
    {"repetition_penalty": math.inf}, {"repetition_penalty": math.nan},
    {"frequency_penalty": 2.1}, {"frequency_penalty": math.nan}, {"presence_penalty": -2.1}, {"presence_penalty": []},
    {"seed": 2**64}, {"seed": -(2**63) - 1}, {"seed": 1.0}, {"seed": "7"}, {"seed": True},
    {"n": 0}, {"n": 129}, {"n": -1}, {"n": None}, {"n": 2.0},
    {"stop": "word"}, {"stop": ("",)}, {"stop": ("x",) * 17}, {"stop": ("x" * 257,)}, {"stop": (1,)}, {"stop": None},
    {"stop": ("\ud800",)},
    {"stop_token_ids": (VOCAB,)}, {"stop_token_ids": (-1,)}, {"stop_token_ids": (1,) * 129}, {"stop_token_ids": 3},
    {"stop_token_ids": (1.0,)}, {"stop_token_ids": (True,)},
    {"logprobs": -1}, {"logprobs": 21}, {"logprobs": True}, {"logprobs": 1.0}, {"prompt_logprobs": 21},
    {"logit_bias": {VOCAB: 1}}, {"logit_bias": {-1: 1}}, {"logit_bias": {1: 100.5}}, {"logit_bias": {1: math.nan}},
    {"logit_bias": {"1": 1}}, {"logit_bias": {1: "1"}}, {"logit_bias": [1]},
    {"logit_bias": dict.fromkeys(range(1025), 0)},
    {"allowed_token_ids": ()}, {"allowed_token_ids": (VOCAB,)}, {"allowed_token_ids": "12"},
    {"allowed_token_ids": (1,) * 65537},
    {"bad_words": ("",)}, {"bad_words": ("a",) * 129}, {"bad_words": "word"}, {"bad_words": ("x" * 257,)},
    {"bad_words": ("\udfff",)}, {"shown_special_tokens": ("",)},
    {"shown_special_tokens": ("a",) * 65},
    {"ignore_eos": 1}, {"skip_special_tokens": None}, {"include_stop_str_in_output": "yes"},
]  # fmt: skip


@pytest.mark.parametrize("fields", GOOD, ids=lambda f: str(f)[:40])
def test_what_is_allowed(fields):
    params = SamplingParams(**fields)
    validate(params, vocab_size=VOCAB)
    validate(params, vocab_size=VOCAB)
    # All of it survives the way to the worker.
    slot = slot_sampling(resolve(params, {}), index=3, seed=2**64 - 1, stop_ids=(1,), bad_words=((1, 2),))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(slot), type=SlotSampling) == slot


@pytest.mark.parametrize("fields", BAD, ids=lambda f: str(f)[:40])
def test_what_is_refused_names_the_field(fields):
    with pytest.raises(InvalidRequest) as caught:
        validate(SamplingParams(**fields), vocab_size=VOCAB)
    name = next(iter(fields))
    assert caught.value.param == name
    assert name in str(caught.value)
    assert len(str(caught.value)) < 300  # never the user's whole input


def test_messages_report_the_limit_and_the_remedy():
    with pytest.raises(
        InvalidRequest, match=r"top_p must be a finite number more than 0 and at most 1; you gave 0\.0\. 1 keeps"
    ):
        validate(SamplingParams(top_p=0.0))
    with pytest.raises(InvalidRequest, match=r"stop has 3 entries; at most 2 are allowed\. Send fewer\."):
        validate(SamplingParams(stop=("a", "b", "c")), limits=Limits(stop_strings=2))
    with pytest.raises(InvalidRequest, match=r"ids are 0 to 9\."):
        validate(SamplingParams(stop_token_ids=(10,)), vocab_size=10)


def test_without_a_vocabulary_ids_are_only_bounded():
    validate(SamplingParams(stop_token_ids=(10**6,), logit_bias={10**6: 1.0}))
    with pytest.raises(InvalidRequest):
        validate(SamplingParams(stop_token_ids=(2**31,)))


def test_resolving_fills_only_what_was_left_out():
    defaults = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05, "eos": [1]}
    filled = resolve(SamplingParams(temperature=0.0, top_k=-1), defaults)
    assert (filled.temperature, filled.top_k) == (0.0, -1)
    assert (filled.top_p, filled.min_p, filled.repetition_penalty) == (0.95, 0.1, 1.05)
    assert (filled.frequency_penalty, filled.presence_penalty) == (0.0, 0.0)
    neutral = resolve(SamplingParams(), {})
    assert (neutral.temperature, neutral.top_p, neutral.top_k, neutral.min_p) == (1.0, 1.0, 0, 0.0)
    assert (neutral.repetition_penalty, neutral.max_tokens, neutral.seed) == (1.0, None, None)
    assert resolve(neutral, defaults) is neutral


def test_do_sample_false_is_greedy_unless_the_request_overrides_it():
    defaults = {"do_sample": False, "temperature": 0.6, "top_p": 0.9}
    assert resolve(SamplingParams(), defaults).temperature == 0.0
    assert resolve(SamplingParams(temperature=0.5), defaults).temperature == 0.5
    assert resolve(SamplingParams(), {**defaults, "do_sample": True}).temperature == 0.6


@pytest.mark.parametrize("useless", [None, "0.5", math.nan, -1, [], True, 1e9])
def test_a_default_that_no_request_could_carry_is_passed_over(useless):
    filled = resolve(SamplingParams(), {"temperature": useless, "top_p": useless, "repetition_penalty": useless})
    assert (filled.temperature, filled.top_p, filled.repetition_penalty) == (1.0, 1.0, 1.0)
    validate(filled, vocab_size=VOCAB)


def test_resolving_leaves_what_is_wrong_to_the_validation():
    assert math.isnan(resolve(SamplingParams(temperature=math.nan), {"temperature": 0.5}).temperature)


def test_a_slot_s_sampling():
    params = SamplingParams(
        temperature=0.5,
        top_k=-1,
        logit_bias={4: -100, 2: 1.5},
        min_tokens=2,
        allowed_token_ids=(7, 8),
        logprobs=3,
        prompt_logprobs=2,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.5,
        frequency_penalty=-0.5,
        presence_penalty=1,
        speculative_num_draft_tokens=5,
    )
    slot = slot_sampling(params, index=0, seed=77, stop_ids=(1, 2), bad_words=[[3, 4], [5]])
    assert slot == SlotSampling(
        temperature=0.5,
        top_k=0,
        bias_ids=(4, 2),
        bias_values=(-100.0, 1.5),
        min_tokens=2,
        stop_ids=(1, 2),
        allowed_ids=(7, 8),
        bad_words=((3, 4), (5,)),
        logprobs=3,
        prompt_logprobs=2,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.5,
        frequency_penalty=-0.5,
        presence_penalty=1.0,
        max_drafts=4,
        seed=77,
    )
    assert slot_sampling(msgspec.structs.replace(params, speculative=False), index=0, seed=77).max_drafts == 0
    assert slot_sampling(SamplingParams(), index=0, seed=0, stop_ids=(1,)) == SlotSampling()


def test_each_choice_has_its_own_seed_and_the_first_has_the_request_s():
    for seed in (0, 5, -1, 2**63, 2**64 - 1):
        seeds = [slot_sampling(SamplingParams(), index=index, seed=seed).seed for index in range(128)]
        assert seeds[0] == seed % 2**64
        assert len(set(seeds)) == 128
        assert all(0 <= one < 2**64 for one in seeds)
    neighbours = {slot_sampling(SamplingParams(), index=i, seed=s).seed for i in range(100) for s in range(100)}
    assert len(neighbours) == 10_000


def test_bad_words_of_too_many_tokens_are_refused():
    slot_sampling(SamplingParams(), index=0, seed=0, bad_words=[[1] * 1024])
    with pytest.raises(InvalidRequest) as caught:
        slot_sampling(SamplingParams(), index=0, seed=0, bad_words=[[1] * 1000, [2] * 25])
    assert caught.value.param == "bad_words"


DEEP = "(" * 65


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_schema", f'{{"pattern": "{DEEP}"}}'),
        Grammar("json_schema", "[" * 65),
        Grammar("json_schema", "{}", f'"{"(" * 40}" "{"(" * 40}"'),
        Grammar("regex", f'"{"(" * 40}" "{"(" * 40}"'),
        Grammar("ebnf", DEEP),
    ],
)
def test_a_deep_grammar_is_refused(grammar: Grammar) -> None:
    with pytest.raises(InvalidRequest, match="deep"):
        validate(resolve(SamplingParams(grammar=grammar), {}), vocab_size=VOCAB)


def test_brackets_in_strings_of_json_do_not_add_up() -> None:
    texts = [f":( {number}" for number in range(80)]
    schema = {"enum": texts, "description": 'a "[" and \\'}
    for grammar in (
        Grammar("choice", msgspec.json.encode(texts).decode()),
        Grammar("json_schema", msgspec.json.encode(schema).decode()),
    ):
        validate(resolve(SamplingParams(grammar=grammar), {}), vocab_size=VOCAB)
