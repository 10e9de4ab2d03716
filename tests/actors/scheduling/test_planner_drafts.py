"""What the planner does where the worker verifies draft tokens. That it goes right in all traffic:
test_planner_traffic."""

import msgspec
import pytest

from actors.scheduling.speculation.policy import CONSTANTS, AdaptivePolicy
from kernels.contract.step import SlotSampling, StepTiming
from tests.actors.scheduling.stage import DraftingStage, says, spec, unpack


def test_steps_are_fewer_where_drafts_are_right():
    stage = DraftingStage()
    stage.submit(spec(1, range(5), max_tokens=41))
    stage.play()
    assert stage.tokens(1) == says(range(5), 41)
    assert len(stage.runner.rows) <= 1 + 10 + 1  # the prompt, ten times four tokens, and one wasted


@pytest.mark.parametrize("drafts", [0, 2])
def test_a_request_sets_how_many_drafts_it_may_have(drafts):
    stage = DraftingStage()
    stage.submit(spec(1, range(5), max_tokens=30, sampling=SlotSampling(max_drafts=drafts)))
    most = []
    while (batch := stage.step()) is not None:
        most += unpack(batch.draft_limits)
    assert max(most, default=0) == drafts
    assert stage.tokens(1) == says(range(5), 30)


def test_no_draft_is_made_behind_the_last_token():
    stage = DraftingStage()
    stage.submit(spec(1, range(5), max_tokens=3))
    drafts = []
    while (batch := stage.step()) is not None:
        drafts.append(unpack(batch.draft_limits))
    assert drafts == [[], [1]]
    assert stage.tokens(1) == says(range(5), 3)


@pytest.mark.parametrize(("requests", "most"), [(1, 7), (2, 7), (4, 3), (8, 1), (12, 0)])
def test_large_batches_draft_less_where_the_worker_limits_it(requests, most):
    stage = DraftingStage(nodes=8, depth=7, together=16, max_running=12, step_tokens=256, pages=200)
    stage.submit(*(spec(n, range(n * 3, n * 3 + 2), max_tokens=30) for n in range(requests)))
    drafts = []
    while (batch := stage.step()) is not None:
        if len(unpack(batch.slots)) == requests:
            drafts += unpack(batch.draft_limits)
    assert max(drafts, default=0) == most
    for n in range(requests):
        assert stage.tokens(n) == says(range(n * 3, n * 3 + 2), 30)


def test_drafts_take_no_page_that_a_sequence_needs():
    """Both fit the cache exactly; with pages for draft tokens one of them would have to go."""
    stage = DraftingStage(pages=8, page_size=4, overlap=True)
    stage.submit(spec(1, range(6), max_tokens=10), spec(2, range(50, 56), max_tokens=10))
    stage.play()
    for number, first in ((1, 0), (2, 50)):
        assert stage.tokens(number) == says(range(first, first + 6), 10)
    assert stage.planner.load(0.0).preemptions == 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("nodes", [1, 2, 3, 8])
def test_drafts_reach_no_further_than_a_slot_does(overlap, nodes):
    """A request that comes back ends with the context and with the last page, one token a page."""
    stage = DraftingStage(
        nodes=nodes,
        depth=nodes - 1,
        pages=12,
        page_size=1,
        context_length=12,
        max_running=1,
        max_slots=2,
        step_tokens=2,
        use_cache=False,
        overlap=overlap,
    )
    output = says(range(2), 10)
    stage.submit(spec(1, range(2), max_tokens=10, output=output[:2]))
    stage.play()
    assert stage.tokens(1) == output[2:]
    assert stage.end(1).reason == "length"


def test_drafts_leave_room_for_prompts():
    stage = DraftingStage(step_tokens=16, max_running=8, nodes=16, depth=15)
    stage.submit(*(spec(n, range(n * 10, n * 10 + 3), max_tokens=60) for n in range(1, 4)))
    stage.step()
    stage.submit(spec(9, range(40), max_tokens=2))
    batch = stage.step()
    slots, counts, drafts = unpack(batch.slots), unpack(batch.counts), unpack(batch.draft_limits)
    assert len(slots) == 4
    assert counts[3] >= 6
    assert drafts[3] == 0
    stage.play()
    assert stage.tokens(9) == says(range(40), 2)


@pytest.mark.parametrize("adaptive", [None, "{}"])
def test_where_drafts_are_made_apart_a_prompt_has_all_of_a_step(adaptive, monkeypatch):
    """Whether it is admitted or continues: no request drafts beside it or is a trial. Then all do."""
    calls, choose = [], AdaptivePolicy.choose
    monkeypatch.setattr(
        AdaptivePolicy, "choose", lambda policy, estimates: calls.append(len(estimates)) or choose(policy, estimates)
    )
    stage = DraftingStage(
        decode_only=True,
        adaptive=adaptive,
        seconds=lambda drafted, deepest: 0.01,
        step_tokens=16,
        max_prefill_tokens=14,
        nodes=5,
        depth=4,
    )
    stage.submit(*(spec(n, range(n * 10, n * 10 + 3), max_tokens=60) for n in range(1, 4)))
    stage.step()
    assert any(any(unpack(stage.step().draft_limits)) for _ in range(6))
    calls.clear()
    stage.submit(spec(9, range(33), max_tokens=20))
    chunks = []
    while sum(chunks) < 33:
        batch = stage.step()
        chunks.append(unpack(batch.counts)[3])
        assert not batch.draft_limits
    assert chunks == [13, 13, 7]
    assert not calls
    drafts = unpack(stage.step().draft_limits)
    assert calls == [4] if adaptive else drafts == [3] * 4
    stage.play()
    for number, prompt, count in [(n, range(n * 10, n * 10 + 3), 60) for n in range(1, 4)] + [(9, range(33), 20)]:
        assert stage.tokens(number) == says(prompt, count)


