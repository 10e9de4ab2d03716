"""What a request was in the middle of when its worker died goes on in the next worker as if nothing had happened."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from actors.faults import Fault
from actors.protocol.requests import RequestAborted, RequestTimeout, SamplingParams
from actors.runtime import Event, EventKind
from tests.kits.breaking import Reading, Rig, breakable
from tests.kits.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENS = 80
PROMPT = list(range(20, 70))


def greedy(**keywords: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True} | keywords))


STATES: dict[str, SamplingParams] = {
    "greedy": greedy(),
    "repetition penalty": greedy(repetition_penalty=1.6),
    "frequency and presence penalty": greedy(frequency_penalty=1.5, presence_penalty=0.7),
    "noise position": greedy(temperature=1.2, top_p=0.95, seed=7),
    "log-probabilities": greedy(logprobs=3),
    "prompt log-probabilities": greedy(prompt_logprobs=2),
    "choices": greedy(temperature=1.0, seed=3, n=3, logprobs=0),
    "bias and bans": greedy(logit_bias={30: 4.0, 31: -100.0}, bad_words=("the", "fox")),
    # Any of a third of the vocabulary would end it, and may not before that.
    "minimum of tokens": greedy(stop_token_ids=tuple(range(256, 384)), min_tokens=TOKENS - 30),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tiny_model: Path) -> AsyncIterator[Rig]:
    with pytest.MonkeyPatch.context() as patch:
        async with breakable(tiny_model, patch, max_running_requests=16, watchdog_timeout=30.0) as made:
            yield made


class Deaths:
    """How many tokens each live sequence had sent when the worker died."""

    def __init__(self, rig: Rig) -> None:
        self.outputs: list[dict[str, int]] = []
        self._rig = rig
        assert rig.engine._system is not None
        rig.engine._system.on_event(self._on_event)

    def _on_event(self, event: Event) -> None:
        if event.kind is EventKind.DIED and event.actor == "worker-0":
            actor_tree = self._rig.engine._actor_tree
            assert actor_tree is not None
            self.outputs.append(
                {entry.stream.request_id: len(entry.output) for entry in actor_tree.replicas[0].journal.live()}
            )


async def run_all(rig: Rig, *, kill: bool) -> dict[str, Reading]:
    started = {name: rig.start(PROMPT, params, cache_salt=name) for name, params in STATES.items()}
    if kill:
        await until(lambda: all(reading.count >= 10 for reading, _ in started.values()), "they do not decode")
        rig.plan.add(Fault("decode", "kill"))
    return {name: await task for name, (_, task) in started.items()}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def runs(rig: Rig) -> dict[str, tuple[Reading, Reading, int]]:
    """The answer of each state: undisturbed, with a death of the worker, and the tokens that were out when it died."""
    undisturbed = await run_all(rig, kill=False)
    assert await rig.engine.flush_cache()
    deaths = Deaths(rig)
    disturbed = await run_all(rig, kill=True)
    await rig.rest()
    rig.forgive()
    (outputs,) = deaths.outputs
    return {
        name: (undisturbed[name], disturbed[name], outputs.get(disturbed[name].stream.request_id, 0)) for name in STATES
    }


@pytest.mark.parametrize("state", STATES)
async def test_state_is_restored(runs: dict[str, tuple[Reading, Reading, int]], state: str) -> None:
    undisturbed, disturbed, at_death = runs[state]
    assert 0 < at_death < TOKENS
    assert disturbed.error is None
    assert disturbed.tokens == undisturbed.tokens
    assert disturbed.texts == undisturbed.texts
    assert (disturbed.finished, disturbed.matched) == (undisturbed.finished, undisturbed.matched)
    assert disturbed.usage[-1] == undisturbed.usage[-1]
    counts = [usage.completion_tokens for usage in disturbed.usage]
    assert STATES[state].n > 1 or counts == sorted(set(counts))
    for index, scores in undisturbed.logprobs.items():
        again = disturbed.logprobs[index]
        assert [score.token_id for score in again] == [score.token_id for score in scores]
        assert [score.logprob for score in again] == pytest.approx([score.logprob for score in scores], abs=1e-3)
        assert [len(score.top) for score in again] == [len(score.top) for score in scores]
    assert len(disturbed.prompt_logprobs) == len(undisturbed.prompt_logprobs)


async def test_the_states_say_different_things(runs: dict[str, tuple[Reading, Reading, int]]) -> None:
    """Else nothing would be restored by going on in any way."""
    assert len({tuple(undisturbed.tokens[0]) for undisturbed, _, _ in runs.values()}) >= len(STATES) - 2
    assert len(runs["log-probabilities"][1].logprobs[0]) == TOKENS
    assert runs["minimum of tokens"][0].finished == {0: "stop"}


# -- one at a time


async def killed_at(rig: Rig, decode: int, params: SamplingParams, prompt: Any = PROMPT) -> tuple[Reading, int]:
    """A request alone, whose worker dies before it runs this decode step; the tokens that were out then."""
    deaths = Deaths(rig)
    rig.plan.add(Fault("decode", "kill", nth=decode))
    reading = await rig.read(prompt, params)
    await rig.rest()
    rig.forgive()
    (outputs,) = deaths.outputs
    return reading, outputs[reading.stream.request_id]


async def test_a_stop_string_across_the_death_is_found_and_not_shown(rig: Rig) -> None:
    parts: list[str] = []
    async for delta in rig.engine.generate("Once upon a time", greedy(max_tokens=40)):
        parts.append(delta.text)
    whole = "".join(parts)
    # A string that begins well before the death and ends after it, and is nowhere else.
    begin, end = len("".join(parts[:8])), len("".join(parts[:18]))
    stop = whole[begin:end]
    assert whole.count(stop) == 1
    params = greedy(max_tokens=40, stop=(stop,))
    undisturbed = await rig.read("Once upon a time", params)
    reading, at_death = await killed_at(rig, 15, params, "Once upon a time")
    assert 8 < at_death < 18  # what the worker had not sent yet died with it
    assert reading.texts == undisturbed.texts == {0: whole[:begin]}
    assert reading.tokens == undisturbed.tokens
    assert (reading.finished, reading.matched) == ({0: "stop"}, {0: stop})


@pytest.mark.parametrize("decode", [4, 5])
async def test_the_last_token_is_the_last(rig: Rig, decode: int) -> None:
    """The worker dies with the last token, or the last but one, on its way."""
    expected = (await rig.read(PROMPT, greedy(max_tokens=6))).tokens
    reading, at_death = await killed_at(rig, decode, greedy(max_tokens=6))
    assert at_death < 6
    assert reading.tokens == expected
    assert len(reading.tokens[0]) == 6
    assert reading.finished == {0: "length"}
    assert reading.usage[-1].completion_tokens == 6


async def test_prompt_scores_come_once_when_the_worker_dies_between_chunks(rig: Rig) -> None:
    params = greedy(max_tokens=4, prompt_logprobs=2)
    prompt = list(range(20, 150))
    expected = await rig.read(prompt, params)
    rig.plan.add(Fault("prefill", "kill", nth=3))
    reading = await rig.read(prompt, params)
    assert reading.tokens == expected.tokens
    (scores,), (again,) = expected.prompt_logprobs, reading.prompt_logprobs
    assert len(scores) == len(prompt)
    assert [s.token_id for s in again] == prompt
    assert [s.logprob for s in again[1:]] == pytest.approx([s.logprob for s in scores[1:]], abs=1e-3)
    await rig.rest()
    rig.forgive()


@pytest.mark.parametrize("victim", ["worker-0", "scheduler"])
async def test_cached_tokens_stay_what_they_were(rig: Rig, victim: str) -> None:
    """The second request shares the first one's prompt, and after the death its own output too."""
    assert rig.engine._system is not None
    assert await rig.engine.flush_cache()
    params = greedy(max_tokens=200)
    first, first_read = rig.start(PROMPT, params)
    await until(lambda: first.count >= 1, "it does not decode")
    second, second_read = rig.start(PROMPT, params)
    await until(lambda: second.count >= 40, "it does not decode")
    rig.engine._system.crash_actor(victim, RuntimeError("injected"))
    await asyncio.gather(first_read, second_read)
    assert first.tokens == second.tokens
    assert {usage.cached_tokens for usage in first.usage} == {0}
    assert {usage.cached_tokens for usage in second.usage} == {48}
    await rig.rest()
    rig.forgive()


