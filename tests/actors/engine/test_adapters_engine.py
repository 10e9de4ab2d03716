"""LoRA adapters in an engine: tokens of merged models, loading beside requests, deaths of workers."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from actors.engine.engine import Engine
from actors.options import ArgumentError
from actors.protocol.requests import EngineFailed, InvalidRequest, SamplingParams
from tests.kits.adapters import adapted_modules, merged, save_adapter
from tests.kits.engines import rest, small_engine
from tests.kits.waiting import until

PROMPT = "The lazy dog " * 12  # of several pages of the prefix cache
NAMES = (None, "first", "other")


async def tokens_of(engine: Engine, adapter: str | None, count: int = 24) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    return [token async for delta in engine.generate(PROMPT, params, adapter=adapter) for token in delta.token_ids]


@pytest.fixture(scope="module")
def files(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Path]:
    modules = adapted_modules(tiny_model)
    folder = tmp_path_factory.mktemp("adapters")
    return {name: save_adapter(folder / name, modules, seed) for seed, name in enumerate(("first", "other"))}


@pytest.fixture(scope="module")
def alone(tiny_model: Path, files: dict[str | None, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The tokens of models with the adapters merged into their weights."""

    async def of(model: Path) -> list[int]:
        async with small_engine(model) as engine:
            return await tokens_of(engine, None)

    folder = tmp_path_factory.mktemp("merged")
    models = {name: merged(tiny_model, folder / str(name), files.get(name)) for name in NAMES}
    result = {name: asyncio.run(of(model)) for name, model in models.items()}
    assert len({tuple(tokens) for tokens in result.values()}) == 3
    return result


@pytest.fixture
async def engine(tiny_model: Path, files: dict[str | None, Path]) -> AsyncIterator[Engine]:
    async with small_engine(tiny_model, lora_paths=[f"first={files['first']}"], max_loras_per_batch=1) as engine:
        yield engine


async def test_requests_of_all_adapters_have_the_tokens_of_merged_models(engine, files, alone):
    running = asyncio.create_task(tokens_of(engine, "first"))
    await engine.load_adapter("other", str(files["other"]))
    names = [*NAMES, *NAMES]
    found = await asyncio.gather(*(tokens_of(engine, name) for name in names))
    assert [alone[name] for name in names] == found  # also the second time, from the prefix cache
    assert await running == alone["first"]


async def test_a_new_worker_has_the_adapters_before_its_streams_go_on(engine, files, alone):
    await engine.load_adapter("other", str(files["other"]))
    running = [asyncio.create_task(tokens_of(engine, name)) for name in NAMES]
    await until(lambda: engine.board.scheduler is not None and engine.board.scheduler.steps > 3, "no steps")
    os.kill(engine.describe()["workers"][0]["pid"], signal.SIGKILL)
    assert await asyncio.gather(*running) == [alone[name] for name in NAMES]


async def test_unloading_waits_for_requests_and_a_new_one_shares_no_prefix(engine, files, alone, tmp_path):
    running = asyncio.create_task(tokens_of(engine, "first"))
    await until(lambda: len(engine.intake) > 0, "no request")
    unloading = asyncio.create_task(engine.unload_adapter("first"))
    await asyncio.sleep(0)
    with pytest.raises(InvalidRequest, match="'first' is not loaded here"):
        engine.generate(PROMPT, adapter="first")
    assert not unloading.done()
    assert await running == alone["first"]
    await unloading
    await engine.load_adapter("first", str(files["other"]))
    assert await tokens_of(engine, "first") == alone["other"]
    await rest(engine)


async def test_an_adapter_is_replaced_beside_the_requests_that_have_it(engine, files, alone):
    running = asyncio.create_task(tokens_of(engine, "first", 200))
    await until(lambda: len(engine.intake) > 0, "no request")
    old = engine.adapters.find("first")
    await engine.load_adapter("first", str(files["other"]), replace=True)
    assert not running.done()
    assert await tokens_of(engine, "first") == alone["other"]
    assert (await running)[: len(alone["first"])] == alone["first"]
    await until(lambda: old.numbered not in engine.adapters.numbered(), "the replaced adapter stays")
    await rest(engine)


async def test_what_is_wrong_with_an_adapter_is_said_and_changes_nothing(engine, files, tmp_path):
    for name, path, reason in (
        ("first", files["other"], "'first' is loaded already"),
        (engine.model_names[0], files["other"], "is the name of the model. Take another name"),
        ("x", "https://host/adapter", "is a URL"),
        ("x", tmp_path / "none", "is not a directory"),
        (
            "x",
            save_adapter(tmp_path / "wide", {"model.layers.0.self_attn.q_proj": (8, 8)}, 1),
            "does not fit the model",
        ),
    ):
        with pytest.raises(InvalidRequest, match=reason):
            await engine.load_adapter(name, str(path))
    with pytest.raises(InvalidRequest, match=r"no adapter 'x' is loaded\. .*: 'first'"):
        await engine.unload_adapter("x")
    assert [adapter.name for adapter in engine.adapters] == ["first"]
    assert len(engine.adapters.numbered()) == 1


async def test_an_adapter_whose_files_have_gone_fails_its_requests_alone(tiny_model, files, alone, tmp_path):
    folder = shutil.copytree(files["first"], tmp_path / "first")
    async with small_engine(tiny_model, lora_paths=[str(folder)]) as engine:
        running = asyncio.create_task(tokens_of(engine, str(folder), 300))
        await until(lambda: engine.board.scheduler is not None and engine.board.scheduler.steps > 3, "no steps")
        shutil.rmtree(folder)
        os.kill(engine.describe()["workers"][0]["pid"], signal.SIGKILL)
        assert await tokens_of(engine, None) == alone[None]
        with pytest.raises(Exception, match="is not loaded: its files could not be read again"):
            await running
        with pytest.raises(InvalidRequest, match=r"is no longer loaded: restarted workers could not load it again \("):
            await tokens_of(engine, str(folder))
        shutil.copytree(files["first"], folder)
        await engine.load_adapter(str(folder), str(folder))
        assert await tokens_of(engine, str(folder)) == alone["first"]
        await rest(engine)


