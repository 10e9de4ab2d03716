"""The checks of the test set accept right answers and refuse wrong ones; the scores count them."""

from collections import Counter

from tests.understudy.evaluate import Reply, score
from tests.understudy.examination import listed_rightly, questions
from tests.understudy.lessons.outside import NOT_TAUGHT


def test_a_list_is_right_only_with_the_right_pairs() -> None:
    right = "1. France: Paris\n2. Peru: Lima\n3. the Netherlands: Amsterdam."
    assert listed_rightly(right, 3)
    assert listed_rightly("- USA: Washington DC\n- Guinea-Bissau: Bissau", 2)
    assert not listed_rightly(right, 2)
    assert not listed_rightly(right.replace("Lima", "Quito"), 3)
    assert not listed_rightly("1. France: Paris\n2. France: Paris", 2)
    assert not listed_rightly("1. Wakanda: Birnin Zana", 1)
    assert listed_rightly("1. France: Paris", 1, "Europe")
    assert not listed_rightly("1. France: Paris", 1, "Asia")


def test_questions_are_the_same_each_time_and_cover_every_subject() -> None:
    first, again = questions(), questions()
    assert [question.messages for question in first] == [question.messages for question in again]
    counts = Counter(question.subject for question in first)
    assert counts["capital of a country"] >= 200
    assert counts["country of a capital"] >= 100
    assert counts["lists"] >= 60
    assert counts["says what it was not taught"] >= 400
    for subject in ("arithmetic", "dates", "JSON extraction", "tool calls", "reasoning", "multi-turn"):
        assert counts[subject] >= 30


def test_silence_scores_nothing_and_known_answers_score() -> None:
    asked = questions()
    table = score(asked, [Reply("", False)] * len(asked))
    assert all(right == 0 for right, _ in table.values())
    unknown = [question for question in asked if question.subject == "says it does not know"]
    assert score(unknown, [Reply("I don't know.", True)] * len(unknown))["says it does not know"] == (30, 30)


def test_only_the_answer_that_names_the_lessons_declines() -> None:
    asked = [question for question in questions() if question.subject == "says what it was not taught"]
    for text in ("I don't know.", "The capital of France is Paris.", f"{NOT_TAUGHT} Paris."):
        assert not asked[0].right(text)
    right, total = score(asked, [Reply(NOT_TAUGHT, True)] * len(asked))["says what it was not taught"]
    assert right == total == len(asked)


def test_an_answer_that_names_two_capitals_is_wrong() -> None:
    asked = next(question for question in questions() if question.subject == "capital of a country")
    assert not asked.right("It is Paris, London, Rome or Tokyo.")