def test_what_came_after_the_end_is_dropped_and_not_shared():
    prompt = list(range(6))
    stop = says(prompt, 6)[-1]
    stage = DraftingStage(nodes=8, depth=7)
    stage.submit(spec(1, prompt, max_tokens=40, stop_ids=(stop,)))
    stage.play()
    assert stage.tokens(1) == says(prompt, 6)
    assert stage.end(1).reason == "stop"


def test_what_drafts_brought_is_shared_while_its_request_runs():
    stage = DraftingStage(overlap=False)
    stage.submit(spec(1, range(5), max_tokens=100))
    for _ in range(6):
        stage.step()
    output = stage.tokens(1)
    assert len(output) > 16
    stage.submit(spec(2, [*range(5), *output], max_tokens=1))
    stage.step()
    assert stage.reported[2][0].cached_tokens == (5 + len(output) - 1) // 4 * 4
    assert stage.end(1) is None


def test_prompt_scores_go_out_with_a_first_token_that_brings_others():
    """The prompt's last token may run alone, as a decode does, with draft tokens behind it."""
    stage = DraftingStage(step_tokens=8)
    sampling = SlotSampling(prompt_logprobs=0)
    stage.submit(spec(1, range(17), max_tokens=9, sampling=sampling))
    stage.play()
    first = stage.reported[1][0]
    assert len(first.tokens) == 4
    assert len(first.prompt_scores.logprobs) == 4 * 16


def test_drafts_stop_where_they_do_not_pay_and_come_back():
    """Draft tokens cost as much as a step each: worth it while right, not while wrong."""
    right = [False]

    def seconds(drafted, deepest):
        return 0.01 + 0.004 * deepest + 0.001 * drafted

    stage = DraftingStage(
        adaptive='{"zero_step_probe_interval": 20}',
        accepts=lambda most: most if right[0] else 0,
        seconds=seconds,
        pages=400,
        context_length=1500,
    )
    stage.submit(spec(1, range(5), max_tokens=1400))
    shares = []
    for part in (False, True):
        right[0] = part
        drafted = []
        while len(drafted) < 200:
            batch = stage.step()
            drafted.append(any(unpack(batch.draft_limits)))
        shares.append(sum(drafted[100:]))
    assert shares[0] < 20
    assert shares[1] > 80
    stage.planner.abort([1])
    assert stage.tokens(1) == says(range(5), len(stage.tokens(1)))


def test_steps_among_prompts_are_charged_though_none_is_measured(monkeypatch):
    charged = []
    monkeypatch.setattr(AdaptivePolicy, "add_untimed", lambda _, *step: charged.append(step))
    stage = DraftingStage(adaptive="{}", seconds=lambda drafted, deepest: 0.01 + 0.001 * deepest)
    stage.submit(spec(1, range(5), max_tokens=80))
    for number in range(12):
        if number > 8:
            stage.submit(spec(100 + number, range(3), max_tokens=1))
        stage.step()
    assert len(charged) == 3
    assert all(rows == 1 and nodes == levels == accepted > 0 for rows, levels, nodes, accepted in charged)


def test_the_policy_learns_which_steps_run_right_behind_a_prompt(monkeypatch):
    reported, timed, plain = [], AdaptivePolicy.add_timed, AdaptivePolicy.add_plain
    monkeypatch.setattr(AdaptivePolicy, "add_timed", lambda *step: reported.append((step[3],)) or timed(*step))
    monkeypatch.setattr(AdaptivePolicy, "add_plain", lambda *step: reported.append((0, *step[4:])) or plain(*step))
    options = {"pages": 400, "context_length": 1500}
    stage = DraftingStage(adaptive="{}", seconds=lambda *_: 0.01, accepts=lambda most: 0, **options)
    stage.submit(spec(1, range(5), max_tokens=60))
    stage.play()
    assert reported[0] == (0, True)
    assert (0, False) in reported
    assert reported.count((0, True)) == 1
    reported.clear()
    stage.submit(spec(2, range(5), max_tokens=60))
    stage.play()
    assert reported[0][1:] in [(True,), ()]
    assert (0, True) not in reported[1:]


