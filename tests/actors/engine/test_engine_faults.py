"""What breaks while the engine serves: each request ends once, nothing of it stays, and the engine goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from actors.boards.health_board import HealthBoard
from actors.boards.stream_buffer import merge
from actors.caching.cache_manager import CacheManager
from actors.engine.engine import Engine
from actors.faults import Fault, FaultPlan
from actors.protocol import FlushCache
from actors.protocol.requests import (
    Chat,
    Delta,
    EngineFailed,
    EngineNotReady,
    InvalidRequest,
    RequestAborted,
    RequestFailed,
    SamplingParams,
)
from actors.requests.streams import RequestStream
from actors.runtime import ActorSystem
from actors.text.incremental_text import IncrementalText
from tests.kits import engines
from tests.kits.engines import halt_in_a_step, rest
from tests.kits.replicas import alone
from tests.kits.tiny_model import make_tiny_model
from tests.kits.waiting import PATIENCE, until

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
LONGEST = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)

small_engine = partial(engines.small_engine, standby_worker=True)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tiny_model: Path) -> AsyncIterator[Engine]:
    async with small_engine(tiny_model) as started:
        yield started


async def text_of(engine: Engine, prompt: str | list[int], params: SamplingParams = GREEDY) -> str:
    return (await read_out(engine.generate(prompt, params))).text


async def read_out(stream: RequestStream) -> Delta:
    async with asyncio.timeout(PATIENCE):
        return merge([delta async for delta in stream])


def crash(engine: Engine, *names: str) -> None:
    assert engine._system is not None
    for name in names:
        engine._system.crash_actor(name, RuntimeError("injected"))


def worker_pid(engine: Engine) -> int:
    return int(engine.describe()["workers"][0]["pid"] or 0)


# -- the worker


@pytest.mark.parametrize("victims", [("scheduler",), ("cache",), ("worker", "scheduler"), ("worker", "detokenizer")])
async def test_no_step_is_owed_after_a_restart(engine: Engine, tiny_model: Path, victims: tuple[str, ...]) -> None:
    [answer] = await alone(tiny_model, ["Once upon"], LONG)
    reader = asyncio.create_task(text_of(engine, "Once upon", LONG))
    await until(lambda: engine.board.oldest_step_sent is not None, "no step was sent")
    crash(engine, *victims)
    assert await reader == answer[0][1]
    await rest(engine)
    assert engine.board.step_age(time.monotonic()) == 0.0
    assert engine.health().ok


async def test_no_step_is_owed_by_a_worker_that_died_while_idle(engine: Engine) -> None:
    expected = await text_of(engine, "Once upon")
    await rest(engine)
    crash(engine, "worker-0")
    await until(lambda: engine.board.worker is None, "the worker is still alive")
    assert await text_of(engine, "Once upon") == expected  # sent to the ended incarnation, and again to the next
    await rest(engine)
    assert engine.board.step_age(time.monotonic()) == 0.0


async def test_a_worker_that_does_not_answer_is_replaced(tiny_model: Path) -> None:
    async with small_engine(tiny_model, watchdog_timeout=4.0) as engine:
        expected = await text_of(engine, "Once upon", LONG)
        pid = worker_pid(engine)
        reader = asyncio.create_task(text_of(engine, "Once upon", LONG))
        await until(lambda: engine.board.steps > 40 and engine.board.oldest_step_sent is not None, "nothing runs")
        os.kill(pid, signal.SIGSTOP)
        assert await reader == expected
        assert worker_pid(engine) != pid
        await rest(engine)


@pytest.mark.parametrize("stage", ["prefill", "decode"])
async def test_a_harmful_request_ends_and_no_other_does(tiny_model: Path, stage: Any) -> None:
    others = ["The lazy dog", "Once upon a time", [1, 2, 3, 4], list(range(10, 60)), [8] * 9]
    expected = [answer[0][1] for answer in await alone(tiny_model, others, LONG)]
    with FaultPlan(Fault(stage, "kill", mark=7)) as plan:
        async with small_engine(tiny_model, faults=plan) as engine:
            streams = [engine.generate(prompt, LONG) for prompt in [*others, [7] * 20]]
            ends = await asyncio.gather(*[read_out(stream) for stream in streams], return_exceptions=True)
            assert isinstance(ends[-1], RequestFailed)
            assert "ran this request alone" in str(ends[-1])
            assert [end.text for end in ends[:-1] if isinstance(end, Delta)] == expected
            assert len(await text_of(engine, "The lazy dog")) > 0
            await rest(engine)


async def test_kills_from_outside_end_no_request(tiny_model: Path) -> None:
    """One request, killed in a step more often than it takes to condemn a harmful one."""
    async with small_engine(tiny_model) as engine:
        expected = await text_of(engine, "Once upon a time", LONGEST)
        stream = engine.generate("Once upon a time", LONGEST)
        reader = asyncio.create_task(read_out(stream))
        await stream.ready()
        for _ in range(5):
            before = engine.board.output_tokens
            await until(lambda before=before: engine.board.output_tokens > before + 20, "it does not decode")
            os.kill(await halt_in_a_step(engine), signal.SIGKILL)
            await until(lambda: engine.board.worker is None, "the worker is still alive")
        assert (await reader).text == expected
        await rest(engine)


async def test_more_deaths_than_the_restarts_allowed_end_the_engine(tiny_model: Path) -> None:
    async with small_engine(tiny_model, max_worker_restarts=1) as engine:
        stream = engine.generate("Once upon a time", LONGEST)
        reader = asyncio.create_task(read_out(stream))
        for _ in range(2):
            before = engine.board.output_tokens
            await until(lambda before=before: engine.board.output_tokens > before + 20, "it does not decode")
            os.kill(await halt_in_a_step(engine), signal.SIGKILL)
            await until(lambda: engine.board.worker is None, "the worker is still alive")
        with pytest.raises(EngineFailed, match="worker-0"):
            await reader


async def test_a_load_that_takes_too_long_ends_the_start(tiny_model: Path) -> None:
    with pytest.raises(EngineFailed, match="--model-load-timeout"):
        await small_engine(tiny_model, model_load_timeout=0.01).start()


# -- the tokenizer


async def test_text_that_no_tokenizer_takes_is_refused_and_kills_no_actor(engine: Engine) -> None:
    chat = Chat(messages=[{"role": "user", "content": "\ud800"}])
    long = "one two " * 400 + "\udfff"
    for _ in range(3):
        for prompt in ("\ud800", long, chat):
            with pytest.raises(InvalidRequest):
                await engine.generate(prompt, GREEDY).ready()
    with pytest.raises(InvalidRequest):
        engine.generate([5], GREEDY, cache_salt="\ud800")
    assert engine.describe()["requests"]["sequences"] == 0
    with pytest.raises(InvalidRequest):
        await engine.token_strings([-1])
    with pytest.raises(InvalidRequest):
        await engine.token_strings([2**40])
    assert [a.incarnation for a in engine.actors() if a.name.startswith("tokenizer")] == [0]


async def test_a_panic_of_the_tokenizers_library_fails_one_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Panic(BaseException):
        __module__ = "pyo3_runtime"

    class Panicking(IncrementalText):
        def push(self, token_ids: Iterable[int]) -> tuple[str, str | None]:
            if self._stops.longest == 5:
                raise Panic("slice index starts at 1 but ends at 0")
            return super().push(token_ids)

    def encode(*_: Any, **__: Any) -> list[int]:
        raise Panic("slice index starts at 1 but ends at 0")

    before = {a.name: a.incarnation for a in engine.actors()}
    assert engine._model is not None
    with monkeypatch.context() as patch:
        patch.setattr(engine._model.codec, "encode", encode)
        for prompt in ("Once", "one two three " * 80):
            with pytest.raises(RequestFailed, match="Panic"):
                await engine.tokenize(prompt)
    monkeypatch.setattr("actors.text.detokenizer.IncrementalText", Panicking)
    bad = engine.generate([5, 6, 7], msgspec.structs.replace(GREEDY, stop=("abcde",)))
    good = engine.generate([5, 6, 7], GREEDY)
    with pytest.raises(RequestFailed, match="Panic"):
        await read_out(bad)
    assert len((await read_out(good)).token_ids) == 12
    assert {a.name: a.incarnation for a in engine.actors()} == before


# -- the stream


async def test_closing_while_the_prompt_is_encoded_submits_nothing(engine: Engine) -> None:
    assert engine._actor_tree is not None
    stream = engine.generate("one two three " * 80, GREEDY)
    admission = asyncio.create_task(stream.ready())
    await asyncio.sleep(0)
    await stream.aclose()
    with pytest.raises(RequestAborted):
        await admission
    assert list(engine._actor_tree.replicas[0].journal.live()) == []
    assert engine.describe()["requests"]["live"] == 0


async def test_a_call_from_no_loop_or_another_takes_no_place(engine: Engine) -> None:
    found: list[str] = []

    def call() -> None:
        try:
            engine.generate([5, 6, 7], GREEDY)
        except RuntimeError as error:
            found.append(str(error))

    async def call_in_a_loop() -> None:
        call()

    for target in (call, lambda: asyncio.run(call_in_a_loop())):
        thread = threading.Thread(target=target)
        thread.start()
        await asyncio.to_thread(thread.join)
    assert len(found) == 2
    assert "another event loop" in found[1]
    assert engine.describe()["requests"]["sequences"] == 0


async def test_a_stream_collected_in_another_thread_is_released(engine: Engine) -> None:
    holder = [engine.generate("Once upon", LONG)]
    await anext(holder[0])
    thread = threading.Thread(target=holder.clear)
    thread.start()
    thread.join()
    await rest(engine)
    await until(lambda: engine.describe()["requests"]["live"] == 0, "still held")


async def test_detokenizer_state_goes_with_its_request(engine: Engine) -> None:
    """Also when the word of its end is lost with the scheduler."""
    assert engine._system is not None
    streams = [engine.generate(f"Once upon {i}", LONG) for i in range(4)]
    for stream in streams:
        await anext(stream)
    crash(engine, "scheduler")
    for stream in streams:
        await stream.aclose()
    await text_of(engine, "The lazy dog")
    await rest(engine)
    detokenizer = engine._system._cells["detokenizer"].incarnation
    assert detokenizer is not None
    texts = detokenizer._actor._texts  # type: ignore[attr-defined]
    await until(lambda: not texts, "texts of requests that ended are kept")


# -- operation


async def test_ends_are_counted_as_what_they_were(engine: Engine) -> None:
    def counted() -> dict[str, float]:
        samples = [
            s for metric in engine.registry.collect() for s in metric.samples if s.name == "troupe_requests_total"
        ]
        return {s.labels["finish_reason"]: s.value for s in samples}

    before = counted()
    aborted = engine.generate("Once upon", LONG)
    await aborted.ready()
    assert await engine.abort(aborted.request_id) == 1
    with pytest.raises(RequestAborted):
        await read_out(aborted)
    with pytest.raises(InvalidRequest):
        await engine.generate("", GREEDY).ready()
    await text_of(engine, "Once upon")
    expected = {"abort": 1, "rejected": 1, "length": 1}

    def grown() -> dict[str, float]:
        return {
            reason: value - before.get(reason, 0) for reason, value in counted().items() if value != before.get(reason)
        }

    await until(lambda: sum(grown().values()) >= 3, "they are not counted")
    assert grown() == expected


async def test_flushing_a_cache_that_waits_for_its_worker_kills_no_actor() -> None:
    async with ActorSystem() as system:
        cache = await system.spawn(lambda: CacheManager(HealthBoard()), name="cache")
        assert await cache.ask(FlushCache(), timeout=60)
        assert system.describe()[0].incarnation == 0


# -- start and close


async def test_a_start_that_is_closed_meanwhile_reports_it(tiny_model: Path) -> None:
    engine = small_engine(tiny_model)
    start = asyncio.create_task(engine.start())
    await until(lambda: engine._system is not None, "it does not start")
    await engine.aclose()
    with pytest.raises(EngineFailed, match="closed"):
        await start


async def test_closed_at_once_leaves_no_thread(tiny_model: Path) -> None:
    before = set(threading.enumerate())
    engine = small_engine(tiny_model)
    await engine.start(wait=False)
    await engine.aclose()
    assert engine.status.phase == "stopped"
    await until(lambda: set(threading.enumerate()) <= before, "a thread of the engine's goes on")
    never = small_engine(tiny_model)
    await never.aclose()
    with pytest.raises(EngineFailed, match="closed"):
        await never.start()


async def test_a_download_does_not_hold_up_the_close(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    begun = threading.Event()

    def slow(*_: Any, **__: Any) -> Path:
        begun.set()
        released.wait(600)
        return tiny_model

    monkeypatch.setattr("actors.text.served_model.resolve_model_path", slow)
    engine = small_engine(tiny_model)
    await engine.start(wait=False)
    await until(begun.is_set, "it did not begin")
    async with asyncio.timeout(PATIENCE):  # the download takes longer
        await engine.aclose()
    opener = [thread for thread in threading.enumerate() if thread.name.startswith("troupe-open")]
    assert all(thread.daemon for thread in opener)  # the interpreter does not wait for it either
    released.set()
    await until(lambda: not any(t.name.startswith("troupe-open") for t in threading.enumerate()), "it did not end")


async def test_closing_refuses_at_once_and_ends_what_is_being_encoded(tiny_model: Path) -> None:
    engine = small_engine(tiny_model, enable_dynamic_batch_tokenizer=True, dynamic_batch_tokenizer_batch_timeout=10.0)
    await engine.start()
    finished, running = engine.generate([5, 6, 7], GREEDY), engine.generate([5, 6, 7], LONG)
    await finished.ready()
    await anext(running)
    await until(lambda: finished._buffer.finish_reasons != [""], "it did not finish")
    encoding = asyncio.create_task(engine.generate("one two three", GREEDY).ready())
    for _ in range(10):  # turns of the loop: it waits in the tokenizer for others to batch with
        await asyncio.sleep(0)
    close = asyncio.create_task(engine.aclose())
    await asyncio.sleep(0)
    with pytest.raises(EngineFailed, match="closed"):
        engine.generate([5, 6, 7], GREEDY)
    for ended in (encoding, read_out(running)):
        with pytest.raises(EngineFailed, match="stopped"):
            await ended
    await close
    assert (await read_out(finished)).finish_reason == "length"
    assert engine.intake is not None
    assert engine.intake.admission.sequences == 0


async def test_text_questions_wait_for_the_model(tiny_model: Path) -> None:
    engine = small_engine(tiny_model)
    await engine.start(wait=False)
    engine.begin_drain()
    await until(lambda: engine.intake is not None, "the model's files were not read")
    with pytest.raises(EngineNotReady):
        await engine.tokenize("x")
    await engine.aclose()


async def test_a_crash_loop_ends_every_request_and_gives_the_reason(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    async with small_engine(model, max_worker_restarts=2) as engine:
        stream = engine.generate("Once upon", LONG)
        await anext(stream)
        (model / "model.safetensors").unlink()
        os.kill(worker_pid(engine), signal.SIGKILL)
        with pytest.raises(EngineFailed, match="safetensors"):
            await read_out(stream)
        with pytest.raises(EngineFailed, match="safetensors"):
            engine.generate("Once upon", GREEDY)
        assert engine.status.phase == "failed"


async def test_an_actor_that_ends_unexpectedly_stops_the_engine(tiny_model: Path) -> None:
    async with small_engine(tiny_model) as engine:
        stream = engine.generate([5, 6, 7], LONG)
        await anext(stream)
        assert engine._system is not None
        assert engine._actor_tree is not None
        await engine._system.stop_actor(engine._actor_tree.replicas[0].cache)
        with pytest.raises(EngineFailed, match="cache"):
            await read_out(stream)
        assert engine.status.phase == "failed"