async def test_one_more_than_max_loaded_loras_unloads_the_policys_choice(tiny_model, files):
    async def loaded(policy: str, pinned: bool) -> list[str]:
        options = {"max_loaded_loras": 2, "lora_eviction_policy": policy, "enable_lora": True}
        async with small_engine(tiny_model, max_lora_rank=4, **options) as engine:
            await engine.load_adapter("a", str(files["first"]), pinned=pinned)
            await engine.load_adapter("b", str(files["other"]))
            await tokens_of(engine, "a", 2)
            await engine.load_adapter("c", str(files["first"]))
            return [adapter.name for adapter in engine.adapters]

    assert await loaded("lru", False) == ["a", "c"]
    assert await loaded("fifo", False) == ["b", "c"]
    assert await loaded("fifo", True) == ["a", "c"]


async def test_a_load_that_fails_unloads_no_other_adapter(tiny_model, files, tmp_path):
    wide = save_adapter(tmp_path / "wide", {"model.layers.0.self_attn.q_proj": (8, 8)}, 1)
    async with small_engine(tiny_model, max_loaded_loras=1, enable_lora=True, max_lora_rank=4) as engine:
        await engine.load_adapter("a", str(files["first"]))
        with pytest.raises(InvalidRequest, match="does not fit the model"):
            await engine.load_adapter("b", str(wide))
        assert [adapter.name for adapter in engine.adapters] == ["a"]


async def test_limits_hold_for_the_first_adapters_and_later_ones(tiny_model, files, tmp_path):
    with pytest.raises((EngineFailed, ArgumentError), match=r"none is not a directory.*; .*other is not a directory"):
        async with small_engine(tiny_model, lora_paths=[str(tmp_path / name) for name in ("none", "other")]):
            pass
    with pytest.raises(EngineFailed, match="its rank 3 is larger than --max-lora-rank 2"):
        async with small_engine(tiny_model, lora_paths=[str(files["first"])], max_lora_rank=2):
            pass
    async with small_engine(tiny_model, enable_lora=True, lora_target_modules=["q_proj"]) as engine:
        with pytest.raises(InvalidRequest, match="--lora-target-modules does not include"):
            await engine.load_adapter("first", str(files["first"]))


@pytest.mark.parametrize(
    "options",
    [
        {"data_parallel_size": 2},
        {"tensor_parallel_size": 2},
        {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4},
        {"pipeline_parallel_size": 2},
        {"enable_deterministic_inference": True},
    ],
    ids=["replicas", "ranks", "speculation", "stages", "deterministic"],
)
async def test_replicas_ranks_stages_and_drafts_give_the_same_tokens(tiny_model, files, alone, options):
    async with small_engine(tiny_model, lora_paths=[f"first={files['first']}"], **options) as engine:
        await engine.load_adapter("other", str(files["other"]))
        names = [*NAMES, *NAMES]
        running = [asyncio.create_task(tokens_of(engine, name)) for name in names]
        await until(lambda: any(each.scheduler and each.scheduler.steps > 3 for each in engine.board.all), "no steps")
        os.kill(engine.describe()["workers"][0]["pid"], signal.SIGKILL)
        assert await asyncio.gather(*running) == [alone[name] for name in names]


async def test_metrics_report_adapters_that_run_and_lie_on_the_device(engine, files):
    def sample(name: str, **labels: str) -> float | None:
        return engine.registry.get_sample_value(name, labels)

    await engine.load_adapter("other", str(files["other"]))
    assert (sample("troupe_adapters_loaded"), sample("troupe_adapter_slots")) == (2, 1)
    assert sample("troupe_adapter_slots_used") == 0
    running = asyncio.create_task(tokens_of(engine, "first", 200))
    await until(lambda: sample("troupe_adapter_requests", adapter="first", state="running") == 1, "it does not run")
    waiting = asyncio.create_task(tokens_of(engine, "other"))
    await until(lambda: sample("troupe_adapter_requests", adapter="other", state="waiting") == 1, "it does not wait")
    first, other = engine.adapters
    await until(lambda: engine.board.resident_adapters == (first.index,), "it does not lie on the device")
    await asyncio.gather(running, waiting)
    assert engine.board.resident_adapters == (other.index,)
    assert [engine.adapters.requests(each) for each in (first, other)] == [1, 1]
    assert sample("troupe_adapter_slots_used") == 1
    assert sample("troupe_requests_total", finish_reason="length", adapter="first") == 1
    assert sample("troupe_tokens_total", gen_ai_token_type="output", adapter="first") == 200
    await engine.unload_adapter("other")
    await tokens_of(engine, None, 2)
    await until(lambda: engine.board.resident_adapters == (), "the unloaded adapter is reported still")
    os.kill(engine.describe()["workers"][0]["pid"], signal.SIGKILL)
    await tokens_of(engine, "first", 2)
    await until(lambda: engine.board.resident_adapters == (first.index,), "it does not lie on the device")


async def test_the_span_of_a_request_names_its_adapter(tiny_model, files):
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with small_engine(tiny_model, lora_paths=[f"first={files['first']}"], tracer_provider=provider) as engine:
        for name in (None, "first"):
            await tokens_of(engine, name, 1)
    found = [span.attributes for span in exporter.get_finished_spans() if "gen_ai.request.model" in span.attributes]
    assert [attributes.get("troupe.adapter") for attributes in found] == [None, "first"]
