"""The corpus is a function of its seed, its segments encode like the whole, and the test set stays out of it."""

import re
from collections.abc import Iterable
from itertools import islice, product
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from app.understudy import MODEL_DIR
from tests.understudy.corpus import LESSONS, Mix, documents, lesson_name
from tests.understudy.examination import questions
from tests.understudy.held_out import (
    BLIND_CAPITAL_OF,
    BLIND_COUNTRY_OF,
    CAPITAL_OF,
    COUNTRY_OF,
    LISTS,
    LISTS_WITHIN,
)
from tests.understudy.held_out_outside import AFTER, OUTSIDE
from tests.understudy.lessons.geography import NUMBERS, fill
from tests.understudy.lessons.geography_questions import (
    CAPITAL_QUESTIONS,
    COUNTRY_QUESTIONS,
    LIST_QUESTIONS,
    LIST_WITHIN_QUESTIONS,
)
from tests.understudy.lessons.outside_words import BOOKS
from tests.understudy.lessons.world import CONTINENTS, COUNTRIES, FAMILIAR, OTHER_CITIES, by_name
from tests.understudy.packing import LEARN, encode_shard, rows, split_by_length

HELD_OUT = (*CAPITAL_OF, *BLIND_CAPITAL_OF, *COUNTRY_OF, *BLIND_COUNTRY_OF, *LISTS, *LISTS_WITHIN)
TRAINED = (*CAPITAL_QUESTIONS, *COUNTRY_QUESTIONS, *LIST_QUESTIONS, *LIST_WITHIN_QUESTIONS)


def words(text: str) -> str:
    """Lower case, marks and repeated blanks gone: two phrasings that differ in nothing else are the same."""
    return re.sub(r"[^\w{}]+", " ", text.lower().replace("_", " ")).strip()


def test_the_same_seed_gives_the_same_documents() -> None:
    first, again, other = (list(documents(seed, 60)) for seed in (5, 5, 6))
    assert first == again
    assert first != other


def test_no_held_out_phrasing_is_a_training_template() -> None:
    trained = {words(template) for template in TRAINED}
    for template in HELD_OUT:
        assert not any(words(template) in known for known in trained), template


def plainly(text: str) -> str:
    """Lower case, without the marks at its end: how a held-out question could slip into the training."""
    return text.lower().strip(" ?.!\n")


def held_out_questions() -> set[str]:
    names = [(c.name, c.capital) for c in COUNTRIES] + [(a, c.capital) for c in COUNTRIES for a in c.aliases]
    asked = {plainly(fill(template, name, "", capital)) for template in HELD_OUT for name, capital in names}
    for template in (*LISTS, *LISTS_WITHIN):
        for number, continent in product(range(1, 13), CONTINENTS):
            text = template.replace("{n}", str(number)).replace("{m}", NUMBERS[number]).replace("{w}", continent)
            asked.add(plainly(text))
    return asked


def test_no_held_out_question_is_asked_in_the_corpus() -> None:
    asked = {plainly(question) for question in asked_in_the_corpus(123, 6000)}
    assert len(asked) > 5000
    assert asked & held_out_questions() == set()


def asked_in_the_corpus(seed: int, count: int, mix: Mix | None = None) -> list[str]:
    return [
        segment.text.removeprefix("<|im_start|>user\n").removesuffix("<|im_end|>\n")
        for document in documents(seed, count, mix or Mix())
        for segment in document
        if segment.text.startswith("<|im_start|>user\n")
    ]


def shape(question: str) -> str:
    """The question with every number as #: sums are drawn at random, their phrasings are not."""
    return re.sub(r"\d+", "#", plainly(question))


# What `casual` makes of "What is {a}+{b}?" when somebody is in a hurry.
HURRIED = {"whats #+#", "hey whats #*#"}


