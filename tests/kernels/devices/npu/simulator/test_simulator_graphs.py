"""Graphs on the simulated NPU: captured calls run again, and only what an update feeds may change."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch_npu
from torch import Tensor

from kernels.devices.npu_simulator.activate import Simulator

BF16 = torch.bfloat16
PAGE = 128


@pytest.fixture(autouse=True)
def patience(simulator: Simulator) -> Iterator[None]:
    was = simulator.graphs.replays.patience
    simulator.graphs.replays.patience = 0.3
    yield
    torch.npu.set_stream(torch.npu.default_stream())  # a failed capture leaves its own
    simulator.graphs.replays.patience = was
    simulator.faults.clear()
    torch.npu.synchronize()


def captured(body: Callable[[], Any], **options: Any) -> tuple[torch.npu.NPUGraph, Any]:
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, **options):
        result = body()
    return graph, result


class Attention:
    """Two rows of one token each over pages, with the lengths as the only thing that changes."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.q = torch.randn(2, 4, 128).to(BF16).npu()
        self.k, self.v = (torch.randn(8, PAGE, 256).to(BF16).npu() for _ in range(2))
        self.table = torch.tensor([[3, 5], [1, 0]], dtype=torch.int32).npu()
        self.mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1).npu()

    def options(self, lengths: list[int]) -> dict[str, Any]:
        return {
            "atten_mask": self.mask,
            "actual_seq_lengths": [1, 2],
            "actual_seq_lengths_kv": lengths,
            "block_table": self.table,
            "num_heads": 4,
            "num_key_value_heads": 2,
            "scale": 128**-0.5,
            "input_layout": "TND",
            "sparse_mode": 3,
            "block_size": PAGE,
        }

    def run(self, lengths: list[int]) -> Tensor:
        return torch_npu.npu_fused_infer_attention_score(self.q, self.k, self.v, **self.options(lengths))[0]


def test_replay_runs_again_on_the_same_memory() -> None:
    x, total = torch.ones(4, device="npu"), torch.zeros(4, device="npu")

    def body() -> Tensor:
        y = x * 2 + 1
        total.add_(y)
        return y

    graph, y = captured(body)
    assert total.cpu().tolist() == [0] * 4  # a capture runs nothing
    graph.replay()
    assert y.cpu().tolist() == [3] * 4
    x.fill_(5)
    graph.replay()
    assert y.cpu().tolist() == [11] * 4
    assert total.cpu().tolist() == [14] * 4


def test_host_values_are_baked_in() -> None:
    x, factor = torch.ones(2, device="npu"), 3
    graph, y = captured(lambda: x * factor)
    factor = 4
    graph.replay()
    assert y.cpu().tolist() == [3, 3]


def test_views_and_writes_of_static_buffers() -> None:
    static = torch.zeros(3, 4, device="npu")
    index = torch.zeros(2, dtype=torch.int64, device="npu")

    def body() -> Tensor:
        static[:1].copy_(static[1:2])
        static.index_copy_(0, index[:1], torch.ones(1, 4, device="npu"))
        return static.view(2, 6).sum(-1)

    graph, y = captured(body)
    static.copy_(torch.arange(12.0).view(3, 4))
    index.fill_(2)
    graph.replay()
    assert static.cpu().tolist() == [[4, 5, 6, 7], [4, 5, 6, 7], [1, 1, 1, 1]]
    assert y.cpu().tolist() == [31, 17]


def test_pinned_memory_may_be_captured() -> None:
    pinned, x = torch.ones(3).pin_memory(), torch.zeros(3, device="npu")
    graph, _ = captured(lambda: x.copy_(pinned, non_blocking=True))
    pinned.fill_(7)
    graph.replay()
    assert x.cpu().tolist() == [7] * 3


@pytest.mark.parametrize("update_first", [True, False])
def test_update_feeds_the_lengths(update_first: bool) -> None:
    attention = Attention()

    def body() -> tuple[Tensor, Tensor]:
        return attention.run([1, 1]) + 0, attention.run([1, 1]) * 1

    graph, (first, second) = captured(body, auto_dispatch_capture=True)
    for lengths in ([100, 3], [200, 128]):
        fed = [{"actual_seq_lengths_kv": lengths}]
        if update_first:
            graph.update(cpu_update_input=fed)
            graph.replay()
        else:
            graph.replay()
            graph.update(cpu_update_input=fed)
        expected = attention.run(lengths).cpu()
        assert torch.equal(first.cpu(), expected)
        assert torch.equal(second.cpu(), expected)


