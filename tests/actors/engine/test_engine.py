"""The whole line behind the embedding API, with a worker in a real child process and a tiny model of random weights."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import pytest_asyncio

from actors.boards.stream_buffer import merge
from actors.engine.engine import Engine
from actors.options import ArgumentError
from actors.protocol.requests import (
    LIMITS,
    Chat,
    Delta,
    EngineDraining,
    EngineFailed,
    InvalidRequest,
    QueueFull,
    RequestAborted,
    RequestTimeout,
    SamplingParams,
)
from actors.requests import request_rules
from actors.requests.streams import RequestStream
from tests.kits import engines
from tests.kits.engines import rest
from tests.kits.tiny_model import make_tiny_model
from tests.kits.waiting import PATIENCE, until

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)

small_engine = partial(engines.small_engine, max_running_requests=16)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tiny_model: Path) -> AsyncIterator[Engine]:
    async with small_engine(tiny_model) as started:
        yield started


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def collect(stream: RequestStream) -> dict[int, Delta]:
    pieces: dict[int, list[Delta]] = {}
    async for delta in stream:
        pieces.setdefault(delta.index, []).append(delta)
    return {index: merge(found) for index, found in pieces.items()}


async def text_of(engine: Engine, prompt: str, params: SamplingParams = GREEDY) -> str:
    return await read_text(engine.generate(prompt, params))


async def under_way(engine: Engine, prompts: list[str], params: SamplingParams) -> list[asyncio.Task[str]]:
    """Readers of requests that all have said something and have not ended."""
    streams = [engine.generate(prompt, params) for prompt in prompts]
    buffers = [stream._buffer for stream in streams]
    tasks = [asyncio.create_task(read_text(stream)) for stream in streams]
    await until(lambda: all(buffer.output_tokens for buffer in buffers), "they do not decode")
    return tasks


async def read_text(stream: RequestStream) -> str:
    return (await collect(stream))[0].text


async def test_generates_the_length_requested_and_reports_usage(engine: Engine) -> None:
    result = (await collect(engine.generate("The quick brown fox", GREEDY)))[0]
    assert len(result.token_ids) == 24
    assert result.finish_reason == "length"
    assert result.usage.completion_tokens == 24
    assert result.usage.prompt_tokens == len(await engine.tokenize("The quick brown fox"))
    assert result.text == await engine.detokenize(result.token_ids, skip_special_tokens=True)


async def test_special_tokens_that_are_shown(engine: Engine) -> None:
    [start] = await engine.tokenize("<|im_start|>")
    params = SamplingParams(max_tokens=2, ignore_eos=True, allowed_token_ids=(start,))
    assert await text_of(engine, "The", params) == ""
    shown = msgspec.structs.replace(params, shown_special_tokens=("<|im_start|>",))
    assert await text_of(engine, "The", shown) == "<|im_start|>" * 2


async def test_greedy_does_not_depend_on_the_batch_cache_or_form(engine: Engine) -> None:
    prompts = [f"Once upon a time {i} there was a king" for i in range(12)]
    alone = [await text_of(engine, p) for p in prompts]
    together = await asyncio.gather(*(text_of(engine, p) for p in prompts))
    assert together == alone
    ids = await engine.tokenize(prompts[0])
    assert (await collect(engine.generate(ids, GREEDY)))[0].text == alone[0]
    await rest(engine)


async def test_a_second_look_at_the_same_prompt_comes_from_the_cache(engine: Engine) -> None:
    prompt = "one two three four five six seven eight nine ten " * 8
    await text_of(engine, prompt)
    result = (await collect(engine.generate(prompt, GREEDY)))[0]
    assert result.usage.cached_tokens >= 48


async def test_choices_differ_by_seed_and_repeat_with_it(engine: Engine) -> None:
    params = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=16, ignore_eos=True)
    first = await collect(engine.generate("Once", params))
    again = await collect(engine.generate("Once", params))
    assert sorted(first) == [0, 1, 2]
    assert len({d.token_ids for d in first.values()}) == 3
    assert {i: d.token_ids for i, d in first.items()} == {i: d.token_ids for i, d in again.items()}


async def test_stop_string_cuts_the_text_and_frees_the_slot(engine: Engine) -> None:
    full = await text_of(engine, "The capital of France")
    stop = full[5:8]
    where = full.index(stop)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=(stop,))
    result = (await collect(engine.generate("The capital of France", params)))[0]
    assert result.text == full[:where]
    assert result.finish_reason == "stop"
    assert result.matched_stop == stop
    await rest(engine)


async def test_stop_token_ids_end_and_are_not_shown(engine: Engine) -> None:
    full = (await collect(engine.generate("The capital of France", GREEDY)))[0]
    token = full.token_ids[6]
    first = full.token_ids.index(token)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop_token_ids=(token,))
    result = (await collect(engine.generate("The capital of France", params)))[0]
    assert result.token_ids == full.token_ids[: first + 1]
    assert result.matched_stop == token
    assert result.finish_reason == "stop"
    assert result.text == await engine.detokenize(full.token_ids[:first])


async def test_logprobs_and_prompt_logprobs(engine: Engine) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    ids = await engine.tokenize("one two three four five six seven")
    result = (await collect(engine.generate(ids, params)))[0]
    assert result.logprobs is not None
    assert len(result.logprobs) == 4
    for token, score in zip(result.token_ids, result.logprobs, strict=True):
        assert score.token_id == token == score.top[0].token_id
        assert score.logprob == pytest.approx(score.top[0].logprob)
        assert len(score.top) == 2
    assert result.prompt_logprobs is not None
    assert [s.token_id for s in result.prompt_logprobs] == ids
    assert result.prompt_logprobs[0].logprob is None
    assert all(s.logprob is not None and s.logprob <= 0 for s in result.prompt_logprobs[1:])


async def test_a_prompt_of_several_choices_is_scored_once_for_all(engine: Engine) -> None:
    ids = await engine.tokenize("one two three four five six seven eight nine ten " * 4)
    params = SamplingParams(temperature=1, seed=1, max_tokens=4, ignore_eos=True, n=3, prompt_logprobs=1)
    first, *others = (await collect(engine.generate(ids, params, cache_salt="scored once"))).values()
    assert first.prompt_logprobs is not None
    assert [score.token_id for score in first.prompt_logprobs] == ids
    for other in others:
        assert other.prompt_logprobs == first.prompt_logprobs
        assert other.usage.cached_tokens > 0  # its pages are the first choice's


@pytest.mark.parametrize(
    ("params", "param"),
    [
        (SamplingParams(max_tokens=11, logprobs=1), None),
        (SamplingParams(max_tokens=30, logprobs=1), "logprobs"),
        (SamplingParams(max_tokens=2, logprobs=20), "logprobs"),
        (SamplingParams(max_tokens=1, prompt_logprobs=1), None),
        (SamplingParams(max_tokens=1, prompt_logprobs=1, n=3), "prompt_logprobs"),
    ],
)
async def test_tokens_times_choices_times_alternatives_are_bounded(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, params: SamplingParams, param: str | None
) -> None:
    monkeypatch.setattr(request_rules, "LIMITS", msgspec.structs.replace(LIMITS, logprob_entries=40))
    if param is None:
        await collect(engine.generate([5] * 10, params))
    else:
        with pytest.raises(InvalidRequest, match="at most 40") as refusal:
            await collect(engine.generate([5] * 10, params))
        assert (refusal.value.param, refusal.value.code) == (param, "too_many_logprobs")
    await rest(engine)


async def test_logprobs_without_max_tokens_end_at_their_bound(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_rules, "LIMITS", msgspec.structs.replace(LIMITS, logprob_entries=40))
    result = (await collect(engine.generate([5] * 10, SamplingParams(ignore_eos=True, logprobs=4))))[0]
    assert result.usage.completion_tokens == 8
    assert result.finish_reason == "length"


async def test_a_ticket_counts_choices_and_log_probabilities(engine: Engine) -> None:
    await rest(engine)
    assert engine.intake is not None
    params = SamplingParams(max_tokens=10, n=3, logprobs=3, prompt_logprobs=1)
    stream = engine.generate([5] * 20, params)
    assert engine.intake.admission.tokens == 3 * 20 + (3 * (20 * 2 + 10 * 4)) // 20
    await stream.ready()
    assert engine.intake.admission.tokens == 3 * 20 + (3 * (20 * 2 + 10 * 4)) // 20
    await stream.aclose()
    await rest(engine)
    assert engine.intake.admission.tokens == 0


async def test_chat_is_rendered(engine: Engine) -> None:
    chat = Chat(messages=[{"role": "user", "content": "hi"}])
    rendered = await engine.render(chat)
    assert rendered.endswith("<|im_start|>assistant\n")
    result = (await collect(engine.generate(chat, GREEDY)))[0]
    assert result.prompt_token_ids == tuple(await engine.tokenize(chat))


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ([], GREEDY, "prompt"),
        ([99999], GREEDY, "prompt"),
        ([1] * 600, GREEDY, "prompt"),
        ([1] * 500, SamplingParams(max_tokens=100), "max_tokens"),
        ("", GREEDY, "prompt"),
        ("x", SamplingParams(temperature=-1), "temperature"),
        ("x", SamplingParams(n=100000), "n"),
    ],
)
async def test_wrong_requests_name_the_field(engine: Engine, prompt: Any, params: SamplingParams, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await collect(engine.generate(prompt, params))
    assert caught.value.param == param
    assert engine.describe()["requests"]["live"] == 0


@pytest.mark.parametrize(
    ("prompt", "params", "says"),
    [
        (5, GREEDY, "prompt must be text, token ids or Chat.*, not int"),
        (None, GREEDY, "prompt must be .*, not NoneType"),
        (b"x", GREEDY, "prompt must be .*, not bytes"),
        ([1.5], GREEDY, "prompt must be .*, not list of float"),
        ([{"role": "user", "content": "hi"}], GREEDY, "prompt must be .*, not list of dict"),
        ("x", {"max_tokens": 3}, "params must be SamplingParams.*, not dict"),
    ],
)
async def test_other_types_are_refused_with_those_there_are(
    engine: Engine, prompt: Any, params: Any, says: str
) -> None:
    with pytest.raises(TypeError, match=says):
        engine.generate(prompt, params)
    assert engine.describe()["requests"]["live"] == 0


async def test_token_ids_of_numpy_are_token_ids(engine: Engine) -> None:
    plain, ids = [(await collect(engine.generate(kind([5, 6, 7]), GREEDY)))[0] for kind in (list, _of_numpy)]
    assert plain.token_ids == ids.token_ids


def _of_numpy(ids: list[int]) -> list[int]:
    return list(np.array(ids))


async def test_one_choice_with_many_tokens_is_refused_for_the_context(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="maximum context length") as caught:
        await collect(engine.generate("x", SamplingParams(max_tokens=2**31 - 1)))
    assert caught.value.param == "max_tokens"


async def test_a_text_too_long_for_any_encoding_names_the_context(engine: Engine) -> None:
    words = "this model's maximum context length is [0-9]+ tokens"  # by which LiteLLM and others recognize the error
    with pytest.raises(InvalidRequest, match=words) as caught:
        await collect(engine.generate("x" * 1_000_000, GREEDY))
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")


async def test_a_grammar_backend_without_its_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.engine.engine.find_spec", lambda name: None)
    with pytest.raises(ArgumentError, match=r"pip install 'troupe-llm\[xgrammar\]'"):
        Engine(model="m", grammar_backend="xgrammar")


async def test_aborts_at_every_stage_free_everything(engine: Engine) -> None:
    long = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    streams = [engine.generate(f"Once {i}", long) for i in range(24)]
    await streams[0].aclose()  # before anything
    await streams[1].ready()
    await streams[1].aclose()  # queued
    readers = [asyncio.create_task(collect(s)) for s in streams[2:]]
    await until(lambda: streams[2]._buffer.output_tokens, "nothing runs")
    for reader in readers[::2]:
        reader.cancel()
    for stream in streams[2::2]:
        await stream.aclose()
    assert await engine.abort(streams[3].request_id) == 1
    results = await asyncio.gather(*readers, return_exceptions=True)
    assert isinstance(results[1], RequestAborted)
    for result in results[3::2]:
        assert isinstance(result, dict)
        assert len(result[0].token_ids) == 400
    await rest(engine)
    assert engine.describe()["requests"] == {"live": 0, "sequences": 0, "refused": 0}


async def test_abort_of_a_tenant_leaves_the_others_alone(engine: Engine) -> None:
    long = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    stream = engine.generate("Once", long, request_id="job-1", tenant="key-1")
    reader = asyncio.create_task(collect(stream))
    await until(lambda: stream._buffer.output_tokens, "it does not run")
    assert await engine.abort("job-1", tenant="key-2") == 0
    assert await engine.abort("job-1", tenant="key-1") == 1
    with pytest.raises(RequestAborted):
        await reader
    await rest(engine)


async def test_abort_by_label_is_exact(engine: Engine) -> None:
    long = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    stream = engine.generate("Once", long, request_id="job-1")
    reader = asyncio.create_task(collect(stream))
    await until(lambda: stream._buffer.output_tokens, "it does not run")
    assert await engine.abort("job") == 0
    assert await engine.abort("job-1") == 1
    with pytest.raises(RequestAborted):
        await reader
    await rest(engine)


async def test_a_timeout_ends_the_request(engine: Engine) -> None:
    with pytest.raises(RequestTimeout):
        await collect(engine.generate("Once", SamplingParams(max_tokens=480, ignore_eos=True), timeout=0.02))
    await rest(engine)


async def test_what_is_too_late_is_dropped_where_it_waits(tiny_model: Path) -> None:
    """Nothing is computed for a request whose time was over before its turn came."""
    long = SamplingParams(max_tokens=480, ignore_eos=True)
    async with small_engine(tiny_model, max_running_requests=1) as engine:
        ahead = engine.generate([5, 6, 7], long)
        await anext(ahead)
        late = [engine.generate([8, 9, number], GREEDY, timeout=0.05) for number in range(3)]
        for stream in late:
            with pytest.raises(RequestTimeout):
                await collect(stream)
        # Also at the tokenizer, which gets no prompt to encode that no request waits for.
        with pytest.raises(RequestTimeout):
            await engine.generate("far too late", GREEDY, timeout=1e-6).ready()
        assert engine.intake is not None
        assert engine.intake.admission.sequences == 1
        await collect(ahead)
        assert all("prefill" not in [hop.name for hop in stream.timeline.hops] for stream in late)
        load = engine.board.scheduler
        assert load is not None
        assert load.waiting == 0


async def test_flush_empties_the_prefix_cache(engine: Engine) -> None:
    await text_of(engine, "one two three four five six seven eight nine ten " * 4)
    await rest(engine)
    assert engine.describe()["cache"]["evictable"] > 0
    assert await engine.flush_cache()
    assert engine.describe()["cache"]["evictable"] == 0


async def test_a_killed_worker_loses_no_request_and_changes_no_token(engine: Engine) -> None:
    params = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
    prompts = [f"The lazy dog {i}" for i in range(6)]
    expected = await asyncio.gather(*(text_of(engine, p, params) for p in prompts))
    readers = await under_way(engine, prompts, params)
    [worker] = engine.describe()["workers"]
    os.kill(worker["pid"], signal.SIGKILL)
    assert await asyncio.gather(*readers) == expected
    [restarted] = engine.describe()["workers"]
    assert restarted["pid"] != worker["pid"]
    assert restarted["restarts"] == worker["restarts"] + 1
    await rest(engine)


@pytest.mark.parametrize("victim", ["scheduler", "cache", "detokenizer", "tokenizer-0"])
async def test_a_crash_of_any_actor_in_the_loop_loses_no_request(engine: Engine, victim: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, stop=("no such text",))
    prompts = [f"Again and again {i}" for i in range(6)]
    expected = await asyncio.gather(*(text_of(engine, p, params) for p in prompts))
    readers = await under_way(engine, prompts, params)
    assert engine._system is not None
    engine._system.crash_actor(victim, RuntimeError("injected"))
    assert await asyncio.gather(*readers) == expected
    await rest(engine)


async def test_refuses_at_admission_when_full_and_admits_again(tiny_model: Path) -> None:
    async with small_engine(tiny_model, max_running_requests=2, max_queued_requests=1) as engine:
        long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
        streams = [engine.generate("Once", long) for _ in range(3)]
        with pytest.raises(QueueFull) as caught:
            engine.generate("Once", long)
        assert 1 <= caught.value.retry_after <= 120
        for stream in streams:
            await stream.aclose()
        assert len(await text_of(engine, "Once", GREEDY)) > 0


async def test_more_choices_than_there_is_ever_room_for_are_no_full_queue(tiny_model: Path) -> None:
    async with small_engine(tiny_model, max_running_requests=2, max_queued_requests=1) as engine:
        with pytest.raises(InvalidRequest, match="n 4 is more than the 3 that") as caught:
            engine.generate("Once", SamplingParams(n=4, max_tokens=1))
        assert caught.value.param == "n"
        assert engine.generate("Once", SamplingParams(n=3, max_tokens=1)) is not None


async def test_drain_refuses_new_and_ends_old_at_the_deadline(tiny_model: Path) -> None:
    async with small_engine(tiny_model) as engine:
        (quick,) = await under_way(engine, ["Once"], GREEDY)
        assert await engine.drain(PATIENCE)
        assert await quick
        with pytest.raises(EngineDraining):
            engine.generate("Once")
    with pytest.raises(EngineFailed, match="closed"):
        engine.generate("Once")


@dataclass(frozen=True)
class Footprint:
    """What an engine may leave behind in its process, counted now."""

    tasks: frozenset[str]
    threads: Counter[str]
    native_threads: int
    children: frozenset[int]
    files: int
    signals: dict[Any, Any]
    environment: dict[str, str]

    @classmethod
    def now(cls) -> Footprint:
        gc.collect()  # engines are cycles
        process = psutil.Process()
        # The loop's own executor keeps its threads and adds one whenever all are busy.
        threads = [t.name for t in threading.enumerate() if not t.name.startswith("asyncio_")]
        return cls(
            tasks=frozenset(task.get_name() for task in asyncio.all_tasks()),
            threads=Counter(threads),
            native_threads=process.num_threads() - threading.active_count() + len(threads),
            children=frozenset(child.pid for child in process.children(recursive=True)),
            files=process.num_fds(),
            signals={s: signal.getsignal(s) for s in signal.valid_signals()},
            environment=dict(os.environ),
        )

    def more_than(self, before: Footprint) -> dict[str, object]:
        """What is here and was not before, by kind."""
        found = {
            "tasks": self.tasks - before.tasks,
            "threads": self.threads - before.threads,
            "native threads": max(0, self.native_threads - before.native_threads),
            "children": self.children - before.children,
            "files": max(0, self.files - before.files),
            "signals": {s: handler for s, handler in self.signals.items() if handler != before.signals[s]},
            "environment": dict(self.environment.items() ^ before.environment.items()),
        }
        return {kind: things for kind, things in found.items() if things}


async def test_two_engines_in_one_loop_and_nothing_is_left(tiny_model: Path, tmp_path: Path) -> None:
    other_model = make_tiny_model(tmp_path / "other", seed=8)

    async def serve() -> None:
        async with small_engine(tiny_model) as first, small_engine(other_model) as second:
            texts = await asyncio.gather(text_of(first, "Once"), text_of(second, "Once"))
            assert texts[0] != texts[1]
            assert await text_of(first, "Once") == texts[0]
            abandoned = second.generate("Once", SamplingParams(max_tokens=400, ignore_eos=True))
            await anext(abandoned)
        with pytest.raises(EngineFailed):
            async for _ in abandoned:
                pass

    await serve()  # lazy imports and caches of the libraries are not ours to count
    before = Footprint.now()
    await serve()
    await until(lambda: not Footprint.now().more_than(before), lambda: f"left: {Footprint.now().more_than(before)}")


async def test_a_model_that_cannot_be_loaded_gives_the_reason(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match=r"config\.json"):
        await Engine(model=str(tmp_path)).start()
    no_weights = make_tiny_model(tmp_path / "no-weights")
    (no_weights / "model.safetensors").unlink()
    with pytest.raises(EngineFailed, match="safetensors"):
        await Engine(model=str(no_weights), cpu_threads=1).start()
    with pytest.raises(ArgumentError, match="model"):
        Engine()


async def test_one_tenants_flood_leaves_places_and_turns_for_another(tiny_model: Path) -> None:
    async with small_engine(
        tiny_model, max_running_requests=2, max_queued_requests=38, api_key="one,two", chunked_prefill_size=16
    ) as engine:
        flood = [engine.generate([5, 6, 7, number + 3], GREEDY, tenant="one") for number in range(30)]
        with pytest.raises(QueueFull, match="for other API keys"):
            engine.generate([5, 6], GREEDY, tenant="one")
        ended: list[str] = []

        async def read(stream: RequestStream, name: str) -> None:
            async for _ in stream:
                pass
            ended.append(name)

        async with asyncio.TaskGroup() as tasks:
            for stream in flood:
                tasks.create_task(read(stream, "one"))
            await flood[-1].ready()
            for _ in range(3):
                tasks.create_task(read(engine.generate([8, 9], GREEDY, tenant="two"), "two"))
        assert len(ended) == 33
        last = max(at for at, name in enumerate(ended) if name == "two")
        assert last < 16, ended
        assert engine.intake is not None
        assert engine.intake.admission.sequences == 0


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"enable_priority_scheduling": True}, ["first", "high", "low"]),
        ({}, ["first", "low", "high"]),
    ],
)
async def test_priorities_order_the_queue_where_they_are_enabled(
    tiny_model: Path, options: dict[str, Any], expected: list[str]
) -> None:
    async with small_engine(tiny_model, max_running_requests=1, **options) as engine:
        ended: list[str] = []

        async def read(stream: RequestStream, name: str) -> None:
            async for _ in stream:
                pass
            ended.append(name)

        long = msgspec.structs.replace(GREEDY, max_tokens=200)
        queue = (("first", long, 0), ("low", GREEDY, 1), ("high", GREEDY, 4))
        async with asyncio.TaskGroup() as tasks:
            for name, params, priority in queue:
                stream = engine.generate([5, 6], params, priority=priority)
                await stream.ready()
                tasks.create_task(read(stream, name))
        assert ended == expected


async def test_a_start_that_fails_before_it_began_can_be_made_again(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = small_engine(tiny_model)
    with monkeypatch.context() as patch:
        patch.setattr("actors.engine.engine.start_tracing", _cannot_trace)
        with pytest.raises(ValueError, match="no such exporter"):
            await engine.start(wait=False)
    await engine.start(wait=False)
    with pytest.raises(RuntimeError, match="already started"):
        await engine.start(wait=False)
    await engine.aclose()
    with pytest.raises(RuntimeError, match="Create a new one"):
        await engine.start()


def _cannot_trace(*_: object) -> None:
    raise ValueError("no such exporter")


async def test_an_answer_without_a_number_is_as_long_as_the_context_allows(engine: Engine) -> None:
    prompt = [5] * (engine.context_length - 3)
    for params, tokens in (
        (SamplingParams(temperature=0, ignore_eos=True), 3),
        (SamplingParams(temperature=0, ignore_eos=True, default_max_tokens=16), 3),
        (SamplingParams(temperature=0, ignore_eos=True, default_max_tokens=2), 2),
    ):
        whole = (await collect(engine.generate(prompt, params)))[0]
        assert (len(whole.token_ids), whole.finish_reason) == (tokens, "length")


async def test_a_number_out_of_range_is_refused_by_the_name_it_was_sent_with(engine: Engine) -> None:
    prompt = [5] * (engine.context_length - 3)
    with pytest.raises(InvalidRequest, match=r"^max_tokens 4 does not fit .* at most 3 tokens,") as refused:
        await engine.generate(prompt, SamplingParams(max_tokens=4)).ready()
    assert (refused.value.param, refused.value.code) == ("max_tokens", "context_length_exceeded")
    with pytest.raises(InvalidRequest, match="The prompt has") as refused:
        await engine.generate([5] * engine.context_length, SamplingParams(default_max_tokens=16)).ready()
    assert refused.value.param == "prompt"
