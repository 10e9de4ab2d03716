"""The sampler: distributions, independence of the batch, filters against a plain reference, log-probabilities."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.contract.step import SlotSampling
from kernels.core.logit_blocks import block_maxima
from kernels.core.noise import exponential_noise, keys_at, seed_key
from kernels.sampling.nucleus import cut
from kernels.sampling.sampler import SampledTokens, Sampler


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(
    logits: torch.Tensor, samplings: list[SlotSampling], position: int | list[int] = 5, order: list[int] | None = None
) -> SampledTokens:
    """Rows of `logits` with the sampling of the same index, in the given order of rows."""
    sampler = Sampler(logits.shape[1], len(samplings) + 1)
    for index, sampling in enumerate(samplings):
        sampler.admit(index + 1, sampling, 3)
    order = list(range(len(samplings))) if order is None else order
    positions = [position] * len(samplings) if isinstance(position, int) else position
    history = torch.zeros((len(samplings) + 1, 64), dtype=torch.int32)
    return sampler.sample(
        logits[order].clone(), torch.tensor(order) + 1, torch.tensor([positions[i] for i in order]), history
    )


def draws(logits: torch.Tensor, sampling: dict[str, object], count: int) -> torch.Tensor:
    """How often each token is drawn from one row of logits, over positions and seeds."""
    seeds = 100
    samplings = [SlotSampling(seed=seed, **sampling) for seed in range(seeds)]
    sampler = Sampler(len(logits), seeds)
    for slot, one in enumerate(samplings):
        sampler.admit(slot, one, 3)
    history, slots = torch.zeros((seeds, 8), dtype=torch.int32), torch.arange(seeds)
    counts = torch.zeros(len(logits))
    for position in range(count // seeds):
        found = sampler.sample(logits.repeat(seeds, 1), slots, torch.full((seeds,), position), history)
        counts += torch.bincount(found.tokens, minlength=len(logits))
    return counts


def kept_by_definition(logits: torch.Tensor, s: SlotSampling) -> torch.Tensor:
    """Top-k, then top-p over what is left, then min-p, token by token in sorted order."""
    scaled = logits.double() / s.temperature
    order = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))
    order = order[: s.top_k] if s.top_k > 0 else order
    weights = torch.softmax(scaled[order], 0).tolist()
    kept, mass = torch.zeros(len(logits), dtype=torch.bool), 0.0
    for token, weight in zip(order, weights, strict=True):
        if mass >= s.top_p and s.top_p < 1:
            break
        kept[token] = weight >= s.min_p * weights[0] * (1 - 1e-6)
        mass += weight
    return kept


FILTERS = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 8},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"top_k": 20, "top_p": 0.6, "temperature": 1.3},
    {"top_p": 0.9, "min_p": 0.1, "temperature": 0.8},
    {"top_k": 12, "top_p": 0.95, "min_p": 0.05},
]


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
@pytest.mark.parametrize("vocab", [40, 333])
def test_frequencies_follow_the_distribution(sampling, vocab):
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(1)) * 1.5
    count = 10_000
    counts = draws(logits, sampling, count)
    reference = SlotSampling(**sampling)
    kept = kept_by_definition(logits, reference)
    assert not counts[~kept].any()
    expected = torch.softmax(logits.double()[kept] / reference.temperature, 0) * count
    likely = expected >= 5
    observed = counts[kept].double()
    groups = torch.cat((observed[likely], observed[~likely].sum()[None]))
    theory = torch.cat((expected[likely], expected[~likely].sum().clamp(min=1e-9)[None]))
    statistic = float(((groups - theory) ** 2 / theory)[theory > 1].sum())
    degrees = max(1, int((theory > 1).sum()) - 1)
    assert statistic < degrees + 4 * math.sqrt(2 * degrees) + 4  # beyond the 0.1 % point


def test_every_filter_is_the_race_among_the_kept_tokens():
    """Over random rows: the token is the noise's winner among exactly the tokens that the definitions keep."""
    generator = torch.Generator().manual_seed(3)
    samplings, rows = [], []
    for seed in range(120):
        one = FILTERS[seed % len(FILTERS)]
        samplings.append(SlotSampling(seed=seed, **one))
        row = torch.randn(777, generator=generator) * (0.3, 1.0, 4.0)[seed % 3]
        rows.append(row.bfloat16().float() if seed % 2 else row)  # bfloat16 brings equal values
    logits = torch.stack(rows)
    found = run(logits, samplings, 9)
    for index, sampling in enumerate(samplings):
        keys = keys_at(torch.tensor([seed_key(sampling.seed)], dtype=torch.int32), torch.tensor([9]))
        waits = exponential_noise(keys, torch.arange(777, dtype=torch.int32))
        score = (logits[index] - logits[index].max()) / sampling.temperature - waits.log()
        score[~kept_by_definition(logits[index], sampling)] = -torch.inf
        assert int(found.tokens[index]) == int(score.argmax()), sampling


