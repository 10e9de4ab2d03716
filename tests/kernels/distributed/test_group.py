"""How a rank finds its group, and leaves it."""

from __future__ import annotations

import weakref
from typing import Any

import msgspec
import pytest
import torch.distributed as dist

from kernels.contract.config import RunnerConfig
from kernels.devices.cpu.device import CpuDevice
from kernels.distributed import group
from kernels.distributed.group import Group, GroupError, ProcessGroup, join_group
from kernels.execution.runner import ModelRunner
from tests.kernels.distributed.ranks import run_ranks


@pytest.mark.parametrize(
    ("backend", "way"), [("nccl", "_abort_process_group"), ("gloo", "destroy_process_group"), ("hccl", "destroy")]
)
def test_a_rank_of_nccl_leaves_without_its_peers(monkeypatch, backend, way):
    """Its destruction waits for them, and they stop only when this rank has."""
    called = []
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **options: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: called.append("destroy_process_group"))
    monkeypatch.setattr(
        dist.distributed_c10d, "_abort_process_group", lambda: called.append("_abort_process_group"), raising=True
    )
    ProcessGroup(backend, dist.HashStore(), 1, 2, 60.0).close()
    assert len(called) == 1
    assert called[0].startswith(way)


def test_what_ranks_captured_is_gone_before_they_leave(tiny_model):
    """NCCL leaves when no graph holds its collectives any more, and graphs may be in a cycle."""

    class Two(Group):
        size = 2

        def close(self):
            left.append(graph())

    class Captured:
        def __init__(self):
            self.itself = self

    left: list[Captured | None] = []
    runner = ModelRunner(RunnerConfig(model_path=str(tiny_model), threads=1))
    captured: Any = Captured()
    runner._executors, runner._group, graph = (captured,), Two(), weakref.ref(captured)
    del captured
    runner.close()
    assert left == [None]


@pytest.mark.parametrize("comes", [True, False])
def test_a_group_is_made_when_all_ranks_are_here(monkeypatch, comes):
    """A rank may take longer to come than a collective may last."""
    made = []
    store = dist.HashStore()
    monkeypatch.setattr(group, "_open_store", lambda *reported: store)
    monkeypatch.setattr(group, "JOIN_SECONDS", 0.01)
    monkeypatch.setattr(dist, "init_process_group", lambda *reported, timeout, **options: made.append(timeout.seconds))
    config = RunnerConfig(model_path="", tp_rank=0, tp_size=2, rendezvous="127.0.0.1:1", op_timeout=2.0)
    if comes:
        store.set("here/1", "")
        assert join_group(CpuDevice(threads=1), config).size == 2
    else:
        with pytest.raises(GroupError, match=r"rank 0 of 2: rank 1 did not come within 0.01 s"):
            join_group(CpuDevice(threads=1), config)
    assert made == ([2] if comes else [])


def test_a_rank_waits_as_long_as_it_is_told(monkeypatch):
    made = []
    store = dist.HashStore()
    monkeypatch.setattr(group, "_open_store", lambda *reported: store)
    monkeypatch.setattr(dist, "init_process_group", lambda *reported, timeout, **options: made.append(timeout.seconds))
    config = RunnerConfig(model_path="", tp_rank=0, tp_size=2, rendezvous="127.0.0.1:1/0", join_timeout=1.0)
    with pytest.raises(GroupError, match="did not come within 1 s"):
        join_group(CpuDevice(threads=1), config)
    store.set("here/1", "")
    for op_timeout in (0.0, 2.0):
        join_group(CpuDevice(threads=1), msgspec.structs.replace(config, join_timeout=3.0, op_timeout=op_timeout))
    assert made == [3, 2]


def test_ranks_of_different_epochs_do_not_meet_at_one_port(monkeypatch):
    port = dist.HashStore()
    monkeypatch.setattr(group, "_open_port", lambda *address: port)
    first, second, same = (group._open_store(f"127.0.0.1:1/{epoch}", 0, 2, 1.0) for epoch in (0, 1, 1))
    first.set("here/0", "")
    assert not second.check(["here/0"])
    same.set("here/0", "")
    assert second.check(["here/0"])


def test_groups_of_some_ranks_have_their_own_collectives():
    """Of four ranks: pairs of neighbours, and pairs across; and what each pair agrees on."""
    answers = run_ranks([{"collectives": True}], 4)
    assert [answer[0]["near"] for answer in answers] == [[1, 1, 2, 2], [1, 1, 2, 2], [3, 3, 4, 4], [3, 3, 4, 4]]
    assert [answer[0]["far"] for answer in answers] == [[4.0, 40.0], [6.0, 60.0]] * 2
    assert [answer[0]["scattered"] for answer in answers] == [
        [10.0, 10.0],
        [10.0, 10.0],
        [100.0, 100.0],
        [100.0, 100.0],
    ]
    assert [answer[0]["columns"] for answer in answers] == [[1, 2], [1, 2], [3, 4], [3, 4]]
    assert [answer[0]["least"] for answer in answers] == [1, 1, 3, 3]
    assert [answer[0]["numbers"] for answer in answers] == [[0, 2, 0], [1, 2, 0], [0, 2, 1], [1, 2, 1]]


@pytest.mark.parametrize("ranks", [[1], [0, 0], [1, 0], [0, 2], []])
def test_members_of_a_group_are_ascending_ranks_with_this_one(ranks):
    assert Group().subgroup([0]).size == 1
    with pytest.raises(ValueError, match="give ascending ranks of 0 to 0, 0 among them"):
        Group().subgroup(ranks)


def test_a_store_whose_folder_is_gone_is_an_error_that_names_it(tmp_path):
    config = RunnerConfig(model_path="", tp_rank=1, tp_size=2, rendezvous=str(tmp_path / "gone" / "store"))
    with pytest.raises(GroupError, match=r"rank 1 of 2 cannot open .*/gone/store: its folder was deleted"):
        join_group(CpuDevice(threads=1), config)