def test_update_from_another_thread_while_the_replay_waits(simulator: Simulator) -> None:
    simulator.graphs.replays.patience = 300
    attention = Attention()
    graph, out = captured(lambda: attention.run([1, 1]), auto_dispatch_capture=True)
    graph.replay()

    def update() -> None:
        torch.npu.set_device(0)
        graph.update(cpu_update_input=[{"actual_seq_lengths_kv": [150, 9]}])

    helper = threading.Timer(0.1, update)
    helper.start()
    torch.npu.synchronize()  # until the helper has fed the lengths
    helper.join()
    assert torch.equal(out[0].cpu() if isinstance(out, list) else out.cpu(), attention.run([150, 9]).cpu())


def test_a_misspelt_update_leaves_the_old_lengths() -> None:
    """As on the device: no error, the answer of the lengths at the capture."""
    attention = Attention()
    graph, out = captured(lambda: attention.run([100, 3]) + 0, auto_dispatch_capture=True)
    graph.update(cpu_update_input=[{"actual_seq_lens_kv": [200, 128]}])
    graph.replay()
    assert torch.equal(out.cpu(), attention.run([100, 3]).cpu())
    assert not torch.equal(out.cpu(), attention.run([200, 128]).cpu())


def test_without_task_groups_lengths_are_baked_in() -> None:
    attention = Attention()
    graph, out = captured(lambda: attention.run([100, 3]) + 0)
    attention.k.mul_(2)
    graph.replay()
    assert torch.equal(out.cpu(), attention.run([100, 3]).cpu())


def test_a_forgotten_update_never_ends(simulator: Simulator) -> None:
    attention = Attention()
    graph, _ = captured(lambda: attention.run([100, 3]), auto_dispatch_capture=True)
    graph.replay()
    with pytest.raises(RuntimeError, match="507046"):
        torch.npu.synchronize()
    with pytest.raises(RuntimeError, match="update the graph before other work"):
        attention.q.add_(1)
    graph.update(cpu_update_input=[{"actual_seq_lengths_kv": [1, 1]}])
    torch.npu.synchronize()


def test_update_checks_the_new_lengths() -> None:
    attention = Attention()
    graph, _ = captured(lambda: attention.run([1, 1]), auto_dispatch_capture=True)
    with pytest.raises(RuntimeError, match="needs 2 entries"):
        graph.update(cpu_update_input=[{"actual_seq_lengths_kv": [1, 1, 1]}])
    with pytest.raises(RuntimeError, match="107040"):
        torch.npu.graph_task_update_end(graph.graph_dispatch_mode.update_stream)


def test_task_groups_by_hand() -> None:
    attention = Attention()
    out = [torch.empty_like(attention.q), torch.empty(0, device="npu")]
    fia = torch_npu.npu_fused_infer_attention_score.out
    handles = []

    def body() -> None:
        stream = torch.npu.current_stream()
        torch.npu.graph_task_group_begin(stream)
        fia(attention.q, attention.k, attention.v, **attention.options([1, 1]), workspace=None, out=out)
        handles.append(torch.npu.graph_task_group_end(stream))

    graph, _ = captured(body)
    side = torch.npu.Stream()
    with torch.npu.stream(side):
        torch.npu.graph_task_update_begin(side, handles[0])
        fia(attention.q, attention.k, attention.v, **attention.options([140, 60]), workspace=None, out=out)
        torch.npu.graph_task_update_end(side)
    graph.replay()
    assert torch.equal(out[0].cpu(), attention.run([140, 60]).cpu())
    with torch.npu.stream(side):
        torch.npu.graph_task_update_begin(side, handles[0])
        with pytest.raises(RuntimeError, match="107040"):
            attention.q + 1
        with pytest.raises(RuntimeError, match="107040"):
            torch.npu.graph_task_update_end(side)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (lambda x: x.sum().item(), "reads a value back"),
        (lambda x: x.cpu(), "pageable"),
        (lambda x: x.copy_(torch.ones(4)), "pageable"),
        (lambda x: torch.npu.synchronize(), "synchronisation"),
        (lambda x: torch.nonzero(x), "depends on values"),
        (lambda x: torch.rand(4, device="npu"), "capture mode"),
    ],
)
def test_what_cannot_be_captured(simulator: Simulator, body: Callable[[Tensor], Any], code: str) -> None:
    x = torch.ones(4, device="npu")
    with pytest.raises(RuntimeError) as caught:
        captured(lambda: body(x))
    assert code in f"{caught.value} {caught.value.__context__}"
    assert (x + 1).cpu().tolist() == [2] * 4  # and the device goes on
    graph, y = captured(lambda: x + 2)
    graph.replay()
    assert y.cpu().tolist() == [3] * 4