def test_equal_logits_are_kept_by_the_lowest_id():
    logits = torch.zeros(1, 300)
    tokens = {int(run(logits, [SlotSampling(top_k=3, seed=seed)]).tokens) for seed in range(60)}
    assert tokens == {0, 1, 2}
    tokens = {int(run(logits, [SlotSampling(top_p=0.01, seed=seed)]).tokens) for seed in range(60)}
    assert tokens == {0, 1, 2}
    assert run(logits, [SlotSampling(temperature=0.0)]).tokens.tolist() == [0]
    logits[0, [70, 131]] = 1.0
    assert run(logits, [SlotSampling(temperature=0.0)]).tokens.tolist() == [70]
    assert run(logits, [SlotSampling(top_k=1)]).tokens.tolist() == [70]


def mixed(count: int, vocab: int) -> tuple[torch.Tensor, list[SlotSampling]]:
    extras = [
        {"temperature": 0.0},
        {"repetition_penalty": 1.3},
        {"frequency_penalty": 0.7, "top_p": 0.8},
        {"bias_ids": (1, 2), "bias_values": (3.0, -3.0), "top_k": 30},
        {"allowed_ids": tuple(range(50)), "logprobs": 2},
        {"bad_words": ((0, 0, 7), (5,)), "ban_ids": (9,)},
        {"min_tokens": 10, "stop_ids": (3,)},
        *FILTERS,
    ]
    samplings = [SlotSampling(seed=i * 77, **extras[i % len(extras)]) for i in range(count)]
    return torch.randn(count, vocab, generator=torch.Generator().manual_seed(2)) * 2, samplings


@pytest.mark.parametrize("vocab", [100, 5000])
def test_the_batch_does_not_matter(vocab):
    logits, samplings = mixed(34, vocab)
    positions = [4 + i % 7 for i in range(34)]
    whole = run(logits, samplings, positions)
    backwards = run(logits, samplings, positions, list(reversed(range(34))))
    assert whole.tokens.tolist() == list(reversed(backwards.tokens.tolist()))
    alone = [int(run(logits, samplings, positions, [i]).tokens) for i in range(34)]
    assert whole.tokens.tolist() == alone
    half = run(logits, samplings, positions, list(range(0, 34, 2)))
    assert whole.tokens.tolist()[::2] == half.tokens.tolist()
    assert torch.equal(whole.logprobs[::2], half.logprobs) or torch.allclose(
        whole.logprobs[::2], half.logprobs, equal_nan=True, atol=1e-6
    )


def test_seeds_and_positions_make_the_difference():
    logits = torch.zeros(1, 1000)
    by_seed = [int(run(logits, [SlotSampling(seed=seed)]).tokens) for seed in (1, 1, 2, 2**63, 2**64 - 1, -(2**63))]
    assert by_seed[0] == by_seed[1]
    assert len(set(by_seed)) == 5 or by_seed[3] == by_seed[5]  # -2**63 and 2**63 are the same 64 bits
    assert len(set(by_seed[1:5])) == 4
    by_position = {int(run(logits, [SlotSampling(seed=1)], position).tokens) for position in range(20)}
    assert len(by_position) > 15


def test_a_slot_starts_afresh_for_the_next_request():
    sampler = Sampler(50, 4)
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(5))
    best = int(logits.argmax())
    history = torch.zeros((4, 8), dtype=torch.int32)
    sampler.admit(2, SlotSampling(temperature=0.0, ban_ids=(best,), logprobs=1), 1)
    first = sampler.sample(logits.clone(), torch.tensor([2]), torch.tensor([1]), history)
    assert int(first.tokens) != best
    assert first.logprobs is not None
    sampler.release(2)
    sampler.admit(2, SlotSampling(temperature=0.0), 1)
    second = sampler.sample(logits.clone(), torch.tensor([2]), torch.tensor([1]), history)
    assert int(second.tokens) == best
    assert second.logprobs is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [7, 64, 1001])
def test_greedy_is_the_argmax(dtype, vocab):
    logits = torch.randn(9, vocab, generator=torch.Generator().manual_seed(4)).to(dtype)
    found = run(logits, [SlotSampling(temperature=0.0)] * 9)
    assert found.tokens.tolist() == logits.float().argmax(-1).tolist()
    assert found.failed == []
    assert run(logits, [SlotSampling(temperature=1e-9, seed=3)] * 9).tokens.tolist() == found.tokens.tolist()