def test_requests_that_keep_coming_keep_no_other_from_drafting():
    """Every plain step is then behind a prompt."""
    stage = DraftingStage(adaptive="{}", seconds=lambda drafted, deepest: 0.01 + 0.001 * deepest, pages=400)
    stage.submit(spec(1, range(5), max_tokens=80))
    has_drafted = 0
    for number in range(60):
        if number % 2:
            stage.submit(spec(100 + number, range(3), max_tokens=1))
        batch = stage.step()
        has_drafted += batch is not None and any(unpack(batch.draft_limits))
    assert has_drafted > 5


def test_a_draft_that_proposes_nothing_seldom_runs():
    """Its steps are no plain ones: the time that it wasted is lost."""
    stage = DraftingStage(adaptive="{}", accepts=lambda most: 0, pages=400, context_length=1500)
    run, calls = stage.runner.run, []

    def vain(batch):
        calls.append(any(unpack(batch.draft_limits)))
        timing = StepTiming(total=0.015 if calls[-1] else 0.01)
        return msgspec.structs.replace(run(batch), drafted=b"", depths=b"", timing=timing)

    stage.runner.run = vain
    stage.submit(spec(1, range(5), max_tokens=600))
    stage.play(limit=700)
    assert 0 < sum(calls) < 30
    assert stage.tokens(1) == says(range(5), 600)


def test_the_worker_keeps_nothing_for_a_draft_that_does_not_draft():
    """True for decodes and for prompts that come meanwhile; never beside draft tokens, nor right before them."""
    room = {"pages": 400, "context_length": 1500}
    stage = DraftingStage(adaptive="{}", accepts=lambda _: 0, seconds=lambda _, deepest: 0.01 + 0.002 * deepest, **room)
    stage.submit(spec(1, range(5), max_tokens=700))
    found, prompts, more = [], [], True
    while (batch := stage.step()) is not None:
        found.append((any(unpack(batch.draft_limits)), batch.unobserved))
        if batch.admitted:
            prompts.append(batch.unobserved)
        if more and len(found) > 200 and all(unseen for _, unseen in found[-20:]):
            stage.submit(spec(2, range(9), max_tokens=40))
            more = False
    assert prompts == [False, True]
    assert 0.4 * len(found) < sum(unseen for _, unseen in found) < len(found)
    late = [number for number, (has_drafted, _) in enumerate(found) if has_drafted and number > 200]
    assert late
    for number in late:
        assert not any(unseen for _, unseen in found[number - CONSTANTS.awake_steps : number + 1])


def test_a_worker_keeps_no_draft_state_while_no_request_drafts():
    """However right they are for others; and one that wants some has them soon."""
    stage = DraftingStage(adaptive="{}", seconds=lambda *_: 0.01, pages=400, context_length=1500)
    stage.submit(spec(1, range(5), max_tokens=200))
    stage.play()
    stage.submit(spec(2, range(7), max_tokens=200, sampling=SlotSampling(max_drafts=0)))
    unseen = []
    while (batch := stage.step()) is not None:
        unseen.append(batch.unobserved)
    assert not any(unseen[:20])
    assert all(unseen[-100:])
    stage.submit(spec(3, range(9), max_tokens=300))
    has_drafted = []
    while (batch := stage.step()) is not None:
        has_drafted.append(any(unpack(batch.draft_limits)))
    assert any(has_drafted[: CONSTANTS.awake_steps + 16])
    assert stage.tokens(3) == says(range(9), 300)


@pytest.mark.parametrize("adaptive", [None, '{"zero_step_probe_interval": 100}'])
def test_where_drafts_are_not_for_the_policy_to_say_all_is_kept(adaptive):
    stage = DraftingStage(adaptive=adaptive, accepts=lambda most: 0, pages=400, context_length=1500)
    stage.submit(spec(1, range(5), max_tokens=300))
    while (batch := stage.step()) is not None:
        assert not batch.unobserved


def test_what_a_plain_step_showed_the_draft_is_distinguished(monkeypatch):
    reported = []
    monkeypatch.setattr(AdaptivePolicy, "add_plain", lambda _, rows, *step: reported.append(step))
    stage = DraftingStage(adaptive="{}")
    run = stage.runner.run
    timing = StepTiming(total=0.01, observe=0.004)
    stage.runner.run = lambda batch: msgspec.structs.replace(run(batch), timing=timing)
    stage.submit(spec(1, range(5), max_tokens=40))
    stage.play()
    assert (0.01, 0.004, False) in reported
    assert stage.tokens(1) == says(range(5), 40)


def test_prompts_among_decodes_are_reported(monkeypatch):
    """The draft sees them before it drafts again, whether decodes ran beside them or not."""
    reported = []
    monkeypatch.setattr(AdaptivePolicy, "add_prompts", lambda _: reported.append(1))
    stage = DraftingStage(adaptive="{}")
    stage.submit(spec(1, range(5), max_tokens=8))
    stage.play()
    assert len(reported) == 1


def test_without_adapting_nothing_is_learnt():
    stage = DraftingStage(accepts=lambda most: 0)
    stage.submit(spec(1, range(5), max_tokens=60))
    drafted = []
    while (batch := stage.step()) is not None:
        drafted.append(sum(unpack(batch.draft_limits)))
        assert batch.draft_levels == 0
    assert all(drafted[1:-2])