def test_side_streams_fork_and_join() -> None:
    x, side = torch.ones(2, device="npu"), torch.npu.Stream()

    def joined() -> Tensor:
        main = torch.npu.current_stream()
        side.wait_stream(main)
        with torch.npu.stream(side):
            y = x * 3
        main.wait_stream(side)
        return y + 1

    graph, z = captured(joined)
    x.fill_(2)
    graph.replay()
    assert z.cpu().tolist() == [7, 7]

    def left() -> None:
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            x * 3

    with pytest.raises(RuntimeError, match="107025"):
        captured(left)


def test_no_stream_is_left(simulator: Simulator) -> None:
    x = torch.ones(2, device="npu")
    before = simulator.cann.streams_left(0)
    simulator.faults.scarce_streams(0, 1)
    first, _ = captured(lambda: x + 1)
    with pytest.raises(RuntimeError, match="207008"):
        captured(lambda: x + 2)
    assert (x + 1).cpu().tolist() == [2, 2]
    first.reset()
    second, y = captured(lambda: x + 2)
    second.replay()
    assert y.cpu().tolist() == [3, 3]
    simulator.faults.scarce_streams(0, before)


def test_a_capture_ends_where_it_began() -> None:
    graph, stream = torch.npu.NPUGraph(), torch.npu.Stream()
    failures: list[str] = []
    with torch.npu.stream(stream):
        graph.capture_begin()

    def end() -> None:
        torch.npu.set_device(0)
        with torch.npu.stream(stream):
            try:
                graph.capture_end()
            except RuntimeError as error:
                failures.append(str(error))

    thread = threading.Thread(target=end)
    thread.start()
    thread.join()
    assert "107038" in failures[0]


def test_a_replay_after_its_input_was_freed(simulator: Simulator) -> None:
    # Larger than what is left of other tests' blocks: a block of its own, which goes when it does.
    held = [torch.empty(simulator.spec.memory // 2, dtype=torch.uint8, device="npu")[:64]]
    graph, _ = captured(lambda: held[0] + 1)
    graph.replay()
    held.clear()
    torch.npu.synchronize()
    torch.npu.empty_cache()
    with pytest.raises(RuntimeError, match="507015"):
        graph.replay()
    simulator.faults.clear()


def test_a_bad_slot_in_a_replay_breaks_the_device(simulator: Simulator) -> None:
    rows = torch.ones(1, 2, 16, dtype=BF16, device="npu")
    cache, other = (torch.zeros(2, PAGE, 2, 16, dtype=BF16, device="npu") for _ in range(2))
    slots = torch.tensor([200], dtype=torch.int32, device="npu")
    graph, _ = captured(lambda: torch_npu.npu_scatter_pa_kv_cache(rows, rows, cache, other, slots, cache_mode="Norm"))
    graph.replay()
    assert float(cache[1, 72].sum()) == 32
    slots.fill_(256)
    with pytest.raises(RuntimeError, match="507015"):
        graph.replay()
    simulator.faults.clear()


def test_graphs_share_a_pool() -> None:
    x = torch.ones(4, device="npu")
    large, a = captured(lambda: x * 2)
    small, b = captured(lambda: x[:2] * 3, pool=large.pool())
    large.replay()
    small.replay()
    assert a.cpu().tolist() == [2] * 4
    assert b.cpu().tolist() == [3] * 2


def test_a_failed_capture_leaves_its_stream_and_mode(simulator: Simulator) -> None:
    """torch_npu's own behaviour, when the begin or the end of a capture raises: the capture's stream stays the current
    one, and with auto_dispatch_capture the mode that catches attention stays on. Who goes on without a graph must put
    both back, or attention then waits for an event that nobody records."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as modes

    x, before, left = torch.ones(2, device="npu"), torch.npu.current_stream(), simulator.cann.streams_left(0)
    for scarce, body in ((True, lambda: x + 1), (False, lambda: x.sum().item())):
        graph = torch.npu.NPUGraph()
        if scarce:
            simulator.faults.scarce_streams(0, 0)
        with pytest.raises(RuntimeError), torch.npu.graph(graph, auto_dispatch_capture=True):
            body()
        simulator.faults.scarce_streams(0, left)
        assert torch.npu.current_stream() != before
        left_on = list(modes())
        graph.graph_dispatch_mode.__exit__(None, None, None)
        torch.npu.set_stream(before)
        assert left_on == [graph.graph_dispatch_mode]
    assert (x + 1).cpu().tolist() == [2, 2]
