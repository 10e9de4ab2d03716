"""Copies that the host does not wait for: pinned buffers in a ring, results behind an event, steps in a row."""

from __future__ import annotations

import threading

import msgspec
import numpy as np
import pytest
import torch

from kernels.contract.step import SlotSampling, StepBatch
from kernels.devices.staging import Staging, fetch
from tests.kits.driver import ints, pack

NPU = torch.device("npu:0")
OPTIONS = {"device": "npu", "page_size": 128, "max_step_tokens": 256, "max_total_tokens": 16 * 128}


def test_arrays_arrive_whole_however_they_fit(simulator):
    staging = Staging(NPU, buffers=2, size=256)
    sent = []
    for size in (3, 0, 40, 200, 1, 64):
        for dtype in (np.int32, np.int64, np.bool_, np.float32):
            array = np.arange(size).astype(dtype).reshape(-1, 1)
            sent.append((array.copy(), staging.put(array)))
            array[:] = 0  # the caller may
    for array, tensor in sent:
        assert tensor.device == NPU
        np.testing.assert_array_equal(tensor.cpu().numpy(), array)


def test_a_buffer_is_not_filled_again_before_its_event(simulator, monkeypatch):
    staging = Staging(NPU, buffers=2, size=256)
    monkeypatch.setattr(torch.npu.Event, "synchronize", lambda self: None)
    arrays = [np.full(50, number, dtype=np.int32) for number in range(8)]
    with pytest.raises(RuntimeError, match="used again before the host had waited"):
        _ = [staging.put(array) for array in arrays]
    monkeypatch.undo()
    simulator.engine.order.host_waited()


def test_nothing_is_computed_in_float64(simulator):
    assert Staging(NPU).put(np.array([0.5, 0.25])).dtype == torch.float32


def test_results_come_in_any_thread(simulator):
    tensors = [torch.arange(5, device=NPU), torch.ones(2, 2, dtype=torch.bool, device=NPU)]
    wait, found = fetch(tensors), []
    tensors[0].zero_()

    def take():
        torch.npu.set_device(NPU)
        found.extend(wait())

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    assert found[0].tolist() == [0, 1, 2, 3, 4]
    assert found[1].all()


def decode(driver, slots, number):
    return StepBatch(
        number=number,
        slots=pack(slots),
        generations=pack(driver.generation[slot] for slot in slots),
        counts=pack(1 for _ in slots),
    )


SAMPLED = SlotSampling(temperature=0.9, top_k=8, top_p=0.9, seed=3, repetition_penalty=1.2, logprobs=2)
EDITED = SlotSampling(
    temperature=0.7, min_p=0.05, ban_ids=(3, 4), bias_ids=(7,), bias_values=(1.5,), bad_words=((1, 2),)
)


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_a_decode_is_prepared_without_waiting(graphs, reference, drive, prompts, simulator):
    """Several steps are under way before the first is waited for, and say what they say one by one."""
    texts, answers = prompts(30, 50, 7, seed=6), []
    for steps_at_once in (1, 4):
        driver = drive(reference("qwen3").path, dtype="bfloat16", disable_graphs=not graphs, **OPTIONS)
        slots = (1, 2, 3)
        for slot, (text, sampling) in enumerate(
            zip(texts, (SAMPLED, EDITED, SlotSampling(temperature=0.0)), strict=True), 1
        ):
            driver.admit(slot, text, sampling=sampling)
            driver.step([(slot, len(text))])
        driver.step([(slot, 1) for slot in slots])  # the sampler plans for the batch
        found, number = [], 100
        for _ in range(8 // steps_at_once):
            waits, running = simulator.waits, []
            for _ in range(steps_at_once):
                number += 1
                running.append(driver.runner.start(decode(driver, slots, number)))
            assert simulator.waits == waits
            assert not running[0].done
            for step in running:
                result = step.result()
                assert not result.failed
                found.append((ints(result.tokens), result.logprobs))
        answers.append(found)
    assert answers[0] == answers[1]


def test_a_request_that_broke_is_dropped_by_the_step_after(reference, drive, prompts):
    driver = drive(reference("qwen3").path, **OPTIONS)
    for slot, text in enumerate(prompts(20, 20, seed=2), 1):
        driver.admit(slot, text)
        driver.step([(slot, len(text))])
    (page,) = driver.pages[2]
    with torch.inference_mode():
        for cache in driver.runner._loaded.caches:
            cache.keys[page].fill_(torch.nan)
    running = [driver.runner.start(decode(driver, (1, 2), number)) for number in (50, 51)]
    for step in running:  # the second was under way when the first was known to have failed
        result = step.result()
        assert [error.slot for error in result.failed] == [2]
        assert len(ints(result.tokens)) == 1
    result = driver.runner.run(decode(driver, (1, 2), 52))
    assert "holds no request" in result.failed[0].message
    assert not driver.runner._loaded.caches[0].keys[page].isnan().any()


def test_pages_that_are_handed_on_while_a_step_writes_to_them_are_clean(reference, drive, prompts):
    """A request breaks in one step and ends, unknowing, before the next one, which has its pages for another."""
    model = reference("qwen3")
    driver = drive(model.path, attention_backend="torch_native", **OPTIONS)
    one, two, three = prompts(20, 60, 5, seed=4)
    for slot, text in enumerate((one, two), 1):
        driver.admit(slot, text)
        driver.step([(slot, len(text))])
    (page,) = driver.pages[1]
    with torch.inference_mode():
        for cache in driver.runner._loaded.caches:
            cache.keys[page].fill_(torch.nan)
            cache.values[page].fill_(torch.nan)
    breaking = driver.runner.start(decode(driver, (1, 2), 50))
    driver.release(1)
    assert driver.free[-1] == page
    driver.admit(3, three)
    admitted, released = driver._admitted, driver._released
    driver._admitted, driver._released = [], []
    handed = driver.runner.start(
        StepBatch(
            number=51,
            slots=pack((2, 3)),
            generations=pack(driver.generation[slot] for slot in (2, 3)),
            counts=pack((1, len(three))),
            page_slots=pack((3,)),
            page_ids=pack((driver.free.pop(),)),
            admitted=tuple(admitted),
            released=pack(released),
        )
    )
    assert [error.slot for error in breaking.result().failed] == [1]
    first = handed.result()
    assert not first.failed
    again = driver.runner.start(decode(driver, (2, 3), 52)).result()  # by now the page is the other's: it stays
    assert not again.failed
    assert [ints(result.tokens)[1] for result in (first, again)] == model.greedy(three, 7)[5:]


def test_a_rank_reads_its_results_before_a_step_that_follows_them(reference, drive, prompts):
    driver = drive(reference("qwen3").path, **OPTIONS)
    (text,) = prompts(5)
    driver.admit(1, text)
    driver.step([(1, 5)])
    driver.runner._group.size = 2
    unread = driver.runner._context.unread
    for number, unanswered, left in ((50, 0, [50]), (51, 1, [50, 51]), (52, 1, [51, 52]), (53, 0, [53])):
        batch = msgspec.structs.replace(decode(driver, (1,), number), unanswered=unanswered)
        assert not driver.runner.start(batch).done
        assert [step.number for step in unread] == left
