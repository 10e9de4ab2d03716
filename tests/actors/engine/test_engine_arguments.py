"""Arguments whose effect shows at the engine's own API."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from actors.boards.stream_buffer import merge
from actors.engine.engine import Engine
from actors.engine.opening import read_model
from actors.options import ArgumentError, Arguments
from actors.protocol.requests import Chat, Delta, InvalidRequest, QueueFull, RequestTimeout, SamplingParams
from actors.requests.streams import RequestStream
from actors.text.text_codec import TextCodec
from actors.text.tokenizer import Tokenizer
from tests.kits.tiny_model import make_tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def engine(model: Path, **keywords: Any) -> Engine:
    options: dict[str, Any] = {"dtype": "float32", "cpu_threads": 1, "max_total_tokens": 2048, "standby_worker": False}
    return Engine(model=str(model), **(options | keywords))


async def whole(stream: RequestStream) -> Delta:
    return merge([delta async for delta in stream])


async def test_context_truncation_and_the_token_bound_of_admission(tiny_model: Path) -> None:
    async with engine(tiny_model, context_length=64, allow_auto_truncate=True, max_queued_tokens=100) as e:
        assert e.context_length == 64
        cut = await whole(e.generate("fox " * 100, GREEDY))
        assert cut.usage.prompt_tokens == 52
        assert cut.usage.completion_tokens == 12
        shortened = await whole(e.generate([5] * 60, SamplingParams(max_tokens=50, ignore_eos=True)))
        assert shortened.usage.completion_tokens == 4
        first = e.generate([5] * 60, GREEDY)
        with pytest.raises(QueueFull, match="prompt tokens"):
            e.generate([6] * 60, GREEDY)
        await first.aclose()


async def test_context_length_without_truncation(tiny_model: Path) -> None:
    async with engine(tiny_model, context_length=64) as e:
        with pytest.raises(InvalidRequest, match="maximum context length is 64"):
            await whole(e.generate("fox " * 100, GREEDY))
        with pytest.raises(InvalidRequest, match="at most 60 tokens"):
            await whole(e.generate([5] * 4, SamplingParams(max_tokens=61)))
        unbounded = await whole(e.generate([5] * 4, SamplingParams(temperature=0, ignore_eos=True)))
        assert unbounded.usage.completion_tokens == 60


async def test_defaults_from_the_model_and_the_server(tiny_model: Path, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    (model / "generation_config.json").write_text('{"eos_token_id": 2, "do_sample": false}')
    free = SamplingParams(max_tokens=12, ignore_eos=True, seed=3)
    async with engine(model) as e:
        greedy = await whole(e.generate("fox", GREEDY))
        assert (await whole(e.generate("fox", free))).token_ids == greedy.token_ids
    async with engine(model, sampling_defaults="openai") as e:
        assert (await whole(e.generate("fox", free))).token_ids != greedy.token_ids
    async with engine(model, preferred_sampling_params={"temperature": 1.0}) as e:
        assert (await whole(e.generate("fox", free))).token_ids != greedy.token_ids


async def test_random_seed_makes_unseeded_requests_repeat(tiny_model: Path) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    found = []
    for seed in (5, 5, 6):
        async with engine(tiny_model, random_seed=seed) as e:
            found.append([(await whole(e.generate("fox", params))).token_ids for _ in range(2)])
    assert found[0] == found[1] != found[2]
    assert found[0][0] != found[0][1]


async def test_without_a_tokenizer_only_ids_go_in_and_out(tiny_model: Path) -> None:
    async with engine(tiny_model, skip_tokenizer_init=True) as e:
        result = await whole(e.generate([5, 6, 7], GREEDY))
        assert len(result.token_ids) == 12
        assert result.text == ""
        for prompt in ("text", Chat(messages=[])):
            with pytest.raises(InvalidRequest, match="skip-tokenizer-init"):
                e.generate(prompt, GREEDY)
        with pytest.raises(InvalidRequest, match="stop_token_ids"):
            e.generate([5], SamplingParams(stop=("x",)))


async def test_template_workers_interval_and_name(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, Any]] = []

    class Told(Tokenizer):
        def __init__(self, codec: TextCodec, **options: Any) -> None:
            made.append(options)
            super().__init__(codec, **options)

    monkeypatch.setattr("actors.engine.actor_tree.Tokenizer", Told)
    template = tmp_path / "mine.jinja"
    template.write_text("mine {{ messages[0].content }}")
    async with engine(
        tiny_model,
        chat_template=str(template),
        tokenizer_worker_num=2,
        enable_dynamic_batch_tokenizer=True,
        dynamic_batch_tokenizer_batch_size=3,
        dynamic_batch_tokenizer_batch_timeout=0.004,
        stream_interval=5,
        served_model_name="my-model",
        abort_on_priority_when_disabled=True,
    ) as e:
        assert await e.render(Chat(messages=[{"role": "user", "content": "hi"}])) == "mine hi"
        assert [a.name for a in e.health().actors if a.name.startswith("tokenizer")] == ["tokenizer-0", "tokenizer-1"]
        assert made == [{"batch_size": 3, "batch_timeout": 0.004, "batch_encode": True}] * 2
        assert e.model_name == "my-model"
        sizes = [len(delta.token_ids) async for delta in e.generate("fox", GREEDY)]
        assert sum(sizes) == 12
        assert all(size >= 5 for size in sizes[1:-1])
        with pytest.raises(InvalidRequest, match="enable-priority-scheduling"):
            e.generate("fox", GREEDY, priority=3)


def test_what_the_hub_has_is_downloaded_as_the_arguments_say(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    downloads: list[tuple[str, str | None, str, bool]] = []

    def download(name: str, *, revision: str | None, cache_dir: str, allow_patterns: list[str]) -> str:
        downloads.append((name, revision, cache_dir, "*.safetensors" in allow_patterns))
        return str(tiny_model)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    model = read_model(
        Arguments(
            model_path="own/model",
            revision="second",
            tokenizer_path="own/words",
            download_dir="/models",
            speculative_algorithm="STANDALONE",
            speculative_draft_model_path="own/draft",
            speculative_draft_model_revision="third",
        )
    )
    assert sorted(downloads) == [
        ("own/draft", "third", "/models", True),
        ("own/model", "second", "/models", True),
        ("own/words", None, "/models", False),
    ]
    assert model.served.files.path == tiny_model


async def test_overrides_dummy_weights_page_size_and_no_cache(tiny_model: Path) -> None:
    async with engine(
        tiny_model,
        load_format="dummy",
        json_model_override_args={"num_hidden_layers": 1},
        page_size=32,
        disable_radix_cache=True,
        disable_overlap_schedule=True,
    ) as e:
        assert e.model_info is not None
        assert e.model_info.layers == 1
        assert e.model_info.page_size == 32
        assert e.model_info.num_pages == 2048 // 32 + 1
        for _ in range(2):
            result = await whole(e.generate([5] * 100, GREEDY))
            assert result.usage.cached_tokens == 0


@pytest.mark.parametrize(("policy", "kept"), [("lru", False), ("lfu", True)])
async def test_the_eviction_policy_decides_which_prefix_stays(tiny_model: Path, policy: str, kept: bool) -> None:
    """One is asked for three times; three others once, later; then there is no room for all."""
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    async with engine(tiny_model, max_total_tokens=256, page_size=16, radix_eviction_policy=policy) as e:
        often, *once = ([token] * 65 for token in (5, 6, 7, 8, 9))
        for prompt in (often, often, often, *once):
            await whole(e.generate(prompt, one))
        assert ((await whole(e.generate(often, one))).usage.cached_tokens > 0) is kept


@pytest.mark.parametrize("together", [True, False])
async def test_prompts_that_wait_are_encoded_together_unless_disabled(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    made: list[Tokenizer] = []

    class Told(Tokenizer):
        def __init__(self, codec: TextCodec, **options: Any) -> None:
            super().__init__(codec, **options)
            made.append(self)

    monkeypatch.setattr("actors.engine.actor_tree.Tokenizer", Told)
    async with engine(tiny_model, enable_tokenizer_batch_encode=together) as e:
        await asyncio.gather(*(e.tokenize(f"{number} fox " * 300) for number in range(20)))
        assert (made[0].trips < 20) is together


async def test_what_does_nothing_on_the_device_that_was_found_is_warned_of(
    tiny_model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.workers.placement.find_spec", lambda name: None)
    monkeypatch.delenv("TROUPE_NPU_SIMULATOR", raising=False)
    drafting = {"speculative_algorithm": "NGRAM", "speculative_attention_mode": "decode"}
    async with engine(tiny_model, attention_backend="ascend", cuda_graph_max_bs=8, base_gpu_id=1, **drafting) as e:
        assert (await whole(e.generate([5], GREEDY))).token_ids
    [warning] = [record for record in caplog.records if "--device auto found" in record.getMessage()]
    assert "on device cpu" in warning.getMessage()
    options = "--attention-backend, --base-gpu-id, --cuda-graph-max-bs, --speculative-attention-mode."
    assert options in warning.getMessage()


async def test_request_timeout(tiny_model: Path) -> None:
    async with engine(tiny_model, request_timeout=0.05) as e:
        with pytest.raises(RequestTimeout):
            await whole(e.generate([5], SamplingParams(max_tokens=500, ignore_eos=True)))


async def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(tiny_model: Path) -> None:
    async with engine(tiny_model, context_length=64) as e:
        for prompt in ("x" * 1_000_000, Chat(messages=[{"role": "user", "content": "x" * 1_000_000}])):
            with pytest.raises(InvalidRequest, match="1000000 characters"):
                e.generate(prompt, GREEDY)


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
async def test_a_small_cache_preempts_and_no_token_changes(tiny_model: Path, policy: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    prompts = [f"{number} foxes jump over the dog" for number in range(8)]
    async with engine(tiny_model, max_total_tokens=320, schedule_policy=policy, schedule_conservativeness=0.0) as e:
        alone = [(await whole(e.generate(prompt, params))).token_ids for prompt in prompts]
        together = await asyncio.gather(*(whole(e.generate(prompt, params)) for prompt in prompts))
        assert [result.token_ids for result in together] == alone
        assert e.describe()["scheduler"]["preemptions"] > 0


async def test_a_cache_of_8_bits_is_shared_preempted_and_reported(tiny_model: Path) -> None:
    """Requests that crowd each other out of it, and find what others left, say what they say alone."""
    prompts = [[5, 6, 7, 8] * 8 + [9 + row] * 9 for row in range(4)]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    options = {"kv_cache_dtype": "int8", "page_size": 16}
    async with engine(tiny_model, **options, disable_radix_cache=True) as e:
        alone = [(await whole(e.generate(prompt, params))).token_ids for prompt in prompts]
    async with engine(tiny_model, **options | {"max_total_tokens": 240}) as e:
        assert e.model_info is not None
        assert e.model_info.cache_dtype == "int8"
        crowded = await asyncio.gather(*(whole(e.generate(prompt, params)) for prompt in prompts))
        again = await whole(e.generate(prompts[0], params))
        assert again.usage.cached_tokens >= 32
        assert e.describe()["scheduler"]["preemptions"] > 0
    for one, other in zip(alone, [*crowded], strict=True):
        same = sum(mine == theirs for mine, theirs in zip(one, other.token_ids, strict=True))
        assert same >= 45  # sums of other batches may round a number the other way


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"tensor_parallel_size": 3}, "num_attention_heads 4 of Qwen3ForCausalLM cannot be divided"),
        (
            {"tensor_parallel_size": 6, "data_parallel_size": 2, "enable_dp_attention": True},
            "size 3; this",
        ),
        ({"pipeline_parallel_size": 9}, "cannot have --pipeline-parallel-size 9"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_without_workers(
    tiny_model: Path, sizes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ArgumentError, match=says):
        read_model(Arguments(model_path=str(tiny_model), **sizes))


def test_heads_of_models_of_other_code_are_left_to_the_workers(tiny_model: Path) -> None:
    by_transformers = Arguments(model_path=str(tiny_model), tensor_parallel_size=3, model_impl="transformers")
    assert read_model(by_transformers).served.vocab_size > 0
    other = {"architectures": ["GraniteMoeSharedForCausalLM"]}  # whose plan leaves attention whole
    without_family = Arguments(model_path=str(tiny_model), tensor_parallel_size=3, json_model_override_args=other)
    assert read_model(without_family).served.vocab_size > 0
