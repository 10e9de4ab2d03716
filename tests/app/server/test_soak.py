"""A short soak on a real server: see tests/bench/soak.py for a long one."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.bench.soak import SERVER, slope, soak
from tests.kits.real_server import running
from tests.kits.waiting import blocking_until


@pytest.mark.long
async def test_after_rude_clients_and_a_killed_worker_nothing_is_left(tmp_path: Path) -> None:
    with running(tmp_path / "log", *SERVER, "--standby-worker") as server:
        children = psutil.Process(server.process.pid).children
        blocking_until(lambda: "worker-0 spare" in [child.name() for child in children()], "no standby")
        ledger, before, after, problems = await soak(
            server.url, server.process.pid, seconds=9, warm_up=2, clients=24, kill_every=4, seed=7
        )
        assert problems == []
        assert ledger.kills
        kinds = {outcome.partition(":")[0] for outcome in ledger.ended}
        assert kinds == {"stream", "whole", "slow", "hang up", "hang up early", "abort", "bad"}
        assert ledger.ended["stream: complete"]
        assert after.memory - before.memory < 64
        assert server.stop() == 0


def test_the_slope_of_memory_is_that_of_the_second_half() -> None:
    growing = [(float(second), 100 + second / 30) for second in range(600)]
    assert slope(growing) == pytest.approx(2.0)
    levelling = [(float(second), min(100.0 + second, 250.0)) for second in range(600)]
    assert slope(levelling) == pytest.approx(0.0)
    assert slope([]) == slope([(0.0, 1.0)]) == 0.0
