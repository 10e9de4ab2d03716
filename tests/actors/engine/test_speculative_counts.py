"""Draft tokens are counted by request and in the metrics; a request can limit them."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from actors.engine.engine import Engine
from actors.protocol.requests import InvalidRequest, SamplingParams, Usage
from tests.kits.engines import small_engine

PROMPT = [7, 8, 9, 10, 11, 12] * 8


async def say(engine: Engine, salt: str | None = None, **keywords: object) -> tuple[list[int], Usage]:
    params = SamplingParams(**({"temperature": 0, "max_tokens": 40, "ignore_eos": True} | keywords))
    tokens: list[int] = []
    usage = Usage()
    async for delta in engine.generate(PROMPT, params, cache_salt=salt):
        tokens += delta.token_ids
        usage = delta.usage
    return tokens, usage


async def test_drafts_are_counted_by_request_and_in_all(tiny_model: Path) -> None:
    registry = CollectorRegistry()
    engine = small_engine(
        tiny_model,
        registry=registry,
        speculative_algorithm="NGRAM",
        metrics_names="sglang,vllm",
    )
    async with engine:
        tokens, usage = await say(engine)
        again, second = await say(engine)
        off, none = await say(engine, speculative=False)
        one, single = await say(engine, speculative_num_draft_tokens=1)
        few, short = await say(engine, speculative_num_draft_tokens=3)
        assert tokens == again == off == one == few
        assert none.acceptance is None
        assert single.acceptance is None
        assert usage.acceptance is not None
        assert second.acceptance is not None
        assert short.acceptance is not None
        assert second.acceptance.accepted > 20  # it was all said before
        assert second.acceptance.steps < 20
        assert len(short.acceptance.histogram) <= 3
        assert short.acceptance.drafted <= 2 * short.acceptance.steps
        found = (usage.acceptance, second.acceptance, short.acceptance)
        for each in found:
            assert sum(each.histogram) == each.steps
            assert sum(count * place for place, count in enumerate(each.histogram)) == each.accepted
            assert each.accepted <= each.drafted
        for field, value in (("speculative_num_draft_tokens", 65), ("speculative_num_draft_tokens", 0)):
            with pytest.raises(InvalidRequest, match=f"{field} must be an integer from 1 to 64"):
                await say(engine, **{field: value})
        with pytest.raises(InvalidRequest, match="speculative must be true or false"):
            await say(engine, speculative=1)
        text = generate_latest(registry).decode()
    values = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line[0] != "#"}
    by = '{algorithm="NGRAM"}'
    drafts, accepted = sum(each.steps for each in found), sum(each.accepted for each in found)
    # Steps that ran on behind an end are in the engine's counts, and in no request's.
    all_drafts = values[f"troupe_speculative_drafts_total{by}"]
    all_accepted = values[f"troupe_speculative_accepted_tokens_total{by}"]
    assert drafts <= all_drafts <= drafts + 2 * len(found)
    assert accepted <= all_accepted <= accepted + 40 * len(found)
    assert values[f"troupe_speculative_draft_tokens_total{by}"] >= sum(each.drafted for each in found)
    assert values[f"troupe_speculative_draft_seconds_total{by}"] > 0
    places = [value for name, value in values.items() if "accepted_at_position_total" in name]
    assert sum(places) == all_accepted
    assert places == sorted(places, reverse=True)
    vllm = {name.split("{")[0]: value for name, value in values.items() if "vllm:spec" in name}
    assert vllm["vllm:spec_decode_num_drafts_total"] == all_drafts
    assert vllm["vllm:spec_decode_num_accepted_tokens_total"] == all_accepted
    assert 'position="0"' in text
    sglang = {name.split("{")[0]: value for name, value in values.items() if "sglang:spec" in name}
    assert sglang["sglang:spec_verify_calls_total"] == all_drafts
    assert sglang["sglang:spec_accept_length"] >= 1


async def test_a_prediction_gives_draft_tokens_that_nothing_else_does(tiny_model: Path) -> None:
    async with small_engine(tiny_model, speculative_algorithm="NGRAM") as engine:
        tokens, usage = await say(engine, salt="a")
        again, predicted = await say(engine, salt="b", prediction=await engine.detokenize(tokens))
        assert again == tokens
        assert predicted.acceptance is not None
        assert predicted.acceptance.accepted > (usage.acceptance.accepted if usage.acceptance else 0)
    async with small_engine(tiny_model) as engine:
        with pytest.raises(InvalidRequest, match="--speculative-algorithm NGRAM"):
            await say(engine, prediction="x")


async def test_an_engine_that_does_not_draft_reports_none(tiny_model: Path) -> None:
    registry = CollectorRegistry()
    async with small_engine(tiny_model, registry=registry, metrics_names="sglang,vllm") as engine:
        tokens, usage = await say(engine, speculative_num_draft_tokens=8)
        assert len(tokens) == 40
        assert usage.acceptance is None
        text = generate_latest(registry).decode()
    assert not [line for line in text.splitlines() if "spec" in line and not line.startswith("#")]
