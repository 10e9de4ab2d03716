"""What a first run on a device tries (tests/bench/npu_check.py) names what is refused or computed otherwise."""

from __future__ import annotations

import msgspec
import pytest
import torch

from app.understudy import MODEL_DIR
from kernels.contract.config import RunnerConfig
from kernels.contract.step import SlotSampling
from kernels.devices.npu_simulator.dispatch import Operator
from kernels.execution.runner import ModelRunner
from tests.bench import npu_check
from tests.bench.npu_check import LIKELY, PROMPTS, Row, _compare, _generate, _less_likely, _numbers, _operators, _tokens

PLAIN = RunnerConfig(str(MODEL_DIR), device="npu", page_size=128, max_slots=3, max_step_tokens=64, max_total_tokens=512)


def test_numbers_are_as_on_the_cpu():
    assert all(fine for _, _, fine in _numbers(torch.device("npu", 0)))


def test_what_a_device_refuses_or_computes_otherwise_is_named(monkeypatch):
    call = Operator.__call__

    def other(self, *args, **kwargs):
        if self.name.startswith("npu.npu_rms_norm."):
            raise RuntimeError("call aclnnRmsNorm failed, error code is 161002")
        found = call(self, *args, **kwargs)
        return found * 1.1 if self.name.startswith("npu.npu_swiglu.") else found

    monkeypatch.setattr(Operator, "__call__", other)
    rows = _operators({"plain": PLAIN})
    wrong = {name: row.wrong for name, row in rows.items() if row.wrong}
    assert set(wrong) == {"npu_rms_norm", "npu_swiglu"}
    assert wrong["npu_rms_norm"] == "refused: call aclnnRmsNorm failed, error code is 161002"
    assert "is off by" in wrong["npu_swiglu"]
    assert {"npu_fused_infer_attention_score", "npu_scatter_pa_kv_cache", "npu_add_rms_norm"} <= set(rows)


def test_a_model_that_fails_is_named_beside_what_it_called(monkeypatch):
    call = Operator.__call__

    def other(self, *args, **kwargs):
        found = call(self, *args, **kwargs)
        return found * torch.nan if self.name.startswith("npu.npu_swiglu.") else found

    monkeypatch.setattr(Operator, "__call__", other)
    nowhere = msgspec.structs.replace(PLAIN, model_path="nowhere")
    rows = _operators({"nowhere": nowhere, "plain": PLAIN})
    assert {name for name, row in rows.items() if row.wrong} >= {"model: nowhere", "npu_swiglu", "model: plain"}
    assert rows["npu_swiglu"].wrong.startswith("is off by inf")
    assert "not finite" in rows["model: plain"].wrong


def test_operators_are_held_against_the_reference_in_each_step(monkeypatch):
    """And not in the load's warm-up alone, whose cache has nothing in it."""
    call, run, steps = Operator.__call__, ModelRunner.run, []

    def other(self, *args, **kwargs):
        found = call(self, *args, **kwargs)
        return found * 1.1 if len(steps) == 3 and self.name.startswith("npu.npu_swiglu.") else found

    monkeypatch.setattr(Operator, "__call__", other)
    monkeypatch.setattr(ModelRunner, "run", lambda self, batch: steps.append(batch) or run(self, batch))
    assert "is off by" in _operators({"plain": PLAIN})["npu_swiglu"].wrong


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ([1.0, 2.0, -torch.inf], ""),
        ([1.0, 2.0, -3.0], "cuts other numbers off"),
        ([1.0, -torch.inf, -torch.inf], "off by"),
        ([1.0, 2.5, -torch.inf], "off by"),
        ([1.0, torch.nan, -torch.inf], "off by"),
    ],
)
def test_floats_are_compared_where_there_are_some(found, says):
    row = Row()
    _compare(row, torch.tensor([*found, 7.0]), torch.tensor([1.0, 2.0, -torch.inf, torch.nan]))
    assert says in row.wrong
    assert bool(row.wrong) == bool(says)