async def test_aborts_and_deadlines_hold_while_the_worker_is_away(rig: Rig) -> None:
    expected = (await rig.read(PROMPT, greedy(max_tokens=300))).tokens
    aborted, aborted_read = rig.start(PROMPT, greedy(max_tokens=400), request_id="aborted")
    stays, stays_read = rig.start(PROMPT, greedy(max_tokens=300))
    await until(lambda: min(aborted.count, stays.count) >= 3, "they do not decode")
    late, late_read = rig.start(PROMPT, greedy(max_tokens=400), timeout=0.3)
    gone, gone_read = rig.start(PROMPT, greedy(max_tokens=400))
    first = rig.worker_pid
    os.kill(first, signal.SIGKILL)
    await until(lambda: rig.worker_pid not in (0, first), "no next worker")
    os.kill(rig.worker_pid, signal.SIGSTOP)  # away until all this has happened
    arrived, arrived_read = rig.start(PROMPT, greedy(max_tokens=300))
    never, never_read = rig.start(PROMPT, greedy(max_tokens=300), timeout=0.05)
    assert await rig.engine.abort("aborted") == 1
    gone_read.cancel()
    await asyncio.gather(gone_read, return_exceptions=True)
    await gone.stream.aclose()
    await asyncio.gather(aborted_read, late_read, never_read)
    os.kill(rig.worker_pid, signal.SIGCONT)
    await asyncio.gather(stays_read, arrived_read)
    assert isinstance(aborted.error, RequestAborted)
    assert isinstance(late.error, RequestTimeout)
    assert isinstance(never.error, RequestTimeout)
    assert never.count == 0
    assert stays.tokens == arrived.tokens == expected
    await rig.rest()
    rig.forgive()


async def test_pages_of_a_dead_worker_are_in_no_prefix(rig: Rig) -> None:
    prompt = list(range(100, 180))
    first = await rig.read(prompt, greedy(max_tokens=20))
    again = await rig.read(prompt, greedy(max_tokens=20))
    assert again.usage[-1].cached_tokens >= 64
    rig.plan.add(Fault("prefill", "kill", nth=1))
    # The one that is half written when the worker dies shares the prefix, and so does who comes after it.
    broken = await rig.read([*prompt, 5, 6, 7], greedy(max_tokens=20))
    after = await rig.read(prompt, greedy(max_tokens=20))
    fresh = await rig.read([*prompt, 5, 6, 7], greedy(max_tokens=20), cache_salt="fresh")
    assert first.tokens == again.tokens == after.tokens
    assert broken.tokens == fresh.tokens
    rig.plan.add(Fault("prefill", "exception", nth=1))
    unshared = await rig.read(prompt, greedy(max_tokens=20), cache_salt="nobody's")
    assert unshared.tokens == first.tokens
    resumed = await rig.read(prompt, greedy(max_tokens=20))
    assert resumed.usage[-1].cached_tokens == 0  # what the previous worker had cached is gone
    assert resumed.tokens == first.tokens
    await rig.rest()
    rig.forgive()
