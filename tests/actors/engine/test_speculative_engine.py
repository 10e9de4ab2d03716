"""An engine says the same with draft tokens as without: whatever is drafted, whatever else goes on, whatever breaks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from actors.faults import Fault
from actors.protocol.requests import SamplingParams
from tests.kits.breaking import Reading, Rig, breakable
from tests.kits.tiny_model import make_tiny_model
from tests.kits.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENS = 60
PROMPT = list(range(20, 70))
SMALL = {"max_running_requests": 16, "watchdog_timeout": 30.0, "page_size": 4}


def params(**keywords: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True} | keywords))


REQUESTS: dict[str, tuple[list[int] | str, SamplingParams]] = {
    "greedy": (PROMPT, params()),
    "the same again": (PROMPT, params()),  # a prefix hit where the first is far enough
    "longer": (PROMPT * 3, params(max_tokens=40)),
    "short": ([5], params()),
    "one token": (PROMPT[:20], params(max_tokens=1)),
    "sampled": (PROMPT, params(temperature=1.1, top_p=0.95, top_k=50, seed=7)),
    "penalties": (PROMPT, params(repetition_penalty=1.4, frequency_penalty=0.5, presence_penalty=0.3)),
    "choices": (PROMPT, params(temperature=1.0, seed=3, n=3, logprobs=1)),
    "scored": (PROMPT[5:], params(logprobs=2, prompt_logprobs=1)),
    "bad words": (PROMPT, params(bad_words=("the", "fox", "again and"), logit_bias={30: 4.0, 31: -100.0})),
    "minimum": (PROMPT, params(stop_token_ids=tuple(range(256, 384)), min_tokens=30)),
    "ends itself": (PROMPT, params(stop_token_ids=tuple(range(300, 384)))),
}
KINDS = [("the target", "chain"), ("the target", "tree"), ("another", "tree"), ("n-grams", "tree")]
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4},
    "tree": {"speculative_num_steps": 3, "speculative_eagle_topk": 3, "speculative_num_draft_tokens": 9},
}


@pytest.fixture(scope="module")
def another(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same vocabulary that says other things."""
    return make_tiny_model(tmp_path_factory.mktemp("another"), seed=2)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plain(tiny_model: Path) -> dict[str, Reading]:
    """What is said without draft tokens, each request alone."""
    with pytest.MonkeyPatch.context() as patch:
        async with breakable(tiny_model, patch, **SMALL) as rig:
            return {name: await rig.read(*request) for name, request in REQUESTS.items()}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS, ids=" ".join)
async def rig(request: pytest.FixtureRequest, tiny_model: Path, another: Path) -> AsyncIterator[Rig]:
    draft, shape = request.param
    with pytest.MonkeyPatch.context() as patch:
        options = speculating(draft, shape, tiny_model, another)
        async with breakable(tiny_model, patch, **SMALL, **options) as made:
            yield made


def speculating(draft: str, shape: str, target: Path, another: Path) -> dict[str, Any]:
    if draft == "n-grams":
        breadth = 1 if shape == "chain" else 3
        return {"speculative_algorithm": "NGRAM", "speculative_ngram_max_bfs_breadth": breadth}
    path = target if draft == "the target" else another
    return {
        "speculative_algorithm": "STANDALONE",
        "speculative_draft_model_path": str(path),
        **SHAPES[shape],
    }


def check(found: Reading, expected: Reading) -> None:
    assert found.error is None
    assert found.tokens == expected.tokens
    assert found.texts == expected.texts
    assert (found.finished, found.matched) == (expected.finished, expected.matched)
    assert found.usage[-1].completion_tokens == expected.usage[-1].completion_tokens
    for index, scores in expected.logprobs.items():
        again = found.logprobs[index]
        assert [score.token_id for score in again] == [score.token_id for score in scores]
        assert [score.logprob for score in again] == pytest.approx([score.logprob for score in scores], abs=1e-3)
        assert [len(score.top) for score in again] == [len(score.top) for score in scores]
    assert len(found.prompt_logprobs) == len(expected.prompt_logprobs)


async def test_generates_the_same_in_one_batch(rig: Rig, plain: dict[str, Reading]) -> None:
    """Prefills in chunks, decodes, and requests that want no draft tokens or few, all at once and twice: then behind
    pages that the first ones left."""
    for number in range(2):
        tasks = [rig.start(prompt, request)[1] for prompt, request in REQUESTS.values()]
        for name, task in zip(REQUESTS, tasks, strict=True):
            found = await task
            check(found, plain[name])
            if number and name in ("greedy", "longer", "sampled", "penalties"):
                assert found.usage[-1].cached_tokens >= len(PROMPT) - 4
    await rig.rest()


async def test_a_stop_string_cuts_what_a_step_generated(rig: Rig, plain: dict[str, Reading]) -> None:
    whole = plain["greedy"].texts[0]
    pieces = plain["greedy"].tokens[0]
    tried = 0
    for place in range(5, 50):
        stop = await text_of(rig, pieces[place : place + 2])
        if not stop.strip() or "\ufffd" in stop or stop not in whole or tried == 6:
            continue
        tried += 1
        reading = await rig.read(PROMPT, params(stop=(stop,)))
        assert reading.texts[0] == whole[: whole.index(stop)]
        tokens = reading.tokens[0]
        assert tokens == pieces[: len(tokens)]
        assert stop in await text_of(rig, tokens)
        assert stop not in await text_of(rig, tokens[:-1])
        assert reading.usage[-1].completion_tokens == len(tokens)
    assert tried


async def text_of(rig: Rig, tokens: list[int]) -> str:
    return await rig.engine.detokenize(tokens)


async def test_goes_on_after_the_worker_died(rig: Rig, plain: dict[str, Reading]) -> None:
    started = {name: rig.start(*REQUESTS[name]) for name in ("greedy", "sampled", "penalties", "choices", "scored")}
    await until(lambda: all(reading.count >= 10 for reading, _ in started.values()), "they do not decode")
    rig.plan.add(Fault("decode", "kill"))
    for name, (_, task) in started.items():
        check(await task, plain[name])
    await rig.rest()
    rig.forgive()


@pytest.mark.parametrize("draft", ["the target", "n-grams"])
async def test_generates_the_same_where_pages_are_short(
    draft: str, tiny_model: Path, another: Path, plain: dict[str, Reading]
) -> None:
    """Requests are preempted, and come back."""
    with pytest.MonkeyPatch.context() as patch:
        options = speculating(draft, "tree", tiny_model, another)
        async with breakable(
            tiny_model, patch, **SMALL, max_total_tokens=400, schedule_conservativeness=0.0, **options
        ) as rig:
            for _ in range(2):
                tasks = [rig.start(prompt, request)[1] for prompt, request in REQUESTS.values()]
                for name, task in zip(REQUESTS, tasks, strict=True):
                    check(await task, plain[name])
            await rig.rest()
            load = rig.engine.board.scheduler
            assert load is not None
            assert load.preemptions > 0
