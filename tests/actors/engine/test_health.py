"""Health is progress: what stands still is named while it does, and forgotten when it moves."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from actors.faults import Fault
from actors.protocol.requests import SamplingParams
from tests.kits.breaking import breakable
from tests.kits.waiting import until

PARAMS = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


@pytest.mark.long
async def test_health_names_what_stands_still(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that is stopped, and then a scheduler that waits for ever: each is named, reported and replaced."""
    async with breakable(tiny_model, monkeypatch, soft_watchdog_timeout=0.5, watchdog_timeout=4.0) as rig:
        engine = rig.engine
        expected = (await rig.read("Once upon", PARAMS)).tokens
        reading, task = rig.start("Once upon", PARAMS)
        await until(lambda: reading.count > 0, "it does not decode")
        os.kill(rig.worker_pid, signal.SIGSTOP)
        busy = "Actor worker-0 has been busy with Step for "
        await until(lambda: engine.health().reason.startswith(busy), "health does not see a stopped worker")
        assert engine.health().step_age > 0.5
        await until(lambda: engine.board.worker is None, "the watchdog does not end it")
        assert engine.health().reason == "No worker is ready; one is being restarted."
        await task
        assert reading.tokens == expected
        await until(lambda: engine.health().ok, "it stays unwell")

        rig.plan.add(Fault("queue", "hang"))
        reading, task = rig.start("Once upon", PARAMS)
        busy = "Actor scheduler has been busy with Submit for "
        await until(lambda: engine.health().reason.startswith(busy), "health does not see a scheduler that hangs")
        await task
        assert reading.tokens == expected
        await rig.rest()
    stalls = [record.getMessage() for record in caplog.records if record.getMessage().startswith("stall:")]
    assert {"worker-0", "scheduler"} <= {stall.split()[2] for stall in stalls}  # on a busy machine others may be slow
    deaths = [record.getMessage() for record in caplog.records if " died: " in record.getMessage()]
    assert len(deaths) >= 2
    assert all("over the watchdog's 4 s" in death or "got no answer" in death for death in deaths)


async def test_a_tokenizer_whose_thread_hangs_is_replaced(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its loop goes on and takes messages; the one that waits for the thread shows that it hangs."""
    async with breakable(tiny_model, monkeypatch, soft_watchdog_timeout=0.5, watchdog_timeout=2.0) as rig:
        assert rig.engine._model is not None
        codec, released, hung = rig.engine._model.codec, threading.Event(), threading.Event()
        assert codec is not None
        encode = codec.encode

        def hang(text: str, **keywords: Any) -> list[int]:
            if not hung.is_set():
                hung.set()
                released.wait(600)
            return encode(text, **keywords)

        monkeypatch.setattr(codec, "encode", hang)
        try:
            reading, task = rig.start("again and again and " * 60, PARAMS)
            busy = "Actor tokenizer-0 has been busy with Encode for "
            await until(lambda: rig.engine.health().reason.startswith(busy), "health does not see it")
            await task
            assert reading.error is None
            assert reading.count == PARAMS.max_tokens
            assert [a.incarnation for a in rig.engine.actors() if a.name == "tokenizer-0"] == [1]
        finally:
            released.set()
        await until(
            lambda: sum(thread.name.startswith("troupe-tokenizer") for thread in threading.enumerate()) == 1,
            "the thread of the first incarnation goes on",
        )
        # On a busy machine others may be slow too.
        assert any(
            "stacks of actor" in message and "thread troupe-tokenizer_0" in message and "in hang" in message
            for message in caplog.messages
        )
        await rig.rest()


async def test_health_sees_work_that_is_not_done(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every actor is idle, and so is the request."""
    async with breakable(tiny_model, monkeypatch, soft_watchdog_timeout=0.3, watchdog_timeout=60.0) as rig:
        assert rig.engine._system is not None
        scheduler = rig.engine._system._cells["scheduler"].incarnation._actor  # type: ignore[union-attr]
        monkeypatch.setattr(type(scheduler._planner), "can_send", False)
        reading, task = rig.start("Once upon", PARAMS)
        idle = "0 sequences run and 1 wait, but no step has ended for "
        await until(lambda: rig.engine.health().reason.startswith(idle), "health does not see it")
        assert reading.count == 0
        await reading.stream.aclose()
        await task
        await until(lambda: rig.engine.health().ok, "it is forgotten")
        await rig.rest()
