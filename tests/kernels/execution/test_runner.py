"""The runner keeps to the step protocol, and one request's fault is its own."""

from __future__ import annotations

import math
import random
import subprocess
import sys

import msgspec
import numpy as np
import pytest
import torch

from kernels.contract.step import Admission, SlotSampling, StepBatch

GREEDY = SlotSampling(temperature=0.0)


def pack(*values: int) -> bytes:
    return np.array(values, dtype=np.int32).tobytes()


def ints(data: bytes) -> list[int]:
    return np.frombuffer(data, dtype=np.int32).tolist()


@pytest.fixture
def driver(reference, drive):
    return drive(reference("qwen3").path)


def admission(slot=1, generation=1, tokens=(5, 6, 7), prompt_length=3, computed=0, pages=(1,), sampling=GREEDY):
    return Admission(slot, generation, pack(*tokens), prompt_length, computed, pack(*pages), sampling)


def step(number, rows, admitted=(), released=(), grants=()):
    slots, generations, counts = zip(*rows, strict=True) if rows else ((), (), ())
    return StepBatch(
        number,
        pack(*slots),
        pack(*generations),
        pack(*counts),
        pack(*(slot for slot, _ in grants)),
        pack(*(page for _, page in grants)),
        tuple(admitted),
        pack(*released),
    )


def test_result_follows_the_order_of_rows(driver, prompts):
    one, two, three = prompts(4, 20, 6)
    driver.admit(1, one)
    driver.step([(1, 4)])
    driver.admit(2, two)
    driver.admit(3, three)
    result = driver.step([(1, 1), (2, 10), (3, 6)])
    assert ints(result.accepted) == [1, 0, 1]
    assert len(ints(result.tokens)) == 2
    assert result.number == 2
    assert result.timing.run > 0
    assert result.timing.graph_rows == 0
    assert (result.logprobs, result.top_counts, result.prompt_rows, result.failed) == (b"", b"", b"", ())


def test_results_cross_a_process_boundary(driver, prompts):
    (prompt,) = prompts(9)
    driver.admit(1, prompt, sampling=SlotSampling(temperature=0.0, logprobs=2, prompt_logprobs=1))
    result = driver.step([(1, 9)])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=type(result)) == result


def test_logprobs_of_rows_that_asked(driver, prompts):
    one, two, three = prompts(4, 5, 6)
    driver.admit(1, one, sampling=SlotSampling(temperature=0.0, logprobs=3))
    driver.admit(2, two)
    driver.admit(3, three, sampling=SlotSampling(temperature=0.0, logprobs=0))
    result = driver.step([(1, 4), (2, 5), (3, 6)])
    tokens = ints(result.tokens)
    assert ints(result.top_counts) == [3, 0, 0]
    assert ints(result.top_ids)[0] == tokens[0]
    logprobs = np.frombuffer(result.logprobs, dtype=np.float32)
    assert logprobs[0] == np.frombuffer(result.top_logprobs, dtype=np.float32)[0]
    assert math.isnan(logprobs[1])
    assert logprobs[2] < 0


def test_prompt_logprobs_come_with_their_chunks(driver, prompts):
    one, two = prompts(30, 8)
    driver.admit(1, one, sampling=SlotSampling(temperature=0.0, prompt_logprobs=2))
    driver.admit(2, two)
    result = driver.step([(2, 8), (1, 12)])
    assert (ints(result.prompt_rows), ints(result.prompt_counts)) == ([1], [12])
    assert ints(result.prompt_top_counts) == [2] * 12
    result = driver.step([(2, 1), (1, 18)])
    assert (ints(result.prompt_rows), ints(result.prompt_counts)) == ([1], [17])
    assert len(ints(result.prompt_top_ids)) == 34
    assert driver.step([(1, 1), (2, 1)]).prompt_rows == b""


