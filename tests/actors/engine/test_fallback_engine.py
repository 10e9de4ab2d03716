"""Engines whose model runs transformers' modeling code, in a child process; and code of a checkpoint."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from actors.boards.stream_buffer import merge
from actors.engine.engine import Engine
from actors.protocol.requests import Delta, SamplingParams
from actors.requests.streams import RequestStream
from tests.kits.engines import rest, small_engine
from tests.kits.tiny_architectures import save_tiny
from tests.kits.tiny_model import make_tiny_model
from tests.kits.waiting import PATIENCE

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = ["The quick brown fox jumps over the lazy dog. " * 3, "Once upon a time", "What is the capital of France?"]


async def read(stream: RequestStream) -> Delta:
    async with asyncio.timeout(PATIENCE):
        return merge([delta async for delta in stream])


async def answers(engine: Engine) -> list[str]:
    return [delta.text for delta in await asyncio.gather(*(read(engine.generate(one, GREEDY)) for one in PROMPTS))]


def with_tokenizer(kind: str, folder: Path, **more: Any) -> Path:
    """A small model of a type, with the tokenizer of the tiny model."""
    words = make_tiny_model(folder / "words")
    save_tiny(kind, folder / kind, {"vocab_size": 384} | more)
    shutil.copy(words / "tokenizer.json", folder / kind)
    return folder / kind


async def test_answers_are_the_native_familys(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "model")
    found = []
    for choice in ("native", "transformers"):
        async with small_engine(path, model_impl=choice) as engine:
            found.append(await answers(engine))
    assert found[0] == found[1]


async def test_windows_and_shared_prefixes_leave_answers_as_they_are(tmp_path: Path) -> None:
    path = with_tokenizer("mistral", tmp_path, sliding_window=21)
    async with small_engine(path, model_impl="transformers", page_size=4, chunked_prefill_size=32) as engine:
        first, again = await answers(engine), await answers(engine)
        usage = engine.board.cache()
        assert usage is not None
        assert [group.kind for group in usage.bounded] == ["window"]
        await rest(engine)
    async with small_engine(path, model_impl="native", disable_hybrid_swa_memory=True) as engine:
        assert first == again == await answers(engine)


CODE = """
from transformers.models.phi.configuration_phi import PhiConfig
from transformers.models.phi.modeling_phi import PhiForCausalLM

open({marker!r}, "w").close()


class OwnConfig(PhiConfig):
    model_type = "own"


class OwnForCausalLM(PhiForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A model with code of its own, and a file that the code makes when it runs."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    path, marker = with_tokenizer("phi", tmp_path), tmp_path / "ran"
    config = json.loads((path / "config.json").read_text())
    maps = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnForCausalLM"}
    config |= {"model_type": "own", "architectures": ["OwnForCausalLM"], "auto_map": maps}
    (path / "config.json").write_text(json.dumps(config))
    (path / "own_code.py").write_text(CODE.format(marker=str(marker)))
    return path, marker


async def test_code_of_a_checkpoint_is_refused_by_default(own_code: tuple[Path, Path]) -> None:
    path, marker = own_code
    with pytest.raises(Exception, match="code of its own, which --trust-remote-code would run"):
        async with small_engine(path):
            pass
    assert not marker.exists()


async def test_code_of_a_checkpoint_runs_where_it_is_trusted(
    own_code: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    path, marker = own_code
    caplog.set_level(logging.WARNING)
    async with small_engine(path, trust_remote_code=True) as engine:
        assert engine.model_info is not None
        assert (await read(engine.generate("Once upon", GREEDY))).usage.completion_tokens == 24
    assert marker.exists()
    assert "--trust-remote-code lets Python files of the checkpoint run in this process" in caplog.text
