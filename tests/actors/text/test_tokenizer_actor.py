from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from actors.protocol import Decode, DecodeTokens, Encode, Encoded
from actors.protocol.requests import InvalidRequest
from actors.runtime import ActorDied, ActorSystem
from actors.text.model_files import ModelFiles
from actors.text.text_codec import TextCodec
from actors.text.tokenizer import INLINE_CHARS, Tokenizer
from tests.kits.waiting import until


@pytest.fixture(scope="module")
def codec(tiny_model: Path) -> TextCodec:
    return TextCodec(ModelFiles(tiny_model))


async def encode_all(codec: TextCodec, prompts: list[str], **options: object) -> tuple[list[list[int]], int]:
    actor = Tokenizer(codec, **options)  # type: ignore[arg-type]
    async with ActorSystem() as system:
        ref = await system.spawn(lambda: actor, name="tokenizer")
        replies = await asyncio.gather(*(ref.ask(Encode(prompt=p), timeout=60) for p in prompts))
    return [r.token_ids for r in replies], actor.trips


async def test_short_texts_take_no_trip_and_long_ones_share_one(codec: TextCodec) -> None:
    short = [f"the fox {i}" for i in range(8)]
    ids, trips = await encode_all(codec, short)
    assert ids == [codec.encode(p) for p in short]
    assert trips == 0
    long = [f"{i} fox " * INLINE_CHARS for i in range(8)]
    ids, trips = await encode_all(codec, long)
    assert ids == [codec.encode(p) for p in long]
    assert trips == 1


async def test_the_dynamic_batch_waits_for_more_and_leaves_when_full(codec: TextCodec) -> None:
    prompts = [f"the fox {i}" for i in range(12)]
    ids, trips = await encode_all(codec, prompts, batch_size=4, batch_timeout=10.0)
    assert ids == [codec.encode(p) for p in prompts]
    assert trips == 3


async def test_a_dynamic_batch_that_stays_small_leaves_at_its_timeout(codec: TextCodec) -> None:
    ids, trips = await encode_all(codec, ["the fox"], batch_size=4, batch_timeout=0.01)
    assert ids == [codec.encode("the fox")]
    assert trips == 1


async def test_without_batch_encode_each_prompt_takes_its_own_trip(codec: TextCodec) -> None:
    prompts = [f"{i} fox " * INLINE_CHARS for i in range(3)]
    _, trips = await encode_all(codec, prompts, batch_encode=False)
    assert trips == 3


async def test_a_bad_text_fails_alone(codec: TextCodec) -> None:
    good = Encode(prompt="hi " * INLINE_CHARS)
    bad = Encode(prompt="\ud800" * (INLINE_CHARS + 1))
    async with ActorSystem() as system:
        ref = await system.spawn(lambda: Tokenizer(codec), name="tokenizer")
        results = await asyncio.gather(*(ref.ask(m, timeout=60) for m in (good, bad, good)), return_exceptions=True)
        assert isinstance(results[1], InvalidRequest)
        first, last = results[0], results[2]
        assert isinstance(first, Encoded)
        assert isinstance(last, Encoded)
        assert first.token_ids == last.token_ids
        assert system.describe()[0].incarnation == 0


async def test_decoding(codec: TextCodec) -> None:
    async with ActorSystem() as system:
        ref = await system.spawn(lambda: Tokenizer(codec), name="tokenizer")
        ids = codec.encode("café 🎭")
        assert await ref.ask(Decode(token_ids=ids), timeout=60) == "café 🎭"
        assert len(await ref.ask(DecodeTokens(token_ids=ids), timeout=60)) == len(ids)


async def test_a_crash_fails_waiting_requests_and_the_restart_encodes(codec: TextCodec) -> None:
    async with ActorSystem() as system:
        ref = await system.spawn(lambda: Tokenizer(codec, batch_timeout=600.0), name="tokenizer")
        waiting = asyncio.create_task(ref.ask(Encode(prompt="the fox"), timeout=60))
        await until(lambda: system.describe()[0].message == "Encode")
        system.crash_actor(ref, RuntimeError("injected"))
        with pytest.raises(ActorDied):
            await waiting
        assert await ref.ask(Decode(token_ids=codec.encode("fox")), timeout=60) == "fox"
