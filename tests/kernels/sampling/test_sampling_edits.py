"""Masks, bias, bad words, min_tokens and penalties, each against its definition."""

from __future__ import annotations

import pytest
import torch

from kernels.contract.step import SlotSampling, ThoughtBudget
from kernels.sampling.penalties import apply_penalties
from kernels.sampling.sampler import Sampler

VOCAB = 200


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def greedy(logits: torch.Tensor, histories: list[list[int]], prompts: list[int], **each: list) -> list[int]:
    """Greedy tokens of rows with the given token histories, prompt lengths and sampling fields."""
    sampler = Sampler(logits.shape[1], len(histories))
    table = torch.full((len(histories), 40), 7, dtype=torch.int32)  # 7: what lies behind a history must not matter
    for row, tokens in enumerate(histories):
        fields = {name: values[row] for name, values in each.items()}
        sampler.admit(row, SlotSampling(temperature=0.0, **fields), prompts[row])
        table[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    lengths = torch.tensor([len(tokens) for tokens in histories])
    found = sampler.sample(logits.clone(), torch.arange(len(histories)), lengths, table)
    assert found.failed == []
    return found.tokens.tolist()


def falling(rows: int = 1) -> torch.Tensor:
    """Token 0 is the most likely, then 1, 2 ..."""
    return torch.linspace(5, -5, VOCAB).repeat(rows, 1)


def test_allowed_banned_and_biased_tokens():
    assert greedy(
        falling(5),
        [[1]] * 5,
        [1] * 5,
        allowed_ids=[(), (50, 40), (50, 40), (), ()],
        ban_ids=[(0, 1), (), (40,), (0,), ()],
        bias_ids=[(), (50,), (), (3, 0), (VOCAB + 5, -1)],
        bias_values=[(), (100.0,), (), (20.0, 100.0), (100.0, 100.0)],
    ) == [2, 50, 50, 3, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_nothing_is_left_the_most_probable_allowed_token_is_taken(temperature):
    sampler = Sampler(VOCAB, 3)
    everything = tuple(range(VOCAB))
    sampler.admit(0, SlotSampling(temperature=temperature, allowed_ids=(9, 4), ban_ids=(4, 9), logprobs=0), 1)
    sampler.admit(1, SlotSampling(temperature=temperature, ban_ids=everything), 1)
    sampler.admit(2, SlotSampling(temperature=temperature, allowed_ids=(30,)), 1)
    logits = falling(3)
    logits[2, 30] = -torch.inf
    found = sampler.sample(logits, torch.arange(3), torch.ones(3, dtype=torch.int64), torch.zeros(3, 4).int())
    assert found.tokens.tolist() == [4, 0, 30]
    assert found.failed == []
    assert bool(found.logprobs[0].isfinite())


def test_min_tokens_holds_stop_tokens_back():
    # Prompts of 2; with 0, 2, 3 and 4 output tokens and min_tokens 3.
    histories = [[5] * (2 + made) for made in (0, 2, 3, 4)]
    assert greedy(falling(4), histories, [2] * 4, stop_ids=[(0, 1)] * 4, min_tokens=[3] * 4) == [2, 2, 0, 0]
    assert greedy(falling(), [[5, 5]], [2], stop_ids=[(0,)], min_tokens=[0]) == [0]


def test_bad_words_ban_their_last_token_after_the_others():
    words = ((11, 12, 0), (13, 0), (14, 15, 16, 1))
    histories = [[9, 11, 12], [11, 12, 9], [12], [13], [9, 9, 14, 15, 16], [11, 12, 13], [14, 15], [9, 11, 11, 12]]
    prompts = [1] * len(histories)
    expected = [1, 0, 0, 1, 0, 1, 0, 1]
    assert greedy(falling(8), histories, prompts, bad_words=[words] * 8) == expected
    logits = falling(1)
    logits[0, 0] = 0.0  # the argmax is token 1, which the last word bans
    assert greedy(logits, [[9, 9, 14, 15, 16]], [1], bad_words=[words]) == [2]
    # A word of one token is banned for good; two words with the same end do not lift each other's ban.
    assert greedy(falling(), [[8]], [1], bad_words=[((0,), (9, 1), (8, 1))]) == [2]
    # Words longer than the history, and the tokens behind it (7), match nothing.
    assert greedy(falling(), [[8]], [1], bad_words=[((7, 8, 0), (8, 7, 0))]) == [0]


def test_bad_words_of_other_rows_do_not_matter():
    histories = [[3, 4], [4, 3], [3, 4]]
    assert greedy(falling(3), histories, [1] * 3, bad_words=[((4, 0),), ((4, 0),), ()]) == [1, 0, 0]


def by_definition(row, history, prompt, repetition, frequency, presence):
    row, output = row.clone().double(), history[prompt:]
    for token in set(history):
        value = float(row[token])
        row[token] = value / repetition if value > 0 else value * repetition
    for token in set(output):
        row[token] -= frequency * output.count(token) + presence
    return row


@pytest.mark.parametrize(
    ("sampling", "needed"),
    [
        ({"repetition_penalty": 1.1}, True),
        ({"frequency_penalty": 0.1}, True),
        ({"presence_penalty": -0.1}, True),
        ({"bad_words": ((3, 4),)}, True),
        ({"bad_words": ((3,),)}, False),
        ({"min_tokens": 4, "stop_ids": (2,), "ban_ids": (5,), "bias_ids": (7,), "bias_values": (1.0,)}, False),
        ({"allowed_ids": (1, 2), "temperature": 0.7, "top_k": 4, "logprobs": 2}, False),
    ],
)
def test_which_edits_read_earlier_tokens(sampling, needed):
    """Draft tokens of the others are verified against the slots' own histories, which hold none of the draft tokens
    before."""
    sampler = Sampler(VOCAB, 4)
    for slot, one in ((1, SlotSampling()), (2, SlotSampling(**sampling)), (3, SlotSampling(temperature=0.0))):
        sampler.admit(slot, one, 3)
    assert sampler.needs_history([1, 2, 3]) is needed
    assert sampler.needs_history([1, 3]) is False
    sampler.release(2)
    assert sampler.needs_history([1, 2]) is False


@pytest.mark.parametrize(
    "sampling",
    [
        {"repetition_penalty": 0.9},
        {"frequency_penalty": 0.1},
        {"presence_penalty": -0.1},
        {"bad_words": ((3, 4),)},
        {"min_tokens": 4, "stop_ids": (2,)},
        {"ban_ids": (5,)},
        {"allowed_ids": (1, 2)},
        {"bias_ids": (7,), "bias_values": (1.0,)},
        {"logprobs": 0},
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_which_rows_are_not_left_to_kernels_that_neither_edit_nor_score(sampling, temperature):
    sampler = Sampler(VOCAB, 5)
    sampler.admit(1, SlotSampling(temperature=0.0), 3)
    sampler.admit(2, SlotSampling(temperature=temperature, **sampling), 3)
    sampler.admit(3, SlotSampling(temperature=0.7, top_k=4, top_p=0.9, min_p=0.1), 3)
    assert (sampler.plain((1,)), sampler.plain((1, 3)), sampler.plain((1, 2))) == (True, False, False)
    assert (sampler.unedited((1, 3)), sampler.unedited((1, 2)), sampler.unedited((3, 2))) == (True, False, False)
    sampler.release(2)
    assert sampler.plain((1, 2))


@pytest.mark.parametrize("counted", [True, False])
def test_penalties_follow_their_definitions(counted):
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(6, VOCAB, generator=generator) * 3
    lengths = [1, 5, 30, 30, 17, 9]
    prompts = [1, 5, 10, 1, 17, 3]
    table = torch.randint(0, 12, (6, 33), generator=generator, dtype=torch.int32)
    factors = torch.tensor(
        [[1.2, 0.5, 0.3], [2.0, -0.5, 0.0], [1.0, 0.4, 1.0], [0.7, 0.0, -0.6], [1.1, 2.0, 2.0], [1.0, 0.0, 0.7]]
    )
    if not counted:
        factors[:, 1:] = 0
    rows = torch.tensor([0, 1, 2, 3, 5])
    changed = logits.clone()
    apply_penalties(
        changed, rows, table[rows], torch.tensor(lengths)[rows], torch.tensor(prompts)[rows], *factors[rows].T, counted
    )
    assert torch.equal(changed[4], logits[4])
    for row in rows.tolist():
        reference = by_definition(
            logits[row], table[row, : lengths[row]].tolist(), prompts[row], *factors[row].tolist()
        )
        torch.testing.assert_close(changed[row].double(), reference, atol=1e-5, rtol=0)


def test_penalties_reach_the_sampled_token():
    logits = torch.zeros(4, VOCAB)
    logits[:, 3], logits[:, 4], logits[:, 5] = 3.0, 2.5, 2.0
    histories = [[3, 4, 9], [9, 3, 3, 4], [9, 3, 4, 4, 3], [3, 3, 9]]
    tokens = greedy(
        logits,
        histories,
        [3, 1, 1, 2],
        repetition_penalty=[2.0, 1.0, 1.0, 1.0],
        frequency_penalty=[0.0, 0.5, 0.0, 2.0],
        presence_penalty=[0.0, 0.0, 0.6, 0.0],
    )
    # Repetition counts the prompt: 1.5, 1.25, 2.0. Frequency: 2.0, 2.0, 2.0. Presence: 2.4, 1.9. Prompt is not output.
    assert tokens == [5, 3, 3, 3]
    # Each alone in its batch, too.
    assert greedy(logits[:1], [[9, 3, 3, 3]], [1], frequency_penalty=[0.5]) == [4]
    assert greedy(logits[:1], [[9, 3]], [1], presence_penalty=[0.6]) == [4]
    assert greedy(logits[:1], [[9, 3]], [1], repetition_penalty=[2.0]) == [4]


def test_the_transforms_come_in_their_order():
    # A bias is added before the repetition penalty divides: 1 + 5 = 6, halved is 3, under the 4 of token 1.
    logits = torch.full((1, VOCAB), -9.0)
    logits[0, 0], logits[0, 1] = 1.0, 4.0
    assert greedy(logits, [[0]], [1], bias_ids=[(0,)], bias_values=[(5.0,)]) == [0]
    assert greedy(logits, [[0]], [1], bias_ids=[(0,)], bias_values=[(5.0,)], repetition_penalty=[2.0]) == [1]


def test_a_thought_ends_when_its_budget_is_spent():
    begin, end = 50, 51
    budget = ThoughtBudget(3, begin, end)
    histories = [
        [begin, 9, 9, 9],  # begun by the prompt, 3 output tokens: due
        [begin, 9, 9],  # not yet
        [begin, 9, end, 9],  # ended by itself
        [9, begin, 9, 9],  # begun by the output
        [9, 9, 9, 9],  # no thought
        [begin, 9, 9, 9, 9],  # past it, as after a restart
        [begin, end, 9, 9, 9],  # ended by the prompt, whose length is 2
    ]
    prompts = [1, 1, 1, 1, 1, 1, 2]
    expected = [end, 0, 0, end, 0, end, 0]
    assert greedy(falling(7), histories, prompts, thought_budget=[budget] * 7) == expected
    always = ThoughtBudget(3, -1, end)
    assert greedy(falling(), [[9, 9, 9, 9]], [1], thought_budget=[always]) == [end]
    assert greedy(falling(), [[9]], [1], thought_budget=[ThoughtBudget(0, -1, end)]) == [end]
    assert greedy(falling(), [[9]], [1], thought_budget=[ThoughtBudget(0, -1, VOCAB)]) == [0]
    none = ThoughtBudget(0, begin, end)
    histories = [[9, begin], [9, begin, end], [9, begin, end, 9], [9, 9, begin]]
    assert greedy(falling(4), histories, [1] * 4, thought_budget=[none] * 4) == [end, 0, 0, 0]


def test_a_budget_holds_behind_a_thought_that_ended_before():
    begin, end = 5, 6
    begun = [begin, 8, end, begin, 9, 9]
    assert greedy(falling(), [begun], [4], thought_budget=[ThoughtBudget(2, begin, end)]) == [end]
    assert greedy(falling(), [[begin, 8, end, 9, 9, 9]], [1], thought_budget=[ThoughtBudget(2, begin, end)]) == [0]


def test_a_budget_of_a_thought_reads_the_history():
    sampler = Sampler(VOCAB, 2)
    sampler.admit(0, SlotSampling(thought_budget=ThoughtBudget(3, 1, 2)), 1)
    sampler.admit(1, SlotSampling(ban_ids=(1,)), 1)
    assert sampler.needs_history([0, 1])
    assert not sampler.needs_history([1])
