"""What an engine logs, with a worker in a real child process: a request's end, and a worker's death once."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from actors.engine.engine import Engine
from actors.protocol.requests import Chat, SamplingParams
from telemetry.logs.lines import Event
from tests.kits.engines import halt_in_a_step

LONG = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tiny_model: Path) -> AsyncIterator[Engine]:
    async with Engine(
        model=str(tiny_model),
        dtype="float32",
        cpu_threads=1,
        max_running_requests=4,
        max_total_tokens=4096,
        log_requests=True,
        log_requests_level=3,
        log_format="json",
    ) as started:
        yield started


async def test_a_requests_end_logs_all_parameters(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, n=2)
    with caplog.at_level(logging.INFO, logger="troupe.requests"):
        texts = {0: "", 1: ""}
        async for delta in engine.generate("Once upon", params, request_id="mine"):
            texts[delta.index] += delta.text
        chat = Chat(messages=[{"role": "user", "content": "hello"}])
        async for _ in engine.generate(chat, SamplingParams(max_tokens=1)):
            pass
    one, two = [json.loads(record.getMessage()) for record in caplog.records if record.name == "troupe.requests"]
    assert one["label"] == "mine"
    assert one["finish_reasons"] == ["length", "length"]
    assert (one["input"], one["output"]) == ("Once upon", [texts[0], texts[1]])
    assert (one["output_tokens"], one["max_tokens"]) == (12, 6)
    assert 0 < one["first_token_s"] <= one["duration_s"]
    for name in ("tokenize_s", "queue_s", "prefill_s", "decode_s"):
        assert 0 <= one[name] <= one["duration_s"], name
    assert json.loads(two["input"])["messages"] == [{"role": "user", "content": "hello"}]
    assert two["operation"] == "chat"


async def test_a_workers_death_is_logged_once_with_its_batch(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    streams = [engine.generate("Once", LONG), engine.generate("Twice", LONG)]
    readers = [aiter(stream) for stream in streams]
    for reader in readers:
        await anext(reader)
    (worker,) = [actor for actor in engine.actors() if actor.name == "worker-0"]
    assert worker.pid is not None
    with caplog.at_level(logging.INFO, logger="troupe"):
        os.kill(await halt_in_a_step(engine), signal.SIGKILL)
        for reader in readers:
            async for _ in reader:
                pass
    severe = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert [record.name for record in severe] == ["troupe.engine"]
    (death,) = severe
    assert isinstance(death.msg, Event)
    assert death.msg.text == "Actor worker-0 died: killed by SIGKILL"
    batch = death.msg.fields["batch"]
    assert isinstance(batch, tuple)
    assert set(batch) == {stream.request_id for stream in streams}
    assert death.msg.fields["device"] == engine.describe()["model_info"]["device"]
    assert death.msg.fields["incarnation"] == worker.incarnation
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == ["actor worker-0 restarted (incarnation 1)"]
    ends = [json.loads(record.getMessage()) for record in caplog.records if record.name == "troupe.requests"]
    assert [end["worker_deaths"] for end in ends] == [1, 1]
