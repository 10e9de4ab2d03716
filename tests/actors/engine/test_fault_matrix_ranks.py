"""Faults of workers in every way of dividing a model. Whatever breaks: all workers are replaced together, once,
and each request goes on in the same tokens, with its adapter."""

from __future__ import annotations

import shutil
import signal
from collections.abc import AsyncIterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from actors.engine.engine import Engine
from actors.faults import Fault, FaultPlan, Kind
from actors.protocol.requests import SamplingParams
from tests.kits.adapters import adapted_modules, save_adapter
from tests.kits.engines import small_engine
from tests.kits.replicas import Answer, Request, outlives, tokens_of
from tests.kits.returned_values import make_sparse_model

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.long]

PARAMS = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
REQUESTS: list[Request] = [
    ("The lazy dog 0", None),
    *((f"The lazy dog {i}", name) for i, name in enumerate(("first", "other", "first"), start=1)),
    (list(range(30, 180)), None),
    ([7, 8, 9], "other"),
]
DIVIDED: dict[str, dict[str, Any]] = {
    "tensors": {"tp": 2},
    "experts": {"tp": 2, "enable_expert_parallel": True},
    "stages": {"pp": 2},
    "parts": {"tp": 2, "dp": 2, "enable_dp_attention": True},
    "parts-experts": {
        "tp": 2,
        "dp": 2,
        "enable_dp_attention": True,
        "enable_expert_parallel": True,
        "moe_a2a_backend": "deepep",
    },
}
SIGNALS = {"kill": signal.SIGKILL, "hang": signal.SIGSTOP}
FAULTS: dict[str, list[Kind | tuple[str, int]]] = {
    "tensors": ["exception", "device_memory", "link", ("kill", 0), ("hang", 1)],
    "experts": ["link", ("kill", 1)],
    "stages": ["exception", "link", ("kill", 1), ("hang", 0), ("hang", 1)],
    "parts": ["exception", "device_memory", "link", ("kill", 1), ("hang", 0)],
    "parts-experts": ["link", ("kill", 0), ("hang", 1)],
}
"""Of the first worker that decodes; or a signal and the worker that gets it."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sparse_model(tmp_path_factory.mktemp("sparse"))


@pytest.fixture(scope="module")
def paths(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder, modules = tmp_path_factory.mktemp("adapters"), adapted_modules(model, (".experts.",))
    return [f"{name}={save_adapter(folder / name, modules, seed)}" for seed, name in enumerate(("first", "other"))]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(model: Path, paths: list[str]) -> list[Answer]:
    async with small_engine(model, device="cpu", lora_paths=paths) as engine:
        return [await tokens_of(engine, prompt, PARAMS, adapter) for prompt, adapter in REQUESTS]


@pytest.fixture(scope="module")
def plan() -> FaultPlan:
    return FaultPlan()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(
    request: pytest.FixtureRequest, model: Path, paths: list[str], plan: FaultPlan
) -> AsyncIterator[Engine]:
    options = {"watchdog_timeout": 5.0, "max_worker_restarts": 100, "faults": plan, "lora_paths": paths}
    async with small_engine(model, device="cpu", **options, **DIVIDED[request.param]) as made:
        yield made


@pytest.mark.parametrize(
    ("engine", "fault"), [(each, fault) for each in DIVIDED for fault in FAULTS[each]], indirect=["engine"], ids=str
)
async def test_requests_go_on_after_a_fault(
    engine: Engine, plan: FaultPlan, undisturbed: list[Answer], fault: Kind | tuple[str, int]
) -> None:
    if isinstance(fault, tuple):
        await outlives(engine, plan, REQUESTS, PARAMS, undisturbed, (fault[1], SIGNALS[fault[0]]))
    else:
        await outlives(engine, plan, REQUESTS, PARAMS, undisturbed, Fault("decode", fault, nth=3))


@pytest.mark.skipif(PathFinder.find_spec("torch_npu") is None, reason="torch_npu is not installed")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="the NPU simulator needs gcc and nm (binutils)")
@pytest.mark.parametrize(
    ("divided", "operator"),
    [
        *(("stages", "lost@3"), ("parts", "lost@3"), ("experts", "lost@3")),
        *(("stages", "hang@1"), ("parts", "hang@1@hccl"), ("experts", "hang@1@hccl")),
    ],
)
async def test_requests_go_on_after_a_lost_or_hung_npu(
    model: Path, paths: list[str], monkeypatch: pytest.MonkeyPatch, divided: str, operator: str
) -> None:
    monkeypatch.setattr("actors.engine.configuration.OP_TIMEOUT_SECONDS", 6.0)
    options: dict[str, Any] = {"npu_simulator": "A2", "disable_cuda_graph": True, "cpu_threads": None, "page_size": 128}
    options["lora_paths"] = paths
    with FaultPlan() as plan:
        async with small_engine(model, watchdog_timeout=30.0, faults=plan, **options, **DIVIDED[divided]) as engine:
            undisturbed = [await tokens_of(engine, prompt, SHORT, adapter) for prompt, adapter in REQUESTS[:3]]
            fault = Fault("decode", "device", nth=3, operator=operator)
            await outlives(engine, plan, REQUESTS[:3], SHORT, undisturbed, fault)