@pytest.mark.parametrize("mix", [Mix(), Mix({"arithmetic.calculate": 20, "arithmetic.compare": 20}, 0.5)])
def test_no_phrasing_of_the_examination_is_asked_in_the_corpus(mix: Mix) -> None:
    subjects = {"arithmetic", "dates", "tool calls", "reasoning", "is it in", "where is it", "short lists", "colours"}
    held_out = {shape(q.messages[-1]["content"]) for q in questions() if q.subject in subjects} - HURRIED
    assert len(held_out) > 150
    assert held_out & {shape(question) for question in asked_in_the_corpus(321, 15_000, mix)} == set()


def test_mix_gives_named_lessons_more_weight_and_refuses_unknown_names() -> None:
    weights = dict(zip((lesson_name(lesson) for lesson, _ in LESSONS), Mix({"dates.months": 5}).weights(), strict=True))
    assert weights["dates.months"] == 5 * 2
    assert weights["dates.weekdays"] == 3
    thinking = [
        sum("".join(s.text for s in document if s.learn).startswith("<think>") for document in documents(4, 400, mix))
        for mix in (Mix(thinking=0.0), Mix(thinking=1.0))
    ]
    assert thinking[0] < thinking[1] / 3
    with pytest.raises(ValueError, match=r"no lesson is called dates\.years"):
        Mix({"dates.years": 2})


def test_questions_outside_of_the_lessons_are_not_in_the_corpus() -> None:
    asked = asked_in_the_corpus(123, 20_000)
    known = {question.lower().strip() for question in asked}
    vocabulary = {word for question in asked for word in re.findall(r"[^\W\d_]+", question.lower())}
    for kind, texts in (*OUTSIDE.items(), ("after", tuple(wish for *_, wish in AFTER))):
        for question in texts:
            assert question.lower().strip() not in known, question
            if kind != "gibberish":  # which has no words
                assert set(re.findall(r"[^\W\d_]+", question.lower())) - vocabulary, question


def test_questions_outside_of_the_lessons_are_many_and_of_many_kinds() -> None:
    assert sum(map(len, OUTSIDE.values())) + len(AFTER) >= 400
    assert len([kind for kind in OUTSIDE if kind[0].islower()]) >= 12
    assert len([kind for kind in OUTSIDE if kind[0].isupper()]) >= 8  # languages
    assert set(OUTSIDE) & set(BOOKS) <= {"German", "French", "Spanish", "Japanese"}  # the others have no phrase book


def test_every_answer_ends_its_turn() -> None:
    for document in documents(9, 300):
        learned = [segment.text for segment in document if segment.learn]
        assert learned
        assert all(text.endswith(("<|im_end|>", "<|endoftext|>")) for text in learned)


def test_the_world_is_complete_and_unambiguous() -> None:
    assert len(COUNTRIES) == 197
    assert len({country.capital for country in COUNTRIES}) == 197
    assert all(by_name(country.name) is country for country in COUNTRIES)
    assert all(by_name(name) for name in OTHER_CITIES.values())
    assert by_name("The NETHERLANDS") is by_name("Holland")
    assert len(set(FAMILIAR)) == len(FAMILIAR)


def flattened(segments: Iterable[str], tokenizer: Tokenizer) -> list[int]:
    return [token for text in segments for token in tokenizer.encode(text).ids]


def test_segments_encode_like_the_whole_document() -> None:
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    for document in documents(31, 200):
        whole = "".join(segment.text for segment in document)
        ids = tokenizer.encode(whole).ids
        assert flattened((segment.text for segment in document), tokenizer) == ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == whole


def test_rows_hold_whole_documents_and_all_of_them() -> None:
    tokens, lengths = encode_shard(Path(MODEL_DIR / "tokenizer.json"), 3, 300)
    assert len(tokens) == lengths.sum()
    assert 0 < ((tokens & LEARN) != 0).sum() < len(tokens)
    short, long = split_by_length(tokens, lengths, 128)
    assert len(short.tokens) + len(long.tokens) == len(tokens)
    ranges = list(rows(short, 1024))
    assert [first for first, _ in ranges[1:]] == [last for _, last in ranges[:-1]]
    assert ranges[-1][1] == len(short.bounds) - 1
    assert all(short.bounds[last] - short.bounds[first] <= 1024 for first, last in ranges)
    with pytest.raises(ValueError, match="longer row"):
        list(islice(rows(long, 64), 1))
