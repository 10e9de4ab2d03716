"""How a rank leaves its group."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from kernels.parallel.group import ProcessGroup


@pytest.mark.parametrize(
    ("backend", "way"), [("nccl", "_abort_process_group"), ("gloo", "destroy_process_group"), ("hccl", "destroy")]
)
def test_a_rank_of_nccl_leaves_without_its_peers(monkeypatch, backend, way):
    """Its destruction waits for them, and they are told to stop only when this rank has."""
    called = []
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **options: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: called.append("destroy_process_group"))
    monkeypatch.setattr(
        dist.distributed_c10d, "_abort_process_group", lambda: called.append("_abort_process_group"), raising=True
    )
    ProcessGroup(backend, dist.HashStore(), 1, 2, 60.0).close()
    assert len(called) == 1
    assert called[0].startswith(way)
