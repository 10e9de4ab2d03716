"""What a first run on a device tries (tests/bench/npu_check.py) names what is refused or computed otherwise."""

from __future__ import annotations

import pytest
import torch

from app.understudy import MODEL_DIR
from kernels.npu.simulator.dispatch import Operator
from kernels.step import RunnerConfig
from tests.bench.npu_check import Row, _compare, _numbers, _operators

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
    rows = _operators([PLAIN])
    wrong = {name: row.wrong for name, row in rows.items() if row.wrong}
    assert set(wrong) == {"npu_rms_norm", "npu_swiglu"}
    assert wrong["npu_rms_norm"] == "refused: call aclnnRmsNorm failed, error code is 161002"
    assert "is off by" in wrong["npu_swiglu"]
    assert {"npu_fused_infer_attention_score", "npu_scatter_pa_kv_cache", "npu_add_rms_norm"} <= set(rows)


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