def test_output_of_an_earlier_incarnation_is_not_scored_as_prompt(driver, prompts):
    (prompt,) = prompts(10)
    driver.admit(1, prompt, output=[3, 4, 5], sampling=SlotSampling(temperature=0.0, prompt_logprobs=0))
    assert ints(driver.step([(1, 13)]).prompt_counts) == [9]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"slot": 17}, "max_slots"),
        ({"slot": 0}, "max_slots"),
        ({"tokens": (5, 6, 211)}, "another tokenizer"),
        ({"tokens": (5, -1, 2)}, "another tokenizer"),
        ({"tokens": (), "prompt_length": 0}, "--context-length"),
        ({"tokens": (1,) * 300, "prompt_length": 300}, "--context-length"),
        ({"prompt_length": 4}, "prompt length"),
        ({"computed": 3}, "at least one"),
        ({"tokens": (1,) * 40, "prompt_length": 40, "computed": 32}, "do not fit"),
        ({"pages": (0,)}, "page ids"),
        ({"pages": (257,)}, "page ids"),
        ({"pages": (1,) * 99}, "pages are more"),
    ],
)
def test_a_bad_admission_fails_alone(wrong, says, driver):
    bad = admission(**({"slot": 2, "generation": 9, "pages": (2,)} | wrong))
    rows = [(1, 1, 3), (bad.slot, 9, 3)]
    result = driver.runner.run(step(1, rows, admitted=(bad, admission())))
    assert ints(result.accepted) == [1, 0]
    (error,) = result.failed
    assert (error.slot, error.generation) == (bad.slot, 9)
    assert says in error.message
    result = driver.runner.run(step(2, [(1, 1, 1)]))  # and the other goes on
    assert ints(result.accepted) == [1]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ((99, 1, 1), "not one of"),
        ((1, 1, 4), "3 known"),
        ((1, 1, 0), "cannot run 0"),
        ((1, 2, 3), "generation"),
        ((3, 0, 1), "no request"),
        ((4, 1, 17), "more pages"),
        ((2, 1, 3), "two rows"),
    ],
)
def test_a_bad_row_fails_alone(row, says, driver):
    long = admission(slot=4, tokens=range(20), prompt_length=20, pages=(4,))
    batch = step(1, [(2, 1, 3), row], admitted=(admission(), admission(slot=2, pages=(2,)), long))
    result = driver.runner.run(batch)
    assert ints(result.accepted) == [1, 0]
    (error,) = result.failed
    assert (error.slot, error.generation) == row[:2]
    assert says in error.message


def test_sampling_that_cannot_be_set_up_fails_alone(driver, monkeypatch):
    set_up = driver.runner._context.slot_updates._sampler.admit

    def admit(slot, *rest):
        if slot == 2:
            raise ValueError("no such thing")
        set_up(slot, *rest)

    monkeypatch.setattr(driver.runner._context.slot_updates._sampler, "admit", admit)
    both = (admission(), admission(slot=2, pages=(2,)))
    result = driver.runner.run(step(1, [(1, 1, 3), (2, 1, 3)], admitted=both))
    assert ints(result.accepted) == [1, 0]
    assert [error.message for error in result.failed] == ["no such thing"]


def test_a_bad_grant_fails_alone(driver):
    both = (admission(), admission(slot=2, pages=(2,)))
    result = driver.runner.run(step(1, [(1, 1, 3), (2, 1, 3)], admitted=both, grants=[(2, 0), (9, 3), (77, 3)]))
    assert ints(result.accepted) == [1, 0]
    assert [(error.slot, error.generation) for error in result.failed] == [(2, 1)]


def test_a_step_of_failures_only_is_answered(driver):
    result = driver.runner.run(step(1, [(1, 1, 1)]))
    assert ints(result.accepted) == [0]
    assert len(result.failed) == 1
    assert driver.runner.run(step(2, [])).failed == ()


def test_a_malformed_step_is_refused(driver):
    with pytest.raises(ValueError, match="one entry"):
        driver.runner.run(StepBatch(1, pack(1), pack(1, 2), pack(1)))
    with pytest.raises(ValueError, match="one length"):
        driver.runner.run(StepBatch(1, b"", b"", b"", page_slots=pack(1)))
    with pytest.raises(ValueError, match="max_step_tokens"):
        driver.runner.run(StepBatch(1, pack(1), pack(1), pack(4000)))


