"""The plan of faults: each happens once, where and when it was planned, and only where a program gave a plan."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from actors.engine.engine import Engine
from actors.faults import Fault, FaultInjector, FaultPlan, InjectedFault
from actors.options import ArgumentError, Arguments
from actors.protocol import RendererConfig, WorkerConfig

pytestmark = pytest.mark.usefixtures("warm_workers")


def test_a_fault_happens_at_its_time_and_once() -> None:
    with FaultPlan() as plan:
        one, other = FaultInjector(plan.path), FaultInjector(plan.path)
        plan.add(Fault("decode", "exception", nth=3))
        one.strike("prefill")
        one.strike("decode")
        one.strike("decode")
        other.strike("decode")  # a process counts for itself
        with pytest.raises(InjectedFault, match="decode"):
            one.strike("decode")
        one.strike("decode")
        other.strike("decode")
        other.strike("decode")
        assert plan.pending() == 0


def test_faults_of_one_stage_happen_in_their_order() -> None:
    with FaultPlan(Fault("decode", "memory"), Fault("decode", "exception", nth=2)) as plan:
        injector = FaultInjector(plan.path)
        with pytest.raises(MemoryError):
            injector.strike("decode")
        with pytest.raises(InjectedFault):
            injector.strike("decode")


async def test_only_the_task_that_passes_is_slow() -> None:
    with FaultPlan(Fault("stream", "slow", seconds=0.05)) as plan:
        began = time.monotonic()
        await FaultInjector(plan.path).strike_async("stream")
        assert time.monotonic() - began >= 0.05


def test_a_kill_is_of_the_victim() -> None:
    with FaultPlan(Fault("queue", "kill")) as plan:
        victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        FaultInjector(plan.path, lambda: victim.pid).strike("queue")
        assert victim.wait(60) == -9
        plan.add(Fault("queue", "kill"))
        FaultInjector(plan.path, lambda: None).strike("queue")


def test_what_is_no_fault_is_refused_and_what_did_not_happen_is_forgotten() -> None:
    with FaultPlan() as plan:
        for fault in (Fault("nowhere", "kill"), Fault("decode", "love"), Fault("decode", "kill", nth=0)):  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="no fault"):
                plan.add(fault)
        plan.add(Fault("decode", "exception"))
        plan.clear()
        FaultInjector(plan.path).strike("decode")
    assert not Path(plan.path).exists()


async def test_no_outsider_can_plan_a_fault(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No argument and no variable leads to the hook, and an engine that was given no plan has no injector anywhere."""
    with FaultPlan(Fault("decode", "kill")) as plan:
        for name in ("FAULTS", "TROUPE_FAULTS", "TROUPE_FAULT_PLAN"):
            monkeypatch.setenv(name, plan.path)
        with pytest.raises(ArgumentError):
            Arguments.from_keywords(model=str(tiny_model), faults=plan.path)
        assert not any("fault" in name and "default" not in name for name in Arguments.from_keywords().describe())
        async with Engine(model=str(tiny_model), max_total_tokens=1024, cpu_threads=1) as engine:
            actor_tree, system = engine._actor_tree, engine._system
            assert actor_tree is not None
            assert system is not None
            assert engine._injector is None
            for name in ("scheduler", "detokenizer"):
                assert system._cells[name].incarnation._actor._faults is None  # type: ignore[union-attr]
            assert actor_tree._setup.fault_plan == ""
            assert engine.generate("Once upon")._faults is None
        assert plan.pending() == 1
    fields = {struct: struct.__struct_defaults__[-1] for struct in (WorkerConfig, RendererConfig)}
    assert fields == {WorkerConfig: "", RendererConfig: ""}
