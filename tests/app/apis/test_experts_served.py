"""A model of experts, served: over HTTP it says what its runner says, with guesses and on two ranks."""

from __future__ import annotations

import re
from pathlib import Path

import openai
import pytest
from prometheus_client import generate_latest

from actors.protocol.requests import Chat
from app.application import create_app
from kernels.contract.config import RunnerConfig
from kernels.execution.runner import ModelRunner
from tests.kits.driver import Driver
from tests.kits.engines import small_engine
from tests.kits.tiny_model import make_tiny_model

pytestmark = pytest.mark.usefixtures("warm_workers")

SIZES = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
QUESTIONS = ["Who is there?", "one two three four, one two three four, one two three"]
LENGTH = 48


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    family = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    return make_tiny_model(tmp_path_factory.mktemp("mixture"), **family, **SIZES)


def greedy(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What the runner says after each prompt."""
    runner = ModelRunner(RunnerConfig(model_path=str(model), dtype="float32", max_total_tokens=4096, threads=1))
    driver = Driver(runner, runner.load())
    for slot, prompt in enumerate(prompts, start=1):
        driver.admit(slot, prompt)
        driver.generate(slot, len(prompt) + LENGTH)
    return [driver.tokens[slot][len(prompt) :] for slot, prompt in enumerate(prompts, start=1)]


@pytest.mark.parametrize(
    "options",
    [
        {"speculative_algorithm": "NGRAM"},
        pytest.param({"tp": 2, "device": "cpu"}, marks=pytest.mark.long),
    ],
    ids=["guesses", "two ranks"],
)
async def test_a_chat_answer_is_what_the_runner_says(options, model, serve, until):
    engine = small_engine(model, served_model_name="mixture", skip_server_warmup=True, standby_worker=False, **options)
    application = create_app(engine.arguments, engine)
    url = await serve(application)
    await until(lambda: engine.status.phase == "ready")
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = [await engine.tokenize(Chat(messages=tuple(chat))) for chat in chats]
    expected = [await engine.detokenize(tokens) for tokens in greedy(model, prompts)]
    assert len(set(expected)) == len(QUESTIONS)
    guesses = "speculative_algorithm" in options
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for chat, text in zip(chats, expected, strict=True):
            common = {"model": "mixture", "messages": chat, "temperature": 0, "max_tokens": LENGTH}
            extra = {"ignore_eos": True} | ({"speculative": False} if guesses else {})
            answer = await client.chat.completions.create(**common, extra_body=extra)
            assert answer.choices[0].message.content == text
            assert answer.usage.completion_tokens == LENGTH
            stream = await client.chat.completions.create(**common, stream=True, extra_body={"ignore_eos": True})
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
            assert "".join(pieces) == text
            assert sum(map(bool, pieces)) > 1
    if guesses:
        accepted = re.search(
            r"^troupe_speculative_accepted_tokens_total{.*NGRAM.*} (\S+)$",
            generate_latest(engine.registry).decode(),
            re.MULTILINE,
        )
        assert accepted is not None
        assert float(accepted[1]) > 0