def test_a_late_row_of_a_released_request_is_refused(driver, prompts):
    one, two = prompts(5, 6)
    driver.admit(1, one)
    driver.step([(1, 5)])
    driver.release(1)
    driver.admit(1, two)
    driver.step([(1, 6)])
    result = driver.runner.run(step(9, [(1, 1, 1)]))  # generation 1 is gone
    assert "generation" in result.failed[0].message
    assert driver.generate(1, 12)


def test_a_sequence_ends_at_its_context(reference, drive, prompts):
    driver = drive(reference("qwen3").path, context_length=32)
    assert driver.info.context_length == 32
    assert driver.info.hidden_size == 48
    (prompt,) = prompts(31)
    driver.admit(1, prompt)
    driver.step([(1, 31)])
    for _ in range(2):  # steps sent before the end was known
        assert not driver.step([(1, 1)]).failed
    assert "no room" in driver.step([(1, 1)]).failed[0].message


def test_non_finite_logits_fail_their_request_and_leave_pages_clean(reference, drive, prompts):
    model = reference("qwen3")
    driver = drive(model.path)
    one, two, three = prompts(20, 21, 5)
    driver.admit(1, one)
    driver.admit(2, two)
    driver.step([(1, 20), (2, 21)])
    pages = driver.pages[1][1:]  # that the next step writes to
    with torch.inference_mode():
        for cache in driver.runner._loaded.caches:
            cache[pages] = math.nan
    result = driver.step([(2, 1), (1, 1)])
    assert [error.slot for error in result.failed] == [1]
    assert "finite" in result.failed[0].message
    assert driver.tokens[2] == model.greedy(two, 23)
    driver.release(1)
    driver.free = [page for page in driver.free if page not in pages] + pages[::-1]
    driver.admit(1, three)
    driver.step([(1, 5), (2, 1)])
    for _ in range(3):  # padded to the longer row's pages, the shorter one is gathered with what its page held before
        driver.step([(1, 1), (2, 1)])
    assert driver.tokens[1] == model.greedy(three, 9)
    assert driver.pages[1][0] in pages


def test_a_failed_request_leaves_the_prefix_that_it_shares(driver, prompts):
    (prompt,) = prompts(40)
    driver.admit(1, prompt)
    driver.step([(1, 40)])
    shared = driver.pages[1][:2]
    driver.admit(2, prompt, shared=shared)
    driver.step([(2, 8)])
    cache = driver.runner._loaded.caches[0]
    before = cache[shared].clone()
    with torch.inference_mode():
        cache[driver.pages[2][2]] = math.nan
    assert [error.slot for error in driver.step([(1, 1), (2, 1)]).failed] == [2]
    assert torch.equal(cache[shared], before)
    assert not cache[driver.pages[2][2]].any()


def test_a_failed_request_leaves_what_it_has_filled_before_to_others(driver, prompts):
    (prompt,) = prompts(40)
    driver.admit(1, prompt)
    driver.step([(1, 40)])
    cache = driver.runner._loaded.caches[0]
    full, last = driver.pages[1][:2], driver.pages[1][2]
    before = cache[full].clone()
    with torch.inference_mode():
        cache[last] = math.nan
    assert [error.slot for error in driver.step([(1, 1)]).failed] == [1]
    assert torch.equal(cache[full], before)  # by now the prefix cache may have given them to others
    assert not cache[last].any()


def test_a_chunk_that_is_not_finite_fails_before_its_pages_are_shared(driver, prompts):
    one, two = prompts(40, 30)
    driver.admit(1, one)
    driver.admit(2, two)
    driver.step([(1, 16)])
    with torch.inference_mode():
        driver.runner._loaded.caches[0][driver.pages[1]] = math.nan
    result = driver.step([(1, 16), (2, 8)])
    assert [(error.slot, error.generation) for error in result.failed] == [(1, driver.generation[1])]
    assert "finite" in result.failed[0].message
    assert not ints(result.accepted)[0]
    assert not any(cache[driver.pages[1][1]].any() for cache in driver.runner._loaded.caches)
    assert driver.step([(2, driver.pending(2))]).failed == ()


