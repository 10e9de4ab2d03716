"""What a device does to its worker, on simulated NPUs: an error, a device that is lost or full, a collective that
hangs (a kernel that does: test_npu_engine). Each request goes on in the next worker, in the same tokens."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from actors.faults import Fault
from actors.protocol.requests import SamplingParams
from tests.kits.breaking import Rig, breakable
from tests.kits.waiting import PATIENCE, until

pytestmark = [
    pytest.mark.long,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        importlib.util.find_spec("torch_npu") is None, reason="torch_npu is not installed: pip install -e '.[npu-sim]'"
    ),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="the NPU simulator needs gcc and nm (binutils)"),
]

MODEL = Path(__file__).parents[3] / "app" / "understudy" / "model"
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = ["Once upon a time there was", list(range(100, 300)), "What is 3 plus 4?"]
FAULTS = [
    (1, [("prefill", "aicore@5", "507015"), ("decode", "lost@3", "507010"), ("prefill", "oom@1", "memory")]),
    (2, [("decode", "lost@3", "507010"), ("decode", "hang@1@hccl", "507048")]),
]
"""Devices, and one after the other the stage of a request, the fault, and what the log says of it."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    """On as many devices as the parameter says; one rig is closed before the next is made."""
    ranks = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("actors.engine.configuration.OP_TIMEOUT_SECONDS", 1.0 if ranks == 1 else 6.0)
        async with breakable(
            MODEL,
            patch,
            npu_simulator="A2",
            tp=ranks,
            standby_worker=ranks == 1,
            disable_cuda_graph=True,
            cpu_threads=None,
            chunked_prefill_size=64,
            watchdog_timeout=30.0,
        ) as made:
            yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(rig: Rig) -> list[dict[int, list[int]]]:
    return [(await rig.read(prompt, GREEDY)).tokens for prompt in PROMPTS]


async def outlives(rig: Rig, stage: str, operator: str, expected: list[dict[int, list[int]]]) -> None:
    assert await rig.engine.flush_cache()
    before = rig.restarts()
    (first, *more) = PROMPTS
    started = [rig.start(first, GREEDY)]
    await until(lambda: started[0][0].count >= 2, "it does not decode")
    rig.plan.add(Fault(stage, "device", nth=2, operator=operator))  # type: ignore[arg-type]
    started += [rig.start(prompt, GREEDY) for prompt in more]
    readings = await asyncio.wait_for(asyncio.gather(*(task for _, task in started)), PATIENCE)
    assert rig.plan.pending() == 0
    assert rig.restarts() > before
    assert [reading.error for reading in readings] == [None] * len(PROMPTS)
    assert [reading.tokens for reading in readings] == expected
    await rig.rest()
    rig.forgive()


@pytest.mark.parametrize(("rig", "faults"), FAULTS, indirect=["rig"], ids=["one", "two"])
async def test_a_device_fails(
    rig: Rig,
    undisturbed: list[dict[int, list[int]]],
    caplog: pytest.LogCaptureFixture,
    faults: list[tuple[str, str, str]],
) -> None:
    """Where there are two, the other rank waits in a collective, and is replaced with it."""
    for stage, operator, says in faults:
        caplog.clear()
        await outlives(rig, stage, operator, undisturbed)
        assert says in caplog.text
