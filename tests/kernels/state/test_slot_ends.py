"""When the sequences of all slots have ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from kernels.contract.step import Admission, SlotSampling
from kernels.state.slots import SlotTable
from tests.kits.driver import pack


def test_slots_may_be_over_only_where_each_is_at_a_stop_or_its_end() -> None:
    memory = SimpleNamespace(zeros_by_slot=lambda *shape: torch.zeros(shape, dtype=torch.int32))
    device = cast(Any, SimpleNamespace(memory=memory))
    table = SlotTable(device, max_slots=4, context=32, page_size=16, num_pages=8, vocab_size=99)
    for slot, target in ((1, 0), (2, 4)):
        table.admit(
            Admission(slot, 1, pack([7, 8]), 2, 0, pack([slot]), SlotSampling(), target=target, stop_ids=(5, 6))
        )
    slots = np.array([1, 2])
    assert table.here is not None
    for tokens, over in (((6, 9), False), ((9, 9), False), ((5, 9), True)):  # slot 2 ends with its fourth token
        table.here[slots, table.known[slots]] = tokens
        table.known[slots] += 1
        assert table.may_be_over(slots) is over
    assert not table.left(slots).any()