def test_steps_repeat(reference, drive, prompts):
    """The same steps give the same tokens, sampled ones too; the batch around a request does not change them."""
    model = reference("qwen3")

    def sample(beside: int) -> list[int]:
        driver = drive(model.path)
        one, *others = prompts(18, *(7,) * beside, seed=4)
        driver.admit(1, one, sampling=SlotSampling(temperature=0.8, seed=77))
        for slot, other in enumerate(others, start=2):
            driver.admit(slot, other, sampling=SlotSampling(seed=slot))
        for _ in range(12):
            driver.step([(slot, driver.pending(slot)) for slot in driver.tokens])
        return driver.tokens[1]

    alone = sample(0)
    assert sample(0) == alone
    assert sample(5) == alone


def test_close_drops_the_model(driver):
    driver.runner.close()
    assert not {"_model", "_caches"} & set(vars(driver.runner))


def test_dummy_weights_come_from_the_seed(reference, drive, prompts, tmp_path):
    (tmp_path / "config.json").write_bytes((reference("qwen3").path / "config.json").read_bytes())

    def logprobs(seed: int) -> bytes:
        driver = drive(tmp_path, load_format="dummy", random_seed=seed)
        driver.admit(1, prompts(10)[0], sampling=SlotSampling(temperature=0.0, logprobs=20))
        return driver.step([(1, 10)]).top_logprobs

    assert logprobs(1) == logprobs(1)
    assert logprobs(1) != logprobs(2)


def test_load_reports_progress(reference):
    from kernels.contract.config import RunnerConfig
    from kernels.execution.runner import ModelRunner

    seen = []
    config = RunnerConfig(str(reference("qwen3").path), max_total_tokens=512, threads=1)
    info = ModelRunner(config, lambda *news: seen.append(news)).load()
    assert [stage for stage, _ in seen] == sorted((s for s, _ in seen), key=["weights", "cache", "warmup"].index)
    assert [fraction for _, fraction in seen] == sorted(fraction for _, fraction in seen)
    assert seen[-1] == ("warmup", 1.0)
    assert info.parameters == reference("qwen3").model.num_parameters()
    assert (info.num_pages, info.page_size, info.dtype) == (33, 16, "float32")
    assert set(info.load_seconds) == {"weights", "cache", "warmup"}


def test_the_runner_imports_torch_alone():
    """A worker starts fast: no transformers, no compiler."""
    code = "import sys, kernels.execution.runner; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "torch" in loaded
    assert not {"transformers", "torch._dynamo", "torch._inductor", "huggingface_hub", "tokenizers"} & set(loaded)


def test_transformers_works_beside_a_package_named_kernels():
    code = (
        "from kernels.contract.environment import hide_broken_npu\nhide_broken_npu()\n"
        "import kernels, transformers, transformers.models.qwen3.modeling_qwen3 as qwen3\n"
        "config = transformers.Qwen3Config(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,\n"
        "    num_attention_heads=1, num_key_value_heads=1, head_dim=8)\n"
        "import torch; print(qwen3.Qwen3ForCausalLM(config)(torch.tensor([[1, 2]])).logits.shape, kernels.__file__)\n"
        "assert not hasattr(kernels, '__version__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "torch.Size([1, 2, 8])" in done.stdout


def test_random_chunks_of_many_requests_leave_every_state_consistent(driver, prompts):
    generator = random.Random(5)
    texts = prompts(*(generator.randint(1, 60) for _ in range(40)), seed=2)
    for _ in range(120):
        for slot in range(1, 17):
            if slot not in driver.tokens and texts:
                driver.admit(slot, texts.pop())
        if not driver.tokens:
            break
        rows = [
            (slot, generator.randint(1, driver.pending(slot))) for slot in driver.tokens if generator.random() < 0.8
        ]
        assert not driver.step(rows).failed
        for slot in list(driver.tokens):
            state = driver.runner._loaded.slots
            assert state.known[slot] == len(driver.tokens[slot]) or slot in {a.slot for a in driver._admitted}
            assert state.computed[slot] == driver.computed[slot]
            assert state.tokens[slot, : state.known[slot]].tolist() == driver.tokens[slot]
            if len(driver.tokens[slot]) > 70:
                driver.release(slot)
    assert not texts