def test_rounding_to_eight_bits_may_fall_on_the_other_side():
    for dtype, found, wrong in ((torch.int8, 126, 125), (torch.float8_e4m3fn, 416, 384)):
        for number, says in ((found, ""), (wrong, "off by" if dtype.is_floating_point else "whole numbers")):
            row = Row()
            most = 448 if dtype.is_floating_point else 127
            _compare(row, torch.tensor([number, 1]).to(dtype), torch.tensor([most, 1]).to(dtype))
            assert says in row.wrong
            assert bool(row.wrong) == bool(says)


def test_answers_that_the_cpu_would_not_give_are_reported():
    on_cpu = msgspec.structs.replace(PLAIN, device="cpu", dtype="float32")
    generated, _ = _generate(on_cpu, 6, SlotSampling(temperature=0.0))
    prompts = _tokens()
    assert [len(row) for row in generated] == [len(prompt) + 6 for prompt in prompts]
    assert _less_likely(PLAIN, generated) < 1e-3
    for wrong in range(len(PROMPTS)):
        swapped = [list(row) for row in generated]
        swapped[wrong][-6:] = prompts[wrong][:6]
        assert _less_likely(PLAIN, swapped) > LIKELY


def test_steps_of_each_kind_are_held_against_the_cpu(monkeypatch):
    monkeypatch.setattr(npu_check, "LENGTH", 5)
    run, kinds = ModelRunner.run, {}

    def reported(self, batch):
        config = self._config
        kind = config.device, bool(config.disable_graphs), config.kv_cache_dtype
        kinds.setdefault(kind, set()).add(bool(batch.draft_limits))
        return run(self, batch)

    monkeypatch.setattr(ModelRunner, "run", reported)
    rows = {name: (found.partition("graphs of ")[2], fine) for name, found, fine in npu_check._steps(PLAIN)}
    assert rows.pop("steps without graphs") == ("no rows", True)
    assert rows == dict.fromkeys(
        ("steps in graphs", "draft tokens in trees", "cache of int8", npu_check._OWN), ("(1, 2) rows", True)
    )
    assert kinds == {
        ("npu", True, ""): {False},
        ("npu", False, ""): {False, True},
        ("npu", False, "int8"): {False},
        ("cpu", False, ""): {False},
    }


def test_kinds_of_steps_that_fail_are_named_and_the_others_go_on(monkeypatch):
    def generated(config, steps, sampling):
        if config.kv_cache_dtype:
            raise RuntimeError("\nno such cache\n")
        return [[config.disable_graphs]], (1,) if config.speculation is None else ()

    monkeypatch.setattr(npu_check, "_generate", generated)
    monkeypatch.setattr(npu_check, "_less_likely", lambda config, generated: 0.0)
    found = {name: (words, fine) for name, words, fine in npu_check._steps(PLAIN)}
    assert {name for name, (_, fine) in found.items() if fine} == {"steps in graphs", npu_check._OWN}
    assert found["steps without graphs"][0].endswith("graphs of (1,) rows")
    assert found["draft tokens in trees"][0].endswith("graphs of no rows")
    assert found["cache of int8"][0] == "refused: no such cache"
    monkeypatch.setattr(npu_check, "_less_likely", lambda config, generated: LIKELY)
    assert not any(fine for _, _, fine in npu_check._steps(PLAIN))


def test_tokens_drawn_in_graphs_are_held_against_those_without(monkeypatch):
    def generated(config, steps, sampling):
        drawn = [sampling.top_k, sampling.top_p]
        if sampling.top_k:
            raise RuntimeError("\nno such operator\n")
        return [drawn if config.disable_graphs or sampling.top_p == 1 else drawn[::-1]], (1,)

    monkeypatch.setattr(npu_check, "_generate", generated)
    found = [(words.partition(",")[0], fine) for _, words, fine in npu_check._drawn(PLAIN)]
    assert found == [
        ("the same as without graphs", True),
        ("others than without graphs", False),
        ("refused: no such operator", False),
    ]