@pytest.mark.parametrize("vocab", [100, 5000])
def test_a_broken_row_fails_alone(vocab):
    logits, samplings = mixed(34, vocab)
    sound = run(logits, samplings)
    hurt = logits.clone()
    nonfinite = [1, 2, 4, 8, 12, 15, 16, 17, 18, 22]
    for index, row in enumerate(nonfinite):
        hurt[row, (index * 31) % vocab] = (torch.nan, torch.inf)[index % 2]
    hurt[20] = -torch.inf
    found = run(hurt, samplings)
    assert found.failed == sorted([*nonfinite, 20])
    for row in range(34):
        assert int(found.tokens[row]) == (0 if row in found.failed else int(sound.tokens[row]))


def test_minus_infinity_is_only_a_token_that_is_not_sampled():
    logits = torch.full((2, 200), -torch.inf)
    logits[:, 150] = 1.0
    found = run(logits, [SlotSampling(seed=1, top_p=0.5), SlotSampling(temperature=0.0, logprobs=3)])
    assert found.tokens.tolist() == [150, 150]
    assert found.failed == []
    assert float(found.logprobs[1]) == 0.0


def test_logprobs_are_those_of_the_raw_logits():
    logits = torch.randn(4, 500, generator=torch.Generator().manual_seed(6)) * 3
    samplings = [
        SlotSampling(temperature=0.0, logprobs=5, ban_ids=(int(logits[0].argmax()),)),
        SlotSampling(temperature=0.3, seed=4, top_k=5, logprobs=0, frequency_penalty=2.0),
        SlotSampling(temperature=0.0),
        SlotSampling(temperature=2.0, seed=9, logprobs=20, repetition_penalty=2.0),
    ]
    found = run(logits, samplings)
    reference = logits.double().log_softmax(-1)
    for row in (0, 1, 3):
        assert float(found.logprobs[row]) == pytest.approx(float(reference[row, found.tokens[row]]), abs=1e-5)
    assert math.isnan(float(found.logprobs[2]))
    assert found.top_counts.tolist() == [5, 0, 0, 20]
    for row in (0, 3):
        count = int(found.top_counts[row])
        values, ids = reference[row].topk(count)
        assert found.top_ids[row, :count].tolist() == ids.tolist()
        torch.testing.assert_close(found.top_logprobs[row, :count].double(), values, atol=1e-5, rtol=0)


def test_top_logprobs_of_equal_logits_come_by_id_within_the_vocabulary():
    found = run(torch.zeros(1, 10), [SlotSampling(temperature=0.0, logprobs=20)])
    assert found.top_counts.tolist() == [10]
    assert found.top_ids.tolist() == [list(range(10))]
    assert run(torch.zeros(1, 100), [SlotSampling(logprobs=3)]).top_ids.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("vocab", [30, 2000])
def test_prompt_scores(vocab):
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(7)) * 4
    targets = torch.tensor([0, 5, 29, 3, 3, 1])
    sampler = Sampler(vocab, 2)
    scores, ids, values = sampler.score_prompt(logits.bfloat16(), targets, 4)
    reference = logits.bfloat16().double().log_softmax(-1)
    torch.testing.assert_close(scores.double(), reference[torch.arange(6), targets], atol=1e-4, rtol=0)
    expected = reference.sort(dim=-1, descending=True, stable=True)
    assert ids.tolist() == expected.indices[:, :4].tolist()
    torch.testing.assert_close(values.double(), expected.values[:, :4], atol=1e-4, rtol=0)
    scores, ids, values = sampler.score_prompt(logits, targets, 0)
    assert ids.shape == values.shape == (6, 0)
    logits[2, 1] = torch.nan
    assert sampler.score_prompt(logits, targets, 3)[0].isnan().tolist() == [False, False, True, False, False, False]


def test_an_empty_batch_is_answered():
    sampler = Sampler(64, 2)
    found = sampler.sample(torch.zeros(0, 64), *(torch.zeros(0, dtype=torch.int64),) * 2, torch.zeros(2, 4))
    assert found.tokens.tolist() == [] == found.failed


@pytest.mark.parametrize("sampling", [s for s in FILTERS if "top_p" in s or "top_k" in s], ids=str)
def test_the_cut_by_a_full_sort_is_the_definition_s(sampling):
    """The way an accelerator takes, also for top-p alone."""
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(9)).bfloat16().float() * 2
    one = SlotSampling(**{**sampling, "min_p": 0.0})
    blocks, rows = block_maxima(logits), torch.arange(5)
    factors = (torch.full((5,), one.temperature), torch.full((5,), one.top_k), torch.full((5,), one.top_p).double())
    value, token = cut(logits, rows, blocks, blocks.amax(-1), *factors, largest_k=one.top_k)
    kept = (logits > value[:, None]) | ((logits == value[:, None]) & (torch.arange(300) <= token[:, None]))
    assert torch.equal(kept, torch.stack([kept_by_definition(row, one) for row in logits]))
