"""An engine whose model runs in two workers: it says what one worker says, and outlives the death of either."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import msgspec
import psutil
import pytest

from actors.boards.stream_buffer import merge
from actors.engine.engine import Engine
from actors.protocol.requests import EngineFailed, SamplingParams
from actors.requests.streams import RequestStream
from tests.kits import engines
from tests.kits.addresses import held_address
from tests.kits.tiny_model import make_tiny_model
from tests.kits.waiting import PATIENCE, until

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, top_k=50, seed=11, max_tokens=24, ignore_eos=True)
PROMPTS = ["Once upon", "The quick brown fox " * 12, "one two three"]

small_engine = partial(engines.small_engine, device="cpu", standby_worker=False)


async def read_out(stream: RequestStream) -> list[int]:
    async with asyncio.timeout(PATIENCE):
        return list(merge([delta async for delta in stream]).token_ids)


async def say(engine: Engine) -> list[list[int]]:
    cases = [(prompt, params) for prompt in PROMPTS for params in (GREEDY, SAMPLED)]
    return list(await asyncio.gather(*(read_out(engine.generate(*question)) for question in cases)))


def pids(engine: Engine) -> list[int]:
    return [int(worker["pid"] or 0) for worker in engine.describe()["workers"]]


def listeners(pid: int) -> list[str]:
    """host:port of the sockets on which a process lets others find it."""
    sockets = psutil.Process(pid).net_connections()
    return [f"{one.laddr.ip}:{one.laddr.port}" for one in sockets if one.status == psutil.CONN_LISTEN]


async def killed_in_a_stream(engine: Engine, rank: int, kill: signal.Signals) -> list[int]:
    """The tokens of a request whose worker of ``rank`` gets ``kill`` after the first of them."""
    before = pids(engine)
    stream = engine.generate("Once upon", LONG)
    first = await anext(stream)
    os.kill(before[rank], kill)
    tokens = [*first.token_ids, *await read_out(stream)]
    assert not set(before) & set(pids(engine))
    return tokens


@pytest.mark.long
async def test_two_workers_generate_what_one_generates_and_are_replaced_together(tiny_model: Path) -> None:
    async with small_engine(tiny_model) as engine:
        expected = await say(engine)
        long = await read_out(engine.generate("Once upon", LONG))
    async with small_engine(tiny_model, tp=2) as engine:
        workers = engine.describe()["workers"]
        assert [worker["name"] for worker in workers] == ["worker-0", "worker-1"]
        assert await say(engine) == expected
        for rank in (1, 0):
            assert await killed_in_a_stream(engine, rank, signal.SIGKILL) == long
        assert await say(engine) == expected
        assert [worker["restarts"] for worker in engine.describe()["workers"]] == [2, 2]


@pytest.mark.long
async def test_prompts_run_as_two_batches_and_a_dead_worker_loses_nothing(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "long", max_position_embeddings=1024)
    prompt, options = [20 + 7 * place % 300 for place in range(700)], {"chunked_prefill_size": 1024}
    async with small_engine(model, **options) as engine:
        expected = await read_out(engine.generate(prompt, GREEDY))
    async with small_engine(model, tp=2, enable_two_batch_overlap=True, **options) as engine:
        before = pids(engine)
        stream = engine.generate(prompt, GREEDY)
        first = await anext(stream)
        os.kill(before[1], signal.SIGKILL)
        assert [*first.token_ids, *await read_out(stream)] == expected
        rows = engine.metrics.steps.readings()["troupe_step_rows_total"]
        assert isinstance(rows, Mapping)
        assert rows["two_batches",] == 2  # the prompt, and the prompt with its output


@pytest.mark.long
async def test_workers_meet_in_a_folder_that_only_their_user_enters(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    async with small_engine(tiny_model, tp=2) as engine:
        before = pids(engine)
        (folder,) = tmp_path.glob("troupe-ranks-*")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert [path.name for path in folder.iterdir()] == ["store"]
        first, second = map(listeners, before)
        assert all(place.startswith("127.0.0.1:") for place in first + second)
        assert len(first) == len(second)  # gloo's: rank 0 keeps no store for the others
        await killed_in_a_stream(engine, 1, signal.SIGKILL)
        (after,) = tmp_path.glob("troupe-ranks-*")
        assert after != folder
    assert not list(tmp_path.glob("troupe-ranks-*"))


@pytest.mark.long
async def test_two_workers_draft_alike(tiny_model: Path) -> None:
    """How many draft tokens are made follows measured times, which differ between ranks: all must make the same."""
    async with small_engine(
        tiny_model,
        tp=2,
        speculative_algorithm="STANDALONE",
        speculative_draft_model_path=str(tiny_model),
        speculative_num_steps=4,
        speculative_adaptive=True,
    ) as engine:
        drafted = await say(engine)
        for place, params in enumerate((GREEDY, SAMPLED)):
            plain = msgspec.structs.replace(params, speculative=False)
            assert await read_out(engine.generate(PROMPTS[0], plain)) == drafted[place]


@pytest.mark.long
async def test_a_rank_may_die_again_while_its_group_restarts(tiny_model: Path) -> None:
    """Rank 0 dies once more. Rank 1 is started again once or twice: the group has an epoch of its own each time."""
    async with small_engine(tiny_model, tp=2) as engine:
        expected = await read_out(engine.generate("Once upon", LONG))
        first = pids(engine)[0]

        async def kill_the_next() -> None:
            await until(lambda: pids(engine)[0] not in (0, first), "no next worker")
            os.kill(pids(engine)[0], signal.SIGKILL)

        killer = asyncio.create_task(kill_the_next())
        assert await killed_in_a_stream(engine, 1, signal.SIGKILL) == expected
        await killer
        restarts = [worker["restarts"] for worker in engine.describe()["workers"]]
        assert restarts in ([2, 1], [2, 2])


@pytest.mark.long
async def test_a_worker_that_hangs_ends_the_collective_of_the_other(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("actors.engine.configuration.OP_TIMEOUT_SECONDS", 3.0)
    with held_address() as address:
        await outlives_a_hung_rank(tiny_model, address)
    assert "rank 0 of 2: a collective failed" in caplog.text
    assert "any user who reaches that port may disturb them" in caplog.text


async def outlives_a_hung_rank(model: Path, address: str) -> None:
    async with small_engine(model, tp=2, dist_init_addr=address, standby_worker=True) as engine:
        listening = [place for pid in pids(engine) for place in listeners(pid)]
        assert address in listening
        assert all(place.startswith("127.0.0.1:") for place in listening)
        expected = await read_out(engine.generate("Once upon", LONG))
        assert await killed_in_a_stream(engine, 1, signal.SIGSTOP) == expected


async def test_what_cannot_be_divided_is_reported_at_the_start(tiny_model: Path) -> None:
    with pytest.raises(EngineFailed, match=r"num_attention_heads 4 .* 3; this model takes 1, 2, 4"):
        async with small_engine(tiny_model, tensor_parallel_size=3):
            pass
