"""hccl groups of two processes, stood in for by gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

GROUP = """
import datetime, sys
from kernels.devices.npu_simulator.activate import activate
simulator = activate("A2")
import torch, torch.distributed as dist
rank = int(sys.argv[1])
torch.npu.set_device(rank)
store = dist.FileStore(sys.argv[2], 2)
store.set(f"here/{rank}", "")
store.wait([f"here/{1 - rank}"], datetime.timedelta(seconds=300))  # the group's own patience may be short
dist.init_process_group("hccl", store=store, rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=float(sys.argv[3])))
assert dist.get_backend() == "hccl"
"""

EVERYTHING = (
    GROUP
    + """
import os
from pathlib import Path
x = torch.full((3,), rank + 1.0, dtype=torch.bfloat16, device="npu")
dist.all_reduce(x)
assert x.cpu().tolist() == [3] * 3, x
gathered = torch.empty(6, device="npu")
dist.all_gather_into_tensor(gathered, torch.full((3,), float(rank), device="npu"))
assert gathered.cpu().tolist() == [0, 0, 0, 1, 1, 1]
part = torch.empty(3, device="npu")
dist.reduce_scatter_tensor(part, gathered)
assert part.cpu().tolist() == [2.0 * rank] * 3
dist.barrier()
y = torch.full((2,), rank, device="npu")
dist.broadcast(y, 1)
assert y.cpu().tolist() == [1, 1]
each = [torch.empty(2, dtype=torch.int64, device="npu") for _ in range(2)]
dist.all_gather(each, torch.full((2,), rank, device="npu"))
assert [t.cpu().tolist() for t in each] == [[0, 0], [1, 1]]
turned = torch.empty(4, device="npu")
dist.all_to_all_single(turned, torch.arange(4.0, device="npu") + 10 * rank)
assert turned.cpu().tolist() == ([0, 1, 10, 11] if rank == 0 else [2, 3, 12, 13])
z = torch.full((2,), 5.0 * (1 - rank), device="npu")
dist.send(z, 1) if rank == 0 else dist.recv(z, 0)
assert z.cpu().tolist() == [5, 5]
theirs = [torch.zeros(2, device="npu") for _ in range(2)]
both = [dist.P2POp(dist.isend, z + rank, 1 - rank), dist.P2POp(dist.irecv, theirs[0], 1 - rank)]
for work in dist.batch_isend_irecv(both):
    work.wait()
group = dist.distributed_c10d._get_default_group()
group.batch_isend_irecv(["isend", "irecv"], [z + rank, theirs[1]], [1 - rank, 1 - rank]).wait()
assert [t.cpu().tolist() for t in theirs] == [[6.0 - rank] * 2] * 2
w, graph = torch.ones(2, device="npu"), torch.npu.NPUGraph()
with torch.npu.graph(graph):
    dist.all_reduce(w)
    v = w + 1
assert w.cpu().tolist() == [1, 1]
graph.replay()
graph.replay()
assert v.cpu().tolist() == [5, 5]
dist.all_reduce(w, group=dist.new_group([0, 1]))
assert w.cpu().tolist() == [8, 8]
dist.barrier()
def threads():
    return [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
assert "pt_gloo_runloop" in threads()
dist.destroy_process_group()
assert "pt_gloo_runloop" not in threads()  # one that outlives Python can abort the process
print("done")
"""
)

HUNG = (
    GROUP
    + """
x = torch.ones(2, device="npu")
if rank == 0:
    simulator.faults.plan("hang", 2, operator="hccl")
dist.all_reduce(x)
print("one", flush=True)
try:
    dist.all_reduce(x)
except RuntimeError as error:
    print("507048" in str(error), "EI0002" in str(error))
try:
    x.cpu()
except RuntimeError as error:
    print("507048" in str(error), flush=True)
"""
)

HUNG_REPLAY = (
    GROUP
    + """
x, graph = torch.ones(2, device="npu"), torch.npu.NPUGraph()
dist.all_reduce(x)
with torch.npu.graph(graph):
    dist.all_reduce(x)
if rank == 0:
    import time
    print("away", flush=True)
    time.sleep(600)
try:
    graph.replay()
    x.cpu()
except RuntimeError as error:
    print("507048" in str(error), "EI0002" in str(error), simulator.cann.error(1), flush=True)
"""
)


def start(code: str, rank: int, store: Path, timeout: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, str(rank), str(store), str(timeout)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_two_ranks(tmp_path: Path) -> None:
    ranks = [start(EVERYTHING, rank, tmp_path / "store", 240) for rank in range(2)]
    outputs = [process.communicate(timeout=400)[0] for process in ranks]
    for process, output in zip(ranks, outputs, strict=True):
        assert process.returncode == 0, output
        assert output.splitlines()[-1] == "done"


def test_a_rank_that_hangs(tmp_path: Path) -> None:
    hung, other = (start(HUNG, rank, tmp_path / "store", 6) for rank in range(2))
    output = other.communicate(timeout=400)[0]
    assert [line for line in output.splitlines() if line.startswith(("one", "True"))] == ["one", "True True", "True"], (
        output
    )
    assert hung.poll() is None  # it waits until somebody ends it
    hung.kill()
    hung.communicate()


def test_a_replay_that_waits_for_a_rank(tmp_path: Path) -> None:
    """It says what a collective outside a graph says."""
    away, other = (start(HUNG_REPLAY, rank, tmp_path / "store", 6) for rank in range(2))
    output = other.communicate(timeout=400)[0]
    away.kill()
    away.communicate()
    assert "True True 507048" in output.splitlines(), output
