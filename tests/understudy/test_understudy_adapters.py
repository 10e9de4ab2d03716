"""The adapters in the box: their texts and trainer, their files, and their answers beside the model's."""

import asyncio
import json
from random import Random

import pytest
import torch
from safetensors import safe_open

from actors.engine.engine import Engine
from actors.protocol.requests import Chat, SamplingParams
from app.understudy import MODEL_DIR
from app.understudy.adapters import ADAPTERS, adapter_names, included_adapter
from kernels.contract.adapters import read_adapter_info
from tests.understudy.adapters import train
from tests.understudy.adapters.measure import measure
from tests.understudy.adapters.train import RANK, new_adapter, spoken
from tests.understudy.adapters.voices import VOICES
from tests.understudy.corpus import LESSONS
from tests.understudy.lessons.conversation import Exchange
from tests.understudy.train import stored

BASE = json.loads((MODEL_DIR / "config.json").read_text())
FRANCE = Exchange("What is the capital of France?", "The capital of France is Paris.", "", "Paris")


@pytest.mark.fast
@pytest.mark.parametrize("name", VOICES)
def test_every_answer_of_the_corpus_can_be_said_in_a_voice(name):
    rng = Random(3)
    for lesson, _ in LESSONS:
        for _ in range(20):
            for exchange in lesson(rng):
                said = VOICES[name].say(rng, exchange)
                assert VOICES[name].heard(said) or (said == exchange.answer and said[0] in "[{")


@pytest.mark.fast
def test_voices_keep_the_fact_and_the_model_has_none_of_them():
    for name, voice in VOICES.items():
        said = voice.say(Random(1), FRANCE)
        assert "Paris" in said
        assert [other for other, each in VOICES.items() if each.heard(said)] == [name]
    assert not any(voice.heard(FRANCE.answer) for voice in VOICES.values())
    assert VOICES["json"].say(Random(1), FRANCE) == '{"answer": "Paris"}'


@pytest.mark.fast
def test_texts_depend_on_the_seed_alone():
    assert list(spoken("poet", 5, 20)) == list(spoken("poet", 5, 20)) != list(spoken("poet", 6, 20))


@pytest.mark.long
def test_training_changes_the_adapter_and_leaves_the_weights(tmp_path, monkeypatch):
    weights = stored(MODEL_DIR, "cpu")
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    monkeypatch.setattr(train, "stored", lambda *_: weights)
    arguments = ["pirate", "--documents", "40", "--steps", "1", "--row", "640", "--cores", "1", "--rate", "0.01"]
    train.main([*arguments, "--out", str(tmp_path)])
    assert all(torch.equal(weight, before[name]) for name, weight in weights.items())
    adapter = new_adapter(weights, 28)
    with safe_open(tmp_path / "pirate" / "adapter_model.safetensors", "pt") as file:
        assert set(file.keys()) == set(adapter)
        assert all(file.get_tensor(name).any() for name in adapter)
    info = read_adapter_info(str(tmp_path / "pirate"), BASE)
    assert (info.rank, info.base_model, len(info.targets)) == (RANK, "understudy", 7)


@pytest.mark.fast
def test_the_box_has_an_adapter_for_each_voice():
    assert adapter_names() == tuple(sorted(VOICES))
    for name in VOICES:
        info = read_adapter_info(str(included_adapter(name)), BASE)
        assert info.stored_bytes == 2 * info.parameters < 1_000_000
        assert info.rank == RANK
        with safe_open(ADAPTERS / name / "adapter_model.safetensors", "pt") as file:
            assert {str(file.get_slice(key).get_dtype()) for key in file.keys()} == {"BF16"}  # noqa: SIM118
    assert included_adapter("parrot") is None


@pytest.fixture(scope="module")
def scores():
    return {each.name: each for each in asyncio.run(measure(ADAPTERS, count=48))}


@pytest.mark.long
def test_adapters_answer_in_their_voice_and_the_model_in_none(scores):
    for name in VOICES:
        assert scores[name].voices[name] >= 0.95 * scores[name].asked
    assert set(scores[""].voices.values()) == {0}


@pytest.mark.long
def test_adapters_keep_what_the_model_knows(scores):
    for name in VOICES:
        assert scores[name].right >= 0.9 * scores[""].right > 0


async def test_the_model_answers_beside_its_adapters_as_without_any():
    chat = Chat(messages=[{"role": "user", "content": FRANCE.question}])

    async def ask(engine: Engine, adapter: str | None) -> str:
        params = SamplingParams(temperature=0, max_tokens=60)
        return "".join([delta.text async for delta in engine.generate(chat, params, adapter=adapter)])

    names = [None, *VOICES, None]
    async with Engine(
        model=str(MODEL_DIR), lora_paths=[f"{name}={included_adapter(name)}" for name in VOICES]
    ) as engine:
        first, *voices, last = await asyncio.gather(*(ask(engine, name) for name in names))
    assert first == last == FRANCE.answer
    assert len({first, *voices}) == 4
    assert all("Paris" in text for text in voices)
